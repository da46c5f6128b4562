"""enable, attach, the post-wrap hook and launch: the same training, start and metrics; what they refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from with_megatron.seam_runs import attach, built, logged, refusal
from with_megatron.tiny_model import build
from workflows.engine_runs import DOORS, OPTIONS, UNTIED, Run, engine

import megatron_patch

WARM_UP, LAST = 4, 12
FLAGS = [
    *(*UNTIED, "--bf16", "--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "30000"),
    *("--lr-warmup-iters", str(WARM_UP), "--train-iters", str(LAST), "--log-interval", "2"),
]
OURS = [
    flag
    for name, value in OPTIONS.items()
    for flag in ("--compression-" + name.replace("_", "-"), str(value))
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of one job by each door."""
    asked = {"launch": Run(FLAGS, OURS)} | {door: Run(FLAGS, door=door) for door in DOORS}
    return engine(tmp_path_factory.mktemp("doors"), asked)


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """By tag what a run's TensorBoard has, as (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert set((folder / "exit").read_text().split()) == {"0"}, (folder / "rank-0.log").read_text()[-3000:]
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def said(folder: Path) -> list[str]:
    lines = (folder / "rank-0.log").read_text().splitlines()
    return [line for line in lines if line.startswith("megatron-loco: ")]


@pytest.mark.parametrize("door", DOORS)
def test_all_doors_train_alike_and_show_the_same(runs: Path, door: str) -> None:
    ours, launched = shown(runs / door), shown(runs / "launch")
    assert ours.keys() == launched.keys()
    assert any(tag.startswith("compression/") for tag in ours)
    timed = re.compile("seconds|time|throughput|mem|iteration-time|samples")
    for tag in ours:
        if not timed.search(tag):
            assert ours[tag] == launched[tag], tag
    assert said(runs / door) == said(runs / "launch")


def test_compression_starts_when_the_learning_rate_has_stopped_rising(runs: Path) -> None:
    compressed = dict(shown(runs / "launch")["compression/compressed"])
    start = WARM_UP + 3  # the rate of step 5 is the highest, step 6 shows that it rises no more
    assert compressed == {step: float(step >= start) for step in range(2, LAST + 1, 2)}
    lines = said(runs / "launch")
    assert f"megatron-loco: compression starts at step {start}" in lines
    (expected,) = (line for line in lines if "expected" in line)
    assert f"expected at step {start}" in expected


def mistaken() -> dict[str, str]:
    """In a worker: what each mistake is answered with."""
    tiny = build()
    config = megatron_patch.CompressionConfig(bits=4)
    doors: dict[str, Any] = {
        "attach unwrapped": lambda: megatron_patch.attach(tiny.ddp.module, config),
        "attach a module": lambda: megatron_patch.attach([torch.nn.Linear(1, 1)]),
        "attach a generator": lambda: megatron_patch.attach(chunk for chunk in [tiny.ddp]),
        "attach options": lambda: megatron_patch.attach(tiny.ddp, {"bits": 4}),
        "enable options": lambda: megatron_patch.enable({"bits": 4}),
        "report unwrapped": lambda: megatron_patch.report(tiny.ddp.module),
        "state_dict unwrapped": lambda: megatron_patch.state_dict(tiny.ddp.module),
        "load_state_dict unwrapped": lambda: megatron_patch.load_state_dict([tiny.ddp.module], {}),
    }
    return {name: refusal(door) for name, door in doors.items()}


def test_a_mistake_at_a_door_is_one_line_that_names_it(pool):
    for answers in pool.run(mistaken, world_size=1):
        for name, line in answers.items():
            caller, _, what = name.partition(" ")
            assert line.startswith(f"{caller}(): "), name
            assert "\n" not in line
            if what == "options":
                assert "CompressionConfig(bits=4)" in line
            else:
                assert "Megatron's DistributedDataParallel" in line
        assert "TinyModel" in answers["attach unwrapped"]
        assert "generator" in answers["attach a generator"]


def fsdp() -> tuple[list[str], bool]:
    """In a worker: what building Megatron's other wrappers says; whether all derive from what says it."""
    from megatron.core.distributed import TorchFullyShardedDataParallel
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.transformer import TransformerConfig

    class Sharded(_BaseDataParallel):
        def __init__(self) -> None:
            super().__init__(config, torch.nn.Linear(2, 2))

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    answers = []
    for options in ({}, {"method": "none", "weight_gather": "exact"}, {"method": "none"}):
        megatron_patch.enable(megatron_patch.CompressionConfig(**options))
        answers.append(refusal(Sharded))
        megatron_patch.disable()
    Sharded()
    # From 0.20 on FullyShardedDataParallel is a function that makes one of several classes.
    named = [value for name, value in vars(mcore_fsdp_adapter).items() if "FullySharded" in name]
    classes = [TorchFullyShardedDataParallel, *(value for value in named if isinstance(value, type))]
    return answers, len(classes) > 1 and all(issubclass(one, _BaseDataParallel) for one in classes)


def test_fsdp_is_refused_when_it_is_built_unless_nothing_is_on(pool):
    ((answers, all_are),) = pool.run(fsdp, world_size=1)
    assert ["--use-megatron-fsdp" in answer for answer in answers] == [True, True, False]
    assert answers[2] == ""
    assert all_are


def attached_again() -> tuple[tuple[int, int], bool, list[str]]:
    tiny, _ = built({}, {"start_step": 2})
    for step in range(3):
        tiny.step(tiny.random_gradients(step))
    megatron_patch.disable()
    tiny.step(tiny.random_gradients(3))
    with logged() as lines:
        ledger = attach([tiny.ddp], {"start_step": 2}).ledger
    return (ledger.steps, ledger.steps_seen), ledger.onset.started, lines


def test_a_model_that_is_attached_again_counts_on_and_says_so(pool):
    (steps, started, lines), _ = pool.run(attached_again, world_size=2)
    assert steps == (3, 3)
    assert started
    assert any("attached again: steps count on from 3" in line for line in lines)


def overridden() -> dict[str, bool]:
    """Another tool's override of the bucket groups' methods, set before and after ours."""
    found = {}
    for name in ("start_grad_sync", "start_param_sync"):
        tiny, _ = built({}, None)
        (group,) = tiny.groups
        before = getattr(group, name)
        setattr(group, name, before)
        megatron_patch.attach(tiny.ddp, megatron_patch.CompressionConfig(start_step=0))
        found[f"{name} ours"] = vars(group)[name] is not before
        megatron_patch.disable()
        found[f"{name} back"] = vars(group)[name] == before
    tiny, _ = built({}, None)
    stock = tiny.exchange(tiny.random_gradients(0))
    (group,) = tiny.groups
    megatron_patch.attach(tiny.ddp, megatron_patch.CompressionConfig(start_step=0, bits=2))
    ours = group.start_grad_sync
    group.start_grad_sync = lambda *args, **kwargs: ours(*args, **kwargs)
    after = group.start_grad_sync
    compressed = tiny.exchange(tiny.random_gradients(0))
    found["compressed"] = any(bool((a != b).any()) for a, b in zip(stock, compressed, strict=True))
    megatron_patch.disable()
    found["left alone"] = group.start_grad_sync is after
    again = tiny.exchange(tiny.random_gradients(0))
    found["stock again"] = all(bool((a == b).all()) for a, b in zip(stock, again, strict=True))
    return found


def test_another_tool_s_override_is_put_back_or_left_alone(pool):
    for found in pool.run(overridden, world_size=2):
        assert found == dict.fromkeys(found, True)
