"""Atomic writes: temporary siblings, sets of files, publishing, background writer."""

from __future__ import annotations

import contextlib
import contextvars
import errno
import os
import re
import shlex
import shutil
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from io import FileIO
from typing import IO, Protocol, Self, cast

from ckpttool.core import filesystem, urls
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.dtypes import np
from ckpttool.core.errors import CkpttoolError, TargetExistsError, UsageError
from ckpttool.core.source import File, keep_open

Job = Callable[[], object]

# Bytes queued in a worker before its caller waits: a few tensors, however small.
BACKLOG = 16 << 20
# For larger pieces the kernel needs larger free blocks of memory, which a virtual machine may have returned
# to its host: writes of 4 MiB took up to ten times as long (docs/decisions/0019-conversion-pipeline.md).
_PIECE = 256 << 10
_SMALL = 64 << 10
# Just below glibc's DEFAULT_MMAP_THRESHOLD_MAX.
_KEPT = 31 << 20
# Bytes left to the kernel before a flush to the disk is requested.
_UNSYNCED = 256 << 20


# The workers of this context, each with the flag that its caller left the block by an error.
_ABANDONED: contextvars.ContextVar[tuple[threading.Event, ...]] = contextvars.ContextVar(
    "ckpttool_abandoned", default=()
)


def is_abandoned() -> bool:
    """Return whether the caller of the current worker thread has failed, so the result is not needed."""
    return any(mark.is_set() for mark in _ABANDONED.get())


class WorkerThread:
    """A worker thread that runs jobs in order; it starts with the first job.

    The first error stops the worker: later jobs are dropped, and the next call raises that error. The slow
    operations here (reading, writing, hashing, copying arrays) release Python's GIL, so a worker thread uses
    another core. No thread outlives the `with` block that created it: it is joined after its current job,
    also on an error or Ctrl-C.
    """

    def __init__(self, backlog: int = BACKLOG) -> None:
        """Limit the queue: the caller waits while more than `backlog` bytes are queued."""
        self._backlog = backlog
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Job, int]] = deque()
        self._nbytes = 0
        self._error: BaseException | None = None
        self._ended = False
        self._abandoned = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Return the worker thread."""
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Join the thread once all jobs are done or, after an error, once its current job is done."""
        with self._changed:
            if error is not None:
                self._abandoned.set()
                self._drop()
            self._ended = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if error is None:
            self._raise()

    @property
    def idle(self) -> bool:
        """Return whether no job is running or waiting."""
        return not self._jobs

    def do(self, job: Job, nbytes: int = 0) -> None:
        """Queue a job, which keeps `nbytes` alive until it is done; raise the error of an earlier job."""
        with self._changed:
            self._changed.wait_for(lambda: self._nbytes <= self._backlog or not self._jobs)
            self._raise()
            self._jobs.append((job, nbytes))
            self._nbytes += nbytes
            if self._thread is None:
                # The caller's limits also apply to reads in this thread.
                work = partial(contextvars.copy_context().run, self._work)
                self._thread = threading.Thread(target=work, name="ckpttool-lane")
                self._thread.start()
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait for all jobs; raise the error of a failed job."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs)
            self._raise()

    def drop(self) -> None:
        """Drop the waiting jobs."""
        with self._changed:
            self._drop()
            self._changed.notify_all()

    def _work(self) -> None:
        _ABANDONED.set((*_ABANDONED.get(), self._abandoned))
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._ended)
                if not self._jobs:
                    return
                job, nbytes = self._jobs[0]
            try:
                job()
            except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
                self._error = error
            del job
            with self._changed:
                if self._error is not None:
                    self._drop()
                if self._jobs:
                    self._jobs.popleft()
                    self._nbytes -= nbytes
                self._changed.notify_all()

    def _drop(self) -> None:
        self._jobs.clear()
        self._nbytes = 0

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


@contextlib.contextmanager
def create_file(path: str, disk: WorkerThread | None = None) -> Iterator[IO[bytes]]:
    """Open a new file for background writing; all data is written when the block ends.

    Written buffers must not change before that. With a `disk` worker thread, data is flushed to the
    disk continuously and is on the disk when that worker has finished its jobs. Raise OSError where
    writing fails, which may be later than at the call.
    """
    with FileIO(path, "x", opener=_open_exclusive) as file, WorkerThread() as lane:
        stream = _BackgroundFile(file, lane, disk)
        # The file interface that writers use: that of a pipe, and the name for writers that open the file
        # themselves.
        yield cast(IO[bytes], stream)
        stream.flush()
        if disk is not None:
            disk.do(partial(filesystem.fsync_path, path))


def _open_exclusive(path: str, flags: int) -> int:
    # A file or link that another program created meanwhile must not be filled.
    return os.open(path, flags | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | filesystem.BINARY, 0o666)


def keep_freed_memory() -> None:
    """Make the C library reuse the memory of freed tensors.

    Source: glibc's malloc/malloc.c, free: a freed block that was mapped raises the threshold for
    mapping blocks, up to 32 MiB, and twice as much may stay free. Otherwise each tensor's pages are
    requested anew, which takes longer than filling them. No effect on other platforms.
    """
    np.empty(_KEPT, np.uint8)


class _BackgroundFile:
    """A file whose large buffers a worker thread writes and whose small ones are gathered first."""

    def __init__(self, file: FileIO, lane: WorkerThread, disk: WorkerThread | None) -> None:
        self.name = str(file.name)
        self._file, self._lane, self._disk = file, lane, disk
        self._small = bytearray()
        self._unsynced = 0

    def readable(self) -> bool:
        """Return False: the file is write-only."""
        return False

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Queue the bytes and return their number; raise OSError if earlier bytes could not be written."""
        nbytes = memoryview(data).nbytes
        if nbytes < _SMALL:
            self._small += data
        else:
            self._hand_on()
            self._lane.do(partial(self._put, memoryview(data).cast("B")), nbytes)
        if len(self._small) >= _SMALL:
            self._hand_on()
        return nbytes

    def flush(self) -> None:
        """Wait until all data has been written to the file."""
        self._lane.wait()
        self._put(memoryview(self._small))
        self._small = bytearray()

    def _hand_on(self) -> None:
        if self._small:
            self._lane.do(partial(self._put, memoryview(self._small)), len(self._small))
            self._small = bytearray()

    def _put(self, data: memoryview) -> None:
        for at in range(0, len(data), _PIECE):
            piece = data[at : at + _PIECE]
            while piece:
                piece = piece[self._file.write(piece) :]
        self._unsynced += len(data)
        if self._disk is not None and self._unsynced >= _UNSYNCED and self._disk.idle:
            self._disk.do(partial(filesystem.fsync_path, self.name))
            self._unsynced = 0


class Progress(Protocol):
    """Progress callback, called from the worker thread; `done` and `total` count the same unit.

    Rollouts also report how many steps the environments have taken.
    """

    def __call__(self, done: int, total: int, steps: int | None = None) -> None:
        """Receive a progress report."""
        ...


def ignore_progress(done: int, total: int, steps: int | None = None) -> None:
    """Ignore progress."""


def report_part(progress: Progress, number: int, parts: int) -> Progress:
    """Return a callback for part `number` of equal parts, e.g. a pass over the same bytes."""

    def moving(done: int, total: int, steps: int | None = None) -> None:  # noqa: ARG001
        progress(number * total + done, parts * total)

    return moving


class Output(NamedTuple):
    """One file to write, named `target` + `suffix` and filled by `write`.

    Large buffers are written in the background: `write` must not change them after it has written
    them. Files of one target are written under one temporary stem with their own suffixes. `check`
    is called with that stem when this file and those before it are filled, so it can open them under
    their final suffixes; it raises if they are wrong. A suffix that begins with a slash is a file in
    the folder `target`, which is renamed as a whole.

    `nbytes` is the minimum size of the file. `replaces` marks a file that may already exist (a state
    file that is updated), `follows` a file about the others that identifies them by digest (a
    receipt), so it may wait under its temporary name until they are in place. `indexes` marks the
    file that lists the files of its set. Where the names of a set's parts are in use by the previous
    set, `meanwhile` is the suffix for the interim name of a part; an output that is `extra` is then
    separate (an index that lists the parts by these names). `ready` is a complete and checked file on the
    same file system: it gets the temporary name as well, and `write` is not called.
    """

    target: str
    write: Callable[[IO[bytes]], None]
    check: Callable[[str], None] | None = None
    suffix: str = ""
    replaces: bool = False
    nbytes: int = 0
    follows: bool = False
    indexes: bool = False
    meanwhile: str = ""
    extra: bool = False
    ready: str = ""

    @property
    def file(self) -> str:
        """Final name of the file."""
        return self.target + self.suffix

    @property
    def inside(self) -> bool:
        """Return whether the target is a folder that contains the file."""
        return self.suffix.startswith(("/", os.sep))


TEMPORARY = ".ckpttool-tmp-"
KEPT = ".ckpttool-old-"
# File names are limited to 255 bytes, and temporary names add a prefix and a suffix.
_LONGEST = 180
# Maximum number of temporary files checked per name: a few crashes leave a few.
_CANDIDATES = 64
# Renaming takes milliseconds, on a busy disk up to a second.
_LOCKED_S = 60
# Maximum length of a chain of links, as in the kernel.
_LINKS = 40
_SYSTEM = ("/dev/", "/proc/", "/sys/")
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108  # an ordinary file system, which may be written to
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def is_hidden_name(name: str) -> bool:
    """Return whether a name is one that only a running or interrupted conversion creates."""
    return TEMPORARY in name or KEPT in name


def hidden_path(file: str, mark: str, end: str) -> str:
    """Return a hidden name in the file's folder that identifies the file it belongs to."""
    folder, name = os.path.split(filesystem.abspath(file))
    # Windows counts characters, and its encoding cannot represent half of one.
    short = name[:_LONGEST] if filesystem.WINDOWS else os.fsdecode(os.fsencode(name)[:_LONGEST])
    return os.path.join(folder, f".{short}{mark}{end}")


def temporary_path(target: str) -> str:
    """Return a unique temporary name for a future target."""
    return hidden_path(target, TEMPORARY, os.urandom(6).hex())


_hidden_names = lru_cache(16)(lambda folder, _state: sorted(filter(is_hidden_name, os.listdir(folder))))


def find_pending_files(file: str) -> list[str]:
    """Return temporary files that may be waiting for this name, possibly of an interrupted program.

    Any program can create a file with such a name: use only files that identify themselves by
    content.
    """
    folder, begin = os.path.split(hidden_path(file, TEMPORARY, ""))
    try:
        hidden = _hidden_names(folder, filesystem.folder_state(folder))
        names = [name for name in hidden if name.startswith(begin)]
    except OSError:
        return []
    return [path for name in names[:_CANDIDATES] if os.path.isfile(path := os.path.join(folder, name))]


@dataclass(slots=True)
class PendingFile:
    """An output and the stem of its temporary name; a filled file is identified by its inode.

    `waits` means that its main file already has its name, so it must not be removed.
    """

    output: Output
    stem: str
    waits: bool = False
    _inode: tuple[int, int] = field(default=(0, 0), init=False)
    _created: bool = field(default=False, init=False)

    @property
    def temporary(self) -> str:
        """Temporary name under which the file is filled."""
        return self.stem + self.output.suffix

    @property
    def whole(self) -> tuple[str, str]:
        """Source and target of the rename: the file, or the folder that contains it."""
        return (self.stem, self.output.target) if self.output.inside else (self.temporary, self.output.file)

    @property
    def folder(self) -> str:
        """Folder of the final name."""
        return os.path.dirname(os.path.abspath(self.whole[1]))

    def fill(self, disk: WorkerThread | None) -> None:
        """Write and check the file; the `disk` worker thread flushes it to the disk."""
        if self.output.inside:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.stem)  # not its parents: if they were removed, that was intentional
                self._created = True
            os.makedirs(os.path.dirname(self.temporary), exist_ok=True)
        if self.output.ready:
            self._created = True
            _add_name(self.output.ready, self.temporary)
            return
        with keep_open():  # the sources, and what `check` reads back
            with create_file(self.temporary, disk) as stream:
                self._created = True
                self.output.write(stream)
            if self.output.check is not None:
                self.output.check(self.stem)

    def name(self, *, force: bool) -> None:
        """Rename the file or its folder; raise TargetExistsError if the name exists, unless `force`."""
        self.known()
        temporary, target = self.whole
        if self.output.inside:
            # Never replaced, because a folder may contain other files; `rename` would replace an empty one.
            require_free(target, "choose another name")
            filesystem.rename(temporary, target, replace=False)
        elif force or self.output.replaces:
            copy_mode(temporary, target)
            filesystem.rename(temporary, target, replace=True)
        else:
            _link(temporary, target)
        self.waits = False

    def known(self) -> None:
        """Record the identity of the file, independent of its name."""
        with contextlib.suppress(FileNotFoundError):
            self._inode = _inode(self.whole[0])

    def stands(self) -> bool:
        """Return whether the file has its final name."""
        with contextlib.suppress(OSError):
            return _inode(self.whole[1]) == self._inode
        return False

    def take_back(self) -> None:
        """Remove the file's name if it still belongs to this file; keep any other file of that name."""
        self.waits = False
        if self.stands():
            remove_files([self.whole[1]])

    @property
    def rest(self) -> str | None:
        """Path to remove at the end: the temporary file or folder, if this output created it."""
        if not self._created or self.waits:
            return None
        return self.stem if self.output.inside else self.temporary


def _inode(file: str) -> tuple[int, int]:
    status = os.lstat(file)
    return status.st_dev, status.st_ino


def require_regular(target: str) -> None:
    """Raise TargetExistsError unless the target is, or would become, a regular file or folder.

    Files in /dev and /proc belong to the system, however a path leads there (`/dev/stdout`, a link
    to `/proc/self/fd/1`): replacing one would break other programs.
    """
    hop = os.path.abspath(target)
    for _ in range(_LINKS):
        folder = os.path.realpath(os.path.dirname(hop))
        if f"{folder}/".startswith(_SYSTEM) and not f"{folder}/".startswith(_SHARED_MEMORY):
            raise TargetExistsError(
                "the target is in a system folder", file=target, hint="choose another name"
            )
        if not os.path.islink(hop):
            break
        hop = os.path.join(folder, os.readlink(hop))
    if os.path.exists(target) and not (os.path.isfile(target) or os.path.isdir(target)):
        raise TargetExistsError(
            "the target is a device, socket or pipe", file=target, hint="choose another name"
        )


def require_free(target: str, hint: str = "use --force to replace it") -> None:
    """Raise TargetExistsError if the name exists, even as a dangling link."""
    if os.path.lexists(target):
        raise TargetExistsError("the target already exists", file=target, hint=hint)


def copy_mode(temporary: str, target: str) -> None:
    """Copy the permissions of the replaced file to the new file, as `cp` leaves them."""
    with contextlib.suppress(OSError):
        mode = os.lstat(target).st_mode
        if stat.S_ISREG(mode):
            os.chmod(temporary, stat.S_IMODE(mode) & 0o777)


def _link(temporary: str, target: str) -> None:
    try:
        # A hard link fails if the name exists: of two writers exactly one wins.
        if not try_link(temporary, target):
            # No hard links on this file system: check, then rename, which fails too on Windows.
            require_free(target)
            filesystem.rename(temporary, target, replace=not filesystem.WINDOWS)
    except FileExistsError:
        require_free(target)
        raise


def try_link(file: str, name: str) -> bool:
    """Hard-link a file; return False if the file system has no hard links, and on Windows."""
    if filesystem.WINDOWS:
        return False
    try:
        os.link(file, name, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True


@contextlib.contextmanager
def lock_folders(folders: Iterable[str]) -> Iterator[None]:
    """Lock these folders exclusively; the lock ends with the process, however it ends.

    Where a file system cannot lock folders (NFS), each rename is still atomic, but two conversions
    to one set of files are not kept apart.
    """
    with contextlib.ExitStack() as opened:
        for folder in sorted(set(folders)):
            descriptor = _open_lock(folder)
            opened.callback(os.close, descriptor)
            _lock(descriptor, folder)
        yield


def _open_lock(folder: str) -> int:
    """Open what represents a folder's lock: the folder or, where folders cannot be opened, a lock file.

    Lock files are in the user's folder for temporary files, so that none is left beside an output.
    """
    if hasattr(os, "O_DIRECTORY"):
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    import hashlib
    import tempfile

    name = os.path.normcase(os.path.realpath(folder))
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_DIGITS]
    path = os.path.join(tempfile.gettempdir(), f"ckpttool-{digest}.lock")
    return os.open(path, os.O_RDWR | os.O_CREAT | filesystem.BINARY, 0o600)


def _lock(descriptor: int, folder: str) -> None:
    """Lock a folder; raise UsageError if another program holds its lock for too long."""
    end = time.monotonic() + _LOCKED_S
    while True:
        try:
            filesystem.lock_file(descriptor)
        except BlockingIOError:
            if time.monotonic() > end:
                raise UsageError(
                    f"another program has held a lock on the folder for {_LOCKED_S} s",
                    file=folder,
                    hint="wait until it finishes, or write to another folder",
                ) from None
            time.sleep(0.02)
        except OSError:
            return  # the file system has no locks
        else:
            return


def remove_files(files: Iterable[str]) -> None:
    """Remove files and folders that exist; a second Ctrl-C does not interrupt this."""
    left = list(files)
    try:
        _remove_once(left)
    except BaseException:
        _remove_once(left)
        raise


def _remove_once(files: list[str]) -> None:
    for file in files:
        if os.path.isdir(file) and not os.path.islink(file):
            shutil.rmtree(file, ignore_errors=True)
            continue
        with contextlib.suppress(OSError):
            os.unlink(file)


def publish(
    files: Sequence[PendingFile], *, force: bool, sync: bool, replaced: Callable[[], Sequence[str]]
) -> None:
    """Rename files to their final names; the last one that does not follow the others commits.

    Before that step an error undoes the renames and the old files are intact; after it the new ones are. The
    files that `replaced` returns, which the old index lists, are removed unless they were replaced. The last
    rename is that of the index, or of the only file. Before it, parts get names that the old index does not
    list. A receipt, which contains the digest of its weights, keeps its temporary name until then: readers
    find it by the digest.
    """
    followers = [file for file in files if file.output.follows]
    extra = [file for file in files if file.output.extra]
    main: Sequence[PendingFile] = [
        *{file.whole: file for file in files if file not in followers and file not in extra}.values()
    ]
    if not force:
        for file in (*main, *followers):
            require_free(file.whole[1])
    old = {os.path.abspath(file) for file in replaced()} if force else set()
    if extra and old.intersection(os.path.abspath(file.output.file) for file in main[:-1]):
        main = _replace_in_two_steps(main, extra, followers, sync=sync)
    else:
        _commit(main, followers, force=force, sync=sync)
    if followers or old:
        flush_names(main[-1:], sync=sync)
    for file in followers:
        file.name(force=force)
    remove_files(sorted(old - {os.path.abspath(file.output.file) for file in main}))


def flush_names(files: Sequence[PendingFile], *, sync: bool) -> None:
    """Flush the folders that contain the files to the disk."""
    for folder in {file.folder for file in files} if sync else ():
        filesystem.fsync_path(folder)


def _commit(
    main: Sequence[PendingFile], followers: Sequence[PendingFile], *, force: bool, sync: bool
) -> None:
    *parts, last = main
    try:
        for file in parts:
            file.name(force=force)
        flush_names([*parts, *followers], sync=sync)
        last.name(force=force)
    except BaseException:
        if not last.stands():
            for file in parts:
                file.take_back()
        raise
    finally:
        for file in followers:
            file.waits = last.stands()


def _replace_in_two_steps(
    main: Sequence[PendingFile], extra: Sequence[PendingFile], followers: Sequence[PendingFile], *, sync: bool
) -> Sequence[PendingFile]:
    """Replace a set whose parts have the same names: rename to interim names first, then to final names.

    The parts are hard-linked, not rewritten. Return the files that exist in the end: without hard
    links, those with the interim names, which are equivalent.
    """
    *parts, last = main
    stem = temporary_path(last.output.target)
    between = [
        PendingFile(file.output._replace(suffix=file.output.meanwhile), stem) for file in (*parts, *extra)
    ]
    for file in between[:-1]:
        require_free(file.output.file, "move it away: the new files need this name temporarily")
    try:
        both = not [
            1
            for file, other in zip(parts, between, strict=False)
            if not _add_name(file.temporary, other.temporary)
        ]
        with WorkerThread() as disk:
            for file in between[len(parts) :]:
                file.fill(disk if sync else None)
        _commit(between, followers, force=True, sync=sync)
        flush_names([last], sync=sync)
    finally:
        remove_files(file.temporary for file in between)
    if not both:
        return between
    for file in parts:
        file.name(force=True)
    flush_names(parts, sync=sync)
    last.name(force=True)
    flush_names([last], sync=sync)  # before the files with the other names are removed
    remove_files(file.output.file for file in between[:-1] if file.stands())
    return main


def _add_name(file: str, name: str) -> bool:
    """Give a file this name too; return False if it has only this name now."""
    if try_link(file, name):
        return True
    filesystem.rename(file, name, replace=False)
    return False


_WORDS = {
    errno.EFBIG: "the file would be larger than the file system or ulimit -f allows",
    errno.EIO: "disk I/O error",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.ENOENT: "the output folder no longer exists",
    errno.ENOTDIR: "the output folder no longer exists",
    errno.EISDIR: "a folder with this name now exists",
}
_ELSEWHERE = "write to another folder or under another name"
_MAKE_ROOM = "make room, or write to another folder"


def require_free_space(outputs: Sequence[Output]) -> None:
    """Raise UsageError if a folder has less free space than the minimum size of the files."""
    for folder in {os.path.dirname(os.path.abspath(output.target)) for output in outputs}:
        least = sum(o.nbytes for o in outputs if os.path.dirname(os.path.abspath(o.target)) == folder)
        free = filesystem.free_bytes(folder)
        if free is not None and least > free:
            raise UsageError(_no_space_message(least, free), file=outputs[0].target, hint=_MAKE_ROOM)


def describe_os_error(
    error: OSError, file: str, outputs: Sequence[Output], temporaries: Iterable[str]
) -> CkpttoolError:
    """Return the user-facing error for an error of the operating system; `temporaries` still exist."""
    written = sum(os.path.getsize(temporary) for temporary in temporaries if os.path.isfile(temporary))
    least = max(written, sum(output.nbytes for output in outputs))
    if error.errno == errno.ENOSPC:
        free = filesystem.free_bytes(os.path.dirname(os.path.abspath(file)))
        sentence = _no_space_message(least, None if free is None else free + written)
        return UsageError(sentence, file=file, hint=_MAKE_ROOM)
    if error.errno == errno.EDQUOT:
        sentence = "the disk quota is too small for the target"
        return UsageError(f"{sentence}: it needs at least {least:,} bytes", file=file, hint=_MAKE_ROOM)
    words = _WORDS.get(error.errno or 0, error.strerror or str(error))
    size = f"; the target needs at least {least:,} bytes" if error.errno == errno.EFBIG else ""
    return UsageError(f"cannot write the target: {words}{size}", file=file, hint=_ELSEWHERE)


def _no_space_message(least: int, free: int | None) -> str:
    known = "" if free is None else f"; {free:,} bytes are free"
    return f"not enough disk space for the target: it needs at least {least:,} bytes{known}"


_RANDOM_BYTES = 6
_DIGEST_DIGITS = 16
_TAG = f"[0-9a-f]{{{2 * _RANDOM_BYTES + _DIGEST_DIGITS}}}"


def is_unindexed_set(files: Sequence[PendingFile]) -> bool:
    """Return whether the files are a set with one prefix and without an index that lists them."""
    main = [file.output for file in files if not file.output.follows]
    plain = not any(output.indexes or output.extra or output.inside for output in main)
    return plain and len(main) > 1 and len({output.target for output in main}) == 1


def replace_set(files: Sequence[PendingFile], *, force: bool, sync: bool) -> None:
    """Rename the files of a set, replacing the old files if `force`.

    Raise TargetExistsError if a name exists without `force`, or if a file appeared meanwhile. On any error
    the old files have their names again.

    No rename replaces several files at once, so the first file of a set represents all of it: no format
    accepts a set without its actor. That file is removed first and renamed last. Before that, every old file
    gets a backup name, `.NAME.ckpttool-old-TAG_actor`, and TAG contains a digest of what identifies the files
    (suffix, owner, inode, size, modification time). So a complete backup is recognised without a record, and
    the set is read from it if the program dies before the new first file has its name.

    Only files that this process created or was requested to replace are removed or moved: leftovers of an
    interrupted program stay until a person removes them.
    """
    first, *rest = files
    if not force:
        for file in files:
            require_free(file.output.file)
    base = first.output.target
    there = [file.output.file for file in files if os.path.lexists(file.output.file)]
    backup = _Backup(base, {file[len(base) :]: os.lstat(file) for file in there})
    for file in files:
        copy_mode(file.temporary, file.output.file)
    with contextlib.ExitStack() as undo:
        undo.callback(backup.remove)
        backup.make()
        flush_names([first], sync=sync)
        undo.callback(backup.restore)
        backup.take_names()
        flush_names([first], sync=sync)
        for file in files:
            undo.callback(file.take_back)
        for file in rest:
            file.name(force=False)
        flush_names([first], sync=sync)
        first.name(force=False)
        flush_names([first], sync=sync)
        undo.pop_all()
    backup.remove()


def find_backups(path: str) -> list[str]:
    """Return the prefixes of complete backups of the set at `path`, newest first.

    `path` is the set's prefix or, where the names of its files have the same ending, the prefix with
    that ending (NAME.h5f for NAME_actor.h5f).
    """
    backups: list[tuple[int, str]] = []
    stem, end = os.path.splitext(path)
    for base, ending in dict.fromkeys(((path, ""), (stem, end))):
        if os.path.basename(base):
            backups += [(newest, prefix + ending) for newest, prefix in _find_complete_backups(base)]
    return [prefix for _, prefix in sorted(backups, reverse=True)]


@dataclass(slots=True)
class _Backup:
    """Backup names of a set's old files; `old` and `status` are by suffix, the first file's first."""

    base: str
    old: Mapping[str, os.stat_result]
    status: dict[str, os.stat_result] = field(default_factory=dict)
    stem: str = ""
    _random: str = field(default_factory=lambda: os.urandom(_RANDOM_BYTES).hex())

    def make(self) -> None:
        """Give every old file its backup name; without hard links, to a copy of it."""
        for suffix in self.old:
            second = self._temporary + suffix
            if not try_link(self.base + suffix, second):
                shutil.copy2(self.base + suffix, second, follow_symlinks=False)
            self.status[suffix] = os.lstat(second)
        self.stem = hidden_path(self.base, KEPT, _backup_tag(self.base, self._random, self.status))
        for suffix in self.old:
            filesystem.rename(self._temporary + suffix, self.stem + suffix, replace=False)

    def take_names(self) -> None:
        """Remove the old names; raise TargetExistsError if one now belongs to another file."""
        for suffix, status in self.old.items():
            if not _has_status(self.base + suffix, status):
                raise TargetExistsError(
                    "the target changed while it was being replaced", file=self.base + suffix
                )
            os.unlink(self.base + suffix)

    def restore(self) -> None:
        """Restore the old files' free names, the first file last."""
        for suffix in reversed(self.status):
            if not os.path.lexists(self.base + suffix):
                filesystem.rename(self.stem + suffix, self.base + suffix, replace=False)

    def remove(self) -> None:
        """Remove the backup names that belong to this backup."""
        files = (
            (name + end, status)
            for end, status in self.status.items()
            for name in (self._temporary, self.stem)
        )
        remove_files([file for file, status in files if _has_status(file, status)])

    @property
    def _temporary(self) -> str:
        return hidden_path(self.base, TEMPORARY, self._random)


def _find_complete_backups(base: str) -> list[tuple[int, str]]:
    """Return the complete backups of a prefix as (last modification in ns, prefix), in any order."""
    folder, begin = os.path.split(hidden_path(base, KEPT, ""))
    pattern = re.compile(re.escape(begin) + f"({_TAG})(.+)", re.DOTALL)
    groups: dict[str, dict[str, os.stat_result]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if (match := pattern.fullmatch(name)) is not None:
                groups.setdefault(match[1], {})[match[2]] = os.lstat(os.path.join(folder, name))
    return [
        (
            max(status_.st_ctime_ns for status_ in status.values()),
            os.path.join(os.path.dirname(base), begin + tag),
        )
        for tag, status in groups.items()
        if tag == _backup_tag(base, tag[: 2 * _RANDOM_BYTES], status)
    ]


def _backup_tag(base: str, random: str, status: Mapping[str, os.stat_result]) -> str:
    """Return the random digits and the digest of the identity of all files of a backup."""
    import hashlib  # imported here because every command that reads imports this module

    files = [(suffix, s.st_uid, s.st_ino, s.st_size, s.st_mtime_ns) for suffix, s in sorted(status.items())]
    digest = hashlib.sha256(repr((os.path.basename(base), random, files)).encode(errors="surrogateescape"))
    return random + digest.hexdigest()[:_DIGEST_DIGITS]


def _has_status(file: str, status: os.stat_result) -> bool:
    """Return whether the name still belongs to the file with this status."""
    with contextlib.suppress(OSError):
        current = os.lstat(file)
        return os.path.samestat(current, status) and current.st_mtime_ns == status.st_mtime_ns
    return False


def require_new(
    target: str,
    sources: tuple[File, ...] = (),
    *,
    force: bool = False,
    hint: str = "use --force to replace it",
    in_store: bool = False,
) -> None:
    """Raise unless `target` may be written.

    Args:
        target: a path, or the URL of an object.
        sources: the input files, none of which it may be.
        force: it may exist.
        hint: what the error suggests if it exists.
        in_store: the caller writes objects, so that it may be a URL, whatever exists there.
    """
    if urls.is_url(target):
        _require_writable_store(target, force=force, in_store=in_store)
        return
    folder = os.path.dirname(os.path.abspath(target))
    if not os.path.isdir(folder):
        raise UsageError(
            "the output folder does not exist", file=folder, hint=f"mkdir -p {shlex.quote(folder)}"
        )
    require_regular(target)
    if not os.path.lexists(target):
        return
    for source in sources:
        with contextlib.suppress(OSError):
            if os.path.samefile(source.path, target):
                raise UsageError(
                    "source and target are the same file", file=target, hint="choose another target"
                )
    if os.path.isdir(target):
        hint = f"choose a file in it, e.g. {os.path.join(target, 'NAME')}"
        raise TargetExistsError("the target is a folder", file=target, hint=hint)
    if not force:
        raise TargetExistsError("the target already exists", file=target, hint=hint)


def _require_writable_store(target: str, *, force: bool, in_store: bool) -> None:
    """Raise UsageError unless objects can be written at a URL, and are."""
    if not in_store:
        hint = "write to a local path and upload the result"
        raise UsageError("cannot write this to a URL", file=target, hint=hint)
    store = filesystem.find_store(filesystem.resolve_path(target))
    if not hasattr(getattr(store, "server", None), "upload"):
        hint = "use s3:// or gs://, or write to a local path and upload the result"
        raise UsageError("cannot write to this URL", file=target, hint=hint)
    if force:
        raise UsageError(
            "objects are never replaced", file=target, hint="choose another name, without --force"
        )


def write_atomically(
    outputs: Sequence[Output],
    *,
    force: bool = False,
    sync: bool = True,
    sources: Sequence[File] = (),
    replaced: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Write files atomically through temporary siblings: each target is absent, old or complete.

    All files are written and checked before the first one is renamed. Without `force`, a target that appears
    meanwhile wins and TargetExistsError is raised. On any failure, Ctrl-C included, the temporary files are
    removed and the old target is unchanged.

    Args:
        outputs: the files in the order in which they are written.
        force: replace existing files.
        sync: flush files and folders to disk.
        sources: the input files: ChangedError is raised unless they are still unchanged at the end.
        replaced: returns the current files of the target, so that none of them outlives a new set.
    """
    for output in outputs:
        require_regular(output.target if output.inside else output.file)
    require_free_space(outputs)
    stems = {target: temporary_path(target) for target in dict.fromkeys(output.target for output in outputs)}
    files = [PendingFile(output, stems[output.target]) for output in outputs]
    at = outputs[0].file
    try:
        # Data is flushed to the disk while it is read back.
        with WorkerThread() as disk:
            for file in files:
                at = file.output.file
                if not file.output.replaces and not file.output.extra:
                    file.fill(disk if sync else None)
        for source in sources:
            source.require_unchanged()
        at = outputs[0].file
        with lock_folders(file.folder for file in files):
            _name_files(files, force=force, sync=sync, replaced=replaced)
    except OSError as error:
        raise describe_os_error(error, at, outputs, (file.temporary for file in files)) from error
    finally:
        remove_files(file.rest for file in files if file.rest is not None)


def write_file(target: str, content: bytes, *, force: bool = False, sources: Sequence[File] = ()) -> None:
    """Write bytes to one file atomically; see `write_atomically`."""

    def fill(stream: IO[bytes]) -> None:
        stream.write(content)

    write_atomically((Output(target, fill),), force=force, sources=sources)


def _name_files(
    files: list[PendingFile], *, force: bool, sync: bool, replaced: Callable[[], Sequence[str]]
) -> None:
    """Rename all files; state files that several programs update are filled at this point, and last."""
    shared = [file for file in files if file.output.replaces]
    own = [file for file in files if not file.output.replaces]
    try:
        if is_unindexed_set(own):
            replace_set(own, force=force, sync=sync)
        else:
            publish(own, force=force, sync=sync, replaced=replaced)
        for file in shared:
            with WorkerThread() as disk:
                file.fill(disk if sync else None)
            file.name(force=True)
        if not shared:
            flush_names(own, sync=sync)
    except BaseException:
        # A state file under its final name lists the checkpoint, so the checkpoint stays.
        if not force and not any(file.stands() for file in shared):
            for file in reversed(own):
                file.take_back()
        raise
    if shared:
        flush_names(files, sync=sync)
