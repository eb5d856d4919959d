"""The gradients of small networks, written out for numpy: what every layer hands back of its output's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ckpttool.agents.backends import numpy as forwards
from ckpttool.agents.execute import choose
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

Values = Sequence[np.ndarray]
# What a layer's inputs and its trained arrays get of the gradient of its output.
Back = tuple[list[np.ndarray], list[np.ndarray]]


def values_of(network: Network, inputs: Values) -> list[np.ndarray]:
    """Return every value of the graph: the inputs, then one for each node."""
    values = list(inputs)
    for node in network.nodes:
        run = choose(forwards.LAYERS, type(node.layer), "numpy backend")(node.layer)
        values.append(run(*[values[i] for i in node.inputs]))
    return values


def gradients(network: Network, values: Values, gradient: np.ndarray) -> Back:
    """Return what the inputs and the trained arrays get of the gradient of the output."""
    of_value: list[Any] = [0.0] * len(values)
    of_value[network.output] = gradient
    of_weights: list[list[np.ndarray]] = []
    first = len(network.inputs)
    for number, node in reversed(tuple(enumerate(network.nodes, first))):
        back = choose(BACKWARD, type(node.layer), "numpy backend")
        given = [values[i] for i in node.inputs]
        # A value that nothing used has no gradient.
        above = np.broadcast_to(of_value[number], values[number].shape)
        of_given, found = back(node.layer, given, values[number], above)
        of_weights.append(found)
        for i, part in zip(node.inputs, of_given, strict=True):
            of_value[i] = of_value[i] + part
    inputs = [np.broadcast_to(of_value[i], values[i].shape) for i in range(first)]
    return inputs, [array for found in reversed(of_weights) for array in found]


def _dense(layer: Dense, given: Values, _: np.ndarray, g: np.ndarray) -> Back:
    found = [given[0].T @ g]
    return [g @ layer.kernel.T], found if layer.bias is None else [*found, g.sum(axis=0)]


def _layer_norm(layer: LayerNorm, given: Values, _: np.ndarray, g: np.ndarray) -> Back:
    x = given[0]
    centred = x - x.mean(axis=-1, keepdims=True)
    root = np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + layer.epsilon)
    unit, scaled = centred / root, g * layer.scale
    along = unit * (scaled * unit).mean(axis=-1, keepdims=True)
    of_x = (scaled - scaled.mean(axis=-1, keepdims=True) - along) / root
    return [of_x], [(g * unit).sum(axis=0), g.sum(axis=0)]


def _activation(layer: Activation, given: Values, y: np.ndarray, g: np.ndarray) -> Back:
    return [g * choose(SLOPES, layer.name, "numpy backend")(layer, given[0], y)], []


def _concat(_layer: Concat, given: Values, _: np.ndarray, g: np.ndarray) -> Back:
    return np.split(g, np.cumsum([x.shape[-1] for x in given])[:-1], axis=-1), []


def _clip(layer: Clip, given: Values, _: np.ndarray, g: np.ndarray) -> Back:
    return [g * ((given[0] >= layer.low) & (given[0] <= layer.high))], []


def _gelu(_layer: Activation, x: np.ndarray, _y: np.ndarray) -> np.ndarray:
    slope: np.ndarray = forwards.normal_below(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return slope


def _silu(_layer: Activation, x: np.ndarray, _y: np.ndarray) -> np.ndarray:
    s = forwards.sigmoid(x)
    slope: np.ndarray = s * (1 + x * (1 - s))
    return slope


# The derivative of every activation, of its input x and its output y.
SLOPES: dict[str, Callable[[Activation, np.ndarray, np.ndarray], np.ndarray]] = {
    "relu": lambda _layer, x, _y: (x > 0).astype(x.dtype),
    "tanh": lambda _layer, _x, y: 1 - y * y,
    "sigmoid": lambda _layer, _x, y: y * (1 - y),
    "elu": lambda _layer, x, _y: np.exp(np.minimum(x, 0.0)),
    "leaky_relu": lambda layer, x, _y: np.where(x > 0, 1.0, layer.slope).astype(x.dtype),
    "gelu": _gelu,
    "silu": _silu,
    "softplus": lambda _layer, x, _y: forwards.sigmoid(x),
    "linear": lambda _layer, x, _y: np.ones_like(x),
}

BACKWARD: dict[type[Layer], Callable[[Any, Values, np.ndarray, np.ndarray], Back]] = {
    Dense: _dense,
    LayerNorm: _layer_norm,
    Activation: _activation,
    Concat: _concat,
    Flatten: lambda _layer, given, _y, g: ([g.reshape(given[0].shape)], []),
    Affine: lambda layer, _given, _y, g: ([g * layer.scale], []),
    Clip: _clip,
}
