"""Compares our kernels with DeepSpeed's LoCo kernels on one GPU: 4 bits, fp16 gradients, 8-bit errors.

A rank's `all_to_all_loco_quant_reduce` launches (DeepSpeed 0.19.6, coalesced_collectives.py):

    to send    dequantize the errors; loco_swizzle_quant; quantize the errors
    to sum     dequantize the errors; loco_quantized_reduction, which codes its sum again; quantize the errors

with a scale for each row of a matrix. This package does each in one kernel, with a scale for every 128
elements, and its sum stays on its rank in fp16. DeepSpeed builds its kernels with nvcc when they are first
loaded.

    python -m benchmarks.gpu_report.deepspeed_kernels --elements 40000000 --runs 20
"""

from __future__ import annotations

import argparse
import importlib
import json
from typing import Any

import torch

from megatron_patch.config import CompressionConfig
from megatron_patch.workflows.bench import gpu_rates

ROW = 4096
"""The elements of a row, for which DeepSpeed has one scale: a matrix's row at this hidden size."""
RANKS = gpu_rates.SHARDS
_BETA = 0.8


def measure(quantizer: Any, elements: int, device: torch.device, runs: int) -> dict[str, Any]:
    """Measure the median seconds of a call of each kernel; `quantizer` is DeepSpeed's extension.

    `elements`, the size of a bucket, is rounded down to whole rows for each of 8 ranks.

    Raises:
        ValueError: there is less than one row for each rank.
    """
    groups = elements // (ROW * RANKS) * RANKS
    if not groups:
        raise ValueError(f"--elements: {elements} is too few; it must be {ROW * RANKS} or more")
    elements = groups * ROW
    config = CompressionConfig(method="loco", bits=4)
    (ours, *_) = gpu_rates.compress(config, elements, torch.float16, device, runs, compiled=False)
    own_sum = gpu_rates.decompress_reduce(config, elements // RANKS, RANKS, torch.float16, device, runs)
    theirs, their_sum = _sending(quantizer, groups, device), _summing(quantizer, groups, device)
    gradients = [torch.randn(groups, ROW, device=device).half() for _ in range(3)]
    payloads = [torch.randint(-128, 128, (elements // 2,), dtype=torch.int8, device=device) for _ in range(3)]
    return {
        "elements": elements,
        "seconds": {
            "compress": {
                "megatron-loco": ours.seconds,
                "DeepSpeed": gpu_rates.seconds_of(theirs, gradients, device, runs),
            },
            "sum of 8 ranks": {
                "megatron-loco": own_sum.seconds,
                "DeepSpeed": gpu_rates.seconds_of(their_sum, payloads, device, runs),
            },
        },
        **gpu_rates.machine(device),
    }


def _sending(quantizer: Any, groups: int, device: torch.device) -> Any:
    kept = quantizer.quantize(
        torch.zeros(groups, ROW, dtype=torch.float16, device=device), groups, 8, quantizer.Symmetric
    )

    def send(gradient: torch.Tensor) -> None:
        nonlocal kept
        error = quantizer.dequantize(*kept, groups, 8, quantizer.Symmetric)
        quantizer.loco_swizzle_quant(gradient, error, _BETA, groups, 4, quantizer.Symmetric, 1, 1, RANKS)
        kept = quantizer.quantize(error, groups, 8, quantizer.Symmetric)

    return send


def _summing(quantizer: Any, groups: int, device: torch.device) -> Any:
    own = groups // RANKS
    scales = torch.ones(groups, 1, device=device)
    kept = quantizer.quantize(
        torch.zeros(own * ROW, dtype=torch.float16, device=device), own, 8, quantizer.Symmetric
    )

    def reduce(payload: torch.Tensor) -> None:
        nonlocal kept
        error = quantizer.dequantize(*kept, own, 8, quantizer.Symmetric)
        quantizer.loco_quantized_reduction(
            payload, scales, error, _BETA, groups, own, 4, quantizer.Symmetric, RANKS
        )
        kept = quantizer.quantize(error, own, 8, quantizer.Symmetric)

    return reduce


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=40_000_000)
    parser.add_argument("--runs", type=int, default=20)
    args = parser.parse_args()
    builders = importlib.import_module("deepspeed.ops.op_builder")
    quantizer = builders.QuantizerBuilder().load()
    print(json.dumps(measure(quantizer, args.elements, torch.device("cuda"), args.runs)))


if __name__ == "__main__":
    main()
