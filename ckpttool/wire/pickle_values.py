"""What a pickle says, as inert data: names that are not looked up, calls that are not made."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

# The names that Python 2 and pickle protocols below 3 use for modules of today (Lib/_compat_pickle.py).
RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg", "cPickle": "pickle"}


class Limits(NamedTuple):
    """What a pickle may ask for; each guards what no input's own size bounds.

    `integer` is in bytes: Python refuses to print integers of more than 4,300 digits. `key_items` counts
    what a tuple used as a dict's key may hold (hashing visits shared tuples again and again), `tuple_keys`
    how many there may be (their hashes can be made to collide). `copies` is what known calls may copy of
    their arguments, beside four times the pickle's size: one long text can be encoded again and again.
    Bytes longer than `inline` are not copied out of the pickle but given as Stored. `name` is in characters:
    a name is put together again for each of its calls.
    """

    integer: int = 1024
    key_items: int = 64
    tuple_keys: int = 4096
    copies: int = 1 << 20
    inline: int = sys.maxsize
    name: int = 4096


class Global(NamedTuple):
    """A name that the pickle refers to; nothing is imported."""

    module: str
    name: str

    @property
    def full(self) -> str:
        """The dotted name."""
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Stored:
    """Bytes that stay where they are: `length` bytes from position `at` of the pickle `data`."""

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
class Object:
    """A call that was not made, and what the pickle then does to its result.

    `function` is what would be called: a Global, or the inert result of another call. `state` is the
    argument of BUILD, `items` what is appended, `entries` what is set by key.
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
        """The dotted name of the class or function."""
        target = self.function
        while isinstance(target, Object):
            target = target.function
        return target.full if isinstance(target, Global) else type(target).__name__


class Dict(dict[Any, Any]):
    """A dict of a known class (`name`), with the attributes that BUILD gave it."""

    __slots__ = ("name", "state")

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.state: object = None


class Set(list[Any]):
    """The items of a set in the order of the file; nothing is hashed."""

    __slots__ = ("name",)

    def __init__(self, name: str, items: object = ()) -> None:
        super().__init__(items if isinstance(items, list | tuple) else ())
        self.name = name


@dataclass(eq=False, slots=True)
class Opaque:
    """A dict's key that is too rich to be hashed; two of them are never equal."""

    value: object


Builder = Callable[[tuple[Any, ...]], Any]

# The parts of the standard library whose pickles are data. Whatever else of it a pickle wants to call
# can act on the world (os, subprocess, builtins.eval, ...): allowing by name has held where deny lists
# keep losing. Classes outside the standard library are shown, never built.
_DATA_MODULES = frozenset(
    (
        "argparse",
        "array",
        "collections",
        "datetime",
        "decimal",
        "fractions",
        "ipaddress",
        "itertools",
        "numbers",
        "pathlib",
        "uuid",
        "zoneinfo",
    )
)
_DATA_NAMES = frozenset(
    (
        "_codecs.encode",
        "_collections._tuplegetter",
        "_weakrefset.WeakSet",
        "_io.BytesIO",
        "_io.StringIO",
        "builtins.bool",
        "builtins.bytearray",
        "builtins.bytes",
        "builtins.classmethod",
        "builtins.complex",
        "builtins.dict",
        "builtins.float",
        "builtins.frozenset",
        "builtins.int",
        "builtins.list",
        "builtins.object",
        "builtins.property",
        "builtins.range",
        "builtins.reversed",
        "builtins.set",
        "builtins.slice",
        "builtins.staticmethod",
        "builtins.str",
        "builtins.tuple",
        "copyreg.__newobj__",
        "copyreg.__newobj_ex__",
        "copyreg._reconstructor",
        "dataclasses.Field",
        "dataclasses._DataclassParams",
        "dataclasses._MISSING_TYPE",
        "functools.partial",
        "io.BytesIO",
        "io.StringIO",
        "logging.getLogger",
        "operator.attrgetter",
        "operator.itemgetter",
        "random.Random",
        "re._compile",
        "time.struct_time",
        "types.SimpleNamespace",
        "_random.Random",
    )
)
# Classes of exceptions are data too; builtins keeps them beside eval and open.
_BUILTIN_ERRORS = ("Error", "Exception", "Warning", "Interrupt", "Iteration")


def acts(target: object, args: tuple[Any, ...]) -> str | None:
    """Return the name of what a call would run if it is something of the standard library that can act."""
    if isinstance(target, Object):
        return _led_to(target)
    if not isinstance(target, Global) or not _is_standard(target):
        return None
    top = target.module.partition(".")[0]
    if target.full in _DATA_NAMES or (top in _DATA_MODULES and "." not in target.name):
        return None
    if target.module == "builtins" and target.name.endswith(_BUILTIN_ERRORS):
        return None
    return None if _looks(target.full, args) else target.full


def _is_standard(target: Global) -> bool:
    top = target.module.partition(".")[0]
    return top in sys.stdlib_module_names or top in RENAMED


def _led_to(target: Object) -> str | None:
    """Return what calling the result of a call of the standard library's would run.

    Such a result is no data any more: `functools.partial(os.system, "...")()`, `attrgetter("system")(...)()`.
    """
    made_by = target.function
    if not isinstance(made_by, Global) or not _is_standard(made_by):
        return None
    inner = target.args[0] if made_by.full == "functools.partial" and target.args else None
    return inner.full if isinstance(inner, Global) and target.state is None else made_by.full


def _looks(name: str, args: tuple[Any, ...]) -> bool:
    """Say whether a call only looks something up, in a way that leads nowhere else.

    Pickler.save_type (Lib/pickle.py) stores the type of None as a call of `type`; cloudpickle stores classes
    by value, and with them `tuple.__new__` of named tuples and the annotation `Optional[int]` (by getitem).
    """
    if not args:
        return False
    first = args[0]
    if name == "builtins.getattr":
        # How bound methods are stored; of a module or class it would be a way to anything.
        return isinstance(first, Object) or args in _MAKERS
    if name == "builtins.type":
        return len(args) == 1 and (first is None or isinstance(first, Global))
    return name == "_operator.getitem" and isinstance(first, Global) and first.module == "typing"


_MAKERS = tuple((Global("builtins", kind), "__new__") for kind in ("object", "tuple", "int", "str", "float"))


def _dict(name: str) -> Builder:
    def build(args: tuple[Any, ...]) -> object:
        # A defaultdict's argument makes its missing values; a Counter's is what it holds.
        made = Dict(name)
        if name == "collections.Counter" and len(args) == 1 and type(args[0]) is dict:
            made.update(args[0])
        elif name == "collections.OrderedDict" and len(args) == 1 and _are_named(args[0]):
            # Python 2.7's Lib/collections.py, OrderedDict.__reduce__, gives the items as pairs.
            made.update(args[0])
        elif args and (name != "collections.defaultdict" or len(args) > 1):
            return NotImplemented
        return made

    return build


def _are_named(pairs: object) -> bool:
    # Other keys than text would need Machine.key before they can be hashed.
    return isinstance(pairs, list) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and type(pair[0]) is str for pair in pairs
    )


def _set(name: str) -> Builder:
    def build(args: tuple[Any, ...]) -> object:
        known = not args or (len(args) == 1 and isinstance(args[0], list | tuple))
        return Set(name, args[0] if args else ()) if known else NotImplemented

    return build


def _complex(args: tuple[Any, ...]) -> object:
    if len(args) == 2 and all(type(part) in (float, int) for part in args):
        return complex(float(args[0]), float(args[1]))
    return NotImplemented


def _encode(args: tuple[Any, ...]) -> object:
    # Protocols below 3 store bytes as text (Lib/pickle.py, save_bytes).
    if len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1"):
        return args[0].encode("latin-1")
    return NotImplemented


def _bytes(args: tuple[Any, ...]) -> object:
    # bytearray(n) would be n zeros: only what the file holds itself is kept.
    if not args:
        return b""
    if len(args) == 1 and isinstance(args[0], bytes | Stored):
        return args[0]
    if len(args) == 2 and isinstance(args[0], str):
        return _encode(args)
    return NotImplemented


def _reconstructor(args: tuple[Any, ...]) -> object:
    # copyreg.py: protocols 0 and 1 make an object of args[0], and the newer helpers do the same.
    if not args or not isinstance(args[0], Global):
        return NotImplemented
    rest = args[1:]
    return Object(args[0], () if rest == (Global("builtins", "object"), None) else rest, 0)


# How the standard library's own containers are rebuilt: each returns data, or NotImplemented for a form
# that it does not know (the call then stays an inert Object).
CONTAINERS: Mapping[str, Builder] = {
    "collections.OrderedDict": _dict("collections.OrderedDict"),
    "collections.defaultdict": _dict("collections.defaultdict"),
    "collections.Counter": _dict("collections.Counter"),
    "builtins.set": _set("builtins.set"),
    "builtins.frozenset": _set("builtins.frozenset"),
    "builtins.complex": _complex,
    "builtins.bytearray": _bytes,
    "builtins.bytes": _bytes,
    "_codecs.encode": _encode,
    "copyreg._reconstructor": _reconstructor,
    "copyreg.__newobj__": _reconstructor,
}
