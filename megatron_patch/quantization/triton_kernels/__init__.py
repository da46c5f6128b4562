"""The GPU kernels, in Triton: `compress` and `decompress_reduce`, each in one pass over memory.

They run on a GPU, and on CPU tensors in Triton's interpreter with TRITON_INTERPRET=1. The torch reference
runs with `block_size: shard`, whose blocks do not fit a tile (`supports`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_patch.quantization.blocks import word_bytes
from megatron_patch.quantization.codec import Codec
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.levels import LEVELS, STEPS
from megatron_patch.quantization.packing import largest_scale
from megatron_patch.quantization.triton_kernels.compress import compress_kernel
from megatron_patch.quantization.triton_kernels.decompress_reduce import decompress_reduce_kernel
from megatron_patch.quantization.triton_kernels.rotation import diagonal
from megatron_patch.registry import OWN_CODECS

_TILE = 2048  # Elements of a tile of compress: 16 for each of 128 threads.
_LARGEST_BLOCK = 4096
_PROGRAMS = 8  # Programs of compress on a multiprocessor at a time: 32 warps.
_LANES = 128  # Lanes of decompress_reduce: one for each of 128 threads.
_ERRORS = {torch.int8: 1, torch.bfloat16: 2, torch.float32: 3}


def supports(codec: Codec, layout: BlockLayout) -> bool:
    """Whether the kernels support a codec with this layout: a block must fit a tile."""
    return (
        codec.name in OWN_CODECS and layout.block <= _LARGEST_BLOCK and layout.block & (layout.block - 1) == 0
    )


def compress(
    gradient: torch.Tensor,
    payload: torch.Tensor,
    codec: Codec,
    layout: BlockLayout,
    error: Mapping[str, torch.Tensor],
    beta: float,
    statistics: torch.Tensor | None,
) -> None:
    """Compress as quantization.native.compress, for tensors on the current GPU, without waiting for it.

    Programs add to `statistics` in an order that varies, so that they differ by some 1e-15 between runs.
    """
    values = error.get("codes", error.get("values"))
    scales = error.get("scales")
    rows = max(_TILE // layout.block, 1)
    filled = layout.numel == layout.shards * layout.shard_size
    aligned = layout.shard_size % 16 == 0 and filled and layout.table.multiples_of_16
    whole, levels = layout.table.whole, codec.name == "levels"
    unused = payload  # A kernel needs a pointer for every tensor, even if it does not read it.
    if statistics is not None:
        statistics.zero_()
    compress_kernel[_programs(layout, rows, gradient.device), layout.shards](
        _as_bits(gradient),
        unused if values is None else _as_bits(values),
        unused if scales is None else scales.view(torch.int16),
        payload,
        layout.payload_starts_on(payload.device),
        layout.table.on(payload.device),
        diagonal(layout.block, whole, gradient.device) if codec.rotation.sender else unused,
        unused if statistics is None else statistics,
        layout.shard_size,
        layout.blocks,
        layout.code_bytes,
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
        WHOLE=whole,
        LEVELS=levels,
        ROTATE=codec.rotation.sender,
        BETA_IS_ZERO=beta == 0,
        MEASURE=statistics is not None,
        enable_fp_fusion=False,
    )


def decompress_reduce(
    payloads: torch.Tensor, codec: Codec, layout: BlockLayout, output: torch.Tensor, divisor: int = 1
) -> None:
    """Sum the senders' payloads of one shard as loco.decompress_reduce, for tensors on the current GPU."""
    _decompress(payloads, codec, layout, output, payloads.shape[0], divisor)


def decompress(payloads: torch.Tensor, codec: Codec, layout: BlockLayout, output: torch.Tensor) -> None:
    """Decode the payloads of all shards as loco.decompress, in one launch."""
    _decompress(payloads, codec, layout, output, 1, 1)


def _decompress(
    payloads: torch.Tensor,
    codec: Codec,
    layout: BlockLayout,
    output: torch.Tensor,
    senders: int,
    divisor: int,
) -> None:
    if layout.shards * layout.blocks * layout.block != layout.numel:
        output.zero_()  # Elements in no block are 0.
    words = _as_words(payloads, layout)
    word = 8 * words.element_size()
    # A thread loads at most 16 bytes of one block, which is the widest load, and keeps at most 32 sums.
    words_of_lane = min(4, layout.bits, layout.block * layout.bits // word)
    elements_of_lane = words_of_lane * word // layout.bits
    lanes = max(_LANES, layout.block // elements_of_lane)  # A program has whole blocks, to rotate them back.
    whole = layout.table.whole
    programs = -(-layout.blocks * layout.block // (lanes * elements_of_lane))
    decompress_reduce_kernel[programs, layout.shards](
        words,
        payloads.view(torch.int16)[:, layout.code_bytes // 2 :],
        layout.table.on(payloads.device),
        diagonal(layout.block, whole, output.device) if codec.rotation.owner else payloads,
        _as_bits(output),
        layout.shard_size,
        layout.blocks,
        senders,
        payloads.stride(0) // 16,
        2**layout.bits - 1,
        float(divisor),
        BITS=layout.bits,
        B=layout.block,
        LANES=lanes,
        V=words_of_lane,
        SHARDS=layout.shards > 1,
        WHOLE=whole,
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


def _programs(layout: BlockLayout, rows: int, device: torch.device) -> int:
    """Return the number of programs per shard: all shards' programs run at a time, and loop over tiles."""
    tiles = -(-layout.blocks // rows)
    if device.type != "cuda":
        return min(tiles, 2)  # In the interpreter, several programs share the tiles as on a GPU.
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(tiles, max(_PROGRAMS * multiprocessors // layout.shards, 1))
