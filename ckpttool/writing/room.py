"""Room on the disk: asked before the first byte, and what is said where the disk says no."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence

from ckpttool.errors import CkpttoolError, UsageError
from ckpttool.writing.outputs import Output

_WORDS = {
    errno.EFBIG: "a file may not be so large here (by the file system, or by ulimit -f)",
    errno.EIO: "the disk reports an error",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.ENOENT: "the folder to write into is no longer there",
    errno.ENOTDIR: "the folder to write into is no longer there",
    errno.EISDIR: "there is a folder of that name now",
}


def require(outputs: Sequence[Output]) -> None:
    """Raise UsageError if a folder has less room than the files take at least."""
    for folder in {os.path.dirname(os.path.abspath(output.target)) for output in outputs}:
        least = sum(o.nbytes for o in outputs if os.path.dirname(os.path.abspath(o.target)) == folder)
        free = _free(folder)
        if free is not None and least > free:
            raise UsageError(_no_room(least, free), file=outputs[0].target)


def explained(
    error: OSError, file: str, outputs: Sequence[Output], temporaries: Iterable[str]
) -> CkpttoolError:
    """Return what a person is told of an error of the operating system; `temporaries` are still there."""
    written = sum(os.path.getsize(each) for each in temporaries if os.path.isfile(each))
    least = max(written, sum(output.nbytes for output in outputs))
    if error.errno == errno.ENOSPC:
        free = _free(os.path.dirname(os.path.abspath(file)))
        return UsageError(_no_room(least, None if free is None else free + written), file=file)
    if error.errno == errno.EDQUOT:
        said = "there is no space left to write the target within the disk quota"
        return UsageError(f"{said}: it takes {least:,} bytes or more", file=file)
    words = _WORDS.get(error.errno or 0, error.strerror or str(error))
    size = f"; the target takes {least:,} bytes or more" if error.errno == errno.EFBIG else ""
    return UsageError(f"the target cannot be written: {words}{size}", file=file)


def _no_room(least: int, free: int | None) -> str:
    known = "" if free is None else f", and {free:,} are free"
    return f"there is no space left to write the target: it takes {least:,} bytes or more{known}"


def _free(folder: str) -> int | None:
    """Return the bytes that may be written, None where the file system does not say."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None
