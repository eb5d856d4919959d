"""Building a graph node by node, for front ends whose languages name their values otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ckpttool.core import dtypes
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.dtypes import np
from ckpttool.core.errors import UnsupportedError
from ckpttool.core.kinds import ACTIVATION_KINDS
from ckpttool.core.tree import Leaf, Path, ValueLeaf
from ckpttool.graphs.graph import (
    Constant,
    Graph,
    OperatorNode,
    Value,
    inline_constant,
    inline_integers,
    trim_inputs,
)
from ckpttool.mapping.rules import KEEP, Rule

_MOST_NODES = 200_000


@dataclass
class GraphBuilder:
    """Nodes and constants of a graph under construction; `scope` and `location` are those of new nodes."""

    nodes: list[OperatorNode] = field(default_factory=list)
    constants: dict[str, Constant] = field(default_factory=dict)
    scope: tuple[str, ...] = ()
    location: str = ""
    title: str = ""
    count: int = 0
    # Called with each new node.
    inspect: Callable[[OperatorNode], object] | None = None
    _names: dict[str, int] = field(default_factory=dict)
    _numbers: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def unique_name(self, stem: str) -> str:
        """Return a name that no value of the graph has."""
        name = stem = stem or "value"
        while name in self._names:
            name = f"{stem}_{self._names[stem]}"
            self._names[stem] += 1
        self._names[name] = 1
        return name

    def add(self, op: str, inputs: Sequence[str], outputs: int = 1, /, **attributes: Any) -> tuple[str, ...]:
        """Add a node and return the names of its outputs."""
        self.count += 1
        if self.count > _MOST_NODES:
            raise UnsupportedError("the graph has too many nodes", found=str(self.count))
        stem = "/".join((*self.scope, op))
        names = tuple(self.unique_name(stem) for _ in range(outputs))
        trimmed = trim_inputs(inputs)
        node = OperatorNode(op, trimmed, names, attributes, self.title, self.scope, self.location)
        self.nodes.append(node)
        if self.inspect is not None:
            self.inspect(node)
        return names

    def one(self, op: str, /, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output and return the name of that."""
        return self.add(op, inputs, **attributes)[0]

    def named(self, name: str, array: np.ndarray) -> str:
        """Return the name of a constant with these values, which is named after the scope and `name`."""
        name = self.unique_name("/".join((*self.scope, name)))
        self.constants[name] = inline_constant(array)
        return name

    def number(self, value: Any, dtype: str) -> str:
        """Return the name of a constant with these numbers."""
        array = np.asarray(value).astype(dtypes.numpy_dtype(dtype))
        identity = (dtype, array.shape, array.tobytes())
        if identity not in self._numbers:
            name = self._numbers[identity] = self.unique_name("constant")
            self.constants[name] = inline_constant(array)
        return self._numbers[identity]

    def integers(self, values: Sequence[int]) -> str:
        """Return the name of a constant list of integers, which needs no NumPy."""
        identity = ("integers", *values)
        if identity not in self._numbers:
            name = self._numbers[identity] = self.unique_name("constant")
            self.constants[name] = inline_integers(values)
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


# Adds a node with an operator, inputs and attributes.
_Add = Callable[..., str]
# Returns a constant of the type of the values.
_Number = Callable[[float], str]
ActivationNodes = Callable[[_Add, _Number, str], str]


def _single_node(op: str) -> ActivationNodes:
    return lambda add, _number, x: add(op, x)


def _square_plus(add: _Add, number: _Number, x: str) -> str:
    root = add("Sqrt", add("Add", add("Mul", x, x), number(4)))
    return add("Mul", add("Add", x, root), number(0.5))


def _log1p(add: _Add, number: _Number, x: str) -> str:
    # 2 artanh(x / (x + 2)) is exact for small x.
    exact = add("Mul", add("Atanh", add("Div", x, add("Add", x, number(2)))), number(2))
    small = add("Less", add("Abs", x), number(0.5))
    return add("Where", small, exact, add("Log", add("Add", x, number(1))))


def _expm1(add: _Add, number: _Number, x: str) -> str:
    # Elu computes it exactly below zero, and exp(x) - 1 = -exp(x) * (exp(-x) - 1) above.
    below = add("Elu", add("Neg", add("Abs", x)))
    above = add("Neg", add("Mul", add("Exp", x), below))
    return add("Where", add("Less", x, number(0)), below, above)


# By the names of core/kinds.py, with the default numbers of ONNX's operators, which are those of PyTorch's
# classes except where PyTorch's have arguments.
ACTIVATION_NODES: Mapping[str, ActivationNodes] = {
    **{row.name: _single_node(row.onnx) for row in ACTIVATION_KINDS.values() if row.onnx},
    "linear": lambda _add, _number, x: x,
    "relu6": lambda add, number, x: add("Clip", x, number(0), number(6)),
    "hardtanh": lambda add, number, x: add("Clip", x, number(-1), number(1)),
    "hardsigmoid": lambda add, _number, x: add("HardSigmoid", x, alpha=1 / 6, beta=0.5),
    "logsigmoid": lambda add, _number, x: add("Neg", add("Softplus", add("Neg", x))),
    "tanhshrink": lambda add, _number, x: add("Sub", x, add("Tanh", x)),
    "squareplus": _square_plus,
}
# Functions of one value with fractions that are no activations, by their names in PyTorch.
FUNCTION_NODES: Mapping[str, ActivationNodes] = {
    "log1p": _log1p,
    "expm1": _expm1,
    "log2": lambda add, number, x: add("Div", add("Log", x), number(math.log(2))),
    "log10": lambda add, number, x: add("Div", add("Log", x), number(math.log(10))),
    "rsqrt": lambda add, _number, x: add("Reciprocal", add("Sqrt", x)),
    "log_sigmoid": ACTIVATION_NODES["logsigmoid"],
    "hardsigmoid": ACTIVATION_NODES["hardsigmoid"],
}
