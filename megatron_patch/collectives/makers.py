"""Chooses a bucket's exchange: flat, in two hops if ranks of the group share nodes, or a user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megatron_patch.collectives.all_reduce import AllReduce
from megatron_patch.collectives.exchange import Exchange, Setup
from megatron_patch.collectives.reduce_scatter import ReduceScatter
from megatron_patch.collectives.topology import NoTwoHops, TwoHops, agreed_ranks_per_node, two_hops
from megatron_patch.collectives.two_hop import TwoHopAllReduce, TwoHopReduceScatter
from megatron_patch.quantization.blocks import Contents
from megatron_patch.registry import topology


@dataclass(frozen=True)
class Reduction:
    """The exchanges of a bucket group, one for each bucket; none if the group is a single rank."""

    exchanges: Sequence[Exchange] = ()
    flat_because: str | None = None
    """Why two hops are not used, if the user may have expected them."""


def make_reduce_scatters(tensors: Sequence[Contents], group: dist.ProcessGroup, setup: Setup) -> Reduction:
    """Create the reduce-scatters of buckets. Every rank of `group` must call it."""
    if group.size() == 1:
        return Reduction()
    if users := topology(setup.config.topology):
        return Reduction([users.reduce_scatter(tensor, group, setup) for tensor in tensors])
    hops, flat_because = _hops(group, setup)
    if hops is None:
        return Reduction([ReduceScatter(tensor, group, setup) for tensor in tensors], flat_because)
    return Reduction([TwoHopReduceScatter(tensor, hops, setup) for tensor in tensors])


def make_all_reduces(
    tensors: Sequence[Contents], group: dist.ProcessGroup, setup: Setup, one_hop: bool = False
) -> Reduction:
    """Create the all-reduces of tensors, flat if `one_hop`. Every rank of `group` must call it."""
    if group.size() == 1:
        return Reduction()
    if users := topology(setup.config.topology):
        return Reduction([users.all_reduce(tensor, group, setup) for tensor in tensors])
    hops, flat_because = (None, None) if one_hop else _hops(group, setup)
    if hops is None:
        return Reduction([AllReduce(tensor, group, setup) for tensor in tensors], flat_because)
    return Reduction([TwoHopAllReduce(tensor, hops, setup) for tensor in tensors])


def _hops(group: dist.ProcessGroup, setup: Setup) -> tuple[TwoHops | None, str | None]:
    config = setup.config
    if config.topology == "flat":
        return None, None
    try:
        return two_hops(group, agreed_ranks_per_node(group, config.ranks_per_node, setup.device)), None
    except NoTwoHops as reason:
        unexpected = reason.irregular or config.topology == "two_hop"
        return None, str(reason) if unexpected else None
