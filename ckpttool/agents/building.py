"""Puts a network together node by node; recurrent cells are graphs of plain layers with state slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

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
    Network,
    Node,
    Slice,
    StateSlot,
    Transpose,
)
from ckpttool.layouts.canonical import Program


class Builder:
    """Collects nodes; a value's number is its place after the inputs and the states, `last` the newest.

    `states` are the names and widths of what is carried from step to step, in their order.
    """

    def __init__(
        self, inputs: Iterable[tuple[str, int | tuple[int, ...]]], states: Iterable[tuple[str, int]] = ()
    ) -> None:
        self.states = dict(states)
        self.inputs = (*inputs, *self.states.items())
        self.nodes: list[Node] = []
        self.last = 0
        self._next: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Return the number of an input or a state."""
        return [each for each, _ in self.inputs].index(name)

    def add(self, layer: Layer, *inputs: int) -> int:
        """Add a layer that takes these values, or the last one; return the number of what it gives."""
        self.nodes.append(Node(layer, inputs or (self.last,)))
        self.last = len(self.inputs) + len(self.nodes) - 1
        return self.last

    def carry(self, name: str, value: int) -> int:
        """Make a value the next state of that name, and the last value."""
        self._next[name] = self.last = value
        return value

    def done(self) -> Network:
        """Return the network, whose output is the last value."""
        slots = tuple(StateSlot(name, (width,), self._next[name]) for name, width in self.states.items())
        return Network(self.inputs, tuple(self.nodes), self.last, slots)


def lstm(
    builder: Builder, states: tuple[str, str], kernel: np.ndarray, recurrent: np.ndarray, bias: np.ndarray
) -> int:
    """Add one LSTM cell on the last value; return what it gives, which is its next hidden state.

    kernel [in, 4 * units], recurrent [units, 4 * units], bias [4 * units], gates in the order i, f, g, o of
    Keras and PyTorch; `states` name the slots of the hidden state and the cell's, of `units` each.
    """
    hidden, cell = states
    units = len(recurrent)
    joined = builder.add(Concat(), builder.last, builder.number(hidden))
    gates = builder.add(Dense(np.concatenate([kernel, recurrent]), bias), joined)
    i, f, g, o = (
        builder.add(Activation("tanh" if n == 2 else "sigmoid"), _columns(builder, gates, n, units))
        for n in range(4)
    )
    kept = builder.add(Multiply(), f, builder.number(cell))
    remembered = builder.add(Add(), kept, builder.add(Multiply(), i, g))
    builder.carry(cell, remembered)
    return builder.carry(hidden, builder.add(Multiply(), o, builder.add(Activation("tanh"), remembered)))


def gru(
    builder: Builder,
    state: str,
    kernel: np.ndarray,
    recurrent: np.ndarray,
    biases: tuple[np.ndarray, np.ndarray],
    *,
    reset_after: bool = True,
) -> int:
    """Add one GRU cell on the last value; return its next state.

    kernel [in, 3 * units], recurrent [units, 3 * units] and the biases [3 * units] of either, gates in
    Keras's order z, r, h (keras/src/layers/rnn/gru.py). `reset_after` multiplies the recurrent product by the
    reset gate, as PyTorch and cuDNN do; without it the gate multiplies the state before the product.
    """
    units, before = len(recurrent), builder.number(state)
    given = builder.add(Dense(kernel, biases[0]), builder.last)
    z, r = (_gate(builder, given, before, (recurrent, biases[1]), n, units) for n in range(2))
    own = Dense(recurrent[:, 2 * units :], biases[1][2 * units :])
    if reset_after:
        turned = builder.add(Multiply(), r, builder.add(own, before))
    else:
        turned = builder.add(own, builder.add(Multiply(), r, before))
    fresh = builder.add(Activation("tanh"), builder.add(Add(), _columns(builder, given, 2, units), turned))
    one = np.ones(units, kernel.dtype)
    rest = builder.add(Affine(-one, one), z)
    kept = builder.add(Multiply(), z, before)
    return builder.carry(state, builder.add(Add(), kept, builder.add(Multiply(), rest, fresh)))


def _gate(
    builder: Builder, given: int, before: int, own: tuple[np.ndarray, np.ndarray], number: int, units: int
) -> int:
    columns = slice(number * units, (number + 1) * units)
    turned = builder.add(Dense(own[0][:, columns], own[1][columns]), before)
    return builder.add(
        Activation("sigmoid"), builder.add(Add(), _columns(builder, given, number, units), turned)
    )


def _columns(builder: Builder, value: int, number: int, units: int) -> int:
    return builder.add(Slice(number * units, (number + 1) * units), value)


def add_program(builder: Builder, program: Program) -> int:
    """Add the operations of a model's own graph on the last value; return the number of what they give."""
    values = [builder.last, *(builder.number(name) for name in program.states)]
    for operation in program.operations:
        builder.last = values[operation.inputs[0]]
        if operation.kind in ("lstm", "gru"):
            values.append(_cell(builder, operation.kind, operation.value))
            continue
        layer = _LAYERS[operation.kind](operation.value)
        values.append(builder.add(layer, *(values[number] for number in operation.inputs)))
    builder.last = values[program.output]
    return builder.last


def _cell(builder: Builder, kind: str, value: Mapping[str, Any]) -> int:
    kernel, recurrent, biases = value["kernel"], value["recurrent"], value["biases"]
    if kind == "lstm":
        hidden, cell = value["states"]
        return lstm(builder, (hidden, cell), kernel, recurrent, biases[0] + biases[1])
    return gru(builder, value["states"][0], kernel, recurrent, biases, reset_after=value["after"])


def _wide(*arrays: np.ndarray) -> list[np.ndarray]:
    """Return arrays of one size in float32."""
    return [np.array(each, np.float32) for each in np.broadcast_arrays(*arrays)]


# A row for each kind of operation in a program (layouts/onnx_operators.py) that is one layer.
_LAYERS: dict[str, Callable[[Mapping[str, Any]], Layer]] = {
    "dense": lambda v: Dense(v["kernel"], v["bias"]),
    "layer_norm": lambda v: LayerNorm(v["scale"], v["offset"], v["epsilon"]),
    "activation": lambda v: Activation(v["name"], v["slope"]),
    "affine": lambda v: Affine(*_wide(v["scale"], v["shift"])),
    "clip": lambda v: Clip(*_wide(v["low"], v["high"])),
    "slice": lambda v: Slice(v["start"], v["stop"]),
    "concat": lambda _v: Concat(),
    "flatten": lambda _v: Flatten(),
    "transpose": lambda v: Transpose(tuple(v["axes"])),
    "add": lambda _v: Add(),
    "multiply": lambda _v: Multiply(),
    "convolution": lambda v: Convolution(v["kernel"], v["bias"], tuple(v["strides"]), v["padding"]),
}
