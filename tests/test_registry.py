"""The registry of codecs and exchanges: what it refuses, and what configurations make of an entry."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import megatron_patch
from megatron_patch import registry
from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.quantization.levels import LEVELS
from megatron_patch.quantization.rotation import NONE


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_codecs", dict(registry._codecs))
    monkeypatch.setattr(registry, "_topologies", dict(registry._topologies))


def made(name: str, *bits: int, **options: Any) -> type:
    @megatron_patch.register_codec(name, bits, **options)
    @dataclass(frozen=True)
    class Theirs:
        bits: int
        rotation: Any

    return Theirs


def test_a_configuration_takes_what_a_codec_says_of_itself():
    made("wide", 8, 4)
    made("turned", 4, rotated=True)
    assert CompressionConfig(codec="wide").bits == 4
    assert CompressionConfig(codec="wide", bits=8).rotation == "none"
    assert CompressionConfig(codec="turned").bits == 4
    assert CompressionConfig(codec="turned").rotation == "hadamard"
    made("other", 2)
    assert CompressionConfig(codec="other").bits == 2
    with pytest.raises(UserError, match=r"must be uniform or levels or other with bits 2 .wide has 8, 4"):
        CompressionConfig(codec="wide", bits=2)


def test_a_name_that_is_taken_is_refused():
    for name in ("uniform", "sign", "no name"):
        with pytest.raises(UserError, match=f"'{name}' is"):
            made(name, 4)
    first = made("mine", 4)
    second = type("Another", (first,), {"__module__": "elsewhere"})
    with pytest.raises(UserError, match=r"elsewhere\.Another: 'mine' is taken"):
        megatron_patch.register_codec("mine", [4])(second)
    made("mine", 2)  # the same class, of a module that was imported anew
    assert registry.codecs()["mine"].bits == (2,)
    for name in ("flat", "auto"):
        with pytest.raises(UserError, match="is taken"):
            megatron_patch.register_exchange(name)(first)


def test_bits_that_cannot_be_are_refused():
    for bits in ((), (3,), (4.0,)):
        with pytest.raises(UserError, match="bits are some of 8, 4, 2 and 1"):
            made("mine", *bits)


def test_a_file_is_imported_once_and_may_import_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_it.py").write_text("NAME = 'imported'\n")
    file = tmp_path / "ones_own.py"
    file.write_text(
        "import megatron_patch\nfrom beside_it import NAME\n"
        "megatron_patch.register_codec(NAME, [4])(type('Own', (), {}))\n"
    )
    registry.import_file(file)
    entry = registry.codecs()["imported"]
    registry.import_file(tmp_path / "." / file.name)
    assert registry.codecs()["imported"] is entry
    assert __import__("ones_own").NAME == "imported", "a script's own import finds the same module"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("missing.py", None, "no such Python file"),
        ("config.yaml", "a: 1", "no such Python file"),
        ("torch.py", "", "another module is named torch; rename"),
        ("raises.py", "import megatron_patch\n1 / 0", "ZeroDivisionError: division by zero"),
        (
            "taken.py",
            "import megatron_patch as m\nm.register_codec('sign', [1])(type('A', (), {}))",
            "is taken",
        ),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_line(
    name: str, text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch  # noqa: F401

    monkeypatch.setattr(sys, "path", [*sys.path])
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        registry.import_file(tmp_path / name)
    assert str(caught.value).startswith(f"import: {tmp_path / name}: ")
    assert said in str(caught.value)


def test_an_unknown_name_is_refused_with_those_that_are_known():
    made("mine", 4)
    with pytest.raises(UserError, match="one of uniform, levels, sign, mine"):
        CompressionConfig(codec="theirs")
    with pytest.raises(UserError, match="codec"):
        CompressionConfig(codec=["mine"])  # type: ignore[arg-type]


def test_the_package_s_own_are_as_their_modules_say():
    for name, entry in registry.codecs().items():
        for bits in entry.bits:
            codec = entry.make(bits, NONE)
            assert (codec.name, codec.bits, codec.rotation) == (name, bits, NONE)
    assert registry.codecs()["levels"].bits == tuple(LEVELS)
