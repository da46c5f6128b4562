"""`megatron-loco prepare-data`: from text to the `.bin` and `.idx` files that Megatron trains on.

Megatron-core writes the files (its own `IndexedDatasetBuilder`); this workflow finds the documents, shuffles
and tokenizes them, and sees to it that a data set is either whole or absent. A second call with the same
arguments does nothing unless a file of the source has changed. Megatron, torch and the tokenizer libraries
are imported only once there is work for them: that takes longer than the work.
"""

import argparse
import contextlib
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_patch.errors import UserError
from megatron_patch.workflows.data.corpus import (
    Advance,
    Corpus,
    Installed,
    find_files,
    open_corpus,
    parse_source,
)
from megatron_patch.workflows.data.files import (
    Manifest,
    beside,
    is_foreign_json,
    is_whole,
    load_manifest,
    megatron_flags,
    move_into_place,
)
from megatron_patch.workflows.data.tokenization import Encoder, load_encoder, parse_tokenizer, train_bpe

_BATCH_BYTES = 4 << 20  # So many bytes are tokenized at once, over all cores.
_FEW_DOCUMENTS = 34  # With fewer, Megatron's default split 969,30,1 can leave no document for validation.


def prepare(
    source: Path | Installed,
    prefix: Path,
    *,
    tokenizer: str = "bytes",
    include: Sequence[str] = (),
    json_key: str = "text",
    max_bytes: int | None = None,
    seed: int = 1234,
    force: bool = False,
    quiet: bool = False,
) -> Manifest:
    """Tokenize `source` into the Megatron data set PREFIX.bin, PREFIX.idx, PREFIX.json.

    A data set of the same source and options is left unchanged, unless `force` is set. The options are those
    of the command line (`add_arguments`); `max_bytes` limits the documents in shuffled order.

    Raises:
        UserError: the input is bad, or the output cannot be written; PREFIX is unchanged, or has no index.
    """
    if max_bytes is not None and max_bytes < 1:
        raise UserError(f"max-bytes: {max_bytes}; allowed: 1 or more")
    if not 0 <= seed < 2**32:
        raise UserError(f"seed: {seed}; allowed: 0 to {2**32 - 1}")
    if not prefix.name or prefix.name == "..":
        raise UserError(f"out: {prefix} has no file name; allowed: a path such as {prefix / 'text'}")
    spec = parse_tokenizer(tokenizer)
    outputs = {beside(prefix, suffix).absolute() for suffix in (".bin", ".idx", ".json")}
    tokenizer_folder = beside(prefix, "-tokenizer").absolute()
    files = find_files(
        source, include, lambda p: p.absolute() in outputs or p.absolute().parent == tokenizer_folder
    )
    origin = str(source if isinstance(source, Installed) else source.absolute())
    nbytes = sum(path.stat().st_size for path in files)
    options: dict[str, Any] = {"tokenizer": tokenizer, "json_key": json_key, "max_bytes": max_bytes}
    options |= {"seed": seed, "include": list(include), "files": len(files), "bytes": nbytes}
    # Packages are not watched: their files have the times of installation, and `origin` has their versions.
    watched = [*(files if isinstance(source, Path) else ()), *([spec.path] if spec.kind == "file" else ())]
    try:
        if is_foreign_json(prefix):
            raise UserError(f"out: {beside(prefix, '.json')} exists and is no manifest; choose another --out")
        existing = None
        with contextlib.suppress(UserError):  # A damaged data set is prepared again.
            existing = load_manifest(prefix)
        same = existing and (existing.source, existing.options) == (origin, options)
        if existing and same and not force and not _newer(watched, beside(prefix, ".json")):
            _say(f"{prefix} is already prepared from this source and options; --force does it again", quiet)
            return existing
        if existing is None and not force and is_whole(prefix):
            raise UserError(
                f"out: {prefix} is a Megatron data set that prepare-data did not make; "
                "choose another --out, or overwrite it with --force"
            )
        prefix.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory(".partial", f".{prefix.name}.", prefix.parent) as name:
            folder = Path(name)
            with _progress("find documents", nbytes, quiet) as advance:
                corpus = open_corpus(files, json_key, max_bytes, seed, advance)
            if spec.kind == "bpe":
                with _progress("train tokenizer", corpus.source_bytes, quiet) as advance:
                    texts = (text for batch in _batches(corpus, advance) for text in batch)
                    encoder: Encoder = train_bpe(spec.size, texts)
            else:
                encoder = load_encoder(spec)
            encoder.save(folder / "tokenizer")
            documents, tokens = _write(folder / "set", corpus, encoder, quiet)
            manifest = Manifest(
                tokenizer=spec.kind,
                vocab_size=encoder.vocab_size,
                eod=encoder.eod,
                documents=documents,
                tokens=tokens,
                source=origin,
                source_bytes=corpus.source_bytes,
                megatron_flags=megatron_flags(spec.kind, prefix),
                options=options,
            )
            manifest = move_into_place(folder, prefix, manifest)
    except OSError as error:
        raise UserError(f"out: cannot write {prefix}: {error.strerror or error}") from error
    seconds = time.monotonic() - start
    vocabulary = f"vocabulary {encoder.vocab_size}, {seconds:.1f} s"
    _say(f"{prefix}: {documents:,} documents, {tokens:,} tokens, {vocabulary}", quiet)
    if documents < _FEW_DOCUMENTS:
        _say(
            "few documents: Megatron splits by document, so check that --split leaves some to validate", quiet
        )
    return manifest


def _newer(files: Sequence[Path], manifest: Path) -> bool:
    written = manifest.stat().st_mtime_ns
    return any(path.stat().st_mtime_ns >= written for path in files)


def _write(stem: Path, corpus: Corpus, encoder: Encoder, quiet: bool) -> tuple[int, int]:
    """Write `stem`.bin and `stem`.idx, and return the numbers of documents and tokens."""
    _say("loading megatron-core", quiet or not sys.stderr.isatty())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # These name Apex and Transformer Engine, which are not needed.
        from megatron.core.datasets import indexed_dataset

    documents = tokens = 0
    dtype = indexed_dataset.DType.optimal_dtype(encoder.vocab_size)
    builder = indexed_dataset.IndexedDatasetBuilder(indexed_dataset.get_bin_path(str(stem)), dtype=dtype)
    try:
        with _progress("tokenize", corpus.source_bytes, quiet) as advance:
            for batch in _batches(corpus, advance):
                for ids in encoder.encode(batch):
                    builder.add_document(ids, [len(ids)])
                    documents, tokens = documents + 1, tokens + len(ids)
        builder.finalize(indexed_dataset.get_idx_path(str(stem)))
    finally:
        # On a full disk closing fails as well, and would fail again, loudly, in the destructor.
        with contextlib.suppress(OSError):
            builder.data_file.close()
    if not documents:
        raise UserError(f"source: all {len(corpus.table)} documents are empty")
    return documents, tokens


def _batches(corpus: Corpus, advance: Advance) -> Iterator[list[bytes]]:
    """Yield the documents that are not empty, about `_BATCH_BYTES` at a time."""
    batch: list[bytes] = []
    held = 0
    for text, size in corpus.documents():
        if text:
            batch.append(text)
        held += size
        if held >= _BATCH_BYTES:
            yield batch
            advance(held)
            batch, held = [], 0
    yield batch
    advance(held)


def _say(line: str, quiet: bool) -> None:
    if not quiet:
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _progress(label: str, total: int, quiet: bool) -> Iterator[Advance]:
    """Show a bar on a terminal; yield a function that takes the bytes done since its last call."""
    from rich import console, progress

    columns: list[Any] = ["{task.description}", progress.BarColumn(), progress.DownloadColumn()]
    columns += [progress.TimeRemainingColumn()]
    silent = quiet or not sys.stderr.isatty()
    shown = console.Console(stderr=True)
    with progress.Progress(*columns, console=shown, transient=True, disable=silent) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.advance(task, done)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megatron-loco prepare-data`."""
    parser.add_argument(
        "source",
        nargs="?",
        default="stdlib",
        metavar="SOURCE",
        help="folder of text and .jsonl files, one file, or installed:NAME,... for the source of packages "
        "(default: stdlib, the Python standard library's)",
    )
    parser.add_argument(
        "--out", required=True, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx, PREFIX.json"
    )
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="T",
        help="bytes (default), bpe:SIZE to train one on this text, or the path of a tokenizer.json",
    )
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="GLOB",
        help="take only files that match, such as '*.py'; may be repeated (default: all but hidden files)",
    )
    parser.add_argument("--json-key", default="text", metavar="KEY", help="key of the text (default: text)")
    parser.add_argument("--max-bytes", type=int, metavar="N", help="stop after N bytes of source")
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="of the shuffle (default: 1234)")
    parser.add_argument("--force", action="store_true", help="prepare again, and overwrite another data set")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def run(args: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    if args.out.endswith("/") or Path(args.out).is_dir():
        raise UserError(f"out: {args.out} is a folder; allowed: a prefix, such as {Path(args.out) / 'text'}")
    manifest = prepare(
        parse_source(args.source),
        Path(args.out),
        tokenizer=args.tokenizer,
        include=args.include,
        json_key=args.json_key,
        max_bytes=args.max_bytes,
        seed=args.seed,
        force=args.force,
        quiet=args.quiet,
    )
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in manifest.megatron_flags.items())
    _say(f"train on it with: --data-path {args.out} {flags}", args.quiet)
    return 0
