"""Two checkpoints' entries in pairs: of one path or, across frameworks, of one meaning."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, UsageError, choice
from ckpttool.globs import matcher, nothing
from ckpttool.layouts.canonical import Binding
from ckpttool.layouts.recognise import recognised
from ckpttool.leaf import Leaf, Path, Plain, ValueLeaf, display
from ckpttool.ops.array_difference import compared
from ckpttool.ops.difference import By, Changed, Declared, Entry
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.reconversion import WRITERS, Conversion, Pair, conversion, receipt_of
from ckpttool.ops.restore import canonical_tree
from ckpttool.source import Shape
from ckpttool.tree import Tree

AUTO = "auto"
_SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")
# Entries by the names that pair them, each with where it is in its own tree.
Placed = Mapping[str, tuple[Entry, Path]]


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
    by "conversion", one side is what converting it gives. `places` says for each side where in its own tree
    an entry comes from, () where nowhere; of what fills a live model, where in that. `declared` are entries
    that one side has alone because a conversion leaves or adds them.
    """

    checkpoints: tuple[Checkpoint, Checkpoint]
    layouts: tuple[str | None, str | None]
    by: By
    left: Mapping[str, Entry]
    right: Mapping[str, Entry]
    places: tuple[Mapping[str, Path], Mapping[str, Path]]
    notes: tuple[str, ...]
    declared: tuple[Declared, ...] = ()
    conversion: Conversion | None = None
    turned: bool = False
    """whether the conversion is that of the right side"""

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
            counts = self.by != "path" and _is_count(left) and _is_count(right)
            return None if counts and _same_value(left, right, exact=False) else _tensors(name, left, right)
        same = _same_value(left, right, exact=self.by == "path")
        return None if same else Changed(name, left, right, None)

    def changes(self, progress: Progress = silent) -> Iterator[Changed]:
        """Read what both sides have, and yield what differs in the left one's order."""
        total = sum(leaf.nbytes for name in self.both if isinstance(leaf := self.left[name], Leaf))
        done = 0
        for name in self.both:
            change = self.change(name)
            if isinstance(leaf := self.left[name], Leaf):
                done += leaf.nbytes
                progress(done, total)
            if change is not None:
                yield change


def side(checkpoint: Checkpoint, layout: str | None = None) -> Side:
    """Return a checkpoint with the agent in it; raise UsageError as `recognise` does."""
    return Side(checkpoint, recognised(checkpoint, layout))


def laid(first: Side, second: Side, *, glob: str | None = None, by: str = AUTO) -> Laid:
    """Pair the entries of two checkpoints as `diff` says it; no value is read but an agent's own counters."""
    if by not in (words := (AUTO, *get_args(By))):
        raise UsageError(f"{by!r} is not known", hint=choice(by, words))
    sides = first, second
    renamed = by == AUTO and (_differ_in_names(first, second) or _is_conversion(first, second))
    agents = first.binding is not None and second.binding is not None
    if by == "agent" or (by == AUTO and agents and (renamed or _differ_in_form(first, second))):
        return _by_agent(sides, glob)
    if by == "conversion" or renamed:
        made = _converted(sides)
        if made is not None and (by == "conversion" or _explains_more(*made, sides)):
            return _by_conversion(sides, *made, glob)
        if by == "conversion":
            raise UsageError(
                "neither checkpoint has the form of the other one's conversion",
                file=second.checkpoint.path,
                hint="--by path",
            )
    return _by_path(sides, glob)


def _by_path(sides: tuple[Side, Side], glob: str | None) -> Laid:
    """Pair entries of one path; a count of saves that only one of two formats adds is declared."""
    rows = [(each, dict(each.by_path())) for each in sides]
    declared: list[Declared] = []
    if sides[0].checkpoint.format != sides[1].checkpoint.format:
        for word, (_, here), (_, there) in zip(_SIDES, rows, rows[::-1], strict=True):
            for name in WRITERS & (here.keys() - there.keys()):
                declared.append(Declared(word, name, "added"))
                del here[name]
    return paired((rows[0], rows[1]), "path", glob, (), declared)


def paired(
    sides: tuple[tuple[Side, Placed], tuple[Side, Placed]],
    by: By,
    glob: str | None,
    notes: tuple[str, ...],
    declared: Iterable[Declared] = (),
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
        tuple(each for each in declared if keep(each.path)),
    )


def _differ_in_form(first: Side, second: Side) -> bool:
    return (first.layout, first.checkpoint.format) != (second.layout, second.checkpoint.format)


def _differ_in_names(first: Side, second: Side) -> bool:
    """Say whether one of two has entries that the other lacks; of one format, more than they share."""
    names, others = (set(one.checkpoint.tree.names.values()) - WRITERS for one in (first, second))
    if first.checkpoint.format != second.checkpoint.format:
        return names != others
    return bool(names - others and others - names) and len(names ^ others) > len(names & others)


def _is_conversion(first: Side, second: Side) -> bool:
    """Say whether the receipt of one of two names the other's weights, and their entries differ in form."""
    if _forms(first.checkpoint.tree) == _forms(second.checkpoint.tree):
        return False
    pair = _pair((first, second))
    return pair.linked or pair.turned.linked


def _forms(tree: Tree) -> dict[str, tuple[str, Shape] | None]:
    return {
        tree.names[path]: (leaf.dtype, leaf.shape) if isinstance(leaf, Leaf) else None
        for path, leaf in tree.items()
    }


def _pair(sides: tuple[Side, Side]) -> Pair:
    one, other = (each.checkpoint for each in sides)
    return Pair(one, other, receipt_of(one), receipt_of(other))


def _converted(sides: tuple[Side, Side]) -> tuple[Conversion, bool] | None:
    """Return the conversion of one side into the other's form, and whether it is the second one's.

    A receipt that names the other side decides which one is the source.
    """
    first, second = sides
    pair = _pair(sides)
    backwards = not pair.linked and pair.turned.linked
    for turned in (backwards, not backwards):
        source, target = (second, first) if turned else (first, second)
        made = conversion(pair.turned if turned else pair, source.binding, target.layout)
        if made is not None:
            return made, turned
    return None


def _explains_more(made: Conversion, turned: bool, sides: tuple[Side, Side]) -> bool:
    """Say whether the conversion has at least as many names of the target as the source itself."""
    source, target = (each.checkpoint.tree.names.values() for each in (sides[::-1] if turned else sides))
    stored = set(target)
    return len(stored & set(made.tree.names.values())) >= len(stored & set(source))


def _by_conversion(sides: tuple[Side, Side], made: Conversion, turned: bool, glob: str | None) -> Laid:
    source, target = sides[::-1] if turned else sides
    places = {there: path for path, paths in made.places.items() for there in paths}
    names = made.tree.names
    converted = {names[path]: (leaf, places.get(path, ())) for path, leaf in made.tree.items()}
    stored = dict(target.by_path())
    declared = list(_left_behind(made, source.checkpoint.tree, "right" if turned else "left"))
    for name in [name for name in stored if name not in converted and made.is_added(name)]:
        declared.append(Declared("left" if turned else "right", name, "added"))
        del stored[name]
    for name in WRITERS & (converted.keys() - stored.keys()):
        declared.append(Declared("right" if turned else "left", name, "kept"))
        del converted[name]
    for name in [name for name, (leaf, place) in converted.items() if not place and _is_off(leaf)]:
        if name not in stored:
            del converted[name]
    for path in made.dropped:
        if path not in made.accepted:
            name = source.checkpoint.tree.names[path]
            converted.setdefault(name, (source.checkpoint.tree[path], path))
    rows = ((source, converted), (target, stored))
    pairs = rows[::-1] if turned else rows
    placed = paired((pairs[0], pairs[1]), "conversion", glob, _notes(made), declared)
    return replace(placed, conversion=made, turned=turned)


def _by_agent(sides: tuple[Side, Side], glob: str | None) -> Laid:
    """Pair two agents by meaning, and what only one of them has by the conversion of one into the other."""
    first, second = sides
    a, b = (one.by_meaning(_agent(one)) for one in sides)
    made = _converted(sides)
    if made is None:
        told, a, b = _settings_aside(a, b)
        return paired(((first, a), (second, b)), "agent", glob, told)
    found, turned = made
    if found.folded:
        return _by_conversion(sides, found, turned, glob)
    source, target = sides[::-1] if turned else sides
    settled = _Settled(found, source.checkpoint.tree, target.checkpoint.tree, turned=turned)
    converted, stored = settled.take(*((b, a) if turned else (a, b)))
    rows = ((source, converted), (target, stored))
    pairs = rows[::-1] if turned else rows
    placed = paired((pairs[0], pairs[1]), "agent", glob, _notes(found), settled.declared)
    return replace(placed, conversion=found, turned=turned)


def _notes(made: Conversion) -> tuple[str, ...]:
    assumed = tuple(f"assumed by the conversion: {each}" for each in made.assumed)
    return (*assumed, *(made.notes if made.by_receipt else ()))


def _left_behind(made: Conversion, tree: Tree, side: Literal["left", "right"]) -> Iterator[Declared]:
    for path in made.kept:
        yield Declared(side, tree.names[path], "kept")
    for path in made.dropped:
        if path in made.accepted:
            yield Declared(side, tree.names[path], "dropped")


def _is_off(leaf: Entry) -> bool:
    """Say whether an entry is a switch that is off, which older versions of a library do not write."""
    return isinstance(leaf, ValueLeaf) and (leaf.value is None or leaf.value is False)


class _Settled:
    """What only one of two agents has by meaning, paired through the conversion of one into the other."""

    def __init__(self, made: Conversion, source: Tree, target: Tree, *, turned: bool) -> None:
        self.made, self.source, self.target = made, source, target
        self.sides: tuple[Literal["left", "right"], ...] = ("right", "left") if turned else ("left", "right")
        self.declared: list[Declared] = []
        self._paths = {name: path for path, name in target.names.items()}
        self._made = {name: path for path, name in made.tree.names.items()}
        self._places = {there: path for path, paths in made.places.items() for there in paths}

    def take(self, ours: Placed, theirs: Placed) -> tuple[Placed, Placed]:
        """Return the entries of source and target; those of one alone are paired, declared or kept alone."""
        shared = {name for name in ours.keys() & theirs.keys() if self._is_shared(name, ours, theirs)}
        converted = {name: self._shaped(ours[name], theirs[name]) for name in ours if name in shared}
        stored = {name: found for name, found in theirs.items() if name in shared}
        paired: set[Path] = set()
        for name, found in ours.items():
            if name not in shared:
                paired |= self._take_source(name, found, converted, stored, paired)
        for name, found in theirs.items():
            if name not in shared and found[1] not in paired:
                self._take_target(name, found, converted, stored)
        self._take_values(converted, stored, ours, theirs)
        for name, path in self._made.items():
            if name in self._paths or name in WRITERS or _is_off(self.made.tree[path]):
                continue
            source = self._places.get(path, ())
            # One number of the source may stand at several places of the target; another one has its pair.
            if not source or any(self._there(each) is not None for each in self.made.places[source]):
                converted.setdefault(name, (self.made.tree[path], source))
        return converted, stored

    def _is_shared(self, name: str, ours: Placed, theirs: Placed) -> bool:
        """Say whether entries of one name are one: outside of the agent it is what the conversion writes."""
        path, place = ours[name][1], theirs[name][1]
        if self.source.names.get(path) != name or self.target.names.get(place) != name:
            return True
        own = self._made.get(name)
        return not self.made.is_added(name) if own is None else own in self.made.places.get(path, ())

    def _shaped(self, ours: tuple[Entry, Path], theirs: tuple[Entry, Path]) -> tuple[Entry, Path]:
        """Return the source's entry, as the conversion has it where the target's shape is another one."""
        leaf, path = ours
        if not isinstance(leaf, Leaf) or not isinstance(theirs[0], Leaf) or leaf.shape == theirs[0].shape:
            return ours
        made = self._made.get(self.target.names.get(theirs[1], ""))
        return (
            (self.made.tree[made], path)
            if made in self.made.places.get(path, ()) and made is not None
            else ours
        )

    def _take_source(
        self,
        name: str,
        found: tuple[Entry, Path],
        converted: dict[str, tuple[Entry, Path]],
        stored: dict[str, tuple[Entry, Path]],
        paired: set[Path],
    ) -> set[Path]:
        """Add an entry of the source with those of the target that it becomes; return the latter's places."""
        places = {path: self._there(path) for path in self.made.places.get(found[1], ())}
        there = {path: place for path, place in places.items() if place is not None}
        fresh = {path: place for path, place in there.items() if place not in paired}
        for number, (path, place) in enumerate(fresh.items()):
            title = name if not number else f"{name} ({self.target.names[place]})"
            converted[title] = self.made.tree[path], found[1]
            stored[title] = self.target[place], place
        if not there and not self._declares(name, found[1]):
            converted[name] = found
        return set(fresh.values())

    def _take_target(
        self,
        name: str,
        found: tuple[Entry, Path],
        converted: dict[str, tuple[Entry, Path]],
        stored: dict[str, tuple[Entry, Path]],
    ) -> None:
        """Add an entry of the target beside what the conversion has there, if anything."""
        made = self._made.get(self.target.names.get(found[1], ""))
        if made is not None:
            converted[name] = self.made.tree[made], self._places.get(made, ())
            stored[name] = self.target[found[1]], found[1]
        elif self.made.is_added(self.target.names.get(found[1], "")):
            self.declared.append(Declared(self.sides[1], name, "added"))
        else:
            stored[name] = found

    def _take_values(
        self,
        converted: dict[str, tuple[Entry, Path]],
        stored: dict[str, tuple[Entry, Path]],
        ours: Placed,
        theirs: Placed,
    ) -> None:
        """Add the plain values outside of the agents: those of the target beside the conversion's."""
        known = {path for _, path in (*theirs.values(), *stored.values())}
        for path, leaf in self.target.plain():
            name = self.target.names[path]
            if path in known or name in stored:
                continue
            made = self._made.get(name)
            if made is None and self.made.is_added(name):
                self.declared.append(Declared(self.sides[1], name, "added"))
                continue
            stored[name] = leaf, path
            if made is not None:
                converted.setdefault(name, (self.made.tree[made], self._places.get(made, ())))
        known = {path for _, path in (*ours.values(), *converted.values())}
        for path, leaf in self.source.plain():
            name = self.source.names[path]
            if path in known or path in self.made.places or name in converted:
                continue
            if not self._declares(name, path):
                converted[name] = leaf, path

    def _there(self, path: Path) -> Path | None:
        """Return the target's own path of an entry of the conversion."""
        return self._paths.get(self.made.tree.names[path])

    def _declares(self, name: str, path: Path) -> bool:
        """Say whether the conversion leaves the entry behind by declaration, and note that."""
        lost = path in self.made.dropped and path not in self.made.accepted
        if name not in WRITERS and (lost or path in self.made.places):
            return False
        self.declared.append(
            Declared(self.sides[0], name, "dropped" if path in self.made.dropped else "kept")
        )
        return True


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
        alone = {n for n in here if n not in there and (isinstance(here[n][0], ValueLeaf) or n in WRITERS)}
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


def _is_count(leaf: Leaf) -> bool:
    """Say whether a tensor is one whole number, which libraries keep in integers of other widths."""
    return not leaf.shape and "int" in leaf.dtype


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
