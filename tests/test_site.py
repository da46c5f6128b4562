"""The look at the built site finds what is broken; the pages of the site are in its navigation."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
problems = runpy.run_path(str(ROOT / "tools/site/check.py"))["problems"]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ('<a href="other.html#there">x</a><img src="one.png">', []),
        ('<a href="https://example.org/">x</a><a href="#here">x</a><p id="here">', []),
        ('<a href="none.html">x</a>', ["index.html: none.html: no such file"]),
        ('<a href="other.html#gone">x</a>', ["index.html: other.html#gone: no such anchor"]),
        ('<img src="two.png">', ["index.html: two.png: no such file"]),
        ('<script src="https://example.org/x.js"></script>', ["index.html: loads https://example.org/x.js"]),
        (
            '<link rel="stylesheet" href="//example.org/x.css">',
            ["index.html: loads //example.org/x.css"],
        ),
    ],
)
def test_what_is_broken_is_found(body: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(body)
    (tmp_path / "other.html").write_text('<h2 id="there">x</h2>')
    (tmp_path / "one.png").write_bytes(b"")
    assert list(problems(tmp_path)) == found


def test_a_stylesheet_that_fetches_is_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("")
    (tmp_path / "x.css").write_text("@import 'https://example.org/font.css'; a { background: url(one.png) }")
    assert list(problems(tmp_path)) == ["x.css: loads https://example.org/font.css"]


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    sections = yaml.safe_load(text)["nav"]
    named = {
        page
        for section in sections
        for entry in section.values()
        for page in ([entry] if isinstance(entry, str) else [next(iter(one.values())) for one in entry])
    }
    outside = {"index.md", "changelog.md", "contributing.md", "security.md"}
    assert named - outside == {path.name for path in (ROOT / "docs").glob("*.md")}
