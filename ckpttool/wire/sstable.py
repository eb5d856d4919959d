"""Sorted string tables: the footer, blocks and prefix-shared keys of a TensorFlow `.index` file.

The layout is that of LevelDB's doc/table_format.md, as written by tensorflow's tsl/lib/io/table_builder.cc.
Positions in errors count from the start of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from ckpttool import limits
from ckpttool.errors import ChecksumError, CkpttoolError, FormatError, TruncatedError, UnsupportedError
from ckpttool.wire import crc, varint

MAGIC = bytes.fromhex("57fb808b247547db")
FOOTER = 48
TRAILER = 5  # one byte of compression type, four of masked CRC-32C over contents and type
_NONE, _SNAPPY = 0, 1  # tsl/lib/io/table_options.h

# The densest element of snappy copies 64 bytes and takes three (github.com/google/snappy,
# format_description.txt).
_SNAPPY_RATIO = 22

# Prefix sharing lets four bytes stand for a key of any length. Every sixteenth key is stored whole
# (tsl/lib/io/table_options.h, block_restart_interval): more than that is an attack, not a table.
_KEY_BYTES_FLOOR = 64 << 20
_KEY_EXPANSION = 16
# An entry of a real table takes more bytes: parts of its key, and a message with a shape and a place.
_ENTRY = 32

Entry = tuple[bytes, bytes]


class Room(NamedTuple):
    """What a table may ask for: bytes that one block unpacks to, entries, and bytes of all its keys."""

    block: int
    entries: int
    keys: int


def room(size: int) -> Room:
    """Return what a table of `size` bytes may ask for under the limits that hold."""
    here = limits.current()
    return Room(here.block_bytes, here.entries + size // _ENTRY, max(_KEY_BYTES_FLOOR, _KEY_EXPANSION * size))


class Handle(NamedTuple):
    """Where a block's contents are."""

    offset: int
    size: int


def read(data: bytes) -> list[Entry]:
    """Return every key and value of the table in order; raise FormatError where it breaks a rule.

    Every block's checksum is verified before it is decompressed. No block may be larger than the limit, as it
    is stored or after decompression.
    """
    meta, index = footer(data)
    left = room(len(data))
    _small_block(data, meta, left)
    found: list[Entry] = []
    lower: bytes | None = None
    free = 0
    for bound, value in _small_block(data, index, left):
        handle = _handle(value, 0, len(value))[0]
        if handle.offset < free:
            # Blocks are written one after the other; one that is named again and again would cost its
            # size each time.
            raise FormatError("the blocks of the table overlap", offset=handle.offset)
        free = handle.offset + handle.size + TRAILER
        entries = _small_block(data, handle, left)
        _require_between(lower, entries, bound, handle.offset)
        lower = bound
        found += entries
        left = Room(left.block, left.entries - len(entries), left.keys - sum(len(key) for key, _ in entries))
    return found


def _small_block(data: bytes, handle: Handle, left: Room) -> list[Entry]:
    if left.block < handle.size <= len(data):
        raise limits.exceeded(
            "block_bytes", "a block of the table is too large", handle.size, offset=handle.offset
        )
    return _block(data, handle, left)


def footer(data: bytes) -> tuple[Handle, Handle]:
    """Return the handles of the metaindex block and of the index block."""
    at = len(data) - FOOTER
    if at < 0:
        raise TruncatedError(
            "the table ends before its footer", expected=f"at least {FOOTER} bytes", found=str(len(data))
        )
    if data[-8:] != MAGIC:
        raise FormatError(
            "the table does not end with its magic number",
            offset=len(data) - 8,
            expected=MAGIC.hex(),
            found=data[-8:].hex(),
            hint="the file may be cut off, or not be a checkpoint index at all",
        )
    try:
        meta, after = _handle(data, at, len(data) - 8)
        index, _ = _handle(data, after, len(data) - 8)
    except FormatError as error:
        raise FormatError("the table's footer is damaged", offset=at) from error
    return meta, index


def _handle(data: bytes, at: int, stop: int) -> tuple[Handle, int]:
    offset, at = varint.read(data, at, stop)
    size, at = varint.read(data, at, stop)
    return Handle(offset, size), at


def _block(data: bytes, handle: Handle, left: Room) -> list[Entry]:
    offset, size = handle
    room = len(data) - FOOTER - TRAILER - offset
    if size > room:
        raise TruncatedError(
            "a block of the table reaches beyond the file",
            offset=offset,
            expected=f"{size:,} bytes",
            found=f"{max(0, room):,}",
        )
    stop = offset + size
    stored = crc.unmask(int.from_bytes(data[stop + 1 : stop + TRAILER], "little"))
    found = crc.crc32c(data[offset : stop + 1])
    if stored != found:
        raise ChecksumError(
            "the checksum of a block of the table does not match: the file is damaged",
            offset=offset,
            expected=f"{stored:08x}",
            found=f"{found:08x}",
        )
    kind = data[stop]
    if kind not in (_NONE, _SNAPPY):
        raise UnsupportedError(
            "a block of the table is compressed in an unknown way", offset=stop, found=f"type {kind}"
        )
    try:
        contents = data[offset:stop] if kind == _NONE else _decompressed(data[offset:stop], left.block)
        return _entries(contents, left)
    except CkpttoolError as error:
        # Within a compressed block there are no positions in the file, only the block's.
        error.offset = offset + (0 if kind == _SNAPPY else error.offset or 0)
        raise


def _decompressed(data: bytes, most: int) -> bytes:
    """Return the contents of a snappy block; what it says of its size is judged before memory is taken."""
    import cramjam

    length, _ = varint.read(data, 0, len(data))
    if length > _SNAPPY_RATIO * len(data):
        raise FormatError(
            "a compressed block says that it holds more than it can",
            expected=f"at most {_SNAPPY_RATIO * len(data):,} bytes",
            found=f"{length:,}",
        )
    if length > most:
        raise limits.exceeded("block_bytes", "a compressed block of the table is too large", length)
    try:
        contents = bytes(cramjam.snappy.decompress_raw(data))
    except cramjam.DecompressionError as error:
        raise FormatError("a compressed block of the table cannot be decompressed") from error
    if len(contents) != length:
        raise FormatError(
            "a compressed block is not as long as it says",
            expected=f"{length:,} bytes",
            found=f"{len(contents):,}",
        )
    return contents


def _entries(block: bytes, left: Room) -> list[Entry]:
    restarts, stop = _restarts(block)
    found: list[Entry] = []
    starts = set()
    previous: bytes | None = None
    key = b""
    at = spent = 0
    while at < stop:
        start = at
        shared, unshared, length, at = _lengths(block, at, stop)
        if not shared:
            starts.add(start)
        if shared > len(key):
            raise FormatError("a key shares more than the key before it has", offset=start)
        if unshared + length > stop - at:
            raise TruncatedError("an entry reaches beyond its block", offset=start)
        middle = at + unshared
        key = key[:shared] + block[at:middle]
        if previous is not None and key <= previous:
            order = "a key twice" if key == previous else "its keys out of order"
            raise FormatError(f"the table has {order}", offset=start, found=repr(key[:80]))
        at = middle + length
        found.append((key, block[middle:at]))
        previous = key
        spent += len(key)
        if spent > left.keys:
            raise FormatError("the keys of the table are far longer than the table", offset=start)
        if len(found) > left.entries:
            raise limits.exceeded("entries", "the table has too many entries", len(found), offset=start)
    if found and not starts.issuperset(restarts):
        raise FormatError("a restart point of a block is not the start of a whole key", offset=stop)
    return found


def _restarts(block: bytes) -> tuple[tuple[int, ...], int]:
    if len(block) < 4:
        raise TruncatedError("a block is too short for its restart count", offset=0)
    count = int.from_bytes(block[-4:], "little")
    stop = len(block) - 4 - 4 * count
    if not count or stop < 0:
        raise FormatError("a block has an impossible number of restart points", offset=0, found=str(count))
    restarts = struct.unpack_from(f"<{count}I", block, stop)
    if restarts[0] or any(a >= b for a, b in pairwise(restarts)):
        raise FormatError("the restart points of a block are out of order", offset=stop)
    return restarts, stop


def _lengths(block: bytes, at: int, stop: int) -> tuple[int, int, int, int]:
    # Three one-byte numbers nearly always; the general reader costs four times as much.
    if at + 3 <= stop and (block[at] | block[at + 1] | block[at + 2]) < 0x80:
        return block[at], block[at + 1], block[at + 2], at + 3
    shared, at = varint.read(block, at, stop)
    unshared, at = varint.read(block, at, stop)
    length, at = varint.read(block, at, stop)
    return shared, unshared, length, at


def _require_between(lower: bytes | None, entries: list[Entry], bound: bytes, offset: int) -> None:
    if not entries:
        return
    if (lower is not None and entries[0][0] <= lower) or entries[-1][0] > bound:
        raise FormatError("a block's keys lie outside the range that the index gives it", offset=offset)


def block(stored: bytes, left: Room) -> list[Entry]:
    """Return the entries of one block, for tables that are not read whole (wire.sstable_file).

    `stored` is the block with its trailer and FOOTER bytes more: as many follow every block of a table.
    Positions in errors count from its start. Only what a block unpacks to is limited.
    """
    return _block(stored, Handle(0, len(stored) - FOOTER - TRAILER), left)


def handle(data: bytes) -> Handle:
    """Return the place that a value of the index block gives."""
    return _handle(data, 0, len(data))[0]


def places(contents: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Go through the keys of a sound block that is not compressed, each with its value's start and length."""
    _, stop = _restarts(contents)
    key, at = b"", 0
    while at < stop:
        shared, unshared, length, at = _lengths(contents, at, stop)
        middle = at + unshared
        key = key[:shared] + contents[at:middle]
        yield key, middle, length
        at = middle + length
