"""The low-bit all-reduce: a reduce-scatter and an all-gather of quantized shards, an error state for each.

    senders:  h = g + e            -> payloads to the owners    e <- beta*e + (1-beta)*(h - s*q)
    owners:   x = sum of s_n*q_n      (fp32, divided by N where Megatron asked for the average)
              H = x + E            -> one payload to all        E <- beta*E + (1-beta)*(H - S*Q)
    all:      g <- S*Q of every shard, the owner's own included: every rank holds the same bits

The senders' part is the flat reduce-scatter; the owner then is the sender of its one shard (the "worker" and
"server" errors of 1-bit Adam, arXiv 2102.02888, algorithm 1, with LoCo's moving average). At 4 bits, and
8.25 bits an element in all, it moves about a quarter of a bf16 all-reduce.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_patch.collectives.exchange import ExchangeTraffic, SenderState, Setup, gathered, payloads
from megatron_patch.collectives.reduce_scatter import ReduceScatterHandle, start_reduce_scatter
from megatron_patch.collectives.workspace import Workspace
from megatron_patch.compensation.owner import decompress
from megatron_patch.compensation.resharding import ALL_REDUCE, OWNER, Position
from megatron_patch.compensation.sender import Sender
from megatron_patch.quantization.blocks import Contents
from megatron_patch.quantization.layout import BlockLayout


class AllReduce:
    """The flat all-reduce of a tensor over `group`, in place: `output` is the tensor itself.

    `sender` sends N shards; `owner` sends the one that this rank owns, `sender.layout.part(rank)`.
    """

    def __init__(self, tensor: Contents, group: dist.ProcessGroup, setup: Setup) -> None:
        self._group = group
        self._workspace = setup.workspace
        layout = setup.layout(tensor, group.size(), whole_blocks=setup.config.is_onebit_adam)
        self.sender = setup.new_sender(layout, last=False)
        self.owner = setup.new_sender(layout.part(group.rank()), first=False)

    def start(self, tensor: torch.Tensor, output: torch.Tensor, average: bool) -> AllReduceHandle:
        """Exchange.start; `output` must be `tensor`."""
        divisor = self._group.size() if average else 1
        return start_all_reduce(self.sender, self.owner, tensor, self._group, divisor, self._workspace)

    def states(self) -> list[SenderState]:
        """Exchange.states: every rank sends all, and owns one shard."""
        layout, rank, ranks = self.sender.layout, self._group.rank(), self._group.size()
        everything = Position(0, layout.numel)
        own = Position(min(rank * layout.shard_size, layout.numel), self.owner.layout.numel)
        return [
            SenderState(self.sender, ALL_REDUCE, everything, rank, ranks, ranks),
            SenderState(self.owner, OWNER, own),
        ]

    def traffic(self, tensor: torch.Tensor) -> ExchangeTraffic:
        """Exchange.traffic."""
        peers = self._group.size() - 1
        return ExchangeTraffic(
            payloads(self.sender, self._group.rank()) + gathered(self.sender.layout, peers)
        )

    def describe(self) -> str:
        """Exchange.describe."""
        return f"all-reduce over {self._group.size()} ranks"


class AllReduceHandle:
    """The rest of an all-reduce: `wait` ends the reduce-scatter and runs the all-gather. Once only."""

    def __init__(
        self,
        scatter: ReduceScatterHandle,
        reduced: torch.Tensor,
        owner: Sender,
        whole: BlockLayout,
        data: torch.Tensor,
        group: dist.ProcessGroup,
        workspace: Workspace,
        around: dist.ProcessGroup | None,
    ) -> None:
        self._scatter = scatter
        self._reduced: torch.Tensor | None = reduced
        self._owner = owner
        self._whole = whole
        self._data = data
        self._group = group
        self._workspace = workspace
        self._around = around

    @torch.no_grad()
    def wait(self) -> None:
        """Block (on CUDA: the current stream) until `data` holds the sum, or the average, on every rank."""
        if self._reduced is None:
            return
        reduced, self._reduced = self._reduced, None
        self._scatter.wait()
        owner, nbytes = self._owner, self._whole.payload_bytes
        send = self._workspace.take(1, nbytes)
        receive = self._workspace.take(self._group.size(), nbytes)
        with self._workspace.timed():
            owner.compress(_as_fp32(reduced)[: owner.layout.numel], send[:, : owner.layout.payload_bytes])
            send[:, owner.layout.payload_bytes :] = 0
        dist.all_gather_into_tensor(receive, send, group=self._group)
        buffers = [reduced, send, receive]
        if self._around is not None:
            passed = self._workspace.take(self._around.size(), receive.numel())
            dist.all_gather_into_tensor(passed, receive.view(1, -1), group=self._around)
            buffers.append(passed)
            receive = passed
        with self._workspace.timed():
            decompress(receive.view(-1, nbytes), owner.codec, self._whole, self._data)
        for buffer in buffers:
            self._workspace.give(buffer)


def start_all_reduce(
    sender: Sender,
    owner: Sender,
    data: torch.Tensor,
    group: dist.ProcessGroup,
    divisor: int,
    workspace: Workspace,
    passed_on: tuple[dist.ProcessGroup, torch.Tensor, BlockLayout] | None = None,
) -> AllReduceHandle:
    """Compress and send `data` [B] of fp32, bf16 or fp16; the handle's `wait` replaces it by what all hold.

    The sum is divided by `divisor`: by N, as ReduceOp.AVG does, or by 1. Where `passed_on` is a group whose
    ranks each do this with a chunk of one vector, the payloads go around it, and all chunks, in its order,
    replace that vector instead, whose layout is given too.
    """
    around, result, whole = passed_on or (None, data, sender.layout)
    reduced = workspace.take(1, 4 * sender.layout.shard_size, "sums")
    scatter = start_reduce_scatter(sender, owner.layout, data, _as_fp32(reduced), group, divisor, workspace)
    return AllReduceHandle(scatter, reduced, owner, whole, result, group, workspace, around)


def _as_fp32(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.view(-1).view(torch.float32)
