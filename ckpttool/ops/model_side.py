"""A live model beside a checkpoint, entry by entry: by their names, or by what would fill the model."""

from __future__ import annotations

import os
from typing import Any

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import UsageError
from ckpttool.ops.difference import By
from ckpttool.ops.live_model import LiveModel
from ckpttool.ops.load_into import meeting, opened
from ckpttool.ops.side_by_side import AUTO, Laid, Placed, Side, paired

# What a live model has where a checkpoint has a format.
LIVE = "live"


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
        first, second = (_as_side(LiveModel(side)) for side in (left, right))
        return paired(((first, first.by_path()), (second, second.by_path())), "path", glob, ())
    turned = is_live(left)
    model, checkpoint = LiveModel(left if turned else right), opened(right if turned else left)
    live, other = _as_side(model), Side(checkpoint, None)
    named, stored = live.by_path(), other.by_path()
    known = all(name in stored for name in named)
    chosen: By = "model" if by == "model" or (by == AUTO and (part or layout or not known)) else "path"
    notes: tuple[str, ...] = ()
    if chosen == "model":
        met = meeting(model, checkpoint, layout=layout, part=part)
        names, given = met.skeleton.names, met.given
        filled: Placed = {names[path]: (leaf, path) for path, leaf in met.values.items()}
        # What the model has no place for keeps the name that it has in the checkpoint.
        unused = {path: given.names[path] for path in met.filling.unused}
        left_over = {f"{name} (in the checkpoint)": (given.tree[path], path) for path, name in unused.items()}
        stored = {**filled, **left_over}
        notes = (*met.filling.assumed, *met.given.notes)
    one, another = (other, stored), (live, named)
    return paired((another, one) if turned else (one, another), chosen, glob, notes)


def _as_side(model: LiveModel) -> Side:
    return Side(Checkpoint(model.title, LIVE, model.skeleton().tree, ()), None)
