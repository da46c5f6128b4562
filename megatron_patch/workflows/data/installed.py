"""Text that is there wherever this package is: the source of Python's library and of installed packages.

    stdlib                            Python's own library
    installed:stdlib,sympy,scipy      the .py files of packages
    installed:torch/include/*.h       a package's files by a pattern on the path below it; `*` crosses slashes

Tests are left out. The files' order depends on the packages' versions alone, not on where they are installed:
runs on two machines see the same documents in the same order.
"""

from __future__ import annotations

import importlib.util
import platform
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from megatron_patch.errors import UserError

PREFIX = "installed:"
SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
"""Folders: the standard library's tests are more than half of its bytes, and much of that is tables of odd
characters; `encodings` and `pydoc_data` are generated. One such file in a
validation split would decide its loss."""


@dataclass(frozen=True)
class Installed:
    """Packages, each with the pattern of its files."""

    items: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """The packages with their versions."""
        return ", ".join(f"{name} {_version(name)} {pattern}" for name, pattern in self.items)

    def roots(self) -> list[tuple[Path, str]]:
        """The folder of each package, and its pattern."""
        return [(_folder(name), pattern) for name, pattern in self.items]


STDLIB = Installed((("stdlib", "*.py"),))


def parse_source(text: str) -> Path | Installed:
    """`stdlib`, `installed:NAME[/PATTERN],...`, or the path of a folder or file."""
    if text == "stdlib":
        return STDLIB
    if not text.startswith(PREFIX):
        return Path(text)
    items = [item.strip().partition("/") for item in text.removeprefix(PREFIX).split(",")]
    if not all(name for name, _, _ in items):
        raise UserError(f"source: {text!r} names no package; allowed: {PREFIX}NAME,NAME/PATTERN, ...")
    return Installed(tuple((name, pattern or "*.py") for name, _, pattern in items))


def _folder(name: str) -> Path:
    if name == "stdlib":
        return Path(sysconfig.get_paths()["stdlib"])
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise UserError(f"source: {PREFIX}{name}: no package of that name is installed")
    return Path(found.submodule_search_locations[0])


def _version(name: str) -> str:
    if name == "stdlib":
        return platform.python_version()
    distributions = metadata.packages_distributions().get(name, [name])
    try:
        return metadata.version(distributions[0])
    except metadata.PackageNotFoundError:
        return "?"
