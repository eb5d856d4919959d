"""The pane of the tree: its unfolded lines, a cursor, marks, and what a search found."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip

from ckpttool.browser.comparison import Comparison
from ckpttool.browser.lines import Line as Drawn
from ckpttool.browser.lines import Piece, Tone, fitted, padded
from ckpttool.browser.look import Link, Row
from ckpttool.browser.outline import Line, Outline
from ckpttool.browser.paint import HERE, THERE, strip
from ckpttool.browser.panes import Pane
from ckpttool.ops.modules import Module, Sort, kind
from ckpttool.ops.rows import TensorRow, shown_value
from ckpttool.shown import clean, size

_SIZE = 8
# Below this a shape is written without its type, and names come first.
_WIDE = 62
_MARKS = {"changed": "~", "left": "-", "right": "+", "error": "!"}


class TreePane(Pane):
    """The tree. It tells by `Moved` where its cursor goes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right,l", "unfold", show=False),
        Binding("left", "fold", show=False),
    ]

    class Moved(Message):
        """The cursor is on another entry."""

    class Entered(Message):
        """A line was clicked that the cursor was on."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002  # Textual's word
        super().__init__(id=id)
        self.outline: Outline | None = None
        self.comparison: Comparison | None = None
        self.cursor = 0
        self.query_text = ""

    def show(self, outline: Outline, comparison: Comparison | None) -> None:
        """Show a tree from its first line on."""
        self.outline, self.comparison = outline, comparison
        self.go(0)

    @property
    def entry(self) -> Row | Module | None:
        """What the cursor is on."""
        lines = self.outline.lines if self.outline is not None else []
        return lines[self.cursor].entry if self.cursor < len(lines) else None

    def count(self) -> int:
        """Return the number of lines."""
        return len(self.outline.lines) if self.outline is not None else 0

    def go(self, at: int) -> None:
        """Put the cursor on a line, and that line on the screen."""
        self.cursor = max(0, min(at, self.count() - 1))
        seen = max(1, self.size.height)
        top = min(self.top, self.cursor)
        if self.cursor >= top + seen:
            top = self.cursor - seen + 1
        self.scroll_lines(top)
        self.post_message(self.Moved())

    def reveal(self, path: str) -> bool:
        """Unfold what hides an entry and go there; say whether there is one."""
        at = self.outline.reveal(path) if self.outline is not None else None
        if at is None:
            return False
        # Some lines above it tell where it is.
        if not self.top <= at < self.top + self.size.height:
            self.top = max(0, at - self.size.height // 3)
        self.go(at)
        return True

    def action_move(self, by: int) -> None:
        """Move the cursor down so many lines."""
        self.go(self.cursor + by)

    def action_unfold(self) -> None:
        """Unfold a module; of one that is, go to its first entry."""
        if self.outline is None or not self.count():
            return
        if self.outline.is_open(self.outline.lines[self.cursor]):
            self.action_move(1)
        else:
            self.outline.open(self.cursor)
            self.refresh()

    def action_fold(self) -> None:
        """Fold a module; from what is folded, go to the module above."""
        if self.outline is None or not self.count():
            return
        if self.outline.is_open(self.outline.lines[self.cursor]):
            self.outline.close(self.cursor)
            self.scroll_lines(self.top)
        else:
            self.go(self.outline.above(self.cursor))

    def toggle(self) -> None:
        """Fold or unfold the module that the cursor is on."""
        if self.outline is not None and self.outline.is_open(self.outline.lines[self.cursor]):
            self.action_fold()
        else:
            self.action_unfold()

    def everything(self) -> None:
        """Unfold all that is in the module that the cursor is on."""
        if self.outline is not None and self.count():
            self.outline.open_all(self.cursor)
            self.refresh()

    def order(self, sort: Sort) -> None:
        """Show another order; the cursor stays on its entry."""
        entry = self.entry
        if self.outline is not None and entry is not None:
            self.outline.order(sort)
            self.reveal(entry.path)

    def on_click(self, event: events.Click) -> None:
        """Go to the line that was clicked; a second time enters it."""
        at = self.top + event.y
        if at >= self.count():
            return
        if at == self.cursor:
            self.post_message(self.Entered())
        else:
            self.go(at)

    def on_resize(self) -> None:
        """Keep the cursor on the screen."""
        if self.outline is not None:
            self.go(self.cursor)

    def line(self, at: int, cells: int) -> Strip:
        """Return one line in so many cells."""
        over = (HERE if self.has_focus else THERE) if at == self.cursor else None
        drawn = self.drawn(self.outline.lines[at], cells) if self.outline is not None else ()
        return strip(drawn, cells, over)

    def drawn(self, line: Line, cells: int) -> Drawn:
        """Return the pieces of a line: mark, name, what it is, size."""
        mark = self._mark(line)
        indent = " " * min(2 * line.level, cells // 3)
        entry = line.entry
        sign = "  " if not isinstance(entry, Module) else "▾ " if self._is_open(line) else "▸ "
        room = cells - len(mark) - len(indent) - 2
        what, nbytes, tone = _said(entry, wide=cells >= _WIDE)
        name = clean(line.name) or '""'
        right = f" {nbytes:>{_SIZE - 1}}" if nbytes else ""
        # A name is worth more than a shape, which the details have as well.
        space = room - len(fitted(name, room)) - len(right) - 1
        if space < min(len(what), 8):
            what = ""
        what = f" {fitted(what, space)}" if what else ""
        shown = padded(name, room - len(what) - len(right))
        head: Tone = "head" if isinstance(entry, Module) else ""
        return (
            Piece(mark, "mark"),
            Piece(indent + sign, "dim"),
            *_found(shown, self.query_text, head),
            Piece(what, tone),
            Piece(right),
        )

    def _is_open(self, line: Line) -> bool:
        return self.outline is not None and self.outline.is_open(line)

    def _mark(self, line: Line) -> str:
        if self.comparison is None:
            return ""
        if isinstance(line.entry, Module):
            return "~ " if self.comparison.below.get(line.path) else "  "
        return f"{_MARKS.get(self.comparison.marks.get(line.path, ''), ' ')} "


def _said(entry: Row | Module, *, wide: bool) -> tuple[str, str, Tone]:
    """Return what stands after a name, the size, and the tone of the former."""
    if isinstance(entry, Module):
        return kind(entry), size(entry.nbytes) if entry.tensors else "", "dim"
    if isinstance(entry, Link):
        return f"→ {clean(entry.target)}", "", "dim"
    if not isinstance(entry, TensorRow):
        return f"= {clean(str(shown_value(entry.leaf)['value']))}", "", ""
    leaf = entry.leaf
    shape = f"{leaf.dtype if wide else ''}{list(leaf.shape)}"
    return shape, size(leaf.nbytes) if leaf.nbytes else "", "dim"


def _found(name: str, query: str, tone: Tone) -> tuple[Piece, ...]:
    """Return a name with the part that was searched for."""
    last = query.lower().rpartition("/")[2]
    at = name.lower().find(last) if last else -1
    if at < 0 or len(name.lower()) != len(name):
        return (Piece(name, tone),)
    end = at + len(last)
    return Piece(name[:at], tone), Piece(name[at:end], "mark"), Piece(name[end:], tone)
