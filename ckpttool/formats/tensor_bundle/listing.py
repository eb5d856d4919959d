"""Listing a bundle: the index, an entry for every tensor, and which shard holds it.

The format is that of tensorflow/core/util/tensor_bundle/tensor_bundle.cc. The index is an sstable
(wire.sstable) of protobuf records (records).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ckpttool import dtypes, limits, places
from ckpttool.errors import CkpttoolError, FormatError, TruncatedError, UnsupportedError, some
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
from ckpttool.shown import count
from ckpttool.source import Checksum, File, Source, Span, Swapped
from ckpttool.tree import Container, Tree
from ckpttool.wire import protobuf, sstable

SHOWN = 3  # names in a note


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
    if not places.isfile(path):
        raise FormatError("the index is not a regular file", file=path)
    if file.size > limits.current().index_bytes:
        raise limits.exceeded("index_bytes", "the index is too large", file.size, file=path)
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
    if isinstance(graph.source, Missing):
        return by_name(tensors), ("the object graph is in a missing shard: names are TensorFlow's own keys",)
    try:
        tree, notes = leaves.by_graph(_text(graph.source, "graph_bytes"), tensors)
    except CkpttoolError as error:
        raise error.located(file=index, path=GRAPH) from error.__cause__
    containers, refused = _modules(tree)
    return replace(tree, containers=containers) if containers else tree, (*notes, *refused)


def _text(source: Source, limit: str) -> bytes:
    # A scalar's bytes are one length and the string itself (see leaf.Leaf.read).
    if isinstance(source, TensorFlowStrings) and source.span.length > getattr(limits.current(), limit):
        raise limits.exceeded(limit, "the text is too large", source.span.length)
    return bytes(source.read())[8:]


def _modules(tree: Tree) -> tuple[dict[Path, Container], list[str]]:
    """Return what stored configurations say about the objects that have one, and a note on unusable ones."""
    found: dict[Path, Container] = {}
    refused: list[str] = []
    for path, leaf in tree.tensors():
        if leaf.dtype != "string" or leaf.shape or not path or path[-1].value != configs.ATTRIBUTE:
            continue
        try:
            container = configs.container(_text(leaf.source, "json_bytes"))
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
        self._used: set[bytes] = set()
        self._shards: dict[int, File | None] = {}
        # What lies where, by shard: offset, size, and the key of the tensor.
        self._placed: dict[int, list[tuple[int, int, bytes]]] = {}

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by key, in the order of the index; slices belong to their tensors."""
        found = {}
        for key, value in self._raw:
            if key[:1] != b"\0":
                found[protobuf.text(key)] = self._named(key, value)
        # TensorFlow takes a slice that no tensor lists for a tensor of that name.
        for key, value in self._slices.items():
            if key not in self._used:
                found[protobuf.text(key)] = self._named(key, value)
        self._require_held()
        return found

    def _named(self, key: bytes, value: bytes) -> Tensor:
        try:
            return self._tensor(key, records.entry(value))
        except CkpttoolError as error:
            raise error.located(path=protobuf.text(key)) from error.__cause__

    def files(self) -> list[File]:
        """Return the shards that are there."""
        return [file for _, file in sorted(self._shards.items()) if file is not None]

    def notes(self) -> list[str]:
        """Say which shards are absent, and which are not as TensorFlow writes them."""
        missing = sorted(shard for shard, file in self._shards.items() if file is None)
        names = [os.path.basename(self._shard_path(shard)) for shard in missing]
        verb = "is" if len(names) == 1 else "are"
        notes = [f"shard {some(names, SHOWN)} {verb} missing: its tensors are listed, not readable"]
        for shard, file in sorted(self._shards.items()):
            if file is not None:
                notes += self._odd(shard, file)
        return notes if missing else notes[1:]

    def _odd(self, shard: int, file: File) -> Iterator[str]:
        """Say what BundleWriter (tensor_bundle.cc) never does: it writes one tensor behind the other."""
        name = os.path.basename(file.path)
        reach, own, shared = 0, 0, []
        for offset, size, key in sorted(self._placed.get(shard, ())):
            if offset < reach:
                shared.append(protobuf.text(key))
            own += max(0, offset + size - max(offset, reach))
            reach = max(reach, offset + size)
        if shared:
            yield f"{some(shared, SHOWN)}: over bytes of {name} that another tensor has too"
        if own < file.size:
            belong = "belongs" if file.size - own == 1 else "belong"
            yield f"{count(file.size - own, 'byte')} of {name} {belong} to no tensor"

    def _require_held(self) -> None:
        """Raise LimitError where tensors that share bytes are far larger together than their shard."""
        most = limits.current().expanded_bytes
        for shard, placed in self._placed.items():
            file = self._shards[shard]
            beyond = 0 if file is None else sum(size for _, size, _ in placed) - file.size
            if file is not None and beyond > most:
                what = "the tensors of a shard share its bytes, and together are larger by more than is read"
                raise limits.exceeded("expanded_bytes", what, beyond, file=file.path)

    def _tensor(self, key: bytes, entry: records.Entry) -> Tensor:
        dtype = _dtype(entry.dtype)
        elements = elements_of(entry.shape)
        if entry.slices:
            return Tensor(dtype.name, entry.shape, self._sliced(key, entry, dtype))
        return Tensor(dtype.name, entry.shape, self._source(key, entry, dtype, elements))

    def _source(self, key: bytes, entry: records.Entry, dtype: dtypes.DType, elements: int) -> Source:
        _check_size(entry, dtype, elements)
        file = self._shard(entry)
        if entry.size:
            self._placed.setdefault(entry.shard, []).append((entry.offset, entry.size, key))
        checksum = Checksum("crc32c", entry.checksum)
        if file is None:
            return Missing(self._shard_path(entry.shard), checksum)
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
            place = tensor_protos.slice_key(key, extents)
            self._used.add(place)
            value = self._slices.get(place)
            if value is None:
                raise FormatError("the index lacks a slice that the tensor is made of", found=str(extents))
            entry = records.entry(value)
            box = box_of(extents, whole.shape)
            shape = tuple(length for _, length in box)
            if entry.dtype != whole.dtype or entry.shape != shape or entry.slices:
                raise FormatError("a slice does not fit into its tensor", found=f"{entry.shape} at {box}")
            parts.append((box, self._source(key, entry, dtype, elements_of(shape))))
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
        if not places.lexists(path):
            return None
        if not places.isfile(path):
            raise FormatError("the shard is not a regular file", file=path)
        return File.beside(path, f"{self._prefix}.index")

    def _shard_path(self, number: int) -> str:
        return f"{self._prefix}.data-{number:05d}-of-{self.header.shards:05d}"


def _header(data: bytes) -> records.Header:
    header = records.header(data)
    if header.shards < 1:
        raise FormatError("the header's number of shards is impossible", found=str(header.shards))
    if header.producer < 0:
        raise FormatError(
            "the header's version is negative", expected="0 or more", found=str(header.producer)
        )
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
