"""Search among all entries of a tree, folded ones too: by parts of names, patterns, native keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckpttool.browser.look import Row
from ckpttool.globs import matcher
from ckpttool.ops.modules import Module, Sort, entries, through
from ckpttool.ops.rows import TensorRow


class Index:
    """All entries of a tree in the order in which it shows them when all is unfolded."""

    def __init__(self, root: Module, sort: Sort) -> None:
        self._entries = list(_ordered(root, sort))
        self._at = {entry.path: at for at, entry in enumerate(self._entries)}
        self._lower = [entry.path.lower() for entry in self._entries]

    def position(self, path: str) -> int:
        """Return where the entry stands; before all others, if nowhere."""
        return self._at.get(path, -1)

    def find(self, query: str) -> list[int]:
        """Return the positions of what the query names.

        Letters match whatever their case. A part of a name names the entries in whose own, last step it ends
        (`actor` the actor, not all in it); with `*` or `?` it is a pattern for tensors and values. What names
        no entry is looked for in native keys.
        """
        if not query:
            return []
        if "*" in query or "?" in query:
            keep = matcher(query)
            return self._where(lambda entry: not isinstance(entry, Module) and keep(entry.path))
        wanted = query.lower()
        steps = wanted.count("/")
        found = [
            at for at, name in enumerate(self._lower) if wanted in name and _ends_in(name, wanted, steps)
        ]
        return found or self._where(lambda entry: isinstance(entry, TensorRow) and _keyed(entry, wanted))

    def path(self, position: int) -> str:
        """Return the name of the entry."""
        return self._entries[position].path

    def _where(self, keep: Callable[[Row | Module], bool]) -> list[int]:
        return [at for at, entry in enumerate(self._entries) if keep(entry)]


def following(hits: list[int], position: int, *, backwards: bool = False) -> int | None:
    """Return the next hit after a position, or before it; round the end; None where there is no hit."""
    if not hits:
        return None
    if backwards:
        return next((hit for hit in reversed(hits) if hit < position), hits[-1])
    return next((hit for hit in hits if hit > position), hits[0])


def _ends_in(name: str, wanted: str, steps: int) -> bool:
    """Say whether the last place of `wanted` in `name` reaches into the last of the name's steps."""
    return name.count("/", name.rfind(wanted)) == steps


def _keyed(row: TensorRow, wanted: str) -> bool:
    return wanted in row.leaf.key.lower() or wanted in (row.leaf.name or "").lower()


def _ordered(root: Module, sort: Sort) -> Iterator[Row | Module]:
    waiting = list(reversed(entries(root, sort)))
    while waiting:
        name, entry = waiting.pop()
        if isinstance(entry, Module):
            _, entry = through(name, entry)
            waiting += reversed(entries(entry, sort))
        yield entry
