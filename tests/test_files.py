"""YAML and JSON of other users' making: what is wrong with a file is said in one line that names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_patch.errors import UserError
from megatron_patch.files import DEEPEST, Unfit, load_json, load_yaml
from megatron_patch.workflows.ablation import definition
from megatron_patch.workflows.run import configuration
from megatron_patch.workflows.run_reader import read_run


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "in one another"),
        ("[" * 100_000, "in one another"),
        ("a: " + "9" * 5000, "4300 digits"),
        ("a: 2026-99-99", "month"),
        ("? [1]\n: 2", "unhashable"),
        ("a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("a: [", "^line 2: did not find"),
        (b"ab\xff", "byte 0xff in position 2"),
    ],
)
def test_yaml_that_is_refused(text: str | bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(Unfit, match=words) as found:
        load_yaml(path)
    assert len(str(found.value).splitlines()) == 1


def test_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("a: &a [1, {b: x}]\nc: *a\nd: {<<: {e: .nan}, f: 2026-11-22}")
    text, content = load_yaml(path)
    assert (text, content["c"]) == (path.read_text(), [1, {"b": "x"}])
    assert load_json('{"a": [1, -2.5, Infinity, "\\u00e9"]}') == {"a": [1, -2.5, float("inf"), "é"]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "too many brackets"),
        ('{"a": ' + "9" * 5000 + "}", "4300 digits"),
        (b"\xff", "utf-8"),
        ("{", "line 1"),
    ],
)
def test_json_that_is_refused(text: str | bytes, words: str) -> None:
    with pytest.raises(Unfit, match=words):
        load_json(text)


def test_a_message_is_one_line_of_readable_length() -> None:
    assert str(UserError("a\nb\x1b[2J\u2028é")) == "a\\nb\\x1b[2J\\u2028é"
    assert len(str(UserError("x" * 10_000))) < 2000


ABLATION = {
    "base": "configs/models/llama_tiny.yaml",
    "seeds": [3, 1],
    "baseline": {"compression.method": "none"},
    "cells": [{"compression.method": "loco"}],
}


@pytest.mark.parametrize(
    ("read", "content", "words"),
    [
        (configuration.load, "5", "trial.yaml"),
        (configuration.load, "compression: {method: '${megatron.lr}'}", "'megatron.lr' not found"),
        (configuration.load, f"defaults: [{'x' * 300}]", "too long"),
        (configuration.load, "defaults: ['${x}']", "not found"),
        (configuration.load, "megatron: {lr: 1, lr: 2}", "not valid YAML"),
        (configuration.load, "megatron: " + "[" * 50_000, "not valid YAML"),
        (
            configuration.load,
            "megatron: {lr: '${megatron.min_lr}', min_lr: '${megatron.lr}'}",
            "Recursive interpolation",
        ),
        (definition.read, yaml.safe_dump(ABLATION | {"contrast": ["x"]}), "contrast"),
        (definition.read, yaml.safe_dump(ABLATION | {"seeds": [[3]]}), "seeds"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(
    read: Callable[[Path], Any], content: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "trial.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=words) as found:
        read(path)
    assert len(str(found.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("summary.json", "{", "is no JSON"),
        ("summary.json", "[]", "is no summary of a run"),
        ("summary.json", '{"step_seconds": 5}', ""),
        ("metrics.jsonl", 'hello\n{"step": 5}\n', "line 1 is no JSON: 'hello'"),
        ("metrics.jsonl", "torn, but by no run", "line 1 is no JSON"),
        ("metrics.jsonl", '{"loss": 1}\n', "line 1 is no record of a step"),
        ("metrics.jsonl", '{"step": 5, "raw_weight_gathers": [1]}', ""),
        ("metrics.jsonl", "[" * 100_000, ""),
        ("config.yaml", "a: " + "[" * 50_000, "is no YAML"),
    ],
)
def test_a_file_that_no_run_leaves_is_named(name: str, content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"{name}.*{told}"):
        read_run(tmp_path)
