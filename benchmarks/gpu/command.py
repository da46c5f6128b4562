"""`python -m benchmarks.gpu`: what GPUs prove and disprove, in eight minutes and without a network.

    at once     real ranks, bits, two sanitizers, a step and rates at small sizes, which compile kernels
    then alone  rates; steps of 350 M and 1.3 B parameters; CUDA_DEVICE_MAX_CONNECTIONS 1 and 32

With one GPU its ranks share it, and a step is that of one of 8 ranks at simulated links; several GPUs are
used over NCCL. --out gets results.json, written anew after every part and every ten seconds, log.txt, and
profiles. A part that fails or takes too long says so, and the next one runs. Without a GPU small stand-ins on
the CPU show that all of it works, and measure nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import END, MARK, ON_GPU
from megatron_patch.errors import UserError
from megatron_patch.files import output_folder, write_whole

ROOT = Path(__file__).parents[2]
SITE = ROOT / ".gpu"
"""Packages that `make gpu` brings along."""
SECONDS = 470
"""Of all parts, by their limits."""
STAND_IN = "a CPU: stand-ins, no number means anything"
ENOUGH_CORES = 8
"""From so many on parts run at once."""
_LEAST = 8
_VERSIONS = ("torch", "triton", "numpy", "megatron-core", "transformer-engine", "nvidia-nccl-cu13")


@dataclass
class Part:
    """One of the command's processes, and what it has told."""

    name: str
    seconds: float
    """Its limit."""
    module: str
    on_gpu: str
    on_cpu: str
    alone: bool = False
    ranks: Callable[[int], int] = lambda gpus: 1
    """How many there are on a machine with so many GPUs."""
    memcheck: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    """On a GPU."""
    found: dict[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)


def _each(gpus: int) -> int:
    return max(gpus, 1)


def _four(gpus: int) -> int:
    return max(4, min(gpus, 8))


def parts(out: Path) -> list[Part]:
    """Return all parts; profiles go to `out`."""
    tiny, little = "--model tiny --steps 1", "--elements 2048 --runs 1"
    ordered = "--methods stock;stock_bf16;loco;loco+exact"
    queues = "--model 350m --steps 3 --links 100 --methods stock;loco+exact"
    uncached, sanitizer = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, {"TORCH_CUDA_SANITIZER": "1"}
    one, two = ({"CUDA_DEVICE_MAX_CONNECTIONS": number} for number in ("1", "32"))
    return [
        Part("ranks 2", 145, "ranks", "Megatron", "Megatron --model tiny --steps 3", ranks=lambda gpus: 2),
        Part("ranks 4", 145, "ranks", "Megatron --model small", f"Megatron {tiny}", ranks=_four),
        Part("FSDP2", 145, "ranks", "FSDP2", f"FSDP2 {tiny}", ranks=lambda gpus: 2),
        Part("bits", 145, "bits", "", "--processes 1 --size 3000 --seconds 10"),
        Part("small step", 140, "step", "--model small --steps 1 --links none", f"{tiny} --links none"),
        Part("small rates", 140, "rates", "--elements 4194304 --runs 1", little),
        Part("memory", 145, "sanitized", "memory 21", "memory 4", memcheck=True, environment=uncached),
        Part("planted", 60, "sanitized", "planted", "planted", memcheck=True, environment=uncached),
        Part("stream order", 120, "sanitized", "order small", "order tiny", environment=sanitizer),
        Part("rates", 70, "rates", "", little, True),
        Part("step 350m", 90, "step", f"--model 350m --trace {out.resolve()}", tiny, True, _each),
        Part("step 1.3b", 95, "step", f"--model 1.3b --steps 5 {ordered}", f"{tiny} {ordered}", True, _each),
        Part("1 queue", 35, "step", queues, f"{tiny} {ordered} --links 100", True, _each, environment=one),
        Part("32 queues", 35, "step", queues, f"{tiny} {ordered} --links 100", True, _each, environment=two),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m benchmarks.gpu`."""
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="DIR", help="default runs/gpu")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"in all; default {SECONDS}")
    parser.add_argument("--only", metavar="A,B", help="these parts alone")


def run(args: argparse.Namespace) -> int:
    """Run the parts, and return exit status 1 if a check failed or a part did not end."""
    chosen = every = parts(args.out)
    if args.only is not None:
        names = [name.strip() for name in args.only.split(",")]
        chosen = [part for part in every if part.name in names]
        if unknown := set(names) - {part.name for part in every}:
            known = ", ".join(part.name for part in every)
            raise UserError(f"--only: {', '.join(sorted(unknown))}: no such part; there are {known}")
    output_folder(args.out)
    results = Results(args.out, chosen)
    end, over = time.monotonic() + args.seconds, threading.Event()
    regularly = threading.Thread(target=results.write_until, args=(over,), daemon=True)
    regularly.start()
    together = (os.cpu_count() or 1) >= ENOUGH_CORES
    threads = [
        threading.Thread(target=results.run, args=(part, end))
        for part in chosen
        if together and not part.alone
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for part in chosen:
        if part.alone or not together:
            results.run(part, end)
    over.set()
    regularly.join()
    results.write()
    print(args.out / "results.json")
    return int(any(problems(part.found) for part in chosen))


def command_of(part: Part, gpus: int) -> list[str]:
    """Return the command of a part on a machine with so many GPUs; 0: with stand-ins."""
    command = [f"benchmarks.gpu.{part.module}", *(part.on_gpu if gpus else part.on_cpu).split()]
    memcheck = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    checked = [memcheck, "--tool=memcheck", "--error-exitcode=9"] if part.memcheck and gpus else []
    return [*checked, sys.executable, "-W", "ignore", "-m", *command]


def environments(part: Part, gpus: int, port: int, end: float) -> Iterator[dict[str, str]]:
    """Yield the environment of each of a part's processes; several are ranks of this machine."""
    paths = [str(ROOT), str(SITE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    found |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_DEVICE_MAX_CONNECTIONS": "8", "TORCHDYNAMO_DISABLE": "1"}
    found |= {"TRITON_INTERPRET": "0" if gpus else "1", END: str(end)} | (part.environment if gpus else {})
    if (ranks := part.ranks(gpus)) > 1:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        found |= meeting | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    for rank in range(ranks):
        yield found | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})


class Results:
    """Runs parts, and keeps results.json and log.txt up to date."""

    def __init__(self, out: Path, chosen: list[Part]) -> None:
        self.out, self.parts, self._lock = out, chosen, threading.Lock()
        self._began = time.monotonic()
        self.machine = machine()
        self.write()

    def write(self) -> None:
        with self._lock:
            seconds = {"seconds": round(time.monotonic() - self._began, 1)}
            whole = self.machine | seconds | {"parts": {part.name: part.found for part in self.parts}}
            write_whole(self.out / "results.json", json.dumps(whole, indent=1) + "\n")
            logs = [(f"\n===== {part.name}\n", *part.log[:40], *part.log[40:][-360:]) for part in self.parts]
            write_whole(self.out / "log.txt", "".join(line for log in logs for line in log))

    def write_until(self, over: threading.Event) -> None:
        while not over.wait(10):
            self.write()

    def run(self, part: Part, end: float) -> None:
        """Run a part to its end or its limit."""
        began, gpus = time.monotonic(), self.machine["gpus"]
        seconds, command = min(part.seconds, end - began), command_of(part, gpus)
        found: dict[str, Any] = {}
        if seconds < _LEAST:
            found["not_run"] = "no time remained"
        elif not shutil.which(command[0]):
            found["not_run"] = f"{command[0]} is not installed"
        else:
            found["status"] = self._run(part, command, began + seconds, gpus)
            if part.memcheck and gpus:
                found |= _of_memcheck(part)
        with self._lock:
            _join(part.found, found | {"seconds": round(time.monotonic() - began, 1)})
        self.write()
        said = "; ".join(problems(part.found)) or "done"
        print(f"{part.name}: {said} ({part.found['seconds']:.0f} s)", flush=True)

    def _run(self, part: Part, command: list[str], end: float, gpus: int) -> int | str:
        """Run a part's processes, and return the exit status; one that fails ends the others."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        options = pipes | {"text": True, "errors": "replace", "cwd": ROOT, "start_new_session": True}
        port = 29511 + self.parts.index(part)
        every = [
            subprocess.Popen(command, env=environment, **options)
            for environment in environments(part, gpus, port, end)
        ]
        readers = [threading.Thread(target=self._read, args=(part, one.stdout), daemon=True) for one in every]
        for reader in readers:
            reader.start()
        while time.monotonic() < end and any(one.poll() is None for one in every):
            if any(one.poll() for one in every):
                end = min(end, time.monotonic() + 2)  # The others may have something to say, too.
            time.sleep(0.1)
        statuses = [one.poll() for one in every]
        for one in every:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)  # Its children too.
            one.wait()
        for reader in readers:
            reader.join(5)
        failed = [status for status in statuses if status]
        return failed[0] if failed else "stopped at its limit" if None in statuses else 0

    def _read(self, part: Part, lines: Any) -> None:
        for line in lines:
            found: dict[str, Any] = {}
            if line.startswith(MARK):
                with contextlib.suppress(ValueError):  # Another process may have written into the line.
                    found = json.loads(line[len(MARK) :])
            with self._lock:
                _join(part.found, found)
                if not found:
                    part.log.append(line[:2000])


def _join(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _join(into[key], value)
        else:
            into[key] = value


def _of_memcheck(part: Part) -> dict[str, Any]:
    """Return compute-sanitizer's verdict; its exit status is that of the planted error."""
    text = "".join(part.log)
    if "Device not supported" in text:
        return {"not_run": "compute-sanitizer does not know this machine's device", "status": 0}
    at = re.findall(r"=========\s+at (\w+)", text)
    if part.name != "planted":
        return {"checks": {"no error is found": not at}}
    good = bool(at) and set(at) == {"planted_kernel"}
    return {"checks": {"the planted error is found": good}} | ({"status": 0} if good else {})


def problems(found: dict[str, Any]) -> list[str]:
    """Say what is wrong with a part."""
    lines = [f"not run: {found['not_run']}"] if "not_run" in found else []
    if status := found.get("status"):
        lines.append(status if isinstance(status, str) else f"ended with {status}")
    return lines + [f"FAILED: {name}" for name, good in found.get("checks", {}).items() if not good]


def machine() -> dict[str, Any]:
    """Return the date, the device and its driver, and the versions of all that takes part."""
    import torch

    from megatron_patch.quantization import native

    sys.path.append(str(SITE))
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "device": STAND_IN, "gpus": 0}
    if ON_GPU:
        found |= {"device": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
    if ON_GPU and shutil.which("nvidia-smi"):
        asked = "driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
        query = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        told = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
        found["state"] = dict(zip(asked.split(","), "".join(told[:1]).split(", "), strict=False))
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in _VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    if versions["megatron-core"] is None or not native.variants():
        raise UserError(
            f"no megatron-core, or no compiled CPU kernels: run `make gpu` first, and bring {SITE.name} along"
        )
    return found | {"cores": os.cpu_count(), "cpu_kernels": list(native.variants()), "versions": versions}
