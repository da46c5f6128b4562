"""The norm's sketch on a GPU: all pieces in one launch, where torch takes four for each stretch.

The sums are norm_sketch.fold's but for the order of fp32 additions, which is the same in every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_patch.megatron.onebit_adam.operands import COLUMNS, STRETCH, ScaledValues
from megatron_patch.quantization.triton_kernels.float_bits import from_bf16

_ROWS = 4  # of a stretch at a time
_PROGRAMS = 1024  # at most: enough for any GPU
_POINTED_AT = {torch.float32: tl.float32, torch.bfloat16: tl.int16, torch.float16: tl.float16}


def fold(pieces: list[ScaledValues], table: torch.Tensor) -> torch.Tensor:
    """norm_sketch.fold, for contiguous pieces on the GPU that is current."""
    found = torch.zeros(COLUMNS, dtype=torch.float32, device=table.device)
    for dtype, pointed_at in _POINTED_AT.items():
        rows = _table([piece for piece in pieces if piece.values.dtype == dtype])
        if not len(rows):
            continue
        programs = min(len(rows), _PROGRAMS)
        sums = torch.empty(programs, COLUMNS, dtype=torch.float32, device=table.device)
        _fold_kernel[(programs,)](
            rows.to(table.device),
            table,
            sums,
            len(rows),
            COLUMNS=COLUMNS,
            ROWS=_ROWS,
            ELEMENT=pointed_at,
            BF16=dtype == torch.bfloat16,
            enable_fp_fusion=False,
        )
        found += sums.sum(0)
    return found


def _table(pieces: list[ScaledValues]) -> torch.Tensor:
    """int64 [stretches, 4]: address, number of elements, where its signs begin, the bits of its factor."""
    rows = [torch.empty(0, 4, dtype=torch.int64, device="cpu")]
    for piece in pieces:
        at = torch.arange(len(piece.starts), device="cpu") * STRETCH
        row = torch.empty(len(piece.starts), 4, dtype=torch.int64, device="cpu")
        row[:, 0] = piece.values.data_ptr() + at * piece.values.element_size()
        row[:, 1] = (piece.values.numel() - at).clamp(max=STRETCH)
        row[:, 2] = torch.tensor(piece.starts, device="cpu")
        row[:, 3] = torch.tensor(piece.factor, dtype=torch.float32, device="cpu").view(torch.int32)
        rows.append(row)
    return torch.cat(rows)


@triton.jit
def _fold_kernel(
    stretches,  # int64 [count, 4], as _table
    signs,  # int8
    sums,  # fp32 [programs, COLUMNS]
    count,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMENT: tl.constexpr,
    BF16: tl.constexpr,  # elements are loaded as int16
):
    column = tl.arange(0, 1024)
    in_tile = tl.arange(0, ROWS)[:, None] * COLUMNS + column[None, :]
    total = tl.zeros([1024], tl.float32)
    for stretch in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        row = stretches + stretch * tl.full([], 4, tl.int64)
        values = tl.load(row).to(tl.pointer_type(ELEMENT))
        length = tl.load(row + 1).to(tl.int32)
        of_stretch = signs + tl.load(row + 2)
        factor = tl.load(row + 3).to(tl.int32).to(tl.float32, bitcast=True)
        folded = tl.zeros([ROWS, 1024], tl.float32)
        for start in tl.range(0, length, ROWS * COLUMNS):
            there = (column[None, :] < COLUMNS) & (in_tile < length - start)
            found = tl.load(values + in_tile, mask=there, other=0)
            found = from_bf16(found) if BF16 else found.to(tl.float32)
            folded += found * tl.load(of_stretch + in_tile, mask=there, other=0).to(tl.float32)
            values += ROWS * COLUMNS
            of_stretch += ROWS * COLUMNS
        total += tl.sum(folded, axis=0) * factor
    program = tl.program_id(0).to(tl.int64)
    tl.store(sums + program * COLUMNS + column, total, mask=column < COLUMNS)
