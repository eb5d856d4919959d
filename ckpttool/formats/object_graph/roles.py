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


def from_optimizers(graph: Graph) -> Roles:
    """Find every optimizer's slots, the variables that it trains, and its own settings."""
    slots: dict[int, Slot] = {}
    trained: set[int] = set()
    settings: set[int] = set()
    for number, node in enumerate(graph):
        if not is_optimizer(node):
            continue
        members = _members(graph, node, "_trainable_variables")
        trained.update(members.values())
        for slot in node.slots:
            slots.setdefault(slot.variable, Slot(slot.name, slot.of, number, listed=False))
        for variable, kind, of in _listed(graph, node, members):
            slots.setdefault(variable, Slot(kind, of, number, listed=True))
        settings.update(_settings(graph, node))
    _by_name(graph, slots, trained, settings)
    kept = {variable: slot for variable, slot in slots.items() if variable not in trained}
    return Roles(kept, frozenset(trained), frozenset(settings - slots.keys()))


def _members(graph: Graph, node: Node, edge: str) -> dict[str, int]:
    child = node.children.get(edge)
    if child is None:
        return {}
    return {name: n for name, n in graph[child].children.items() if graph[n].attributes}


def _listed(graph: Graph, node: Node, trained: dict[str, int]) -> Iterable[tuple[int, str, int | None]]:
    rmsprop = "_average_gradients" in node.children
    for edge in node.children:
        members = _members(graph, node, edge)
        # A list that we do not know belongs to the variables one by one if it has one for each.
        if edge in _OPTIMIZER_LISTS or not (edge in _SLOT_LISTS or members.keys() <= trained.keys()):
            continue
        kind = (_RMSPROP.get(edge) if rmsprop else None) or _SLOT_LISTS.get(edge) or edge.strip("_")
        for name, variable in members.items():
            yield variable, kind, trained.get(name)


def _settings(graph: Graph, node: Node) -> Iterable[int]:
    for child in node.children.values():
        if graph[child].attributes:
            yield child


def _by_name(graph: Graph, slots: dict[int, Slot], trained: set[int], settings: set[int]) -> None:
    """Take from a slot's own name what no edge says; leave the owner open where a name is not unique."""
    owners: dict[str, int] | None = None
    for number, node in enumerate(graph):
        if not is_optimizer(node):
            continue
        loose = [
            n
            for n in _members(graph, node, "_variables").values()
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
    _, _, rest = full_name.partition("/")
    kind, slash, name = rest.partition("/")
    if slash and name in owners:
        return _ENDINGS.get(kind, kind), owners[name]
    for at, letter in enumerate(rest):
        if letter == "_" and rest[:at] in owners:
            ending = rest[at + 1 :]
            return _ENDINGS.get(ending, ending), owners[rest[:at]]
    return None


def slot_path(optimizer: Path, kind: str, of: Path) -> Path:
    """Return the path of a slot variable that no edge leads to: `OPTIMIZER/slots/KIND/VARIABLE`."""
    # Not below the kind itself: SGD has a setting called momentum beside its slots of that name.
    return (*optimizer, Key("attr", "slots"), Key("attr", kind), *of)
