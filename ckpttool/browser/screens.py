"""The screens over the tree: pages of text, and the table of a tensor's values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import Input

from ckpttool.browser.grid import Grid
from ckpttool.browser.grid_pane import GridPane
from ckpttool.browser.keys import PAGE, VALUES, Key
from ckpttool.browser.lines import Line, Piece, padded
from ckpttool.browser.panes import Bar, Found, Page
from ckpttool.browser.values import Block

if TYPE_CHECKING:
    from ckpttool.browser.reader import Job
    from ckpttool.ops.moments import Moments

_WIDE, _WRAP, _WRAP_WIDE = 130, 5, 10


def bindings(keys: Sequence[Key]) -> list[Any]:
    """Return the keys as Textual wants them.

    They are the screen's before any pane's: what is typed ahead, over a slow line, meets what it follows.
    """
    return [Binding(key.names, key.action, key.does, show=False, priority=True) for key in keys if key.names]


def last_line(keys: Sequence[Key], cells: int, *, two: bool) -> Line:
    """Return as many keys as fit into one line, with a word for each; help and quit first of all."""
    said = [key for key in keys if key.word and (two or not key.two)]
    # Of two keys the first one, which is the forward one.
    names = {key: key.shown.partition("  ")[0] for key in said}
    widths = {key: len(names[key]) + len(key.word) + 3 for key in said}
    kept: list[Key] = []
    for key in sorted(said, key=lambda each: each.word not in ("help", "quit", "back")):
        if sum(widths[each] for each in kept) + widths[key] <= cells:
            kept.append(key)
    pieces: list[Piece] = []
    for key in said:
        if key in kept:
            pieces += [Piece(f" {names[key]} ", "mark"), Piece(f"{key.word} ", "dim")]
    return tuple(pieces)


class PageScreen(Screen[None]):
    """A page of text over all."""

    BINDINGS = bindings(PAGE)

    def __init__(self, title: str, write: Callable[[int], list[Line]]) -> None:
        super().__init__()
        self._heading, self._write = title, write

    def compose(self) -> ComposeResult:
        """Give the title, the page and the keys."""
        yield Bar(id="title")
        yield Page(id="page")
        yield Bar(id="keys")

    def on_mount(self) -> None:
        """Fill them."""
        self.query_one("#title", Bar).show(lambda cells: (Piece(padded(self._heading, cells), "head"),))
        self.query_one("#keys", Bar).show(lambda cells: last_line(PAGE, cells, two=False))
        page = self.query_one(Page)
        page.show(self._write)
        self.set_focus(page)

    def action_leave(self) -> None:
        """Go back."""
        self.dismiss()


class IndexInput(Input):
    """Where an index is typed."""

    BINDINGS = [Binding("escape", "screen.no_index", show=False)]  # noqa: RUF012  # Textual's own form


class ValuesScreen(Screen[None]):
    """The table of values of one tensor, or of both sides' and of what lies between."""

    BINDINGS = bindings(VALUES)

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        sides: Sequence[tuple[str, Block, Moments | None]],
        ask: Callable[[Job], None],
        at: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self._tensor, self._shape, self._sides, self._ask, self._at = name, shape, sides, ask, at
        self._side = 0

    def compose(self) -> ComposeResult:
        """Give the title, the table, what is under the cursor and the keys."""
        yield Bar(id="title")
        wrap = _WRAP_WIDE if self.app.size.width >= _WIDE else _WRAP
        _, block, known = self._sides[0]
        yield GridPane(Grid(self._shape, wrap), block, known)
        yield Bar(id="cell")
        yield IndexInput(id="index", placeholder="index, such as 3, 17")
        yield Bar(id="keys")

    @property
    def pane(self) -> GridPane:
        """The table."""
        return self.query_one(GridPane)

    def on_mount(self) -> None:
        """Begin where the largest difference is, else at the first cell."""
        two = len(self._sides) > 1
        self.query_one("#keys", Bar).show(lambda cells: last_line(VALUES, cells, two=two))
        self.query_one("#index").display = False
        self.set_focus(self.pane)
        if self._at is not None:
            self.call_after_refresh(self.pane.go, *self.pane.grid.cell(self._at))
        self._tell()

    def _tell(self) -> None:
        grid, side = self.pane.grid, self._sides[self._side][0]
        text = f"  {list(self._shape)}"
        if grid.slices > 1:
            text += f"  {grid.title(self.pane.table)}  {self.pane.table + 1:,} of {grid.slices:,}"
        text += f"  {side}" if side else ""

        def title(cells: int) -> Line:
            return Piece(padded(self._tensor, max(8, cells - len(text))), "head"), Piece(text, "dim")

        self.query_one("#title", Bar).show(title)
        self.query_one("#cell", Bar).show(lambda cells: (Piece(padded(self.pane.value(), cells)),))

    def on_grid_pane_moved(self) -> None:
        """Say where the cursor is."""
        self._tell()

    def on_grid_pane_wanted(self) -> None:
        """Have the cells read that are seen."""
        self._ask(self.pane.reading(self._told))

    def _told(self, take: Callable[[], None]) -> None:
        self.app.post_message(Found(take))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave all keys to the index while it is typed."""
        del parameters
        return action == "no_index" or not self.query_one("#index").display

    def action_table(self, by: int) -> None:
        """Go to the next table."""
        self.pane.go(self.pane.table + by, self.pane.row, self.pane.column)

    def action_side(self) -> None:
        """Show the other side, or the difference."""
        self._side = (self._side + 1) % len(self._sides)
        _, block, known = self._sides[self._side]
        self.pane.turn(block, known)

    def action_go(self) -> None:
        """Let an index be typed."""
        index = self.query_one("#index", Input)
        index.value = ""
        index.display = True
        self.set_focus(index)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Go to the index that was typed; wait for another where there is none such."""
        event.stop()
        try:
            at = self.pane.grid.cell([int(word) for word in event.value.replace(",", " ").split()])
        except ValueError:
            event.input.placeholder = f"no such index in {list(self._shape)}"
            event.input.value = ""
            return
        self.action_no_index()
        self.pane.go(*at)

    def action_no_index(self) -> None:
        """Give up typing."""
        self.query_one("#index").display = False
        self.set_focus(self.pane)

    def action_leave(self) -> None:
        """Go back."""
        self.dismiss()
