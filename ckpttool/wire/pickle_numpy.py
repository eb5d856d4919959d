"""NumPy's arrays, scalars and dtypes as pickles store them; numpy itself is not needed to see them.

Sources: numpy/_core/src/multiarray/methods.c (array_reduce, array_setstate), descriptor.c
(arraydescr_reduce), scalartypes.c.src (gentype_reduce), numpy/_core/numeric.py (_frombuffer).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpttool.errors import FormatError
from ckpttool.wire.pickle_values import Builder, Global, Object, Stored

# The type codes that the formats here know, with struct's code where a scalar can become a number.
_NAMES = {
    "b1": "bool", "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128",
    "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64",
    "u1": "uint8", "u2": "uint16", "u4": "uint32", "u8": "uint64",
}  # fmt: skip
_CODES = {name: code for code, name in _NAMES.items()}
_SCALARS = {
    "b1": "?", "f2": "e", "f4": "f", "f8": "d", "c8": "ff", "c16": "dd",
    "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
}  # fmt: skip


@dataclass(eq=False, slots=True)
class Type:
    """A dtype; `state` is what BUILD adds, its second item the byte order."""

    code: str
    state: object = None

    @property
    def big(self) -> bool:
        """Whether values are stored with the most significant byte first."""
        return isinstance(self.state, tuple) and len(self.state) > 1 and self.state[1] == ">"

    @property
    def name(self) -> str | None:
        """Our name of the type; None for objects, text, dates and records."""
        return _NAMES.get(self.code)


class Parts(NamedTuple):
    """What an array holds: `data` is bytes (Stored if they are long), or a list for an array of objects."""

    type: Type
    shape: tuple[int, ...]
    fortran: bool
    data: bytes | Stored | list[Any]


@dataclass(eq=False, slots=True)
class Array:
    """An array; `state` is what BUILD gives it (version, shape, dtype, order, data)."""

    state: object = None

    def parts(self) -> Parts | None:
        """Return what the array holds, checked; None where nothing but its class is known."""
        state = self.state
        if not isinstance(state, tuple) or len(state) not in (4, 5):
            return None
        shape, kind, fortran, data = state[-4:]
        if not isinstance(shape, tuple) or not isinstance(kind, Type):
            return None
        data = as_bytes(data)
        if not isinstance(data, bytes | Stored | list) or len(shape) > 64:
            return None
        return Parts(kind, _checked(shape, kind, data), bool(fortran), data)


def _checked(shape: tuple[Any, ...], kind: Type, data: bytes | Stored | list[Any]) -> tuple[int, ...]:
    count = 1
    for extent in shape:
        if type(extent) is not int or extent < 0:
            raise FormatError("a pickled array has an impossible shape")
        count *= extent
    digits = kind.code[1:]
    size = int(digits) if not isinstance(data, list) and digits.isascii() and digits.isdigit() else 1
    size *= 4 if kind.code[:1] == "U" else 1
    if count * size != len(data):
        raise FormatError(
            "a pickled array's data do not fill its shape",
            expected=f"{count * size:,} bytes",
            found=f"{len(data):,}",
        )
    return shape


def as_bytes(data: Any) -> Any:
    """Return the bytes that Python 2 stored as text, which the machine makes of its ASCII; others as is."""
    return data.encode("ascii") if type(data) is str and data.isascii() else data


def _type(args: tuple[Any, ...]) -> object:
    known = args and isinstance(args[0], str) and len(args[0]) < 16
    return Type(args[0].lstrip("<>=|")) if known else NotImplemented


def _reconstruct(args: tuple[Any, ...]) -> object:  # noqa: ARG001 - the shape given here is always (0,)
    return Array()


def _from_buffer(args: tuple[Any, ...]) -> object:
    if len(args) != 4 or not isinstance(args[1], Type):
        return NotImplemented
    data, kind, shape, order = args
    return Array((1, shape, kind, order == "F", data))


def _scalar(args: tuple[Any, ...]) -> object:
    if len(args) != 2 or not isinstance(args[0], Type) or not isinstance(as_bytes(args[1]), bytes):
        return NotImplemented
    kind, data = args[0], as_bytes(args[1])
    code = _SCALARS.get(kind.code)
    if code is None:
        return NotImplemented
    layout = struct.Struct((">" if kind.big else "<") + code)
    if layout.size != len(data):
        raise FormatError("a pickled numpy scalar has the wrong size", found=f"{len(data):,} bytes")
    values = layout.unpack(data)
    return complex(*values) if len(values) == 2 else values[0]


def _dilled(args: tuple[Any, ...]) -> object:
    """Return the array that dill rebuilds from a call, its arguments and a state (and attributes)."""
    if len(args) < 3 or type(args[2]) is not tuple or not isinstance(args[0], Global):
        return NotImplemented
    return Array(args[2]) if args[0].full in _RECONSTRUCT else NotImplemented


def name_of(code: str) -> str | None:
    """Return our name of the type that NumPy calls `code` ("f4"), None where there is none."""
    return _NAMES.get(code)


def code_of(name: str) -> str | None:
    """Return NumPy's code of our type `name` ("float32": "f4"), None where there is none."""
    return _CODES.get(name)


def stored(code: str, shape: tuple[int, ...], data: bytes) -> Object:
    """Return the calls by which a pickle gives an array of NumPy's type `code` ("f4") in C order.

    Modules have their old spelling, which NumPy 1 and 2 both know (numpy/core/multiarray.py in 2).
    """
    kind = Object(Global("numpy", "dtype"), (code, False, True), 0)
    kind.state = (3, "|" if code.endswith("1") else "<", None, None, None, -1, -1, 0)
    empty = (Global("numpy", "ndarray"), (0,), b"b")
    array = Object(Global("numpy.core.multiarray", "_reconstruct"), empty, 0)
    array.state = (1, shape, kind, False, data)
    return array


_CORES = ("core", "_core")
_RECONSTRUCT = tuple(f"numpy.{core}.multiarray._reconstruct" for core in _CORES)

# Both spellings: the private module got its underscore in numpy 2.
BUILDERS: Mapping[str, Builder] = {
    "numpy.dtype": _type,
    # dill/_dill.py, save_numpy_array
    "dill._dill._create_array": _dilled,
    **{
        f"numpy.{core}.{name}": build
        for core in _CORES
        for name, build in (
            ("multiarray.scalar", _scalar),
            ("multiarray._reconstruct", _reconstruct),
            ("numeric._frombuffer", _from_buffer),
        )
    },
}
