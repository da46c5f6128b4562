"""The GPU kernels of weights/code.py, and of entropy_code.py (entropy.py): the same bytes.

For contiguous tensors of the GPU that is current, and on CPU tensors in Triton's interpreter. Weights may
begin at any multiple of 2 bytes, messages at multiples of 8.
"""

from __future__ import annotations

import torch
import triton

from megatron_patch.weights.code import (
    CODED,
    HEADER_BYTES,
    RAW,
    TILE,
    bound,
    tiles_of,
)
from megatron_patch.weights.triton_kernels.decode import (
    apply_kernel,
    message_sizes_kernel,
    verdict_kernel,
)
from megatron_patch.weights.triton_kernels.encode import (
    FEW,
    count_kernel,
    pack_kernel,
    place_kernel,
)
from megatron_patch.weights.triton_kernels.entropy import decode_entropy as decode_entropy
from megatron_patch.weights.triton_kernels.entropy import encode_entropy as encode_entropy
from megatron_patch.weights.triton_kernels.tiles import TILES_AT_ONCE, sizes_kernel
from megatron_patch.weights.triton_kernels.tiles import interpreted as _interpreted
from megatron_patch.weights.triton_kernels.tiles import sums as sums

_SCRATCH_TILES = 1 << 15  # 96 MiB of scratch, for 64 Mi weights
_PLAIN = {"enable_fp_fusion": False}
_APPLY = {**_PLAIN, "maxnreg": 128}  # left to itself ptxas spills 16 bytes to save registers


def encode(old: torch.Tensor, new: torch.Tensor, message: torch.Tensor) -> int:
    """weight_code.encode. It waits for the GPU once, to know the message's length."""
    n, tiles = old.numel(), tiles_of(old.numel())
    counts = torch.empty(4 * tiles, dtype=torch.int16, device=old.device)
    sums = torch.empty(5, tiles, dtype=torch.int64, device=old.device)
    wrong = torch.zeros(1, dtype=torch.int32, device=old.device)
    if tiles:
        count_kernel[(tiles,)](old, new, counts, sums, n, tiles, **_PLAIN)
    sizes = torch.empty(5 * tiles + 1, dtype=torch.int64, device=old.device)
    sizes[0].fill_(HEADER_BYTES + 8 * tiles)
    if tiles:
        grid = (triton.cdiv(tiles, TILES_AT_ONCE.value),)
        sizes_kernel[grid](counts, sizes[1:], wrong, n, tiles, **_PLAIN)
    places = sizes.cumsum(0)  # where each piece begins, plane after plane, and where the last one ends
    size = int(places[-1])
    kind = CODED if size < bound(n) else RAW
    header = message[:HEADER_BYTES].view(torch.int64)
    header[0].fill_(kind)
    header[1].fill_(n)
    torch.sum(sums, 1, out=header[2:])
    if kind == RAW:
        message[HEADER_BYTES : bound(n)].copy_(new.view(torch.uint8))
        return bound(n)
    message[HEADER_BYTES : HEADER_BYTES + counts.nbytes].copy_(counts.view(torch.uint8))
    _write_planes(old, new, counts, places, message)
    return size


def decode(
    messages: torch.Tensor, places: torch.Tensor, shards: torch.Tensor, own: int, found: torch.Tensor
) -> None:
    """weight_code.decode, with as many launches as for one message. Nothing here waits for the GPU.

    Weights stay as they are where a message's header or counts, or its length, are found to be wrong.
    """
    senders, n = shards.shape
    tiles = tiles_of(n)
    wrong = torch.zeros(senders, 2, dtype=torch.int32, device=shards.device)
    sums = torch.zeros(senders, 2, tiles, dtype=torch.int64, device=shards.device)
    sizes = torch.empty(senders, 5 * tiles + 1, dtype=torch.int64, device=shards.device)
    grid = (triton.cdiv(max(tiles, 1), TILES_AT_ONCE.value), senders)
    row = messages.shape[1]
    message_sizes_kernel[grid](messages, places, sizes, wrong, row, n, tiles, **_PLAIN)
    pieces = sizes.cumsum(1)
    if tiles:
        arguments = messages, places, shards, pieces, wrong, sums, row, n, tiles, own
        apply_kernel[
            (
                tiles,
                senders,
            )
        ](*arguments, SIXTEENS=n % 16 == 0, **_APPLY)
    arguments = messages, places, pieces, wrong, sums.sum(2), found, row, n, tiles, own
    verdict_kernel[(senders,)](*arguments, num_warps=1, **_PLAIN)


def _write_planes(
    old: torch.Tensor, new: torch.Tensor, counts: torch.Tensor, places: torch.Tensor, message: torch.Tensor
) -> None:
    """Some tiles after others, which use the same scratch: launches are in order."""
    n, tiles = old.numel(), tiles_of(old.numel())
    at_once = min(tiles, 2 if _interpreted(old) else _SCRATCH_TILES)
    few = torch.empty(at_once * FEW.value, dtype=torch.uint8, device=old.device)
    fours = torch.empty(at_once * TILE, dtype=torch.uint8, device=old.device)
    for first in range(0, tiles, at_once):
        grid = (min(at_once, tiles - first),)
        place_kernel[grid](old, new, counts, places, message, few, fours, n, tiles, first, **_PLAIN)
        pack_kernel[grid](counts, places, message, few, fours, tiles, first, **_PLAIN)
