"""The lines of the tree that are unfolded: only they exist, however many entries a checkpoint has."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from ckpttool.browser.look import Row
from ckpttool.ops.modules import Module, Sort, entries, through, walk


@dataclass(frozen=True, slots=True)
class Line:
    """One line: `name` is what stands in it, `path` the whole of it."""

    level: int
    name: str
    path: str
    entry: Row | Module


class Outline:
    """The unfolded lines, from the top."""

    def __init__(self, root: Module, room: int = 0) -> None:
        """Begin with the first level, and unfold from above as many modules as fit into `room` lines."""
        self.root = root
        self.sort: Sort = "file"
        self.lines: list[Line] = []
        self._open: set[str] = set()
        self._build()
        self._unfold(room)

    def is_open(self, line: Line) -> bool:
        """Say whether what is below the line is shown."""
        return isinstance(line.entry, Module) and line.path in self._open

    def open(self, at: int) -> None:
        """Unfold the module in line `at`."""
        line = self.lines[at]
        if isinstance(line.entry, Module) and line.path not in self._open:
            self._open.add(line.path)
            self._show(at, line.entry)

    def close(self, at: int) -> None:
        """Fold the module in line `at`."""
        line = self.lines[at]
        if self.is_open(line):
            self._open.discard(line.path)
            below = takewhile(lambda each: each.level > line.level, self.lines[at + 1 :])
            del self.lines[at + 1 : at + 1 + sum(1 for _ in below)]

    def open_all(self, at: int) -> None:
        """Unfold the module in line `at` and all below it."""
        module = self.lines[at].entry
        if isinstance(module, Module):
            self.close(at)
            self._open |= {each.path for each in walk(module)}
            self._show(at, module)

    def _show(self, at: int, module: Module) -> None:
        self.lines[at + 1 : at + 1] = self._below(module, self.lines[at].level + 1)

    def above(self, at: int) -> int:
        """Return the line of the module that the line `at` is in; `at` itself at the first level."""
        level = self.lines[at].level
        return next((n for n in range(at - 1, -1, -1) if self.lines[n].level < level), at)

    def order(self, sort: Sort) -> None:
        """Show the entries of every module in another order."""
        self.sort = sort
        self._build()

    def reveal(self, path: str) -> int | None:
        """Unfold what hides an entry; return its line, None where the tree has none of that name."""
        at, start, end = None, 0, len(self.lines)
        for here in _ends(path):
            # A tensor and a module may have one name.
            named = (n for n in range(start, end) if self.lines[n].path == here)
            found = next((n for n in named if here == path or self._is_module(self.lines[n])), None)
            if found is None:
                continue
            at = found
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

    def _below(self, module: Module, level: int) -> list[Line]:
        """Return the lines in a module, with those that are unfolded further down."""
        made: list[Line] = []
        waiting = [(level, name, entry) for name, entry in reversed(entries(module, self.sort))]
        while waiting:
            depth, name, entry = waiting.pop()
            if isinstance(entry, Module):
                name, entry = through(name, entry)
                if entry.path in self._open:
                    below = reversed(entries(entry, self.sort))
                    waiting += [(depth + 1, each, inner) for each, inner in below]
            made.append(Line(depth, name, entry.path, entry))
        return made

    def _unfold(self, room: int) -> None:
        """Unfold level by level as long as all lines of a level fit."""
        level = 0
        while modules := [
            n for n, each in enumerate(self.lines) if each.level == level and self._is_module(each)
        ]:
            inner = [self.lines[at].entry for at in modules]
            more = sum(len(each.rows) + len(each.below) for each in inner if isinstance(each, Module))
            if len(self.lines) + more > room:
                return
            for at in reversed(modules):
                self.open(at)
            level += 1

    @staticmethod
    def _is_module(line: Line) -> bool:
        return isinstance(line.entry, Module)


def _ends(path: str) -> list[str]:
    """Return the paths of what an entry lies in, from above, and its own."""
    return [path[:at] for at, letter in enumerate(path) if letter == "/"] + [path]
