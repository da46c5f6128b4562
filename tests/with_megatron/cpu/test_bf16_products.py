"""bf16 products in fp32, rounded once: what every device computes, in another order of sums at most."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_patch.megatron.cpu import bf16_products

without = not hasattr(torch.library, "get_kernel")
pytestmark = pytest.mark.skipif(without, reason="this torch cannot replace products: its own are taken")


@pytest.fixture
def replaced():
    bf16_products.install()
    bf16_products.install()
    yield
    bf16_products.uninstall()


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def rounded(exact: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(exact).to(torch.bfloat16)


def exactly(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def test_products_and_their_gradients_are_rounded_once(replaced):
    x, w, b = tensors((64, 48), (16, 48), (16,))
    y = torch.nn.functional.linear(x, w, b)
    y.backward(y.detach())
    out = exactly(x) @ exactly(w).T + exactly(b)
    dy = exactly(y)
    for found, exact in ((y, out), (x.grad, dy @ exactly(w)), (w.grad, dy.T @ exactly(x))):
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found.detach(), rounded(exact), rtol=2**-7, atol=1e-5)
        assert (found.detach() == rounded(exact)).float().mean() > 0.99, "ties of the rounding alone"


def test_batched_products_take_factors_and_ignore_what_is_multiplied_by_zero(replaced):
    q, k = tensors((4, 16, 8), (4, 8, 16))
    nothing = torch.full((4, 16, 16), float("nan"), dtype=torch.bfloat16)
    scores = torch.baddbmm(nothing, q, k, beta=0.0, alpha=0.25)
    exact = 0.25 * (exactly(q) @ exactly(k))
    torch.testing.assert_close(scores.detach(), rounded(exact), rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(torch.bmm(q, k).detach(), rounded(4 * exact), rtol=2**-7, atol=1e-5)
    out = torch.empty(4, 16, 16, dtype=torch.bfloat16)
    assert torch.bmm(q.detach(), k.detach(), out=out) is out
    torch.testing.assert_close(out, rounded(4 * exact), rtol=2**-7, atol=1e-5)
    out = torch.empty(16, 16, dtype=torch.bfloat16)
    assert torch.mm(q[0].detach(), k[0].detach(), out=out) is out
    torch.testing.assert_close(out, rounded(4 * exact[0]), rtol=2**-7, atol=1e-5)


def test_other_types_are_torch_s_own_and_so_is_everything_afterwards():
    (x,) = tensors((33, 33), dtype=torch.float32)
    before = x @ x
    bf16_products.install()
    during = x @ x
    bf16_products.uninstall()
    assert torch.equal(before, during)
    assert torch.equal(before, x @ x)


def test_only_processors_without_such_instructions_need_it(monkeypatch):
    for avx512, amx in ((True, False), (False, True), (False, False)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has=avx512: has)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has=amx: has)
        assert bf16_products.needed() is not (avx512 or amx)
