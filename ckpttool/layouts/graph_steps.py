"""Follows a SavedModel's serving function, a graph of operations, to the steps that a policy computes.

Sources: tensorflow/core/framework/graph.proto, function.proto, node_def.proto, attr_value.proto and
tensor.proto. Nothing is executed; a function that is not one chain of known operations is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpttool import limits
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, UnsupportedError
from ckpttool.formats import saved_model
from ckpttool.formats.saved_model import join, messages, objects
from ckpttool.formats.saved_model.messages import Meter
from ckpttool.layouts.model_steps import Step, Weights
from ckpttool.leaf import Leaf, Path
from ckpttool.tree import Tree
from ckpttool.wire import protobuf

_TEXT = protobuf.DELIMITED
# FunctionDef: signature, node_def, ret, arg_attr. OpDef: name, input_arg, output_arg. NodeDef: name, op,
# input, attr.
_FUNCTION = {1: _TEXT, 3: _TEXT, 4: _TEXT, 7: _TEXT}
_SIGNATURE, _NODE = {1: _TEXT, 2: _TEXT, 3: _TEXT}, {1: _TEXT, 2: _TEXT, 3: _TEXT, 5: _TEXT}
# AttrValue: f, b, tensor, func.
_VALUE = {4: protobuf.WORD, 5: protobuf.NUMBER, 8: _TEXT, 10: _TEXT}
# TensorProto: dtype, tensor_content, float_val, int_val.
_TENSOR = {1: protobuf.NUMBER, 4: _TEXT, 5: protobuf.WORDS, 7: protobuf.NUMBERS}
_FLOAT, _INT32 = 1, 3
_ACTIVATIONS = {"Relu": "relu", "Tanh": "tanh", "Sigmoid": "sigmoid", "Elu": "elu", "Softplus": "softplus"}
_SAME = frozenset(("Identity", "StopGradient", "ReadVariableOp"))
_NODES, _DEEP, _NUMBERS = 20_000, 20, 4096


class UnknownError(Exception):
    """The graph does something that is not followed."""


FAILURES = (UnknownError, CkpttoolError, RecursionError, struct.error)


class Variable(NamedTuple):
    """A variable, or its value, by the path of its leaf."""

    path: Path


class Node(NamedTuple):
    """One operation: its inputs' names and its attributes, not decoded."""

    op: str
    inputs: tuple[str, ...]
    attributes: Mapping[str, memoryview]


@dataclass(frozen=True, slots=True)
class _Flow:
    """What the input has become: the steps up to here."""

    steps: tuple[Step, ...] = ()

    def then(self, kind: str, value: Any = None) -> _Flow:
        return _Flow((*self.steps, Step(kind, (f"step {len(self.steps)}",), value)))


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the graph's library."""

    arguments: tuple[str, ...]
    nodes: Mapping[str, Node]
    results: tuple[str, ...]
    shapes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """the arguments' shapes, as far as the graph records them; an extent of -1 is not fixed"""


class Serving(NamedTuple):
    """The function that a SavedModel serves: what it captures, by numbers of objects, and its graph."""

    function: Function
    captures: tuple[int, ...]
    variables: Mapping[int, Path]
    functions: Mapping[str, Function]
    signature: messages.Signature | None
    graph: messages.MetaGraph


def serving(checkpoint: Checkpoint, meter: Meter) -> Serving | None:
    """Return what a SavedModel serves of one input, None if the checkpoint serves nothing.

    Raise UnknownError for several functions or inputs.
    """
    file = next((f for f in checkpoint.files if f.path.endswith(f"/{saved_model.GRAPH}")), None)
    if checkpoint.format != saved_model.NAME or file is None:
        return None
    if file.size > limits.current().graph_bytes:
        raise UnknownError
    graphs = messages.parse(memoryview(file.read(0, file.size)), meter)
    if len(graphs) != 1 or graphs[0].objects is None or graphs[0].nodes is None:
        raise UnknownError
    found = objects.parse(graphs[0].objects, meter)
    signatures = dict(join.signatures(found))
    if not signatures:
        return None
    name = "serving_default" if "serving_default" in signatures else next(iter(signatures))
    if len(signatures) > 1 and name != "serving_default":
        raise UnknownError
    functions = library(graphs[0].nodes, meter)
    function, captures = functions.get(signatures[name]), found.captures.get(signatures[name], ())
    if function is None or len(function.arguments) != len(captures) + 1:
        raise UnknownError
    variables = join.by_objects(checkpoint.tree, found).numbers
    return Serving(function, captures, variables, functions, graphs[0].signatures.get(name), graphs[0])


def of_saved_model(checkpoint: Checkpoint) -> tuple[Step, ...] | None:
    """Return the steps of a SavedModel's serving function, None if the checkpoint has none.

    Raise UnsupportedError for one that cannot be followed: it may compute anything of its layers.
    """
    try:
        served = serving(checkpoint, Meter())
        if served is None:
            return None
        reader = Reader(checkpoint.tree, served.functions)
        captured = [Variable(served.variables[n]) if n in served.variables else None for n in served.captures]
        (result,) = reader.call(served.function, [_Flow(), *captured])
        return _flow(result).steps
    except FAILURES as error:
        raise unfollowed(checkpoint, error) from None


def serves(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint is a SavedModel with a serving function, damaged ones included."""
    try:
        return serving(checkpoint, Meter()) is not None
    except FAILURES:
        return True


def unfollowed(checkpoint: Checkpoint, error: Exception) -> UnsupportedError:
    """Return the error for a graph that cannot be followed."""
    return UnsupportedError(
        "the SavedModel's graph computes something that is not known here",
        file=checkpoint.path,
        found=(str(error) if isinstance(error, UnknownError) else "") or None,
    )


def library(graph: memoryview, meter: Meter) -> dict[str, Function]:
    """Return the graph's functions by name: GraphDef.library (2), FunctionDefLibrary.function (1)."""
    found = {}
    for held in messages.of_number(2, graph, meter):
        for function in messages.of_number(1, held, meter):
            name, made = _function(function, meter)
            found[name] = made
    return found


def _function(data: memoryview, meter: Meter) -> tuple[str, Function]:
    name, arguments, outputs, nodes, results = "", list[str](), list[str](), {}, {}
    shapes: dict[int, tuple[int, ...]] = {}
    for number, value in meter.fields(data, _FUNCTION):
        inner = protobuf.message(value)
        if number == 1:
            for part, what in meter.fields(inner, _SIGNATURE):
                if part == 1:
                    name = protobuf.text(what)
                else:
                    listed = arguments if part == 2 else outputs
                    listed += [
                        protobuf.text(text) for _, text in meter.fields(protobuf.message(what), {1: _TEXT})
                    ]
        elif number == 3:
            title, node = node_of(inner, meter)
            nodes[title] = node
        elif number == 7:
            shapes |= _argument(inner, meter)
        else:
            key, text = _pair(inner, meter)
            results[key] = text
    order = [results[key] for key in outputs] if results.keys() == set(outputs) else [*results.values()]
    return name, Function(tuple(arguments), nodes, tuple(order), shapes)


def _argument(data: memoryview, meter: Meter) -> dict[int, tuple[int, ...]]:
    """Return an argument's shape by its number: its attribute `_output_shapes`, a list of one."""
    place, found = 0, list[tuple[int, ...] | None]()
    for number, value in meter.fields(data, {1: protobuf.NUMBER, 2: _TEXT}):
        if number == 1:
            place = protobuf.int32(value)
            continue
        for _, each in meter.fields(protobuf.message(value), {1: _TEXT}):
            name, inner = messages.entry(each, meter)
            for _, listed in meter.fields(inner, {1: _TEXT}) if name == "_output_shapes" else ():
                shapes = meter.fields(protobuf.message(listed), {7: _TEXT})
                found += [messages.partial_shape(protobuf.message(each), meter) for _, each in shapes]
    return {place: found[0]} if len(found) == 1 and found[0] is not None else {}


def _pair(data: memoryview, meter: Meter) -> tuple[str, str]:
    found = {number: protobuf.text(value) for number, value in meter.fields(data, {1: _TEXT, 2: _TEXT})}
    return found.get(1, ""), found.get(2, "")


def node_of(data: memoryview, meter: Meter) -> tuple[str, Node]:
    """Return a NodeDef's name, and the node."""
    name = op = ""
    inputs: list[str] = []
    attributes: dict[str, memoryview] = {}
    for number, value in meter.fields(data, _NODE):
        if number == 5:
            key, inner = messages.entry(value, meter)
            attributes[key] = inner
        elif number == 1:
            name = protobuf.text(value)
        elif number == 2:
            op = protobuf.text(value)
        else:
            inputs.append(protobuf.text(value))
    data_inputs = tuple(each for each in inputs if not each.startswith("^"))
    return name, Node(op, data_inputs, attributes)


@dataclass
class Reader:
    """Evaluates functions on one unknown input."""

    tree: Tree
    library: Mapping[str, Function]
    depth: int = 0
    visited: int = 0
    known: list[dict[str, Any]] = field(default_factory=list)

    def call(self, function: Function, given: Sequence[Any]) -> list[Any]:
        """Return what a function gives of its arguments' values."""
        if len(given) != len(function.arguments) or self.depth > _DEEP or len(function.results) != 1:
            raise UnknownError
        self.depth += 1
        scope = dict(zip(function.arguments, given, strict=True))
        found = [self._value(result, function, scope) for result in function.results]
        self.depth -= 1
        return found

    def _value(self, name: str, function: Function, scope: dict[str, Any]) -> Any:
        node, _, output = name.partition(":")
        if output and not output.endswith(":0"):
            raise UnknownError
        if node in scope:
            return scope[node]
        # In the order of use: a chain of thousands of nodes needs no recursion.
        waiting = [node]
        while waiting:
            top = waiting[-1]
            self.visited += 1
            found = function.nodes.get(top)
            if found is None or self.visited > _NODES or len(waiting) > _NODES:
                raise UnknownError
            names = [each.partition(":")[0] for each in found.inputs]
            missing = [each for each in names if each not in scope]
            if top in scope or not missing:
                waiting.pop()
                if top not in scope:
                    outputs = [each.partition(":")[2] for each in found.inputs]
                    if any(o and not o.endswith(":0") for o in outputs):
                        raise UnknownError
                    scope[top] = self._node(found, [scope[each] for each in names])
            else:
                waiting += missing
        return scope[node]

    def common(self, node: Node, given: list[Any]) -> tuple[Any] | None:
        """Return the value of a node that computes nothing itself, None for another one."""
        # Of several outputs only the first is ever taken.
        if (node.op in _SAME and len(given) == 1) or node.op == "IdentityN":
            return (given[0],)
        if node.op in ("PartitionedCall", "StatefulPartitionedCall"):
            function = self.library.get(called(node.attributes.get("f", memoryview(b""))))
            if function is None:
                raise UnknownError
            return (self.call(function, given)[0],)
        if node.op == "Const":
            return (self.constant(node.attributes.get("value", memoryview(b""))),)
        return None

    def constant(self, value: memoryview) -> Any:
        """Return the constant of a node's attribute."""
        return _constant(value)

    def _node(self, node: Node, given: list[Any]) -> Any:
        common = self.common(node, given)
        if common is not None:
            return common[0]
        if node.op in _ACTIVATIONS and len(given) == 1:
            return _flow(given[0]).then("activation", _ACTIVATIONS[node.op])
        if node.op == "MatMul":
            return self._product(node, given)
        if node.op in ("BiasAdd", "Add", "AddV2", "Sub", "Mul", "RealDiv") and len(given) == 2:
            return self._arithmetic(node.op, *given)
        raise UnknownError(node.op)

    def _product(self, node: Node, given: list[Any]) -> _Flow:
        turned = any(truth(node.attributes.get(f"transpose_{side}")) for side in "ab")
        if turned or len(given) != 2 or not isinstance(given[1], Variable):
            raise UnknownError
        return _flow(given[0]).then("dense", Weights(given[1].path, None))

    def _arithmetic(self, op: str, one: Any, two: Any) -> _Flow:
        if isinstance(two, _Flow) and not isinstance(one, _Flow) and op in ("Add", "AddV2", "Mul"):
            one, two = two, one
        flow = _flow(one)
        if isinstance(two, _Flow):
            return _swish(op, flow, two)
        last = flow.steps[-1] if flow.steps else None
        if op in ("BiasAdd", "Add", "AddV2") and isinstance(two, Variable):
            bare = last is not None and isinstance(last.value, Weights) and last.value.bias is None
            if last is None or not bare or not self._is_bias(last.value.weight, two.path):
                raise UnknownError
            return _Flow(flow.steps[:-1]).then("dense", last.value._replace(bias=two.path))
        numbers = self._numbers(two)
        if op == "Mul":
            return _affine(flow, numbers, [0.0])
        if op == "RealDiv" and 0.0 not in numbers:
            return _affine(flow, [1 / each for each in numbers], [0.0])
        if op in ("BiasAdd", "Add", "AddV2", "Sub"):
            return _affine(flow, [1.0], [-each if op == "Sub" else each for each in numbers])
        raise UnknownError

    def _is_bias(self, weight: Path, bias: Path) -> bool:
        one, two = self.tree.get(weight), self.tree.get(bias)
        if not isinstance(one, Leaf) or not isinstance(two, Leaf):
            return False
        return len(two.shape) == 1 and two.shape == one.shape[-1:]

    def _numbers(self, value: Any) -> list[float]:
        if isinstance(value, list):
            return value
        leaf = self.tree.get(value.path) if isinstance(value, Variable) else None
        if not isinstance(leaf, Leaf) or len(leaf.shape) > 1 or sum(leaf.shape) > _NUMBERS:
            raise UnknownError
        return [float(number) for number in leaf.array().astype("float64").reshape(-1)]


def _flow(value: Any) -> _Flow:
    if not isinstance(value, _Flow):
        raise UnknownError
    return value


def _swish(op: str, one: _Flow, two: _Flow) -> _Flow:
    """Return `x * sigmoid(x)` as the activation that it is."""
    for before, after in ((one, two), (two, one)):
        sigmoid = before.then("activation", "sigmoid")
        if op == "Mul" and after.steps == sigmoid.steps:
            return before.then("activation", "silu")
    raise UnknownError


def _affine(flow: _Flow, scale: list[float], offset: list[float]) -> _Flow:
    """Return `flow * scale + offset`, one step with an affine map before it."""
    steps = flow.steps
    if steps and steps[-1].kind == "affine":
        before, shift = steps[-1].value
        size = max(map(len, (before, shift, scale, offset)))
        if any(len(each) not in (1, size) for each in (before, shift, scale, offset)):
            raise UnknownError
        before, shift, scale, offset = (
            list(each) * (size // len(each)) for each in (before, shift, scale, offset)
        )
        offset = [s * b + o for s, b, o in zip(scale, shift, offset, strict=True)]
        scale = [s * b for s, b in zip(scale, before, strict=True)]
        steps = steps[:-1]
    if all(each == 1.0 for each in scale) and all(each == 0.0 for each in offset):
        return _Flow(steps)
    return _Flow(steps).then("affine", (scale, offset))


def truth(value: memoryview | None) -> bool:
    """Say whether an attribute is true."""
    return value is not None and any(protobuf.number(v) for n, v in protobuf.fields(value, _VALUE) if n == 5)


def called(value: memoryview) -> str:
    """Return the name of the function that an attribute names."""
    for number, inner in protobuf.fields(value, _VALUE):
        if number == 10:
            for _, text in protobuf.fields(protobuf.message(inner), {1: _TEXT}):
                return protobuf.text(text)
    return ""


def _constant(value: memoryview) -> list[float]:
    """Return the numbers of a small constant tensor of float32 or int32."""
    tensor = next((protobuf.message(v) for n, v in protobuf.fields(value, _VALUE) if n == 8), None)
    if tensor is None or len(tensor) > 8 * _NUMBERS:
        raise UnknownError
    dtype, found = 0, list[float]()
    for number, part in protobuf.fields(tensor, _TENSOR):
        if number == 1:
            dtype = protobuf.int32(part)
        elif number == 7:
            found += [float(each) for each in protobuf.numbers(part)]
        else:
            data = part.to_bytes(4, "little") if isinstance(part, int) else bytes(part)
            form = "i" if number == 4 and dtype == _INT32 else "f"
            found += struct.unpack(f"<{len(data) // 4}{form}", data)
    if dtype not in (_FLOAT, _INT32) or not found:
        raise UnknownError
    return found


def activations(checkpoint: Checkpoint) -> frozenset[str]:
    """Return the activations among the operations of a SavedModel's functions, none for other formats."""
    file = next((f for f in checkpoint.files if f.path.endswith(f"/{saved_model.GRAPH}")), None)
    if checkpoint.format != saved_model.NAME or file is None or file.size > limits.current().graph_bytes:
        return frozenset()
    meter = Meter()
    try:
        graphs = messages.parse(memoryview(file.read(0, file.size)), meter)
        libraries = [library(graph.nodes, meter) for graph in graphs if graph.nodes is not None]
    except (UnknownError, CkpttoolError, RecursionError, struct.error):
        return frozenset()
    nodes = (n for library in libraries for function in library.values() for n in function.nodes.values())
    return frozenset(_ACTIVATIONS[node.op] for node in nodes if node.op in _ACTIVATIONS)
