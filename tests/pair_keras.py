"""The small models of pair_models.py in Keras, with the numbers of a PyTorch state_dict.

    python -m tests.pair_keras FOLDER

writes the models that FOLDER/keras.json lists: for each the file (`.keras`, or `.weights.h5` for a
model with layers of its own), the model, its options, and the `.npz` file with the state_dict.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests import agent_nets, ported_keras, ported_torch

State = Mapping[str, np.ndarray]


class AddRows(layers.Layer):
    """Adds an embedding of each position."""

    def build(self, shape: Any) -> None:
        self.position = self.add_weight(shape=tuple(shape[1:]), name="position")

    def call(self, x: Any) -> Any:
        return x + self.position


class Scale(layers.Layer):
    """Multiplies each feature by a weight."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), name="scale")

    def call(self, x: Any) -> Any:
        return x * self.scale


class LoraDense(layers.Layer):
    """A dense layer with a low-rank adapter that is not merged into its kernel."""

    def __init__(self, units: int, **options: Any) -> None:
        super().__init__(**options)
        self.units = units

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")
        self.bias = self.add_weight(shape=(self.units,), name="bias")
        self.lora_a = self.add_weight(shape=(shape[-1], 2), name="lora_a")
        self.lora_b = self.add_weight(shape=(2, self.units), name="lora_b")

    def call(self, x: Any) -> Any:
        return ops.matmul(x, self.kernel) + self.bias + ops.matmul(ops.matmul(x, self.lora_a), self.lora_b)


class TiedDense(layers.Layer):
    """Multiplies by the transposed table of an embedding."""

    def __init__(self, embed: Any, **options: Any) -> None:
        super().__init__(**options)
        self.embed = embed

    def call(self, x: Any) -> Any:
        return ops.matmul(x, ops.transpose(self.embed.embeddings))


class Root(layers.Layer):
    """Divides by the root of the mean square, and multiplies by a weight."""

    def __init__(self, eps: float, **options: Any) -> None:
        super().__init__(**options)
        self.eps = eps

    def build(self, shape: Any) -> None:
        self.weight = self.add_weight(shape=(shape[-1],), name="weight")

    def call(self, x: Any) -> Any:
        return x * ops.rsqrt(ops.mean(x * x, -1, keepdims=True) + self.eps) * self.weight


class Normalizer(layers.Layer):
    """Subtracts a mean and divides by a deviation, or by the variance."""

    def __init__(self, root: bool, **options: Any) -> None:
        super().__init__(**options)
        self.root = root

    def build(self, shape: Any) -> None:
        self.centre = self.add_weight(shape=(shape[-1],), name="centre", trainable=False)
        self.variance = self.add_weight(shape=(shape[-1],), name="variance", trainable=False)

    def call(self, x: Any) -> Any:
        return (x - self.centre) / (ops.sqrt(self.variance) if self.root else self.variance)


# The models; options have the names of pair_models.py.


def mlp() -> Any:
    """Three dense layers."""
    rows = [
        layers.Dense(8, activation="relu", name="first"),
        layers.Dense(8, activation="tanh", name="second"),
        layers.Dense(3, name="third"),
    ]
    return keras.Sequential([layers.Input((6,)), *rows])


def cnn(epsilon: float = 1e-3) -> Any:
    """Convolutions, a batch norm and a flattened image."""
    inputs = layers.Input((8, 10, 3))
    x = layers.Conv2D(4, 3, padding="same", name="conv")(inputs)
    x = layers.ReLU()(layers.BatchNormalization(name="norm", epsilon=epsilon)(x))
    x = layers.Conv2D(5, 3, activation="relu", name="conv2")(layers.MaxPooling2D()(x))
    return keras.Model(inputs, layers.Dense(4, name="head")(layers.Flatten()(x)))


def _recurrent(cls: Any) -> Any:
    return keras.Sequential([layers.Input((7, 3)), cls(5, name="rnn"), layers.Dense(2, name="head")])


def lstm() -> Any:
    """An LSTM and a dense layer."""
    return _recurrent(layers.LSTM)


def gru() -> Any:
    """A GRU and a dense layer."""
    return _recurrent(layers.GRU)


def block(eps: float = 1e-5, approximate: str = "none") -> Any:
    """An attention block."""
    inputs = layers.Input((6, 8))
    y = layers.LayerNormalization(epsilon=eps, name="norm")(inputs)
    x = layers.Add()([inputs, layers.MultiHeadAttention(2, 4, name="attention")(y, y)])
    y = layers.LayerNormalization(epsilon=eps, name="norm2")(x)
    y = layers.Dense(16, name="up")(y)
    y = keras.activations.gelu(y, approximate=approximate == "tanh")
    return keras.Model(inputs, layers.Add()([x, layers.Dense(8, name="down")(y)]))


def words() -> Any:
    """An embedding, flattened."""
    rows = [layers.Embedding(11, 4, name="embed"), layers.Flatten(), layers.Dense(3, name="head")]
    return keras.Sequential([layers.Input((5,)), *rows])


def vision(
    padding: int = 1,
    dilation: int = 1,
    stride: tuple[int, int] = (2, 1),
    mode: str = "zeros",
    bias: bool = True,
    pool: bool = False,
    mean: tuple[float, ...] | None = None,
) -> Any:
    """Convolutions, a norm and a mean over all positions."""
    x = inputs = layers.Input((9, 9, 3))
    if mean is not None:
        x = layers.Normalization(mean=mean, variance=[0.09] * 3, name="normaliser")(x)
    if mode == "reflect":
        x = ops.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    same = "same" if padding and mode == "zeros" else "valid"
    x = layers.Conv2D(4, 3, padding=same, activation="relu", name="conv")(x)
    options = {"strides": tuple(stride), "dilation_rate": dilation, "use_bias": bias}
    x = layers.Conv2D(4, 3, activation="relu", name="conv2", **options)(x)
    if pool:
        x = layers.AveragePooling2D(3, 1, name="pool")(layers.ZeroPadding2D(1)(x))
    else:
        x = layers.AveragePooling2D(3, 1, padding="same", name="pool")(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.GlobalAveragePooling2D()(x)))


def text(
    position: bool = True,
    lora: bool = True,
    dropout: bool = False,
    scale: bool = True,
    tied: bool = True,
    axis: int = -1,
) -> Any:
    """Words with positions, a low-rank adapter, dropout, a scale, and tied embeddings."""
    inputs = layers.Input((6,), dtype="int32")
    embed = layers.Embedding(11, 8, name="embed")
    x = embed(inputs)
    if position:
        x = AddRows(name="position")(x)
    query, key = layers.Dense(8, name="query")(x), layers.Dense(8, name="key")(x)
    x = x + ops.matmul(ops.softmax(ops.matmul(query, ops.transpose(key, (0, 2, 1))), -1), x)
    x = x - ops.mean(x, axis, keepdims=True)
    if dropout:
        x = layers.Dropout(0.5)(x, training=True)
    x = (LoraDense if lora else layers.Dense)(8, name="mix")(x)
    if scale:
        x = Scale(name="scale")(x)
    x = layers.Dense(8, activation="tanh", name="up")(x)
    out = TiedDense(embed, name="out") if tied else layers.Dense(11, use_bias=False, name="out")
    return keras.Model(inputs, out(x))


def activated(activation: str = "ReLU", eps: float = 1e-5) -> Any:
    """Dense layers with an activation of the options' name."""
    rows = [
        layers.Dense(8, activation=activation.lower(), name="first"),
        layers.Dense(8, name="second"),
        layers.LayerNormalization(epsilon=eps, name="norm"),
    ]
    return keras.Sequential([layers.Input((6,)), *rows])


def residual(
    skip: bool = True, early: bool = False, end: bool = False, eps: float = 1e-5, pool: str = "mean"
) -> Any:
    """A residual block, a convolution with stride 2, and a mean over all positions."""
    inputs = layers.Input((10, 10, 3))
    x = layers.Conv2D(4, 3, padding="same", name="conv")(inputs)
    x = ops.relu(layers.BatchNormalization(epsilon=1e-5, name="norm")(x))
    y = layers.Conv2D(4, 3, padding="same", name="conv1")(x)
    y = ops.relu(layers.BatchNormalization(epsilon=1e-5, name="norm1")(y))
    y = layers.Conv2D(4, 3, padding="same", name="conv2")(y)
    y = layers.BatchNormalization(epsilon=eps, name="norm2")(y)
    y = ops.relu(y) + x if early else ops.relu(y + x if skip else y)
    if not end:
        y = layers.ZeroPadding2D(1)(y)
    y = layers.Conv2D(6, 3, 2, padding="same" if end else "valid", activation="relu", name="down")(y)
    y = layers.GlobalAveragePooling2D()(y) if pool == "mean" else layers.GlobalMaxPooling2D()(y)
    return keras.Model(inputs, layers.Dense(3, name="head")(y))


def _aligned(size: int) -> np.ndarray:
    """Return the matrix that doubles an axis with its ends in place."""
    at = np.linspace(0, size - 1, 2 * size)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(size))).astype(np.float32)


def upsampler(
    mode: str = "bilinear", align: bool = False, swapped: bool = False, last: str = "Sigmoid"
) -> Any:
    """Convolutions, an image of twice the size beside a skipped one, and a transposed convolution."""
    inputs = layers.Input((6, 8, 3))
    x = layers.Conv2D(4, 3, padding="same", activation="relu", name="conv")(inputs)
    y = layers.Conv2D(4, 3, padding="same", activation="relu", name="low")(layers.MaxPooling2D()(x))
    if align:
        y = ops.einsum("ih,bhwc->biwc", _aligned(3), y)
        y = ops.einsum("jw,bhwc->bhjc", _aligned(4), y)
    else:
        y = layers.UpSampling2D(interpolation=mode)(y)
    y = layers.Concatenate()([x, y] if swapped else [y, x])
    y = layers.Conv2D(4, 3, padding="same", activation="relu", name="mix")(y)
    y = layers.Conv2DTranspose(4, 2, 2, activation="relu", name="up")(y)
    return keras.Model(inputs, layers.Conv2D(2, 1, activation=last.lower(), name="out")(y))


def separable(dilation: int = 2, after: str = "relu") -> Any:
    """A depthwise convolution with two outputs for each channel, a pointwise and a grouped one."""
    inputs = layers.Input((9, 9, 4))
    x = layers.DepthwiseConv2D(3, depth_multiplier=2, name="depth")(inputs)
    x = getattr(ops, after)(layers.Conv2D(6, 1, name="point")(x))
    options = {"padding": "same", "dilation_rate": dilation, "groups": 2}
    x = layers.Conv2D(6, 3, activation="relu", name="group", **options)(x)
    return keras.Model(inputs, layers.Dense(3, name="head")(layers.GlobalAveragePooling2D()(x)))


def squeeze(gate: str = "sigmoid", use: str = "multiply", pool: str = "mean") -> Any:
    """Squeeze and excitation."""
    x = inputs = layers.Input((7, 8, 3))
    x = layers.Conv2D(6, 3, activation="relu", name="conv")(x)
    y = layers.GlobalAveragePooling2D()(x) if pool == "mean" else layers.GlobalMaxPooling2D()(x)
    y = layers.Dense(4, activation="relu", name="fc1")(y)
    name = {"hardsigmoid": "hard_sigmoid"}.get(gate, gate)
    y = layers.Reshape((1, 1, 6))(layers.Dense(6, activation=name, name="fc2")(y))
    if use:
        x = layers.Multiply()([x, y]) if use == "multiply" else layers.Add()([x, y])
    return keras.Model(inputs, layers.GlobalAveragePooling2D()(layers.Conv2D(3, 1, name="mix")(x)))


def temporal(causal: bool = True, dilation: int = 2, step: int = -1) -> Any:
    """Causal convolutions over time."""
    x = inputs = layers.Input((9, 4))
    options = {"padding": "causal" if causal else "same", "activation": "relu"}
    x = layers.Conv1D(6, 3, dilation_rate=dilation, name="conv1", **options)(x)
    x = layers.Conv1D(5, 3, name="conv2", **options)(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(x[:, step]))


def volume(pool: str = "max", last: bool = True) -> Any:
    """A convolution over three axes, pooled and flattened."""
    x = inputs = layers.Input((5, 6, 7, 2))
    x = layers.Conv3D(3, 2, activation="relu", name="conv")(x)
    x = (layers.MaxPooling3D if pool == "max" else layers.AveragePooling3D)(2)(x)
    x = x if last else ops.transpose(x, (0, 4, 1, 2, 3))
    return keras.Model(inputs, layers.Dense(4, name="head")(layers.Flatten()(x)))


def decoder(
    causal: bool = True,
    scale: bool = True,
    heads: int = 2,
    axis: int = -1,
    embed: float = 8**0.5,
    post: bool = False,
    eps: float = 1e-5,
    skip: bool = True,
) -> Any:
    """A language model of one block with attention by hand."""
    inputs = layers.Input((6,), dtype="int32")
    x = AddRows(name="position")(layers.Embedding(17, 8, name="embed")(inputs) * embed)
    norm = layers.LayerNormalization(epsilon=eps, name="norm")
    y = x if post else norm(x)

    def split(x: Any) -> Any:
        return ops.transpose(ops.reshape(x, (-1, 6, heads, 8 // heads)), (0, 2, 1, 3))

    q, k, v = (split(layers.Dense(8, name=name)(y)) for name in ("query", "key", "value"))
    scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2)))
    scores = scores / (8 / heads) ** 0.5 if scale else scores
    if causal:
        scores = scores + np.triu(np.full((6, 6), -1e9, np.float32), 1)
    y = ops.transpose(ops.matmul(ops.softmax(scores, axis), v), (0, 2, 1, 3))
    y = layers.Dense(8, name="proj")(ops.reshape(y, (-1, 6, 8)))
    x = norm(x + y) if post else x + y
    y = layers.Dense(16, name="up")(layers.LayerNormalization(epsilon=eps, name="norm2")(x))
    y = layers.Dense(8, name="down")(ops.gelu(y, approximate=False))
    return keras.Model(inputs, layers.Dense(17, name="out")(x + y if skip else y))


def fused(order: str = "qkv", inner: bool = False) -> Any:
    """Attention with one matrix for queries, keys and values; `inner`: those of each head together."""
    inputs = layers.Input((7, 8))
    y = layers.Dense(24, name="qkv")(inputs)
    y = ops.reshape(y, (-1, 7, 2, 3, 4) if inner else (-1, 7, 3, 2, 4))
    y = ops.transpose(y, (3, 0, 2, 1, 4) if inner else (2, 0, 3, 1, 4))
    by_name = {name: y[index] for index, name in enumerate(order)}
    scores = ops.softmax(ops.matmul(by_name["q"], ops.transpose(by_name["k"], (0, 1, 3, 2))) / 2, -1)
    y = ops.transpose(ops.matmul(scores, by_name["v"]), (0, 2, 1, 3))
    return keras.Model(inputs, layers.Dense(5, name="proj")(ops.reshape(y, (-1, 7, 8))))


def gated(first: bool = True, activation: str = "silu", eps: float = 1e-6) -> Any:
    """A gated linear unit after a root-mean-square norm."""
    inputs = layers.Input((8,))
    y = layers.Dense(12, name="up")(Root(eps, name="norm")(inputs))
    a, b = y[:, :6], y[:, 6:]
    act = keras.activations.get(activation)
    y = act(a) * b if first else a * act(b)
    return keras.Model(inputs, layers.Dense(4, activation="tanh", name="down")(y))


def vae(half: bool = True, swapped: bool = False) -> Any:
    """An encoder with a mean and the logarithm of a variance, of equal shapes."""
    inputs = layers.Input((8, 8, 3))
    x = layers.Flatten()(layers.Conv2D(4, 3, 2, activation="relu", name="conv")(inputs))
    mean, spread = layers.Dense(5, name="mean")(x), layers.Dense(5, name="spread")(x)
    z = mean + ops.exp(spread * 0.5 if half else spread)
    outputs = [layers.Dense(5, name="decode")(z), spread]
    return keras.Model(inputs, outputs[::-1] if swapped else outputs)


def critic(swapped: bool = False, difference: bool = False) -> Any:
    """A critic of states and actions of one width, with two values."""
    obs, action = layers.Input((5,), name="obs_input"), layers.Input((4,), name="action_input")
    h = layers.Dense(4, activation="relu", name="obs")(obs)
    x = layers.Concatenate()([action, h] if swapped else [h, action])
    x = layers.Dense(8, activation="relu", name="hidden")(x)
    values = [layers.Dense(1, name=name)(x) for name in ("q1", "q2")]
    return keras.Model([obs, action], (ops.maximum if difference else ops.minimum)(*values))


def dueling(mean: str = "mean", axis: int = 1) -> Any:
    """A value and advantages around their mean."""
    inputs = layers.Input((6,))
    x = layers.Dense(8, activation="relu", name="trunk")(inputs)
    value, advantage = layers.Dense(1, name="value")(x), layers.Dense(4, name="advantage")(x)
    centre = {"mean": ops.mean, "max": ops.max}[mean](advantage, axis, keepdims=True) if mean else 0.0
    return keras.Model(inputs, value + advantage - centre)


def mixture(gate: str = "softmax") -> Any:
    """Three experts, weighed by a gate."""
    inputs = layers.Input((6,))
    y = layers.Dense(3, activation=gate, name="gate")(inputs)
    experts = [layers.Dense(6, activation="tanh", name=name)(inputs) for name in ("one", "two", "three")]
    y = ops.sum(ops.stack(experts, -1) * ops.expand_dims(y, 1), -1)
    return keras.Model(inputs, layers.Dense(2, name="out")(y))


def normalized(root: bool = True, clip: float = 1.5) -> Any:
    """Observations in units of their deviation, clipped."""
    inputs = layers.Input((6,))
    x = Normalizer(root, name="normalizer")(inputs)
    x = layers.Dense(8, activation="tanh", name="hidden")(ops.clip(x, -clip, clip) if clip else x)
    return keras.Model(inputs, layers.Dense(2, name="out")(x))


def slopes(slope: float = 0.01, alpha: float = 1.0, last: str = "Tanh") -> Any:
    """Dense layers, each with another activation."""
    x = inputs = layers.Input((6,))
    x = layers.PReLU(name="prelu")(layers.Dense(8, name="first")(x))
    x = layers.LeakyReLU(slope, name="leak")(layers.Dense(8, name="second")(x))
    x = layers.ELU(alpha, name="elu")(layers.Dense(8, name="third")(x))
    return keras.Model(inputs, layers.Dense(3, activation=last.lower(), name="fourth")(x))


def groups(groups: int = 2, eps: float = 1e-3) -> Any:
    """A convolution and a group norm."""
    x = inputs = layers.Input((7, 7, 3))
    x = layers.GroupNormalization(groups, epsilon=eps, name="norm")(layers.Conv2D(8, 3, name="conv")(x))
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.GlobalAveragePooling2D()(ops.relu(x))))


def stacked(last: str = "step", activation: str = "tanh") -> Any:
    """A bidirectional LSTM, then a GRU."""
    x = inputs = layers.Input((7, 4))
    x = layers.Bidirectional(layers.LSTM(5, return_sequences=True), name="both")(x)
    x = layers.GRU(6, return_sequences=True, activation=activation, name="gru")(x)
    x = x[:, -1] if last == "step" else ops.mean(x, 1)
    return keras.Model(inputs, layers.Dense(2, name="head")(x))


def recommender(use: str = "multiply") -> Any:
    """Two tables of one shape, and a dense layer."""
    inputs = [layers.Input((), dtype="int32", name=f"{name}_input") for name in ("user", "item")]
    pairs = zip(("user", "item"), inputs, strict=True)
    a, b = (layers.Embedding(12, 6, name=name)(tensor) for name, tensor in pairs)
    x = layers.Dense(6, activation="relu", name="hidden")(a * b if use == "multiply" else a + b)
    return keras.Model(inputs, layers.Dense(1, name="out")(x))


def pixels(scale: float = 255.0, reverse: bool = False, offset: float = 0.0) -> Any:
    """Convolutions of an image in units of its largest number."""
    inputs = layers.Input((9, 9, 3))
    x = ops.flip(inputs, -1) if reverse else inputs
    x = layers.Rescaling(1 / scale, -offset)(x)
    x = layers.Conv2D(4, 3, 2, activation="relu", name="conv")(x)
    x = layers.Conv2D(5, 2, activation="relu", name="conv2")(x)
    return keras.Model(inputs, layers.Dense(3, name="head")(layers.GlobalAveragePooling2D()(x)))


# Further architectures.


class Token(layers.Layer):
    """A vector before or behind the rows of a sequence."""

    def __init__(self, *, first: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.first = first

    def build(self, shape: Any) -> None:
        self.token = self.add_weight(shape=(1, shape[-1]), name="token")

    def call(self, x: Any) -> Any:
        token = ops.broadcast_to(self.token, (ops.shape(x)[0], 1, x.shape[-1]))
        return ops.concatenate([token, x] if self.first else [x, token], 1)


class TiedKernel(layers.Layer):
    """Multiplies by the transposed kernel of a dense layer."""

    def __init__(self, dense: Any, **options: Any) -> None:
        super().__init__(**options)
        self.dense = dense

    def call(self, x: Any) -> Any:
        return ops.matmul(x, ops.transpose(self.dense.kernel))


def _conv(width: int, size: int, name: str, **options: Any) -> Any:
    return layers.Conv2D(width, size, padding="same", name=name, **options)


def _mean(x: Any) -> Any:
    return layers.GlobalAveragePooling2D()(x)


def preactivated(shared: bool = True, normed: bool = True, shortcut: bool = True, eps: float = 1e-3) -> Any:
    """A residual block that starts with its norm, with a convolution as its shortcut."""
    inputs = layers.Input((9, 9, 3))
    x = _conv(6, 3, "conv")(inputs)
    y = layers.BatchNormalization(name="norm", epsilon=eps)(x) if normed else x
    y = layers.ReLU()(y)
    side = layers.Conv2D(8, 1, 2, name="side")(y if shared else x)
    y = layers.BatchNormalization(name="norm1", epsilon=eps)(_conv(8, 3, "conv1", strides=2)(y))
    y = _conv(8, 3, "conv2")(layers.ReLU()(y))
    y = layers.Add()([y, side]) if shortcut else y
    return keras.Model(inputs, layers.Dense(3, name="head")(_mean(y)))


def branches(order: str = "1 3 5 pool", pool: str = "max", dilation: int = 1) -> Any:
    """Parallel convolutions of several sizes, and a pooled branch."""
    x = layers.Input((8, 8, 4))
    output = (layers.MaxPooling2D if pool == "max" else layers.AveragePooling2D)(3, 1, "same")(x)
    parts = {"1": _conv(3, 1, "one")(x), "3": _conv(4, 3, "three", dilation_rate=dilation)(x)}
    parts |= {"5": _conv(3, 5, "five")(x), "pool": _conv(3, 1, "pooled")(output)}
    y = layers.ReLU()(layers.Concatenate()([parts[name] for name in order.split()]))
    y = layers.Conv2D(5, 3, activation="relu", name="mix")(y)
    return keras.Model(x, layers.Dense(2, name="head")(_mean(y)))


def dense_block(new_first: bool = False, active: bool = True) -> Any:
    """Convolutions whose outputs are appended to their inputs."""
    inputs = layers.Input((8, 8, 3))
    x = _conv(4, 3, "conv")(inputs)
    for name in ("grow1", "grow2"):
        y = _conv(4, 3, name, activation="relu" if active else None)(x)
        x = layers.Concatenate()([y, x] if new_first and name == "grow1" else [x, y])
    x = layers.ReLU()(layers.BatchNormalization(name="norm")(x))
    return keras.Model(inputs, layers.Dense(3, name="head")(_mean(x)))


def unet(pool: str = "max", early: bool = False, shift: int = 0) -> Any:
    """Convolutions at two sizes with a skipped image."""
    inputs = layers.Input((8, 8, 2))
    skip = _conv(4, 3, "wide")(inputs)
    x = layers.ReLU()(skip)
    y = (layers.MaxPooling2D if pool == "max" else layers.AveragePooling2D)(2)(x)
    y = layers.Conv2DTranspose(4, 2, 2, name="up")(_conv(8, 3, "deep", activation="relu")(y))
    skip = skip if early else x
    y = layers.Concatenate()([y, ops.roll(skip, shift, 2) if shift else skip])
    y = _conv(4, 3, "mix", activation="relu")(y)
    return keras.Model(inputs, _conv(1, 1, "out", activation="sigmoid")(y))


def convnext(
    eps: float = 1e-6, gelu: str = "none", scaled: bool = True, skip: bool = True, whole: bool = False
) -> Any:
    """A wide depthwise convolution, dense layers on channels, and a scale for each."""
    x = layers.Input((8, 8, 6))
    y = layers.DepthwiseConv2D(7, padding="same", name="depth")(x)
    norm = layers.GroupNormalization(1, epsilon=eps, name="norm")
    y = (norm if whole else layers.LayerNormalization(epsilon=eps, name="norm"))(y)
    y = ops.gelu(layers.Dense(24, name="up")(y), approximate=gelu == "tanh")
    y = layers.Dense(6, name="down")(y)
    y = Scale(name="scale")(y) if scaled else y
    return keras.Model(x, layers.Dense(3, name="head")(_mean(layers.Add()([x, y]) if skip else y)))


def mixer(turned: bool = True, skip: bool = True, pool: str = "mean", activation: str = "gelu") -> Any:
    """Dense layers over positions, then over features, of a square sequence."""
    x = inputs = layers.Input((8, 8))
    y = layers.LayerNormalization(name="norm")(x)
    y = layers.Permute((2, 1))(y) if turned else y
    y = layers.Dense(8, name="rows2")(layers.Dense(12, activation=activation, name="rows1")(y))
    y = layers.Permute((2, 1))(y) if turned else y
    x = layers.Add()([x, y]) if skip else y
    y = layers.LayerNormalization(name="norm2")(x)
    x = layers.Add()([x, layers.Dense(8, name="down")(layers.Dense(12, activation="gelu", name="up")(y))])
    output = (layers.GlobalAveragePooling1D if pool == "mean" else layers.GlobalMaxPooling1D)()(x)
    return keras.Model(inputs, layers.Dense(3, name="head")(output))


def patches(token: str = "first", use: str = "token", turned: bool = False, heads: int = 2) -> Any:
    """Patches of an image and a token of their class through attention."""
    inputs = layers.Input((8, 12, 3))
    x = layers.Conv2D(8, 4, 4, name="patch")(inputs)
    x = layers.Reshape((6, 8))(layers.Permute((2, 1, 3))(x) if turned else x)
    x = AddRows(name="position")(Token(first=token == "first", name="token")(x))
    y = layers.LayerNormalization(name="norm")(x)
    x = layers.Add()([x, layers.MultiHeadAttention(heads, 8 // heads, name="attention")(y, y)])
    return keras.Model(inputs, layers.Dense(3, name="head")(x[:, 0] if use == "token" else ops.mean(x, 1)))


def _split(x: Any, heads: int, width: int) -> Any:
    """Return [batch, heads, positions, width]."""
    return ops.transpose(ops.reshape(x, (-1, x.shape[1], heads, width)), (0, 2, 1, 3))


def _joined(x: Any) -> Any:
    return ops.reshape(ops.transpose(x, (0, 2, 1, 3)), (-1, x.shape[2], x.shape[1] * x.shape[3]))


def _scores(q: Any, k: Any) -> Any:
    return ops.matmul(q, ops.swapaxes(k, -1, -2))


def cross_attention(keys: str = "memory", width: int = 4, active: str = "softmax") -> Any:
    """Attention of one sequence on another one."""
    x, memory = layers.Input((3, 8), name="x"), layers.Input((5, 8), name="memory")
    k = layers.Dense(8, name="key")(memory if keys == "memory" else ops.flip(memory, 1))
    q, v = layers.Dense(8, name="query")(x), layers.Dense(8, name="value")(memory)
    scores = _scores(_split(q, 2, 4), _split(k, 2, 4)) / width**0.5
    shares = ops.softmax(scores, -1) if active == "softmax" else ops.sigmoid(scores)
    y = _joined(ops.matmul(shares, _split(v, 2, 4)))
    return keras.Model([x, memory], layers.Dense(4, name="proj")(y))


def rotary(pairs: str = "halves", base: float = 1e4, values: bool = False, reverse: bool = False) -> Any:
    """Attention of queries and keys that are turned by their positions."""
    angles = (np.arange(6.0)[:, None] / base ** (np.arange(4.0) / 4)).astype("float32")
    cos, sin = np.cos(angles), np.sin(-angles if reverse else angles)

    def turn(x: Any) -> Any:
        if pairs == "halves":
            a, b = x[..., :4], x[..., 4:]
            return ops.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
        a, b = x[..., ::2], x[..., 1::2]
        return ops.reshape(ops.stack([a * cos - b * sin, b * cos + a * sin], -1), (-1, 6, 8))

    x = layers.Input((6, 8))
    q, k, v = (layers.Dense(8, name=name)(x) for name in ("query", "key", "value"))
    shares = ops.softmax(_scores(turn(q), turn(k)) / 8**0.5, -1)
    y = ops.matmul(shares, turn(v) if values else v)
    return keras.Model(x, layers.Dense(4, name="proj")(y))


def shared_heads(tiled: bool = False, heads: int = 4, scaled: bool = True) -> Any:
    """Attention with fewer heads of keys and values than of queries."""
    x = layers.Input((6, 8))
    width = 16 // heads
    q = _split(layers.Dense(16, name="query")(x), heads, width)
    k, v = (_split(layers.Dense(8, name=name)(x), 8 // width, width) for name in ("key", "value"))
    times = heads // (8 // width)
    k, v = (ops.tile(y, (1, times, 1, 1)) if tiled else ops.repeat(y, times, 1) for y in (k, v))
    scores = _scores(q, k)
    y = _joined(ops.matmul(ops.softmax(scores / width**0.5 if scaled else scores, -1), v))
    return keras.Model(x, layers.Dense(4, name="proj")(y))


def swiglu(norm: str = "rms", activation: str = "silu", on: str = "gate", use: str = "*") -> Any:
    """A gated block of two dense layers after a root-mean-square norm."""
    x = layers.Input((8,))
    kinds = {"rms": layers.RMSNormalization(epsilon=1e-5, name="norm")}
    y = kinds.get(norm, layers.LayerNormalization(epsilon=1e-5, center=False, name="norm"))(x)
    a, b = layers.Dense(12, name="gate")(y), layers.Dense(12, name="up")(y)
    act = {"silu": ops.silu, "gelu": lambda z: ops.gelu(z, approximate=False)}[activation]
    a, b = (act(a), b) if on == "gate" else (a, act(b))
    y = layers.Multiply()([a, b]) if use == "*" else layers.Add()([a, b])
    return keras.Model(x, layers.Dense(3, name="head")(x + layers.Dense(8, name="down")(y)))


def wavenet(gate: str = "sigmoid", late: bool = False, skip: str = "gated", dilation: int = 2) -> Any:
    """A dilated causal convolution with a gate, a residual and a skipped output."""
    inputs = layers.Input((9, 3))
    x = layers.Conv1D(6, 1, name="start")(inputs)
    padded = layers.ZeroPadding1D((0, dilation) if late else (dilation, 0))(x)
    y, z = (layers.Conv1D(6, 2, dilation_rate=dilation, name=name)(padded) for name in ("filter", "gate"))
    z = ops.tanh(y) * getattr(ops, gate)(z)
    y = layers.Conv1D(4, 1, name="skip")(z if skip == "gated" else x)
    last = layers.Conv1D(4, 1, name="last")(x + layers.Conv1D(6, 1, name="keep")(z))
    return keras.Model(inputs, layers.Conv1D(2, 1, name="out")(ops.relu(y + last)))


def translator(state: str = "both", reverse: bool = False, exchanged: bool = False) -> Any:
    """An LSTM whose last state starts another one."""
    words, others = layers.Input((5, 4), name="words"), layers.Input((6, 3), name="others")
    _, h, c = layers.LSTM(6, return_state=True, name="encode")(ops.flip(words, 1) if reverse else words)
    h, c = (c, h) if exchanged else (h, c)
    h, c = (ops.zeros_like(item) if state == "zero" else item for item in (h, c))
    y = layers.LSTM(6, return_sequences=True, name="decode")(others, initial_state=[h, c])
    return keras.Model([words, others], layers.Dense(2, name="head")(y))


def pooled_steps(weigh: str = "softmax", active: str = "tanh") -> Any:
    """A GRU whose steps are summed with learned shares."""
    inputs = layers.Input((7, 4))
    x = layers.GRU(6, return_sequences=True, name="rnn")(inputs)
    scores = layers.Dense(1, name="score")(
        layers.Dense(5, activation="tanh" if active == "tanh" else None, name="hidden")(x)
    )
    shares = ops.softmax(scores, 1) if weigh == "softmax" else ops.sigmoid(scores)
    y = ops.mean(x, 1) if weigh == "mean" else ops.sum(x * shares, 1)
    return keras.Model(inputs, layers.Dense(2, name="head")(y))


def both_ways(merge: str = "sum", turned: bool = False, step: int = -1) -> Any:
    """The sum of a forward and a backward GRU, and a dense layer on one step."""
    inputs = layers.Input((7, 4))
    rnn = layers.GRU(5, return_sequences=True)
    x = layers.Bidirectional(rnn, merge_mode="concat" if turned else merge, name="both")(inputs)
    x = x[..., :5] + ops.flip(x[..., 5:], 1) if turned else x
    return keras.Model(inputs, layers.Dense(2, name="head")(x[:, step]))


def conditioned(one: bool = True, exchanged: bool = False, late: bool = False, sign: float = 1.0) -> Any:
    """Channels of an image that are scaled and shifted as a vector says."""
    image, task = layers.Input((8, 8, 3), name="image"), layers.Input((5,), name="task")
    x = layers.Conv2D(6, 3, name="conv")(image)
    y = layers.Reshape((1, 1, 12))(layers.Dense(12, name="condition")(task))
    g, b = (y[..., 6:], y[..., :6]) if exchanged else (y[..., :6], y[..., 6:])
    x = ops.relu(x) if late else x
    x = x * (g + 1 if one else g) + sign * b
    x = layers.Conv2D(4, 3, activation="relu", name="conv2")(x if late else ops.relu(x))
    return keras.Model([image, task], layers.Dense(2, name="head")(_mean(x)))


def atoms(axis: int = -1, low: float = -10.0, turned: bool = False, shares: str = "softmax") -> Any:
    """The mean of a distribution over returns for each action."""
    inputs = layers.Input((6,))
    y = layers.Dense(15, name="values")(layers.Dense(8, activation="relu", name="trunk")(inputs))
    y = layers.Permute((2, 1))(layers.Reshape((5, 3))(y)) if turned else layers.Reshape((3, 5))(y)
    y = ops.softmax(y, axis) if shares == "softmax" else ops.sigmoid(y)
    return keras.Model(inputs, ops.sum(y * np.linspace(low, low + 20, 5, dtype="float32"), -1))


def gaussian(squash: str = "tanh", high: float = 1.0, spread: str = "exp", size: float = 2.0) -> Any:
    """The mean action and the deviation of a policy."""
    inputs = layers.Input((6,))
    x = layers.Dense(8, activation="relu", name="body")(inputs)
    mean, log = layers.Dense(3, name="mean")(x), ops.clip(layers.Dense(3, name="log")(x), -1.0, high)
    mean = ops.tanh(mean) if squash == "tanh" else ops.clip(mean, -1, 1)
    return keras.Model(inputs, [mean * size, ops.exp(log) if spread == "exp" else ops.softplus(log)])


def encoder(divisor: float = 255.0, late: bool = False, last: str = "tanh", flat: str = "first") -> Any:
    """Convolutions of an image in 0 to 255, flattened, then a dense layer and its norm."""
    inputs = layers.Input((9, 9, 3))
    x = layers.Conv2D(4, 3, 2, activation="relu", name="conv")(inputs / divisor - 0.5)
    x = layers.Conv2D(4, 3, activation="relu", name="conv2")(x)
    x = layers.Flatten()(x if flat == "first" else layers.Permute((3, 1, 2))(x))
    x, norm = layers.Dense(6, name="trunk")(x), layers.LayerNormalization(name="norm")
    x = norm(ops.tanh(x)) if late else norm(x)
    x = ops.tanh(x) if last == "tanh" and not late else x
    return keras.Model(inputs, layers.Dense(2, name="head")(x))


def quantiles(start: int = 1, use: str = "*", active: bool = True) -> Any:
    """Values at quantiles, which cosines describe."""
    x, tau = layers.Input((6,), name="x"), layers.Input((1,), name="tau")
    angles = (np.pi * np.arange(start, start + 8)).astype("float32")
    y = layers.Dense(8, activation="relu" if active else None, name="wave")(ops.cos(tau * angles))
    z = layers.Dense(8, activation="relu", name="body")(x)
    z = layers.Multiply()([z, y]) if use == "*" else layers.Add()([z, y])
    z = layers.Dense(3, name="out")(layers.Dense(8, activation="relu", name="hidden")(z))
    return keras.Model([x, tau], z)


def graph_net(turned: bool = False, second: bool = True, loops: bool = False) -> Any:
    """Dense layers whose outputs are summed along the edges of a graph."""
    nodes, inputs = layers.Input((5, 4), name="nodes"), layers.Input((5, 5), name="edges")
    edges = ops.transpose(inputs, (0, 2, 1)) if turned else inputs
    edges = edges + np.eye(5, dtype="float32") if loops else edges
    x = ops.relu(ops.matmul(edges, layers.Dense(6, name="first")(nodes)))
    x = layers.Dense(6, name="second")(x)
    x = ops.mean(ops.matmul(edges, x) if second else x, 1)
    return keras.Model([nodes, inputs], layers.Dense(2, name="head")(x))


def factors(shift: int = 0, half: float = 0.5, order: int = 1) -> Any:
    """Products of all pairs of four embeddings."""
    words = layers.Input((4,), dtype="int32")
    x = layers.Embedding(11, 6, name="embed")(ops.mod(words + shift, 11) if shift else words)
    whole, parts = ops.square(ops.sum(x, 1)), ops.sum(ops.square(x), 1)
    y = half * (whole - parts if order > 0 else parts - whole)
    y = layers.Dense(8, activation="relu", name="hidden")(y)
    return keras.Model(words, layers.Dense(2, name="out")(y))


def highway(carry: str = "gated", gate: str = "sigmoid", active: str = "relu") -> Any:
    """A layer whose output is mixed with its input as a gate says."""
    inputs = layers.Input((6,))
    x = layers.Dense(6, name="start")(inputs)
    t = layers.Dense(6, activation=gate, name="gate")(x)
    h = layers.Dense(6, activation=active, name="change")(x)
    mixed = {"gated": lambda: t * h + (1 - t) * x, "exchanged": lambda: (1 - t) * h + t * x}
    return keras.Model(inputs, layers.Dense(2, name="head")(mixed.get(carry, lambda: t * h + x)()))


def maxout(pieces: str = "inner", use: str = "max") -> Any:
    """The largest of two features, several times."""
    inputs = layers.Input((6,))
    x = layers.Dense(12, name="first")(inputs)
    x = layers.Reshape((6, 2))(x) if pieces == "inner" else layers.Permute((2, 1))(layers.Reshape((2, 6))(x))
    x = ops.max(x, -1) if use == "max" else ops.mean(x, -1)
    return keras.Model(inputs, layers.Dense(3, name="out")(x))


def waves(rate: float = 3.0, form: str = "sin", again: bool = True) -> Any:
    """Dense layers with sines."""
    inputs = layers.Input((3,))
    x = layers.Dense(8, name="second")(getattr(ops, form)(rate * layers.Dense(8, name="first")(inputs)))
    return keras.Model(inputs, layers.Dense(2, name="out")(ops.sin(x) if again else x))


def shuffled(shuffle: bool = True, groups: int = 2, space: str = "depth first") -> Any:
    """Grouped convolutions with their channels shuffled, and channels spread out in space."""
    inputs = layers.Input((6, 6, 4))
    x = _conv(8, 3, "group1", groups=2, activation="relu")(inputs)
    if shuffle:
        x = ops.reshape(ops.swapaxes(ops.reshape(x, (-1, 6, 6, 2, 4)), 3, 4), (-1, 6, 6, 8))
    x = layers.Conv2D(8, 1, groups=groups, activation="relu", name="group2")(x)
    x = ops.reshape(x, (-1, 6, 6, 2, 2, 2))
    x = ops.swapaxes(x, 4, 5) if space == "width first" else x
    x = ops.reshape(ops.transpose(x, (0, 1, 4, 2, 5, 3)), (-1, 12, 12, 2))
    return keras.Model(inputs, layers.Conv2D(2, 3, name="last")(x))


def ngrams(pool: str = "max", order: str = "23", active: str = "relu") -> Any:
    """Convolutions of two lengths over words, and the largest value of each."""
    words = layers.Input((7,), dtype="int32")
    x = layers.Embedding(11, 6, name="embed")(words)
    pooling = layers.GlobalMaxPooling1D if pool == "max" else layers.GlobalAveragePooling1D
    parts = {
        str(size): pooling()(layers.Conv1D(4, size, activation=active, name=name)(x))
        for name, size in (("two", 2), ("three", 3))
    }
    output = layers.Concatenate()([parts[name] for name in order])
    return keras.Model(words, layers.Dense(2, name="out")(output))


def styled(eps: float = 1e-3, active: str = "leaky", affine: bool = True) -> Any:
    """A transposed convolution, a norm of each channel of each image, and a leaky activation."""
    inputs = layers.Input((5, 5, 3))
    x = layers.Conv2DTranspose(6, 4, 2, padding="same", name="up")(inputs)
    x = layers.GroupNormalization(6, epsilon=eps, center=affine, scale=affine, name="norm")(x)
    slope = {"leaky": 0.2, "less leaky": 0.01}.get(active)
    x = x if slope is None else layers.LeakyReLU(slope, name="leak")(x)
    return keras.Model(inputs, _conv(2, 3, "out", activation="tanh")(x))


def tied_decoder(tied: bool = True, bias: bool = True, active: str = "sigmoid") -> Any:
    """An autoencoder whose decoder has the transposed weights of its encoder."""
    inputs = layers.Input((8,))
    encode = layers.Dense(5, activation=active, name="encode")
    x = layers.Dense(5, name="latent")(encode(inputs))
    x = TiedKernel(encode)(x) if tied else layers.Dense(8, use_bias=False, name="other")(x)
    return keras.Model(inputs, AddRows(name="shift")(x) if bias else x)


def cross_network(first: bool = True, skip: bool = True, use: str = "*") -> Any:
    """Products of the input with a layer's outputs, twice."""
    inputs = layers.Input((5,))
    x0 = x = layers.Dense(6, name="start")(inputs)
    for name in ("cross1", "cross2"):
        y = layers.Dense(6, name=name)(x)
        y = (x0 if first else x) * y if use == "*" else x0 + y
        x = y + x if skip else y
    return keras.Model(inputs, layers.Dense(2, name="out")(x))


# The layers with their numbers, in the order of `set_weights`.

# The names of layers in PyTorch where they are others.
NAMES = {
    "mlp": {"first": "0", "second": "2", "third": "4"},
    "cnn": {"conv": "0", "norm": "1", "conv2": "4", "head": "7"},
    "words": {"embed": "0", "head": "2"},
    "activated": {"first": "0", "second": "2", "norm": "3"},
}


# Images that a dense layer receives flattened, with the channels first.
FLATTENED = {"cnn": ("head", (5, 2, 3)), "volume": ("head", (3, 2, 2, 3)), "vae": ("mean|spread", (4, 3, 3))}
FLATTENED |= {"encoder": ("trunk", (4, 2, 2)), "impala": ("hidden", (4, 4, 4))}


def _gates(w: State, name: str = "rnn", end: str = "l0") -> list[np.ndarray]:
    order = (
        (1, 0, 2)
        if len(w[f"{name}.weight_hh_{end}"]) == 3 * w[f"{name}.weight_hh_{end}"].shape[1]
        else (0, 1, 2, 3)
    )
    turned = {
        key: np.concatenate([np.split(w[f"{name}.{key}_{end}"], len(order))[index] for index in order])
        for key in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    }
    biases = turned["bias_ih"], turned["bias_hh"]
    bias = np.stack(biases) if len(order) == 3 else sum(biases)
    return [turned["weight_ih"].T, turned["weight_hh"].T, np.asarray(bias)]


def _heads(w: State, name: str, heads: int) -> list[np.ndarray]:
    arrays: list[np.ndarray] = []
    kernels, biases = (np.split(w[f"{name}.in_proj_{kind}"], 3) for kind in ("weight", "bias"))
    for kernel, bias in zip(kernels, biases, strict=True):
        arrays += [kernel.T.reshape(8, heads, -1), bias.reshape(heads, -1)]
    return [*arrays, w[f"{name}.out_proj.weight"].T.reshape(heads, -1, 8), w[f"{name}.out_proj.bias"]]


def _kernel(layer: Any, weight: np.ndarray, image: Any) -> np.ndarray:
    """Return a weight in Keras's order of axes; `image` is that which the layer receives flattened."""
    if isinstance(layer, layers.DepthwiseConv2D):
        return weight.reshape(-1, layer.depth_multiplier, *weight.shape[2:]).transpose(2, 3, 0, 1)
    if weight.ndim > 2:
        return weight.transpose(*range(2, weight.ndim), 1, 0)
    if image is None or np.prod(image) != weight.shape[1]:
        return weight.T
    return np.moveaxis(weight.reshape(-1, *image), (0, 1), (-1, -2)).reshape(-1, len(weight))


def _arrays(layer: Any, model: str, name: str, w: State) -> list[np.ndarray]:
    """Return the numbers of one layer."""
    if isinstance(layer, layers.Bidirectional):
        return [*_gates(w, name), *_gates(w, name, "l0_reverse")]
    if isinstance(layer, layers.LSTM | layers.GRU):
        return _gates(w, name)
    if isinstance(layer, layers.MultiHeadAttention):
        return _heads(w, name, layer.num_heads)
    if isinstance(layer, Normalizer):
        return [w["centre"], w["variance"]]
    weight = w[f"{name}.weight"]
    if isinstance(layer, layers.Embedding | layers.PReLU | Root):
        return [weight]
    where, image = FLATTENED.get(model, ("", None))
    image = image if re.fullmatch(where, layer.name) else None
    kernel = _kernel(layer, weight, image)
    rest = [w.get(f"{name}.{suffix}") for suffix in ("bias", "running_mean", "running_var")]
    adapters = [w[f"mix.{matrix}"].T for matrix in ("lora_a", "lora_b") if isinstance(layer, LoraDense)]
    return [kernel, *(array for array in rest if array is not None), *adapters]


def fill(model: Any, name: str, w: State) -> None:
    """Give the Keras model the numbers of the PyTorch state_dict."""
    for layer in model.layers:
        if isinstance(layer, AddRows | Scale | Token | ported_keras.Own):
            layer.set_weights([w.get(layer.name, w.get(f"{layer.name}.weight"))])
        elif layer.weights and not isinstance(layer, TiedDense | TiedKernel):
            torch_name = NAMES.get(name, {}).get(layer.name, layer.name)
            layer.set_weights(_arrays(layer, name, torch_name, w))


def write(folder: Path) -> None:
    """Write the listed models."""
    for row in json.loads((folder / "keras.json").read_text(encoding="utf-8")):
        factories = vars(ported_keras) if row["model"] in ported_torch.SHAPES else globals()
        factories = factories | {name: partial(agent_nets.keras_net, name) for name in agent_nets.SHAPES}
        model = factories[row["model"]](**row["options"])
        with np.load(folder / row["state"]) as archive:
            fill(model, row["model"], dict(archive))
        if row["file"].endswith(".keras"):
            model.save(folder / row["file"])
        elif row["file"].endswith(".program"):
            model.export(folder / row["file"], verbose=False)
        else:
            model.save_weights(folder / row["file"])


if __name__ == "__main__":
    write(Path(sys.argv[1]))
