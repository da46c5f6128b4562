"""`megatron-loco doctor`: its last line says what can be run, and how to try it."""

from __future__ import annotations

import argparse

import pytest

from megatron_patch.workflows import doctor

HAS = {"torch": "2.15.0", "megatron-core": "0.19.2"}
DEVICES = {"gpu": "none", "nccl": "2.30.7", "gloo": "yes"}


@pytest.mark.parametrize(
    ("versions", "devices", "status", "line"),
    [
        (HAS, DEVICES, 0, f"Ready for CPU runs. To try one on the CPU: {doctor._TRY}"),
        (
            HAS,
            DEVICES | {"gpu": "8 x H100"},
            0,
            "Ready for GPU and CPU runs. To try one on the CPU: megatron-",
        ),
        (HAS, DEVICES | {"gpu": "8 x H100", "nccl": "-"}, 0, "Ready for CPU runs. "),
        (HAS, DEVICES | {"gloo": "-"}, 0, "No run is possible."),
        ({"torch": "2.15.0"}, DEVICES, 1, "No run is possible: megatron-core missing."),
        ({}, {}, 1, "No run is possible: torch and megatron-core missing."),
    ],
)
def test_the_last_line_says_what_can_be_run(monkeypatch, capsys, versions, devices, status, line):
    monkeypatch.setattr(doctor.symbols, "unmet", lambda: iter(()))
    monkeypatch.setattr(doctor, "_version", versions.get)
    monkeypatch.setattr(doctor, "_devices", lambda: [(name, found, "") for name, found in devices.items()])
    assert doctor.run(argparse.Namespace()) == status
    assert capsys.readouterr().out.splitlines()[-1].startswith(line)


def test_what_muon_needs_is_listed(monkeypatch):
    monkeypatch.setattr(doctor, "_devices", list)
    monkeypatch.setattr(doctor.symbols, "unmet", lambda: iter(()))
    for versions, remark in ((HAS, "missing for: Muon"), (HAS | {"emerging-optimizers": "0.3.0"}, "")):
        monkeypatch.setattr(doctor, "_version", versions.get)
        (found,) = [row for row in doctor.rows() if row[0] == "emerging-optimizers"]
        assert found[2].startswith(remark)
        assert bool(found[2]) == bool(remark)


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
