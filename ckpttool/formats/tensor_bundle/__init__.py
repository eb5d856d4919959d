"""TensorFlow checkpoints: an index of tensors and the data shards beside it.

The format is that of tensorflow/core/util/tensor_bundle/tensor_bundle.cc. The index is an sstable
(wire.sstable) of protobuf records (records).
"""

from __future__ import annotations

import functools
import math
import os

from ckpttool import dtypes
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, FormatError, TruncatedError, UnsupportedError
from ckpttool.formats import tensor_protos
from ckpttool.formats.object_graph import KEY as GRAPH
from ckpttool.formats.object_graph import leaves
from ckpttool.formats.probe import Probe
from ckpttool.formats.tensor_bundle import locations, records
from ckpttool.formats.tensor_bundle.sources import (
    Missing,
    TensorFlowStrings,
    TensorFlowVariants,
    Unreadable,
    assembled,
)
from ckpttool.formats.tensor_protos import Extent
from ckpttool.formats.variables import Tensor, by_name
from ckpttool.source import Checksum, File, Shape, Source, Span, Swapped
from ckpttool.tree import Tree
from ckpttool.wire import protobuf, sstable

NAME = "tensor_bundle"
TITLE = "TensorFlow checkpoint (index and data shards)"
WRITES = False
FRAMEWORK = "tensorflow"

# What TensorFlow's own reader calls itself (tensor_bundle.cc, kTensorBundleVersion).
VERSION = 1
# numpy's limit; TensorFlow's is 254.
MAX_RANK = 64
MAX_ELEMENTS = 1 << 58  # of 16 bytes at most, so that sizes in bytes stay below 2^63
# The largest index that is read whole; a million variables take some 150 MB.
MAX_INDEX = 512 << 20


def claims(probe: Probe) -> str | None:
    """Return the prefix of the checkpoint that the path means, if it means one of ours."""
    return locations.prefix(probe)


def read(location: str) -> Checkpoint:
    """List the checkpoint with prefix `location`; every entry is judged, no tensor is read."""
    index = _index_file(f"{location}.index")
    try:
        entries = sstable.read(_index_bytes(index))
        listing = _Listing(location, entries)
        tensors = listing.tensors()
    except CkpttoolError as error:
        raise error.located(file=index.path) from error.__cause__
    tree, notes = _tree(tensors, index.path)
    return Checkpoint(
        location,
        NAME,
        tree,
        (index, *listing.files()),
        f"tensor bundle version {listing.header.producer}",
        "crc32c",
        (*listing.notes(), *notes),
    )


def _index_file(path: str) -> File:
    file = File.stamp(path)
    if not os.path.isfile(path):
        raise FormatError("the index is not a regular file", file=path)
    if file.size > MAX_INDEX:
        raise UnsupportedError(
            "the index is too large",
            file=path,
            expected=f"at most {MAX_INDEX:,} bytes",
            found=f"{file.size:,}",
        )
    return file


def _index_bytes(file: File) -> bytes:
    data = file.read(0, file.size)
    if data.startswith(b"version https://git-lfs"):
        raise FormatError(
            "this is a Git LFS pointer, not the file itself", file=file.path, hint="git lfs pull fetches it"
        )
    if not data:
        raise TruncatedError("the index is empty", file=file.path)
    return data


def _tree(tensors: dict[str, Tensor], index: str) -> tuple[Tree, tuple[str, ...]]:
    graph = tensors.pop(GRAPH, None)
    if graph is None:
        return by_name(tensors), ()
    if graph.dtype != "string" or graph.shape:
        raise FormatError("the object graph is not one string", file=index, path=GRAPH)
    try:
        # A scalar's bytes are one length and the string itself (see leaf.Leaf.read).
        return leaves.by_graph(bytes(graph.source.read())[8:], tensors)
    except CkpttoolError as error:
        raise error.located(file=index, path=GRAPH) from error.__cause__


class _Listing:
    """One bundle while it is listed: its header, its entries by key, and the shards looked at so far."""

    def __init__(self, prefix: str, entries: list[sstable.Entry]) -> None:
        if not entries or entries[0][0]:
            raise FormatError("the index has no header entry: it is not the index of a tensor bundle")
        self.header = _header(entries[0][1])
        self._prefix = prefix
        self._raw = entries[1:]
        self._slices = {key: value for key, value in self._raw if key[:1] == b"\0"}
        self._shards: dict[int, File | None] = {}

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by key, in the order of the index; slices belong to their tensors."""
        found = {}
        for key, value in self._raw:
            if key[:1] != b"\0":
                name = protobuf.text(key)
                try:
                    found[name] = self._tensor(key, records.entry(value))
                except CkpttoolError as error:
                    raise error.located(path=name) from error.__cause__
        return found

    def files(self) -> list[File]:
        """Return the shards that are there."""
        return [file for _, file in sorted(self._shards.items()) if file is not None]

    def notes(self) -> list[str]:
        """Name the shards that are not there."""
        missing = sorted(shard for shard, file in self._shards.items() if file is None)
        names = [os.path.basename(self._shard_path(shard)) for shard in missing]
        return [f"shard {name} is missing: its tensors are listed, not readable" for name in names]

    def _tensor(self, key: bytes, entry: records.Entry) -> Tensor:
        dtype = _dtype(entry.dtype)
        elements = _elements(entry.shape)
        if entry.slices:
            return Tensor(dtype.name, entry.shape, self._sliced(key, entry, dtype))
        return Tensor(dtype.name, entry.shape, self._source(entry, dtype, elements))

    def _source(self, entry: records.Entry, dtype: dtypes.DType, elements: int) -> Source:
        _check_size(entry, dtype, elements)
        file = self._shard(entry)
        checksum = Checksum("crc32c", entry.checksum)
        if file is None:
            return Missing(self._shard_path(entry.shard))
        big = self.header.big_endian
        if dtype.name == "string":
            return TensorFlowStrings(Span(file, entry.offset, entry.size), elements, entry.checksum, big)
        if dtype.name == "variant":
            return TensorFlowVariants(Span(file, entry.offset, entry.size), elements, entry.checksum, big)
        span = Span(file, entry.offset, entry.size, checksum)
        width = dtypes.component_size(dtype.name)
        return Swapped(span, width) if big and width > 1 else span

    def _sliced(self, key: bytes, whole: records.Entry, dtype: dtypes.DType) -> Source:
        if not dtype.itemsize:
            return Unreadable(f"{self._prefix}.index", f"a tensor of type {dtype.name} is cut into slices")
        parts = []
        for extents in whole.slices:
            value = self._slices.get(tensor_protos.slice_key(key, extents))
            if value is None:
                raise FormatError("the index lacks a slice that the tensor is made of", found=str(extents))
            entry = records.entry(value)
            box = _box(extents, whole.shape)
            shape = tuple(length for _, length in box)
            if entry.dtype != whole.dtype or entry.shape != shape or entry.slices:
                raise FormatError("a slice does not fit into its tensor", found=f"{entry.shape} at {box}")
            parts.append((box, self._source(entry, dtype, _elements(shape))))
        return assembled(dtype.name, whole.shape, parts)

    def _shard(self, entry: records.Entry) -> File | None:
        number = entry.shard
        if not 0 <= number < self.header.shards:
            raise FormatError(
                "the tensor is in a shard that the checkpoint does not have",
                expected=f"0 to {self.header.shards - 1}",
                found=str(number),
            )
        if number not in self._shards:
            self._shards[number] = self._stamp(number)
        file = self._shards[number]
        if file is not None and entry.offset + entry.size > file.size:
            raise TruncatedError(
                f"the tensor reaches beyond the end of {os.path.basename(file.path)}",
                offset=entry.offset,
                expected=f"{entry.size:,} bytes",
                found=f"{max(0, file.size - entry.offset):,}",
                hint="the shard was cut off while it was written or copied, or belongs to another save",
            )
        return file

    def _stamp(self, number: int) -> File | None:
        path = self._shard_path(number)
        if not os.path.lexists(path):
            return None
        if not os.path.isfile(path):
            raise FormatError("the shard is not a regular file", file=path)
        return File.stamp(path)

    def _shard_path(self, number: int) -> str:
        return f"{self._prefix}.data-{number:05d}-of-{self.header.shards:05d}"


def _header(data: bytes) -> records.Header:
    header = records.header(data)
    if header.shards < 1:
        raise FormatError("the header's number of shards is impossible", found=str(header.shards))
    if header.min_consumer > VERSION or VERSION in header.bad_consumers:
        raise UnsupportedError(
            "the checkpoint asks for a newer reader",
            expected=f"version {VERSION}",
            found=f"version {header.min_consumer}",
        )
    return header


# tensorflow/core/framework/types.proto; how a bundle packs them has not been seen.
_NARROW = {29: "int4", 30: "uint4", 31: "int2", 32: "uint2"}


def _dtype(number: int) -> dtypes.DType:
    dtype = dtypes.BY_TENSORFLOW.get(number)
    if number in _NARROW:
        raise UnsupportedError(
            "tensors of two or four bits an element are not read yet", found=_NARROW[number]
        )
    if dtype is None:
        raise FormatError("the tensor's type is not one that TensorFlow stores", found=f"number {number}")
    if dtype.name == "resource":
        raise FormatError("a resource handle has no bytes to store, and yet the index lists one")
    return dtype


@functools.lru_cache(maxsize=1024)  # thousands of tensors have a few dozen shapes
def _elements(shape: Shape) -> int:
    if len(shape) > MAX_RANK:
        raise UnsupportedError(
            "the tensor has too many dimensions", expected=f"at most {MAX_RANK}", found=str(len(shape))
        )
    # An extent of 0 must not hide an overflow: [2^62, 2^62, 0] fits no array either.
    if math.prod(extent or 1 for extent in shape) >= MAX_ELEMENTS:
        raise FormatError("the tensor has more elements than a file can hold", found=f"shape {list(shape)}")
    return math.prod(shape)


def _check_size(entry: records.Entry, dtype: dtypes.DType, elements: int) -> None:
    if entry.offset < 0 or entry.size < 0:
        raise FormatError("the tensor's place is negative", found=f"{entry.size} bytes at {entry.offset}")
    if dtype.itemsize:
        if entry.size != elements * dtype.itemsize:
            raise FormatError(
                "the tensor's size does not fit its shape",
                expected=f"{elements * dtype.itemsize:,} bytes for {dtype.name}{list(entry.shape)}",
                found=f"{entry.size:,}",
            )
    elif elements > entry.size:
        # Every element takes one byte at the very least.
        raise FormatError(
            "the tensor has more elements than bytes", expected=f"{elements:,}", found=f"{entry.size:,}"
        )


def _box(extents: tuple[Extent, ...], shape: Shape) -> tuple[tuple[int, int], ...]:
    if len(extents) != len(shape):
        raise FormatError("a slice has another rank than its tensor", found=str(len(extents)))
    box = []
    for (start, length), size in zip(extents, shape, strict=True):
        length = size - start if length == -1 else length
        if start < 0 or length < 0 or start + length > size:
            raise FormatError("a slice reaches beyond its tensor", found=f"{start} + {length} of {size}")
        box.append((start, length))
    return tuple(box)
