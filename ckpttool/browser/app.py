"""Application of the browser, and its main screen: tree and details side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.timer import Timer

from ckpttool.browser import BackgroundListing, numbers, overview
from ckpttool.browser.comparison import ComparisonState
from ckpttool.browser.details import detail_lines, format_shape
from ckpttool.browser.keys import TREE
from ckpttool.browser.lines import TextPiece, fit_text, wrap_paragraph
from ckpttool.browser.listing import AliasRow, BrowserListing, Row
from ckpttool.browser.navigation import SearchInput, WalkScreen
from ckpttool.browser.numbers import TensorNumbers
from ckpttool.browser.outline import Outline
from ckpttool.browser.panes import Bar, Page, ReaderResult
from ckpttool.browser.reader import Job, ReaderThread
from ckpttool.browser.screens import PageScreen, ValuesScreen, textual_bindings
from ckpttool.browser.tree_pane import TreePane
from ckpttool.browser.value_table import CellDifference, CellSource, TensorCells
from ckpttool.conversion.alignment import ChangedEntry
from ckpttool.core.tree import Leaf
from ckpttool.listing.modules import ModuleSummary
from ckpttool.listing.rows import TensorRow
from ckpttool.verification.moments import Moments

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
        listing, comparison, numbers = self.listing, self.comparison, self._known.get(entry.path)
        self.page.show(lambda cells: detail_lines(listing, comparison, entry, numbers, cells), stay=stay)

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
        statistics: list[TensorNumbers | None] = []
        for row in self._sides(name):
            yield from numbers.read_numbers(row, statistics.append)
            yield
        self.post_message(ReaderResult(lambda: self._take(name, tuple(statistics))))

    def _take(self, name: str, statistics: tuple[TensorNumbers | None, ...]) -> None:
        self._known[name] = statistics
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
        for _ in comparison.steps(lambda name, change: waiting.append((name, change))):
            if time.monotonic() - last_shown_s > _TOLD_S:
                self.post_message(ReaderResult(_bind_result(self._noted, tuple(waiting))))
                waiting.clear()
                last_shown_s = time.monotonic()
            yield
        self.post_message(ReaderResult(_bind_result(self._noted, tuple(waiting))))

    def _noted(self, changes: Sequence[tuple[str, ChangedEntry | str | None]]) -> None:
        if self.comparison is not None:
            for name, change in changes:
                self.comparison.note(name, change)
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
        if known is None or not any(side is not None and side.histogram for side in known):
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
        numbers = self._known.get(name, (None, None))
        rows = [row for row in self._sides(name) if isinstance(row, TensorRow)]
        if not rows:
            return None
        first = rows[0].leaf
        words = ("left", "right") if self.comparison is not None else ("",)
        sources: list[tuple[str, CellSource, Moments | None]] = []
        cells: list[TensorCells] = []
        for word, row, read in zip(words, self._sides(name), numbers, strict=False):
            if isinstance(row, TensorRow) and row.leaf.shape == first.shape:
                cells.append(TensorCells(row.leaf))
                sources.append((word, cells[-1], read.moments if read is not None else None))
        if len(cells) == 2 and "string" not in (row.leaf.dtype for row in rows):
            sources.append(("left - right", CellDifference(*cells), None))
        return first, sources


def _bind_result(take: Callable[[Any], None], result: Any) -> Callable[[], None]:
    return lambda: take(result)


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
