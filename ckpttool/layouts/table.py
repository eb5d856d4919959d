"""A layout as a table, and the one way in which every table binds a tree to the canonical agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckpttool.layouts import canonical
from ckpttool.layouts.canonical import Binding, Facts, Part
from ckpttool.layouts.modules import (
    Entry,
    Module,
    by_definition,
    connected,
    entries,
    heads,
    modules,
    part,
    root_of,
)
from ckpttool.leaf import Leaf, Path, attr
from ckpttool.mapping.report import Move, Moves
from ckpttool.mapping.rules import KEEP, Rule, ToTensor
from ckpttool.tree import Tree


@dataclass(frozen=True, slots=True)
class Table:
    """One codebase's naming of its agents.

    `components`, `optimizers` and `counters` map its names to the canonical ones; `rooted` says that the
    agent may be an attribute of what was saved; `optimizer` binds an optimizer's state; `seen` names the
    real files on which the layout was tried.
    """

    name: str
    title: str
    framework: str
    components: Mapping[str, str]
    optimizers: Mapping[str, str]
    counters: Mapping[str, str]
    facts: Facts
    optimizer: Callable[[Optimizer], OptimizerMoves]
    rooted: bool = False
    seen: str = ""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer's binder may look at.

    `name` is canonical; `prefix` the segments before its state; `weights` its network's tensors in the
    order of the file, each with its canonical path and its rule.
    """

    name: str
    prefix: tuple[str, ...]
    tree: Tree
    weights: tuple[tuple[Path, Path, Rule], ...]


@dataclass(frozen=True, slots=True)
class OptimizerMoves:
    """An optimizer's moves, the leaves that only repeat others, and each slot's parameter."""

    moves: tuple[Move, ...]
    consumed: frozenset[Path] = frozenset()
    of: Mapping[Path, Path] | None = None
    note: str = ""


def bind(tree: Tree, table: Table) -> Binding | None:
    """Return the tree's way to the canonical agent, or None when it is not of this layout."""
    found = tuple(entries(tree))
    root = root_of([entry.segments for entry in found], table.components, rooted=table.rooted)
    if root is None:
        return None
    parts, moves, assumed = _networks(found, root, table)
    if not parts:
        return None
    # In the order of the file: optimizers count their parameters in it.
    order = {path: number for number, path in enumerate(tree)}
    moves = tuple(sorted(moves, key=lambda move: order[move.source]))
    weights: dict[Path, Move] = {}
    for move in moves:
        weights.setdefault(move.source, move)
    state = [_optimizer(tree, root, table, name, weights) for name in table.optimizers]
    moves += tuple(move for found_state in state for move in found_state.moves)
    moves += _counters(tree, root, table)
    notes = tuple(found_state.note for found_state in state if found_state.note)
    networks = ", ".join(dict.fromkeys(part.component for part in parts))
    return Binding(
        layout=table.name,
        moves=Moves(moves, assumed, notes),
        parts=parts,
        facts=table.facts,
        unplaced=_unplaced(found, root, table, moves),
        consumed=frozenset().union(*(found_state.consumed for found_state in state)),
        evidence=f"{'/'.join(root)}/ has {networks}" if root else networks,
        of={slot: owner for found_state in state for slot, owner in (found_state.of or {}).items()},
    )


def _networks(
    found: Sequence[Entry], root: tuple[str, ...], table: Table
) -> tuple[tuple[Part, ...], tuple[Move, ...], tuple[str, ...]]:
    parts: list[Part] = []
    moves: list[Move] = []
    assumed: list[str] = []
    cut = len(root) + 1
    chains: dict[str, tuple[Module, ...]] = {}
    for theirs, ours in table.components.items():
        prefix = (*root, theirs)
        mine = [entry for entry in found if entry.segments[:cut] == prefix]
        chains.setdefault(ours, modules(mine, cut, table.framework))
    actions = _last_width(chains.get("actor") or chains.get("actor_target") or ())
    for component, layers in chains.items():
        split = (layers,) if component.startswith("actor") else heads(layers)
        if not layers or not all(connected(chain, actions) for chain in split):
            continue
        for number, chain in enumerate(split, start=1):
            named = part(component, None if component.startswith("actor") else f"q{number}", chain)
            parts.append(named)
            moves.extend(_weights(named, chain))
            if by_definition(chain):
                order = ", ".join("/".join(layer.name) for layer in named.layers)
                assumed.append(f"the layers of {named.title} are used in the order of the file: {order}")
    return tuple(parts), tuple(moves), tuple(assumed)


def _unplaced(
    found: Sequence[Entry], root: tuple[str, ...], table: Table, moves: Sequence[Move]
) -> dict[str, tuple[str, ...]]:
    taken = {move.source for move in moves}
    left: dict[str, list[str]] = {}
    for entry in found:
        if entry.leaf.role in ("parameter", "buffer") and entry.path not in taken:
            ours = (
                table.components.get(entry.segments[len(root)]) if len(entry.segments) > len(root) else None
            )
            if ours is not None and entry.segments[: len(root)] == root:
                left.setdefault(ours, []).append("/".join(entry.segments))
    return {component: tuple(names) for component, names in left.items()}


def _last_width(chain: Sequence[Module]) -> int | None:
    widths = [module.width_out for module in chain if module.width_out is not None]
    return widths[-1] if widths else None


def _weights(named: Part, chain: Sequence[Module]) -> list[Move]:
    return [
        Move(module.tensors[w.name].path, canonical.weight(named, position, w.canonical), w.to_canonical)
        for position, module in enumerate(chain)
        for w in module.kind.weights
        if w.name in module.tensors
    ]


def _optimizer(
    tree: Tree, root: tuple[str, ...], table: Table, theirs: str, weights: Mapping[Path, Move]
) -> OptimizerMoves:
    ours = table.optimizers[theirs]
    network = canonical.OPTIMIZED[ours]
    mine = tuple(
        (path, weights[path].target, weights[path].rule)
        for path, _ in tree.tensors()
        if path in weights and weights[path].target[0].value == network
    )
    return table.optimizer(Optimizer(ours, (*root, theirs), tree, mine))


def _counters(tree: Tree, root: tuple[str, ...], table: Table) -> tuple[Move, ...]:
    """Return the moves of the agent's own counters: those that the table names, and any other by its name."""
    found = []
    for path, leaf in tree.items():
        *owner, name = tree.names[path].split("/")
        if tuple(owner) in ((), root) and (name in table.counters or leaf.role == "counter"):
            rule = KEEP if isinstance(leaf, Leaf) else ToTensor("int64")
            found.append(Move(path, (attr(table.counters.get(name, name)),), rule))
    return tuple(found)
