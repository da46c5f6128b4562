"""Reads checkpoints of releases 0.1 and 0.2, which kept error states in a folder beside Megatron's files.

    iter_0000020/compression/rank-00003.safetensors   the tensors of rank 3: "2.codes" is of its third sender
    iter_0000020/compression/manifest.json            their layouts, checksums of all files and its own

This format is no longer written.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy
import torch

from megatron_patch.session.layouts import FORMAT, Damaged, RankState
from megatron_patch.session.packed import layouts_in
from megatron_patch.session.reader import Reader

FOLDER, _MANIFEST = "compression", "manifest.json"
_DTYPES = {
    "I8": torch.int8,
    "U8": torch.uint8,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}


def reader(rank: RankState, checkpoint: Path) -> Reader | None:
    """Return the reader of a checkpoint's `compression` folder; None if there is no such folder.

    Raises:
        Damaged: the manifest cannot be read, or is not as these releases wrote it.
    """
    path = checkpoint / FOLDER / _MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_bytes())
        checksum = manifest.pop("checksum")
        whole = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest() == checksum
        if not whole or manifest["format"] != FORMAT:
            raise ValueError("its checksum differs" if not whole else f"its format is {manifest['format']!r}")
        return _FolderReader(rank, path.parent, manifest)
    except OSError as error:
        raise Damaged(f"{FOLDER}/{_MANIFEST} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise Damaged(f"{FOLDER}/{_MANIFEST} is damaged: {error}") from error


class _FolderReader(Reader):
    def __init__(self, rank: RankState, folder: Path, manifest: dict[str, Any]) -> None:
        super().__init__(rank, manifest, *layouts_in(manifest))
        self._folder = folder

    def tensors_of(self, saved_rank: int) -> _RankFile:
        listed = self._content["ranks"][saved_rank]["file"]
        path = self._folder / Path(listed["file"]).name
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise Damaged(f"{path.name} cannot be read: {error.strerror}") from error
        if digest != listed["sha256"]:
            raise Damaged(f"{path.name} is damaged: its checksum differs")
        return _RankFile(path)


class _RankFile:
    """A safetensors file: 8 bytes with the length of the header, the header in JSON, the tensors' bytes."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._entries = json.loads(file.read(length))
        self._path, self._start = path, 8 + length

    def of(self, state: int) -> dict[str, torch.Tensor]:
        prefix = f"{state}."
        return {
            name.removeprefix(prefix): self._read(entry)
            for name, entry in self._entries.items()
            if name.startswith(prefix)
        }

    def _read(self, entry: dict[str, Any]) -> torch.Tensor:
        begin, end = entry["data_offsets"]
        found = numpy.fromfile(self._path, numpy.uint8, end - begin, offset=self._start + begin)
        return torch.from_numpy(found).view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
