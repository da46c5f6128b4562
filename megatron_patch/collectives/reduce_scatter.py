"""The flat low-bit reduce-scatter: one uint8 all-to-all per bucket; each shard's owner sums the payloads.

Rank n sends payload j of its bucket to rank j; rank j receives N payloads of shard j, decodes them and sums
them in fp32 in rank order. An all-to-all cannot run in place: the exchange takes two buffers of the payloads'
size from a pool and gives them back when the sum is done.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_patch.collectives.exchange import ExchangeTraffic, Setup, payloads
from megatron_patch.collectives.sender import Sender, decompress_reduce
from megatron_patch.quantization.blocks import Contents


class ReduceScatter:
    """The flat reduce-scatter of a bucket over `group`: `output` is this rank's shard.

    `sender` is given if this is one hop of several (two_hop.py); it then has a layout of its own.
    """

    def __init__(
        self, bucket: Contents, group: dist.ProcessGroup, setup: Setup, sender: Sender | None = None
    ) -> None:
        self.group = group
        self.workspace = setup.workspace
        self.sender = sender or setup.new_sender(setup.layout(bucket, group.size()))
        self.own = self.sender.layout.part(group.rank())

    def start(self, tensor: torch.Tensor, output: torch.Tensor, average: bool) -> ReduceScatterHandle:
        """Exchange.start; `output` is [S]."""
        return self.send(tensor, output, self.group.size() if average else 1)

    def send(self, tensor: torch.Tensor, output: torch.Tensor, divisor: int) -> ReduceScatterHandle:
        """Compress `tensor` [B] and send it.

        The handle's `wait` writes this rank's shard of the sum, divided by `divisor`, to `output` [S].
        """
        layout = self.sender.layout
        sizes = layout.payload_sizes
        send = self.workspace.take(1, sum(sizes))
        receive = self.workspace.take(layout.shards, self.own.payload_bytes)
        with self.workspace.timed():
            self.sender.compress(tensor, send)
        if len(set(sizes)) == 1:
            work = dist.all_to_all_single(receive.view(-1), send[0], group=self.group, async_op=True)
        else:
            received = [self.own.payload_bytes] * layout.shards
            work = dist.all_to_all_single(receive.view(-1), send[0], received, sizes, self.group, True)
        return ReduceScatterHandle(self, work, send, receive, output, divisor)

    @property
    def senders(self) -> list[Sender]:
        """Exchange.senders: every rank sends the whole bucket."""
        return [self.sender]

    def traffic(self, tensor: torch.Tensor) -> ExchangeTraffic:
        return ExchangeTraffic(payloads(self.sender, self.group.rank()))

    def describe(self) -> str:
        return f"reduce-scatter over {self.group.size()} ranks"


class ReduceScatterHandle:
    """The handle of a started exchange: `wait` ends the all-to-all and writes the reduced shard, once."""

    def __init__(
        self,
        exchange: ReduceScatter,
        work: Any,
        send: torch.Tensor,
        receive: torch.Tensor,
        output: torch.Tensor,
        divisor: int,
    ) -> None:
        self._exchange = exchange
        self._work = work
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = (send, receive)
        self._output = output
        self._divisor = divisor

    @torch.no_grad()
    def wait(self) -> None:
        """Block (on CUDA: the current stream) until the payloads are here, then sum them into the shard."""
        if self._buffers is None:
            return
        send, receive = self._buffers
        self._buffers = None
        exchange, workspace = self._exchange, self._exchange.workspace
        if self._work is not None:
            self._work.wait()
        with workspace.timed():
            decompress_reduce(receive, exchange.sender.codec, exchange.own, self._output, self._divisor)
        workspace.give(send)
        workspace.give(receive)
