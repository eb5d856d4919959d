"""Zip archives as bytes: where every member lies, and nothing that two readers could understand differently.

The standard library's reader checks all-zero checksums that were never recorded, does not compare the end
record's count with the entries, and takes longer to import than a checkpoint takes to list.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from threading import Lock

from ckpttool import limits, places
from ckpttool.errors import CkpttoolError, FormatError, UnsupportedError
from ckpttool.limits import Limits
from ckpttool.source import Checksum, Deflated, File, Span, Storage
from ckpttool.wire import zip_directory, zip_members
from ckpttool.wire.zip_records import DEFLATED, LOCAL, STORED, Member, Window, shown

__all__ = ["DEFLATED", "LOCAL", "STORED", "Archive", "Member", "read"]

_ARCHIVES, _MEMBERS = 256, 1 << 14


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
            raise FormatError(f"the archive has no member {shown(name)}", file=self.file.path)
        checksum = Checksum("crc32", member.crc) if self.recorded else None
        if member.method == STORED:
            return Span(self.file, member.offset, member.size, checksum)
        if member.method != DEFLATED:
            raise UnsupportedError(
                f"member {shown(name)} is compressed by method {member.method}", file=self.file.path
            )
        self._require_proportion(member)
        return Deflated(Span(self.file, member.offset, member.stored), member.size, checksum)

    def _require_proportion(self, member: Member) -> None:
        allowed = limits.current()
        if member.size > max(allowed.unpacked_bytes, allowed.unpacked_ratio * member.stored):
            what = f"member {shown(member.name)} would unpack from {member.stored:,} bytes to far too many"
            raise limits.exceeded(
                "unpacked_bytes", what, member.size, file=self.file.path, offset=member.offset
            )


def read(file: File, start: int = 0, size: int | None = None) -> Archive:
    """Return the archive's members; raise FormatError unless every record agrees with every other.

    `start` and `size` say where in the file the archive lies (an archive stored in another); members' offsets
    are those of the file.
    """
    return _KEPT.read(file, start, file.size - start if size is None else size, limits.current())


class _Kept:
    """The archives listed last: at most `_ARCHIVES` of `_MEMBERS` members together, and always the last two.

    A format first checks whether an archive is its own and then reads it; of several checkpoints all are
    checked before the first is read. The key has the file's stamp, so a changed file is listed anew.
    """

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[File, int, int, Limits], Archive] = OrderedDict()
        self._members = 0
        self._lock = Lock()

    def read(self, file: File, start: int, size: int, allowed: Limits) -> Archive:
        """Return the archive that lies there; raise as the module's `read` does."""
        key = (file, start, size, allowed)
        with self._lock:
            if (known := self._found.get(key)) is not None:
                self._found.move_to_end(key)
                return known
        found = _read(file, start, size)
        with self._lock:
            if key not in self._found:
                self._found[key] = found
                self._members += len(found.members)
            while len(self._found) > 2 and (self._members > _MEMBERS or len(self._found) > _ARCHIVES):
                _, oldest = self._found.popitem(last=False)
                self._members -= len(oldest.members)
        return found


_KEPT = _Kept()


def _read(file: File, start: int, size: int) -> Archive:
    with nullcontext() if places.store(file.path) is not None else file.opened(start, size) as descriptor:
        window = Window(file, descriptor, start, size)
        try:
            place = zip_directory.find(file, window)
            entries = zip_directory.entries(file, window, place)
            members = zip_members.located(file, window, entries, place.offset)
        except CkpttoolError as error:
            error.offset = None if error.offset is None else error.offset + start
            raise
    found = members.values()
    recorded = not found or any(m.crc for m in found) or not any(m.size for m in found)
    return Archive(file, members, recorded)
