"""Pickled PyTorch tensors: views, storages, sparse and quantized parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from ckpttool.core import dtypes, limits
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import FormatError, UnsupportedError, abbreviate_list
from ckpttool.core.source import (
    ByteSwappedSource,
    DeflatedSpan,
    Inline,
    Shape,
    Source,
    Span,
    StridedView,
    TransformedSource,
    UnreadableSource,
    is_contiguous,
)
from ckpttool.core.source import Storage as Bytes
from ckpttool.core.tree import Record
from ckpttool.encodings import pickle_values
from ckpttool.encodings.pickle_values import CONTAINERS, Array, Builder, Global, PickleObject, StatefulValue

if TYPE_CHECKING:
    import numpy as np


_SHOWN = 5


class ClassSources:
    """The source code of classes by their dotted names; it is text and is never compiled.

    Source: torch/serialization.py (persistent_id in _legacy_save): ("module", class, source file, source).
    """

    def __init__(self) -> None:
        """Start without classes."""
        self.known: dict[str, dict[str, str]] = {}

    def named(self, lines: Sequence[object]) -> Global | PickleObject:
        """Return the class of a persistent id that contains class, source file and source; keep the last two.

        cloudpickle stores classes by value: those are objects returned by a call.
        """
        kind, file, text = lines
        if not isinstance(kind, Global | PickleObject) or not all(
            isinstance(line, str | bytes | None) for line in lines[1:]
        ):
            raise FormatError("a persistent id does not contain a class and its source")
        if text:
            self.known[_name(kind)] = {"file": _text(file), "source": _text(text)}
        return kind

    def notes(self) -> tuple[str, ...]:
        """Return the note on classes with source code, if there are any."""
        if not self.known:
            return ()
        names = abbreviate_list(list(self.known), _SHOWN)
        return (f"the file contains the source code of classes (as text, shown by --json): {names}",)

    def details(self) -> dict[str, Any]:
        """Return `sources` for a checkpoint's details; empty if there are none."""
        return {"sources": self.known} if self.known else {}


def _name(kind: Global | PickleObject) -> str:
    if isinstance(kind, Global):
        return kind.full
    # cloudpickle/cloudpickle.py, _make_skeleton_class(type, name, ...).
    lines = [arg for arg in kind.args[:2] if type(arg) is str]
    return lines[0] if lines else kind.name


def _text(value: object) -> str:
    # Python 2 wrote bytes.
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")


RANK = 64  # NumPy's limit on dimensions
_LARGEST = (1 << 63) - 1


@dataclass(slots=True, eq=False)
class Storage:
    """A flat buffer; `dtype` is None for an untyped one.

    `bytes` is set later if the file lists the locations of storages after its pickles; `part` marks a
    view of another storage's bytes.
    """

    key: str
    dtype: str | None
    nbytes: int
    bytes: Bytes | Inline
    part: bool = False


# Names that torch.Tensor itself reads and writes; any other attribute belongs to the program.
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
class StatefulTensor(StatefulValue):
    """Arguments of a torch tensor; `state` is what the pickle sets on it."""

    state: object = None

    def set_state(self, state: Any) -> None:
        """Read (requires_grad, volatile, hooks), a Variable's state before 0.4; raise for any other state.

        Other states replace the tensor's storage, data or attributes (Tensor.__setstate__).
        """
        known = type(state) is tuple and len(state) == 3 and type(state[0]) is bool
        if not known or self.state is not None:
            raise UnsupportedError("the pickle sets a state on a tensor that can replace its values")
        check_hooks(state[2])
        self.state = state


def check_hooks(hooks: object) -> None:
    """Raise FormatError unless these are backward hooks in torch's form: a dict, or None."""
    if hooks is not None and not isinstance(hooks, dict):
        fail("a tensor's backward hooks are not a dict")


def require_flag(value: object, what: str) -> bool:
    """Return a flag; raise FormatError unless it is True or False."""
    if type(value) is not bool:
        fail(f"a tensor's {what} is not True or False", found=repr(value)[:40])
    return value


def check_attributes(state: Any) -> None:
    """Raise unless the state is one or two dicts of attributes, without torch.Tensor's own attributes.

    Source: torch/_utils.py, _set_obj_state, which sets each of them, including `data` and `grad`.
    """
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    for part in parts:
        if part is None:
            continue
        if not isinstance(part, dict) or not all(type(name) is str for name in part):
            fail("a tensor's state is not a dict of attributes")
        for name in part:
            if name in _OWN_NAMES or name.startswith("__"):
                raise UnsupportedError(f"the pickle sets torch's own attribute {name[:40]!r} of a tensor")


@dataclass(slots=True, eq=False)
class Tensor(StatefulTensor):
    """A view of a storage; offset and strides are in elements."""

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
    def view(self) -> tuple[object, ...]:
        """What two tensors of one storage have in common if they read the same memory in the same way."""
        return self.dtype, self.offset, self.shape, self.strides, self.conj, self.neg

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class Size(tuple[Any, ...]):
    """A torch.Size."""

    __slots__ = ()


def fail(message: str, *, expected: str | None = None, found: str | None = None) -> NoReturn:
    """Raise FormatError; the caller adds the location."""
    raise FormatError(message, expected=expected, found=found)


_SEQUENCES = (tuple, list)


def build_view(
    storage: Storage, dtype: str, offset: Any, shape: Any, strides: Any, requires_grad: bool = False
) -> Tensor:
    """Return the tensor; raise FormatError unless it fits within its storage.

    Source: torch/_utils.py (_rebuild_tensor, _rebuild_tensor_v2, _rebuild_tensor_v3, set_tensor_metadata).

    Args:
        storage: the flat buffer.
        dtype: the element type.
        offset: position of the first element in the storage, in elements.
        shape: the extent of each axis, as the pickle has it: not yet checked.
        strides: steps between elements along each axis, not yet checked either.
        requires_grad: whether torch trains it.
    """
    if type(offset) is not int or not isinstance(shape, _SEQUENCES) or not isinstance(strides, _SEQUENCES):
        fail("a tensor's offset, size and stride are not an integer and two tuples")
    if len(shape) != len(strides):
        fail("a tensor's numbers of strides and dimensions differ")
    if len(shape) > RANK:
        raise UnsupportedError(f"a tensor has too many dimensions: {len(shape):,}")
    for number in (offset, *shape, *strides):
        if type(number) is not int or number < 0:
            fail("a tensor's offset, size or stride is negative or not an integer")
    tensor = Tensor(storage, dtype, offset, tuple(shape), tuple(strides), requires_grad)
    _fits(tensor)
    return tensor


def _fits(tensor: Tensor) -> None:
    row = dtypes.BY_NAME.get(tensor.dtype)
    if row is None or not row.itemsize:
        return
    count = tensor.count
    # NumPy does not count empty dimensions.
    if (count or math.prod(extent or 1 for extent in tensor.shape)) * row.itemsize > _LARGEST:
        fail("the number of elements of a tensor is too large")
    last = tensor.offset
    for extent, stride in zip(tensor.shape, tensor.strides, strict=True):
        last += (extent - 1) * stride
    needed = -(-(last + 1) * row.itemsize // dtypes.PACKED.get(tensor.dtype, 1))
    if count and needed > tensor.storage.nbytes:
        fail(
            f"a tensor extends past the end of its storage {tensor.storage.key!r}",
            expected=f"at most {tensor.storage.nbytes:,} bytes",
            found=f"{needed:,}",
        )


def _apply_bits(tensor: Tensor, metadata: object) -> Tensor:
    # torch/_utils.py, set_tensor_metadata: the bytes are stored before conj and neg are applied. torch
    # applies each one that is present, whatever its value, and only writes True.
    if metadata is None or metadata == {}:
        return tensor
    if not isinstance(metadata, dict) or not metadata.keys() <= {"conj", "neg"}:
        raise UnsupportedError("a tensor has metadata other than conj and neg")
    if any(value is not True for value in metadata.values()):
        fail("a tensor's conj or neg is not True")
    if "conj" in metadata and not tensor.dtype.startswith("complex"):
        fail("a tensor of real numbers is marked as conjugated")
    return replace(tensor, conj="conj" in metadata, neg="neg" in metadata)


def has_unbuilt_storage(args: tuple[Any, ...]) -> bool:
    """Return whether a tensor's storage is an unexecuted call: then the tensor is unknown too."""
    return bool(args) and isinstance(args[0], PickleObject)


def torch_type(value: object) -> str | None:
    """Return the name of a torch element type: ckpttool's, or torch's if there is none; otherwise None."""
    if type(value) is not Global or value.module != "torch":
        return None
    row = dtypes.BY_TORCH.get(value.name)
    # ckpttool's names must not be confused with torch's: TensorFlow's int4 is another type.
    return row.name if row else value.full


def _tensor_v1(args: tuple[Any, ...]) -> object:
    return _rebuild_tensor(args) if len(args) == 4 or has_unbuilt_storage(args) else _fail_arguments()


def _tensor_v2(args: tuple[Any, ...]) -> object:
    return _rebuild_tensor(args) if len(args) in (6, 7) or has_unbuilt_storage(args) else _fail_arguments()


def _tensor_v3(args: tuple[Any, ...]) -> object:
    if has_unbuilt_storage(args):
        return NotImplemented
    dtype = torch_type(args[6]) if len(args) in (7, 8) else None
    return _rebuild_tensor((*args[:6], *args[7:]), dtype) if dtype else _fail_arguments()


def _fail_arguments() -> NoReturn:
    fail("a tensor has arguments that torch does not write")


def _rebuild_tensor(args: tuple[Any, ...], dtype: str | None = None) -> object:
    """Return the tensor of a storage, offset, size, stride, requires_grad, hooks and metadata."""
    if has_unbuilt_storage(args):
        return NotImplemented
    storage = args[0]
    if not isinstance(storage, Storage):
        _fail_arguments()
    requires_grad = require_flag(args[4], "requires_grad") if len(args) > 4 else False
    check_hooks(args[5] if len(args) > 5 else None)
    tensor = build_view(storage, dtype or storage.dtype or "uint8", args[1], args[2], args[3], requires_grad)
    return _apply_bits(tensor, args[6] if len(args) > 6 else None)


def _build_size(args: tuple[Any, ...]) -> object:
    if len(args) > 1:
        fail(f"a torch.Size has {len(args):,} arguments")
    known = len(args) == 1 and isinstance(args[0], tuple | list) and all(type(n) is int for n in args[0])
    return Size(args[0]) if known else NotImplemented


TENSOR_BUILDERS: dict[str, Builder] = {
    "torch.Size": _build_size,
    "torch._utils._rebuild_tensor": _tensor_v1,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
}


@dataclass(eq=False, slots=True)
class CompositeTensor(StatefulTensor):
    """A tensor assembled from several tensors.

    `kind` is torch's name of the layout or scheme, `main` the part that contains the elements: it has the
    name of the whole, and is a parameter if the whole is. Sources: torch/_utils.py (_rebuild_qtensor,
    _rebuild_sparse_tensor, _rebuild_nested_tensor, _rebuild_meta_tensor_no_storage,
    _rebuild_device_tensor_from_numpy), torch/_tensor.py (_reduce_ex_internal).
    """

    kind: str
    main: str
    parts: dict[str, Any]

    def as_parameter(self, *, requires_grad: bool) -> CompositeTensor:
        """Return a copy with the elements marked as a parameter."""
        main = self.parts[self.main]
        if not isinstance(main, Tensor):
            return self
        marked = replace(main, parameter=True, requires_grad=requires_grad)
        return replace(self, parts={**self.parts, self.main: marked})


@dataclass(eq=False, slots=True)
class ArrayBackedTensor(StatefulTensor):
    """A tensor whose elements are stored as a NumPy array; it is read as `dtype`."""

    array: Array
    dtype: str
    requires_grad: bool
    parameter: bool = False


# Arguments after each scheme's name.
_CHANNELS = ("scales", "zero_points", "axis")
_SCHEMES = {
    "torch.per_tensor_affine": ("scale", "zero_point"),
    "torch.per_channel_affine": _CHANNELS,
    "torch.per_channel_affine_float_qparams": _CHANNELS,
}
# Types of the scales by those of the zero points, which select one of the two per-channel schemes. torch
# converts other types, which can change numbers.
_SCALES = {"int64": "float64", "float32": "float32"}


def _quantized_tensor(args: tuple[Any, ...]) -> object:
    """Return the integers with their scheme: scale and zero point, or scales and zero points per channel."""
    if has_unbuilt_storage(args):
        return NotImplemented
    if len(args) != 7 or not isinstance(args[0], Storage) or not isinstance(args[4], tuple):
        fail("a quantised tensor has arguments that torch does not write")
    storage, offset, size, stride, scheme, requires_grad, hooks = args
    kind = scheme[0].full if scheme and isinstance(scheme[0], Global) else ""
    names = _SCHEMES.get(kind, ())
    dtype = storage.dtype or "uint8"
    if len(scheme) != len(names) + 1 or not dtype.startswith(("qint", "quint")):
        fail("a quantised tensor has a scheme or storage that torch does not write")
    check_hooks(hooks)
    whole = build_view(storage, dtype, offset, size, stride, require_flag(requires_grad, "requires_grad"))
    parts = {"int_repr": whole, **dict(zip(names, scheme[1:], strict=True))}
    if names is _CHANNELS:
        _check_axis(whole, parts, lists=kind == "torch.per_channel_affine")
    elif type(scheme[1]) not in (int, float) or type(scheme[2]) is not int:
        fail("a quantised tensor's scale and zero point are not numbers")
    return CompositeTensor(kind, "int_repr", parts)


def _check_axis(whole: Tensor, parts: Mapping[str, Any], *, lists: bool) -> None:
    axis = parts["axis"]
    if type(axis) is not int or not 0 <= axis < len(whole.shape):
        fail("a quantised tensor's axis is out of range")
    scales, zeros = parts["scales"], parts["zero_points"]
    if isinstance(zeros, Tensor) != isinstance(scales, Tensor) or (
        isinstance(zeros, Tensor) and _SCALES.get(zeros.dtype) != scales.dtype
    ):
        fail("the types of a quantised tensor's scales and zero points do not match")
    for name in ("scales", "zero_points"):
        part = parts[name]
        # torch converts lists to float64 and int64, or to float32 if they are not listed as they are used.
        numbers = lists and type(part) is list and _is_numbers(part, whole=name == "zero_points")
        count = part.count if isinstance(part, Tensor) else len(part) if numbers else -1
        if count != whole.shape[axis]:
            fail(
                f"expected one entry in {name} per channel of a quantised tensor",
                expected=f"{whole.shape[axis]:,}",
                found=f"{count:,}" if count >= 0 else "neither tensor nor numbers",
            )


def _is_numbers(value: object, *, whole: bool = True) -> bool:
    """Return whether the value is a list or a tuple of (whole) numbers, the only alternative to a tensor."""
    kinds = (int,) if whole else (int, float)
    return isinstance(value, list | tuple) and all(type(item) in kinds for item in value)


# Parts stored by each layout, in pickle order.
_SPARSE = {
    "torch.sparse_coo": ("indices", "values", "size", "is_coalesced"),
    "torch.sparse_csr": ("crow_indices", "col_indices", "values", "size"),
    "torch.sparse_bsr": ("crow_indices", "col_indices", "values", "size"),
    "torch.sparse_csc": ("ccol_indices", "row_indices", "values", "size"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices", "values", "size"),
}


_PLAIN = ("size", "is_coalesced")


def _sparse_tensor(args: tuple[Any, ...]) -> object:
    _require(args, 2, "a sparse tensor")
    if not isinstance(args[0], Global) or not isinstance(args[1], tuple):
        return NotImplemented
    names = _SPARSE.get(args[0].full)
    if names is None:
        fail("a sparse tensor has a layout that torch does not write", found=args[0].full[:40])
    # Before 1.13, a COO tensor did not record whether it is coalesced.
    if len(args[1]) not in (len(names), 3 if names[:1] == ("indices",) else -1):
        fail("a sparse tensor has parts that torch does not write")
    parts = dict(zip(names, args[1], strict=False))
    if not all(isinstance(part, Tensor) for name, part in parts.items() if name not in _PLAIN):
        fail("a sparse tensor's indices and values are not tensors")
    if not _is_numbers(parts["size"]) or type(parts.get("is_coalesced")) not in (type(None), bool):
        fail("a sparse tensor's size is not made of numbers")
    return CompositeTensor(args[0].full, "values", parts)


def _require(args: tuple[Any, ...], count: int, what: str) -> None:
    if len(args) != count:
        fail(f"{what} has {len(args):,} arguments", expected=f"{count:,}", found=f"{len(args):,}")


def _layout(args: tuple[Any, ...]) -> object:
    # torch/serialization.py, _get_layout: layouts are stored by name.
    if len(args) != 1 or type(args[0]) is not str or not args[0].startswith("torch."):
        return NotImplemented
    return Global("torch", args[0].removeprefix("torch."))


def _nested_tensor(args: tuple[Any, ...]) -> object:
    names = ("values", "sizes", "strides", "storage_offsets")
    _require(args, 4, "a nested tensor")
    if not all(isinstance(argument, Tensor) for argument in (args[0], args[1], args[2])):
        return NotImplemented
    if not isinstance(args[3], Tensor) and not _is_numbers(args[3]):
        fail("a nested tensor's offsets are not numbers")
    return CompositeTensor("torch.nested", "values", dict(zip(names, args, strict=True)))


def _meta_record(args: tuple[Any, ...]) -> object:
    """Return a record: a tensor on the meta device has a shape but no bytes."""
    _require(args, 4, "a meta tensor")
    if not isinstance(args[0], Global) or not isinstance(args[1], tuple):
        return NotImplemented
    shape = args[1]
    if len(shape) > RANK:
        raise UnsupportedError(f"a tensor has too many dimensions: {len(shape):,}")
    if any(type(extent) is not int or not 0 <= extent < 1 << 63 for extent in shape):
        fail("a tensor's size is negative or not an integer")
    dtype = torch_type(args[0])
    if dtype is None:
        return NotImplemented
    require_flag(args[3], "requires_grad")
    return Record("torch.Tensor", f"{dtype.removeprefix('torch.')}{list(shape)} on device meta")


def _from_numpy(args: tuple[Any, ...]) -> object:
    _require(args, 4, "a tensor stored as a NumPy array")
    if not isinstance(args[0], Array):
        return NotImplemented
    parts, row = args[0].parts(), dtypes.BY_NAME.get(torch_type(args[1]) or "")
    if parts is None or parts.type.name is None or isinstance(parts.data, list) or row is None:
        return NotImplemented
    if parts.type.big:
        fail("a tensor is stored as a NumPy array with the byte order of another machine")
    if not _converts_exactly(parts.type.name, row.name):
        raise UnsupportedError(f"a tensor of {row.name} is stored as a NumPy array of {parts.type.name}")
    return ArrayBackedTensor(args[0], row.name, require_flag(args[3], "requires_grad"))


def _converts_exactly(stored: str, dtype: str) -> bool:
    """Return whether NumPy converts every number of one type to the other as torch does."""
    # Integers outside the other type's range, and NaN, are converted in a machine-dependent way; torch rounds
    # float64 to half precision through float32.
    floats = ("float16", "bfloat16", "float32", "float64")
    return (
        stored == dtype
        or (stored in ("float16", "float32") and dtype in floats)
        or (stored == "float64" and dtype == "float32")
    )


def _from_cpu(args: tuple[Any, ...]) -> object:
    _require(args, 4, "a tensor on another device")
    if not isinstance(args[0], Tensor):
        return NotImplemented
    if torch_type(args[1]) != args[0].dtype:
        return NotImplemented
    return replace(args[0], requires_grad=require_flag(args[3], "requires_grad"))


def _parameter_class(args: tuple[Any, ...]) -> object:
    """Return the result of calling the class, as before 0.4: from the data and whether it is trained."""
    if len(args) > 2:
        fail(f"a parameter has {len(args):,} arguments")
    if not args:
        return NotImplemented
    return _as_parameter(args[0], args[1] if len(args) > 1 else True)


def _parameter(args: tuple[Any, ...]) -> object:
    _require(args, 3, "a parameter")
    check_hooks(args[2])
    return _as_parameter(args[0], args[1])


def _parameter_with_state(args: tuple[Any, ...]) -> object:
    _require(args, 4, "a parameter")
    check_hooks(args[2])
    return _as_parameter(args[0], args[1], args[3])


def _as_parameter(data: Any, requires_grad: object, state: object = None) -> object:
    trained = require_flag(requires_grad, "requires_grad")
    check_attributes(state)
    if state and getattr(data, "state", None):
        raise UnsupportedError("a parameter has attributes from two sources")
    if isinstance(data, Tensor | ArrayBackedTensor):
        return replace(data, parameter=True, requires_grad=trained, state=state or data.state)
    if isinstance(data, CompositeTensor):
        return replace(data.as_parameter(requires_grad=trained), state=state or data.state)
    return data if type(data) is Record else NotImplemented


def _variable(args: tuple[Any, ...]) -> object:
    # torch/autograd/variable.py before 0.4: a call with the data; BUILD then sets requires_grad and hooks.
    return replace(args[0]) if args and isinstance(args[0], Tensor) else NotImplemented


_PARAMETERS = ("torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


def _from_type(args: tuple[Any, ...]) -> object:
    """Return the tensor of a subclass, with its attributes."""
    _require(args, 4, "a tensor of another class")
    if not isinstance(args[0], Global) or not isinstance(args[2], tuple):
        return NotImplemented
    build = COMPOSITE_BUILDERS.get(args[0].full) or TENSOR_BUILDERS.get(args[0].full)
    tensor = build(args[2]) if build is not None and build is not _from_type else NotImplemented
    state = args[3]
    check_attributes(state)
    if state and getattr(tensor, "state", None):
        raise UnsupportedError("a tensor has attributes from two sources")
    if isinstance(tensor, Tensor | CompositeTensor | ArrayBackedTensor) and state:
        tensor = replace(tensor, state=state)
    kind = args[1].full if isinstance(args[1], Global) else ""
    if kind == _PARAMETERS[0] and isinstance(tensor, Tensor) and not tensor.parameter:
        tensor = replace(tensor, parameter=True)
    return tensor


COMPOSITE_BUILDERS: dict[str, Builder] = {
    "torch._utils._rebuild_qtensor": _quantized_tensor,
    "torch._utils._rebuild_sparse_tensor": _sparse_tensor,
    "torch._utils._rebuild_sparse_csr_tensor": _sparse_tensor,
    "torch._utils._rebuild_nested_tensor": _nested_tensor,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta_record,
    "torch._utils._rebuild_device_tensor_from_numpy": _from_numpy,
    "torch._utils._rebuild_xla_tensor": _from_numpy,
    "torch._utils._rebuild_mlc_tensor": _from_numpy,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _from_cpu,
    "torch.nn.parameter.Parameter": _parameter_class,
    "torch.autograd.variable.Variable": _variable,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter_with_state,
    "torch._tensor._rebuild_from_type": _from_type,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.tensor._rebuild_from_type": _from_type,
    "torch.serialization._get_layout": _layout,
}


class ArrayOperation(NamedTuple):
    """Change applied to a stored array when it is read: one NumPy operation that keeps the element type.

    "conj halves" and "neg halves" read complex32, which NumPy lacks, as pairs of float16.
    """

    kind: Literal["conj", "neg", "conj halves", "neg halves", "byteswap", "reverse"]

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:
        """Return the same dtype; only "reverse" (Fortran order) reverses the shape."""
        return dtype, shape[::-1] if self.kind == "reverse" else shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the changed array."""
        if self.kind == "reverse":
            return array.T
        if self.kind == "byteswap":
            return array.byteswap()
        if self.kind == "conj halves":
            turned = array.copy()
            turned[..., 1] *= -1
            return turned
        return array.conj() if self.kind == "conj" else -array


class CastOperation(NamedTuple):
    """The same numbers in another element type, as torch's `Tensor.to(dtype)` when it rebuilds a tensor."""

    dtype: str

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:  # noqa: ARG002 - the contract's
        """Return the new dtype."""
        return self.dtype, shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the converted array."""
        return array.astype(dtypes.numpy_dtype(self.dtype))


class ExpansionBudget:
    """Limit on the expansion of one pickle's tensors, relative to the bytes stored for them.

    Views may repeat a few bytes many times, each below the limit for one tensor; and a compressed
    storage is unpacked again for a partial view, unless the previous view was of the same storage.
    """

    def __init__(self) -> None:
        """Start with nothing stored and nothing expanded."""
        self.allowed = limits.current()
        self.stored = self.shown = 0
        self.last: object = None

    def source(self, tensor: Tensor, nbytes: int, *, big: bool, first: bool) -> Source:
        """Return the location of the tensor's `nbytes` bytes; `first` marks the first use of its storage.

        `big` marks data written on a big-endian machine.
        """
        data, whole = tensor.storage.bytes, tensor.storage.nbytes
        if first and not tensor.storage.part:
            self.stored += data.base.length if isinstance(data, DeflatedSpan) else whole
        again = isinstance(data, DeflatedSpan) and self.last is not data
        self.shown += max(nbytes, whole if again else 0)
        self.last = data
        if self._beyond(self.shown, self.stored):
            return _unreadable_source(
                tensor, f"reading all tensors would expand {self.stored:,} stored bytes to {self.shown:,}"
            )
        if self._beyond(nbytes, whole):
            return _unreadable_source(
                tensor, f"reading a view would expand {whole:,} stored bytes to {nbytes:,}"
            )
        return _tensor_source(tensor, nbytes, big=big)

    def _beyond(self, nbytes: int, stored: int) -> bool:
        return nbytes > self.allowed.expanded_bytes and nbytes > self.allowed.expanded_ratio * stored


def _unreadable_source(tensor: Tensor, reason: str) -> UnreadableSource:
    data = tensor.storage.bytes
    base = data.base if isinstance(data, DeflatedSpan) else data
    hint = "use ckpttool --limit expanded_bytes=N ... to allow more, if you trust the file"
    return UnreadableSource(None if isinstance(base, Inline) else base.file.path, reason, hint)


def _tensor_source(tensor: Tensor, nbytes: int, *, big: bool) -> Source:
    width = dtypes.component_size(tensor.dtype) if big else 0
    if big and width != dtypes.component_size(tensor.storage.dtype or "uint8"):
        # torch swaps bytes according to the storage's type, not the tensor's (serialization.py, load_tensor).
        where = tensor.storage.bytes
        file = where.file.path if isinstance(where, Span) else None
        return UnreadableSource(file, f"torch misreads {tensor.dtype} in an untyped big-endian storage")
    source = _stored_source(tensor, nbytes, width)
    dtype, shape = tensor.dtype, tensor.shape
    halves = dtype == "complex32"
    if halves:
        dtype, shape = "float16", (*shape, 2)
    if tensor.conj:
        source = TransformedSource(source, dtype, shape, ArrayOperation("conj halves" if halves else "conj"))
    if tensor.neg:
        source = TransformedSource(source, dtype, shape, ArrayOperation("neg halves" if halves else "neg"))
    return source


def _stored_source(tensor: Tensor, nbytes: int, width: int) -> Source:
    data, itemsize = tensor.storage.bytes, dtypes.BY_NAME[tensor.dtype].itemsize
    if not nbytes:
        return Inline(b"")
    if nbytes == tensor.storage.nbytes and not tensor.offset and is_contiguous(tensor.shape, tensor.strides):
        if width <= 1:
            return data
        if isinstance(data, Span):
            return ByteSwappedSource(data, width)
    return StridedView(data, itemsize, tensor.shape, tensor.strides, tensor.offset, width if width > 1 else 0)


def array_source(parts: pickle_values.ArrayContents) -> Source:
    """Return a pickled NumPy array's bytes in C order, little-endian."""
    name = parts.type.name or ""
    source: Source = Inline(bytes(parts.data))
    if parts.type.big and dtypes.BY_NAME[name].itemsize > 1:
        source = TransformedSource(source, name, parts.shape, ArrayOperation("byteswap"))
    if parts.fortran and len(parts.shape) > 1:
        source = TransformedSource(source, name, parts.shape[::-1], ArrayOperation("reverse"))
    return source


def cast_source(source: Source, stored: str, shape: Shape, dtype: str) -> Source:
    """Return the source of the same numbers as `dtype`."""
    return source if stored == dtype else TransformedSource(source, stored, shape, CastOperation(dtype))


_LONGEST_SHOWN = 200
_UNTYPED = frozenset(
    f"{module}.{name}"
    for module in ("torch", "torch.cuda", "torch.storage")
    for name in ("UntypedStorage", "_UntypedStorage")
)

# Returns the location of the storage with a key and a size in bytes; raises if there is none of that size.
Place = Callable[[str, int], Bytes]


class StorageTable:
    """The storages of one pickle by their keys.

    Source: torch/serialization.py (persistent_id, _load, _legacy_load).
    """

    def __init__(self, context: Place) -> None:
        """Call `context` once for each key."""
        self.context = context
        self.known: dict[str, Storage] = {}

    def persistent(self, pid: object, length: int = 5) -> Storage:
        """Return the storage of a persistent id; raise FormatError unless torch writes it.

        `length` is the number of items of the id in this file format.
        """
        if not isinstance(pid, tuple) or len(pid) != length or pid[0] not in ("storage", b"storage"):
            raise FormatError("a persistent id does not name a storage")
        kind, key, count = pid[1], pid[2], pid[4]
        check_location(pid[3])
        if not isinstance(kind, Global) or type(key) is not str or type(count) is not int or count < 0:
            raise FormatError("a storage's persistent id is not in the form that torch writes")
        dtype = storage_dtype(kind)
        nbytes = count * storage_itemsize(dtype)
        known = self.known.get(key)
        if known is None:
            known = self.known[key] = Storage(key, dtype, nbytes, self.context(key, nbytes))
        elif (known.dtype or "uint8", known.nbytes) != (dtype or "uint8", nbytes):
            # An untyped storage counts bytes: torch writes both types for a tensor of bytes and a view of it.
            raise FormatError(f"storage {key!r} is used with two types or sizes")
        return known


def check_location(location: object) -> None:
    """Raise if a storage was on the `meta` device, for which torch reads no bytes."""
    if location in ("meta", b"meta"):
        raise UnsupportedError("a storage is on the meta device: torch reads no bytes for it")
    if not isinstance(location, str | bytes):
        raise FormatError("a storage's location is not a string")


def storage_dtype(kind: Global) -> str | None:
    """Return the element type of a storage class, None for an untyped one; raise UnsupportedError."""
    # Typed classes are in torch and torch.cuda; untyped ones had a leading underscore.
    if kind.full in _UNTYPED:
        return None
    row = dtypes.BY_STORAGE.get(kind.name)
    if row is None or kind.module.partition(".")[0] != "torch":
        raise UnsupportedError(f"unknown storage class {kind.full[:_LONGEST_SHOWN]!r}")
    return row.name


def storage_itemsize(dtype: str | None) -> int:
    """Return the size in bytes of one unit of a storage's count."""
    return dtypes.BY_NAME[dtype].itemsize if dtype else 1


def _first_argument(args: tuple[Any, ...]) -> object:
    return args[0] if args else NotImplemented


def _graph_module(args: tuple[Any, ...]) -> object:
    """Return the traced module as an object: the first argument is its attributes, then source code."""
    if not args or not isinstance(args[0], dict):
        return NotImplemented
    return PickleObject(_GRAPH, args[1:], 0, state=args[0])


_GRAPH = Global("torch.fx.graph_module", "GraphModule")

# Functions that also occur in plain pickles of torch objects.
REBUILD: Mapping[str, Builder] = {
    **TENSOR_BUILDERS,
    **COMPOSITE_BUILDERS,
    # torch/fx/graph_module.py, GraphModule.__reduce__
    "torch.fx.graph_module.reduce_graph_module": _graph_module,
}

BUILDERS: Mapping[str, Builder] = {
    **CONTAINERS,
    **pickle_values.BUILDERS,
    **REBUILD,
    # TorchScript tags its lists and dicts with their types.
    "torch.jit._pickle.build_intlist": _first_argument,
    "torch.jit._pickle.build_doublelist": _first_argument,
    "torch.jit._pickle.build_boollist": _first_argument,
    "torch.jit._pickle.build_tensorlist": _first_argument,
    "torch.jit._pickle.restore_type_tag": _first_argument,
}
