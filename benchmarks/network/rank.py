"""Runs a rank of the network benchmark: one process, one process group, one cell after another.

    command                                             every rank
    {"do": "prepare", "method": ..., ...}    ------>    builds a new model, takes a few steps
                                             <------    {"unshaped_step_seconds": [...], ...}
    (sets the links' rate)
    {"do": "measure", "steps": ..., ...}     ------>    steps, from barrier to barrier
                                             <------    {"laps": [...], "sent": ..., "received": ...}
    {"do": "links", "most": ...}             ------>    times collectives alone (collectives.py)
                                             <------    {"curves": [...]}
    {"do": "stop"}                           ------>    ends

Processes are reused because importing Megatron takes seconds of processor time. Bytes are those of the host's
interface, which each rank reads from the kernel's counters (/proc/self/net/dev belongs to its namespace).
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.network.lifeline import die_with_parent

CHANNEL = "MEGATRON_LOCO_NETWORK_CHANNEL"
SECONDS = "MEGATRON_LOCO_NETWORK_SECONDS"
"""How long a collective may take before the run fails."""
START_SECONDS = 120.0
"""How long ranks may take to start and meet, while all of them import Megatron on few cores."""


def counters(interface: str, text: str) -> tuple[int, int]:
    """Return (bytes sent, bytes received) of an interface, from the text of /proc/net/dev."""
    for line in text.splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            fields = numbers.split()
            return int(fields[8]), int(fields[0])
    raise KeyError(interface)


def _read_counters() -> list[int]:
    """Return the bytes sent and received by the host's interface, and those sent within the host."""
    text = Path("/proc/self/net/dev").read_text(encoding="ascii")
    return [*counters("eth0", text), counters("lo", text)[0]]


class _Cells:
    """Answers the orders about cells; it holds the training of the current one."""

    def __init__(self) -> None:
        self.training: Any = None

    def prepare(self, order: dict[str, Any]) -> dict[str, Any]:
        import torch.distributed as dist

        from benchmarks.network import (
            ddp_training,
            fsdp2_training,
            megatron_fsdp_training,
            megatron_training,
        )
        from benchmarks.network.llama import Llama
        from benchmarks.network.methods import parse
        from megatron_patch.session import trial

        if self.training is not None:
            self.training.close()
            self.training = None
        method = parse(order["method"])
        llama = Llama(**order["llama"])
        overlap, learning_rate = order["overlap"], order["learning_rate"]
        unmeasured = method.settle(order["settle"])
        compression = method.compression(order["ranks_per_host"], order["settle"])
        if method.kind == "ddp":
            self.training = ddp_training.DdpTraining(
                llama,
                powersgd_rank=method.powersgd_rank,
                compression=compression,
                learning_rate=learning_rate,
                overlap=overlap,
            )
            unmeasured += ddp_training.POWERSGD_START if method.powersgd_rank else 0
        elif method.kind in ("fsdp2", "hsdp"):
            shards = order["ranks_per_host"] if method.kind == "hsdp" else dist.get_world_size()
            assert compression is not None
            self.training = fsdp2_training.Fsdp2Training(
                llama, shards=shards, compression=compression, learning_rate=learning_rate
            )
        elif method.kind == "mfsdp":
            assert compression is not None
            self.training = megatron_fsdp_training.MegatronFsdpTraining(
                llama, compression=compression, learning_rate=learning_rate, buckets=order["buckets"]
            )
        else:
            self.training = megatron_training.MegatronTraining(
                llama,
                gradients="fp32" if method.bits == 32 else "bf16",
                fp32_accumulation=method.fp32_accumulation,
                replicated=method.replicated,
                compression=compression,
                learning_rate=learning_rate,
                buckets=order["buckets"],
                overlap=overlap,
                instances=dist.get_world_size() // order["ranks_per_host"] if method.outer > 1 else 1,
            )
        # A measurement begins right after an outer step has ended, and so contains all of the next one.
        unmeasured += (method.outer_delay - unmeasured - order["steps"]) % method.outer
        self.training.counters = _read_counters
        trial.FIRST = 1 << 60  # It begins when it is asked for.
        first = [self.training.step(order["accumulation"]) for _ in range(unmeasured)]
        laps = [self.training.step(order["accumulation"]) for _ in range(order["steps"])]
        return {
            "unshaped_step_seconds": [lap.step for lap in laps],
            "weight_bits_first_steps": [self._weight_bits(lap) for lap in first] if method.exact else None,
        }

    def _weight_bits(self, *laps: Any) -> float | None:
        """Return the mean bits per weight of some steps; None if no weight is gathered."""
        sent = self.training.weights_sent
        return 8 * statistics.fmean(lap.weight_bytes for lap in laps) / sent if sent else None

    def measure(self, order: dict[str, Any]) -> dict[str, Any]:
        import torch.distributed as dist

        dist.barrier()
        before = _read_counters()
        dist.barrier()
        laps = [self.training.step(order["accumulation"]) for _ in range(order["steps"])]
        after = _read_counters()
        sent, received, loopback = (b - a for a, b in zip(before, after, strict=True))
        return {
            "laps": [[lap.step, lap.exchange, lap.gather] for lap in laps],
            "sent": sent,
            "received": received,
            "loopback": loopback,
            "exchange_sent": sum(lap.exchange_sent for lap in laps),
            "exchange_received": sum(lap.exchange_received for lap in laps),
            "gradient_bytes": statistics.fmean(lap.gradient_bytes for lap in laps),
            "weight_bytes": statistics.fmean(lap.weight_bytes for lap in laps),
            "weight_bits": self._weight_bits(*laps),
        }

    def trial(self, order: dict[str, Any]) -> dict[str, Any]:
        """Train until the turns have ended; returns what they found, and which weight gather is kept."""
        from dataclasses import asdict

        from megatron_patch.megatron.attach import attachment_of
        from megatron_patch.session import trial

        attachment: Any = attachment_of(self.training.model)
        turns, session = attachment.trial, attachment.session
        trial.FIRST, session.kept, turns.table = 1, None, None
        steps = 0
        while session.kept is None:
            self.training.step(order["accumulation"])
            steps += 1
        trial.FIRST = 1 << 60
        rows = [asdict(row) | {"verdict": row.verdict} for row in turns._rows()]
        return {"kept": session.kept.weights, "steps": steps, "rows": rows}


def _curves(_: _Cells, order: dict[str, Any]) -> dict[str, Any]:
    from benchmarks.network import collectives

    return {"curves": collectives.measure(order["ranks_per_host"], order["most"])}


_ANSWERS = {"prepare": _Cells.prepare, "measure": _Cells.measure, "trial": _Cells.trial, "links": _curves}


def _start() -> None:
    import datetime
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    from megatron_patch.megatron.cpu import device as cpu_device

    cpu_device.install()
    patience = datetime.timedelta(seconds=float(os.environ[SECONDS]))
    dist.init_process_group("gloo", timeout=max(patience, datetime.timedelta(seconds=START_SECONDS)))
    dist.distributed_c10d._set_pg_timeout(patience)
    from benchmarks.network import gloo_fixes, training

    gloo_fixes.install()
    for name in ("megatron", "megatron_patch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    training.initialize()


def main() -> int:
    """Answer orders until `stop` or an error, and return the exit status."""
    rank = int(os.environ["RANK"])
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ[CHANNEL])
    stream = connection.makefile("rw", encoding="utf-8", newline="\n")

    def say(**answer: Any) -> None:
        stream.write(json.dumps(answer) + "\n")
        stream.flush()

    try:
        say(rank=rank, pid=os.getpid(), host=int(os.environ["GROUP_RANK"]))
        _start()
        cells = _Cells()
        say(ready=True)
        for line in stream:
            order = json.loads(line)
            if order["do"] == "stop":
                break
            say(**_ANSWERS[order["do"]](cells, order))
    except Exception as error:
        traceback.print_exc()
        summary = " ".join(f"{type(error).__name__}: {error}".split())
        say(error=summary, time=time.monotonic())
        return 1
    return 0


if __name__ == "__main__":
    die_with_parent()
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # Otherwise gloo's threads wait for peers that may have ended already.
