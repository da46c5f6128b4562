"""Megatron's own engine on CPU, with and without compression: what a run shows, and that `none` is stock."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from workflows.engine_runs import RANKS, RUNS, STEPS, engine


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of all runs of engine_runs.py."""
    return engine(tmp_path_factory.mktemp("engine"))


def events(folder: Path) -> Any:
    """What Megatron itself wrote to TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def losses(folder: Path) -> list[float]:
    """The fp32 training losses and the norms of the gradients."""
    assert set((folder / "exit").read_text().split()) == {"0"}, (folder / "rank-0.log").read_text()[-3000:]
    found = events(folder)
    values = [event.value for event in found.Scalars("lm loss")]
    assert len(values) >= STEPS
    return values + [event.value for event in found.Scalars("grad-norm")]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("kind", ["bf16", "experts", "parallel"])
def test_method_none_is_bit_identical_to_megatron_without_megatron_patch(runs: Path, kind: str) -> None:
    assert losses(runs / f"none-{kind}") == losses(runs / f"stock-{kind}")


def test_unattached_and_not_yet_started_are_stock_too(runs: Path) -> None:
    stock = losses(runs / "stock")
    assert losses(runs / "unattached") == stock
    assert losses(runs / "loco-late") == stock


@pytest.mark.parametrize(("run", "bits"), [("none-bf16", "32.00"), ("loco", "4.3"), ("unattached", "32.00")])
def test_an_untouched_script_says_what_it_sends_and_how_long_it_waits(
    runs: Path, run: str, bits: str
) -> None:
    """A line after each one of Megatron's, and one at the end; a step's waits are read in the next one."""
    log = (runs / run / f"rank-{RANKS - 1}.log").read_text()
    assert not re.search(r"megatron-loco: step \d", (runs / run / "rank-0.log").read_text())
    said = re.findall(r"megatron-loco: step (\d+): (.*)", log)
    assert [int(step) for step, _ in said] == list(range(1, STEPS + 1))
    (whole,) = re.findall(rf"megatron-loco: the run's {STEPS} logged steps: (.*)", log)
    sent = rf"{bits}\d* bits a gradient, (16|32).00 bits a weight, 0 MB between nodes and 0.\d+ MB inside"
    for step, line in [*said, ("all", whole)]:
        assert re.match(sent, line), line
        assert ("waited" in line) == (step != "1" and run != "unattached"), line
    waited = [json.loads(line)["wait_seconds"] for line in (runs / run / "metrics.jsonl").open()]
    if run == "unattached":
        assert waited == [None] * STEPS
    else:
        steps = [json.loads(line)["step_seconds"] for line in (runs / run / "metrics.jsonl").open()]
        assert all(0 < wait < step for wait, step in zip(waited[1:], steps[:-1], strict=True))


def test_loco_is_not_stock_but_close(runs: Path) -> None:
    stock, loco = losses(runs / "stock"), losses(runs / "loco")
    assert loco != stock
    assert loco[0] == stock[0]  # before the first exchange
    assert loco[:STEPS] == pytest.approx(stock[:STEPS], rel=0.02)


def test_a_flag_imports_a_codec_for_an_untouched_script(runs: Path) -> None:
    assert 8.125 < summary(runs / "own-codec")["gradient_wire"]["bits_per_element"] <= 8.6
    assert losses(runs / "own-codec")[:STEPS] == pytest.approx(losses(runs / "stock")[:STEPS], rel=0.01)


@pytest.mark.parametrize("kind", ["experts", "parallel"])
def test_loco_stays_close_with_expert_tensor_and_pipeline_parallelism(runs: Path, kind: str) -> None:
    stock, loco = losses(runs / f"stock-{kind}"), losses(runs / f"loco-{kind}")
    assert loco != stock
    assert loco[0] == stock[0]
    assert loco[:STEPS] == pytest.approx(stock[:STEPS], rel=0.02)
    found, uncompressed = summary(runs / f"loco-{kind}"), summary(runs / f"none-{kind}")
    assert found["world_size"] == RUNS[f"loco-{kind}"].ranks
    assert found["steps"] == STEPS
    assert found["valid_loss"] == pytest.approx(uncompressed["valid_loss"], rel=0.02)
    assert uncompressed["gradient_wire"]["bits_per_element"] == 32
    # Each element once in 4 bits and its share of a scale: expert parameters and every stage's too. Norms, in
    # fp32, and ends of shards within blocks are much of so small a model.
    assert 4.125 < found["gradient_wire"]["bits_per_element"] <= 4.5
    assert found["weight_wire"] == uncompressed["weight_wire"]


def test_metrics_and_summary_have_what_the_design_lists(runs: Path) -> None:
    lines = [json.loads(line) for line in (runs / "loco" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert line["loss"] > 0
        assert line["grad_norm"] > 0
        assert line["step_seconds"] > 0
        assert line["tokens_per_second"] == pytest.approx(8 * 32 / line["step_seconds"])
        assert 15 < line["compression_snr_db"] < 25  # 4 bits, near-normal gradients: about 18 dB
        assert line["gradient_wire_bytes"] > 0
        assert 0 < line["compression_seconds"] < line["step_seconds"]
        assert line["weight_wire_bytes"] > 0
    assert lines[0]["compensation_norm_ratio"] == 0
    assert 0 < lines[1]["compensation_norm_ratio"] < 0.3

    found = summary(runs / "loco")
    assert (found["method"], found["bits"], found["world_size"], found["steps"]) == ("loco", 4, RANKS, STEPS)
    assert found["train_loss"] == lines[-1]["loss"]
    assert found["valid_loss"] > 0
    assert 4.125 < found["gradient_wire"]["bits_per_element"] <= 4.4
    assert found["weight_wire"]["bits_per_element"] == 32
    assert 0 < found["compression_seconds_per_step"] < found["step_seconds"]["median"]
    elements = found["weight_wire"]["bytes_per_step"] / 4 * RANKS / (RANKS - 1)
    # A scale for each block: some more than a 64th, where shards end within them.
    assert found["compensation_bytes"] == pytest.approx(elements * (1 + 1 / 64), rel=0.02)
    assert found["versions"]["megatron-core"]
    assert found["events"]["steps"] == STEPS
    assert {
        "compression/compression_snr_db",
        "compression/gradient_wire_bytes",
        "mem-reserved-bytes",  # of the CPU's stand-ins: 0
    } <= set(events(runs / "loco").Tags()["scalars"])


def test_what_is_not_compressed_is_counted_as_it_is(runs: Path) -> None:
    for name in ("none-experts", "unattached", "loco-late"):
        assert summary(runs / name)["gradient_wire"]["bits_per_element"] == 32
    assert summary(runs / "none-bf16")["compensation_bytes"] == 0
    assert summary(runs / "unattached")["method"] == "stock"
    assert summary(runs / "none-bf16")["weight_wire"]["bits_per_element"] == 16


def test_what_compression_cannot_serve_is_one_line_in_an_untouched_script_too(runs: Path) -> None:
    assert (runs / "refused" / "exit").read_text() == "2 2"
    told = [line for line in (runs / "refused" / "rank-0.log").read_text().splitlines() if "error:" in line]
    assert len(told) == 1
    assert told[0].startswith("megatron-loco: error: megatron.optimizer: 'lion'")
    assert (runs / "raises" / "exit").read_text() == "2 2", "a flag that Megatron refuses ends every rank"
