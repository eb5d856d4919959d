"""Work that goes on behind its caller: jobs in order on a thread of their own, and a file written so.

What takes long here (reading, writing, hashing, copying arrays) lets go of the lock of Python, so that a
lane keeps another core busy. Nothing outlives the `with` block it was made in: the thread is joined, on an
error or Ctrl-C too, after the job it was doing.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from io import FileIO
from typing import IO, Self, cast

Job = Callable[[], object]

# Bytes that may wait in a lane before its caller does: a few tensors, however small.
BACKLOG = 16 << 20
# For larger pieces the kernel looks for larger free blocks of memory, which a virtual machine may have given
# back to its host: writes of 4 MiB were seen to take ten times as long (docs/design.md).
_PIECE = 256 << 10
_SMALL = 64 << 10
# Just below glibc's DEFAULT_MMAP_THRESHOLD_MAX.
_KEPT = 31 << 20
# So much is left to the kernel before the disk is asked to begin.
_UNSYNCED = 256 << 20


# The lanes that this code runs on, each with the mark that its caller left the block by an error.
_ABANDONED: contextvars.ContextVar[tuple[threading.Event, ...]] = contextvars.ContextVar(
    "ckpttool_abandoned", default=()
)


def abandoned() -> bool:
    """Say whether the caller of the lane that this runs on has failed: nobody wants the result."""
    return any(mark.is_set() for mark in _ABANDONED.get())


class Lane:
    """A thread that does jobs in the order they are given; it starts with the first one.

    The first error ends the lane: the jobs behind it are dropped, and the next call raises that error.
    """

    def __init__(self, backlog: int = BACKLOG) -> None:
        """Let the caller wait while more than `backlog` bytes are before the lane."""
        self._backlog = backlog
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Job, int]] = deque()
        self._nbytes = 0
        self._error: BaseException | None = None
        self._ended = False
        self._abandoned = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Return the lane."""
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Join the thread, once everything is done or, after an error, once its present job is."""
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
        """Whether nothing is being done or waits."""
        return not self._jobs

    def do(self, job: Job, nbytes: int = 0) -> None:
        """Have the job done, which keeps `nbytes` alive until then; raise what an earlier job raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._nbytes <= self._backlog or not self._jobs)
            self._raise()
            self._jobs.append((job, nbytes))
            self._nbytes += nbytes
            if self._thread is None:
                # The caller's limits hold for what is read here too.
                work = partial(contextvars.copy_context().run, self._work)
                self._thread = threading.Thread(target=work, name="ckpttool-lane")
                self._thread.start()
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when all is done; raise what a job raised."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs)
            self._raise()

    def drop(self) -> None:
        """Leave undone what waits."""
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
def new_file(path: str, disk: Lane | None = None) -> Iterator[IO[bytes]]:
    """Open a file that is not there yet for writing behind the caller; all is written when the block ends.

    Buffers that are written must not change before that. With a `disk` lane, what is written goes on to the
    disk all the while, and is there when that lane has done its jobs. Raise OSError where writing fails,
    which may be later than at the call.
    """
    with FileIO(path, "x", opener=_exclusive) as file, Lane() as lane:
        stream = _Stream(file, lane, disk)
        # All that writers use: what a pipe has, besides the name for one who must open the file himself.
        yield cast(IO[bytes], stream)
        stream.flush()
        if disk is not None:
            disk.do(partial(sync, path))


def _exclusive(path: str, flags: int) -> int:
    # Whatever somebody put there meanwhile, a link too, is not ours to fill.
    return os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def keep_freed_memory() -> None:
    """Let the C library keep the memory of tensors that are freed for those that come next.

    Source: glibc's malloc/malloc.c, free: a freed block that was mapped raises the size from which blocks are
    mapped, up to 32 MiB, and twice as much may stay free. Else each tensor's pages are asked for anew, which
    takes longer than filling them. Elsewhere this does nothing.
    """
    import numpy as np

    np.empty(_KEPT, np.uint8)


def sync(path: str) -> None:
    """Return when the file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Stream:
    """A file whose large buffers are written by a lane, small ones gathered first."""

    def __init__(self, file: FileIO, lane: Lane, disk: Lane | None) -> None:
        self.name = str(file.name)
        self._file, self._lane, self._disk = file, lane, disk
        self._small = bytearray()
        self._unsynced = 0

    def readable(self) -> bool:
        """Return that it is not."""
        return False

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Take the bytes and return their number; raise OSError if earlier ones could not be written."""
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
        """Return when the file has all that was written."""
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
            self._disk.do(partial(sync, self.name))
            self._unsynced = 0
