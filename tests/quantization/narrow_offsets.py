"""Offsets of a Triton kernel that are computed in 32 bits from sizes, by its intermediate code (TTIR).

A size, the number of a program or that of a round of a loop is no bounded number: their products and sums
wrap from 2^31 on, and what is added to a pointer must be computed in 64 bits. Numbers that were loaded, or
cut to 32 bits on purpose, are bounded by what they are. A loop's end only ends it.
"""

from __future__ import annotations

import re

_ARITHMETIC = {"arith.muli", "arith.addi", "arith.subi", "arith.shli"}
_UNBOUNDED = {"tt.get_program_id", "tt.get_num_programs"}
_BOUNDED = {"arith.trunci", "tt.load", "tt.make_range", "arith.constant", "arith.fptosi"}
_OPERATION = re.compile(r"^\s*(%[\w.]+)(?::\d+)? = \"?([\w.]+)\"?(.*?)( loc\(.*)?$")
_NAME = re.compile(r"%[\w.]+")


def narrow_offsets(ttir: str) -> list[str]:
    """The lines that add such an offset to a pointer."""
    sizes: set[str] = set()
    """i32 numbers that come of sizes."""
    wrapping: set[str] = set()
    """Numbers of any width that come of 32-bit arithmetic on sizes."""
    found = []
    for line in ttir.splitlines():
        if "tt.func" in line:
            sizes |= set(re.findall(r"(%[\w.]+): i32\b", line))
            continue
        if not (matched := _OPERATION.match(line)):
            continue
        result, operation, rest, _ = matched.groups()
        names = _NAME.findall(rest)
        made = {result}
        if operation == "scf.for":
            counter, low = names[:2]
            made |= {counter, *re.findall(r"(%[\w.]+) = ", rest.partition("iter_args")[2])}
        sizes -= made  # Sibling regions use the same names.
        wrapping -= made
        if operation == "scf.for":
            if rest.split(" loc(")[0].rstrip(" {").endswith(": i32"):
                sizes.add(counter)
            wrapping |= {counter} if low in wrapping else set()
            for inner, outer in re.findall(r"(%[\w.]+) = (%[\w.]+)", rest.partition("iter_args")[2]):
                sizes |= {inner} if outer in sizes else set()
                wrapping |= {inner} if outer in wrapping else set()
        elif operation in _UNBOUNDED:
            sizes.add(result)
        elif operation == "tt.addptr":
            if names[1] in wrapping:
                found.append(line.strip())
        elif operation not in _BOUNDED and not rest.rstrip().endswith("i1"):
            narrow = re.search(r"\bi32>?$|xi32>$", rest.rstrip()) is not None
            if narrow and set(names) & sizes:
                sizes.add(result)
            if set(names) & wrapping or (narrow and operation in _ARITHMETIC and set(names) & sizes):
                wrapping.add(result)
    return found
