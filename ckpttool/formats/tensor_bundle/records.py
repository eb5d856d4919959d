"""The records of a TensorFlow tensor bundle: its header, its entries, and the names of its slices.

Field numbers are those of tensorflow/core/protobuf/tensor_bundle.proto and
tensorflow/core/framework/tensor_shape.proto and tensor_slice.proto.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from ckpttool.errors import FormatError
from ckpttool.wire import crc, protobuf, varint

# tensorflow/core/framework/tensor_shape.h: TensorShape::MaxDimensions.
MAX_RANK = 254

Extent = tuple[int, int]  # start and length; length -1 is the whole dimension


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
            shape = _shape(protobuf.message(value))
        elif number == 7:
            slices.append(_slice(protobuf.message(value)))
        elif number < 7:
            numbers[number] = protobuf.number(value)
    _, dtype, _, shard, offset, size, checksum = numbers
    return Entry(dtype, shape, shard, offset, size, crc.unmask(checksum), tuple(slices))


@functools.lru_cache(maxsize=1024)  # thousands of tensors have a few dozen shapes
def _shape(data: bytes) -> tuple[int, ...]:
    dims: list[int] = []
    for number, value in protobuf.fields(data):
        if number == 2:
            dims.append(_dim(protobuf.message(value)))
        elif number == 3 and value:
            raise FormatError("a tensor's shape has an unknown rank")
    if len(dims) > MAX_RANK:
        raise FormatError(
            "a tensor has too many dimensions", expected=f"at most {MAX_RANK}", found=str(len(dims))
        )
    return tuple(dims)


def _dim(data: bytes) -> int:
    size = 0
    for number, value in protobuf.fields(data):
        if number == 1:
            size = protobuf.number(value)
    if size < 0:
        raise FormatError("a tensor has a negative dimension", found=str(size))
    return size


def _slice(data: bytes) -> tuple[Extent, ...]:
    extents = []
    for number, value in protobuf.fields(data):
        if number == 1:
            # `length` is a oneof: absent, it means the whole dimension.
            found = {1: 0, 2: -1}
            for part, what in protobuf.fields(protobuf.message(value)):
                if part in found:
                    found[part] = protobuf.number(what)
            extents.append((found[1], found[2]))
    return tuple(extents)


def _packed(value: int | bytes) -> list[int]:
    if isinstance(value, int):
        return [varint.signed(value)]
    found, at = [], 0
    while at < len(value):
        number, at = varint.read(value, at, len(value))
        found.append(varint.signed(number))
    return found


def slice_key(name: bytes, extents: tuple[Extent, ...]) -> bytes:
    """Return the key under which a slice's own entry is stored.

    An order-preserving code (tensorflow/core/util/saved_tensor_slice_util.cc and
    tensorflow/core/lib/strings/ordered_code.cc): 0, the name, the rank, then start and length of each extent.
    """
    escaped = re.sub(rb"[\x00\xff]", lambda byte: byte[0] + bytes([255 - byte[0][0]]), name)
    numbers = b"".join(_signed(start) + _signed(length) for start, length in extents)
    return _unsigned(0) + escaped + b"\x00\x01" + _unsigned(len(extents)) + numbers


def _unsigned(value: int) -> bytes:
    digits = value.to_bytes((value.bit_length() + 7) // 8, "big")
    return bytes([len(digits)]) + digits


def _signed(value: int) -> bytes:
    magnitude = ~value if value < 0 else value
    length = 1
    while magnitude >= 1 << (7 * length - 1):
        length += 1
    # The leading one bits count the bytes; a negative number is the bitwise mirror image.
    bits = 8 * length
    code = magnitude | ((1 << length) - 1) << (bits - length)
    return (code ^ (1 << bits) - 1 if value < 0 else code).to_bytes(length, "big")
