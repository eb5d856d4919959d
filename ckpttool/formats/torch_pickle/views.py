"""Tensors as views of storages, checked against them.

Source: torch/_utils.py (_rebuild_tensor, _rebuild_tensor_v2, _rebuild_tensor_v3, set_tensor_metadata).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from ckpttool import dtypes
from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.source import Inline, Shape
from ckpttool.source import Storage as Bytes
from ckpttool.wire.pickle_reader import Builder, Global, Object

RANK = 64  # numpy reads no more dimensions than that
_LARGEST = (1 << 63) - 1


@dataclass(slots=True, eq=False)
class Storage:
    """A flat buffer; `dtype` is None for an untyped one.

    `bytes` is set later where a file tells only behind its pickles where its storages lie; `part` says that
    they are those of another storage, too.
    """

    key: str
    dtype: str | None
    nbytes: int
    bytes: Bytes | Inline
    part: bool = False


@dataclass(slots=True, eq=False)
class Tensor:
    """A view of a storage; offset and strides count elements. `state` is what the pickle sets on it."""

    storage: Storage
    dtype: str
    offset: int
    shape: Shape
    strides: Shape
    requires_grad: bool = False
    parameter: bool = False
    conj: bool = False
    neg: bool = False
    state: object = None

    @property
    def view(self) -> tuple[object, ...]:
        """What two tensors have in common when they are the same memory, read the same way."""
        return (
            self.storage.key, self.dtype, self.offset, self.shape, self.strides, self.conj, self.neg
        )  # fmt: skip

    @property
    def count(self) -> int:
        """The number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count


class Size(tuple[Any, ...]):
    """A torch.Size."""

    __slots__ = ()


def bad(message: str, *, expected: str | None = None, found: str | None = None) -> NoReturn:
    """Raise FormatError; the machine adds where."""
    raise FormatError(message, expected=expected, found=found)


def view(storage: Storage, dtype: str, offset: Any, shape: Any, strides: Any, requires_grad: Any) -> Tensor:
    """Return the tensor; raise FormatError unless it lies within its storage."""
    if (
        type(offset) is not int
        or not isinstance(shape, tuple | list)
        or not isinstance(strides, tuple | list)
    ):
        bad("a tensor's offset, size and stride are not an integer and two tuples")
    if len(shape) != len(strides):
        bad("a tensor has not as many strides as dimensions")
    if len(shape) > RANK:
        raise UnsupportedError(f"a tensor of {len(shape):,} dimensions")
    if any(type(n) is not int or n < 0 for n in (offset, *shape, *strides)):
        bad("a tensor's offset, size or stride is negative or no integer")
    tensor = Tensor(storage, dtype, offset, tuple(shape), tuple(strides), requires_grad is True)
    _fits(tensor)
    return tensor


def _fits(tensor: Tensor) -> None:
    row = dtypes.BY_NAME.get(tensor.dtype)
    if row is None or not row.itemsize:
        return
    count = tensor.count
    # NumPy counts without the empty dimensions.
    if (count or math.prod(extent or 1 for extent in tensor.shape)) * row.itemsize > _LARGEST:
        bad("a tensor has more elements than can be counted")
    last = tensor.offset
    for extent, stride in zip(tensor.shape, tensor.strides, strict=True):
        last += (extent - 1) * stride
    needed = -(-(last + 1) * row.itemsize // dtypes.PACKED.get(tensor.dtype, 1))
    if count and needed > tensor.storage.nbytes:
        bad(
            f"a tensor reaches beyond its storage {tensor.storage.key!r}",
            expected=f"at most {tensor.storage.nbytes:,} bytes",
            found=f"{needed:,}",
        )


def _with_bits(tensor: Tensor, metadata: object) -> Tensor:
    # torch/_utils.py, set_tensor_metadata: the stored bytes are those before conj and neg were applied.
    if metadata is None or metadata == {}:
        return tensor
    if not isinstance(metadata, dict) or not metadata.keys() <= {"conj", "neg"}:
        raise UnsupportedError("a tensor carries metadata other than conj and neg")
    conj = metadata.get("conj") is True and tensor.dtype.startswith("complex")
    return replace(tensor, conj=conj, neg=metadata.get("neg") is True)


def unknown(args: tuple[Any, ...]) -> bool:
    """Say whether a tensor's storage is a call that nobody makes: then the tensor is not known either."""
    return bool(args) and isinstance(args[0], Object)


def _tensor_v2(args: tuple[Any, ...]) -> object:
    if unknown(args):
        return NotImplemented
    if len(args) not in (4, 6, 7) or not isinstance(args[0], Storage):
        bad("a tensor is rebuilt from arguments that torch does not write")
    storage = args[0]
    dtype = storage.dtype or "uint8"
    tensor = view(storage, dtype, args[1], args[2], args[3], args[4] if len(args) > 4 else False)
    return _with_bits(tensor, args[6] if len(args) > 6 else None)


def _tensor_v3(args: tuple[Any, ...]) -> object:
    if unknown(args):
        return NotImplemented
    if len(args) not in (7, 8) or not isinstance(args[0], Storage) or not isinstance(args[6], Global):
        bad("a tensor is rebuilt from arguments that torch does not write")
    row = dtypes.BY_TORCH.get(args[6].name)
    # Names of ours must not be taken for torch's: TensorFlow's int4 is another type.
    dtype = row.name if row else args[6].full
    tensor = view(args[0], dtype, args[1], args[2], args[3], args[4])
    return _with_bits(tensor, args[7] if len(args) > 7 else None)


def _size(args: tuple[Any, ...]) -> object:
    return Size(args[0]) if len(args) == 1 and isinstance(args[0], tuple | list) else NotImplemented


REBUILD: dict[str, Builder] = {
    "torch.Size": _size,
    "torch._utils._rebuild_tensor": _tensor_v2,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
}
