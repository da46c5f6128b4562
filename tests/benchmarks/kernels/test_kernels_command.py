"""`python -m benchmarks.kernels`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.command_line import main
from benchmarks.kernels import command, cpu_rates
from megatron_patch.quantization import native


def test_kernels_are_measured_beside_memcpy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = tmp_path / "numbers.json"
    assert main(command, ["--seconds", "0.05", "--elements", "200000", "--json", str(numbers)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 bits, codec levels, rotation hadamard" in shown
    found = json.loads(numbers.read_text())
    assert found["memcpy_bytes_per_second"] > 1e8
    assert found["bytes_per_element"] == pytest.approx(4 + 1 + 1 + 0.5 + 6 / 128, rel=1e-3)
    weights = found["weight_code"]
    assert 2 < weights["bits_per_weight"] < 3
    assert min(weights[f"{way}_weights_per_second"] for way in ("encode", "decode", "digest")) > 1e5
    assert all(rate > 1e5 for rate in found["onebit_adam"].values())
    rates = found["elements_per_second"]
    assert rates["torch_chunked"] > 0
    if native.variants():
        assert rates["native"] > rates["torch_chunked"]
        names = {f"native_{name}" for name in native.variants()}
        assert names <= set(rates)
        assert set(found["uniform_elements_per_second"]) == names | {"decompress_reduce"}


def test_the_uniform_code_is_measured_beside_nothing(tmp_path: Path) -> None:
    flags = ["--seconds", "0.01", "--elements", "131072", "--json", str(tmp_path / "found.json")]
    assert main(command, ["--bits", "2", "--codec", "uniform", "--typical", *flags]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["codec"], found["rotation"], found["call"]) == ("uniform", "none", "median")
    assert found["uniform_elements_per_second"] == {}


def test_the_typical_call_is_the_median_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # The end, and calls of 3, 1 and 2 seconds.
    clock = iter([0.0, *(0.0, 3.0), *(3.0, 4.0), *(4.0, 6.0), 9.0] * 2)
    monkeypatch.setattr(cpu_rates, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert cpu_rates._timed([lambda: None], 5.0, typical=False) == [1.0]
    assert cpu_rates._timed([lambda: None], 5.0, typical=True) == [2.0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--block-size", "100"], ["block_size", "power of two"]),
        (["--elements", "0"], ["--elements", "131072"]),
    ],
)
def test_a_mistake_is_one_line(
    flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command, flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in words)
