"""The central directory of a zip archive: where it lies, and what it says of every member.

Sections are those of PKWARE's APPNOTE.TXT 6.3.10.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from typing import NamedTuple

from ckpttool import limits
from ckpttool.errors import TruncatedError
from ckpttool.source import File
from ckpttool.wire.zip_records import (
    CENTRAL,
    CENTRAL_MARK,
    END,
    END64,
    END64_MARK,
    FULL16,
    FULL32,
    LOCATOR64,
    STORED,
    UNREAD,
    UTF8,
    Entry,
    Window,
    fail,
    refuse_flags,
    require_one_name,
    shown,
    widened,
)

_COMMENT_ROOM = END.size + FULL16
_END, _LOCATOR = b"PK\x05\x06", b"PK\x06\x07"
_DOS_FOLDER, _UNIX_FOLDER = 0x10, 0o04
_FILE_TYPES = (0, _UNIX_FOLDER, 0o10)  # 4.4.15 leaves the upper half to the host; Unix puts st_mode there


class Directory(NamedTuple):
    """Where the central directory lies and how many entries it says it has."""

    offset: int
    length: int
    entries: int


def find(file: File, window: Window) -> Directory:
    """Return where the directory lies; raise FormatError unless it ends where the end record begins."""
    start = max(0, window.size - _COMMENT_ROOM)
    tail = window.read(window.size - start, start)
    at = _end_record(file, tail, start)
    end = END.unpack_from(tail, at)
    place = Directory(end[6], end[5], end[4])
    stop = start + at
    if end[1] or end[2] or end[3] != end[4]:
        fail(file, "the archive is split over several disks", stop)
    locator = window.read(LOCATOR64.size, stop - LOCATOR64.size) if stop >= LOCATOR64.size else b""
    if locator[:4] == _LOCATOR:
        place, stop = _zip64(file, window, locator, place, stop - LOCATOR64.size)
    if place.offset + place.length != stop:
        fail(
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
    last = at = tail.rfind(_END)
    if last < 0:
        raise TruncatedError(
            "the archive's end record is missing: the file is cut off", file=file.path, offset=stop
        )
    found = []
    while at >= 0:
        if at + END.size <= len(tail) and END.unpack_from(tail, at)[7] == len(tail) - at - END.size:
            found.append(at)
        at = tail.rfind(_END, 0, at)
    if not found:
        fail(file, "the archive's end record is followed by bytes that do not belong to it", stop)
    # Many readers take the last one (Lib/zipfile.py, _EndRecData; miniz), whatever its comment's length says.
    if found != [last]:
        fail(file, "the archive has more than one end record", start + found[-1])
    return last


def _zip64(file: File, window: Window, locator: bytes, old: Directory, stop: int) -> tuple[Directory, int]:
    _, disk, at, disks = LOCATOR64.unpack(locator)
    record = window.read(END64.size, at) if at <= stop - END64.size else b""
    if disk or disks > 1 or len(record) < END64.size:
        fail(file, "the zip64 locator points nowhere", stop)
    mark, size, _, _, this, first, here, count, length, offset = END64.unpack(record)
    if mark != END64_MARK or at + 12 + size != stop or this or first or here != count:
        fail(file, "the zip64 end record is damaged", at)
    pairs = ((old.offset, offset, FULL32), (old.length, length, FULL32), (old.entries, count, FULL16))
    if any(short not in (full, saturated) for short, full, saturated in pairs):
        fail(file, "the two end records contradict each other", at)
    return Directory(offset, length, count), at


def entries(file: File, window: Window, place: Directory) -> list[Entry]:
    """Return all entries; raise FormatError unless they fill the directory, each with a name of its own."""
    allowed = limits.current()
    if place.length > allowed.index_bytes:
        raise limits.exceeded(
            "index_bytes", "the archive's directory is too long", place.length, file=file.path
        )
    if place.entries > allowed.members:
        raise limits.exceeded("members", "the archive has too many members", place.entries, file=file.path)
    data = window.read(place.length, place.offset)
    found: list[Entry] = []
    at, size = 0, len(data)
    while at < size:
        if at + CENTRAL.size > size or len(found) >= place.entries:
            fail(file, "the central directory is not as long as its entries", place.offset + at)
        entry, at = _entry(file, data, at, place.offset)
        found.append(entry)
    if len(found) != place.entries:
        fail(
            file,
            "the archive does not have as many members as its end record says",
            place.offset,
            expected=f"{place.entries:,}",
            found=f"{len(found):,}",
        )
    _require_names(file, found, place.offset)
    return found


def _entry(file: File, data: bytes, at: int, base: int) -> tuple[Entry, int]:
    (mark, _, _, flags, method, _, _, crc, stored, size, name, extra, comment, disk, _, kind, header) = (
        CENTRAL.unpack_from(data, at)
    )
    start = at + CENTRAL.size
    stop = start + name + extra + comment
    if mark != CENTRAL_MARK or stop > len(data):
        fail(file, "an entry of the central directory is damaged", base + at)
    if flags & UNREAD:
        refuse_flags(file, flags, base + at)
    raw = data[start : start + name]
    text = _name(file, raw, flags, base + at)
    if extra:
        rest = data[start + name : stop - comment]
        require_one_name(file, rest, raw, base + at)
        if FULL32 in (stored, size, header):
            size, stored, header = widened(file, rest, (size, stored, header), base + at)
    elif FULL32 in (stored, size, header):
        widened(file, b"", (FULL32,), base + at)
    if disk:  # miniz, and so torch, refuses 0xFFFF too
        fail(file, "the archive is split over several disks", base + at)
    if method == STORED and stored != size:
        fail(file, f"member {shown(text)} is stored as it is, yet has two sizes", base + at)
    _require_file(file, text, kind, size, base + at)
    return Entry(header, text, raw, method, flags, crc, stored, size), stop


def _require_file(file: File, name: str, kind: int, size: int, at: int) -> None:
    """Raise FormatError unless the member is a file, or an empty folder, by name and attributes alike."""
    if kind >> 28 not in _FILE_TYPES:
        fail(file, f"member {shown(name)} is a link or a device, not a file", at)
    if name[-1] != "/" and (kind & _DOS_FOLDER or kind >> 28 == _UNIX_FOLDER):
        # miniz, and so torch, reads nothing then and returns memory as it was (mz_zip_reader_extract_to_mem).
        fail(file, f"member {shown(name)} is marked as a folder, and has the name of a file", at)
    if name[-1] == "/" and size:
        fail(file, f"member {shown(name)} is a folder, yet has bytes", at)


def _name(file: File, raw: bytes, flags: int, at: int) -> str:
    try:
        # 4.4.4 bit 11; without it names are in the IBM PC's code page.
        name = raw.decode("ascii" if raw.isascii() else "utf-8" if flags & UTF8 else "cp437")
    except UnicodeDecodeError:
        fail(file, "a member's name is not UTF-8, as its flag says", at)
    if not name or "\0" in name:
        fail(file, "a member's name is empty or holds a NUL", at)
    return name


def _require_names(file: File, found: list[Entry], at: int) -> None:
    """Raise FormatError when two members have one name, or would be one file for whoever unpacks them."""
    names = {entry.name for entry in found}
    if len(names) != len(found):
        fail(file, f"two members are called {shown(_repeated(entry.name for entry in found))}", at)
    if len({entry.raw for entry in found}) != len(found):
        fail(file, "two members have one name, in two encodings", at)
    places: dict[str, str] = {}
    for name in filter(_is_roundabout, names):
        place = posixpath.normpath("/" + name.replace("\\", "/")).lstrip("/")
        other = places.setdefault(place, name)
        if other != name or (place != name and place in names):
            both = sorted((name, other if other != name else place))
            fail(file, f"two members have one place: {' and '.join(map(shown, both))}", at)


def _is_roundabout(name: str) -> bool:
    return name[0] in "./" or name[-1] in "./" or "\\" in name or "//" in name or "/." in name


def _repeated(names: Iterable[str]) -> str:
    seen: set[str] = set()
    # `add` returns None.
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
