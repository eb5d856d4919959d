"""Value pane: a table that reads only the visible part, with a cursor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from ckpttool.browser.lines import TextPiece, pad_text
from ckpttool.browser.panes import HERE, STYLES, paint_line
from ckpttool.browser.value_table import CellFormat, CellSource, ValueGrid, choose_cell_format, format_exactly
from ckpttool.core.dtypes import np
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.text import describe_error
from ckpttool.verification import moments

if TYPE_CHECKING:
    from ckpttool.browser.reader import Job
    from ckpttool.verification.moments import Moments


# Rows and columns to read around the visible ones, so that small moves need no reading.
_MORE = 16


class GridPane(Widget, can_focus=True):
    """Table of values. It posts `CellCursorChanged`, and `CellsNeeded` to request cells."""

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

    class CellCursorChanged(Message):
        """The cursor moved to another cell, or a read finished."""

    class CellsNeeded(Message):
        """Unread cells became visible."""

    def __init__(self, grid: ValueGrid, block: CellSource, moments: Moments | None) -> None:
        super().__init__()
        self.grid, self.block = grid, block
        self.table = self.row = self.column = 0
        self._top = self._left = 0
        self._known = moments
        self._written: CellFormat | None = None
        self._cells: np.ndarray | None = None
        self._position: tuple[int, range, range] = (0, range(0), range(0))
        self.error: str | None = None

    def turn(self, block: CellSource, moments: Moments | None) -> None:
        """Show the values of another side at the same position."""
        self.block, self._known, self._written, self._cells, self.error = block, moments, None, None, None
        self.go(self.table, self.row, self.column)

    def go(self, table: int, row: int, column: int) -> None:
        """Move the cursor to a cell and scroll it into view."""
        self.table = max(0, min(table, self.grid.slices - 1))
        self.row = max(0, min(row, self.grid.rows - 1))
        self.column = max(0, min(column, self.grid.columns - 1))
        self._top = _scroll_to(self._top, self.row, self.visible_rows)
        self._left = _scroll_to(self._left, self.column, self.visible_columns)
        self._request()
        self.post_message(self.CellCursorChanged())
        self.refresh()

    @property
    def width(self) -> int:
        """Width of a value in cells."""
        return self._written.width if self._written is not None else 11

    @property
    def label(self) -> int:
        """Width of a row number in cells."""
        return max(4, len(f"{self._row_name(self.grid.rows - 1)}") + 1)

    @property
    def visible_rows(self) -> int:
        """Number of visible rows."""
        return max(1, self.size.height - 1)

    @property
    def visible_columns(self) -> int:
        """Number of visible columns."""
        return max(1, (self.size.width - self.label) // (self.width + 1))

    def action_move(self, down: int, right: int) -> None:
        """Move the cursor."""
        self.go(self.table, self.row + down, self.column + right)

    def action_page(self, by: int) -> None:
        """Move the cursor by `by` screens."""
        self.action_move(by * self.visible_rows, 0)

    def action_corner(self, which: int) -> None:
        """Go to the first cell of the table, or to the last one."""
        self.go(self.table, which * self.grid.rows, which * self.grid.columns)

    def value(self) -> str:
        """Return the cursor's index, and the full value if it has been read."""
        index = self.grid.index(self.table, self.row, self.column)
        if index is None:
            return "past the end"
        table, rows, columns = self._position
        if self._cells is None or table != self.table or self.row not in rows or self.column not in columns:
            return f"{list(index)}"
        number = self._cells[self.row - rows.start, self.column - columns.start]
        return f"{list(index)} = {format_exactly(number)}" if index else format_exactly(number)

    def on_resize(self) -> None:
        """Keep the cursor visible after a resize."""
        self.go(self.table, self.row, self.column)

    def _request(self) -> None:
        table, rows, columns = self._position
        visible = self._visible(0)
        if (
            self._cells is None
            or table != self.table
            or not (_contains_range(rows, visible[0]) and _contains_range(columns, visible[1]))
        ):
            self.post_message(self.CellsNeeded())

    def _visible(self, more: int) -> tuple[range, range]:
        return (
            _visible_range(self._top, self.visible_rows, more, self.grid.rows),
            _visible_range(self._left, self.visible_columns, more, self.grid.columns),
        )

    def reading(self, post: Callable[[Callable[[], None]], None]) -> Job:
        """Read the visible cells and a margin; pass the result to the pane through `post`."""
        return self._read(self.block, self.table, *self._visible(_MORE), post)

    def _read(
        self,
        block: CellSource,
        table: int,
        rows: range,
        columns: range,
        post: Callable[[Callable[[], None]], None],
    ) -> Iterator[None]:
        try:
            values = block.read(self.grid, table, rows, columns)
        except CkpttoolError as error:
            sentence = describe_error(error)
            post(lambda: self._failed(block, sentence))
        else:
            post(lambda: self._take(block, (table, rows, columns), values))
        yield

    def _failed(self, block: CellSource, text: str) -> None:
        if block is self.block:
            self.error = text
            self.refresh()

    def _take(self, block: CellSource, position: tuple[int, range, range], values: np.ndarray) -> None:
        if block is self.block:
            self._position, self._cells = position, values
            first = self._written is None
            self._written = self._written or choose_cell_format(
                values.dtype, self._known or _block_moments(values)
            )
            if first:
                self.go(self.table, self.row, self.column)
            self.post_message(self.CellCursorChanged())
            self.refresh()

    def _row_name(self, row: int) -> str:
        return str(row * self.grid.wrap if len(self.grid.shape) == 1 else row) if self.grid.shape else ""

    def render_line(self, y: int) -> Strip:
        """Draw the line of column numbers, or a row."""
        cells = self.size.width
        if self.error is not None:
            return paint_line((TextPiece(pad_text(self.error, cells) if y == 1 else "", "bad"),), cells)
        row = self._top + y - 1
        columns = range(self._left, min(self._left + self.visible_columns, self.grid.columns))
        if y == 0:
            names = "".join(f" {column:>{self.width}}" for column in columns) if self.grid.shape else ""
            return paint_line((TextPiece(f"{'':{self.label}}{names}", "dim"),), cells)
        if row >= self.grid.rows:
            return Strip.blank(cells)
        parts = [paint_line((TextPiece(f"{self._row_name(row):>{self.label}}", "dim"),), self.label)]
        parts += [self._cell(row, column) for column in columns]
        return Strip.join(parts).adjust_cell_length(cells)

    def _cell(self, row: int, column: int) -> Strip:
        here = (row, column) == (self.row, self.column)
        text = Strip.blank(self.width)
        table, rows, columns = self._position
        if self.grid.index(self.table, row, column) is not None:
            shown, tone = "·", STYLES["dim"]
            if (
                self._cells is not None
                and self._written is not None
                and (table == self.table and row in rows and column in columns)
            ):
                value = self._cells[row - rows.start, column - columns.start]
                shown = self._written(value)
                tone = STYLES["bad" if shown in ("nan", "inf", "-inf") else "dim" if shown == "0" else ""]
            text = paint_line((TextPiece(pad_text(shown, self.width, right=True)),), self.width, tone)
        return Strip.join([Strip.blank(1), text.apply_style(HERE) if here else text])


def _block_moments(values: np.ndarray) -> Moments | None:
    """Return the moments of the cells read, for use while those of the whole are unknown."""
    return moments.compute_moments(values) if values.dtype != object and values.size else None


def _scroll_to(first: int, at: int, height: int) -> int:
    return min(max(first, at - height + 1), at)


def _visible_range(first: int, height: int, more: int, count: int) -> range:
    return range(max(0, first - more), min(count, first + height + more))


def _contains_range(outer: range, inner: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop
