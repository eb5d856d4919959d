"""Sorted string tables, the index files of TensorFlow bundles."""

from __future__ import annotations

import bisect
import functools
import struct
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import IO

from ckpttool.core import limits, source
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import (
    ChecksumError,
    CkpttoolError,
    FormatError,
    TruncatedError,
    UnsupportedError,
    locate_errors,
)
from ckpttool.core.source import File
from ckpttool.encodings import protobuf

MAGIC = bytes.fromhex("57fb808b247547db")
FOOTER = 48
TRAILER = 5  # one byte of compression type, four of masked CRC-32C over contents and type
_NONE, _SNAPPY = 0, 1  # tsl/lib/io/table_options.h

# Snappy's densest element copies 64 bytes and is three bytes long (github.com/google/snappy,
# format_description.txt).
_SNAPPY_RATIO = 22

# With prefix sharing, four bytes can encode a key of any length. Every sixteenth key is stored whole
# (tsl/lib/io/table_options.h, block_restart_interval): longer keys indicate an attack.
_KEY_BYTES_FLOOR = 64 << 20
_KEY_EXPANSION = 16
# An entry of a real table is longer: parts of its key, and a message with a shape and a location.
_ENTRY = 32

TableEntry = tuple[bytes, bytes]


# How many entries, and bytes of keys, a table may still have.
Room = tuple[int, int]


def _table_room(size: int) -> Room:
    """Return the current limits for a table of `size` bytes."""
    return limits.current().entries + size // _ENTRY, max(_KEY_BYTES_FLOOR, _KEY_EXPANSION * size)


class BlockHandle(NamedTuple):
    """Location of a block's contents."""

    offset: int
    size: int


def read_table(data: bytes) -> list[TableEntry]:
    """Return every key and value of the table in order; raise FormatError if it is invalid.

    Every block's checksum is verified before it is decompressed. No block may be larger than the limit,
    neither stored nor decompressed. The layout is described in LevelDB's doc/table_format.md and written by
    tensorflow's tsl/lib/io/table_builder.cc. Positions in errors count from the start of the file.
    """
    meta, index = parse_footer(data)
    room = _table_room(len(data))
    _read_limited_block(data, meta, room)
    table: list[TableEntry] = []
    lower: bytes | None = None
    free = 0
    for bound, value in _read_limited_block(data, index, room):
        handle = _read_handle(value, 0, len(value))[0]
        if handle.offset < free:
            # Blocks are stored in sequence; a block listed repeatedly would cost its size each time.
            raise FormatError("the blocks of the table overlap", offset=handle.offset)
        free = handle.offset + handle.size + TRAILER
        entries = _read_limited_block(data, handle, room)
        _require_key_range(lower, entries, bound, handle.offset)
        lower = bound
        table += entries
        room = room[0] - len(entries), room[1] - sum(len(key) for key, _ in entries)
    return table


def _read_limited_block(data: bytes, handle: BlockHandle, room: Room) -> list[TableEntry]:
    if limits.current().block_bytes < handle.size <= len(data):
        raise limits.limit_error(
            "block_bytes", "a block of the table is too large", handle.size, offset=handle.offset
        )
    return _read_block(data, handle, room)


def parse_footer(data: bytes) -> tuple[BlockHandle, BlockHandle]:
    """Return the handles of the metaindex block and of the index block."""
    at = len(data) - FOOTER
    if at < 0:
        raise TruncatedError(
            "the table ends before its footer", expected=f"at least {FOOTER} bytes", found=str(len(data))
        )
    if data[-8:] != MAGIC:
        raise FormatError(
            "the table's magic number at the end is missing",
            offset=len(data) - 8,
            expected=MAGIC.hex(),
            found=data[-8:].hex(),
            hint="the file may be truncated, or not a checkpoint index",
        )
    try:
        meta, after = _read_handle(data, at, len(data) - 8)
        index, _ = _read_handle(data, after, len(data) - 8)
    except FormatError as error:
        raise FormatError("the table's footer is damaged", offset=at) from error
    return meta, index


def _read_handle(data: bytes, at: int, stop: int) -> tuple[BlockHandle, int]:
    offset, at = protobuf.read_varint(data, at, stop)
    size, at = protobuf.read_varint(data, at, stop)
    return BlockHandle(offset, size), at


def _require_within(handle: BlockHandle, size: int) -> None:
    """Raise TruncatedError unless a file of `size` bytes contains the block, its trailer and a footer."""
    room = size - FOOTER - TRAILER - handle.offset
    if handle.size > room:
        raise TruncatedError(
            "a block of the table extends beyond the end of the file",
            offset=handle.offset,
            expected=f"{handle.size:,} bytes",
            found=f"{max(0, room):,}",
        )


def _read_block(data: bytes, handle: BlockHandle, room: Room) -> list[TableEntry]:
    offset, size = handle
    _require_within(handle, len(data))
    stop = offset + size
    stored = source.unmask_crc(int.from_bytes(data[stop + 1 : stop + TRAILER], "little"))
    checksum = source.crc32c(data[offset : stop + 1])
    if stored != checksum:
        raise ChecksumError(
            "the checksum of a block of the table does not match: the file is damaged",
            offset=offset,
            expected=f"{stored:08x}",
            found=f"{checksum:08x}",
        )
    kind = data[stop]
    if kind not in (_NONE, _SNAPPY):
        raise UnsupportedError(
            "a block of the table has an unknown compression type", offset=stop, found=f"type {kind}"
        )
    try:
        contents = data[offset:stop] if kind == _NONE else _decompress_snappy(data[offset:stop])
        return _parse_entries(contents, room)
    except CkpttoolError as error:
        # Positions within a compressed block are those of the block, not of the file.
        error.offset = offset + (0 if kind == _SNAPPY else error.offset or 0)
        raise


def _decompress_snappy(data: bytes) -> bytes:
    """Return the contents of a snappy block; its declared size is checked before memory is allocated."""
    import cramjam

    length, _ = protobuf.read_varint(data, 0, len(data))
    if length > _SNAPPY_RATIO * len(data):
        raise FormatError(
            "a compressed block declares a larger size than it can contain",
            expected=f"at most {_SNAPPY_RATIO * len(data):,} bytes",
            found=f"{length:,}",
        )
    if length > limits.current().block_bytes:
        raise limits.limit_error("block_bytes", "a compressed block of the table is too large", length)
    try:
        contents = bytes(cramjam.snappy.decompress_raw(data))
    except cramjam.DecompressionError as error:
        raise FormatError("a compressed block of the table cannot be decompressed") from error
    if len(contents) != length:
        raise FormatError(
            "the size of a compressed block differs from its declared size",
            expected=f"{length:,} bytes",
            found=f"{len(contents):,}",
        )
    return contents


def _parse_entries(block: bytes, room: Room) -> list[TableEntry]:
    restarts, stop = _restart_points(block)
    entries: list[TableEntry] = []
    starts = set()
    previous: bytes | None = None
    key = b""
    most_entries, most_bytes = room
    at = spent = 0
    while at < stop:
        start = at
        shared, unshared, length, at = _read_entry_lengths(block, at, stop)
        if not shared:
            starts.add(start)
        if shared > len(key):
            raise FormatError("a key shares a longer prefix than the previous key has", offset=start)
        if unshared + length > stop - at:
            raise TruncatedError("an entry extends beyond its block", offset=start)
        middle = at + unshared
        key = key[:shared] + block[at:middle]
        if previous is not None and key <= previous:
            order = "a duplicate key" if key == previous else "keys out of order"
            raise FormatError(f"the table has {order}", offset=start, found=repr(key[:80]))
        at = middle + length
        entries.append((key, block[middle:at]))
        previous = key
        spent += len(key)
        if spent > most_bytes:
            raise FormatError("the keys of the table are far longer than the table", offset=start)
        if len(entries) > most_entries:
            raise limits.limit_error("entries", "the table has too many entries", len(entries), offset=start)
    if entries and not starts.issuperset(restarts):
        raise FormatError("a restart point of a block is not the start of a whole key", offset=stop)
    return entries


def _restart_points(block: bytes) -> tuple[tuple[int, ...], int]:
    if len(block) < 4:
        raise TruncatedError("a block is too short for its restart count", offset=0)
    count = int.from_bytes(block[-4:], "little")
    stop = len(block) - 4 - 4 * count
    if not count or stop < 0:
        raise FormatError("a block has an invalid number of restart points", offset=0, found=str(count))
    restarts = struct.unpack_from(f"<{count}I", block, stop)
    if restarts[0] or any(a >= b for a, b in pairwise(restarts)):
        raise FormatError("the restart points of a block are out of order", offset=stop)
    return restarts, stop


def _read_entry_lengths(block: bytes, at: int, stop: int) -> tuple[int, int, int, int]:
    # Nearly always three one-byte numbers; the general reader is four times slower.
    if at + 3 <= stop and (block[at] | block[at + 1] | block[at + 2]) < 0x80:
        return block[at], block[at + 1], block[at + 2], at + 3
    shared, at = protobuf.read_varint(block, at, stop)
    unshared, at = protobuf.read_varint(block, at, stop)
    length, at = protobuf.read_varint(block, at, stop)
    return shared, unshared, length, at


def _require_key_range(lower: bytes | None, entries: list[TableEntry], bound: bytes, offset: int) -> None:
    if not entries:
        return
    if (lower is not None and entries[0][0] <= lower) or entries[-1][0] > bound:
        raise FormatError("a block's keys are outside the range in the index", offset=offset)


def iter_value_places(contents: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the keys of a valid uncompressed block, each with its value's start and length."""
    _, stop = _restart_points(contents)
    key, at = b"", 0
    while at < stop:
        shared, unshared, length, at = _read_entry_lengths(contents, at, stop)
        middle = at + unshared
        key = key[:shared] + contents[at:middle]
        yield key, middle, length
        at = middle + length


# Compressed blocks of up to this size are cached: one may contain thousands of small entries. Of larger
# blocks, only the last is cached.
_KEPT = 1 << 20

Place = tuple[int, int]  # start and length in the file


class SStable(NamedTuple):
    """An open table: its data blocks, each with a key that is not smaller than its last key."""

    file: File
    bounds: tuple[bytes, ...]
    blocks: tuple[BlockHandle, ...]

    def block_of(self, key: bytes) -> BlockHandle | None:
        """Return the block that would contain the key; no data is read."""
        at = bisect.bisect_left(self.bounds, key)
        return self.blocks[at] if at < len(self.blocks) else None

    def first(self) -> tuple[bytes, bytes] | None:
        """Return the first key and its value."""
        if not self.blocks:
            return None
        entries = _block_entries(self.file, self.blocks[0])
        return entries[0] if entries else None


def open_table(file: File) -> SStable:
    """Read the footer and the index of a table; raise FormatError if they are invalid.

    A block is read on the first request for one of its keys.
    """
    with locate_errors(file=file.path):
        if file.size < FOOTER:
            raise TruncatedError(
                "the table ends before its footer",
                expected=f"at least {FOOTER} bytes",
                found=str(file.size),
            )
        meta, index = _read_footer(file)
        _block_entries(file, meta)
        bounds, blocks, free = [], [], 0
        for bound, value in _block_entries(file, index):
            handle, _ = _read_handle(value, 0, len(value))
            _require_within(handle, file.size)
            if handle.offset < free:
                # A block listed repeatedly would cost its size each time.
                raise FormatError("the blocks of the table overlap", offset=handle.offset)
            free = handle.offset + handle.size + TRAILER
            bounds.append(bound)
            blocks.append(handle)
    return SStable(file, tuple(bounds), tuple(blocks))


def read_value(file: File, block: BlockHandle, key: bytes) -> bytes:
    """Return the value of a key in a block; raise FormatError if the block is damaged or lacks the key.

    A block's checksum is verified once. After that, a key of an uncompressed block needs only its
    own bytes.
    """
    with locate_errors(file=file.path):
        places = _block_value_places(file, block)
        if places is None:
            value = _cached_entries(file, block).get(key)
        else:
            span = places.get(key)
            value = None if span is None else file.read(*span)
    if value is None:
        raise FormatError("the table lacks an expected entry", file=file.path, offset=block.offset)
    return value


def _read_footer(file: File) -> tuple[BlockHandle, BlockHandle]:
    start = file.size - FOOTER
    try:
        return parse_footer(file.read(start, FOOTER))
    except CkpttoolError as error:
        error.offset = (error.offset or 0) + start
        raise


def _read_stored_block(file: File, handle: BlockHandle) -> bytes:
    _require_within(handle, file.size)
    return file.read(handle.offset, handle.size + TRAILER + FOOTER)


def _block_entries(file: File, handle: BlockHandle) -> list[TableEntry]:
    return _parse_stored_block(file, _read_stored_block(file, handle), handle)


def _parse_stored_block(file: File, stored: bytes, handle: BlockHandle) -> list[TableEntry]:
    try:  # FOOTER more bytes follow every block; positions in errors count from its start
        return _read_block(stored, BlockHandle(0, handle.size), _table_room(file.size))
    except CkpttoolError as error:
        error.offset = (error.offset or 0) + handle.offset
        raise


@functools.lru_cache(maxsize=4096)
def _block_value_places(file: File, handle: BlockHandle) -> dict[bytes, Place] | None:
    """Return the file locations of the values in a valid block; None if it is compressed."""
    stored = _read_stored_block(file, handle)
    _parse_stored_block(file, stored, handle)
    if stored[handle.size]:
        return None
    contents = stored[: handle.size]
    return {key: (handle.offset + start, length) for key, start, length in iter_value_places(contents)}


def _entries_by_key(file: File, handle: BlockHandle) -> dict[bytes, bytes]:
    return dict(_block_entries(file, handle))


_cached_small_block = functools.lru_cache(maxsize=8)(_entries_by_key)
_cached_large_block = functools.lru_cache(maxsize=1)(_entries_by_key)


def _cached_entries(file: File, handle: BlockHandle) -> dict[bytes, bytes]:
    file.read(0, 0)  # the file must not have changed since it was listed
    return (_cached_small_block if handle.size <= _KEPT else _cached_large_block)(file, handle)


# table_options.h; the index block has a restart point at every entry (table_builder.cc, Rep).
BLOCK_BYTES = 262_144
INTERVAL = 16
_UNCOMPRESSED = b"\0"


def write_table(entries: Iterable[TableEntry], stream: IO[bytes], block_bytes: int = BLOCK_BYTES) -> int:
    """Write keys and values as one table and return its size in bytes.

    The keys must ascend bytewise. One block is in memory at a time. A block is closed when its contents reach
    `block_bytes`, and before a single entry twice as large. The bytes are those of TensorFlow's table builder
    without compression. Sources: tensorflow/core/lib/io/table_builder.cc, block_builder.cc and
    table_options.h (today xla/tsl/lib/io).
    """
    position = 0
    index, block = _BlockBuilder(1), _BlockBuilder(INTERVAL)
    waiting: tuple[bytes, bytes] | None = None  # the last block's last key, and its location

    def put(contents: bytes) -> bytes:
        nonlocal position
        location = protobuf.encode_varint(position) + protobuf.encode_varint(len(contents))
        checksum = source.crc32c(_UNCOMPRESSED, source.crc32c(contents))
        stream.write(contents)
        stream.write(_UNCOMPRESSED + source.mask_crc(checksum).to_bytes(4, "little"))
        position += len(contents) + TRAILER
        return location

    for key, value in entries:
        if len(key) + len(value) >= 2 * block_bytes and block.count:
            waiting, block = (block.last, put(block.contents())), _BlockBuilder(INTERVAL)
        if waiting is not None:
            index.add(_separator(waiting[0], key), waiting[1])
            waiting = None
        block.add(key, value)
        if block.size >= block_bytes:
            waiting, block = (block.last, put(block.contents())), _BlockBuilder(INTERVAL)
    if block.count:
        waiting = block.last, put(block.contents())
    meta = put(_BlockBuilder(INTERVAL).contents())
    if waiting is not None:
        index.add(_successor(waiting[0]), waiting[1])
    footer = (meta + put(index.contents())).ljust(FOOTER - len(MAGIC), b"\0") + MAGIC
    stream.write(footer)
    return position + len(footer)


class _BlockBuilder:
    """A block's contents while they grow: entries share the prefix of the previous key."""

    def __init__(self, interval: int) -> None:
        self.last = b""
        self.count = 0
        self._interval = interval
        self._data = bytearray()
        self._restarts = [0]

    @property
    def size(self) -> int:
        """Size of the contents if nothing is added."""
        return len(self._data) + 4 * len(self._restarts) + 4

    def add(self, key: bytes, value: bytes) -> None:
        """Add an entry; its key must be greater than all before it."""
        shared = 0
        if self.count and self.count % self._interval == 0:
            self._restarts.append(len(self._data))
        else:
            shared = _common_prefix(self.last, key)
        self._data += (
            protobuf.encode_varint(shared)
            + protobuf.encode_varint(len(key) - shared)
            + protobuf.encode_varint(len(value))
        )
        self._data += key[shared:]
        self._data += value
        self.last = key
        self.count += 1

    def contents(self) -> bytes:
        """Return the entries and the positions of the restart points."""
        count = len(self._restarts)
        return bytes(self._data) + struct.pack(f"<{count + 1}I", *self._restarts, count)


def _common_prefix(first: bytes, second: bytes) -> int:
    least = min(len(first), len(second))
    if first[:least] == second[:least]:
        return least
    low, high = 0, least  # the first `low` bytes are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _separator(last: bytes, following: bytes) -> bytes:
    """Return a key not below `last` and below `following`; table_builder.cc, FindShortestSeparator."""
    at = _common_prefix(last, following)
    if at < min(len(last), len(following)) and last[at] + 1 < following[at]:
        return last[:at] + bytes([last[at] + 1])
    return last


def _successor(last: bytes) -> bytes:
    """Return a short key not below `last`; table_builder.cc, FindShortSuccessor."""
    for at, byte in enumerate(last):
        if byte != 0xFF:
            return last[:at] + bytes([byte + 1])
    return last
