"""The two-hop low-bit all-reduce: a node's sum, low bits between nodes, and their payloads around the node.

A vector of B elements is cut in R chunks, one for each local rank of a node; M nodes:

    hop 1   local rank j sums chunk j over its node                 gradient precision, or 8 bits
    hop 2   the low-bit all-reduce of chunk j over the M ranks j    all_reduce.py, errors of the node's sum
    hop 3   the payloads that hop 2 ends with go to the node's other ranks, and all decode them

Between nodes it moves R times less than the flat all-reduce, and its errors are 1/R of the memory. The
average is divided by M*R after both sums. Chunks are cut so that M*R shards of one length lie end to end.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_patch.collectives.all_reduce import AllReduceHandle, start_all_reduce
from megatron_patch.collectives.exchange import ExchangeTraffic, SenderState, Setup, gathered, payloads
from megatron_patch.collectives.reduce_scatter import start_reduce_scatter
from megatron_patch.collectives.topology import TwoHops
from megatron_patch.collectives.two_hop_reduce_scatter import inside_sender, stays_rotated
from megatron_patch.compensation.resharding import ALL_REDUCE, OWNER, Position
from megatron_patch.quantization.blocks import Contents


class TwoHopAllReduce:
    """The two-hop all-reduce of a tensor, in place: `output` is the tensor itself.

    `sender` and `owner` are those of this rank's chunk between the nodes, as in AllReduce. `chunk` is the
    length of a chunk; the last ones may be short, or empty. `inside` sends to the node's ranks in 8 bits and
    keeps no error (None: gradient precision).
    """

    def __init__(self, tensor: Contents, hops: TwoHops, setup: Setup) -> None:
        self.hops = hops
        self.numel = tensor.numel
        self._workspace = setup.workspace
        ranks = hops.nodes * hops.local
        self._whole = setup.layout(tensor, ranks, whole_blocks=setup.config.is_onebit_adam)
        self.chunk = hops.nodes * self._whole.shard_size
        layout = self._whole.part(hops.intra.rank() * hops.nodes, hops.nodes)
        self.inside = inside_sender(
            Contents(self.chunk * hops.local, tensor.spans), hops, setup, self._whole, in_order=True
        )
        self.sender = setup.new_sender(layout, first=not stays_rotated(self.inside), last=False)
        self.owner = setup.new_sender(layout.part(hops.inter.rank()), first=False)
        if self.inside is not None:
            self._inside_own = self.inside.layout.part(hops.intra.rank())

    def start(self, tensor: torch.Tensor, output: torch.Tensor, average: bool) -> AllReduceHandle:
        """Exchange.start; `output` must be `tensor`.

        The first hop is over when this returns (on CUDA: on the current stream).
        """
        hops, workspace = self.hops, self._workspace
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
            start_reduce_scatter(self.inside, self._inside_own, whole, sums, hops.intra, 1, workspace).wait()
        divisor = hops.nodes * hops.local if average else 1
        handle = start_all_reduce(
            self.sender,
            self.owner,
            sums[: self.sender.layout.numel],
            hops.inter,
            divisor,
            workspace,
            passed_on=(hops.intra, tensor, self._whole),
        )
        workspace.give(padded)
        workspace.give(buffer)  # it has been compressed
        return handle

    def states(self) -> list[SenderState]:
        """Exchange.states: every node has one sender for each chunk, and each of them owns a shard of it."""
        hops, layout = self.hops, self.sender.layout
        node = hops.inter.rank()
        start = min(hops.intra.rank() * self.chunk, self.numel)
        own = start + min(node * layout.shard_size, layout.numel)
        chunk = Position(start, layout.numel)
        ranks = hops.nodes * hops.local
        return [
            SenderState(self.sender, ALL_REDUCE, chunk, node, hops.nodes, ranks),
            SenderState(self.owner, OWNER, Position(own, self.owner.layout.numel)),
        ]

    def traffic(self, tensor: torch.Tensor) -> ExchangeTraffic:
        """Exchange.traffic; hops 1 and 3 stay inside the node."""
        hops = self.hops
        first = float((hops.local - 1) * self.chunk * tensor.element_size())
        if self.inside is not None:
            first = payloads(self.inside, hops.intra.rank()).nbytes
        inside = first + (hops.local - 1) * hops.nodes * self._whole.payload_bytes
        between = payloads(self.sender, hops.inter.rank()) + gathered(self._whole, hops.nodes - 1)
        return ExchangeTraffic(between, inside)

    def describe(self) -> str:
        """Exchange.describe."""
        return f"all-reduce in two hops over {self.hops.describe()}"
