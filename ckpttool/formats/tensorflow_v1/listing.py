"""What a V1 checkpoint lists: every shard's own record of names, shapes and slices.

Field numbers are those of tensorflow/core/util/saved_tensor_slice.proto and
tensorflow/core/framework/versions.proto.
"""

from __future__ import annotations

from typing import NamedTuple

from ckpttool import dtypes, places
from ckpttool.errors import CkpttoolError, FormatError, TruncatedError, UnsupportedError
from ckpttool.formats import saver_paths, slices, tensor_protos
from ckpttool.formats.tensor_protos import Extent
from ckpttool.formats.tensorflow_v1 import values
from ckpttool.formats.variables import Tensor
from ckpttool.source import File, Shape, Source
from ckpttool.wire import protobuf, sstable_file
from ckpttool.wire.sstable_file import Table

# TF_CHECKPOINT_VERSION in tensorflow/core/public/release_version.h.
VERSION = 1
# Snappy packs no tighter (three bytes for a copy of 64), and no value takes less than a byte.
_DENSEST = 22
# Of SavedTensorSliceMeta: tensor, versions; of SavedSliceMeta: name, shape, type, slice.
_TENSORS = {1: protobuf.DELIMITED, 2: protobuf.DELIMITED}
_META = {**dict.fromkeys((1, 2, 4), protobuf.DELIMITED), 3: protobuf.NUMBER}


class Listed(NamedTuple):
    """The tensors of a checkpoint by name, in the order in which its shards list them."""

    tensors: dict[str, Tensor]
    files: tuple[File, ...]
    producer: int


class Meta(NamedTuple):
    """What one shard says of one tensor; `dtype` is TensorFlow's number."""

    name: bytes
    shape: Shape
    dtype: int
    slices: tuple[tuple[Extent, ...], ...]


class _Shard(NamedTuple):
    table: Table
    metas: list[Meta]
    producer: int


class _Whole(NamedTuple):
    """A tensor while its slices are gathered from all shards."""

    dtype: str
    shape: Shape
    parts: list[tuple[slices.Box, Source]]


def read(location: str) -> Listed:
    """List the V1 file, or all shards of the pattern, at the location."""
    shards = saver_paths.v1_shards(location)
    opened = [_open(path) for path in (_all_there(shards) if shards is not None else (location,))]
    wholes: dict[str, _Whole] = {}
    for table, metas, _ in opened:
        for meta in metas:
            name = protobuf.text(meta.name)
            try:
                _gather(wholes, name, meta, table)
            except CkpttoolError as error:
                raise error.located(file=table.file.path, path=name) from error.__cause__
    tensors = {}
    for name, whole in wholes.items():
        try:
            tensors[name] = Tensor(whole.dtype, whole.shape, _source(whole, location))
        except CkpttoolError as error:
            raise error.located(file=location, path=name) from error.__cause__
    return Listed(tensors, tuple(shard.table.file for shard in opened), opened[0].producer)


def _all_there(shards: tuple[str, ...]) -> tuple[str, ...]:
    missing = [path for path in shards if not places.isfile(path)]
    if missing or not shards:
        raise TruncatedError(
            f"the checkpoint lacks {len(missing)} of its {len(shards)} shards, and nothing else says what "
            "they hold",
            file=missing[0] if missing else None,
        )
    return shards


def _open(path: str) -> _Shard:
    table = sstable_file.open_table(File.stamp(path))
    try:
        first = table.first()
        if first is None or first[0]:
            raise FormatError("the table has no list of tensors: it is no V1 checkpoint")
        return _Shard(table, *_metas(first[1]))
    except CkpttoolError as error:
        raise error.located(file=path) from error.__cause__


def _metas(data: bytes) -> tuple[list[Meta], int]:
    """Decode a SavedTensorSlices that holds a SavedTensorSliceMeta."""
    metas: list[Meta] = []
    version = {1: [0], 2: [0], 3: []}
    for _, value in protobuf.fields(data, {1: protobuf.NUMBERS}):
        if isinstance(value, int):
            raise FormatError(
                "this is the index of a V2 checkpoint under another name",
                hint="give it back the suffix .index, beside its data shards",
            )
        for part, what in protobuf.fields(value, _TENSORS):
            if part == 1:
                metas.append(_meta(protobuf.message(what)))
                continue
            for field, found in protobuf.fields(protobuf.message(what), tensor_protos.VERSIONS):
                version[field] += map(protobuf.int32, protobuf.numbers(found))
    if version[1][-1] < 0:
        raise FormatError(
            "the checkpoint's version is negative", expected="0 or more", found=str(version[1][-1])
        )
    if version[2][-1] > VERSION or VERSION in version[3]:
        raise UnsupportedError(
            "the checkpoint asks for a newer reader",
            expected=f"version {VERSION}",
            found=f"version {version[2][-1]}",
        )
    return metas, version[1][-1]


def _meta(data: bytes) -> Meta:
    name, dtype = b"", 0
    shape: list[bytes] = []
    cuts = []
    for number, value in protobuf.fields(data, _META):
        if number == 1:
            name = protobuf.message(value)
        elif number == 2:
            shape.append(protobuf.message(value))
        elif number == 3:
            dtype = protobuf.int32(value)
        else:
            cuts.append(tensor_protos.extents(protobuf.message(value)))
    return Meta(name, tensor_protos.shape(protobuf.joined(shape, b"")), dtype, tuple(cuts))


def _gather(wholes: dict[str, _Whole], name: str, meta: Meta, table: Table) -> None:
    """Add the slices that one shard has of a tensor."""
    dtype = dtypes.BY_TENSORFLOW.get(meta.dtype)
    if dtype is None:
        raise FormatError("the tensor's type is not one that TensorFlow knows", found=f"number {meta.dtype}")
    if dtype.name not in values.FIELDS:
        raise UnsupportedError(f"V1 checkpoints have no field for values of type {dtype.name}")
    tensor_protos.elements_of(meta.shape)
    whole = wholes.setdefault(name, _Whole(dtype.name, meta.shape, []))
    if (whole.dtype, whole.shape) != (dtype.name, meta.shape):
        raise FormatError(
            "two shards disagree about the tensor",
            expected=f"{whole.dtype}{list(whole.shape)}",
            found=f"{dtype.name}{list(meta.shape)}",
        )
    for cut in meta.slices:
        # TensorFlow lists a scalar's only slice without extents, and refuses such a slice of another tensor.
        box = slices.box_of(cut, meta.shape)
        shape = tuple(length for _, length in box)
        key = tensor_protos.slice_key(meta.name, cut)
        block = table.block_of(key)
        if block is None:
            raise FormatError("the table lacks a slice that the tensor is made of", found=str(cut))
        elements = tensor_protos.elements_of(shape)
        if elements > _DENSEST * block.size:
            raise FormatError(
                "the tensor has more elements than its block can hold",
                expected=f"at most {_DENSEST * block.size:,}",
                found=f"{elements:,}",
            )
        whole.parts.append((box, values.Value(table.file, block, key, dtype.name, elements)))


def _source(whole: _Whole, location: str) -> Source:
    entire = tuple((0, extent) for extent in whole.shape)
    if len(whole.parts) == 1 and whole.parts[0][0] == entire:
        return whole.parts[0][1]
    source = slices.assembled(whole.dtype, whole.shape, whole.parts, location)
    if not dtypes.BY_NAME[whole.dtype].itemsize:
        return slices.Unreadable(location, f"a tensor of type {whole.dtype} is cut into slices")
    return source
