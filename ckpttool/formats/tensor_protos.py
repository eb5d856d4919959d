"""What TensorFlow's formats say about shapes and slices, and the names under which slices are stored.

Field numbers are those of tensorflow/core/framework/tensor_shape.proto and tensor_slice.proto.
"""

from __future__ import annotations

import functools
import math
import re

from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.wire import protobuf

# tensorflow/core/framework/tensor_shape.h: TensorShape::MaxDimensions.
MAX_RANK = 254
# numpy's limit.
READABLE_RANK = 64
MAX_ELEMENTS = 1 << 58  # of 16 bytes at most, so that sizes in bytes stay below 2^63

# Of TensorShapeProto: dim, unknown_rank; of Dim: size; of TensorSliceProto: extent; of Extent: start, length.
_SHAPE = {2: protobuf.DELIMITED, 3: protobuf.NUMBER}
_DIM = {1: protobuf.NUMBER}
_SLICE = {1: protobuf.DELIMITED}
_EXTENT = {1: protobuf.NUMBER, 2: protobuf.NUMBER}
# VersionDef (tensorflow/core/framework/versions.proto): producer, min_consumer, bad_consumers.
VERSIONS = {1: protobuf.NUMBER, 2: protobuf.NUMBER, 3: protobuf.NUMBERS}

Extent = tuple[int, int]  # start and length; length -1 is the whole dimension


@functools.lru_cache(maxsize=1024)  # thousands of tensors have a few dozen shapes
def shape(data: bytes) -> tuple[int, ...]:
    """Decode a TensorShapeProto; raise FormatError for an unknown rank or a negative dimension."""
    dims: list[int] = []
    unknown = 0
    for number, value in protobuf.fields(data, _SHAPE):
        if number == 2:
            dims.append(_dim(protobuf.message(value)))
        else:
            unknown = protobuf.number(value)
    if unknown:
        raise FormatError("a tensor's shape has an unknown rank")
    if len(dims) > MAX_RANK:
        raise FormatError(
            "a tensor has too many dimensions", expected=f"at most {MAX_RANK}", found=str(len(dims))
        )
    return tuple(dims)


@functools.lru_cache(maxsize=1024)
def elements_of(dims: tuple[int, ...]) -> int:
    """Return the number of elements of a shape; refuse more dimensions or elements than an array can have."""
    if len(dims) > READABLE_RANK:
        raise UnsupportedError(
            "the tensor has too many dimensions", expected=f"at most {READABLE_RANK}", found=str(len(dims))
        )
    # An extent of 0 must not hide an overflow: [2^62, 2^62, 0] fits no array either.
    if math.prod(extent or 1 for extent in dims) >= MAX_ELEMENTS:
        raise FormatError("the tensor has more elements than a file can hold", found=f"shape {list(dims)}")
    return math.prod(dims)


def _dim(data: bytes) -> int:
    size = 0
    for _, value in protobuf.fields(data, _DIM):
        size = protobuf.number(value)
    if size < 0:
        raise FormatError("a tensor has a negative dimension", found=str(size))
    return size


def extents(data: bytes) -> tuple[Extent, ...]:
    """Decode a TensorSliceProto: start and length in each dimension."""
    found_all = []
    for _, value in protobuf.fields(data, _SLICE):
        # `length` is a oneof: absent, it means the whole dimension.
        found = {1: 0, 2: -1}
        for part, what in protobuf.fields(protobuf.message(value), _EXTENT):
            found[part] = protobuf.number(what)
        found_all.append((found[1], found[2]))
    return tuple(found_all)


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
