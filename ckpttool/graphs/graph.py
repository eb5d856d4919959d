"""Graph: what a model computes, in ONNX's operators, whatever language its file is written in.

A front end (one module per language, `FRONT_ENDS`) translates a file's computation to a `Graph`. Names,
attributes and meaning of operators are those of ONNX's operator set 28 (onnx/docs/Operators.md); a front
end translates older versions and other languages. An operator without a row in the table
(graphs/operators.py) is opaque: it is listed by its name and attributes, and refused by what needs to
understand it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.dtypes import np
from ckpttool.core.errors import CkpttoolError, UnsupportedError
from ckpttool.core.source import Inline, Shape
from ckpttool.core.tree import Leaf, Path, ValueLeaf
from ckpttool.mapping.rules import KEEP, Rule

# The version of ONNX's default operator set that gives operators their meaning.
OPSET = 28
# Modules that read a language of computation, by the format of the checkpoint. Their
# `read(checkpoint)` returns None for a file in another language.
FRONT_ENDS: Mapping[str, tuple[str, ...]] = {
    "onnx": ("ckpttool.graphs.onnx",),
    "pytorch": ("ckpttool.graphs.torchscript", "ckpttool.graphs.torch_modules"),
    "pytorch_legacy": ("ckpttool.graphs.torch_modules",),
    "keras_zip": ("ckpttool.graphs.keras",),
    "keras_h5": ("ckpttool.graphs.keras",),
    "saved_model": ("ckpttool.graphs.tensorflow",),
    "tensor_bundle": ("ckpttool.graphs.tensorflow_saver",),
    "tensorflow_v1": ("ckpttool.graphs.tensorflow_saver",),
}

# An open extent is a name, or "" if it has none.
OpenShape = tuple[int | str, ...]


class UnknownShapeError(Exception):
    """A shape cannot be computed: a layer that is not understood, or shapes that depend on values."""


class ShapeMismatchError(UnknownShapeError):
    """A layer cannot be applied to an input of this shape."""


class OpaqueError(Exception):
    """An operation, a layer, a setting or an argument is not understood; the text names it if it is known."""


def require(condition: object, reason: str = "") -> None:
    """Raise OpaqueError unless a condition holds, which is understood."""
    if not condition:
        raise OpaqueError(reason)


class Value(NamedTuple):
    """An input or output of a graph; `dtype` and `shape` are None if unknown.

    An extent is a number, the name of an open one, or "" for an open one without a name.
    """

    name: str
    dtype: str | None = None
    shape: OpenShape | None = None


class Constant(NamedTuple):
    """A tensor that the graph uses: a leaf of the checkpoint's tree, or a value of the program itself.

    `path` is the leaf's path in the tree, None for a value of the program. `rule` changes the stored
    tensor to the one that the graph uses. The leaf is read by `read`, not before.
    """

    leaf: Leaf | ValueLeaf
    path: Path | None = None
    rule: Rule = KEEP

    @property
    def shape(self) -> Shape | None:
        """The shape that the graph uses; None for a tensor that is listed but not read."""
        leaf = self.rule.leaf(self.leaf) if isinstance(self.leaf, Leaf) else self.leaf
        return leaf.shape if isinstance(leaf, Leaf) else None

    @property
    def integers(self) -> tuple[int, ...] | None:
        """The numbers of a list of integers of the program itself, which need no NumPy; else None."""
        leaf = self.leaf
        if self.path is not None or not isinstance(leaf, Leaf) or not isinstance(leaf.source, Inline):
            return None
        return struct.unpack(f"<{leaf.size}q", leaf.source.data) if _is_list(leaf) else None

    def read(self, name: str) -> np.ndarray:
        """Return the values that the graph uses; raise UnsupportedError if the tensor cannot be read."""
        leaf = self.rule.leaf(self.leaf) if isinstance(self.leaf, Leaf) else self.leaf
        if not isinstance(leaf, Leaf):
            raise UnsupportedError(
                "a constant of the graph is listed but not read", path=name, found=str(leaf.value)
            )
        try:
            return leaf.array()
        except CkpttoolError as error:
            raise error.located(path=error.path or name) from error.__cause__


def _is_list(leaf: Leaf) -> bool:
    return leaf.dtype == "int64" and len(leaf.shape) == 1


@dataclass(frozen=True, slots=True, eq=False)
class OperatorNode:
    """One operation: its operator, the names of its inputs and outputs ("" if omitted), and attributes.

    An attribute is a number, a string, a tuple of these, a `Leaf` (a tensor) or a `Graph` (a branch or a
    loop's body). Element types are attributes by their name in core/dtypes ("float32"). `name` is the
    node's name in its file, `scope` the module that it belongs to (("actor", "0")), `place` where the
    file contains it.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    name: str = ""
    scope: tuple[str, ...] = ()
    place: str = ""

    @property
    def title(self) -> str:
        """The node's name, otherwise the name of its first output."""
        return self.name or next(filter(None, self.outputs), "")


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A computation: nodes in the order of execution, and the tensors that they use, by name.

    Each name has one meaning: an input, a constant, or an output of one node. A graph that is an
    attribute may also use names of the graph around it.
    """

    nodes: tuple[OperatorNode, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    constants: Mapping[str, Constant]
    name: str = ""


# The attribute of an opaque node that is an activation, or code in the file: what the file states of it.
FUNCTION = "function"


def trim_inputs(inputs: Sequence[str]) -> tuple[str, ...]:
    """Return a node's inputs without those at the end that are omitted."""
    count = max((number for number, name in enumerate(inputs, 1) if name), default=0)
    return tuple(inputs[:count])


def inline_constant(array: np.ndarray) -> Constant:
    """Return a constant with these values, which the checkpoint's tree does not contain."""
    dense = np.ascontiguousarray(array).reshape(array.shape)
    return Constant(Leaf(dense.dtype.name, dense.shape, Inline(dense.tobytes()), "", "other"))


def inline_integers(numbers: Sequence[int]) -> Constant:
    """Return a constant list of integers, int64, which the checkpoint's tree does not contain."""
    data = b"".join(int(number).to_bytes(8, "little", signed=True) for number in numbers)
    return Constant(Leaf("int64", (len(numbers),), Inline(data), "", "other"))


def read_graph(checkpoint: Checkpoint) -> Graph | None:
    """Return what a checkpoint computes, None if its format records no computation.

    No tensor is read. Raise FormatError for a graph that violates its format, and UnsupportedError if
    what it computes cannot be listed.
    """
    for module in FRONT_ENDS.get(checkpoint.format, ()):
        graph: Graph | None = import_module(module).read(checkpoint)
        if graph is not None:
            return graph
    return None
