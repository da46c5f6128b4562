"""The two-hop low-bit all-reduce: a node's sum, low bits between nodes, and their payloads around the node.

A vector of B elements is cut in R chunks, one for each local rank of a node; M nodes:

    hop 1   local rank j sums chunk j over its node                 gradient precision, or 8 bits
    hop 2   the low-bit all-reduce of chunk j over the M ranks j    all_reduce.py, errors of the node's sum
    hop 3   the payloads that hop 2 ends with go to the node's other ranks, and all decode them

Between nodes it moves R times less than the flat all-reduce, and its errors are 1/R of the memory. The
average is divided by M*R after both sums. Chunks are cut so that M*R shards of one length lie end to end.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_patch.collectives.all_reduce import AllReduceHandle, SenderAndOwner, start_all_reduce
from megatron_patch.collectives.reduce_scatter import start_reduce_scatter
from megatron_patch.collectives.topology import TwoHops
from megatron_patch.collectives.two_hop_reduce_scatter import inside_sender
from megatron_patch.collectives.workspace import Workspace
from megatron_patch.compensation.sender import Sender
from megatron_patch.config import CompressionConfig
from megatron_patch.quantization.layout import BlockLayout


@dataclass(frozen=True)
class TwoHopSenderAndOwner(SenderAndOwner):
    """A rank's parts in the two-hop all-reduce of `numel` elements: those of its chunk, and its groups.

    `chunk` is the length of a chunk; the last ones may be short, or empty. `inside` sends to the node's ranks
    in 8 bits and remembers nothing (None: gradient precision).
    """

    hops: TwoHops
    numel: int
    chunk: int
    inside: Sender | None

    @property
    def start(self) -> int:
        """Where this rank's chunk begins."""
        return min(self.hops.intra.rank() * self.chunk, self.numel)

    def inside_bytes(self, data: torch.Tensor) -> float:
        """Bytes that this rank sends to others of its node, in hops 1 and 3."""
        others, layout = self.hops.local - 1, self.sender.layout
        first = self.chunk * data.element_size() if self.inside is None else self.inside.layout.payload_bytes
        return float(others * (first + self.hops.nodes * layout.payload_bytes))


def layouts(
    numel: int, hops: TwoHops, config: CompressionConfig, whole_blocks: bool
) -> tuple[int, BlockLayout]:
    """The length of a chunk, and the layout of this rank's over the nodes."""
    shard = BlockLayout.of(
        numel, hops.nodes * hops.local, config.bits, config.block_size, whole_blocks
    ).shard_size
    chunk = hops.nodes * shard
    whole = BlockLayout.of(chunk, hops.nodes, config.bits, config.block_size)
    start = hops.intra.rank() * chunk
    return chunk, dataclasses.replace(whole, numel=min(max(numel - start, 0), chunk))


def parts(
    numel: int, chunk: int, hops: TwoHops, sender: Sender, owner: Sender, config: CompressionConfig
) -> TwoHopSenderAndOwner:
    """The state of the two-hop all-reduce of `numel` elements, with what `layouts` says."""
    inside = inside_sender(chunk * hops.local, hops, config, sender.statistics.device)
    return TwoHopSenderAndOwner(sender, owner, hops, numel, chunk, inside)


def start_two_hop_all_reduce(
    mine: TwoHopSenderAndOwner, data: torch.Tensor, average: bool, workspace: Workspace
) -> AllReduceHandle:
    """Sum `data` [B] in the node and send the sums; the handle's `wait` replaces it by what all hold.

    The first hop is over when this returns (on CUDA: on the current stream).
    """
    hops = mine.hops
    padded = workspace.take(1, mine.chunk * hops.local * data.element_size(), "columns")
    whole = padded.view(-1).view(data.dtype)
    whole[: mine.numel].copy_(data)
    whole[mine.numel :].zero_()
    dtype = data.dtype if mine.inside is None else torch.float32
    buffer = workspace.take(1, mine.chunk * dtype.itemsize, "node sums")
    sums = buffer.view(-1).view(dtype)
    if mine.inside is None:
        dist.reduce_scatter_tensor(sums, whole, group=hops.intra)
    else:
        start_reduce_scatter(mine.inside, whole, sums, hops.intra, 1, workspace).wait()
    divisor = hops.nodes * hops.local if average else 1
    handle = start_all_reduce(
        mine, sums[: mine.sender.layout.numel], hops.inter, divisor, workspace, passed_on=(hops.intra, data)
    )
    workspace.give(padded)
    workspace.give(buffer)  # it has been compressed
    return handle
