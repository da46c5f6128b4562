"""From source files to documents.

A source is a folder or one file. A text file is one document; a `.jsonl` or `.json` file holds one document
per line, under a key. `Corpus` does not hold the text: it holds a table of (file, offset, length), shuffled
with a seed, so that a corpus larger than memory can still be shuffled by document. The shuffle matters:
Megatron cuts a data set into contiguous training and validation parts, and files in alphabetical order would
give it a validation set on other topics than the training set.
"""

import fnmatch
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from megatron_patch.errors import UserError
from megatron_patch.workflows.data.installed import SKIPPED, Installed

Advance = Callable[[int], None]  # called with the source bytes done since its last call

JSON_SUFFIXES = {".jsonl", ".json"}
_OPEN_FILES = 64
_MAX_DOCUMENT = 2**31 - 2  # Megatron's index counts a document's tokens in int32


def find_files(source: Path | Installed, include: Sequence[str], skip: Callable[[Path], bool]) -> list[Path]:
    """The source's files in sorted order, without hidden ones and those for which `skip` is true.

    A pattern with a slash is matched against the path below the source, others against the file's name; `*`
    also crosses slashes. Of installed packages `include` takes the place of the patterns.
    """
    if not isinstance(source, Installed):
        return _files_below(source, tuple(include) or ("*",), frozenset(), skip)
    found = [
        _files_below(root, tuple(include) or (pattern,), SKIPPED, skip) for root, pattern in source.roots()
    ]
    return [path for files in found for path in files]


def _files_below(
    root: Path, patterns: Sequence[str], unwanted: frozenset[str], skip: Callable[[Path], bool]
) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"source: cannot read {error.filename}: {error.strerror}")

    def wanted(path: Path) -> bool:
        below = path.relative_to(root).as_posix() if path != root else path.name
        return any(fnmatch.fnmatchcase(below if "/" in p else path.name, p) for p in patterns)

    if root.is_file():
        found = [root]
    elif root.is_dir():
        found = []
        for folder, folders, names in root.walk(on_error=refuse):
            folders[:] = [n for n in folders if not n.startswith(".") and n not in unwanted | {"__pycache__"}]
            found += [folder / name for name in names if not name.startswith(".")]
    else:
        raise UserError(f"source: {root} does not exist; allowed: a folder of text files, or a .jsonl file")
    files = sorted((p for p in found if wanted(p) and p.is_file() and not skip(p)), key=Path.as_posix)
    if not files:
        raise UserError(f"source: no file in {root} matches --include {' '.join(patterns)}")
    return files


@dataclass(frozen=True)
class Corpus:
    """Where the documents lie. `table` is [documents, 3]: index into `files`, offset and length in bytes."""

    files: list[Path]
    table: npt.NDArray[np.int64]
    json_key: str

    @property
    def source_bytes(self) -> int:
        return int(self.table[:, 2].sum())

    def documents(self) -> Iterator[tuple[bytes, int]]:
        """Text (UTF-8, or whatever bytes a text file holds) and source bytes of each document, in order."""
        opened: dict[int, BinaryIO] = {}
        try:
            for row in self.table:
                file, offset, length = map(int, row)
                path = self.files[file]
                try:
                    if file not in opened:
                        if len(opened) == _OPEN_FILES:
                            _close(opened)
                        opened[file] = path.open("rb")
                    opened[file].seek(offset)
                    raw = opened[file].read(length)
                except OSError as error:
                    raise UserError(f"source: cannot read {path}: {error.strerror}") from error
                if len(raw) != length:
                    raise UserError(f"source: {path} became shorter while it was read; prepare again")
                yield (self._json_text(raw, path, offset) if _is_json(path) else raw), length
        finally:
            _close(opened)

    def _json_text(self, raw: bytes, path: Path, offset: int) -> bytes:
        def problem(what: str) -> UserError:
            number = at = 0
            with path.open("rb") as stream:
                for number, line in enumerate(stream, start=1):  # noqa: B007
                    if at >= offset:
                        break
                    at += len(line)
            return UserError(f"source: {path}:{number}: {what}")

        try:
            # utf-8-sig: some editors open a file with a byte order mark.
            entry = json.loads(raw.decode("utf-8-sig", errors="replace"))
        except (ValueError, RecursionError) as error:
            why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise problem(f"not valid JSON ({why}); allowed: one JSON object per line") from None
        if not isinstance(entry, dict):
            raise problem(f"a JSON {type(entry).__name__}; allowed: one JSON object per line")
        if self.json_key not in entry:
            found = ", ".join(list(entry)[:10]) or "none"
            raise problem(f"no key {self.json_key!r} (--json-key); keys found: {found}")
        text = entry[self.json_key]
        if not isinstance(text, str):
            raise problem(f"key {self.json_key!r} holds a {type(text).__name__}; allowed: a string")
        # JSON can spell half a surrogate pair, which UTF-8 cannot.
        return text.encode("utf-8", errors="replace")


def open_corpus(
    files: list[Path], json_key: str, max_bytes: int | None, seed: int, advance: Advance
) -> Corpus:
    """Find the documents, shuffle them, and keep the first `max_bytes` source bytes of them.

    A text file is cut to fit the limit, a JSON line is left out. Empty files and blank lines do not count.
    """
    rows = array("q")
    for number, path in enumerate(files):
        try:
            if _is_json(path):
                _add_lines(rows, number, path, advance)
            elif size := path.stat().st_size:
                rows.extend((number, 0, size))
                advance(size)
        except OSError as error:
            raise UserError(f"source: cannot read {path}: {error.strerror}") from error
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    # RandomState, not default_rng: NumPy promises that its stream never changes.
    table = table[np.random.RandomState(seed).permutation(len(table))]
    if max_bytes is not None:
        ends = np.cumsum(table[:, 2])
        whole = int(np.searchsorted(ends, max_bytes, side="right"))
        room = max_bytes - (int(ends[whole - 1]) if whole else 0)
        cut = whole < len(table) and room > 0 and not _is_json(files[int(table[whole, 0])])
        table = table[: whole + cut]
        if cut:
            table[whole, 2] = room
    if not len(table):
        why = "the files are empty" if max_bytes is None else f"max-bytes is {max_bytes}"
        raise UserError(f"source: no document is left: {why}")
    longest = table[table[:, 2].argmax()]
    if longest[2] > _MAX_DOCUMENT:
        raise UserError(
            f"source: {files[int(longest[0])]} has a document of {longest[2]} bytes; allowed: {_MAX_DOCUMENT}"
        )
    return Corpus(files, table, json_key)


def _add_lines(rows: array[int], number: int, path: Path, advance: Advance) -> None:
    offset = reported = 0
    with path.open("rb") as stream:
        for line in stream:
            if not line.isspace():
                rows.extend((number, offset, len(line)))
            offset += len(line)
            if offset - reported > 1 << 24:
                advance(offset - reported)
                reported = offset
    advance(offset - reported)


def _is_json(path: Path) -> bool:
    return path.suffix.lower() in JSON_SUFFIXES


def _close(opened: dict[int, BinaryIO]) -> None:
    for stream in opened.values():
        stream.close()
    opened.clear()
