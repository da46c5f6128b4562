"""What is the GPU kernels' own: when the CPU waits for them."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from weights.weight_coders import CODERS, NORMAL, Waiting, changed, coded, triton_coders

from megatron_patch.weights.code import FACTS, bound


class Counting(TorchDispatchMode):
    """Counts how often the CPU waits for a tensor's number."""

    waits = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.waits += function is torch.ops.aten._local_scalar_dense.default
        return function(*arguments, **(options or {}))


@triton_coders
def test_encoding_waits_for_the_gpu_once(name):
    one = CODERS[name]
    for share, spread in ((0.3, 30), (1.0, 30_000)):  # the second message is raw
        old, new = (weights.to(one.device) for weights in changed(500, 1, spread, share, NORMAL))
        message = torch.zeros(bound(500), dtype=torch.uint8, device=one.device)
        facts = torch.zeros(FACTS, dtype=torch.int64, device=one.device)
        with Counting() as counting:
            size = one.coder.encode(old, new, False, message, facts)
        assert counting.waits == 1
        assert (size == bound(500)) == (share == 1.0)


@triton_coders
def test_decoding_does_not_wait_for_the_gpu(name):
    one = CODERS[name]
    old, new = changed(600, 1, 200, 0.7, NORMAL)
    message, weights = coded(name, old, new).to(one.device), old.to(one.device, copy=True)
    found = torch.full((1,), -1, dtype=torch.int32, device=one.device)
    places = torch.tensor([[0, message.numel()]], device=one.device)
    with pytest.raises(AssertionError), Waiting():
        int(found)
    with Waiting():
        one.coder.decode(message[None], places, weights[None], -1, found)
    assert int(found) == 0
    assert torch.equal(weights.cpu(), new)
