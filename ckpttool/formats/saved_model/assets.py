"""The other files of a SavedModel's folder: listed by name, never opened, never followed outside."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Sequence

from ckpttool import places
from ckpttool.errors import some

FOLDER = "assets"
# tensorflow/core/protobuf/fingerprint.proto; tf_agents/policies/policy_saver.py of tensorflow/agents.
_NOTICED = ("fingerprint.pb", "keras_metadata.pb", "policy_specs.pbtxt", "saved_model.pbtxt")
MAX_LISTED = 1000
_SHOWN = 3


def beside(folder: str) -> list[str]:
    """Return which of the files that tools put beside the graph are there."""
    return [name for name in _NOTICED if places.lexists(os.path.join(folder, name))]


def listed(folder: str, declared: Sequence[str], notes: list[str]) -> list[str]:
    """Return the names of the graph's assets and of the files in assets/; note what is odd about them."""
    outside = [name for name in declared if not _inside(name)]
    if outside:
        notes.append(
            f"the graph names assets outside of the folder, which are not looked at: {some(outside, _SHOWN)}"
        )
    top = os.path.join(folder, FOLDER)
    present: list[str] = []
    if places.islink(top):
        notes.append(f"{FOLDER}/ is a link, which is not followed")
    else:
        present = sorted(_walk(top))
        missing = sorted({name for name in declared if _inside(name)} - set(present))
        if missing and len(present) < MAX_LISTED:
            notes.append(f"assets are missing from {FOLDER}/: {some(missing, _SHOWN)}")
    found = list(dict.fromkeys([*declared, *present]))
    if len(found) > MAX_LISTED:
        notes.append(f"only the first {MAX_LISTED:,} assets are listed")
    return found[:MAX_LISTED]


def _inside(name: str) -> bool:
    parts = posixpath.normpath(name).split("/")
    return bool(name) and "\0" not in name and not name.startswith("/") and parts[0] != ".."


def _walk(top: str) -> Iterator[str]:
    count = 0
    for folder, files in places.walk(top):
        for name in files:
            yield os.path.relpath(os.path.join(folder, name), top)
            count += 1
            if count > MAX_LISTED:
                return
