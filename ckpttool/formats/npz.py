"""NumPy archives (.npz)."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import IO, Any

from ckpttool.core import deferred, dtypes
from ckpttool.core.checkpoint import Checkpoint, Integrity
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.dtypes import numpy_code
from ckpttool.core.errors import UnsupportedError, abbreviate_list, locate_errors
from ckpttool.core.source import File, Inline, Span
from ckpttool.core.tree import Container, Leaf, Path, Record, Tree, ValueLeaf, display, key
from ckpttool.encodings import archives, npy
from ckpttool.encodings.archives import ZipWriter
from ckpttool.encodings.npy import NpyArray
from ckpttool.formats import embedded_tree, tensor_bytes
from ckpttool.formats.name_roles import role_by_last_name
from ckpttool.formats.probe import OutputFile, Probe

NAME = "npz"
TITLE = "NumPy arrays (.npz, .npy)"
WRITES = True
FRAMEWORK = "numpy"

MAGIC = b"\x93NUMPY"
_ARRAY, _ARCHIVE = ".npy", ".npz"
_EMPTY = b"PK\x05\x06"  # a zip without members begins with its end, also in numpy.load
# The first member's name in a local header, for archives with a damaged or missing end.
_FIRST = deferred.compile(rb"[^\0]{0,255}?\.npy", re.ASCII)


def claims(probe: Probe) -> str | None:
    """Return the path of one array, or of a zip whose members are arrays.

    A zip with other members, or none, must have the suffix `.npz`: archives of other programs may contain
    arrays.
    """
    if probe.head.startswith(MAGIC) or (probe.head.startswith(_EMPTY) and probe.name.endswith(_ARCHIVE)):
        return probe.path
    if probe.damage is not None:
        named = probe.name.endswith(_ARCHIVE)
        return probe.path if named or _FIRST.match(probe.head, archives.LOCAL.size) else None
    arrays = [name.endswith(_ARRAY) for name in probe.members]
    return probe.path if any(arrays) and (all(arrays) or probe.name.endswith(_ARCHIVE)) else None


# numpy.savez's names for unnamed arrays (numpy/lib/_npyio_impl.py, _savez).
UNNAMED = "arr_0"
# A longer string is listed as a string array.
_SHORT = 4096


def read(location: str) -> Checkpoint:
    """List the arrays; data that needs unpickling is named and never decoded.

    Raise FormatError if archive, headers and bytes are inconsistent. Sources: numpy/lib/_npyio_impl.py
    (`savez`, `NpzFile`), numpy/lib/_format_impl.py.
    """
    file = File.stamp(location)
    others: tuple[str, ...] = ()
    integrity: Integrity = "none"
    with locate_errors(file=location):
        if file.read(0, min(len(MAGIC), file.size)) == MAGIC:
            arrays = {UNNAMED: npy.read_npy(Span(file, 0, file.size))}
        else:
            archive = archives.read_zip(file)
            # NumPy checks a member's first bytes, whatever its name.
            selected = dict.fromkeys(
                name
                for name in archive.members
                if name.endswith(npy.SUFFIX) or npy.is_npy_member(archive, name)
            )
            arrays = dict(npy.list_npz(archive, selected))
            others = tuple(name for name in archive.members if name not in selected)
            integrity = "crc32" if archive.recorded else "none"
        collection = _ArrayCollection(arrays)
        tree = collection.tree()
    notes = (f"skipped members that are not arrays: {abbreviate_list(others, 3)}",) if others else ()
    return Checkpoint(location, NAME, tree, (file,), integrity=integrity, notes=(*notes, *collection.notes))


@dataclass
class _ArrayCollection:
    """Convert the arrays of a file to a tree."""

    arrays: dict[str, NpyArray]
    notes: list[str] = field(default_factory=list)

    def tree(self) -> Tree:
        """Return the embedded tree, or every array under the parts of its name."""
        record = self.arrays.pop(embedded_tree.KEY, None)
        if record is not None:
            try:
                return self._recorded(record)
            except embedded_tree.EmbeddedTreeError as error:
                self.notes.append(f"ignoring the tree that ckpttool embedded: {error.message}")
        return _unrecorded_tree(array_leaves(self.arrays))

    def _recorded(self, record: NpyArray) -> Tree:
        if record.dtype != "uint8" or record.source is None:
            raise embedded_tree.EmbeddedTreeError("the embedded tree is not text")
        leaves = {name: leaf for name, leaf in array_leaves(self.arrays).items() if isinstance(leaf, Leaf)}
        untyped: dict[str, int] = {}
        for name, array in self.arrays.items():
            if array.dtype is None and array.source is not None:
                leaves[name] = Leaf("unknown", array.shape, array.source, name)
                untyped[name] = int(array.descr.lstrip("<>|=")[1:])
        if leaves.keys() != self.arrays.keys():
            raise embedded_tree.EmbeddedTreeError("the embedded tree does not match the tensors in this file")
        return embedded_tree.decode_tree(bytes(record.source.read()), leaves, untyped)


def array_leaves(arrays: Mapping[str, NpyArray]) -> dict[str, Leaf | ValueLeaf]:
    """Return each array as a leaf."""
    return {name: _array_leaf(name, array) for name, array in arrays.items()}


def _unrecorded_tree(entries: Mapping[str, Leaf | ValueLeaf]) -> Tree:
    """Return the tree of a file without an embedded tree: names are split at `/`, not at dots."""
    return Tree({parse_name(name): leaf for name, leaf in entries.items()}, {}, {(): Container("dict")})


def parse_name(name: str) -> Path:
    """Return the path for a name."""
    return tuple(map(key, name.split("/")))


def _array_leaf(name: str, array: NpyArray) -> Leaf | ValueLeaf:
    if array.dtype is not None and array.source is not None:
        use = role_by_last_name(parse_name(name), array.dtype, array.shape)
        return Leaf(array.dtype, array.shape, array.source, name, use.role)
    text = _text_value(array)
    if text is not None:
        return ValueLeaf(text)
    return ValueLeaf(Record("numpy.ndarray", f"{array.descr[:40]}[{', '.join(map(str, array.shape))}]"))


def _text_value(array: NpyArray) -> str | None:
    """Return the short string in an array without axes, None for anything else."""
    code = array.descr.lstrip("<>|=")
    if array.shape or array.source is None or code[:1] != "U" or int(code[1:]) > _SHORT:
        return None
    try:
        # NumPy pads with NULs, which are not part of the string.
        return bytes(array.source.read()).decode("utf-32-le").rstrip("\0")
    except UnicodeDecodeError:
        return None


_INT64 = 1 << 63
_LONGEST_NAME = (1 << 16) - 1
_DRIVE = deferred.compile("^([A-Za-z]):")


class _NpzMember(NamedTuple):
    """One array to write: NumPy's name of its type, and the source of its bytes."""

    path: Path
    descr: str
    leaf: Leaf | None
    data: bytes = b""


def pieces(tree: Tree) -> tuple[OutputFile]:
    """Return the single `.npz` file for the tree.

    Raise UnsupportedError, before anything is written, for a tensor type that NumPy lacks. Sources:
    numpy/lib/_npyio_impl.py (`_savez`), numpy/lib/_format_impl.py. The output loads with `numpy.load(file,
    allow_pickle=False)`.
    """
    members = {path: name for path, leaf in tree.items() if (name := _plan_member(path, leaf)) is not None}
    others = [alias.path for _, aliases in tree.aliases.items() for alias in aliases]
    names = embedded_tree.assign_names([*members, *others], _spell_path, (embedded_tree.KEY,), _safe_name)
    for path in members:
        if len(names[path].encode()) + len(npy.SUFFIX) > _LONGEST_NAME:
            raise UnsupportedError("a name is too long for a zip archive", path=display(path)[:200])
    text = _encode_record(tree, members, names)
    return (OutputFile("", lambda stream: _write(stream, members, names, text)),)


def _spell_path(path: Path) -> str:
    return _safe_name("/".join(str(step.value) for step in path)) if path else UNNAMED


def _safe_name(name: str) -> str:
    r"""Return a safe member name, in which no part leads out of a folder: `a/../b` becomes `a/%2E%2E/b`.

    Absolute paths, backslashes and drives are escaped as well, because programs unpack archives by
    member name. So is the suffix of members: `np.load` would take `x.npy` for the array `x`.
    """
    *folders, last = name.replace("\\", "%5C").split("/")
    parts = [folder.replace(".", "%2E") if folder in (".", "..") else folder or "%" for folder in folders]
    last = last.removesuffix(npy.SUFFIX) + "%2Enpy" if last.endswith(npy.SUFFIX) else last
    return _DRIVE.sub(r"\1%3A", "/".join((*parts, last)))


def _encode_record(tree: Tree, members: Mapping[Path, _NpzMember], names: Mapping[Path, str]) -> str | None:
    """Return the tree as text, None if the arrays alone are read as the same tree."""
    read = {
        names[path]: npy.NpyArray(m.descr, m.leaf.shape if m.leaf else (), _dtype(m), Inline(m.data))
        for path, m in members.items()
    }
    alone = _unrecorded_tree(array_leaves(read)) if len(members) == len(tree) else Tree({})
    return embedded_tree.encode_tree(tree, names) if embedded_tree.needs_record(tree, alone) else None


def _dtype(member: _NpzMember) -> str | None:
    if member.leaf is None:
        return None if member.descr.startswith("<U") else "other"
    return None if "V" in member.descr else member.leaf.dtype


def _plan_member(path: Path, leaf: Leaf | ValueLeaf) -> _NpzMember | None:
    """Return how to write an entry; None for a value that only the embedded tree contains."""
    if isinstance(leaf, Leaf):
        return _NpzMember(path, _dtype_descr(leaf, path), leaf)
    value: Any = leaf.value
    kind = type(value)
    if kind is bool:
        return _NpzMember(path, "|b1", None, bytes((value,)))
    if kind is int and -_INT64 <= value < _INT64:
        return _NpzMember(path, "<i8", None, value.to_bytes(8, "little", signed=True))
    if kind is float:
        return _NpzMember(path, "<f8", None, struct.pack("<d", value))
    if kind is complex:
        return _NpzMember(path, "<c16", None, struct.pack("<dd", value.real, value.imag))
    if kind is str:
        try:
            return _NpzMember(path, f"<U{max(1, len(value))}", None, value.encode("utf-32-le") or bytes(4))
        except UnicodeEncodeError:
            return None
    return None


def _dtype_descr(leaf: Leaf, path: Path) -> str:
    code = numpy_code(leaf.dtype)
    if code is not None:
        return ("|" if code.endswith("1") else "<") + code
    row = dtypes.BY_NAME[leaf.dtype]
    if not row.itemsize or leaf.dtype in dtypes.PACKED or leaf.dtype.startswith(("qint", "quint")):
        raise UnsupportedError(f"a NumPy array cannot hold a tensor of type {leaf.dtype}", path=display(path))
    # As NumPy writes ml_dtypes types: fixed-width bytes; the embedded tree records the type.
    return f"<V{row.itemsize}"


def _write(
    stream: IO[bytes], members: Mapping[Path, _NpzMember], names: Mapping[Path, str], text: str | None
) -> None:
    archive = ZipWriter(stream)
    for path, member in members.items():
        shape = member.leaf.shape if member.leaf is not None else ()
        data = member.data if member.leaf is None else tensor_bytes.exact_part(member.leaf, path)
        archive.add(names[path] + npy.SUFFIX, npy.encode_npy_header(member.descr, shape), data)
    if text is not None:
        record = text.encode("ascii")
        archive.add(embedded_tree.KEY + npy.SUFFIX, npy.encode_npy_header("|u1", (len(record),)), record)
    archive.close()
