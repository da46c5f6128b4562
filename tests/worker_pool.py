"""A warm pool of worker processes, for tests that need several ranks.

Importing torch and Megatron takes about 20 seconds of CPU time, so a test must not start its own processes.
The pool imports them once, forks the workers from that process, and lends them out:

    def sum_of_ranks(factor):                       # at module level: the worker imports it by name
        value = torch.tensor(factor * torch.distributed.get_rank())
        torch.distributed.all_reduce(value)
        return value.item()

    def test_sum(pool):                             # the fixture is in conftest.py
        assert pool.run(sum_of_ranks, 10, world_size=3) == [30, 30, 30]

A worker joins a fresh gloo group, calls the function, and answers "done" or "failed"; when every rank is done
it is told to "finish", and destroys the group and Megatron's global state. A rank that fails leaves the group
at once: its connections close, which frees the ranks that wait for it. Whoever is still stuck after a grace
period is killed and forked anew. The failure that came first is the one reported; what it did to the others
follows in one line each. A new worker is forked from a server that has imported all: in a moment.

What forks ranks itself, as Megatron's engine in a test, gets a process of its own, warm as well:

    in_warm_process(function, *arguments, log=path)
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import datetime
import faulthandler
import fcntl
import gc
import importlib
import importlib.util
import io
import itertools
import logging
import math
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from seeds import seeded

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SEED = 1234
GRACE_SECONDS = 3.0
"""How long a rank may be stuck after another one has failed."""
MOST_THREADS = 150
"""A worker that has more after a run is replaced: each gloo group that something keeps (torch's meshes) has
some, which wake up a hundred times a second."""
CLEAN_UP_SECONDS = 60.0
ORPHAN_SECONDS = 60
WARM_UP_SECONDS = 300.0

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
# Set while a process of the pool starts: importing this file then imports all that a worker needs.
_WARM_UP_ON_IMPORT = "WORKER_POOL_WARM_UP"

# What a peer's end looks like from the other side of a socket: an effect, never the cause.
_CONNECTION_LOST = re.compile(r"connection (closed|reset|refused)|broken pipe|socket closed", re.IGNORECASE)


class WorkerError(RuntimeError):
    """A run failed. `rank` is where it began, `kind` is "raised", "died" or "timed out"."""

    def __init__(self, message: str, rank: int, kind: str):
        super().__init__(message)
        self.rank = rank
        self.kind = kind


# --- arguments and results -------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Pickle with tensors as NumPy bytes: they arrive detached and on the CPU.

    The pipe's own pickler would replace tensors by handles to shared memory, which die with the worker.
    Plain pickle names a loader of Megatron's, for which the receiver would have to import Megatron.
    """

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _restore_tensor, (raw, str(value.dtype).removeprefix("torch."), tuple(value.shape))


def _restore_tensor(raw: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.from_numpy(raw).view(getattr(torch, dtype)).reshape(shape)


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


# --- in the worker ---------------------------------------------------------------------------------------

# The globals of these modules as they are after the import; a run may leave others behind.
_RESTORED_MODULES = ("megatron.core.parallel_state", "megatron.core.tensor_parallel.random")
_untouched_globals: dict[str, dict[str, Any]] = {}


def warm_up() -> None:
    """Import what is slow to import; nothing is left to do in a worker whose fork server did it."""
    if _untouched_globals:
        return
    os.environ.update(ENVIRONMENT)
    for folder in (str(ROOT), str(TESTS)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    import torch.distributed
    import torch.distributed.optim  # Older releases compile it, and cannot once the stand-ins are there.

    torch.set_num_threads(1)
    if importlib.util.find_spec("megatron_patch.megatron.cpu.device") is not None:
        # Megatron asks for CUDA as it is imported: the stand-ins have to be there before it.
        importlib.import_module("megatron_patch.megatron.cpu.device").install()
    for name in (
        "megatron.core",
        "megatron.core.distributed",
        "megatron.core.models.gpt",
        "megatron.core.optimizer",
        "megatron.core.rerun_state_machine",
        "megatron.training",
        "pytest",
        "hypothesis",
    ):
        importlib.import_module(name)
    # Megatron logs hundreds of lines per model and rank, which would bury a test's own output.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    for name in _RESTORED_MODULES:
        _untouched_globals[name] = _copied_globals(sys.modules[name])
    # What was imported is here to stay: collections between runs need not look at it.
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # at the exit of the fork server, or Triton reports all of it as leaked


def _separate_network() -> None:
    """A loopback interface for this process and its children alone, where root may make one.

    Its counters then count nobody else's bytes, and no port is taken.
    """
    try:
        os.unshare(os.CLONE_NEWNET)
    except OSError:
        return
    with socket.socket() as any_socket:
        up = struct.pack("16sh14x", b"lo", 1)  # IFF_UP
        fcntl.ioctl(any_socket, 0x8914, up)  # SIOCSIFFLAGS


def _copied_globals(module: ModuleType) -> dict[str, Any]:
    """The state of a module: its globals, with containers copied since they are changed in place."""
    return {
        name: copy.copy(value) if isinstance(value, dict | list | set) else value
        for name, value in vars(module).items()
        if not name.startswith("__")
    }


def _worker_main(connection: Connection, stack_file: str) -> None:
    """The life of a worker: warm up, then serve one job after another until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal: the parent decides
    os.environ.pop(_WARM_UP_ON_IMPORT, None)
    # The stack goes to a file on a fatal signal, and on SIGUSR1, which the parent sends at a timeout.
    with Path(stack_file).open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks)
        try:
            warm_up()
        except BaseException:
            connection.send(("broken", traceback.format_exc()))
            return
        connection.send(("idle", None))
        # EOFError or a lost pipe here means that the parent is gone.
        with contextlib.suppress(EOFError, OSError):
            while True:
                _serve(connection, connection.recv())


def _serve(connection: Connection, job: dict[str, Any]) -> None:
    environment, arguments, path = dict(os.environ), list(sys.argv), list(sys.path)
    # The parent ends a run that takes too long. Should it be gone itself, SIGALRM kills this process.
    signal.alarm(math.ceil(job["timeout"]) + ORPHAN_SECONDS)
    try:
        outcome = ("done", _call(job))
    except BaseException as error:
        outcome = ("failed", _describe(error))
        # Frames hold on to tensors and groups, which would keep the connections to the peers open.
        traceback.clear_frames(error.__traceback__)
    sys.stdout.flush()  # a worker may be killed at any time from here on
    sys.stderr.flush()
    connection.send(outcome)
    if outcome[0] == "done":
        connection.recv()  # "finish": a rank that closed its sockets early could break a slower one
    problem = _tear_down()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:], sys.path[:] = arguments, path
    signal.alarm(0)
    connection.send(("idle", problem))


def _call(job: dict[str, Any]) -> bytes:
    """Run the job's function as one rank of a fresh group; returns its pickled result."""
    import numpy as np
    import torch

    rank, world_size = job["rank"], job["world_size"]
    os.chdir(ROOT)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    if job["folder"] not in sys.path:
        sys.path.insert(0, job["folder"])
    function = importlib.import_module(job["module"])
    for name in job["qualname"].split("."):
        function = getattr(function, name)
    args, kwargs = pickle.loads(job["arguments"])

    # Later than the parent's own limit, so that a timeout is told by the parent, with stacks.
    patience = datetime.timedelta(seconds=job["timeout"] + ORPHAN_SECONDS)
    store = torch.distributed.FileStore(job["store"], world_size)
    store.set_timeout(patience)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=patience
    )
    random.seed(seeded(SEED))
    np.random.seed(seeded(SEED))
    torch.manual_seed(seeded(SEED))
    return _pickled(function(*args, **kwargs))


def _describe(error: BaseException) -> dict[str, Any]:
    """What the parent needs to know of an exception; the clock is the same in all processes."""
    frames = error.__traceback__
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    summary = "".join(traceback.format_exception_only(error)).strip()
    return {
        "time": time.monotonic(),
        "summary": summary,
        "traceback": "".join(traceback.format_exception(type(error), error, frames)),
        "effect": bool(_CONNECTION_LOST.search(summary)),
    }


def _tear_down() -> str | None:
    """Forget the run: Megatron's globals, the process groups, torch's modes. Returns what went wrong."""
    import torch
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine

    try:
        from megatron.core.transformer.moe import moe_logging
    except ImportError:  # 0.17
        moe_logging = None

    def destroy_groups() -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        # A peer that died while the group was made leaves it counted: the next one would have another name
        # here than on ranks that start afresh, and none would find the others.
        torch.distributed.distributed_c10d._world.group_count = 0

    def destroy_training_globals() -> None:
        global_vars = sys.modules.get("megatron.training.global_vars")
        if global_vars is not None:
            global_vars.destroy_global_vars()

    def restore_globals() -> None:
        # destroy_model_parallel forgets some lists of ranks, and nobody destroys the RNG tracker.
        for name, untouched in _untouched_globals.items():
            state = vars(sys.modules[name])
            for left_behind in [key for key in state if not key.startswith("__") and key not in untouched]:
                del state[left_behind]
            for key, value in untouched.items():
                state[key] = copy.copy(value) if isinstance(value, dict | list | set) else value

    def restore_torch() -> None:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)

    problems = []
    for step in (
        destroy_training_globals,
        num_microbatches_calculator.destroy_num_microbatches_calculator,
        rerun_state_machine.destroy_rerun_state_machine,
        getattr(moe_logging, "destroy_moe_metrics_tracker", restore_torch),  # since 0.18
        parallel_state.destroy_model_parallel,
        destroy_groups,
        restore_globals,
        restore_torch,
        gc.collect,
    ):
        try:
            step()
        except BaseException:
            problems.append(traceback.format_exc())
    return "\n".join(problems) or None


# --- in the parent ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _starting_environment() -> Iterator[None]:
    """The environment in which processes of the pool start; torch reads some of it as it is imported."""
    saved = dict(os.environ)
    folders = [str(TESTS), str(ROOT), *filter(None, [saved.get("PYTHONPATH")])]
    os.environ.update(ENVIRONMENT)
    # The fork server of Python 3.12 imports its preloaded modules before it knows the parent's sys.path.
    os.environ.update({_WARM_UP_ON_IMPORT: "1", "PYTHONPATH": os.pathsep.join(folders)})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


class _Worker:
    """The parent's end of one worker process."""

    def __init__(self, stack_file: Path):
        context = _server()
        self.stack_file = stack_file
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_worker_main, args=(theirs, str(stack_file)), daemon=True)
        with _starting_environment():
            self.process.start()
        theirs.close()
        self.idle = False

    def receive(self) -> tuple[str, Any]:
        """The next message; a worker that is gone answers ("died", how)."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return ("died", {"time": time.monotonic(), "summary": self._how_it_died(), "effect": False})

    def send(self, message: Any) -> None:
        """Send; that the worker is gone shows when the answer is read."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def wait_until_idle(self, seconds: float) -> str | None:
        """Wait for the worker to be free; returns what it had to complain about."""
        if not self.idle and self.connection.poll(max(seconds, 0)):
            kind, detail = self.receive()
            self.idle = kind == "idle"
            return detail["summary"] if kind == "died" else detail
        return None

    def stack(self) -> str:
        """The Python stack of a worker that still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + GRACE_SECONDS
        while not self.stack_file.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)
        return self.stack_file.read_text()

    def threads(self) -> int:
        """The number of its threads."""
        try:
            return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))
        except OSError:
            return 0

    def stop(self, grace: float = 0) -> None:
        self.connection.close()
        self.process.join(grace)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _how_it_died(self) -> str:
        self.process.join(GRACE_SECONDS)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}\n{self.stack_file.read_text()}".strip()
        return f"exit status {code}"


def in_warm_process(function: Callable[..., None], *args: Any, log: Path, timeout: float = 400) -> None:
    """Call a module-level function in a new process, forked from the server that has imported Megatron.

    What it prints is in `log`. Raises RuntimeError where it raised, died or took longer than `timeout`.
    """
    process = _server().Process(target=_warm_main, args=(function, args, str(log)))
    with _starting_environment():
        process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
    if process.exitcode:
        said = log.read_text()[-3000:]
        raise RuntimeError(f"{function.__qualname__}: exit status {process.exitcode}\n{said}")


def _warm_main(function: Callable[..., None], args: tuple[Any, ...], log: str) -> None:
    os.environ.pop(_WARM_UP_ON_IMPORT, None)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    warm_up()
    logging.getLogger("megatron").setLevel(logging.NOTSET)
    os.chdir(ROOT)
    function(*args)


class WorkerPool:
    """Persistent workers that run functions as the ranks of a process group. One run at a time."""

    def __init__(self, size: int = 4):
        self.folder = Path(tempfile.mkdtemp(prefix="worker-pool-"))
        self.workers: list[_Worker] = []
        self._numbers = itertools.count()
        self.size = size
        self._grow(size)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers:
            worker.stop(grace=GRACE_SECONDS)
        self.workers = []
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        timeout: float = 300,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on ranks 0 to world_size-1; returns their results in rank order.

        `world_size` is the size of the pool unless given. `function` must be found under its name in its
        module. Arguments and results travel by pickle. The timeout, in seconds, covers joining the group
        and the call.
        """
        world_size = self.size if world_size is None else world_size
        job = self._job(function, args, kwargs, world_size, timeout)
        self._grow(world_size)
        workers = self._idle_workers(world_size)
        try:
            for rank, worker in enumerate(workers):
                worker.idle = False
                worker.send({**job, "rank": rank})
            outcomes = self._collect(workers, timeout)
            error = _failure(function, outcomes, workers, timeout)
            self._finish(workers, outcomes)
        finally:
            for rank, worker in enumerate(workers):
                if not worker.idle:  # stuck, dead, not clean, or the parent was interrupted
                    worker.stop()
                    self.workers[rank] = self._start_worker()
            Path(job["store"]).unlink(missing_ok=True)
        if error is not None:
            raise error
        return [pickle.loads(outcomes[rank][1]) for rank in range(world_size)]

    def _job(
        self, function: Callable[..., Any], args: tuple, kwargs: dict, world_size: int, timeout: float
    ) -> dict[str, Any]:
        module = sys.modules[function.__module__]
        # The folder from which the worker can import the module under the same name.
        depth = module.__name__.count(".") + hasattr(module, "__path__")
        return {
            "module": module.__name__,
            "qualname": function.__qualname__,
            "folder": str(Path(module.__file__).resolve().parents[depth]),
            "arguments": _pickled((args, kwargs)),
            "world_size": world_size,
            "timeout": timeout,
            "store": str(self.folder / f"store-{next(self._numbers)}"),
        }

    def _start_worker(self) -> _Worker:
        return _Worker(self.folder / f"stack-{next(self._numbers)}")

    def _grow(self, size: int) -> None:
        while len(self.workers) < size:
            self.workers.append(self._start_worker())

    def _idle_workers(self, world_size: int) -> list[_Worker]:
        """The first workers, warm; one that was killed while nobody looked is replaced."""
        for rank in range(world_size):
            worker = self.workers[rank]
            # An idle worker says nothing: what can be read is the end of its pipe.
            if worker.idle and (worker.connection.poll() or not worker.process.is_alive()):
                worker.stop()
                self.workers[rank] = self._start_worker()
        deadline = time.monotonic() + WARM_UP_SECONDS
        for rank, worker in enumerate(self.workers[:world_size]):
            complaint = worker.wait_until_idle(deadline - time.monotonic())
            if not worker.idle:
                worker.stop()
                self.workers[rank] = self._start_worker()
                raise WorkerError(f"worker {rank} did not start: {complaint or 'too slow'}", rank, "died")
        return self.workers[:world_size]

    def _collect(self, workers: list[_Worker], timeout: float) -> dict[int, tuple[str, Any]]:
        """One outcome per rank: done, failed, died, or none from those still running at the end."""
        outcomes: dict[int, tuple[str, Any]] = {}
        ranks = {worker.connection: rank for rank, worker in enumerate(workers)}
        deadline = time.monotonic() + timeout
        while ranks:
            ready = wait(list(ranks), max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for connection in ready:
                rank = ranks.pop(connection)
                outcomes[rank] = workers[rank].receive()
                if outcomes[rank][0] != "done":
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return outcomes

    def _finish(self, workers: list[_Worker], outcomes: dict[int, tuple[str, Any]]) -> None:
        """Let every rank that answered clean up. One that still runs is killed, so that none waits for it."""
        for rank, worker in enumerate(workers):
            if rank not in outcomes:
                worker.stop()
        for rank, (kind, _) in outcomes.items():
            if kind == "done":
                workers[rank].send("finish")
        deadline = time.monotonic() + CLEAN_UP_SECONDS
        for rank, (kind, _) in outcomes.items():
            if kind == "died":
                continue
            problem = workers[rank].wait_until_idle(deadline - time.monotonic())
            if problem is None and workers[rank].threads() > MOST_THREADS:
                workers[rank].idle = False
            if problem is not None:
                workers[rank].idle = False
                warnings.warn(f"rank {rank} was restarted, its state stayed behind:\n{problem}", stacklevel=3)


def _failure(
    function: Callable[..., Any], outcomes: dict[int, tuple[str, Any]], workers: list[_Worker], timeout: float
) -> WorkerError | None:
    """The one exception that tells what went wrong first, or None."""
    failures = {rank: outcome for rank, outcome in outcomes.items() if outcome[0] != "done"}
    running = [rank for rank in range(len(workers)) if rank not in outcomes]
    name = f"{function.__module__}.{function.__qualname__}"
    if not failures and not running:
        return None
    if not failures:
        stacks = [f"rank {rank}:\n{workers[rank].stack()}" for rank in running]
        who = "rank " + ", ".join(map(str, running))
        message = f"{who} of {len(workers)} still in {name} after {timeout:g} s\n" + "\n".join(stacks)
        return WorkerError(message, running[0], "timed out")

    # A peer may see a lost connection before the parent sees the death that caused it.
    first = min(failures, key=lambda rank: (failures[rank][1]["effect"], failures[rank][1]["time"]))
    kind, detail = failures.pop(first)
    verb = "raised" if kind == "failed" else "died"
    lines = [f"rank {first} of {len(workers)} {verb} in {name}: {detail['summary']}"]
    if kind == "failed":
        lines += ["", detail["traceback"].rstrip(), ""]
    for rank, (_, effect) in sorted(failures.items()):
        lines.append(f"then rank {rank}: {effect['summary'].splitlines()[0][:110]}")
    lines += [f"then rank {rank}: still running {GRACE_SECONDS:g} s later, restarted" for rank in running]
    return WorkerError("\n".join(lines), first, verb)


if os.environ.get(_WARM_UP_ON_IMPORT):
    _separate_network()
    # A failure is told by the worker, which tries again and has a pipe to tell it.
    with contextlib.suppress(Exception):
        warm_up()
