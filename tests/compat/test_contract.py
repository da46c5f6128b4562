"""Which megatron-core is tested, that it has every symbol that is replaced, and the range of releases.

What else the package relies on fails in the behaviour tests of tests/with_megatron, which run on the
same releases.
"""

from __future__ import annotations

import os
import warnings

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
