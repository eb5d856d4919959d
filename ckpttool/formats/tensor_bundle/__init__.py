"""TensorFlow checkpoints: an index of tensors and the data shards beside it (see listing and write)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.checkpoint import Checkpoint
from ckpttool.formats import saver_paths
from ckpttool.formats.probe import Piece, Probe
from ckpttool.formats.tensor_bundle import locations

if TYPE_CHECKING:
    from ckpttool.tree import Tree

NAME = "tensor_bundle"
TITLE = "TensorFlow checkpoint (index and data shards)"
WRITES = True
FRAMEWORK = "tensorflow"


def claims(probe: Probe) -> str | None:
    """Return the prefix of the checkpoint that the path means, if it means one of ours."""
    return locations.prefix(probe)


def redirected(probe: Probe, location: str) -> str | None:
    """Return a note if the location is not the place that the state file at the path names."""
    return saver_paths.redirected(probe, location)


def read(location: str) -> Checkpoint:
    """List the checkpoint with prefix `location`; every entry is judged, no tensor is read."""
    # Not at the top: every command asks `claims`.
    from ckpttool.formats.tensor_bundle import listing

    found = listing.read(location)
    return Checkpoint(location, NAME, found.tree, found.files, found.writer, "crc32c", found.notes)


def pieces(tree: Tree, **options: Any) -> tuple[Piece, ...]:
    """Return the shards and the index that hold the tree; the options are those of write.pieces."""
    from ckpttool.formats.tensor_bundle import write

    return write.pieces(tree, **options)


def stored(tree: Tree, **options: Any) -> Tree:
    """Return the tree as it will be read after `pieces` wrote it with these options (see write.stored)."""
    from ckpttool.formats.tensor_bundle import write

    return write.stored(tree, **options)
