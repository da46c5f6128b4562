"""The Slurm script on a real Slurm: stopped, killed, requeued, resumed, and equal to a run left alone."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from workflows import slurm_cluster
from workflows.ablation import test_ablate
from workflows.engine_runs import ROOT
from workflows.slurm_cluster import Cluster
from workflows.test_train import SMALL, megatron_loco, records, until

from megatron_patch.workflows.run import run_folder

SCRIPT = "pretrain_scripts/slurm/pretrain.sbatch"
CONFIG = "configs/models/llama_tiny.yaml"
STEPS = 300
SETTINGS = [*SMALL, f"megatron.train_iters={STEPS}", "megatron.save_interval=10"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "-"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster.running(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    done = megatron_loco("train", CONFIG, *SETTINGS, "--out", str(out))
    assert done.returncode == 0, done.stderr
    return records(out)


def submit(cluster: Cluster, out: Path, *flags: str, settings: tuple[str, ...] = (), **variables: str) -> str:
    command = str(Path(sys.executable).with_name("megatron-loco"))
    printed = cluster.run(
        *("sbatch", "--parsable", "--signal=B:USR1@5", f"--output={out}.log", *flags),
        *(SCRIPT, CONFIG, *SETTINGS, *settings, f"launch.nproc_per_node={variables['NPROC_PER_NODE']}"),
        cwd=ROOT,
        **{"OUT": str(out), "MEGATRON_LOCO": command, **variables},
    )
    return printed.strip()


def told(out: Path) -> str:
    """All that the job and its steps have printed, for a failed assertion."""
    logs = [Path(f"{out}.log"), *sorted(Path(f"{out}-slurm").glob("*.log"))]
    return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs if log.exists())


def wait(happened: Callable[[], bool], out: Path) -> None:
    until(happened, told=lambda: told(out))


def ended(cluster: Cluster, job: str) -> bool:
    return cluster.job(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def reached(out: Path, step: int) -> Callable[[], bool]:
    return lambda: (run_folder.latest_step(out / "checkpoints") or 0) >= step


def test_stopped_then_killed_it_goes_on_and_ends_as_if_left_alone(
    cluster: Cluster, undisturbed: list[tuple[int, float]], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    job = submit(cluster, out, "--nodes=1", NPROC_PER_NODE="2")
    wait(reached(out, 20), out)
    cluster.run("scancel", "--signal=USR1", "--batch", job)  # as --signal does before the time is up
    wait(lambda: cluster.job(job)["Restarts"] == "1", out)
    saved = run_folder.latest_step(out / "checkpoints")
    assert saved is not None
    assert f"stopped by SIGUSR1; --resume starts from the checkpoint of step {saved}" in told(out)

    wait(reached(out, saved + 20), out)
    cluster.run("scontrol", "requeue", job)  # as preemption does: SIGTERM, and SIGKILL some seconds later
    wait(lambda: ended(cluster, job), out)
    found = cluster.job(job)
    assert (found["JobState"], found["Restarts"], found["ExitCode"]) == ("COMPLETED", "2", "0:0"), told(out)
    assert [step for step, _ in records(out)] == list(range(1, STEPS + 1))
    assert records(out) == undisturbed
    resumed = re.findall(
        r"loaded checkpoint .* at iteration (\d+)", (out / "logs" / "rank-0.log").read_text()
    )
    assert int(resumed[0]) == saved
    assert int(resumed[1]) >= saved + 20
    assert json.loads((out / "summary.json").read_text())["steps"] == STEPS


def test_two_nodes_meet_are_stopped_and_go_on(
    cluster: Cluster, undisturbed: list[tuple[int, float]], tmp_path: Path
) -> None:
    """One rank on each of two nodes, over torchrun's rendezvous: the same losses as two ranks on one node."""
    out = tmp_path / "run"
    variables = {"NPROC_PER_NODE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with socket.socket() as probe:  # the nodes' names n1 and n2 are no machine's
        probe.bind(("127.0.0.1", 0))
        meeting = (f"launch.rdzv_endpoint=127.0.0.1:{probe.getsockname()[1]}",)
    job = submit(cluster, out, "--nodes=2", settings=meeting, **variables)
    wait(reached(out, 20), out)
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    wait(lambda: cluster.job(job)["Restarts"] == "1", out)
    saved = run_folder.latest_step(out / "checkpoints")
    wait(lambda: ended(cluster, job), out)
    assert cluster.job(job)["JobState"] == "COMPLETED", told(out)
    assert records(out) == undisturbed
    logs = sorted((out / "logs").glob("node-*/*/attempt_0/*/stdout.log"))
    assert {log.relative_to(out / "logs").parts[0] for log in logs} == {"node-0", "node-1"}
    assert sum(f"at iteration {saved}" in log.read_text() for log in logs) == 1, "the second start resumed"
    for node in (0, 1):
        assert f"checkpoint of step {saved}" in Path(f"{out}-slurm/job-{job}-node-{node}.log").read_text()


def test_an_ablation_as_a_job_array(cluster: Cluster, tmp_path: Path) -> None:
    """Every task makes its run, two at a time; --collect is the same results file as without Slurm."""
    cells = "  - {compression.method: loco}\n"
    arguments = test_ablate.define(tmp_path, "[1, 2]", cells)[1:]
    job = cluster.run(
        *("sbatch", "--parsable", "--array=0-3%2", "--gpus-per-node=0", f"--output={tmp_path}/task-%a.log"),
        *("pretrain_scripts/slurm/ablate.sbatch", *arguments),
        cwd=ROOT,
        MEGATRON_LOCO=str(Path(sys.executable).with_name("megatron-loco")),
    ).strip()
    out = tmp_path / "out"
    wait(lambda: all(ended(cluster, f"{job}_{task}") for task in range(4)), out)
    logs = "\n".join(log.read_text()[-2000:] for log in sorted(tmp_path.glob("task-*.log")))
    assert [cluster.job(f"{job}_{task}")["JobState"] for task in range(4)] == ["COMPLETED"] * 4, logs
    collected = megatron_loco("ablate", *arguments, "--collect")
    assert collected.returncode == 0, collected.stderr
    found = (out / "results.csv").read_text()
    assert found.count(",done,") == 4
    (tmp_path / "alone").mkdir()
    assert megatron_loco(*test_ablate.define(tmp_path / "alone", "[1, 2]", cells)).returncode == 0
    assert (tmp_path / "alone/out/results.csv").read_text() == found
