"""Error state of one bucket, and the choice of a backend.

A Sender owns the error state and the random generator; loco.py or the fused kernels do the arithmetic.
"""

from __future__ import annotations

import functools

import torch

from megatron_patch import loco
from megatron_patch.compensation.error_state import MovingAverageError
from megatron_patch.config import CompressionConfig
from megatron_patch.loco import STATISTICS
from megatron_patch.quantization import backends
from megatron_patch.quantization.codec import check_codec, codec_of
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.registry import OWN_CODECS, codecs

NOISE = 1 << 24
"""Random numbers, in fp32, that are held at a time for stochastic rounding."""


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
        if config.code not in OWN_CODECS:
            check_codec(codecs()[config.code], config.bits, config.block_size, device)
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
        """Of the last `compress` that measured: compress.STATISTICS."""
        self.measures = True
        """Whether `compress` does: an eighth of the kernel's instructions, for what a logged step shows."""

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
        """Read g, [B] of fp32, bf16 or fp16; write `payload`; update e.

        `payload` is uint8, contiguous: the payloads of all shards, end to end (`layout.payload_starts`).
        """
        tensors, beta = ({}, 0.0) if self.error is None else (self.error.tensors(), self.error.beta)
        run = backends.fused(self.codec, self.layout, gradient.device) or loco
        statistics = self.statistics if self.measures else None
        if self.generator is None:
            run.compress(gradient, payload, self.codec, self.layout, tensors, beta, None, statistics)
        else:
            total = torch.zeros_like(self.statistics)
            for chosen, where, part in self._pieces:
                shape = (part.shards, part.blocks, part.block)
                noise = torch.rand(
                    shape, generator=self.generator, dtype=torch.float32, device=gradient.device
                )
                g = gradient[chosen.start * part.shard_size : chosen.stop * part.shard_size]
                e = {name: tensor[chosen] for name, tensor in tensors.items()}
                p = payload.view(-1)[where]
                run.compress(g, p, self.codec, part, e, beta, noise, statistics)
                total += self.statistics
            if self.measures:
                self.statistics.copy_(total)
        if (layout := self.layout).exact is not None:
            layout.exact.write(gradient, payload, layout.coded_bytes, layout.payload_starts)

    @functools.cached_property
    def _pieces(self) -> list[tuple[slice, slice, BlockLayout]]:
        """(which shards, which bytes of all payloads, their layout): neighbouring shards that are
        compressed together where rounding is stochastic: NOISE elements of them, or an eighth of the bucket,
        and at least one shard."""
        whole = self.layout
        count = max(NOISE // max(whole.blocks * whole.block, 1), whole.shards // 8, 1)
        starts, found = whole.payload_starts.tolist(), []
        for first in range(0, whole.shards, count):
            part = whole.part(first, min(count, whole.shards - first))
            end = first + part.shards
            found.append((slice(first, end), slice(starts[first], starts[end]), part))
        return found
