"""Translate a network to a graph: one table row per kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from ckpttool.core.kinds import ACTIVATION_KINDS
from ckpttool.graphs.builder import ACTIVATION_NODES, GraphBuilder
from ckpttool.graphs.graph import Graph, OperatorNode, Value
from ckpttool.networks.network import (
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

BATCH = "batch"
"""Name of the open extent of inputs and outputs."""


def network_graph(
    network: Network,
    scopes: Sequence[str],
    output: str = "action",
    scores: str | None = None,
    *,
    formulas: bool = False,
) -> Graph:
    """Return what a network computes; constants contain their values.

    Inputs have the network's names and are [batch, ...], a stack's [members, batch, ...].

    Args:
        network: the network.
        scopes: a name per node, the scope of its operators and constants.
        output: the name of the result, followed by `next_NAME` for each state slot.
        scores: where the network ends by choosing discrete actions, the name of a further output before it:
            what it chooses by.
        formulas: whether dueling distributions are sums and means, for people, instead of a product.
    """
    shapes, nodes = value_shapes(network), LayerNodes(network, formulas=formulas)
    values = [name for name, _ in network.inputs]
    for node, scope in zip(network.nodes, scopes, strict=True):
        nodes.builder.scope, nodes.rank = (scope,), len(shapes[node.inputs[0]])
        lower = look_up(LAYERS, type(node.layer), "graph")
        values.append(lower(nodes, node.layer, *[values[number] for number in node.inputs]))
    results = {output: network.output, **{f"next_{slot.name}": slot.value for slot in network.states}}
    if scores is not None:
        (chosen,) = network.nodes[network.output - len(network.inputs)].inputs
        results = {scores: chosen, **results}
    rows: tuple[int | str, ...] = (BATCH,) if network.members == 1 else (network.members, BATCH)

    def described(name: str, number: int) -> Value:
        return Value(name, nodes.dtype, (*rows, *shapes[number]))

    inputs = [described(name, number) for number, (name, _) in enumerate(network.inputs)]
    outputs = [described(name, number) for name, number in results.items()]
    nodes.name_results({name: values[number] for name, number in results.items()})
    return nodes.builder.graph(inputs, outputs, "ckpttool")


class LayerNodes:
    """The operators of a network's layers; `rank` is the number of axes of the layer's first input."""

    def __init__(self, network: Network, *, formulas: bool) -> None:
        self.builder, self.dtype, self.formulas = GraphBuilder(), dtype_of(network), formulas
        self.leading = 1 if network.members == 1 else 2
        """number of axes before a value's shape: the batch, and the members of a stack before it"""
        self.rank = 1
        self.add, self.integers = self.builder.one, self.builder.integers

    def constant(self, name: str, value: np.ndarray | float) -> str:
        """Return the name of a constant of the network's float type."""
        return self.builder.named(name, np.asarray(value).astype(self.dtype))

    def number(self, value: float) -> str:
        """Return the name of a number of the network's float type."""
        return self.builder.number(value, self.dtype)

    def name_results(self, results: dict[str, str]) -> None:
        """Name the values of the results; an input, or a value that has a name already, is copied."""
        own: dict[str, str] = {}
        computed = {name for node in self.builder.nodes for name in node.outputs}
        for name, value in results.items():
            if value in computed and value not in own:
                own[value] = name
            else:
                copied = OperatorNode("Identity", (value,), (name,), {})
                self.builder.nodes.append(copied)
        self.builder.nodes[:] = [
            replace(
                node,
                inputs=tuple(own.get(name, name) for name in node.inputs),
                outputs=tuple(own.get(name, name) for name in node.outputs),
            )
            for node in self.builder.nodes
        ]


def _dense(nodes: LayerNodes, layer: Dense, x: str) -> str:
    atoms = layer.kernel.shape[-2] - layer.kernel.shape[-1]
    if layer.constant and (nodes.formulas or atoms == 1) and _is_dueling(layer.kernel):
        return _dueling(nodes, layer.kernel, x)
    kernel = nodes.constant("kernel", layer.kernel)
    if layer.bias is None:
        return nodes.add("MatMul", x, kernel)
    if layer.kernel.ndim > 2 or nodes.rank > 1:  # Gemm accepts one matrix and rows only
        return nodes.add("Add", nodes.add("MatMul", x, kernel), nodes.constant("bias", layer.bias))
    return nodes.add("Gemm", x, kernel, nodes.constant("bias", layer.bias))


def _is_dueling(kernel: np.ndarray) -> bool:
    """Return whether a matrix subtracts the mean of the advantages and adds the value (networks/build.py)."""
    rows, out = kernel.shape[-2:]
    atoms = rows - out
    if kernel.ndim > 2 or atoms < 1 or out % atoms:
        return False
    count = out // atoms
    centred = np.kron(np.eye(count) - 1 / count, np.eye(atoms))
    whole = np.concatenate([centred, np.tile(np.eye(atoms), count)])
    return np.array_equal(kernel, whole.astype(kernel.dtype))


def _dueling(nodes: LayerNodes, kernel: np.ndarray, x: str) -> str:
    rows, out = kernel.shape
    atoms = rows - out
    advantages, value = (_slice(nodes, Slice(*ends), x) for ends in ((0, out), (out, rows)))
    grouped = advantages if atoms == 1 else _grouped(nodes, advantages, -1, atoms)
    mean = nodes.add("ReduceMean", grouped, nodes.integers([nodes.leading]), keepdims=1)
    centred = nodes.add("Sub", grouped, mean)
    state = value if atoms == 1 else _grouped(nodes, value, -1, atoms)
    total = nodes.add("Add", centred, state)
    return total if atoms == 1 else nodes.add("Flatten", total, axis=1)


def _layer_norm(nodes: LayerNodes, layer: LayerNorm, x: str) -> str:
    scale, offset = nodes.constant("scale", layer.scale), nodes.constant("offset", layer.offset)
    return nodes.add("LayerNormalization", x, scale, offset, axis=-1, epsilon=float(layer.epsilon))


def _affine(nodes: LayerNodes, layer: Affine, x: str) -> str:
    # Statistics are two of these, each with one half that has no effect.
    unscaled, shifted = (layer.scale == 1).all(), (layer.shift != 0).any()
    if unscaled:
        return nodes.add("Sub", x, nodes.constant("mean", -layer.shift)) if shifted else x
    if (layer.scale == -1).all() and shifted:
        return nodes.add("Sub", nodes.constant("shift", layer.shift), x)
    x = nodes.add("Mul", x, nodes.constant("scale", layer.scale))
    return nodes.add("Add", x, nodes.constant("shift", layer.shift)) if shifted else x


def _clip(nodes: LayerNodes, layer: Clip, x: str) -> str:
    ends = {"low": layer.low, "high": layer.high}
    if all((end == end.flat[0]).all() for end in ends.values()):
        return nodes.add("Clip", x, *(nodes.constant(name, end.flat[0]) for name, end in ends.items()))
    # The operator Clip accepts one number for all dimensions.
    above = nodes.add("Max", x, nodes.constant("low", layer.low))
    return nodes.add("Min", above, nodes.constant("high", layer.high))


def _constant_row(nodes: LayerNodes, layer: ConstantRow, x: str) -> str:
    rows = nodes.add("Slice", nodes.add("Shape", x), nodes.integers([0]), nodes.integers([-1]))
    shape = nodes.add("Concat", rows, nodes.integers([layer.row.shape[-1]]), axis=0)
    return nodes.add("Expand", nodes.constant("row", layer.row), shape)


def _convolution(nodes: LayerNodes, layer: Convolution, x: str) -> str:
    bias = [] if layer.bias is None else [nodes.constant("bias", layer.bias)]
    kernel = nodes.constant("kernel", layer.kernel.transpose(3, 2, 0, 1))
    (above, below), (left, right) = layer.padding
    # The operator expects channels first; runtimes remove pairs of inverse transposes.
    first = nodes.add("Transpose", x, perm=(0, 3, 1, 2))
    pads, strides = (above, left, below, right), tuple(layer.strides)
    convolved = nodes.add("Conv", first, kernel, *bias, strides=strides, pads=pads)
    return nodes.add("Transpose", convolved, perm=(0, 2, 3, 1))


def _slice(nodes: LayerNodes, layer: Slice, x: str) -> str:
    return nodes.add("Slice", x, *(nodes.integers([n]) for n in (layer.start, layer.stop, -1)))


def _activation(nodes: LayerNodes, layer: Activation, x: str) -> str:
    if layer.name == "leaky_relu":
        return nodes.add(ACTIVATION_KINDS[layer.name].onnx, x, alpha=float(layer.slope))
    return look_up(ACTIVATION_NODES, layer.name, "graph")(nodes.add, nodes.number, x)


def _grouped(nodes: LayerNodes, x: str, *shape: int) -> str:
    """Return the last axis as two axes of this shape."""
    return nodes.add("Reshape", x, nodes.integers([*[0] * nodes.leading, *shape]))


def _quantile_mean(nodes: LayerNodes, layer: QuantileMean, x: str) -> str:
    shape, axis = ((-1, layer.quantiles), -1) if layer.last else ((layer.quantiles, -1), -2)
    return nodes.add("ReduceMean", _grouped(nodes, x, *shape), nodes.integers([axis]), keepdims=0)


def _atom_mean(nodes: LayerNodes, layer: AtomMean, x: str) -> str:
    weights = nodes.add("Softmax", _grouped(nodes, x, -1, layer.support.shape[-1]), axis=-1)
    if layer.limit:
        weights = nodes.add("Max", weights, nodes.constant("limit", np.full(1, layer.limit)))
    weighted = nodes.add("Mul", weights, nodes.constant("support", layer.support[..., None, :]))
    return nodes.add("ReduceSum", weighted, nodes.integers([-1]), keepdims=0)


def _cosines(nodes: LayerNodes, layer: Cosines, x: str) -> str:
    steps = nodes.constant("steps", np.pi * np.arange(1, layer.number + 1))
    column = nodes.add("Unsqueeze", x, nodes.integers([nodes.leading + nodes.rank]))
    return nodes.add("Cos", nodes.add("Mul", column, steps))


def _repeat(nodes: LayerNodes, layer: Repeat, x: str) -> str:
    row = nodes.add("Unsqueeze", x, nodes.integers([1]))
    return nodes.add("Expand", row, nodes.integers([1, layer.count, 1]))


def _arg_max(nodes: LayerNodes, layer: ArgMax, x: str) -> str:
    choices, low = [], 0
    for count, start in zip(layer.counts, layer.starts, strict=True):
        part = x if len(layer.counts) == 1 else _slice(nodes, Slice(low, low + count), x)
        number = nodes.add("ArgMax", part, axis=-1, keepdims=1)
        number = nodes.add("Add", number, nodes.integers([start])) if start else number
        choices.append(nodes.add("Cast", number, to=nodes.dtype))
        low += count
    return choices[0] if len(choices) == 1 else nodes.add("Concat", *choices, axis=-1)


LAYERS: dict[type[Layer], Callable[..., str]] = {
    Dense: _dense,
    ConstantRow: _constant_row,
    Exp: lambda nodes, _layer, x: nodes.add("Exp", x),
    LayerNorm: _layer_norm,
    Activation: _activation,
    Concat: lambda nodes, _layer, *xs: nodes.add("Concat", *xs, axis=-1),
    Flatten: lambda nodes, _layer, x: nodes.add("Flatten", x, axis=1),
    Affine: _affine,
    Clip: _clip,
    Transpose: lambda nodes, layer, x: nodes.add("Transpose", x, perm=(0, *(a + 1 for a in layer.axes))),
    Slice: _slice,
    Add: lambda nodes, _layer, *xs: reduce(lambda a, b: nodes.add("Add", a, b), xs),
    Multiply: lambda nodes, _layer, *xs: reduce(lambda a, b: nodes.add("Mul", a, b), xs),
    Convolution: _convolution,
    QuantileMean: _quantile_mean,
    AtomMean: _atom_mean,
    Softmax: lambda nodes, _layer, x: nodes.add("Softmax", x, axis=-1),
    Cosines: _cosines,
    Repeat: _repeat,
    ArgMax: _arg_max,
}
