"""The error states of a job on disk: a folder beside Megatron's own files in a checkpoint's folder.

    iter_0000020/compression/rank-00003.safetensors   what rank 3 remembers, tensor by tensor
    iter_0000020/compression/manifest.json            what that is, of which parameters, and checksums of all

A rank's states are numbered in the order of its senders: "2.codes" and "2.scales" are the error of its third.
Nothing in here is a pickle. The manifest vouches for the files, its own checksum for the manifest, and its
`id`, which Megatron's checkpoint holds too (among its arguments), for belonging to that checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_patch.compensation.error_state import MovingAverageError
from megatron_patch.compensation.resharding import Part, Piece, Position
from megatron_patch.integration.checkpoint import tensor_file
from megatron_patch.quantization.blocks import BlockTable, Span
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.untrusted import load_json

FOLDER = "compression"
MANIFEST = "manifest.json"
FORMAT = 1


class Damaged(Exception):
    """A file that is missing, truncated, changed or not this checkpoint's; the text names it."""


@dataclass(frozen=True)
class Storage:
    """How an error state is stored: its blocks, and its dtype ("int8", "bf16", "fp32"; None: no error).

    `blocks` is the number of scales of a shard where blocks follow the parameters (Part.spans); None: they
    are counted from each shard's beginning. `rotated`: the error is of rotated blocks.
    """

    shards: int
    shard_size: int
    block: int
    dtype: str | None
    blocks: int | None = None
    rotated: bool = False


@dataclass(frozen=True)
class RankLayout:
    """What the states of a rank are of. Data-parallel peers have equal layouts and other positions."""

    states: tuple[tuple[Part, Storage], ...]

    def without_positions(self) -> RankLayout:
        """What data-parallel peers have in common."""
        nowhere = Position(0, 0)
        return RankLayout(
            tuple((dataclasses.replace(p, position=nowhere, index=0), storage) for p, storage in self.states)
        )

    @property
    def positions(self) -> list[list[int]]:
        """Of every state the fields of its Part's Position, and its index."""
        return [[*dataclasses.astuple(part.position), part.index] for part, _ in self.states]

    def at(self, positions: list[list[int]]) -> RankLayout:
        """The layout of the rank that has these positions."""
        return RankLayout(
            tuple(
                (dataclasses.replace(part, position=Position(*position), index=index), storage)
                for (part, storage), (*position, index) in zip(self.states, positions, strict=True)
            )
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values; buckets are listed once, though several states may be of one."""
        buckets = list(dict.fromkeys(_bucket(part) for part, _ in self.states))
        return {
            "buckets": [
                {
                    "numel": numel,
                    "pieces": [dataclasses.asdict(piece) for piece in pieces],
                    "spans": [dataclasses.astuple(span) for span in spans],
                }
                for pieces, numel, spans in buckets
            ],
            "states": [
                {
                    "kind": part.kind,
                    "bucket": buckets.index(_bucket(part)),
                    "senders": part.senders,
                    "weight": part.weight,
                    **dataclasses.asdict(storage),
                }
                for part, storage in self.states
            ],
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> RankLayout:
        """The inverse of `as_json`, without positions."""
        pieces = [tuple(Piece(**_tuples(p)) for p in bucket["pieces"]) for bucket in content["buckets"]]
        numels = [bucket["numel"] for bucket in content["buckets"]]
        spans = [tuple(Span(*span) for span in bucket.get("spans", ())) for bucket in content["buckets"]]
        states = []
        for state in content["states"]:
            kind, bucket, senders, weight = (state.pop(n) for n in ("kind", "bucket", "senders", "weight"))
            part = Part(
                kind, pieces[bucket], numels[bucket], Position(0, 0), 0, senders, weight, spans[bucket]
            )
            states.append((part, Storage(**state)))
        return RankLayout(tuple(states))


def _bucket(part: Part) -> tuple[tuple[Piece, ...], int, tuple[Span, ...]]:
    return part.pieces, part.bucket_numel, part.spans


def _tuples(piece: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in piece.items()}


@dataclass(frozen=True)
class RankFile:
    """One rank's file, as the manifest lists it."""

    file: str
    nbytes: int
    sha256: str


def rank_file_name(rank: int) -> str:
    """The name of a rank's file in the folder."""
    return f"rank-{rank:05d}.safetensors"


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


def decode(tensors: dict[str, torch.Tensor], part: Part, storage: Storage) -> torch.Tensor:
    """A stored error, fp32 [part.position.numel]."""
    assert storage.dtype is not None
    numel, size, table = part.position.numel, storage.shard_size, None
    if storage.blocks is not None:
        shards = [
            part.position.ranges(shard * size, min((shard + 1) * size, numel))
            for shard in range(storage.shards)
        ]
        table = BlockTable.of(part.spans, shards, storage.block, 8, storage.blocks)
    layout = BlockLayout(numel, storage.shards, size, 8, storage.block, table)
    error = MovingAverageError(layout, 0.0, storage.dtype, torch.device("cpu"), storage.rotated)
    error.restore(tensors)
    return error.flat()
