"""The --compression-* flags, made from CompressionConfig, and access to the parsed flags of Megatron.

Only Megatron's own training loop has parsed flags; in other loops they are not known.
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
    """Add one flag per field of CompressionConfig, and the flags `attach`, `device`, `output`, `import`."""
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
    group.add_argument(
        "--compression-import",
        action="append",
        default=[],
        metavar="FILE.py",
        help="a file that registers your codec or exchange; may be repeated",
    )
    return parser


def config_from_arguments(args: argparse.Namespace) -> CompressionConfig:
    """Return the CompressionConfig of the parsed flags.

    Raises:
        UserError: a value is not allowed; the message names the field.
    """
    names = [option.name for option in dataclasses.fields(CompressionConfig)]
    options = {name: getattr(args, PREFIX + name) for name in names}
    return CompressionConfig.for_megatron(vars(args), **options)


def after_parsing(
    add_arguments: Callable[[argparse.ArgumentParser], argparse.ArgumentParser],
    then: Callable[[argparse.Namespace], None],
    defaults: Mapping[str, Any],
) -> Callable[[argparse.ArgumentParser], argparse.ArgumentParser]:
    """Wrap Megatron's `add_megatron_arguments`: add the --compression-* flags and call `then` after parsing.

    `defaults` gives new defaults to flags of Megatron, by their names without dashes; names that this
    release does not have are ignored. The parser itself calls `then`, because the function that parses
    differs between releases, while every script builds its parser with add_megatron_arguments.
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
    """Escape help texts with a lone `%`, on which `--help` raises: Megatron 0.18 and 0.19 have one."""
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

    # CompressionConfig checks the value; here the text is only converted to a number where it is one.
    return str if option.type == "str" else number_or_text


_STEPS_LOOKED_AHEAD = 1_000_000


def all_flags() -> Mapping[str, Any]:
    """Return Megatron's parsed flags by name; empty in a job that does not run Megatron's training loop.

    `megatron.training.get_args` would raise in such a job, and importing it takes seconds.
    """
    variables = sys.modules.get("megatron.training.global_vars")
    flags = getattr(variables, "_GLOBAL_ARGS", None)
    return {} if flags is None else vars(flags)


def megatron_flag(name: str) -> Any:
    """Return the value of one of Megatron's flags; None if it is not known."""
    return all_flags().get(name)


def lr_warmup_steps() -> int:
    """Return the optimizer steps of the learning rate's warm-up that the flags ask for; 0 without one.

    Megatron's scheduler counts samples. A copy of its calculator of microbatches, which follows ramp-ups and
    schedules of the batch size, says how many samples each step of the warm-up has.
    """
    samples = _lr_warmup_samples()
    module = sys.modules.get("megatron.core.num_microbatches_calculator")
    calculator = copy.copy(getattr(module, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None))
    if calculator is None:  # Megatron is not initialized yet.
        return math.ceil(round(samples / (_number("global_batch_size") or math.inf), 6))
    consumed = steps = 0
    while consumed < samples and steps < _STEPS_LOOKED_AHEAD:
        calculator.update(consumed, False)
        consumed += calculator.get_current_running_global_batch_size()
        steps += 1
    return steps


def _lr_warmup_samples() -> float:
    """Count the warm-up's samples as Megatron's get_optimizer_param_scheduler does."""
    fraction, batch = _number("lr_warmup_fraction"), _number("global_batch_size")
    decay = batch * (_number("lr_decay_iters") or _number("train_iters"))
    decay = decay or _number("lr_decay_samples") or _number("train_samples")
    samples = fraction * decay or batch * _number("lr_warmup_iters") or _number("lr_warmup_samples")
    return round(samples, 6)


def _number(name: str) -> float:
    """Return a flag that is a positive number; 0 if it is not given."""
    value = megatron_flag(name)
    known = isinstance(value, int | float) and math.isfinite(value) and value > 0
    return float(value) if known and value is not None else 0.0
