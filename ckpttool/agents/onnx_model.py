"""A network as an ONNX model: a row for each kind of layer, in operators that old runtimes have too.

Opset 13 and IR version 7 are those of ONNX 1.8 (onnx/docs/Versioning.md); layer norm, GELU and SiLU have no
operator there and are made of smaller ones, in the patterns that runtimes join again
(onnxruntime/core/optimizer/layer_norm_fusion.cc, gelu_fusion.cc). Imported only by who exports.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, checker, helper

from ckpttool.agents.execute import choose, dtype_of, shapes
from ckpttool.agents.network import (
    Activation,
    Affine,
    Clip,
    Concat,
    Dense,
    Flatten,
    Layer,
    LayerNorm,
    Network,
)
from ckpttool.errors import UnsupportedError
from ckpttool.version import __version__

OPSET, IR_VERSION = 13, 7
BATCH = "batch"
_TYPES = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}
_OWNER = "ONNX model"


def encode(network: Network, places: Sequence[str], output: str, metadata: Mapping[str, str]) -> bytes:
    """Return the model's bytes, checked by the onnx library; the same network gives the same bytes.

    Inputs have the network's names and are [batch, width]; `output` names the result. `places` has a name for
    each node, with which those of its constants and values begin.
    """
    if network.states:
        raise UnsupportedError("a network that carries state from step to step is not exported yet")
    dtype = dtype_of(network)
    widths = shapes(network)
    graph = _Graph(dtype)
    values = [name for name, _ in network.inputs]
    for node, place in zip(network.nodes, places, strict=True):
        graph.place = place
        lower = choose(LAYERS, type(node.layer), _OWNER)
        values.append(lower(graph, node.layer, *[values[number] for number in node.inputs]))
    graph.call(values[network.output], output)
    model = _model(graph, network, (output, int(widths[network.output][-1])), metadata)
    checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


def _model(
    graph: _Graph, network: Network, output: tuple[str, int], metadata: Mapping[str, str]
) -> ModelProto:
    def described(name: str, width: int) -> Any:
        return helper.make_tensor_value_info(name, _TYPES[graph.dtype], [BATCH, width])

    made = helper.make_graph(
        graph.nodes,
        "ckpttool",
        [described(*given) for given in network.inputs],
        [described(*output)],
        graph.constants,
    )
    model = helper.make_model(
        made,
        producer_name="ckpttool",
        producer_version=__version__,
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET)],
    )
    helper.set_model_props(model, dict(metadata))
    return model


class _Graph:
    """Collects operators and constants; their names begin with the place that is being made."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.place = ""
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []
        self._taken: Counter[str] = Counter()

    def apply(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Add an operator and return the name of its value."""
        name = self._name(operator)
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def constant(self, name: str, value: np.ndarray | float) -> str:
        """Add a constant and return its name."""
        array = np.asarray(value).astype(np.dtype(self.dtype).newbyteorder("<"))
        name = self._name(name)
        # raw_data is little-endian on every machine (onnx/onnx.proto, TensorProto).
        data = array.tobytes()
        self.constants.append(helper.make_tensor(name, _TYPES[self.dtype], array.shape, data, raw=True))
        return name

    def call(self, value: str, name: str) -> None:
        """Give a value another name; an input keeps its own and is passed on."""
        if not any(value in node.output for node in self.nodes):
            self.nodes.append(helper.make_node("Identity", [value], [name]))
            return
        for node in self.nodes:
            for names in (node.input, node.output):
                names[:] = [name if each == value else each for each in names]

    def _name(self, word: str) -> str:
        whole = f"{self.place}/{word}"
        self._taken[whole] += 1
        return whole if self._taken[whole] == 1 else f"{whole}_{self._taken[whole]}"


def _dense(graph: _Graph, layer: Dense, x: str) -> str:
    kernel = graph.constant("kernel", layer.kernel)
    if layer.bias is None:
        return graph.apply("MatMul", x, kernel)
    return graph.apply("Gemm", x, kernel, graph.constant("bias", layer.bias))


def _layer_norm(graph: _Graph, layer: LayerNorm, x: str) -> str:
    centred = graph.apply("Sub", x, graph.apply("ReduceMean", x, axes=[-1], keepdims=1))
    squared = graph.apply("Pow", centred, graph.constant("two", 2.0))
    variance = graph.apply("ReduceMean", squared, axes=[-1], keepdims=1)
    root = graph.apply("Sqrt", graph.apply("Add", variance, graph.constant("epsilon", layer.epsilon)))
    scaled = graph.apply("Mul", graph.apply("Div", centred, root), graph.constant("scale", layer.scale))
    return graph.apply("Add", scaled, graph.constant("offset", layer.offset))


def _affine(graph: _Graph, layer: Affine, x: str) -> str:
    # Statistics come as two of these, each with one half that changes nothing.
    if (layer.scale != 1).any():
        x = graph.apply("Mul", x, graph.constant("scale", layer.scale))
    if (layer.shift != 0).any():
        x = graph.apply("Add", x, graph.constant("shift", layer.shift))
    return x


def _clip(graph: _Graph, layer: Clip, x: str) -> str:
    # The operator Clip takes one number for all dimensions.
    above = graph.apply("Max", x, graph.constant("low", layer.low))
    return graph.apply("Min", above, graph.constant("high", layer.high))


def _gelu(graph: _Graph, _layer: Activation, x: str) -> str:
    erf = graph.apply("Erf", graph.apply("Div", x, graph.constant("root_of_two", math.sqrt(2.0))))
    weighted = graph.apply("Mul", x, graph.apply("Add", erf, graph.constant("one", 1.0)))
    return graph.apply("Mul", weighted, graph.constant("half", 0.5))


Lowering = Callable[..., str]


def _named(operator: str) -> Lowering:
    """Return the row of an activation that is one operator without parameters."""
    return lambda graph, _layer, x: graph.apply(operator, x)


ACTIVATIONS: dict[str, Lowering] = {
    "relu": _named("Relu"),
    "tanh": _named("Tanh"),
    "sigmoid": _named("Sigmoid"),
    "elu": _named("Elu"),
    "softplus": _named("Softplus"),
    "leaky_relu": lambda graph, layer, x: graph.apply("LeakyRelu", x, alpha=float(layer.slope)),
    "silu": lambda graph, _layer, x: graph.apply("Mul", x, graph.apply("Sigmoid", x)),
    "gelu": _gelu,
    "linear": lambda _graph, _layer, x: x,
}

LAYERS: dict[type[Layer], Lowering] = {
    Dense: _dense,
    LayerNorm: _layer_norm,
    Activation: lambda graph, layer, x: choose(ACTIVATIONS, layer.name, _OWNER)(graph, layer, x),
    Concat: lambda graph, _layer, *xs: graph.apply("Concat", *xs, axis=-1),
    Flatten: lambda graph, _layer, x: graph.apply("Flatten", x, axis=1),
    Affine: _affine,
    Clip: _clip,
}
