"""Writing a tree as a tensor bundle: the shards, then the index that says what is in them.

Sources: tensorflow/core/util/tensor_bundle/tensor_bundle.cc (BundleWriter, WriteStringTensor,
WriteVariantTensor) and tensorflow/core/protobuf/tensor_bundle.proto.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from typing import IO, NamedTuple

from ckpttool import dtypes
from ckpttool.errors import CkpttoolError, FormatError, UnsupportedError
from ckpttool.formats.object_graph import KEY as GRAPH
from ckpttool.formats.object_graph import MARK
from ckpttool.formats.object_graph import write as object_graph
from ckpttool.formats.object_graph.leaves import by_graph
from ckpttool.formats.probe import Piece
from ckpttool.formats.tensor_bundle import records
from ckpttool.formats.tensor_bundle.names import names
from ckpttool.formats.variables import Tensor, by_name
from ckpttool.leaf import Leaf, Path, attr, display
from ckpttool.source import Buffer, Inline
from ckpttool.tree import Tree
from ckpttool.wire import crc, sstable_writer, varint
from ckpttool.wire import protobuf_writer as proto

# Larger than nearly every checkpoint of an agent, and small enough for any file system.
SHARD_BYTES = 2 << 30
MAX_SHARDS = 99_999  # a shard's name has five digits
_COUNTER: Path = (attr("save_counter"),)
_CHUNK = 1 << 20
_INDEX = ".index"


class _Item(NamedTuple):
    """A tensor to be stored; `path` is for errors."""

    key: str
    leaf: Leaf
    path: Path


def pieces(
    tree: Tree,
    *,
    graph: bool = True,
    shards: int | None = None,
    shard_bytes: int | None = None,
    counter: int | None = None,
    between: str | None = None,
) -> tuple[Piece, ...]:
    """Return the shards and the index that hold the tree; the shards must be filled before the index.

    With `graph`, objects are stored as tf.train.Checkpoint does (see object_graph.write), and `counter` is
    the value of the `save_counter` that a tree gets which has none and does not come from TensorFlow's
    objects; without it, variables by name as TensorFlow 1 does (see names). A shard is closed before it
    exceeds `shard_bytes` (2 GiB if nothing is said), one tensor never being cut; `shards` asks for that many
    of about equal size. `between` is the prefix of a checkpoint that may be there already: it adds empty
    shards and an index that lists the shards under names of a larger count, which no file there has, so that
    a set of the same names can be replaced by way of it (see writing.publishing).

    Raise UnsupportedError, before anything is written, for values that are no tensors, for types that
    TensorFlow lacks, and for two tensors with one name.
    """
    items = _items(_counted(tree, counter if graph else None), graph=graph)
    dealt = _dealt(items, shards, shard_bytes or SHARD_BYTES)
    # What the index will say of each shard's tensors, once that shard is filled.
    entries: list[dict[bytes, bytes]] = [{} for _ in dealt]
    count = len(dealt)
    larger = count + 1 if between is None else _free_count(between, count + 1)
    made = [
        Piece(
            _shard(number, count),
            partial(_write_shard, number, part, entries),
            meanwhile=_shard(number, larger),
        )
        for number, part in enumerate(dealt)
    ]
    empty = [_shard(number, larger) for number in range(count, larger)]
    extra = (
        *(Piece(suffix, _write_nothing, meanwhile=suffix, extra=True) for suffix in empty),
        Piece(_INDEX, partial(_write_index, entries, larger), meanwhile=_INDEX, extra=True),
    )
    return (
        *made,
        *(extra if between is not None else ()),
        Piece(_INDEX, partial(_write_index, entries, count), indexes=True),
    )


def stored(tree: Tree, *, graph: bool = True, counter: int | None = None) -> Tree:
    """Return the tree as the reader will list it: the same leaves under the paths and keys they get.

    Raise UnsupportedError as `pieces` does.
    """
    items = _items(_counted(tree, counter if graph else None), graph=graph)
    tensors = {key: Tensor(leaf.dtype, leaf.shape, leaf.source) for key, leaf, _ in items}
    if not graph:
        return by_name(tensors)
    message = bytes(tensors.pop(GRAPH).source.read())[8:]
    return by_graph(message, tensors)[0]


def _counted(tree: Tree, counter: int | None) -> Tree:
    known = any(MARK in leaf.key for _, leaf in tree.tensors())
    if counter is None or known or any(path[:1] == _COUNTER for path in tree):
        return tree
    leaf = Leaf("int64", (), Inline(counter.to_bytes(8, "little", signed=True)), "", "counter")
    return Tree({**tree.leaves, _COUNTER: leaf}, tree.aliases, tree.containers)


def _items(tree: Tree, *, graph: bool) -> list[_Item]:
    """Return what is to be stored, in TensorFlow's order: by object, the graph last; or by name."""
    for path, _ in tree.plain():
        raise UnsupportedError(
            "a TensorFlow checkpoint holds tensors only, and this value is none",
            path=display(path),
            hint="leave it out, or store it as a tensor",
        )
    for path, leaf in tree.tensors():
        row = dtypes.BY_NAME.get(leaf.dtype)
        if row is None or row.tensorflow is None or row.name == "resource":
            raise UnsupportedError(
                f"a tensor of type {leaf.dtype} cannot be stored in a TensorFlow checkpoint",
                path=display(path),
            )
    if not graph:
        return _in_order(tree, dict(sorted(names(tree).items(), key=lambda item: _bytes(item[1]))))
    plan = object_graph.plan(tree)
    message = object_graph.encode(plan.graph)
    source = Inline(len(message).to_bytes(8, "little") + message)
    return [*_in_order(tree, plan.keys), _Item(GRAPH, Leaf("string", (), source, GRAPH), ())]


def _in_order(tree: Tree, keys: Mapping[Path, str]) -> list[_Item]:
    leaves = dict(tree.tensors())
    return [_Item(name, leaves[path], path) for path, name in keys.items()]


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _dealt(items: list[_Item], shards: int | None, shard_bytes: int) -> list[list[_Item]]:
    """Return the tensors of each shard."""
    if shards is not None:
        _require_count(shards)
        total = sum(item.leaf.nbytes for item in items) or 1
        parts: list[list[_Item]] = [[] for _ in range(shards)]
        before = 0
        for item in items:
            parts[min(shards - 1, before * shards // total)].append(item)
            before += item.leaf.nbytes
    else:
        parts, room = [[]], shard_bytes
        for item in items:
            if parts[-1] and item.leaf.nbytes > room:
                parts.append([])
                room = shard_bytes
            parts[-1].append(item)
            room -= item.leaf.nbytes
    _require_count(len(parts))
    return parts


def _require_count(shards: int) -> None:
    if not 0 < shards <= MAX_SHARDS:
        raise UnsupportedError(
            "a checkpoint cannot have so many shards", expected=f"1 to {MAX_SHARDS:,}", found=f"{shards:,}"
        )


# The files.


def _write_shard(
    number: int, items: list[_Item], entries: list[dict[bytes, bytes]], stream: IO[bytes]
) -> None:
    at = 0
    found = {}
    for key, leaf, path in items:
        try:
            size, checksum = _write_tensor(leaf, stream)
        except CkpttoolError as error:
            raise error.located(path=display(path)) from error
        found[_bytes(key)] = _entry(leaf, number, at, size, checksum)
        at += size
    entries[number] = found


def _shard(number: int, count: int) -> str:
    return f".data-{number:05d}-of-{count:05d}"


def _free_count(prefix: str, least: int) -> int:
    """Return the smallest count of shards, `least` or more, that is in no file's name at the prefix."""
    folder, name = os.path.split(os.path.abspath(prefix))
    shard = re.compile(re.escape(name) + r"\.data-\d{5}-of-(\d{5})")
    taken = {int(match[1]) for each in os.listdir(folder) if (match := shard.fullmatch(each)) is not None}
    return next(count for count in range(least, 10 * MAX_SHARDS) if count not in taken)


def _write_nothing(stream: IO[bytes]) -> None:
    stream.write(b"")


def _write_index(entries: list[dict[bytes, bytes]], count: int, stream: IO[bytes]) -> None:
    header = proto.number(1, count) + proto.message(3, proto.number(1, records.VERSION))
    found = sorted(entry for part in entries for entry in part.items())
    sstable_writer.write([(b"", header), *found], stream)


def _entry(leaf: Leaf, shard: int, offset: int, size: int, checksum: int) -> bytes:
    """Return a BundleEntryProto; a dimension of size 0 is there and empty."""
    shape = b"".join(proto.message(2, proto.number(1, extent)) for extent in leaf.shape)
    return (
        proto.number(1, dtypes.BY_NAME[leaf.dtype].tensorflow or 0)
        + proto.message(2, shape)
        + proto.number(3, shard)
        + proto.number(4, offset)
        + proto.number(5, size)
        + proto.fixed32(6, crc.mask(checksum))
    )


def _write_tensor(leaf: Leaf, stream: IO[bytes]) -> tuple[int, int]:
    """Write one tensor's bytes; return their number and the checksum for its entry."""
    if leaf.dtype == "string":
        return _write_strings(leaf.strings(), stream)
    data = leaf.read()
    if leaf.dtype == "variant":
        return _write_variants(data, leaf.size, stream)
    size = memoryview(data).nbytes
    if size != leaf.nbytes:
        raise FormatError(
            "a tensor's bytes do not fill its shape", expected=f"{leaf.nbytes:,} bytes", found=f"{size:,}"
        )
    return size, _write_bytes(data, stream)


def _write_bytes(data: Buffer, stream: IO[bytes], running: int = 0) -> int:
    view = memoryview(data).cast("B")
    for at in range(0, len(view), _CHUNK):
        running = crc.crc32c(view[at : at + _CHUNK], running)
        stream.write(view[at : at + _CHUNK])
    return running


def _write_strings(values: list[bytes], stream: IO[bytes]) -> tuple[int, int]:
    # The checksums take the lengths as numbers of fixed width, not as the varints that are stored.
    fixed = b"".join(len(value).to_bytes(4 if len(value) < 1 << 32 else 8, "little") for value in values)
    running = crc.crc32c(fixed)
    own = crc.mask(running).to_bytes(4, "little")
    head = b"".join(varint.write(len(value)) for value in values) + own
    stream.write(head)
    running = crc.crc32c(own, running)
    for value in values:
        running = _write_bytes(value, stream, running)
    return len(head) + sum(map(len, values)), running


def _write_variants(data: Buffer, elements: int, stream: IO[bytes]) -> tuple[int, int]:
    """Write records as they were stored, if their own checksums are those of a little-endian bundle."""
    at = running = 0
    data = bytes(data)
    for _ in range(elements):
        length, at = varint.read(data, at, len(data))
        record, stored = data[at : at + length], data[at + length : at + length + 4]
        running = crc.crc32c(record, crc.crc32c(length.to_bytes(8, "little"), running))
        if crc.mask(running).to_bytes(4, "little") != stored:
            raise UnsupportedError("a variant tensor is not as a little-endian TensorFlow stores it")
        running = crc.crc32c(stored, running)
        at += length + 4
    if at != len(data):
        raise FormatError("bytes follow the last variant of a tensor")
    _write_bytes(data, stream)
    return at, running
