"""Layers and activations: names, settings and defaults of each kind in every framework. One row adds a kind.

How each framework stores a kind is in mapping/layer_kinds.py, what it computes in graphs/.

Sources: torch/nn/modules/**, torch/nn/functional.py; keras/src/layers/**, keras/src/activations/**,
and tf_keras's of the same names; tensorflow/contrib/layers/python/layers/layers.py; sonnet/src/layer_norm.py
and batch_norm.py; onnx/docs/Operators.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, get_args

from ckpttool.core.deferred import NamedTuple

# Those that policies may have after a hidden layer, with the default arguments of PyTorch's classes.
ActivationName = Literal[
    "relu",
    "tanh",
    "sigmoid",
    "elu",
    "leaky_relu",
    "gelu",
    "silu",
    "softplus",
    "linear",
    "mish",
    "selu",
    "relu6",
    "hardtanh",
    "hardswish",
]
ACTIVATIONS: tuple[ActivationName, ...] = get_args(ActivationName)
_NO_NUMBERS: Mapping[str, Any] = MappingProxyType({})


class ActivationKind(NamedTuple):
    """A function of one tensor, by its name in torch.nn.functional, or in Keras if PyTorch lacks it.

    Args:
        torch: the class in torch.nn.
        keras: the names in keras.activations; the first one is that of Keras 3.
        layer: the class in keras.layers.
        onnx: the operator, "" for a function of several ones (graphs/builder.py, ACTIVATION_NODES).
        arguments: the arguments of PyTorch's class that change the function, in order, and their defaults.
        words: further names in configurations of RL libraries, in lower case.
    """

    name: str
    torch: str = ""
    keras: tuple[str, ...] = ()
    layer: str = ""
    onnx: str = ""
    arguments: Mapping[str, Any] = _NO_NUMBERS
    words: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the function has no arguments and no weights."""
        return not self.arguments and self.name != "prelu"


_Kind = ActivationKind
ACTIVATION_KINDS: Mapping[str, ActivationKind] = {
    row.name: row
    for row in (
        _Kind("relu", "ReLU", ("relu",), "ReLU", "Relu"),
        _Kind("tanh", "Tanh", ("tanh",), onnx="Tanh"),
        _Kind("sigmoid", "Sigmoid", ("sigmoid",), onnx="Sigmoid"),
        _Kind("elu", "ELU", ("elu",), "ELU", "Elu", {"alpha": 1.0}),
        # The slope is 0.01 in PyTorch and ONNX, 0.2 in keras.activations, 0.3 in keras.layers.
        _Kind(
            "leaky_relu",
            "LeakyReLU",
            ("leaky_relu",),
            "LeakyReLU",
            "LeakyRelu",
            {"negative_slope": 0.01},
            ("lrelu",),
        ),
        _Kind("gelu", "GELU", ("gelu",), onnx="Gelu", arguments={"approximate": "none"}),
        _Kind("silu", "SiLU", ("silu", "swish"), onnx="Swish"),
        _Kind(
            "softplus", "Softplus", ("softplus",), onnx="Softplus", arguments={"beta": 1.0, "threshold": 20.0}
        ),
        _Kind("linear", "Identity", ("linear",), onnx="Identity", words=("none",)),
        _Kind("mish", "Mish", ("mish",), onnx="Mish"),
        _Kind("selu", "SELU", ("selu",), onnx="Selu"),
        _Kind("relu6", "ReLU6", ("relu6",)),
        _Kind("hardtanh", "Hardtanh", ("hard_tanh",), arguments={"min_val": -1.0, "max_val": 1.0}),
        _Kind("hardswish", "Hardswish", ("hard_silu", "hard_swish"), onnx="HardSwish"),
        _Kind("celu", "CELU", ("celu",), onnx="Celu", arguments={"alpha": 1.0}),
        _Kind("softsign", "Softsign", ("softsign",), onnx="Softsign"),
        _Kind("hardsigmoid", "Hardsigmoid", ("hard_sigmoid",)),
        _Kind("logsigmoid", "LogSigmoid", ("log_sigmoid",)),
        _Kind("tanhshrink", "Tanhshrink", ("tanh_shrink",)),
        _Kind("softshrink", "Softshrink", ("soft_shrink",), onnx="Shrink", arguments={"lambd": 0.5}),
        _Kind("hardshrink", "Hardshrink", ("hard_shrink",), onnx="Shrink", arguments={"lambd": 0.5}),
        _Kind("softmax", "Softmax", ("softmax",), "Softmax", "Softmax", {"dim": None}),
        _Kind("log_softmax", "LogSoftmax", ("log_softmax",), onnx="LogSoftmax", arguments={"dim": None}),
        _Kind("softmin", "Softmin", arguments={"dim": None}),
        _Kind("glu", "GLU", ("glu",), arguments={"dim": -1}),
        _Kind("prelu", "PReLU", layer="PReLU", onnx="PRelu"),
        _Kind("rrelu", "RReLU", arguments={"lower": 1 / 8, "upper": 1 / 3}),
        _Kind(
            "threshold",
            "Threshold",
            ("threshold",),
            arguments={"threshold": None, "value": None},
        ),
        _Kind("thresholded_relu", layer="ThresholdedReLU", onnx="ThresholdedRelu", arguments={"theta": 1.0}),
        _Kind("squareplus", keras=("squareplus",)),
        _Kind("exponential", keras=("exponential",), onnx="Exp"),
        *(_Kind(name, keras=(name,)) for name in ("sparse_plus", "sparse_sigmoid", "sparsemax")),
    )
}
# The activations of policies by each of their names, and by their classes in torch.nn.
ACTIVATION_SYNONYMS: Mapping[str, str] = {
    word: row.name
    for row in map(ACTIVATION_KINDS.__getitem__, ACTIVATIONS)
    for word in (row.name, *row.keras, row.torch.lower(), *row.words)
}
TORCH_ACTIVATIONS: Mapping[str, str] = {ACTIVATION_KINDS[name].torch: name for name in ACTIVATIONS}
# By their names in Keras those that are the same function there: its leaky_relu has another slope.
KERAS_ACTIVATIONS: Mapping[str, str] = {
    word: name for name in ACTIVATIONS if name != "leaky_relu" for word in ACTIVATION_KINDS[name].keras
}
ACTIVATION_CLASSES = frozenset(
    cls for row in ACTIVATION_KINDS.values() if row.name != "linear" for cls in (row.torch, row.layer) if cls
)


class LayerSetting(NamedTuple):
    """A setting of layers: its name in messages, and its names and defaults in the frameworks.

    Args:
        name: what messages call it.
        torch: the attribute of PyTorch's modules.
        keras: the setting in Keras's configurations.
        more: the attribute of ONNX's operators, and names in other programs.
        torch_default: the default of PyTorch's classes; None if they have none.
        keras_default: likewise of Keras's.
        text: how a listing shows a value other than the default, "" if it does not.
        changes: whether layers with different values compute different results from the same weights.
    """

    name: str
    torch: str = ""
    keras: str = ""
    more: tuple[str, ...] = ()
    torch_default: Any = None
    keras_default: Any = None
    text: str = ""
    changes: bool = False

    @property
    def spellings(self) -> tuple[str, ...]:
        """The names of the setting in all frameworks, Keras's first."""
        return tuple(dict.fromkeys(filter(None, (self.keras, self.torch, *self.more))))


_Set = LayerSetting
# In the order in which listings show them, and verify tries them.
SETTINGS: tuple[LayerSetting, ...] = (
    _Set("stride", "stride", "strides", (), 1, 1, "stride {}", changes=True),
    _Set("padding", "padding", "padding", ("pads",), 0, "valid", "padding {}", changes=True),
    _Set("dilation", "dilation", "dilation_rate", ("dilations",), 1, 1, "dilation {}", changes=True),
    _Set("groups", "groups", "groups", ("num_groups", "group"), 1, 1, "groups {}", changes=True),
    _Set("mode", "padding_mode", "", ("mode",), "zeros", None, "{} padding", changes=True),
    _Set("order of axes", "", "data_format", (), None, "channels_last", "{}"),
    _Set("multiplier", "", "depth_multiplier", (), None, 1, "multiplier {}"),
    _Set("epsilon", "eps", "epsilon", ("layer_norm_eps",), 1e-5, 1e-3, "eps {}", changes=True),
    _Set("rate", "p", text="p {}"),
    _Set("rate", "", "rate", text="rate {}"),
    _Set("number of groups", "num_groups", text="{} groups"),
    _Set("new shape", "", "target_shape", text="to {}"),
    _Set("order", "", "dims", text="axes {}"),
    _Set("repetitions", "", "n", text="{} times"),
    _Set("entries", "", "input_dim", text="{} entries"),
    _Set("features", "", "output_dim", text="{} features"),
    _Set("number of heads", "num_heads", "num_heads", text="{} heads", changes=True),
    _Set("features of a head", "", "key_dim", text="{} features"),
    _Set("equation", "", "equation", text="{}"),
    _Set("merging", "", "merge_mode", (), None, "concat", "merge {}"),
    _Set("layers", "num_layers", torch_default=1, text="{} layers"),
    _Set("directions", "bidirectional", torch_default=False, text="bidirectional"),
    _Set("slope", "negative_slope", "negative_slope", ("alpha",), 0.01, 0, "slope {}", changes=True),
    _Set("alpha", "alpha", torch_default=1.0, text="alpha {}"),
    _Set("rounding of the output size", "ceil_mode", torch_default=False, text="ceil", changes=True),
    _Set("counting of padding", "count_include_pad", changes=True),
    _Set("output size", "output_size", text="to {}"),
    _Set("factor", "scale_factor", text="x{}"),
    _Set("output size", "size", text="to {}"),
    _Set("first axis", "start_dim", torch_default=1, text="from axis {}"),
    _Set("last axis", "end_dim", torch_default=-1, text="to axis {}"),
    _Set("axis", "dim", "axis", ("normalized_shape",), changes=True),
    _Set("activation", "nonlinearity", "activation", changes=True),
    _Set("form of gelu", "approximate", "approximate", changes=True),
    _Set("pool size", "kernel_size", "pool_size", changes=True),
    _Set("scale", "", "scale", ("factor", "temperature"), changes=True),
    _Set("output_padding", "output_padding", "output_padding"),
    _Set("momentum", "momentum", "momentum"),
    _Set("recurrent_activation", "", "recurrent_activation"),
    _Set("go_backwards", "", "go_backwards"),
    _Set("max_norm", "max_norm"),
)
SPELLINGS: Mapping[str, tuple[str, ...]] = {row.name: row.spellings for row in reversed(SETTINGS)}


class LayerType(NamedTuple):
    """A kind of layer in every framework.

    Args:
        name: the kind, as in `--kind`.
        family: layers that may be compared with one another.
        torch: classes of torch.nn; "{}" stands for 1, 2 and 3. The first one is the usual one.
        keras: classes of keras.layers, likewise.
        more: classes of TensorFlow 1, and of older versions.
        onnx: operators.
        words: a pattern of what classes of other programs are called that belong to the family.
        settings: names of SETTINGS by which two layers with the same weights may differ.
        noted: names of SETTINGS that a conversion reports beside the note.
        note: what a conversion of the weights leaves open.
        epsilons: the default of epsilon by library; None: that of the element type.
        features: the axes of canonical tensors that are ordered as the layer's input (`takes`) or output
            (`makes`).
    """

    name: str
    family: str
    torch: tuple[str, ...] = ()
    keras: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    onnx: tuple[str, ...] = ()
    words: str = ""
    settings: tuple[str, ...] = ()
    noted: tuple[str, ...] = ()
    note: str = ""
    epsilons: Mapping[str, float | None] = _NO_NUMBERS
    features: Mapping[str, Mapping[str, int]] = _NO_NUMBERS

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of all frameworks."""
        return tuple(cls for name in (*self.torch, *self.keras, *self.more) for cls in ranked(name))


def ranked(name: str) -> tuple[str, ...]:
    """Return the classes of a name in the table, one for each number of spatial axes."""
    return tuple(dict.fromkeys(name.format(rank) for rank in (1, 2, 3)))


def _format_default(value: float) -> str:
    return f"{value:g}".replace("e-0", "e-")


_EPSILONS = {"PyTorch": 1e-5, "Keras": 1e-3}
_EPSILON = (
    f"epsilon defaults to {_format_default(_EPSILONS['Keras'])} in Keras and "
    f"{_format_default(_EPSILONS['PyTorch'])} in PyTorch"
)
_SIGMOID = (
    "PyTorch's gates use sigmoid; Keras's hard_sigmoid (the default of old versions) is a different function"
)
_PADDING = (
    "convolutions: with SAME padding and strides above 1, Keras pads more at the end, unlike padding=k//2; a "
    "transposed convolution crops in the same way"
)
_PADDED = ("padding", "mode", "output_padding", "stride", "order of axes")
_WINDOW = ("dilation", "stride")
_CELL = ("activation", "recurrent_activation", "go_backwards")
_OF_VECTORS = {name: {"takes": 0} for name in ("scale", "offset", "mean", "variance")}
_OF_CELLS = {"kernel": {"takes": 0}}
_NORMS = "LayerNorm GroupNorm", "LayerNormalization GroupNormalization"


def _layer(
    name: str, family: str, torch: str = "", keras: str = "", more: str = "", onnx: str = "", **rest: Any
) -> LayerType:
    """Return a row whose names are separated by spaces."""
    classes = [tuple(names.split()) for names in (torch, keras, more, onnx)]
    return LayerType(name, family, classes[0], classes[1], classes[2], classes[3], **rest)


def _norm(name: str, torch: str, keras: str, note: str, **rest: Any) -> LayerType:
    """Return a row of a norm, which differs by its epsilon."""
    row = _layer(name, "norm", torch, keras, settings=("epsilon",), noted=("epsilon",), note=note)
    return row._replace(**{"features": _OF_VECTORS, "epsilons": _EPSILONS, **rest})


def _convolution(name: str, torch: str, keras: str, more: str = "", **rest: Any) -> LayerType:
    row = _layer(name, "convolution", torch, keras, more, settings=_WINDOW, noted=_PADDED, note=_PADDING)
    return row._replace(**rest)


# In this order the words of a family are looked for in the name of a class.
_ROWS = (
    _layer(
        "attention",
        "attention",
        "MultiheadAttention",
        "MultiHeadAttention",
        "",
        "Attention",
        words="attention",
        settings=("number of heads",),
        noted=("number of heads",),
        note="attention layers: pass the number of heads to PyTorch's module",
    ),
    _layer(
        "lstm",
        "recurrent",
        "LSTM LSTMCell",
        "LSTM LSTMCell",
        "CuDNNLSTM LSTMV1 LSTMV2 BasicLSTMCell",
        "LSTM",
        words="lstm|gru|rnn|bidirectional",
        noted=_CELL,
        note=f"LSTMs: {_SIGMOID}",
        features=_OF_CELLS,
    ),
    *(
        _layer(
            name,
            "recurrent",
            "GRU GRUCell",
            "GRU GRUCell",
            "CuDNNGRU GRUV1 GRUV2",
            "GRU",
            noted=_CELL,
            note=f"GRUs: PyTorch's GRU is Keras's with reset_after=True; {_SIGMOID}",
            features=_OF_CELLS,
        )
        for name in ("gru", "gru_reset_before")
    ),
    _layer(
        "simple_rnn",
        "recurrent",
        "RNN RNNCell",
        "SimpleRNN SimpleRNNCell",
        "BasicRNNCell",
        "RNN",
        settings=("activation",),
        noted=("activation", "go_backwards"),
        note="simple RNNs: the activation is tanh unless the program set relu",
        features=_OF_CELLS,
    ),
    _convolution(
        "convolution",
        "Conv{}d ConvTranspose{}d",
        "Conv{}D Conv{}DTranspose Convolution{}D Convolution{}DTranspose",
        onnx=("Conv", "ConvTranspose"),
        words="conv",
        settings=(*_WINDOW, "groups"),
        features={"kernel": {"takes": -2, "makes": -1}, "bias": {"makes": 0}},
    ),
    _convolution(
        "depthwise",
        "Conv{}d",
        "DepthwiseConv1D DepthwiseConv2D",
        "DepthwiseConvolution1D DepthwiseConvolution2D",
    ),
    _convolution(
        "separable", "", "SeparableConv1D SeparableConv2D SeparableConvolution1D SeparableConvolution2D"
    ),
    _norm(
        "batch_norm",
        "BatchNorm{}d SyncBatchNorm InstanceNorm{}d",
        "BatchNormalization",
        f"batch norms: {_EPSILON}; Keras's momentum m is 1 - m in PyTorch",
        more=("BatchNormalizationV1", "SyncBatchNormalization"),
        family="batch_norm",
        onnx=("BatchNormalization",),
        words="batch_?norm",
        noted=("epsilon", "momentum"),
    ),
    _norm(
        "layer_norm",
        f"{_NORMS[0]} InstanceNorm{{}}d",
        _NORMS[1],
        f"layer and group norms: {_EPSILON}",
        onnx=("LayerNormalization", "GroupNormalization", "InstanceNormalization"),
        words="layer_?norm|group_?norm|rms_?norm|instance_?norm",
        epsilons={**_EPSILONS, "Sonnet": 1e-5},
    ),
    # Over whole images, whose axes the frameworks order differently.
    _norm("layer_norm_images", *_NORMS, f"layer and group norms: {_EPSILON}", features=_NO_NUMBERS),
    _norm(
        "rms_norm",
        "RMSNorm",
        "RMSNormalization",
        "RMS norms: epsilon defaults to 1e-6 in Keras and to that of the element type in PyTorch",
        onnx=("RMSNormalization",),
        epsilons={"PyTorch": None, "Keras": 1e-6},
    ),
    _layer(
        "embedding",
        "embedding",
        "Embedding EmbeddingBag",
        "Embedding",
        "",
        "Gather",
        words="embed|gather",
        settings=("max_norm",),
        features={"embeddings": {"makes": 1}},
    ),
    _layer(
        "dense",
        "dense",
        "Linear LazyLinear NonDynamicallyQuantizableLinear",
        "Dense EinsumDense",
        "",
        "Gemm MatMul",
        words="dense|linear|gemm|matmul",
        features={"kernel": {"takes": 0, "makes": 1}, "bias": {"makes": 0}},
    ),
    _layer("dropout", "dropout", "Dropout Dropout{}d", "Dropout", words="dropout"),
    _layer("pooling", "pool", words="pool"),
    _layer("flatten", "flatten", "Flatten", "Flatten", words="flatten|reshape"),
    _layer(
        "prelu",
        "activation",
        "PReLU",
        "PReLU",
        "",
        "PRelu",
        words="relu|gelu|elu|tanh|sigmoid|softmax|silu|swish|softplus|activation|mish",
        features={"alpha": {"takes": 0}},
    ),
)
LAYER_TYPES: Mapping[str, LayerType] = {row.name: row for row in _ROWS}


# Blocks of gates in a recurrent layer's tensors: input, forget, cell (g) and output; update (z), reset and
# candidate (h). "" is Keras's order, and that of every library that is not listed. Sources:
# keras/src/layers/rnn/{lstm,gru}.py; torch/nn/modules/rnn.py; onnx/docs/Operators.md;
# stable_baselines/common/tf_layers.py (lstm); tf_keras/src/layers/rnn/legacy_cells.py (i, j, f, o).
_GATES: Mapping[str, Mapping[str, str]] = {
    "lstm": {"": "ifgo", "onnx": "iofg", "baselines": "ifog", "tf1": "igfo"},
    "gru": {"": "zrh", "torch": "rzh"},
    "simple_rnn": {"": "h"},
}


def count_gates(kind: str) -> int:
    """Return the number of gates of a recurrent kind."""
    return len(_GATES[kind][""])


def gate_order(kind: str, source: str, target: str = "") -> tuple[int, ...]:
    """Return the place in a library's tensors of each gate in the order of another library."""
    gates = _GATES[kind]
    return tuple(map(gates.get(source, gates[""]).index, gates.get(target, gates[""])))


@cache
def kinds_by_class() -> Mapping[str, tuple[str, ...]]:
    """Return the kinds that a class of a framework may be; wrappers and containers are not listed."""
    kinds: dict[str, tuple[str, ...]] = {}
    for row in LAYER_TYPES.values():
        if row.features or row.settings:
            for cls in row.classes:
                kinds[cls] = (*kinds.get(cls, ()), row.name)
    return kinds


def list_kinds(*families: str) -> frozenset[str]:
    """Return the kinds of these families."""
    return frozenset(row.name for row in LAYER_TYPES.values() if row.family in families)


def find_family(cls: str) -> str:
    """Return the family of layers that a class name of any program names, "" if none."""
    rows = (row for row in LAYER_TYPES.values() if row.words)
    return next((row.family for row in rows if re.search(row.words, cls, re.IGNORECASE)), "")


def default_epsilon(cls: str, library: str) -> float | None:
    """Return epsilon's default in a class of PyTorch or Keras; None if it is that of the element type."""
    values: Iterable[float | None] = (
        LAYER_TYPES[name].epsilons[library]
        for name in kinds_by_class().get(cls, ())
        if library in LAYER_TYPES[name].epsilons
    )
    return next(iter(values), _EPSILONS[library])
