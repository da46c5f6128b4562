"""`megatron-loco prepare-data`: data sets of the source code of installed packages, which need no download.

    stdlib                            Python's own library
    installed:stdlib,sympy,scipy      the .py files of packages
    installed:torch/include/*.h       a package's files by a pattern on the path below it; `*` crosses slashes

The recipes and ablations of configs/ train on them; text of your own is prepared by Megatron's
tools/preprocess_data.py. The documents are shuffled, always alike: Megatron cuts a data set into contiguous
training and validation parts, which would be on different topics in alphabetical order. Tokenizers:

    bytes           id = byte, 256 = end of document
    bpe:SIZE        byte-level BPE, trained on the same text
    PREFIX-tokenizer    the one that `bpe:SIZE` trained for another data set

    PREFIX.bin, PREFIX.idx    the data set in Megatron's format, written by megatron-core
    PREFIX-tokenizer/         what Megatron's HuggingFaceTokenizer loads, unless the tokenizer is `bytes`
    PREFIX.json               the manifest: from what the data set was made
"""

import argparse
import contextlib
import fnmatch
import hashlib
import importlib.util
import itertools
import json
import platform
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from megatron_patch.errors import UserError

_FORMAT = "megatron-loco data set 1"
_INSTALLED = "installed:"
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
"""Folders that are left out. The standard library's tests are more than half of its bytes, and much of that
is tables of odd characters; `encodings` and `pydoc_data` are generated. One such file in a validation split
would determine its loss."""
_SEED = 1234
_BATCH = 64  # So many documents are tokenized at once, over all cores.
_BYTES_END = 256
_LEAST_BPE, _MOST_BPE = 300, 1 << 20
_BPE_END, _BPE_PAD = "<|endoftext|>", "<|padding|>"
BY_MEGATRON = "Megatron's tools/preprocess_data.py prepares text of your own, with any tokenizer"

Packages = Sequence[tuple[str, str]]
"""Installed packages, each with the pattern of its files."""


# --- the text --------------------------------------------------------------------------------------------


def parse_source(text: str) -> Packages:
    """Parse `stdlib` or `installed:NAME[/PATTERN],...`."""
    listed = "stdlib" if text == "stdlib" else text.removeprefix(_INSTALLED)
    items = [item.strip().partition("/") for item in listed.split(",")]
    if (text != "stdlib" and listed == text) or not all(name for name, _, _ in items):
        raise UserError(
            f"source: {text!r}; allowed: stdlib, {_INSTALLED}NAME,NAME/PATTERN,...; {BY_MEGATRON}"
        )
    return [(name, pattern or "*.py") for name, _, pattern in items]


def _folder(package: str) -> Path:
    if package == "stdlib":
        return Path(sysconfig.get_paths()["stdlib"])
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"source: {_INSTALLED}{package}: no package of that name is installed")
    return Path(spec.submodule_search_locations[0])


def _version(package: str) -> str:
    if package == "stdlib":
        return platform.python_version()
    try:
        return metadata.version(metadata.packages_distributions().get(package, [package])[0])
    except metadata.PackageNotFoundError:
        return "?"


def find_files(packages: Packages) -> list[Path]:
    """Return the files of packages, in an order that depends only on the packages' versions."""
    return [path for package, pattern in packages for path in _files_of(_folder(package), pattern)]


def _files_of(root: Path, pattern: str) -> list[Path]:
    files = []
    for folder, folders, names in root.walk():
        folders[:] = [n for n in folders if not n.startswith(".") and n not in _SKIPPED | {"__pycache__"}]
        files += [folder / name for name in names if not name.startswith(".")]

    def matches(path: Path) -> bool:
        compared = path.relative_to(root).as_posix() if "/" in pattern else path.name
        return fnmatch.fnmatchcase(compared, pattern) and path.is_file()

    files = sorted(filter(matches, files), key=Path.as_posix)
    if not files:
        raise UserError(f"source: no file in {root} matches {pattern}")
    return files


def _documents(files: Sequence[Path]) -> list[bytes]:
    documents = [text for path in files if (text := path.read_bytes())]
    if not documents:
        raise UserError(f"source: the files are empty, as {files[0]}")
    # NumPy guarantees that the stream of RandomState never changes, but not that of default_rng.
    return [documents[place] for place in np.random.RandomState(_SEED).permutation(len(documents))]


# --- the tokens ------------------------------------------------------------------------------------------


def check_tokenizer(name: str) -> None:
    """Check that `name` is `bytes`, `bpe:SIZE` or the folder of a tokenizer that `bpe:SIZE` trained."""
    if name == "bytes":
        return
    if name == "bpe" or name.startswith("bpe:"):
        size = name.removeprefix("bpe").removeprefix(":")
        if not size.isascii() or not size.isdigit() or not _LEAST_BPE <= int(size) <= _MOST_BPE:
            raise UserError(f"tokenizer: {name!r}; allowed: bpe:SIZE with SIZE {_LEAST_BPE} to {_MOST_BPE}")
        return
    file = Path(name) / "tokenizer.json"
    if not file.is_file() or _BPE_PAD.encode() not in file.read_bytes():
        raise UserError(
            f"tokenizer: {name!r}; allowed: bytes, bpe:SIZE, or the folder that a data set with bpe:SIZE has "
            f"beside it; {BY_MEGATRON}"
        )


def _tokenizer(name: str, documents: Sequence[bytes]) -> Any:
    """Return a `tokenizers.Tokenizer`: loaded, or trained on `documents`; fewer pairs give fewer ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if name.startswith("bpe:"):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        # Padding has its own token: Megatron masks it out of the loss, and must not mask ends of documents.
        trainer = trainers.BpeTrainer(
            vocab_size=int(name.removeprefix("bpe:")),
            special_tokens=[_BPE_END, _BPE_PAD],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(map(_decoded, documents), trainer)
    else:
        tokenizer = Tokenizer.from_file(str(Path(name) / "tokenizer.json"))
    # A document that contains "<|endoftext|>" must not end there; saved files lack this setting.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _decoded(document: bytes) -> str:
    return document.decode("utf-8", errors="replace")


def _ids(documents: Sequence[bytes], tokenizer: Any) -> Iterator[list[int]]:
    """Yield the ids of each document, the end of document among them; as bytes without a tokenizer."""
    if tokenizer is None:
        yield from ([*document, _BYTES_END] for document in documents)
        return
    end = tokenizer.token_to_id(_BPE_END)
    for batch in itertools.batched(documents, _BATCH):
        for encoding in tokenizer.encode_batch_fast([_decoded(document) for document in batch]):
            yield [*encoding.ids, end]


# --- the data set ----------------------------------------------------------------------------------------


def prepare(source: str, prefix: Path, tokenizer: str = "bytes") -> None:
    """Tokenize `source` into the Megatron data set PREFIX, unless it is there already.

    Raises:
        UserError: the input is bad, or the output cannot be written; PREFIX is unchanged, or has no index.
    """
    packages = parse_source(source)
    check_tokenizer(tokenizer)
    files = find_files(packages)
    origin = ", ".join(f"{name} {_version(name)} {pattern}" for name, pattern in packages)
    options = {"tokenizer": tokenizer, "bytes": sum(path.stat().st_size for path in files)}
    kind = tokenizer.partition(":")[0]
    if kind not in ("bytes", "bpe"):  # It may be trained anew, at the same place.
        vocabulary = (Path(tokenizer) / "tokenizer.json").read_bytes()
        kind, options["tokenizer"] = "bpe", hashlib.sha256(vocabulary).hexdigest()
    manifest = load_manifest(prefix)
    same = manifest is not None and (manifest.get("source"), manifest.get("options")) == (origin, options)
    if same and is_whole(prefix):
        return
    if manifest is None and any(beside(prefix, suffix).exists() for suffix in (".bin", ".idx", ".json")):
        raise UserError(
            f"out: {prefix} has files that prepare-data did not write; choose another, or remove them"
        )
    _say(f"preparing {prefix} from {origin}")
    documents = _documents(files)
    manifest = {"format": _FORMAT, "tokenizer": kind, "source": origin, "options": options}
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(".partial", f".{prefix.name}.", prefix.parent) as name:
            folder = Path(name)
            model = None if kind == "bytes" else _tokenizer(tokenizer, documents)
            tokens = _write(folder / "set", documents, model)
            manifest |= {"documents": len(documents), "tokens": tokens}
            (folder / "set.json").write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
            _move_into_place(folder, prefix)
    except OSError as error:
        raise UserError(f"out: cannot write {prefix}: {error.strerror or error}") from error
    _say(f"{prefix}: {len(documents):,} documents, {tokens:,} tokens")


def _write(stem: Path, documents: Sequence[bytes], tokenizer: Any) -> int:
    """Write the files of a data set but for its manifest, and return the number of tokens."""
    size = _BYTES_END + 1
    if tokenizer is not None:
        size, folder = tokenizer.get_vocab_size(), beside(stem, "-tokenizer")
        folder.mkdir()
        tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
        configuration = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _BPE_END}
        configuration["pad_token"] = _BPE_PAD
        (folder / "tokenizer_config.json").write_text(json.dumps(configuration, indent=2) + "\n", "utf-8")
    indexed_dataset = _indexed_dataset()
    dtype = indexed_dataset.DType.optimal_dtype(size)
    builder = indexed_dataset.IndexedDatasetBuilder(indexed_dataset.get_bin_path(str(stem)), dtype=dtype)
    tokens = 0
    try:
        for ids in _ids(documents, tokenizer):
            builder.add_document(ids, [len(ids)])
            tokens += len(ids)
        builder.finalize(indexed_dataset.get_idx_path(str(stem)))
    finally:
        # On a full disk closing fails as well, and would fail again, loudly, in the destructor.
        with contextlib.suppress(OSError):
            builder.data_file.close()
    return tokens


def _indexed_dataset() -> Any:
    """Return Megatron's module of data sets, whose import takes longer than most of this module's work."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # These name Apex and Transformer Engine, which are not needed.
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


def _move_into_place(folder: Path, prefix: Path) -> None:
    """Move the files set* to PREFIX*, the index last.

    The old index goes first: so a kill never leaves the index of one data set beside another's tokens.
    """
    beside(prefix, ".idx").unlink(missing_ok=True)
    if (tokenizer := folder / "set-tokenizer").is_dir():
        beside(prefix, "-tokenizer").mkdir(exist_ok=True)
        for path in tokenizer.iterdir():
            path.replace(beside(prefix, "-tokenizer") / path.name)
    for suffix in (".json", ".bin", ".idx"):
        (folder / f"set{suffix}").replace(beside(prefix, suffix))


def beside(prefix: Path, suffix: str) -> Path:
    """Return PREFIX + suffix; `with_suffix` would cut a prefix such as `v1.5`."""
    return prefix.parent / (prefix.name + suffix)


def load_manifest(prefix: Path) -> dict[str, Any] | None:
    """Return the content of PREFIX.json; None if there is no such file, or it is not a manifest."""
    path = beside(prefix, ".json")
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text("utf-8"))
        if isinstance(content, dict) and (content.get("format"), type(content.get("tokenizer"))) == (
            _FORMAT,
            str,
        ):
            return content
    return None


def megatron_flags(prefix: Path, kind: str) -> dict[str, str | int]:
    """Return Megatron's flags, with underscores, for the tokenizer of a data set of ours."""
    if kind == "bytes":
        # Up to megatron-core 0.17 the NullTokenizer adds the end-of-document id to the given size.
        counts_end = tuple(map(int, metadata.version("megatron-core").split(".")[:2])) >= (0, 18)
        return {"tokenizer_type": "NullTokenizer", "vocab_size": _BYTES_END + counts_end}
    folder = beside(prefix, "-tokenizer").absolute()
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}


def check_dataset(prefix: Path) -> int:
    """Check that PREFIX is a whole data set, with Megatron's own reader; return the number of documents.

    Megatron would find a lost end of the tokens only where it reads there, in the middle of a run.
    """
    for suffix in (".bin", ".idx"):
        if not (path := beside(prefix, suffix)).is_file():
            raise UserError(f"data: {path} does not exist; {_hint(prefix)}")
    try:
        # The reader of both files, IndexedDataset, would print a second error when a first one ends it.
        index = _indexed_dataset()._IndexReader(str(beside(prefix, ".idx")), multimodal=False)
        expected = int(index.sequence_pointers[-1]) + int(index.sequence_lengths[-1]) * index.dtype_size
    except Exception as error:  # Of asserts, mmap and NumPy, with a message or without.
        said = str(error) or type(error).__name__
        raise UserError(f"data: {prefix}.idx cannot be read, it may be cut off: {said}") from error
    size = beside(prefix, ".bin").stat().st_size
    if size != expected:
        raise UserError(
            f"data: {prefix}.bin has {size} bytes, {prefix}.idx says {expected}: one of them is cut off, or "
            "they belong to different data sets"
        )
    return len(index.sequence_lengths)


def _hint(prefix: Path) -> str:
    if prefix.suffix in (".bin", ".idx") and prefix.with_suffix(".idx").is_file():
        return f"give the prefix without its ending: {prefix.with_suffix('')}"
    if beside(prefix, "_text_document.idx").is_file():  # Megatron's tool appends this.
        return f"did you mean {beside(prefix, '_text_document')}?"
    return f"{BY_MEGATRON}, and `megatron-loco prepare-data` that of installed packages"


def is_whole(prefix: Path) -> bool:
    """Whether PREFIX is a complete data set (`check_dataset`)."""
    try:
        check_dataset(prefix)
    except UserError:
        return False
    return True


# --- the command -----------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megatron-loco prepare-data`."""
    parser.add_argument(
        "source", nargs="?", default="stdlib", metavar="SOURCE", help="stdlib (default) or installed:NAME,..."
    )
    parser.add_argument("--out", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="T",
        help="bytes (default), bpe:SIZE to train one on this text, or the folder of one trained before",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    prefix = Path(args.out)
    if args.out.endswith("/") or prefix.is_dir() or prefix.name in ("", ".."):
        raise UserError(f"out: {args.out} is a folder; allowed: a prefix, such as {prefix / 'text'}")
    prepare(args.source, prefix, args.tokenizer)
    manifest = load_manifest(prefix)
    assert manifest is not None
    flags = megatron_flags(prefix, manifest["tokenizer"])
    shown = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in flags.items())
    _say(f"train on it with: --data-path {args.out} {shown}")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
