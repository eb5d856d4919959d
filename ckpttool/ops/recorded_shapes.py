"""What a good checkpoint looks like, as `inspect --json` saved it, and where another one differs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckpttool import documents
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import FormatError, NotFoundError
from ckpttool.ops.findings import Finding
from ckpttool.ops.rows import natural

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Recorded:
    """The names, types and shapes of a checkpoint as `inspect --json` saved them, and its layout."""

    layout: str | None
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]


def recorded(file: str) -> Recorded:
    """Return what `inspect --json` saved; raise NotFoundError, and FormatError for another document."""
    if not os.path.isfile(file):
        hint = f"ckpttool inspect PATH --json > {file} records those of PATH"
        raise NotFoundError("there are no recorded shapes", file=file, hint=hint)
    saved = documents.load(file, "the recorded listing")
    try:
        forms = [(str(each["path"]), str(each["dtype"]), each["shape"]) for each in saved["tensors"]]
        tensors = {name: (dtype, tuple(map(int, shape))) for name, dtype, shape in forms}
        return Recorded(None if saved["layout"] is None else str(saved["layout"]), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError("this is no document of ckpttool inspect --json", file=file) from error


def drift(checkpoint: Checkpoint, layout: str | None, was: Recorded) -> Iterator[Finding]:
    """Give what is not as it was recorded: layout, names, types, shapes.

    Of another layout every name is another one: then only how many.
    """
    shown = _SHOWN
    if was.layout is not None and layout != was.layout:
        yield Finding("layout", f"its layout is {layout or 'none that is known'}, recorded is {was.layout}")
        shown = 0
    tree = checkpoint.tree
    now = {tree.names[path]: (leaf.dtype, tuple(leaf.shape)) for path, leaf in tree.tensors()}
    changed = sorted((n for n in {**was.tensors, **now} if was.tensors.get(n) != now.get(n)), key=natural)
    for name in changed[:shown]:
        before, after = (_form(each.get(name)) for each in (was.tensors, now))
        yield Finding("layout", f"{name}: {after}, recorded is {before}")
    if len(changed) > shown:
        more = "more " if shown else ""
        yield Finding("layout", f"{len(changed) - shown:,} {more}tensors are not as recorded")


def _form(form: tuple[str, tuple[int, ...]] | None) -> str:
    return "no such tensor" if form is None else f"{form[0]}{list(form[1])}"
