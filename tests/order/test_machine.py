"""The order checker itself: what it must find, and what it must not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from order.byte_sets import bytes_of
from order.gpu import KERNELS
from order.machine import Machine
from order.ranks import Collective, circle, disagreements
from quantization.backend_agreement import compress_by, sender_of
from triton.runtime.interpreter import InterpretedFunction

from megatron_patch.quantization import triton_kernels
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.weights.code import bound


def made(machine: Machine, queue: Any, numel: int = 16) -> torch.Tensor:
    tensor = torch.zeros(numel)
    machine.allocate(tensor, queue, "a tensor")
    return tensor


@pytest.mark.parametrize("shape", [(4, 6), (3, 5, 7)])
def test_the_bytes_of_a_view_are_those_it_writes(shape: tuple[int, ...]) -> None:
    whole = torch.zeros(shape, dtype=torch.int16)
    for view in (whole.transpose(0, 1), whole[1:, ::2], whole[..., 1:3], whole[:1].expand(5, *shape[1:])):
        found = bytes_of(view)
        whole.zero_()
        view.fill_(-1)
        expected = np.flatnonzero(whole.view(torch.uint8).numpy().reshape(-1))
        assert np.arange(whole.nbytes)[found].tolist() == expected.tolist()


def test_memory_freed_while_another_stream_reads_it() -> None:
    machine = Machine()
    one, other = machine.queue("one"), machine.queue("other")
    for guard in ("none", "a wait", "record_stream"):
        tensor = made(machine, one)
        machine.wait(other, machine.record(one))
        machine.launch(other, "read", reads=[tensor])
        if guard == "a wait":
            machine.wait(one, machine.record(other))
        if guard == "record_stream":
            machine.record_stream(tensor, other)
        view = tensor[3:]
        del tensor
        assert machine.found == []
        del view
        assert len(machine.found) == (guard == "none")
        machine.found.clear()


def call(communicator: str, members: tuple[int, ...], queue: int, at: int, **knows: int) -> Collective:
    known = np.zeros(8, dtype=np.int64)
    known[queue] = at
    for other, time in knows.items():
        known[int(other[1:])] = time
    return Collective(communicator, members, "all-reduce", 4, queue, at, known)


def test_ranks_that_call_unlike_collectives() -> None:
    a, b = (0, 1), (0, 1)
    first = [call("a", a, 0, 1), call("b", b, 1, 1)]
    assert disagreements([first, first[::-1]]) == []  # in one communicator the order counts
    (line,) = disagreements([[*first, call("a", a, 0, 2)], first])
    assert line == "a: call 1 is all-reduce of 4 bytes on rank 0 and none on rank 1"


def test_ranks_that_wait_for_one_another() -> None:
    members = (0, 1)
    freely = [call("a", members, 0, 1), call("b", members, 1, 1)]
    after = [call("a", members, 0, 1), call("b", members, 1, 1, q0=1)]
    before = [call("b", members, 1, 1), call("a", members, 0, 1, q1=1)]
    assert circle([freely, after]) is None
    assert circle([after, after]) is None
    assert circle([freely, before]) is None
    assert circle([after, before]) is not None


def what_kernels_change() -> dict[str, set[str]]:
    """Arguments that Triton's kernels, run by its interpreter, were seen to change."""
    from megatron_patch.megatron.onebit_adam import norm_sketch, sketch_kernel
    from megatron_patch.megatron.onebit_adam.norm_sketch import NormSketch, signs
    from megatron_patch.weights import triton_kernels as weights

    seen: dict[str, set[str]] = {}
    original = InterpretedFunction.run

    def watched(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        named = dict(zip(kernel.arg_names, args, strict=False)) | options
        tensors = {key: value for key, value in named.items() if isinstance(value, torch.Tensor)}
        before = {key: tensor.clone() for key, tensor in tensors.items()}
        original(kernel, *args, grid=grid, warmup=warmup, **options)
        changed = seen.setdefault(kernel.fn.__name__, set())
        changed |= {
            key
            for key, tensor in tensors.items()
            if not torch.equal(tensor.view(torch.uint8), before[key].view(torch.uint8))
        }

    InterpretedFunction.run = watched
    try:
        layout = BlockLayout.of(600, 2, 4, 128)
        sender = sender_of(layout, torch.device("cpu"), "int8", 0.8)
        payload = torch.zeros(2, layout.payload_bytes, dtype=torch.uint8)
        compress_by(triton_kernels, sender, torch.randn(600), payload)
        part = layout.part(0)
        payloads = payload[:1, : part.payload_bytes].contiguous()
        triton_kernels.decompress_reduce(payloads, sender.codec, part, torch.ones(300), 1)
        old = torch.randint(-999, 999, (5000,), dtype=torch.int16)
        new = old + torch.randint(-3, 4, (5000,), dtype=torch.int16)
        new[::9] += torch.randint(-300, 300, (len(new[::9]),), dtype=torch.int16)
        message = torch.zeros(bound(5000), dtype=torch.uint8)
        found = torch.full((1,), 7, dtype=torch.int32)
        weights.sums(old)
        old, new, facts = old[:600].clone(), new[:600].clone(), torch.zeros(3, dtype=torch.int64)
        new[::2] += 1
        size = weights.encode(new, old, False, message, facts)
        weights.decode(message[None], torch.tensor([[0, size]]), new[None], -1, found)
        sketch = NormSketch(1, torch.device("cpu"))
        sketch.add(torch.randn(500), 1.0)
        rows = norm_sketch.rows_of(sketch._pieces)
        sketch_kernel.fold(rows, signs(torch.device("cpu")), norm_sketch.COLUMNS)
    finally:
        InterpretedFunction.run = original
    return seen


def test_kernels_change_what_the_table_says(pool: Any) -> None:
    (seen,) = pool.run(what_kernels_change, world_size=1)
    assert set(seen) == set(KERNELS)
    for name, changed in seen.items():
        said = {argument for argument, role in KERNELS[name].items() if role != "reads"}
        unused = {"diagonal"}  # are given the payload
        assert changed - unused <= said, name
        assert changed, name
