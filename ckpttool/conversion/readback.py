"""Record what a writer reads, leaf by leaf, and verify that the new file contains exactly that."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from ckpttool.core.atomic_write import Progress, WorkerThread, ignore_progress, keep_freed_memory
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass
from ckpttool.core.digests import SHARED, Digest, TeeSource, combine_digests, hash_tensor, map_tensors
from ckpttool.core.errors import CkpttoolError, FormatError
from ckpttool.core.source import Buffer, Source, Span, crc32c, iter_pieces
from ckpttool.core.tree import Leaf, Path, Tree, display

_MANY = 64 << 20


class LeafChecksums:
    """The CRC-32C and SHA-256 of every leaf, computed by a background thread as the data is read.

    Read-back data is compared by CRC alone, ten times as fast: equal bytes have the SHA-256 computed
    on the way.
    """

    def __init__(self, lane: WorkerThread) -> None:
        """Start with no digests."""
        self._lane = lane
        self._crc: dict[Path, int] = {}
        self._sha256: dict[Path, str] = {}
        self._same: dict[Path, TeeSource] = {}

    def watch(self, tree: Tree, progress: Progress = ignore_progress) -> Tree:
        """Return the same tree with leaves that report the data read from them."""
        total = sum(leaf.nbytes for _, leaf in tree.tensors())
        if total >= _MANY:
            keep_freed_memory()
        # Unchanged bytes have the SHA-256 that is computed of the source anyway.
        self._same = {p: leaf.source for p, leaf in tree.tensors() if isinstance(leaf.source, TeeSource)}
        done = 0

        def observed(path: Path, data: Buffer, running: _RunningChecksums | None) -> None:
            nonlocal done
            nbytes = len(data)
            work = partial(self._note, path, data) if running is None else partial(running.update, data)
            if nbytes < SHARED:
                work()
            else:
                self._lane.do(work, nbytes)
            done += nbytes
            progress(done, total)

        def finish(path: Path, running: _RunningChecksums) -> None:
            self._lane.do(partial(self._keep, path, running))

        watched = {
            path: replace(leaf, source=_ReadbackSource(leaf.source, path, observed, finish))
            if isinstance(leaf, Leaf)
            else leaf
            for path, leaf in tree.items()
        }
        return Tree(watched, tree.aliases, tree.containers)

    def compared(self, written: Checkpoint) -> Digest:
        """Read everything back; raise FormatError unless all data matches byte for byte."""
        return combine_digests(written, self.compared_tensors(written))

    def compared_tensors(self, written: Checkpoint) -> dict[Path, str]:
        """Read everything back as `compared` does; return the SHA-256 of each tensor."""
        self._lane.wait()
        hashes = map_tensors(written, self._lane, self._again)
        for path in self._crc:
            if path not in hashes:
                raise _readback_error(path)
        return hashes

    def sent_tensors(
        self, leaves: Mapping[Path, Leaf], has_bytes: Callable[[int, int, int], bool]
    ) -> dict[Path, str]:
        """Compare what was sent to a store; return the SHA-256 of each tensor.

        `leaves` are the tensors of the new object, `has_bytes(offset, length, crc)` returns whether bytes of
        this CRC-32C were written there. Only a tensor in another form is read back.
        """
        self._lane.wait()
        hashes = {}
        for path, leaf in leaves.items():
            span = leaf.source if isinstance(leaf.source, Span) else getattr(leaf.source, "base", None)
            if isinstance(span, Span) and path in self._crc:
                if not has_bytes(span.offset, span.length, self._crc[path]):
                    raise _readback_error(path)
                hashes[path] = self._hashed(path)
            else:
                hashes[path] = self._again(path, leaf)
        return hashes

    @property
    def crc32c(self) -> Mapping[Path, int]:
        """The checksum of each tensor that was read whole."""
        return self._crc

    def _again(self, path: Path, leaf: Leaf) -> str:
        if path not in self._crc:
            return hash_tensor(leaf)
        if checksum_tensor(leaf) != self._crc[path]:
            raise _readback_error(path)
        return self._hashed(path)

    def _hashed(self, path: Path) -> str:
        return self._same[path].sha256() if path in self._same else self._sha256[path]

    def _note(self, path: Path, data: Buffer) -> None:
        running = _RunningChecksums(hashed=path not in self._same)
        running.update(data)
        self._keep(path, running)

    def _keep(self, path: Path, running: _RunningChecksums) -> None:
        self._crc[path] = running.crc
        if running.sha256 is not None:
            self._sha256[path] = running.sha256.hexdigest()


def checksum_tensor(leaf: Leaf) -> int:
    """Return the CRC-32C of a tensor's bytes."""
    running = 0
    for piece in iter_pieces(leaf.source):
        running = crc32c(piece, running)
    return running


class _RunningChecksums:
    """CRC-32C of the pieces so far, and SHA-256 unless computed elsewhere."""

    def __init__(self, *, hashed: bool) -> None:
        self.crc, self.sha256 = 0, hashlib.sha256() if hashed else None

    def update(self, data: Buffer) -> None:
        """Add a piece."""
        self.crc = crc32c(data, self.crc)
        if self.sha256 is not None:
            self.sha256.update(data)


def _readback_error(path: Path) -> FormatError:
    return FormatError("the written data differs from the source", path=display(path))


@dataclass(frozen=True, slots=True)
class _ReadbackSource:
    """A source that reports to `record` the data read from it, and to `finish` the end of its pieces."""

    base: Source
    path: Path
    record: Callable[[Path, Buffer, _RunningChecksums | None], None]
    finish: Callable[[Path, _RunningChecksums], None]

    def read(self) -> Buffer:
        """Return the base source's bytes."""
        with self._located():
            data = self.base.read()
        self.record(self.path, data, None)
        return data

    def pieces(self, *, verify: bool = True) -> Iterator[Buffer]:
        """Yield the base source's pieces; the first complete pass is reported."""
        running = _RunningChecksums(hashed=not isinstance(self.base, TeeSource))
        pieces = iter_pieces(self.base, verify=verify)
        while True:
            with self._located():
                piece = next(pieces, None)
            if piece is None:
                break
            if verify:
                piece = bytes(piece)
                self.record(self.path, piece, running)
            yield piece
        if verify:
            self.finish(self.path, running)

    @contextlib.contextmanager
    def _located(self) -> Iterator[None]:
        try:
            yield
        except CkpttoolError as error:
            raise error.located(path=display(self.path)) from error
