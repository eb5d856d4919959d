"""The one way through the values of a pickle: containers, shared and circular values, limits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, Literal, TypeVar

from ckpttool import limits
from ckpttool.errors import FormatError
from ckpttool.formats.pickled.inert import KEYS, is_leaf, record, step_of
from ckpttool.leaf import Key, Leaf, Path, Record, ValueLeaf, attr, exact, index
from ckpttool.tree import Alias, Container
from ckpttool.wire.pickle_reader import Dict, Object, Set

# What a small pickle may have: values reached again, and letters of their names.
_SPARE, _SPARE_LETTERS = 10_000, 1 << 24
_LETTERS = 64  # of names, per byte: what is deep in modules has long names for a few bytes each
_SHOWN = 200
_NUMBER = 4  # letters of a step that is no text

# How a container holds a value: as a dict's entry, a list's item, an object's attribute, or as what an
# object was made from.
Via = Literal["entry", "item", "attr", "args"]
Place = TypeVar("Place")
Below = Callable[[Key, Via], Place]


class _Frame(Generic[Place]):
    """A container whose entries are added: where it stands, and what is left of it."""

    __slots__ = ("below", "children", "kind", "letters", "path", "place", "value")

    def __init__(self, value: Any, path: Path, place: Place, kind: Container | None, letters: int) -> None:
        self.value = value
        self.path = path
        self.place = place
        self.kind = kind
        self.letters = letters
        self.below: Any = None
        self.children: Iterator[tuple[Key, Any, Via]] | None = None


class Traversal(ABC, Generic[Place]):
    """Collects a tree's entries; a subclass says what each value is, and where in its format it stands."""

    whole = "file"

    def __init__(self, size: int) -> None:
        """Go through what a pickle of `size` bytes holds.

        A list may be reached by many paths, and lists of lists by exponentially many; and a long name may
        stand in all of them.
        """
        self._limits = limits.current()
        self._allow(size)
        self.leaves: dict[Path, Leaf | ValueLeaf] = {}
        self.containers: dict[Path, Container] = {}
        self._aliases: dict[Path, list[Alias]] = {}
        self._open: dict[int, Path] = {}
        self._seen: dict[int, Path] = {}
        # The letters of the path at which a value is added.
        self._named = 0
        self._waiting: list[_Frame[Place]] = []

    def _allow(self, size: int) -> None:
        self.left = self._limits.pickle_revisits * size + _SPARE
        self._letters = _LETTERS * self._limits.pickle_revisits * size + _SPARE_LETTERS

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
        if len(path) > self._limits.pickle_depth:
            raise limits.exceeded("pickle_depth", "values are nested too deep", len(path))
        if isinstance(value, Object) and is_leaf(value):
            self.leaves[path] = ValueLeaf(record(value))
            return
        outermost = not self._waiting
        self._waiting.append(_Frame(value, path, place, kind, self._named))
        if outermost:
            self._go_through()

    def _go_through(self) -> None:
        # In the order of the file and without recursion: the depth is the file's.
        waiting = self._waiting
        while waiting:
            at = len(waiting)
            frame = waiting[-1]
            if frame.children is None:
                self._begin(frame)
            if self._go_on(frame):
                del self._open[id(frame.value)]
                waiting.pop()
            elif len(waiting) > at + 1:
                waiting[at:] = waiting[: at - 1 : -1]

    def _begin(self, frame: _Frame[Place]) -> None:
        value, path = frame.value, frame.path
        self._seen.setdefault(id(value), path)
        self._open[id(value)] = path
        self.containers[path] = frame.kind or self.kind(value)
        frame.below = self.below(value, frame.place)
        frame.children = _children(value)

    def _go_on(self, frame: _Frame[Place]) -> bool:
        """Add entries up to the next container, which waits then; say whether that were all."""
        waiting, at = self._waiting, len(self._waiting)
        path, below, letters, left = frame.path, frame.below, frame.letters, self._letters
        assert frame.children is not None  # noqa: S101 - it has begun
        for step, child, via in frame.children:
            name, kind = step.value, type(child)
            self._named = letters + (len(name) if type(name) is str else _NUMBER)
            left -= self._named
            if kind is str or kind is bytes:
                left -= len(child)
            if left < 0:
                what = "names and texts that values share are repeated too often"
                raise limits.exceeded("pickle_revisits", what, self._limits.pickle_revisits + 1)
            self.value(child, (*path, *self.steps(path, step)), below(step, via))
            if len(waiting) > at:
                self._letters = left
                return False
        self._letters = left
        return True

    @property
    def aliases(self) -> dict[Path, tuple[Alias, ...]]:
        """The other paths of entries, by their first ones."""
        return {path: tuple(others) for path, others in self._aliases.items()}

    def alias(self, first: Path, path: Path, name: str) -> None:
        """Add a path, with the name that it has there, to an entry that stands at its first path."""
        self._aliases.setdefault(first, []).append(Alias(path, name))

    def forget(self, size: int) -> None:
        """Begin with another pickle, of `size` bytes, whose values have identities of their own."""
        self._allow(size)
        self._named = 0
        self._seen.clear()

    def require_free(self, path: Path) -> None:
        """Raise FormatError when another value stands at the path already."""
        if path in self.leaves or path in self.containers:
            raise FormatError(f"two values have the name {exact(path)[:_SHOWN]!r}")

    def _again(self, value: Any) -> bool:
        # Say whether the value was shown before and there is no allowance left to show it again.
        if not self.left and id(value) in self._seen:
            return True
        self.left = max(0, self.left - 1 - (0 if isinstance(value, Object) else len(value)))
        return False


def _children(value: Any) -> Iterator[tuple[Key, Any, Via]]:
    if isinstance(value, dict):
        yield from _entries(value)
    elif isinstance(value, Object):
        yield from _members(value)
    else:
        for position, item in enumerate(value):
            yield index(position), item, "item"


def _entries(value: dict[Any, Any]) -> Iterator[tuple[Key, Any, Via]]:
    labels: set[Any] = set()
    for position, (name, child) in enumerate(value.items()):
        step = step_of(name, position)
        if type(name) not in KEYS:
            # The label of one key may be the text of another, or its label.
            while step.value in value or step.value in labels:
                step = step._replace(value=f"{step.value} {position}")
            labels.add(step.value)
        yield step, child, "entry"


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
