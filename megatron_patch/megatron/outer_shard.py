"""A rank's shard of one bucket in outer steps (outer_steps.py): its anchor, its exchange, and the step.

`send`, `advance` and `receive` follow one another. With `compression.outer_delay` D the instance makes D - 1
optimizer steps between `send` and `receive`, whose updates are kept. (Streaming DiLoCo, arXiv 2501.18512,
delays too, but takes a weighted mean of the instance's weights and the new anchor.)

    send       before = master_k;  d_k = anchor - before
    receive    anchor steps by D, the mean of d_k;  master_k <- anchor + (master_k - before)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_patch.collectives.all_reduce import AllReduceHandle
from megatron_patch.collectives.exchange import Exchange, Handle, Traffic, all_reduced
from megatron_patch.megatron.seams.optimizer_step import Masters


def outer_step(
    anchor: torch.Tensor,
    velocity: torch.Tensor | None,
    difference: torch.Tensor,
    rate: float,
    momentum: float,
) -> None:
    """Take one step of SGD with Nesterov momentum in place: v <- momentum*v + D, then anchor -= rate*(D +
    momentum*v).

    All tensors are fp32 of one shape; `difference` is D, the mean of `anchor - master` over the instances.
    `velocity` is v, and None without momentum.
    """
    anchor.add_(difference, alpha=-rate)
    if velocity is not None:
        velocity.mul_(momentum).add_(difference)
        anchor.add_(velocity, alpha=-rate * momentum)


@dataclass
class _Sent:
    """An exchange under way."""

    before: torch.Tensor
    """The fp32 weights from which the difference was taken, [numel]."""
    difference: torch.Tensor
    """d_k, fp32 [numel], over which D is written."""
    moved: torch.Tensor
    """The norm of d_k, fp64."""
    handle: Handle
    divisor: int
    """What the result of `handle` must be divided by."""


@dataclass
class Shard:
    """This rank's shard of one bucket."""

    bucket: Any
    group: dist.ProcessGroup
    """The ranks that own this shard, one in each instance."""
    start: int
    """Where in the bucket the shard begins."""
    numel: int
    exchange: Exchange | None
    """The exchange in low bits; None with method none."""
    anchor: torch.Tensor | None = None
    velocity: torch.Tensor | None = None  # It stays None without momentum.
    under_way: _Sent | None = None
    squares: torch.Tensor | None = None
    """The squared norms of d_k and of D in the last exchange, fp64 [2]."""

    def pieces(self, masters: Masters) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield the fp32 weights in this shard, and their places in it."""
        for parameter in self.bucket.params_list:
            if parameter in masters:
                master, start = masters[parameter]
                first = start - self.start
                yield master.view(-1), slice(first, first + master.numel())

    def weights(self, masters: Masters, device: torch.device) -> torch.Tensor:
        """Return the fp32 weights as one tensor, [numel], with 0 where the bucket has padding."""
        found = torch.zeros(self.numel, device=device)
        for master, here in self.pieces(masters):
            found[here] = master
        return found

    def traffic(self, compresses: bool) -> Traffic:
        """Return what this rank sends in an exchange."""
        if self.anchor is None:
            return Traffic()
        if self.exchange is None or not compresses:
            return all_reduced(self.anchor, self.group.size())
        return self.exchange.traffic(self.anchor).between

    def send(self, masters: Masters, compresses: bool) -> None:
        """Start the exchange of how far this instance has moved, in low bits if `compresses`."""
        assert self.anchor is not None
        before = self.weights(masters, self.anchor.device)
        difference = self.anchor - before
        moved = torch.linalg.vector_norm(difference, dtype=torch.float64)
        if self.exchange is None or not compresses:
            work = dist.all_reduce(difference, group=self.group, async_op=True)
            self.under_way = _Sent(before, difference, moved, work, self.group.size())
            return
        for sender in self.exchange.senders:
            sender.measures = False  # The statistics that are reported are of gradients.
        handle = self.exchange.start(difference, difference, average=True)
        self.under_way = _Sent(before, difference, moved, handle, 1)

    def advance(self) -> None:
        """Start the second half of an exchange in low bits, so that it overlaps with the next steps, too."""
        if self.under_way is not None and isinstance(self.under_way.handle, AllReduceHandle):
            self.under_way.handle.advance()

    def receive(self, masters: Masters, rate: float, momentum: float) -> None:
        """End the exchange, and write the fp32 weights."""
        assert self.anchor is not None
        assert self.under_way is not None
        sent, self.under_way = self.under_way, None
        sent.handle.wait()
        sent.difference /= sent.divisor
        mean = torch.linalg.vector_norm(sent.difference, dtype=torch.float64)
        self.squares = torch.stack([sent.moved, mean]).square()
        outer_step(self.anchor, self.velocity, sent.difference, rate, momentum)
        for master, here in self.pieces(masters):
            # Without a delay the difference is 0, and all instances take the anchor itself.
            master.sub_(sent.before[here]).add_(self.anchor[here])
