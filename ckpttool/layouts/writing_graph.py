"""Writes an agent as TensorFlow's objects or variables by a table of names (see layouts/writing.py).

Paths are edges from the checkpoint's root, layers' names have slashes, and steps that are all numbers are a
list's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from ckpttool.layouts import writing
from ckpttool.layouts.canonical import Binding
from ckpttool.layouts.optimizers.keras_write import as_tensor
from ckpttool.layouts.optimizers.known import Setting
from ckpttool.layouts.writing import Placed, Writing
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr, display
from ckpttool.mapping.kinds import SPELLING, Kind, Weight
from ckpttool.mapping.plan import Label, Plan, Settings, edges
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import ToTensor
from ckpttool.tree import Tree

KERAS: Mapping[str, Kind] = {kind: SPELLING["tensorflow", kind] for kind in ("dense", "layer_norm")}
# In the order in which tf.Module goes through them, which that of Sonnet's optimizers is: by their names.
SONNET: Mapping[str, Kind] = {
    "dense": Kind("dense", "tensorflow", (Weight("b", "bias", 1), Weight("w", "kernel", 2))),
    "layer_norm": Kind(
        "layer_norm", "tensorflow", (Weight("offset", "offset", 1), Weight("scale", "scale", 1))
    ),
}
_SAVES = (attr("save_counter"),)


class State(Protocol):
    """One optimizer's part of a plan (see layouts/optimizers)."""

    def plan(self) -> Plan:
        """Return its moves, its labels, and what it had to assume."""
        ...


class Form(Protocol):
    """Makes the state of one canonical optimizer, whose variables the library calls `variable/...`."""

    def __call__(
        self,
        name: str,
        variable: str,
        weights: Sequence[Move],
        agent: Tree,
        top: Path,
        told: Mapping[str, Setting] | None,
    ) -> State:
        """Take the canonical optimizer `name`, which trains what `weights` make, for the object at `top`."""
        ...


def edge(entry: Path, layer: str, weight: str) -> Path:
    """Return a tensor's path: the entry's, its layer's edges, and its own."""
    return (*entry, *map(attr, filter(None, layer.split("/"))), attr(weight))


def place(name: str) -> Path:
    """Return the path of a name with slashes: every step an edge."""
    return tuple(map(attr, name.split("/")))


def number(value: float, dtype: str) -> Leaf:
    """Return a tensor of one number for a library's own variable that no agent has."""
    leaf = ToTensor(dtype).leaf(ValueLeaf(value, "other"))
    assert isinstance(leaf, Leaf)  # noqa: S101  # the rule's promise
    return leaf


def graph(
    writing_: Writing,
    binding: Binding,
    agent: Tree,
    told: Settings,
    form: Form | None = None,
    counted: str = "int64",
) -> Plan:
    """Return where a canonical agent goes in a tree of TensorFlow's by the table.

    Optimizers are of the form, none without one; the agent's own counters become `counted`. Raise
    UnsupportedError as `writing.written` does.
    """
    writing.require(writing_, binding, agent)
    rows = _edged(writing.placed(writing_, binding, agent))
    weights = tuple(move for row in rows for move in row.moves)
    states = list(_states(writing_, rows, agent, told, form)) if form is not None else []
    counters = tuple(_counters(writing_, agent, counted))
    labels = {m.target: Label("parameter", display(m.target[1:]) or display(m.target)) for m in weights}
    labels |= {path: Label("other", display(path[1:])) for row in rows for path in row.added}
    labels |= {move.target: Label("counter", display(move.target[-1:])) for move in counters}
    rest = Plan(
        (*weights, *counters),
        {path: leaf for row in rows for path, leaf in row.added.items()},
        labels=labels,
        assumed=tuple(line for row in rows for line in row.assumed),
        missing=tuple(line for row in rows for line in row.missing),
        consumed=_consumed(agent, counters),
        notes=(*_notes(writing_, binding, agent, counters), *(line for row in rows for line in row.notes)),
    )
    made = unshared(writing.together(rest, *states), agent)
    return replace(made, notes=tuple(dict.fromkeys(made.notes)), assumed=tuple(dict.fromkeys(made.assumed)))


def unshared(plan: Plan, agent: Tree) -> Plan:
    """Return the plan with a leaf of its own for every copy of a network.

    A variable of two objects is one in TensorFlow: the second object would not get its value.
    """
    seen: set[tuple[Path, str]] = set()
    moves: list[Move] = []
    added = dict(plan.added)
    for move in plan.moves:
        if (move.source, move.rule.name) in seen:
            added[move.target] = move.rule.leaf(agent[move.source])
        else:
            moves.append(move)
        seen.add((move.source, move.rule.name))
    return replace(plan, moves=tuple(moves), added=added)


def _edged(rows: Sequence[Placed]) -> list[Placed]:
    """Return the rows with the items of lists counted."""
    targets = [path for row in rows for path in (*(m.target for m in row.moves), *row.added)]
    paths = edges(tuple(str(step.value) for step in path) for path in targets)

    def counted(path: Path) -> Path:
        return paths[tuple(str(step.value) for step in path)]

    return [
        replace(
            row,
            moves=tuple(replace(move, target=counted(move.target)) for move in row.moves),
            added={counted(path): leaf for path, leaf in row.added.items()},
        )
        for row in rows
    ]


def _states(
    writing_: Writing, rows: Iterable[Placed], agent: Tree, told: Settings, form: Form
) -> Iterable[Plan]:
    rows = tuple(rows)
    for number, (name, top) in enumerate(writing_.optimizers.items()):
        ours, _, head = name.partition("/")
        weights = writing.trained(name, rows)
        if weights and any(path[0] == attr(ours) for path in agent):
            called = f"adam_{number}" if number else "adam"
            made = form(ours, called, weights, agent, top, told.get(ours, {})).plan()
            # Two objects for one canonical optimizer have the same settings: they are told once.
            yield made if head in ("", "q1") else replace(made, told={}, notes=())


def _counters(writing_: Writing, agent: Tree, counted: str) -> Iterable[Move]:
    for name, target in writing_.counters.items():
        path = (attr(name),)
        if path in agent:
            # tf.train.Checkpoint's own count of saves is an int64.
            yield Move(path, target, as_tensor(agent[path], "int64" if path == _SAVES else counted))


def _consumed(agent: Tree, counters: Iterable[Move]) -> tuple[Path, ...]:
    kept = {move.source for move in counters}
    return tuple(path for path in writing.consumed(agent) if path not in kept)


def _notes(writing_: Writing, binding: Binding, agent: Tree, counters: Iterable[Move]) -> tuple[str, ...]:
    kept = (
        Tree({path: leaf for path, leaf in agent.items() if path != _SAVES})
        if any(move.source == _SAVES for move in counters)
        else agent
    )
    return writing.notes(writing_, binding, kept)
