"""Prepares a run: its data set, and the flags of its configuration, which Megatron must accept.

A dry run shows the flags after Megatron's own parser and validation have checked them for all of the job's
ranks. It writes nothing, and needs neither the data set nor a GPU: the flags that a data set adds follow from
its tokenizer, and Megatron's questions about the GPU are answered as for Hopper.
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
from typing import Any

from megatron_patch.errors import UserError
from megatron_patch.megatron.checkpoint import tracker
from megatron_patch.workflows import data
from megatron_patch.workflows.run import run_folder
from megatron_patch.workflows.run.configuration import RunConfig, find, is_file
from megatron_patch.workflows.run.job import Job, Launch


@dataclass(frozen=True)
class PreparedRun:
    """A run that has been checked as far as possible without starting it."""

    run: RunConfig
    job: Job
    args: argparse.Namespace
    """Megatron's parsed and validated arguments."""

    @property
    def steps(self) -> int:
        return self.args.train_iters or 0

    @property
    def folder(self) -> Path:
        return self.job.folder

    @property
    def checkpoints(self) -> Path:
        """The folder where the run saves checkpoints, and from which it resumes."""
        return run_folder.place(self.run, self.folder)


def prepare_run(run: RunConfig, folder: Path, *, dry: bool = False, cache: Path | None = None) -> PreparedRun:
    """Prepare the data, and resolve and check the flags. This imports Megatron, on CPU with its stand-ins.

    With `dry` nothing is written, and neither data nor GPUs nor the other nodes need to exist. `cache` is the
    folder in which Megatron keeps the data set's shuffled index; None puts it beside the data set. Megatron
    writes it without a lock, so that runs that begin at the same time with the same seed need separate ones.
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
    elif dry:  # Megatron's import would warn that there is no GPU.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from megatron_patch.workflows.run import megatron_flags

    parser = megatron_flags.build_parser()
    settings = {**(cpu_device.CPU_FLAGS if on_cpu else {}), **run.megatron}
    # The user's own keys and values are checked before the data set is prepared, which may take minutes.
    parser.parse_args(megatron_flags.flags_of(settings, parser))
    of_data = planned_data(run) if dry else prepared_data(run)
    settings = {**of_data, **_folder_settings(run, folder, cache), **settings}
    flags = [
        *megatron_flags.flags_of(settings, parser),
        *megatron_flags.compression_flags(run.compression, run.attach),
        *("--compression-device", run.launch.device, "--compression-output", str(folder)),
        *(word for file in run.launch.imports for word in ("--compression-import", file)),
    ]
    job = Job(run.launch, script, flags, folder)
    with environment(job.variables()), contextlib.nullcontext() if on_cpu else megatron_flags.assumed_gpu():
        args = megatron_flags.check(run, flags, parser)
    if not dry and args.split and not run.data.valid_path:
        _check_split(run, args.split)
    if on_cpu and not dry:  # It imports transformers, here once and not in every forked rank.
        importlib.import_module("megatron.core.tokenizers.text")
    return PreparedRun(run, job, args)


def _check_nodes(launch: Launch) -> None:
    """Check what a run needs and a dry run does not: GPUs, and the address of the other nodes."""
    if missing := _without_first_node(launch):
        raise UserError(f"{missing}; --dry-run shows the command without")
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


def _without_first_node(launch: Launch) -> str | None:
    """Say what is missing where a launch on several nodes does not name the first of them."""
    host = str(launch.rdzv_endpoint or "").rpartition(":")[0]
    if launch.nnodes == 1 or host not in ("", "localhost"):
        return None
    cause = f"{host} is another machine on each" if host else "launch.rdzv_endpoint is not set"
    return (
        f"launch.nnodes: {launch.nnodes} nodes need the address of the first, but {cause}; set MASTER_ADDR "
        "(with a file of configs/clusters), or launch.rdzv_endpoint=HOST:PORT"
    )


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Within the block, set the environment variables of ranks, which Megatron's validation reads."""
    before = os.environ.copy()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


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
    """Return the flags that name a run's data sets, and prepare those that have a source and do not exist."""
    settings = planned_data(run)
    tokenizer = run.data.tokenizer
    for path, source in run.data.parts:
        if source is None:
            data.check_dataset(Path(path))
        else:
            data.prepare(source, Path(path), tokenizer)
        if tokenizer.startswith("bpe"):  # It is trained on the training data and used for the other parts.
            tokenizer = str(data.beside(Path(path), "-tokenizer"))
    if run.data.path is None:
        for prefix in _named_prefixes(run):
            data.check_dataset(Path(prefix))
    return settings


def _check_split(run: RunConfig, split: str) -> None:
    """Refuse a split that gives a part no document, because Megatron would search for samples for ever."""
    from megatron.core.datasets import blended_megatron_dataset_config as of_megatron

    matrix = of_megatron.convert_split_vector_to_split_matrix(of_megatron.parse_and_normalize_split(split))
    for prefix in [run.data.path] if run.data.path else _named_prefixes(run):
        count = data.check_dataset(Path(prefix))
        for part, share in zip(("training", "validation", "test"), matrix, strict=True):
            if share is not None and round(share[0] * count) == round(share[1] * count):
                raise UserError(
                    f"megatron.split: {split!r} leaves none of the {count} documents of {prefix} for {part}; "
                    f"take more documents or another split (0 for {part}), or name data.valid_path"
                )


def planned_data(run: RunConfig) -> dict[str, Any]:
    """Return the flags of `prepared_data` without preparing anything."""
    section = run.data
    if section.path is None:
        return {}
    for _, source in section.parts:
        if source is not None:
            data.parse_source(source)
    prefix = Path(section.path)
    if section.source is not None:
        data.check_tokenizer(section.tokenizer)
        kind = "bytes" if section.tokenizer == "bytes" else "bpe"
    elif (manifest := data.load_manifest(prefix)) is not None:
        kind = manifest["tokenizer"]
    elif section.tokenizer == "bytes" or section.tokenizer.startswith("bpe:"):
        return {**section.path_flags}  # Other tools made it: the section megatron names its tokenizer.
    else:
        raise UserError(
            f"data.tokenizer: {section.tokenizer!r} needs data.source; {data.BY_MEGATRON}, which "
            "megatron.tokenizer_type and megatron.tokenizer_model name"
        )
    return {**section.path_flags, **data.megatron_flags(prefix, kind)}


def check_stated_data(run: RunConfig, overrides: Sequence[str]) -> None:
    """Check data sets that overrides name and no source prepares; a recipe's may be on another machine."""
    stated = {override.partition("=")[0] for override in overrides}
    for name, (path, source) in zip(("path", "valid_path", "test_path"), run.data.parts, strict=False):
        if source is None and f"data.{name}" in stated:
            data.check_dataset(Path(path))
    for prefix in _named_prefixes(run) if "megatron.data_path" in stated and run.data.path is None else ():
        data.check_dataset(Path(prefix))


def _named_prefixes(run: RunConfig) -> list[str]:
    """Return the prefixes in megatron.data_path, which alternates weights and prefixes."""
    stated = run.megatron.get("data_path") or []
    named = [str(word) for word in (stated if isinstance(stated, list | tuple) else [stated])]
    return [text for text in named if not re.fullmatch(r"[\d.]+(e[+-]?\d+)?", text, re.IGNORECASE)]


# --- what a dry run prints -------------------------------------------------------------------------------


def shown(run: RunConfig, job: Job) -> str:
    """Return what a dry run prints: comments, the command, and the resolved configuration."""
    launch = run.launch
    nodes = f" on {launch.nnodes} nodes, this is node {launch.node_rank}" if launch.nnodes > 1 else ""
    lines = [f"# {launch.world_size} ranks{nodes}; nothing is started", f"# {data_line(run)}"]
    if missing := _without_first_node(launch):
        lines.append(f"# a run will be refused: {missing}")
    return "\n".join([*lines, job.command_text(), "# configuration", run.as_yaml().rstrip()])


def data_line(run: RunConfig) -> str:
    """Return lines on the data sets: whether each exists, is prepared by the run, or must be prepared."""
    if run.data.path is None:
        missing = [text for text in _named_prefixes(run) if not data.is_whole(Path(text))]
        if missing:
            return f"data: needed, and not there: {', '.join(missing)} (.bin and .idx)"
        named = "as megatron.data_path says" if run.megatron.get("data_path") else None
        return f"data: {named or 'made up by Megatron (megatron.mock_data)'}"
    lines = []
    for path, source in run.data.parts:
        if data.is_whole(Path(path)):
            lines.append(f"data: {path}.bin and .idx are there")
        elif source is not None:
            lines.append(f"data: {path} would be prepared from {source}, tokenizer {run.data.tokenizer}")
        else:
            lines.append(f"data: {path}.bin and .idx are needed, and not there; {data.BY_MEGATRON}")
    return "\n# ".join(lines)
