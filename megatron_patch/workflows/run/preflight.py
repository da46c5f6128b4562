"""What Megatron asserts between parsing and the first step, asked before any process starts.

`check` builds from the parsed arguments what every rank would build: the learning-rate schedule, the
transformer's and the optimizer's configurations, the split of the data. It does so with Megatron's own code,
so it follows each release; on the CPU, without process groups and in milliseconds. What only shows once a
model, a process group or a batch is there has rules here, `_rules`: each refuses what fails in any case.

An assertion becomes one line (assertions.py).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import logging
import re
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace

from megatron_patch.errors import UserError
from megatron_patch.megatron import patching, symbols
from megatron_patch.workflows.run.assertions import multiple, refusal

_AT_LEAST_1 = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "num_distributed_optimizer_instances"),
    *("num_layers", "hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size"),
    *("num_query_groups", "moe_ffn_hidden_size", "moe_router_topk", "moe_layer_freq"),
    *("seq_length", "max_position_embeddings", "vocab_size", "make_vocab_size_divisible_by"),
    *("micro_batch_size", "global_batch_size", "seed"),
    *("lr_decay_iters", "log_interval", "tensorboard_log_interval", "save_interval"),
    *("distributed_timeout_minutes", "loss_scale_window", "hysteresis"),
)
_AT_LEAST_0 = (
    "lr",
    "min_lr",
    "weight_decay",
    "start_weight_decay",
    "init_method_std",
    "num_workers",
    "manual_gc_interval",
)
_ABOVE_0 = ("loss_scale", "initial_loss_scale", "min_loss_scale")
_FROM_0_TO_1 = ("attention_dropout", "hidden_dropout")
_FROM_0_BELOW_1 = ("adam_beta1", "adam_beta2")
_EMERGING = ("muon", "dist_muon", "adaptive_muon", "soap", "lion")
"""Optimizers that megatron-core imports from emerging-optimizers, and does not bring."""
_ONLY_WITH = {
    "num_query_groups": "group_query_attention",
    **dict.fromkeys(("moe_ffn_hidden_size", "moe_router_topk", "moe_layer_freq"), "num_experts"),
    **dict.fromkeys((*_ABOVE_0, "loss_scale_window", "hysteresis"), "fp16"),
    "tensorboard_log_interval": "tensorboard_dir",
    "manual_gc_interval": "manual_gc",
}
"""Flags that nothing reads where the other one is not set."""


def check_values(args: argparse.Namespace) -> None:
    """Refuse numbers that no run can have, from the arguments as they were parsed."""
    for names, fits, words in (
        (_AT_LEAST_1, lambda value: value >= 1, "1 or more"),
        (_AT_LEAST_0, lambda value: value >= 0, "0 or more"),
        (_ABOVE_0, lambda value: value > 0, "above 0"),
        (_FROM_0_TO_1, lambda value: 0 <= value <= 1, "from 0 to 1"),
        (_FROM_0_BELOW_1, lambda value: 0 <= value < 1, "0 or more and below 1"),
    ):
        for name in names:
            value = getattr(args, name, None)
            needed = _ONLY_WITH.get(name)
            if isinstance(value, int | float) and not fits(value) and (not needed or getattr(args, needed)):
                raise UserError(f"megatron.{name}: {value} must be {words}")
    if args.optimizer in _EMERGING and not find_spec("emerging_optimizers"):
        raise UserError(
            f"megatron.optimizer: {args.optimizer!r} needs a package that is not installed: "
            "pip install emerging-optimizers"
        )
    if args.skip_train:
        return
    steps = args.train_iters or 0
    if steps < 0 or not (steps or args.train_samples):
        raise UserError(f"megatron.train_iters: {args.train_iters} must be 1 or more")
    if args.lr is None:
        raise UserError("megatron.lr: must be given")
    if args.eval_interval == 0 and not args.full_validation:
        raise UserError("megatron.eval_interval: 0 must be 1 or more; eval_iters=0 leaves evaluation out")


def check(args: argparse.Namespace) -> None:
    """Build what a rank builds before its first step, from validated `args`, which stay as they are."""
    for build in (_schedule, _transformer, _optimizer, _split):
        with _quietly():
            try:
                build(copy.deepcopy(args))
            except UserError:
                raise
            except Exception as error:
                if _for_want_of_a_package(error, args):
                    continue
                raise refusal(error, args) from error
    for rule in _rules(args):
        raise UserError(rule)


def _for_want_of_a_package(error: Exception, args: argparse.Namespace) -> bool:
    """Whether it is this machine that lacks something, where a job for GPUs is planned elsewhere."""
    asked = isinstance(error, ImportError) or re.search(
        r"install|\bTE\b|transformer.engine", str(error), re.I
    )
    return bool(asked) and _plans_transformer_engine(args)


def _plans_transformer_engine(args: argparse.Namespace) -> bool:
    """Whether ranks use Transformer Engine, which this machine has not."""
    return args.transformer_impl == "transformer_engine" and not find_spec("transformer_engine")


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Within the block Megatron's prints, warnings and log lines, which the ranks will show, are dropped."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


# --- what Megatron builds --------------------------------------------------------------------------------


def _schedule(args: argparse.Namespace) -> None:
    """The learning rate's and the weight decay's, over an optimizer without parameters."""
    from megatron.training import training

    if args.skip_train:
        return
    growing = getattr(args, "step_batch_size_schedule", None) or getattr(args, "rampup_batch_size", None)
    if growing and args.train_samples:
        return  # the number of steps comes from a calculator that only ranks have
    with patching.swapped({symbols.GET_ARGS: lambda: args}):
        training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))


def _transformer(args: argparse.Namespace) -> None:
    """The configuration of the model's layers."""
    from megatron.training.arguments import core_transformer_config_from_args

    if getattr(args, "yaml_cfg", None) is None:
        with _assumed_transformer_engine(args):
            core_transformer_config_from_args(args)


def _optimizer(args: argparse.Namespace) -> None:
    from megatron.training import training

    with _assumed_transformer_engine(args):
        training.get_megatron_optimizer_config(args)


def _split(args: argparse.Namespace) -> None:
    """Training, validation and test parts of a data set that is not made up."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    if args.data_path and not args.mock_data:
        shares = parse_and_normalize_split(args.split)
        if not sum(shares) > 0:  # NaN: they were divided by their sum
            raise UserError(f"megatron.split: {args.split!r} must have a share above 0")
        convert_split_vector_to_split_matrix(shares)


@contextlib.contextmanager
def _assumed_transformer_engine(args: argparse.Namespace) -> Iterator[None]:
    """Within the block Transformer Engine counts as there and recent, where ranks elsewhere will have it."""
    if not _plans_transformer_engine(args):
        yield
        return
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils
    from packaging.version import Version

    absent = [
        (module, name)
        for module in (rope_utils, moe_utils)
        for name, value in vars(module).items()
        if name.startswith("fused_") and value is None
    ]
    try:
        for module, name in absent:
            setattr(module, name, NotImplemented)
        with patching.swapped({symbols.TE_VERSION: Version("99.0")}):
            yield
    finally:
        for module, name in absent:
            setattr(module, name, None)


# --- what fails later ------------------------------------------------------------------------------------


def _rules(args: argparse.Namespace) -> Iterator[str]:
    """What the model's layers, the groups of ranks or the first batch would fail at."""
    heads, groups = args.num_attention_heads, args.num_query_groups
    tensor, pipeline, experts = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.num_experts,
    )
    own_attention = not (args.multi_latent_attention or args.heterogeneous_layers_config_path)
    if own_attention and args.group_query_attention and groups and heads % groups:
        yield multiple("num_attention_heads", "num_query_groups")(args)
    rotary = args.position_embedding_type in ("rope", "yarn") and args.rotary_percent == 1
    if own_attention and rotary and args.kv_channels % 2:
        yield (
            f"megatron.kv_channels: {args.kv_channels} (hidden_size / num_attention_heads) must be even for "
            f"position_embedding_type {args.position_embedding_type}"
        )
    if args.swiglu and args.ffn_hidden_size // tensor % 2:
        share = f" / tensor_model_parallel_size {tensor}" if tensor > 1 else ""
        yield f"megatron.ffn_hidden_size: {args.ffn_hidden_size}{share} must be even for swiglu"
    if args.context_parallel_size > 1 and args.transformer_impl == "local":
        yield (
            f"megatron.context_parallel_size: {args.context_parallel_size} needs Transformer Engine's "
            "attention, which transformer_impl local (a run on CPU) has not"
        )
    if experts and args.moe_router_topk > experts:
        yield (
            f"megatron.moe_router_topk: {args.moe_router_topk} must not be above megatron.num_experts, "
            f"{experts}"
        )
    balancing = args.moe_router_load_balancing_type
    if experts and "sinkhorn" in (balancing, *(balancing if isinstance(balancing, list) else [])):
        coefficients = args.moe_aux_loss_coeff
        if any(coefficients if isinstance(coefficients, list) else [coefficients]):
            yield f"megatron.moe_aux_loss_coeff: {coefficients} must be 0 with sinkhorn routing"
    if experts and tensor > 1 and not args.sequence_parallel:
        yield f"megatron.sequence_parallel: must be true with experts and tensor_model_parallel_size {tensor}"
    expert_ranks = (args.expert_tensor_parallel_size or tensor) * args.expert_model_parallel_size * pipeline
    if experts and args.world_size % expert_ranks:
        yield (
            f"launch: {args.world_size} ranks do not divide by expert tensor x expert model x pipeline "
            f"parallel size {expert_ranks}"
        )
    replicas = args.world_size // (tensor * pipeline)
    if replicas % args.num_distributed_optimizer_instances:
        yield (
            f"megatron.num_distributed_optimizer_instances: {args.num_distributed_optimizer_instances} must "
            f"divide the {replicas} data-parallel ranks"
        )
    if args.optimizer == "sgd" and args.use_distributed_optimizer:
        yield "megatron.optimizer: 'sgd' cannot be sharded; use_distributed_optimizer=false or optimizer=adam"
    if "muon" in args.optimizer and args.fp16:
        yield "megatron.optimizer: 'muon' is not for fp16; use megatron.bf16=true"
    if getattr(args, "use_layer_wise_distributed_optimizer", False):
        if not args.bf16:
            yield (
                f"megatron.optimizer: {args.optimizer!r} with use_distributed_optimizer needs "
                "megatron.bf16=true; or use_distributed_optimizer=false"
            )
        if args.num_distributed_optimizer_instances > 1:
            yield (
                f"megatron.num_distributed_optimizer_instances: {args.num_distributed_optimizer_instances} "
                f"must be 1 with optimizer {args.optimizer!r} and use_distributed_optimizer"
            )
    if args.fp16 and args.loss_scale is None and args.initial_loss_scale < args.min_loss_scale:
        yield (
            f"megatron.initial_loss_scale: {args.initial_loss_scale} must not be below "
            f"megatron.min_loss_scale, {args.min_loss_scale}"
        )
    if args.virtual_pipeline_model_parallel_size and not getattr(args, "rampup_batch_size", None):
        batches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
        together = getattr(args, "microbatch_group_size_per_vp_stage", None) or pipeline
        if batches < together:
            yield (
                f"megatron.global_batch_size: {args.global_batch_size} is {batches} micro-batches for each "
                f"data-parallel rank; an interleaved schedule needs {together} or more"
            )
