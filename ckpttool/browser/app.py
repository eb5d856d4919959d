"""Application and screens of the browser."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Input

from ckpttool.browser import BackgroundListing, numbers, overview
from ckpttool.browser.comparison import ComparisonState
from ckpttool.browser.details import detail_lines, format_shape
from ckpttool.browser.keys import PAGE, TREE, VALUES, BrowserKey
from ckpttool.browser.lines import Line, TextPiece, fit_text, pad_text, wrap_paragraph
from ckpttool.browser.listing import AliasRow, BrowserListing, Row
from ckpttool.browser.numbers import TensorNumbers
from ckpttool.browser.outline import Outline
from ckpttool.browser.panes import (
    Bar,
    CellDifference,
    CellSource,
    GridPane,
    Page,
    ReaderResult,
    TensorCells,
    TreePane,
    ValueGrid,
)
from ckpttool.browser.reader import Job, ReaderThread
from ckpttool.browser.search import SearchIndex, next_hit
from ckpttool.commands.stats import ChangedEntry, Moments
from ckpttool.core.tree import Leaf
from ckpttool.listing.modules import ModuleSummary, Sort
from ckpttool.listing.rows import TensorRow

# Screens above the tree: pages of text, and the table of a tensor's values.

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
    for key in sorted(shown, key=lambda each: each.word not in ("help", "quit", "back")):
        if sum(widths[each] for each in kept) + widths[key] <= cells:
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
        _, block, known = self._sides[0]
        yield GridPane(ValueGrid(self._shape, wrap), block, known)
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
        _, block, known = self._sides[self._side]
        self.pane.turn(block, known)

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


# Navigation in the tree: search, jumps, differences, and their messages in the last line.

_ORDERS: dict[Sort, Sort] = {"file": "size", "size": "name", "name": "file"}
_SAID = {"file": "as in the file", "size": "largest first", "name": "by name"}


class SearchInput(Input):
    """Input line for a search."""

    BINDINGS = [Binding("escape", "screen.no_search", show=False)]  # noqa: RUF012  # Textual's own form


class WalkScreen(Screen[None]):
    """Screen with a tree, its cursor, and a bottom line for typing a search."""

    def __init__(self, listing: BrowserListing) -> None:
        super().__init__()
        self.listing = listing
        self.comparison = (
            ComparisonState(listing, listing.alignment) if listing.alignment is not None else None
        )
        self._index: SearchIndex | None = None
        self._hits: list[int] = []
        self._origin: str | None = None
        self._history: list[str] = []
        self._shown_message: tuple[str, str] | None = None

    @property
    def tree_pane(self) -> TreePane:
        """The tree."""
        return self.query_one(TreePane)

    def last_words(self, cells: int) -> Line:
        """Return the current message and as many keys as fit beside it."""
        message = (
            f" {fit_text(self._shown_message[1], cells - 2)} " if self._shown_message is not None else ""
        )
        keys = key_line(TREE, cells - len(message), two=self.comparison is not None)
        return (TextPiece(message, "mark"), *keys) if message else keys

    def show_message(self, text: str) -> None:
        """Show a message in the last line until the cursor moves."""
        entry = self.tree_pane.entry
        self._shown_message = (entry.path if entry is not None else "", text) if text else None
        self.query_one("#keys", Bar).refresh()

    def clear_message(self) -> None:
        """Remove the message if the cursor has moved."""
        entry = self.tree_pane.entry
        if self._shown_message is not None and entry is not None and entry.path != self._shown_message[0]:
            self.show_message("")

    def jump(self, path: str) -> None:
        """Go to an entry, and remember the previous position."""
        entry = self.tree_pane.entry
        if self.tree_pane.reveal(path) and entry is not None and entry.path != path:
            self._history.append(entry.path)

    def action_back(self) -> None:
        """Return to the position before the last jump."""
        if self._history:
            self.tree_pane.reveal(self._history.pop())
        else:
            self.show_message("no earlier position to go back to")

    def action_alias(self) -> None:
        """Go to the next alias of the tensor in the tree."""
        self._round(self.listing.ways, "no other alias of it in the tree")

    def action_relative(self) -> None:
        """Go from a slot to its parameter, then cycle through that parameter's slots."""
        self._round(self.listing.relatives, "no optimizer state for it")

    def _round(self, ring: Callable[[str], tuple[str, ...]], none: str) -> None:
        entry = self.tree_pane.entry
        names = ring(entry.path) if entry is not None and not isinstance(entry, ModuleSummary) else ()
        if entry is None or len(names) < 2:
            self.show_message(none)
            return
        at = names.index(entry.path) if entry.path in names else -1
        self.jump(names[(at + 1) % len(names)])
        self.show_message(f"{(at + 1) % len(names) + 1} of {len(names)}")

    def action_difference(self, backwards: bool) -> None:  # Textual passes action arguments by position
        """Go to the next entry that differs."""
        if self.comparison is None:
            self.show_message("no second checkpoint to compare with; start with ckpttool browse PATH PATH")
            return
        index = self._indexed()
        hits = sorted(index.position(name) for name in self.comparison.marks)
        self._go(hits, backwards=backwards, none=self.comparison.state())

    def action_everything(self) -> None:
        """Unfold everything in a module."""
        self.tree_pane.everything()

    def action_sort(self) -> None:
        """Switch to the next sort order."""
        outline = self.tree_pane.outline
        if outline is not None:
            self.tree_pane.order(_ORDERS[outline.sort])
            self._index, self._hits = None, []
            self.show_message(f"order: {_SAID[outline.sort]}")

    def _indexed(self) -> SearchIndex:
        outline = self.tree_pane.outline
        if self._index is None:
            self._index = SearchIndex(self.listing.root, outline.sort if outline is not None else "file")
        return self._index

    def action_search(self) -> None:
        """Open the search input."""
        entry = self.tree_pane.entry
        self._origin = entry.path if entry is not None else None
        self.query_one("#keys").display = False
        self.query_one("#asking").display = True
        self.query_one("#hits", Bar).show(
            lambda cells: (
                TextPiece(pad_text(overview.format_hits(self._found()), cells, right=True), "dim"),
            )
        )
        box = self.query_one("#search", Input)
        box.value = ""
        # Focus at once, so that keys typed ahead go to the input.
        self.set_focus(box)

    def _found(self) -> tuple[int, int] | None:
        """Return the number of the current hit, from 1, and the number of hits."""
        if not self.tree_pane.query_text:
            return None
        entry = self.tree_pane.entry
        at = self._indexed().position(entry.path) if entry is not None else -1
        return (self._hits.index(at) + 1 if at in self._hits else 0, len(self._hits))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Send all keys to the search input while the user types."""
        del parameters
        return action == "no_search" or not self.query_one("#asking").display

    def on_input_changed(self, event: Input.Changed) -> None:
        """Go to the first hit after the position where the search began."""
        if not self.query_one("#asking").display:
            return
        self.tree_pane.query_text = event.value
        self._hits = self._indexed().find(event.value)
        origin = self._indexed().position(self._origin or "")
        hit = next_hit(self._hits, origin - 1)
        if hit is not None:
            self.tree_pane.reveal(self._indexed().path(hit))
        elif self._origin is not None:
            self.tree_pane.reveal(self._origin)
        self.query_one("#hits", Bar).refresh()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Close the search input and stay at the hit."""
        event.stop()
        entry = self.tree_pane.entry
        if self._origin is not None and entry is not None and entry.path != self._origin:
            self._history.append(self._origin)
        self._searched()
        self.show_message(overview.format_hits(self._found()))

    def action_no_search(self) -> None:
        """Return to the position where the search began."""
        self.tree_pane.query_text = ""
        self._hits = []
        if self._origin is not None:
            self.tree_pane.reveal(self._origin)
        self._searched()

    def _searched(self) -> None:
        self.query_one("#asking").display = False
        self.query_one("#keys").display = True
        self.set_focus(self.tree_pane)

    def action_following(self, backwards: bool) -> None:  # Textual passes action arguments by position
        """Go to the next hit of the last search."""
        none = overview.format_hits(self._found()) or "no search yet; press / to search"
        self._go(self._hits, backwards=backwards, none=none)

    def _go(self, hits: list[int], *, backwards: bool, none: str) -> None:
        entry = self.tree_pane.entry
        at = self._indexed().position(entry.path) if entry is not None else -1
        hit = next_hit(hits, at, backwards=backwards)
        if hit is None:
            self.show_message(none)
            return
        self.jump(self._indexed().path(hit))
        self.show_message(f"{hits.index(hit) + 1:,} of {len(hits):,}")


# Main screen: tree and details side by side, background reading, and the key actions.

# Do not read tensors while the cursor moves quickly; draw marks in batches.
_REST_S, _TOLD_S = 0.06, 0.15


class MainScreen(WalkScreen):
    """Tree, and details of the entry under the cursor."""

    BINDINGS = textual_bindings(TREE)

    def __init__(self, listing: BrowserListing, failed: Callable[[Exception], None]) -> None:
        super().__init__(listing)
        self.reader = ReaderThread(failed)
        self._known: dict[str, tuple[TensorNumbers | None, ...]] = {}
        self._rest: Timer | None = None

    def compose(self) -> ComposeResult:
        """Yield the title, the two panes and the last line."""
        yield Bar(id="title")
        with Container(id="body"):
            yield TreePane(id="tree")
            yield Page(id="details")
        with Container(id="asking"):
            yield Bar(id="slash")
            yield SearchInput(id="search")
            yield Bar(id="hits")
        yield Bar(id="keys")

    @property
    def page(self) -> Page:
        """The details."""
        return self.query_one("#details", Page)

    def on_mount(self) -> None:
        """Show the first lines, and start the comparison if there are two checkpoints."""
        self.query_one("#asking").display = False
        self.query_one("#slash", Bar).show(lambda _: (TextPiece("/", "mark"),))
        self.query_one("#title", Bar).show(
            lambda cells: overview.title_line(self.listing, self.comparison, cells)
        )
        self.query_one("#keys", Bar).show(self.last_words)
        room = max(4, self.app.size.height - 4)
        self.tree_pane.show(Outline(self.listing.root, room), self.comparison)
        self.set_focus(self.tree_pane)
        if self.comparison is not None:
            self.reader.request("comparison", self._comparing(self.comparison))

    # --- details of the entry under the cursor

    def on_tree_pane_tree_cursor_changed(self) -> None:
        """Show the entry at once; read its values if the cursor rests on it."""
        self._show()
        self.clear_message()
        if self._rest is not None:
            self._rest.stop()
        self._rest = self.set_timer(_REST_S, self._read)

    def on_tree_pane_entry_activated(self) -> None:
        """Handle Enter."""
        self.action_enter()

    def _show(self, *, stay: bool = False) -> None:
        entry = self.tree_pane.entry
        if entry is None:
            self.page.show(lambda cells: wrap_paragraph("no entries", cells, "dim"))
            return
        listing, comparison, known = self.listing, self.comparison, self._known.get(entry.path)
        self.page.show(lambda cells: detail_lines(listing, comparison, entry, known, cells), stay=stay)

    def _read(self) -> None:
        entry = self.tree_pane.entry
        if isinstance(entry, TensorRow) and entry.path not in self._known:
            self.reader.request("numbers", self._reading(entry.path))

    def _sides(self, name: str) -> tuple[Row | None, ...]:
        listing = self.listing
        if listing.alignment is None or listing.right is None:
            return (listing.rows.get(name),)
        return (listing.rows[name] if name in listing.alignment.left else None, listing.right.get(name))

    def _reading(self, name: str) -> Job:
        found: list[TensorNumbers | None] = []
        for row in self._sides(name):
            yield from numbers.read_numbers(row, found.append)
            yield
        self.post_message(ReaderResult(lambda: self._take(name, tuple(found))))

    def _take(self, name: str, found: tuple[TensorNumbers | None, ...]) -> None:
        self._known[name] = found
        entry = self.tree_pane.entry
        if entry is not None and entry.path == name:
            self._show(stay=True)

    def on_reader_result(self, message: ReaderResult) -> None:
        """Apply a result of the reader thread."""
        message.stop()
        message.take()

    def _comparing(self, comparison: ComparisonState) -> Job:
        """Compare the checkpoints, updating the marks several times a second."""
        waiting: list[tuple[str, ChangedEntry | str | None]] = []
        last_shown_s = time.monotonic()
        for _ in comparison.steps(lambda name, found: waiting.append((name, found))):
            if time.monotonic() - last_shown_s > _TOLD_S:
                self.post_message(ReaderResult(_bind_result(self._noted, tuple(waiting))))
                waiting.clear()
                last_shown_s = time.monotonic()
            yield
        self.post_message(ReaderResult(_bind_result(self._noted, tuple(waiting))))

    def _noted(self, found: Sequence[tuple[str, ChangedEntry | str | None]]) -> None:
        if self.comparison is not None:
            for name, each in found:
                self.comparison.note(name, each)
            self.query_one("#title", Bar).refresh()
            self.tree_pane.refresh()
            self._show(stay=True)

    # --- keys

    def action_enter(self) -> None:
        """Fold or unfold a module, show a tensor's values, or go from an alias to its tensor."""
        entry = self.tree_pane.entry
        if isinstance(entry, ModuleSummary):
            self.tree_pane.toggle()
        elif isinstance(entry, AliasRow):
            self.jump(entry.target)
        elif isinstance(entry, TensorRow):
            self.action_values()

    def action_other_pane(self) -> None:
        """Move the focus to the other pane."""
        self.set_focus(self.page if self.tree_pane.has_focus else self.tree_pane)
        self.tree_pane.refresh()

    def action_leave(self) -> None:
        """Quit the browser."""
        self.app.exit(0)

    # --- screens above this one

    def action_about(self) -> None:
        """Show an overview of the checkpoint."""
        self.app.push_screen(PageScreen("About", lambda cells: overview.about_lines(self.listing, cells)))

    def action_help(self) -> None:
        """Show the key help."""
        two = self.comparison is not None
        self.app.push_screen(PageScreen("Keys", lambda cells: overview.key_help(cells, two=two)))

    def action_histogram(self) -> None:
        """Show the histogram of the tensor, for both sides if there are two."""
        entry = self.tree_pane.entry
        known = self._known.get(entry.path) if entry is not None else None
        if known is None or not any(each is not None and each.histogram for each in known):
            self.show_message(
                "no histogram" if known is not None or not isinstance(entry, TensorRow) else "still reading"
            )
            return
        title = entry.path if entry is not None else ""
        self.app.push_screen(PageScreen(title, lambda cells: numbers.histogram_lines(known, cells)))

    def action_values(self) -> None:
        """Show the tensor's values."""
        entry = self.tree_pane.entry
        name = entry.target if isinstance(entry, AliasRow) else entry.path if entry is not None else ""
        sides = self._blocks(name)
        if not sides:
            self.show_message("only tensors have values to show")
            return
        change = self.comparison.changes.get(name) if self.comparison is not None else None
        at = change.values.at if change is not None and change.values is not None else None
        leaf, blocks = sides
        if not leaf.size:
            self.show_message(f"{format_shape(leaf)} has no elements")
            return
        self.app.push_screen(
            ValuesScreen(name, leaf.shape, blocks, lambda job: self.reader.request("values", job), at)
        )

    def _blocks(self, name: str) -> tuple[Leaf, list[tuple[str, CellSource, Moments | None]]] | None:
        """Return each side's cell source, and their difference if it is defined."""
        known = self._known.get(name, (None, None))
        rows = [row for row in self._sides(name) if isinstance(row, TensorRow)]
        if not rows:
            return None
        first = rows[0].leaf
        words = ("left", "right") if self.comparison is not None else ("",)
        found: list[tuple[str, CellSource, Moments | None]] = []
        made: list[TensorCells] = []
        for word, row, read in zip(words, self._sides(name), known, strict=False):
            if isinstance(row, TensorRow) and row.leaf.shape == first.shape:
                made.append(TensorCells(row.leaf))
                found.append((word, made[-1], read.moments if read is not None else None))
        if len(made) == 2 and "string" not in (row.leaf.dtype for row in rows):
            found.append(("left - right", CellDifference(*made), None))
        return first, found


def _bind_result(take: Callable[[Any], None], found: Any) -> Callable[[], None]:
    return lambda: take(found)


# Browser application: it waits for the listing, shows it, and exits cleanly.

_POLL_S = 0.05
_INTERRUPTED = 130


class Browser(App[int]):
    """Browser application. `fault` is the error that ended it early."""

    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (72, "-wide")]  # noqa: RUF012  # as Textual types it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        Binding("ctrl+q", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False),
    ]
    CSS = """
    Screen { layout: vertical; overflow: hidden; }
    Bar { height: 1; }
    #body { height: 1fr; layout: horizontal; }
    #tree { width: 52%; height: 1fr; }
    #details { width: 1fr; height: 1fr; border-left: solid ansi_bright_black; padding-left: 1; }
    .-narrow #body { layout: vertical; }
    .-narrow #tree { width: 100%; }
    .-narrow #details { width: 100%; border-left: none; border-top: solid ansi_bright_black; }
    #asking { height: 1; layout: horizontal; }
    #slash { width: 1; }
    #hits { width: 24; }
    Page, GridPane { height: 1fr; }
    Input, Input:focus { height: 1; border: none; padding: 0; width: 1fr; background: ansi_default; }
    """

    def __init__(self, opening: BackgroundListing) -> None:
        # Use the terminal's own colors, which suit the user's background.
        super().__init__(ansi_color=True)
        self.opening = opening
        self.fault: Exception | None = None

    def compose(self) -> ComposeResult:
        """Show what is being opened until the listing is done."""
        sentence = f"opening {self.opening.title} ..."
        bar = Bar()
        bar.show(lambda cells: (TextPiece(fit_text(sentence, cells), "dim"),))
        yield bar

    def on_mount(self) -> None:
        """Wait for the listing."""
        if self.opening.wait(0):
            self._opened()
        else:
            self.set_timer(_POLL_S, self.on_mount)

    def _opened(self) -> None:
        try:
            listing = self.opening.listing()
        except Exception as error:  # noqa: BLE001  # the command reports it, as without a screen
            self._end(error)
        else:
            self.push_screen(MainScreen(listing, self._failed))

    def on_reader_result(self, message: ReaderResult) -> None:
        """Apply a result of the reader thread."""
        message.take()

    def _failed(self, error: Exception) -> None:
        # Runs in the reader thread.
        self.post_message(ReaderResult(lambda: self._end(error)))

    def _handle_exception(self, error: Exception) -> None:
        # Textual would print a traceback; our command line handles unexpected errors in one place.
        self._end(error)
        if self.is_headless:
            super()._handle_exception(error)

    def _end(self, error: Exception) -> None:
        self.fault = error
        self.exit(1)

    def action_interrupt(self) -> None:
        """Exit with the status of an interrupted program."""
        self.exit(_INTERRUPTED)
