"""The first screen: tree and details side by side, what is read for them, and where the keys lead."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from textual.app import ComposeResult
from textual.containers import Container
from textual.timer import Timer

from ckpttool.browser import about, histogram, numbers, titles
from ckpttool.browser.comparison import Comparison
from ckpttool.browser.details import details, shape
from ckpttool.browser.keys import TREE
from ckpttool.browser.lines import Piece, paragraph
from ckpttool.browser.look import Link, Look, Row
from ckpttool.browser.numbers import Numbers
from ckpttool.browser.outline import Outline
from ckpttool.browser.panes import Bar, Found, Page
from ckpttool.browser.reader import Job, Reader
from ckpttool.browser.screens import PageScreen, ValuesScreen, bindings
from ckpttool.browser.tree_pane import TreePane
from ckpttool.browser.values import Block, Difference, Values
from ckpttool.browser.walk_screen import SearchInput, WalkScreen
from ckpttool.leaf import Leaf
from ckpttool.ops.difference import Changed
from ckpttool.ops.modules import Module
from ckpttool.ops.moments import Moments
from ckpttool.ops.rows import TensorRow

# Who runs down the tree wants no tensor on the way read; marks that come by the thousand are drawn together.
_REST_S, _TOLD_S = 0.06, 0.15


class MainScreen(WalkScreen):
    """The tree, and what is known of the entry that its cursor is on."""

    BINDINGS = bindings(TREE)

    def __init__(self, look: Look, failed: Callable[[Exception], None]) -> None:
        super().__init__(look)
        self.reader = Reader(failed)
        self._known: dict[str, tuple[Numbers | None, ...]] = {}
        self._rest: Timer | None = None

    def compose(self) -> ComposeResult:
        """Give the title, the two panes and the last line."""
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
        """Show the first lines, and begin to compare where there is something to compare."""
        self.query_one("#asking").display = False
        self.query_one("#slash", Bar).show(lambda _: (Piece("/", "mark"),))
        self.query_one("#title", Bar).show(lambda cells: titles.title(self.look, self.comparison, cells))
        self.query_one("#keys", Bar).show(self.last_words)
        room = max(4, self.app.size.height - 4)
        self.tree_pane.show(Outline(self.look.root, room), self.comparison)
        self.set_focus(self.tree_pane)
        if self.comparison is not None:
            self.reader.ask("comparison", self._comparing(self.comparison))

    # --- what is shown of the entry under the cursor

    def on_tree_pane_moved(self) -> None:
        """Show the entry at once, and read it if the cursor rests on it."""
        self._show()
        self.forget_said()
        if self._rest is not None:
            self._rest.stop()
        self._rest = self.set_timer(_REST_S, self._read)

    def on_tree_pane_entered(self) -> None:
        """Do what Enter does."""
        self.action_enter()

    def _show(self, *, stay: bool = False) -> None:
        entry = self.tree_pane.entry
        if entry is None:
            self.page.show(lambda cells: paragraph("nothing is in it", cells, "dim"))
            return
        look, comparison, known = self.look, self.comparison, self._known.get(entry.path)
        self.page.show(lambda cells: details(look, comparison, entry, known, cells), stay=stay)

    def _read(self) -> None:
        entry = self.tree_pane.entry
        if isinstance(entry, TensorRow) and entry.path not in self._known:
            self.reader.ask("numbers", self._reading(entry.path))

    def _sides(self, name: str) -> tuple[Row | None, ...]:
        look = self.look
        if look.laid is None or look.right is None:
            return (look.rows.get(name),)
        return (look.rows[name] if name in look.laid.left else None, look.right.get(name))

    def _reading(self, name: str) -> Job:
        found: list[Numbers | None] = []
        for row in self._sides(name):
            yield from numbers.steps(row, found.append)
            yield
        self.post_message(Found(lambda: self._take(name, tuple(found))))

    def _take(self, name: str, found: tuple[Numbers | None, ...]) -> None:
        self._known[name] = found
        entry = self.tree_pane.entry
        if entry is not None and entry.path == name:
            self._show(stay=True)

    def on_found(self, message: Found) -> None:
        """Take up what the reading thread found."""
        message.stop()
        message.take()

    def _comparing(self, comparison: Comparison) -> Job:
        """Compare, and have marks drawn several times a second."""
        waiting: list[tuple[str, Changed | str | None]] = []
        told = time.monotonic()
        for _ in comparison.steps(lambda name, found: waiting.append((name, found))):
            if time.monotonic() - told > _TOLD_S:
                self.post_message(Found(_noting(self._noted, tuple(waiting))))
                waiting.clear()
                told = time.monotonic()
            yield
        self.post_message(Found(_noting(self._noted, tuple(waiting))))

    def _noted(self, found: Sequence[tuple[str, Changed | str | None]]) -> None:
        if self.comparison is not None:
            for name, each in found:
                self.comparison.note(name, each)
            self.query_one("#title", Bar).refresh()
            self.tree_pane.refresh()
            self._show(stay=True)

    # --- keys

    def action_enter(self) -> None:
        """Fold or unfold a module, show a tensor's values, follow a name to its tensor."""
        entry = self.tree_pane.entry
        if isinstance(entry, Module):
            self.tree_pane.toggle()
        elif isinstance(entry, Link):
            self.jump(entry.target)
        elif isinstance(entry, TensorRow):
            self.action_values()

    def action_other_pane(self) -> None:
        """Give the keys to the other pane."""
        self.set_focus(self.page if self.tree_pane.has_focus else self.tree_pane)
        self.tree_pane.refresh()

    def action_leave(self) -> None:
        """End."""
        self.app.exit(0)

    # --- screens over this one

    def action_about(self) -> None:
        """Show what is known of the checkpoint as a whole."""
        self.app.push_screen(PageScreen("About", lambda cells: about.about(self.look, cells)))

    def action_help(self) -> None:
        """Show what the keys do."""
        two = self.comparison is not None
        self.app.push_screen(PageScreen("Keys", lambda cells: about.keys(cells, two=two)))

    def action_histogram(self) -> None:
        """Show the histogram of the tensor, of both sides where there are two."""
        entry = self.tree_pane.entry
        known = self._known.get(entry.path) if entry is not None else None
        if known is None or not any(each is not None and each.histogram for each in known):
            self.say(
                "no histogram" if known is not None or not isinstance(entry, TensorRow) else "still reading"
            )
            return
        title = entry.path if entry is not None else ""
        self.app.push_screen(PageScreen(title, lambda cells: histogram.pages(known, cells)))

    def action_values(self) -> None:
        """Show the values of the tensor."""
        entry = self.tree_pane.entry
        name = entry.target if isinstance(entry, Link) else entry.path if entry is not None else ""
        sides = self._blocks(name)
        if not sides:
            self.say("only tensors have values to show")
            return
        change = self.comparison.changes.get(name) if self.comparison is not None else None
        at = change.values.at if change is not None and change.values is not None else None
        leaf, blocks = sides
        if not leaf.size:
            self.say(f"{shape(leaf)} has no elements")
            return
        self.app.push_screen(
            ValuesScreen(name, leaf.shape, blocks, lambda job: self.reader.ask("values", job), at)
        )

    def _blocks(self, name: str) -> tuple[Leaf, list[tuple[str, Block, Moments | None]]] | None:
        """Return where the values of each side come from, and their difference where that has a meaning."""
        known = self._known.get(name, (None, None))
        rows = [row for row in self._sides(name) if isinstance(row, TensorRow)]
        if not rows:
            return None
        first = rows[0].leaf
        words = ("left", "right") if self.comparison is not None else ("",)
        found: list[tuple[str, Block, Moments | None]] = []
        made: list[Values] = []
        for word, row, read in zip(words, self._sides(name), known, strict=False):
            if isinstance(row, TensorRow) and row.leaf.shape == first.shape:
                made.append(Values(row.leaf))
                found.append((word, made[-1], read.moments if read is not None else None))
        if len(made) == 2 and "string" not in (row.leaf.dtype for row in rows):
            found.append(("left - right", Difference(*made), None))
        return first, found


def _noting(take: Callable[[Any], None], found: Any) -> Callable[[], None]:
    return lambda: take(found)
