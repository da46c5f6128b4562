"""The exact weight gather's messages are sent in batches of several buckets.

Every rank pads its batch to the longest one of all ranks. Padding averages out when buckets are batched, so
batches are as large as memory allows.
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
    """A message that does not fit the weights it came to; the text names the bucket and the owner."""


class Batch:
    """Buckets of one group whose agreed messages travel in one piece."""

    def __init__(self, gathers: Sequence[WeightGather]) -> None:
        self.gathers = gathers
        self.group = gathers[0].group
        lengths = np.stack([gather.lengths for gather in gathers])
        totals = lengths.sum(axis=0)
        self.width = int(totals.max())
        """Bytes that every rank sends: as many as the one with the longest messages has."""
        self._mean = float(totals.mean())
        starts = lengths.cumsum(axis=0) - lengths
        self.places = torch.from_numpy(np.stack([starts, [gather.sizes for gather in gathers]], axis=2))
        """int64 [buckets, ranks, 2]: where a rank's message of a bucket begins, and its bytes."""

    def nbytes_of(self, gather: WeightGather) -> float:
        """A bucket's part of what this rank sends: the padding is shared out by the messages' lengths."""
        share = float(gather.lengths.mean()) / self._mean
        return (self.group.size() - 1) * self.width * share

    @torch.no_grad()
    def start(self, workspace: Workspace, own_may_have_changed: bool) -> BatchHandle:
        """Send the messages; the handle's `wait` writes the others' shards.

        Args:
            own_may_have_changed: since `agree`, as by a user between the step and the next forward pass.
        """
        ranks, rank = self.group.size(), self.group.rank()
        messages = workspace.take(ranks, self.width, "weights")
        for gather, place in zip(self.gathers, self.places[:, rank].tolist(), strict=True):
            room = messages[rank, place[0] : place[0] + int(gather.lengths[rank])]
            gather.write(room, own_may_have_changed)
        work = dist.all_gather_into_tensor(messages.view(-1), messages[rank], group=self.group, async_op=True)
        return BatchHandle(self, messages, work, workspace)


class BatchHandle:
    """The rest of a gather. `wait` finishes it; what it found is looked at by `check`."""

    def __init__(self, batch: Batch, messages: torch.Tensor, work: Any, workspace: Workspace) -> None:
        self.batch = batch
        self.in_full = False
        """Whether the buckets were gathered in full in the end, since an owner had changed one."""
        self._messages: torch.Tensor | None = messages
        self._work = work
        self._workspace = workspace
        self._found: torch.Tensor | None = None

    @torch.no_grad()
    def wait(self) -> None:
        """Write the other ranks' shards. Once only."""
        if self._messages is None:
            return
        messages, self._messages = self._messages, None
        self._work.wait()
        places = self.batch.places.to(messages.device, non_blocking=True)
        found = torch.empty(places.shape[:2], dtype=torch.int32, device=messages.device)
        with self._workspace.timed():
            for gather, of_ranks, verdicts in zip(self.batch.gathers, places, found, strict=True):
                gather.read(messages, of_ranks, verdicts)
        self._workspace.give(messages)
        self._found = found
        if found.device.type == "cpu":
            self.check()

    @torch.no_grad()
    def check(self) -> None:
        """See that every message fitted. On CPU `wait` does it; on CUDA it would wait for the gather.

        An owner that changed its weights after they were coded has marked its message: on CPU all ranks
        gather the buckets in full.

        Raises:
            WeightsDiffer: a message that did not fit this rank's copies; on CUDA also such an owner's.
        """
        if self._found is None:
            return
        on_cpu = self._found.device.type == "cpu"
        found, self._found = self._found.cpu(), None
        if on_cpu and (found == OWNER_CHANGED).any():
            self.in_full = True
            for gather in self.batch.gathers:
                gather.gather_in_full()
        elif found.any():
            bucket, rank = found.nonzero()[0].tolist()
            owner = dist.get_process_group_ranks(self.batch.group)[rank]
            name, mismatch = self.batch.gathers[bucket].name, Mismatch(int(found[bucket, rank]))
            raise WeightsDiffer(
                f"weight gather of {name} on rank {dist.get_rank()}, shard of rank {owner}: {mismatch}"
            )


def batches(gathers: Sequence[WeightGather]) -> Iterator[Batch]:
    """Cut a sequence of buckets of one group, whose gathers all begin now, into batches.

    The messages of one take no more memory than the weights of the largest bucket.
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
