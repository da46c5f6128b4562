"""The interface of exchanges. An exchange reduces one bucket between ranks in low bits and has its errors.

makers.py chooses among the package's own exchanges; a user registers a `Topology` that creates others
(registry.py). Session.start starts an exchange; checkpoints, metrics and the log use only the interface in
this file. The bytes of uncompressed collectives are ideal counts, as a ring or an all-to-all sends them.
(gloo's reduce-scatter sends twice as many; NCCL's does not.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_patch.collectives.sender import Sender
from megatron_patch.collectives.topology import inside_shares
from megatron_patch.collectives.workspace import Workspace
from megatron_patch.config import CompressionConfig
from megatron_patch.quantization.blocks import Contents
from megatron_patch.quantization.layout import BlockLayout


@dataclass
class Traffic:
    """Bytes that one rank sends to other ranks, and the elements that they stand for."""

    nbytes: float = 0.0
    elements: float = 0.0
    inside: float = 0.0
    """Of these bytes, those to ranks of the same node."""

    def add(self, other: Traffic) -> None:
        self.nbytes += other.nbytes
        self.elements += other.elements
        self.inside += other.inside

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.nbytes + other.nbytes, self.elements + other.elements, self.inside + other.inside)

    def __mul__(self, factor: float) -> Traffic:
        return Traffic(self.nbytes * factor, self.elements * factor, self.inside * factor)

    @property
    def bits_per_element(self) -> float:
        """Bits sent per element; 0 if none was sent."""
        return 8 * self.nbytes / self.elements if self.elements else 0.0


def in_a_ring(nbytes: float, elements: float, group: dist.ProcessGroup) -> Traffic:
    """The traffic of a collective over `group` that sends this much from each rank to the next one."""
    return Traffic(nbytes, elements, nbytes * inside_shares(group)[0])


def reduce_scattered(tensor: torch.Tensor, group: dist.ProcessGroup) -> Traffic:
    """The traffic of an uncompressed reduce-scatter from, or all-gather to, the whole `tensor`."""
    elements = tensor.numel() * (group.size() - 1) / group.size()
    return in_a_ring(elements * tensor.element_size(), elements, group)


def all_reduced(tensor: torch.Tensor, group: dist.ProcessGroup) -> Traffic:
    """The traffic of an uncompressed all-reduce of `tensor` over the ranks of `group`."""
    half = reduce_scattered(tensor, group)
    return half + half


class Handle(Protocol):
    """An exchange that has been started."""

    def wait(self) -> object:
        """Block (on CUDA: the current stream) until the output is written. Later calls do nothing."""
        ...


@dataclass(frozen=True)
class ExchangeTraffic:
    """What one rank sends in one exchange."""

    between: Traffic = field(default_factory=Traffic)
    """The traffic to the other ranks of the group; in two hops, to ranks of other nodes only."""
    inside: float = 0.0
    """In two hops, bytes to ranks of the same node."""


CARRIED = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of gradients that can be compressed."""


class Exchange(Protocol):
    """The exchange of one bucket, or of another tensor, between the ranks of a group."""

    def start(self, tensor: torch.Tensor, output: torch.Tensor, average: bool) -> Handle:
        """Compress and send `tensor`, [B] of fp32, bf16 or fp16; the handle's `wait` writes `output`.

        `output` may be a view into `tensor`, or `tensor` itself: it is written only after `tensor` was read.
        With `average` the sum is divided by the number of ranks of the group, as ReduceOp.AVG does.
        """
        ...

    @property
    def senders(self) -> Sequence[Sender]:
        """The senders of this rank, whose errors a checkpoint must keep, in the order of their allocation."""
        ...

    def traffic(self, tensor: torch.Tensor) -> ExchangeTraffic:
        """Return what `start` sends for a tensor of this size and dtype."""
        ...

    def describe(self) -> str:
        """Name the kind of exchange and its ranks in a few words, for the log."""
        ...


@dataclass(frozen=True)
class Setup:
    """What all exchanges of one model are created with."""

    config: CompressionConfig
    workspace: Workspace
    layouts: dict[tuple[Contents, int, bool], BlockLayout] = field(default_factory=dict)
    """A cache: buckets with equal contents share one layout and its table of blocks."""

    def new_sender(self, layout: BlockLayout, first: bool = True, last: bool = True) -> Sender:
        """Create the sender of a layout; `first` and `last` as in Sender."""
        return Sender(self.config, layout, self.device, first, last)

    @property
    def device(self) -> torch.device:
        return self.workspace.device

    def layout(self, contents: Contents, shards: int, whole_blocks: bool = False) -> BlockLayout:
        """Return the layout of a tensor in `shards` shards, with the configured bits and block size."""
        key = contents, shards, whole_blocks
        if key not in self.layouts:
            numel, spans, config = contents.numel, contents.spans, self.config
            self.layouts[key] = BlockLayout.of(
                numel, shards, config.bits, config.block_size, whole_blocks, spans
            )
        return self.layouts[key]


class Topology(Protocol):
    """Creates the exchanges of one topology. All ranks of `group` call it with equal arguments."""

    @staticmethod
    def reduce_scatter(contents: Contents, group: dist.ProcessGroup, setup: Setup) -> Exchange:
        """Create an exchange that gives rank j of the group's N ranks shard j of the sum, [B / N]."""
        ...

    @staticmethod
    def all_reduce(contents: Contents, group: dist.ProcessGroup, setup: Setup) -> Exchange:
        """Create an exchange that gives every rank the sum, [B]."""
        ...


def payloads(sender: Sender, own: int) -> Traffic:
    """The traffic of `sender`'s payloads to the owners of all shards except shard `own`, which stays here."""
    layout = sender.layout
    nbytes = sum(layout.payload_sizes) - layout.payload_sizes[own]
    return Traffic(nbytes, (layout.shards - 1) * layout.shard_size)


def gathered(layout: BlockLayout, peers: int) -> Traffic:
    """The traffic of one payload, of the length of the longest of `layout`, to each of `peers` ranks."""
    return Traffic(peers * layout.payload_bytes, peers * layout.shard_size)
