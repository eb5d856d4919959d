"""A tree embedded as text, for formats that store only named arrays: paths, values, aliases, containers.

Formats without a place for a tree (safetensors, npz) keep it with their arrays as one ASCII JSON document,
so that the output is read back as the same tree. docs/formats/safetensors.md describes it. It is data:
nothing in it is imported or called.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast, get_args

from ckpttool.core import dtypes
from ckpttool.core import text as documents
from ckpttool.core.errors import FormatError
from ckpttool.core.tree import (
    Alias,
    Container,
    Leaf,
    Path,
    PathStep,
    Record,
    Role,
    Tree,
    ValueLeaf,
    display_exact,
)
from ckpttool.formats.plain_json import decode_path, decode_value, encode_path, encode_value, is_text

KEY = "ckpttool.tree"


def assign_names(
    paths: Iterable[Path],
    spelled: Callable[[Path], str],
    reserved: Collection[str] = (),
    safe: Callable[[str], str] = str,
) -> dict[Path, str]:
    """Return a name for each path: `spelled`, or an unambiguous name if that is taken or not text.

    Paths come in order, and the first of several with the same spelling gets it. `safe` converts an
    unambiguous name to one that the format can store.
    """
    used = set(reserved)
    names: dict[Path, str] = {}
    for path in paths:
        name = spelled(path)
        if name in used or not _is_text(name):
            name = _unused_name(safe(display_exact(path)), used)
        used.add(name)
        names[path] = name
    return names


def _unused_name(name: str, used: set[str]) -> str:
    plain = name.encode("ascii", "backslashreplace").decode("ascii").replace("\0", "\\0")
    number, candidate = 1, plain
    while candidate in used:
        number += 1
        candidate = f"{plain} {number}"
    return candidate


def _is_text(name: str) -> bool:
    return "\0" not in name and is_text(name)


VERSION = 1


def encode_tree(tree: Tree, names: Mapping[Path, str]) -> str:
    """Return the tree as JSON; `names` are the names of its arrays and aliases in the file.

    A value may also have a name: that of an array that repeats it for other readers.
    """
    places = {path: number for number, path in enumerate(tree)}
    document = {
        "version": VERSION,
        "leaves": [_encode_leaf(tree, path, names.get(path), places) for path in tree],
        "aliases": [
            [places[path], encode_path(alias.path), None if alias.key is None else names.get(alias.path)]
            for path, others in tree.aliases.items()
            for alias in others
        ],
        "containers": [
            [encode_path(path), kind.kind, encode_value(kind.name), encode_value(kind.state)]
            for path, kind in tree.containers.items()
        ],
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _encode_leaf(tree: Tree, path: Path, name: str | None, places: Mapping[Path, int]) -> list[Any]:
    leaf = tree[path]
    facts: dict[str, Any] = {} if leaf.role == "parameter" else {"role": leaf.role}
    if not isinstance(leaf, Leaf):
        facts["value"] = encode_value(leaf.value)
        return [encode_path(path), name, facts]
    facts["dtype"] = leaf.dtype
    if leaf.of is not None and leaf.of in places:
        facts["of"] = places[leaf.of]
    for fact in ("slot", "trainable", "name"):
        value = getattr(leaf, fact)
        if value is not None:
            facts[fact] = encode_value(value)
    return [encode_path(path), name, facts]


def needs_record(tree: Tree, bare: Tree) -> bool:
    """Return whether the file without the embedded tree (`bare`) would be read as a different tree."""
    if list(tree) != list(bare) or tree.containers not in ({}, bare.containers):
        return True
    return _aliases(tree) != _aliases(bare) or any(
        _leaf_facts(tree, path) != _leaf_facts(bare, path) for path in tree
    )


def _leaf_facts(tree: Tree, path: Path) -> tuple[Any, ...]:
    leaf = tree[path]
    if not isinstance(leaf, Leaf):
        return (type(leaf.value).__name__, leaf.value, leaf.role)
    return (leaf.dtype, leaf.shape, leaf.role, leaf.of, leaf.slot, leaf.trainable, leaf.name)


def _aliases(tree: Tree) -> dict[Path, list[tuple[Path, bool]]]:
    return {
        path: [(a.path, a.key is None) for a in others] for path, others in tree.aliases.items() if others
    }


_ROLES = get_args(Role)
_PLAIN = (bool, int, float, complex, str, bytes, Record)
_CONTAINER_KINDS = ("dict", "OrderedDict", "list", "tuple", "record", "module")


class EmbeddedTreeError(FormatError):
    """The embedded tree is invalid, or another program kept it while replacing the arrays."""


def decode_tree(text: bytes, arrays: Mapping[str, Leaf], untyped: Mapping[str, int] | None = None) -> Tree:
    """Decode the tree in `text` over a file's arrays, by name.

    `untyped` maps names to element sizes in bytes of arrays whose type the file cannot record (NumPy's
    void). Raise DamagedError unless every array has one place in the tree, or repeats a value.
    """
    try:
        return _TreeDecoder(arrays, untyped or {}).tree(
            documents.parse_strict_json(text, "the embedded tree", "header_bytes")
        )
    except (FormatError, RecursionError) as error:
        reason = error.message if isinstance(error, FormatError) else "the embedded tree is nested too deeply"
        raise EmbeddedTreeError(reason) from error


class _TreeDecoder:
    """Decode the document in a single pass."""

    def __init__(self, arrays: Mapping[str, Leaf], untyped: Mapping[str, int]) -> None:
        self.arrays = arrays
        self.untyped = untyped
        self.steps: dict[str, PathStep] = {}
        self.used: set[str] = set()

    def tree(self, document: dict[str, Any]) -> Tree:
        if (
            document.keys() != {"version", "leaves", "aliases", "containers"}
            or document["version"] != VERSION
        ):
            raise EmbeddedTreeError("the embedded tree has an unsupported version")
        leaves = self._leaves(_require_rows(document["leaves"]))
        if self.used != self.arrays.keys():
            raise EmbeddedTreeError("the embedded tree does not match the tensors in this file")
        aliases = self._aliases(_require_rows(document["aliases"]), list(leaves), set(leaves))
        return Tree(leaves, aliases, self._containers(document["containers"]))

    def _leaves(self, rows: list[Any]) -> dict[Path, Leaf | ValueLeaf]:
        paths = [decode_path(row[0], self.steps) for row in rows]
        leaves = {path: self._leaf(row[1], row[2], paths) for path, row in zip(paths, rows, strict=True)}
        if len(leaves) != len(rows):
            raise EmbeddedTreeError("the embedded tree lists two leaves under one path")
        return leaves

    def _leaf(self, name: Any, facts: Any, paths: list[Path]) -> Leaf | ValueLeaf:
        if not isinstance(facts, dict):
            raise EmbeddedTreeError("the embedded tree is damaged")
        role = facts.get("role", "parameter")
        if role not in _ROLES:
            raise EmbeddedTreeError("the embedded tree contains an unknown role")
        if name is not None:
            self._use(name)
        if "value" in facts:
            value = decode_value(facts["value"])
            if value is not None and type(value) not in _PLAIN:
                raise EmbeddedTreeError("the embedded tree contains an unsupported value")
            return ValueLeaf(value, role)
        leaf = self._array(name, facts.get("dtype"))
        slot, trainable, second = (decode_value(facts.get(fact)) for fact in ("slot", "trainable", "name"))
        if not isinstance(trainable, bool | None) or not all(
            isinstance(t, str | None) for t in (slot, second)
        ):
            raise EmbeddedTreeError("the embedded tree is damaged")
        of = self._owner(facts.get("of"), paths)
        return replace(leaf, role=cast(Role, role), of=of, slot=slot, trainable=trainable, name=second)

    def _array(self, name: Any, dtype: Any) -> Leaf:
        """Return the array of that name if its type, or its element size, matches."""
        leaf = self.arrays.get(name) if isinstance(name, str) else None
        if leaf is not None and leaf.dtype == dtype:
            return leaf
        row = dtypes.BY_NAME.get(dtype) if isinstance(dtype, str) else None
        if leaf is None or row is None or not row.itemsize or self.untyped.get(name) != row.itemsize:
            raise EmbeddedTreeError("the embedded tree does not match the tensors in this file")
        return replace(leaf, dtype=row.name)

    def _use(self, name: Any) -> None:
        if not isinstance(name, str) or name in self.used or name not in self.arrays:
            raise EmbeddedTreeError("the embedded tree does not match the tensors in this file")
        self.used.add(name)

    def _owner(self, of: Any, paths: list[Path]) -> Path | None:
        if of is None:
            return None
        if type(of) is not int or not 0 <= of < len(paths):
            raise EmbeddedTreeError("the embedded tree refers to an owner that does not exist")
        return paths[of]

    def _aliases(self, rows: list[Any], paths: list[Path], used: set[Path]) -> dict[Path, tuple[Alias, ...]]:
        aliases: dict[Path, list[Alias]] = {}
        for index, steps, name in rows:
            path = decode_path(steps, self.steps)
            if type(index) is not int or not 0 <= index < len(paths) or not isinstance(name, str | None):
                raise EmbeddedTreeError("the embedded tree has an alias without a target")
            if path in used:
                raise EmbeddedTreeError("the embedded tree lists two entries under one path")
            used.add(path)
            aliases.setdefault(paths[index], []).append(Alias(path, name))
        return {path: tuple(others) for path, others in aliases.items()}

    def _containers(self, rows: Any) -> dict[Path, Container]:
        containers: dict[Path, Container] = {}
        for row in rows if isinstance(rows, list) else [None]:
            if not isinstance(row, list) or len(row) != 4 or row[1] not in _CONTAINER_KINDS:
                raise EmbeddedTreeError("the embedded tree is damaged")
            name = decode_value(row[2])
            if not isinstance(name, str | None):
                raise EmbeddedTreeError("the embedded tree is damaged")
            containers[decode_path(row[0], self.steps)] = Container(row[1], name, decode_value(row[3]))
        return containers


def _require_rows(rows: Any) -> list[Any]:
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 3 for row in rows):
        raise EmbeddedTreeError("the embedded tree is damaged")
    return rows
