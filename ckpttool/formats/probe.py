"""The definition of a format: the facts about a path for its detection, and its functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import IO, Any, ClassVar, Protocol, TypeVar, cast

from ckpttool.core import filesystem, plugins
from ckpttool.core.atomic_write import is_hidden_name
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import CkpttoolError, LimitError, NotFoundError
from ckpttool.core.source import File
from ckpttool.core.tree import Leaf, Path, Tree
from ckpttool.encodings import archives

HEAD = 1024
TAIL = 64


class Probe:
    """A path, its kind, its first and last bytes, and the names in its folder."""

    def __init__(self, path: str) -> None:
        """Create the probe without accessing the file system."""
        self.path = path
        self.refused: CkpttoolError | None = None
        """The error raised when an existing file could not be read."""

    @cached_property
    def kind(self) -> filesystem.Kind:
        """The kind of file at the path; "special" is a socket, a device or a FIFO, which is never opened."""
        return filesystem.path_kind(self.path)

    @cached_property
    def size(self) -> int:
        """The file's size in bytes; 0 for anything else."""
        return filesystem.getsize(self.path) if self.kind == "file" else 0

    @cached_property
    def head(self) -> bytes:
        """The first bytes of the file."""
        return self._bytes(0, HEAD)

    @property
    def members(self) -> Collection[str]:
        """The member names of a zip archive; empty for other files and damaged archives."""
        return () if isinstance(self._archive, CkpttoolError | None) else self._archive.members

    @property
    def damage(self) -> CkpttoolError | None:
        """The error for a file that begins like a zip archive but cannot be listed."""
        return self._archive if isinstance(self._archive, CkpttoolError) else None

    @cached_property
    def _archive(self) -> archives.ZipArchive | CkpttoolError | None:
        # Several formats are detected by their members; the archive is listed only once.
        if not self.head.startswith(b"PK\x03\x04"):
            return None
        try:
            return archives.read_zip(File.stamp(self.path))
        except CkpttoolError as error:
            return error

    @cached_property
    def tail(self) -> bytes:
        """The last bytes of the file."""
        return self._bytes(max(0, self.size - TAIL), TAIL)

    @cached_property
    def folder(self) -> str:
        """The folder itself, or the folder that contains the path."""
        return self.path if self.kind == "folder" else os.path.dirname(self.path) or "."

    @cached_property
    def names(self) -> frozenset[str]:
        """The names in `folder`, without the leftovers of an interrupted conversion.

        A probe of a leftover (a file is read back before it gets its final name) returns all names. If a
        remote folder has too many names, it cannot be used for detection, but its files can still be read.
        """
        try:
            names = filesystem.listdir(self.folder)
        except (OSError, LimitError):
            return frozenset()
        return frozenset(
            names if is_hidden_name(self.name) else (name for name in names if not is_hidden_name(name))
        )

    @cached_property
    def name(self) -> str:
        """The last part of the path."""
        return os.path.basename(os.path.normpath(self.path))

    def start(self, length: int) -> bytes:
        """Return up to `length` bytes of a file; fewer if it is shorter or cannot be read."""
        return self.head[:length] if length <= HEAD else self._bytes(0, length)

    def _bytes(self, offset: int, length: int) -> bytes:
        if self.kind != "file":
            return b""
        try:
            return filesystem.read_bytes(self.path, offset, length)
        except OSError as error:
            self.refused = NotFoundError(f"cannot open the file: {error.strerror}", file=self.path)
            return b""


class Format(Protocol):
    """The interface of every format module; its names are at module level.

    `FRAMEWORK` is the backend that usually runs the format's networks. A format that finds a location
    through the content of a file may define `redirected(probe, location) -> str | None`, a note that is
    used if the location differs from the one recorded in the file.
    """

    NAME: str
    TITLE: str
    WRITES: bool
    FRAMEWORK: str

    def claims(self, probe: Probe) -> str | None:
        """Return the location to read (a prefix for its `.index`) if this format owns the path, else None."""
        ...

    def read(self, location: str) -> Checkpoint:
        """List everything at the location; raise FormatError if the bytes violate the format."""
        ...


def format_framework(name: str) -> str:
    """Return the framework whose names and orientation a format's tensors use."""
    return cast(Format, plugins.find("formats", name).load()).FRAMEWORK


@dataclass(frozen=True, slots=True)
class FormatDefinition:
    """A second format in a module: the names of Format, which the first format has at module level."""

    NAME: str
    TITLE: str
    FRAMEWORK: str
    claims: Callable[[Probe], str | None]
    read: Callable[[str], Checkpoint]
    WRITES: ClassVar[bool] = False


class OutputFile(NamedTuple):
    """One file of a checkpoint to be written: its suffix to the target's name, and its writer.

    A written buffer must not change afterwards. atomic_write.Output describes `indexes`, `meanwhile`
    and `extra`.
    """

    suffix: str
    write: Callable[[IO[bytes]], None]
    indexes: bool = False
    meanwhile: str = ""
    extra: bool = False


class Shard(NamedTuple):
    """One file of a sharded checkpoint to be written, by any process; picklable.

    `suffix` and `meanwhile` are those of OutputFile. `write` gets a tree with the tensors at `paths` and
    fills the file; it returns what the index records about the file, as JSON values.
    """

    suffix: str
    paths: tuple[Path, ...]
    write: Callable[[Tree, IO[bytes]], Any]
    meanwhile: str = ""


class ShardPlan(NamedTuple):
    """The shards of a checkpoint, and its index.

    `finish` returns the remaining files, the index with `index_suffix` last, from what each shard's `write`
    returned. `leaves` returns the tensors in a written shard, by path, for the same (file, shard, recorded).
    """

    shards: tuple[Shard, ...]
    index_suffix: str
    finish: Callable[[Sequence[Any]], tuple[OutputFile, ...]]
    leaves: Callable[[File, Shard, Any], Mapping[Path, Leaf]]


_Entry = TypeVar("_Entry")


def split_by_size(sizes: Iterable[tuple[_Entry, int]], shard_bytes: int) -> list[list[_Entry]]:
    """Return the entries of each shard, in order, from their sizes; a larger one has a separate shard.

    A shard is closed before it exceeds the size, as huggingface_hub's `split_state_dict_into_shards_factory`
    does (src/huggingface_hub/serialization/_base.py).
    """
    shards: list[list[_Entry]] = []
    part: list[_Entry] = []
    filled = 0
    for entry, nbytes in sizes:
        if nbytes > shard_bytes:
            shards.append([entry])
            continue
        if filled + nbytes > shard_bytes:
            shards.append(part)
            part, filled = [], 0
        part.append(entry)
        filled += nbytes
    return [*shards, part] if part else shards


SHARD_BYTES = 5_000_000_000
"""size of a shard that huggingface_hub uses by default (_base.py, MAX_SHARD_SIZE)"""


def shard_pieces(tree: Tree, plan: ShardPlan) -> tuple[OutputFile, ...]:
    """Return the shards and the index as files that one process writes one after the other."""
    # What each shard records for the index, once it is filled.
    recorded: list[Any] = [()] * len(plan.shards)

    def fill(number: int, stream: IO[bytes]) -> None:
        recorded[number] = plan.shards[number].write(tree, stream)

    files = [
        OutputFile(shard.suffix, partial(fill, number), meanwhile=shard.meanwhile)
        for number, shard in enumerate(plan.shards)
    ]
    return (*files, *plan.finish(recorded))


class WritingFormat(Format, Protocol):
    """A format module that can also write (its `WRITES` is true)."""

    def pieces(self, tree: Tree) -> Sequence[OutputFile]:
        """Return the files that contain the tree, in writing order, with an index last.

        Only one leaf is in memory at a time. Raise UnsupportedError, before anything is written, if the
        format cannot store the tree. A format may accept more keyword options (listed in
        commands.options.TARGETS). A format that changes the paths of leaves also defines
        `stored(tree, **options) -> Tree`, which returns the tree with those paths. A format whose files are
        written one by one, by several processes, defines `plan_shards(tree, **options) -> ShardPlan`.
        """
        ...


@dataclass(frozen=True, slots=True)
class WritingFormatDefinition(FormatDefinition):
    """A second format of a module that can also write: the names of WritingFormat."""

    pieces: Callable[[Tree], Sequence[OutputFile]]
    stored: Callable[[Tree], Tree] | None = None
    members: Callable[[str], tuple[str, ...]] | None = None
    """The files that a location has, or would have if it were complete."""
    plan_shards: Callable[..., ShardPlan] | None = None
    WRITES: ClassVar[bool] = True
