"""Sorted string tables: the footer, blocks and prefix-shared keys of a TensorFlow `.index` file.

The layout is that of LevelDB's doc/table_format.md, as written by tensorflow's tsl/lib/io/table_builder.cc.
Positions in errors count from the start of the file.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import NamedTuple

from ckpttool.errors import ChecksumError, CkpttoolError, FormatError, TruncatedError, UnsupportedError
from ckpttool.wire import crc, varint

MAGIC = bytes.fromhex("57fb808b247547db")
FOOTER = 48
TRAILER = 5  # one byte of compression type, four of masked CRC-32C over contents and type
_COMPRESSION = {0: "none", 1: "snappy"}

# Prefix sharing lets four bytes stand for a key of any length: more than this is an attack, not a table.
_KEY_BYTES_FLOOR = 64 << 20
_KEY_EXPANSION = 100

Entry = tuple[bytes, bytes]


class Handle(NamedTuple):
    """Where a block's contents are."""

    offset: int
    size: int


def read(data: bytes) -> list[Entry]:
    """Return every key and value of the table in order; raise FormatError where it breaks a rule.

    Every block's checksum is verified. Compressed blocks raise UnsupportedError.
    """
    meta, index = footer(data)
    _block(data, meta)
    budget = max(_KEY_BYTES_FLOOR, _KEY_EXPANSION * len(data))
    found: list[Entry] = []
    lower: bytes | None = None
    for bound, value in _block(data, index):
        handle = _handle(value, 0, len(value))[0]
        entries = _block(data, handle)
        _require_between(lower, entries, bound, handle.offset)
        lower = bound
        found += entries
        budget -= sum(len(key) for key, _ in entries)
        if budget < 0:
            raise FormatError("the keys of the table are far longer than the table", offset=handle.offset)
    return found


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


def _block(data: bytes, handle: Handle) -> list[Entry]:
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
    if data[stop]:
        name = _COMPRESSION.get(data[stop], f"type {data[stop]}")
        raise UnsupportedError(
            f"a block of the table is compressed ({name}), which this version cannot read", offset=stop
        )
    try:
        return _entries(data[offset:stop])
    except CkpttoolError as error:
        error.offset = (error.offset or 0) + offset
        raise


def _entries(block: bytes) -> list[Entry]:
    restarts, stop = _restarts(block)
    found: list[Entry] = []
    starts = set()
    previous: bytes | None = None
    key = b""
    at = spent = 0
    budget = max(_KEY_BYTES_FLOOR, _KEY_EXPANSION * len(block))
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
        if spent > budget:
            raise FormatError("the keys of the table are far longer than the table", offset=start)
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
