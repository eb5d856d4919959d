"""Unfolded lines of the tree: only these exist, whatever the size of the checkpoint."""

from __future__ import annotations

from itertools import takewhile

from ckpttool.browser.listing import Row
from ckpttool.core.deferred import dataclass
from ckpttool.listing.modules import ModuleSummary, Sort, module_entries, skip_wrapping_modules, walk_modules


@dataclass(frozen=True, slots=True)
class OutlineLine:
    """One line: `name` is the text shown, `path` the full path."""

    level: int
    name: str
    path: str
    entry: Row | ModuleSummary


class Outline:
    """The visible (unfolded) lines, from the top."""

    def __init__(self, root: ModuleSummary, room: int = 0) -> None:
        """Start with the first level, and unfold as many modules from the top as fit into `room` lines."""
        self.root = root
        self.sort: Sort = "file"
        self.lines: list[OutlineLine] = []
        self._open: set[str] = set()
        self._build()
        self._unfold(room)

    def is_open(self, line: OutlineLine) -> bool:
        """Return whether the line's entries are shown."""
        return isinstance(line.entry, ModuleSummary) and line.path in self._open

    def open(self, at: int) -> None:
        """Unfold the module in line `at`."""
        line = self.lines[at]
        if isinstance(line.entry, ModuleSummary) and line.path not in self._open:
            self._open.add(line.path)
            self._show(at, line.entry)

    def close(self, at: int) -> None:
        """Fold the module in line `at`."""
        line = self.lines[at]
        if self.is_open(line):
            self._open.discard(line.path)
            below = takewhile(lambda other: other.level > line.level, self.lines[at + 1 :])
            del self.lines[at + 1 : at + 1 + sum(1 for _ in below)]

    def open_all(self, at: int) -> None:
        """Unfold the module in line `at` and all modules in it."""
        module = self.lines[at].entry
        if isinstance(module, ModuleSummary):
            self.close(at)
            self._open |= {inner.path for inner in walk_modules(module)}
            self._show(at, module)

    def _show(self, at: int, module: ModuleSummary) -> None:
        self.lines[at + 1 : at + 1] = self._below(module, self.lines[at].level + 1)

    def above(self, at: int) -> int:
        """Return the line of the parent module of line `at`; `at` itself at the first level."""
        level = self.lines[at].level
        return next((n for n in range(at - 1, -1, -1) if self.lines[n].level < level), at)

    def order(self, sort: Sort) -> None:
        """Sort the entries of every module."""
        self.sort = sort
        self._build()

    def reveal(self, path: str) -> int | None:
        """Unfold the parents of an entry; return its line, or None if it is not in the tree."""
        at, start, end = None, 0, len(self.lines)
        for here in _path_prefixes(path):
            # A tensor and a module may have the same name.
            named = (n for n in range(start, end) if self.lines[n].path == here)
            number = next((n for n in named if here == path or self._is_module(self.lines[n])), None)
            if number is None:
                continue
            at = number
            if here != path:
                self.open(at)
                level = self.lines[at].level
                start = at + 1
                end = next(
                    (n for n in range(start, len(self.lines)) if self.lines[n].level <= level),
                    len(self.lines),
                )
        return at if at is not None and self.lines[at].path == path else None

    def _build(self) -> None:
        self.lines = self._below(self.root, 0)

    def _below(self, module: ModuleSummary, level: int) -> list[OutlineLine]:
        """Return the visible lines in a module."""
        below_lines: list[OutlineLine] = []
        waiting = [(level, name, entry) for name, entry in reversed(module_entries(module, self.sort))]
        while waiting:
            depth, name, entry = waiting.pop()
            if isinstance(entry, ModuleSummary):
                name, entry = skip_wrapping_modules(name, entry)
                if entry.path in self._open:
                    below = reversed(module_entries(entry, self.sort))
                    waiting += [(depth + 1, child_name, inner) for child_name, inner in below]
            below_lines.append(OutlineLine(depth, name, entry.path, entry))
        return below_lines

    def _unfold(self, room: int) -> None:
        """Unfold level by level as long as all lines of a level fit."""
        level = 0
        while modules := [
            n for n, entry in enumerate(self.lines) if entry.level == level and self._is_module(entry)
        ]:
            inner = [self.lines[at].entry for at in modules]
            more = sum(
                len(entry.rows) + len(entry.below) for entry in inner if isinstance(entry, ModuleSummary)
            )
            if len(self.lines) + more > room:
                return
            for at in reversed(modules):
                self.open(at)
            level += 1

    @staticmethod
    def _is_module(line: OutlineLine) -> bool:
        return isinstance(line.entry, ModuleSummary)


def _path_prefixes(path: str) -> list[str]:
    """Return the paths of an entry's parents, from the top, and its own."""
    return [path[:at] for at, letter in enumerate(path) if letter == "/"] + [path]
