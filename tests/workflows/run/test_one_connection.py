"""When ranks get CUDA_DEVICE_MAX_CONNECTIONS=1: as Megatron's validation of arguments asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_patch.workflows.run.job import Job, Launch

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"
TENSOR, CONTEXT = ["--tensor-model-parallel-size", "2"], ["--context-parallel-size", "4"]


def set_for(flags: list[str]) -> str | None:
    job = Job(Launch(device="cuda"), Path("pretrain_gpt.py"), flags, Path("run"))
    return job.variables().get(NAME)


@pytest.mark.parametrize(
    ("flags", "hopper", "blackwell"),
    [
        ([], None, None),
        (["--tensor-model-parallel-size", "1", "--context-parallel-size", "1"], None, None),
        (TENSOR, "1", None),
        (CONTEXT, "1", None),
        ([*TENSOR, "--use-torch-fsdp2"], None, None),
    ],
)
def test_it_is_set_where_megatron_asserts_it(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], hopper: str | None, blackwell: str | None
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert set_for(flags) == hopper
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for generation, wanted in ((9, hopper), (10, blackwell)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, found=generation: (found, 0))
        assert set_for(flags) == wanted


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "32")
    assert set_for([]) == "32"
    assert set_for(TENSOR) == "32"
