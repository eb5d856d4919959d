"""Writing sorted string tables, byte for byte as TensorFlow's table builder does without compression.

Sources: tensorflow/core/lib/io/table_builder.cc, block_builder.cc and table_options.h (today xla/tsl/lib/io).
The reader is wire.sstable.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import IO

from ckpttool.wire import crc, varint
from ckpttool.wire.sstable import FOOTER, MAGIC, Entry

# table_options.h; the index block has a restart point at every entry (table_builder.cc, Rep).
BLOCK_BYTES = 262_144
INTERVAL = 16
_UNCOMPRESSED = b"\0"


def write(entries: Iterable[Entry], stream: IO[bytes], block_bytes: int = BLOCK_BYTES) -> int:
    """Write keys and values as one table and return its size in bytes.

    The keys must ascend bytewise. One block is in memory at a time. A block is closed when its contents
    reach `block_bytes`, and before an entry that alone is twice as large.
    """
    table = _Table(stream)
    block = _Block(INTERVAL)
    for key, value in entries:
        if len(key) + len(value) >= 2 * block_bytes and block.count:
            table.add(block)
            block = _Block(INTERVAL)
        table.separate(key)
        block.add(key, value)
        if block.size >= block_bytes:
            table.add(block)
            block = _Block(INTERVAL)
    if block.count:
        table.add(block)
    return table.close()


class _Block:
    """A block's contents while they grow: entries that share the beginning of the key before them."""

    def __init__(self, interval: int) -> None:
        self.last = b""
        self.count = 0
        self._interval = interval
        self._data = bytearray()
        self._restarts = [0]

    @property
    def size(self) -> int:
        """The size that the contents have if nothing is added."""
        return len(self._data) + 4 * len(self._restarts) + 4

    def add(self, key: bytes, value: bytes) -> None:
        """Add an entry; its key must be greater than all before it."""
        shared = 0
        if self.count and self.count % self._interval == 0:
            self._restarts.append(len(self._data))
        else:
            shared = _common(self.last, key)
        self._data += varint.write(shared) + varint.write(len(key) - shared) + varint.write(len(value))
        self._data += key[shared:]
        self._data += value
        self.last = key
        self.count += 1

    def contents(self) -> bytes:
        """Return the entries and the places of the restart points."""
        count = len(self._restarts)
        return bytes(self._data) + struct.pack(f"<{count + 1}I", *self._restarts, count)


class _Table:
    """The blocks written so far, and the index block that grows with them."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._index = _Block(1)
        self._position = 0
        self._pending: tuple[bytes, bytes] | None = None  # the last block's last key, and its place

    def separate(self, key: bytes) -> None:
        """Add the block before `key` to the index, under a short key that lies between the two."""
        if self._pending is not None:
            last, place = self._pending
            self._index.add(_separator(last, key), place)
            self._pending = None

    def add(self, block: _Block) -> None:
        """Write a block of data."""
        self._pending = block.last, self._put(block)

    def close(self) -> int:
        """Write the metaindex block, which is empty, the index block and the footer; return the size."""
        meta = self._put(_Block(INTERVAL))
        if self._pending is not None:
            last, place = self._pending
            self._index.add(_successor(last), place)
        index = self._put(self._index)
        footer = (meta + index).ljust(FOOTER - len(MAGIC), b"\0") + MAGIC
        self._stream.write(footer)
        return self._position + len(footer)

    def _put(self, block: _Block) -> bytes:
        contents = block.contents()
        place = varint.write(self._position) + varint.write(len(contents))
        checksum = crc.crc32c(_UNCOMPRESSED, crc.crc32c(contents))
        trailer = _UNCOMPRESSED + crc.mask(checksum).to_bytes(4, "little")
        self._stream.write(contents)
        self._stream.write(trailer)
        self._position += len(contents) + len(trailer)
        return place


def _common(first: bytes, second: bytes) -> int:
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
    at = _common(last, following)
    if at < min(len(last), len(following)) and last[at] + 1 < following[at]:
        return last[:at] + bytes([last[at] + 1])
    return last


def _successor(last: bytes) -> bytes:
    """Return a short key not below `last`; table_builder.cc, FindShortSuccessor."""
    for at, byte in enumerate(last):
        if byte != 0xFF:
            return last[:at] + bytes([byte + 1])
    return last
