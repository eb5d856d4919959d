"""From a pickle's value to the entries of a tree: paths, containers, inert records, NumPy's arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ckpttool.errors import FormatError
from ckpttool.formats.pickled.inert import KEYS, PLAIN, is_leaf, record, step_of
from ckpttool.formats.pickled.load import Pickled, array_source
from ckpttool.formats.variables import role_by_name
from ckpttool.leaf import Key, Leaf, Path, Record, Role, ValueLeaf, attr, exact, index
from ckpttool.tree import Alias, Container, Tree
from ckpttool.wire.pickle_numpy import Array
from ckpttool.wire.pickle_reader import Dict, Global, Object, Set

DEPTH = 200
# A list may be reached by many paths, and lists of lists by exponentially many: this often per byte.
REVISITS = 16
# stable_baselines/common/running_mean_std.py, RunningMeanStd; gymnasium's has the same names.
_STATISTICS = frozenset(("mean", "var"))


class Use(NamedTuple):
    """What a tensor is for; `of` and `slot` as in a Leaf."""

    role: Role
    of: Path | None = None
    slot: str | None = None


# Says what an array or a number at a path is for, from its element type and shape ("" and () for a number).
Uses = Callable[[Path, str, tuple[int, ...]], Use]


def native(path: Path) -> str:
    """Return the dotted name of a path."""
    return ".".join(str(step.value) for step in path)


class Walk:
    """Goes once through the values of pickles and collects a tree's entries."""

    def __init__(self, uses: Uses) -> None:
        """Ask `uses` what each array is for."""
        self.uses = uses
        self.leaves: dict[Path, Leaf | ValueLeaf] = {}
        self.aliases: dict[Path, list[Alias]] = {}
        self.containers: dict[Path, Container] = {}
        self.keys: set[str] = set()
        self._left = 0
        self._pickled = Pickled(None, 0, None, 0)
        self._arrays: dict[int, Path] = {}
        self._open: dict[int, Path] = {}
        self._seen: dict[int, Path] = {}

    def add(self, pickled: Pickled, path: Path = ()) -> None:
        """Add a pickle's value at the path."""
        self._pickled = pickled
        self._left = REVISITS * pickled.size + 10_000
        self._arrays.clear()
        self._seen.clear()
        self._value(pickled.value, path)

    def tree(self) -> Tree:
        """Return the tree of all that was added."""
        aliases = {path: tuple(others) for path, others in self.aliases.items()}
        return Tree(self.leaves, aliases, self.containers)

    def steps(self, path: Path, step: Key) -> Path:  # noqa: ARG002 - for those who override it
        """Return the steps that an entry of the container at `path` adds: `step`, or what its name tells."""
        return (step,)

    def _value(self, value: Any, path: Path) -> None:
        kind = type(value)
        if kind in PLAIN:
            self.leaves[path] = ValueLeaf(value, self.uses(path, "", ()).role)
        elif kind is Array:
            self._array(value, path)
        elif kind is Record:
            self.leaves[path] = ValueLeaf(value)
        elif isinstance(value, dict | list | tuple | Object) and kind is not Global:
            self._container(value, path)
        else:
            self.leaves[path] = ValueLeaf(record(value))

    def _array(self, array: Array, path: Path) -> None:
        parts = array.parts()
        if parts is not None and isinstance(parts.data, list):
            self._container(parts.data, path, Container("record", "numpy.ndarray"))
        elif parts is None or parts.type.name is None:
            shown = f"{parts.type.code}{list(parts.shape)}" if parts else ""
            self.leaves[path] = ValueLeaf(Record("numpy.ndarray", shown))
        else:
            first = self._arrays.setdefault(id(array), path)
            if first != path:
                self.aliases.setdefault(first, []).append(Alias(path, native(path)))
                return
            use = self.uses(path, parts.type.name, parts.shape)
            self.leaves[path] = Leaf(
                dtype=parts.type.name,
                shape=parts.shape,
                source=array_source(parts, self._pickled),
                key=self._unique(path),
                role=use.role,
                of=use.of,
                slot=use.slot,
            )

    def _unique(self, path: Path) -> str:
        name = native(path)
        name = exact(path) if name in self.keys else name
        self.keys.add(name)
        return name

    def _container(self, value: Any, path: Path, kind: Container | None = None) -> None:
        where = self._open.get(id(value)) if value != () else None
        if where is not None or self._again(value):
            first = native(where if where is not None else self._seen[id(value)])
            self.leaves[path] = ValueLeaf(Record("the same object as", first or "the whole file"))
            return
        if len(path) > DEPTH:
            raise FormatError(f"values are nested more than {DEPTH} deep")
        if isinstance(value, Object) and is_leaf(value):
            self.leaves[path] = ValueLeaf(record(value))
            return
        self._seen.setdefault(id(value), path)
        self._open[id(value)] = path
        self.containers[path] = kind or _kind(value)
        for step, child in children(value):
            self._value(child, (*path, *self.steps(path, step)))
        del self._open[id(value)]

    def _again(self, value: Any) -> bool:
        """Say whether the value was shown before and there is no allowance left to show it again."""
        if not self._left and id(value) in self._seen:
            return True
        self._left = max(0, self._left - 1 - (0 if isinstance(value, Object) else len(value)))
        return False


def _kind(value: Any) -> Container:
    if isinstance(value, Object):
        return Container("record", value.name)
    if isinstance(value, Dict):
        ordered = value.name == "collections.OrderedDict"
        return Container("OrderedDict") if ordered else Container("dict", value.name)
    if isinstance(value, Set):
        return Container("record", value.name)
    if isinstance(value, dict):
        # Keys that a path cannot hold are shown by a label: nobody could write such a dict back.
        return Container("dict") if all(type(k) in KEYS for k in value) else Container("record", "dict")
    return Container("list" if isinstance(value, list) else "tuple")


def children(value: Any) -> Iterator[tuple[Key, Any]]:
    """Go through what a dict, a list, a tuple or an inert object holds."""
    if isinstance(value, dict):
        for position, (name, child) in enumerate(value.items()):
            yield step_of(name, position), child
    elif isinstance(value, Object):
        yield from _members(value)
    else:
        for position, item in enumerate(value):
            yield index(position), item


def _members(value: Object) -> Iterator[tuple[Key, Any]]:
    if value.args:
        yield attr("__args__"), value.args
    if value.kwargs:
        yield attr("__kwargs__"), dict(value.kwargs)
    yield from _state(value.state)
    if value.entries:
        yield from children(value.entries)
    for position, item in enumerate(value.items or ()):
        yield index(position), item


def _state(state: Any) -> Iterator[tuple[Key, Any]]:
    # Lib/pickle.py, load_build: a dict of attributes, or a pair of that and the values of slots.
    if isinstance(state, tuple) and len(state) == 2 and all(isinstance(s, dict | None) for s in state):
        for part in state:
            yield from _state(part)
    elif isinstance(state, dict) and all(type(name) is str for name in state):
        for name, child in state.items():
            yield attr(name), child
    elif state is not None:
        yield attr("__state__"), state


def by_last_name(path: Path, dtype: str, shape: tuple[int, ...]) -> Use:
    """Say what an array is for by its name alone: weights, statistics (RunningMeanStd's), or a counter."""
    last = path[-1].value if path else None
    if not dtype:
        return Use("other")
    if last in _STATISTICS:
        return Use("buffer")
    return Use(role_by_name(path, native(path), dtype, shape))
