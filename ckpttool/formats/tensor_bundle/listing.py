"""Listing a bundle: the index, an entry for every tensor, and which shard holds it.

The format is that of tensorflow/core/util/tensor_bundle/tensor_bundle.cc. The index is an sstable
(wire.sstable) of protobuf records (records).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

from ckpttool import dtypes
from ckpttool.errors import CkpttoolError, FormatError, TruncatedError, UnsupportedError
from ckpttool.formats import tensor_protos
from ckpttool.formats.object_graph import KEY as GRAPH
from ckpttool.formats.object_graph import configs, leaves
from ckpttool.formats.slices import Unreadable, assembled, box_of
from ckpttool.formats.tensor_bundle import records
from ckpttool.formats.tensor_bundle.sources import (
    Missing,
    TensorFlowStrings,
    TensorFlowVariants,
)
from ckpttool.formats.tensor_protos import elements_of
from ckpttool.formats.variables import Tensor, by_name
from ckpttool.leaf import Path
from ckpttool.source import Checksum, File, Source, Span, Swapped
from ckpttool.tree import Container, Tree
from ckpttool.wire import protobuf, sstable

# The largest index that is read whole; a million variables take some 150 MB.
MAX_INDEX = 512 << 20
# The largest object graph that is read whole; ten thousand variables take a megabyte.
MAX_GRAPH = 256 << 20


class Found(NamedTuple):
    """What a bundle holds, the files that hold it, what says who wrote it, what a person should know."""

    tree: Tree
    files: tuple[File, ...]
    writer: str
    notes: tuple[str, ...]


def read(location: str) -> Found:
    """List the checkpoint with prefix `location`; every entry is judged, no tensor is read."""
    index = _index_file(f"{location}.index")
    try:
        entries = sstable.read(_index_bytes(index))
        listing = _Listing(location, entries)
        tensors = listing.tensors()
    except CkpttoolError as error:
        raise error.located(file=index.path) from error.__cause__
    tree, notes = _tree(tensors, index.path)
    writer = f"tensor bundle version {listing.header.producer}"
    return Found(tree, (index, *listing.files()), writer, (*listing.notes(), *notes))


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
        tree, notes = leaves.by_graph(_text(graph.source, MAX_GRAPH), tensors)
    except CkpttoolError as error:
        raise error.located(file=index, path=GRAPH) from error.__cause__
    containers, refused = _modules(tree)
    return replace(tree, containers=containers) if containers else tree, (*notes, *refused)


def _text(source: Source, most: int) -> bytes:
    # A scalar's bytes are one length and the string itself (see leaf.Leaf.read).
    if isinstance(source, TensorFlowStrings) and source.span.length > most:
        raise UnsupportedError(
            "the text is too large", expected=f"at most {most:,} bytes", found=f"{source.span.length:,}"
        )
    return bytes(source.read())[8:]


def _modules(tree: Tree) -> tuple[dict[Path, Container], list[str]]:
    """Return what stored configurations say about the objects that have one, and a note on unusable ones."""
    found: dict[Path, Container] = {}
    refused: list[str] = []
    for path, leaf in tree.tensors():
        if leaf.dtype != "string" or leaf.shape or not path or path[-1].value != configs.ATTRIBUTE:
            continue
        try:
            container = configs.container(_text(leaf.source, configs.MAX_BYTES))
        except CkpttoolError:
            refused.append(leaf.key)
            continue
        if container is not None:
            found[path[:-1]] = container
    if not refused:
        return found, []
    more = f" and {len(refused) - 1:,} more" if len(refused) > 1 else ""
    return found, [f"{refused[0]}{more}: not a configuration that can be read, passed over"]


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
        elements = elements_of(entry.shape)
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
            box = box_of(extents, whole.shape)
            shape = tuple(length for _, length in box)
            if entry.dtype != whole.dtype or entry.shape != shape or entry.slices:
                raise FormatError("a slice does not fit into its tensor", found=f"{entry.shape} at {box}")
            parts.append((box, self._source(entry, dtype, elements_of(shape))))
        return assembled(dtype.name, whole.shape, parts, f"{self._prefix}.index")

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
    if header.min_consumer > records.VERSION or records.VERSION in header.bad_consumers:
        raise UnsupportedError(
            "the checkpoint asks for a newer reader",
            expected=f"version {records.VERSION}",
            found=f"version {header.min_consumer}",
        )
    return header


def _dtype(number: int) -> dtypes.DType:
    dtype = dtypes.BY_TENSORFLOW.get(number)
    if dtype is None:
        raise FormatError("the tensor's type is not one that TensorFlow stores", found=f"number {number}")
    if dtype.name == "resource":
        raise FormatError("a resource handle has no bytes to store, and yet the index lists one")
    return dtype


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
