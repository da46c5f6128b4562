"""`python -m benchmarks.gpu.page`: writes what the results files say into README.md and docs/benchmarks.md.

README has a sentence about the newest file of a GPU, docs/benchmarks.md a table with a column for the newest
file of each GPU. Both stand between two comments, and change with the files alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.command import ROOT, problems
from megatron_patch.workflows.plan import measured

NOT_RUN = "not run yet"
LINKS = ("no link", "400 Gbit/s", "100 Gbit/s", "25 Gbit/s", "its own links")
MODELS = {"step 350m": "350 M", "step 1.3b": "1.3 B"}
_BEGIN, _END = "<!-- by benchmarks.gpu.page -->", "<!-- end -->"

Results = dict[str, Any]


def main() -> None:
    for path, text in pages(list(measured.newest(measured.RESULTS).values())).items():
        path.write_text(text, encoding="utf-8")


def pages(every: list[Results]) -> dict[Path, str]:
    """Return the pages' texts with these results, the newest last, one for each GPU."""
    said = {ROOT / "README.md": sentence(every), ROOT / "docs/benchmarks.md": table(every)}
    between = re.compile(f"{_BEGIN}.*?{_END}", re.DOTALL)
    found = {}
    for path, what in said.items():
        whole = f"{_BEGIN}{what}{_END}"
        text, times = between.subn(lambda _, whole=whole: whole, path.read_text(encoding="utf-8"))  # type: ignore[misc]
        assert times == 1, f"{path} has no place for it, or several"
        found[path] = text
    return found


def sentence(every: list[Results]) -> str:
    if not every:
        return "**no GPU has run it**, though its kernels compile for Ampere to Blackwell"
    newest = every[-1]
    checks = [good for part in newest["parts"].values() for good in part.get("checks", {}).values()]
    failed = [f"{name}: {line}" for name, part in newest["parts"].items() for line in problems(part)]
    of = f"{newest['gpus']} {'GPU' if newest['gpus'] == 1 else 'GPUs'} ({newest['device']}, {newest['date']})"
    told = f"on {of} {sum(checks)} of {len(checks)} checks passed"
    return f"{told}; **{'; '.join(failed)}**" if failed else told


def table(every: list[Results]) -> str:
    columns = [f"{results['device']}, {results['date']}" for results in every] or ["one GPU"]
    lines = ["", " | ".join(["| what", *columns]) + " |", "| --- |" + " --- |" * len(columns)]
    for what, cell in rows():
        cells = [cell(results) for results in every] or [NOT_RUN]
        lines.append(" | ".join([f"| {what}", *cells]) + " |")
    return "\n".join(["", *lines, "", ""])


def rows() -> Iterator[tuple[str, Callable[[Results], str]]]:
    """Yield each row's subject, and what a results file says of it."""
    for part, what in {
        "bits": "GPU kernels' bytes are the CPU kernels' and the reference's",
        "ranks 2": "Megatron, 2 ranks: off trains as stock, the exact gather as without, bit for bit",
        "ranks 4": "Megatron, 4 ranks or more: the same",
        "FSDP2": "FSDP2, 2 ranks: off trains as stock, bit for bit",
        "memory": "compute-sanitizer finds no error",
        "planted": "compute-sanitizer finds an error that is planted",
        "stream order": "torch's sanitizer finds a race that is planted, and no other",
    }.items():
        yield what, lambda results, part=part: _checked(results["parts"].get(part, {}))  # type: ignore[misc]
    yield "a copy, 10^12 bytes/s", lambda results: _rates(results, ("copy_bytes",), 1e12)
    for key, what in {"4 bits, levels, fp32": "fp32", "4 bits, levels, bf16": "bf16"}.items():
        at = ((key, "compress"), (key, "decompress of 8"))
        what = f"4 bits, {what} gradients: compress, 10^9 elements/s; decompress_reduce, 10^9 codes/s"
        yield what, lambda results, at=at: _rates(results, at, 1e9)  # type: ignore[misc]
    code = tuple(("weights, 0.00143", rate) for rate in ("encode", "decode", "sums"))
    yield "weight code: encode, decode, sums, 10^9 weights/s", lambda results: _rates(results, code, 1e9)
    for part, model in MODELS.items():
        for link in LINKS:
            what = f"step, {model} parameters, {link}"
            yield what, lambda results, part=part, link=link: _step(results, part, link)  # type: ignore[misc]


def _checked(part: dict[str, Any]) -> str:
    if not part or "not_run" in part:
        return f"{NOT_RUN}{': ' + part['not_run'] if part else ''}"
    wrong, checks = problems(part), part.get("checks", {})
    cases = sum(part.get("cases", {}).values())
    random = f", {cases:,} random cases" if cases else ""
    return f"**{'; '.join(wrong)}**" if wrong else f"yes ({len(checks)} checks{random})"


def _rates(results: Results, at: tuple[Any, ...], unit: float) -> str:
    found = []
    for where in at:
        value: Any = results["parts"].get("rates", {}).get("rates", {})
        what, *rate = (where,) if isinstance(where, str) else where
        value = value.get(what)
        if value is not None and rate:
            value = value.get(rate[0])
        found.append(NOT_RUN if value is None else f"{value / unit:.3g}")
    return "; ".join(found) if set(found) != {NOT_RUN} else NOT_RUN


def _step(results: Results, part: str, link: str) -> str:
    """Return the median step, and of the compressed ones the ratio to stock's fp32 gradients."""
    methods = results["parts"].get(part, {}).get("methods", {})
    times = [methods.get(name, {}).get(link, {}).get("median") for name in ("stock", "loco", "loco+exact")]
    if times[0] is None:
        return NOT_RUN
    faster = [NOT_RUN if one is None else f"{times[0] / one:.2f} x" for one in times[1:]]
    return "; ".join([f"{1e3 * times[0]:.4g}", *faster])


if __name__ == "__main__":
    main()
