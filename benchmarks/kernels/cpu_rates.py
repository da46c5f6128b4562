"""Measures compression on one core, compared with memcpy.

For one bucket it measures compress (which reads gradient and error, and writes codes, scales and the new
error) by the native kernel's variants and by the torch reference in pieces that fit the cache, and
decompress_reduce of 8 senders. A codec with levels or rotation is measured in turns with the uniform codec of
as many bits. It also measures the exact code of bf16 weights' changes in one optimizer step, in both
directions, and the arithmetic of a 1-bit Adam step on more elements than a cache holds.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron_patch.collectives.sender import Sender, decompress_reduce
from megatron_patch.config import CompressionConfig
from megatron_patch.megatron.onebit_adam import norm_sketch, update
from megatron_patch.quantization import backends, native
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.weights import code
from megatron_patch.weights.gather import coder_of

LEAST = 1 << 17
"""The elements of the smallest allowed bucket, which is as large as the largest piece."""
WEIGHT_CHANGE = 7e-5
"""The weights' change in a step, about that of Adam at a learning rate of 3e-4 with settled moments."""
_BEYOND_CACHE = 10_000_000
_TENSORS = 8
_PIECES = (1 << 14, 1 << 15, 1 << 16, LEAST)
_Timed = Callable[[Sequence[Callable[[], object]]], list[float]]


def measure(
    config: CompressionConfig,
    elements: int,
    dtype: torch.dtype,
    senders: int,
    seconds: float,
    typical: bool = False,
) -> dict[str, Any]:
    """Measure every implementation for `seconds`, and return elements and bytes per second.

    The rates are those of the best call, or with `typical` of the median call. `elements` is LEAST or more;
    `decompress_reduce` sums the payloads of `senders`. `uniform_elements_per_second` has the uniform code's
    rates by the kernels' names and `decompress_reduce`.
    """
    torch.set_num_threads(1)
    timed = functools.partial(_timed, seconds=seconds, typical=typical)
    device = torch.device("cpu")
    gradient = torch.randn(elements, generator=torch.Generator().manual_seed(1)).to(dtype)
    layout = BlockLayout.of(elements, 1, config.bits, config.block_size)
    senders_of = [Sender(one, layout, device) for one in _measured(config)]
    payloads = torch.empty(len(senders_of), senders, layout.payload_bytes, dtype=torch.uint8)
    compressing = [
        functools.partial(sender.compress, gradient, payload[:1])
        for sender, payload in zip(senders_of, payloads, strict=True)
    ]
    rates: dict[str, float] = {}
    uniform: dict[str, float] = {}
    for index, name in enumerate(native.variants()):
        with native.using(index):
            rates[f"native_{name}"], *others = (elements / one for one in timed(compressing))
            uniform |= {f"native_{name}": rate for rate in others}
    with mock.patch.dict(os.environ, {backends.VARIABLE: "torch"}):
        for size in _PIECES:
            piece = Sender(config, BlockLayout.of(size, 1, config.bits, config.block_size), device)
            one = torch.empty(1, piece.layout.payload_bytes, dtype=torch.uint8)
            pieces = [part for part in gradient.split(size) if len(part) == size]

            def chunked(piece: Sender = piece, one: Any = one, pieces: Any = pieces) -> None:
                for part in pieces:
                    piece.compress(part, one)

            rate = len(pieces) * size / timed([chunked], seconds=seconds / len(_PIECES))[0]
            rates["torch_chunked"] = max(rate, rates.get("torch_chunked", 0.0))
    if native.variants():
        rates["native"] = rates[f"native_{native.variants()[-1]}"]
    reduced = torch.empty(layout.shard_size, dtype=dtype)
    for call, payload in zip(compressing, payloads, strict=True):
        call()
        payload[:] = payload[0]
    reducing = [
        functools.partial(decompress_reduce, payload, sender.codec, layout, reduced)
        for sender, payload in zip(senders_of, payloads, strict=True)
    ]
    decompress, *others = (elements * senders / one for one in timed(reducing))
    if others:
        uniform["decompress_reduce"] = others[0]
    source = torch.empty(256 << 20, dtype=torch.uint8).fill_(1)
    target = torch.empty_like(source).fill_(2)
    return {
        "elements_per_second": rates,
        "decompress_reduce_elements_per_second": decompress,
        "uniform_elements_per_second": uniform,
        "decompress_reduce_bytes_per_element": (payloads[0].nbytes + reduced.nbytes) / (elements * senders),
        "weight_code": _weight_code(elements, timed),
        "onebit_adam": _onebit_adam(timed),
        "memcpy_bytes_per_second": source.nbytes / timed([lambda: target.copy_(source)])[0],
        # The gradient and the error are read, and the error, codes and scales are written.
        "bytes_per_element": gradient.element_size() + 2 + 4 / layout.block + layout.payload_bytes / elements,
        "call": "median" if typical else "best",
        "device": _processor(),
        "kernels": backends.describe(device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def _measured(config: CompressionConfig) -> list[CompressionConfig]:
    """Return the configuration, and its counterpart with the uniform code if that exists and differs."""
    if config.bits == 1 or (config.code == "uniform" and not config.rotates):
        return [config]
    return [config, dataclasses.replace(config, codec="uniform", rotation="none")]


def _weight_code(elements: int, timed: _Timed) -> dict[str, float]:
    """Measure the exact code on bf16 weights from N(0, 0.02^2) that change by `WEIGHT_CHANGE` * N(0, 1)."""
    generator = torch.Generator().manual_seed(2)
    before, change = (torch.randn(elements, generator=generator) for _ in range(2))
    after = 0.02 * before + WEIGHT_CHANGE * change
    old, new = (one.to(torch.bfloat16).view(torch.int16) for one in (0.02 * before, after))
    coder = coder_of(old.device)
    there, back = (torch.empty(code.bound(elements), dtype=torch.uint8) for _ in range(2))
    facts = torch.empty(code.FACTS, dtype=torch.int64)
    size = coder.encode(old, new, False, there, facts)
    size_back = coder.encode(new, old, False, back, facts)
    weights, found = old.clone()[None], torch.empty(1, dtype=torch.int32)
    places = [torch.tensor([[0, nbytes]]) for nbytes in (size, size_back)]

    def decode_twice() -> None:
        for message, place in zip((there, back), places, strict=True):
            coder.decode(message[None], place, weights, -1, found)

    (encode,) = timed([lambda: coder.encode(old, new, False, there, facts)])
    (decode,), (digest,) = timed([decode_twice]), timed([lambda: coder.sums(old)])
    return {
        "bits_per_weight": 8 * size / elements,
        "encode_weights_per_second": elements / encode,
        "decode_weights_per_second": 2 * elements / decode,
        "digest_weights_per_second": elements / digest,
    }


def _onebit_adam(timed: _Timed) -> dict[str, float]:
    """Measure elements per second of forming momentum, with the norm, of the update, and of torch's AdamW."""
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(_BEYOND_CACHE // _TENSORS, generator=generator) for _ in range(_TENSORS)]
    parameters = [torch.zeros_like(gradient, requires_grad=True) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    adamw = torch.optim.AdamW(parameters)
    adamw.step()
    states = [adamw.state[parameter] for parameter in parameters]
    tensors = [
        (parameter.detach(), gradient, state["exp_avg_sq"], state["exp_avg"])
        for parameter, gradient, state in zip(parameters, gradients, states, strict=True)
    ]
    sizes = update.Sizes(lr=1e-3, weight_decay=0.1, eps=1e-8, momentum_bias=0.5, variance_bias=0.5, most=1.0)
    bucket = torch.cat(gradients).to(torch.bfloat16)
    momentum = torch.zeros(bucket.numel())
    piece = norm_sketch.ScaledValues(bucket, 1.0, [0] * -(-bucket.numel() // norm_sketch.STRETCH))

    def form() -> None:
        norm_sketch.fold([piece], norm_sketch.signs(bucket.device))
        update.form(momentum, bucket, 0.9, 1.0)

    calls = {"form": form, "update": lambda: update.update(tensors, sizes), "adamw": adamw.step}
    times = timed(list(calls.values()))
    return {
        f"{name}_elements_per_second": bucket.numel() / one for name, one in zip(calls, times, strict=True)
    }


def _timed(calls: Sequence[Callable[[], object]], seconds: float, typical: bool) -> list[float]:
    """Return the seconds of each call: the least, or with `typical` the median, of 3 repetitions or more.

    Each call is repeated for `seconds`. The calls take turns, so that other load slows all of them alike.
    """
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds * len(calls)
    while len(times[0]) < 3 or time.perf_counter() < end:
        for call, found in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    return [statistics.median(found) if typical else min(found) for found in times]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip() + ", one core"
    return platform.machine() + ", one core"
