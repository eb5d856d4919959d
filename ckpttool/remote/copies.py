"""Nameless local files for what cannot be read by parts: they are gone when the program is."""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable

from ckpttool import limits, places
from ckpttool.errors import TruncatedError
from ckpttool.places import Seen
from ckpttool.urls import spelled

_MOST = 16
_PIECE = 8 << 20

Range = tuple[str, Seen, int, int]


class Room:
    """A local file without a name, which goes when nobody has this."""

    def __init__(self) -> None:
        """Make it, where temporary files are made."""
        with tempfile.TemporaryFile() as file:
            self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)

    def put(self, offset: int, data: bytes) -> None:
        """Write all of the bytes at the offset."""
        left = memoryview(data)
        while left:
            done = os.pwrite(self.descriptor, left, offset)
            left, offset = left[done:], offset + done


class Copies:
    """The last few files that were fetched, each with the range of its original that it holds."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._kept: OrderedDict[Range, Room] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, place: str, seen: Seen, offset: int, length: int) -> Room | None:
        """Return a file that holds these bytes at their offset, None if there is none."""
        with self._lock:
            for (name, one, start, held), room in self._kept.items():
                if name == place and one == seen and start <= offset and offset + length <= start + held:
                    return room
        return None

    def read(self, place: str, seen: Seen, offset: int, length: int) -> bytes | None:
        """Return the bytes if they are here."""
        room = self.find(place, seen, offset, length)
        return None if room is None else os.pread(room.descriptor, length, offset)

    def add(self, place: str, seen: Seen, offset: int, length: int, data: Iterable[bytes]) -> Room:
        """Write what arrives into a new file, at its offset, and return it.

        Raise TruncatedError unless there are exactly `length` bytes.
        """
        room = Room()
        done, watch = 0, places.watch.get()
        for piece in data:
            if done + len(piece) <= length:
                room.put(offset + done, piece)
            done += len(piece)
            if done > length:
                break
            if watch is not None:
                watch(spelled(place), done, length)
        if done != length:
            found = "more" if done > length else f"{done:,}"
            raise TruncatedError(
                "not as many bytes came as were told", file=place, expected=f"{length:,}", found=found
            )
        self.keep(place, seen, offset, length, room)
        return room

    def keep(self, place: str, seen: Seen, offset: int, length: int, room: Room) -> None:
        """Keep a file that holds these bytes at their offset."""
        with self._lock:
            self._kept[place, seen, offset, length] = room
            if len(self._kept) > _MOST:
                self._kept.popitem(last=False)


def require_few(place: str, length: int, why: str) -> None:
    """Raise LimitError if so many bytes are not fetched without being asked for; `why` is a clause."""
    if length > limits.current().fetched_bytes:
        raise limits.exceeded(
            "fetched_bytes", f"{why}: all of it would have to be fetched", length, file=place
        )


def pieces(length: int) -> Iterable[tuple[int, int]]:
    """Give the parts (offset, length) in which so many bytes are fetched."""
    return ((at, min(_PIECE, length - at)) for at in range(0, length, _PIECE))
