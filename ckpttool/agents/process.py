"""One child process that talks in lines: started apart, never waited for without end, its end explained."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import ckpttool
from ckpttool import search_paths
from ckpttool.agents.messages import Message, error_of, line
from ckpttool.errors import UsageError, WorkerError

LAST_LINES = 6
LAST_BYTES = 8192
GRACE_S = 5.0
MEMORY = "/dev/shm"  # noqa: S108 - the folder made in it has a random name and mode 0700
MEMORY_ROOM = 1 << 30

THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)


def module(name: str) -> tuple[str, ...]:
    """Return what an interpreter is told to run a module of ours.

    -P keeps the user's folder, where a stranger's torch.py may lie, off the import path.
    """
    return "-P", "-m", name


class Process:
    """A program of ours run by some interpreter, with a folder that both sides share."""

    def __init__(
        self,
        name: str,
        program: Sequence[str],
        arguments: Sequence[str],
        *,
        python: str,
        timeout: float,
        threads: int | None,
    ) -> None:
        """Keep how to start: the interpreter, `program`, the shared folder, `arguments`.

        `timeout` is in seconds per answer; `threads` None leaves libraries alone.
        """
        self.name = name
        self._program, self._arguments = program, arguments
        self._requests = 0
        self._python, self._timeout, self._threads = python, timeout, threads
        self._pending = b""
        self._child: subprocess.Popen[bytes] | None = None
        self._holder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def folder(self) -> Path:
        """The shared folder; raise WorkerError when the process does not run."""
        if self._holder is None:
            raise WorkerError(f"the {self.name} is not running")
        return Path(self._holder.name)

    def start(self) -> None:
        """Start the process; raise UsageError if there is no such interpreter."""
        self._holder = tempfile.TemporaryDirectory(prefix="ckpttool-", dir=_memory())
        library = self.folder / "library"
        library.mkdir()
        # The interpreter sees this package alone: not its neighbours, which were built for another Python.
        (library / "ckpttool").symlink_to(Path(ckpttool.__file__).resolve().parent)
        command = [self._python, *self._program, str(self.folder), *self._arguments]
        try:
            with open(self._log, "wb") as log:
                self._child = subprocess.Popen(  # noqa: S603 - the interpreter is the caller's to choose
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=self._environment(library),
                    start_new_session=True,  # a terminal's Ctrl-C is for the parent
                )
        except OSError as error:
            self.stop(None)
            raise UsageError(f"{self._python} cannot be run: {error.strerror}") from None

    def request(self, do: str, values: Message) -> Message:
        """Send one request and return its answer; raise the other side's error as if it had happened here."""
        self._requests += 1
        self.send(line({"id": self._requests, "do": do, **values}))
        answer = json.loads(self.receive())
        while answer["id"] != self._requests:
            # The answer to a request that Ctrl-C took the caller away from.
            answer = json.loads(self.receive())
        if "error" in answer:
            raise error_of(answer["error"])
        return dict(answer["ok"])

    def send(self, line: bytes) -> None:
        """Write one line; raise WorkerError if the process has ended."""
        child = self._running()
        try:
            _stdin(child, line)
        except BrokenPipeError:
            raise self._ended() from None

    def receive(self) -> bytes:
        """Return one line; raise WorkerError if the process ends or takes longer than the timeout."""
        child = self._running()
        assert child.stdout is not None  # noqa: S101 - for the type checker: it was opened as a pipe
        deadline = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._late()
                chunk = os.read(child.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise self._ended()
                self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def kill(self) -> None:
        """End the process at once, from any thread: who waits for its answer gets WorkerError."""
        child = self._child
        if child is not None:
            child.kill()

    def stop(self, farewell: bytes | None) -> None:
        """End the process, kindly if there is a farewell to send, and remove the folder."""
        if self._child is not None:
            if farewell is not None:
                with contextlib.suppress(BrokenPipeError):
                    _stdin(self._child, farewell)
            self._end(GRACE_S if farewell is not None else 0.0)
        if self._holder is not None:
            self._holder.cleanup()
            self._holder = None

    @property
    def _log(self) -> Path:
        return self.folder / "stderr.txt"

    def _environment(self, library: Path) -> dict[str, str]:
        inherited = search_paths.environment()
        path = os.pathsep.join(filter(None, (str(library), inherited.get("PYTHONPATH"))))
        limits = {} if self._threads is None else dict.fromkeys(THREADS, str(self._threads))
        return {**inherited, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", **limits}

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            raise WorkerError(f"the {self.name} is not running")
        return self._child

    def _end(self, grace: float) -> int:
        """Wait that long for the process, then kill it; return its status."""
        child = self._running()
        try:
            child.wait(grace)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._child = None
        return child.returncode

    def _late(self) -> WorkerError:
        self._end(0.0)
        return WorkerError(f"the {self.name} did not answer within {self._timeout:g} s{self._last_words()}")

    def _ended(self) -> WorkerError:
        status = self._end(GRACE_S)
        reason = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        return WorkerError(f"the {self.name} ended {reason}{self._last_words()}")

    def _last_words(self) -> str:
        """Return the last lines of the standard error, without what could steer a terminal."""
        with open(self._log, "rb") as log:
            log.seek(max(0, os.path.getsize(self._log) - LAST_BYTES))
            text = log.read().decode("utf-8", "replace")
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x20-\x7e\xa0-\U0010ffff\n]", "", text)
        lines = [line.rstrip() for line in plain.splitlines() if line.strip()]
        return "; it last said: " + " | ".join(lines[-LAST_LINES:]) if lines else ""


def _stdin(child: subprocess.Popen[bytes], line: bytes) -> None:
    assert child.stdin is not None  # noqa: S101 - for the type checker: it was opened as a pipe
    child.stdin.write(line)
    child.stdin.flush()


def _memory() -> str | None:
    """Return a roomy folder in memory, if there is one: small files cost a quarter of the time there."""
    try:
        room = os.statvfs(MEMORY)
    except OSError:
        return None
    return MEMORY if room.f_bavail * room.f_frsize > MEMORY_ROOM and os.access(MEMORY, os.W_OK) else None
