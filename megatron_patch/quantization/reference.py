"""The torch reference of the codec: it defines the format that the fused kernels must reproduce.

One block h of b elements, p bits (LoCo's quantizer, arXiv 2407.04480, with a scale per block):

    8, 4, 2 bits:  L = 2^(p-1) - 1,  s = max|h| / L rounded UP to bf16,  q = clamp(round(h / s), -L, L)
    1 bit:         s = mean|h| rounded UP to bf16,                       q = +1 where h >= 0, else -1

The code is symmetric: -2^(p-1) is never sent. Since s >= max|h| / L, |h - s*q| <= s/2. All arithmetic is
fp32 (the mean of 1 bit is summed in fp64, so that its order does not matter and 1e38 does not overflow).
s*q is exact in fp32: 8 bits of scale times at most 7 bits of code. A block of zeros, or one whose scale
underflows, has s = 0 and decodes to 0; a block with a NaN or Inf has s = NaN and decodes to NaN, so that
the shard's owner sees it.
"""

from __future__ import annotations

import functools

import torch

from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.packing import pack, unpack

_BF16_NAN = 0x7FC0
_FP32_MAX = torch.finfo(torch.float32).max


def levels(bits: int) -> int:
    """L, the largest code: 127, 7, 1 for 8, 4, 2 bits, and 1 for 1 bit."""
    return max(2 ** (bits - 1) - 1, 1)


@functools.cache
def largest_scale(bits: int) -> float:
    """The largest bf16 s for which L*s is a finite fp32."""
    as_integer = torch.tensor(_FP32_MAX / levels(bits), dtype=torch.float64).float().view(torch.int32)
    scale = (as_integer & -65536).view(torch.float32)
    return float(scale)


def round_up_to_bf16(value: torch.Tensor) -> torch.Tensor:
    """fp32 >= 0 -> the smallest bf16 not below it, as fp32 (any shape). NaN and Inf are not handled."""
    bits = value.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & -65536).view(torch.float32)


def block_scales(h: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """fp32 [n, blocks, b] -> fp32 [n, blocks], values that bf16 holds exactly; NaN for a non-finite block."""
    largest = h.abs().amax(dim=-1)
    if layout.bits == 1:
        total = h.abs().sum(dim=-1, dtype=torch.float64)
        wanted = (total / layout.lengths(h.device).clamp(min=1)).to(torch.float32)
    else:
        wanted = largest / levels(layout.bits)
    finite = torch.isfinite(largest)
    wanted = torch.where(finite, wanted, 0.0)
    scales = round_up_to_bf16(wanted).clamp(max=largest_scale(layout.bits))
    return torch.where(finite, scales, torch.nan)


def quantize(
    h: torch.Tensor, layout: BlockLayout, noise: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [n, blocks, b] -> (codes int8 [n, blocks, b], scales fp32 [n, blocks]).

    `noise`, uniform in [0, 1) and shaped like h, asks for stochastic rounding: floor(h/s + noise).
    A block whose scale is 0 or NaN has codes 0.
    """
    scales = block_scales(h, layout)
    if layout.bits == 1:
        codes = torch.where(h >= 0, 1, -1).to(torch.int8)
        return codes, scales
    usable = (scales > 0)[..., None]
    ratio = torch.where(usable, h, 0.0) / torch.where(usable, scales[..., None], 1.0)
    rounded = ratio.round_() if noise is None else (ratio + noise).floor_()
    limit = levels(layout.bits)
    return rounded.clamp_(-limit, limit).to(torch.int8), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(int8 [n, blocks, b], fp32 [n, blocks]) -> fp32 [n, blocks, b]: s*q, exact; NaN where s is NaN."""
    return codes.to(torch.float32) * scales[..., None]


def write_payload(
    codes: torch.Tensor, scales: torch.Tensor, layout: BlockLayout, payload: torch.Tensor
) -> None:
    """Codes and scales of n shards into `payload`, uint8 [n, payload_bytes]; every byte is written."""
    packed = pack(layout.join(codes), layout.bits)
    end = layout.code_bytes + 2 * layout.blocks
    payload[:, : packed.shape[1]] = packed
    payload[:, packed.shape[1] : layout.code_bytes] = 0
    stored = scales.to(torch.bfloat16).view(torch.int16)
    stored.masked_fill_(torch.isnan(scales), _BF16_NAN)  # which of its bit patterns torch writes varies
    payload[:, layout.code_bytes : end] = stored.view(torch.uint8)
    payload[:, end:] = 0


def read_payload(payload: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """uint8 [n, payload_bytes] -> the decoded shards, fp32 [n, S]."""
    n = payload.shape[0]
    packed = payload[:, : -(-layout.shard_size * layout.bits // 8)]
    codes = torch.zeros(n, layout.blocks * layout.block, dtype=torch.int8, device=payload.device)
    codes[:, : layout.shard_size] = unpack(packed, layout.bits, layout.shard_size)
    raw = payload[:, layout.code_bytes : layout.code_bytes + 2 * layout.blocks].contiguous()
    scales = raw.view(torch.bfloat16).to(torch.float32)
    return layout.join(dequantize(codes.view(n, layout.blocks, layout.block), scales))


def decompress_reduce(
    payloads: torch.Tensor, layout: BlockLayout, output: torch.Tensor, divisor: int = 1
) -> None:
    """Sum the N senders' payloads of one shard in fp32, in rank order, into `output` of any float dtype.

    `payloads` is uint8 [N, payload_bytes], `output` is [S], or less in a short shard; `divisor` is N where
    Megatron asked for the average, else 1.
    """
    total = read_payload(payloads[:1], layout)[0]
    for sender in range(1, payloads.shape[0]):
        total = total + read_payload(payloads[sender : sender + 1], layout)[0]
    total = total[: output.numel()]
    output.copy_(total if divisor == 1 else total / divisor)
