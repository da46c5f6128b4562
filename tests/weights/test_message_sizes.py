"""How long messages are, of a small language model's weights after a step."""

from __future__ import annotations

import pytest
import torch
from seeds import seeded
from simulation import weight_coder as by_hand
from weights.recorded_weights import recorded
from weights.weight_coders import CODERS, coded, decoded

from megatron_patch.weights import code

FASTEST = [name for name in CODERS if not name.startswith("triton")][-1]
THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(
    "rate", [1e-6, pytest.param(1e-5, marks=THOROUGH), pytest.param(3e-4, marks=THOROUGH)]
)
def test_messages_are_hardly_longer_than_the_entropy(rate):
    """The entropy is that of d among weights of one exponent; the whole model's message is longer by 5 %.

    Shards of 50,000 weights have more tables and states for their size: that at the beginning of the model's
    middle third is longer by 12 % at most, none by 20 %.
    """
    old, new = recorded(rate)
    third = len(old) // 3
    for low, high, most in (
        (0, len(old), 1.05),
        (third, third + 50_000, 1.12),
        *((low, low + 50_000, 1.2) for low in range(0, len(old) - 50_000, 50_000)),
    ):
        x, y = old[low:high], new[low:high]
        message = coded(FASTEST, x, y)
        assert message[0] == code.CODED
        assert 1 < 8 * message.numel() / by_hand.entropy(x.numpy(), y.numpy(), False) <= most, (low, high)
        assert decoded(FASTEST, message, x).equal(y)


@pytest.mark.parametrize(("moved", "most"), [(2e-7, 1.1), pytest.param(1e-6, 1.04, marks=THOROUGH)])
@pytest.mark.parametrize("numel", [1 << 20, pytest.param(1 << 21, marks=THOROUGH)])
def test_tiny_moves_cost_little_more_than_their_entropy(moved: float, most: float, numel: int) -> None:
    generator = torch.Generator().manual_seed(seeded(0))
    weights = 0.02 * torch.randn(numel, generator=generator)
    after = weights + moved * torch.randn(numel, generator=generator)
    x, y = (values.bfloat16().view(torch.int16) for values in (weights, after))
    assert 1 < 8 * coded(FASTEST, x, y).numel() / by_hand.entropy(x.numpy(), y.numpy(), False) <= most
