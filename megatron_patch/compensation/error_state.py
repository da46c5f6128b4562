"""What one sender keeps of one bucket: a moving average of its own quantization errors, e of loco.py.

A state is its tensors by name: `codes`, int8 [N, S], and `scales`, bf16 [N, blocks]; or `values`, bf16 or
fp32 [N, S]. The fill of short blocks is not stored.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_patch.loco import INT8, load_error
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.rotation import rotate, rotate_back

_FLOATS = {"bf16": torch.bfloat16, "fp32": torch.float32}


class MovingAverageError:
    """The error state e of one bucket on one rank, zero at the start.

    Args:
        layout: the bucket's cut; e has its blocks.
        beta: weight of the old error, 0 <= beta < 1.
        dtype: "int8", "bf16" or "fp32".
        device: where the gradients live.
        rotated: whether it is of rotated blocks (rotation.py).
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
        """The stored tensors themselves, by name."""
        return dict(self._state)

    def decode(self) -> torch.Tensor:
        """decode(e), fp32 [N, blocks, b], rotated where it is stored so."""
        return load_error(self._state, self.layout)

    def flat(self) -> torch.Tensor:
        """decode(e) in the bucket's order and without fill, rotated back, fp32 [B] on CPU."""
        stored = {name: tensor.cpu().view(1, -1) for name, tensor in self._state.items()}
        found = torch.zeros(self.layout.numel, device="cpu")
        for which, part in self.layout.by_width:
            chosen = {name: t[:, which] if name == "scales" else t for name, t in stored.items()}
            blocks = load_error(chosen, part)
            found += part.flat(rotate_back(blocks, part) if self.rotated else blocks)
        return found

    def set(self, values: torch.Tensor) -> None:
        """e <- encode(values), fp32 [B] on CPU, not rotated yet."""
        new = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in self._state.items()}
        for which, part in self.layout.by_width:
            blocks = part.cut(values)
            if self.rotated:
                blocks = rotate(blocks, part)
            if "values" in new:
                new["values"].view(-1).add_(part.join(blocks)[0])
                continue
            codes, scales = INT8.quantize(blocks)
            new["codes"].view(-1).add_(part.join(codes)[0])
            new["scales"].view(-1)[which] = scales[0].to(torch.bfloat16)
        self.restore(new)

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Put back what `tensors` gave, bit for bit; other names in `saved` are ignored.

        Raises:
            ValueError: a tensor is missing, or has another shape or dtype; nothing is changed.
        """
        for name, tensor in self._state.items():
            found = saved.get(name)
            if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
                has = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
                raise ValueError(f"{name} is {has}, not {tensor.dtype} {list(tensor.shape)}")
        for name, tensor in self._state.items():
            tensor.copy_(saved[name])

    def reset(self) -> None:
        """e <- 0."""
        for tensor in self._state.values():
            tensor.zero_()

    def scale_by(self, factor: float) -> None:
        """e <- factor * e, when fp16's loss scale changes by that factor (gradients carry the loss scale)."""
        self._state["scales" if "scales" in self._state else "values"].mul_(factor)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that e takes."""
        return sum(tensor.nbytes for tensor in self._state.values())
