"""One bucket on its way out: what a rank holds for it, and its compression by whichever code is there.

A Sender owns the error state and the random generator; compress.py, or the fused kernels, do the arithmetic.
"""

from __future__ import annotations

import torch

from megatron_patch.compensation import compress as reference
from megatron_patch.compensation.compress import STATISTICS
from megatron_patch.compensation.error_state import MovingAverageError
from megatron_patch.config import CompressionConfig
from megatron_patch.quantization import backends
from megatron_patch.quantization.codecs import codec_of
from megatron_patch.quantization.layout import BlockLayout


class Sender:
    """Compresses one bucket's gradient for its N owners; holds the bucket's error state on this rank.

    The owner of a shard that sends the reduced shard to all is a Sender too, of a layout with one shard.

    Args:
        config: method, rounding, beta, error dtype; `config.compresses` must hold.
        layout: the bucket's cut.
        device: where the gradient lives.
        stream: what makes this bucket's stochastic rounding differ from other buckets' and ranks'.
        first, last: whether this is the first, and the last, of the hops that the tensor takes. Where blocks
            are rotated, they stay so from the first sender to the last owner.
    """

    def __init__(
        self,
        config: CompressionConfig,
        layout: BlockLayout,
        device: torch.device,
        stream: int = 0,
        first: bool = True,
        last: bool = True,
    ) -> None:
        self.layout = layout
        self.codec = codec_of(config, first, last)
        self.error: MovingAverageError | None = None
        if config.keeps_errors:
            rotated = self.codec.rotation.rotated
            self.error = MovingAverageError(layout, config.beta, config.error_dtype, device, rotated)
        self.generator: torch.Generator | None = None
        if config.rounding == "stochastic":
            self.generator = torch.Generator(device)
        self._seed = config.seed + 1_000_003 * stream
        self.reseed(0)
        self.statistics = torch.zeros(len(STATISTICS), dtype=torch.float64, device=device)
        """Of the last `compress`: compress.STATISTICS."""

    def reseed(self, step: int) -> None:
        """Start the random numbers of stochastic rounding anew, at an optimizer step: no two steps alike."""
        if self.generator is not None:
            self.generator.manual_seed(self._seed + 7_919 * step)

    def state(self) -> dict[str, torch.Tensor]:
        """All that the next steps depend on: the error's tensors, and the state of `generator`, uint8."""
        tensors = {} if self.error is None else self.error.tensors()
        if self.generator is not None:
            tensors = {**tensors, "generator": self.generator.get_state()}
        return tensors

    @torch.no_grad()
    def compress(self, gradient: torch.Tensor, payload: torch.Tensor) -> None:
        """Read g, [B] of fp32, bf16 or fp16; write `payload`, uint8 [N, payload_bytes]; update e."""
        noise = None
        if self.generator is not None:
            shape = (self.layout.shards, self.layout.blocks, self.layout.block)
            noise = torch.rand(shape, generator=self.generator, device=gradient.device)
        tensors, beta = ({}, 0.0) if self.error is None else (self.error.tensors(), self.error.beta)
        run = backends.fused(self.codec, self.layout, gradient.device) or reference
        run.compress(gradient, payload, self.codec, self.layout, tensors, beta, noise, self.statistics)
        if self.layout.exact is not None:
            self.layout.exact.write(gradient, payload, self.layout.coded_bytes)
