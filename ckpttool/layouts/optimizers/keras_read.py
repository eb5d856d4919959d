"""An optimizer of Keras, Sonnet or TensorFlow 1 in a tree, bound to the canonical optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from ckpttool.layouts import canonical
from ckpttool.layouts.modules import Segments
from ckpttool.layouts.optimizers import tf1
from ckpttool.layouts.optimizers.families import (
    ADAM,
    BUFFER,
    CLASSES,
    OTHERS,
    SGD,
    VELOCITY,
    Family,
    not_converted,
)
from ckpttool.layouts.table import Optimizer, OptimizerMoves
from ckpttool.leaf import Leaf, Path, ValueLeaf
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP, Rule
from ckpttool.tree import Tree

# Keras 3 and 2.11+ use a leading underscore, the legacy optimizers do not.
KERAS_SETTINGS = {
    "_iterations": "step",
    "iterations": "step",
    "iter": "step",
    "step": "step",  # Sonnet's (sonnet/src/optimizers/adam.py)
    "_learning_rate": "learning_rate",
    "learning_rate": "learning_rate",
    "beta_1": "beta_1",
    "beta_2": "beta_2",
    "epsilon": "epsilon",
    "rho": "rho",
    "momentum": "momentum",
    # The legacy optimizers' decay of the learning rate; torch has no such thing and keeps it unused.
    "decay": "decay",
}
_KNOWN = OTHERS | CLASSES.keys()
_KINDS = frozenset(slot.kind for family in CLASSES.values() for slot in family.keras_slots.values())


def from_keras(optimizer: Optimizer) -> OptimizerMoves:
    """Bind a Keras optimizer: the format has paired each slot with its variable wherever the file says so.

    Keras 2.11 to 2.15 keeps no list of the variables: there the i-th moment belongs to the i-th weight of
    the optimizer's network, which the weight's own name in the moment's must confirm. Slots of TensorFlow 1
    may stand below their variables.
    """
    mine = optimizer.own
    tree = optimizer.tree
    kind = keras_class(tree[path] for path in mine.values())
    if kind in OTHERS:
        return OptimizerMoves((), note=not_converted(optimizer.name, str(kind)))
    weights: dict[Path, list[tuple[Path, Rule]]] = {}
    for source, target, rule in optimizer.weights:
        weights.setdefault(source, []).append((target, rule))
    counted = any(len(name) == 1 and KERAS_SETTINGS.get(name[0]) == "step" for name in mine)
    found = dict(_slots(optimizer, mine, weights))
    family = CLASSES.get(kind or "") or tf1.family(found, tree) or ADAM
    moves: list[Move] = []
    of: dict[Path, Path] = {}
    for path, owner in found.items():
        slot = _canonical(tree[path], family, counted=counted)
        if slot is not None:
            places = ((canonical.slot(optimizer.name, slot, t), rule) for t, rule in weights[owner])
            moves += [Move(path, target, rule) for target, rule in places]
            of[path] = owner
    for name, path in mine.items():
        if len(name) == 1 and name[0] in KERAS_SETTINGS and isinstance(tree[path], Leaf):
            moves.append(Move(path, canonical.setting(optimizer.name, KERAS_SETTINGS[name[0]]), KEEP))
    powers = tf1.powers(optimizer, mine, found) if family is ADAM else {}
    # What TensorFlow 1 computes from the count of updates says nothing that the count does not.
    moves += () if counted else tf1.count(optimizer, powers)
    consumed = frozenset(powers.values()) if any(m.target[1:] == _STEP for m in moves) else frozenset()
    defaults = {} if counted or not tf1.is_named(found, tree) else family.tf1_defaults
    return OptimizerMoves(tuple(moves), consumed, of, defaults=defaults)


_STEP = canonical.setting("", "step")[1:]


def keras_class(leaves: Iterable[Leaf | ValueLeaf]) -> str | None:
    """Return an optimizer's class in lower case, None if none of its variables is called after one.

    Keras 3 names all of them so (`adam_1/iteration`), 2.11 to 2.15 the slots alone (`AdamW/m/dense/kernel`).
    """
    found = [leaf for leaf in leaves if isinstance(leaf, Leaf)]
    found.sort(key=lambda leaf: leaf.role != "counter")
    return next((name for leaf in found if (name := optimizer_class(leaf)) in _KNOWN), None)


def optimizer_class(leaf: Leaf | ValueLeaf | None) -> str | None:
    """Return what a variable's name begins with, in lower case and without its number."""
    if not isinstance(leaf, Leaf) or not leaf.name:
        return None
    return re.sub(r"_\d+$", "", leaf.name.split("/")[0].lower()).replace("_", "")


def _slots(
    optimizer: Optimizer, mine: Mapping[Segments, Path], weights: Mapping[Path, object]
) -> Iterator[tuple[Path, Path]]:
    """Go through the slots with the weights that they belong to."""
    for path in mine.values():
        leaf = optimizer.tree[path]
        if isinstance(leaf, Leaf) and leaf.role == "slot" and leaf.slot in _KINDS:
            if tf1.is_proximal(leaf):
                continue
            owner = leaf.of if leaf.of is not None else _by_order(path, leaf, optimizer)
            if owner is not None and owner in weights:
                yield path, owner
    yield from tf1.below_variables(optimizer, weights)


def _canonical(leaf: Leaf | ValueLeaf, family: Family, *, counted: bool) -> str | None:
    kind = leaf.slot if isinstance(leaf, Leaf) else None
    found = next((ours for ours, theirs in family.keras_slots.items() if theirs.kind == kind), None)
    # Keras counts updates in every optimizer, TensorFlow 1 and Sonnet in no momentum.
    if found == VELOCITY and family is SGD and (not counted or tf1.is_momentum(leaf)):
        return BUFFER
    return found


def _by_order(path: Path, slot: Leaf, optimizer: Optimizer) -> Path | None:
    number = path[-1].value
    owners = tuple(dict.fromkeys(source for source, _, _ in optimizer.weights))
    if not isinstance(number, int) or not 0 <= number < len(owners):
        return None
    if _is_named_after(slot, optimizer.tree[owners[number]]):
        return owners[number]
    # A program that handed its variables over in another order: then only the names speak.
    named = [owner for owner in owners if _is_named_after(slot, optimizer.tree[owner])]
    return named[0] if len(named) == 1 else None


def _is_named_after(slot: Leaf, weight: Leaf | ValueLeaf) -> bool:
    if not isinstance(weight, Leaf) or not weight.name or not slot.name or weight.shape != slot.shape:
        return False
    return slot.name.endswith(f"/{weight.name}") or slot.name == weight.name


def settled(tree: Tree, name: str) -> str | None:
    """Return the class of the canonical optimizer `name` of an agent, as its variables' names tell."""
    top = canonical.setting(name, "step")[0]
    return keras_class(leaf for path, leaf in tree.items() if path[0] == top)
