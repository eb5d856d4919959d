"""Makes this process like one on Windows, as far as ckpttool's own calls can tell.

What Windows lacks is removed from `os`, `time` and `select`, the modules that it lacks cannot be imported,
and what it refuses raises its errors: open files are neither replaced nor renamed nor removed, folders are
not opened, files opened for reading are not flushed, a rename replaces nothing. The libraries are imported
first: they are those of this machine, and would break. Not simulated: separators and drives in paths,
encodings of the console.
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIBRARIES = (
    "numpy",
    "ml_dtypes",
    "google_crc32c",
    "cramjam",
    "typer",
    "rich.console",
    "rich.table",
    "jinja2",
    "yaml",
)
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty")
LACKS = {
    os: (
        "pread",
        "preadv",
        "pwrite",
        "pwritev",
        "link",
        "fork",
        "forkpty",
        "fchdir",
        "fchmod",
        "statvfs",
        "fstatvfs",
        "getuid",
        "geteuid",
        "getgid",
        "getegid",
        "memfd_create",
        "mkfifo",
        "sched_getaffinity",
        "sched_setaffinity",
        "killpg",
        "setsid",
        "sysconf",
        "posix_fadvise",
        "O_NOFOLLOW",
        "O_DIRECTORY",
        "O_CLOEXEC",
        "O_NONBLOCK",
        "O_PATH",
    ),
    time: ("clock_gettime", "clock_gettime_ns", "CLOCK_REALTIME", "CLOCK_MONOTONIC"),
    select: ("poll", "epoll"),
    signal: ("SIGHUP", "SIGXCPU", "pthread_sigmask"),
}
BINARY = 1 << 30
CHILD = """
import sys
sys.path.append({folder!r})
import windows
sys.path.pop()
import json
sys.path += [path for path in json.loads(sys.argv[1]) if path not in sys.path]
windows.simulate()
"""


def caller() -> str:
    """Return the module that called the replaced function."""
    return str(sys._getframe(2).f_globals.get("__name__", ""))


def is_open(path: Any) -> bool:
    """Return whether this process has the file, or a file in the folder, open."""
    real = os.path.realpath(os.fsdecode(path))
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if name == real or name.startswith(f"{real}/"):
            return True
    return False


def refuse(code: int, path: Any) -> OSError:
    return OSError(code, os.strerror(code), path)


def replaced_calls() -> dict[str, Callable[..., Any]]:
    """Return the calls of `os` that behave as on Windows."""
    real = {
        name: getattr(os, name) for name in ("open", "fsync", "replace", "rename", "unlink", "rmdir", "chdir")
    }

    def open_(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        if os.path.isdir(path):
            raise refuse(errno.EACCES, path)
        is_own = caller().startswith("ckpttool") and path != os.devnull
        assert flags & BINARY or not is_own, f"{path} is opened as text"
        return int(real["open"](path, flags & ~BINARY, mode, **options))

    def fsync(descriptor: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise refuse(errno.EBADF, None)

    def moving(name: str) -> Callable[..., None]:
        def move(source: Any, target: Any) -> None:
            if is_open(source) or is_open(target):
                raise refuse(errno.EACCES, target)
            if name == "rename" and os.path.lexists(target):
                raise refuse(errno.EEXIST, target)
            real[name](source, target)

        return move

    def removing(name: str) -> Callable[..., None]:
        def remove(path: Any, **options: Any) -> None:
            if caller() != "tempfile" and is_open(path):
                raise refuse(errno.EACCES, path)
            real[name](path, **options)

        return remove

    def symlink(source: Any, target: Any, *_: Any, **__: Any) -> None:
        raise refuse(errno.EPERM, target)

    def chdir(path: Any) -> None:
        assert not isinstance(path, int)
        real["chdir"](path)

    return {
        "open": open_,
        "fsync": fsync,
        "replace": moving("replace"),
        "rename": moving("rename"),
        "unlink": removing("unlink"),
        "remove": removing("unlink"),
        "rmdir": removing("rmdir"),
        "symlink": symlink,
        "chdir": chdir,
    }


def locking_module() -> types.ModuleType:
    """Return msvcrt with its locks, which are those of bytes; flock's are the closest here."""

    def locking(descriptor: int, mode: int, nbytes: int) -> None:
        assert (mode, nbytes) == (2, 1)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise refuse(errno.EACCES, None) from None

    module = types.ModuleType("msvcrt")
    module.__dict__.update(locking=locking, LK_NBLCK=2)
    return module


class WindowsPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Passes nothing but the standard streams; children are on Windows too."""

    def __init__(self, command: Any, **options: Any) -> None:
        assert "pass_fds" not in options, "pass_fds not supported on Windows"
        if "-c" in command:
            at = command.index("-c") + 1
            before = CHILD.format(folder=str(Path(__file__).parent))
            command = [*command[:at], before + command[at], *command[at + 1 :]]
        super().__init__(command, **options)


def simulate() -> None:
    """Take from this process what Windows lacks, and import ckpttool's file system calls."""
    for name in LIBRARIES:
        importlib.import_module(name)
    statvfs = os.statvfs

    def disk_usage(path: Any) -> types.SimpleNamespace:
        statistics = statvfs(path)
        total, free = statistics.f_blocks * statistics.f_frsize, statistics.f_bavail * statistics.f_frsize
        return types.SimpleNamespace(total=total, free=free)

    shutil.disk_usage = disk_usage  # type: ignore[assignment]
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]
    tempfile.gettempdir()
    subprocess.Popen = WindowsPopen  # type: ignore[misc]
    os.supports_fd.discard(os.chdir)
    for name, call in replaced_calls().items():
        setattr(os, name, call)
    for module, names in LACKS.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    os.O_BINARY = BINARY  # type: ignore[attr-defined]
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    sys.modules["msvcrt"] = locking_module()
    assert "ckpttool.core.filesystem" not in sys.modules
    before, sys.platform = sys.platform, "win32"
    try:
        importlib.import_module("ckpttool.core.filesystem")
    finally:
        sys.platform = before
