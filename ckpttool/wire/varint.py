"""Base-128 varints: the little-endian, seven-bits-a-byte numbers of protobuf and sstables."""

from __future__ import annotations

from ckpttool.errors import FormatError, TruncatedError

LONGEST = 10
_SIGN, _RANGE = 1 << 63, 1 << 64


def read(data: bytes | memoryview, at: int, stop: int) -> tuple[int, int]:
    """Return the unsigned 64-bit number at `at` and the position after it; never look beyond `stop`."""
    if stop - at >= 2:
        # One or two bytes hold nearly every number; the loop costs three times as much.
        low, high = data[at], data[at + 1]
        if low < 0x80:
            return low, at + 1
        if high < 0x80:
            return low & 0x7F | high << 7, at + 2
    value = shift = 0
    for position in range(at, min(stop, at + LONGEST)):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >= _RANGE:
                raise FormatError("a varint has more than 64 bits", offset=at)
            return value, position + 1
        shift += 7
    if stop - at >= LONGEST:
        raise FormatError("a varint is longer than 10 bytes", offset=at)
    raise TruncatedError("a varint is cut off", offset=at)


def write(value: int) -> bytes:
    """Return the shortest varint of an unsigned number."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def signed(value: int) -> int:
    """Read an unsigned 64-bit number as two's complement, as protobuf's int32 and int64 are."""
    return value - _RANGE if value >= _SIGN else value
