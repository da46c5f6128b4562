"""What a recipe asks of a cluster: its model, batch, groups of ranks and Megatron's overlap."""

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
    """Ranks that exchange a gradient: `nodes` x `local`, and how many such groups a node's uplink carries."""

    ranks: int
    nodes: int
    local: int
    beside: float = 1.0
    """Groups of the same kind that have ranks on one node."""
    scope: str = ALL
    """What part of a job's ranks it is: all, those inside a node, or one of each node."""


@dataclass(frozen=True)
class Bucket:
    """One of Megatron's buckets: `elements` with its padding, of which `exact` are in vectors."""

    elements: int
    exact: int
    first: int
    """Its parameters are numbers `first` to `last` of the stage's dense ones, or of its experts'."""
    last: int
    expert: bool = False


@dataclass(frozen=True)
class Job:
    """One training job; sizes are Megatron's flags of the same names."""

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
    """As given; None: Megatron's own."""
    exact_ratio: float
    """Peak learning rate / standard deviation of the weights at the start."""
    layers: int = 1
    strategy: str = MEGATRON
    """Megatron's DDP, Megatron-FSDP with `optim_grads`, or a wrapping of torch's."""
    activation_bytes: float = 0.0
    recompute: bool = False
    after_backward: bool = False
    """Whether all buckets are exchanged after the backward pass, as in the network benchmark."""
    weight_bits: float | None = None
    """Bits a weight in the exact gather; None: by the learning rate."""
    passed_bytes: float = 0.0
    """Activations of a microbatch that a rank sends to the next stage; as many gradients come back."""

    def replicas(self, world: int) -> int:
        """Data-parallel ranks."""
        return world // (self.tensor * self.pipeline * self.context)

    def microbatches(self, world: int) -> int:
        """Microbatches of one rank in a step."""
        return max(1, self.global_batch // (self.micro_batch * self.replicas(world)))

    def passes_between_nodes(self, cluster: Cluster) -> bool:
        """Whether the next stage's ranks are on other nodes: Megatron's stages are runs of ranks."""
        return self.pipeline > 1 and cluster.world // self.pipeline >= cluster.per_node

    def tokens(self, world: int) -> int:
        """Tokens of a step."""
        return self.microbatches(world) * self.micro_batch * self.replicas(world) * self.sequence

    @property
    def bits_of_weights(self) -> float:
        """Bits a weight of the exact gather."""
        return constants.exact_bits(self.exact_ratio) if self.weight_bits is None else self.weight_bits

    def group(self, cluster: Cluster, expert: bool) -> Group:
        """The ranks that exchange the experts' gradients, or the others'."""
        stride = self.expert_tensor * self.expert if expert else self.tensor
        ranks = max(1, cluster.world // (self.pipeline * stride))
        local = min(ranks, max(1, cluster.per_node // stride))
        while ranks % local:
            local -= 1
        nodes = ranks // local
        beside = min(cluster.per_node, cluster.world) / local
        return Group(ranks, nodes, local, beside)

    def buckets(self, stage: int, cluster: Cluster, expert: bool) -> list[Bucket]:
        """Megatron's buckets of a stage, in the order in which backward completes them.

        Its rule: parameters in reverse, each beginning at a multiple of 64, until `bucket_size` elements are
        reached; one bucket on stages behind the first, and without overlap.
        """
        ranks = self.group(cluster, expert).ranks
        dense_ranks = self.group(cluster, False).ranks
        size: float = self.bucket_size or max(_SMALLEST_BUCKET, _BUCKET_OF_A_RANK * dense_ranks)
        if stage > 0 or not self.overlap_gradients:
            size = math.inf
        found = [p for p in self.stages[stage].parameters if p.expert == expert]
        return cut(found, size, math.lcm(ranks, 128), expert)


def cut(parameters: list[Parameter], size: float, multiple: int, expert: bool) -> list[Bucket]:
    """Parameters in reverse, until a bucket has `size` elements or more; each is padded to `multiple`."""
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
    """The job of Megatron's validated arguments."""
    if args.num_distributed_optimizer_instances > 1:
        raise UserError(
            "megatron.num_distributed_optimizer_instances: the plan supports a single optimizer instance; "
            "plan with 1"
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
    """Every tensor-parallel rank sends all of it, or its part of the sequence with sequence parallelism."""
    parts = args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    size = 2 if args.bf16 or args.fp16 else 4
    return float(size * args.seq_length * args.micro_batch_size * args.hidden_size / parts)


def _activation_bytes(args: argparse.Namespace) -> float:
    """bf16, flash attention (docs/clusters.md); a pipeline's first stage holds as much as all layers do."""
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
