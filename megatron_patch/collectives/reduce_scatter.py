"""The flat low-bit reduce-scatter: one uint8 all-to-all per bucket, summed by the shard's owner.

Rank n sends payload j of its bucket to rank j; rank j receives N payloads of shard j, decodes them and sums
them in fp32 in rank order. An all-to-all cannot run in place: the exchange holds two buffers of
the payloads' size, which come from a pool and go back to it when the sum is done.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_patch.collectives.exchange import ExchangeTraffic, SenderState, Setup, payloads
from megatron_patch.collectives.workspace import Workspace
from megatron_patch.compensation.owner import decompress_reduce
from megatron_patch.compensation.resharding import REDUCE_SCATTER, Position
from megatron_patch.compensation.sender import Sender
from megatron_patch.quantization.blocks import Contents
from megatron_patch.quantization.layout import BlockLayout


class ReduceScatter:
    """The flat reduce-scatter of a bucket over `group`: `output` is this rank's shard."""

    def __init__(self, bucket: Contents, group: dist.ProcessGroup, setup: Setup) -> None:
        self._group = group
        self._workspace = setup.workspace
        self.sender = setup.new_sender(setup.layout(bucket, group.size()))
        self._own = self.sender.layout.part(group.rank())

    def start(self, tensor: torch.Tensor, output: torch.Tensor, average: bool) -> ReduceScatterHandle:
        """Exchange.start; `output` is [S]."""
        divisor = self._group.size() if average else 1
        return start_reduce_scatter(
            self.sender, self._own, tensor, output, self._group, divisor, self._workspace
        )

    def states(self) -> list[SenderState]:
        """Exchange.states: every rank sends the whole bucket."""
        ranks = self._group.size()
        whole = Position(0, self.sender.layout.numel)
        return [SenderState(self.sender, REDUCE_SCATTER, whole, self._group.rank(), ranks, ranks)]

    def traffic(self, tensor: torch.Tensor) -> ExchangeTraffic:
        """Exchange.traffic."""
        return ExchangeTraffic(payloads(self.sender, self._group.rank()))

    def describe(self) -> str:
        """Exchange.describe."""
        return f"reduce-scatter over {self._group.size()} ranks"


class ReduceScatterHandle:
    """The rest of an exchange: `wait` finishes the all-to-all and writes the reduced shard. Once only."""

    def __init__(
        self,
        work: Any,
        send: torch.Tensor,
        receive: torch.Tensor,
        workspace: Workspace,
        sender: Sender,
        own: BlockLayout,
        output: torch.Tensor,
        divisor: int,
    ) -> None:
        self._work = work
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = (send, receive)
        self._workspace = workspace
        self._codec = sender.codec
        self._own = own
        self._output = output
        self._divisor = divisor

    @torch.no_grad()
    def wait(self) -> None:
        """Block (on CUDA: the current stream) until the payloads are here, then sum them into the shard."""
        if self._buffers is None:
            return
        send, receive = self._buffers
        self._buffers = None
        if self._work is not None:
            self._work.wait()
        with self._workspace.timed():
            decompress_reduce(receive, self._codec, self._own, self._output, self._divisor)
        self._workspace.give(send)
        self._workspace.give(receive)


def start_reduce_scatter(
    sender: Sender,
    own: BlockLayout,
    gradient: torch.Tensor,
    output: torch.Tensor,
    group: dist.ProcessGroup,
    divisor: int,
    workspace: Workspace,
) -> ReduceScatterHandle:
    """Compress `gradient` [B] and send it; the handle's `wait` writes this rank's shard to `output` [S].

    `own` is the layout of that shard: `sender.layout.part` of the rank in `group`.
    `output` may be a view into `gradient` (Megatron's is): it is written only after the gradient was read.
    The sum is divided by `divisor`: by N, as ReduceOp.AVG does, or by 1.
    """
    layout = sender.layout
    sizes = layout.payload_sizes
    send = workspace.take(1, sum(sizes))
    receive = workspace.take(layout.shards, own.payload_bytes)
    with workspace.timed():
        sender.compress(gradient, send)
    if len(set(sizes)) == 1:
        work = dist.all_to_all_single(receive.view(-1), send[0], group=group, async_op=True)
    else:
        of_senders = [own.payload_bytes] * layout.shards
        work = dist.all_to_all_single(receive.view(-1), send[0], of_senders, sizes, group, async_op=True)
    return ReduceScatterHandle(work, send, receive, workspace, sender, own, output, divisor)
