"""Record of a good checkpoint, as saved by `inspect --json`, and the differences of another one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from ckpttool.core import text
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import FormatError, NotFoundError
from ckpttool.core.text import natural_sort_key
from ckpttool.listing.findings import Finding

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class ShapeRecord:
    """Tensor names, types and shapes of a checkpoint, and its layout, as saved by `inspect --json`."""

    layout: str | None
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]


def read_shape_record(file: str) -> ShapeRecord:
    """Return the record that `inspect --json` saved.

    Raise NotFoundError for a missing file, and FormatError for another kind of document.
    """
    if not os.path.isfile(file):
        hint = f"ckpttool inspect PATH --json > {file} records the shapes of PATH"
        raise NotFoundError("file of recorded shapes not found", file=file, hint=hint)
    saved = text.load_json(file, "the recorded listing")
    try:
        forms = [(str(row["path"]), str(row["dtype"]), row["shape"]) for row in saved["tensors"]]
        tensors = {name: (dtype, tuple(map(int, shape))) for name, dtype, shape in forms}
        return ShapeRecord(None if saved["layout"] is None else str(saved["layout"]), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError("not a document written by ckpttool inspect --json", file=file) from error


def find_drift(checkpoint: Checkpoint, layout: str | None, was: ShapeRecord) -> Iterator[Finding]:
    """Yield a finding for each difference from the record: layout, names, types, shapes.

    If the layout differs, all names differ, so only their number is reported.
    """
    shown = _SHOWN
    if was.layout is not None and layout != was.layout:
        yield Finding("layout", f"the layout is {layout or 'unknown'}, but {was.layout} is recorded")
        shown = 0
    tree = checkpoint.tree
    now = {tree.names[path]: (leaf.dtype, tuple(leaf.shape)) for path, leaf in tree.tensors()}
    changed = sorted(
        (n for n in {**was.tensors, **now} if was.tensors.get(n) != now.get(n)), key=natural_sort_key
    )
    for name in changed[:shown]:
        before, after = (_format_recorded(record.get(name)) for record in (was.tensors, now))
        yield Finding("layout", f"{name}: found {after}, recorded {before}")
    if len(changed) > shown:
        more = "more " if shown else ""
        yield Finding("layout", f"{len(changed) - shown:,} {more}tensors differ from the record")


def _format_recorded(form: tuple[str, tuple[int, ...]] | None) -> str:
    return "no tensor" if form is None else f"{form[0]}{list(form[1])}"
