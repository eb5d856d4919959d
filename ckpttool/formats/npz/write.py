"""Writes a tree as numpy.savez would: stored members, the same bytes for the same tree.

Sources: numpy/lib/_npyio_impl.py (`_savez`), numpy/lib/_format_impl.py. What is written loads with
`numpy.load(file, allow_pickle=False)`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

from ckpttool import dtypes
from ckpttool.errors import UnsupportedError
from ckpttool.formats import recorded, whole
from ckpttool.formats.npz.listing import UNNAMED, bare, listed
from ckpttool.formats.probe import Piece
from ckpttool.leaf import Leaf, Path, ValueLeaf, display
from ckpttool.source import Inline
from ckpttool.tree import Tree
from ckpttool.wire import npy
from ckpttool.wire.pickle_numpy import code_of
from ckpttool.wire.zip_writer import Writer

_INT64 = 1 << 63
_LONGEST_NAME = (1 << 16) - 1
_DRIVE = re.compile("^([A-Za-z]):")


class _Member(NamedTuple):
    """One array to write: NumPy's name of its type, and where its bytes come from."""

    path: Path
    descr: str
    leaf: Leaf | None
    data: bytes = b""


def pieces(tree: Tree) -> tuple[Piece]:
    """Return the one file; raise UnsupportedError for a tensor of a type that no array has."""
    members = {path: made for path, leaf in tree.items() if (made := _member(path, leaf)) is not None}
    others = [alias.path for _, aliases in tree.aliases.items() for alias in aliases]
    names = recorded.named([*members, *others], _spelled, (recorded.KEY,), _safe)
    for path in members:
        if len(names[path].encode()) + len(npy.SUFFIX) > _LONGEST_NAME:
            raise UnsupportedError("a name is too long for a zip archive", path=display(path)[:200])
    text = _record(tree, members, names)
    return (Piece("", lambda stream: _write(stream, members, names, text)),)


def _spelled(path: Path) -> str:
    return _safe("/".join(str(step.value) for step in path)) if path else UNNAMED


def _safe(name: str) -> str:
    r"""Return the name of a member in which no part leads out of a folder: `a/../b` becomes `a/%2E%2E/b`.

    So for absolute paths, backslashes and drives, because programs unpack archives by the names in them. Nor
    may a name end as members do: `np.load` would take `x.npy` for the array `x`.
    """
    *folders, last = name.replace("\\", "%5C").split("/")
    parts = [each.replace(".", "%2E") if each in (".", "..") else each or "%" for each in folders]
    last = last.removesuffix(npy.SUFFIX) + "%2Enpy" if last.endswith(npy.SUFFIX) else last
    return _DRIVE.sub(r"\1%3A", "/".join((*parts, last)))


def _record(tree: Tree, members: Mapping[Path, _Member], names: Mapping[Path, str]) -> str | None:
    """Return the tree as text, None if the arrays alone are read as the same tree."""
    read = {
        names[path]: npy.Array(m.descr, m.leaf.shape if m.leaf else (), _dtype(m), Inline(m.data))
        for path, m in members.items()
    }
    alone = bare(listed(read)) if len(members) == len(tree) else Tree({})
    return recorded.recorded(tree, names) if recorded.needed(tree, alone) else None


def _dtype(member: _Member) -> str | None:
    if member.leaf is None:
        return None if member.descr.startswith("<U") else "other"
    return None if "V" in member.descr else member.leaf.dtype


def _member(path: Path, leaf: Leaf | ValueLeaf) -> _Member | None:
    """Return how an entry is written; None for a value that only the recorded tree holds."""
    if isinstance(leaf, Leaf):
        return _Member(path, _descr(leaf, path), leaf)
    value: Any = leaf.value
    kind = type(value)
    if kind is bool:
        return _Member(path, "|b1", None, bytes((value,)))
    if kind is int and -_INT64 <= value < _INT64:
        return _Member(path, "<i8", None, value.to_bytes(8, "little", signed=True))
    if kind is float:
        return _Member(path, "<f8", None, struct.pack("<d", value))
    if kind is complex:
        return _Member(path, "<c16", None, struct.pack("<dd", value.real, value.imag))
    if kind is str:
        try:
            return _Member(path, f"<U{max(1, len(value))}", None, value.encode("utf-32-le") or bytes(4))
        except UnicodeEncodeError:
            return None
    return None


def _descr(leaf: Leaf, path: Path) -> str:
    code = code_of(leaf.dtype)
    if code is not None:
        return ("|" if code.endswith("1") else "<") + code
    row = dtypes.BY_NAME[leaf.dtype]
    if not row.itemsize or leaf.dtype in dtypes.PACKED or leaf.dtype.startswith(("qint", "quint")):
        raise UnsupportedError(f"a NumPy array cannot hold a tensor of type {leaf.dtype}", path=display(path))
    # As NumPy writes the types of ml_dtypes: bytes of one width, whose type the recorded tree tells.
    return f"<V{row.itemsize}"


def _write(
    stream: IO[bytes], members: Mapping[Path, _Member], names: Mapping[Path, str], text: str | None
) -> None:
    archive = Writer(stream)
    for path, member in members.items():
        shape = member.leaf.shape if member.leaf is not None else ()
        data = member.data if member.leaf is None else whole.data(member.leaf, path)
        archive.add(names[path] + npy.SUFFIX, npy.header(member.descr, shape), data)
    if text is not None:
        record = text.encode("ascii")
        archive.add(recorded.KEY + npy.SUFFIX, npy.header("|u1", (len(record),)), record)
    archive.close()
