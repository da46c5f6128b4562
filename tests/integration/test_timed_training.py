"""The training that benchmarks run: every exchange trains one model, and the repairs change no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

SHAPE = {"layers": 1, "hidden": 32, "ffn": 64, "heads": 2, "vocabulary": 128, "sequence": 8}


def exchanged(dtype: torch.dtype, async_op: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What gloo's all-to-all gives on this rank, and what the one that receives first gives."""
    import torch.distributed as dist

    from megatron_patch.integration.cpu_measuring import _receiving_first

    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent = (torch.arange(ranks * 5) + 100 * rank).to(dtype)
    expected, found = torch.empty_like(sent), torch.empty_like(sent)
    dist.all_to_all_single(expected, sent)
    handle = _receiving_first(dist.all_to_all_single)(found, sent, async_op=async_op)
    if async_op:
        handle.wait()
    return expected, found


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_receiving_first_gives_what_gloo_gives(pool: Any, dtype: torch.dtype, async_op: bool) -> None:
    for expected, found in pool.run(exchanged, dtype, async_op, world_size=3):
        assert torch.equal(expected, found)


def test_products_in_fp32_are_those_of_bf16_rounded_once():
    from megatron_patch.integration.cpu_measuring import _product, _product_out

    left, right = torch.randn(3, 5, 7).bfloat16(), torch.randn(3, 7, 4).bfloat16()
    exact = left.double() @ right.double()
    found = _product(left, right)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), exact, rtol=2**-8, atol=1e-5)
    assert torch.equal(_product(left[0], right[0]), found[0])
    out = torch.empty(3, 5, 4, dtype=torch.bfloat16)
    assert torch.equal(_product_out(left, right, out=out), found)


def trained(method: str, overlap: bool) -> dict[str, Any]:
    """Two steps, after a model whose exchange must not leave a trace on the next."""
    from megatron.core.distributed import param_and_grad_buffer

    from megatron_patch import CompressionConfig
    from megatron_patch.integration import timed_ddp, timed_training

    timed_training.initialize()
    llama = timed_training.Llama(**SHAPE)
    timed_training.MegatronTraining(llama, fp32_accumulation=True).close()
    training: timed_training.Training
    if method.startswith("ddp"):
        training = timed_ddp.DdpTraining(
            llama, powersgd_rank=2 if method == "ddp_powersgd" else None, overlap=overlap
        )
    else:
        training = timed_training.MegatronTraining(
            llama,
            gradients="fp32" if method == "fp32" else "bf16",
            fp32_accumulation=method == "alltoall",
            compression=CompressionConfig(bits=8) if method == "loco" else None,
            buckets=3,
            overlap=overlap,
        )
    reduce_scatter = param_and_grad_buffer.dist_reduce_scatter_func.__name__
    laps = [training.step(2) for _ in range(2)]
    weights = torch.cat([parameter.detach().float().flatten() for parameter in training.model.parameters()])
    found = {
        "weights": weights,
        "parameters": (weights.numel(), llama.parameters),
        "lap": laps[-1],
        "gradient_bytes": training.gradient_bytes,
        "weight_bytes": training.weight_bytes,
        "reduce_scatter": reduce_scatter,
    }
    training.close()
    return found


@pytest.mark.parametrize("overlap", [False, True])
def test_every_exchange_trains_the_same_model(pool: Any, overlap: bool) -> None:
    stock = pool.run(trained, "bf16", overlap, world_size=2)
    elements, expected = stock[0]["parameters"]
    assert elements == expected
    assert stock[0]["reduce_scatter"] != "reduce_scatter_with_fp32_accumulation"
    for method in ("fp32", "alltoall", "loco", "ddp_bf16", "ddp_powersgd"):
        ranks = pool.run(trained, method, overlap, world_size=2)
        assert torch.equal(ranks[0]["weights"], ranks[1]["weights"]), method
        # Adam's first steps are of the learning rate's size, 1e-4, whatever the gradient; bf16 rounds.
        assert (ranks[0]["weights"] - stock[0]["weights"]).abs().max() < 1.5e-3, method
        lap = ranks[0]["lap"]
        assert lap.step > lap.exchange + lap.gather, method
        if not overlap:
            assert lap.exchange > 0, method
        width = {"fp32": 4, "loco": 1.02, "ddp_bf16": 4}.get(method, 2) / 2  # an all-reduce sends twice
        if method != "ddp_powersgd":
            assert ranks[0]["gradient_bytes"] == pytest.approx(width * elements, rel=0.03), method
        assert (ranks[0]["weight_bytes"] > 0) == (not method.startswith("ddp")), method
