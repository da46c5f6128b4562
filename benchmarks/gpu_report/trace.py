"""Summarises a profiler's trace by CUDA stream: what runs where, what overlaps, and what is exposed.

The trace is torch.profiler's JSON (Chrome's format): events of category "kernel", "gpu_memcpy" or
"gpu_memset" with a stream, a beginning and a length in microseconds.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_OURS = (
    *("compress_kernel", "decompress_reduce_kernel", "count_kernel", "sizes_kernel", "place_kernel"),
    *("pack_kernel", "apply_kernel", "verdict_kernel", "sums_kernel", "_fold_kernel"),
)

Spans = list[tuple[float, float]]


def kind_of(name: str) -> str:
    """Return what a kernel is for: "nccl", "compression", or "other"."""
    if "nccl" in name.lower():
        return "nccl"
    return "compression" if any(name.startswith(one) for one in _OURS) else "other"


def read(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def summary(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return milliseconds of all steps in the trace.

    Returns:
        `span_ms`: the time from the first to the last operation. `busy_ms`: the time in which any operation
        runs. `kinds`: for each kind the time in which it runs, and `exposed_ms`, in which nothing of kind
        "other" runs beside it. `streams`: for each stream the number of operations, the time in which it is
        busy, and its five longest kernels.
    """
    streams: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    kinds: dict[str, Spans] = {"nccl": [], "compression": [], "other": []}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _ON_GPU:
            start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
            stream = event.get("args", {}).get("stream", event.get("tid"))
            streams[str(stream)].append((start, end, event["name"]))
            kinds[kind_of(event["name"])].append((start, end))
    every = [(start, end) for found in streams.values() for start, end, _ in found]
    if not every:
        return {"span_ms": 0.0, "busy_ms": 0.0, "kinds": {}, "streams": {}}
    other = _joined(kinds["other"])
    return {
        "span_ms": (max(end for _, end in every) - min(start for start, _ in every)) / 1e3,
        "busy_ms": _length(_joined(every)) / 1e3,
        "kinds": {
            kind: {
                "busy_ms": _length(_joined(spans)) / 1e3,
                "exposed_ms": (_length(_joined([*spans, *other])) - _length(other)) / 1e3,
            }
            for kind, spans in kinds.items()
        },
        "streams": {stream: _of_stream(found) for stream, found in sorted(streams.items())},
    }


def _of_stream(found: Sequence[tuple[float, float, str]]) -> dict[str, Any]:
    by_name: dict[str, float] = defaultdict(float)
    for start, end, name in found:
        by_name[name] += (end - start) / 1e3
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:5]
    busy = _length(_joined([(start, end) for start, end, _ in found])) / 1e3
    return {"operations": len(found), "busy_ms": busy, "longest_ms": dict(longest)}


def _joined(spans: Spans) -> Spans:
    joined: Spans = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)
