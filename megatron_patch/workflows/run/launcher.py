"""Starts a run's ranks, watches them, tells which one failed first, and starts them again if asked to.

On GPUs, and on several nodes, the ranks are started by torchrun. On the CPU of one machine they are forked
from this process, which has imported Megatron already to check the flags: that import takes 7 to 20 seconds
of processor time, and four ranks on two cores would pay it four times over. Either way every rank runs
`megatron_patch.launch SCRIPT FLAGS`, writes to FOLDER/logs, and a rank that dies takes the others with it.
With `launch.max_restarts` all ranks are then started again, and Megatron resumes from the last checkpoint.
SIGTERM and SIGUSR1 are handed on to the ranks, which may save before they end (stop_signals.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_patch.errors import RankFailed, UserError
from megatron_patch.workflows.run import stop_signals
from megatron_patch.workflows.run.configuration import Launch
from megatron_patch.workflows.run.one_connection import wants_one_connection

_POLL_SECONDS = 0.1
_LAST_WORDS_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1
_SAVE_SECONDS = 600
"""How long torchrun waits for ranks that were asked to stop, where they save before they do."""
_ROOM_OF_A_RECORD = 1 << 16
"""Bytes: a disk with fewer had no room for what a rank says of its failure."""
_USER_MISTAKE = 2
"""Exit status of a rank that found a mistake of the user's: started again, it would find it again."""
# How the end of a peer looks from the other side of a socket: an effect, never the cause.
_CONNECTION_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket closed|peer", re.IGNORECASE
)


class Stopped(RankFailed):
    """The run was asked to stop, by a signal, and did."""


@dataclass(frozen=True)
class Job:
    """What every rank of a run executes: `script` with `flags`; logs and failures go below `folder`."""

    launch: Launch
    script: Path
    flags: list[str]
    folder: Path

    @property
    def logs(self) -> Path:
        """Of this node, where there are several: they share the run's folder."""
        logs = self.folder / "logs"
        return logs / f"node-{self.launch.node_rank}" if self.launch.nnodes > 1 else logs

    @property
    def failures(self) -> Path:
        return self.folder / "failures"

    def torchrun(self) -> list[str]:
        """The torchrun command of this job, for this node."""
        launch = self.launch
        command = ["torchrun", f"--nproc-per-node={launch.nproc_per_node}"]
        if launch.nnodes > 1:
            command += [
                f"--nnodes={launch.nnodes}",
                f"--node-rank={launch.node_rank}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={launch.rdzv_endpoint or 'FIRST_NODE:29500'}",
                "--rdzv-id=megatron-loco",
            ]
        else:
            command += ["--standalone"]
        if launch.max_restarts:
            command += [f"--max-restarts={launch.max_restarts}"]
        return [*command, "-m", "megatron_patch.launch", str(self.script), *self.flags]

    def variables(self) -> dict[str, str]:
        """The environment variables that go with `torchrun`."""
        found: dict[str, str] = {}
        if self.launch.device == "cpu":
            from megatron_patch.megatron.cpu.device import CPU_ENVIRONMENT

            found = {**CPU_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
            if self.launch.nnodes > 1:  # the loopback interface reaches no other node (train.py asks for it)
                found["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "INTERFACE")
        elif wants_one_connection(self.flags):
            found["CUDA_DEVICE_MAX_CONNECTIONS"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        if "--exit-signal-handler" in self.flags:
            found["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(_SAVE_SECONDS)
        if self.launch.max_restarts:
            # Else ranks that are started again find the addresses of the dead ones: pytorch/pytorch#135712.
            found["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        return found

    def command_text(self) -> str:
        """The command as a user would type it."""
        variables = [f"{name}={value}" for name, value in self.variables().items()]
        return " ".join([*variables, shlex.join(self.torchrun())]) + "\n"


def start(job: Job, tick: Callable[[], None], say: Callable[[str], None]) -> str | None:
    """Run the job to its end, calling `tick` a few times a second and `say` with a line about every restart.

    Returns the name of the signal that asked it to stop, None if there was none.

    Raises:
        RankFailed: a rank died or raised, and no restart was left; all others have been ended.
        Stopped: a rank died of being asked to stop.
        UserError: a rank found a mistake of the user's.
        KeyboardInterrupt: after all ranks have been ended.
    """
    job.logs.mkdir(parents=True, exist_ok=True)
    run = _run_forked if job.launch.device == "cpu" and job.launch.nnodes == 1 else _run_torchrun
    with stop_signals.noticed() as stop:
        try:
            run(job, tick, say, stop)
        except RankFailed as error:
            if not stop.name:
                raise
            # Ranks that SIGTERM ended leave no word; one that failed, e.g. in its save, does.
            cause = f", and {str(error).splitlines()[0]}" if any(_read_failures(job.failures)) else ""
            raise Stopped(f"stopped by {stop.name}{cause}") from error
    return stop.name


def _run_forked(
    job: Job, tick: Callable[[], None], say: Callable[[str], None], stop: stop_signals.StopRequest
) -> None:
    for restart in itertools.count(1):
        ended = _run_ranks(job, tick, stop)
        if not any(ended.values()):
            return
        failure = first_failure(job, ended)
        if restart > job.launch.max_restarts or stop.name or _USER_MISTAKE in ended.values():
            raise failure
        _note_restart(job, restart, failure, say)


def _note_restart(job: Job, restart: int, failure: Exception, say: Callable[[str], None]) -> None:
    """Tell of a restart, in the logs too, and clear away what belonged to the attempt that failed."""
    line = f"restart {restart} of {job.launch.max_restarts}: {str(failure).splitlines()[0]}"
    for log in job.logs.glob("rank-*.log"):
        with log.open("a", encoding="utf-8") as stream:
            stream.write(f"\n{line}\n")
    shutil.rmtree(job.failures, ignore_errors=True)
    say(line)


def _run_ranks(job: Job, tick: Callable[[], None], stop: stop_signals.StopRequest) -> dict[int, int]:
    """Fork all ranks and wait for their end, or end them all after the first failure; exit codes by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sys.stdout.flush()
    sys.stderr.flush()
    ranks = {_fork_rank(job, rank, port): rank for rank in range(job.launch.nproc_per_node)}
    ended: dict[int, int] = {}
    try:
        while ranks and not any(ended.values()):
            _reap(ranks, ended)
            stop.tell(ranks)
            tick()
            time.sleep(_POLL_SECONDS)
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        # Others may be writing the real cause, unless that was a kill.
        while ranks and min(ended.values()) >= 0 and time.monotonic() < deadline:
            _reap(ranks, ended)
            time.sleep(_POLL_SECONDS)
    finally:
        for pid in ranks:
            _kill_group(pid)
        for pid in ranks:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
    return ended


def _reap(ranks: dict[int, int], ended: dict[int, int]) -> None:
    for pid in list(ranks):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            ended[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
            _kill_group(pid)


def _kill_group(pid: int) -> None:
    """End a rank and its own children, e.g. the process that an asynchronous checkpoint writer talks to."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _fork_rank(job: Job, rank: int, port: int) -> int:
    with stop_signals.held_back():
        pid = os.fork()
        if not pid:
            stop_signals.as_a_rank()
    if pid:
        os.setpgid(pid, pid)  # here too: the group must be there before anyone ends it
        return pid
    status = 1
    try:
        os.setpgid(0, 0)  # Ctrl-C reaches the parent, which ends the ranks
        _end_with_launcher(signal.SIGKILL)
        log = os.open(job.logs / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        ranks = str(job.launch.nproc_per_node)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=ranks,
            LOCAL_WORLD_SIZE=ranks,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            MEGATRON_LOCO_FAILURES=str(job.failures),
        )
        import torch

        from megatron_patch.megatron.run_script import main

        torch.set_num_threads(1)  # as torchrun does: the ranks share the cores
        status = main([str(job.script), *job.flags])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _end_with_launcher(number: signal.Signals) -> None:
    """Get this signal when the launcher has died: its lock on the run's folder is gone with it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _as_torchrun() -> None:
    stop_signals.as_a_rank()
    _end_with_launcher(signal.SIGTERM)  # on which torchrun ends its ranks


def _run_torchrun(
    job: Job, tick: Callable[[], None], say: Callable[[str], None], stop: stop_signals.StopRequest
) -> None:
    environment = {**os.environ, **job.variables(), "MEGATRON_LOCO_FAILURES": str(job.failures)}
    command = [sys.executable, "-m", "torch.distributed.run", *job.torchrun()[1:]]
    position = command.index("-m", 2)
    command[position:position] = ["--redirects=3", f"--log-dir={job.logs}"]
    attempts = set(job.logs.glob("*/attempt_*"))
    with (job.logs / "torchrun.log").open("ab") as log:
        begin = log.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            preexec_fn=_as_torchrun,
        )
        try:
            while process.poll() is None and not _user_mistakes(job):
                stop.tell([process.pid])  # torchrun hands it on to its ranks
                tick()
                time.sleep(_POLL_SECONDS)
                for new in set(job.logs.glob("*/attempt_*")) - attempts:
                    attempts.add(new)
                    if restart := int(new.name.removeprefix("attempt_")):
                        _note_restart(job, restart, first_failure(job, _torchrun_ended(job, begin)), say)
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks on SIGTERM
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                process.kill()
    if process.returncode:
        raise first_failure(job, _torchrun_ended(job, begin))


def _torchrun_ended(job: Job, begin: int) -> dict[int, int]:
    """Exit codes in torchrun's log from byte `begin` on: its last summary, else the rank it saw fail last."""
    text = (job.logs / "torchrun.log").read_bytes()[begin:].decode(errors="replace")
    found = re.findall(r"rank\s*:\s*(\d+).*?\n\s*exitcode\s*:\s*(-?\d+)", text)
    if not found:  # a restart has no summary
        failed = re.findall(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", text)
        found = [(local_rank, code) for code, local_rank in failed[-1:]]
    return {int(rank): int(code) for rank, code in found} or {0: 1}


def first_failure(job: Job, ended: dict[int, int]) -> Exception:
    """The first cause: a killed rank, else the earliest error that is no lost connection."""
    for mistake in _user_mistakes(job):
        return mistake
    records = list(_read_failures(job.failures))
    for rank, code in sorted(ended.items()):
        if code < 0 and code != -signal.SIGTERM:
            return RankFailed(f"rank {rank} was killed by {signal.Signals(-code).name}{_where(job, rank)}")
    causes = [r for r in records if not _CONNECTION_LOST.search(r["error"])] or records
    if causes:
        first = min(causes, key=lambda record: record["time"])
        trace = "\n".join(first["traceback"].strip().splitlines()[-12:])
        return RankFailed(
            f"rank {first['rank']} failed: {first['error']}{_where(job, first['rank'])}\n{trace}"
        )
    rank, code = next((rank, code) for rank, code in ended.items() if code)
    failed = f"rank {rank} ended with exit status {code}"
    if shutil.disk_usage(job.folder).free < _ROOM_OF_A_RECORD:
        return RankFailed(f"{failed}: no space is left on the disk of {job.folder}")
    return RankFailed(f"{failed}{_where(job, rank)}\n{_tail(job, rank)}")


def _user_mistakes(job: Job) -> list[UserError]:
    return [UserError(record["error"]) for record in _read_failures(job.failures) if record["user"]]


def _read_failures(folder: Path) -> Iterator[dict]:
    for path in sorted(folder.glob("rank-*.json")):
        with contextlib.suppress(OSError, ValueError):
            yield json.loads(path.read_text(encoding="utf-8"))


def _where(job: Job, rank: int) -> str:
    log = job.logs / f"rank-{rank}.log"
    return f" (see {log if log.exists() else job.logs})"


def _tail(job: Job, rank: int) -> str:
    log = job.logs / f"rank-{rank}.log"
    if not log.exists():
        return ""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])
