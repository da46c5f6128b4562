"""tiny_model.Tiny as recording.py trains it: for process groups that no tiny GPT can have on CPU."""

from __future__ import annotations

from typing import Any

import torch
from with_megatron.tiny_model import Tiny

MICROBATCHES = 2


class TinyTraining:
    """Trains a Tiny with random gradients, different on every rank."""

    loss_scale = 1.0

    def __init__(self, tiny: Tiny) -> None:
        self.tiny = tiny
        self.chunks = [tiny.ddp]

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """All parameters of this rank."""
        return dict(self.tiny.ddp.module.named_parameters())

    def backward(self, step: int) -> None:
        """A step's backward passes and its exchange."""
        ddp: Any = self.tiny.ddp
        ddp.zero_grad_buffer()
        passes = [self.tiny.random_gradients(MICROBATCHES * step + number) for number in range(MICROBATCHES)]
        with ddp.no_sync():
            for gradients in passes[:-1]:
                self.tiny.backward(gradients)
        self.tiny.backward(passes[-1])
        ddp.finish_grad_sync()

    def update(self) -> bool:
        """The optimizer's step on those gradients."""
        return self.tiny.optimizer.step()[0]

    def gather(self) -> None:
        """Parameters are gathered by `update` already."""

    def tokens(self, step: int) -> int:
        """No loss of tokens here."""
        return 0
