"""The finished network: a frozen small graph of typed layers that no framework owns.

Values are numbered: first the inputs in their order, then one per node. A backend turns the whole
graph into one function (see agents.policy); a new kind of layer is one more class here and one more
row in each backend's table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

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


@dataclass(frozen=True, slots=True)
class Transpose:
    """Reorder the axes behind the batch: the result's axis i is the given one's axes[i], counted from 0."""

    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """Take the columns from `start` to before `stop` of the last axis."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Add:
    """Add all inputs, which have one shape."""


@dataclass(frozen=True, slots=True)
class Multiply:
    """Multiply all inputs, which have one shape, element by element."""


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """Cross-correlate images [batch, height, width, in] to [batch, height, width, out].

    kernel [height, width, in, out], bias [out] or None; `strides` are (down, right), `padding` the rows of
    zeros ((above, below), (left, right)).
    """

    kernel: np.ndarray
    bias: np.ndarray | None = None
    strides: tuple[int, int] = (1, 1)
    padding: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))


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


Layer = (
    Dense
    | LayerNorm
    | Activation
    | Concat
    | Flatten
    | Affine
    | Clip
    | Transpose
    | Slice
    | Add
    | Multiply
    | Convolution
)


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

    `inputs` are names and widths, such as `("obs", 17)`, or shapes without the batch, `("obs", (64, 64, 3))`;
    a network that carries state lists its state slots' names among the inputs as well. `output` is the number
    of the value to return. `members` above 1 means several networks' arrays in one, each with a member axis
    first (see agents.stacking).
    """

    inputs: tuple[tuple[str, int | tuple[int, ...]], ...]
    nodes: tuple[Node, ...]
    output: int
    states: tuple[StateSlot, ...] = ()
    members: int = 1

    def cast(self, dtype: Literal["float32", "float64"]) -> Network:
        """Return the same network with every array in `dtype`."""
        return self.with_arrays(lambda _, array: array.astype(dtype))

    def with_arrays(self, change: Callable[[str, np.ndarray], np.ndarray]) -> Network:
        """Return the same network with `change(field, array)` for every array of every layer."""
        return replace(self, nodes=tuple(replace(n, layer=_changed(n.layer, change)) for n in self.nodes))

    @property
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every input without its batch, in their order."""
        slots = {slot.name: slot.shape for slot in self.states}
        given = {name: (width,) if isinstance(width, int) else tuple(width) for name, width in self.inputs}
        return {name: slots.get(name, shape) for name, shape in given.items()}

    @property
    def width(self) -> int:
        """The width of the output: that of the last layer that has one."""
        for node in reversed(self.nodes):
            if isinstance(node.layer, Dense):
                return int(node.layer.kernel.shape[-1])
        raise ValueError("a network without a dense layer has no width of its own")


def _changed(layer: Layer, change: Callable[[str, np.ndarray], np.ndarray]) -> Layer:
    held = {field.name: getattr(layer, field.name) for field in fields(layer)}
    arrays: dict[str, Any] = {n: change(n, a) for n, a in held.items() if isinstance(a, np.ndarray)}
    return replace(layer, **arrays) if arrays else layer
