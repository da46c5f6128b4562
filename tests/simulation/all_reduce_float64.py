"""The low-bit all-reduce, simulated: LoCo's exchange of loco_float64.py twice, each with its own errors.

    phase 1   every rank n sends its gradient's shards as in docs/numerics.md, with errors e_n;
              the owner of shard j holds x = sum over n of s_n*q_n (divided by N for the average), in fp32
    phase 2   the owner sends x to all as if it were a gradient: h = x + E, and E takes what was lost
    all       every rank, the owner too, writes the s*q of each shard in the gradient's dtype

Written from the text alone, as loco_float64.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simulation.agreement import Agreement
from simulation.codes import round_to_gradient_dtype
from simulation.loco_float64 import LoCoSimulation


def owners(ranks: int, numel: int, **options: Any) -> list[LoCoSimulation]:
    """Phase 2: one sender per shard (none of an empty one), each of the shard's elements."""
    size = -(-numel // ranks)
    lengths = [min(size, numel - start) for start in range(0, numel, size)]
    labels = options.pop("labels", None)
    return [
        LoCoSimulation(1, n, labels=None if labels is None else labels[j * size :], first=False, **options)
        for j, n in enumerate(lengths)
    ]


class AllReduceAgreement:
    """Compares real ranks that all-reduce one bucket with the two phases; options as LoCoSimulation's."""

    def __init__(
        self, ranks: int, numel: int, *, average: bool = False, gradient_dtype: str = "fp32", **options: Any
    ):
        self.dtype = gradient_dtype
        first = LoCoSimulation(
            ranks,
            numel,
            average=average,
            gradient_dtype=gradient_dtype,
            reduced_dtype="fp32",
            last=False,
            **options,
        )
        self.senders = Agreement(first)
        self.owners = [Agreement(second) for second in owners(ranks, numel, **options)]

    def exchange(
        self, gradients: np.ndarray, *, sent: np.ndarray | None = None, owned: list[np.ndarray] | None = None
    ) -> np.ndarray:
        """Both phases; returns what every rank holds, fp32 [numel].

        `sent` is what the senders sent, [ranks, numel]; `owned` what each owner sent, of its shard's length.
        """
        sums = self.senders.exchange(gradients, sent=sent).shards
        parts = []
        for index, owner in enumerate(self.owners):
            said = None if owned is None else owned[index][None]
            sum_of_shard = sums[index, None, : owner.simulation.numel]
            parts.append(owner.exchange(sum_of_shard, sent=said).shards[0, : owner.simulation.numel])
        return round_to_gradient_dtype(np.concatenate(parts).astype(np.float32), self.dtype)

    def end_step(
        self, *, errors: np.ndarray | None = None, owner_errors: list[np.ndarray] | None = None, **ending: Any
    ) -> None:
        """As Agreement's; both phases' errors are cleared and rescaled together."""
        self.senders.end_step(errors=errors, **ending)
        for index, owner in enumerate(self.owners):
            owner.end_step(errors=None if owner_errors is None else owner_errors[index][None], **ending)
