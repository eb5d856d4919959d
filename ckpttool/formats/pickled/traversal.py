"""The one way through the values of a pickle: containers, shared and circular values, limits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, Literal, TypeVar

from ckpttool.errors import FormatError
from ckpttool.formats.pickled.inert import KEYS, is_leaf, record, step_of
from ckpttool.leaf import Key, Leaf, Path, Record, ValueLeaf, attr, index
from ckpttool.tree import Alias, Container
from ckpttool.wire.pickle_reader import Dict, Object, Set

DEPTH = 200
# A list may be reached by many paths, and lists of lists by exponentially many: this often per byte.
REVISITS = 16
SPARE = 10_000

# How a container holds a value: as a dict's entry, a list's item, an object's attribute, or as what an
# object was made from.
Via = Literal["entry", "item", "attr", "args"]
Place = TypeVar("Place")
Below = Callable[[Key, Via], Place]


class Traversal(ABC, Generic[Place]):
    """Collects a tree's entries; a subclass says what each value is, and where in its format it stands."""

    whole = "file"

    def __init__(self, visits: int) -> None:
        """Visit at most about `visits` values."""
        self.left = visits
        self.leaves: dict[Path, Leaf | ValueLeaf] = {}
        self.containers: dict[Path, Container] = {}
        self._aliases: dict[Path, list[Alias]] = {}
        self._open: dict[int, Path] = {}
        self._seen: dict[int, Path] = {}

    @abstractmethod
    def value(self, value: Any, path: Path, place: Place) -> None:
        """Add what stands at the path."""

    @abstractmethod
    def below(self, value: Any, place: Place) -> Below[Place]:
        """Return what says where each entry of a container stands that stands at `place` itself."""

    def native(self, path: Path) -> str:
        """Return the dotted name of a path."""
        return ".".join(str(step.value) for step in path)

    def steps(self, path: Path, step: Key) -> Path:  # noqa: ARG002 - for those who override it
        """Return the steps that an entry of the container at `path` adds: `step`, or what its name tells."""
        return (step,)

    def kind(self, value: Any) -> Container:
        """Return the container's kind."""
        if isinstance(value, Object | Set):
            return Container("record", value.name)
        if isinstance(value, Dict):
            ordered = value.name == "collections.OrderedDict"
            return Container("OrderedDict") if ordered else Container("dict", value.name)
        if isinstance(value, dict):
            # Keys that a path cannot hold are shown by a label: nobody could write such a dict back.
            return Container("dict") if all(type(k) in KEYS for k in value) else Container("record", "dict")
        return Container("list" if isinstance(value, list) else "tuple")

    def container(self, value: Any, path: Path, place: Place, kind: Container | None = None) -> None:
        """Add a dict, a list, a tuple or an inert object, and all that it holds."""
        where = self._open.get(id(value)) if value != () else None
        if where is not None or self._again(value):
            first = self.native(where if where is not None else self._seen[id(value)])
            self.leaves[path] = ValueLeaf(Record("the same object as", first or f"the whole {self.whole}"))
            return
        if len(path) > DEPTH:
            raise FormatError(f"values are nested more than {DEPTH} deep")
        if isinstance(value, Object) and is_leaf(value):
            self.leaves[path] = ValueLeaf(record(value))
            return
        self._seen.setdefault(id(value), path)
        self._open[id(value)] = path
        self.containers[path] = kind or self.kind(value)
        below = self.below(value, place)
        for step, child, via in _children(value):
            self.value(child, (*path, *self.steps(path, step)), below(step, via))
        del self._open[id(value)]

    @property
    def aliases(self) -> dict[Path, tuple[Alias, ...]]:
        """The other paths of entries, by their first ones."""
        return {path: tuple(others) for path, others in self._aliases.items()}

    def alias(self, first: Path, path: Path, name: str) -> None:
        """Add a path, with the name that it has there, to an entry that stands at its first path."""
        self._aliases.setdefault(first, []).append(Alias(path, name))

    def forget(self, visits: int) -> None:
        """Begin with another pickle, whose values have identities of their own."""
        self.left = visits
        self._seen.clear()

    def _again(self, value: Any) -> bool:
        # Say whether the value was shown before and there is no allowance left to show it again.
        if not self.left and id(value) in self._seen:
            return True
        self.left = max(0, self.left - 1 - (0 if isinstance(value, Object) else len(value)))
        return False


def _children(value: Any) -> Iterator[tuple[Key, Any, Via]]:
    if isinstance(value, dict):
        for position, (name, child) in enumerate(value.items()):
            yield step_of(name, position), child, "entry"
    elif isinstance(value, Object):
        yield from _members(value)
    else:
        for position, item in enumerate(value):
            yield index(position), item, "item"


def _members(value: Object) -> Iterator[tuple[Key, Any, Via]]:
    if value.args:
        yield attr("__args__"), value.args, "args"
    if value.kwargs:
        yield attr("__kwargs__"), dict(value.kwargs), "args"
    yield from _state(value.state)
    yield from _children(value.entries or {})
    yield from _children(value.items or ())


def _state(state: Any) -> Iterator[tuple[Key, Any, Via]]:
    # Lib/pickle.py, load_build: a dict of attributes, or a pair of that and the values of slots.
    if isinstance(state, tuple) and len(state) == 2 and all(isinstance(s, dict | None) for s in state):
        for part in state:
            yield from _state(part)
    elif isinstance(state, dict) and all(type(name) is str for name in state):
        for name, child in state.items():
            yield attr(name), child, "attr"
    elif state is not None:
        yield attr("__state__"), state, "args"
