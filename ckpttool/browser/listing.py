"""Contents of one checkpoint, or of two side by side: entries by name, and their relations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpttool.commands import inspect
from ckpttool.conversion.alignment import AUTO, CheckpointAlignment, Entry, align_checkpoints
from ckpttool.conversion.reconversion import ComparisonSide
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import UsageError
from ckpttool.core.tree import Leaf, Path, ValueLeaf
from ckpttool.listing.contents import CheckpointSummary
from ckpttool.listing.modules import ModuleSummary, group_by_module, user_given_names
from ckpttool.listing.rows import TensorRow, ValueRow

Row = TensorRow | ValueRow


@dataclass(frozen=True, slots=True)
class AliasRow(ValueRow):
    """Alias from user code, shown at its own place in the tree; `target` is the tensor's path."""

    target: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class BrowserListing:
    """Contents of the browser.

    `summaries` has one checkpoint, or the left and the right one. `rows` are all entries by name (the
    left one's if both have it), `right` those of the right one. `root` holds them and the links.
    `links` are a tensor's aliases shown in the tree, `slots` the optimizer state of a parameter.
    """

    summaries: tuple[CheckpointSummary, ...]
    root: ModuleSummary
    rows: Mapping[str, Row]
    links: Mapping[str, tuple[str, ...]]
    slots: Mapping[str, tuple[str, ...]]
    alignment: CheckpointAlignment | None = None
    right: Mapping[str, Row] | None = None

    def ways(self, name: str) -> tuple[str, ...]:
        """Return the tree positions of one storage: the tensor's own path, then its aliases."""
        row = self.rows.get(name)
        name = row.target if isinstance(row, AliasRow) else name
        return (name, *self.links.get(name, ()))

    def relatives(self, name: str) -> tuple[str, ...]:
        """Return a parameter and its slots, given the name of either."""
        row = self.rows.get(name)
        of = row.of if isinstance(row, TensorRow) and row.of in self.rows else None
        return (of or name, *self.slots.get(of or name, ()))


def list_for_browser(
    path: str, other: str | None = None, *, glob: str | None = None, by: str = AUTO, layout: str | None = None
) -> BrowserListing:
    """List the checkpoint at the path, paired with `other` if given; no tensor is read.

    Raise any error of opening, and UsageError for a folder of checkpoints without a latest one.

    Args:
        path: the checkpoint.
        other: the one that it is paired with.
        glob: a pattern for the paths of entries.
        by: how entries are paired, as in `diff`.
        layout: the layout of the agent at `path`.
    """
    left = _require_summary(path, None if other is not None else glob, layout)
    if other is None:
        return _list_one(left)
    right = _require_summary(other, None, None)
    sides = (ComparisonSide(summary.checkpoint, summary.binding) for summary in (left, right))
    return _list_two(left, right, align_checkpoints(*sides, glob=glob, by=by))


def _require_summary(path: str, glob: str | None, layout: str | None) -> CheckpointSummary:
    listed = inspect.inspect_path(path, glob, layout)
    if not isinstance(listed, CheckpointSummary):
        raise UsageError("no single checkpoint to browse", file=path, hint=listed.hint)
    return listed


def _list_one(summary: CheckpointSummary) -> BrowserListing:
    entries: tuple[Row, ...] = (*summary.tensors, *summary.values)
    rows = {row.path: row for row in entries}
    links = _add_aliases(summary.tensors, rows)
    tree = summary.checkpoint.tree
    modules = group_by_module(rows.items(), tree.containers) if links else summary.modules
    return BrowserListing(
        (summary,), modules[0] if modules else ModuleSummary("", "", None), rows, links, _group_slots(rows)
    )


def _add_aliases(tensors: Iterable[TensorRow], rows: dict[str, Row]) -> dict[str, tuple[str, ...]]:
    """Add a link to `rows` for each alias from user code; return the links by tensor."""
    aliases: dict[str, tuple[str, ...]] = {}
    for row in tensors:
        names = tuple(name for name in dict.fromkeys(user_given_names(row.aliases)) if name not in rows)
        if names:
            aliases[row.path] = names
            for name in names:
                rows[name] = AliasRow(name, (), ValueLeaf(None), row.path)
    return aliases


def _list_two(
    left: CheckpointSummary, right: CheckpointSummary, pairs: CheckpointAlignment
) -> BrowserListing:
    first = _side_rows(pairs.left, pairs.places[0], left)
    second = _side_rows(pairs.right, pairs.places[1], right)
    rows = {**first, **{name: row for name, row in second.items() if name not in first}}
    containers = {} if pairs.by == "agent" else left.checkpoint.tree.containers
    modules = group_by_module(rows.items(), containers)
    return BrowserListing((left, right), modules[0], rows, {}, _group_slots(rows), pairs, second)


def _side_rows(
    entries: Mapping[str, Entry], paths: Mapping[str, Path], summary: CheckpointSummary
) -> dict[str, Row]:
    stored = {row.keys: row for row in summary.tensors}
    names = {summary.checkpoint.tree.names.get(path, name): name for name, path in paths.items()}
    rows: dict[str, Row] = {}
    for name, entry in entries.items():
        path = paths[name]
        own = stored.get(path)
        if isinstance(entry, Leaf):
            of = names.get(own.of) if own is not None and own.of is not None else None
            rows[name] = TensorRow(name, path, entry, of, own.aliases if own is not None else ())
        else:
            rows[name] = ValueRow(name, path, entry)
    return rows


def _group_slots(rows: Mapping[str, Row]) -> dict[str, tuple[str, ...]]:
    slots_by_parameter: dict[str, list[str]] = {}
    for row in rows.values():
        if isinstance(row, TensorRow) and row.of is not None:
            slots_by_parameter.setdefault(row.of, []).append(row.path)
    return {name: tuple(slots) for name, slots in slots_by_parameter.items()}
