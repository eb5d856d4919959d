"""TensorFlow's V1 checkpoints: tables that hold names, shapes and values, one file or several shards.

The format is that of tensorflow/core/util/tensor_slice_writer.h and tensor_slice_reader.cc; the table is that
of wire.sstable. It was the Saver's only form before TensorFlow 0.12, and `SaverDef.V1` still writes it.
"""

from __future__ import annotations

import os

from ckpttool import places
from ckpttool.checkpoint import Checkpoint
from ckpttool.formats import checkpoint_state, saver_paths
from ckpttool.formats.probe import Probe
from ckpttool.wire import sstable

NAME = "tensorflow_v1"
TITLE = "TensorFlow V1 checkpoint (one table, or shards of one)"
WRITES = False
FRAMEWORK = "tensorflow"


def claims(probe: Probe) -> str | None:
    """Return the file, or the pattern of the shards (`PREFIX-?????-of-00002`), if the path means V1."""
    if probe.kind == "missing":
        return _ours(saver_paths.at(probe.path, probe.names))
    if probe.kind == "folder":
        return _of_folder(probe)
    return _of_file(probe) if probe.kind == "file" else None


def redirected(probe: Probe, location: str) -> str | None:
    """Return a note if the location is not the place that the state file at the path names."""
    return saver_paths.redirected(probe, location)


def read(location: str) -> Checkpoint:
    """List the file, or all shards of the pattern; indexes and names are read, values are not.

    Raise TruncatedError when a shard is missing: only the shard itself says what it holds.
    """
    from ckpttool.formats.tensorflow_v1 import listing
    from ckpttool.formats.variables import by_name

    found = listing.read(location)
    return Checkpoint(
        location,
        NAME,
        by_name(found.tensors),
        found.files,
        f"checkpoint version {found.producer}",
        "crc32c",
    )


def _ours(found: saver_paths.Found | None) -> str | None:
    return found.location if found is not None and found.version == 1 else None


def _of_file(probe: Probe) -> str | None:
    if checkpoint_state.begins(probe.head):
        return _ours(saver_paths.of_state(probe.path, probe.folder, probe.names))
    if probe.name.endswith(".index") or saver_paths.v2_base(probe.name) is not None:
        return None
    if not probe.tail.endswith(sstable.MAGIC):
        return None
    return saver_paths.v1_pattern(probe.path) or probe.path


def _of_folder(probe: Probe) -> str | None:
    state = os.path.join(probe.path, checkpoint_state.NAME)
    if checkpoint_state.NAME in probe.names:
        inner = Probe(state)
        if inner.kind == "file" and checkpoint_state.begins(inner.head):
            return _ours(saver_paths.of_state(state, probe.path, probe.names))
    if saver_paths.v2_bases(probe.names) or places.isfile(f"{probe.path.rstrip('/')}.index"):
        return None
    bases = sorted(saver_paths.v1_bases(probe.path, probe.names), key=saver_paths.numbered)
    if len(bases) > 1:
        raise saver_paths.several(bases, probe.path)
    return os.path.join(probe.path, bases[0]) if bases else None
