"""Sends the exact weight gather's messages in batches of several buckets.

Every rank pads its messages of a batch to the length of the rank that has most. The lengths average out over
several buckets, so that batches, which are as large as memory allows, need less padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_patch.collectives.workspace import Workspace
from megatron_patch.weights.code import OWNER_CHANGED, Mismatch
from megatron_patch.weights.gather import WeightGather


class WeightsDiffer(RuntimeError):
    """A message does not fit this rank's copy of the old weights; the text names the bucket and the owner."""


class Batch:
    """Buckets of one group whose messages, which all ranks have agreed on, are sent in one all-gather."""

    def __init__(self, gathers: Sequence[WeightGather]) -> None:
        self.gathers = gathers
        self.group = gathers[0].group
        lengths = np.stack([gather.lengths for gather in gathers])
        totals = lengths.sum(axis=0)
        self.width = int(totals.max())
        """The bytes that every rank sends, padding included."""
        self._mean = float(totals.mean())
        starts = lengths.cumsum(axis=0) - lengths
        self.places = torch.from_numpy(np.stack([starts, [gather.sizes for gather in gathers]], axis=2))
        """For each bucket and rank, where the message begins, and its bytes: int64 [buckets, ranks, 2]."""

    def nbytes_of(self, gather: WeightGather) -> float:
        """Return a bucket's part of the bytes that this rank sends, with its share of the padding."""
        share = float(gather.lengths.mean()) / self._mean
        return (self.group.size() - 1) * self.width * share

    @torch.no_grad()
    def start(self, workspace: Workspace, own_may_have_changed: bool) -> BatchHandle:
        """Send the messages; the handle's `wait` writes the other ranks' shards.

        Args:
            own_may_have_changed: whether this rank's weights may have changed since `agree`, because a user
                edited them between the step and the next forward pass.
        """
        ranks, rank = self.group.size(), self.group.rank()
        messages = workspace.take(ranks, self.width, "weights")
        for gather, place in zip(self.gathers, self.places[:, rank].tolist(), strict=True):
            room = messages[rank, place[0] : place[0] + int(gather.lengths[rank])]
            gather.write(room, own_may_have_changed)
        work = dist.all_gather_into_tensor(messages.view(-1), messages[rank], group=self.group, async_op=True)
        return BatchHandle(self, messages, work, workspace)


class BatchHandle:
    """The handle of a started gather: `wait` finishes it, and `check` looks at what decoding has found."""

    def __init__(self, batch: Batch, messages: torch.Tensor, work: Any, workspace: Workspace) -> None:
        self.batch = batch
        self.in_full = False
        """Whether the buckets were gathered uncompressed in the end, because an owner's weights changed."""
        self._messages: torch.Tensor | None = messages
        self._work = work
        self._workspace = workspace
        self._verdicts: torch.Tensor | None = None

    @torch.no_grad()
    def wait(self) -> None:
        """Write the other ranks' shards. Later calls do nothing."""
        if self._messages is None:
            return
        messages, self._messages = self._messages, None
        self._work.wait()
        places = self.batch.places.to(messages.device, non_blocking=True)
        verdicts = torch.empty(places.shape[:2], dtype=torch.int32, device=messages.device)
        with self._workspace.timed():
            for gather, of_ranks, of_bucket in zip(self.batch.gathers, places, verdicts, strict=True):
                gather.read(messages, of_ranks, of_bucket)
        self._workspace.give(messages)
        self._verdicts = verdicts
        if verdicts.device.type == "cpu":
            self.check()

    @torch.no_grad()
    def check(self) -> None:
        """Check that all messages were decoded. On CPU `wait` calls it; on CUDA it waits for the gather.

        If an owner's weights changed after they were coded, its message says so: on CPU all ranks then gather
        the buckets in full.

        Raises:
            WeightsDiffer: a message did not fit this rank's copy; or, on CUDA, an owner's weights changed.
        """
        if self._verdicts is None:
            return
        on_cpu = self._verdicts.device.type == "cpu"
        verdicts, self._verdicts = self._verdicts.cpu(), None
        if on_cpu and (verdicts == OWNER_CHANGED).any():
            self.in_full = True
            for gather in self.batch.gathers:
                gather.gather_in_full()
        elif verdicts.any():
            bucket, rank = verdicts.nonzero()[0].tolist()
            owner = dist.get_process_group_ranks(self.batch.group)[rank]
            name, mismatch = self.batch.gathers[bucket].name, Mismatch(int(verdicts[bucket, rank]))
            raise WeightsDiffer(
                f"weight gather of {name} on rank {dist.get_rank()}, shard of rank {owner}: {mismatch}"
            )


def batches(gathers: Sequence[WeightGather]) -> Iterator[Batch]:
    """Cut the buckets of one group that are gathered now into batches, in their order.

    The messages of a batch take no more memory than the weights of the largest bucket.
    """
    room = max(gather.shard_nbytes for gather in gathers)
    batch: list[WeightGather] = []
    taken = 0
    for gather in gathers:
        if batch and taken + gather.longest > room:
            yield Batch(batch)
            batch, taken = [], 0
        batch.append(gather)
        taken += gather.longest
    yield Batch(batch)
