"""What the tests of the seam run in workers: a tiny model on Megatron's real DDP, stock or compressed."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import logging
import sys
from typing import Any

import numpy as np
from coded_values import coded_values
from packaging.version import Version
from simulation.agreement import Agreement
from simulation.loco_float64 import LoCoSimulation, block_labels
from with_megatron.tiny_model import build

import megatron_patch

REPLICATED = {"ddp": {"use_distributed_optimizer": False}, "optimizer": {"use_distributed_optimizer": False}}
SEVERAL = {"overlap": True, "bucket_size": 300}
MIXED = {"dtypes": ("float32", "bfloat16"), "grad_reduce_in_fp32": False, "single_group": True}


def core_before(release: str) -> bool:
    """Whether the installed megatron-core is older, without importing it."""
    return Version(importlib.metadata.version("megatron-core")) < Version(release)


def detached(folder: str, module: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """What a function of a module in `folder` returns; nothing is attached afterwards."""
    sys.path.insert(0, folder)
    try:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)
    finally:
        megatron_patch.disable()


def attachment_of(chunk: Any) -> Any:
    """What `attach` has put on a chunk; only a worker has imported Megatron."""
    from megatron_patch.megatron import attach

    return attach.attachment_of(chunk)


def session_of(chunk: Any) -> Any:
    """The chunk's session, or None."""
    from megatron_patch.megatron import attach

    return attach.session_of(chunk)


def leaves_of(optimizer: Any) -> Any:
    """The optimizers of a chain, part by part."""
    from megatron_patch.megatron.seams import optimizer_step

    return optimizer_step.leaves_of(optimizer)


def attach(chunks: Any, options: dict[str, Any]) -> Any:
    """Attach LoCo from the first step on, unless `options` say otherwise; the last chunk's session."""
    config = megatron_patch.CompressionConfig(**{"method": "loco", "start_step": 0} | options)
    megatron_patch.attach(chunks, config)
    return session_of(chunks[-1])


def built(model: dict[str, Any], compression: dict[str, Any] | None) -> tuple[Any, Any]:
    """(tiny model, its session); `compression` None is stock Megatron."""
    tiny = build(**model)
    return tiny, None if compression is None else attach([tiny.ddp], compression)


def refusal(function: Any, *arguments: Any) -> str:
    """What a UserError says that a call raises, and "" without one."""
    try:
        function(*arguments)
    except megatron_patch.UserError as error:
        return str(error)
    return ""


def events_of(session: Any) -> dict[str, int]:
    """The steps that count, and what else happened."""
    return {"steps": session.ledger.steps, **dataclasses.asdict(session.ledger.events)}


def errors_of(compressor: Any) -> list[Any]:
    """decode(e) of every bucket, flat."""
    return [coded_values(s.layout, s.error.decode()) for s in compressor.senders]


def labels_of(tiny: Any, block_size: int = 128) -> list[Any]:
    """Which block each element of each bucket is in (simulation.loco_float64.block_labels)."""
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


def note(report: dict[str, Any], tiny: Any, session: Any, gradients: list[Any], shards: list[Any]) -> None:
    """Add an exchange to a report for `compare`: what went in, what came out, and the errors after it."""
    report.setdefault("labels", labels_of(tiny))
    parts = {"gradients": scaled(tiny, gradients), "shards": shards, "errors": errors_of(session)}
    for name, value in parts.items():
        report.setdefault(name, []).append(value)


def compare(reports: list[dict[str, Any]], numbers: range, late: bool = False, **options: Any) -> None:
    """Compare the noted exchanges of these numbers with the simulation, each of them as one step.

    With `late` a reset shows with the next exchange only.
    """
    interval = options.get("reset_interval", 0)
    for bucket, labels in enumerate(reports[0]["labels"]):
        agreement = Agreement(LoCoSimulation(len(reports), len(labels), labels=labels, **options))
        agreement.simulation.steps = numbers[0]
        for number in numbers:
            gradients, errors, shards = (
                np.stack([report[name][number][bucket].numpy() for report in reports])
                for name in ("gradients", "errors", "shards")
            )
            agreement.exchange(gradients, shards=shards)
            agreement.end_step(errors=None if late and (number + 1) % interval == 0 else errors)


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
    tiny, compressor = built(model, compression)
    shards = [tiny.step(tiny.random_gradients(step)) for step in range(steps)]
    report = {"shards": shards, "weights": tiny.weights()}
    if compressor is not None:
        report["events"] = events_of(compressor)
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
