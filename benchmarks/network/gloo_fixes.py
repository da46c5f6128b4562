"""Makes gloo's all-to-all use both directions of a link, for every method of the benchmark alike.

gloo's all-to-all posts each send before the receive, and the message "ready to receive" is sent over the same
connection as the payload. The later one of two ranks queues it behind its own payload, while the other waits,
so that a full-duplex link carries one direction at a time (0.48 of 200 Mbit/s with 2 hosts, 0.6 to 0.7 with
4). With receives posted first it carries 0.95 and 0.93. The bytes are the same. Without this the uncompressed
baseline would be slower than the link allows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist


def install() -> None:
    """Replace torch's all-to-all, or that of cpu/device.py, by one that posts receives first."""
    dist.all_to_all_single = _receiving_first(dist.all_to_all_single)


class _All:
    """The handle of several transfers."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _receiving_first(original: Any) -> Any:
    """Return an all_to_all_single that posts receives, then sends; uneven splits use the original."""

    @functools.wraps(original)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if output_split_sizes or input_split_sizes:
            return original(output, input, output_split_sizes, input_split_sizes, group, async_op)
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        sent, received = input.view(ranks, -1), output.view(ranks, -1)
        others = [(rank + step) % ranks for step in range(1, ranks)]
        works = [dist.irecv(received[n], group=group, group_src=n) for n in reversed(others)]
        works += [dist.isend(sent[n], group=group, group_dst=n) for n in others]
        received[rank].copy_(sent[rank])
        if async_op:
            return _All(works)
        return _All(works).wait()

    return all_to_all_single
