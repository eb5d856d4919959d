"""Add files outside of this folder to the site if pages link to them (mkdocs.yml, `hooks`).

CHANGELOG.md and others are where GitHub and PyPI expect them. The site contains them under `project/`, and
links to and from them are rewritten; the pages on disk keep their links.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS, BELOW = "docs", "project"
_EMPTY_HEADER = re.compile(r"<th(\b[^>]*)></th>")
_LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the linked files outside of the folder."""
    for path in sorted(_outside()):
        files.append(File.generated(config, f"{BELOW}/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page for the site."""
    uri = page.file.src_uri
    here = posixpath.dirname(_on_disk(uri))

    def turned(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, link[1]))
        if not (ROOT / path).is_file():
            return link[0]
        return f"]({posixpath.relpath(_on_site(path), posixpath.dirname(uri))}{link[2] or ''})"

    return _LINK.sub(turned, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Make empty header cells plain cells, because a screen reader would announce a header without text."""
    return _EMPTY_HEADER.sub(r"<td\1></td>", html)


def _outside() -> set[str]:
    """Return the files beside the folder of the pages that a page links to, or one of these files."""
    found: set[str] = set()
    waiting = [page.relative_to(ROOT).as_posix() for page in (ROOT / DOCS).rglob("*.md")]
    while waiting:
        new = {path for path in _linked(waiting.pop()) if not path.startswith(f"{DOCS}/")} - found
        found |= new
        waiting += [path for path in new if path.endswith(".md")]
    return found


def _linked(path: str) -> Iterator[str]:
    for link in _LINK.finditer((ROOT / path).read_text(encoding="utf-8")):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1]))
        if not target.startswith(os.pardir) and (ROOT / target).is_file():
            yield target


def _on_disk(uri: str) -> str:
    return uri.removeprefix(f"{BELOW}/") if uri.startswith(f"{BELOW}/") else f"{DOCS}/{uri}"


def _on_site(path: str) -> str:
    return path.removeprefix(f"{DOCS}/") if path.startswith(f"{DOCS}/") else f"{BELOW}/{path}"
