"""The GPU kernels, in Triton: `compress` and `decompress_reduce`, each in one pass over memory.

They run on a GPU, and on CPU tensors in Triton's interpreter under TRITON_INTERPRET=1. `block_size: shard` is
left to the reference: its blocks do not fit a tile (`supports`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton

from megatron_patch.quantization.codec import Codec
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.scales import largest_scale
from megatron_patch.quantization.triton_kernels.compress import compress_kernel
from megatron_patch.quantization.triton_kernels.decompress_reduce import decompress_reduce_kernel

CODECS = {("uniform", 8), ("uniform", 4), ("uniform", 2), ("sign", 1)}
_TILE = 2048  # elements, of compress: 16 for each of 128 threads
_LARGEST_BLOCK = 4096
_TILES_OF_A_PROGRAM = 16  # at most: enough to hide how it begins and ends
_PROGRAMS_PER_MULTIPROCESSOR = 8
_LANES = 128  # of decompress_reduce: one for each of 128 threads
_ERRORS = {torch.int8: 1, torch.bfloat16: 2, torch.float32: 3}


def supports(codec: Codec, layout: BlockLayout) -> bool:
    """Whether the kernels serve a codec for this cut: a block must fit a tile."""
    known = (codec.name, codec.bits) in CODECS and not codec.rotation.rotated
    return known and layout.block <= _LARGEST_BLOCK and layout.block & (layout.block - 1) == 0


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
        statistics,
        layout.numel,
        layout.shard_size,
        layout.blocks,
        layout.code_bytes,
        layout.payload_bytes,
        beta,
        1 - beta,
        largest_scale(max(2 ** (layout.bits - 1) - 1, 1)),
        largest_scale(127),
        BITS=layout.bits,
        B=layout.block,
        ROWS=rows,
        BF16=gradient.dtype == torch.bfloat16,
        ERROR=0 if values is None else _ERRORS[values.dtype],
        ALIGNED=aligned,
        REGULAR=regular,
        BETA_IS_ZERO=beta == 0,
        STOCHASTIC=noise is not None,
        enable_fp_fusion=False,
        # Left alone it takes 200 for addresses, and a multiprocessor has room for half as many programs.
        maxnreg=None if aligned else 128 if regular else 168,
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
    words_of_lane = min(4, layout.bits, layout.block * layout.bits // word)
    elements_of_lane = words_of_lane * word // layout.bits
    grid = (triton.cdiv(layout.blocks * layout.block, _LANES * elements_of_lane),)
    decompress_reduce_kernel[grid](
        words,
        payloads.view(torch.int16)[:, layout.code_bytes // 2 :],
        _places(layout, payloads),
        _as_bits(output),
        min(output.numel(), layout.shard_size),
        layout.blocks,
        payloads.shape[0],
        layout.code_bytes // 16,
        layout.payload_bytes // 16,
        2**layout.bits - 1,
        float(divisor),
        BITS=layout.bits,
        B=layout.block,
        LANES=_LANES,
        V=words_of_lane,
        REGULAR=layout.table is None,
        DIVIDE=divisor != 1,
        BF16=output.dtype == torch.bfloat16,
        enable_fp_fusion=False,
    )


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _as_words(payload: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    return payload.view(torch.int32 if layout.block * layout.bits >= 32 else torch.int16)


def _places(layout: BlockLayout, unused: torch.Tensor) -> torch.Tensor:
    """The table of blocks on the tensors' device; for a regular cut any pointer will do."""
    return unused if layout.table is None else layout.table.on(unused.device)


def _programs(layout: BlockLayout, rows: int, device: torch.device) -> int:
    """Programs of a shard: many tiles for each, but no multiprocessor without work."""
    tiles = triton.cdiv(layout.blocks, rows)
    if device.type != "cuda":
        return min(tiles, 2)  # in the interpreter: more than one, so that they share the tiles
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    at_least = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // layout.shards
    return min(tiles, max(triton.cdiv(tiles, _TILES_OF_A_PROGRAM), at_least, 1))
