"""From what a torch pickle says to what is listed of its file, the same for every container."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttool.checkpoint import Integrity
from ckpttool.formats.listed import Listed
from ckpttool.formats.torch_pickle import owners
from ckpttool.formats.torch_pickle.tree import Members, Usage, Walk
from ckpttool.wire.pickle_reader import Read


def listed(
    pickled: Read,
    writer: str,
    *,
    big: bool = False,
    integrity: Integrity = "none",
    notes: tuple[str, ...] = (),
    details: Mapping[str, Any] | None = None,
    classes: Mapping[str, Members] | None = None,
) -> Listed:
    """Return the tree of a pickle whose storages have been found, with what a person should know of it.

    `big` says that the storages are big-endian, `classes` what the attributes of some classes are.
    """
    walk = Walk(big=big, size=pickled.end, classes=classes)
    found = owners.joined(walk.tree(pickled.value))
    told = (*_notes(walk), *found.notes, *notes)
    facts = dict(details or {})
    if walk.attributes:
        facts["attributes"] = walk.attributes
    return Listed(found.tree, writer, integrity, told, facts, pickled.asked)


def _notes(walk: Walk) -> tuple[str, ...]:
    notes = []
    kept = [u for u in walk.usage.values() if u.used < u.stored]
    if kept:
        total = Usage(sum(u.stored for u in kept), sum(u.used for u in kept))
        what = "a view keeps a larger storage" if len(kept) == 1 else "views keep larger storages"
        notes.append(f"{what}: {total.stored:,} bytes stored for {total.used:,} used")
    if walk.attributes:
        notes.append(f"tensors with attributes of their own, listed by --json: {len(walk.attributes):,}")
    return tuple(notes)
