"""Screens above the tree: pages of text, and the table of a tensor's values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import Input

from ckpttool.browser.keys import PAGE, VALUES, BrowserKey
from ckpttool.browser.lines import Line, TextPiece, pad_text
from ckpttool.browser.panes import Bar, Page, ReaderResult
from ckpttool.browser.reader import Job
from ckpttool.browser.value_pane import GridPane
from ckpttool.browser.value_table import CellSource, ValueGrid
from ckpttool.verification.moments import Moments

_WIDE, _WRAP, _WRAP_WIDE = 130, 5, 10


def textual_bindings(keys: Sequence[BrowserKey]) -> list[Any]:
    """Return the keys as Textual bindings.

    The screen handles them before any pane does, so that keys typed ahead over a slow connection reach
    the screen that the preceding keys opened.
    """
    return [Binding(key.names, key.action, key.does, show=False, priority=True) for key in keys if key.names]


def key_line(keys: Sequence[BrowserKey], cells: int, *, two: bool) -> Line:
    """Return as many keys with their words as fit into one line; help and quit have priority."""
    shown = [key for key in keys if key.word and (two or not key.two)]
    # Of a pair of keys, show the first (forward) one.
    names = {key: key.shown.partition("  ")[0] for key in shown}
    widths = {key: len(names[key]) + len(key.word) + 3 for key in shown}
    kept: list[BrowserKey] = []
    for key in sorted(shown, key=lambda action: action.word not in ("help", "quit", "back")):
        if sum(widths[action] for action in kept) + widths[key] <= cells:
            kept.append(key)
    pieces: list[TextPiece] = []
    for key in shown:
        if key in kept:
            pieces += [TextPiece(f" {names[key]} ", "mark"), TextPiece(f"{key.word} ", "dim")]
    return tuple(pieces)


class PageScreen(Screen[None]):
    """Full-screen page of text."""

    BINDINGS = textual_bindings(PAGE)

    def __init__(self, title: str, write: Callable[[int], list[Line]]) -> None:
        super().__init__()
        self._heading, self._write = title, write

    def compose(self) -> ComposeResult:
        """Yield the title, the page and the keys."""
        yield Bar(id="title")
        yield Page(id="page")
        yield Bar(id="keys")

    def on_mount(self) -> None:
        """Fill the widgets."""
        self.query_one("#title", Bar).show(lambda cells: (TextPiece(pad_text(self._heading, cells), "head"),))
        self.query_one("#keys", Bar).show(lambda cells: key_line(PAGE, cells, two=False))
        page = self.query_one(Page)
        page.show(self._write)
        self.set_focus(page)

    def action_leave(self) -> None:
        """Go back."""
        self.dismiss()


class IndexInput(Input):
    """Input line for an index."""

    BINDINGS = [Binding("escape", "screen.no_index", show=False)]  # noqa: RUF012  # Textual's own form


class ValuesScreen(Screen[None]):
    """Table of one tensor's values, or of both sides and their difference."""

    BINDINGS = textual_bindings(VALUES)

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        sides: Sequence[tuple[str, CellSource, Moments | None]],
        request: Callable[[Job], None],
        at: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self._tensor, self._shape, self._sides, self._request, self._at = name, shape, sides, request, at
        self._side = 0

    def compose(self) -> ComposeResult:
        """Yield the title, the table, the cursor position and the keys."""
        yield Bar(id="title")
        wrap = _WRAP_WIDE if self.app.size.width >= _WIDE else _WRAP
        _, block, moments = self._sides[0]
        yield GridPane(ValueGrid(self._shape, wrap), block, moments)
        yield Bar(id="cell")
        yield IndexInput(id="index", placeholder="index, e.g. 3, 17")
        yield Bar(id="keys")

    @property
    def pane(self) -> GridPane:
        """The table."""
        return self.query_one(GridPane)

    def on_mount(self) -> None:
        """Start at the largest difference, or else at the first cell."""
        two = len(self._sides) > 1
        self.query_one("#keys", Bar).show(lambda cells: key_line(VALUES, cells, two=two))
        self.query_one("#index").display = False
        self.set_focus(self.pane)
        if self._at is not None:
            self.call_after_refresh(self.pane.go, *self.pane.grid.cell(self._at))
        self._show_position()

    def _show_position(self) -> None:
        grid, side = self.pane.grid, self._sides[self._side][0]
        text = f"  {list(self._shape)}"
        if grid.slices > 1:
            text += f"  {grid.title(self.pane.table)}  {self.pane.table + 1:,} of {grid.slices:,}"
        text += f"  {side}" if side else ""

        def title(cells: int) -> Line:
            return TextPiece(pad_text(self._tensor, max(8, cells - len(text))), "head"), TextPiece(
                text, "dim"
            )

        self.query_one("#title", Bar).show(title)
        self.query_one("#cell", Bar).show(lambda cells: (TextPiece(pad_text(self.pane.value(), cells)),))

    def on_grid_pane_cell_cursor_changed(self) -> None:
        """Show the cursor position."""
        self._show_position()

    def on_grid_pane_cells_needed(self) -> None:
        """Request the visible cells."""
        self._request(self.pane.reading(self._post_result))

    def _post_result(self, take: Callable[[], None]) -> None:
        self.app.post_message(ReaderResult(take))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Send all keys to the index input while the user types."""
        del parameters
        return action == "no_index" or not self.query_one("#index").display

    def action_table(self, by: int) -> None:
        """Move by `by` tables."""
        self.pane.go(self.pane.table + by, self.pane.row, self.pane.column)

    def action_side(self) -> None:
        """Show the other side, or the difference."""
        self._side = (self._side + 1) % len(self._sides)
        _, block, moments = self._sides[self._side]
        self.pane.turn(block, moments)

    def action_go(self) -> None:
        """Open the index input."""
        index = self.query_one("#index", Input)
        index.value = ""
        index.display = True
        self.set_focus(index)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Go to the index entered; on an invalid index, ask again."""
        event.stop()
        try:
            at = self.pane.grid.cell([int(word) for word in event.value.replace(",", " ").split()])
        except ValueError:
            event.input.placeholder = f"index out of range for {list(self._shape)}"
            event.input.value = ""
            return
        self.action_no_index()
        self.pane.go(*at)

    def action_no_index(self) -> None:
        """Close the index input."""
        self.query_one("#index").display = False
        self.set_focus(self.pane)

    def action_leave(self) -> None:
        """Go back."""
        self.dismiss()
