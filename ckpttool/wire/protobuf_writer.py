"""Writing the protobuf wire format: each function returns one field's bytes, none for proto3's default.

A message is its fields' bytes side by side, in the order of their numbers. The reader is wire.protobuf.
Source: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import struct

from ckpttool.wire import varint
from ckpttool.wire.protobuf import BYTES, FIXED32, FIXED64, VARINT

_BITS = (1 << 64) - 1


def number(field: int, value: int) -> bytes:
    """Return an integer or enum field (a negative one as the 64 bits of its two's complement)."""
    return varint.write(field << 3 | VARINT) + varint.write(value & _BITS) if value else b""


def fixed32(field: int, value: int) -> bytes:
    """Return a field of 32 bits."""
    return varint.write(field << 3 | FIXED32) + value.to_bytes(4, "little") if value else b""


def float32(field: int, value: float) -> bytes:
    """Return a float field, which is there even if it is zero, as one of a `oneof` must be."""
    return varint.write(field << 3 | FIXED32) + struct.pack("<f", value)


def float64(field: int, value: float) -> bytes:
    """Return a double field, which is there even if it is zero."""
    return varint.write(field << 3 | FIXED64) + struct.pack("<d", value)


def message(field: int, data: bytes) -> bytes:
    """Return a submessage, which is there even if it is empty."""
    return varint.write(field << 3 | BYTES) + varint.write(len(data)) + data


def text(field: int, value: str) -> bytes:
    """Return a string field; lone surrogates become the bytes that protobuf.text made them from."""
    return message(field, value.encode("utf-8", "surrogateescape")) if value else b""
