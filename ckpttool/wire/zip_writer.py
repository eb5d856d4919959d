"""Writing zip archives: stored members only, each aligned, the same input always giving the same bytes."""

from __future__ import annotations

import struct
from typing import IO, NamedTuple

from ckpttool.source import Buffer
from ckpttool.wire import zip_records as reader
from ckpttool.wire.crc import crc32

# MS-DOS for 1980-01-01 00:00, the earliest that the format can say: archives carry no time of writing.
_DATE, _TIME = 0x21, 0
_VERSION, _VERSION64 = 20, 45
# torch pads with this extra field too (caffe2/serialize/inline_container.cc, getPadding).
_PADDING, _FILLER = 0x4246, b"Z"


class _Written(NamedTuple):
    name: bytes
    flags: int
    crc: int
    size: int
    header: int


class Writer:
    """Writes members one after the other to a stream that begins empty; `close` writes the directory."""

    def __init__(self, stream: IO[bytes], alignment: int = 64) -> None:
        """Start at the stream's beginning; payloads begin at multiples of `alignment` bytes."""
        self._stream = stream
        self._alignment = alignment
        self._position = 0
        self._members: list[_Written] = []

    @property
    def checksums(self) -> tuple[int, ...]:
        """The CRC-32 of every member written so far."""
        return tuple(member.crc for member in self._members)

    def add(self, name: str, *parts: Buffer) -> None:
        """Write one member, whose bytes are those of all `parts` together."""
        raw = name.encode("utf-8")
        flags = 0 if raw.isascii() else reader.UTF8
        crc = size = 0
        for part in parts:
            crc, size = crc32(part, crc), size + memoryview(part).nbytes
        member = _Written(raw, flags, crc, size, self._position)
        self._write(self._local(member))
        for part in parts:
            self._write(part)
        self._members.append(member)

    def close(self) -> None:
        """Write the central directory and the end records; the stream stays open."""
        start = self._position
        for member in self._members:
            self._write(_central(member))
        self._write(_end(start, self._position - start, len(self._members)))

    def _write(self, data: Buffer) -> None:
        self._stream.write(data)
        self._position += memoryview(data).nbytes

    def _local(self, member: _Written) -> bytes:
        large = member.size >= reader.FULL32
        size = reader.FULL32 if large else member.size
        wide = struct.pack("<HHQQ", reader.ZIP64_EXTRA, 16, member.size, member.size) if large else b""
        begin = member.header + reader.LOCAL.size + len(member.name) + len(wide)
        gap = -begin % self._alignment
        if 0 < gap < 4:  # an extra field has a head of four bytes
            gap += self._alignment
        padding = struct.pack("<HH", _PADDING, gap - 4) + _FILLER * (gap - 4) if gap else b""
        extra = wide + padding
        head = reader.LOCAL.pack(
            reader.LOCAL_MARK,
            _VERSION64 if large else _VERSION,
            member.flags,
            reader.STORED,
            _TIME,
            _DATE,
            member.crc,
            size,
            size,
            len(member.name),
            len(extra),
        )
        return head + member.name + extra


def _central(member: _Written) -> bytes:
    size, header = member.size, member.header
    wide = [size, size] if size >= reader.FULL32 else []
    wide += [header] if header >= reader.FULL32 else []
    extra = struct.pack(f"<HH{len(wide)}Q", reader.ZIP64_EXTRA, 8 * len(wide), *wide) if wide else b""
    version = _VERSION64 if wide else _VERSION
    head = reader.CENTRAL.pack(
        reader.CENTRAL_MARK,
        version,
        version,
        member.flags,
        reader.STORED,
        _TIME,
        _DATE,
        member.crc,
        min(size, reader.FULL32),
        min(size, reader.FULL32),
        len(member.name),
        len(extra),
        0,
        0,
        0,
        0,
        min(header, reader.FULL32),
    )
    return head + member.name + extra


def _end(start: int, size: int, count: int) -> bytes:
    zip64 = b""
    if count >= reader.FULL16 or size >= reader.FULL32 or start >= reader.FULL32:
        zip64 = reader.END64.pack(
            reader.END64_MARK, 44, _VERSION64, _VERSION64, 0, 0, count, count, size, start
        ) + reader.LOCATOR64.pack(reader.LOCATOR64_MARK, 0, start + size, 1)
    short = min(count, reader.FULL16)
    return zip64 + reader.END.pack(
        reader.END_MARK, 0, 0, short, short, min(size, reader.FULL32), min(start, reader.FULL32), 0
    )
