"""What all stores have in common: each thing is asked once, small reads are gathered, large ones are not."""

from __future__ import annotations

import functools
import hashlib
import os
from typing import Protocol
from urllib.parse import unquote

from ckpttool import limits, places, urls
from ckpttool.errors import DeadlineError, NotFoundError
from ckpttool.places import Found, Seen
from ckpttool.remote.blocks import Blocks
from ckpttool.remote.copies import Copies, Room, pieces, require_few
from ckpttool.remote.deadlines import Allowance
from ckpttool.shown import size

_AT_ONCE = 16
# In what is said where somebody may not look: the same server may let others be seen.
PERMITS_NOT = "permits no reading"


class Server(Protocol):
    """Whoever answers: asked without any memory of earlier answers."""

    def look(self, place: str) -> Found:
        """Return what is there now; raise NotFoundError if nobody can tell."""
        ...

    def names(self, place: str, most: int) -> list[str]:
        """Return the names in a folder; what is more than `most` may be left out."""
        ...

    def part(self, place: str, seen: Seen, offset: int, length: int) -> bytes:
        """Return exactly these bytes, with one request; raise ChangedError if the file is another one."""
        ...


class Remembering:
    """A store in front of a server (places.Store)."""

    def __init__(
        self, server: Server, copies: Copies | None = None, allowance: Allowance | None = None
    ) -> None:
        """Remember nothing yet; a server that keeps files itself gives its `copies`."""
        self.allowance = allowance or Allowance()
        self.blocks = Blocks(self._part)
        self.server = server
        self._copies = copies or Copies()

    def look(self, place: str) -> Found:
        """Return what is there, as it was when this visit asked first."""
        if _leads_out(place):
            return None
        known = places.visiting()
        if place not in known.found:
            parent, _, name = place.rpartition("/")
            beside = known.names.get(parent)
            absent = beside is not None and beside != [] and name not in beside
            known.found[place] = None if absent else self._looked(place, known.refused)
        return known.found[place]

    def _looked(self, place: str, refused: dict[str, NotFoundError]) -> Found:
        if place in refused:  # trying again, as libraries do, takes many seconds
            raise refused[place]
        try:
            return self.allowance.run(place, 0, functools.partial(self.server.look, place))
        except DeadlineError:
            raise
        except NotFoundError as error:
            refused[place] = error
            raise

    def names(self, place: str) -> list[str]:
        """Return the names in a folder, as they were when this visit asked first.

        Raise LimitError if there are too many.
        """
        if _leads_out(place):
            return []
        known, most = places.visiting(), limits.current().folder_files
        if place not in known.names:
            for beside, error in known.refused.items():
                if os.path.dirname(beside) == place and PERMITS_NOT not in error.message:
                    raise error  # who cannot be reached is not asked once more
            found = self.allowance.run(place, 0, functools.partial(self.server.names, place, most + 1))
            known.names[place] = [name for name in found if _is_name(name)] if len(found) <= most else None
        names = known.names[place]
        if names is None:
            raise limits.exceeded("folder_files", "the folder has too many names", None, file=place)
        return names

    def read(self, place: str, seen: Seen, offset: int, length: int) -> bytes:
        """Return exactly these bytes."""
        if not length:
            return b""
        here = self._copies.read(place, seen, offset, length)
        return self.blocks.read(place, seen, offset, length) if here is None else here

    def together(self, place: str, seen: Seen, parts: list[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of many parts; sixteen requests are on their way at a time."""
        if len(parts) < 2:
            return [self.read(place, seen, *part) for part in parts]
        jobs = ((part[1], functools.partial(self._one, place, seen, *part)) for part in parts)
        return list(self.allowance.run_all(place, jobs, _AT_ONCE))

    def _one(self, place: str, seen: Seen, offset: int, length: int) -> bytes:
        here = self._copies.read(place, seen, offset, length)
        return self.server.part(place, seen, offset, length) if here is None else here

    def _part(self, place: str, seen: Seen, offset: int, length: int) -> bytes:
        part = functools.partial(self.server.part, place, seen, offset, length)
        return self.allowance.run(place, length, part)

    def local(self, place: str, seen: Seen, offset: int, length: int) -> int:
        """Return a descriptor of a local file with these bytes at their offset."""
        found = self._copies.find(place, seen, offset, length)
        return os.dup((found or self._fetched(place, seen, offset, length)).descriptor)

    def _fetched(self, place: str, seen: Seen, offset: int, length: int) -> Room:
        require_few(place, length, "the format is read from a local file")
        places.note(
            f"{size(length)} of {urls.spelled(place)} were fetched into a temporary file: the format is read "
            "from a local one"
        )
        data = (self._part(place, seen, offset + at, part) for at, part in pieces(length))
        return self._copies.add(place, seen, offset, length, data)


def tag_of(told: str) -> int:
    """Return the tag of what a server tells about a version: a number, as an inode is one."""
    return int.from_bytes(hashlib.sha256(told.encode("utf-8", "surrogateescape")).digest()[:7], "big")


def _leads_out(place: str) -> bool:
    """Say whether a name in the place leads upwards, as a server could understand it."""
    steps = unquote(place).split("://", 1)[-1].split("/")[1:]  # behind the host or the bucket
    return os.pardir in steps or os.curdir in steps or "\0" in place


def _is_name(name: str) -> bool:
    return bool(name) and "/" not in name and "\0" not in name and name not in (os.curdir, os.pardir)
