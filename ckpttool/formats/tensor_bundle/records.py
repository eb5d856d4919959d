"""The records of a TensorFlow tensor bundle: its header and its entries.

Field numbers are those of tensorflow/core/protobuf/tensor_bundle.proto.
"""

from __future__ import annotations

from typing import NamedTuple

from ckpttool.errors import FormatError
from ckpttool.formats import tensor_protos
from ckpttool.formats.tensor_protos import Extent
from ckpttool.wire import crc, protobuf, varint

# What TensorFlow's own reader and writer call themselves (tensor_bundle.cc, kTensorBundleVersion).
VERSION = 1


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
    for number, value in protobuf.fields(data):
        if number in numbers:
            numbers[number] = protobuf.number(value)
        elif number == 3:
            for part, what in protobuf.fields(protobuf.message(value)):
                if part in version:
                    version[part] += _packed(what)
    if numbers[2] not in (0, 1):
        raise FormatError("the header's endianness is neither little nor big", found=str(numbers[2]))
    return Header(numbers[1], bool(numbers[2]), version[1][-1], version[2][-1], tuple(version[3]))


def entry(data: bytes) -> Entry:
    """Decode a BundleEntryProto; every number is as stored, its sign included, and not yet judged."""
    numbers = [0, 0, 0, 0, 0, 0, 0]
    shape: tuple[int, ...] = ()
    slices: list[tuple[Extent, ...]] = []
    for number, value in protobuf.fields(data):
        if number == 2:
            shape = tensor_protos.shape(protobuf.message(value))
        elif number == 7:
            slices.append(tensor_protos.extents(protobuf.message(value)))
        elif number < 7:
            numbers[number] = protobuf.number(value)
    _, dtype, _, shard, offset, size, checksum = numbers
    return Entry(dtype, shape, shard, offset, size, crc.unmask(checksum), tuple(slices))


def _packed(value: int | bytes) -> list[int]:
    if isinstance(value, int):
        return [varint.signed(value)]
    found, at = [], 0
    while at < len(value):
        number, at = varint.read(value, at, len(value))
        found.append(varint.signed(number))
    return found
