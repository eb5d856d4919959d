"""Lines of text with tones, before anything draws them: fitted to cells, wrapped, in columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from rich.cells import cell_len, chop_cells

from ckpttool.shown import clean, shortened

# How a piece is meant; what that looks like is decided where it is drawn (paint.py).
Tone = Literal["", "dim", "head", "bar", "good", "warn", "bad", "mark"]
_LABEL = 9
# Lines that one fact may take: a name of a megabyte shows its beginning and its end.
_MOST = 6


class Piece(NamedTuple):
    """Some text of one tone."""

    text: str
    tone: Tone = ""


Line = tuple[Piece, ...]
BLANK: Line = ()


def fitted(text: str, cells: int) -> str:
    """Return inert text of at most `cells` cells of a terminal, its middle left out where it is longer."""
    text = shortened(clean(text), cells)
    if text.isascii():
        return text
    room = cells
    while cell_len(text) > cells and room > 0:
        room -= 1
        text = shortened(text, room)
    return text


def padded(text: str, cells: int, *, right: bool = False) -> str:
    """Return the text fitted to exactly `cells` cells, at the left or at the right of them."""
    text = fitted(text, cells)
    gap = " " * (cells - cell_len(text))
    return gap + text if right else text + gap


def wrapped(text: str, cells: int, most: int = _MOST) -> list[str]:
    """Return inert text in lines of at most `cells` cells: broken at blanks and after slashes, else anywhere.

    Of more than `most` lines the middle is left out.
    """
    text = shortened(clean(text), cells * most)
    lines, here = [], ""
    for word in _words(text):
        for part in chop_cells(word, max(1, cells)) if cell_len(word) > cells else [word]:
            if here and cell_len(here) + cell_len(part.rstrip()) > cells:
                lines.append(here.rstrip())
                here = ""
            here += part
    lines.append(here.rstrip())
    return lines


def _words(text: str) -> Iterator[str]:
    """Go through the text in parts after which a line may end."""
    start = 0
    for at, letter in enumerate(text):
        if letter in " /" and text[at + 1 : at + 2] not in (" ", ""):
            yield text[start : at + 1]
            start = at + 1
    yield text[start:]


def fact(label: str, text: str, cells: int, tone: Tone = "") -> list[Line]:
    """Return a label and what is said under it, in a column of its own."""
    first, *more = wrapped(text, max(1, cells - _LABEL))
    lines: list[Line] = [(Piece(f"{label:<{_LABEL}}", "dim"), Piece(first, tone))]
    return lines + [(Piece(" " * _LABEL), Piece(line, tone)) for line in more]


def paragraph(text: str, cells: int, tone: Tone = "") -> list[Line]:
    """Return a sentence in lines."""
    return [(Piece(line, tone),) for line in wrapped(text, cells)]


def plain(lines: Iterable[Line]) -> str:
    """Return the lines as one text without tones."""
    return "\n".join("".join(piece.text for piece in line).rstrip() for line in lines)
