"""The values of a V1 checkpoint: numbers and strings in the typed fields of a TensorProto.

Field numbers are those of tensorflow/core/framework/tensor.proto; which type uses which field is said by
tensorflow/core/util/saved_tensor_slice_util.h. Unlike elsewhere in TensorFlow, `tensor_content` is not used,
and a field is not shortened by leaving out repeated last values: the reader (CopySliceData in
tensor_slice_reader.h) asks for exactly as many values as the slice has elements.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ckpttool import dtypes, limits
from ckpttool.errors import CkpttoolError, FormatError, TruncatedError
from ckpttool.formats import tensor_protos
from ckpttool.source import Buffer, File
from ckpttool.wire import protobuf, sstable_file
from ckpttool.wire.sstable import Handle

if TYPE_CHECKING:
    import numpy as np

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
# SavedSlice: slice, data.
_SLICE = {2: protobuf.DELIMITED, 3: protobuf.DELIMITED}
# Fields that are stored as little-endian numbers of this size; the others are varints.
_FIXED = {_FLOAT: 4, _DOUBLE: 8, _SCOMPLEX: 4, _DCOMPLEX: 8}


class Value(NamedTuple):
    """A slice of a tensor, or a whole one: one entry of a table."""

    file: File
    block: Handle
    key: bytes
    dtype: str
    elements: int

    def read(self) -> Buffer:
        """Return the elements' bytes (strings as u64 lengths, each before its bytes)."""
        stored = sstable_file.value(self.file, self.block, self.key)
        try:
            return _decoded(_tensor(stored), self.dtype, self.elements)
        except CkpttoolError as error:
            # A position within the entry means nothing in the file.
            error.offset = self.block.offset
            raise error.located(file=self.file.path) from error.__cause__


def _tensor(stored: bytes) -> memoryview:
    """Return the TensorProto of a SavedTensorSlices entry, whose messages may come in several parts."""
    parts: list[memoryview] = []
    slices: list[memoryview] = []
    for _, data in protobuf.each(memoryview(stored), {2: protobuf.DELIMITED}):
        for number, value in protobuf.each(protobuf.message(data), _SLICE):
            (slices if number == 2 else parts).append(protobuf.message(value))
    # The key says which slice this is; TensorFlow refuses an entry whose own note of it is damaged.
    tensor_protos.extents(bytes(protobuf.joined(slices, memoryview(b""))))
    return protobuf.joined(parts, memoryview(b""))


def _decoded(proto: memoryview, dtype: str, elements: int) -> Buffer:
    field = FIELDS[dtype]
    if field == _STRING:
        return _strings(_runs(proto, field, protobuf.DELIMITED), elements)
    if field in _FIXED:
        wire = protobuf.WORDS if _FIXED[field] == 4 else protobuf.LONGS
        found = _fixed(_runs(proto, field, wire), _FIXED[field])
        _require_count(len(found), elements * dtypes.BY_NAME[dtype].itemsize)
        return found
    return _integers(_runs(proto, field, protobuf.NUMBERS), dtype, elements)


def _runs(proto: memoryview, field: int, wire: int) -> Iterator[int | memoryview]:
    return (value for _, value in protobuf.each(proto, {field: wire}))


def _require_count(found: int, expected: int) -> None:
    if found < expected:
        raise TruncatedError("the tensor has too few values", expected=f"{expected:,}", found=f"{found:,}")
    if found > expected:
        raise FormatError("the tensor has too many values", expected=f"{expected:,}", found=f"{found:,}")


def _strings(runs: Iterable[int | memoryview], elements: int) -> Buffer:
    if elements > limits.current().strings:
        raise limits.exceeded("strings", "the tensor has too many strings", elements)
    found, count = bytearray(), 0
    for run in runs:
        text = protobuf.message(run)
        found += len(text).to_bytes(8, "little")
        found += text
        count += 1
    _require_count(count, elements)
    return found


def _fixed(runs: Iterator[int | memoryview], width: int) -> Buffer:
    first = next(runs, b"")
    found: bytearray | None = None
    for run in runs:
        found = bytearray(_number(first, width)) if found is None else found
        found += _number(run, width)
    return _number(first, width) if found is None else found


def _number(run: int | Buffer, width: int) -> Buffer:
    return run.to_bytes(width, "little") if isinstance(run, int) else run


def _integers(runs: Iterable[int | memoryview], dtype: str, elements: int) -> Buffer:
    import numpy as np

    # Repeated fields are packed or not as the writer likes, one after the other too.
    packed: list[np.ndarray] = []
    single = array("Q")
    for run in runs:
        if isinstance(run, int):
            single.append(run)
        else:
            packed += (np.array(single, np.uint64), _varints(run))
            single = array("Q")
    found = np.concatenate([*packed, np.array(single, np.uint64)])
    _require_count(len(found), elements)
    target = np.dtype("<u2") if dtype == "float16" else dtypes.numpy_dtype(dtype)
    if target.itemsize == 8:
        return found.astype("<u8", copy=False).view(np.uint8).data
    # int32 fields hold negative numbers as 64-bit ones.
    signed = found.view(np.int64)
    least, most = (0, 1) if dtype == "bool" else (np.iinfo(target).min, np.iinfo(target).max)
    if len(signed) and (signed.min() < least or signed.max() > most):
        worst = signed.max() if signed.max() > most else signed.min()
        raise FormatError(
            f"a number does not fit into {dtype}", expected=f"{least} to {most}", found=str(worst)
        )
    return signed.astype(target).view(np.uint8).data


def _varints(data: memoryview) -> np.ndarray:
    """Return the unsigned 64-bit numbers of a packed field."""
    import numpy as np

    digits = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(digits < 0x80)
    if len(ends) == len(digits):
        return digits.astype(np.uint64)
    if not len(ends) or ends[-1] != len(digits) - 1:
        raise TruncatedError("the last number of a field is cut off")
    starts = np.concatenate((np.zeros(1, ends.dtype), ends[:-1] + 1))
    lengths = ends - starts + 1
    longest = int(lengths.max())
    if longest > 10 or bool(np.any(digits[ends[lengths == 10]] > 1)):
        raise FormatError("a number of a field has more than 64 bits")
    found = np.zeros(len(ends), np.uint64)
    for place in range(longest):
        here = np.flatnonzero(lengths > place)
        digit = (digits[starts[here] + place] & 0x7F).astype(np.uint64)
        found[here] |= digit << np.uint64(7 * place)
    return found
