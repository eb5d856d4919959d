"""A tensor's bytes for a writer: all of them, as many as its shape has."""

from __future__ import annotations

from ckpttool.errors import FormatError
from ckpttool.leaf import Leaf, Path, display
from ckpttool.source import Buffer


def data(leaf: Leaf, path: Path) -> Buffer:
    """Return the tensor's bytes; raise FormatError unless there are as many as its shape and type need."""
    found = leaf.read()
    nbytes = memoryview(found).nbytes
    if nbytes != leaf.nbytes:
        raise FormatError(
            "a tensor's bytes do not fill its shape",
            path=display(path),
            expected=f"{leaf.nbytes:,} bytes",
            found=f"{nbytes:,}",
        )
    return found
