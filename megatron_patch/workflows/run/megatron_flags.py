"""Turns the `megatron:` section into flags, and checks them by Megatron's parser before a process starts.

The parser is that of a rank: `megatron.training.arguments.add_megatron_arguments` with our flags added. It
checks each value, and preflight.py checks their combination.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError, nearest
from megatron_patch.megatron.arguments import PREFIX, add_compression_arguments
from megatron_patch.megatron.unsupported import refuse_flags
from megatron_patch.workflows.run import preflight
from megatron_patch.workflows.run.configuration import RunConfig

_OURS = PREFIX.replace("-", "_")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # The error is about `--num-layers`, but the key in the file is `num_layers`.
        flag = re.match(r"argument --([\w/-]+): ", message)
        name = flag[1].split("/")[0].replace("-", "_") if flag else ""
        raise UserError(f"megatron.{name}: {message[flag.end() :]}" if flag else f"megatron: {message}")


def build_parser() -> argparse.ArgumentParser:
    """Return Megatron's parser with the --compression-* flags. This imports Megatron."""
    from megatron.training.arguments import add_megatron_arguments

    return add_compression_arguments(add_megatron_arguments(_Parser(allow_abbrev=False)))


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
    args = parser.parse_args(flags)
    if run.attach:
        refuse_flags(args)
    preflight.check(args, run.launch.world_size)
    return args
