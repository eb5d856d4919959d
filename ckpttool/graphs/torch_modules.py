"""Graphs of pickled modules of PyTorch's own classes: Sequential and the layers of torch.nn, in inference.

A module becomes the operations that its `forward` calls, as graphs/torchscript.py translates them.
Sources: torch/nn/modules/** (attributes and `forward` of each class). A module of another class records no
computation; inside a Sequential it is opaque. So is a layer with hooks, or with an attribute or a tensor
that no rule reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.kinds import ACTIVATION_KINDS, count_gates
from ckpttool.core.source import Shape
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, attr, index, key
from ckpttool.graphs.builder import ACTIVATION_NODES
from ckpttool.graphs.graph import (
    Graph,
    OpaqueError,
    OperatorNode,
    ShapeMismatchError,
    UnknownShapeError,
    Value,
    require,
)
from ckpttool.graphs.operators import is_known
from ckpttool.graphs.shapes import trace_nodes
from ckpttool.graphs.torchscript import UNEXPECTED, apply_operation, compose, compute
from ckpttool.graphs.torchscript_code import ScriptTensor
from ckpttool.graphs.torchscript_translator import ScriptTranslator
from ckpttool.graphs.torchscript_values import IndexInputError, InputShapeError, TensorValue

_CLASSES, _SEQUENTIAL = "torch.nn.modules.", "torch.nn.modules.container.Sequential"
_FLOATS = ("float32", "float64", "float16", "bfloat16")
_MOST_MODULES, _DEEPEST = 100_000, 50
_MOST_STEPS = 1 << 12  # of all layers of a recurrent module
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Attributes that do not change what a layer computes at inference.
_UNUSED = frozenset(
    ("training", "inplace", "in_features", "out_features", "in_channels", "out_channels", "num_features")
) | {"momentum", "transposed", "p", "num_parameters", "init", "num_embeddings", "embedding_dim"}
_UNUSED |= {"padding_idx", "norm_type", "scale_grad_by_freq", "sparse", "num_channels", "call_super_init"}


def read(checkpoint: Checkpoint) -> Graph | None:
    """Return the graph of a pickled module; None for another object, and for a module of a custom class."""
    top = checkpoint.tree.containers.get(())
    cls = (top.name if top is not None else None) or ""
    return _TorchModuleReader(checkpoint.tree).graph((), cls) if cls.startswith(_CLASSES) else None


def read_sequential(tree: Tree, path: Path) -> Graph | None:
    """Return the graph of the Sequential at a path in a pickled module, None for another class."""
    container = tree.containers.get(path)
    whole = container is not None and container.name == _SEQUENTIAL
    return _TorchModuleReader(tree).graph(path, _SEQUENTIAL) if whole else None


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
        output = tracer.shape(graph.outputs[0].name)
        if output is None:
            raise UnknownShapeError
        return output, macs

    def graph(self, path: Path, cls: str, shape: Shape) -> Graph:
        """Return the graph of one module for an input of this shape; raise ShapeMismatchError as `infer`."""
        return self._reader.graph(path, cls, shape)


class _TorchModuleReader:
    """The modules of a file; `as_parts` if they are parts of one that may call them with several inputs."""

    def __init__(self, tree: Tree, *, as_parts: bool = False) -> None:
        """List the attributes and entries below each path."""
        self.tree, self.as_parts = tree, as_parts
        # First results of modules that return a tuple, which is no input of another module.
        self.tuples = set[str]()
        self.below: dict[Path, dict[Any, None]] = {}
        for path in (*tree, *tree.containers):
            for depth, step in enumerate(path):
                self.below.setdefault(path[:depth], {})[step] = None
        self.dtype = next((leaf.dtype for _, leaf in tree.tensors() if leaf.dtype in _FLOATS), "float32")

    def graph(self, path: Path, cls: str, shape: Shape | None = None) -> Graph:
        """Return the graph of a module, for an input of this shape if it is known."""
        integers = set[str]()
        while True:
            shapes = None if shape is None else [shape]
            t = ScriptTranslator(self.tree, {}, operation=apply_operation, integers=integers, shapes=shapes)
            t.is_batched, t.float_type = True, self.dtype
            self.tuples.clear()
            x = t.add_input("input")
            try:
                results = self.module(t, path, cls, x, tuple(str(step.value) for step in path))
                break
            except IndexInputError as error:
                integers.add(str(error))
        names = ("output", *(f"state_{number}" for number in range(len(results) - 1)))
        for result, title in zip(results, names, strict=True):
            t.build.nodes.append(OperatorNode("Identity", (result.name,), (title,), {}, title, (), "output"))
        return t.build.graph([*t.inputs.values()], [*map(Value, names)], cls)

    def list_children(self, path: Path) -> Iterator[tuple[str, Path, str]]:
        """Yield the name, path and class of a module's parts, in the order of their use."""
        for step in self.below.get((*path, attr("_modules")), ()):
            inner = (*path, attr("_modules"), step)
            container = self.tree.containers.get(inner)
            yield str(step.value), inner, (container.name if container is not None else None) or ""

    def module(
        self, t: ScriptTranslator, path: Path, cls: str, x: TensorValue, scope: tuple[str, ...]
    ) -> list[TensorValue]:
        """Add the nodes of a module and return its results."""
        t.calls += 1
        hooked = any(self.below.get((*path, attr(name))) for name in _HOOKS)
        replaced = attr("forward") in self.below.get(path, ())
        legal = t.calls <= _MOST_MODULES and len(scope) <= _DEEPEST
        results = [x]
        if cls == _SEQUENTIAL and legal and not hooked and not replaced:
            for name, inner, prefix in self.list_children(path):
                results = self.module(t, inner, prefix, results[0], (*scope, name))
            return results
        title, build = ".".join(scope), t.build
        build.scope, build.title, build.location = scope, title, f"module {title}".rstrip()
        call, short = TorchCall(self, t, path, cls), cls.rpartition(".")[2]
        count = len(build.nodes)
        try:
            require(cls.startswith(_CLASSES) and legal and not hooked and x.name not in self.tuples)
            rule = _RULES.get(short) or _RANKED.get(re.sub(r"[123]d\Z", "", short))
            rule = _PARTS.get(short) if self.as_parts and rule is None else rule
            require(rule is not None)
            _require_axes(short, t.shape(x.name))
            result = rule(call, x)  # type: ignore[misc]
            call.require_understood()
            results = result if isinstance(result, list) else [result]
            if len(results) > 1:
                self.tuples.add(results[0].name)
        except (OpaqueError, InputShapeError, *UNEXPECTED) as error:
            if t.shapes is not None and isinstance(error, InputShapeError | ValueError | LookupError):
                raise ShapeMismatchError from error
            del build.nodes[count:]
            op = f"torch.{short}" if is_known(short) else short or "module"
            plain = {
                str(step.value): leaf.value
                for step in self.below.get(path, ())
                if isinstance(leaf := self.tree.get((*path, step)), ValueLeaf)
                if isinstance(leaf.value, str | int | float | bool) and step.value != "training"
            }
            return [t.opaque(op, [x], plain)]
        return results


class TorchCall:
    """One module: its attributes and tensors, and the operations that it calls."""

    def __init__(self, reader: _TorchModuleReader, t: ScriptTranslator, path: Path, cls: str) -> None:
        """Record the module; nothing is added to the graph yet."""
        self.reader, self.t, self.path, self.cls = reader, t, path, cls
        self._read = set[str]()

    def apply(self, name: str, /, *arguments: Any, **named: Any) -> Any:
        """Return the result of an operation by its name in TorchScript."""
        return compute(self.t, name, *arguments, **named)

    @property
    def rank(self) -> int:
        """The number of spatial axes in the name of the class."""
        require(self.cls[-2:] in ("1d", "2d", "3d"))
        return int(self.cls[-2])

    def extents(self, x: TensorValue) -> tuple[int, ...]:
        """Return the shape of a value; raise OpaqueError if the input's is not known."""
        shape = self.t.shape(x.name)
        if shape is None:
            raise OpaqueError
        return shape

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute: a plain value, or a list of them."""
        self._read.add(name)
        path = (*self.path, attr(name))
        leaf = self.reader.tree.get(path)
        if isinstance(leaf, ValueLeaf):
            return leaf.value
        if path not in self.reader.tree.containers:
            require(leaf is None)
            return default
        steps = self.reader.below.get(path, {})
        items = [self.reader.tree.get((*path, index(number))) for number in range(len(steps))]
        require(all(isinstance(item, ValueLeaf) for item in items))
        return [item.value for item in items if isinstance(item, ValueLeaf)]

    def number(self, name: str) -> float:
        """Return an attribute that is a finite number."""
        value = self.get(name)
        require(isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))
        return float(value)

    def flag(self, name: str) -> bool:
        """Return an attribute that is true or false."""
        value = self.get(name)
        require(isinstance(value, bool))
        return bool(value)

    def sizes(self, name: str, least: int = 1) -> tuple[int, ...]:
        """Return an attribute as one number for each spatial axis."""
        value = self.get(name)
        sizes = value if isinstance(value, list) else [value] * self.rank
        sizes = sizes * self.rank if len(sizes) == 1 else sizes
        require(len(sizes) == self.rank and all(type(n) is int and least <= n < 1 << 20 for n in sizes))
        return tuple(sizes)

    def require_understood(self) -> None:
        """Raise OpaqueError for an attribute, a tensor or a part that no rule has read."""
        for step in self.reader.below.get(self.path, ()):
            name = str(step.value)
            value = self.reader.tree.get((*self.path, step))
            empty = isinstance(value, ValueLeaf) and value.value is None
            require(name in self._read or name in _UNUSED or name.startswith("_") or empty)
        for kind in ("_parameters", "_buffers"):
            for step in self.reader.below.get((*self.path, attr(kind)), ()):
                leaf = self.reader.tree.get((*self.path, attr(kind), step))
                unused = isinstance(leaf, ValueLeaf) and leaf.value is None
                require(step.value in self._read or step.value == "num_batches_tracked" or unused)
        parts = self.reader.below.get((*self.path, attr("_modules")), ())
        require(all(step.value in self._read for step in parts))

    def find(self, name: str) -> tuple[Path, Leaf] | None:
        """Return the path and leaf of a parameter or buffer, None if the module has none."""
        for kind in ("_parameters", "_buffers"):
            path = (*self.path, attr(kind), key(name))
            path = self.reader.tree.shared.get(path, path)
            leaf = self.reader.tree.get(path)
            if isinstance(leaf, Leaf):
                require(leaf.dtype in _FLOATS)
                return path, leaf
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; raise OpaqueError without it."""
        leaf = self.find(name)
        if leaf is None:
            raise OpaqueError
        return leaf[1].shape

    def weight(self, name: str = "weight") -> ScriptTensor:
        """Return a parameter or buffer."""
        self._read.add(name)
        leaf = self.find(name)
        if leaf is None:
            raise OpaqueError
        return ScriptTensor(leaf[0])

    def optional(self, name: str) -> ScriptTensor | None:
        """Return a parameter, None if the module states that it has none."""
        self._read.add(name)
        value = self.reader.tree.get((*self.path, attr("_parameters"), key(name)))
        return None if isinstance(value, ValueLeaf) and value.value is None else self.weight(name)

    def part(self, name: str) -> TorchCall:
        """Return a call of a module that is a part of this one."""
        self._read.add(name)
        return TorchCall(self.reader, self.t, (*self.path, attr("_modules"), key(name)), "")


_Rule = Callable[[TorchCall, TensorValue], TensorValue | list[TensorValue]]


def _require_axes(cls: str, shape: Shape | None) -> None:
    """Raise ShapeMismatchError for a number of axes, if it is known, that the class refuses."""
    if shape is not None and cls == "Dropout1d" and len(shape) not in (2, 3):
        raise ShapeMismatchError
    if shape is None or not re.search(r"[123]d\Z", cls) or cls.startswith("Dropout") or cls == "Softmax2d":
        return
    axes = int(cls[-2]) + 2
    # Without the batch, the first axis of an instance norm has the channels.
    require(not cls.startswith("InstanceNorm") or len(shape) != axes - 1)
    if len(shape) != axes and (cls, len(shape)) != ("BatchNorm1d", 2):
        raise ShapeMismatchError


def _same(_call: TorchCall, x: TensorValue) -> TensorValue:
    return x


def _plain(name: str, *settings: str) -> _Rule:
    """Return the rule of an operation whose arguments are attributes of the module."""
    return lambda call, x: call.apply(name, x, *map(call.number, settings))


def _elementary(name: str) -> _Rule:
    """Return the rule of a function of core/kinds.py."""
    return lambda call, x: compose(call.t, x, ACTIVATION_NODES[name])


def _softplus(call: TorchCall, x: TensorValue) -> TensorValue:
    require(call.number("beta") > 0)
    return call.apply("softplus", x, call.number("beta"), call.number("threshold"))


def _gelu(call: TorchCall, x: TensorValue) -> TensorValue:
    approximate = call.get("approximate", "none")
    require(approximate in ("none", "tanh"))
    return call.apply("gelu", x, approximate=approximate)


def _axis(call: TorchCall, name: str = "dim") -> int:
    axis = call.get(name)
    require(type(axis) is int)
    return int(axis)


def _gated(call: TorchCall, x: TensorValue) -> TensorValue:
    axis, shape = _axis(call), call.t.shape(x.name)
    if shape is not None and shape[axis] % 2:
        raise ShapeMismatchError
    return call.apply("glu", x, axis)


def _linear(call: TorchCall, x: TensorValue) -> TensorValue:
    require(len(call.shape("weight")) == 2)
    return call.apply("linear", x, call.weight(), call.optional("bias"))


def _embedding(call: TorchCall, x: TensorValue) -> TensorValue:
    require(call.get("max_norm") is None)
    return call.apply("embedding", call.weight(), x)


def _flatten(call: TorchCall, x: TensorValue) -> TensorValue:
    start, end = _axis(call, "start_dim"), _axis(call, "end_dim")
    if (start, end) != (1, -1):
        rank = len(call.extents(x))
        if not all(-rank <= axis < rank for axis in (start, end)):
            raise ShapeMismatchError
        start, end = start % rank, end % rank
        require(0 < start <= end)
    return call.apply("flatten", x, start, end)


def _unflatten(call: TorchCall, x: TensorValue) -> TensorValue:
    shape, sizes = call.extents(x), call.get("unflattened_size")
    axis = _axis(call) % len(shape)
    require(
        axis > 0 and isinstance(sizes, list) and all(type(n) is int and (n > 0 or n == -1) for n in sizes)
    )
    product = math.prod(n for n in sizes if n != -1)
    require(sizes.count(-1) < 2 and shape[axis] % product == 0)
    return call.apply("reshape", x, [*shape[:axis], *sizes, *shape[axis + 1 :]])


def _channel_shuffle(call: TorchCall, x: TensorValue) -> TensorValue:
    (groups,), (batch, channels, *rest) = _counts(call, "groups"), call.extents(x)
    apart = call.apply("reshape", x, [batch, groups, channels // groups, *rest])
    return call.apply("reshape", call.apply("transpose", apart, 1, 2), [batch, channels, *rest])


def _pixel_shuffle(call: TorchCall, x: TensorValue) -> TensorValue:
    up = call.cls.endswith("PixelShuffle")
    (factor,) = _counts(call, "upscale_factor" if up else "downscale_factor")
    shape = call.t.shape(x.name)
    require(shape is None or len(shape) == 4)
    return call.apply("pixel_shuffle" if up else "pixel_unshuffle", x, factor)


def _counts(call: TorchCall, *names: str) -> list[int]:
    """Return attributes that are positive numbers."""
    counts = [call.get(name) for name in names]
    require(all(type(count) is int and 0 < count < 1 << 40 for count in counts))
    return counts


def _pad(call: TorchCall, x: TensorValue, pads: list[int], mode: str, value: float = 0.0) -> TensorValue:
    """Pad the last axes; `pads` are before and after, from the last axis on."""
    shape = call.t.shape(x.name)
    if mode in ("reflect", "circular") and shape is not None:
        # A reflection leaves out the border itself (torch.nn.functional.pad).
        room = [extent - (mode == "reflect") for extent in shape[: -len(pads) // 2 - 1 : -1]]
        if any(max(pads[2 * n : 2 * n + 2]) > most for n, most in enumerate(room)):
            raise ShapeMismatchError
    return call.apply("pad", x, pads, mode, value)


def _conv(call: TorchCall, x: TensorValue) -> TensorValue:
    kernel, strides, dilations = (call.sizes(name) for name in ("kernel_size", "stride", "dilation"))
    groups, padding, mode = call.get("groups"), call.get("padding"), call.get("padding_mode", "zeros")
    call.sizes("output_padding", 0)
    require(type(groups) is int and call.shape("weight")[2:] == kernel)
    if padding not in ("same", "valid"):
        padding = [*call.sizes("padding", 0)]
    if mode != "zeros":
        require(mode in ("reflect", "replicate", "circular"))
        # torch/nn/modules/conv.py: the larger half of the padding is after the image.
        both = [wide * (size - 1) for wide, size in zip(dilations, kernel, strict=True)]
        pairs = {"same": [(n // 2, n - n // 2) for n in both], "valid": [(0, 0)] * call.rank}
        listed = pairs[padding] if isinstance(padding, str) else [(n, n) for n in padding]
        x, padding = _pad(call, x, [n for pair in listed[::-1] for n in pair], mode), 0
    bias, settings = call.optional("bias"), ([*strides], padding, [*dilations], groups)
    result: TensorValue = call.apply(f"conv{call.rank}d", x, call.weight(), bias, *settings)
    return result


def _transposed_conv(call: TorchCall, x: TensorValue) -> TensorValue:
    kernel, strides, dilations = (call.sizes(name) for name in ("kernel_size", "stride", "dilation"))
    groups, more, pads = call.get("groups"), call.sizes("output_padding", 0), call.sizes("padding", 0)
    require(type(groups) is int and call.shape("weight")[2:] == kernel)
    require(call.get("padding_mode", "zeros") == "zeros")
    # torch refuses these for every input.
    require(all(n < max(steps) for n, *steps in zip(more, strides, dilations, strict=True)))
    settings = ([*strides], [*pads], [*more], groups, [*dilations])
    bias = call.optional("bias")
    result: TensorValue = call.apply(f"conv_transpose{call.rank}d", x, call.weight(), bias, *settings)
    return result


def _pool(name: str, *flags: str) -> _Rule:
    """Return the rule of a pooling with further arguments."""

    def rule(call: TorchCall, x: TensorValue) -> TensorValue:
        kernel, pads = call.sizes("kernel_size"), call.sizes("padding", 0)
        strides = kernel if call.get("stride") is None else call.sizes("stride")
        require(all(2 * pad <= size for pad, size in zip(pads, kernel, strict=True)))  # torch refuses others
        named = {flag: call.get(flag) if flag == "divisor_override" else call.flag(flag) for flag in flags}
        if name == "max_pool":
            require(not call.flag("return_indices"))
            named["dilation"] = [*call.sizes("dilation")]
        result: TensorValue = call.apply(
            f"{name}{call.rank}d",
            x,
            [*kernel],
            [*strides],
            [*pads],
            ceil_mode=call.flag("ceil_mode"),
            **named,
        )
        return result

    return rule


def _power_pool(call: TorchCall, x: TensorValue) -> TensorValue:
    # torch.nn.functional.lp_pool2d: the signs of sums of odd powers are kept out of the root.
    power, kernel = call.number("norm_type"), [*call.sizes("kernel_size")]
    strides = kernel if call.get("stride") is None else [*call.sizes("stride")]
    powers = call.apply("pow", x, power)
    mean = call.apply(f"avg_pool{call.rank}d", powers, kernel, strides, ceil_mode=call.flag("ceil_mode"))
    size = call.apply("relu", call.apply("abs", mean))
    total = call.apply("mul", call.apply("mul", call.apply("sign", mean), size), math.prod(kernel))
    return call.apply("pow", total, 1 / power)


def _response_norm(call: TorchCall, x: TensorValue) -> TensorValue:
    """Divide by a power of the mean square of neighbouring channels; without a channel it is 0."""
    (size,), (batch, channels, *rest) = _counts(call, "size"), call.extents(x)
    if not rest:
        raise ShapeMismatchError
    rows = call.apply("reshape", call.apply("mul", x, x), [batch, 1, channels, math.prod(rest)])
    rows = call.apply("pad", rows, [0, 0, size // 2, (size - 1) // 2])
    mean = call.apply("reshape", call.apply("avg_pool2d", rows, [size, 1], 1), [batch, channels, *rest])
    total = call.apply("add", call.apply("mul", mean, call.number("alpha")), call.number("k"))
    return call.apply("div", x, call.apply("pow", total, call.number("beta")))


def _adaptive_pool(name: str) -> _Rule:
    def rule(call: TorchCall, x: TensorValue) -> TensorValue:
        value = call.get("output_size")
        sizes = value if isinstance(value, list) else [value] * call.rank
        require(len(sizes) == call.rank and not call.get("return_indices"))
        if set(sizes) != {1}:
            call.extents(x)
        require(all(size is None or (type(size) is int and 0 < size < 1 << 12) for size in sizes))
        result = call.apply(f"{name}{call.rank}d", x, sizes)
        return result[0] if isinstance(result, list) else result

    return rule


def _pad_layer(mode: str) -> _Rule:
    def rule(call: TorchCall, x: TensorValue) -> TensorValue:
        listed = call.get("padding")
        pads = listed if isinstance(listed, list) else [listed] * 2 * call.rank
        require(len(pads) == 2 * call.rank and all(type(n) is int and abs(n) < 1 << 20 for n in pads))
        return _pad(call, x, pads, mode, call.number("value") if mode == "constant" else 0.0)

    return rule


def _affine(call: TorchCall, flag: str, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the scale and the offset of a norm, None if it has none."""
    if not call.flag(flag):
        require(call.find("weight") is None and call.find("bias") is None)
        return None, None
    require(call.shape("weight") == shape)
    return call.weight(), call.optional("bias")


def _require_channels(call: TorchCall, x: TensorValue, size: int) -> None:
    shape = call.t.shape(x.name)
    if shape is not None and shape[1] != size:
        raise ShapeMismatchError


def _batch_norm(call: TorchCall, x: TensorValue) -> TensorValue:
    # Without stored statistics, a norm takes those of the batch also at inference.
    stored = call.flag("track_running_stats")
    (size,) = call.shape("running_mean") if stored else _counts(call, "num_features")
    _require_channels(call, x, size)
    statistics = [call.weight(f"running_{name}") for name in ("mean", "var")] if stored else [None, None]
    inputs = (*_affine(call, "affine", (size,)), *statistics)
    return call.apply("batch_norm", x, *inputs, not stored, 0.0, call.number("eps"))


def _instance_norm(call: TorchCall, x: TensorValue) -> TensorValue:
    if call.get("track_running_stats"):
        return _batch_norm(call, x)
    (size,) = _counts(call, "num_features")
    # Without parameters, torch accepts any number of channels.
    shape = call.t.shape(x.name)
    require(shape is None or shape[1] == size or call.flag("affine"))
    inputs = (*_affine(call, "affine", (size,)), None, None)
    return call.apply("instance_norm", x, *inputs, use_input_stats=True, momentum=0.0, eps=call.number("eps"))


def _group_norm(call: TorchCall, x: TensorValue) -> TensorValue:
    size, groups = call.get("num_channels"), call.get("num_groups")
    require(type(size) is int and type(groups) is int and 0 < groups <= size)
    _require_channels(call, x, size)
    return call.apply("group_norm", x, groups, *_affine(call, "affine", (size,)), call.number("eps"))


def _normalized_shape(call: TorchCall) -> list[int]:
    shape = call.get("normalized_shape")
    require(isinstance(shape, list) and shape and all(type(n) is int and n > 0 for n in shape))
    return list(shape)


def _layer_norm(call: TorchCall, x: TensorValue) -> TensorValue:
    shape = _normalized_shape(call)
    inputs = _affine(call, "elementwise_affine", tuple(shape))
    return call.apply("layer_norm", x, shape, *inputs, call.number("eps"))


def _root_mean_square_norm(call: TorchCall, x: TensorValue) -> TensorValue:
    scale = call.weight() if call.flag("elementwise_affine") else None
    epsilon = None if call.get("eps") is None else call.number("eps")
    return call.apply("rms_norm", x, _normalized_shape(call), scale, epsilon)


# Modes of torch.nn.functional.interpolate, with the number of spatial axes (None: any).
_RESIZES = {"nearest": None, "linear": 1, "bilinear": 2, "trilinear": 3, "bicubic": 2}


def _upsample(call: TorchCall, x: TensorValue) -> TensorValue:
    size, factor, corners = call.get("size"), call.get("scale_factor"), call.get("align_corners")
    mode = call.get("mode")
    require(mode in _RESIZES and not call.get("recompute_scale_factor"))
    call.get("name")
    sizes = factor if size is None else size
    # Without a known shape, an image.
    shape = call.t.shape(x.name)
    rank = _RESIZES[mode] or (len(sizes) if isinstance(sizes, list) else len(shape) - 2 if shape else 2)
    numbers = sizes if isinstance(sizes, list) else [sizes] * rank
    if not rank:
        raise ShapeMismatchError
    legal = all(isinstance(n, int | float) and 0 < n < 1 << 20 for n in numbers)
    require(legal and len(numbers) == rank and (shape is None or len(shape) == rank + 2))
    named: dict[str, Any] = {} if mode == "nearest" else {"align_corners": bool(corners)}
    named |= {"size": None, "scales": numbers} if size is None else {"size": numbers}
    return call.apply(f"upsample_{mode}{rank}d", x, **named)


# Recurrent layers: torch/nn/modules/rnn.py.
_RECURRENT = {"LSTM": "lstm", "GRU": "gru", "RNN": "simple_rnn"}


def _cell_weights(call: TorchCall, kind: str, suffix: str = "") -> list[ScriptTensor]:
    """Return the weights and biases of one layer in one direction; the suffix is that of their names."""
    names = ["weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if call.flag("bias") else ())]
    width = count_gates(_RECURRENT[kind]) * _counts(call, "hidden_size")[0]
    require(all(call.shape(f"{name}{suffix}")[0] == width for name in names))
    return [call.weight(f"{name}{suffix}") for name in names]


def _first_states(
    call: TorchCall, x: TensorValue, axis: int, outer: list[int], sizes: list[int]
) -> list[Any]:
    """Return zeros as the states of each size; `axis` is that of the batch."""
    batch = call.t.extent(x, axis)
    return [call.apply("new_zeros", x, [*outer, batch, size]) for size in sizes]


def _function(call: TorchCall, kind: str) -> str:
    """Return the name of a recurrent operation."""
    function = call.get("nonlinearity", "tanh")
    require(function in ("tanh", "relu"))
    return f"rnn_{function}" if kind == "RNN" else kind.lower()


def _recurrent(call: TorchCall, x: TensorValue) -> list[TensorValue]:
    kind = call.cls.rpartition(".")[2]
    (layers, units), first = _counts(call, "num_layers", "hidden_size"), call.flag("batch_first")
    require(call.get("mode", kind).partition("_")[0] == kind and layers < 1 << 10)
    # One axis less is a single sequence.
    shape = call.t.shape(x.name)
    require(shape is None or len(shape) > 2)
    if shape is not None and len(shape) != 3:
        raise ShapeMismatchError
    for name in ("input_size", "dropout"):
        call.get(name)
    both, size = call.flag("bidirectional"), call.get("proj_size") or units
    if size != units:
        _counts(call, "proj_size")
        require(call.extents(x)[int(first)] * layers < _MOST_STEPS)
    weights = list[ScriptTensor]()
    for suffix in (f"_l{n}{side}" for n in range(layers) for side in ("", "_reverse")[: 1 + both]):
        projection = [call.weight(f"weight_hr{suffix}")] if size != units else []
        weights += [*_cell_weights(call, kind, suffix), *projection]
    sizes = [size, units] if kind == "LSTM" else [size]
    states = _first_states(call, x, 0 if first else 1, [layers * (1 + both)], sizes)
    settings = (call.flag("bias"), layers, 0.0, False, both, first)
    state = states if kind == "LSTM" else states[0]
    results: list[TensorValue] = call.apply(_function(call, kind), x, state, weights, *settings)
    return results


def _cell(call: TorchCall, x: TensorValue) -> TensorValue | list[TensorValue]:
    kind = call.cls.rpartition(".")[2].removesuffix("Cell")
    (units,), shape = _counts(call, "hidden_size"), call.t.shape(x.name)
    if shape is not None and len(shape) != 2:
        raise ShapeMismatchError
    call.get("input_size")
    states = _first_states(call, x, 0, [], [units] * (1 + (kind == "LSTM")))
    state = states if kind == "LSTM" else states[0]
    return call.apply(f"{_function(call, kind)}_cell", x, state, *_cell_weights(call, kind))


def _self_attention(call: TorchCall, x: TensorValue) -> TensorValue:
    """Apply attention whose query, key and value are one tensor."""
    width, heads = _counts(call, "embed_dim", "num_heads")
    for name in ("kdim", "vdim", "head_dim", "dropout"):
        call.get(name)
    require(call.flag("_qkv_same_embed_dim") and call.get("add_zero_attn") is False)
    require(call.find("bias_k") is None and call.find("bias_v") is None and len(call.extents(x)) > 2)
    require(call.shape("in_proj_weight") == (3 * width, width) and width % heads == 0)
    first, out = call.flag("batch_first"), call.part("out_proj")
    x = x if first else call.apply("transpose", x, 0, 1)
    inputs = (call.weight("in_proj_weight"), call.optional("in_proj_bias"))
    outputs = (out.weight(), out.optional("bias"))
    out.require_understood()
    attention = "_native_multi_head_attention"
    result, _ = call.apply(attention, x, x, x, width, heads, *inputs, *outputs, need_weights=False)
    return result if first else call.apply("transpose", result, 0, 1)


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("Identity", "Dropout", "AlphaDropout", "FeatureAlphaDropout"), _same),
    **{
        row.torch: _elementary(row.name)
        for row in ACTIVATION_KINDS.values()
        if row.is_plain and row.torch and row.name in ACTIVATION_NODES
    },
    "LeakyReLU": _plain("leaky_relu", "negative_slope"),
    "ELU": _plain("elu", "alpha"),
    "CELU": _plain("celu", "alpha"),
    "Softshrink": _plain("softshrink", "lambd"),
    "Hardshrink": _plain("hardshrink", "lambd"),
    **dict.fromkeys(("Hardtanh", "ReLU6"), _plain("hardtanh", "min_val", "max_val")),
    "Softplus": _softplus,
    "GELU": _gelu,
    "GLU": _gated,
    "PReLU": lambda call, x: call.apply("prelu", x, call.weight()),
    "Softmax": lambda call, x: call.apply("softmax", x, _axis(call)),
    "LogSoftmax": lambda call, x: call.apply("log_softmax", x, _axis(call)),
    "Softmin": lambda call, x: call.apply("softmax", call.apply("neg", x), _axis(call)),
    "Softmax2d": lambda call, x: call.apply("softmax", x, -3),
    "Threshold": _plain("threshold", "threshold", "value"),
    "RReLU": _plain("rrelu", "lower", "upper"),
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
    "MaxPool": _pool("max_pool"),
    "AvgPool": _pool("avg_pool", "count_include_pad", "divisor_override"),
    "LPPool": _power_pool,
    "AdaptiveAvgPool": _adaptive_pool("adaptive_avg_pool"),
    "AdaptiveMaxPool": _adaptive_pool("adaptive_max_pool"),
    "BatchNorm": _batch_norm,
    "InstanceNorm": _instance_norm,
    **dict.fromkeys(("ZeroPad", "ConstantPad"), _pad_layer("constant")),
    "ReflectionPad": _pad_layer("reflect"),
    "ReplicationPad": _pad_layer("replicate"),
    "CircularPad": _pad_layer("circular"),
}
