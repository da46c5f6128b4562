"""Defines what a network benchmark measures: methods, links, the model, and the order of the cells."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.network.llama import Llama
from benchmarks.network.methods import Method
from benchmarks.network.results import Cell


@dataclass(frozen=True)
class Plan:
    """The settings of a benchmark; each pass takes one accumulation count after another."""

    hosts: int
    ranks_per_host: int
    methods: tuple[Method, ...]
    accumulation: tuple[int, ...]
    rates: tuple[float | None, ...]
    steps: int
    overlap: bool
    buckets: int
    llama: Llama
    learning_rate: float
    settle: int
    """The unmeasured steps of a model, until Adam's moments have settled."""
    passes: int = 1
    """How often all cells are measured, one pass after another."""

    @property
    def cells(self) -> list[Cell]:
        """The cells of all passes, grouped by method, so that a model is built once for all rates."""
        return [
            Cell(method, count, rate)
            for _ in range(self.passes)
            for count in self.accumulation
            for method in self.methods
            for rate in self.rates
        ]

    def estimate_settling(self, method: Method, accumulation: int, unshaped_seconds: float) -> float:
        """Estimate the seconds of a model's unmeasured steps, for the time left."""
        return method.settle(self.settle) * unshaped_seconds * accumulation

    def estimate(self, cell: Cell, unshaped_seconds: float) -> float:
        """Estimate the seconds of a cell, for the time left."""
        seconds = unshaped_seconds * cell.accumulation
        if cell.rate_mbit is not None:
            share = self.ranks_per_host * (1 - 1 / self.hosts)
            bits = share * self.llama.parameters * cell.method.guessed_bits
            seconds += 1.1 * bits / (cell.rate_mbit * 1e6)
        return self.steps * seconds + 0.3
