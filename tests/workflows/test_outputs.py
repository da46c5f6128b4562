"""Results that cannot be written, or read back: one line from every command, before it computes anything."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path

import pytest
from seeds import SEED
from workflows.ablation.test_ablate import define
from workflows.engine_runs import ROOT
from workflows.run.test_restarts import SUMMARY

from megatron_patch.errors import UserError
from megatron_patch.workflows import cli
from megatron_patch.workflows.ablation import definition
from megatron_patch.workflows.plan import command as plan
from megatron_patch.workflows.run import configuration, run_folder

TINY = str(ROOT / "configs/models/llama_tiny.yaml")
COMMANDS = {
    "train": ["train", TINY, "--out", "OUT"],
    "compare": ["compare", TINY, "--out", "OUT"],
    "ablate": ["ablate", "bits", "--out", "OUT"],
    "ablate one": ["ablate", "bits", "--task", "0", "--out", "OUT"],
    "collect": ["ablate", "bits", "--collect", "--out", "OUT"],
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


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nowhere"])
@pytest.mark.parametrize("name", COMMANDS)
def test_results_that_cannot_be_written(
    name: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "_plan", lambda *_: pytest.fail("computed first"))
    (tmp_path / "file").write_text("kept")
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    out = str(tmp_path / place)
    if place == "/proc/nowhere" and name in ("train", "compare", "ablate one"):
        pytest.skip("only found when it is created, after Megatron was imported")
    line = refused([word.replace("OUT", out).replace("RUN", str(run)) for word in COMMANDS[name]], capsys)
    assert out in line
    told = ("cannot be written", *map(os.strerror, (errno.ENOTDIR, errno.EEXIST, errno.ENOENT)))
    assert any(words in line for words in told)
    assert (tmp_path / "file").read_text() == "kept"


def test_an_error_that_is_no_file_s_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: list[str] | None) -> int:
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))

    monkeypatch.setattr(cli, "_run", lost)
    with pytest.raises(ConnectionResetError):
        cli.main([])


def broken_summaries() -> list[bytes]:
    generator, whole = random.Random(SEED), json.dumps(SUMMARY).encode()
    found = [whole[: generator.randrange(len(whole))] for _ in range(20)] + [b"\xff", b"[]", b"3", b"{}"]
    for name in ("steps", "world_size", "valid_loss", "device", "versions"):
        found += [json.dumps({**SUMMARY, name: value}).encode() for value in ("text", [1])]
        found.append(json.dumps({key: value for key, value in SUMMARY.items() if key != name}).encode())
    # Without a validation loss a run is complete; these texts are a device's name.
    allowed = [{**SUMMARY, "device": "text"}, {k: v for k, v in SUMMARY.items() if k != "valid_loss"}]
    return [text for text in found if text not in [json.dumps(one).encode() for one in allowed]]


def test_a_broken_summary_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = define(tmp_path, "[1]", "  - {compression.bits: 2}\n")
    assert cli.main([*arguments, "--collect"]) == 0
    capsys.readouterr()
    (one, *_) = definition.read(Path(arguments[1]), [], None, None).runs(tmp_path / "out")
    one.folder.mkdir(parents=True)
    (one.folder / "config.yaml").write_text(one.configured.as_yaml())
    (one.folder / "summary.json").write_text(json.dumps(SUMMARY))
    assert run_folder.look(one.folder, one.configured) is run_folder.State.DONE
    assert configuration.load(one.folder / "config.yaml") == one.configured
    for text in broken_summaries():
        (one.folder / "summary.json").write_bytes(text)
        with pytest.raises(UserError, match=r"summary\.json.*(remove it|leave the run out)"):
            run_folder.look(one.folder, one.configured)
    for more in ([], ["--dry-run"], ["--collect"]):
        assert "summary.json" in refused([*arguments, *more], capsys)
