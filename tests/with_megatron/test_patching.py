"""What is replaced in Megatron: once, all of it listed, and all of it put back."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_pool import in_warm_process

import megatron_patch
from megatron_patch.megatron import patching, symbols

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_patch"
DOCUMENT = PACKAGE.parent / "docs" / "architecture.md"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with a function, a class that inherits one, and another module that bound the function."""
    made, other = types.ModuleType("made_up"), types.ModuleType("made_up_too")

    class Base:
        def method(self) -> str:
            return "original"

    class Derived(Base):
        pass

    made.function, made.Derived = lambda: "original", Derived
    other.function = made.function
    for one in (made, other):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    monkeypatch.setitem(symbols.BOUND_IN, "made_up:function", ("made_up_too",))
    patching._place.cache_clear()
    return made


def test_a_symbol_is_replaced_once_also_where_it_is_bound_by_name_and_put_back(module):
    original, other = module.function, sys.modules["made_up_too"]
    for _ in range(2):
        patching.replace("made_up:function", lambda before: lambda: f"not the {before()}")
    assert module.function() == other.function() == "not the original"
    for _ in range(2):
        patching.restore("made_up:function")
    assert module.function is other.function is original


def test_what_a_class_inherits_is_its_own_only_while_it_is_replaced(module):
    patching.replace("made_up:Derived.method", lambda before: lambda self: before(self) + "?")
    assert module.Derived().method() == "original?"
    patching.restore("made_up:Derived.method")
    assert module.Derived().method() == "original"
    assert "method" not in vars(module.Derived)


def test_what_somebody_else_put_over_it_is_left_alone(module):
    patching.replace("made_up:function", lambda before: lambda: "ours")
    module.function = theirs = lambda: "theirs"
    patching.restore("made_up:function")
    assert module.function is theirs


def test_a_missing_symbol_is_named_with_its_path_and_the_release(module):
    with pytest.raises(RuntimeError, match=r"torch:no\.such is missing in torch \d.*not supported"):
        patching.replace("torch:no.such", lambda before: before)
    with pytest.raises(RuntimeError, match="torch:nothing_of_the_kind is missing"):
        patching.replace("torch:nothing_of_the_kind", lambda before: before)
    with pytest.raises(AssertionError, match="not listed"):
        patching.replace("megatron.core.utils:divide", lambda before: before)


def test_the_document_lists_every_symbol_and_the_file_that_replaces_it():
    rows = re.findall(
        r"^\| `(megatron\.[\w.]+)` \| `([\w/.]+)` \| .+ \| .+ \|$", DOCUMENT.read_text("utf-8"), re.M
    )
    assert sorted(path for path, _ in rows) == sorted(path.replace(":", ".") for path in symbols.SYMBOLS)
    for _, file in rows:
        assert (PACKAGE / file).exists() or (PACKAGE / "megatron" / file).exists(), file


def whole_way(path: str) -> None:
    """In a process that has Megatron and the stand-ins: switch everything on and off again."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.training import checkpointing, training
    from torch.optim.optimizer import _global_optimizer_post_hooks

    from megatron_patch.megatron import attach
    from megatron_patch.megatron.cpu import device, torch_adam
    from megatron_patch.megatron.metrics import RunMetrics
    from megatron_patch.megatron.seams import optimizer_step

    def state() -> dict[str, Any]:
        return {
            "init": DistributedDataParallel.__init__,
            "step": ChainedOptimizer.step,
            "save": (checkpointing.save_checkpoint, training.save_checkpoint),
            "log": training.training_log,
            "loading": DistributedOptimizer.load_state_dict,
            "base": _BaseDataParallel.__init__,
            "torch's hooks": list(_global_optimizer_post_hooks.values()),
        }

    torch_adam.uninstall()
    before = state()
    torch_adam.install()
    config = megatron_patch.CompressionConfig(method="loco", start_step=0)
    metrics = RunMetrics()
    for _ in range(2):
        megatron_patch.enable(config)
        metrics.install()
        optimizer_step.listen(attach._Steps())  # as `attach` does
    during = state()
    assert not [name for name, value in during.items() if value == before[name]]
    megatron_patch.disable()
    metrics.uninstall()
    torch_adam.uninstall()
    assert state() == before
    assert torch.cuda.is_available()
    device.uninstall()
    assert not device.installed()
    assert not torch.cuda.is_available() or torch.version.cuda
    assert torch.cuda.is_available.__module__ == "torch.cuda"
    assert torch.Tensor.to.__qualname__ != "_stand_in_for_tensor_methods.<locals>.to"
    assert not [path for path in symbols.SYMBOLS if path in patching._replaced]
    Path(path).touch()


def test_everything_can_be_undone(tmp_path):
    done = tmp_path / "done"
    in_warm_process(whole_way, str(done), log=tmp_path / "log", timeout=200)
    assert done.exists()
