"""Rotation of blocks in registers: quantization/rotation.py, bit for bit.

A thread has RUN neighbours of a block. Stages that pair them are additions; between threads each number
goes to its partner, and one fused multiply-add by +1 or -1, exact, adds or subtracts.

Stage j is for the whole groups of 2^(j+1) elements that a block has; what is behind them is in smaller parts.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from megatron_patch.quantization import rotation


@functools.cache
def diagonal(block: int, whole: bool, device: torch.device) -> torch.Tensor:
    """fp32 [b] on a device: d of a whole block, or its signs alone."""
    scale = 2.0 ** (-(block.bit_length() - 1) / 2) if whole else 1.0
    return (rotation.signs(block) * torch.tensor(scale, dtype=torch.float32, device="cpu")).to(device)


@triton.jit
def _inside(lengths, STAGE: tl.constexpr, B: tl.constexpr, RUN: tl.constexpr):
    """Whether a stage is for an element of blocks, [rows]: [rows, B / RUN, RUN], or, where it is between
    threads and the same for all that one has, [rows, B / RUN, 1]."""
    thread = tl.arange(0, B // RUN)[None, :, None]
    lengths = lengths[:, None, None]
    if 2 << STAGE <= RUN:  # with places in a thread that are known when the kernel is compiled
        of_thread = tl.minimum(tl.maximum(lengths - thread * RUN, 0), RUN)
        inside = tl.arange(0, RUN)[None, None, :] >> (STAGE + 1) < of_thread >> (STAGE + 1)
    else:
        inside = (thread * RUN) >> (STAGE + 1) < lengths >> (STAGE + 1)
    return inside


@triton.jit
def scaled(values, diagonal, lengths, B: tl.constexpr, RUN: tl.constexpr, WHOLE: tl.constexpr):
    """d times fp32 [rows, B]; `diagonal` is a pointer to `diagonal(B, WHOLE)`."""
    d = tl.load(diagonal + tl.arange(0, B))[None, :]
    if not WHOLE:
        runs: tl.constexpr = (values.shape[0], B // RUN, RUN)
        d = tl.broadcast_to(tl.reshape(d, (1, B // RUN, RUN)), runs)
        of_run = tl.zeros((values.shape[0], B // RUN, 1), tl.float32)  # of those that have a part of RUN
        magnitude = tl.full(runs, 1.0, tl.float32)
        for stage in tl.static_range(12):
            if 2 << stage > RUN and 1 << stage < B:
                of_run = tl.where(_inside(lengths, stage, B, RUN), _magnitude(stage + 1), of_run)
            elif 2 << stage == RUN:
                of_run += _magnitude(stage + 1)
        for stage in tl.static_range(12):
            if 2 << stage < RUN:
                magnitude = tl.where(_inside(lengths, stage, B, RUN), _magnitude(stage + 1), magnitude)
            elif 2 << stage == RUN:
                magnitude = tl.where(_inside(lengths, stage, B, RUN), of_run, magnitude)
        d = tl.reshape(d * magnitude, values.shape)
    return values * d


@triton.constexpr_function
def _magnitude(exponent):
    """2^(-exponent/2), rounded to fp32."""
    return (1.0 if exponent % 2 == 0 else 0.70710677) / (1 << (exponent // 2))


@triton.jit
def hadamard(values, lengths, B: tl.constexpr, RUN: tl.constexpr, WHOLE: tl.constexpr):
    """H times each part of fp32 [rows, B]; `lengths` are not read where every block is WHOLE."""
    rows: tl.constexpr = values.shape[0]
    runs: tl.constexpr = (rows, B // RUN, RUN)
    for stage in tl.static_range(12):
        if 1 << stage < B:
            if 1 << stage < RUN:
                pairs = tl.reshape(values, (rows, B >> (stage + 1), 2, 1 << stage))
                a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
                added = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
            else:
                added = _between_threads(values, (1 << stage) // RUN, B, RUN)
            if WHOLE:
                values = tl.reshape(added, values.shape)
            else:
                old, added = tl.reshape(values, runs), tl.reshape(added, runs)
                values = tl.reshape(tl.where(_inside(lengths, stage, B, RUN), added, old), values.shape)
    return values


@triton.jit
def _between_threads(values, DISTANCE: tl.constexpr, B: tl.constexpr, RUN: tl.constexpr):
    """[rows, B] -> [rows, B / RUN, RUN]: sums and differences of threads DISTANCE apart."""
    runs = tl.reshape(values, (values.shape[0], B // RUN, RUN))
    thread = tl.arange(0, B // RUN)[None, :, None]
    partner = tl.gather(runs, tl.broadcast_to(thread ^ DISTANCE, runs.shape), 1)
    sign = tl.where(thread & DISTANCE == 0, 1.0, -1.0)
    return tl.fma(runs, tl.broadcast_to(sign, runs.shape), partner)
