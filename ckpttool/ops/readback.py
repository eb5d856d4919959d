"""What a writer was given, leaf by leaf, and the proof that the new file holds just that."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ckpttool.behind import Lane, keep_freed_memory
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, FormatError
from ckpttool.leaf import Leaf, Path, display
from ckpttool.ops.digest import SHARED, Digest, Telling, combined, each, sha256
from ckpttool.ops.progress import Progress, silent
from ckpttool.source import Buffer, Source, pieces
from ckpttool.tree import Tree
from ckpttool.wire.crc import crc32c

_MANY = 64 << 20


class Taken:
    """The CRC-32C and the sha256 of every leaf's bytes, noted by a lane as somebody else reads them.

    What is read back is compared by the CRC alone, ten times as fast: equal bytes have the sha256 that was
    taken on the way.
    """

    def __init__(self, lane: Lane) -> None:
        """Note nothing yet."""
        self._lane = lane
        self._crc: dict[Path, int] = {}
        self._sha256: dict[Path, str] = {}
        self._same: dict[Path, Telling] = {}

    def watch(self, tree: Tree, progress: Progress = silent) -> Tree:
        """Return the same tree whose leaves report what is read from them."""
        total = sum(leaf.nbytes for _, leaf in tree.tensors())
        if total >= _MANY:
            keep_freed_memory()
        # Bytes that go as they came have the sha256 that is taken of the source anyway.
        self._same = {p: leaf.source for p, leaf in tree.tensors() if isinstance(leaf.source, Telling)}
        done = 0

        def seen(path: Path, data: Buffer) -> None:
            nonlocal done
            nbytes = len(data)
            if nbytes < SHARED:
                self._note(path, data)
            else:
                self._lane.do(partial(self._note, path, data), nbytes)
            done += nbytes
            progress(done, total)

        watched = {
            path: replace(leaf, source=_Watched(leaf.source, path, seen)) if isinstance(leaf, Leaf) else leaf
            for path, leaf in tree.items()
        }
        return Tree(watched, tree.aliases, tree.containers)

    def compared(self, written: Checkpoint) -> Digest:
        """Read everything back; raise FormatError unless all that was taken is there, byte for byte."""
        self._lane.wait()
        found = each(written, self._lane, self._again)
        for path in self._crc:
            if path not in found:
                raise _different(path)
        return combined(written, found)

    def _again(self, path: Path, leaf: Leaf) -> str:
        if path not in self._crc:
            return sha256(leaf)
        running = 0
        for piece in pieces(leaf.source):
            running = crc32c(piece, running)
        if running != self._crc[path]:
            raise _different(path)
        return self._same[path].sha256() if path in self._same else self._sha256[path]

    def _note(self, path: Path, data: Buffer) -> None:
        self._crc[path] = crc32c(data)
        if path not in self._same:
            self._sha256[path] = hashlib.sha256(data).hexdigest()


def _different(path: Path) -> FormatError:
    return FormatError("what was written is not what was read", path=display(path))


@dataclass(frozen=True, slots=True)
class _Watched:
    """A source that tells `seen` what was read from it."""

    base: Source
    path: Path
    seen: Callable[[Path, Buffer], None]

    def read(self) -> Buffer:
        """Return the base's bytes."""
        try:
            data = self.base.read()
        except CkpttoolError as error:
            raise error.located(path=display(self.path)) from error
        self.seen(self.path, data)
        return data
