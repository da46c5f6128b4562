"""The look at the built site finds what is broken; the pages of the site are in its navigation."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CHECK = runpy.run_path(str(ROOT / "tools/site/check.py"))
problems, unfound = CHECK["problems"], CHECK["unfound"]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ('<a href="other.html#there">x</a><img src="one.png"><a href="#here">x</a><p id="here">', []),
        ('<a href="none.html">x</a>', ["index.html: none.html: no such file"]),
        ('<a href="other.html#gone">x</a>', ["index.html: other.html#gone: no such anchor"]),
        ('<script src="https://example.org/x.js"></script>', ["index.html: loads https://example.org/x.js"]),
    ],
)
def test_what_is_broken_is_found(body: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(body)
    (tmp_path / "other.html").write_text('<h2 id="there">x</h2>')
    (tmp_path / "one.png").write_bytes(b"")
    (tmp_path / "x.css").write_text("@import 'https://example.org/font.css'; a { background: url(one.png) }")
    assert list(problems(tmp_path)) == [*found, "x.css: loads https://example.org/font.css"]
    assert list(unfound(tmp_path)) == ["search/search_index.json: no such file"]


def navigation() -> set[str]:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return {
        page
        for section in yaml.safe_load(text)["nav"]
        for entry in section.values()
        for page in ([entry] if isinstance(entry, str) else [next(iter(one.values())) for one in entry])
    }


def test_every_page_is_in_the_navigation_but_those_that_stay_in_the_repository() -> None:
    hooks = (ROOT / "tools/site/hooks.py").read_text(encoding="utf-8")
    off = {"log.md", "licences.md", "outer_steps.md", "weight_code.md"}
    assert all(f'"docs/{page}"' in hooks for page in off)
    assert len(navigation()) <= 18
    assert navigation() - {"index.md"} == {path.name for path in (ROOT / "docs").glob("*.md")} - off
