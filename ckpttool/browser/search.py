"""Search over all entries of a tree, including folded ones: parts of names, patterns, native keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckpttool.browser.listing import Row
from ckpttool.core.text import compile_glob
from ckpttool.listing.modules import ModuleSummary, Sort, module_entries, skip_wrapping_modules
from ckpttool.listing.rows import TensorRow


class SearchIndex:
    """All entries of a tree in display order, as if everything were unfolded."""

    def __init__(self, root: ModuleSummary, sort: Sort) -> None:
        self._entries = list(_walk_entries(root, sort))
        self._at = {entry.path: at for at, entry in enumerate(self._entries)}
        self._lower = [entry.path.lower() for entry in self._entries]

    def position(self, path: str) -> int:
        """Return the position of the entry, or -1 if it is not in the tree."""
        return self._at.get(path, -1)

    def find(self, query: str) -> list[int]:
        """Return the positions of the matching entries.

        Case is ignored. A part of a name matches entries whose last step contains its end (`actor` matches
        the actor, not its contents); a query with `*` or `?` is a pattern for tensors and values. If no
        entry matches, native keys are searched.
        """
        if not query:
            return []
        if "*" in query or "?" in query:
            keep = compile_glob(query)
            return self._where(lambda entry: not isinstance(entry, ModuleSummary) and keep(entry.path))
        text = query.lower()
        steps = text.count("/")
        matches = [
            at
            for at, name in enumerate(self._lower)
            if text in name and _ends_in_last_step(name, text, steps)
        ]
        return matches or self._where(
            lambda entry: isinstance(entry, TensorRow) and _matches_key(entry, text)
        )

    def path(self, position: int) -> str:
        """Return the entry's path."""
        return self._entries[position].path

    def _where(self, keep: Callable[[Row | ModuleSummary], bool]) -> list[int]:
        return [at for at, entry in enumerate(self._entries) if keep(entry)]


def next_hit(hits: list[int], position: int, *, backwards: bool = False) -> int | None:
    """Return the next hit after (or before) a position, wrapping around; None without hits."""
    if not hits:
        return None
    if backwards:
        return next((hit for hit in reversed(hits) if hit < position), hits[-1])
    return next((hit for hit in hits if hit > position), hits[0])


def _ends_in_last_step(name: str, text: str, steps: int) -> bool:
    """Return whether the last match of `text` in `name` reaches into the last step of the name."""
    return name.count("/", name.rfind(text)) == steps


def _matches_key(row: TensorRow, text: str) -> bool:
    return text in row.leaf.key.lower() or text in (row.leaf.name or "").lower()


def _walk_entries(root: ModuleSummary, sort: Sort) -> Iterator[Row | ModuleSummary]:
    waiting = list(reversed(module_entries(root, sort)))
    while waiting:
        name, entry = waiting.pop()
        if isinstance(entry, ModuleSummary):
            _, entry = skip_wrapping_modules(name, entry)
            waiting += reversed(module_entries(entry, sort))
        yield entry
