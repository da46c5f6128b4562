"""An exchange carries one bucket's tensor between ranks in low bits, and owns the error states for it.

An exchange is one file that implements `Exchange`. makers.py chooses among the package's own; a user's is
registered with its `Topology` (registry.py). The bucket groups' seam starts an exchange; checkpoints, metrics
and the log know only this page. Bytes without compression are ideal counts, as a ring or an all-to-all moves
them. (gloo's own reduce-scatter moves twice the ideal; NCCL's does not.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_patch.collectives.sender import Sender
from megatron_patch.collectives.workspace import Workspace
from megatron_patch.config import CompressionConfig
from megatron_patch.quantization.blocks import Contents, Range
from megatron_patch.quantization.layout import BlockLayout

REDUCE_SCATTER = "reduce_scatter"
NODE_SUM = "node_sum"
ALL_REDUCE = "all_reduce"
OWNER = "owner"


@dataclass
class Traffic:
    """Bytes that one rank sends to other ranks, and the elements that they stand for."""

    nbytes: float = 0.0
    elements: float = 0.0

    def add(self, other: Traffic) -> None:
        self.nbytes += other.nbytes
        self.elements += other.elements

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.nbytes + other.nbytes, self.elements + other.elements)

    @property
    def bits_per_element(self) -> float:
        """Bits on the wire for every element sent."""
        return 8 * self.nbytes / self.elements if self.elements else 0.0


def reduce_scattered(tensor: torch.Tensor, ranks: int) -> Traffic:
    """An uncompressed reduce-scatter of a tensor, whole, over `ranks` ranks; an all-gather to it, too."""
    elements = tensor.numel() * (ranks - 1) / ranks
    return Traffic(elements * tensor.element_size(), elements)


def all_reduced(tensor: torch.Tensor, ranks: int) -> Traffic:
    """An uncompressed all-reduce of a tensor over `ranks` ranks."""
    half = reduce_scattered(tensor, ranks)
    return half + half


@dataclass(frozen=True)
class Position:
    """Elements of a bucket: `rows` stretches of `length`, the first at `start`, `stride` apart."""

    start: int
    length: int
    rows: int = 1
    stride: int = 0

    @property
    def numel(self) -> int:
        """How many elements there are."""
        return self.rows * self.length

    def ranges(self, low: int, high: int) -> list[Range]:
        """Where in the bucket those from number `low` to before `high` lie."""
        found = []
        for row in range(self.rows):
            first, last = max(low - row * self.length, 0), min(high - row * self.length, self.length)
            if first < last:
                found.append((self.start + row * self.stride + first, self.start + row * self.stride + last))
        return found

    def of(self, bucket: torch.Tensor) -> torch.Tensor:
        """These elements as a view of a bucket, [B] -> [rows, length]."""
        return bucket.as_strided((self.rows, self.length), (self.stride, 1), self.start)


class Handle(Protocol):
    """An exchange that has been started."""

    def wait(self) -> object:
        """Block (on CUDA: the current stream) until the output is written. Once only."""
        ...


@dataclass(frozen=True)
class SenderState:
    """A sender whose error state a checkpoint must keep, and which elements of the bucket it belongs to."""

    sender: Sender
    kind: str
    """One of the four above; NODE_SUM sends what its node has summed, OWNER an all-reduced shard."""
    position: Position
    """Which elements of the exchanged tensor."""
    index: int = 0
    senders: int = 1
    """Every element has `senders` of this kind, of which this is number `index`."""
    ranks: int = 1
    """How many ranks' tensors an average divides by."""


@dataclass(frozen=True)
class ExchangeTraffic:
    """What one rank sends in one exchange."""

    between: Traffic = field(default_factory=Traffic)
    """To the other ranks of the group; in two hops, to those of other nodes."""
    inside: float = 0.0
    """Bytes to ranks of the same node, in two hops."""


class Exchange(Protocol):
    """The exchange of one bucket between the ranks of a group."""

    def start(self, tensor: torch.Tensor, output: torch.Tensor, average: bool) -> Handle:
        """Compress and send `tensor`, [B] of fp32, bf16 or fp16; the handle's `wait` writes `output`.

        `output` may be a view into `tensor`, or `tensor` itself: it is written only after `tensor` was read.
        The sum over the group is divided by its ranks where `average` is asked for, as ReduceOp.AVG does.
        """
        ...

    def states(self) -> Sequence[SenderState]:
        """What a checkpoint must keep, in the order of allocation."""
        ...

    def traffic(self, tensor: torch.Tensor) -> ExchangeTraffic:
        """What `start` sends for such a tensor."""
        ...

    def describe(self) -> str:
        """A few words for the log: the kind of exchange, and its ranks."""
        ...


@dataclass(frozen=True)
class Setup:
    """What the exchanges of one model share when they are created."""

    config: CompressionConfig
    workspace: Workspace
    layouts: dict[tuple[Contents, int, bool], BlockLayout] = field(default_factory=dict)
    """Those that were made: layers of equal shapes share one, and its table of blocks."""

    def new_sender(self, layout: BlockLayout, first: bool = True, last: bool = True) -> Sender:
        """The sender of a layout, by default for both the first and the last level of an exchange."""
        return Sender(self.config, layout, self.device, first, last)

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.workspace.device

    def layout(self, contents: Contents, shards: int, whole_blocks: bool = False) -> BlockLayout:
        """The cut of a tensor that `shards` ranks share, with the configuration's bits and blocks."""
        key = contents, shards, whole_blocks
        if key not in self.layouts:
            numel, spans, config = contents.numel, contents.spans, self.config
            self.layouts[key] = BlockLayout.of(
                numel, shards, config.bits, config.block_size, whole_blocks, spans
            )
        return self.layouts[key]


class Topology(Protocol):
    """Creates the exchanges of one topology; all ranks of `group` call its functions with equal arguments."""

    @staticmethod
    def reduce_scatter(contents: Contents, group: dist.ProcessGroup, setup: Setup) -> Exchange:
        """Rank j of the group's N gets shard j of the sum, [B / N]."""
        ...

    @staticmethod
    def all_reduce(contents: Contents, group: dist.ProcessGroup, setup: Setup) -> Exchange:
        """Every rank gets the sum, [B]."""
        ...


def payloads(sender: Sender, own: int) -> Traffic:
    """The payloads of `sender` to the owners of its shards, but for the `own`-th, which is this rank's."""
    layout = sender.layout
    nbytes = sum(layout.payload_sizes) - layout.payload_sizes[own]
    return Traffic(nbytes, (layout.shards - 1) * layout.shard_size)


def gathered(layout: BlockLayout, peers: int) -> Traffic:
    """One payload of as many bytes as the longest of a cut to each of `peers` ranks."""
    return Traffic(peers * layout.payload_bytes, peers * layout.shard_size)
