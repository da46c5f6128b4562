"""`python -m benchmarks.gpu`: its driver, its page, and all of its parts with stand-ins on the CPU."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import command, page
from benchmarks.gpu.command import Part
from benchmarks.gpu.part import MARK
from megatron_patch.errors import UserError
from megatron_patch.workflows.plan import constants

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = constants.RESULTS / "of_a_cpu.json"


def python(code: str, seconds: float = 60.0) -> Part:
    return Part(code[:20], seconds, code, "", "")


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

    good = tells({"checks": {"a": True}}) + tells({"checks": {"b": True}})
    hangs = tells({"rates": {"x": 1}}) + "import time\ntime.sleep(1000)"
    parts = [
        Part("fails", 60, tells({"checks": {"c": False}}) + "raise SystemExit(3)", "", ""),
        Part("hangs", 3, hangs, "", "", alone=True),
        Part("good", 60, good, "", "", alone=True),
    ]
    status, results = driven(monkeypatch, tmp_path, parts)
    assert status == 1
    found = results["parts"]
    assert found["fails"]["checks"] == {"c": False}
    assert found["fails"]["status"] == 3
    assert found["hangs"]["rates"] == {"x": 1}
    assert found["hangs"]["status"] == "stopped at its limit"
    assert found["good"]["checks"] == {"a": True, "b": True}
    told = capsys.readouterr().out
    assert "fails: ended with 3; FAILED: c" in told
    assert "good: done" in told
    assert driven(monkeypatch, tmp_path, parts[2:])[0] == 0


def test_a_part_without_time_or_program_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = command.Results(tmp_path, [python("pass"), python("1", 0.0)])
    monkeypatch.setattr(command, "command_of", lambda *_: ["compute-sanitizer-of-nobody"])
    for part in results.parts:
        results.run(part, end=float("inf"))
    first, second = (part.found["not_run"] for part in results.parts)
    assert first == "compute-sanitizer-of-nobody is not installed"
    assert second == "no time remained"


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    args = argparse.Namespace(out=tmp_path / "new", seconds=60.0, only="rates,bit")
    with pytest.raises(UserError, match=r"--only: bit: no such part; there are ranks 2, ranks 4, "):
        command.run(args)
    assert not (tmp_path / "new").exists()


def test_by_their_limits_all_parts_take_eight_minutes(tmp_path: Path) -> None:
    parts = command.parts(tmp_path)
    at_once = max(part.seconds for part in parts if not part.alone)
    assert at_once + sum(part.seconds for part in parts if part.alone) <= command.SECONDS
    assert command.SECONDS <= 490 - 20, "the machine is looked at, too"


def test_a_rank_that_fails_ends_the_others_and_rank_0_alone_tells(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = (
        "import os, time\nfrom benchmarks.gpu.part import tell\nrank = os.environ['RANK']\n"
        "tell(checks={rank + ' of ' + os.environ['WORLD_SIZE']: True})\n"
        "raise SystemExit(5) if rank == '1' else time.sleep(1000)"
    )
    part = Part("ranks", 60, code, "", "", ranks=lambda gpus: 2)
    status, results = driven(monkeypatch, tmp_path, [part])
    assert status == 1
    assert results["parts"]["ranks"]["status"] == 5
    assert results["parts"]["ranks"]["seconds"] < 60
    assert results["parts"]["ranks"]["checks"] == {"0 of 2": True}


def test_a_line_that_another_process_wrote_into_is_of_the_log(tmp_path: Path) -> None:
    part = python("")
    command.Results(tmp_path, [part])._read(
        part, [f"{MARK}{{}}Traceback", f'{MARK}{{"checks": {{"a": true}}}}']
    )
    assert part.found == {"checks": {"a": True}}
    assert part.log == [f"{MARK}{{}}Traceback"]


def test_several_gpus_are_used(tmp_path: Path) -> None:
    parts = command.parts(tmp_path)
    ranks = {gpus: {part.name: part.ranks(gpus) for part in parts} for gpus in (0, 1, 2, 8)}
    alone = {"ranks 2": 2, "FSDP2": 2, "ranks 4": 4}
    steps = ("step 350m", "step 1.3b", "1 queue", "32 queues")
    for gpus, several in {
        0: alone,
        1: alone,
        2: alone | dict.fromkeys(steps, 2),
        8: alone | {"ranks 4": 8} | dict.fromkeys(steps, 8),
    }.items():
        assert {name: count for name, count in ranks[gpus].items() if count > 1} == several
        checked = [part.name for part in parts if "sanitizer" in command.command_of(part, gpus)[0]]
        assert checked == (["memory", "planted"] if gpus else [])


MEMCHECK = """\
========= Invalid __global__ write of size 4 bytes
=========     at {kernel}+0x90 in planted.py:1
========= ERROR SUMMARY: 1 error
"""
FOUND, CLEAN = "the planted error is found", "no error is found"


@pytest.mark.parametrize(
    ("name", "kernels", "told"),
    [
        ("planted", ["planted_kernel"], {"checks": {FOUND: True}, "status": 0}),
        ("planted", [], {"checks": {FOUND: False}}),
        ("planted", ["planted_kernel", "compress_kernel"], {"checks": {FOUND: False}}),
        ("memory", [], {"checks": {CLEAN: True}}),
        ("memory", ["void at::native::fill"], {"checks": {CLEAN: False}}),
    ],
)
def test_what_compute_sanitizer_says(name: str, kernels: list[str], told: dict[str, Any]) -> None:
    part = Part(name, 1, "", "", "", memcheck=True)
    part.log = [MEMCHECK.format(kernel=kernel) for kernel in kernels]
    assert command._of_memcheck(part) == told


RACE = """
import torch
from torch.cuda._sanitizer import EventHandler
from benchmarks.gpu.sanitized import races
weights, sums = torch.zeros(8), torch.zeros(8)
handler, arguments = EventHandler(), {"weights": weights, "sums": sums}
found = [len(races(handler, stream, kernel, arguments)) for stream, kernel in
         ((1, "sums_kernel"), (1, "sums_kernel"), (2, "sums_kernel"), (2, "of_torch"))]
handler._handle_device_synchronization()
print(found, len(races(handler, 3, "sums_kernel", arguments)))
"""


def test_torch_s_sanitizer_finds_a_race_that_is_planted_between_launches() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RACE],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["[0, 0, 1, 0] 0"], done.stdout + done.stderr


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


def of_a_gpu(**changes: Any) -> dict[str, Any]:
    """The example, as if a GPU had made it."""
    results: dict[str, Any] = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    return results | {"device": "NVIDIA H100 80GB HBM3", "gpus": 1, "date": "2027-01-02"} | changes


def test_the_pages_say_what_the_newest_results_say() -> None:
    every = list(constants.newest(constants.RESULTS).values())
    for path, text in page.pages(every).items():
        assert path.read_text(encoding="utf-8") == text, "run python -m benchmarks.gpu.page"


def test_the_sentence_counts_checks_and_names_what_failed() -> None:
    results = of_a_gpu()
    checks = sum(len(part.get("checks", {})) for part in results["parts"].values())
    of = "on 1 GPU (NVIDIA H100 80GB HBM3, 2027-01-02)"
    assert page.sentence([results]) == f"{of} {checks} of {checks} checks passed"
    results["parts"]["bits"]["checks"]["the CPU's bytes"] = False
    results["parts"]["rates"]["not_run"] = "no time remained"
    wrong = "bits: FAILED: the CPU's bytes; rates: not run: no time remained"
    assert page.sentence([results]) == f"{of} {checks} of {checks + 1} checks passed; **{wrong}**"


def test_the_table_has_a_column_a_gpu_and_says_what_was_not_run() -> None:
    results = of_a_gpu()
    del results["parts"]["planted"]
    step = results["parts"]["step 1.3b"]["methods"]
    for method, seconds in {"stock": 0.3, "stock_bf16": 0.24, "loco": 0.2}.items():
        step[method]["100 Gbit/s"]["median"] = seconds
    del step["loco+exact"]["100 Gbit/s"]
    results["parts"]["rates"]["rates"]["copy_bytes"] = 2.98e12
    table = page.table([results])
    cells = dict(line.strip("| ").split(" | ") for line in table.strip().splitlines())
    assert cells["what"] == "NVIDIA H100 80GB HBM3, 2027-01-02"
    assert cells["compute-sanitizer finds an error that is planted"] == "not run yet"
    assert cells["step, 1.3 B parameters, 100 Gbit/s"] == "300; 1.25 x; 1.50 x; not run yet"
    assert cells["step, 1.3 B parameters, its own links"] == "not run yet"
    assert cells["a copy, 10^12 bytes/s"] == "2.98"
    assert cells["GPU kernels' bytes are the CPU kernels' and the reference's"].startswith("yes (6 checks, ")
    assert not any("not run yet" in value for name, value in cells.items() if "gradients:" in name)
    assert {"not run yet"} == {line.strip("| ").split(" | ")[1] for line in page.table([]).split("\n")[4:-2]}


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
CHECKS = {
    "ranks 2": 16,
    "ranks 4": 16,
    "FSDP2": 4,
    "bits": 6,
    "small step": 10,
    "small rates": 2,
    "memory": 1,
    "stream order": 3,
    "rates": 2,
    "step 350m": 10,
    "step 1.3b": 5,
    "1 queue": 5,
    "32 queues": 5,
}
"""How many checks of each part a CPU makes."""


@pytest.mark.slow
def test_all_of_it_runs_with_stand_ins_on_a_bare_machine(tmp_path: Path) -> None:
    """With torch 2.11, Triton 3.6, NumPy 2.5, and what `make gpu` packs; each part's results are there."""
    made = ["make", "gpu", f"VENV={Path(sys.executable).parents[1]}"]
    packed = subprocess.run(made, cwd=ROOT, check=True, capture_output=True, text=True)
    assert "python3 -m benchmarks.gpu --out DIR" in packed.stdout
    python, out = bare_environment(), tmp_path / "out"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).with_name("interpreter"))

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [python, "-m", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    run("benchmarks.gpu", "--out", str(out))
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert results["device"] == command.STAND_IN
    versions = {"torch": "2.11.0", "triton": "3.6.0", "numpy": "2.5.2", "megatron-core": "0.19.2"}
    assert versions.items() <= results["versions"].items()
    checks = {name: part["checks"] for name, part in results["parts"].items() if "checks" in part}
    assert {name: len(found) for name, found in checks.items()} == CHECKS
    assert all(all(found.values()) for found in checks.values())
    assert results["parts"]["bits"]["cases"]["0"] > 0
    example = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    assert shape(results) == shape(example), "the example is of this command"
    environment["TRITON_INTERPRET"] = "0"
    compiled = subprocess.run(
        [python, "-c", COMPILED], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert compiled.stdout.split() == ["True", "True"], compiled.stderr
    # Several ranks of a step are real.
    environment |= {"PYTHONPATH": os.pathsep.join((environment["PYTHONPATH"], str(ROOT / ".gpu")))}
    environment |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    step = ["-m", "benchmarks.gpu.step", "--model", "tiny", "--steps", "1", "--methods", "stock;loco+exact"]
    told = run("torch.distributed.run", "--nproc-per-node=2", "--master-port=29620", *step)
    lines = [json.loads(line.removeprefix(MARK)) for line in told.splitlines() if line.startswith(MARK)]
    assert lines[0] | {"backend": "gloo", "ranks": 2} == lines[0]
    assert any("its own links" in line.get("methods", {}).get("loco+exact", {}) for line in lines)
    shutil.rmtree(out)


def shape(found: Any) -> Any:
    """The keys of results, without numbers."""
    if not isinstance(found, dict):
        return None
    return {key: shape(value) for key, value in found.items()}
