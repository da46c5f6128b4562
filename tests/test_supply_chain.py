"""What the package brings along: locked versions and their licences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCKS = [ROOT / "requirements.lock", ROOT / "docs/requirements.lock"]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_lock_holds_exact_versions_and_no_addresses(lock: Path) -> None:
    for line in lock.read_text(encoding="utf-8").splitlines():
        assert re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.+!]+", line), line


def test_every_locked_package_has_its_licence_on_the_page() -> None:
    page = (ROOT / "docs/licences.md").read_text(encoding="utf-8")
    rows = dict(
        re.findall(r"^\| (\S+) \| (\S+) \| [^|]+ \| (?:core|extras|development) \|$", page, re.MULTILINE)
    )
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    assert rows == dict(line.split("==") for line in lines), "make licences"
