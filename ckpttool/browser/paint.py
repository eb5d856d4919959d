"""How tones look, and lines of pieces as strips of a screen: the terminal's own colours, and few of them."""

from __future__ import annotations

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from ckpttool.browser.lines import Line, Tone
from ckpttool.shown import clean

STYLES: dict[Tone, Style] = {
    "": Style(),
    "dim": Style(dim=True),
    "head": Style(bold=True),
    "bar": Style(color="cyan"),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "mark": Style(color="yellow", bold=True),
}
HERE = Style(reverse=True)
# Where the cursor is in a pane that does not have the keys.
THERE = Style(bold=True, underline=True)


def strip(line: Line, cells: int, over: Style | None = None) -> Strip:
    """Return the line in exactly `cells` cells, all of it in a style `over` those of its pieces."""
    # Whatever a screen forgets: nothing that a file contains steers the terminal.
    segments = [Segment(clean(piece.text), STYLES[piece.tone]) for piece in line]
    used = sum(cell_len(segment.text) for segment in segments)
    made = Strip(segments, used).adjust_cell_length(cells)
    return made.apply_style(over) if over is not None else made
