"""Keras layers by class: in which order each one's variables are stored, and what they are for.

A layer saves its trainable variables in the order of their creation, then the others, as `vars/0`, `vars/1`
... (keras/src/layers/layer.py, save_own_variables). The names are those that the classes give in `build`
(keras/src/layers/core/dense.py, normalization/*.py, rnn/*.py, convolutional/*.py ...).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from ckpttool.leaf import Role
from ckpttool.source import Shape

UNNAMED = ""


class Variable(NamedTuple):
    """A variable's name, its role, and the setting without which the layer has none."""

    name: str
    role: Role = "parameter"
    flag: str | None = None


_KERNEL, _BIAS = Variable("kernel"), Variable("bias", flag="use_bias")
_GAMMA, _BETA = Variable("gamma", flag="scale"), Variable("beta", flag="center")
_LINEAR = (_KERNEL, _BIAS)
_CELL = (_KERNEL, Variable("recurrent_kernel"), _BIAS)
_MOVING = (Variable("moving_mean", "buffer"), Variable("moving_variance", "buffer"))
_CONVOLUTIONS = ("Conv1D", "Conv2D", "Conv3D", "Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose")
_DEPTHWISE = Variable("depthwise_kernel")
_SEPARABLE = (_DEPTHWISE, Variable("pointwise_kernel"), _BIAS)

VARIABLES: dict[str, tuple[Variable, ...]] = {
    **dict.fromkeys(("Dense", "EinsumDense", *_CONVOLUTIONS), _LINEAR),
    **dict.fromkeys(("DepthwiseConv1D", "DepthwiseConv2D"), _LINEAR),
    **dict.fromkeys(("SeparableConv1D", "SeparableConv2D"), _SEPARABLE),
    **dict.fromkeys(("LSTMCell", "GRUCell", "SimpleRNNCell", "ConvLSTMCell"), _CELL),
    **dict.fromkeys(("LayerNormalization", "GroupNormalization"), (_GAMMA, _BETA)),
    "BatchNormalization": (_GAMMA, _BETA, *_MOVING),
    "RMSNormalization": (Variable("scale"),),
    "Embedding": (Variable("embeddings"),),
    "PReLU": (Variable("alpha"),),
    "Normalization": (
        Variable("mean", "buffer"),
        Variable("variance", "buffer"),
        Variable("count", "buffer"),
    ),
    "SeedGenerator": (Variable("state", "other"),),
}
# What a quantized layer stores behind them: int8, int4, float8 (variable_serialization_spec of
# keras/src/layers/core/dense.py, einsum_dense.py and embedding.py).
_SCALES = ("scale", "amax_history")
_FLOAT8 = tuple(f"{part}_{scale}" for part in ("inputs", "kernel", "outputs_grad") for scale in _SCALES)
_LINEAR_SCALES = (("kernel_scale",), ("kernel_scale", "kernel_zero", "g_idx"), _FLOAT8)
_QUANTIZED: dict[str, tuple[tuple[str, ...], ...]] = {
    "Dense": _LINEAR_SCALES,
    "EinsumDense": _LINEAR_SCALES,
    "Embedding": (("embeddings_scale",), ("embeddings_scale", "embeddings_zero", "g_idx")),
}
# A recurrent layer keeps its variables in its cell, an attention layer in dense layers of its own.
CELLS = {"LSTM": "LSTMCell", "GRU": "GRUCell", "SimpleRNN": "SimpleRNNCell"}
CELLS |= dict.fromkeys(("ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D"), "ConvLSTMCell")
ATTENTION = frozenset(("MultiHeadAttention", "GroupedQueryAttention", "GroupQueryAttention"))
# The order in which such a layer creates its parts, which is the order of its trainable variables.
PARTS = {
    "query_dense": 0,
    "key_dense": 1,
    "value_dense": 2,
    "output_dense": 3,
    "forward_layer": 0,
    "backward_layer": 1,
}
_OTHER_CLASSES = (
    *("InputLayer", "Dropout", "Activation", "ReLU", "LeakyReLU", "ELU", "Softmax", "Flatten", "Reshape"),
    *("Concatenate", "Add", "Multiply", "Average", "Subtract", "Dot", "Lambda", "Sequential", "Functional"),
    *("Bidirectional", "TimeDistributed", "RNN", "StackedRNNCells", "Permute", "RepeatVector", "Masking"),
    *("MaxPooling1D", "MaxPooling2D", "AveragePooling2D", "GlobalAveragePooling1D", "GlobalAveragePooling2D"),
    *("GlobalMaxPooling1D", "GlobalMaxPooling2D", "ZeroPadding2D", "UpSampling2D", "GaussianNoise"),
    *("Rescaling", "UnitNormalization", "SpatialDropout1D", "SpatialDropout2D", "Identity"),
)


def snake(name: str) -> str:
    """Return a class's name as Keras spells it in paths (keras/src/utils/naming.py, to_snake_case)."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


_KNOWN = {snake(name): name for name in (*VARIABLES, *CELLS, *sorted(ATTENTION), *_OTHER_CLASSES)}
_NUMBERED = re.compile(r"(.+?)(?:_(\d+))?", re.DOTALL)


def numbered(name: str) -> tuple[str, int]:
    """Return a name without the number that Keras put behind it, and that number: `dense_2` is dense, 2."""
    found = _NUMBERED.fullmatch(name)
    if found is None:
        return name, 0
    return found[1], int(found[2][:9]) if found[2] else 0


def class_of(name: str) -> str | None:
    """Return the class that a group or layer was named after (`dense_2`: Dense), if it is one of Keras's."""
    return _KNOWN.get(numbered(name)[0])


def variables(
    cls: str | None, config: Mapping[str, Any], shapes: Sequence[Shape]
) -> tuple[Variable, ...] | None:
    """Return what a layer's stored variables are, in their order; None if class and settings do not say.

    Without settings the count must leave one answer. A batch normalisation with three variables has lost
    gamma or beta, and the file does not say which: that one is UNNAMED.
    """
    if cls is None:
        return by_shape(shapes)
    row = VARIABLES.get(cls)
    if row is None:
        return None
    found = _written(cls, row, config, shapes)
    for names in _QUANTIZED.get(cls, ()) if found is None else ():
        rest = _written(cls, row, config, shapes[: -len(names)])
        if rest:
            return (*rest, *(Variable(name, "buffer") for name in names))
    return found


def _written(
    cls: str, row: tuple[Variable, ...], config: Mapping[str, Any], shapes: Sequence[Shape]
) -> tuple[Variable, ...] | None:
    if cls == "LayerNormalization" and config.get("rms_scaling"):
        row = (_GAMMA,)
    flags = [v.flag for v in row if v.flag is not None]
    if all(isinstance(config.get(flag), bool) for flag in flags):
        found = tuple(v for v in row if v.flag is None or config[v.flag])
        return found if len(found) == len(shapes) else None
    answers = [
        tuple(v for v in row if v.flag not in absent)
        for count in range(len(flags) + 1)
        for absent in combinations(flags, count)
        if len(row) - count == len(shapes)
    ]
    if cls == "BatchNormalization" and len(shapes) == len(row) - 1:
        return (Variable(UNNAMED), *_MOVING)
    return answers[0] if len(answers) == 1 else None


def by_shape(shapes: Sequence[Shape]) -> tuple[Variable, ...] | None:
    """Return what the variables of a layer of unknown class must be, where only one kind has such shapes."""
    ranks = [len(shape) for shape in shapes]
    # An EinsumDense of several output axes has a bias with all of them.
    if len(shapes) == 2 and ranks[0] > ranks[1] >= 1 and shapes[0][-ranks[1] :] == shapes[1]:
        return _LINEAR
    if ranks == [1, 1, 1, 1] and len(set(shapes)) == 1:
        return VARIABLES["BatchNormalization"]
    if len(shapes) == 3 and ranks[:2] == [2, 2] and shapes[0][1] == shapes[1][1] == shapes[2][-1]:
        return _CELL if shapes[1][1] % shapes[1][0] == 0 else None
    return None
