"""Compute output shapes and multiply-accumulate operations of layers from their classes and settings."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, attr, index, key
from ckpttool.formats.keras_config import KerasConfig, config_of, has_foreign_class, windowed_sizes

# Pure arithmetic: nothing is executed and no tensor is read. Operations are those of convolutions, dense and
# recurrent layers and attention; elementwise functions and norms count as none.

Extents = tuple[int | None, ...]
# No framework supports larger settings of a layer, tensors with more numbers or with more axes.
_MOST_SIZE, _MOST_NUMBERS, _MOST_AXES = 1 << 40, 1 << 63, 32


class UnknownShapeError(Exception):
    """The shape cannot be computed: settings that are unknown or not supported here."""


class ShapeMismatchError(UnknownShapeError):
    """The layer cannot be applied to an input of this shape."""


def require_fit(fits: bool) -> None:
    """Raise ShapeMismatchError unless the input fits the layer."""
    if not fits:
        raise ShapeMismatchError


def require_known(known: bool) -> None:
    """Raise UnknownShapeError unless the settings determine the shape."""
    if not known:
        raise UnknownShapeError


def is_possible(shape: Extents) -> bool:
    """Return whether a tensor of this shape can exist; None stands for any length."""
    sizes = [extent for extent in shape if extent is not None]
    return len(shape) <= _MOST_AXES and all(n >= 0 for n in sizes) and math.prod(sizes) < _MOST_NUMBERS


# Layers of torch: torch/nn/modules (torch 2.x). Shapes begin with a batch of 1.

_SAME_CLASSES = frozenset(
    ("Identity", "Dropout", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout")
)
ACTIVATION_CLASSES = frozenset(
    ("ReLU", "ReLU6", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Tanh", "Sigmoid", "Softplus", "Softmax")
) | {"LeakyReLU", "PReLU", "Hardtanh", "Hardswish", "Hardsigmoid", "LogSoftmax", "Softsign", "Activation"}


class TorchModule(NamedTuple):
    """A module of the file, with its settings."""

    tree: Tree
    path: Path
    cls: str

    def value(self, name: str, default: Any = None) -> Any:
        """Return a plain setting; a tuple of them for a tuple or list."""
        path = (*self.path, attr(name))
        leaf = self.tree.get(path)
        if isinstance(leaf, ValueLeaf):
            return leaf.value
        if path not in self.tree.containers:
            return default
        items: list[Any] = []
        while isinstance(item := self.tree.get((*path, index(len(items)))), ValueLeaf):
            items.append(item.value)
        return tuple(items)

    def size(self, name: str) -> int:
        """Return a setting that is a positive number."""
        value = self.value(name)
        if type(value) is not int or not 0 < value < _MOST_SIZE:
            raise UnknownShapeError
        return value

    def sizes(self, name: str, rank: int, default: Any = None) -> tuple[int, ...]:
        """Return a setting as one number per axis."""
        value = self.value(name, default)
        found = value if isinstance(value, tuple) else (value,) * rank
        if len(found) == 1 < rank:
            found *= rank
        if len(found) != rank or not all(type(each) is int and 0 <= each < _MOST_SIZE for each in found):
            raise UnknownShapeError
        return found


class TorchOutput(NamedTuple):
    """Output shape with the batch, and the operations for one sample."""

    shape: Extents
    macs: int = 0


_TorchRule = Callable[[TorchModule, tuple[int, ...]], TorchOutput]


def torch_rule(cls: str) -> _TorchRule | None:
    """Return the function that computes the output shape of a torch class."""
    if cls in _TORCH_RULES:
        return _TORCH_RULES[cls]
    stem = re.sub(r"[123]d\Z", "", cls)
    return _TORCH_RANKED.get(stem) if stem != cls else None


def _rank(module: TorchModule, shape: Sequence[int]) -> int:
    """Return the number of spatial axes of a class such as Conv2d; require an input with these axes."""
    rank = int(module.cls[-2])
    require_fit(len(shape) == rank + 2)
    return rank


def _axis(value: Any, rank: int) -> int:
    """Return an axis counted from the first one; only the batch has the number 0."""
    require_known(type(value) is int)
    require_fit(-rank <= value < rank)
    require_known(value % rank > 0)
    return int(value % rank)


def _same(_: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    return TorchOutput(shape)


def _same_rank(*ranks: int) -> _TorchRule:
    """Return the rule of a layer that keeps the shape of inputs with this number of axes."""

    def rule(_: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
        require_fit(len(shape) in ranks)
        return TorchOutput(shape)

    return rule


def _channel_shuffle(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    require_fit(len(shape) > 2 and shape[1] % module.size("groups") == 0)
    return TorchOutput(shape)


def _linear(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    taken, made = module.size("in_features"), module.size("out_features")
    require_fit(shape[-1] == taken and len(shape) > 1)
    return TorchOutput((*shape[:-1], made), math.prod(shape) * made)


def _conv(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    # torch/nn/modules/conv.py, "Shape" of each class.
    rank = _rank(module, shape)
    taken, made, groups = module.size("in_channels"), module.size("out_channels"), module.size("groups")
    kernel, stride, dilation = (module.sizes(name, rank) for name in ("kernel_size", "stride", "dilation"))
    require_known(taken % groups == made % groups == 0)
    require_fit(shape[1] == taken)
    spans = [wide * (width - 1) for wide, width in zip(dilation, kernel, strict=True)]
    padding = module.value("padding")
    if padding == "same":
        sizes = list(shape[2:])
    elif padding == "valid":
        sizes = [(n - span - 1) // s + 1 for n, span, s in zip(shape[2:], spans, stride, strict=True)]
    else:
        pads = module.sizes("padding", rank)
        sizes = [
            (n + 2 * pad - span - 1) // s + 1
            for n, pad, span, s in zip(shape[2:], pads, spans, stride, strict=True)
        ]
    require_fit(min(sizes) > 0)
    macs = math.prod(sizes) * made * (taken // groups) * math.prod(kernel)
    return TorchOutput((1, made, *sizes), macs)


def _conv_transpose(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    rank = _rank(module, shape)
    taken, made, groups = module.size("in_channels"), module.size("out_channels"), module.size("groups")
    names = ("kernel_size", "stride", "padding", "dilation", "output_padding")
    kernel, *others = (module.sizes(name, rank) for name in names)
    stride, _, dilation, more = others
    require_known(taken % groups == made % groups == 0)
    # torch refuses more: the output would not be unique.
    require_fit(all(n < max(step, wide) for n, step, wide in zip(more, stride, dilation, strict=True)))
    require_fit(shape[1] == taken)
    sizes = [
        (n - 1) * step - 2 * pad + wide * (width - 1) + extra + 1
        for n, width, step, pad, wide, extra in zip(shape[2:], kernel, *others, strict=True)
    ]
    require_fit(min(sizes) > 0)
    macs = math.prod(shape[2:]) * taken * (made // groups) * math.prod(kernel)
    return TorchOutput((1, made, *sizes), macs)


def _pool(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    # torch/aten/src/ATen/native/Pool.h, pooling_output_shape.
    rank = _rank(module, shape)
    require_known(not module.value("return_indices"))
    kernel = module.sizes("kernel_size", rank)
    stride = module.sizes("stride", rank, kernel) if module.value("stride") is not None else kernel
    padding, dilation = module.sizes("padding", rank, 0), module.sizes("dilation", rank, 1)
    ceil = bool(module.value("ceil_mode"))
    sizes = []
    for n, width, step, pad, wide in zip(shape[2:], kernel, stride, padding, dilation, strict=True):
        # AvgPool3d alone refuses windows larger than the image.
        require_fit(2 * pad <= width and (module.cls != "AvgPool3d" or width <= n))
        left = n + 2 * pad - wide * (width - 1) - 1
        made = (-(-left // step) if ceil else left // step) + 1
        # The last window begins inside the image or its first padding.
        sizes.append(made - (ceil and (made - 1) * step >= n + pad))
    require_fit(min(sizes) > 0)
    return TorchOutput((*shape[:2], *sizes))


def _adaptive(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    rank = _rank(module, shape)
    require_known(not module.value("return_indices"))
    value = module.value("output_size")
    wanted = value if isinstance(value, tuple) else (value,) * rank
    known = all(each is None or (type(each) is int and 0 < each < _MOST_SIZE) for each in wanted)
    require_known(len(wanted) == rank and known)
    return TorchOutput((*shape[:2], *(n if w is None else w for n, w in zip(shape[2:], wanted, strict=True))))


def _pad(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    rank = _rank(module, shape)
    pads = module.value("padding")
    pads = pads if isinstance(pads, tuple) else (pads,) * 2 * rank
    known = all(type(each) is int and abs(each) < _MOST_SIZE for each in pads)
    require_known(len(pads) == 2 * rank and known)
    # The last axis comes first (torch.nn.functional.pad).
    both = [pads[2 * n : 2 * n + 2] for n in reversed(range(rank))]
    for n, pair in zip(shape[2:], both, strict=True):
        require_fit(not module.cls.startswith("Reflection") or max(pair) < n)
        require_fit(not module.cls.startswith("Circular") or max(pair) <= n)
    sizes = [n + sum(pair) for n, pair in zip(shape[2:], both, strict=True)]
    require_known(min(sizes) > 0)
    return TorchOutput((*shape[:2], *sizes))


def _batch_norm(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    rank = int(module.cls[-2])
    require_fit(len(shape) == rank + 2 or (rank == 1 and len(shape) == 2))
    require_fit(shape[1] == module.size("num_features"))
    return TorchOutput(shape)


def _instance_norm(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    rank = int(module.cls[-2])
    # Without the batch, the first axis has the channels.
    require_known(len(shape) != rank + 1)
    require_fit(len(shape) == rank + 2)
    # Without parameters, torch accepts any number of channels.
    require_known(shape[1] == module.size("num_features") or module.value("affine") is True)
    require_fit(shape[1] == module.size("num_features"))
    return TorchOutput(shape)


def _norm(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    require_fit(len(shape) > 1 and shape[1] == module.size("num_features"))
    return TorchOutput(shape)


def _group_norm(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    require_fit(len(shape) > 1 and shape[1] == module.size("num_channels"))
    return TorchOutput(shape)


def _layer_norm(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    wanted = module.value("normalized_shape")
    require_known(isinstance(wanted, tuple) and len(wanted) > 0)
    require_fit(len(wanted) < len(shape) and shape[-len(wanted) :] == wanted)
    return TorchOutput(shape)


def _flatten(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    first, last = (_axis(module.value(name), len(shape)) for name in ("start_dim", "end_dim"))
    require_fit(first <= last)
    return TorchOutput((*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))


def _unflatten(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    axis, wanted = _axis(module.value("dim"), len(shape)), module.value("unflattened_size")
    require_known(isinstance(wanted, tuple) and 0 < len(wanted) <= _MOST_AXES)
    require_known(all(type(n) is int and (n == -1 or 0 < n < _MOST_SIZE) for n in wanted))
    require_known(wanted.count(-1) < 2)
    known = math.prod(n for n in wanted if n != -1)
    sizes = tuple(shape[axis] // known if n == -1 else n for n in wanted)
    require_fit(math.prod(sizes) == shape[axis])
    return TorchOutput((*shape[:axis], *sizes, *shape[axis + 1 :]))


# Axes of the inputs of an interpolation (torch.nn.functional.interpolate).
_INTERPOLATED = {"linear": (3,), "bilinear": (4,), "bicubic": (4,), "trilinear": (5,)}


def _upsample(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    rank = len(shape) - 2
    size, factor = module.value("size"), module.value("scale_factor")
    wanted = size if size is not None else factor
    each = wanted if isinstance(wanted, tuple) else (wanted,) * rank
    require_fit(len(shape) in _INTERPOLATED.get(str(module.value("mode")), (3, 4, 5)) and len(each) == rank)
    require_known(all(isinstance(n, int | float) and 0 < n < _MOST_SIZE for n in each))
    made = each if size is not None else (math.floor(n * f) for n, f in zip(shape[2:], each, strict=True))
    sizes = [int(n) for n in made]
    require_fit(min(sizes) > 0)
    return TorchOutput((*shape[:2], *sizes))


def _shuffle(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    up = module.cls == "PixelShuffle"
    factor = module.size("upscale_factor" if up else "downscale_factor")
    require_fit(len(shape) > 3)
    *lead, channels, height, width = shape
    if up:
        require_fit(channels % factor**2 == 0)
        return TorchOutput((*lead, channels // factor**2, height * factor, width * factor))
    require_fit(height % factor == width % factor == 0)
    return TorchOutput((*lead, channels * factor**2, height // factor, width // factor))


def _embedding(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    return TorchOutput((*shape, module.size("embedding_dim")))


def _glu(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    axis = _axis(module.value("dim", -1), len(shape))
    require_fit(shape[axis] % 2 == 0)
    return TorchOutput((*shape[:axis], shape[axis] // 2, *shape[axis + 1 :]))


def _recurrent(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    # torch/nn/modules/rnn.py: the gates of each layer and direction multiply the input and the state.
    size, hidden, layers = (module.size(name) for name in ("input_size", "hidden_size", "num_layers"))
    both = 2 if module.value("bidirectional") else 1
    made = module.size("proj_size") if module.value("proj_size") else hidden
    # One axis less: torch takes the first one as the steps of a single sequence.
    require_known(len(shape) > 2)
    require_fit(len(shape) == 3 and shape[-1] == size)
    gates = {"LSTM": 4, "GRU": 3}.get(module.cls, 1)
    # The first layer receives the input, each of the others both directions of the one before it.
    taken = size + (layers - 1) * made * both
    products = gates * hidden * (taken + layers * made) + (layers * hidden * made if made != hidden else 0)
    return TorchOutput((*shape[:-1], made * both), both * math.prod(shape[:-1]) * products)


def _cell(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    size, hidden = module.size("input_size"), module.size("hidden_size")
    require_fit(shape[1:] == (size,))
    gates = {"LSTMCell": 4, "GRUCell": 3}.get(module.cls, 1)
    return TorchOutput((1, hidden), gates * hidden * (size + hidden))


def _self_attention(module: TorchModule, shape: tuple[int, ...]) -> TorchOutput:
    """Return the output of attention whose query, key and value are one tensor [batch, steps, features]."""
    width = module.size("embed_dim")
    require_known(module.value("_qkv_same_embed_dim") is True and len(shape) > 2)
    # Both add a step to keys and values.
    more = module.tree.get((*module.path, attr("_parameters"), key("bias_k")))
    require_known(not isinstance(more, Leaf) and module.value("add_zero_attn") is not True)
    require_fit(len(shape) == 3 and shape[-1] == width)
    steps = math.prod(shape[:-1])
    return TorchOutput(shape, 4 * steps * width**2 + 2 * steps**2 * width)


_TORCH_RULES: dict[str, _TorchRule] = {
    **dict.fromkeys((*_SAME_CLASSES, *ACTIVATION_CLASSES), _same),
    **dict.fromkeys(
        (
            "Hardshrink",
            "Softshrink",
            "Tanhshrink",
            "LogSigmoid",
            "Softmin",
            "Threshold",
            "RReLU",
        ),
        _same,
    ),
    "Dropout1d": _same_rank(2, 3),
    "LocalResponseNorm": _same_rank(*range(3, _MOST_AXES)),
    "CrossMapLRN2d": _same_rank(4),
    "Softmax2d": _same_rank(3, 4),
    "ChannelShuffle": _channel_shuffle,
    "Linear": _linear,
    "NonDynamicallyQuantizableLinear": _linear,
    "GroupNorm": _group_norm,
    "LayerNorm": _layer_norm,
    "RMSNorm": _layer_norm,
    "Flatten": _flatten,
    "Unflatten": _unflatten,
    "Upsample": _upsample,
    "UpsamplingNearest2d": _upsample,
    "UpsamplingBilinear2d": _upsample,
    "PixelShuffle": _shuffle,
    "PixelUnshuffle": _shuffle,
    "Embedding": _embedding,
    "GLU": _glu,
    "SyncBatchNorm": _norm,
    "MultiheadAttention": _self_attention,
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
    **dict.fromkeys(("LSTMCell", "GRUCell", "RNNCell"), _cell),
}
# By the name without the number of axes.
_TORCH_RANKED: dict[str, _TorchRule] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _pool,
    "AvgPool": _pool,
    "LPPool": _pool,
    "AdaptiveAvgPool": _adaptive,
    "AdaptiveMaxPool": _adaptive,
    **dict.fromkeys(("ZeroPad", "ConstantPad", "ReflectionPad", "ReplicationPad", "CircularPad"), _pad),
    "BatchNorm": _batch_norm,
    "InstanceNorm": _instance_norm,
}


# Layers of Keras: keras/src/layers. Shapes have no batch axis; an extent of any length is None.

_KERAS_SAME = frozenset(
    ("Activation", "ReLU", "LeakyReLU", "ELU", "PReLU", "Softmax", "Identity", "Masking", "Rescaling")
) | {"Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "GaussianNoise"}
_KERAS_SAME |= {"GaussianDropout", "AlphaDropout", "ActivityRegularization", "Normalization"}
_KERAS_SAME |= {"BatchNormalization", "LayerNormalization", "GroupNormalization", "RMSNormalization"}
_KERAS_SAME |= {"UnitNormalization", "RandomFlip", "RandomRotation", "RandomTranslation", "RandomZoom"}
_KERAS_SAME |= {"RandomContrast", "RandomBrightness"}
_MERGES = frozenset(("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum"))
_WINDOWS = re.compile(
    r"((?:Separable|Depthwise)?Conv|(?:Max|Average)Pooling|UpSampling|ZeroPadding|Cropping)([123])D(Transpose)?"
)
_GLOBAL = re.compile(r"Global(?:Max|Average)Pooling([123])D")


class KerasCall(NamedTuple):
    """One call of a layer: its settings and the shapes of its inputs."""

    cls: str
    settings: Mapping[str, Any]
    given: tuple[Extents, ...]

    @property
    def first(self) -> Extents:
        """The shape of the first input."""
        return self.given[0]

    def size(self, name: str) -> int:
        """Return a setting that is a positive number."""
        value = self.settings.get(name)
        if type(value) is not int or not 0 < value < _MOST_SIZE:
            raise UnknownShapeError
        return value

    def axes(self, name: str, rank: int) -> tuple[int, ...]:
        """Return a setting as one number per axis."""
        value = self.settings.get(name)
        found = value if isinstance(value, list) else [value] * rank
        if len(found) != rank or not all(type(each) is int and 0 < each < _MOST_SIZE for each in found):
            raise UnknownShapeError
        return tuple(found)


class KerasOutput(NamedTuple):
    """The outputs of one call, and the operations for one sample; None if an extent is unknown."""

    outputs: tuple[Extents, ...]
    macs: int | None = 0


_KerasRule = Callable[[KerasCall], KerasOutput]


def _product(*extents: int | None) -> int | None:
    """Return the product; None if a factor is unknown."""
    found = 1
    for extent in extents:
        if extent is None:
            return None
        found *= extent
    return found


def keras_rule(cls: str) -> _KerasRule | None:
    """Return the function that computes the output shape of a Keras class."""
    if cls in _KERAS_SAME:
        return lambda call: KerasOutput((call.first,))
    if cls in _MERGES:
        return _merge
    if _WINDOWS.fullmatch(cls):
        return _window
    if _GLOBAL.fullmatch(cls):
        return _global_pool
    return _KERAS_RULES.get(cls)


def _inner_output(call: KerasCall, given: tuple[Extents, ...], name: str = "layer") -> KerasOutput:
    """Return the output of the layer that a wrapper applies."""
    inner = inner_config(call.settings, name)
    rule = None if inner is None else keras_rule(str(inner.cls))
    if inner is None or rule is None:
        raise UnknownShapeError
    return rule(KerasCall(str(inner.cls), inner.settings, given))


def inner_config(settings: Mapping[str, Any], name: str = "layer") -> KerasConfig | None:
    """Return the configuration of a wrapped layer; None for a custom class, whatever its name."""
    document = settings.get(name)
    return None if not isinstance(document, dict) or has_foreign_class(document) else config_of(document)


def _wrapped(call: KerasCall) -> KerasOutput:
    return _inner_output(call, call.given)


def _merge(call: KerasCall) -> KerasOutput:
    """Return the shape to which all inputs are broadcast."""
    rank = max(map(len, call.given))
    made: list[int | None] = []
    for axis in range(-rank, 0):
        extents = {each[axis] for each in call.given if len(each) >= -axis} - {1}
        require_fit(len(extents - {None}) < 2)
        made.append(next(iter(extents - {None}), None) if extents else 1)
    return KerasOutput((tuple(made),))


def _window(call: KerasCall) -> KerasOutput:
    """Return the output of a convolution, pooling, padding, cropping or upsampling layer."""
    match = _WINDOWS.fullmatch(call.cls)
    require_fit(match is not None)
    rank = int(call.cls.removesuffix("Transpose")[-2])
    require_fit(len(call.first) == rank + 1)
    first = call.settings.get("data_format") == "channels_first"
    shape = (*call.first[1:], call.first[0]) if first else call.first
    require_known(shape[-1] is not None)
    settings = dict(call.settings)
    if settings.get("padding") == "causal":  # padded at the start only: as long as with "same"
        settings["padding"] = "same"
    sizes = windowed_sizes(call.cls, settings, tuple(_ANY if n is None else n for n in shape))
    if sizes is None:
        raise UnknownShapeError
    made = (*(None if n is None else size for n, size in zip(shape[:-1], sizes, strict=False)), sizes[-1])
    macs = _window_macs(call, shape, made, rank) if "Conv" in call.cls else 0
    return KerasOutput(((made[-1], *made[:-1]) if first else made,), macs)


# Any length of an axis that is not fixed, in shape arithmetic.
_ANY = 1 << 12


def _window_macs(call: KerasCall, shape: Extents, made: Extents, rank: int) -> int | None:
    window = math.prod(call.axes("kernel_size", rank))
    taken, filters = shape[-1], made[-1]
    if call.cls.endswith("Transpose"):
        return _product(*shape, filters, window)
    places = _product(*made[:-1])
    if call.cls.startswith("Depthwise"):
        return _product(places, filters, window)
    if call.cls.startswith("Separable"):
        inner = _product(taken, call.size("depth_multiplier"))
        deep, wide = _product(places, inner, window), _product(places, inner, filters)
        return None if deep is None or wide is None else deep + wide
    groups = call.size("groups") if call.settings.get("groups") else 1
    require_fit((taken or 0) % groups == 0)
    return _product(places, filters, (taken or 0) // groups, window)


def _global_pool(call: KerasCall) -> KerasOutput:
    rank = int(call.cls[-2])
    require_fit(len(call.first) == rank + 1)
    first = call.settings.get("data_format") == "channels_first"
    channels = call.first[0 if first else -1]
    if not call.settings.get("keepdims"):
        return KerasOutput(((channels,),))
    ones = (1,) * rank
    return KerasOutput(((channels, *ones) if first else (*ones, channels),))


def _keras_dense(call: KerasCall) -> KerasOutput:
    units = call.size("units")
    require_fit(len(call.first) > 0)
    require_known(call.first[-1] is not None)
    return KerasOutput(((*call.first[:-1], units),), _product(*call.first, units))


def _einsum_dense(call: KerasCall) -> KerasOutput:
    """Return the output of a dense layer along several axes: "abc,cd->abd"."""
    match = re.fullmatch(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]+)", str(call.settings.get("equation")))
    if match is None:
        raise UnknownShapeError
    taken, kernel, out = match.groups()
    wanted = call.settings.get("output_shape")
    require_fit(len(taken) == len(call.first) + 1)
    sizes: dict[str, int | None] = dict(zip(taken[1:], call.first, strict=True))
    listed = wanted if isinstance(wanted, list) else [wanted]
    for letter, size in zip(reversed(out), reversed(listed), strict=False):
        if size is not None:
            require_known(type(size) is int and 0 < size < _MOST_SIZE)
            require_fit(sizes.get(letter, size) in (size, None))
            sizes[letter] = size
    require_known(set(kernel + out[1:]) <= sizes.keys())
    macs = _product(*(sizes[letter] for letter in dict.fromkeys(taken[1:] + kernel)))
    return KerasOutput((tuple(sizes[letter] for letter in out[1:]),), macs)


def _keras_flatten(call: KerasCall) -> KerasOutput:
    return KerasOutput(((_product(*call.first),),))


def _keras_reshape(call: KerasCall) -> KerasOutput:
    wanted = call.settings.get("target_shape")
    require_known(isinstance(wanted, list) and all(type(each) is int for each in wanted))
    sizes, whole = list(wanted or ()), _product(*call.first)
    require_known(sizes.count(-1) < 2 and all(each == -1 or 0 < each < _MOST_SIZE for each in sizes))
    known = math.prod(each for each in sizes if each != -1)
    if whole is None:
        return KerasOutput((tuple(None if each == -1 else each for each in sizes),))
    require_fit(whole % known == 0 and (-1 in sizes or whole == known))
    return KerasOutput((tuple(whole // known if each == -1 else each for each in sizes),))


def _keras_permute(call: KerasCall) -> KerasOutput:
    dims = call.settings.get("dims")
    require_known(isinstance(dims, list) and all(type(each) is int for each in dims))
    require_fit(sorted(dims or ()) == list(range(1, len(call.first) + 1)))
    return KerasOutput((tuple(call.first[each - 1] for each in dims or ()),))


def _repeat_vector(call: KerasCall) -> KerasOutput:
    require_fit(len(call.first) == 1)
    return KerasOutput(((call.size("n"), *call.first),))


def _keras_concatenate(call: KerasCall) -> KerasOutput:
    axis = call.settings.get("axis", -1)
    rank = len(call.first)
    require_known(type(axis) is int and axis != 0)
    require_fit(all(len(each) == rank for each in call.given) and -rank <= axis <= rank)
    axis = (axis - 1 if axis > 0 else axis) % rank
    made = list(call.first)
    for n in range(rank):
        require_fit(n == axis or len({each[n] for each in call.given} - {None}) < 2)
    extents = [each[axis] for each in call.given]
    made[axis] = None if None in extents else sum(each or 0 for each in extents)
    return KerasOutput((tuple(made),))


def _keras_embedding(call: KerasCall) -> KerasOutput:
    return KerasOutput(((*call.first, call.size("output_dim")),))


def _keras_recurrent(call: KerasCall) -> KerasOutput:
    # keras/src/layers/rnn/lstm.py and gru.py: the gates multiply the input and the state.
    units = call.size("units")
    require_fit(len(call.first) == 2)
    steps, size = call.first
    gates = {"LSTM": 4, "GRU": 3}.get(call.cls, 1)
    macs = _product(steps, gates * units, None if size is None else size + units)
    made = (steps, units) if call.settings.get("return_sequences") else (units,)
    states = ((units,),) * (2 if call.cls == "LSTM" else 1) if call.settings.get("return_state") else ()
    return KerasOutput((made, *states), macs)


def _bidirectional(call: KerasCall) -> KerasOutput:
    inner, merge = inner_config(call.settings), call.settings.get("merge_mode")
    require_known(merge in ("concat", "sum", "mul", "ave"))
    require_known(inner is not None and not inner.settings.get("return_state"))
    made = _inner_output(call, call.given[:1])
    # The layer of the other direction is a copy, unless it has its own settings.
    other = made if call.settings.get("backward_layer") is None else _backward(call)
    (shape,) = made.outputs
    # Of unequal directions, Keras records another shape than it computes.
    require_known(made.outputs == other.outputs)
    if merge == "concat":
        shape = (*shape[:-1], _product(shape[-1], 2))
    macs = (made.macs, other.macs)
    return KerasOutput((shape,), None if None in macs else sum(each or 0 for each in macs))


def _backward(call: KerasCall) -> KerasOutput:
    return _inner_output(call, call.given[:1], "backward_layer")


def _time_distributed(call: KerasCall) -> KerasOutput:
    """Return the output of a layer applied to every step; a model inside is not evaluated."""
    made = _inner_output(call, (call.first[1:],))
    return KerasOutput(((call.first[0], *made.outputs[0]),), _product(call.first[0], made.macs))


def _keras_attention(call: KerasCall) -> KerasOutput:
    # keras/src/layers/attention/multi_head_attention.py; query, value and an optional key.
    query, value = call.first, call.given[min(1, len(call.given) - 1)]
    keys = call.given[2] if len(call.given) > 2 else value
    heads, width = call.size("num_heads"), call.size("key_dim")
    depth = call.size("value_dim") if call.settings.get("value_dim") else width
    require_known(call.settings.get("output_shape") is None and len(query) == len(value) == len(keys) == 2)
    require_fit(None in (value[0], keys[0]) or value[0] == keys[0])
    terms = (
        _product(*query, heads * width),
        _product(*keys, heads * width),
        _product(*value, heads * depth),
        _product(query[0], keys[0], heads * (width + depth)),
        _product(*query, heads * depth),
    )
    return KerasOutput((query,), None if None in terms else sum(each or 0 for each in terms))


_KERAS_RULES: dict[str, _KerasRule] = {
    "Dense": _keras_dense,
    "EinsumDense": _einsum_dense,
    "Flatten": _keras_flatten,
    "Reshape": _keras_reshape,
    "Permute": _keras_permute,
    "RepeatVector": _repeat_vector,
    "Concatenate": _keras_concatenate,
    "Embedding": _keras_embedding,
    **dict.fromkeys(("LSTM", "GRU", "SimpleRNN"), _keras_recurrent),
    "Bidirectional": _bidirectional,
    "TimeDistributed": _time_distributed,
    "SpectralNormalization": _wrapped,
    "MultiHeadAttention": _keras_attention,
}
