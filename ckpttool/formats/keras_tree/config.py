"""A Keras model's configuration as data: which layers it has, and plain facts of each. No class is looked up.

Sources: keras/src/saving/serialization_lib.py (Keras 3: `module`, `class_name`, `config`),
keras/src/legacy/saving/serialization.py (Keras 1 and 2: `class_name`, `config`; a Keras 1 Sequential's config
is a list).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from operator import mul
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpttool import documents
from ckpttool.errors import FormatError, LimitError
from ckpttool.formats.keras_facts import MAX_TEXT, class_of, facts
from ckpttool.formats.keras_tree.classes import ATTENTION, CELLS, snake

_NOTES = 64


class Config(NamedTuple):
    """One object's class and settings; an unknown object has neither."""

    cls: str | None = None
    settings: Mapping[str, Any] = MappingProxyType({})

    @property
    def name(self) -> str | None:
        """The user's name of the layer."""
        found = self.settings.get("name")
        return found if isinstance(found, str) else None

    @property
    def trainable(self) -> bool | None:
        """Whether the layer is trained; None if it does not say."""
        found = self.settings.get("trainable")
        return found if isinstance(found, bool) else None

    def layers(self) -> list[Config]:
        """Return the layers of a Sequential or functional model in their order."""
        found = self.settings.get("layers")
        return [config_of(each) for each in found] if isinstance(found, list) else []

    def facts(self) -> dict[str, Any]:
        """Return what is plain (see keras_facts)."""
        return facts(self.settings)


NOTHING = Config()


def parse(data: bytes | str | None, what: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the JSON object, or nothing and a note that says why there is none: weights do without it.

    Raise LimitError for one that asks for more than a reader gives: it is no damage.
    """
    if data is None:
        return {}, ()
    try:
        return documents.parse(data.encode() if isinstance(data, str) else data, what), ()
    except LimitError:
        raise
    except FormatError as error:
        return {}, (f"{error.message}: nothing is said about layers",)


def config_of(found: Any) -> Config:
    """Return class and settings of a serialized object, nothing of anything else."""
    if not isinstance(found, dict):
        return NOTHING
    cls, settings = found.get("class_name"), found.get("config")
    if isinstance(settings, list):  # a Keras 1 or early Keras 2 Sequential
        settings = {"layers": settings}
    if not isinstance(cls, str) or not isinstance(settings, dict):
        return NOTHING
    return Config(class_of(cls[:MAX_TEXT]), settings)


def lambdas(root: Config) -> tuple[str, ...]:
    """Return a note for each Lambda layer: its code is data here."""
    notes: list[str] = []
    stack = [root]
    while stack and len(notes) < _NOTES:
        config = stack.pop()
        if config.cls == "Lambda":
            notes.append(f"layer {config.name or '?'} is a Lambda: its code is not run")
        stack += reversed(config.layers())
        stack += [child for key in ("layer", "cell") if (child := config_of(config.settings.get(key))).cls]
    return tuple(notes)


def child(config: Config, edge: str) -> Config:
    """Return what a layer's own configuration says of the part under an attribute."""
    cls = config.cls
    if cls in CELLS and edge == "cell":
        return Config(CELLS[cls], {k: v for k, v in config.settings.items() if k != "name"})
    if cls in ATTENTION and edge.endswith("_dense"):
        return Config("EinsumDense", {"use_bias": config.settings.get("use_bias")})
    if edge in ("cell", "layer", "backward_layer"):
        found = config_of(config.settings.get(edge))
        if found.cls is None and edge == "backward_layer":
            return Config(config_of(config.settings.get("layer")).cls, {})
        return found
    return config_of(config.settings.get("layer")) if edge == "forward_layer" else NOTHING


FLATTENED = "flattened"
# Layers whose outputs have the shape of their inputs.
_SAME = frozenset(
    ("BatchNormalization", "LayerNormalization", "Activation", "ReLU", "LeakyReLU", "ELU", "PReLU", "Softmax")
) | {"Dropout", "SpatialDropout1D", "SpatialDropout2D", "GaussianNoise", "GaussianDropout", "Rescaling"}
_BEFORE_DENSE = _SAME - {"BatchNormalization", "LayerNormalization", "PReLU"}
_CONVOLUTION = re.compile(r"(?:Conv|SeparableConv|DepthwiseConv)([123])D")
_POOLING = re.compile(r"(?:Max|Average)Pooling([123])D")
_GLOBAL = re.compile(r"Global(?:Max|Average)Pooling[123]D")


class _Output(NamedTuple):
    """What a layer gives: its shape without the batch, and the shape of the image that was flattened.

    `image` is None where a convolution is not behind it, () where it holds nothing flattened.
    """

    shape: tuple[int, ...]
    image: tuple[int, ...] | None = None
    convolved: bool = False


def with_flattened(model: Config) -> Config:
    """Return the configuration with what each dense layer takes flattened, in its settings `flattened`.

    [H, W, C] is the image behind a convolution, [] that it takes none. A layer has no such setting where an
    unknown layer, several inputs or another order of axes stand before it.
    """
    layers = model.settings.get("layers")
    if not isinstance(layers, list) or model.cls not in ("Sequential", "Functional", "Model"):
        return model
    given: dict[str, _Output | None] = {}
    made = []
    before: _Output | None = _shaped(model.settings.get("build_input_shape"))
    for each in layers:
        layer = config_of(each)
        if model.cls != "Sequential":
            names = _inbound(each)
            before = given.get(names[0]) if len(names) == 1 else None
        image = before.image if layer.cls == "Dense" and before is not None else None
        if image is not None and isinstance(each, dict):
            each = {**each, "config": {**layer.settings, FLATTENED: list(image)}}
        before = _output(layer, before)
        given[layer.name or ""] = before
        made.append(each)
    return Config(model.cls, {**model.settings, "layers": made})


def _inbound(layer: Any) -> list[str]:
    """Return the layers that a functional model's layer takes, by name (Keras 2: lists; 3: keras_history)."""
    found: dict[str, None] = {}
    stack = [layer.get("inbound_nodes")] if isinstance(layer, dict) else []
    nodes = stack[0] if stack and isinstance(stack[0], list) else []
    if len(nodes) > 1:
        return ["", ""]  # a shared layer has several inputs
    visited = 0
    while stack and visited < _NODES:
        item = stack.pop()
        visited += 1
        if isinstance(item, dict):
            history = item.get("keras_history")
            if isinstance(history, list) and history and isinstance(history[0], str):
                found[history[0]] = None
            stack += [value for value in item.values() if isinstance(value, dict | list)]
        elif isinstance(item, list):
            if len(item) > 2 and isinstance(item[0], str) and isinstance(item[1], int):
                found[item[0]] = None
            else:
                stack += item
    return list(found)


_NODES = 10_000


def _shaped(shape: Any) -> _Output | None:
    """Return the input of this shape, whose first axis is the batch."""
    if not isinstance(shape, list) or len(shape) < 2:
        return None
    axes = tuple(axis for axis in shape[1:] if type(axis) is int and axis > 0)
    return _Output(axes) if len(axes) == len(shape) - 1 else None


def _output(layer: Config, before: _Output | None) -> _Output | None:
    settings, cls = layer.settings, layer.cls or ""
    started = _shaped(settings.get("batch_shape") or settings.get("batch_input_shape"))
    if cls == "InputLayer":
        return started
    before = before or started
    if before is None or settings.get("data_format") not in (None, "channels_last"):
        return None
    if cls == "Dense":
        units = settings.get("units")
        return _Output((*before.shape[:-1], units), (), before.convolved) if type(units) is int else None
    if cls == "Flatten":
        count = math.prod(before.shape)
        return _Output((count,), before.shape if before.convolved else None, before.convolved)
    if _GLOBAL.fullmatch(cls):
        return _Output(before.shape[-1:], (), before.convolved) if not settings.get("keepdims") else None
    if cls in _SAME:
        return before if cls in _BEFORE_DENSE or len(before.shape) > 1 else before._replace(image=None)
    return _windowed(cls, settings, before)


def _windowed(cls: str, settings: Mapping[str, Any], before: _Output) -> _Output | None:
    """Return what a convolution or a pooling gives, None for any other layer."""
    convolution, pooling = _CONVOLUTION.fullmatch(cls), _POOLING.fullmatch(cls)
    match = convolution or pooling
    rank = int(match[1]) if match else 0
    if not rank or len(before.shape) != rank + 1:
        return None
    window = _axes(settings.get("kernel_size" if convolution else "pool_size"), rank)
    strides = _axes(settings.get("strides"), rank) or (window if pooling else (1,) * rank)
    spread = _axes(settings.get("dilation_rate"), rank) or (1,) * rank
    padding = settings.get("padding")
    if window is None or strides is None or padding not in ("valid", "same"):
        return None
    sizes = [
        -(-size // step) if padding == "same" else (size - (width - 1) * wide - 1) // step + 1
        for size, width, step, wide in zip(before.shape, window, strides, spread, strict=False)
    ]
    channels = before.shape[-1]
    if convolution and cls.startswith("Depthwise"):
        multiplier = settings.get("depth_multiplier")
        channels = channels * multiplier if type(multiplier) is int else 0
    elif convolution:
        filters = settings.get("filters")
        channels = filters if type(filters) is int else 0
    if channels < 1 or min(sizes) < 1:
        return None
    return _Output((*sizes, channels), None, before.convolved or convolution is not None)


def windowed_sizes(cls: str, settings: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of what a convolution, a pooling or the like makes of images of a shape."""
    *sizes, channels = shape
    rank = len(sizes)
    if not rank or not cls.removesuffix("Transpose").endswith(f"{rank}D"):
        return None
    if cls.startswith("UpSampling"):
        factors = _axes(settings.get("size"), rank)
        return (*map(mul, sizes, factors), channels) if factors else None
    if cls.startswith(("ZeroPadding", "Cropping")):
        sign = 1 if cls.startswith("Zero") else -1
        pairs = _pairs(settings.get("padding" if sign > 0 else "cropping"), rank)
        made = [size + sign * sum(pair) for size, pair in zip(sizes, pairs or (), strict=False)]
        return (*made, channels) if pairs and min(made) > 0 else None
    if cls.endswith("Transpose"):
        window, strides = (_axes(settings.get(each), rank) for each in ("kernel_size", "strides"))
        filters, plain = settings.get("filters"), settings.get("output_padding") is None
        spread = _axes(settings.get("dilation_rate"), rank) or (1,) * rank
        if not window or not strides or not plain or type(filters) is not int or max(spread) > 1:
            return None
        # keras/src/backend/common/backend_utils.py, compute_conv_transpose_output_shape.
        same = settings.get("padding") == "same"
        made = [
            size * step if same else size * step + max(width - step, 0)
            for size, step, width in zip(sizes, strides, window, strict=True)
        ]
        return (*made, filters)
    made_by = _windowed(cls, settings, _Output(shape))
    return made_by.shape if made_by is not None else None


def _pairs(value: Any, rank: int) -> list[tuple[int, int]] | None:
    """Return what is added before and after each axis."""
    items = [value] * rank if type(value) is int else value
    if isinstance(items, list) and rank == 1 and len(items) == 2 and all(type(i) is int for i in items):
        items = [items]
    if not isinstance(items, list) or len(items) != rank:
        return None
    pairs = [(each, each) if type(each) is int else each for each in items]
    if not all(isinstance(p, list | tuple) and len(p) == 2 and all(type(n) is int for n in p) for p in pairs):
        return None
    return [(int(before), int(after)) for before, after in pairs]


def _axes(value: Any, rank: int) -> tuple[int, ...] | None:
    """Return one positive number for each axis, None for anything else."""
    found = [value] * rank if type(value) is int else value
    if not isinstance(found, list) or len(found) != rank:
        return None
    return tuple(found) if all(type(each) is int and 0 < each < _MOST_SIZE for each in found) else None


_MOST_SIZE = 1 << 20


def stored_names(layers: Sequence[Config]) -> dict[str, Config]:
    """Return the layers by the group that each is stored in: class in snake case, numbered from the second.

    Source: keras/src/saving/saving_lib.py, _save_container_state.
    """
    counts: dict[str, int] = {}
    found: dict[str, Config] = {}
    for layer in layers:
        if layer.cls is None:
            continue
        stem = snake(layer.cls)
        number = counts.get(stem, 0)
        counts[stem] = number + 1
        found[f"{stem}_{number}" if number else stem] = layer
    return found
