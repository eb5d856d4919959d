"""Tables too large to be read whole: the index is kept, a block is read when one of its keys is asked for.

The layout is that of wire.sstable, which judges every block.
"""

from __future__ import annotations

import bisect
import functools
from typing import NamedTuple

from ckpttool.errors import CkpttoolError, FormatError, TruncatedError
from ckpttool.source import File
from ckpttool.wire import sstable
from ckpttool.wire.sstable import FOOTER, TRAILER, Handle

# Compressed blocks of this size are kept for a while: thousands of small entries may be in one. Of larger
# ones, the last is.
_KEPT = 1 << 20

Place = tuple[int, int]  # start and length in the file


class Table(NamedTuple):
    """An open table: its data blocks, and for each a key that is not smaller than its last."""

    file: File
    bounds: tuple[bytes, ...]
    blocks: tuple[Handle, ...]

    def block_of(self, key: bytes) -> Handle | None:
        """Return the block that holds the key if any does; no data is read."""
        at = bisect.bisect_left(self.bounds, key)
        return self.blocks[at] if at < len(self.blocks) else None

    def first(self) -> tuple[bytes, bytes] | None:
        """Return the first key and its value."""
        if not self.blocks:
            return None
        entries = _entries(self.file, self.blocks[0])
        return entries[0] if entries else None


def open_table(file: File) -> Table:
    """Read the footer and the index of a table; raise FormatError where they break a rule."""
    try:
        if file.size < FOOTER:
            raise TruncatedError(
                "the table ends before its footer",
                expected=f"at least {FOOTER} bytes",
                found=str(file.size),
            )
        meta, index = _footer(file)
        _entries(file, meta)
        bounds, blocks, free = [], [], 0
        for bound, value in _entries(file, index):
            handle = sstable.handle(value)
            _require_room(file, handle)
            if handle.offset < free:
                # A block that is named again and again would cost its size each time.
                raise FormatError("the blocks of the table overlap", offset=handle.offset)
            free = handle.offset + handle.size + TRAILER
            bounds.append(bound)
            blocks.append(handle)
    except CkpttoolError as error:
        raise error.located(file=file.path) from error.__cause__
    return Table(file, tuple(bounds), tuple(blocks))


def value(file: File, block: Handle, key: bytes) -> bytes:
    """Return the value of a key in a block; raise FormatError when the block is damaged or lacks the key.

    A block's checksum is verified once. After that, a key of a block that is not compressed costs its own
    bytes only.
    """
    try:
        places = _places(file, block)
        if places is None:
            found = _kept(file, block).get(key)
        else:
            place = places.get(key)
            found = None if place is None else file.read(*place)
    except CkpttoolError as error:
        raise error.located(file=file.path) from error.__cause__
    if found is None:
        raise FormatError("the table lacks an entry that it should have", file=file.path, offset=block.offset)
    return found


def _footer(file: File) -> tuple[Handle, Handle]:
    start = file.size - FOOTER
    try:
        return sstable.footer(file.read(start, FOOTER))
    except CkpttoolError as error:
        error.offset = (error.offset or 0) + start
        raise


def _require_room(file: File, handle: Handle) -> None:
    room = file.size - FOOTER - TRAILER - handle.offset
    if handle.size > room:
        raise TruncatedError(
            "a block of the table reaches beyond the file",
            offset=handle.offset,
            expected=f"{handle.size:,} bytes",
            found=f"{max(0, room):,}",
        )


def _stored(file: File, handle: Handle) -> bytes:
    _require_room(file, handle)
    return file.read(handle.offset, handle.size + TRAILER + FOOTER)


def _entries(file: File, handle: Handle) -> list[sstable.Entry]:
    return _judged(file, _stored(file, handle), handle)


def _judged(file: File, stored: bytes, handle: Handle) -> list[sstable.Entry]:
    try:
        return sstable.block(stored, sstable.room(file.size))
    except CkpttoolError as error:
        error.offset = (error.offset or 0) + handle.offset
        raise


@functools.lru_cache(maxsize=4096)
def _places(file: File, handle: Handle) -> dict[bytes, Place] | None:
    """Return where the values of a sound block are in the file; None when it is compressed."""
    stored = _stored(file, handle)
    _judged(file, stored, handle)
    if stored[handle.size]:
        return None
    contents = stored[: handle.size]
    return {key: (handle.offset + start, length) for key, start, length in sstable.places(contents)}


@functools.lru_cache(maxsize=8)
def _small(file: File, handle: Handle) -> dict[bytes, bytes]:
    return dict(_entries(file, handle))


@functools.lru_cache(maxsize=1)
def _large(file: File, handle: Handle) -> dict[bytes, bytes]:
    return dict(_entries(file, handle))


def _kept(file: File, handle: Handle) -> dict[bytes, bytes]:
    file.read(0, 0)  # the file must still be the one that was listed
    return (_small if handle.size <= _KEPT else _large)(file, handle)
