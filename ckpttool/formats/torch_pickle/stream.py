"""Bytes in which pickles, counts and raw data follow each other: what torch wrote before its zip files."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from ckpttool.errors import FormatError, TruncatedError
from ckpttool.formats.torch_pickle.tensors import BUILDERS
from ckpttool.source import File, Span
from ckpttool.wire import pickle_reader
from ckpttool.wire.asked import Asked, merged
from ckpttool.wire.pickle_machine import Persistent
from ckpttool.wire.pickle_reader import Builder, Read

SHORT, LONG = 512, 1 << 16
_GROWTH = 4
_PIECE = 4096
_ARGUMENT = 9  # bytes of the longest opcode with an argument of fixed size


class Held(File):
    """Bytes in memory that are read as a file's are: what an outer pickle holds in another encoding."""

    data = b""

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`."""
        return self.data[offset : offset + length]


class Stream:
    """Bytes `at` to `end` of a file; what is taken moves `at`.

    `asked` is what unpickling any of the pickles taken would import and call (see pickle_reader.Read).
    """

    def __init__(self, file: File, at: int, end: int) -> None:
        """Stand at the first byte."""
        self.asked: tuple[Asked, ...] = ()
        self.file = file
        self.at = at
        self.end = end
        self._read, self._read_at = b"", at

    def pickle(
        self,
        window: int,
        persistent: Persistent | None = None,
        builders: Mapping[str, Builder] = BUILDERS,
    ) -> Read:
        """Take the pickle that begins here; raise FormatError where it makes no sense.

        Where it ends is known only when it was read, so a window of bytes is read, and a larger one while the
        pickle is longer: `persistent` may be asked for the same ids again.
        """
        while True:
            length = min(window, self.end - self.at)
            try:
                found = pickle_reader.read(
                    self._ahead(length),
                    persistent=persistent,
                    builders=builders,
                    file=self.file.path,
                    base=self.at,
                    trailing=True,
                )
            except FormatError as error:
                if self.at + length == self.end or not _is_cut(error, self.at + length):
                    raise
                window *= _GROWTH
            else:
                self.at += found.end
                if found.asked:
                    self.asked = merged(self.asked, found.asked)
                return found

    def numbers(self, count: int) -> tuple[int, ...]:
        """Take `count` signed numbers of 64 bits, little-endian on every machine."""
        self._require(8 * count)
        found = struct.unpack(f"<{count}q", self._ahead(8 * count))
        self.at += 8 * count
        return found

    def span(self, length: int) -> Span:
        """Take `length` bytes, unread; raise TruncatedError when there are fewer."""
        self._require(length)
        taken = Span(self.file, self.at, length)
        self.at += length
        return taken

    def _require(self, length: int) -> None:
        if length > self.end - self.at:
            raise TruncatedError(
                "the data end before they should",
                file=self.file.path,
                offset=self.at,
                expected=f"{length:,} bytes",
                found=f"{self.end - self.at:,}",
            )

    def _ahead(self, length: int) -> bytes:
        """Return the next `length` bytes; a few more are read at once, for whatever follows."""
        start = self.at - self._read_at
        if not 0 <= start <= start + length <= len(self._read):
            self._read_at, start = self.at, 0
            self._read = self.file.read(self.at, min(max(length, _PIECE), self.end - self.at))
        return self._read[start : start + length]


def _is_cut(error: FormatError, stop: int) -> bool:
    # An argument that the window's end cuts may also look like a wrong one.
    return isinstance(error, TruncatedError) or (error.offset is not None and error.offset > stop - _ARGUMENT)
