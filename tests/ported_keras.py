"""The architectures of ported_torch.py in Keras."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import layers, ops

State = Mapping[str, np.ndarray]


class Own(layers.Layer):
    """A layer with one weight and a function of the weight and the input."""

    def __init__(self, shape: tuple[int, ...], function: Callable[[Any, Any], Any], **options: Any) -> None:
        super().__init__(**options)
        self.shape, self.function = shape, function

    def build(self, _: Any) -> None:
        self.numbers = self.add_weight(shape=self.shape, name=self.name)

    def compute_output_shape(self, shape: Any) -> Any:
        return (*shape[:-1], self.shape[-1])

    def call(self, x: Any) -> Any:
        return self.function(x, self.numbers)


def _dense(width: int, name: str, x: Any, active: Any = None) -> Any:
    return layers.Dense(width, activation=active, name=name)(x)


def _norm(name: str, x: Any) -> Any:
    return layers.BatchNormalization(epsilon=1e-5, name=name)(x)


def _split(x: Any, heads: int) -> Any:
    width = x.shape[2] // heads
    return ops.transpose(ops.reshape(x, (-1, x.shape[1], heads, width)), (0, 2, 1, 3))


def _scores(q: Any, k: Any) -> Any:
    return ops.matmul(q, ops.swapaxes(k, -1, -2))


def mobile(act: str = "relu6", skip: bool = True, bottleneck: str = "", tail: str = "hardswish") -> Any:
    """An inverted residual block with a linear bottleneck."""
    inputs = layers.Input((8, 8, 4))
    active, names = getattr(ops, act), {"hardswish": ops.hard_silu, "silu": ops.silu}
    y = active(_norm("norm1", layers.Conv2D(8, 1, use_bias=False, name="expand")(inputs)))
    y = layers.DepthwiseConv2D(3, padding="same", use_bias=False, name="depth")(y)
    y = layers.Conv2D(4, 1, use_bias=False, name="project")(active(_norm("norm2", y)))
    y = _norm("norm3", y)
    y = getattr(ops, bottleneck)(y) if bottleneck else y
    x = names[tail](layers.Conv2D(6, 1, name="tail")(layers.Add()([inputs, y]) if skip else y))
    return keras.Model(inputs, _dense(3, "head", layers.GlobalAveragePooling2D()(x)))


def channel_gates(gate: str = "sigmoid", use: str = "*") -> Any:
    """Gates of channels by a convolution over their means."""
    inputs = layers.Input((7, 7, 3))
    x = layers.Conv2D(6, 3, activation="relu", name="conv")(inputs)
    g = layers.Reshape((6, 1))(layers.GlobalAveragePooling2D()(x))
    g = layers.Reshape((6,))(layers.Conv1D(1, 3, padding="same", name="gate")(g))
    g = ops.softmax(g, -1) if gate == "softmax" else ops.sigmoid(g)
    y = x * layers.Reshape((1, 1, 6))(g)
    y = layers.Conv2D(3, 1, name="out")(x + y if use == "+" else y)
    return keras.Model(inputs, layers.GlobalAveragePooling2D()(y))


def spatial_gates(order: str = "mean max", mode: str = "zeros", use: str = "*") -> Any:
    """Gates of positions by a convolution of the mean and the maximum over channels."""
    inputs = layers.Input((7, 7, 3))
    x = layers.Conv2D(6, 3, activation="relu", name="conv")(inputs)
    forms = {"mean": ops.mean, "max": ops.max, "min": ops.min}
    g = layers.Concatenate()([forms[name](x, -1, keepdims=True) for name in order.split()])
    g = ops.pad(g, ((0, 0), (1, 1), (1, 1), (0, 0)), "constant" if mode == "zeros" else mode)
    g = layers.Conv2D(1, 3, activation="sigmoid", name="gate")(g)
    y = layers.Conv2D(3, 1, name="out")(x * (1 - g) if use == "1-" else x * g)
    return keras.Model(inputs, layers.GlobalAveragePooling2D()(y))


def attended(
    order: str = "context first",
    axis: int = -1,
    scaled: bool = False,
    state: str = "last",
    last: str = "tanh",
) -> Any:
    """A GRU decoder that attends to the states of a GRU encoder."""
    words, others = layers.Input((5, 4), name="words"), layers.Input((3, 3), name="others")
    memory, h = layers.GRU(6, return_sequences=True, return_state=True, name="encode")(words)
    h = ops.zeros_like(h) if state == "zero" else h
    y = layers.GRU(6, return_sequences=True, name="decode")(others, initial_state=h)
    scores = _scores(y, memory)
    scores = scores / 6**0.5 if scaled else scores
    context = ops.matmul(ops.softmax(scores, axis), memory)
    y = layers.Concatenate()([context, y] if order == "context first" else [y, context])
    return keras.Model([words, others], _dense(2, "head", _dense(5, "mix", y, last or None)))


def recurrent_actor(size: float = 2.0, squash: str = "tanh", value: str = "output", step: int = -1) -> Any:
    """An actor and a critic on the last step of an LSTM."""
    inputs = layers.Input((5, 5))
    rnn = layers.LSTM(7, return_sequences=True, return_state=True, name="rnn")
    y, _, c = rnn(_dense(6, "body", inputs, "tanh"))
    y = y[:, step]
    mean = _dense(3, "mean", y)
    mean = ops.tanh(mean) if squash == "tanh" else ops.clip(mean, -1, 1)
    return keras.Model(inputs, [size * mean, _dense(1, "value", y if value == "output" else c)])


def masked_encoder(
    mask: str = "keys", waves: str = "halves", rate: float = 1.0, scale: str = "before"
) -> Any:
    """Attention with a mask of the keys, and positions of sines and cosines."""
    angles = np.arange(6.0)[:, None] / 100.0 ** (np.arange(4.0) / 4)
    parts = [np.sin(angles), np.cos(angles)]
    table = np.stack(parts, 2).reshape(6, 8) if waves == "next" else np.concatenate(parts, 1)
    inputs, keep = layers.Input((6, 8), name="x"), layers.Input((6,), name="keep")
    x = inputs + (rate * table).astype("float32")
    q, k, v = (_split(_dense(8, name, x), 2) for name in ("query", "key", "value"))
    scores = _scores(q, k)
    scores = scores / 2 if scale == "before" else scores
    hidden = keep > 0 if mask == "inverted" else keep <= 0
    hidden = layers.Reshape((1, 6, 1) if mask == "queries" else (1, 1, 6))(hidden)
    shares = ops.softmax(scores if mask == "none" else ops.where(hidden, -1e9, scores), -1)
    shares = shares / 2 if scale == "after" else shares
    y = ops.reshape(ops.transpose(ops.matmul(shares, v), (0, 2, 1, 3)), (-1, 6, 8))
    y = layers.LayerNormalization(epsilon=1e-5, name="norm")(x + _dense(8, "proj", y))
    return keras.Model([inputs, keep], y)


def cross_decoder(
    values: str = "memory", order: str = "self first", heads: int = 2, act: str = "relu"
) -> Any:
    """Attention to itself, then to a memory, then dense layers, each with a residual and a norm."""
    inputs, memory = layers.Input((4, 8), name="x"), layers.Input((5, 8), name="memory")
    norms = {name: layers.LayerNormalization(epsilon=1e-5, name=name) for name in ("norm1", "norm2", "norm3")}
    own = layers.MultiHeadAttention(2, 4, name="own")
    cross = layers.MultiHeadAttention(heads, 8 // heads, name="cross")
    x = inputs
    for name in ("own", "cross") if order == "self first" else ("cross", "own"):
        if name == "own":
            x = norms["norm1"](x + own(x, x))
        else:
            x = norms["norm2"](x + cross(x, memory if values == "memory" else x))
    y = _dense(8, "down", getattr(keras.activations, act)(_dense(12, "up", x)))
    return keras.Model([inputs, memory], norms["norm3"](x + y))


def windows(shift: int = 2, back: bool = True, bias: str = "added", apart: str = "near") -> Any:
    """Attention inside windows of turned positions, with a bias for each pair of positions."""
    x = layers.Input((8, 8))
    y = ops.roll(layers.LayerNormalization(epsilon=1e-5, name="norm")(x), -shift, 1)
    y = (
        ops.reshape(y, (-1, 2, 4, 8))
        if apart == "near"
        else ops.swapaxes(ops.reshape(y, (-1, 4, 2, 8)), 1, 2)
    )
    y = ops.transpose(ops.reshape(_dense(24, "qkv", y), (-1, 2, 4, 3, 2, 4)), (3, 0, 1, 4, 2, 5))
    q, k, v = y[0], y[1], y[2]
    scores = _scores(q, k) / 2
    if bias != "none":
        turned = bias == "turned"
        add = Own((2, 4, 4), lambda s, b: s + (ops.swapaxes(b, 1, 2) if turned else b), name="bias")
        scores = add(scores)
    y = ops.reshape(ops.swapaxes(ops.matmul(ops.softmax(scores, -1), v), 2, 3), (-1, 2, 4, 8))
    y = ops.reshape(y if apart == "near" else ops.swapaxes(y, 1, 2), (-1, 8, 8))
    return keras.Model(x, x + _dense(8, "proj", ops.roll(y, shift, 1) if back else y))


def capsules(squash: str = "squash", axis: int = -1, groups: str = "inner") -> Any:
    """Vectors whose lengths a function squashes; the lengths are the outputs."""
    inputs = layers.Input((6,))
    x = _dense(12, "first", inputs)
    x = layers.Reshape((4, 3))(x) if groups == "inner" else layers.Permute((2, 1))(layers.Reshape((3, 4))(x))
    square = ops.sum(ops.square(x), axis, keepdims=True)
    if squash == "squash":
        x = x * square / (1 + square) / ops.sqrt(square + 1e-6)
    elif squash == "unit":
        x = x / ops.sqrt(square + 1e-6)
    return keras.Model(inputs, ops.sqrt(ops.sum(ops.square(_dense(5, "second", x)), -1)))


def rainbow(mean: int = 1, low: float = -10.0, turned: bool = False, shares: str = "joined") -> Any:
    """Values and advantages of atoms; the mean of the atoms is the output."""
    support = np.linspace(low, low + 20, 5, dtype="float32")
    inputs = layers.Input((6,))
    x = _dense(8, "body", inputs, "relu")
    v, a = layers.Reshape((1, 5))(_dense(5, "value", x)), _dense(15, "advantage", x)
    a = layers.Permute((2, 1))(layers.Reshape((5, 3))(a)) if turned else layers.Reshape((3, 5))(a)
    centred = a - ops.mean(a, mean, keepdims=True)
    if shares == "apart":
        y = ops.softmax(v, -1) + ops.softmax(centred, -1)
    else:
        y = ops.softmax(centred if shares == "no value" else v + centred, -1)
    return keras.Model(inputs, ops.sum(y * support, -1))


def dreamer_cell(
    order: str = "hx", late: float = -1.0, parts: str = "rcu", use: str = "update", reset: str = "inside"
) -> Any:
    """One step of a recurrent cell with a norm of its gates."""
    x, h = layers.Input((5,), name="x"), layers.Input((6,), name="h")
    y = layers.Concatenate()([h, x] if order == "hx" else [x, h])
    y = layers.LayerNormalization(name="norm")(_dense(18, "gates", y))
    by_name = dict(zip(parts, ops.split(y, 3, -1), strict=True))
    r, u = ops.sigmoid(by_name["r"]), ops.sigmoid(by_name["u"] + late)
    c = ops.tanh(r * by_name["c"]) if reset == "inside" else r * ops.tanh(by_name["c"])
    new = u * c + (1 - u) * h if use == "update" else (1 - u) * c + u * h
    return keras.Model([x, h], [_dense(2, "head", new), new])


def symlog_net(squash: str = "symlog", last: str = "symexp", late: bool = False) -> Any:
    """Inputs on a symmetric logarithmic scale, and outputs back from it."""
    x = inputs = layers.Input((5,))
    if squash != "none":
        size = ops.log1p(ops.abs(x))
        x = ops.sign(x) * (size if squash == "symlog" else size / math.log(2))
    norm = layers.LayerNormalization(name="norm")
    x = _dense(8, "first", x)
    x = _dense(3, "head", norm(ops.silu(x)) if late else ops.silu(norm(x)))
    return keras.Model(inputs, ops.sign(x) * ops.expm1(ops.abs(x)) if last == "symexp" else x)


def bottleneck(strided: str = "middle", shortcut: str = "conv", end: bool = False, last: str = "relu") -> Any:
    """A residual bottleneck with a strided shortcut."""
    inputs = layers.Input((8, 8, 4))
    y = layers.Conv2D(3, 1, 2 if strided == "first" else 1, name="conv1")(inputs)
    y = layers.ZeroPadding2D(((0, 1), (0, 1)) if end else 1)(ops.relu(_norm("norm1", y)))
    y = ops.relu(_norm("norm2", layers.Conv2D(3, 3, 1 if strided == "first" else 2, name="conv2")(y)))
    y = _norm("norm3", layers.Conv2D(6, 1, name="conv3")(y))
    x = layers.AveragePooling2D(2)(inputs) if shortcut == "mean" else inputs
    x = layers.Conv2D(6, 1, 1 if shortcut == "mean" else 2, name="side")(x)
    y = layers.Add()([y, x if shortcut == "no norm" else _norm("norm", x)])
    y = ops.relu(y) if last == "relu" else y
    return keras.Model(inputs, _dense(2, "head", layers.GlobalAveragePooling2D()(y)))


def tcn_block(fill: str = "zeros", dilation: int = 2, last: str = "relu", skip: str = "side") -> Any:
    """Two dilated causal convolutions with a residual."""
    y = inputs = layers.Input((9, 3))
    for name, width in (("conv1", 1), ("conv2", dilation)):
        if fill == "zeros":
            y = layers.ZeroPadding1D((width, 0))(y)
        else:
            y = ops.pad(y, ((0, 0), (width, 0), (0, 0)), {"replicate": "edge"}.get(fill, fill))
        y = layers.Conv1D(6, 2, dilation_rate=width, activation="relu", name=name)(y)
    y = y + layers.Conv1D(6, 1, name="side")(inputs) if skip == "side" else y
    y = ops.relu(y) if last == "relu" else y
    return keras.Model(inputs, _dense(2, "head", y[:, -1]))


def impala(
    divisor: float = 255.0, pool: str = "both", first: bool = True, keep: str = "x", last: bool = True
) -> Any:
    """A pooled convolution, a residual block of activations before convolutions, and dense layers."""
    inputs = layers.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same", name="conv")(inputs / divisor)
    if pool == "both":
        x = ops.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-1e9)
        x = layers.MaxPooling2D(3, 2)(x)
    else:
        x = layers.MaxPooling2D(3, 2, padding="same")(x)
    y = ops.relu(x)
    z = layers.Conv2D(4, 3, padding="same", activation="relu", name="res1")(y if first else x)
    x = layers.Conv2D(4, 3, padding="same", name="res2")(z) + (y if keep == "relu" else x)
    x = layers.Flatten()(ops.relu(x) if last else x)
    return keras.Model(inputs, _dense(2, "head", _dense(6, "hidden", x, "relu")))


def bag(mask: str = "words", over: str = "count") -> Any:
    """The mean of the embeddings of the words that are no padding."""
    words = layers.Input((7,), dtype="int32")
    x = layers.Embedding(4, 6, name="embed")(words)
    keep = ops.equal(words, 0) if mask == "inverted" else ops.not_equal(words, 0)
    keep = ops.expand_dims(ops.cast(keep, "float32"), -1)
    keep = ops.ones_like(keep) if mask == "none" else keep
    x, count = ops.sum(x * keep, 1), ops.maximum(ops.sum(keep, 1), 1.0)
    forms = {"count": lambda: x / count, "length": lambda: x / 7, "root": lambda: x / ops.sqrt(count)}
    x = forms.get(over, lambda: x)()
    return keras.Model(words, _dense(2, "out", _dense(8, "hidden", x, "relu")))


def siamese(difference: str = "abs", order: str = "dp", last: str = "sigmoid", active: str = "relu") -> Any:
    """Two inputs through the same layers; their distance and their product are compared."""
    one, two = layers.Input((5,), name="one"), layers.Input((5,), name="two")
    first, second = layers.Dense(8, activation=active, name="first"), layers.Dense(4, name="second")
    a, b = (second(first(x)) for x in (one, two))
    forms = {"abs": lambda: ops.abs(a - b), "square": lambda: ops.square(a - b), "none": lambda: a - b}
    by_name = {"d": forms[difference](), "p": a * b}
    y = layers.Concatenate()([by_name[name] for name in order])
    return keras.Model([one, two], _dense(2, "head", y, last or None))


def deep_sets(pool: str = "sum", late: bool = False, centred: bool = True) -> Any:
    """Features of a set's members around their mean, summed."""
    inputs = layers.Input((5, 4))
    x = inputs - ops.mean(inputs, 1, keepdims=True) if centred else inputs
    x = _dense(6, "second", _dense(6, "first", x, "relu"), None if late else "relu")
    x = {"sum": ops.sum, "mean": ops.mean, "max": ops.max}[pool](x, 1)
    return keras.Model(inputs, _dense(2, "out", ops.relu(x) if late else x))


def bilinear(matrix: str = "", unit: bool = True, heat: float = 0.1, against: str = "two") -> Any:
    """The similarity of two inputs by a matrix."""
    x, y = layers.Input((5,), name="x"), layers.Input((4,), name="y")
    a, b = _dense(6, "one", x), _dense(6, "two", y)
    a, b = (ops.normalize(item, -1) if unit else item for item in (a, b))
    turned = matrix == "turned"
    a = Own((6, 6), lambda z, w: ops.matmul(z, ops.transpose(w) if turned else w), name="matrix")(a)
    return keras.Model([x, y], ops.sum(a * b, -1, keepdims=True) / heat)


def mixture_density(spread: str = "elu", axis: int = -1, turned: bool = False, weigh: str = "softmax") -> Any:
    """The mean of a mixture of distributions, and their deviations."""
    inputs = layers.Input((5,))
    x = _dense(8, "body", inputs, "tanh")
    mu = _dense(6, "mu", x)
    mu = layers.Permute((2, 1))(layers.Reshape((2, 3))(mu)) if turned else layers.Reshape((3, 2))(mu)
    pi = _dense(3, "pi", x)
    shares = ops.sigmoid(pi) if weigh == "sigmoid" else getattr(ops, weigh)(pi, axis)
    s = _dense(3, "sigma", x)
    s = ops.elu(s) + 1 if spread == "elu" else ops.exp(s)
    return keras.Model(inputs, [ops.sum(ops.expand_dims(shares, -1) * mu, 1), s])


def fourier(turn: float = 2 * math.pi, order: str = "sc") -> Any:
    """Sines and cosines of random projections."""
    inputs = layers.Input((3,))
    z = turn * Own((3, 6), ops.matmul, name="project")(inputs)
    parts = {"s": ops.sin(z), "c": ops.cos(z)}
    if order == "next":
        y = ops.reshape(ops.stack([parts["s"], parts["c"]], -1), (-1, 12))
    else:
        y = layers.Concatenate()([parts[name] for name in order])
    return keras.Model(inputs, _dense(2, "out", _dense(8, "hidden", y, "relu")))


def diffusion(
    order: str = "cs", period: float = 1e4, groups: int = 2, skip: float = 1.0, active: bool = True
) -> Any:
    """A residual block of an image whose channels a time shifts."""
    x, t = layers.Input((6, 6, 4), name="x"), layers.Input((1,), name="t")
    z = t * np.exp(-math.log(period) * np.arange(4) / 4).astype("float32")
    parts = {"s": ops.sin(z), "c": ops.cos(z)}
    e = layers.Concatenate()([parts[name] for name in order])
    e = _dense(4, "time2", _dense(8, "time1", e, "silu" if active else None))
    y = ops.silu(layers.GroupNormalization(2, epsilon=1e-5, name="norm1")(x))
    y = layers.Conv2D(4, 3, padding="same", name="conv1")(y) + layers.Reshape((1, 1, 4))(e)
    y = ops.silu(layers.GroupNormalization(groups, epsilon=1e-5, name="norm2")(y))
    y = layers.Conv2D(4, 3, padding="same", name="conv2")(y)
    return keras.Model([x, t], (x + y) * skip if skip else y)


def stepper(states: str = "hc", returns: str = "hc", out: str = "h") -> Any:
    """One step of an LSTM with the states as inputs and outputs."""
    x, h, c = (layers.Input((size,), name=name) for name, size in (("x", 4), ("h", 6), ("c", 6)))
    by_name = {"h": h, "c": c}
    rnn = layers.LSTM(6, return_state=True, name="rnn")
    y, h2, c2 = rnn(layers.Reshape((1, 4))(x), initial_state=[by_name[name] for name in states])
    new = {"h": h2, "c": c2, "old": h}
    last = _dense(2, "head", y if out == "h" else c2)
    rest = [new[name] for name in (returns if returns != "old" else ("old", "c"))]
    return keras.Model([x, h, c], [last, *rest])


def observations(
    eps: str = "inside", root: bool = True, high: float = 2.0, early: bool = False, centre: bool = True
) -> Any:
    """Clipped inputs with mean 0 and deviation 1, and bounded actions."""

    def divide(x: Any, variance: Any) -> Any:
        scale = ops.sqrt(variance + 0.01) if eps == "inside" else ops.sqrt(variance) + 0.01
        return x / (scale if root else variance)

    inputs = layers.Input((6,))
    x = ops.clip(inputs, -high, high) if early else inputs
    x = Own((6,), ops.subtract, name="mean")(x) if centre else x
    x = Own((6,), divide, name="variance")(x)
    x = x if early else ops.clip(x, -high, high)
    return keras.Model(inputs, _dense(3, "out", _dense(8, "hidden", x, "relu"), "tanh"))


def xception(early: bool = True, pool: str = "max", skip: str = "+", location: str = "after") -> Any:
    """A separable convolution, a norm and a pooling beside a strided convolution."""
    inputs = layers.Input((8, 8, 4))
    y = ops.relu(inputs) if early else inputs
    y = layers.DepthwiseConv2D(3, padding="same", use_bias=False, name="depth")(y)
    y = _norm("norm", layers.Conv2D(6, 1, name="point")(y))
    y = layers.MaxPooling2D(2)(y) if pool == "max" else layers.AveragePooling2D(2)(y)
    z = layers.Conv2D(6, 1, 2, name="side")(inputs)
    y = y - z if skip == "-" else layers.Add()([y, z]) if skip == "+" else y
    return keras.Model(inputs, _dense(3, "head", layers.GlobalAveragePooling2D()(y)))


def sentence(states: str = "last", halves: str = "fb", active: str = "tanh") -> Any:
    """The last states of both directions of a GRU over words."""
    words = layers.Input((6,), dtype="int32")
    rnn = layers.GRU(5, return_sequences=True, return_state=True)
    x = layers.Embedding(11, 4, name="embed")(words)
    y, f, b = layers.Bidirectional(rnn, name="both")(x)
    by_name = {"f": f, "b": b}
    x = layers.Concatenate()([by_name[name] for name in halves])
    x = y[:, -1] if states == "last step" else ops.mean(y, 1) if states == "mean" else x
    return keras.Model(words, _dense(2, "head", _dense(6, "mix", x, active)))


def gemma_block(
    one: bool = True, approximate: str = "tanh", cap: float = 3.0, scale: float = 8**0.5, eps: float = 1e-6
) -> Any:
    """A gated block after a root-mean-square norm with 1 added to its weight; capped outputs."""

    def normal(x: Any, weight: Any) -> Any:
        x = x * ops.rsqrt(ops.mean(ops.square(x), -1, keepdims=True) + eps)
        return x * (1 + weight) if one else x * weight

    words = layers.Input((4,), dtype="int32")
    x = layers.Embedding(11, 8, name="embed")(words) * scale
    y = Own((8,), normal, name="norm")(x)
    gate = ops.gelu(_dense(12, "gate", y), approximate=approximate == "tanh")
    x = _dense(5, "out", x + _dense(8, "down", gate * _dense(12, "up", y)))
    return keras.Model(words, cap * ops.tanh(x / cap) if cap else x)


def alibi(
    slopes: tuple[float, ...] = (0.5, 0.25),
    diagonal: int = 1,
    sign: float = -1.0,
    joined: str = "heads first",
) -> Any:
    """Causal attention whose scores fall with the distance, with a slope for each head."""
    steps = np.arange(6.0)
    distance = np.maximum(steps[:, None] - steps, 0)
    bias = (sign * np.array(slopes)[:, None, None] * distance).astype("float32")
    hidden = np.triu(np.ones((6, 6)), diagonal).astype(bool)
    x = layers.Input((6, 8))
    q, k, v = (_split(_dense(8, name, x), 2) for name in ("query", "key", "value"))
    scores = ops.where(hidden, -1e9, _scores(q, k) / 2 + bias)
    y = ops.matmul(ops.softmax(scores, -1), v)
    y = ops.transpose(y, (0, 2, 1, 3) if joined == "heads first" else (0, 2, 3, 1))
    return keras.Model(x, _dense(4, "proj", ops.reshape(y, (-1, 6, 8))))


def positions(
    offset: int = 2, kinds: bool = True, eps: float = 1e-12, use: str = "first", last: str = "tanh"
) -> Any:
    """Words, positions from the third row of a table, and a kind of text; a dense layer on the first word."""
    words = layers.Input((6,), dtype="int32")
    x = layers.Embedding(11, 8, name="words")(words)
    zeros = ops.zeros_like(words)
    x = x + layers.Embedding(9, 8, name="places")(zeros + np.arange(offset, offset + 6, dtype="int32"))
    x = x + layers.Embedding(2, 8, name="kinds")(zeros) if kinds else x
    x = layers.LayerNormalization(epsilon=eps, name="norm")(x)
    x = {"first": lambda: x[:, 0], "last": lambda: x[:, -1], "mean": lambda: ops.mean(x, 1)}[use]()
    return keras.Model(words, _dense(3, "head", _dense(8, "mix", x, last)))
