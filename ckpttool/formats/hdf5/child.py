"""Lists an HDF5 file in a process of its own: where every dataset's bytes lie, as JSON on stdout.

The HDF5 library crashes and hangs on damaged files, so nothing else runs here: no link is followed to another
file, no filter is loaded. Asked for digests, it reads chunked datasets too. process.py starts it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from ckpttool import behind, limits
from ckpttool.formats.hdf5.listing import Digests, Listing, Refused

# From this version of the superblock on, byte 11 has a flag for a writer and one for a writer with readers.
_FLAGGED, _OPEN = 3, 0b101


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
        """Fill the buffer; raise OSError if the window or the file ends before.

        h5py ignores the number that is returned: what is not filled would be whatever the memory held.
        """
        view = memoryview(buffer).cast("B")
        data = self._bytes(len(view))
        if len(data) != len(view):
            raise OSError("read beyond the end of the file")
        view[:] = data
        return len(data)

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes."""
        return self._bytes(size if size >= 0 else self.length)

    def _bytes(self, size: int) -> bytes:
        left = max(0, min(self.length - self.at, size))
        pieces = []
        # One call returns at most 2 GiB on Linux.
        while left > 0 and (piece := os.pread(self.descriptor, left, self.offset + self.at)):
            pieces.append(piece)
            self.at += len(piece)
            left -= len(piece)
        return b"".join(pieces)


def answer(
    descriptor: int, offset: int, length: int, digests: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Return the listing, the digests (listing.Digests), or `{"refused": [kind, sentence]}`."""
    import h5py  # type: ignore[import-untyped]

    window = Window(descriptor, offset, length)
    try:
        with h5py.File(window, "r") as file:
            _require_closed(window, file)
            return (Listing(file) if digests is None else Digests(file, *digests)).document()
    except Refused as refused:
        return {"refused": list(refused.args)}
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever h5py raises, the parent has one sentence for it
        said = f"{error}".strip("'\"").splitlines() or [type(error).__name__]
        kind = "truncated" if "truncated file" in said[0] or "beyond the end" in said[0] else "format"
        return {"refused": [kind, f"HDF5 cannot read it: {said[0][:200]}"]}


def _require_closed(window: Window, file: Any) -> None:
    """Raise Refused if the superblock (version 3) says that the file was never closed after writing.

    The library refuses such a file too, but not when it reads through a file object (H5Fint.c, H5F_open).
    """
    window.seek(file.id.get_create_plist().get_userblock())
    head = window.read(12)
    if head[8] >= _FLAGGED and head[11] & _OPEN:
        raise Refused("format", "the file was not closed after writing: its contents may be incomplete")


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
        file.create_dataset("layer/unset", (2,), "f4")
        file.create_dataset("layer/chunked", (2,), "f4", chunks=(1,))
        Digests(file, 0, 0).document()
        with contextlib.suppress(OSError):
            h5py.File(Window(-1, 0, 0), "r")


def _said(descriptor: int, offset: int, length: int, digests: tuple[int, int] | None) -> str:
    try:
        rehearse()
    except ImportError as error:
        return json.dumps({"refused": ["missing", str(error)]})
    shut()
    try:
        if digests is not None:
            behind.keep_freed_memory()  # of the library's chunks
        return json.dumps(answer(descriptor, offset, length, digests))
    except MemoryError:
        return json.dumps({"refused": ["limit", "the HDF5 library takes too much memory", "hdf5_memory"]})


def main(arguments: list[str]) -> int:
    """Print what an open file holds.

    Args:
        arguments: descriptor, offset and number of its bytes, seconds, the limits as a JSON object, and for
            digests the first dataset's number and how many bytes to read.

    """
    descriptor, offset, length, seconds = map(int, arguments[:4])
    with limits.using(limits.Limits(**json.loads(arguments[4]))):
        limit(seconds)
        first, most = map(int, arguments[5:7]) if len(arguments) > 5 else (0, 0)
        sys.stdout.write(_said(descriptor, offset, length, (first, most) if len(arguments) > 5 else None))
        sys.stdout.flush()
    # The library has nothing left to say: damaged files make it crash when it closes them.
    os._exit(0)
