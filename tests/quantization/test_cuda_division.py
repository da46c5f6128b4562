"""The torch reference's bits with CUDA's arithmetic, simulated on the CPU.

torch on CUDA divides by a Python number, and by a 0-dimensional tensor of the CPU, by multiplying with the
reciprocal (aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu). That rounds twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from quantization.backend_agreement import compress_by, gradient_of, only_torch, random_spans, sender_of
from torch.overrides import TorchFunctionMode

from megatron_patch import loco
from megatron_patch.collectives.sender import decompress_reduce
from megatron_patch.quantization.codec import Codec
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.quantization.levels import Levels
from megatron_patch.quantization.rotation import HADAMARD
from megatron_patch.quantization.sign import Sign
from megatron_patch.quantization.uniform import Uniform

_DIVISIONS = {torch.Tensor.div, torch.Tensor.true_divide, torch.Tensor.__truediv__, torch.div}
_IN_PLACE = {torch.Tensor.div_, torch.Tensor.__itruediv__}
_FACTORIES = {torch.tensor, torch.full, torch.zeros, torch.ones, torch.scalar_tensor}


class CudaDivision(TorchFunctionMode):
    """Within it, tensors made without a device are the CPU's, and all others the GPU's."""

    def __init__(self) -> None:
        super().__init__()
        self.on_cpu: list[torch.Tensor] = []
        self.shortened = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DIVISIONS | _IN_PLACE and self._is_short(args[1]) and args[0].is_floating_point():
            self.shortened += 1
            inverse = torch.ones((), dtype=args[0].dtype) / torch.as_tensor(args[1], dtype=args[0].dtype)
            return args[0].mul_(inverse) if func in _IN_PLACE else args[0] * inverse
        result = func(*args, **kwargs)
        if func in _FACTORIES and "device" not in kwargs:
            self.on_cpu.append(result)
        return result

    def _is_short(self, divisor: Any) -> bool:
        return not isinstance(divisor, torch.Tensor) or any(divisor is known for known in self.on_cpu)


def exchanged(codec: Codec, error: str | None, seed: int) -> list[torch.Tensor]:
    """Two exchanges of three senders: payloads, errors, and the sums' averages."""
    numel = 20_000
    spans = [replace(span, exact=span.row == span.length) for span in random_spans(numel, seed)]
    layout = BlockLayout.of(numel, 1, codec.bits, 128, spans=spans)
    senders = [sender_of(layout, torch.device("cpu"), error, 0.8) for _ in range(3)]
    found: list[torch.Tensor] = []
    for step in range(2):
        payloads = torch.empty(3, layout.payload_bytes, dtype=torch.uint8)
        for number, sender in enumerate(senders):
            sender.codec = codec
            gradient = gradient_of(numel, 10 * seed + 3 * step + number, torch.float32, "plain")
            compress_by(loco, sender, gradient, payloads[number : number + 1])
            assert layout.exact is not None
            payload = payloads[number : number + 1]
            layout.exact.write(gradient, payload, layout.coded_bytes, layout.payload_starts)
        output = torch.empty(numel)
        decompress_reduce(payloads, codec, layout, output, 3)
        found += [payloads, output.view(torch.int32)]
    for sender in senders:
        found += sender.error.tensors().values() if sender.error is not None else ()
    return found


@pytest.mark.parametrize("error", ["int8", None])
@pytest.mark.parametrize(
    "codec", [Uniform(8), Uniform(4), Levels(4, HADAMARD), Sign()], ids=lambda c: f"{c.name}{c.bits}"
)
def test_the_reference_s_bits_are_those_of_one_division(codec: Codec, error: str | None) -> None:
    with only_torch():
        wanted = exchanged(codec, error, 1)
        with CudaDivision():
            found = exchanged(codec, error, 1)
    assert len(found) == len(wanted)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


def test_the_simulation_shortens_what_cuda_does() -> None:
    values = torch.rand(10_000)
    exact = values / torch.full((), 3.0, device="cpu")
    with CudaDivision() as mode:
        assert not torch.equal(values / 3, exact)
        assert not torch.equal(values / torch.tensor(3.0), exact)
        assert torch.equal(values / torch.full((), 3.0, device="cpu"), exact)
    assert mode.shortened == 2
