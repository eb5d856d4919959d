"""The members of a zip archive where they lie: local headers and payloads, every byte claimed once.

Sections are those of PKWARE's APPNOTE.TXT 6.3.10.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckpttool.source import File
from ckpttool.wire.zip_records import (
    DESCRIPTOR_MARK,
    EFFORT,
    FULL32,
    LATER,
    LOCAL,
    LOCAL_MARK,
    UNREAD,
    Entry,
    Member,
    Window,
    fail,
    refuse_flags,
    require_one_name,
    shown,
    widened,
)

_NEAR, _WINDOW = 4096, 1 << 20
_NEAR_ELSEWHERE = 64 << 10  # takes a network less time than another request
# 4.3.9: checksum and sizes of 4 or 8 bytes; the mark before them came to be written by everyone.
_DESCRIPTORS = {
    12: struct.Struct("<III"),
    16: struct.Struct("<4xIII"),
    20: struct.Struct("<IQQ"),
    24: struct.Struct("<4xIQQ"),
}
_BEFORE = max(_DESCRIPTORS)


class _Run(NamedTuple):
    """Bytes of the archive with the local headers of some entries, by their places in the order."""

    base: int
    length: int
    first: int
    last: int


def located(file: File, window: Window, entries: list[Entry], stop: int) -> dict[str, Member]:
    """Return the members by name, in the directory's order, with the places that their local headers give.

    `stop` is where the directory begins. Raise FormatError when the two headers of a member differ, when
    members overlap, and for bytes that belong to none.
    """
    ordered = sorted(entries)
    if ordered and ordered[-1].header + LOCAL.size > stop:
        fail(file, f"member {shown(ordered[-1].name)} lies beyond the archive's end", ordered[-1].header)
    offsets: dict[str, int] = {}
    last: Entry | None = None
    free, bare = 0, False
    for entry, data, at in _headers(window, ordered, stop):
        if last is None and entry.header:
            fail(file, f"member {shown(entry.name)} does not begin the file", entry.header)
        if entry.header != free or bare:
            _require_descriptor(file, last, data[max(0, at - _BEFORE) : at], entry.header - free, bare=bare)
        offset, bare = _payload(file, entry, data, at)
        free = offset + entry.stored
        if free > stop:
            fail(file, f"member {shown(entry.name)} reaches into the central directory", offset)
        offsets[entry.name], last = offset + window.start, entry
    if free != stop or bare:
        _require_descriptor(
            file, last, window.read(min(_BEFORE, stop), max(0, stop - _BEFORE)), stop - free, bare=bare
        )
    return {
        name: Member(name, method, flags, crc, stored, size, header, offsets[name])
        for header, name, _, method, flags, crc, stored, size in entries
    }


def _headers(window: Window, ordered: Sequence[Entry], stop: int) -> Iterator[tuple[Entry, bytes, int]]:
    """Give every local header, in the file's order, with bytes around it and where among these it begins.

    Headers that lie close together come with one read.
    """
    runs = list(_runs(ordered, stop, _NEAR if window.descriptor is not None else _NEAR_ELSEWHERE))
    for run, data in zip(runs, window.each((run.length, run.base) for run in runs), strict=True):
        for entry in ordered[run.first : run.last]:
            yield entry, data, entry.header - run.base


def _runs(ordered: Sequence[Entry], stop: int, near: int) -> Iterator[_Run]:
    """Give the runs of bytes that hold all local headers, those together that are less than `near` apart."""
    position = 0
    while position < len(ordered):
        base, end = max(0, ordered[position].header - _BEFORE), _need(ordered[position])
        following = position + 1
        while following < len(ordered) and ordered[following].header - end < near:
            if end - base > _WINDOW:
                break
            end = max(end, _need(ordered[following]))
            following += 1
        yield _Run(base, min(end, stop) - base, position, following)
        position = following


def _need(entry: Entry) -> int:
    return entry.header + LOCAL.size + len(entry.raw) + _NEAR


def _payload(file: File, entry: Entry, data: bytes, at: int) -> tuple[int, bool]:
    """Return where the member's bytes begin, after checking that its local header says the same of it.

    The second answer is whether it leaves sizes and checksum to a descriptor behind the bytes.
    """
    if at + LOCAL.size > len(data):
        fail(file, f"the local header of {shown(entry.name)} is cut off", entry.header)
    mark, _, flags, method, _, _, crc, stored, size, name, extra = LOCAL.unpack_from(data, at)
    start = at + LOCAL.size
    if mark != LOCAL_MARK:
        fail(file, f"member {shown(entry.name)} has no local header where the directory says", entry.header)
    if flags & UNREAD:
        refuse_flags(file, flags, entry.header)
    raw = data[start : start + name]
    if extra:
        rest = data[start + name : start + name + extra]
        require_one_name(file, rest, raw, entry.header)
        if FULL32 in (size, stored):
            size, stored = widened(file, rest, (size, stored), entry.header)
    told, real = (crc, stored, size), (entry.crc, entry.stored, entry.size)
    # With bit 3 the real values follow the data: zeros are legal here, other values must still agree.
    bare = bool(flags & LATER) and told != real
    same = told == real or (bare and all(one in (0, other) for one, other in zip(told, real, strict=True)))
    if not same or method != entry.method or raw != entry.raw or (flags ^ entry.flags) & ~EFFORT:
        fail(file, f"the two headers of member {shown(entry.name)} contradict each other", entry.header)
    return entry.header + LOCAL.size + name + extra, bare


def _require_descriptor(file: File, entry: Entry | None, data: bytes, length: int, *, bare: bool) -> None:
    """Raise FormatError unless the `length` bytes at the end of `data` are the member's data descriptor.

    `entry` is the member before them; if `bare`, its local header leaves values to the descriptor.
    """
    if entry is None:
        if length:
            fail(file, "bytes of the archive belong to no member", 0)
        return
    if length < 0:
        fail(file, "two members overlap", entry.header, found=f"one of them is {shown(entry.name)}")
    layout = _DESCRIPTORS.get(length)
    if layout is None or not entry.flags & LATER:
        what = "no descriptor follows, as its flag says," if bare and not length else "other bytes follow"
        fail(file, f"{what} behind member {shown(entry.name)}", entry.header)
    said = data[len(data) - length :]
    marked = length in (12, 20) or said.startswith(DESCRIPTOR_MARK)
    if not marked or layout.unpack(said) != (entry.crc, entry.stored, entry.size):
        fail(file, f"what follows member {shown(entry.name)} contradicts its headers", entry.header)
