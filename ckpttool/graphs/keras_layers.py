"""Layers and functions of Keras as operators: one rule for each class, with its settings and weights.

Sources: keras/src/layers/**, keras/src/ops/**, keras/src/activations/activations.py,
keras/src/backend/tensorflow/{nn,rnn}.py, keras/src/backend/common/backend_utils.py (padding of transposed
convolutions). A rule reads the settings that it understands; a layer with another setting is opaque.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.core import deferred
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.kinds import ACTIVATION_KINDS, gate_order
from ckpttool.core.tree import Leaf, Path, attr
from ckpttool.formats.keras_config import ATTENTION, CELLS, config_of, has_foreign_class
from ckpttool.formats.tf_common import format_object
from ckpttool.graphs.builder import ACTIVATION_NODES
from ckpttool.graphs.graph import FUNCTION, OpaqueError, require
from ckpttool.graphs.operators import Operator, UnknownValueError, spelled_operators
from ckpttool.mapping.rules import KEEP, TRANSPOSE, BlockOrder, Permute, Reshape, Rule, chain_rules

if TYPE_CHECKING:
    from ckpttool.graphs.keras import _KerasGraphReader

_FLOATS = ("float32", "float64", "float16", "bfloat16")
_END = (1 << 63) - 1
# Entries of a constant that stands for a scale or an offset that a layer does not have.
_MOST_FILLED = 1 << 20
# Settings that do not change what a layer computes at inference.
_UNUSED = deferred.compile(
    r".*_(?:initializer|regularizer|constraint)|name|trainable|dtype|seed|autocast|momentum|synchronized"
    r"|batch_input_shape|batch_shape|input_shape|input_dim|input_length|dropout"
    r"|recurrent_dropout|units|filters|output_dim|unroll|implementation|unit_forget_bias|zero_output_for_mask"
    r"|lora_.*|force_generator|dropout_seed|init|W_.*|b_.*|U_.*"
)
# Layers whose results depend on the mask of their inputs.
_USE_MASK = frozenset(("LSTM", "GRU", "SimpleRNN", "RNN", "Bidirectional", "TimeDistributed", "Softmax")) | {
    "GlobalAveragePooling1D",
    "Attention",
    "AdditiveAttention",
    *ATTENTION,
}


class LayerOutput(NamedTuple):
    """An output of one call of a layer."""

    layer: str
    call: int
    output: int


class Flow(NamedTuple):
    """A value of the graph; `masked` if Keras passes a mask of its steps along with it."""

    name: str
    dtype: str
    masked: bool = False


def flatten_operand(value: Any) -> Iterator[Any]:
    """Yield the items of nested lists and dicts."""
    if isinstance(value, list):
        for item in value:
            yield from flatten_operand(item)
    elif isinstance(value, dict):
        yield from flatten_operand(list(value.values()))
    else:
        yield value


def is_masked(cls: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a layer adds a mask to its result."""
    return cls == "Masking" or bool(cls == "Embedding" and settings.get("mask_zero"))


class LayerCall:
    """One call of a layer: its settings, its arguments, and the nodes that it adds to the graph.

    `part` is the path of the layer's weights below `scope`.
    """

    def __init__(
        self,
        reader: _KerasGraphReader,
        layer: Mapping[str, Any],
        scope: tuple[str, ...],
        arguments: list[Any],
        named: dict[str, Any],
    ) -> None:
        """Record the call; nothing is added to the graph yet."""
        config = config_of(dict(layer))
        self.reader, self.build = reader, reader.build
        self.layer, self.scope = layer, scope
        self.cls, self.settings = str(config.cls), config.settings
        self.arguments, self.named = arguments, named
        self.part: tuple[str, ...] = ()
        self._read = set[str]()

    # Settings and arguments.

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting."""
        self._read.add(name)
        return self.settings.get(name, default)

    def require(self, name: str, *values: Any) -> None:
        """Raise OpaqueError unless a setting has one of these values, or is not there."""
        require(name not in self.settings or self.get(name) in values, f"setting {name}")

    def number(self, name: str, default: float | None = None) -> float:
        """Return a setting that is a finite number."""
        value = self.get(name, default)
        plain = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        require(plain, f"setting {name}")
        return float(value)

    def sizes(self, name: str, rank: int, default: Any = None) -> tuple[int, ...]:
        """Return a setting as one positive number for each axis."""
        value = self.get(name, default)
        sizes = value if isinstance(value, list | tuple) else [value] * rank
        legal = len(sizes) == rank and all(type(size) is int and 0 < size < 1 << 20 for size in sizes)
        require(legal, f"setting {name}")
        return tuple(sizes)

    def argument(self, name: str, default: Any = None) -> Any:
        """Return and remove a keyword argument."""
        return self.named.pop(name, default)

    def require_understood(self) -> None:
        """Raise OpaqueError for a setting or keyword argument that no rule has read."""
        rest = {
            name
            for name, value in self.settings.items()
            if value is not None and name not in self._read and not _UNUSED.fullmatch(name)
        }
        named = {name for name, value in self.named.items() if value is not None and value is not False}
        require(not rest, f"setting {', '.join(sorted(rest))}")
        require(not named, f"argument {', '.join(sorted(named))}")

    def inner(self, document: Any, *part: str) -> LayerCall:
        """Return a call of a layer that is a setting of this one, with its own settings."""
        require(isinstance(document, Mapping) and not has_foreign_class(document))
        call = LayerCall(self.reader, document, self.scope, self.arguments, {})
        call.part = (*self.part, *part)
        return call

    @property
    def compute_dtype(self) -> str:
        """The element type in which the layer computes; raise OpaqueError for a quantized one."""
        policy = self.settings.get("dtype") or "float32"
        name = config_of(policy).name if isinstance(policy, dict) else policy
        dtype = str(name).removeprefix("mixed_")
        require(dtype in _FLOATS, "setting dtype")
        return dtype

    def flows(self, *, cast: bool = True) -> list[Flow]:
        """Return the values that the layer is called with, in the type in which it computes."""
        flows = [item for item in flatten_operand(self.arguments) if isinstance(item, Flow)]
        require(flows and len(flows) == sum(item is not None for item in flatten_operand(self.arguments)))
        require(not (self.cls in _USE_MASK and any(flow.masked for flow in flows)), "mask")
        require(not cast or all(flow.dtype in _FLOATS for flow in flows))
        return [self.cast(flow) if flow.dtype in _FLOATS else flow for flow in flows]

    def flow(self, *, cast: bool = True) -> Flow:
        """Return the only value that the layer is called with."""
        flows = self.flows(cast=cast)
        require(len(flows) == 1)
        return flows[0]

    def cast(self, flow: Flow) -> Flow:
        """Return a value in the type in which the layer computes."""
        dtype = self.compute_dtype
        return flow if flow.dtype == dtype else Flow(self.add("Cast", flow.name, to=dtype), dtype)

    # The graph.

    def split(self, op: str, inputs: Sequence[str], count: int, /, **attributes: Any) -> list[str]:
        """Add a node with several outputs and return their names."""
        return list(self.build.add(op, inputs, count, **attributes))

    def add(self, op: str, /, *inputs: str, **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        return self.build.one(op, *inputs, **attributes)

    def constant(self, value: Any, dtype: str) -> str:
        """Return the name of a constant with these numbers."""
        return self.build.number(value, dtype)

    def integers(self, *values: int) -> str:
        """Return the name of a constant list of integers."""
        return self.build.integers(values)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a value; an open extent has a stand-in. Raise UnknownValueError without one."""
        shape = self.reader.tracer.shape(name)
        if shape is None:
            raise UnknownValueError
        return shape

    def rank(self, name: str) -> int:
        """Return the number of axes of a value."""
        return len(self.shape(name))

    # Weights.

    def stored_scope(self) -> list[str] | None:
        """Return the names down to the module with the layer's weights, None if it is not stored.

        A file names the parts of a layer by attribute (cell, layer) or by the part's own name.
        """
        scope = list(self.scope)
        for part in self.part:
            options = [child for child in self.reader.list_children(scope) if re.fullmatch(part, child)]
            if len(options) != 1:
                return None
            scope.append(options[0])
        return scope

    def path(self, name: str) -> Path | None:
        """Return the path of one of the layer's tensors, None if it has no such tensor."""
        scope = self.stored_scope()
        if scope is None:
            return None
        path = tuple(map(attr, (*scope, name)))
        path = self.reader.tree.shared.get(path, path)
        return path if path in self.reader.tree else None

    def has(self, name: str) -> bool:
        """Return whether the layer has a tensor."""
        return self.path(name) is not None

    def tensor(self, name: str) -> tuple[Path, Leaf]:
        """Return the path and leaf of one of the layer's tensors; raise OpaqueError without it."""
        path = self.path(name)
        leaf = None if path is None else self.reader.tree.get(path)
        if path is None or not isinstance(leaf, Leaf) or leaf.dtype not in _FLOATS:
            raise OpaqueError(f"tensor {name}")
        return path, leaf

    def weight_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one of the layer's tensors as it is stored."""
        return self.tensor(name)[1].shape

    def weight(self, name: str, rule: Rule = KEEP) -> str:
        """Return the name of one of the layer's tensors, changed by a rule."""
        path, leaf = self.tensor(name)
        title = self.build.stored(path, leaf, "/".join(str(step.value) for step in path), rule)
        return title if leaf.dtype == self.compute_dtype else self.add("Cast", title, to=self.compute_dtype)

    def bias(self, setting: str = "use_bias", name: str = "bias", rule: Rule = KEEP) -> str:
        """Return the name of the bias, "" if the layer has none; both facts must agree."""
        # Before Keras 1.0.4, each layer had a bias; Keras 1 named the setting `bias`.
        used = self.get(setting, self.get("bias", default=True) if setting == "use_bias" else True)
        require(isinstance(used, bool) and used == self.has(name), f"tensor {name}")
        return self.weight(name, rule) if used else ""


LayerRule = Callable[[LayerCall], list[Flow]]
_OneRule = Callable[[LayerCall, str], str]


def _one(rule: _OneRule, *, cast: bool = True) -> LayerRule:
    """Return the rule of a layer with one input and one output; without `cast`, of any type."""

    def apply(call: LayerCall) -> list[Flow]:
        flow = call.flow(cast=cast)
        return [Flow(rule(call, flow.name), flow.dtype)]

    return apply


# A layer that moves the entries of its input.
_moving = partial(_one, cast=False)


def _clip(call: LayerCall, x: str, low: float, high: float) -> str:
    dtype = call.compute_dtype
    return call.add("Clip", x, call.constant(low, dtype), call.constant(high, dtype))


def _hard_sigmoid(call: LayerCall, x: str) -> str:
    return call.add("HardSigmoid", x, alpha=_hard_sigmoid_slope(call), beta=0.5)


def _hard_sigmoid_slope(call: LayerCall) -> float:
    """Return the slope of Keras 3, 1/6, or that of Keras 1 and 2, 0.2."""
    version = call.reader.version
    require(version is not None, "version of Keras")
    return 1 / 6 if version is None or version > 2 else 0.2


def _gated(call: LayerCall, x: str) -> str:
    left, right = call.split("Split", [x], 2, axis=-1, num_outputs=2)
    return call.add("Mul", left, call.add("Sigmoid", right))


def _plain(op: str, **attributes: Any) -> _OneRule:
    return lambda call, x: call.add(op, x, **attributes)


def _elementary(name: str) -> _OneRule:
    """Return the rule of a function of core/kinds.py."""
    rule = ACTIVATION_NODES[name]
    return lambda call, x: rule(call.add, lambda number: call.constant(number, call.compute_dtype), x)


_ACTIVATIONS: dict[str, _OneRule] = {
    **{
        word: _elementary(row.name)
        for row in ACTIVATION_KINDS.values()
        if row.name in ACTIVATION_NODES
        for word in row.keras
    },
    "leaky_relu": _plain("LeakyRelu", alpha=0.2),
    "hard_sigmoid": _hard_sigmoid,
    **{name: _plain(ACTIVATION_KINDS[name].onnx, axis=-1) for name in ("softmax", "log_softmax")},
    "soft_shrink": _plain("Shrink", bias=0.5, lambd=0.5),
    "hard_shrink": _plain("Shrink", bias=0.0, lambd=0.5),
    "glu": _gated,
}


def _activation_name(config: Any) -> str:
    """Return the name of a serialized function of Keras; raise OpaqueError for another one."""
    if config is None:
        return "linear"
    # keras/src/saving/serialization_lib.py: a name in `builtins` is first one of keras.activations.
    if isinstance(config, dict) and config.get("registered_name") == "function":
        require(config.get("module") == "builtins")
        config = config.get("config")
    require(isinstance(config, str) and config in _ACTIVATIONS, "setting activation")
    return str(config)


def _activate(call: LayerCall, x: str, setting: str = "activation") -> str:
    """Add an activation; one that is not understood is an opaque node behind the layer."""
    activation, count = call.get(setting), len(call.build.nodes)
    try:
        if isinstance(activation, dict) and config_of(activation).cls in _ACTIVATION_LAYERS:
            inner = call.inner(activation)
            result = _ACTIVATION_LAYERS[str(inner.cls)](inner, x)
            inner.require_understood()
            return result
        return _ACTIVATIONS[_activation_name(activation)](call, x)
    except OpaqueError as error:
        del call.build.nodes[count:]
        stated = {FUNCTION: format_object(activation), "not_understood": str(error)}
        return call.add("Activation", x, **stated)


def _relu(call: LayerCall, x: str) -> str:
    slope, threshold = call.number("negative_slope", 0.0), call.number("threshold", 0.0)
    most = call.get("max_value")
    require(not (slope and (most is not None or threshold)))
    if slope:
        return call.add("LeakyRelu", x, alpha=slope)
    output = call.add("ThresholdedRelu", x, alpha=threshold) if threshold else call.add("Relu", x)
    return output if most is None else _clip(call, output, 0, call.number("max_value"))


def _leaky_relu(call: LayerCall, x: str) -> str:
    name = "alpha" if "alpha" in call.settings else "negative_slope"
    return call.add("LeakyRelu", x, alpha=call.number(name))


def _softmax(call: LayerCall, x: str) -> str:
    axis = call.get("axis", -1)
    axes = axis if isinstance(axis, list) else [axis]
    require(all(type(axis) is int for axis in axes) and axes)
    if len(axes) == 1:
        return call.add("Softmax", x, axis=axes[0])
    total = call.add("ReduceLogSumExp", x, call.integers(*axes), keepdims=1)
    return call.add("Exp", call.add("Sub", x, total))


def _prelu(call: LayerCall, x: str) -> str:
    shared = call.get("shared_axes")
    shape = call.weight_shape("alpha")
    require(shared is None or len(shape) == call.rank(x) - 1)
    return call.add("PRelu", x, call.weight("alpha"))


_ACTIVATION_LAYERS: dict[str, _OneRule] = {
    "ReLU": _relu,
    "LeakyReLU": _leaky_relu,
    "ELU": lambda call, x: call.add("Elu", x, alpha=call.number("alpha", 1.0)),
    "Softmax": _softmax,
    "ThresholdedReLU": lambda call, x: call.add("ThresholdedRelu", x, alpha=call.number("theta")),
}


def _add_bias(call: LayerCall, x: str, bias: str) -> str:
    return call.add("Add", x, bias) if bias else x


def _dense(call: LayerCall) -> list[Flow]:
    shape = call.weight_shape("kernel")
    require(len(shape) == 2)
    # Integers are multiplied in the type of the kernel, too.
    flow = call.cast(call.flow(cast=False))
    output = _add_bias(call, call.add("MatMul", flow.name, call.weight("kernel")), call.bias())
    return [Flow(_activate(call, output), flow.dtype)]


def _einsum_dense(call: LayerCall, x: str) -> str:
    equation, axes = call.get("equation"), call.get("bias_axes")
    call.get("output_shape")
    require(isinstance(equation, str) and (axes is None or isinstance(axes, str)))
    equation = str(equation).replace(" ", "")
    result = equation.rpartition("->")[2]
    output = call.add("Einsum", x, call.weight("kernel"), equation=equation)
    require((axes is not None) == call.has("bias"))
    if axes is not None:
        # The bias has the extents of its axes in the order of the result, and 1 elsewhere after the first.
        letters = [letter for letter in result if letter in axes]
        require(len(letters) == len(axes) == len(set(axes)) and "." not in equation)
        first = result.index(letters[0])
        extents = dict(zip(letters, call.weight_shape("bias"), strict=False))
        shape = tuple(extents.get(letter, 1) for letter in result[first:])
        rule = KEEP if len(shape) == len(letters) else Reshape(shape)
        output = call.add("Add", output, call.weight("bias", rule))
    return _activate(call, output)


def _embedding(call: LayerCall) -> list[Flow]:
    flow = call.flow(cast=False)
    call.get("mask_zero")
    places = flow.name
    if flow.dtype not in ("int32", "int64"):
        places = call.add("Cast", places, to="int32")
    call.weight_shape("embeddings")
    return [Flow(call.add("Gather", call.weight("embeddings"), places, axis=0), call.compute_dtype)]


def _is_first(call: LayerCall, rank: int) -> bool:
    """Return whether channels are the first axis of an image with `rank` spatial axes."""
    # Layers for sequences had no such setting before Keras 2.2: channels are last.
    layout = call.get("data_format", "channels_last" if rank < 2 else None)
    require(layout in ("channels_first", "channels_last"))
    return bool(layout == "channels_first")


def _to_first(call: LayerCall, x: str, rank: int) -> str:
    return call.add("Transpose", x, perm=(0, rank + 1, *range(1, rank + 1)))


def _to_last(call: LayerCall, x: str, rank: int) -> str:
    return call.add("Transpose", x, perm=(0, *range(2, rank + 2), 1))


def _on_image(call: LayerCall, x: str, rank: int, rule: Callable[[str], str]) -> str:
    """Apply an operator for images with channels on axis 1."""
    if _is_first(call, rank):
        return rule(x)
    return _to_last(call, rule(_to_first(call, x, rank)), rank)


def _on_axis(call: LayerCall, x: str, axis: int, rule: Callable[[str], str]) -> str:
    """Apply an operator for features on axis 1 to a value that has them on another axis."""
    if axis == 1:
        return rule(x)
    others = [number for number in range(1, call.rank(x)) if number != axis]
    order = (0, axis, *others)
    back = tuple(order.index(index) for index in range(len(order)))
    return call.add("Transpose", rule(call.add("Transpose", x, perm=order)), perm=back)


def _image_axes(call: LayerCall, rank: int) -> list[int]:
    first = _is_first(call, rank)
    return list(range(2, rank + 2) if first else range(1, rank + 1))


def _class_rank(call: LayerCall) -> int:
    match = re.search(r"([123])D", call.cls)
    require(match)
    return int(match[1]) if match else 0


def _flatten(call: LayerCall, x: str) -> str:
    call.require("data_format", "channels_first", "channels_last", None)
    if call.get("data_format") == "channels_first" and call.rank(x) > 2:
        x = _to_last(call, x, call.rank(x) - 2)
    return call.add("Reshape", x, call.integers(0, -1))


def _whole_numbers(value: Any) -> list[int]:
    values = value if isinstance(value, list | tuple) else [value]
    require(all(type(value) is int for value in values))
    return list(values)


def _reshape(call: LayerCall, x: str) -> str:
    shape = _whole_numbers(call.get("target_shape"))
    require(all(extent > 0 or extent == -1 for extent in shape) and shape.count(-1) < 2)
    return call.add("Reshape", x, call.integers(0, *shape))


def _permute(call: LayerCall, x: str) -> str:
    axes = _whole_numbers(call.get("dims"))
    require(sorted(axes) == list(range(1, len(axes) + 1)))
    return call.add("Transpose", x, perm=(0, *axes))


def _repeat(call: LayerCall, x: str) -> str:
    (count,) = call.sizes("n", 1)
    return call.add("Tile", call.add("Unsqueeze", x, call.integers(1)), call.integers(1, count, 1))


def _pairs(call: LayerCall, name: str, rank: int) -> list[tuple[int, int]]:
    """Return what is added or removed before and after each axis."""
    value = call.get(name)
    if rank == 1 and isinstance(value, list) and len(value) == 2 and all(type(n) is int for n in value):
        value = [value]
    items = value if isinstance(value, list) else [value] * rank
    pairs = [tuple(item) if isinstance(item, list) else (item, item) for item in items]
    require(len(pairs) == rank and all(len(pair) == 2 for pair in pairs))
    require(all(type(n) is int and n >= 0 for pair in pairs for n in pair))
    return [(before, after) for before, after in pairs]


def _pad(call: LayerCall, x: str) -> str:
    rank = _class_rank(call)
    pairs, axes = _pairs(call, "padding", rank), _image_axes(call, rank)
    pads = [before for before, _ in pairs] + [after for _, after in pairs]
    return call.add("Pad", x, call.integers(*pads), "", call.integers(*axes), mode="constant")


def _crop(call: LayerCall, x: str) -> str:
    rank = _class_rank(call)
    pairs, axes = _pairs(call, "cropping", rank), _image_axes(call, rank)
    ends = [-after or _END for _, after in pairs]
    starts = [before for before, _ in pairs]
    return call.add("Slice", x, *(call.integers(*numbers) for numbers in (starts, ends, axes)))


def _upsample(call: LayerCall, x: str) -> str:
    rank = _class_rank(call)
    sizes, axes = call.sizes("size", rank), _image_axes(call, rank)
    mode = call.get("interpolation", "nearest")
    require(mode in ("nearest", "bilinear"))
    scales = [1.0] * (rank + 2)
    for axis, size in zip(axes, sizes, strict=True):
        scales[axis] = float(size)
    settings = {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}
    if mode == "nearest":
        settings = {
            "mode": "nearest",
            "coordinate_transformation_mode": "asymmetric",
            "nearest_mode": "floor",
        }
    return call.add("Resize", x, "", call.constant(scales, "float32"), **settings)


def _masking(call: LayerCall, x: str) -> str:
    value = call.constant(call.number("mask_value", 0.0), call.compute_dtype)
    other = call.add("Cast", call.add("Not", call.add("Equal", x, value)), to=call.compute_dtype)
    largest = call.add("ReduceMax", other, call.integers(-1), keepdims=1)
    zero = call.constant(0, call.compute_dtype)
    return call.add("Where", call.add("Cast", largest, to="bool"), x, zero)


def _axes_of(call: LayerCall, x: str) -> tuple[int, ...]:
    """Return the setting `axis` as axes counted from the first one, in ascending order."""
    rank = call.rank(x)
    axes = [axis % rank if -rank <= axis < rank else rank for axis in _whole_numbers(call.get("axis", -1))]
    require(axes and max(axes) < rank and axes == sorted(set(axes)))
    return tuple(axes)


def _scale_and_offset(call: LayerCall) -> tuple[str, str]:
    """Return the names of gamma and beta, "" for one that the layer does not have."""
    return call.bias("scale", "gamma"), call.bias("center", "beta")


def _fill(call: LayerCall, value: float, size: int) -> str:
    require(size <= _MOST_FILLED)
    return call.constant([value] * size, call.compute_dtype)


def _batch_norm(call: LayerCall, x: str) -> str:
    axes = _axes_of(call, x)
    (size,) = call.weight_shape("moving_mean")
    call.require("renorm", False)
    for name in ("renorm_clipping", "renorm_momentum"):  # of renorm alone
        call.get(name)
    call.require("mode", 0)
    scale, offset = _scale_and_offset(call)
    inputs = [scale or _fill(call, 1, size), offset or _fill(call, 0, size)]
    inputs += [call.weight("moving_mean"), call.weight("moving_variance")]
    epsilon = call.number("epsilon")
    require(len(axes) == 1 and axes[0] > 0)
    return _on_axis(
        call, x, axes[0], lambda first: call.add("BatchNormalization", first, *inputs, epsilon=epsilon)
    )


def _center(call: LayerCall, x: str, axes: Sequence[int]) -> tuple[str, str]:
    """Return a value without its mean, and its variance."""
    mean = call.add("ReduceMean", x, call.integers(*axes), keepdims=1)
    centered = call.add("Sub", x, mean)
    square = call.add("Mul", centered, centered)
    return centered, call.add("ReduceMean", square, call.integers(*axes), keepdims=1)


def _layer_norm(call: LayerCall, x: str) -> str:
    axes, rank, epsilon = _axes_of(call, x), call.rank(x), call.number("epsilon")
    shape = [call.shape(x)[axis] for axis in axes]
    if call.get("rms_scaling"):
        call.get("center")
        require(len(axes) == 1 and axes[0] == rank - 1 and not call.has("beta"))
        scale = call.bias("scale", "gamma")
        variance = call.add("Add", _center(call, x, axes)[1], call.constant(epsilon, call.compute_dtype))
        output = call.add("Div", x, call.add("Sqrt", variance))
        return call.add("Mul", output, scale) if scale else output
    scale, offset = _scale_and_offset(call)
    if axes == tuple(range(rank - len(axes), rank)):
        scale = scale or call.add("Reshape", _fill(call, 1, math.prod(shape)), call.integers(*shape))
        return call.add("LayerNormalization", x, scale, offset, axis=axes[0] - rank, epsilon=epsilon)
    # The scale's extents stand on the normalized axes.
    spread = Reshape(tuple(call.shape(x)[axis] if axis in axes else 1 for axis in range(1, rank)))
    centered, variance = _center(call, x, axes)
    variance = call.add("Add", variance, call.constant(epsilon, call.compute_dtype))
    output = call.add("Div", centered, call.add("Sqrt", variance))
    output = call.add("Mul", output, call.weight("gamma", spread)) if scale else output
    return call.add("Add", output, call.weight("beta", spread)) if offset else output


def _group_norm(call: LayerCall, x: str) -> str:
    axes, groups = _axes_of(call, x), call.get("groups")
    require(len(axes) == 1 and axes[0] > 0 and type(groups) is int)
    size = call.shape(x)[axes[0]]
    scale, offset = _scale_and_offset(call)
    inputs = [scale or _fill(call, 1, size), offset or _fill(call, 0, size)]
    settings = {"epsilon": call.number("epsilon"), "num_groups": size if groups == -1 else groups}
    require(0 < settings["num_groups"] <= size)
    return _on_axis(
        call, x, axes[0], lambda first: call.add("GroupNormalization", first, *inputs, **settings)
    )


def _root_mean_square_norm(call: LayerCall, x: str) -> str:
    axes, rank = _axes_of(call, x), call.rank(x)
    require(axes == (rank - 1,))
    return call.add("RMSNormalization", x, call.weight("scale"), epsilon=call.number("epsilon"))


def _unit_norm(call: LayerCall, x: str) -> str:
    axes = _axes_of(call, x)
    return _normalize(call, x, axes, 1e-12)


def _normalize(call: LayerCall, x: str, axes: Sequence[int], epsilon: float) -> str:
    """Divide by the Euclidean norm.

    Keras 3 limits the factor to 1 / epsilon (keras/src/ops/nn.py), Keras 2 the square of the norm to 1e-12
    (tf.math.l2_normalize).
    """
    version = call.reader.version
    require(version is not None, "version of Keras")
    total = call.add("ReduceSumSquare", x, call.integers(*axes), keepdims=1)
    if version is not None and version < 3:
        total = call.add("Max", total, call.constant(1e-12, call.compute_dtype))
        return call.add("Div", x, call.add("Sqrt", total))
    factor = call.add("Reciprocal", call.add("Sqrt", total))
    return call.add("Mul", x, call.add("Min", factor, call.constant(1 / epsilon, call.compute_dtype)))


def _numbers(value: Any) -> Any:
    """Return numbers of a setting: nested lists, also of a serialized array."""
    if isinstance(value, dict) and isinstance(value.get("config"), dict):
        value = value["config"].get("value")
    flat = list(flatten_operand(value if isinstance(value, list) else [value]))
    require(flat and all(type(number) in (int, float) for number in flat))
    return value


def _normalization(call: LayerCall) -> list[Flow]:
    flow = call.flow(cast=False)
    x = call.cast(flow).name
    rank, axis = call.rank(x), call.get("axis", -1)
    axes = () if axis is None or axis == [] else _axes_of(call, x)
    # The statistics stand on the last axes, or there is one for all.
    require(axes == tuple(range(rank - len(axes), rank)))
    mean, variance = call.get("mean"), call.get("variance")
    invert = call.get("invert", default=False)
    require(isinstance(invert, bool) and (mean is None) == (variance is None))
    if mean is None:
        mean, variance = call.weight("mean"), call.weight("variance")
    else:
        mean, variance = (call.constant(_numbers(name), call.compute_dtype) for name in (mean, variance))
        require(call.rank(mean) <= max(len(axes), 1) and call.rank(variance) <= max(len(axes), 1))
    # keras/src/layers/preprocessing/normalization.py: epsilon is the minimum of the standard deviation.
    least = call.constant(1e-7, call.compute_dtype)
    deviation = call.add("Max", call.add("Sqrt", variance), least)
    if invert:
        output = call.add("Add", mean, call.add("Mul", x, deviation))
    else:
        output = call.add("Div", call.add("Sub", x, mean), deviation)
    return [Flow(output, call.compute_dtype)]


def _rescaling(call: LayerCall) -> list[Flow]:
    x = call.cast(call.flow(cast=False)).name
    scale, offset = (call.constant(_numbers(call.get(n, d)), call.compute_dtype) for n, d in _RESCALING)
    return [Flow(call.add("Add", call.add("Mul", x, scale), offset), call.compute_dtype)]


_RESCALING = (("scale", None), ("offset", 0.0))


def _padding(call: LayerCall) -> str:
    # Keras 1: border_mode. An unknown one is not read, and so not understood.
    padding = call.get("padding", "valid")
    require(padding in ("same", "valid", "causal"))
    return str(padding)


def _windows(call: LayerCall, rank: int) -> dict[str, Any]:
    """Return the attributes of a convolution's window, but for its padding."""
    return {
        "strides": call.sizes("strides", rank, 1),
        "dilations": call.sizes("dilation_rate", rank, 1),
    }


def _kernel_size(call: LayerCall, rank: int, name: str = "kernel") -> tuple[int, ...]:
    shape = call.weight_shape(name)
    sizes = call.sizes("kernel_size", rank)
    require(len(shape) == rank + 2 and shape[:rank] == sizes)
    return sizes


_AUTO = {"same": "SAME_UPPER", "valid": "VALID", "causal": "VALID"}


def _convolve(call: LayerCall, x: str, weight: str, bias: str, group: int) -> str:
    """Add a convolution of an image with channels on axis 1."""
    rank = _class_rank(call)
    padding, window = _padding(call), _windows(call, rank)
    if padding == "causal":
        require(rank == 1)
        (size,), (dilation,) = call.sizes("kernel_size", 1), window["dilations"]
        x = call.add("Pad", x, call.integers((size - 1) * dilation, 0), "", call.integers(2), mode="constant")
    return call.add("Conv", x, weight, bias, auto_pad=_AUTO[padding], group=group, **window)


def _conv(call: LayerCall, x: str) -> str:
    rank = _class_rank(call)
    _kernel_size(call, rank)
    groups = call.get("groups", 1)
    require(type(groups) is int and groups > 0)
    weight = call.weight("kernel", Permute((rank + 1, rank, *range(rank))))
    bias = call.bias()
    return _activate(
        call, _on_image(call, x, rank, lambda image: _convolve(call, image, weight, bias, groups))
    )


def _depthwise_weight(call: LayerCall, rank: int) -> tuple[str, int]:
    """Return the weight of a convolution with a group for each channel, and the number of channels."""
    name = "depthwise_kernel" if call.has("depthwise_kernel") else "kernel"
    sizes = _kernel_size(call, rank, name)
    channels, multiplier = call.weight_shape(name)[rank:]
    require(call.get("depth_multiplier", 1) == multiplier)
    rule = chain_rules(Permute((rank, rank + 1, *range(rank))), Reshape((channels * multiplier, 1, *sizes)))
    return call.weight(name, rule), channels


def _depthwise_conv(call: LayerCall, x: str) -> str:
    rank = _class_rank(call)
    weight, channels = _depthwise_weight(call, rank)
    bias = call.bias()
    return _activate(
        call, _on_image(call, x, rank, lambda image: _convolve(call, image, weight, bias, channels))
    )


def _separable_conv(call: LayerCall, x: str) -> str:
    rank = _class_rank(call)
    weight, channels = _depthwise_weight(call, rank)
    second = call.weight("pointwise_kernel", Permute((rank + 1, rank, *range(rank))))
    bias = call.bias()

    def apply(image: str) -> str:
        return call.add("Conv", _convolve(call, image, weight, "", channels), second, bias)

    return _activate(call, _on_image(call, x, rank, apply))


def _transposed_conv(call: LayerCall, x: str) -> str:
    """Add a transposed convolution with the output shape of Keras."""
    rank = _class_rank(call)
    sizes, window, padding = _kernel_size(call, rank), _windows(call, rank), _padding(call)
    require(set(window["dilations"]) == {1} and padding != "causal")
    call.require("groups", 1)
    output_padding = call.get("output_padding")
    added = None if output_padding is None else call.sizes("output_padding", rank)
    pads: list[tuple[int, int]] = []
    more: list[int] = []
    for axis, (size, stride) in enumerate(zip(sizes, window["strides"], strict=True)):
        # What the result lacks of the whole, (extent - 1) * stride + size; negative if it is longer.
        if added is not None:
            lacking = (2 * (size // 2) if padding == "same" else 0) - added[axis]
        else:
            lacking = size - stride if padding == "same" else min(size - stride, 0)
        cut = max(lacking, 0)
        require(padding == "same" or not cut)
        pads.append((cut // 2, cut - cut // 2))
        more.append(max(-lacking, 0))
    weight = call.weight("kernel", Permute((rank + 1, rank, *range(rank))))
    bias = call.bias()
    settings = {
        "strides": window["strides"],
        "pads": (*(before for before, _ in pads), *(after for _, after in pads)),
        "output_padding": tuple(more),
    }
    output = _on_image(
        call, x, rank, lambda image: call.add("ConvTranspose", image, weight, bias, **settings)
    )
    return _activate(call, output)


def _pool(op: str) -> _OneRule:
    def rule(call: LayerCall, x: str) -> str:
        rank = _class_rank(call)
        window = call.sizes("pool_size", rank)
        strides = call.get("strides")
        steps = window if strides is None else call.sizes("strides", rank)
        padding = _padding(call)
        require(padding != "causal")
        settings = {"kernel_shape": window, "strides": steps, "auto_pad": _AUTO[padding]}
        return _on_image(call, x, rank, lambda image: call.add(op, image, **settings))

    return rule


def _global_pool(op: str) -> _OneRule:
    def rule(call: LayerCall, x: str) -> str:
        axes = _image_axes(call, _class_rank(call))
        keep = call.get("keepdims", default=False)
        require(isinstance(keep, bool))
        return call.add(op, x, call.integers(*axes), keepdims=int(keep))

    return rule


def _merge(op: str) -> LayerRule:
    def rule(call: LayerCall) -> list[Flow]:
        flows = call.flows(cast=False)
        require(len({flow.dtype for flow in flows}) == 1 and len(flows) > 1)
        # Keras broadcasts inputs of fewer axes from the second axis on.
        require(len({call.rank(flow.name) for flow in flows}) == 1)
        require(flows[0].dtype in _FLOATS or op not in ("Mean", "Sub"))
        require(op != "Sub" or len(flows) == 2)
        names = [flow.name for flow in flows]
        if op in ("Sub", "Mean", "Max", "Min", "Sum"):
            return [Flow(call.add(op, *names), flows[0].dtype)]
        total = names[0]
        for name in names[1:]:
            total = call.add(op, total, name)
        return [Flow(total, flows[0].dtype)]

    return rule


def _concatenate(call: LayerCall) -> list[Flow]:
    flows = call.flows(cast=False)
    axis = call.get("axis", -1)
    require(type(axis) is int and len({flow.dtype for flow in flows}) == 1)
    require(-(rank := call.rank(flows[0].name)) <= axis < rank)
    if len(flows) == 1:
        return flows
    return [Flow(call.add("Concat", *(flow.name for flow in flows), axis=axis), flows[0].dtype)]


def _dot(call: LayerCall) -> list[Flow]:
    flows = call.flows()
    require(len(flows) == 2)
    names = [flow.name for flow in flows]
    axes = call.get("axes")
    pair = axes if isinstance(axes, list) else [axes, axes]
    require(len(pair) == 2 and all(type(axis) is int for axis in pair))
    ranks = [call.rank(name) for name in names]
    axis = [axis % rank for axis, rank in zip(pair, ranks, strict=True)]
    require(min(axis) > 0)
    normalize = call.get("normalize", default=False)
    if normalize:
        names = [_normalize(call, name, [n], 1e-7) for name, n in zip(names, axis, strict=True)]
    letters = ("abcdefg"[: ranks[0]], "a" + "hijklmn"[: ranks[1] - 1])
    left = letters[0].replace(letters[0][axis[0]], "z")
    right = letters[1].replace(letters[1][axis[1]], "z")
    result = (left + right[1:]).replace("z", "")
    output = call.add("Einsum", *names, equation=f"{left},{right}->{result}")
    if len(result) == 1:
        output = call.add("Unsqueeze", output, call.integers(1))
    return [Flow(output, flows[0].dtype)]


# Operators of cells, and the order of their gates.
_CELLS: dict[str, tuple[str, tuple[int, ...]]] = {
    cell: (op, gate_order(kind, "", "onnx"))
    for cell, op, kind in (
        ("LSTMCell", "LSTM", "lstm"),
        ("GRUCell", "GRU", "gru"),
        ("SimpleRNNCell", "RNN", "simple_rnn"),
    )
}
_CELL_ACTIVATIONS = {
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "relu": "Relu",
    "softsign": "Softsign",
    "softplus": "Softplus",
    "linear": "Affine",
    "elu": "Elu",
    "hard_sigmoid": "HardSigmoid",
}
_CELL_NUMBERS: dict[str, tuple[list[float], list[float]]] = {"linear": ([1.0], [0.0]), "elu": ([1.0], [])}


def _cell_activations(call: LayerCall, op: str) -> dict[str, Any]:
    names = ["activation"]
    if op != "RNN":
        names = ["recurrent_activation", "activation", *(["activation"] if op == "LSTM" else [])]
    chosen = [_activation_name(call.get(name)) for name in names]
    require(all(name in _CELL_ACTIVATIONS for name in chosen))
    alphas, betas = list[float](), list[float]()
    for name in chosen:
        numbers = _CELL_NUMBERS.get(name, ([], []))
        if name == "hard_sigmoid":
            numbers = ([_hard_sigmoid_slope(call)], [0.5])
        alphas += numbers[0]
        betas += numbers[1]
    return {
        "activations": tuple(_CELL_ACTIVATIONS[name] for name in chosen),
        "activation_alpha": tuple(alphas),
        "activation_beta": tuple(betas),
    }


def _run_cell(
    call: LayerCall, cell: str, x: str, states: Sequence[str] = (), *, reverse: bool = False
) -> tuple[str, list[str]]:
    """Add a recurrent operator in one direction; return the results of each step, and the last states.

    Results of a reversed direction stay at the place of their step.
    """
    op, order = _CELLS[cell]
    gates, units = len(order), call.weight_shape("recurrent_kernel")[0]
    width = gates * units
    settings = {**_cell_activations(call, op), "layout": 1, "hidden_size": units}
    rules: list[Rule] = [TRANSPOSE, *([BlockOrder(0, order)] if gates == 4 else [])]
    weights = []
    for name in ("kernel", "recurrent_kernel"):
        shape = call.weight_shape(name)
        require(len(shape) == 2 and shape[1] == width)
        weights.append(call.weight(name, chain_rules(*rules, Reshape((1, width, shape[0])))))
    bias, after = "", call.get("reset_after") if op == "GRU" else None
    if call.get("use_bias", default=True):
        shape = call.weight_shape("bias")
        after = len(shape) == 2 if op == "GRU" and after is None else after
        require(shape == ((2, width) if after else (width,)))
        blocks: Rule = BlockOrder(0, order) if gates == 4 else KEEP
        bias = call.weight("bias", chain_rules(blocks, Reshape((1, math.prod(shape)))))
        if not after:
            bias = call.add("Concat", bias, call.constant([[0] * width], call.compute_dtype), axis=1)
    else:
        require(not call.has("bias") and (op != "GRU" or isinstance(after, bool)))
    if op == "GRU":
        settings["linear_before_reset"] = int(bool(after))
    first = [call.add("Unsqueeze", state, call.integers(1)) for state in states]
    inputs = [x, *weights, bias, *(["", *first] if first else [])]
    count = 3 if op == "LSTM" else 2
    require(len(states) in (0, count - 1))
    outputs = call.split(op, inputs, count, direction="reverse" if reverse else "forward", **settings)
    steps = call.add("Squeeze", outputs[0], call.integers(2))
    return steps, [call.add("Squeeze", state, call.integers(1)) for state in outputs[1:]]


def _reversed_steps(call: LayerCall, x: str) -> str:
    starts, ends = call.integers(-1), call.integers(-_END)
    return call.add("Slice", x, starts, ends, call.integers(1), call.integers(-1))


def _apply_recurrent(call: LayerCall, x: str, states: Sequence[str]) -> list[str]:
    """Return the outputs of a recurrent layer: its result, and its last states if it returns them."""
    for name in ("stateful", "time_major", "return_runtime"):
        call.require(name, False)
    call.get("use_cudnn")
    back, whole = call.get("go_backwards", default=False), call.get("return_sequences", default=False)
    returned = call.get("return_state", default=False)
    require(all(isinstance(flag, bool) for flag in (back, whole, returned)))
    if call.cls in CELLS:
        call.part = (
            (*call.part, f"cell|{_cell_pattern(CELLS[call.cls])}") if not call.has("kernel") else call.part
        )
        steps, last = _run_cell(call, CELLS[call.cls], x, states, reverse=back)
    else:
        steps, last = _run_cells(call, x, states, reverse=back)
    steps = _reversed_steps(call, steps) if back and whole else steps
    return [steps if whole else last[0], *(last if returned else [])]


def _cell_pattern(cls: str) -> str:
    """Return a pattern of the names that Keras gives a cell: lstm_cell, lstm_cell_3."""
    return rf"{cls.removesuffix('Cell').lower().replace('simplernn', 'simple_rnn')}_cell(?:_\d+)?"


def _run_cells(call: LayerCall, x: str, states: Sequence[str], *, reverse: bool) -> tuple[str, list[str]]:
    """Add the cell of an RNN, or its stack of cells one after the other."""
    document = call.get("cell")
    inner = call.inner(document, r"cell|.*_cells?(?:_\d+)?")
    if inner.cls in _CELLS:
        result = _run_cell(inner, inner.cls, x, states, reverse=reverse)
        inner.require_understood()
        return result
    cells = inner.get("cells")
    require(inner.cls == "StackedRNNCells" and isinstance(cells, list) and cells and not states)
    inner.require_understood()
    last = list[str]()
    stored = [
        *inner.part,
        *(["cells"] if inner.reader.list_children(inner.stored_scope() or ()) == ["cells"] else []),
    ]
    for item in cells:
        cell = call.inner(item)
        require(cell.cls in _CELLS)
        cell.part = (*stored, re.escape(str(config_of(item).name)))
        x, last = _run_cell(cell, cell.cls, x, reverse=reverse)
        cell.require_understood()
    # The states of a stack are those of all cells; its result is that of the last one.
    call.require("return_state", False)
    return x, last


def _states_of(call: LayerCall, flows: list[Flow]) -> tuple[str, list[str]]:
    """Return the input of a recurrent layer, and its first states."""
    first = call.argument("initial_state")
    states = [item for item in flatten_operand([first]) if item is not None]
    require(all(isinstance(state, Flow) for state in states) and not (states and len(flows) > 1))
    names = [call.cast(state).name for state in states] or [flow.name for flow in flows[1:]]
    return flows[0].name, names


def _recurrent(call: LayerCall) -> list[Flow]:
    flows = call.flows()
    x, states = _states_of(call, flows)
    return [Flow(name, flows[0].dtype) for name in _apply_recurrent(call, x, states)]


def _bidirectional(call: LayerCall) -> list[Flow]:
    flow = call.flow()
    merge, document, other = call.get("merge_mode"), call.get("layer"), call.get("backward_layer")
    inner = config_of(document)
    require(inner.cls in (*CELLS, "RNN") and not inner.settings.get("return_state"))
    copied = None
    if other is None:
        turned = not inner.settings.get("go_backwards", False)
        other = copied = {**document, "config": {**inner.settings, "go_backwards": turned}}
    results = []
    for name, part in (("forward", document), ("backward", other)):
        # Keras renames the layer of the second direction only if it is a copy of the first.
        suffix = "" if part is copied else f"|{re.escape(str(config_of(part).name))}"
        layer = call.inner(part, rf"{name}(?:_.*)?{suffix}")
        (output,) = _apply_recurrent(layer, flow.name, ())
        layer.require_understood()
        results.append(output)
    if config_of(other).settings.get("return_sequences"):
        results[1] = _reversed_steps(call, results[1])
    if merge is None:
        return [Flow(name, flow.dtype) for name in results]
    ops = {"sum": "Add", "mul": "Mul", "ave": "Mean"}
    require(merge in ("concat", *ops))
    output = call.add("Concat", *results, axis=-1) if merge == "concat" else call.add(ops[merge], *results)
    return [Flow(output, flow.dtype)]


def _time_distributed(call: LayerCall) -> list[Flow]:
    """Apply a layer to all steps as to a larger batch."""
    flow = call.flow()
    document = call.get("layer")
    inner = call.inner(document, "layer|" + re.escape(str(config_of(document).name)))
    shape = call.add("Shape", flow.name)

    def part(name: str, start: int, end: int) -> str:
        return call.add("Slice", name, call.integers(start), call.integers(end), call.integers(0))

    rows = call.add("Concat", call.integers(-1), part(shape, 2, _END), axis=0)
    inner.arguments = [flow._replace(name=call.add("Reshape", flow.name, rows))]
    results = find_rule(document)(inner)
    require(len(results) == 1 and config_of(document).cls not in _USE_MASK)
    inner.require_understood()
    output = results[0].name
    whole = call.add("Concat", part(shape, 0, 2), part(call.add("Shape", output), 1, _END), axis=0)
    return [results[0]._replace(name=call.add("Reshape", output, whole))]


def _wrapped(call: LayerCall) -> list[Flow]:
    """Apply the layer of a SpectralNormalization, whose kernel is the normalized one."""
    document = call.get("layer")
    call.get("power_iterations")
    inner = call.inner(document, "layer|" + re.escape(str(config_of(document).name)))
    results = find_rule(document)(inner)
    inner.require_understood()
    return results


def _project(call: LayerCall, x: str, part: str, heads: int) -> str:
    """Return the queries, keys or values of all heads next to each other."""
    inner = call.inner({"class_name": "EinsumDense", "config": call.settings}, part)
    shape = inner.weight_shape("kernel")
    require(len(shape) == 3 and shape[1] == heads)
    width = shape[1] * shape[2]
    output = call.add("MatMul", x, inner.weight("kernel", Reshape((shape[0], width))))
    return _add_bias(call, output, inner.bias(rule=Reshape((width,))))


def _multi_head_attention(call: LayerCall) -> list[Flow]:
    grouped = call.cls != "MultiHeadAttention"
    flows = call.flows()
    names = [flow.name for flow in flows]
    keyed = [call.argument("value"), call.argument("key")]
    names += [call.cast(flow).name for flow in keyed if isinstance(flow, Flow)]
    require(not any(isinstance(flow, Flow) and flow.masked for flow in keyed))
    require(2 <= len(names) <= 3 and all(call.rank(name) == 3 for name in names))
    query, value, key = (*names, names[1])[:3]
    causal = call.argument("use_causal_mask", default=False)
    scores = call.argument("return_attention_scores", default=False)
    require(isinstance(causal, bool) and scores is False)
    call.require("use_gate", False)
    call.require("flash_attention", None)
    call.require("attention_axes", [1], None)
    call.get("use_bias")
    shared = call.get("num_key_value_heads" if grouped else "num_heads")
    heads = call.get("num_query_heads") if grouped else shared
    width = call.get("head_dim" if grouped else "key_dim")
    call.get("value_dim"), call.get("output_shape")
    require(all(type(number) is int and number > 0 for number in (heads, shared, width)))
    projected = [
        _project(call, name, rf"_?{part}(?:_dense)?", count)
        for name, part, count in ((query, "query", heads), (key, "key", shared), (value, "value", shared))
    ]
    settings = {"q_num_heads": heads, "kv_num_heads": shared, "scale": 1 / math.sqrt(width)}
    output = call.add("Attention", *projected, is_causal=int(causal), **settings)
    inner = call.inner(
        {"class_name": "EinsumDense", "config": call.settings}, "_?(?:attention_)?output(?:_dense)?"
    )
    shape = inner.weight_shape("kernel")
    require(len(shape) == 3)
    output = call.add("MatMul", output, inner.weight("kernel", Reshape((shape[0] * shape[1], shape[2]))))
    return [Flow(_add_bias(call, output, inner.bias()), flows[0].dtype)]


def _attention(call: LayerCall) -> list[Flow]:
    flows = call.flows()
    names = [flow.name for flow in flows]
    require(2 <= len(names) <= 3 and all(call.rank(name) == 3 for name in names))
    query, value, key = (*names, names[1])[:3]
    call.require("causal", False)
    for name in ("use_causal_mask", "return_attention_scores"):
        require(not call.argument(name, default=False))
    additive = call.cls == "AdditiveAttention"
    mode, scaled = call.get("score_mode", "dot"), call.get("use_scale", default=False)
    require(isinstance(scaled, bool) and scaled == call.has("scale") and mode in ("dot", "concat"))
    if additive or mode == "concat":
        left = call.add("Unsqueeze", query, call.integers(2))
        total = call.add("Add", left, call.add("Unsqueeze", key, call.integers(1)))
        if scaled and not additive:
            total = call.add("Mul", total, call.weight("scale"))
        total = call.add("Tanh", total)
        if scaled and additive:
            total = call.add("Mul", total, call.weight("scale"))
        scores = call.add("ReduceSum", total, call.integers(-1), keepdims=0)
        if not additive:
            scores = call.add("Mul", scores, call.weight("concat_score_weight"))
    else:
        scores = call.add("MatMul", query, call.add("Transpose", key, perm=(0, 2, 1)))
        scores = call.add("Mul", scores, call.weight("scale")) if scaled else scores
    output = call.add("MatMul", call.add("Softmax", scores, axis=-1), value)
    return [Flow(output, flows[0].dtype)]


def _input(call: LayerCall) -> list[Flow]:
    call.get("optional")
    call.require("sparse", False)
    call.require("ragged", False)
    return [call.flow(cast=False)]


def _nothing(call: LayerCall) -> list[Flow]:
    for name in ("rate", "noise_shape", "stddev", "l1", "l2", "data_format"):
        call.get(name)
    flow = call.flow(cast=False)
    return [flow]


def _inactive(call: LayerCall) -> list[Flow]:
    """Return the input of a layer that changes images in training only, whatever its settings are."""
    for name in call.settings:
        call.get(name)
    return [call.flow(cast=False)]


def _operands(call: LayerCall, count: int | None = None) -> tuple[list[str], str]:
    """Return the operands of a function, and their type, which numbers among them get as well."""
    items = list(flatten_operand(call.arguments))
    flows = [item for item in items if isinstance(item, Flow)]
    dtypes = {flow.dtype for flow in flows}
    require(len(dtypes) == 1 and (count is None or len(items) == count))
    require(not any(flow.masked for flow in flows))
    (dtype,) = dtypes
    names = []
    for item in items:
        if isinstance(item, Flow):
            names.append(item.name)
            continue
        require(type(item) in (int, float) and (dtype in _FLOATS or type(item) is int))
        names.append(call.constant(item, dtype))
    return names, dtype


def _function(row: Operator, call: LayerCall) -> list[Flow]:
    """Add a function that is one operator of the table."""
    names, dtype = _operands(call, row.spelling.inputs)
    require(dtype in _FLOATS or row.result == "bool" or row.name in _ANY_TYPE)
    return [Flow(call.add(row.name, *names), row.result or dtype)]


_ANY_TYPE = frozenset(("Add", "Sub", "Mul", "Max", "Min", "Abs", "Neg", "Identity"))


def _float_function(rule: _OneRule) -> LayerRule:
    """Return the rule of a function of one value that is computed in its own type."""

    def apply(call: LayerCall) -> list[Flow]:
        names, dtype = _operands(call, 1)
        require(dtype == "float32")
        return [Flow(rule(call, names[0]), dtype)]

    return apply


def _reduction(op: str) -> LayerRule:
    def rule(call: LayerCall) -> list[Flow]:
        names, dtype = _operands(call, 1)
        require(dtype in _FLOATS)
        axis, keep = call.get("axis"), bool(call.get("keepdims", default=False))
        # Without axes, all are reduced, also that of the batch.
        axes = "" if axis is None else call.integers(*_whole_numbers(axis))
        x = names[0]
        if op == "Variance":
            require(axes)
            x = _center(call, x, _whole_numbers(axis))[0]
            x = call.add("Mul", x, x)
        output = call.add("ReduceMean" if op == "Variance" else op, x, axes, keepdims=int(keep))
        return [Flow(output, dtype)]

    return rule


def _arg(op: str) -> LayerRule:
    def rule(call: LayerCall) -> list[Flow]:
        (names, _), axis = _operands(call, 1), call.get("axis")
        require(type(axis) is int)
        keep = int(bool(call.get("keepdims", default=False)))
        output = call.add(op, names[0], axis=axis, keepdims=keep)
        return [Flow(call.add("Cast", output, to="int32"), "int32")]

    return rule


def _any(rule: Callable[[LayerCall, list[str]], str]) -> LayerRule:
    """Return the rule of a function of values of any one type."""

    def apply(call: LayerCall) -> list[Flow]:
        names, dtype = _operands(call)
        return [Flow(rule(call, names), dtype)]

    return apply


def _ops_reshape(call: LayerCall, names: list[str]) -> str:
    shape = [-1 if extent is None else extent for extent in call.get("newshape")]
    require(all(type(extent) is int and extent for extent in shape) and shape.count(-1) < 2)
    return call.add("Reshape", names[0], call.integers(*shape))


def _ops_transpose(call: LayerCall, names: list[str]) -> str:
    axes = call.get("axes")
    rank = call.rank(names[0])
    order = range(rank)[::-1] if axes is None else [axis % rank for axis in _whole_numbers(axes)]
    return call.add("Transpose", names[0], perm=tuple(order))


def _ops_squeeze(call: LayerCall, names: list[str]) -> str:
    return call.add("Squeeze", names[0], call.integers(*_whole_numbers(call.get("axis"))))


def _ops_expand(call: LayerCall, names: list[str]) -> str:
    return call.add("Unsqueeze", names[0], call.integers(*_whole_numbers(call.get("axis"))))


def _ops_concat(call: LayerCall, names: list[str]) -> str:
    return call.add("Concat", *names, axis=_whole_numbers(call.get("axis"))[0])


def _ops_stack(call: LayerCall, names: list[str]) -> str:
    (axis,) = _whole_numbers(call.get("axis", 0))
    return call.add(
        "Concat", *(call.add("Unsqueeze", name, call.integers(axis)) for name in names), axis=axis
    )


def _ops_split(call: LayerCall) -> list[Flow]:
    (names, dtype), parts, axis = _operands(call, 1), call.get("indices_or_sections"), call.get("axis", 0)
    require(type(axis) is int)
    if isinstance(parts, list):
        bounds = [0, *_whole_numbers(parts), _END]
        axes = call.integers(axis)
        names = [
            call.add("Slice", names[0], call.integers(start), call.integers(end), axes)
            for start, end in itertools.pairwise(bounds)
        ]
    else:
        require(type(parts) is int and parts > 0)
        names = call.split("Split", names, parts, axis=axis, num_outputs=parts)
    return [Flow(name, dtype) for name in names]


def _ops_item(call: LayerCall) -> list[Flow]:
    """Select entries: numbers, slices, new axes and an ellipsis."""
    flow, *rest = call.arguments
    require(isinstance(flow, Flow) and not flow.masked and len(rest) == 1)
    items = rest[0] if isinstance(rest[0], list) else [rest[0]]
    axes, starts, ends, steps = list[int](), list[int](), list[int](), list[int]()
    removed, added = list[int](), list[int]()
    axis = index = 0
    for item in items:
        if item is None:
            added.append(index)
            index += 1
        elif item is Ellipsis:
            used = sum(item is not None and item is not Ellipsis for item in items)
            hidden = call.rank(flow.name) - used
            axis, index = axis + hidden, index + hidden
        elif type(item) is int:
            axes, starts = [*axes, axis], [*starts, item]
            ends, steps = [*ends, item + 1 or _END], [*steps, 1]
            removed.append(axis)
            axis += 1
        else:
            require(isinstance(item, slice))
            step = 1 if item.step is None else item.step
            require(type(step) is int and step > 0)
            require(all(type(bound) is int or bound is None for bound in (item.start, item.stop)))
            axes, steps = [*axes, axis], [*steps, step]
            starts = [*starts, item.start or 0]
            ends = [*ends, _END if item.stop is None else item.stop]
            axis, index = axis + 1, index + 1
    output = flow.name
    if axes:
        output = call.add(
            "Slice", output, *(call.integers(*numbers) for numbers in (starts, ends, axes, steps))
        )
    output = call.add("Squeeze", output, call.integers(*removed)) if removed else output
    output = call.add("Unsqueeze", output, call.integers(*added)) if added else output
    return [Flow(output, flow.dtype)]


def _ops_where(call: LayerCall) -> list[Flow]:
    condition, *rest = call.arguments
    require(isinstance(condition, Flow) and condition.dtype == "bool" and len(rest) == 2)
    call.arguments = rest
    names, dtype = _operands(call, 2)
    return [Flow(call.add("Where", condition.name, *names), dtype)]


def _ops_clip(call: LayerCall, names: list[str]) -> str:
    low, high = call.number("x_min"), call.number("x_max")
    return call.add("Clip", names[0], call.constant(low, "float32"), call.constant(high, "float32"))


def _ops_einsum(call: LayerCall, names: list[str]) -> str:
    return call.add("Einsum", *names, equation=str(call.get("subscripts")).replace(" ", ""))


def _ops_softmax(op: str) -> _OneRule:
    def rule(call: LayerCall, x: str) -> str:
        axis = call.get("axis", -1)
        require(type(axis) is int)
        return call.add(op, x, axis=axis)

    return rule


def _ops_gelu(call: LayerCall, x: str) -> str:
    return call.add("Gelu", x, approximate="tanh" if call.get("approximate") else "none")


# Functions without arguments: LogSigmoid is log_sigmoid.
_SMOOTH = {
    "".join(map(str.capitalize, name.split("_"))): name
    for name in (
        *("relu", "relu6", "sigmoid", "softplus", "softsign", "silu", "log_sigmoid", "hard_sigmoid"),
        *("hard_silu", "hard_tanh", "selu", "tanh_shrink", "squareplus", "mish"),
    )
}

_FUNCTIONS: dict[str, LayerRule] = {
    **{name: _float_function(_ACTIVATIONS[function]) for name, function in _SMOOTH.items()},
    "Square": _float_function(lambda call, x: call.add("Mul", x, x)),
    "Rsqrt": _float_function(lambda call, x: call.add("Reciprocal", call.add("Sqrt", x))),
    "Elu": _float_function(lambda call, x: call.add("Elu", x, alpha=call.number("alpha"))),
    "Celu": _float_function(lambda call, x: call.add("Celu", x, alpha=call.number("alpha"))),
    "LeakyRelu": _float_function(
        lambda call, x: call.add("LeakyRelu", x, alpha=call.number("negative_slope"))
    ),
    "Gelu": _float_function(_ops_gelu),
    "Softmax": _float_function(_ops_softmax("Softmax")),
    "LogSoftmax": _float_function(_ops_softmax("LogSoftmax")),
    "Clip": _float_function(lambda call, x: _ops_clip(call, [x])),
    "Mean": _reduction("ReduceMean"),
    "Sum": _reduction("ReduceSum"),
    "Max": _reduction("ReduceMax"),
    "Min": _reduction("ReduceMin"),
    "Prod": _reduction("ReduceProd"),
    "Var": _reduction("Variance"),
    "Logsumexp": _reduction("ReduceLogSumExp"),
    "Argmax": _arg("ArgMax"),
    "Argmin": _arg("ArgMin"),
    "Reshape": _any(_ops_reshape),
    "Transpose": _any(_ops_transpose),
    "Squeeze": _any(_ops_squeeze),
    "ExpandDims": _any(_ops_expand),
    "Concatenate": _any(_ops_concat),
    "Stack": _any(_ops_stack),
    "Einsum": _any(_ops_einsum),
    "Split": _ops_split,
    "GetItem": _ops_item,
    "Where": _ops_where,
}

_RANKS = ("1D", "2D", "3D")
_RULES: dict[str, LayerRule] = {
    **dict.fromkeys(("Identity", "Dropout", "GaussianNoise", "GaussianDropout", "AlphaDropout"), _nothing),
    **{f"SpatialDropout{rank}": _nothing for rank in _RANKS},
    "ActivityRegularization": _nothing,
    **dict.fromkeys(("RandomFlip", "RandomRotation", "RandomTranslation", "RandomZoom"), _inactive),
    **dict.fromkeys(("RandomContrast", "RandomBrightness"), _inactive),
    "InputLayer": _input,
    "Dense": _dense,
    "EinsumDense": _one(_einsum_dense),
    "Embedding": _embedding,
    "Activation": _one(_activate),
    "Masking": _one(_masking),
    "PReLU": _one(_prelu),
    **{name: _one(rule) for name, rule in _ACTIVATION_LAYERS.items()},
    "Flatten": _moving(_flatten),
    "Reshape": _moving(_reshape),
    "Permute": _moving(_permute),
    "RepeatVector": _moving(_repeat),
    **{f"ZeroPadding{rank}": _one(_pad) for rank in _RANKS},
    **{f"Cropping{rank}": _moving(_crop) for rank in _RANKS},
    **{f"UpSampling{rank}": _one(_upsample) for rank in _RANKS},
    "BatchNormalization": _one(_batch_norm),
    "LayerNormalization": _one(_layer_norm),
    "GroupNormalization": _one(_group_norm),
    "RMSNormalization": _one(_root_mean_square_norm),
    "UnitNormalization": _one(_unit_norm),
    "SpectralNormalization": _wrapped,
    "Normalization": _normalization,
    "Rescaling": _rescaling,
    **{f"Conv{rank}": _one(_conv) for rank in _RANKS},
    **{f"DepthwiseConv{rank}": _one(_depthwise_conv) for rank in _RANKS[:2]},
    **{f"SeparableConv{rank}": _one(_separable_conv) for rank in _RANKS[:2]},
    **{f"Conv{rank}Transpose": _one(_transposed_conv) for rank in _RANKS},
    **{f"MaxPooling{rank}": _one(_pool("MaxPool")) for rank in _RANKS},
    **{f"AveragePooling{rank}": _one(_pool("AveragePool")) for rank in _RANKS},
    **{f"GlobalMaxPooling{rank}": _one(_global_pool("ReduceMax")) for rank in _RANKS},
    **{f"GlobalAveragePooling{rank}": _one(_global_pool("ReduceMean")) for rank in _RANKS},
    "Add": _merge("Add"),
    "Subtract": _merge("Sub"),
    "Multiply": _merge("Mul"),
    "Average": _merge("Mean"),
    "Maximum": _merge("Max"),
    "Minimum": _merge("Min"),
    "Concatenate": _concatenate,
    "Dot": _dot,
    **dict.fromkeys((*(cls for cls in CELLS if "Conv" not in cls), "RNN"), _recurrent),
    "Bidirectional": _bidirectional,
    "TimeDistributed": _time_distributed,
    **dict.fromkeys(ATTENTION, _multi_head_attention),
    **dict.fromkeys(("Attention", "AdditiveAttention"), _attention),
}


def _is_function(layer: Mapping[str, Any]) -> bool:
    return ".ops." in str(layer.get("module"))


def takes_two_operands(layer: Mapping[str, Any]) -> bool:
    """Return whether a layer is a function of keras.ops with two operands, one of which may be a number."""
    row = spelled_operators("keras").get(str(config_of(dict(layer)).cls))
    return row is not None and row.spelling.inputs == 2 and _is_function(layer)


def find_rule(layer: Mapping[str, Any]) -> LayerRule:
    """Return the rule of a layer, or of a function of keras.ops; raise OpaqueError without one."""
    cls, own = str(config_of(dict(layer)).cls), _is_function(layer)
    rule = (_FUNCTIONS if own else _RULES).get(cls)
    row = spelled_operators("keras").get(cls) if own and rule is None else None
    rule = rule if row is None else partial(_function, row)
    if rule is None:
        raise OpaqueError
    return rule
