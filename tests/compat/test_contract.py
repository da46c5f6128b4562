"""Which megatron-core is tested, that it has what is replaced in it, and the range of releases.

What else the package relies on fails in the behaviour tests of tests/with_megatron, which run on the same
releases; whole runs of Megatron's training loop are made on the locked one only.
"""

from __future__ import annotations

import inspect
import os
import warnings
from typing import Any

import pytest
from with_megatron.tiny_model import build

import megatron_patch


def version() -> str:
    import megatron.core

    return megatron.core.__version__


def test_the_megatron_core_that_was_asked_for_is_the_one_tested(pool):
    (found,) = pool.run(version, world_size=1)
    release = found.partition("+")[0]  # 0.18 and later append the commit of whatever repository they lie in
    assert release == os.environ.get("EXPECTED_MEGATRON_CORE", release)


def unmet_symbols() -> list[list[str]]:
    """What this release lacks, and what it would lack were a symbol or a parameter not there."""
    from megatron_patch.megatron import symbols

    found = [list(symbols.unmet())]
    known = dict(symbols.SYMBOLS)
    symbols.SYMBOLS["megatron.core.optimizer.optimizer:NoOptimizer.step"] = ""
    symbols.SYMBOLS[symbols.START_GRAD_SYNC] = "force_all_reduce speed"
    try:
        return [*found, list(symbols.unmet())]
    finally:
        symbols.SYMBOLS.clear()
        symbols.SYMBOLS.update(known)


def test_every_symbol_that_is_replaced_is_there(pool):
    ((none, some),) = pool.run(unmet_symbols, world_size=1)
    assert none == []
    name = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup.start_grad_sync"
    assert some == [
        f"{name} has no parameter speed",
        "megatron.core.optimizer.optimizer.NoOptimizer.step is missing",
    ]


LOOP = {
    "train_step": {"model"},
    "training_log": {"iteration", "loss_dict", "grad_norm"},
    "evaluate_and_print_results": {"prefix"},
    "evaluate": set(),
}
"""Functions of the training loop that the metrics wrap, and the arguments that they read."""


def claims_of_the_loop() -> dict[str, bool]:
    """In a worker: what is true of Megatron's training loop and its checkpoints."""
    from megatron.training import checkpointing, global_vars, training

    def calls(function: Any) -> set[str]:
        return set(inspect.unwrap(function).__code__.co_names)

    source = inspect.getsource(checkpointing)
    claims = {
        f"{name} takes them": arguments <= set(inspect.signature(getattr(training, name)).parameters)
        for name, arguments in LOOP.items()
    }
    return claims | {
        "train calls them by name": LOOP.keys() - {"evaluate"} <= calls(training.train),
        "evaluate is called by name": "evaluate" in calls(training.evaluate_and_print_results),
        "writers": hasattr(global_vars, "get_tensorboard_writer")
        and hasattr(global_vars, "get_wandb_writer"),
        "core's save is called": "dist_checkpointing.save(" in source,
        "core's load is called": "dist_checkpointing.load(" in source,
        "folders": checkpointing.get_checkpoint_name("f", 7, return_base_dir=True) == "f/iter_0000007",
    }


def test_the_training_loop_is_as_the_hooks_expect(pool):
    (claims,) = pool.run(claims_of_the_loop, world_size=1)
    assert [claim for claim, holds in claims.items() if not holds] == []


def warnings_of(release: str | None) -> list[str]:
    """What is warned of when megatron-core says that it is `release`, compression being attached twice."""
    import megatron.core

    from megatron_patch.megatron import attach

    true_release = megatron.core.__version__
    megatron.core.__version__ = release or true_release
    attach._warn_of_unknown_release.cache_clear()  # a worker serves many tests, a user's process one version
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                megatron_patch.attach([build().ddp])
            megatron_patch.enable()
            build()
    finally:
        megatron_patch.disable()
        megatron.core.__version__ = true_release
        attach._warn_of_unknown_release.cache_clear()
    return [str(warning.message) for warning in caught if "megatron-loco" in str(warning.message)]


@pytest.mark.parametrize("release", ["0.16.4", "0.21.0rc1", "1.0"])
def test_a_release_out_of_range_is_warned_of_once_by_version(pool, release):
    (found,) = pool.run(warnings_of, release, world_size=1)
    (message,) = found
    assert f"this is {release}" in message
    assert ">=0.17,<0.21" in message


@pytest.mark.parametrize("release", ["0.17.0", "0.18.2+5968063", "0.20.0rc0", None])
def test_a_release_within_the_range_is_never_warned_of(pool, release):
    """None: the installed one, whatever it is."""
    assert pool.run(warnings_of, release, world_size=1) == [[]]
