"""The GPU kernels, in Triton: `compress` and `decompress_reduce`, each in one pass over memory.

They run on a GPU, and on CPU tensors in Triton's interpreter under TRITON_INTERPRET=1. `block_size: shard` is
left to the reference: its blocks do not fit a tile (`supports`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton

from megatron_patch.quantization import packing
from megatron_patch.quantization.blocks import word_bytes
from megatron_patch.quantization.codec import Codec
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.levels import LEVELS, STEPS
from megatron_patch.quantization.scales import largest_scale
from megatron_patch.quantization.triton_kernels.compress import compress_kernel
from megatron_patch.quantization.triton_kernels.decompress_reduce import decompress_reduce_kernel
from megatron_patch.quantization.triton_kernels.rotation import diagonal

_TILE = 2048  # elements, of compress: 16 for each of 128 threads
_LARGEST_BLOCK = 4096
_TILES_OF_A_PROGRAM = 16  # at most: enough to hide how it begins and ends
_PROGRAMS_PER_MULTIPROCESSOR = 8
_LANES = 128  # of decompress_reduce: one for each of 128 threads
CODECS = {("uniform", bits) for bits in (8, 4, 3, 2)} | {("levels", bits) for bits in LEVELS} | {("sign", 1)}
"""Names and bits of the codecs that the kernels know."""
_ERRORS = {torch.int8: 1, torch.bfloat16: 2, torch.float32: 3}


def supports(codec: Codec, layout: BlockLayout) -> bool:
    """Whether the kernels serve a codec for this cut: a block must fit a tile."""
    return (
        (codec.name, codec.bits) in CODECS
        and layout.block <= _LARGEST_BLOCK
        and layout.block & (layout.block - 1) == 0
    )


def compress(
    gradient: torch.Tensor,
    payload: torch.Tensor,
    codec: Codec,
    layout: BlockLayout,
    error: Mapping[str, torch.Tensor],
    beta: float,
    noise: torch.Tensor | None,
    statistics: torch.Tensor,
) -> None:
    """quantization.native.compress, for tensors of the GPU that is current. Nothing here waits for it.

    Programs add to `statistics` in an order that varies: the same numbers to some 1e-15.
    """
    values = error.get("codes", error.get("values"))
    scales = error.get("scales")
    rows = max(_TILE // layout.block, 1)
    regular = layout.table is None
    aligned = regular and layout.shard_size % 16 == 0 and layout.numel == layout.shards * layout.shard_size
    whole, levels = _whole(layout), codec.name == "levels"
    unused = payload  # any pointer will do where there is nothing to point to
    statistics.zero_()
    compress_kernel[(_programs(layout, rows, gradient.device), layout.shards)](
        _as_bits(gradient),
        unused if values is None else _as_bits(values),
        unused if scales is None else scales.view(torch.int16),
        unused if noise is None else noise,
        _as_words(payload, layout),
        payload,
        payload.view(torch.int16),
        _places(layout, payload),
        diagonal(layout.block, whole, gradient.device) if codec.rotation.sender else unused,
        statistics,
        layout.numel,
        layout.shard_size,
        layout.blocks,
        layout.code_bytes,
        layout.payload_bytes,
        beta,
        1 - beta,
        largest_scale(LEVELS[codec.bits][-1] if levels else max(2 ** (layout.bits - 1) - 1, 1)),
        largest_scale(127),
        STEPS[codec.bits] / 64 if levels else 0.0,
        BITS=layout.bits,
        B=layout.block,
        ROWS=rows,
        BF16=gradient.dtype == torch.bfloat16,
        ERROR=0 if values is None else _ERRORS[values.dtype],
        ALIGNED=aligned,
        REGULAR=regular,
        WHOLE=whole and (levels or codec.rotation.sender),
        LEVELS=levels,
        ROTATE=codec.rotation.sender,
        BETA_IS_ZERO=beta == 0,
        STOCHASTIC=noise is not None,
        enable_fp_fusion=False,
        # Left alone it takes 200 for addresses, and a multiprocessor has room for half as many programs. But
        # rotation and levels have no use for less: they would spill.
        maxnreg=None if aligned or levels or codec.rotation.sender else 128 if regular else 168,
    )


def decompress_reduce(
    payloads: torch.Tensor, codec: Codec, layout: BlockLayout, output: torch.Tensor, divisor: int = 1
) -> None:
    """quantization.decompress_reduce.decompress_reduce, for tensors of the GPU that is current."""
    if layout.table is not None:
        output.zero_()  # what is in no block
    words = _as_words(payloads, layout)
    word = 8 * words.element_size()
    # Of a thread: 16 bytes at most, which is what a load takes, of one block, and not more than 32 sums.
    width = packing.planes(layout.bits)[0][1]
    words_of_lane = min(4, width, layout.block * width // word)
    elements_of_lane = words_of_lane * word // width
    lanes = max(_LANES, layout.block // elements_of_lane)  # of whole blocks, which may be rotated back
    grid = (triton.cdiv(layout.blocks * layout.block, lanes * elements_of_lane),)
    whole = _whole(layout)
    decompress_reduce_kernel[grid](
        words,
        payloads.view(torch.int16)[:, layout.code_bytes // 2 :],
        _places(layout, payloads),
        diagonal(layout.block, whole, output.device) if codec.rotation.owner else payloads,
        _as_bits(output),
        min(output.numel(), layout.shard_size),
        min(layout.numel, layout.shard_size),
        layout.blocks,
        payloads.shape[0],
        layout.code_bytes // 16,
        layout.payload_bytes // 16,
        15 if layout.bits == 3 else 2**layout.bits - 1,
        float(divisor),
        BITS=layout.bits,
        B=layout.block,
        LANES=lanes,
        V=words_of_lane,
        REGULAR=layout.table is None,
        WHOLE=whole and codec.rotation.owner,
        LEVELS=codec.name == "levels",
        ROTATE=codec.rotation.owner,
        DIVIDE=divisor != 1,
        BF16=output.dtype == torch.bfloat16,
        enable_fp_fusion=False,
    )


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _as_words(payload: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    return payload.view(torch.int32 if word_bytes(layout.block, layout.bits) == 4 else torch.int16)


def _places(layout: BlockLayout, unused: torch.Tensor) -> torch.Tensor:
    """The table of blocks on the tensors' device; for a regular cut any pointer will do."""
    return unused if layout.table is None else layout.table.on(unused.device)


def _whole(layout: BlockLayout) -> bool:
    """Whether every block has all its elements."""
    filled = layout.numel == layout.shards * layout.shard_size
    return layout.table is None and filled and layout.shard_size % layout.block == 0


def _programs(layout: BlockLayout, rows: int, device: torch.device) -> int:
    """Programs of a shard: many tiles for each, but no multiprocessor without work."""
    tiles = triton.cdiv(layout.blocks, rows)
    if device.type != "cuda":
        return min(tiles, 2)  # in the interpreter: more than one, so that they share the tiles
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    at_least = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // layout.shards
    return min(tiles, max(triton.cdiv(tiles, _TILES_OF_A_PROGRAM), at_least, 1))
