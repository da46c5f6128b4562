"""The commands of `megatron-loco`.

A mistake of the user's raises a UserError whose message explains it; docstrings do not list these errors.
"""
