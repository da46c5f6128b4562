"""Error state of one bucket, and the choice of a backend.

A Sender owns the error state; loco.py or the fused kernels do the arithmetic.
"""

from __future__ import annotations

import torch

from megatron_patch import loco
from megatron_patch.compensation.error_state import MovingAverageError
from megatron_patch.config import CompressionConfig
from megatron_patch.loco import STATISTICS
from megatron_patch.quantization import backends
from megatron_patch.quantization.codec import check_codec, codec_of
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.registry import OWN_CODECS, codecs


class Sender:
    """Compresses one bucket's gradient for its N owners; holds the bucket's error state on this rank.

    The owner of a shard that sends the reduced shard to all is a Sender too, of a layout with one shard.

    Args:
        config: method, beta, error dtype; `config.compresses` must hold.
        layout: the bucket's cut.
        device: where the gradient lives.
        first, last: whether this is the first, and the last, of the hops that the tensor takes. Where blocks
            are rotated, they stay so from the first sender to the last owner.
    """

    def __init__(
        self,
        config: CompressionConfig,
        layout: BlockLayout,
        device: torch.device,
        first: bool = True,
        last: bool = True,
    ) -> None:
        self.layout = layout
        if config.code not in OWN_CODECS:
            check_codec(codecs()[config.code], config.bits, config.block_size, device)
        self.codec = codec_of(config, first, last)
        self.error: MovingAverageError | None = None
        if config.keeps_errors:
            rotated = self.codec.rotation.rotated
            self.error = MovingAverageError(layout, config.beta, config.error_dtype, device, rotated)
        self.statistics = torch.zeros(len(STATISTICS), dtype=torch.float64, device=device)
        """Of the last `compress` that measured: compress.STATISTICS."""
        self.measures = True
        """Whether `compress` does: an eighth of the kernel's instructions, for what a logged step shows."""

    def state(self) -> dict[str, torch.Tensor]:
        """All that the next steps depend on: the error's tensors."""
        return {} if self.error is None else self.error.tensors()

    @torch.no_grad()
    def compress(self, gradient: torch.Tensor, payload: torch.Tensor) -> None:
        """Read g, [B] of fp32, bf16 or fp16; write `payload`; update e.

        `payload` is uint8, contiguous: the payloads of all shards, end to end (`layout.payload_starts`).
        """
        layout = self.layout
        tensors, beta = ({}, 0.0) if self.error is None else (self.error.tensors(), self.error.beta)
        run = backends.fused(self.codec, layout, gradient.device) or loco
        statistics = self.statistics if self.measures else None
        run.compress(gradient, payload, self.codec, layout, tensors, beta, statistics)
        if layout.exact is not None:
            layout.exact.write(gradient, payload, layout.coded_bytes, layout.payload_starts)
