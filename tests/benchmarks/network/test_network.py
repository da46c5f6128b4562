"""`python -m benchmarks.network`: methods, rows, limits, mistakes; and the real thing where root is there."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command_line import main
from benchmarks.network import command as network
from benchmarks.network import hosts, methods, results
from benchmarks.network.command import ALL_METHODS, measure, plan
from benchmarks.network.plan import Plan
from benchmarks.network.results import Cell
from megatron_patch.errors import UserError


def planned(*flags: str) -> Plan:
    parser = argparse.ArgumentParser()
    network.add_arguments(parser)
    return plan(parser.parse_args(flags))


def test_what_a_name_measures():
    parsed = {name: methods.parse(name) for name in ALL_METHODS}
    assert [method.name for method in parsed.values()] == list(ALL_METHODS)
    # The honest baseline, and its exact gather: Megatron's all-to-all with a sum in fp32.
    base, none_exact, loco = (parsed[name] for name in ("bf16_alltoall", "none_exact", "loco4"))
    outer = methods.parse("outer10_none_exact")
    assert [one.fp32_accumulation for one in (base, none_exact, loco, outer)] == [True, True, False, False]
    assert base.compression(1) is None
    options = none_exact.compression(1)
    assert (options.method, options.weight_gather) == ("none", "exact")
    exact = parsed["loco4_exact"].compression(4)
    assert dataclasses.replace(exact, weight_gather="stock") == loco.compression(4)
    # 1-bit Adam in either phase, beside an all-reduce: all ranks hold the whole optimizer.
    compressed, warming_up, two_hop = map(
        methods.parse, ("onebit_adam", "onebit_adam_warmup", "onebit_adam_two_hop")
    )
    assert all(method.replicated for method in (parsed["bf16_allreduce"], compressed, warming_up, two_hop))
    assert compressed.compression(1, settle=30).warmup_steps == 29
    assert warming_up.compression(1).warmup_steps > 10**6
    options = two_hop.compression(4)
    assert (options.topology, options.ranks_per_node, options.bits) == ("two_hop", 4, 1)
    options = methods.parse("outer30d10_error_feedback4_exact").compression(2)
    assert (options.outer_interval, options.outer_delay, options.bits) == (30, 10, 4)


def test_the_baseline_is_measured_first_and_weights_settle_before():
    flags = ("--methods", "loco4,ddp_bf16,bf16_alltoall", "--rates", "100,unshaped", "--settle", "20")
    chosen = planned(*flags)
    assert [method.name for method in chosen.methods] == ["bf16_alltoall", "loco4", "ddp_bf16"]
    assert [(c.method.name, c.accumulation, c.rate_mbit) for c in chosen.cells[:3]] == [
        ("bf16_alltoall", 1, 100.0),
        ("bf16_alltoall", 1, None),
        ("loco4", 1, 100.0),
    ]
    assert len(chosen.cells) == 3 * 2 * 2
    assert [method.settle(20) for method in chosen.methods] == [20, 20, methods.FIRST_STEPS]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--hosts", "3"], ["--hosts", "3"]),
        (["--methods", "locco4"], ["--methods", "locco4", "did you mean loco4?"]),
        (["--methods", "loco4,loco4"], ["--methods", "different"]),
        (["--methods", "onebit_adam_exact"], ["--methods", "onebit_adam_exact", "no weight gather"]),
        (["--methods", "outer8d8_loco4"], ["must be outerH_METHOD or outerHdD_METHOD"]),
        (["--rates", "fast"], ["--rates", "'fast'", "unshaped"]),
        (["--accumulation", "0"], ["--accumulation", "'0'", "1 to 1024"]),
        (["--settle", "2"], ["--settle", "2", "3 or more"]),
        ([], ["needs root", "--privileged"]),
    ],
)
def test_a_mistake_is_one_line(
    flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(network, flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-loco: error: ")
    assert all(word in line for word in words), line


def answer(step: float, exchange: float, sent: int = 0, weight_bits: float | None = 16.0) -> dict[str, Any]:
    laps = [[step + late, exchange, 0.1] for late in (0.0, 0.0, 9.0)]  # one step was disturbed
    return {
        "laps": laps,
        "sent": sent,
        "received": 3_000_000,
        "loopback": 30,
        "exchange_sent": sent // 2,
        "exchange_received": 1_500_000,
        "gradient_bytes": 5.0,
        "weight_bytes": 7.0,
        "weight_bits": weight_bits,
    }


def row_of(name: str, rate: float | None, step: float, exchange: float, sent: int = 0) -> dict[str, Any]:
    """Of two ranks, the second of which computes less, exchanges longer and sends."""
    ranks = [answer(step, exchange / 2), answer(step - 0.1, exchange, sent)]
    prepared = [{"unshaped_step_seconds": [0.4, 0.4], "weight_bits_first_steps": None}] * 2
    return results.row(Cell(methods.parse(name), 1, rate), 2, 1, prepared, ranks)


def test_a_row_is_over_all_passes():
    measured = [
        [answer(1.0, 0.1, sent=6_000_000, weight_bits=3.0)],
        [answer(2.0, 0.2, sent=9_000_000, weight_bits=4.0) | {"weight_bytes": 9.0}],
    ]
    prepared = [
        [{"unshaped_step_seconds": [step, step], "weight_bits_first_steps": bits}]
        for step, bits in ((0.4, [9.0, 7.0]), (0.6, [8.0, 7.5]))
    ]
    cell = Cell(methods.parse("loco4_exact"), 1, 8.0)
    row = results.row(cell, 2, 1, results.pooled(prepared), results.pooled(measured))
    assert row["step_seconds"] == 2.0  # of 1, 1, 10, 2, 2 and 11
    assert row["interface_bytes"] == (6_000_000 + 9_000_000) / 6
    assert (row["weight_bytes"], row["weight_bits"]) == (8.0, 3.5)
    assert row["weight_bits_first_steps"] == [9.0, 7.0]
    assert row["unshaped_step_seconds"] == pytest.approx(0.5)
    # A cell of outer steps is the mean over whole intervals, of the slowest rank's.
    laps = [[1.0, 1.0, 10.0], [2.0, 1.0, 1.0]]
    assert (results.slowest_median(laps), results.slowest_mean(laps)) == (2, 4)


def test_all_cells_are_measured_in_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    step = itertools.count(1)

    class Faked(contextlib.AbstractContextManager[Any]):
        def __init__(self, *_: Any) -> None: ...

        def __exit__(self, *_: object) -> None: ...

        def shape(self, rate: float | None) -> None:
            asked.append(rate)

        def ask(self, **order: Any) -> list[dict[str, Any]]:
            if order["do"] == "measure":
                return [answer(float(next(step)), 0.5)]
            asked.append(order["method"])
            return [{"unshaped_step_seconds": [0.4], "weight_bits_first_steps": None}]

    monkeypatch.setattr(hosts, "Network", Faked)
    monkeypatch.setattr("benchmarks.network.ranks.Ranks", Faked)
    flags = ["--methods", "bf16_alltoall,loco4", "--rates", "100,unshaped", "--accumulation", "1"]
    cells = planned(*flags, "--passes", "2").cells
    assert cells == 2 * cells[: len(cells) // 2]
    rows, _ = measure(planned(*flags, "--passes", "3"), 1.0)
    one_pass = [None, "bf16_alltoall", 100, None, None, "loco4", 100, None]
    assert asked == [*one_pass * 3, None]
    # Laps of 1, 1 and 10 s, of 5, 5 and 14, of 9, 9 and 18; one second more for every other cell.
    found = {(row["name"], row["rate_mbit"]): row["step_seconds"] for row in rows}
    assert found == {
        ("bf16_alltoall", 100): 9,
        ("bf16_alltoall", None): 10,
        ("loco4", 100): 11,
        ("loco4", None): 12,
    }


def test_speed_ups_are_over_the_baseline_of_the_same_rate():
    rows = [
        row_of("bf16_alltoall", 8.0, 4.0, 2.0, sent=9_000_000),
        row_of("loco4", 8.0, 2.0, 0.5),
        row_of("bf16_alltoall", None, 0.5, 0.2),
        row_of("loco4", None, 0.4, 0.1),
        row_of("loco2", 100.0, 1.0, 0.5),  # no baseline at this rate
    ]
    assert rows[0]["step_seconds"] == 4.0, "of the slowest rank; the step that was disturbed plays no part"
    assert rows[0]["exchange_seconds"] == 2.0
    assert rows[0]["compute_seconds"] == pytest.approx(1.9)
    assert rows[0]["interface_bytes"] == 3_000_000, "of the busiest link"
    assert rows[0]["exchange_interface_bytes"] == 1_500_000
    assert rows[0]["loopback_bytes"] == 10
    results.compare(rows, overlap=False)
    assert [row["speedup_vs_bf16_alltoall"] for row in rows] == [1.0, 2.0, 1.0, 1.25, None]
    assert [row["exchange_speedup_vs_bf16_alltoall"] for row in rows] == [1.0, 4.0, 1.0, 2.0, None]
    # 3 MB and 1 MB a step at 1 MB/s, beside 0.4 s without limits
    assert rows[1]["byte_limit_speedup"] == pytest.approx((0.4 + 3.0) / (0.4 + 1.0))
    assert [row["byte_limit_speedup"] for row in rows[2:]] == [None, None, None]
    results.compare(rows, overlap=True)
    assert [row["byte_limit_speedup"] for row in rows] == [None] * 5
    assert set(results.NOTES) <= set(rows[0])


def test_a_whole_run_of_onebit_adam_has_steps_of_both_phases() -> None:
    rows = [
        row_of("bf16_allreduce", 8.0, 4.0, 2.0, sent=9_000_000),
        row_of("onebit_adam_warmup", 8.0, 5.0, 2.0, sent=9_000_000),
        row_of("onebit_adam", 8.0, 1.0, 0.5),
        row_of("onebit_adam", 100.0, 1.0, 0.5),  # its warm-up was not measured at this rate
    ]
    results.compare(rows, overlap=False)
    assert [row["speedup_vs_bf16_allreduce"] for row in rows] == [1.0, 0.8, 4.0, None]
    (run,) = results.whole_runs(rows)
    assert (run["name"], run["rate_mbit"]) == ("onebit_adam", 8.0)
    assert run["step_seconds"] == pytest.approx(0.15 * 5.0 + 0.85 * 1.0)
    assert run["interface_bytes"] == pytest.approx(0.15 * 3e6 + 0.85 * 1e6)
    assert run["speedup_vs_bf16_allreduce"] == pytest.approx(4.0 / 1.6)
    assert run["bytes_saved_vs_bf16_allreduce"] == pytest.approx(3.0 / 1.3)
    (line,) = results.sentences(rows)
    assert "15% warm-up: 1.600 s and 1.30 MB a step, 2.50 times faster than bf16_allreduce" in line
    assert line in results.markdown(rows)


@pytest.fixture(scope="module")
def root() -> None:
    try:
        hosts.check()
        with hosts.Network(2) as network:
            network.shape(100)
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("root")
def test_three_methods_over_two_hosts(tmp_path: Path) -> None:
    flags = (
        "--layers 1 --hidden 64 --ffn 128 --heads 2 --vocabulary 1024 --sequence 8 --buckets 2 --hosts 2 "
        "--ranks-per-host 2 --methods bf16_alltoall,onebit_adam,loco4_exact --rates 100 "
        f"--accumulation 2 --steps 1 --passes 1 --settle 5 --learning-rate 1e-3 --out {tmp_path}"
    )
    command = [sys.executable, "-m", "benchmarks.network", *flags.split()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "loco4_exact" in run.stdout
    assert "left" in run.stderr
    found = json.loads((tmp_path / "network.json").read_text())
    assert (tmp_path / "network.png").read_bytes().startswith(b"\x89PNG")
    base, onebit, exact = found["rows"]
    assert (found["learning_rate"], found["settle"], found["passes"]) == (1e-3, 5, 1)
    elements = base["gradient_bytes"] / 2 / (3 / 4)
    assert elements == pytest.approx(found["model"]["parameters"], rel=0.02)
    assert base["weight_bytes"] == base["gradient_bytes"]
    # Two ranks of a host send each two thirds of what they send to the other host; a ring gathers weights
    # with one of them; the rest stays inside, where no rate holds.
    crossing = 2 * base["gradient_bytes"] * 2 / 3 + base["weight_bytes"]
    assert base["interface_bytes"] == pytest.approx(crossing, rel=0.1)
    assert base["exchange_interface_bytes"] == pytest.approx(crossing - base["weight_bytes"], rel=0.1)
    assert base["loopback_bytes"] > 0.9 * (2 * base["gradient_bytes"] / 3 + base["weight_bytes"])
    assert base["step_seconds"] > 8 * base["interface_bytes"] / 100e6
    assert onebit["gradient_bytes"] == pytest.approx(2 * 1.26 / 16 * base["gradient_bytes"], rel=0.02)
    assert onebit["weight_bytes"] == onebit["gather_seconds"] == 0
    assert onebit["exchange_seconds"] > 0
    assert onebit["weight_bits"] is None
    # Rows of 64 have a scale each.
    assert exact["gradient_bytes"] / base["gradient_bytes"] == pytest.approx(4.25 / 16, rel=0.02)
    assert exact["speedup_vs_bf16_alltoall"] == base["step_seconds"] / exact["step_seconds"]
    assert exact["weight_bytes"] < 0.7 * base["weight_bytes"]
    assert exact["weight_bits"] == pytest.approx(16 * exact["weight_bytes"] / base["weight_bytes"])
    assert exact["gather_seconds"] > 0
    first = exact["weight_bits_first_steps"]
    assert len(first) == 5
    # Adam's first step moves every weight by the same; from the second on moves become fewer.
    assert 0 < first[0] < first[-1] < first[1]
    assert sorted(first[1:], reverse=True) == first[1:]
    saved = base["interface_bytes"] - exact["interface_bytes"]
    in_gathers = base["weight_bytes"] - exact["weight_bytes"]
    in_exchanges = base["exchange_interface_bytes"] - exact["exchange_interface_bytes"]
    assert saved - in_exchanges == pytest.approx(in_gathers, rel=0.15)
    # 2 of 6 payloads go from each of two ranks to the other host; the owners' 3 go around by one of them.
    assert 7 / 6 * onebit["gradient_bytes"] < onebit["exchange_interface_bytes"] < exact["gradient_bytes"]


@pytest.mark.usefixtures("root")
def test_a_link_has_its_rate_and_a_host_within_itself_has_none() -> None:
    with hosts.Network(2) as network:
        network.shape(100)
        assert 0.95 < quickest(network, 0, 1, 1.3) < 1.3  # headers: 1.05
        assert quickest(network, 1, 1, 0.2) < 0.2
        network.shape(None)
        assert quickest(network, 0, 1, 0.5) < 0.5


def quickest(network: hosts.Network, source: int, target: int, enough: float) -> float:
    """The least time of a transfer, in units of what 100 Mbit/s would take: other work makes some longer."""
    size, least = 2_000_000, math.inf
    for _ in range(20):
        least = min(least, transfer(network, source, target, size) / (8 * size / 100e6))
        if least < enough:
            break
    return least


RECEIVE = "import socket, sys; s = socket.create_server((sys.argv[1], 7)); print(1, flush=True)\n"
RECEIVE += "c, _ = s.accept(); t = int(sys.argv[2])\nwhile t: t -= len(c.recv(1 << 16))\nc.send(b'.')"


def transfer(network: hosts.Network, source: int, target: int, size: int) -> float:
    """Seconds that some bytes take from one host to another over TCP."""
    address = hosts.address(target)
    with network.hosts[target].entered():
        receiver = subprocess.Popen(
            [sys.executable, "-c", RECEIVE, address, str(size)], stdout=subprocess.PIPE, text=True
        )
    assert receiver.stdout is not None
    with receiver, network.hosts[source].entered():
        receiver.stdout.readline()
        with socket.create_connection((address, 7)) as connection:
            start = time.perf_counter()
            connection.sendall(bytes(size))
            connection.recv(1)
            return time.perf_counter() - start
