"""TensorBoard's event files: the scalars of their summaries, read and written.

An event file is a record file (wire.tfrecord) of Event messages (tensorflow/core/util/event.proto), each with
a step and perhaps a Summary (tensorflow/core/framework/summary.proto). A scalar is a `simple_value`, as
TensorFlow 1, PyTorch and tensorboardX write it, or, since TensorFlow 2, a `tensor` without dimensions
(tensorflow/core/framework/tensor.proto).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from ckpttool.errors import CkpttoolError, FormatError
from ckpttool.source import File
from ckpttool.wire import protobuf, protobuf_writer, tfrecord

VERSION = "brain.Event:2"
NAME = "events.out.tfevents."
"""How the names of event files begin (tensorflow/core/util/events_writer.cc)."""

# Fields of Event, Summary, Value, TensorProto and TensorShapeProto.
_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY = 1, 2, 3, 5
_VALUE = 1
_TAG, _SIMPLE, _TENSOR = 1, 2, 8
_DTYPE, _SHAPE, _CONTENT = 1, 2, 4
_DIM = 2

# By number of the type: the field of its values, and how they lie in `tensor_content`.
_TYPES = {1: (5, "<f"), 2: (6, "<d"), 3: (7, "<i"), 9: (10, "<q")}


_EVENT = {_STEP: protobuf.NUMBER, **dict.fromkeys((3, 4, 5, 6, 7, 8, 9), protobuf.DELIMITED)}
_FIELDS = {
    _TAG: protobuf.DELIMITED,
    _SIMPLE: protobuf.WORD,
    # obsolete_old_style_histogram, image, histo, audio, tensor
    **dict.fromkeys((3, 4, 5, 6, _TENSOR), protobuf.DELIMITED),
}
_TENSOR_FIELDS = {
    _DTYPE: protobuf.NUMBER,
    _SHAPE: protobuf.DELIMITED,
    _CONTENT: protobuf.DELIMITED,
    5: protobuf.WORDS,
    6: protobuf.LONGS,
    7: protobuf.NUMBERS,
    10: protobuf.NUMBERS,
}


class Scalar(NamedTuple):
    """One value of one tag."""

    tag: str
    step: int
    value: float


def scalars(file: File, tags: Collection[str]) -> Iterator[Scalar]:
    """Go through the scalars of these tags, in the order of the file.

    Raise FormatError for a file of records that are no events, and what `tfrecord.records` raises.
    """
    wanted = {tag.encode(): tag for tag in tags}
    # Most events of a training are losses: one look at the bytes is a tenth of taking them apart.
    named = re.compile(b"|".join(map(re.escape, wanted)))
    for at, data in tfrecord.records(file):
        if at and named.search(data) is None:
            continue
        try:
            yield from _event(data, wanted)
        except CkpttoolError as error:
            raise FormatError("a record is not an event", file=file.path, offset=at) from error


def header(wall_time: float) -> bytes:
    """Return the first record of a file; `wall_time` is in seconds since 1970."""
    return _recorded(wall_time, 0, protobuf_writer.text(_FILE_VERSION, VERSION))


def summary(wall_time: float, step: int, values: Mapping[str, float]) -> bytes:
    """Return a record with the values of several tags at one step."""
    found = [
        protobuf_writer.message(
            _VALUE, protobuf_writer.text(_TAG, tag) + protobuf_writer.float32(_SIMPLE, value)
        )
        for tag, value in values.items()
    ]
    return _recorded(wall_time, step, protobuf_writer.message(_SUMMARY, b"".join(found)))


def _recorded(wall_time: float, step: int, what: bytes) -> bytes:
    when = protobuf_writer.float64(_WALL_TIME, wall_time) + protobuf_writer.number(_STEP, step)
    return tfrecord.record(when + what)


def _event(data: bytes, wanted: Mapping[bytes, str]) -> Iterator[Scalar]:
    step = kind = 0
    parts: list[bytes] = []
    for number, value in protobuf.fields(data, _EVENT):
        if number == _STEP:
            step = protobuf.number(value)
        else:
            # What an event is about is a oneof: the last one counts, the parts of one are merged.
            kind, parts = number, [*(parts if number == kind else ()), protobuf.message(value)]
    if kind != _SUMMARY:
        return
    for _, value in protobuf.fields(protobuf.joined(parts, b""), {_VALUE: protobuf.DELIMITED}):
        tag, scalar = _value(protobuf.message(value), wanted)
        if tag is not None and scalar is not None:
            yield Scalar(tag, step, scalar)


def _value(data: bytes, wanted: Mapping[bytes, str]) -> tuple[str | None, float | None]:
    """Return the tag and the number of a summary's value, None for a tag or a value of another kind."""
    tag, kind, simple = b"", 0, 0
    tensors: list[bytes] = []
    for number, value in protobuf.fields(data, _FIELDS):
        if number == _TAG:
            tag = protobuf.message(value)
            continue
        tensors = tensors if number == kind else []
        kind = number
        if isinstance(value, int):
            simple = value
        else:
            tensors.append(value)
    if tag not in wanted or kind not in (_SIMPLE, _TENSOR):
        return None, None
    if kind == _SIMPLE:
        return wanted[tag], _float(simple)
    return wanted[tag], _element(protobuf.joined(tensors, b""))


def _float(bits: int) -> float:
    return float(struct.unpack("<f", bits.to_bytes(4, "little"))[0])


def _element(tensor: bytes) -> float | None:
    """Return the number in a tensor without dimensions, None for others; one without values is zero."""
    dtype, content, shapes = 0, b"", []
    values: dict[int, list[int | bytes]] = {field: [] for field, _ in _TYPES.values()}
    for number, value in protobuf.fields(tensor, _TENSOR_FIELDS):
        if number == _DTYPE:
            dtype = protobuf.int32(value)
        elif number == _SHAPE:
            shapes.append(protobuf.message(value))
        elif number == _CONTENT:
            content = protobuf.message(value)
        else:
            values[number].append(value)
    dims = protobuf.fields(protobuf.joined(shapes, b""), {_DIM: protobuf.DELIMITED})
    if dtype not in _TYPES or dims:
        return None
    field, form = _TYPES[dtype]
    if content:
        return _unpacked(form, content)
    if form in ("<i", "<q"):
        numbers = [each for value in values[field] for each in protobuf.numbers(value)]
        if form == "<i":
            numbers = list(map(protobuf.int32, numbers))
        return _only(numbers)
    size = struct.calcsize(form)
    data = b"".join(v.to_bytes(size, "little") if isinstance(v, int) else v for v in values[field])
    return _unpacked(form, data) if data else 0.0


def _only(numbers: list[int]) -> float:
    if len(numbers) > 1:
        raise FormatError("a scalar has several values", found=str(len(numbers)))
    return float(numbers[0]) if numbers else 0.0


def _unpacked(form: str, data: bytes) -> float:
    size = struct.calcsize(form)
    if len(data) != size:
        raise FormatError("a scalar has another size than its type", expected=str(size), found=str(len(data)))
    return float(struct.unpack(form, data)[0])
