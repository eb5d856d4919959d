"""Sources that only a tensor bundle has: strings, variants, tensors cut into slices, and missing shards."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from typing import Literal, NamedTuple

from ckpttool import dtypes
from ckpttool.errors import FormatError, TruncatedError, UnsupportedError
from ckpttool.source import Checksum, Shape, Source, Span, as_array
from ckpttool.wire import crc, varint

Order = Literal["little", "big"]
MAX_CUT_AXES = 8

Box = tuple[tuple[int, int], ...]  # start and length in each dimension


class Missing(NamedTuple):
    """A tensor whose shard is not there."""

    path: str

    def read(self) -> bytes:
        """Raise TruncatedError."""
        raise TruncatedError(f"shard {os.path.basename(self.path)} is missing", file=self.path)


class Unreadable(NamedTuple):
    """A tensor that can be listed only; `message` says why."""

    path: str
    message: str

    def read(self) -> bytes:
        """Raise UnsupportedError."""
        raise UnsupportedError(self.message, file=self.path)


class TensorFlowStrings(NamedTuple):
    """A string tensor: the lengths as varints, their own masked checksum, then all the bytes.

    The checksums run over the lengths as fixed-width numbers, not over the varints that are stored
    (tensor_bundle.cc, ReadStringTensor); `checksum` is the entry's, unmasked.
    """

    span: Span
    elements: int
    checksum: int
    big_endian: bool = False

    def read(self) -> bytes:
        """Return each element's length as u64 LE followed by its bytes."""
        data = self.span.read()
        lengths, at = [], 0
        for _ in range(self.elements):
            length, at = varint.read(data, at, len(data))
            lengths.append(length)
        if len(data) - at - 4 != sum(lengths):
            raise _broken(self.span, "the lengths of the strings do not add up to the tensor's size")
        order: Order = "big" if self.big_endian else "little"
        fixed = b"".join(n.to_bytes(4 if n < 1 << 32 else 8, order) for n in lengths)
        running = crc.crc32c(fixed)
        stored = data[at : at + 4]
        _require(crc.unmask(int.from_bytes(stored, order)), running, self.span)
        _require(self.checksum, crc.crc32c(data[at + 4 :], crc.crc32c(stored, running)), self.span)
        at += 4
        pieces: list[bytes] = []
        for length in lengths:
            pieces += (length.to_bytes(8, "little"), data[at : at + length])
            at += length
        return b"".join(pieces)


class TensorFlowVariants(NamedTuple):
    """A variant tensor (a dataset iterator's state): opaque records, each with its running checksum.

    tensor_bundle.cc, ReadVariantTensor: a varint length, a VariantTensorDataProto, a masked checksum over
    everything so far, in which lengths count as u64.
    """

    span: Span
    elements: int
    checksum: int
    big_endian: bool = False

    def read(self) -> bytes:
        """Return the bytes as stored, after their checksums."""
        data = self.span.read()
        order: Order = "big" if self.big_endian else "little"
        at = running = 0
        for _ in range(self.elements):
            length, at = varint.read(data, at, len(data))
            if length > len(data) - at - 4:
                raise _broken(self.span, "a variant reaches beyond its tensor")
            running = crc.crc32c(data[at : at + length], crc.crc32c(length.to_bytes(8, order), running))
            at += length
            stored = data[at : at + 4]
            _require(crc.unmask(int.from_bytes(stored, order)), running, self.span)
            running = crc.crc32c(stored, running)
            at += 4
        if at != len(data):
            raise _broken(self.span, "bytes follow the last variant of a tensor")
        _require(self.checksum, running, self.span)
        return data


class Assembled(NamedTuple):
    """A tensor put together from slices that cover it exactly, each a source with its place."""

    dtype: str
    shape: Shape
    parts: tuple[tuple[Box, Source], ...]

    def read(self) -> memoryview:
        """Return the whole tensor's bytes."""
        import numpy as np

        whole = np.empty(self.shape, dtypes.numpy_dtype(self.dtype))
        for box, source in self.parts:
            shape = tuple(length for _, length in box)
            place = tuple(slice(start, start + length) for start, length in box)
            whole[place] = as_array(source.read(), self.dtype, shape)
        return whole.reshape(-1).view(np.uint8).data


def assembled(dtype: str, shape: Shape, parts: list[tuple[Box, Source]]) -> Assembled:
    """Return the source of a sliced tensor; raise FormatError unless the slices cover it exactly once."""
    whole = tuple((0, extent) for extent in shape)
    boxes = [box for box, _ in parts]
    cut = [axis for axis in range(len(shape)) if any(box[axis] != whole[axis] for box in boxes)]
    if len(cut) > MAX_CUT_AXES:
        raise UnsupportedError(
            "a tensor is sliced along too many axes", expected=f"at most {MAX_CUT_AXES}", found=str(len(cut))
        )
    if not _tiles([[box[axis] for axis in cut] for box in boxes], [whole[axis] for axis in cut]):
        raise FormatError("the slices of the tensor do not cover it exactly once")
    return Assembled(dtype, shape, tuple(parts))


def _tiles(boxes: list[list[tuple[int, int]]], whole: list[tuple[int, int]]) -> bool:
    # Boxes tile the whole if and only if their corners, counted with alternating signs, add up to those of
    # the whole: they are the derivative of "how often is this element covered" along every axis.
    corners: Counter[tuple[int, ...]] = Counter()
    for box, weight in [*((box, 1) for box in boxes), (whole, -1)]:
        edges = [((start, 1), (start + length, -1)) for start, length in box]
        for corner in itertools.product(*edges):
            corners[tuple(at for at, _ in corner)] += weight * math.prod(sign for _, sign in corner)
    return not any(corners.values())


def _require(expected: int, found: int, span: Span) -> None:
    Checksum("crc32c", expected).require(found, span.length, span.file.path, span.offset)


def _broken(span: Span, message: str) -> FormatError:
    return FormatError(message, file=span.file.path, offset=span.offset)
