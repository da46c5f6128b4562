"""The --compression-* flags, made from CompressionConfig, beside Megatron's own in Megatron's parser."""

from __future__ import annotations

import argparse
import dataclasses
import functools
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
