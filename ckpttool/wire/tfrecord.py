"""TensorFlow's record files: one run of bytes after the other, each between two checksums.

A record is its length (u64), the masked CRC-32C of those eight bytes, the data, and the masked CRC-32C of the
data, all little-endian (tensorflow/core/lib/io/record_writer.h). Nothing marks the end of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ckpttool.errors import ChecksumError, TruncatedError
from ckpttool.source import File
from ckpttool.wire import crc

_HEADER, _FOOTER = struct.Struct("<QI"), struct.Struct("<I")
_LENGTH = 8
_BLOCK = 1 << 20
LONGEST = 16 << 20
"""Longer records (graphs, pictures) are passed over, unread."""


def records(file: File) -> Iterator[tuple[int, bytes]]:
    """Go through the records with their offsets.

    Raise ChecksumError where a checksum is wrong, TruncatedError where the file ends within a record: a
    program that is still writing, or was killed, leaves such an end. Records of more than LONGEST bytes are
    left out.
    """
    at = 0
    while at < file.size:
        block, start = file.read(at, min(_BLOCK, file.size - at)), at
        for offset, data in _whole(block, file, start):
            yield offset, data
            at = offset + _HEADER.size + len(data) + _FOOTER.size
        if at == start:  # not one of them lies in the block
            if len(block) < _HEADER.size:
                _cut(file, at, _HEADER.size)
            (length, _) = _HEADER.unpack_from(block)
            size = _HEADER.size + length + _FOOTER.size
            if at + size > file.size:
                _cut(file, at, size)
            if length <= LONGEST:
                yield from _whole(file.read(at, size), file, at)
            at += size


def record(data: bytes) -> bytes:
    """Return a record as it lies in a file."""
    length = len(data).to_bytes(_LENGTH, "little")
    return b"".join((length, _masked(length), data, _masked(data)))


def _whole(block: bytes, file: File, start: int) -> Iterator[tuple[int, bytes]]:
    """Go through the records that lie whole in a block of the file, which begins at `start`."""
    at, stop = 0, len(block)
    while (begin := at + _HEADER.size) <= stop:
        length, checksum = _HEADER.unpack_from(block, at)
        if crc.mask(crc.crc32c(block[at : at + _LENGTH])) != checksum:
            _damaged(file, start + at, _LENGTH)
        end = begin + length
        if end + _FOOTER.size > stop:
            return
        data = block[begin:end]
        if crc.mask(crc.crc32c(data)) != _FOOTER.unpack_from(block, end)[0]:
            _damaged(file, start + begin, length)
        yield start + at, data
        at = end + _FOOTER.size


def _masked(data: bytes) -> bytes:
    return _FOOTER.pack(crc.mask(crc.crc32c(data)))


def _damaged(file: File, offset: int, size: int) -> None:
    raise ChecksumError(
        f"the checksum of {size:,} bytes does not match: the file is damaged", file=file.path, offset=offset
    )


def _cut(file: File, at: int, size: int) -> None:
    raise TruncatedError(
        "the file ends within a record",
        file=file.path,
        offset=at,
        expected=f"{size:,} bytes",
        found=f"{file.size - at:,}",
    )
