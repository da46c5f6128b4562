"""The files of a data set: what belongs together, how they are replaced, and how to see that they are whole.

    PREFIX.bin        token ids, document after document          } Megatron's own format
    PREFIX.idx        lengths and offsets of the documents        }
    PREFIX-tokenizer/ tokenizer.json and tokenizer_config.json, unless the tokenizer is `bytes`
    PREFIX.json       the manifest: what the data set is, and the size of every other file

A preparation writes into a folder of its own, `.NAME.xxxxxxxx.partial`, and moves the files into place at
the end. The old manifest and index go first and the new manifest comes last, so whatever moment a
preparation is killed at, there is no manifest and no index of one data set beside the tokens of another. A
lock on the partial folder, which dies with its process, tells a later run which folders are leftovers; a
lock on the folder around it keeps two preparations from mixing their files. (File systems without locks
keep their leftovers.)
"""

import contextlib
import dataclasses
import difflib
import fcntl
import json
import os
import re
import shutil
import stat
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from megatron_patch.errors import UserError
from megatron_patch.untrusted import load_json
from megatron_patch.workflows.data.tokenization import BYTES_EOD, BYTES_VOCAB

FORMAT = "megatron-loco data set 1"
_SUFFIX = re.compile(r"\.bin|\.idx|-tokenizer/[^/\0]{1,255}")
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries
_ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}  # Megatron's dtype codes


@dataclass(frozen=True)
class Manifest:
    """What PREFIX.json says. `files` maps each file's name after PREFIX to its size in bytes."""

    tokenizer: str  # bytes, bpe or file
    vocab_size: int
    eod: int
    documents: int
    tokens: int
    source: str
    source_bytes: int
    fingerprint: str  # of the source files (names, sizes, times) and of all options that decide the ids
    files: dict[str, int]
    megatron_flags: dict[str, str | int]


def beside(prefix: Path, suffix: str) -> Path:
    """PREFIX + suffix; `with_suffix` would cut a prefix such as `v1.5`."""
    return prefix.parent / (prefix.name + suffix)


def megatron_flags(tokenizer: str, prefix: Path) -> dict[str, str | int]:
    """Megatron's flags, with underscores, for a data set of this tokenizer kind."""
    if tokenizer == "bytes":
        # Up to megatron-core 0.17 the NullTokenizer adds the end of document to the size it is given.
        counts_eod = tuple(map(int, metadata.version("megatron-core").split(".")[:2])) >= (0, 18)
        return {"tokenizer_type": "NullTokenizer", "vocab_size": BYTES_VOCAB if counts_eod else BYTES_EOD}
    folder = beside(prefix, "-tokenizer").absolute()
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}


def load_manifest(prefix: Path) -> Manifest | None:
    """The manifest of PREFIX; None if there is none (a PREFIX.json of another kind is none).

    The flags are those of the present place and Megatron version, so that a data set can be moved.
    """
    path = beside(prefix, ".json")
    again = "prepare the data set again with --force"
    if not path.exists() or is_foreign_json(prefix):
        return None
    try:
        entries = load_json(path.read_text("utf-8"))
        del entries["format"]
        manifest = Manifest(**entries)
        _check_types(manifest)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"data: {path} is damaged ({error}); {again}") from error
    for suffix, size in manifest.files.items():
        file = beside(prefix, suffix)
        found = _size(file)
        if found is None:
            raise UserError(f"data: {file} is missing, though {path} names it; {again}")
        if found != size:
            raise UserError(f"data: {file} has {found} bytes, {path} says {size}; {again}")
    return dataclasses.replace(manifest, megatron_flags=megatron_flags(manifest.tokenizer, prefix))


def _size(path: Path) -> int | None:
    """Bytes of a file; None: there is none."""
    try:
        state = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return state.st_size if stat.S_ISREG(state.st_mode) else None


def _check_types(manifest: Manifest) -> None:
    for name in ("tokenizer", "source", "fingerprint"):
        if not isinstance(getattr(manifest, name), str):
            raise TypeError(f"{name} is no text")
    sizes = manifest.files.values() if isinstance(manifest.files, dict) else [None]
    counts = (manifest.vocab_size, manifest.eod, manifest.documents, manifest.tokens, manifest.source_bytes)
    if not all(type(count) is int and count >= 0 for count in (*counts, *sizes)):
        raise TypeError("a size or a count is no whole number, 0 or more")
    for suffix in manifest.files:
        if not _SUFFIX.fullmatch(suffix):
            raise ValueError(f"{suffix[:60]!r} is no file of a data set")


def is_foreign_json(prefix: Path) -> bool:
    """Whether PREFIX.json is somebody else's file, which must never be overwritten."""
    try:
        with beside(prefix, ".json").open("rb") as stream:
            head = stream.read(1 << 16)
    except FileNotFoundError:  # another preparation may take it away at any time
        return False
    return bool(head.strip()) and FORMAT.encode() not in head


def check_dataset(prefix: Path) -> None:
    """See that PREFIX is a whole Megatron data set, with or without a manifest; reads little of the index."""
    index, tokens = beside(prefix, ".idx"), beside(prefix, ".bin")
    for path in (tokens, index):
        if not path.is_file():
            raise UserError(f"data: {path} does not exist; {_nearest(prefix)}")
    try:
        with index.open("rb") as stream:
            head = stream.read(_HEADER.size)
            if not head.startswith(_MAGIC):
                raise UserError(
                    f"data: {index} is no Megatron index: it begins with {head[:9]!r}, not {_MAGIC!r}"
                )
            if len(head) < _HEADER.size:
                raise UserError(f"data: {index} is cut off after {len(head)} bytes")
            _, version, code, sequences, bounds = _HEADER.unpack(head)
            if version != 1 or code not in _ITEM_BYTES:
                raise UserError(
                    f"data: {index} has version {version} and data type {code}; allowed: 1 and 1..8"
                )
            if not sequences:
                raise UserError(f"data: {index} holds no documents")
            # int32 lengths, int64 offsets, int64 document boundaries; int8 modes in multimodal sets only.
            whole = _HEADER.size + 12 * sequences + 8 * bounds
            size = index.stat().st_size
            if size not in (whole, whole + sequences):
                raise UserError(
                    f"data: {index} has {size} bytes, its header says {whole}; it is cut off or damaged"
                )
            stream.seek(_HEADER.size + 4 * (sequences - 1))
            (length,) = struct.unpack("<i", stream.read(4))
            stream.seek(_HEADER.size + 12 * sequences - 8)
            (offset,) = struct.unpack("<q", stream.read(8))
            stream.seek(whole - 8)
            (last,) = struct.unpack("<q", stream.read(8))
            if last != sequences:
                raise UserError(f"data: {index} is damaged: its documents end at {last}, not at {sequences}")
    except OSError as error:
        raise UserError(f"data: cannot read {index}: {error.strerror}") from error
    expected = offset + length * _ITEM_BYTES[code]
    if tokens.stat().st_size != expected:
        raise UserError(
            f"data: {tokens} has {tokens.stat().st_size} bytes, {index} says {expected}: "
            "one of them is cut off, or they belong to different data sets"
        )
    load_manifest(prefix)


def is_whole(prefix: Path) -> bool:
    """Whether `check_dataset` has nothing to say of PREFIX."""
    try:
        check_dataset(prefix)
    except UserError:
        return False
    return True


def _nearest(prefix: Path) -> str:
    """What the user most likely meant by a prefix without files."""
    if prefix.suffix in (".bin", ".idx") and prefix.with_suffix(".idx").is_file():
        return f"give the prefix without its ending: {prefix.with_suffix('')}"
    here = {path.stem: path.with_suffix("") for path in prefix.parent.glob("*.idx") if path != prefix}
    here.pop(prefix.name, None)
    # Megatron's own preprocessing appends this to the name it is given.
    if f"{prefix.name}_text_document" in here:
        return f"did you mean {here[f'{prefix.name}_text_document']}?"
    if close := difflib.get_close_matches(prefix.name, list(here), 1):
        return f"did you mean {here[close[0]]}?"
    return f"prepare it: megatron-loco prepare-data SOURCE --out {prefix}"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def partial_folder(prefix: Path) -> Iterator[tuple[Path, bool]]:
    """A new folder beside PREFIX to write in, removed at the end; and whether an interrupted run left one."""
    name = re.compile(re.escape(f".{prefix.name}.") + r"[a-z0-9_]+\.partial")
    leftovers = False
    with _locked(prefix.parent):
        for path in prefix.parent.iterdir():
            if name.fullmatch(path.name) and _is_abandoned(path):
                leftovers = True
                shutil.rmtree(path, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{prefix.name}.", suffix=".partial", dir=prefix.parent))
        handle = os.open(folder, os.O_RDONLY)
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield folder, leftovers
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _is_abandoned(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def commit(folder: Path, prefix: Path, manifest: Manifest) -> Manifest:
    """Move `set.bin`, `set.idx` and `tokenizer/` to PREFIX; returns the manifest with the files' sizes.

    Raises:
        OSError: the disk is full or the folder not writable; PREFIX then has no manifest.
    """
    moves = {".bin": folder / "set.bin", ".idx": folder / "set.idx"}
    if (folder / "tokenizer").is_dir():
        moves |= {f"-tokenizer/{path.name}": path for path in sorted((folder / "tokenizer").iterdir())}
    sizes = {suffix: path.stat().st_size for suffix, path in moves.items()}
    manifest = dataclasses.replace(manifest, files=sizes)
    text = json.dumps({"format": FORMAT} | dataclasses.asdict(manifest), indent=2)
    (folder / "set.json").write_text(text + "\n", "utf-8")
    for path in (*moves.values(), folder / "set.json"):
        _flush(path)
    with _locked(prefix.parent):
        beside(prefix, ".json").unlink(missing_ok=True)
        beside(prefix, ".idx").unlink(missing_ok=True)
        _flush(prefix.parent)
        if (folder / "tokenizer").is_dir():
            beside(prefix, "-tokenizer").mkdir(exist_ok=True)
        for suffix, path in moves.items():
            path.replace(beside(prefix, suffix))
        _flush(prefix.parent)
        (folder / "set.json").replace(beside(prefix, ".json"))
        _flush(prefix.parent)
    return manifest


def _flush(path: Path) -> None:
    """To the disk, not only to the page cache: a crash must not leave the manifest without the data."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
