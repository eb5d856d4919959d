"""torch.save's archive, wherever it lies: in a file, in a member of another archive, in a folder.

Source: torch/serialization.py (_save, _load), caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ckpttool.errors import FormatError
from ckpttool.formats.listed import Listed
from ckpttool.formats.pickled.traversal import REVISITS, SPARE
from ckpttool.formats.torch_pickle.tensors import BUILDERS, Storages
from ckpttool.formats.torch_pickle.tree import Usage, Walk
from ckpttool.wire import pickle_reader
from ckpttool.wire.zip import Archive

PICKLE = re.compile(r"[^/]+/data\.pkl")
_SMALL = 64


def listed(archive: Archive) -> Listed:
    """List every tensor and value of the archive; nothing that the pickle names is imported or called.

    Raise FormatError when archive, pickle and storages do not fit together.
    """
    top = _top(archive)
    big = _big(archive, top)
    value, size = _unpickled(archive, top)
    walk = Walk(big=big, visits=REVISITS * size + SPARE)
    tree = walk.tree(value)
    return Listed(tree, _writer(archive, top), "crc32" if archive.recorded else "none", _notes(walk))


def _top(archive: Archive) -> str:
    found = [name for name in archive.members if PICKLE.fullmatch(name)]
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


def _unpickled(archive: Archive, top: str) -> _Unpickled:
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


def _small(archive: Archive, name: str) -> str | None:
    """Return the text of a small member, None when there is none."""
    member = archive.members.get(name)
    if member is None or member.size > _SMALL:
        return None
    return bytes(archive.source(name).read()).decode("latin-1").strip()


def _big(archive: Archive, top: str) -> bool:
    order = _small(archive, f"{top}/byteorder")
    if order not in (None, "little", "big"):
        raise FormatError(
            "the byte order is not one that torch writes", file=archive.file.path, found=repr(order)
        )
    return order == "big"


def _writer(archive: Archive, top: str) -> str:
    kind = "TorchScript" if f"{top}/constants.pkl" in archive.members else "torch"
    version = _small(archive, f"{top}/version") or _small(archive, f"{top}/.data/version")
    return f"{kind} archive version {version}" if version else f"{kind} archive"


def _notes(walk: Walk) -> tuple[str, ...]:
    notes = []
    kept = [u for u in walk.usage.values() if u.used < u.stored]
    if kept:
        total = Usage(sum(u.stored for u in kept), sum(u.used for u in kept))
        what = "a view keeps a larger storage" if len(kept) == 1 else "views keep larger storages"
        notes.append(f"{what}: {total.stored:,} bytes stored for {total.used:,} used")
    if walk.attributes:
        notes.append(f"tensors with attributes of their own, which are not listed: {walk.attributes:,}")
    return tuple(notes)
