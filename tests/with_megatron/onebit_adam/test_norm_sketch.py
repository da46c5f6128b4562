"""The estimate of a mean gradient's norm: unbiased, as close as it says, and blind to how ranks differ."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from seeds import seeded

from megatron_patch.megatron.onebit_adam.norm_sketch import COLUMNS, STRETCH, NormSketch, fold, rows_of, signs


def estimate(pieces: list[torch.Tensor], seed: int) -> float:
    sketch = NormSketch(seed, torch.device("cpu"))
    for piece in pieces:
        sketch.add(piece, 1.0)
    return float(sketch._folded().double().square().sum())


def shapes(kind: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seeded(7))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    if kind == "noise":
        return [normal(300, 1000), normal(17), normal(5000)]
    if kind == "equal rows":  # of a hidden size: columns of the sketch must not be columns of these
        return [normal(1, 1024).expand(700, -1)]
    return [torch.cat([torch.zeros(299_999), torch.ones(1)]), torch.zeros(5)]  # one element


@pytest.mark.parametrize("kind", ["noise", "equal rows", "one element"])
def test_estimates_are_unbiased_and_as_close_as_it_says(kind: str) -> None:
    pieces = shapes(kind)
    exact = sum(float(piece.double().square().sum()) for piece in pieces)
    found = torch.tensor([estimate(pieces, seed) for seed in range(60)], dtype=torch.float64) / exact
    spread = math.sqrt(2 / COLUMNS)
    assert abs(found.mean() - 1) < 4 * spread / math.sqrt(60)
    assert found.std() < 1.5 * spread


def test_nan_and_inf_come_through() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        piece = torch.ones(5000)
        piece[4000] = bad
        assert not math.isfinite(estimate([piece], 0))


def test_the_gpu_s_kernel_folds_as_torch_does() -> None:
    """In Triton's interpreter: pieces of several lengths and dtypes in one launch for each dtype."""
    sketch_kernel = pytest.importorskip("megatron_patch.megatron.onebit_adam.sketch_kernel")
    generator = torch.Generator().manual_seed(seeded(3))
    sketch = NormSketch(3, torch.device("cpu"))
    for number, size in enumerate((STRETCH + 5000, 17, COLUMNS, 3 * COLUMNS + 1, 8000)):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        values = torch.randn(size + 1, generator=generator).to(dtype)[1:]  # addresses of any alignment
        sketch.add(values, 0.5 + number)
    table = signs(torch.device("cpu"))
    wanted = fold(sketch._pieces, table)
    found = sketch_kernel.fold(rows_of(sketch._pieces), table, COLUMNS)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    assert torch.equal(found, sketch_kernel.fold(rows_of(sketch._pieces), table, COLUMNS))
    assert not sketch_kernel.fold({}, table, COLUMNS).any()


def norm_of_mean(dtype: torch.dtype, count: int) -> tuple[float, float]:
    """In a worker: estimate and own norm of a gradient that is 1 everywhere and noise of 3 on every rank."""
    generator = torch.Generator().manual_seed(seeded(dist.get_rank()))
    own = (1 + 3 * torch.randn(count, generator=generator)).to(dtype)
    sketch = NormSketch(5, torch.device("cpu"))
    sketch.add(own * 2, 0.5)
    return float(sketch.squared_norm_of_mean(dist.group.WORLD)), float(own.double().square().sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_that_differs_between_ranks_counts_as_in_the_mean(pool: Any, dtype: torch.dtype) -> None:
    count, ranks = 200_000, 4
    found = pool.run(norm_of_mean, dtype, count, world_size=ranks)
    assert len({squared for squared, _ in found}) == 1
    assert found[0][0] == pytest.approx((1 + 9 / ranks) * count, rel=0.15)
    assert found[0][1] == pytest.approx(10 * count, rel=0.05)
