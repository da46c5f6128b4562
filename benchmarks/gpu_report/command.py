"""`python -m benchmarks.gpu_report`: all checks and measurements of a machine's GPUs, in at most 40 minutes.

    environment   versions, GPUs, links          tests        the kernels' tests on the GPU
    kernels       beside a copy                  deepspeed    beside DeepSpeed's, where it is installed
    exchanges     beside Megatron's reduce-scatter, over NCCL
    training      stock, LoCo, exact gather; a trace by stream
    connections   CUDA_DEVICE_MAX_CONNECTIONS 1, 8, 32
    sanitizers    torch's, and compute-sanitizer

The folder gets report.md (one page), report.json (all numbers), steps/ (a file for each step that is done),
runs/ and logs/. The same command resumes with the steps that are not done. When a step fails, the report says
so, and the next one runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_report import steps
from benchmarks.gpu_report.page import page
from benchmarks.gpu_report.steps import Machine, Run, run_command
from megatron_patch.errors import UserError
from megatron_patch.files import output_folder, write_whole

MINUTES = 40
STEPS: dict[str, tuple[Callable[[Machine, float], dict[str, Any]], float]] = {
    "environment": (steps.environment, 2),
    "tests": (steps.tests, 8),
    "kernels": (steps.kernels, 8),
    "deepspeed": (steps.deepspeed, 4),
    "exchanges": (steps.exchanges, 4),
    "training": (steps.training, 12),
    "connections": (steps.connections, 9),
    "sanitizers": (steps.sanitizers, 8),
}
"""Each step and its time limit in minutes; all together take at most `--minutes`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m benchmarks.gpu_report`."""
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-report"), metavar="DIR", help="the folder")
    parser.add_argument(
        "--device",
        default="cuda",
        choices=["cuda", "cpu"],
        help="cpu: small stand-ins, which show that the report works and measure nothing",
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"in all; default {MINUTES}")
    parser.add_argument("--only", metavar="A,B", help=f"these steps alone: {', '.join(STEPS)}")
    parser.add_argument("--again", action="store_true", help="run steps that are done already, too")


def run(args: argparse.Namespace, runner: Run = run_command) -> int:
    """Run the steps and write the report; return exit status 1 if a step failed."""
    names = list(STEPS) if args.only is None else [name.strip() for name in args.only.split(",")]
    if unknown := [name for name in names if name not in STEPS]:
        raise UserError(f"--only: {', '.join(unknown)}: no such step; there are {', '.join(STEPS)}")
    machine = Machine(_gpus() if args.device == "cuda" else 0, args.out, runner)
    folder = args.out / "steps"
    output_folder(folder)
    end = time.monotonic() + 60 * args.minutes
    for name in names:
        path = folder / f"{name}.json"
        if path.exists() and not args.again and _done(path, machine):
            print(f"{name}: done already", flush=True)
            continue
        step, most = STEPS[name]
        seconds = min(60 * most, end - time.monotonic())
        began = time.monotonic()
        found = step(machine, seconds) if seconds > 20 else {"not_run": "no time remained"}
        took = time.monotonic() - began
        content = {"gpus": machine.gpus, "seconds": round(took, 1), "found": found}
        write_whole(path, json.dumps(content, indent=2) + "\n")
        print(f"{name}: {_state(found)} ({took:.0f} s)", flush=True)
    report = {
        name: json.loads((folder / f"{name}.json").read_text()) for name in STEPS if _is_there(folder, name)
    }
    write_whole(args.out / "report.json", json.dumps(report, indent=2) + "\n")
    write_whole(args.out / "report.md", page(report))
    print(f"{args.out / 'report.md'}  {args.out / 'report.json'}")
    return int(any(problems(one["found"]) for one in report.values()))


def _gpus() -> int:
    import torch

    if not torch.cuda.is_available():
        raise UserError("gpu-report: no GPU is there; --device cpu shows what it does, with stand-ins")
    return torch.cuda.device_count()


def _is_there(folder: Path, name: str) -> bool:
    return (folder / f"{name}.json").exists()


def _done(path: Path, machine: Machine) -> bool:
    """Whether a step has succeeded on as many GPUs as there are now."""
    content = json.loads(path.read_text(encoding="utf-8"))
    out_of_time = content["found"].get("not_run") == "no time remained"
    return content["gpus"] == machine.gpus and not problems(content["found"]) and not out_of_time


def problems(found: Any) -> list[str]:
    if not isinstance(found, dict):
        return []
    own = [str(found["failed"])] if found.get("failed") else []
    return own + [line for value in found.values() for line in problems(value)]


def _state(found: dict[str, Any]) -> str:
    if "not_run" in found:
        return f"not run: {found['not_run']}"
    return "; ".join(["failed", *problems(found)]) if problems(found) else "done"
