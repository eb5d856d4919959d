"""SavedModel graphs: steps as layers."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from ckpttool.core import limits
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkpttoolError, UnsupportedError
from ckpttool.core.tree import Leaf, Path, Tree
from ckpttool.formats import tf_saved_model, tf_saved_model_messages
from ckpttool.formats.tf_functions import (
    FunctionNode,
    GraphFunction,
    get_function_name,
    is_true,
    read_constant_fields,
    read_functions,
)
from ckpttool.formats.tf_saved_model_messages import FieldMeter
from ckpttool.libraries.model_steps import ChainStep, LayerTensors

# Traces a SavedModel's serving function, a graph of operations, to a policy's steps.
#
# Sources: tensorflow/core/framework/graph.proto, function.proto, node_def.proto, attr_value.proto and
# tensor.proto. Nothing is executed; a function that is not one chain of supported operations is refused.

_FLOAT, _INT32 = 1, 3
ACTIVATION_OPERATIONS = {
    "Relu": "relu",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "Elu": "elu",
    "Softplus": "softplus",
}
# Further activations that a graph may have, which an agent of a layout does not support.
OTHER_FUNCTIONS = frozenset(("LeakyRelu", "Relu6", "Selu", "Softsign", "Erf", "Sin", "Cos"))
_SAME = frozenset(("Identity", "StopGradient", "ReadVariableOp"))
_CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))
_NODES, _DEEP, _NUMBERS = 20_000, 20, 4096


class UnsupportedGraphError(Exception):
    """The graph contains an unsupported operation."""


FAILURES = (UnsupportedGraphError, CkpttoolError, RecursionError, struct.error)


class VariableReference(NamedTuple):
    """A variable, or its value, by the path of its leaf."""

    path: Path


@dataclass(frozen=True, slots=True)
class _GraphFlow:
    """The steps applied to the input so far."""

    steps: tuple[ChainStep, ...] = ()

    def then(self, kind: str, value: Any = None) -> _GraphFlow:
        return _GraphFlow((*self.steps, ChainStep(kind, (f"step {len(self.steps)}",), value)))


class ServingFunction(NamedTuple):
    """The serving function of a SavedModel: its captures, by object number, and its graph."""

    function: GraphFunction
    captures: tuple[int, ...]
    variables: Mapping[int, Path]
    functions: Mapping[str, GraphFunction]
    signature: tf_saved_model_messages.Signature | None
    graph: tf_saved_model_messages.MetaGraph


def find_serving_function(checkpoint: Checkpoint, meter: FieldMeter) -> ServingFunction | None:
    """Return the serving function with one input, None if the checkpoint serves nothing.

    Raise UnknownError for several functions or inputs.
    """
    file = next((f for f in checkpoint.files if f.path.endswith(f"/{tf_saved_model.GRAPH}")), None)
    if checkpoint.format != tf_saved_model.NAME or file is None:
        return None
    if file.size > limits.current().graph_bytes:
        raise UnsupportedGraphError
    graphs = tf_saved_model_messages.parse_saved_model(memoryview(file.read(0, file.size)), meter)
    if len(graphs) != 1 or graphs[0].objects is None or graphs[0].nodes is None:
        raise UnsupportedGraphError
    found = tf_saved_model_messages.parse_object_graph(graphs[0].objects, meter)
    signatures = dict(tf_saved_model.iter_signatures(found))
    if not signatures:
        return None
    name = "serving_default" if "serving_default" in signatures else next(iter(signatures))
    if len(signatures) > 1 and name != "serving_default":
        raise UnsupportedGraphError
    functions = read_functions(graphs[0].nodes, meter)
    function, captures = functions.get(signatures[name]), found.captures.get(signatures[name], ())
    if function is None or len(function.arguments) != len(captures) + 1:
        raise UnsupportedGraphError
    variables = tf_saved_model.facts_by_objects(checkpoint.tree, found).numbers
    return ServingFunction(
        function, captures, variables, functions, graphs[0].signatures.get(name), graphs[0]
    )


def read_graph_steps(checkpoint: Checkpoint) -> tuple[ChainStep, ...] | None:
    """Return the steps of a SavedModel's serving function, None if the checkpoint has none.

    Raise UnsupportedError for one that cannot be traced, because it may combine its layers in any way.
    """
    try:
        served = find_serving_function(checkpoint, FieldMeter())
        if served is None:
            return None
        reader = GraphEvaluator(served.functions, tree=checkpoint.tree)
        captured = [
            VariableReference(served.variables[n]) if n in served.variables else None for n in served.captures
        ]
        (result,) = reader.call(served.function, [_GraphFlow(), *captured])
        return _require_flow(result).steps
    except FAILURES as error:
        raise make_graph_error(checkpoint, error) from None


def has_serving_function(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint is a SavedModel with a serving function, even a damaged one."""
    try:
        return find_serving_function(checkpoint, FieldMeter()) is not None
    except FAILURES:
        return True


def make_graph_error(checkpoint: Checkpoint, error: Exception) -> UnsupportedError:
    """Return the error for a graph that cannot be traced."""
    return UnsupportedError(
        "the SavedModel's graph contains an unsupported operation",
        file=checkpoint.path,
        found=(str(error) if isinstance(error, UnsupportedGraphError) else "") or None,
    )


@dataclass
class FunctionEvaluator:
    """Calls functions: evaluates the nodes needed for their results, in order of use."""

    library: Mapping[str, GraphFunction]
    depth: int = 0

    failure: ClassVar[type[Exception]]

    def call(self, function: GraphFunction, given: Sequence[Any]) -> list[Any]:
        """Return the results of a function for its arguments' values."""
        if len(given) != len(function.arguments) or self.depth > _DEEP:
            raise self.failure
        self.depth += 1
        scope = {name: [value] for name, value in zip(function.arguments, given, strict=True)}
        found = [self._value(result, function, scope) for result in function.results]
        self.depth -= 1
        return found

    def called_function(self, node: FunctionNode, attribute: str = "f") -> GraphFunction:
        """Return the function that a node's attribute names."""
        name = get_function_name(node.attributes.get(attribute, memoryview(b"")))
        if name not in self.library:
            raise self.failure
        return self.library[name]

    def _value(self, name: str, function: GraphFunction, scope: dict[str, list[Any]]) -> Any:
        node = name.partition(":")[0]
        # Chains of thousands of nodes are evaluated without recursion.
        waiting = [node] if node not in scope else []
        while waiting:
            top = waiting[-1]
            self._visit()
            found = function.nodes.get(top)
            if found is None or len(waiting) > _NODES:
                raise self.failure
            missing = [n for each in found.inputs if (n := each.partition(":")[0]) not in scope]
            if top not in scope and missing:
                waiting += missing
                continue
            waiting.pop()
            if top not in scope:
                scope[top] = self._outputs(found, [self._output(each, scope) for each in found.inputs])
        return self._output(name, scope)

    def _visit(self) -> None:
        """Count a visit of a node."""

    def _output(self, name: str, scope: Mapping[str, list[Any]]) -> Any:
        """Return the output of an evaluated node, by name (`node:output:number`)."""
        raise NotImplementedError

    def _outputs(self, node: FunctionNode, given: list[Any]) -> list[Any]:
        """Return a node's outputs for its inputs' values."""
        raise NotImplementedError


def _is_first_output(name: str) -> bool:
    output = name.partition(":")[2]
    return not output or output.endswith(":0")


@dataclass
class GraphEvaluator(FunctionEvaluator):
    """Evaluates functions on one unknown input; only the first of a node's outputs is used."""

    tree: Tree = field(kw_only=True)
    visited: int = 0

    failure = UnsupportedGraphError

    def call(self, function: GraphFunction, given: Sequence[Any]) -> list[Any]:
        """Return the only result of a function."""
        if len(function.results) != 1 or not all(map(_is_first_output, function.results)):
            raise UnsupportedGraphError
        return super().call(function, given)

    def _visit(self) -> None:
        self.visited += 1
        if self.visited > _NODES:
            raise UnsupportedGraphError

    def _output(self, name: str, scope: Mapping[str, list[Any]]) -> Any:
        if not _is_first_output(name):
            raise UnsupportedGraphError
        return scope[name.partition(":")[0]][0]

    def _outputs(self, node: FunctionNode, given: list[Any]) -> list[Any]:
        return [self._node(node, given)]

    def common(self, node: FunctionNode, given: list[Any]) -> tuple[Any] | None:
        """Return the value of a node without computation, None for other nodes."""
        if (node.op in _SAME and len(given) == 1) or node.op == "IdentityN":
            return (given[0],)
        if node.op in _CALLS:
            return (self.call(self.called_function(node), given)[0],)
        if node.op == "Const":
            return (self.constant(node.attributes.get("value", memoryview(b""))),)
        return None

    def constant(self, value: memoryview) -> Any:
        """Return the constant in a node's attribute."""
        return _read_small_constant(value)

    def _node(self, node: FunctionNode, given: list[Any]) -> Any:
        common = self.common(node, given)
        if common is not None:
            return common[0]
        if node.op in ACTIVATION_OPERATIONS and len(given) == 1:
            return _require_flow(given[0]).then("activation", ACTIVATION_OPERATIONS[node.op])
        if node.op == "MatMul":
            return self._product(node, given)
        if node.op in ("BiasAdd", "Add", "AddV2", "Sub", "Mul", "RealDiv") and len(given) == 2:
            return self._arithmetic(node.op, *given)
        raise UnsupportedGraphError(node.op)

    def _product(self, node: FunctionNode, given: list[Any]) -> _GraphFlow:
        turned = any(is_true(node.attributes.get(f"transpose_{side}")) for side in "ab")
        if turned or len(given) != 2 or not isinstance(given[1], VariableReference):
            raise UnsupportedGraphError
        return _require_flow(given[0]).then("dense", LayerTensors(given[1].path, None))

    def _arithmetic(self, op: str, one: Any, two: Any) -> _GraphFlow:
        if isinstance(two, _GraphFlow) and not isinstance(one, _GraphFlow) and op in ("Add", "AddV2", "Mul"):
            one, two = two, one
        flow = _require_flow(one)
        if isinstance(two, _GraphFlow):
            return _match_swish(op, flow, two)
        last = flow.steps[-1] if flow.steps else None
        if op in ("BiasAdd", "Add", "AddV2") and isinstance(two, VariableReference):
            bare = last is not None and isinstance(last.value, LayerTensors) and last.value.bias is None
            if last is None or not bare or not self._is_bias(last.value.weight, two.path):
                raise UnsupportedGraphError
            return _GraphFlow(flow.steps[:-1]).then("dense", last.value._replace(bias=two.path))
        numbers = self._numbers(two)
        if op == "Mul":
            return _affine(flow, numbers, [0.0])
        if op == "RealDiv" and 0.0 not in numbers:
            return _affine(flow, [1 / each for each in numbers], [0.0])
        if op in ("BiasAdd", "Add", "AddV2", "Sub"):
            return _affine(flow, [1.0], [-each if op == "Sub" else each for each in numbers])
        raise UnsupportedGraphError

    def _is_bias(self, weight: Path, bias: Path) -> bool:
        one, two = self.tree.get(weight), self.tree.get(bias)
        if not isinstance(one, Leaf) or not isinstance(two, Leaf):
            return False
        return len(two.shape) == 1 and two.shape == one.shape[-1:]

    def _numbers(self, value: Any) -> list[float]:
        if isinstance(value, list):
            return value
        leaf = self.tree.get(value.path) if isinstance(value, VariableReference) else None
        if not isinstance(leaf, Leaf) or len(leaf.shape) > 1 or sum(leaf.shape) > _NUMBERS:
            raise UnsupportedGraphError
        return [float(number) for number in leaf.array().astype("float64").reshape(-1)]


def _require_flow(value: Any) -> _GraphFlow:
    if not isinstance(value, _GraphFlow):
        raise UnsupportedGraphError
    return value


def _match_swish(op: str, one: _GraphFlow, two: _GraphFlow) -> _GraphFlow:
    """Return `x * sigmoid(x)` as the SiLU activation."""
    for before, after in ((one, two), (two, one)):
        sigmoid = before.then("activation", "sigmoid")
        if op == "Mul" and after.steps == sigmoid.steps:
            return before.then("activation", "silu")
    raise UnsupportedGraphError


def _affine(flow: _GraphFlow, scale: list[float], offset: list[float]) -> _GraphFlow:
    """Return `flow * scale + offset`, merged with a preceding affine map."""
    steps = flow.steps
    if steps and steps[-1].kind == "affine":
        before, shift = steps[-1].value
        size = max(map(len, (before, shift, scale, offset)))
        if any(len(each) not in (1, size) for each in (before, shift, scale, offset)):
            raise UnsupportedGraphError
        before, shift, scale, offset = (
            list(each) * (size // len(each)) for each in (before, shift, scale, offset)
        )
        offset = [s * b + o for s, b, o in zip(scale, shift, offset, strict=True)]
        scale = [s * b for s, b in zip(scale, before, strict=True)]
        steps = steps[:-1]
    if all(each == 1.0 for each in scale) and all(each == 0.0 for each in offset):
        return _GraphFlow(steps)
    return _GraphFlow(steps).then("affine", (scale, offset))


def _read_small_constant(value: memoryview) -> list[float]:
    """Return the numbers of a small constant tensor of float32 or int32."""
    fields = read_constant_fields(value, 8 * _NUMBERS)
    if fields is None or fields.dtype not in (_FLOAT, _INT32):
        raise UnsupportedGraphError
    form = "i" if fields.dtype == _INT32 else "f"
    found = [*fields.numbers, *struct.unpack(f"<{len(fields.content) // 4}{form}", fields.content)]
    if not found:
        raise UnsupportedGraphError
    return [float(each) for each in found]


def find_activations(checkpoint: Checkpoint) -> frozenset[str]:
    """Return the activations among a SavedModel's operations, none for other formats.

    Operations of OTHER_FUNCTIONS keep their names.
    """
    file = next((f for f in checkpoint.files if f.path.endswith(f"/{tf_saved_model.GRAPH}")), None)
    if checkpoint.format != tf_saved_model.NAME or file is None or file.size > limits.current().graph_bytes:
        return frozenset()
    meter = FieldMeter()
    try:
        graphs = tf_saved_model_messages.parse_saved_model(memoryview(file.read(0, file.size)), meter)
        libraries = [read_functions(graph.nodes, meter) for graph in graphs if graph.nodes is not None]
    except FAILURES:
        return frozenset()
    nodes = (n for library in libraries for function in library.values() for n in function.nodes.values())
    every = {node.op for node in nodes}
    known = {name for op, name in ACTIVATION_OPERATIONS.items() if op in every}
    return frozenset(known | (every & OTHER_FUNCTIONS))
