"""The shape of the trained model, in a file of its own because importing training.py takes seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Llama:
    """The shape of the model and of a microbatch."""

    layers: int = 4
    hidden: int = 384
    ffn: int = 1024
    heads: int = 6
    vocabulary: int = 4096
    sequence: int = 32
    microbatch: int = 1

    @property
    def parameters(self) -> int:
        """The number of parameters; embedding and output layer are not tied."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden
