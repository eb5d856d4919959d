"""Two checkpoints' entries in pairs: of one path or, across frameworks, of one meaning."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, UsageError, choice
from ckpttool.globs import matcher, nothing
from ckpttool.layouts.canonical import Binding
from ckpttool.layouts.recognise import recognised
from ckpttool.leaf import Leaf, Path, Plain, ValueLeaf, display
from ckpttool.ops.array_difference import compared
from ckpttool.ops.difference import By, Changed, Entry
from ckpttool.ops.restore import canonical_tree
from ckpttool.source import Shape

AUTO = "auto"
# Entries by the names that pair them, each with where it is in its own tree.
Placed = Mapping[str, tuple[Entry, Path]]
# What a checkpoint counts of itself, and no agent has.
_OF_THE_FILE = frozenset(("save_counter",))


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two, and the agent that a layout recognises in it."""

    checkpoint: Checkpoint
    binding: Binding | None

    @property
    def layout(self) -> str | None:
        """The layout's name, None where no layout knows an agent."""
        return None if self.binding is None else self.binding.layout

    def by_path(self) -> Placed:
        """Return all entries, and where they are, by their display paths."""
        tree = self.checkpoint.tree
        return {tree.names[path]: (leaf, path) for path, leaf in tree.items()}

    def by_meaning(self, binding: Binding) -> Placed:
        """Return the agent's entries by their canonical paths, and other tensors by their own."""
        tree = self.checkpoint.tree
        sources = {move.target: move.source for move in reversed(binding.moves.moves)}
        agent = {
            display(path): (leaf, sources[path]) for path, leaf in canonical_tree(tree, binding.moves).items()
        }
        bound = {move.source for move in binding.moves.moves}
        rest = {tree.names[path]: (leaf, path) for path, leaf in tree.tensors() if path not in bound}
        return {**rest, **agent}


@dataclass(frozen=True, slots=True)
class Laid:
    """Two checkpoints side by side before a value of them is read.

    `left` and `right` are entries by the names that pair them, paths or those of the canonical agent (`by`);
    `places` says for each side where in its own tree an entry comes from; of what fills a live model, where
    in that.
    """

    checkpoints: tuple[Checkpoint, Checkpoint]
    layouts: tuple[str | None, str | None]
    by: By
    left: Mapping[str, Entry]
    right: Mapping[str, Entry]
    places: tuple[Mapping[str, Path], Mapping[str, Path]]
    notes: tuple[str, ...]

    @property
    def both(self) -> list[str]:
        """The names that both sides have, in the left one's order."""
        return [name for name in self.left if name in self.right]

    @property
    def only_left(self) -> tuple[str, ...]:
        """The names that the left side has alone."""
        return tuple(name for name in self.left if name not in self.right)

    @property
    def only_right(self) -> tuple[str, ...]:
        """The names that the right side has alone."""
        return tuple(name for name in self.right if name not in self.left)

    def change(self, name: str) -> Changed | None:
        """Read both sides of a name; return what differs, None if nothing does. Raise what reading raises."""
        left, right = self.left[name], self.right[name]
        if isinstance(left, Leaf) and isinstance(right, Leaf):
            return _tensors(name, left, right)
        same = _same_value(left, right, exact=self.by == "path")
        return None if same else Changed(name, left, right, None)


def side(checkpoint: Checkpoint, layout: str | None = None) -> Side:
    """Return a checkpoint with the agent in it; raise UsageError as `recognise` does."""
    return Side(checkpoint, recognised(checkpoint, layout))


def laid(first: Side, second: Side, *, glob: str | None = None, by: str = AUTO) -> Laid:
    """Pair the entries of two checkpoints as `diff` says it; no value is read but an agent's own counters."""
    if by not in (words := (AUTO, *get_args(By))):
        raise UsageError(f"{by!r} is not known", hint=choice(by, words))
    chosen: By = "agent" if by == "agent" or (by == AUTO and _differ_in_form(first, second)) else "path"
    told: tuple[str, ...] = ()
    if chosen == "agent":
        a, b = (one.by_meaning(_agent(one)) for one in (first, second))
        told, a, b = _settings_aside(a, b)
    else:
        a, b = (one.by_path() for one in (first, second))
    return paired(((first, a), (second, b)), chosen, glob, told)


def paired(
    sides: tuple[tuple[Side, Placed], tuple[Side, Placed]], by: By, glob: str | None, notes: tuple[str, ...]
) -> Laid:
    """Lay those entries side by side whose names match the pattern; raise UsageError if none does."""
    (first, a), (second, b) = sides
    keep = matcher(glob)
    if glob is not None and not any(map(keep, (*a, *b))):
        raise nothing(glob, [*a, *b])
    a, b = ({name: found for name, found in one.items() if keep(name)} for one in (a, b))
    return Laid(
        (first.checkpoint, second.checkpoint),
        (first.layout, second.layout),
        by,
        {name: entry for name, (entry, _) in a.items()},
        {name: entry for name, (entry, _) in b.items()},
        ({name: place for name, (_, place) in a.items()}, {name: place for name, (_, place) in b.items()}),
        notes,
    )


def _differ_in_form(first: Side, second: Side) -> bool:
    if first.binding is None or second.binding is None:
        return False
    return (first.layout, first.checkpoint.format) != (second.layout, second.checkpoint.format)


def _agent(side: Side) -> Binding:
    if side.binding is None:
        raise UsageError(
            "no layout recognises an agent in this checkpoint", file=side.checkpoint.path, hint="--by path"
        )
    return side.binding


def _settings_aside(a: Placed, b: Placed) -> tuple[tuple[str, ...], Placed, Placed]:
    """Return both without what only one framework writes down, and a note that says what that is.

    Settings are values: PyTorch's optimizers name all of theirs, TensorFlow's those that are variables.
    """
    notes = []
    kept = []
    for word, here, there in (("left", a, b), ("right", b, a)):
        alone = {
            n for n in here if n not in there and (isinstance(here[n][0], ValueLeaf) or n in _OF_THE_FILE)
        }
        if alone:
            names = ", ".join(sorted({name.rpartition("/")[2] for name in alone}))
            notes.append(f"only the {word} one writes down {names}")
        kept.append({name: found for name, found in here.items() if name not in alone})
    return tuple(notes), kept[0], kept[1]


def _tensors(name: str, left: Leaf, right: Leaf) -> Changed | None:
    try:
        values = compared(left, right) if left.shape == right.shape else None
    except CkpttoolError as error:
        raise error.located(path=name) from error
    same = values is None and (left.dtype, left.shape) == (right.dtype, right.shape)
    return None if same else Changed(name, left, right, values)


def _same_value(left: Entry, right: Entry, *, exact: bool) -> bool:
    """Say whether two plain values are the same; by meaning also as a number in float32 and as a tensor."""
    first, second = (_plain(entry, exact=exact) for entry in (left, right))
    if first == second:
        return exact is False or type(first) is type(second)
    if isinstance(first, float) and isinstance(second, float):
        if math.isnan(first) and math.isnan(second):
            return True
        return not exact and _rounded(first) == _rounded(second)
    return False


def _plain(entry: Entry, *, exact: bool) -> Plain | tuple[str, Shape]:
    if isinstance(entry, ValueLeaf):
        number = isinstance(entry.value, int | float) and not isinstance(entry.value, bool)
        return float(entry.value) if number and not exact else entry.value  # type: ignore[arg-type]
    if entry.shape or entry.dtype == "string":
        return (entry.dtype, entry.shape)
    return float(entry.array()) if not exact else (entry.dtype, entry.shape)


def _rounded(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return value
