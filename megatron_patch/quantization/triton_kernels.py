"""The GPU kernels, in Triton: compress and decompress_reduce, each in one pass over memory.

A program takes tiles of ROWS blocks by b elements, as many as there are for its share of the grid:

    gradient, error  ->  h  ->  max|h| of each row  ->  scale  ->  codes, packed  ->  payload
                                                          r = h - s*q            ->  error

The same fp32 operations as compensation/sender.py and quantization/reference.py, so that codes, scales and
errors are the same bits: divisions are IEEE, multiplications and additions are not fused, and rounding to
even is the addition of 1.5 * 2^23. Runs on a GPU, and on CPU tensors under TRITON_INTERPRET=1.

`block_size: shard` is left to the reference: its blocks do not fit a tile (`supports`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from megatron_patch.quantization.blocks import BlockLayout
from megatron_patch.quantization.reference import largest_scale, levels

_TILE = 2048  # elements: 16 for each of 128 threads, or half where masks take registers
_LARGEST_BLOCK = 4096
_PROGRAMS_PER_MULTIPROCESSOR = 8

_INFINITE = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_NAN = tl.constexpr(0x7FC0)
_TINY = tl.constexpr(2.0**-120)
_TO_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves no room for a fraction


_ERRORS = {torch.int8: 1, torch.bfloat16: 2, torch.float32: 3}


def supports(layout: BlockLayout) -> bool:
    """Whether the kernels serve this cut: a block must fit a tile."""
    return layout.block <= _LARGEST_BLOCK and layout.block & (layout.block - 1) == 0


@triton.jit
def _round_up_to_bf16(value, largest):
    bits = (value.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
    return tl.minimum(bits.to(tl.float32, bitcast=True), largest)


@triton.jit
def _largest_magnitude(values):
    # The magnitudes of floats compare like the integers of their bits: NaN and Inf come out on top.
    return tl.max(values.to(tl.int32, bitcast=True) & _MAGNITUDE, axis=1)


@triton.jit
def _from_bf16(stored):
    return (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _to_bf16(values):
    # To nearest, ties to even, by hand: the interpreter's own conversion differs.
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & _MAGNITUDE) > _INFINITE, _NAN, rounded).to(tl.int16)


@triton.jit
def _energy(values, where, top):
    # Sums of squares in fp32, in units of the block's largest element so that none leaves its range.
    values = tl.where(where, values, 0.0) * tl.div_rn(tl.zeros_like(top) + 1.0, top)[:, None]
    return tl.sum(values * values, axis=1).to(tl.float64) * top.to(tl.float64) * top.to(tl.float64)


@triton.jit
def _to_codes(values, scale, noise, limit, STOCHASTIC: tl.constexpr):
    usable = scale > 0
    ratio = tl.div_rn(tl.where(usable[:, None], values, 0.0), tl.where(usable, scale, 1.0)[:, None])
    if STOCHASTIC:
        rounded = tl.floor(ratio + noise)
    else:
        rounded = (ratio + _TO_EVEN) - _TO_EVEN
    return tl.minimum(tl.maximum(rounded, -limit), limit)


@triton.jit
def _compress(
    gradient,  # fp32, bf16 (as int16) or fp16 [numel]
    error,  # int8, bf16 (as int16) or fp32 [shards, shard_size]; unused without
    error_scales,  # bf16 [shards, blocks] as int16
    noise,  # fp32 [shards, blocks, B]
    payload,  # uint8 [shards, payload_bytes]
    payload16,  # the same as int16
    partials,  # fp64 [programs, 8]
    numel,
    shard_size,
    blocks,
    shards,
    code_bytes,
    payload_bytes,
    beta,
    rest,
    limit,
    largest,
    largest8,
    BITS: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    BF16: tl.constexpr,
    ERROR: tl.constexpr,  # 0: none, 1: int8, 2: bf16, 3: fp32
    ALIGNED: tl.constexpr,  # every block has a multiple of 16 elements
    BETA_IS_ZERO: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    program = tl.program_id(0)
    rows = shards * blocks
    column = tl.arange(0, B)
    of_h = tl.zeros([ROWS], tl.float64)
    of_r = tl.zeros([ROWS], tl.float64)
    of_g = tl.zeros([ROWS], tl.float64)
    of_e = tl.zeros([ROWS], tl.float64)
    bad = tl.zeros([ROWS], tl.float64)
    for tile in range(program, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        there = row < rows
        shard, block = row // blocks, row % blocks
        first = shard * shard_size + block * B
        length = tl.minimum(shard_size - block * B, B).to(tl.int32)  # of the block on the wire
        count = tl.minimum(tl.maximum(numel - first, 0), length).to(tl.int32)  # of real elements in it
        count = tl.where(there, count, 0)
        if ALIGNED:  # so that the compiler sees: loads and stores may be 16 elements wide
            place = tl.multiple_of(first, [16])[:, None] + column[None, :]
            live = (column // 16)[None, :] < (count // 16)[:, None]
        else:
            place = first[:, None] + column[None, :]
            live = column[None, :] < count[:, None]

        g = tl.load(gradient + place, mask=live, other=0)
        g = _from_bf16(g) if BF16 else g.to(tl.float32)
        if ERROR == 0:
            h = g
            e = tl.zeros([ROWS, B], tl.float32)
        else:
            stored = tl.load(error + place, mask=live, other=0)
            if ERROR == 1:
                old = tl.load(error_scales + row, mask=there, other=0)
                e = stored.to(tl.float32) * _from_bf16(old)[:, None]
            elif ERROR == 2:
                e = _from_bf16(stored)
            else:
                e = stored
            h = g + e
        magnitude = _largest_magnitude(h)
        finite = magnitude < _INFINITE

        if BITS == 1:
            total = tl.sum(tl.where(live, tl.abs(h), 0.0).to(tl.float64), axis=1)
            count = tl.maximum(tl.sum(live.to(tl.int32), axis=1), 1)
            wanted = (total / count.to(tl.float64)).to(tl.float32)
        else:
            wanted = tl.div_rn(magnitude.to(tl.float32, bitcast=True), tl.zeros([ROWS], tl.float32) + limit)
        scale = _round_up_to_bf16(tl.where(finite, wanted, 0.0), largest)
        if BITS == 1:
            q = tl.where(h >= 0, 1.0, -1.0)
        else:
            draw = h
            if STOCHASTIC:
                draw = tl.load(noise + row[:, None] * B + column[None, :], mask=there[:, None], other=0.0)
            q = _to_codes(tl.where(finite[:, None], h, 0.0), scale, draw, limit, STOCHASTIC)

        # Codes: the first of a byte's elements in its lowest bits; behind the shard's end, zeros.
        PER_BYTE: tl.constexpr = 8 // BITS
        if BITS == 1:
            raw = (q > 0).to(tl.int32)
        else:
            raw = q.to(tl.int32) & ((1 << BITS) - 1)
        raw = tl.where(column[None, :] < length[:, None], raw, 0)
        raw = (
            tl.reshape(raw, (ROWS, B // PER_BYTE, PER_BYTE)) << (tl.arange(0, PER_BYTE) * BITS)[None, None, :]
        )
        byte = (block * (B // PER_BYTE))[:, None] + tl.arange(0, B // PER_BYTE)[None, :]
        start = shard * payload_bytes
        tl.store(
            payload + start[:, None] + byte,
            tl.sum(raw, axis=2).to(tl.uint8),
            mask=there[:, None] & (byte < code_bytes),
        )
        stored_scale = tl.where(finite, scale.to(tl.int32, bitcast=True) >> 16, _NAN).to(tl.int16)
        tl.store(payload16 + (start + code_bytes) // 2 + block, stored_scale, mask=there)
        # The last block of a shard clears what alignment left between codes, scales and the end.
        last = there & (block == blocks - 1)
        gap = (blocks * (B // PER_BYTE)) + tl.arange(0, 16).to(tl.int64)[None, :]
        zeros = tl.zeros([ROWS, 16], tl.uint8)
        tl.store(payload + start[:, None] + gap, zeros, mask=last[:, None] & (gap < code_bytes))
        gap = code_bytes + 2 * blocks + tl.arange(0, 16).to(tl.int64)[None, :]
        tl.store(payload + start[:, None] + gap, zeros, mask=last[:, None] & (gap < payload_bytes))

        r = tl.where(live, h - q * scale[:, None], 0.0)
        sent = live & finite[:, None]
        top = tl.maximum(tl.where(finite, magnitude, 0).to(tl.float32, bitcast=True), _TINY)
        of_h += _energy(h, sent, top)
        of_r += _energy(r, sent, top)
        of_g += _energy(g, sent, top)
        of_e += _energy(e, sent, top)
        bad += (there & (finite == 0)).to(tl.float64)
        if ERROR != 0:
            if BETA_IS_ZERO:
                average = r
            else:
                average = e * beta + r * rest
            average = tl.where(sent, average, 0.0)
            if ERROR == 1:
                most = _largest_magnitude(average).to(tl.float32, bitcast=True)
                unit = _round_up_to_bf16(tl.div_rn(most, tl.zeros([ROWS], tl.float32) + 127.0), largest8)
                codes = _to_codes(average, unit, average, 127.0, False)
                tl.store(error + place, codes.to(tl.int8), mask=sent)
                new = (unit.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
                tl.store(error_scales + row, new, mask=there & finite)
            elif ERROR == 2:
                tl.store(error + place, _to_bf16(average), mask=sent)
            else:
                tl.store(error + place, average, mask=sent)
    tl.store(partials + program * 8 + 0, tl.sum(of_h, axis=0))
    tl.store(partials + program * 8 + 1, tl.sum(of_r, axis=0))
    tl.store(partials + program * 8 + 2, tl.sum(of_g, axis=0))
    tl.store(partials + program * 8 + 3, tl.sum(of_e, axis=0))
    tl.store(partials + program * 8 + 4, tl.sum(bad, axis=0))


@triton.jit
def _decompress_reduce(
    payloads,  # uint8 [senders, payload_bytes]
    payloads16,  # the same as int16
    output,  # [length]; bf16 as int16
    length,
    blocks,
    senders,
    code_bytes,
    payload_bytes,
    divisor,
    BITS: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    DIVIDE: tl.constexpr,
    BF16: tl.constexpr,
):
    PER_BYTE: tl.constexpr = 8 // BITS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    there = row < blocks
    byte = (row * (B // PER_BYTE))[:, None] + tl.arange(0, B // PER_BYTE)[None, :]
    readable = there[:, None] & (byte < code_bytes)
    total = tl.zeros([ROWS, B], tl.float32)
    for sender in range(0, senders):
        start = (tl.zeros([1], tl.int64) + sender) * payload_bytes
        packed = tl.load(payloads + start[:, None] + byte, mask=readable, other=0).to(tl.int32)
        # Shifted left until the code's sign is the number's, and back.
        left = 32 - BITS - tl.arange(0, PER_BYTE) * BITS
        codes = (packed[:, :, None] << left[None, None, :]) >> (32 - BITS)
        if BITS == 1:
            codes = -2 * codes - 1  # a set bit came out as -1 and is +1
        codes = tl.reshape(codes, (ROWS, B)).to(tl.float32)
        stored = tl.load(payloads16 + (start + code_bytes) // 2 + row, mask=there, other=0)
        part = codes * _from_bf16(stored)[:, None]
        total = tl.where(sender == 0, part, total + part)
    if DIVIDE:
        total = tl.div_rn(total, tl.zeros([ROWS, B], tl.float32) + divisor)
    place = (row * B)[:, None] + tl.arange(0, B).to(tl.int64)[None, :]
    if BF16:
        tl.store(output + place, _to_bf16(total), mask=place < length)
    else:
        tl.store(output + place, total.to(output.dtype.element_ty), mask=place < length)


def compress(
    gradient: torch.Tensor,
    payload: torch.Tensor,
    layout: BlockLayout,
    error: Mapping[str, torch.Tensor],
    beta: float,
    noise: torch.Tensor | None,
    statistics: torch.Tensor,
) -> None:
    """quantization.native.compress, for tensors of the GPU that is current. Nothing here waits for it."""
    values = error.get("codes", error.get("values"))
    scales = error.get("scales")
    aligned = layout.shard_size % 16 == 0 and layout.numel == layout.shards * layout.shard_size
    rows = _rows(layout, _TILE if aligned else _TILE // 2)
    programs = min(triton.cdiv(layout.shards * layout.blocks, rows), _programs(gradient.device))
    partials = torch.empty(programs, 8, dtype=torch.float64, device=gradient.device)
    unused = payload  # any pointer will do where there is nothing to point to
    _compress[(programs,)](
        _as_bits(gradient),
        unused if values is None else _as_bits(values),
        unused if scales is None else scales.view(torch.int16),
        unused if noise is None else noise,
        payload,
        payload.view(torch.int16),
        partials,
        layout.numel,
        layout.shard_size,
        layout.blocks,
        layout.shards,
        layout.code_bytes,
        layout.payload_bytes,
        beta,
        1 - beta,
        float(levels(layout.bits)),
        largest_scale(layout.bits),
        largest_scale(8),
        BITS=layout.bits,
        B=layout.block,
        ROWS=rows,
        BF16=gradient.dtype == torch.bfloat16,
        ERROR=0 if values is None else _ERRORS[values.dtype],
        ALIGNED=aligned,
        BETA_IS_ZERO=beta == 0,
        STOCHASTIC=noise is not None,
        enable_fp_fusion=False,
    )
    torch.sum(partials[:, : statistics.numel()], 0, out=statistics)


def decompress_reduce(
    payloads: torch.Tensor, layout: BlockLayout, output: torch.Tensor, divisor: int = 1
) -> None:
    """quantization.reference.decompress_reduce, for tensors of the GPU that is current."""
    rows = _rows(layout, _TILE)
    _decompress_reduce[(triton.cdiv(layout.blocks, rows),)](
        payloads,
        payloads.view(torch.int16),
        _as_bits(output),
        min(output.numel(), layout.shard_size),
        layout.blocks,
        payloads.shape[0],
        layout.code_bytes,
        layout.payload_bytes,
        float(divisor),
        BITS=layout.bits,
        B=layout.block,
        ROWS=rows,
        DIVIDE=divisor != 1,
        BF16=output.dtype == torch.bfloat16,
        enable_fp_fusion=False,
    )


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _rows(layout: BlockLayout, tile: int) -> int:
    return max(tile // layout.block, 1)


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # in the interpreter: more than one, so that tiles are shared
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return _PROGRAMS_PER_MULTIPROCESSOR * count
