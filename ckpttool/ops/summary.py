"""`inspect`: what is inside a checkpoint, without reading a tensor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpttool.checkpoint import Checkpoint
from ckpttool.formats.resolve import open_checkpoint
from ckpttool.layouts.recognise import recognise
from ckpttool.leaf import Leaf, Path, Record, ValueLeaf, typed
from ckpttool.ops.globs import matcher


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor; `of` is the display path of the parameter that a slot belongs to."""

    path: str
    keys: Path
    leaf: Leaf
    of: str | None
    aliases: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": self.path,
            "keys": typed(self.keys),
            "key": self.leaf.key,
            "dtype": self.leaf.dtype,
            "shape": list(self.leaf.shape),
            "nbytes": self.leaf.nbytes,
            "role": self.leaf.role,
            "of": self.of,
            "slot": self.leaf.slot,
            "aliases": list(self.aliases),
            "trainable": self.leaf.trainable,
        }


@dataclass(frozen=True, slots=True)
class ValueRow:
    """One plain value."""

    path: str
    keys: Path
    leaf: ValueLeaf

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"path": self.path, "keys": typed(self.keys), **shown_value(self.leaf)}


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the tensors listed: `parameters` counts the elements of trained tensors only."""

    tensors: int
    parameters: int
    nbytes: int
    stored_nbytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything that `inspect` shows."""

    checkpoint: Checkpoint
    layout: str | None
    evidence: str
    tensors: tuple[TensorRow, ...]
    values: tuple[ValueRow, ...]
    totals: Totals
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "path": self.checkpoint.path,
            "format": self.checkpoint.format,
            "writer": self.checkpoint.writer,
            "layout": self.layout,
            "tensors": [row.document() for row in self.tensors],
            "values": [row.document() for row in self.values],
            "totals": {
                "tensors": self.totals.tensors,
                "parameters": self.totals.parameters,
                "nbytes": self.totals.nbytes,
                "stored_nbytes": self.totals.stored_nbytes,
            },
            "notes": list(self.notes),
            "details": dict(self.checkpoint.details),
        }


def summary(path: str, glob: str | None = None, layout: str | None = None) -> Summary:
    """List the checkpoint at the path; `glob` keeps the tensors and values whose path it matches.

    `layout` names the layout to recognise it by; without it all are asked.
    """
    checkpoint = open_checkpoint(path)
    tree = checkpoint.tree
    binding = recognise(tree, os.path.basename(checkpoint.path), layout)
    owners: Mapping[Path, Path] = binding.of if binding is not None else {}
    keep = matcher(glob)
    rows = []
    for at, leaf in tree.tensors():
        if keep(tree.names[at]):
            owner = leaf.of or owners.get(at)
            aliases = tuple(tree.alias_name(alias) for alias in tree.aliases.get(at, ()))
            of = tree.names.get(owner) if owner is not None else None
            rows.append(TensorRow(tree.names[at], at, leaf, of, aliases))
    values = tuple(ValueRow(tree.names[at], at, leaf) for at, leaf in tree.plain() if keep(tree.names[at]))
    totals = Totals(
        len(rows),
        sum(row.leaf.size for row in rows if row.leaf.role == "parameter"),
        sum(row.leaf.nbytes for row in rows),
        checkpoint.stored_nbytes,
    )
    name, evidence = (binding.layout, binding.evidence) if binding is not None else (None, "")
    notes = checkpoint.notes
    if glob is not None and not rows and not values:
        notes = (*notes, f"no path matches {glob}")
    return Summary(checkpoint, name, evidence, tuple(rows), values, totals, notes)


def shown_value(leaf: ValueLeaf) -> dict[str, Any]:
    """Return a plain value as JSON can hold it: bytes by their length, records by their class."""
    value = leaf.value
    if isinstance(value, Record):
        return {"type": value.name, "value": value.summary}
    if isinstance(value, bytes):
        return {"type": "bytes", "value": f"{len(value)} bytes"}
    if isinstance(value, complex):
        return {"type": "complex", "value": str(value)}
    return {"type": type(value).__name__, "value": value}
