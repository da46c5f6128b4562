"""prepare-data: what goes in comes out through Megatron's own reader, and a data set is whole or absent."""

import argparse
import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_patch.errors import UserError
from megatron_patch.workflows.data import corpus
from megatron_patch.workflows.data import files as data_files
from megatron_patch.workflows.data.command import add_arguments, prepare, run
from megatron_patch.workflows.data.corpus import STDLIB, Installed, parse_source
from megatron_patch.workflows.data.files import check_dataset, load_manifest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

TEXTS = {
    "a.txt": "Ein Satz über Äpfel.\n" * 40,
    "b/c.txt": "def square(x):\n    return x * x\n" * 30,
    "b/d.md": "naïve 漢字 🙂 text\n" * 20,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    for name, text in TEXTS.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return root


def documents(prefix: Path) -> list[np.ndarray]:
    """Every document's ids, read with Megatron's own reader."""
    data = IndexedDataset(str(prefix))
    assert list(data.document_indices) == list(range(len(data) + 1))
    return [np.array(data[i]) for i in range(len(data))]


def texts(prefix: Path) -> list[bytes]:
    """The documents of a `bytes` data set, which must each end in 256 and hold no other 256."""
    ids = documents(prefix)
    assert all(d[-1] == 256 and (d[:-1] < 256).all() for d in ids)
    return [d[:-1].astype(np.uint8).tobytes() for d in ids]


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(list(words)))


def megatron_tokenizer(flags: dict[str, str | int]) -> types.SimpleNamespace:
    names = "special_tokens chat_template vocab_file merge_file trust_remote_code metadata_path vocab_size"
    args = dict.fromkeys(names.split()) | {"pad_vocab_size": False, "tokenizer_hf_no_use_fast": False}
    args |= {"tokenizer_hf_no_include_special_tokens": False} | flags
    return build_tokenizer(types.SimpleNamespace(**args))


# What goes in comes out.


def test_folder_of_text_files(source, tmp_path):
    (source / "raw.txt").write_bytes(bytes(range(256)))
    (source / "empty.txt").touch()
    (source / ".hidden").write_text("no")
    manifest = prepare(source, tmp_path / "out" / "v1.5", quiet=True)
    expected = [text.encode() for text in TEXTS.values()] + [bytes(range(256))]
    assert sorted(texts(tmp_path / "out" / "v1.5")) == sorted(expected)
    assert manifest.documents == 4
    assert manifest.tokens == sum(map(len, expected)) + 4
    assert manifest.source_bytes == sum(map(len, expected))
    assert (manifest.tokenizer, manifest.vocab_size, manifest.eod) == ("bytes", 257, 256)
    assert load_manifest(tmp_path / "out" / "v1.5") == manifest
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["v1.5.bin", "v1.5.idx", "v1.5.json"]
    check_dataset(tmp_path / "out" / "v1.5")


def test_megatrons_null_tokenizer_agrees_on_size_and_end_of_document(source, tmp_path):
    manifest = prepare(source, tmp_path / "set", quiet=True)
    tokenizer = megatron_tokenizer(manifest.megatron_flags)
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)


def test_null_tokenizer_of_megatron_0_17_counts_without_the_end_of_document(monkeypatch):
    monkeypatch.setattr(data_files.metadata, "version", lambda name: "0.17.1")
    assert data_files.megatron_flags("bytes", Path("x"))["vocab_size"] == 256


@settings(max_examples=20, deadline=None)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=8).filter(any), st.integers(0, 2**32 - 1))
def test_any_bytes_come_back(contents, seed):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "source")
        root.mkdir()
        for number, content in enumerate(contents):
            (root / f"{number}").write_bytes(content)
        prepare(root, Path(folder, "set"), seed=seed, quiet=True)
        assert sorted(texts(Path(folder, "set"))) == sorted(filter(None, contents))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(max_size=60), min_size=1, max_size=8).filter(any), st.booleans())
def test_any_json_text_comes_back(entries, ascii_only):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "source.jsonl")
        path.write_text("\n".join(json.dumps({"text": e}, ensure_ascii=ascii_only) for e in entries), "utf-8")
        prepare(path, Path(folder, "set"), quiet=True)
        assert sorted(texts(Path(folder, "set"))) == sorted(e.encode() for e in entries if e)


def test_json_lines(tmp_path):
    path = tmp_path / "set.jsonl"
    lines = [
        b'\xef\xbb\xbf{"body": "first"}',
        b"",
        b"  ",
        b'{"body": ""}',
        b'{"body": "half \\ud83d", "n": 1}',
    ]
    path.write_bytes(b"\r\n".join(lines))
    manifest = prepare(path, tmp_path / "set", json_key="body", quiet=True)
    assert sorted(texts(tmp_path / "set")) == [b"first", b"half ?"]
    assert manifest.documents == 2


def test_more_json_files_than_are_kept_open(tmp_path):
    root = tmp_path / "source"
    root.mkdir()
    for number in range(corpus._OPEN_FILES + 5):
        (root / f"{number}.json").write_text("".join(f'{{"text": "{number}-{k}"}}\n' for k in range(3)))
    prepare(root, tmp_path / "set", quiet=True)
    assert len(set(texts(tmp_path / "set"))) == 3 * (corpus._OPEN_FILES + 5)


def test_default_source_is_the_standard_library(tmp_path):
    prepare(STDLIB, tmp_path / "set", max_bytes=300_000, quiet=True)
    found = texts(tmp_path / "set")
    assert sum(map(len, found)) == 300_000
    library = Path(argparse.__file__).parent
    assert len(corpus.find_files(STDLIB, ["argparse.py"], lambda path: False)) == 1
    below = [path.relative_to(library) for path in corpus.find_files(STDLIB, (), lambda path: False)]
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in below)


def test_packages_in_their_order_wherever_they_are_installed(tmp_path, monkeypatch):
    """The same documents in the same order from two places, of which the names sort differently."""
    files = {"zoo/a.py": "1", "zoo/deep/b.py": "2", "zoo/tests/c.py": "3", "zoo/x.h": "4", "alp/y.py": "5"}
    orders = []
    for place in ("first/lib", "zz/other"):
        root = tmp_path / place
        for name, text in files.items():
            path = root / "{}_pack/{}".format(*name.split("/", 1))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            (root / "{}_pack/__init__.py".format(name.split("/")[0])).touch()
        with monkeypatch.context() as context:
            context.syspath_prepend(root)
            found = corpus.find_files(parse_source("installed:zoo_pack, alp_pack"), (), lambda path: False)
            headers = corpus.find_files(parse_source("installed:zoo_pack/*.h"), (), lambda path: False)
            prepare(parse_source("installed:zoo_pack,alp_pack"), root / "set", quiet=True)
            orders.append((texts(root / "set"), [path.name for path in found], [p.name for p in headers]))
    assert orders[0] == orders[1]
    assert orders[0][1] == ["__init__.py", "a.py", "b.py", "__init__.py", "y.py"]
    assert orders[0][2] == ["x.h"]
    assert sorted(orders[0][0]) == [b"1", b"2", b"5"]
    assert "numpy " + np.__version__ in str(Installed((("numpy", "*.py"),)))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("installed:", "names no package"),
        ("installed:numpy,,scipy", "names no package"),
        ("installed:no_such_package", "no package of that name is installed"),
        ("installed:argparse", "no package of that name is installed"),  # a module without a folder
        ("installed:../etc", "no package of that name is installed"),
        ("installed:numpy/*.nothing", "no file in"),
    ],
)
def test_packages_that_are_not_there(source, words, tmp_path):
    with pytest.raises(UserError, match=words):
        prepare(parse_source(source), tmp_path / "set", quiet=True)
    assert not list(tmp_path.iterdir())


def test_order_depends_on_the_seed_alone(tmp_path):
    root = tmp_path / "source"
    root.mkdir()
    for number in range(20):
        (root / f"{number:02}").write_text(f"{number:02}")
    orders = []
    for name, seed in (("x", 1), ("y", 1), ("z", 2)):
        prepare(root, tmp_path / name, seed=seed, quiet=True)
        orders.append(texts(tmp_path / name))
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != sorted(orders[0])


def test_max_bytes_cuts_text_and_leaves_json_lines_whole(tmp_path):
    (tmp_path / "one.txt").write_text("0123456789")
    prepare(tmp_path / "one.txt", tmp_path / "t", max_bytes=4, quiet=True)
    assert texts(tmp_path / "t") == [b"0123"]
    (tmp_path / "two.jsonl").write_text('{"text": "aaaa"}\n' * 5)
    manifest = prepare(tmp_path / "two.jsonl", tmp_path / "j", max_bytes=2 * 17 + 5, quiet=True)
    assert texts(tmp_path / "j") == [b"aaaa", b"aaaa"]
    assert manifest.source_bytes == 34


def test_include_patterns_and_own_outputs_left_out(source):
    prepare(source, source / "set", include=["*.txt"], quiet=True)
    assert len(texts(source / "set")) == 2
    prepare(source, source / "set", include=["b/*", "nothing"], quiet=True)
    assert len(texts(source / "set")) == 2
    prepare(source, source / "set", tokenizer="bpe:300", quiet=True)
    manifest = prepare(source, source / "set", quiet=True)
    assert manifest.documents == 3
    assert sorted(texts(source / "set")) == sorted(text.encode() for text in TEXTS.values())


# Tokenizers.


@pytest.fixture
def offline(monkeypatch):
    def refuse(*args: object) -> None:
        raise AssertionError("a tokenizer of the data set must load without a network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_bpe_agrees_with_megatrons_tokenizer(source, tmp_path, offline):
    (source / "trap.txt").write_text("before <|endoftext|> after")
    manifest = prepare(source, tmp_path / "set", tokenizer="bpe:320", quiet=True)
    assert manifest.megatron_flags["tokenizer_model"] == str(tmp_path / "set-tokenizer")
    tokenizer = megatron_tokenizer(manifest.megatron_flags)
    assert (tokenizer.vocab_size, tokenizer.eod) == (manifest.vocab_size, manifest.eod) == (320, 0)
    assert tokenizer.pad not in (None, tokenizer.eod)
    ids = {bytes(d.tobytes()): d.tolist() for d in documents(tmp_path / "set")}.values()
    assert all(d[-1] == manifest.eod and manifest.eod not in d[:-1] for d in ids)
    for text in TEXTS.values():
        assert [*tokenizer.tokenize(text), tokenizer.eod] in ids
    assert {tokenizer.detokenize(d[:-1]) for d in ids} == {*TEXTS.values(), "before <|endoftext|> after"}


def test_bpe_smaller_than_asked_for(tmp_path):
    (tmp_path / "small.txt").write_text("aaaa")
    manifest = prepare(tmp_path / "small.txt", tmp_path / "set", tokenizer="bpe:5000", quiet=True)
    assert 256 < manifest.vocab_size < 300


def test_bytes_that_are_no_utf8_are_replaced_for_a_text_tokenizer(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"ab\xff\xfecd")
    manifest = prepare(tmp_path / "bad.txt", tmp_path / "set", tokenizer="bpe:300", quiet=True)
    tokenizer = megatron_tokenizer(manifest.megatron_flags)
    (ids,) = documents(tmp_path / "set")
    assert tokenizer.detokenize(ids[:-1].tolist()) == "ab\ufffd\ufffdcd"


def word_tokenizer(path: Path, words: list[str], **settings: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if "<s>" in words:
        begin = [("<s>", words.index("<s>"))]
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=begin)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


def test_tokenizer_file(tmp_path, offline):
    (tmp_path / "text.txt").write_text("one two one four")
    path = tmp_path / "hf" / "tokenizer.json"
    word_tokenizer(path, ["<unk>", "one", "two", "<s>", "</s>", "stop"])
    manifest = prepare(tmp_path / "text.txt", tmp_path / "set", tokenizer=str(path), quiet=True)
    assert [d.tolist() for d in documents(tmp_path / "set")] == [[3, 1, 2, 1, 0, 4]]
    tokenizer = megatron_tokenizer(manifest.megatron_flags)
    assert (tokenizer.vocab_size, tokenizer.eod) == (6, 4)
    assert tokenizer.tokenize("one two one four") == [3, 1, 2, 1, 0]

    (path.parent / "tokenizer_config.json").write_text('{"eos_token": {"content": "stop"}}')
    manifest = prepare(tmp_path / "text.txt", tmp_path / "set", tokenizer=str(path.parent), quiet=True)
    assert manifest.eod == megatron_tokenizer(manifest.megatron_flags).eod == 5


def test_large_vocabulary_takes_wider_ids(tmp_path):
    words = ["<unk>", "</s>", *(f"w{i}" for i in range(70_000))]
    word_tokenizer(tmp_path / "tokenizer.json", words)
    (tmp_path / "text.txt").write_text("w69999 w1")
    prepare(tmp_path / "text.txt", tmp_path / "set", tokenizer=str(tmp_path / "tokenizer.json"), quiet=True)
    assert [d.tolist() for d in documents(tmp_path / "set")] == [[70_001, 3, 1]]


def test_a_data_set_can_be_moved(source, tmp_path, offline):
    prepare(source, tmp_path / "set", tokenizer="bpe:300", quiet=True)
    (tmp_path / "there").mkdir()
    for path in tmp_path.glob("set*"):
        path.rename(tmp_path / "there" / path.name)
    manifest = load_manifest(tmp_path / "there" / "set")
    assert manifest
    assert megatron_tokenizer(manifest.megatron_flags).eod == manifest.eod


# Whole or absent.


def test_same_source_and_options_are_left_alone(source, tmp_path, capsys):
    prefix = tmp_path / "set"
    first = prepare(source, prefix, quiet=True)
    before = (tmp_path / "set.bin").stat().st_ino
    assert prepare(source, prefix) == first
    assert "already prepared" in capsys.readouterr().err
    assert (tmp_path / "set.bin").stat().st_ino == before
    prepare(source, prefix, force=True, quiet=True)
    assert (tmp_path / "set.bin").stat().st_ino != before

    assert prepare(source, prefix, seed=5, quiet=True).options != first.options
    for text in (b"changed", b"CHANGED"):  # The second change leaves the sizes as they are.
        (source / "a.txt").write_bytes(text)
        prepare(source, prefix, quiet=True)
        assert text in texts(prefix)


def test_a_data_set_of_an_earlier_release_is_read(source, tmp_path):
    prefix = tmp_path / "set"
    prepare(source, prefix, quiet=True)
    path = tmp_path / "set.json"
    content = json.loads(path.read_text())
    del content["options"]
    path.write_text(json.dumps(content | {"fingerprint": "0123"}))
    assert load_manifest(prefix).tokenizer == "bytes"
    check_dataset(prefix)


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_a_truncated_file_is_seen_and_mended(source, tmp_path, suffix):
    prefix = tmp_path / "set"
    whole = prepare(source, prefix, quiet=True)
    path = tmp_path / f"set{suffix}"
    os.truncate(path, path.stat().st_size - 8)
    for check in (load_manifest, check_dataset):
        with pytest.raises(UserError, match=r"data: .*set\.(bin|idx|json) .*(damaged|bytes|cut off)"):
            check(prefix)
    assert prepare(source, prefix, quiet=True) == whole
    check_dataset(prefix)


def test_a_missing_file_is_seen(source, tmp_path):
    prefix = tmp_path / "set"
    assert load_manifest(prefix) is None
    prepare(source, prefix, quiet=True)
    (tmp_path / "set.idx").unlink()
    with pytest.raises(UserError, match=r"set\.idx is missing"):
        load_manifest(prefix)
    with pytest.raises(UserError, match=r"set\.idx does not exist"):
        check_dataset(prefix)


def in_child(work: Callable[[], object]) -> int:
    """Run in a forked process (Megatron is already imported); returns its wait status."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def kill_before(owner: type, names: list[str], calls: int) -> None:
    """Make the process kill itself, as kill -9 does, before it makes one more than `calls` of these calls."""
    made = 0

    def wrap(function: Callable[..., object]) -> Callable[..., object]:
        def counting(*args: object, **kwargs: object) -> object:
            nonlocal made
            if made == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            made += 1
            return function(*args, **kwargs)

        return counting

    for name in names:
        setattr(owner, name, wrap(getattr(owner, name)))


@pytest.mark.parametrize("earlier", [False, True], ids=["nothing-before", "replaces-another"])
@pytest.mark.parametrize("step", ["tokenize", 0, 1, 2, 3])
def test_kill_9_leaves_nothing_that_passes_for_a_data_set(source, tmp_path, step, earlier):
    prefix = tmp_path / "set"
    if earlier:  # Sizes alone could not tell a mixture: they are the same, in another order.
        prepare(source, prefix, seed=1, quiet=True)
        old = texts(prefix)

    def work() -> None:
        if step == "tokenize":
            kill_before(IndexedDatasetBuilder, ["add_document"], 2)
        else:
            kill_before(Path, ["unlink", "replace"], step)
        prepare(source, prefix, seed=2, quiet=True)

    status = in_child(work)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    if earlier and step in ("tokenize", 0):
        assert load_manifest(prefix)
        assert texts(prefix) == old
    else:
        with pytest.raises(UserError, match="does not exist"):
            check_dataset(prefix)

    prepare(source, prefix, seed=2, quiet=True)
    prepare(source, tmp_path / "other", seed=2, quiet=True)
    assert texts(prefix) == texts(tmp_path / "other")
    check_dataset(prefix)


def test_an_interrupt_cleans_up(source, tmp_path, monkeypatch):
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(IndexedDatasetBuilder, "add_document", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, tmp_path / "set", quiet=True)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_a_full_disk_is_one_line_and_cleans_up(tmp_path):
    (tmp_path / "big.txt").write_bytes(bytes(300_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UserError, match=r"out: cannot write .*set: File too large"):
            prepare(tmp_path / "big.txt", tmp_path / "set", quiet=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["big.txt"]


def test_data_of_others_is_not_overwritten(source, tmp_path):
    prefix = tmp_path / "set"
    prepare(source, prefix, quiet=True)
    (tmp_path / "set.json").unlink()
    check_dataset(prefix)  # as a data set of Megatron's own preprocessing, without a manifest
    with pytest.raises(UserError, match="did not make"):
        prepare(source, prefix, seed=2, quiet=True)
    prepare(source, prefix, seed=2, force=True, quiet=True)

    (tmp_path / "mine.json").write_text('{"text": "precious"}\n')
    for options in ({}, {"force": True}):
        with pytest.raises(UserError, match="no manifest; choose another"):
            prepare(source, tmp_path / "mine", quiet=True, **options)
        with pytest.raises(UserError, match="matches"):
            prepare(tmp_path / "mine.json", tmp_path / "mine", quiet=True, **options)
    assert (tmp_path / "mine.json").read_text() == '{"text": "precious"}\n'
    assert load_manifest(tmp_path / "mine") is None


# Bad input, one line each.


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["SOURCE/nowhere"], r"source: .*nowhere does not exist; allowed: a folder"),
        (["SOURCE", "--include", "*.rs"], r"source: no file in .* matches --include \*\.rs"),
        (
            ["broken.jsonl"],
            r"source: .*broken\.jsonl:3: not valid JSON \(.* at column 10\); allowed: one JSON",
        ),
        (["list.json"], r"source: .*list\.json:1: a JSON list; allowed: one JSON object per line"),
        (["keys.jsonl"], r"source: .*keys\.jsonl:2: no key 'text' .*; keys found: body, title"),
        (["number.jsonl"], r"source: .*number\.jsonl:1: key 'text' holds a int; allowed: a string"),
        (["blank.jsonl"], r"source: no document is left: the files are empty"),
        (["void.jsonl"], r"source: all 1 documents are empty"),
        (["keys.jsonl", "--max-bytes", "3"], r"source: no document is left: max-bytes is 3"),
        (["SOURCE", "--max-bytes", "-5"], r"max-bytes: -5; allowed: 1 or more"),
        (["SOURCE", "--seed", "-1"], r"seed: -1; allowed: 0 to"),
        (["SOURCE", "--tokenizer", "bpe:many"], r"tokenizer: 'bpe:many'; allowed: bpe:SIZE with .* from 300"),
        (["SOURCE", "--tokenizer", "bpe:299"], r"tokenizer: 'bpe:299'; allowed: bpe:SIZE with .* from 300"),
        (["SOURCE", "--tokenizer", "bpe"], r"tokenizer: 'bpe'; allowed: bpe:SIZE"),
        (["SOURCE", "--tokenizer", "byte"], r"tokenizer: 'byte' is neither .*allowed: bytes, bpe:SIZE, or"),
        (
            ["SOURCE", "--tokenizer", "list.json"],
            r"tokenizer: .*list\.json is not a Hugging Face tokenizer file",
        ),
        (["SOURCE", "--tokenizer", "binary"], r"tokenizer: cannot read .*binary"),
        (["SOURCE", "--tokenizer", "no_eos.json"], r"tokenizer: .*no_eos\.json has no end-of-document token"),
        (["SOURCE", "--tokenizer", "gaps.json"], r"tokenizer: .*gaps\.json has gaps in its ids: 2 tokens"),
        (["SOURCE", "--out", "keys.jsonl/set"], r"out: cannot write .*set: (Not a directory|File exists)"),
        (["SOURCE", "--out", "new/"], r"out: new/ is a folder; allowed: a prefix, such as new/text"),
        (["SOURCE", "--out", "."], r"out: \. is a folder; allowed: a prefix, such as text"),
    ],
)
def test_bad_input_is_one_clear_line(source, tmp_path, monkeypatch, words, line):
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n\n{"text": oops}\n{"text": "b"}\n')
    (tmp_path / "list.json").write_text('["text"]\n')
    (tmp_path / "keys.jsonl").write_text('{"text": "good"}\n{"body": "b", "title": "t"}\n')
    (tmp_path / "number.jsonl").write_text('{"text": 7}\n')
    (tmp_path / "blank.jsonl").write_text("\n  \n")
    (tmp_path / "void.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    word_tokenizer(tmp_path / "no_eos.json", ["<unk>", "one"])
    word_tokenizer(tmp_path / "gaps.json", ["<unk>", "</s>"])
    gaps = (tmp_path / "gaps.json").read_text().replace('"</s>": 1', '"</s>": 5')
    (tmp_path / "gaps.json").write_text(gaps)
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    out = [] if "--out" in words else ["--out", "set"]
    with pytest.raises(UserError, match=line) as caught:
        command(*(word.replace("SOURCE", str(source)) for word in words), *out, "--quiet")
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def test_check_dataset_says_what_is_wrong(source, tmp_path):
    prefix = tmp_path / "set"
    with pytest.raises(UserError, match=r"set\.bin does not exist; prepare it: megatron-loco prepare-data"):
        check_dataset(prefix)
    prepare(source, prefix, quiet=True)
    for wrong, hint in (
        (tmp_path / "set.bin", r"give the prefix without its ending: .*set$"),
        (tmp_path / "sett", r"sett\.bin does not exist; did you mean .*set\?"),
    ):
        with pytest.raises(UserError, match=hint):
            check_dataset(wrong)
    (tmp_path / "books_text_document.idx").touch()
    with pytest.raises(UserError, match=r"did you mean .*books_text_document\?"):
        check_dataset(tmp_path / "books")

    (tmp_path / "set.json").unlink()
    index = (tmp_path / "set.idx").read_bytes()
    for damage, line in (
        (b"PK\x03\x04" + index[4:], r"set\.idx is no Megatron index: it begins with b'PK"),
        (index[:20], r"cannot read .*set\.idx: .*cut off"),
        (index[:9] + b"\x02" + index[10:], r"version 2"),
        (index[:-8], r"its header says"),
        (index[:18] + bytes(16), r"0 documents"),
    ):
        (tmp_path / "set.idx").write_bytes(damage)
        with pytest.raises(UserError, match=line):
            check_dataset(prefix)
    (tmp_path / "set.idx").write_bytes(index)
    check_dataset(prefix)
    with (tmp_path / "set.bin").open("ab") as stream:
        stream.write(b"xx")
    with pytest.raises(UserError, match=r"set\.bin has .* bytes, .*set\.idx says"):
        check_dataset(prefix)


# What the user sees.


def test_plain_lines_without_a_terminal(source, tmp_path, capsys):
    assert command(str(source), "--out", str(tmp_path / "set")) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'set'}: 3 documents, ")
    assert lines[1].startswith("few documents")
    assert lines[2].endswith(
        f"--data-path {tmp_path / 'set'} --tokenizer-type NullTokenizer --vocab-size 257"
    )
    assert command(str(source), "--out", str(tmp_path / "set"), "--force", "--quiet") == 0
    assert capsys.readouterr() == ("", "")


def test_progress_bar_on_a_terminal(source, tmp_path, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    prepare(source, tmp_path / "set")
    assert "tokenize" in terminal.getvalue()
    assert "\x1b[" in terminal.getvalue()


def test_help_and_reuse_need_neither_torch_nor_megatron(source, tmp_path):
    prepare(source, tmp_path / "set", quiet=True)
    script = (
        "import sys; from pathlib import Path; from megatron_patch.workflows.data.command import prepare\n"
        f"prepare(Path({str(source)!r}), Path({str(tmp_path / 'set')!r}))\n"
        "sys.exit(' '.join({'torch', 'megatron', 'transformers', 'tokenizers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "already prepared" in done.stderr
