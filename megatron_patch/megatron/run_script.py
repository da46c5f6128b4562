"""Runs a Megatron training script with compression, as one rank of a distributed launch.

    torchrun --nproc-per-node 8 -m megatron_patch.launch pretrain_gpt.py <Megatron's flags> \
        --compression-method loco --compression-bits 4

The script is not changed. The --compression-* flags are added to Megatron's own parser; after parsing,
compression is enabled for every DistributedDataParallel that Megatron builds.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import runpy
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from megatron_patch.errors import UserError, in_one_line
from megatron_patch.megatron.arguments import add_compression_arguments
from megatron_patch.releases import refuse_old_torch

USAGE = (
    "torchrun [...] -m megatron_patch.launch [--dry-run] SCRIPT.py [its own flags] [--compression-* flags]"
)
_EXAMPLES = """\
examples:
  torchrun --nproc-per-node 8 -m megatron_patch.launch pretrain_gpt.py FLAGS --compression-bits 4
  WORLD_SIZE=16 python -m megatron_patch.launch --dry-run pretrain_gpt.py FLAGS --compression-bits 4
"""


def _wants_cpu(argv: list[str]) -> bool:
    """Whether argv has --compression-device cpu, which must be known before Megatron is imported."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--compression-device", default="cuda")
    return parser.parse_known_args(argv)[0].compression_device == "cpu"


def main(argv: list[str]) -> int:
    """Run the training script argv[0] with the arguments argv[1:], and return the exit status."""
    if argv[:1] in (["-h"], ["--help"]):
        _parser().print_help()
        return 0
    if not argv or argv[0].startswith("-"):
        print(f"usage: {USAGE} (--help lists them)", file=sys.stderr)
        return 2
    script, flags = argv[0], argv[1:]
    if not Path(script).is_file():
        return _tell(UserError(f"{script}: no such training script"))
    faulthandler.enable()  # A rank that ends by SIGSEGV leaves its stack in its log.
    try:
        _run(script, flags)
    except UserError as error:
        return _tell(error)
    except Exception as error:
        _leave_failure(error, user=False)
        raise
    return 0


def _parser() -> argparse.ArgumentParser:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(usage=USAGE, epilog=_EXAMPLES, formatter_class=style)
    text = "check the flags and say what would be compressed; start nothing"
    parser.add_argument("--dry-run", action="store_true", help=text)
    return add_compression_arguments(parser)


def install_cpu(flags: list[str]) -> dict[str, Any]:
    """Install the stand-ins for CUDA if flags ask for them, and return new defaults of Megatron's flags."""
    if not _wants_cpu(flags):
        return {}
    # Megatron warns of missing GPU packages in twenty lines, on every rank.
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    from megatron_patch.megatron.cpu import device as cpu_device

    if {"--use-torch-fsdp2", "--use-megatron-fsdp"} & set(flags):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # CUDA's default: both refuse 1
    cpu_device.install()
    return cpu_device.CPU_FLAGS


def _run(script: str, flags: list[str]) -> None:
    refuse_old_torch()  # Megatron and what it imports may not even load with one.
    # This precedes Megatron's import, because a script in a checkout of Megatron-LM uses that Megatron.
    sys.path.insert(0, str(Path(script).resolve().parent))
    defaults = install_cpu(flags)
    from megatron_patch import registry
    from megatron_patch.megatron import patching, symbols
    from megatron_patch.megatron.arguments import after_parsing, config_from_arguments
    from megatron_patch.megatron.checkpoint import training_loop as checkpoint
    from megatron_patch.megatron.doors import enable
    from megatron_patch.megatron.metrics import RunMetrics
    from megatron_patch.megatron.unsupported import refuse_flags
    from megatron_patch.session.report import show_log

    show_log()
    installed: list[RunMetrics] = []

    def switch_on(args: argparse.Namespace) -> None:
        if installed:
            return
        for file in args.compression_import:
            registry.import_file(Path(file))
        config = config_from_arguments(args)
        output = Path(args.compression_output) if args.compression_output else None
        if args.compression_attach:
            refuse_flags(args)
            enable(config)
        installed.append(RunMetrics(output))
        installed[0].install()

    checkpoint.install()  # The script has not imported checkpoint functions by name yet.
    patching.replace(symbols.ADD_ARGUMENTS, lambda original: after_parsing(original, switch_on, defaults))
    saved, sys.argv = sys.argv, [script, *flags]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:  # Megatron ends this way after --exit-interval, --exit-duration and SIGTERM
        if end.code:
            raise
    finally:
        sys.argv = saved
        patching.restore(symbols.ADD_ARGUMENTS)
    for metrics in installed:
        metrics.finish()
        metrics.uninstall()


def _tell(error: UserError) -> int:
    _leave_failure(error, user=True)
    if os.environ.get("RANK", "0") == "0":
        print(f"megatron-loco: error: {error}", file=sys.stderr, flush=True)
    return 2


def _leave_failure(error: Exception, user: bool) -> None:
    """Write this rank's error to the folder where the launcher looks for it (workflows/run/launcher.py)."""
    folder = os.environ.get("MEGATRON_LOCO_FAILURES")
    if not folder:
        return
    record = {
        "rank": int(os.environ.get("RANK", "0")),
        "time": time.time(),
        "user": user,
        "error": str(error) if user else in_one_line(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, f"rank-{record['rank']}.json").write_text(json.dumps(record), encoding="utf-8")
