"""What other users' files may look like: a valid one, changed in its bytes or in its tree.

Whatever hypothesis draws, the same draws give the same file.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import yaml
from hypothesis import strategies as st

HUGE = "9" * 5000
SNIPPETS = [
    *("NaN", "-Infinity", "1e999", "1e308", "-0", "1e-320", HUGE, "-" + HUGE, "0x" + "f" * 5000, "1:" * 500),
    *("null", "~", "true", "''", '"', "'", "-", "0", "1", "-1", "0.5", "\t", " ", "\n", "\r", "\0", "1_000"),
    *("\x1b[2J", "\ufeff", "\u2028", "\x85", "\u202e", "é", "𝄞", "\\ud800", '"\\ud800"', "\\u0000", "٣", "½"),
    *("[" * 3000, "{" * 3000, "]" * 30, '{"a":' * 3000, "[" * 20 + "]" * 20, "- " * 500, "x" * 300),
    *("*a", "&a ", "&a [*a]", "<<: *a\n", "? [1]: 2\n", "!!python/object/apply:os.system [id]", "!!int x"),
    *("!!binary aGVsbG8=", "!!set {x, y}", "!!omap [x: 1]", "2026-99-99", "2026-11-22", "---\n", "...\n"),
    *("%YAML 3\n", "${", "${x}", "${megatron.lr}", "${oc.env:NOT_THERE}", "${" * 40, "${oc.decode:'[1,'}"),
    *("???", "\\${x}", "../" * 40, "/dev/zero", "/etc/passwd", ",", ":", "#", "\x00\x00\x00\x00"),
]


def _bomb() -> str:
    """A billion values in a few lines."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    return "\n".join(lines)


def _references() -> str:
    return "\n".join(["b0: x", *(f"b{i}: ${{b{i - 1}}}${{b{i - 1}}}" for i in range(1, 40))])


BOMBS = [_bomb(), _references(), "[" * 100_000, "a: " * 5000, "x" * (1 << 20), "- &a [*a]", "a: &a {b: *a}"]
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e100, 1e308, 1e-320),
    *(float("nan"), float("inf"), float("-inf"), "", "x", "nan", "1", "-1", "١", "a\nb", "\0", "\x1b[2J"),
    *("x" * 300, "../x", "/", ".", [], [1], [[]], {}, {"a": 1}, {"": {}}, [None], ["x", "x"], {"1": [1]}),
]


def nested(depth: int) -> Any:
    """Lists in one another."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


ODD += [nested(20), nested(200)]
_FEW = st.sampled_from([0, 1, 1, 1, 2, 4])
"""Changes; a valid file as it is, too."""


@st.composite
def changed_bytes(draw: st.DrawFn, valid: list[bytes]) -> bytes:
    """One of the valid contents, changed in a few places or in none."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(_FEW)):
        at = draw(st.integers(0, len(data)))
        to = min(len(data), at + draw(st.integers(1, 40)))
        match draw(st.integers(0, 7)):
            case 0:
                del data[at:]
            case 1:
                del data[at:to]
            case 2 if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case 3:
                data[at:at] = data[at:to]
            case 4:  # a whole line again: a key that is there twice
                begin = data.rfind(b"\n", 0, at) + 1
                data[begin:begin] = data[begin : data.find(b"\n", at) + 1 or len(data)]
            case 5:
                data[at:at] = draw(st.sampled_from(SNIPPETS)).encode()
            case 6:
                data[at:to] = draw(st.sampled_from(SNIPPETS)).encode()
            case 7:
                data[at:to] = draw(st.binary(max_size=8))
    if draw(st.integers(0, 40)) == 0:
        data += b"\n" + draw(st.sampled_from(BOMBS)).encode()
    return bytes(data)


@st.composite
def changed_tree(draw: st.DrawFn, valid: list[Any]) -> Any:
    """One of the valid trees; a few of its values replaced, removed, renamed or moved."""
    tree = copy.deepcopy(draw(st.sampled_from(valid)))
    for _ in range(draw(_FEW)):
        places = list(_places(tree))
        if not places:
            return tree
        where, key = draw(st.sampled_from(places))
        match draw(st.integers(0, 6)):
            case 0:
                del where[key]
            case 1 if isinstance(where, dict):
                where[draw(st.sampled_from(["x", "", "0", "a\nb", "\0", "é", "x" * 300]))] = where.pop(key)
            case 2:
                where[key] = [where[key]]
            case 3:
                other, name = draw(st.sampled_from(places))
                where[key] = copy.deepcopy(other[name]) if _has(other, name) else None
            case 4 if isinstance(where[key], int | float):
                where[key] = draw(st.one_of(st.integers(-3, 300), st.floats(), st.just(str(where[key]))))
            case _:
                where[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(mapping or list, key or index) of every value."""
    for key in range(len(tree)) if isinstance(tree, list) else list(tree) if isinstance(tree, dict) else ():
        yield tree, key
        yield from _places(tree[key])


def _has(where: Any, key: Any) -> bool:
    return key < len(where) if isinstance(where, list) else key in where


def as_json(tree: Any) -> bytes:
    """`tree` in JSON."""
    return json.dumps(tree, indent=1).encode()


def as_yaml(tree: Any) -> bytes:
    """`tree` in YAML."""
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode(errors="replace")
