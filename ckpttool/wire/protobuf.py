"""The protobuf wire format: a message's fields as plain numbers and byte runs, without any schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from ckpttool.errors import FormatError, TruncatedError
from ckpttool.wire import varint

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_WIDTH = {FIXED64: 8, FIXED32: 4}

Data = TypeVar("Data", bytes, memoryview)


def fields(data: Data) -> list[tuple[int, int | Data]]:
    """Return the message's fields in order, each a number with an unsigned int or a run of bytes.

    Nothing is nested here: a submessage is a run of bytes that the caller may look into, so hostile
    nesting costs nothing. Groups (deprecated, unused by TensorFlow) are refused.
    """
    found: list[tuple[int, int | Data]] = []
    at, stop = 0, len(data)
    while at < stop:
        tag = data[at]
        # Nearly every tag, length and number is a byte or two long: those cases are written out.
        if 7 < tag < 0x80 and at + 1 < stop:
            wire, value = tag & 7, data[at + 1]
            if wire == VARINT:
                if value < 0x80:
                    at += 2
                else:
                    value, at = varint.read(data, at + 1, stop)
                found.append((tag >> 3, value))
                continue
            end = at + 2 + value
            if wire == BYTES and value < 0x80 and end <= stop:
                found.append((tag >> 3, data[at + 2 : end]))
                at = end
                continue
        field, at = _field(data, at, stop)
        found.append(field)
    return found


def each(data: Data) -> Iterator[tuple[int, int | Data]]:
    """Go through the message's fields one at a time, for messages that may have more than should be kept."""
    at, stop = 0, len(data)
    while at < stop:
        field, at = _field(data, at, stop)
        yield field


def _field(data: Data, start: int, stop: int) -> tuple[tuple[int, int | Data], int]:
    tag, at = varint.read(data, start, stop)
    wire, number = tag & 7, tag >> 3
    if not 0 < number < 1 << 29:
        raise FormatError("a protobuf field has an impossible number", offset=start, found=str(number))
    if wire == VARINT:
        value, at = varint.read(data, at, stop)
        return (number, value), at
    if wire == BYTES:
        width, at = varint.read(data, at, stop)
    elif wire in _WIDTH:
        width = _WIDTH[wire]
    else:
        raise FormatError("a protobuf field has an unusable wire type", offset=start, found=str(wire))
    if width > stop - at:
        raise TruncatedError(
            "a protobuf field is longer than its message",
            offset=start,
            expected=f"{width:,} bytes",
            found=f"{stop - at:,}",
        )
    run = data[at : at + width]
    return (number, run if wire == BYTES else int.from_bytes(run, "little")), at + width


def number(value: int | bytes | memoryview) -> int:
    """Return a field's value that must be a number, as a signed one (see varint.signed)."""
    if not isinstance(value, int):
        raise FormatError("a protobuf field holds bytes where a number belongs")
    return value if value < 1 << 63 else varint.signed(value)


def numbers(value: int | bytes | memoryview) -> list[int]:
    """Return the numbers of a repeated field's value, packed or not, as signed ones."""
    if isinstance(value, int):
        return [number(value)]
    found, at = [], 0
    while at < len(value):
        unsigned, at = varint.read(value, at, len(value))
        found.append(varint.signed(unsigned))
    return found


def message(value: int | Data) -> Data:
    """Return a field's value that must be a message or a string."""
    if isinstance(value, int):
        raise FormatError("a protobuf field holds a number where a message belongs")
    return value


def text(value: int | bytes | memoryview) -> str:
    """Return a string field; bytes that are not UTF-8 become lone surrogates, so that nothing is lost."""
    if isinstance(value, int):
        raise FormatError("a protobuf field holds a number where a string belongs")
    return bytes(value).decode("utf-8", "surrogateescape")
