"""`python -m benchmarks.network`: methods, rows, limits, mistakes; and the real thing where root is there."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command_line import main
from benchmarks.network import command as network
from benchmarks.network import hosts, lifeline, methods, progress, rank, results
from benchmarks.network import plot as picture
from benchmarks.network.command import ALL_METHODS, DEFAULT_METHODS, measure, plan
from benchmarks.network.plan import Plan
from benchmarks.network.ranks import Ranks
from benchmarks.network.results import Cell
from megatron_patch.errors import UserError
from megatron_patch.workflows.run.launcher import RankFailed


def planned(*flags: str) -> Plan:
    parser = argparse.ArgumentParser()
    network.add_arguments(parser)
    return plan(parser.parse_args(flags))


# --- what is measured ------------------------------------------------------------------------------------


def test_methods_have_a_name_each():
    parsed = {name: methods.parse(name) for name in ALL_METHODS}
    assert [method.name for method in parsed.values()] == list(ALL_METHODS)
    assert {name: method.bits for name, method in parsed.items()} == {
        "fp32_reduce_scatter": 32,
        "bf16_reduce_scatter": 16,
        "bf16_alltoall": 16,
        "bf16_allreduce": 16,
        "none_exact": 16,
        "loco8": 8,
        "loco4": 4,
        "loco2": 2,
        "loco4_exact": 4,
        "onebit_adam_warmup": 16,
        "onebit_adam": 1,
        "ddp_bf16": 16,
        "ddp_powersgd_rank4": None,
    }
    assert parsed["ddp_powersgd_rank4"].powersgd_rank == 4
    assert parsed["loco4"].compression(1).bits == 4
    assert parsed["bf16_alltoall"].compression(1) is None
    two_hop = methods.parse("loco4_two_hop")
    assert (two_hop.method, two_hop.topology) == ("loco", "two_hop")
    assert methods.parse("naive2").method == "naive"


def test_onebit_adam_is_measured_in_either_phase():
    base, compressed, warming_up, two_hop = map(
        methods.parse, ("bf16_allreduce", "onebit_adam", "onebit_adam_warmup", "onebit_adam_two_hop")
    )
    assert (base.kind, base.compression(1)) == ("stock", None)
    assert compressed.method == warming_up.method == two_hop.method == "onebit_adam"
    assert all(method.replicated for method in (base, compressed, warming_up, two_hop))
    assert not methods.parse("loco4").replicated
    assert compressed.compression(1).warmup_steps < methods.FIRST_STEPS
    assert compressed.compression(1, settle=30).warmup_steps == 29
    assert warming_up.compression(1).warmup_steps > 10**6
    options = two_hop.compression(4)
    assert (options.topology, options.ranks_per_node, options.bits) == ("two_hop", 4, 1)
    assert compressed.guessed_bits < 3 < base.guessed_bits == warming_up.guessed_bits == 32


@pytest.mark.parametrize("name", ["loco4", "loco2", "naive4", "error_feedback8", "loco4_two_hop"])
def test_every_method_with_a_weight_gather_has_an_exact_one(name: str) -> None:
    stock, exact = methods.parse(name), methods.parse(f"{name}_exact")
    assert dataclasses.replace(stock, name=f"{name}_exact", exact=True) == exact
    options = exact.compression(4)
    assert options.codes_weights
    assert dataclasses.replace(options, weight_gather="stock") == stock.compression(4)
    assert stock.guessed_bits - exact.guessed_bits == pytest.approx(16 - 2.7)


def test_the_baseline_s_own_exchange_has_an_exact_weight_gather():
    base, exact = methods.parse("bf16_alltoall"), methods.parse("none_exact")
    assert base.fp32_accumulation
    assert exact.fp32_accumulation
    assert not methods.parse("loco4_exact").fp32_accumulation
    options = exact.compression(1)
    assert (options.method, options.weight_gather) == ("none", "exact")
    assert (exact.bits, exact.topology, exact.replicated, exact.kind) == (16, "flat", False, "attached")
    assert exact.guessed_bits == 16 + 2.7


def test_outer_steps_are_measured_over_whole_intervals():
    in_full, low = methods.parse("outer10_none_exact"), methods.parse("outer30_error_feedback4_exact")
    assert (in_full.outer, low.outer, low.method, low.bits) == (10, 30, "error_feedback", 4)
    assert not in_full.fp32_accumulation, "Megatron has it for a single optimizer instance"
    assert in_full.compression(2).outer_interval == 10
    assert low.compression(2).outer_interval == 30
    later = methods.parse("outer30d10_error_feedback4_exact")
    assert (later.outer, later.compression(2).outer_delay, low.compression(2).outer_delay) == (30, 10, 0)
    assert low.guessed_bits < 1 < in_full.guessed_bits == 6.4
    laps = [[1.0, 1.0, 10.0], [2.0, 1.0, 1.0]]
    assert results.slowest_median(laps) == 2
    assert results.slowest_mean(laps) == 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("outer30_onebit_adam", "must be outerH_METHOD or outerHdD_METHOD"),
        ("outer30_bf16_alltoall", "must be outerH_METHOD or outerHdD_METHOD"),
        ("outer1_loco4", "must be outerH_METHOD or outerHdD_METHOD"),
        ("outer8d8_loco4", "must be outerH_METHOD or outerHdD_METHOD"),
        ("onebit_adam_exact", "leave out _exact"),
        ("bf16_allreduce_exact", "leave out _exact"),
        ("ddp_bf16_exact", "leave out _exact"),
        ("bf16_alltoall_exact", "none_exact"),
        ("locco4_exact", "did you mean loco4_exact?"),
        ("none", "none_exact"),
        ("loco4_exact_exact", "must be one of"),
    ],
)
def test_what_has_no_exact_gather_is_an_error_of_one_line(name: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        methods.parse(name)
    message = str(caught.value)
    assert message.startswith(f"--methods: '{name}'")
    assert words in message
    assert "\n" not in message


def test_a_model_settles_before_it_is_measured():
    chosen = planned("--settle", "20", "--learning-rate", "1e-3", "--methods", "loco4,ddp_bf16")
    assert (chosen.settle, chosen.learning_rate) == (20, 1e-3)
    loco, ddp = chosen.methods
    assert loco.settle(20) == 20
    assert ddp.settle(20) == methods.FIRST_STEPS  # it gathers no weights
    assert chosen.estimate_settling(loco, 4, 0.5) == 40
    assert (planned().settle, planned().learning_rate) == (45, 3e-4)


def test_the_baseline_is_measured_first():
    chosen = planned("--methods", "loco4,ddp_bf16,bf16_alltoall", "--rates", "100,unshaped")
    assert [method.name for method in chosen.methods] == ["bf16_alltoall", "loco4", "ddp_bf16"]
    assert [(c.method.name, c.accumulation, c.rate_mbit) for c in chosen.cells[:3]] == [
        ("bf16_alltoall", 1, 100.0),
        ("bf16_alltoall", 1, None),
        ("loco4", 1, 100.0),
    ]
    assert len(chosen.cells) == 3 * 2 * 2


def test_the_default_is_what_it_says():
    chosen = planned()
    assert (chosen.hosts, chosen.rates, chosen.accumulation) == (4, (100, 300, 1000), (1, 4))
    assert ",".join(method.name for method in chosen.methods) == DEFAULT_METHODS
    assert 9e6 < chosen.llama.parameters < 11e6
    assert sum(chosen.estimate(cell, 0.4) for cell in chosen.cells) < 300


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--hosts", "3"], ["--hosts", "3"]),
        (["--methods", "locco4"], ["--methods", "locco4", "did you mean loco4?"]),
        (["--methods", "loco4,loco4"], ["--methods", "different"]),
        (["--methods", ""], ["--methods", "different"]),
        (["--rates", "0"], ["--rates", "'0'", "unshaped"]),
        (["--rates", "fast"], ["--rates", "'fast'", "unshaped"]),
        (["--rates", "100,100"], ["--rates", "different"]),
        (["--accumulation", "0"], ["--accumulation", "'0'", "1 to 1024"]),
        (["--steps", "0"], ["--steps", "0", "1 or more"]),
        (["--passes", "0"], ["--passes", "0", "1 or more"]),
        (["--settle", "2"], ["--settle", "2", "3 or more"]),
        (["--learning-rate", "0"], ["--learning-rate", "0", "more than 0"]),
        (["--learning-rate", "nan"], ["--learning-rate", "nan"]),
        (["--methods", "onebit_adam_exact"], ["--methods", "onebit_adam_exact", "no weight gather"]),
        (["--ranks-per-host", "9"], ["--ranks-per-host", "9", "8 or less"]),
        (["--hidden", "100", "--heads", "6"], ["--hidden", "100", "12"]),
        (["--patience", "0"], ["--patience", "0"]),
    ],
)
def test_a_mistake_is_one_line(
    flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(network, flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-loco: error: ")
    assert all(word in line for word in words), line


# --- rows ------------------------------------------------------------------------------------------------


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


def row_of(name: str, rate: float | None, step: float, exchange: float, **answered: Any) -> dict[str, Any]:
    cell = Cell(methods.parse(name), 1, rate)
    bits = answered.pop("weight_bits", 16.0)
    ranks = [
        answer(step, exchange / 2, weight_bits=bits),
        answer(step - 0.1, exchange, weight_bits=bits, **answered),
    ]
    first = [[9.0, 7.0, 6.0], [8.0, 7.5, 6.0]] if cell.method.exact else [None, None]
    prepared = [{"unshaped_step_seconds": [0.4, 0.4], "weight_bits_first_steps": bits} for bits in first]
    return results.row(cell, 2, 1, prepared, ranks)


def test_a_row_is_the_slowest_rank_and_the_busiest_link():
    row = row_of("bf16_alltoall", 8.0, 2.0, 1.0, sent=6_000_000)
    assert row["step_seconds"] == 2.0
    assert row["exchange_seconds"] == 1.0
    assert row["compute_seconds"] == pytest.approx(0.9)
    assert row["interface_bytes"] == 2_000_000
    assert row["exchange_interface_bytes"] == 1_000_000
    assert row["loopback_bytes"] == 10
    assert (row["method"], row["bits"], row["topology"]) == ("bf16_alltoall", 16, "flat")


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


def test_a_row_has_the_bits_of_a_weight():
    exact = row_of("loco4_exact", 8.0, 2.0, 1.0, weight_bits=3.5)
    stock, replicated = row_of("loco4", 8.0, 2.0, 1.0), row_of("onebit_adam", 8.0, 2.0, 1.0, weight_bits=None)
    assert (exact["weight_gather"], stock["weight_gather"]) == ("exact", "stock")
    assert exact["weight_bits_first_steps"] == [9.0, 7.5, 6.0]
    assert stock["weight_bits_first_steps"] is None
    assert stock["weight_bits"] == 16
    results.compare([exact, stock, replicated], overlap=False)
    heads, _, *lines = results.markdown([exact, stock, replicated]).splitlines()
    place = heads.split(" | ").index("weight bits")
    assert [line.split(" | ")[place] for line in lines] == ["3.50", "16.00", "-"]
    assert len(results.table([exact]).columns) == 13


def test_speed_ups_are_over_the_baseline_of_the_same_rate():
    rows = [
        row_of("bf16_alltoall", 8.0, 4.0, 2.0, sent=9_000_000),
        row_of("loco4", 8.0, 2.0, 0.5),
        row_of("bf16_alltoall", None, 0.5, 0.2),
        row_of("loco4", None, 0.4, 0.1),
        row_of("loco2", 100.0, 1.0, 0.5),  # no baseline at this rate
    ]
    results.compare(rows, overlap=False)
    assert [row["speedup_vs_bf16_alltoall"] for row in rows] == [1.0, 2.0, 1.0, 1.25, None]
    assert [row["exchange_speedup_vs_bf16_alltoall"] for row in rows] == [1.0, 4.0, 1.0, 2.0, None]
    # 3 MB and 1 MB a step at 1 MB/s, beside 0.4 s without limits
    assert rows[1]["byte_limit_speedup"] == pytest.approx((0.4 + 3.0) / (0.4 + 1.0))
    assert [row["byte_limit_speedup"] for row in rows[2:]] == [None, None, None]
    results.compare(rows, overlap=True)
    assert [row["byte_limit_speedup"] for row in rows] == [None] * 5
    assert set(results.NOTES) <= set(rows[0])


def test_a_whole_run_of_onebit_adam_has_steps_of_both_phases(tmp_path: Path) -> None:
    rows = [
        row_of("bf16_allreduce", 8.0, 4.0, 2.0, sent=9_000_000),
        row_of("onebit_adam_warmup", 8.0, 5.0, 2.0, sent=9_000_000),
        row_of("onebit_adam", 8.0, 1.0, 0.5),
        row_of("loco4", 8.0, 2.0, 0.5),
        row_of("onebit_adam", 100.0, 1.0, 0.5),  # its warm-up was not measured at this rate
    ]
    results.compare(rows, overlap=False)
    assert [row["speedup_vs_bf16_allreduce"] for row in rows] == [1.0, 0.8, 4.0, 2.0, None]
    assert [row["speedup_vs_bf16_alltoall"] for row in rows] == [None] * 5
    (run,) = results.whole_runs(rows)
    assert (run["name"], run["rate_mbit"]) == ("onebit_adam", 8.0)
    assert run["step_seconds"] == pytest.approx(0.15 * 5.0 + 0.85 * 1.0)
    assert run["interface_bytes"] == pytest.approx(0.15 * 3e6 + 0.85 * 1e6)
    assert run["speedup_vs_bf16_allreduce"] == pytest.approx(4.0 / 1.6)
    assert run["bytes_saved_vs_bf16_allreduce"] == pytest.approx(3.0 / 1.3)
    (line,) = results.sentences(rows)
    assert "onebit_adam, 8 Mbit/s" in line
    assert "15% warm-up: 1.600 s and 1.30 MB a step, 2.50 times faster than bf16_allreduce" in line
    assert line in results.markdown(rows)
    assert "over all-reduce" in results.markdown(rows)
    assert len(results.table(rows).columns) == 14
    (alone,) = results.whole_runs(rows[1:3])
    assert alone["speedup_vs_bf16_allreduce"] is None
    assert results.whole_runs(rows[:2]) == results.whole_runs(rows[2:]) == []


def test_rows_become_a_table_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        row_of(name, rate, 4.0, 1.0, sent=9_000_000)
        for rate in (100.0, 300.0, None)
        for name in ("bf16_alltoall", "loco4")
    ]
    results.compare(rows, overlap=False)
    assert results.table(rows).row_count == 6 + 2
    assert results.markdown(rows).count("\n") == 8
    assert "all-reduce" not in results.markdown(rows)
    drawn: list[Any] = []
    monkeypatch.setattr(picture.pyplot(), "close", drawn.append)
    title = (
        "4 hosts, 1 rank each, LLaMA of 10.2 M parameters, 1 x 32 tokens a microbatch, learning rate 0.0003"
    )
    picture.draw(tmp_path / "network.png", rows, title)
    (figure,) = drawn
    extent = figure._suptitle.get_window_extent()
    assert figure.bbox.x0 < extent.x0 < extent.x1 < figure.bbox.x1
    picture.draw(tmp_path / "empty.png", [], "nothing was shaped")
    assert (tmp_path / "network.png").read_bytes().startswith(b"\x89PNG")


def test_counters_are_read_by_name():
    text = (
        "Inter-|   Receive             |  Transmit\n"
        " face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop\n"
        "    lo:    70   1    0    0    0     0      0         0       80    1    0    0    0     0\n"
        "  eth0: 12345  10    0    0    0     0      0         0    67890   12    0    0    0     0\n"
    )
    assert rank.counters("eth0", text) == (67890, 12345)
    assert rank.counters("lo", text) == (80, 70)
    with pytest.raises(KeyError):
        rank.counters("eth1", text)


def test_the_time_left_shrinks():
    chosen = planned("--methods", "bf16_alltoall,loco4", "--rates", "100")
    shown = progress.Show(chosen)
    before = shown.left()
    for cell in chosen.cells[:2]:
        shown.begin(cell)
        shown.end(cell, {"step_seconds": 1.0, "exchange_seconds": 0.5})
    assert 0 < shown.left() < before


# --- links and left-overs --------------------------------------------------------------------------------


def test_a_burst_lets_a_whole_packet_through_and_little_more():
    assert hosts.burst_bytes(100) == 70_000 > 65_536
    assert hosts.burst_bytes(10_000) == 1_250_000
    assert hosts.shape_command("eth0", 2.5).startswith(
        "qdisc replace dev eth0 root tbf rate 2500kbit burst 70000"
    )
    assert "tbf" not in hosts.shape_command("eth0", None)


def test_without_root_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(network, []) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-loco: error: bench network: needs root")
    assert "--privileged" in line


def test_without_iproute2_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else f"/sbin/{name}")
    with pytest.raises(UserError, match="`tc`, which is not installed; install iproute2"):
        hosts.check()


def test_without_permission_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(flags: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(os, "unshare", refuse)
    with pytest.raises(UserError, match=r"namespace: Operation not permitted; run it as root.*NET_ADMIN"):
        hosts.check()


def test_a_killed_run_leaves_a_folder_until_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = tmp_path / f"{lifeline.PREFIX}dead"
    dead.mkdir()
    (dead / "lock").touch()
    with lifeline.folder() as ours:
        assert not dead.exists()
        assert lifeline.remove_left_overs() == []
        assert ours.exists()
    assert list(tmp_path.iterdir()) == []


# --- the real thing --------------------------------------------------------------------------------------


def why_not() -> str | None:
    try:
        hosts.check()
        with hosts.Network(2) as network:
            network.shape(100)
    except UserError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def root() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)


TINY = "--layers 1 --hidden 64 --ffn 128 --heads 2 --vocabulary 1024 --sequence 8 --buckets 2"


def command(out: Path, *flags: str) -> list[str]:
    start = [sys.executable, "-m", "benchmarks.network", "--hosts", "2"]
    return [*start, *TINY.split(), "--out", str(out), *flags]


OF_THIS_TEST = "MEGATRON_LOCO_TEST"
"""A variable that a test's processes have in their environment: other tests run beside it."""


def processes() -> dict[str, str]:
    """The command lines of the processes that this test has started, and that they have; by process."""
    mark = f"{OF_THIS_TEST}={os.environ[OF_THIS_TEST]}".encode()
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it is gone
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found[process.name] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def ours() -> list[str]:
    """Processes of this test's network benchmark."""
    parts = ("benchmarks.network.rank", "benchmarks.network.agent")
    return [words for words in processes().values() if any(part in words for part in parts)]


def open_namespaces() -> set[str]:
    """Network namespaces that this process holds."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(descriptor.readlink()))
    return {name for name in found if name.startswith("net:")}


def wait_for(condition: Any, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.2)  # to look through /proc takes time itself
    return bool(condition())


@pytest.fixture
def untouched(root: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Afterwards no process, namespace or interface is there that the test has made.

    The last process or descriptor takes its namespace with it.
    """
    monkeypatch.setenv(OF_THIS_TEST, str(uuid.uuid4()))

    def found() -> set[str]:
        return open_namespaces() | set(processes()) | set(map(str, Path("/sys/class/net").iterdir()))

    before = found()
    yield
    assert wait_for(lambda: found() <= before, 60), (found() - before, processes())


@pytest.mark.usefixtures("untouched")
def test_five_methods_over_two_hosts(tmp_path: Path) -> None:
    flags = (
        "--ranks-per-host 2 --methods bf16_alltoall,loco4,onebit_adam,none_exact,loco4_exact --rates 100 "
        "--accumulation 2 --steps 1 --passes 2 --settle 5 --learning-rate 1e-3"
    )
    run = subprocess.run(command(tmp_path, *flags.split()), capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "loco4" in run.stdout
    assert "left" in run.stderr
    found = json.loads((tmp_path / "network.json").read_text())
    assert (tmp_path / "network.png").read_bytes().startswith(b"\x89PNG")
    assert found["versions"]["torch"]
    base, loco, onebit, none_exact, loco_exact = found["rows"]
    assert (found["learning_rate"], found["settle"], found["passes"]) == (1e-3, 5, 2)
    assert run.stderr.count("onebit_adam, 100 Mbit/s") == 2  # one pass, then the next
    assert "learning rate 0.001" in run.stdout
    elements = base["gradient_bytes"] / 2 / (3 / 4)
    assert elements == pytest.approx(found["model"]["parameters"], rel=0.02)
    assert base["weight_bytes"] == base["gradient_bytes"]
    # Rows of 64 have a scale each.
    assert loco["gradient_bytes"] / base["gradient_bytes"] == pytest.approx(4.25 / 16, rel=0.02)
    # Two ranks of a host send each two thirds of what they send to the other host; a ring gathers weights
    # with one of them; the rest stays inside, where no rate holds.
    crossing = 2 * base["gradient_bytes"] * 2 / 3 + base["weight_bytes"]
    assert base["interface_bytes"] == pytest.approx(crossing, rel=0.1)
    assert base["exchange_interface_bytes"] == pytest.approx(crossing - base["weight_bytes"], rel=0.1)
    assert base["loopback_bytes"] > 0.9 * (2 * base["gradient_bytes"] / 3 + base["weight_bytes"])
    assert base["step_seconds"] > 8 * base["interface_bytes"] / 100e6
    assert loco["speedup_vs_bf16_alltoall"] == base["step_seconds"] / loco["step_seconds"]
    assert loco["interface_bytes"] < 0.7 * base["interface_bytes"]
    assert onebit["gradient_bytes"] == pytest.approx(2 * 1.26 / 16 * base["gradient_bytes"], rel=0.02)
    assert onebit["weight_bytes"] == onebit["gather_seconds"] == 0
    assert onebit["exchange_seconds"] > 0
    assert onebit["weight_bits"] is None
    for exact, stock in ((none_exact, base), (loco_exact, loco)):
        assert exact["gradient_bytes"] == stock["gradient_bytes"]
        assert exact["weight_bytes"] < 0.7 * stock["weight_bytes"]
        assert exact["weight_bits"] == pytest.approx(16 * exact["weight_bytes"] / stock["weight_bytes"])
        assert exact["gather_seconds"] > 0
        first = exact["weight_bits_first_steps"]
        assert len(first) == 5
        # Adam's first step moves every weight by the same; from the second on moves become fewer.
        assert 0 < first[0] < first[-1] < first[1]
        assert sorted(first[1:], reverse=True) == first[1:]
        saved = stock["interface_bytes"] - exact["interface_bytes"]
        assert saved == pytest.approx(stock["weight_bytes"] - exact["weight_bytes"], rel=0.15)
    # 2 of 6 payloads go from each of two ranks to the other host; the owners' 3 go around by one of them.
    assert 7 / 6 * onebit["gradient_bytes"] < onebit["exchange_interface_bytes"] < loco["gradient_bytes"]


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    "how",
    # SIGTERM takes SIGINT's way.
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL],
)
def test_nothing_is_left_when_the_command_is_ended(how: signal.Signals, tmp_path: Path) -> None:
    flags = ["--methods", "bf16_alltoall", "--rates", "1", "--steps", "1000"]
    temporary = tmp_path / "a folder whose name alone is longer than the path of a unix socket may be".ljust(
        110, "."
    )
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(
        command(tmp_path, *flags),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a shell's background job ignores it
    ) as process:
        assert wait_for(lambda: process.poll() is not None or len(ours()) == 4, 300)  # 2 agents, 2 ranks
        os.kill(process.pid, how)
        _, said = process.communicate(timeout=300)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[how], said
    assert wait_for(lambda: not ours(), 60)
    if how != signal.SIGKILL:
        assert list(temporary.iterdir()) == []
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.usefixtures("untouched")
def test_a_cut_link_fails_every_rank_in_time() -> None:
    llama = {"layers": 1, "hidden": 64, "ffn": 128, "heads": 2, "vocabulary": 1024, "sequence": 8}
    cell = {"method": "loco4", "buckets": 2, "ranks_per_host": 1, "overlap": False}
    cell |= {"learning_rate": 3e-4, "settle": 3}
    patience = 4.0
    with lifeline.folder() as folder, hosts.Network(3) as network:
        ranks = Ranks(network, 1, folder, patience)
        with ranks:
            ranks.ask(do="prepare", llama=llama | {"microbatch": 1}, accumulation=1, steps=2, **cell)
            network.shape(5)  # a step is all exchange
            threading.Timer(1.0, network.cut, [1]).start()
            start = time.monotonic()
            with pytest.raises(RankFailed):
                ranks.ask(do="measure", steps=100_000, accumulation=1)
        assert time.monotonic() - start < 1.0 + 1.25 * patience + 20  # last words, and a busy machine


@pytest.mark.usefixtures("root")
def test_a_link_has_its_rate_and_a_host_within_itself_has_none() -> None:
    size = 2_000_000
    with hosts.Network(2) as network:
        network.shape(100)
        assert 0.95 < quickest(network, 0, 1, size, 1.3) < 1.3  # headers: 1.05
        assert quickest(network, 1, 1, size, 0.2) < 0.2
        network.shape(None)
        assert quickest(network, 0, 1, size, 0.5) < 0.5


def quickest(network: hosts.Network, source: int, target: int, size: int, enough: float) -> float:
    """The least time of a transfer, in units of what 100 Mbit/s would take: other work makes some longer."""
    least = math.inf
    for _ in range(20):
        least = min(least, transfer(network, source, target, size) / (8 * size / 100e6))
        if least < enough:
            break
    return least


RECEIVE = "import socket, sys; s = socket.create_server((sys.argv[1], 7)); print(1, flush=True)\n"
RECEIVE += "c, _ = s.accept(); t = int(sys.argv[2])\nwhile t: t -= len(c.recv(1 << 16))\nc.send(b'.')"


def transfer(network: hosts.Network, source: int, target: int, size: int) -> float:
    """Seconds that some bytes take from one host to another over TCP."""
    import socket

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
