"""A checkpoint's entries followed into a live object: what they fill, and what they leave as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttool.formats.object_graph.roles import slot_path
from ckpttool.leaf import Leaf, Path
from ckpttool.live import kinds, saved
from ckpttool.live.compare import Difference, difference
from ckpttool.live.tensors import described
from ckpttool.tree import Tree


class Meeting:
    """The entries that were followed, name by name, and the live variables that they came to."""

    def __init__(self, root: Any) -> None:
        self._at: dict[tuple[str, ...], Any] = {(): root}
        self._children: dict[int, Mapping[str, Any]] = {}
        self._filled: set[int] = set()
        self.unused: list[Path] = []
        self.different: list[Difference] = []

    def meet(self, tree: Tree) -> None:
        """Follow every path of every tensor of the tree."""
        for path, leaf in tree.tensors():
            ways = [path, *(alias.path for alias in tree.aliases.get(path, ()))]
            taken = [live for live in map(self._follow, ways) if kinds.is_tensor(live)]
            taken += self._slots(tree, path, leaf)
            for live in taken:
                self._fill(live, path, leaf)
            if not taken and tuple(saved.steps(path)) != saved.COUNTER:
                self.unused.append(path)

    def _slots(self, tree: Tree, path: Path, leaf: Leaf) -> list[Any]:
        """Return the slot variable of a live optimizer of Keras 2 that the entry is."""
        names = tuple(saved.steps(path))
        if leaf.slot is None or leaf.of is None or "slots" not in names:
            return []
        optimizer = self._followed(names[: names.index("slots")])
        if not saved.keeps_slots(optimizer):
            return []
        ways = [leaf.of, *(alias.path for alias in tree.aliases.get(leaf.of, ()))]
        owners = [live for live in map(self._follow, ways) if kinds.is_tensor(live)]
        found = [saved.slot(optimizer, leaf.slot, owner) for owner in owners]
        return [variable for variable in found if variable is not None]

    def _fill(self, live: Any, path: Path, leaf: Leaf) -> None:
        self._filled |= {id(live), id(kinds.plain_value(live))}
        said = described(live)
        other = None if said is None else difference(path, said, (leaf.dtype, leaf.shape))
        if other is not None and other not in self.different:
            self.different.append(other)

    def _follow(self, path: Path) -> Any:
        return self._followed(tuple(saved.steps(path)))

    def _followed(self, names: tuple[str, ...]) -> Any:
        known = len(names)
        while names[:known] not in self._at:
            known -= 1
        value = self._at[names[:known]]
        for depth in range(known, len(names)):
            value = None if value is None else self._below(value).get(names[depth])
            self._at[names[: depth + 1]] = value
        return value

    def _below(self, value: Any) -> Mapping[str, Any]:
        if id(value) not in self._children:
            self._children[id(value)] = saved.allowed(value, {})
        return self._children[id(value)]

    def unfilled(self, roots: list[tuple[Path, Any]]) -> tuple[Path, ...]:
        """Return the first path of every saved variable that no entry filled."""
        missing: dict[int, Path] = {}
        keepers: dict[int, tuple[Path, Any]] = {}
        known: list[Any] = []
        for place, root in roots:
            if kinds.is_tensor(root):
                missing.setdefault(id(root), place)
            for found in saved.tensors(root, {}):
                known.append(found.value)
                missing.setdefault(id(found.value), (*place, *found.path))
                if saved.keeps_slots(found.owner):
                    keepers.setdefault(id(found.owner), ((*place, *found.path[:-1]), found.owner))
        for place, optimizer in keepers.values():
            for kind, of, variable in saved.slots(optimizer, known):
                missing.setdefault(id(variable), slot_path(place, kind, missing[id(of)]))
        return tuple(path for number, path in missing.items() if number not in self._filled)
