"""Tensors that torch's pickles store as several: quantised, sparse, nested; and those without bytes.

Sources: torch/_utils.py (_rebuild_qtensor, _rebuild_sparse_tensor, _rebuild_nested_tensor,
_rebuild_meta_tensor_no_storage, _rebuild_device_tensor_from_numpy), torch/_tensor.py (_reduce_ex_internal).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpttool import dtypes
from ckpttool.errors import UnsupportedError
from ckpttool.formats.torch_pickle import views
from ckpttool.formats.torch_pickle.views import (
    RANK,
    StatefulTensor,
    Storage,
    Tensor,
    bad,
    check_attributes,
    check_hooks,
    flag,
    torch_type,
    unknown,
    view,
)
from ckpttool.leaf import Record
from ckpttool.wire.pickle_numpy import Array
from ckpttool.wire.pickle_reader import Builder, Global


@dataclass(eq=False, slots=True)
class Parts(StatefulTensor):
    """A tensor that is put together from several.

    `kind` is what torch calls the layout or the scheme, `main` the part that has the elements: it is named as
    the whole, and is a parameter if the whole is.
    """

    kind: str
    main: str
    parts: dict[str, Any]

    def as_parameter(self, *, requires_grad: bool) -> Parts:
        """Return the same with the elements marked as a parameter."""
        found = self.parts[self.main]
        if not isinstance(found, Tensor):
            return self
        marked = replace(found, parameter=True, requires_grad=requires_grad)
        return replace(self, parts={**self.parts, self.main: marked})


@dataclass(eq=False, slots=True)
class Backed(StatefulTensor):
    """A tensor whose elements came through a numpy array; it is read as `dtype`."""

    array: Array
    dtype: str
    requires_grad: bool
    parameter: bool = False


# What follows each scheme's name.
_CHANNELS = ("scales", "zero_points", "axis")
_SCHEMES = {
    "torch.per_tensor_affine": ("scale", "zero_point"),
    "torch.per_channel_affine": _CHANNELS,
    "torch.per_channel_affine_float_qparams": _CHANNELS,
}
# The types of the scales by those of the zero points, which decide between the two schemes of a channel.
# torch converts others, and can change numbers.
_SCALES = {"int64": "float64", "float32": "float32"}


def _quantised(args: tuple[Any, ...]) -> object:
    """Return the integers with their scheme: scale and zero point, or scales and zero points of an axis."""
    if unknown(args):
        return NotImplemented
    if len(args) != 7 or not isinstance(args[0], Storage) or not isinstance(args[4], tuple):
        bad("a quantised tensor is rebuilt from arguments that torch does not write")
    storage, offset, size, stride, scheme, requires_grad, hooks = args
    kind = scheme[0].full if scheme and isinstance(scheme[0], Global) else ""
    names = _SCHEMES.get(kind, ())
    dtype = storage.dtype or "uint8"
    if len(scheme) != len(names) + 1 or not dtype.startswith(("qint", "quint")):
        bad("a quantised tensor's scheme or storage is not one that torch writes")
    check_hooks(hooks)
    whole = view(storage, dtype, offset, size, stride, flag(requires_grad, "requires_grad"))
    parts = {"int_repr": whole, **dict(zip(names, scheme[1:], strict=True))}
    if names is _CHANNELS:
        _check_axis(whole, parts, lists=kind == "torch.per_channel_affine")
    elif type(scheme[1]) not in (int, float) or type(scheme[2]) is not int:
        bad("a quantised tensor's scale and zero point are no numbers")
    return Parts(kind, "int_repr", parts)


def _check_axis(whole: Tensor, parts: Mapping[str, Any], *, lists: bool) -> None:
    axis = parts["axis"]
    if type(axis) is not int or not 0 <= axis < len(whole.shape):
        bad("a quantised tensor's axis is none of its dimensions")
    scales, zeros = parts["scales"], parts["zero_points"]
    if isinstance(zeros, Tensor) != isinstance(scales, Tensor) or (
        isinstance(zeros, Tensor) and _SCALES.get(zeros.dtype) != scales.dtype
    ):
        bad("a quantised tensor's scales and zero points do not have types that belong together")
    for name in ("scales", "zero_points"):
        each = parts[name]
        # Of lists torch makes float64 and int64, or float32 where they are not listed as they are used.
        numbers = lists and type(each) is list and _is_numbers(each, whole=name == "zero_points")
        count = each.count if isinstance(each, Tensor) else len(each) if numbers else -1
        if count != whole.shape[axis]:
            bad(
                f"a quantised tensor has not as many {name} as its axis is long",
                expected=f"{whole.shape[axis]:,}",
                found=f"{count:,}" if count >= 0 else "neither tensor nor numbers",
            )


def _is_numbers(value: object, *, whole: bool = True) -> bool:
    """Say whether the value is a list or a tuple of (whole) numbers: all that a part may be but a tensor."""
    kinds = (int,) if whole else (int, float)
    return isinstance(value, list | tuple) and all(type(each) in kinds for each in value)


# What each layout stores, in the order of the pickle.
_SPARSE = {
    "torch.sparse_coo": ("indices", "values", "size", "is_coalesced"),
    "torch.sparse_csr": ("crow_indices", "col_indices", "values", "size"),
    "torch.sparse_bsr": ("crow_indices", "col_indices", "values", "size"),
    "torch.sparse_csc": ("ccol_indices", "row_indices", "values", "size"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices", "values", "size"),
}


_PLAIN = ("size", "is_coalesced")


def _sparse(args: tuple[Any, ...]) -> object:
    _require(args, 2, "a sparse tensor")
    if not isinstance(args[0], Global) or not isinstance(args[1], tuple):
        return NotImplemented
    names = _SPARSE.get(args[0].full)
    if names is None:
        bad("a sparse tensor has a layout that torch does not write", found=args[0].full[:40])
    # Before 1.13 a COO tensor did not say whether it is coalesced.
    if len(args[1]) not in (len(names), 3 if names[:1] == ("indices",) else -1):
        bad("a sparse tensor is rebuilt from parts that torch does not write")
    parts = dict(zip(names, args[1], strict=False))
    if not all(isinstance(each, Tensor) for name, each in parts.items() if name not in _PLAIN):
        bad("a sparse tensor's indices and values are not tensors")
    if not _is_numbers(parts["size"]) or type(parts.get("is_coalesced")) not in (type(None), bool):
        bad("a sparse tensor's size is not made of numbers")
    return Parts(args[0].full, "values", parts)


def _require(args: tuple[Any, ...], count: int, what: str) -> None:
    if len(args) != count:
        bad(f"{what} is rebuilt from {len(args):,} arguments", expected=f"{count:,}", found=f"{len(args):,}")


def _layout(args: tuple[Any, ...]) -> object:
    # torch/serialization.py, _get_layout: layouts are stored by name.
    if len(args) != 1 or type(args[0]) is not str or not args[0].startswith("torch."):
        return NotImplemented
    return Global("torch", args[0].removeprefix("torch."))


def _nested(args: tuple[Any, ...]) -> object:
    names = ("values", "sizes", "strides", "storage_offsets")
    _require(args, 4, "a nested tensor")
    if not all(isinstance(each, Tensor) for each in (args[0], args[1], args[2])):
        return NotImplemented
    if not isinstance(args[3], Tensor) and not _is_numbers(args[3]):
        bad("a nested tensor's offsets are no numbers")
    return Parts("torch.nested", "values", dict(zip(names, args, strict=True)))


def _meta(args: tuple[Any, ...]) -> object:
    """Return a record: a tensor on the meta device has a shape and no bytes."""
    _require(args, 4, "a meta tensor")
    if not isinstance(args[0], Global) or not isinstance(args[1], tuple):
        return NotImplemented
    shape = args[1]
    if len(shape) > RANK:
        raise UnsupportedError(f"a tensor of {len(shape):,} dimensions")
    if any(type(extent) is not int or not 0 <= extent < 1 << 63 for extent in shape):
        bad("a tensor's size is negative or no integer")
    dtype = torch_type(args[0])
    if dtype is None:
        return NotImplemented
    flag(args[3], "requires_grad")
    return Record("torch.Tensor", f"{dtype.removeprefix('torch.')}{list(shape)} on device meta")


def _from_numpy(args: tuple[Any, ...]) -> object:
    _require(args, 4, "a tensor of numpy's")
    if not isinstance(args[0], Array):
        return NotImplemented
    parts, row = args[0].parts(), dtypes.BY_NAME.get(torch_type(args[1]) or "")
    if parts is None or parts.type.name is None or isinstance(parts.data, list) or row is None:
        return NotImplemented
    if parts.type.big:
        bad("a tensor is rebuilt from a numpy array of another machine's byte order")
    if not _keeps(parts.type.name, row.name):
        raise UnsupportedError(f"a tensor of {row.name} is rebuilt from numpy's {parts.type.name}")
    return Backed(args[0], row.name, flag(args[3], "requires_grad"))


def _keeps(stored: str, dtype: str) -> bool:
    """Say whether numpy converts every number of the one type to the other as torch does."""
    # Whole numbers beyond the other type, or NaN, are converted as the machine likes; torch rounds float64
    # to a half by way of float32.
    floats = ("float16", "bfloat16", "float32", "float64")
    return (
        stored == dtype
        or (stored in ("float16", "float32") and dtype in floats)
        or (stored == "float64" and dtype == "float32")
    )


def _from_cpu(args: tuple[Any, ...]) -> object:
    _require(args, 4, "a tensor of another device")
    if not isinstance(args[0], Tensor):
        return NotImplemented
    if torch_type(args[1]) != args[0].dtype:
        return NotImplemented
    return replace(args[0], requires_grad=flag(args[3], "requires_grad"))


def _parameter_class(args: tuple[Any, ...]) -> object:
    """Return what the class itself makes, as before 0.4: of the data, and whether they are trained."""
    if len(args) > 2:
        bad(f"a parameter is made from {len(args):,} arguments")
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
    trained = flag(requires_grad, "requires_grad")
    check_attributes(state)
    if state and getattr(data, "state", None):
        raise UnsupportedError("a parameter gets attributes from two places")
    if isinstance(data, Tensor | Backed):
        return replace(data, parameter=True, requires_grad=trained, state=state or data.state)
    if isinstance(data, Parts):
        return replace(data.as_parameter(requires_grad=trained), state=state or data.state)
    return data if type(data) is Record else NotImplemented


def _variable(args: tuple[Any, ...]) -> object:
    # torch/autograd/variable.py before 0.4: a call with the data; BUILD then gives requires_grad and hooks.
    return replace(args[0]) if args and isinstance(args[0], Tensor) else NotImplemented


_PARAMETERS = ("torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


def _from_type(args: tuple[Any, ...]) -> object:
    """Return the tensor of a subclass, with what was set on it."""
    _require(args, 4, "a tensor of another class")
    if not isinstance(args[0], Global) or not isinstance(args[2], tuple):
        return NotImplemented
    build = REBUILD.get(args[0].full) or views.REBUILD.get(args[0].full)
    made = build(args[2]) if build is not None and build is not _from_type else NotImplemented
    state = args[3]
    check_attributes(state)
    if state and getattr(made, "state", None):
        raise UnsupportedError("a tensor gets attributes from two places")
    if isinstance(made, Tensor | Parts | Backed) and state:
        made = replace(made, state=state)
    kind = args[1].full if isinstance(args[1], Global) else ""
    if kind == _PARAMETERS[0] and isinstance(made, Tensor) and not made.parameter:
        made = replace(made, parameter=True)
    return made


REBUILD: dict[str, Builder] = {
    "torch._utils._rebuild_qtensor": _quantised,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_sparse_csr_tensor": _sparse,
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
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
