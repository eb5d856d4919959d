"""Reverse a conversion by its receipt: every entry of the source under its own path and name, bit for bit."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ckpttool.conversion.readback import LeafChecksums
from ckpttool.core import dtypes, plugins
from ckpttool.core.atomic_write import Output, WorkerThread
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import CkpttoolError, abbreviate_list
from ckpttool.core.sidecar import RESIDUE_SUFFIX
from ckpttool.core.tree import Container, Leaf, Path, Tree, ValueLeaf, key
from ckpttool.formats.embedded_tree import encode_tree
from ckpttool.formats.plain_json import encode_path
from ckpttool.formats.probe import WritingFormat
from ckpttool.mapping.rules import Move, merge_parts, parse_rule, unfinished_source

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


MAX_RECORD_BYTES = 64 << 20


class ReverseConversion(NamedTuple):
    """The source's tree and its origin; None if it cannot be restored, and a note why."""

    tree: Tree | None = None
    moves: tuple[Move, ...] = ()
    note: str | None = None
