"""Traffic: bytes that one rank sends to others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traffic:
    """Bytes that one rank sends to other ranks, and the elements that they stand for."""

    nbytes: float = 0.0
    elements: float = 0.0

    def add(self, other: Traffic) -> None:
        self.nbytes += other.nbytes
        self.elements += other.elements

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.nbytes + other.nbytes, self.elements + other.elements)

    @property
    def bits_per_element(self) -> float:
        """Bits on the wire for every element sent."""
        return 8 * self.nbytes / self.elements if self.elements else 0.0
