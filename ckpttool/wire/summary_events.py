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
    step, found = 0, None
    for number, value in protobuf.fields(data):
        if number == _STEP:
            step = protobuf.number(value)
        elif number == _SUMMARY:
            found = protobuf.message(value)
    if found is None:
        return
    for number, value in protobuf.fields(found):
        if number != _VALUE:
            continue
        fields = dict(protobuf.fields(protobuf.message(value)))
        tag = wanted.get(bytes(protobuf.message(fields.get(_TAG, b""))))
        scalar = None if tag is None else _scalar(fields)
        if tag is not None and scalar is not None:
            yield Scalar(tag, step, scalar)


def _scalar(fields: Mapping[int, int | bytes]) -> float | None:
    """Return the number of a summary's value, None for pictures, histograms and whatever has dimensions."""
    simple = fields.get(_SIMPLE)
    if isinstance(simple, int):
        return float(struct.unpack("<f", _bits(simple, 4))[0])
    if _TENSOR not in fields:
        return None
    tensor = dict(protobuf.fields(protobuf.message(fields[_TENSOR])))
    shape = protobuf.message(tensor.get(_SHAPE, b""))
    kind = _TYPES.get(protobuf.number(tensor.get(_DTYPE, 0)))
    if kind is None or any(number == _DIM for number, _ in protobuf.fields(shape)):
        return None
    field, form = kind
    return _element(tensor, field, form)


def _element(tensor: Mapping[int, int | bytes], field: int, form: str) -> float:
    """Return the one element of a tensor; one without values is zero, as everywhere in protobuf."""
    size = struct.calcsize(form)
    content = protobuf.message(tensor.get(_CONTENT, b""))
    stored = tensor.get(field, content if len(content) else None)
    if stored is None:
        return 0.0
    if form in ("<i", "<q") and field in tensor:
        (found,) = protobuf.numbers(stored)[:1] or [0]
        return float(found)
    data = _bits(stored, size) if isinstance(stored, int) else bytes(stored)
    if len(data) != size:
        raise FormatError("a scalar has another size than its type", expected=str(size), found=str(len(data)))
    return float(struct.unpack(form, data)[0])


def _bits(value: int, size: int) -> bytes:
    try:
        return value.to_bytes(size, "little")
    except OverflowError as error:
        raise FormatError("a number is wider than its field") from error
