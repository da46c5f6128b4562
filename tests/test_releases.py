"""Releases of torch and Triton: older ones than are served are refused in one line, before a step."""

from __future__ import annotations

import functools
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from order.gpu import CUDA, KERNELS, recording
from with_megatron.tiny_model import build

import megatron_patch
from megatron_patch import releases
from megatron_patch.collectives import sender
from megatron_patch.megatron import run_script
from megatron_patch.quantization import backends, triton_kernels
from megatron_patch.session import session

ROOT = Path(__file__).resolve().parents[1]


def test_containers_name_their_releases_in_their_own_way():
    for version in ("2.9.0a0+50eac811a6.nv25.09", "2.15.0+cu132", "2.9.1"):
        assert releases.too_old("FSDP2", version) is None
    with pytest.raises(
        megatron_patch.UserError, match=r"^torch 2\.7\.1 is older than 2\.8, .*: take another$"
    ):
        releases.refuse_old("torch", "2.7.1", "take another")


def test_the_package_asks_for_what_is_served():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"torch>={'.'.join(map(str, releases.OLDEST['torch']))}" in project["dependencies"]


def test_all_entrances_refuse_an_old_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu126")
    # Megatron may not even load with one.
    monkeypatch.setitem(sys.modules, "megatron_patch.megatron.doors", None)
    monkeypatch.delattr("megatron_patch.megatron.doors", raising=False)
    launched = functools.partial(run_script._run, "script.py", [])
    for entrance in (megatron_patch.enable, lambda: megatron_patch.attach(torch.nn.Linear(2, 2)), launched):
        with pytest.raises(megatron_patch.UserError, match=r"torch 2\.7\.1\+cu126 is older than 2\.8"):
            entrance()


def test_an_old_triton_is_refused_where_its_kernels_are_asked_for(monkeypatch):
    import triton

    monkeypatch.setattr(triton, "__version__", "3.3.1")
    backends._triton.cache_clear()
    with pytest.raises(megatron_patch.UserError, match=r"triton 3\.3\.1 is older than 3\.4, .*KERNELS=torch"):
        backends.available(torch.device("cuda"))
    monkeypatch.setenv(backends.VARIABLE, "torch")
    assert backends.available(torch.device("cuda")) is None


OLD_FSDP2 = """
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
vars(_fsdp_collectives).pop("DefaultReduceScatter", None)
from torch.nn.parallel import DistributedDataParallel
torch.__version__ = "2.8.0"
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
import megatron_patch
megatron_patch.attach(DistributedDataParallel(torch.nn.Linear(2, 2)))
try:
    from megatron_patch.pytorch import fsdp2
except megatron_patch.UserError as error:
    print(error)
"""


def test_ddp_needs_nothing_of_fsdp2():
    done = subprocess.run(
        [sys.executable, "-c", OLD_FSDP2], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()[-1]
    assert told.startswith("torch 2.8.0 is older than 2.9, the oldest that is served with FSDP2: ")


def kernels_that_do_not_compile() -> str:
    broken = mock.Mock(side_effect=RuntimeError("PassManager::run failed\nand a long tail"))
    compress = mock.patch.object(triton_kernels, "compress", broken)
    named = mock.patch.object(torch.cuda, "get_device_name", mock.Mock(return_value="a GPU"))
    with recording(), compress, named, pytest.raises(megatron_patch.UserError) as refused:
        session.Session(megatron_patch.CompressionConfig(), CUDA)
    return str(refused.value)


def test_kernels_that_do_not_compile_are_one_line(pool):
    (told,) = pool.run(kernels_that_do_not_compile, world_size=1)
    assert "the GPU kernels do not compile on a GPU with torch " in told
    assert "(RuntimeError: PassManager::run failed): set MEGATRON_LOCO_KERNELS=torch" in told


def kernels_tried(config: megatron_patch.CompressionConfig) -> dict[str, int]:
    """How often each of the GPU's kernels is launched before anything is attached."""
    from megatron_patch.megatron.onebit_adam import norm_sketch

    with recording() as gpu:
        session.Session(config, CUDA)
        norm_sketch.try_kernel(CUDA)
        launched = Counter(gpu.machine.operations)
        found = gpu.machine.found
    assert not found, found
    return {name: launched[name] for name in KERNELS}


def test_every_kernel_is_tried_before_the_first_step(pool):
    (tried,) = pool.run(kernels_tried, megatron_patch.CompressionConfig(weight_gather="exact"), world_size=1)
    assert tried["compress_kernel"] == 4, "fp32 and bf16, with statistics and without"
    assert min(tried.values()) >= 1, tried


def refused_at_attach(kind: str) -> tuple[str, str, bool]:
    """What attach says where kernels do not compile, and of a codec that fails; whether training is stock's.

    A codec of the user's own is no kernel's fault, and is not said to be.
    """
    from megatron_patch.megatron import attach as of_megatron
    from megatron_patch.pytorch import attach as of_torch

    config = megatron_patch.CompressionConfig()
    broken = mock.patch.object(sender, "codec_of", mock.Mock(side_effect=RuntimeError("of the user's own")))
    with recording(), broken, pytest.raises(RuntimeError) as raised:
        session.Session(config, CUDA)
    if kind == "megatron":
        model = build().ddp
    else:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    broken = mock.Mock(side_effect=megatron_patch.UserError("the GPU kernels do not compile"))
    with (
        mock.patch.object(session, "try_kernels", broken),
        pytest.raises(megatron_patch.UserError) as refused,
    ):
        megatron_patch.attach(model)
    free = of_megatron.attachment_of(model) is None and of_torch.attachment_of(model) is None
    megatron_patch.attach(model)
    megatron_patch.disable()
    return str(raised.value), str(refused.value), free


@pytest.mark.parametrize("kind", ["megatron", "ddp"])
def test_a_model_whose_kernels_do_not_compile_is_left_as_it_was(pool, kind):
    expected = ("of the user's own", "the GPU kernels do not compile", True)
    assert pool.run(refused_at_attach, kind, world_size=2) == [expected] * 2
