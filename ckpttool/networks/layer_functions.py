"""Layers as functions of arrays: the formulas that are equal in NumPy, PyTorch and TensorFlow."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np

from ckpttool.networks.network import (
    Activation,
    Add,
    Affine,
    Clip,
    Concat,
    Exp,
    Layer,
    LayerNorm,
    Multiply,
    QuantileMean,
    Slice,
    Transpose,
    look_up,
)

# Arrays of any library, which has no common type.
Array = Any
Put = Callable[[np.ndarray], Array]
Function = Callable[..., Array]
Row = Callable[[Any, Put], Function]


def common_layers(
    library: Any,
    owner: str,
    activations: Mapping[str, Callable[[Activation], Function]],
    *,
    concat: Function,
    mean: Function,
    split: Function,
    reorder: Function,
) -> dict[type[Layer], Row]:
    """Return the functions of layers by kind; `put` converts each array of a layer, in their order.

    Args:
        library: the module with the library's functions of equal name, e.g. `minimum`.
        owner: the backend, in the error for an unknown activation.
        activations: the functions of activations by name.
        concat: joins a sequence of arrays along the last axis.
        mean: averages an array over an axis, which stays with `keepdims`.
        split: splits the last axis of an array into two of a shape, where -1 stands for the rest.
        reorder: reorders all axes of an array.
    """

    def layer_norm(layer: LayerNorm, put: Put) -> Function:
        scale, offset, epsilon = put(layer.scale), put(layer.offset), float(layer.epsilon)

        def normalize(x: Array) -> Array:
            centered = x - mean(x, -1, keepdims=True)
            variance = mean(library.square(centered), -1, keepdims=True)
            return centered / library.sqrt(variance + epsilon) * scale + offset

        return normalize

    def affine(layer: Affine, put: Put) -> Function:
        scale, shift = put(layer.scale), put(layer.shift)
        return lambda x: x * scale + shift

    def clip(layer: Clip, put: Put) -> Function:
        low, high, minimum, maximum = put(layer.low), put(layer.high), library.minimum, library.maximum
        return lambda x: minimum(maximum(x, low), high)

    def transpose(layer: Transpose, _: Put) -> Function:
        axes = (0, *(axis + 1 for axis in layer.axes))
        return lambda x: reorder(x, axes)

    def quantile_mean(layer: QuantileMean, _: Put) -> Function:
        shape, axis = ((-1, layer.quantiles), -1) if layer.last else ((layer.quantiles, -1), -2)
        return lambda x: mean(split(x, shape), axis)

    return {
        Exp: lambda _layer, _put: library.exp,
        LayerNorm: layer_norm,
        Activation: lambda layer, _: look_up(activations, layer.name, owner)(layer),
        Concat: lambda _layer, _put: lambda *xs: concat(xs),
        Affine: affine,
        Clip: clip,
        Transpose: transpose,
        Slice: lambda layer, _: lambda x: x[..., layer.start : layer.stop],
        Add: lambda _layer, _put: lambda *xs: reduce(operator.add, xs),
        Multiply: lambda _layer, _put: lambda *xs: reduce(operator.mul, xs),
        QuantileMean: quantile_mean,
    }
