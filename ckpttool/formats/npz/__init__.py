"""NumPy's arrays in a file: `.npz` (a zip of arrays by name) and `.npy` (one array); written as `.npz`.

Sources: numpy/lib/_npyio_impl.py (`savez`, `NpzFile`), numpy/lib/_format_impl.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckpttool.formats.probe import Piece, Probe
from ckpttool.wire import zip  # noqa: A004 - the module is named by its format

if TYPE_CHECKING:
    from ckpttool.checkpoint import Checkpoint
    from ckpttool.tree import Tree

__all__ = ["FRAMEWORK", "NAME", "TITLE", "WRITES", "claims", "pieces", "read"]

NAME = "npz"
TITLE = "NumPy arrays (.npz, .npy)"
WRITES = True
FRAMEWORK = "numpy"

MAGIC = b"\x93NUMPY"
_ARRAY, _ARCHIVE = ".npy", ".npz"
# The first member's name in a local header, for archives whose end is damaged or missing.
_FIRST = re.compile(rb"[^\0]{0,255}?\.npy", re.ASCII)


def claims(probe: Probe) -> str | None:
    """Return the path of one array, or of a zip whose members are arrays.

    A zip with other members must be called `.npz`: arrays may lie in the archives of other programs.
    """
    if probe.head.startswith(MAGIC):
        return probe.path
    if probe.damage is not None:
        named = probe.name.endswith(_ARCHIVE)
        return probe.path if named or _FIRST.match(probe.head, zip.LOCAL.size) else None
    arrays = [name.endswith(_ARRAY) for name in probe.members]
    return probe.path if any(arrays) and (all(arrays) or probe.name.endswith(_ARCHIVE)) else None


def read(location: str) -> Checkpoint:
    """List the arrays; what a pickle would have to build is named and never decoded.

    Raise FormatError when archive, headers and bytes do not fit together.
    """
    from ckpttool.formats.npz import listing

    return listing.read(location)


def pieces(tree: Tree) -> tuple[Piece]:
    """Return the one `.npz` file that holds the tree.

    Raise UnsupportedError, before anything is written, for what an array cannot hold.
    """
    from ckpttool.formats.npz import write

    return write.pieces(tree)
