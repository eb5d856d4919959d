"""How a conversion is undone: what the source was like, entry by entry, and what brings each one back.

The receipt holds a record of the source's tree without its numbers. An entry comes back from the target by
the inverse of its rule, from the record itself where it is small, or from `DST.ckpttool.residue.pt`, a
PyTorch file beside the target for what that cannot hold. The record names the digest of that file.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ckpttool import dtypes, plugins
from ckpttool.behind import Lane
from ckpttool.errors import CkpttoolError, some
from ckpttool.formats.probe import WritingFormat
from ckpttool.formats.recorded import recorded
from ckpttool.formats.recorded.values import steps
from ckpttool.leaf import Leaf, Path, ValueLeaf, key
from ckpttool.mapping.parts import merged, unfinished
from ckpttool.mapping.report import Move
from ckpttool.mapping.spelling import parsed
from ckpttool.ops.readback import Taken
from ckpttool.tree import Container, Tree
from ckpttool.writing import Output

SUFFIX = ".ckpttool.residue.pt"
_FORMAT = "pytorch"
_SMALL = 64  # bytes of a tensor that the record itself holds
_MOST_BYTES = 4 << 20  # a sidecar may have 16 MB
_TOP = Container("dict")


@dataclass(slots=True)
class Undo:
    """The packed tree of the source, None if not all can be brought back (`why`), and what is kept apart."""

    tree: str | None = None
    kept: Tree = field(default_factory=lambda: Tree({}))
    why: str | None = None
    _sha256: str | None = None

    @property
    def note(self) -> str | None:
        """What people read where nothing brings the source back."""
        return None if self.why is None else f"no way back is recorded: {self.why}"

    @property
    def record(self) -> Mapping[str, str | None] | None:
        """The record as the sidecar holds it, once the file of what is kept apart has been written."""
        return None if self.tree is None else {"tree": self.tree, "residue_sha256": self._sha256}

    def outputs(self, target: str, lane: Lane) -> list[Output]:
        """Return the file to write beside the target, if any; the lane compares what it holds."""
        if not self.kept:
            return []
        writer = cast(WritingFormat, plugins.find("formats", _FORMAT).load())
        taken = Taken(lane)
        (piece,) = writer.pieces(taken.watch(self.kept))

        def check(temporary: str) -> None:
            self._sha256 = taken.compared(writer.read(temporary)).sha256

        nbytes = sum(leaf.nbytes for _, leaf in self.kept.tensors())
        return [Output(beside(target), piece.write, check, nbytes=nbytes, follows=True)]


def beside(path: str) -> str:
    """Return the name of the residue of the checkpoint at `path` (a file or a prefix)."""
    return path + SUFFIX


def undo(source: Tree, moves: Sequence[Move], written: Mapping[Path, Path]) -> Undo:
    """Return how `source` comes back from a target; `written` are the paths of its tensors as they are read.

    Nothing is recorded when something can be brought back by nothing: an object of a foreign class.
    """
    foreign = [held.name for held in source.containers.values() if held.kind in ("record", "module")]
    if foreign:
        named = some(sorted({name for name in foreign if name}), 2)
        told = "the source holds objects of classes that the record does not keep"
        return Undo(why=f"{told} ({named})" if named else told)
    ways: dict[Path, list[Move]] = {}
    for move in moves:
        if move.target in written and parsed(move.rule.name) == move.rule:
            ways.setdefault(move.source, []).append(move)
    names = {alias.path: alias.key for others in source.aliases.values() for alias in others if alias.key}
    kept: dict[Path, Leaf | ValueLeaf] = {}
    tensors: dict[str, Any] = {}
    for path, leaf in source.tensors():
        names[path] = name = str(len(tensors))
        tensors[name] = {"key": leaf.key, "dtype": leaf.dtype, "shape": leaf.shape}
        back = _back(leaf, ways.get(path, ()))
        if back:
            tensors[name]["from"] = [[steps(written[move.target]), move.rule.name] for move in back]
        elif leaf.nbytes <= _SMALL and leaf.size <= _SMALL:
            tensors[name]["data"] = base64.b64encode(leaf.read()).decode()
        elif dtypes.BY_NAME[leaf.dtype].torch is not None:
            kept[key(name),] = Leaf(leaf.dtype, leaf.shape, leaf.source, name)
        else:
            return Undo(why=f"nothing keeps {source.names[path]} ({leaf.dtype}) beside the target")
    try:
        text = json.dumps({"tree": recorded(source, names), "tensors": tensors})
    except CkpttoolError as error:
        return Undo(why=error.message)
    packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    if len(packed) > _MOST_BYTES:
        return Undo(why=f"the record would be larger than {_MOST_BYTES >> 20} MB")
    return Undo(packed, Tree(kept, {}, {(): _TOP}))


def _back(leaf: Leaf, ways: Sequence[Move]) -> list[Move]:
    """Return the moves whose inverses together give the leaf, none if they do not."""
    parts: list[Move] = []
    whole: Leaf | ValueLeaf | None = None
    for move in ways:
        again = move.rule.inverse(leaf).leaf(move.rule.leaf(leaf))
        if unfinished(again) is None:
            return [move]
        whole = again if whole is None else merged(whole, again)
        parts.append(move)
        if whole is None:
            return []
    made = unfinished(whole) if whole is not None else None
    return parts if made is not None and made.finished else []
