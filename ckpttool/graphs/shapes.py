"""Shapes and costs of a graph's values, for shapes of its inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from ckpttool.core import limits
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.dtypes import np
from ckpttool.core.errors import CkpttoolError, FormatError, LimitError
from ckpttool.core.source import Shape
from ckpttool.core.tree import Path
from ckpttool.graphs.graph import (
    Constant,
    Graph,
    OpenShape,
    OperatorNode,
    ShapeMismatchError,
    UnknownShapeError,
)
from ckpttool.graphs.operators import (
    MOVEMENTS,
    Operator,
    OperatorCall,
    UnknownValueError,
    compute_node,
    list_operators,
    look_up_operator,
    no_products,
    operator_kind,
)

# Entries of a constant that shapes may depend on; larger ones are weights.
SMALL = 4096


class NodeShapes(NamedTuple):
    """Output shapes of a node (None if unknown) and its multiply-accumulate operations (None if unknown)."""

    outputs: tuple[Shape | None, ...]
    macs: int | None


class ShapeTracer:
    """Shapes of a graph's values, for shapes of its inputs; reads the constants that shapes depend on.

    `known` are values that depend on constants and shapes alone, by name. `misfits` are the nodes whose
    inputs have known shapes that do not fit the operator.
    """

    def __init__(self, graph: Graph, shapes: Mapping[str, Shape]) -> None:
        self.graph = graph
        self.shapes: dict[str, Shape | None] = dict(shapes)
        self.known: dict[str, np.ndarray] = {}
        self.misfits: list[OperatorNode] = []

    def shape(self, name: str) -> Shape | None:
        """Return the shape of a value, None if it is unknown."""
        if name in self.graph.constants and name not in self.shapes:
            self.shapes[name] = self.graph.constants[name].shape
        return self.shapes.get(name)

    def value(self, name: str) -> np.ndarray:
        """Return a value that is constant; raise UnknownValueError for another one."""
        if name not in self.known and name in self.graph.constants:
            self.known[name] = self.graph.constants[name].read(name)
        if name not in self.known:
            raise UnknownValueError
        return self.known[name]

    def _listed(self, name: str) -> Any:
        """Return a value that is constant, a list of integers as these."""
        constant = self.graph.constants.get(name)
        numbers = None if constant is None else constant.integers
        return self.value(name) if numbers is None else numbers

    def is_constant(self, name: str) -> bool:
        """Return whether a value depends on constants and shapes alone."""
        return name in self.known or name in self.graph.constants

    def add(self, node: OperatorNode) -> NodeShapes:
        """Return the shapes of a node's outputs, from those of its inputs, and store them."""
        result = self._infer(node)
        rest = (None,) * (len(node.outputs) - len(result.outputs))
        for name, shape in zip(node.outputs, (*result.outputs, *rest), strict=False):
            self.shapes[name] = shape
        return result

    def branches(self, node: OperatorNode) -> list[Graph]:
        """Return the branches of a condition that may be taken, or the body of a loop."""
        bodies = {name: value for name, value in node.attributes.items() if isinstance(value, Graph)}
        condition = self.known.get(node.inputs[0]) if node.op == "If" and node.inputs else None
        if condition is not None and condition.size == 1:
            bodies.pop("else_branch" if condition.reshape(()) else "then_branch", None)
        return [*bodies.values()]

    def _infer_branches(self, node: OperatorNode) -> NodeShapes:
        """Return the shapes on which all branches of a condition that may be taken agree."""
        results = []
        for branch in self.branches(node):
            macs = [self.add(node).macs for node in branch.nodes]
            shapes = tuple(self.shape(value.name) for value in branch.outputs)
            results.append(NodeShapes(shapes, None if None in macs else sum(count or 0 for count in macs)))
        if not results or len({len(result.outputs) for result in results}) > 1:
            return NodeShapes((), None)
        same = zip(*(result.outputs for result in results), strict=True)
        costs = {result.macs for result in results}
        return NodeShapes(
            tuple(extents[0] if len(set(extents)) == 1 else None for extents in same),
            costs.pop() if len(costs) == 1 else None,
        )

    def _infer(self, node: OperatorNode) -> NodeShapes:
        if node.op == "If":
            return self._infer_branches(node)
        row = look_up_operator(node.op)
        if row is None:
            return NodeShapes((), None)
        try:
            folded, call = self._fold(node), self._call(node)
            if folded:
                shapes = [self.known[name].shape for name in node.outputs if name]
                return NodeShapes(tuple(shapes), 0 if row.macs is None else row.macs(call, shapes))
            outputs = row.shapes(call) if row.shapes is not None else self._move(node, row)
            macs = None if row.macs is None else row.macs(call, outputs)
        except (CkpttoolError, LookupError, ValueError, TypeError, ZeroDivisionError) as error:
            shaped = all(not name or self.shape(name) is not None for name in node.inputs)
            if shaped and isinstance(error, FormatError | IndexError | ValueError):
                self.misfits.append(node)
            return NodeShapes((), 0 if row.macs is no_products else None)
        return NodeShapes(tuple(tuple(int(extent) for extent in shape) for shape in outputs), macs)

    def _call(self, node: OperatorNode) -> OperatorCall:
        shapes = [self.shape(name) if name else None for name in node.inputs]
        return OperatorCall(node, shapes, lambda number: self._listed(node.inputs[number]))

    def _fold(self, node: OperatorNode) -> bool:
        """Compute a node of small constants, or of a shape; return whether its outputs are known."""
        if node.op in ("Shape", "Size") and self.shape(node.inputs[0]) is not None:
            arrays: list[np.ndarray | None] = [np.broadcast_to(np.int8(0), self.shape(node.inputs[0]) or ())]
        elif node.inputs and all(not name or self._is_small(name) for name in node.inputs):
            arrays = [self.value(name) if name else None for name in node.inputs]
        else:
            return False
        # What is computed here decides shapes; the values of weights are not computed.
        small = replace(limits.current(), value_entries=min(SMALL, limits.current().value_entries))
        try:
            with limits.using(small):
                computed = compute_node(node, arrays)
        except LimitError:
            return False
        self.known.update((name, array) for name, array in zip(node.outputs, computed, strict=False) if name)
        return all(name in self.known for name in node.outputs if name)

    def _is_small(self, name: str) -> bool:
        """Return whether a value is constant and so small that shapes may depend on it."""
        shape = self.shape(name)
        return self.is_constant(name) and shape is not None and math.prod(shape) <= SMALL

    def _move(self, node: OperatorNode, row: Operator) -> list[Shape]:
        """Return the shapes of an operator that moves entries, by moving placeholders."""
        if row.kind not in MOVEMENTS:
            raise UnknownValueError
        arrays: list[np.ndarray | None] = []
        for number, name in enumerate(node.inputs):
            if not name:
                arrays.append(None)
            elif number and row.kind != "join":
                arrays.append(self._position(node, name))
            else:
                shape = self.shape(name)
                if shape is None:
                    raise UnknownValueError
                arrays.append(np.broadcast_to(np.int8(0), shape))
        return [array.shape for array in compute_node(node, arrays)]

    def _position(self, node: OperatorNode, name: str) -> np.ndarray:
        """Return positions; of an index that is not constant only the shape matters."""
        shape = self.shape(name)
        if not self.is_constant(name) and node.op.startswith("Gather") and shape is not None:
            return np.zeros(shape, np.int64)
        return self.value(name)


def trace_nodes(
    nodes: Iterable[OperatorNode], constants: Mapping[str, Constant], shapes: Mapping[str, Shape]
) -> tuple[ShapeTracer, int | None]:
    """Return the shapes of nodes for those of their inputs, and their operations, None if unknown.

    Raise ShapeMismatchError if an operator does not fit its inputs, and UnknownShapeError if a shape is
    unknown.
    """
    tracer = ShapeTracer(Graph((), (), (), constants), shapes)
    macs: int | None = 0
    for node in nodes:
        result = tracer.add(node)
        macs = None if macs is None or result.macs is None else macs + result.macs
        if not result.outputs or None in result.outputs:
            supported = node.op in list_operators()
            fitting = supported and all(not name or tracer.shape(name) is not None for name in node.inputs)
            raise ShapeMismatchError if fitting else UnknownShapeError
    return tracer, macs


def infer_shapes(graph: Graph, shapes: Mapping[str, OpenShape] | None = None) -> dict[str, OpenShape | None]:
    """Return the shape of every value of a graph by name, None if it is unknown.

    `shapes` are those of inputs, instead of the file's. Open extents are names, or "" without a name. They
    are followed by computing the shapes for two numbers in their place: an extent that is the same for
    both is fixed, one that is always the number of a name has that name, another one is "".
    """
    stated = {value.name: value.shape for value in graph.inputs} | dict(shapes or {})
    names = dict.fromkeys(e for shape in stated.values() for e in shape or () if isinstance(e, str))
    if not names:
        return dict(_shapes_for(graph, stated, {}))
    # Prime numbers, so that no product or quotient of extents is another extent.
    trials = [dict(zip(names, primes, strict=False)) for primes in _primes(len(names))]
    one, two = (_shapes_for(graph, stated, trial) for trial in trials)
    return {name: _merge_shapes(one[name], two.get(name), trials) for name in one}


def _primes(count: int) -> tuple[list[int], list[int]]:
    """Return two lists of this many different prime numbers above 100."""
    result: list[int] = []
    candidate = 101
    while len(result) < 2 * count:
        if all(candidate % divisor for divisor in range(2, int(candidate**0.5) + 1)):
            result.append(candidate)
        candidate += 2
    return result[::2], result[1::2]


def _shapes_for(
    graph: Graph, stated: Mapping[str, OpenShape | None], trial: Mapping[str, int]
) -> dict[str, Shape | None]:
    fixed = {
        name: tuple(trial[extent] if isinstance(extent, str) else extent for extent in shape)
        for name, shape in stated.items()
        if shape is not None
    }
    tracer = ShapeTracer(graph, fixed)
    for node in graph.nodes:
        tracer.add(node)
    return {name: tracer.shape(name) for name in (*stated, *_value_names(graph.nodes))}


def _value_names(nodes: Iterable[OperatorNode]) -> Iterator[str]:
    return (name for node in nodes for name in node.outputs if name)


def _merge_shapes(
    one: Shape | None, two: Shape | None, trials: Sequence[Mapping[str, int]]
) -> OpenShape | None:
    if one is None or two is None or len(one) != len(two):
        return None
    by_extents = {(trials[0][name], trials[1][name]): name for name in trials[0]}
    return tuple(a if a == b else by_extents.get((a, b), "") for a, b in zip(one, two, strict=True))


_MOST_OPERATIONS = 20_000


def _used_names(node: OperatorNode) -> Iterator[str]:
    """Yield the names of a node's inputs, and those of outer values that its branches or its body use."""
    yield from node.inputs
    for body in node.attributes.values():
        if isinstance(body, Graph):
            yield from (name for node in body.nodes for name in _used_names(node))
            yield from (value.name for value in body.outputs)


class TracedCall(NamedTuple):
    """One operation of a graph; `output` and `macs` are None if unknown.

    `inputs` are the positions of the operations whose results it takes, -1 for the first input of the
    model, -2 for the second, and so on;
    `weights` are the constants that it is the first one to use. `scope` is the module around it.
    """

    name: str
    kind: str
    output: Shape | None
    macs: int | None
    inputs: tuple[int, ...]
    weights: tuple[Path, ...] = ()
    scope: tuple[str, ...] = ()


class TracedModel(NamedTuple):
    """The operations of a graph for inputs of these shapes; `assumed` is set if an extent was not fixed.

    `outputs` are the shapes of the graph's outputs, None if unknown.
    """

    inputs: tuple[tuple[str, Shape], ...]
    outputs: tuple[Shape | None, ...]
    calls: tuple[TracedCall, ...]
    assumed: bool = False


def trace_graph(
    graph: Graph, shapes: Mapping[str, Shape], *, open_inputs: bool = False
) -> TracedModel | None:
    """Return the operations of a graph; None if an input has no shape, or there are too many.

    `shapes` are those of inputs by name; extents that are not fixed are taken as 1. With `open_inputs`, an
    input may have no shape: those that depend on it are then unknown.
    """
    stated = {value.name: shapes.get(value.name, value.shape) for value in graph.inputs}
    if (None in stated.values() and not open_inputs) or len(graph.nodes) > _MOST_OPERATIONS:
        return None
    inputs = {
        name: tuple(extent if isinstance(extent, int) and extent > 0 else 1 for extent in shape or ())
        for name, shape in stated.items()
        if shape is not None
    }
    tracer = ShapeTracer(graph, inputs)
    # A node without a place only names an output.
    names = {
        node.outputs[0]: node.inputs[0] for node in graph.nodes if not node.place and node.op == "Identity"
    }
    listed = [node for node in graph.nodes if node.outputs[:1] == () or node.outputs[0] not in names]
    groups = [list(nodes) for _, nodes in groupby(listed, lambda node: node.place or id(node))]
    results = {names.get(value.name, value.name) for value in graph.outputs}
    for nodes in groups:
        computed = {name for node in nodes for name in node.outputs}
        results |= {name for node in nodes for name in node.inputs} - computed
    lister = _CallLister(tracer, {name: -1 - at for at, name in enumerate(stated)}, results)
    for nodes in groups:
        lister.add(nodes)
    outputs = tuple(tracer.shape(names.get(value.name, value.name)) for value in graph.outputs)
    assumed = any(shape != stated[name] for name, shape in inputs.items())
    return TracedModel(tuple(inputs.items()), outputs, tuple(lister.calls), assumed)


@dataclass
class _CallLister:
    """The operations so far; `positions` are those of results, `paths` the leaves of constants.

    `results` are the values that other operations use.
    """

    tracer: ShapeTracer
    positions: dict[str, int]
    results: set[str]
    paths: dict[str, tuple[Path, ...]] = field(default_factory=dict)
    calls: list[TracedCall] = field(default_factory=list)
    used: set[Path] = field(default_factory=set)

    def add(self, nodes: Sequence[OperatorNode]) -> None:
        """Add the nodes of one place in the source; constants and shapes are not operations of the model."""
        macs: int | None = 0
        inputs: dict[int, None] = {}
        weights: dict[Path, None] = {}
        computed: list[OperatorNode] = []
        for node in nodes:
            result = self.tracer.add(node)
            paths = tuple(dict.fromkeys(path for name in node.inputs for path in self._origins(name)))
            if node.inputs and all(not name or self._is_constant(name) for name in node.inputs):
                self.paths.update((name, paths) for name in node.outputs)
                # A layer with a constant state computes its products with it as well.
                macs = None if macs is None else macs + (result.macs or 0)
                continue
            if all(self.tracer.is_constant(name) for name in node.outputs if name):
                continue
            macs = None if macs is None or result.macs is None else macs + result.macs
            inputs.update(
                (self.positions[name], None) for name in _used_names(node) if name in self.positions
            )
            weights.update((path, None) for path in paths if path not in self.used)
            self.positions.update((name, len(self.calls)) for name in node.outputs if name)
            computed.append(node)
        if not computed:
            return
        self.used.update(weights)
        # A translated operator is named by the part that is not a change of shape.
        kinds = [node.op for node in computed if operator_kind(node.op) not in MOVEMENTS]
        kind = (kinds or [computed[-1].op])[0]
        sources = tuple(number for number in inputs if number != len(self.calls))
        # The first result: a recurrent layer has its states after its output.
        last = next((node for node in computed if self.results & {*node.outputs[:1]}), computed[-1])
        output = self.tracer.shape(last.outputs[0]) if last.outputs else None
        self.calls.append(TracedCall(last.title, kind, output, macs, sources, tuple(weights), last.scope))

    def _is_constant(self, name: str) -> bool:
        return name in self.tracer.graph.constants or name in self.paths

    def _origins(self, name: str) -> tuple[Path, ...]:
        constant = self.tracer.graph.constants.get(name)
        if constant is None or constant.path is None:
            return self.paths.get(name, ())
        return (constant.path,)
