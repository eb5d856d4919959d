"""Reverse a conversion by its receipt: every entry of the source under its own path and name, bit for bit."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from ckpttool.conversion.readback import LeafChecksums
from ckpttool.core import atomic_write, dtypes, plugins
from ckpttool.core.atomic_write import Output, WorkerThread
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.digests import digest_checkpoint
from ckpttool.core.errors import CkpttoolError, FormatError, abbreviate_list
from ckpttool.core.sidecar import RESIDUE_SUFFIX
from ckpttool.core.source import Inline
from ckpttool.core.tree import Container, Leaf, Path, Tree, ValueLeaf, key
from ckpttool.formats.embedded_tree import decode_tree, encode_tree
from ckpttool.formats.plain_json import decode_path, encode_path
from ckpttool.formats.probe import WritingFormat
from ckpttool.mapping.rules import Move, Plan, apply_plan, merge_parts, parse_rule, unfinished_source

_FORMAT = "pytorch"
_SMALL = 64  # bytes of a tensor stored in the record itself
_MOST_BYTES = 4 << 20  # the limit for a sidecar is 16 MB
_TOP = Container("dict")
_IRREVERSIBLE = "not reversible: "
_FOREIGN = "the source contains objects of classes that the record cannot store"


def is_unavoidable_note(note: str) -> bool:
    """Return whether no option changes what a note reports: it concerns every such source."""
    return note.startswith(_IRREVERSIBLE + _FOREIGN)


@dataclass(slots=True)
class ReverseRecord:
    """The source's packed tree, None if not reversible (`why`), and data stored separately."""

    tree: str | None = None
    kept: Tree = field(default_factory=lambda: Tree({}))
    why: str | None = None
    _sha256: str | None = None

    @property
    def note(self) -> str | None:
        """The note shown when the source cannot be restored."""
        return None if self.why is None else f"{_IRREVERSIBLE}{self.why}"

    @property
    def record(self) -> Mapping[str, str | None] | None:
        """The record in the sidecar, after the residue file has been written."""
        return None if self.tree is None else {"tree": self.tree, "residue_sha256": self._sha256}

    def outputs(self, target: str, lane: WorkerThread) -> list[Output]:
        """Return the residue file to write beside the target, if any; the background thread compares it."""
        if not self.kept:
            return []
        writer = cast(WritingFormat, plugins.find("formats", _FORMAT).load())
        checksums = LeafChecksums(lane)
        (piece,) = writer.pieces(checksums.watch(self.kept))

        def check(temporary: str) -> None:
            self._sha256 = checksums.compared(writer.read(temporary)).sha256

        nbytes = sum(leaf.nbytes for _, leaf in self.kept.tensors())
        return [Output(residue_path(target), piece.write, check, nbytes=nbytes, follows=True)]


def residue_path(path: str) -> str:
    """Return the name of the residue of the checkpoint at `path` (a file or a prefix)."""
    return path + RESIDUE_SUFFIX


def record_reverse(source: Tree, moves: Sequence[Move], written: Mapping[Path, Path]) -> ReverseRecord:
    """Return how to restore `source` from a target; `written` are the tensors' paths as read back.

    Nothing is recorded when something cannot be restored: an object of a foreign class.
    """
    foreign = [node.name for node in source.containers.values() if node.kind in ("record", "module")]
    if foreign:
        named = abbreviate_list(sorted({name for name in foreign if name}), 2)
        return ReverseRecord(why=f"{_FOREIGN} ({named})" if named else _FOREIGN)
    ways: dict[Path, list[Move]] = {}
    for move in moves:
        if move.target in written and parse_rule(move.rule.name) == move.rule:
            ways.setdefault(move.source, []).append(move)
    names = {alias.path: alias.key for others in source.aliases.values() for alias in others if alias.key}
    kept: dict[Path, Leaf | ValueLeaf] = {}
    tensors: dict[str, Any] = {}
    for path, leaf in source.tensors():
        names[path] = name = str(len(tensors))
        tensors[name] = {"key": leaf.key, "dtype": leaf.dtype, "shape": leaf.shape}
        back = _inverse_moves(leaf, ways.get(path, ()))
        if back:
            tensors[name]["from"] = [[encode_path(written[move.target]), move.rule.name] for move in back]
        elif leaf.nbytes <= _SMALL and leaf.size <= _SMALL:
            tensors[name]["data"] = base64.b64encode(leaf.read()).decode()
        elif dtypes.BY_NAME[leaf.dtype].torch is not None:
            kept[key(name),] = Leaf(leaf.dtype, leaf.shape, leaf.source, name)
        else:
            return ReverseRecord(
                why=f"{source.names[path]} ({leaf.dtype}) cannot be stored beside the target"
            )
    try:
        text = json.dumps({"tree": encode_tree(source, names), "tensors": tensors})
    except CkpttoolError as error:
        return ReverseRecord(why=error.message)
    packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    if len(packed) > _MOST_BYTES:
        return ReverseRecord(why=f"the record would exceed {_MOST_BYTES >> 20} MB")
    return ReverseRecord(packed, Tree(kept, {}, {(): _TOP}))


def _inverse_moves(leaf: Leaf, ways: Sequence[Move]) -> list[Move]:
    """Return the moves whose inverses together restore the leaf, none if they do not."""
    parts: list[Move] = []
    whole: Leaf | ValueLeaf | None = None
    for move in ways:
        again = move.rule.inverse(leaf).leaf(move.rule.leaf(leaf))
        if unfinished_source(again) is None:
            return [move]
        whole = again if whole is None else merge_parts(whole, again)
        parts.append(move)
        if whole is None:
            return []
    unfinished = unfinished_source(whole) if whole is not None else None
    return parts if unfinished is not None and unfinished.finished else []


_MAX_RECORD_BYTES = 64 << 20


class ReverseConversion(NamedTuple):
    """The source's tree and its origin; None if it cannot be restored, and a note why."""

    tree: Tree | None = None
    moves: tuple[Move, ...] = ()
    note: str | None = None


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
    data = engine.decompress(base64.b64decode(text, validate=True), _MAX_RECORD_BYTES)
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
