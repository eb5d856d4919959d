"""The records of `diff`: entries that are not the same in two checkpoints, and by how much."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ckpttool import documents
from ckpttool.leaf import Leaf, ValueLeaf
from ckpttool.ops.array_difference import ArrayDifference
from ckpttool.ops.rows import shown_value

By = Literal["path", "agent", "model", "conversion"]
Sort = Literal["abs", "rel", "cosine"]
Entry = Leaf | ValueLeaf


class Declared(NamedTuple):
    """An entry that one side has alone because a conversion leaves or adds it: no difference.

    `what` is "kept" (in the sidecar, or implied by the target), "dropped" (unmapped, and listed in the
    receipt) or "added" (by the writer of the format).
    """

    side: Literal["left", "right"]
    path: str
    what: Literal["kept", "dropped", "added"]

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return self._asdict()


@dataclass(frozen=True, slots=True)
class Changed:
    """One tensor or value that both have and that is not the same in both.

    `left` and `right` are the entries, `values` how far apart tensors of one shape are (None where types or
    shapes differ so that there is nothing to compare).
    """

    path: str
    left: Entry
    right: Entry
    values: ArrayDifference | None

    @property
    def what(self) -> Literal["kind", "shape", "dtype", "values"]:
        """Name the first thing that differs: "kind", "shape", "dtype" or "values"."""
        if not (isinstance(self.left, Leaf) and isinstance(self.right, Leaf)):
            return "values" if type(self.left) is type(self.right) else "kind"
        if self.left.shape != self.right.shape:
            return "shape"
        return "dtype" if self.left.dtype != self.right.dtype else "values"

    def distance(self, sort: Sort) -> tuple[bool, bool, float]:
        """Return what sorts the biggest changes last: values, counters before weights, form at the end."""
        weight = isinstance(self.left, Leaf) and self.left.role in ("parameter", "buffer")
        if self.values is None:
            return isinstance(self.left, Leaf), weight, math.inf
        if sort == "cosine":
            return False, weight, 2.0 if self.values.cosine is None else 1.0 - self.values.cosine
        return False, weight, self.values.max_abs if sort == "abs" else self.values.max_rel

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": self.path,
            "what": self.what,
            "left": _entry(self.left),
            "right": _entry(self.right),
            "values": None if self.values is None else self.values.document(),
        }


@dataclass(frozen=True, slots=True)
class Diff:
    """Two checkpoints beside each other.

    `by` says what was laid side by side: entries of one path, of one meaning in agents of `layouts`, what
    fills a live model, or one side's conversion into the form of the other.
    `equal` counts tensors that are the same in both, `only_left` and `only_right` name entries that one has
    alone, `declared` those of which a conversion says so.
    """

    left: str
    right: str
    formats: tuple[str, str]
    layouts: tuple[str | None, str | None]
    by: By
    equal: int
    changed: tuple[Changed, ...]
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    notes: tuple[str, ...]
    declared: tuple[Declared, ...] = ()

    @property
    def identical(self) -> bool:
        """Say whether nothing was found."""
        return not (self.changed or self.only_left or self.only_right)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "left": {"path": self.left, "format": self.formats[0], "layout": self.layouts[0]},
            "right": {"path": self.right, "format": self.formats[1], "layout": self.layouts[1]},
            "by": self.by,
            "identical": self.identical,
            "equal": self.equal,
            "changed": [each.document() for each in self.changed],
            "only_left": list(self.only_left),
            "only_right": list(self.only_right),
            "declared": [each.document() for each in self.declared],
            "notes": list(self.notes),
        }


def _entry(entry: Entry) -> dict[str, Any]:
    if isinstance(entry, ValueLeaf):
        return dict(documents.plain(shown_value(entry)))
    return {"key": entry.key, "dtype": entry.dtype, "shape": list(entry.shape)}
