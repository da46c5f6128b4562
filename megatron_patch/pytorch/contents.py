"""Where the parameters lie in the tensor that FSDP2 exchanges.

It is [N, S] for N ranks of the shard group: row j has rank j's chunk of each parameter, one after the other,
and every chunk is padded to the longest of that parameter's. Blocks follow the rows of the chunks; padding is
in no block, and vectors (norms' weights, biases) are sent as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_patch.pytorch.fsdp2_fields import Sharded
from megatron_patch.quantization.blocks import Contents, Span


def contents_of(parameters: Sequence[Sharded], ranks: int) -> Contents:
    """The contents of the [N*S] elements, rank by rank."""
    size = sum(parameter.padded(ranks) for parameter in parameters)
    spans = []
    for rank in range(ranks):
        start = rank * size
        for parameter in parameters:
            _, shape = parameter.chunk(rank, ranks)
            if 0 not in shape:
                spans.append(Span.of(start, shape, exact=len(shape) < 2))
            start += parameter.padded(ranks)
    return Contents(ranks * size, tuple(spans))
