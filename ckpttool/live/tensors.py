"""A live tensor as a leaf: its type and shape now, its bytes when they are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckpttool import dtypes
from ckpttool.errors import UnsupportedError
from ckpttool.live import kinds
from ckpttool.source import Inline, Shape


@dataclass(frozen=True, slots=True, eq=False)
class Live:
    """The value that a tensor has whenever it is read; a pickled one holds the bytes of that moment."""

    tensor: Any

    def read(self) -> bytes:
        """Return a copy of the value: contiguous little-endian bytes, strings as u64 lengths before bytes.

        Raise UnsupportedError where the tensor has no dense value that this process can see.
        """
        tensor = kinds.plain_value(self.tensor)
        return _torch_bytes(tensor) if kinds.of_class(tensor, "Tensor") else _bytes(tensor)

    def __reduce__(self) -> tuple[type[Inline], tuple[bytes]]:
        """Leave the live object behind: what another process gets is the value."""
        return Inline, (self.read(),)


def described(tensor: Any) -> tuple[str, Shape] | None:
    """Return our name of the type, and the shape; None for what has neither (a lazy parameter)."""
    value = kinds.plain_value(tensor)
    try:
        name = _type_name(value)
        shape = tuple(int(extent) for extent in _shape(value))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        # An unbuilt variable (None), a lazy Parameter, which raises RuntimeError when asked for its shape.
        return None
    return None if name is None else (name, shape)


def _type_name(value: Any) -> str | None:
    kind = value.dtype
    number = getattr(kind, "as_datatype_enum", None)
    if number is not None:
        # References of TensorFlow 1's variables are numbered 100 higher (types.proto).
        row = dtypes.BY_TENSORFLOW.get(number % 100)
    elif kinds.of_class(value, "Tensor"):
        row = dtypes.BY_TORCH.get(str(kind).removeprefix("torch."))
    else:
        row = dtypes.BY_NAME.get(str(kind.name))
    return row.name if row is not None and row.name in dtypes.BY_NAME else None


def _shape(value: Any) -> Any:
    shape = value.shape
    if hasattr(shape, "is_fully_defined") and not shape.is_fully_defined():
        # tf.Variable(shape=tf.TensorShape(None)): only the value knows.
        return value.numpy().shape
    return shape


def identity(tensor: Any) -> object:
    """Return what two names of one value have in common: the object, for torch the view of a storage."""
    value = kinds.plain_value(tensor)
    if value is None:
        return id(tensor)
    if kinds.of_class(value, "Tensor") and type(value).__name__ in ("Tensor", "Parameter", "Buffer"):
        return _view(value)
    return id(value)


def _view(value: Any) -> object:
    if value.is_meta or str(value.layout) != "torch.strided" or not value.numel():
        return id(value)
    # `state_dict` makes a new tensor for every name of a tied weight.
    place = (value.data_ptr(), str(value.device), tuple(value.shape), tuple(value.stride()))
    return (*place, str(value.dtype), bool(value.is_conj()), bool(value.is_neg()))


def _torch_bytes(tensor: Any) -> bytes:
    """Return the bytes of a tensor on any device (torch.Tensor: detach, cpu, resolve_conj, resolve_neg)."""
    import sys

    torch: Any = sys.modules["torch"]
    if tensor.is_meta:
        raise UnsupportedError("the tensor is on the meta device and has no value")
    if str(tensor.layout) != "torch.strided":
        raise UnsupportedError(
            f"a live tensor of layout {str(tensor.layout).removeprefix('torch.')} has no dense value",
            hint="flatten its to_dense()",
        )
    try:
        here = tensor.detach().cpu().resolve_conj().resolve_neg()
        if here.is_quantized:
            here = here.int_repr()
        flat = here.contiguous().reshape(-1).view(torch.uint8)
        return _little(flat.numpy(), here.element_size() // (2 if here.is_complex() else 1))
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise UnsupportedError(f"the value of a {type(tensor).__name__} cannot be read: {reason}") from error


def _little(data: Any, width: int) -> bytes:
    import sys

    if sys.byteorder == "big" and width > 1:
        data = data.reshape(-1, width)[:, ::-1]
    return bytes(data.tobytes())


def _bytes(tensor: Any) -> bytes:
    import numpy as np

    try:
        found = tensor.numpy() if hasattr(tensor, "numpy") else np.asarray(tensor)
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        # A variable of TensorFlow 1's graphs, one that was deleted, one within a traced function.
        raise UnsupportedError(
            f"the value of a {type(tensor).__name__} cannot be read: {str(error).partition(chr(10))[0]}",
            hint="read it in eager mode, or save it and read the checkpoint",
        ) from error
    array = np.asarray(found)
    if array.dtype.hasobject:
        elements = [bytes(element) for element in array.reshape(-1)]
        return b"".join(len(element).to_bytes(8, "little") + element for element in elements)
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
