"""File system calls for local paths and remote stores.

Local paths go to `os` unchanged. URLs and archive members that a person named go to a store of
ckpttool.core.remote, as does everything beside and under them, and nothing else: a name from the
content of a file is always a local path, whatever it looks like.
"""

from __future__ import annotations

import importlib
import os
import stat
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, Literal, Protocol

from ckpttool.core import limits, urls
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import CkpttoolError, DeadlineError, NotFoundError, TruncatedError

# For behaviour that differs; missing calls are found by the attributes of `os`.
WINDOWS: bool = sys.platform == "win32"

Kind = Literal["file", "folder", "special", "missing"]
Progress = Callable[[str, int, int], None]
RangeReader = Callable[[int, int], bytes]


class FileStat(NamedTuple):
    """Size and identity of a file in a store; its `tag` is made of an ETag and changes with the bytes."""

    size: int
    mtime_ns: int
    tag: int


StoreEntry = FileStat | Literal["folder"] | None


class Store(Protocol):
    """Remote locations: the calls that readers need. `place` begins with the mounted location."""

    def look(self, location: str) -> StoreEntry:
        """Return what is there; raise NotFoundError if it is unknown (no permission, no connection)."""
        ...

    def names(self, location: str) -> list[str]:
        """Return the names in a folder, unordered; none if the store cannot list it.

        Raise LimitError for a folder with too many entries.
        """
        ...

    def read(self, location: str, file_stat: FileStat, offset: int, length: int) -> bytes:
        """Return exactly these bytes; raise ChangedError if the file changed after it was listed."""
        ...

    def together(self, location: str, file_stat: FileStat, parts: list[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of many small parts (offset, length), requested in parallel."""
        ...

    def local(self, location: str, file_stat: FileStat, offset: int, length: int) -> int:
        """Return a descriptor of a local file with these bytes at their offset; the caller closes it."""
        ...


class WritableStore(Store, Protocol):
    """A store to which objects are written, each whole."""

    def upload(self, location: str, nbytes: int) -> AbstractContextManager[Any]:
        """Yield a stream that fills an object, which is visible when the block ends without an error.

        `nbytes` is about its size. The stream is a remote_uploads.UploadStream.
        """
        ...

    def remove(self, location: str) -> None:
        """Remove an object, which may be missing."""
        ...


class ReadSession(NamedTuple):
    """One session on a checkpoint: cached answers and notes on how bytes were fetched.

    `refused` contains the reason why a location could not be checked. `names` has None for a folder
    with too many entries, `versions` the version of a moving name (a branch) at its first use.
    """

    entries: dict[str, StoreEntry]
    refused: dict[str, NotFoundError]
    names: dict[str, list[str] | None]
    versions: dict[str, str]
    notes: list[str]


# Mounted locations: prefix and store. The longest matching prefix wins.
_MOUNTED: dict[str, Store] = {}
_VISIT: ContextVar[ReadSession | None] = ContextVar("ckpttool_visit", default=None)
# Progress callback of large fetches: (name, bytes fetched, bytes in all).
watch: ContextVar[Progress | None] = ContextVar("ckpttool_fetching", default=None)


def resolve_path(path: str) -> str:
    """Resolve a user's path: a local path unchanged, a URL to its mounted location.

    Raise UsageError for a URL without a location, MissingExtraError if its store needs a library.
    """
    if "://" not in path or not urls.is_elsewhere(path):
        return path
    if find_store(path) is not None and not urls.has_query(path):
        return path
    location: str = importlib.import_module("ckpttool.core.remote").mount(path)
    return location


def mount_store(start: str, store: Store) -> None:
    """Use a store for every location with this prefix."""
    _MOUNTED[start] = store


def find_store(path: str) -> Store | None:
    """Return the store of a remote location, None for a local path."""
    if "://" not in path:
        return None
    starts = [start for start in _MOUNTED if path.startswith(start) or path + "/" == start]
    return _MOUNTED[max(starts, key=len)] if starts else None


def path_kind(path: str) -> Kind:
    """Return the kind of entry at the path; "special" is a socket, device or FIFO, which is not opened."""
    if (elsewhere := find_store(path)) is not None:
        entry = _lookup_entry(elsewhere, path)
        return "missing" if entry is None else "folder" if entry == "folder" else "file"
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return "missing"
    if stat.S_ISREG(mode):
        return "file"
    return "folder" if stat.S_ISDIR(mode) else "special"


def isfile(path: str) -> bool:
    """Return whether the path is a file, like os.path.isfile."""
    return os.path.isfile(path) if find_store(path) is None else path_kind(path) == "file"


def isdir(path: str) -> bool:
    """Return whether the path is a folder, like os.path.isdir."""
    return os.path.isdir(path) if find_store(path) is None else path_kind(path) == "folder"


def lexists(path: str) -> bool:
    """Return whether the path exists, like os.path.lexists."""
    return os.path.lexists(path) if find_store(path) is None else path_kind(path) != "missing"


def islink(path: str) -> bool:
    """Return whether the path is a link, like os.path.islink; remote stores expose no links."""
    return find_store(path) is None and os.path.islink(path)


def realpath(path: str) -> str:
    """Return the target of links, like os.path.realpath; for a remote location, its name."""
    return os.path.realpath(path) if find_store(path) is None else path


def abspath(path: str) -> str:
    """Return the absolute path, like os.path.abspath; for a remote location, its name."""
    return os.path.abspath(path) if find_store(path) is None else path


def getsize(path: str) -> int:
    """Return a file's size in bytes; raise OSError, or NotFoundError for a missing remote file."""
    elsewhere = find_store(path)
    return os.path.getsize(path) if elsewhere is None else require_file(elsewhere, path).size


def stat_file(path: str) -> FileStat:
    """Return a file's size, time and identity; raise like `getsize`."""
    if (elsewhere := find_store(path)) is not None:
        return require_file(elsewhere, path)
    status = os.stat(path)
    return FileStat(status.st_size, status.st_mtime_ns, status.st_ino)


def samefile(one: str, other: str) -> bool:
    """Return whether two paths are one file, like os.path.samefile; remote files have one name each."""
    if find_store(one) is None and find_store(other) is None:
        return os.path.samefile(one, other)
    return one.rstrip("/") == other.rstrip("/")


def listdir(path: str) -> list[str]:
    """Return the names in a folder, like os.listdir; remotely raise LimitError for too many."""
    elsewhere = find_store(path)
    return os.listdir(path) if elsewhere is None else elsewhere.names(path)


def read_bytes(path: str, offset: int = 0, length: int | None = None) -> bytes:
    """Return a file's bytes from an offset, as many as there are; raise like `getsize`."""
    elsewhere = find_store(path)
    if elsewhere is None:
        with open(path, "rb") as stream:
            stream.seek(offset)
            return stream.read(-1 if length is None else length)
    file = require_file(elsewhere, path)
    room = max(0, file.size - offset)
    return elsewhere.read(path, file, offset, room if length is None else min(length, room))


def walk(top: str) -> Iterator[tuple[str, list[str]]]:
    """Yield every folder under `top`, itself first, with the names of its files."""
    if find_store(top) is None:
        for folder, _, files in os.walk(top, onerror=_raise_walk_error):
            yield folder, files
        return
    todo = [(top, 0)]
    while todo:
        folder, depth = todo.pop(0)
        kinds = {name: path_kind(os.path.join(folder, name)) for name in sorted(listdir(folder))}
        yield folder, [name for name, kind in kinds.items() if kind == "file"]
        if depth < limits.current().folder_depth:
            inner = [name for name, kind in kinds.items() if kind == "folder"]
            todo += [(os.path.join(folder, name), depth + 1) for name in inner]


def _raise_walk_error(error: OSError) -> None:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return
    raise NotFoundError(
        f"cannot be opened: {error.strerror}", file=os.fsdecode(error.filename or "")
    ) from error


def require_file(elsewhere: Store, location: str) -> FileStat:
    """Return the store's entry for a file; raise NotFoundError if it is not a file."""
    entry = elsewhere.look(location)
    if entry is None:
        raise NotFoundError("no such file", file=location)
    if entry == "folder":
        raise NotFoundError("cannot be opened: it is a folder", file=location)
    return entry


def _lookup_entry(elsewhere: Store, path_: str) -> StoreEntry:
    try:
        return elsewhere.look(path_)
    except DeadlineError:
        raise  # it is unknown whether anything exists: no result may depend on it
    except NotFoundError:
        return None  # a request for exactly this path gets the reason (`explained`)


def access_error(path: str) -> CkpttoolError | None:
    """Return the error that prevents checking a remote location; None if the store responded."""
    elsewhere = find_store(path)
    try:
        if elsewhere is not None:
            elsewhere.look(path)
    except NotFoundError as error:
        return error
    return None


@contextmanager
def read_session() -> Iterator[ReadSession]:
    """Cache answers of stores and gather notes while the block runs.

    A nested session shares the cache and the notes of the outer one, and adds its own notes.
    """
    outer = current_session()
    token = _VISIT.set(ReadSession(outer.entries, outer.refused, outer.names, outer.versions, [*outer.notes]))
    try:
        yield current_session()
    finally:
        _VISIT.reset(token)


def current_session() -> ReadSession:
    """Return the current session, or a new temporary one."""
    return _VISIT.get() or ReadSession({}, {}, {}, {}, [])


def add_note(sentence: str) -> None:
    """Add a note to the current session, once."""
    notes = current_session().notes
    if sentence not in notes:
        notes.append(sentence)


# Without this flag Windows translates line ends and stops at Ctrl-Z.
BINARY: int = getattr(os, "O_BINARY", 0)
# One for all descriptors, because duplicates share a position.
_POSITION = Lock()
# msvcrt.locking takes a 32-bit position; the byte there is beyond the content, which stays readable.
_LOCKED_BYTE = 0x7FFF_FFF0
# Virus scanners and indexers open new files for fractions of a second.
_BUSY_S = 2.0


def read_at(descriptor: int, length: int, offset: int) -> bytes:
    """Return up to `length` bytes of an open file from `offset`, like os.pread."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, length, offset)
    with _POSITION:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, length)


def read_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer from an open file at `offset`; return the number of bytes, like os.preadv."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], offset)
    data = read_at(descriptor, len(buffer), offset)
    buffer[: len(data)] = data
    return len(data)


def write_at(descriptor: int, data: memoryview, offset: int) -> int:
    """Write bytes to an open file at `offset`; return their number, like os.pwrite."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, offset)
    with _POSITION:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, data)


def lock_file(descriptor: int) -> None:
    """Lock an open file or folder exclusively until it is closed, without waiting.

    Raise BlockingIOError if another process holds the lock, OSError if the file system has no locks.
    """
    try:
        import fcntl
    except ImportError:
        _lock_byte(descriptor)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _lock_byte(descriptor: int) -> None:
    msvcrt = importlib.import_module("msvcrt")
    with _POSITION:
        before = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(*error.args) from None
        finally:
            os.lseek(descriptor, before, os.SEEK_SET)


def fsync_path(path: str) -> None:
    """Flush a file or folder to the disk; Windows flushes files only, if they are open for writing."""
    folders = hasattr(os, "O_DIRECTORY")
    if not folders and os.path.isdir(path):
        return
    descriptor = os.open(path, (os.O_RDONLY if folders else os.O_RDWR) | BINARY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: str, target: str, *, replace: bool) -> None:
    """Rename like os.replace or os.rename; on Windows wait a moment for programs that have it open."""
    end = time.monotonic() + _BUSY_S
    while True:
        try:
            return os.replace(source, target) if replace else os.rename(source, target)
        except PermissionError:
            if not WINDOWS or time.monotonic() > end:
                raise
            time.sleep(0.02)


def free_bytes(folder: str) -> int | None:
    """Return the free bytes of a folder's file system, or None if it does not report them."""
    import shutil

    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free if usage.total else None


def folder_state(folder: str) -> Hashable:
    """Return a key that stays the same while a folder does not change, a new one just after a change."""
    status = os.stat(folder)
    settled = time.time_ns() - status.st_mtime_ns > 2_000_000_000  # the resolution of FAT, the coarsest
    return (status.st_dev, status.st_ino, status.st_mtime_ns) if settled else object()


def is_just_changed(file_stat: os.stat_result, tick_ns: int) -> bool:
    """Return whether another change at this moment would give the file the same times.

    Linux takes the time of a change from a clock with a hundred to a thousand ticks per second
    (clock_gettime(2), CLOCK_REALTIME_COARSE): two changes in one tick have the same time. On Windows
    the ctime is the time of creation, and the clock's ticks may be 16 ms apart.
    """
    if not hasattr(time, "clock_gettime_ns"):
        return 0 <= time.time_ns() - file_stat.st_mtime_ns < tick_ns
    # The coarse clock's number is missing from the module.
    clock = 5 if sys.platform == "linux" else time.CLOCK_REALTIME
    return 0 <= file_stat.st_ctime_ns - time.clock_gettime_ns(clock) < tick_ns


def is_within(path: str, folder: str) -> bool:
    """Return whether an absolute local path is the folder or below it."""
    try:
        return os.path.commonpath((path, folder)) == folder
    except ValueError:  # on another drive
        return False


_MAX_COPIES = 16
_FETCH_PIECE = 8 << 20


class ScratchFile:
    """A local file without a name, deleted with its last reference."""

    def __init__(self) -> None:
        """Create the file in the folder for temporary files."""
        import tempfile

        with tempfile.TemporaryFile() as file:
            self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)

    def put(self, offset: int, data: bytes) -> None:
        """Write all bytes at the offset."""
        left = memoryview(data)
        while left:
            done = write_at(self.descriptor, left, offset)
            left, offset = left[done:], offset + done


class LocalCopyCache:
    """The most recently fetched files, each with the range of its original that it contains."""

    def __init__(self) -> None:
        """Start with no copies."""
        self._kept: OrderedDict[tuple[str, FileStat, int, int], ScratchFile] = OrderedDict()
        self._lock = Lock()

    def find(self, location: str, identity: FileStat, offset: int, length: int) -> ScratchFile | None:
        """Return a file that contains these bytes at their offset, None if there is none."""
        with self._lock:
            for (name, one, start, length_), copy in self._kept.items():
                if (
                    name == location
                    and one == identity
                    and start <= offset
                    and offset + length <= start + length_
                ):
                    return copy
        return None

    def read(self, location: str, identity: FileStat, offset: int, length: int) -> bytes | None:
        """Return the bytes if a copy contains them."""
        copy = self.find(location, identity, offset, length)
        return None if copy is None else read_at(copy.descriptor, length, offset)

    def add(
        self, location: str, identity: FileStat, offset: int, length: int, data: Iterable[bytes]
    ) -> ScratchFile:
        """Write the data to a new file, at its offset, and return the file.

        Raise TruncatedError unless there are exactly `length` bytes.

        Args:
            location: the path of the original.
            identity: its size and time when it was listed.
            offset: the position of the data in the original and in the copy, in bytes.
            length: their number.
            data: their pieces in order.
        """
        copy = ScratchFile()
        done, report = 0, watch.get()
        for piece in data:
            if done + len(piece) <= length:
                copy.put(offset + done, piece)
            done += len(piece)
            if done > length:
                break
            if report is not None:
                report(urls.display_url(location), done, length)
        if done != length:
            received = "more" if done > length else f"{done:,}"
            raise TruncatedError(
                "the number of received bytes differs from the expected number",
                file=location,
                expected=f"{length:,}",
                found=received,
            )
        self.keep(location, identity, offset, length, copy)
        return copy

    def descriptor(
        self, path: str, identity: FileStat, part: tuple[int, int], read: RangeReader, note: str | None
    ) -> int:
        """Return a descriptor of a copy of the part; the caller closes it.

        Args:
            path: the path of the original.
            identity: its size and time when it was listed.
            part: offset and length in bytes.
            read: returns pieces of a missing copy for `read(offset, length)`.
            note: what is reported when a remote original is read.
        """
        copy = self.find(path, identity, *part)
        if copy is None:
            offset, length = part
            if note is not None:
                require_fetchable(path, length, "this format can be read only from a local file")
                add_note(note)
            pieces = ((at, min(_FETCH_PIECE, length - at)) for at in range(0, length, _FETCH_PIECE))
            copy = self.add(path, identity, offset, length, (read(offset + at, size) for at, size in pieces))
        return os.dup(copy.descriptor)

    def keep(self, location: str, identity: FileStat, offset: int, length: int, copy: ScratchFile) -> None:
        """Keep a file that contains bytes of an original at their offset.

        Args:
            location: the path of the original.
            identity: its size and time when it was listed.
            offset: the position of the bytes.
            length: their number.
            copy: the file.
        """
        with self._lock:
            self._kept[location, identity, offset, length] = copy
            if len(self._kept) > _MAX_COPIES:
                self._kept.popitem(last=False)


def require_fetchable(location: str, length: int, why: str) -> None:
    """Raise LimitError if a fetch exceeds the limit for unrequested downloads; `why` is a clause."""
    if length > limits.current().fetched_bytes:
        raise limits.limit_error(
            "fetched_bytes", f"{why}, so all of it would have to be fetched", length, file=location
        )


def list_names(folder: str) -> list[str]:
    """Return the names in a folder; none if it cannot be listed."""
    try:
        return listdir(folder)
    except (OSError, CkpttoolError):
        return []
