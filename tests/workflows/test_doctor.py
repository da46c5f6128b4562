"""`megatron-loco doctor`: its last line says what can be run, and what is missing or too old."""

from __future__ import annotations

import argparse

import pytest

from megatron_patch.workflows import doctor

HAS = {"torch": "2.15.0", "megatron-core": "0.19.2", "triton": "3.9.0"}
DEVICES = {"gpu": "none", "nccl": "2.30.7", "gloo": "yes"}
GPUS = {"gpu": "8 x H100"}
OLD = {"torch": "2.7.1"}


@pytest.mark.parametrize(
    ("versions", "devices", "status", "line"),
    [
        (HAS, {}, 0, f"Ready for CPU runs. To try one on the CPU: {doctor._TRY}"),
        (HAS, GPUS, 0, "Ready for GPU and CPU runs. To try one on the CPU: megatron-"),
        (HAS, GPUS | {"nccl": "-"}, 0, "Ready for CPU runs. "),
        (HAS | {"triton": "3.3.1"}, GPUS | {"gpu kernels": "-"}, 0, "Ready for CPU runs. "),
        (HAS, {"gloo": "-"}, 0, "No run is possible."),
        (HAS | OLD, GPUS, 1, "No run is possible: torch 2.7.1 is older than 2.8, the oldest that is served"),
        ({"torch": "2.15.0"}, {}, 1, "No run is possible: megatron-core missing."),
    ],
)
def test_the_last_line_says_what_can_be_run(monkeypatch, capsys, versions, devices, status, line):
    asked = []
    monkeypatch.setattr(doctor.symbols, "unmet", lambda: asked.append(True) or iter(()))
    monkeypatch.setattr(doctor, "_version", versions.get)
    found = [(name, value, "") for name, value in (DEVICES | devices).items()]
    monkeypatch.setattr(doctor, "_devices", lambda: found)
    assert doctor.run(argparse.Namespace()) == status
    told = capsys.readouterr().out
    assert told.splitlines()[-1].startswith(line)
    assert not asked or versions["torch"] != OLD["torch"], "with an old torch Megatron may not even load"


@pytest.mark.parametrize(
    ("version", "lacks", "remark"),
    [
        ("0.19.2", [], ""),
        ("0.22.0", [], "outside the tested range >=0.17,<0.21; all "),
        ("0.22.0", ["megatron.core.x is missing"], "1 of "),
    ],
)
def test_what_a_release_lacks_is_said_symbol_by_symbol(monkeypatch, version, lacks, remark):
    monkeypatch.setattr(doctor, "_devices", list)
    monkeypatch.setattr(doctor, "_version", {"megatron-core": version}.get)
    monkeypatch.setattr(doctor.symbols, "unmet", lambda: iter(lacks))
    rows = doctor.rows()
    place = next(place for place, row in enumerate(rows) if row[0] == "megatron-core")
    assert rows[place][2].startswith(remark)
    assert bool(rows[place][2]) == bool(remark)
    assert [row[2] for row in rows[place + 1 :] if not row[0]] == lacks
    (muon,) = [row for row in rows if row[0] == "emerging-optimizers"]
    assert muon[2].startswith("missing for: Muon")
