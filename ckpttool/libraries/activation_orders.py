"""Orders in which recorded graphs flatten images, for the layers that they use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from ckpttool.core import deferred
from ckpttool.core.activations import (
    MIXED,
    NO_CALL,
    UNKNOWN,
    ActivationTracker,
    AxisOrder,
    FeaturePart,
    Parts,
    TrackingLimitError,
    WeightUse,
    common_parts,
    framework_order,
)
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.source import Shape
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf
from ckpttool.graphs.graph import Graph, OperatorNode, read_graph
from ckpttool.graphs.operators import (
    COMBINATIONS,
    MOVEMENTS,
    Kind,
    compute_node,
    is_known,
    operator_kind,
)
from ckpttool.graphs.shapes import ShapeTracer
from ckpttool.graphs.weights import find_roles, number_calls
from ckpttool.libraries.recognize import KERAS_FORMATS, SAVER_FORMATS

_CHANNEL = 1
_IMAGE_RANK = 3
_COLOURS = 4
_MATRIX = 2
_MOST_ENTRIES = 1 << 23
_MOST_STEPS = 50_000


class UntraceableError(Exception):
    """The computation cannot be evaluated from shapes alone."""


class _Activation:
    """One intermediate result: its shape, and its entry numbers, which are computed on demand.

    `channel` is the axis of channels of a result of which every entry already belongs to an image.
    """

    def __init__(self, shape: Shape, number: Callable[[], Any], channel: int | None = None) -> None:
        self.shape, self.channel, self._number = shape, channel, number

    @cached_property
    def entries(self) -> Any:
        """The entry numbers, an array of `shape`."""
        return self._number()

    @property
    def is_numbered(self) -> bool:
        """Whether the entry numbers were requested."""
        return "entries" in vars(self)


class _UntracedActivation(NamedTuple):
    """Result of an operation that is not evaluated; `features` is its last axis, if a layer states it."""

    features: int | None = None


def _require_room(shape: Shape) -> None:
    """Raise UntraceableError for an array with more entries than are numbered."""
    if math.prod(shape) > _MOST_ENTRIES:
        raise UntraceableError


def mark_orders_unknown(tree: Tree) -> dict[Path, WeightUse]:
    """Return unknown orders for all layers of an image model."""
    if all(len(leaf.shape) < _IMAGE_RANK for _, leaf in tree.tensors()):
        return {}
    return {
        path: WeightUse(UNKNOWN, UNKNOWN)
        for path, leaf in tree.tensors()
        if len(leaf.shape) == _MATRIX and leaf.role == "parameter"
    }


# Sizes of square images to try if the file does not record those of its inputs.
_SIDES = (28, 32, 64, 84, 96, 224, 48, 16, 8, 10, 128, 256, *range(1, 129))
_TRIES = 400
# Operations in code that may reorder an image's axes, and assignments to a part of a tensor.
_REORDERING_CODE = deferred.compile(
    r"torch\.(?:permute|transpose|movedim|moveaxis|swapaxes|swapdims|einsum|numpy_T|t|flip|rot90|roll|unfold"
    r"|pixel_(?:un)?shuffle|copy_|index_put_|_index_put_impl_)\("
)
_FAILURES = (
    *(CkpttoolError, UntraceableError, TrackingLimitError, SyntaxError, ArithmeticError, LookupError),
    *(TypeError, ValueError, RecursionError, MemoryError),
)
_Orders = Mapping[Path, WeightUse]


def read_orders(checkpoint: Checkpoint, shapes: Sequence[Shape] = ()) -> _Orders:
    """Return the orders by weight that the file's own computation, or its library's, records.

    `shapes` are the target's input shapes without the batch; they are tried where the file does not record
    those of the source. A TorchScript archive contains the code of `forward`, a SavedModel the functions of
    its signatures, an ONNX model its graph, and a Saver stores that of its program beside the checkpoint: all
    are read as graphs (ckpttool.graphs). A graph is evaluated on inputs with numbered entries
    (ckpttool.core.activations); no value is computed and no code of the file is run. A weight gets the order
    of its layer's inputs and outputs.
    """
    try:
        if checkpoint.format in ("onnx", *KERAS_FORMATS):
            graph = read_graph(checkpoint)
            if graph is None:
                return {}
            if checkpoint.format == "onnx":
                return with_uses(trace_graph_orders(graph, checkpoint.tree, 1), graph)
            # What a custom layer does to an image is not in the file: its order is not recorded.
            return with_uses(trace_graph_orders(graph, checkpoint.tree, -1, opaque=None), graph)
        if checkpoint.format == "saved_model":
            return _read_function_orders(checkpoint)
        if checkpoint.format in SAVER_FORMATS:
            graph = read_graph(checkpoint)
            orders = {} if graph is None else trace_graph_orders(graph, checkpoint.tree, -1)
            return {} if graph is None else with_uses(_without_inputs(orders), graph)
        if checkpoint.format == "stable_baselines3":
            from ckpttool.libraries import sb3

            return sb3.read_encoder_orders(checkpoint.tree)
        root = checkpoint.tree.containers.get(())
        return {} if root is None or root.name is None else _read_script_orders(checkpoint, shapes)
    except _FAILURES:
        return {}


def with_uses(orders: _Orders, graph: Graph) -> _Orders:
    """Return the orders with the position of each weight's call in the graph, its role and settings."""
    calls, roles = number_calls(graph), find_roles(graph)
    uses = {}
    for path in {**calls, **orders}:
        role, settings = roles.get(path, ("", {}))
        use = orders.get(path, WeightUse())
        parts = tuple(
            part._replace(number=calls.get(part.number, NO_CALL).number) if part.origin == "call" else part
            for part in use.parts
        )
        call = calls.get(path, NO_CALL)
        uses[path] = use._replace(call=call, role=role, settings=dict(settings), parts=parts)
    return uses


def _read_function_orders(checkpoint: Checkpoint) -> _Orders:
    """Return the orders in a SavedModel's functions; if several use a layer, they must agree."""
    from ckpttool.graphs import tensorflow

    result: dict[Path, WeightUse] = {}
    graphs = list(tensorflow.read_each(checkpoint))
    calls = [None if graph is None else number_calls(graph) for graph in graphs]
    for graph in graphs:
        if graph is None:
            orders: _Orders = mark_orders_unknown(checkpoint.tree)
        else:
            orders = trace_graph_orders(graph, checkpoint.tree, -1)
            if len(graph.inputs) > 1:
                orders = _without_inputs(orders)
        for path, order in orders.items():
            known = result.get(path, order)
            parts = common_parts([known.parts, order.parts])
            takes, makes = _agreed(known.takes, order.takes), _agreed(known.makes, order.makes)
            result[path] = WeightUse(takes, makes, parts=parts)
    # Several functions may call the layers in different orders; Keras exports one function under two names.
    first = graphs[0] if graphs and all(call == calls[0] for call in calls) else None
    return result if first is None else with_uses(result, first)


def _without_inputs(orders: _Orders) -> _Orders:
    """Return the orders without inputs as origins: a signature lists its inputs by name, not by position."""
    unknown = FeaturePart(0)
    return {
        path: use._replace(
            parts=tuple(
                unknown._replace(size=part.size) if part.origin == "input" else part for part in use.parts
            )
        )
        for path, use in orders.items()
    }


def _agreed(one: AxisOrder | None, two: AxisOrder | None) -> AxisOrder | None:
    """Return the order of one axis that two computations state; none and unknown contradict nothing."""
    known = [order for order in (one, two) if order not in (None, UNKNOWN)]
    if not known:
        return UNKNOWN if UNKNOWN in (one, two) else None
    return known[0] if len(set(known)) == 1 else UNKNOWN


def _read_script_orders(checkpoint: Checkpoint, shapes: Sequence[Shape]) -> _Orders:
    """Return the orders in a TorchScript archive's forward, none if the checkpoint is not an archive.

    `shapes` are the inputs of the model to fill, images with their channels first or last. If forward
    cannot be evaluated for its recorded inputs, all orders are unknown; for others, if it may reorder axes.
    """
    from ckpttool.graphs import torchscript
    from ckpttool.graphs.torchscript_code import read_code, traced_inputs

    texts = read_code(checkpoint)
    if texts is None:
        return {}
    traced = tuple(leaf.shape for leaf in traced_inputs(checkpoint))
    graph = torchscript.read_for_shapes(checkpoint, [traced] if traced else _candidates(checkpoint, shapes))
    if graph is not None:
        result = trace_graph_orders(graph, checkpoint.tree, 1)
        return with_uses(result if traced else _keep_size_independent(result), graph)
    if traced or any(map(_REORDERING_CODE.search, texts.values())):
        return mark_orders_unknown(checkpoint.tree)
    return {}


def _keep_size_independent(orders: _Orders) -> _Orders:
    """Return the orders that also hold for images of other sizes: those with unchanged positions."""

    def kept(order: AxisOrder | None) -> AxisOrder | None:
        if order is None or order == UNKNOWN:
            return order
        forms = (framework_order(order.parts, framework) for framework in ("torch", "tensorflow"))
        return order if order in forms else UNKNOWN

    return {
        path: WeightUse(kept(use.takes), kept(use.makes), parts=use.parts) for path, use in orders.items()
    }


def _candidates(checkpoint: Checkpoint, shapes: Sequence[Shape]) -> Iterator[tuple[Shape, ...]]:
    if shapes:
        yield tuple((1, shape[-1], *shape[:-1]) if len(shape) > 1 else (1, *shape) for shape in shapes)
        yield tuple((1, *shape) for shape in shapes)
        yield tuple((1, *shape[:-3], shape[-1], *shape[-3:-1]) for shape in shapes)
    widths: dict[int, None] = {}
    images: dict[tuple[int, int], None] = {}
    for _, leaf in checkpoint.tree.tensors():
        if len(leaf.shape) == _MATRIX:
            widths[leaf.shape[1]] = None
        elif len(leaf.shape) > _MATRIX:
            images[len(leaf.shape) - 2, leaf.shape[1]] = None
    able: list[tuple[Shape, ...]] = []
    for rank, channels in [*images][:2]:
        sides = _SIDES if rank < _IMAGE_RANK else _SIDES[:40]
        able += [((1, channels, *(side,) * rank),) for side in sides]
    vectors: list[tuple[Shape, ...]] = [((1, width),) for width in [*widths][:8]]
    yield from [*vectors, *able][:_TRIES]


def with_orders(
    tree: Tree,
    checkpoint: Checkpoint,
    shapes: Sequence[Shape] = (),
    *,
    sources: Mapping[Path, Path] | None = None,
    unknown: bool = True,
) -> Tree:
    """Return a checkpoint's tree, or one of its leaves, with the orders recorded by its computation.

    Args:
        tree: the tree that gets them.
        checkpoint: the one whose graph is evaluated.
        shapes: shapes of its inputs without the batch, where the file has none.
        sources: the checkpoint paths of leaves that were computed from others.
        unknown: mark an order that cannot be evaluated as unknown, instead of as not recorded.
    """
    orders = read_orders(checkpoint, shapes)
    if not orders:
        return tree
    whole = checkpoint.tree
    own = {id(whole[path]): order for path, order in orders.items() if path in whole}
    if sources is not None:
        # Their axes are not those of the checkpoint's leaves.
        own = {
            id(tree[path]): orders[old]._replace(role="")
            for path, old in sources.items()
            if path in tree and old in orders
        }
    return annotate_orders(tree, own, unknown=unknown)


def annotate_orders(tree: Tree, orders: Mapping[int, WeightUse], *, unknown: bool = True) -> Tree:
    """Return the tree with the orders of its leaves, by `id`; see with_orders for `unknown`.

    A leaf keeps its identity when preparation changes its path.
    """
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    for path, leaf in tree.items():
        use = orders.get(id(leaf))
        if use is not None and isinstance(leaf, Leaf):
            if not unknown:
                takes, makes = (None if side == UNKNOWN else side for side in (use.takes, use.makes))
                use = use._replace(takes=takes, makes=makes)
            leaf = replace(leaf, use=use)
        leaves[path] = leaf
    return Tree(leaves, tree.aliases, tree.containers)


# Kinds of operators (graphs/operators.py) that may reorder an image's axes, and those that layers are.
_REORDERING: frozenset[Kind | None] = frozenset(("transpose", "equation", "shuffle", "scatter"))
_LAYERS: frozenset[Kind | None] = frozenset(("window", "product", "lookup", "norm", "recurrent"))


class _TracedWeight(NamedTuple):
    """A constant, with the weights of the tree that it is or is computed from feature by feature.

    `part` is the axis along which only a part of the weight is left.
    """

    paths: tuple[Path, ...]
    shape: Shape
    part: int | None = None

    @property
    def path(self) -> Path | None:
        """The weight that it is, None if it is computed from others or is a part of one."""
        return self.paths[0] if len(self.paths) == 1 and self.part is None else None


def trace_graph_orders(
    graph: Graph, tree: Tree, channel: int, *, opaque: AxisOrder | None = UNKNOWN
) -> _Orders:
    """Return the orders recorded by a graph, by weight.

    `channel` is the axis of channels of the framework's images; `opaque` is the order behind an operation
    that is not evaluated. Extents of inputs that are not fixed are taken as 1; where that does not fit, other
    sizes are tried, and orders that depend on them are unknown. An operator's row states its kind
    (graphs/operators.py): those that move entries are computed on the numbers, elementwise ones keep them. A
    result of a kind without a rule is not traced.
    """
    if any(value.shape is None for value in graph.inputs):
        return _orders_of_failure(graph, tree) if opaque else {}
    open_images = [isinstance(extent, str) for value in graph.inputs for extent in (value.shape or ())[1:]]
    for side in (1, *_SIDES[:12]) if any(open_images) else (1,):
        shapes = {
            value.name: tuple(
                extent if isinstance(extent, int) else side if axis else 1
                for axis, extent in enumerate(value.shape or ())
            )
            for value in graph.inputs
        }
        reader = _RecordedOrderReader(graph, ShapeTracer(graph, shapes), opaque)
        try:
            for name, shape in shapes.items():
                reader.add_input(name, shape, channel)
            reader.add(graph.nodes)
            result = {**reader.orders(), **_orders_in_opaque_modules(graph, tree)}
        except (UntraceableError, TrackingLimitError, CkpttoolError):
            continue
        return _keep_size_independent(result) if side > 1 else result
    return _orders_of_failure(graph, tree) if opaque else {}


def _orders_of_failure(graph: Graph, tree: Tree) -> _Orders:
    """Return the orders of a graph that cannot be evaluated: unknown if it may reorder axes of images."""
    # A transposition at the place of a layer belongs to its translation.
    layers = {node.place for node in graph.nodes if operator_kind(node.op) in _LAYERS}
    reorders = any(operator_kind(node.op) in _REORDERING and node.place not in layers for node in graph.nodes)
    return mark_orders_unknown(tree) if reorders else {}


def _orders_in_opaque_modules(graph: Graph, tree: Tree) -> _Orders:
    """Return unknown orders for the weights of modules whose code is not translated."""
    modules = [node.scope for node in graph.nodes if node.op.startswith("__torch__.")]
    used = {constant.path for constant in graph.constants.values()}
    return {
        path: orders
        for path, orders in (mark_orders_unknown(tree) if modules else {}).items()
        if path not in used
        and any(tuple(str(step.value) for step in path)[: len(scope)] == scope for scope in modules)
    }


_TracedValue = _Activation | _UntracedActivation | _TracedWeight
_Inputs = Sequence[_TracedValue | None]


@dataclass
class _RecordedOrderReader:
    """Evaluates the nodes of a graph, and records what layers take and make.

    `opaque` is the order behind an operation that is not evaluated; `values` are activations and weights by
    name, `uses` the rows of entries of each weight's inputs ("takes") and outputs ("makes") in its calls.
    `loops` is the number of loops around the nodes that are evaluated.
    """

    graph: Graph
    shapes: ShapeTracer
    opaque: AxisOrder | None
    values: dict[str, _TracedValue] = field(default_factory=dict)
    activations: ActivationTracker = field(default_factory=ActivationTracker)
    uses: dict[Path, dict[str, list[Any]]] = field(default_factory=dict)
    inputs: list[_Activation] = field(default_factory=list)
    convolutions: list[tuple[Path, _Activation]] = field(default_factory=list)
    loops: int = 0
    steps: int = 0
    numbered: int = 0

    # Values.

    def value(self, name: str) -> _TracedValue:
        """Return a value by name."""
        if name not in self.values:
            constant = self.graph.constants.get(name)
            if constant is None or constant.shape is None:
                raise UntraceableError
            paths = () if constant.path is None else (constant.path,)
            self.values[name] = _TracedWeight(paths, constant.shape)
        return self.values[name]

    def tensor(self, value: _TracedValue | None) -> _Activation:
        """Return a value as an activation: a constant is never an image."""
        if isinstance(value, _Activation):
            return value
        if isinstance(value, _TracedWeight):
            return self.fresh(value.shape)
        raise UntraceableError

    def fresh(self, shape: Shape) -> _Activation:
        """Return a result whose entries do not belong to an image yet."""
        return _Activation(shape, lambda: self._number(shape, None))

    def image(self, shape: Shape, channel: int = _CHANNEL) -> _Activation:
        """Return new images, with their channels on this axis."""
        if any(extent < 1 for extent in shape):
            raise UntraceableError
        return _Activation(shape, lambda: self._number(shape, channel), channel)

    def _number(self, shape: Shape, channel: int | None) -> Any:
        if any(extent < 0 for extent in shape):
            raise UntraceableError
        _require_room(shape)
        self.numbered += math.prod(shape)
        if self.numbered > _MOST_ENTRIES:
            raise TrackingLimitError
        return self.activations.plain(shape) if channel is None else self.activations.image(shape, channel)

    def add_input(self, name: str, shape: Shape, channel: int) -> None:
        """Add a model input: an image if its shape allows it and nothing contradicts it.

        `channel` is the axis of channels of the framework's images.
        """
        self.values[name] = activation = self.fresh(shape)
        self.inputs.append(activation)
        # PyTorch image models without convolutions may have inputs with the channels last.
        first = channel == 1 and not (len(shape) > 2 and shape[1] <= _COLOURS < min(shape[2:]))
        if len(shape) > _IMAGE_RANK and not first:
            self.activations.unless_known(activation.entries, channel % len(shape))

    # Nodes.

    def add(self, nodes: Iterable[OperatorNode]) -> None:
        """Evaluate nodes in their order; raise UntraceableError if a shape does not fit one."""
        for node in nodes:
            self.steps += 1
            inputs = [self.value(name) if name else None for name in node.inputs]
            inferred = self.shapes.add(node).outputs
            if self.shapes.misfits or self.steps > _MOST_STEPS:
                raise UntraceableError
            outputs: Sequence[_TracedValue]
            if node.op in ("If", "Loop"):
                outputs = self._branched(node, inputs)
            elif is_known(node.op) and (
                all(input_ is None or isinstance(input_, _TracedWeight) for input_ in inputs)
                or all(self.shapes.is_constant(name) for name in node.outputs if name)
            ):
                outputs = [self._weight(node, inputs, shape) for shape in inferred]
            else:
                outputs = self._outputs(node, inputs, inferred)
            rest = [_UntracedActivation()] * len(node.outputs)
            self.values.update(zip(node.outputs, [*outputs, *rest], strict=False))

    def _branched(self, node: OperatorNode, inputs: _Inputs) -> Sequence[_TracedValue]:
        """Return the results of a condition on which its branches agree, or untraced ones of a loop.

        The body of a loop is evaluated once: what its layers take is the same in each step.
        """
        branches = self.shapes.branches(node)
        for branch in branches:
            for counter in branch.inputs[:2] if node.op == "Loop" else ():
                self.shapes.shapes[counter.name] = ()
                self.values[counter.name] = self.fresh(())
            for value, outer, name in zip(branch.inputs[2:], inputs[2:], node.inputs[2:], strict=False):
                self.shapes.shapes[value.name] = self.shapes.shape(name)
                # A state that begins with constants is changed in each step.
                fixed = outer is None or isinstance(outer, _UntracedActivation)
                self.values[value.name] = _UntracedActivation() if fixed else self.tensor(outer)
            self.loops += node.op == "Loop"
            self.add(branch.nodes)
            self.loops -= node.op == "Loop"
        if node.op == "Loop":
            return [
                input_ if isinstance(input_, _TracedWeight) else _UntracedActivation()
                for input_ in inputs[2:]
            ]
        results = zip(
            *([self.value(output.name) for output in branch.outputs] for branch in branches), strict=True
        )
        return [result[0] if self._is_same(result) else _UntracedActivation() for result in results]

    @staticmethod
    def _is_same(values: Sequence[_TracedValue]) -> bool:
        first, *others = values
        return all(
            other is first
            or (
                isinstance(other, _Activation)
                and isinstance(first, _Activation)
                and np.array_equal(other.entries, first.entries)
            )
            for other in others
        )

    def _weight(self, node: OperatorNode, inputs: _Inputs, shape: Shape | None) -> _TracedValue:
        """Return the result of an operator on constants, with the weights whose features it keeps."""
        if shape is None:
            return _UntracedActivation()
        weights = [input_ for input_ in inputs if isinstance(input_, _TracedWeight)]
        first = weights[0] if weights else _TracedWeight((), shape)
        plain = _TracedWeight((), shape)
        kind = operator_kind(node.op)
        if operator_kind(node.op) in COMBINATIONS:
            whole = [weight for weight in weights if weight.shape == shape and weight.paths]
            if all(_count_long(weight.shape) <= 1 for weight in weights):
                return _TracedWeight(
                    tuple(dict.fromkeys(p for weight in weights for p in weight.paths)), shape
                )
            # Such as a mean and a deviation, times noise.
            paths = tuple(dict.fromkeys(p for weight in whole for p in weight.paths))
            alike = all(weight.part is None for weight in whole)
            return whole[0] if len(whole) == 1 else plain._replace(paths=paths if alike else ())
        if kind == "transpose" and first.part is None:
            return first._replace(shape=shape)
        if kind == "transpose" and len(shape) == _MATRIX:
            return first._replace(shape=shape, part=1 - (first.part or 0))
        if kind == "reshape" and first.part is None:
            # A convolution over one axis may be one over two of which one has the extent 1.
            long = [[n for n in extents if n > 1] for extents in (first.shape, shape)]
            return first._replace(shape=shape) if long[0] == long[1] else plain
        if node.op == "Split" and len(shape) == _MATRIX and first.part is None:
            return first._replace(shape=shape, part=node.attributes.get("axis", 0) % _MATRIX)
        if kind == "join" and len(shape) > _MATRIX and node.attributes.get("axis") == 0:
            # The directions of a recurrent layer.
            return _TracedWeight(tuple(p for weight in weights for p in weight.paths), shape)
        return plain

    def _outputs(
        self, node: OperatorNode, inputs: _Inputs, inferred: Sequence[Shape | None]
    ) -> Sequence[_TracedValue]:
        kind = operator_kind(node.op)
        untraced = [input_ for input_ in inputs if isinstance(input_, _UntracedActivation)]
        if untraced and kind not in ("product", "recurrent"):
            features = {value.features for value in untraced}
            keeps = operator_kind(node.op) in COMBINATIONS or kind in ("channelwise", "norm")
            return [_UntracedActivation(features.pop() if keeps and len(features) == 1 else None)]
        shape = inferred[0] if inferred else None
        with suppress(ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            if (rule := _ORDERS.get(kind)) is not None:
                return [rule(self, node, inputs, shape)]
            if shape is not None and operator_kind(node.op) in MOVEMENTS:
                return self.moved(node, inputs, inferred)
        return [_UntracedActivation()]

    def reduced(
        self, node: OperatorNode, inputs: _Inputs, shape: Shape | None
    ) -> _Activation | _UntracedActivation:
        """Return the result of a reduction over axes, which is an image if one with channels is left."""
        if shape is None:
            return _UntracedActivation()
        x = self.tensor(inputs[0])
        if x.shape == shape:
            return x
        listed = node.attributes.get("axes")
        if listed is None and len(node.inputs) > 1 and node.inputs[1]:
            listed = self.shapes.value(node.inputs[1]).reshape(-1).tolist()
        axes = {axis % len(x.shape) for axis in listed or range(len(x.shape))}
        if x.channel is None or x.channel in axes or len(shape) < _IMAGE_RANK:
            return self.fresh(shape)
        removed = axes if len(shape) < len(x.shape) else ()
        return self.image(shape, x.channel - sum(axis < x.channel for axis in removed))

    def combined(
        self, node: OperatorNode, inputs: _Inputs, inferred: Shape | None
    ) -> _Activation | _UntracedActivation:
        """Return the result of an elementwise operation on results broadcast to one shape."""
        if inferred is None:
            return _UntracedActivation()
        values = [self.tensor(input_) for input_ in inputs if input_ is not None]
        shape = np.broadcast_shapes(*(value.shape for value in values))
        whole = [value for value in values if value.shape == shape] or [self.fresh(shape)]
        output = next((value for value in whole if value.channel is not None), whole[0])
        for value in whole:
            if value is not output and (value.channel is None or value.channel != output.channel):
                self.activations.link(output.entries, value.entries)
        for weight in inputs if operator_kind(node.op) == "scaling" else ():
            if not isinstance(weight, _TracedWeight) or _count_long(weight.shape) != 1:
                continue
            # A norm multiplies each feature by one number.
            axis = next(n - len(weight.shape) for n, extent in enumerate(weight.shape) if extent > 1)
            if -axis <= len(shape) and shape[axis] == weight.shape[axis]:
                self.norms(weight, output, axis)
        return output

    def moved(
        self, node: OperatorNode, inputs: _Inputs, inferred: Sequence[Shape | None]
    ) -> list[_Activation | _UntracedActivation]:
        """Return entries in new positions, as the operator moves numbers."""
        tensors = [
            self.tensor(value)
            for value in (inputs if operator_kind(node.op) == "join" else inputs[:1])
            if value is not None
        ]
        x, shape = tensors[0], inferred[0] or ()
        if (kind := operator_kind(node.op)) == "reshape":
            return [x if x.shape == shape else _Activation(shape, lambda: x.entries.reshape(shape))]
        if kind == "transpose":
            perm = node.attributes.get("perm") or range(len(shape))[::-1]
            return [_transposed(x, [axis % len(shape) for axis in perm])]
        channel = x.channel if kind == "extent" else None
        if kind == "join":
            axis = node.attributes.get("axis", 0) % len(shape)
            channel = axis if {tensor.channel for tensor in tensors} == {axis} else None
        # Padding is 0, the number of no entry here; the value that pads is not an entry.
        positions = [self.shapes.value(name) if name else None for name in node.inputs[len(tensors) :]]
        if node.op == "Pad" and len(positions) > 1:
            positions[1] = None
        # Entries are numbered when they are required.
        results: list[Any] = []

        def move(number: int) -> Any:
            if not results:
                for extents in inferred:
                    _require_room(extents or ())
                results.extend(compute_node(node, [*(tensor.entries + 1 for tensor in tensors), *positions]))
            return results[number] - 1

        return [
            _UntracedActivation() if shape is None else _Activation(shape, partial(move, number), channel)
            for number, shape in enumerate(inferred)
        ]

    # Layers.

    def record(self, weight: Path, side: str, x: _Activation | _UntracedActivation, axis: int = -1) -> None:
        """Record the entries of a layer's input ("takes") or output ("makes") along an axis."""
        rows = self.uses.setdefault(weight, {}).setdefault(side, [])
        if isinstance(x, _UntracedActivation):
            rows.append(x.features)
            return
        if not (x.shape and x.entries.size):
            raise UntraceableError
        entries = np.moveaxis(x.entries, axis, -1).reshape(-1, x.shape[axis])
        # The first position may be padding.
        whole = np.flatnonzero((entries >= 0).all(1))
        rows.append(entries[whole[0] if len(whole) else 0])

    def norms(self, weight: _TracedWeight, x: _Activation, axis: int) -> None:
        """Record the input of a norm or a PReLU with one number per feature."""
        for path in weight.paths if x.channel is None else ():
            self.record(path, "takes", x, axis)

    # Result.

    def orders(self) -> dict[Path, WeightUse]:
        """Return the orders by weight, UNKNOWN where an operation before the layer was not evaluated."""
        for weight, output in self.convolutions:
            # For most convolutions the entries are never requested.
            if output.is_numbered:
                self.record(weight, "makes", output, _CHANNEL)
        self.activations.finish()
        result, origins = {}, self._origins()
        for weight, sides in self.uses.items():
            orders = {side: self._order(calls) for side, calls in sides.items()}
            parts = common_parts([self._parts(row, origins) for row in sides.get("takes", ())])
            result[weight] = WeightUse(orders.get("takes"), orders.get("makes"), parts=parts)
        return result

    def _origins(self) -> dict[int, tuple[str, Any]]:
        """Return the model inputs and the layers, by their weights, of which each result is the output."""
        origins: dict[int, tuple[str, Any]] = {-1: (MIXED, -1)}
        for number, value in enumerate(self.inputs):
            if value.is_numbered:
                for label, _ in self.activations.results(value.entries.ravel()):
                    origins[label] = ("input", number)
        for weight, sides in self.uses.items():
            for row in sides.get("makes", ()):
                results = self.activations.results(row) if isinstance(row, np.ndarray) else ()
                if len(results) == 1:
                    origins.setdefault(results[0][0], ("call", weight))
        return origins

    def _parts(self, row: Any, origins: Mapping[int, tuple[str, Any]]) -> Parts:
        results = self.activations.results(row) if isinstance(row, np.ndarray) else ()
        if len(results) < 2:
            return ()
        return tuple(FeaturePart(count, *origins.get(label, ("", -1))) for label, count in results)

    def _order(self, calls: Sequence[Any]) -> AxisOrder | None:
        """Return the order of all calls: rows of entries, or for an untraced activation its features."""
        traced = [row for row in calls if isinstance(row, np.ndarray)]
        if self.opaque is None and len(traced) < len(calls):
            return None
        # The number of features alone records no order.
        orders: set[AxisOrder | None] = {self.activations.order(row) or UNKNOWN for row in traced}
        orders |= {UNKNOWN for row in calls if row is None}
        orders |= {None for row in calls if isinstance(row, int)}
        return orders.pop() if len(orders) == 1 else UNKNOWN


def _transposed(x: _Activation, perm: Sequence[int]) -> _Activation:
    """Return a result with its axes in another order; images stay images if only channels moved."""
    others = [axis for axis in perm if axis != x.channel]
    channel = perm.index(x.channel) if x.channel is not None and others == sorted(others) else None
    return _Activation(tuple(x.shape[axis] for axis in perm), lambda: x.entries.transpose(perm), channel)


def _count_long(shape: Shape) -> int:
    """Return the number of axes with more than one entry."""
    return sum(extent > 1 for extent in shape)


_OrderRule = Callable[
    [_RecordedOrderReader, OperatorNode, _Inputs, Shape | None], _Activation | _UntracedActivation
]


def _convolution(
    run: _RecordedOrderReader, node: OperatorNode, inputs: _Inputs, shape: Shape | None
) -> _Activation | _UntracedActivation:
    """Return the output of an image operation; a convolution is identified by its weight.

    A convolution's channels have a separate order where a pixel shuffle follows it.
    """
    if shape is None and node.op == "Resize":
        return _UntracedActivation()
    x = run.tensor(inputs[0])
    if shape is None or not _IMAGE_RANK <= len(shape) == len(x.shape):
        raise UntraceableError
    is_image = x.channel == _CHANNEL
    if not is_image:
        run.activations.take(x.entries, _CHANNEL)
    output = run.image(shape)
    weight = (
        inputs[1] if node.op in ("Conv", "ConvTranspose") and node.attributes.get("group", 1) == 1 else None
    )
    if isinstance(weight, _TracedWeight) and weight.path is not None:
        run.convolutions.append((weight.path, output))
        if not is_image:
            run.record(weight.path, "takes", x, _CHANNEL)
    return output


def _product(
    run: _RecordedOrderReader, node: OperatorNode, inputs: _Inputs, shape: Shape | None
) -> _Activation | _UntracedActivation:
    x, weight = inputs[0], inputs[1]
    turned = bool(node.attributes.get("transB", 0))
    layer = isinstance(weight, _TracedWeight) and len(weight.shape) == _MATRIX
    if layer and isinstance(weight, _TracedWeight) and isinstance(x, _Activation | _UntracedActivation):
        if node.attributes.get("transA", 0):
            return _UntracedActivation()
        rows, columns = weight.shape[::-1] if turned else weight.shape
        if weight.path is not None:
            width = x.features if isinstance(x, _UntracedActivation) else x.shape[-1] if x.shape else 0
            if width not in (None, rows):
                raise UntraceableError
            run.record(weight.path, "takes", x)
            if isinstance(x, _UntracedActivation):
                return _UntracedActivation(columns)
            output = run.fresh((*x.shape[:-1], columns))
            run.record(weight.path, "makes", output)
            return output
        if weight.part in (None, 0 if turned else 1):
            for path in weight.paths:
                run.record(path, "takes", x)
    traced = not any(isinstance(operand, _UntracedActivation) for operand in (x, weight))
    return run.fresh(shape) if traced and shape is not None else _UntracedActivation()


def _einsum(
    run: _RecordedOrderReader, node: OperatorNode, inputs: _Inputs, shape: Shape | None
) -> _Activation | _UntracedActivation:
    """Return the result of an equation: for one operand, its entries in another order."""
    if shape is None:
        return _UntracedActivation()
    equation = str(node.attributes.get("equation", "")).replace(" ", "")
    letters, _, result = equation.partition("->")
    names = letters.split(",")
    for number, weight in enumerate(inputs if len(inputs) == _MATRIX and "." not in equation else ()):
        x = inputs[1 - number]
        if not isinstance(weight, _TracedWeight) or not isinstance(x, _Activation) or not weight.path:
            continue
        shared = [letter for letter in names[number] if letter in names[1 - number] and letter not in result]
        if len(weight.shape) == _MATRIX and len(shared) == 1:
            run.record(weight.path, "takes", x, names[1 - number].index(shared[0]))
    tensors = [run.tensor(input_) for input_ in inputs]
    if len(tensors) == 1 and "." not in letters and sorted(letters) == sorted(result) == sorted(set(result)):
        return _transposed(tensors[0], [letters.index(letter) for letter in result])
    return run.fresh(shape)


def _gather(
    run: _RecordedOrderReader, node: OperatorNode, inputs: _Inputs, shape: Shape | None
) -> _Activation | _UntracedActivation:
    x, positions = inputs
    axis = node.attributes.get("axis", 0)
    if run.loops and isinstance(x, _Activation) and axis == 0 and len(x.shape) == len(shape or ()) + 1:
        # A step of a sequence: all have the same order.
        return _Activation(x.shape[1:], lambda: x.entries[0])
    if isinstance(positions, _Activation):
        embedded = isinstance(x, _TracedWeight) and x.path is not None and len(x.shape) == _MATRIX
        if not embedded or shape is None or axis != 0:
            return _UntracedActivation()
        output = run.fresh(shape)
        if isinstance(x, _TracedWeight) and x.path is not None:
            run.record(x.path, "makes", output)
        return output
    return run.moved(node, inputs, [shape])[0]


def _norm(
    run: _RecordedOrderReader,
    node: OperatorNode,
    inputs: _Inputs,
    shape: Shape | None,  # noqa: ARG001  # as of any rule
) -> _Activation:
    x, weight = run.tensor(inputs[0]), inputs[1]
    axis = 1 if node.op == "BatchNormalization" else node.attributes.get("axis", -1)
    vector = isinstance(weight, _TracedWeight) and len(weight.shape) == 1
    if isinstance(weight, _TracedWeight) and vector and axis % len(x.shape) in (1, len(x.shape) - 1):
        run.norms(weight, x, axis)
    return x


def _pixel_shuffle(
    run: _RecordedOrderReader, node: OperatorNode, inputs: _Inputs, shape: Shape | None
) -> _Activation | _UntracedActivation:
    """Return the output of a pixel shuffle: channels become places (DepthToSpace), or the reverse."""
    (output,) = run.moved(node, inputs, [shape])
    image = run.tensor(output if node.op == "DepthToSpace" else inputs[0])
    run.activations.take(image.entries, _CHANNEL)
    return output


def _recurrent(
    run: _RecordedOrderReader,
    node: OperatorNode,  # noqa: ARG001  # as of any rule
    inputs: _Inputs,
    shape: Shape | None,
) -> _Activation | _UntracedActivation:
    x, weight = inputs[0], inputs[1]
    if not isinstance(weight, _TracedWeight) or not weight.paths:
        return _UntracedActivation()
    for path in weight.paths:
        run.record(path, "takes", x if isinstance(x, _UntracedActivation) else run.tensor(x))
    traced = shape is not None and not isinstance(x, _UntracedActivation)
    return run.fresh(shape or ()) if traced else _UntracedActivation()


# By kinds of operators; movements without a rule are computed on numbers.
_ORDERS: Mapping[Kind | None, _OrderRule] = {
    "elementwise": _RecordedOrderReader.combined,
    "scaling": _RecordedOrderReader.combined,
    **dict.fromkeys(("first", "channelwise"), lambda run, _node, inputs, _shape: run.tensor(inputs[0])),
    "norm": _norm,
    "window": _convolution,
    "product": _product,
    "equation": _einsum,
    "lookup": _gather,
    "shuffle": _pixel_shuffle,
    "recurrent": _recurrent,
    "reduction": _RecordedOrderReader.reduced,
}
