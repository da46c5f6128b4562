"""After a failed collective: which ranks are lost.

When a host's link is cut, every backend says that something timed out, and none says who. So each rank that
sees a collective fail reports to the job's store (torch.distributed's own), and looks who else does:

    reported, like this rank     alive: a victim
    silent                       lost: its process is gone, or its link is down
    nobody, not even itself      the store is out of reach: this rank's own link is down, or the store's host

It happens once, after the collective's own time limit, and takes a quarter of that or `ROLL_CALL_SECONDS`.
With NCCL a wait does not fail (unless TORCH_NCCL_BLOCKING_WAIT is set): its watchdog ends the process.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_patch.collectives.topology import time_limit

ROLL_CALL_SECONDS = 10.0
"""How long a rank waits for others to report; they may have begun to wait for the lost one later."""
_STORE_SECONDS = 2.0
_SLACK_SECONDS = 0.5
_ONE_BY_ONE_SECONDS = 0.1


class ExchangeFailed(RuntimeError):
    """A collective failed; the text names the ranks that are lost. The backend's own error is its cause."""


@contextlib.contextmanager
def naming_lost_ranks(what: str, *groups: dist.ProcessGroup | None) -> Iterator[None]:
    """Within the block, a failed collective raises ExchangeFailed.

    Args:
        what: was done, for the message.
        groups: whose ranks are asked; those that are None are left out, all ranks where there is none.
    """
    try:
        yield
    except ExchangeFailed:
        raise
    except RuntimeError as error:
        if isinstance(error, NotImplementedError) or not _lost_connection(error):
            raise
        asked = {rank for group in groups if group for rank in dist.get_process_group_ranks(group)}
        raise ExchangeFailed(describe(what, sorted(asked or range(dist.get_world_size())))) from error


def _lost_connection(error: RuntimeError) -> bool:
    """Whether a backend gave up on a peer: gloo has no error type of its own."""
    text = str(error).lower()
    words = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe", "unreachable")
    return isinstance(error, dist.DistNetworkError) or any(word in text for word in words)


def describe(what: str, ranks: Sequence[int]) -> str:
    """Call the roll; one line that says who did not answer."""
    rank = dist.get_rank()
    world = dist.group.WORLD
    assert world is not None
    limit = time_limit(world).total_seconds()
    seconds = min(ROLL_CALL_SECONDS, limit / 4)
    present = roll_call(distributed_c10d._get_default_store(), rank, ranks, seconds)
    me = f"rank {rank} on {socket.gethostname()}"
    if not present:
        return (
            f"{what} failed on {me}: it reaches neither the others nor the job's store at "
            f"{_store_address()}; the link of this host is down, or that of the store's"
        )
    lost = [other for other in ranks if other not in present]
    if not lost:
        return f"{what} failed on {me}: all {len(ranks)} ranks concerned are alive; see the first error"
    return (
        f"{what} failed on {me}: no answer from {name_ranks(lost)} within the time limit of {limit:.0f} s, "
        f"nor in {seconds:.0f} s after it ({len(present)} of {len(ranks)} ranks answered): the process is "
        "gone, or the link of its host is down"
    )


def roll_call(store: dist.Store, rank: int, ranks: Sequence[int], seconds: float) -> set[int]:
    """Report `rank` in the store, and wait until all of `ranks` have reported, or `seconds` are over.

    Returns those that have; empty where the store does not answer.
    """
    prefix = f"megatron-loco/alive/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    keys = {other: f"{prefix}/{other}" for other in ranks}
    reported = _within(lambda: store.set(keys[rank], "1"), _STORE_SECONDS)
    if not reported or not _arrived(store, [keys[rank]], _STORE_SECONDS):
        return set()
    if _arrived(store, list(keys.values()), seconds):
        return set(ranks)
    return {rank} | {
        other for other, key in keys.items() if other != rank and _arrived(store, [key], _ONE_BY_ONE_SECONDS)
    }


def _arrived(store: dist.Store, keys: list[str], seconds: float) -> bool:
    return _within(lambda: store.wait(keys, datetime.timedelta(seconds=seconds)), seconds)


def _within(call: Callable[[], object], seconds: float) -> bool:
    """Whether a call to the store came through.

    In a thread of its own: a TCPStore that timed out tells the store so, and waits minutes for its answer.
    """
    done = threading.Event()

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # DistStoreError, DistNetworkError
            call()
            done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds + _SLACK_SECONDS)
    return done.is_set()


def name_ranks(ranks: Sequence[int], most: int = 8) -> str:
    """`rank 3`, `ranks 3, 4`, or the first of many and how many more there are."""
    shown = ", ".join(map(str, ranks[:most]))
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _store_address() -> str:
    return f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
