"""What shape each kind of layer makes of those that it is given, all without the batch.

A rule takes a layer and the shapes of its inputs; its ValueError carries what was expected and what came.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ckpttool.agents.network import (
    Activation,
    Add,
    Affine,
    Clip,
    Concat,
    Convolution,
    Dense,
    Flatten,
    Layer,
    LayerNorm,
    Multiply,
    Slice,
    Transpose,
)

Shape = tuple[int, ...]


def _dense(layer: Dense, given: Sequence[Shape]) -> Shape:
    rows, columns = layer.kernel.shape
    if list(given) != [(rows,)]:
        raise ValueError(f"[batch, {rows}]", _show(given))
    if layer.bias is not None and layer.bias.shape != (columns,):
        raise ValueError(f"a bias of {columns}", str(list(layer.bias.shape)))
    return (columns,)


def _wide(size: int, given: Sequence[Shape]) -> Shape:
    if len(given) != 1 or size not in {1, given[0][-1]}:
        raise ValueError(f"[batch, {size}]", _show(given))
    return given[0]


def _concat(_layer: Concat, given: Sequence[Shape]) -> Shape:
    if len({shape[:-1] for shape in given}) != 1:
        raise ValueError("shapes that differ in the last axis alone", _show(given))
    return (*given[0][:-1], sum(shape[-1] for shape in given))


def _same(_layer: Layer, given: Sequence[Shape]) -> Shape:
    if len(set(given)) != 1:
        raise ValueError("one shape", _show(given))
    return given[0]


def _transpose(layer: Transpose, given: Sequence[Shape]) -> Shape:
    if len(given) != 1 or sorted(layer.axes) != list(range(len(given[0]))):
        raise ValueError(f"{len(layer.axes)} axes behind the batch", _show(given))
    return tuple(given[0][axis] for axis in layer.axes)


def _slice(layer: Slice, given: Sequence[Shape]) -> Shape:
    if len(given) != 1 or not 0 <= layer.start < layer.stop <= given[0][-1]:
        raise ValueError(f"at least {layer.stop} columns", _show(given))
    return (*given[0][:-1], layer.stop - layer.start)


def _convolution(layer: Convolution, given: Sequence[Shape]) -> Shape:
    *size, taken, made = layer.kernel.shape
    if len(given) != 1 or len(given[0]) != len(size) + 1 or given[0][-1] != taken:
        raise ValueError(f"[batch, height, width, {taken}]", _show(given))
    if layer.bias is not None and layer.bias.shape != (made,):
        raise ValueError(f"a bias of {made}", str(list(layer.bias.shape)))
    whole = [n + sum(more) for n, more in zip(given[0], layer.padding, strict=False)]
    if any(n < k for n, k in zip(whole, size, strict=True)):
        raise ValueError(f"images of {size[0]} x {size[1]} or more", _show(given))
    steps = zip(whole, size, layer.strides, strict=True)
    return (*((n - k) // stride + 1 for n, k, stride in steps), made)


def _show(given: Sequence[Shape]) -> str:
    return " and ".join(str(["batch", *shape]).replace("'", "") for shape in given)


RULES: dict[type[Layer], Callable[[Any, Sequence[Shape]], Shape]] = {
    Dense: _dense,
    LayerNorm: lambda layer, given: _wide(layer.scale.size, given),
    Activation: lambda _layer, given: given[0],
    Concat: _concat,
    Flatten: lambda _layer, given: (math.prod(given[0]),),
    Affine: lambda layer, given: _wide(layer.scale.size, given),
    Clip: lambda layer, given: _wide(layer.low.size, given),
    Transpose: _transpose,
    Slice: _slice,
    Add: _same,
    Multiply: _same,
    Convolution: _convolution,
}
