"""Where the networks and lone tensors of a canonical agent go by a table of names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ckpttool.errors import UnsupportedError
from ckpttool.layouts import canonical
from ckpttool.layouts.canonical import Binding, Part
from ckpttool.layouts.limits import require_layers
from ckpttool.layouts.naming import Lone, Network, Writing, layer_names
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr, display
from ckpttool.mapping.parts import Into
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP, TRANSPOSE, Reshape, Rule, chain
from ckpttool.source import Inline
from ckpttool.tree import Tree

_STD, _LOG_STD = "actor/std", "actor/log_std"


@dataclass(frozen=True, slots=True)
class Placed:
    """The moves of one row, and what it had to take for granted."""

    place: str
    moves: tuple[Move, ...]
    added: Mapping[Path, Leaf | ValueLeaf] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    consumed: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def placed(writing: Writing, binding: Binding, agent: Tree) -> list[Placed]:
    """Return every row's moves, in the order of the table."""
    parts = {part.title: part for part in binding.parts}
    found: list[Placed] = []
    for row in writing.rows:
        if isinstance(row, Network):
            found.append(_network(row, parts, binding, agent, writing))
        elif isinstance(row, Lone):
            found.append(_lone(row, agent))
        else:
            made = row.placed(binding, agent, writing.whose)
            found.append(Placed(canonical.NORMALIZER, made.moves, made.added, made.assumed, notes=made.notes))
    return found


def _network(
    row: Network, parts: Mapping[str, Part], binding: Binding, agent: Tree, writing: Writing
) -> Placed:
    online = row.place.replace("_target", "")
    part = parts.get(row.place)
    assumed: tuple[str, ...] = ()
    if part is None and row.place != online and online in parts:
        part = parts[online]
        assumed = (f"{row.place.partition('/')[0]} is a copy: the source has none",)
    if part is None:
        return Placed(row.place, (), missing=(row.place,))
    require_layers(part, row.names, binding, writing)
    return Placed(row.place, tuple(_tensors(row, part, agent, writing)), assumed=assumed)


def _tensors(row: Network, part: Part, agent: Tree, writing: Writing) -> Iterator[Move]:
    """Go through a network's tensors, weight before bias, in the order of its layers."""
    for position, layer, name in layer_names(part, row.names):
        for weight in writing.kinds[layer.kind].weights:
            source = canonical.weight(part, position, weight.canonical)
            if source in agent:
                rule = weight.to_canonical.inverse(agent[source])
                if row.names.joined:
                    rule = chain(rule, _joined(part, position, agent, rule, weight.rank))
                yield Move(source, writing.path(row.entry, name, weight.name), rule)
            elif not weight.optional:
                raise UnsupportedError("the layer has no place without this tensor", path=display(source))


def _joined(part: Part, position: int | str, agent: Tree, rule: Rule, rank: int) -> Rule:
    """Return the place of a mean or of its deviation in the one layer that gives both."""
    if isinstance(position, int) and position < len(part.layers) - 1:
        return KEEP
    last = agent[canonical.weight(part, len(part.layers) - 1, "kernel")]
    width = last.shape[-1] if isinstance(last, Leaf) else 0
    start = 0 if isinstance(position, int) else width
    return Into(0 if rule == TRANSPOSE else rank - 1, start, start + width, 2 * width)


def _lone(row: Lone, agent: Tree) -> Placed:
    source = _place(row.place)
    found = agent.get(source)
    if isinstance(found, Leaf):
        shape = _sized(row, found)
        rule = KEEP if shape == found.shape else Reshape(shape)
        return Placed(row.place, (Move(source, row.target, rule),))
    if row.place.endswith(_LOG_STD) and isinstance(std := agent.get(_place(_STD)), Leaf):
        return _logarithm(row, std)
    if row.default is not None:
        number = row.default.array().reshape(-1)[0].item()
        said = f"{row.place} = {number:g} (the source has none)"
        return Placed(row.place, (), {row.target: row.default}, assumed=(said,))
    return Placed(row.place, (), missing=() if row.optional else (display(row.target),))


def _logarithm(row: Lone, std: Leaf) -> Placed:
    """Return the logarithm of a deviation that the agent keeps as such."""
    import numpy as np

    numbers = np.log(std.array().astype("f8")).astype("f4")
    leaf = Leaf("float32", _sized(row, std), Inline(numbers.tobytes()), "", "parameter")
    note = f"{_LOG_STD} is computed: the logarithm of {_STD}"
    return Placed(row.place, (), {row.target: leaf}, consumed=(_place(_STD),), notes=(note,))


def _place(name: str) -> Path:
    return tuple(map(attr, name.split("/")))


def _sized(row: Lone, leaf: Leaf) -> tuple[int, ...]:
    return leaf.shape if row.shape is None else tuple(leaf.size if e == -1 else e for e in row.shape)


def trained(optimizer: str, rows: Iterable[Placed]) -> list[Move]:
    """Return the moves of what an optimizer trains, by its canonical name ("critic_optimizer/q1")."""
    ours, _, head = optimizer.partition("/")
    trains = "/".join(filter(None, (canonical.ALL_OPTIMIZED[ours], head)))
    return [
        move
        for row in rows
        if row.place == trains or row.place.startswith(f"{trains}/")
        for move in row.moves
        if not canonical.mapped_by_sidecar(move.source)
    ]
