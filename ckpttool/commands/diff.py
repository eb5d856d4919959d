"""Compare two checkpoints."""

from __future__ import annotations

from typing import Any, cast, get_args

from ckpttool.conversion.alignment import (
    AUTO,
    By,
    ChangedEntry,
    CheckpointAlignment,
    DeclaredEntry,
    Sort,
    align_checkpoints,
    align_live_model,
    is_live,
    recognize_side,
)
from ckpttool.core import urls
from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import UsageError, suggest_choice
from ckpttool.core.source import keep_open
from ckpttool.core.text import describe_record, render_record
from ckpttool.core.tree import Leaf
from ckpttool.formats.detect import ensure_open


@dataclass(frozen=True, slots=True)
class Diff:
    """Comparison of two checkpoints.

    `by` is how entries are paired: by path, by meaning in agents of `layouts`, by what fills a live
    model, or after converting one side to the other's form. `equal` counts the tensors that are
    equal, `only_left` and `only_right` name the entries that only one has, `declared` those that a
    conversion declares.
    """

    __repr__ = describe_record
    _repr_html_ = render_record

    left: str
    right: str
    formats: tuple[str, str]
    layouts: tuple[str | None, str | None]
    by: By
    equal: int
    changed: tuple[ChangedEntry, ...]
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    notes: tuple[str, ...]
    declared: tuple[DeclaredEntry, ...] = ()

    @property
    def identical(self) -> bool:
        """Return whether no difference was found."""
        return not (self.changed or self.only_left or self.only_right)

    @property
    def resized(self) -> bool:
        """Return whether any weight has another shape."""
        weights = (change.left for change in self.changed if change.what == "shape")
        return any(isinstance(weight, Leaf) and weight.role == "parameter" for weight in weights)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "left": {"path": self.left, "format": self.formats[0], "layout": self.layouts[0]},
            "right": {"path": self.right, "format": self.formats[1], "layout": self.layouts[1]},
            "by": self.by,
            "identical": self.identical,
            "equal": self.equal,
            "changed": [entry.document() for entry in self.changed],
            "only_left": list(self.only_left),
            "only_right": list(self.only_right),
            "declared": [entry.document() for entry in self.declared],
            "notes": list(self.notes),
        }


def diff(
    left: Any,
    right: Any,
    *,
    glob: str | None = None,
    by: str = AUTO,
    sort: str = "abs",
    layout: str | None = None,
    part: str | None = None,
    progress: Progress = ignore_progress,
) -> Diff:
    """Compare two checkpoints, or a checkpoint and a live model, one tensor per side at a time.

    Raise whatever opening and reading raise, with the entry's path.

    Args:
        left: a path, an opened Checkpoint, or a torch.nn.Module, tf.Module or Keras model.
        right: the other side.
        glob: keeps the entries whose path matches.
        by: "path", "agent" (layouts must recognise an agent on both sides), "model" (entries that would fill
            the live model, as load_into does) or "auto": by meaning if both are agents of different formats
            or layouts, by model if a live model has names that the checkpoint lacks, else by path.
        sort: the measure of a change's size.
        layout: the layout of the left agent, or of the one that would fill the model.
        part: as for load_into.
        progress: called with the finished and the total amount of work.

    >>> import ckpttool
    >>> run = "sample_ckpts/td3_pendulum_torch"
    >>> changes = ckpttool.diff(f"{run}/ckpt-12500.pt", f"{run}/ckpt-15000.pt", glob="actor/**")
    >>> len(changes.changed), changes.equal, changes.identical
    (6, 0, False)
    """
    if is_live(left) or is_live(right):
        alignment = align_live_model(left, right, glob=glob, by=by, layout=layout, part=part)
    elif part is not None or by == "model":
        raise UsageError("part and comparison by model require a checkpoint and a live model")
    else:
        alignment = align(left, right, glob=glob, by=by, layout=layout)
    return compare_alignment(alignment, sort, progress)


@keep_open()
def align(
    left: Any, right: Any, *, glob: str | None = None, by: str = AUTO, layout: str | None = None
) -> CheckpointAlignment:
    """Open and pair two checkpoints as `diff` does.

    Args:
        left: a checkpoint or a path.
        right: the one that it is compared with.
        glob: a pattern for the paths of entries.
        by: how entries are paired; "auto" decides by what both sides are.
        layout: the layout of the agent on the left.
    """
    sides = recognize_side(ensure_open(left), layout), recognize_side(ensure_open(right))
    return align_checkpoints(*sides, glob=glob, by=by)


@keep_open()
def compare_alignment(
    alignment: CheckpointAlignment,
    sort: str = "abs",
    progress: Progress = ignore_progress,
    jobs: int | None = None,
    ray: str | None = None,
) -> Diff:
    """Return the differences between aligned checkpoints; both are read, one tensor at a time.

    Raise UsageError for an unknown `sort`.

    Args:
        alignment: the pairs.
        sort: the measure by which changed entries are ordered, largest first.
        progress: called with the bytes read so far, and all.
        jobs: processes that read.
        ray: address of the Ray cluster whose processes read instead.
    """
    if sort not in get_args(Sort):
        raise UsageError(f"unknown sort key {sort!r}", hint=suggest_choice(sort, get_args(Sort)))
    changed = tuple(alignment.changes(progress, jobs, ray))
    notes = alignment.notes
    if alignment.by == "agent" and changed:
        notes = (*notes, "paths and indices refer to the canonical agent: dense kernels are [in, out]")
    both = sum(isinstance(alignment.left[name], Leaf) for name in alignment.both)
    first, second = alignment.checkpoints
    return Diff(
        urls.display_url(first.path),
        urls.display_url(second.path),
        (first.format, second.format),
        alignment.layouts,
        alignment.by,
        both - sum(isinstance(entry.left, Leaf) for entry in changed),
        tuple(sorted(changed, key=lambda entry: entry.distance(cast(Sort, sort)), reverse=True)),
        alignment.only_left,
        alignment.only_right,
        notes,
        alignment.declared,
    )
