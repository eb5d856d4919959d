"""What a pickle says, as inert data: names that are not looked up, calls that are not made."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpttool import limits
from ckpttool.errors import FormatError

# The names that Python 2 and pickle protocols below 3 use for modules of today (Lib/_compat_pickle.py).
RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg", "cPickle": "pickle", "exceptions": "builtins"}
# A result may be called, and that one's result again: nobody reads on who made the first of so many.
_LED = 16
# Python randomises the hashes of text and bytes only. A file can choose numbers, and tuples of numbers, that
# all fall into one slot of a dict, and every insertion then passes all earlier ones.
SPREAD = 64  # keys that a dict may have before any of them is counted
_SMALL = 1 << 20  # whole numbers below it lie side by side in a dict
_SAME = 64  # keys of one dict that have one hash
_LONG = 1000  # characters of an item of a tuple that is a key: such keys are shown as they are written
_FROZEN = "builtins.frozenset"
ATOMS = frozenset((str, int, bool, float, type(None), bytes, complex))


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


class Stateful:
    """A value that says itself which states a pickle may set on it."""

    __slots__ = ()

    @property
    def hashable(self) -> bool:
        """Whether Python takes the value for a dict's key."""
        return True

    def set_state(self, state: Any) -> None:
        """Take the argument of BUILD; raise FormatError for one that would change what was read."""
        raise NotImplementedError


class Dict(dict[Any, Any]):
    """A dict of a known class (`name`), with the attributes that BUILD gave it."""

    __slots__ = ("name", "state")

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.state: object = None


class Set(list[Any]):
    """The items of a set in the order of the file; `seen` tells which are there (see identity)."""

    __slots__ = ("name", "seen")

    def __init__(self, name: str, items: list[Any] | tuple[Any, ...] = ()) -> None:
        super().__init__(items)
        self.name = name
        self.seen: set[Any] = set()

    def add(self, items: list[Any] | tuple[Any, ...]) -> None:
        """Add the items that are not there yet; raise FormatError for one that no set can hold."""
        for item in items:
            frozen = type(item) is Set and item.name == _FROZEN
            if not frozen and not is_hashable(item):
                raise FormatError(f"a {type(item).__name__} is an item of a set")
            if is_plain(item):
                name = identity(item)
                if name in self.seen:
                    continue
                self.seen.add(name)
            self.append(item)


@dataclass(eq=False, slots=True)
class Opaque:
    """A dict's key that is not hashed by its value: it is rich, or one of many that may collide."""

    value: object


class Keys:
    """The keys of one dict whose hashes a file can choose, from its SPREADth on.

    `target` is the dict, kept so that its identity stays its own.
    """

    __slots__ = ("hashes", "seen", "target")

    def __init__(self, target: dict[Any, Any]) -> None:
        """Count the keys that the dict has."""
        self.target = target
        self.hashes: dict[int, int] = {}
        self.seen = {identity(key) for key in target if is_plain(key)}

    def keep(self, value: Any, most: int) -> Any:
        """Return the value, or an Opaque key when `most` such keys were kept or too many have its hash.

        Raise FormatError when an Opaque key equals another key: both would be listed, where Python keeps one.
        """
        if len(self.hashes) < most:
            number = hash(value)
            count = self.hashes.get(number, 0)
            if count < _SAME:
                self.hashes[number] = count + 1
                self.seen.add(identity(value))
                return value
        name = identity(value)
        if name in self.seen:
            raise FormatError("a dict of the pickle has one key twice")
        self.seen.add(name)
        return Opaque(value)


def is_hashable(value: Any) -> bool:
    """Say whether the value is neither a container nor an array; what is in a tuple is not looked at."""
    return value.hashable if isinstance(value, Stateful) else not isinstance(value, list | dict)


def is_spread(value: Any, count: int) -> bool:
    """Say whether a key of a dict with `count` entries has a hash that a file cannot choose to collide."""
    kind = type(value)
    if kind is int:
        return bool(-_SMALL <= value < _SMALL + 8 * count)
    return kind is Global or not (kind is float or kind is complex or isinstance(value, tuple))


def is_plain(value: Any) -> bool:
    """Say whether the value is text, bytes, a number, None or a short tuple of these.

    Hashing a longer tuple takes time for each use as a key, however often the pickle repeats it.
    """
    if type(value) in ATOMS:
        return True
    if not isinstance(value, tuple) or isinstance(value, Global):
        return False
    most = limits.current().pickle_key_items
    todo, seen = [value], 0
    while todo:
        items = todo.pop()
        seen += len(items)
        if seen > most:
            return False
        for item in items:
            if isinstance(item, tuple):
                todo.append(item)
            elif type(item) not in ATOMS or (type(item) in (str, bytes) and len(item) > _LONG):
                return False
    return True


def identity(value: Any) -> Any:
    """Return what is the same for two plain values exactly when they are equal; its hash is randomised."""
    return value if type(value) in (str, bytes) else (_number(value),)


def _number(value: Any) -> str:
    kind = type(value)
    if kind in (float, complex) and value != value:
        return f"nan {id(value)}"
    if kind is complex and not value.imag:
        value, kind = value.real, float
    if (kind is float and value.is_integer()) or kind is bool:
        return repr(int(value))
    if kind is complex:
        # The zeros of both signs are equal.
        return f"{value.real + 0.0!r}{value.imag + 0.0!r}j"
    if isinstance(value, tuple):
        return f"({','.join(map(_number, value))},)"
    return repr(value)


Builder = Callable[[tuple[Any, ...]], Any]


def _dict(name: str) -> Builder:
    def build(args: tuple[Any, ...]) -> object:
        # A defaultdict's argument makes its missing values; a Counter's is what it holds.
        made = Dict(name)
        if name != "collections.defaultdict" and len(args) == 1 and type(args[0]) in (dict, Dict):
            made.update(args[0])
        elif name == "collections.OrderedDict" and len(args) == 1 and _are_named(args[0]):
            # Python 2.7's Lib/collections.py, OrderedDict.__reduce__, gives the items as pairs.
            made.update(args[0])
        elif args and not (name == "collections.defaultdict" and _is_factory(args)):
            if len(args) > 2 or name == "collections.Counter":
                raise FormatError(f"a {name} is made from arguments that no pickler writes")
            return NotImplemented
        return made

    return build


def _is_factory(args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and (args[0] is None or isinstance(args[0], Global | Object))


def _are_named(pairs: object) -> bool:
    # Other keys than text would need Machine.key before they can be hashed.
    return isinstance(pairs, list) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and type(pair[0]) is str for pair in pairs
    )


def _set(name: str) -> Builder:
    def build(args: tuple[Any, ...]) -> object:
        if len(args) > 1:
            raise FormatError(f"a {name} is made from {len(args):,} arguments")
        known = not args or isinstance(args[0], list | tuple)
        if not known:
            return NotImplemented
        made = Set(name)
        made.add(args[0] if args else ())
        return made

    return build


def _complex(args: tuple[Any, ...]) -> object:
    if len(args) > 2:
        raise FormatError(f"a complex number is made from {len(args):,} arguments")
    if len(args) == 2 and all(type(part) in (float, int) for part in args):
        return complex(float(args[0]), float(args[1]))
    return NotImplemented


def _encode(args: tuple[Any, ...]) -> object:
    # Protocols below 3 store bytes as text (Lib/pickle.py, save_bytes).
    if not 1 <= len(args) <= 3 or not isinstance(args[0], str):
        raise FormatError("the pickle encodes other than text")
    if len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1"):
        return args[0].encode("latin-1")
    return NotImplemented


def _bytes(args: tuple[Any, ...]) -> object:
    # bytearray(n) would be n zeros: only what the file holds itself is kept.
    if not args:
        return b""
    if len(args) > 3:
        raise FormatError(f"bytes are made from {len(args):,} arguments")
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


# The classes whose `__new__` takes what a call of them takes; that of others ignores arguments.
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
