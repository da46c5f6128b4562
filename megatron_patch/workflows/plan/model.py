"""Describes a recipe's model as one rank of each pipeline stage holds it: parameters and their operations.

Operations are counted as Megatron does: two for each weight and token in the forward pass, twice as many in
the backward pass, and half of attention's scores, which are causal.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_patch.errors import UserError


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

    def numel(self, expert: bool) -> int:
        """Return the number of elements of the experts' parameters, or of all others."""
        return sum(p.numel for p in self.parameters if p.expert == expert)


def padded_vocabulary(args: argparse.Namespace) -> int:
    """Return the rows of the embedding over all tensor-parallel ranks, padded as by Megatron."""
    if getattr(args, "padded_vocab_size", None):
        return int(args.padded_vocab_size)
    if not args.vocab_size:
        raise UserError(
            "megatron.vocab_size: the plan needs it where no data set is there; add megatron.vocab_size=N"
        )
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-int(args.vocab_size) // multiple) * multiple


def stages_of(args: argparse.Namespace) -> tuple[PipelineStage, ...]:
    """Return the pipeline stages of a recipe, from Megatron's validated arguments."""
    if getattr(args, "multi_latent_attention", False) or getattr(
        args, "heterogeneous_layers_config_path", None
    ):
        raise UserError(
            "plan: multi-latent attention and heterogeneous layers are not supported; plan a model of the "
            "same size with plain attention"
        )
    pipeline = args.pipeline_model_parallel_size
    hidden, rows = args.hidden_size, padded_vocabulary(args) // args.tensor_model_parallel_size
    counts = _layers_of_stages(args, pipeline)
    tied = not args.untie_embeddings_and_output_weights
    stages = []
    first = 0
    for number, count in enumerate(counts):
        found: list[Parameter] = []
        if number == 0:
            found.append(Parameter((rows, hidden), 2.0 * rows * hidden if tied and pipeline == 1 else 0.0))
            if args.position_embedding_type == "learned_absolute":
                found.append(Parameter((args.max_position_embeddings, hidden)))
        for layer in range(first, first + count):
            found += _layer(args, layer)
        first += count
        if number == pipeline - 1:
            found += _norm(args)
            if not (tied and pipeline == 1):
                found.append(Parameter((rows, hidden), 2.0 * rows * hidden))
        stages.append(PipelineStage(tuple(found)))
    return tuple(stages)


def _layers_of_stages(args: argparse.Namespace, pipeline: int) -> list[int]:
    ends = [getattr(args, f"decoder_{end}_pipeline_num_layers", None) for end in ("first", "last")]
    if pipeline == 1:
        return [args.num_layers]
    fixed = [0 if end is None else end for end in ends]
    between = pipeline - sum(end is not None for end in ends)
    even = (args.num_layers - sum(fixed)) // max(between, 1)
    counts = [even] * pipeline
    if ends[0] is not None:
        counts[0] = fixed[0]
    if ends[1] is not None:
        counts[-1] = fixed[1]
    return counts


def _norm(args: argparse.Namespace) -> list[Parameter]:
    vectors = 1 if args.normalization == "RMSNorm" else 2
    return [Parameter((args.hidden_size,))] * vectors


def _matrix(args: argparse.Namespace, rows: int, columns: int, more: float = 0.0) -> Iterator[Parameter]:
    yield Parameter((rows, columns), 2.0 * rows * columns + more)
    if args.add_bias_linear:
        yield Parameter((rows,))


def _layer(args: argparse.Namespace, number: int) -> Iterator[Parameter]:
    hidden, tensor, heads = args.hidden_size, args.tensor_model_parallel_size, args.num_attention_heads
    width = args.kv_channels or hidden // heads
    groups = args.num_query_groups if args.group_query_attention else heads
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
