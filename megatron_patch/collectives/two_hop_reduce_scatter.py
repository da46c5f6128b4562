"""The two-hop low-bit reduce-scatter: the sum of a node's ranks first, then low bits between nodes.

A bucket of N = M*R shards of S elements is viewed as [M nodes, R local ranks, S]:

    hop 1   local rank j sums column j, [M, S], over its node    gradient precision, or 8 bits
    hop 2   h = sum + e -> payload i to the owner on node i      e <- beta*e + (1-beta)*(h - s*q)
            rank (i, j) sums the M payloads of chunk (i, j): its shard

Only hop 2 leaves the node, R times less than the flat exchange; its error is kept of the node's sum, which is
1/R of the memory too. Megatron's average divides by N at the end, after both sums: the true mean.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_patch.collectives.reduce_scatter import ReduceScatterHandle, start_reduce_scatter
from megatron_patch.collectives.topology import TwoHops
from megatron_patch.collectives.workspace import Workspace
from megatron_patch.compensation.sender import Sender
from megatron_patch.config import CompressionConfig
from megatron_patch.quantization.layout import BlockLayout


class TwoHopSender:
    """A rank's part in the two hops of one bucket.

    `sender` sends the node's sum of this rank's column, [M*S], to the M nodes, and remembers; `inside` sends
    the bucket to the R ranks of the node in 8 bits, and remembers nothing (None: gradient precision).

    Args:
        hops: the groups.
        sender: of a layout of `numel / R` elements in M shards.
        config: the options.
        device: where the gradient lives.
    """

    def __init__(
        self, hops: TwoHops, sender: Sender, config: CompressionConfig, device: torch.device
    ) -> None:
        self.hops = hops
        self.sender = sender
        self.inside = inside_sender(sender.layout.numel * hops.local, hops, config, device)

    def inside_bytes(self, gradient: torch.Tensor) -> float:
        """Bytes that this rank sends to others of its node."""
        others = self.hops.local - 1
        if self.inside is not None:
            return float(others * self.inside.layout.payload_bytes)
        return gradient.nbytes * others / self.hops.local


def inside_sender(
    numel: int, hops: TwoHops, config: CompressionConfig, device: torch.device
) -> Sender | None:
    """What sends `numel` elements to the ranks of a node in `intra_bits`; None where they are not set."""
    if config.intra_bits is None:
        return None
    plain = CompressionConfig(method="naive", bits=config.intra_bits, block_size=config.block_size)
    return Sender(plain, BlockLayout.of(numel, hops.local, plain.bits, plain.block_size), device)


def start_two_hop_reduce_scatter(
    parts: TwoHopSender, gradient: torch.Tensor, output: torch.Tensor, average: bool, workspace: Workspace
) -> ReduceScatterHandle:
    """Sum `gradient` [B] in the node and send the sums; the handle's `wait` writes this rank's `output` [S].

    The first hop is over when this returns (on CUDA: on the current stream); the second may be under way.
    """
    hops, layout = parts.hops, parts.sender.layout
    dtype = gradient.dtype if parts.inside is None else torch.float32
    buffer = workspace.take(1, layout.numel * dtype.itemsize, "sums")
    sums = buffer.view(-1).view(dtype)
    if parts.inside is None:
        rows = gradient.view(hops.nodes, -1)
        works: list[Any] = [
            dist.reduce_scatter_tensor(chunk, row, group=hops.intra, async_op=True)
            for chunk, row in zip(sums.view(hops.nodes, -1), rows, strict=True)
        ]
        for work in works:
            work.wait()
    else:
        columns = workspace.take(1, gradient.nbytes, "columns")
        by_receiver = columns.view(-1).view(gradient.dtype)
        source = gradient.view(hops.nodes, hops.local, layout.shard_size)
        by_receiver.view(hops.local, hops.nodes, layout.shard_size).copy_(source.transpose(0, 1))
        start_reduce_scatter(parts.inside, by_receiver, sums, hops.intra, 1, workspace).wait()
        workspace.give(columns)
    divisor = hops.nodes * hops.local if average else 1
    handle = start_reduce_scatter(parts.sender, sums, output, hops.inter, divisor, workspace)
    workspace.give(buffer)  # it has been compressed: the payload is what travels
    return handle
