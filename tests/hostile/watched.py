"""Runs commands of the command line in a forked child and tells all that each did to the machine.

The process that forks has imported the command line and NumPy (tests/warm.py), so that a command costs a few
milliseconds. Python's audit events see what Python asks for; `traced` runs a new process below strace, which
sees what the kernel is asked for.
"""

from __future__ import annotations

import ast
import gc
import inspect
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import traceback
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from ckpttool.core import deferred
from ckpttool.formats import hdf5
from tests import warm
from tests.hostile.room import Forked

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 20  # of the processor, which other programs do not shorten
_WAIT_S = 6 * SECONDS
MEMORY = 1 << 30  # above what the process has before the command
_ADDRESSES = 8 << 30
# What may act on the world, by the names of Python's audit events (Doc/library/audit_events.rst).
_ACTS = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.remove",
    "os.rmdir",
    "os.rename",
    "os.link",
    "os.symlink",
    "os.chmod",
    "os.chown",
    "os.truncate",
    "os.mkdir",
    "os.utime",
    "shutil.",
    "socket.",
    "urllib.",
    "ctypes.",
    "pickle.find_class",
    "marshal.",
    "compile",
    "subprocess.Popen",
    "tempfile.",
    "webbrowser.",
)


@dataclass(frozen=True)
class Seen:
    """What a command did.

    `seconds` is its CPU time, `memory` the most bytes that its process has had above the baseline, 0 if an
    earlier command was the one that had them. `read` and `written` are the paths that were opened, `acts` the
    audit events that may act on the world, each with its first argument.
    """

    status: int
    out: str
    err: str
    seconds: float
    memory: int
    read: tuple[str, ...]
    written: tuple[str, ...]
    acts: tuple[tuple[str, str], ...]


Command = Sequence[object]


def run(jobs: Mapping[Path, Sequence[Command]]) -> dict[Path, list[Seen]]:
    """Run command lines one after the other, each in its folder, where no terminal is.

    They share a process, whose fork and first touch of each page take longer than most commands; with
    CKPTTOOL_HOSTILE=whole each has a process of its own. What takes 20 s of the processor is killed; then the
    folders of the process are run again, each in its own.
    """
    if any(len(commands) > 1 for commands in jobs.values()) and os.environ.get("CKPTTOOL_HOSTILE") == "whole":
        return {
            folder: [result for command in commands for result in run({folder: [command]})[folder]]
            for folder, commands in jobs.items()
        }
    texts = [(str(folder), [list(map(str, command)) for command in jobs[folder]]) for folder in jobs]
    program = f"from tests.hostile.watched import watch; watch({texts!r})"
    start = {"PYTHONPATH": str(ROOT), **_BARE}
    status, output = warm.run("tests.hostile.started", program, next(iter(jobs)), start)
    if status and len(jobs) > 1:
        return {folder: run({folder: commands})[folder] for folder, commands in jobs.items()}
    assert status == 0, f"{status} at one of {texts}: {output}"
    results = [Seen(**{name: _settled(value) for name, value in row.items()}) for row in json.loads(output)]
    rest = iter(results)
    return {folder: [next(rest) for _ in commands] for folder, commands in jobs.items()}


_PASSED = ("PATH", "HOME", "TMPDIR", "CKPTTOOL_HOSTILE")
_BARE = {name: os.environ[name] for name in _PASSED if name in os.environ} | {"COLUMNS": "80"}


def _settled(value: Any) -> Any:
    return tuple(map(_settled, value)) if isinstance(value, list) else value


def watch(jobs: list[tuple[str, list[list[str]]]]) -> None:
    """Run each command in its folder, all in this process; print what is known of them as JSON."""
    # A module that nobody has compiled yet is no file that the command writes.
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))
    baseline = _resident()
    own = os.dup(1), os.dup(2)
    sys.addaudithook(_note)
    result = []
    try:
        for folder, commands in jobs:
            os.chdir(folder)
            result += [vars(_watched(arguments, baseline)) for arguments in commands]
    finally:
        for number, descriptor in enumerate(own, start=1):
            os.dup2(descriptor, number)
    print(json.dumps(result))  # noqa: T201  # the answer


def _watched(arguments: list[str], baseline: int) -> Seen:
    outputs = [os.memfd_create(name) for name in ("out", "err", "events")]
    for number, descriptor in enumerate(outputs[:2], start=1):
        os.dup2(descriptor, number)
    began, before = sum(os.times()[:4]), _peak()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(_WAIT_S)
    _Heard.events = outputs[2]
    status = _status(arguments)
    _Heard.events = None
    signal.alarm(0)
    signal.setitimer(signal.ITIMER_PROF, 0)
    peak = _peak()
    result = Seen(
        status,
        *(_text(descriptor) for descriptor in outputs[:2]),
        sum(os.times()[:4]) - began,
        # What stays below the peak of an earlier command took less than that one.
        peak - baseline if peak > before else 0,
        *_sorted(map(json.loads, _text(outputs[2]).splitlines())),
    )
    for descriptor in outputs:
        os.close(descriptor)
    return result


def _peak() -> int:
    """Return the most bytes that this process or a child of it has had in memory."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(owner).ru_maxrss for owner in who) << 10


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _text(descriptor: int) -> str:
    with open(descriptor, encoding="utf-8", errors="surrogateescape", closefd=False) as stream:
        stream.seek(0)
        return stream.read()


def _status(arguments: list[str]) -> int:
    """Run a command; return the status with which its process would end."""
    sys.argv = ["ckpttool", *arguments]
    status = 70
    try:
        from ckpttool.cli import main

        if os.environ.get("CKPTTOOL_HOSTILE") == "whole":
            main()
        with mock.patch.object(hdf5, "subprocess", _FORKING):
            main()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 71
    except BaseException:  # noqa: BLE001  # as the interpreter would
        traceback.print_exc()
    finally:
        gc.enable()
        sys.stdout.flush()
        sys.stderr.flush()
    return status


class _Heard:
    """The descriptor to which events are written, while a command runs."""

    events: int | None = None


class _Listing(Forked):
    """The process that lists an HDF5 file, without the quarter of a second in which it imports h5py.

    What it does itself is heard as little as if it were one (`traced` sees it).
    """

    def __init__(self, command: Sequence[str], **how: Any) -> None:
        sys.audit("subprocess.Popen", command[0], command, None, how.get("env"))
        events, _Heard.events = _Heard.events, None
        super().__init__(command, **how)
        _Heard.events = events


_FORKING = types.SimpleNamespace(
    Popen=_Listing, **{name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "TimeoutExpired")}
)


def _note(event: str, args: tuple[Any, ...]) -> None:
    events = _Heard.events
    if events is None:
        return
    if event == "open":
        path, _, flags = args
        if not isinstance(path, int):
            os.write(events, (json.dumps([event, os.fsdecode(path), flags]) + "\n").encode())
    elif event.startswith(_ACTS):
        first = repr(args[0])[:300] if args else ""
        if event in ("marshal.loads", "marshal.load", "compile") and _of_our_own():
            return
        os.write(events, (json.dumps([event, first, 0]) + "\n").encode())


# The import system, what evaluates the annotations of the commands, constructors of the package's own
# classes, which are compiled from the names of their fields, and `ast.parse`: a tree of text, no code.
_OURS = ("<frozen importlib._bootstrap_external>", inspect.__file__, typing.__file__, deferred.__file__)
_PARSE = ast.parse.__code__


def _of_our_own() -> bool:
    """Say whether code comes from a module that is imported or from annotations, or text is only parsed."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _PARSE or frame.f_code.co_filename in _OURS:
            return True
        frame = frame.f_back
    return False


def _sorted(
    events: Iterable[list[Any]],
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, str], ...]]:
    read: dict[str, None] = {}
    written: dict[str, None] = {}
    acts: dict[tuple[str, str], None] = {}
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    for event, first, flags in events:
        if event == "open":
            (written if flags & writing else read)[os.path.abspath(first)] = None
        else:
            acts[event, first] = None
    return tuple(read), tuple(written), tuple(acts)


class Call(NamedTuple):
    """A system call that names files or peers; `changes` says that it may change something."""

    name: str
    paths: tuple[str, ...]
    changes: bool


def traced(*arguments: object, folder: Path) -> tuple[int, list[Call]]:
    """Run the command line in a process below strace; return its status and what the kernel did for it.

    Calls that failed are left out: Python looks for modules in many places.
    """
    log = folder.parent / f"{folder.name}.strace"
    done = subprocess.run(
        [
            *(
                str(shutil.which("strace")),
                "-f",
                "-qq",
                "-s",
                "4096",
                "-e",
                f"trace={_NAMING}",
                "-o",
                str(log),
            ),
            *(sys.executable, "-B", "-m", "ckpttool", *map(str, arguments)),
        ],
        cwd=folder,
        env={**_BARE, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
    )
    lines = log.read_text(errors="surrogateescape").splitlines()
    log.unlink()
    return done.returncode, [call for line in lines if (call := _call(line)) is not None]


# strace marks with ? what a kernel may not have.
_NAMING = (
    "open,openat,?openat2,creat,execve,?execveat,connect,bind,unlink,unlinkat,rename,renameat,renameat2,link,"
    "linkat,symlink,symlinkat,mkdir,mkdirat,rmdir,truncate,chmod,fchmodat,chown,fchownat"
)
_TRACED = re.compile(r"(?:\d+ +)?(\w+)\((.*)\) += (-?\d+)")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_WRITES = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC|O_APPEND")


def _call(line: str) -> Call | None:
    match = _TRACED.match(line)
    if match is None or int(match[3]) < 0:
        return None
    name, arguments = match[1], match[2]
    opens = name.startswith("open")
    changes = _WRITES.search(arguments) is not None if opens else not name.startswith("exec")
    paths = _QUOTED.findall(arguments)
    return Call(name, tuple(paths[:1] if opens or name.startswith("exec") else paths), changes)
