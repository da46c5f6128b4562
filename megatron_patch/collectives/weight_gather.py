"""The exact weight gather: every rank gets the others' new weights, from their changes alone.

Rank r of N owns shard r of a bucket, and all hold the whole bucket. The optimizer overwrites the owner's
shard only, so it is copied before:

    remember      old <- own shard                             before the optimizer's step: 2 bytes a weight
    encode        message <- code(old, own shard)              quantization/weight_code.py
    agree         [bytes, digest of what I had before]         one small all-gather for all buckets
    start, wait   all-gather of messages, decoded in place     as long as the longest of them

The digest is of the whole bucket with `old` in the own shard's place: it is the same on all ranks if they
hold the same weights. All ranks see all digests and lengths before anything else is sent, so all decide
alike: a bucket whose copies differ, or whose longest message saves nothing, is gathered in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_patch.collectives.workspace import Workspace
from megatron_patch.quantization import weight_code
from megatron_patch.quantization.backends import weight_coder
from megatron_patch.quantization.weight_code import (
    HEADER_BYTES,
    KIND,
    NEW_SUMS,
    OLD_SUMS,
    OWNER_CHANGED,
    STALE,
    UNCHANGED,
)

_ALIGNED = 8


class WeightsDiffer(RuntimeError):
    """A message that does not fit the weights it came to; the text names the bucket and the owner."""


class WeightGather:
    """The exact gather of one bucket over `group`.

    Args:
        bucket: [N * S] of bf16 or fp16, in whose shard `group.rank()` the optimizer writes.
        name: of the bucket, for messages.
    """

    def __init__(
        self, bucket: torch.Tensor, group: dist.ProcessGroup, workspace: Workspace, name: str
    ) -> None:
        self.name = name
        self.group = group
        self._bucket = bucket
        self._workspace = workspace
        self._coder = weight_coder(bucket.device)
        self._shards = bucket.view(torch.int16).view(group.size(), -1)
        self._own = self._shards[group.rank()]
        self._old = self._own.clone()
        self._message = self._own.new_empty(0, dtype=torch.uint8)
        self._sizes: list[int] = []

    @property
    def peers(self) -> int:
        """Ranks that a message goes to."""
        return self.group.size() - 1

    @property
    def shard_size(self) -> int:
        """S, weights of one shard."""
        return self._own.numel()

    @property
    def nbytes(self) -> int:
        """Memory of the old shard and the message."""
        return self._old.nbytes + self._message.nbytes

    @property
    def width(self) -> int:
        """Bytes of the agreed messages, which are as long as the longest of them."""
        return -(-max(self._sizes) // _ALIGNED) * _ALIGNED

    @property
    def message_bytes(self) -> int:
        """Bytes of this rank's message."""
        return self._message.numel()

    @property
    def unchanged(self) -> torch.Tensor:
        """How many weights of the own shard the last step left as they were, int64 []."""
        return self._header[UNCHANGED]

    @property
    def _header(self) -> torch.Tensor:
        return self._message[:HEADER_BYTES].view(torch.int64)

    def remember(self) -> None:
        """Keep the own shard as all ranks have it now."""
        self._old.copy_(self._own)

    @torch.no_grad()
    def encode(self) -> torch.Tensor:
        """Make the message; returns int64 [3]: its bytes, and the digest of the bucket before the step."""
        room = self._workspace.take(1, weight_code.bound(self.shard_size), "weight message")
        with self._workspace.timed():
            size = self._coder.encode(self._old, self._own, room[0])
            self._message = room[0, :size].clone()
            digest = self._digest()
        self._workspace.give(room)
        return torch.cat([digest.new_tensor([size]), digest])

    def _digest(self) -> torch.Tensor:
        """The two sums of the whole bucket before the step, int64 [2]."""
        bits, start = self._shards.view(-1), self.group.rank() * self.shard_size
        end = start + self.shard_size
        parts = (
            (0, self._coder.sums(bits[:start])),
            (start, self._header[OLD_SUMS]),
            (end, self._coder.sums(bits[end:])),
        )
        return torch.stack(
            [sum(s[0] for _, s in parts), sum(s[1] + first * s[0] for first, s in parts)]  # type: ignore[list-item]
        )

    def shard_sums(self) -> torch.Tensor:
        """The two sums of every shard before the step, int64 [N, 2]: which of them differs?"""
        found = [self._coder.sums(shard) for shard in self._shards]
        found[self.group.rank()] = self._coder.sums(self._old)
        return torch.stack(found)

    def agreed(self, sizes: Sequence[int]) -> bool:
        """Take the lengths of all ranks' messages; whether they save anything."""
        self._sizes = list(sizes)
        return self.width < self._own.nbytes

    @torch.no_grad()
    def start(self) -> WeightGatherHandle:
        """Send the message that was agreed on; the handle's `wait` writes the others' shards."""
        messages = self._workspace.take(self.group.size(), self.width, "weights")
        mine = messages[self.group.rank()]
        size = self._message.numel()
        mine[:size].copy_(self._message)
        mine[size:].zero_()
        header = mine[:HEADER_BYTES].view(torch.int64)
        # What is sent must lead to what the shard holds now: after the step somebody may have changed it.
        changed = (self._coder.sums(self._own) != header[NEW_SUMS]).any()
        header[KIND] = torch.where(changed, STALE, header[KIND])
        work = dist.all_gather_into_tensor(messages.view(-1), mine, group=self.group, async_op=True)
        return WeightGatherHandle(self, messages, work)

    def decode(self, messages: torch.Tensor) -> torch.Tensor:
        """Write the other ranks' shards; what was found of each message, int32 [N] on the device."""
        found = torch.zeros(self.group.size(), dtype=torch.int32, device=messages.device)
        with self._workspace.timed():
            for rank, size in enumerate(self._sizes):
                if rank != self.group.rank():
                    self._coder.decode(messages[rank, :size], self._shards[rank], found[rank : rank + 1])
            stale = messages[self.group.rank(), :HEADER_BYTES].view(torch.int64)[KIND] == STALE
            found[self.group.rank()] = stale * OWNER_CHANGED
        self._workspace.give(messages)
        return found

    def gather_in_full(self) -> None:
        """Megatron's own gather of the bucket, at once."""
        own = self._bucket.view(self.group.size(), -1)[self.group.rank()]
        dist.all_gather_into_tensor(self._bucket, own, group=self.group)

    def explain(self, found: Sequence[int]) -> WeightsDiffer:
        """The error for what `decode` found."""
        ranks = dist.get_process_group_ranks(self.group)
        owner, what = next((ranks[place], what) for place, what in enumerate(found) if what)
        return WeightsDiffer(
            f"weight gather of {self.name} on rank {dist.get_rank()}, shard of rank {owner}: "
            f"{weight_code.Mismatch(what)}"
        )


class WeightGatherHandle:
    """The rest of a gather. `wait` finishes it; what it found is looked at by `check`."""

    def __init__(self, gather: WeightGather, messages: torch.Tensor, work: Any) -> None:
        self.gather = gather
        self.in_full = False
        """Whether the bucket was gathered in full in the end, since its owner had changed it."""
        self._messages: torch.Tensor | None = messages
        self._work = work
        self._found: torch.Tensor | None = None

    @torch.no_grad()
    def wait(self) -> None:
        """Write the other ranks' shards. Once only."""
        if self._messages is None:
            return
        messages, self._messages = self._messages, None
        self._work.wait()
        self._found = self.gather.decode(messages)
        if self._found.device.type == "cpu":
            self.check()

    @torch.no_grad()
    def check(self) -> None:
        """See that every message fitted. On CPU `wait` does it; on CUDA it would wait for the gather.

        An owner that changed its weights after they were coded has told all ranks: on CPU they gather the
        bucket in full.

        Raises:
            WeightsDiffer: a message that did not fit this rank's copies; on CUDA also such an owner's.
        """
        if self._found is None:
            return
        found, on_cpu = self._found.tolist(), self._found.device.type == "cpu"
        self._found = None
        if OWNER_CHANGED in found and on_cpu:
            self.in_full = True
            self.gather.gather_in_full()
        elif any(found):
            raise self.gather.explain(found)


@dataclass(frozen=True)
class Agreement:
    """What all ranks know of a bucket before its messages are sent."""

    difference: str | None
    """Which ranks' copies are not their owners'; None where all are the same."""
    saves: bool
    """Whether the longest message is shorter than a shard."""


def agree(gathers: Sequence[WeightGather]) -> list[Agreement]:
    """Encode all `gathers`, of one process group, and tell all its ranks what they must know to send them.

    Every rank of the group must call it, with the same buckets in the same order.
    """
    offers = torch.stack([gather.encode() for gather in gathers])
    table = _all_gather(offers, gathers[0].group).tolist()
    agreed = []
    for gather, rows in zip(gathers, zip(*table, strict=True), strict=True):
        saves = gather.agreed([row[0] for row in rows])
        same = all(row[1:] == rows[0][1:] for row in rows)
        agreed.append(Agreement(None if same else _differences(gather), saves))
    return agreed


def _all_gather(mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    table = torch.empty(group.size(), *mine.shape, dtype=mine.dtype, device=mine.device)
    dist.all_gather_into_tensor(table.view(-1), mine.reshape(-1), group=group)
    return table


def _differences(gather: WeightGather) -> str:
    """Which ranks' copies of which shards are not their owners'. Every rank of the group must call it."""
    ranks = dist.get_process_group_ranks(gather.group)
    table = _all_gather(gather.shard_sums(), gather.group).tolist()
    wrong = [
        f"rank {ranks[holder]}'s copy of rank {ranks[owner]}'s shard"
        for owner in range(len(ranks))
        for holder in range(len(ranks))
        if table[holder][owner] != table[owner][owner]
    ]
    more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    return f"{gather.name}: {', '.join(wrong[:4])}{more}"
