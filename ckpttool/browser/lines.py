"""Lines of styled text, independent of drawing: fitted to cells, wrapped, in columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from rich.cells import cell_len, chop_cells

from ckpttool.core.deferred import NamedTuple
from ckpttool.core.text import clean, shorten

# Meaning of a piece of text; panes.py maps it to a style.
Tone = Literal["", "dim", "head", "bar", "good", "warn", "bad", "mark"]
_LABEL = 9
# Maximum lines per fact: a name of a megabyte shows its beginning and its end.
_MOST = 6


class TextPiece(NamedTuple):
    """Text of one tone."""

    text: str
    tone: Tone = ""


Line = tuple[TextPiece, ...]
BLANK: Line = ()


def fit_text(text: str, cells: int) -> str:
    """Return text without control characters, at most `cells` wide, shortened in the middle."""
    text = shorten(clean(text), cells)
    if text.isascii():
        return text
    room = cells
    while cell_len(text) > cells and room > 0:
        room -= 1
        text = shorten(text, room)
    return text


def pad_text(text: str, cells: int, *, right: bool = False) -> str:
    """Return the text fitted to exactly `cells` cells, aligned left or right."""
    text = fit_text(text, cells)
    gap = " " * (cells - cell_len(text))
    return gap + text if right else text + gap


def wrap_text(text: str, cells: int, most: int = _MOST) -> list[str]:
    """Return text without control characters, wrapped to `cells`: at blanks, after slashes, or anywhere.

    The middle is left out if there are more than `most` lines.
    """
    text = shorten(clean(text), cells * most)
    lines, here = [], ""
    for word in _break_words(text):
        for part in chop_cells(word, max(1, cells)) if cell_len(word) > cells else [word]:
            if here and cell_len(here) + cell_len(part.rstrip()) > cells:
                lines.append(here.rstrip())
                here = ""
            here += part
    lines.append(here.rstrip())
    return lines


def _break_words(text: str) -> Iterator[str]:
    """Split the text into parts after which a line may break."""
    start = 0
    for at, letter in enumerate(text):
        if letter in " /" and text[at + 1 : at + 2] not in (" ", ""):
            yield text[start : at + 1]
            start = at + 1
    yield text[start:]


def fact_lines(label: str, text: str, cells: int, tone: Tone = "") -> list[Line]:
    """Return a label and its text, wrapped in a separate column."""
    first, *more = wrap_text(text, max(1, cells - _LABEL))
    lines: list[Line] = [(TextPiece(f"{label:<{_LABEL}}", "dim"), TextPiece(first, tone))]
    return lines + [(TextPiece(" " * _LABEL), TextPiece(line, tone)) for line in more]


def wrap_paragraph(text: str, cells: int, tone: Tone = "") -> list[Line]:
    """Return a sentence wrapped to `cells`."""
    return [(TextPiece(line, tone),) for line in wrap_text(text, cells)]


def to_plain_text(lines: Iterable[Line]) -> str:
    """Return the lines as plain text without tones."""
    return "\n".join("".join(piece.text for piece in line).rstrip() for line in lines)
