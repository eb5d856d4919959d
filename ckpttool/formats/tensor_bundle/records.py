"""The records of a TensorFlow tensor bundle: its header and its entries.

Field numbers are those of tensorflow/core/protobuf/tensor_bundle.proto.
"""

from __future__ import annotations

from typing import NamedTuple

from ckpttool.errors import FormatError
from ckpttool.formats import tensor_protos
from ckpttool.formats.tensor_protos import Extent
from ckpttool.wire import crc, protobuf

# What TensorFlow's own reader and writer call themselves (tensor_bundle.cc, kTensorBundleVersion).
VERSION = 1

# num_shards, endianness, version; dtype, shape, shard_id, offset, size, crc32c, slices.
_HEADER = {1: protobuf.NUMBER, 2: protobuf.NUMBER, 3: protobuf.DELIMITED}
_ENTRY = {
    **dict.fromkeys((1, 3, 4, 5), protobuf.NUMBER),
    **dict.fromkeys((2, 7), protobuf.DELIMITED),
    6: protobuf.WORD,
}
_INT32 = (1, 3)


class Header(NamedTuple):
    """What the entry with the empty key says about the whole bundle."""

    shards: int
    big_endian: bool
    producer: int
    min_consumer: int
    bad_consumers: tuple[int, ...]


class Entry(NamedTuple):
    """Where one tensor is, or which slices it was cut into; `dtype` is TensorFlow's number."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    slices: tuple[tuple[Extent, ...], ...]


def header(data: bytes) -> Header:
    """Decode a BundleHeaderProto."""
    numbers = {1: 0, 2: 0}
    version: dict[int, list[int]] = {1: [0], 2: [0], 3: []}
    for number, value in protobuf.fields(data, _HEADER):
        if number in numbers:
            numbers[number] = protobuf.int32(value)
        else:
            # The occurrences of a message are merged: of scalars the last one counts, lists grow.
            for part, what in protobuf.fields(protobuf.message(value), tensor_protos.VERSIONS):
                version[part] += map(protobuf.int32, protobuf.numbers(what))
    if numbers[2] not in (0, 1):
        raise FormatError("the header's endianness is neither little nor big", found=str(numbers[2]))
    return Header(numbers[1], bool(numbers[2]), version[1][-1], version[2][-1], tuple(version[3]))


def entry(data: bytes) -> Entry:
    """Decode a BundleEntryProto; every number is as stored, its sign included, and not yet judged."""
    numbers = [0, 0, 0, 0, 0, 0, 0]
    shape: list[bytes] = []
    slices: list[tuple[Extent, ...]] = []
    for number, value in protobuf.fields(data, _ENTRY):
        if number == 2:
            shape.append(protobuf.message(value))
        elif number == 7:
            slices.append(tensor_protos.extents(protobuf.message(value)))
        else:
            numbers[number] = protobuf.int32(value) if number in _INT32 else protobuf.number(value)
    _, dtype, _, shard, offset, size, checksum = numbers
    extents = tensor_protos.shape(protobuf.joined(shape, b""))
    return Entry(dtype, extents, shard, offset, size, crc.unmask(checksum), tuple(slices))
