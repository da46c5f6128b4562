"""The two ends of an exchange: the sender, which keeps a bucket's error state, and the owner's sum.

A fused kernel does the arithmetic if one supports codec and layout (quantization/backends.py), else loco.py
does. An error state consists of tensors by name: `codes`, int8 [N, S], and `scales`, bf16 [N, blocks]; or
`values`, bf16 or fp32 [N, S]. The fill of short blocks is not stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import torch

from megatron_patch import loco
from megatron_patch.config import CompressionConfig
from megatron_patch.loco import STATISTICS, load_error
from megatron_patch.quantization import backends
from megatron_patch.quantization.blocks import Span
from megatron_patch.quantization.codec import Codec, check_codec, codec_of
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.registry import OWN_CODECS, codecs

_FLOATS = {"bf16": torch.bfloat16, "fp32": torch.float32}


class MovingAverageError:
    """The error state e of one bucket on one rank, zero at the start.

    Args:
        layout: the bucket's layout; an int8 state has one scale for each of its blocks.
        beta: the weight of the old error, 0 <= beta < 1.
        dtype: "int8", "bf16" or "fp32".
        device: the device of the gradients.
        rotated: whether e is the error of rotated blocks (rotation.py).
    """

    def __init__(
        self, layout: BlockLayout, beta: float, dtype: str, device: torch.device, rotated: bool = False
    ) -> None:
        self.layout = layout
        self.beta = beta
        self.dtype = dtype
        self.rotated = rotated
        shape = layout.shards, layout.shard_size
        if dtype == "int8":
            self._state = {
                "codes": torch.zeros(shape, dtype=torch.int8, device=device),
                "scales": torch.zeros(layout.shards, layout.blocks, dtype=torch.bfloat16, device=device),
            }
        else:
            self._state = {"values": torch.zeros(shape, dtype=_FLOATS[dtype], device=device)}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the stored tensors by name; they are not copied."""
        return dict(self._state)

    def decode(self) -> torch.Tensor:
        """Return decode(e), fp32 [N, blocks, b]; it is still rotated if e is stored rotated."""
        return load_error(self._state, self.layout)

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Restore what `tensors` returned, bit for bit; other names in `saved` are ignored.

        Raises:
            ValueError: a tensor is missing, or has another shape or dtype; e is then unchanged.
        """
        for name, tensor in self._state.items():
            stored = saved.get(name)
            if stored is None or stored.shape != tensor.shape or stored.dtype != tensor.dtype:
                has = "missing" if stored is None else f"{stored.dtype} {list(stored.shape)}"
                raise ValueError(f"{name} is {has}, not {tensor.dtype} {list(tensor.shape)}")
        for name, tensor in self._state.items():
            tensor.copy_(saved[name])

    def reset(self) -> None:
        for tensor in self._state.values():
            tensor.zero_()

    def scale_by(self, factor: float | torch.Tensor) -> None:
        """Set e <- factor * e, as when fp16's loss scale, which e carries, changes by `factor`, fp32 []."""
        state = self._state["scales" if "scales" in self._state else "values"]
        if isinstance(factor, float) or state.dtype == torch.float32:
            state.mul_(factor)
        else:  # In a product with bf16 a tensor of no axes would be rounded to bf16 before.
            state.copy_(state.float() * factor)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._state.values())


class Sender:
    """Compresses one bucket's gradient for its N owners and has the bucket's error state on this rank.

    In an all-reduce the owner, which sends its reduced shard to all ranks, is a Sender of a one-shard layout.

    Args:
        config: the options; `config.compresses` must be true.
        layout: the bucket's layout.
        device: the device of the gradient.
        first: whether this is the first hop of the exchange, whose sender rotates the blocks.
        last: whether this is the last hop of the exchange, whose owner rotates the sum back.
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
        """loco.STATISTICS of the last `compress` that measured them."""
        self.measures = True
        """Whether `compress` measures statistics, which cost an eighth of the kernel's instructions."""
        self.compensates = True
        """Whether `compress` adds and updates e; without, h = g and e stays as it is."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a checkpoint must keep: those of the error state."""
        return {} if self.error is None else self.error.tensors()

    @torch.no_grad()
    def compress(self, gradient: torch.Tensor, payload: torch.Tensor) -> None:
        """Compress `gradient`, [B] of fp32, bf16 or fp16, into `payload`, and update e if `compensates`.

        `payload` is uint8 and contiguous: the payloads of all shards, end to end (`layout.payload_starts`).
        """
        layout = self.layout
        error = self.error if self.compensates else None
        tensors, beta = ({}, 0.0) if error is None else (error.tensors(), error.beta)
        run = backends.fused(self.codec, layout, gradient.device) or loco
        statistics = self.statistics if self.measures else None
        run.compress(gradient, payload, self.codec, layout, tensors, beta, statistics)
        if layout.exact is not None:
            layout.exact.write(gradient, payload, layout.coded_bytes, layout.payload_starts)


def decompress_reduce(
    payloads: torch.Tensor, codec: Codec, layout: BlockLayout, output: torch.Tensor, divisor: int = 1
) -> None:
    """Sum the N senders' payloads of the one shard of `layout`, as loco.decompress_reduce."""
    run = backends.fused(codec, layout, output.device) or loco
    run.decompress_reduce(payloads, codec, layout, output, divisor)
    if layout.exact is not None:
        layout.exact.read(payloads[:, None], layout.coded_bytes, output, divisor)


def decompress(payloads: torch.Tensor, codec: Codec, layout: BlockLayout, output: torch.Tensor) -> None:
    """Decode one payload for each shard, uint8 [N, payload_bytes], into `output` [B] of any float dtype."""
    coded = replace(layout, exact=None)
    kernels = backends.fused(codec, coded, output.device)
    if kernels is not None and hasattr(kernels, "decompress"):  # It decodes all shards in one launch.
        kernels.decompress(payloads, codec, coded, output)
    else:
        loco.decompress(payloads, codec, coded, output, (kernels or loco).decompress_reduce)
    if layout.exact is not None:
        layout.exact.read(payloads[None], layout.coded_bytes, output)


def try_kernels(config: CompressionConfig, device: torch.device) -> None:
    """Run the GPU kernels on a few numbers in fp32 and bf16, with statistics and without them.

    Compression may start hours into a job. What cannot be compiled is a UserError before its first step.
    """
    if device.type != "cuda":
        return
    rows = (Span.of(0, (96, 160)),)
    layout = BlockLayout.of(1 << 14, 2, config.bits, config.block_size, spans=rows)
    payloads = torch.zeros(2, layout.payload_bytes, dtype=torch.uint8, device=device)
    sender = Sender(config, layout, device)  # It checks a codec that is a user's own.
    with backends.explained():
        if backends.fused(sender.codec, layout, device) is None:
            return
        for dtype, measures in itertools.product((torch.float32, torch.bfloat16), (True, False)):
            gradient = torch.zeros(layout.numel, dtype=dtype, device=device)
            sender.measures = measures
            sender.compress(gradient, payloads.view(1, -1)[:, : sum(layout.payload_sizes)])
            decompress_reduce(payloads, sender.codec, layout.part(0), gradient[: layout.shard_size], 2)
            decompress(payloads, sender.codec, layout, gradient)
