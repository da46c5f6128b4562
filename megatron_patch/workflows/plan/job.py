"""Describes the job of a recipe: its model, batch, process groups, buckets and overlap."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from megatron_patch.errors import UserError
from megatron_patch.workflows.plan import constants
from megatron_patch.workflows.plan.cluster import Cluster
from megatron_patch.workflows.plan.model import Parameter, PipelineStage, padded_vocabulary, stages_of

ALL, INSIDE, BETWEEN = "all", "inside", "between"
STRATEGIES = ("megatron", "optim_grads", "fsdp2", "hybrid", "ddp")
MEGATRON, OPTIM_GRADS, FSDP2, HYBRID, DDP = STRATEGIES
_SMALLEST_BUCKET, _BUCKET_OF_A_RANK = 40_000_000, 1_000_000


@dataclass(frozen=True)
class Group:
    """A group of ranks that exchange a gradient: `local` ranks on each of `nodes` nodes."""

    ranks: int
    nodes: int
    local: int
    beside: float = 1.0
    """How many groups of this kind share a node, and its uplink."""
    scope: str = ALL
    """The part of a data-parallel group that it is: all, those inside a node, or one rank of each node."""


@dataclass(frozen=True)
class Bucket:
    """One of Megatron's buckets: `elements` include its padding, and `exact` of them are in vectors."""

    elements: int
    exact: int
    first: int
    """Its parameters are `first` to `last`, counted among the stage's dense or expert parameters."""
    last: int
    expert: bool = False


@dataclass(frozen=True)
class Job:
    """One training job; most fields are flags of Megatron."""

    name: str
    stages: tuple[PipelineStage, ...]
    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    virtual: int
    micro_batch: int
    global_batch: int
    sequence: int
    gradient_bytes: int
    weight_bytes: int
    overlap_gradients: bool
    overlap_weights: bool
    distributed: bool
    fp32_accumulation: bool
    bucket_size: int | None
    """Megatron's --ddp-bucket-size; None is Megatron's default."""
    exact_ratio: float
    """The peak learning rate divided by the weights' initial standard deviation."""
    layers: int = 1
    strategy: str = MEGATRON
    """One of STRATEGIES: Megatron's DDP, Megatron-FSDP with `optim_grads`, or one of torch's."""
    activation_bytes: float = 0.0
    recompute: bool = False
    after_backward: bool = False
    """Whether all buckets are exchanged after the backward pass, as in the network benchmark."""
    weight_bits: float | None = None
    """Bits per weight in the exact gather; None derives them from `exact_ratio`."""
    passed_bytes: float = 0.0
    """Bytes of a microbatch's activations that a rank sends to the next stage; as many gradients return."""

    def replicas(self, world: int) -> int:
        """Return the number of data-parallel ranks."""
        return world // (self.tensor * self.pipeline * self.context)

    def microbatches(self, world: int) -> int:
        """Return the number of microbatches of one rank in a step."""
        return max(1, self.global_batch // (self.micro_batch * self.replicas(world)))

    def passes_between_nodes(self, cluster: Cluster) -> bool:
        """Whether the next stage's ranks are on other nodes, since a stage has consecutive ranks."""
        return self.pipeline > 1 and cluster.world // self.pipeline >= cluster.per_node

    def tokens(self, world: int) -> int:
        """Return the number of tokens of a step."""
        return self.microbatches(world) * self.micro_batch * self.replicas(world) * self.sequence

    @property
    def bits_of_weights(self) -> float:
        """Bits per weight of the exact gather."""
        return constants.exact_bits(self.exact_ratio) if self.weight_bits is None else self.weight_bits

    def group(self, cluster: Cluster, expert: bool) -> Group:
        """Return the group that exchanges the experts' gradients, or all other gradients."""
        stride = self.expert_tensor * self.expert if expert else self.tensor
        ranks = max(1, cluster.world // (self.pipeline * stride))
        local = min(ranks, max(1, cluster.per_node // stride))
        while ranks % local:
            local -= 1
        nodes = ranks // local
        beside = min(cluster.per_node, cluster.world) / local
        return Group(ranks, nodes, local, beside)

    def buckets(self, stage: int, cluster: Cluster, expert: bool) -> list[Bucket]:
        """Return Megatron's buckets of a stage, in the order in which the backward pass completes them.

        As in Megatron, a bucket takes parameters in reverse order, each beginning at a multiple of 64, until
        it has `bucket_size` elements; later stages than the first, and jobs without overlap, have one bucket.
        """
        ranks = self.group(cluster, expert).ranks
        dense_ranks = self.group(cluster, False).ranks
        size: float = self.bucket_size or max(_SMALLEST_BUCKET, _BUCKET_OF_A_RANK * dense_ranks)
        if stage > 0 or not self.overlap_gradients:
            size = math.inf
        found = [p for p in self.stages[stage].parameters if p.expert == expert]
        return cut(found, size, math.lcm(ranks, 128), expert)


def cut(parameters: list[Parameter], size: float, multiple: int, expert: bool) -> list[Bucket]:
    """Cut parameters, in reverse order, into buckets of `size` elements or more, padded to `multiple`."""
    buckets: list[Bucket] = []
    elements = exact = 0
    last = len(parameters) - 1
    for number in range(len(parameters) - 1, -1, -1):
        parameter = parameters[number]
        elements = -(-elements // 64) * 64 + parameter.numel
        exact += parameter.numel if parameter.exact else 0
        if elements >= size or number == 0:
            buckets.append(Bucket(-(-elements // multiple) * multiple, exact, number, last, expert))
            elements, exact, last = 0, 0, number - 1
    return buckets


def of_arguments(name: str, args: argparse.Namespace) -> Job:
    """Return the job of Megatron's validated arguments."""
    if args.num_distributed_optimizer_instances > 1:
        raise UserError(
            "megatron.num_distributed_optimizer_instances: the plan supports a single optimizer instance; "
            "plan with 1, and for outer steps between nodes with e.g. --methods outer30_error_feedback4_exact"
        )
    if not args.global_batch_size:
        raise UserError("megatron.global_batch_size: the plan needs it; add megatron.global_batch_size=N")
    half = bool(args.bf16 or args.fp16)
    in_fp32 = bool(getattr(args, "accumulate_allreduce_grads_in_fp32", True)) or not half
    tensor = args.tensor_model_parallel_size
    return Job(
        name=name,
        stages=stages_of(args),
        tensor=tensor,
        pipeline=args.pipeline_model_parallel_size,
        context=args.context_parallel_size,
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size or tensor,
        virtual=args.virtual_pipeline_model_parallel_size or 1,
        micro_batch=args.micro_batch_size,
        global_batch=args.global_batch_size,
        sequence=args.seq_length,
        gradient_bytes=4 if in_fp32 else 2,
        weight_bytes=2 if half else 4,
        overlap_gradients=bool(args.overlap_grad_reduce),
        overlap_weights=bool(args.overlap_param_gather),
        distributed=bool(args.use_distributed_optimizer),
        fp32_accumulation=bool(getattr(args, "ddp_reduce_scatter_with_fp32_accumulation", False)),
        bucket_size=args.ddp_bucket_size,
        exact_ratio=(args.lr or 0.0) / (args.init_method_std or 0.02),
        layers=args.num_layers,
        activation_bytes=_activation_bytes(args),
        passed_bytes=_passed_bytes(args),
        recompute=args.recompute_granularity == "full",
    )


def _passed_bytes(args: argparse.Namespace) -> float:
    """Return the bytes that a rank sends to the next stage: with sequence parallelism, only its own part."""
    parts = args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    size = 2 if args.bf16 or args.fp16 else 4
    return float(size * args.seq_length * args.micro_batch_size * args.hidden_size / parts)


def _activation_bytes(args: argparse.Namespace) -> float:
    """Return the bytes of activations in bf16 with flash attention (docs/clusters.md).

    The first stage of a pipeline holds as much as all layers do for one microbatch.
    """
    hidden = args.hidden_size
    tokens = args.seq_length * args.micro_batch_size / args.context_parallel_size
    heads = args.num_attention_heads
    query = heads * (args.kv_channels or hidden // heads)
    groups = args.num_query_groups if args.group_query_attention else heads
    feed_forward = 6.0 * args.ffn_hidden_size
    if args.num_experts:
        ffn = args.moe_ffn_hidden_size or args.ffn_hidden_size
        feed_forward = args.moe_router_topk * (6 * ffn + 4 * hidden)
    layer = 8 * hidden + 4 * query + 4 * query * groups / heads + feed_forward
    if args.recompute_granularity == "full":
        layer = 2.0 * hidden
    logits = 8 * padded_vocabulary(args) if args.pipeline_model_parallel_size == 1 else 0
    return tokens * (layer * args.num_layers + logits) / args.tensor_model_parallel_size
