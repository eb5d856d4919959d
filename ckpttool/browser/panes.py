"""Panes that draw only the lines that are seen: the base of all, and one for a page of text."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from ckpttool.browser.lines import Line, Piece
from ckpttool.browser.paint import strip

_WHEEL = 3


class Found(Message):
    """What another thread found out, to be taken up in that of the screen."""

    def __init__(self, take: Callable[[], None]) -> None:
        super().__init__()
        self.take = take


class Pane(Widget, can_focus=True):
    """Lines of which `top` is the first one that is seen; the last column tells which part that is."""

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
        """Return one line in so many cells."""
        raise NotImplementedError

    def render_line(self, y: int) -> Strip:
        """Draw the line at `y` of what is seen."""
        cells = self.size.width - 1
        at = self.top + y
        text = self.line(at, cells) if at < self.count() else Strip.blank(cells)
        return Strip.join([text, strip((Piece(self._bar(y), "dim"),), 1)])

    def _bar(self, y: int) -> str:
        count, seen = self.count(), self.size.height
        if count <= seen:
            return " "
        tall = max(1, seen * seen // count)
        first = round(self.top / (count - seen) * (seen - tall))
        return "┃" if first <= y < first + tall else " "

    def scroll_lines(self, top: int) -> None:
        """Show the lines from `top` on, as far as there are that many."""
        self.top = max(0, min(top, self.count() - self.size.height))
        self.refresh()

    def action_move(self, by: int) -> None:
        """Go down so many lines."""
        self.scroll_lines(self.top + by)

    def action_page(self, by: int) -> None:
        """Go down so many screens."""
        self.action_move(by * max(1, self.size.height - 1))

    def action_end(self, which: int) -> None:
        """Go to the first line or to the last one."""
        self.action_move(which * self.count())

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scroll without moving a cursor."""
        event.stop()
        self.scroll_lines(self.top + _WHEEL)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scroll without moving a cursor."""
        event.stop()
        self.scroll_lines(self.top - _WHEEL)


class Page(Pane):
    """A page of text, made for the width that it gets."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002  # Textual's word
        super().__init__(id=id)
        self._write: Callable[[int], list[Line]] = lambda _: []
        self._lines: list[Line] = []

    def show(self, write: Callable[[int], list[Line]], *, stay: bool = False) -> None:
        """Show what `write` gives for a width, from its beginning unless it is to `stay` where it is."""
        self._write = write
        self._lines = write(max(8, self.size.width - 2)) if self.size.width else []
        self.scroll_lines(self.top if stay else 0)

    def on_resize(self) -> None:
        """Write it anew for another width."""
        self.show(self._write, stay=True)

    def count(self) -> int:
        """Return the number of lines."""
        return len(self._lines)

    def line(self, at: int, cells: int) -> Strip:
        """Return one line in so many cells."""
        return strip(self._lines[at], cells)


class Bar(Widget):
    """One line that only tells."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002  # Textual's word
        super().__init__(id=id)
        self._write: Callable[[int], Line] = lambda _: ()

    def show(self, write: Callable[[int], Line]) -> None:
        """Show what `write` gives for a width."""
        self._write = write
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Draw the line."""
        return strip(self._write(self.size.width) if y == 0 else (), self.size.width)
