"""The training that benchmarks run: every exchange trains one model, and the repairs change no number."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worker_pool import WorkerPool

from benchmarks.network import collectives
from benchmarks.network.gloo_fixes import _receiving_first
from benchmarks.network.llama import Llama
from benchmarks.network.methods import parse
from megatron_patch import CompressionConfig

SHAPE = {"layers": 1, "hidden": 32, "ffn": 64, "heads": 2, "vocabulary": 128, "sequence": 8}


def exchanged() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What gloo's all-to-all gives on this rank, and what the one that receives first gives."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for dtype in (torch.uint8, torch.bfloat16):
        sent = (torch.arange(ranks * 5) + 100 * rank).to(dtype)
        expected, at_once, awaited = (torch.empty_like(sent) for _ in range(3))
        dist.all_to_all_single(expected, sent)
        _receiving_first(dist.all_to_all_single)(at_once, sent)
        _receiving_first(dist.all_to_all_single)(awaited, sent, async_op=True).wait()
        found += [(expected, at_once), (expected, awaited)]
    return found


def test_receiving_first_gives_what_gloo_gives(pool: Any) -> None:
    for pairs in pool.run(exchanged, world_size=3):
        assert all(torch.equal(expected, found) for expected, found in pairs)


def onebit(**options: Any) -> Any:
    return CompressionConfig(method="onebit_adam", **options)


ONEBIT = {
    "onebit_warmup": onebit(warmup_steps=1000),
    "onebit": onebit(warmup_steps=1, topology="flat"),
    "onebit_two_hop": onebit(warmup_steps=1, topology="two_hop", ranks_per_node=2),
}


def trained(method: str, overlap: bool) -> dict[str, Any]:
    """Two steps, after a model whose exchange must not leave a trace on the next."""
    from megatron.core.distributed import param_and_grad_buffer

    from benchmarks.network import ddp_training, megatron_training
    from benchmarks.network.training import Training, initialize

    compressions = ONEBIT | {
        "loco": CompressionConfig(bits=8, start_step=0),
        "loco_exact": CompressionConfig(bits=8, start_step=0, weight_gather="exact"),
        "none_exact": CompressionConfig(method="none", weight_gather="exact"),
    }
    initialize()
    llama = Llama(**SHAPE)
    megatron_training.MegatronTraining(llama, fp32_accumulation=True).close()
    training: Training
    if method.startswith("ddp"):
        training = ddp_training.DdpTraining(
            llama, powersgd_rank=2 if method == "ddp_powersgd" else None, learning_rate=1e-4, overlap=overlap
        )
    else:
        training = megatron_training.MegatronTraining(
            llama,
            gradients="fp32" if method == "fp32" else "bf16",
            fp32_accumulation=method in ("alltoall", "none_exact"),
            replicated=method in ("allreduce", *ONEBIT),
            compression=compressions.get(method),
            learning_rate=1e-4,
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
        "weight_bits": [8 * lap.weight_bytes / training.weights_sent for lap in laps if lap.weight_bytes],
        "reduce_scatter": reduce_scatter,
    }
    training.close()
    return found


@pytest.fixture(scope="module")
def cell(pool: Any) -> Callable[..., list[dict[str, Any]]]:
    """cell(method, overlap, ranks): what the ranks of a training have, which is made once."""
    return functools.cache(
        lambda method, overlap, ranks=2: pool.run(trained, method, overlap, world_size=ranks)
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_every_exchange_trains_the_same_model(cell: Any, overlap: bool) -> None:
    stock = cell("bf16", overlap)
    elements, expected = stock[0]["parameters"]
    assert elements == expected
    assert stock[0]["reduce_scatter"] != "reduce_scatter_with_fp32_accumulation"
    for method in ("fp32", "alltoall", "allreduce", "loco", "ddp_bf16", "ddp_powersgd"):
        ranks = cell(method, overlap)
        assert torch.equal(ranks[0]["weights"], ranks[1]["weights"]), method
        # Adam's first steps are of the learning rate's size, 1e-4, whatever the gradient; bf16 rounds.
        assert (ranks[0]["weights"] - stock[0]["weights"]).abs().max() < 1.5e-3, method
        lap = ranks[0]["lap"]
        assert lap.step > lap.exchange + lap.gather, method
        if not overlap:
            assert lap.exchange > 0, method
        # An all-reduce sends twice; at 4 bits every row of 32 has a scale, and vectors have 32 bits.
        width = {"fp32": 4, "allreduce": 4, "loco": 1.1, "ddp_bf16": 4}.get(method, 2) / 2
        if method != "ddp_powersgd":
            assert ranks[0]["gradient_bytes"] == pytest.approx(width * elements, rel=0.03), method
        assert (ranks[0]["weight_bytes"] > 0) == (not method.startswith(("ddp", "allreduce"))), method
    warming_up, replicated = cell("onebit_warmup", overlap)[0], cell("allreduce", overlap)[0]
    assert torch.equal(replicated["weights"], warming_up["weights"])
    assert replicated["gradient_bytes"] == warming_up["gradient_bytes"]


def trained_apart() -> list[float]:
    """Bytes of gradients that a rank sends in each of four steps, with an outer step in every other."""
    from benchmarks.network import megatron_training
    from benchmarks.network.training import initialize

    initialize()  # As for the cell before; the next line makes other groups.
    compression = CompressionConfig(method="none", weight_gather="exact", outer_interval=2)
    training = megatron_training.MegatronTraining(Llama(**SHAPE), compression=compression, instances=2)
    sent = [training.step(1).gradient_bytes for _ in range(4)]
    training.close()
    initialize()
    return sent


def test_hosts_that_make_outer_steps_send_in_those_steps_alone(pool: Any) -> None:
    for sent in pool.run(trained_apart, world_size=2):
        assert sent[0::2] == [0, 0]
        assert sent[1] == sent[3] > 0


def trained_by_torch(method: str) -> dict[str, Any]:
    """Three steps of two microbatches under FSDP2, DDP or Megatron-FSDP."""
    from benchmarks.network.ddp_training import DdpTraining
    from benchmarks.network.fsdp2_training import Fsdp2Training
    from benchmarks.network.megatron_fsdp_training import MegatronFsdpTraining
    from benchmarks.network.training import Training, initialize

    initialize()
    chosen, llama = parse(method), Llama(**SHAPE)
    compression = chosen.compression(2)
    training: Training
    if chosen.kind == "ddp":
        training = DdpTraining(llama, compression=compression, learning_rate=1e-4)
    elif chosen.kind == "mfsdp":
        assert compression is not None
        training = MegatronFsdpTraining(llama, compression=compression, learning_rate=1e-4)
    else:
        assert compression is not None
        shards = 2 if chosen.kind == "hsdp" else dist.get_world_size()
        training = Fsdp2Training(llama, shards=shards, compression=compression, learning_rate=1e-4)
    laps = [training.step(2) for _ in range(3)]
    found = {"lap": laps[-1], "bytes": training.gradient_bytes, "parameters": llama.parameters}
    fsdp = getattr(
        training.model.module, "raw_param", None
    )  # Megatron's: its parameters are shards between steps
    weights = [p.detach() for p in (training.model.parameters() if fsdp is None else fsdp.values())]
    whole = [w.full_tensor() if hasattr(w, "full_tensor") else w for w in weights]
    found["weights"] = torch.cat([w.float().flatten() for w in whole])
    training.close()
    return found


@pytest.mark.parametrize(
    ("stock", "loco", "width", "low"),
    [
        ("ddp_bf16", "ddp_loco4", 2 * 3 / 4 * 2, 2 * 3 / 4 * 0.6),
        ("fsdp2_bf16", "fsdp2_loco4", 3 / 4 * 2, 3 / 4 * 0.6),
        ("hsdp_bf16", "hsdp_loco4", 2 / 2 * 2 / 2, 0.6 / 2),
        ("mfsdp_bf16", "mfsdp_loco4_exact", 2 * 3 / 4 * 2, 2 * 3 / 4 * 0.6),
    ],
)
def test_pytorch_s_own_exchanges_and_loco_s(
    pool: Any, stock: str, loco: str, width: float, low: float
) -> None:
    reports = {method: pool.run(trained_by_torch, method, world_size=4) for method in (stock, loco)}
    for method, ranks in reports.items():
        assert all(torch.equal(rank["weights"], ranks[0]["weights"]) for rank in ranks), method
        assert ranks[0]["lap"].step > 0
    first, second = reports[stock][0], reports[loco][0]
    assert (first["weights"] - second["weights"]).abs().max() < 1.5e-3
    assert first["bytes"] == pytest.approx(width * first["parameters"], rel=0.03)
    assert second["bytes"] == pytest.approx(low * first["parameters"], rel=0.3)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_exact_gather_is_timed_and_its_bytes_are_those_that_were_sent(cell: Any, overlap: bool) -> None:
    for stock_method, method in (("alltoall", "none_exact"), ("loco", "loco_exact")):
        stock, exact = cell(stock_method, overlap)[0], cell(method, overlap)[0]
        assert torch.equal(exact["weights"], stock["weights"]), method
        assert exact["reduce_scatter"] == stock["reduce_scatter"], method
        assert exact["gradient_bytes"] == stock["gradient_bytes"], method
        assert stock["weight_bits"] == [16, 16]
        assert len(exact["weight_bits"]) == 2
        assert all(0 < bits < 15 for bits in exact["weight_bits"]), exact["weight_bits"]
        assert exact["weight_bytes"] == exact["lap"].weight_bytes < stock["weight_bytes"]
        assert exact["lap"].gather > 0


def slowly_gathered(exact: bool) -> Any:
    """The lap of a step in which the weights' gather, or what precedes the exact one, takes a second."""
    from megatron.core.distributed import param_and_grad_buffer

    from benchmarks.network import megatron_training
    from benchmarks.network.training import initialize
    from megatron_patch.megatron.seams import weights

    initialize()
    compression = CompressionConfig(method="none", weight_gather="exact") if exact else None
    training = megatron_training.MegatronTraining(Llama(**SHAPE), compression=compression, buckets=1)
    training.step(1)
    module: Any = weights if exact else param_and_grad_buffer
    name = "agree" if exact else "dist_all_gather_func"
    usual = getattr(module, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(1)
        return usual(*args, **kwargs)

    setattr(module, name, slow)
    try:
        lap = training.step(1)
    finally:
        setattr(module, name, usual)
        training.close()
    return lap


@pytest.mark.parametrize("exact", [False, True])
def test_the_stopwatch_of_the_gather_has_all_of_it(pool: Any, exact: bool) -> None:
    for lap in pool.run(slowly_gathered, exact, world_size=2):
        assert 1 < lap.gather < lap.step
        assert lap.exchange < 1


@pytest.mark.parametrize(("method", "crossing"), [("onebit", 3 / 4), ("onebit_two_hop", 1 / 4)])
def test_onebit_adam_s_momentum_is_exchanged_in_the_optimizer_s_step(
    cell: Any, method: str, crossing: float
) -> None:
    """`crossing`: the part of a bucket that each rank sends, each way, to ranks of other nodes or to all."""
    stock, ranks = cell("allreduce", False, 4), cell(method, False, 4)
    for rank in ranks[1:]:
        assert torch.equal(rank["weights"], ranks[0]["weights"])
    # Its second step is the first in 1 bit, with a variance that one step made: rough, but of Adam's size.
    apart = (ranks[0]["weights"] - stock[0]["weights"]).abs()
    assert 0 < apart.mean() < 1e-3
    elements, _ = ranks[0]["parameters"]
    expected = 2 * crossing * elements * 1.5 / 8  # every row of 32 has a scale
    assert 1 <= ranks[0]["gradient_bytes"] / expected < 1.15  # shards of so small a model end in part blocks
    assert ranks[0]["weight_bytes"] == 0
    assert 0 < ranks[0]["lap"].exchange < ranks[0]["lap"].step


def poisoned() -> str:
    from benchmarks.network import megatron_training
    from benchmarks.network.training import initialize

    initialize()
    training = megatron_training.MegatronTraining(
        Llama(**SHAPE), replicated=True, compression=onebit(warmup_steps=1)
    )
    training.step(1)
    with torch.no_grad():
        next(training.model.parameters()).fill_(torch.nan)
    try:
        with pytest.raises(RuntimeError) as caught:
            training.step(1)
    finally:
        training.close()
    return str(caught.value)


def test_a_skipped_step_is_not_measured_as_one_without_bytes(pool: Any) -> None:
    for said in pool.run(poisoned, world_size=2):
        assert "the optimizer skipped a step" in said


def curves(local: int) -> list[dict[str, Any]]:
    """In a worker: the curves up to 16 KiB."""
    return collectives.measure(local, 1 << 14)


def test_groups_of_two_hosts_share_the_uplink(pool: WorkerPool) -> None:
    """Four ranks as two hosts of two: all, inside and between; and as four hosts of one."""
    measured, *others = pool.run(curves, 2, world_size=4)
    assert all(other == measured for other in others)
    assert {(one["scope"], one["ranks"]) for one in measured} == {("all", 4), ("inside", 2), ("between", 2)}
    assert {one["collective"] for one in measured} == {"all_to_all", "reduce_scatter", "all_gather"}
    assert all(one["seconds"] > 0 for one in measured)
    sent = [one["bytes"] for one in measured if (one["scope"], one["collective"]) == ("all", "all_to_all")]
    assert sent == [3072, 12288]
    assert {one["scope"] for one in pool.run(curves, 1, world_size=4)[0]} == {"all"}
