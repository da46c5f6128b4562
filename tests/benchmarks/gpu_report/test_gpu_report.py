"""`python -m benchmarks.gpu_report`: steps, page, resuming; with stand-ins for the commands that it runs."""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command_line import main
from benchmarks.gpu_report import command, steps, trace
from benchmarks.gpu_report.steps import TIMED_OUT, run_command
from megatron_patch.errors import UserError

EVENTS = [
    ("compute", 7, 0.0, 100.0),
    ("ncclDevKernel_SendRecv", 20, 50.0, 100.0),  # half of it beside computation
    ("compress_kernel", 21, 90.0, 20.0),
    ("compute", 7, 200.0, 100.0),
]


def events() -> list[dict[str, Any]]:
    """As torch.profiler writes them; one of the host's among them."""
    found = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": length, "args": {"stream": stream}}
        for name, stream, start, length in EVENTS
    ]
    return [*found, {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 0.0, "dur": 1e6}]


def test_a_trace_by_stream_and_what_is_exposed() -> None:
    found = trace.summary(events())
    assert found["span_ms"] == pytest.approx(0.3)
    assert found["busy_ms"] == pytest.approx(0.25)
    assert found["kinds"]["nccl"] == pytest.approx({"busy_ms": 0.1, "exposed_ms": 0.05})
    assert found["kinds"]["compression"] == pytest.approx({"busy_ms": 0.02, "exposed_ms": 0.01})
    assert found["streams"]["7"] == {
        "operations": 2,
        "busy_ms": pytest.approx(0.2),
        "longest_ms": {"compute": pytest.approx(0.2)},
    }
    assert trace.summary([])["streams"] == {}


SUMMARY = {
    "step_seconds": {"median": 0.2},
    "compression_seconds_per_step": 0.01,
    "peak_memory_bytes": 10**9,
    "world_size": 2,
}
KERNELS = {
    "elements_per_second": {"triton": 300e9},
    "bytes_per_element": 6.55,
    "memcpy_bytes_per_second": 1500e9,
    "decompress_reduce_elements_per_second": 3000e9,
    "decompress_reduce_bytes_per_element": 0.58,
}
EXCHANGED = {
    "ranks": 2,
    "backend": "nccl",
    "elements": 40_000_000,
    "seconds": {"reduce-scatter in bf16": 0.004, "4 bits": 0.002},
}


BESIDE_DEEPSPEED = {
    "elements": 32768,
    "seconds": {
        "compress": {"megatron-loco": 2e-4, "DeepSpeed": 5e-4},
        "sum of 8 ranks": {"megatron-loco": 1e-4, "DeepSpeed": 1e-4},
    },
}


class StandIns:
    """Answers commands as they would; `fails` names those that do not."""

    def __init__(self, fails: str = "nothing") -> None:
        self.fails = fails
        self.ran: list[str] = []
        self.environments: list[dict[str, str]] = []

    def __call__(self, parts: Any, environment: dict[str, str], log: Path, seconds: float) -> int:
        line = " ".join(parts)
        self.ran.append(log.stem)
        self.environments.append(environment)
        answers = "\n".join(json.dumps(one) for one in (EXCHANGED, BESIDE_DEEPSPEED))
        log.write_text(f"{line}\n{answers}\n3 passed, 1 skipped in 2 s\n")
        if self.fails in line:
            return 1
        if "--json" in parts:
            Path(parts[parts.index("--json") + 1]).write_text(json.dumps(KERNELS))
        if "train" in parts:
            out = Path(parts[parts.index("--out") + 1])
            (out / "torch_profile").mkdir(parents=True, exist_ok=True)
            (out / "summary.json").write_text(json.dumps(SUMMARY))
            text = json.dumps({"traceEvents": events()}).encode()
            (out / "torch_profile" / "rank-0.json.gz").write_bytes(gzip.compress(text))
        return 0


def reported(monkeypatch: pytest.MonkeyPatch, folder: Path, stand_ins: StandIns, *flags: str) -> int:
    monkeypatch.setattr(command, "_gpus", lambda: 2)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(["--out", str(folder), *flags]), stand_ins)


def test_one_page_and_one_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_ins = StandIns()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "deepspeed" or None)
    assert reported(monkeypatch, tmp_path, stand_ins) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(report) == list(command.STEPS)
    page = (tmp_path / "report.md").read_text()
    for said in (
        "Of 2 GPUs.",
        "3 passed, 1 skipped",
        "| fp32, 4 bits | compress, triton | 300.0 | 66% |",
        "| 4 bits | 2.00 | 2.00 x |",
        "| compress | 200 | 500 | 2.50 x |",
        "| LoCo, exact gather | 200.0 | 1.00 x | 10.0 | 1.0 |",
        "| LoCo | nccl | 0.1 | 0.1 |",
        "| 32 | 200.0 |",
        "torch's sanitizer: 0 races",
    ):
        assert said in page, said
    queues = [
        one["CUDA_DEVICE_MAX_CONNECTIONS"]
        for one in stand_ins.environments
        if len(one) == 1 and "CUDA_DEVICE_MAX_CONNECTIONS" in one
    ]
    assert queues == ["1", "8", "32"]
    assert {"TORCH_CUDA_SANITIZER": "1"} in stand_ins.environments


def test_it_resumes_with_what_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing = StandIns(fails="gpu_report.exchanges")
    assert reported(monkeypatch, tmp_path, failing) == 1
    page = (tmp_path / "report.md").read_text()
    assert "**failed: exit status 1**" in page
    assert "## Sanitizers" in page  # what comes after it ran
    again = StandIns()
    assert reported(monkeypatch, tmp_path, again) == 0
    assert again.ran == ["exchanges"]
    assert "failed" not in (tmp_path / "report.md").read_text().split("## Exchanges")[1].split("##")[0]
    assert reported(monkeypatch, tmp_path, all_again := StandIns(), "--again", "--only", "exchanges") == 0
    assert all_again.ran == ["exchanges"]


def test_its_time_is_limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert sum(minutes for _, minutes in command.STEPS.values()) >= command.MINUTES
    stand_ins = StandIns()
    assert reported(monkeypatch, tmp_path, stand_ins, "--minutes", "0.1") == 0
    assert stand_ins.ran == []
    assert "not run: no time remained" in (tmp_path / "report.md").read_text()
    assert reported(monkeypatch, tmp_path, stand_ins, "--only", "environment") == 0
    assert stand_ins.ran[0] == "doctor"


def test_what_takes_too_long_is_ended(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    sleeping = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"]
    assert run_command(sleeping, {}, log, 3) == TIMED_OUT
    assert "it took too long" in str(steps._failed(TIMED_OUT, ""))
    shown = [sys.executable, "-c", "import os; print(os.environ['SAID'])"]
    assert run_command(shown, {"SAID": "yes"}, log, 30) == 0
    assert log.read_text() == "yes\n"


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command, ["--device", "cpu", "--only", "kernel", "--out", str(tmp_path)]) == 2
    assert "kernel: no such step; there are environment, tests" in capsys.readouterr().err
    taken = tmp_path / "taken"
    taken.write_text("kept")
    assert main(command, ["--device", "cpu", "--out", str(taken)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-loco: error: ")
    assert str(taken) in line
    assert taken.read_text() == "kept"
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no GPU is there"):
            command._gpus()


@pytest.mark.slow
def test_exchanges_are_measured_over_gloo(tmp_path: Path) -> None:
    """The measurement itself, on small tensors."""
    machine = steps.Machine(0, tmp_path, run_command)
    found = steps.exchanges(machine, 200)
    assert found["ranks"] == 2, found
    assert found["backend"] == "gloo"
    assert set(found["seconds"]) == {"reduce-scatter in bf16", "4 bits", "2 bits"}
    assert all(seconds > 0 for seconds in found["seconds"].values())


@pytest.mark.slow
def test_all_of_it_on_the_cpu(tmp_path: Path) -> None:
    """Every command is the real one, on small models."""
    out = tmp_path / "report"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_report", "--device", "cpu", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "report.json").read_text())
    for name in steps.METHODS:
        assert report["training"]["found"][name]["step_seconds"]["median"] > 0
        assert "trace" in report["training"]["found"][name]
    assert (out / "report.md").read_text().startswith("# megatron-loco on a GPU")
