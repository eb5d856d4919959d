"""Orders in which recorded graphs flatten images, for the layers that they call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ckpttool.core.activations import UNKNOWN, ActivationTracker, AxisOrder, FeatureOrders, TrackingLimitError
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.source import Shape
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf
from ckpttool.graphs.graph import Graph, OperatorNode, read_graph
from ckpttool.graphs.operators import compute_node, find_operator, list_operators
from ckpttool.graphs.shapes import ShapeTracer
from ckpttool.graphs.windows import place_window

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
    sizes: Sequence[int], kernel: Sequence[int], *, ceil: bool = False, **attributes: Any
) -> tuple[int, ...]:
    """Return the output extents of windows over an image; `attributes` are those of `place_window`.

    Raise UntraceableError if they do not fit the image.
    """
    try:
        return place_window(sizes, kernel, attributes.get, ceil=ceil).extents
    except ValueError as error:
        raise UntraceableError from error


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
        return trace_graph_orders(checkpoint)
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


# Evaluates a graph on numbered entries, to find the image orders of layers.
#
# Operators that move entries are computed on the numbers by the table (graphs/operators.py), elementwise ones
# keep them. What a layer takes and makes is stated here; a result of another operator is not traced.

_CHANNEL = 1
_NORMS = frozenset(("BatchNormalization", "LayerNormalization"))
# Operators that keep the order of an image: a function of all entries, of a channel, or of a group of them.
_SAME_ORDER = frozenset(
    ("Softmax", "LogSoftmax", "InstanceNormalization", "GroupNormalization", "LpNormalization", "Dropout")
)
# Operators that may reorder an image's axes.
_REORDERS = frozenset(("Transpose", "Einsum", "DepthToSpace", "SpaceToDepth", "ScatterND"))
_RESHAPES = frozenset(("Reshape", "Flatten", "Squeeze", "Unsqueeze"))


class _TracedWeight(NamedTuple):
    """A constant of the tree, or one with its two axes swapped; `path` is None if it was computed."""

    path: Path | None
    shape: Shape
    turned: bool = False


def trace_graph_orders(checkpoint: Checkpoint) -> Mapping[Path, FeatureOrders] | None:
    """Return the orders recorded by a checkpoint's graph, by constant; None if it records no graph.

    Input extents that are not fixed are taken as 1.
    """
    graph = read_graph(checkpoint)
    if graph is None:
        return None
    evaluation = OrderTracer(checkpoint.tree, _CHANNEL)
    shapes = {}
    for value in graph.inputs:
        if value.shape is None:
            return {}
        shapes[value.name] = tuple(extent if isinstance(extent, int) else 1 for extent in value.shape)
    reader = _RecordedOrderReader(graph, evaluation, ShapeTracer(graph, shapes))
    for name, shape in shapes.items():
        reader.values[name] = evaluation.given(shape)
    for node in graph.nodes:
        try:
            reader.add(node)
        except (UntraceableError, TrackingLimitError, CkpttoolError):
            reorders = any(each.op in _REORDERS for each in graph.nodes)
            return mark_orders_unknown(checkpoint.tree) if reorders else {}
    return evaluation.features()


_Activation = TracedActivation | UntracedActivation
_TracedValue = TracedActivation | UntracedActivation | _TracedWeight


@dataclass
class _RecordedOrderReader:
    """Evaluates the nodes of a graph; `values` are activations and weights by name."""

    graph: Graph
    evaluation: OrderTracer
    shapes: ShapeTracer
    values: dict[str, _TracedValue] = field(default_factory=dict)

    def add(self, node: OperatorNode) -> None:
        """Evaluate a node; raise UntraceableError if a shape does not fit it."""
        self.evaluation.step()
        constant = all(not name or isinstance(self.value(name), _TracedWeight) for name in node.inputs)
        found = self.shapes.add(node).outputs
        given = [self.value(name) if name else None for name in node.inputs]
        outputs: Sequence[_TracedValue]
        if constant or all(self.shapes.is_constant(name) for name in node.outputs if name):
            outputs = [self._weight(node, given, shape) for shape in found]
        else:
            outputs = self._outputs(node, given, found)
        rest = [UntracedActivation()] * len(node.outputs)
        self.values.update(zip(node.outputs, [*outputs, *rest], strict=False))

    def value(self, name: str) -> _TracedValue:
        """Return a value by name."""
        if name not in self.values:
            constant = self.graph.constants.get(name)
            if constant is None or constant.shape is None:
                raise UntraceableError
            self.values[name] = _TracedWeight(constant.path, constant.shape)
        return self.values[name]

    def tensor(self, value: _TracedValue | None) -> TracedActivation:
        """Return a value as an activation: a constant is never an image."""
        if isinstance(value, TracedActivation):
            return value
        if isinstance(value, _TracedWeight):
            return self.evaluation.fresh(value.shape[::-1] if value.turned else value.shape)
        raise UntraceableError

    def _weight(
        self, node: OperatorNode, given: Sequence[_TracedValue | None], shape: Shape | None
    ) -> _TracedValue:
        """Return the result of an operator on constants; a weight of the tree if its order stays."""
        if shape is None:
            return UntracedActivation()
        first = given[0] if given else None
        if isinstance(first, _TracedWeight):
            perm = node.attributes.get("perm") or (1, 0)
            if node.op == "Transpose" and len(first.shape) == 2 and tuple(perm) == (1, 0):
                return first._replace(turned=not first.turned)
            if len(given) == 1 and _kind(node) == "elementwise":
                return first
        return _TracedWeight(None, shape)

    def _outputs(
        self, node: OperatorNode, given: Sequence[_TracedValue | None], found: Sequence[Shape | None]
    ) -> Sequence[_TracedValue]:
        kind, operation = _kind(node), _ORDERS.get(node.op)
        untraced = [each for each in given if isinstance(each, UntracedActivation)]
        if untraced and node.op not in ("MatMul", "Gemm"):
            features = {each.features for each in untraced}
            keeps = kind == "elementwise" or node.op in _SAME_ORDER
            return [UntracedActivation(features.pop() if keeps and len(features) == 1 else None)]
        shape = found[0] if found else None
        try:
            if operation is not None:
                return [operation(self, node, given, shape)]
            if node.op in _SAME_ORDER:
                return [self.tensor(given[0])]
            if shape is not None and node.op.startswith("Reduce"):
                x = self.tensor(given[0])
                return [x if x.shape == shape else self.evaluation.fresh(shape)]
            if shape is not None and kind == "elementwise":
                return [self._combined(node, given)]
            if shape is not None and kind == "movement":
                return self._moved(node, given, found)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            pass
        return [UntracedActivation()]

    def _combined(self, node: OperatorNode, given: Sequence[_TracedValue | None]) -> TracedActivation:
        values = [self.tensor(each) for each in given if each is not None]
        # The bounds of a clip do not change the order, nor does the type of another tensor.
        return values[0] if node.op in ("Clip", "CastLike") else self.evaluation.together(values)

    def _moved(
        self, node: OperatorNode, given: Sequence[_TracedValue | None], found: Sequence[Shape | None]
    ) -> Sequence[TracedActivation]:
        """Return entries in new positions, as the operator moves numbers."""
        tensors = [self.tensor(each) for each in given[: find_operator(node.op).data] if each is not None]
        shape = found[0] or ()
        if node.op in _RESHAPES:
            return [self.evaluation.reshaped(tensors[0], shape)]
        if node.op == "Concat":
            return [self.evaluation.joined(tensors, node.attributes.get("axis", 0))]
        for each in found:
            require_room(each or ())
        # Padding is 0, the number of no entry here; the value that pads is not an entry.
        positions = [self.shapes.value(name) if name else None for name in node.inputs[len(tensors) :]]
        if node.op == "Pad" and len(positions) > 1:
            positions[1] = None
        moved = compute_node(node, [*(each.entries + 1 for each in tensors), *positions])
        return [self.evaluation.moved(tensors[0], always_return(each - 1)) for each in moved]


def _kind(node: OperatorNode) -> str | None:
    row = list_operators().get(node.op)
    return None if row is None else row.kind


_Given = Sequence[_TracedValue | None]
_OrderRule = Callable[[_RecordedOrderReader, OperatorNode, _Given, Shape | None], _TracedValue]


def _convolution(
    run: _RecordedOrderReader, node: OperatorNode, given: _Given, shape: Shape | None
) -> TracedActivation:
    if shape is None:
        raise UntraceableError
    weight = given[1]
    path = weight.path if isinstance(weight, _TracedWeight) else None
    grouped = node.attributes.get("group", 1) != 1
    return run.evaluation.convolved(run.tensor(given[0]), shape, path, grouped=grouped)


def _pool(run: _RecordedOrderReader, node: OperatorNode, given: _Given, shape: Shape | None) -> _Activation:
    if shape is None:
        if node.op == "Resize":
            return UntracedActivation()
        raise UntraceableError
    return run.evaluation.convolved(run.tensor(given[0]), shape)


def _product(
    run: _RecordedOrderReader, node: OperatorNode, given: _Given, shape: Shape | None
) -> _Activation:
    x, weight = given[0], given[1]
    turned = bool(node.attributes.get("transB", 0))
    path = weight.path if isinstance(weight, _TracedWeight) and len(weight.shape) == 2 else None
    if isinstance(weight, _TracedWeight) and path and isinstance(x, TracedActivation | UntracedActivation):
        if node.attributes.get("transA", 0):
            return UntracedActivation()
        one, two = weight.shape[::-1] if turned != weight.turned else weight.shape
        return run.evaluation.dense(x, path, (one, two))
    traced = not any(isinstance(each, UntracedActivation) for each in (x, weight))
    return run.evaluation.fresh(shape) if traced and shape is not None else UntracedActivation()


def _einsum(
    run: _RecordedOrderReader,
    node: OperatorNode,
    given: _Given,
    shape: Shape | None,  # noqa: ARG001  # as of any rule
) -> _Activation:
    return run.evaluation.einsum(node.attributes.get("equation", ""), [run.tensor(each) for each in given])


def _gather(
    run: _RecordedOrderReader, node: OperatorNode, given: _Given, shape: Shape | None
) -> _TracedValue:
    x, positions = given
    embedded = isinstance(x, _TracedWeight) and x.path is not None and len(x.shape) == 2
    if isinstance(positions, TracedActivation):
        if not embedded or shape is None or node.attributes.get("axis", 0) != 0:
            return UntracedActivation()
        made = run.evaluation.fresh(shape)
        if isinstance(x, _TracedWeight) and x.path is not None:
            run.evaluation.makes(x.path, made)
        return made
    return run._moved(node, given, [shape])[0] if shape is not None else UntracedActivation()


def _norm(
    run: _RecordedOrderReader,
    node: OperatorNode,
    given: _Given,
    shape: Shape | None,  # noqa: ARG001  # as of any rule
) -> TracedActivation:
    x, weight = run.tensor(given[0]), given[1]
    axis = node.attributes.get("axis", -1) if node.op == "LayerNormalization" else 1
    path = weight.path if isinstance(weight, _TracedWeight) else None
    if path is not None and axis % len(x.shape) in (1, len(x.shape) - 1):
        run.evaluation.normed(x, path, axis)
    return x


def _pixel_shuffle(
    run: _RecordedOrderReader,
    node: OperatorNode,
    given: _Given,
    shape: Shape | None,  # noqa: ARG001  # as of any rule
) -> TracedActivation:
    return run.evaluation.shuffled(
        run.tensor(given[0]),
        lambda entries: compute_node(node, [entries])[0],
        up=node.op == "DepthToSpace",
    )


def _recurrent(
    run: _RecordedOrderReader, node: OperatorNode, given: _Given, shape: Shape | None
) -> _Activation:
    weight = given[1]
    if not isinstance(weight, _TracedWeight) or weight.path is None or node.attributes.get("layout", 0):
        return UntracedActivation()
    run.evaluation.takes(weight.path, run.tensor(given[0]))
    return run.evaluation.fresh(shape) if shape is not None else UntracedActivation()


_ORDERS: dict[str, _OrderRule] = {
    **dict.fromkeys(("Conv", "ConvTranspose"), _convolution),
    **dict.fromkeys(
        ("MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "Resize"), _pool
    ),
    **dict.fromkeys(("MatMul", "Gemm"), _product),
    "Einsum": _einsum,
    "Gather": _gather,
    **dict.fromkeys(_NORMS, _norm),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _pixel_shuffle),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
}
