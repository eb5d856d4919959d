"""TensorFlow V1 checkpoints."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator
from typing import cast

from ckpttool.core import dtypes, filesystem, limits
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.dtypes import np
from ckpttool.core.errors import CkpttoolError, FormatError, TruncatedError, UnsupportedError, locate_errors
from ckpttool.core.source import Buffer, File, Shape, Source, UnreadableSource
from ckpttool.encodings import protobuf, sstable
from ckpttool.encodings.protobuf import Message
from ckpttool.encodings.sstable import BlockHandle, SStable
from ckpttool.formats import tensor_bytes, tf_common
from ckpttool.formats.probe import Probe
from ckpttool.formats.tf_common import Extent, VariableInfo, tree_by_name

NAME = "tensorflow_v1"
TITLE = "TensorFlow V1 checkpoint (single table or sharded)"
WRITES = False
FRAMEWORK = "tensorflow"


def claims(probe: Probe) -> str | None:
    """Return the file, or the shard pattern (`PREFIX-?????-of-00002`), if the path is a V1 checkpoint."""
    if probe.kind == "missing":
        checkpoint = tf_common.checkpoint_at(probe.path, probe.names)
        return checkpoint.location if checkpoint is not None and checkpoint.version == 1 else None
    if probe.kind == "folder":
        return _location_of_folder(probe)
    return _location_of_file(probe) if probe.kind == "file" else None


def redirected(probe: Probe, location: str) -> str | None:
    """Return a note if the location is not the place named in the state file at the path."""
    return tf_common.note_redirection(probe, location)


def read(location: str) -> Checkpoint:
    """List the file, or all shards of the pattern; indexes and names are read, values are not.

    Raise TruncatedError if a shard is missing: only the shard itself lists its contents. The format is
    defined in tensorflow/core/util/tensor_slice_writer.h and tensor_slice_reader.cc; the table in
    encodings/sstable.py. It was the Saver's only form before TensorFlow 0.12, and `SaverDef.V1` still writes
    it.
    """
    shards = tf_common.v1_shards(location)
    opened = [_open_shard(path) for path in (_require_shards(shards) if shards is not None else (location,))]
    wholes: dict[str, _TensorSlices] = {}
    for table, metas, _ in opened:
        for meta in metas:
            name = protobuf.as_text(meta.name)
            with locate_errors(file=table.file.path, path=name):
                _gather_slices(wholes, name, meta, table)
    tensors = {}
    for name, whole in wholes.items():
        with locate_errors(file=location, path=name):
            tensors[name] = VariableInfo(whole.dtype, whole.shape, _slices_source(whole, location))
    files = tuple(table.file for table, _, _ in opened)
    writer = f"checkpoint version {opened[0][2]}"
    return Checkpoint(location, NAME, tree_by_name(tensors), files, writer, "crc32c")


def _location_of_file(probe: Probe) -> str | None:
    if tf_common.is_state_file(probe.head):
        return tf_common.location_by_state(probe, 1)
    if probe.name.endswith(".index") or tf_common.v2_base(probe.name) is not None:
        return None
    if not probe.tail.endswith(sstable.MAGIC):
        return None
    return tf_common.v1_pattern(probe.path) or probe.path


def _location_of_folder(probe: Probe) -> str | None:
    if tf_common.find_state(probe) is not None:
        return tf_common.location_by_state(probe, 1)
    if tf_common.v2_bases(probe.names) or filesystem.isfile(f"{probe.path.rstrip('/')}.index"):
        return None
    bases = sorted(tf_common.v1_bases(probe.path, probe.names), key=tf_common.checkpoint_order)
    if len(bases) > 1:
        raise tf_common.several_checkpoints_error(bases, probe.path)
    return os.path.join(probe.path, bases[0]) if bases else None


_FLOAT, _DOUBLE, _INT, _STRING, _SCOMPLEX, _INT64, _BOOL, _DCOMPLEX, _HALF = 5, 6, 7, 8, 9, 10, 11, 12, 13
_UINT32, _UINT64 = 16, 17

FIELDS = {
    "float32": _FLOAT,
    "float64": _DOUBLE,
    "complex64": _SCOMPLEX,
    "complex128": _DCOMPLEX,
    "string": _STRING,
    "int64": _INT64,
    "bool": _BOOL,
    "float16": _HALF,
    "uint32": _UINT32,
    "uint64": _UINT64,
    **dict.fromkeys(("int8", "int16", "int32", "uint8", "uint16"), _INT),
    **dict.fromkeys(("qint8", "quint8", "qint32", "quint16"), _INT),
}
# SavedTensorSlices: data. SavedSlice: slice, data.
_ENTRY = Message({2: protobuf.MESSAGE})
_SLICE = Message({2: protobuf.MESSAGE, 3: protobuf.MESSAGE})
# Fields stored as little-endian numbers of this size; the others are varints.
_FIXED = {_FLOAT: 4, _DOUBLE: 8, _SCOMPLEX: 4, _DCOMPLEX: 8}


class SavedSlice(NamedTuple):
    """A slice of a tensor, or a whole tensor: one entry of a table.

    Field numbers are from tensorflow/core/framework/tensor.proto;
    tensorflow/core/util/saved_tensor_slice_util.h maps types to fields. Unlike elsewhere in TensorFlow,
    `tensor_content` is not used, and repeated last values are not omitted: the reader (CopySliceData in
    tensor_slice_reader.h) requires exactly as many values as the slice has elements.
    """

    file: File
    block: BlockHandle
    key: bytes
    dtype: str
    elements: int

    def read(self) -> Buffer:
        """Return the elements' bytes (strings with their u64 lengths before them)."""
        stored = sstable.read_value(self.file, self.block, self.key)
        try:
            return _decode_elements(_tensor(stored), self.dtype, self.elements)
        except CkpttoolError as error:
            # A position within the entry is meaningless to the user.
            error.offset = self.block.offset
            raise error.located(file=self.file.path) from error.__cause__


def _tensor(stored: bytes) -> memoryview:
    """Return the TensorProto of a SavedTensorSlices entry, whose messages may be split into several parts."""
    (entry,) = protobuf.decode(memoryview(stored), _ENTRY, protobuf.iter_fields)
    position, tensor = protobuf.decode(entry, _SLICE, protobuf.iter_fields)
    # The key identifies the slice; TensorFlow rejects an entry whose own copy of it is damaged.
    tf_common.parse_slice(position)
    return cast(memoryview, tensor)


def _decode_elements(proto: memoryview, dtype: str, elements: int) -> Buffer:
    field = FIELDS[dtype]
    if field == _STRING:
        return _decode_strings(_iter_runs(proto, field, protobuf.DELIMITED), elements)
    if field in _FIXED:
        wire = protobuf.WORDS if _FIXED[field] == 4 else protobuf.LONGS
        data = _decode_fixed(_iter_runs(proto, field, wire), _FIXED[field])
        _require_count(len(data), elements * dtypes.BY_NAME[dtype].itemsize)
        return data
    return _decode_integers(_iter_runs(proto, field, protobuf.NUMBERS), dtype, elements)


def _iter_runs(proto: memoryview, field: int, wire: int) -> Iterator[int | memoryview]:
    return (value for _, value in protobuf.iter_fields(proto, {field: wire}))


def _require_count(count: int, expected: int) -> None:
    if count < expected:
        raise TruncatedError("the tensor has too few values", expected=f"{expected:,}", found=f"{count:,}")
    if count > expected:
        raise FormatError("the tensor has too many values", expected=f"{expected:,}", found=f"{count:,}")


def _decode_strings(runs: Iterable[int | memoryview], elements: int) -> Buffer:
    if elements > limits.current().strings:
        raise limits.limit_error("strings", "the tensor has too many strings", elements)
    strings, count = bytearray(), 0
    for run in runs:
        text = protobuf.as_message(run)
        strings += len(text).to_bytes(8, "little")
        strings += text
        count += 1
    _require_count(count, elements)
    return strings


def _decode_fixed(runs: Iterator[int | memoryview], width: int) -> Buffer:
    first = next(runs, b"")
    data: bytearray | None = None
    for run in runs:
        data = bytearray(_number(first, width)) if data is None else data
        data += _number(run, width)
    return _number(first, width) if data is None else data


def _number(run: int | Buffer, width: int) -> Buffer:
    return run.to_bytes(width, "little") if isinstance(run, int) else run


def _decode_integers(runs: Iterable[int | memoryview], dtype: str, elements: int) -> Buffer:
    # Repeated fields may be packed or not, even in the same message.
    packed: list[np.ndarray] = []
    single = array("Q")
    for run in runs:
        if isinstance(run, int):
            single.append(run)
        else:
            packed += (np.array(single, np.uint64), _decode_varints(run))
            single = array("Q")
    numbers = np.concatenate([*packed, np.array(single, np.uint64)])
    _require_count(len(numbers), elements)
    target = np.dtype("<u2") if dtype == "float16" else dtypes.numpy_dtype(dtype)
    if target.itemsize == 8:
        return numbers.astype("<u8", copy=False).view(np.uint8).data
    # int32 fields store negative numbers as 64-bit ones.
    signed = numbers.view(np.int64)
    least, most = (0, 1) if dtype == "bool" else (np.iinfo(target).min, np.iinfo(target).max)
    if len(signed) and (signed.min() < least or signed.max() > most):
        worst = signed.max() if signed.max() > most else signed.min()
        raise FormatError(
            f"a number is out of range for {dtype}", expected=f"{least} to {most}", found=str(worst)
        )
    return signed.astype(target).view(np.uint8).data


def _decode_varints(data: memoryview) -> np.ndarray:
    """Return the unsigned 64-bit numbers of a packed field."""
    digits = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(digits < 0x80)
    if len(ends) == len(digits):
        return digits.astype(np.uint64)
    if not len(ends) or ends[-1] != len(digits) - 1:
        raise TruncatedError("the last number of a field is truncated")
    starts = np.concatenate((np.zeros(1, ends.dtype), ends[:-1] + 1))
    lengths = ends - starts + 1
    longest = int(lengths.max())
    if longest > 10 or bool(np.any(digits[ends[lengths == 10]] > 1)):
        raise FormatError("a number in a field has more than 64 bits")
    values = np.zeros(len(ends), np.uint64)
    for index in range(longest):
        here = np.flatnonzero(lengths > index)
        digit = (digits[starts[here] + index] & 0x7F).astype(np.uint64)
        values[here] |= digit << np.uint64(7 * index)
    return values


# TF_CHECKPOINT_VERSION in tensorflow/core/public/release_version.h.
VERSION = 1
# Upper limit of Snappy's compression (three bytes for a copy of 64); no value takes less than a byte.
_DENSEST = 22
# SavedTensorSliceMeta: tensor, versions; SavedSliceMeta: name, shape, type, slice.
_TENSORS = Message({1: protobuf.MESSAGES, 2: protobuf.MESSAGE})
_META = Message({1: protobuf.BINARY, 2: protobuf.MESSAGE, 3: protobuf.INT32, 4: protobuf.MESSAGES})


class SliceMeta(NamedTuple):
    """A tensor as one shard describes it; `dtype` is TensorFlow's number.

    Field numbers are from tensorflow/core/util/saved_tensor_slice.proto and
    tensorflow/core/framework/versions.proto.
    """

    name: bytes
    shape: Shape
    dtype: int
    slices: tuple[tuple[Extent, ...], ...]


class _TensorSlices(NamedTuple):
    """A tensor whose slices are being collected from all shards."""

    dtype: str
    shape: Shape
    parts: list[tuple[tf_common.Box, Source]]


def _require_shards(shards: tuple[str, ...]) -> tuple[str, ...]:
    missing = [path for path in shards if not filesystem.isfile(path)]
    if missing or not shards:
        raise TruncatedError(
            f"{len(missing)} of the checkpoint's {len(shards)} shards are missing; only the shards list "
            "their tensors",
            file=missing[0] if missing else None,
        )
    return shards


def _open_shard(path: str) -> tuple[SStable, list[SliceMeta], int]:
    """Return the table of a shard, the slices that it lists, and its version."""
    table = sstable.open_table(File.stamp(path))
    with locate_errors(file=path):
        first = table.first()
        if first is None or first[0]:
            raise FormatError("not a V1 checkpoint: the table has no list of tensors")
        return table, *_parse_metas(first[1])


def _parse_metas(data: bytes) -> tuple[list[SliceMeta], int]:
    """Decode a SavedTensorSlices that contains a SavedTensorSliceMeta."""
    parts: list[bytes] = []
    for _, value in protobuf.parse_fields(data, {1: protobuf.NUMBERS}):
        if isinstance(value, int):
            raise FormatError(
                "this is the index of a V2 checkpoint without its suffix",
                hint="rename it to end in .index, in the folder of its data shards",
            )
        parts.append(value)
    tensors, versions = protobuf.decode(protobuf.merge_messages(parts, b""), _TENSORS)
    producer, least, refused = protobuf.decode(versions, tf_common.VERSIONS)
    tf_common.require_version(producer, least, refused, VERSION)
    return [*map(_parse_meta, tensors)], producer


def _parse_meta(data: bytes) -> SliceMeta:
    name, shape, dtype, cuts = protobuf.decode(data, _META)
    return SliceMeta(name, tf_common.parse_shape(shape), dtype, tuple(map(tf_common.parse_slice, cuts)))


def _gather_slices(wholes: dict[str, _TensorSlices], name: str, meta: SliceMeta, table: SStable) -> None:
    """Add the slices of a tensor from one shard."""
    dtype = dtypes.BY_TENSORFLOW.get(meta.dtype)
    if dtype is None:
        raise FormatError("unknown TensorFlow data type", found=f"number {meta.dtype}")
    if dtype.name not in FIELDS:
        raise UnsupportedError(f"V1 checkpoints cannot store values of type {dtype.name}")
    tensor_bytes.count_elements(meta.shape)
    whole = wholes.setdefault(name, _TensorSlices(dtype.name, meta.shape, []))
    if (whole.dtype, whole.shape) != (dtype.name, meta.shape):
        raise FormatError(
            "two shards disagree about the tensor",
            expected=f"{whole.dtype}{list(whole.shape)}",
            found=f"{dtype.name}{list(meta.shape)}",
        )
    for cut in meta.slices:
        # TensorFlow lists a scalar's only slice without extents, and rejects such a slice of another tensor.
        box = tf_common.slice_box(cut, meta.shape)
        shape = tuple(length for _, length in box)
        key = tf_common.slice_key(meta.name, cut)
        block = table.block_of(key)
        if block is None:
            raise FormatError("a slice of the tensor is missing from the table", found=str(cut))
        elements = tensor_bytes.count_elements(shape)
        if elements > _DENSEST * block.size:
            raise FormatError(
                "the tensor has more elements than its block can hold",
                expected=f"at most {_DENSEST * block.size:,}",
                found=f"{elements:,}",
            )
        whole.parts.append((box, SavedSlice(table.file, block, key, dtype.name, elements)))


def _slices_source(whole: _TensorSlices, location: str) -> Source:
    entire = tuple((0, extent) for extent in whole.shape)
    if len(whole.parts) == 1 and whole.parts[0][0] == entire:
        return whole.parts[0][1]
    source = tf_common.assemble_slices(whole.dtype, whole.shape, whole.parts, location)
    if not dtypes.BY_NAME[whole.dtype].itemsize:
        return UnreadableSource(location, f"a tensor of type {whole.dtype} is stored in slices")
    return source
