"""How real ranks are compared with the simulation, step after step: all that they send, keep and reduce is
its to the last bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simulation.loco_float64 import LoCoSimulation, StepResult


class Agreement:
    """Steps `simulation`, and compares each step of all ranks with it."""

    def __init__(self, simulation: LoCoSimulation):
        self.simulation = simulation
        self.steps = 0

    def check(
        self,
        gradients: np.ndarray,
        *,
        sent: np.ndarray | None = None,
        errors: np.ndarray | None = None,
        shards: np.ndarray | None = None,
    ) -> StepResult:
        """One exchange and the optimizer's step; returns the simulation's own result.

        `sent` is s*q and `errors` decode(e), both [ranks, numel]; `shards` is [ranks, S].
        """
        result = self.exchange(gradients, sent=sent, shards=shards)
        self.end_step(errors=errors)
        return replace(result, errors=self.simulation.errors())

    def exchange(
        self, gradients: np.ndarray, *, sent: np.ndarray | None = None, shards: np.ndarray | None = None
    ) -> StepResult:
        """The exchange alone: `check` is this, then `end_step`."""
        result = self.simulation.exchange(gradients)
        self.steps += 1
        self._same("sent", sent, result.sent.astype(np.float32))
        self._same("shard", shards, result.shards)
        return result

    def end_step(self, *, errors: np.ndarray | None = None, **ending: bool | float) -> None:
        """LoCoSimulation.end_step, and the `errors` after it."""
        self.simulation.end_step(**ending)
        self._same("error", errors, self.simulation.errors().astype(np.float32))

    def _same(self, what: str, real: np.ndarray | None, wanted: np.ndarray) -> None:
        if real is None:
            return
        assert real.shape == wanted.shape, f"step {self.steps}: {what} has the shape {real.shape}"
        differs = ~((real == wanted) | (np.isnan(real) & np.isnan(wanted)))
        if differs.any():
            place = tuple(np.argwhere(differs)[0])
            raise AssertionError(
                f"step {self.steps}, rank {place[0]}, element {place[1]}: {what} {real[place]!r}, simulated "
                f"{wanted[place]!r} ({differs.sum()} of {differs.size} differ)"
            )
