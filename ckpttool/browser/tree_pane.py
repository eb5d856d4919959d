"""Tree pane: the unfolded lines, a cursor, marks, and search matches."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip

from ckpttool.browser.comparison import ComparisonState
from ckpttool.browser.lines import Line, TextPiece, Tone, fit_text, pad_text
from ckpttool.browser.listing import AliasRow, Row
from ckpttool.browser.outline import Outline, OutlineLine
from ckpttool.browser.panes import HERE, THERE, Pane, paint_line
from ckpttool.core.text import clean, format_size
from ckpttool.core.tree import json_value
from ckpttool.listing.modules import ModuleSummary, Sort, describe_module_kind
from ckpttool.listing.rows import TensorRow

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
        height = max(1, self.size.height)
        top = min(self.top, self.cursor)
        if self.cursor >= top + height:
            top = self.cursor - height + 1
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
