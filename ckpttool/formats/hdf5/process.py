"""Runs the process that lists an HDF5 file, and turns whatever becomes of it into one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from typing import IO, Any, NamedTuple

from ckpttool import limits
from ckpttool.errors import CkpttoolError, FormatError, MissingExtraError, TruncatedError, UnsupportedError

# The child sees what this process sees, and nothing that its environment adds.
_START = """
import json, sys
sys.path += [path for path in json.loads(sys.argv[1]) if path not in sys.path]
from ckpttool.formats.hdf5.child import main
main(sys.argv[2:])
"""
# What an object of the file takes in the answer at most, on the average: bytes and values of JSON.
_BYTES, _VALUES = 256, 16
_LONGEST = 120
# By the clock it may be more: others may use the processors.
_CLOCK = 8
_ERRORS: dict[str, type[CkpttoolError]] = {
    "format": FormatError,
    "truncated": TruncatedError,
    "unsupported": UnsupportedError,
    "missing": MissingExtraError,
}
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
# "::" keeps the library from looking for filter plugins, which would be code (HDF5 1.8.15 release notes,
# H5PLpkg.h H5PL_NO_PLUGIN); file locks fail on read-only filesystems.
_ENVIRONMENT = {
    "HDF5_PLUGIN_PRELOAD": "::",
    "HDF5_PLUGIN_PATH": "/nonexistent",
    "HDF5_USE_FILE_LOCKING": "FALSE",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


def seconds(length: int) -> int:
    """Return how many seconds of a processor listing a file of `length` bytes may take."""
    base = limits.current().hdf5_seconds
    return min(max(_LONGEST, base), base + (length >> 20))


class Job(NamedTuple):
    """What the process does: list the file, or give digests of its datasets (listing.Digests).

    `declared` is how many bytes the first of these has.
    """

    first: int | None = None
    most: int = 0
    declared: int = 0


LISTING = Job()


def run(descriptor: int, offset: int, length: int, file: str, job: Job = LISTING) -> dict[str, Any]:
    """Return what child.py found in `length` bytes from `offset` of an open file; `file` is its name.

    Raise FormatError when the library refuses the file or crashes, LimitError when it takes too much time or
    memory, and UnsupportedError when the file leads to other files.
    """
    allowed, most = seconds(length + max(job.most, job.declared)), limits.current()
    paths = [_PACKAGE, *(path for path in sys.path if os.path.isabs(path))]
    command = [sys.executable, "-I", "-B", "-c", _START, json.dumps(paths)]
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
    digests = () if job.first is None else (str(job.first), str(job.most))
    with subprocess.Popen(  # noqa: S603  # our own module, run by our own interpreter
        [*command, *map(str, (descriptor, offset, length, allowed)), json.dumps(asdict(most)), *digests],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=kept | _ENVIRONMENT,
        pass_fds=(descriptor,),
    ) as process:
        late = threading.Event()
        watch = threading.Timer(_CLOCK * allowed, _stop, (process, late))
        watch.start()
        try:
            answer = _answer(process, _BYTES * most.hdf5_objects)
        finally:
            watch.cancel()
            process.kill()
    if late.is_set() or process.returncode == -getattr(signal, "SIGXCPU", 0):
        raise limits.exceeded(
            "hdf5_seconds", f"the HDF5 library did not finish in {allowed} s", None, file=file
        )
    return _judged(answer, process.returncode, file)


def _answer(process: subprocess.Popen[bytes], most: int) -> bytes:
    """Return what the process says, a byte more than `most` if it does not stop there."""
    stream: IO[bytes] | None = process.stdout
    data = stream.read(most + 1) if stream is not None else b""
    if len(data) <= most:
        process.wait()
    return data


def _stop(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    process.kill()


def _judged(answer: bytes, status: int, file: str) -> dict[str, Any]:
    most = limits.current().hdf5_objects
    if len(answer) > _BYTES * most or sum(map(answer.count, (b",", b"[", b"{"))) > _VALUES * most:
        raise limits.exceeded("hdf5_objects", "the list of the file's datasets is too long", None, file=file)
    if status:
        what = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        raise FormatError(f"the process that reads it {what}: the file is damaged", file=file)
    try:
        found = json.loads(answer)
        refused = found.get("refused")
        if refused is not None:
            raise _refusal(file, *refused)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError("the HDF5 library gave no answer that can be read", file=file) from error
    return dict(found)


def _refusal(file: str, kind: str, sentence: str, limit: str = "", found: int | None = None) -> CkpttoolError:
    said = _printable(sentence)
    if kind == "limit" and hasattr(limits.current(), limit):
        return limits.exceeded(limit, said, found, file=file)
    return _ERRORS.get(kind, FormatError)(said, file=file)


def _printable(sentence: object) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in str(sentence))[:400]
