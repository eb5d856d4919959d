"""A plan: where every leaf of a tree goes in another one, what is added, and the new tree made of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckpttool.errors import MappingError
from ckpttool.leaf import Leaf, Path, Role, ValueLeaf, attr, display, index
from ckpttool.mapping.parts import is_cut, is_part, merged, unfinished
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP, chain
from ckpttool.tree import Alias, Container, Tree

Settings = Mapping[str, Mapping[str, float | bool | str | None]]


class Label(NamedTuple):
    """What a leaf is called and what it is for in the new tree; the fields are those of Leaf.

    Without a `key` the leaf is known by its name.
    """

    role: Role
    name: str | None = None
    of: Path | None = None
    slot: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The way from one tree to another: moves in the target's order, and what the target needs besides.

    `added` are leaves that no source leaf gives (an index list, a default); those that matter for
    training are named in `assumed`. `missing` are targets that nothing fills; `consumed` are source
    leaves that the target says without an entry of its own, or that nothing depends on there. `aliases` are
    further paths of a target, `labels` its role and owner where they differ from the source's. `told` are
    settings by optimizer that the target cannot hold and its sidecar tells, `partly` source leaves of which
    a part has no place in it. `kept` are source leaves that are neither a network's nor an optimizer's and
    that the target has no place for: the sidecar, and the file beside it, keep them.
    """

    moves: tuple[Move, ...]
    added: Mapping[Path, Leaf | ValueLeaf] = field(default_factory=dict)
    containers: Mapping[Path, Container] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    consumed: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    aliases: Mapping[Path, tuple[Path, ...]] = field(default_factory=dict)
    labels: Mapping[Path, Label] = field(default_factory=dict)
    told: Settings = field(default_factory=dict)
    partly: tuple[Path, ...] = ()
    kept: tuple[Path, ...] = ()


def build(tree: Tree, plan: Plan) -> Tree:
    """Return the tree that the plan makes of `tree`; its leaves are unread.

    Raise MappingError when two leaves would have one path, of which one would be lost, unless they are parts
    of one tensor; and when parts are missing.
    """
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    aliases = {path: tuple(map(Alias, others)) for path, others in plan.aliases.items()}
    first: dict[tuple[Path, str], Path] = {}
    for move in plan.moves:
        changed = move.rule.leaf(tree[move.source])
        if unfinished(changed) is not None:
            label = plan.labels.get(move.target)
            leaves[move.target] = _joined(leaves.get(move.target), changed, label, move.target)
            continue
        before = first.setdefault((move.source, move.rule.name), move.target)
        # Parameters that share storage go on sharing it; a step that torch keeps per parameter does not, by
        # whatever role a format without optimizers listed it.
        weight = isinstance(changed, Leaf) and changed.role == "parameter" and changed.shape
        if before is not move.target and weight:
            more = aliases.pop(move.target, ())
            shared = Alias(move.target, display(move.target))
            aliases[before] = (*aliases.get(before, ()), shared, *more)
        elif move.target in leaves:
            raise MappingError("two entries have one place in the target", path=display(move.target))
        else:
            leaves[move.target] = _labelled(changed, plan.labels.get(move.target))
    for path, leaf in plan.added.items():
        if unfinished(leaf) is not None:
            leaves[path] = _joined(leaves.get(path), leaf, plan.labels.get(path), path)
            continue
        if path in leaves:
            raise MappingError("two entries have one place in the target", path=display(path))
        leaves[path] = _labelled(leaf, plan.labels.get(path))
    _require_finished(leaves)
    return Tree(leaves, aliases, plan.containers)


def _joined(
    before: Leaf | ValueLeaf | None, part: Leaf | ValueLeaf, label: Label | None, target: Path
) -> Leaf | ValueLeaf:
    if before is None:
        return _labelled(part, label)
    whole = merged(before, part)
    if whole is None:
        raise MappingError("the parts of a tensor do not fit together", path=display(target))
    return whole


def _require_finished(leaves: Mapping[Path, Leaf | ValueLeaf]) -> None:
    for path, leaf in leaves.items():
        source = unfinished(leaf)
        if source is not None and not source.finished:
            raise MappingError("a part of the tensor has no source", path=display(path))


def _labelled(leaf: Leaf | ValueLeaf, label: Label | None) -> Leaf | ValueLeaf:
    if not isinstance(leaf, Leaf):
        return leaf
    if label is None:
        # A state_dict holds plain tensors: what is a trained parameter is the module's knowledge.
        return replace(leaf, of=None, trainable=None)
    name = leaf.name if label.name is None else label.name
    key = label.key or name or leaf.key
    return replace(leaf, key=key, role=label.role, of=label.of, slot=label.slot, trainable=None, name=name)


def after(first: Plan, second: Plan) -> Plan:
    """Return one plan for two: `second` maps the tree that `first` makes."""
    ways: dict[Path, list[Move]] = {}
    for move in first.moves:
        ways.setdefault(move.target, []).append(move)
    moves = [
        Move(way.source, m.target, chain(way.rule, m.rule)) for m in second.moves for way in _ways(m, ways)
    ]
    added = {m.target: m.rule.leaf(first.added[m.source]) for m in second.moves if m.source in first.added}
    consumed = [move.source for path in second.consumed for move in ways.get(path, ())]
    used = {move.source for move in second.moves} | set(second.consumed)
    lost = [move.source for move in first.moves if is_cut(move.rule) and move.target not in used]
    return Plan(
        tuple(moves),
        added | dict(second.added),
        second.containers,
        (*first.assumed, *second.assumed),
        (*first.missing, *second.missing),
        (*first.consumed, *consumed),
        (*first.notes, *second.notes),
        second.aliases,
        second.labels,
        {**first.told, **second.told},
        (*first.partly, *dict.fromkeys(lost)),
        (*first.kept, *(move.source for path in second.kept for move in ways.get(path, ()))),
    )


def resourced(plan: Plan, sources: Mapping[Path, Path]) -> Plan:
    """Return the plan of a tree whose leaves lie at `sources` of where this plan's tree has them."""
    return replace(
        plan,
        moves=tuple(replace(move, source=sources[move.source]) for move in plan.moves),
        consumed=tuple(sources[path] for path in plan.consumed),
        partly=tuple(sources[path] for path in plan.partly),
        kept=tuple(sources[path] for path in plan.kept),
    )


def _ways(move: Move, ways: Mapping[Path, list[Move]]) -> list[Move]:
    """Return what a plan's moves bring to where another plan's move starts."""
    found = ways.get(move.source, [])
    # The parts of one tensor go on together; of several that say the same the first speaks.
    return found if any(is_part(way.rule) for way in found) and move.rule == KEEP else found[:1]


def edges(names: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], Path]:
    """Return each name's path in an object graph: attributes, and indices where all siblings are numbers.

    An object whose children are all called by decimal numbers is a list (see formats.object_graph).
    """
    names = list(names)
    below: dict[tuple[str, ...], bool] = {}
    for name in names:
        for depth, step in enumerate(name):
            below[name[:depth]] = below.get(name[:depth], True) and _is_index(step)
    return {
        name: tuple(index(int(s)) if below[name[:d]] else attr(s) for d, s in enumerate(name))
        for name in names
    }


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10 and str(int(name)) == name
