"""Soak test: a run that is killed again and again must end as if nothing had happened.

    python -m tests.soak --kills 50

A tiny LLaMA is trained once undisturbed. Then it is trained again, as often as it takes, while its ranks are
killed with SIGKILL: at random moments, and at moments that are aimed at: in a gradient exchange, in an
optimizer step, at each stage of a save. All ranks are started again after each kill (`launch.max_restarts`);
now and then restarts run out, and the run goes on by `--resume`. Every disturbed run must have the
undisturbed one's losses and gradient norms, bit for bit, in a metrics.jsonl with every step once, and the
same numbers in its last checkpoint.

`script.py` is what the ranks run in the place of pretrain_gpt.py, `board.py` what they share with the
harness, `harness.py` starts the runs, `comparison.py` compares them, `__main__.py` prints what happened.
"""
