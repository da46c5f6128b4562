"""Rotation of blocks in registers: quantization/rotation.py, bit for bit.

A thread has RUN neighbouring elements of a block. Stages within a thread are additions; in stages between
threads each number is sent to its partner, and a fused multiply-add by +1 or -1 adds or subtracts it exactly.

Stage j applies to the whole groups of 2^(j+1) elements of a block; elements after them are in smaller parts.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from megatron_patch.quantization import rotation


@functools.cache
def diagonal(block: int, whole: bool, device: torch.device) -> torch.Tensor:
    """Return d of a whole block, or its signs alone if blocks are not all whole: fp32 [b] on a device."""
    scale = 2.0 ** (-(block.bit_length() - 1) / 2) if whole else 1.0
    return (rotation.signs(block) * torch.tensor(scale, dtype=torch.float32, device="cpu")).to(device)


@triton.jit
def _inside(lengths, STAGE: tl.constexpr, B: tl.constexpr, RUN: tl.constexpr):
    """Whether a stage applies to an element of blocks of `lengths` [rows]: [rows, B / RUN, RUN].

    A stage between threads is the same for all elements of a thread: [rows, B / RUN, 1].
    """
    thread = tl.arange(0, B // RUN)[None, :, None]
    lengths = lengths[:, None, None]
    if 2 << STAGE <= RUN:  # The places within a thread are known at compile time.
        of_thread = tl.minimum(tl.maximum(lengths - thread * RUN, 0), RUN)
        inside = tl.arange(0, RUN)[None, None, :] >> (STAGE + 1) < of_thread >> (STAGE + 1)
    else:
        inside = (thread * RUN) >> (STAGE + 1) < lengths >> (STAGE + 1)
    return inside


@triton.jit
def scaled(values, diagonal, lengths, B: tl.constexpr, RUN: tl.constexpr, WHOLE: tl.constexpr):
    """Multiply fp32 [rows, B] by d; `diagonal` is a pointer to `diagonal(B, WHOLE)`."""
    d = tl.load(diagonal + tl.arange(0, B))[None, :]
    if not WHOLE:
        runs: tl.constexpr = (values.shape[0], B // RUN, RUN)
        d = tl.broadcast_to(tl.reshape(d, (1, B // RUN, RUN)), runs)
        of_run = tl.zeros((values.shape[0], B // RUN, 1), tl.float32)  # For runs within parts of RUN or more.
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


@triton.jit
def _magnitude(exponent: tl.constexpr):
    """Return 2^(-exponent/2), rounded to fp32."""
    return tl.constexpr((1.0 if exponent % 2 == 0 else 0.70710677) / (1 << (exponent // 2)))


@triton.jit
def hadamard(values, lengths, B: tl.constexpr, RUN: tl.constexpr, WHOLE: tl.constexpr):
    """Multiply each part of fp32 [rows, B] by H; `lengths` is not read if every block is WHOLE."""
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
    """Add or subtract elements in threads DISTANCE apart: [rows, B] -> [rows, B / RUN, RUN]."""
    runs = tl.reshape(values, (values.shape[0], B // RUN, RUN))
    thread = tl.arange(0, B // RUN)[None, :, None]
    partner = tl.gather(runs, tl.broadcast_to(thread ^ DISTANCE, runs.shape), 1)
    sign = tl.where(thread & DISTANCE == 0, 1.0, -1.0)
    return tl.fma(runs, tl.broadcast_to(sign, runs.shape), partner)
