"""1-bit Adam's update on a GPU: a group's parameters in one launch and one pass; torch takes nine each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megatron_patch.megatron.onebit_adam.operands import Sizes, Tensors

_CHUNK = 1 << 16  # elements, of a program
_TILE = 1024


def update(parameters: Sequence[Tensors], sizes: Sizes) -> list[Tensors]:
    """update.update, for tensors of the GPU that is current; returns those that it does not serve."""
    served = [tensors for tensors in parameters if _serves(tensors)]
    if table := [_rows(tensors) for tensors in served if tensors[0].numel()]:
        rows = torch.cat(table)
        _update_kernel[(len(rows),)](
            rows.to(served[0][0].device),
            1 - sizes.lr * sizes.weight_decay,
            -sizes.lr / sizes.momentum_bias,
            sizes.variance_bias,
            sizes.eps,
            sizes.most * sizes.momentum_bias,
            TILE=_TILE,
            enable_fp_fusion=False,
        )
    return [tensors for tensors in parameters if not _serves(tensors)]


def _serves(tensors: Tensors) -> bool:
    return all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)


def _rows(tensors: Tensors) -> torch.Tensor:
    """int64 [chunks, 5]: the addresses of x, m, v and exp_avg, and the number of elements."""
    at = torch.arange(0, tensors[0].numel(), _CHUNK, device="cpu")
    addresses = [tensor.data_ptr() + 4 * at for tensor in tensors]
    return torch.stack([*addresses, (tensors[0].numel() - at).clamp(max=_CHUNK)], dim=1)


@triton.jit
def _update_kernel(
    chunks,  # int64 [programs, 5], as _rows
    kept,  # of x, by weight decay
    rate,  # -lr / momentum_bias
    variance_bias,
    eps,
    most,  # of momentum / size
    TILE: tl.constexpr,
):
    row = chunks + tl.program_id(0).to(tl.int64) * 5
    x = tl.load(row).to(tl.pointer_type(tl.float32))
    m = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    v = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    exp_avg = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    length = tl.load(row + 4).to(tl.int32)
    at = tl.arange(0, TILE)
    for start in tl.range(0, length, TILE):
        there = at < length - start
        momentum = tl.load(m + at, mask=there, other=0.0)
        variance = tl.load(v + at, mask=there, other=0.0)
        bias = tl.full([TILE], 1.0, tl.float32) * variance_bias
        size = tl.sqrt_rn(tl.div_rn(variance, bias)) + eps
        size = tl.where(variance == 0, 1.0, size)
        step = tl.minimum(tl.maximum(tl.div_rn(momentum, size), -most), most)
        step = tl.where(variance == 0, 0.0, step)
        tl.store(x + at, tl.load(x + at, mask=there, other=0.0) * kept + step * rate, mask=there)
        tl.store(exp_avg + at, momentum, mask=there)
        x += TILE
        m += TILE
        v += TILE
        exp_avg += TILE
