"""Which TensorFlow checkpoint a path means: a prefix, its index, a shard, a state file, or a folder."""

from __future__ import annotations

import os

from ckpttool import places
from ckpttool.errors import TruncatedError
from ckpttool.formats import checkpoint_state, saver_paths
from ckpttool.formats.probe import Probe
from ckpttool.wire import sstable


def prefix(probe: Probe) -> str | None:
    """Return the prefix that the path means; None when it means no tensor bundle."""
    if probe.kind == "missing":
        return _of_prefix(probe)
    if probe.kind == "folder":
        return _of_folder(probe)
    return _of_file(probe) if probe.kind == "file" else None


def _of_prefix(probe: Probe) -> str | None:
    # A web server may tell no names.
    if f"{probe.name}.index" in probe.names or (not probe.names and places.isfile(f"{probe.path}.index")):
        return probe.path
    if any(saver_paths.v2_base(name) == probe.name for name in probe.names):
        raise TruncatedError("the index is missing; there are only data shards", file=f"{probe.path}.index")
    return None


def _of_file(probe: Probe) -> str | None:
    base = saver_paths.v2_base(probe.path)
    if base is not None:
        if not places.lexists(f"{base}.index"):
            raise TruncatedError("the shard's index is missing", file=f"{base}.index")
        return base
    if probe.name.endswith(".index"):
        base = probe.name[: -len(".index")]
        ours = probe.tail.endswith(sstable.MAGIC) or any(
            saver_paths.v2_base(name) == base for name in probe.names
        )
        return probe.path[: -len(".index")] if ours and base else None
    if checkpoint_state.begins(probe.head):
        return _ours(saver_paths.of_state(probe.path, probe.folder, probe.names))
    return None


def _ours(found: saver_paths.Found) -> str | None:
    return found.location if found.version == 2 else None


def _of_folder(probe: Probe) -> str | None:
    if not probe.names.isdisjoint(("saved_model.pb", "saved_model.pbtxt")):
        return None  # a SavedModel, whatever else lies in its folder
    state = os.path.join(probe.path, checkpoint_state.NAME)
    if checkpoint_state.NAME in probe.names:
        inner = Probe(state)
        if inner.kind == "file" and checkpoint_state.begins(inner.head):
            return _ours(saver_paths.of_state(state, probe.path, probe.names))
    mine = saver_paths.v2_bases(probe.names)
    # Without a state file nothing says that the V2 checkpoints of a folder are later than its V1 ones.
    others = saver_paths.v1_bases(probe.path, probe.names) - mine if mine else set()
    bases = sorted(mine | others, key=saver_paths.numbered)
    if len(bases) > 1:
        raise saver_paths.several(bases, probe.path)
    if bases:
        return os.path.join(probe.path, bases[0])
    # A prefix may have a folder of the same name beside its index.
    beside = probe.path.rstrip("/")
    return beside if places.isfile(f"{beside}.index") else None
