"""The Slurm script beside stand-ins for scontrol and srun: what it starts and refuses, when it requeues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from workflows.engine_runs import ROOT
from workflows.test_train import CONFIG, SMALL

from megatron_patch.workflows.run.run_folder import latest_step

SCRIPT = ROOT / "pretrain_scripts/slurm/pretrain.sbatch"
HOSTS = 1024
SCONTROL = """\
#!/usr/bin/env bash
# Every name is a write of its own, as of a program that is line-buffered.
if [[ $1 == requeue ]]; then echo "$2" >>"$STAND_INS/requeued"; exit; fi
for ((host = 1; host <= HOSTS; host++)); do printf 'node%d\\n' "$host"; done
"""
SRUN = """\
#!{python}
import os, signal, subprocess, sys
options = [word for word in sys.argv[1:7] if word.startswith("--")]
(output,) = (word.partition("=")[2] for word in options if word.startswith("--output="))
command = sys.argv[1 + len(options):]
signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
tasks = []
for node in range(int(os.environ["SLURM_JOB_NUM_NODES"])):
    path = output.replace("%j", os.environ["SLURM_JOB_ID"]).replace("%n", str(node))
    with open(path, "ab") as log:
        environment = {{**os.environ, "SLURM_NODEID": str(node)}}
        tasks.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
sys.exit(max(task.wait() for task in tasks))
"""
SHOWS = '#!/bin/sh\nprintf "%s\\n" "$MASTER_ADDR" "$MASTER_PORT" "$@"\nexit ${STATUS:-0}\n'


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    for name, text in (
        ("scontrol", SCONTROL),
        ("srun", SRUN.format(python=sys.executable)),
        ("shows", SHOWS),
    ):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def started(
        *arguments: str, nodes: int = 1, hosts: int = HOSTS, **variables: str
    ) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            **{"STAND_INS": str(tmp_path), "HOSTS": str(hosts), "OUT": str(tmp_path / "run")},
            **{
                "SLURM_JOB_ID": "12345",
                "SLURM_JOB_NODELIST": "node[1-1024]",
                "SLURM_JOB_NUM_NODES": str(nodes),
            },
            **{"MEGATRON_LOCO": str(tmp_path / "bin/shows"), **variables},
        }
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [str(SCRIPT), *arguments], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True
        )

    return started


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def log(tmp_path: Path, node: int = 0) -> list[str]:
    return (tmp_path / f"run-slurm/job-12345-node-{node}.log").read_text().splitlines()


@pytest.mark.parametrize("hosts", [1, 2, HOSTS])
def test_it_starts_however_many_nodes_the_job_has(
    hosts: int, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    for _ in range(100 if hosts == HOSTS else 10):
        assert ended(start(CONFIG, hosts=hosts)) == (0, "", "")
    told = log(tmp_path)
    assert told.count("node1") == told.count("22345") == told.count("train")


def test_the_shell_that_submits_names_no_address(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    inherited = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert ended(start(CONFIG, "megatron.lr=1e-4", nodes=2, **inherited))[0] == 0
    for node in (0, 1):
        address, port, command, config, *rest = log(tmp_path, node)
        assert (address, port, command, config) == ("node1", "22345", "train", CONFIG)
        assert rest[-3:] == ["--resume-or-start", "megatron.lr=1e-4", "megatron.exit_signal_handler=true"]
        assert rest[rest.index("--out") + 1] == str(tmp_path / "run")


@pytest.mark.parametrize(
    "word", ["--out", "--out=there", "--ou", "--overwrite", "--resume", "--resume-or-start"]
)
def test_what_is_the_scripts_own_is_refused(
    word: str, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    status, out, err = ended(start(CONFIG, "megatron.lr=1e-4", word, "there"))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"megatron-loco: error: {word}: ")
    assert ("OUT=DIR" in err) == word.startswith("--ou")
    assert not (tmp_path / "run-slurm").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "megatron.save_interval: not set"),
        (["megatron.save_interval=5", "megatron.load=/pretrained"], "megatron.pretrained_checkpoint=DIR"),
        (["megatron.save_interval=5", "megatron.finetune=true"], "megatron.finetune: True"),
        (["megatron.save_interval=5", "compression.bits=5"], "compression.bits: 5"),
    ],
)
def test_a_job_that_could_not_be_resumed_ends_at_its_first_start(
    settings: list[str], words: str, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    command = str(Path(sys.executable).with_name("megatron-loco"))
    variables = {"MEGATRON_LOCO": command, "NPROC_PER_NODE": "2"}
    status, out, err = ended(start(CONFIG, *SMALL, *settings, nodes=2, **variables))
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("megatron-loco: error: ")
    assert words in err
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(("status", "requeued"), [("0", False), ("1", True), ("2", False), ("143", True)])
def test_a_job_that_was_asked_to_stop_is_requeued_unless_it_was_a_mistake(
    status: str, requeued: bool, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    stops = tmp_path / "bin/stops"
    stops.write_text(
        f'#!/usr/bin/env bash\ntrap "exit {status}" USR1\ntouch "$STAND_INS/here"\n'
        "while true; do sleep 0.05; done\n"
    )
    stops.parent.joinpath("stops").chmod(0o755)
    process = start(CONFIG, MEGATRON_LOCO=str(stops))
    until((tmp_path / "here").exists, process)
    process.send_signal(signal.SIGUSR1)
    found, out, _ = ended(process)
    assert found == (0 if requeued else int(status))
    assert (tmp_path / "requeued").exists() == requeued == ("back into the queue" in out)


def until(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not happened():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True])
def test_stopped_and_requeued_it_resumes_where_it_saved(
    elsewhere: bool, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    saved = tmp_path / "elsewhere" if elsewhere else tmp_path / "run/checkpoints"
    settings = [*SMALL, "megatron.train_iters=300", "megatron.save_interval=10"]
    settings += [f"megatron.save={saved}"] if elsewhere else []
    command = str(Path(sys.executable).with_name("megatron-loco"))
    variables = {"MEGATRON_LOCO": command, "NPROC_PER_NODE": "2"}
    process = start(CONFIG, *settings, **variables)
    until(lambda: (latest_step(saved) or 0) >= 20, process)
    process.send_signal(signal.SIGUSR1)
    status, out, err = ended(process)
    assert (status, "back into the queue" in out) == (0, True), err
    assert (tmp_path / "requeued").read_text() == "12345\n"
    step = latest_step(saved)
    assert f"--resume starts from the checkpoint of step {step}" in err
    assert ended(start(CONFIG, *settings, SLURM_RESTART_COUNT="1", **variables))[0] == 0
    assert f"at iteration {step}" in (tmp_path / "run/logs/rank-0.log").read_text()
    records = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert [record["step"] for record in records] == list(range(1, 301))
