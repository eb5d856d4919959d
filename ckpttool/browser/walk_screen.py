"""Walking through the tree: search, jumps, differences, and what the last line says of them."""

from __future__ import annotations

from collections.abc import Callable

from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import Input

from ckpttool.browser import titles
from ckpttool.browser.comparison import Comparison
from ckpttool.browser.keys import TREE
from ckpttool.browser.lines import Line, Piece, fitted, padded
from ckpttool.browser.look import Look
from ckpttool.browser.panes import Bar
from ckpttool.browser.screens import last_line
from ckpttool.browser.search import Index, following
from ckpttool.browser.tree_pane import TreePane
from ckpttool.ops.modules import Module, Sort

_ORDERS: dict[Sort, Sort] = {"file": "size", "size": "name", "name": "file"}
_SAID = {"file": "as in the file", "size": "the largest first", "name": "by name"}


class SearchInput(Input):
    """Where a search is typed."""

    BINDINGS = [Binding("escape", "screen.no_search", show=False)]  # noqa: RUF012  # Textual's own form


class WalkScreen(Screen[None]):
    """A screen with a tree, its cursor, and a last line in which a search is typed."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.look = look
        self.comparison = Comparison(look, look.laid) if look.laid is not None else None
        self._index: Index | None = None
        self._hits: list[int] = []
        self._origin: str | None = None
        self._history: list[str] = []
        self._said: tuple[str, str] | None = None

    @property
    def tree_pane(self) -> TreePane:
        """The tree."""
        return self.query_one(TreePane)

    def last_words(self, cells: int) -> Line:
        """Return what is to be said, and as many keys as fit beside it."""
        said = f" {fitted(self._said[1], cells - 2)} " if self._said is not None else ""
        keys = last_line(TREE, cells - len(said), two=self.comparison is not None)
        return (Piece(said, "mark"), *keys) if said else keys

    def say(self, text: str) -> None:
        """Say something in the last line until the cursor moves on."""
        entry = self.tree_pane.entry
        self._said = (entry.path if entry is not None else "", text) if text else None
        self.query_one("#keys", Bar).refresh()

    def forget_said(self) -> None:
        """Say nothing more where the cursor has moved on."""
        entry = self.tree_pane.entry
        if self._said is not None and entry is not None and entry.path != self._said[0]:
            self.say("")

    def jump(self, path: str) -> None:
        """Go to an entry, and remember where that was from."""
        entry = self.tree_pane.entry
        if self.tree_pane.reveal(path) and entry is not None and entry.path != path:
            self._history.append(entry.path)

    def action_back(self) -> None:
        """Go back from the last jump."""
        if self._history:
            self.tree_pane.reveal(self._history.pop())
        else:
            self.say("no jump to go back from")

    def action_alias(self) -> None:
        """Go to the next of a tensor's names that stand in the tree."""
        self._round(self.look.ways, "no other name of it stands in the tree")

    def action_relative(self) -> None:
        """Go from a slot to its parameter, and round that one's slots."""
        self._round(self.look.relatives, "no optimizer keeps anything for it")

    def _round(self, ring: Callable[[str], tuple[str, ...]], none: str) -> None:
        entry = self.tree_pane.entry
        names = ring(entry.path) if entry is not None and not isinstance(entry, Module) else ()
        if entry is None or len(names) < 2:
            self.say(none)
            return
        at = names.index(entry.path) if entry.path in names else -1
        self.jump(names[(at + 1) % len(names)])
        self.say(f"{(at + 1) % len(names) + 1} of {len(names)}")

    def action_difference(self, backwards: bool) -> None:  # Textual's actions take positions
        """Go to the next entry that differs."""
        if self.comparison is None:
            self.say("nothing to compare with: ckpttool browse PATH PATH")
            return
        index = self._indexed()
        hits = sorted(index.position(name) for name in self.comparison.marks)
        self._go(hits, backwards=backwards, none=self.comparison.state())

    def action_everything(self) -> None:
        """Unfold all that is in a module."""
        self.tree_pane.everything()

    def action_sort(self) -> None:
        """Show the next order."""
        outline = self.tree_pane.outline
        if outline is not None:
            self.tree_pane.order(_ORDERS[outline.sort])
            self._index, self._hits = None, []
            self.say(f"order: {_SAID[outline.sort]}")

    def _indexed(self) -> Index:
        outline = self.tree_pane.outline
        if self._index is None:
            self._index = Index(self.look.root, outline.sort if outline is not None else "file")
        return self._index

    def action_search(self) -> None:
        """Let something be typed that is searched for."""
        entry = self.tree_pane.entry
        self._origin = entry.path if entry is not None else None
        self.query_one("#keys").display = False
        self.query_one("#asking").display = True
        self.query_one("#hits", Bar).show(
            lambda cells: (Piece(padded(titles.hits(self._found()), cells, right=True), "dim"),)
        )
        box = self.query_one("#search", Input)
        box.value = ""
        # At once: what is typed ahead belongs into it.
        self.set_focus(box)

    def _found(self) -> tuple[int, int] | None:
        """Return which of the hits the cursor is on, from 1, and how many there are."""
        if not self.tree_pane.query_text:
            return None
        entry = self.tree_pane.entry
        at = self._indexed().position(entry.path) if entry is not None else -1
        return (self._hits.index(at) + 1 if at in self._hits else 0, len(self._hits))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave all keys to what is searched for while it is typed."""
        del parameters
        return action == "no_search" or not self.query_one("#asking").display

    def on_input_changed(self, event: Input.Changed) -> None:
        """Go to the first hit from where the search began."""
        if not self.query_one("#asking").display:
            return
        self.tree_pane.query_text = event.value
        self._hits = self._indexed().find(event.value)
        origin = self._indexed().position(self._origin or "")
        hit = following(self._hits, origin - 1)
        if hit is not None:
            self.tree_pane.reveal(self._indexed().path(hit))
        elif self._origin is not None:
            self.tree_pane.reveal(self._origin)
        self.query_one("#hits", Bar).refresh()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Stay at the hit."""
        event.stop()
        entry = self.tree_pane.entry
        if self._origin is not None and entry is not None and entry.path != self._origin:
            self._history.append(self._origin)
        self._searched()
        self.say(titles.hits(self._found()))

    def action_no_search(self) -> None:
        """Go back to where the search began."""
        self.tree_pane.query_text = ""
        self._hits = []
        if self._origin is not None:
            self.tree_pane.reveal(self._origin)
        self._searched()

    def _searched(self) -> None:
        self.query_one("#asking").display = False
        self.query_one("#keys").display = True
        self.set_focus(self.tree_pane)

    def action_following(self, backwards: bool) -> None:  # Textual's actions take positions
        """Go to the next hit of the last search."""
        none = titles.hits(self._found()) or "nothing was searched for: /"
        self._go(self._hits, backwards=backwards, none=none)

    def _go(self, hits: list[int], *, backwards: bool, none: str) -> None:
        entry = self.tree_pane.entry
        at = self._indexed().position(entry.path) if entry is not None else -1
        hit = following(hits, at, backwards=backwards)
        if hit is None:
            self.say(none)
            return
        self.jump(self._indexed().path(hit))
        self.say(f"{hits.index(hit) + 1:,} of {len(hits):,}")
