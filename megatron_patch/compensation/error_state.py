"""What one sender remembers about one bucket: a moving average of its own quantization errors.

LoCo (arXiv 2407.04480): with e the stored error, h = g + e is sent as s*q, r = h - s*q is lost, and

    e <- encode(beta * e + (1 - beta) * r)

`beta` weighs the OLD error: 0 is classic error feedback. encode is 8-bit quantization over the same blocks
as the gradient (1 byte and 1/64 an element at b = 128), bf16, or fp32. A block whose gradient was not finite
keeps its e: nothing of it was sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import torch

from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.reference import dequantize, quantize


class _Storage(Protocol):
    """An encoding of fp32 [N, blocks, b]."""

    def load(self) -> torch.Tensor: ...

    def store(self, error: torch.Tensor, keep: torch.Tensor) -> None:
        """Encode `error`, but leave the blocks marked in `keep` (bool [N, blocks]) as they were."""

    def tensors(self) -> dict[str, torch.Tensor]: ...

    def scale_by(self, factor: float) -> None: ...


class _Int8Storage:
    """8-bit codes int8 [N, S] and bf16 scales [N, blocks]; the fill of short blocks is not stored."""

    def __init__(self, layout: BlockLayout, device: torch.device) -> None:
        self.layout = dataclasses.replace(layout, bits=8)
        self.codes = torch.zeros(layout.shards, layout.shard_size, dtype=torch.int8, device=device)
        self.scales = torch.zeros(layout.shards, layout.blocks, dtype=torch.bfloat16, device=device)

    def load(self) -> torch.Tensor:
        return dequantize(self.layout.cut(self.codes.view(-1)), self.scales.float())

    def store(self, error: torch.Tensor, keep: torch.Tensor) -> None:
        codes, scales = quantize(error, self.layout)
        codes = torch.where(keep[..., None], self.layout.cut(self.codes.view(-1)).to(torch.int8), codes)
        self.codes.copy_(self.layout.join(codes))
        self.scales.copy_(torch.where(keep, self.scales.float(), scales))

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"codes": self.codes, "scales": self.scales}

    def scale_by(self, factor: float) -> None:
        self.scales.mul_(factor)


class _FloatStorage:
    """bf16 or fp32 values [N, S]."""

    def __init__(self, layout: BlockLayout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.values = torch.zeros(layout.shards, layout.shard_size, dtype=dtype, device=device)

    def load(self) -> torch.Tensor:
        return self.layout.cut(self.values.view(-1))

    def store(self, error: torch.Tensor, keep: torch.Tensor) -> None:
        self.values.copy_(self.layout.join(torch.where(keep[..., None], self.load(), error)))

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"values": self.values}

    def scale_by(self, factor: float) -> None:
        self.values.mul_(factor)


class MovingAverageError:
    """The error state e of one bucket on one rank, zero at the start.

    Args:
        layout: the bucket's cut; e has its blocks.
        beta: weight of the old error, 0 <= beta < 1.
        dtype: "int8", "bf16" or "fp32".
        device: where the gradients live.
    """

    def __init__(self, layout: BlockLayout, beta: float, dtype: str, device: torch.device) -> None:
        self.layout = layout
        self.beta = beta
        self.dtype = dtype
        self._storage: _Storage
        if dtype == "int8":
            self._storage = _Int8Storage(layout, device)
        else:
            torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
            self._storage = _FloatStorage(layout, torch_dtype, device)

    def decode(self) -> torch.Tensor:
        """decode(e), fp32 [N, blocks, b]."""
        return self._storage.load()

    def update(self, error: torch.Tensor, lost: torch.Tensor, keep: torch.Tensor) -> None:
        """e <- encode(beta*error + (1-beta)*lost), but for the blocks marked in `keep`.

        `error` is what `decode` returned for this step, `lost` is r = h - s*q, both fp32 [N, blocks, b];
        `keep` is bool [N, blocks].
        """
        # Two products and a sum, each rounded: no fused multiply-add, which kernels would have to mimic.
        average = lost if self.beta == 0 else error * self.beta + lost * (1 - self.beta)
        self._storage.store(average, keep)

    def flat(self) -> torch.Tensor:
        """decode(e) in the bucket's order and without fill, fp32 [B]."""
        return self.layout.flat(self.decode())

    def set(self, values: torch.Tensor) -> None:
        """e <- encode(values), fp32 [B]."""
        blocks = self.layout.cut(values)
        self._storage.store(blocks, keep=torch.zeros_like(blocks[..., 0], dtype=torch.bool))

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Put back what `tensors` gave, bit for bit; other names in `saved` are ignored."""
        for name, tensor in self.tensors().items():
            tensor.copy_(saved[name])

    def reset(self) -> None:
        """e <- 0."""
        for tensor in self._storage.tensors().values():
            tensor.zero_()

    def scale_by(self, factor: float) -> None:
        """e <- factor * e, when fp16's loss scale changes by that factor (gradients carry the loss scale)."""
        self._storage.scale_by(factor)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The stored tensors themselves, by name."""
        return self._storage.tensors()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that e takes."""
        return sum(tensor.nbytes for tensor in self._storage.tensors().values())
