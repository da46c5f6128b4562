"""prepare-data: what goes in comes out through Megatron's own reader, and a data set is whole or absent."""

import contextlib
import itertools
import json
import os
import re
import resource
import signal
import socket
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_patch.errors import UserError
from megatron_patch.workflows import data
from megatron_patch.workflows.cli import main
from megatron_patch.workflows.data import check_dataset, find_files, load_manifest, parse_source, prepare

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

TEXTS = {
    "a.txt": "Ein Satz über Äpfel.\n" * 40,
    "b/c.txt": "def square(x):\n    return x * x\n" * 30,
    "b/d.md": "naïve 漢字 🙂 text\n" * 20,
}
SOURCE = "installed:corpus_of_a_test/*"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package of the files in TEXTS, which SOURCE names."""
    root = tmp_path / "library" / "corpus_of_a_test"
    for name, text in TEXTS.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    (root / "__init__.py").touch()
    monkeypatch.syspath_prepend(root.parent)
    return root


def documents(prefix: Path) -> list[np.ndarray]:
    """Every document's ids, read with Megatron's own reader."""
    dataset = IndexedDataset(str(prefix))
    assert list(dataset.document_indices) == list(range(len(dataset) + 1))
    return [np.array(dataset[i]) for i in range(len(dataset))]


def texts(prefix: Path) -> list[bytes]:
    """The documents of a `bytes` data set, which must each end in 256 and hold no other 256."""
    ids = documents(prefix)
    assert all(d[-1] == 256 and (d[:-1] < 256).all() for d in ids)
    return [d[:-1].astype(np.uint8).tobytes() for d in ids]


def megatron_tokenizer(prefix: Path) -> types.SimpleNamespace:
    """The tokenizer that Megatron builds of a data set's flags."""
    manifest = load_manifest(prefix)
    assert manifest
    names = "special_tokens chat_template vocab_file merge_file trust_remote_code metadata_path vocab_size"
    args = dict.fromkeys(names.split()) | {"pad_vocab_size": False, "tokenizer_hf_no_use_fast": False}
    args |= {"tokenizer_hf_no_include_special_tokens": False}
    args |= data.megatron_flags(prefix, manifest["tokenizer"])
    return build_tokenizer(types.SimpleNamespace(**args))


def test_bytes(package, tmp_path):
    (package / "raw.txt").write_bytes(bytes(range(256)))
    (package / ".hidden").write_text("no")
    prefix = tmp_path / "out" / "v1.5"
    prepare(SOURCE, prefix)
    expected = [text.encode() for text in TEXTS.values()] + [bytes(range(256))]
    assert sorted(texts(prefix)) == sorted(expected)
    assert texts(prefix) != sorted(texts(prefix))
    manifest = load_manifest(prefix)
    assert (manifest["documents"], manifest["tokens"]) == (4, sum(map(len, expected)) + 4)
    assert manifest["source"].startswith("corpus_of_a_test ")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["v1.5.bin", "v1.5.idx", "v1.5.json"]
    check_dataset(prefix)
    assert documents(prefix)[0].dtype == np.uint16
    tokenizer = megatron_tokenizer(prefix)
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)


def test_null_tokenizer_of_megatron_0_17_counts_without_the_end_of_document(monkeypatch):
    monkeypatch.setattr(data.metadata, "version", lambda name: "0.17.1")
    assert data.megatron_flags(Path("x"), "bytes")["vocab_size"] == 256


def test_default_source_is_the_standard_library():
    library = Path(json.__file__).parents[1]
    below = [path.relative_to(library) for path in find_files(parse_source("stdlib"))]
    assert Path("argparse.py") in below
    assert Path("json/decoder.py") in below
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in below)


def test_packages_in_their_order_wherever_they_are_installed(tmp_path, monkeypatch):
    """The same documents in the same order from two places, of which the names sort differently."""
    files = {"zoo/a.py": "1", "zoo/deep/b.py": "2", "zoo/tests/c.py": "3", "zoo/x.h": "4", "alp/y.py": "5"}
    orders = []
    for place in ("first/lib", "zz/other"):
        root = tmp_path / place
        for name, text in (files | {"zoo/__init__.py": "", "alp/__init__.py": ""}).items():
            path = root / "{}_pack/{}".format(*name.split("/", 1))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        with monkeypatch.context() as context:
            context.syspath_prepend(root)
            asked = ("zoo_pack, alp_pack", "zoo_pack/*.h", "zoo_pack/deep/*")
            found = [[path.name for path in find_files(parse_source(f"installed:{one}"))] for one in asked]
            prepare("installed:zoo_pack,alp_pack", root / "set")
            orders.append((texts(root / "set"), found))
    assert orders[0] == orders[1]
    assert orders[0][1] == [["__init__.py", "a.py", "b.py", "__init__.py", "y.py"], ["x.h"], ["b.py"]]
    assert sorted(orders[0][0]) == [b"1", b"2", b"5"]


@pytest.fixture
def offline(monkeypatch):
    def refuse(*args: object) -> None:
        raise AssertionError("a tokenizer of the data set must load without a network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_bpe_agrees_with_megatrons_tokenizer(package, tmp_path, offline):
    (package / "trap.txt").write_text("before <|endoftext|> after")
    (package / "bad.txt").write_bytes(b"ab\xff\xfecd")  # no UTF-8: replaced for a tokenizer of text
    prepare(SOURCE, tmp_path / "set", "bpe:320")
    tokenizer = megatron_tokenizer(tmp_path / "set")
    assert (tokenizer.vocab_size, tokenizer.eod) == (320, 0)
    assert tokenizer.pad not in (None, tokenizer.eod)
    ids = {bytes(d.tobytes()): d.tolist() for d in documents(tmp_path / "set")}.values()
    assert all(d[-1] == tokenizer.eod and tokenizer.eod not in d[:-1] for d in ids)
    for text in TEXTS.values():
        assert [*tokenizer.tokenize(text), tokenizer.eod] in ids
    strange = ["before <|endoftext|> after", "ab\ufffd\ufffdcd"]
    assert {tokenizer.detokenize(d[:-1]) for d in ids} == {*TEXTS.values(), *strange}


def test_a_tokenizer_trained_before_serves_other_text_and_may_be_moved(package, tmp_path, offline):
    trained = tmp_path / "there/first-tokenizer"
    prepare(SOURCE, tmp_path / "first", "bpe:320")
    (tmp_path / "there").mkdir()
    for path in tmp_path.glob("first*"):
        path.rename(tmp_path / "there" / path.name)
    other = "installed:corpus_of_a_test/b/c.txt"
    prepare(other, tmp_path / "other", str(trained))
    tokenizer = megatron_tokenizer(tmp_path / "there/first")
    (ids,) = documents(tmp_path / "other")
    assert ids.tolist() == [*tokenizer.tokenize(TEXTS["b/c.txt"]), tokenizer.eod]
    assert megatron_tokenizer(tmp_path / "other").vocab_size == tokenizer.vocab_size

    before = (tmp_path / "other.bin").stat().st_ino
    prepare(other, tmp_path / "other", str(trained))
    assert (tmp_path / "other.bin").stat().st_ino == before
    (package / "e.txt").write_text("quite different words " * 50)
    prepare(SOURCE, tmp_path / "there/first", "bpe:320")  # It is another tokenizer now, at the same place.
    prepare(other, tmp_path / "other", str(trained))
    assert (tmp_path / "other.bin").stat().st_ino != before


def test_same_source_and_tokenizer_are_left_alone(package, tmp_path, capsys):
    prefix = tmp_path / "set"
    prepare(SOURCE, prefix)
    before = (tmp_path / "set.bin").stat().st_ino
    capsys.readouterr()
    prepare(SOURCE, prefix)
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "set.bin").stat().st_ino == before
    (package / "a.txt").write_bytes(b"changed")
    prepare(SOURCE, prefix)
    assert b"changed" in texts(prefix)
    prepare(SOURCE, prefix, "bpe:300")
    assert megatron_tokenizer(prefix).vocab_size == 300
    # A data set of an earlier release is read, and not taken for another.
    content = json.loads((tmp_path / "set.json").read_text())
    content |= {"tokenizer": "file", "options": {"tokenizer": "x/tokenizer.json", "json_key": "text"}}
    (tmp_path / "set.json").write_text(json.dumps(content))
    assert megatron_tokenizer(prefix).vocab_size == 300
    check_dataset(prefix)
    prepare(SOURCE, prefix, "bpe:300")
    assert load_manifest(prefix)["tokenizer"] == "bpe"


def test_a_truncated_file_is_seen_and_mended(package, tmp_path):
    prefix = tmp_path / "set"
    prepare(SOURCE, prefix)
    whole = texts(prefix)
    for path in (tmp_path / "set.bin", tmp_path / "set.idx"):
        os.truncate(path, path.stat().st_size - 8)
        with pytest.raises(UserError, match=r"data: .*set\.(bin|idx) .*(bytes|cut off)"):
            check_dataset(prefix)
        prepare(SOURCE, prefix)
        check_dataset(prefix)
        assert texts(prefix) == whole


def in_child(work: Callable[[], object]) -> int:
    """Run in a forked process (Megatron is already imported); returns its wait status."""
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def kill_before(owner: type, names: list[str], calls: int) -> None:
    """Make the process kill itself, as kill -9 does, before it makes one more than `calls` of these calls."""
    counted = itertools.count()

    def wrap(function: Callable[..., object]) -> Callable[..., object]:
        def counting(*args: object, **kwargs: object) -> object:
            if next(counted) == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counting

    for name in names:
        setattr(owner, name, wrap(getattr(owner, name)))


@pytest.mark.parametrize(
    ("step", "earlier"), [("tokenize", True), (0, True), (1, True), (2, True), (3, True), (2, False)]
)
def test_kill_9_leaves_nothing_that_passes_for_a_data_set(package, tmp_path, step, earlier):
    prefix = tmp_path / "set"
    if earlier:  # Sizes alone could not tell a mixture: they are the same.
        prepare(SOURCE, prefix)
        old = texts(prefix)
        (package / "a.txt").write_text(TEXTS["a.txt"].upper())
        (package / "one_more.txt").write_text("\n")

    def work() -> None:
        if step == "tokenize":
            kill_before(IndexedDatasetBuilder, ["add_document"], 2)
        else:
            kill_before(Path, ["unlink", "replace"], step)
        prepare(SOURCE, prefix)

    status = in_child(work)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    if earlier and step in ("tokenize", 0):
        assert load_manifest(prefix)
        assert texts(prefix) == old
    else:
        with pytest.raises(UserError, match="does not exist"):
            check_dataset(prefix)

    prepare(SOURCE, prefix)
    prepare(SOURCE, tmp_path / "other")
    assert texts(prefix) == texts(tmp_path / "other")
    check_dataset(prefix)


def test_an_interrupt_and_a_full_disk_leave_nothing(package, tmp_path, monkeypatch):
    (package / "big.txt").write_bytes(bytes(300_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UserError, match=r"out: cannot write .*set: File too large"):
            prepare(SOURCE, tmp_path / "set")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["library"]

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(IndexedDatasetBuilder, "add_document", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(SOURCE, tmp_path / "set")
    assert [p.name for p in tmp_path.iterdir()] == ["library"]


def test_data_of_others_is_not_overwritten(package, tmp_path):
    prefix = tmp_path / "set"
    prepare(SOURCE, prefix)
    (tmp_path / "set.json").unlink()
    check_dataset(prefix)  # as a data set of Megatron's own preprocessing, without a manifest
    (tmp_path / "mine.json").write_text('{"text": "precious"}\n')
    for theirs in (prefix, tmp_path / "mine"):
        with pytest.raises(UserError, match="did not write; choose another"):
            prepare(SOURCE, theirs)
    assert (tmp_path / "mine.json").read_text() == '{"text": "precious"}\n'
    assert load_manifest(tmp_path / "mine") is None


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["texts.jsonl"],
            r"source: 'texts\.jsonl'; allowed: stdlib, installed:NAME.*tools/preprocess_data\.py",
        ),
        (["installed:numpy,,scipy"], r"source: 'installed:numpy,,scipy'; allowed"),
        (["installed:argparse"], "no package of that name is installed"),  # a module without a folder
        (["installed:../etc"], "no package of that name is installed"),
        (["installed:numpy/*.nothing"], r"source: no file in .* matches \*\.nothing"),
        (["installed:corpus_of_a_test"], r"source: the files are empty, as .*__init__\.py"),
        ([SOURCE, "--tokenizer", "bpe:299"], r"tokenizer: 'bpe:299'; allowed: bpe:SIZE with SIZE 300"),
        ([SOURCE, "--tokenizer", "bpe"], r"tokenizer: 'bpe'; allowed: bpe:SIZE"),
        ([SOURCE, "--tokenizer", "theirs"], r"tokenizer: 'theirs'; allowed: .*tools/preprocess_data\.py"),
        ([SOURCE, "--out", "theirs/tokenizer.json/set"], r"out: cannot write .*set: (Not a dir|File exists)"),
        ([SOURCE, "--out", "new/"], r"out: new/ is a folder; allowed: a prefix, such as new/text"),
    ],
)
def test_bad_input_is_one_clear_line(package, tmp_path, monkeypatch, capsys, words, line):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "tokenizer.json").write_text('{"model": {"type": "WordLevel"}}')
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    assert main(["prepare-data", *words, *([] if "--out" in words else ["--out", "set"])]) == 2
    *_, said = capsys.readouterr().err.splitlines()
    assert said.startswith("megatron-loco: error: ")
    assert re.search(line, said)
    assert sorted(tmp_path.iterdir()) == before


def test_check_dataset_says_what_is_wrong(package, tmp_path):
    prefix = tmp_path / "set"
    with pytest.raises(UserError, match=r"set\.bin does not exist; Megatron's tools/preprocess_data\.py"):
        check_dataset(prefix)
    prepare(SOURCE, prefix)
    with pytest.raises(UserError, match=r"give the prefix without its ending: .*set$"):
        check_dataset(tmp_path / "set.bin")
    (tmp_path / "books_text_document.idx").touch()
    with pytest.raises(UserError, match=r"did you mean .*books_text_document\?"):
        check_dataset(tmp_path / "books")

    index = (tmp_path / "set.idx").read_bytes()
    version = index[:9] + b"\x02" + index[10:]
    for damaged in (b"PK\x03\x04" + index[4:], version, index[:-8], index[:18] + bytes(16), b""):
        (tmp_path / "set.idx").write_bytes(damaged)
        with pytest.raises(UserError, match=r"set\.idx cannot be read, it may be cut off: .") as caught:
            check_dataset(prefix)
        assert "\n" not in str(caught.value)
