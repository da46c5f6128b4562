"""A Slurm of one's own on this machine, for as long as a test runs: munged, slurmctld and two slurmd.

    with slurm_cluster.running(folder) as cluster:
        cluster.run("sbatch", "--wait", "job.sh")

Everything lies in `folder`; nothing of an installed Slurm's configuration is read or changed. Both nodes are
this machine under two names, with GPUs that exist on paper only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
CONFIGURATION = """\
ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0
MpiDefault=none
ReturnToService=2
KillWait=5
GresTypes=gpu
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs={cpus} Gres=gpu:8
NodeName=n2 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[2]} CPUs={cpus} Gres=gpu:8
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    absent = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: apt install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "Slurm's daemons want root"


@dataclass(frozen=True)
class Cluster:
    """How to talk to it."""

    environment: dict[str, str]

    def run(self, *command: str, cwd: Path | None = None, **variables: str) -> str:
        """A command of Slurm's; returns what it prints."""
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says, e.g. JobState, Restarts, ExitCode."""
        words = self.run("scontrol", "show", "job", number, "-o").split()
        return dict(word.split("=", 1) for word in words if "=" in word)


@contextlib.contextmanager
def running(folder: Path, cpus: int = 2) -> Iterator[Cluster]:
    """Start the cluster in `folder`, wait until its nodes are idle; end every daemon afterwards."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    cluster = Cluster({**os.environ, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")})
    _write(folder, cpus)
    daemons: list[subprocess.Popen[bytes]] = []

    def daemon(*command: str) -> None:
        null = subprocess.DEVNULL
        options = {"env": cluster.environment, "stdin": null, "stdout": null, "stderr": null}
        daemons.append(subprocess.Popen(command, **options))

    try:
        munge = folder / "munge"
        files = (f"--{one}-file={munge / one}" for one in ("key", "pid", "log", "seed"))
        daemon("munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *files)
        _wait(lambda: (munge / "socket").exists(), 10, "munged made no socket")
        daemon("slurmctld", "-D", "-c")
        for node in ("n1", "n2"):
            daemon("slurmd", "-D", "-N", node)
        _wait(lambda: _idle(cluster), 60, f"no idle nodes: see {folder}")
        yield cluster
    finally:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            cluster.run("scancel", "--user=root")
            time.sleep(1)
        for process in reversed(daemons):
            process.terminate()
        for process in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def _write(folder: Path, cpus: int) -> None:
    for name in ("state", "munge", "spool.n1", "spool.n2"):
        (folder / name).mkdir(parents=True)
    (folder / "munge").chmod(0o755)
    (folder / "munge" / "key").write_bytes(os.urandom(1024))
    (folder / "munge" / "key").chmod(0o600)
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(3)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1] for probe in probes]
    host = socket.gethostname().partition(".")[0]
    text = CONFIGURATION.format(folder=folder, host=host, ports=ports, cpus=cpus)
    (folder / "slurm.conf").write_text(text)
    for number in range(8):  # Slurm wants a file for each GPU, and does not mind what is in it
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")


def _idle(cluster: Cluster) -> bool:
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        return cluster.run("sinfo", "--noheader", "--format=%T").split() == ["idle"]
    return False


def _wait(happened: object, seconds: float, complaint: str) -> None:
    deadline = time.monotonic() + seconds
    while not happened():  # type: ignore[operator]
        assert time.monotonic() < deadline, complaint
        time.sleep(0.2)
