"""The exchanges in two hops: the sum of a node's ranks first, then the flat exchange between nodes.

**Reduce-scatter.** A bucket of N = M*R shards of S elements is viewed as [M nodes, R local ranks, S]:

    hop 1   local rank j sums column j, [M, S], over its node    in the gradient's precision
    hop 2   h = sum + e -> payload i to the owner on node i      e <- beta*e + (1-beta)*(h - s*q)
            rank (i, j) sums the M payloads of chunk (i, j): its shard

**All-reduce.** A vector of B elements is cut in R chunks, one for each local rank of a node, such that M*R
shards of one length lie end to end:

    hop 1   local rank j sums chunk j over its node              in the gradient's precision
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
from megatron_patch.collectives.exchange import ExchangeTraffic, Setup, payloads
from megatron_patch.collectives.reduce_scatter import ReduceScatter, ReduceScatterHandle
from megatron_patch.collectives.sender import Sender
from megatron_patch.collectives.topology import TwoHops
from megatron_patch.quantization.blocks import Contents


class TwoHopReduceScatter:
    """The two-hop reduce-scatter of a bucket: `output` is this rank's shard.

    Hop 1 runs in the gradient's precision. `between` is hop 2, with an error state: it sends the node's sum
    of this rank's column, [M*S], to the M nodes.
    """

    def __init__(self, bucket: Contents, hops: TwoHops, setup: Setup) -> None:
        self.hops = hops
        shards = setup.layout(bucket, hops.nodes * hops.local)
        column = shards.part(hops.intra.rank(), hops.nodes, step=hops.local)
        self.sender = setup.new_sender(column)
        self.between = ReduceScatter(bucket, hops.inter, setup, self.sender)

    def start(self, tensor: torch.Tensor, output: torch.Tensor, average: bool) -> ReduceScatterHandle:
        """Exchange.start; `output` is [S].

        Hop 1 is over when this returns (on CUDA: on the current stream); hop 2 may be under way.
        """
        hops, layout, workspace = self.hops, self.sender.layout, self.between.workspace
        buffer = workspace.take(1, layout.numel * tensor.element_size(), "sums")
        sums = buffer.view(-1).view(tensor.dtype)
        rows = tensor.view(hops.nodes, -1)
        works: list[Any] = [
            dist.reduce_scatter_tensor(chunk, row, group=hops.intra, async_op=True)
            for chunk, row in zip(sums.view(hops.nodes, -1), rows, strict=True)
        ]
        for work in works:
            work.wait()
        handle = self.between.send(sums, output, hops.nodes * hops.local if average else 1)
        workspace.give(buffer)  # It is free once it is compressed: only the payload is sent.
        return handle

    @property
    def senders(self) -> list[Sender]:
        """Exchange.senders: every node has one sender for each column."""
        return [self.sender]

    def traffic(self, tensor: torch.Tensor) -> ExchangeTraffic:
        inside = tensor.nbytes * (self.hops.local - 1) / self.hops.local
        return ExchangeTraffic(payloads(self.sender, self.hops.inter.rank()), inside)

    def describe(self) -> str:
        return f"reduce-scatter in two hops over {self.hops.describe()}"


class TwoHopAllReduce:
    """The two-hop all-reduce of a tensor, in place: `output` is the tensor itself.

    `between` is hops 2 and 3. `chunk` is the length of a chunk; the last chunks may be short, or empty.
    """

    def __init__(self, tensor: Contents, hops: TwoHops, setup: Setup) -> None:
        self.hops = hops
        self.numel = tensor.numel
        whole = setup.layout(tensor, hops.nodes * hops.local, whole_blocks=setup.config.is_onebit_adam)
        self.chunk = hops.nodes * whole.shard_size
        chunk = whole.part(hops.intra.rank() * hops.nodes, hops.nodes)
        self.between = AllReduce(tensor, hops.inter, setup, chunk, PassedOn(hops.intra, whole))
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
        buffer = workspace.take(1, self.chunk * tensor.element_size(), "node sums")
        sums = buffer.view(-1).view(tensor.dtype)
        dist.reduce_scatter_tensor(sums, whole, group=hops.intra)
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
        peers, passed_on = self.hops.local - 1, self.between.passed_on
        assert passed_on is not None
        payloads_of_nodes = self.hops.nodes * passed_on.layout.payload_bytes
        inside = peers * (self.chunk * tensor.element_size() + payloads_of_nodes)
        return ExchangeTraffic(self.between.traffic(tensor).between, inside)

    def describe(self) -> str:
        return f"all-reduce in two hops over {self.hops.describe()}"
