"""Zip and tar archives.

Section numbers, names and layouts of records are those of PKWARE's APPNOTE.TXT 6.3.10.
"""

from __future__ import annotations

import io
import posixpath
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from threading import Lock
from typing import IO, TYPE_CHECKING, Any, NoReturn

from ckpttool.core import filesystem, limits
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import CkpttoolError, FormatError, TruncatedError, UnsupportedError
from ckpttool.core.limits import Limits
from ckpttool.core.source import Buffer, Checksum, DeflatedSpan, File, PiecewiseSource, Span, Storage, crc32

if TYPE_CHECKING:
    pass


BLOCK = 512


def is_tar_header(block: bytes) -> bool:
    """Return whether Python's tarfile accepts the bytes as a header, by its checksum alone."""
    if len(block) < BLOCK:
        return False
    field = block[148:156]
    if field[0] in (0o200, 0o377):
        stored_sum = int.from_bytes(field[1:], "big") - (1 << 56 if field[0] == 0o377 else 0)
    else:
        text = field.partition(b"\0")[0].strip()
        if text.strip(b"01234567"):
            return False
        stored_sum = int(text or b"0", 8)
    rest = block[:148] + block[156:BLOCK]
    unsigned = 256 + sum(rest)
    return stored_sum in (unsigned, unsigned - 256 * sum(byte > 127 for byte in rest))


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
LATER = 1 << 3  # sizes and checksum follow the data; the local header may have zeros
UTF8 = 1 << 11
EFFORT = 1 << 1 | 1 << 2  # the compressor's effort level
_SHOWN = 120


class ZipMember(NamedTuple):
    """One member: sizes in bytes, `stored` in the file and `size` unpacked.

    `header` counts from the start of the archive, `offset` (of the payload) from the start of the
    file.
    """

    name: str
    method: int
    flags: int
    crc: int
    stored: int
    size: int
    header: int
    offset: int


class ZipEntry(NamedTuple):
    """Central directory entry of a member; `raw` is its name as stored."""

    header: int
    name: str
    raw: bytes
    method: int
    flags: int
    crc: int
    stored: int
    size: int


class ZipWindow(NamedTuple):
    """The range of a file that is the archive; `descriptor` is None for a file in a remote store."""

    file: File
    descriptor: int | None
    start: int
    size: int

    def read(self, length: int, offset: int) -> bytes:
        """Return up to `length` bytes from an offset of the archive."""
        room = max(0, min(length, self.size - offset))
        if self.descriptor is None:
            return self.file.read(self.start + offset, room)
        return filesystem.read_at(self.descriptor, room, self.start + offset)

    def entries(self, runs: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Yield the result of `read` for pairs of length and offset."""
        if self.descriptor is None:
            room = ((self.start + at, max(0, min(length, self.size - at))) for length, at in runs)
            return self.file.together(room)
        return (self.read(length, at) for length, at in runs)


def fail(
    file: File, message: str, offset: int, *, expected: str | None = None, found: str | None = None
) -> NoReturn:
    """Raise FormatError at an offset of the archive.

    Args:
        file: the archive.
        message: what is wrong with it.
        offset: where, in bytes from the start of the file.
        expected: what the record should have there.
        found: what it has.
    """
    raise FormatError(message, file=file.path, offset=offset, expected=expected, found=found)


def quote_member(name: str) -> str:
    """Return a member's name for an error, shortened and without terminal control characters."""
    return repr(name) if len(name) <= _SHOWN else f"{name[:_SHOWN]!r}..."


def refuse_flags(file: File, flags: int, at: int) -> NoReturn:
    """Raise UnsupportedError for a member that is encrypted, or a patch of another file (UNREAD)."""
    what = "the archive is encrypted" if flags & ENCRYPTED else "the archive contains patches, not files"
    raise UnsupportedError(what, file=file.path, offset=at)


def widen_fields(file: File, extra: bytes, fields: tuple[int, ...], at: int) -> tuple[int, ...]:
    """Return the fields, with saturated ones replaced in order from the zip64 extra field (4.5.3)."""
    bodies = [body for kind, body in _iter_extra_fields(extra) if kind == ZIP64_EXTRA]
    data = bodies[0] if len(bodies) == 1 else b""
    wide, used = [], 0
    for value in fields:
        if value == FULL32:
            if len(data) < used + 8:
                fail(file, "the zip64 sizes of a large member are missing or occur twice", at)
            wide.append(int.from_bytes(data[used : used + 8], "little"))
            used += 8
        else:
            wide.append(value)
    return tuple(wide)


def require_one_name(file: File, extra: bytes, raw: bytes, at: int) -> None:
    """Raise FormatError if an extra field gives the member another name in Unicode (4.6.9)."""
    if _UNICODE_PATH not in extra:
        return  # few archives have one, but every member of torch's has an extra field
    for kind, body in _iter_extra_fields(extra):
        # A version, the checksum of the name in the header, and the other name.
        if kind == UNICODE_PATH_EXTRA and (len(body) < 5 or body[5:] != raw):
            fail(
                file,
                "a member has two different names",
                at,
                expected=quote_member(_lossy_name(raw)),
                found=quote_member(_lossy_name(body[5:])),
            )


def _lossy_name(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _iter_extra_fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        yield kind, extra[at + 4 : at + 4 + size]
        at += 4 + size


_COMMENT_ROOM = END.size + FULL16
_END, _LOCATOR = b"PK\x05\x06", b"PK\x06\x07"
_DOS_FOLDER, _UNIX_FOLDER = 0x10, 0o04
_FILE_TYPES = (0, _UNIX_FOLDER, 0o10)  # 4.4.15 leaves the upper half to the host; Unix stores st_mode there
_OTHER_THAN_FILE = 0xF << 28 | _DOS_FOLDER


class ZipDirectory(NamedTuple):
    """Location of the central directory and its declared number of entries."""

    offset: int
    length: int
    entries: int


def find_zip_directory(file: File, window: ZipWindow) -> ZipDirectory:
    """Return the directory's location; raise FormatError unless it ends where the end record begins."""
    start = max(0, window.size - _COMMENT_ROOM)
    tail = window.read(window.size - start, start)
    at = tail.rfind(_END)
    fitting: list[int] = []
    whole = False
    while at >= 0:
        if at + END.size <= len(tail):
            rest = len(tail) - at - END.size - END.unpack_from(tail, at)[7]
            fitting += [at] if rest == 0 else []
            # Not the end of a member that is an archive itself: offsets there count from the member's start.
            with suppress(FormatError):
                whole |= rest > 0 and bool(_read_end_record(file, window, tail[at:], start + at))
        at = tail.rfind(_END, 0, at)
    if not fitting and whole:
        fail(file, "extra bytes after the archive's end record", window.size)
    if not fitting:
        what = "the archive's end record is missing: the file is truncated"
        raise TruncatedError(what, file=file.path, offset=window.size, hint="copy or download it again")
    # Many readers use the last one (Lib/zipfile.py, _EndRecData; miniz), whatever its comment's length is.
    if fitting != [tail.rfind(_END)]:
        fail(file, "the archive has more than one end record", start + fitting[-1])
    return _read_end_record(file, window, tail[fitting[0] :], start + fitting[0])


def _read_end_record(file: File, window: ZipWindow, record: bytes, stop: int) -> ZipDirectory:
    end = END.unpack_from(record)
    directory = ZipDirectory(end[6], end[5], end[4])
    if end[1] or end[2] or end[3] != end[4]:
        fail(file, "the archive is split over several disks", stop)
    locator = window.read(LOCATOR64.size, stop - LOCATOR64.size) if stop >= LOCATOR64.size else b""
    if locator[:4] == _LOCATOR:
        directory, stop = _read_zip64_record(file, window, locator, directory, stop - LOCATOR64.size)
    if directory.offset + directory.length != stop:
        fail(
            file,
            "the central directory does not end where the end record begins",
            stop,
            expected=f"offset {stop - directory.length:,}",
            found=f"{directory.offset:,}",
        )
    return directory


def _read_zip64_record(
    file: File, window: ZipWindow, locator: bytes, old: ZipDirectory, stop: int
) -> tuple[ZipDirectory, int]:
    _, disk, at, disks = LOCATOR64.unpack(locator)
    record = window.read(END64.size, at) if at <= stop - END64.size else b""
    if disk or disks > 1 or len(record) < END64.size:
        fail(file, "the zip64 locator does not point to an end record", stop)
    mark, size, _, _, this, first, here, count, length, offset = END64.unpack(record)
    if mark != END64_MARK or at + 12 + size != stop or this or first or here != count:
        fail(file, "the zip64 end record is damaged", at)
    pairs = ((old.offset, offset, FULL32), (old.length, length, FULL32), (old.entries, count, FULL16))
    if any(short not in (full, saturated) for short, full, saturated in pairs):
        fail(file, "the two end records contradict each other", at)
    return ZipDirectory(offset, length, count), at


def read_zip_entries(file: File, window: ZipWindow, directory: ZipDirectory) -> list[ZipEntry]:
    """Return all entries; raise FormatError unless they fill the directory and have unique names."""
    allowed = limits.current()
    if directory.length > allowed.index_bytes:
        raise limits.limit_error(
            "index_bytes", "the archive's central directory is too long", directory.length, file=file.path
        )
    if directory.entries > allowed.members:
        raise limits.limit_error(
            "members", "the archive has too many members", directory.entries, file=file.path
        )
    data = window.read(directory.length, directory.offset)
    entries: list[ZipEntry] = []
    at, size = 0, len(data)
    while at < size:
        if at + CENTRAL.size > size or len(entries) >= directory.entries:
            fail(
                file, "the length of the central directory does not match its entries", directory.offset + at
            )
        entry, at = _parse_zip_entry(file, data, at, directory.offset)
        entries.append(entry)
    if len(entries) != directory.entries:
        fail(
            file,
            "the number of members differs from the number in the end record",
            directory.offset,
            expected=f"{directory.entries:,}",
            found=f"{len(entries):,}",
        )
    _require_unique_names(file, entries, directory.offset)
    return entries


def _parse_zip_entry(file: File, data: bytes, at: int, base: int) -> tuple[ZipEntry, int]:
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
    text = _decode_name(file, raw, flags, base + at)
    if extra:
        rest = data[start + name : stop - comment]
        require_one_name(file, rest, raw, base + at)
        if FULL32 in (stored, size, header):
            size, stored, header = widen_fields(file, rest, (size, stored, header), base + at)
    elif FULL32 in (stored, size, header):
        widen_fields(file, b"", (FULL32,), base + at)
    if disk:  # miniz, and so torch, also rejects 0xFFFF
        fail(file, "the archive is split over several disks", base + at)
    if method == STORED and stored != size:
        fail(file, f"member {quote_member(text)} is stored uncompressed, but its two sizes differ", base + at)
    if kind & _OTHER_THAN_FILE or text[-1] == "/":
        _require_plain_file(file, text, kind, size, base + at)
    return ZipEntry(header, text, raw, method, flags, crc, stored, size), stop


def _require_plain_file(file: File, name: str, kind: int, size: int, at: int) -> None:
    """Raise FormatError unless name and attributes both describe a file or an empty folder."""
    if kind >> 28 not in _FILE_TYPES:
        fail(file, f"member {quote_member(name)} is a link or a device, not a file", at)
    if name[-1] != "/" and (kind & _DOS_FOLDER or kind >> 28 == _UNIX_FOLDER):
        # Here miniz, and so torch, reads nothing and returns uninitialised memory
        # (mz_zip_reader_extract_to_mem).
        fail(file, f"member {quote_member(name)} is marked as a folder, but has the name of a file", at)
    if name[-1] == "/" and size:
        fail(file, f"member {quote_member(name)} is a folder, but contains bytes", at)


def _decode_name(file: File, raw: bytes, flags: int, at: int) -> str:
    try:
        # 4.4.4 bit 11; without it, names are in the IBM PC's code page.
        name = raw.decode("ascii" if raw.isascii() else "utf-8" if flags & UTF8 else "cp437")
    except UnicodeDecodeError:
        fail(file, "a member's name is flagged as UTF-8, but is not valid UTF-8", at)
    if not name or "\0" in name:
        fail(file, "a member's name is empty or contains a NUL", at)
    return name


def _require_unique_names(file: File, entries: list[ZipEntry], at: int) -> None:
    """Raise FormatError if two members have the same name or would unpack to the same file."""
    names = {entry.name for entry in entries}
    if len(names) != len(entries):
        fail(
            file,
            f"two members are named {quote_member(_first_duplicate(entry.name for entry in entries))}",
            at,
        )
    if len({entry.raw for entry in entries}) != len(entries):
        fail(file, "two members have the same name in two encodings", at)
    places: dict[str, str] = {}
    for name in filter(_needs_normalization, names):
        path = posixpath.normpath("/" + name.replace("\\", "/")).lstrip("/")
        other = places.setdefault(path, name)
        if other != name or (path != name and path in names):
            both = sorted((name, other if other != name else path))
            fail(
                file,
                f"two members would unpack to the same path: {' and '.join(map(quote_member, both))}",
                at,
            )


def _needs_normalization(name: str) -> bool:
    return name[0] in "./" or name[-1] in "./" or "\\" in name or "//" in name or "/." in name


def _first_duplicate(names: Iterable[str]) -> str:
    earlier: set[str] = set()
    # `add` returns None.
    return next(name for name in names if name in earlier or earlier.add(name))  # type: ignore[func-returns-value]


_NEAR, _WINDOW = 4096, 1 << 20
_NEAR_ELSEWHERE = 64 << 10  # transferring this takes less time than another request
# 4.3.9: checksum and sizes of 4 or 8 bytes; the mark before them is optional, but common.
_DESCRIPTORS = {
    12: struct.Struct("<III"),
    16: struct.Struct("<4xIII"),
    20: struct.Struct("<IQQ"),
    24: struct.Struct("<4xIQQ"),
}
_BEFORE = max(_DESCRIPTORS)


def locate_members(file: File, window: ZipWindow, entries: list[ZipEntry], stop: int) -> dict[str, ZipMember]:
    """Return the members by name, in directory order, with the positions from their local headers.

    `stop` is the start of the directory. Raise FormatError when the two headers of a member differ,
    when members overlap, and for bytes that belong to no member.
    """
    ordered = sorted(entries)
    if ordered and ordered[-1].header + LOCAL.size > stop:
        fail(file, f"member {quote_member(ordered[-1].name)} is beyond the archive's end", ordered[-1].header)
    offsets: dict[str, int] = {}
    last: ZipEntry | None = None
    free, bare = 0, False
    for entry, data, at in _iter_local_headers(window, ordered, stop):
        if last is None and entry.header:
            fail(file, f"member {quote_member(entry.name)} is not at the start of the archive", entry.header)
        if entry.header != free or bare:
            _require_descriptor(file, last, data[max(0, at - _BEFORE) : at], entry.header - free, bare=bare)
        offset, bare = _locate_payload(file, entry, data, at)
        free = offset + entry.stored
        if free > stop:
            fail(file, f"member {quote_member(entry.name)} overlaps the central directory", offset)
        offsets[entry.name], last = offset + window.start, entry
    if free != stop or bare:
        _require_descriptor(
            file, last, window.read(min(_BEFORE, stop), max(0, stop - _BEFORE)), stop - free, bare=bare
        )
    return {
        name: ZipMember(name, method, flags, crc, stored, size, header, offsets[name])
        for header, name, _, method, flags, crc, stored, size in entries
    }


def _iter_local_headers(
    window: ZipWindow, ordered: Sequence[ZipEntry], stop: int
) -> Iterator[tuple[ZipEntry, bytes, int]]:
    """Yield every local header, in file order, with the bytes around it and its position in them.

    Headers that are close together are read in one request.
    """
    runs = list(_iter_header_runs(ordered, stop, _NEAR if window.descriptor is not None else _NEAR_ELSEWHERE))
    for (base, _, members), data in zip(runs, window.entries((run[1], run[0]) for run in runs), strict=True):
        for entry in members:
            yield entry, data, entry.header - base


def _iter_header_runs(
    ordered: Sequence[ZipEntry], stop: int, near: int
) -> Iterator[tuple[int, int, Sequence[ZipEntry]]]:
    """Yield start and length of byte ranges that cover all local headers, with the entries of each.

    Headers less than `near` apart share one range.
    """
    position = 0
    while position < len(ordered):
        base, end = max(0, ordered[position].header - _BEFORE), _header_limit(ordered[position])
        following = position + 1
        while following < len(ordered) and ordered[following].header - end < near:
            if end - base > _WINDOW:
                break
            end = max(end, _header_limit(ordered[following]))
            following += 1
        yield base, min(end, stop) - base, ordered[position:following]
        position = following


def _header_limit(entry: ZipEntry) -> int:
    return entry.header + LOCAL.size + len(entry.raw) + _NEAR


def _locate_payload(file: File, entry: ZipEntry, data: bytes, at: int) -> tuple[int, bool]:
    """Return the position of the member's bytes, after comparing its local header with its entry.

    The second result is whether it leaves sizes and checksum to a descriptor after the bytes.
    """
    if at + LOCAL.size > len(data):
        fail(file, f"the local header of {quote_member(entry.name)} is truncated", entry.header)
    mark, _, flags, method, _, _, crc, stored, size, name, extra = LOCAL.unpack_from(data, at)
    start = at + LOCAL.size
    if mark != LOCAL_MARK:
        fail(
            file,
            f"no local header of member {quote_member(entry.name)} at the offset in the directory",
            entry.header,
        )
    if flags & UNREAD:
        refuse_flags(file, flags, entry.header)
    raw = data[start : start + name]
    if extra:
        rest = data[start + name : start + name + extra]
        require_one_name(file, rest, raw, entry.header)
        if FULL32 in (size, stored):
            size, stored = widen_fields(file, rest, (size, stored), entry.header)
    declared, real = (crc, stored, size), (entry.crc, entry.stored, entry.size)
    # With bit 3 the real values follow the data: zeros are valid here, other values must still agree.
    same, bare = declared == real, False
    if not same and flags & LATER:
        bare = same = all(one in (0, other) for one, other in zip(declared, real, strict=True))
    if not same or method != entry.method or raw != entry.raw or (flags ^ entry.flags) & ~EFFORT:
        fail(
            file, f"the two headers of member {quote_member(entry.name)} contradict each other", entry.header
        )
    return entry.header + LOCAL.size + name + extra, bare


def _require_descriptor(file: File, entry: ZipEntry | None, data: bytes, length: int, *, bare: bool) -> None:
    """Raise FormatError unless the last `length` bytes of `data` are the member's data descriptor.

    `entry` is the member before them; with `bare`, its local header leaves values to the descriptor.
    """
    if entry is None:
        if length:
            fail(file, "the archive contains bytes that belong to no member", 0)
        return
    if length < 0:
        fail(
            file,
            "two members overlap",
            entry.header,
            found=f"member {quote_member(entry.name)} and the one after it",
        )
    layout = _DESCRIPTORS.get(length)
    if layout is None or not entry.flags & LATER:
        what = (
            "the data descriptor announced by its flag is missing" if bare and not length else "extra bytes"
        )
        fail(file, f"{what} after member {quote_member(entry.name)}", entry.header)
    descriptor = data[len(data) - length :]
    marked = length in (12, 20) or descriptor.startswith(DESCRIPTOR_MARK)
    if not marked or layout.unpack(descriptor) != (entry.crc, entry.stored, entry.size):
        fail(
            file,
            f"the data descriptor of member {quote_member(entry.name)} contradicts its headers",
            entry.header,
        )


_ARCHIVES, _MEMBERS = 256, 1 << 14


@dataclass(frozen=True, slots=True)
class ZipArchive:
    """A checked archive; `recorded` is False if no member has a checksum (all are zero)."""

    file: File
    members: Mapping[str, ZipMember]
    recorded: bool

    def source(self, name: str) -> Storage:
        """Return the member's bytes as an unread source; raise FormatError if there is no such member."""
        member = self.members.get(name)
        if member is None:
            raise FormatError(f"the archive has no member {quote_member(name)}", file=self.file.path)
        checksum = Checksum("crc32", member.crc) if self.recorded else None
        if member.method == STORED:
            return Span(self.file, member.offset, member.size, checksum)
        if member.method != DEFLATED:
            raise UnsupportedError(
                f"member {quote_member(name)} uses unsupported compression method {member.method}",
                file=self.file.path,
            )
        self._require_proportion(member)
        return DeflatedSpan(Span(self.file, member.offset, member.stored), member.size, checksum)

    def _require_proportion(self, member: ZipMember) -> None:
        allowed = limits.current()
        if member.size > max(allowed.unpacked_bytes, allowed.unpacked_ratio * member.stored):
            what = (
                f"member {quote_member(member.name)} would unpack to far too many bytes from "
                f"{member.stored:,}"
            )
            raise limits.limit_error(
                "unpacked_bytes", what, member.size, file=self.file.path, offset=member.offset
            )


def read_zip(file: File, start: int = 0, size: int | None = None) -> ZipArchive:
    """Return the archive's members; raise FormatError unless all records agree.

    `start` and `size` are the archive's range in the file (an archive stored in another); members' offsets
    are relative to the file. The standard library's reader verifies all-zero checksums that were never
    recorded, does not compare the end record's count with the entries, and takes longer to import than a
    checkpoint takes to list.
    """
    return _KEPT.read(file, start, file.size - start if size is None else size, limits.current())


class _ArchiveCache:
    """Cache of recent archives: at most `_ARCHIVES` with `_MEMBERS` members together, at least two.

    A format first checks whether an archive is its own and then reads it; of several checkpoints all
    are checked before the first is read. The key contains the file's stamp, so a changed file is
    listed anew.
    """

    def __init__(self) -> None:
        self._archives: OrderedDict[tuple[File, int, int, Limits], ZipArchive] = OrderedDict()
        self._members = 0
        self._lock = Lock()

    def read(self, file: File, start: int, size: int, allowed: Limits) -> ZipArchive:
        """Return the archive in this range; raise like `read_zip`."""
        key = (file, start, size, allowed)
        with self._lock:
            if (cached := self._archives.get(key)) is not None:
                self._archives.move_to_end(key)
                return cached
        archive = _read_archive(file, start, size)
        with self._lock:
            if key not in self._archives:
                self._archives[key] = archive
                self._members += len(archive.members)
            while len(self._archives) > 2 and (self._members > _MEMBERS or len(self._archives) > _ARCHIVES):
                _, oldest = self._archives.popitem(last=False)
                self._members -= len(oldest.members)
        return archive


_KEPT = _ArchiveCache()


def _read_archive(file: File, start: int, size: int) -> ZipArchive:
    with (
        nullcontext()
        if filesystem.find_store(file.path) is not None
        else file.opened(start, size) as descriptor
    ):
        window = ZipWindow(file, descriptor, start, size)
        try:
            directory = find_zip_directory(file, window)
            entries = read_zip_entries(file, window, directory)
            members = locate_members(file, window, entries, directory.offset)
        except CkpttoolError as error:
            error.offset = None if error.offset is None else error.offset + start
            raise
    listed = members.values()
    recorded = not listed or any(m.crc for m in listed) or not any(m.size for m in listed)
    return ZipArchive(file, members, recorded)


# MS-DOS for 1980-01-01 00:00, the earliest time in the format: archives contain no time of writing.
_DATE, _TIME = 0x21, 0
_VERSION, _VERSION64 = 20, 45
# torch also pads with this extra field (caffe2/serialize/inline_container.cc, getPadding).
_PADDING, _FILLER = 0x4246, b"Z"


class _MemberRecord(NamedTuple):
    name: bytes
    flags: int
    crc: int
    size: int
    header: int


def _part_pieces(part: Buffer | PiecewiseSource, *, verify: bool) -> Iterable[Buffer]:
    return (part,) if isinstance(part, Buffer) else part.pieces(verify=verify)


class ZipWriter:
    """Write members sequentially to an empty stream; `close` writes the directory."""

    def __init__(self, stream: IO[bytes], alignment: int = 64) -> None:
        """Start at the stream's beginning; payloads begin at multiples of `alignment` bytes."""
        self._stream = stream
        self._alignment = alignment
        self._position = 0
        self._members: list[_MemberRecord] = []

    @property
    def checksums(self) -> tuple[int, ...]:
        """CRC-32 of every member written so far."""
        return tuple(member.crc for member in self._members)

    def add(self, name: str, *parts: Buffer | PiecewiseSource) -> None:
        """Write one member from the concatenation of `parts`."""
        raw = name.encode("utf-8")
        flags = 0 if raw.isascii() else UTF8
        crc = size = 0
        for part in parts:
            for piece in _part_pieces(part, verify=True):
                crc, size = crc32(piece, crc), size + memoryview(piece).nbytes
        member = _MemberRecord(raw, flags, crc, size, self._position)
        self._write(self._local(member))
        for part in parts:
            for piece in _part_pieces(part, verify=False):
                self._write(piece)
        self._members.append(member)

    def close(self) -> None:
        """Write the central directory and the end records; the stream stays open."""
        start = self._position
        for member in self._members:
            self._write(_central_header(member))
        self._write(_end_records(start, self._position - start, len(self._members)))

    def _write(self, data: Buffer) -> None:
        self._stream.write(data)
        self._position += memoryview(data).nbytes

    def _local(self, member: _MemberRecord) -> bytes:
        large = member.size >= FULL32
        size = FULL32 if large else member.size
        wide = struct.pack("<HHQQ", ZIP64_EXTRA, 16, member.size, member.size) if large else b""
        begin = member.header + LOCAL.size + len(member.name) + len(wide)
        gap = -begin % self._alignment
        if 0 < gap < 4:  # an extra field has a header of four bytes
            gap += self._alignment
        padding = struct.pack("<HH", _PADDING, gap - 4) + _FILLER * (gap - 4) if gap else b""
        extra = wide + padding
        head = LOCAL.pack(
            LOCAL_MARK,
            _VERSION64 if large else _VERSION,
            member.flags,
            STORED,
            _TIME,
            _DATE,
            member.crc,
            size,
            size,
            len(member.name),
            len(extra),
        )
        return head + member.name + extra


def _central_header(member: _MemberRecord) -> bytes:
    size, header = member.size, member.header
    wide = [size, size] if size >= FULL32 else []
    wide += [header] if header >= FULL32 else []
    extra = struct.pack(f"<HH{len(wide)}Q", ZIP64_EXTRA, 8 * len(wide), *wide) if wide else b""
    version = _VERSION64 if wide else _VERSION
    head = CENTRAL.pack(
        CENTRAL_MARK,
        version,
        version,
        member.flags,
        STORED,
        _TIME,
        _DATE,
        member.crc,
        min(size, FULL32),
        min(size, FULL32),
        len(member.name),
        len(extra),
        0,
        0,
        0,
        0,
        min(header, FULL32),
    )
    return head + member.name + extra


def _end_records(start: int, size: int, count: int) -> bytes:
    zip64 = b""
    if count >= FULL16 or size >= FULL32 or start >= FULL32:
        zip64 = END64.pack(
            END64_MARK, 44, _VERSION64, _VERSION64, 0, 0, count, count, size, start
        ) + LOCATOR64.pack(LOCATOR64_MARK, 0, start + size, 1)
    short = min(count, FULL16)
    return zip64 + END.pack(END_MARK, 0, 0, short, short, min(size, FULL32), min(start, FULL32), 0)


class FileStream(io.RawIOBase):
    """A file as a seekable stream."""

    def __init__(self, file: File) -> None:
        super().__init__()
        self._file, self._at = file, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position."""
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def read(self, length: int = -1) -> bytes:
        """Return up to `length` bytes; raise LimitError if that is more than any archive header has."""
        most = limits.current().text_bytes
        if not 0 <= length <= most:
            raise limits.limit_error(
                "text_bytes", "an archive header is too long", length, file=self._file.path
            )
        room = bytearray(length)
        return bytes(room[: self.readinto(room)])

    def readinto(self, room: Any) -> int:
        """Fill the buffer up to the end of the file."""
        length = max(0, min(len(room), self._file.size - self._at))
        if length:
            room[:length] = self._file.read(self._at, length)
        self._at += length
        return length
