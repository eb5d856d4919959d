"""Which entries of two checkpoints differ: told by their form at once, by values as these are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from ckpttool.browser.look import Look
from ckpttool.errors import CkpttoolError
from ckpttool.leaf import Leaf
from ckpttool.ops.difference import Changed
from ckpttool.ops.side_by_side import Laid
from ckpttool.shown import count, sentence

Mark = Literal["changed", "left", "right", "error"]


class Comparison:
    """What is known so far. A thread finds out more in steps; what it found is taken up by `note`."""

    def __init__(self, look: Look, pairs: Laid) -> None:
        self.pairs = pairs
        self.marks: dict[str, Mark] = {}
        self.changes: dict[str, Changed] = {}
        self.errors: dict[str, str] = {}
        self.below: dict[str, int] = {}
        self.known: set[str] = set()
        both = [name for name in look.rows if name in pairs.left and name in pairs.right]
        self._waiting = [name for name in both if self._needs_reading(name)]
        self.total = len(both)
        for name in look.rows:
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
        """Whether every pair has been read."""
        return len(self.known) == self.total

    def steps(self, note: Callable[[str, Changed | str | None], None]) -> Iterator[None]:
        """Read the pairs, one in each step; tell what was found: a change, nothing, what was in the way."""
        for name in self._waiting:
            try:
                found: Changed | str | None = self.pairs.change(name)
            except CkpttoolError as error:
                found = sentence(error)
            note(name, found)
            yield

    def note(self, name: str, found: Changed | str | None) -> None:
        """Take up what was found of a pair."""
        self.known.add(name)
        if isinstance(found, str):
            self.errors[name] = found
            self._mark(name, "error")
        elif found is not None:
            self.changes[name] = found
            self._mark(name, "changed")

    def state(self) -> str:
        """Return how far it is, in a few words."""
        kinds = list(self.marks.values())
        words = [count(kinds.count("changed"), "differs", "differ")]
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
