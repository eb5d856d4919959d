"""Outline of a listing: groups of alike siblings, fitting depth, counters, missing shards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from ckpttool.core import deferred, filesystem
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass
from ckpttool.core.tree import Leaf, json_value
from ckpttool.formats.detect import find_other_shards
from ckpttool.listing.modules import (
    ModuleSummary,
    Sort,
    describe_module_kind,
    module_activation,
    module_entries,
    skip_wrapping_modules,
)
from ckpttool.listing.rows import TensorRow, ValueRow
from ckpttool.listing.training_counters import read_number

# Fewer alike siblings than this are listed one by one.
FEWEST_ALIKE = 3
# Modules with more than _MANY plain values show only the first ones.
_MANY_VALUES, _FIRST_VALUES = 100, 20
# Scalars that one listing reads to show their values.
MOST_SCALARS = 64
_SCALAR_ROLES = ("counter", "other")
DIGITS = deferred.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class SiblingGroup:
    """Consecutive siblings that differ only in the numbers of their names; `first` stands for all.

    They have equal subtrees: names, classes, types, shapes and roles of tensors, and plain values.
    """

    first: ModuleSummary | TensorRow | ValueRow
    entries: tuple[ModuleSummary | TensorRow | ValueRow, ...]

    @property
    def count(self) -> int:
        """The number of siblings."""
        return len(self.entries)


@dataclass(frozen=True, slots=True)
class OmittedValues:
    """Values of a module that are counted, not listed."""

    values: int


OutlineEntry = ModuleSummary | TensorRow | ValueRow | SiblingGroup | OmittedValues


class ListingOutline:
    """The visible entries of a listing's modules in one order.

    `whole` lists every entry by itself: no groups of alike siblings, no omitted values.
    """

    def __init__(self, modules: Sequence[ModuleSummary], sort: Sort = "file", *, whole: bool = False) -> None:
        self.root = modules[0] if modules else None
        self.sort: Sort = sort
        self.whole = whole
        self._shapes = {} if whole else _structures(modules)

    def entries(self, module: ModuleSummary) -> list[tuple[str, OutlineEntry]]:
        """Return the rows of a module by name."""
        rows = module_entries(module, self.sort)
        if self.whole:
            return list(rows)
        return _omit_values(self._group(rows))

    def children(self, entry: OutlineEntry) -> list[tuple[str, OutlineEntry]]:
        """Return the rows below an entry; for a group, those of its first member."""
        if isinstance(entry, SiblingGroup):
            entry = entry.first
        if not isinstance(entry, ModuleSummary):
            return []
        return self.entries(skip_wrapping_modules("", entry)[1])

    def level_counts(self, most: int) -> Iterator[int]:
        """Yield the number of rows of each level; end after the level that brings the sum above `most`."""
        level = self.entries(self.root) if self.root is not None else []
        total = 0
        while level:
            yield len(level)
            total += len(level)
            if total > most:
                return
            level = [row for _, entry in level for row in self.children(entry)]

    def fitting_depth(self, rows: int) -> int | None:
        """Return the deepest level with which everything fits into the rows, at least 1; None if all does."""
        total = 0
        for depth, count in enumerate(self.level_counts(rows)):
            total += count
            if total > rows:
                return max(depth, 1)
        return None

    def _group(
        self, entries: list[tuple[str, TensorRow | ValueRow | ModuleSummary]]
    ) -> list[tuple[str, OutlineEntry]]:
        """Return the entries with each run of alike siblings as one."""
        grouped: list[tuple[str, OutlineEntry]] = []
        start = 0
        while start < len(entries):
            name, first = entries[start]
            end = start + 1
            if DIGITS.search(name):
                stem, structure = DIGITS.sub("#", name), self._structure(first)
                while end < len(entries) and self._is_alike(entries[end], stem, structure):
                    end += 1
            if end - start < FEWEST_ALIKE:
                grouped += entries[start:end]
            else:
                group = SiblingGroup(first, tuple(entry for _, entry in entries[start:end]))
                grouped.append((f"{name}...{entries[end - 1][0]}", group))
            start = end
        return grouped

    def _is_alike(
        self, named: tuple[str, TensorRow | ValueRow | ModuleSummary], stem: str, structure: object
    ) -> bool:
        name, entry = named
        return DIGITS.sub("#", name) == stem and self._structure(entry) == structure

    def _structure(self, entry: TensorRow | ValueRow | ModuleSummary) -> object:
        return self._shapes[entry] if isinstance(entry, ModuleSummary) else _row_structure(entry)


def _structures(modules: Sequence[ModuleSummary]) -> dict[ModuleSummary, int]:
    """Return a number for each module; equal numbers for equal subtrees."""
    structures: dict[ModuleSummary, int] = {}
    numbers: dict[object, int] = {}
    # Children come after their parents.
    for module in reversed(modules):
        rows = tuple((name, _row_structure(row)) for name, row in module.rows)
        below = tuple((name, structures[child]) for name, child in module.below.items())
        shape = ("module", DIGITS.sub("#", describe_module_kind(module)), module.built, rows, below)
        structures[module] = numbers.setdefault(shape, len(numbers))
    return structures


def _row_structure(row: TensorRow | ValueRow) -> object:
    leaf = row.leaf
    if isinstance(leaf, Leaf):
        return leaf.dtype, leaf.shape, leaf.role, leaf.slot, leaf.trainable
    shown = json_value(leaf)
    return "value", shown["type"], repr(shown["value"])


def _omit_values(entries: list[tuple[str, OutlineEntry]]) -> list[tuple[str, OutlineEntry]]:
    """Return the entries; of very many plain values, the first ones and the number left out."""
    values = sum(isinstance(entry, ValueRow) for _, entry in entries)
    if values <= _MANY_VALUES:
        return entries
    kept: list[tuple[str, OutlineEntry]] = []
    listed = 0
    for name, entry in entries:
        listed += isinstance(entry, ValueRow)
        if listed <= _FIRST_VALUES or not isinstance(entry, ValueRow):
            kept.append((name, entry))
    return [*kept, ("", OmittedValues(values - _FIRST_VALUES))]


def describe_group(group: SiblingGroup) -> str:
    """Return what the members of a group have in common: class, or type and shape."""
    first = group.first
    if isinstance(first, TensorRow):
        return f"{first.leaf.dtype}{list(first.leaf.shape)}"
    if isinstance(first, ValueRow):
        return f"= {json_value(first.leaf)['value']}"
    kinds = {describe_module_kind(entry) for entry in group.entries if isinstance(entry, ModuleSummary)}
    if len(kinds) == 1:
        return kinds.pop()
    # Their names differ, their class does not.
    return " ".join(word for word in (first.kind or "", module_activation(first.facts)) if word)


class ScalarReader:
    """Reads a few scalars of one checkpoint, so that a listing shows their values; none of a remote one."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._left = 0 if filesystem.find_store(checkpoint.path) is not None else MOST_SCALARS

    def read(self, leaf: Leaf) -> str:
        """Return the value as text; empty for another tensor, and for a damaged value."""
        if leaf.role not in _SCALAR_ROLES or leaf.shape not in ((), (1,)) or not self._left:
            return ""
        self._left -= 1
        # A damaged value gives None: a listing needs no value, and commands that do report the error. A call
        # that the system refuses is an error here as well.
        number = read_number(leaf)
        if number is None:
            return ""
        return f"{number:.7g}" if leaf.dtype == "float32" else f"{number}"


def missing_shards(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the checkpoint's missing files, as far as names and index list them."""
    names: dict[str, None] = {}
    for _, leaf in checkpoint.tree.tensors():
        if (path := getattr(leaf.source, "missing_path", None)) is not None:
            names.setdefault(os.path.basename(path))
    others = find_other_shards(checkpoint)
    return (*names, *(others[2] if others is not None else ()))
