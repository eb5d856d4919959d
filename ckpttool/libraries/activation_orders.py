"""Orders in which recorded graphs flatten images, for the layers that they call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckpttool.core.activations import UNKNOWN, ActivationTracker, AxisOrder, FeatureOrders, TrackingLimitError
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.source import Shape
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, key

if TYPE_CHECKING:
    from ckpttool.formats.onnx import OnnxNode

# Orders of flattened images as recorded by a file's own computation, for the layers that it calls.
#
# A TorchScript archive contains the code of `forward`, a SavedModel the graph of its signature, an ONNX model
# its graph. Each is evaluated on inputs with numbered entries (ckpttool.core.activations); no value is
# computed and no code of the file is run. A weight gets the order of its layer's inputs and outputs.

_IMAGE_RANK = 3
_COLOURS = 4
_MATRIX = 2
_MOST_ENTRIES = 1 << 23
_MOST_STEPS = 50_000


class UntraceableError(Exception):
    """The computation cannot be evaluated from shapes alone."""


class TracedActivation:
    """One intermediate result: its shape, and its entry numbers, which are computed on demand.

    `is_image` means that every entry already belongs to an image whose channels are on the axis
    that the framework's convolutions use.
    """

    __slots__ = ("_entries", "_make", "is_image", "shape")

    def __init__(self, shape: Sequence[int], make: Callable[[], Any], *, is_image: bool = False) -> None:
        """Store the shape; `make` returns the entry numbers in this shape."""
        self.shape = tuple(int(extent) for extent in shape)
        self.is_image = is_image
        self._make, self._entries = make, None

    @property
    def is_numbered(self) -> bool:
        """Whether the entry numbers were requested."""
        return self._entries is not None

    @property
    def entries(self) -> Any:
        """The entry numbers, an array of `shape`."""
        if self._entries is None:
            self._entries = self._make()
        return self._entries


class UntracedActivation:
    """Result of an operation that is not evaluated; its last axis may still be known (a layer's output)."""

    __slots__ = ("features",)

    def __init__(self, features: int | None = None) -> None:
        """Store the number of features, if a layer with weights produced the result."""
        self.features = features


def require_room(shape: Sequence[int]) -> None:
    """Raise UntraceableError for an array with more entries than are numbered."""
    if math.prod(shape) > _MOST_ENTRIES:
        raise UntraceableError


@dataclass
class OrderTracer:
    """Activations of one call: operations shared by all frontends, and layer inputs and outputs.

    With `shapes_only` entries are not numbered: the call only checks whether shapes fit.
    """

    tree: Tree
    channel: int
    shapes_only: bool = False
    activations: ActivationTracker = field(default_factory=ActivationTracker)
    uses: dict[Path, dict[str, list[Any]]] = field(default_factory=dict)
    lost: bool = False
    _made: list[tuple[Path, TracedActivation]] = field(default_factory=list)
    _steps: int = 0
    _numbered: int = 0

    # --- New results ------------------------------------------------------------------------------------

    def step(self) -> None:
        """Count one operation; raise UntraceableError if there are too many."""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise UntraceableError

    def _room(self, shape: Sequence[int]) -> None:
        if any(extent < 0 for extent in shape) or math.prod(shape) > _MOST_ENTRIES:
            raise UntraceableError
        self._numbered += math.prod(shape)
        if self._numbered > _MOST_ENTRIES:
            raise TrackingLimitError

    def fresh(self, shape: Sequence[int]) -> TracedActivation:
        """Return a result whose entries do not belong to an image yet."""

        def make() -> Any:
            self._room(shape)
            if self.shapes_only:
                return np.broadcast_to(np.int8(0), tuple(shape))
            return self.activations.plain(shape)

        return TracedActivation(shape, make)

    def image(self, shape: Sequence[int]) -> TracedActivation:
        """Return the images that a convolution or pooling outputs."""
        if any(extent < 1 for extent in shape):
            raise UntraceableError

        def make() -> Any:
            self._room(shape)
            if self.shapes_only:
                return np.broadcast_to(np.int8(0), tuple(shape))
            return self.activations.image(shape, self.channel % len(shape))

        return TracedActivation(shape, make, is_image=True)

    def given(self, shape: Sequence[int]) -> TracedActivation:
        """Return a model input: an image if its shape allows it and nothing contradicts it."""
        made = self.fresh(shape)
        # PyTorch image models without convolutions may have inputs with the channels last.
        first = self.channel == 1 and not (len(shape) > 2 and shape[1] <= _COLOURS < min(shape[2:]))
        if len(shape) > _IMAGE_RANK and not first and not self.shapes_only:
            self.activations.unless_known(made.entries, self.channel % len(shape))
        return made

    # --- Operations -------------------------------------------------------------------------------------

    def convolved(
        self, x: TracedActivation, shape: Sequence[int], weight: Path | None = None, *, grouped: bool = False
    ) -> TracedActivation:
        """Return the output of an image operation; a convolution is identified by its weight.

        A convolution's channels have a separate order where a pixel shuffle follows it.
        """
        if len(x.shape) < _IMAGE_RANK or len(shape) != len(x.shape):
            raise UntraceableError
        if not x.is_image and not self.shapes_only:
            self.activations.take(x.entries, self.channel % len(x.shape))
        made = self.image(shape)
        if weight is not None and not grouped and not self.shapes_only:
            self._made.append((weight, made))
            if not x.is_image:
                self.takes(weight, x, self.channel % len(x.shape))
        return made

    def moved(self, x: TracedActivation, move: Callable[[Any], Any]) -> TracedActivation:
        """Return a result with the entries of another one in different positions."""
        try:
            made = move(x.entries)
        except (ValueError, IndexError, TypeError) as error:
            raise UntraceableError from error
        self._room(made.shape)
        return TracedActivation(made.shape, lambda: made)

    def shuffled(self, x: TracedActivation, move: Callable[[Any], Any], *, up: bool) -> TracedActivation:
        """Return the output of a pixel shuffle: channels to positions if `up`, otherwise the reverse."""
        made = self.moved(x, move)
        image = made if up else x
        if not self.shapes_only:
            self.activations.take(image.entries, self.channel % len(image.shape))
        return made

    def reshaped(self, x: TracedActivation, shape: Sequence[int]) -> TracedActivation:
        """Return the result reshaped; one extent may be -1."""
        whole = math.prod(x.shape)
        known = math.prod(extent for extent in shape if extent != -1)
        if list(shape).count(-1) > 1 or (-1 in shape and (not known or whole % known)):
            raise UntraceableError
        wanted = tuple(whole // known if extent == -1 else int(extent) for extent in shape)
        if math.prod(wanted) != whole:
            raise UntraceableError
        if wanted == x.shape:
            return x
        return TracedActivation(wanted, lambda: x.entries.reshape(wanted))

    def joined(self, values: Sequence[TracedActivation], axis: int) -> TracedActivation:
        """Return results concatenated along an axis."""
        rank = len(values[0].shape)
        axis %= rank
        if any(len(each.shape) != rank for each in values):
            raise UntraceableError
        others = {each.shape[:axis] + each.shape[axis + 1 :] for each in values}
        if len(others) > 1:
            raise UntraceableError
        shape = list(values[0].shape)
        shape[axis] = sum(each.shape[axis] for each in values)
        images = all(each.is_image for each in values) and axis == self.channel % rank

        def make() -> Any:
            require_room(shape)
            return np.concatenate([each.entries for each in values], axis)

        return TracedActivation(shape, make, is_image=images)

    def einsum(
        self, equation: str, values: Sequence[TracedActivation]
    ) -> TracedActivation | UntracedActivation:
        """Return the result of an einsum equation: for one operand, its entries in another order."""
        taken, arrow, made = equation.replace(" ", "").partition("->")
        names = taken.split(",")
        if "." in equation or not arrow or list(map(len, names)) != [len(each.shape) for each in values]:
            return UntracedActivation()
        if len(values) == 1 and sorted(taken) == sorted(made) and len(set(made)) == len(made):
            axes = [taken.index(letter) for letter in made]
            return self.moved(values[0], lambda entries: entries.transpose(axes))
        sizes: dict[str, int] = {}
        for letters, value in zip(names, values, strict=True):
            sizes |= dict(zip(letters, value.shape, strict=True))
        return self.fresh([sizes[letter] for letter in made])

    def together(self, values: Sequence[TracedActivation]) -> TracedActivation:
        """Return the result of an elementwise operation on results broadcast to one shape."""
        try:
            shape = np.broadcast_shapes(*(each.shape for each in values))
        except ValueError as error:
            raise UntraceableError from error
        same = [each for each in values if each.shape == shape]
        if not same:
            return self.fresh(shape)
        kept = next((each for each in same if each.is_image), same[0])
        for each in same:
            if each is not kept and not (each.is_image and kept.is_image) and not self.shapes_only:
                self.activations.link(kept.entries, each.entries)
        return kept

    # --- Layers -----------------------------------------------------------------------------------------

    def takes(self, weight: Path, x: TracedActivation | UntracedActivation, axis: int = -1) -> None:
        """Record the order of a layer's input along an axis."""
        self._record(weight, "takes", x, axis)

    def makes(self, weight: Path, made: TracedActivation, axis: int = -1) -> None:
        """Record the order of a layer's output along an axis."""
        self._record(weight, "makes", made, axis)

    def _record(self, weight: Path, side: str, x: TracedActivation | UntracedActivation, axis: int) -> None:
        if self.shapes_only:
            return
        held = self.uses.setdefault(weight, {}).setdefault(side, [])
        if isinstance(x, TracedActivation) and not (x.shape and x.entries.size):
            raise UntraceableError
        if isinstance(x, UntracedActivation):
            held.append(None if x.features is None else x.features)
        else:
            rows = np.moveaxis(x.entries, axis, -1).reshape(-1, x.shape[axis])
            # The first position may be padding.
            whole = np.flatnonzero((rows >= 0).all(1))
            held.append(rows[whole[0] if len(whole) else 0])

    def dense(
        self, x: TracedActivation | UntracedActivation, weight: Path, sizes: tuple[int, int]
    ) -> TracedActivation | UntracedActivation:
        """Return the output of a dense layer of this size along the last axis."""
        if isinstance(x, UntracedActivation):
            if x.features not in (None, sizes[0]):
                raise UntraceableError
            self.takes(weight, x)
            return UntracedActivation(sizes[1])
        if not x.shape or x.shape[-1] != sizes[0]:
            raise UntraceableError
        self.takes(weight, x)
        made = self.fresh((*x.shape[:-1], sizes[1]))
        self.makes(weight, made)
        return made

    def normed(self, x: TracedActivation | UntracedActivation, weight: Path, axis: int) -> None:
        """Record the input of a norm or a PReLU with one number per feature."""
        if isinstance(x, TracedActivation) and not x.is_image:
            self.takes(weight, x, axis)

    def shape_of(self, path: Path) -> Shape:
        """Return the shape of a weight."""
        leaf = self.tree.get(path)
        if not isinstance(leaf, Leaf):
            raise UntraceableError
        return leaf.shape

    # --- Result -----------------------------------------------------------------------------------------

    def features(self) -> dict[Path, FeatureOrders]:
        """Return the orders by weight, UNKNOWN where an operation before the layer was not evaluated."""
        for weight, made in self._made:
            # For most convolutions the entries are never requested.
            if made.is_numbered:
                self.makes(weight, made, self.channel % len(made.shape))
        self.activations.finish()
        found = {}
        for weight, sides in self.uses.items():
            orders = {side: self._order(calls) for side, calls in sides.items()}
            found[weight] = FeatureOrders(orders.get("takes"), orders.get("makes"))
        return found

    def _order(self, calls: Sequence[Any]) -> AxisOrder | None:
        orders: list[AxisOrder | None] = []
        for each in calls:
            if isinstance(each, int):
                orders.append(None)
                continue
            known = None if each is None else self.activations.order(each)
            orders.append(UNKNOWN if known is None else known)
        if all(each is None for each in orders):
            return None
        return orders[0] if len(set(orders)) == 1 else UNKNOWN


def window_extents(
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *,
    ceil: bool = False,
) -> tuple[int, ...]:
    """Return the output extents of windows over an image; `padding` counts both ends together."""
    found = []
    for size, window, step, pad, wide in zip(sizes, kernel, stride, padding, dilation, strict=True):
        left = size + pad - wide * (window - 1) - 1
        if step < 1:
            raise UntraceableError
        made = (-(-left // step) if ceil else left // step) + 1
        # The last window begins inside the image or the padding before it.
        found.append(made - (ceil and (made - 1) * step >= size + pad // 2))
    return tuple(found)


def mark_orders_unknown(tree: Tree) -> dict[Path, FeatureOrders]:
    """Return unknown orders for all layers of an image model."""
    if all(len(leaf.shape) < _IMAGE_RANK for _, leaf in tree.tensors()):
        return {}
    return {
        path: FeatureOrders(UNKNOWN, UNKNOWN)
        for path, leaf in tree.tensors()
        if len(leaf.shape) == _MATRIX and leaf.role == "parameter"
    }


def always_return(entries: Any) -> Callable[[Any], Any]:
    """Return a one-argument function that returns these entries."""
    return lambda _: entries


# --- Checkpoints --------------------------------------------------------------------------------------


def read_orders(checkpoint: Checkpoint, shapes: Sequence[Shape] = ()) -> Mapping[Path, FeatureOrders]:
    """Return the orders by weight that the file's own computation records; nothing if it has none.

    `shapes` are the target's input shapes without the batch; they are tried where the file does not
    record those of the source.
    """
    try:
        return _read_recorded_orders(checkpoint, shapes) or {}
    except (
        CkpttoolError,
        UntraceableError,
        TrackingLimitError,
        SyntaxError,
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
        MemoryError,
    ):
        return {}


def _read_recorded_orders(
    checkpoint: Checkpoint, shapes: Sequence[Shape]
) -> Mapping[Path, FeatureOrders] | None:
    """Evaluate the recorded computation; formats without one import nothing."""
    if checkpoint.format == "onnx":
        return read_onnx_orders(checkpoint)
    if checkpoint.format == "saved_model":
        from ckpttool.libraries.tf_graphs import read_graph_orders

        return read_graph_orders(checkpoint)
    root = checkpoint.tree.containers.get(())
    if root is None or root.name is None:
        return None
    from ckpttool.libraries.script_orders import read_script_orders

    return read_script_orders(checkpoint, shapes)


def with_orders(
    tree: Tree,
    checkpoint: Checkpoint,
    shapes: Sequence[Shape] = (),
    *,
    sources: Mapping[Path, Path] | None = None,
    unknown: bool = True,
) -> Tree:
    """Return a checkpoint's tree, or one of its leaves, with the orders recorded by its computation.

    `sources` are the checkpoint paths of leaves that were computed from others. Without `unknown`, an
    order that cannot be evaluated is treated as not recorded.
    """
    found = read_orders(checkpoint, shapes)
    if not found:
        return tree
    whole = checkpoint.tree
    # A leaf keeps its identity when preparation changes its path.
    own = {id(whole[path]): each for path, each in found.items() if path in whole}
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    for path, leaf in tree.items():
        each = own.get(id(leaf)) if sources is None else found.get(sources.get(path, ()))
        if each is not None and isinstance(leaf, Leaf):
            each = each if unknown else FeatureOrders(*(None if side == UNKNOWN else side for side in each))
            leaf = replace(leaf, features=each)
        leaves[path] = leaf
    return Tree(leaves, tree.aliases, tree.containers)


# Evaluates an ONNX graph on numbered entries, to find the image orders of layers.
#
# Source: onnx/docs/Operators.md.

_CHANNEL = 1
_SMALL = 4096


class _OnnxOrderWeight(NamedTuple):
    """A large constant, or one with its two axes swapped."""

    path: Path
    shape: Shape
    turned: bool = False


def read_onnx_orders(checkpoint: Checkpoint) -> Mapping[Path, FeatureOrders]:
    """Return the orders recorded by an ONNX model's graph, by constant.

    Input extents that are not fixed are taken as 1.
    """
    from ckpttool.formats import onnx

    graph = onnx.read_model(checkpoint.files[0]).graph
    evaluation = OrderTracer(checkpoint.tree, _CHANNEL)
    reader = _OnnxOrderEvaluator(evaluation)
    known = {tensor.name for tensor in graph.initializers}
    for value in graph.inputs:
        if value.name in known:
            continue
        if value.shape is None:
            return {}
        shape = [extent if isinstance(extent, int) and extent > 0 else 1 for extent in value.shape]
        reader.values[value.name] = evaluation.given(shape)
    for node in graph.nodes:
        try:
            evaluation.step()
            outputs = reader.outputs(node)
        except (UntraceableError, TrackingLimitError, CkpttoolError):
            return (
                mark_orders_unknown(checkpoint.tree)
                if any(each.op in _REORDERS for each in graph.nodes)
                else {}
            )
        rest = [UntracedActivation()] * len(node.outputs)
        for name, made in zip(node.outputs, [*outputs, *rest], strict=False):
            reader.values[name] = made
    return evaluation.features()


@dataclass
class _OnnxOrderEvaluator:
    """Evaluates nodes: small constants as arrays, others as weights, tensors as activations."""

    evaluation: OrderTracer
    values: dict[str, Any] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        """Return the value of a name, None for an omitted input."""
        if name and name not in self.values:
            path = (key(name),)
            leaf = self.evaluation.tree.get(path)
            if not isinstance(leaf, Leaf):
                raise UntraceableError
            small = leaf.size <= _SMALL and len(leaf.shape) < 2
            self.values[name] = (
                _OnnxOrderConstant(leaf.array(), path) if small else _OnnxOrderWeight(path, leaf.shape)
            )
        return self.values.get(name)

    def tensor(self, value: Any) -> TracedActivation:
        """Return a value as an activation: a constant is never an image."""
        if isinstance(value, TracedActivation):
            return value
        if isinstance(value, _OnnxOrderWeight):
            return self.evaluation.fresh(value.shape)
        if isinstance(value, _OnnxOrderConstant):
            return self.evaluation.fresh(value.array.shape)
        raise UntraceableError

    def outputs(self, node: OnnxNode) -> list[Any]:
        """Return the result of a node."""
        from ckpttool.libraries.onnx_operators import FOLDED

        if node.op == "Constant":
            return [self._stated(node)]
        given = [self.value(name) for name in node.inputs]
        operation = _OPERATIONS.get(node.op) if node.title == node.op else None
        if all(each is None or isinstance(each, _OnnxOrderConstant) for each in given) and node.op in FOLDED:
            if given and node.op == "Identity":
                return given
            arrays = (each.array if each is not None else None for each in given)
            try:
                made = FOLDED[node.op](node, *arrays)
            except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
                made = None
            return [_OnnxOrderConstant(np.asarray(made))] if made is not None else [UntracedActivation()]
        tensors = [each for each in given if isinstance(each, TracedActivation | UntracedActivation)]
        if operation is None:
            return [UntracedActivation()]
        if any(isinstance(each, UntracedActivation) for each in tensors) and node.op not in (
            "MatMul",
            "Gemm",
            "Shape",
        ):
            features = {each.features for each in tensors if isinstance(each, UntracedActivation)}
            return [
                UntracedActivation(features.pop() if node.op in _ENTRIES and len(features) == 1 else None)
            ]
        try:
            made = operation(self, node, given)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            return [UntracedActivation()]
        return made if isinstance(made, list) else [made]

    def _stated(self, node: OnnxNode) -> Any:
        if (key(node.outputs[0]),) in self.evaluation.tree:
            return self.value(node.outputs[0])
        for name, dtype in (("value_float", "f4"), ("value_int", "i8"), ("value_ints", "i8")):
            if name in node.attributes:
                return _OnnxOrderConstant(np.asarray(node.get(name), dtype))
        return UntracedActivation()


class _OnnxOrderConstant(NamedTuple):
    """A constant whose numbers are used: a shape, axes, a factor, or a layer's vector."""

    array: Any
    path: Path | None = None


_Given = Sequence[Any]
_Operation = Callable[[_OnnxOrderEvaluator, "OnnxNode", _Given], Any]


def _numbers(value: Any) -> list[int]:
    if not isinstance(value, _OnnxOrderConstant):
        raise UntraceableError
    return [int(each) for each in value.array.reshape(-1)]


def _setting(node: OnnxNode, name: str, given: _Given, place: int) -> list[int] | None:
    """Return a setting that is an attribute in older versions and an input in newer ones."""
    found = node.get(name)
    if found is not None:
        return [int(each) for each in found]
    return _numbers(given[place]) if len(given) > place and given[place] is not None else None


def _identity(_run: _OnnxOrderEvaluator, _node: OnnxNode, given: _Given) -> Any:
    return given[0]


def _elementwise(run: _OnnxOrderEvaluator, _node: OnnxNode, given: _Given) -> Any:
    return run.evaluation.together([run.tensor(each) for each in given if each is not None])


def _conv(run: _OnnxOrderEvaluator, node: OnnxNode, given: _Given) -> Any:
    x, kernel = run.tensor(given[0]), given[1].shape
    rank = len(kernel) - 2
    strides, wide = node.get("strides") or (1,) * rank, node.get("dilations") or (1,) * rank
    pads, how = list(node.get("pads") or [0] * (2 * rank)), node.get("auto_pad", b"NOTSET")
    groups, path = node.get("group", 1), given[1].path if isinstance(given[1], _OnnxOrderWeight) else None
    if len(x.shape) != rank + 2:
        raise UntraceableError
    if node.op == "ConvTranspose":
        if how not in (b"NOTSET", b"VALID") or node.get("output_shape") is not None:
            return UntracedActivation()
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
        sizes = window_extents(x.shape[2:], kernel[2:], strides, both, wide)
    return run.evaluation.convolved(x, (x.shape[0], kernel[0], *sizes), path, grouped=groups != 1)


def _pool(run: _OnnxOrderEvaluator, node: OnnxNode, given: _Given) -> Any:
    x = run.tensor(given[0])
    kernel = node.get("kernel_shape")
    rank = len(kernel)
    strides, wide = node.get("strides") or (1,) * rank, node.get("dilations") or (1,) * rank
    pads, how = list(node.get("pads") or [0] * (2 * rank)), node.get("auto_pad", b"NOTSET")
    if how in (b"SAME_UPPER", b"SAME_LOWER"):
        sizes = tuple(-(-size // step) for size, step in zip(x.shape[2:], strides, strict=True))
    else:
        both = [pads[n] + pads[n + rank] for n in range(rank)]
        sizes = window_extents(x.shape[2:], kernel, strides, both, wide, ceil=bool(node.get("ceil_mode", 0)))
    return run.evaluation.convolved(x, (*x.shape[:2], *sizes))


def _global_pool(run: _OnnxOrderEvaluator, _node: OnnxNode, given: _Given) -> Any:
    x = run.tensor(given[0])
    return run.evaluation.convolved(x, (*x.shape[:2], *(1,) * (len(x.shape) - 2)))


def _resize(run: _OnnxOrderEvaluator, _node: OnnxNode, given: _Given) -> Any:
    x = run.tensor(given[0])
    if len(given) > 3 and given[3] is not None:
        return run.evaluation.convolved(x, _numbers(given[3]))
    scales = given[2] if len(given) > 2 else given[1]
    if not isinstance(scales, _OnnxOrderConstant):
        return UntracedActivation()
    # The product has the precision of the factors: 10 times 0.7 is 7 in float32.
    factors = scales.array.reshape(-1)
    return run.evaluation.convolved(
        x,
        [math.floor(factor.dtype.type(size) * factor) for size, factor in zip(x.shape, factors, strict=True)],
    )


def _product(run: _OnnxOrderEvaluator, node: OnnxNode, given: _Given) -> Any:
    x, weight = given[0], given[1]
    turned = bool(node.get("transB", 0)) if node.op == "Gemm" else False
    if (
        isinstance(weight, _OnnxOrderWeight)
        and len(weight.shape) == 2
        and isinstance(x, TracedActivation | UntracedActivation)
    ):
        if node.get("transA", 0):
            return UntracedActivation()
        one, two = weight.shape[::-1] if turned != weight.turned else weight.shape
        return run.evaluation.dense(x, weight.path, (one, two))
    if isinstance(x, UntracedActivation) or isinstance(weight, UntracedActivation):
        return UntracedActivation()
    one_, two_ = run.tensor(x).shape, run.tensor(weight).shape
    if len(one_) < 2 or len(two_) < 2 or one_[-1] != two_[-2] or turned or node.get("transA", 0):
        return UntracedActivation()
    lead = np.broadcast_shapes(one_[:-2], two_[:-2])
    return run.evaluation.fresh((*lead, one_[-2], two_[-1]))


def _transpose(run: _OnnxOrderEvaluator, node: OnnxNode, given: _Given) -> Any:
    x = given[0]
    axes = node.get("perm") or tuple(reversed(range(len(x.shape))))
    if isinstance(x, _OnnxOrderWeight):
        if len(x.shape) == 2 and tuple(axes) == (1, 0):
            return x._replace(turned=not x.turned)
        return UntracedActivation()
    return run.evaluation.moved(run.tensor(x), lambda entries: np.transpose(entries, axes))


def _reshape(run: _OnnxOrderEvaluator, node: OnnxNode, given: _Given) -> Any:
    x = run.tensor(given[0])
    shape = _setting(node, "shape", given, 1) or []
    if not node.get("allowzero", 0):
        shape = [x.shape[n] if extent == 0 else extent for n, extent in enumerate(shape)]
    return run.evaluation.reshaped(x, shape)


def _flatten(run: _OnnxOrderEvaluator, node: OnnxNode, given: _Given) -> Any:
    x = run.tensor(given[0])
    at = node.get("axis", 1) % (len(x.shape) + 1)
    return run.evaluation.reshaped(x, (math.prod(x.shape[:at]), math.prod(x.shape[at:])))


def _squeeze(run: _OnnxOrderEvaluator, node: OnnxNode, given: _Given) -> Any:
    x = run.tensor(given[0])
    axes = _setting(node, "axes", given, 1)
    gone = range(len(x.shape)) if axes is None else {each % len(x.shape) for each in axes}
    shape = [extent for n, extent in enumerate(x.shape) if n not in gone or extent != 1]
    return run.evaluation.reshaped(x, shape)


def _unsqueeze(run: _OnnxOrderEvaluator, node: OnnxNode, given: _Given) -> Any:
    x = run.tensor(given[0])
    axes = _setting(node, "axes", given, 1) or []
    rank, shape = len(x.shape) + len(axes), list(x.shape)
    for at in sorted(each % rank for each in axes):
        shape.insert(at, 1)
    return run.evaluation.reshaped(x, shape)


def _concat(run: _OnnxOrderEvaluator, node: OnnxNode, given: _Given) -> Any:
    return run.evaluation.joined([run.tensor(each) for each in given], node.get("axis", 1))


def _shape(run: _OnnxOrderEvaluator, _node: OnnxNode, given: _Given) -> Any:
    if isinstance(given[0], UntracedActivation):
        return UntracedActivation()
    return _OnnxOrderConstant(np.array(run.tensor(given[0]).shape, "int64"))


def _gather(run: _OnnxOrderEvaluator, node: OnnxNode, given: _Given) -> Any:
    x, at, axis = given[0], given[1], node.get("axis", 0)
    if (
        isinstance(x, _OnnxOrderWeight)
        and isinstance(at, TracedActivation)
        and axis == 0
        and len(x.shape) == 2
    ):
        made = run.evaluation.fresh((*at.shape, x.shape[1]))
        run.evaluation.makes(x.path, made)
        return made
    if not isinstance(at, _OnnxOrderConstant):
        return UntracedActivation()
    if isinstance(x, _OnnxOrderConstant):
        return _OnnxOrderConstant(np.take(x.array, at.array, axis))
    return run.evaluation.moved(run.tensor(x), lambda entries: np.take(entries, at.array, axis))


def _slice(run: _OnnxOrderEvaluator, node: OnnxNode, given: _Given) -> Any:
    starts, ends = (_setting(node, name, given, n + 1) or [] for n, name in enumerate(("starts", "ends")))
    axes = _setting(node, "axes", given, 3) or list(range(len(starts)))
    steps = _numbers(given[4]) if len(given) > 4 and given[4] is not None else [1] * len(starts)
    x = given[0]
    rank = len(x.array.shape if isinstance(x, _OnnxOrderConstant) else x.shape)
    at = [slice(None)] * rank
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        at[axis] = slice(start, None if step < 0 and end < -rank - (1 << 30) else end, step)
    if isinstance(x, _OnnxOrderConstant):
        return _OnnxOrderConstant(x.array[tuple(at)])
    return run.evaluation.moved(run.tensor(x), lambda entries: entries[tuple(at)])


def _split(run: _OnnxOrderEvaluator, node: OnnxNode, given: _Given) -> Any:
    x, axis = run.tensor(given[0]), node.get("axis", 0)
    sizes = _setting(node, "split", given, 1)
    count = len(node.outputs)
    ends = np.cumsum(sizes)[:-1] if sizes else np.arange(1, count) * -(-x.shape[axis] // count)
    parts = np.split(x.entries, [int(end) for end in ends], axis)
    return [run.evaluation.moved(x, always_return(part)) for part in parts]


def _pad(run: _OnnxOrderEvaluator, node: OnnxNode, given: _Given) -> Any:
    x, pads = run.tensor(given[0]), _setting(node, "pads", given, 1) or []
    rank = len(x.shape)
    if len(pads) != 2 * rank or (len(given) > 3 and given[3] is not None):
        return UntracedActivation()
    widths = [(pads[n], pads[n + rank]) for n in range(rank)]
    if any(min(each) < 0 for each in widths):
        return UntracedActivation()
    require_room([size + sum(each) for size, each in zip(x.shape, widths, strict=True)])
    return run.evaluation.moved(x, lambda entries: np.pad(entries, widths, constant_values=-1))


def _expand(run: _OnnxOrderEvaluator, _node: OnnxNode, given: _Given) -> Any:
    x, shape = run.tensor(given[0]), _numbers(given[1])
    wanted = np.broadcast_shapes(x.shape, tuple(shape))
    return run.evaluation.moved(x, lambda entries: np.broadcast_to(entries, wanted))


def _reduce(run: _OnnxOrderEvaluator, node: OnnxNode, given: _Given) -> Any:
    x = run.tensor(given[0])
    axes = _setting(node, "axes", given, 1)
    keep = bool(node.get("keepdims", 1))
    if not axes and node.get("noop_with_empty_axes", 0):
        return x
    gone = {each % len(x.shape) for each in axes} if axes else set(range(len(x.shape)))
    shape = [1 if n in gone else each for n, each in enumerate(x.shape) if keep or n not in gone]
    return run.evaluation.fresh(shape)


def _norm(run: _OnnxOrderEvaluator, node: OnnxNode, given: _Given) -> Any:
    axis = node.get("axis", -1) if node.op == "LayerNormalization" else 1
    weight = given[1] if len(given) > 1 else None
    path = weight.path if isinstance(weight, _OnnxOrderConstant | _OnnxOrderWeight) else None
    x = run.tensor(given[0])
    if path is not None and axis % len(x.shape) in (1, len(x.shape) - 1):
        run.evaluation.normed(x, path, axis)
    return x


def _pixel_shuffle(run: _OnnxOrderEvaluator, node: OnnxNode, given: _Given) -> Any:
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


def _recurrent(run: _OnnxOrderEvaluator, node: OnnxNode, given: _Given) -> Any:
    x, weight = run.tensor(given[0]), given[1]
    if not isinstance(weight, _OnnxOrderWeight) or node.get("layout", 0):
        return UntracedActivation()
    run.evaluation.takes(weight.path, x)
    hidden, ways = node.get("hidden_size"), weight.shape[0]
    return run.evaluation.fresh((x.shape[0], ways, x.shape[1], hidden))


# Operators that may reorder an image's axes.
_REORDERS = frozenset(("Transpose", "Einsum", "DepthToSpace", "SpaceToDepth", "ScatterND"))
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
    **dict.fromkeys(_ENTRIES, _elementwise),
    **dict.fromkeys(_UNARY, _identity),
    "Conv": _conv,
    "ConvTranspose": _conv,
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pool),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool"), _global_pool),
    **dict.fromkeys(("Resize", "Upsample"), _resize),
    **dict.fromkeys(("Gemm", "MatMul"), _product),
    "Einsum": lambda run, node, given: run.evaluation.einsum(
        (node.get("equation") or b"").decode("latin-1"), [run.tensor(each) for each in given]
    ),
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Concat": _concat,
    "Shape": _shape,
    "Gather": _gather,
    "Slice": _slice,
    "Split": _split,
    "Pad": _pad,
    "Expand": _expand,
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2"), _reduce),
    **dict.fromkeys(("BatchNormalization", "LayerNormalization"), _norm),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _pixel_shuffle),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
}


# The operations of an ONNX model in order, for pictures of its layers.

_FREE_OF_PRODUCTS = frozenset(_OPERATIONS) - {"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum"}
_FREE_OF_PRODUCTS -= {"LSTM", "GRU", "RNN"}


class TracedCall(NamedTuple):
    """One operation of a model's graph or code; `output` and `macs` are None if unknown.

    `inputs` are the positions of the operations whose results it takes, -1 for an input of the model;
    `weights` are the constants that it is the first one to use.
    """

    name: str
    kind: str
    output: Shape | None
    macs: int | None
    inputs: tuple[int, ...]
    weights: tuple[Path, ...] = ()


class TracedModel(NamedTuple):
    """The operations of a model for inputs of these shapes; `assumed` is set if an extent was not fixed.

    `outputs` are the shapes of the model's outputs, None if unknown.
    """

    inputs: tuple[tuple[str, Shape], ...]
    outputs: tuple[Shape | None, ...]
    calls: tuple[TracedCall, ...]
    assumed: bool = False


def trace_onnx(checkpoint: Checkpoint, shapes: Mapping[str, Shape]) -> TracedModel | None:
    """Return the operations of an ONNX model; None if an input has no shape.

    `shapes` are those of inputs by name, with the batch; extents that are not fixed are taken as 1.
    """
    from ckpttool.formats import onnx

    graph = onnx.read_model(checkpoint.files[0]).graph
    if len(graph.nodes) > _MOST_CALLS:
        return None
    reader = _OnnxOrderEvaluator(OrderTracer(checkpoint.tree, _CHANNEL, shapes_only=True))
    known = {tensor.name for tensor in graph.initializers}
    inputs, assumed = [], False
    for value in graph.inputs:
        if value.name in known:
            continue
        if value.name not in shapes and value.shape is None:
            return None
        listed = shapes.get(value.name, value.shape) or ()
        shape = tuple(extent if isinstance(extent, int) and extent > 0 else 1 for extent in listed)
        assumed = assumed or shape != tuple(listed)
        inputs.append((value.name, shape))
        reader.values[value.name] = reader.evaluation.given(shape)
    calls = _OnnxCalls(reader, {name: -1 for name, _ in inputs})
    for node in graph.nodes:
        calls.add(node)
    outputs = tuple(_value_shape(reader.values.get(each.name)) for each in graph.outputs)
    return TracedModel(tuple(inputs), outputs, tuple(calls.found), assumed)


_MOST_CALLS = 20_000


@dataclass
class _OnnxCalls:
    """The operations so far; `makers` are their positions by the names of results."""

    reader: _OnnxOrderEvaluator
    makers: dict[str, int]
    found: list[TracedCall] = field(default_factory=list)
    used: set[Path] = field(default_factory=set)

    def add(self, node: OnnxNode) -> None:
        """Evaluate a node; constants and shapes are not operations of the model."""
        reader = self.reader
        try:
            reader.evaluation.step()
            given = [reader.value(name) for name in node.inputs]
            outputs = reader.outputs(node)
        except (UntraceableError, TrackingLimitError, CkpttoolError):
            given, outputs = [], []
        rest = [UntracedActivation()] * len(node.outputs)
        values = list(zip(node.outputs, [*outputs, *rest], strict=False))
        reader.values.update(values)
        if not values or isinstance(values[0][1], _OnnxOrderConstant):
            return
        made = values[0][1]
        shape = made.shape if isinstance(made, TracedActivation) else None
        inputs = dict.fromkeys(self.makers[name] for name in node.inputs if name in self.makers)
        weights = [each.path for each in given if getattr(each, "path", None) is not None]
        own = tuple(dict.fromkeys(path for path in weights if path not in self.used))
        self.used.update(own)
        macs = _count_products(node, given, shape)
        self.makers.update((name, len(self.found)) for name in node.outputs if name)
        name = node.name or next(iter(node.outputs), "")
        self.found.append(TracedCall(name, node.title, shape, macs, tuple(inputs), own))


def _count_products(node: OnnxNode, given: _Given, made: Shape | None) -> int | None:
    """Return the multiply-accumulate operations of a node, None if unknown."""
    if node.title in _FREE_OF_PRODUCTS:
        return 0
    shapes = [_value_shape(each) for each in given]
    first, second = (*shapes, None, None)[:2]
    if made is None or first is None or second is None:
        return None
    if node.title == "Conv":
        return math.prod(made) * math.prod(second[1:])
    if node.title == "ConvTranspose":
        return math.prod(first) * math.prod(second[1:])
    if node.title in ("MatMul", "Gemm"):
        return math.prod(made) * first[-2 if node.get("transA", 0) else -1]
    if node.title in ("LSTM", "GRU", "RNN") and len(shapes) > 2 and shapes[2] is not None:
        return math.prod(first[:2]) * (math.prod(second) + math.prod(shapes[2]))
    return None


def _value_shape(value: Any) -> Shape | None:
    if isinstance(value, _OnnxOrderConstant):
        return tuple(value.array.shape)
    if isinstance(value, _OnnxOrderWeight):
        return value.shape[::-1] if value.turned else value.shape
    return value.shape if isinstance(value, TracedActivation) else None
