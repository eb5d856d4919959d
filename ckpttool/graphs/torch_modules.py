"""Graphs of pickled modules of PyTorch's own classes: Sequential and the layers of torch.nn, in inference.

Sources: torch/nn/modules/** (attributes and `forward` of each class). A module of another class records no
computation; inside a Sequential it is opaque. So is a layer with hooks, or with an attribute or a tensor
that no rule reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.kinds import ACTIVATION_KINDS, gate_order
from ckpttool.core.source import Shape
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, attr, index, key
from ckpttool.graphs.builder import ACTIVATION_NODES, ModuleNodes
from ckpttool.graphs.graph import Constant, Graph, OperatorNode, ShapeMismatchError, UnknownShapeError, Value
from ckpttool.graphs.operators import is_known
from ckpttool.graphs.shapes import ShapeTracer, trace_nodes
from ckpttool.mapping.rules import KEEP, TRANSPOSE, BlockOrder, Reshape, Rule, chain_rules

_CLASSES, _SEQUENTIAL = "torch.nn.modules.", "torch.nn.modules.container.Sequential"
_FLOATS = ("float32", "float64", "float16", "bfloat16")
_MOST_MODULES, _DEEPEST = 100_000, 50
# Entries of a constant that stands for a scale or an offset that a layer does not have.
_MOST_FILLED = 1 << 20
_MOST_STEPS = 1 << 12  # of all layers of a recurrent module
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Attributes that do not change what a layer computes at inference.
_UNUSED = frozenset(
    ("training", "inplace", "in_features", "out_features", "in_channels", "out_channels", "num_features")
) | {"momentum", "transposed", "p", "num_parameters", "init", "num_embeddings", "embedding_dim"}
_UNUSED |= {"padding_idx", "norm_type", "scale_grad_by_freq", "sparse", "num_channels", "call_super_init"}


class OpaqueModuleError(Exception):
    """A module, an attribute or a tensor is not understood."""


def _require(condition: object) -> None:
    if not condition:
        raise OpaqueModuleError


def read(checkpoint: Checkpoint) -> Graph | None:
    """Return the graph of a pickled module; None for another object, and for a module of a custom class."""
    top = checkpoint.tree.containers.get(())
    cls = (top.name if top is not None else None) or ""
    if not cls.startswith(_CLASSES):
        return None
    reader = _TorchModuleReader(checkpoint.tree)
    first = next((leaf for _, leaf in reader.tree.tensors()), None)
    dtype = first.dtype if first is not None else "float32"
    first_class = next(iter(reader.list_classes((), cls)), cls)
    name = "input"
    result = reader.module((), cls, (), name)
    inputs = (Value(name, "int64" if first_class.endswith("sparse.Embedding") else dtype),)
    results = (result, *reader.states.get(result, ()))
    names = ("output", *(f"state_{number}" for number in range(len(results) - 1)))
    for own, title in zip(results, names, strict=True):
        reader.nodes.append(OperatorNode("Identity", (own,), (title,), {}, title, (), "output"))
    return Graph(tuple(reader.nodes), inputs, tuple(map(Value, names)), reader.constants, cls)


class TorchLayerShapes:
    """Output shapes and operations of single modules of a file, for shapes of their inputs."""

    def __init__(self, tree: Tree) -> None:
        """Read the attributes and tensors of modules from a tree."""
        self._reader = _TorchModuleReader(tree, as_parts=True)

    def infer(self, path: Path, cls: str, shape: Shape) -> tuple[Shape, int | None]:
        """Return the shape of a module's (first) output and its operations; shapes have the batch.

        Raise ShapeMismatchError if the input does not fit the module, UnknownShapeError if the module is
        not understood.
        """
        graph = self.graph(path, cls, shape)
        tracer, macs = trace_nodes(graph.nodes, graph.constants, {graph.inputs[0].name: shape})
        made = tracer.shape(graph.outputs[0].name)
        if made is None:
            raise UnknownShapeError
        return made, macs

    def graph(self, path: Path, cls: str, shape: Shape) -> Graph:
        """Return the graph of one module for an input of this shape; raise ShapeMismatchError as `infer`."""
        reader = self._reader
        reader.nodes.clear()
        name = reader.new_name("input")
        reader.tracer.shapes[name] = shape
        try:
            result = reader.module(path, cls, tuple(str(step.value) for step in path), name)
        except (ValueError, ArithmeticError, LookupError) as error:
            raise ShapeMismatchError from error
        return Graph(tuple(reader.nodes), (Value(name),), (Value(result),), reader.constants, cls)


@dataclass
class _TorchModuleReader:
    """Translates modules to nodes."""

    tree: Tree
    # Whether modules are parts of another one, which may call them with several inputs.
    as_parts: bool = False
    nodes: list[OperatorNode] = field(default_factory=list)
    constants: dict[str, Constant] = field(default_factory=dict)
    # The other results of modules that return a tuple, by the first one.
    states: dict[str, list[str]] = field(default_factory=dict)
    count: int = 0
    names: int = 0

    def __post_init__(self) -> None:
        """List the attributes and entries below each path."""
        self.tracer = ShapeTracer(Graph((), (), (), self.constants), {})
        self.below: dict[Path, dict[Any, None]] = {}
        for path in (*self.tree, *self.tree.containers):
            for depth, step in enumerate(path):
                self.below.setdefault(path[:depth], {})[step] = None

    def list_children(self, path: Path) -> list[tuple[str, Path, str]]:
        """Return the name, path and class of a module's parts, in the order of their use."""
        children = []
        for step in self.below.get((*path, attr("_modules")), ()):
            inner = (*path, attr("_modules"), step)
            container = self.tree.containers.get(inner)
            cls = (container.name if container is not None else None) or ""
            children.append((str(step.value), inner, cls))
        return children

    def list_classes(self, path: Path, cls: str, depth: int = 0) -> Iterator[str]:
        """Yield the classes of the layers in a Sequential."""
        if cls != _SEQUENTIAL or depth > _DEEPEST:
            yield cls
            return
        for _, inner, own in self.list_children(path):
            yield from self.list_classes(inner, own, depth + 1)

    def module(self, path: Path, cls: str, scope: tuple[str, ...], x: str) -> str:
        """Add the nodes of a module and return its result."""
        self.count += 1
        hooked = any(self.below.get((*path, attr(name))) for name in _HOOKS)
        replaced = attr("forward") in self.below.get(path, ())
        legal = self.count <= _MOST_MODULES and len(scope) <= _DEEPEST
        if cls == _SEQUENTIAL and legal and not hooked and not replaced:
            for name, inner, own in self.list_children(path):
                x = self.module(inner, own, (*scope, name), x)
            return x
        call = TorchCall(self, path, cls, scope)
        short = cls.rpartition(".")[2]
        try:
            _require(cls.startswith(_CLASSES) and legal and not hooked and x not in self.states)
            rule = _RULES.get(short) or _RANKED.get(re.sub(r"[123]d\Z", "", short))
            rule = _PARTS.get(short) if self.as_parts and rule is None else rule
            _require(rule is not None)
            _require_axes(short, self.tracer.shape(x))
            result = rule(call, x)  # type: ignore[misc]
            call.require_understood()
        except OpaqueModuleError:
            op = f"torch.{short}" if is_known(short) else short or "module"
            result = self.new_name(f"{'.'.join(scope)}/{op}")
            plain = {
                str(step.value): leaf.value
                for step in self.below.get(path, ())
                if isinstance(leaf := self.tree.get((*path, step)), ValueLeaf)
                if isinstance(leaf.value, str | int | float | bool) and step.value != "training"
            }
            self.nodes.append(OperatorNode(op, (x,), (result,), plain, ".".join(scope), scope, call.place))
            return result
        self.nodes += call.nodes
        return result

    def new_name(self, stem: str) -> str:
        """Return a new name of a value or constant."""
        self.names += 1
        return f"{stem}:{self.names}"


class TorchCall(ModuleNodes):
    """One module with its attributes and tensors, and the nodes that it becomes."""

    def __init__(self, reader: _TorchModuleReader, path: Path, cls: str, scope: tuple[str, ...]) -> None:
        """Record the module; nothing is added to the graph yet."""
        title = ".".join(scope)
        super().__init__(reader, scope, title, f"module {title}".rstrip())
        self.path, self.cls = path, cls
        self._read = set[str]()

    @property
    def rank(self) -> int:
        """The number of spatial axes in the name of the class."""
        _require(self.cls[-2:] in ("1d", "2d", "3d"))
        return int(self.cls[-2])

    def extents(self, x: str) -> tuple[int, ...]:
        """Return the shape of a value; raise OpaqueModuleError if the input's is not known."""
        shape = self.reader.tracer.shape(x)
        if shape is None:
            raise OpaqueModuleError
        return shape

    # Attributes and tensors.

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute: a plain value, or a list of them."""
        self._read.add(name)
        path = (*self.path, attr(name))
        leaf = self.reader.tree.get(path)
        if isinstance(leaf, ValueLeaf):
            return leaf.value
        if path not in self.reader.tree.containers:
            _require(leaf is None)
            return default
        steps = self.reader.below.get(path, {})
        items = [self.reader.tree.get((*path, index(number))) for number in range(len(steps))]
        _require(all(isinstance(item, ValueLeaf) for item in items))
        return [item.value for item in items if isinstance(item, ValueLeaf)]

    def number(self, name: str) -> float:
        """Return an attribute that is a finite number."""
        value = self.get(name)
        _require(isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))
        return float(value)

    def flag(self, name: str) -> bool:
        """Return an attribute that is true or false."""
        value = self.get(name)
        _require(isinstance(value, bool))
        return bool(value)

    def sizes(self, name: str, least: int = 1) -> tuple[int, ...]:
        """Return an attribute as one number for each spatial axis."""
        value = self.get(name)
        sizes = value if isinstance(value, list) else [value] * self.rank
        sizes = sizes * self.rank if len(sizes) == 1 else sizes
        _require(len(sizes) == self.rank and all(type(n) is int and least <= n < 1 << 20 for n in sizes))
        return tuple(sizes)

    def require_understood(self) -> None:
        """Raise OpaqueModuleError for an attribute, a tensor or a part that no rule has read."""
        for step in self.reader.below.get(self.path, ()):
            name = str(step.value)
            value = self.reader.tree.get((*self.path, step))
            empty = isinstance(value, ValueLeaf) and value.value is None
            _require(name in self._read or name in _UNUSED or name.startswith("_") or empty)
        for kind in ("_parameters", "_buffers"):
            for step in self.reader.below.get((*self.path, attr(kind)), ()):
                leaf = self.reader.tree.get((*self.path, attr(kind), step))
                unused = isinstance(leaf, ValueLeaf) and leaf.value is None
                _require(step.value in self._read or step.value == "num_batches_tracked" or unused)
        parts = self.reader.below.get((*self.path, attr("_modules")), ())
        _require(all(step.value in self._read for step in parts))

    def find(self, name: str) -> tuple[Path, Leaf] | None:
        """Return the path and leaf of a parameter or buffer, None if the module has none."""
        for kind in ("_parameters", "_buffers"):
            path = (*self.path, attr(kind), key(name))
            path = self.reader.tree.shared.get(path, path)
            leaf = self.reader.tree.get(path)
            if isinstance(leaf, Leaf):
                _require(leaf.dtype in _FLOATS)
                return path, leaf
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; raise OpaqueModuleError without it."""
        found = self.find(name)
        if found is None:
            raise OpaqueModuleError
        return found[1].shape

    def weight(self, name: str = "weight", rule: Rule = KEEP) -> str:
        """Return the name of a tensor, changed by a rule."""
        self._read.add(name)
        found = self.find(name)
        if found is None:
            raise OpaqueModuleError
        title = ".".join((*self.scope, name))
        self.reader.constants[title] = Constant(found[1], found[0], rule)
        return title

    def optional(self, name: str) -> str:
        """Return the name of a tensor, "" if the module states that it has none."""
        self._read.add(name)
        value = self.reader.tree.get((*self.path, attr("_parameters"), key(name)))
        return "" if isinstance(value, ValueLeaf) and value.value is None else self.weight(name)

    def part(self, name: str) -> TorchCall:
        """Return a call of a module that is a part of this one."""
        self._read.add(name)
        call = TorchCall(self.reader, (*self.path, attr("_modules"), key(name)), "", (*self.scope, name))
        call.nodes = self.nodes
        return call

    # The graph.

    @property
    def dtype(self) -> str:
        """The element type of the modules' tensors."""
        return next((leaf.dtype for _, leaf in self.reader.tree.tensors()), "float32")

    def machine_epsilon(self) -> float:
        """Return the epsilon of the element type: the default of a root mean square norm."""
        import ml_dtypes

        from ckpttool.core import dtypes

        _require(self.dtype in _FLOATS)
        return float(ml_dtypes.finfo(dtypes.numpy_dtype(self.dtype)).eps)  # type: ignore[no-untyped-call]

    def constant(self, value: Any, dtype: str = "") -> str:
        """Return the name of a constant; the element type is that of the module's tensors."""
        dtype = dtype or self.dtype
        _require(dtype in (*_FLOATS, "int64"))
        return super().constant(value, dtype)

    def fill(self, value: float, shape: tuple[int, ...]) -> str:
        """Return the name of a constant with one number everywhere."""
        import numpy as np

        _require(0 < math.prod(shape) <= _MOST_FILLED)
        return self.constant(np.full(shape, value))


_Rule = Callable[[TorchCall, str], str]


def _require_axes(cls: str, shape: Shape | None) -> None:
    """Raise ShapeMismatchError for a number of axes, if it is known, that the class refuses."""
    if shape is not None and cls == "Dropout1d" and len(shape) not in (2, 3):
        raise ShapeMismatchError
    if shape is None or not re.search(r"[123]d\Z", cls) or cls.startswith("Dropout") or cls == "Softmax2d":
        return
    axes = int(cls[-2]) + 2
    # Without the batch, the first axis of an instance norm has the channels.
    _require(not cls.startswith("InstanceNorm") or len(shape) != axes - 1)
    if len(shape) != axes and (cls, len(shape)) != ("BatchNorm1d", 2):
        raise ShapeMismatchError


def _same(_call: TorchCall, x: str) -> str:
    return x


def _plain(op: str, **settings: str) -> _Rule:
    """Return the rule of an operator whose attributes are attributes of the module."""

    def rule(call: TorchCall, x: str) -> str:
        attributes: dict[str, Any] = {name: call.number(own) for name, own in settings.items()}
        return call.add(op, x, **attributes)

    return rule


def _elementary(name: str) -> _Rule:
    """Return the rule of a function of core/kinds.py."""
    return lambda call, x: ACTIVATION_NODES[name](call.add, call.constant, x)


def _limits(call: TorchCall, x: str) -> str:
    low, high = call.number("min_val"), call.number("max_val")
    return call.add("Clip", x, call.constant(low), call.constant(high))


def _softplus(call: TorchCall, x: str) -> str:
    beta, threshold = call.number("beta"), call.number("threshold")
    _require(beta > 0)
    factor = call.constant(beta)
    scaled = x if beta == 1 else call.add("Mul", x, factor)
    made = call.add("Softplus", scaled)
    made = made if beta == 1 else call.add("Div", made, factor)
    # Above the threshold the function is linear; from 20 on, float32 has the same values.
    if threshold >= 20:
        return made
    return call.add("Where", call.add("Greater", scaled, call.constant(threshold)), x, made)


def _gelu(call: TorchCall, x: str) -> str:
    approximate = call.get("approximate", "none")
    _require(approximate in ("none", "tanh"))
    return call.add("Gelu", x, approximate=approximate)


def _axis(call: TorchCall, name: str = "dim") -> int:
    axis = call.get(name)
    _require(type(axis) is int)
    return int(axis)


def _gated(call: TorchCall, x: str) -> str:
    axis, shape = _axis(call), call.reader.tracer.shape(x)
    if shape is not None and shape[axis] % 2:
        raise ShapeMismatchError
    left, right = call.split("Split", [x], 2, axis=axis, num_outputs=2)
    return call.add("Mul", left, call.add("Sigmoid", right))


def _prelu(call: TorchCall, x: str) -> str:
    if call.shape("weight") == (1,):
        return call.add("PRelu", x, call.weight())
    # A slope for each channel, on axis 1.
    after = len(call.extents(x)) - 2
    return call.add("PRelu", x, call.weight(rule=Reshape((*call.shape("weight"), *(1,) * after))))


def _threshold(call: TorchCall, x: str) -> str:
    above = call.add("Greater", x, call.constant(call.number("threshold")))
    return call.add("Where", above, x, call.constant(call.number("value")))


def _random_relu(call: TorchCall, x: str) -> str:
    return call.add("LeakyRelu", x, alpha=(call.number("lower") + call.number("upper")) / 2)


def _linear(call: TorchCall, x: str) -> str:
    _require(len(call.shape("weight")) == 2)
    return _plus(call, call.add("MatMul", x, call.weight(rule=TRANSPOSE)), call.optional("bias"))


def _plus(call: TorchCall, x: str, bias: str) -> str:
    return call.add("Add", x, bias) if bias else x


def _embedding(call: TorchCall, x: str) -> str:
    _require(call.get("max_norm") is None)
    return call.add("Gather", call.weight(), x, axis=0)


def _flatten(call: TorchCall, x: str) -> str:
    start, end = _axis(call, "start_dim"), _axis(call, "end_dim")
    if (start, end) == (1, -1):
        return call.add("Flatten", x, axis=1)
    shape = call.extents(x)
    if not all(-len(shape) <= axis < len(shape) for axis in (start, end)):
        raise ShapeMismatchError
    start, end = start % len(shape), end % len(shape)
    _require(0 < start <= end)
    return call.add("Reshape", x, call.integers(*shape[:start], -1, *shape[end + 1 :]))


def _unflatten(call: TorchCall, x: str) -> str:
    shape, sizes = call.extents(x), call.get("unflattened_size")
    axis = _axis(call) % len(shape)
    _require(
        axis > 0 and isinstance(sizes, list) and all(type(n) is int and (n > 0 or n == -1) for n in sizes)
    )
    known = math.prod(n for n in sizes if n != -1)
    _require(sizes.count(-1) < 2 and shape[axis] % known == 0)
    return call.add("Reshape", x, call.integers(*shape[:axis], *sizes, *shape[axis + 1 :]))


def _channel_shuffle(call: TorchCall, x: str) -> str:
    (groups,), (batch, channels, *rest) = _counts(call, "groups"), call.extents(x)
    split = call.integers(batch, groups, channels // groups, math.prod(rest))
    apart = call.add("Transpose", call.add("Reshape", x, split), perm=(0, 2, 1, 3))
    return call.add("Reshape", apart, call.integers(batch, channels, *rest))


def _pixel_shuffle(call: TorchCall, x: str) -> str:
    up = call.cls.endswith("PixelShuffle")
    (factor,) = _counts(call, "upscale_factor" if up else "downscale_factor")
    shape = call.reader.tracer.shape(x)
    _require(shape is None or len(shape) == 4)
    return call.add("DepthToSpace" if up else "SpaceToDepth", x, blocksize=factor, mode="CRD")


def _counts(call: TorchCall, *names: str) -> list[int]:
    """Return attributes that are positive numbers."""
    counts = [call.get(name) for name in names]
    _require(all(type(count) is int and 0 < count < 1 << 40 for count in counts))
    return counts


_PADDINGS = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def _pad(call: TorchCall, x: str, pairs: list[tuple[int, int]], mode: str, value: float = 0.0) -> str:
    """Pad the last axes; `pairs` are before and after, in the order of the axes."""
    shape = call.reader.tracer.shape(x)
    if mode in ("reflect", "wrap") and shape is not None:
        # A reflection leaves out the border itself (torch.nn.functional.pad).
        room = [extent - (mode == "reflect") for extent in shape[-len(pairs) :]]
        if any(max(pair) > most for pair, most in zip(pairs, room, strict=True)):
            raise ShapeMismatchError
    pads = [before for before, _ in pairs] + [after for _, after in pairs]
    axes = call.integers(*range(-len(pairs), 0))
    return call.add("Pad", x, call.integers(*pads), call.constant(value) if value else "", axes, mode=mode)


def _conv(call: TorchCall, x: str) -> str:
    rank = call.rank
    kernel, strides, dilations = (call.sizes(name) for name in ("kernel_size", "stride", "dilation"))
    groups, padding, mode = call.get("groups"), call.get("padding"), call.get("padding_mode", "zeros")
    call.sizes("output_padding", 0)
    _require(type(groups) is int and call.shape("weight")[2:] == kernel)
    if padding == "same":
        # torch/nn/modules/conv.py: the larger half of the padding is after the image.
        both = [wide * (size - 1) for wide, size in zip(dilations, kernel, strict=True)]
        pairs = [(n // 2, n - n // 2) for n in both]
    elif padding == "valid":
        pairs = [(0, 0)] * rank
    else:
        pairs = [(n, n) for n in call.sizes("padding", 0)]
    if mode != "zeros":
        _require(mode in _PADDINGS)
        x, pairs = _pad(call, x, pairs, _PADDINGS[mode]), [(0, 0)] * rank
    pads = (*(before for before, _ in pairs), *(after for _, after in pairs))
    settings = {"strides": strides, "dilations": dilations, "group": groups, "pads": pads}
    return call.add("Conv", x, call.weight(), call.optional("bias"), **settings)


def _transposed_conv(call: TorchCall, x: str) -> str:
    kernel, strides, dilations = (call.sizes(name) for name in ("kernel_size", "stride", "dilation"))
    groups, more, pads = call.get("groups"), call.sizes("output_padding", 0), call.sizes("padding", 0)
    _require(type(groups) is int and call.shape("weight")[2:] == kernel)
    _require(call.get("padding_mode", "zeros") == "zeros")
    # torch refuses these for every input.
    _require(all(n < max(steps) for n, *steps in zip(more, strides, dilations, strict=True)))
    settings = {"strides": strides, "dilations": dilations, "group": groups, "output_padding": more}
    return call.add("ConvTranspose", x, call.weight(), call.optional("bias"), pads=pads * 2, **settings)


def _pool_settings(call: TorchCall) -> dict[str, Any]:
    kernel = call.sizes("kernel_size")
    strides = kernel if call.get("stride") is None else call.sizes("stride")
    ceil = int(call.flag("ceil_mode"))
    pads = call.sizes("padding", 0)
    _require(all(2 * pad <= size for pad, size in zip(pads, kernel, strict=True)))  # torch refuses others
    return {"kernel_shape": kernel, "strides": strides, "pads": pads * 2, "ceil_mode": ceil}


def _max_pool(call: TorchCall, x: str) -> str:
    _require(not call.flag("return_indices"))
    return call.add("MaxPool", x, dilations=call.sizes("dilation"), **_pool_settings(call))


def _average_pool(call: TorchCall, x: str) -> str:
    divisor, counted = call.get("divisor_override"), int(call.flag("count_include_pad"))
    settings = _pool_settings(call)
    if divisor is None:
        return call.add("AveragePool", x, count_include_pad=counted, **settings)
    _require(type(divisor) is int and divisor > 0 and not settings["ceil_mode"])
    mean = call.add("AveragePool", x, count_include_pad=1, **settings)
    return call.add("Mul", mean, call.constant(math.prod(settings["kernel_shape"]) / divisor))


def _power_pool(call: TorchCall, x: str) -> str:
    # torch.nn.functional.lp_pool2d: the signs of sums of odd powers are kept out of the root.
    power, kernel = call.number("norm_type"), call.sizes("kernel_size")
    strides = kernel if call.get("stride") is None else call.sizes("stride")
    ceil = int(call.flag("ceil_mode"))
    made = call.add("Pow", x, call.constant(power))
    made = call.add("AveragePool", made, kernel_shape=kernel, strides=strides, ceil_mode=ceil)
    made = call.add("Mul", call.add("Sign", made), call.add("Relu", call.add("Abs", made)))
    made = call.add("Mul", made, call.constant(math.prod(kernel)))
    return call.add("Pow", made, call.constant(1 / power))


def _response_norm(call: TorchCall, x: str) -> str:
    """Divide by a power of the mean square of neighbouring channels; without a channel it is 0."""
    (size,), rank = _counts(call, "size"), len(call.extents(x))
    if rank < 3:
        raise ShapeMismatchError
    square = call.add("Unsqueeze", call.add("Mul", x, x), call.integers(1))
    pads = call.integers(size // 2, (size - 1) // 2)
    square = call.add("Pad", square, pads, "", call.integers(2), mode="constant")
    mean = call.add("AveragePool", square, kernel_shape=(size, *(1,) * (rank - 2)))
    scaled = call.add("Mul", call.add("Squeeze", mean, call.integers(1)), call.constant(call.number("alpha")))
    total = call.add("Add", scaled, call.constant(call.number("k")))
    return call.add("Div", x, call.add("Pow", total, call.constant(call.number("beta"))))


def _adaptive_pool(op: str) -> _Rule:
    def rule(call: TorchCall, x: str) -> str:
        value = call.get("output_size")
        sizes = value if isinstance(value, list) else [value] * call.rank
        _require(len(sizes) == call.rank and not call.get("return_indices"))
        if set(sizes) == {1}:
            return call.add(op, x, call.integers(*range(-call.rank, 0)), keepdims=1)
        shape = call.extents(x)
        _require(all(size is None or (type(size) is int and 0 < size < 1 << 12) for size in sizes))
        # aten/src/ATen/native/AdaptivePooling.h: windows may overlap, and each axis has its own.
        for axis, size in enumerate(sizes, len(shape) - len(sizes)):
            if size is not None and size != shape[axis]:
                windows = [(n * shape[axis] // size, -(-(n + 1) * shape[axis] // size)) for n in range(size)]
                parts = [
                    call.add("Slice", x, *(call.integers(each) for each in (start, end, axis)))
                    for start, end in windows
                ]
                parts = [call.add(op, part, call.integers(axis), keepdims=1) for part in parts]
                x = call.add("Concat", *parts, axis=axis)
        return x

    return rule


def _pad_layer(mode: str) -> _Rule:
    def rule(call: TorchCall, x: str) -> str:
        listed = call.get("padding")
        pads = listed if isinstance(listed, list) else [listed] * 2 * call.rank
        _require(len(pads) == 2 * call.rank and all(type(n) is int and abs(n) < 1 << 20 for n in pads))
        # The last axis comes first (torch.nn.functional.pad).
        pairs = [(pads[2 * n], pads[2 * n + 1]) for n in reversed(range(call.rank))]
        return _pad(call, x, pairs, mode, call.number("value") if mode == "constant" else 0.0)

    return rule


def _affine(call: TorchCall, flag: str, shape: tuple[int, ...]) -> tuple[str, str]:
    """Return the scale and the offset of a norm, constants if it has none."""
    if not call.flag(flag):
        _require(call.find("weight") is None and call.find("bias") is None)
        return call.fill(1, shape), call.fill(0, shape)
    _require(call.shape("weight") == shape)
    return call.weight(), call.optional("bias") or call.fill(0, shape)


def _batch_norm(call: TorchCall, x: str) -> str:
    if not call.flag("track_running_stats"):
        return _batch_statistics(call, x)
    shape = call.shape("running_mean")
    inputs = (*_affine(call, "affine", shape), call.weight("running_mean"), call.weight("running_var"))
    return call.add("BatchNormalization", x, *inputs, epsilon=call.number("eps"))


def _batch_statistics(call: TorchCall, x: str) -> str:
    """Normalize by the statistics of the batch, as a norm without its own does also at inference."""
    shape = (*_counts(call, "num_features"),)
    inputs = (*_affine(call, "affine", shape), call.fill(0, shape), call.fill(1, shape))
    return call.add("BatchNormalization", x, *inputs, epsilon=call.number("eps"), training_mode=1)


def _instance_norm(call: TorchCall, x: str) -> str:
    if call.get("track_running_stats"):
        return _batch_norm(call, x)
    (size,) = _counts(call, "num_features")
    # Without parameters, torch accepts any number of channels.
    shape = call.reader.tracer.shape(x)
    _require(shape is None or shape[1] == size or call.flag("affine"))
    return call.add("InstanceNormalization", x, *_affine(call, "affine", (size,)), epsilon=call.number("eps"))


def _group_norm(call: TorchCall, x: str) -> str:
    size, groups = call.get("num_channels"), call.get("num_groups")
    _require(type(size) is int and type(groups) is int and 0 < groups <= size)
    inputs = _affine(call, "affine", (size,))
    return call.add("GroupNormalization", x, *inputs, epsilon=call.number("eps"), num_groups=groups)


def _normalized_shape(call: TorchCall) -> tuple[int, ...]:
    shape = call.get("normalized_shape")
    _require(isinstance(shape, list) and shape and all(type(n) is int and n > 0 for n in shape))
    return tuple(shape)


def _layer_norm(call: TorchCall, x: str) -> str:
    shape = _normalized_shape(call)
    inputs = _affine(call, "elementwise_affine", shape)
    return call.add("LayerNormalization", x, *inputs, axis=-len(shape), epsilon=call.number("eps"))


def _root_mean_square_norm(call: TorchCall, x: str) -> str:
    shape = _normalized_shape(call)
    scale = call.weight() if call.flag("elementwise_affine") else call.fill(1, shape)
    epsilon = call.machine_epsilon() if call.get("eps") is None else call.number("eps")
    return call.add("RMSNormalization", x, scale, axis=-len(shape), epsilon=epsilon)


# Modes of torch.nn.functional.interpolate, with the number of spatial axes (None: any).
_RESIZES = {
    "nearest": (None, "nearest"),
    "linear": (1, "linear"),
    "bilinear": (2, "linear"),
    "trilinear": (3, "linear"),
    "bicubic": (2, "cubic"),
}


def _upsample(call: TorchCall, x: str) -> str:
    size, factor, corners = call.get("size"), call.get("scale_factor"), call.get("align_corners")
    mode = call.get("mode")
    _require(mode in _RESIZES and not call.get("recompute_scale_factor"))
    call.get("name")
    rank, kind = _RESIZES[mode]
    wanted = factor if size is None else size
    # Without a known shape, an image.
    shape = call.reader.tracer.shape(x)
    rank = rank or (len(wanted) if isinstance(wanted, list) else len(shape) - 2 if shape else 2)
    numbers = wanted if isinstance(wanted, list) else [wanted] * rank
    legal = all(isinstance(n, int | float) and 0 < n < 1 << 20 for n in numbers)
    _require(legal and len(numbers) == rank and (shape is None or len(shape) == rank + 2))
    settings: dict[str, Any] = {"mode": kind, "coordinate_transformation_mode": "half_pixel"}
    if kind == "nearest":
        settings = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor", "mode": kind}
    elif corners:
        settings["coordinate_transformation_mode"] = "align_corners"
    axes = tuple(range(2, rank + 2))
    if size is None:
        scales = call.constant([float(n) for n in numbers], "float32")
        return call.add("Resize", x, "", scales, axes=axes, **settings)
    return call.add("Resize", x, "", "", call.integers(*numbers), axes=axes, **settings)


# Recurrent layers: torch/nn/modules/rnn.py.
_RECURRENT = {"LSTM": "lstm", "GRU": "gru", "RNN": "simple_rnn"}


def _recur(call: TorchCall, x: str, kind: str, suffixes: Sequence[str], *, layout: int) -> list[str]:
    """Add one layer in each direction; the suffixes are those of the names of their tensors."""
    op, order = kind, gate_order(_RECURRENT[kind], "torch", "onnx")
    (units,) = _counts(call, "hidden_size")
    width, function = len(order) * units, call.get("nonlinearity", "tanh")
    _require(function in ("tanh", "relu"))

    def weights(name: str) -> list[str]:
        shapes = [call.shape(f"{name}{suffix}") for suffix in suffixes]
        _require(all(shape[0] == width for shape in shapes))
        rules = [chain_rules(BlockOrder(0, order), Reshape((1, *shape))) for shape in shapes]
        return [call.weight(f"{name}{each}", rule) for each, rule in zip(suffixes, rules, strict=True)]

    def joined(names: Sequence[str], axis: int = 0) -> str:
        return names[0] if len(names) == 1 else call.add("Concat", *names, axis=axis)

    biases = []
    if call.flag("bias"):
        pairs = zip(weights("bias_ih"), weights("bias_hh"), strict=True)
        biases = [joined(pair, 1) for pair in pairs]
    inputs = (joined(weights("weight_ih")), joined(weights("weight_hh")), joined(biases) if biases else "")
    settings: dict[str, Any] = {"linear_before_reset": 1} if op == "GRU" else {}
    if op == "RNN":
        settings = {"activations": (function.capitalize(),) * len(suffixes)}
    settings["direction"] = "forward" if len(suffixes) == 1 else "bidirectional"
    count = 3 if op == "LSTM" else 2
    return call.split(op, [x, *inputs], count, hidden_size=units, layout=layout, **settings)


def _recurrent(call: TorchCall, x: str) -> str:
    kind = call.cls.rpartition(".")[2]
    layers, layout = _counts(call, "num_layers")[0], int(call.flag("batch_first"))
    _require(call.get("mode", kind).partition("_")[0] == kind and layers < 1 << 10)
    # One axis less is a single sequence.
    shape = call.reader.tracer.shape(x)
    _require(shape is None or len(shape) > 2)
    for name in ("input_size", "dropout"):
        call.get(name)
    suffixes = ("", "_reverse") if call.flag("bidirectional") else ("",)
    if call.get("proj_size"):
        return _project_states(
            call, x, [[f"_l{n}{each}" for each in suffixes] for n in range(layers)], layout
        )
    states: list[tuple[str, ...]] = []
    for number in range(layers):
        steps, *last = _recur(call, x, kind, [f"_l{number}{each}" for each in suffixes], layout=layout)
        if not layout:
            steps = call.add("Transpose", steps, perm=(0, 2, 1, 3))
        x = call.add("Reshape", steps, call.integers(0, 0, -1))
        # torch has the layers and directions first, whatever the order of its input.
        states.append(tuple(call.add("Transpose", s, perm=(1, 0, 2)) if layout else s for s in last))
    call.reader.states[x] = [
        each[0] if layers == 1 else call.add("Concat", *each, axis=0) for each in zip(*states, strict=True)
    ]
    return x


def _project_states(call: TorchCall, x: str, layers: Sequence[Sequence[str]], batch_first: int) -> str:
    """Add an LSTM whose outputs are projected, which no operator does, step by step.

    `layers` are the endings of the names of each layer's tensors, one for each direction.
    """
    x = call.add("Transpose", x, perm=(1, 0, 2)) if batch_first else x
    length, batch, _ = call.extents(x)
    (units, size), biased = _counts(call, "hidden_size", "proj_size"), call.flag("bias")
    _require(length * len(layers) < _MOST_STEPS)
    ends: list[list[str]] = [[], []]
    for layer in layers:
        sides = []
        for backward, ending in enumerate(layer):
            w_ih, w_hh, w_hr = (
                call.weight(f"weight_{name}{ending}", TRANSPOSE) for name in ("ih", "hh", "hr")
            )
            biases = [call.weight(f"bias_{name}{ending}") for name in ("ih", "hh") if biased]
            h, c = call.fill(0, (batch, size)), call.fill(0, (batch, units))
            outputs: list[str] = []
            for n in range(length)[:: -1 if backward else 1]:
                step = call.add("Squeeze", call.add("Gather", x, call.integers(n), axis=0), call.integers(0))
                gates = call.add("Add", call.add("MatMul", step, w_ih), call.add("MatMul", h, w_hh))
                for bias in biases:
                    gates = call.add("Add", gates, bias)
                i, f, g, o = call.split("Split", [gates], 4, axis=-1, num_outputs=4)
                i, f, o, g = (*(call.add("Sigmoid", each) for each in (i, f, o)), call.add("Tanh", g))
                c = call.add("Add", call.add("Mul", f, c), call.add("Mul", i, g))
                h = call.add("MatMul", call.add("Mul", o, call.add("Tanh", c)), w_hr)
                outputs.append(call.add("Unsqueeze", h, call.integers(0)))
            sides.append(call.add("Concat", *outputs[:: -1 if backward else 1], axis=0))
            for listed, last in zip(ends, (h, c), strict=True):
                listed.append(call.add("Unsqueeze", last, call.integers(0)))
        x = call.add("Concat", *sides, axis=-1)
    x = call.add("Transpose", x, perm=(1, 0, 2)) if batch_first else x
    call.reader.states[x] = [call.add("Concat", *each, axis=0) for each in ends]
    return x


def _cell(call: TorchCall, x: str) -> str:
    kind = call.cls.rpartition(".")[2].removesuffix("Cell")
    call.get("input_size")
    first = call.add("Unsqueeze", x, call.integers(0))
    _, *last = _recur(call, first, kind, ("",), layout=0)
    last = [call.add("Squeeze", state, call.integers(0)) for state in last]
    if kind == "LSTM":
        call.reader.states[last[0]] = last[1:]
    return last[0]


def _self_attention(call: TorchCall, x: str) -> str:
    """Apply attention whose query, key and value are one tensor."""
    width, heads = _counts(call, "embed_dim", "num_heads")
    for name in ("kdim", "vdim", "head_dim", "dropout"):
        call.get(name)
    _require(call.flag("_qkv_same_embed_dim") and call.get("add_zero_attn") is False)
    _require(call.find("bias_k") is None and call.find("bias_v") is None and len(call.extents(x)) > 2)
    first = call.flag("batch_first")
    x = x if first else call.add("Transpose", x, perm=(1, 0, 2))
    made, bias = (
        call.add("MatMul", x, call.weight("in_proj_weight", TRANSPOSE)),
        call.optional("in_proj_bias"),
    )
    parts = call.split("Split", [_plus(call, made, bias)], 3, axis=2, num_outputs=3)
    _require(call.shape("in_proj_weight") == (3 * width, width) and width % heads == 0)
    made = call.add("Attention", *parts, q_num_heads=heads, kv_num_heads=heads)
    out = call.part("out_proj")
    made = _linear(out, made)
    out.require_understood()
    return made if first else call.add("Transpose", made, perm=(1, 0, 2))


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("Identity", "Dropout", "AlphaDropout", "FeatureAlphaDropout"), _same),
    **{
        row.torch: _elementary(row.name)
        for row in ACTIVATION_KINDS.values()
        if row.is_plain and row.torch and row.name in ACTIVATION_NODES
    },
    "LeakyReLU": _plain("LeakyRelu", alpha="negative_slope"),
    "ELU": _plain("Elu", alpha="alpha"),
    "CELU": _plain("Celu", alpha="alpha"),
    "Softshrink": _plain("Shrink", lambd="lambd", bias="lambd"),
    "Hardshrink": _plain("Shrink", lambd="lambd"),
    **dict.fromkeys(("Hardtanh", "ReLU6"), _limits),
    "Softplus": _softplus,
    "GELU": _gelu,
    "GLU": _gated,
    "PReLU": _prelu,
    "Softmax": lambda call, x: call.add("Softmax", x, axis=_axis(call)),
    "LogSoftmax": lambda call, x: call.add("LogSoftmax", x, axis=_axis(call)),
    "Softmin": lambda call, x: call.add("Softmax", call.add("Neg", x), axis=_axis(call)),
    "Softmax2d": lambda call, x: call.add("Softmax", x, axis=-3),
    "Threshold": _threshold,
    "RReLU": _random_relu,
    # CrossMapLRN2d is left out: its implementation never removes the first channels from its sums.
    "LocalResponseNorm": _response_norm,
    "ChannelShuffle": _channel_shuffle,
    **dict.fromkeys(("PixelShuffle", "PixelUnshuffle"), _pixel_shuffle),
    **dict.fromkeys(("Linear", "NonDynamicallyQuantizableLinear"), _linear),
    "Embedding": _embedding,
    "Flatten": _flatten,
    "Unflatten": _unflatten,
    "GroupNorm": _group_norm,
    "LayerNorm": _layer_norm,
    "RMSNorm": _root_mean_square_norm,
    "SyncBatchNorm": _batch_norm,
    **dict.fromkeys(("Upsample", "UpsamplingNearest2d", "UpsamplingBilinear2d"), _upsample),
    **dict.fromkeys(_RECURRENT, _recurrent),
    **dict.fromkeys((f"{kind}Cell" for kind in _RECURRENT), _cell),
}
# Rules of classes that are called with several inputs, for modules whose inputs are known to be one tensor.
_PARTS: dict[str, _Rule] = {"MultiheadAttention": _self_attention}
# Rules of classes with the number of spatial axes in their name.
_RANKED: dict[str, _Rule] = {
    "Dropout": _same,
    "Conv": _conv,
    "ConvTranspose": _transposed_conv,
    "MaxPool": _max_pool,
    "AvgPool": _average_pool,
    "LPPool": _power_pool,
    "AdaptiveAvgPool": _adaptive_pool("ReduceMean"),
    "AdaptiveMaxPool": _adaptive_pool("ReduceMax"),
    "BatchNorm": _batch_norm,
    "InstanceNorm": _instance_norm,
    **dict.fromkeys(("ZeroPad", "ConstantPad"), _pad_layer("constant")),
    "ReflectionPad": _pad_layer("reflect"),
    "ReplicationPad": _pad_layer("edge"),
    "CircularPad": _pad_layer("wrap"),
}
