"""Runs `python -m benchmarks.NAME`: parses the options, runs the command, and reports errors in one line."""

from __future__ import annotations

import argparse
from types import ModuleType

from megatron_patch.workflows.cli import Parser, guarded


def main(command: ModuleType, argv: list[str] | None = None) -> int:
    """Run a module's `run` with the options of its `add_arguments`, and return the exit status.

    Args:
        command: the module, whose docstring is the text of --help.
        argv: the options; None takes those of this process.
    """

    def run() -> int:
        parser = Parser(
            prog=f"python -m {command.__package__}",
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(parser)
        return int(command.run(parser.parse_args(argv)))

    return guarded(run)
