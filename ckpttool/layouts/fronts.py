"""What a policy computes besides a chain of layers: image encoders, the joining of several inputs, memory.

The tensors lie beside the policy's layers in the canonical tree of an agent that is to be played:
actor/front/<input>/<n>/kernel        a convolution [height, width, in, out], or a dense layer after those
actor/memory/<n>/kernel, ...          an lstm or gru: recurrent_kernel, bias_input, bias_recurrent beside it
actor/norm/<n>/mean, var, ...         a batch norm before the n-th dense layer: scale and offset beside them
No conversion takes them: there they are unmapped tensors of a network that cannot be written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpttool.leaf import Path, attr, index
from ckpttool.mapping.report import Move
from ckpttool.source import Shape

KERNEL, RECURRENT, BIAS = attr("kernel"), attr("recurrent_kernel"), attr("bias")
BIASES = (attr("bias_input"), attr("bias_recurrent"))


@dataclass(frozen=True, slots=True)
class Stream:
    """One input on its way to a row of features: flattened, or through an image encoder.

    `shape` is what the policy was trained with; that of an image has the channels first. `strides` are those
    of its convolutions, each followed by ReLU; what they give is flattened with the channels first, and goes
    through `dense` layers, each followed by ReLU. `scale` multiplies the input.
    """

    name: str
    shape: Shape
    scale: float = 1.0
    strides: tuple[int, ...] = ()
    dense: int = 0

    @property
    def size(self) -> int:
        """The number of values in one observation."""
        return math.prod(self.shape)

    @property
    def image(self) -> bool:
        """Say whether the input is an image, whose channels an environment may give last."""
        return bool(self.strides)


class BatchNorm(NamedTuple):
    """A batch norm before the dense layer of that number, from 0; epsilon inside the root."""

    number: int
    epsilon: float


@dataclass(frozen=True, slots=True)
class Front:
    """The streams, whose features are joined in their order, and the recurrent layers after them, by kind.

    `norms` stand among the policy's own layers. `moves` bring the tensors to the canonical tree, `covers` are
    the entries of Binding.unplaced that this front takes care of, `assumed` says what no file tells of it.
    """

    streams: tuple[Stream, ...]
    cells: tuple[str, ...] = ()
    norms: tuple[BatchNorm, ...] = ()
    moves: tuple[Move, ...] = ()
    covers: frozenset[str] = frozenset()
    assumed: tuple[str, ...] = ()

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of every input by name."""
        return {stream.name: stream.shape for stream in self.streams}

    def moved(self, place: Callable[[Path], Path]) -> Front:
        """Return the front of the tree whose leaves lie at `place` of where this one's lie."""
        return replace(self, moves=tuple(replace(move, source=place(move.source)) for move in self.moves))


def layer(component: str, stream: str, number: int) -> Path:
    """Return the canonical place of a stream's layer."""
    return (attr(component), attr("front"), attr(stream), index(number))


def memory(component: str, number: int) -> Path:
    """Return the canonical place of a recurrent layer."""
    return (attr(component), attr("memory"), index(number))


def norm(component: str, number: int) -> Path:
    """Return the canonical place of the batch norm before a dense layer."""
    return (attr(component), attr("norm"), index(number))
