"""The pool of worker processes: what it returns, what it reports when a rank fails, what it forgets."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import worker_pool
from worker_pool import WorkerError, in_warm_process

# --- functions that run in the workers -------------------------------------------------------------------


def sum_of_ranks(factor: int = 1, *, offset: int = 0) -> int:
    value = torch.tensor(factor * torch.distributed.get_rank() + offset)
    torch.distributed.all_reduce(value)
    return value.item()


def describe_group() -> dict:
    return {
        "rank": torch.distributed.get_rank(),
        "environment": [int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")],
        "pid": os.getpid(),
    }


def echo(value: object) -> object:
    return value


def wait_for_peers() -> None:
    torch.distributed.all_reduce(torch.zeros(8))


def fail_on(rank: int, how: str) -> None:
    """Every other rank waits in a collective for the one that fails."""
    if torch.distributed.get_rank() != rank:
        wait_for_peers()
    elif how == "raise":
        raise ValueError("the true cause")
    elif how == "exit":
        os._exit(3)
    else:
        # To this thread: a signal to the process may end it in another one, after this function has returned.
        signal.raise_signal(getattr(signal, how))
        time.sleep(600)  # should the end take its time, as with a core file


def fail_while_others_sleep() -> None:
    if torch.distributed.get_rank() == 1:
        raise ValueError("the true cause")
    time.sleep(600)


def sleep_on(rank: int) -> str:
    if torch.distributed.get_rank() == rank:
        time.sleep(600)
    return "done"


def set_every_state(fail: bool) -> list[str]:
    """Leave behind what a test of the project may leave behind; returns what `states_left` says of it."""
    from argparse import Namespace

    from megatron.core import (
        num_microbatches_calculator,
        parallel_state,
        rerun_state_machine,
        tensor_parallel,
    )
    from megatron.training import global_vars

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, 8, 1, 2, False)
    rerun_state_machine.initialize_rerun_state_machine()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    global_vars.set_args(Namespace(rank=0))
    torch.set_default_dtype(torch.bfloat16)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    if fail:
        raise ValueError("with all of that set")
    return states_left()


def states_left() -> list[str]:
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.training import global_vars

    left = {
        "parallel state": parallel_state.model_parallel_is_initialized(),
        "list of ranks": parallel_state._DATA_PARALLEL_GLOBAL_RANKS is not None,
        "microbatches": num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None,
        "rerun": rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE is not None,
        "random": megatron_random._CUDA_RNG_STATE_TRACKER is not None,
        "random initialized": megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED,
        "args": global_vars._GLOBAL_ARGS is not None,
        "dtype": torch.get_default_dtype() != torch.float32,
        "gradients": not torch.is_grad_enabled(),
        "environment": "LEFT_BEHIND" in os.environ,
        "folder": Path.cwd() != Path(__file__).resolve().parents[1],
        "groups": len(torch.distributed.distributed_c10d._world.pg_map) != 1,
    }
    return [name for name, is_left in left.items() if is_left]


# --- what it returns -------------------------------------------------------------------------------------


def test_results_come_back_in_rank_order(pool):
    assert pool.run(sum_of_ranks, 10, offset=1) == [64, 64, 64, 64]
    groups = pool.run(describe_group)
    assert [group["rank"] for group in groups] == [0, 1, 2, 3]
    for rank, group in enumerate(groups):
        assert group["environment"] == [rank, rank, 4]


def test_arguments_and_results_travel(pool, tmp_path):
    large = np.arange(3_000_000, dtype=np.float32)  # more than a pipe holds at once
    tensors = [
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor(1.5),
        torch.empty(0, 4),
        torch.arange(12).reshape(3, 4).T,
        torch.nn.Parameter(torch.tensor([1.0])) * 2,
    ]
    value = {"array": large, "path": tmp_path, "tensors": tensors, "none": None}
    for result in pool.run(echo, value, world_size=2):
        assert np.array_equal(result["array"], large)
        assert result["path"] == tmp_path
        for sent, received in zip(tensors, result["tensors"], strict=True):
            assert received.dtype == sent.dtype
            assert torch.equal(received, sent)


# --- what it reports -------------------------------------------------------------------------------------


def test_the_rank_that_raised_is_the_cause(pool, monkeypatch):
    monkeypatch.setattr(worker_pool, "GRACE_SECONDS", 60.0)  # for machines that are busy
    before = [group["pid"] for group in pool.run(describe_group)]
    with pytest.raises(WorkerError, match="the true cause") as caught:
        pool.run(fail_on, 2, "raise")
    assert (caught.value.rank, caught.value.kind) == (2, "raised")
    message = str(caught.value)
    assert message.startswith("rank 2 of 4 raised in test_worker_pool.fail_on: ValueError: the true cause")
    assert 'raise ValueError("the true cause")' in message  # its traceback
    assert message.count("Traceback") == 1  # and nobody else's
    then = [line[:12] for line in message.splitlines() if line.startswith("then")]
    assert then == ["then rank 0:", "then rank 1:", "then rank 3:"]
    # Its peers were freed by the lost connection: nobody had to be restarted.
    assert [group["pid"] for group in pool.run(describe_group)] == before


def test_stuck_peers_are_restarted_after_the_grace_period(pool):
    with pytest.raises(WorkerError, match="ValueError") as caught:
        pool.run(fail_while_others_sleep)
    assert (caught.value.rank, caught.value.kind) == (1, "raised")
    assert "still running 3 s later, restarted" in str(caught.value)
    assert pool.run(sum_of_ranks) == [6] * 4


@pytest.mark.parametrize(
    ("how", "said"), [("exit", "exit status 3"), ("SIGKILL", "SIGKILL"), ("SIGSEGV", "SIGSEGV.*in fail_on")]
)
def test_a_worker_that_dies_is_the_cause(pool, how, said):
    with pytest.raises(WorkerError, match=f"(?s)rank 1 of 4 died in .*: .*{said}") as caught:
        pool.run(fail_on, 1, how)
    assert (caught.value.rank, caught.value.kind) == (1, "died")
    assert pool.run(sum_of_ranks) == [6] * 4


def test_a_timeout_names_the_rank_and_where_it_is(pool):
    with pytest.raises(WorkerError, match=r"(?s)rank 3 of 4 still in .* after 1 s.*in sleep_on") as caught:
        pool.run(sleep_on, 3, timeout=1)
    assert (caught.value.rank, caught.value.kind) == (3, "timed out")
    assert pool.run(sum_of_ranks) == [6] * 4


# --- what it forgets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fail", [False, True])
def test_nothing_is_left_of_a_run(pool, fail):
    if fail:
        with pytest.raises(WorkerError, match="with all of that set"):
            pool.run(set_every_state, True)
    else:
        assert [len(left) for left in pool.run(set_every_state, False)] == [12] * 4
    assert pool.run(states_left) == [[], [], [], []]


# --- beside it -------------------------------------------------------------------------------------------


def fork_a_child(folder: Path, status: int) -> None:
    child = os.fork()
    if child == 0:
        os._exit(status)
    _, ended = os.waitpid(child, 0)
    (folder / "found").write_text(f"{os.waitstatus_to_exitcode(ended)} {'megatron.training' in sys.modules}")
    if status:
        raise ValueError("as asked")


def test_a_warm_process_has_megatron_may_fork_and_tells_how_it_failed(tmp_path):
    start = time.monotonic()
    in_warm_process(fork_a_child, tmp_path, 0, log=tmp_path / "log")
    assert (tmp_path / "found").read_text() == "0 True"
    with pytest.raises(RuntimeError, match=r"(?s)fork_a_child: exit status 1.*ValueError: as asked"):
        in_warm_process(fork_a_child, tmp_path, 3, log=tmp_path / "log")
    assert (tmp_path / "found").read_text() == "3 True"
    with pytest.raises(RuntimeError, match="sleep: exit status -9"):
        in_warm_process(time.sleep, 600, log=tmp_path / "log", timeout=1)
    assert time.monotonic() - start < 60
