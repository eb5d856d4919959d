"""Sources that only a tensor bundle has: strings, variants, and missing shards."""

from __future__ import annotations

import os
import sys
from array import array
from typing import Literal, NamedTuple

from ckpttool import limits
from ckpttool.errors import FormatError, TruncatedError
from ckpttool.source import Checksum, Span
from ckpttool.wire import crc, varint

Order = Literal["little", "big"]


class Missing(NamedTuple):
    """A tensor whose shard is not there; `checksum` is that of its bytes, as the index has it."""

    path: str
    checksum: Checksum

    def read(self) -> bytes:
        """Raise TruncatedError."""
        raise TruncatedError(f"shard {os.path.basename(self.path)} is missing", file=self.path)


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
        if self.elements > limits.current().strings:
            raise limits.exceeded(
                "strings", "the tensor has too many strings", self.elements, file=self.span.file.path
            )
        data = bytes(self.span.read())
        lengths, at = array("Q"), 0
        for _ in range(self.elements):
            length, at = varint.read(data, at, len(data))
            lengths.append(length)
        if len(data) - at - 4 != sum(lengths):
            raise _broken(self.span, "the lengths of the strings do not add up to the tensor's size")
        order: Order = "big" if self.big_endian else "little"
        running = crc.crc32c(_fixed(lengths, order))
        stored = data[at : at + 4]
        _require(crc.unmask(int.from_bytes(stored, order)), running, self.span)
        _require(self.checksum, crc.crc32c(data[at + 4 :], crc.crc32c(stored, running)), self.span)
        at += 4
        found = bytearray()
        for length in lengths:
            found += length.to_bytes(8, "little")
            found += data[at : at + length]
            at += length
        return bytes(found)


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
        data = bytes(self.span.read())
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


def _fixed(lengths: array[int], order: Order) -> bytes:
    """Return the lengths as their checksum takes them: u32, or u64 for one of 4 GiB and more."""
    if max(lengths, default=0) >= 1 << 32:
        return b"".join(n.to_bytes(4 if n < 1 << 32 else 8, order) for n in lengths)
    small = array("I", lengths)
    if order != sys.byteorder:
        small.byteswap()
    return small.tobytes()


def _require(expected: int, found: int, span: Span) -> None:
    Checksum("crc32c", expected).require(found, span.length, span.file.path, span.offset)


def _broken(span: Span, message: str) -> FormatError:
    return FormatError(message, file=span.file.path, offset=span.offset)
