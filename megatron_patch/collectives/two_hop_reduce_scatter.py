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

from megatron_patch.collectives.exchange import ExchangeTraffic, SenderState, Setup, payloads
from megatron_patch.collectives.reduce_scatter import ReduceScatterHandle, start_reduce_scatter
from megatron_patch.collectives.topology import TwoHops
from megatron_patch.compensation.resharding import NODE_SUM, Position
from megatron_patch.compensation.sender import Sender
from megatron_patch.config import CompressionConfig
from megatron_patch.quantization.blocks import Contents
from megatron_patch.quantization.layout import BlockLayout


class TwoHopReduceScatter:
    """The two-hop reduce-scatter of a bucket: `output` is this rank's shard.

    `sender` sends the node's sum of this rank's column, [M*S], to the M nodes, with its error; `inside` sends
    the bucket to the R ranks of the node in 8 bits, and keeps no error (None: gradient precision).
    """

    def __init__(self, bucket: Contents, hops: TwoHops, setup: Setup) -> None:
        self.hops = hops
        self._workspace = setup.workspace
        shards = setup.layout(bucket, hops.nodes * hops.local)
        self.inside = inside_sender(bucket, hops, setup, shards)
        column = shards.part(hops.intra.rank(), hops.nodes, step=hops.local)
        self.sender = setup.new_sender(column, first=not stays_rotated(self.inside))
        self._own = self.sender.layout.part(hops.inter.rank())
        if self.inside is not None:
            self._inside_own = self.inside.layout.part(hops.intra.rank())

    def start(self, tensor: torch.Tensor, output: torch.Tensor, average: bool) -> ReduceScatterHandle:
        """Exchange.start; `output` is [S].

        The first hop is over when this returns (on CUDA: on the current stream); the second may be under way.
        """
        hops, layout, workspace = self.hops, self.sender.layout, self._workspace
        dtype = tensor.dtype if self.inside is None else torch.float32
        buffer = workspace.take(1, layout.numel * dtype.itemsize, "sums")
        sums = buffer.view(-1).view(dtype)
        if self.inside is None:
            rows = tensor.view(hops.nodes, -1)
            works: list[Any] = [
                dist.reduce_scatter_tensor(chunk, row, group=hops.intra, async_op=True)
                for chunk, row in zip(sums.view(hops.nodes, -1), rows, strict=True)
            ]
            for work in works:
                work.wait()
        else:
            columns = workspace.take(1, tensor.nbytes, "columns")
            by_receiver = columns.view(-1).view(tensor.dtype)
            source = tensor.view(hops.nodes, hops.local, layout.shard_size)
            by_receiver.view(hops.local, hops.nodes, layout.shard_size).copy_(source.transpose(0, 1))
            start_reduce_scatter(
                self.inside, self._inside_own, by_receiver, sums, hops.intra, 1, workspace
            ).wait()
            workspace.give(columns)
        divisor = hops.nodes * hops.local if average else 1
        handle = start_reduce_scatter(self.sender, self._own, sums, output, hops.inter, divisor, workspace)
        workspace.give(buffer)  # it has been compressed: the payload is what travels
        return handle

    def states(self) -> list[SenderState]:
        """Exchange.states: every node has one sender for each local rank's column."""
        hops, shard = self.hops, self.sender.layout.shard_size
        column = Position(hops.intra.rank() * shard, shard, hops.nodes, hops.local * shard)
        ranks = hops.nodes * hops.local
        return [SenderState(self.sender, NODE_SUM, column, hops.inter.rank(), hops.nodes, ranks)]

    def traffic(self, tensor: torch.Tensor) -> ExchangeTraffic:
        """Exchange.traffic."""
        others = self.hops.local - 1
        inside = tensor.nbytes * others / self.hops.local
        if self.inside is not None:
            inside = payloads(self.inside, self.hops.intra.rank()).nbytes
        return ExchangeTraffic(payloads(self.sender, self.hops.inter.rank()), inside)

    def describe(self) -> str:
        """Exchange.describe."""
        return f"reduce-scatter in two hops over {self.hops.describe()}"


def inside_sender(
    tensor: Contents, hops: TwoHops, setup: Setup, between: BlockLayout, in_order: bool = False
) -> Sender | None:
    """What sends a tensor to the ranks of a node in `intra_bits`; None where they are not set.

    `between` is the tensor's cut for all ranks. Where its blocks are rotated, and are this hop's too, this
    hop rotates them, and the node's sums stay rotated (SDP4Bit does so, arXiv 2410.15526).
    The tensor's parts, one for each node and local rank, lie by local rank and then by node where they are
    `in_order`; else by node first, and are sent column after column.
    """
    config = setup.config
    if config.intra_bits is None:
        return None
    same_blocks = not between.by_shard or between.shard_size % between.block == 0
    plain = CompressionConfig(
        method="naive",
        bits=config.intra_bits,
        block_size=config.block_size,
        rotation="hadamard" if config.rotates and same_blocks else "none",
    )
    layout = BlockLayout.of(
        tensor.numel,
        hops.local,
        plain.bits,
        plain.block_size,
        spans=tensor.spans,
        pieces=hops.nodes,
        in_order=in_order,
    )
    return Sender(plain, layout, setup.device, last=False)


def stays_rotated(inside: Sender | None) -> bool:
    """Whether the sums that come of `inside_sender`'s hop are rotated."""
    return inside is not None and inside.codec.rotation.rotated
