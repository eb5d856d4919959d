"""Zip archives as bytes: where every member lies, and nothing that two readers could understand differently.

The standard library's reader checks all-zero checksums that were never recorded, does not compare the end
record's count with the entries, and takes longer to import than a checkpoint takes to list. Field names and
layouts follow PKWARE's APPNOTE.TXT 6.3.10 (the section is named beside each record).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, NoReturn

from ckpttool.errors import CkpttoolError, FormatError, NotFoundError, TruncatedError, UnsupportedError
from ckpttool.source import Checksum, Deflated, File, Span, Storage

STORED, DEFLATED = 0, 8
# A member that unpacks to more than this, and to more than a hundred times its stored size, is a bomb.
BOMB_BYTES, BOMB_RATIO = 256 << 20, 100

LOCAL = struct.Struct("<IHHHHHIIIHH")  # 4.3.7, without name and extra field
CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")  # 4.3.12, without name, extra field and comment
END = struct.Struct("<IHHHHIIH")  # 4.3.16
END64 = struct.Struct("<IQHHIIQQQQ")  # 4.3.14
LOCATOR64 = struct.Struct("<IIQI")  # 4.3.15
LOCAL_MARK, CENTRAL_MARK, END_MARK = 0x04034B50, 0x02014B50, 0x06054B50
END64_MARK, LOCATOR64_MARK = 0x06064B50, 0x07064B50
FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF
ZIP64_EXTRA = 1

ENCRYPTED = 1 << 0 | 1 << 6 | 1 << 13  # 4.4.4: encryption, strong encryption, masked local headers
LATER = 1 << 3  # sizes and checksum follow the data; the local header may hold zeros
UTF8 = 1 << 11
_COMMENT_ROOM = END.size + FULL16
_NEAR, _WINDOW = 4096, 1 << 20


class Member(NamedTuple):
    """One member: sizes in bytes, `stored` as it lies in the file and `size` unpacked."""

    name: str
    method: int
    flags: int
    crc: int
    stored: int
    size: int
    header: int
    offset: int


@dataclass(frozen=True, slots=True)
class Archive:
    """A checked archive; `recorded` is False when no member carries a checksum (all are zero)."""

    file: File
    members: Mapping[str, Member]
    recorded: bool

    def source(self, name: str) -> Storage:
        """Return the member's bytes as an unread source; raise FormatError when there is no such member."""
        member = self.members.get(name)
        if member is None:
            raise FormatError(f"the archive has no member {name!r}", file=self.file.path)
        checksum = Checksum("crc32", member.crc) if self.recorded else None
        if member.method == STORED:
            return Span(self.file, member.offset, member.size, checksum)
        if member.method != DEFLATED:
            raise UnsupportedError(
                f"member {name!r} is compressed by method {member.method}", file=self.file.path
            )
        if member.size > BOMB_BYTES and member.size > BOMB_RATIO * max(1, member.stored):
            raise FormatError(
                f"member {name!r} would unpack to {member.size:,} bytes from {member.stored:,}",
                file=self.file.path,
                offset=member.offset,
            )
        return Deflated(Span(self.file, member.offset, member.stored), member.size, checksum)


class _Window(NamedTuple):
    """The part of an open file that is the archive."""

    descriptor: int
    start: int
    size: int

    def read(self, length: int, offset: int) -> bytes:
        """Return up to `length` bytes from an offset of the archive."""
        return os.pread(self.descriptor, max(0, min(length, self.size - offset)), self.start + offset)


class _Directory(NamedTuple):
    """Where the central directory lies and how many entries it says it has."""

    offset: int
    length: int
    entries: int


@lru_cache(maxsize=2)
def read(file: File, start: int = 0, size: int | None = None) -> Archive:
    """Return the archive's members; raise FormatError unless every record agrees with every other.

    `start` and `size` say where in the file the archive lies (an archive stored in another); members' offsets
    are those of the file. The last answers are kept, because a format first asks whether an archive is its
    own and then reads it.
    """
    try:
        descriptor = os.open(file.path, os.O_RDONLY)
    except OSError as error:
        raise NotFoundError(f"cannot be opened: {error.strerror}", file=file.path) from error
    try:
        window = _Window(descriptor, start, file.size - start if size is None else size)
        place = _find_directory(file, window)
        entries = _central(file, window.read(place.length, place.offset), place)
        members = _located(file, window, entries, place.offset)
    except CkpttoolError as error:
        error.offset = None if error.offset is None else error.offset + start
        raise
    finally:
        os.close(descriptor)
    recorded = not members or any(m.crc for m in members) or not any(m.size for m in members)
    return Archive(file, {m.name: m._replace(offset=start + m.offset) for m in members}, recorded)


def _fail(file: File, message: str, offset: int, **facts: str) -> NoReturn:
    raise FormatError(message, file=file.path, offset=offset, **facts)


def _find_directory(file: File, window: _Window) -> _Directory:
    start = max(0, window.size - _COMMENT_ROOM)
    tail = window.read(window.size - start, start)
    at = _end_record(file, tail, start)
    end = END.unpack_from(tail, at)
    place = _Directory(end[6], end[5], end[4])
    stop = start + at
    if end[1] or end[2] or end[3] != end[4]:
        _fail(file, "the archive is split over several disks", stop)
    locator = window.read(LOCATOR64.size, stop - LOCATOR64.size) if stop >= LOCATOR64.size else b""
    if locator[:4] == b"PK\x06\x07":
        place, stop = _zip64_directory(file, window, locator, place, stop - LOCATOR64.size)
    if place.offset + place.length != stop:
        _fail(
            file,
            "the central directory does not end where the end record begins",
            stop,
            expected=f"offset {stop - place.length:,}",
            found=f"{place.offset:,}",
        )
    return place


def _end_record(file: File, tail: bytes, start: int) -> int:
    """Return where in `tail` the one end record is whose comment reaches exactly to the end of the file."""
    stop = start + len(tail)
    found, seen, at = [], False, tail.rfind(b"PK\x05\x06")
    while at >= 0:
        seen = True
        if at + END.size <= len(tail) and END.unpack_from(tail, at)[7] == len(tail) - at - END.size:
            found.append(at)
        at = tail.rfind(b"PK\x05\x06", 0, at)
    if len(found) == 1:
        return found[0]
    if found:
        _fail(file, "the archive has more than one end record", start + found[0])
    if seen:
        _fail(file, "the archive's end record is followed by bytes that do not belong to it", stop)
    raise TruncatedError(
        "the archive's end record is missing: the file is cut off", file=file.path, offset=stop
    )


def _zip64_directory(
    file: File, window: _Window, locator: bytes, old: _Directory, stop: int
) -> tuple[_Directory, int]:
    _, disk, at, disks = LOCATOR64.unpack(locator)
    record = window.read(END64.size, at) if at <= stop - END64.size else b""
    if disk or disks > 1 or len(record) < END64.size:
        _fail(file, "the zip64 locator points nowhere", stop)
    mark, size, _, _, this, first, here, count, length, offset = END64.unpack(record)
    if mark != END64_MARK or at + 12 + size != stop or this or first or here != count:
        _fail(file, "the zip64 end record is damaged", at)
    pairs = ((old.offset, offset, FULL32), (old.length, length, FULL32), (old.entries, count, FULL16))
    if any(short not in (full, saturated) for short, full, saturated in pairs):
        _fail(file, "the two end records contradict each other", at)
    return _Directory(offset, length, count), at


def _central(file: File, data: bytes, place: _Directory) -> list[Member]:
    entries: list[Member] = []
    names: set[str] = set()
    at, size = 0, len(data)
    while at < size:
        if at + CENTRAL.size > size or len(entries) >= place.entries:
            _fail(file, "the central directory is not as long as its entries", place.offset + at)
        member, at = _entry(file, data, at, place.offset)
        if member.name in names:
            _fail(file, f"two members are called {member.name!r}", place.offset + at)
        names.add(member.name)
        entries.append(member)
    if len(entries) != place.entries:
        _fail(
            file,
            "the archive does not have as many members as its end record says",
            place.offset,
            expected=f"{place.entries:,}",
            found=f"{len(entries):,}",
        )
    return entries


def _entry(file: File, data: bytes, at: int, base: int) -> tuple[Member, int]:
    (mark, _, _, flags, method, _, _, crc, stored, size, name, extra, comment, disk, _, _, header) = (
        CENTRAL.unpack_from(data, at)
    )
    start = at + CENTRAL.size
    stop = start + name + extra + comment
    if mark != CENTRAL_MARK or stop > len(data):
        _fail(file, "an entry of the central directory is damaged", base + at)
    if flags & ENCRYPTED:
        raise UnsupportedError("the archive is encrypted", file=file.path, offset=base + at)
    text = _name(file, data[start : start + name], flags, base + at)
    if FULL32 in (stored, size, header):
        rest = data[start + name : start + name + extra]
        size, stored, header = _widened(file, rest, (size, stored, header), base + at)
    if disk not in (0, FULL16):
        _fail(file, "the archive is split over several disks", base + at)
    if method == STORED and stored != size:
        _fail(file, f"member {text!r} is stored as it is, yet has two sizes", base + at)
    return Member(text, method, flags, crc, stored, size, header, 0), stop


def _name(file: File, raw: bytes, flags: int, at: int) -> str:
    try:
        # 4.4.4 bit 11; without it names are in the IBM PC's code page.
        name = raw.decode("ascii" if raw.isascii() else "utf-8" if flags & UTF8 else "cp437")
    except UnicodeDecodeError:
        _fail(file, "a member's name is not UTF-8, as its flag says", at)
    if not name or "\0" in name:
        _fail(file, "a member's name is empty or holds a NUL", at)
    return name


def _widened(file: File, extra: bytes, fields: tuple[int, ...], at: int) -> tuple[int, ...]:
    """Return the fields with each saturated one replaced from the zip64 extra field (4.5.3), in its order."""
    data = next((body for kind, body in _extras(extra) if kind == ZIP64_EXTRA), b"")
    wide, used = [], 0
    for value in fields:
        if value == FULL32:
            if len(data) < used + 8:
                _fail(file, "a large member's zip64 sizes are missing", at)
            wide.append(int.from_bytes(data[used : used + 8], "little"))
            used += 8
        else:
            wide.append(value)
    return tuple(wide)


def _extras(extra: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        yield kind, extra[at + 4 : at + 4 + size]
        at += 4 + size


def _located(file: File, window: _Window, entries: list[Member], stop: int) -> list[Member]:
    """Return the entries with the payload offsets that their local headers give, every byte claimed once."""
    ordered = sorted(entries, key=lambda entry: entry.header)
    located: dict[str, Member] = {}
    free = 0
    for entry, data, at in _headers(file, window, ordered, stop):
        if entry.header < free or (not located and entry.header):
            what = "overlaps the one before it" if located else "does not begin the file"
            _fail(file, f"member {entry.name!r} {what}", entry.header)
        offset = _payload(file, entry, data, at)
        free = offset + entry.stored
        if free > stop:
            _fail(file, f"member {entry.name!r} reaches into the central directory", offset)
        located[entry.name] = entry._replace(offset=offset)
    return [located[entry.name] for entry in entries]


def _headers(
    file: File, window: _Window, ordered: list[Member], stop: int
) -> Iterator[tuple[Member, bytes, int]]:
    """Give every local header in the file's order; headers that lie close together come with one read."""
    data, base = b"", 0
    for position, entry in enumerate(ordered):
        need = entry.header + LOCAL.size + 2 * len(entry.name) + _NEAR
        if not base <= entry.header < base + len(data) or need > base + len(data) < stop:
            base, end, following = entry.header, need, position + 1
            while following < len(ordered) and ordered[following].header - end < _NEAR:
                if end - base > _WINDOW:
                    break
                end = max(end, ordered[following].header + _NEAR)
                following += 1
            data = window.read(min(end, stop) - base, base)
        if entry.header + LOCAL.size > stop:
            _fail(file, f"member {entry.name!r} lies beyond the archive's end", entry.header)
        yield entry, data, entry.header - base


def _payload(file: File, entry: Member, data: bytes, at: int) -> int:
    """Return the offset of the member's bytes after checking that its local header says the same of it."""
    if at + LOCAL.size > len(data):
        _fail(file, f"the local header of {entry.name!r} is cut off", entry.header)
    mark, _, flags, method, _, _, crc, stored, size, name, extra = LOCAL.unpack_from(data, at)
    start = at + LOCAL.size
    if mark != LOCAL_MARK:
        _fail(file, f"member {entry.name!r} has no local header where the directory says", entry.header)
    if flags & ENCRYPTED:
        raise UnsupportedError("the archive is encrypted", file=file.path, offset=entry.header)
    if FULL32 in (size, stored):
        rest = data[start + name : start + name + extra]
        size, stored = _widened(file, rest, (size, stored), entry.header)
    told = (crc, stored, size)
    # With bit 3 the real values follow the data: zeros are legal here, other values must still agree.
    same = told == (entry.crc, entry.stored, entry.size) or (flags & LATER and not any(told))
    raw = data[start : start + name]
    if not same or method != entry.method or raw != _encoded(entry) or (flags ^ entry.flags) & UTF8:
        _fail(file, f"the two headers of member {entry.name!r} contradict each other", entry.header)
    payload: int = entry.header + LOCAL.size + name + extra
    return payload


def _encoded(entry: Member) -> bytes:
    if entry.name.isascii():
        return entry.name.encode("ascii")
    return entry.name.encode("utf-8" if entry.flags & UTF8 else "cp437")
