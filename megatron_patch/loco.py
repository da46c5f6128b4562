"""LoCo on one page: what a sender does with its gradient, and what an owner does with all senders' payloads.

Each of N ranks has a gradient g of the same B elements. Rank j owns shard j of the sum, and every rank sends
shard j of its gradient to rank j in codes of a few bits (arXiv 2407.04480, algorithm 1):

    sender    h = g + e                      e: moving average of what rounding lost in earlier steps
              q, s = encode(h)               the payload: p bits per element and a scale per block
              r = h - s*q                    what rounding loses in this step
              e <- beta*e + (1 - beta)*r     stored in 8 bits, in the same blocks; beta weighs the old error
    owner     x = sum of all senders' s*q    in fp32, in rank order; divided by N for the average

With `beta` = 0 this is classic error feedback. A block that has a NaN or an infinity is sent as NaN, and its
e does not change. If the codec rotates blocks (quantization/rotation.py), g is rotated first, e is kept
rotated, and the owner rotates the sum back once.

This is the torch reference, for any codec on any device. It runs where no fused kernel supports the codec;
the kernels of quantization/native and quantization/triton_kernels do the same in one pass, and must give the
same bits. A shard has `blocks` blocks of up to b elements (quantization/layout.py). All arithmetic is on fp32
tensors of shape [N, blocks, b], in which short blocks are filled up with zeros ("fill"). docs/numerics.md has
every rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from megatron_patch.quantization.codec import Codec
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.packing import over
from megatron_patch.quantization.rotation import rotate, rotate_back
from megatron_patch.quantization.uniform import Uniform, dequantize

STATISTICS = ("signal", "noise", "gradient", "error", "non_finite_blocks")
"""`statistics`, fp64 [5]: sums of h^2, r^2, g^2, decode(e)^2 over finite blocks; number of other blocks."""
INT8 = Uniform(8)
"""The codec in which e is stored with `error_dtype: int8`."""


def compress(
    gradient: torch.Tensor,
    payload: torch.Tensor,
    codec: Codec,
    layout: BlockLayout,
    error: Mapping[str, torch.Tensor],
    beta: float,
    statistics: torch.Tensor | None,
) -> None:
    """Run the sender's part: write the payloads of all shards, and update e.

    Args:
        gradient: g, [B] of fp32, bf16 or fp16.
        payload: uint8; the payloads of all shards, end to end (`layout.payload_starts`).
        codec: encodes h.
        layout: how the B elements are cut into shards and blocks.
        error: the tensors of e (see `load_error`), updated in place; empty without error feedback.
        beta: the weight of the old error, 0 <= beta < 1.
        statistics: fp64 [5], into which STATISTICS are written; None if they are not needed.
    """
    g = layout.cut(gradient)
    if codec.rotation.sender:
        g = rotate(g, layout)
    e = load_error(error, layout) if error else None
    h = g if e is None else g + e
    rows = payload.new_empty(layout.shards, layout.coded_bytes)
    sent = codec.encode(h, layout, rows)
    for row, start in zip(rows, layout.payload_starts.tolist()[:-1], strict=True):
        payload.view(-1)[start : start + layout.coded_bytes] = row
    # sent.values is s*q as the receivers will decode it, so that r is exactly what the receivers miss.
    r = torch.where(sent.finite[..., None], h - sent.values, 0.0)
    if e is not None:
        # Both products and the sum are rounded: kernels would have to mimic a fused multiply-add.
        average = r if beta == 0 else e * beta + r * (1 - beta)
        store_error(error, layout, average, keep=~sent.finite)
    if statistics is not None:
        statistics.copy_(_statistics(g, e, h, r, sent.finite))


def load_error(error: Mapping[str, torch.Tensor], layout: BlockLayout) -> torch.Tensor:
    """Return decode(e), fp32 [N, blocks, b].

    `error` has `codes`, int8 [N, S], and `scales`, bf16 [N, blocks]; or `values`, bf16 or fp32 [N, S]. At
    b = 128 int8 takes 1 + 1/64 bytes per element.
    """
    if "codes" in error:
        return dequantize(layout.cut(error["codes"].view(-1)), error["scales"].float())
    return layout.cut(error["values"].view(-1))


def store_error(
    error: Mapping[str, torch.Tensor], layout: BlockLayout, new: torch.Tensor, keep: torch.Tensor
) -> None:
    """Store e <- encode(new), fp32 [N, blocks, b], except in blocks marked in `keep`, bool [N, blocks]."""
    if "values" in error:
        error["values"].copy_(layout.join(torch.where(keep[..., None], load_error(error, layout), new)))
        return
    codes, scales = INT8.quantize(new)
    kept = layout.cut(error["codes"].view(-1)).to(torch.int8)
    error["codes"].copy_(layout.join(torch.where(keep[..., None], kept, codes)))
    error["scales"].copy_(torch.where(keep, error["scales"].float(), scales))


def decompress_reduce(
    payloads: torch.Tensor, codec: Codec, layout: BlockLayout, output: torch.Tensor, divisor: int = 1
) -> None:
    """Run the owner's part: sum the N senders' payloads of one shard.

    Args:
        payloads: uint8 [N, payload_bytes], in rank order.
        codec: decodes the payloads.
        layout: the layout of this one shard.
        output: the sum is written here: [S], or fewer elements in a short shard, of any float dtype.
        divisor: N if Megatron asked for the average, else 1.
    """
    x = codec.decode(payloads[:1], layout)
    for sender in range(1, payloads.shape[0]):
        x = x + codec.decode(payloads[sender : sender + 1], layout)
    if codec.rotation.owner:
        x = rotate_back(x, layout)
    x = layout.join(x)[0, : output.numel()]
    output.copy_(x if divisor == 1 else over(x, divisor))


class Reduce(Protocol):
    """The signature of `decompress_reduce`, which every backend has."""

    def __call__(
        self, payloads: torch.Tensor, codec: Codec, layout: BlockLayout, output: torch.Tensor
    ) -> None: ...


def decompress(
    payloads: torch.Tensor, codec: Codec, layout: BlockLayout, output: torch.Tensor, one_shard: Reduce
) -> None:
    """Decode one payload for each shard, uint8 [N, payload_bytes], into `output` [B] of any float dtype."""
    for index, part in enumerate(output.split(layout.shard_size)):
        shard = layout.part(index)
        one_shard(payloads[index : index + 1, : shard.payload_bytes], codec, shard, part)


def _statistics(
    g: torch.Tensor, e: torch.Tensor | None, h: torch.Tensor, r: torch.Tensor, finite: torch.Tensor
) -> torch.Tensor:
    def energy(x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(torch.where(finite[..., None], x, 0.0), dtype=torch.float64)
        return norm * norm

    of_error = torch.zeros((), dtype=torch.float64, device=g.device) if e is None else energy(e)
    return torch.stack([energy(h), energy(r), energy(g), of_error, (~finite).sum().to(torch.float64)])
