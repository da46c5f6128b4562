"""The error states of a job on disk: a folder beside Megatron's own files in a checkpoint's folder.

    iter_0000020/compression/rank-00003.safetensors   what rank 3 remembers, tensor by tensor
    iter_0000020/compression/manifest.json            what that is, of which parameters, and checksums of all

A rank's states are numbered in the order of its senders: "2.codes" and "2.scales" are the error of its third.
Nothing in here is a pickle. The manifest vouches for the files, its own checksum for the manifest, and its
`id`, which Megatron's checkpoint holds too (among its arguments), for belonging to that checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_patch.integration.checkpoint import tensor_file
from megatron_patch.session.layouts import FORMAT, Damaged
from megatron_patch.session.manifest import rank_file_name
from megatron_patch.untrusted import load_json

FOLDER = "compression"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class RankFile:
    """One rank's file, as the manifest lists it."""

    file: str
    nbytes: int
    sha256: str


def write_rank_file(folder: Path, rank: int, tensors: dict[str, torch.Tensor]) -> RankFile:
    """Write a rank's tensors (on CPU), durably.

    Raises:
        OSError: a full disk, a lost mount.
    """
    path = folder / rank_file_name(rank)
    with path.open("w+b") as file:
        tensor_file.write(file, tensors)
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return RankFile(path.name, os.fstat(file.fileno()).st_size, digest)


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write `content` with the format's version and its own checksum, durably."""
    content = {"format": FORMAT, **content}
    content["checksum"] = _checksum(content)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def publish(staging: Path, folder: Path) -> None:
    """Move a complete `staging` folder to where it belongs; what was there is gone only after that."""
    old = staging.with_name(staging.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(old)
    staging.rename(folder)
    for changed in (folder.parent, staging.parent):
        _sync_folder(changed)
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint's `compression` folder.

    Raises:
        Damaged: it is missing, changed, or of a format that this release does not know.
    """
    path = folder / MANIFEST
    try:
        content = load_json(path.read_bytes())
        checksum = content.pop("checksum")
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing") from error
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(f"{path} is damaged: it is no manifest") from error
    if checksum != _checksum(content):
        raise Damaged(f"{path} is damaged: its checksum differs")
    if content.get("format") != FORMAT:
        raise Damaged(f"{path} has format {content.get('format')!r}; this release reads format {FORMAT}")
    return dict(content)


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def verify(folder: Path, listed: RankFile) -> None:
    """Compare a rank's file with what the manifest says of it.

    Raises:
        Damaged: it is missing, truncated or changed.
    """
    path = folder / listed.file
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != listed.nbytes:
                raise Damaged(f"{path} is damaged: it has {size} bytes, not {listed.nbytes}")
            if hashlib.file_digest(file, "sha256").hexdigest() != listed.sha256:
                raise Damaged(f"{path} is damaged: its checksum differs")
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing") from error
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from error


class RankTensors:
    """Reads single tensors of a verified rank file, on CPU."""

    def __init__(self, folder: Path, listed: RankFile) -> None:
        try:
            self._file = tensor_file.TensorFile(folder / listed.file)
        except (OSError, ValueError) as error:
            raise Damaged(f"{folder / listed.file} is damaged: {error}") from error

    def of(self, state: int) -> dict[str, torch.Tensor]:
        """The tensors of a rank's state by number."""
        prefix = f"{state}."
        return {
            name.removeprefix(prefix): self._file.read(name)
            for name in self._file.names()
            if name.startswith(prefix)
        }
