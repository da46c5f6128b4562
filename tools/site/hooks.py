"""mkdocs hooks: the home page, which is the README, links of all pages, and GitHub's names of headings.

The pages are written for GitHub: relative links reach any file of the repository. The site has the pages
alone, and no address of the repository is known to it; so a link to another file becomes its text and its
path.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"README.md": "index.md"}
"""Files at the top of the repository -> what they are called in the site."""
OFF_SITE = ("docs/log.md", "docs/licences.md", "docs/weight_code.md", "docs/outer_steps.md")
"""Pages of the repository that the site leaves out (mkdocs.yml: exclude_docs)."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")


def slug(text: str, _separator: str) -> str:
    """GitHub's anchor of a heading: lower case, a hyphen for each space, no punctuation."""
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def on_config(config: Any) -> Any:
    """Headings get GitHub's names, so that links to them are the same in both places."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside of docs/."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links those of the site."""
    sources = {name: source for source, name in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return _LINK.sub(lambda found: _link(found, posixpath.dirname(source)), markdown)


def _link(found: re.Match[str], folder: str) -> str:
    image, text, target = found.groups()
    path, hash_, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", path):
        return found[0]
    place = posixpath.normpath(posixpath.join(folder, path))
    if not (ROOT / place).exists():
        return found[0]  # mkdocs says so
    if place in PAGES:
        return f"{image}[{text}]({PAGES[place]}{hash_}{anchor})"
    if place.startswith("docs/") and (ROOT / place).is_file() and place not in OFF_SITE:
        return f"{image}[{text}]({place.removeprefix('docs/')}{hash_}{anchor})"
    return f"{text}" if place.rstrip("/") in text else f"{text} (`{place}`)"
