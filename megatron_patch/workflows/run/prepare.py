"""A run before it starts: its data prepared, its configuration turned into flags that Megatron accepts.

A dry run shows what that comes to, checked by Megatron's own parser and validation for all of the job's
ranks. It writes nothing, and needs neither the data set nor a GPU: what a data set would add to the flags is
known from its tokenizer, and Megatron's questions about the GPU are answered for a Hopper one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_patch.errors import UserError
from megatron_patch.megatron import patching
from megatron_patch.megatron.checkpoint import tracker
from megatron_patch.workflows.data.corpus import parse_source
from megatron_patch.workflows.data.files import beside, check_dataset, is_whole, load_manifest
from megatron_patch.workflows.data.files import megatron_flags as tokenizer_flags
from megatron_patch.workflows.run import run_folder
from megatron_patch.workflows.run.configuration import Data, RunConfig, find, is_file
from megatron_patch.workflows.run.job import Job, Launch


@dataclass(frozen=True)
class PreparedRun:
    """A run that has been checked as far as one can without starting it."""

    run: RunConfig
    job: Job
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
        return run_folder.place(self.run, self.folder)


def prepare_run(run: RunConfig, folder: Path, *, dry: bool = False, cache: Path | None = None) -> PreparedRun:
    """Prepare the data, resolve and check the flags. Imports Megatron (on CPU with its stand-ins).

    With `dry` nothing is written, and neither data nor GPUs nor the other nodes have to be there. `cache` is
    where Megatron keeps the data set's shuffled index, beside the data set if None: it writes without a lock,
    so that runs that begin at the same time with the same seed each need one of their own.
    """
    if not dry:
        _check_nodes(run.launch)
    script = find(run.launch.script or "")
    if not is_file(script):
        raise UserError(f"launch.script: {run.launch.script!r}: no such file")
    run_folder.refuse_other_checkpoints(run, folder)
    on_cpu = run.launch.device == "cpu"
    if on_cpu:
        from megatron_patch.megatron.cpu import device as cpu_device

        cpu_device.install()
    elif dry:  # importing Megatron would warn that there is no GPU
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from megatron_patch.workflows.run import megatron_flags

    parser = megatron_flags.build_parser()
    settings = {**(cpu_device.CPU_FLAGS if on_cpu else {}), **run.megatron}
    # The user's own keys and values are looked at before minutes go into preparing data.
    parser.parse_args(megatron_flags.flags_of(settings, parser))
    data = planned_data(run) if dry else prepared_data(run)
    settings = {**data, **_folder_settings(run, folder, cache), **settings}
    flags = [
        *megatron_flags.flags_of(settings, parser),
        *megatron_flags.compression_flags(run.compression, run.attach),
        *("--compression-device", run.launch.device, "--compression-output", str(folder)),
    ]
    job = Job(run.launch, script, flags, folder)
    with _environment(job.variables()), contextlib.nullcontext() if on_cpu else assumed_gpu():
        args = megatron_flags.check(run, flags, parser)
    if on_cpu and not dry:  # it imports transformers: once here, and not in every rank that is forked
        importlib.import_module("megatron.core.tokenizers.text")
    return PreparedRun(run, job, args)


def _check_nodes(launch: Launch) -> None:
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
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def assumed_gpu() -> Iterator[None]:
    """Within the block Megatron's validation, which asks for the GPU's generation, sees Hopper's.

    Only where there is no GPU: a run on GPUs is checked against the one it finds.
    """
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability() > (0, 0):  # cpu_device's stand-in
        yield
        return
    hopper = {
        "torch.cuda:get_device_capability": lambda device=None: (9, 0),
        "torch.cuda:get_device_properties": lambda device=None: SimpleNamespace(major=9, minor=0),
    }
    with patching.swapped(hopper):
        yield


def _folder_settings(run: RunConfig, folder: Path, cache: Path | None) -> dict[str, Any]:
    settings: dict[str, Any] = {"tensorboard_dir": str(folder / "tensorboard")}
    own = run_folder.place(run, folder)
    if run.megatron.get("save_interval") is not None:
        settings["save"] = str(own)
    if "save" in settings or tracker.latest(own) is not None:
        settings["load"] = str(own)
    if run.data.path is not None:
        settings["data_cache_path"] = str(cache or f"{run.data.path}-cache")
    return settings


# --- the data set ----------------------------------------------------------------------------------------


def prepared_data(run: RunConfig) -> dict[str, Any]:
    """The flags that name the data set of a run, which is prepared if it has a source and is not there."""
    data = run.data
    if data.path is None:
        for prefix in _named_prefixes(run):
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


def planned_data(run: RunConfig) -> dict[str, Any]:
    """The same flags as if the data set were there already."""
    data = run.data
    if data.path is None:
        return {}
    prefix = Path(data.path)
    found = load_manifest(prefix)
    kind = found.tokenizer if found else data.tokenizer.partition(":")[0]
    if found is None and data.source is None and is_whole(prefix):
        return {**data.path_flags}  # made by other means: the flags of its tokenizer stand in megatron:
    return {**data.path_flags, **tokenizer_flags(kind, prefix)}


def _named_prefixes(run: RunConfig) -> list[str]:
    """The data sets of megatron.data_path, Megatron's own form: weights and prefixes in turn."""
    named = map(str, run.megatron.get("data_path") or [])
    return [text for text in named if not re.fullmatch(r"[\d.]+(e[+-]?\d+)?", text, re.IGNORECASE)]


# --- what a dry run prints -------------------------------------------------------------------------------


def shown(run: RunConfig, job: Job, notes: Sequence[str] = ()) -> str:
    """What a dry run prints: comments, `notes` among them, the command, the resolved configuration."""
    launch = run.launch
    nodes = f" on {launch.nnodes} nodes, this is node {launch.node_rank}" if launch.nnodes > 1 else ""
    lines = [f"# {launch.world_size} ranks{nodes}; nothing is started", f"# {data_line(run)}"]
    if launch.nnodes > 1 and not launch.rdzv_endpoint:
        lines.append("# FIRST_NODE: launch.rdzv_endpoint is not set; a run needs it (configs/clusters)")
    lines += [f"# {note}" for note in notes]
    return "\n".join([*lines, job.command_text(), "# configuration", run.as_yaml().rstrip()])


def data_line(run: RunConfig) -> str:
    """One line on the data: there already, prepared by the run itself, or to be prepared first."""
    data = run.data
    if data.path is None:
        missing = [text for text in _named_prefixes(run) if not is_whole(Path(text))]
        if missing:
            return f"data: needed, and not there: {', '.join(missing)} (.bin and .idx)"
        named = "as megatron.data_path says" if run.megatron.get("data_path") else None
        return f"data: {named or 'made up by Megatron (megatron.mock_data)'}"
    return "\n# ".join(_part_line(data, path, source) for path, source in data.parts)


def _part_line(data: Data, path: str, source: str | None) -> str:
    if is_whole(Path(path)):
        return f"data: {path}.bin and .idx are there"
    if source is not None:
        return f"data: {path} would be prepared from {source}, tokenizer {data.tokenizer}"
    command = f"megatron-loco prepare-data TEXTS --out {path} --tokenizer {data.tokenizer}"
    return f"data: {path}.bin and .idx are needed, and not there: {command}"
