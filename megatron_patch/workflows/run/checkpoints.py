"""Where a run's checkpoints are: Megatron's own, in FOLDER/checkpoints/iter_0000050 or below megatron.save.

Everything that saves, loads, resumes or asks how far a run has come gets the folder from here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_patch.errors import UserError
from megatron_patch.megatron.checkpoint import tracker
from megatron_patch.workflows.run.configuration import RunConfig


def place(run: RunConfig, folder: Path) -> Path:
    """Where `run`, in `folder`, saves its checkpoints, and resumes from."""
    return Path(str(run.megatron.get("save") or folder / "checkpoints"))


def latest_step(checkpoints: Path) -> int | None:
    """The step of the checkpoint below `checkpoints` that Megatron would load, None if there is none.

    It repairs the tracker file, so the caller must hold the run's folder (only_one.py).
    """
    tracker.repair(checkpoints)
    return tracker.latest(checkpoints)


def refuse_other_checkpoints(run: RunConfig, folder: Path, *, started_again: bool = False) -> None:
    """See that a start of `run` which finds checkpoints of its own would load them.

    Args:
        started_again: the same command will be given again, whether there are checkpoints yet or not.
    """
    own = place(run, folder)
    load, finetune = run.megatron.get("load"), run.megatron.get("finetune")
    key = "load" if load and Path(str(load)).resolve() != own.resolve() else "finetune" if finetune else None
    if key is None:
        return
    restarts = run.launch.max_restarts and run.megatron.get("save_interval") is not None
    if tracker.latest(own) is not None:
        raise UserError(
            f"megatron.{key}: {run.megatron[key]!r}: the run in {folder} resumes from checkpoints of its "
            f"own; leave it out: megatron.{key}=null"
        )
    if started_again or restarts:
        cause = "--resume-or-start" if started_again else f"launch.max_restarts={run.launch.max_restarts}"
        raise UserError(
            f"megatron.{key}: {run.megatron[key]!r} would hold for every restart too ({cause}), in place of "
            "the run's own checkpoints; to begin with other weights use megatron.pretrained_checkpoint=DIR"
        )


def check_restartable(run: RunConfig, folder: Path) -> None:
    """See that a job that a scheduler stops and starts again, by the same command, comes to its end."""
    if run.megatron.get("save_interval") is None:
        raise UserError(
            "megatron.save_interval: not set, so a job that is stopped and started again would begin at "
            "step 0 every time; set it (megatron.save_interval=STEPS), or leave --resume-or-start out"
        )
    refuse_other_checkpoints(run, folder, started_again=True)


def refuse_shared(runs: Iterable[RunConfig]) -> None:
    """See that several runs do not save into one folder."""
    for run in runs:
        if run.megatron.get("save"):
            raise UserError(
                f"megatron.save: {run.megatron['save']!r}: several runs would save there; each has a folder "
                "of its own below --out: megatron.save=null"
            )
