"""Decides how a checkpoint becomes another, and says of everything in it what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool import dtypes
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import some
from ckpttool.layouts import objects, variable_names, variables
from ckpttool.layouts.canonical import Binding
from ckpttool.leaf import Leaf, Path, ValueLeaf, display, key
from ckpttool.mapping import inert
from ckpttool.mapping.plan import Plan, Settings, after, build
from ckpttool.mapping.report import Mapped, Move, Report
from ckpttool.mapping.rules import KEEP
from ckpttool.ops import agent_way, averages, general_way, optimizer_facts
from ckpttool.ops import part as parts
from ckpttool.ops.optimizer_options import Stated
from ckpttool.ops.plain_names import Prepared, prepared
from ckpttool.ops.request import Request
from ckpttool.ops.way_back import way_back
from ckpttool.ops.ways import axes_note, way
from ckpttool.shown import count
from ckpttool.sidecar import Sidecar
from ckpttool.tree import Container, Tree

# The one format in which a tree as it is may have entries that no place is for (formats/keras_h5/place.py).
_ARRAYS_ALONE = "keras_h5"
_GROUPS = key("param_groups")


@dataclass(frozen=True, slots=True)
class Route:
    """A source tree's way to a target tree, and what the report says of it.

    `source` is the part that is converted, as it was prepared; `names` are its leaves' in the checkpoint and
    `stripped` what was removed from them; `settings` are what the target's sidecar tells of its optimizers,
    None if it is what the source's tells; `objects` what it tells of the objects that names hide. `moves`
    say where what went, and `whole` whether all of a checkpoint did, under the names that it had there.
    `before` is the digest of what a conversion was undone to, `kept` are the names of values that only the
    sidecar has.
    """

    source: Tree
    tree: Tree
    report: Report
    binding: Binding | None
    settings: Settings | None
    objects: Mapping[str, Any] | None = None
    names: Mapping[Path, str] = field(default_factory=dict)
    stripped: Sequence[Mapping[str, Any]] | None = None
    moves: tuple[Move, ...] = ()
    whole: bool = False
    said: Mapping[str, str] = field(default_factory=dict)
    before: str | None = None
    kept: tuple[str, ...] = ()

    def kept_tensors(self) -> Tree:
        """Return the tensors among what only the sidecar keeps, by name, for the file beside the target."""
        names = {name: path for path, name in self.names.items()}
        leaves: dict[Path, Leaf | ValueLeaf] = {}
        for name in self.kept:
            leaf = self.source.get(names[name])
            if isinstance(leaf, Leaf) and dtypes.BY_NAME[leaf.dtype].torch is not None:
                leaves[key(name),] = Leaf(leaf.dtype, leaf.shape, leaf.source, name)
        return Tree(leaves, {}, {(): Container("dict")})


def route(
    checkpoint: Checkpoint, request: Request, known: Sidecar | None, recognised: Binding | None = None
) -> Route:
    """Return how the checkpoint becomes what is wanted; `known` is the sidecar that belongs to it.

    `recognised` is the agent in it, where somebody knows it already.

    Raise UsageError for a part that is not there, a layout that does not fit or cannot be written and names
    that cannot be restored, MappingError when nothing can be mapped.
    """
    part, kind = request.part, request.kind
    tree, lost = (checkpoint.tree, ()) if part is None else parts.below(checkpoint.tree, part)
    chosen: tuple[str, ...] = ()
    if request.weights is not None:
        tree, chosen = averages.chosen(tree, request.weights)
    if request.no_optimizers:
        tree, without = general_way.without_optimizers(tree)
        chosen = (*chosen, *without)
    ready = prepared(checkpoint.tree, tree, part, request.wanted, known)
    ready = ready._replace(lost=(*lost, *ready.lost), notes=(*ready.notes, *chosen))
    tree = ready.tree
    binding, read = agent_way.recognised(checkpoint, tree, request.layout, part, recognised)
    back = way_back(checkpoint, request, known, tree)
    if back.note is not None:
        ready = ready._replace(notes=(*ready.notes, back.note))
    if back.tree is not None and known is not None:
        told, notes = _told_still(checkpoint, tree, request, binding, known)
        report = Report(mapped(ready, back.tree, back.moves), notes=(*ready.notes, *notes))
        before = (known.source or {}).get("sha256")
        return Route(
            tree,
            back.tree,
            report,
            binding,
            told,
            None,
            ready.names,
            None,
            back.moves,
            True,
            _said(known),
            before,
        )
    known = request.stated.into(known, binding, tree)
    ready = ready._replace(notes=(*ready.notes, *request.stated.notes(known)))
    plan, agent, general = way(checkpoint, tree, request, binding, known)
    if general:
        binding = None
    if plan is not None and agent is not None:
        plan = replace(plan, notes=(*plan.notes, *read))
    remembered = None
    kept: tuple[Path, ...] = ()
    if request.by_name and not variables.by_name(middle := tree if plan is None else build(tree, plan)):
        told = optimizer_facts.settings(known)
        to_names = variable_names.to_names(middle, told if plan is None else {**told, **plan.told})
        remembered = objects.remembered(middle, to_names)
        plan = to_names if plan is None else after(plan, to_names)
    if plan is None and kind.format == "pytorch" and (plan := inert.to_state_dicts(tree)) is not None:
        moved = {move.source for move in plan.moves}
        values = tuple(path for path, _ in tree.plain() if path not in moved)
        plan = replace(plan, kept=values if any(isinstance(tree[path], Leaf) for path in moved) else ())
    settings = _given(request.stated, known)
    if plan is None:
        target = _arrays(tree) if kind.format == _ARRAYS_ALONE else tree
        moves = tuple(Move(path, path, KEEP) for path in target)
        lost = tuple(ready.names[path] for path in tree if path not in target)
        axes = axes_note(checkpoint, tree, request) if kind.format != checkpoint.format else None
        ready = ready._replace(notes=(*ready.notes, *filter(None, (axes,))))
        report = Report(mapped(ready, target, moves), (*lost, *ready.lost), notes=ready.notes)
    else:
        moves, target = plan.moves, build(tree, plan)
        kept = _kept(tree, plan, agent)
        report = _report(ready, target, plan, agent, kept)
        settings = plan.told if agent is not None or plan.told else settings
    return Route(
        tree,
        target,
        report,
        (agent or binding) if request.rules is None else None,
        settings,
        remembered,
        ready.names,
        ready.stripped,
        moves,
        request.whole and (plan is not None or kind.format != checkpoint.format),
        _said(known),
        kept=tuple(ready.names[path] for path in kept),
    )


def _arrays(tree: Tree) -> Tree:
    """Return the tree without what is no array: plain values, and strings."""
    leaves = {path: leaf for path, leaf in tree.tensors() if leaf.dtype != "string"}
    aliases = {path: others for path, others in tree.aliases.items() if path in leaves}
    return Tree(leaves, aliases, tree.containers)


def _told_still(
    checkpoint: Checkpoint, tree: Tree, request: Request, binding: Binding | None, known: Sidecar
) -> tuple[Settings | None, tuple[str, ...]]:
    """Return what was once stated of the optimizers, for which the undone source has no place, with notes."""
    if not _said(known) or binding is None:
        return None, ()
    plan, _, _ = way(checkpoint, tree, request, binding, known)
    return (None, ()) if plan is None else (plan.told, plan.notes)


def _report(ready: Prepared, target: Tree, plan: Plan, agent: Binding | None, kept: Sequence[Path]) -> Report:
    used = _used(plan, agent) - set(plan.partly) | set(kept)
    unused = (*(ready.names[path] for path in ready.tree if path not in used), *ready.lost)
    notes = (*ready.notes, *plan.notes)
    if kept:
        names = [ready.names[path] for path in kept]
        notes = (*notes, f"kept in the sidecar: {count(len(names), 'value')} ({some(names, 3)})")
    return Report(mapped(ready, target, plan.moves), unused, plan.missing, plan.assumed, notes)


def _used(plan: Plan, agent: Binding | None) -> set[Path]:
    used = {move.source for move in plan.moves} | set(plan.consumed)
    return used if agent is None else used | agent.consumed


def _kept(tree: Tree, plan: Plan, agent: Binding | None) -> tuple[Path, ...]:
    """Return what the sidecar keeps: values that belong to no network and to no optimizer."""
    if agent is None:
        return plan.kept
    used = _used(plan, agent)
    values = (path for path, _ in tree.plain() if path not in used and _GROUPS not in path)
    return (*plan.kept, *values)


def _given(stated: Stated, known: Sidecar | None) -> Settings | None:
    """Return the settings with those that were stated, None if none was."""
    return known.optimizers if any(stated) and known is not None else None


def _said(known: Sidecar | None) -> Mapping[str, str]:
    """Return where the statements about optimizers are from, for the receipt."""
    told = known.provenance if known is not None else {}
    return {name: told[name] for name in ("l2", "optimizer") if name in told}


def mapped(ready: Prepared, target: Tree, moves: tuple[Move, ...]) -> tuple[Mapped, ...]:
    """Return the report's line for each move."""
    lines = []
    for move in moves:
        before, there = ready.tree[move.source], target.get(move.target)
        shape_in = before.shape if isinstance(before, Leaf) else ()
        shape_out = there.shape if isinstance(there, Leaf) else ()
        names = [ready.rules.get(move.source), move.rule.name if move.rule != KEEP else None]
        done = ", ".join(name for name in names if name) or KEEP.name
        rule = done if there is not None else f"{done}, shared"
        lines.append(Mapped(ready.names[move.source], display(move.target), rule, shape_in, shape_out))
    return tuple(lines)
