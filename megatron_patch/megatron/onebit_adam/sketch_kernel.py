"""Computes the norm's sketch on a GPU in one launch per dtype, where torch needs four for each stretch.

The sums are those of norm_sketch.fold except for the order of fp32 additions, which is the same in every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_patch.quantization.triton_kernels.float_bits import from_bf16

_ROWS = 4  # A program reads this many rows of a stretch at a time.
_PROGRAMS = 1024  # The largest number of programs, which is enough for any GPU.
_POINTED_AT = {torch.float32: tl.float32, torch.bfloat16: tl.int16, torch.float16: tl.float16}


def fold(rows: dict[torch.dtype, torch.Tensor], signs: torch.Tensor, columns: int) -> torch.Tensor:
    """Return norm_sketch.fold, fp32 [columns], of contiguous pieces on the current GPU; `rows` is rows_of."""
    sketch = torch.zeros(columns, dtype=torch.float32, device=signs.device)
    for dtype, of_dtype in rows.items():
        programs = min(len(of_dtype), _PROGRAMS)
        sums = torch.empty(programs, columns, dtype=torch.float32, device=signs.device)
        _fold_kernel[(programs,)](
            of_dtype.to(signs.device),
            signs,
            sums,
            len(of_dtype),
            COLUMNS=columns,
            ROWS=_ROWS,
            ELEMENT=_POINTED_AT[dtype],
            BF16=dtype == torch.bfloat16,
            enable_fp_fusion=False,
        )
        sketch += sums.sum(0)
    return sketch


@triton.jit(do_not_specialize=["count"])
def _fold_kernel(
    stretches,  # int64 [count, 4], as norm_sketch.rows_of
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
            elements = tl.load(values + in_tile, mask=there, other=0)
            elements = from_bf16(elements) if BF16 else elements.to(tl.float32)
            folded += elements * tl.load(of_stretch + in_tile, mask=there, other=0).to(tl.float32)
            values += ROWS * COLUMNS
            of_stretch += ROWS * COLUMNS
        total += tl.sum(folded, axis=0) * factor
    program = tl.program_id(0).to(tl.int64)
    tl.store(sums + program * COLUMNS + column, total, mask=column < COLUMNS)
