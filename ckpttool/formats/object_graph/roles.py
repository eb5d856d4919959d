"""What a variable is for: an optimizer's slot and whose it is, a counter, a statistic, a replay buffer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ckpttool.formats.object_graph import Graph, Node
from ckpttool.formats.object_graph.paths import is_optimizer
from ckpttool.leaf import Key, Path

# Keras keeps one list of slot variables for each kind, in the order of `_trainable_variables`
# (keras/src/optimizers/*.py).
_SLOT_LISTS = {
    "_momentums": "m",
    "_velocities": "v",
    "_velocity_hats": "vhat",
    "_m": "m",
    "_u": "u",
    "momentums": "momentum",
    "_accumulators": "accumulator",
    "_linears": "linear",
    "_accumulated_grads": "accumulated_grad",
    "_accumulated_delta_vars": "accumulated_delta",
    "_average_gradients": "mg",
    "_model_variables_moving_average": "average",
    "_accumulated_gradients": "gradient",
    "_r": "r",
    "_c": "c",
    "_v": "v",
    "adam_velocities": "v",
}
# RMSprop has the same lists as Adam and means other things by them.
_RMSPROP = {"_velocities": "rms", "_momentums": "momentum"}
# How Keras ends a slot's name: 3 writes `adam/dense_kernel_momentum`, 2.11 to 2.15 `Adam/m/dense/kernel`.
_ENDINGS = {"momentum": "m", "velocity": "v", "velocity_hat": "vhat", "m": "m", "v": "v", "vhat": "vhat"}
# Sonnet's optimizers are plain modules with lists of slots, one for each variable, and hold no variable of a
# network: their slots' names end in the list's scope and the variable's own name, `adam/m/linear/w`
# (dm-sonnet: sonnet/src/optimizers/adam.py, rmsprop.py, momentum.py). By edge: the scope and the kind.
_SONNET = (
    {"m": ("m", "m"), "v": ("v", "v")},
    {"mom": ("momentum", "momentum"), "ms": ("rms", "rms"), "mg": ("mg", "mg")},
    {"accumulated_momentum": ("accumulated_momentum", "momentum")},
)
# What an object holds that keeps running statistics: Keras's Normalization
# (keras/src/layers/preprocessing/normalization.py; Keras 2 calls them mean and variance), and the averages in
# Sonnet's BatchNorm (sonnet/src/moving_averages.py). The second set are those that are statistics themselves.
_STATISTICS = (
    (("adapt_mean", "adapt_variance", "count"), ("adapt_mean", "adapt_variance", "count")),
    (("mean", "variance", "count"), ("mean", "variance", "count")),
    (("_hidden", "average", "_counter"), ("_hidden", "average")),
)
_LONGEST_NAME = 4096  # of a slot whose owner is sought in it: every `_` of the name may end the owner's
_OPTIMIZER_LISTS = frozenset(("_variables", "_trainable_variables"))


class Slot(NamedTuple):
    """A slot variable: its kind, the object that it belongs to (None: not known), and its optimizer."""

    kind: str
    of: int | None
    optimizer: int
    listed: bool  # reached by an edge of its own, so that it has a path already


class Roles(NamedTuple):
    """What the optimizers of a graph say about its variables, by node number."""

    slots: dict[int, Slot]
    trained: frozenset[int]
    settings: frozenset[int]
    statistics: frozenset[int]


def from_optimizers(graph: Graph) -> Roles:
    """Find every optimizer's slots, the variables that it trains, and its own settings."""
    slots: dict[int, Slot] = {}
    trained: set[int] = set()
    settings: set[int] = set()
    walked: set[int] = set()  # a list that many optimizers hold is read once: the first of them has its slots
    known: dict[int, dict[str, int]] = {}
    for number, node in enumerate(graph):
        if not is_optimizer(node):
            continue
        own = node.children.get("_trainable_variables", number)
        if own not in known:
            known[own] = _members(graph, node, "_trainable_variables")
            trained.update(known[own].values())
        members = known[own]
        for slot in node.slots:
            slots.setdefault(slot.variable, Slot(slot.name, slot.of, number, listed=False))
        for variable, kind, of in _listed(graph, node, members, walked):
            slots.setdefault(variable, Slot(kind, of, number, listed=True))
        settings.update(_settings(graph, node))
    _by_name(graph, slots, trained, settings)
    _sonnet(graph, slots, trained)
    kept = {variable: slot for variable, slot in slots.items() if variable not in trained}
    statistics = frozenset(_statistics(graph))
    return Roles(kept, frozenset(trained), frozenset(settings - slots.keys()), statistics)


def _statistics(graph: Graph) -> Iterable[int]:
    for node in graph:
        for whole, running in _STATISTICS:
            if all(edge in node.children and graph[node.children[edge]].attributes for edge in whole):
                yield from (node.children[edge] for edge in running)


def _members(graph: Graph, node: Node, edge: str) -> dict[str, int]:
    child = node.children.get(edge)
    if child is None:
        return {}
    return {name: n for name, n in graph[child].children.items() if graph[n].attributes}


def _listed(
    graph: Graph, node: Node, trained: dict[str, int], walked: set[int]
) -> Iterable[tuple[int, str, int | None]]:
    rmsprop = "_average_gradients" in node.children or _is_rmsprop(graph, node)
    for edge, child in node.children.items():
        if edge in _OPTIMIZER_LISTS or child in walked:
            continue
        walked.add(child)
        members = _members(graph, node, edge)
        # A list that we do not know belongs to the variables one by one if it has one for each.
        if not (edge in _SLOT_LISTS or members.keys() <= trained.keys()):
            continue
        kind = (_RMSPROP.get(edge) if rmsprop else None) or _SLOT_LISTS.get(edge) or edge.strip("_")
        for name, variable in members.items():
            yield variable, kind, trained.get(name)


def _is_rmsprop(graph: Graph, node: Node) -> bool:
    """Say whether Keras 3 called the count of updates after the class, `rm_sprop_1/iteration`."""
    child = node.children.get("_iterations")
    attributes = graph[child].attributes if child is not None else ()
    return any(each.full_name.replace("_", "").lower().startswith("rmsprop") for each in attributes)


def _settings(graph: Graph, node: Node) -> Iterable[int]:
    for child in node.children.values():
        if graph[child].attributes:
            yield child


def _by_name(graph: Graph, slots: dict[int, Slot], trained: set[int], settings: set[int]) -> None:
    """Take from a slot's own name what no edge says; leave the owner open where a name is not unique."""
    owners: dict[str, int] | None = None
    ownerless: dict[int, list[int]] = {}
    walked: set[int] = set()
    for variable, slot in slots.items():
        if slot.of is None and graph[variable].attributes:
            ownerless.setdefault(slot.optimizer, []).append(variable)
    for number, node in enumerate(graph):
        if not is_optimizer(node):
            continue
        whole = node.children.get("_variables", number)
        members = {} if whole in walked else _members(graph, node, "_variables")
        walked.add(whole)
        candidates = dict.fromkeys((*members.values(), *ownerless.get(number, ())))
        loose = [
            n
            for n in candidates
            if n not in settings and n not in trained and (n not in slots or slots[n].of is None)
        ]
        if loose and owners is None:
            owners = _unique_names(graph, slots, trained)
        for variable in loose:
            found = _owner_by_name(graph[variable].attributes[0].full_name, owners or {})
            if found is not None:
                kind = slots[variable].kind if variable in slots else found[0]
                slots[variable] = Slot(kind, found[1], number, listed=True)
            elif variable not in slots:
                slots[variable] = Slot("", None, number, listed=True)


def _unique_names(graph: Graph, slots: dict[int, Slot], trained: set[int]) -> dict[str, int]:
    candidates = trained or {n for n, node in enumerate(graph) if node.attributes and n not in slots}
    names: dict[str, int] = {}
    for variable in candidates:
        if graph[variable].attributes:
            name = graph[variable].attributes[0].full_name
            names[name] = -1 if name in names else variable
            flat = name.replace("/", "_")
            if flat != name:
                names[flat] = -1 if flat in names else variable
    return {name: variable for name, variable in names.items() if name and variable >= 0}


def _owner_by_name(full_name: str, owners: dict[str, int]) -> tuple[str, int] | None:
    if len(full_name) > _LONGEST_NAME:
        return None
    first, _, rest = full_name.partition("/")
    if first in _ENDINGS and rest in owners:
        # The optimizer within a LossScaleOptimizer of Keras 2 has no name of its own there: `m/dense/kernel`.
        return _ENDINGS[first], owners[rest]
    kind, slash, name = rest.partition("/")
    if slash and name in owners:
        return _ENDINGS.get(kind, kind), owners[name]
    for at, letter in enumerate(rest):
        if letter == "_" and rest[:at] in owners:
            ending = rest[at + 1 :]
            return _ENDINGS.get(ending, ending), owners[rest[:at]]
    return None


def _sonnet(graph: Graph, slots: dict[int, Slot], trained: set[int]) -> None:
    names: set[str] | None = None
    owners: dict[str, int] = {}
    walked: set[int] = set()  # a list that many objects hold is read once
    for number, node in enumerate(graph):
        lists = next((lists for lists in _SONNET if lists.keys() <= node.children.keys()), None)
        if lists is None:
            continue
        if names is None:
            names = {node.attributes[0].full_name for node in graph if node.attributes}
            owners = _unique_names(graph, slots, trained)
        for edge, (scope, kind) in lists.items():
            if node.children[edge] in walked:
                continue
            walked.add(node.children[edge])
            for variable in _members(graph, node, edge).values():
                _, found, name = graph[variable].attributes[0].full_name.partition(f"/{scope}/")
                # Two networks may give their variables the same names: the slot is sure, its owner is not.
                if found and name in names:
                    slots.setdefault(variable, Slot(kind, owners.get(name), number, listed=True))


def slot_path(optimizer: Path, kind: str, of: Path) -> Path:
    """Return the path of a slot variable that no edge leads to: `OPTIMIZER/slots/KIND/VARIABLE`."""
    # Not below the kind itself: SGD has a setting called momentum beside its slots of that name.
    return (*optimizer, Key("attr", "slots"), Key("attr", kind), *of)
