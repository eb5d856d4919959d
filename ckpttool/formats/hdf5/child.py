"""Lists an HDF5 file in a process of its own: where every dataset's bytes lie, as JSON on stdout.

The HDF5 library crashes and hangs on damaged files, so nothing else runs here: no dataset with numbers is
read, no link is followed to another file, no filter is loaded. process.py starts it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from ckpttool import limits
from ckpttool.formats.hdf5.listing import Listing, Refused


def limit(seconds: int) -> None:
    """Bound this process: memory, CPU time, and no file may be written."""
    _set(AS=limits.current().hdf5_memory, CPU=seconds, FSIZE=0, CORE=0)


def shut() -> None:
    """Let this process open and start nothing more, whatever a file leads to."""
    _set(NOFILE=0, NPROC=0)


def _set(**values: int) -> None:
    try:
        import resource
    except ImportError:  # Windows: the parent's clock is all there is
        return
    for name, value in values.items():
        with contextlib.suppress(ValueError, OSError):
            # What reaches the second value of CPU is killed without a word of why.
            hard = value + 1 if name == "CPU" else value
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, hard))


class Window:
    """A part of an open file as the file object that HDF5 reads (h5py's fileobj driver)."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self.descriptor, self.offset, self.length, self.at = descriptor, offset, length, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to `offset` from the start (0), here (1) or the end (2)."""
        self.at = offset + (0, self.at, self.length)[whence]
        return self.at

    def tell(self) -> int:
        """Return where the next read begins."""
        return self.at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; raise OSError if the window ends before."""
        view = memoryview(buffer).cast("B")
        if self.at + len(view) > self.length:
            raise OSError("read beyond the end of the file")
        data = os.pread(self.descriptor, len(view), self.offset + self.at)
        view[: len(data)] = data
        self.at += len(data)
        return len(data)

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes."""
        size = max(0, min(self.length - self.at, size if size >= 0 else self.length))
        data = os.pread(self.descriptor, size, self.offset + self.at)
        self.at += len(data)
        return data


def answer(descriptor: int, offset: int, length: int) -> dict[str, Any]:
    """Return the listing, or `{"refused": [kind, sentence]}`."""
    import h5py  # type: ignore[import-untyped]

    try:
        with h5py.File(Window(descriptor, offset, length), "r") as file:
            return Listing(file).document()
    except Refused as refused:
        return {"refused": list(refused.args)}
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever h5py raises, the parent has one sentence for it
        said = f"{error}".strip("'\"").splitlines() or [type(error).__name__]
        kind = "truncated" if "truncated file" in said[0] or "beyond the end" in said[0] else "format"
        return {"refused": [kind, f"HDF5 cannot read it: {said[0][:200]}"]}


def rehearse() -> None:
    """List a small file in memory, so that all is imported that listing needs while files can be opened."""
    import h5py
    import numpy as np

    own = limits.using(limits.Limits())
    with own, h5py.File("rehearsal", "w", driver="core", backing_store=False) as file:
        file["layer/text"] = "text"
        file["layer/bytes"] = np.array([b"a"])
        file["layer/other"] = np.zeros(1, [("a", "i4")])
        file.attrs["name"] = "text"
        file.attrs["layer_names"] = np.array([b"layer"])
        Listing(file).document()
        with contextlib.suppress(OSError):
            h5py.File(Window(-1, 0, 0), "r")


def _said(descriptor: int, offset: int, length: int) -> str:
    try:
        rehearse()
    except ImportError as error:
        return json.dumps({"refused": ["missing", str(error)]})
    shut()
    try:
        return json.dumps(answer(descriptor, offset, length))
    except MemoryError:
        return json.dumps({"refused": ["limit", "listing it takes too much memory", "hdf5_memory"]})


def main(arguments: list[str]) -> int:
    """Print what an open file holds.

    Given are descriptor, offset and number of its bytes, seconds, and the limits as a JSON object.
    """
    descriptor, offset, length, seconds = map(int, arguments[:4])
    with limits.using(limits.Limits(**json.loads(arguments[4]))):
        limit(seconds)
        sys.stdout.write(_said(descriptor, offset, length))
        sys.stdout.flush()
    # The library has nothing left to say: damaged files make it crash when it closes them.
    os._exit(0)
