"""`diff`: what two checkpoints hold that is not the same, by path or, across frameworks, by meaning."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast, get_args

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, UsageError, choice
from ckpttool.formats.resolve import open_checkpoint
from ckpttool.layouts.canonical import Binding
from ckpttool.layouts.recognise import recognise
from ckpttool.leaf import Leaf, Plain, ValueLeaf, display
from ckpttool.ops.array_difference import compared
from ckpttool.ops.difference import By, Changed, Diff, Entry, Sort
from ckpttool.ops.globs import matcher
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.restore import canonical_tree
from ckpttool.source import Shape

AUTO = "auto"
# What a checkpoint counts of itself, and no agent has.
_OF_THE_FILE = frozenset(("save_counter",))


@dataclass(frozen=True, slots=True)
class _Side:
    checkpoint: Checkpoint
    binding: Binding | None

    @property
    def layout(self) -> str | None:
        return None if self.binding is None else self.binding.layout

    def by_path(self) -> dict[str, Entry]:
        """Return all entries by their display paths."""
        tree = self.checkpoint.tree
        return {tree.names[path]: leaf for path, leaf in tree.items()}

    def by_meaning(self, binding: Binding) -> dict[str, Entry]:
        """Return the agent's entries by their canonical paths, and other tensors by their own."""
        tree = self.checkpoint.tree
        agent = {display(path): leaf for path, leaf in canonical_tree(tree, binding.moves).items()}
        bound = {move.source for move in binding.moves.moves}
        rest = {tree.names[path]: leaf for path, leaf in tree.tensors() if path not in bound}
        return {**rest, **agent}


def diff(
    left: str,
    right: str,
    *,
    glob: str | None = None,
    by: str = AUTO,
    sort: str = "abs",
    layout: str | None = None,
    progress: Progress = silent,
) -> Diff:
    """Compare what is at two paths, a tensor of each side at a time.

    `by` is "path", "agent" (both must be agents that a layout knows; `layout` names that of the left one) or
    "auto": by meaning where the two are agents of different formats or layouts, else by path. `glob` keeps
    the entries whose path matches, `sort` says what makes a change big. Raise what opening and reading raise,
    with the entry's path.
    """
    for word, known in ((by, (AUTO, *get_args(By))), (sort, get_args(Sort))):
        if word not in known:
            raise UsageError(f"{word!r} is not known", hint=choice(word, known))
    sides = [_side(path, layout if at == 0 else None) for at, path in enumerate((left, right))]
    first, second = sides
    chosen: By = "agent" if by == "agent" or (by == AUTO and _differ_in_form(first, second)) else "path"
    told: tuple[str, ...] = ()
    if chosen == "agent":
        a, b = (side.by_meaning(_agent(side)) for side in sides)
        told, a, b = _settings_aside(a, b)
    else:
        a, b = (side.by_path() for side in sides)
    keep = matcher(glob)
    a, b = ({name: leaf for name, leaf in one.items() if keep(name)} for one in (a, b))
    changed = tuple(_changed(a, b, chosen, progress))
    if chosen == "agent" and changed:
        told = (*told, "paths and indices are those of the canonical agent: dense kernels are [in, out]")
    both = sum(isinstance(a[name], Leaf) for name in a if name in b)
    return Diff(
        first.checkpoint.path,
        second.checkpoint.path,
        (first.checkpoint.format, second.checkpoint.format),
        (first.layout, second.layout),
        chosen,
        both - sum(isinstance(each.left, Leaf) for each in changed),
        tuple(sorted(changed, key=lambda each: each.distance(cast(Sort, sort)), reverse=True)),
        tuple(name for name in a if name not in b),
        tuple(name for name in b if name not in a),
        told,
    )


def _side(path: str, layout: str | None) -> _Side:
    checkpoint = open_checkpoint(path)
    return _Side(checkpoint, recognise(checkpoint.tree, os.path.basename(checkpoint.path), layout))


def _differ_in_form(first: _Side, second: _Side) -> bool:
    if first.binding is None or second.binding is None:
        return False
    return (first.layout, first.checkpoint.format) != (second.layout, second.checkpoint.format)


def _agent(side: _Side) -> Binding:
    if side.binding is None:
        raise UsageError(
            "no layout recognises an agent in this checkpoint", file=side.checkpoint.path, hint="--by path"
        )
    return side.binding


def _settings_aside(
    a: Mapping[str, Entry], b: Mapping[str, Entry]
) -> tuple[tuple[str, ...], dict[str, Entry], dict[str, Entry]]:
    """Return both without what only one framework writes down, and a note that says what that is.

    Settings are values: PyTorch's optimizers name all of theirs, TensorFlow's those that are variables.
    """
    notes = []
    kept = []
    for word, here, there in (("left", a, b), ("right", b, a)):
        alone = [n for n in here if n not in there and (isinstance(here[n], ValueLeaf) or n in _OF_THE_FILE)]
        if alone:
            names = ", ".join(sorted({name.rpartition("/")[2] for name in alone}))
            notes.append(f"only the {word} one writes down {names}")
        kept.append({name: leaf for name, leaf in here.items() if name not in alone})
    return tuple(notes), kept[0], kept[1]


def _changed(a: Mapping[str, Entry], b: Mapping[str, Entry], by: By, progress: Progress) -> Iterator[Changed]:
    both = [name for name in a if name in b]
    total = sum(leaf.nbytes for name in both if isinstance(leaf := a[name], Leaf))
    done = 0
    for name in both:
        left, right = a[name], b[name]
        if isinstance(left, Leaf) and isinstance(right, Leaf):
            found = _tensors(name, left, right)
            done += left.nbytes
            progress(done, total)
        else:
            found = None if _same_value(left, right, exact=by == "path") else Changed(name, left, right, None)
        if found is not None:
            yield found


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
