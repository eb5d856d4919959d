"""Tree: an ordered mapping from paths to tensors and values, with aliases."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.core import dtypes, limits
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.source import (
    LARGE,
    Buffer,
    Shape,
    Source,
    StreamedArray,
    as_array,
    is_streamed,
    require_length,
)
from ckpttool.core.text import describe_record, format_count

if TYPE_CHECKING:
    import numpy as np

    from ckpttool.core.activations import WeightUse


class PathStep(NamedTuple):
    """One step of a path, exactly as stored: an attribute's name, a dict's key, or a list's index."""

    kind: Literal["attr", "key", "index"]
    value: str | int | float | bool | None


Path = tuple[PathStep, ...]
Role = Literal["parameter", "buffer", "slot", "counter", "replay", "other"]

# Keras 3 keeps some weights under private attributes; people use the public property.
_PUBLIC = {"_kernel": "kernel", "_embeddings": "embeddings"}


# A named tuple's own constructor takes three times as long; a checkpoint has several steps for each tensor.
_new_tuple = tuple.__new__


def attr(name: str) -> PathStep:
    """Return the step to an attribute."""
    return _new_tuple(PathStep, ("attr", name))


def key(value: str | int | float | bool | None) -> PathStep:
    """Return the step to a dict's entry."""
    return _new_tuple(PathStep, ("key", value))


def index(position: int) -> PathStep:
    """Return the step to a list's item."""
    return _new_tuple(PathStep, ("index", position))


def display(path: Path) -> str:
    """Return the display path: dotted keys split, Keras's private names public, joined by `/`.

    >>> import ckpttool
    >>> ckpttool.display(next(iter(ckpttool.open("sample_ckpts/td3_pendulum_tf/ckpt-15000").tree)))
    'policy/actor/l1/kernel'
    """
    shown = []
    for kind, value in path:
        if kind == "key" and isinstance(value, str):
            shown.append(value.replace(".", "/"))
        else:
            text = str(value)
            shown.append(_PUBLIC.get(text, text) if kind == "attr" else text)
    return "/".join(shown)


def display_exact(path: Path) -> str:
    """Return an unambiguous form of the path, for the rare trees where display paths collide."""
    return "".join(f".{s.value}" if s.kind == "attr" else f"[{s.value!r}]" for s in path)


def path_to_json(path: Path) -> list[dict[str, object]]:
    """Return the path as JSON: `[{"attr": "actor"}, {"index": 0}, {"key": "a/b.c"}]`."""
    return [{step.kind: step.value} for step in path]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor: shape, element type and the source of its bytes.

    `key` is its name in the owning framework. A slot variable names its parameter by `of` and its
    kind by `slot` ("m", "v", ...). `name` is a second name that the format stores (a variable's
    name). `features` is the input and output order of its layer, where the file's own computation
    records it (libraries/activation_orders.py).
    """

    __repr__ = describe_record

    dtype: str
    shape: Shape
    source: Source
    key: str
    role: Role = "parameter"
    of: Path | None = None
    slot: str | None = None
    trainable: bool | None = None
    name: str | None = None
    use: WeightUse | None = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes that `read` returns (0 for types without a fixed size)."""
        return self.size * dtypes.BY_NAME[self.dtype].itemsize

    def read(self) -> Buffer:
        """Return the contiguous little-endian bytes; strings as u64 lengths, each before its bytes."""
        return self.source.read()

    def array(self) -> np.ndarray:
        """Return the value as a numpy array of `shape` (read-only; bfloat16 and float8 via ml_dtypes)."""
        return as_array(self.read(), self.dtype, self.shape)

    def values(self) -> np.ndarray | StreamedArray:
        """Return the value as `array` does; a large tensor that can be read in pieces is not read yet."""
        if self.nbytes >= LARGE and is_streamed(self.source):
            return StreamedArray(self.source, self.dtype, self.shape)
        return self.array()

    def strings(self) -> list[bytes]:
        """Return the elements of a string tensor in C order; raise FormatError if there are too few."""
        data, strings, at = bytes(self.read()), [], 0
        for _ in range(self.size):
            length = int.from_bytes(data[at : at + 8], "little")
            strings.append(data[at + 8 : at + 8 + length])
            at += 8 + length
            if at > len(data):
                require_length(data, at)
        return strings


@dataclass(frozen=True, slots=True)
class Record:
    """An object of a class that is not loaded: its name and inert data from the file."""

    name: str
    summary: str = ""


Plain = None | bool | int | float | complex | str | bytes | Record


@dataclass(frozen=True, slots=True)
class ValueLeaf:
    """A value that is not a tensor: a number, a string, None, or an inert record."""

    value: Plain
    role: Role = "other"


# A path and the native key that the format stores for it: the fields of tree.Alias.
Second = tuple[Path, str | None]
# Maximum number of names compared with a wrong one: all names of a tree of millions would take minutes.
_COMPARED = 5_000
_MEANT = 3


class NameIndex:
    """Names of a tree's leaves, and the paths of each name."""

    def __init__(
        self,
        leaves: Mapping[Path, Leaf | ValueLeaf],
        names: Mapping[Path, str],
        aliases: Mapping[Path, Iterable[Second]],
    ) -> None:
        self._leaves, self._names, self._aliases = leaves, names, aliases

    @cached_property
    def shown(self) -> Mapping[str, Path]:
        """Paths by display name."""
        return {name: path for path, name in self._names.items()}

    @cached_property
    def _others(self) -> tuple[Mapping[str, list[Path]], ...]:
        """Paths by every other name: display names and aliases before keys."""
        places: dict[str, list[Path]] = {}
        keys: dict[str, list[Path]] = {}
        for path, leaf in self._leaves.items():
            seconds = list(self._aliases.get(path, ()))
            for other in (path, *(second for second, _ in seconds)):
                _add_path(places, display(other), path)
                _add_path(places, display_exact(other), path)
            native = (leaf.key, leaf.name) if isinstance(leaf, Leaf) else ()
            for key in (*native, *(key for _, key in seconds)):
                if key:
                    _add_path(keys, key, path)
        return places, keys

    def find(self, name: str) -> tuple[Path, ...]:
        """Return the paths of a name: none, one, or several entries that share the name."""
        shown = self.shown.get(name)
        if shown is not None:
            return (shown,)
        return next((tuple(paths) for names in self._others if (paths := names.get(name))), ())


def _add_path(names: dict[str, list[Path]], name: str, path: Path) -> None:
    known = names.setdefault(name, [])
    if path not in known:
        known.append(path)


def iter_modules(names: Iterable[str]) -> Iterator[str]:
    """Yield the modules in display names, outermost first, each once.

    Names with more steps than limits.path_depth are skipped: their modules' names grow
    quadratically.
    """
    modules: set[str] = set()
    deepest = limits.current().deepest_path
    for name in names:
        if name.count("/") >= deepest:
            continue
        at = name.find("/")
        while at >= 0:
            if (above := name[:at]) and above not in modules:
                modules.add(above)
                yield above
            at = name.find("/", at + 1)


def suggest_names(name: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return up to three known names that resemble `name`."""
    import difflib

    ending = [candidate for candidate in known if candidate.endswith(f"/{name}")]
    if ending:
        return tuple(ending[:_MEANT])
    # A wrong name may have a wrong letter, or be incomplete.
    steps = name.count("/") + 1
    ends: dict[str, list[str]] = {}
    for candidate in known[:_COMPARED]:
        ends.setdefault("/".join(candidate.split("/")[-steps:]), []).append(candidate)
    close = difflib.get_close_matches(name, known[:_COMPARED], 1)
    return tuple(close or ends.get(next(iter(difflib.get_close_matches(name, ends, 1)), ""), ())[:_MEANT])


class Alias(NamedTuple):
    """A second path to the same storage; `key` is its own native key, if the format stores one."""

    path: Path
    key: str | None = None


class Container(NamedTuple):
    """Type and state of a container of entries, so that a writer can rebuild it.

    `state` is the data of the container besides its entries (OrderedDict's `_metadata`), as plain
    data. A "module" is an object whose class the file names: `name` is that class, `state` a dict of
    plain facts from its configuration ("units", "activation", "epsilon", "layer"), never code.
    """

    kind: Literal["dict", "OrderedDict", "list", "tuple", "record", "module"]
    name: str | None = None
    state: object = None


@dataclass(frozen=True, eq=False)
class Tree(Mapping[Path, Leaf | ValueLeaf]):
    """Leaves by path in file order; alias paths are not among the leaves."""

    __repr__ = describe_record

    leaves: Mapping[Path, Leaf | ValueLeaf]
    aliases: Mapping[Path, tuple[Alias, ...]] = field(default_factory=dict)
    containers: Mapping[Path, Container] = field(default_factory=dict)

    def __getitem__(self, path: Path) -> Leaf | ValueLeaf:
        """Return the leaf at the path."""
        return self.leaves[path]

    def __iter__(self) -> Iterator[Path]:
        """Iterate over the paths in file order."""
        return iter(self.leaves)

    def __len__(self) -> int:
        """Return the number of leaves."""
        return len(self.leaves)

    def tensors(self) -> Iterator[tuple[Path, Leaf]]:
        """Iterate over the tensor leaves."""
        for path, leaf in self.leaves.items():
            if isinstance(leaf, Leaf):
                yield path, leaf

    def plain(self) -> Iterator[tuple[Path, ValueLeaf]]:
        """Iterate over the leaves that are not tensors."""
        for path, leaf in self.leaves.items():
            if isinstance(leaf, ValueLeaf):
                yield path, leaf

    @cached_property
    def displayed(self) -> Mapping[Path, str]:
        """Display path of every path; two may share one."""
        return {path: display(path) for path in self.leaves}

    @cached_property
    def names(self) -> Mapping[Path, str]:
        """Display name of every path; colliding names are given in their exact form."""
        named = self.displayed
        counts: dict[str, int] = {}
        for name in named.values():
            counts[name] = counts.get(name, 0) + 1
        if len(counts) == len(named):
            return named
        return {path: n if counts[n] == 1 else display_exact(path) for path, n in named.items()}

    @cached_property
    def naming(self) -> NameIndex:
        """Paths of every name that people use."""
        return NameIndex(self.leaves, self.names, self.aliases)

    @cached_property
    def shared(self) -> Mapping[Path, Path]:
        """The leaf's path for the path of every alias."""
        return {alias.path: path for path, others in self.aliases.items() for alias in others}

    def alias_name(self, alias: Alias) -> str:
        """Return an alias's display name, in its exact form if a leaf already has that name."""
        shown = display(alias.path)
        return display_exact(alias.path) if shown in self._shown else shown

    @cached_property
    def entries(self) -> Mapping[str, Leaf | ValueLeaf]:
        """Every entry by display name, also one that shares its storage with another.

        Pickle stores an array or a NumPy scalar under several names once.
        """
        seconds = ((self.alias_name(alias), path) for path, rest in self.aliases.items() for alias in rest)
        first = {shown: self.leaves[path] for path, shown in self.names.items()}
        return {**{name: self.leaves[path] for name, path in seconds}, **first}

    @cached_property
    def _shown(self) -> frozenset[str]:
        return frozenset(self.names.values())

    def with_leaves(self, leaves: Mapping[Path, Leaf | ValueLeaf]) -> Tree:
        """Return the tree with these entries only, and their aliases."""
        aliases = {path: others for path, others in self.aliases.items() if path in leaves}
        return Tree(leaves, aliases, self.containers)

    def under(self, prefix: Path) -> Tree:
        """Return a tree that contains this one under `prefix` and nothing else."""
        return Tree(
            {(*prefix, *p): leaf for p, leaf in self.leaves.items()},
            {
                (*prefix, *p): tuple(Alias((*prefix, *a.path), a.key) for a in rest)
                for p, rest in self.aliases.items()
            },
            {(*prefix, *p): c for p, c in self.containers.items()},
        )

    def below(self, prefix: Path) -> Tree:
        """Return the subtree under `prefix`, with paths relative to it."""
        cut = len(prefix)
        return Tree(
            {p[cut:]: leaf for p, leaf in self.leaves.items() if p[:cut] == prefix},
            {
                p[cut:]: tuple(Alias(a.path[cut:], a.key) for a in rest if a.path[:cut] == prefix)
                for p, rest in self.aliases.items()
                if p[:cut] == prefix
            },
            {p[cut:]: c for p, c in self.containers.items() if p[:cut] == prefix},
        )


def json_value(leaf: ValueLeaf) -> dict[str, Any]:
    """Return a plain value as JSON: bytes by their length, records by their class."""
    value = leaf.value
    if isinstance(value, Record):
        return {"type": value.name, "value": value.summary}
    if isinstance(value, bytes):
        return {"type": "bytes", "value": format_count(len(value), "byte")}
    if isinstance(value, complex):
        return {"type": "complex", "value": str(value)}
    return {"type": type(value).__name__, "value": value}
