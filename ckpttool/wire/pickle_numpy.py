"""NumPy's arrays, scalars and dtypes as pickles store them; numpy itself is not needed to see them.

Sources: numpy/_core/src/multiarray/methods.c (array_reduce, array_setstate), descriptor.c
(arraydescr_reduce), scalartypes.c.src (gentype_reduce), numpy/_core/numeric.py (_frombuffer).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.wire.pickle_values import Builder, Global, Object, Stateful, Stored

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


_ORDERS = ("<", ">", "=", "|")
_RANK, _SHOWN, _LONGEST = 64, 40, 16
_LONG = ("f12", "f16", "c24", "c32")  # of some machines
# One letter of NumPy's, a size, a unit of time.
_CODE = re.compile(r"[?abBcdDeFfgGhHiIlLmMnNOpPqQSuUV][0-9]{0,9}(?:\[[0-9A-Za-z]{1,8}\])?")


@dataclass(eq=False, slots=True)
class Type(Stateful):
    """A dtype; `order` is its byte order, `state` what BUILD added.

    `fixed` says that NumPy shares it and lets no pickle change it, `used` that an array was made of it.
    """

    code: str
    order: str = "="
    fixed: bool = False
    used: bool = False
    state: object = None

    def set_state(self, state: Any) -> None:
        """Take the byte order; raise FormatError for a state that is not the one of a number's type."""
        if self.used or self.fixed or self.state is not None:
            raise FormatError("a numpy dtype is changed after it was made")
        self.state = state
        self.order = _order(state, number=self.name is not None)

    @property
    def big(self) -> bool:
        """Whether values are stored with the most significant byte first."""
        return self.order == ">"

    @property
    def name(self) -> str | None:
        """Our name of the type; None for objects, text, dates and records."""
        return _NAMES.get(self.code)


def _order(state: Any, *, number: bool) -> str:
    """Return the byte order that a state says (descriptor.c, arraydescr_setstate: versions 0 to 4).

    Without version it has five items; the names of fields came with the second, flags with the third.
    """
    if type(state) is not tuple or not 5 <= len(state) <= 9:
        raise FormatError("a numpy dtype has a state that NumPy does not write")
    version, rest = (0, state) if len(state) == 5 else (state[0], state[1:])
    order = rest[0].decode("latin-1") if type(rest[0]) is bytes else rest[0]
    inner, (size, alignment, *more) = (rest[1:3], rest[3:]) if len(rest) == 5 else (rest[1:4], rest[4:])
    if type(version) is not int or not 0 <= version <= 4 or order not in _ORDERS:
        raise FormatError(
            "a numpy dtype has an unknown version or byte order", found=repr(state[:2])[:_SHOWN]
        )
    if type(size) is not int or type(alignment) is not int or (more and type(more[0]) is not int):
        raise FormatError("a numpy dtype's size, alignment or flags are no integers")
    if not number:
        return str(order)
    if any(part is not None for part in inner) or size != -1 or alignment != -1:
        raise FormatError("a numpy dtype of numbers has parts, or a size of its own")
    if more and more[0]:
        raise FormatError("a numpy dtype of numbers has flags", found=repr(more[0])[:_SHOWN])
    return str(order)


class Parts(NamedTuple):
    """What an array holds: `data` is bytes (Stored if they are long), or a list for an array of objects."""

    type: Type
    shape: tuple[int, ...]
    fortran: bool
    data: bytes | Stored | list[Any]


@dataclass(eq=False, slots=True)
class Array(Stateful):
    """An array; its state is (version, shape, dtype, order, data), or the same without the version."""

    held: Parts | None = None
    given: bool = False

    @property
    def hashable(self) -> bool:
        """Whether it can be a dict's key, as a scalar can."""
        return self.held is not None and not self.held.shape

    def set_state(self, state: Any) -> None:
        """Take what the array holds; raise FormatError where NumPy would not, or not in one way."""
        if self.given:
            raise FormatError("a numpy array gets its data twice")
        self.given = True
        if type(state) is not tuple or len(state) not in (4, 5):
            raise FormatError("a numpy array has a state that NumPy does not write")
        version = state[0] if len(state) == 5 else 0
        if type(version) is not int or version not in (0, 1):
            raise FormatError("a numpy array's state has an unknown version", found=repr(version)[:_SHOWN])
        shape, kind, fortran, data = state[-4:]
        if type(shape) is not tuple or len(shape) > _RANK or not isinstance(kind, Type | Object):
            raise FormatError("a numpy array's state has no shape or no dtype")
        if type(fortran) not in (bool, int) or fortran not in (0, 1):
            raise FormatError("a numpy array's order is neither C nor Fortran", found=repr(fortran)[:_SHOWN])
        # A dtype of another package (ml_dtypes, JAX) is a class; nothing is known of its items.
        self.held = _parts(kind, shape, bool(fortran), data) if isinstance(kind, Type) else None

    def parts(self) -> Parts | None:
        """Return what the array holds; None where nothing but its class is known."""
        found = self.held
        if found is not None and isinstance(found.data, list):
            # The list may have grown since NumPy took what was in it.
            _require_full(found.type, found.shape, found.data)
        return found


def _parts(kind: Type, shape: tuple[Any, ...], fortran: bool, data: Any) -> Parts:
    data = as_bytes(data)
    if not isinstance(data, list if kind.code[:1] == "O" else bytes | Stored):
        raise FormatError("a numpy array's data are not of its type")
    if any(type(extent) is not int or extent < 0 for extent in shape):
        raise FormatError("a pickled array has an impossible shape")
    _require_full(kind, shape, data)
    kind.used = True
    return Parts(kind, shape, fortran, data)


def _require_full(kind: Type, shape: tuple[int, ...], data: bytes | Stored | list[Any]) -> None:
    digits = kind.code[1:]
    size = int(digits) if not isinstance(data, list) and digits.isascii() and digits.isdigit() else 1
    size *= 4 if kind.code[:1] == "U" else 1
    count = size * math.prod(shape)
    if count != len(data):
        raise FormatError(
            "a pickled array's data do not fill its shape",
            expected=f"{count:,} bytes",
            found=f"{len(data):,}",
        )


def as_bytes(data: Any) -> Any:
    """Return the bytes that NumPy takes text for (Python 2 stored them as that); others as they are."""
    if type(data) is not str:
        return data
    try:
        return data.encode("latin-1")
    except UnicodeEncodeError:
        return data


def _type(args: tuple[Any, ...]) -> object:
    # (code, align, copy): without a copy it is the one of all arrays.
    if not 1 <= len(args) <= 3 or not all(type(flag) in (bool, int) for flag in args[1:]):
        raise FormatError("a numpy dtype is made of arguments that NumPy does not write")
    if not isinstance(args[0], str) or len(args[0]) > _LONGEST:
        return NotImplemented
    order = args[0][:1] if args[0][:1] in _ORDERS else "="
    made = Type(args[0][1:] if args[0][:1] in _ORDERS else args[0], order)
    if not _CODE.fullmatch(made.code):
        return NotImplemented
    if made.code[0] in "biufc" and len(made.code) > 1 and made.name is None and made.code not in _LONG:
        raise FormatError("a numpy dtype has a size that its kind does not have", found=made.code[:_SHOWN])
    made.fixed = made.name is not None and (len(args) < 3 or not args[2])
    return made


def made(*state: Any) -> Array:
    """Return the array of this state."""
    found = Array()
    found.set_state(state)
    return found


def _reconstruct(args: tuple[Any, ...]) -> object:
    # The class, a shape and a type that do not matter: the state brings all three.
    if len(args) != 3 or not isinstance(args[0], Global) or args[1] != (0,) or args[2] not in (b"b", "b"):
        raise FormatError("a numpy array is rebuilt from arguments that NumPy does not write")
    return Array()


_READ_ORDERS = {"C": False, "A": False, None: False, "F": True}


def _from_buffer(args: tuple[Any, ...]) -> object:
    if len(args) not in (4, 5) or not isinstance(args[1], Type) or type(args[2]) is not tuple:
        raise FormatError("a numpy array is made of a buffer by arguments that NumPy does not write")
    data, kind, shape, order = args[:4]
    order = order.decode("latin-1") if type(order) is bytes else order
    order = order.upper() if type(order) is str else order
    if (order is not None and type(order) is not str) or order not in _READ_ORDERS:
        raise FormatError("a numpy array's order is neither C nor Fortran", found=repr(order)[:_SHOWN])
    return made(1, shape, kind, _READ_ORDERS[order], data)


def _scalar(args: tuple[Any, ...]) -> object:
    kind, data = scalar_parts(args)
    if not isinstance(kind, Type) or kind.code not in _SCALARS:
        return NotImplemented
    kind.used = True
    layout = struct.Struct((">" if kind.big else "<") + _SCALARS[kind.code])
    if layout.size != len(data):
        raise FormatError("a pickled numpy scalar has the wrong size", found=f"{len(data):,} bytes")
    values = layout.unpack(data)
    return complex(*values) if len(values) == 2 else values[0]


def scalar_parts(args: tuple[Any, ...]) -> tuple[Type | Object, Any]:
    """Return the dtype of a scalar and its bytes; raise FormatError for a call that NumPy does not write."""
    if len(args) != 2 or not isinstance(args[0], Type | Object):
        raise FormatError("a numpy scalar is made of other than a dtype and bytes")
    data = as_bytes(args[1])
    if isinstance(args[0], Type) and args[0].name is not None and type(data) is not bytes:
        raise FormatError("a numpy scalar is made of other than a dtype and bytes")
    return args[0], data


def _array_class(args: tuple[Any, ...]) -> object:
    """Refuse a call of the class itself: its numbers are whatever memory holds, or a buffer's."""
    raise UnsupportedError("the pickle makes a numpy array by its class", found=f"{len(args)} arguments")


def _dilled(args: tuple[Any, ...]) -> object:
    """Return the array that dill rebuilds from a call, its arguments and a state (and attributes)."""
    if len(args) < 3 or type(args[2]) is not tuple or not isinstance(args[0], Global):
        return NotImplemented
    return made(*args[2]) if args[0].full in _RECONSTRUCT else NotImplemented


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
    "numpy.ndarray": _array_class,
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
