"""Panes that draw only their visible lines: the base class, its drawing, and a page of text."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from ckpttool.browser.lines import Line, TextPiece, Tone
from ckpttool.core.text import clean

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
# Cursor style in a pane without focus.
THERE = Style(bold=True, underline=True)


def paint_line(line: Line, cells: int, over: Style | None = None) -> Strip:
    """Return the line in exactly `cells` cells, with the style `over` applied on top."""
    # Last safeguard: text from a file must never control the terminal.
    segments = [Segment(clean(piece.text), STYLES[piece.tone]) for piece in line]
    used = sum(cell_len(segment.text) for segment in segments)
    strip = Strip(segments, used).adjust_cell_length(cells)
    return strip.apply_style(over) if over is not None else strip


_WHEEL = 3


class ReaderResult(Message):
    """Result of another thread, to be applied in the screen's thread."""

    def __init__(self, take: Callable[[], None]) -> None:
        super().__init__()
        self.take = take


class Pane(Widget, can_focus=True):
    """Scrollable lines; `top` is the first visible one, and the last column is a scroll bar."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("home", "end(-1)", show=False),
        Binding("end", "end(1)", show=False),
    ]
    top = 0

    def count(self) -> int:
        """Return the number of lines."""
        raise NotImplementedError

    def line(self, at: int, cells: int) -> Strip:
        """Return one line, `cells` wide."""
        raise NotImplementedError

    def render_line(self, y: int) -> Strip:
        """Draw the visible line `y`."""
        cells = self.size.width - 1
        at = self.top + y
        text = self.line(at, cells) if at < self.count() else Strip.blank(cells)
        return Strip.join([text, paint_line((TextPiece(self._bar(y), "dim"),), 1)])

    def _bar(self, y: int) -> str:
        count, height = self.count(), self.size.height
        if count <= height:
            return " "
        tall = max(1, height * height // count)
        first = round(self.top / (count - height) * (height - tall))
        return "┃" if first <= y < first + tall else " "

    def scroll_lines(self, top: int) -> None:
        """Scroll to line `top`, or to the last possible one."""
        self.top = max(0, min(top, self.count() - self.size.height))
        self.refresh()

    def action_move(self, by: int) -> None:
        """Scroll down by `by` lines."""
        self.scroll_lines(self.top + by)

    def action_page(self, by: int) -> None:
        """Scroll down by `by` screens."""
        self.action_move(by * max(1, self.size.height - 1))

    def action_end(self, which: int) -> None:
        """Go to the first line or to the last one."""
        self.action_move(which * self.count())

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scroll without moving the cursor."""
        event.stop()
        self.scroll_lines(self.top + _WHEEL)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scroll without moving the cursor."""
        event.stop()
        self.scroll_lines(self.top - _WHEEL)


class Page(Pane):
    """Page of text, wrapped to the pane's width."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002  # Textual's word
        super().__init__(id=id)
        self._write: Callable[[int], list[Line]] = lambda _: []
        self._lines: list[Line] = []

    def show(self, write: Callable[[int], list[Line]], *, stay: bool = False) -> None:
        """Show the lines that `write` returns for a width, from the top unless `stay` is set."""
        self._write = write
        self._lines = write(max(8, self.size.width - 2)) if self.size.width else []
        self.scroll_lines(self.top if stay else 0)

    def on_resize(self) -> None:
        """Wrap the text again for the new width."""
        self.show(self._write, stay=True)

    def count(self) -> int:
        """Return the number of lines."""
        return len(self._lines)

    def line(self, at: int, cells: int) -> Strip:
        """Return one line, `cells` wide."""
        return paint_line(self._lines[at], cells)


class Bar(Widget):
    """One line of text without interaction."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002  # Textual's word
        super().__init__(id=id)
        self._write: Callable[[int], Line] = lambda _: ()

    def show(self, write: Callable[[int], Line]) -> None:
        """Show the line that `write` returns for a width."""
        self._write = write
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Draw the line."""
        return paint_line(self._write(self.size.width) if y == 0 else (), self.size.width)
