"""A live model beside a checkpoint, entry by entry: by their names, or by what would fill the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import UsageError
from ckpttool.globs import matcher
from ckpttool.leaf import Path
from ckpttool.ops.difference import By, Entry
from ckpttool.ops.live_model import LiveModel
from ckpttool.ops.load_into import meeting, opened
from ckpttool.ops.side_by_side import AUTO, Laid

# What a live model has where a checkpoint has a format.
LIVE = "live"
_Named = tuple[Mapping[str, Entry], Mapping[str, Path]]


def is_live(side: Any) -> bool:
    """Say whether a side is neither a path nor a checkpoint that was opened."""
    return not isinstance(side, str | os.PathLike | Checkpoint)


def laid_beside(
    left: Any, right: Any, *, glob: str | None, by: str, layout: str | None, part: str | None
) -> Laid:
    """Pair the tensors of a live model with those of a checkpoint, or of another live model.

    `by` is "path", or "model": what would fill the model, of whatever framework, by the model's names;
    "auto" is by path where the other side has all of the model's names, and by model where it lacks one, or
    where a `part` or `layout` is named. Raise UsageError for what is no model.
    """
    if by not in (AUTO, "path", "model"):
        raise UsageError(f"a live model is not compared by {by}", hint="by path or by model")
    if is_live(left) and is_live(right):
        if by == "model" or part is not None:
            raise UsageError("two live models are compared by path")
        sides = [_as_checkpoint(LiveModel(side)) for side in (left, right)]
        return _laid(sides, "path", [_by_path(side) for side in sides], (), glob)
    turned = is_live(left)
    model, checkpoint = LiveModel(left if turned else right), opened(right if turned else left)
    live = _as_checkpoint(model)
    named, stored = _by_path(live), _by_path(checkpoint)
    known = all(name in stored[0] for name in named[0])
    chosen: By = "model" if by == "model" or (by == AUTO and (part or layout or not known)) else "path"
    notes: tuple[str, ...] = ()
    if chosen == "model":
        met = meeting(model, checkpoint, layout=layout, part=part)
        names, given = met.skeleton.names, met.given
        filled: dict[str, Entry] = {names[path]: leaf for path, leaf in met.values.items()}
        # What the model has no place for keeps the name that it has in the checkpoint.
        unused = {path: given.names[path] for path in met.filling.unused}
        filled |= {f"{name} (in the checkpoint)": given.tree[path] for path, name in unused.items()}
        stored = filled, {name: path for path, name in checkpoint.tree.names.items()}
        notes = (*met.filling.assumed, *met.given.notes)
    sides, both = [checkpoint, live], [stored, named]
    return _laid(sides[::-1] if turned else sides, chosen, both[::-1] if turned else both, notes, glob)


def _as_checkpoint(model: LiveModel) -> Checkpoint:
    return Checkpoint(model.title, LIVE, model.skeleton().tree, ())


def _by_path(checkpoint: Checkpoint) -> _Named:
    tree = checkpoint.tree
    return {name: tree[path] for path, name in tree.names.items()}, {n: p for p, n in tree.names.items()}


def _laid(
    sides: list[Checkpoint], by: By, named: list[_Named], notes: tuple[str, ...], glob: str | None
) -> Laid:
    keep = matcher(glob)
    (a, places_a), (b, places_b) = (
        ({n: e for n, e in entries.items() if keep(n)}, {n: p for n, p in places.items() if keep(n)})
        for entries, places in named
    )
    return Laid((sides[0], sides[1]), (None, None), by, a, b, (places_a, places_b), notes)
