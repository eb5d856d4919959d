"""Pair the entries of two checkpoints: by path, by meaning, by what fills a model, or by a conversion."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

from ckpttool.conversion.filling import FillOptions, LiveModel, plan_model_fill
from ckpttool.conversion.reconversion import WRITERS, ComparisonSide, Placed, Reconversion, reconvert
from ckpttool.core import text
from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import CkpttoolError, UsageError, suggest_choice
from ckpttool.core.source import Shape
from ckpttool.core.text import compile_glob, describe_record, no_match_error
from ckpttool.core.tree import Leaf, Path, Plain, Tree, ValueLeaf, json_value
from ckpttool.formats.detect import ensure_open
from ckpttool.libraries.recognize import recognize_checkpoint
from ckpttool.libraries.schema import RecognizedAgent
from ckpttool.listing import processes
from ckpttool.verification.array_differences import ArrayDifference, compare_leaves, round_to_float32

By = Literal["path", "agent", "model", "conversion"]
Sort = Literal["abs", "rel", "cosine"]
Entry = Leaf | ValueLeaf


class DeclaredEntry(NamedTuple):
    """An entry that only one side has because a conversion drops or adds it: no difference.

    `what` is "kept" (in the sidecar, or implied by the target), "dropped" (unmapped, and listed in the
    receipt) or "added" (by the writer of the format).
    """

    side: Literal["left", "right"]
    path: str
    what: Literal["kept", "dropped", "added"]

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return self._asdict()


@dataclass(frozen=True, slots=True)
class ChangedEntry:
    """A tensor or value that both sides have, with different contents.

    `left` and `right` are the entries, `values` the difference of tensors with equal shapes (None if
    types or shapes are not comparable).
    """

    __repr__ = describe_record

    path: str
    left: Entry
    right: Entry
    values: ArrayDifference | None

    @property
    def what(self) -> Literal["kind", "shape", "dtype", "values"]:
        """Return the first difference: "kind", "shape", "dtype" or "values"."""
        if not (isinstance(self.left, Leaf) and isinstance(self.right, Leaf)):
            return "values" if type(self.left) is type(self.right) else "kind"
        if self.left.shape != self.right.shape:
            return "shape"
        return "dtype" if self.left.dtype != self.right.dtype else "values"

    def distance(self, sort: Sort) -> tuple[bool, bool, float]:
        """Return a sorting key with the biggest changes last: values, counters before weights, then form."""
        weight = isinstance(self.left, Leaf) and self.left.role in ("parameter", "buffer")
        if self.values is None:
            return isinstance(self.left, Leaf), weight, math.inf
        if sort == "cosine":
            return False, weight, 2.0 if self.values.cosine is None else 1.0 - self.values.cosine
        return False, weight, self.values.max_abs if sort == "abs" else self.values.max_rel

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": self.path,
            "what": self.what,
            "left": _entry(self.left),
            "right": _entry(self.right),
            "values": None if self.values is None else self.values.document(),
        }


def _entry(entry: Entry) -> dict[str, Any]:
    if isinstance(entry, ValueLeaf):
        return dict(text.replace_nonfinite(json_value(entry)))
    return {"key": entry.key, "dtype": entry.dtype, "shape": list(entry.shape)}


AUTO = "auto"
_SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")


@dataclass(frozen=True, slots=True)
class CheckpointAlignment:
    """Two aligned checkpoints, before any value is read.

    `left` and `right` map the names that pair entries to entries: paths, or paths of the canonical
    agent (`by`); by "conversion", one side is the result of converting it. `places` gives, for each
    side, the path of an entry in its own tree, () if it has none; for entries that fill a live model,
    the path in the model. `declared` are entries that only one side has because a conversion drops or
    adds them.
    """

    checkpoints: tuple[Checkpoint, Checkpoint]
    layouts: tuple[str | None, str | None]
    by: By
    left: Mapping[str, Entry]
    right: Mapping[str, Entry]
    places: tuple[Mapping[str, Path], Mapping[str, Path]]
    notes: tuple[str, ...]
    declared: tuple[DeclaredEntry, ...] = ()
    conversion: Reconversion | None = None
    turned: bool = False
    """whether the right side is the converted one"""

    @property
    def both(self) -> list[str]:
        """The names on both sides, in the order of the left side."""
        return [name for name in self.left if name in self.right]

    @property
    def only_left(self) -> tuple[str, ...]:
        """The names that only the left side has."""
        return tuple(name for name in self.left if name not in self.right)

    @property
    def only_right(self) -> tuple[str, ...]:
        """The names that only the right side has."""
        return tuple(name for name in self.right if name not in self.left)

    def change(self, name: str) -> ChangedEntry | None:
        """Read both sides of a name; return the difference, None if they are equal.

        Raise whatever reading raises.
        """
        return _change((name, self.left[name], self.right[name], self.by))

    def changes(
        self, progress: Progress = ignore_progress, jobs: int | None = None, ray: str | None = None
    ) -> Iterator[ChangedEntry]:
        """Read the names on both sides and yield the differences in the order of the left side."""
        if processes.is_spread(jobs, ray):
            pairs = [(name, self.left[name], self.right[name], self.by) for name in self.both]
            entries = [(pair, pair[0], pair[1].nbytes if isinstance(pair[1], Leaf) else 0) for pair in pairs]
            read = processes.map_entries(_change, entries, self.checkpoints, progress, jobs=jobs, ray=ray)
            yield from (entry for entry in read if entry is not None)
            return
        total = sum(leaf.nbytes for name in self.both if isinstance(leaf := self.left[name], Leaf))
        done = 0
        for name in self.both:
            change = self.change(name)
            if isinstance(leaf := self.left[name], Leaf):
                done += leaf.nbytes
                progress(done, total)
            if change is not None:
                yield change


def _change(pair: tuple[str, Entry, Entry, By]) -> ChangedEntry | None:
    """Return the difference of two entries with a name, None if they are equal."""
    name, left, right, by = pair
    if isinstance(left, Leaf) and isinstance(right, Leaf):
        counts = by != "path" and _is_count(left) and _is_count(right)
        return None if counts and _same_value(left, right, exact=False) else _tensors(name, left, right)
    same = _same_value(left, right, exact=by == "path")
    return None if same else ChangedEntry(name, left, right, None)


def recognize_side(checkpoint: Checkpoint, layout: str | None = None) -> ComparisonSide:
    """Return a checkpoint with its recognised agent; raise UsageError as `recognize_checkpoint` does."""
    return ComparisonSide(checkpoint, recognize_checkpoint(checkpoint, layout))


def align_checkpoints(
    first: ComparisonSide, second: ComparisonSide, *, glob: str | None = None, by: str = AUTO
) -> CheckpointAlignment:
    """Pair the entries of two checkpoints as described for `diff`.

    No values are read except an agent's own counters.
    """
    if by not in (words := (AUTO, *get_args(By))):
        raise UsageError(f"unknown pairing mode {by!r}", hint=suggest_choice(by, words))
    sides = first, second
    renamed = by == AUTO and (_differ_in_names(first, second) or _is_conversion(first, second))
    agents = first.binding is not None and second.binding is not None
    if by == "agent" or (by == AUTO and agents and (renamed or _differ_in_form(first, second))):
        return _by_agent(sides, glob)
    if by == "conversion" or renamed:
        reconverted = _reconvert_side(sides)
        if reconverted is not None and (by == "conversion" or _explains_more(*reconverted, sides)):
            return _by_conversion(sides, *reconverted, glob)
        if by == "conversion":
            raise UsageError(
                "neither checkpoint has the structure that results from converting the other one",
                file=second.checkpoint.path,
                hint="use --by path",
            )
    return _by_path(sides, glob)


def _by_path(sides: tuple[ComparisonSide, ComparisonSide], glob: str | None) -> CheckpointAlignment:
    """Pair entries by path; a save counter that only one of two formats adds is declared."""
    rows = [(side, dict(side.by_path())) for side in sides]
    declared: list[DeclaredEntry] = []
    if sides[0].checkpoint.format != sides[1].checkpoint.format:
        for word, (_, here), (_, there) in zip(_SIDES, rows, rows[::-1], strict=True):
            for name in WRITERS & (here.keys() - there.keys()):
                declared.append(DeclaredEntry(word, name, "added"))
                del here[name]
    return select_pairs((rows[0], rows[1]), "path", glob, (), declared)


def select_pairs(
    sides: tuple[tuple[ComparisonSide, Placed], tuple[ComparisonSide, Placed]],
    by: By,
    glob: str | None,
    notes: tuple[str, ...],
    declared: Iterable[DeclaredEntry] = (),
) -> CheckpointAlignment:
    """Align the entries whose names match the pattern; raise UsageError if none matches.

    Args:
        sides: both checkpoints, each with its entries by the names that `by` gives them.
        by: what the names are.
        glob: the pattern; None keeps every entry.
        notes: sentences about the pairing for the result.
        declared: entries that only one side has because of a conversion.
    """
    (first, a), (second, b) = sides
    keep = compile_glob(glob)
    if glob is not None and not any(map(keep, (*a, *b))):
        raise no_match_error(glob, [*a, *b])
    a, b = ({name: placed for name, placed in one.items() if keep(name)} for one in (a, b))
    return CheckpointAlignment(
        (first.checkpoint, second.checkpoint),
        (first.layout, second.layout),
        by,
        {name: entry for name, (entry, _) in a.items()},
        {name: entry for name, (entry, _) in b.items()},
        ({name: index for name, (_, index) in a.items()}, {name: index for name, (_, index) in b.items()}),
        notes,
        tuple(entry for entry in declared if keep(entry.path)),
    )


def _differ_in_form(first: ComparisonSide, second: ComparisonSide) -> bool:
    return (first.layout, first.checkpoint.format) != (second.layout, second.checkpoint.format)


def _differ_in_names(first: ComparisonSide, second: ComparisonSide) -> bool:
    """Return whether each side has entries that the other lacks.

    Between two formats, any difference counts; within one format, more names must differ than match.
    """
    names, others = (set(one.checkpoint.tree.names.values()) - WRITERS for one in (first, second))
    if first.checkpoint.format != second.checkpoint.format:
        return names != others
    return bool(names - others and others - names) and len(names ^ others) > len(names & others)


def _is_conversion(first: ComparisonSide, second: ComparisonSide) -> bool:
    """Return whether one side's receipt names the other's weights and their entries differ in form."""
    if _tensor_forms(first.checkpoint.tree) == _tensor_forms(second.checkpoint.tree):
        return False
    return second.is_converted_from(first) or first.is_converted_from(second)


def _tensor_forms(tree: Tree) -> dict[str, tuple[str, Shape] | None]:
    return {
        tree.names[path]: (leaf.dtype, leaf.shape) if isinstance(leaf, Leaf) else None
        for path, leaf in tree.items()
    }


def _reconvert_side(sides: tuple[ComparisonSide, ComparisonSide]) -> tuple[Reconversion, bool] | None:
    """Return the conversion of one side into the other's form, and whether the second side is converted.

    A receipt that names the other side decides which one is the source.
    """
    first, second = sides
    backwards = not second.is_converted_from(first) and first.is_converted_from(second)
    for turned in (backwards, not backwards):
        source, target = (second, first) if turned else (first, second)
        reconversion = reconvert(source, target)
        if reconversion is not None:
            return reconversion, turned
    return None


def _explains_more(reverse: Reconversion, turned: bool, sides: tuple[ComparisonSide, ComparisonSide]) -> bool:
    """Return whether the conversion shares at least as many names with the target as the source does."""
    source, target = (side.checkpoint.tree.names.values() for side in (sides[::-1] if turned else sides))
    stored = set(target)
    return len(stored & set(reverse.tree.names.values())) >= len(stored & set(source))


def _by_conversion(
    sides: tuple[ComparisonSide, ComparisonSide], reverse: Reconversion, turned: bool, glob: str | None
) -> CheckpointAlignment:
    source, target = sides[::-1] if turned else sides
    places = {there: path for path, paths in reverse.places.items() for there in paths}
    names = reverse.tree.names
    converted = {names[path]: (leaf, places.get(path, ())) for path, leaf in reverse.tree.items()}
    stored = dict(target.by_path())
    declared = list(_declared_by_receipt(reverse, source.checkpoint.tree, "right" if turned else "left"))
    for name in [name for name in stored if name not in converted and reverse.is_added(name)]:
        declared.append(DeclaredEntry("left" if turned else "right", name, "added"))
        del stored[name]
    for name in WRITERS & (converted.keys() - stored.keys()):
        declared.append(DeclaredEntry("right" if turned else "left", name, "kept"))
        del converted[name]
    for name in [name for name, (leaf, path) in converted.items() if not path and _is_disabled_switch(leaf)]:
        if name not in stored:
            del converted[name]
    for path in reverse.dropped:
        if path not in reverse.accepted:
            name = source.checkpoint.tree.names[path]
            converted.setdefault(name, (source.checkpoint.tree[path], path))
    rows = ((source, converted), (target, stored))
    pairs = rows[::-1] if turned else rows
    placed = select_pairs((pairs[0], pairs[1]), "conversion", glob, _reconversion_notes(reverse), declared)
    return replace(placed, conversion=reverse, turned=turned)


def _by_agent(sides: tuple[ComparisonSide, ComparisonSide], glob: str | None) -> CheckpointAlignment:
    """Pair two agents by meaning; entries that only one has are paired by converting one into the other."""
    first, second = sides
    a, b = (one.by_meaning(_require_agent(one)) for one in sides)
    reconverted = _reconvert_side(sides)
    if reconverted is None:
        framework_notes, a, b = _drop_framework_settings(a, b)
        return select_pairs(((first, a), (second, b)), "agent", glob, framework_notes)
    reverse, turned = reconverted
    if reverse.folded:
        return _by_conversion(sides, reverse, turned, glob)
    source, target = sides[::-1] if turned else sides
    settled = _ConversionPairing(reverse, source.checkpoint.tree, target.checkpoint.tree, turned=turned)
    converted, stored = settled.take(*((b, a) if turned else (a, b)))
    rows = ((source, converted), (target, stored))
    pairs = rows[::-1] if turned else rows
    placed = select_pairs((pairs[0], pairs[1]), "agent", glob, _reconversion_notes(reverse), settled.declared)
    return replace(placed, conversion=reverse, turned=turned)


def _reconversion_notes(reconversion: Reconversion) -> tuple[str, ...]:
    assumed = tuple(f"assumed by the conversion: {assumption}" for assumption in reconversion.assumed)
    return (*assumed, *(reconversion.notes if reconversion.by_receipt else ()))


def _declared_by_receipt(
    reconversion: Reconversion, tree: Tree, side: Literal["left", "right"]
) -> Iterator[DeclaredEntry]:
    for path in reconversion.kept:
        yield DeclaredEntry(side, tree.names[path], "kept")
    for path in reconversion.dropped:
        if path in reconversion.accepted:
            yield DeclaredEntry(side, tree.names[path], "dropped")


def _is_disabled_switch(leaf: Entry) -> bool:
    """Return whether an entry is a disabled switch, which older versions of a library do not write."""
    return isinstance(leaf, ValueLeaf) and (leaf.value is None or leaf.value is False)


class _ConversionPairing:
    """Pairs entries that only one of two agents has, through the conversion of one into the other."""

    def __init__(self, reconversion: Reconversion, source: Tree, target: Tree, *, turned: bool) -> None:
        self.reconversion, self.source, self.target = reconversion, source, target
        self.sides: tuple[Literal["left", "right"], ...] = ("right", "left") if turned else ("left", "right")
        self.declared: list[DeclaredEntry] = []
        self._paths = {name: path for path, name in target.names.items()}
        self._converted_paths = {name: path for path, name in reconversion.tree.names.items()}
        self._places = {there: path for path, paths in reconversion.places.items() for there in paths}

    def take(self, sources: Placed, targets: Placed) -> tuple[Placed, Placed]:
        """Return the entries of source and target; entries of one side are paired, declared or left alone."""
        shared = {name for name in sources.keys() & targets.keys() if self._is_shared(name, sources, targets)}
        converted = {name: self._shaped(sources[name], targets[name]) for name in sources if name in shared}
        stored = {name: entry for name, entry in targets.items() if name in shared}
        paired: set[Path] = set()
        for name, entry in sources.items():
            if name not in shared:
                paired |= self._take_source(name, entry, converted, stored, paired)
        for name, entry in targets.items():
            if name not in shared and entry[1] not in paired:
                self._take_target(name, entry, converted, stored)
        self._take_values(converted, stored, sources, targets)
        for name, path in self._converted_paths.items():
            if name in self._paths or name in WRITERS or _is_disabled_switch(self.reconversion.tree[path]):
                continue
            source = self._places.get(path, ())
            # One source number may have several places in the target: report a missing place even if another
            # one is paired.
            if not source or any(self._there(path) is not None for path in self.reconversion.places[source]):
                converted.setdefault(name, (self.reconversion.tree[path], source))
        return converted, stored

    def _is_shared(self, name: str, sources: Placed, targets: Placed) -> bool:
        """Return whether entries of one name match; outside the agent, the conversion decides."""
        path, target_path = sources[name][1], targets[name][1]
        if self.source.names.get(path) != name or self.target.names.get(target_path) != name:
            return True
        own = self._converted_paths.get(name)
        return (
            not self.reconversion.is_added(name)
            if own is None
            else own in self.reconversion.places.get(path, ())
        )

    def _shaped(self, entry: tuple[Entry, Path], target: tuple[Entry, Path]) -> tuple[Entry, Path]:
        """Return the source's entry, converted if the target's shape differs."""
        leaf, path = entry
        if not isinstance(leaf, Leaf) or not isinstance(target[0], Leaf) or leaf.shape == target[0].shape:
            return entry
        converted = self._converted_paths.get(self.target.names.get(target[1], ""))
        return (
            (self.reconversion.tree[converted], path)
            if converted in self.reconversion.places.get(path, ()) and converted is not None
            else entry
        )

    def _take_source(
        self,
        name: str,
        entry: tuple[Entry, Path],
        converted: dict[str, tuple[Entry, Path]],
        stored: dict[str, tuple[Entry, Path]],
        paired: set[Path],
    ) -> set[Path]:
        """Add a source entry with the target entries that it becomes; return the paths of the latter."""
        places = {path: self._there(path) for path in self.reconversion.places.get(entry[1], ())}
        there = {path: target for path, target in places.items() if target is not None}
        fresh = {path: target for path, target in there.items() if target not in paired}
        for number, (path, target) in enumerate(fresh.items()):
            title = name if not number else f"{name} ({self.target.names[target]})"
            converted[title] = self.reconversion.tree[path], entry[1]
            stored[title] = self.target[target], target
        if not there and not self._declares(name, entry[1]):
            converted[name] = entry
        return set(fresh.values())

    def _take_target(
        self,
        name: str,
        entry: tuple[Entry, Path],
        converted: dict[str, tuple[Entry, Path]],
        stored: dict[str, tuple[Entry, Path]],
    ) -> None:
        """Add a target entry, paired with the conversion's entry of the same name, if any."""
        converted_path = self._converted_paths.get(self.target.names.get(entry[1], ""))
        if converted_path is not None:
            converted[name] = self.reconversion.tree[converted_path], self._places.get(converted_path, ())
            stored[name] = self.target[entry[1]], entry[1]
        elif self.reconversion.is_added(self.target.names.get(entry[1], "")):
            self.declared.append(DeclaredEntry(self.sides[1], name, "added"))
        else:
            stored[name] = entry

    def _take_values(
        self,
        converted: dict[str, tuple[Entry, Path]],
        stored: dict[str, tuple[Entry, Path]],
        sources: Placed,
        targets: Placed,
    ) -> None:
        """Add the plain values outside the agents, paired with those of the conversion."""
        known = {path for _, path in (*targets.values(), *stored.values())}
        for path, leaf in self.target.plain():
            name = self.target.names[path]
            if path in known or name in stored:
                continue
            converted_path = self._converted_paths.get(name)
            if converted_path is None and self.reconversion.is_added(name):
                self.declared.append(DeclaredEntry(self.sides[1], name, "added"))
                continue
            stored[name] = leaf, path
            if converted_path is not None:
                converted.setdefault(
                    name, (self.reconversion.tree[converted_path], self._places.get(converted_path, ()))
                )
        known = {path for _, path in (*sources.values(), *converted.values())}
        for path, leaf in self.source.plain():
            name = self.source.names[path]
            if path in known or path in self.reconversion.places or name in converted:
                continue
            if not self._declares(name, path):
                converted[name] = leaf, path

    def _there(self, path: Path) -> Path | None:
        """Return the path in the target of an entry of the conversion."""
        return self._paths.get(self.reconversion.tree.names[path])

    def _declares(self, name: str, path: Path) -> bool:
        """Return whether the conversion drops or keeps the entry by declaration, and record that."""
        lost = path in self.reconversion.dropped and path not in self.reconversion.accepted
        if name not in WRITERS and (lost or path in self.reconversion.places):
            return False
        self.declared.append(
            DeclaredEntry(self.sides[0], name, "dropped" if path in self.reconversion.dropped else "kept")
        )
        return True


def _require_agent(side: ComparisonSide) -> RecognizedAgent:
    if side.binding is None:
        raise UsageError(
            "no layout recognises an agent in this checkpoint",
            file=side.checkpoint.path,
            hint="use --by path",
        )
    return side.binding


def _drop_framework_settings(a: Placed, b: Placed) -> tuple[tuple[str, ...], Placed, Placed]:
    """Return both sides without settings that only one framework stores, and a note that lists them.

    Settings are values: PyTorch optimizers store all of theirs, TensorFlow only those that are
    variables.
    """
    notes = []
    kept = []
    for word, here, there in (("left", a, b), ("right", b, a)):
        alone = {n for n in here if n not in there and (isinstance(here[n][0], ValueLeaf) or n in WRITERS)}
        if alone:
            names = ", ".join(sorted({name.rpartition("/")[2] for name in alone}))
            notes.append(f"settings present only on the {word} side: {names}")
        kept.append({name: entry for name, entry in here.items() if name not in alone})
    return tuple(notes), kept[0], kept[1]


def _tensors(name: str, left: Leaf, right: Leaf) -> ChangedEntry | None:
    try:
        values = compare_leaves(left, right) if left.shape == right.shape else None
    except CkpttoolError as error:
        raise error.located(path=name) from error
    same = values is None and (left.dtype, left.shape) == (right.dtype, right.shape)
    return None if same else ChangedEntry(name, left, right, values)


def _is_count(leaf: Leaf) -> bool:
    """Return whether a tensor is a single integer, which libraries store in different integer widths."""
    return not leaf.shape and "int" in leaf.dtype


def _same_value(left: Entry, right: Entry, *, exact: bool) -> bool:
    """Return whether two plain values are equal; by meaning also as float32 numbers and as tensors."""
    first, second = (_comparable_value(entry, exact=exact) for entry in (left, right))
    if first == second:
        return exact is False or type(first) is type(second)
    if isinstance(first, float) and isinstance(second, float):
        if math.isnan(first) and math.isnan(second):
            return True
        return not exact and round_to_float32(first) == round_to_float32(second)
    return False


def _comparable_value(entry: Entry, *, exact: bool) -> Plain | tuple[str, Shape]:
    if isinstance(entry, ValueLeaf):
        number = isinstance(entry.value, int | float) and not isinstance(entry.value, bool)
        return float(entry.value) if number and not exact else entry.value  # type: ignore[arg-type]
    if entry.shape or entry.dtype == "string":
        return (entry.dtype, entry.shape)
    return float(entry.array()) if not exact else (entry.dtype, entry.shape)


# The `format` of a live model.
LIVE = "live"


def is_live(side: Any) -> bool:
    """Return whether a side is neither a path nor an opened checkpoint."""
    return not isinstance(side, str | os.PathLike | Checkpoint)


def align_live_model(
    left: Any, right: Any, *, glob: str | None, by: str, layout: str | None, part: str | None
) -> CheckpointAlignment:
    """Pair the tensors of a live model with those of a checkpoint or of another live model.

    Raise UsageError for an object that is not a model.

    Args:
        left: a live model, checkpoint or path.
        right: the same; at least one of both is a model.
        glob: a pattern for names.
        by: "path", or "model" to pair the model's names with the entries that would fill it, from any
            framework. "auto" pairs by path if the other side has all of the model's names, and by model if it
            lacks one or if a `part` or `layout` is given.
        layout: read the checkpoint as an agent of this layout.
        part: use what lies under this path of the checkpoint.
    """
    if by not in (AUTO, "path", "model"):
        raise UsageError(f"a live model cannot be compared by {by}", hint="choose path or model")
    if is_live(left) and is_live(right):
        if by == "model" or part is not None:
            raise UsageError("two live models can be compared only by path")
        first, second = (_live_side(LiveModel(side)) for side in (left, right))
        return select_pairs(((first, first.by_path()), (second, second.by_path())), "path", glob, ())
    turned = is_live(left)
    model, checkpoint = LiveModel(left if turned else right), ensure_open(right if turned else left)
    live, other = _live_side(model), ComparisonSide(checkpoint, None)
    named, stored = live.by_path(), other.by_path()
    known = all(name in stored for name in named)
    chosen: By = "model" if by == "model" or (by == AUTO and (part or layout or not known)) else "path"
    notes: tuple[str, ...] = ()
    if chosen == "model":
        met = plan_model_fill(model, checkpoint, FillOptions(layout=layout, part=part))
        names, fill_source = met.skeleton.names, met.prepared
        filled: Placed = {names[path]: (leaf, path) for path, leaf in met.values.items()}
        # Entries that the model has no place for keep their names from the checkpoint.
        unused = {path: fill_source.names[path] for path in met.filling.unused}
        left_over = {
            f"{name} (in the checkpoint)": (fill_source.tree[path], path) for path, name in unused.items()
        }
        stored = {**filled, **left_over}
        notes = (*met.filling.assumed, *met.prepared.notes)
    one, another = (other, stored), (live, named)
    return select_pairs((another, one) if turned else (one, another), chosen, glob, notes)


def _live_side(model: LiveModel) -> ComparisonSide:
    return ComparisonSide(Checkpoint(model.title, LIVE, model.skeleton().tree, ()), None)
