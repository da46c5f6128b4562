"""`megatron-loco bench kernels`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_patch.quantization import native
from megatron_patch.workflows import cli


def test_kernels_are_measured_beside_memcpy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = tmp_path / "numbers.json"
    flags = [
        "--seconds",
        "0.05",
        "--elements",
        "200000",
        "--json",
        str(numbers),
        "--out",
        str(tmp_path / "out"),
    ]
    assert cli.main(["bench", "kernels", *flags]) == 0
    shown = capsys.readouterr().out
    assert "torch chunked" in shown
    assert "memcpy" in shown
    found = json.loads(numbers.read_text())
    assert json.loads((tmp_path / "out" / "kernels.json").read_text()) == found
    assert (tmp_path / "out" / "kernels.png").read_bytes().startswith(b"\x89PNG")
    assert found["memcpy_bytes_per_second"] > 1e8
    assert found["bytes_per_element"] == pytest.approx(4 + 1 + 1 + 0.5 + 6 / 128, rel=1e-3)
    rates = found["elements_per_second"]
    assert rates["torch_chunked"] > 0
    if native.variants():
        assert rates["native"] > rates["torch_chunked"]
        assert {f"native_{name}" for name in native.variants()} <= set(rates)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--block-size", "100"], ["block_size", "power of two"]),
        (["--elements", "10"], ["--elements", "131072"]),
        (["--bits", "3"], ["--bits", "3"]),
    ],
)
def test_a_mistake_is_one_line(
    flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "kernels", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in words)
