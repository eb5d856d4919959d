"""Makes a tree of live values: the first path of a value is its leaf, further ones are aliases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpttool.leaf import Leaf, Path, Record, ValueLeaf
from ckpttool.live import kinds, roles
from ckpttool.live.tensors import Live, described, identity
from ckpttool.live.walk import Found
from ckpttool.tree import Alias, Container, Tree

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Making:
    """The leaves found so far by path, and the first path of every value."""

    def __init__(self) -> None:
        self.first: dict[object, Path] = {}
        self.containers: dict[Path, Container] = {}
        self._leaves: dict[Path, Leaf | ValueLeaf] = {}
        self._aliases: dict[Path, list[Alias]] = {}
        self._slots: dict[Path, roles.Slot] = {}
        self._optimizers: dict[int, roles.Slots] = {}
        # What is known by its number stays alive until the tree is made, so that no number is given twice.
        self._kept: list[Any] = []

    def add(self, found: Found, name: str, alias: str | None, slot: roles.Slot | None = None) -> None:
        """Take a value as a leaf of the native name `name`, or as an alias of the native name `alias`."""
        if isinstance(found.value, _PLAIN):
            self._leaves[found.path] = ValueLeaf(found.value)
            return
        tensor = kinds.is_tensor(found.value) or kinds.is_array(found.value)
        known = identity(found.value) if tensor else id(found.value)
        first = self.first.setdefault(known, found.path)
        if first is not found.path:
            self._aliases.setdefault(first, []).append(Alias(found.path, alias))
            return
        self._kept.append(found.value)
        said = described(found.value) if tensor else None
        if said is None:
            self._leaves[found.path] = ValueLeaf(Record(_class(found.value)))
            return
        slot = slot or self._slot(found)
        if slot is not None:
            self._slots[found.path] = slot
        role, trainable = ("slot", None) if slot is not None else roles.of(found)
        own = roles.name(found.value)
        self._leaves[found.path] = Leaf(
            *said, Live(found.value), name, role, slot=slot and slot.kind, trainable=trainable, name=own
        )

    def _slot(self, found: Found) -> roles.Slot | None:
        number = id(found.owner)
        if number not in self._optimizers:
            self._kept.append(found.owner)
            self._optimizers[number] = roles.slots(found.owner)
        return self._optimizers[number].get(id(found.value))

    def tree(self) -> Tree:
        """Return the tree; slots name their parameters by path, where those are in it."""
        leaves = dict(self._leaves)
        named = {leaf.name: path for path, leaf in leaves.items() if isinstance(leaf, Leaf) and leaf.name}
        for path, slot in self._slots.items():
            of = named.get(slot.named or "") if slot.of is None else self.first.get(identity(slot.of))
            leaf = leaves[path]
            if isinstance(leaf, Leaf):
                leaves[path] = replace(leaf, of=of)
        aliases = {path: tuple(others) for path, others in self._aliases.items()}
        return Tree(leaves, aliases, self.containers)


def _class(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
