"""The records of zip archives, and what the two headers of a member have in common.

Field names and layouts follow PKWARE's APPNOTE.TXT 6.3.10 (the section is named beside each record).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple, NoReturn

from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.source import File

STORED, DEFLATED = 0, 8

LOCAL = struct.Struct("<IHHHHHIIIHH")  # 4.3.7, without name and extra field
CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")  # 4.3.12, without name, extra field and comment
END = struct.Struct("<IHHHHIIH")  # 4.3.16
END64 = struct.Struct("<IQHHIIQQQQ")  # 4.3.14
LOCATOR64 = struct.Struct("<IIQI")  # 4.3.15
LOCAL_MARK, CENTRAL_MARK, END_MARK = 0x04034B50, 0x02014B50, 0x06054B50
END64_MARK, LOCATOR64_MARK, DESCRIPTOR_MARK = 0x06064B50, 0x07064B50, b"PK\x07\x08"
FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF
ZIP64_EXTRA, UNICODE_PATH_EXTRA = 1, 0x7075
_UNICODE_PATH = struct.pack("<H", UNICODE_PATH_EXTRA)

ENCRYPTED = 1 << 0 | 1 << 6 | 1 << 13  # 4.4.4: encryption, strong encryption, masked local headers
PATCHED = 1 << 5
UNREAD = ENCRYPTED | PATCHED
LATER = 1 << 3  # sizes and checksum follow the data; the local header may hold zeros
UTF8 = 1 << 11
EFFORT = 1 << 1 | 1 << 2  # how hard the compressor tried
_SHOWN = 120


class Member(NamedTuple):
    """One member: sizes in bytes, `stored` as it lies in the file and `size` unpacked.

    `header` counts from the start of the archive, `offset` (of the payload) from that of the file.
    """

    name: str
    method: int
    flags: int
    crc: int
    stored: int
    size: int
    header: int
    offset: int


class Entry(NamedTuple):
    """What the central directory says of a member; `raw` is its name as it is stored."""

    header: int
    name: str
    raw: bytes
    method: int
    flags: int
    crc: int
    stored: int
    size: int


class Window(NamedTuple):
    """The part of a file that is the archive; `descriptor` is None for a file elsewhere (places.store)."""

    file: File
    descriptor: int | None
    start: int
    size: int

    def read(self, length: int, offset: int) -> bytes:
        """Return up to `length` bytes from an offset of the archive."""
        room = max(0, min(length, self.size - offset))
        if self.descriptor is None:
            return self.file.read(self.start + offset, room)
        return os.pread(self.descriptor, room, self.start + offset)

    def each(self, runs: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Give what `read` does for pairs of length and offset."""
        if self.descriptor is None:
            room = ((self.start + at, max(0, min(length, self.size - at))) for length, at in runs)
            return self.file.together(room)
        return (self.read(length, at) for length, at in runs)


def fail(
    file: File, message: str, offset: int, *, expected: str | None = None, found: str | None = None
) -> NoReturn:
    """Raise FormatError at an offset of the archive."""
    raise FormatError(message, file=file.path, offset=offset, expected=expected, found=found)


def shown(name: str) -> str:
    """Return a member's name as an error shows it: without what a terminal would obey, and not too long."""
    return repr(name) if len(name) <= _SHOWN else f"{name[:_SHOWN]!r}..."


def refuse_flags(file: File, flags: int, at: int) -> NoReturn:
    """Raise UnsupportedError for a member that is encrypted, or a patch of another file (UNREAD)."""
    what = "the archive is encrypted" if flags & ENCRYPTED else "the archive holds patches, not files"
    raise UnsupportedError(what, file=file.path, offset=at)


def widened(file: File, extra: bytes, fields: tuple[int, ...], at: int) -> tuple[int, ...]:
    """Return the fields with each saturated one replaced from the zip64 extra field (4.5.3), in its order."""
    found = [body for kind, body in _extras(extra) if kind == ZIP64_EXTRA]
    data = found[0] if len(found) == 1 else b""
    wide, used = [], 0
    for value in fields:
        if value == FULL32:
            if len(data) < used + 8:
                fail(file, "a large member's zip64 sizes are missing, or there are two of them", at)
            wide.append(int.from_bytes(data[used : used + 8], "little"))
            used += 8
        else:
            wide.append(value)
    return tuple(wide)


def require_one_name(file: File, extra: bytes, raw: bytes, at: int) -> None:
    """Raise FormatError when an extra field gives the member another name in Unicode (4.6.9)."""
    # Hardly any archive has one, and every member of torch's has an extra field.
    for kind, body in _extras(extra) if _UNICODE_PATH in extra else ():
        # A version, the checksum of the name in the header, and the other name.
        if kind == UNICODE_PATH_EXTRA and (len(body) < 5 or body[5:] != raw):
            fail(file, "a member has two names", at, expected=shown(_text(raw)), found=shown(_text(body[5:])))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _extras(extra: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        yield kind, extra[at + 4 : at + 4 + size]
        at += 4 + size
