"""Writing an object graph: the objects that a tree's paths speak of, and the key of every tensor.

A path's steps are the edges from the root, one object for each beginning of a path. All paths of a leaf lead
to one variable; other objects are not joined, even if one had two paths where the tree was read: TensorFlow
gives such an object its values by whichever path it comes (tensorflow/python/checkpoint/restore.py,
CheckpointPosition.bind_object).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool.errors import UnsupportedError
from ckpttool.formats import object_graph
from ckpttool.formats.object_graph import MARK, VALUE, Attribute, Graph, Node, Slot
from ckpttool.formats.object_graph import paths as graph_paths
from ckpttool.formats.object_graph.keys import Steps, attribute, edgeless, keys_of, listed, steps_of
from ckpttool.formats.object_graph.names import of_lists
from ckpttool.leaf import Leaf, Path, attr, display
from ckpttool.tree import Tree
from ckpttool.wire import protobuf_writer as proto

# Keras 3 keeps the kernel of a layer as `_kernel`, Keras 2 and most modules as `kernel`
# (keras/src/layers/core/dense.py, embedding.py).
_TWINS = {"kernel": "_kernel", "embeddings": "_embeddings"}
_TWINS |= {private: public for public, private in _TWINS.items()}
_APART = (attr(".ATTRIBUTES"),)
_ROUNDS = 16


class Plan(NamedTuple):
    """The graph of a tree, and the bundle key of each of its leaves in the order of the graph's objects."""

    graph: Graph
    keys: dict[Path, str]


def plan(tree: Tree) -> Plan:
    """Return the graph and the keys under which TensorFlow restores the tree, whose leaves are all tensors.

    A leaf keeps its key if that is one of TensorFlow's objects; others get the key of their path. Reading
    gives each leaf its path again: an alias that would become the canonical path instead is left out. Raise
    UnsupportedError when two leaves have one path.
    """
    slots = edgeless(tree)
    keys = keys_of(tree, slots)
    dropped: set[Steps] = set()
    for _ in range(_ROUNDS):
        draft = _Draft(tree, keys, slots, dropped)
        graph = draft.numbered()
        winners = draft.displacing(graph) - dropped
        if not winners:
            break
        dropped |= winners
    return Plan(graph, {path: keys[path] for path in draft.order()})


def encode(graph: Graph) -> bytes:
    """Return the TrackableObjectGraph (tensorflow/core/protobuf/trackable_object_graph.proto)."""
    valued = _valued(graph)
    return b"".join(proto.message(1, _encoded(node, has)) for node, has in zip(graph, valued, strict=True))


def _encoded(node: Node, has_values: bool) -> bytes:
    parts = [proto.message(1, proto.number(1, n) + proto.text(2, edge)) for edge, n in node.children.items()]
    for name, full_name, key in node.attributes:
        parts.append(proto.message(2, proto.text(1, name) + proto.text(2, full_name) + proto.text(3, key)))
    for of, kind, variable in node.slots:
        parts.append(proto.message(3, proto.number(1, of) + proto.text(2, kind) + proto.number(3, variable)))
    # A BoolValue, for every object (tensorflow/python/checkpoint/util.py, add_checkpoint_values_check).
    parts.append(proto.message(5, proto.number(1, has_values)))
    return b"".join(parts)


def _valued(graph: Graph) -> list[bool]:
    """Say of each object whether it or one below it has values."""
    parents: list[list[int]] = [[] for _ in graph]
    for number, node in enumerate(graph):
        for child in node.children.values():
            parents[child].append(number)
    valued = [bool(node.attributes or node.slots) for node in graph]
    waiting = [number for number, has in enumerate(valued) if has]
    while waiting:
        for parent in parents[waiting.pop()]:
            if not valued[parent]:
                valued[parent] = True
                waiting.append(parent)
    return valued


# The graph.


@dataclass(eq=False, slots=True)
class _Object:
    """An object while the graph is made."""

    children: dict[str, _Object] = field(default_factory=dict)
    attributes: list[Attribute] = field(default_factory=list)
    slots: list[tuple[_Object, str, _Object]] = field(default_factory=list)


class _Draft:
    """The objects of a tree without the aliases `dropped`; `homes` is each leaf's object and its steps."""

    def __init__(
        self, tree: Tree, keys: dict[Path, str], slots: dict[Path, Path], dropped: set[Steps]
    ) -> None:
        self._tree = tree
        self._root = _Object()
        self._homes: dict[Path, tuple[_Object, Steps]] = {}
        self._dropped = dropped
        self._add_leaves(keys, slots)
        self._add_aliases(slots)
        for path, optimizer in slots.items():
            leaf = tree[path]
            if isinstance(leaf, Leaf) and leaf.of is not None:  # _slots chose it so
                slot = _Object(attributes=[Attribute(VALUE, leaf.name or "", keys[path])])
                owner, _ = self._homes[leaf.of]
                self._at(steps_of(optimizer)).slots.append((owner, leaf.slot or "", slot))
                self._homes[path] = slot, steps_of(path)
        self._add_twins(slots)

    def numbered(self) -> Graph:
        """Return the graph, its objects numbered breadth first and slots last, as TensorFlow does."""
        order = [self._root]
        self._numbers = {self._root: 0}
        waiting = deque(order)
        while waiting:
            for child in waiting.popleft().children.values():
                if child not in self._numbers:
                    self._numbers[child] = len(order)
                    order.append(child)
                    waiting.append(child)
        for made in tuple(order):
            for _, _, slot in made.slots:
                self._numbers[slot] = len(order)
                order.append(slot)
        return [self._node(made) for made in order]

    def order(self) -> list[Path]:
        """Return the leaves' paths in the order of their objects' numbers."""
        return sorted(self._homes, key=lambda path: self._numbers[self._homes[path][0]])

    def displacing(self, graph: Graph) -> set[Steps]:
        """Return the aliases that a reader would take for the canonical paths of their leaves."""
        chosen = graph_paths.canonical(graph)
        paths = chosen.paths | of_lists(graph, chosen)
        found = set()
        for made, steps in self._homes.values():
            path = paths.get(self._numbers[made])
            if path is not None and steps_of(path) != steps:
                found.add(steps_of(path))
        return found

    def _node(self, made: _Object) -> Node:
        numbers = self._numbers
        children = {edge: numbers[child] for edge, child in made.children.items()}
        slots = tuple(Slot(numbers[of], kind, numbers[slot]) for of, kind, slot in made.slots)
        return Node(children, tuple(made.attributes), slots, object_graph.is_listlike(children))

    def _at(self, steps: Steps) -> _Object:
        made = self._root
        for step in steps:
            made = made.children.setdefault(step, _Object())
        return made

    def _add_leaves(self, keys: dict[Path, str], slots: dict[Path, Path]) -> None:
        every = set(keys.values())
        for path, leaf in self._tree.tensors():
            if path in slots:
                continue
            steps, name, key = steps_of(path), VALUE, keys[path]
            held = attribute(path, key, every)
            if held is not None:
                steps, (name, key) = steps[:-1], held
            elif path[-1:] == _APART and attribute(path[:-1], keys.get(path[:-1], ""), every):
                # The reader moves a variable aside whose name is an attribute of the object that holds it.
                steps = steps[:-1]
            made = self._at(steps_of(listed(self._tree, path, leaf)) or steps)
            if all(attribute.name != name for attribute in made.attributes):
                made.attributes.append(Attribute(name, leaf.name or "", key))
            elif held is None:
                raise UnsupportedError("two tensors have one path", path=display(path))
            self._homes[path] = made, steps

    def _add_aliases(self, slots: dict[Path, Path]) -> None:
        # The shortest first: what lies below an object that is shared is shared already.
        for steps, made, shared in sorted(self._aliases(slots), key=lambda alias: len(alias[0])):
            parent = self._at(steps[:-1]) if steps else self._root
            there = parent.children.setdefault(steps[-1], made) if steps else self._root
            if there is not made and not shared:
                raise UnsupportedError("two tensors have one path", path="/".join(steps))

    def _aliases(self, slots: dict[Path, Path]) -> Iterator[tuple[Steps, _Object, bool]]:
        for path, others in self._tree.aliases.items():
            if path not in self._homes or path in slots:
                continue
            made, own = self._homes[path]
            tail = len(path) - len(own)  # 1 for an attribute that is not the value of a variable
            for alias in others:
                steps = steps_of(alias.path)
                steps = steps[: len(steps) - tail]
                if steps not in self._dropped:
                    yield steps, made, bool(tail)

    def _add_twins(self, slots: dict[Path, Path]) -> None:
        for path, leaf in self._tree.tensors():
            if MARK not in leaf.key and path not in slots and path:
                twin = _TWINS.get(str(path[-1].value))
                if twin is not None and (*steps_of(path[:-1]), twin) not in self._dropped:
                    self._at(steps_of(path[:-1])).children.setdefault(twin, self._homes[path][0])
