"""Writes, replaces and checks the files of a data set.

    PREFIX.bin        token ids, document after document          } Megatron's own format
    PREFIX.idx        lengths and offsets of the documents        }
    PREFIX-tokenizer/ tokenizer.json and tokenizer_config.json, unless the tokenizer is `bytes`
    PREFIX.json       the manifest: what the data set is, and the size of every other file

A preparation writes into a temporary folder beside PREFIX and moves the files into place at the end. It first
removes the old index and moves the new one last, so that a kill never leaves the index of one data set beside
the tokens of another.
"""

import dataclasses
import difflib
import json
import struct
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_patch.errors import UserError
from megatron_patch.files import load_json
from megatron_patch.workflows.data.tokenization import BYTES_EOD, BYTES_VOCAB

FORMAT = "megatron-loco data set 1"
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
"""The header of PREFIX.idx: magic, version, dtype code, sequences, document boundaries."""
_ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
"""The bytes of a token id for each of Megatron's dtype codes."""


@dataclass(frozen=True)
class Manifest:
    """The content of PREFIX.json; `files` maps each file's name, without PREFIX, to its size in bytes."""

    tokenizer: str
    """One of bytes, bpe, file."""
    vocab_size: int
    eod: int
    documents: int
    tokens: int
    source: str
    source_bytes: int
    megatron_flags: dict[str, str | int]
    files: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    """The options that, together with the source's texts, determine the token ids."""


def beside(prefix: Path, suffix: str) -> Path:
    """Return PREFIX + suffix; `with_suffix` would cut a prefix such as `v1.5`."""
    return prefix.parent / (prefix.name + suffix)


def megatron_flags(tokenizer: str, prefix: Path) -> dict[str, str | int]:
    """Return Megatron's flags, with underscores, for a data set of this kind of tokenizer."""
    if tokenizer == "bytes":
        # Up to megatron-core 0.17 the NullTokenizer adds the end-of-document id to the given size.
        counts_eod = tuple(map(int, metadata.version("megatron-core").split(".")[:2])) >= (0, 18)
        return {"tokenizer_type": "NullTokenizer", "vocab_size": BYTES_VOCAB if counts_eod else BYTES_EOD}
    folder = beside(prefix, "-tokenizer").absolute()
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}


def load_manifest(prefix: Path) -> Manifest | None:
    """Return the manifest of PREFIX; None if there is no PREFIX.json, or it is not a manifest.

    Its flags fit the present path and Megatron version, so that a data set can be moved.
    """
    path = beside(prefix, ".json")
    again = "prepare the data set again with --force"
    if not path.exists() or is_foreign_json(prefix):
        return None
    try:
        entries = load_json(path.read_text("utf-8"))
        known = {one.name: entries[one.name] for one in dataclasses.fields(Manifest) if one.name in entries}
        manifest = Manifest(**known)
        sizes = [(beside(prefix, suffix), int(size)) for suffix, size in manifest.files.items()]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"data: {path} is damaged ({error}); {again}") from error
    for file, size in sizes:
        if not file.is_file():
            raise UserError(f"data: {file} is missing, though {path} names it; {again}")
        if file.stat().st_size != size:
            raise UserError(f"data: {file} has {file.stat().st_size} bytes, {path} says {size}; {again}")
    return dataclasses.replace(manifest, megatron_flags=megatron_flags(manifest.tokenizer, prefix))


def is_foreign_json(prefix: Path) -> bool:
    """Whether PREFIX.json is not a manifest, so that it must never be overwritten."""
    path = beside(prefix, ".json")
    if not path.exists():
        return False
    with path.open("rb") as stream:
        head = stream.read(1 << 16)
    return bool(head.strip()) and FORMAT.encode() not in head


def check_dataset(prefix: Path) -> None:
    """Check that PREFIX is a complete Megatron data set, with or without a manifest.

    Only the ends of the index are read.
    """
    index, tokens = beside(prefix, ".idx"), beside(prefix, ".bin")
    for path in (tokens, index):
        if not path.is_file():
            raise UserError(f"data: {path} does not exist; {_nearest(prefix)}")
    try:
        with index.open("rb") as stream:
            head, size = stream.read(_HEADER.size), index.stat().st_size
            if not head.startswith(_MAGIC):
                raise UserError(
                    f"data: {index} is no Megatron index: it begins with {head[:9]!r}, not {_MAGIC!r}"
                )
            _, version, code, sequences, bounds = _HEADER.unpack(head)
            if version != 1 or code not in _ITEM_BYTES or not sequences:
                raise UserError(
                    f"data: {index} has version {version}, data type {code} and {sequences} documents; "
                    "allowed: 1, 1..8 and 1 or more"
                )
            # Lengths are int32, offsets and boundaries int64; only multimodal sets have int8 modes as well.
            whole = _HEADER.size + 12 * sequences + 8 * bounds
            if size not in (whole, whole + sequences):
                raise UserError(
                    f"data: {index} has {size} bytes, its header says {whole}; it is cut off or damaged"
                )
            stream.seek(_HEADER.size + 4 * (sequences - 1))
            (length,) = struct.unpack("<i", stream.read(4))
            stream.seek(_HEADER.size + 12 * sequences - 8)
            (offset,) = struct.unpack("<q", stream.read(8))
    except (OSError, struct.error) as error:
        raise UserError(f"data: cannot read {index}: {error}; it may be cut off") from error
    expected = offset + length * _ITEM_BYTES[code]
    if tokens.stat().st_size != expected:
        raise UserError(
            f"data: {tokens} has {tokens.stat().st_size} bytes, {index} says {expected}: "
            "one of them is cut off, or they belong to different data sets"
        )
    load_manifest(prefix)


def is_whole(prefix: Path) -> bool:
    """Whether PREFIX is a complete data set (`check_dataset`)."""
    try:
        check_dataset(prefix)
    except UserError:
        return False
    return True


def _nearest(prefix: Path) -> str:
    """Return a hint on what the user most likely meant by a prefix without files."""
    if prefix.suffix in (".bin", ".idx") and prefix.with_suffix(".idx").is_file():
        return f"give the prefix without its ending: {prefix.with_suffix('')}"
    here = {path.stem: path.with_suffix("") for path in prefix.parent.glob("*.idx") if path != prefix}
    here.pop(prefix.name, None)
    # Megatron's own preprocessing appends `_text_document` to the name it is given.
    for name in (f"{prefix.name}_text_document", *difflib.get_close_matches(prefix.name, list(here), 1)):
        if name in here:
            return f"did you mean {here[name]}?"
    return f"prepare it: megatron-loco prepare-data SOURCE --out {prefix}"


def move_into_place(folder: Path, prefix: Path, manifest: Manifest) -> Manifest:
    """Move `set.bin`, `set.idx` and `tokenizer/` to PREFIX, and return the manifest with their sizes."""
    moves = {".bin": folder / "set.bin", ".idx": folder / "set.idx"}
    if (folder / "tokenizer").is_dir():
        moves |= {f"-tokenizer/{path.name}": path for path in sorted((folder / "tokenizer").iterdir())}
        beside(prefix, "-tokenizer").mkdir(exist_ok=True)
    sizes = {suffix: path.stat().st_size for suffix, path in moves.items()}
    manifest = dataclasses.replace(manifest, files=sizes)
    moves[".json"] = folder / "set.json"
    text = json.dumps({"format": FORMAT} | dataclasses.asdict(manifest), indent=2)
    moves[".json"].write_text(text + "\n", "utf-8")
    moves[".idx"] = moves.pop(".idx")  # It goes last.
    beside(prefix, ".idx").unlink(missing_ok=True)
    for suffix, path in moves.items():
        path.replace(beside(prefix, suffix))
    return manifest
