"""The exchanges in two hops: the sum of a node's ranks first, then the flat exchange between nodes.

**Reduce-scatter.** A bucket of N = M*R shards of S elements is viewed as [M nodes, R local ranks, S]:

    hop 1   local rank j sums column j, [M, S], over its node    gradient precision, or 8 bits
    hop 2   h = sum + e -> payload i to the owner on node i      e <- beta*e + (1-beta)*(h - s*q)
            rank (i, j) sums the M payloads of chunk (i, j): its shard

**All-reduce.** A vector of B elements is cut in R chunks, one for each local rank of a node, such that M*R
shards of one length lie end to end:

    hop 1   local rank j sums chunk j over its node              gradient precision, or 8 bits
    hop 2   the low-bit all-reduce of chunk j over the M ranks j all_reduce.py, errors of the node's sum
    hop 3   the payloads that hop 2 ends with go to the node's other ranks, and all decode them

Only hop 2 leaves the node, with R times fewer bytes than the flat exchange. Its error is that of the node's
sum, so that the error states take 1/R of the memory, too. An average is divided by N after both sums.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_patch.collectives.all_reduce import AllReduce, AllReduceHandle, PassedOn
from megatron_patch.collectives.exchange import (
    ExchangeTraffic,
    Setup,
    payloads,
)
from megatron_patch.collectives.reduce_scatter import ReduceScatter, ReduceScatterHandle
from megatron_patch.collectives.sender import Sender
from megatron_patch.collectives.topology import TwoHops
from megatron_patch.config import CompressionConfig
from megatron_patch.quantization.blocks import Contents
from megatron_patch.quantization.layout import BlockLayout


class TwoHopReduceScatter:
    """The two-hop reduce-scatter of a bucket: `output` is this rank's shard.

    `between` is hop 2, with an error state: it sends the node's sum of this rank's column, [M*S], to the M
    nodes. `inside` is hop 1 if it runs in 8 bits, without an error state; it is None if hop 1 runs in
    gradient precision.
    """

    def __init__(self, bucket: Contents, hops: TwoHops, setup: Setup) -> None:
        self.hops = hops
        shards = setup.layout(bucket, hops.nodes * hops.local)
        self.inside = _inside(bucket, hops, setup, shards)
        column = shards.part(hops.intra.rank(), hops.nodes, step=hops.local)
        sender = setup.new_sender(column, first=not _stays_rotated(self.inside))
        self.between = ReduceScatter(bucket, hops.inter, setup, sender)
        self.sender = sender

    def start(self, tensor: torch.Tensor, output: torch.Tensor, average: bool) -> ReduceScatterHandle:
        """Exchange.start; `output` is [S].

        Hop 1 is over when this returns (on CUDA: on the current stream); hop 2 may be under way.
        """
        hops, layout, workspace = self.hops, self.sender.layout, self.between.workspace
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
            self.inside.send(by_receiver, sums, 1).wait()
            workspace.give(columns)
        handle = self.between.send(sums, output, hops.nodes * hops.local if average else 1)
        workspace.give(buffer)  # It is free once it is compressed: only the payload is sent.
        return handle

    @property
    def senders(self) -> list[Sender]:
        """Exchange.senders: every node has one sender for each column."""
        return [self.sender]

    def traffic(self, tensor: torch.Tensor) -> ExchangeTraffic:
        inside = tensor.nbytes * (self.hops.local - 1) / self.hops.local
        if self.inside is not None:
            inside = self.inside.traffic(tensor).between.nbytes
        return ExchangeTraffic(payloads(self.sender, self.hops.inter.rank()), inside)

    def describe(self) -> str:
        return f"reduce-scatter in two hops over {self.hops.describe()}"


class TwoHopAllReduce:
    """The two-hop all-reduce of a tensor, in place: `output` is the tensor itself.

    `between` is hops 2 and 3. `chunk` is the length of a chunk; the last chunks may be short, or empty.
    `inside` is hop 1 if it runs in 8 bits, without an error state, or None.
    """

    def __init__(self, tensor: Contents, hops: TwoHops, setup: Setup) -> None:
        self.hops = hops
        self.numel = tensor.numel
        whole = setup.layout(tensor, hops.nodes * hops.local, whole_blocks=setup.config.is_onebit_adam)
        self.chunk = hops.nodes * whole.shard_size
        padded = Contents(self.chunk * hops.local, tensor.spans)
        self.inside = _inside(padded, hops, setup, whole, in_order=True)
        chunk = whole.part(hops.intra.rank() * hops.nodes, hops.nodes)
        first, passed_on = not _stays_rotated(self.inside), PassedOn(hops.intra, whole)
        self.between = AllReduce(tensor, hops.inter, setup, chunk, first, passed_on)
        self.sender, self.owner = self.between.sender, self.between.owner

    def start(self, tensor: torch.Tensor, output: torch.Tensor, average: bool) -> AllReduceHandle:
        """Exchange.start; `output` must be `tensor`.

        Hop 1 is over when this returns (on CUDA: on the current stream).
        """
        hops, workspace = self.hops, self.between.workspace
        padded = workspace.take(1, self.chunk * hops.local * tensor.element_size(), "columns")
        whole = padded.view(-1).view(tensor.dtype)
        whole[: self.numel].copy_(tensor)
        whole[self.numel :].zero_()
        dtype = tensor.dtype if self.inside is None else torch.float32
        buffer = workspace.take(1, self.chunk * dtype.itemsize, "node sums")
        sums = buffer.view(-1).view(dtype)
        if self.inside is None:
            dist.reduce_scatter_tensor(sums, whole, group=hops.intra)
        else:
            self.inside.send(whole, sums, 1).wait()
        divisor = hops.nodes * hops.local if average else 1
        handle = self.between.send(sums[: self.sender.layout.numel], output, divisor)
        workspace.give(padded)
        workspace.give(buffer)  # It is free once it is compressed: only the payload is sent.
        return handle

    @property
    def senders(self) -> list[Sender]:
        """Exchange.senders: every node has one for each chunk, and an owner of a shard of the chunk."""
        return self.between.senders

    def traffic(self, tensor: torch.Tensor) -> ExchangeTraffic:
        """Exchange.traffic; hops 1 and 3 stay inside the node."""
        others, passed_on = self.hops.local - 1, self.between.passed_on
        assert passed_on is not None
        first = float(others * self.chunk * tensor.element_size())
        if self.inside is not None:
            first = self.inside.traffic(tensor).between.nbytes
        inside = first + others * self.hops.nodes * passed_on.layout.payload_bytes
        return ExchangeTraffic(self.between.traffic(tensor).between, inside)

    def describe(self) -> str:
        return f"all-reduce in two hops over {self.hops.describe()}"


def _inside(
    tensor: Contents, hops: TwoHops, setup: Setup, between: BlockLayout, in_order: bool = False
) -> ReduceScatter | None:
    """Create hop 1 in `intra_bits`; returns None if `intra_bits` is not set.

    `between` is the tensor's layout for all ranks. If both hops have the same blocks and the codec rotates
    them, hop 1 rotates, and the node's sums stay rotated (as in SDP4Bit, arXiv 2410.15526). The tensor has a
    part for each node and local rank. With `in_order` the parts lie by local rank first; else they lie by
    node first, and hop 1 sends them column after column.
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
    return ReduceScatter(tensor, hops.intra, setup, Sender(plain, layout, setup.device, last=False))


def _stays_rotated(inside: ReduceScatter | None) -> bool:
    return inside is not None and inside.sender.codec.rotation.rotated
