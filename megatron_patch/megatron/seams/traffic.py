"""Counts what a bucket group's exchanges send: Megatron's own exchanges and the exact weight gather."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_patch.collectives.exchange import Traffic, all_reduced, reduce_scattered
from megatron_patch.config import CompressionConfig


def stock_gradients(bucket_group: Any, force_all_reduce: bool = False) -> Traffic:
    """Return the traffic of one of Megatron's own gradient exchanges of a bucket group."""
    config = bucket_group.ddp_config
    total = Traffic()
    for bucket in bucket_group.buckets:
        if not config.use_distributed_optimizer:
            total.add(all_reduced(bucket.grad_data, bucket_group.data_parallel_group))
            continue
        ranks = bucket_group.intra_distributed_optimizer_instance_group
        total.add((all_reduced if force_all_reduce else reduce_scattered)(bucket.grad_data, ranks))
        if config.num_distributed_optimizer_instances > 1:
            instances = bucket_group.inter_distributed_optimizer_instance_group
            shard = bucket.grad_data[: bucket.grad_data.numel() // ranks.size()]
            total.add(all_reduced(shard, instances))
    return total


def stock_weights(bucket_group: Any) -> Traffic:
    """Return the traffic of Megatron's all-gather of a bucket group; zero with a replicated optimizer."""
    total = Traffic()
    if bucket_group.ddp_config.use_distributed_optimizer:
        for bucket in bucket_group.buckets:
            total.add(stock_bucket_weights(bucket_group, bucket))
    return total


def stock_bucket_weights(bucket_group: Any, bucket: Any) -> Traffic:
    """Return the traffic of Megatron's all-gather of one bucket of the group."""
    if bucket.param_data is None:
        return Traffic()
    return reduce_scattered(bucket.param_data, bucket_group.intra_distributed_optimizer_instance_group)


RAW_REASONS = ("forced", "inside_step", "not_coded", "copies_differ", "no_shorter", "edited", "off")
"""Why a coded bucket group was gathered in full, in this order: Megatron forced the gather (evaluation,
checkpoints); it ran inside the optimizer's step; it ran before any step; the ranks' copies differed; the code
saved nothing; weights were changed between the step and the gather; the gather is Megatron's own in this turn
(session/trial.py)."""
FORCED, IN_STEP, NOT_CODED, DIFFERENT, NO_SHORTER, EDITED, OFF = RAW_REASONS


@dataclass
class BucketReport:
    """What the last step's weight gathers of one bucket sent."""

    name: str
    traffic: Traffic = field(default_factory=Traffic)
    weights: int = 0
    """The number of weights in this rank's shard; 0 if it was not coded."""
    message_bytes: int = 0
    """The bytes of this rank's message, which the all-gather pads to the longest message of all ranks."""
    unchanged: torch.Tensor | None = None
    """How many weights of the shard the step did not change, int64 []; None if it was not coded."""

    def with_more(self, more: BucketReport) -> BucketReport:
        """Add the report of a second gather in the same step, which another optimizer's step caused."""
        return replace(more if more.weights else self, traffic=self.traffic + more.traffic)


def stock_because(bucket_group: Any, config: CompressionConfig) -> str | None:
    """Return why only Megatron gathers a bucket group's weights; None if they are coded, if only in turns."""
    if not (config.codes_weights or config.takes_turns):
        return "weight_gather is stock"
    if bucket_group.intra_distributed_optimizer_instance_group.size() == 1:
        return "the group is a single rank"
    if getattr(bucket_group.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False):
        return "mxfp8 weights share the gradients' buffer"
    dtypes = {bucket.param_data.dtype for bucket in bucket_group.buckets}
    if torch.float32 in dtypes:
        return "fp32 weights change in nearly all of their bits"
    if not dtypes <= {torch.bfloat16, torch.float16}:
        return "fp8 and fp4 weights are not coded"
    overlaps = bucket_group.ddp_config.overlap_param_gather
    if not config.codes_weights and overlaps and bucket_group.buckets[0].param_data.device.type == "cuda":
        # There a change after the step is found as messages are decoded: too late for a gather in full.
        return (
            "no turns with overlap_param_gather on a GPU, where a script must not change weights between a "
            "step and their gather; if yours does not, weight_gather exact codes them"
        )
    return None
