"""DeepSpeed's kernels are called as its own exchange calls them: a stand-in looks at every call.

Shapes and dtypes are those of its bindings (csrc/quantization/pt_binding.cpp of 0.19.6).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu_report.deepspeed_kernels import RANKS, ROW, measure


class Quantizer:
    """Rounds by group, as the extension does; a scale multiplies."""

    Symmetric = object()

    def __init__(self) -> None:
        self.calls: list[str] = []

    def quantize(self, values: torch.Tensor, groups: int, bits: int, kind: Any) -> list[torch.Tensor]:
        self.calls.append("quantize")
        assert (values.dtype, bits, kind) == (torch.float16, 8, self.Symmetric)
        rows = values.reshape(groups, -1).float()
        assert rows.shape[1] == ROW
        scales = rows.abs().amax(1, keepdim=True) / 127
        codes = (rows / scales.clamp(min=1e-9)).round().to(torch.int8)
        return [codes.view(values.shape), scales]

    def dequantize(
        self, codes: torch.Tensor, scales: torch.Tensor, groups: int, bits: int, kind: Any
    ) -> torch.Tensor:
        self.calls.append("dequantize")
        assert (codes.dtype, scales.dtype, scales.shape, bits) == (torch.int8, torch.float32, (groups, 1), 8)
        return (codes.reshape(groups, -1) * scales).half().view(codes.shape)

    def loco_swizzle_quant(
        self, values: torch.Tensor, error: torch.Tensor, beta: float, groups: int, bits: int, *rest: Any
    ) -> list[torch.Tensor]:
        self.calls.append("loco_swizzle_quant")
        assert rest == (self.Symmetric, 1, 1, RANKS), "pipelining, nodes, GPUs of a node"
        assert (values.dtype, error.dtype, bits, beta) == (torch.float16, torch.float16, 4, 0.8)
        assert values.shape == error.shape == (groups, ROW)
        assert groups % RANKS == 0
        error.copy_(0.01 * values)
        return [torch.empty(values.numel() // 2, dtype=torch.int8), torch.empty(groups, 1)]

    def loco_quantized_reduction(
        self, codes: torch.Tensor, scales: torch.Tensor, error: torch.Tensor, beta: float, *rest: Any
    ) -> list[torch.Tensor]:
        self.calls.append("loco_quantized_reduction")
        groups = scales.shape[0]
        assert rest == (groups, groups // RANKS, 4, self.Symmetric, RANKS)
        assert codes.numel() == groups * ROW // 2
        assert error.numel() == groups * ROW // RANKS
        return [torch.empty(codes.numel() // RANKS, dtype=torch.int8), torch.empty(groups // RANKS, 1)]


def test_both_are_measured_on_as_many_elements() -> None:
    quantizer = Quantizer()
    found = measure(quantizer, 100_000, torch.device("cpu"), 1)
    assert found["elements"] == 3 * ROW * RANKS
    errors = ["quantize"] * 2
    sending = ["dequantize", "loco_swizzle_quant", "quantize"]
    summing = ["dequantize", "loco_quantized_reduction", "quantize"]
    assert quantizer.calls == errors + sending + summing
    for times in found["seconds"].values():
        assert list(times) == ["megatron-loco", "DeepSpeed"]
        assert all(seconds > 0 for seconds in times.values())


def test_too_few_elements_are_refused() -> None:
    with pytest.raises(ValueError, match="32767 is too few; it must be 32768 or more"):
        measure(Quantizer(), 32767, torch.device("cpu"), 1)
