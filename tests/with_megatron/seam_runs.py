"""What the tests of the seam run in workers: a tiny model on Megatron's real DDP, stock or compressed."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import Any

import numpy as np

RANKS = 4
SEVERAL = {"overlap": True, "bucket_size": 300}
MANY = {"overlap": True, "bucket_size": 100}


def built(
    model: dict[str, Any], compression: dict[str, Any] | None, attached: bool = True
) -> tuple[Any, Any]:
    """(tiny model, its compressor); `compression` None is stock Megatron."""
    from with_megatron.tiny_model import build

    import megatron_patch
    from megatron_patch.megatron.attach import session_of

    tiny = build(**model)
    if compression is None:
        return tiny, None
    if attached:
        megatron_patch.attach(
            [tiny.ddp], megatron_patch.CompressionConfig(**{"method": "loco", "start_step": 0} | compression)
        )
    return tiny, session_of(tiny.ddp)


def errors_of(compressor: Any) -> list[Any]:
    """decode(e) of every bucket, flat."""
    from coded_values import coded_values

    return [coded_values(s.layout, s.error.decode()) for s in compressor.senders]


def labels_of(tiny: Any, block_size: int = 128) -> list[Any]:
    """Which block each element of each bucket is in (simulation.loco_float64.block_labels)."""
    from simulation.loco_float64 import block_labels

    return [
        block_labels(
            bucket.grad_data.numel(),
            [(start, tuple(parameter.shape)) for parameter, (start, _) in bucket.param_to_index.items()],
            block_size,
        )
        for bucket in tiny.buckets
    ]


def any_error(compressor: Any) -> bool:
    return any(bool(error.any()) for error in errors_of(compressor))


def scaled(tiny: Any, gradients: list[Any]) -> list[Any]:
    """What enters the exchange of each bucket."""
    buckets = tiny.in_buckets(gradients)
    return [g * b.gradient_scaling_factor for g, b in zip(buckets, tiny.buckets, strict=True)]


@contextlib.contextmanager
def rerunning() -> Any:
    """Megatron's rerun state machine as it is while a backward pass runs again."""
    from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

    machine = get_rerun_state_machine()
    before = machine.state
    machine.state = RerunState.RERUNNING_IN_PLACE
    try:
        yield
    finally:
        machine.state = before


@contextlib.contextmanager
def logged() -> Any:
    """The messages that megatron_patch logs in the block."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(f"{record.levelname}: {record.getMessage()}")

    handler, logger = Handler(), logging.getLogger("megatron_patch")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def trained(model: dict[str, Any], compression: dict[str, Any] | None, steps: int = 5) -> dict[str, Any]:
    """Shards of every step and the weights after the last."""
    import megatron_patch

    tiny, compressor = built(model, compression)
    shards = [tiny.step(tiny.random_gradients(step)) for step in range(steps)]
    report = {"shards": shards, "weights": tiny.weights()}
    if compressor is not None:
        report["events"] = {"steps": compressor.ledger.steps, **dataclasses.asdict(compressor.ledger.events)}
        report["bits"] = compressor.report.traffic.bits_per_element
    megatron_patch.disable()
    return report


def same(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two `trained` runs agree bit for bit."""
    pairs = [
        (a, b)
        for x, y in zip(mine["shards"], theirs["shards"], strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    pairs.append((mine["weights"], theirs["weights"]))
    return all(np.array_equal(a.float().numpy(), b.float().numpy()) for a, b in pairs)
