"""Runs Megatron's engine a few times in one process that imports it once; called by test_engine.py.

    python engine_runs.py FOLDER

Each run forks two ranks that train the same tiny LLaMA for a few steps. `stock` is Megatron's engine
without megatron_patch (but for what stands in for CUDA); the others go through megatron_patch.launch.
"""

from __future__ import annotations

import importlib
import os
import runpy
import socket
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "pretrain_scripts" / "pretrain_gpt.py")
RANKS = 2
STEPS = 6

MODEL = [
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "2"),
    *("--global-batch-size", "8", "--lr", "1e-3", "--train-iters", str(STEPS), "--eval-iters", "1"),
    *("--eval-interval", "100", "--log-interval", "1", "--num-workers", "0", "--split", "90,10,0"),
    *("--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"),
    *("--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--use-distributed-optimizer"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "257", "--mock-data"),
]
OVERLAP = ["--overlap-grad-reduce", "--ddp-bucket-size", "30000"]
BF16 = ["--bf16"]


def cpu_flags() -> list[str]:
    from megatron_patch.integration.cpu_device import CPU_FLAGS

    flags = []
    for key, value in CPU_FLAGS.items():
        flags += ["--" + key.replace("_", "-")] + ([] if value is True else [str(value)])
    return flags


RUNS: dict[str, tuple[bool, list[str]]] = {
    "stock": (False, []),
    "none": (True, ["--compression-method", "none"]),
    "stock-overlap": (False, OVERLAP),
    "none-overlap": (True, [*OVERLAP, "--compression-method", "none"]),
    "stock-bf16": (False, BF16),
    "none-bf16": (True, [*BF16, "--compression-method", "none"]),
    "unattached": (True, ["--no-compression-attach"]),
    "loco": (True, ["--compression-bits", "4"]),
    "loco-again": (True, ["--compression-bits", "4"]),
    "loco-overlap": (True, [*OVERLAP, "--compression-bits", "4"]),
    "loco-late": (True, ["--compression-start-step", "100"]),
    "raises": (True, ["--train-iters", "nonsense"]),
}


def rank_main(name: str, rank: int, port: int, folder: Path) -> int:
    through_launch, flags = RUNS[name]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch

    torch.set_num_threads(1)
    argv = [*MODEL, *cpu_flags(), *flags, "--tensorboard-dir", str(folder / "tensorboard")]
    if through_launch:
        from megatron_patch.integration.launch import main

        ours = ["--compression-device", "cpu", "--compression-output", str(folder)]
        status = main([SCRIPT, *argv, *ours])
    else:
        sys.argv = [SCRIPT, *argv]
        runpy.run_path(SCRIPT, run_name="__main__")
        status = 0
    from megatron.training.global_vars import get_tensorboard_writer

    if writer := get_tensorboard_writer():
        writer.flush()
    return status


def run(name: str, out: Path) -> None:
    folder = out / name
    folder.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
                os.dup2(log, 1)
                os.dup2(log, 2)
                status = rank_main(name, rank, port, folder)
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    (folder / "exit").write_text(" ".join(map(str, codes)))


if __name__ == "__main__":
    from megatron_patch.integration import cpu_device

    cpu_device.install()
    for module in ("megatron.training.argument_utils", "torch.utils.tensorboard"):
        importlib.import_module(module)  # once, before the ranks are forked

    for each in RUNS:
        run(each, Path(sys.argv[1]))
