"""Pictures of README and pages: small, used, described, self-contained, and made from real runs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from ckpttool.core.text import format_size
from docs import recordings
from docs.blocks import DOCS, ROOT

PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
MARKDOWN = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
HTML = re.compile(r"<(?:img|source)\b[^>]*>", re.DOTALL)
BUDGET = 2_000_000


def used(page: Path) -> dict[Path, str | None]:
    """Return the pictures of a page with their descriptions; `source` has none."""
    text = page.read_text(encoding="utf-8")
    descriptions: dict[Path, str | None] = {
        (page.parent / file).resolve(): alt for alt, file in MARKDOWN.findall(text)
    }
    for element in HTML.findall(text):
        attributes = dict(re.findall(r'(\w+)="([^"]*)"', element))
        file = attributes.get("src") or attributes["srcset"]
        descriptions[(page.parent / file).resolve()] = attributes.get("alt") if "src" in attributes else None
    return descriptions


def test_every_picture_exists_and_is_described() -> None:
    for page in PAGES:
        for file, alt in used(page).items():
            assert file.is_file(), f"{page.name} shows {file.name}"
            assert alt is None or len(alt) > 20, f"{page.name}: {file.name} has no description"


def test_the_readme_is_small() -> None:
    sizes = {file: file.stat().st_size for file in used(ROOT / "README.md")}
    assert len(sizes) >= 5
    assert sum(sizes.values()) <= BUDGET, format_size(sum(sizes.values()))


def test_every_picture_is_used_and_made() -> None:
    shown = {file for page in PAGES for file in used(page)}
    kept = set(recordings.IMAGES.iterdir())
    assert kept == {recordings.IMAGES / name for name in recordings.PICTURES}
    assert kept <= shown


@pytest.mark.parametrize("file", sorted(DOCS.rglob("*.svg")), ids=lambda file: file.name)
def test_a_drawing_is_self_contained(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"(?:href|src)=\"(?!#)|url\((?!#)|@import|<script|<foreignObject", text)
    assert not re.search(r"/(?:home|root|tmp|work|Users)/", text)


def test_the_recording_shows_the_commands_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    recording = (recordings.IMAGES / "terminal.svg").read_text(encoding="utf-8")
    for scene in recordings.SCENES:
        assert scene.command in readme
        assert f">{scene.command}</text>" in recording
    assert "prefers-reduced-motion" in recording


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.tensorflow
@pytest.mark.environment
def test_the_recording_is_what_the_commands_print(tmp_path: Path) -> None:
    """Speeds and rounding differ between machines."""
    recordings.copy_samples(tmp_path)
    recording = recordings.make_recording(tmp_path).decode()
    kept = (recordings.IMAGES / "terminal.svg").read_text(encoding="utf-8")
    assert words(recording) == words(kept)


@pytest.mark.slow
@pytest.mark.environment
def test_the_film_is_made_again(tmp_path: Path) -> None:
    recordings.copy_samples(tmp_path)
    film = recordings.make_film(tmp_path)
    size = (recordings.IMAGES / "best-and-worst.gif").stat().st_size
    assert abs(len(film) - size) < size / 4


@pytest.mark.slow
@pytest.mark.environment
def test_a_screenshot_is_made_again(tmp_path: Path) -> None:
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("chromium and chromedriver are not here")
    recordings.copy_samples(tmp_path)
    assert len(recordings.PICTURES["report-dark.png"](tmp_path)) > 10_000


def words(drawing: str) -> list[str]:
    """Return the texts of a drawing without their numbers."""
    return [re.sub(r"[\d.,e+-]+", "#", text) for text in re.findall(r">([^<>]+)</text>", drawing)]
