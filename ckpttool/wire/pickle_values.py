"""What a pickle says, as inert data: names that are not looked up, calls that are not made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

# The names that Python 2 and pickle protocols below 3 use for modules of today (Lib/_compat_pickle.py).
RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg", "cPickle": "pickle", "exceptions": "builtins"}
# A result may be called, and that one's result again: nobody reads on who made the first of so many.
_LED = 16


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
        for _ in range(_LED):
            if not isinstance(target, Object):
                break
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
