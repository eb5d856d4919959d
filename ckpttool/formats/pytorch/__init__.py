"""PyTorch's zip checkpoints (torch.save since 1.6), packed or unpacked: recognised, listed, written.

Source: torch/serialization.py (_save, _load), caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckpttool import places
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, NotFoundError
from ckpttool.formats.pickled.owner import owner
from ckpttool.formats.probe import Piece, Probe
from ckpttool.formats.torch_pickle import folder
from ckpttool.source import File
from ckpttool.wire import zip  # noqa: A004 - the module is named by its format

if TYPE_CHECKING:
    from ckpttool.tree import Tree

__all__ = ["FRAMEWORK", "NAME", "TITLE", "WRITES", "claims", "pieces", "read", "stored"]

NAME = "pytorch"
TITLE = "PyTorch checkpoint (zip, since 1.6)"
WRITES = True
FRAMEWORK = "torch"

_PICKLE = re.compile(r"[^/]+/data\.pkl")
# The first member's name in a local header, for archives whose end is damaged or missing.
_FIRST = re.compile(rb"[^/\0]{1,255}/(data\.pkl|data/\d+)", re.ASCII)


def claims(probe: Probe) -> str | None:
    """Return the path of a zip with one `*/data.pkl`, of a damaged one that begins like it, of its folder."""
    if probe.kind == "folder":
        return probe.path if folder.inside(probe.path, probe.names) else None
    if probe.name == folder.PICKLE and owner(probe) == NAME:
        return probe.folder
    if probe.name.endswith(".distcp"):
        return None  # a shard of torch.distributed.checkpoint: archives one after another
    if probe.damage is not None:
        return probe.path if _FIRST.match(probe.head, zip.LOCAL.size) else None
    return probe.path if any(map(_PICKLE.fullmatch, probe.members)) else None


def read(location: str) -> Checkpoint:
    """List every tensor and value of the file; nothing that the pickle names is imported or called.

    Raise FormatError when archive, pickle and storages do not fit together, or when the pickle asks to
    call something that can act.
    """
    # Not at the top: every command asks `claims`.
    from ckpttool.formats.torch_pickle import archive

    try:
        opened = _opened(location)
        found = archive.listed(opened)
    except CkpttoolError as error:
        raise error.located(file=location) from error.__cause__
    files = opened.opened.values() if isinstance(opened, folder.Folder) else (opened.file,)
    return found.checkpoint(location, NAME, *files)


def _opened(location: str) -> zip.Archive | folder.Folder:
    if not places.isdir(location):
        return zip.read(File.stamp(location))
    held = folder.inside(location, frozenset(places.listdir(location)))
    if held is None:
        raise NotFoundError("the folder has no data.pkl", file=location)
    return folder.read(held)


def pieces(tree: Tree) -> tuple[Piece]:
    """Return the one file that holds the tree.

    Raise UnsupportedError, before anything is written, for what a torch pickle cannot hold.
    """
    from ckpttool.formats.pytorch import write

    return write.pieces(tree)


def stored(tree: Tree) -> Tree:
    """Return the tree with the paths by which it will be read; raise UnsupportedError as `pieces` does."""
    from ckpttool.formats.pytorch import write

    return write.stored(tree)
