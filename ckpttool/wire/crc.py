"""CRC-32, as zip has it; CRC-32C, and the mask that LevelDB and TensorFlow put over one stored among data."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

# tsl/lib/hash/crc32c.h: "it is problematic to compute the CRC of a string that contains embedded CRCs".
_DELTA = 0xA282EAD8
_BITS = 0xFFFFFFFF
_COPIED = 64 << 10


def crc32(data: bytes | bytearray | memoryview, running: int = 0) -> int:
    """Return the CRC-32 of `data`, or of everything before it (`running`) and `data`."""
    return (zlib.crc32 if len(data) < _COPIED else _large_crc32())(data, running)


@cache
def _large_crc32() -> Callable[[bytes | bytearray | memoryview, int], int]:
    """Return zlib-ng's function where that is installed, several times as fast as zlib's."""
    try:
        from zlib_ng import zlib_ng
    except ModuleNotFoundError:
        return zlib.crc32
    found: Callable[[bytes | bytearray | memoryview, int], int] = zlib_ng.crc32
    return found


def crc32c(data: bytes | bytearray | memoryview, running: int = 0) -> int:
    """Return the CRC-32C of `data`, or of everything before it (`running`) and `data`."""
    import google_crc32c

    if isinstance(data, bytes):
        taken: Any = data
    elif len(data) < _COPIED:
        taken = bytes(data)
    else:
        # The library refuses views, which may be released under its hands; arrays it takes without a copy.
        import numpy as np

        taken = np.frombuffer(data, np.uint8)
    found: int = google_crc32c.extend(running, taken)
    return found


def mask(value: int) -> int:
    """Return the masked form of a checksum."""
    return ((value >> 15 | value << 17) + _DELTA) & _BITS


def unmask(value: int) -> int:
    """Return the checksum whose masked form is `value`."""
    rotated = (value - _DELTA) & _BITS
    return (rotated >> 17 | rotated << 15) & _BITS
