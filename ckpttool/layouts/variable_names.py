"""From objects to names: the way of an object graph's variables to TensorFlow 1's (see layouts/variables.py).

Adam's moments go beside their variables, and the powers of its betas are computed from its count of updates.
RMSProp's and Momentum's slots go there too; Momentum's hold no learning rate in TensorFlow 1 (sources:
tensorflow/python/training/{adam,rmsprop,momentum}.py, slot_creator.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ckpttool.formats.object_graph.roles import slot_path
from ckpttool.layouts.optimizers.families import ADAM, CLASSES, OTHERS, RMSPROP, SGD, Family
from ckpttool.layouts.optimizers.keras_read import KERAS_SETTINGS, keras_class
from ckpttool.layouts.optimizers.tf1 import POWERS
from ckpttool.layouts.optimizers.zeros import zeros
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr, display
from ckpttool.mapping.numbers import Scaled
from ckpttool.mapping.plan import Label, Plan, Settings
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP, Rule, ToTensor, ToValue
from ckpttool.tree import Tree

_BETAS = {"beta1_power": "beta_1", "beta2_power": "beta_2"}
_MOST_STEPS = 10_000_000  # by then a float32 of any usual beta is 0
_STEPS = tuple(name for name, ours in KERAS_SETTINGS.items() if ours == "step")
_RATES = ("_learning_rate", "learning_rate")
# The kinds that a slot may have, by optimizer, in the order in which TensorFlow 1 makes the slots.
_KINDS = ((ADAM, ("m", "v")), (RMSPROP, ("rms", "mg", "momentum")), (SGD, ("momentum",)))


class _Optimizer(NamedTuple):
    """An optimizer object: what it is, its path, its slots, and the variables of its own that count here."""

    family: Family
    path: Path
    slots: list[Path]
    powers: Mapping[str, Path]
    steps: Path | None
    rate: Path | None

    @property
    def title(self) -> str:
        """Its name for people."""
        return display(self.path)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its slots in TensorFlow 1's order."""
        return next(kinds for family, kinds in _KINDS if family is self.family)


def to_names(tree: Tree, told: Settings) -> Plan:
    """Return the way of an object graph to variables known by name: paths as people read them.

    `told` are optimizers' settings from a sidecar. State of other optimizers keeps its path. Each of several
    has its own scope, as if made there (tensorflow/python/training/slot_creator.py): powers at
    `SCOPE/beta1_power`, moments at `SCOPE/VARIABLE/Adam`, so that the names say whose they are.
    """
    found = list(_optimizers(tree))
    names = {path: tree.names[path] for path, _ in tree.tensors()}
    rules: dict[Path, Rule] = {}
    added: dict[Path, Leaf | ValueLeaf] = {}
    assumed: list[str] = []
    missing: list[str] = []
    notes: list[str] = []
    taken = set(names.values())
    for each in found:
        alone = len(found) == 1 and (each.powers or not taken & set(POWERS))
        scope = "" if alone else f"{each.title}/"
        if each.family is SGD and each.steps is not None:
            rate = _rate(tree, each, told)
            if not rate:
                notes.append(f"{each.title}: nobody tells the learning rate that its momentum holds")
                continue
            rules |= dict.fromkeys(each.slots, Scaled(SGD.folded * rate, divide=True))
            notes.append(f"{each.title}: momentum is divided by the learning rate, and rounded")
        added |= _name_slots(tree, each, scope, names, taken)
        for power in POWERS if each.family is ADAM else ():
            if power in each.powers:
                names[each.powers[power]] = scope + power
            elif each.steps is None:
                missing.append(scope + power)
            else:
                value, whence = _power(tree, each, power, told)
                assumed += whence
                added[_named(scope + power)] = ToTensor("float32").leaf(ValueLeaf(value))
    moves = tuple(Move(path, _named(name), rules.get(path, KEEP)) for path, name in names.items())
    labels = {_named(names[path]): _plain(leaf, names[path], names) for path, leaf in tree.tensors()}
    labels |= {path: Label("other", display(path)) for path in added}
    return Plan(
        moves,
        added,
        labels=labels,
        assumed=tuple(dict.fromkeys(assumed)),
        missing=tuple(missing),
        notes=tuple(notes),
        told=told,
    )


def _named(name: str) -> Path:
    return tuple(attr(part) for part in name.split("/"))


def _plain(leaf: Leaf, name: str, names: Mapping[Path, str]) -> Label:
    of = _named(names[leaf.of]) if leaf.of is not None and leaf.of in names else None
    return Label(leaf.role, name, of, leaf.slot)


def _optimizers(tree: Tree) -> Iterator[_Optimizer]:
    """Go through the optimizers that TensorFlow 1 has too, in the order of their first moments."""
    slots: dict[Path, list[Path]] = {}
    children: dict[Path, dict[str, Path]] = {}
    for path, leaf in tree.tensors():
        children.setdefault(path[:-1], {})[str(path[-1].value) if path else ""] = path
        if leaf.role == "slot" and is_trained(tree, leaf):
            slots.setdefault(_holder(path, leaf), []).append(path)
    for top, moments in slots.items():
        mine = children.get(top, {})
        leaves = [tree[path] for path in (*mine.values(), *moments)]
        kinds = {found.slot for path in moments if isinstance(found := tree[path], Leaf)}
        cls = keras_class(leaves)
        if cls in OTHERS:
            continue
        for family, wanted in _KINDS:
            if CLASSES.get(cls or "", family) is family and set(family.always) <= kinds <= set(wanted):
                powers = {power: mine[power] for power in POWERS if power in mine}
                yield _Optimizer(family, top, moments, powers, _first(mine, _STEPS), _first(mine, _RATES))
                break


def _first(mine: Mapping[str, Path], names: tuple[str, ...]) -> Path | None:
    return next((mine[name] for name in names if name in mine), None)


def is_trained(tree: Tree, slot: Leaf) -> bool:
    """Say whether a slot is known to be a variable's, and not another slot's."""
    owner = tree.get(slot.of) if slot.of is not None else None
    return isinstance(owner, Leaf) and owner.role != "slot"


def _holder(path: Path, leaf: Leaf) -> Path:
    """Return the path of a moment's optimizer: above its list, or what the graph lists it with."""
    if leaf.of is not None:
        top = path[: len(path) - len(leaf.of) - 2]
        if path == slot_path(top, leaf.slot or "", leaf.of):
            return top
    return path[:-2]


def _name_slots(
    tree: Tree, optimizer: _Optimizer, scope: str, names: dict[Path, str], taken: set[str]
) -> dict[Path, Leaf]:
    """Name the slots, and return those that TensorFlow 1's RMSProp always has and this one lacks."""
    by_owner: dict[Path, dict[str, Path]] = {}
    for path in optimizer.slots:
        leaf = tree[path]
        if isinstance(leaf, Leaf) and leaf.of is not None:
            by_owner.setdefault(leaf.of, {})[str(leaf.slot)] = path
            taken.discard(names[path])
    added: dict[Path, Leaf] = {}
    for owner, moments in by_owner.items():
        wanted = [kind for kind in optimizer.kinds if kind in moments or kind == "momentum"]
        # An optimizer that finds its names taken goes on counting.
        number, name = 0, f"{scope}{names[owner]}/{optimizer.family.tf1}"
        while taken & {_numbered(name, number + position) for position in range(len(wanted))}:
            number += len(wanted)
        for position, kind in enumerate(wanted):
            own = _numbered(name, number + position)
            taken.add(own)
            weight = tree[owner]
            if kind in moments:
                names[moments[kind]] = own
            elif isinstance(weight, Leaf):
                added[_named(own)] = zeros(weight)
    return added


def _numbered(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


def _rate(tree: Tree, optimizer: _Optimizer, told: Settings) -> float | None:
    found = _number(tree, optimizer.rate)
    said = _told(optimizer, told, "learning_rate")
    return said if found is None else found


def _power(tree: Tree, adam: _Optimizer, power: str, told: Settings) -> tuple[float, list[str]]:
    """Return a power of a beta and what it assumes: it begins as beta, which each update multiplies it by."""
    count = _number(tree, adam.steps)
    steps = max(0, count) if isinstance(count, int) else 0
    name = _BETAS[power]
    beta = _number(tree, (*adam.path, attr(name)))
    if beta is None:
        beta = _told(adam, told, name)
    if isinstance(beta, float) and 0 <= beta < 1:
        return _multiplied(beta, steps), []
    default = ADAM.keras_defaults[name]
    sentence = f"{adam.title} {name} = {default.value} (default of {default.whose}; "
    return _multiplied(default.value or 0, steps), [f"{sentence}the checkpoint does not hold it)"]


def _told(optimizer: _Optimizer, told: Settings, name: str) -> float | None:
    said = told.get(str(optimizer.path[-1].value) if optimizer.path else "", {}).get(name)
    return said if isinstance(said, float) else None


def _multiplied(beta: float, steps: int) -> float:
    """Return beta in float32 after it was multiplied by it so often, each time rounded."""
    import numpy as np

    factors = np.full(min(steps, _MOST_STEPS) + 1, beta, np.float32)
    with np.errstate(under="ignore"):
        return float(np.multiply.accumulate(factors)[-1])


def _number(tree: Tree, path: Path | None) -> float | None:
    leaf = tree.get(path) if path is not None else None
    if not isinstance(leaf, Leaf) or leaf.size != 1:
        return None
    value = ToValue().leaf(leaf)
    found = value.value if isinstance(value, ValueLeaf) else None
    return found if isinstance(found, int | float) else None
