"""Flags: the --compression-* ones, made from CompressionConfig, and those of Megatron's own training loop.

Other loops have none of the latter.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from megatron_patch.config import CompressionConfig

PREFIX = "compression_"


def add_compression_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add one flag per field of CompressionConfig, and the launch flags `attach`, `device` and `output`."""
    group = parser.add_argument_group("compression", "low-bit gradient communication (megatron-loco)")
    for option in dataclasses.fields(CompressionConfig):
        flag, help = "--" + (PREFIX + option.name).replace("_", "-"), option.metadata["help"]
        if isinstance(option.default, bool):
            switch = argparse.BooleanOptionalAction
            group.add_argument(flag, default=option.default, action=switch, help=help.replace("%", "%%"))
            continue
        choices = option.metadata["choices"]
        shown = f" ({', '.join(map(str, choices))})" if choices else ""
        default = "" if option.default is None else f"; default {option.default}"
        group.add_argument(
            flag,
            default=option.default,
            type=_parser_of(option),
            metavar=option.name.upper(),
            help=f"{help}{shown}{default}".replace("%", "%%"),
        )
    group.add_argument(
        "--no-compression-attach",
        dest="compression_attach",
        action="store_false",
        help="stock Megatron: the gradient exchange is not touched at all",
    )
    group.add_argument(
        "--compression-device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: run Megatron on CPU over gloo, for trials without GPUs",
    )
    group.add_argument(
        "--compression-output", metavar="DIR", help="write metrics.jsonl and summary.json into this folder"
    )
    return parser


def config_from_arguments(args: argparse.Namespace) -> CompressionConfig:
    """The CompressionConfig that the parsed flags ask for.

    Raises:
        UserError: an impossible value, naming the field.
    """
    names = [option.name for option in dataclasses.fields(CompressionConfig)]
    options = {name: getattr(args, PREFIX + name) for name in names}
    return CompressionConfig.for_megatron(vars(args), **options)


def after_parsing(
    add_arguments: Callable[[argparse.ArgumentParser], argparse.ArgumentParser],
    then: Callable[[argparse.Namespace], None],
    defaults: Mapping[str, Any],
) -> Callable[[argparse.ArgumentParser], argparse.ArgumentParser]:
    """Wrap Megatron's `add_megatron_arguments`: our flags are added, and `then` sees what was parsed.

    `defaults` are flags of Megatron that are set where the command line does not say otherwise, by their
    names without dashes; one that this release does not have is left out.
    Scripts import the function that parses by name and at different times from release to release; every
    one of them builds its parser with add_megatron_arguments, so the parser itself carries the hook.
    """

    @functools.wraps(add_arguments)
    def wrapped(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_compression_arguments(_with_printable_help(add_arguments(parser)))
        for option, value in defaults.items():
            action = parser._option_string_actions.get("--" + option.replace("_", "-"))
            if action is not None:
                parser.set_defaults(**{action.dest: action.const if action.nargs == 0 else value})
        parse = parser.parse_known_args

        def parse_known_args(*args: Any, **kwargs: Any) -> Any:
            namespace, rest = parse(*args, **kwargs)
            then(namespace)
            return namespace, rest

        parser.parse_known_args = parse_known_args  # type: ignore[method-assign]
        return parser

    return wrapped


def _with_printable_help(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Mend help texts with a lone `%`, on which `--help` raises: Megatron's 0.18 and 0.19 have one."""
    formatter = parser._get_formatter()
    for action in filter(lambda action: action.help, parser._actions):
        try:
            formatter._expand_help(action)
        except ValueError:
            action.help = str(action.help).replace("%", "%%")
    return parser


def _parser_of(option: dataclasses.Field[Any]) -> Callable[[str], Any]:
    def number_or_text(text: str) -> Any:
        for convert in (int, float):
            try:
                return convert(text)
            except ValueError:
                continue
        return text

    # The config itself says what is allowed; here a text only becomes the value that it spells.
    return str if option.type == "str" else number_or_text


_STEPS_LOOKED_AHEAD = 1_000_000


def all_flags() -> Mapping[str, Any]:
    """Megatron's parsed flags by name; empty in a job of another loop.

    `megatron.training.get_args` would raise there, and importing it costs seconds.
    """
    variables = sys.modules.get("megatron.training.global_vars")
    flags = getattr(variables, "_GLOBAL_ARGS", None)
    return {} if flags is None else vars(flags)


def megatron_flag(name: str) -> Any:
    """One flag; None where it is not known."""
    return all_flags().get(name)


def lr_warmup_steps() -> int:
    """Optimizer steps of the learning rate's warm-up, as the flags of this job say; 0 without one.

    Megatron's scheduler counts samples. Its calculator of microbatches knows how many each step has, with
    batch ramp-ups and schedules of batch sizes: a copy of it is stepped through the warm-up.
    """
    samples = _lr_warmup_samples(all_flags())
    module = sys.modules.get("megatron.core.num_microbatches_calculator")
    calculator = copy.copy(getattr(module, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None))
    if calculator is None:  # before Megatron's initialization
        return math.ceil(round(samples / (_number("global_batch_size") or math.inf), 6))
    consumed = steps = 0
    while consumed < samples and steps < _STEPS_LOOKED_AHEAD:
        calculator.update(consumed, False)
        consumed += calculator.get_current_running_global_batch_size()
        steps += 1
    return steps


def _lr_warmup_samples(flags: Mapping[str, Any]) -> float:
    """As Megatron's get_optimizer_param_scheduler counts them."""
    fraction, batch = _number("lr_warmup_fraction"), _number("global_batch_size")
    decay = batch * (_number("lr_decay_iters") or _number("train_iters"))
    decay = decay or _number("lr_decay_samples") or _number("train_samples")
    samples = fraction * decay or batch * _number("lr_warmup_iters") or _number("lr_warmup_samples")
    return round(samples, 6)


def _number(name: str) -> float:
    """A positive flag; 0 where it is not given."""
    value = megatron_flag(name)
    known = isinstance(value, int | float) and math.isfinite(value) and value > 0
    return float(value) if known and value is not None else 0.0
