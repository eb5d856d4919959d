"""Members of zip and tar archives as files: zip://MEMBER::ARCHIVE and tar://MEMBER::ARCHIVE."""

from __future__ import annotations

import functools
import importlib
import io
import os
import posixpath
from collections.abc import Iterable, Iterator
from typing import IO, cast

from ckpttool.core import filesystem, limits, urls
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import ChangedError, FormatError, NotFoundError
from ckpttool.core.filesystem import FileStat, LocalCopyCache, ScratchFile, StoreEntry, require_fetchable
from ckpttool.core.source import DeflatedSpan, File, Span
from ckpttool.core.text import format_size
from ckpttool.encodings.archives import FileStream, read_zip


class UnpackedSpan(NamedTuple):
    """Bytes of a scratch file that contains the unpacked archive `file`."""

    file: File
    copy: ScratchFile
    offset: int
    length: int


class ArchiveMember(NamedTuple):
    """A plain file of an archive: its unpacked size in bytes, and its source."""

    size: int
    source: Span | DeflatedSpan | UnpackedSpan


class ArchiveStore:
    """The files of one archive by their paths in it (filesystem.Store).

    Stored members are read in place, in parts; compressed ones are unpacked once, within the limits. Nothing
    is ever extracted under a name from an archive.
    """

    def __init__(self, outer: str, kind: str) -> None:
        """List the archive at `outer`, a "zip" or a "tar", at the first request."""
        self._outer, self._kind = outer, kind
        self.start = f"{outer}::{kind}://{urls.TOP}"
        self._listed: tuple[File, dict[str, ArchiveMember]] | None = None
        self._copies = LocalCopyCache()

    @classmethod
    def mount(cls, link: str, outer: str) -> str:
        """Mount the archive at `outer`; return the location of the member that a link (zip://PATH) names."""
        kind, _, inner = link.partition("://")
        start = f"{outer}::{kind}://{urls.TOP}"
        store = filesystem.find_store(start)
        if not (isinstance(store, ArchiveStore) and store.start == start):  # keeps its listing and copies
            filesystem.mount_store(start + "/", cls(outer, kind))
        inner = inner.removeprefix(urls.TOP + "/").strip("/")
        return f"{start}/{inner}" if inner not in ("", urls.TOP) else start

    def look(self, path: str) -> StoreEntry:
        """Return the entry; raise NotFoundError or FormatError if the archive cannot be listed."""
        member = self._members(self._file()).get(self._name(path))
        if member is not None:
            return _member_stat(member)
        return "folder" if any(True for _ in self._names_below(path)) else None

    def names(self, path: str) -> list[str]:
        """Return the names in a folder of the archive, limited only by the archive's member limit."""
        return sorted(set(self._names_below(path)))

    def _names_below(self, path: str) -> Iterator[str]:
        name = self._name(path)
        below = f"{name}/" if name else ""
        members = self._members(self._file())
        return (member[len(below) :].partition("/")[0] for member in members if member.startswith(below))

    def read(self, path: str, stat: FileStat, offset: int, length: int) -> bytes:
        """Return these bytes; raise ChangedError if the archive changed after it was listed."""
        source = self._member(path, stat).source
        if isinstance(source, Span):
            return source.file.read(source.offset + offset, length)
        if isinstance(source, UnpackedSpan):
            if filesystem.find_store(source.file.path) is None:
                source.file.require_unchanged()
            return filesystem.read_at(source.copy.descriptor, length, source.offset + offset)
        piece = self._copies.read(path, stat, offset, length)
        if piece is None:
            data = source.read()
            self._copies.add(path, stat, 0, len(data), [data])
            piece = data[offset : offset + length]
        return piece

    def together(self, path: str, stat: FileStat, parts: list[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of many parts."""
        source = self._member(path, stat).source
        if isinstance(source, Span):
            return list(source.file.together((source.offset + at, length) for at, length in parts))
        return [self.read(path, stat, *part) for part in parts]

    def local(self, path: str, stat: FileStat, offset: int, length: int) -> int:
        """Return a descriptor of a local file with these bytes at their offset."""
        fetched = f"fetched {format_size(length)} of {urls.display_url(path)}"
        elsewhere = filesystem.find_store(self._outer) is not None
        note = f"{fetched}: this format can be read only from a local file" if elsewhere else None
        read = functools.partial(self.read, path, stat)
        return self._copies.descriptor(path, stat, (offset, length), read, note)

    def _member(self, path: str, stat: FileStat) -> ArchiveMember:
        members = self._members(self._file()) if self._listed is None else self._listed[1]
        member = members.get(self._name(path))
        if member is None or _member_stat(member) != stat:
            raise ChangedError("the archive changed after it was listed", file=path)
        return member

    def _file(self) -> File:
        if filesystem.path_kind(self._outer) == "special":
            raise NotFoundError("a device, socket or pipe is not opened", file=self._outer)
        return File.stamp(self._outer)

    def _name(self, path: str) -> str:
        return path[len(self.start) :].strip("/")

    def _members(self, file: File) -> dict[str, ArchiveMember]:
        if self._listed is None or self._listed[0] != file:
            self._listed = (file, _list_zip_members(file) if self._kind == "zip" else _list_tar_members(file))
        return self._listed[1]


def _member_stat(member: ArchiveMember) -> FileStat:
    source = member.source.base if isinstance(member.source, DeflatedSpan) else member.source
    # Integers have the same hash in every process.
    tag = hash((*source.file[1:], source.offset, member.size))
    return FileStat(member.size, source.file.mtime_ns, tag)


def _list_zip_members(file: File) -> dict[str, ArchiveMember]:
    archive = read_zip(file)
    members: dict[str, ArchiveMember] = {}
    for name, member in archive.members.items():
        if not name.endswith("/") and (path := _member_path(name)) is not None:
            members[path] = ArchiveMember(member.size, archive.source(name))
    return members


def _member_path(name: str) -> str | None:
    """Return a member's path from the archive's top; None for a path that leads out of it."""
    path = posixpath.normpath(name)
    return None if path.startswith(("/", "../")) or path in (".", "..") or "\0" in path else path


# Magic bytes from RFC 1952 and from the documentation of bzip2 and xz.
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "lzma"}
_UNPACK_CHUNK = 4 << 20


def _list_tar_members(file: File) -> dict[str, ArchiveMember]:
    """List the archive; raise FormatError if it is damaged, LimitError if it unpacks to too much.

    Links and devices are left out, which `read_tar` rejects.
    """
    import lzma
    import tarfile
    import zlib

    start = file.read(0, min(8, file.size))
    library = next((kind for mark, kind in _COMPRESSED.items() if start.startswith(mark)), None)
    try:
        if library is None:
            members = list(_iter_tar_entries(cast(IO[bytes], FileStream(file)), file))
            return _unique_members(file, ((name, Span(file, at, size)) for name, at, size in members))
        copy = _unpack_tarball(file, library)
        with open(os.dup(copy.descriptor), "rb") as stream:
            members = list(_iter_tar_entries(stream, file))
        return _unique_members(
            file, ((name, UnpackedSpan(file, copy, at, size)) for name, at, size in members)
        )
    except (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError) as error:
        raise FormatError("the archive is damaged", file=file.path, found=str(error)[:120] or None) from error


def _unique_members(
    file: File, members: Iterable[tuple[str, Span | UnpackedSpan]]
) -> dict[str, ArchiveMember]:
    unique: dict[str, ArchiveMember] = {}
    for name, source in members:
        if (path := _member_path(name)) is None:
            continue
        if path in unique:
            raise FormatError(f"two members are named {name[:200]!r}", file=file.path, offset=source.offset)
        unique[path] = ArchiveMember(source.length, source)
    return unique


def _iter_tar_entries(stream: IO[bytes], file: File) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset and length of each plain file."""
    import tarfile

    most = limits.current().members
    with tarfile.open(fileobj=stream, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
        for number, member in enumerate(archive):
            if number >= most:
                raise limits.limit_error("members", "the archive has too many members", None, file=file.path)
            # Links are not followed, and checkpoints are never stored as sparse files.
            if member.isreg() and not member.issparse():
                yield member.name, member.offset_data, member.size


def _unpack_tarball(file: File, library: str) -> ScratchFile:
    """Return a scratch file with the unpacked archive; `library` is the decompression module."""
    why = "the archive is compressed as a whole"
    if filesystem.find_store(file.path) is not None:
        require_fetchable(file.path, file.size, why)
        filesystem.add_note(
            f"{why}: fetched and unpacked all {format_size(file.size)} of {urls.display_url(file.path)}"
        )
    copy = ScratchFile()
    done, watch = 0, filesystem.watch.get()
    raw = io.BufferedReader(FileStream(file), _UNPACK_CHUNK)
    with importlib.import_module(library).open(raw) as stream:
        while piece := stream.read(_UNPACK_CHUNK):
            copy.put(done, piece)
            done += len(piece)
            require_fetchable(file.path, done, f"{why} and unpacks to too much data")
            if watch is not None:
                watch(urls.display_url(file.path), raw.tell(), file.size)
    return copy
