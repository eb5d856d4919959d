"""Panes: the tree, value tables, and their text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from ckpttool.browser.comparison import ComparisonState
from ckpttool.browser.lines import Line, TextPiece, Tone, fit_text, pad_text
from ckpttool.browser.listing import AliasRow, Row
from ckpttool.browser.outline import Outline, OutlineLine
from ckpttool.commands import stats
from ckpttool.core.deferred import dataclass
from ckpttool.core.dtypes import np
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.slices import slice_leaf
from ckpttool.core.source import LARGE, Inline, Span, StridedView
from ckpttool.core.text import clean, describe_error, format_size, shorten
from ckpttool.core.tree import Leaf, json_value
from ckpttool.listing.modules import ModuleSummary, Sort, describe_module_kind
from ckpttool.listing.rows import TensorRow

if TYPE_CHECKING:
    from ckpttool.browser.reader import Job
    from ckpttool.commands.stats import Moments
    from ckpttool.core.source import Shape


# Table of a tensor's values: its last two axes, for one index into all axes before them.

# Maximum widths by kind of value, and the minimum width; numbers are as wide as the largest needs.
_COMPLEX, _TEXT, _BOOL, _LEAST = 22, 24, 5, 4
# Significant digits, and the powers of ten between which numbers have no exponent.
_DIGITS, _SMALL, _LARGE = 5, -4, 5


@dataclass(frozen=True, slots=True)
class ValueGrid:
    """Table layout of an array of `shape`; an array with one axis has `wrap` elements per row."""

    shape: Shape
    wrap: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        if len(self.shape) < 2:
            return -(-self.shape[0] // self.wrap) if self.shape else 1
        return self.shape[-2]

    @property
    def columns(self) -> int:
        """Number of columns."""
        if len(self.shape) < 2:
            return min(self.wrap, self.shape[0]) if self.shape else 1
        return self.shape[-1]

    @property
    def slices(self) -> int:
        """Number of tables: the product of all axes before the last two."""
        return math.prod(self.shape[:-2])

    def leading(self, number: int) -> Shape:
        """Return the leading indices of table `number`, counted in C order."""
        place = []
        for extent in reversed(self.shape[:-2]):
            number, at = divmod(number, extent)
            place.append(at)
        return tuple(reversed(place))

    def index(self, table: int, row: int, column: int) -> Shape | None:
        """Return the index of a cell; None past the end of the last row."""
        if not self.shape:
            return ()
        if len(self.shape) == 1:
            at = row * self.wrap + column
            return (at,) if at < self.shape[0] else None
        return (*self.leading(table), row, column)

    def cell(self, index: Sequence[int]) -> tuple[int, int, int]:
        """Return the table, row and column of an index; raise ValueError if it is out of range."""
        if len(index) != len(self.shape) or any(
            not 0 <= at < extent for at, extent in zip(index, self.shape, strict=True)
        ):
            raise ValueError("index out of range")
        if len(self.shape) < 2:
            return (0, *divmod(index[0], self.wrap)) if index else (0, 0, 0)
        table = 0
        for at, extent in zip(index[:-2], self.shape[:-2], strict=True):
            table = table * extent + at
        return table, index[-2], index[-1]

    def title(self, table: int) -> str:
        """Return the table's position as an index expression: `[3, 0, :, :]`."""
        places = [*map(str, self.leading(table)), *[":"] * min(2, len(self.shape))]
        return f"[{', '.join(places)}]"


@dataclass(frozen=True, slots=True)
class CellFormat:
    """Cell format of `width` cells; floats have `decimals`, or an exponent if it is None."""

    kind: str
    width: int
    decimals: int | None = None

    def __call__(self, value: Any) -> str:
        """Return the value's text; a small nonzero number is never shown as zero."""
        if self.kind == "f":
            number = float(value)
            if number == 0 or not math.isfinite(number):
                return "0" if number == 0 else str(number)
            if self.decimals is not None:
                text = f"{number:.{self.decimals}f}"
                if text.strip("-0."):
                    return text
            return f"{number:.{_DIGITS - 1 if self.decimals is None else 1}e}"
        if self.kind == "c":
            return f"{value.real:.4g}{value.imag:+.4g}j"
        if self.kind == "b":
            return str(bool(value)).lower()
        return str(value) if self.kind in "iu" else shorten(to_printable(value), self.width)


def choose_cell_format(dtype: np.dtype, known: Moments | None) -> CellFormat:
    """Return the cell format of a type, given the range of the values in `known`."""
    kind = "f" if dtype.kind == "V" else dtype.kind
    low, high = (known.low, known.high) if known is not None and known.finite else (0.0, 1.0)
    if kind == "f":
        largest = max(abs(low), abs(high))
        power = math.floor(math.log10(largest)) if largest else 0
        decimals = _DIGITS - 1 - power if _SMALL < power < _LARGE else None
        text = [
            f"{end:.{decimals}f}" if decimals is not None else f"{-1:.{_DIGITS - 1}e}" for end in (low, high)
        ]
        return CellFormat(kind, max(len(f"{-1:.1e}"), *map(len, text)), decimals)
    if kind in "iu":
        most = max(len(str(int(low))), len(str(int(high)))) if known is not None else 20
        return CellFormat(kind, max(_LEAST, most))
    return CellFormat(kind, {"c": _COMPLEX, "b": _BOOL}.get(kind, _TEXT))


def format_exactly(value: Any) -> str:
    """Return a value in full: as many digits as distinguish it from every other value of its type."""
    kind = getattr(getattr(value, "dtype", None), "kind", "O")
    if kind in "fiubc":
        return str(value.item()) if kind in "iub" else str(value)
    return to_printable(value) if kind == "O" else str(float(value))


def to_printable(value: Any) -> str:
    """Return a string's bytes as text with unprintable characters escaped."""
    return clean(value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value))


# Drawing: maps tones to styles and lines to screen strips, using few of the terminal's own colors.

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
    made = Strip(segments, used).adjust_cell_length(cells)
    return made.apply_style(over) if over is not None else made


# Value pane: a table that reads only the visible part, with a cursor on one cell.

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

    def __init__(self, grid: ValueGrid, block: CellSource, known: Moments | None) -> None:
        super().__init__()
        self.grid, self.block = grid, block
        self.table = self.row = self.column = 0
        self._top = self._left = 0
        self._known = known
        self._written: CellFormat | None = None
        self._cells: np.ndarray | None = None
        self._place: tuple[int, range, range] = (0, range(0), range(0))
        self.error: str | None = None

    def turn(self, block: CellSource, known: Moments | None) -> None:
        """Show the values of another side at the same position."""
        self.block, self._known, self._written, self._cells, self.error = block, known, None, None, None
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
        table, rows, columns = self._place
        if self._cells is None or table != self.table or self.row not in rows or self.column not in columns:
            return f"{list(index)}"
        found = self._cells[self.row - rows.start, self.column - columns.start]
        return f"{list(index)} = {format_exactly(found)}" if index else format_exactly(found)

    def on_resize(self) -> None:
        """Keep the cursor visible after a resize."""
        self.go(self.table, self.row, self.column)

    def _request(self) -> None:
        table, rows, columns = self._place
        seen = self._visible(0)
        if (
            self._cells is None
            or table != self.table
            or not (_contains_range(rows, seen[0]) and _contains_range(columns, seen[1]))
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
            found = block.read(self.grid, table, rows, columns)
        except CkpttoolError as error:
            sentence = describe_error(error)
            post(lambda: self._failed(block, sentence))
        else:
            post(lambda: self._take(block, (table, rows, columns), found))
        yield

    def _failed(self, block: CellSource, text: str) -> None:
        if block is self.block:
            self.error = text
            self.refresh()

    def _take(self, block: CellSource, place: tuple[int, range, range], found: np.ndarray) -> None:
        if block is self.block:
            self._place, self._cells = place, found
            first = self._written is None
            self._written = self._written or choose_cell_format(
                found.dtype, self._known or _block_moments(found)
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
        table, rows, columns = self._place
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


def _block_moments(found: np.ndarray) -> Moments | None:
    """Return the moments of the cells read, for use while those of the whole are unknown."""
    return stats.compute_moments(found) if found.dtype != object and found.size else None


def _scroll_to(first: int, at: int, seen: int) -> int:
    return min(max(first, at - seen + 1), at)


def _visible_range(first: int, seen: int, more: int, count: int) -> range:
    return range(max(0, first - more), min(count, first + seen + more))


def _contains_range(outer: range, inner: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


# Panes that draw only their visible lines: the base class, and one for a page of text.

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
        count, seen = self.count(), self.size.height
        if count <= seen:
            return " "
        tall = max(1, seen * seen // count)
        first = round(self.top / (count - seen) * (seen - tall))
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


# Tree pane: the unfolded lines, a cursor, marks, and search matches.

_SIZE = 8
# Below this width, shapes are shown without their type to leave space for names.
_WIDE = 62
_MARKS = {"changed": "~", "left": "-", "right": "+", "error": "!"}


class TreePane(Pane):
    """Tree pane. It posts `TreeCursorChanged` and `EntryActivated`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right,l", "unfold", show=False),
        Binding("left", "fold", show=False),
    ]

    class TreeCursorChanged(Message):
        """The cursor moved to another entry."""

    class EntryActivated(Message):
        """The line under the cursor was clicked."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002  # Textual's word
        super().__init__(id=id)
        self.outline: Outline | None = None
        self.comparison: ComparisonState | None = None
        self.cursor = 0
        self.query_text = ""

    def show(self, outline: Outline, comparison: ComparisonState | None) -> None:
        """Show a tree from its first line."""
        self.outline, self.comparison = outline, comparison
        self.go(0)

    @property
    def entry(self) -> Row | ModuleSummary | None:
        """The entry under the cursor."""
        lines = self.outline.lines if self.outline is not None else []
        return lines[self.cursor].entry if self.cursor < len(lines) else None

    def count(self) -> int:
        """Return the number of lines."""
        return len(self.outline.lines) if self.outline is not None else 0

    def go(self, at: int) -> None:
        """Move the cursor to a line and scroll it into view."""
        self.cursor = max(0, min(at, self.count() - 1))
        seen = max(1, self.size.height)
        top = min(self.top, self.cursor)
        if self.cursor >= top + seen:
            top = self.cursor - seen + 1
        self.scroll_lines(top)
        self.post_message(self.TreeCursorChanged())

    def reveal(self, path: str) -> bool:
        """Unfold the parents of an entry and go to it; return whether it exists."""
        at = self.outline.reveal(path) if self.outline is not None else None
        if at is None:
            return False
        # Show some lines above it for context.
        if not self.top <= at < self.top + self.size.height:
            self.top = max(0, at - self.size.height // 3)
        self.go(at)
        return True

    def action_move(self, by: int) -> None:
        """Move the cursor down by `by` lines."""
        self.go(self.cursor + by)

    def action_unfold(self) -> None:
        """Unfold a module; if it is unfolded, go to its first entry."""
        if self.outline is None or not self.count():
            return
        if self.outline.is_open(self.outline.lines[self.cursor]):
            self.action_move(1)
        else:
            self.outline.open(self.cursor)
            self.refresh()

    def action_fold(self) -> None:
        """Fold a module; if it is folded, go to its parent."""
        if self.outline is None or not self.count():
            return
        if self.outline.is_open(self.outline.lines[self.cursor]):
            self.outline.close(self.cursor)
            self.scroll_lines(self.top)
        else:
            self.go(self.outline.above(self.cursor))

    def toggle(self) -> None:
        """Fold or unfold the module under the cursor."""
        if self.outline is not None and self.outline.is_open(self.outline.lines[self.cursor]):
            self.action_fold()
        else:
            self.action_unfold()

    def everything(self) -> None:
        """Unfold everything in the module under the cursor."""
        if self.outline is not None and self.count():
            self.outline.open_all(self.cursor)
            self.refresh()

    def order(self, sort: Sort) -> None:
        """Sort the entries; the cursor stays on its entry."""
        entry = self.entry
        if self.outline is not None and entry is not None:
            self.outline.order(sort)
            self.reveal(entry.path)

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the clicked line; a click on the cursor's line activates it."""
        at = self.top + event.y
        if at >= self.count():
            return
        if at == self.cursor:
            self.post_message(self.EntryActivated())
        else:
            self.go(at)

    def on_resize(self) -> None:
        """Keep the cursor visible after a resize."""
        if self.outline is not None:
            self.go(self.cursor)

    def line(self, at: int, cells: int) -> Strip:
        """Return one line, `cells` wide."""
        over = (HERE if self.has_focus else THERE) if at == self.cursor else None
        drawn = self.drawn(self.outline.lines[at], cells) if self.outline is not None else ()
        return paint_line(drawn, cells, over)

    def drawn(self, line: OutlineLine, cells: int) -> Line:
        """Return the pieces of a line: mark, name, description, size."""
        mark = self._mark(line)
        indent = " " * min(2 * line.level, cells // 3)
        entry = line.entry
        sign = "  " if not isinstance(entry, ModuleSummary) else "▾ " if self._is_open(line) else "▸ "
        room = cells - len(mark) - len(indent) - 2
        what, nbytes, tone = _describe_row(entry, wide=cells >= _WIDE)
        name = clean(line.name) or '""'
        right = f" {nbytes:>{_SIZE - 1}}" if nbytes else ""
        # A name has priority over a shape, which the details show as well.
        space = room - len(fit_text(name, room)) - len(right) - 1
        if space < min(len(what), 8):
            what = ""
        what = f" {fit_text(what, space)}" if what else ""
        shown = pad_text(name, room - len(what) - len(right))
        head: Tone = "head" if isinstance(entry, ModuleSummary) else ""
        return (
            TextPiece(mark, "mark"),
            TextPiece(indent + sign, "dim"),
            *_highlight_match(shown, self.query_text, head),
            TextPiece(what, tone),
            TextPiece(right),
        )

    def _is_open(self, line: OutlineLine) -> bool:
        return self.outline is not None and self.outline.is_open(line)

    def _mark(self, line: OutlineLine) -> str:
        if self.comparison is None:
            return ""
        if isinstance(line.entry, ModuleSummary):
            return "~ " if self.comparison.below.get(line.path) else "  "
        return f"{_MARKS.get(self.comparison.marks.get(line.path, ''), ' ')} "


def _describe_row(entry: Row | ModuleSummary, *, wide: bool) -> tuple[str, str, Tone]:
    """Return the text after a name, the size, and the text's tone."""
    if isinstance(entry, ModuleSummary):
        return describe_module_kind(entry), format_size(entry.nbytes) if entry.tensors else "", "dim"
    if isinstance(entry, AliasRow):
        return f"→ {clean(entry.target)}", "", "dim"
    if not isinstance(entry, TensorRow):
        return f"= {clean(str(json_value(entry.leaf)['value']))}", "", ""
    leaf = entry.leaf
    shape = f"{leaf.dtype if wide else ''}{list(leaf.shape)}"
    return shape, format_size(leaf.nbytes) if leaf.nbytes else "", "dim"


def _highlight_match(name: str, query: str, tone: Tone) -> tuple[TextPiece, ...]:
    """Return a name with the search match highlighted."""
    last = query.lower().rpartition("/")[2]
    at = name.lower().find(last) if last else -1
    if at < 0 or len(name.lower()) != len(name):
        return (TextPiece(name, tone),)
    end = at + len(last)
    return TextPiece(name[:at], tone), TextPiece(name[at:end], "mark"), TextPiece(name[end:], tone)


# Values of a tensor on demand: only the visible part of a large tensor is read.


class CellSource(Protocol):
    """Source of a table's cells."""

    def read(self, grid: ValueGrid, table: int, rows: range, columns: range) -> np.ndarray:
        """Return the cells [rows, columns] of a table; raise any error of reading."""
        ...


class TensorCells:
    """Values of one tensor. Small ones, and those that do not allow partial reads, are cached."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._whole: np.ndarray | None = None

    def read(self, grid: ValueGrid, table: int, rows: range, columns: range) -> np.ndarray:
        """Return the cells [rows, columns] of a table; zeros fill the last row past the end of an axis."""
        if len(grid.shape) < 2:
            return self._wrapped(grid, rows, columns)
        place = grid.leading(table)
        if self._whole is None and self._is_partial():
            # Row by row, because a wide table has many invisible values between two rows.
            return np.stack([self._part((*place, row, _to_slice(columns))) for row in rows])
        index: Any = (*place, _to_slice(rows), _to_slice(columns))
        block: np.ndarray = self._array()[index]
        return block

    def _wrapped(self, grid: ValueGrid, rows: range, columns: range) -> np.ndarray:
        start, stop = rows.start * grid.wrap, min(rows.stop * grid.wrap, self._leaf.size)
        if not grid.shape:
            return self._array().reshape(1, 1)
        inside = slice(start, stop)
        flat = self._part((inside,)) if self._whole is None and self._is_partial() else self._array()[inside]
        room = np.zeros(len(rows) * grid.wrap, flat.dtype)
        room[: flat.size] = flat
        return room.reshape(len(rows), grid.wrap)[:, _to_slice(columns)]

    def _is_partial(self) -> bool:
        if self._leaf.dtype == "string" or self._leaf.nbytes <= LARGE:
            return False
        source = slice_leaf(self._leaf, ...).source
        return isinstance(source, StridedView) and isinstance(source.storage, Span | Inline)

    def _part(self, index: Any) -> np.ndarray:
        return slice_leaf(self._leaf, index).array()

    def _array(self) -> np.ndarray:
        if self._whole is None:
            if self._leaf.dtype == "string":
                self._whole = np.empty(self._leaf.size, object)
                self._whole[:] = self._leaf.strings()
                self._whole = self._whole.reshape(self._leaf.shape)
            else:
                self._whole = self._leaf.array()
        return self._whole


class CellDifference:
    """Difference of two tensors, cell by cell."""

    def __init__(self, left: TensorCells, right: TensorCells) -> None:
        self._sides = left, right

    def read(self, grid: ValueGrid, table: int, rows: range, columns: range) -> np.ndarray:
        """Return left - right of the cells, in float64 (complex128)."""
        a, b = (side.read(grid, table, rows, columns) for side in self._sides)
        wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
        with np.errstate(invalid="ignore"):
            found: np.ndarray = a.astype(wide) - b.astype(wide)
        return found


def _to_slice(taken: range) -> slice:
    return slice(taken.start, taken.stop)
