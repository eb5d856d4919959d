"""Whose slot a variable is, as TensorFlow 1's names tell: optimizers and moving averages in a graph.

A slot is called `[SCOPE/]VARIABLE/NAME[_N]`: SCOPE is the variable scope around the call that made it, NAME
the optimizer's name, and _N counts the variable's slots of that name in the order in which they were made
(tensorflow/python/training/slot_creator.py, create_slot; optimizer.py, _zeros_slot). Keras's optimizers of
TensorFlow 2 write `SCOPE/OPTIMIZER/VARIABLE/KIND` (keras/optimizers/optimizer_v2/optimizer_v2.py, add_slot).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ckpttool.source import Shape

# Slots in the order in which each optimizer makes them (`_create_slots` in tensorflow/python/training/*.py
# and, of TensorFlow 1.15, tensorflow/contrib/opt/python/training/*.py). RMSProp makes two, centered three.
_ADAM = ("m", "v")
_BY_OPTIMIZER = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "AdamOptimizer": _ADAM,
    "AdaMax": _ADAM,
    "Nadam": _ADAM,
    "LazyAdam": _ADAM,
    "RMSProp": ("rms", "momentum"),
    "Momentum": ("momentum",),
    "MomentumW": ("momentum",),
    "Adagrad": ("accumulator",),
    "ProximalAdagrad": ("accumulator",),
    "AdagradDA": ("gradient_accumulator", "gradient_squared_accumulator"),
    "Adadelta": ("accum", "accum_update"),
    "Ftrl": ("accum", "linear"),
    "ExponentialMovingAverage": ("average",),
}
_CENTERED = ("rms", "mg", "momentum")
# Last parts that name the kind itself: Keras's optimizers, and the one of google-research/bert.
_KINDS = {
    **{
        kind: kind for kind in ("m", "v", "vhat", "momentum", "rms", "mg", "accumulator", "linear", "average")
    },
    **{kind: kind for kind in ("accum_grad", "accum_var")},
    "adam_m": "m",
    "adam_v": "v",
}
# State of a moving average that is corrected for its start (moving_averages.py, _zero_debias).
_HELPER = re.compile(r"(?:biased|local_step)(?:_\d+)?")
_NUMBERED = re.compile(r"(.+)_([1-9]\d{0,8})", re.DOTALL)
_POWER = re.compile(r"(?:.*/)?beta1_power(?:_\d+)?", re.DOTALL)
# What slot_creator.py leaves of `part_0` when it takes a partitioned variable's name off a slot's name with a
# scope before it: `w/art_0/Adam` for part 0 of `w`.
_CUT_PART = re.compile(r"(?:.*/)?p?a?r?t?_\d+", re.DOTALL)
# More scopes around an optimizer are not looked through.
_DEEPEST = 32


class Slot(NamedTuple):
    """A slot: the name of its variable, its kind, and the scope that was around its making."""

    of: str
    kind: str
    scope: str


class _Reading(NamedTuple):
    """One way to read a name: a scope, an existing variable, and the slot's own part."""

    scope: str
    of: str
    tail: str


def slots(shapes: Mapping[str, Shape]) -> dict[str, Slot]:
    """Return the slots among the variables, by name; `shapes` gives every variable's shape.

    A slot's variable exists and has the same shape (a scalar may belong to any). It may be a slot itself: the
    moving average of a moment. Where a name can be read in two ways, the scope decides that other slots of
    that optimizer have; else the longer name of a variable.
    """
    chosen: dict[str, _Reading] = {}
    open_ones: dict[str, list[_Reading]] = {}
    scopes: dict[str, set[str]] = defaultdict(set)
    for name, shape in shapes.items():
        readings = list(_readings(name, shape, shapes))
        if len(readings) == 1:
            chosen[name] = readings[0]
            scopes[readings[0].tail].add(readings[0].scope)
        elif readings:
            open_ones[name] = readings
    for name, readings in open_ones.items():
        known = [reading for reading in readings if reading.scope in scopes[reading.tail]]
        chosen[name] = (known or readings)[0]
    kinds = dict(_kinds(chosen, shapes))
    return {name: Slot(chosen[name].of, kinds[name], chosen[name].scope) for name in shapes if name in chosen}


def _readings(name: str, shape: Shape, shapes: Mapping[str, Shape]) -> Iterable[_Reading]:
    """Go through the ways to read a name as a slot's, those with the longest variable first."""
    owner, slash, tail = name.rpartition("/")
    if not slash or _HELPER.fullmatch(tail):
        return
    named = _is_known(tail)
    start = 0
    for _ in range(_DEEPEST):
        variable = owner[start:]
        # Below a scope, a part that nobody knows needs more evidence than a variable called `w` somewhere.
        sure = named or not start or "/" in variable
        if sure and variable in shapes and (shapes[variable] == shape or (named and not shape)):
            yield _Reading(owner[: max(0, start - 1)], variable, tail)
        start = owner.find("/", start) + 1
        if not start:
            break
    if named:
        yield from _cut_parts(owner, tail, shape, shapes)


def _cut_parts(owner: str, tail: str, shape: Shape, shapes: Mapping[str, Shape]) -> Iterable[_Reading]:
    variable = owner
    for _ in range(_DEEPEST):
        variable = variable.rpartition("/")[0]
        part = owner[len(variable) + 1 :]
        if not variable or _CUT_PART.fullmatch(part) is None:
            return
        if shapes.get(variable) == shape:
            # Every part has slots of its own; they count as if they were in a scope of theirs.
            yield _Reading(part, variable, tail)


def _is_known(tail: str) -> bool:
    numbered = _NUMBERED.fullmatch(tail)
    return tail in _KINDS or tail in _BY_OPTIMIZER or (numbered is not None and numbered[1] in _BY_OPTIMIZER)


def _kinds(mine: Mapping[str, _Reading], shapes: Mapping[str, Shape]) -> Iterable[tuple[str, str]]:
    """Go through the slots with their kinds."""
    families: dict[tuple[str, str, str], dict[int, str]] = defaultdict(dict)
    siblings: dict[tuple[str, str], set[str]] = defaultdict(set)
    for reading in mine.values():
        siblings[reading.scope, reading.of].add(reading.tail)
    for name, reading in mine.items():
        base, number = _member(reading.tail, siblings[reading.scope, reading.of])
        families[reading.scope, reading.of, base][number] = name
    custom_adam = _custom_is_adam(families, shapes)
    for (_, _, base), members in families.items():
        for number, name in members.items():
            yield name, _kind(mine[name].tail, base, number, len(members), custom_adam=custom_adam)


def _member(tail: str, siblings: set[str]) -> tuple[str, int]:
    """Split a slot's own part into the optimizer's name and the slot's number."""
    numbered = _NUMBERED.fullmatch(tail)
    if numbered is not None and (numbered[1] in siblings or numbered[1] in _BY_OPTIMIZER):
        return numbered[1], int(numbered[2])
    return tail, 0


def _custom_is_adam(
    families: Mapping[tuple[str, str, str], Mapping[int, str]], shapes: Mapping[str, Shape]
) -> bool:
    """Say whether optimizers with names of their own are Adams: there are powers of beta for them too."""
    powers = sum(1 for name, shape in shapes.items() if not shape and _POWER.fullmatch(name))
    pairs: dict[tuple[str, str], int] = {}
    for (scope, _, base), members in families.items():
        if _BY_OPTIMIZER.get(base, _ADAM) is _ADAM and base not in _KINDS and len(members) % 2 == 0:
            pairs[scope, base] = max(pairs.get((scope, base), 0), len(members) // 2)
    return powers > 0 and powers >= sum(pairs.values())


def _kind(tail: str, base: str, number: int, count: int, *, custom_adam: bool) -> str:
    if tail in _KINDS:
        return _KINDS[tail]
    kinds = _BY_OPTIMIZER.get(base)
    if kinds is None:
        return _ADAM[number % 2] if custom_adam and count % 2 == 0 else tail
    if base == "RMSProp" and count % 2:
        # Two slots each, or three: an odd number that is no multiple of three has some of both.
        return _CENTERED[number % 3] if count % 3 == 0 else tail
    return kinds[number % len(kinds)]
