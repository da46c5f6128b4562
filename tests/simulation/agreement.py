"""How real ranks are compared with the simulation, step after step.

Where h/s lies within rounding of a tie, two correct implementations may send neighbouring codes. From then
on the block's error differs by a step's worth, and so may what it sends next: the block has forked, until a
reset makes both histories equal again. Everything else must agree exactly.
"""

from __future__ import annotations

import numpy as np

from simulation.loco_float64 import LoCoSimulation, StepResult


class Agreement:
    """Checks each step of all ranks against `simulation`; at most `forks` of the elements may have forked."""

    def __init__(self, simulation: LoCoSimulation, forks: float = 0.02):
        self.simulation = simulation
        self.forks = forks
        self.forked = np.zeros((simulation.ranks, simulation.numel), dtype=bool)
        self.steps = 0

    def check(
        self,
        gradients: np.ndarray,
        *,
        sent: np.ndarray | None = None,
        errors: np.ndarray | None = None,
        shards: np.ndarray | None = None,
    ) -> StepResult:
        """Step the simulation and compare what is given; returns the simulation's own result.

        `sent` is s*q and `errors` decode(e), both [ranks, numel]; `shards` is [ranks, numel/ranks].
        """
        simulation = self.simulation
        result = simulation.step(gradients)
        self.steps += 1
        where = f"step {self.steps}"
        scales = self._per_element(result.scales)
        wanted = result.sent.astype(np.float32)

        if sent is not None:
            differs = ~_same(sent, wanted)
            unexplained = differs & ~result.near_tie & ~self.forked
            assert not unexplained.any(), _first(where, "sent", unexplained, sent, wanted)
            off = np.abs(np.where(differs, sent.astype(np.float64) - wanted, 0))
            assert np.all(off <= 3 * scales), f"{where}: sent is off by more than neighbouring codes are"
            self._fork(differs)
        elif errors is None:
            self._fork(result.near_tie)
        else:
            # Where a tie went the other way, the error tells; blocks without a tie must agree.
            other = ~_same(errors, result.errors.astype(np.float32))
            self._fork(result.near_tie & self._block_has(other))

        if errors is not None:
            differs = ~_same(errors, result.errors.astype(np.float32)) & ~self.forked
            assert not differs.any(), _first(where, "error", differs, errors, result.errors)

        if shards is not None:
            # Every owner's part of all ranks' flags: [ranks, owners, shard] -> [owners, shard]
            touched = self.forked.reshape(simulation.ranks, simulation.ranks, -1).any(axis=0)
            differs = ~_same(shards, result.shards) & ~touched
            assert not differs.any(), _first(where, "shard", differs, shards, result.shards)

        assert self.forked.mean() <= self.forks, f"{where}: {self.forked.mean():.1%} of the elements forked"
        if simulation.reset_interval and simulation.steps % simulation.reset_interval == 0:
            self.forked[:] = False
        return result

    def _fork(self, differs: np.ndarray) -> None:
        """Mark the whole block of every element that differs."""
        self.forked |= self._block_has(differs)

    def _block_has(self, flags: np.ndarray) -> np.ndarray:
        """True in the whole block of every flagged element."""
        found, flags = np.zeros_like(flags), self._by_shard(flags)
        for start, stop in self.simulation.blocks:
            self._by_shard(found)[:, :, start:stop] = flags[:, :, start:stop].any(axis=2, keepdims=True)
        return found

    def _by_shard(self, values: np.ndarray) -> np.ndarray:
        return values.reshape(self.simulation.ranks, self.simulation.ranks, self.simulation.shard_size)

    def _per_element(self, scales: np.ndarray) -> np.ndarray:
        lengths = [stop - start for start, stop in self.simulation.blocks]
        repeated = np.repeat(np.nan_to_num(scales.astype(np.float64)), lengths, axis=2)
        return repeated.reshape(self.simulation.ranks, self.simulation.numel)


def _same(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    return (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))


def _first(where: str, what: str, flags: np.ndarray, mine: np.ndarray, theirs: np.ndarray) -> str:
    rank, place = np.argwhere(flags)[0]
    return (
        f"{where}, rank {rank}, element {place}: {what} {mine[rank, place]!r}, simulated "
        f"{theirs[rank, place]!r} ({flags.sum()} of {flags.size} differ)"
    )
