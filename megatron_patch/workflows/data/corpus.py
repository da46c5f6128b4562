"""Finds the documents of a source, and shuffles them.

    FOLDER, FILE                      text files, a document each; .jsonl and .json files, a document per line
    stdlib                            Python's own library
    installed:stdlib,sympy,scipy      the .py files of packages
    installed:torch/include/*.h       a package's files by a pattern on the path below it; `*` crosses slashes

Packages serve as a source that every installation has. The order of their files depends only on the packages'
versions, so that runs on two machines see the same documents in the same order.

`Corpus` holds a table of (file, offset, length), shuffled with a seed, and not the text, so that a corpus
larger than memory can be shuffled by document. Shuffling is needed because Megatron cuts a data set into
contiguous training and validation parts: in alphabetical order they would be on different topics.
"""

import fnmatch
import importlib.util
import json
import platform
import sysconfig
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from megatron_patch.errors import UserError

Advance = Callable[[int], None]  # Its argument is the source bytes done since its last call.
_PREFIX = "installed:"
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
"""Folders that are left out. The standard library's tests are more than half of its bytes, and much of that
is tables of odd characters; `encodings` and `pydoc_data` are generated. One such file in a validation split
would determine its loss."""
_JSON_SUFFIXES = {".jsonl", ".json"}
_OPEN_FILES = 64
_MAX_DOCUMENT = 2**31 - 2  # Megatron's index counts a document's tokens in int32.


@dataclass(frozen=True)
class Installed:
    """Installed packages as a source, each with the pattern of its files."""

    items: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """Return the packages with their versions and patterns."""
        return ", ".join(f"{name} {_version(name)} {pattern}" for name, pattern in self.items)


STDLIB = Installed((("stdlib", "*.py"),))


def parse_source(text: str) -> Path | Installed:
    """Parse `stdlib`, `installed:NAME[/PATTERN],...`, or the path of a folder or file."""
    if text == "stdlib":
        return STDLIB
    if not text.startswith(_PREFIX):
        return Path(text)
    items = [item.strip().partition("/") for item in text.removeprefix(_PREFIX).split(",")]
    if not all(name for name, _, _ in items):
        raise UserError(f"source: {text!r} names no package; allowed: {_PREFIX}NAME,NAME/PATTERN, ...")
    return Installed(tuple((name, pattern or "*.py") for name, _, pattern in items))


def _package_folder(name: str) -> Path:
    if name == "stdlib":
        return Path(sysconfig.get_paths()["stdlib"])
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise UserError(f"source: {_PREFIX}{name}: no package of that name is installed")
    return Path(found.submodule_search_locations[0])


def _version(name: str) -> str:
    if name == "stdlib":
        return platform.python_version()
    try:
        return metadata.version(metadata.packages_distributions().get(name, [name])[0])
    except metadata.PackageNotFoundError:
        return "?"


def find_files(source: Path | Installed, include: Sequence[str], skip: Callable[[Path], bool]) -> list[Path]:
    """Return the source's files in sorted order, without hidden files and those for which `skip` is true.

    A pattern of `include` with a slash is matched against the path below the source, others against the
    file's name; `*` also matches slashes. For installed packages `include` replaces their own patterns.
    """
    if isinstance(source, Path):
        return _files_below(source, tuple(include) or ("*",), set(), skip)
    found = [
        _files_below(_package_folder(name), tuple(include) or (pattern,), _SKIPPED, skip)
        for name, pattern in source.items
    ]
    return [path for files in found for path in files]


def _files_below(
    root: Path, patterns: Sequence[str], unwanted: set[str], skip: Callable[[Path], bool]
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
    """The places of the documents; `table` [documents, 3] has indices into `files`, offsets and bytes."""

    files: list[Path]
    table: npt.NDArray[np.int64]
    json_key: str

    @property
    def source_bytes(self) -> int:
        return int(self.table[:, 2].sum())

    def documents(self) -> Iterator[tuple[bytes, int]]:
        """Yield each document's text (UTF-8, or a text file's bytes) and its number of source bytes."""
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
        try:
            # Some editors begin a file with a byte order mark, which utf-8-sig drops.
            entry = json.loads(raw.decode("utf-8-sig", errors="replace"))
            problem = f"a JSON {type(entry).__name__}; allowed: one JSON object per line"
        except (ValueError, RecursionError) as error:
            why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            entry, problem = None, f"not valid JSON ({why}); allowed: one JSON object per line"
        if isinstance(entry, dict):
            text = entry.get(self.json_key)
            if isinstance(text, str):
                # JSON can contain half a surrogate pair, which UTF-8 cannot.
                return text.encode("utf-8", errors="replace")
            problem = f"key {self.json_key!r} holds a {type(text).__name__}; allowed: a string"
            if self.json_key not in entry:
                found = ", ".join(list(entry)[:10]) or "none"
                problem = f"no key {self.json_key!r} (--json-key); keys found: {found}"
        with path.open("rb") as stream:
            number = stream.read(offset).count(b"\n") + 1
        raise UserError(f"source: {path}:{number}: {problem}")


def open_corpus(
    files: list[Path], json_key: str, max_bytes: int | None, seed: int, advance: Advance
) -> Corpus:
    """Find the documents, shuffle them, and keep the first `max_bytes` source bytes of them.

    At the limit, a text file is cut, and a JSON line is left out. Empty files and blank lines are ignored.
    """
    rows = array("q")
    for number, path in enumerate(files):
        try:
            size = path.stat().st_size
            if _is_json(path):
                offset = 0
                with path.open("rb") as stream:
                    for line in stream:
                        if not line.isspace():
                            rows.extend((number, offset, len(line)))
                        offset += len(line)
            elif size:
                rows.extend((number, 0, size))
            advance(size)
        except OSError as error:
            raise UserError(f"source: cannot read {path}: {error.strerror}") from error
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    # NumPy guarantees that the stream of RandomState never changes, but not that of default_rng.
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


def _is_json(path: Path) -> bool:
    return path.suffix.lower() in _JSON_SUFFIXES


def _close(opened: dict[int, BinaryIO]) -> None:
    for stream in opened.values():
        stream.close()
    opened.clear()
