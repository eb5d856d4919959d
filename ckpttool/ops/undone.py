"""Undoes a conversion by its receipt: every entry of the source under its own path and name, bit for bit."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

from ckpttool import plugins
from ckpttool.errors import CkpttoolError, FormatError
from ckpttool.formats.probe import WritingFormat
from ckpttool.formats.recorded import restored
from ckpttool.formats.recorded.values import path_of
from ckpttool.leaf import Leaf, Path, ValueLeaf, key
from ckpttool.mapping.plan import Plan, build
from ckpttool.mapping.report import Move
from ckpttool.mapping.spelling import parsed
from ckpttool.ops.digest import digest_of
from ckpttool.ops.undo import beside
from ckpttool.source import Inline
from ckpttool.tree import Tree
from ckpttool.writing import names

_MOST_BYTES = 64 << 20


class Undone(NamedTuple):
    """The source's tree and what it comes from; None where there is no way back, and a note why."""

    tree: Tree | None = None
    moves: tuple[Move, ...] = ()
    note: str | None = None


def undone(tree: Tree, record: Mapping[str, Any], path: str) -> Undone:
    """Return the source of `tree`, the target at `path`, as the record in its sidecar says.

    Raise FormatError for a record that makes no sense.
    """
    kept = _kept(path, record.get("residue_sha256"))
    if isinstance(kept, str):
        return Undone(note=kept)
    try:
        return _undone(tree, _unpacked(record.get("tree")), kept)
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
        zlib.error,
        CkpttoolError,
    ) as error:
        raise FormatError("the sidecar's record of its source is damaged", file=path) from error


def _kept(path: str, sha256: object) -> Tree | str:
    """Return what is kept beside the checkpoint, or why that cannot be used."""
    file = beside(path)
    if sha256 is None:
        return Tree({})
    there = os.path.isfile(file)
    reader = cast(WritingFormat, plugins.find("formats", "pytorch").load())
    if there and digest_of(found := reader.read(file)).sha256 == sha256:
        return found.tree
    for each in names.waiting(file):
        with contextlib.suppress(CkpttoolError):
            if digest_of(found := reader.read(each)).sha256 == sha256:
                return found.tree
    if not there:
        return f"{os.path.basename(file)} is not there: what it kept stays away"
    return f"{os.path.basename(file)} was written for another conversion and is not used"


def _unpacked(text: object) -> Mapping[str, Any]:
    if not isinstance(text, str):
        raise TypeError("no text")
    engine = zlib.decompressobj()
    data = engine.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
    if not engine.eof:
        raise ValueError("cut off or too long")
    record = json.loads(data)
    if not isinstance(record, dict):
        raise TypeError("no record")
    return record


def _undone(tree: Tree, record: Mapping[str, Any], kept: Tree) -> Undone:
    """Return the recorded tree over the tensors that come back, each by its number."""
    moves: list[Move] = []
    added: dict[Path, Leaf | ValueLeaf] = {}
    for name, said in record["tensors"].items():
        if "from" in said:
            moves += [_move(tree, said, name, *way) for way in said["from"]]
        else:
            added[key(name),] = kept[key(name),] if "data" not in said else _inline(said)
    flat = build(tree, Plan(tuple(moves), added))
    arrays = {name: _as_said(flat[key(name),], said) for name, said in record["tensors"].items()}
    made = restored(record["tree"].encode(), arrays)
    places = {id(leaf.source): place for place, leaf in made.tensors()}
    there = {name: places[id(leaf.source)] for name, leaf in arrays.items()}
    return Undone(made, tuple(replace(move, target=there[str(move.target[0].value)]) for move in moves))


def _move(tree: Tree, said: Mapping[str, Any], name: str, at: object, text: str) -> Move:
    source, rule = path_of(at, {}), parsed(text)
    if rule is None or source not in tree:
        raise ValueError("no such rule or tensor")
    leaf = tree[source]
    if not isinstance(leaf, Leaf):
        raise TypeError("no tensor")
    # The inverse of a cast or a reshape needs to know what the tensor was.
    return Move(source, (key(name),), rule.inverse(Leaf(said["dtype"], _shape(said), Inline(b""), "")))


def _shape(said: Mapping[str, Any]) -> tuple[int, ...]:
    if not all(type(n) is int and n >= 0 for n in said["shape"]):
        raise ValueError("no shape")
    return tuple(said["shape"])


def _inline(said: Mapping[str, Any]) -> Leaf:
    data = base64.b64decode(said["data"], validate=True)
    leaf = Leaf(said["dtype"], _shape(said), Inline(data), "")
    if leaf.nbytes != len(data) and leaf.dtype != "string":
        raise ValueError("not as long as its shape says")
    return leaf


def _as_said(leaf: Leaf | ValueLeaf, said: Mapping[str, Any]) -> Leaf:
    if not isinstance(leaf, Leaf) or leaf.shape != _shape(said) or not isinstance(said["key"], str):
        raise TypeError("another tensor")
    return replace(leaf, key=said["key"])
