"""Build the `inspect --graph` drawing: modules as nodes; containment, sharing and optimizers as edges."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.text import format_count
from ckpttool.listing.contents import CheckpointSummary
from ckpttool.listing.modules import ModuleSummary, user_given_names
from ckpttool.listing.rows import TensorRow

# Number of boxes in which people can still find their way, and the maximum if a depth is given.
COMFORTABLE, MOST = 150, 5_000
# Below this many boxes, an oversized level is drawn in part instead of folded.
FEW = 12
MOST_ROWS = 12
# Maximum number of trailing path steps that two names of one module share.
_LONGEST_TAIL = 16


class ModuleVariable(NamedTuple):
    """One variable in its module's box."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModuleNode:
    """The box of a module.

    `variables` are the module's own, `left_out` is the number of further ones. `slots` counts the slot
    variables of an optimizer, which are not listed; `folded` counts the tensors of submodules without a
    separate box.
    """

    module: ModuleSummary
    name: str
    level: int
    variables: tuple[ModuleVariable, ...]
    left_out: int = 0
    slots: int = 0
    folded: int = 0


class ModuleEdge(NamedTuple):
    """An edge between two nodes, given by their positions.

    A "child" is contained in the source. An "alias" is also contained in it, under the name `label`,
    but drawn elsewhere. A "slot" target is optimized by the source, whose slots for it are listed in
    `label`.
    """

    source: int
    target: int
    kind: Literal["child", "alias", "slot"]
    label: str = ""


@dataclass(frozen=True, slots=True)
class ModuleGraph:
    """A drawing before layout; each node comes before the nodes that it contains."""

    title: str
    nodes: tuple[ModuleNode, ...]
    edges: tuple[ModuleEdge, ...]
    notes: tuple[str, ...]


@dataclass(slots=True)
class _ModuleSums:
    """Counts under a module, without slot variables that are stored beside their own variable."""

    tensors: int = 0
    parameters: int = 0
    slots: int = 0


@dataclass(slots=True)
class _ModuleGraphBuilder:
    """A graph under construction.

    `names` are other names of modules, `holders` the modules that contain something under such a name;
    `of` maps a module's path to the node that represents it.
    """

    sums: dict[str, _ModuleSums]
    names: list[tuple[str, str]]
    holders: frozenset[str]
    nodes: list[ModuleNode] = field(default_factory=list)
    edges: list[ModuleEdge] = field(default_factory=list)
    of: dict[str, int] = field(default_factory=dict)
    optimizers: list[int] = field(default_factory=list)

    def node(self, path: str) -> int:
        """Return the node whose box would contain the path."""
        while path not in self.of:
            path = path.rpartition("/")[0]
        return self.of[path]


def build_module_graph(summary: CheckpointSummary, depth: int | None = None) -> ModuleGraph:
    """Return the graph of a listing; everything under level `depth` is folded into the modules there.

    Without `depth`, the largest depth with a comfortable number of boxes is used.
    """
    sums = _sum_modules(summary)
    names = _other_names(sums, summary)
    making = _ModuleGraphBuilder(sums, names, frozenset(name.rpartition("/")[0] for _, name in names))
    notes = _add_nodes(making, summary, depth)
    making.edges += _slot_edges(making, summary)
    making.edges += _alias_edges(making)
    title = os.path.basename(os.path.normpath(summary.checkpoint.path))
    return ModuleGraph(title, tuple(making.nodes), tuple(making.edges), tuple(notes))


def _is_slot_of_variable(row: TensorRow) -> bool:
    """Return whether a slot variable is stored beside its variable or named after it (TensorFlow 1)."""
    if row.leaf.role != "slot" or row.of is None:
        return False
    return row.path.startswith(f"{row.of}/") or row.path.rpartition("/")[0] == row.of.rpartition("/")[0]


def _sum_modules(summary: CheckpointSummary) -> dict[str, _ModuleSums]:
    sums = {module.path: _ModuleSums() for module in summary.modules}
    for row in summary.tensors:
        if not _is_slot_of_variable(row):
            here = sums[row.path.rpartition("/")[0]]
            here.tensors += 1
            here.parameters += row.leaf.role == "parameter"
            here.slots += row.leaf.role == "slot"
    for module in reversed(summary.modules):
        if module.parent is not None:
            above, here = sums[module.parent.path], sums[module.path]
            above.tensors += here.tensors
            above.parameters += here.parameters
            above.slots += here.slots
    return sums


def _add_nodes(making: _ModuleGraphBuilder, summary: CheckpointSummary, depth: int | None) -> list[str]:
    """Add the nodes level by level; return notes on the missing ones."""
    root = summary.modules[0]
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
    notes, more = [], "" if depth is not None else "; use --depth to draw more"
    if folded_at is not None:
        folded = sum(node.folded for node in making.nodes)
        without = format_count(folded, "tensor has", "tensors have")
        notes.append(f"modules under level {folded_at} are folded: {without} no box{more}")
    if missing:
        notes.append(f"{format_count(missing, 'more module has', 'more modules have')} no box{more}")
    return notes


def _skip_single_children(module: ModuleSummary, making: _ModuleGraphBuilder) -> tuple[ModuleSummary, str]:
    """Return the module and its name, skipping steps that contain only one module."""
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
    tensors = [
        (n, row) for n, row in module.rows if isinstance(row, TensorRow) and not _is_slot_of_variable(row)
    ]
    listed = [(n, row) for n, row in tensors if not (optimizer and row.leaf.role == "slot")]
    shown = tuple(ModuleVariable(n, row.leaf.dtype, row.leaf.shape) for n, row in listed[:MOST_ROWS])
    below = sums.tensors - len(tensors)
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
    """Yield the modules above the path, nearest first, without the root."""
    path = path.rpartition("/")[0]
    while path:
        yield path
        path = path.rpartition("/")[0]


def _slot_edges(making: _ModuleGraphBuilder, summary: CheckpointSummary) -> Iterator[ModuleEdge]:
    """Yield an edge from each optimizer to the largest modules whose parameters it optimizes completely."""
    kept: dict[int, dict[str, set[str]]] = {position: {} for position in making.optimizers}
    for row in summary.tensors:
        if row.leaf.role == "slot" and row.of is not None and not _is_slot_of_variable(row):
            owner = making.node(row.path.rpartition("/")[0])
            if owner in kept:
                kept[owner].setdefault(row.of, set()).add(row.leaf.slot or "slot")
    for optimizer, slots in kept.items():
        covered = Counter(at for path in slots for at in _ancestor_modules(path))
        targets: dict[int, set[str]] = {}
        for path, kinds in slots.items():
            parent = path.rpartition("/")[0]
            for at in _ancestor_modules(path):
                if at not in making.sums or covered[at] < making.sums[at].parameters:
                    break
                parent = at
            targets.setdefault(making.node(parent), set()).update(kinds)
        for target, kinds in targets.items():
            if target != optimizer:
                yield ModuleEdge(optimizer, target, "slot", _join_names(sorted(kinds)))


def _other_names(sums: Mapping[str, _ModuleSums], summary: CheckpointSummary) -> list[tuple[str, str]]:
    """Return pairs of a module to point at and another name for it or its variable."""
    public = [(row.path, alias) for row in summary.tensors for alias in user_given_names(row.aliases)]
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
    """Yield an edge for every other name, from the module that contains the target under that name."""
    labels: dict[tuple[int, int], list[str]] = {}
    for module, name in making.names:
        target, source = making.node(module), making.node(name.rpartition("/")[0])
        if source != target:
            path = making.nodes[source].module.path
            labels.setdefault((source, target), []).append(name[len(path) :].lstrip("/") if path else name)
    for (source, target), names in labels.items():
        yield ModuleEdge(source, target, "alias", _join_names(names))


def _shared_tails(path: str, alias: str) -> Iterator[tuple[str, str]]:
    """Yield the pairs of modules that are the same part of both paths, nearest first.

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
