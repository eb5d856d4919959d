"""`diff`: what two checkpoints hold that is not the same, by path or, across frameworks, by meaning."""

from __future__ import annotations

from typing import Any, cast, get_args

from ckpttool import urls
from ckpttool.errors import UsageError, choice
from ckpttool.leaf import Leaf
from ckpttool.ops.difference import Diff, Sort
from ckpttool.ops.load_into import opened
from ckpttool.ops.model_side import is_live, laid_beside
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.side_by_side import AUTO, Laid, laid, side


def diff(
    left: Any,
    right: Any,
    *,
    glob: str | None = None,
    by: str = AUTO,
    sort: str = "abs",
    layout: str | None = None,
    part: str | None = None,
    progress: Progress = silent,
) -> Diff:
    """Compare two checkpoints, or a checkpoint and a live model, a tensor of each side at a time.

    A side is a path, an opened Checkpoint, or a torch.nn.Module, tf.Module or Keras model. `by` is "path",
    "agent" (both must be agents that a layout knows; `layout` names that of the left one), "model" (what of
    the checkpoint would fill the live model, as load_into fills it; `part` and `layout` as there) or "auto":
    by meaning where the two are agents of different formats or layouts, by model where a live one has names
    that the checkpoint lacks, else by path. `glob` keeps the entries whose path matches, `sort` says what
    makes a change big. Raise what opening and reading raise, with the entry's path.
    """
    if sort not in get_args(Sort):
        raise UsageError(f"{sort!r} is not known", hint=choice(sort, get_args(Sort)))
    if is_live(left) or is_live(right):
        found = laid_beside(left, right, glob=glob, by=by, layout=layout, part=part)
    elif part is not None or by == "model":
        raise UsageError("a part, and by model, are for a checkpoint beside a live model")
    else:
        found = laid(side(opened(left), layout), side(opened(right)), glob=glob, by=by)
    return difference(found, cast(Sort, sort), progress)


def difference(found: Laid, sort: Sort = "abs", progress: Progress = silent) -> Diff:
    """Return what is not the same of what lies side by side; both sides are read, a tensor at a time."""
    changed = tuple(found.changes(progress))
    told = found.notes
    if found.by == "agent" and changed:
        told = (*told, "paths and indices are those of the canonical agent: dense kernels are [in, out]")
    both = sum(isinstance(found.left[name], Leaf) for name in found.both)
    first, second = found.checkpoints
    return Diff(
        urls.spelled(first.path),
        urls.spelled(second.path),
        (first.format, second.format),
        found.layouts,
        found.by,
        both - sum(isinstance(each.left, Leaf) for each in changed),
        tuple(sorted(changed, key=lambda each: each.distance(sort), reverse=True)),
        found.only_left,
        found.only_right,
        told,
        found.declared,
    )
