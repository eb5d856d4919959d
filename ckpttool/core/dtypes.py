"""Table of element types: our name, the size, and the name in every format; and NumPy, imported on use."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ckpttool.core.deferred import DeferredModule, NamedTuple
from ckpttool.core.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy

    np = numpy
else:
    np = DeferredModule("numpy")


class DType(NamedTuple):
    """One element type.

    `itemsize` is in bytes (0: elements have no fixed size). `tensorflow` is the number in
    tensorflow/core/framework/types.proto. `storage` is torch's typed storage class (absent for types
    that torch saves as untyped storage), `torch` the attribute of the torch module, `safetensors`
    the code in a safetensors header. `extension` means that numpy needs ml_dtypes for it.
    """

    name: str
    itemsize: int
    tensorflow: int | None = None
    storage: str | None = None
    torch: str | None = None
    safetensors: str | None = None
    extension: bool = False


TABLE: tuple[DType, ...] = (
    DType("float32", 4, 1, "FloatStorage", "float32", "F32"),
    DType("float64", 8, 2, "DoubleStorage", "float64", "F64"),
    DType("int32", 4, 3, "IntStorage", "int32", "I32"),
    DType("uint8", 1, 4, "ByteStorage", "uint8", "U8"),
    DType("int16", 2, 5, "ShortStorage", "int16", "I16"),
    DType("int8", 1, 6, "CharStorage", "int8", "I8"),
    DType("string", 0, 7),
    DType("complex64", 8, 8, "ComplexFloatStorage", "complex64", "C64"),
    DType("int64", 8, 9, "LongStorage", "int64", "I64"),
    DType("bool", 1, 10, "BoolStorage", "bool", "BOOL"),
    DType("qint8", 1, 11, "QInt8Storage", "qint8"),
    DType("quint8", 1, 12, "QUInt8Storage", "quint8"),
    DType("qint32", 4, 13, "QInt32Storage", "qint32"),
    DType("bfloat16", 2, 14, "BFloat16Storage", "bfloat16", "BF16", extension=True),
    DType("qint16", 2, 15),
    DType("quint16", 2, 16),
    DType("uint16", 2, 17, None, "uint16", "U16"),
    DType("complex128", 16, 18, "ComplexDoubleStorage", "complex128"),
    DType("float16", 2, 19, "HalfStorage", "float16", "F16"),
    DType("resource", 0, 20),
    DType("variant", 0, 21),
    DType("uint32", 4, 22, None, "uint32", "U32"),
    DType("uint64", 8, 23, None, "uint64", "U64"),
    DType("float8_e5m2", 1, 24, None, "float8_e5m2", "F8_E5M2", extension=True),
    DType("float8_e4m3fn", 1, 25, None, "float8_e4m3fn", "F8_E4M3", extension=True),
    DType("float8_e4m3fnuz", 1, 26, None, "float8_e4m3fnuz", "F8_E4M3FNUZ", extension=True),
    DType("float8_e4m3b11fnuz", 1, 27, extension=True),
    DType("float8_e5m2fnuz", 1, 28, None, "float8_e5m2fnuz", "F8_E5M2FNUZ", extension=True),
    # One byte each in memory and in TensorFlow's files.
    DType("int4", 1, 29, extension=True),
    DType("uint4", 1, 30, extension=True),
    DType("int2", 1, 31, extension=True),
    DType("uint2", 1, 32, extension=True),
    # Unknown type of a tensor stored inside another tensor that is missing.
    DType("unknown", 0),
    DType("float8_e8m0fnu", 1, None, None, "float8_e8m0fnu", "F8_E8M0", extension=True),
    # Two halves; no array library has this type, so its bytes can be read but not its numbers.
    DType("complex32", 4, None, None, "complex32"),
    # Several elements share what torch counts as one byte (c10/core/ScalarType.h): listed, never read.
    DType("quint4x2", 1, None, "QUInt4x2Storage", "quint4x2"),
    DType("quint2x4", 1, None, "QUInt2x4Storage", "quint2x4"),
)

# Number of elements per byte.
PACKED = {"quint4x2": 2, "quint2x4": 4}

BY_NAME: dict[str, DType] = {row.name: row for row in TABLE}
BY_TENSORFLOW: dict[int, DType] = {r.tensorflow: r for r in TABLE if r.tensorflow is not None}
BY_STORAGE: dict[str, DType] = {r.storage: r for r in TABLE if r.storage is not None}
BY_SAFETENSORS: dict[str, DType] = {r.safetensors: r for r in TABLE if r.safetensors is not None}
BY_TORCH: dict[str, DType] = {r.torch: r for r in TABLE if r.torch is not None}
BY_TORCH.update(half=BY_NAME["float16"], float=BY_NAME["float32"], double=BY_NAME["float64"])
BY_TORCH.update(short=BY_NAME["int16"], int=BY_NAME["int32"], long=BY_NAME["int64"])
BY_TORCH.update(chalf=BY_NAME["complex32"], cfloat=BY_NAME["complex64"])
BY_TORCH.update(cdouble=BY_NAME["complex128"])

_QUANTIZED = {"qint8": "int8", "quint8": "uint8", "qint16": "int16", "quint16": "uint16"}
_QUANTIZED["qint32"] = "int32"
_BYTES_ONLY = frozenset(("complex32", *PACKED))


def plain_name(name: str) -> str:
    """Return the type for reading a type's numbers: the underlying integers for quantized types."""
    return _QUANTIZED.get(name, name)


def same_family(one: str, other: str) -> bool:
    """Return whether two types have the same kind of numbers, so values can be cast between them."""
    return one == other or _number_family(one) == _number_family(other) is not None


def is_widening(one: str, other: str) -> bool:
    """Return whether the second type represents every number of the first one exactly."""
    if one == other:
        return True
    if {one, other} <= {"float16", "bfloat16", "float32", "float64"}:
        return BY_NAME[one].itemsize < BY_NAME[other].itemsize
    sorts = [next((s for s in ("uint", "int") if name.startswith(s)), None) for name in (one, other)]
    return sorts[0] == sorts[1] is not None and BY_NAME[one].itemsize < BY_NAME[other].itemsize


def _number_family(name: str) -> str | None:
    return next((sort for sort in ("float", "complex", "int") if name.lstrip("bu").startswith(sort)), None)


@cache
def numpy_dtype(name: str) -> np.dtype:
    """Return the little-endian numpy dtype of `name`; raise UnsupportedError if none fits."""
    row = BY_NAME.get(name)
    if row is None or not row.itemsize:
        raise UnsupportedError(
            f"tensors of type {name} cannot be read as numbers: their elements have no fixed size"
        )
    if name in _BYTES_ONLY:
        raise UnsupportedError(f"tensors of type {name} can be read only as bytes, not as numbers")
    if row.extension:
        import ml_dtypes

        extension: np.dtype = np.dtype(getattr(ml_dtypes, name))
        return extension
    return np.dtype(plain_name(name)).newbyteorder("<")


def component_size(name: str) -> int:
    """Return the unit of a byte swap in bytes: half an element for complex types."""
    size = BY_NAME[name].itemsize
    return size // 2 if name.startswith("complex") else size


# NumPy's type codes, without the byte order.
_NUMPY_NAMES = {
    "b1": "bool", "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128",
    "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64",
    "u1": "uint8", "u2": "uint16", "u4": "uint32", "u8": "uint64",
}  # fmt: skip
_NUMPY_CODES = {name: code for code, name in _NUMPY_NAMES.items()}


def dtype_name(code: str) -> str | None:
    """Return our name of NumPy's type `code` ("f4"), None if there is none."""
    return _NUMPY_NAMES.get(code)


def numpy_code(name: str) -> str | None:
    """Return NumPy's code of our type `name` ("float32": "f4"), None if there is none."""
    return _NUMPY_CODES.get(name)
