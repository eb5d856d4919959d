"""Runs the process that lists an HDF5 file, and turns whatever becomes of it into one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import IO, Any

from ckpttool.errors import CkpttoolError, FormatError, MissingExtraError, TruncatedError, UnsupportedError

# The child sees what this process sees, and nothing that its environment adds.
_START = """
import json, sys
sys.path += [path for path in json.loads(sys.argv[1]) if path not in sys.path]
from ckpttool.formats.hdf5.child import main
main(sys.argv[2:])
"""
ANSWER = 160 << 20
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
    """Return how long listing a file of `length` bytes may take."""
    return min(120, 15 + (length >> 21))


def listing(descriptor: int, offset: int, length: int, file: str) -> dict[str, Any]:
    """Return what child.py found in `length` bytes from `offset` of an open file; `file` is its name.

    Raise FormatError when the library refuses the file, crashes, hangs, or takes too much memory, and
    UnsupportedError when the file leads to other files.
    """
    allowed = seconds(length)
    paths = [_PACKAGE, *(path for path in sys.path if os.path.isabs(path))]
    command = [sys.executable, "-I", "-B", "-c", _START, json.dumps(paths)]
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
    with subprocess.Popen(  # noqa: S603  # our own module, run by our own interpreter
        [*command, *map(str, (descriptor, offset, length, allowed))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=kept | _ENVIRONMENT,
        pass_fds=(descriptor,),
    ) as process:
        late = threading.Event()
        watch = threading.Timer(allowed, _stop, (process, late))
        watch.start()
        try:
            answer = _answer(process)
        finally:
            watch.cancel()
            process.kill()
    if late.is_set() or process.returncode == -getattr(signal, "SIGXCPU", 0):
        raise FormatError(
            f"the HDF5 library did not finish within {allowed} s: the file is damaged", file=file
        )
    return _judged(answer, process.returncode, file)


def _answer(process: subprocess.Popen[bytes]) -> bytes:
    stream: IO[bytes] | None = process.stdout
    data = stream.read(ANSWER) if stream is not None else b""
    if len(data) < ANSWER:
        process.wait()
    return data


def _stop(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    process.kill()


def _judged(answer: bytes, status: int, file: str) -> dict[str, Any]:
    if status:
        what = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        raise FormatError(f"the process that reads it {what}: the file is damaged", file=file)
    try:
        found = json.loads(answer)
        refused = found.get("refused")
        if refused is not None:
            kind, sentence = refused
            raise _ERRORS.get(kind, FormatError)(_printable(sentence), file=file)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError("the HDF5 library gave no answer that can be read", file=file) from error
    return dict(found)


def _printable(sentence: object) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in str(sentence))[:400]
