"""Graph: what a model computes, in ONNX's operators, whatever language its file is written in.

A front end (one module per language, `FRONT_ENDS`) translates a file's computation to a `Graph`. Names,
attributes and meaning of operators are those of ONNX's operator set 28 (onnx/docs/Operators.md); a front
end translates older versions and other languages. An operator without a row in the table
(graphs/operators.py) is opaque: it is listed by its name and attributes, and refused by what needs to
understand it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, NamedTuple

from ckpttool.core import dtypes
from ckpttool.core.activations import CallPlace
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.dtypes import np
from ckpttool.core.errors import CkpttoolError, UnsupportedError
from ckpttool.core.kinds import ACTIVATION_KINDS
from ckpttool.core.source import Inline, Shape
from ckpttool.core.tree import Leaf, Path, ValueLeaf
from ckpttool.mapping.rules import KEEP, Permute, Rule

# The version of ONNX's default operator set that gives operators their meaning.
OPSET = 28
# Modules that read a language of computation, by the format of the checkpoint. Their
# `read(checkpoint)` returns None for a file in another language.
FRONT_ENDS: Mapping[str, tuple[str, ...]] = {
    "onnx": ("ckpttool.graphs.onnx",),
    "pytorch": ("ckpttool.graphs.torchscript", "ckpttool.graphs.torch_modules"),
    "pytorch_legacy": ("ckpttool.graphs.torch_modules",),
    "keras_zip": ("ckpttool.graphs.keras",),
    "keras_h5": ("ckpttool.graphs.keras",),
    "saved_model": ("ckpttool.graphs.tensorflow",),
}

# An open extent is a name, or "" if it has none.
OpenShape = tuple[int | str, ...]


class UnknownShapeError(Exception):
    """A shape cannot be computed: a layer that is not understood, or shapes that depend on values."""


class ShapeMismatchError(UnknownShapeError):
    """A layer cannot be applied to an input of this shape."""


class Value(NamedTuple):
    """An input or output of a graph; `dtype` and `shape` are None if unknown.

    An extent is a number, the name of an open one, or "" for an open one without a name.
    """

    name: str
    dtype: str | None = None
    shape: OpenShape | None = None


class Constant(NamedTuple):
    """A tensor that the graph uses: a leaf of the checkpoint's tree, or a value of the program itself.

    `path` is the leaf's path in the tree, None for a value of the program. `rule` changes the stored
    tensor to the one that the graph uses. The leaf is read by `read`, not before.
    """

    leaf: Leaf | ValueLeaf
    path: Path | None = None
    rule: Rule = KEEP

    @property
    def shape(self) -> Shape | None:
        """The shape that the graph uses; None for a tensor that is listed but not read."""
        leaf = self.rule.leaf(self.leaf) if isinstance(self.leaf, Leaf) else self.leaf
        return leaf.shape if isinstance(leaf, Leaf) else None

    def read(self, name: str) -> np.ndarray:
        """Return the values that the graph uses; raise UnsupportedError if the tensor cannot be read."""
        leaf = self.rule.leaf(self.leaf) if isinstance(self.leaf, Leaf) else self.leaf
        if not isinstance(leaf, Leaf):
            raise UnsupportedError(
                "a constant of the graph is listed but not read", path=name, found=str(leaf.value)
            )
        try:
            return leaf.array()
        except CkpttoolError as error:
            raise error.located(path=error.path or name) from error.__cause__


@dataclass(frozen=True, slots=True, eq=False)
class OperatorNode:
    """One operation: its operator, the names of its inputs and outputs ("" if omitted), and attributes.

    An attribute is a number, a string, a tuple of these, a `Leaf` (a tensor) or a `Graph` (a branch or a
    loop's body). Element types are attributes by their name in core/dtypes ("float32"). `name` is the
    node's name in its file, `scope` the module that it belongs to (("actor", "0")), `place` where the
    file contains it.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    name: str = ""
    scope: tuple[str, ...] = ()
    place: str = ""

    @property
    def title(self) -> str:
        """The node's name, otherwise the name of its first output."""
        return self.name or next(filter(None, self.outputs), "")


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A computation: nodes in the order of execution, and the tensors that they use, by name.

    Each name has one meaning: an input, a constant, or an output of one node. A graph that is an
    attribute may also use names of the graph around it.
    """

    nodes: tuple[OperatorNode, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    constants: Mapping[str, Constant]
    name: str = ""


def trim_inputs(inputs: Sequence[str]) -> tuple[str, ...]:
    """Return a node's inputs without those at the end that are omitted."""
    count = max((number for number, name in enumerate(inputs, 1) if name), default=0)
    return tuple(inputs[:count])


def inline_constant(array: np.ndarray) -> Constant:
    """Return a constant with these values, which the checkpoint's tree does not contain."""
    dense = np.ascontiguousarray(array).reshape(array.shape)
    return Constant(Leaf(dense.dtype.name, dense.shape, Inline(dense.tobytes()), "", "other"))


def read_graph(checkpoint: Checkpoint) -> Graph | None:
    """Return what a checkpoint computes, None if its format records no computation.

    No tensor is read. Raise FormatError for a graph that violates its format, and UnsupportedError if
    what it computes cannot be listed.
    """
    for module in FRONT_ENDS.get(checkpoint.format, ()):
        graph: Graph | None = import_module(module).read(checkpoint)
        if graph is not None:
            return graph
    return None


# Their results depend on the extents of their input, not on its values.
_OF_EXTENTS = frozenset(("Shape", "Size"))


def number_calls(graph: Graph) -> dict[Path, CallPlace]:
    """Return per weight the first node that uses it among the nodes that use weights, in their order.

    A weight may reach its node through nodes that compute with constants only.
    """
    calls: dict[Path, CallPlace] = {}
    known = {value.name: 0 for value in graph.inputs}
    weights = {
        name: frozenset((each.path,)) for name, each in graph.constants.items() if each.path is not None
    }
    _follow_calls(graph, graph.nodes, known, weights, calls)
    outputs = [known.get(value.name, 0) for value in graph.outputs]
    return {
        path: call._replace(leads=sum((bits >> call.number & 1) << n for n, bits in enumerate(outputs)))
        for path, call in calls.items()
    }


def _follow_calls(
    graph: Graph,
    nodes: Sequence[OperatorNode],
    known: dict[str, int],
    weights: dict[str, frozenset[Path]],
    calls: dict[Path, CallPlace],
) -> None:
    """Add the calls of some nodes; `known` are the calls that values depend on, `weights` constants."""
    for node in nodes:
        branches = [each for each in node.attributes.values() if isinstance(each, Graph)]
        names = [name for name in node.inputs if name]
        used = frozenset[Path]().union(*(weights.get(name, frozenset()) for name in names))
        if not (branches or any(name in known for name in names) or _looks_up(graph, node, weights)):
            weights.update((name, used) for name in node.outputs)
            continue
        before = 0
        for name in names if node.op not in _OF_EXTENTS else ():
            before |= known.get(name, 0)
        number = len({call.number for call in calls.values()})
        for path in used:
            calls.setdefault(path, CallPlace(number, before))
        for path in used:
            before |= 1 << calls[path].number
        for branch in branches:
            inner = {**known, **dict.fromkeys((value.name for value in branch.inputs), before)}
            _follow_calls(graph, branch.nodes, inner, dict(weights), calls)
            for value in branch.outputs:
                before |= inner.get(value.name, 0)
        known.update(dict.fromkeys(node.outputs, before))


def _looks_up(graph: Graph, node: OperatorNode, weights: Mapping[str, frozenset[Path]]) -> bool:
    """Return whether a node takes rows of a weight at positions that the program computes."""
    if node.op != "Gather" or not weights.get(node.inputs[0]):
        return False
    positions = graph.constants.get(node.inputs[1])
    return positions is None or positions.shape != ()


# What of a node's attributes distinguishes layers of one kind and shape, by the operator.
_WINDOW = {"dilations": "dilation", "strides": "strides"}
_EPSILON = {"epsilon": "epsilon"}
_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "Conv": _WINDOW,
    "ConvTranspose": _WINDOW,
    "BatchNormalization": _EPSILON,
    "GroupNormalization": _EPSILON,
    "LayerNormalization": _EPSILON,
    "RMSNormalization": _EPSILON,
}


def find_roles(graph: Graph) -> dict[Path, tuple[str, Mapping[str, Any]]]:
    """Return the role of weights in products with activations, and the settings of the nodes that use them.

    A matrix is "in_out" if the product is x @ W, "out_in" if it is x @ W.T; a vector that is added to such a
    product is "added". Several roles, and settings that differ between nodes, are left out.
    """
    uses = _WeightRoles(graph)
    uses.add_all(graph.nodes)
    roles = {path: next(iter(each)) for path, each in uses.roles.items() if len(each) == 1}
    settings = {path: each[0] for path, each in uses.settings.items() if each.count(each[0]) == len(each)}
    return {path: (roles.get(path, ""), settings.get(path, {})) for path in {**roles, **settings}}


_TURN = Permute((1, 0))


class _WeightRoles:
    """Roles of weights by path; matrices of the graph's constants, each with whether it is transposed."""

    def __init__(self, graph: Graph) -> None:
        self.roles: dict[Path, set[str]] = {}
        self.settings: dict[Path, list[dict[str, Any]]] = {}
        self._paths = {name: each.path for name, each in graph.constants.items()}
        self._products: set[str] = set()
        self._vectors: dict[str, Path] = {}
        self._matrices: dict[str, tuple[Path, bool]] = {}
        for name, each in graph.constants.items():
            if each.path is None:
                continue
            if len(each.shape or ()) == 1 and each.rule == KEEP:
                self._vectors[name] = each.path
            elif len(each.shape or ()) == 2 and each.rule in (KEEP, _TURN):
                self._matrices[name] = each.path, each.rule == _TURN

    def add_all(self, nodes: Sequence[OperatorNode]) -> None:
        """Add nodes, with those of branches and loops."""
        for node in nodes:
            first, second, third = (*node.inputs, "", "", "")[:3]
            if node.op in ("Transpose", "Identity") and first in self._matrices:
                path, turned = self._matrices[first]
                swaps = node.op == "Transpose" and tuple(node.attributes.get("perm") or (1, 0)) == (1, 0)
                self._matrices[node.outputs[0]] = path, turned != swaps
            elif node.op in ("MatMul", "Gemm") and second in self._matrices:
                self._multiply(node, second, third)
            elif node.op in _SETTINGS and (scale := self._paths.get(second)) is not None:
                named = {own: node.attributes.get(name) for name, own in _SETTINGS[node.op].items()}
                known = {name: value for name, value in named.items() if value is not None}
                self.settings.setdefault(scale, []).append(known)
            elif node.op == "Add" and not self._products.isdisjoint((first, second)):
                self._add_bias(second if first in self._products else first)
            for branch in node.attributes.values():
                self.add_all(branch.nodes if isinstance(branch, Graph) else ())

    def _multiply(self, node: OperatorNode, matrix: str, bias: str) -> None:
        path, turned = self._matrices[matrix]
        turned = turned != bool(node.attributes.get("transB", 0))
        self.roles.setdefault(path, set()).add("out_in" if turned else "in_out")
        self._products.add(node.outputs[0])
        self._add_bias(bias)

    def _add_bias(self, name: str) -> None:
        if name in self._vectors:
            self.roles.setdefault(self._vectors[name], set()).add("added")


def extract_module(graph: Graph, scope: tuple[str, ...]) -> Graph | None:
    """Return the part of a graph that belongs to a module with one input and one output, else None."""
    dynamic = {value.name for value in graph.inputs}
    constant: dict[str, OperatorNode] = {}
    inside: list[OperatorNode] = []
    for node in graph.nodes:
        if dynamic.isdisjoint(node.inputs):
            constant.update((name, node) for name in node.outputs)
            continue
        dynamic.update(node.outputs)
        if node.scope[: len(scope)] == scope:
            inside.append(node)
    made = {name for node in inside for name in node.outputs}
    entering = {name for node in inside for name in node.inputs if name in dynamic} - made
    outside = [node for node in graph.nodes if node.scope[: len(scope)] != scope]
    used = {name for node in outside for name in node.inputs} | {value.name for value in graph.outputs}
    leaving = made & used
    if len(entering) != 1 or len(leaving) != 1:
        return None
    needed: dict[str, OperatorNode] = {}
    waiting = [name for node in inside for name in node.inputs if name in constant]
    while waiting:
        node = constant[waiting.pop()]
        if node.outputs[0] not in needed:
            needed[node.outputs[0]] = node
            waiting += [name for name in node.inputs if name in constant]
    before = tuple(node for node in graph.nodes if node.outputs and node.outputs[0] in needed)
    return Graph(
        (*before, *inside),
        tuple(map(Value, entering)),
        tuple(map(Value, leaving)),
        graph.constants,
    )


# Building a graph node by node, for front ends whose languages name their values otherwise.

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


class ModuleNodes:
    """The nodes that one module or layer becomes; its front end adds them to the graph, or drops them.

    `reader` keeps the constants of the graph, traces shapes and names values by a stem; `title` is the
    module's name.
    """

    def __init__(self, reader: Any, scope: tuple[str, ...], title: str, place: str) -> None:
        """Record the module; nothing is added to the graph yet."""
        self.reader, self.scope, self.title, self.place = reader, scope, title, place
        self.nodes: list[OperatorNode] = []

    def split(self, op: str, inputs: Sequence[str], count: int, **attributes: Any) -> list[str]:
        """Add a node with several outputs and return their names."""
        names = tuple(self.reader.new_name(f"{self.title}/{op}") for _ in range(count))
        node = OperatorNode(op, trim_inputs(inputs), names, attributes, self.title, self.scope, self.place)
        self.nodes.append(node)
        self.reader.tracer.add(node)
        return list(names)

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        return self.split(op, inputs, 1, **attributes)[0]

    def constant(self, value: Any, dtype: str) -> str:
        """Return the name of a constant with these numbers."""
        name: str = self.reader.new_name(f"{self.title}/constant")
        self.reader.constants[name] = inline_constant(np.asarray(value, dtypes.numpy_dtype(dtype)))
        return name

    def integers(self, *values: int) -> str:
        """Return the name of a constant list of integers."""
        return self.constant(list(values), "int64")


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


# Activations as operators, for all front ends.

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
