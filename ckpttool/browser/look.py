"""What is shown of a checkpoint, or of two side by side: entries by name, and how they belong together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpttool.errors import UsageError
from ckpttool.leaf import Leaf, Path, ValueLeaf
from ckpttool.ops import folder
from ckpttool.ops.difference import Entry
from ckpttool.ops.modules import Module, given, grouped
from ckpttool.ops.rows import TensorRow, ValueRow
from ckpttool.ops.side_by_side import AUTO, Laid, Side, laid
from ckpttool.ops.summary import Summary

Row = TensorRow | ValueRow


@dataclass(frozen=True, slots=True)
class Link(ValueRow):
    """A further name that people gave to a tensor, at its own place; `target` is the tensor's name."""

    target: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """What the browser shows.

    `summaries` are of one checkpoint, or of the left and the right one. `rows` are all entries by name (the
    left one's where both have it), `right` those of the right one. `root` holds them and the links. `links`
    are a tensor's further names that stand in the tree, `slots` what optimizers keep for it.
    """

    summaries: tuple[Summary, ...]
    root: Module
    rows: Mapping[str, Row]
    links: Mapping[str, tuple[str, ...]]
    slots: Mapping[str, tuple[str, ...]]
    laid: Laid | None = None
    right: Mapping[str, Row] | None = None

    def ways(self, name: str) -> tuple[str, ...]:
        """Return the places in the tree that lead to one storage: the tensor's own, then its links."""
        row = self.rows.get(name)
        name = row.target if isinstance(row, Link) else name
        return (name, *self.links.get(name, ()))

    def relatives(self, name: str) -> tuple[str, ...]:
        """Return a parameter and its slots, whichever of them the name is of."""
        row = self.rows.get(name)
        of = row.of if isinstance(row, TensorRow) and row.of in self.rows else None
        return (of or name, *self.slots.get(of or name, ()))


def look(
    path: str, other: str | None = None, *, glob: str | None = None, by: str = AUTO, layout: str | None = None
) -> Look:
    """List what is at the path, beside it what is at the `other`; no tensor is read.

    `by` says what is laid side by side as `diff` does. Raise what opening raises, and UsageError for a folder
    of checkpoints of which none is the latest.
    """
    left = _summary(path, None if other is not None else glob, layout)
    if other is None:
        return _one(left)
    right = _summary(other, None, None)
    sides = (Side(each.checkpoint, each.binding) for each in (left, right))
    return _two(left, right, laid(*sides, glob=glob, by=by))


def _summary(path: str, glob: str | None, layout: str | None) -> Summary:
    found = folder.look(path, glob, layout)
    if not isinstance(found, Summary):
        raise UsageError("there is no one checkpoint to browse", file=path, hint=found.hint)
    return found


def _one(found: Summary) -> Look:
    entries: tuple[Row, ...] = (*found.tensors, *found.values)
    rows = {row.path: row for row in entries}
    links = _links(found.tensors, rows)
    tree = found.checkpoint.tree
    modules = grouped(rows.items(), tree.containers) if links else found.modules
    return Look((found,), modules[0] if modules else Module("", "", None), rows, links, _slots(rows))


def _links(tensors: Iterable[TensorRow], rows: dict[str, Row]) -> dict[str, tuple[str, ...]]:
    """Add a link to `rows` for each further name that people gave; return them by tensor."""
    found: dict[str, tuple[str, ...]] = {}
    for row in tensors:
        names = tuple(name for name in dict.fromkeys(given(row.aliases)) if name not in rows)
        if names:
            found[row.path] = names
            for name in names:
                rows[name] = Link(name, (), ValueLeaf(None), row.path)
    return found


def _two(left: Summary, right: Summary, pairs: Laid) -> Look:
    first = _rows(pairs.left, pairs.places[0], left)
    second = _rows(pairs.right, pairs.places[1], right)
    rows = {**first, **{name: row for name, row in second.items() if name not in first}}
    containers = {} if pairs.by == "agent" else left.checkpoint.tree.containers
    modules = grouped(rows.items(), containers)
    return Look((left, right), modules[0], rows, {}, _slots(rows), pairs, second)


def _rows(entries: Mapping[str, Entry], places: Mapping[str, Path], found: Summary) -> dict[str, Row]:
    stored = {row.keys: row for row in found.tensors}
    names = {found.checkpoint.tree.names.get(place, name): name for name, place in places.items()}
    rows: dict[str, Row] = {}
    for name, entry in entries.items():
        place = places[name]
        own = stored.get(place)
        if isinstance(entry, Leaf):
            of = names.get(own.of) if own is not None and own.of is not None else None
            rows[name] = TensorRow(name, place, entry, of, own.aliases if own is not None else ())
        else:
            rows[name] = ValueRow(name, place, entry)
    return rows


def _slots(rows: Mapping[str, Row]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for row in rows.values():
        if isinstance(row, TensorRow) and row.of is not None:
            found.setdefault(row.of, []).append(row.path)
    return {name: tuple(slots) for name, slots in found.items()}
