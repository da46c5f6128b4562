"""How real ranks are compared with the simulation, step after step.

Where h/s lies within rounding of a tie, two correct implementations may send neighbouring codes; where a sum
has another order, the last bits of its result may also decide a scale, a sign, or the error's own code and
scale (loco_float64.Ties). At a tie the ranks may hold what the other decision gives, and nothing else. From
then on the block's error differs by a step's worth, and so may what it sends next: the block has forked,
until a reset makes both histories equal again. Everything else must agree exactly.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simulation.loco_float64 import LoCoSimulation, StepResult


class Agreement:
    """Checks each step of all ranks against `simulation`; at most `forks` of the elements may have forked."""

    def __init__(self, simulation: LoCoSimulation, forks: float = 0.02):
        self.simulation = simulation
        self.forks = forks
        self.forked = np.zeros((simulation.ranks, simulation.numel), dtype=bool)
        self.touched = np.zeros(simulation.numel, dtype=bool)
        """Where the last exchange's sum is not the simulation's, since a sender's block has forked."""
        self.steps = 0

    def check(
        self,
        gradients: np.ndarray,
        *,
        slack: np.ndarray | None = None,
        sent: np.ndarray | None = None,
        errors: np.ndarray | None = None,
        shards: np.ndarray | None = None,
    ) -> StepResult:
        """Step the simulation and compare what is given; returns the simulation's own result.

        `sent` is s*q and `errors` decode(e), both [ranks, numel]; `shards` is [ranks, S]. `slack`, like
        `gradients`, is how far the ranks' own may be from them: 0 but for sums in another order.
        """
        result = self.exchange(gradients, slack=slack, sent=sent, tells=errors, shards=shards)
        self.end_step(errors=errors)
        return replace(result, errors=self.simulation.errors())

    def exchange(
        self,
        gradients: np.ndarray,
        *,
        slack: np.ndarray | None = None,
        sent: np.ndarray | None = None,
        tells: np.ndarray | None = None,
        shards: np.ndarray | None = None,
    ) -> StepResult:
        """The exchange alone: `check` is this, then `end_step`. Without `sent`, the errors after the step
        tell which ties went the other way."""
        simulation = self.simulation
        result = simulation.exchange(gradients, slack)
        self.steps += 1
        where = f"step {self.steps}"
        scales = self._per_element(result.scales)
        wanted = result.sent.astype(np.float32)

        if sent is not None:
            differs = ~_same(sent, wanted)
            unexplained = ~result.ties.explain(sent) & ~self.forked
            assert not unexplained.any(), _first(where, "sent", unexplained, sent, wanted)
            off = np.abs(np.where(differs, sent.astype(np.float64) - wanted, 0))
            most = 3 * simulation.code.widest * scales
            assert np.all(off <= most), f"{where}: sent is off by more than neighbouring codes are"
            self.fork(differs)
        elif tells is None:
            self.fork(result.near_tie)
        else:
            # Where a tie went the other way, the error tells; blocks without a tie must agree.
            other = ~_same(tells, result.errors.astype(np.float32)) & tells.any()
            self.fork(result.near_tie & self._block_has(other))

        self.touched = self.forked.any(axis=0)
        if shards is not None:
            touched = np.zeros(simulation.ranks * simulation.shard_size, dtype=bool)
            touched[: simulation.numel] = self.touched
            differs = ~_same(shards, result.shards) & ~touched.reshape(shards.shape)
            assert not differs.any(), _first(where, "shard", differs, shards, result.shards)

        self._few_forked(where)
        return result

    def end_step(
        self,
        *,
        errors: np.ndarray | None = None,
        successful: bool = True,
        loss_scale_factor: float = 1.0,
    ) -> None:
        """The optimizer's step, and the `errors` after it."""
        self.simulation.end_step(successful=successful, loss_scale_factor=loss_scale_factor)
        wanted, ties = self.simulation.errors().astype(np.float32), self.simulation.error_ties()
        where = f"step {self.steps}"
        if errors is not None:
            unexplained = ~ties.explain(errors) & ~self.forked
            assert not unexplained.any(), _first(where, "error", unexplained, errors, wanted)
            self.fork(~_same(errors, wanted))
        else:
            self.fork(ties.flags)
        self._few_forked(where)
        # Cleared: both histories are equal again.
        if not wanted.any() and (errors is None or not errors.any()):
            self.forked[:] = False

    def fork(self, differs: np.ndarray) -> None:
        """Mark the whole block of every element that differs."""
        self.forked |= self._block_has(differs)

    def _few_forked(self, where: str) -> None:
        assert self.forked.mean() <= self.forks, f"{where}: {self.forked.mean():.1%} of the elements forked"

    def _block_has(self, flags: np.ndarray) -> np.ndarray:
        """True in the whole block of every flagged element."""
        found = np.zeros_like(flags)
        for _, _, here in self.simulation.lengths:
            found[:, here] = flags[:, here].any(axis=-1, keepdims=True)
        return found

    def _per_element(self, scales: np.ndarray) -> np.ndarray:
        repeated = np.zeros((self.simulation.ranks, self.simulation.numel))
        for shards, numbers, here in self.simulation.lengths:
            repeated[:, here] = np.nan_to_num(scales[:, shards, numbers, None].astype(np.float64))
        return repeated


def _same(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    return (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))


def _first(where: str, what: str, flags: np.ndarray, mine: np.ndarray, theirs: np.ndarray) -> str:
    rank, place = np.argwhere(flags)[0]
    return (
        f"{where}, rank {rank}, element {place}: {what} {mine[rank, place]!r}, simulated "
        f"{theirs[rank, place]!r} ({flags.sum()} of {flags.size} differ)"
    )
