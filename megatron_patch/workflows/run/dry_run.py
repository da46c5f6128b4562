"""`megatron-loco train CONFIG --dry-run`: the command and the configuration, with nothing started or written.

What it shows is what a run would do, checked against Megatron's own parser and validation for all of the
job's ranks. It needs neither the data set nor a GPU: what a data set would add to the flags is known from its
tokenizer, and Megatron's questions about the GPU are answered for a Hopper one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_patch.megatron import patching
from megatron_patch.workflows.data import files as data_files
from megatron_patch.workflows.run import launcher
from megatron_patch.workflows.run.configuration import Data, RunConfig


def data_settings(run: RunConfig) -> dict[str, Any]:
    """The flags that name the data set of a run, as if it were there already."""
    data = run.data
    if data.path is None:
        return {}
    prefix = Path(data.path)
    found = data_files.load_manifest(prefix)
    kind = found.tokenizer if found else data.tokenizer.partition(":")[0]
    if found is None and data.source is None and data_files.is_whole(prefix):
        return {**data.path_flags}  # made by other means: the flags of its tokenizer stand in megatron:
    return {**data.path_flags, **data_files.megatron_flags(kind, prefix)}


def data_line(run: RunConfig) -> str:
    """One line on the data: there already, prepared by the run itself, or to be prepared first."""
    data = run.data
    if data.path is None:
        missing = [text for text in named_prefixes(run) if not data_files.is_whole(Path(text))]
        if missing:
            return f"data: needed, and not there: {', '.join(missing)} (.bin and .idx)"
        named = "as megatron.data_path says" if run.megatron.get("data_path") else None
        return f"data: {named or 'made up by Megatron (megatron.mock_data)'}"
    return "\n# ".join(_part_line(data, path, source) for path, source in data.parts)


def _part_line(data: Data, path: str, source: str | None) -> str:
    if data_files.is_whole(Path(path)):
        return f"data: {path}.bin and .idx are there"
    if source is not None:
        return f"data: {path} would be prepared from {source}, tokenizer {data.tokenizer}"
    command = f"megatron-loco prepare-data TEXTS --out {path} --tokenizer {data.tokenizer}"
    return f"data: {path}.bin and .idx are needed, and not there: {command}"


def named_prefixes(run: RunConfig) -> list[str]:
    """The data sets of megatron.data_path, Megatron's own form: weights and prefixes in turn."""

    def is_number(text: str) -> bool:
        with contextlib.suppress(ValueError):
            float(text)
            return True
        return False

    return [text for text in map(str, run.megatron.get("data_path") or []) if not is_number(text)]


def shown(run: RunConfig, job: launcher.Job, notes: Sequence[str] = ()) -> str:
    """What a dry run prints: comments, `notes` among them, the command, the resolved configuration."""
    launch = run.launch
    nodes = f" on {launch.nnodes} nodes, this is node {launch.node_rank}" if launch.nnodes > 1 else ""
    lines = [f"# {launch.world_size} ranks{nodes}; nothing is started", f"# {data_line(run)}"]
    if launch.nnodes > 1 and not launch.rdzv_endpoint:
        lines.append("# FIRST_NODE: launch.rdzv_endpoint is not set; a run needs it (configs/clusters)")
    lines += [f"# {note}" for note in notes]
    return "\n".join([*lines, job.command_text(), "# configuration", run.as_yaml().rstrip()])


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
