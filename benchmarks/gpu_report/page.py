"""Makes the report's page in Markdown, mostly of ratios; both numbers of a ratio are from one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any


def page(report: dict[str, Any]) -> str:
    """Return the page of a report, which is the content of report.json."""
    gpus = next((one["gpus"] for one in report.values()), 0)
    of = (
        f"{gpus} GPU{'s' if gpus > 1 else ''}"
        if gpus
        else "stand-ins on the CPU: no number here means anything"
    )
    lines = ["# megatron-loco on a GPU", "", f"Of {of}. All numbers: report.json.", ""]
    for name, one in report.items():
        lines += [f"## {name.capitalize()}", ""]
        found = one["found"]
        for problem in _problems(found):
            lines.append(f"- **{problem}**")
        lines += [*_PAGES[name](found), f"({one['seconds']:.0f} s)", ""]
    return "\n".join(lines)


def _problems(found: dict[str, Any], where: str = "") -> Iterator[str]:
    for key in ("failed", "not_run"):
        if found.get(key):
            yield f"{where}{key.replace('_', ' ')}: {found[key]}"
    for name, value in found.items():
        if isinstance(value, dict):
            yield from _problems(value, f"{where}{name}: ")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def _environment(found: dict[str, Any]) -> list[str]:
    parts = [found[name] for name in ("doctor", "gpu", "topology") if found.get(name)]
    return ["```", *(line for part in parts for line in part.rstrip().splitlines()), "```", ""]


def _tests(found: dict[str, Any]) -> list[str]:
    counts = ", ".join(
        f"{found[what]} {what}"
        for what in ("passed", "failed", "skipped")
        if isinstance(found.get(what), int)
    )
    return [counts, ""] if counts else []


def _kernels(found: dict[str, Any]) -> list[str]:
    rows = []
    for name, one in found.items():
        if "elements_per_second" not in one:
            continue
        copy = 2 * one["memcpy_bytes_per_second"]
        for what, rate in one["elements_per_second"].items():
            rows.append(
                [
                    name,
                    f"compress, {what}",
                    f"{rate / 1e9:.1f}",
                    f"{rate * one['bytes_per_element'] / copy:.0%}",
                ]
            )
        rate = one["decompress_reduce_elements_per_second"]
        share = rate * one["decompress_reduce_bytes_per_element"] / copy
        rows.append([name, "decompress_reduce", f"{rate / 1e9:.1f}", f"{share:.0%}"])
    return _table(["gradients", "what", "G elements/s", "of a copy's rate"], rows)


def _deepspeed(found: dict[str, Any]) -> list[str]:
    if "seconds" not in found:
        return []
    rows = [
        [what, *(f"{1e6 * one[who]:.0f}" for who in _WHO), f"{one[_WHO[1]] / one[_WHO[0]]:.2f} x"]
        for what, one in found["seconds"].items()
    ]
    head = f"{found['elements']:,} gradients in fp16, 4 bits with error feedback, one GPU."
    return [head, "", *_table(["what", *(f"{who} (us)" for who in _WHO), "ratio"], rows)]


def _exchanges(found: dict[str, Any]) -> list[str]:
    if "seconds" not in found:
        return []
    stock = found["seconds"]["reduce-scatter in bf16"]
    rows = [
        [what, f"{1e3 * seconds:.2f}", f"{stock / seconds:.2f} x"]
        for what, seconds in found["seconds"].items()
    ]
    head = f"{found['elements']:,} gradients, {found['ranks']} ranks, {found['backend']}, nothing beside it."
    return [head, "", *_table(["exchange", "ms", "against bf16"], rows)]


def _training(found: dict[str, Any]) -> list[str]:
    rows, traces = [], []
    stock = _step(found.get("stock", {}))
    for name, one in found.items():
        if (step := _step(one)) is None:
            continue
        ratio = f"{stock / step:.2f} x" if stock else "-"
        compression = 1e3 * (one.get("compression_seconds_per_step") or 0)
        memory = one.get("peak_memory_bytes", 0) / 1e9
        rows.append([name, f"{1e3 * step:.1f}", ratio, f"{compression:.1f}", f"{memory:.1f}"])
        for kind, times in one.get("trace", {}).get("kinds", {}).items():
            traces.append([name, kind, f"{times['busy_ms']:.1f}", f"{times['exposed_ms']:.1f}"])
    lines = _table(["run", "step (ms)", "against stock", "compression (ms)", "peak memory (GB)"], rows)
    single = [one for one in found.values() if isinstance(one, dict) and one.get("ranks") == 1]
    if single:
        lines += ["One rank: nothing is exchanged, and nothing is compressed.", ""]
    if traces:
        lines += ["Two profiled steps, by kind of kernel; exposed: nothing else runs beside it.", ""]
    return lines + _table(["run", "kernels", "busy (ms)", "exposed (ms)"], traces)


def _connections(found: dict[str, Any]) -> list[str]:
    rows = [
        [number, f"{1e3 * step:.1f}"] for number, one in found.items() if (step := _step(one)) is not None
    ]
    return _table(["CUDA_DEVICE_MAX_CONNECTIONS", "step (ms)"], rows)


def _sanitizers(found: dict[str, Any]) -> list[str]:
    races, errors = found.get("torch", {}).get("races"), found.get("compute-sanitizer", {}).get("errors")
    said = [f"torch's sanitizer: {races} races"] if races is not None else []
    said += [f"compute-sanitizer: {errors} errors"] if errors is not None else []
    return [*said, ""] if said else []


def _step(one: Any) -> float | None:
    return one["step_seconds"]["median"] if isinstance(one, dict) and "step_seconds" in one else None


_WHO = ("megatron-loco", "DeepSpeed")
_PAGES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "environment": _environment,
    "tests": _tests,
    "kernels": _kernels,
    "deepspeed": _deepspeed,
    "exchanges": _exchanges,
    "training": _training,
    "connections": _connections,
    "sanitizers": _sanitizers,
}
