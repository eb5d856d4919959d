"""Where the plain files of a tar archive lie; one that is compressed is unpacked first, as a whole.

The standard library's reader knows all the forms of long names; wire/tar.py, which reads what PyTorch wrote
before 2018, refuses them.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple, cast

from ckpttool import limits, places
from ckpttool.errors import FormatError
from ckpttool.remote.copies import Room, require_few
from ckpttool.shown import size
from ckpttool.source import File
from ckpttool.urls import spelled

_Opener = Callable[[IO[bytes]], IO[bytes]]
# The first bytes of RFC 1952, of bzip2's and of xz's own documentation.
_COMPRESSED: dict[bytes, _Opener] = {
    b"\x1f\x8b": lambda raw: cast(IO[bytes], gzip.GzipFile(fileobj=raw)),
    b"BZh": lambda raw: cast(IO[bytes], bz2.BZ2File(raw)),
    b"\xfd7zXZ\0": lambda raw: cast(IO[bytes], lzma.LZMAFile(raw)),  # noqa: SIM115  # closed by who opens it
}
_PIECE = 4 << 20
_BROKEN = (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError)


class Listing(NamedTuple):
    """The names, offsets and lengths of plain files: in the archive, or in what it was unpacked to."""

    members: tuple[tuple[str, int, int], ...]
    unpacked: Room | None


def listing(file: File) -> Listing:
    """List the archive; raise FormatError if it is damaged, LimitError if it unpacks to too much."""
    start = file.read(0, min(8, file.size))
    opener = next((each for mark, each in _COMPRESSED.items() if start.startswith(mark)), None)
    try:
        unpacked = None if opener is None else _unpacked(file, opener)
        if unpacked is None:
            return Listing(tuple(_members(cast(IO[bytes], _Whole(file)), file)), None)
        with open(os.dup(unpacked.descriptor), "rb") as stream:
            return Listing(tuple(_members(stream, file)), unpacked)
    except _BROKEN as error:
        raise FormatError("the archive is damaged", file=file.path, found=str(error)[:120] or None) from error


def _members(stream: IO[bytes], file: File) -> Iterator[tuple[str, int, int]]:
    most = limits.current().members
    with tarfile.open(fileobj=stream, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
        for number, member in enumerate(archive):
            if number >= most:
                raise limits.exceeded("members", "the archive has too many members", None, file=file.path)
            # Links are not followed, and nobody stores a checkpoint's file with holes.
            if member.isreg() and not member.issparse():
                yield member.name, member.offset_data, member.size


def _unpacked(file: File, opener: _Opener) -> Room:
    """Return a nameless file with what the archive holds."""
    why = "the archive is compressed as a whole"
    if places.store(file.path) is not None:
        require_few(file.path, file.size, why)
        places.note(f"{why}: all {size(file.size)} of {spelled(file.path)} were fetched and unpacked")
    made = Room()
    done, watch = 0, places.watch.get()
    raw = io.BufferedReader(_Whole(file), _PIECE)
    with opener(cast(IO[bytes], raw)) as stream:
        while piece := stream.read(_PIECE):
            made.put(done, piece)
            done += len(piece)
            require_few(file.path, done, f"{why}, and unpacks to very much")
            if watch is not None:
                watch(spelled(file.path), raw.tell(), file.size)
    return made


class _Whole(io.RawIOBase):
    """A file as a stream."""

    def __init__(self, file: File) -> None:
        super().__init__()
        self._file, self._at = file, 0

    def readable(self) -> bool:
        """Return that it is."""
        return True

    def seekable(self) -> bool:
        """Return that it is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move."""
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def tell(self) -> int:
        """Return where it is."""
        return self._at

    def read(self, length: int = -1) -> bytes:
        """Return up to `length` bytes; raise LimitError for more than a header of an archive has."""
        most = limits.current().text_bytes
        if not 0 <= length <= most:
            raise limits.exceeded(
                "text_bytes", "a header of the archive is too long", length, file=self._file.path
            )
        room = bytearray(length)
        return bytes(room[: self.readinto(room)])

    def readinto(self, room: Any) -> int:
        """Fill the room as far as the file goes."""
        length = max(0, min(len(room), self._file.size - self._at))
        if length:
            room[:length] = self._file.read(self._at, length)
        self._at += length
        return length
