"""A training script's command line: `plan -- pretrain_gpt.py FLAGS`, `plan script.sh`, `launch --dry-run`."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_patch.errors import UserError
from megatron_patch.megatron.arguments import all_flags
from megatron_patch.workflows.cli import guarded, main
from megatron_patch.workflows.run import command_line
from megatron_patch.workflows.run.configuration import shipped

FLAGS = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 1 --global-batch-size 32 --train-iters 100 --lr 1e-4 --lr-warmup-iters 10 --bf16 "
    "--use-distributed-optimizer --vocab-size 1000"
)
SCRIPT = f"""
GPUS=4
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS --nnodes ${{NUM_NODES:-2}} --node_rank $NODE_RANK)
MODEL_ARGS=({FLAGS} # a comment
)
torchrun ${{DISTRIBUTED_ARGS[@]}} \\
    pretrain_gpt.py ${{MODEL_ARGS[@]}} --load $1
"""
START = (
    "compression starts when the learning rate has stopped rising: expected at step 13, by Megatron's flags"
)
OURS = str(shipped("pretrain_scripts/pretrain_gpt.py"))


def planned(arguments: list[str], folder: Path) -> dict[str, Any]:
    out = folder / "plan.json"
    assert main(["plan", "--json", str(out), *arguments]) == 0
    return json.loads(out.read_text(encoding="utf-8"))


def test_a_command_line_and_the_script_that_has_it_are_one_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["torchrun", "--nnodes=2", "--nproc-per-node", "4", "-m", "megatron_patch.launch", "my/gpt.py"]
    flags = [*shlex.split(FLAGS), "--compression-bits", "2", "--my-flag", "3"]
    first = planned(["--inter-gbit", "10", "--", *words, *flags], tmp_path)
    assert (first["recipe"], first["nodes"], first["gpus_per_node"]) == ("gpt", 2, 4)
    assert first["microbatches"] == 4
    shown = capsys.readouterr()
    assert shown.err == "megatron-loco: not checked, no flags of Megatron: --my-flag\n"
    assert f"  {command_line.as_flags(first['options'])}\n" in shown.out
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT)
    second = planned([str(script), "--inter-gbit", "10"], tmp_path)
    assert second == {**first, "recipe": "train"}
    flags = ["--", "--global-batch-size", "64", "--lr", "1e-5"]
    third = planned([str(script), "--nodes", "1", *flags], tmp_path)
    assert (third["nodes"], third["microbatches"]) == (1, 16)
    assert third["weight_bits"] < first["weight_bits"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "plan needs a recipe, a shell script, or -- pretrain_gpt.py FLAGS"),
        ("-- torchrun --nnodes 2", "'torchrun --nnodes 2' names no training script (*.py) before its flags"),
        ("-- a.py --num-layers x", "--num-layers: invalid int value: 'x'"),
        (f"-- a.py {FLAGS} --compression-bits 3", "--compression-bits: 3 is not allowed"),
        (
            f"-- a.py {FLAGS} --compression-bit 2",
            "--compression-bit: no such flag (did you mean --compression-",
        ),
        (f"-- a.py {FLAGS} --compression-outer-interval 9", "--num-distributed-optimizer-instances"),
        (
            f"-- a.py {FLAGS.replace('--vocab-size 1000', '')}",
            "--vocab-size: the plan needs it where no data",
        ),
        (f"--nodes 3 -- a.py {FLAGS}", "(32) must be divisible by"),
        (
            f"-- torchrun --nnodes $N a.py {FLAGS}",
            "a: torchrun is told $N, which is no number; add --nodes N",
        ),
        ("megatron.lr=1 -- a.py", "no such configuration file"),
        ("FOLDER/none.sh", "none.sh: No such file or directory"),
        ("FOLDER/train.sh megatron.lr=1", "megatron.lr=1: goes over a recipe; write -- --flag VALUE"),
        (
            "FOLDER/train.sh -- --lr $LR",
            "--lr: invalid float value: '$LR' (--nodes N and flags after -- go over",
        ),
        ("FOLDER/no.sh", "no.sh: no training command (a *.py script, --num-layers) can be read"),
        ("FOLDER/two.sh", "two.sh: 2 training commands"),
    ],
)
def test_mistakes_are_one_line(
    arguments: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"train": SCRIPT, "no": "python tools/preprocess.py --x 1", "two": SCRIPT * 2}.items():
        (tmp_path / f"{name}.sh").write_text(text)
    argv = arguments.replace("FOLDER", str(tmp_path)).split()
    assert main(["plan", *argv]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert (error.count("\n"), error.startswith("megatron-loco: error: ")) == (1, True)


def test_words_of_recipes_become_flags() -> None:
    assert command_line.as_flags("add megatron.vocab_size=N") == "add --vocab-size N"
    assert command_line.as_flags("megatron.core.x failed") == "megatron.core.x failed"
    options = "compression.method=none megatron.bf16=true megatron.use_distributed_optimizer=false"
    wanted = "--compression-method none --bf16 without --use-distributed-optimizer"
    assert command_line.as_flags(options) == wanted


def dry_run(more: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str], str]:
    status = guarded(lambda: command_line.dry_run([OURS, *FLAGS.split(), *more.split()]))
    shown = capsys.readouterr()
    return status, shown.out.splitlines(), shown.err


@pytest.mark.parametrize(
    ("more", "lines"),
    [
        (
            "--compression-weight-gather exact",
            [
                "loco, 4 bits (levels, rotated), block 128, beta 0.8, errors in int8",
                START,
                "data parallel reduce-scatter over 16 ranks",
                "weight gather over 16 data parallel ranks, from their changes, exactly",
            ],
        ),
        (
            "--compression-method none",
            [
                "method none: Megatron's own gradient exchange",
                "weight gather over 16 data parallel ranks, from their changes, exactly, or Megatron's own: "
                "the faster one in turns of both",
            ],
        ),
        (
            "--compression-method none --overlap-grad-reduce --overlap-param-gather",
            [
                "method none: Megatron's own gradient exchange",
                "weight gather over 16 data parallel ranks, Megatron's own: no turns with "
                "overlap_param_gather on a GPU, where a script must not change weights between a step and "
                "their gather; if yours does not, weight_gather exact codes them",
            ],
        ),
        ("--no-compression-attach", ["--no-compression-attach: stock Megatron"]),
        (
            "--num-experts 4 --expert-model-parallel-size 4 --pipeline-model-parallel-size 2 "
            "--compression-start-step 50 --compression-weight-gather stock",
            [
                "loco, 4 bits (levels, rotated), block 128, beta 0.8, errors in int8",
                "compression starts after 50 optimizer steps",
                "data parallel reduce-scatter over 8 ranks",
                "expert data parallel reduce-scatter over 2 ranks",
            ],
        ),
    ],
)
def test_a_dry_run_of_the_launcher_says_what_would_be_compressed(
    more: str, lines: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert dry_run(more, capsys) == (
        0,
        ["16 ranks; nothing is started", *(f"megatron-loco: {line}" for line in lines)],
        "",
    )
    assert not all_flags()


def test_a_dry_run_refuses_what_ranks_would(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    status, out, error = dry_run("--tensor-model-parallel-size 2", capsys)
    assert (status, error.count("\n")) == (2, 1)
    assert out == ["8 ranks (WORLD_SIZE=N before the command says another number); nothing is started"]
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in error
    assert dry_run("--compression-method onebit_adam --optimizer sgd", capsys)[2].startswith(
        "megatron-loco: error: --optimizer: 'sgd' cannot be combined"
    )
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for flags, words in {
        "--tensor-model-parallel-size 16": "the number of ranks (8) is not divisible by tensor",
        "--global-batch-size 7": "--global-batch-size (7) must be divisible by --micro-batch-size",
        "--train-samples 99": "cannot be combined with --train-iters; leave one of them out",
        "--lr-warmup-iters 200": "--lr-warmup-iters: 200 must be below --train-iters, 100",
    }.items():
        said = dry_run(flags, capsys)[2]
        assert words in said
        assert "launch." not in said
    with pytest.raises(UserError, match=r"none\.py: no such training script"):
        command_line.dry_run(["none.py"])
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert dry_run("", capsys)[2] == (
        "megatron-loco: error: WORLD_SIZE: 'two' must be a whole number, 1 or more\n"
    )


def launched(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the launcher where importing Megatron ends it."""
    (folder / "megatron.py").write_text("raise SystemExit('Megatron was imported')")
    code = f"import sys, runpy; sys.path.insert(0, {str(folder)!r}); sys.argv[1:] = {arguments!r}\n"
    code += "runpy.run_module('megatron_patch.launch', run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_launchers_help_lists_our_flags_without_megatron(tmp_path: Path) -> None:
    done = launched(["--help"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for words in (
        "--dry-run",
        "--compression-weight-gather",
        "--compression-device",
        "examples:\n  torchrun ",
    ):
        assert words in done.stdout
    assert launched(["-h"], tmp_path).stdout == done.stdout
    done = launched(["--dry-run", "none.py"], tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "megatron-loco: error: none.py: no such training script\n",
    )
    done = launched([], tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
