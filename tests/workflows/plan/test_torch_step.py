"""Steps under PyTorch's own wrappings: bytes and seconds by hand, and what the command says of them."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from megatron_patch.workflows.cli import main
from megatron_patch.workflows.plan import methods, torch_step
from megatron_patch.workflows.plan.cluster import Cluster
from megatron_patch.workflows.plan.job import DDP, FSDP2, HYBRID, OPTIM_GRADS, Job
from megatron_patch.workflows.plan.methods import parse
from megatron_patch.workflows.plan.step import forward_seconds
from megatron_patch.workflows.plan.torch_step import added_bytes, simulate
from tests.workflows.plan.jobs import cluster, job

ROOT = Path(__file__).parents[3]
RECIPE = ["configs/models/llama2_7b.yaml", "megatron.global_batch_size=128", "--nodes", "4"]
ALONE = [f"megatron.{name}_model_parallel_size=1" for name in ("tensor", "pipeline")]


def wrapped(strategy: str, batch: int = 32) -> Job:
    return torch_step.planned_with(dataclasses.replace(job(batch), layers=4), strategy)


def quiet(nodes: int, per_node: int, bandwidth: float = 1e9) -> Cluster:
    """Without latencies, and with an optimizer that takes no time."""
    on = cluster(nodes, per_node, bandwidth, latency=0.0)
    return dataclasses.replace(on, processor=dataclasses.replace(on.processor, optimizer=0.0))


def numel(one: Job) -> int:
    return sum(parameter.numel for parameter in one.stages[0].parameters)


@pytest.mark.parametrize("strategy", [OPTIM_GRADS, FSDP2, HYBRID, DDP])
def test_without_communication_a_step_is_its_arithmetic(strategy: str) -> None:
    one, on = wrapped(strategy, batch=64), quiet(2, 8)
    assert one.microbatches(on.world) == 4
    arithmetic = 4 * 3 * forward_seconds(one, on, one.stages[0].operations)
    assert simulate(one, on, methods.FREE).seconds == pytest.approx(arithmetic)


def test_fsdp2_gathers_twice_and_reduces_once_a_microbatch() -> None:
    """The last unit of the forward pass, one of five, is not gathered again."""
    one, on = wrapped(FSDP2, batch=32), quiet(4, 4, bandwidth=1e6)
    found = simulate(one, on, parse("stock"))
    each = 2 * numel(one) * 15 / 16
    units = len(torch_step._units(one, one.group(on, False)))
    assert found.uplink_bytes == pytest.approx(2 * (3 - 1 / units) * each, rel=0.02)
    assert found.seconds == pytest.approx(found.uplink_bytes / 1e6, rel=0.05)
    low = simulate(one, on, parse("loco4_flat"))
    # With four ranks a node, each rank sends 4 bits of every element to each of 12 others.
    gradients = 2 * 4 * 12 / 16 * numel(one) / 2
    assert low.uplink_bytes == pytest.approx(2 * (2 - 1 / units) * each + gradients, rel=0.05)


def test_megatron_fsdp_reduces_every_microbatch_and_gathers_once_a_step() -> None:
    one, on = wrapped(OPTIM_GRADS, batch=64), quiet(16, 1, bandwidth=1e6)
    assert (one.microbatches(on.world), one.gradient_bytes) == (4, 4)
    sent = {name: simulate(one, on, parse(name)).uplink_bytes for name in ("stock", "loco4", "none_exact")}
    each = numel(one) * 15 / 16
    assert sent["stock"] == pytest.approx((4 * 4 + 2) * each, rel=0.01)
    assert sent["loco4"] == pytest.approx((4 * 0.5 + 2) * each, rel=0.03)
    exact = one.bits_of_weights / 8
    assert sent["none_exact"] == pytest.approx((4 * 4 + exact) * each, rel=0.01)
    units = sum(unit.elements for unit in torch_step._units(one, one.group(on, False)))
    assert added_bytes(one, on, parse("none_exact")) == 4 * units / 16


def test_between_replicas_only_the_last_microbatchs_shards_travel() -> None:
    one, on = wrapped(HYBRID, batch=64), quiet(4, 4, bandwidth=1e6)
    assert one.microbatches(on.world) == 4
    stock, low = (simulate(one, on, parse(name)) for name in ("stock", "loco4"))
    each = numel(one) * 3 / 4
    assert stock.uplink_bytes == pytest.approx(2 * 2 * each, rel=0.02)
    assert low.uplink_bytes == pytest.approx(2 * each / 2, rel=0.1)
    assert stock.seconds == pytest.approx(stock.uplink_bytes / 1e6, rel=0.05)
    inside = simulate(one, quiet(1, 16), parse("stock"))
    assert inside.uplink_bytes == 0


def test_ddp_is_one_all_reduce_a_step() -> None:
    one, on = wrapped(DDP, batch=32), quiet(16, 1, bandwidth=1e6)
    stock, low = (simulate(one, on, parse(name)) for name in ("stock", "loco4"))
    assert stock.uplink_bytes == pytest.approx(2 * 2 * 15 / 16 * numel(one), rel=0.01)
    assert stock.seconds / low.seconds == pytest.approx(4, rel=0.05)


def test_memory_has_the_errors_of_what_a_rank_sends() -> None:
    on = quiet(4, 4)
    whole = numel(wrapped(DDP))

    def errors(strategy: str, hops: str = "") -> float:
        one = wrapped(strategy)
        kept, none = (added_bytes(one, on, parse(f"{name}4{hops}")) for name in ("loco", "naive"))
        return (kept - none) / (1 + 2 / 128) / whole

    assert errors(FSDP2, "_flat") == pytest.approx(1, rel=1e-3)
    assert errors(FSDP2) == pytest.approx(1 / 4, rel=1e-3)
    assert errors(HYBRID) == errors(DDP) == pytest.approx(1 / 4 + 1 / 16, rel=1e-3), "an owner's, too"


def test_the_command_plans_a_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = HYBRID
    file = tmp_path / "plan.json"
    given = ["plan", *RECIPE, *ALONE, "--strategy", strategy, "--inter-gbit", "100", "--json", str(file)]
    assert main(given) == 0
    plan = json.loads(file.read_text(encoding="utf-8"))
    assert plan["strategy"] == strategy
    assert f"{strategy} over 32 ranks" in capsys.readouterr().out
    assert plan["options"].startswith("megatron_patch.attach(model, CompressionConfig(method=")
    assert all(one["speedup"] > 1.2 for one in plan["methods"][1:])


@pytest.mark.slow
def test_the_pages_table_is_what_the_command_says(tmp_path: Path) -> None:
    page = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if "--strategy" in line and line.startswith("| `llama")]
    assert len(rows) == 5
    file = tmp_path / "plan.json"
    for row in rows:
        command = row.split("`")[1]
        recipe, *rest = shlex.split(command)
        cells = []
        for gbit in ("25", "100", "400"):
            given = ["plan", f"configs/models/{recipe}", *rest, "--inter-gbit", gbit, "--json", str(file)]
            assert main(given) == 0
            plan = json.loads(file.read_text(encoding="utf-8"))
            by_name = {one["name"]: one for one in plan["methods"]}
            stock, low = by_name["stock"], by_name["loco4"]
            cells.append(
                f"{stock['step_seconds']:.2f} s, {low['step_seconds']:.2f} s ({low['speedup']:.2f} x)"
            )
        assert row == f"| `{command}` | {plan['microbatches']} | {' | '.join(cells)} |"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ([*RECIPE, "megatron.tensor_model_parallel_size=2"], "add megatron.tensor_model_parallel_size=1"),
        ([*RECIPE, *ALONE, "--methods", "loco4_exact"], "loco4_exact needs Megatron"),
        ([*RECIPE, *ALONE, "--methods", "loco4_flat"], "hops can be chosen with --strategy fsdp2 alone"),
        (
            [*RECIPE, *ALONE, "--methods", "onebit_adam", "--strategy", OPTIM_GRADS],
            "onebit_adam needs Megatron's DDP; leave it out with --strategy optim_grads",
        ),
    ],
)
def test_what_a_strategy_does_not_have_is_one_line(
    given: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--strategy", "hybrid", *given]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1
