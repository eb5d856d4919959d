"""Evaluates an ONNX graph on numbered entries: the orders in which layers take and make images.

Source: onnx/docs/Operators.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ckpttool.activations import Features
from ckpttool.checkpoint import Checkpoint
from ckpttool.formats import onnx
from ckpttool.formats.onnx import listing
from ckpttool.formats.onnx.model import Node
from ckpttool.layouts.onnx_operators import FOLDED
from ckpttool.layouts.recorded_orders import (
    Activation,
    Evaluation,
    Opaque,
    UntraceableError,
    extents,
    returning,
)
from ckpttool.leaf import Leaf, Path, key
from ckpttool.source import Shape

_CHANNEL = 1
_SMALL = 4096


class _Weight(NamedTuple):
    """A constant that is not small, or its two axes exchanged."""

    path: Path
    shape: Shape
    turned: bool = False


def of_onnx(checkpoint: Checkpoint) -> Mapping[Path, Features] | None:
    """Return the orders that an ONNX model's graph shows, by its constants; None for another format.

    Extents of inputs that are not fixed are 1.
    """
    if checkpoint.format != onnx.NAME:
        return None
    graph = listing.parsed(checkpoint.files[0]).graph
    evaluation = Evaluation(checkpoint.tree, _CHANNEL)
    reader = _Reader(evaluation)
    known = {tensor.name for tensor in graph.initializers}
    for value in graph.inputs:
        if value.name in known:
            continue
        if value.shape is None:
            raise UntraceableError
        shape = [extent if isinstance(extent, int) and extent > 0 else 1 for extent in value.shape]
        reader.values[value.name] = evaluation.given(shape)
    for node in graph.nodes:
        evaluation.step()
        outputs = reader.outputs(node)
        rest = [Opaque()] * len(node.outputs)
        for name, made in zip(node.outputs, [*outputs, *rest], strict=False):
            reader.values[name] = made
    return evaluation.features()


@dataclass
class _Reader:
    """Evaluates nodes: small constants as arrays, others as weights, tensors as activations."""

    evaluation: Evaluation
    values: dict[str, Any] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        """Return what a name stands for, None for an input that is left out."""
        if name and name not in self.values:
            path = (key(name),)
            leaf = self.evaluation.tree.get(path)
            if not isinstance(leaf, Leaf):
                raise UntraceableError
            small = leaf.size <= _SMALL and len(leaf.shape) < 2
            self.values[name] = _Constant(leaf.array(), path) if small else _Weight(path, leaf.shape)
        return self.values.get(name)

    def tensor(self, value: Any) -> Activation:
        """Return a value as an activation: a constant holds no image."""
        if isinstance(value, Activation):
            return value
        if isinstance(value, _Weight):
            return self.evaluation.fresh(value.shape)
        if isinstance(value, _Constant):
            return self.evaluation.fresh(value.array.shape)
        raise UntraceableError

    def outputs(self, node: Node) -> list[Any]:
        """Return what a node makes."""
        if node.op == "Constant":
            return [self._stated(node)]
        given = [self.value(name) for name in node.inputs]
        operation = _OPERATIONS.get(node.op) if node.title == node.op else None
        if all(each is None or isinstance(each, _Constant) for each in given) and node.op in FOLDED:
            if given and node.op == "Identity":
                return given
            made = FOLDED[node.op](node, *(each.array if each is not None else None for each in given))
            return [_Constant(np.asarray(made))] if made is not None else [Opaque()]
        tensors = [each for each in given if isinstance(each, Activation | Opaque)]
        if operation is None:
            return [Opaque()]
        if any(isinstance(each, Opaque) for each in tensors) and node.op not in ("MatMul", "Gemm", "Shape"):
            features = {each.features for each in tensors if isinstance(each, Opaque)}
            return [Opaque(features.pop() if node.op in _ENTRIES and len(features) == 1 else None)]
        made = operation(self, node, given)
        return made if isinstance(made, list) else [made]

    def _stated(self, node: Node) -> Any:
        if (key(node.outputs[0]),) in self.evaluation.tree:
            return self.value(node.outputs[0])
        for name, dtype in (("value_float", "f4"), ("value_int", "i8"), ("value_ints", "i8")):
            if name in node.attributes:
                return _Constant(np.asarray(node.get(name), dtype))
        return Opaque()


class _Constant(NamedTuple):
    """A constant whose numbers are used: a shape, axes, a factor; or a vector of a layer."""

    array: Any
    path: Path | None = None


_Given = Sequence[Any]
_Operation = Callable[[_Reader, Node, _Given], Any]


def _numbers(value: Any) -> list[int]:
    if not isinstance(value, _Constant):
        raise UntraceableError
    return [int(each) for each in value.array.reshape(-1)]


def _setting(node: Node, name: str, given: _Given, place: int) -> list[int] | None:
    """Return a setting that is an attribute in older versions and an input in later ones."""
    found = node.get(name)
    if found is not None:
        return [int(each) for each in found]
    return _numbers(given[place]) if len(given) > place and given[place] is not None else None


def _same(_run: _Reader, _node: Node, given: _Given) -> Any:
    return given[0]


def _entries(run: _Reader, _node: Node, given: _Given) -> Any:
    return run.evaluation.together([run.tensor(each) for each in given if each is not None])


def _conv(run: _Reader, node: Node, given: _Given) -> Any:
    x, kernel = run.tensor(given[0]), given[1].shape
    rank = len(kernel) - 2
    strides, wide = node.get("strides") or (1,) * rank, node.get("dilations") or (1,) * rank
    pads, how = list(node.get("pads") or [0] * (2 * rank)), node.get("auto_pad", b"NOTSET")
    groups, path = node.get("group", 1), given[1].path if isinstance(given[1], _Weight) else None
    if len(x.shape) != rank + 2:
        raise UntraceableError
    if node.op == "ConvTranspose":
        if how not in (b"NOTSET", b"VALID") or node.get("output_shape") is not None:
            return Opaque()
        more = node.get("output_padding") or (0,) * rank
        sizes = tuple(
            step * (size - 1) + add + (window - 1) * each + 1 - pads[n] - pads[n + rank]
            for n, (size, step, add, window, each) in enumerate(
                zip(x.shape[2:], strides, more, kernel[2:], wide, strict=True)
            )
        )
        return run.evaluation.convolved(
            x, (x.shape[0], kernel[1] * groups, *sizes), path, grouped=groups != 1
        )
    if how in (b"SAME_UPPER", b"SAME_LOWER"):
        sizes = tuple(-(-size // step) for size, step in zip(x.shape[2:], strides, strict=True))
    else:
        both = [pads[n] + pads[n + rank] for n in range(rank)]
        sizes = extents(x.shape[2:], kernel[2:], strides, both, wide)
    return run.evaluation.convolved(x, (x.shape[0], kernel[0], *sizes), path, grouped=groups != 1)


def _pool(run: _Reader, node: Node, given: _Given) -> Any:
    x = run.tensor(given[0])
    kernel = node.get("kernel_shape")
    rank = len(kernel)
    strides, wide = node.get("strides") or (1,) * rank, node.get("dilations") or (1,) * rank
    pads, how = list(node.get("pads") or [0] * (2 * rank)), node.get("auto_pad", b"NOTSET")
    if how in (b"SAME_UPPER", b"SAME_LOWER"):
        sizes = tuple(-(-size // step) for size, step in zip(x.shape[2:], strides, strict=True))
    else:
        both = [pads[n] + pads[n + rank] for n in range(rank)]
        sizes = extents(x.shape[2:], kernel, strides, both, wide, ceil=bool(node.get("ceil_mode", 0)))
    return run.evaluation.convolved(x, (*x.shape[:2], *sizes))


def _global(run: _Reader, _node: Node, given: _Given) -> Any:
    x = run.tensor(given[0])
    return run.evaluation.convolved(x, (*x.shape[:2], *(1,) * (len(x.shape) - 2)))


def _resized(run: _Reader, _node: Node, given: _Given) -> Any:
    x = run.tensor(given[0])
    if len(given) > 3 and given[3] is not None:
        return run.evaluation.convolved(x, _numbers(given[3]))
    scales = given[2] if len(given) > 2 else given[1]
    if not isinstance(scales, _Constant):
        return Opaque()
    factors = scales.array.reshape(-1).tolist()
    return run.evaluation.convolved(x, [math.floor(a * b) for a, b in zip(x.shape, factors, strict=True)])


def _product(run: _Reader, node: Node, given: _Given) -> Any:
    x, weight = given[0], given[1]
    turned = bool(node.get("transB", 0)) if node.op == "Gemm" else False
    if isinstance(weight, _Weight) and len(weight.shape) == 2 and isinstance(x, Activation | Opaque):
        if node.get("transA", 0):
            return Opaque()
        one, two = weight.shape[::-1] if turned != weight.turned else weight.shape
        return run.evaluation.dense(x, weight.path, (one, two))
    if isinstance(x, Opaque) or isinstance(weight, Opaque):
        return Opaque()
    one_, two_ = run.tensor(x).shape, run.tensor(weight).shape
    if len(one_) < 2 or len(two_) < 2:
        return Opaque()
    lead = np.broadcast_shapes(one_[:-2], two_[:-2])
    return run.evaluation.fresh((*lead, one_[-2], two_[-1]))


def _transposed(run: _Reader, node: Node, given: _Given) -> Any:
    x = given[0]
    axes = node.get("perm") or tuple(reversed(range(len(x.shape))))
    if isinstance(x, _Weight):
        if len(x.shape) == 2 and tuple(axes) == (1, 0):
            return x._replace(turned=not x.turned)
        return Opaque()
    return run.evaluation.moved(run.tensor(x), lambda entries: np.transpose(entries, axes))


def _reshaped(run: _Reader, node: Node, given: _Given) -> Any:
    x = run.tensor(given[0])
    shape = _setting(node, "shape", given, 1) or []
    if not node.get("allowzero", 0):
        shape = [x.shape[n] if extent == 0 else extent for n, extent in enumerate(shape)]
    return run.evaluation.reshaped(x, shape)


def _flattened(run: _Reader, node: Node, given: _Given) -> Any:
    x = run.tensor(given[0])
    at = node.get("axis", 1) % (len(x.shape) + 1)
    return run.evaluation.reshaped(x, (math.prod(x.shape[:at]), math.prod(x.shape[at:])))


def _squeezed(run: _Reader, node: Node, given: _Given) -> Any:
    x = run.tensor(given[0])
    axes = _setting(node, "axes", given, 1)
    gone = range(len(x.shape)) if axes is None else {each % len(x.shape) for each in axes}
    shape = [extent for n, extent in enumerate(x.shape) if n not in gone or extent != 1]
    return run.evaluation.reshaped(x, shape)


def _unsqueezed(run: _Reader, node: Node, given: _Given) -> Any:
    x = run.tensor(given[0])
    axes = _setting(node, "axes", given, 1) or []
    rank, shape = len(x.shape) + len(axes), list(x.shape)
    for at in sorted(each % rank for each in axes):
        shape.insert(at, 1)
    return run.evaluation.reshaped(x, shape)


def _joined(run: _Reader, node: Node, given: _Given) -> Any:
    return run.evaluation.joined([run.tensor(each) for each in given], node.get("axis", 1))


def _shape(run: _Reader, _node: Node, given: _Given) -> Any:
    if isinstance(given[0], Opaque):
        return Opaque()
    return _Constant(np.array(run.tensor(given[0]).shape, "int64"))


def _gathered(run: _Reader, node: Node, given: _Given) -> Any:
    x, at, axis = given[0], given[1], node.get("axis", 0)
    if isinstance(x, _Weight) and isinstance(at, Activation) and axis == 0 and len(x.shape) == 2:
        made = run.evaluation.fresh((*at.shape, x.shape[1]))
        run.evaluation.makes(x.path, made)
        return made
    if not isinstance(at, _Constant):
        return Opaque()
    if isinstance(x, _Constant):
        return _Constant(np.take(x.array, at.array, axis))
    return run.evaluation.moved(run.tensor(x), lambda entries: np.take(entries, at.array, axis))


def _sliced(run: _Reader, node: Node, given: _Given) -> Any:
    starts, ends = (_setting(node, name, given, n + 1) or [] for n, name in enumerate(("starts", "ends")))
    axes = _setting(node, "axes", given, 3) or list(range(len(starts)))
    steps = _numbers(given[4]) if len(given) > 4 and given[4] is not None else [1] * len(starts)
    x = given[0]
    rank = len(x.array.shape if isinstance(x, _Constant) else x.shape)
    at = [slice(None)] * rank
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        at[axis] = slice(start, None if step < 0 and end < -rank - (1 << 30) else end, step)
    if isinstance(x, _Constant):
        return _Constant(x.array[tuple(at)])
    return run.evaluation.moved(run.tensor(x), lambda entries: entries[tuple(at)])


def _split(run: _Reader, node: Node, given: _Given) -> Any:
    x, axis = run.tensor(given[0]), node.get("axis", 0)
    sizes = _setting(node, "split", given, 1)
    count = len(node.outputs)
    ends = np.cumsum(sizes)[:-1] if sizes else np.arange(1, count) * -(-x.shape[axis] // count)
    parts = np.split(x.entries, [int(end) for end in ends], axis)
    return [run.evaluation.moved(x, returning(part)) for part in parts]


def _padded(run: _Reader, node: Node, given: _Given) -> Any:
    x, pads = run.tensor(given[0]), _setting(node, "pads", given, 1) or []
    rank = len(x.shape)
    widths = [(pads[n], pads[n + rank]) for n in range(rank)]
    if any(min(each) < 0 for each in widths):
        return Opaque()
    return run.evaluation.moved(x, lambda entries: np.pad(entries, widths, constant_values=-1))


def _expanded(run: _Reader, _node: Node, given: _Given) -> Any:
    x, shape = run.tensor(given[0]), _numbers(given[1])
    wanted = np.broadcast_shapes(x.shape, tuple(shape))
    return run.evaluation.moved(x, lambda entries: np.broadcast_to(entries, wanted))


def _reduced(run: _Reader, node: Node, given: _Given) -> Any:
    x = run.tensor(given[0])
    axes = _setting(node, "axes", given, 1)
    keep = bool(node.get("keepdims", 1))
    gone = set(range(len(x.shape))) if axes is None else {each % len(x.shape) for each in axes}
    shape = [1 if n in gone else each for n, each in enumerate(x.shape) if keep or n not in gone]
    return run.evaluation.fresh(shape)


def _normed(run: _Reader, node: Node, given: _Given) -> Any:
    axis = node.get("axis", -1) if node.op == "LayerNormalization" else 1
    weight = given[1] if len(given) > 1 else None
    path = weight.path if isinstance(weight, _Constant | _Weight) else None
    x = run.tensor(given[0])
    if path is not None and axis % len(x.shape) in (1, len(x.shape) - 1):
        run.evaluation.normed(x, path, axis)
    return x


def _shuffled(run: _Reader, node: Node, given: _Given) -> Any:
    x, block = run.tensor(given[0]), node.get("blocksize")
    count, channels, high, wide = x.shape
    crd = node.get("mode", b"DCR") == b"CRD"

    def move(entries: Any) -> Any:
        if node.op == "SpaceToDepth":
            made = entries.reshape(count, channels, high // block, block, wide // block, block)
            return made.transpose(0, 3, 5, 1, 2, 4).reshape(count, -1, high // block, wide // block)
        lead = (channels // block**2, block, block) if crd else (block, block, channels // block**2)
        axes = (0, 1, 4, 2, 5, 3) if crd else (0, 3, 4, 1, 5, 2)
        made = entries.reshape(count, *lead, high, wide).transpose(axes)
        return made.reshape(count, -1, high * block, wide * block)

    return run.evaluation.shuffled(x, move, up=node.op == "DepthToSpace")


def _recurrent(run: _Reader, node: Node, given: _Given) -> Any:
    x, weight = run.tensor(given[0]), given[1]
    if not isinstance(weight, _Weight):
        return Opaque()
    run.evaluation.takes(weight.path, x)
    hidden, ways = node.get("hidden_size"), weight.shape[0]
    return run.evaluation.fresh((x.shape[0], ways, x.shape[1], hidden))


_UNARY = frozenset(
    [
        *("Identity", "Relu", "LeakyRelu", "Elu", "Selu", "Celu", "Tanh", "Sigmoid", "Softplus", "Softsign"),
        *("HardSigmoid", "HardSwish", "Gelu", "Erf", "Exp", "Log", "Sqrt", "Neg", "Abs", "Cast", "Dropout"),
        *("Clip", "Softmax", "LogSoftmax", "Sin", "Cos", "Reciprocal", "Floor", "Round", "Sign", "Mish"),
        *("InstanceNormalization", "GroupNormalization", "ThresholdedRelu", "Not", "LpNormalization"),
    ]
)
_ENTRIES = frozenset(
    [
        *(
            "Add",
            "Sub",
            "Mul",
            "Div",
            "Pow",
            "Max",
            "Min",
            "Where",
            "Greater",
            "Less",
            "Equal",
            "Sum",
            "Mean",
        ),
        *("And", "Or", "GreaterOrEqual", "LessOrEqual", "PRelu"),
        *_UNARY,
    ]
)
_OPERATIONS: dict[str, _Operation] = {
    **dict.fromkeys(_ENTRIES, _entries),
    **dict.fromkeys(_UNARY, _same),
    "Conv": _conv,
    "ConvTranspose": _conv,
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pool),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool"), _global),
    **dict.fromkeys(("Resize", "Upsample"), _resized),
    **dict.fromkeys(("Gemm", "MatMul"), _product),
    "Transpose": _transposed,
    "Reshape": _reshaped,
    "Flatten": _flattened,
    "Squeeze": _squeezed,
    "Unsqueeze": _unsqueezed,
    "Concat": _joined,
    "Shape": _shape,
    "Gather": _gathered,
    "Slice": _sliced,
    "Split": _split,
    "Pad": _padded,
    "Expand": _expanded,
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2"), _reduced),
    **dict.fromkeys(("BatchNormalization", "LayerNormalization"), _normed),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _shuffled),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
}
