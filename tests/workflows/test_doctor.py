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
    monkeypatch.setattr(doctor, "_version", versions.get)
    monkeypatch.setattr(doctor, "_devices", lambda: [(name, found, "") for name, found in devices.items()])
    assert doctor.run(argparse.Namespace()) == status
    assert capsys.readouterr().out.splitlines()[-1].startswith(line)


def test_what_muon_needs_is_listed(monkeypatch):
    monkeypatch.setattr(doctor, "_devices", list)
    for versions, remark in ((HAS, "missing for: Muon"), (HAS | {"emerging-optimizers": "0.3.0"}, "")):
        monkeypatch.setattr(doctor, "_version", versions.get)
        (found,) = [row for row in doctor.rows() if row[0] == "emerging-optimizers"]
        assert found[2].startswith(remark)
        assert bool(found[2]) == bool(remark)
