"""A layer kind: how one framework stores one kind of layer, the way to the canonical form and back.

The canonical form has TensorFlow's orientation and keeps whatever any form tells apart: a recurrent cell has
two biases and its gates stand in one order, the three projections of an attention are three matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from types import MappingProxyType
from typing import NamedTuple

from ckpttool.activations import Order
from ckpttool.errors import MappingError
from ckpttool.leaf import Leaf
from ckpttool.mapping.rules import KEEP, Rule
from ckpttool.source import Shape

NOTHING: Mapping[str, Leaf] = MappingProxyType({})
Group = Mapping[str, Leaf]


class Weight(NamedTuple):
    """One tensor of a layer: its name here and its name there, its rank, the rule to the canonical form."""

    name: str
    canonical: str
    rank: int
    to_canonical: Rule = KEEP
    optional: bool = False


class Row(NamedTuple):
    """One way between a stored tensor and a canonical one.

    The rule of a reading makes the canonical tensor, that of a writing the stored one. A tensor may have
    several rows: it is cut, or put together.
    """

    stored: str
    canonical: str
    rule: Rule = KEEP


class Way(NamedTuple):
    """A layer's way between its stored and its canonical tensors.

    `fills` are tensors that no tensor of the other side gives, by canonical name in a reading, by stored name
    in a writing. `left` are names that have no place on the other side. `assumed` are sentences.
    """

    rows: tuple[Row, ...]
    fills: Mapping[str, Leaf] = NOTHING
    left: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


class Told(NamedTuple):
    """What is known of one layer besides its tensors.

    `number` is what a kind needs and the tensors do not say: an attention's heads, a depthwise convolution's
    multiplier, the axes that a PReLU shares. `flatten` is the shape (H, W, C) of what a dense layer takes
    flattened; () says that it takes nothing of the kind. `wanted` are the target's own shapes by stored name.
    `takes` and `makes` are the orders of the features that it takes and makes, UNKNOWN if they could not be
    followed, None if nothing was.
    """

    number: int | None = None
    flatten: Shape | None = None
    wanted: Mapping[str, Shape] = MappingProxyType({})
    takes: Order | None = None
    makes: Order | None = None


UNTOLD = Told()
Reading = Callable[[Group, Told], Way]


@dataclass(frozen=True, slots=True)
class Kind:
    """One way in which a framework stores one kind of layer.

    Without `reading` and `writing` the weights' own rules are the way. `also` is what must hold besides names
    and ranks. `form` says whose spelling it is where a framework has several, "" is the one that is written.
    `modules` is a pattern for the module's name where that is what tells it from another kind. `asked` says
    that it is only taken where an option or the file selects it, `refused` why it is not converted.
    """

    name: str
    framework: str
    weights: tuple[Weight, ...]
    form: str = ""
    also: Callable[[Group], bool] | None = None
    reading: Reading | None = None
    writing: Reading | None = None
    modules: str | None = None
    asked: bool = False
    refused: str | None = None
    _names: Mapping[str, Weight] = field(init=False, repr=False, compare=False)
    _needed: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Know the weights by name."""
        object.__setattr__(self, "_names", {weight.name: weight for weight in self.weights})
        object.__setattr__(self, "_needed", frozenset(w.name for w in self.weights if not w.optional))

    def fits(self, group: Group) -> bool:
        """Say whether these tensors, and no others, make such a layer."""
        return (
            bool(group)
            and group.keys() <= self._names.keys()
            and group.keys() >= self._needed
            and all(len(leaf.shape) == self._names[name].rank for name, leaf in group.items())
            and (self.also is None or self.also(group))
        )

    @property
    def option(self) -> str:
        """The name in `--kind`: a kind that is only taken when it is asked for is named with its form."""
        return f"{self.name}_{self.form}" if self.asked and self.form else self.name

    @property
    def namings(self) -> Iterator[frozenset[str]]:
        """Every set of names that the tensors of such a layer may have."""
        optional = self._names.keys() - self._needed
        for number in range(len(optional) + 1):
            yield from (self._needed.union(more) for more in combinations(optional, number))

    def read(self, group: Group, told: Told = UNTOLD) -> Way:
        """Return the way of stored tensors to canonical ones; raise MappingError if there is none."""
        if self.reading is not None:
            return self.reading(group, told)
        return Way(tuple(Row(w.name, w.canonical, w.to_canonical) for w in self.weights if w.name in group))

    def write(self, canonical: Group, told: Told = UNTOLD) -> Way:
        """Return the way of canonical tensors to stored ones; raise MappingError if there is none."""
        if self.writing is not None:
            return self.writing(canonical, told)
        require(self, canonical, [w.canonical for w in self.weights if not w.optional])
        rows = tuple(
            Row(w.name, w.canonical, w.to_canonical.inverse(canonical[w.canonical]))
            for w in self.weights
            if w.canonical in canonical
        )
        return Way(rows, left=left_over(canonical, rows))


def left_over(canonical: Group, rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the canonical names of which no row makes anything."""
    used = {row.canonical for row in rows}
    return tuple(name for name in canonical if name not in used)


def require(kind: Kind, canonical: Group, names: Iterable[str]) -> None:
    """Raise MappingError unless the canonical layer has these tensors."""
    missing = [name for name in names if name not in canonical]
    if missing:
        raise MappingError(
            f"{kind.name} of {kind.framework} has tensors that the source's layer lacks",
            expected=", ".join(missing),
        )
