"""The shape of the model that is trained; the rest of the training imports Megatron, which takes seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Llama:
    """The shape of the model, and of the data that one microbatch has."""

    layers: int = 4
    hidden: int = 384
    ffn: int = 1024
    heads: int = 6
    vocabulary: int = 4096
    sequence: int = 32
    microbatch: int = 1

    @property
    def parameters(self) -> int:
        """Embedding and output layer are not tied."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden
