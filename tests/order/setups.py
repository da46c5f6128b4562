"""Megatron's seams, and torch's DDP and FSDP2, on a recording GPU, rank after rank in one process.

A rank's process groups are torch's fake ones, so that one process is each of the job's ranks in turn. It
builds a tiny model, attaches compression, and trains some steps; what its streams and collectives did is
returned.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from order import torch_setups
from order.gpu import recording
from order.ranks import circle, disagreements
from order.recorded_collectives import Recorder, recorded
from torch.testing._internal.distributed.fake_pg import FakeStore
from with_megatron import tiny_model
from worker_pool import _tear_down

import megatron_patch

RANKS = 8
STEPS = 3

SEVERAL = {"overlap": True, "bucket_size": 300}
TWO_HOPS = {"topology": "two_hop", "ranks_per_node": 4}
EXPERTS = {"experts": (1, 3), "expert_parallel": 2}
ONEBIT = {"method": "onebit_adam", "bits": 1, "warmup_steps": 1}
REPLICATED = {"ddp": {"use_distributed_optimizer": False}}
WEIGHTS = {"dtypes": ("bfloat16",), "grad_reduce_in_fp32": False}


@dataclass(frozen=True)
class Setup:
    """A model, how it is compressed, and how it is trained."""

    model: dict[str, Any] = field(default_factory=dict)
    compression: dict[str, Any] = field(default_factory=dict)
    chunks: int = 1
    """Model chunks: all but the first are one bucket group, as in an interleaved schedule."""
    gathers_overlap: bool = False
    layers: int = 1
    """So many times tiny_model's parameters."""
    steps: int = STEPS
    wrapper: str = ""
    """Of a model without Megatron: "ddp" or "fsdp2", with `replicas` (torch_setups.py)."""
    replicas: int = 1


SETUPS = {
    "flat": Setup(SEVERAL, {"reset_interval": 2}),
    "flat, not overlapped": Setup({}),
    "flat in bf16": Setup(SEVERAL | WEIGHTS),
    "two hops": Setup(SEVERAL, TWO_HOPS),
    "two hops, not overlapped": Setup({}, TWO_HOPS),
    "two instances": Setup(SEVERAL | {"instances": 2}),
    "two instances, not overlapped": Setup({"instances": 2}),
    "outer steps": Setup(SEVERAL | {"instances": 2}, {"outer_interval": 2}),
    "outer steps of experts in turns": Setup(
        SEVERAL | WEIGHTS | EXPERTS | {"instances": 2},
        {"weight_gather": "exact", "outer_interval": 6, "outer_delay": 2},
        gathers_overlap=True,
        steps=7,
    ),
    "experts": Setup(SEVERAL | EXPERTS),
    "experts in many buckets": Setup(
        {"overlap": True, "bucket_size": 10, "experts": (1, 3, 5, 7, 9), "expert_parallel": 2}, layers=3
    ),
    "experts in two hops": Setup(SEVERAL | EXPERTS, TWO_HOPS | {"ranks_per_node": 2}),
    "replicated": Setup(SEVERAL | REPLICATED),
    "replicated in two hops": Setup(SEVERAL | REPLICATED, TWO_HOPS),
    "virtual pipeline chunks": Setup(SEVERAL, chunks=2),
    "weight gather": Setup(WEIGHTS | {"overlap": True, "bucket_size": 300}, {"weight_gather": "exact"}),
    "weight gather, overlapped": Setup(SEVERAL | WEIGHTS, {"weight_gather": "exact"}, gathers_overlap=True),
    "weight gather of experts, overlapped": Setup(
        SEVERAL | WEIGHTS | EXPERTS, {"weight_gather": "exact"}, gathers_overlap=True
    ),
    "weight gather of chunks": Setup(SEVERAL | WEIGHTS, {"weight_gather": "exact"}, 2, True),
    "1-bit Adam": Setup(SEVERAL, ONEBIT),
    "1-bit Adam, replicated, in two hops": Setup(REPLICATED, ONEBIT | TWO_HOPS),
    "1-bit Adam with weight gather": Setup(
        SEVERAL | WEIGHTS, ONEBIT | {"weight_gather": "exact"}, gathers_overlap=True
    ),
    "DDP": Setup(wrapper="ddp"),
    "DDP in two hops": Setup(compression=TWO_HOPS, wrapper="ddp"),
    "FSDP2": Setup(wrapper="fsdp2"),
    "FSDP2 in two hops": Setup(compression=TWO_HOPS, wrapper="fsdp2"),
    "FSDP2, hybrid": Setup(wrapper="fsdp2", replicas=2, steps=4),
}


@dataclass
class Outcome:
    """What one rank did."""

    found: list[str]
    """By machine.Machine."""
    collectives: list[Any]
    operations: int
    streams: int


def run(
    name: str,
    ranks: Sequence[int] = tuple(range(RANKS)),
    *,
    of_their_own: bool = False,
    order: int | None = None,
    steps: int | None = None,
) -> list[Outcome]:
    """Train a set-up on some of its ranks.

    Args:
        of_their_own: as collectives.Recorder.
        order: ranks dispatch bucket groups of unlike communicators in unlike orders, drawn with this seed.
    """
    gc.collect()
    gc.freeze()  # what is there already: the collections between ranks are for what they leave
    try:
        return [_one(SETUPS[name], rank, of_their_own, order, steps) for rank in ranks]
    finally:
        gc.unfreeze()


@dataclass
class Verdict:
    """What all ranks of a set-up did."""

    found: list[str]
    """What is wrong on any rank, or between ranks."""
    operations: int
    """How many the rank with the fewest did."""
    collectives: int
    streams: int


def judged(name: str, **options: Any) -> Verdict:
    """All ranks of a set-up, as `run`."""
    outcomes = run(name, **options)
    calls = [outcome.collectives for outcome in outcomes]
    found = [f"rank {rank}: {line}" for rank, outcome in enumerate(outcomes) for line in outcome.found]
    found += disagreements(calls)
    if waiting := circle(calls):
        found.append(f"they wait for one another: {waiting}")
    return Verdict(
        list(dict.fromkeys(found)),
        min(outcome.operations for outcome in outcomes),
        min(map(len, calls)),
        min(outcome.streams for outcome in outcomes),
    )


def interleaved(name: str, orders: int, combinations: int, **options: Any) -> list[str]:
    """Ranks dispatch in orders of their own: what is wrong in some combinations of `orders` ones a rank."""
    ran = [run(name, order=order, **options) for order in range(orders)]
    found = [line for outcomes in ran for outcome in outcomes for line in outcome.found]
    draw = random.Random(1)
    for _ in range(combinations):
        calls = [draw.choice(ran)[rank].collectives for rank in range(RANKS)]
        found += disagreements(calls)
        if waiting := circle(calls):
            found.append(f"they wait for one another: {waiting}")
    return list(dict.fromkeys(found))


def _one(setup: Setup, rank: int, of_their_own: bool, order: int | None, steps: int | None) -> Outcome:
    _tear_down()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE="4")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    try:
        model = torch_setups.sharded(setup.replicas) if setup.wrapper == "fsdp2" else None
        with recording() as gpu:
            recorder = Recorder(gpu, of_their_own)
            with recorded(recorder):
                steps, config = steps or setup.steps, _config(setup)
                if setup.wrapper == "ddp":
                    torch_setups.train_ddp(config, gpu, recorder, steps)
                elif model is not None:
                    torch_setups.train_fsdp2(model, config, gpu, recorder, steps)
                else:
                    own_order = None if order is None else random.Random(f"{order} {rank}")
                    _train(setup, gpu, recorder, steps, own_order)
        return Outcome(
            gpu.machine.found, recorder.called, len(gpu.machine.operations), len(gpu.machine.queues)
        )
    finally:
        megatron_patch.disable()


def _config(setup: Setup) -> Any:
    return megatron_patch.CompressionConfig(
        **{"method": "loco", "topology": "flat", "start_step": 0} | setup.compression
    )


def _train(setup: Setup, gpu: Any, recorder: Any, steps: int, order: random.Random | None) -> None:
    from megatron_patch.megatron.attach import session_of

    with gpu.all_made_here():
        chunks, optimizer = _built(setup)
    megatron_patch.attach([chunk.ddp for chunk in chunks], _config(setup))
    states = [session_of(chunk.ddp) for chunk in chunks]
    for _ in range(steps):
        for chunk in chunks:
            chunk.ddp.zero_grad_buffer()
        with gpu.all_made_here():
            gradients = [torch.randn(p.shape, dtype=p.dtype) for p in chunks[0].parameters]
        for chunk in reversed(chunks):
            with gpu.all_made_here():
                loss = chunk.ddp(gradients)
            with _shuffled(chunk, order) if order else contextlib.nullcontext():
                loss.backward()
            del loss
        for chunk in chunks:
            chunk.ddp.finish_grad_sync()
        del gradients
        optimizer.step()
        for state in states:
            state.report.compression_seconds()
        recorder.end_step()


@contextlib.contextmanager
def _shuffled(chunk: Any, order: random.Random) -> Iterator[None]:
    """Bucket groups that become ready within the block are dispatched at its end: those of one communicator
    in their order, of several in any."""
    ready: list[tuple[Any, Callable[[], None]]] = []

    def later(group: Any) -> Callable[..., None]:
        seam = group.start_grad_sync

        def start(**options: Any) -> None:
            ready.append((group, lambda: seam(**options)))

        return start

    groups = [group for group in chunk.groups if not group.is_first_batch]
    seams = [group.start_grad_sync for group in groups]
    for group in groups:
        group.start_grad_sync = later(group)
    yield
    for group, seam in zip(groups, seams, strict=True):
        group.start_grad_sync = seam
    by_ranks: dict[Any, list[Callable[[], None]]] = {}
    for group, start in ready:
        by_ranks.setdefault(group.intra_distributed_optimizer_instance_group, []).append(start)
    while by_ranks:
        ranks = order.choice(list(by_ranks))
        by_ranks[ranks].pop(0)()
        if not by_ranks[ranks]:
            del by_ranks[ranks]


def _built(setup: Setup) -> tuple[list[Any], Any]:
    """The chunks (tiny_model.Tiny), and an optimizer of all."""
    from megatron.core.optimizer import get_megatron_optimizer

    chunks = []
    for number in range(setup.chunks):
        model = dict(setup.model)
        model["ddp"] = {**model.get("ddp", {}), "overlap_param_gather": setup.gathers_overlap}
        shapes = tiny_model.SHAPES * setup.layers
        chunks.append(tiny_model.build(**model, shapes=shapes, single_group=number > 0))
    optimizer = chunks[0].optimizer
    if len(chunks) > 1:
        config = optimizer.chained_optimizers[0].config
        optimizer = get_megatron_optimizer(config, [chunk.ddp for chunk in chunks])
    return chunks, optimizer
