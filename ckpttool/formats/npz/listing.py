"""What an `.npz` or `.npy` file holds: arrays by name, short texts, and the tree that we recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpttool.checkpoint import Checkpoint, Integrity
from ckpttool.errors import CkpttoolError, some
from ckpttool.formats import recorded
from ckpttool.formats.npz import MAGIC, NAME
from ckpttool.formats.pickled.walk import by_last_name
from ckpttool.leaf import Leaf, Path, Record, ValueLeaf, key
from ckpttool.source import File, Span
from ckpttool.tree import Container, Tree
from ckpttool.wire import npy, zip  # noqa: A004 - the module is named by its format
from ckpttool.wire.npy import Array

# What numpy.savez calls an array that was given no name (numpy/lib/_npyio_impl.py, _savez).
UNNAMED = "arr_0"
# A longer text is listed as an array of text.
_SHORT = 4096


def read(location: str) -> Checkpoint:
    """List the file; raise FormatError when archive, headers and bytes do not fit together."""
    file = File.stamp(location)
    others: tuple[str, ...] = ()
    integrity: Integrity = "none"
    try:
        if file.read(0, min(len(MAGIC), file.size)) == MAGIC:
            arrays = {UNNAMED: npy.read(Span(file, 0, file.size))}
        else:
            archive = zip.read(file)
            # NumPy goes by a member's first bytes, whatever its name.
            wanted = dict.fromkeys(
                name for name in archive.members if name.endswith(npy.SUFFIX) or npy.begins(archive, name)
            )
            arrays = dict(npy.members(archive, wanted))
            others = tuple(name for name in archive.members if name not in wanted)
            integrity = "crc32" if archive.recorded else "none"
        found = _Found(arrays)
        tree = found.tree()
    except CkpttoolError as error:
        raise error.located(file=location) from error.__cause__
    notes = (f"members that are no arrays, which are not read: {some(others, 3)}",) if others else ()
    return Checkpoint(location, NAME, tree, (file,), integrity=integrity, notes=(*notes, *found.notes))


@dataclass
class _Found:
    """The arrays of a file on their way to a tree."""

    arrays: dict[str, Array]
    notes: list[str] = field(default_factory=list)

    def tree(self) -> Tree:
        """Return the tree that was recorded, or every array below the parts of its name."""
        record = self.arrays.pop(recorded.KEY, None)
        if record is not None:
            try:
                return self._recorded(record)
            except recorded.DamagedError as error:
                self.notes.append(f"the tree that ckpttool recorded is not used: {error.message}")
        return bare(listed(self.arrays))

    def _recorded(self, record: Array) -> Tree:
        if record.dtype != "uint8" or record.source is None:
            raise recorded.DamagedError("the recorded tree is no text")
        leaves = {name: leaf for name, leaf in listed(self.arrays).items() if isinstance(leaf, Leaf)}
        untyped: dict[str, int] = {}
        for name, array in self.arrays.items():
            if array.dtype is None and array.source is not None:
                leaves[name] = Leaf("unknown", array.shape, array.source, name)
                untyped[name] = int(array.descr.lstrip("<>|=")[1:])
        if leaves.keys() != self.arrays.keys():
            raise recorded.DamagedError("the recorded tree is that of other arrays")
        return recorded.restored(bytes(record.source.read()), leaves, untyped)


def listed(arrays: Mapping[str, Array]) -> dict[str, Leaf | ValueLeaf]:
    """Return each array as what a tree holds for it."""
    return {name: _listed(name, array) for name, array in arrays.items()}


def bare(entries: Mapping[str, Leaf | ValueLeaf]) -> Tree:
    """Return the tree of a file that records none: names are cut at every `/`, dots stay in a step."""
    return Tree({path_of(name): leaf for name, leaf in entries.items()}, {}, {(): Container("dict")})


def path_of(name: str) -> Path:
    """Return the path that a name stands for."""
    return tuple(map(key, name.split("/")))


def _listed(name: str, array: Array) -> Leaf | ValueLeaf:
    if array.dtype is not None and array.source is not None:
        use = by_last_name(path_of(name), array.dtype, array.shape)
        return Leaf(array.dtype, array.shape, array.source, name, use.role)
    text = _text(array)
    if text is not None:
        return ValueLeaf(text)
    return ValueLeaf(Record("numpy.ndarray", f"{array.descr[:40]}[{', '.join(map(str, array.shape))}]"))


def _text(array: Array) -> str | None:
    """Return the one short text that an array without axes holds, None for anything else."""
    code = array.descr.lstrip("<>|=")
    if array.shape or array.source is None or code[:1] != "U" or int(code[1:]) > _SHORT:
        return None
    try:
        # NumPy fills up with NULs, which are no part of the text.
        return bytes(array.source.read()).decode("utf-32-le").rstrip("\0")
    except UnicodeDecodeError:
        return None
