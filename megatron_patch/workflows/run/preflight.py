"""Checks, before any process starts, what Megatron asserts between parsing and the first step.

`check` has Megatron validate the arguments, and build the learning-rate schedule and the configurations of
the transformer and the optimizer as every rank would, but on the CPU, without process groups and in
milliseconds. An error of Megatron's is shown in one line. Rules of our own cover only cases in which Megatron
fails late and names no flag, for example by a division by zero or shapes that do not match.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import linecache
import logging
import re
import traceback
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace

from megatron_patch.errors import UserError, failed_assert
from megatron_patch.megatron import patching, symbols

_AT_LEAST_1 = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "num_distributed_optimizer_instances"),
    *("num_layers", "hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size", "seq_length"),
    *("micro_batch_size", "global_batch_size", "seed", "log_interval", "save_interval"),
)
_EMERGING = ("muon", "dist_muon", "adaptive_muon", "soap", "lion")
"""Optimizers that megatron-core imports from the package emerging-optimizers, which it does not install."""


def check(args: argparse.Namespace, world_size: int) -> None:
    """Validate a job's arguments in place, as each of its ranks would, and check what ranks build later."""
    _check_values(args)
    _check_batch(args, world_size)
    from megatron.training.arguments import validate_args

    args.rank, args.world_size, args.local_rank = 0, world_size, 0
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    with _in_one_line():
        validate_args(args)
    build(args)
    for rule in _rules(args):
        raise UserError(rule)


def build(args: argparse.Namespace) -> None:
    """Build what a rank builds before its first step, from validated `args`, which are not changed."""
    for one in (_schedule, _transformer, _optimizer):
        try:
            with _in_one_line(), _assumed_transformer_engine(args):
                one(copy.deepcopy(args))
        except UserError as error:
            if not _for_want_of_a_package(error.__cause__, args):
                raise


def _check_values(args: argparse.Namespace) -> None:
    for name in _AT_LEAST_1:
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise UserError(f"megatron.{name}: {value} must be 1 or more")
    if args.optimizer in _EMERGING and not find_spec("emerging_optimizers"):
        raise UserError(
            f"megatron.optimizer: {args.optimizer!r} needs a package that is not installed: "
            "pip install emerging-optimizers"
        )
    if args.skip_train:
        return
    if not (args.train_iters or args.train_samples):
        raise UserError(f"megatron.train_iters: {args.train_iters} must be 1 or more")
    if args.lr is None:
        raise UserError("megatron.lr: must be given")
    if args.eval_interval == 0 and not args.full_validation:
        raise UserError("megatron.eval_interval: 0 must be 1 or more; eval_iters=0 leaves evaluation out")


def _check_batch(args: argparse.Namespace, world_size: int) -> None:
    """Check the batch size; Megatron's own error has numbers that the user cannot find in any flag."""
    model_parallel = (
        args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    )
    if world_size % model_parallel:
        raise UserError(
            f"launch: {world_size} ranks do not divide by tensor x pipeline x context parallel size "
            f"{model_parallel}"
        )
    ranks = world_size // model_parallel
    micro, whole = args.micro_batch_size, args.global_batch_size
    if micro and whole and whole % (micro * ranks):
        raise UserError(
            f"megatron.global_batch_size: {whole} must be a multiple of micro_batch_size {micro} x {ranks} "
            "data-parallel ranks"
        )


def _rules(args: argparse.Namespace) -> Iterator[str]:
    """Yield an error for each setting with which a layer would fail late, naming only tensors' shapes."""
    heads, groups = args.num_attention_heads, args.num_query_groups
    own_attention = not (args.multi_latent_attention or args.heterogeneous_layers_config_path)
    if own_attention and args.group_query_attention and groups and heads % groups:
        yield (
            f"megatron.num_attention_heads: {heads} must be a multiple of megatron.num_query_groups, {groups}"
        )
    rotary = args.position_embedding_type in ("rope", "yarn") and args.rotary_percent == 1
    if own_attention and rotary and args.kv_channels % 2:
        yield (
            f"megatron.kv_channels: {args.kv_channels} (hidden_size / num_attention_heads) must be even for "
            f"position_embedding_type {args.position_embedding_type}"
        )
    tensor = args.tensor_model_parallel_size
    if args.swiglu and args.ffn_hidden_size // tensor % 2:
        share = f" / tensor_model_parallel_size {tensor}" if tensor > 1 else ""
        yield f"megatron.ffn_hidden_size: {args.ffn_hidden_size}{share} must be even for swiglu"
    if args.num_experts and args.moe_router_topk > args.num_experts:
        yield (
            f"megatron.moe_router_topk: {args.moe_router_topk} must not be above megatron.num_experts, "
            f"{args.num_experts}"
        )


# --- what Megatron builds, and raises --------------------------------------------------------------------


def _schedule(args: argparse.Namespace) -> None:
    """Build the schedule of learning rate and weight decay, for an optimizer without parameters."""
    from megatron.training import training

    growing = getattr(args, "step_batch_size_schedule", None) or getattr(args, "rampup_batch_size", None)
    if args.skip_train or (growing and args.train_samples):
        return  # Only ranks have the calculator that gives the number of steps of a growing batch.
    with patching.swapped({symbols.GET_ARGS: lambda: args}):
        training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))


def _transformer(args: argparse.Namespace) -> None:
    from megatron.training.arguments import core_transformer_config_from_args

    if getattr(args, "yaml_cfg", None) is None:
        core_transformer_config_from_args(args)


def _optimizer(args: argparse.Namespace) -> None:
    from megatron.training import training

    training.get_megatron_optimizer_config(args)


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    """Within the block, turn Megatron's errors into UserErrors and drop its output, which ranks repeat."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        raise UserError(f"megatron: {_told(error)}") from error
    finally:
        logging.disable(disabled)


def _told(error: Exception) -> str:
    """Describe an error in one line; a bare assert is shown by its condition and the values it names."""
    message = (str(error).strip().splitlines() or [""])[0]
    if message:
        kind = "" if isinstance(error, AssertionError | ValueError) else f"{type(error).__name__}: "
        return kind + message
    condition = failed_assert(error)[1].removeprefix("assert ") if isinstance(error, AssertionError) else ""
    if not condition:
        return type(error).__name__
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    local = trace.tb_frame.f_locals if trace is not None else {}
    fields = sorted(set(re.findall(r"\b(args|self)\.(\w+)", condition)))
    values = ", ".join(f"{name} is {getattr(local.get(owner), name, None)!r}" for owner, name in fields)
    condition = (condition + _where(error)).replace("args.", "").replace("self.", "")
    return f"Megatron requires {condition}" + (f", but {values}" if values else "")


def _for_want_of_a_package(error: BaseException | None, args: argparse.Namespace) -> bool:
    """Whether the error says that this machine lacks a package which the job's machines will have."""
    asked = isinstance(error, ImportError) or re.search(
        r"install|\bTE\b|transformer.engine", str(error), re.I
    )
    return bool(asked) and _plans_transformer_engine(args)


def _plans_transformer_engine(args: argparse.Namespace) -> bool:
    """Whether ranks use Transformer Engine, which is not installed here."""
    return args.transformer_impl == "transformer_engine" and not find_spec("transformer_engine")


@contextlib.contextmanager
def _assumed_transformer_engine(args: argparse.Namespace) -> Iterator[None]:
    """Within the block, have Megatron assume a recent Transformer Engine if the job's ranks use it."""
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


def _where(error: Exception) -> str:
    """Return the condition of the `if` around an assert as words, unless it only compares with None."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno or 0)
    for number in range((last.lineno or 0) - 1, 0, -1):
        above = linecache.getline(last.filename, number)
        if above.strip() and len(above) - len(above.lstrip()) < len(line) - len(line.lstrip()):
            found = re.fullmatch(r"if (.+):", above.strip())
            return f" where {found[1]}" if found and "None" not in found[1] else ""
    return ""
