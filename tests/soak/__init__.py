"""Soak test: a run that is killed again and again must end as if nothing had happened.

    python -m tests.soak --kills 50

A tiny LLaMA is trained once undisturbed, then again while ranks are killed with SIGKILL, at random moments
and in an exchange, an optimizer step, each stage of a save. The launcher starts them again, or `--resume`
does. Every disturbed run must have the undisturbed one's losses and gradient norms, bit for bit, in a
metrics.jsonl with every step once, and the same numbers in its last checkpoint.
"""
