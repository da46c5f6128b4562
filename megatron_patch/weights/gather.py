"""The exact weight gather: every rank gets the others' new weights, from their changes alone.

Rank r of N owns shard r of a bucket, and all hold the whole bucket. The optimizer overwrites the owner's
shard only, so it is copied before:

    remember      old <- own shard                             before the optimizer's step: 2 bytes a weight
    encode        message <- code(old, own shard)              weights/code.py
    agree         [bytes, digest of what I had before]         one small all-gather for all buckets
    start, wait   all-gather of messages, decoded in place     of one bucket, or several in one piece

The digest is of the whole bucket with `old` in the own shard's place: it is the same on all ranks if they
hold the same weights. All ranks see all digests and lengths before anything else is sent, so all decide
alike: a bucket whose copies differ, or whose longest message saves nothing, is gathered in full.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
import torch.distributed as dist

from megatron_patch.collectives.workspace import Workspace
from megatron_patch.quantization import backends, native
from megatron_patch.weights import code
from megatron_patch.weights import sums as weight_sums

_ALIGNMENT = 8
"""Bytes: every message begins where the numbers of its header may."""


class WeightGather:
    """The exact gather of one bucket over `group`.

    Args:
        bucket: [N * S] of bf16 or fp16, in whose shard `group.rank()` the optimizer writes.
        name: of the bucket, for messages.
    """

    def __init__(
        self,
        bucket: torch.Tensor,
        group: dist.ProcessGroup,
        workspace: Workspace,
        name: str,
    ) -> None:
        self.name = name
        self.group = group
        self._bucket = bucket
        self._workspace = workspace
        self._coder = coder_of(bucket.device)
        self._fp16 = bucket.dtype == torch.float16
        self._shards = bucket.view(torch.int16).view(group.size(), -1)
        self._own = self._shards[group.rank()]
        self._old = self._own.clone()
        self._message = self._own.new_empty(0, dtype=torch.uint8)
        self._facts = self._own.new_zeros(code.FACTS, dtype=torch.int64)
        self.sizes = np.zeros(0, np.int64)
        """Bytes of all ranks' messages, agreed on."""
        self.lengths = self.sizes
        """The same, aligned."""
        self.longest = 0
        """The largest of `lengths`."""

    @property
    def shard_size(self) -> int:
        """S, weights of one shard."""
        return self._own.numel()

    @property
    def shard_nbytes(self) -> int:
        """Bytes of one shard."""
        return self._own.nbytes

    @property
    def kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What lasts from step to step: the old shard and the message."""
        return self._old, self._message

    @property
    def nbytes(self) -> int:
        """Memory of the old shard and the message."""
        return self._old.nbytes + self._message.nbytes

    @property
    def message_bytes(self) -> int:
        """Bytes of this rank's message."""
        return self._message.numel()

    @property
    def unchanged(self) -> torch.Tensor:
        """How many weights of the own shard the last step left as they were, int64 []: a copy."""
        return self._facts[0].clone()

    def remember(self) -> None:
        """Keep the own shard as all ranks have it now."""
        self._old.copy_(self._own)

    @torch.no_grad()
    def encode(self) -> torch.Tensor:
        """Make the message; returns int64 [3]: its bytes, and the digest of the bucket before the step."""
        room = self._workspace.take(1, code.bound(self.shard_size), "weight message")
        with self._workspace.timed():
            size = self._coder.encode(self._old, self._own, self._fp16, room[0], self._facts)
            self._message = room[0, :size].clone()
            digest = self._digest()
        self._workspace.give(room)
        return torch.cat([digest.new_tensor([size]), digest])

    def _digest(self) -> torch.Tensor:
        """The two sums of the whole bucket before the step, int64 [2]."""
        return weight_sums.combined(self._all_sums(self._facts[1:]))

    def shard_sums(self) -> torch.Tensor:
        """The two sums of every shard before the step, int64 [N, 2]: which of them differs?"""
        return self._all_sums(self._coder.sums(self._old))

    def _all_sums(self, own: torch.Tensor) -> torch.Tensor:
        """The sums of every shard, int64 [N, 2], those of the own one given."""
        rank, sums = self.group.rank(), self._coder.sums
        return torch.cat([sums(self._shards[:rank]), own[None], sums(self._shards[rank + 1 :])])

    def agreed(self, sizes: np.ndarray) -> bool:
        """Take the lengths of all ranks' messages, int64 [N]; returns whether coded messages are shorter."""
        self.sizes = sizes
        self.lengths = -(-sizes // _ALIGNMENT) * _ALIGNMENT
        self.longest = int(self.lengths.max())
        return self.longest < self._own.nbytes

    def write(self, room: torch.Tensor, own_may_have_changed: bool) -> None:
        """Write the message into `room`, uint8 [its length, zeros behind it].

        If the shard changed after encoding, the message is marked stale.
        """
        size = self._message.numel()
        room[:size].copy_(self._message)
        room[size:].zero_()
        if own_may_have_changed:
            told = room[code.NEW_SUM].clone().view(torch.int64)
            changed = self._coder.sums(self._own)[0] != told[0]
            room[0] = torch.where(changed, code.STALE, room[0])

    def read(self, messages: torch.Tensor, places: torch.Tensor, found: torch.Tensor) -> None:
        """Write the other ranks' shards from all ranks' messages, as weights.code.decode."""
        self._coder.decode(messages, places, self._shards, self.group.rank(), found)

    def gather_in_full(self) -> None:
        """Megatron's own gather of the bucket, at once."""
        own = self._bucket.view(self.group.size(), -1)[self.group.rank()]
        dist.all_gather_into_tensor(self._bucket, own, group=self.group)


def coder_of(device: torch.device) -> ModuleType:
    """What has `encode`, `decode` and `sums` for tensors of a device: weights/code.py, or its kernels."""
    kernels = backends.available(device)
    if kernels is None:
        return code
    # Imported where it is used only: Triton takes a while.
    return importlib.import_module(
        f"megatron_patch.weights.{'native' if kernels is native else 'triton_kernels'}"
    )


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
    table = _all_gather(offers, gathers[0].group).cpu().numpy()
    by_bucket = np.ascontiguousarray(table.transpose(1, 2, 0))  # [buckets, 3, N]
    same = (by_bucket[:, 1:] == by_bucket[:, 1:, :1]).all(axis=(1, 2)).tolist()
    return [
        Agreement(None if copies_agree else _differences(gather), gather.agreed(of_ranks[0]))
        for gather, of_ranks, copies_agree in zip(gathers, by_bucket, same, strict=True)
    ]


def _all_gather(mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    table = torch.empty(group.size(), *mine.shape, dtype=mine.dtype, device=mine.device)
    dist.all_gather_into_tensor(table.view(-1), mine.reshape(-1), group=group)
    return table


def _differences(gather: WeightGather) -> str:
    """Which ranks' copies of which shards are not their owners'. Every rank of the group must call it."""
    ranks = dist.get_process_group_ranks(gather.group)
    table = _all_gather(gather.shard_sums(), gather.group).cpu().numpy()  # [holder, owner, 2]
    owners = np.arange(len(ranks))
    wrong = np.argwhere((table != table[owners, owners]).any(axis=2).T).tolist()
    named = [f"rank {ranks[holder]}'s copy of rank {ranks[owner]}'s shard" for owner, holder in wrong[:4]]
    more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    return f"{gather.name}: {', '.join(named)}{more}"
