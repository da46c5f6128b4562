"""Results that cannot be written, or read back: one line from every command, before it computes anything."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from workflows.ablation.test_ablate import define
from workflows.engine_runs import ROOT
from workflows.run.test_restarts import SUMMARY

from megatron_patch.errors import UserError
from megatron_patch.workflows import cli
from megatron_patch.workflows.ablation import definition
from megatron_patch.workflows.plan import command as plan
from megatron_patch.workflows.run import run_folder

TINY = str(ROOT / "configs/models/llama_tiny.yaml")
COMMANDS = {
    "train": ["train", TINY, "--out", "OUT"],
    "compare": ["compare", TINY, "--out", "OUT"],
    "ablate": ["ablate", "bits", "--out", "OUT"],
    "ablate one": ["ablate", "bits", "--task", "0", "--out", "OUT"],
    "plan": ["plan", TINY, "--json", "OUT/plan.json"],
    "prepare-data": ["prepare-data", "installed:numpy/version.py", "--out", "OUT/text"],
    "report": ["report", "RUN", "--out", "OUT/page.html"],
}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a command ends."""
    assert cli.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("megatron-loco: error: ")] == lines[-1:]
    return lines[-1]


@pytest.mark.parametrize("name", COMMANDS)
def test_results_that_cannot_be_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "_plan", lambda *_: pytest.fail("computed first"))
    (tmp_path / "file").write_text("kept")
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    for out in ("file", "file/below"):
        place = str(tmp_path / out)
        line = refused(
            [word.replace("OUT", place).replace("RUN", str(run)) for word in COMMANDS[name]], capsys
        )
        assert place in line
        told = ("cannot be written", *map(os.strerror, (errno.ENOTDIR, errno.EEXIST)))
        assert any(words in line for words in told)
    assert (tmp_path / "file").read_text() == "kept"


def test_an_error_that_is_no_file_s_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: list[str] | None) -> int:
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))

    monkeypatch.setattr(cli, "_run", lost)
    with pytest.raises(ConnectionResetError):
        cli.main([])


def test_a_broken_summary_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = define(tmp_path, "[1]", "  - {compression.bits: 2}\n")
    (one, *_) = definition.read(Path(arguments[1]), [], None, None).runs(tmp_path / "out")
    one.folder.mkdir(parents=True)
    (one.folder / "config.yaml").write_text(one.configured.as_yaml())
    path, whole = one.folder / "summary.json", json.dumps(SUMMARY)
    path.write_text(whole)
    assert run_folder.look(one.folder, one.configured) is run_folder.State.DONE
    broken = [whole[: len(whole) // 2].encode(), b"", b"\xff", b"[]", b"{}"]
    for name, value in (("steps", "text"), ("steps", [1]), ("versions", "text"), ("valid_loss", "text")):
        broken.append(json.dumps(SUMMARY | {name: value}).encode())
    broken.append(json.dumps({name: value for name, value in SUMMARY.items() if name != "device"}).encode())
    for text in broken:
        path.write_bytes(text)
        with pytest.raises(UserError, match=r"summary\.json.*(remove it|leave the run out)"):
            run_folder.look(one.folder, one.configured)
    for more in ([], ["--collect"]):
        assert "summary.json" in refused([*arguments, *more], capsys)
