"""Graphs of pickled modules of PyTorch's own classes: Sequential and the layers of torch.nn, in inference.

Sources: torch/nn/modules/** (attributes and `forward` of each class). A module of another class records no
computation; inside a Sequential it is opaque. So is a layer with hooks, or with an attribute or a tensor
that no rule reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, attr, index, key
from ckpttool.graphs.graph import Constant, Graph, OperatorNode, Value, inline_constant, trim_inputs
from ckpttool.graphs.operators import is_known
from ckpttool.mapping.rules import KEEP, TRANSPOSE, Rule

_CLASSES, _SEQUENTIAL = "torch.nn.modules.", "torch.nn.modules.container.Sequential"
_FLOATS = ("float32", "float64", "float16", "bfloat16")
_MOST_MODULES, _DEEPEST = 100_000, 50
# Entries of a constant that stands for a scale or an offset that a layer does not have.
_MOST_FILLED = 1 << 20
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
    reader.nodes.append(OperatorNode("Identity", (result,), ("output",), {}, "output", (), "output"))
    return Graph(tuple(reader.nodes), inputs, (Value("output"),), reader.constants, cls)


@dataclass
class _TorchModuleReader:
    """Translates modules to nodes."""

    tree: Tree
    nodes: list[OperatorNode] = field(default_factory=list)
    constants: dict[str, Constant] = field(default_factory=dict)
    count: int = 0
    names: int = 0

    def __post_init__(self) -> None:
        """List the attributes and entries below each path."""
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
            _require(cls.startswith(_CLASSES) and legal and not hooked)
            rule = _RULES.get(short) or _RANKED.get(re.sub(r"[123]d\Z", "", short))
            _require(rule is not None)
            result = rule(call, x)  # type: ignore[misc]
            call.require_understood()
        except OpaqueModuleError:
            op = f"torch.{short}" if is_known(short) else short or "module"
            result = self.new_name(scope, op)
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

    def new_name(self, scope: tuple[str, ...], op: str) -> str:
        """Return a new name of a value or constant."""
        self.names += 1
        return f"{'.'.join(scope)}/{op}:{self.names}"


class TorchCall:
    """One module with its attributes and tensors, and the nodes that it becomes."""

    def __init__(self, reader: _TorchModuleReader, path: Path, cls: str, scope: tuple[str, ...]) -> None:
        """Record the module; nothing is added to the graph yet."""
        self.reader, self.path, self.cls, self.scope = reader, path, cls, scope
        self.place = f"module {'.'.join(scope)}" if scope else "module"
        self.nodes: list[OperatorNode] = []
        self._read = set[str]()

    @property
    def rank(self) -> int:
        """The number of spatial axes in the name of the class."""
        _require(self.cls[-2:] in ("1d", "2d", "3d"))
        return int(self.cls[-2])

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
        _require(not self.reader.below.get((*self.path, attr("_modules"))))

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

    # The graph.

    def add(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Add a node and return the name of its first output."""
        names = tuple(self.reader.new_name(self.scope, op) for _ in range(outputs))
        title = ".".join(self.scope)
        node = OperatorNode(op, trim_inputs(inputs), names, attributes, title, self.scope, self.place)
        self.nodes.append(node)
        return names[0]

    def constant(self, value: Any, dtype: str = "") -> str:
        """Return the name of a constant; the element type is that of the module's tensors."""
        import numpy as np

        from ckpttool.core import dtypes

        kind = dtype or next((leaf.dtype for _, leaf in self.reader.tree.tensors()), "float32")
        _require(kind in (*_FLOATS, "int64"))
        name = self.reader.new_name(self.scope, "constant")
        self.reader.constants[name] = inline_constant(np.asarray(value, dtypes.numpy_dtype(kind)))
        return name

    def integers(self, *values: int) -> str:
        """Return the name of a constant list of integers."""
        return self.constant(list(values), "int64")

    def fill(self, value: float, shape: tuple[int, ...]) -> str:
        """Return the name of a constant with one number everywhere."""
        import numpy as np

        _require(0 < math.prod(shape) <= _MOST_FILLED)
        return self.constant(np.full(shape, value))


_Rule = Callable[[TorchCall, str], str]


def _same(_call: TorchCall, x: str) -> str:
    return x


def _plain(op: str, **settings: str) -> _Rule:
    """Return the rule of an operator whose attributes are attributes of the module."""

    def rule(call: TorchCall, x: str) -> str:
        attributes: dict[str, Any] = {name: call.number(own) for name, own in settings.items()}
        return call.add(op, x, **attributes)

    return rule


def _limits(call: TorchCall, x: str) -> str:
    low, high = call.number("min_val"), call.number("max_val")
    return call.add("Clip", x, call.constant(low), call.constant(high))


def _softplus(call: TorchCall, x: str) -> str:
    beta, threshold = call.number("beta"), call.number("threshold")
    # Above the threshold the function is linear; from 20 on, float32 has the same values.
    _require(threshold >= 20 and beta > 0)
    if beta == 1:
        return call.add("Softplus", x)
    factor = call.constant(beta)
    return call.add("Div", call.add("Softplus", call.add("Mul", x, factor)), factor)


def _gelu(call: TorchCall, x: str) -> str:
    approximate = call.get("approximate", "none")
    _require(approximate in ("none", "tanh"))
    return call.add("Gelu", x, approximate=approximate)


def _axis(call: TorchCall, name: str = "dim") -> int:
    axis = call.get(name)
    _require(type(axis) is int)
    return int(axis)


def _gated(call: TorchCall, x: str) -> str:
    first = call.add("Split", x, outputs=2, axis=_axis(call), num_outputs=2)
    return call.add("Mul", first, call.add("Sigmoid", call.nodes[-1].outputs[1]))


def _prelu(call: TorchCall, x: str) -> str:
    # A slope for each channel, on axis 1, needs the number of axes.
    _require(call.shape("weight") == (1,))
    return call.add("PRelu", x, call.weight())


def _linear(call: TorchCall, x: str) -> str:
    _require(len(call.shape("weight")) == 2)
    made, bias = call.add("MatMul", x, call.weight(rule=TRANSPOSE)), call.optional("bias")
    return call.add("Add", made, bias) if bias else made


def _embedding(call: TorchCall, x: str) -> str:
    _require(call.get("max_norm") is None)
    return call.add("Gather", call.weight(), x, axis=0)


def _flatten(call: TorchCall, x: str) -> str:
    _require((call.get("start_dim"), call.get("end_dim")) == (1, -1))
    return call.add("Flatten", x, axis=1)


_PADDINGS = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def _pad(call: TorchCall, x: str, pairs: list[tuple[int, int]], mode: str, value: float = 0.0) -> str:
    """Pad the last axes; `pairs` are before and after, in the order of the axes."""
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
    settings = {"strides": strides, "dilations": dilations, "group": groups, "output_padding": more}
    return call.add("ConvTranspose", x, call.weight(), call.optional("bias"), pads=pads * 2, **settings)


def _pool_settings(call: TorchCall) -> dict[str, Any]:
    kernel = call.sizes("kernel_size")
    strides = kernel if call.get("stride") is None else call.sizes("stride")
    ceil = int(call.flag("ceil_mode"))
    pads = call.sizes("padding", 0) * 2
    return {"kernel_shape": kernel, "strides": strides, "pads": pads, "ceil_mode": ceil}


def _max_pool(call: TorchCall, x: str) -> str:
    _require(not call.flag("return_indices"))
    return call.add("MaxPool", x, dilations=call.sizes("dilation"), **_pool_settings(call))


def _average_pool(call: TorchCall, x: str) -> str:
    _require(call.get("divisor_override") is None)
    counted = int(call.flag("count_include_pad"))
    return call.add("AveragePool", x, count_include_pad=counted, **_pool_settings(call))


def _adaptive_pool(op: str) -> _Rule:
    def rule(call: TorchCall, x: str) -> str:
        # Only one window over the whole image has the same place for every size.
        _require(set(call.sizes("output_size")) == {1} and not call.get("return_indices"))
        return call.add(op, x, call.integers(*range(-call.rank, 0)), keepdims=1)

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
    # Without statistics it normalizes by those of the batch, also at inference.
    _require(call.flag("track_running_stats"))
    shape = call.shape("running_mean")
    inputs = (*_affine(call, "affine", shape), call.weight("running_mean"), call.weight("running_var"))
    return call.add("BatchNormalization", x, *inputs, epsilon=call.number("eps"))


def _instance_norm(call: TorchCall, x: str) -> str:
    if call.get("track_running_stats"):
        return _batch_norm(call, x)
    size = call.get("num_features")
    _require(type(size) is int and size > 0)
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
    # Without an epsilon, that of the input's type.
    epsilon = 2.0**-23 if call.get("eps") is None else call.number("eps")
    return call.add("RMSNormalization", x, scale, axis=-len(shape), epsilon=epsilon)


def _upsample(call: TorchCall, x: str) -> str:
    mode, factor, corners = call.get("mode"), call.get("scale_factor"), call.get("align_corners")
    call.get("recompute_scale_factor"), call.get("name")
    _require(call.get("size") is None and mode == "nearest" and isinstance(factor, int | float))
    _require(float(factor).is_integer() and factor >= 1 and corners is None)
    axes = (2, 3)  # An image; other numbers of axes are not in the file, and do not fit the scales.
    scales = call.constant([float(factor)] * len(axes), "float32")
    settings: dict[str, Any] = {
        "mode": "nearest",
        "coordinate_transformation_mode": "asymmetric",
        "nearest_mode": "floor",
    }
    return call.add("Resize", x, "", scales, axes=axes, **settings)


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("Identity", "Dropout", "AlphaDropout", "FeatureAlphaDropout"), _same),
    **{name: _plain(op) for name, op in (("ReLU", "Relu"), ("SiLU", "Swish"), ("Hardswish", "HardSwish"))},
    **{name: _plain(name) for name in ("Tanh", "Sigmoid", "Softsign", "Mish")},
    "SELU": _plain("Selu"),
    "LeakyReLU": _plain("LeakyRelu", alpha="negative_slope"),
    "ELU": _plain("Elu", alpha="alpha"),
    "CELU": _plain("Celu", alpha="alpha"),
    "Softshrink": _plain("Shrink", lambd="lambd", bias="lambd"),
    "Hardshrink": _plain("Shrink", lambd="lambd"),
    "Hardsigmoid": lambda call, x: call.add("HardSigmoid", x, alpha=1 / 6, beta=0.5),
    "Tanhshrink": lambda call, x: call.add("Sub", x, call.add("Tanh", x)),
    "LogSigmoid": lambda call, x: call.add("Neg", call.add("Softplus", call.add("Neg", x))),
    **dict.fromkeys(("Hardtanh", "ReLU6"), _limits),
    "Softplus": _softplus,
    "GELU": _gelu,
    "GLU": _gated,
    "PReLU": _prelu,
    "Softmax": lambda call, x: call.add("Softmax", x, axis=_axis(call)),
    "LogSoftmax": lambda call, x: call.add("LogSoftmax", x, axis=_axis(call)),
    "Linear": _linear,
    "Embedding": _embedding,
    "Flatten": _flatten,
    "GroupNorm": _group_norm,
    "LayerNorm": _layer_norm,
    "RMSNorm": _root_mean_square_norm,
    "Upsample": _upsample,
}
# Rules of classes with the number of spatial axes in their name.
_RANKED: dict[str, _Rule] = {
    "Dropout": _same,
    "Conv": _conv,
    "ConvTranspose": _transposed_conv,
    "MaxPool": _max_pool,
    "AvgPool": _average_pool,
    "AdaptiveAvgPool": _adaptive_pool("ReduceMean"),
    "AdaptiveMaxPool": _adaptive_pool("ReduceMax"),
    "BatchNorm": _batch_norm,
    "InstanceNorm": _instance_norm,
    **dict.fromkeys(("ZeroPad", "ConstantPad"), _pad_layer("constant")),
    "ReflectionPad": _pad_layer("reflect"),
    "ReplicationPad": _pad_layer("edge"),
    "CircularPad": _pad_layer("wrap"),
}
