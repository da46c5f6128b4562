"""Describes a recipe's job as one rank of each pipeline stage holds it: model, batch, groups, buckets.

Operations are counted as Megatron does: two for each weight and token in the forward pass, twice as many in
the backward pass, and half of attention's scores, which are causal.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_patch.errors import UserError
from megatron_patch.workflows.plan import constants
from megatron_patch.workflows.plan.cluster import Cluster, Group

STRATEGIES = ("megatron", "optim_grads", "fsdp2", "hybrid", "ddp")
MEGATRON, OPTIM_GRADS, FSDP2, HYBRID, DDP = STRATEGIES
_SMALLEST_BUCKET, _BUCKET_OF_A_RANK = 40_000_000, 1_000_000


@dataclass(frozen=True)
class Parameter:
    """One parameter as a rank holds it: its shape there, and the operations that it takes for a token."""

    shape: tuple[int, ...]
    operations: float = 0.0
    """Operations of the forward pass for one token of the microbatch."""
    expert: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def exact(self) -> bool:
        """Whether its gradient is sent uncompressed, as those of vectors are."""
        return len(self.shape) < 2


@dataclass(frozen=True)
class PipelineStage:
    """One pipeline stage of a rank; `parameters` in the order of the forward pass."""

    parameters: tuple[Parameter, ...]

    @property
    def operations(self) -> float:
        """Operations of the forward pass for one token."""
        return sum(parameter.operations for parameter in self.parameters)

    def of(self, expert: bool) -> list[Parameter]:
        """Return the experts' parameters, or all others."""
        return [parameter for parameter in self.parameters if parameter.expert == expert]


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
        return Group(ranks, ranks // local, local, beside=min(cluster.per_node, cluster.world) / local)

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
        return cut(self.stages[stage].of(expert), size, math.lcm(ranks, 128), expert)


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


# --- from Megatron's validated arguments ------------------------------------------------------------------


def of_arguments(name: str, args: argparse.Namespace) -> Job:
    """Return the job of Megatron's validated arguments."""
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
        stages=_stages(args),
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
        passed_bytes=_passed_bytes(args, 2 if half else 4),
        recompute=args.recompute_granularity == "full",
    )


def _passed_bytes(args: argparse.Namespace, size: int) -> float:
    """Return the bytes that a rank sends to the next stage: with sequence parallelism, only its own part."""
    parts = args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    return float(size * args.seq_length * args.micro_batch_size * args.hidden_size / parts)


def _attention(args: argparse.Namespace) -> tuple[int, int, int]:
    """Return the numbers of heads and of groups of keys, and a head's width."""
    heads = args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else heads
    return heads, groups, args.kv_channels or args.hidden_size // heads


def _padded_vocabulary(args: argparse.Namespace) -> int:
    """Return the rows of the embedding over all tensor-parallel ranks, padded as by Megatron."""
    if getattr(args, "padded_vocab_size", None):
        return int(args.padded_vocab_size)
    if not args.vocab_size:
        raise UserError(
            "megatron.vocab_size: the plan needs it where no data set is there; add megatron.vocab_size=N"
        )
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-int(args.vocab_size) // multiple) * multiple


def _stages(args: argparse.Namespace) -> tuple[PipelineStage, ...]:
    heterogeneous = getattr(args, "heterogeneous_layers_config_path", None)
    if getattr(args, "multi_latent_attention", False) or heterogeneous:
        raise UserError(
            "plan: multi-latent attention and heterogeneous layers are not supported; plan a model of the "
            "same size with plain attention"
        )
    pipeline, hidden = args.pipeline_model_parallel_size, args.hidden_size
    rows = _padded_vocabulary(args) // args.tensor_model_parallel_size
    tied = not args.untie_embeddings_and_output_weights and pipeline == 1
    embedding = [Parameter((rows, hidden), 2.0 * rows * hidden if tied else 0.0)]
    if args.position_embedding_type == "learned_absolute":
        embedding.append(Parameter((args.max_position_embeddings, hidden)))
    output = [] if tied else [Parameter((rows, hidden), 2.0 * rows * hidden)]
    stages = []
    first = 0
    for number, count in enumerate(_layers_of_stages(args, pipeline)):
        parameters = [p for layer in range(first, first + count) for p in _layer(args, layer)]
        first += count
        if number == 0:
            parameters = [*embedding, *parameters]
        if number == pipeline - 1:
            parameters = [*parameters, *_norm(args), *output]
        stages.append(PipelineStage(tuple(parameters)))
    return tuple(stages)


def _layers_of_stages(args: argparse.Namespace, pipeline: int) -> list[int]:
    if pipeline == 1:
        return [args.num_layers]
    first, last = (getattr(args, f"decoder_{end}_pipeline_num_layers", None) for end in ("first", "last"))
    fixed = [count for count in (first, last) if count is not None]
    counts = [(args.num_layers - sum(fixed)) // max(pipeline - len(fixed), 1)] * pipeline
    counts[0] = counts[0] if first is None else first
    counts[-1] = counts[-1] if last is None else last
    return counts


def _norm(args: argparse.Namespace) -> list[Parameter]:
    vectors = 1 if args.normalization == "RMSNorm" else 2
    return [Parameter((args.hidden_size,))] * vectors


def _matrix(args: argparse.Namespace, rows: int, columns: int, more: float = 0.0) -> Iterator[Parameter]:
    yield Parameter((rows, columns), 2.0 * rows * columns + more)
    if args.add_bias_linear:
        yield Parameter((rows,))


def _layer(args: argparse.Namespace, number: int) -> Iterator[Parameter]:
    hidden, tensor = args.hidden_size, args.tensor_model_parallel_size
    heads, groups, width = _attention(args)
    scores = 2 * 2 * args.seq_length / 2 * heads * width / tensor  # Half of the scores are masked.
    yield from _norm(args)
    yield from _matrix(args, (heads + 2 * groups) * width // tensor, hidden, scores)
    if args.qk_layernorm:
        yield from [Parameter((width,))] * 2
    yield from _matrix(args, hidden, heads * width // tensor)
    yield from _norm(args)
    if not _has_experts(args, number):
        yield from _feed_forward(args, args.ffn_hidden_size // tensor)
        return
    yield Parameter((args.num_experts, hidden), 2.0 * args.num_experts * hidden)
    if args.moe_shared_expert_intermediate_size:
        yield from _feed_forward(args, args.moe_shared_expert_intermediate_size // tensor)
    ways = args.expert_tensor_parallel_size or tensor
    ffn = (args.moe_ffn_hidden_size or args.ffn_hidden_size) // ways
    held = args.num_experts // args.expert_model_parallel_size
    up = (2 if args.swiglu else 1) * ffn
    # Each token uses `moe_router_topk` experts; a rank's share of this work is spread over its experts.
    each = 2.0 * args.moe_router_topk / held * ways / tensor
    yield from [Parameter((up, hidden), each * up * hidden, expert=True)] * held
    yield from [Parameter((hidden, ffn), each * ffn * hidden, expert=True)] * held


def _has_experts(args: argparse.Namespace, number: int) -> bool:
    if not args.num_experts:
        return False
    frequency = args.moe_layer_freq
    return bool(frequency[number]) if isinstance(frequency, list) else number % int(frequency) == 0


def _feed_forward(args: argparse.Namespace, ffn: int) -> Iterator[Parameter]:
    yield from _matrix(args, (2 if args.swiglu else 1) * ffn, args.hidden_size)
    yield from _matrix(args, args.hidden_size, ffn)
