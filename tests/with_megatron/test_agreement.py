"""What ranks find by themselves and a collective depends on: they agree on it, and none waits for another."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from with_megatron.seam_runs import built, errors_of, session_of
from with_megatron.tiny_model import build

import megatron_patch

REPLICATED = {"ddp": {"use_distributed_optimizer": False}}
RATES = [1e-4, 2e-4, 3e-4, 3e-4, 3e-4, 3e-4]


def with_one_owner(start: Any) -> dict[str, Any]:
    """In a worker: rank 0 alone has an optimizer, and sends its weights to the others."""
    tiny, state = built(REPLICATED, {"start_step": start})
    owner = dist.get_rank() == 0
    optimizer = None
    if owner:
        for parameter in tiny.parameters:
            parameter.grad = parameter.main_grad
        optimizer = torch.optim.SGD(tiny.parameters, lr=1.0)
    sent = []
    for step, rate in enumerate(RATES):
        before = state.ledger.events.uncompressed_syncs
        tiny.exchange(tiny.random_gradients(step))
        sent.append(state.ledger.events.uncompressed_syncs == before)
        if optimizer is not None:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        for parameter in tiny.parameters:
            dist.broadcast(parameter.data, 0)
    return {"compressed": sent, "weights": tiny.weights().tolist()}


@pytest.mark.parametrize(("start", "first"), [("auto", 4), (2, 2)])
def test_ranks_without_parameters_start_with_those_that_have_them(pool: Any, start: Any, first: int) -> None:
    reports = pool.run(with_one_owner, start, world_size=3)
    for report in reports:
        assert report["compressed"] == [step >= first for step in range(len(RATES))]
        assert report["weights"] == reports[0]["weights"]


def saved_by_some(folder: str) -> dict[str, Any]:
    """In a worker of 2: rank 0's model is attached, and not rank 1's; both call state_dict."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tiny = build()
    attached = dist.get_rank() == 0
    if attached:
        megatron_patch.attach(tiny.ddp, megatron_patch.CompressionConfig(start_step=0))
        session_of(tiny.ddp).ledger.steps = 7
    state = megatron_patch.state_dict(tiny.ddp)
    dcp.save({"compression": state}, checkpoint_id=folder)
    if attached:
        session_of(tiny.ddp).restart(0)
    room = megatron_patch.state_dict(tiny.ddp, reader=dcp.FileSystemReader(folder))
    dcp.load({"compression": room}, checkpoint_id=folder)
    megatron_patch.load_state_dict(tiny.ddp, room)
    return {"saved": bool(state), "steps": session_of(tiny.ddp).ledger.steps if attached else None}


def test_ranks_without_an_attached_model_save_with_the_others(pool: Any, tmp_path: Path) -> None:
    first, second = pool.run(saved_by_some, str(tmp_path / "checkpoint"), world_size=2)
    assert first["saved"]
    assert first["steps"] == 7
    assert not second["saved"]


def loaded_reference() -> dict[str, Any]:
    """In a worker: a trainer loads a reference model into the same chunks, without an optimizer."""
    import megatron.training

    from megatron_patch.megatron.checkpoint import training_loop

    tiny, state = built({}, {"bits": 2})
    for step in range(3):
        tiny.step(tiny.random_gradients(step))
    before = [error.clone() for error in errors_of(state)]
    counted = state.ledger.steps, state.ledger.steps_seen, state.ledger.onset.started

    def load_checkpoint(ddp_model: Any, optimizer: Any, load_arg: str = "load") -> tuple[int, int]:
        return 900, 0

    flags = SimpleNamespace(load=None, finetune=False, no_load_optim=False)
    with mock.patch.object(megatron.training, "get_args", return_value=flags):
        training_loop._load_checkpoint(load_checkpoint, [tiny.ddp], None)
    return {
        "same": all(bool((a == b).all()) for a, b in zip(before, errors_of(state), strict=True)),
        "counted": counted == (state.ledger.steps, state.ledger.steps_seen, state.ledger.onset.started),
    }


def test_a_load_without_an_optimizer_leaves_errors_and_counters(pool: Any) -> None:
    for found in pool.run(loaded_reference, world_size=2):
        assert found == {"same": True, "counted": True}
