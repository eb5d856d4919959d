"""The site is built without a warning, names every page and fetches nothing; screens are what is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from docs.blocks import DOCS, ROOT, Block, differs, fitted

if TYPE_CHECKING:
    from tests.test_report_browser import Browser

# What a browser fetches by itself; links that people follow are `<a href>`.
FETCHED = re.compile(r"<(?:link|script|img|iframe|source)\b[^>]*?(?:href|src)=\"?((?:https?:)?//[^\"\s>]+)")


def build_site(folder: Path) -> Path:
    """Build the site strictly: links that lead nowhere and pages outside the menu are errors."""
    pytest.importorskip("material", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
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
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    pytest.importorskip("selenium", reason="selenium drives the browser")
    from tests.test_report_browser import CHROMIUM, DRIVER, Browser

    if not (CHROMIUM and DRIVER):
        pytest.skip("chromium and chromedriver are not here")
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.driver.quit()


def test_the_site_is_built_and_fetches_nothing(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS).with_suffix(".html")).is_file()
    built = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    assert not {page.name: addresses for page, text in built.items() if (addresses := FETCHED.findall(text))}
    styles = "".join(style.read_text(encoding="utf-8") for style in site.rglob("*.css"))
    assert styles
    assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", styles)


# The last pages that a reader wants: reasons, histories and measurements.
BACKGROUND = ("decisions/", "project/", "roadmap.html")


def search_site(browser: Browser, site: Path, query: str) -> list[str]:
    """Return the pages that the site's search lists, best first."""
    shown = "return [...document.querySelectorAll('.md-search-result__item > a')].map(each => each.pathname)"
    browser.driver.get(f"{(site / 'index.html').as_uri()}?q={quote(query)}")
    deadline = time.monotonic() + 60
    while not (paths := browser.run(shown)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [path.removeprefix(f"{site.as_posix()}/") for path in paths]


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("gif", "howto/see_an_agent"),
        ("discrete", "libraries"),
        ("is it safe", "howto/inspect_safely"),
        ("jupyter", "howto/in_a_notebook"),
        ("notebook", "howto/in_a_notebook"),
        ("onnx", "howto/onnx"),
        ("sandbox", "security"),
    ],
)
def test_the_search_lists_how_tos_before_decisions_and_changes(
    query: str, first: str, browser: Browser, site: Path
) -> None:
    pages = search_site(browser, site, query)
    assert pages[:1] == [f"{first}.html"]
    background = [page.startswith(BACKGROUND) for page in pages]
    assert background == sorted(background)


# Widths of the page and of what it shows, and elements beyond the edge that no box of their own scrolls.
OVERFLOW = """
const limit = document.documentElement.clientWidth;
const clipped = (each) => each && !each.matches('.md-content') &&
  (getComputedStyle(each).overflowX !== 'visible' || clipped(each.parentElement));
return [document.scrollingElement.scrollWidth > limit, ...[...document.querySelectorAll('.md-content *')]
  .filter((each) => each.getBoundingClientRect().right > limit + 1 && !clipped(each.parentElement))
  .map((each) => each.outerHTML.slice(0, 80))]
"""
WIDE_PAGES = ("cli", "api", "layouts", "libraries", "kinds", "model_pairs", "json", "howto/what_would_it_do")


def overflowing(browser: Browser, pages: Iterable[Path]) -> dict[str, list[object]]:
    """Return what is beyond the edge of a phone's screen, by page."""
    overflows = {}
    for page in pages:
        browser.open(page, 390, 844)
        overflows[page.name] = browser.run(OVERFLOW)
    return {name: overflow for name, overflow in overflows.items() if overflow != [False]}


def test_wide_pages_fit_a_phone(browser: Browser, site: Path) -> None:
    assert overflowing(browser, (site / f"{page}.html" for page in WIDE_PAGES)) == {}


@pytest.mark.slow
def test_every_page_fits_a_phone(browser: Browser, site: Path) -> None:
    assert overflowing(browser, sorted(site.rglob("*.html"))) == {}


def test_each_release_has_a_page_with_sections() -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    from docs.outside import release_pages

    sections = "### Fixed\n\n- One,\n  and more:\n  - below\n- Two\n\n### Added\n\n- Three [x](docs/x.md)\n"
    releases = f"## 1.1 - unreleased\n\nNew.\n\n{sections}\n## 1.0\n\n{sections}"
    pages = release_pages(f"# Changes\n\nHead.\n\n{releases}")
    assert [*pages] == ["project/CHANGELOG.md", "project/changes/1.1.md", "project/changes/1.0.md"]
    index, newest, oldest = pages.values()
    assert "[Fixed](changes/1.1.md#fixed): 2\n" in index
    assert "[Added](changes/1.0.md#added): 1\n" in index
    assert "Three" not in index
    assert re.findall("^#.*", newest, re.MULTILINE) == ["# 1.1 - unreleased", "## Fixed", "## Added"]
    assert oldest.count("- ") == 4


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
    assert turned("project/changes/1.0.md", "[w](docs/sidecar.md)") == "[w](../../sidecar.md)"
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
    ("shown", "output"),
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
def test_a_screen_is_made_of_what_is_printed(shown: str, output: str) -> None:
    assert fitted(shown, PRINTED) == output


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
