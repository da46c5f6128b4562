"""What ranks find by themselves and a collective depends on: they agree on it, and none waits for another."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from with_megatron.seam_runs import built, errors_of, logged

REPLICATED = {"ddp": {"use_distributed_optimizer": False}}
RATES = [1e-4, 2e-4, 3e-4, 3e-4, 3e-4, 3e-4]


def with_one_owner(start: Any) -> dict[str, Any]:
    """In a worker: rank 0 alone has an optimizer, and sends its weights to the others."""
    import torch
    import torch.distributed as dist

    import megatron_patch

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
    found = {"compressed": sent, "weights": tiny.weights().tolist()}
    megatron_patch.disable()
    return found


@pytest.mark.parametrize(("start", "first"), [("auto", 4), (2, 2)])
def test_ranks_without_parameters_start_with_those_that_have_them(pool: Any, start: Any, first: int) -> None:
    reports = pool.run(with_one_owner, start, world_size=3)
    for report in reports:
        assert report["compressed"] == [step >= first for step in range(len(RATES))]
        assert report["weights"] == reports[0]["weights"]


def with_unlike_nodes() -> list[str]:
    """In a worker of 4: the user gives ranks unlike numbers of ranks on a node."""
    import torch.distributed as dist

    import megatron_patch

    with logged() as lines:
        tiny, _ = built({}, {"ranks_per_node": 2 if dist.get_rank() < 2 else 1})
        tiny.step(tiny.random_gradients(0))
    megatron_patch.disable()
    return list(lines)


def test_unlike_ranks_per_node_are_one_hop_everywhere(pool: Any) -> None:
    first, *_ = pool.run(with_unlike_nodes, world_size=4)
    (line,) = [line for line in first if "one hop" in line]
    assert "(1, 2)" in line
    assert "same ranks_per_node" in line


def saved_by_some(folder: str) -> dict[str, Any]:
    """In a worker of 2: rank 0's model is attached, and not rank 1's; both call state_dict."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from megatron.core import parallel_state
    from with_megatron.tiny_model import build

    import megatron_patch
    from megatron_patch.megatron.attach import session_of

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
    found = {"saved": bool(state), "steps": session_of(tiny.ddp).ledger.steps if attached else None}
    megatron_patch.disable()
    return found


def test_ranks_without_an_attached_model_save_with_the_others(pool: Any, tmp_path: Path) -> None:
    first, second = pool.run(saved_by_some, str(tmp_path / "checkpoint"), world_size=2)
    assert first["saved"]
    assert first["steps"] == 7
    assert not second["saved"]


def saved_unseen() -> tuple[float, float]:
    """In a worker: an optimizer that nobody sees; its loop gives ours the Megatron optimizer all the same."""
    import megatron_patch

    tiny, state = built({}, {"bits": 2})
    for step in range(3):
        tiny.exchange(tiny.random_gradients(step))
    before = float(sum(abs(error).sum() for error in errors_of(state)))
    saved = megatron_patch.state_dict(tiny.ddp, tiny.optimizer)
    megatron_patch.load_state_dict(tiny.ddp, saved, tiny.optimizer)
    after = float(sum(abs(error).sum() for error in errors_of(state)))
    megatron_patch.disable()
    return before, after


def test_an_optimizer_that_was_not_seen_costs_no_errors(pool: Any) -> None:
    for before, after in pool.run(saved_unseen, world_size=2):
        assert before > 0
        assert after == before


def loaded_reference() -> dict[str, Any]:
    """In a worker: a trainer loads a reference model into the same chunks, without an optimizer."""
    import megatron.training

    import megatron_patch
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
    found = {
        "same": all(bool((a == b).all()) for a, b in zip(before, errors_of(state), strict=True)),
        "counted": counted == (state.ledger.steps, state.ledger.steps_seen, state.ledger.onset.started),
    }
    megatron_patch.disable()
    return found


def test_a_load_without_an_optimizer_leaves_errors_and_counters(pool: Any) -> None:
    for found in pool.run(loaded_reference, world_size=2):
        assert found == {"same": True, "counted": True}


def lines_after(how: str) -> list[str]:
    """In a worker: the log of a run from its third step on, resumed after that step or as it was."""
    import megatron_patch

    tiny, state = built({}, {"start_step": 2})
    for step in range(3):
        tiny.step(tiny.random_gradients(step))
    saved = megatron_patch.state_dict(tiny.ddp, tiny.optimizer)
    if how == "resumed":
        megatron_patch.load_state_dict(tiny.ddp, saved, tiny.optimizer)
    with logged() as lines:
        tiny.step(tiny.random_gradients(3))
    assert state.report.compressed
    megatron_patch.disable()
    return list(lines)


def test_a_resumed_run_does_not_say_that_compression_starts(pool: Any) -> None:
    for how in ("undisturbed", "resumed"):
        for lines in pool.run(lines_after, how, world_size=2):
            assert not [line for line in lines if "compression starts" in line]
