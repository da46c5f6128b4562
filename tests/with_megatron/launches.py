"""How many launches of GPU kernels an exchange, and a step of 1-bit Adam, ask for. Run by a test.

    loco flat reduce-scatter launches=12

On the CPU, over torch's fake process group: Triton's kernels are compiled and counted, not run, and every
operation of torch that is no view and no allocation counts as one launch, copies between devices too.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from quantization import compile_for_gpu
from quantization.narrow_offsets import narrow_offsets
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megatron_patch.collectives.exchange import Setup
from megatron_patch.collectives.makers import make_all_reduces, make_reduce_scatters
from megatron_patch.collectives.workspace import Workspace
from megatron_patch.config import CompressionConfig
from megatron_patch.megatron.onebit_adam import norm_sketch, sketch_kernel, update
from megatron_patch.megatron.onebit_adam.norm_sketch import NormSketch, signs
from megatron_patch.quantization.blocks import Contents, Span
from megatron_patch.weights import code
from megatron_patch.weights.gather import WeightGather

RANKS, RANKS_OF_NODE = 16, 8
CPU = torch.device("cpu")
_FREE = ("empty", "detach", "_to_copy", "lift_fresh", "set_", "alias")
"""Operations that launch nothing; `_to_copy` is to the very device here, and counted with `copy_`."""


class Launches(TorchDispatchMode):
    """Counts them; those of Triton's kernels are in `compile_for_gpu.kernels`."""

    def __init__(self) -> None:
        super().__init__()
        self.of_torch = 0
        self._before = len(compile_for_gpu.kernels)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        views = func.is_view or name.startswith(("view", "as_strided", "_unsafe_view", "split", "unbind"))
        self.of_torch += not views and not name.startswith(_FREE)
        return func(*args, **(kwargs or {}))

    @property
    def count(self) -> int:
        return self.of_torch + len(compile_for_gpu.kernels) - self._before


def bucket(vectors: bool = True) -> Contents:
    """A bucket of a transformer's layer: matrices, and norms' weights beside them."""
    norms = (Span.of(0, (4096,), exact=vectors), Span.of(4096, (4096,), exact=vectors))
    return Contents(1 << 20, (*norms, Span.of(8192, ((1 << 20) // 4096 - 2, 4096))))


def exchange(topology: str, replicated: bool, **options: Any) -> int:
    """Launches of one bucket's exchange, the tables being on the device already."""
    two_hops = {"topology": "two_hop", "ranks_per_node": RANKS_OF_NODE}
    config = CompressionConfig(**options, **two_hops if topology == "two hops" else {"topology": "flat"})
    setup = Setup(config, Workspace(CPU))
    make = make_all_reduces if replicated else make_reduce_scatters
    assert dist.group.WORLD is not None
    contents = bucket(vectors=not config.is_onebit_adam)
    (made,) = make([contents], dist.group.WORLD, setup).exchanges
    tensor = torch.zeros(contents.numel)
    output = tensor if replicated else tensor[: contents.numel // RANKS]
    counts = []
    for _ in range(2):
        with torch.no_grad(), Launches() as launches:
            made.start(tensor, output, True).wait()
        counts.append(launches.count)
    return counts[-1]


def _zeros(*shape: Any, **options: Any) -> torch.Tensor:
    with _disable_current_modes():
        return torch.zeros(*shape, **options)


def weight_gather(ranks: int) -> tuple[int, int]:
    """Launches of one bucket's exact gather: (of its owner, before anything is sent; of a receiver)."""
    bucket = torch.zeros(1 << 18, dtype=torch.bfloat16)
    gather = WeightGather(bucket, dist.new_group(list(range(ranks))), Workspace(CPU), "bucket")
    message = torch.zeros(code.bound(gather.shard_size), dtype=torch.uint8)
    with (
        torch.no_grad(),
        mock.patch.object(torch, "empty", _zeros),  # kernels do not run: sizes of 0
    ):
        for _ in range(2):
            with Launches() as encoding:
                gather.encode()
            coded = encoding.count
        with Launches() as decoding:
            found = torch.zeros(ranks, dtype=torch.int32)
            places = torch.tensor([[0, message.numel()]] * ranks)
            gather.read(message.expand(ranks, -1), places, found)
    return coded, decoding.count


def onebit_step(parameters: int) -> int:
    """Launches of the norm's estimate and of the update, of one group of parameters."""
    sketch = NormSketch(1, CPU)
    tensors = [tuple(torch.zeros(5000) for _ in range(4)) for _ in range(parameters)]
    for gradient, *_ in tensors:
        sketch.add(gradient, 1.0)
    sizes = update.Sizes(lr=1.0, weight_decay=0.1, eps=1e-8, momentum_bias=1.0, variance_bias=1.0, most=1.0)
    table = signs(CPU)
    compile_for_gpu.kernels.clear()
    sketch_kernel.fold(norm_sketch.rows_of(sketch._pieces), table, norm_sketch.COLUMNS)
    with Launches() as launches:
        update.update(tensors, sizes)
    assert not any(narrow_offsets(kernel.asm["ttir"]) for kernel in compile_for_gpu.kernels)
    return len(compile_for_gpu.kernels) + launches.count


def main() -> None:
    compile_for_gpu.compile_instead_of_launching()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    methods: dict[str, dict[str, Any]] = {
        "naive": {"method": "naive"},
        "loco": {"method": "loco"},
        "onebit_adam": {"method": "onebit_adam", "bits": 1, "warmup_steps": 1},
    }
    for method, options in methods.items():
        for topology in ("flat", "two hops"):
            for replicated in (False, True):
                if replicated or method != "onebit_adam":
                    what = "all-reduce" if replicated else "reduce-scatter"
                    print(f"{method} {topology} {what} launches={exchange(topology, replicated, **options)}")
    for ranks in (2, 16):
        encoding, decoding = weight_gather(ranks)
        print(f"weights to {ranks} ranks launches={encoding}")
        print(f"weights from {ranks} ranks launches={decoding}")
    for parameters in (3, 30):
        print(f"onebit_adam step of {parameters} launches={onebit_step(parameters)}")


if __name__ == "__main__":
    main()
