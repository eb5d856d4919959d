"""SavedModel graphs: their activations, and image orders of layers."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ckpttool.core import limits
from ckpttool.core.activations import FeatureOrders, TrackingLimitError
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.source import Shape
from ckpttool.core.tree import Path
from ckpttool.formats import tf_saved_model, tf_saved_model_messages
from ckpttool.formats.tf_functions import (
    FunctionNode,
    GraphFunction,
    get_attribute,
    get_function_name,
    is_true,
    read_constant_fields,
    read_functions,
)
from ckpttool.formats.tf_saved_model_messages import FieldMeter
from ckpttool.libraries.activation_orders import (
    OrderTracer,
    TracedActivation,
    UntraceableError,
    UntracedActivation,
    always_return,
    mark_orders_unknown,
    window_extents,
)

_ACTIVATIONS = {
    "Relu": "relu",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "Elu": "elu",
    "Softplus": "softplus",
}
# Further activations that a graph may have, which an agent of a layout does not support.
OTHER_FUNCTIONS = frozenset(("LeakyRelu", "Relu6", "Selu", "Softsign", "Erf", "Sin", "Cos"))
_CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))
_NODES, _DEEP = 20_000, 20


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
    except (CkpttoolError, RecursionError, struct.error):
        return frozenset()
    nodes = (n for library in libraries for function in library.values() for n in function.nodes.values())
    every = {node.op for node in nodes}
    known = {name for op, name in _ACTIVATIONS.items() if op in every}
    return frozenset(known | (every & OTHER_FUNCTIONS))


# Evaluates a SavedModel's functions on numbered entries, to find the image orders of layers.
#
# Sources: tensorflow/core/ops/*.cc (operations),
# tensorflow/core/framework/{function,tensor,attr_value}.proto, tensorflow/python/ops/list_ops.py (loops over
# a sequence).

_CONSTANT = 1 << 20
_TYPES = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", 10: "?"}


class _GraphOrderWeight(NamedTuple):
    """A variable's value, or a value with one number per feature computed from variables."""

    paths: tuple[Path, ...]
    shape: Shape


class _TensorList(NamedTuple):
    """A list of tensors of one shape: the positions of a sequence."""

    whole: TracedActivation | UntracedActivation


def read_graph_orders(checkpoint: Checkpoint) -> Mapping[Path, FeatureOrders] | None:
    """Return the orders in a SavedModel's functions, None if the checkpoint is not a SavedModel.

    If several functions use a layer, they must agree.
    """
    file = next((f for f in checkpoint.files if f.path.endswith(f"/{tf_saved_model.GRAPH}")), None)
    if checkpoint.format != tf_saved_model.NAME or file is None or file.size > limits.current().graph_bytes:
        return None
    meter = FieldMeter()
    graphs = tf_saved_model_messages.parse_saved_model(memoryview(file.read(0, file.size)), meter)
    found: dict[Path, FeatureOrders] = {}
    for graph in graphs:
        if graph.objects is None or graph.nodes is None:
            continue
        held = tf_saved_model_messages.parse_object_graph(graph.objects, meter)
        numbers = tf_saved_model.facts_by_objects(checkpoint.tree, held).numbers
        functions = read_functions(graph.nodes, meter)
        inputs = {
            name: info.shape for each in graph.signatures.values() for name, info in each.inputs.items()
        }
        named = [name for _, name in tf_saved_model.iter_signatures(held)]
        for name in named or [name for name in held.captures if held.captures[name]]:
            captured = [
                _GraphOrderWeight((path,), checkpoint.tree[path].shape)  # type: ignore[union-attr]
                if (path := numbers.get(number)) is not None
                else None
                for number in held.captures.get(name, ())
            ]
            made = _function_orders(checkpoint, functions, name, captured, inputs)
            if made is None:
                nodes = (node for each in functions.values() for node in each.nodes.values())
                made = (
                    mark_orders_unknown(checkpoint.tree)
                    if any(node.op in _REORDERS for node in nodes)
                    else {}
                )
            found |= {path: each for path, each in made.items() if path not in found}
    return found


def _function_orders(
    checkpoint: Checkpoint,
    functions: Mapping[str, GraphFunction],
    name: str,
    captured: Sequence[_GraphOrderWeight | None],
    inputs: Mapping[str, Shape | None],
) -> Mapping[Path, FeatureOrders] | None:
    """Return the orders in one function, None if it cannot be evaluated."""
    function = functions.get(name)
    if function is None:
        return {}
    evaluation = OrderTracer(checkpoint.tree, -1)
    reader = _GraphOrderEvaluator(functions, evaluation=evaluation)
    own = function.arguments[: len(function.arguments) - len(captured)]
    known = function.shapes
    try:
        given: list[Any] = []
        for place, argument in enumerate(own):
            shape = inputs.get(argument) or known.get(place)
            if shape is None or any(extent < 0 for extent in shape[1:]):
                return None
            given.append(evaluation.given([1 if extent < 0 else extent for extent in shape]))
        reader.call(function, [*given, *captured])
        return evaluation.features()
    except (
        CkpttoolError,
        UntraceableError,
        TrackingLimitError,
        LookupError,
        TypeError,
        ValueError,
        ArithmeticError,
    ):
        return None


@dataclass
class _GraphOrderEvaluator(FunctionEvaluator):
    """Evaluates functions: constants as arrays, variables as weights, tensors as activations."""

    evaluation: OrderTracer = field(kw_only=True)

    failure = UntraceableError

    def _output(self, name: str, scope: Mapping[str, list[Any]]) -> Any:
        node, _, output = name.partition(":")
        held, number = scope[node], output.rpartition(":")[2]
        place = int(number) if number.isdecimal() else 0
        if output and len(held) == 1 and output.partition(":")[0] in _SECOND:
            return UntracedActivation()
        return held[place] if place < len(held) else UntracedActivation()

    def _outputs(self, node: FunctionNode, given: list[Any]) -> list[Any]:
        self.evaluation.step()
        if node.op in _CALLS:
            return self.call(self.called_function(node), given)
        if node.op in ("While", "StatelessWhile"):
            return self._loop(node, given)
        if node.op == "IdentityN":
            return given
        operation = _OPERATIONS.get(node.op)
        tensors = [each for each in given if isinstance(each, TracedActivation | UntracedActivation)]
        if operation is None:
            return [UntracedActivation()]
        if any(isinstance(each, UntracedActivation) for each in tensors) and node.op not in _ABLE:
            features = {each.features for each in tensors if isinstance(each, UntracedActivation)}
            return [
                UntracedActivation(
                    features.pop() if node.op in _ELEMENTWISE | _ENTRIES and len(features) == 1 else None
                )
            ]
        try:
            made = operation(self, node, given)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            return [UntracedActivation()]
        return made if isinstance(made, list) else [made]

    def _loop(self, node: FunctionNode, given: list[Any]) -> list[Any]:
        """Return the results of a loop; its body is evaluated once, because layer inputs stay the same."""
        body = self.library.get(get_function_name(node.attributes.get("body", memoryview(b""))))
        if body is not None:
            self.call(body, given)
        return [each if isinstance(each, _GraphOrderWeight) else UntracedActivation() for each in given]


def _constant(_: _GraphOrderEvaluator, node: FunctionNode, __: list[Any]) -> Any:
    fields = read_constant_fields(node.attributes.get("value", memoryview(b"")), _CONSTANT)
    if fields is None:
        return UntracedActivation()
    shape = fields.shape or ()
    whole = math.prod(shape)
    if fields.dtype not in _TYPES or whole > _CONSTANT:
        return UntracedActivation()
    if fields.content:
        return np.frombuffer(fields.content, _TYPES[fields.dtype]).reshape(shape)
    numbers = fields.numbers
    filled = [*numbers, *[numbers[-1] if numbers else 0] * (whole - len(numbers))]
    return np.array(filled, _TYPES[fields.dtype]).reshape(shape)


# --- Operations ---------------------------------------------------------------------------------------

_Given = list[Any]
_Operation = Callable[[_GraphOrderEvaluator, FunctionNode, _Given], Any]
# Operations that may reorder an image's axes.
_REORDERS = frozenset(("Transpose", "Einsum", "ReverseV2", "DepthToSpace", "SpaceToDepth", "ScatterNd"))
# Outputs of a norm other than the normalised value.
_SECOND = frozenset(("batch_mean", "batch_variance", "reserve_space_1", "reserve_space_2", "reserve_space_3"))
_ELEMENTWISE = frozenset(
    [
        *("Identity", "StopGradient", "ReadVariableOp", "Cast", "EnsureShape", "PreventGradient", "Snapshot"),
        *("Relu", "Relu6", "Tanh", "Sigmoid", "Elu", "Selu", "Softplus", "Softsign", "LeakyRelu", "Softmax"),
        *("LogSoftmax", "Exp", "Log", "Neg", "Abs", "Sqrt", "Rsqrt", "Square", "Erf", "Sign", "Round"),
        *("ClipByValue", "BiasAdd", "Log1p", "Expm1", "Floor", "Reciprocal", "LogicalNot", "IsFinite"),
        *("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", "ZerosLike", "OnesLike", "CheckNumerics"),
    ]
)
_ENTRIES = frozenset(
    [
        *("Add", "AddV2", "Sub", "Mul", "RealDiv", "Div", "DivNoNan", "Maximum", "Minimum", "Pow"),
        *("SquaredDifference", "FloorDiv", "FloorMod", "AddN", "SelectV2", "Select", "Greater", "Less"),
        *("GreaterEqual", "LessEqual", "Equal", "NotEqual", "LogicalAnd", "LogicalOr", "MulNoNan", "Xdivy"),
    ]
)
_ABLE = frozenset(("MatMul", "Shape", "TensorListFromTensor", "TensorListGetItem", "Einsum", "BatchMatMulV2"))
_COMPUTED: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "AddV2": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "RealDiv": np.divide,
    "Neg": np.negative,
    "Prod": np.prod,
    "Sum": np.sum,
    "Max": np.max,
    "Min": np.min,
}


def _is_constant(*values: Any) -> bool:
    return all(isinstance(each, np.ndarray) for each in values)


def _to_activation(run: _GraphOrderEvaluator, value: Any) -> TracedActivation:
    """Return a value as an activation: constants and weights are never images."""
    if isinstance(value, TracedActivation):
        return value
    if isinstance(value, np.ndarray | _GraphOrderWeight):
        return run.evaluation.fresh(value.shape)
    raise UntraceableError


def _identity(_: _GraphOrderEvaluator, node: FunctionNode, given: _Given) -> Any:
    if node.op in _COMPUTED and _is_constant(*given):
        return _COMPUTED[node.op](*given)
    return given[0]


def _elementwise(run: _GraphOrderEvaluator, node: FunctionNode, given: _Given) -> Any:
    if node.op in _COMPUTED and _is_constant(*given):
        return _COMPUTED[node.op](*given)
    weights = [each for each in given if isinstance(each, _GraphOrderWeight)]
    tensors = [each for each in given if isinstance(each, TracedActivation)]
    if not tensors:
        if weights and _is_vector([each.shape for each in given]):
            paths = tuple(dict.fromkeys(path for each in weights for path in each.paths))
            return _GraphOrderWeight(paths, np.broadcast_shapes(*(each.shape for each in given)))
        return UntracedActivation()
    made = run.evaluation.together([_to_activation(run, each) for each in given])
    for weight in weights if node.op == "Mul" else ():
        # A norm multiplies each feature by one number.
        axes = [n - len(weight.shape) for n, extent in enumerate(weight.shape) if extent > 1]
        if len(axes) == 1 and -axes[0] <= len(made.shape) and made.shape[axes[0]] == weight.shape[axes[0]]:
            for path in weight.paths:
                run.evaluation.normed(made, path, axes[0])
    return made


def _is_vector(shapes: Sequence[Shape]) -> bool:
    return all(sum(extent > 1 for extent in shape) <= 1 for shape in shapes)


def _numbers(value: Any) -> list[int]:
    if not isinstance(value, np.ndarray):
        raise UntraceableError
    return [int(each) for each in value.reshape(-1)]


def _reshape(run: _GraphOrderEvaluator, _node: FunctionNode, given: _Given) -> Any:
    x, shape = given[0], _numbers(given[1])
    if isinstance(x, np.ndarray):
        return x.reshape(shape)
    if isinstance(x, _GraphOrderWeight):
        whole = math.prod(x.shape)
        known = math.prod(extent for extent in shape if extent != -1)
        wanted = tuple(whole // max(1, known) if extent == -1 else extent for extent in shape)
        if math.prod(wanted) != whole:
            raise UntraceableError
        # A convolution over one axis is a 2D convolution with one axis of extent 1.
        kept = [extent for extent in wanted if extent > 1] == [extent for extent in x.shape if extent > 1]
        return _GraphOrderWeight(x.paths, wanted) if kept else UntracedActivation()
    return run.evaluation.reshaped(_to_activation(run, x), shape)


def _expand(run: _GraphOrderEvaluator, node: FunctionNode, given: _Given) -> Any:
    (at,) = _numbers(given[1])
    shape = list(given[0].shape)
    shape.insert(at if at >= 0 else len(shape) + 1 + at, 1)
    return _reshape(run, node, [given[0], np.array(shape)])


def _squeeze(run: _GraphOrderEvaluator, node: FunctionNode, given: _Given) -> Any:
    rank = len(given[0].shape)
    axes = {each % rank for each in get_attribute(node, "squeeze_dims") or ()}
    shape = [extent for n, extent in enumerate(given[0].shape) if extent != 1 or (axes and n not in axes)]
    return _reshape(run, node, [given[0], np.array(shape, "int64")])


def _rearrangement(move: Callable[..., Any]) -> _Operation:
    """Return the handler of an operation that moves its first input's entries; others are constants."""

    def read(run: _GraphOrderEvaluator, node: FunctionNode, given: _Given) -> Any:
        x, rest = given[0], list(given[1:])
        if isinstance(x, _GraphOrderWeight):
            return UntracedActivation()
        if not _is_constant(*rest):
            return UntracedActivation()
        if isinstance(x, np.ndarray):
            return move(node, x, *rest)
        return run.evaluation.moved(_to_activation(run, x), lambda entries: move(node, entries, *rest))

    return read


def _strided_slice(node: FunctionNode, entries: Any, begin: Any, end: Any, step: Any) -> Any:
    masks = {
        name: get_attribute(node, f"{name}_mask") or 0
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    at: list[Any] = []
    for n, (first, last, by) in enumerate(zip(begin.tolist(), end.tolist(), step.tolist(), strict=True)):
        bit = 1 << n
        if masks["ellipsis"] & bit:
            at.append(Ellipsis)
        elif masks["new_axis"] & bit:
            at.append(np.newaxis)
        elif masks["shrink_axis"] & bit:
            at.append(first)
        else:
            at.append(
                slice(None if masks["begin"] & bit else first, None if masks["end"] & bit else last, by)
            )
    return np.asarray(entries[tuple(at)])


def _slice(_: FunctionNode, entries: Any, begin: Any, size: Any) -> Any:
    at = tuple(
        slice(first, None if count == -1 else first + count)
        for first, count in zip(begin.tolist(), size.tolist(), strict=True)
    )
    return entries[at]


def _space_to_depth(node: FunctionNode, entries: Any) -> Any:
    block = get_attribute(node, "block_size")
    count, high, wide, channels = entries.shape
    made = entries.reshape(count, high // block, block, wide // block, block, channels)
    return made.transpose(0, 1, 3, 2, 4, 5).reshape(count, high // block, wide // block, -1)


def _depth_to_space(node: FunctionNode, entries: Any) -> Any:
    block = get_attribute(node, "block_size")
    count, high, wide, channels = entries.shape
    made = entries.reshape(count, high, wide, block, block, channels // block**2)
    return made.transpose(0, 1, 3, 2, 4, 5).reshape(count, high * block, wide * block, -1)


def _pixel_shuffle(run: _GraphOrderEvaluator, node: FunctionNode, given: _Given) -> Any:
    if _is_first(node):
        return UntracedActivation()
    up = node.op == "DepthToSpace"
    move = _depth_to_space if up else _space_to_depth
    return run.evaluation.shuffled(_to_activation(run, given[0]), lambda entries: move(node, entries), up=up)


def _gather(run: _GraphOrderEvaluator, node: FunctionNode, given: _Given) -> Any:
    x, at, axis = given[0], given[1], given[2] if len(given) > 2 else np.array(0)
    if isinstance(x, _GraphOrderWeight):
        return _embed(run, node, given)
    if not _is_constant(at, axis):
        return UntracedActivation()
    if isinstance(x, np.ndarray):
        return np.take(x, at, int(axis))
    return run.evaluation.moved(_to_activation(run, x), lambda entries: np.take(entries, at, int(axis)))


def _embed(run: _GraphOrderEvaluator, _node: FunctionNode, given: _Given) -> Any:
    weight, at = given[0], given[1]
    if (
        not isinstance(weight, _GraphOrderWeight)
        or len(weight.shape) != 2
        or isinstance(at, UntracedActivation)
    ):
        return UntracedActivation()
    made = run.evaluation.fresh((*at.shape, weight.shape[1]))
    run.evaluation.makes(weight.paths[0], made)
    return made


def _concat(run: _GraphOrderEvaluator, _node: FunctionNode, given: _Given) -> Any:
    values, axis = given[:-1], given[-1]
    if _is_constant(*given):
        return np.concatenate(values, int(axis))
    if not _is_constant(axis):
        return UntracedActivation()
    return run.evaluation.joined([_to_activation(run, each) for each in values], int(axis))


def _pack(run: _GraphOrderEvaluator, node: FunctionNode, given: _Given) -> Any:
    axis = get_attribute(node, "axis") or 0
    if _is_constant(*given):
        return np.stack(given, axis)
    values = [_expand(run, node, [each, np.array(axis)]) for each in given]
    return run.evaluation.joined([_to_activation(run, each) for each in values], axis)


def _unpack(run: _GraphOrderEvaluator, node: FunctionNode, given: _Given) -> Any:
    x, axis = given[0], get_attribute(node, "axis") or 0
    if isinstance(x, np.ndarray):
        return [np.take(x, n, axis) for n in range(x.shape[axis])]
    whole = _to_activation(run, x)
    parts = [np.take(whole.entries, n, axis) for n in range(x.shape[axis])]
    return [run.evaluation.moved(whole, always_return(part)) for part in parts]


def _split(run: _GraphOrderEvaluator, node: FunctionNode, given: _Given) -> Any:
    if node.op == "SplitV":
        x, sizes, axis = given
        ends = np.cumsum(sizes)[:-1]
    else:
        axis, x = given
        count = get_attribute(node, "num_split")
        ends = np.arange(1, count) * (x.shape[int(axis)] // count)
    if isinstance(x, _GraphOrderWeight):
        return [UntracedActivation()]
    return [
        run.evaluation.moved(_to_activation(run, x), always_return(part))
        for part in np.split(_to_activation(run, x).entries, [int(end) for end in ends], int(axis))
    ]


def _reduce(run: _GraphOrderEvaluator, node: FunctionNode, given: _Given) -> Any:
    x, axes = given
    keep = bool(get_attribute(node, "keep_dims"))
    if _is_constant(x, axes) and node.op in _COMPUTED:
        return _COMPUTED[node.op](x, axis=tuple(_numbers(axes)), keepdims=keep)
    rank = len(x.shape)
    gone = {each % rank for each in _numbers(axes)}
    shape = [1 if n in gone else each for n, each in enumerate(x.shape) if keep or n not in gone]
    return run.evaluation.fresh(shape)


def _product(run: _GraphOrderEvaluator, node: FunctionNode, given: _Given) -> Any:
    x, weight = given
    first = is_true(node.attributes.get("transpose_a")) or is_true(node.attributes.get("adj_x"))
    turned = is_true(node.attributes.get("transpose_b")) or is_true(node.attributes.get("adj_y"))
    matrix = isinstance(weight, _GraphOrderWeight) and len(weight.paths) == 1 and len(weight.shape) == 2
    if matrix and not first and isinstance(x, TracedActivation | UntracedActivation):
        sizes = weight.shape[::-1] if turned else weight.shape
        return run.evaluation.dense(x, weight.paths[0], (sizes[0], sizes[1]))
    if isinstance(x, UntracedActivation) or isinstance(weight, UntracedActivation):
        return UntracedActivation()
    one, two = x.shape, weight.shape
    if len(one) < 2 or len(two) < 2:
        return UntracedActivation()
    lead = np.broadcast_shapes(one[:-2], two[:-2])
    return run.evaluation.fresh((*lead, one[-1] if first else one[-2], two[-2] if turned else two[-1]))


def _einsum(run: _GraphOrderEvaluator, node: FunctionNode, given: _Given) -> Any:
    text = str(get_attribute(node, "equation") or "").replace(" ", "")
    taken, _, made = text.partition("->")
    names = taken.split(",")
    if "." in text or len(names) != len(given) or any(isinstance(each, UntracedActivation) for each in given):
        return UntracedActivation()
    for place, weight in enumerate(given):
        x = given[1 - place] if len(given) == 2 else None
        if (
            isinstance(weight, _GraphOrderWeight)
            and isinstance(x, TracedActivation)
            and len(weight.shape) == 2
        ):
            own, other = names[place], names[1 - place]
            shared = [letter for letter in own if letter in other and letter not in made]
            if len(shared) == 1:
                run.evaluation.takes(weight.paths[0], x, other.index(shared[0]))
    return run.evaluation.einsum(text, [_to_activation(run, each) for each in given])


def _shape(_: _GraphOrderEvaluator, __: FunctionNode, given: _Given) -> Any:
    if isinstance(given[0], UntracedActivation):
        return UntracedActivation()
    return np.array(given[0].shape, "int64")


def _fill(run: _GraphOrderEvaluator, _: FunctionNode, given: _Given) -> Any:
    shape = _numbers(given[0])
    return run.evaluation.fresh(shape)


def _range(_: _GraphOrderEvaluator, __: FunctionNode, given: _Given) -> Any:
    return np.arange(*(int(each) for each in given)) if _is_constant(*given) else UntracedActivation()


def _spatial_values(node: FunctionNode, value: Any, default: int, rank: int) -> tuple[int, ...]:
    del node
    found = list(value or ())
    return tuple(found[1:-1]) if len(found) == rank + 2 else (default,) * rank


def _is_first(node: FunctionNode) -> bool:
    return str(get_attribute(node, "data_format") or "").startswith("NC")


def _convolution_extents(
    node: FunctionNode,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    wide: Sequence[int],
) -> tuple[int, ...]:
    padding = get_attribute(node, "padding")
    attributes: dict[str, Any] = {"strides": strides, "dilations": wide}
    if padding == "SAME":
        attributes["auto_pad"] = "SAME_UPPER"
    elif padding == "EXPLICIT":
        ends = get_attribute(node, "explicit_paddings") or []
        axes = range(1, len(sizes) + 1)
        attributes["pads"] = (*(ends[2 * n] for n in axes), *(ends[2 * n + 1] for n in axes))
    return window_extents(sizes, kernel, **attributes)


def _convolution(run: _GraphOrderEvaluator, node: FunctionNode, given: _Given) -> Any:
    x = _to_activation(run, given[0])
    kernel = given[1].shape
    rank = len(kernel) - 2
    if _is_first(node) or len(x.shape) != rank + 2:
        return UntracedActivation()
    plain = (
        isinstance(given[1], _GraphOrderWeight)
        and len(given[1].paths) == 1
        and node.op != "DepthwiseConv2dNative"
    )
    weight = given[1].paths if plain and kernel[-2] == x.shape[-1] else ()
    channels = kernel[-1] * (kernel[-2] if node.op.startswith("Depthwise") else 1)
    strides = _spatial_values(node, get_attribute(node, "strides"), 1, rank)
    wide = _spatial_values(node, get_attribute(node, "dilations"), 1, rank)
    sizes = _convolution_extents(node, x.shape[1:-1], kernel[:-2], strides, wide)
    return run.evaluation.convolved(x, (x.shape[0], *sizes, channels), *weight)


def _transposed_convolution(run: _GraphOrderEvaluator, node: FunctionNode, given: _Given) -> Any:
    if _is_first(node):
        return UntracedActivation()
    plain = isinstance(given[1], _GraphOrderWeight) and len(given[1].paths) == 1
    return run.evaluation.convolved(
        _to_activation(run, given[2]), _numbers(given[0]), *(given[1].paths if plain else ())
    )


def _pool(run: _GraphOrderEvaluator, node: FunctionNode, given: _Given) -> Any:
    x = _to_activation(run, given[0])
    rank = len(x.shape) - 2
    if _is_first(node):
        return UntracedActivation()
    kernel = _spatial_values(node, get_attribute(node, "ksize"), 1, rank)
    strides = _spatial_values(node, get_attribute(node, "strides"), 1, rank)
    sizes = _convolution_extents(node, x.shape[1:-1], kernel, strides, (1,) * rank)
    return run.evaluation.convolved(x, (x.shape[0], *sizes, x.shape[-1]))


def _resize(run: _GraphOrderEvaluator, _node: FunctionNode, given: _Given) -> Any:
    x = _to_activation(run, given[0])
    return run.evaluation.convolved(x, (x.shape[0], *_numbers(given[1]), x.shape[-1]))


def _make_tensor_list(run: _GraphOrderEvaluator, _node: FunctionNode, given: _Given) -> Any:
    return _TensorList(
        given[0] if isinstance(given[0], UntracedActivation) else _to_activation(run, given[0])
    )


def _get_list_item(run: _GraphOrderEvaluator, _node: FunctionNode, given: _Given) -> Any:
    held = given[0]
    if not isinstance(held, _TensorList) or isinstance(held.whole, UntracedActivation):
        return UntracedActivation()
    return run.evaluation.moved(held.whole, lambda entries: entries[0])


_OPERATIONS: dict[str, _Operation] = {
    **dict.fromkeys(_ELEMENTWISE, _identity),
    **dict.fromkeys(_ENTRIES, _elementwise),
    "Const": _constant,
    "Reshape": _reshape,
    "ExpandDims": _expand,
    "Squeeze": _squeeze,
    "Transpose": _rearrangement(lambda _, entries, axes: np.transpose(entries, axes)),
    "StridedSlice": _rearrangement(_strided_slice),
    "Slice": _rearrangement(_slice),
    "Tile": _rearrangement(lambda _, entries, counts: np.tile(entries, counts)),
    "BroadcastTo": _rearrangement(lambda _, entries, shape: np.broadcast_to(entries, shape)),
    "ReverseV2": _rearrangement(lambda _, entries, axes: np.flip(entries, tuple(axes.tolist()))),
    "Roll": _rearrangement(lambda _, entries, by, axes: np.roll(entries, by, axes)),
    "Pad": _rearrangement(lambda _, entries, pads: np.pad(entries, pads, constant_values=-1)),
    "PadV2": _rearrangement(lambda _, entries, pads, __: np.pad(entries, pads, constant_values=-1)),
    "MirrorPad": _rearrangement(lambda _, entries, pads: np.pad(entries, pads, "reflect")),
    "SpaceToDepth": _pixel_shuffle,
    "DepthToSpace": _pixel_shuffle,
    "GatherV2": _gather,
    "ResourceGather": _embed,
    "ConcatV2": _concat,
    "Pack": _pack,
    "Unpack": _unpack,
    "Split": _split,
    "SplitV": _split,
    **dict.fromkeys(("Mean", "Sum", "Max", "Min", "Prod", "All", "Any"), _reduce),
    **dict.fromkeys(("ArgMax", "ArgMin"), lambda *_: UntracedActivation()),
    **dict.fromkeys(("MatMul", "BatchMatMulV2", "BatchMatMulV3", "BatchMatMul"), _product),
    "Einsum": _einsum,
    "Shape": _shape,
    "Fill": _fill,
    "Range": _range,
    **dict.fromkeys(("Conv1D", "Conv2D", "Conv3D", "DepthwiseConv2dNative"), _convolution),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2"), _transposed_convolution),
    **dict.fromkeys(("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D"), _pool),
    **dict.fromkeys(("ResizeNearestNeighbor", "ResizeBilinear", "ResizeBicubic", "ResizeArea"), _resize),
    "TensorListFromTensor": _make_tensor_list,
    "TensorListGetItem": _get_list_item,
}
