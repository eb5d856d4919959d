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
from ckpttool.wire.pickle_values import Stateful

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


# What torch.Tensor itself reads and writes under these names; any other attribute is the program's own.
_OWN_NAMES = frozenset(
    (
        *("H", "T", "_backward_hooks", "_base", "_cdata", "_grad", "_grad_fn", "_has_symbolic_sizes_strides"),
        *("_post_accumulate_grad_hooks", "_python_dispatch", "_version", "data", "device", "dtype", "grad"),
        *("grad_dtype", "grad_fn", "imag", "is_cpu", "is_cuda", "is_ipu", "is_leaf", "is_maia", "is_meta"),
        *("is_mkldnn", "is_mps", "is_mtia", "is_nested", "is_ort", "is_quantized", "is_sparse"),
        *(
            "is_sparse_csr",
            "is_vulkan",
            "is_xla",
            "is_xpu",
            "itemsize",
            "layout",
            "mH",
            "mT",
            "name",
            "names",
        ),
        *("nbytes", "ndim", "output_nr", "real", "requires_grad", "retains_grad", "shape", "volatile"),
    )
)


@dataclass(slots=True, eq=False, kw_only=True)
class StatefulTensor(Stateful):
    """What torch makes a tensor of; `state` is what the pickle sets on it."""

    state: object = None

    def set_state(self, state: Any) -> None:
        """Take (requires_grad, volatile, hooks), which Variables had before 0.4; raise for any other state.

        Others put another storage, other data or attributes into the tensor (Tensor.__setstate__).
        """
        known = type(state) is tuple and len(state) == 3 and type(state[0]) is bool
        if not known or self.state is not None:
            raise UnsupportedError("the pickle sets a state on a tensor that can replace its values")
        check_hooks(state[2])
        self.state = state


def check_hooks(hooks: object) -> None:
    """Raise FormatError unless these are backward hooks as torch keeps them: a dict, or None."""
    if hooks is not None and not isinstance(hooks, dict):
        bad("a tensor's backward hooks are no dict")


def flag(value: object, what: str) -> bool:
    """Return a flag; raise FormatError for anything but True and False."""
    if type(value) is not bool:
        bad(f"a tensor's {what} is neither True nor False", found=repr(value)[:40])
    return value


def check_attributes(state: Any) -> None:
    """Raise unless the state is a dict of attributes, or two, and none is one of torch.Tensor's own.

    Source: torch/_utils.py, _set_obj_state, which sets each of them, `data` and `grad` too.
    """
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    for part in parts:
        if part is None:
            continue
        if not isinstance(part, dict) or not all(type(name) is str for name in part):
            bad("a tensor's state is not made of attributes")
        for name in part:
            if name in _OWN_NAMES or name.startswith("__"):
                raise UnsupportedError(f"the pickle sets torch's own attribute {name[:40]!r} of a tensor")


@dataclass(slots=True, eq=False)
class Tensor(StatefulTensor):
    """A view of a storage; offset and strides count elements."""

    storage: Storage
    dtype: str
    offset: int
    shape: Shape
    strides: Shape
    requires_grad: bool = False
    parameter: bool = False
    conj: bool = False
    neg: bool = False

    @property
    def view(self) -> str:
        """What two tensors have in common when they are the same memory, read the same way.

        It is text, whose hash is randomised: a file could choose strides that collide.
        """
        where = (self.dtype, self.offset, self.shape, self.strides, self.conj, self.neg)
        return f"{where} {self.storage.key}"

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


def view(
    storage: Storage, dtype: str, offset: Any, shape: Any, strides: Any, requires_grad: bool = False
) -> Tensor:
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
    tensor = Tensor(storage, dtype, offset, tuple(shape), tuple(strides), requires_grad)
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
    # torch/_utils.py, set_tensor_metadata: the stored bytes are those before conj and neg were applied. torch
    # applies each that is named, whatever its value, and writes True alone.
    if metadata is None or metadata == {}:
        return tensor
    if not isinstance(metadata, dict) or not metadata.keys() <= {"conj", "neg"}:
        raise UnsupportedError("a tensor carries metadata other than conj and neg")
    if any(value is not True for value in metadata.values()):
        bad("a tensor's conj or neg is not True")
    if "conj" in metadata and not tensor.dtype.startswith("complex"):
        bad("a tensor of real numbers is marked as conjugated")
    return replace(tensor, conj="conj" in metadata, neg="neg" in metadata)


def unknown(args: tuple[Any, ...]) -> bool:
    """Say whether a tensor's storage is a call that nobody makes: then the tensor is not known either."""
    return bool(args) and isinstance(args[0], Object)


def torch_type(value: object) -> str | None:
    """Return our name of a type of torch's elements, its own where we have none; None for anything else."""
    if type(value) is not Global or value.module != "torch":
        return None
    row = dtypes.BY_TORCH.get(value.name)
    # Names of ours must not be taken for torch's: TensorFlow's int4 is another type.
    return row.name if row else value.full


def _tensor_v1(args: tuple[Any, ...]) -> object:
    return _rebuilt(args) if len(args) == 4 or unknown(args) else _wrong()


def _tensor_v2(args: tuple[Any, ...]) -> object:
    return _rebuilt(args) if len(args) in (6, 7) or unknown(args) else _wrong()


def _tensor_v3(args: tuple[Any, ...]) -> object:
    if unknown(args):
        return NotImplemented
    dtype = torch_type(args[6]) if len(args) in (7, 8) else None
    return _rebuilt((*args[:6], *args[7:]), dtype) if dtype else _wrong()


def _wrong() -> NoReturn:
    bad("a tensor is rebuilt from arguments that torch does not write")


def _rebuilt(args: tuple[Any, ...], dtype: str | None = None) -> object:
    """Return the tensor of a storage, offset, size, stride, requires_grad, hooks and metadata."""
    if unknown(args):
        return NotImplemented
    storage = args[0]
    if not isinstance(storage, Storage):
        _wrong()
    requires_grad = flag(args[4], "requires_grad") if len(args) > 4 else False
    check_hooks(args[5] if len(args) > 5 else None)
    tensor = view(storage, dtype or storage.dtype or "uint8", args[1], args[2], args[3], requires_grad)
    return _with_bits(tensor, args[6] if len(args) > 6 else None)


def _size(args: tuple[Any, ...]) -> object:
    if len(args) > 1:
        bad(f"a torch.Size is made from {len(args):,} arguments")
    known = len(args) == 1 and isinstance(args[0], tuple | list) and all(type(n) is int for n in args[0])
    return Size(args[0]) if known else NotImplemented


REBUILD: dict[str, Builder] = {
    "torch.Size": _size,
    "torch._utils._rebuild_tensor": _tensor_v1,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
}
