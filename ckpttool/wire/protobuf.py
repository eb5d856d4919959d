"""The protobuf wire format: a message's fields as plain numbers and byte runs, by protobuf's rules.

Source: protobuf.dev/programming-guides/encoding. If a field that is not repeated occurs several times, the
last number or string counts, and messages are merged: `joined` returns their bytes one after the other,
which encode the merged message. A field with another wire type than its schema's is refused, where
protobuf's own parser would take it for an unknown field and pass it over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from ckpttool.errors import FormatError, TruncatedError
from ckpttool.wire import varint

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_WIDTH = {FIXED64: 8, FIXED32: 4}
_TAG_BYTES = 5

# What a schema says of a field: the set of its wire types. Repeated numbers are packed or not.
NUMBER, DELIMITED, WORD, LONG = 1 << VARINT, 1 << BYTES, 1 << FIXED32, 1 << FIXED64
NUMBERS, WORDS, LONGS = NUMBER | DELIMITED, WORD | DELIMITED, LONG | DELIMITED
Schema = Mapping[int, int]

Data = TypeVar("Data", bytes, memoryview)


def fields(data: Data, schema: Schema | None = None) -> list[tuple[int, int | Data]]:
    """Return the message's fields in order, each a number with an unsigned int or a run of bytes.

    With a schema, return only the fields that it has, and raise FormatError for one with another wire type.

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
                if schema is None or _fits(schema.get(tag >> 3), VARINT, at):
                    found.append((tag >> 3, value))
                continue
            end = at + 2 + value
            if wire == BYTES and value < 0x80 and end <= stop:
                if schema is None or _fits(schema.get(tag >> 3), BYTES, at):
                    found.append((tag >> 3, data[at + 2 : end]))
                at = end
                continue
        wire, field, at = _field(data, at, stop)
        if schema is None or _fits(schema.get(field[0]), wire, at):
            found.append(field)
    return found


def each(
    data: Data, schema: Schema | None = None, count: Callable[[int], None] | None = None
) -> Iterator[tuple[int, int | Data]]:
    """Go through the message's fields one at a time, for messages that may have more than should be kept.

    `count` is called with 1 for every field, those that the schema lacks among them.
    """
    at, stop = 0, len(data)
    while at < stop:
        wire, field, at = _field(data, at, stop)
        if count is not None:
            count(1)
        if schema is None or _fits(schema.get(field[0]), wire, at):
            yield field


def located(
    data: Data, start: int, stop: int, schema: Schema, count: Callable[[int], None]
) -> Iterator[tuple[int, int | Data, int]]:
    """Go through the fields of the message between two positions, each with the position after it.

    A run of bytes begins its own length before that position, so that it can be read from the file later.
    """
    at = start
    while at < stop:
        wire, (field, value), at = _field(data, at, stop)
        count(1)
        if _fits(schema.get(field), wire, at):
            yield field, value, at


def _fits(kinds: int | None, wire: int, at: int) -> bool:
    """Return whether the schema has the field; raise FormatError if its values have other wire types."""
    if kinds is None:
        return False
    if kinds >> wire & 1:
        return True
    if wire == BYTES:
        raise FormatError("a protobuf field holds bytes where a number belongs", offset=at)
    what = "a message or a string" if kinds == DELIMITED else "a number of another width"
    raise FormatError(f"a protobuf field holds a number where {what} belongs", offset=at)


def joined(parts: Sequence[Data], empty: Data) -> Data:
    """Return the message that comes in these parts: protobuf merges the occurrences of a singular message."""
    if len(parts) < 2:
        return parts[0] if parts else empty
    whole = b"".join(parts)
    return memoryview(whole) if isinstance(empty, memoryview) else whole


def _field(data: Data, start: int, stop: int) -> tuple[int, tuple[int, int | Data], int]:
    """Return the wire type of the field at `start`, the field, and the position after it."""
    tag, at = varint.read(data, start, stop)
    wire, number = tag & 7, tag >> 3
    if not 0 < number < 1 << 29 or at - start > _TAG_BYTES:
        raise FormatError("a protobuf field has an impossible number", offset=start, found=str(number))
    if wire == VARINT:
        value, at = varint.read(data, at, stop)
        return wire, (number, value), at
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
    return wire, (number, run if wire == BYTES else int.from_bytes(run, "little")), at + width


def number(value: int | bytes | memoryview) -> int:
    """Return a field's value that must be a number, as a signed one (see varint.signed)."""
    if not isinstance(value, int):
        raise FormatError("a protobuf field holds bytes where a number belongs")
    return value if value < 1 << 63 else varint.signed(value)


def int32(value: int | bytes | memoryview) -> int:
    """Return the value of an int32 or enum field, of which protobuf keeps the low 32 bits."""
    low = number(value) & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low


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
