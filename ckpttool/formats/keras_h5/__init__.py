"""Keras's HDF5 files: `.h5` weights and models of Keras 1 and 2, `.weights.h5` of Keras 3 and tf_keras.

Sources: keras/src/legacy/saving/legacy_h5_format.py, keras/src/saving/saving_lib.py. Other HDF5 files are
listed as the datasets that they are. The file is listed by a process of its own (formats.hdf5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool import places
from ckpttool.formats.probe import Piece, Probe

if TYPE_CHECKING:
    from ckpttool.checkpoint import Checkpoint
    from ckpttool.tree import Tree

NAME = "keras_h5"
TITLE = "Keras HDF5 file (.h5, .weights.h5)"
WRITES = True
FRAMEWORK = "tensorflow"

MAGIC = b"\x89HDF\r\n\x1a\n"
_BLOCK = 512


def claims(probe: Probe) -> str | None:
    """Return the path of an HDF5 file, or of the JSON map of a sharded `.weights.h5`."""
    if probe.kind != "file":
        return None
    # A .keras file of Keras 3 is a zip archive; an HDF5 member of it may begin where a user block would end.
    zipped = probe.head.startswith(b"PK") and probe.name.lower().endswith(".keras")
    if probe.head.startswith(MAGIC) or (_suffixed(probe.name) and not zipped and _behind_block(probe)):
        return probe.path
    if probe.name.endswith(".weights.json") and probe.head.lstrip().startswith(b"{"):
        return probe.path
    return None


def _suffixed(name: str) -> bool:
    return name.lower().endswith((".h5", ".hdf5", ".h5f", ".hdf", ".he5", ".keras"))


def _behind_block(probe: Probe) -> bool:
    """Say whether the file begins with a user block, of 512 bytes or twice, four times ... that.

    Source: HDF5 File Format Specification 3.0, II.A.
    """
    block = _BLOCK
    try:
        while block < probe.size:
            if places.content(probe.path, block, len(MAGIC)) == MAGIC:
                return True
            block *= 2
    except OSError:
        return False
    return False


def read(location: str) -> Checkpoint:
    """List the file; raise FormatError when it is damaged, UnsupportedError when it leads to other files."""
    from ckpttool.checkpoint import Checkpoint
    from ckpttool.formats import hdf5, keras_tree
    from ckpttool.formats.keras_tree import shards
    from ckpttool.source import File

    file = File.stamp(location)
    if location.endswith(".json"):
        files, index = shards.read(file)
    else:
        files, index = (file,), hdf5.index(hdf5.whole(file))
    found = keras_tree.named(file.path, lambda: keras_tree.model(index))
    version = found.details.get("keras_version")
    writer = f"Keras {version}" if isinstance(version, str) else None
    return Checkpoint(
        location,
        NAME,
        found.tree,
        files,
        writer,
        "none",
        found.notes,
        dict(found.details),
        found.asks,
        found.unjudged,
    )


def pieces(tree: Tree, *, root: str | None = None) -> tuple[Piece, ...]:
    """Return the one `.weights.h5` file that holds the tree; raise UnsupportedError for what it cannot.

    `root` names the attribute below which the model stands, for trees of a tf.train.Checkpoint.
    """
    from ckpttool.formats.keras_h5 import write

    return write.pieces(tree, root=root)


def stored(tree: Tree, *, root: str | None = None) -> Tree:
    """Return the tree with the paths and keys that its leaves have in the file."""
    from ckpttool.formats.keras_h5 import write

    return write.stored(tree, root=root)
