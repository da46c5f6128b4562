"""`python -m benchmarks.gpu`: its driver, its page, and all of its parts with stand-ins on the CPU."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import command, page
from benchmarks.gpu.command import Part
from benchmarks.gpu.part import MARK
from megatron_patch.workflows.plan import constants

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = constants.RESULTS / "of_a_cpu.json"


def driven(monkeypatch: pytest.MonkeyPatch, folder: Path, parts: list[Part]) -> tuple[int, dict[str, Any]]:
    """The command with these parts, each a script."""
    monkeypatch.setattr(command, "parts", lambda out: parts)
    monkeypatch.setattr(command, "command_of", lambda part, *_: [sys.executable, "-c", part.module])
    monkeypatch.setattr(command, "_LEAST", 0.0)
    status = command.run(argparse.Namespace(out=folder, seconds=60.0, only=None))
    return status, json.loads((folder / "results.json").read_text(encoding="utf-8"))


def test_a_part_that_fails_or_hangs_leaves_the_others_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tells(found: dict[str, Any]) -> str:
        return f"print({MARK + json.dumps(found)!r}, flush=True)\n"

    hangs = tells({"rates": {"x": 1}}) + "import time\ntime.sleep(1000)"
    parts = [
        Part("fails", 60, tells({"checks": {"c": False}}) + "raise SystemExit(3)", "", ""),
        Part("hangs", 3, hangs, "", "", alone=True),
        Part("good", 60, tells({"checks": {"a": True}}), "", "", alone=True),
    ]
    status, results = driven(monkeypatch, tmp_path, parts)
    assert status == 1
    found = results["parts"]
    assert (found["fails"]["checks"], found["fails"]["status"]) == ({"c": False}, 3)
    assert (found["hangs"]["rates"], found["hangs"]["status"]) == ({"x": 1}, "stopped at its limit")
    assert found["good"]["checks"] == {"a": True}
    assert "fails: ended with 3; FAILED: c" in capsys.readouterr().out
    assert driven(monkeypatch, tmp_path, parts[2:])[0] == 0


def test_the_pages_say_what_the_newest_results_say() -> None:
    every = list(constants.newest(constants.RESULTS).values())
    for path, text in page.pages(every).items():
        assert path.read_text(encoding="utf-8") == text, "run python -m benchmarks.gpu.page"


def test_what_failed_or_was_not_run_is_said_so() -> None:
    """Of the example, as if a GPU had made it."""
    results: dict[str, Any] = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    results |= {"device": "NVIDIA H100 80GB HBM3", "gpus": 1, "date": "2027-01-02"}
    checks = sum(len(part.get("checks", {})) for part in results["parts"].values())
    of = "on 1 GPU (NVIDIA H100 80GB HBM3, 2027-01-02)"
    assert page.sentence([results]) == f"{of} {checks} of {checks} checks passed"
    results["parts"]["bits"]["checks"]["the CPU's bytes"] = False
    results["parts"]["rates"]["not_run"] = "no time remained"
    wrong = "bits: FAILED: the CPU's bytes; rates: not run: no time remained"
    assert page.sentence([results]) == f"{of} {checks} of {checks + 1} checks passed; **{wrong}**"

    del results["parts"]["planted"]
    step = results["parts"]["step 1.3b"]["methods"]
    for method, seconds in {"stock": 0.3, "stock_bf16": 0.24, "loco": 0.2}.items():
        step[method]["100 Gbit/s"]["median"] = seconds
    del step["loco+exact"]["100 Gbit/s"]
    cells = dict(line.strip("| ").split(" | ") for line in page.table([results]).strip().splitlines())
    assert cells["compute-sanitizer finds an error that is planted"] == "not run yet"
    assert cells["step, 1.3 B parameters, 100 Gbit/s"] == "300; 1.25 x; 1.50 x; not run yet"


def bare_environment() -> Path:
    """The Python of an environment like a lent machine's; it is installed once."""
    folder = ROOT / ".compat" / "gpu-torch2.11.0"
    if not folder.exists():
        uv = Path(sys.executable).with_name("uv")
        part = folder.with_suffix(f".{os.getpid()}")
        subprocess.run([uv, "venv", "--quiet", "--relocatable", "--python", sys.executable, part], check=True)
        wanted = ["torch==2.11.0", "triton==3.6.0", "numpy==2.5.2"]
        wanted += [f"{name}=={metadata.version(name)}" for name in ("pytest", "hypothesis")]
        install = [uv, "pip", "install", "--quiet", "--python", part / "bin" / "python"]
        subprocess.run([*install, *wanted], check=True)
        part.rename(folder)
    return folder / "bin" / "python"


COMPILED = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from benchmarks.gpu import kernels
for kernel, signature in (
    (kernels.planted_kernel, {"pointer": "*i32"}),
    (kernels.twin_wire_kernel, {"nanoseconds": "i32", "sink": "*i64"}),
):
    print("entry" in compile(ASTSource(kernel, signature, {}), target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


@pytest.mark.slow
def test_all_of_it_runs_with_stand_ins_on_a_bare_machine(tmp_path: Path) -> None:
    """With torch 2.11, Triton 3.6 and what `make gpu` packs; each part's results are there."""
    made = ["make", "gpu", f"VENV={Path(sys.executable).parents[1]}"]
    subprocess.run(made, cwd=ROOT, check=True, capture_output=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).with_name("interpreter"))
    python = bare_environment()

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [python, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    run("-m", "benchmarks.gpu", "--out", str(tmp_path))
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["device"] == command.STAND_IN
    assert {"torch": "2.11.0", "triton": "3.6.0"}.items() <= results["versions"].items()
    example = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    assert shape(results) == shape(example), "the example is of this command, with all of its checks"
    checks = [part["checks"] for part in results["parts"].values() if "checks" in part]
    assert all(all(found.values()) for found in checks)
    assert results["parts"]["bits"]["cases"]["0"] > 0
    environment["TRITON_INTERPRET"] = "0"
    assert run("-c", COMPILED).split() == ["True", "True"]


STEPS = """
from order.gpu import KERNELS, recording
KERNELS["twin_wire_kernel"] = {"sink": "changes"}
with recording() as gpu:
    from benchmarks.gpu import model
    from benchmarks.gpu.twin_group import TwinsRead, Wire
    from megatron_patch.megatron import doors
    print("5 ms:", Wire.seconds_of_5_ms())
    model.one_of(4)
    TwinsRead().checks, Wire.bytes_per_second = False, 1e9
    for method in ("stock", "none", "loco", "loco+exact"):
        with gpu.all_made_here():
            training = model.megatron(model.SHAPES["tiny"], method, bucket=60_000)
            for _ in range(3):
                training.step(1)
        print(method, gpu.machine.found, gpu.machine.operations.count("twin_wire_kernel") > 0)
        training.close()
        doors.disable()
"""


@pytest.mark.slow
def test_the_twins_step_has_no_race_and_no_tensor_of_the_host_on_a_recorded_gpu() -> None:
    """Collectives, on a stream of their own, and the kernel that takes a link's time are ordered."""
    done = subprocess.run(
        [sys.executable, "-c", "from megatron_patch.megatron.cpu import device\ndevice.install()" + STEPS],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    *_, stock, none, loco, exact = done.stdout.splitlines() or [""] * 4
    assert (stock, none) == ("stock [] True", "none [] True"), done.stdout + done.stderr
    assert (loco, exact) == ("loco [] True", "loco+exact [] True"), done.stdout + done.stderr


def shape(found: Any) -> Any:
    """The keys of results, without numbers."""
    if not isinstance(found, dict):
        return None
    return {key: shape(value) for key, value in found.items()}
