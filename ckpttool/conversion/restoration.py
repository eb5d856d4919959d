"""Rebuild the source of a conversion from the target and the record in its sidecar."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from ckpttool.conversion.reverse import MAX_RECORD_BYTES, ReverseConversion, residue_path
from ckpttool.core import atomic_write, plugins
from ckpttool.core.digests import digest_checkpoint
from ckpttool.core.errors import CkpttoolError, FormatError
from ckpttool.core.source import Inline
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, key
from ckpttool.formats.embedded_tree import decode_tree
from ckpttool.formats.plain_json import decode_path
from ckpttool.formats.probe import WritingFormat
from ckpttool.mapping.rules import Move, Plan, apply_plan, parse_rule


def reverse_conversion(tree: Tree, record: Mapping[str, Any], path: str) -> ReverseConversion:
    """Return the source of `tree`, the target at `path`, from the record in its sidecar.

    Raise FormatError for an invalid record.
    """
    kept = _read_residue(path, record.get("residue_sha256"))
    if isinstance(kept, str):
        return ReverseConversion(note=kept)
    try:
        return _rebuild_tree(tree, _unpack_record(record.get("tree")), kept)
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


def _read_residue(path: str, sha256: object) -> Tree | str:
    """Return the residue stored beside the checkpoint, or why it cannot be used."""
    file = residue_path(path)
    if sha256 is None:
        return Tree({})
    there = os.path.isfile(file)
    reader = cast(WritingFormat, plugins.find("formats", "pytorch").load())
    if there and digest_checkpoint(residue := reader.read(file)).sha256 == sha256:
        return residue.tree
    for pending in atomic_write.find_pending_files(file):
        with contextlib.suppress(CkpttoolError):
            if digest_checkpoint(residue := reader.read(pending)).sha256 == sha256:
                return residue.tree
    if not there:
        return f"{os.path.basename(file)} is missing, so the entries stored in it are not restored"
    return f"{os.path.basename(file)} belongs to another conversion and is not used"


def _unpack_record(text: object) -> Mapping[str, Any]:
    if not isinstance(text, str):
        raise TypeError("not a string")
    engine = zlib.decompressobj()
    data = engine.decompress(base64.b64decode(text, validate=True), MAX_RECORD_BYTES)
    if not engine.eof:
        raise ValueError("truncated or too long")
    record = json.loads(data)
    if not isinstance(record, dict):
        raise TypeError("not a JSON object")
    return record


def _rebuild_tree(tree: Tree, record: Mapping[str, Any], kept: Tree) -> ReverseConversion:
    """Return the recorded tree over the restored tensors, each by its number."""
    moves: list[Move] = []
    added: dict[Path, Leaf | ValueLeaf] = {}
    for name, recorded in record["tensors"].items():
        if "from" in recorded:
            moves += [_recorded_move(tree, recorded, name, *way) for way in recorded["from"]]
        else:
            added[key(name),] = kept[key(name),] if "data" not in recorded else _inline_leaf(recorded)
    flat = apply_plan(tree, Plan(tuple(moves), added))
    arrays = {name: _restore_key(flat[key(name),], recorded) for name, recorded in record["tensors"].items()}
    restored = decode_tree(record["tree"].encode(), arrays)
    places = {id(leaf.source): path for path, leaf in restored.tensors()}
    there = {name: places[id(leaf.source)] for name, leaf in arrays.items()}
    return ReverseConversion(
        restored, tuple(replace(move, target=there[str(move.target[0].value)]) for move in moves)
    )


def _recorded_move(tree: Tree, recorded: Mapping[str, Any], name: str, at: object, text: str) -> Move:
    source, rule = decode_path(at, {}), parse_rule(text)
    if rule is None or source not in tree:
        raise ValueError("unknown rule or tensor")
    leaf = tree[source]
    if not isinstance(leaf, Leaf):
        raise TypeError("not a tensor")
    # The inverse of a cast or a reshape needs the tensor's original dtype and shape.
    return Move(
        source,
        (key(name),),
        rule.inverse(Leaf(recorded["dtype"], _recorded_shape(recorded), Inline(b""), "")),
    )


def _recorded_shape(recorded: Mapping[str, Any]) -> tuple[int, ...]:
    if not all(type(n) is int and n >= 0 for n in recorded["shape"]):
        raise ValueError("invalid shape")
    return tuple(recorded["shape"])


def _inline_leaf(recorded: Mapping[str, Any]) -> Leaf:
    data = base64.b64decode(recorded["data"], validate=True)
    leaf = Leaf(recorded["dtype"], _recorded_shape(recorded), Inline(data), "")
    if leaf.nbytes != len(data) and leaf.dtype != "string":
        raise ValueError("the length does not match the shape")
    return leaf


def _restore_key(leaf: Leaf | ValueLeaf, recorded: Mapping[str, Any]) -> Leaf:
    if (
        not isinstance(leaf, Leaf)
        or leaf.shape != _recorded_shape(recorded)
        or not isinstance(recorded["key"], str)
    ):
        raise TypeError("the tensor does not match the record")
    return replace(leaf, key=recorded["key"])
