"""Numbers of the small arrays that are facts of an agent (bounds, statistics), and tensors of numbers."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ckpttool.leaf import Leaf
from ckpttool.source import Inline

_CODES = {"float32": "f", "float64": "d"}
# A view can be larger than its file; no agent has that many actions or observations.
_MOST = 1 << 20


def numbers(found: object) -> tuple[float, ...]:
    """Return a tensor's numbers, flat; none of what is no tensor of float32 or float64, or is a large one."""
    if not isinstance(found, Leaf) or found.dtype not in _CODES or found.size > _MOST:
        return ()
    return unpacked(bytes(found.read()), found.dtype)


def unpacked(data: bytes, dtype: str) -> tuple[float, ...]:
    """Return the little-endian numbers of float32 or float64 that the bytes are; a rest is left out."""
    size = struct.calcsize(_CODES[dtype])
    count = len(data) // size
    return struct.unpack(f"<{count}{_CODES[dtype]}", data[: count * size])


def tensor(values: Sequence[float], name: str = "") -> Leaf:
    """Return the numbers as a float64 tensor [n] that no file holds."""
    packed = struct.pack(f"<{len(values)}d", *values)
    return Leaf("float64", (len(values),), Inline(packed), name, "buffer")
