"""Checks the command line of a training script as its ranks would, and says what would be compressed.

`megatron-loco plan` and the launcher's `--dry-run` use it. Megatron's own parser and validation check the
flags, without a GPU and without the script, whose own flags they do not know.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from megatron_patch import registry
from megatron_patch.errors import UserError, nearest
from megatron_patch.megatron import run_script
from megatron_patch.megatron.arguments import config_from_arguments
from megatron_patch.releases import refuse_old_torch
from megatron_patch.workflows.run import megatron_flags, shell_script
from megatron_patch.workflows.run.job import Launch

_NODE = 8
"""The ranks of a node, where the command line does not say."""
_OF_RECIPES = {
    "--with configs/methods/onebit_adam.yaml": "compression.method=onebit_adam",
    "launch.nproc_per_node * launch.nnodes": "the number of ranks",
    "launch's data-parallel ranks": "data-parallel ranks",
    "set one of them to null": "leave one of them out",
}
"""What messages and advice say of recipes, and of command lines."""


@dataclass(frozen=True)
class CommandLine:
    """A training script and its flags, and the words before it, e.g. torchrun's."""

    name: str
    launcher: list[str]
    script: str
    flags: list[str]
    hint: str = ""
    """What errors end with."""

    def launch(self, nodes: int | None, per_node: int | None) -> Launch:
        """Return how many ranks are started: as given here, as torchrun is told, or one node of 8."""
        torchrun = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        torchrun.add_argument("--nnodes", default="1")
        torchrun.add_argument("--nproc-per-node", "--nproc_per_node", default=str(_NODE))
        told = torchrun.parse_known_args(self.launcher)[0]
        counts = {"--nodes": nodes or told.nnodes, "--gpus-per-node": per_node or told.nproc_per_node}
        for option, count in counts.items():
            if not str(count).isdecimal() or not int(count):
                raise UserError(f"{self.name}: torchrun is told {count}, which is no number; add {option} N")
        return Launch(nnodes=int(counts["--nodes"]), nproc_per_node=int(counts["--gpus-per-node"]))


def of_words(words: Sequence[str]) -> CommandLine:
    """Return the command line of words such as `torchrun --nnodes 2 pretrain_gpt.py --num-layers 32`."""
    place = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    if place is None:
        raise UserError(f"{shlex.join(words[:4])!r} names no training script (*.py) before its flags")
    script = words[place]
    return CommandLine(Path(script).stem, list(words[:place]), script, list(words[place + 1 :]))


def of_script(path: Path, more: Sequence[str] = ()) -> CommandLine:
    """Return the training command in a shell script, with the flags `more` in place of the script's own."""
    try:
        found = list(shell_script.commands(path.read_text(encoding="utf-8", errors="replace")))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    # In srun bash -c "torchrun ... pretrain_gpt.py ..." the command is one word.
    found = [[w for word in words for w in (word.split() if ".py " in word else [word])] for words in found]
    trains = [words for words in found if any(w.endswith(".py") for w in words) and "--num-layers" in words]
    if len(trains) != 1:
        count = f"{len(trains)} training commands" if trains else "no training command"
        raise UserError(
            f"{path}: {count} (a *.py script, --num-layers) can be read; try plan -- pretrain_gpt.py FLAGS"
        )
    command = of_words(trains[0])
    flags, replaced = [], False
    for word in command.flags:
        replaced = word in more if word.startswith("--") else replaced
        flags += [] if replaced else [word]
    hint = " (--nodes N and flags after -- go over the shell script's)"
    return replace(command, name=path.stem, flags=[*flags, *more], hint=hint)


@contextlib.contextmanager
def in_flags(command: CommandLine) -> Iterator[None]:
    """Say errors within the block in flags."""
    try:
        yield
    except UserError as error:
        raise UserError(as_flags(str(error)) + command.hint) from error


def as_flags(text: str) -> str:
    """Return a text with `megatron.lr: ...` or `compression.bits=4` as the flags that a command line has."""
    for of_recipes, words in _OF_RECIPES.items():
        text = text.replace(of_recipes, words)

    def flag(found: re.Match[str]) -> str:
        name, value = found[2].replace("_", "-"), found[3]
        name = f"--compression-{name}" if found[1] == "compression" else f"--{name}"
        if value == "=false":
            return f"without {name}"
        return name if value in (None, "=true") else f"{name} {value[1:]}"

    return re.sub(r"(?<![\w.'])(megatron|compression)\.(\w+)(?![\w.])(=[\w.]+)?", flag, text)


def check(command: CommandLine, world_size: int) -> argparse.Namespace:
    """Return Megatron's validated arguments, in the environment of this process. This imports Megatron."""
    refuse_old_torch()
    if Path(command.script).is_file():  # A checkout of Megatron-LM has its own flags.
        sys.path.insert(0, str(Path(command.script).resolve().parent))
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    parser = megatron_flags.build_parser(run_script.install_cpu(command.flags))
    args, rest = parser.parse_known_args(command.flags)
    if own := [word for word in rest if word.startswith("--") or "$" in word]:
        if ours := next((word for word in own if word.startswith("--compression-")), None):
            raise UserError(f"{ours}: no such flag{nearest(ours, parser._option_string_actions)}")
        print(f"megatron-loco: not checked, no flags of Megatron: {', '.join(own)}", file=sys.stderr)
    for file in args.compression_import:
        registry.import_file(Path(file))
    config_from_arguments(args)
    with contextlib.nullcontext() if args.compression_device == "cpu" else megatron_flags.assumed_gpu():
        stated = {word.lstrip("-").replace("-", "_") for word in command.flags}
        return megatron_flags.checked(args, args.compression_attach, world_size, stated)


def dry_run(words: Sequence[str]) -> int:
    """Check `SCRIPT.py FLAGS` for WORLD_SIZE ranks, print what would be compressed, and return 0."""
    command, ranks = of_words(words), os.environ.get("WORLD_SIZE", str(_NODE))
    if not Path(command.script).is_file():
        raise UserError(f"{command.script}: no such training script")
    if not ranks.isdecimal() or int(ranks) < 1:
        raise UserError(f"WORLD_SIZE: {ranks!r} must be a whole number, 1 or more")
    if os.environ.get("RANK", "0") != "0":
        return 0
    assumed = "" if "WORLD_SIZE" in os.environ else " (WORLD_SIZE=N before the command says another number)"
    print(f"{ranks} ranks{assumed}; nothing is started", flush=True)
    with in_flags(command):
        args = check(command, int(ranks))
        for line in _compressed(args, int(ranks)):
            print(f"megatron-loco: {line}")
    return 0


def _compressed(args: argparse.Namespace, world_size: int) -> Iterator[str]:
    """Yield the start-up log's lines, as far as they are known without the model."""
    import torch
    from megatron.training import global_vars

    from megatron_patch.megatron import startup_log
    from megatron_patch.megatron.seams.traffic import stock_because

    if not args.compression_attach:
        yield "--no-compression-attach: stock Megatron"
        return
    config, instances = config_from_arguments(args), args.num_distributed_optimizer_instances
    whole = getattr(args, "data_parallel_sharding_strategy", None) != "optim_grads_params"
    if instances == 1 and (args.use_torch_fsdp2 or (args.use_megatron_fsdp and not whole)):
        config = config.for_flat_fsdp()
    global_vars.set_args(args)  # The lines on the start read them there.
    try:
        yield from [line for _, line in startup_log.method_lines(config, started=False)]
    finally:
        global_vars.set_args(None)
    kind = "reduce-scatter" if args.use_distributed_optimizer else "all-reduce"
    fsdp, edits = args.use_torch_fsdp2 or args.use_megatron_fsdp, getattr(args, "qk_clip", False)
    config = config.without_turns() if fsdp or (edits and args.overlap_param_gather) else config
    codes = args.use_distributed_optimizer and (config.codes_weights or config.takes_turns)
    weights = SimpleNamespace(dtype=args.params_dtype, device=torch.device(args.compression_device))
    tensor = args.tensor_model_parallel_size
    experts = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or tensor)
    split = {"": tensor, "expert ": experts} if args.num_experts else {"": tensor}
    for name, ranks in split.items():
        group = world_size // (args.pipeline_model_parallel_size * ranks * instances)
        if config.compresses:
            between = f", and between {instances} optimizer instances" if instances > 1 else ""
            single = ", not compressed: the group is a single rank" if group * instances == 1 else ""
            yield f"{name}data parallel {kind} over {group} ranks{between}{single}"
        if codes:
            buckets = SimpleNamespace(
                ddp_config=args,
                intra_distributed_optimizer_instance_group=SimpleNamespace(size=lambda ranks=group: ranks),
                buckets=[SimpleNamespace(param_data=weights)],
            )
            how = startup_log.how_gathered(config, stock_because(buckets, config))
            yield f"weight gather over {group} {name}data parallel ranks, {how}"
    if not args.use_distributed_optimizer:
        yield from [line for _, line in startup_log.weight_lines(config, [])]
