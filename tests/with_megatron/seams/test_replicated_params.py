"""Which parameters tensor-parallel ranks average under compression, and that nothing stays marked."""

from __future__ import annotations

from typing import Any

import pytest

MARK = "average_gradients_across_tp_domain"


def marked(model: dict[str, Any], method: str) -> dict[str, Any]:
    """Names of all parameters, and of the marked ones before, while and after compression is attached."""
    from with_megatron.gpt_model import build

    import megatron_patch

    gpt = build(**model)

    def names() -> list[str]:
        return [name for name, parameter in gpt.parameters.items() if hasattr(parameter, MARK)]

    report = {"before": names()}
    megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(method=method))
    report["attached"] = names()
    megatron_patch.disable()
    return report | {
        "after": names(),
        "whole": [
            name
            for name, parameter in gpt.parameters.items()
            if not getattr(parameter, "tensor_model_parallel", False)
        ],
    }


@pytest.mark.parametrize(
    ("model", "method", "all_whole"),
    [
        ({"tp": 2}, "loco", True),
        ({"tp": 2}, "none", False),
        ({"tp": 2, "sequence_parallel": True}, "loco", False),
        ({}, "loco", False),
    ],
    ids=["tp2", "tp2-none", "tp2-sp", "dp4"],
)
def test_what_is_not_split_is_averaged_unless_megatron_sums_it(pool, model, method, all_whole):
    for report in pool.run(marked, model, method):
        assert report["before"] == report["after"] == []
        assert report["whole"]
        assert report["attached"] == (report["whole"] if all_whole else [])
