"""The commands of `megatron-loco`.

A mistake of the user's is a UserError, whose message says all of it; docstrings do not list these errors.
"""
