"""The public API: what `megatron_patch.__all__` names, its types, and the names that earlier releases had."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from importlib import resources
from pathlib import Path

import megatron_patch

ROOT = Path(__file__).resolve().parents[1]

RELEASED = {
    "0.2.0": {
        "enable": ["config"],
        "attach": ["chunks", "config"],
        "disable": [],
        "report": ["model"],
        "state_dict": ["model", "optimizer", "reader", "path"],
        "load_state_dict": ["model", "state", "optimizer"],
        "CompressionConfig": [
            *("method", "bits", "codec", "rotation", "block_size", "error_beta", "error_dtype"),
            *("reset_interval", "start_step", "warmup", "warmup_steps", "error_compensation", "seed"),
            *("topology", "ranks_per_node", "weight_gather", "save_error", "strict_load"),
        ],
        "StepReport": [
            *("step", "method", "bits", "weight_gather", "compressed", "gradient_bytes"),
            *("gradient_bytes_inside_node", "bits_per_gradient", "weight_bytes", "bits_per_weight"),
            *("error_bytes", "error_norm", "gradient_norm", "snr_db", "non_finite_blocks"),
            "compression_seconds",
        ],
        "UserError": [],
    },
    "0.3.0": {
        "register_codec": ["name", "bits", "rotated"],
        "register_exchange": ["name"],
        "offload": ["model"],
        "reload": ["model"],
        "skip_step": ["model"],
    },
}
"""Public names and their parameters or fields, by the release that brought them: a name that goes is named in
CHANGELOG.md."""


def parameters(name: str) -> list[str]:
    value = getattr(megatron_patch, name)
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return [] if name == "UserError" else list(inspect.signature(value).parameters)


def test_what_a_release_had_is_still_there() -> None:
    for names in RELEASED.values():
        for name, had in names.items():
            assert name in megatron_patch.__all__
            assert [one for one in parameters(name) if one in had] == had, name
    assert issubclass(megatron_patch.UserError, ValueError)


def test_every_public_name_is_documented_and_listed() -> None:
    known = [name for names in RELEASED.values() for name in names]
    assert sorted(megatron_patch.__all__) == sorted(known), "a new name belongs to a new release"
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for name in megatron_patch.__all__:
        assert inspect.getdoc(getattr(megatron_patch, name)), name
        assert f"`{name}" in page, name
    for field in RELEASED["0.2.0"]["StepReport"]:
        assert f"`{field}`" in page, field


def test_between_releases_pip_takes_no_wheel_for_the_last_one_s() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = megatron_patch.__version__
    released = f"\n## [{version.removesuffix('.dev0')}] - " in changelog
    assert released != version.endswith(".dev0")


RIGHT = """
from typing import assert_type

import megatron_patch
from megatron_patch import CompressionConfig, StepReport, UserError

class Chunk: ...

def run(chunks: list[Chunk]) -> None:
    config = CompressionConfig(method="loco", bits=4, weight_gather="exact")
    megatron_patch.enable(config)
    assert_type(megatron_patch.attach(chunks, config), list[Chunk])
    report = megatron_patch.report(chunks)
    assert_type(report, StepReport)
    assert_type(report.snr_db, float | None)
    megatron_patch.load_state_dict(chunks, megatron_patch.state_dict(chunks))
    megatron_patch.disable()
"""
WRONG = {
    'megatron_patch.CompressionConfig(bits="4")': "bits",
    "megatron_patch.enable(4)": "CompressionConfig",
    "megatron_patch.report().step = 3": "read-only",
}


def test_a_user_s_code_type_checks_against_the_package(tmp_path: Path) -> None:
    assert resources.files("megatron_patch").joinpath("py.typed").is_file()
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text("\n".join(["import megatron_patch", *WRONG]) + "\n")
    # As of an installed package, its own errors are not shown; and torch need not be read.
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = True\n[mypy-megatron_patch.*]\nfollow_imports = silent\n"
        "[mypy-megatron_patch.megatron.*]\nfollow_imports = skip\n"
        "[mypy-megatron_patch.doors]\nfollow_imports = skip\n"
    )
    options = ["--config-file", "mypy.ini", "--cache-dir", str(tmp_path / "cache")]
    found = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "right.py", "wrong.py"],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in found.stdout.splitlines() if ": error: " in line]
    assert not [line for line in lines if not line.startswith("wrong.py")], found.stdout + found.stderr
    for number, (code, what) in enumerate(WRONG.items(), start=2):
        assert any(line.startswith(f"wrong.py:{number}:") and what in line for line in lines), (code, lines)
