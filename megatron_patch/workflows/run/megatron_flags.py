"""Turns the `megatron:` section into flags, which Megatron checks before a process starts.

The parser is that of a rank: `megatron.training.arguments.add_megatron_arguments` with our flags added. It
checks each value, and Megatron's `validate_args` their combination. Rules of our own are only for what these
do not refuse, and what would then end a job late, or without a word of a flag: by a division by zero, or by
shapes that do not match.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import math
import re
import warnings
from collections.abc import Container, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError, in_one_line, nearest
from megatron_patch.megatron import patching
from megatron_patch.megatron.arguments import PREFIX, after_parsing
from megatron_patch.megatron.unsupported import refuse_flags

if TYPE_CHECKING:
    from megatron_patch.workflows.run.configuration import RunConfig

_OURS = PREFIX.replace("-", "_")
_OF_OURS = {
    "eval_global_batch_size": "megatron.global_batch_size",
    "eval_micro_batch_size": "megatron.micro_batch_size",
    "data_parallel_size": "launch's data-parallel ranks",
    "world size": "launch.nproc_per_node * launch.nnodes",
    "total_model_size (total_model_size=": "tensor * pipeline * context parallel sizes (",
}
"""The keys to which Megatron's messages refer by the names of quantities that it computes from them."""
_AT_LEAST_1 = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "num_distributed_optimizer_instances"),
    *("num_layers", "hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size", "seq_length"),
    *("log_interval", "save_interval"),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # The error is about `--num-layers`, but the key in the file is `num_layers`.
        flag = re.match(r"argument --([\w/-]+): ", message)
        name = flag[1].split("/")[0].replace("-", "_") if flag else ""
        raise UserError(f"megatron.{name}: {message[flag.end() :]}" if flag else f"megatron: {message}")


def build_parser(defaults: Mapping[str, Any] | None = None) -> argparse.ArgumentParser:
    """Return Megatron's parser with the --compression-* flags; `defaults` as in `after_parsing`.

    This imports Megatron.
    """
    from megatron.training.arguments import add_megatron_arguments

    add = after_parsing(add_megatron_arguments, lambda args: None, defaults or {})
    return add(_Parser(allow_abbrev=False))


@contextlib.contextmanager
def assumed_gpu() -> Iterator[None]:
    """Within the block, Megatron's validation sees the compute capability of Hopper if there is no GPU here.

    If there is one, the run is checked for that GPU.
    """
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability() > (0, 0):  # (0, 0) is cpu_device's
        yield
        return
    hopper = {
        "torch.cuda:get_device_capability": lambda device=None: (9, 0),
        "torch.cuda:get_device_properties": lambda device=None: SimpleNamespace(major=9, minor=0),
    }
    with patching.swapped(hopper):
        yield


def flags_of(section: Mapping[str, Any], parser: argparse.ArgumentParser) -> list[str]:
    """Turn `{num_layers: 4, swiglu: true}` into `["--num-layers", "4", "--swiglu"]`.

    The value `null` leaves a flag out, and so does `false` if the flag is a switch.
    """
    options = {option: action for action in parser._actions for option in action.option_strings}
    flags: list[str] = []
    for key, value in section.items():
        option = next((o for o in ("--" + key.replace("_", "-"), "--" + key) if o in options), None)
        if key.replace("-", "_").startswith(_OURS):
            name = key.replace("-", "_").removeprefix(_OURS)
            raise UserError(f"megatron.{key}: what is compressed is said by the section compression.{name}")
        if option is None or options[option].dest == "help":
            names = [o.removeprefix("--").replace("-", "_") for o in options]
            raise UserError(f"megatron.{key}: no such flag of Megatron{nearest(key, names)}")
        if value is not None:
            flags += _flag(key, value, option, options[option])
    return flags


def _flag(key: str, value: Any, option: str, action: argparse.Action) -> list[str]:
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UserError(f"megatron.{key}: {value!r} must be true or false")
        negated = "--no-" + option.removeprefix("--")
        return [option] if value else [negated] if negated in action.option_strings else []
    values = value if isinstance(value, list) else [value]
    for item in values:
        if isinstance(item, bool | dict) or item != item or item in (math.inf, -math.inf):
            raise UserError(f"megatron.{key}: {item!r} must be a finite number, or text")
    return [option, *map(str, values)]


def compression_flags(config: CompressionConfig, attach: bool) -> list[str]:
    """Return the --compression-* flags of a configuration."""
    flags = [] if attach else ["--no-compression-attach"]
    for name, value in config.as_dict().items():
        flag = (PREFIX + name).replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def check(run: RunConfig, flags: list[str], parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse `flags` as a rank would, refuse what cannot run, and return Megatron's validated arguments."""
    return checked(parser.parse_args(flags), run.attach, run.launch.world_size, run.megatron)


def checked(
    args: argparse.Namespace, attach: bool, world_size: int, stated: Container[str]
) -> argparse.Namespace:
    """Refuse parsed arguments with which a job of that many ranks cannot run, and validate them in place.

    `stated` are the names of those that the user gave.
    """
    if attach:
        refuse_flags(args)
    for name in _AT_LEAST_1:
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise UserError(f"megatron.{name}: {value} must be 1 or more")
    if not args.skip_train:
        _check_training(args)
    _validate(args, world_size, stated)
    for rule in _rules(args):
        raise UserError(rule)
    return args


def _check_training(args: argparse.Namespace) -> None:
    if not (args.train_iters or args.train_samples):
        raise UserError(f"megatron.train_iters: {args.train_iters} must be 1 or more")
    unit, other = ("iters", "samples") if args.train_iters else ("samples", "iters")
    for name in ("train", "lr_decay", "lr_warmup"):
        if value := getattr(args, f"{name}_{other}"):
            raise UserError(
                f"megatron.{name}_{other}: {value} cannot be combined with megatron.train_{unit}; set one of "
                "them to null"
            )
    if args.lr is None:
        raise UserError("megatron.lr: must be given")
    if args.eval_interval == 0 and not args.full_validation:
        raise UserError("megatron.eval_interval: 0 must be 1 or more; eval_iters=0 leaves evaluation out")


def _validate(args: argparse.Namespace, world_size: int, stated: Container[str]) -> None:
    """Have Megatron validate the arguments in place, as a rank's, without its output, which ranks repeat."""
    from megatron.training.arguments import validate_args

    args.rank, args.world_size, args.local_rank = 0, world_size, 0
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            validate_args(args)
    except Exception as error:
        message = in_one_line(error)
        for name, keys in _OF_OURS.items():
            if name not in stated:
                message = re.sub(rf"(?<![\w.]){re.escape(name)}", keys, message)
        raise UserError(f"megatron: {message}") from error
    finally:
        logging.disable(disabled)


def _rules(args: argparse.Namespace) -> Iterator[str]:
    """Yield an error for each setting with which a rank would fail late, naming no flag."""
    unit = "iters" if args.train_iters else "samples"
    end = f"lr_decay_{unit}" if getattr(args, f"lr_decay_{unit}") else f"train_{unit}"
    warmup, length = getattr(args, f"lr_warmup_{unit}"), getattr(args, end)
    if warmup and length and warmup >= length:
        yield f"megatron.lr_warmup_{unit}: {warmup} must be below megatron.{end}, {length}"
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
