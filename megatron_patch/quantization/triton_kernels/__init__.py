"""The GPU kernels, in Triton: `compress` and `decompress_reduce`, each in one pass over memory.

They run on a GPU, and on CPU tensors in Triton's interpreter under TRITON_INTERPRET=1. `block_size: shard` is
left to the reference: its blocks do not fit a tile (`supports`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_patch.quantization import packing
from megatron_patch.quantization.blocks import word_bytes
from megatron_patch.quantization.codec import Codec
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.levels import LEVELS, STEPS
from megatron_patch.quantization.scales import largest_scale
from megatron_patch.quantization.triton_kernels.compress import compress_kernel
from megatron_patch.quantization.triton_kernels.decompress_reduce import decompress_reduce_kernel
from megatron_patch.quantization.triton_kernels.launches import launch
from megatron_patch.quantization.triton_kernels.rotation import diagonal
from megatron_patch.registry import OWN_CODECS

_TILE = 2048  # elements, of compress: 16 for each of 128 threads
_LARGEST_BLOCK = 4096
_THREADS = 128
_RESIDENT = 4  # programs on a multiprocessor, until a kernel was compiled
_LANES = 128  # of decompress_reduce: one for each of 128 threads
_ERRORS = {torch.int8: 1, torch.bfloat16: 2, torch.float32: 3}
_resident: dict[tuple[object, ...], int] = {}
"""How many programs of a compress kernel a multiprocessor has room for, by the kernel's constants."""


def supports(codec: Codec, layout: BlockLayout) -> bool:
    """Whether the kernels serve a codec for this cut: a block must fit a tile."""
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
    noise: torch.Tensor | None,
    statistics: torch.Tensor | None,
) -> None:
    """quantization.native.compress, for tensors of the GPU that is current. Nothing here waits for it.

    Programs add to `statistics` in an order that varies: the same numbers to some 1e-15.
    """
    values = error.get("codes", error.get("values"))
    scales = error.get("scales")
    rows = max(_TILE // layout.block, 1)
    regular = layout.table is None
    aligned = layout.shard_size % 16 == 0 and layout.numel == layout.shards * layout.shard_size
    aligned = aligned and (layout.table is None or layout.table.multiples_of_16)
    whole, levels = _whole(layout), codec.name == "levels"
    unused = payload  # any pointer will do where there is nothing to point to
    constants = {
        "BITS": layout.bits,
        "B": layout.block,
        "ROWS": rows,
        "BF16": gradient.dtype == torch.bfloat16,
        "ERROR": 0 if values is None else _ERRORS[values.dtype],
        "ALIGNED": aligned,
        "REGULAR": regular,
        "WHOLE": whole and (levels or codec.rotation.sender),
        "LEVELS": levels,
        "ROTATE": codec.rotation.sender,
        "BETA_IS_ZERO": beta == 0,
        "STOCHASTIC": noise is not None,
        "MEASURE": statistics is not None,
    }
    key = (gradient.device, gradient.dtype, *constants.values())
    # Left alone it takes 200 for addresses, and a multiprocessor has room for half as many programs. But
    # rotation and levels would spill with less, unless they measure nothing and blocks begin well.
    demanding = (levels or codec.rotation.sender) and not (aligned and statistics is None)
    registers = 128 if aligned or regular else 168
    limit = None if demanding or (aligned and regular) else registers
    programs = _programs(layout, rows, gradient.device, _resident.get(key, _RESIDENT))
    if statistics is not None:
        statistics.zero_()
    launched = launch(
        compress_kernel,
        (programs, layout.shards),
        _as_bits(gradient),
        unused if values is None else _as_bits(values),
        unused if scales is None else scales.view(torch.int16),
        unused if noise is None else noise,
        payload,
        layout.payload_starts_on(payload.device),
        _places(layout, payload),
        diagonal(layout.block, whole, gradient.device) if codec.rotation.sender else unused,
        unused if statistics is None else statistics,
        layout.numel,
        layout.shard_size,
        layout.blocks,
        layout.code_bytes,
        beta,
        1 - beta,
        largest_scale(LEVELS[codec.bits][-1] if levels else max(2 ** (layout.bits - 1) - 1, 1)),
        largest_scale(127),
        STEPS[codec.bits] / 64 if levels else 0.0,
        **constants,
        enable_fp_fusion=False,
        maxnreg=limit,
    )
    if key not in _resident and getattr(launched, "n_regs", None) and gradient.device.type == "cuda":
        of_device = torch.cuda.get_device_properties(gradient.device)
        _resident[key] = resident_programs(launched.n_regs, launched.metadata.shared, of_device)


def decompress_reduce(
    payloads: torch.Tensor, codec: Codec, layout: BlockLayout, output: torch.Tensor, divisor: int = 1
) -> None:
    """loco.decompress_reduce, for tensors of the GPU that is current."""
    _decompress(payloads, codec, layout, output, payloads.shape[0], divisor)


def decompress(payloads: torch.Tensor, codec: Codec, layout: BlockLayout, output: torch.Tensor) -> None:
    """loco.decompress, in one launch."""
    _decompress(payloads, codec, layout, output, 1, 1)


def _decompress(
    payloads: torch.Tensor,
    codec: Codec,
    layout: BlockLayout,
    output: torch.Tensor,
    senders: int,
    divisor: int,
) -> None:
    if layout.table is not None:
        output.zero_()  # what is in no block
    words = _as_words(payloads, layout)
    word = 8 * words.element_size()
    # Of a thread: 16 bytes at most, which is what a load takes, of one block, and not more than 32 sums.
    width = packing.planes(layout.bits)[0][1]
    words_of_lane = min(4, width, layout.block * width // word)
    elements_of_lane = words_of_lane * word // width
    lanes = max(_LANES, layout.block // elements_of_lane)  # of whole blocks, which may be rotated back
    whole = _whole(layout)
    launch(
        decompress_reduce_kernel,
        (-(-layout.blocks * layout.block // (lanes * elements_of_lane)), layout.shards),
        words,
        payloads.view(torch.int16)[:, layout.code_bytes // 2 :],
        _places(layout, payloads),
        diagonal(layout.block, whole, output.device) if codec.rotation.owner else payloads,
        _as_bits(output),
        output.numel(),
        layout.numel,
        layout.shard_size,
        layout.blocks,
        senders,
        layout.code_bytes // 16,
        payloads.stride(0) // 16,
        15 if layout.bits == 3 else 2**layout.bits - 1,
        float(divisor),
        BITS=layout.bits,
        B=layout.block,
        LANES=lanes,
        V=words_of_lane,
        SHARDS=layout.shards > 1,
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


def resident_programs(registers: int, shared: int, device: Any) -> int:
    """Programs that a multiprocessor runs at a time.

    `registers` of a thread, `shared` bytes of a program, `device` as torch.cuda.get_device_properties.
    """
    of_program = _THREADS * (-(-registers // 8) * 8)
    by_registers = device.regs_per_multiprocessor // of_program
    # The runtime takes 1 KiB of each program's shared memory.
    by_memory = device.shared_memory_per_multiprocessor // (shared + 1024)
    by_threads = device.max_threads_per_multi_processor // _THREADS
    return int(max(min(by_registers, by_memory, by_threads), 1))


def _programs(layout: BlockLayout, rows: int, device: torch.device, resident: int) -> int:
    """Programs of a shard: as many in all as run at a time. More would wait for these, and their tiles would
    begin without having been fetched ahead."""
    tiles = -(-layout.blocks // rows)
    if device.type != "cuda":
        return min(tiles, 2)  # in the interpreter: more than one, so that they share the tiles
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(tiles, max(resident * multiprocessors // layout.shards, 1))
