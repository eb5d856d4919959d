"""The pane of values: a table that is read where it is looked at, with a cursor on one cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from ckpttool.browser.grid import Grid, Written, exactly, written
from ckpttool.browser.lines import Piece, padded
from ckpttool.browser.paint import HERE, STYLES, strip
from ckpttool.errors import CkpttoolError
from ckpttool.shown import sentence

if TYPE_CHECKING:
    import numpy as np

    from ckpttool.browser.reader import Job
    from ckpttool.browser.values import Block
    from ckpttool.ops.moments import Moments

# Rows and columns that are read beyond those that are seen, so that a step needs no reading.
_MORE = 16


class GridPane(Widget, can_focus=True):
    """A table of values. It tells by `Moved` where its cursor goes, and by `Wanted` what it needs to read."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1, 0)", show=False),
        Binding("down,j", "move(1, 0)", show=False),
        Binding("left", "move(0, -1)", show=False),
        Binding("right,l", "move(0, 1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("home", "corner(0)", show=False),
        Binding("end", "corner(1)", show=False),
    ]

    class Moved(Message):
        """The cursor is on another cell, or something was read."""

    class Wanted(Message):
        """Cells are seen that were not read yet."""

    def __init__(self, grid: Grid, block: Block, known: Moments | None) -> None:
        super().__init__()
        self.grid, self.block = grid, block
        self.table = self.row = self.column = 0
        self._top = self._left = 0
        self._known = known
        self._written: Written | None = None
        self._cells: np.ndarray | None = None
        self._place: tuple[int, range, range] = (0, range(0), range(0))
        self.error: str | None = None

    def turn(self, block: Block, known: Moments | None) -> None:
        """Show the values of another side in the same place."""
        self.block, self._known, self._written, self._cells, self.error = block, known, None, None, None
        self.go(self.table, self.row, self.column)

    def go(self, table: int, row: int, column: int) -> None:
        """Put the cursor on a cell, and that cell on the screen."""
        self.table = max(0, min(table, self.grid.slices - 1))
        self.row = max(0, min(row, self.grid.rows - 1))
        self.column = max(0, min(column, self.grid.columns - 1))
        self._top = _scrolled(self._top, self.row, self.seen_rows)
        self._left = _scrolled(self._left, self.column, self.seen_columns)
        self._ask()
        self.post_message(self.Moved())
        self.refresh()

    @property
    def width(self) -> int:
        """The cells that a value takes."""
        return self._written.width if self._written is not None else 11

    @property
    def label(self) -> int:
        """The cells that the number of a row takes."""
        return max(4, len(f"{self._row_name(self.grid.rows - 1)}") + 1)

    @property
    def seen_rows(self) -> int:
        """How many rows are on the screen."""
        return max(1, self.size.height - 1)

    @property
    def seen_columns(self) -> int:
        """How many columns are on the screen."""
        return max(1, (self.size.width - self.label) // (self.width + 1))

    def action_move(self, down: int, right: int) -> None:
        """Move the cursor."""
        self.go(self.table, self.row + down, self.column + right)

    def action_page(self, by: int) -> None:
        """Move the cursor down a screen."""
        self.action_move(by * self.seen_rows, 0)

    def action_corner(self, which: int) -> None:
        """Go to the first cell of the table, or to the last one."""
        self.go(self.table, which * self.grid.rows, which * self.grid.columns)

    def value(self) -> str:
        """Return the index that the cursor is on, and all of its value as far as it was read."""
        index = self.grid.index(self.table, self.row, self.column)
        if index is None:
            return "beyond the end"
        table, rows, columns = self._place
        if self._cells is None or table != self.table or self.row not in rows or self.column not in columns:
            return f"{list(index)}"
        found = self._cells[self.row - rows.start, self.column - columns.start]
        return f"{list(index)} = {exactly(found)}" if index else exactly(found)

    def on_resize(self) -> None:
        """Keep the cursor on the screen."""
        self.go(self.table, self.row, self.column)

    def _ask(self) -> None:
        table, rows, columns = self._place
        seen = self._seen(0)
        if (
            self._cells is None
            or table != self.table
            or not (_holds(rows, seen[0]) and _holds(columns, seen[1]))
        ):
            self.post_message(self.Wanted())

    def _seen(self, more: int) -> tuple[range, range]:
        return (
            _around(self._top, self.seen_rows, more, self.grid.rows),
            _around(self._left, self.seen_columns, more, self.grid.columns),
        )

    def reading(self, tell: Callable[[Callable[[], None]], None]) -> Job:
        """Read what is seen, and some more; `tell` the pane what was found, in its own thread."""
        return self._read(self.block, self.table, *self._seen(_MORE), tell)

    def _read(
        self,
        block: Block,
        table: int,
        rows: range,
        columns: range,
        tell: Callable[[Callable[[], None]], None],
    ) -> Iterator[None]:
        try:
            found = block.read(self.grid, table, rows, columns)
        except CkpttoolError as error:
            said = sentence(error)
            tell(lambda: self._failed(block, said))
        else:
            tell(lambda: self._take(block, (table, rows, columns), found))
        yield

    def _failed(self, block: Block, said: str) -> None:
        if block is self.block:
            self.error = said
            self.refresh()

    def _take(self, block: Block, place: tuple[int, range, range], found: np.ndarray) -> None:
        if block is self.block:
            self._place, self._cells = place, found
            first = self._written is None
            self._written = self._written or written(found.dtype, self._known or _of(found))
            if first:
                self.go(self.table, self.row, self.column)
            self.post_message(self.Moved())
            self.refresh()

    def _row_name(self, row: int) -> str:
        return str(row * self.grid.wrap if len(self.grid.shape) == 1 else row) if self.grid.shape else ""

    def render_line(self, y: int) -> Strip:
        """Draw the line of column numbers, or that of a row."""
        cells = self.size.width
        if self.error is not None:
            return strip((Piece(padded(self.error, cells) if y == 1 else "", "bad"),), cells)
        row = self._top + y - 1
        columns = range(self._left, min(self._left + self.seen_columns, self.grid.columns))
        if y == 0:
            names = "".join(f" {column:>{self.width}}" for column in columns) if self.grid.shape else ""
            return strip((Piece(f"{'':{self.label}}{names}", "dim"),), cells)
        if row >= self.grid.rows:
            return Strip.blank(cells)
        parts = [strip((Piece(f"{self._row_name(row):>{self.label}}", "dim"),), self.label)]
        parts += [self._cell(row, column) for column in columns]
        return Strip.join(parts).adjust_cell_length(cells)

    def _cell(self, row: int, column: int) -> Strip:
        here = (row, column) == (self.row, self.column)
        text = Strip.blank(self.width)
        table, rows, columns = self._place
        if self.grid.index(self.table, row, column) is not None:
            said, tone = "·", STYLES["dim"]
            if (
                self._cells is not None
                and self._written is not None
                and (table == self.table and row in rows and column in columns)
            ):
                value = self._cells[row - rows.start, column - columns.start]
                said = self._written(value)
                tone = STYLES["bad" if said in ("nan", "inf", "-inf") else "dim" if said == "0" else ""]
            text = strip((Piece(padded(said, self.width, right=True)),), self.width, tone)
        return Strip.join([Strip.blank(1), text.apply_style(HERE) if here else text])


def _of(found: np.ndarray) -> Moments | None:
    """Return the moments of what was read, where those of the whole are not known."""
    from ckpttool.ops import moments

    return moments.of(found) if found.dtype != object and found.size else None


def _scrolled(first: int, at: int, seen: int) -> int:
    return min(max(first, at - seen + 1), at)


def _around(first: int, seen: int, more: int, count: int) -> range:
    return range(max(0, first - more), min(count, first + seen + more))


def _holds(outer: range, inner: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop
