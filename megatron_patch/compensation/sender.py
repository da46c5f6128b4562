"""One bucket on its way out: compensate, quantize, remember what was lost.

    h = g + decode(e)      ->  codes q and scales s  ->  payload
    r = h - s*q            ->  e <- encode(beta*e + (1-beta)*r)

with the very s and q that are sent (docs/numerics.md).
"""

from __future__ import annotations

import torch

from megatron_patch.compensation.error_state import MovingAverageError
from megatron_patch.config import CompressionConfig
from megatron_patch.quantization.backends import fused
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.reference import dequantize, quantize, write_payload

STATISTICS = ("signal", "noise", "gradient", "error", "non_finite_blocks")
"""What `Sender.statistics` holds: sums of h^2, r^2, g^2, decode(e)^2, and a count; fp64 [5]."""


class Sender:
    """Compresses one bucket's gradient for its N owners; holds the bucket's error state on this rank.

    The owner of a shard that sends the reduced shard to all is a Sender too, of a layout with one shard.

    Args:
        config: method, rounding, beta, error dtype; `config.compresses` must hold.
        layout: the bucket's cut.
        device: where the gradient lives.
        stream: what makes this bucket's stochastic rounding differ from other buckets' and ranks'.
    """

    def __init__(
        self, config: CompressionConfig, layout: BlockLayout, device: torch.device, stream: int = 0
    ) -> None:
        self.layout = layout
        self.error: MovingAverageError | None = None
        if config.has_memory:
            self.error = MovingAverageError(layout, config.beta, config.error_dtype, device)
        self.generator: torch.Generator | None = None
        if config.rounding == "stochastic":
            self.generator = torch.Generator(device)
        self._seed = config.seed + 1_000_003 * stream
        self.reseed(0)
        self.statistics = torch.zeros(len(STATISTICS), dtype=torch.float64, device=device)

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
        kernels = fused(gradient.device, self.layout)
        if kernels is None:
            self.compress_in_torch(gradient, payload, noise)
            return
        tensors, beta = ({}, 0.0) if self.error is None else (self.error.tensors(), self.error.beta)
        kernels.compress(gradient, payload, self.layout, tensors, beta, noise, self.statistics)

    def compress_in_torch(
        self, gradient: torch.Tensor, payload: torch.Tensor, noise: torch.Tensor | None
    ) -> None:
        """`compress` by the torch reference, which the fused kernels must match bit for bit.

        `noise`, fp32 [N, blocks, b] in [0, 1), asks for stochastic rounding.
        """
        g = self.layout.cut(gradient)
        error = self.error.decode() if self.error is not None else None
        h = g if error is None else g + error
        codes, scales = quantize(h, self.layout, noise)
        write_payload(codes, scales, self.layout, payload)

        finite = torch.isfinite(scales)
        sent = dequantize(codes, torch.where(finite, scales, 0.0))
        # Fill is no element: at 1 bit it decodes to s, but nothing was lost there.
        lost = torch.where(finite[..., None], h - sent, 0.0)
        if self.layout.bits == 1:
            lost = self.layout.cut(self.layout.flat(lost))
        if self.error is not None and error is not None:
            self.error.update(error, lost, keep=~finite)
        self._measure(g, error, h, lost, finite)

    def _measure(
        self,
        g: torch.Tensor,
        error: torch.Tensor | None,
        h: torch.Tensor,
        lost: torch.Tensor,
        finite: torch.Tensor,
    ) -> None:
        def energy(x: torch.Tensor) -> torch.Tensor:
            norm = torch.linalg.vector_norm(torch.where(finite[..., None], x, 0.0), dtype=torch.float64)
            return norm * norm

        self.statistics.copy_(
            torch.stack(
                [
                    energy(h),
                    energy(lost),
                    energy(g),
                    self.statistics.new_zeros(()) if error is None else energy(error),
                    (~finite).sum().to(torch.float64),
                ]
            )
        )
