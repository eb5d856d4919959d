"""Add files outside of this folder to the site if pages link to them (mkdocs.yml, `hooks`).

CHANGELOG.md and others are where GitHub and PyPI expect them. The site contains them under `project/`, and
links to and from them are rewritten; the pages on disk keep their links. Each release of CHANGELOG.md has a
page of its own under `project/changes/`.
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
CHANGES, RELEASES = "CHANGELOG.md", f"{BELOW}/changes"
_EMPTY_HEADER = re.compile(r"<th(\b[^>]*)></th>")
# Factors of the scores of the search by the start of a path. The theme counts a word in a title 1,000 times:
# pages that contain a word precede decisions about it, and reference pages about it precede how-tos.
_SEARCH_BOOSTS = (
    ("howto/", 80_000),
    ("tutorial.md", 80_000),
    ("solved.md", 40_000),
    ("decisions/", 1),
    ("project/", 1),
    ("roadmap.md", 1),
    ("", 10_000),
)
_LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the linked files outside of the folder."""
    for path in sorted(_outside() - {CHANGES}):
        files.append(File.generated(config, f"{BELOW}/{path}", abs_src_path=str(ROOT / path)))
    for uri, content in release_pages((ROOT / CHANGES).read_text(encoding="utf-8")).items():
        files.append(File.generated(config, uri, content=content))
    return files


def release_pages(changes: str) -> dict[str, str]:
    """Return a page for each release of a changelog, and one that lists the releases and their sections."""
    head, *releases = re.split(r"^## ", changes, flags=re.MULTILINE)
    pages, index = {}, [head.strip()]
    for release in releases:
        title, _, body = release.partition("\n")
        version = title.split()[0]
        summary, *sections = re.split(r"^### ", body, flags=re.MULTILINE)
        page = f"{posixpath.basename(RELEASES)}/{version}.md"
        rows = [f"## [{title}]({page})", summary.strip()]
        for section in sections:
            name = section.partition("\n")[0]
            count = len(re.findall(r"^- ", section, re.MULTILINE))
            rows.append(f"- [{name}]({page}#{name.lower()}): {count}")
        index += ["\n\n".join(filter(None, rows[:2])), "\n".join(rows[2:])]
        body = re.sub(r"^##(#+) ", r"#\1 ", body, flags=re.MULTILINE)
        pages[f"{BELOW}/{page}"] = f"# {title}\n{body}"
    return {f"{BELOW}/{CHANGES}": "\n\n".join(filter(None, index)) + "\n", **pages}


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


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Weigh the page for the search, and make empty header cells plain cells.

    A screen reader would announce a header without text.
    """
    uri = page.file.src_uri
    boost = next((boost for start, boost in _SEARCH_BOOSTS if uri.startswith(start)))
    page.meta.setdefault("search", {}).setdefault("boost", boost)
    return _EMPTY_HEADER.sub(r"<td\1></td>", html)


def _outside() -> set[str]:
    """Return the files beside the folder of the pages that a page links to, or one of these files."""
    files: set[str] = set()
    waiting = [page.relative_to(ROOT).as_posix() for page in (ROOT / DOCS).rglob("*.md")]
    while waiting:
        new = {path for path in _linked(waiting.pop()) if not path.startswith(f"{DOCS}/")} - files
        files |= new
        waiting += [path for path in new if path.endswith(".md")]
    return files


def _linked(path: str) -> Iterator[str]:
    for link in _LINK.finditer((ROOT / path).read_text(encoding="utf-8")):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1]))
        if not target.startswith(os.pardir) and (ROOT / target).is_file():
            yield target


def _on_disk(uri: str) -> str:
    if uri.startswith(f"{RELEASES}/"):
        return CHANGES
    return uri.removeprefix(f"{BELOW}/") if uri.startswith(f"{BELOW}/") else f"{DOCS}/{uri}"


def _on_site(path: str) -> str:
    return path.removeprefix(f"{DOCS}/") if path.startswith(f"{DOCS}/") else f"{BELOW}/{path}"
