"""The graph that `inspect --graph` draws: modules as nodes; who holds, shares and optimizes them as edges."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ckpttool.commands.inspect import CheckpointSummary, ModuleSummary, TensorRow, user_given_names
from ckpttool.core.text import format_count

# As many boxes as people can still find their way in; and as many as are drawn when a depth is asked for.
COMFORTABLE, MOST = 150, 5_000
# With fewer boxes than this a level that has too many is begun, not folded.
FEW = 12
MOST_ROWS = 12
# Two names of one module have this many last steps in common at most.
_LONGEST_TAIL = 16


class ModuleVariable(NamedTuple):
    """One variable in its module's box."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModuleNode:
    """A module's box.

    `variables` are those that stand at the module itself, `left_out` how many more there are. `slots` counts
    the slot variables of an optimizer, which are not listed; `folded` the tensors of modules below that have
    no box of their own.
    """

    module: ModuleSummary
    name: str
    level: int
    variables: tuple[ModuleVariable, ...]
    left_out: int = 0
    slots: int = 0
    folded: int = 0


class ModuleEdge(NamedTuple):
    """From one node to another, by their positions.

    A "child" is held by the source. An "alias" is held by it as well, under the name `label`, and is drawn at
    another place. A "slot" is optimized by the source, which keeps `label` of it.
    """

    source: int
    target: int
    kind: Literal["child", "alias", "slot"]
    label: str = ""


@dataclass(frozen=True, slots=True)
class ModuleGraph:
    """A drawing before it is laid out; a node comes before those that it holds."""

    title: str
    nodes: tuple[ModuleNode, ...]
    edges: tuple[ModuleEdge, ...]
    notes: tuple[str, ...]


@dataclass(slots=True)
class _ModuleSums:
    """What counts below a module, slot variables that stand beside their own variable left out."""

    tensors: int = 0
    parameters: int = 0
    slots: int = 0


@dataclass(slots=True)
class _ModuleGraphBuilder:
    """A graph while it is made.

    `names` are other names of modules and `holders` what holds something by such a name; `of` gives the node
    that stands for a module, by the module's path.
    """

    sums: dict[str, _ModuleSums]
    names: list[tuple[str, str]]
    holders: frozenset[str]
    nodes: list[ModuleNode] = field(default_factory=list)
    edges: list[ModuleEdge] = field(default_factory=list)
    of: dict[str, int] = field(default_factory=dict)
    optimizers: list[int] = field(default_factory=list)

    def node(self, path: str) -> int:
        """Return the node in whose box the path would be."""
        while path not in self.of:
            path = path.rpartition("/")[0]
        return self.of[path]


def build_module_graph(found: CheckpointSummary, depth: int | None = None) -> ModuleGraph:
    """Return the graph of a listing; modules at level `depth` have all that is below folded into them.

    Without `depth` it is the largest one that gives a comfortable number of boxes.
    """
    sums = _sum_modules(found)
    names = _other_names(sums, found)
    making = _ModuleGraphBuilder(sums, names, frozenset(name.rpartition("/")[0] for _, name in names))
    notes = _add_nodes(making, found, depth)
    making.edges += _slot_edges(making, found)
    making.edges += _alias_edges(making)
    title = os.path.basename(os.path.normpath(found.checkpoint.path))
    return ModuleGraph(title, tuple(making.nodes), tuple(making.edges), tuple(notes))


def _is_slot_of_variable(row: TensorRow) -> bool:
    """Return whether a slot variable stands beside its variable, or is named after it (TensorFlow 1)."""
    if row.leaf.role != "slot" or row.of is None:
        return False
    return row.path.startswith(f"{row.of}/") or row.path.rpartition("/")[0] == row.of.rpartition("/")[0]


def _sum_modules(found: CheckpointSummary) -> dict[str, _ModuleSums]:
    sums = {module.path: _ModuleSums() for module in found.modules}
    for row in found.tensors:
        if not _is_slot_of_variable(row):
            here = sums[row.path.rpartition("/")[0]]
            here.tensors += 1
            here.parameters += row.leaf.role == "parameter"
            here.slots += row.leaf.role == "slot"
    for module in reversed(found.modules):
        if module.parent is not None:
            above, here = sums[module.parent.path], sums[module.path]
            above.tensors += here.tensors
            above.parameters += here.parameters
            above.slots += here.slots
    return sums


def _add_nodes(making: _ModuleGraphBuilder, found: CheckpointSummary, depth: int | None) -> list[str]:
    """Make the nodes level by level; return what a person should know about those that are missing."""
    root = found.modules[0]
    limit = COMFORTABLE if depth is None else MOST
    level, row, missing = 0, [(root, root.name, -1)], 0
    folded_at = None
    while row:
        below = [
            (*_skip_single_children(child, making), position)
            for position, (module, _, _) in enumerate(row, start=len(making.nodes))
            if not _is_optimizer(module, making)
            for child in module.below.values()
            if making.sums[child.path].tensors
        ]
        boxes = len(making.nodes) + len(row)
        many = boxes >= FEW and boxes + len(below) > limit
        stop = bool(below) and (many if depth is None else level >= depth)
        for module, name, parent in row:
            _add(making, module, name, level, parent, folded=stop)
        if stop:
            folded_at = level
            break
        room = max(0, limit - len(making.nodes))
        if len(below) > room:
            missing, below = missing + len(below) - room, below[:room]
        level, row = level + 1, below
    notes, more = [], "" if depth is not None else "; --depth draws more"
    if folded_at is not None:
        folded = sum(node.folded for node in making.nodes)
        without = format_count(folded, "tensor has", "tensors have")
        notes.append(f"modules below level {folded_at} are folded: {without} no box{more}")
    if missing:
        notes.append(f"{format_count(missing, 'more module has', 'more modules have')} no box{more}")
    return notes


def _skip_single_children(module: ModuleSummary, making: _ModuleGraphBuilder) -> tuple[ModuleSummary, str]:
    """Return the module and its name, steps that hold nothing but one module left out."""
    name = module.name
    while module.step and module.path not in making.holders and not _is_optimizer(module, making):
        (module,) = module.below.values()
        name = f"{name}/{module.name}"
    return module, name


def _is_optimizer(module: ModuleSummary, making: _ModuleGraphBuilder) -> bool:
    sums = making.sums[module.path]
    return bool(module.path and sums.slots and not sums.parameters)


def _add(
    making: _ModuleGraphBuilder, module: ModuleSummary, name: str, level: int, parent: int, *, folded: bool
) -> None:
    position = len(making.nodes)
    optimizer = _is_optimizer(module, making)
    sums = making.sums[module.path]
    own = [(n, row) for n, row in module.rows if isinstance(row, TensorRow) and not _is_slot_of_variable(row)]
    listed = [(n, row) for n, row in own if not (optimizer and row.leaf.role == "slot")]
    shown = tuple(ModuleVariable(n, row.leaf.dtype, row.leaf.shape) for n, row in listed[:MOST_ROWS])
    below = sums.tensors - len(own)
    node = ModuleNode(
        module,
        name,
        level,
        shown,
        len(listed) - len(shown),
        sums.slots if optimizer else 0,
        below if folded and not optimizer else 0,
    )
    making.nodes.append(node)
    making.of[module.path] = position
    if optimizer:
        making.optimizers.append(position)
    if parent >= 0:
        making.edges.append(ModuleEdge(parent, position, "child"))


def _ancestor_modules(path: str) -> Iterator[str]:
    """Yield the modules that hold the path, from the nearest, without the root."""
    path = path.rpartition("/")[0]
    while path:
        yield path
        path = path.rpartition("/")[0]


def _slot_edges(making: _ModuleGraphBuilder, found: CheckpointSummary) -> Iterator[ModuleEdge]:
    """Yield an edge from each optimizer to the largest modules of which it optimizes every parameter."""
    kept: dict[int, dict[str, set[str]]] = {position: {} for position in making.optimizers}
    for row in found.tensors:
        if row.leaf.role == "slot" and row.of is not None and not _is_slot_of_variable(row):
            owner = making.node(row.path.rpartition("/")[0])
            if owner in kept:
                kept[owner].setdefault(row.of, set()).add(row.leaf.slot or "slot")
    for optimizer, slots in kept.items():
        covered = Counter(at for path in slots for at in _ancestor_modules(path))
        targets: dict[int, set[str]] = {}
        for path, kinds in slots.items():
            place = path.rpartition("/")[0]
            for at in _ancestor_modules(path):
                if at not in making.sums or covered[at] < making.sums[at].parameters:
                    break
                place = at
            targets.setdefault(making.node(place), set()).update(kinds)
        for target, kinds in targets.items():
            if target != optimizer:
                yield ModuleEdge(optimizer, target, "slot", _join_names(sorted(kinds)))


def _other_names(sums: Mapping[str, _ModuleSums], found: CheckpointSummary) -> list[tuple[str, str]]:
    """Return every module or variable that has another name, by the module to point at, and that name."""
    public = [(row.path, alias) for row in found.tensors for alias in user_given_names(row.aliases)]
    shared = Counter(pair for path, alias in public for pair in _shared_tails(path, alias))
    names: dict[tuple[str, str], None] = {}
    for path, alias in public:
        module, name = path.rpartition("/")[0], alias
        for at, other in _shared_tails(path, alias):
            if shared[at, other] < sums[at].tensors:
                break
            module, name = at, other
        names[module, name] = None
    return list(names)


def _alias_edges(making: _ModuleGraphBuilder) -> Iterator[ModuleEdge]:
    """Yield an edge for every other name, from what holds the module or variable by that name."""
    labels: dict[tuple[int, int], list[str]] = {}
    for module, name in making.names:
        target, source = making.node(module), making.node(name.rpartition("/")[0])
        if source != target:
            held = making.nodes[source].module.path
            labels.setdefault((source, target), []).append(name[len(held) :].lstrip("/") if held else name)
    for (source, target), names in labels.items():
        yield ModuleEdge(source, target, "alias", _join_names(names))


def _shared_tails(path: str, alias: str) -> Iterator[tuple[str, str]]:
    """Yield the modules of which both paths are the same part, the nearest first.

    `a/l1/w` and `b/l1/w` give `a/l1` with `b/l1`, then `a` with `b`.
    """
    for _ in range(_LONGEST_TAIL):
        path, _, one = path.rpartition("/")
        alias, _, other = alias.rpartition("/")
        if one != other or not path or not alias or path == alias:
            return
        if f"{path}/".startswith(f"{alias}/") or f"{alias}/".startswith(f"{path}/"):
            return
        yield path, alias


def _join_names(names: Iterable[str], most: int = 3) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f" +{len(listed) - most}" if len(listed) > most else "")
