"""Writes docs/licences.md: the locked dependencies and the licences that their own metadata state.

Usage: .venv/bin/python tools/licences.py     (`make licences`; in the environment of `make setup`)
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/licences.md"
_HEAD = """# Licences of the dependencies

megatron-loco is under Apache-2.0 (`LICENSE`). These are the packages of `requirements.lock` and the licences
that their own metadata state; the texts come with the packages. None of them is copied into this one.
**core**: what a training job needs; **extras**: what the extras `recipes`, `report` and `muon` bring;
**development**: what only tests, checks and builds use.
Written by `make licences`.

| package | version | licence | for |
| --- | --- | --- | --- |
"""


def locked() -> dict[str, str]:
    """Name -> version, of requirements.lock."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line)


def licence(name: str) -> str:
    """What a package's metadata say: an SPDX expression, else the classifiers, else a short text."""
    found = metadata.metadata(name)
    if expression := found.get("License-Expression"):
        return expression
    classifiers = [line.rpartition(" :: ")[2] for line in found.get_all("Classifier") or ()
                   if line.startswith("License :: ")]  # fmt: skip
    if classifiers and classifiers != ["OSI Approved"]:
        return ", ".join(classifiers)
    text = (found.get("License") or "").strip().splitlines()
    if text and len(text[0]) < 60:
        return text[0]
    return "not stated"


def required_by(lines: Iterable[str]) -> set[str]:
    """What the requirements lead to, by name."""
    ahead = [Requirement(line) for line in lines]
    found: set[tuple[str, str]] = set()
    while ahead:
        wanted = ahead.pop()
        for extra in ("", *wanted.extras):
            key = (canonicalize_name(wanted.name), extra)
            if key in found:
                continue
            found.add(key)
            for line in metadata.requires(wanted.name) or ():
                inner = Requirement(line)
                if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                    ahead.append(inner)
    return {name for name, _ in found}


def page() -> str:
    """The page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    core = required_by(project["dependencies"])
    extra = required_by(line for name in ("recipes", "report", "muon") for line in extras[name])
    purpose = dict.fromkeys(extra, "extras") | dict.fromkeys(core, "core")
    rows = [
        f"| {name} | {version} | {licence(name)} | {purpose.get(name, 'development')} |"
        for name, version in locked().items()
    ]
    return _HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(locked())} packages")
