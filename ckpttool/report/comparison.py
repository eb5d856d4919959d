"""What the page says of two checkpoints: each difference in words, and which rows of the tree it concerns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckpttool.leaf import Leaf, ValueLeaf, display
from ckpttool.ops.array_difference import ArrayDifference
from ckpttool.ops.difference import Changed, Diff, Entry
from ckpttool.ops.rows import shown_value
from ckpttool.ops.summary import Summary
from ckpttool.report import rows
from ckpttool.report.numbers import exact, set_minus
from ckpttool.report.pictures import Pictures
from ckpttool.shown import clean, shortened

# Changes with pictures: each is read once more for them, both sides.
PICTURED = 500
# Entries of one side alone that are named.
ALONE = 500
_VALUE = 80


@dataclass(frozen=True, slots=True)
class Comparison:
    """`changes` are objects for the page, the biggest first; `marks` say of rows by path what became of them.

    A mark is the number of a change, or -1 for what the other checkpoint lacks.
    """

    diff: Diff
    changes: list[dict[str, Any]]
    marks: dict[str, int]
    alone: tuple[tuple[str, ...], tuple[str, ...]]


def comparison(found: Diff, summary: Summary, pictures: Pictures) -> Comparison:
    """Return what is shown of the differences; those with pictures are read again, one at a time."""
    places = _places(found, summary)
    marks = {path: -1 for name in found.only_left for path in places.get(name, (name,))}
    changes = []
    for number, each in enumerate(found.changed):
        marks.update(dict.fromkeys(places.get(each.path, (each.path,)), number))
        changes.append({**_change(each), "pictures": _pictures(each, pictures, number)})
    left, right = (
        tuple(rows.path(name) for name in names[:ALONE]) for names in (found.only_left, found.only_right)
    )
    return Comparison(found, changes, marks, (left, right))


def _places(found: Diff, summary: Summary) -> dict[str, list[str]]:
    """Return by canonical path where the first checkpoint has it; nothing where paths were compared."""
    if found.by == "path":
        return {}
    tree, binding = summary.checkpoint.tree, summary.binding
    places: dict[str, list[str]] = {}
    for move in binding.moves.moves if binding is not None else ():
        places.setdefault(display(move.target), []).append(tree.names[move.source])
    return places


def _pictures(change: Changed, pictures: Pictures, number: int) -> list[list[float]]:
    left, right = change.left, change.right
    if (
        number >= PICTURED
        or change.values is None
        or not isinstance(left, Leaf)
        or not isinstance(right, Leaf)
    ):
        return []
    if "string" in (left.dtype, right.dtype):
        return []
    return [each.document() for each in pictures.pair(change.path, left, right)]


def _change(change: Changed) -> dict[str, Any]:
    told = {"path": rows.path(change.path), "what": change.what}
    if change.values is None:
        return {**told, "sentence": f"{_entry(change.left)} → {_entry(change.right)}", "share": None}
    values = change.values
    return {
        **told,
        "sentence": "; ".join(_sentences(change, values)),
        "share": values.different / values.size,
        "max_abs": exact(values.max_abs, 3),
        "max_rel": exact(values.max_rel, 3),
        "cosine": "" if values.cosine is None else set_minus(f"{values.cosine:.6f}"),
        "different": f"{values.different:,} of {values.size:,}",
        "at": str(list(values.at)) if values.at else "",
        "left": _number(values.left),
        "right": _number(values.right),
    }


def _sentences(change: Changed, values: ArrayDifference) -> Iterator[str]:
    yield f"{values.different:,} of {values.size:,} differ"
    kinds = [entry.dtype for entry in (change.left, change.right) if isinstance(entry, Leaf)]
    if len(set(kinds)) > 1:
        yield " → ".join(kinds)
    if values.nans:
        yield f"NaN in one alone {values.nans:,}"


def _entry(entry: Entry) -> str:
    if isinstance(entry, ValueLeaf):
        return shortened(clean(str(shown_value(entry)["value"])), _VALUE)
    return f"{entry.dtype}{list(entry.shape)}"


def _number(value: object) -> str:
    return exact(value) if isinstance(value, float) else shortened(clean(str(value)), _VALUE)
