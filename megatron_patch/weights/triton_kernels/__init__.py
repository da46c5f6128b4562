"""The GPU kernels of weights/code.py, with the same functions; they give the same bytes.

They take contiguous tensors on the current GPU, or CPU tensors in Triton's interpreter. Weights may begin at
any multiple of 2 bytes, messages at multiples of 8.
"""

from __future__ import annotations

import torch
import triton

from megatron_patch.weights.code import HEADER_BYTES, NEW_SUM, RAW, bound
from megatron_patch.weights.sums import tiles_of
from megatron_patch.weights.tables import sampled
from megatron_patch.weights.triton_kernels import rans, tables
from megatron_patch.weights.triton_kernels.sums import sums as sums

_PLAIN = {"enable_fp_fusion": False}


def encode(
    old: torch.Tensor, new: torch.Tensor, fp16: bool, message: torch.Tensor, facts: torch.Tensor
) -> int:
    """Encode as weights.code.encode. It waits for the GPU once, to learn the message's length.

    Words are written to a scratch tensor first, which takes 4 bytes per weight.
    """
    n, bits = old.numel(), 10 if fp16 else 7
    if n == 0:
        message[:HEADER_BYTES].zero_()
        message[0].fill_(RAW)
        facts.zero_()
        return HEADER_BYTES
    i32, device = torch.int32, old.device
    contexts, symbols, total = tables.CONTEXTS.value, tables.SYMBOLS.value, tables.TOTAL.value
    counts = torch.zeros(tables.COPIES.value, tables.EXPONENTS.value, symbols, dtype=i32, device=device)
    told = torch.empty(4, tiles_of(n), dtype=torch.int64, device=device)
    some = sampled(n)
    tables.count_kernel[(tiles_of(n),)](old, new, counts, told, n, tiles_of(n), bits, some, **_PLAIN)
    exponents = counts.sum((0, 2))
    frequencies, starts = torch.empty(2, contexts, symbols, dtype=i32, device=device)
    costs = torch.empty(contexts, dtype=torch.int64, device=device)
    tables.frequencies_kernel[(contexts,)](counts, exponents, frequencies, starts, costs, some, **_PLAIN)
    table, numbers = (
        torch.empty(contexts, total, dtype=i32, device=device),
        torch.zeros(total, dtype=i32, device=device),
    )
    tables.list_kernel[(contexts,)](frequencies, starts, table, numbers, **_PLAIN)
    front = torch.zeros(tables.FRONT_BYTES.value, dtype=torch.uint8, device=device)
    plan = torch.empty(tables.PLAN.value, dtype=torch.int64, device=device)
    tables.front_kernel[(1,)](exponents, frequencies, numbers, costs, front, plan, n, bits, **_PLAIN)
    most = triton.cdiv(n, rans.SMALLEST.value)
    words = torch.empty(2 * n, dtype=torch.int16, device=device)
    of_tiles, states = (
        torch.zeros(most, dtype=i32, device=device),
        torch.empty(most, rans.WARP.value, dtype=i32, device=device),
    )
    grid = (triton.cdiv(most, rans.TILES.value),)
    rans.encode_kernel[grid](old, new, table, plan, words, of_tiles, states, n, **_PLAIN)
    ends = of_tiles.cumsum(0)
    room = bound(n)
    rans.pack_kernel[(most,)](front, plan, of_tiles, ends, states, words, message, n, room, **_PLAIN)
    told = told.sum(1)
    facts.copy_(told[:3])
    message[NEW_SUM].copy_(told[3:].view(torch.uint8))
    size = HEADER_BYTES + int(plan[tables.WORDS_AT.value] + 2 * ends[-1])
    if size < room:
        return size
    message[:4].zero_()
    message[0].fill_(RAW)
    message[HEADER_BYTES:room].copy_(new.view(torch.uint8))
    return room


def decode(
    messages: torch.Tensor, places: torch.Tensor, shards: torch.Tensor, own: int, verdicts: torch.Tensor
) -> None:
    """Decode as weights.code.decode, all messages in the same launches, without waiting for the GPU."""
    (senders, n), row, device = shards.shape, messages.shape[1], shards.device
    most = max(triton.cdiv(n, rans.SMALLEST.value), 1)
    wrong = torch.zeros(senders, 2, dtype=torch.int32, device=device)
    contexts = tables.CONTEXTS.value
    table = torch.empty(senders, contexts, tables.TOTAL.value, dtype=torch.int32, device=device)
    plans = torch.empty(senders, tables.PLAN.value, dtype=torch.int64, device=device)
    # The interpreter is faster with few operations on many numbers, but a GPU has few registers.
    slots = tables.TOTAL.value if triton.knobs.runtime.interpret else 64
    tables.read_kernel[(contexts, senders)](messages, places, table, plans, wrong, row, n, slots, **_PLAIN)
    sizes = torch.empty(senders, most, dtype=torch.int64, device=device)
    grid = (triton.cdiv(most, 256), senders)
    rans.sizes_kernel[grid](messages, places, plans, sizes, row, n, most, **_PLAIN)
    ends = sizes.cumsum(1)
    arguments = messages, places, shards, table, plans, ends, wrong, row, n, most, own
    grid = (triton.cdiv(most, rans.TILES.value), senders)
    rans.decode_kernel[grid](*arguments, **_PLAIN)
    arguments = messages, places, plans, ends, wrong, sums(shards), verdicts, row, n, most, own
    rans.verdict_kernel[(senders,)](*arguments, num_warps=1, **_PLAIN)
