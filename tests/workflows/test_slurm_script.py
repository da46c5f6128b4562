"""The Slurm script beside stand-ins for scontrol and srun: what it starts and refuses, when it requeues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from workflows.engine_runs import ROOT
from workflows.test_train import CONFIG, SMALL, until

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
    (tmp_path / "bin").mkdir()
    srun = SRUN.format(python=sys.executable)
    for name, text in (("scontrol", SCONTROL), ("srun", srun), ("shows", SHOWS)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    def started(
        *arguments: str, nodes: int = 1, hosts: int = HOSTS, **variables: str
    ) -> subprocess.Popen[str]:
        job = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "node[1-1024]"}
        job |= {"SLURM_JOB_NUM_NODES": str(nodes), "STAND_INS": str(tmp_path), "HOSTS": str(hosts)}
        job |= {"OUT": str(tmp_path / "run"), "MEGATRON_LOCO": str(tmp_path / "bin/shows")}
        environment = {**os.environ, "PATH": path, **job, **variables}
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


def test_it_starts_however_many_nodes_the_job_has(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """As often as it takes to see a pipe that closes before scontrol has written all names."""
    for hosts, times in ((1, 1), (HOSTS, 40)):
        for _ in range(times):
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


@pytest.mark.parametrize("word", ["--out=there", "--ou", "--overwrite", "--resume"])
def test_what_is_the_scripts_own_is_refused(
    word: str, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    status, out, err = ended(start(CONFIG, "megatron.lr=1e-4", word, "there"))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"megatron-loco: error: {word}: ")
    assert ("OUT=DIR" in err) == word.startswith("--ou")
    assert not (tmp_path / "run-slurm").exists()


def test_a_job_that_could_not_be_resumed_ends_at_its_first_start(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    command = str(Path(sys.executable).with_name("megatron-loco"))
    status, out, err = ended(start(CONFIG, *SMALL, nodes=2, MEGATRON_LOCO=command, NPROC_PER_NODE="2"))
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("megatron-loco: error: megatron.save_interval: not set")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(("status", "requeued"), [("0", False), ("2", False), ("143", True)])
def test_a_job_that_was_asked_to_stop_is_requeued_unless_it_was_a_mistake(
    status: str, requeued: bool, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    stops = tmp_path / "bin/stops"
    stops.write_text(
        f'#!/usr/bin/env bash\ntrap "exit {status}" USR1\ntouch "$STAND_INS/here"\n'
        "while true; do sleep 0.05; done\n"
    )
    stops.chmod(0o755)
    process = start(CONFIG, MEGATRON_LOCO=str(stops))
    until((tmp_path / "here").exists, process)
    process.send_signal(signal.SIGUSR1)
    found, out, _ = ended(process)
    assert found == (0 if requeued else int(status))
    assert (tmp_path / "requeued").exists() == requeued == ("back into the queue" in out)
