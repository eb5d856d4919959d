"""Comparison of two checkpoints: shapes and types at once, values as they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from ckpttool.browser.listing import BrowserListing
from ckpttool.conversion.alignment import ChangedEntry, CheckpointAlignment
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.text import describe_error, format_count
from ckpttool.core.tree import Leaf

Mark = Literal["changed", "left", "right", "error"]


class ComparisonState:
    """Comparison results so far. A thread computes more in steps; `note` records them."""

    def __init__(self, listing: BrowserListing, pairs: CheckpointAlignment) -> None:
        self.pairs = pairs
        self.marks: dict[str, Mark] = {}
        self.changes: dict[str, ChangedEntry] = {}
        self.errors: dict[str, str] = {}
        self.below: dict[str, int] = {}
        self.known: set[str] = set()
        both = [name for name in listing.rows if name in pairs.left and name in pairs.right]
        self._waiting = [name for name in both if self._needs_reading(name)]
        self.total = len(both)
        for name in listing.rows:
            if name not in pairs.right:
                self._mark(name, "left")
            elif name not in pairs.left:
                self._mark(name, "right")
        for name in set(both).difference(self._waiting):
            self.note(name, pairs.change(name))

    def _needs_reading(self, name: str) -> bool:
        left, right = self.pairs.left[name], self.pairs.right[name]
        if isinstance(left, Leaf) and isinstance(right, Leaf):
            return left.shape == right.shape
        return isinstance(left, Leaf) or isinstance(right, Leaf)

    @property
    def finished(self) -> bool:
        """Whether every pair has been compared."""
        return len(self.known) == self.total

    def steps(self, note: Callable[[str, ChangedEntry | str | None], None]) -> Iterator[None]:
        """Compare one pair per step; report its change, None if equal, or an error message."""
        for name in self._waiting:
            try:
                change: ChangedEntry | str | None = self.pairs.change(name)
            except CkpttoolError as error:
                change = describe_error(error)
            note(name, change)
            yield

    def note(self, name: str, change: ChangedEntry | str | None) -> None:
        """Record the result of a pair."""
        self.known.add(name)
        if isinstance(change, str):
            self.errors[name] = change
            self._mark(name, "error")
        elif change is not None:
            self.changes[name] = change
            self._mark(name, "changed")

    def state(self) -> str:
        """Return the progress or the result in a few words."""
        kinds = list(self.marks.values())
        words = [format_count(kinds.count("changed"), "differs", "differ")]
        words += [f"{kinds.count(side):,} only {side}" for side in ("left", "right") if side in kinds]
        words += [f"{kinds.count('error'):,} unread"] if "error" in kinds else []
        if not self.finished:
            words.append(f"{len(self.known) / self.total:.0%} compared")
        elif not kinds:
            words = ["identical after mapping" if self.pairs.by == "agent" else "identical"]
        return ", ".join(words)

    def _mark(self, name: str, mark: Mark) -> None:
        self.marks[name] = mark
        at = name.rfind("/")
        while at >= 0:
            self.below[name[:at]] = self.below.get(name[:at], 0) + 1
            at = name.rfind("/", 0, at)
