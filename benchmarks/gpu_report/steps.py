"""Defines the steps of a report, each of which runs commands in separate processes and reads their output.

A step returns a dictionary for the JSON file. `not_run` says why a step cannot run on this machine, and
`failed` why its command failed, with the end of its output. The report continues in both cases.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_report import trace
from megatron_patch.workflows.run import configuration

Command = Sequence[str]
Run = Callable[[Command, dict[str, str], Path, float], int]
"""Runs (command, additional environment, file for the output, time limit in seconds); returns the status."""

TIMED_OUT = 124
_TESTS = Path(__file__).resolve().parents[2] / "tests" / "quantization" / "test_backends.py"
_CLI = (sys.executable, "-m", "megatron_patch.workflows.cli")


@dataclass(frozen=True)
class Machine:
    """The machine of the report.

    Attributes:
        gpus: the number of GPUs; 0 with `--device cpu`, which shows that the report works, without measuring.
        folder: the folder of runs and logs.
        run: the function that runs commands.
    """

    gpus: int
    folder: Path
    run: Run

    @property
    def on_cpu(self) -> bool:
        return self.gpus == 0

    def command(self, name: str, command: Command, seconds: float, **environment: str) -> tuple[int, str]:
        """Run a command; return its exit status and its output, which is also written to logs/NAME.txt."""
        log = self.folder / "logs" / f"{name}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        status = self.run(command, environment, log, seconds)
        return status, log.read_text(encoding="utf-8", errors="replace")


def run_command(command: Command, environment: dict[str, str], log: Path, seconds: float) -> int:
    """Run a command, as the `Run` of a real machine; after the time limit end it and its children."""
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 15)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
            return TIMED_OUT


def _failed(status: int, output: str) -> dict[str, Any]:
    why = "it took too long" if status == TIMED_OUT else f"exit status {status}"
    return {"failed": why, "end_of_output": output[-1500:]}


def environment(machine: Machine, seconds: float) -> dict[str, Any]:
    """Record the versions, the GPUs, and how they are connected."""
    status, output = machine.command("doctor", [*_CLI, "doctor"], seconds)
    found: dict[str, Any] = {"doctor": output, "python": platform.python_version(), "gpus": machine.gpus}
    for name, query in {"gpu": ["-L"], "topology": ["topo", "-m"], "state": []}.items():
        if shutil.which("nvidia-smi"):
            found[name] = machine.command(name, ["nvidia-smi", *query], 60)[1]
    return found if status == 0 else found | _failed(status, output)


def tests(machine: Machine, seconds: float) -> dict[str, Any]:
    """Run the kernels' tests on the GPU."""
    choice, interpret = ("gpu", "0") if not machine.on_cpu else ("native and not random", "1")
    command = [sys.executable, "-m", "pytest", "-q", str(_TESTS), "-k", choice]
    status, output = machine.command("tests", command, seconds, TRITON_INTERPRET=interpret)
    counts = {
        what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)", output)
    }
    return counts if status in (0, 5) else counts | _failed(status, output)


def kernels(machine: Machine, seconds: float) -> dict[str, Any]:
    """Compare the kernels with a copy, in one process for each number of bits and dtype."""
    found: dict[str, Any] = {}
    size = ["--device", "cpu", "--elements", "262144", "--seconds", "0.05"] if machine.on_cpu else []
    for dtype in ("fp32", "bf16"):
        for bits in ("4", "2"):
            name, file = f"{dtype}, {bits} bits", machine.folder / f"kernels-{dtype}-{bits}.json"
            flags = ["--dtype", dtype, "--bits", bits, "--json", str(file), *size]
            command = [*_CLI, "bench", "kernels", *flags]
            status, output = machine.command(f"kernels-{dtype}-{bits}", command, seconds / 4)
            found[name] = json.loads(file.read_text()) if status == 0 else _failed(status, output)
    return found


def exchanges(machine: Machine, seconds: float) -> dict[str, Any]:
    """Compare one bucket's exchange with Megatron's in bf16, over NCCL, or with one GPU over gloo."""
    ranks = max(machine.gpus, 2)
    elements, runs = ("65536", "2") if machine.on_cpu else ("40000000", "20")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
        *("-m", "benchmarks.gpu_report.exchanges", "--elements", elements, "--runs", runs),
    ]
    status, output = machine.command("exchanges", command, seconds, OMP_NUM_THREADS="1")
    lines = [line for line in output.splitlines() if line.startswith('{"ranks"')]
    return json.loads(lines[-1]) if status == 0 and lines else _failed(status, output)


def deepspeed(machine: Machine, seconds: float) -> dict[str, Any]:
    """Compare the kernels with DeepSpeed's, if it is installed."""
    if importlib.util.find_spec("deepspeed") is None:
        return {"not_run": "deepspeed is not installed (pip install deepspeed; its kernels need nvcc)"}
    if machine.on_cpu:
        return {"not_run": "no GPU"}
    command = [sys.executable, "-m", "benchmarks.gpu_report.deepspeed_kernels"]
    status, output = machine.command("deepspeed", command, seconds)
    lines = [line for line in output.splitlines() if line.startswith('{"elements"')]
    return json.loads(lines[-1]) if status == 0 and lines else _failed(status, output)


METHODS = {"stock": ["none"], "LoCo": ["loco"], "LoCo, exact gather": ["loco", "exact"]}


def training(machine: Machine, seconds: float) -> dict[str, Any]:
    """Train with each method, and profile two steps."""
    return {
        name: _train(machine, name, seconds / len(METHODS), method[0], exact="exact" in method, profile=True)
        for name, method in METHODS.items()
    }


def connections(machine: Machine, seconds: float) -> dict[str, Any]:
    """Measure the step with 1, 8 and 32 hardware queues (CUDA_DEVICE_MAX_CONNECTIONS)."""
    return {
        number: _train(
            machine, f"connections {number}", seconds / 3, "loco", CUDA_DEVICE_MAX_CONNECTIONS=number
        )
        for number in ("1", "8", "32")
    }


def sanitizers(machine: Machine, seconds: float) -> dict[str, Any]:
    """Check stream order by torch's sanitizer, and memory by compute-sanitizer."""
    if machine.on_cpu:
        return {"not_run": "no GPU"}
    found = {"torch": _train(machine, "csan", seconds / 2, "loco", steps=4, TORCH_CUDA_SANITIZER="1")}
    log = machine.folder / "logs" / "csan.txt"
    if log.exists():
        found["torch"]["races"] = log.read_text(encoding="utf-8", errors="replace").count("CSAN detected")
    if not shutil.which("compute-sanitizer"):
        return found | {"compute-sanitizer": {"not_run": "it is not installed"}}
    command = ["compute-sanitizer", "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q", "-x"]
    status, output = machine.command(
        "compute-sanitizer",
        [*command, str(_TESTS), "-k", "gpu and decompress"],
        seconds / 2,
        TRITON_INTERPRET="0",
    )
    errors = re.findall(r"ERROR SUMMARY: (\d+) error", output)
    clean = {"errors": int(errors[-1]) if errors else 0}
    return found | {"compute-sanitizer": clean if status == 0 else clean | _failed(status, output)}


def _train(
    machine: Machine,
    name: str,
    seconds: float,
    method: str,
    exact: bool = False,
    profile: bool = False,
    steps: int | None = None,
    **environment: str,
) -> dict[str, Any]:
    """Make one training run, and return the parts of its summary and trace that are reported."""
    out = machine.folder / "runs" / re.sub(r"\W+", "-", name)
    overrides = _overrides(machine, steps or (4 if machine.on_cpu else 40), profile)
    if method != "none":
        overrides.append(f"compression.weight_gather={'exact' if exact else 'stock'}")
        overrides.append("compression.start_step=0")
    recipe = "llama_tiny_bf16.yaml" if machine.on_cpu else "llama_350m.yaml"
    command = [
        *(*_CLI, "train", str(configuration.shipped("configs/models") / recipe), *overrides),
        *("--with", str(configuration.method_recipe(method)), "--out", str(out), "--overwrite"),
    ]
    status, output = machine.command(re.sub(r"\W+", "-", name), command, seconds, **environment)
    if status != 0:
        return _failed(status, output)
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    kept = (
        *("step_seconds", "compression_seconds_per_step", "tokens_per_second", "peak_memory_bytes"),
        *("gradient_wire", "weight_wire", "buffer_bytes", "compensation_bytes", "train_loss", "device"),
    )
    found = {key: summary[key] for key in kept if key in summary} | {"ranks": summary["world_size"]}
    traces = sorted((out / "torch_profile").glob("rank-*.json.gz"))
    if profile and traces:
        found["trace"] = trace.summary(trace.read(traces[0]))
    return found


def _overrides(machine: Machine, steps: int, profile: bool) -> list[str]:
    """Return the overrides for a short run on text that every machine has."""
    overrides = [
        f"megatron.train_iters={steps}",
        "megatron.lr_warmup_iters=2",
        "megatron.eval_interval=100000",
    ]
    overrides += ["megatron.save_interval=100000", "megatron.log_interval=1"]
    if machine.on_cpu:
        overrides += ["launch.nproc_per_node=2"]
    else:
        ranks = machine.gpus
        overrides += ["data.path=data/stdlib", "data.source=stdlib", "data.tokenizer=bytes"]
        overrides += [f"launch.nproc_per_node={ranks}", "megatron.micro_batch_size=4"]
        overrides += [f"megatron.global_batch_size={4 * ranks}", f"megatron.lr_decay_iters={steps}"]
        if importlib.util.find_spec("transformer_engine") is None:
            overrides += ["megatron.transformer_impl=local", "megatron.cross_entropy_loss_fusion=false"]
            overrides += ["megatron.no_rope_fusion=true"]
        if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
            overrides += ["megatron.no_gradient_accumulation_fusion=true"]
    if profile:
        begin = max(steps - 3, 1)
        overrides += ["megatron.profile=true", "megatron.use_pytorch_profiler=true"]
        overrides += [f"megatron.profile_step_start={begin}", f"megatron.profile_step_end={begin + 2}"]
    return overrides
