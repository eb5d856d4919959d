"""Evaluates a SavedModel's functions on numbered entries: the orders in which layers take and make images.

Sources: tensorflow/core/ops/*.cc (operations), tensorflow/core/framework/{function,tensor,attr_value}.proto,
tensorflow/python/ops/list_ops.py (what a loop over a sequence does).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ckpttool import limits
from ckpttool.activations import Features, TooLargeError
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError
from ckpttool.formats import saved_model
from ckpttool.formats.saved_model import join, messages, objects
from ckpttool.formats.saved_model.messages import Meter
from ckpttool.layouts.graph_steps import Function, Node, called, library, truth
from ckpttool.layouts.recorded_orders import (
    Activation,
    Evaluation,
    Opaque,
    UntraceableError,
    extents,
    returning,
)
from ckpttool.leaf import Path
from ckpttool.source import Shape
from ckpttool.wire import protobuf

_DEEP, _WAITING = 20, 20_000
_CONSTANT = 1 << 20
_MESSAGE = protobuf.DELIMITED
# AttrValue: list, s, i, b, type, shape, tensor. ListValue: s, i.
_VALUE = {1: _MESSAGE, 2: _MESSAGE, 3: protobuf.NUMBER, 5: protobuf.NUMBER, 6: protobuf.NUMBER, 8: _MESSAGE}
_LIST = {2: _MESSAGE, 3: protobuf.NUMBERS}
# TensorProto: dtype, tensor_shape, tensor_content, int_val, int64_val, bool_val.
_TENSOR = {
    1: protobuf.NUMBER,
    2: _MESSAGE,
    4: _MESSAGE,
    5: protobuf.WORDS,
    7: protobuf.NUMBERS,
    10: protobuf.NUMBERS,
    11: protobuf.NUMBERS,
}
_TYPES = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", 10: "?"}


class _Weight(NamedTuple):
    """The value of a variable, or of one number for each feature that is made of variables."""

    paths: tuple[Path, ...]
    shape: Shape


class _Items(NamedTuple):
    """A list of tensors of one shape: the places of a sequence."""

    whole: Activation | Opaque


def of_saved_model(checkpoint: Checkpoint) -> Mapping[Path, Features] | None:
    """Return the orders that a SavedModel's functions show, None if the checkpoint is none.

    Where several functions use a layer, they have to agree.
    """
    file = next((f for f in checkpoint.files if f.path.endswith(f"/{saved_model.GRAPH}")), None)
    if checkpoint.format != saved_model.NAME or file is None or file.size > limits.current().graph_bytes:
        return None
    meter = Meter()
    graphs = messages.parse(memoryview(file.read(0, file.size)), meter)
    found: dict[Path, Features] = {}
    for graph in graphs:
        if graph.objects is None or graph.nodes is None:
            continue
        held = objects.parse(graph.objects, meter)
        numbers = join.by_objects(checkpoint.tree, held).numbers
        functions = library(graph.nodes, meter)
        inputs = {
            name: info.shape for each in graph.signatures.values() for name, info in each.inputs.items()
        }
        named = [name for _, name in join.signatures(held)]
        for name in named or [name for name in held.captures if held.captures[name]]:
            captured = [
                _Weight((path,), checkpoint.tree[path].shape)  # type: ignore[union-attr]
                if (path := numbers.get(number)) is not None
                else None
                for number in held.captures.get(name, ())
            ]
            made = _of_function(checkpoint, functions, name, captured, inputs)
            found |= {path: each for path, each in made.items() if path not in found}
    return found


def _of_function(
    checkpoint: Checkpoint,
    functions: Mapping[str, Function],
    name: str,
    captured: Sequence[_Weight | None],
    inputs: Mapping[str, Shape | None],
) -> Mapping[Path, Features]:
    function = functions.get(name)
    if function is None:
        return {}
    evaluation = Evaluation(checkpoint.tree, -1)
    reader = _Reader(evaluation, functions)
    own = function.arguments[: len(function.arguments) - len(captured)]
    known = function.shapes
    try:
        given: list[Any] = []
        for place, argument in enumerate(own):
            shape = inputs.get(argument) or known.get(place)
            if shape is None or any(extent < 0 for extent in shape[1:]):
                return {}
            given.append(evaluation.given([1 if extent < 0 else extent for extent in shape]))
        reader.call(function, [*given, *captured])
        return evaluation.features()
    except (
        CkpttoolError,
        UntraceableError,
        TooLargeError,
        LookupError,
        TypeError,
        ValueError,
        ArithmeticError,
    ):
        return {}


@dataclass
class _Reader:
    """Evaluates functions: constants as arrays, variables as weights, tensors as activations."""

    evaluation: Evaluation
    library: Mapping[str, Function]
    depth: int = 0

    def call(self, function: Function, given: Sequence[Any]) -> list[Any]:
        """Return all results of a function."""
        if len(given) != len(function.arguments) or self.depth > _DEEP:
            raise UntraceableError
        self.depth += 1
        scope: dict[str, list[Any]] = {
            name: [value] for name, value in zip(function.arguments, given, strict=True)
        }
        found = [self._value(result, function, scope) for result in function.results]
        self.depth -= 1
        return found

    def _value(self, name: str, function: Function, scope: dict[str, list[Any]]) -> Any:
        node = name.partition(":")[0]
        waiting = [node] if node not in scope else []
        while waiting:
            top = waiting[-1]
            found = function.nodes.get(top)
            if found is None or len(waiting) > _WAITING:
                raise UntraceableError
            missing = [n for each in found.inputs if (n := each.partition(":")[0]) not in scope]
            if top in scope:
                waiting.pop()
            elif missing:
                waiting += missing
            else:
                waiting.pop()
                self.evaluation.step()
                scope[top] = self._outputs(found, [self._of(each, scope) for each in found.inputs])
        return self._of(name, scope)

    def _of(self, name: str, scope: Mapping[str, list[Any]]) -> Any:
        node, _, output = name.partition(":")
        held, number = scope[node], output.rpartition(":")[2]
        place = int(number) if number.isdecimal() else 0
        if output and len(held) == 1 and output.partition(":")[0] in _SECOND:
            return Opaque()
        return held[place] if place < len(held) else Opaque()

    def _outputs(self, node: Node, given: list[Any]) -> list[Any]:
        if node.op in ("PartitionedCall", "StatefulPartitionedCall"):
            function = self.library.get(called(node.attributes.get("f", memoryview(b""))))
            if function is None:
                raise UntraceableError
            return self.call(function, given)
        if node.op in ("While", "StatelessWhile"):
            return self._loop(node, given)
        if node.op == "IdentityN":
            return given
        operation = _OPERATIONS.get(node.op)
        tensors = [each for each in given if isinstance(each, Activation | Opaque)]
        if operation is None:
            return [Opaque()]
        if any(isinstance(each, Opaque) for each in tensors) and node.op not in _ABLE:
            features = {each.features for each in tensors if isinstance(each, Opaque)}
            return [Opaque(features.pop() if node.op in _SAME | _ENTRIES and len(features) == 1 else None)]
        made = operation(self, node, given)
        return made if isinstance(made, list) else [made]

    def _loop(self, node: Node, given: list[Any]) -> list[Any]:
        """Return the results of a loop, whose body is evaluated once: what its layers take stays the same."""
        body = self.library.get(called(node.attributes.get("body", memoryview(b""))))
        if body is not None:
            self.call(body, given)
        return [each if isinstance(each, _Weight) else Opaque() for each in given]


# --- Attributes ---------------------------------------------------------------------------------------


def _attribute(node: Node, name: str) -> Any:
    """Return an attribute: a number, a text, or a list of numbers; None where the node has none."""
    value = node.attributes.get(name)
    for number, inner in protobuf.fields(value, _VALUE) if value is not None else ():
        if number == 2:
            return bytes(protobuf.message(inner)).decode("latin-1")
        if number in (3, 5, 6):
            return protobuf.number(inner)
        if number == 1:
            listed: list[int] = []
            for part, each in protobuf.fields(protobuf.message(inner), _LIST):
                if part == 3:
                    listed += protobuf.numbers(each)
            return listed
    return None


def _constant(_: _Reader, node: Node, __: list[Any]) -> Any:
    value = node.attributes.get("value", memoryview(b""))
    tensor = next((protobuf.message(v) for n, v in protobuf.fields(value, _VALUE) if n == 8), None)
    if tensor is None or len(tensor) > _CONSTANT:
        return Opaque()
    dtype, shape, content, numbers = 0, tuple[int, ...](), b"", list[float]()
    for number, part in protobuf.fields(tensor, _TENSOR):
        if number == 1:
            dtype = protobuf.int32(part)
        elif number == 2:
            shape = messages.partial_shape(memoryview(bytes(protobuf.message(part))), Meter()) or ()
        elif number == 4:
            content = bytes(protobuf.message(part))
        elif number == 5:
            data = part.to_bytes(4, "little") if isinstance(part, int) else bytes(part)
            numbers += np.frombuffer(data, "<f4").tolist()
        else:
            numbers += protobuf.numbers(part)
    if dtype not in _TYPES or math.prod(shape) > _CONSTANT:
        return Opaque()
    if content:
        return np.frombuffer(content, _TYPES[dtype]).reshape(shape)
    whole = math.prod(shape)
    filled = [*numbers, *[numbers[-1] if numbers else 0] * (whole - len(numbers))]
    return np.array(filled, _TYPES[dtype]).reshape(shape)


# --- Operations ---------------------------------------------------------------------------------------

_Given = list[Any]
_Operation = Callable[[_Reader, Node, _Given], Any]
# Outputs of a norm that are not what it normalises.
_SECOND = frozenset(("batch_mean", "batch_variance", "reserve_space_1", "reserve_space_2", "reserve_space_3"))
_SAME = frozenset(
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


def _tensor(run: _Reader, value: Any) -> Activation:
    """Return a value as an activation: a constant or a weight holds no image."""
    if isinstance(value, Activation):
        return value
    if isinstance(value, np.ndarray | _Weight):
        return run.evaluation.fresh(value.shape)
    raise UntraceableError


def _same(_: _Reader, node: Node, given: _Given) -> Any:
    if node.op in _COMPUTED and _is_constant(*given):
        return _COMPUTED[node.op](*given)
    return given[0]


def _entries(run: _Reader, node: Node, given: _Given) -> Any:
    if node.op in _COMPUTED and _is_constant(*given):
        return _COMPUTED[node.op](*given)
    weights = [each for each in given if isinstance(each, _Weight)]
    tensors = [each for each in given if isinstance(each, Activation)]
    if not tensors:
        if weights and _is_vector([each.shape for each in given]):
            paths = tuple(dict.fromkeys(path for each in weights for path in each.paths))
            return _Weight(paths, np.broadcast_shapes(*(each.shape for each in given)))
        return Opaque()
    made = run.evaluation.together([_tensor(run, each) for each in given])
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


def _reshape(run: _Reader, _node: Node, given: _Given) -> Any:
    x, shape = given[0], _numbers(given[1])
    if isinstance(x, np.ndarray):
        return x.reshape(shape)
    if isinstance(x, _Weight):
        whole = math.prod(x.shape)
        known = math.prod(extent for extent in shape if extent != -1)
        wanted = tuple(whole // max(1, known) if extent == -1 else extent for extent in shape)
        if math.prod(wanted) != whole:
            raise UntraceableError
        return _Weight(x.paths, wanted) if _is_vector([wanted, x.shape]) or wanted == x.shape else Opaque()
    return run.evaluation.reshaped(_tensor(run, x), shape)


def _expand(run: _Reader, node: Node, given: _Given) -> Any:
    (at,) = _numbers(given[1])
    shape = list(given[0].shape)
    shape.insert(at if at >= 0 else len(shape) + 1 + at, 1)
    return _reshape(run, node, [given[0], np.array(shape)])


def _squeeze(run: _Reader, node: Node, given: _Given) -> Any:
    rank = len(given[0].shape)
    axes = {each % rank for each in _attribute(node, "squeeze_dims") or ()}
    shape = [extent for n, extent in enumerate(given[0].shape) if extent != 1 or (axes and n not in axes)]
    return _reshape(run, node, [given[0], np.array(shape, "int64")])


def _moving(move: Callable[..., Any]) -> _Operation:
    """Return the reading of an operation that moves the entries of its first input; others are constants."""

    def read(run: _Reader, node: Node, given: _Given) -> Any:
        x, rest = given[0], list(given[1:])
        if isinstance(x, _Weight):
            return Opaque()
        if not _is_constant(*rest):
            return Opaque()
        if isinstance(x, np.ndarray):
            return move(node, x, *rest)
        return run.evaluation.moved(_tensor(run, x), lambda entries: move(node, entries, *rest))

    return read


def _strided(node: Node, entries: Any, begin: Any, end: Any, step: Any) -> Any:
    masks = {
        name: _attribute(node, f"{name}_mask") or 0
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


def _cut(_: Node, entries: Any, begin: Any, size: Any) -> Any:
    at = tuple(
        slice(first, None if count == -1 else first + count)
        for first, count in zip(begin.tolist(), size.tolist(), strict=True)
    )
    return entries[at]


def _to_depth(node: Node, entries: Any) -> Any:
    block = _attribute(node, "block_size")
    count, high, wide, channels = entries.shape
    made = entries.reshape(count, high // block, block, wide // block, block, channels)
    return made.transpose(0, 1, 3, 2, 4, 5).reshape(count, high // block, wide // block, -1)


def _to_space(node: Node, entries: Any) -> Any:
    block = _attribute(node, "block_size")
    count, high, wide, channels = entries.shape
    made = entries.reshape(count, high, wide, block, block, channels // block**2)
    return made.transpose(0, 1, 3, 2, 4, 5).reshape(count, high * block, wide * block, -1)


def _shuffled(run: _Reader, node: Node, given: _Given) -> Any:
    if _is_first(node):
        return Opaque()
    up = node.op == "DepthToSpace"
    move = _to_space if up else _to_depth
    return run.evaluation.shuffled(_tensor(run, given[0]), lambda entries: move(node, entries), up=up)


def _gather(run: _Reader, node: Node, given: _Given) -> Any:
    x, at, axis = given[0], given[1], given[2] if len(given) > 2 else np.array(0)
    if isinstance(x, _Weight):
        return _embedded(run, node, given)
    if not _is_constant(at, axis):
        return Opaque()
    if isinstance(x, np.ndarray):
        return np.take(x, at, int(axis))
    return run.evaluation.moved(_tensor(run, x), lambda entries: np.take(entries, at, int(axis)))


def _embedded(run: _Reader, _node: Node, given: _Given) -> Any:
    weight, at = given[0], given[1]
    if not isinstance(weight, _Weight) or len(weight.shape) != 2 or isinstance(at, Opaque):
        return Opaque()
    made = run.evaluation.fresh((*at.shape, weight.shape[1]))
    run.evaluation.makes(weight.paths[0], made)
    return made


def _joined(run: _Reader, _node: Node, given: _Given) -> Any:
    values, axis = given[:-1], given[-1]
    if _is_constant(*given):
        return np.concatenate(values, int(axis))
    if not _is_constant(axis):
        return Opaque()
    return run.evaluation.joined([_tensor(run, each) for each in values], int(axis))


def _packed(run: _Reader, node: Node, given: _Given) -> Any:
    axis = _attribute(node, "axis") or 0
    if _is_constant(*given):
        return np.stack(given, axis)
    values = [_expand(run, node, [each, np.array(axis)]) for each in given]
    return run.evaluation.joined([_tensor(run, each) for each in values], axis)


def _unpacked(run: _Reader, node: Node, given: _Given) -> Any:
    x, axis = given[0], _attribute(node, "axis") or 0
    if isinstance(x, np.ndarray):
        return [np.take(x, n, axis) for n in range(x.shape[axis])]
    whole = _tensor(run, x)
    parts = [np.take(whole.entries, n, axis) for n in range(x.shape[axis])]
    return [run.evaluation.moved(whole, returning(part)) for part in parts]


def _split(run: _Reader, node: Node, given: _Given) -> Any:
    if node.op == "SplitV":
        x, sizes, axis = given
        ends = np.cumsum(sizes)[:-1]
    else:
        axis, x = given
        count = _attribute(node, "num_split")
        ends = np.arange(1, count) * (x.shape[int(axis)] // count)
    if isinstance(x, _Weight):
        return [Opaque()]
    return [
        run.evaluation.moved(_tensor(run, x), returning(part))
        for part in np.split(_tensor(run, x).entries, [int(end) for end in ends], int(axis))
    ]


def _reduced(run: _Reader, node: Node, given: _Given) -> Any:
    x, axes = given
    keep = bool(_attribute(node, "keep_dims"))
    if _is_constant(x, axes) and node.op in _COMPUTED:
        return _COMPUTED[node.op](x, axis=tuple(_numbers(axes)), keepdims=keep)
    rank = len(x.shape)
    gone = {each % rank for each in _numbers(axes)}
    shape = [1 if n in gone else each for n, each in enumerate(x.shape) if keep or n not in gone]
    return run.evaluation.fresh(shape)


def _product(run: _Reader, node: Node, given: _Given) -> Any:
    x, weight = given
    first = truth(node.attributes.get("transpose_a")) or truth(node.attributes.get("adj_x"))
    turned = truth(node.attributes.get("transpose_b")) or truth(node.attributes.get("adj_y"))
    matrix = isinstance(weight, _Weight) and len(weight.paths) == 1 and len(weight.shape) == 2
    if matrix and not first and isinstance(x, Activation | Opaque):
        sizes = weight.shape[::-1] if turned else weight.shape
        return run.evaluation.dense(x, weight.paths[0], (sizes[0], sizes[1]))
    if isinstance(x, Opaque) or isinstance(weight, Opaque):
        return Opaque()
    one, two = x.shape, weight.shape
    if len(one) < 2 or len(two) < 2:
        return Opaque()
    lead = np.broadcast_shapes(one[:-2], two[:-2])
    return run.evaluation.fresh((*lead, one[-1] if first else one[-2], two[-2] if turned else two[-1]))


def _einsum(run: _Reader, node: Node, given: _Given) -> Any:
    text = str(_attribute(node, "equation") or "").replace(" ", "")
    taken, _, made = text.partition("->")
    names = taken.split(",")
    if "." in text or len(names) != len(given) or any(isinstance(each, Opaque) for each in given):
        return Opaque()
    sizes: dict[str, int] = {}
    for letters, value in zip(names, given, strict=True):
        sizes |= dict(zip(letters, value.shape, strict=True))
    for place, weight in enumerate(given):
        x = given[1 - place] if len(given) == 2 else None
        if isinstance(weight, _Weight) and isinstance(x, Activation) and len(weight.shape) == 2:
            own, other = names[place], names[1 - place]
            shared = [letter for letter in own if letter in other and letter not in made]
            if len(shared) == 1:
                run.evaluation.takes(weight.paths[0], x, other.index(shared[0]))
    return run.evaluation.fresh([sizes[letter] for letter in made])


def _shape(_: _Reader, __: Node, given: _Given) -> Any:
    if isinstance(given[0], Opaque):
        return Opaque()
    return np.array(given[0].shape, "int64")


def _filled(run: _Reader, _: Node, given: _Given) -> Any:
    shape = _numbers(given[0])
    return run.evaluation.fresh(shape)


def _ranged(_: _Reader, __: Node, given: _Given) -> Any:
    return np.arange(*(int(each) for each in given)) if _is_constant(*given) else Opaque()


def _spatial(node: Node, value: Any, default: int, rank: int) -> tuple[int, ...]:
    del node
    found = list(value or ())
    return tuple(found[1:-1]) if len(found) == rank + 2 else (default,) * rank


def _is_first(node: Node) -> bool:
    return str(_attribute(node, "data_format") or "").startswith("NC")


def _window(
    node: Node, sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], wide: Sequence[int]
) -> tuple[int, ...]:
    padding = _attribute(node, "padding")
    if padding == "SAME":
        return tuple(-(-size // step) for size, step in zip(sizes, strides, strict=True))
    pads = [0] * len(sizes)
    if padding == "EXPLICIT":
        ends = _attribute(node, "explicit_paddings") or []
        pads = [ends[2 * n] + ends[2 * n + 1] for n in range(1, len(sizes) + 1)]
    return extents(sizes, kernel, strides, pads, wide)


def _convolution(run: _Reader, node: Node, given: _Given) -> Any:
    x = _tensor(run, given[0])
    kernel = given[1].shape
    rank = len(kernel) - 2
    if _is_first(node) or len(x.shape) != rank + 2:
        return Opaque()
    plain = isinstance(given[1], _Weight) and len(given[1].paths) == 1 and node.op != "DepthwiseConv2dNative"
    weight = given[1].paths if plain and kernel[-2] == x.shape[-1] else ()
    channels = kernel[-1] * (kernel[-2] if node.op.startswith("Depthwise") else 1)
    strides = _spatial(node, _attribute(node, "strides"), 1, rank)
    wide = _spatial(node, _attribute(node, "dilations"), 1, rank)
    sizes = _window(node, x.shape[1:-1], kernel[:-2], strides, wide)
    return run.evaluation.convolved(x, (x.shape[0], *sizes, channels), *weight)


def _transposed(run: _Reader, node: Node, given: _Given) -> Any:
    if _is_first(node):
        return Opaque()
    plain = isinstance(given[1], _Weight) and len(given[1].paths) == 1
    return run.evaluation.convolved(
        _tensor(run, given[2]), _numbers(given[0]), *(given[1].paths if plain else ())
    )


def _pool(run: _Reader, node: Node, given: _Given) -> Any:
    x = _tensor(run, given[0])
    rank = len(x.shape) - 2
    if _is_first(node):
        return Opaque()
    kernel = _spatial(node, _attribute(node, "ksize"), 1, rank)
    strides = _spatial(node, _attribute(node, "strides"), 1, rank)
    sizes = _window(node, x.shape[1:-1], kernel, strides, (1,) * rank)
    return run.evaluation.convolved(x, (x.shape[0], *sizes, x.shape[-1]))


def _resized(run: _Reader, _node: Node, given: _Given) -> Any:
    x = _tensor(run, given[0])
    return run.evaluation.convolved(x, (x.shape[0], *_numbers(given[1]), x.shape[-1]))


def _listed(run: _Reader, _node: Node, given: _Given) -> Any:
    return _Items(given[0] if isinstance(given[0], Opaque) else _tensor(run, given[0]))


def _item(run: _Reader, _node: Node, given: _Given) -> Any:
    held = given[0]
    if not isinstance(held, _Items) or isinstance(held.whole, Opaque):
        return Opaque()
    return run.evaluation.moved(held.whole, lambda entries: entries[0])


_OPERATIONS: dict[str, _Operation] = {
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(_ENTRIES, _entries),
    "Const": _constant,
    "Reshape": _reshape,
    "ExpandDims": _expand,
    "Squeeze": _squeeze,
    "Transpose": _moving(lambda _, entries, axes: np.transpose(entries, axes)),
    "StridedSlice": _moving(_strided),
    "Slice": _moving(_cut),
    "Tile": _moving(lambda _, entries, counts: np.tile(entries, counts)),
    "BroadcastTo": _moving(lambda _, entries, shape: np.broadcast_to(entries, shape)),
    "ReverseV2": _moving(lambda _, entries, axes: np.flip(entries, tuple(axes.tolist()))),
    "Roll": _moving(lambda _, entries, by, axes: np.roll(entries, by, axes)),
    "Pad": _moving(lambda _, entries, pads: np.pad(entries, pads, constant_values=-1)),
    "PadV2": _moving(lambda _, entries, pads, __: np.pad(entries, pads, constant_values=-1)),
    "MirrorPad": _moving(lambda _, entries, pads: np.pad(entries, pads, "reflect")),
    "SpaceToDepth": _shuffled,
    "DepthToSpace": _shuffled,
    "GatherV2": _gather,
    "ResourceGather": _embedded,
    "ConcatV2": _joined,
    "Pack": _packed,
    "Unpack": _unpacked,
    "Split": _split,
    "SplitV": _split,
    **dict.fromkeys(("Mean", "Sum", "Max", "Min", "Prod", "All", "Any"), _reduced),
    **dict.fromkeys(("ArgMax", "ArgMin"), lambda *_: Opaque()),
    **dict.fromkeys(("MatMul", "BatchMatMulV2", "BatchMatMulV3", "BatchMatMul"), _product),
    "Einsum": _einsum,
    "Shape": _shape,
    "Fill": _filled,
    "Range": _ranged,
    **dict.fromkeys(("Conv1D", "Conv2D", "Conv3D", "DepthwiseConv2dNative"), _convolution),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2"), _transposed),
    **dict.fromkeys(("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D"), _pool),
    **dict.fromkeys(("ResizeNearestNeighbor", "ResizeBilinear", "ResizeBicubic", "ResizeArea"), _resized),
    "TensorListFromTensor": _listed,
    "TensorListGetItem": _item,
}
