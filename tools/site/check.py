"""Looks at a built site: links and pictures lead to a file in it, anchors to an element, no page asks another
host for anything, and the search index has every page. Offline; links that a reader follows to
other hosts are not looked at.

Usage: python tools/site/check.py SITE
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
_LOADED_LINKS = {"stylesheet", "icon", "preload", "preconnect", "modulepreload", "dns-prefetch", "manifest"}
_CSS = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")


class _Page(HTMLParser):
    """What a page is called by, links to and loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        target = found.get(_LOADS.get(tag, ""))
        if target and (tag != "link" or _LOADED_LINKS & set(found.get("rel", "").split())):
            self.loads.append(target)


def problems(site: Path) -> Iterator[str]:
    """What is wrong, a line each."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}: no page"
    for path, page in pages.items():
        for target in page.loads:
            if urlsplit(target).netloc or target.startswith("//"):
                yield f"{path.relative_to(site)}: loads {target}"
        for target in [*page.links, *page.loads]:
            if problem := _leads_nowhere(site, pages, path, target):
                yield f"{path.relative_to(site)}: {target}: {problem}"
    for path in sorted(site.rglob("*.css")):
        for target in (one or other for one, other in _CSS.findall(path.read_text(encoding="utf-8"))):
            if urlsplit(target).netloc:
                yield f"{path.relative_to(site)}: loads {target}"


def unfound(site: Path) -> Iterator[str]:
    """Pages that the site's search cannot find, a line each."""
    index = site / "search/search_index.json"
    name = index.relative_to(site)
    if not index.is_file():
        yield f"{name}: no such file"
        return
    found = json.loads(index.read_text(encoding="utf-8"))["docs"]
    indexed = {urlsplit(one["location"]).path or "index.html" for one in found if one["text"]}
    for path in sorted(site.rglob("*.html")):
        page = path.relative_to(site).as_posix()
        if page != "404.html" and page not in indexed:
            yield f"{name}: {page} is not in it"


def _leads_nowhere(site: Path, pages: dict[Path, _Page], path: Path, target: str) -> str | None:
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return None
    base = site if parts.path.startswith("/") else path.parent
    place = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
    if place.is_dir():
        place /= "index.html"
    if not place.is_file():
        return "no such file"
    anchor = unquote(parts.fragment)
    if anchor and place in pages and anchor not in pages[place].ids:
        return "no such anchor"
    return None


def main() -> int:
    """Returns 1 if anything is wrong."""
    site = Path(sys.argv[1]).resolve()
    found = [*problems(site), *unfound(site)]
    for line in found:
        print(line, file=sys.stderr)
    print(f"{site.name}: {len(list(site.rglob('*.html')))} pages, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
