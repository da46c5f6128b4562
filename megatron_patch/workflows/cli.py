"""The command line: `megatron-loco COMMAND ...`.

A mistake of the user's is reported by one line on stderr, `megatron-loco: error: ...`, and exit status 2. If
a run fails, the exit status is 1; after Ctrl-C it is 130.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.util
import shlex
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

from megatron_patch import __version__
from megatron_patch.errors import RankFailed, UserError

_COMMANDS = {
    "train": ("train", "run one configuration", ("recipes",)),
    "compare": (
        "compare",
        "run a configuration with several methods and compare them",
        ("recipes", "report"),
    ),
    "ablate": (
        "ablation.command",
        "run a grid of settings over several seeds, and say what the differences are worth",
        ("recipes", "report"),
    ),
    "plan": (
        "plan.command",
        "predict what a recipe gains on a cluster, and say which setting to take",
        ("recipes",),
    ),
    "prepare-data": ("data", "make the data sets on which the recipes train", ("recipes",)),
    "report": ("report.command", "show runs' curves, numbers and differences on one HTML page", ("report",)),
    "doctor": ("doctor", "print what is installed, and what is missing for what", ()),
}
"""For each command, its module in this folder, its summary, and the extras that it needs."""
_IN_A_CLONE = {
    "bench network": "benchmarks.network",
    "bench kernels": "benchmarks.kernels",
    "gpu-report": "benchmarks.gpu",
}
"""Commands that exist only in a clone of the repository, with their modules there."""
EXTRAS = {
    "recipes": ("omegaconf", "rich", "yaml", "scipy", "tokenizers", "tensorboard"),
    "report": ("matplotlib", "scipy", "jinja2", "rich", "yaml"),
}
"""The modules, beside torch, megatron-core and numpy, that commands import from pyproject.toml's extras."""


_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE)
"""Errors of the user's disks, which name no file; others that name none are bugs here."""


class Parser(argparse.ArgumentParser):
    """A parser that raises UserError where argparse would print the usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands; only the chosen command's module is imported and adds arguments."""
    parser = Parser(
        prog="megatron-loco",
        description="Low-bit gradient communication for Megatron pretraining.",
        epilog="megatron-loco COMMAND --help shows a command's options.",
    )
    parser.add_argument("--version", action="version", version=f"megatron-loco {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module_name, summary, extras) in _COMMANDS.items():
        if name != chosen:
            commands.add_parser(name, help=summary)
            continue
        _check_extras(name, extras)
        module = importlib.import_module(f"{__package__}.{module_name}")
        command = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _check_extras(command: str, extras: tuple[str, ...]) -> None:
    missing = {
        extra: [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None] for extra in extras
    }
    if lacking := [extra for extra, names in missing.items() if names]:
        names = dict.fromkeys(name for extra in lacking for name in missing[extra])
        raise UserError(
            f"{command} needs {', '.join(names)}: pip install 'megatron-loco[{','.join(lacking)}]'"
        )


def _run(argv: list[str]) -> int:
    line = shlex.join(argv) + " "
    for command, module in _IN_A_CLONE.items():
        if line.startswith(f"{command} "):
            way = line.replace(command, f"python -m {module}", 1).rstrip()
            raise UserError(f"{command} runs from a clone of the repository only; at its root: {way}")
    chosen = next((word for word in argv if not word.startswith("-")), None)
    parser = build_parser(chosen)
    cut = argv.index("--") if chosen == "plan" and "--" in argv else len(argv)  # A command line follows.
    args, rest = parser.parse_known_args(argv[:cut])
    args.command_line = argv[cut + 1 :]
    # Overrides may stand anywhere, even after an option; argparse accepts positionals only in one sequence.
    if not hasattr(args, "overrides") or any(item.startswith("-") or "=" not in item for item in rest):
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
    else:
        args.overrides += rest
    return int(args.run(args))


def main(argv: list[str] | None = None) -> int:
    """Run the command in `argv` (sys.argv by default), and return the exit status."""
    return guarded(lambda: _run(sys.argv[1:] if argv is None else argv))


def guarded(command: Callable[[], int]) -> int:
    """Run a command, print its errors as one line on stderr, and return the exit status."""
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    # Megatron's sources cause these when they are compiled, which some installers leave to the first import.
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=r".*[/\\]megatron[/\\]")
    try:
        return command()
    except UserError as error:
        print(f"megatron-loco: error: {error}", file=sys.stderr)
        return 2
    except RankFailed as error:
        print(f"megatron-loco: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("megatron-loco: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1
    except OSError as error:
        if error.filename is None and error.errno not in _DISK_ERRORS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"megatron-loco: error: {where}{error.strerror}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
