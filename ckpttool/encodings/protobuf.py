"""Protocol buffers, TFRecord framing and TensorBoard event files."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from ckpttool.core import source
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import ChecksumError, CkpttoolError, FormatError, TruncatedError
from ckpttool.core.source import File

MAX_VARINT_BYTES = 10
_SIGN, _RANGE = 1 << 63, 1 << 64


def read_varint(data: bytes | memoryview, at: int, stop: int) -> tuple[int, int]:
    """Return the unsigned 64-bit number at `at` and the position after it; never read past `stop`."""
    if stop - at >= 2:
        # Nearly every number has one or two bytes; the loop is three times slower.
        low, high = data[at], data[at + 1]
        if low < 0x80:
            return low, at + 1
        if high < 0x80:
            return low & 0x7F | high << 7, at + 2
    value = shift = 0
    for position in range(at, min(stop, at + MAX_VARINT_BYTES)):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >= _RANGE:
                raise FormatError("a varint has more than 64 bits", offset=at)
            return value, position + 1
        shift += 7
    if stop - at >= MAX_VARINT_BYTES:
        raise FormatError("a varint is longer than 10 bytes", offset=at)
    raise TruncatedError("a varint is truncated", offset=at)


def encode_varint(value: int) -> bytes:
    """Return the shortest varint of an unsigned number."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def to_signed(value: int) -> int:
    """Return an unsigned 64-bit number as two's complement, like protobuf's int32 and int64."""
    return value - _RANGE if value >= _SIGN else value


VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_WIDTH = {FIXED64: 8, FIXED32: 4}
_TAG_BYTES = 5

# Schema of a field: the set of its wire types. Repeated numbers may be packed or not.
NUMBER, DELIMITED, WORD, LONG = 1 << VARINT, 1 << BYTES, 1 << FIXED32, 1 << FIXED64
NUMBERS, WORDS, LONGS = NUMBER | DELIMITED, WORD | DELIMITED, LONG | DELIMITED
Schema = Mapping[int, int]

Data = TypeVar("Data", bytes, memoryview)


def parse_fields(data: Data, schema: Schema | None = None) -> list[tuple[int, int | Data]]:
    """Return the message's fields in order, each a number with an unsigned int or a run of bytes.

    With a schema, return only its fields, and raise FormatError for one with another wire type.

    Submessages stay runs of bytes, which the caller may parse, so hostile nesting costs nothing. Groups
    (deprecated, unused by TensorFlow) are rejected. Source: protobuf.dev/programming-guides/encoding. If a
    field that is not repeated occurs several times, the last number or string counts, and messages are
    merged: `merge_messages` returns their bytes one after the other, which encode the merged message. A field
    with another wire type than its schema's is rejected; protobuf's own parser would skip it as an unknown
    field.
    """
    fields: list[tuple[int, int | Data]] = []
    at, stop = 0, len(data)
    while at < stop:
        tag = data[at]
        # Nearly every tag, length and number is one or two bytes long: those cases are inlined.
        if 7 < tag < 0x80 and at + 1 < stop:
            wire, value = tag & 7, data[at + 1]
            if wire == VARINT:
                if value < 0x80:
                    at += 2
                else:
                    value, at = read_varint(data, at + 1, stop)
                kinds = NUMBER if schema is None else schema.get(tag >> 3)
                if kinds is not None and (kinds & NUMBER or _matches_schema(kinds, VARINT, at)):
                    fields.append((tag >> 3, value))
                continue
            end = at + 2 + value
            if wire == BYTES and value < 0x80 and end <= stop:
                kinds = DELIMITED if schema is None else schema.get(tag >> 3)
                if kinds is not None and (kinds & DELIMITED or _matches_schema(kinds, BYTES, at)):
                    fields.append((tag >> 3, data[at + 2 : end]))
                at = end
                continue
        wire, field, at = _read_field(data, at, stop)
        if schema is None or _matches_schema(schema.get(field[0]), wire, at):
            fields.append(field)
    return fields


def iter_fields(
    data: Data, schema: Schema | None = None, count: Callable[[int], None] | None = None
) -> Iterator[tuple[int, int | Data]]:
    """Yield the message's fields one at a time, for messages with too many fields to keep.

    `count` is called with 1 for every field, including those outside the schema.
    """
    at, stop = 0, len(data)
    while at < stop:
        wire, field, at = _read_field(data, at, stop)
        if count is not None:
            count(1)
        if schema is None or _matches_schema(schema.get(field[0]), wire, at):
            yield field


def iter_located_fields(
    data: Data, start: int, stop: int, schema: Schema, count: Callable[[int], None]
) -> Iterator[tuple[int, int | Data, int]]:
    """Yield the fields of the message between two positions, each with the position after it.

    A run of bytes starts its own length before that position, so it can be read from the file later.

    Args:
        data: the bytes with the message.
        start: where the message begins.
        stop: where it ends.
        schema: the fields that are yielded, with their wire types.
        count: called with 1 for every field, including those outside the schema.
    """
    at = start
    while at < stop:
        wire, (field, value), at = _read_field(data, at, stop)
        count(1)
        if _matches_schema(schema.get(field), wire, at):
            yield field, value, at


def _matches_schema(kinds: int | None, wire: int, at: int) -> bool:
    """Return whether the schema has the field; raise FormatError if its values have other wire types."""
    if kinds is None:
        return False
    if kinds >> wire & 1:
        return True
    if wire == BYTES:
        raise FormatError("a protobuf field contains bytes instead of a number", offset=at)
    wrong = "instead of a message or a string" if kinds == DELIMITED else "of the wrong width"
    raise FormatError(f"a protobuf field contains a number {wrong}", offset=at)


def merge_messages(parts: Sequence[Data], empty: Data) -> Data:
    """Return the message merged from these parts, as protobuf merges repeated singular messages."""
    if len(parts) < 2:
        return parts[0] if parts else empty
    whole = b"".join(parts)
    return memoryview(whole) if isinstance(empty, memoryview) else whole


def _read_field(data: Data, start: int, stop: int) -> tuple[int, tuple[int, int | Data], int]:
    """Return the wire type of the field at `start`, the field, and the position after it."""
    tag, at = read_varint(data, start, stop)
    wire, number = tag & 7, tag >> 3
    if not 0 < number < 1 << 29 or at - start > _TAG_BYTES:
        raise FormatError("a protobuf field has an invalid number", offset=start, found=str(number))
    if wire == VARINT:
        value, at = read_varint(data, at, stop)
        return wire, (number, value), at
    if wire == BYTES:
        width, at = read_varint(data, at, stop)
    elif wire in _WIDTH:
        width = _WIDTH[wire]
    else:
        raise FormatError("a protobuf field has an unsupported wire type", offset=start, found=str(wire))
    if width > stop - at:
        raise TruncatedError(
            "a protobuf field is longer than its message",
            offset=start,
            expected=f"{width:,} bytes",
            found=f"{stop - at:,}",
        )
    run = data[at : at + width]
    return wire, (number, run if wire == BYTES else int.from_bytes(run, "little")), at + width


def as_int(value: int | bytes | memoryview) -> int:
    """Return the signed value of a field that must be a number (see to_signed)."""
    if not isinstance(value, int):
        raise FormatError("a protobuf field contains bytes instead of a number")
    return value if value < 1 << 63 else to_signed(value)


def as_int32(value: int | bytes | memoryview) -> int:
    """Return the value of an int32 or enum field, of which protobuf keeps the low 32 bits."""
    low = as_int(value) & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low


def as_ints(value: int | bytes | memoryview) -> list[int]:
    """Return the signed numbers of a repeated field's value, packed or not."""
    if isinstance(value, int):
        return [as_int(value)]
    numbers, at = [], 0
    while at < len(value):
        unsigned, at = read_varint(value, at, len(value))
        numbers.append(to_signed(unsigned))
    return numbers


def as_int32s(value: int | bytes | memoryview) -> list[int]:
    """Return the numbers of a repeated int32 field's value, packed or not."""
    return [*map(as_int32, as_ints(value))]


def as_message(value: int | Data) -> Data:
    """Return the value of a field that must be a message or a string."""
    if isinstance(value, int):
        raise FormatError("a protobuf field contains a number instead of a message")
    return value


def as_text(value: int | bytes | memoryview) -> str:
    """Return a string field; bytes that are not UTF-8 become lone surrogates, so nothing is lost."""
    return as_bytes(value).decode("utf-8", "surrogateescape")


def as_bytes(value: int | bytes | memoryview) -> bytes:
    """Return the content of a string or bytes field."""
    if isinstance(value, int):
        raise FormatError("a protobuf field contains a number instead of a string")
    return bytes(value)


def _as_floats(value: int | bytes | memoryview, form: str) -> tuple[float, ...]:
    """Return the numbers of a repeated field of fixed width ("f" or "d"), packed or not."""
    width = struct.calcsize(form)
    data = value.to_bytes(width, "little") if isinstance(value, int) else value
    if len(data) % width:
        raise FormatError("a packed array ends in the middle of a number")
    return struct.unpack(f"<{len(data) // width}{form}", data)


class Kind(NamedTuple):
    """How the values of a field are decoded: wire types, conversion, and the value of an absent field.

    A field with several values is a list of them (`many` is "each"; "packed" if one value is a list of
    numbers) or the message that its parts make ("merged"); otherwise the last value counts.
    """

    wires: int
    convert: Callable[[Any], Any]
    absent: Any = None
    many: Literal["", "each", "packed", "merged"] = ""


INT, INT32 = Kind(NUMBER, as_int, 0), Kind(NUMBER, as_int32, 0)
TEXT, BINARY = Kind(DELIMITED, as_text, ""), Kind(DELIMITED, as_bytes, b"")
MESSAGE = Kind(DELIMITED, as_message, many="merged")
TEXTS, BINARIES, MESSAGES = (
    Kind(DELIMITED, convert, many="each") for convert in (as_text, as_bytes, as_message)
)
INTS = Kind(NUMBERS, as_ints, many="packed")
FLOATS = Kind(WORDS, partial(_as_floats, form="f"), many="packed")
DOUBLES = Kind(LONGS, partial(_as_floats, form="d"), many="packed")


class Message:
    """The fields of a message by number, as `decode` returns them."""

    def __init__(self, fields: Mapping[int, Kind]) -> None:
        """Prepare to decode these fields; others are skipped."""
        self.kinds = tuple(fields.values())
        self.schema = {number: kind.wires for number, kind in fields.items()}
        self.places = {
            number: (at, kind.convert, kind.many) for at, (number, kind) in enumerate(fields.items())
        }
        self.merged = [at for at, kind in enumerate(self.kinds) if kind.many == "merged"]


def decode(
    data: bytes | memoryview,
    message: Message,
    fields: Callable[[Any, Schema], Iterable[tuple[int, Any]]] = parse_fields,
    keep: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Return the values of a message's fields in the order of `message`; `keep` counts the items of lists."""
    values: list[Any] = [[] if kind.many else kind.absent for kind in message.kinds]
    for number, value in fields(data, message.schema):
        at, convert, many = message.places[number]
        if not many:
            values[at] = convert(value)
        elif many == "packed":
            values[at] += convert(value)
        else:
            values[at].append(convert(value))
            if many == "each":
                keep()
    for at in message.merged:
        values[at] = merge_messages(values[at], type(data)(b""))
    return values


_BITS = (1 << 64) - 1


def encode_int(field: int, value: int) -> bytes:
    """Return an integer or enum field (a negative one as the 64 bits of its two's complement)."""
    return encode_varint(field << 3 | VARINT) + encode_varint(value & _BITS) if value else b""


def encode_fixed32(field: int, value: int) -> bytes:
    """Return a 32-bit field."""
    return encode_varint(field << 3 | FIXED32) + value.to_bytes(4, "little") if value else b""


def encode_float(field: int, value: float) -> bytes:
    """Return a float field, written even if it is zero, as a member of a `oneof` must be."""
    return encode_varint(field << 3 | FIXED32) + struct.pack("<f", value)


def encode_double(field: int, value: float) -> bytes:
    """Return a double field, written even if it is zero."""
    return encode_varint(field << 3 | FIXED64) + struct.pack("<d", value)


def encode_message(field: int, data: bytes) -> bytes:
    """Return a submessage, written even if it is empty.

    Its data are its fields one after the other, in the order of their numbers. Source:
    https://protobuf.dev/programming-guides/encoding/
    """
    return encode_varint(field << 3 | BYTES) + encode_varint(len(data)) + data


def encode_text(field: int, value: str) -> bytes:
    """Return a string field; lone surrogates become the bytes that protobuf.text made them from."""
    return encode_message(field, value.encode("utf-8", "surrogateescape")) if value else b""


_HEADER, _FOOTER = struct.Struct("<QI"), struct.Struct("<I")
_LENGTH = 8
_BLOCK = 1 << 20
MAX_RECORD_BYTES = 16 << 20
"""Size above which records (graphs, images) are skipped unread."""


def iter_records(file: File) -> Iterator[tuple[int, bytes]]:
    """Yield the records with their offsets.

    Raise ChecksumError if a checksum is wrong, TruncatedError if the file ends inside a record: a program
    that is still writing, or was killed, leaves such an end. Records of more than MAX_RECORD_BYTES are
    skipped. A record is its length (u64), the masked CRC-32C of those eight bytes, the data, and the masked
    CRC-32C of the data, all little-endian (tensorflow/core/lib/io/record_writer.h). There is no end marker.
    """
    at = 0
    while at < file.size:
        block, start = file.read(at, min(_BLOCK, file.size - at)), at
        for offset, data in _iter_block_records(block, file, start):
            yield offset, data
            at = offset + _HEADER.size + len(data) + _FOOTER.size
        if at == start:  # the block contains no complete record
            if len(block) < _HEADER.size:
                _fail_truncated(file, at, _HEADER.size)
            (length, _) = _HEADER.unpack_from(block)
            size = _HEADER.size + length + _FOOTER.size
            if at + size > file.size:
                _fail_truncated(file, at, size)
            if length <= MAX_RECORD_BYTES:
                yield from _iter_block_records(file.read(at, size), file, at)
            at += size


def encode_record(data: bytes) -> bytes:
    """Return a record in its stored form."""
    length = len(data).to_bytes(_LENGTH, "little")
    return b"".join((length, _masked_crc(length), data, _masked_crc(data)))


def _iter_block_records(block: bytes, file: File, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield the complete records in a block of the file, which begins at `start`."""
    at, stop = 0, len(block)
    while (begin := at + _HEADER.size) <= stop:
        length, checksum = _HEADER.unpack_from(block, at)
        if source.mask_crc(source.crc32c(block[at : at + _LENGTH])) != checksum:
            _fail_checksum(file, start + at, _LENGTH)
        end = begin + length
        if end + _FOOTER.size > stop:
            return
        data = block[begin:end]
        if source.mask_crc(source.crc32c(data)) != _FOOTER.unpack_from(block, end)[0]:
            _fail_checksum(file, start + begin, length)
        yield start + at, data
        at = end + _FOOTER.size


def _masked_crc(data: bytes) -> bytes:
    return _FOOTER.pack(source.mask_crc(source.crc32c(data)))


def _fail_checksum(file: File, offset: int, size: int) -> None:
    raise ChecksumError(
        f"the checksum of {size:,} bytes does not match: the file is damaged", file=file.path, offset=offset
    )


def _fail_truncated(file: File, at: int, size: int) -> None:
    raise TruncatedError(
        "the file ends inside a record",
        file=file.path,
        offset=at,
        expected=f"{size:,} bytes",
        found=f"{file.size - at:,}",
    )


VERSION = "brain.Event:2"
NAME = "events.out.tfevents."
"""Prefix of event file names (tensorflow/core/util/events_writer.cc)."""

# Fields of Event, Summary, Value, TensorProto and TensorShapeProto.
_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY = 1, 2, 3, 5
_VALUE = 1
_TAG, _SIMPLE, _TENSOR = 1, 2, 8
_DTYPE, _SHAPE, _CONTENT = 1, 2, 4
_DIM = 2

# By type number: the format of its values in `tensor_content`, in the order of their fields below.
_INT32 = 3
_TYPES = {1: "<f", 2: "<d", 3: "<i", 9: "<q"}


_EVENT = {_STEP: NUMBER, **dict.fromkeys((3, 4, 5, 6, 7, 8, 9), DELIMITED)}
_FIELDS = {
    _TAG: DELIMITED,
    _SIMPLE: WORD,
    # obsolete_old_style_histogram, image, histo, audio, tensor
    **dict.fromkeys((3, 4, 5, 6, _TENSOR), DELIMITED),
}
_TENSOR_FIELDS = Message(
    {_DTYPE: INT32, _SHAPE: MESSAGE, _CONTENT: BINARY, 5: FLOATS, 6: DOUBLES, 7: INTS, 10: INTS}
)


class ScalarEvent(NamedTuple):
    """One value of one tag."""

    tag: str
    step: int
    value: float


def iter_scalars(file: File, tags: Collection[str]) -> Iterator[ScalarEvent]:
    """Yield the scalars of these tags, in file order.

    Raise FormatError if the records are not events, and the errors of `iter_records`. An event file is a
    record file (TFRecord) of Event messages (tensorflow/core/util/event.proto), each with a step and
    optionally a Summary (tensorflow/core/framework/summary.proto). A scalar is a `simple_value`, written by
    TensorFlow 1, PyTorch and tensorboardX, or, since TensorFlow 2, a `tensor` without dimensions
    (tensorflow/core/framework/tensor.proto).
    """
    names = {tag.encode(): tag for tag in tags}
    # Most events of a training run are losses: searching the bytes takes a tenth of the time of parsing them.
    named = re.compile(b"|".join(map(re.escape, names)))
    for at, data in iter_records(file):
        if at and named.search(data) is None:
            continue
        try:
            yield from _iter_event_scalars(data, names)
        except CkpttoolError as error:
            raise FormatError("a record is not an event", file=file.path, offset=at) from error


def event_file_header(wall_time: float) -> bytes:
    """Return the first record of a file; `wall_time` is in seconds since 1970."""
    return _event_record(wall_time, 0, encode_text(_FILE_VERSION, VERSION))


def summary_record(wall_time: float, step: int, values: Mapping[str, float]) -> bytes:
    """Return a record with the values of several tags at one step."""
    messages = [
        encode_message(_VALUE, encode_text(_TAG, tag) + encode_float(_SIMPLE, value))
        for tag, value in values.items()
    ]
    return _event_record(wall_time, step, encode_message(_SUMMARY, b"".join(messages)))


def _event_record(wall_time: float, step: int, what: bytes) -> bytes:
    when = encode_double(_WALL_TIME, wall_time) + encode_int(_STEP, step)
    return encode_record(when + what)


def _iter_event_scalars(data: bytes, tags: Mapping[bytes, str]) -> Iterator[ScalarEvent]:
    step = kind = 0
    parts: list[bytes] = []
    for number, value in parse_fields(data, _EVENT):
        if number == _STEP:
            step = as_int(value)
        else:
            # The content of an event is a oneof: the last one counts, and its parts are merged.
            kind, parts = number, [*(parts if number == kind else ()), as_message(value)]
    if kind != _SUMMARY:
        return
    for _, value in parse_fields(merge_messages(parts, b""), {_VALUE: DELIMITED}):
        tag, scalar = _parse_summary_value(as_message(value), tags)
        if tag is not None and scalar is not None:
            yield ScalarEvent(tag, step, scalar)


def _parse_summary_value(data: bytes, tags: Mapping[bytes, str]) -> tuple[str | None, float | None]:
    """Return the tag and number of a summary's value, None for another tag or kind of value."""
    tag, kind, simple = b"", 0, 0
    tensors: list[bytes] = []
    for number, value in parse_fields(data, _FIELDS):
        if number == _TAG:
            tag = as_message(value)
            continue
        tensors = tensors if number == kind else []
        kind = number
        if isinstance(value, int):
            simple = value
        else:
            tensors.append(value)
    if tag not in tags or kind not in (_SIMPLE, _TENSOR):
        return None, None
    if kind == _SIMPLE:
        return tags[tag], _bits_to_float(simple)
    return tags[tag], _tensor_scalar(merge_messages(tensors, b""))


def _bits_to_float(bits: int) -> float:
    return float(struct.unpack("<f", bits.to_bytes(4, "little"))[0])


def _tensor_scalar(tensor: bytes) -> float | None:
    """Return the number in a tensor without dimensions, None for others; one without values is zero."""
    dtype, shape, content, *values = decode(tensor, _TENSOR_FIELDS)
    if dtype not in _TYPES or parse_fields(shape, {_DIM: DELIMITED}):
        return None
    if content:
        return _unpack_scalar(_TYPES[dtype], content)
    numbers = values[[*_TYPES].index(dtype)]
    if len(numbers) > 1:
        raise FormatError("a scalar has several values", found=str(len(numbers)))
    return float(as_int32(numbers[0]) if dtype == _INT32 else numbers[0]) if numbers else 0.0


def _unpack_scalar(form: str, data: bytes) -> float:
    size = struct.calcsize(form)
    if len(data) != size:
        raise FormatError("a scalar's size does not match its type", expected=str(size), found=str(len(data)))
    return float(struct.unpack(form, data)[0])
