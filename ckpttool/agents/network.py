"""The finished network: a frozen small graph of typed layers that no framework owns.

Values are numbered: first the inputs in their order, then one per node. A backend turns the whole
graph into one function (see agents.policy); a new kind of layer is one more class here and one more
row in each backend's table.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np

ActivationName = Literal["relu", "tanh", "sigmoid", "elu", "leaky_relu", "gelu", "silu", "softplus", "linear"]


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """`x @ kernel + bias`; kernel [in, out], bias [out] or None."""

    kernel: np.ndarray
    bias: np.ndarray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """Normalise the last axis, then `* scale + offset`; scale, offset [n]; epsilon inside the root."""

    scale: np.ndarray
    offset: np.ndarray
    epsilon: float


@dataclass(frozen=True, slots=True)
class Activation:
    """A function of every element; `slope` is leaky_relu's alone (PyTorch 0.01, Keras layers 0.3)."""

    name: ActivationName
    slope: float = 0.01


@dataclass(frozen=True, slots=True)
class Concat:
    """Join all inputs along the last axis."""


@dataclass(frozen=True, slots=True)
class Flatten:
    """[batch, ...] to [batch, n], in C order."""


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """`x * scale + shift`; scale, shift [n]: action bounds and observation statistics."""

    scale: np.ndarray
    shift: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """Limit every element; low, high [n]."""

    low: np.ndarray
    high: np.ndarray


Layer = Dense | LayerNorm | Activation | Concat | Flatten | Affine | Clip


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One layer and the numbers of the values that it takes."""

    layer: Layer
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StateSlot:
    """What a recurrent network carries from step to step.

    `shape` is without the batch, `value` the number of the value that becomes the next state.
    """

    name: str
    shape: tuple[int, ...]
    value: int


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """A graph with named inputs and one output.

    `inputs` are names and widths, such as `("obs", 17)`; a network that carries state lists its state
    slots' names among the inputs as well. `output` is the number of the value to return.
    """

    inputs: tuple[tuple[str, int], ...]
    nodes: tuple[Node, ...]
    output: int
    states: tuple[StateSlot, ...] = ()

    def cast(self, dtype: Literal["float32", "float64"]) -> Network:
        """Return the same network with every array in `dtype`."""
        return replace(self, nodes=tuple(replace(n, layer=_cast(n.layer, dtype)) for n in self.nodes))

    @property
    def width(self) -> int:
        """The width of the output: that of the last layer that has one."""
        for node in reversed(self.nodes):
            if isinstance(node.layer, Dense):
                return int(node.layer.kernel.shape[1])
        raise ValueError("a network without a dense layer has no width of its own")


def _cast(layer: Layer, dtype: str) -> Layer:
    arrays = {
        f.name: getattr(layer, f.name).astype(dtype)
        for f in fields(layer)
        if isinstance(getattr(layer, f.name), np.ndarray)
    }
    return replace(layer, **arrays) if arrays else layer
