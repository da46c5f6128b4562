"""Runs Megatron's engine a few times from one process that has imported it; a test calls `engine`.

Each run forks its ranks, which train a tiny LLaMA or MoE for a few steps. `stock` is Megatron's engine
without megatron_patch (but for what stands in for CUDA); the others go through megatron_patch.launch.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import runpy
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from worker_pool import in_warm_process

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "pretrain_scripts" / "pretrain_gpt.py")
RANKS = 2
MOST_RANKS = 4
STEPS = 6

MODEL = [
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "2"),
    *("--global-batch-size", "8", "--lr", "1e-3", "--train-iters", str(STEPS), "--eval-iters", "1"),
    *("--eval-interval", "100", "--log-interval", "1", "--num-workers", "0", "--split", "90,10,0"),
    *("--swiglu", "--disable-bias-linear"),
    *("--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--use-distributed-optimizer"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "257", "--mock-data"),
]
UNTIED = ["--untie-embeddings-and-output-weights"]
OVERLAP = [*UNTIED, "--overlap-grad-reduce", "--ddp-bucket-size", "30000"]
BF16 = [*OVERLAP, "--bf16"]
# Every parallelism leaves two ranks that hold the same parameters: otherwise nothing is exchanged.
EXPERTS = [
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "64"),
    *("--moe-aux-loss-coeff", "0.01", "--moe-token-dispatcher-type", "alltoall"),
    *("--expert-model-parallel-size", "2", *UNTIED),
]
PARALLEL = [  # embeddings and output weights are tied, over two pipeline stages
    *("--tensor-model-parallel-size", "2", "--sequence-parallel", "--pipeline-model-parallel-size", "2")
]


def cpu_flags() -> list[str]:
    from megatron_patch.megatron.cpu.device import CPU_FLAGS

    flags = []
    for key, value in CPU_FLAGS.items():
        flags += ["--" + key.replace("_", "-")] + ([] if value is True else [str(value)])
    return flags


@dataclass(frozen=True)
class Run:
    """Flags over MODEL, the ones of ours (None: stock Megatron, without us), and the number of ranks.

    `{out}` in a flag stands for the folder above all runs' folders.
    """

    flags: list[str] = field(default_factory=lambda: UNTIED)
    ours: list[str] | None = None
    ranks: int = RANKS
    without: tuple[str, ...] = ()
    """Switches of MODEL to leave out."""
    after: str | None = None
    """The run that has to end first."""
    door: str | None = None
    """The way in of a script of the user's, which is not run by `launch`: a name in DOORS."""
    repair: str | None = None
    """What of Megatron's is repaired for the run: a name in REPAIRS."""


NONE, LOCO = (
    ["--compression-method", "none"],
    ["--compression-method", "loco", "--compression-bits", "4", "--compression-start-step", "0"],
)
RUNS: dict[str, Run] = {
    "stock": Run(),
    "stock-bf16": Run(BF16),
    "none-bf16": Run(BF16, NONE),
    "unattached": Run(ours=["--no-compression-attach"]),
    "loco": Run([*UNTIED, "--log-memory-to-tensorboard"], LOCO),
    "own-codec": Run(
        ours=[
            *("--compression-import", str(ROOT / "pretrain_scripts" / "own_codec.py")),
            *("--compression-codec", "fp8", "--compression-start-step", "0"),
        ]
    ),
    "loco-late": Run(ours=["--compression-start-step", "100"]),
    "stock-experts": Run(EXPERTS, ranks=4),
    "none-experts": Run(EXPERTS, NONE, ranks=4),
    "loco-experts": Run(EXPERTS, LOCO, ranks=4),
    "stock-parallel": Run(PARALLEL, ranks=8),
    "none-parallel": Run(PARALLEL, NONE, ranks=8),
    "loco-parallel": Run(PARALLEL, LOCO, ranks=8),
    "raises": Run(ours=["--train-iters", "nonsense"]),
    "refused": Run([*UNTIED, "--optimizer", "lion"], LOCO),
}


def engine(folder: Path, runs: dict[str, Run] | None = None) -> Path:
    """Run all of `runs` (RUNS by default), a folder for each; returns `folder`."""
    if "EXPECTED_MEGATRON_CORE" in os.environ:
        pytest.skip("the engine's script is written for the locked release of megatron-core")
    chosen = runs or RUNS
    in_warm_process(run_all, chosen, folder, log=folder / "engine.log", timeout=100 + 40 * len(chosen))
    return folder


def prepare() -> None:
    """Once, before the ranks are forked: what takes each of them a second, and is the same in all."""
    for module in (
        "megatron.training.argument_utils",
        "megatron.core.tokenizers.text",  # imports transformers
        "megatron_patch.megatron.checkpoint.training_loop",
        "megatron_patch.megatron.run_script",
        "torch.utils.tensorboard",
    ):
        importlib.import_module(module)
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
    from megatron.training import argument_utils, arguments

    MockGPTLowLevelDataset.size = 2000  # of 100,000 documents, six million samples to shuffle
    factory = argument_utils.ArgumentGroupFactory
    read = factory._get_field_docstrings  # parses the source of each configuration class
    docstrings = functools.cache(lambda cls: read(factory.__new__(factory), cls))
    factory._get_field_docstrings = lambda self, cls: dict(docstrings(cls))
    arguments.add_megatron_arguments(argparse.ArgumentParser())


def rank_main(asked: Run, folder: Path) -> int:
    import torch

    torch.set_num_threads(1)
    if {"--use-torch-fsdp2", "--use-megatron-fsdp"} & set(asked.flags):
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"  # both refuse 1, which the warm process has set
    flags = [flag.replace("{out}", str(folder.parent)) for flag in asked.flags]
    model = [flag for flag in MODEL if flag not in asked.without]
    argv = [*model, *flags, "--tensorboard-dir", str(folder / "tensorboard")]
    if asked.repair is not None:
        REPAIRS[asked.repair]()
    if asked.ours is not None:
        from megatron_patch.megatron.run_script import main

        ours = ["--compression-device", "cpu", "--compression-output", str(folder)]  # it sets the cpu_flags
        status = main([SCRIPT, *argv, *asked.ours, *ours])
    else:
        if asked.door is not None:
            DOORS[asked.door]()
        sys.argv = [SCRIPT, *argv, *cpu_flags()]
        runpy.run_path(SCRIPT, run_name="__main__")
        status = 0
    from megatron.training.global_vars import get_tensorboard_writer

    if writer := get_tensorboard_writer():
        writer.flush()
    return status


OPTIONS = {"bits": 2, "weight_gather": "exact"}
"""The options that all doors get; all else is each door's default."""


def _by_enable() -> None:
    import megatron_patch

    megatron_patch.enable(megatron_patch.CompressionConfig(**OPTIONS))


def _by_attach() -> None:
    """A script that attaches what Megatron's set-up returns."""
    from megatron.training import training

    import megatron_patch

    original = training.setup_model_and_optimizer

    def set_up(*args: Any, **kwargs: Any) -> Any:
        model, *rest = original(*args, **kwargs)
        return megatron_patch.attach(model, megatron_patch.CompressionConfig(**OPTIONS)), *rest

    training.setup_model_and_optimizer = set_up


def _by_hook() -> None:
    """A script whose model configuration has the hook."""
    from megatron.training import argument_utils

    import megatron_patch

    original = argument_utils.gpt_config_from_args
    hook = functools.partial(megatron_patch.attach, config=megatron_patch.CompressionConfig(**OPTIONS))

    def configuration(*args: Any, **kwargs: Any) -> Any:
        config = original(*args, **kwargs)
        config.post_wrap_hooks.append(hook)
        return config

    argument_utils.gpt_config_from_args = configuration


def _with_loading() -> None:
    """megatron-core 0.19.2 loads no torch_dcp checkpoint: a chain's state_dict refuses its loader's flag."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    state_dict = ChainedOptimizer.state_dict
    ChainedOptimizer.state_dict = lambda self, is_loading=False: state_dict(self)


DOORS = {"enable": _by_enable, "attach": _by_attach, "hook": _by_hook}
REPAIRS = {"loading of torch_dcp": _with_loading}


def start(asked: Run, folder: Path) -> dict[int, int]:
    """Fork the ranks of a run; their process ids, and ranks."""
    return fork_ranks(asked.ranks, folder, functools.partial(rank_main, asked, folder=folder))


def fork_ranks(count: int, folder: Path, main: Callable[[], int]) -> dict[int, int]:
    """Fork ranks that call `main` with torchrun's variables; their process ids, and ranks."""
    folder.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = {}
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for name in ("RANK", "LOCAL_RANK"):
                    os.environ[name] = str(rank)
                for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                    os.environ[name] = str(count)
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
                os.dup2(log, 1)
                os.dup2(log, 2)
                status = main()
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        pids[pid] = rank
    return pids


def run_all(asked: dict[str, Run], out: Path) -> None:
    """All runs, a few ranks at a time: while one run waits for the other's rank, another one computes."""
    prepare()
    waiting = dict(asked)
    running: dict[int, str] = {}
    ranks: dict[int, int] = {}
    codes: dict[str, dict[int, int]] = {}
    while waiting or running:
        for name, each in list(waiting.items()):
            ready = each.after is None or (each.after in codes and each.after not in running.values())
            if ready and (not running or len(running) + each.ranks <= MOST_RANKS):
                codes[name] = {}
                running |= dict.fromkeys(pids := start(waiting.pop(name), out / name), name)
                ranks |= pids
        pid, status = os.wait()
        name = running.pop(pid)
        codes[name][ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
        if name not in running.values():
            (out / name / "exit").write_text(" ".join(str(code) for _, code in sorted(codes[name].items())))
