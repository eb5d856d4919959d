"""Graphs of SavedModels: the functions or nodes behind a signature, in inference.

TensorFlow 2 stores a function per signature, whose captured variables are objects; TensorFlow 1 names
tensors of the graph. Functions are inlined; `If` and `While` become ONNX's. Images with channels last are
transposed before and after the operators that need channels first. Constants of the file are values of the
program, variables are leaves of the tree.

Sources: tensorflow/core/ops/*.cc (operations and attributes), tensorflow/core/framework/*.proto,
tensorflow/core/kernels (padding: conv_grad_shape_utils.cc, strided_slice_op), api_def (meaning).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from ckpttool.core import limits
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import CkpttoolError, FormatError, UnsupportedError
from ckpttool.core.tree import Leaf, Path, Tree
from ckpttool.formats import tf_saved_model, tf_saved_model_messages
from ckpttool.formats.tf_functions import (
    FunctionNode,
    GraphFunction,
    constant_array,
    get_attribute,
    get_function_name,
    parse_node,
    read_constant_fields,
    read_functions,
)
from ckpttool.formats.tf_saved_model_messages import FieldMeter, MetaGraph, type_name
from ckpttool.graphs.builder import FUNCTION_NODES, ActivationNodes, GraphBuilder, body
from ckpttool.graphs.graph import Graph, OpaqueError, OperatorNode, Value, require
from ckpttool.graphs.operators import (
    COMBINATIONS,
    Operator,
    compute_node,
    find_operator,
    operator_kind,
    spelled_operators,
)
from ckpttool.mapping.rules import KEEP, Permute, Reshape, Rule, chain_rules

_DEFAULT = "serving_default"
_DEEPEST, _MOST_VISITS = 40, 200_000
# Entries of values that are computed while the graph is read: axes, shapes, positions.
_SMALL = 4096
VARIABLES = frozenset(("VarHandleOp", "VariableV2", "Variable"))
CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))
_LARGEST = (1 << 63) - 1
# What an operation with other inputs or attributes than expected raises.
_UNEXPECTED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
# Operators whose result may be much larger than their inputs.
_GROWING = frozenset(("Expand", "Tile", "Pad", "OneHot", "Resize", "Einsum", "MatMul"))


class TensorName(NamedTuple):
    """A tensor of the graph by name, with its type; None if unknown."""

    name: str
    dtype: str | None


class TensorList(NamedTuple):
    """A list of the rows of a tensor; or, with `length`, one whose rows a loop sets.

    `writes` is what the body of a loop sets in it: position and row.
    """

    rows: TensorName | None
    length: TensorName | None = None
    writes: tuple[TensorName, TensorName] | None = None


class VariableName(NamedTuple):
    """A variable, by the path of its leaf."""

    path: Path


def read(checkpoint: Checkpoint, signature: str | None = None) -> Graph | None:
    """Return the graph of a SavedModel's signature, None if it has no signature.

    Without a name it is `serving_default`, otherwise the only one. Raise UnsupportedError for a signature
    that does not exist, and for several if none of them is `serving_default`.
    """
    meter = FieldMeter()
    graphs = _stored_graphs(checkpoint, meter)
    if not graphs:
        return None
    if len(graphs) != 1:
        raise UnsupportedError(
            "the SavedModel has several graphs", file=checkpoint.path, expected="1", found=str(len(graphs))
        )
    (graph,) = graphs
    if graph.nodes is None:
        return None
    try:
        if graph.objects is not None:
            return _read_functions(checkpoint, graph, meter, signature)
        return _read_nodes(checkpoint, graph, meter, signature)
    except OpaqueError as error:
        raise UnsupportedError(
            "an output of the signature is not a tensor", file=checkpoint.path, found=str(error)
        ) from None
    except CkpttoolError as error:
        raise error.located(file=checkpoint.path) from error.__cause__


def _stored_graphs(checkpoint: Checkpoint, meter: FieldMeter) -> list[MetaGraph]:
    """Return the graphs of a SavedModel, none for a folder without them."""
    file = next((file for file in checkpoint.files if file.path.endswith(f"/{tf_saved_model.GRAPH}")), None)
    if file is None:
        return []
    if file.size > limits.current().graph_bytes:
        raise limits.limit_error("graph_bytes", "the graph is too large", file.size)
    return tf_saved_model_messages.parse_saved_model(memoryview(file.read(0, file.size)), meter)


def read_each(checkpoint: Checkpoint) -> Iterator[Graph | None]:
    """Yield the graph of each signature of TensorFlow 2's graphs, None for one that cannot be read.

    Of a graph without signatures these are the functions that capture variables.
    """
    meter = FieldMeter()
    for graph in _stored_graphs(checkpoint, meter):
        if graph.nodes is None or graph.objects is None:
            continue
        stored = _StoredFunctions.parse(checkpoint, graph, meter)
        names: Mapping[str, str] = stored.signatures
        names = names or {name: name for name, captures in stored.captures.items() if captures}
        for title, name in names.items():
            try:
                yield stored.read(checkpoint, name, graph.signatures.get(title))
            except (CkpttoolError, OpaqueError, *_UNEXPECTED):
                yield None


def _chosen(names: Sequence[str], requested: str | None) -> str | None:
    """Return the signature to read, None if there is none."""
    if requested is not None and requested not in names:
        raise UnsupportedError(
            "the SavedModel does not have the signature", expected=", ".join(names), found=requested
        )
    if requested is not None:
        return requested
    listed = [name for name in names if name not in ("__saved_model_init_op", "__saved_model_train_op")]
    if _DEFAULT in listed or len(listed) <= 1:
        return _DEFAULT if _DEFAULT in listed else next(iter(listed), None)
    raise UnsupportedError("the SavedModel has several signatures", found=", ".join(sorted(listed)))


def _read_functions(
    checkpoint: Checkpoint, graph: MetaGraph, meter: FieldMeter, signature: str | None
) -> Graph | None:
    stored = _StoredFunctions.parse(checkpoint, graph, meter)
    chosen = _chosen([*stored.signatures], signature)
    if chosen is None:
        return None
    return stored.read(checkpoint, stored.signatures[chosen], graph.signatures.get(chosen))


class _StoredFunctions(NamedTuple):
    """The functions of a graph: signatures and captures by function, leaves and constants by object.

    `outer` are the nodes around the functions, which captured constants are.
    """

    library: Mapping[str, GraphFunction]
    signatures: Mapping[str, str]
    captures: Mapping[str, Sequence[int]]
    paths: Mapping[int, Path]
    constants: Mapping[int, str]
    outer: Mapping[str, FunctionNode]

    @classmethod
    def parse(cls, checkpoint: Checkpoint, graph: MetaGraph, meter: FieldMeter) -> _StoredFunctions:
        objects = tf_saved_model_messages.parse_object_graph(graph.objects or memoryview(b""), meter)
        nodes = graph.nodes or memoryview(b"")
        # Constants that functions capture are nodes of the graph around them.
        data = nodes if objects.constants else memoryview(b"")
        return cls(
            read_functions(nodes, meter),
            dict(tf_saved_model.iter_signatures(objects)),
            objects.captures,
            tf_saved_model.facts_by_objects(checkpoint.tree, objects).numbers,
            objects.constants,
            dict(parse_node(node, meter) for node in tf_saved_model_messages.iter_field(1, data, meter)),
        )

    def read(
        self, checkpoint: Checkpoint, name: str, info: tf_saved_model_messages.Signature | None
    ) -> Graph:
        """Return the graph of a function; `info` describes its inputs and outputs."""
        function, captures = self.library.get(name), self.captures.get(name, ())
        if function is None or len(function.arguments) < len(captures):
            raise FormatError("the function of a signature is not in the graph", found=name)
        writes = any(map(_is_write, _reachable_operations(function, self.library)))
        translator = FunctionTranslator(self.library, checkpoint.tree, writes=writes)
        arguments: list[Any] = []
        inputs = []
        for index, title in enumerate(function.arguments[: len(function.arguments) - len(captures)]):
            tensor = info.inputs.get(title) if info is not None else None
            inputs.append(translator.add_input(title, tensor, function.shapes.get(index)))
            arguments.append(TensorName(inputs[-1].name, inputs[-1].dtype))
        for capture in captures:
            if capture in self.constants:
                arguments.append(_captured_constant(translator, self.outer.get(self.constants[capture])))
            else:
                arguments.append(VariableName(self.paths[capture]) if capture in self.paths else None)
        results = translator.call(function, arguments)
        titles = [f"output_{n}" if n else "output" for n in range(len(results))]
        for title, tensor in (info.outputs if info is not None else {}).items():
            number = bytes(tensor.names[0]).rpartition(b":")[2] if tensor.names else b""
            if number.isdigit() and int(number) < len(titles):
                titles[int(number)] = title
        return translator.graph(inputs, dict(zip(titles, results, strict=True)))


def _captured_constant(translator: FunctionTranslator, node: FunctionNode | None) -> TensorName | None:
    """Return a constant that a function captures, None if it has no numbers."""
    try:
        return None if node is None or node.op != "Const" else _constant(translator, node, [])
    except OpaqueError:
        return None


def _read_nodes(
    checkpoint: Checkpoint, graph: MetaGraph, meter: FieldMeter, requested: str | None
) -> Graph | None:
    """Return the graph of a signature of TensorFlow 1, which names tensors of the graph."""
    chosen = _chosen([*graph.signatures], requested)
    if chosen is None:
        return None
    return StoredNodes.parse(checkpoint, graph, meter).read(checkpoint, graph.signatures[chosen])


class StoredNodes(NamedTuple):
    """The nodes of a graph of TensorFlow 1, by name, and the paths of its variables that are stored."""

    nodes: Mapping[str, FunctionNode]
    stored: tf_saved_model_messages.GraphNodes
    library: Mapping[str, GraphFunction]
    variables: Mapping[str, Path]

    @classmethod
    def parse(cls, checkpoint: Checkpoint, graph: MetaGraph, meter: FieldMeter) -> StoredNodes:
        """Decode the nodes, and find the checkpoint's variables among them."""
        data = graph.nodes or memoryview(b"")
        nodes = dict(parse_node(node, meter) for node in tf_saved_model_messages.iter_field(1, data, meter))
        stored = tf_saved_model_messages.parse_graph_def(data, meter)
        facts = tf_saved_model.facts_by_nodes(checkpoint.tree, graph, stored)
        variables = {fact.name: path for path, fact in facts.variables.items()}
        return cls(nodes, stored, read_functions(data, meter), variables)

    def read(self, checkpoint: Checkpoint, signature: tf_saved_model_messages.Signature) -> Graph:
        """Return what is computed between tensors; `signature` names these."""
        outputs = [name for tensor in signature.outputs.values() for name in tensor.names]
        writes = any(map(_is_write, _executed_operations(self.stored, outputs)))
        writes |= any(
            _is_write(op)
            for function in self.library.values()
            for op in _reachable_operations(function, self.library)
        )
        translator = FunctionTranslator(
            self.library, checkpoint.tree, variables=self.variables, writes=writes
        )
        results = tuple(_reference(output) for output in signature.outputs.values())
        scope: dict[str, list[Any]] = {}
        inputs = []
        for title, tensor in signature.inputs.items():
            inputs.append(translator.add_input(title, tensor))
            node, _, number = _reference(tensor).partition(":")
            if int(number or 0):
                raise UnsupportedError("an input that is a further output of a node", found=title)
            scope[node] = [TensorName(inputs[-1].name, inputs[-1].dtype)]
        # Before the values of operations get names: a node may have the name of an operator (Neg).
        names = [translator.build.unique_name(title) for title in signature.outputs]
        values = translator.results(GraphFunction((), self.nodes, results), scope)
        return translator.graph(inputs, dict(zip(names, values, strict=True)), reserved=True)


def _is_write(op: str) -> bool:
    """Return whether an operation changes a variable."""
    changes = (
        "Assign",
        "ResourceApply",
        "ResourceSparseApply",
        "ResourceScatter",
        "ResourceStridedSliceAssign",
    )
    return op.startswith(changes) or (op.startswith("Scatter") and op != "ScatterNd")


def _reachable_operations(function: GraphFunction, library: Mapping[str, GraphFunction]) -> Iterator[str]:
    """Yield the operations of a function and those it calls; all that have an effect are executed."""
    waiting, visited = [function], set[str]()
    while waiting:
        for node in waiting.pop().nodes.values():
            yield node.op
            for attribute in ("f", "then_branch", "else_branch", "body", "cond"):
                name = get_function_name(node.attributes.get(attribute, memoryview(b"")))
                if name in library and name not in visited:
                    visited.add(name)
                    waiting.append(library[name])


def _executed_operations(
    graph: tf_saved_model_messages.GraphNodes, outputs: Sequence[bytes]
) -> Iterator[str]:
    """Yield the operations before outputs, also those that only have to be executed first."""
    waiting, visited = [tf_saved_model_messages.node_name(output) for output in outputs], set[bytes]()
    while waiting:
        name = waiting.pop()
        node = graph.nodes.get(name)
        if node is None or name in visited:
            continue
        visited.add(name)
        yield node.op.decode("utf-8", "replace")
        waiting += [tf_saved_model_messages.node_name(input_) for input_ in node.inputs]


def _reference(tensor: tf_saved_model_messages.TensorInfo) -> str:
    if len(tensor.names) != 1:
        raise UnsupportedError("a sparse or composite tensor of a signature", found=str(len(tensor.names)))
    return tensor.names[0].decode("utf-8", "replace")


# Output arguments of operations that have several: the position of each.
_OUTPUTS = {"TopKV2": {"values": 0, "indices": 1}}
# Outputs of a norm besides the image, which have no value in inference.
_STATISTICS = ("batch_mean", "batch_variance", "reserve_space_1", "reserve_space_2", "reserve_space_3")


@dataclass
class FunctionTranslator:
    """Translates functions; `variables` are the paths of TensorFlow 1's variables by name.

    With `writes`, variables may be changed before they are read, so that their values are unknown.
    """

    library: Mapping[str, GraphFunction]
    tree: Tree
    variables: Mapping[str, Path] = field(default_factory=dict)
    build: GraphBuilder = field(default_factory=GraphBuilder)
    writes: bool = False
    known: dict[str, np.ndarray] = field(default_factory=dict)
    channels: dict[str, int] = field(default_factory=dict)
    used: dict[int, dict[str, dict[str, None]]] = field(default_factory=dict)
    depth: int = 0
    visits: int = 0

    # Graph.

    def add_input(
        self,
        title: str,
        tensor: tf_saved_model_messages.TensorInfo | None,
        recorded: Sequence[int] | None = None,
    ) -> Value:
        """Return a new input of the graph; `recorded` is the shape of an argument that no signature names."""
        shape = recorded if tensor is None or tensor.shape is None else tensor.shape
        extents = None if shape is None else tuple(extent if extent >= 0 else "" for extent in shape)
        name = self.build.unique_name(title)
        if shape and shape[-1] > 0:
            self.channels[name] = shape[-1]
        return Value(name, None if tensor is None else tensor.dtype, extents)

    def graph(self, inputs: Sequence[Value], results: Mapping[str, Any], *, reserved: bool = False) -> Graph:
        """Return the graph with these outputs; `reserved` names no other value has."""
        outputs = []
        self.build.scope, self.build.location = (), ""
        for title, value in results.items():
            tensor = self.tensor(value)
            name = title if reserved else self.build.unique_name(title)
            outputs.append(Value(name, tensor.dtype))
            self.build.nodes.append(OperatorNode("Identity", (tensor.name,), (name,), {}))
        return self.build.graph(inputs, outputs)

    # Functions.

    def call(self, function: GraphFunction, arguments: Sequence[Any]) -> list[Any]:
        """Return the results of a function."""
        if len(arguments) != len(function.arguments):
            raise FormatError(
                "a function is called with another number of arguments", found=str(len(arguments))
            )
        scope = {name: [value] for name, value in zip(function.arguments, arguments, strict=True)}
        return self.results(function, scope)

    def results(self, function: GraphFunction, scope: dict[str, list[Any]]) -> list[Any]:
        """Return the results of a function for the values of its arguments."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise UnsupportedError("the functions of the graph are nested too deeply", found=str(self.depth))
        try:
            for reference in function.results:
                self._compute(reference.partition(":")[0], function, scope)
        finally:
            self.depth -= 1
        return [self._output(reference, function, scope) for reference in function.results]

    def _compute(self, target: str, function: GraphFunction, scope: dict[str, list[Any]]) -> None:
        """Translate a node and those that it needs, without recursion."""
        waiting = [] if target in scope else [target]
        while waiting:
            self.visits += 1
            if self.visits > _MOST_VISITS or len(waiting) > _MOST_VISITS:
                raise UnsupportedError("the graph has too many nodes or a cycle", found=target)
            name = waiting[-1]
            node = function.nodes.get(name)
            if node is None:
                raise FormatError("a node of the graph uses one that does not exist", found=repr(name[:200]))
            missing = [n for input_ in node.inputs if (n := input_.partition(":")[0]) not in scope]
            if name not in scope and missing:
                waiting += missing
                continue
            waiting.pop()
            if name not in scope:
                inputs = [self._output(input_, function, scope) for input_ in node.inputs]
                scope[name] = self._translate(name, node, inputs, function)

    def _output(self, reference: str, function: GraphFunction, scope: Mapping[str, list[Any]]) -> Any:
        """Return the value of `node`, `node:number` or `node:output:number`."""
        name, *rest = reference.split(":")
        number = int(rest[-1]) if rest and rest[-1].isdigit() else 0
        node = function.nodes.get(name)
        if len(rest) == 2 and rest[0] in _STATISTICS:
            return None
        if len(rest) == 2 and node is not None:
            number += _OUTPUTS.get(node.op, {}).get(rest[0], 0)
        values: Any = scope[name]
        if isinstance(values, dict):
            return values.get(":".join(rest))
        return values[number] if number < len(values) else None

    def _translate(self, name: str, node: FunctionNode, inputs: list[Any], function: GraphFunction) -> Any:
        """Return the outputs of a node; of an opaque one, those that are used."""
        before = (self.build.scope, self.build.title, self.build.location)
        scope, _, _ = name.rpartition("/")
        self.build.scope, self.build.title = tuple(filter(None, scope.split("/"))), name
        self.build.location = f"node {name}"
        count = len(self.build.nodes)
        try:
            outputs = self._apply(name, node, inputs)
            return outputs if isinstance(outputs, list) else [outputs]
        except (OpaqueError, *_UNEXPECTED):
            del self.build.nodes[count:]
            ends = self._used_outputs(function).get(name, {})
            tensors = [input_.name for input_ in inputs if isinstance(input_, TensorName)]
            settings = {key: get_attribute(node, key) for key in node.attributes}
            plain = {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in settings.items()
                if value is not None and not key.startswith("_")
            }
            names = self.build.add(f"tf.raw_ops.{node.op}", tensors, max(1, len(ends)), **plain)
            return dict(zip(ends, (TensorName(name, None) for name in names), strict=False))
        finally:
            self.build.scope, self.build.title, self.build.location = before

    def _used_outputs(self, function: GraphFunction) -> Mapping[str, dict[str, None]]:
        """Return the outputs of each node that a function uses."""
        if id(function) not in self.used:
            references = [
                *function.results,
                *(input_ for node in function.nodes.values() for input_ in node.inputs),
            ]
            used = self.used[id(function)] = {}
            for name, _, end in (reference.partition(":") for reference in references):
                used.setdefault(name, {})[end] = None
        return self.used[id(function)]

    def _apply(self, name: str, node: FunctionNode, inputs: list[Any]) -> Any:
        if node.op in CALLS:
            return self.call(self.function(node, "f"), inputs)
        if node.op in VARIABLES:
            path = self.variables.get(name)
            if path is None:
                raise UnsupportedError("a variable of the graph is not stored", found=name)
            if node.op != "VarHandleOp" and self.writes:
                raise OpaqueError("a variable that is changed")
            return VariableName(path) if node.op == "VarHandleOp" else self.variable(path)
        operation = list_operations().get(node.op)
        if operation is None:
            raise OpaqueError(node.op)
        return operation(self, node, inputs)

    def function(self, node: FunctionNode, attribute: str) -> GraphFunction:
        """Return the function that a node's attribute names."""
        name = get_function_name(node.attributes.get(attribute, memoryview(b"")))
        if name not in self.library:
            raise FormatError("a node calls a function that does not exist", found=repr(name[:200]))
        return self.library[name]

    # Values.

    def tensor(self, value: Any) -> TensorName:
        """Return a value as a tensor; raise OpaqueError for a resource or an unknown value."""
        if not isinstance(value, TensorName):
            raise OpaqueError(type(value).__name__)
        return value

    def variable(self, path: Path, rule: Rule = KEEP) -> TensorName:
        """Return a variable's value."""
        leaf = self.tree.get(path)
        if not isinstance(leaf, Leaf):
            raise UnsupportedError(
                "a variable of the graph is listed but not read", found=self.tree.names[path]
            )
        return TensorName(self.build.stored(path, leaf, self.tree.names[path], rule), leaf.dtype)

    def stored_leaf(self, value: TensorName) -> tuple[Path, Leaf] | None:
        """Return the leaf that a tensor is, None for a computed one."""
        constant = self.build.constants.get(value.name)
        if constant is None or constant.path is None or constant.rule != KEEP:
            return None
        return (constant.path, constant.leaf) if isinstance(constant.leaf, Leaf) else None

    def constant(self, array: np.ndarray) -> TensorName:
        """Return a constant of the program."""
        dtype = array.dtype.name
        name = self.build.number(array, dtype)
        if array.size <= _SMALL:
            self.known[name] = array
        return TensorName(name, dtype)

    def ints(self, value: Any) -> list[int]:
        """Return numbers that do not depend on inputs."""
        array = self.known.get(self.tensor(value).name)
        if array is None or array.dtype.kind not in "iu":
            raise OpaqueError("numbers that depend on a tensor")
        return [int(number) for number in array.reshape(-1)]

    def int64(self, value: Any) -> TensorName:
        """Return numbers as int64: a shape, positions."""
        tensor = self.tensor(value)
        return tensor if tensor.dtype == "int64" else self.one("Cast", tensor, to="int64")

    def numbers(self, *values: int) -> TensorName:
        """Return a constant list of int64."""
        return self.constant(np.array(values, np.int64))

    def many(
        self, op: str, inputs: Sequence[TensorName | None], count: int, **settings: Any
    ) -> list[TensorName]:
        """Return the outputs of an operator, which are constants if its inputs are small constants."""
        names = ["" if input_ is None else input_.name for input_ in inputs]
        if names and op not in _GROWING and all(not name or name in self.known for name in names):
            arrays = [self.known[name] if name else None for name in names]
            node = OperatorNode(op, tuple(names), tuple(f"output_{n}" for n in range(count)), settings)
            return [self.constant(np.asarray(value)) for value in compute_node(node, arrays)[:count]]
        outputs = self.build.add(op, names, count, **settings)
        keeps = op in _CHANNELWISE or operator_kind(op) in COMBINATIONS
        if keeps and names[0] in self.channels:
            self.channels[outputs[0]] = self.channels[names[0]]
        dtype = (
            find_operator(op).result
            or settings.get("to")
            or next((input_.dtype for input_ in inputs if input_ is not None), None)
        )
        return [TensorName(name, dtype) for name in outputs]

    def one(self, op: str, *inputs: TensorName | None, **settings: Any) -> TensorName:
        """Return the output of an operator."""
        return self.many(op, inputs, 1, **settings)[0]


# Operators besides elementwise ones that keep the number of channels of an image, wherever its axis is.
_CHANNELWISE = frozenset(("Transpose", "Pad", "MaxPool", "AveragePool", "BatchNormalization", "Resize"))
_Operation = Callable[[FunctionTranslator, FunctionNode, list[Any]], Any]
_OPERATIONS: dict[str, _Operation] = {}


def _operation(*names: str) -> Callable[[_Operation], _Operation]:
    def add(handler: _Operation) -> _Operation:
        _OPERATIONS.update(dict.fromkeys(names, handler))
        return handler

    return add


@cache
def list_operations() -> Mapping[str, _Operation]:
    """Return the handlers of all operations that are translated, by name."""
    rows = spelled_operators("tensorflow").items()
    return {**{name: partial(_direct, row) for name, row in rows}, **_OPERATIONS}


def _direct(row: Operator, t: FunctionTranslator, _node: FunctionNode, inputs: list[Any]) -> TensorName:
    """Return the result of an operation that is one operator of the table."""
    require(row.spelling.inputs in (0, len(inputs)), "another number of tensors")
    tensors = [t.tensor(input_) for input_ in inputs]
    result = t.one(row.name, *tensors)
    return result._replace(dtype=tensors[1].dtype) if row.name == "Where" else result


_SAME = ("Identity", "StopGradient", "PreventGradient", "Snapshot", "EnsureShape", "CheckNumerics")


@_operation(*_SAME, "PlaceholderWithDefault", "DebugGradientIdentity")
def _same(_t: FunctionTranslator, _node: FunctionNode, inputs: list[Any]) -> Any:
    return inputs[0]


_operation("IdentityN")(lambda _t, _node, inputs: inputs)
_operation("NoOp", "Assert")(lambda _t, _node, _inputs: [])


@_operation("ReadVariableOp")
def _read_variable(t: FunctionTranslator, _node: FunctionNode, inputs: list[Any]) -> TensorName:
    require(isinstance(inputs[0], VariableName), "a resource that is not a variable")
    require(not t.writes, "a variable that is changed")
    return t.variable(inputs[0].path)


@_operation("Const")
def _constant(t: FunctionTranslator, node: FunctionNode, _inputs: list[Any]) -> TensorName:
    fields = read_constant_fields(node.attributes.get("value", memoryview(b"")), limits.current().graph_bytes)
    array = None if fields is None else constant_array(fields)
    if array is None:
        raise OpaqueError("a constant without numbers")
    return t.constant(array)


@_operation("Cast")
def _cast(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    target = type_name(get_attribute(node, "DstT") or 0)
    require(not get_attribute(node, "Truncate"), "a cast that truncates")
    return t.one("Cast", t.tensor(inputs[0]), to=target)


def _scalar(t: FunctionTranslator, value: float, like: TensorName) -> TensorName:
    require(like.dtype is not None, "an unknown type")
    from ckpttool.core import dtypes

    return t.constant(np.array(value).astype(dtypes.numpy_dtype(like.dtype or "float32")))


@_operation("LeakyRelu")
def _leaky_relu(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    # An attribute with its default value is omitted (tensorflow/core/ops/nn_ops.cc).
    slope = get_attribute(node, "alpha") if "alpha" in node.attributes else 0.2
    require(isinstance(slope, float), "a slope that is not a number")
    return t.one("LeakyRelu", t.tensor(inputs[0]), alpha=slope)


@_operation("FloorDiv")
def _floor_divide(t: FunctionTranslator, _node: FunctionNode, inputs: list[Any]) -> TensorName:
    a, b = map(t.tensor, inputs)
    if (a.dtype or "").startswith(("int", "uint")):
        return t.one("Div", t.one("Sub", a, t.one("Mod", a, b)), b)
    return t.one("Floor", t.one("Div", a, b))


@_operation("FloorMod")
def _floor_mod(t: FunctionTranslator, _node: FunctionNode, inputs: list[Any]) -> TensorName:
    a, b = map(t.tensor, inputs)
    if (a.dtype or "").startswith(("int", "uint")):
        return t.one("Mod", a, b)
    return t.one("Sub", a, t.one("Mul", t.one("Floor", t.one("Div", a, b)), b))


def _zero_where(t: FunctionTranslator, zero: TensorName, result: TensorName) -> TensorName:
    """Return a result, or zero where another tensor is zero."""
    nothing = _scalar(t, 0, result)
    chosen = t.one("Where", t.one("Equal", zero, _scalar(t, 0, zero)), nothing, result)
    return chosen._replace(dtype=result.dtype)


def _product_with_itself(t: FunctionTranslator, x: TensorName) -> TensorName:
    return t.one("Mul", x, x)


def _function(t: FunctionTranslator, x: TensorName, nodes: ActivationNodes) -> TensorName:
    def add(op: str, *names: str) -> str:
        return t.one(op, *(TensorName(name, x.dtype) for name in names)).name

    return TensorName(nodes(add, lambda value: _scalar(t, value, x).name, x.name), x.dtype)


# Operations that are one expression of their tensors.
_EXPRESSIONS: dict[str, Callable[..., Any]] = {
    "Relu6": lambda t, x: t.one("Clip", x, _scalar(t, 0, x), _scalar(t, 6, x)),
    "Square": _product_with_itself,
    "SquaredDifference": lambda t, a, b: _product_with_itself(t, t.one("Sub", a, b)),
    **{
        name.capitalize(): lambda t, x, nodes=FUNCTION_NODES[name]: _function(t, x, nodes)
        for name in ("log1p", "expm1", "rsqrt")
    },
    "Erfc": lambda t, x: t.one("Sub", _scalar(t, 1, x), t.one("Erf", x)),
    "NotEqual": lambda t, a, b: t.one("Not", t.one("Equal", a, b)),
    "IsFinite": lambda t, x: t.one("Not", t.one("Or", t.one("IsNaN", x), t.one("IsInf", x))),
    "DivNoNan": lambda t, a, b: _zero_where(t, b, t.one("Div", a, b)),
    "MulNoNan": lambda t, a, b: _zero_where(t, b, t.one("Mul", a, b)),
    "Xlogy": lambda t, a, b: _zero_where(t, a, t.one("Mul", a, t.one("Log", b))),
    "ClipByValue": lambda t, x, low, high: t.one("Max", t.one("Min", x, high), low),
    "Reshape": lambda t, x, shape: t.one("Reshape", x, t.int64(shape), allowzero=1),
    "Tile": lambda t, x, counts: t.one("Tile", x, t.int64(counts)),
    "BroadcastTo": lambda t, x, shape: t.one("Expand", x, t.int64(shape)),
    "Fill": lambda t, shape, value: t.one("Expand", value, t.int64(shape)),
    "GatherNd": lambda t, x, positions: t.one("GatherND", x, t.int64(positions)),
    "TensorListFromTensor": lambda _t, rows, _shape: TensorList(rows),
    "TensorListReserve": lambda _t, _shape, length: TensorList(None, length),
}


@_operation(*_EXPRESSIONS)
def _express(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> Any:
    return _EXPRESSIONS[node.op](t, *map(t.tensor, inputs))


@_operation("ZerosLike", "OnesLike")
def _filled_like(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    x = t.tensor(inputs[0])
    return t.one("Expand", _scalar(t, int(node.op == "OnesLike"), x), t.one("Shape", x))


def _channels_first(node: FunctionNode) -> bool:
    return str(get_attribute(node, "data_format") or "").startswith("NC")


@_operation("BiasAdd")
def _add_bias(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    require(not _channels_first(node), "a bias of channels first")
    return t.one("Add", *map(t.tensor, inputs))


@_operation("MatMul")
def _product(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    sides = []
    for value, side in zip(inputs, "ab", strict=True):
        tensor = t.tensor(value)
        sides.append(_kernel(t, tensor, (1, 0)) if get_attribute(node, f"transpose_{side}") else tensor)
    return t.one("MatMul", *sides)


@_operation("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _batch_product(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    a, b = map(t.tensor, inputs)
    turned = [bool(get_attribute(node, name)) for name in ("adj_x", "adj_y")]
    if not any(turned):
        return t.one("MatMul", a, b)
    left, right = "...ji" if turned[0] else "...ij", "...kj" if turned[1] else "...jk"
    return t.one("Einsum", a, b, equation=f"{left},{right}->...ik")


@_operation("Einsum")
def _einsum(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    return t.one("Einsum", *map(t.tensor, inputs), equation=str(get_attribute(node, "equation")))


def _spatial(node: FunctionNode, attribute: str, rank: int) -> tuple[int, ...]:
    """Return the spatial entries of a list with one number for each axis; 1 if it is not stated."""
    listed = get_attribute(node, attribute) or [1] * (rank + 2)
    require(len(listed) == rank + 2, f"{attribute} of another length")
    outer = (listed[0], listed[1]) if _channels_first(node) else (listed[0], listed[-1])
    require(outer == (1, 1), f"{attribute} over batch or channels")
    return tuple(listed[2:]) if _channels_first(node) else tuple(listed[1:-1])


def _padding(node: FunctionNode, rank: int) -> dict[str, Any]:
    padding = get_attribute(node, "padding")
    if padding == "EXPLICIT":
        ends = get_attribute(node, "explicit_paddings") or []
        require(len(ends) == 2 * rank + 4, "paddings of another length")
        first = 4 if _channels_first(node) else 2
        inner = ends[first : first + 2 * rank]
        return {"pads": (*inner[::2], *inner[1::2])}
    require(padding in ("SAME", "VALID"), "an unknown padding")
    return {"auto_pad": "SAME_UPPER" if padding == "SAME" else "VALID"}


def _moved(t: FunctionTranslator, node: FunctionNode, x: TensorName, rank: int) -> TensorName:
    """Return an image with channels first."""
    if _channels_first(node):
        return x
    return t.one("Transpose", x, perm=(0, rank + 1, *range(1, rank + 1)))


def _moved_back(t: FunctionTranslator, node: FunctionNode, x: TensorName, rank: int) -> TensorName:
    if _channels_first(node):
        return x
    return t.one("Transpose", x, perm=(0, *range(2, rank + 2), 1))


def _kernel(t: FunctionTranslator, value: TensorName, perm: tuple[int, ...]) -> TensorName:
    """Return a kernel with its axes in another order."""
    stored = t.stored_leaf(value)
    if stored is not None:
        return t.variable(stored[0], Permute(perm))
    return t.one("Transpose", value, perm=perm)


@_operation("Conv2D", "Conv3D")
def _convolution(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    rank = int(node.op[4])
    x, kernel = map(t.tensor, inputs)
    settings = {
        **_padding(node, rank),
        "strides": _spatial(node, "strides", rank),
        "dilations": _spatial(node, "dilations", rank),
    }
    weight = _kernel(t, kernel, (rank + 1, rank, *range(rank)))
    constant = t.build.constants.get(weight.name)
    shape = constant.shape if constant is not None else None
    # A kernel for fewer channels than the image has is used for groups of them; evaluation checks it.
    channels = t.channels.get(x.name)
    groups = channels // shape[1] if shape is not None and channels and channels % shape[1] == 0 else 1
    result = _grouped_convolution(t, node, (x, weight), settings, groups)
    if shape is not None:
        t.channels[result.name] = shape[0]
    return result


def _grouped_convolution(
    t: FunctionTranslator,
    node: FunctionNode,
    tensors: tuple[TensorName, TensorName],
    settings: Mapping[str, Any],
    groups: int,
) -> TensorName:
    rank = len(settings["strides"])
    moved = _moved(t, node, tensors[0], rank)
    result = t.one("Conv", moved, tensors[1], group=groups, **settings)
    return _moved_back(t, node, result, rank)


@_operation("DepthwiseConv2dNative")
def _depthwise_convolution(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    x, kernel = map(t.tensor, inputs)
    stored = t.stored_leaf(kernel)
    if stored is None:
        raise OpaqueError("a computed kernel")
    high, wide, channels, factor = stored[1].shape
    rule = chain_rules(Permute((2, 3, 0, 1)), Reshape((channels * factor, 1, high, wide)))
    settings = {
        **_padding(node, 2),
        "strides": _spatial(node, "strides", 2),
        "dilations": _spatial(node, "dilations", 2),
    }
    return _grouped_convolution(t, node, (x, t.variable(stored[0], rule)), settings, channels)


@_operation("Conv2DBackpropInput", "Conv3DBackpropInputV2")
def _transposed_convolution(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    rank = int(node.op[4])
    sizes, kernel, x = map(t.tensor, inputs)
    padding, strides = get_attribute(node, "padding"), _spatial(node, "strides", rank)
    require(set(_spatial(node, "dilations", rank)) == {1}, "a dilated transposed convolution")
    require(padding in ("SAME", "VALID"), "an explicit padding")
    # [rows..., outputs, inputs] becomes [inputs, outputs, rows...].
    weight = _kernel(t, kernel, (rank + 1, rank, *range(rank)))
    whole = t.one("ConvTranspose", _moved(t, node, x, rank), weight, strides=strides)
    # The stated extents are cut from the whole result, from its middle for SAME; what it lacks is zero.
    first = 2 if _channels_first(node) else 1
    listed = t.int64(sizes)
    extents = t.one("Slice", listed, t.numbers(first), t.numbers(first + rank))
    zeros = t.numbers(*[0] * rank)
    starts = zeros
    if padding == "SAME":
        more = t.one("Max", t.one("Sub", t.one("Shape", whole, start=2), extents), zeros)
        starts = t.one("Div", more, t.numbers(*[2] * rank))
    axes = t.numbers(*range(2, 2 + rank))
    cut = t.one("Slice", whole, starts, t.one("Add", starts, extents), axes)
    rest = t.one("Sub", extents, t.one("Shape", cut, start=2))
    padded = t.one("Pad", cut, t.one("Concat", zeros, rest, axis=0), None, axes)
    return _moved_back(t, node, padded, rank)


def _pooled(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    rank = 3 if node.op.endswith("3D") else 2
    op = "MaxPool" if node.op.startswith("Max") else "AveragePool"
    settings = {
        **_padding(node, rank),
        "kernel_shape": _spatial(node, "ksize", rank),
        "strides": _spatial(node, "strides", rank),
    }
    moved = _moved(t, node, t.tensor(inputs[0]), rank)
    return _moved_back(t, node, t.one(op, moved, **settings), rank)


_operation("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D")(_pooled)


@_operation("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def _batch_norm(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    require(get_attribute(node, "is_training") == 0, "a norm in training")
    epsilon = get_attribute(node, "epsilon")
    require(isinstance(epsilon, float), "an epsilon that is not stated")
    x, *rest = map(t.tensor, inputs)
    rank = 3 if str(get_attribute(node, "data_format") or "") in ("NDHWC", "NCDHW") else 2
    result = t.one("BatchNormalization", _moved(t, node, x, rank), *rest, epsilon=epsilon)
    return _moved_back(t, node, result, rank)


@_operation("ResizeNearestNeighbor", "ResizeBilinear")
def _resize(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    corners, centers = (bool(get_attribute(node, name)) for name in ("align_corners", "half_pixel_centers"))
    require(not (corners and centers), "corners and centers")
    nearest = node.op == "ResizeNearestNeighbor"
    require(not (nearest and corners), "nearest entries with corners")
    mode = "align_corners" if corners else "half_pixel" if centers else "asymmetric"
    settings: dict[str, Any] = {
        "mode": "nearest" if nearest else "linear",
        "coordinate_transformation_mode": mode,
    }
    if nearest:
        # floor((y + 0.5) * scale) with centers, floor(y * scale) without.
        settings["nearest_mode"] = "round_prefer_ceil" if centers else "floor"
    x = t.tensor(inputs[0])
    sizes = t.int64(inputs[1])
    output = t.one("Resize", _moved(t, node, x, 2), None, None, sizes, axes=(2, 3), **settings)
    return _moved_back(t, node, output, 2)


@_operation("SpaceToDepth", "DepthToSpace")
def _blocks(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    require(str(get_attribute(node, "data_format") or "NHWC") in ("NHWC", "NCHW"), "vectors of channels")
    moved = _moved(t, node, t.tensor(inputs[0]), 2)
    output = t.one(node.op, moved, blocksize=get_attribute(node, "block_size"), mode="DCR")
    return _moved_back(t, node, output, 2)


def _as_type(t: FunctionTranslator, value: TensorName, code: int) -> TensorName:
    """Return int64 numbers in the type with this number."""
    kind = type_name(code)
    return value if kind == "int64" else t.one("Cast", value, to=kind)


@_operation("Shape")
def _shape(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    return _as_type(t, t.one("Shape", t.tensor(inputs[0])), get_attribute(node, "out_type") or 3)


@_operation("Size", "Rank")
def _size(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    x = t.tensor(inputs[0])
    count = t.one("Size", x if node.op == "Size" else t.one("Shape", x))
    return _as_type(t, count, get_attribute(node, "out_type") or 3)


@_operation("ExpandDims")
def _expand_dims(t: FunctionTranslator, _node: FunctionNode, inputs: list[Any]) -> TensorName:
    return t.one("Unsqueeze", t.tensor(inputs[0]), t.numbers(*t.ints(inputs[1])))


@_operation("Squeeze")
def _squeeze(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    axes = get_attribute(node, "squeeze_dims") or []
    return t.one("Squeeze", t.tensor(inputs[0]), *([t.numbers(*axes)] if axes else []))


@_operation("Transpose")
def _transpose(t: FunctionTranslator, _node: FunctionNode, inputs: list[Any]) -> TensorName:
    perm = tuple(t.ints(inputs[1]))
    return t.one("Transpose", t.tensor(inputs[0]), perm=perm)


@_operation("Concat", "ConcatV2")
def _concat(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    *values, axis = inputs if node.op == "ConcatV2" else (*inputs[1:], inputs[0])
    (at,) = t.ints(axis)
    return t.one("Concat", *map(t.tensor, values), axis=at)


@_operation("Pack")
def _pack(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    axis = get_attribute(node, "axis") or 0
    rows = [t.one("Unsqueeze", t.tensor(input_), t.numbers(axis)) for input_ in inputs]
    return t.one("Concat", *rows, axis=axis)


@_operation("Unpack")
def _unpack(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> list[TensorName]:
    axis, count = get_attribute(node, "axis") or 0, get_attribute(node, "num")
    parts = t.many("Split", [t.tensor(inputs[0]), t.numbers(*[1] * count)], count, axis=axis)
    return [t.one("Squeeze", part, t.numbers(axis)) for part in parts]


@_operation("Split")
def _split(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> list[TensorName]:
    (axis,), count = t.ints(inputs[0]), get_attribute(node, "num_split")
    return t.many("Split", [t.tensor(inputs[1])], count, axis=axis, num_outputs=count)


@_operation("SplitV")
def _split_sizes(t: FunctionTranslator, _node: FunctionNode, inputs: list[Any]) -> list[TensorName]:
    sizes, (axis,) = t.ints(inputs[1]), t.ints(inputs[2])
    require(-1 not in sizes, "a part whose extent depends on a tensor")
    return t.many("Split", [t.tensor(inputs[0]), t.numbers(*sizes)], len(sizes), axis=axis)


@_operation("Slice")
def _slice(t: FunctionTranslator, _node: FunctionNode, inputs: list[Any]) -> TensorName:
    starts, counts = t.ints(inputs[1]), t.ints(inputs[2])
    pairs = zip(starts, counts, strict=True)
    ends = [_LARGEST if count == -1 else start + count for start, count in pairs]
    return t.one("Slice", t.tensor(inputs[0]), t.numbers(*starts), t.numbers(*ends))


@_operation("StridedSlice")
def _strided_slice(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    """Axes after an ellipsis are counted from the end."""
    begin, end, step = (t.ints(input_) for input_ in inputs[1:])
    masks = {
        name: get_attribute(node, f"{name}_mask") or 0
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }

    def has(name: str, n: int) -> bool:
        return bool(masks[name] >> n & 1)

    count = len(begin)
    real = [n for n in range(count) if not has("new_axis", n) and not has("ellipsis", n)]
    ellipsis = next((n for n in range(count) if has("ellipsis", n)), count)
    rows: list[tuple[int, int, int, int]] = []
    removed, added, position = [], [], 0
    for n in range(count):
        after = n > ellipsis
        if has("ellipsis", n):
            # What follows is counted from the end of the result.
            position = -sum(has("new_axis", m) or not has("shrink_axis", m) for m in range(n + 1, count))
            continue
        if has("new_axis", n):
            added.append(position)
            position += 1
            continue
        axis = real.index(n) - (len(real) if after else 0)
        if has("shrink_axis", n):
            rows.append((axis, begin[n], begin[n] + 1 if begin[n] != -1 else _LARGEST, 1))
            removed.append(axis)
            continue
        position += 1
        first = (0 if step[n] > 0 else _LARGEST) if has("begin", n) else begin[n]
        last = (_LARGEST if step[n] > 0 else -_LARGEST) if has("end", n) else end[n]
        if (first, last, step[n]) != (0, _LARGEST, 1):
            rows.append((axis, first, last, step[n]))
    x = t.tensor(inputs[0])
    if rows:
        axes, starts, ends, steps = (t.numbers(*row) for row in zip(*rows, strict=True))
        x = t.one("Slice", x, starts, ends, axes, steps)
    if removed:
        x = t.one("Squeeze", x, t.numbers(*removed))
    return t.one("Unsqueeze", x, t.numbers(*added)) if added else x


@_operation("Range")
def _range(t: FunctionTranslator, _node: FunctionNode, inputs: list[Any]) -> TensorName:
    tensors = [t.tensor(input_) for input_ in inputs]
    bounds = [t.known.get(tensor.name) for tensor in tensors]
    if all(bound is not None and bound.size == 1 for bound in bounds):
        start, end, step = (bound.reshape(()) for bound in bounds if bound is not None)
        require(step != 0 and abs(end - start) <= _SMALL * abs(step), "a range that is too long")
    return t.one("Range", *tensors)


@_operation("ReverseV2")
def _reverse(t: FunctionTranslator, _node: FunctionNode, inputs: list[Any]) -> TensorName:
    axes = t.ints(inputs[1])
    count = len(axes)
    listed = [[-1] * count, [-_LARGEST] * count, axes, [-1] * count]
    return t.one("Slice", t.tensor(inputs[0]), *(t.numbers(*row) for row in listed)) if axes else inputs[0]


@_operation("Roll")
def _roll(t: FunctionTranslator, _node: FunctionNode, inputs: list[Any]) -> TensorName:
    x = t.tensor(inputs[0])
    for shift, axis in zip(t.ints(inputs[1]), t.ints(inputs[2]), strict=True):
        # A shift that is larger than the extent is counted from the start again.
        size = t.one("Shape", x, start=axis, **({"end": axis + 1} if axis != -1 else {}))
        start = t.one("Mod", t.numbers(-shift), size)
        at = t.numbers(axis)
        parts = (t.one("Slice", x, start, size, at), t.one("Slice", x, t.numbers(0), start, at))
        x = t.one("Concat", *parts, axis=axis)
    return x


@_operation("Pad", "PadV2", "MirrorPad")
def _pad(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    widths = t.ints(inputs[1])
    x = t.tensor(inputs[0])
    listed = [x, t.numbers(*widths[::2], *widths[1::2]), *map(t.tensor, inputs[2:])]
    mode = get_attribute(node, "mode") if node.op == "MirrorPad" else "CONSTANT"
    require(mode in ("CONSTANT", "REFLECT"), "an unknown mode of padding")
    return t.one("Pad", *listed, mode=str(mode).lower())


@_operation("GatherV2")
def _gather(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    (axis,) = t.ints(inputs[2])
    require(not get_attribute(node, "batch_dims"), "a gather per row")
    x = t.tensor(inputs[0])
    return t.one("Gather", x, t.int64(inputs[1]), axis=axis)


@_operation("ResourceGather")
def _gather_variable(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    require(isinstance(inputs[0], VariableName), "a resource that is not a variable")
    require(not get_attribute(node, "batch_dims"), "a gather per row")
    return t.one("Gather", t.variable(inputs[0].path), t.int64(inputs[1]), axis=0)


@_operation("OneHot")
def _one_hot(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    indices, depth, on, off = map(t.tensor, inputs)
    axis = get_attribute(node, "axis")
    first = t.numbers(0)
    values = t.one("Concat", t.one("Unsqueeze", off, first), t.one("Unsqueeze", on, first), axis=0)
    # Positions below zero are in no class here, in ONNX they are counted from the end.
    count = t.one("Cast", depth, to=indices.dtype or "int64")
    inside = t.one("Where", t.one("Less", indices, _scalar(t, 0, indices)), count, indices)
    inside = inside._replace(dtype=indices.dtype)
    output = t.one("OneHot", inside, depth, values, axis=-1 if axis is None else axis)
    return output._replace(dtype=on.dtype)


@_operation("SpaceToBatchND", "BatchToSpaceND")
def _batches(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    """Move blocks of an image to the batch, or back: a convolution with dilations works on these."""
    x, blocks, widths = t.tensor(inputs[0]), t.ints(inputs[1]), t.int64(inputs[2])
    count = len(blocks)
    axes, factors = t.numbers(*range(1, count + 1)), t.numbers(*blocks)
    before, after = (t.one("Gather", widths, t.constant(np.array(n)), axis=1) for n in (0, 1))
    into = node.op == "SpaceToBatchND"
    if into:
        x = t.one("Pad", x, t.one("Concat", before, after, axis=0), None, axes)
    shape = t.one("Shape", x)
    rows, rest = (t.one("Shape", x, **ends) for ends in ({"end": 1}, {"start": count + 1}))
    extents = t.one("Slice", shape, t.numbers(1), t.numbers(count + 1))
    whole, single = t.numbers(int(np.prod(blocks))), t.numbers(-1)
    if into:
        extents = t.one("Div", extents, factors)
        pairs = [name for n in range(count) for name in (_entry(t, extents, n), t.numbers(blocks[n]))]
        x = t.one("Reshape", x, t.one("Concat", rows, *pairs, single, axis=0), allowzero=1)
        x = t.one(
            "Transpose", x, perm=(*range(2, 2 * count + 1, 2), 0, *range(1, 2 * count, 2), 2 * count + 1)
        )
        rows = t.one("Mul", rows, whole)
    else:
        rows = t.one("Div", rows, whole)
        parts = [_entry(t, extents, n) for n in range(count)]
        x = t.one("Reshape", x, t.one("Concat", factors, rows, *parts, single, axis=0), allowzero=1)
        pairs_of_axes = [axis for n in range(count) for axis in (count + 1 + n, n)]
        x = t.one("Transpose", x, perm=(count, *pairs_of_axes, 2 * count + 1))
        extents = t.one("Mul", extents, factors)
    x = t.one("Reshape", x, t.one("Concat", rows, extents, rest, axis=0), allowzero=1)
    return x if into else t.one("Slice", x, before, t.one("Sub", extents, after), axes)


def _entry(t: FunctionTranslator, listed: TensorName, n: int) -> TensorName:
    return t.one("Slice", listed, t.numbers(n), t.numbers(n + 1))


_REDUCTIONS = {"Mean": "ReduceMean", "Sum": "ReduceSum", "Max": "ReduceMax", "Min": "ReduceMin"}
_REDUCTIONS |= {"Prod": "ReduceProd", "All": "ReduceMin", "Any": "ReduceMax"}


@_operation(*_REDUCTIONS)
def _reduce(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    axes = t.ints(inputs[1])
    x = t.tensor(inputs[0])
    if not axes:
        return x
    logical = node.op in ("All", "Any")
    x = t.one("Cast", x, to="int64") if logical else x
    keep = int(bool(get_attribute(node, "keep_dims")))
    result = t.one(_REDUCTIONS[node.op], x, t.numbers(*axes), keepdims=keep)
    return t.one("Cast", result, to="bool") if logical else result


@_operation("ArgMax", "ArgMin")
def _position(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    (axis,) = t.ints(inputs[1])
    output = t.one(node.op, t.tensor(inputs[0]), axis=axis, keepdims=0)
    return _as_type(t, output, get_attribute(node, "output_type") or 9)


@_operation("TopKV2")
def _top(t: FunctionTranslator, _node: FunctionNode, inputs: list[Any]) -> list[TensorName]:
    x, k = t.tensor(inputs[0]), t.int64(inputs[1])
    values, places = t.many("TopK", [x, t.one("Reshape", k, t.numbers(1))], 2, axis=-1)
    return [values, t.one("Cast", places._replace(dtype="int64"), to="int32")]


@_operation("Cumsum", "Cumprod")
def _accumulate(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> TensorName:
    settings = {name: int(bool(get_attribute(node, name))) for name in ("exclusive", "reverse")}
    (axis,) = t.ints(inputs[1])
    op = "CumSum" if node.op == "Cumsum" else "CumProd"
    return t.one(op, t.tensor(inputs[0]), t.constant(np.array(axis, np.int64)), **settings)


@_operation("If", "StatelessIf")
def _condition(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> list[Any]:
    condition = t.tensor(inputs[0])
    condition = condition if condition.dtype == "bool" else t.one("Cast", condition, to="bool")
    branches, types = [], []
    for attribute in ("then_branch", "else_branch"):
        with t.build.branch() as nodes:
            results = [t.tensor(result) for result in t.call(t.function(node, attribute), inputs[1:])]
        branches.append(body(nodes, [result.name for result in results]))
        types.append([result.dtype for result in results])
    names = t.build.add(
        "If", (condition.name,), len(types[0]), then_branch=branches[0], else_branch=branches[1]
    )
    return [TensorName(name, kind) for name, kind in zip(names, types[0], strict=True)]


@_operation("While", "StatelessWhile")
def _loop(t: FunctionTranslator, node: FunctionNode, inputs: list[Any]) -> list[Any]:
    """Carry what the body changes, and collect the rows that it sets; other values stay what they are."""
    fixed = {n for n, input_ in enumerate(inputs) if not isinstance(input_, TensorName)}
    fixed |= _fixed_values(t, node, inputs, fixed)
    carried = [n for n in range(len(inputs)) if n not in fixed]
    (condition,) = (t.tensor(value) for value in t.call(t.function(node, "cond"), inputs))
    names = [t.build.unique_name("/".join((*t.build.scope, "loop"))) for _ in (*carried, 0, 0)]
    inner = list(inputs)
    for n, name in zip(carried, names, strict=False):
        inner[n] = TensorName(name, inputs[n].dtype)
    with t.build.branch() as nodes:
        after = t.call(t.function(node, "body"), inner)
        (again,) = (t.tensor(value) for value in t.call(t.function(node, "cond"), after))
    rows = [n for n in sorted(fixed) if after[n] != inputs[n]]
    counters = {
        after[n].name: inner[n].name
        for n in carried
        if _is_number(t, inputs[n], 0) and _adds_one(t, nodes, inner[n].name, after[n].name)
    }
    for n in rows:
        _require_rows(t, inputs[n], after[n], (counters, nodes, again))
    outputs = [
        again.name,
        *(t.tensor(after[n]).name for n in carried),
        *(after[n].writes[1].name for n in rows),
    ]
    graph = body(nodes, outputs, [names[-2], names[-1], *names[:-2]])
    starts = [inputs[n].name for n in carried]
    names_ = t.build.add("Loop", ("", condition.name, *starts), len(carried) + len(rows), body=graph)
    results = list(inputs)
    for n, name in zip((*carried, *rows), names_, strict=True):
        whole = TensorName(name, after[n].writes[1].dtype if n in rows else inputs[n].dtype)
        if n in rows and after[n].writes[0].name not in counters.values():
            # Each step sets the only row.
            last = t.one("Gather", whole, t.constant(np.array(-1, np.int64)), axis=0)
            whole = t.one("Unsqueeze", last, t.numbers(0))
        results[n] = TensorList(whole) if n in rows else whole
    return results


def _fixed_values(t: FunctionTranslator, node: FunctionNode, inputs: list[Any], fixed: set[int]) -> set[int]:
    """Return the tensors that the body of a loop returns unchanged."""
    names = {n: f"{id(node)}/{n}" for n in range(len(inputs)) if n not in fixed}
    inner = [TensorName(names[n], input_.dtype) if n in names else input_ for n, input_ in enumerate(inputs)]
    with t.build.branch():
        after = t.call(t.function(node, "body"), inner)
    return {n for n in names if after[n] == inner[n]}


def _is_number(t: FunctionTranslator, value: TensorName, number: int) -> bool:
    array = t.known.get(value.name)
    return array is not None and array.size == 1 and bool((array == number).all())


def _adds_one(t: FunctionTranslator, nodes: Sequence[OperatorNode], before: str, after: str) -> bool:
    """Return whether a value is another one plus 1."""
    node = next((node for node in nodes if after in node.outputs), None)
    if node is None or node.op != "Add" or before not in node.inputs:
        return False
    (other,) = [input_ for input_ in node.inputs if input_ != before] or [""]
    return _is_number(t, TensorName(other, None), 1)


def _require_rows(
    t: FunctionTranslator,
    before: Any,
    after: Any,
    loop: tuple[Mapping[str, str], Sequence[OperatorNode], TensorName],
) -> None:
    """Refuse a list unless each step of a loop sets the row of its number, or the only row."""
    counters, nodes, again = loop
    if not isinstance(before, TensorList) or not isinstance(after, TensorList) or before.length is None:
        raise OpaqueError("a resource that a loop changes")
    if after.writes is None or after != before._replace(writes=after.writes):
        raise OpaqueError("rows of a list")
    position, count = after.writes[0], before.length
    if _is_number(t, position, 0) and _is_number(t, count, 1):
        return
    waiting, tests = [again.name], []
    while waiting:
        name = waiting.pop()
        node = next((node for node in nodes if name in node.outputs), None)
        if node is not None and node.op == "And":
            waiting += node.inputs
        elif node is not None and node.op == "Less":
            tests.append(tuple(node.inputs))
    ends = [(name, count.name) for name, first in counters.items() if first == position.name]
    require(any(test in ends for test in tests), "a loop of another length than its list")


@_operation("TensorListSetItem")
def _set_row(t: FunctionTranslator, _node: FunctionNode, inputs: list[Any]) -> TensorList:
    rows = inputs[0]
    if not isinstance(rows, TensorList) or rows.length is None or rows.writes is not None:
        raise OpaqueError("a row of a list")
    return rows._replace(writes=(t.tensor(inputs[1]), t.tensor(inputs[2])))


@_operation("TensorListGetItem")
def _get_row(t: FunctionTranslator, _node: FunctionNode, inputs: list[Any]) -> TensorName:
    if not isinstance(inputs[0], TensorList) or inputs[0].rows is None:
        raise OpaqueError("a row of a list")
    return t.one("Gather", inputs[0].rows, t.int64(inputs[1]), axis=0)


@_operation("TensorListStack")
def _stack_rows(_t: FunctionTranslator, _node: FunctionNode, inputs: list[Any]) -> TensorName:
    if not isinstance(inputs[0], TensorList) or inputs[0].rows is None:
        raise OpaqueError("rows of a list")
    return inputs[0].rows
