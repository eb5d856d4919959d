"""Members of zip and tar archives as files, wherever the archive lies.

What is stored as it is gets read in its place, by parts; what is compressed is unpacked once, as far as the
limits allow. Nothing is ever extracted under a name that an archive tells.
"""

from __future__ import annotations

import os
import posixpath
from typing import NamedTuple

from ckpttool import places, urls
from ckpttool.errors import ChangedError, FormatError, NotFoundError
from ckpttool.places import Found, Seen
from ckpttool.remote.copies import Copies, Room, pieces, require_few
from ckpttool.shown import size
from ckpttool.source import Deflated, File, Span
from ckpttool.wire import zip  # noqa: A004 - the module is named by its format


class Unpacked(NamedTuple):
    """Bytes of a local file that holds what the archive `of` was unpacked to."""

    of: File
    room: Room
    offset: int
    length: int


class Member(NamedTuple):
    """A plain file of an archive: its unpacked size in bytes, and where these are."""

    size: int
    source: Span | Deflated | Unpacked


class Archive:
    """The files of one archive by their paths in it (places.Store)."""

    def __init__(self, outer: str, kind: str) -> None:
        """Read the archive at the place `outer`, a "zip" or a "tar", once something is asked."""
        self._outer, self._kind = outer, kind
        self.start = f"{outer}::{kind}://{urls.TOP}"
        self._listed: tuple[File, dict[str, Member]] | None = None
        self._copies = Copies()

    def look(self, place: str) -> Found:
        """Return what is there; raise NotFoundError or FormatError if the archive cannot be listed."""
        members = self._members(self._file())
        name = self._name(place)
        if name in members:
            return self._seen(members[name])
        below = f"{name}/" if name else ""
        return "folder" if any(each.startswith(below) for each in members) else None

    def names(self, place: str) -> list[str]:
        """Return the names in a folder of the archive: as many as the archive may have members."""
        name = self._name(place)
        below = f"{name}/" if name else ""
        members = self._members(self._file())
        return sorted({each[len(below) :].partition("/")[0] for each in members if each.startswith(below)})

    def read(self, place: str, seen: Seen, offset: int, length: int) -> bytes:
        """Return these bytes; raise ChangedError if the archive is not the one that was listed."""
        source = self._same(place, seen).source
        if isinstance(source, Span):
            return source.file.read(source.offset + offset, length)
        if isinstance(source, Unpacked):
            if places.store(source.of.path) is None:
                source.of.require_unchanged()
            return os.pread(source.room.descriptor, length, source.offset + offset)
        found = self._copies.read(place, seen, offset, length)
        if found is None:
            data = source.read()
            self._copies.add(place, seen, 0, len(data), [data])
            found = data[offset : offset + length]
        return found

    def together(self, place: str, seen: Seen, parts: list[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of many parts."""
        source = self._same(place, seen).source
        if isinstance(source, Span):
            return list(source.file.together((source.offset + at, length) for at, length in parts))
        return [self.read(place, seen, *part) for part in parts]

    def local(self, place: str, seen: Seen, offset: int, length: int) -> int:
        """Return a descriptor of a local file with these bytes at their offset."""
        found = self._copies.find(place, seen, offset, length)
        return os.dup((found or self._copied(place, seen, offset, length)).descriptor)

    def _copied(self, place: str, seen: Seen, offset: int, length: int) -> Room:
        if places.store(self._outer) is not None:
            why = "the format is read from a local file"
            require_few(place, length, why)
            places.note(f"{size(length)} of {urls.spelled(place)} were fetched: {why}")
        data = (self.read(place, seen, offset + at, part) for at, part in pieces(length))
        return self._copies.add(place, seen, offset, length, data)

    def _same(self, place: str, seen: Seen) -> Member:
        if self._listed is None:
            self._members(self._file())
        members = self._listed[1] if self._listed is not None else {}
        member = members.get(self._name(place))
        if member is None or self._seen(member) != seen:
            raise ChangedError("the archive changed after it was listed", file=place)
        return member

    def _file(self) -> File:
        if places.kind(self._outer) == "special":
            raise NotFoundError("a device, socket or pipe is not opened", file=self._outer)
        return File.stamp(self._outer)

    def _name(self, place: str) -> str:
        return place[len(self.start) :].strip("/")

    def _seen(self, member: Member) -> Seen:
        source = member.source.base if isinstance(member.source, Deflated) else member.source
        file = source.of if isinstance(source, Unpacked) else source.file
        # Whole numbers have the same hash in every process.
        return Seen(member.size, file.mtime_ns, hash((*file[1:], source.offset, member.size)))

    def _members(self, file: File) -> dict[str, Member]:
        if self._listed is None or self._listed[0] != file:
            self._listed = (file, _of_zip(file) if self._kind == "zip" else _of_tar(file))
        return self._listed[1]


def _of_zip(file: File) -> dict[str, Member]:
    archive = zip.read(file)
    found: dict[str, Member] = {}
    for name, member in archive.members.items():
        if not name.endswith("/") and (path := plain(name)) is not None:
            found[path] = Member(member.size, archive.source(name))
    return found


def _of_tar(file: File) -> dict[str, Member]:
    from ckpttool.remote import tarballs

    found: dict[str, Member] = {}
    listed = tarballs.listing(file)
    for name, offset, length in listed.members:
        if (path := plain(name)) is None:
            continue
        if path in found:
            raise FormatError(f"two members are called {name[:200]!r}", file=file.path, offset=offset)
        if listed.unpacked is None:
            found[path] = Member(length, Span(file, offset, length))
        else:
            found[path] = Member(length, Unpacked(file, listed.unpacked, offset, length))
    return found


def plain(name: str) -> str | None:
    """Return a member's path from the archive's top; None for one that leads out of it."""
    path = posixpath.normpath(name)
    return None if path.startswith(("/", "../")) or path in (".", "..") or "\0" in path else path
