"""enable, attach, the post-wrap hook and launch: the same training, start and metrics; what they refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from with_megatron.seam_runs import logged
from workflows.engine_runs import DOORS, OPTIONS, UNTIED, Run, engine

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


# --- mistakes --------------------------------------------------------------------------------------------


def mistaken() -> dict[str, str]:
    """In a worker: what each mistake is answered with."""
    import torch
    from with_megatron.tiny_model import build

    import megatron_patch

    tiny = build()
    config = megatron_patch.CompressionConfig(bits=4)
    doors: dict[str, Any] = {
        "attach unwrapped": lambda: megatron_patch.attach(tiny.ddp.module, config),
        "attach a module": lambda: megatron_patch.attach([torch.nn.Linear(1, 1)]),
        "attach a generator": lambda: megatron_patch.attach(chunk for chunk in [tiny.ddp]),
        "attach nothing": lambda: megatron_patch.attach(None),
        "attach options": lambda: megatron_patch.attach(tiny.ddp, {"bits": 4}),
        "enable options": lambda: megatron_patch.enable({"bits": 4}),
        "enable bits": lambda: megatron_patch.enable(4),
        "report unwrapped": lambda: megatron_patch.report(tiny.ddp.module),
        "report a generator": lambda: megatron_patch.report(chunk for chunk in [tiny.ddp]),
        "state_dict unwrapped": lambda: megatron_patch.state_dict(tiny.ddp.module),
        "load_state_dict unwrapped": lambda: megatron_patch.load_state_dict([tiny.ddp.module], {}),
        "state_dict a generator": lambda: megatron_patch.state_dict(chunk for chunk in [tiny.ddp]),
    }
    answers = {}
    for name, door in doors.items():
        try:
            door()
            answers[name] = "nothing"
        except megatron_patch.UserError as error:
            answers[name] = str(error)
    megatron_patch.disable()
    return answers


def test_a_mistake_at_a_door_is_one_line_that_names_it(pool):
    for answers in pool.run(mistaken, world_size=1):
        for name, line in answers.items():
            caller, _, what = name.partition(" ")
            assert line.startswith(f"{caller}(): "), name
            assert "\n" not in line
            if what in ("options", "bits"):
                assert "CompressionConfig(bits=4)" in line
            else:
                assert "Megatron's DistributedDataParallel" in line
        assert "TinyModel" in answers["attach unwrapped"]
        assert "generator" in answers["attach a generator"]


def fsdp(options: dict[str, Any]) -> tuple[str, bool]:
    """In a worker: what building Megatron's other wrappers says after `enable`, and after `disable`."""
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel
    from megatron.core.transformer import TransformerConfig

    import megatron_patch

    class Sharded(_BaseDataParallel):
        """Stands for Megatron-FSDP and Torch-FSDP2, which derive from the same class."""

        def __init__(self) -> None:
            super().__init__(config, torch.nn.Linear(2, 2))

    import torch

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    megatron_patch.enable(megatron_patch.CompressionConfig(**options))
    try:
        Sharded()
        answer = "built"
    except megatron_patch.UserError as error:
        answer = str(error)
    megatron_patch.disable()
    return answer, isinstance(Sharded(), _BaseDataParallel)


@pytest.mark.parametrize(
    ("options", "refused"),
    [({}, True), ({"method": "none", "weight_gather": "exact"}, True), ({"method": "none"}, False)],
    ids=str,
)
def test_fsdp_is_refused_when_it_is_built_unless_nothing_is_on(pool, options, refused):
    from megatron.core.distributed import TorchFullyShardedDataParallel
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    # From 0.20 on FullyShardedDataParallel is a function that makes one of several classes.
    named = [value for name, value in vars(mcore_fsdp_adapter).items() if "FullySharded" in name]
    classes = [value for value in named if isinstance(value, type)]
    assert classes
    assert all(issubclass(one, _BaseDataParallel) for one in [TorchFullyShardedDataParallel, *classes])
    for answer, built in pool.run(fsdp, options, world_size=1):
        assert built
        assert ("--use-megatron-fsdp" in answer) == refused
        assert (answer == "built") != refused


def attached_again() -> dict[str, Any]:
    from with_megatron.seam_runs import built

    import megatron_patch
    from megatron_patch.megatron.attach import session_of

    tiny, _ = built({}, {"start_step": 2})
    for step in range(3):
        tiny.step(tiny.random_gradients(step))
    megatron_patch.disable()
    tiny.step(tiny.random_gradients(3))
    with logged() as lines:
        megatron_patch.attach(tiny.ddp, megatron_patch.CompressionConfig(start_step=2))
    state = session_of(tiny.ddp)
    found = {
        "steps": (state.ledger.steps, state.ledger.steps_seen),
        "active": state.ledger.onset.started,
        "lines": lines,
    }
    megatron_patch.disable()
    return found


def test_a_model_that_is_attached_again_counts_on_and_says_so(pool):
    found, *_ = pool.run(attached_again, world_size=2)
    assert found["steps"] == (3, 3)
    assert found["active"]
    assert any("attached again: steps count on from 3" in line for line in found["lines"])


def overridden() -> dict[str, bool]:
    """Another tool's override of the bucket groups' methods, set before and after ours."""
    from with_megatron.seam_runs import built

    import megatron_patch

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
