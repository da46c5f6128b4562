"""The exact weight gather: every rank gets the other ranks' new weights from messages with their changes.

Rank r of N owns shard r of a bucket, and every rank has the whole bucket. The optimizer overwrites the
owner's shard only, so this shard is copied before:

    remember      old <- own shard                             before the optimizer's step: 2 bytes a weight
    encode        message <- code(old, own shard)              weights/code.py
    agree         [bytes, digest of the old bucket]            one small all-gather for all buckets
    start, wait   all-gather of messages, decoded in place     for one bucket, or several together (batch.py)

The digest is of the whole bucket before the step, with `old` as the own shard: it is the same on all ranks
that have the same weights. All ranks see all digests and lengths before they send messages, and so make the
same decision: a bucket whose copies differ, or whose longest message saves nothing, is gathered in full.
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
from megatron_patch.errors import UserError
from megatron_patch.quantization import backends, native
from megatron_patch.weights import code
from megatron_patch.weights import sums as weight_sums

_ALIGNMENT = 8
"""Every message begins at a multiple of this many bytes; its numbers need 4 (docs/weight_code.md)."""


class WeightGather:
    """The exact gather of one bucket over `group`.

    Args:
        bucket: [N * S] of bf16 or fp16; the optimizer updates its shard `group.rank()`.
        name: the bucket's name in logs and errors.
    """

    def __init__(
        self, bucket: torch.Tensor, group: dist.ProcessGroup, workspace: Workspace, name: str
    ) -> None:
        self.name = name
        self.group = group
        self._bucket = bucket
        self._workspace = workspace
        self._coder = coder_of(bucket.device)
        self._fp16 = bucket.dtype == torch.float16
        self._shards = bucket.view(torch.int16).view(group.size(), -1)
        self._own = self._shards[group.rank()]
        self._old = self._own.new_empty(0)
        self._message = self._own.new_empty(0, dtype=torch.uint8)
        self._facts = self._own.new_zeros(code.FACTS, dtype=torch.int64)
        self.sizes = np.zeros(0, np.int64)
        """The bytes of all ranks' messages, as `agree` has exchanged them."""
        self.lengths = self.sizes
        """`sizes`, each rounded up to a multiple of 8."""
        self.longest = 0

    @property
    def shard_size(self) -> int:
        """S, the number of weights of one shard."""
        return self._own.numel()

    @property
    def shard_nbytes(self) -> int:
        return self._own.nbytes

    @property
    def kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors that are kept between steps: the old shard and the message."""
        return self._old, self._message

    @property
    def nbytes(self) -> int:
        """The bytes of the old shard and the message."""
        return self._old.nbytes + self._message.nbytes

    @property
    def message_bytes(self) -> int:
        return self._message.numel()

    @property
    def unchanged(self) -> torch.Tensor:
        """The number of weights of the own shard that the last step did not change, a copy, int64 []."""
        return self._facts[0].clone()

    def remember(self) -> None:
        """Copy the own shard, which all ranks have, before the optimizer's step."""
        if not self._old.numel():
            self._old = torch.empty_like(self._own)
        self._old.copy_(self._own)

    def forget(self) -> None:
        """Free the old shard and the message until `remember` is called again."""
        self._old, self._message = self._old.new_empty(0), self._message.new_empty(0)

    @torch.no_grad()
    def encode(self) -> torch.Tensor:
        """Make the message; returns its bytes and the digest of the bucket before the step, int64 [3]."""
        room = self._workspace.take(1, code.bound(self.shard_size), "weight message")
        with self._workspace.timed():
            size = self._coder.encode(self._old, self._own, self._fp16, room[0], self._facts)
            self._message = room[0, :size].clone()
            digest = self._digest()
        self._workspace.give(room)
        return torch.cat([digest.new_tensor([size]), digest])

    def _digest(self) -> torch.Tensor:
        """Return the two sums of the whole bucket before the step, int64 [2]."""
        return weight_sums.combined(self._all_sums(self._facts[1:]))

    def shard_sums(self) -> torch.Tensor:
        """Return the two sums of every shard before the step, int64 [N, 2], which show which copy differs."""
        return self._all_sums(self._coder.sums(self._old))

    def _all_sums(self, own: torch.Tensor) -> torch.Tensor:
        """Return the two sums of every shard, int64 [N, 2]; `own` are those of the own shard."""
        rank, sums = self.group.rank(), self._coder.sums
        return torch.cat([sums(self._shards[:rank]), own[None], sums(self._shards[rank + 1 :])])

    def agreed(self, sizes: np.ndarray) -> bool:
        """Set the bytes of all ranks' messages, int64 [N]; returns whether all are shorter than a shard."""
        self.sizes = sizes
        self.lengths = -(-sizes // _ALIGNMENT) * _ALIGNMENT
        self.longest = int(self.lengths.max())
        return self.longest < self._own.nbytes

    def write(self, room: torch.Tensor, own_may_have_changed: bool) -> None:
        """Write the message, and zeros after it, into `room`, uint8 [its aligned length].

        If `own_may_have_changed` and the own shard has changed since `encode`, the kind becomes STALE.
        """
        size = self._message.numel()
        room[:size].copy_(self._message)
        room[size:].zero_()
        if own_may_have_changed:
            told = room[code.NEW_SUM].clone().view(torch.int64)
            changed = self._coder.sums(self._own)[0] != told[0]
            room[0] = torch.where(changed, code.STALE, room[0])

    def read(self, messages: torch.Tensor, places: torch.Tensor, verdicts: torch.Tensor) -> None:
        """Decode the other ranks' shards from all ranks' messages, as weights.code.decode."""
        self._coder.decode(messages, places, self._shards, self.group.rank(), verdicts)

    def gather_in_full(self) -> None:
        """All-gather the bucket uncompressed, as Megatron does."""
        own = self._bucket.view(self.group.size(), -1)[self.group.rank()]
        dist.all_gather_into_tensor(self._bucket, own, group=self.group)


def coder_of(device: torch.device) -> ModuleType:
    """Return the module with `encode`, `decode` and `sums` for a device: weights/code.py or its kernels."""
    kernels = backends.available(device)
    if kernels is None:
        return code
    # Importing Triton takes a while, so it is imported only if it is used.
    return importlib.import_module(
        f"megatron_patch.weights.{'native' if kernels is native else 'triton_kernels'}"
    )


def try_kernels(device: torch.device) -> None:
    """Code a few weights if `device` is a GPU.

    Raises:
        UserError: the kernels cannot be compiled, or they decode other weights than were coded.
    """
    if device.type != "cuda":
        return
    with backends.explained():
        old = torch.arange(64, dtype=torch.int16, device=device)
        new = old + (old % 5)
        message = old.new_empty(1, code.bound(64), dtype=torch.uint8)
        facts = old.new_empty(code.FACTS, dtype=torch.int64)
        size = coder_of(device).encode(old, new, False, message[0], facts)
        place = torch.tensor([[0, size]], device=device)
        coder_of(device).decode(message, place, old[None], -1, facts[:1].int())
    if not torch.equal(old, new):
        raise UserError(f"the kernels of weight_gather exact decode other weights on {device}: use stock")


@dataclass(frozen=True)
class Agreement:
    """What all ranks have found out about a bucket before its messages are sent."""

    difference: str | None
    """The names of the ranks' copies that differ from the owners' shards; None if no copy differs."""
    saves: bool
    """Whether the longest message is shorter than a shard."""


def agree(gathers: Sequence[WeightGather]) -> list[Agreement]:
    """Encode all `gathers`, of one process group, and exchange the messages' bytes and the digests.

    Every rank of the group must call it with the same buckets in the same order.
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
    """Name the copies that differ from their owners' shards. Every rank of the group must call it."""
    ranks = dist.get_process_group_ranks(gather.group)
    table = _all_gather(gather.shard_sums(), gather.group).cpu().numpy()  # [holder, owner, 2]
    owners = np.arange(len(ranks))
    wrong = np.argwhere((table != table[owners, owners]).any(axis=2).T).tolist()
    named = [f"rank {ranks[holder]}'s copy of rank {ranks[owner]}'s shard" for owner, holder in wrong[:4]]
    more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    return f"{gather.name}: {', '.join(named)}{more}"
