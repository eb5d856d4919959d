"""Export a network as an ONNX model, with operators that old runtimes support.

One table row per kind of layer. Opset 13 and IR version 7 are those of ONNX 1.8
(onnx/docs/Versioning.md); layer norm, GELU and SiLU have no operator there and are composed of
smaller ones, in the patterns that runtimes fuse again
(onnxruntime/core/optimizer/layer_norm_fusion.cc, gelu_fusion.cc). Imported only for exports.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, checker, helper

from ckpttool.core.errors import UnsupportedError
from ckpttool.networks.network import (
    SELU_ALPHA,
    SELU_SCALE,
    Activation,
    Add,
    Affine,
    ArgMax,
    AtomMean,
    Clip,
    Concat,
    ConstantRow,
    Convolution,
    Cosines,
    Dense,
    Exp,
    Flatten,
    Layer,
    LayerNorm,
    Multiply,
    Network,
    QuantileMean,
    Repeat,
    Slice,
    Softmax,
    Transpose,
    dtype_of,
    look_up,
    value_shapes,
)
from ckpttool.version import __version__

OPSET, IR_VERSION = 13, 7
BATCH = "batch"
_TYPES = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}
_OWNER = "ONNX model"


def encode_model(
    network: Network,
    places: Sequence[str],
    output: str,
    metadata: Mapping[str, str],
    scores: str | None = None,
) -> bytes:
    """Return the model's bytes, checked by the onnx library; equal networks give equal bytes.

    Inputs have the network's names and are [batch, ...], a stack's [members, batch, ...].

    Args:
        network: what the model computes.
        places: a name per node, the prefix of its constants and values.
        output: the name of the result, followed by `next_NAME` for each state slot.
        metadata: texts by name, stored in the model.
        scores: where the network ends by choosing discrete actions, the name of a further output before it:
            what it chooses by.
    """
    shapes = value_shapes(network)
    graph = _OnnxGraphBuilder(dtype_of(network), 1 if network.members == 1 else 2)
    values = [name for name, _ in network.inputs]
    for node, location in zip(network.nodes, places, strict=True):
        graph.location, graph.rank = location, len(shapes[node.inputs[0]])
        lower = look_up(LAYERS, type(node.layer), _OWNER)
        values.append(lower(graph, node.layer, *[values[number] for number in node.inputs]))
    results = {output: network.output, **{f"next_{slot.name}": slot.value for slot in network.states}}
    if scores is not None:
        (chosen,) = network.nodes[network.output - len(network.inputs)].inputs
        results = {scores: chosen, **results}
    for name, number in results.items():
        values = graph.call(values, number, name)
    model = _make_model(graph, network, {name: shapes[number] for name, number in results.items()}, metadata)
    checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


def _make_model(
    graph: _OnnxGraphBuilder,
    network: Network,
    results: Mapping[str, tuple[int, ...]],
    metadata: Mapping[str, str],
) -> ModelProto:
    rows = [BATCH] if network.members == 1 else [network.members, BATCH]

    def described(name: str, shape: tuple[int, ...]) -> Any:
        return helper.make_tensor_value_info(name, _TYPES[graph.dtype], [*rows, *shape])

    proto = helper.make_graph(
        graph.nodes,
        "ckpttool",
        [
            described(name, shape)
            for (name, _), shape in zip(network.inputs, value_shapes(network), strict=False)
        ],
        [described(*result) for result in results.items()],
        graph.constants,
    )
    model = helper.make_model(
        proto,
        producer_name="ckpttool",
        producer_version=__version__,
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET)],
    )
    helper.set_model_props(model, dict(metadata))
    return model


class _OnnxGraphBuilder:
    """Collects operators and constants; their names begin with the current place."""

    def __init__(self, dtype: str, leading: int) -> None:
        self.dtype = dtype
        self.leading = leading
        """number of axes before a value's shape: the batch, and the members of a stack before it"""
        self.location = ""
        self.rank = 1
        """number of axes of the layer's first input after these"""
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []
        self._used: Counter[str] = Counter()
        self._called: set[str] = set()

    def apply(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Add an operator and return the name of its value."""
        name = self._name(operator)
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def cast(self, value: str) -> str:
        """Add a conversion to the network's float type and return the name of its value."""
        return self.apply("Cast", value, to=_TYPES[self.dtype])

    def constant(self, name: str, value: np.ndarray | float) -> str:
        """Add a constant and return its name."""
        return self._constant(name, np.asarray(value).astype(self.dtype), _TYPES[self.dtype])

    def integers(self, name: str, *values: int) -> str:
        """Add a constant [n] of int64, for axes and indices; return its name."""
        return self._constant(name, np.asarray(values, np.int64), TensorProto.INT64)

    def _constant(self, name: str, array: np.ndarray, kind: int) -> str:
        name = self._name(name)
        # raw_data is little-endian on every machine (onnx/onnx.proto, TensorProto).
        data = array.astype(array.dtype.newbyteorder("<")).tobytes()
        self.constants.append(helper.make_tensor(name, kind, array.shape, data, raw=True))
        return name

    def call(self, values: Sequence[str], number: int, name: str) -> list[str]:
        """Rename a value and return all names; an input keeps its name and is copied."""
        value = values[number]
        computed = any(value in node.output for node in self.nodes)
        if not computed or value in self._called:
            self.nodes.append(helper.make_node("Identity", [value], [name]))
            return list(values)
        self._called.add(name)
        for node in self.nodes:
            for names in (node.input, node.output):
                names[:] = [name if other == value else other for other in names]
        return [name if other == value else other for other in values]

    def _name(self, word: str) -> str:
        whole = f"{self.location}/{word}"
        self._used[whole] += 1
        return whole if self._used[whole] == 1 else f"{whole}_{self._used[whole]}"


def _dense(graph: _OnnxGraphBuilder, layer: Dense, x: str) -> str:
    kernel = graph.constant("kernel", layer.kernel)
    if layer.bias is None:
        return graph.apply("MatMul", x, kernel)
    if layer.kernel.ndim > 2 or graph.rank > 1:  # Gemm accepts one matrix and rows only
        return graph.apply("Add", graph.apply("MatMul", x, kernel), graph.constant("bias", layer.bias))
    return graph.apply("Gemm", x, kernel, graph.constant("bias", layer.bias))


def _layer_norm(graph: _OnnxGraphBuilder, layer: LayerNorm, x: str) -> str:
    centred = graph.apply("Sub", x, graph.apply("ReduceMean", x, axes=[-1], keepdims=1))
    if graph.dtype == "float64":
        # As one fused operator, its epsilon would be a 32-bit attribute.
        squared = graph.apply("Mul", centred, centred)
    else:
        squared = graph.apply("Pow", centred, graph.constant("two", 2.0))
    variance = graph.apply("ReduceMean", squared, axes=[-1], keepdims=1)
    root = graph.apply("Sqrt", graph.apply("Add", variance, graph.constant("epsilon", layer.epsilon)))
    scaled = graph.apply("Mul", graph.apply("Div", centred, root), graph.constant("scale", layer.scale))
    return graph.apply("Add", scaled, graph.constant("offset", layer.offset))


def _affine(graph: _OnnxGraphBuilder, layer: Affine, x: str) -> str:
    # Statistics are two of these, each with one half that has no effect.
    if (layer.scale != 1).any():
        x = graph.apply("Mul", x, graph.constant("scale", layer.scale))
    if (layer.shift != 0).any():
        x = graph.apply("Add", x, graph.constant("shift", layer.shift))
    return x


def _clip(graph: _OnnxGraphBuilder, layer: Clip, x: str) -> str:
    # The operator Clip accepts one number for all dimensions.
    above = graph.apply("Max", x, graph.constant("low", layer.low))
    return graph.apply("Min", above, graph.constant("high", layer.high))


def _constant_row(graph: _OnnxGraphBuilder, layer: ConstantRow, x: str) -> str:
    rows = graph.apply(
        "Slice", graph.apply("Shape", x), graph.integers("first", 0), graph.integers("last", -1)
    )
    shape = graph.apply("Concat", rows, graph.integers("width", layer.row.shape[-1]), axis=0)
    return graph.apply("Expand", graph.constant("row", layer.row), shape)


def _require_float32(graph: _OnnxGraphBuilder, what: str, operator: str) -> None:
    if graph.dtype != "float32":
        raise UnsupportedError(
            f"the {_OWNER} does not support {what} in {graph.dtype}",
            hint=f"onnxruntime does not implement {operator} in this type",
        )


def _convolution(graph: _OnnxGraphBuilder, layer: Convolution, x: str) -> str:
    _require_float32(graph, "convolution", "Conv")
    bias = [] if layer.bias is None else [graph.constant("bias", layer.bias)]
    kernel = graph.constant("kernel", layer.kernel.transpose(3, 2, 0, 1))
    (above, below), (left, right) = layer.padding
    # The operator expects channels first; onnxruntime removes pairs of inverse transposes.
    first = graph.apply("Transpose", x, perm=[0, 3, 1, 2])
    convolved = graph.apply(
        "Conv", first, kernel, *bias, strides=list(layer.strides), pads=[above, left, below, right]
    )
    return graph.apply("Transpose", convolved, perm=[0, 2, 3, 1])


def _slice(graph: _OnnxGraphBuilder, layer: Slice, x: str) -> str:
    start, stop = graph.integers("start", layer.start), graph.integers("stop", layer.stop)
    return graph.apply("Slice", x, start, stop, graph.integers("axis", -1))


def _gelu(graph: _OnnxGraphBuilder, _layer: Activation, x: str) -> str:
    _require_float32(graph, "gelu", "Erf")
    erf = graph.apply("Erf", graph.apply("Div", x, graph.constant("root_of_two", math.sqrt(2.0))))
    weighted = graph.apply("Mul", x, graph.apply("Add", erf, graph.constant("one", 1.0)))
    return graph.apply("Mul", weighted, graph.constant("half", 0.5))


Lowering = Callable[..., str]


def _clamp_below_zero(graph: _OnnxGraphBuilder, x: str) -> str:
    return graph.apply("Max", x, graph.constant("zero", 0.0))


def _clamp_above_zero(graph: _OnnxGraphBuilder, x: str) -> str:
    return graph.apply("Min", x, graph.constant("zero", 0.0))


def _elu(graph: _OnnxGraphBuilder, _layer: Activation, x: str) -> str:
    shrunk = graph.apply("Sub", graph.apply("Exp", _clamp_above_zero(graph, x)), graph.constant("one", 1.0))
    return graph.apply("Add", _clamp_below_zero(graph, x), shrunk)


def _softplus(graph: _OnnxGraphBuilder, _layer: Activation, x: str) -> str:
    small = graph.apply("Exp", graph.apply("Neg", graph.apply("Abs", x)))
    return graph.apply(
        "Add",
        _clamp_below_zero(graph, x),
        graph.apply("Log", graph.apply("Add", small, graph.constant("one", 1.0))),
    )


def _leaky_relu(graph: _OnnxGraphBuilder, layer: Activation, x: str) -> str:
    sloped = graph.apply("Mul", _clamp_above_zero(graph, x), graph.constant("slope", float(layer.slope)))
    return graph.apply("Add", _clamp_below_zero(graph, x), sloped)


def _selu(graph: _OnnxGraphBuilder, layer: Activation, x: str) -> str:
    # Put together: the runtime's Selu exists in float32 only.
    negative = _clamp_above_zero(graph, _elu(graph, layer, x))
    below = graph.apply("Mul", negative, graph.constant("alpha", SELU_ALPHA))
    both = graph.apply("Add", _clamp_below_zero(graph, x), below)
    return graph.apply("Mul", both, graph.constant("scale", SELU_SCALE))


def _limit(graph: _OnnxGraphBuilder, x: str, low: float, high: float) -> str:
    below = graph.apply("Min", x, graph.constant("high", high))
    return graph.apply("Max", below, graph.constant("low", low))


def _hardswish(graph: _OnnxGraphBuilder, _layer: Activation, x: str) -> str:
    limited = _limit(graph, graph.apply("Add", x, graph.constant("three", 3.0)), 0.0, 6.0)
    return graph.apply("Div", graph.apply("Mul", x, limited), graph.constant("six", 6.0))


def _single_operator(operator: str) -> Lowering:
    """Return the table row of an activation that is one operator without parameters."""
    return lambda graph, _layer, x: graph.apply(operator, x)


ACTIVATIONS: dict[str, Lowering] = {
    "relu": _single_operator("Relu"),
    "tanh": _single_operator("Tanh"),
    "sigmoid": _single_operator("Sigmoid"),
    "elu": _single_operator("Elu"),
    "softplus": _single_operator("Softplus"),
    "leaky_relu": lambda graph, layer, x: graph.apply("LeakyRelu", x, alpha=float(layer.slope)),
    "silu": lambda graph, _layer, x: graph.apply("Mul", x, graph.apply("Sigmoid", x)),
    "gelu": _gelu,
    "linear": lambda _graph, _layer, x: x,
    "mish": lambda graph, _layer, x: graph.apply("Mul", x, graph.apply("Tanh", graph.apply("Softplus", x))),
    "selu": _selu,
    "relu6": lambda graph, _layer, x: _limit(graph, x, 0.0, 6.0),
    "hardtanh": lambda graph, _layer, x: _limit(graph, x, -1.0, 1.0),
    "hardswish": _hardswish,
}

# onnxruntime computes these operators in float32 alone (onnxruntime/docs/OperatorKernels.md).
IN_FLOAT64: dict[str, Lowering] = {
    "elu": _elu,
    "softplus": _softplus,
    "leaky_relu": _leaky_relu,
    "mish": lambda graph, layer, x: graph.apply("Mul", x, graph.apply("Tanh", _softplus(graph, layer, x))),
}


def _activation(graph: _OnnxGraphBuilder, layer: Activation, x: str) -> str:
    rows = {**ACTIVATIONS, **IN_FLOAT64} if graph.dtype == "float64" else ACTIVATIONS
    return look_up(rows, layer.name, _OWNER)(graph, layer, x)


def _grouped(graph: _OnnxGraphBuilder, x: str, *shape: int) -> str:
    """Return the last axis as two axes of this shape."""
    return graph.apply("Reshape", x, graph.integers("shape", *[0] * graph.leading, *shape))


def _quantile_mean(graph: _OnnxGraphBuilder, layer: QuantileMean, x: str) -> str:
    shape, axis = ((-1, layer.quantiles), -1) if layer.last else ((layer.quantiles, -1), -2)
    return graph.apply("ReduceMean", _grouped(graph, x, *shape), axes=[axis], keepdims=0)


def _atom_mean(graph: _OnnxGraphBuilder, layer: AtomMean, x: str) -> str:
    weights = graph.apply("Softmax", _grouped(graph, x, -1, layer.support.shape[-1]), axis=-1)
    if layer.limit:
        weights = graph.apply("Max", weights, graph.constant("limit", np.full(1, layer.limit)))
    weighted = graph.apply("Mul", weights, graph.constant("support", layer.support[..., None, :]))
    return graph.apply("ReduceSum", weighted, graph.integers("axis", -1), keepdims=0)


def _cosines(graph: _OnnxGraphBuilder, layer: Cosines, x: str) -> str:
    steps = graph.constant("steps", np.pi * np.arange(1, layer.number + 1))
    column = graph.apply("Unsqueeze", x, graph.integers("axis", -1))
    return graph.apply("Cos", graph.apply("Mul", column, steps))


def _repeat(graph: _OnnxGraphBuilder, layer: Repeat, x: str) -> str:
    row = graph.apply("Unsqueeze", x, graph.integers("axis", 1))
    return graph.apply("Expand", row, graph.integers("shape", 1, layer.count, 1))


def _arg_max(graph: _OnnxGraphBuilder, layer: ArgMax, x: str) -> str:
    choices, low = [], 0
    for count, start in zip(layer.counts, layer.starts, strict=True):
        part = x if len(layer.counts) == 1 else _slice(graph, Slice(low, low + count), x)
        number = graph.apply("ArgMax", part, axis=-1, keepdims=1)
        number = graph.apply("Add", number, graph.integers("first", start)) if start else number
        choices.append(graph.cast(number))
        low += count
    return choices[0] if len(choices) == 1 else graph.apply("Concat", *choices, axis=-1)


LAYERS: dict[type[Layer], Lowering] = {
    Dense: _dense,
    ConstantRow: _constant_row,
    Exp: lambda graph, _layer, x: graph.apply("Exp", x),
    LayerNorm: _layer_norm,
    Activation: _activation,
    Concat: lambda graph, _layer, *xs: graph.apply("Concat", *xs, axis=-1),
    Flatten: lambda graph, _layer, x: graph.apply("Flatten", x, axis=1),
    Affine: _affine,
    Clip: _clip,
    Transpose: lambda graph, layer, x: graph.apply("Transpose", x, perm=[0, *(a + 1 for a in layer.axes)]),
    Slice: _slice,
    Add: lambda graph, _layer, *xs: reduce(lambda a, b: graph.apply("Add", a, b), xs),
    Multiply: lambda graph, _layer, *xs: reduce(lambda a, b: graph.apply("Mul", a, b), xs),
    Convolution: _convolution,
    QuantileMean: _quantile_mean,
    AtomMean: _atom_mean,
    Softmax: lambda graph, _layer, x: graph.apply("Softmax", x, axis=-1),
    Cosines: _cosines,
    Repeat: _repeat,
    ArgMax: _arg_max,
}
