"""Starts a run's ranks, reports which one failed first, and passes signals on to them.

torch's elastic agent, which is also that of torchrun, starts and watches the ranks: it ends all of them after
the first failure, and with `launch.max_restarts` restarts them from the last checkpoint. The agent is forked
from this process, which continues to show progress. On the CPU of a single machine the agent forks the ranks,
too: this process has already imported Megatron to check the flags, and that import takes 7 to 20 seconds of
processor time, which every rank would spend again. In other cases every rank is a new process,
`python -m megatron_patch.launch SCRIPT FLAGS`.

Clusters announce that they take a machine back: Kubernetes and Slurm's preemption send SIGTERM, and Slurm's
`--signal` sends a chosen signal, which is SIGUSR1 here. Both reach the ranks as SIGTERM. With
`megatron.exit_signal_handler` the ranks then finish their step, save and end; without it they only end.
Ctrl-C does not wait for a checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from megatron_patch.errors import RankFailed, UserError
from megatron_patch.workflows.run.job import Job

ASKING = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that ask a run to stop."""
_POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1
_ROOM_OF_A_RECORD = 1 << 16
"""A disk with fewer free bytes had no room for the record of a rank's failure."""
# Errors of sockets whose peer has ended. They are an effect of the first failure, never its cause.
_CONNECTION_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket closed|peer", re.IGNORECASE
)


class Stopped(RankFailed):
    """Raised when a signal has asked the run to stop, and it did."""


# --- the launcher ----------------------------------------------------------------------------------------


def start(job: Job, tick: Callable[[], None], say: Callable[[str], None]) -> str | None:
    """Run the job to its end, calling `tick` about ten times a second and `say` with a line about restarts.

    Returns the name of the signal that asked the run to stop; None if there was none.

    Raises:
        RankFailed: a rank died or raised, and no restart was left; all other ranks have been ended.
        Stopped: a rank failed after it had been asked to stop, e.g. while it saved.
        UserError: a rank found a mistake of the user's.
        KeyboardInterrupt: Ctrl-C was pressed; all ranks have been ended.
    """
    job.logs.mkdir(parents=True, exist_ok=True)
    fork = multiprocessing.get_context("fork")
    told: SimpleQueue[Any] = fork.SimpleQueue()
    asked, names = fork.Event(), list[str]()
    failure: Exception | None = None
    with _noticed(names):
        # Signals that arrive before the agent has its own handlers are delivered when it has them.
        signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
        agent = fork.Process(target=_agent, args=(job, told, asked))
        agent.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
        assert agent.pid is not None
        os.setpgid(agent.pid, agent.pid)  # As in `_agent`: the group must exist before it is killed.
        try:
            while agent.is_alive() or not told.empty():
                if names and not asked.is_set():
                    asked.set()
                    agent.terminate()  # The agent passes the signal on to its ranks.
                tick()
                while not told.empty():
                    message = told.get()
                    if isinstance(message, str):
                        say(message)
                    else:
                        failure = message
                agent.join(_POLL_SECONDS)
        finally:
            if agent.is_alive() and not job.forked:
                os.kill(agent.pid, signal.SIGINT)  # Ranks that are not forked have their own groups.
                agent.join(30)
            # Ranks have children too, e.g. the process of an asynchronous checkpoint writer.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.join()
    if failure is None and agent.exitcode and not names:
        failure = RankFailed(f"torchrun ended with exit status {agent.exitcode} (see {job.logs})")
    if isinstance(failure, RankFailed) and names:
        raise Stopped(f"stopped by {names[0]}, and {str(failure).splitlines()[0]}") from failure
    if failure is not None:
        raise failure
    return names[0] if names else None


@contextlib.contextmanager
def _noticed(names: list[str]) -> Iterator[None]:
    """Within the block, signals in ASKING do not end this process; their names are appended to `names`."""
    if threading.current_thread() is not threading.main_thread():  # Other threads cannot set handlers.
        yield
        return
    before = {
        number: signal.signal(number, lambda number, _: names.append(signal.Signals(number).name))
        for number in ASKING
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- the agent's process, and the ranks' -----------------------------------------------------------------


def _agent(job: Job, told: SimpleQueue[Any], asked: Event) -> None:
    """Run torch's agent as torchrun does; `told` gets a line for every restart, and finally the failure."""
    os.setpgid(0, 0)  # Ctrl-C must reach only the launcher, which ends this group.
    # The launcher's lock on the folder ends with it: ranks that go on would write into the next run's files.
    _end_with_parent(signal.SIGKILL if job.forked else signal.SIGTERM)
    _as_a_rank()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
    path = job.logs / "torchrun.log"
    _write_to(path)
    begin = path.stat().st_size
    # `_seen` reads some of the agent's log messages.
    logging.getLogger("torch.distributed.elastic").addHandler(logging.StreamHandler())
    os.environ.update({**job.variables(), "MEGATRON_LOCO_FAILURES": str(job.failures)})

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    class Logs(DefaultLogsSpecs):
        """Says where ranks write their logs; torch asks it at every start, so that it notices restarts."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            if restart := int(envs[0]["TORCHELASTIC_RESTART_COUNT"]):
                failure = first_failure(job, _seen(path, begin))
                if isinstance(failure, UserError):
                    raise failure  # A restarted rank would find the same mistake.
                told.put(_note_restart(job, restart, failure))
            if not job.forked:
                return super().reify(envs)
            console = dict.fromkeys(envs, "")  # `_rank` redirects its output itself.
            return LogsDest(console, console, {}, {}, dict.fromkeys(envs, os.devnull))

    options = run.parse_args(job.torchrun()[1:])
    if options.standalone:
        options.rdzv_backend, options.rdzv_endpoint = "c10d", "localhost:0"
        options.rdzv_id = uuid.uuid4().hex
    command: Any
    arguments: list[Any]
    config, command, arguments = run.config_from_args(options)
    config.logs_specs = Logs(str(job.logs), Std.NONE if job.forked else Std.ALL)
    if job.forked:
        config.start_method, command, arguments = "fork", _rank, [job, asked]
    try:
        elastic_launch(config, command)(*arguments)
    except SignalException:
        if any(_read_failures(job.failures)):
            told.put(first_failure(job, {}))
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        told.put(first_failure(job, {rank: ended.exitcode for rank, ended in error.failures.items()}))
    except UserError as error:
        told.put(error)


def _rank(job: Job, asked: Event) -> None:
    """Run a forked rank, as `python -m megatron_patch.launch` does, but with Megatron imported already."""
    _end_with_parent(signal.SIGKILL)
    _as_a_rank()
    _write_to(job.logs / f"rank-{os.environ['RANK']}.log")
    import torch

    from megatron_patch.megatron.run_script import main

    torch.set_num_threads(1)  # As with torchrun, the ranks share the cores.
    try:
        status = main([str(job.script), *job.flags])
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A rank that returned would wait for the others and for the agent, which stops watching after a signal.
    if status or asked.is_set():
        os._exit(status)


def _write_to(log: Path) -> None:
    """Append the output of this process to a file."""
    sys.stdout = sys.stderr = log.open("a", buffering=1, encoding="utf-8")
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)


def _as_a_rank() -> None:
    """Give SIGTERM its default handler, which Megatron expects, and ignore SIGUSR1.

    A scheduler may send SIGUSR1 to every process of a step; if not ignored, it would end agent and ranks.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent has died."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _note_restart(job: Job, restart: int, failure: Exception) -> str:
    """Write a line about a restart to the logs, remove the failed attempt's records, and return the line."""
    line = f"restart {restart} of {job.launch.max_restarts}: {str(failure).splitlines()[0]}"
    for log in job.logs.glob("rank-*.log"):
        with log.open("a", encoding="utf-8") as stream:
            stream.write(f"\n{line}\n")
    shutil.rmtree(job.failures, ignore_errors=True)
    return line


# --- the first failure -----------------------------------------------------------------------------------


def _seen(log: Path, begin: int) -> dict[int, int]:
    """Return {rank: exit code} of the last failure in the agent's log after byte `begin`."""
    text = log.read_bytes()[begin:].decode(errors="replace")
    failures = re.findall(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", text)
    return {int(rank): int(code) for code, rank in failures[-1:]} or {0: 1}


def first_failure(job: Job, ended: dict[int, int]) -> Exception:
    """Return the first cause: a killed rank, else the earliest error that is not a lost connection.

    Args:
        job: the job, whose ranks have written their errors to `job.failures`.
        ended: the exit codes by rank.
    """
    records = list(_read_failures(job.failures))
    for record in records:
        if record["user"]:
            return UserError(record["error"])
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
    log = job.logs / f"rank-{rank}.log"
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:] if log.exists() else []
    return RankFailed("\n".join([f"{failed}{_where(job, rank)}", *tail]))


def _read_failures(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("rank-*.json")):
        with contextlib.suppress(OSError, ValueError):
            yield json.loads(path.read_text(encoding="utf-8"))


def _where(job: Job, rank: int) -> str:
    log = job.logs / f"rank-{rank}.log"
    return f" (see {log if log.exists() else job.logs})"
