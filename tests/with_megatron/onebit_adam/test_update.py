"""1-bit Adam's update, and what the warm-up's end waits for."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from seeds import seeded
from torch.overrides import TorchFunctionMode

from megatron_patch.megatron.onebit_adam import update, warm_up

SIZES = update.Sizes(lr=1e-3, weight_decay=0.1, eps=1e-8, momentum_bias=0.4, variance_bias=0.05, most=2.0)


def parameters() -> list[update.Tensors]:
    generator = torch.Generator().manual_seed(seeded(5))
    found = []
    for shape in ((70_000,), (3, 5), (0,), (1025,)):
        x, m, v, exp_avg = (torch.randn(shape, generator=generator) for _ in range(4))
        v = v.square() * 1e-4
        v[torch.rand(shape, generator=generator) < 0.1] = 0
        found.append((x, m, v, exp_avg))
    return found


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_parameters_move_as_the_formulas_say(weight_decay: float) -> None:
    before, after = parameters(), parameters()
    sizes = update.Sizes(**{**vars(SIZES), "weight_decay": weight_decay})
    held, clamped, without = update.held(before, sizes).tolist(), 0, 0
    update.update(after, sizes)
    for (x, m, v, _), (found, *_, exp_avg) in zip(before, after, strict=True):
        step = (m.double() / sizes.momentum_bias) / ((v.double() / sizes.variance_bias).sqrt() + sizes.eps)
        clamped += int(((step.abs() > sizes.most) & (v != 0)).sum())
        without += int((v == 0).sum())
        step = step.clamp(-sizes.most, sizes.most)
        step[v == 0] = 0
        wanted = x.double() * (1 - sizes.lr * weight_decay) - sizes.lr * step
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-7)
        assert torch.equal(exp_avg, m)
    assert held == pytest.approx([clamped, without], abs=2)  # one or two may be within rounding of the bound
    assert min(held) > 100


def test_batches_move_them_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    one, several = parameters(), parameters()
    update.update(one, SIZES)
    monkeypatch.setattr(update, "_AT_ONCE", 1000)
    update.update(several, SIZES)
    for found, wanted in zip(several, one, strict=True):
        assert all(map(torch.equal, found, wanted))
    update.update([], SIZES)


class Waits(TorchFunctionMode):
    """Counts what makes a CPU wait for its GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = {"cpu", "item", "tolist", "__float__", "__int__", "__bool__"}
        self.count += getattr(func, "__name__", "") in names
        return func(*args, **(kwargs or {}))


def waits_of(count: int) -> tuple[int, list[float]]:
    torch.manual_seed(1)
    states = [{"exp_avg_sq": torch.rand(10), "step": 3} for _ in range(count)]
    optimizer = SimpleNamespace(
        param_groups=[{"lr": 1.0, "params": [], "step": 3}], state=dict(enumerate(states))
    )
    part = SimpleNamespace(optimizer=optimizer, config=SimpleNamespace(adam_beta2=0.9))
    one = SimpleNamespace(size=lambda: 1)
    chunk: Any = SimpleNamespace(dp_cp_group=one, expt_dp_group=one, tp_group=one, pp_group=one)
    phase = warm_up.Phase(learning_rate=1.0)
    with Waits() as mode:
        warm_up.over(phase, 3, None, [part], warm_up.ModelRanks(chunk))
    total = math.fsum(float(state["exp_avg_sq"].double().sum()) for state in states)
    assert phase.norms == pytest.approx([total / (1 - 0.9**3)])
    return mode.count, phase.norms


def test_the_warm_up_waits_as_often_for_many_parameters() -> None:
    assert waits_of(0)[0] == waits_of(2)[0] == waits_of(50)[0] <= 2


@pytest.mark.parametrize("zeroed_at", [None, 0, 25])
def test_a_variance_that_was_zeroed_is_scaled_to_what_the_counter_says(zeroed_at: int | None) -> None:
    """Two tensors of one optimizer, of which one may lose its moments; the other's bits do not change."""
    one, other = (torch.zeros(7, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.Adam([one, other, torch.zeros(0, requires_grad=True)], betas=(0.9, 0.999))
    masses = warm_up.Masses([SimpleNamespace(optimizer=optimizer)])
    with Waits() as mode:
        for step in range(40):
            one.grad, other.grad = torch.full((7,), 2.0), torch.full((7,), 3.0)
            if step == zeroed_at:
                for name in ("exp_avg", "exp_avg_sq"):
                    optimizer.state.get(other, {}).get(name, torch.zeros(0)).zero_()
            waited = mode.count
            masses.begin_step()
            assert mode.count == waited or step == 0, "the counter is read once"
            optimizer.step()
            masses.end_step()
    before = optimizer.state[one]["exp_avg_sq"].clone(), optimizer.state[other]["exp_avg_sq"].clone()
    masses.make_equal(40)
    after = optimizer.state[one]["exp_avg_sq"], optimizer.state[other]["exp_avg_sq"]
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1]) == (zeroed_at != 25)
    assert after[1].tolist() == pytest.approx([9 * (1 - 0.999**40)] * 7, rel=1e-5)
