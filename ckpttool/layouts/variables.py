"""TensorFlow's two ways of keeping the same variables: by name (TensorFlow 1), as objects (TensorFlow 2).

Variables keep their paths; variable_names.py has the way from objects to names. Adam is told otherwise by
the two: by name its moments are `VARIABLE/Adam` and `VARIABLE/Adam_1` beside two powers of its betas; as an
object it owns them. What tf.compat.v1.train.AdamOptimizer saves when tf.train.Checkpoint tracks it is the
object that stands for Adam here: children beta1_power and beta2_power, slot variables m and v
(tensorflow/python/training/adam.py, tensorflow/python/training/optimizer.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ckpttool.formats.object_graph import MARK
from ckpttool.formats.object_graph.roles import slot_path
from ckpttool.layouts.optimizers.keras_read import KERAS_SETTINGS
from ckpttool.layouts.optimizers.tf1 import POWERS
from ckpttool.layouts.variable_names import is_trained
from ckpttool.leaf import Leaf, Path, attr, display
from ckpttool.mapping.plan import Label, Plan, edges
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP
from ckpttool.shown import count
from ckpttool.tree import Tree

_ADAM = ("m", "v")
# Slots of optimizers that keep no variables of their own, as `_create_slots` calls them
# (tensorflow/python/training/{momentum,rmsprop,adagrad,adadelta,ftrl}.py).
_SLOTS_ALONE = frozenset(("momentum", "rms", "mg", "accumulator", "accum", "accum_update", "linear"))
_POWER = re.compile(r"beta[12]_power(_\d+)?")
_PLAIN = "optimizer"  # the object's name where the variables' names give none


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
    """The powers of one Adam's betas: the scope that they stand in, and their paths.

    An optimizer of another class has the scope of its slots and no powers.
    """

    scope: tuple[str, ...]
    powers: Mapping[str, Path]


def to_graph(tree: Tree) -> Plan:
    """Return the way of variables known by name into an object graph: each keeps its path.

    Adam's moments become slot variables of an optimizer, called as the scope of its beta powers is, and
    `optimizer` where they have none. Moments that no pair of powers owns for sure stay where they are. The
    slots of other optimizers become slot variables of one that is called as the scope around them.
    """
    pairs, notes = _pairs(tree)
    leaves = dict(tree.tensors())
    slots = {path: leaf.of for path, leaf in leaves.items() if _is_adam_slot(tree, leaf) and leaf.of}
    owners = _owners(leaves, slots, pairs)
    if not owners:
        pairs = []
    others = _slots_alone(tree)
    first = len(pairs)
    scopes = list(dict.fromkeys(scope for scope, _ in others.values()))
    pairs += [_Pair(scope, {}) for scope in scopes]
    owners |= {path: first + scopes.index(scope) for path, (scope, _) in others.items()}
    slots_of = slots | {path: of for path, (_, of) in others.items()}
    names = {path: _variable(path, leaf) for path, leaf in leaves.items() if path not in owners}
    tops = _tops(pairs, names)
    for number, pair in enumerate(pairs):
        names |= {path: (*tops[number], power) for power, path in pair.powers.items()}
    if slots and not slots.keys() & owners.keys():
        notes = (
            *notes,
            f"{count(len(slots), 'moment of Adam is', 'moments of Adam are')} kept as plain variables: "
            f"whose they are is not sure",
        )
    paths = edges(names.values())
    placed = {path: paths[name] for path, name in names.items()}
    for path, number in owners.items():
        powers = pairs[number].powers
        top = placed[powers[POWERS[0]]][:-1] if powers else tuple(map(attr, tops[number]))
        placed[path] = slot_path(top, leaves[path].slot or "", placed[slots_of[path]])
    moves = tuple(Move(path, placed[path], KEEP) for path in leaves)
    assumed = [
        f"Adam in scope {'/'.join(pair.scope) or '(none)'} trains what lies there: it is {'/'.join(top)}"
        for pair, top in zip(pairs[:first], tops, strict=False)
        if first > 1
    ]
    labels = {placed[path]: _label(path, leaf, placed, held=path in owners) for path, leaf in leaves.items()}
    return Plan(moves, labels=labels, assumed=tuple(assumed), notes=notes)


def _slots_alone(tree: Tree) -> dict[Path, tuple[tuple[str, ...], Path]]:
    """Return the scope and the variable of every slot `[SCOPE/]VARIABLE/NAME` that is not Adam's.

    Nothing is returned when two slots of one scope are the same one's of the same variable.
    """
    found: dict[Path, tuple[tuple[str, ...], Path]] = {}
    seen = set()
    for path, leaf in tree.tensors():
        if leaf.role != "slot" or leaf.slot not in _SLOTS_ALONE or leaf.of is None:
            continue
        name, of = _steps(path)[:-1], _steps(leaf.of)
        if not is_trained(tree, leaf) or name[len(name) - len(of) :] != of:
            continue
        scope = name[: len(name) - len(of)]
        if (scope, leaf.slot, of) in seen:
            return {}
        seen.add((scope, leaf.slot, of))
        found[path] = scope, leaf.of
    return found


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
    return leaf.role == "slot" and leaf.slot in _ADAM and is_trained(tree, leaf)


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
