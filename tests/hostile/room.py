"""A folder in memory whose files change without becoming the same file, and child processes that are not new.

Whoever reads thousands of damaged files in one process needs both: readers keep the last archives by size and
time of change, and listing an HDF5 file starts an interpreter each time.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

_MEMORY = Path("/dev/shm")  # Linux; elsewhere the usual folder does


class Room:
    """A temporary folder; every file put there has a time of change of its own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ckpttool-", dir=_MEMORY if _MEMORY.is_dir() else None))
        self._owner = os.getpid()
        self._times = itertools.count(1_000_000_000_000_000_000, 1000)

    def put(self, name: str, data: bytes) -> str:
        """Write a file and return its path."""
        path = self.folder / name
        try:
            path.write_bytes(data)
        except FileNotFoundError:
            path.parent.mkdir(parents=True)
            path.write_bytes(data)
        time = next(self._times)
        os.utime(path, ns=(time, time))
        return str(path)

    def fill(self, files: Mapping[str, bytes]) -> None:
        """Write several files, and remove what is there beside them."""
        for path in self.folder.rglob("*"):
            if path.is_file() and str(path.relative_to(self.folder)) not in files:
                path.unlink()
        for name, data in files.items():
            self.put(name, data)

    def leave(self) -> None:
        """Remove the folder."""
        if os.getpid() == self._owner:
            shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def room() -> Iterator[Room]:
    """Give a folder that is removed in the end."""
    room = Room()
    try:
        yield room
    finally:
        room.leave()


class _Process:
    """As much of subprocess.Popen as the reader of HDF5 files uses."""

    stdout: Any
    returncode: int | None = None

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.wait()

    def wait(self, timeout: float | None = None) -> int:
        raise NotImplementedError

    def kill(self) -> None:
        """Nothing runs."""

    def poll(self) -> int | None:
        return self.returncode

    def communicate(self, *_: object, **__: object) -> tuple[bytes, None]:
        data = self.stdout.read()
        self.wait()
        return data, None


class Answering(_Process):
    """A child that has answered with these bytes, whatever it was asked."""

    def __init__(self, data: bytes, status: int = 0) -> None:
        self.stdout, self._status = io.BytesIO(data), status
        self.pid = 0

    def wait(self, timeout: float | None = None) -> int:
        self.returncode = self._status
        return self._status


class Within(_Process):
    """A listing that runs in this process: a file that makes the HDF5 library crash ends this process."""

    def __init__(self, command: Sequence[str], **_: object) -> None:
        from ckpttool.core import limits
        from ckpttool.formats import hdf5_child

        descriptor, offset, length, _seconds, most, *job = command[command.index("-c") + 3 :]
        digests = (int(job[0]), int(job[1])) if job else None
        answer, self._status, self.pid = b"", 1, 0
        # What leaves the child's own code ends it with status 1.
        with contextlib.suppress(Exception), limits.using(limits.Limits(**json.loads(most))):
            answer = json.dumps(
                hdf5_child.handle_request(int(descriptor), int(offset), int(length), digests)
            ).encode()
            self._status = 0
        self.stdout = io.BytesIO(answer)

    def wait(self, timeout: float | None = None) -> int:
        self.returncode = self._status
        return self._status


class Forked(_Process):
    """A child that runs `python -c PROGRAM ...` without starting an interpreter: a fork of this process."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **_: object) -> None:
        reading_end, writing_end = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(reading_end)
            self._child(command, writing_end, env or {})
        os.close(writing_end)
        self.stdout = open(reading_end, "rb")  # noqa: SIM115  # closed with the process

    def _child(self, command: Sequence[str], out: int, env: Mapping[str, str]) -> NoReturn:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor, number in ((null, 0), (out, 1), (null, 2)):
                os.dup2(descriptor, number)
            sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  # until this child ends
            at = command.index("-c")
            sys.argv = ["-c", *command[at + 2 :]]
            os.environ.update(env)
            exec(compile(command[at + 1], "<string>", "exec"), {"__name__": "__main__"})
            sys.stdout.flush()
            os._exit(0)
        finally:
            os._exit(1)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def forked_children(kind: type[_Process] = Forked) -> Iterator[None]:
    """Let HDF5 files be listed by forks of this process, or within it."""
    from ckpttool.formats import hdf5

    os.environ["HDF5_PLUGIN_PRELOAD"] = "::"
    import h5py  # noqa: F401  # once, here

    with mock.patch.object(hdf5.subprocess, "Popen", kind):
        yield


@contextlib.contextmanager
def answering(data: bytes, status: int = 0) -> Iterator[None]:
    """Let the process that lists HDF5 files have answered with these bytes."""
    from ckpttool.formats import hdf5

    with mock.patch.object(hdf5.subprocess, "Popen", side_effect=lambda *_, **__: Answering(data, status)):
        yield
