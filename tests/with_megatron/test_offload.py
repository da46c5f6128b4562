"""What `offload` moves to host memory comes back bit for bit: a run goes on as the one that kept it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from coded_values import flat_error
from with_megatron.checkpoint.whole_checkpoints import read, write
from with_megatron.gpt_model import GATHERED, build
from with_megatron.seam_runs import attach, refusal

import megatron_patch

CASES: dict[str, dict[str, Any]] = {
    "exact gather": {"method": "loco", "start_step": 0, "weight_gather": "exact"},
    "onebit_adam": {"method": "onebit_adam", "warmup_steps": 2},
    "none": {"method": "none", "weight_gather": "exact"},
    "gather on its way": {"method": "loco", "start_step": 0, "weight_gather": "exact"},
    "outer steps": {"method": "none", "outer_interval": 2, "outer_momentum": 0.9},
    "an outer step on its way": {"method": "loco", "start_step": 0, "outer_interval": 4, "outer_delay": 3},
}


def trained(case: str, offloads: str) -> tuple[list[float], list[tuple[int, int]]]:
    """In a worker: six steps; after some of them all is moved away and asked for, or needed, again.

    Returns the losses, and (bytes on the device with it, without it) of each time.
    """
    on_its_way = case == "gather on its way"
    gpt = build(dtype="bf16", ddp=GATHERED if on_its_way else {}, instances=2 if "outer" in case else 1)
    megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(**CASES[case]))
    held = []
    for step in range(6):
        gpt.step(step)
        if offloads != "never" and step in (1, 3, 4):
            before = megatron_patch.report(gpt.chunks).device_bytes
            if on_its_way:
                gpt.chunks[0].bucket_groups[-1].start_param_sync()
            megatron_patch.offload(gpt.chunks)
            held.append((before, megatron_patch.report().device_bytes))
            if offloads == "and reloads":
                megatron_patch.reload()
    gpt.gather()
    weights = [float(parameter.double().sum()) for parameter in gpt.parameters.values()]
    return [*gpt.losses, *weights], held


@pytest.mark.parametrize(
    ("case", "offloads"), [*((case, "alone") for case in CASES), ("exact gather", "and reloads")]
)
def test_a_run_goes_on_as_if_nothing_had_been_moved(pool: Any, case: str, offloads: str) -> None:
    """Without `reload` too: what needs it first brings it back."""
    stayed = pool.run(trained, case, "never", world_size=2)
    moved = pool.run(trained, case, offloads, world_size=2)
    for (losses, _), (again, held) in zip(stayed, moved, strict=True):
        assert losses == again
        for with_it, without in held:
            assert with_it > 5_000
            assert without == 0 or ("on its way" in case and without < with_it / 2)


def saved_while_away(folder: str) -> tuple[bool, str]:
    """In a worker: whether a checkpoint that is written meanwhile has the errors; a refusal within a step."""
    gpt = build()
    session = attach(gpt.chunks, {})
    gpt.backward(0)
    refused = refusal(megatron_patch.offload, gpt.chunks)
    gpt.update()
    before = [flat_error(sender.error).clone() for sender in session.senders]
    megatron_patch.offload(gpt.chunks)
    write(gpt, Path(folder))
    session.clear_errors()
    read(gpt, Path(folder))
    same = all(torch.equal(a, flat_error(s.error)) for a, s in zip(before, session.senders, strict=True))
    return same and all(bool(error.any()) for error in before), refused


def test_a_checkpoint_has_what_lies_in_host_memory(pool: Any, tmp_path: Path) -> None:
    for same, refused in pool.run(saved_while_away, str(tmp_path / "checkpoint"), world_size=2):
        assert same
        assert "call it between steps" in refused
