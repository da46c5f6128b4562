"""YAML and JSON of other users' making: bounded before anything is built, and refused in one line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron_patch.errors import UserError
from megatron_patch.untrusted import DEEPEST, MOST_BYTES, Unfit, load_json, load_yaml, read_text

BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "aliases expanded"),
        ("a: &a [*a]", "no anchor that is complete"),
        ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "in one another"),
        ("[" * 100_000, "in one another"),
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' is there twice"),
        ("a: " + "9" * 5000, "4300 digits"),
        ("a: 0x" + "f" * 50, "64 at most"),
        ("a: " + "1:" * 40_000 + "1", "characters"),
        ("a: 1.0e+200", "1e[+]100 at most"),
        ("a: 2026-99-99", "month"),
        ("? [1]\n: 2", "unhashable"),
        ("a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("a: [", "^line 2: did not find"),
    ],
)
def test_yaml_beyond_the_bounds(text: str, words: str) -> None:
    start = time.process_time()
    with pytest.raises(Unfit, match=words) as found:
        load_yaml(text)
    assert time.process_time() - start < 5
    assert len(str(found.value).splitlines()) == 1


def test_yaml_within_the_bounds() -> None:
    assert load_yaml("a: &a [1, {b: x}]\nc: *a\nd: {<<: {e: .nan}, f: 2026-11-22}")["c"] == [1, {"b": "x"}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "too many brackets"),
        ('{"a": ' + "9" * 5000 + "}", "more than 64 bits"),
        ("1e200", "beyond"),
        (r'"\ud800"', "half of a character"),
        (b"\xff", "utf-8"),
        ("{", "line 1"),
    ],
)
def test_json_beyond_the_bounds(text: str | bytes, words: str) -> None:
    with pytest.raises(Unfit, match=words):
        load_json(text)


def test_json_within_the_bounds() -> None:
    assert load_json('{"a": [1, -2.5, Infinity, "\\u00e9"]}') == {"a": [1, -2.5, float("inf"), "é"]}


def test_a_file_that_is_too_long_or_no_text(tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    path.write_bytes(b"x" * (MOST_BYTES + 1))
    with pytest.raises(Unfit, match="longer than"):
        read_text(path)
    path.write_bytes(b"ab\xff")
    with pytest.raises(Unfit, match="byte 2 is 0xff"):
        read_text(path)


def test_a_message_is_one_line_of_readable_length() -> None:
    assert str(UserError("a\nb\x1b[2J\u2028é")) == "a\\nb\\x1b[2J\\u2028é"
    assert len(str(UserError("x" * 10_000))) < 2000
