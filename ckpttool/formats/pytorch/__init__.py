"""PyTorch's zip checkpoints (torch.save since 1.6): recognised, listed, written; torch is not needed.

Source: torch/serialization.py (_save, _load), caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, FormatError
from ckpttool.formats.probe import Piece, Probe
from ckpttool.source import File
from ckpttool.wire import zip  # noqa: A004 - the module is named by its format

if TYPE_CHECKING:
    from ckpttool.formats.pytorch.tree import Walk
    from ckpttool.tree import Tree

__all__ = ["FRAMEWORK", "NAME", "TITLE", "WRITES", "claims", "pieces", "read", "stored"]

NAME = "pytorch"
TITLE = "PyTorch checkpoint (zip, since 1.6)"
WRITES = True
FRAMEWORK = "torch"

_PICKLE = re.compile(r"[^/]+/data\.pkl")
# The first member's name in a local header, for archives whose end is damaged or missing.
_FIRST = re.compile(rb"[^/\0]{1,255}/(data\.pkl|data/\d+)", re.ASCII)
_SMALL = 64


def claims(probe: Probe) -> str | None:
    """Return the path of a zip with one `*/data.pkl`, or of a damaged one that begins like it."""
    if probe.damage is not None:
        return probe.path if _FIRST.match(probe.head, zip.LOCAL.size) else None
    return probe.path if any(map(_PICKLE.fullmatch, probe.members)) else None


def read(location: str) -> Checkpoint:
    """List every tensor and value of the file; nothing that the pickle names is imported or called.

    Raise FormatError when archive, pickle and storages do not fit together, or when the pickle asks to
    call something that can act.
    """
    # Not at the top: every command asks `claims`.
    from ckpttool.formats.pickled.traversal import REVISITS, SPARE
    from ckpttool.formats.pytorch.tree import Walk

    file = File.stamp(location)
    archive = zip.read(file)
    top = _top(archive)
    big = _big(archive, top)
    try:
        value, size = _unpickled(archive, top)
        walk = Walk(big=big, visits=REVISITS * size + SPARE)
        tree = walk.tree(value)
    except CkpttoolError as error:
        raise error.located(file=location) from error.__cause__
    return Checkpoint(
        path=location,
        format=NAME,
        tree=tree,
        files=(file,),
        writer=_writer(archive, top),
        integrity="crc32" if archive.recorded else "none",
        notes=_notes(walk),
    )


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


def _top(archive: zip.Archive) -> str:
    found = [name for name in archive.members if _PICKLE.fullmatch(name)]
    if len(found) != 1:
        raise FormatError(
            "the archive does not hold one data.pkl",
            file=archive.file.path,
            found=", ".join(found[:3]) or "none",
        )
    return found[0].removesuffix("/data.pkl")


class _Unpickled(NamedTuple):
    value: object
    size: int


def _unpickled(archive: zip.Archive, top: str) -> _Unpickled:
    from ckpttool.formats.pytorch.tensors import BUILDERS, Storages
    from ckpttool.wire import pickle_reader

    source = archive.source(f"{top}/data.pkl")
    data = bytes(source.read())
    storages = Storages(archive, top)
    value = pickle_reader.load(
        data,
        persistent=storages.persistent,
        builders=BUILDERS,
        file=archive.file.path,
        base=archive.members[f"{top}/data.pkl"].offset,
    )
    return _Unpickled(value, len(data))


def _small(archive: zip.Archive, name: str) -> str | None:
    """Return the text of a small member, None when there is none."""
    member = archive.members.get(name)
    if member is None or member.size > _SMALL:
        return None
    return bytes(archive.source(name).read()).decode("latin-1").strip()


def _big(archive: zip.Archive, top: str) -> bool:
    order = _small(archive, f"{top}/byteorder")
    if order not in (None, "little", "big"):
        raise FormatError(
            "the byte order is not one that torch writes", file=archive.file.path, found=repr(order)
        )
    return order == "big"


def _writer(archive: zip.Archive, top: str) -> str:
    kind = "TorchScript" if f"{top}/constants.pkl" in archive.members else "torch"
    version = _small(archive, f"{top}/version") or _small(archive, f"{top}/.data/version")
    return f"{kind} archive version {version}" if version else f"{kind} archive"


def _notes(walk: Walk) -> tuple[str, ...]:
    from ckpttool.formats.pytorch.tree import Usage

    notes = []
    kept = [u for u in walk.usage.values() if u.used < u.stored]
    if kept:
        total = Usage(sum(u.stored for u in kept), sum(u.used for u in kept))
        what = "a view keeps a larger storage" if len(kept) == 1 else "views keep larger storages"
        notes.append(f"{what}: {total.stored:,} bytes stored for {total.used:,} used")
    if walk.attributes:
        notes.append(f"tensors with attributes of their own, which are not listed: {walk.attributes:,}")
    return tuple(notes)
