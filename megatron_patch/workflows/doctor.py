"""`megatron-loco doctor`: what is here, and what is missing for what."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
from importlib import metadata

from packaging.version import Version

from megatron_patch import releases
from megatron_patch.errors import UserError
from megatron_patch.megatron import symbols

_WANTED_FOR = {
    "torch": "everything",
    "megatron-core": "everything",
    "transformer-engine": "--transformer-impl transformer_engine on GPUs: pip install 'megatron-loco[gpu]'",
    "apex": "fused GPU optimizers and gradient accumulation (built in the container)",
    "triton": "fused GPU kernels",
    "emerging-optimizers": "Muon (megatron.optimizer=muon): pip install 'megatron-loco[muon]'",
    "omegaconf": "train, compare, ablate, plan, prepare-data: pip install 'megatron-loco[recipes]'",
    "matplotlib": "report, compare, ablate: pip install 'megatron-loco[report]'",
    "tensorboard": "TensorBoard logs",
    "wandb": "Weights & Biases logs",
}
_REQUIRED = ("torch", "megatron-core")
_TRY = "megatron-loco compare configs/models/llama_tiny_bf16.yaml --methods none,loco"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`megatron-loco doctor` takes no arguments."""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def rows() -> list[tuple[str, str, str]]:
    """Return (what, found, remark) for every line of the table."""
    table: list[tuple[str, str, str]] = [("python", platform.python_version(), "")]
    torch = _version("torch")
    for name, purpose in _WANTED_FOR.items():
        version, lacks = _version(name), []
        remark = f"missing for: {purpose}" if version is None else ""
        if version and name in releases.OLDEST:
            remark = releases.too_old(name, version) or ""
        # With an old torch Megatron may not even load.
        if version and name == "megatron-core" and not (torch and releases.too_old("torch", torch)):
            lacks = list(symbols.unmet())
            remark = _of_megatron(Version(Version(version).base_version), len(lacks))
        table.append((name, version or "-", remark))
        table += [("", "", line) for line in lacks]
    table += _devices()
    cores = len(os.sched_getaffinity(0))
    table.append(("processor", f"{cores} cores", "" if cores >= 2 else "the quick start wants 2"))
    return table


def _of_megatron(release: Version, lacks: int) -> str:
    (first, behind), known = symbols.TESTED, len(symbols.SYMBOLS)
    if lacks:
        return f"{lacks} of {known} symbols that are replaced are not as they were tested:"
    if Version(first) <= release < Version(behind):
        return ""
    whole = f"all {known} symbols that are replaced are there, with the parameters that are read"
    return f"outside the tested range >={first},<{behind}; {whole}"


def _devices() -> list[tuple[str, str, str]]:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch
    import torch.distributed as dist

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    gpus = (
        "gpu",
        f"{len(names)} x {names[0]}" if names else "none",
        "" if names else "runs with launch.device: cpu only",
    )
    from megatron_patch.quantization import backends, native

    nccl = dist.is_nccl_available()
    cpu = torch.device("cpu")
    return [
        gpus,
        *([_gpu_kernels()] if names else []),
        (
            "cpu kernels",
            native.variants()[-1] if native.variants() else "-",
            "" if backends.available(cpu) else backends.describe(cpu),
        ),
        ("cuda (torch)", torch.version.cuda or "-", "" if torch.version.cuda else "missing for: GPU runs"),
        (
            "nccl",
            ".".join(map(str, torch.cuda.nccl.version())) if nccl else "-",
            "" if nccl and names else "not used: no GPU" if nccl else "missing for: GPU runs",
        ),
        (
            "gloo",
            "yes" if dist.is_gloo_available() else "-",
            "" if dist.is_gloo_available() else "missing for: CPU runs",
        ),
    ]


def _gpu_kernels() -> tuple[str, str, str]:
    """Try the kernels of the defaults, as `attach` does before the first step."""
    import torch

    from megatron_patch.config import CompressionConfig
    from megatron_patch.quantization import backends
    from megatron_patch.session.session import Session

    device = torch.device("cuda", torch.cuda.current_device())
    try:
        Session(CompressionConfig(weight_gather="exact"), device)
    except UserError as error:
        return "gpu kernels", "-", str(error)
    return "gpu kernels", backends.describe(device), ""


def run(args: argparse.Namespace) -> int:
    """Print the table; the exit status is 1 if torch or megatron-core is missing, or torch is too old."""
    shown = rows()
    lines = [("what", "found", "remark"), *shown]
    name_width, value_width = (max(len(line[place]) for line in lines) for place in (0, 1))
    for line in lines:
        print(f"{line[0]:{name_width}}  {line[1]:{value_width}}  {line[2]}".rstrip())
    verdict = _verdict({name: value for name, value, _ in shown})
    print(f"\n{verdict}")
    return int(verdict.startswith("No run is possible: "))


def _verdict(values: dict[str, str]) -> str:
    missing = [name for name in _REQUIRED if values[name] == "-"]
    if missing:
        return f"No run is possible: {' and '.join(missing)} missing."
    if old := releases.too_old("torch", values["torch"]):
        return f"No run is possible: {old}."
    works = values.get("gpu", "none") != "none" and "-" not in (values.get("nccl"), values.get("gpu kernels"))
    ready = ["GPU"] if works else []
    ready += ["CPU"] if values.get("gloo") == "yes" else []
    return (
        f"Ready for {' and '.join(ready)} runs. To try one on the CPU: {_TRY}"
        if ready
        else "No run is possible."
    )
