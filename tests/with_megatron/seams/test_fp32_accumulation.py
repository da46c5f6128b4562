"""Megatron's reduce-scatter with fp32 accumulation: the owner's sum in fp32 fulfils it."""

from __future__ import annotations

from typing import Any

import pytest
from with_megatron.seam_runs import logged, same, trained

NAME = "reduce_scatter_with_fp32_accumulation"
BF16 = {"dtypes": ("bfloat16",), "grad_reduce_in_fp32": False}


def runs(model: dict[str, Any], compression: dict[str, Any]) -> tuple[Any, Any, list[str]]:
    """In a worker: compressed training without and with it, and what was logged."""
    from megatron.core.distributed import param_and_grad_buffer

    function = param_and_grad_buffer.dist_reduce_scatter_func
    plain = trained(model, compression)
    try:
        with logged() as messages:
            asked = trained(model | {"ddp": {NAME: True}}, compression)
        assert param_and_grad_buffer.dist_reduce_scatter_func is not function, "Megatron's own is in place"
    finally:
        param_and_grad_buffer.dist_reduce_scatter_func = function  # Megatron sets it for the whole process
    return plain, asked, messages


@pytest.mark.parametrize("more", [{"overlap": True, "bucket_size": 300}, {}], ids=["overlap", "plain"])
@pytest.mark.parametrize("compression", [{"bits": 4}, {"bits": 4, "ranks_per_node": 2}], ids=["flat", "two"])
def test_it_is_fulfilled_and_changes_nothing(pool, more, compression):
    model = BF16 | more
    for rank, (plain, asked, messages) in enumerate(pool.run(runs, model, compression)):
        assert same(plain, asked)
        told = [line for line in messages if NAME in line]
        assert len(told) == (rank == 0)
        assert all("fulfilled" in line for line in told)
        assert all(("inside a node" in line) == ("ranks_per_node" in compression) for line in told)


def test_before_compression_starts_megatron_sums(pool):
    model, compression = BF16 | {"overlap": True, "bucket_size": 300}, {"bits": 4, "start_step": 3}
    for plain, asked, _ in pool.run(runs, model, compression):
        assert asked["events"]["uncompressed_syncs"] > 0
        assert not same(plain, asked), "before step 3 Megatron's sum, in fp32, is another"
