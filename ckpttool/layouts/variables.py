"""TensorFlow's two ways of keeping the same variables: by name (TensorFlow 1), as objects (TensorFlow 2).

Variables keep their paths. Only Adam is told otherwise by the two: by name its moments are `VARIABLE/Adam`
and `VARIABLE/Adam_1` beside two powers of its betas; as an object it owns them. What
tf.compat.v1.train.AdamOptimizer saves when tf.train.Checkpoint tracks it is the object that stands for Adam
here: children beta1_power and beta2_power, slot variables m and v (tensorflow/python/training/adam.py,
tensorflow/python/training/optimizer.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ckpttool.formats.object_graph import MARK
from ckpttool.formats.object_graph.roles import slot_path
from ckpttool.layouts.adam import KERAS_DEFAULTS, KERAS_SETTINGS, NOT_ADAM, optimizer_class
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr, display
from ckpttool.mapping.plan import Label, Plan, Settings, edges
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP, ToTensor, ToValue
from ckpttool.tree import Tree

POWERS = ("beta1_power", "beta2_power")
_BETAS = {"beta1_power": "beta_1", "beta2_power": "beta_2"}
_ADAM = ("m", "v")
_POWER = re.compile(r"beta[12]_power(_\d+)?")
_PLAIN = "optimizer"  # the object's name where the variables' names give none
_MOST_STEPS = 10_000_000  # by then a float32 of any usual beta is 0
_STEPS = ("_iterations", "iterations", "iter")


def is_graph(tree: Tree) -> bool:
    """Say whether the tree is one of TensorFlow's objects, whose keys say so."""
    return any(MARK in leaf.key for _, leaf in tree.tensors())


def by_name(tree: Tree) -> bool:
    """Say whether the tree's variables are known by name alone."""
    return all("/".join(_steps(path)) == leaf.key for path, leaf in tree.tensors())


def _steps(path: Path) -> tuple[str, ...]:
    return tuple(str(step.value) for step in path)


# From names to objects.


class _Pair(NamedTuple):
    """The powers of one Adam's betas: the scope that they stand in, and their paths."""

    scope: tuple[str, ...]
    powers: Mapping[str, Path]


def to_graph(tree: Tree) -> Plan:
    """Return the way of variables known by name into an object graph: each keeps its path.

    Adam's moments become slot variables of an optimizer, called as the scope of its beta powers is, and
    `optimizer` where they have none. Moments that no pair of powers owns for sure stay where they are.
    """
    pairs, notes = _pairs(tree)
    leaves = dict(tree.tensors())
    slots = {path: leaf.of for path, leaf in leaves.items() if _is_adam_slot(tree, leaf) and leaf.of}
    owners = _owners(leaves, slots, pairs)
    if not owners:
        pairs = []
    names = {path: _variable(path, leaf) for path, leaf in leaves.items() if path not in owners}
    tops = _tops(pairs, names)
    for number, pair in enumerate(pairs):
        names |= {path: (*tops[number], power) for power, path in pair.powers.items()}
    if slots and not owners:
        notes = (
            *notes,
            f"{len(slots)} moments of Adam are kept as plain variables: whose they are is not sure",
        )
    paths = edges(names.values())
    placed = {path: paths[name] for path, name in names.items()}
    for path, number in owners.items():
        top = placed[pairs[number].powers[POWERS[0]]][:-1]
        placed[path] = slot_path(top, leaves[path].slot or "", placed[slots[path]])
    moves = tuple(Move(path, placed[path], KEEP) for path in leaves)
    assumed = [
        f"Adam in scope {'/'.join(pair.scope) or '(none)'} trains what lies there: it is {'/'.join(top)}"
        for pair, top in zip(pairs, tops, strict=True)
        if len(pairs) > 1
    ]
    labels = {placed[path]: _label(path, leaf, placed, held=path in owners) for path, leaf in leaves.items()}
    return Plan(moves, labels=labels, assumed=tuple(assumed), notes=notes)


def _variable(path: Path, leaf: Leaf) -> tuple[str, ...]:
    # Some programs store a variable under the name of its output, `w:0`.
    if leaf.name and leaf.key == f"{leaf.name}:0" == "/".join(_steps(path)):
        return tuple(leaf.name.split("/"))
    return _steps(path)


def _label(path: Path, leaf: Leaf, placed: Mapping[Path, Path], *, held: bool) -> Label:
    name = leaf.name or leaf.key or display(path)
    if leaf.of is None or leaf.of not in placed:
        return Label(leaf.role, name)
    return Label(leaf.role, name, placed[leaf.of] if held else None, leaf.slot if held else None)


def _is_adam_slot(tree: Tree, leaf: Leaf) -> bool:
    owner = tree.get(leaf.of) if leaf.of is not None else None
    return leaf.role == "slot" and leaf.slot in _ADAM and isinstance(owner, Leaf) and owner.role != "slot"


def _pairs(tree: Tree) -> tuple[list[_Pair], tuple[str, ...]]:
    found: dict[tuple[tuple[str, ...], str], dict[str, Path]] = {}
    for path, leaf in tree.tensors():
        match = _POWER.fullmatch(str(path[-1].value)) if path and leaf.size == 1 else None
        if match:
            power = match[0][: len(POWERS[0])]
            found.setdefault((_steps(path[:-1]), match[1] or ""), {})[power] = path
    pairs = [_Pair(scope, powers) for (scope, _), powers in found.items() if len(powers) == len(POWERS)]
    scopes = [pair.scope for pair in pairs]
    if len(set(scopes)) == len(scopes):
        return pairs, ()
    # TensorFlow numbers the powers of several optimizers, and says nowhere which is whose.
    return [], (f"{len(pairs)} Adam optimizers share one scope: their state is kept as plain variables",)


def _owners(leaves: Mapping[Path, Leaf], slots: Mapping[Path, Path], pairs: list[_Pair]) -> dict[Path, int]:
    """Return the number of every moment's optimizer: the only one, or that in whose scope the moment is.

    Nothing is returned when one moment has no optimizer, or two are the same one's of the same variable.
    """
    numbers = {pair.scope: number for number, pair in enumerate(pairs)}
    found: dict[Path, int] = {}
    seen = set()
    for path, of in slots.items():
        name = _steps(path)
        scopes = (name[:depth] for depth in range(len(name), -1, -1))
        scope = next((scope for scope in scopes if scope in numbers), None)
        number = 0 if len(pairs) == 1 else numbers.get(scope) if scope is not None else None
        if number is None or (number, leaves[path].slot, of) in seen:
            return {}
        seen.add((number, leaves[path].slot, of))
        found[path] = number
    return found


def _tops(pairs: list[_Pair], names: Mapping[Path, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return each optimizer's path: nothing lies there but what is an optimizer's own."""
    powers = {path for pair in pairs for path in pair.powers.values()}
    scopes = {pair.scope for pair in pairs}
    taken = {
        name[:depth]
        for path, name in names.items()
        if path not in powers and not (name[:-1] in scopes and name[-1] in KERAS_SETTINGS)
        for depth in range(1, len(name) + 1)
    }
    tops = []
    for pair in pairs:
        top, number = pair.scope, 0
        while not top or top in taken:
            top = (*pair.scope, f"{_PLAIN}_{number}" if number else _PLAIN)
            number += 1
        taken.add(top)
        tops.append(top)
    return tops


# From objects to names.


class _Adam(NamedTuple):
    """An optimizer object: its path, its moments, its powers or its count of updates."""

    path: Path
    slots: list[Path]
    powers: Mapping[str, Path]
    steps: Path | None

    @property
    def title(self) -> str:
        """Its name for people."""
        return display(self.path)


def to_names(tree: Tree, told: Settings) -> Plan:
    """Return the way of an object graph to variables known by name: paths as people read them.

    Adam's moments go beside their variables, and the powers of its betas are computed from its count of
    updates; `told` are optimizers' settings from a sidecar. Other optimizers' state keeps its path. Each of
    several Adams has its own scope, as if made there (tensorflow/python/training/slot_creator.py):
    powers at `SCOPE/beta1_power`, moments at `SCOPE/VARIABLE/Adam`, so that the names say whose they are.
    """
    adams = list(_adams(tree))
    names = {path: tree.names[path] for path, _ in tree.tensors()}
    added: dict[Path, Leaf | ValueLeaf] = {}
    assumed: list[str] = []
    missing: list[str] = []
    taken = set(names.values())
    for adam in adams:
        alone = len(adams) == 1 and (adam.powers or not taken & set(POWERS))
        scope = "" if alone else f"{adam.title}/"
        _name_slots(tree, adam, scope, names, taken)
        for power in POWERS:
            if power in adam.powers:
                names[adam.powers[power]] = scope + power
            elif adam.steps is None:
                missing.append(scope + power)
            else:
                value, whence = _power(tree, adam, power, told)
                assumed += whence
                added[_named(scope + power)] = ToTensor("float32").leaf(ValueLeaf(value))
    moves = tuple(Move(path, _named(name), KEEP) for path, name in names.items())
    labels = {_named(names[path]): _plain(leaf, names[path], names) for path, leaf in tree.tensors()}
    labels |= {path: Label("other", display(path)) for path in added}
    return Plan(
        moves, added, labels=labels, assumed=tuple(dict.fromkeys(assumed)), missing=tuple(missing), told=told
    )


def _named(name: str) -> Path:
    return tuple(attr(part) for part in name.split("/"))


def _plain(leaf: Leaf, name: str, names: Mapping[Path, str]) -> Label:
    of = _named(names[leaf.of]) if leaf.of is not None and leaf.of in names else None
    return Label(leaf.role, name, of, leaf.slot)


def _adams(tree: Tree) -> Iterator[_Adam]:
    """Go through the optimizers that are Adam, in the order of their first moments."""
    slots: dict[Path, list[Path]] = {}
    children: dict[Path, dict[str, Path]] = {}
    for path, leaf in tree.tensors():
        children.setdefault(path[:-1], {})[str(path[-1].value) if path else ""] = path
        if _is_adam_slot(tree, leaf):
            slots.setdefault(_holder(path, leaf), []).append(path)
    for top, moments in slots.items():
        mine = children.get(top, {})
        steps = next((mine[name] for name in _STEPS if name in mine), None)
        counter = tree[steps] if steps is not None else None
        kinds = {found.slot for path in moments if isinstance(found := tree[path], Leaf)}
        if kinds == set(_ADAM) and optimizer_class(counter) not in NOT_ADAM:
            yield _Adam(top, moments, {power: mine[power] for power in POWERS if power in mine}, steps)


def _holder(path: Path, leaf: Leaf) -> Path:
    """Return the path of a moment's optimizer: above its list, or what the graph lists it with."""
    if leaf.of is not None:
        top = path[: len(path) - len(leaf.of) - 2]
        if path == slot_path(top, leaf.slot or "", leaf.of):
            return top
    return path[:-2]


def _name_slots(tree: Tree, adam: _Adam, scope: str, names: dict[Path, str], taken: set[str]) -> None:
    by_owner: dict[Path, dict[str, Path]] = {}
    for path in adam.slots:
        leaf = tree[path]
        if isinstance(leaf, Leaf) and leaf.of is not None:
            by_owner.setdefault(leaf.of, {})[str(leaf.slot)] = path
            taken.discard(names[path])
    for owner, moments in by_owner.items():
        # An optimizer that finds its names taken goes on counting.
        number, name = 0, scope + names[owner]
        while taken & {_slot_name(name, number), _slot_name(name, number + 1)}:
            number += 2
        for position, slot in enumerate(_ADAM):
            if slot in moments:
                names[moments[slot]] = _slot_name(name, number + position)
                taken.add(names[moments[slot]])


def _slot_name(owner: str, number: int) -> str:
    return f"{owner}/Adam_{number}" if number else f"{owner}/Adam"


def _power(tree: Tree, adam: _Adam, power: str, told: Settings) -> tuple[float, list[str]]:
    """Return a power of a beta and what it assumes: it begins as beta, which each update multiplies it by."""
    count = _number(tree, adam.steps)
    steps = max(0, count) if isinstance(count, int) else 0
    name = _BETAS[power]
    beta = _number(tree, (*adam.path, attr(name)))
    if beta is None:
        beta = told.get(str(adam.path[-1].value) if adam.path else "", {}).get(name)
    if isinstance(beta, float) and 0 <= beta < 1:
        return _multiplied(beta, steps), []
    default = KERAS_DEFAULTS[name]
    sentence = f"{adam.title} {name} = {default.value} (default of {default.whose}; "
    return _multiplied(default.value or 0, steps), [f"{sentence}the checkpoint does not hold it)"]


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
