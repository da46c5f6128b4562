"""What test_resume.py has Megatron's engine run: every case whole, and again from the middle.

NAME trains STEPS steps and saves after half of them, and at the end; NAME-resumed loads what was saved in
the middle. 40 steps and 20 for the first case, 8 and 4 for the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from workflows.engine_runs import EXPERTS, OVERLAP, PARALLEL, UNTIED, Run

LOCO = ["--compression-method", "loco", "--compression-bits", "4"]
ONEBIT = ["--compression-method", "onebit_adam", "--compression-warmup-steps"]
EXACT = ["--compression-weight-gather", "exact"]
DISTRIBUTED = ("--use-distributed-optimizer",)
REPLICATED = [*UNTIED, "--overlap-grad-reduce"]
GATHERED = [*OVERLAP, "--overlap-param-gather"]
TWO_INSTANCES = [*OVERLAP, "--num-distributed-optimizer-instances", "2"]
BETWEEN = [*GATHERED, "--num-distributed-optimizer-instances", "2"]
# Where the run saves, after 4 steps, the exchange of the first of two turns is under way.
OUTER = ["--compression-outer-interval", "6", "--compression-outer-delay", "3"]
OUTER += ["--compression-outer-momentum", "0.9"]
MUON = ["--optimizer", "muon", "--bf16"]
FP16 = [*UNTIED, "--fp16", "--initial-loss-scale", "65536", "--loss-scale-window", "3"]

CASES: dict[str, tuple[Run, int]] = {
    "dense": (Run(OVERLAP, [*LOCO, "--compression-reset-interval", "17"]), 40),
    "dense-bf16": (Run([*UNTIED, "--bf16"], [*LOCO, "--compression-error-dtype", "bf16"]), 8),
    "dense-fp16": (Run(FP16, LOCO), 8),
    "experts-bf16": (Run([*EXPERTS, "--bf16", "--overlap-grad-reduce"], LOCO, ranks=4), 8),
    "parallel": (Run(PARALLEL, ["--compression-method", "error_feedback"], ranks=8), 8),
    "two-instances": (Run(TWO_INSTANCES, LOCO, ranks=4), 8),
    "outer-steps": (
        Run(
            [*BETWEEN, "--bf16"],
            [*LOCO, *EXACT, *OUTER],
            ranks=4,
        ),
        8,
    ),
    "two-hops": (Run(OVERLAP, [*LOCO, "--compression-ranks-per-node", "2"], ranks=4), 8),
    "replicated": (Run(REPLICATED, LOCO, without=DISTRIBUTED), 8),
    "sgd": (Run([*REPLICATED, "--optimizer", "sgd", "--ckpt-format", "torch"], LOCO, without=DISTRIBUTED), 8),
    "late": (Run(ours=["--compression-method", "naive", "--compression-start-step", "6"]), 8),
    "onebit": (Run(OVERLAP, [*ONEBIT, "2"]), 8),
    "onebit-replicated-bf16": (Run([*REPLICATED, "--bf16"], [*ONEBIT, "6"], without=DISTRIBUTED), 8),
    "exact-gather": (Run([*GATHERED, "--bf16"], [*LOCO, *EXACT]), 8),
    "muon": (Run([*GATHERED, *MUON], [*LOCO, *EXACT]), 8),
    "muon-experts": (Run([*EXPERTS, *MUON], LOCO, ranks=4), 8),
    "muon-no-layout": (Run([*OVERLAP, *MUON, "--no-use-layer-wise-param-layout"], LOCO), 8),
    "async": (Run([*OVERLAP, "--async-save"], LOCO), 8),
    # With the distributed optimizer Megatron cannot load this format without Apex or Transformer Engine.
    "legacy-format": (Run([*UNTIED, "--ckpt-format", "torch"], LOCO, without=DISTRIBUTED), 8),
}
SLOW = (
    "dense-bf16",
    "parallel",
    "two-instances",
    "replicated",
    "late",
    "onebit",
    "muon-experts",
    "muon-no-layout",
)
"""Cases whose parts the others and the tests on the pool have too: `make test-slow` runs them."""
SWITCHES = {
    "to-2-bits": ["--compression-bits", "2", "--compression-rotation", "none"],
    "to-error-feedback": ["--compression-method", "error_feedback"],
    "to-none": ["--compression-method", "none"],
    "to-stock": None,
    "finetuned": [*LOCO, "--finetune"],
}


def resumed(cases: Iterable[str]) -> dict[str, Run]:
    """For each case a run that saves in the middle, and one that goes on from there."""
    runs = {}
    for name in cases:
        run, steps = CASES[name]
        flags = [*run.flags, "--train-iters", str(steps), "--save-interval", str(steps // 2)]
        whole = [*flags, "--save", f"{{out}}/{name}/checkpoints"]
        again = [*flags, "--save", f"{{out}}/{name}-resumed/checkpoints"]
        again += ["--load", f"{{out}}/{name}/checkpoints", "--ckpt-step", str(steps // 2)]
        runs[name] = dataclasses.replace(run, flags=whole)
        runs[f"{name}-resumed"] = dataclasses.replace(run, flags=again, after=name)
    return runs


def _runs() -> dict[str, Run]:
    runs = resumed(name for name in CASES if name not in SLOW)
    source = ["--load", "{out}/dense/checkpoints", "--ckpt-step", "20", "--train-iters", "40"]
    source += ["--exit-interval", "24"]
    for name, ours in SWITCHES.items():
        runs[name] = Run([*OVERLAP, *source], ours, after="dense")
    runs["to-4-ranks"] = Run([*OVERLAP, *source], LOCO, ranks=4, after="dense")
    source = [*GATHERED, "--bf16", "--load", "{out}/exact-gather/checkpoints", "--ckpt-step", "4"]
    source += ["--train-iters", "8", "--eval-interval", "2", "--save-interval", "8"]
    for name, ours in (("exact", [*LOCO, *EXACT]), ("stock", LOCO)):
        four = [*source, "--save", f"{{out}}/{name}-4/checkpoints"]
        runs[f"{name}-4"] = Run(four, ours, ranks=4, after="exact-gather")
    return runs


RUNS = _runs()
