"""Starts torchrun on every host of the network, and sends its ranks their orders.

    command --unix socket--> every rank       (one JSON object a line, described in rank.py)
       |  starts, in each namespace
       +--> agent (torchrun) --starts--> ranks

The agents meet by torchrun's c10d rendezvous at host 0's address, over the links as in a cluster. A unix
socket can be reached from every namespace, so that orders are not sent over the links that are measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.network import hosts, lifeline, rank
from megatron_patch.errors import RankFailed

_PORT = 29400
_POLL_SECONDS = 0.2
_LAST_WORDS_SECONDS = 5.0
_CONNECTION_LOST = re.compile(r"connection (closed|reset|refused)|broken pipe|peer", re.IGNORECASE)


class Ranks:
    """All ranks of a network, which run while the block runs.

    Args:
        network: the network, whose hosts are up.
        ranks_per_host: the number of ranks on each host.
        folder: the folder for the socket, the logs and the agents' temporary files.
        patience: the seconds that ranks wait for each other before they fail.
    """

    def __init__(self, network: hosts.Network, ranks_per_host: int, folder: Path, patience: float) -> None:
        self._network = network
        self._per_host = ranks_per_host
        self._folder = folder
        self._patience = patience
        self._agents: list[subprocess.Popen[bytes]] = []
        self._pids: list[int] = []
        self._streams: dict[int, socket.socket] = {}
        self._rests: dict[int, bytes] = {}
        self._hosts: dict[int, int] = {}

    @property
    def count(self) -> int:
        return len(self._network.hosts) * self._per_host

    def __enter__(self) -> Ranks:
        try:
            with _open(self._folder) as descriptor, socket.socket(socket.AF_UNIX) as listener:
                # A socket's path has at most 107 characters, and the temporary folder's may have more.
                path = f"/proc/{os.getpid()}/fd/{descriptor}/channel"
                listener.bind(path)
                listener.listen(self.count)
                for number in range(len(self._network.hosts)):
                    self._start_agent(number, path)
                self._accept(listener)
            self._answers("start")
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            with contextlib.suppress(OSError):
                self._tell({"do": "stop"})
            for agent in self._agents:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.wait(10)
        self._kill()

    def ask(self, **order: Any) -> list[dict[str, Any]]:
        """Send every rank an order, and return their answers by rank.

        Raises:
            RankFailed: a rank failed; the message names it and the cause.
        """
        try:
            self._tell(order)
        except OSError:
            self._answers(order["do"])  # It raises an error that names the rank that has ended.
            raise
        return self._answers(order["do"])

    def _start_agent(self, number: int, channel: str) -> None:
        host = self._network.hosts[number]
        command = [
            *(sys.executable, "-m", "benchmarks.network.agent"),
            *(f"--nnodes={len(self._network.hosts)}", f"--nproc-per-node={self._per_host}"),
            *(f"--node-rank={number}", f"--local-addr={hosts.address(number)}"),
            *("--rdzv-backend=c10d", "--rdzv-id=megatron-loco", "--max-restarts=0"),
            f"--rdzv-endpoint={hosts.address(0)}:{_PORT}",
            f"--rdzv-conf=is_host={int(number == 0)},join_timeout=120,last_call_timeout=1",
            *("-m", "benchmarks.network.rank"),
        ]
        environment = os.environ | {
            "TORCHDYNAMO_DISABLE": "1",  # It is part of cpu_device.CPU_ENVIRONMENT; ranks set the rest.
            "GLOO_SOCKET_IFNAME": hosts.INTERFACE,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TMPDIR": str(self._folder),
            lifeline.PARENT: str(os.getpid()),
            rank.CHANNEL: channel,
            rank.SECONDS: str(self._patience),
        }
        with self._log(number).open("wb") as log, host.entered():
            self._agents.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches only the command, which then ends them.
                )
            )

    def _log(self, number: int) -> Path:
        return self._folder / f"host{number}.log"

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(_POLL_SECONDS)
        end = time.monotonic() + rank.START_SECONDS
        while len(self._streams) < self.count:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                self._check_agents()
                if time.monotonic() > end:
                    found = len(self._streams)
                    raise RankFailed(
                        f"bench network: only {found} of {self.count} ranks started within "
                        f"{rank.START_SECONDS:.0f} s; {self._last_words(0)}"
                    ) from None
                continue
            hello = json.loads(connection.makefile("r", encoding="utf-8").readline())
            self._streams[hello["rank"]] = connection
            self._rests[hello["rank"]] = b""
            self._hosts[hello["rank"]] = hello["host"]
            self._pids.append(hello["pid"])

    def _tell(self, order: dict[str, Any]) -> None:
        line = (json.dumps(order) + "\n").encode()
        for stream in self._streams.values():
            stream.sendall(line)

    def _answers(self, what: str) -> list[dict[str, Any]]:
        """Wait for one line of every rank, and return them in the order of ranks."""
        found: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + max(self._patience, rank.START_SECONDS) + 30
        with selectors.DefaultSelector() as selector:
            for number, stream in self._streams.items():
                selector.register(stream, selectors.EVENT_READ, number)
            while len(found) < self.count:
                for key, _ in selector.select(_POLL_SECONDS):
                    self._read(key.data, found)
                    if key.data in found:
                        selector.unregister(key.fileobj)
                if any("error" in answer for answer in found.values()):
                    end = min(end, time.monotonic() + _LAST_WORDS_SECONDS)
                if time.monotonic() > end:
                    break
        failed = {number: answer for number, answer in found.items() if "error" in answer}
        if failed:
            self._report(what, failed)
        missing = sorted(set(self._streams) - set(found))
        if missing:
            raise RankFailed(
                f"bench network: {what}: no answer from rank {missing[0]} on host {self._hosts[missing[0]]}"
            )
        return [found[number] for number in sorted(found)]

    def _read(self, number: int, found: dict[int, dict[str, Any]]) -> None:
        try:
            data = self._streams[number].recv(1 << 16)
        except ConnectionError:
            data = b""
        self._rests[number] += data
        line, newline, rest = self._rests[number].partition(b"\n")
        if newline:
            self._rests[number] = rest
            found[number] = json.loads(line)
        elif not data:
            found[number] = {"error": "ended without a word", "time": time.monotonic()}

    def _report(self, what: str, failed: dict[int, dict[str, Any]]) -> None:
        # A lost connection is an effect of another rank's failure: report the rank that failed first.
        number, first = min(
            failed.items(),
            key=lambda item: (bool(_CONNECTION_LOST.search(item[1]["error"])), item[1]["time"]),
        )
        host = self._hosts[number]
        raise RankFailed(f"bench network: {what}: rank {number} on host {host}: {first['error']}")

    def _check_agents(self) -> None:
        for number, agent in enumerate(self._agents):
            if agent.poll() is not None:
                raise RankFailed(
                    f"bench network: host {number} ended with status {agent.returncode}; "
                    f"{self._last_words(number)}"
                )

    def _last_words(self, number: int) -> str:
        lines = self._log(number).read_text(encoding="utf-8", errors="replace").split("\n")
        errors = [line.strip() for line in lines if "Error" in line] or [line for line in lines if line]
        return f"host {number} said: {errors[-1] if errors else 'nothing'}"

    def _kill(self) -> None:
        """Kill the remaining agents, which ends their ranks too, and wait until the ranks have ended."""
        for stream in self._streams.values():
            stream.close()
        for agent in self._agents:
            agent.kill()
        for agent in self._agents:
            agent.wait()
        end = time.monotonic() + 5
        while time.monotonic() < end and any(map(_is_rank, self._pids)):
            time.sleep(0.02)


@contextlib.contextmanager
def _open(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_rank(pid: int) -> bool:
    """Whether a process is still one of ours, because the kernel reuses process ids."""
    try:
        return b"benchmarks.network" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
