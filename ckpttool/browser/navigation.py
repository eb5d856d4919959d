"""Navigation in the tree: search, jumps, differences, and their messages."""

from __future__ import annotations

from collections.abc import Callable

from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import Input

from ckpttool.browser import overview
from ckpttool.browser.comparison import ComparisonState
from ckpttool.browser.keys import TREE
from ckpttool.browser.lines import Line, TextPiece, fit_text, pad_text
from ckpttool.browser.listing import BrowserListing
from ckpttool.browser.panes import Bar
from ckpttool.browser.screens import key_line
from ckpttool.browser.search import SearchIndex, next_hit
from ckpttool.browser.tree_pane import TreePane
from ckpttool.listing.modules import ModuleSummary, Sort

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
                TextPiece(pad_text(overview.format_hits(self._show_match()), cells, right=True), "dim"),
            )
        )
        box = self.query_one("#search", Input)
        box.value = ""
        # Focus at once, so that keys typed ahead go to the input.
        self.set_focus(box)

    def _show_match(self) -> tuple[int, int] | None:
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
        self.show_message(overview.format_hits(self._show_match()))

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
        none = overview.format_hits(self._show_match()) or "no search yet; press / to search"
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
