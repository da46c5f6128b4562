"""Where the parameters lie in the tensors that FSDP2 and DDP exchange.

FSDP2 exchanges [N, S] for N ranks of the shard group: row j has rank j's chunk of each parameter, one after
the other, and every chunk is padded to the length of the parameter's longest chunk. DDP's buckets are whole
parameters, one after the other: the same with N = 1. Blocks follow the rows of the chunks; padding is in no
block, and vectors (norms' weights, biases) are sent uncompressed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from megatron_patch.quantization.blocks import Contents, Span


@dataclasses.dataclass(frozen=True)
class Sharded:
    """A parameter that FSDP2 cuts along one axis into chunks, one for each rank of the shard group."""

    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    axis: int = 0

    def chunk(self, rank: int, ranks: int) -> tuple[int, tuple[int, ...]]:
        """Return (first index along the axis, shape) of a rank's chunk; last ones may be short or empty."""
        size = self.shape[self.axis]
        longest = -(-size // ranks)
        first = min(rank * longest, size)
        length = min(longest, size - first)
        return first, (*self.shape[: self.axis], length, *self.shape[self.axis + 1 :])

    def padded(self, ranks: int) -> int:
        """Return the elements that each chunk has in an exchange, where it is padded to the longest chunk."""
        return math.prod(self.chunk(0, ranks)[1])


def contents_of(parameters: Sequence[Sharded], ranks: int = 1) -> Contents:
    """Return the contents of the tensor [N*S] that `ranks` N exchange."""
    spans = [
        Span.of(start, shape, exact=len(shape) < 2)
        for _, start, _, shape in _chunks(parameters, range(ranks), ranks)
        if 0 not in shape
    ]
    return Contents(ranks * _size(parameters, ranks), tuple(spans))


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that torch.compile and activation checkpointing add."""
    wrappers = ("_orig_mod", "_checkpoint_wrapped_module")
    return ".".join(part for part in name.split(".") if part and part not in wrappers)


def _size(parameters: Sequence[Sharded], ranks: int) -> int:
    return sum(parameter.padded(ranks) for parameter in parameters)


def _chunks(
    parameters: Sequence[Sharded], rows: Sequence[int], ranks: int
) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    """Yield for each chunk its parameter's number, its first element in the tensor, its first index along the
    parameter's sharded axis, and its shape."""
    size = _size(parameters, ranks)
    for row in rows:
        start = row * size
        for number, parameter in enumerate(parameters):
            yield number, start, *parameter.chunk(row, ranks)
            start += parameter.padded(ranks)
