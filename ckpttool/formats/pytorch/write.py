"""Writing a tree as torch.save would: one pickle of the structure, then one aligned member per storage.

Source: torch/serialization.py (_save), torch/_tensor.py (_reduce_ex_internal). What is written loads with
`weights_only=True` and with `mmap=True`.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from typing import IO, Any, NoReturn

from ckpttool import dtypes
from ckpttool.errors import UnsupportedError
from ckpttool.formats import whole
from ckpttool.formats.probe import Piece
from ckpttool.leaf import Key, Leaf, Path, Record, ValueLeaf, display
from ckpttool.source import Shape
from ckpttool.tree import Alias, Container, Tree
from ckpttool.wire.pickle_reader import Dict, Global, Object, Set
from ckpttool.wire.pickle_writer import Persistent, dumps
from ckpttool.wire.zip_writer import Writer

TOP = "archive"
ALIGNMENT = 64
_BUILD_V2 = Global("torch._utils", "_rebuild_tensor_v2")
_BUILD_V3 = Global("torch._utils", "_rebuild_tensor_v3")
_BUILD_PARAMETER = Global("torch._utils", "_rebuild_parameter")
_ORDERED = "collections.OrderedDict"
_SETS = ("builtins.set", "builtins.frozenset")


def pieces(tree: Tree) -> tuple[Piece]:
    """Return the one file that holds the tree.

    Leaves whose `trainable` is known become Parameters, other tensors plain ones; numpy arrays become
    tensors; aliases share one storage. Raise UnsupportedError, before anything is written, for what a
    torch pickle cannot hold.
    """
    plan = _Plan(tree)
    pickle = dumps(plan.value(plan.root))
    return (Piece("", lambda stream: _write(plan, pickle, stream)),)


def stored(tree: Tree) -> Tree:
    """Return the tree with the paths by which it will be read: torch's file has dicts and lists only.

    An attribute's step comes back as a key. Raise UnsupportedError as `pieces` does, and when two entries
    would have one path.
    """
    plan = _Plan(tree)
    moved: dict[Path, Path] = {(): ()}
    waiting = [plan.root]
    while waiting:
        node = waiting.pop()
        kind = (plan.containers.get(node.path) or _inferred(node)).kind
        for step, child in node.children.items():
            place = Key("key", step.value) if kind in ("dict", "OrderedDict") else step
            moved[child.path] = (*moved[node.path], place)
            waiting.append(child)
    leaves = {moved[path]: leaf for path, leaf in tree.items()}
    if len(leaves) != len(tree):
        twice = next(path for path in tree if leaves[moved[path]] is not tree[path])
        _refuse("two entries have keys that Python takes for one", twice)
    return Tree(
        leaves,
        {moved[p]: tuple(Alias(moved[a.path], a.key) for a in others) for p, others in tree.aliases.items()},
        {moved[path]: container for path, container in plan.containers.items()},
    )


def _write(plan: _Plan, pickle: bytes, stream: IO[bytes]) -> None:
    archive = Writer(stream, ALIGNMENT)
    archive.add(f"{TOP}/data.pkl", pickle)
    archive.add(f"{TOP}/.format_version", b"1")
    archive.add(f"{TOP}/.storage_alignment", str(ALIGNMENT).encode())
    archive.add(f"{TOP}/byteorder", b"little")
    for number, path in enumerate(plan.stored):
        leaf = plan.tree[path]
        assert isinstance(leaf, Leaf)  # noqa: S101 - only tensors are given a storage
        archive.add(f"{TOP}/data/{number}", whole.data(leaf, path))
    archive.add(f"{TOP}/version", b"3\n")
    archive.add(f"{TOP}/.data/serialization_id", _identity(archive.checksums))
    archive.close()


def _identity(checksums: tuple[int, ...]) -> bytes:
    # torch writes two numbers of twenty digits made from the members' names and checksums.
    packed = struct.pack(f"<{len(checksums)}I", *checksums)
    return f"{zlib.crc32(packed):020d}{zlib.adler32(packed):020d}".encode()


@dataclass(slots=True)
class _Node:
    """One place in the tree: what stands there, or what stands below it."""

    path: Path
    leaf: Leaf | ValueLeaf | None = None
    canonical: Path = ()
    children: dict[Key, _Node] = field(default_factory=dict)


class _Plan:
    """The nested values that the pickle will say, and the leaves that become storages, in order."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.root = _Node(())
        self.stored: dict[Path, int] = {}
        for path, leaf in tree.items():
            self._put(path, leaf, path)
        # A "module" says what an object was, not how to build it: only its tensors can be written.
        self.containers = {path: c for path, c in tree.containers.items() if c.kind != "module"}
        for path in self.containers:
            self._at(path)
        for path, aliases in tree.aliases.items():
            for alias in aliases:
                self._put(alias.path, tree[path], path)

    def _at(self, path: Path) -> _Node:
        node = self.root
        for depth, step in enumerate(path):
            if node.leaf is not None:
                _refuse("a tensor or value has others below it", node.path)
            if step not in node.children:
                node.children[step] = _Node(path[: depth + 1])
            node = node.children[step]
        return node

    def _put(self, path: Path, leaf: Leaf | ValueLeaf, canonical: Path) -> None:
        node = self._at(path)
        if node.leaf is not None or node.children:
            _refuse("two things have one path", path)
        node.leaf, node.canonical = leaf, canonical

    def value(self, node: _Node) -> Any:
        """Return what stands at the node as the pickle says it."""
        if isinstance(node.leaf, Leaf):
            return self._tensor(node.leaf, node)
        if node.leaf is not None:
            return _plain(node.leaf, node.path)
        kind = self.containers.get(node.path) or _inferred(node)
        if kind.kind == "record" and kind.name not in _SETS:
            _refuse(f"an object of class {kind.name} cannot be written", node.path)
        if kind.kind in ("dict", "OrderedDict"):
            return self._dict(node, kind)
        items = [self.value(child) for child in _in_order(node)]
        if kind.kind == "record":
            return Set(str(kind.name), items)
        if kind.name == "torch.Size":
            return Object(Global("torch", "Size"), (tuple(items),), 0)
        return tuple(items) if kind.kind == "tuple" else items

    def _dict(self, node: _Node, kind: Container) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        if kind.kind == "OrderedDict":
            made = Dict(_ORDERED)
            made.state = kind.state
        for step, child in node.children.items():
            made[step.value] = self.value(child)
        if len(made) != len(node.children):
            _refuse("two entries have keys that Python takes for one", node.path)
        return made

    def _tensor(self, leaf: Leaf, node: _Node) -> Object:
        row = dtypes.BY_NAME[leaf.dtype]
        if row.torch is None or not row.itemsize or row.torch.startswith(("qint", "quint")):
            _refuse(f"a tensor of type {leaf.dtype} cannot be written as torch's", node.path)
        number = self.stored.setdefault(node.canonical, len(self.stored))
        made = _rebuilt(leaf, row, str(number))
        if leaf.trainable is None:
            return made
        return Object(_BUILD_PARAMETER, (made, leaf.trainable, Dict(_ORDERED)), 0)


def _rebuilt(leaf: Leaf, row: dtypes.DType, key: str) -> Object:
    # Types without a storage class of their own are bytes to torch, and v3 says the type.
    typed = row.storage is not None
    kind = Global("torch", str(row.storage)) if typed else Global("torch.storage", "UntypedStorage")
    storage = Persistent(("storage", kind, key, "cpu", leaf.size if typed else leaf.nbytes))
    args = (storage, 0, leaf.shape, _strides(leaf.shape), False, Dict(_ORDERED))
    if typed:
        return Object(_BUILD_V2, args, 0)
    return Object(_BUILD_V3, (*args, Global("torch", str(row.torch))), 0)


def _strides(shape: Shape) -> Shape:
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _refuse(message: str, path: Path) -> NoReturn:
    raise UnsupportedError(message, path=display(path))


def _plain(leaf: ValueLeaf, path: Path) -> Any:
    value = leaf.value
    if not isinstance(value, Record):
        return value
    module, _, name = value.name.rpartition(".")
    if module == "torch" and name in dtypes.BY_TORCH and not value.summary:
        return Global(module, name)
    _refuse(f"an object of class {value.name} cannot be written", path)


def _inferred(node: _Node) -> Container:
    positions = {step.value for step in node.children if step.kind == "index"}
    # A list of which only some items are there (a layer without weights is none) keeps its numbers as keys.
    indexed = bool(positions) and positions == set(range(len(node.children)))
    return Container("list" if indexed else "dict")


def _in_order(node: _Node) -> list[_Node]:
    found = {step.value: child for step, child in node.children.items()}
    if any(position not in found for position in range(len(found))):
        _refuse("a list's items are not numbered from 0 without gaps", node.path)
    return [found[position] for position in range(len(found))]
