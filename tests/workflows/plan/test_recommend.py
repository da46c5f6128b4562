"""Advice: stay where nothing is gained, change least where much is, and say what memory it takes."""

from __future__ import annotations

import dataclasses
import math

import pytest
from workflows.plan.jobs import cluster, job

from megatron_patch.errors import UserError
from megatron_patch.workflows.plan import methods
from megatron_patch.workflows.plan.recommend import GRID, advise, pays_below, rows

NAMES = ("stock", "none_exact", "loco4", "loco4_exact", "loco2_exact")
METHODS = [methods.parse(name) for name in NAMES]


def test_many_microbatches_hide_the_exchange() -> None:
    one, on = job(batch=16 * 64), cluster(nodes=2, bandwidth=1e11)
    advice = advise(one, on, rows(one, on, METHODS), 0.03)
    assert advice.stays
    assert "hides behind 64 microbatches" in advice.reason
    assert "stay with stock" in advice.reason


def test_a_slow_link_wants_compression_and_the_reason_has_the_numbers() -> None:
    one, on = job(batch=16), cluster(nodes=2, bandwidth=1e8)
    found = rows(one, on, METHODS)
    advice = advise(one, on, found, 0.03)
    assert advice.row.seconds <= 1.03 * min(row.seconds for row in found)
    assert not advice.stays
    assert "of memory" not in advice.reason, "some MB"
    found = [dataclasses.replace(row, added_bytes=2.5e9) for row in found]
    assert advise(one, on, found, 0.03).reason.endswith("; it needs 2.5 GB of memory more")
    assert f"{advice.row.speedup:.2f} times as fast, and" in advice.reason, "without stock_bf16 no word of it"
    found = rows(one, on, [*METHODS[:1], methods.parse("stock_bf16"), *METHODS[1:]])
    advice = advise(one, on, found, 0.03)
    ratio = found[1].seconds / advice.row.seconds
    assert f"times as fast ({ratio:.2f} times as with gradients in bf16), and" in advice.reason
    assert "1 microbatch " in advice.reason


def test_of_methods_about_as_fast_the_first_is_taken() -> None:
    one, on = job(batch=16), cluster(nodes=2, bandwidth=1e8)
    found = rows(one, on, METHODS)
    same = [dataclasses.replace(row, step=dataclasses.replace(row.step, seconds=1.0)) for row in found]
    assert advise(one, on, same, 0.03).row.method.name == "stock"
    fastest = [
        *same[:-1],
        dataclasses.replace(same[-1], step=dataclasses.replace(same[-1].step, seconds=0.98)),
    ]
    assert advise(one, on, fastest, 0.03).row.method.name == "stock"
    assert advise(one, on, fastest, 0.01).row.method.name == "loco2_exact"


def test_the_bandwidth_below_which_a_method_pays() -> None:
    stock = [10 / g + 1 for g in GRID]
    half = [5 / g + 1 for g in GRID]
    # (10/g + 1) / (5/g + 1) = 1.03 at g = 5 (2 - 1.03) / 0.03 = 161.7
    assert pays_below(stock, half, 0.03) == pytest.approx(161.7, rel=0.03)
    assert pays_below(stock, stock, 0.03) == 0.0
    assert pays_below(stock, [s / 2 for s in stock], 0.03) == math.inf


def test_names_choose_methods_and_stock_is_always_first() -> None:
    found = methods.chosen("loco4_exact,naive2_exact", False, True, True)
    assert [method.name for method in found] == ["stock", "loco4_exact", "naive2_exact"]
    assert [method.bits for method in found] == [None, 4, 2]
    without = methods.chosen(None, True, False, False)
    assert not any(method.exact for method in without)
    assert not {"stock_bf16", "loco4_flat_exact", "none_exact"} & {method.name for method in without}
    for names, words in (("loco4,loco4", "different names"), ("loco5", "must be"), ("stok", "must be")):
        with pytest.raises(UserError, match=words):
            methods.chosen(names, False, True, True)
