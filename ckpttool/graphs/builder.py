"""Building a graph node by node, for front ends whose languages name their values otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool.core.errors import UnsupportedError
from ckpttool.core.tree import Leaf, Path, ValueLeaf
from ckpttool.graphs.graph import Constant, Graph, OperatorNode, Value, inline_constant, trim_inputs
from ckpttool.mapping.rules import KEEP, Rule

_MOST_NODES = 200_000


@dataclass
class GraphBuilder:
    """Nodes and constants of a graph under construction; `scope` and `place` are those of new nodes."""

    nodes: list[OperatorNode] = field(default_factory=list)
    constants: dict[str, Constant] = field(default_factory=dict)
    scope: tuple[str, ...] = ()
    place: str = ""
    title: str = ""
    count: int = 0
    # Called with each new node.
    inspect: Callable[[OperatorNode], object] | None = None
    _names: Counter[str] = field(default_factory=Counter)
    _numbers: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def unique_name(self, stem: str) -> str:
        """Return a name that no value of the graph has."""
        self._names[stem] += 1
        number = self._names[stem]
        name = stem if number == 1 else f"{stem}_{number - 1}"
        return name if number == 1 or name not in self._names else self.unique_name(name)

    def add(self, op: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> tuple[str, ...]:
        """Add a node and return the names of its outputs."""
        self.count += 1
        if self.count > _MOST_NODES:
            raise UnsupportedError("the graph has too many nodes", found=str(self.count))
        stem = "/".join((*self.scope, op))
        names = tuple(self.unique_name(stem) for _ in range(outputs))
        trimmed = trim_inputs(inputs)
        node = OperatorNode(op, trimmed, names, attributes, self.title, self.scope, self.place)
        self.nodes.append(node)
        if self.inspect is not None:
            self.inspect(node)
        return names

    def one(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output and return the name of that."""
        return self.add(op, inputs, **attributes)[0]

    def number(self, value: Any, dtype: str) -> str:
        """Return the name of a constant with these numbers."""
        import numpy as np

        from ckpttool.core import dtypes

        array = np.asarray(value).astype(dtypes.numpy_dtype(dtype))
        identity = (dtype, array.shape, array.tobytes())
        if identity not in self._numbers:
            name = self._numbers[identity] = self.unique_name("constant")
            self.constants[name] = inline_constant(array)
        return self._numbers[identity]

    def stored(self, path: Path, leaf: Leaf | ValueLeaf, title: str, rule: Rule = KEEP) -> str:
        """Return the name of the constant that is a leaf of the tree, changed by a rule."""
        identity = (path, rule)
        if identity not in self._numbers:
            stem = title if rule == KEEP else f"{title}/{rule.name}"
            name = self._numbers[identity] = self.unique_name(stem)
            self.constants[name] = Constant(leaf, path, rule)
        return self._numbers[identity]

    @contextmanager
    def branch(self) -> Iterator[list[OperatorNode]]:
        """Collect the nodes that are added meanwhile in a separate list."""
        outer, self.nodes = self.nodes, []
        try:
            yield self.nodes
        finally:
            self.nodes = outer

    def graph(self, inputs: Sequence[Value], outputs: Sequence[Value], name: str = "") -> Graph:
        """Return the graph of the nodes and constants that its outputs need."""
        needed = {value.name for value in outputs}
        nodes = needed_nodes(self.nodes, needed)
        constants = {key: value for key, value in self.constants.items() if key in needed}
        return Graph(nodes, tuple(inputs), tuple(outputs), constants, name)


def needed_nodes(nodes: Sequence[OperatorNode], needed: set[str]) -> tuple[OperatorNode, ...]:
    """Return the nodes whose outputs are needed, and those without outputs; add what they use to `needed`."""
    kept: list[OperatorNode] = []
    for node in reversed(nodes):
        if node.outputs and needed.isdisjoint(node.outputs):
            continue
        attributes = dict(node.attributes)
        for key, value in attributes.items():
            if isinstance(value, Graph):
                needed |= {output.name for output in value.outputs}
                attributes[key] = replace(value, nodes=needed_nodes(value.nodes, needed))
        needed.update(node.inputs)
        kept.append(replace(node, attributes=attributes))
    return tuple(reversed(kept))


def body(nodes: Sequence[OperatorNode], outputs: Sequence[str], inputs: Sequence[str] = ()) -> Graph:
    """Return the graph of a branch or loop; its constants are those of the graph around it."""
    return Graph(
        tuple(nodes), tuple(Value(name) for name in inputs), tuple(Value(name) for name in outputs), {}
    )
