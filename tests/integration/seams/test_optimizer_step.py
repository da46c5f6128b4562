"""Whose step it is: which chunks a Megatron optimizer updates, chained or not."""

from __future__ import annotations

from types import SimpleNamespace

from megatron_patch.integration.seams.optimizer_step import leaves_of, updates


def test_a_rank_that_owns_no_parameter_of_a_chunk_steps_it_too():
    """A layer-wise optimizer gives whole parameters to ranks, and to some none."""
    chunk = SimpleNamespace(param_to_bucket_group={})
    empty = SimpleNamespace(float16_groups=[], fp32_from_fp32_groups=[])
    layer_wise = SimpleNamespace(chained_optimizers=[empty], model_chunks=[chunk])
    assert updates(layer_wise, chunk)
    assert not updates(layer_wise, SimpleNamespace(param_to_bucket_group={}))


def test_a_chain_in_a_chain_is_stepped_part_by_part():
    muon, adam, rest = (SimpleNamespace(name=name) for name in ("muon", "adam", "rest"))
    layer_wise = SimpleNamespace(chained_optimizers=[muon, adam])
    assert leaves_of(SimpleNamespace(chained_optimizers=[layer_wise, rest])) == [muon, adam, rest]
    assert leaves_of(rest) == [rest]
