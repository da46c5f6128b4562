"""A run before it starts: its data prepared, its configuration turned into flags that Megatron accepts."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_patch.errors import UserError
from megatron_patch.megatron.checkpoint import tracker
from megatron_patch.workflows.data.files import beside, check_dataset, load_manifest
from megatron_patch.workflows.data.installed import parse_source
from megatron_patch.workflows.run import checkpoints, configuration, dry_run, launcher, recipes
from megatron_patch.workflows.run.configuration import RunConfig


@dataclass(frozen=True)
class PreparedRun:
    """A run that has been checked as far as one can without starting it."""

    run: RunConfig
    job: launcher.Job
    args: argparse.Namespace
    """Megatron's own, parsed and validated."""

    @property
    def steps(self) -> int:
        return self.args.train_iters or 0

    @property
    def folder(self) -> Path:
        return self.job.folder

    @property
    def checkpoints(self) -> Path:
        """Where the run saves, and resumes from."""
        return checkpoints.place(self.run, self.folder)


def prepare_run(run: RunConfig, folder: Path, *, dry: bool = False, cache: Path | None = None) -> PreparedRun:
    """Prepare the data, resolve and check the flags. Imports Megatron (on CPU with its stand-ins).

    With `dry` nothing is written, and neither data nor GPUs nor the other nodes have to be there. `cache` is
    where Megatron keeps the data set's shuffled index, beside the data set if None: it writes without a lock,
    so that runs that begin at the same time with the same seed each need one of their own.
    """
    if not dry:
        _check_nodes(run.launch)
    script = recipes.find(run.launch.script or "")
    if not recipes.is_file(script):
        raise UserError(f"launch.script: {run.launch.script!r}: no such file")
    checkpoints.refuse_other_checkpoints(run, folder)
    on_cpu = run.launch.device == "cpu"
    if on_cpu:
        from megatron_patch.megatron.cpu import device as cpu_device

        cpu_device.install()
    elif dry:  # importing Megatron would warn that there is no GPU
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from megatron_patch.workflows.run import megatron_flags

    parser = megatron_flags.build_parser()
    settings = {**(cpu_device.CPU_FLAGS if on_cpu else {}), **run.megatron}
    # The user's own keys are looked at before minutes go into preparing data.
    megatron_flags.flags_of(settings, parser)
    data = dry_run.data_settings(run) if dry else _data_settings(run)
    settings = {**data, **_folder_settings(run, folder, cache), **settings}
    flags = [
        *megatron_flags.flags_of(settings, parser),
        *megatron_flags.compression_flags(run.compression, run.attach),
        *("--compression-device", run.launch.device, "--compression-output", str(folder)),
    ]
    job = launcher.Job(run.launch, script, flags, folder)
    with _environment(job.variables()), contextlib.nullcontext() if on_cpu else dry_run.assumed_gpu():
        args = megatron_flags.check(run, flags, parser)
    if on_cpu and not dry:  # it imports transformers: once here, and not in every rank that is forked
        importlib.import_module("megatron.core.tokenizers.text")
    return PreparedRun(run, job, args)


def _check_nodes(launch: configuration.Launch) -> None:
    """What a run needs and a plan does not: GPUs, and the way to the other nodes."""
    if launch.nnodes > 1 and not launch.rdzv_endpoint:
        raise UserError(
            f"launch.nnodes: {launch.nnodes} needs launch.rdzv_endpoint, host:port of the first node "
            "(configs/clusters; --dry-run shows the command without)"
        )
    if launch.nnodes > 1 and str(launch.rdzv_endpoint).partition(":")[0] == "localhost":
        raise UserError(
            f"launch.rdzv_endpoint: {launch.rdzv_endpoint!r} is another machine on each of "
            f"{launch.nnodes} nodes; name the first one (configs/clusters take it from MASTER_ADDR)"
        )
    if launch.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError(
                "launch.device: 'cuda', but no GPU is visible here; use --dry-run to look at the command, "
                "launch.device=cpu to run without"
            )
    elif launch.nnodes > 1 and not os.environ.get("GLOO_SOCKET_IFNAME"):
        raise UserError(
            f"launch.nnodes: {launch.nnodes} with launch.device cpu needs the environment variable "
            "GLOO_SOCKET_IFNAME, the network interface that leads to the other nodes, e.g. eth0"
        )


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Within the block the environment that ranks will have: Megatron's validation looks at it."""
    before = os.environ.copy()
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def _data_settings(run: RunConfig) -> dict[str, Any]:
    data = run.data
    if data.path is None:
        for prefix in dry_run.named_prefixes(run):
            check_dataset(Path(prefix))
        return {}
    tokenizer = data.tokenizer
    for path, source in data.parts:
        if source is None:
            check_dataset(Path(path))
        else:
            from megatron_patch.workflows.data.command import prepare

            known = load_manifest(Path(path)) is not None
            prepare(parse_source(source), Path(path), tokenizer=tokenizer, quiet=known)
        if tokenizer.startswith("bpe"):  # trained on the training data, and used for the other parts
            tokenizer = str(beside(Path(data.path), "-tokenizer"))
    found = load_manifest(Path(data.path))
    return {**data.path_flags, **(found.megatron_flags if found else {})}


def _folder_settings(run: RunConfig, folder: Path, cache: Path | None) -> dict[str, Any]:
    settings: dict[str, Any] = {"tensorboard_dir": str(folder / "tensorboard")}
    own = checkpoints.place(run, folder)
    if run.megatron.get("save_interval") is not None:
        settings["save"] = str(own)
    if "save" in settings or tracker.latest(own) is not None:
        settings["load"] = str(own)
    if run.data.path is not None:
        settings["data_cache_path"] = str(cache or f"{run.data.path}-cache")
    return settings
