"""`python -m benchmarks.gpu.page`: writes what the results files say into README.md and docs/benchmarks.md.

README has a sentence about the newest file of a GPU, docs/benchmarks.md a table with a column for the newest
file of each GPU. Both stand between two comments, and change with the files alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.command import ROOT, problems
from megatron_patch.workflows.plan import constants

NOT_RUN = "not run yet"
LINKS = ("no link", "400 Gbit/s", "100 Gbit/s", "25 Gbit/s", "its own links")
SHOWN = ("stock", "stock_bf16", "loco", "loco+exact")
MODELS = {"step 350m": "350 M", "step 1.3b": "1.3 B"}
_BEGIN, _END = "<!-- by benchmarks.gpu.page -->", "<!-- end -->"

Results = dict[str, Any]


def main() -> None:
    for path, text in pages(list(constants.newest(constants.RESULTS).values())).items():
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
    """Yield each row's subject, and what gives its cell of a results file."""
    for part, what in {
        "bits": "GPU kernels' bytes are the CPU kernels' and the reference's",
        "ranks 2": "Megatron, 2 ranks: off trains as stock, the exact gather as without, bit for bit",
        "ranks 4": "Megatron, 4 ranks or more: the same",
        "FSDP2": "FSDP2, 2 ranks: off trains as stock, bit for bit",
        "memory": "compute-sanitizer finds no error",
        "planted": "compute-sanitizer finds an error that is planted",
        "stream order": "torch's sanitizer finds a race that is planted, and no other",
    }.items():
        yield what, partial(_checked, part)
    yield "a copy, 10^12 bytes/s", partial(_rates, [("copy_bytes",)], 1e12)
    for dtype in ("fp32", "bf16"):
        what = f"4 bits, {dtype} gradients: compress, 10^9 elements/s; decompress_reduce, 10^9 codes/s"
        of = f"4 bits, levels, {dtype}"
        yield what, partial(_rates, [(of, "compress"), (of, "decompress of 8")], 1e9)
    of = "weights, 0.00143"
    what = "weight code: encode, decode, sums, 10^9 weights/s"
    yield what, partial(_rates, [(of, "encode"), (of, "decode"), (of, "sums")], 1e9)
    for part, model in MODELS.items():
        for link in LINKS:
            yield f"step, {model} parameters, {link}", partial(_step, part, link)


def _checked(name: str, results: Results) -> str:
    part = results["parts"].get(name, {"not_run": ""})
    if "not_run" in part:
        return f"{NOT_RUN}: {part['not_run']}".removesuffix(": ")
    wrong, checks = problems(part), part.get("checks", {})
    cases = sum(part.get("cases", {}).values())
    random = f", {cases:,} random cases" if cases else ""
    return f"**{'; '.join(wrong)}**" if wrong else f"yes ({len(checks)} checks{random})"


def _rates(paths: Sequence[tuple[str, ...]], unit: float, results: Results) -> str:
    found = []
    for path in paths:
        value: Any = results["parts"].get("rates", {}).get("rates", {})
        for key in path:
            value = None if value is None else value.get(key)
        found.append(NOT_RUN if value is None else f"{value / unit:.3g}")
    return "; ".join(found) if set(found) != {NOT_RUN} else NOT_RUN


def _step(part: str, link: str, results: Results) -> str:
    """Return the milliseconds of stock with fp32 gradients, and its ratio to each of the others."""
    methods = results["parts"].get(part, {}).get("methods", {})
    seconds = [methods.get(name, {}).get(link, {}).get("median") for name in SHOWN]
    if seconds[0] is None:
        return NOT_RUN
    faster = [NOT_RUN if one is None else f"{seconds[0] / one:.2f} x" for one in seconds[1:]]
    return "; ".join([f"{1e3 * seconds[0]:.4g}", *faster])


if __name__ == "__main__":
    main()
