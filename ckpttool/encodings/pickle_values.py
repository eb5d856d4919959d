"""Values of pickles: inert records, NumPy objects, and the writer."""

from __future__ import annotations

import collections
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from ckpttool.core import deferred, limits
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.dtypes import dtype_name, np
from ckpttool.core.errors import FormatError, UnsupportedError

# Names in Python 2 and pickle protocols below 3 for today's modules (Lib/_compat_pickle.py).
RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg", "cPickle": "pickle", "exceptions": "builtins"}
# A call's result may be called, and so on: the chain is not followed further than this.
_LED = 16
# Python randomises only the hashes of text and bytes. A file can choose numbers, and tuples of numbers, that
# all fall into one slot of a dict; every insertion then visits all earlier ones.
SPREAD = 64  # keys that a dict may have before they are counted
_SMALL = 1 << 20  # integers below it have adjacent slots in a dict
_SAME = 64  # maximum number of keys of one dict with the same hash
_LONG = 1000  # maximum characters of an item of a tuple key: such keys are shown as written
_FROZEN = "builtins.frozenset"
ATOMS = frozenset((str, int, bool, float, type(None), bytes, complex))


class Global(NamedTuple):
    """A name in a pickle; it is never imported."""

    module: str
    name: str

    @property
    def full(self) -> str:
        """Dotted name."""
        return f"{self.module}.{self.name}" if self.module else self.name


@dataclass(eq=False, slots=True)
class StoredBytes:
    """Bytes left in place: `length` bytes from position `at` of the pickle `data`."""

    data: bytes
    at: int
    length: int

    def __len__(self) -> int:
        """Return the number of bytes."""
        return self.length

    def __bytes__(self) -> bytes:
        """Return a copy of the bytes."""
        return self.data[self.at : self.at + self.length]


@dataclass(eq=False, slots=True)
class PickleObject:
    """A call that was not executed, and the pickle's later changes to its result.

    `function` is the called object: a Global, or the inert result of another call. `state` is the
    argument of BUILD, `items` are appended items, `entries` are set by key.
    """

    function: object
    args: tuple[Any, ...]
    offset: int
    kwargs: Mapping[object, Any] | None = None
    state: object = None
    items: list[Any] | None = None
    entries: dict[object, Any] | None = None

    @property
    def name(self) -> str:
        """Dotted name of the class or function."""
        target = self.function
        for _ in range(_LED):
            if not isinstance(target, PickleObject):
                break
            target = target.function
        return target.full if isinstance(target, Global) else type(target).__name__


class StatefulValue:
    """A value that validates the states that a pickle may set on it."""

    __slots__ = ()

    @property
    def hashable(self) -> bool:
        """Whether Python accepts the value as a dict key."""
        return True

    def set_state(self, state: Any) -> None:
        """Set the argument of BUILD; raise FormatError if it would change what was read."""
        raise NotImplementedError


class Dict(dict[Any, Any]):
    """A dict of a known class (`name`), with the attributes from BUILD."""

    __slots__ = ("name", "state")

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.state: object = None


class Set(list[Any]):
    """Items of a set in file order; `visited` has the identity of each (see value_identity)."""

    __slots__ = ("name", "visited")

    def __init__(self, name: str, items: list[Any] | tuple[Any, ...] = ()) -> None:
        super().__init__(items)
        self.name = name
        self.visited: set[Any] = set()

    def add(self, items: list[Any] | tuple[Any, ...]) -> None:
        """Add new items; raise FormatError for one that no set can contain."""
        for item in items:
            frozen = type(item) is Set and item.name == _FROZEN
            if not frozen and not is_hashable(item):
                raise FormatError(f"a {type(item).__name__} is an item of a set")
            if is_plain(item):
                name = value_identity(item)
                if name in self.visited:
                    continue
                self.visited.add(name)
            self.append(item)


@dataclass(eq=False, slots=True)
class OpaqueKey:
    """A dict key that is not hashed by value: a container, or one of many that may collide."""

    value: object


class KeyTracker:
    """Keys of one dict whose hashes a file can choose, from its SPREADth on.

    `target` is the dict, kept alive so that its id stays unique.
    """

    __slots__ = ("hashes", "keys", "target")

    def __init__(self, target: dict[Any, Any]) -> None:
        """Count the keys that the dict already has."""
        self.target = target
        self.hashes: dict[int, int] = {}
        self.keys = {value_identity(key) for key in target if is_plain(key)}

    def keep(self, value: Any, most: int) -> Any:
        """Return the value, or an OpaqueKey after `most` such keys or too many with the same hash.

        Raise FormatError when an OpaqueKey equals another key: both would be listed, but Python keeps
        one.
        """
        if len(self.hashes) < most:
            number = hash(value)
            count = self.hashes.get(number, 0)
            if count < _SAME:
                self.hashes[number] = count + 1
                self.keys.add(value_identity(value))
                return value
        name = value_identity(value)
        if name in self.keys:
            raise FormatError("a dict in the pickle has the same key twice")
        self.keys.add(name)
        return OpaqueKey(value)


def is_hashable(value: Any) -> bool:
    """Return whether the value is neither a container nor an array, without looking into tuples."""
    return value.hashable if isinstance(value, StatefulValue) else not isinstance(value, list | dict)


def has_spread_hash(value: Any, count: int) -> bool:
    """Return whether a key of a dict with `count` entries has a hash that a file cannot make collide."""
    kind = type(value)
    if kind is int:
        return bool(-_SMALL <= value < _SMALL + 8 * count)
    return kind is Global or not (kind is float or kind is complex or isinstance(value, tuple))


def is_plain(value: Any) -> bool:
    """Return whether the value is text, bytes, a number, None or a short tuple of these.

    Hashing a longer tuple takes time at each use as a key, however often the pickle repeats it.
    """
    if type(value) in ATOMS:
        return True
    if not isinstance(value, tuple) or isinstance(value, Global):
        return False
    most = limits.current().pickle_key_items
    todo, count = [value], 0
    while todo:
        items = todo.pop()
        count += len(items)
        if count > most:
            return False
        for item in items:
            if isinstance(item, tuple):
                todo.append(item)
            elif type(item) not in ATOMS or (type(item) in (str, bytes) and len(item) > _LONG):
                return False
    return True


def value_identity(value: Any) -> Any:
    """Return a value that is equal for two plain values exactly if they are; its hash is randomised."""
    return value if type(value) in (str, bytes) else (_identity_text(value),)


def _identity_text(value: Any) -> str:
    kind = type(value)
    if kind in (float, complex) and value != value:
        return f"nan {id(value)}"
    if kind is complex and not value.imag:
        value, kind = value.real, float
    if (kind is float and value.is_integer()) or kind is bool:
        return repr(int(value))
    if kind is complex:
        # Zeros of both signs are equal.
        return f"{value.real + 0.0!r}{value.imag + 0.0!r}j"
    if isinstance(value, tuple):
        return f"({','.join(map(_identity_text, value))},)"
    return repr(value)


Builder = Callable[[tuple[Any, ...]], Any]


def _dict_builder(name: str) -> Builder:
    def build(args: tuple[Any, ...]) -> object:
        # A defaultdict's argument creates its missing values; a Counter's is its contents.
        result = Dict(name)
        if name != "collections.defaultdict" and len(args) == 1 and type(args[0]) in (dict, Dict):
            result.update(args[0])
        elif name == "collections.OrderedDict" and len(args) == 1 and _are_text_pairs(args[0]):
            # Python 2.7's Lib/collections.py, OrderedDict.__reduce__, passes the items as pairs.
            result.update(args[0])
        elif args and not (name == "collections.defaultdict" and _is_default_factory(args)):
            if len(args) > 2 or name == "collections.Counter":
                raise FormatError(f"a {name} is created from arguments that no pickler writes")
            return NotImplemented
        return result

    return build


def _is_default_factory(args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and (args[0] is None or isinstance(args[0], Global | PickleObject))


def _are_text_pairs(pairs: object) -> bool:
    # Keys that are not text would need PickleMachine.key before they can be hashed.
    return isinstance(pairs, list) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and type(pair[0]) is str for pair in pairs
    )


def _set_builder(name: str) -> Builder:
    def build(args: tuple[Any, ...]) -> object:
        if len(args) > 1:
            raise FormatError(f"a {name} is created from {len(args):,} arguments")
        plain = not args or isinstance(args[0], list | tuple)
        if not plain:
            return NotImplemented
        result = Set(name)
        result.add(args[0] if args else ())
        return result

    return build


def _build_complex(args: tuple[Any, ...]) -> object:
    if len(args) > 2:
        raise FormatError(f"a complex number is created from {len(args):,} arguments")
    if len(args) == 2 and all(type(part) in (float, int) for part in args):
        return complex(float(args[0]), float(args[1]))
    return NotImplemented


def _build_encoded(args: tuple[Any, ...]) -> object:
    # Protocols below 3 store bytes as text (Lib/pickle.py, save_bytes).
    if not 1 <= len(args) <= 3 or not isinstance(args[0], str):
        raise FormatError("the pickle encodes a value that is not text")
    if len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1"):
        return args[0].encode("latin-1")
    return NotImplemented


def _build_bytes(args: tuple[Any, ...]) -> object:
    # bytearray(n) would be n zeros: only data from the file is kept.
    if not args:
        return b""
    if len(args) > 3:
        raise FormatError(f"bytes are created from {len(args):,} arguments")
    if len(args) == 1 and isinstance(args[0], bytes | StoredBytes):
        return args[0]
    if len(args) == 2 and isinstance(args[0], str):
        return _build_encoded(args)
    return NotImplemented


def _build_object(args: tuple[Any, ...]) -> object:
    # copyreg.py: protocols 0 and 1 create an object of args[0], as the newer helpers do.
    if not args or not isinstance(args[0], Global):
        return NotImplemented
    rest = args[1:]
    return PickleObject(args[0], () if rest == (Global("builtins", "object"), None) else rest, 0)


# Classes whose `__new__` has the arguments of a call; other classes' `__new__` ignores them.
MADE_BY_NEW = frozenset(
    (
        "builtins.bytes",
        "builtins.complex",
        "builtins.frozenset",
        "numpy.dtype",
        "torch.Size",
        "torch.autograd.variable.Variable",
        "torch.nn.parameter.Parameter",
    )
)
METHODS = frozenset(dir(collections.OrderedDict))

# Rebuilding the standard library's containers: each function returns data, or NotImplemented for an unknown
# form (the call then stays an inert PickleObject).
CONTAINERS: Mapping[str, Builder] = {
    "collections.OrderedDict": _dict_builder("collections.OrderedDict"),
    "collections.defaultdict": _dict_builder("collections.defaultdict"),
    "collections.Counter": _dict_builder("collections.Counter"),
    "builtins.set": _set_builder("builtins.set"),
    "builtins.frozenset": _set_builder("builtins.frozenset"),
    "builtins.complex": _build_complex,
    "builtins.bytearray": _build_bytes,
    "builtins.bytes": _build_bytes,
    "_codecs.encode": _build_encoded,
    "copyreg._reconstructor": _build_object,
    "copyreg.__newobj__": _build_object,
}
# struct's codes of NumPy's types, where a scalar can become a number.
_SCALARS = {
    "b1": "?", "f2": "e", "f4": "f", "f8": "d", "c8": "ff", "c16": "dd",
    "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
}  # fmt: skip


_ORDERS = ("<", ">", "=", "|")
_RANK, _SHOWN, _LONGEST = 64, 40, 16
_LONG_DOUBLE_CODES = ("f12", "f16", "c24", "c32")  # only on some machines
# One letter of NumPy's, a size, a time unit.
_CODE = deferred.compile(r"[?abBcdDeFfgGhHiIlLmMnNOpPqQSuUV][0-9]{0,9}(?:\[[0-9A-Za-z]{1,8}\])?")


@dataclass(eq=False, slots=True)
class PickledDType(StatefulValue):
    """A dtype; `order` is its byte order, `state` the argument of BUILD.

    `fixed` means that NumPy shares it and a pickle cannot change it, `used` that an array has this
    dtype.
    """

    code: str
    order: str = "="
    fixed: bool = False
    used: bool = False
    state: object = None

    def set_state(self, state: Any) -> None:
        """Set the byte order; raise FormatError for a state that is not that of a numeric type."""
        if self.used or self.fixed or self.state is not None:
            raise FormatError("a numpy dtype is changed after its creation")
        self.state = state
        self.order = _parse_byte_order(state, number=self.name is not None)

    @property
    def big(self) -> bool:
        """Whether values are stored with the most significant byte first."""
        return self.order == ">"

    @property
    def name(self) -> str | None:
        """Our name of the type; None for objects, text, dates and records."""
        return dtype_name(self.code)


def _parse_byte_order(state: Any, *, number: bool) -> str:
    """Return the byte order of a state (descriptor.c, arraydescr_setstate: versions 0 to 4).

    Without a version it has five items; field names came with the second version, flags with the
    third.
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
        raise FormatError("a numpy dtype's size, alignment or flags are not integers")
    if not number:
        return str(order)
    if any(part is not None for part in inner) or size != -1 or alignment != -1:
        raise FormatError("a numeric numpy dtype has fields, a subarray or an explicit size")
    if more and more[0]:
        raise FormatError("a numeric numpy dtype has flags", found=repr(more[0])[:_SHOWN])
    return str(order)


class ArrayContents(NamedTuple):
    """Contents of an array: `data` is bytes (StoredBytes if they are long), or a list for an object array."""

    type: PickledDType
    shape: tuple[int, ...]
    fortran: bool
    data: bytes | StoredBytes | list[Any]


@dataclass(eq=False, slots=True)
class Array(StatefulValue):
    """An array; its state is (version, shape, dtype, order, data), or the same without the version."""

    contents: ArrayContents | None = None
    is_given: bool = False

    @property
    def hashable(self) -> bool:
        """Whether it can be a dict key, as a scalar can."""
        return self.contents is not None and not self.contents.shape

    def set_state(self, state: Any) -> None:
        """Set the contents; raise FormatError for a state that NumPy rejects or treats inconsistently."""
        if self.is_given:
            raise FormatError("the data of a numpy array is set twice")
        self.is_given = True
        if type(state) is not tuple or len(state) not in (4, 5):
            raise FormatError("a numpy array has a state that NumPy does not write")
        version = state[0] if len(state) == 5 else 0
        if type(version) is not int or version not in (0, 1):
            raise FormatError("a numpy array's state has an unknown version", found=repr(version)[:_SHOWN])
        shape, kind, fortran, data = state[-4:]
        if (
            type(shape) is not tuple
            or len(shape) > _RANK
            or not isinstance(kind, PickledDType | PickleObject)
        ):
            raise FormatError("a numpy array's state has no shape or no dtype")
        if type(fortran) not in (bool, int) or fortran not in (0, 1):
            raise FormatError("a numpy array's order is neither C nor Fortran", found=repr(fortran)[:_SHOWN])
        # A dtype of another package (ml_dtypes, JAX) is a class; its items are unknown.
        self.contents = (
            _make_contents(kind, shape, bool(fortran), data) if isinstance(kind, PickledDType) else None
        )

    def parts(self) -> ArrayContents | None:
        """Return the contents; None if only the class is known."""
        contents = self.contents
        if contents is not None and isinstance(contents.data, list):
            # The list may have grown since NumPy read it.
            _require_filled_shape(contents.type, contents.shape, contents.data)
        return contents


def _make_contents(kind: PickledDType, shape: tuple[Any, ...], fortran: bool, data: Any) -> ArrayContents:
    data = text_to_bytes(data)
    if not isinstance(data, list if kind.code[:1] == "O" else bytes | StoredBytes):
        raise FormatError("the data of a numpy array does not match its dtype")
    if any(type(extent) is not int or extent < 0 for extent in shape):
        raise FormatError("a pickled array has an impossible shape")
    _require_filled_shape(kind, shape, data)
    kind.used = True
    return ArrayContents(kind, shape, fortran, data)


def _require_filled_shape(
    kind: PickledDType, shape: tuple[int, ...], data: bytes | StoredBytes | list[Any]
) -> None:
    digits = kind.code[1:]
    size = int(digits) if not isinstance(data, list) and digits.isascii() and digits.isdigit() else 1
    size *= 4 if kind.code[:1] == "U" else 1
    count = size * math.prod(shape)
    if count != len(data):
        raise FormatError(
            "a pickled array's size in bytes does not match its shape",
            expected=f"{count:,} bytes",
            found=f"{len(data):,}",
        )


def text_to_bytes(data: Any) -> Any:
    """Return text as the bytes that Python 2 stored with it; other data unchanged."""
    if type(data) is not str:
        return data
    try:
        return data.encode("latin-1")
    except UnicodeEncodeError:
        return data


def _build_dtype(args: tuple[Any, ...]) -> object:
    # (code, align, copy): without a copy, it is the dtype shared by all arrays.
    if not 1 <= len(args) <= 3 or not all(type(flag) in (bool, int) for flag in args[1:]):
        raise FormatError("a numpy dtype is created from arguments that NumPy does not write")
    if not isinstance(args[0], str) or len(args[0]) > _LONGEST:
        return NotImplemented
    order = args[0][:1] if args[0][:1] in _ORDERS else "="
    dtype = PickledDType(args[0][1:] if args[0][:1] in _ORDERS else args[0], order)
    if not _CODE.fullmatch(dtype.code):
        return NotImplemented
    if (
        dtype.code[0] in "biufc"
        and len(dtype.code) > 1
        and dtype.name is None
        and dtype.code not in _LONG_DOUBLE_CODES
    ):
        raise FormatError(
            "a numpy dtype has a size that does not exist for its kind", found=dtype.code[:_SHOWN]
        )
    dtype.fixed = dtype.name is not None and (len(args) < 3 or not args[2])
    return dtype


def make_array(*state: Any) -> Array:
    """Return the array of this state."""
    array = Array()
    array.set_state(state)
    return array


def _build_empty_array(args: tuple[Any, ...]) -> object:
    # The class, a shape and a type that are ignored: the state contains all three.
    if len(args) != 3 or not isinstance(args[0], Global) or args[1] != (0,) or args[2] not in (b"b", "b"):
        raise FormatError("a numpy array is rebuilt from arguments that NumPy does not write")
    return Array()


_READ_ORDERS = {"C": False, "A": False, None: False, "F": True}


def _build_from_buffer(args: tuple[Any, ...]) -> object:
    if len(args) not in (4, 5) or not isinstance(args[1], PickledDType) or type(args[2]) is not tuple:
        raise FormatError("a numpy array is created from a buffer with arguments that NumPy does not write")
    data, kind, shape, order = args[:4]
    if order == "K" and len(args) == 5 and args[4] is not None:
        return _build_transposed(data, kind, shape, args[4])
    order = order.decode("latin-1") if type(order) is bytes else order
    order = order.upper() if type(order) is str else order
    if (order is not None and type(order) is not str) or order not in _READ_ORDERS:
        raise FormatError("a numpy array's order is neither C nor Fortran", found=repr(order)[:_SHOWN])
    return make_array(1, shape, kind, _READ_ORDERS[order], data)


def _build_transposed(data: Any, kind: PickledDType, shape: tuple[Any, ...], axes: Any) -> object:
    """Return the array whose bytes have the axes `axes` of the result in their order (NumPy 2.4)."""
    stored = make_array(1, shape, kind, False, data)
    whole = type(axes) is tuple and all(type(axis) is int for axis in axes)
    if not whole or sorted(axes) != list(range(len(shape))):
        raise FormatError("a numpy array's axes are not a permutation", found=repr(axes)[:_SHOWN])
    contents = stored.parts()
    if contents is None or isinstance(contents.data, list):
        return NotImplemented
    turned = tuple(shape[axis] for axis in axes)
    count = math.prod(shape)
    if not count:
        return make_array(1, turned, kind, False, b"")
    numbers = np.frombuffer(bytes(contents.data), f"V{len(contents.data) // count}").reshape(shape)
    return make_array(1, turned, kind, False, numbers.transpose(axes).tobytes())


def _build_scalar(args: tuple[Any, ...]) -> object:
    kind, data = scalar_parts(args)
    if not isinstance(kind, PickledDType) or kind.code not in _SCALARS:
        return NotImplemented
    kind.used = True
    layout = struct.Struct((">" if kind.big else "<") + _SCALARS[kind.code])
    if layout.size != len(data):
        raise FormatError("a pickled numpy scalar has the wrong size", found=f"{len(data):,} bytes")
    values = layout.unpack(data)
    return complex(*values) if len(values) == 2 else values[0]


def scalar_parts(args: tuple[Any, ...]) -> tuple[PickledDType | PickleObject, Any]:
    """Return a scalar's dtype and bytes; raise FormatError for a call that NumPy does not write."""
    if len(args) != 2 or not isinstance(args[0], PickledDType | PickleObject):
        raise FormatError("a numpy scalar is not created from a dtype and bytes")
    data = text_to_bytes(args[1])
    if isinstance(args[0], PickledDType) and args[0].name is not None and type(data) is not bytes:
        raise FormatError("a numpy scalar is not created from a dtype and bytes")
    return args[0], data


def _refuse_array_class(args: tuple[Any, ...]) -> object:
    """Reject a call of the class itself: its data would be uninitialised memory, or a buffer's."""
    raise UnsupportedError(
        "the pickle creates a numpy array by calling its class", found=f"{len(args)} arguments"
    )


def _build_dill_array(args: tuple[Any, ...]) -> object:
    """Return the array that dill rebuilds from a call, its arguments and a state (and attributes)."""
    if len(args) < 3 or type(args[2]) is not tuple or not isinstance(args[0], Global):
        return NotImplemented
    return make_array(*args[2]) if args[0].full in _RECONSTRUCT else NotImplemented


def pickle_array(code: str, shape: tuple[int, ...], data: bytes) -> PickleObject:
    """Return the calls that a pickle needs for an array of NumPy's type `code` ("f4") in C order.

    Modules have their old names, which NumPy 1 and 2 both accept (numpy/core/multiarray.py in 2).
    """
    kind = PickleObject(Global("numpy", "dtype"), (code, False, True), 0)
    kind.state = (3, "|" if code.endswith("1") else "<", None, None, None, -1, -1, 0)
    empty = (Global("numpy", "ndarray"), (0,), b"b")
    array = PickleObject(Global("numpy.core.multiarray", "_reconstruct"), empty, 0)
    array.state = (1, shape, kind, False, data)
    return array


_CORES = ("core", "_core")
_RECONSTRUCT = tuple(f"numpy.{core}.multiarray._reconstruct" for core in _CORES)

# Both names: the private module got its underscore in numpy 2.
BUILDERS: Mapping[str, Builder] = {
    "numpy.dtype": _build_dtype,
    "numpy.ndarray": _refuse_array_class,
    # dill/_dill.py, save_numpy_array
    "dill._dill._create_array": _build_dill_array,
    **{
        f"numpy.{core}.{name}": build
        for core in _CORES
        for name, build in (
            ("multiarray.scalar", _build_scalar),
            ("multiarray._reconstruct", _build_empty_array),
            ("numeric._frombuffer", _build_from_buffer),
        )
    },
}


# Protocol 2 is Python 2's: its readers use these modules' old names (Lib/_compat_pickle.py), and it
# has no bytes type. Protocol 4 has no opcodes that read to the end of a line, which some streams cannot do.
_PROTOCOLS = (2, 4)
_OLD_NAMES = {"builtins": "__builtin__", "copyreg": "copy_reg"}
_DEPTH = 250
_ORDERED = Global("collections", "OrderedDict")
_ENCODE = Global("_codecs", "encode")


class PersistentId(NamedTuple):
    """A reference to an object outside the pickle, by its id."""

    pid: tuple[Any, ...]


def dumps(value: Any, protocol: int = _PROTOCOLS[0]) -> bytes:
    """Return the pickle of plain values, Globals, PickleObjects (calls), Dicts, Sets and PersistentIds.

    Raise UnsupportedError for anything else.
    """
    writer = _PickleWriter(protocol)
    writer.value(value, 0)
    return b"".join((b"\x80", bytes((protocol,)), *writer.parts, b"."))


class _PickleWriter:
    """Opcodes so far; repeated texts and names are read back from the memo."""

    def __init__(self, protocol: int) -> None:
        self.old = protocol == _PROTOCOLS[0]
        self.parts: list[bytes] = []
        self.memo: dict[object, int] = {}

    def value(self, value: Any, depth: int) -> None:
        if depth > _DEPTH:
            raise UnsupportedError(f"cannot write values nested more than {_DEPTH} levels deep")
        write = _WRITERS.get(type(value))
        if write is None:
            raise UnsupportedError(f"cannot write a value of type {type(value).__name__} to a pickle")
        write(self, value, depth + 1)

    def remembered(self, value: object) -> bool:
        """Write a memo reference and return True if the value was written before."""
        number = self.memo.get(value)
        if number is not None:
            self.parts.append(bytes((0x68, number)) if number < 256 else b"j" + number.to_bytes(4, "little"))
        return number is not None

    def remember(self, value: object) -> None:
        number = self.memo[value] = len(self.memo)
        self.parts.append(bytes((0x71, number)) if number < 256 else b"r" + number.to_bytes(4, "little"))

    def call(self, function: Any, args: tuple[Any, ...], depth: int) -> None:
        self.value(function, depth)
        self.value(args, depth)
        self.parts.append(b"R")

    def items(self, values: Any, end: bytes, depth: int) -> None:
        """Write the values between a mark and the opcode that consumes them; nothing if there are none."""
        if values:
            self.parts.append(b"(")
            for value in values:
                self.value(value, depth)
            self.parts.append(end)


def _write_none(writer: _PickleWriter, value: None, depth: int) -> None:  # noqa: ARG001
    writer.parts.append(b"N")


def _write_bool(writer: _PickleWriter, value: bool, depth: int) -> None:  # noqa: ARG001
    writer.parts.append(b"\x88" if value else b"\x89")


def _write_int(writer: _PickleWriter, value: int, depth: int) -> None:  # noqa: ARG001
    if 0 <= value < 1 << 8:
        writer.parts.append(b"K" + value.to_bytes(1, "little"))
    elif 0 <= value < 1 << 16:
        writer.parts.append(b"M" + value.to_bytes(2, "little"))
    elif -(1 << 31) <= value < 1 << 31:
        writer.parts.append(b"J" + value.to_bytes(4, "little", signed=True))
    else:
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(raw) > 255:
            raise UnsupportedError(f"cannot write an integer of {len(raw):,} bytes")
        writer.parts.append(b"\x8a" + bytes((len(raw),)) + raw)


def _write_float(writer: _PickleWriter, value: float, depth: int) -> None:  # noqa: ARG001
    writer.parts.append(b"G" + struct.pack(">d", value))


def _write_complex(writer: _PickleWriter, value: complex, depth: int) -> None:
    writer.call(Global("builtins", "complex"), (value.real, value.imag), depth)


def _write_text(writer: _PickleWriter, value: str, depth: int) -> None:  # noqa: ARG001
    if not writer.remembered(value):
        raw = value.encode("utf-8", "surrogatepass")
        writer.parts += (b"X", len(raw).to_bytes(4, "little"), raw)
        writer.remember(value)


def _write_bytes(writer: _PickleWriter, value: bytes, depth: int) -> None:
    if not writer.old:
        if len(value) >= 1 << 32:
            raise UnsupportedError(f"cannot write a bytes object of length {len(value):,} to a pickle")
        writer.parts += (b"B", len(value).to_bytes(4, "little"), value)
        return
    # Lib/pickle.py, save_bytes; the text is not worth a memo entry.
    writer.value(_ENCODE, depth)
    raw = value.decode("latin-1").encode("utf-8")
    writer.parts += (b"X", len(raw).to_bytes(4, "little"), raw)
    writer.value("latin1", depth)
    writer.parts.append(b"\x86R")


def _write_global(writer: _PickleWriter, value: Global, depth: int) -> None:
    if writer.remembered(value):
        return
    if writer.old:
        writer.parts.append(f"c{_OLD_NAMES.get(value.module, value.module)}\n{value.name}\n".encode())
    else:
        for text in value:
            _write_text(writer, text, depth)
        writer.parts.append(b"\x93")
    writer.remember(value)


def _write_tuple(writer: _PickleWriter, value: tuple[Any, ...], depth: int) -> None:
    if not value:
        writer.parts.append(b")")
    elif len(value) <= 3:
        for item in value:
            writer.value(item, depth)
        writer.parts.append((b"\x85", b"\x86", b"\x87")[len(value) - 1])
    else:
        writer.items(value, b"t", depth)


def _write_list(writer: _PickleWriter, value: list[Any], depth: int) -> None:
    writer.parts.append(b"]")
    writer.items(value, b"e", depth)


def _flatten_items(value: dict[Any, Any]) -> list[Any]:
    return [part for pair in value.items() for part in pair]


def _write_dict(writer: _PickleWriter, value: dict[Any, Any], depth: int) -> None:
    writer.parts.append(b"}")
    writer.items(_flatten_items(value), b"u", depth)


def _write_ordered_dict(writer: _PickleWriter, value: OrderedDict[Any, Any], depth: int) -> None:
    writer.call(_ORDERED, (), depth)
    writer.items(_flatten_items(value), b"u", depth)


def _write_named_dict(writer: _PickleWriter, value: Dict, depth: int) -> None:
    module, _, name = value.name.rpartition(".")
    writer.call(Global(module, name), (), depth)
    writer.items(_flatten_items(value), b"u", depth)
    if value.state is not None:
        writer.value(value.state, depth)
        writer.parts.append(b"b")


def _write_set(writer: _PickleWriter, value: Set, depth: int) -> None:
    module, _, name = value.name.rpartition(".")
    writer.call(Global(module, name), (list(value),), depth)


def _write_object(writer: _PickleWriter, value: PickleObject, depth: int) -> None:
    if value.kwargs or value.items or value.entries:
        raise UnsupportedError(f"cannot write an object of class {value.name} to a pickle")
    if value.function == NEW:
        writer.value(value.args[0], depth)
        writer.value(value.args[1:], depth)
        writer.parts.append(b"\x81")
    else:
        writer.call(value.function, value.args, depth)
    if value.state is not None:
        writer.value(value.state, depth)
        writer.parts.append(b"b")


NEW = Global("copyreg", "__newobj__")
"""makes an object of the class that is its argument, without `__init__` (Lib/pickle.py, save_reduce)"""


def _write_persistent(writer: _PickleWriter, value: PersistentId, depth: int) -> None:
    writer.value(value.pid, depth)
    writer.parts.append(b"Q")


_WRITERS: dict[type, Any] = {
    type(None): _write_none,
    bool: _write_bool,
    int: _write_int,
    float: _write_float,
    complex: _write_complex,
    str: _write_text,
    bytes: _write_bytes,
    Global: _write_global,
    tuple: _write_tuple,
    list: _write_list,
    dict: _write_dict,
    OrderedDict: _write_ordered_dict,
    Dict: _write_named_dict,
    Set: _write_set,
    PickleObject: _write_object,
    PersistentId: _write_persistent,
}
