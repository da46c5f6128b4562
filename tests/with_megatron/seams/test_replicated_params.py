"""Which parameters tensor-parallel ranks average under compression, and that nothing stays marked."""

from __future__ import annotations

from typing import Any

import pytest
from with_megatron.gpt_model import build
from with_megatron.seam_runs import attach

import megatron_patch


def marked(model: dict[str, Any], method: str) -> list[list[str]]:
    """Names of the marked parameters before, while and after compression is attached, and of unsplit ones."""
    gpt = build(**model)

    def names(mark: str = "average_gradients_across_tp_domain") -> list[str]:
        return [name for name, parameter in gpt.parameters.items() if getattr(parameter, mark, False)]

    before = names()
    attach(gpt.chunks, {"method": method})
    attached = names()
    megatron_patch.disable()
    split = names("tensor_model_parallel")
    return [before, attached, names(), [name for name in gpt.parameters if name not in split]]


@pytest.mark.parametrize(
    ("model", "method", "all_whole"),
    [
        ({"tp": 2}, "loco", True),
        ({"tp": 2}, "none", False),
        ({"tp": 2, "sequence_parallel": True}, "loco", False),
        ({}, "loco", False),
    ],
    ids=["tp2", "tp2-none", "tp2-sp", "dp2"],
)
def test_what_is_not_split_is_averaged_unless_megatron_sums_it(pool, model, method, all_whole):
    for before, attached, after, whole in pool.run(marked, model, method, world_size=2):
        assert before == after == []
        assert whole
        assert attached == (whole if all_whole else [])
