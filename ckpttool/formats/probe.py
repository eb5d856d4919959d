"""The few facts that a format may look at to decide whether a path is its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import IO, NamedTuple, Protocol

from ckpttool import places
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, LimitError, NotFoundError
from ckpttool.source import File
from ckpttool.tree import Tree
from ckpttool.wire import zip  # noqa: A004 - the module is named by its format
from ckpttool.writing import hidden

HEAD = 1024
TAIL = 64


class Probe:
    """A path, what is there, its first and last bytes, and its neighbours' names."""

    def __init__(self, path: str) -> None:
        """Look at nothing yet."""
        self.path = path
        self.refused: CkpttoolError | None = None
        """what kept a file that is there from being read"""

    @cached_property
    def kind(self) -> places.Kind:
        """What is at the path; "special" is a socket, a device or a FIFO, which nobody opens."""
        return places.kind(self.path)

    @cached_property
    def size(self) -> int:
        """The file's size in bytes; 0 for anything else."""
        return places.getsize(self.path) if self.kind == "file" else 0

    @cached_property
    def head(self) -> bytes:
        """The first bytes of a file."""
        return self._bytes(0, HEAD)

    @property
    def members(self) -> Collection[str]:
        """The names in a zip archive; none for another file and for a damaged archive."""
        return () if isinstance(self._archive, CkpttoolError | None) else self._archive.members

    @property
    def damage(self) -> CkpttoolError | None:
        """What is wrong with a file that begins like a zip archive and cannot be listed."""
        return self._archive if isinstance(self._archive, CkpttoolError) else None

    @cached_property
    def _archive(self) -> zip.Archive | CkpttoolError | None:
        # Several formats are told by their members: they ask in a row, and the archive is listed once.
        if not self.head.startswith(b"PK\x03\x04"):
            return None
        try:
            return zip.read(File.stamp(self.path))
        except CkpttoolError as error:
            return error

    @cached_property
    def tail(self) -> bytes:
        """The last bytes of a file."""
        return self._bytes(max(0, self.size - TAIL), TAIL)

    @cached_property
    def folder(self) -> str:
        """The folder itself, or the one that the path is in."""
        return self.path if self.kind == "folder" else os.path.dirname(self.path) or "."

    @cached_property
    def names(self) -> frozenset[str]:
        """The names in `folder`, but not what a conversion that was cut short left there.

        A probe of such a name, which is how a file is read back before it has its own, sees all. A folder
        elsewhere that has too many is one that cannot tell: a file in it is found all the same.
        """
        try:
            found = places.listdir(self.folder)
        except (OSError, LimitError):
            return frozenset()
        return frozenset(found if hidden(self.name) else (name for name in found if not hidden(name)))

    @cached_property
    def name(self) -> str:
        """The last part of the path."""
        return os.path.basename(os.path.normpath(self.path))

    def start(self, length: int) -> bytes:
        """Return the first `length` bytes of a file; fewer where it has fewer, or cannot be read."""
        return self.head[:length] if length <= HEAD else self._bytes(0, length)

    def _bytes(self, offset: int, length: int) -> bytes:
        if self.kind != "file":
            return b""
        try:
            return places.content(self.path, offset, length)
        except OSError as error:
            self.refused = NotFoundError(f"cannot be opened: {error.strerror}", file=self.path)
            return b""


class Format(Protocol):
    """What every format module offers; its names are module-level.

    `FRAMEWORK` is the backend that runs what the format usually holds. A format that is led to a location by
    what a file says may have `redirected(probe, location) -> str | None`, a note where that is another place
    than the file names.
    """

    NAME: str
    TITLE: str
    WRITES: bool
    FRAMEWORK: str

    def claims(self, probe: Probe) -> str | None:
        """Return the location to read if the probe is ours (a prefix for its `.index`), else None."""
        ...

    def read(self, location: str) -> Checkpoint:
        """List everything at the location; raise FormatError when the bytes break the format's rules."""
        ...


class Piece(NamedTuple):
    """One file of a checkpoint to be written: what follows the target in its name, and who fills it.

    A buffer that was written must not change after that (see behind.new_file). For `indexes`, `meanwhile` and
    `extra` see writing.outputs.
    """

    suffix: str
    write: Callable[[IO[bytes]], None]
    indexes: bool = False
    meanwhile: str = ""
    extra: bool = False


class WritingFormat(Format, Protocol):
    """A format module that can also write (its `WRITES` is true)."""

    def pieces(self, tree: Tree) -> Sequence[Piece]:
        """Return the files that hold the tree, in the order of writing, an index last.

        Filling a piece keeps one leaf in memory at a time. Raise UnsupportedError, before anything is
        written, for what the format cannot hold. A format may take further options by keyword
        (ops.targets.TARGETS names them). A format that gives leaves other paths when they are read back also
        has `stored(tree, **options) -> Tree`, with those paths.
        """
        ...
