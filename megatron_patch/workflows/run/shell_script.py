"""Reads a shell script's commands, without executing any.

It understands what Megatron-LM's examples consist of: assignments, arrays, `${NAME:-default}`, and `if` with
comparisons of text and numbers. What only a run would tell stays as it is written, e.g. `$1`.
"""

from __future__ import annotations

import operator
import os
import re
import shlex
from collections.abc import Iterator

Names = dict[str, str | list[str]]

_OUTPUT = re.compile(r"\$\([^()]*\)|\$\(\([^()]*\)\)|`[^`\n]*`")
_LEXEMES = re.compile(
    r"""(?P<dropped>(?<![^\s;(])\#[^\n]*|\\\n|(?:(?<=\s)\d)?&?>>?&?\s*[^\s;|&)]+)
    |(?P<quoted>'[^']*'|"(?:\\.|[^"\\])*"|\\.)|(?P<branch>(?<![^\s;])(?:(?:el)?if\s.*?[;\n]\s*then|else)(?!\S))
    |(?P<opens>\()|(?P<closes>\))|(?P<ends>[\n;|&])|.""",
    re.VERBOSE | re.DOTALL,
)
_ASSIGNMENT = re.compile(
    r"(?:(?:export|readonly|local|declare) +(?:-\w+ +)*)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL
)
_REFERENCE = re.compile(
    r'"\$\{(?P<quoted>\w+)\[[@*]\]\}"|\$\{(?P<name>\w+):?-(?P<default>[^{}]*)\}'
    r"|\$\{(?P<braced>\w+)(?:\[[@*]\])?\}|\$(?P<plain>\w+)"
)


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every command that is reached, with this process's environment variables."""
    names: Names = dict(os.environ)
    branches: list[tuple[bool | None, bool]] = []
    """For each `if` around the statement: whether this branch is taken (None: unknown), or an earlier was."""
    for statement in _statements(text):
        keyword, *rest = statement.split(maxsplit=1)
        if keyword in ("if", "case"):
            branches.append((False, False))
        if keyword in ("if", "elif", "else", "case") and branches:
            earlier = any(branches.pop())
            branches.append((not earlier and (keyword == "else" or _holds(rest[0], names)), earlier))
        elif keyword in ("fi", "esac") and branches:
            branches.pop()
        elif (reached := next((taken for taken, _ in branches if not taken), True)) is False:
            continue
        elif (found := _ASSIGNMENT.fullmatch(statement)) and (
            found[3][:1] == "(" or len(_split(found[3])) < 2
        ):
            names[found[1]] = _assigned(names, *found.groups()) if reached else f"${{{found[1]}}}"
        elif reached:
            yield _words(statement, names)


def _assigned(names: Names, name: str, more: str, value: str) -> str | list[str]:
    """Return the value of `name` after `name=value` or `name+=value`."""
    old = names.get(name, []) if more else []
    if value.startswith("("):
        return [*([old] if isinstance(old, str) else old), *_words(value[1:-1], names)]
    return (old if isinstance(old, str) else " ".join(old)) + " ".join(_words(value, names))


def _statements(text: str) -> Iterator[str]:
    """Yield each statement, and each `if ... then`, without comments and redirections."""
    while (shorter := _OUTPUT.sub("${...}", text)) != text:  # Commands' outputs, and sums, innermost first.
        text = shorter
    depth, statement = 0, ""
    for lexeme in _LEXEMES.finditer(text + "\n"):
        kind, piece = lexeme.lastgroup, lexeme[0]
        depth = max(0, depth + (kind == "opens") - (kind == "closes"))
        ends = kind in ("ends", "branch") and not depth
        statement += "" if kind == "dropped" or (ends and kind == "ends") else piece.replace("\\\n", "")
        if ends and statement.strip():
            yield statement.strip()
            statement = ""


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # A quote without its end.
        return text.split()


def _words(text: str, names: Names, unset: str | None = None) -> list[str]:
    """Expand and split a text as bash does; a reference to what is not set becomes `unset`, or is kept."""

    def value(found: re.Match[str]) -> str:
        held = names.get(found["quoted"] or found["name"] or found["braced"] or found["plain"])
        if not held and found["default"] is not None:
            return _REFERENCE.sub(value, found["default"])
        if held is None:
            return found[0] if unset is None else unset
        if isinstance(held, list):
            return shlex.join(held) if found["quoted"] else " ".join(held)
        return held

    return _split(_REFERENCE.sub(value, text))


def _holds(condition: str, names: Names) -> bool | None:
    """Return whether one of the tests of `[ A ] || [[ B ]]; then` holds; None if it cannot be read."""
    held: list[bool | None] = []
    for test in re.sub(r"[;\n]\s*then$", "", condition).split("||"):
        match _words(test, names, unset="")[1:-1]:
            case [("-z" | "-n") as kind, *texts]:
                held.append(bool(texts and texts[0]) == (kind == "-n"))
            case [*left, "==" | "=" | "!=" as kind, right] if len(left) < 2 and "*" not in right:
                held.append(("".join(left) == right) == (kind != "!="))
            case [left, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as kind, right] if (
                left + right
            ).isdecimal():
                held.append(getattr(operator, kind[1:])(int(left), int(right)))
            case _:
                held.append(None)
    return True if True in held else None if None in held else False
