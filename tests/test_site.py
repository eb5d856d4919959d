"""The site is built without a warning, names every page and fetches nothing; screens are what is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.blocks import DOCS, ROOT, Block, differs, fitted

# What a browser fetches by itself; links that people follow are `<a href>`.
FETCHED = re.compile(r"<(?:link|script|img|iframe|source)\b[^>]*?(?:href|src)=\"?((?:https?:)?//[^\"\s>]+)")


def test_the_site_is_built_and_fetches_nothing(tmp_path: Path) -> None:
    """Strictly: a link that leads nowhere fails it, as does a page that the menu does not name."""
    pytest.importorskip("material", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for page in DOCS.rglob("*.md"):
        assert (tmp_path / page.relative_to(DOCS).with_suffix(".html")).is_file()
    built = {page: page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")}
    assert not {page.name: found for page, text in built.items() if (found := FETCHED.findall(text))}
    styles = "".join(style.read_text(encoding="utf-8") for style in tmp_path.rglob("*.css"))
    assert styles
    assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", styles)


def test_a_page_keeps_its_links_to_files_beside_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    from types import SimpleNamespace

    from docs.outside import on_page_markdown

    def turned(uri: str, text: str) -> str:
        return on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri=uri)))

    assert turned("index.md", "[c](../CHANGELOG.md#a) [t](tutorial.md)") == (
        "[c](project/CHANGELOG.md#a) [t](tutorial.md)"
    )
    assert turned("project/CHANGELOG.md", "[w](docs/sidecar.md)") == "[w](../sidecar.md)"
    assert turned("index.md", "[gone](../absent.md) [far](https://a.b/c.md)") == (
        "[gone](../absent.md) [far](https://a.b/c.md)"
    )


PRINTED = """read a.pt
12 tensors, 1.50 kB

speed 900 steps/s
note: one
note: two
note: three
wrote b.pt
"""


@pytest.mark.parametrize(
    ("shown", "made"),
    [
        ("", PRINTED),
        (PRINTED, PRINTED),
        # A line is found again by its words; what is left out has dots, unless it is little.
        ("9 tensors, 3.1 kB\nwrote b.pt\n", "read a.pt\n12 tensors, 1.50 kB\n...\nwrote b.pt\n"),
        ("...\nnote: two\nwrote b.pt\n", "...\nnote: two\nnote: three\nwrote b.pt\n"),
        ("read a.pt\n...\n", "read a.pt\n...\n"),
        # Dots for nothing go; a line that is not printed any more makes room for what is.
        ("read a.pt\n...\n12 tensors, 1 kB\n...\n", "read a.pt\n12 tensors, 1.50 kB\n...\n"),
        ("note: three\nsaved b.pt\n", "...\nnote: three\nwrote b.pt\n"),
    ],
)
def test_a_screen_is_made_of_what_is_printed(shown: str, made: str) -> None:
    assert fitted(shown, PRINTED) == made


@pytest.mark.parametrize(
    ("shown", "notes", "stale"),
    [
        ("...\n12 tensors, 9.99 kB\n\nspeed 12,345 steps/s\n...\n", {}, False),
        ("...\n13 tensors, 1.50 kB\n...\n", {}, True),
        ("...\n13 tensors, 1.50 kB\n...\n", {"varies": "a reason"}, False),
        ("12 tensors, 1.50 kB\n...\n", {}, True),
        ("...\nnote: four\n...\n", {}, True),
    ],
)
def test_a_screen_is_stale_when_it_shows_something_else(
    shown: str, notes: dict[str, str], stale: bool
) -> None:
    assert bool(differs(Block(DOCS / "page.md", 1, "text", shown, notes), PRINTED)) == stale
