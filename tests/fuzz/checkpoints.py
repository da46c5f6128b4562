"""Error states of a checkpoint of two ranks, and a rank without Megatron that reads them.

An input begins with a byte that says which file it is, and whether its checksums are made anew, as somebody
would who means to be believed; the rest is the file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st

from megatron_patch.compensation.error_state import MovingAverageError
from megatron_patch.compensation.resharding import Part, Piece, Position
from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.integration.checkpoint import files, restore
from megatron_patch.quantization.blocks import BlockTable, Span
from megatron_patch.quantization.layout import BlockLayout
from megatron_patch.session import reader as reader_module
from megatron_patch.session.events import Events
from megatron_patch.session.layouts import FORMAT, Damaged, RankLayout, Storage
from megatron_patch.session.onset import Phase

from .mutations import as_json, changed_bytes, changed_tree

_NUMEL, _BLOCK = 96, 16
_PIECES = (
    Piece("a", "model.a", (0, 0), (3, 20), 0, (20, 1)),
    Piece("b", "model.b", (0,), (30,), 60, (1,)),
)
_SPANS = (Span(0, 60, 20), Span(60, 30, 30))


class Rank:
    """What restore.py asks of a RankState: two states, one whose blocks follow the parameters, one not."""

    def __init__(self, index: int, ranks: int) -> None:
        self.config = CompressionConfig(method="loco", bits=4, block_size=_BLOCK)
        self.senders: list[Any] = []
        states = []
        for spans in (_SPANS, ()):
            size = _NUMEL // ranks
            shards = [[(n * size, (n + 1) * size)] for n in range(ranks)]
            table = BlockTable.of(spans, shards, _BLOCK, 8) if spans else None
            layout = BlockLayout(_NUMEL, ranks, size, 8, _BLOCK, table)
            error = MovingAverageError(layout, 0.8, "int8", torch.device("cpu"), bool(spans))
            self.senders.append(SimpleNamespace(error=error, generator=None, statistics=torch.zeros(1)))
            part = Part(
                "reduce_scatter", _PIECES, _NUMEL, Position(0, _NUMEL), index, ranks, 1 / ranks, spans
            )
            blocks = None if table is None else layout.blocks
            states.append((part, Storage(ranks, size, _BLOCK, "int8", blocks, bool(spans))))
        self.layout = RankLayout(tuple(states))
        self.states = [SimpleNamespace(config=self.config, steps=0, steps_seen=0, events=None, phase=None)]

    @property
    def groups(self) -> dict[str, int]:
        return {"tensor": 1, "pipeline": 1, "expert": 1, "data": 2, "instances": 1}

    def start_from_zero(self, steps: int) -> None:
        for state in self.states:
            state.steps = state.steps_seen = steps

    def errors(self) -> list[torch.Tensor]:
        return [sender.error.flat() for sender in self.senders]


def _saved(rank: Rank, seed: int) -> dict[str, torch.Tensor]:
    """Random errors in the senders; the tensors of them."""
    generator = torch.Generator().manual_seed(seed)
    for sender in rank.senders:
        sender.error.set(torch.randn(_NUMEL, generator=generator))
    return {
        f"{number}.{name}": tensor
        for number, sender in enumerate(rank.senders)
        for name, tensor in sender.error.tensors().items()
    }


def _write() -> tuple[dict[str, Any], list[bytes], list[torch.Tensor]]:
    """(manifest without checksum, rank files, rank 0's errors)."""
    ranks = [Rank(0, 2), Rank(1, 2)]
    with tempfile.TemporaryDirectory() as folder:
        listed = [files.write_rank_file(Path(folder), n, _saved(rank, n)) for n, rank in enumerate(ranks)]
        contents = [Path(folder, file.file).read_bytes() for file in listed]
    manifest = {
        "format": FORMAT,
        "id": "0123",
        "iteration": 20,
        "config": ranks[0].config.as_dict(),
        "groups": ranks[0].groups,
        "world_size": 2,
        "loss_scale": 1.0,
        "mid_step": False,
        "steps": 20,
        "steps_seen": 20,
        "events": dataclasses.asdict(Events()),
        "phase": dataclasses.asdict(Phase()),
        "layouts": [ranks[0].layout.without_positions().as_json()],
        "ranks": [
            {"file": dataclasses.asdict(file), "layout": 0, "positions": rank.layout.positions}
            for file, rank in zip(listed, ranks, strict=True)
        ],
    }
    return manifest, contents, ranks[0].errors()


_MANIFEST, _FILES, _ERRORS = _write()


def inputs() -> st.SearchStrategy[bytes]:
    """A flag, and a manifest or rank 0's file."""
    manifest = json.dumps(_MANIFEST, indent=1).encode()
    changed = st.one_of(changed_bytes([manifest]), changed_tree([_MANIFEST]).map(as_json))
    return st.one_of(
        changed.map(lambda data: b"M" + data),
        changed_bytes([_FILES[0]]).map(lambda data: b"F" + data),
        st.one_of(changed, changed_bytes([_FILES[0]])).map(lambda data: b"-" + data),
    )


def _checked(content: dict[str, Any]) -> bytes:
    rest = {key: value for key, value in content.items() if key != "checksum"}
    text = json.dumps(rest, sort_keys=True)
    return json.dumps({**rest, "checksum": hashlib.sha256(text.encode()).hexdigest()}).encode()


def read(folder: Path, data: bytes) -> object:
    """Rank 0 of two in the saved layout, and a single rank in another; both restore, or say what is wrong."""
    kind, data = data[:1], data[1:]
    place = folder / "iter" / files.FOLDER
    place.mkdir(parents=True, exist_ok=True)
    manifest, first = _MANIFEST, _FILES[0]
    raw = None
    if kind == b"F" or (kind == b"-" and not data.lstrip().startswith(b"{")):
        first = data
    elif kind == b"-":
        raw = data
    else:
        try:
            manifest = json.loads(data)
        except (ValueError, RecursionError):
            raw = data
    if kind == b"F":
        manifest = json.loads(json.dumps(manifest))
        manifest["ranks"][0]["file"] |= {"nbytes": len(first), "sha256": hashlib.sha256(first).hexdigest()}
    if raw is None:
        raw = _checked(manifest) if isinstance(manifest, dict) else json.dumps(manifest).encode()
    (place / files.MANIFEST).write_bytes(raw)
    (place / files.rank_file_name(0)).write_bytes(first)
    (place / files.rank_file_name(1)).write_bytes(_FILES[1])
    problems, said = [], []
    for ranks in (2, 1):
        try:
            said.append(_restored(place.parent, ranks, untouched=kind == b"-" or manifest == _MANIFEST))
        except UserError as problem:
            problems.append(str(problem))
    if problems:
        raise UserError(problems[0])
    return said


def _restored(folder: Path, ranks: int, untouched: bool) -> str:
    rank = Rank(0, ranks)
    everyone = SimpleNamespace(
        get_rank=lambda: 0,
        get_world_size=lambda: ranks,
        all_gather_object=lambda found, mine: found.__setitem__(slice(None), [mine] * ranks),
    )
    with mock.patch.object(restore, "dist", everyone), mock.patch.object(reader_module, "dist", everyone):
        reader = restore._FolderReader(rank, restore.Checkpoint(folder, 20, "0123"))  # type: ignore[arg-type]
        problem, exact = reader.look()
        if problem is not None:
            raise UserError(problem)
        try:
            line = reader.apply(exact, 1.0)
        except Damaged as error:
            raise UserError(f"{folder}: {error}") from error
    for error in rank.errors():
        assert error.shape == (_NUMEL,)
    if untouched and line == "error states restored exactly":
        for error, saved in zip(rank.errors(), _ERRORS, strict=True):
            assert torch.equal(error, saved)
    return line
