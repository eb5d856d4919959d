"""`inspect`: what is inside a checkpoint, without reading a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpttool import urls
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import LimitError
from ckpttool.formats.resolve import open_checkpoint
from ckpttool.globs import matcher, nothing
from ckpttool.layouts.canonical import Binding
from ckpttool.layouts.recognise import recognised
from ckpttool.leaf import Path, Role
from ckpttool.ops import asking, plain_names, updates
from ckpttool.ops.findings import unjudged
from ckpttool.ops.modules import Module, grouped
from ckpttool.ops.rows import Listed, TensorRow, ValueRow
from ckpttool.wire import asked

_ROLES: tuple[Role, ...] = ("parameter", "buffer", "slot", "counter", "replay", "other")


class RoleTotals(NamedTuple):
    """Sums over the tensors of one role."""

    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the tensors listed: `parameters` counts the elements of trained tensors only.

    What an optimizer keeps, counters and replayed experience are in `roles`, each by itself.
    """

    tensors: int
    parameters: int
    nbytes: int
    stored_nbytes: int
    roles: Mapping[Role, RoleTotals] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "tensors": self.tensors,
            "parameters": self.parameters,
            "nbytes": self.nbytes,
            "stored_nbytes": self.stored_nbytes,
            "roles": {role: sums._asdict() for role, sums in self.roles.items()},
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything that `inspect` shows.

    `binding` is the agent that a layout recognises. `modules` begins with the root, each before those in it.
    `checkpoints` are those of the folder, where the path is one and the latest of them was taken.
    """

    checkpoint: Checkpoint
    binding: Binding | None
    tensors: tuple[TensorRow, ...]
    values: tuple[ValueRow, ...]
    totals: Totals
    notes: tuple[str, ...]
    modules: tuple[Module, ...] = ()
    checkpoints: tuple[Listed, ...] = ()

    @property
    def layout(self) -> str | None:
        """The layout that recognises an agent, None if none does."""
        return None if self.binding is None else self.binding.layout

    @property
    def evidence(self) -> str:
        """What the layout recognised it by, empty where none does."""
        return "" if self.binding is None else self.binding.evidence

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "path": urls.spelled(self.checkpoint.path),
            "format": self.checkpoint.format,
            "writer": self.checkpoint.writer,
            "layout": self.layout,
            "tensors": [row.document() for row in self.tensors],
            "values": [row.document() for row in self.values],
            "totals": self.totals.document(),
            "modules": [module.document() for module in self.modules if module.path or module.kind],
            "notes": list(self.notes),
            "asks": asking.document(self.checkpoint.asks),
            "details": {**self.checkpoint.details, **self._calls()},
            "checkpoints": [listed.document() for listed in self.checkpoints],
        }

    def _calls(self) -> dict[str, Any]:
        # What `asks` says of every name, in short.
        names = asked.called(self.checkpoint.asks)
        return {"calls": names} if names else {}


def summary(path: str, glob: str | None = None, layout: str | None = None) -> Summary:
    """List the checkpoint at the path; `glob` keeps the tensors and values whose path it matches.

    `layout` names the layout to recognise it by; without it all are asked.
    """
    return summary_of(open_checkpoint(path), glob, layout)


def summary_of(checkpoint: Checkpoint, glob: str | None = None, layout: str | None = None) -> Summary:
    """Return the listing of a checkpoint that has been opened."""
    tree = checkpoint.tree
    binding = recognised(checkpoint, layout)
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
    totals = _totals(rows, checkpoint.stored_nbytes)
    said = asking.notes(checkpoint.asks)
    notes = (
        *said,
        *(each.sentence for each in unjudged(checkpoint.unjudged)),
        *checkpoint.notes,
        *plain_names.notes(tree, agent=binding is not None),
        *updates.notes(tree),
    )
    if glob is not None and not rows and not values:
        told = nothing(glob, list(tree.names.values()))
        notes = (*notes, "; ".join(filter(None, (told.message, told.hint))))
    entries: list[TensorRow | ValueRow] = [*rows, *values]
    try:
        modules = grouped(((entry.path, entry) for entry in entries), tree.containers)
    except LimitError as error:
        raise error.located(file=checkpoint.path) from None
    return Summary(checkpoint, binding, tuple(rows), values, totals, notes, modules)


def _totals(rows: list[TensorRow], stored_nbytes: int) -> Totals:
    found: dict[Role, list[int]] = {}
    for row in rows:
        leaf = row.leaf
        sums = found.setdefault(leaf.role, [0, 0, 0])
        sums[0] += 1
        sums[1] += leaf.size
        sums[2] += leaf.nbytes
    roles = {role: RoleTotals(*found[role]) for role in _ROLES if role in found}
    trained = roles["parameter"].elements if "parameter" in roles else 0
    return Totals(len(rows), trained, sum(r.nbytes for r in roles.values()), stored_nbytes, roles)
