"""Programs that both frameworks build as models: layers by name, and what moves numbers between them.

A program is written once, in terms of images [C, H, W], vectors, sequences [T, F] and frames [T, C, H, W];
each framework builds it with its own order of axes (torch_side.py, keras_side.py). No framework is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Shape = tuple[int, ...]


class Value(NamedTuple):
    """One intermediate result: its number, what it is, and its shape, an image's with the channels first."""

    number: int
    kind: str
    shape: Shape


class Line(NamedTuple):
    """One step: `op` makes the value `out` of `ins`, with the layer `name` if it has weights."""

    out: Value
    op: str
    ins: tuple[Value, ...]
    name: str
    args: dict[str, Any]


@dataclass
class Program:
    """A model: its inputs, its steps, its outputs.

    Args:
        natural: Whether each framework flattens and reshapes in its own order throughout.
        torch_names: Names of the layers in PyTorch, where they are others.
    """

    name: str = ""
    natural: bool = True
    inputs: list[Value] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    words: int = 0
    torch_names: dict[str, str] = field(default_factory=dict)
    _count: int = 0

    def value(self, kind: str, *shape: int) -> Value:
        self._count += 1
        return Value(self._count, kind, tuple(shape))

    def stated(self, kind: str, *shape: int) -> Value:
        value = self.value(kind, *shape)
        self.inputs.append(value)
        return value

    def step(self, op: str, ins: Sequence[Value], out: Value, name: str = "", **args: Any) -> Value:
        self.lines.append(Line(out, op, tuple(ins), name, args))
        return out

    # --- Layers -----------------------------------------------------------------------------------------

    def conv(self, x: Value, filters: int, name: str, kernel: int = 3, stride: int = 1, **args: Any) -> Value:
        size = tuple((extent - kernel) // stride + 1 for extent in x.shape[1:])
        return self.step(
            "conv", [x], self.value("image", filters, *size), name, kernel=kernel, stride=stride, **args
        )

    def convt(self, x: Value, filters: int, name: str, kernel: int = 2, stride: int = 2) -> Value:
        size = tuple((extent - 1) * stride + kernel for extent in x.shape[1:])
        return self.step(
            "convt", [x], self.value("image", filters, *size), name, kernel=kernel, stride=stride
        )

    def depthwise(self, x: Value, name: str, kernel: int = 3) -> Value:
        size = tuple(extent - kernel + 1 for extent in x.shape[1:])
        return self.step("depthwise", [x], self.value("image", x.shape[0], *size), name, kernel=kernel)

    def same(self, op: str, x: Value, name: str = "", **args: Any) -> Value:
        return self.step(op, [x], self.value(x.kind, *x.shape), name, **args)

    def relu(self, x: Value) -> Value:
        return self.same("relu", x)

    def bn(self, x: Value, name: str) -> Value:
        return self.same("bn", x, name)

    def ln(self, x: Value, name: str) -> Value:
        return self.same("ln", x, name)

    def prelu(self, x: Value, name: str) -> Value:
        return self.same("prelu", x, name)

    def dense(self, x: Value, units: int, name: str, **args: Any) -> Value:
        return self.step("dense", [x], self.value(x.kind, *x.shape[:-1], units), name, **args)

    def lstm(self, x: Value, units: int, name: str, kind: str = "lstm", sequences: bool = False) -> Value:
        out = self.value("sequence", x.shape[0], units) if sequences else self.value("vector", units)
        return self.step(kind, [x], out, name, sequences=sequences)

    def attention(self, x: Value, heads: int, name: str) -> Value:
        return self.same("attention", x, name, heads=heads)

    def embed(self, x: Value, units: int, name: str) -> Value:
        out = self.value("sequence", *x.shape, units)
        return self.step("embed", [x], out, name, words=self.words)

    # --- What moves numbers -----------------------------------------------------------------------------

    def pool(self, x: Value) -> Value:
        size = tuple(extent // 2 for extent in x.shape[1:])
        return self.step("pool", [x], self.value("image", x.shape[0], *size))

    def gap(self, x: Value) -> Value:
        return self.step("gap", [x], self.value("vector", x.shape[0]))

    def flatten(self, x: Value, order: str = "own") -> Value:
        """Flatten an image: in each framework's own order, or channels "last" or "first" in both."""
        self.natural = self.natural and order == "own"
        if x.kind == "frames":
            out = self.value("sequence", x.shape[0], math.prod(x.shape[1:]))
        else:
            out = self.value("vector", math.prod(x.shape))
        return self.step("flatten", [x], out, order=order)

    def image(self, x: Value, *shape: int, order: str = "own") -> Value:
        """Reshape a vector into an image [C, H, W], the inverse of `flatten`."""
        self.natural = self.natural and order == "own"
        return self.step("image", [x], self.value("image", *shape), order=order)

    def patches(self, x: Value) -> Value:
        """Make a sequence of an image's places."""
        channels, *size = x.shape
        return self.step("patches", [x], self.value("sequence", math.prod(size), channels))

    def concat(self, *values: Value) -> Value:
        first = values[0]
        axis = 0 if first.kind == "image" else len(first.shape) - 1
        shape = list(first.shape)
        shape[axis] = sum(value.shape[axis] for value in values)
        return self.step("concat", values, self.value(first.kind, *shape))

    def shuffle(self, x: Value, factor: int = 2) -> Value:
        """Make places of channels, in each framework's own order of them."""
        channels, *size = x.shape
        out = self.value("image", channels // factor**2, *(extent * factor for extent in size))
        return self.step("shuffle", [x], out, factor=factor)

    def unshuffle(self, x: Value, factor: int = 2) -> Value:
        """Make channels of places, in each framework's own order of them."""
        channels, *size = x.shape
        out = self.value("image", channels * factor**2, *(extent // factor for extent in size))
        return self.step("unshuffle", [x], out, factor=factor)

    def add(self, one: Value, two: Value) -> Value:
        return self.step("add", [one, two], self.value(one.kind, *one.shape))

    def multiply(self, one: Value, two: Value) -> Value:
        return self.step("multiply", [one, two], self.value(one.kind, *one.shape))

    def scale(self, image: Value, gate: Value) -> Value:
        """Multiply each channel of an image by one number."""
        return self.step("scale", [image, gate], self.value("image", *image.shape))

    def mean(self, x: Value) -> Value:
        return self.step("mean", [x], self.value("vector", x.shape[-1]))

    def done(self, *values: Value) -> Program:
        self.outputs = list(values)
        return self


PROGRAMS: dict[str, Callable[[], Program]] = {}


def _put(name: str, make: Callable[[Program], Program]) -> None:
    def output() -> Program:
        return make(Program(name))

    PROGRAMS[name] = output


def program(name: str) -> Program:
    """Return the program of that name; raise KeyError if there is none."""
    return PROGRAMS[name]()


# --- Convolutions, then dense layers --------------------------------------------------------------------


def _cnn(
    p: Program,
    size: Shape,
    *,
    norm: str = "",
    pool: bool = False,
    order: str = "own",
    side: int = 0,
    before: bool = False,
    head: str = "dense",
    twice: bool = False,
    after: str = "",
) -> Program:
    x = p.stated("image", *size)
    x = p.relu(p.conv(x, 4, "conv1"))
    if norm == "bn":
        x = p.bn(x, "norm1")
    x = p.relu(p.conv(x, 5, "conv2", kernel=2))
    if pool:
        x = p.pool(x)
    if head == "gap":
        return p.done(p.dense(p.gap(x), 3, "out"))
    x = p.flatten(x, order)
    if after:
        x = p.same(after, x, "norm2")
    if side:
        more = p.stated("vector", side)
        x = p.concat(more, x) if before else p.concat(x, more)
    if twice:
        value, advantage = p.dense(x, 1, "value"), p.dense(x, 4, "advantage")
        return p.done(value, advantage)
    x = p.relu(p.dense(x, 7, "hidden"))
    return p.done(p.dense(x, 3, "out"))


_IMAGES: dict[str, Shape] = {"1d": (3, 11), "2d": (3, 9, 8), "3d": (2, 6, 7, 5)}
for _rank, _size in _IMAGES.items():
    for _name, _how in {
        "plain": {},
        "bn": {"norm": "bn"},
        "pool": {"pool": True},
        "last": {"order": "last"},
        "first": {"order": "first"},
        "side": {"side": 5},
        "side_before": {"side": 5, "before": True},
        "side_last": {"side": 5, "order": "last"},
        "gap": {"head": "gap"},
        "heads": {"twice": True},
        "norm_bn": {"after": "bn"},
        "norm_ln": {"after": "ln"},
    }.items():
        _put(f"cnn{_rank}_{_name}", lambda p, size=_size, how=_how: _cnn(p, size, **how))


def _branches(p: Program, *, order: str = "own") -> Program:
    """Two images, each flattened, and a vector, into one dense layer."""
    a = p.flatten(p.relu(p.conv(p.stated("image", 3, 6, 7), 4, "left")), order)
    b = p.flatten(p.relu(p.conv(p.stated("image", 2, 5, 4), 3, "right")), order)
    v = p.relu(p.dense(p.stated("vector", 6), 8, "vector"))
    return p.done(p.dense(p.relu(p.dense(p.concat(a, v, b), 9, "hidden")), 2, "out"))


def _flat_heads(p: Program) -> Program:
    x = p.flatten(p.relu(p.conv(p.stated("image", 3, 6, 7), 4, "conv")))
    hidden = p.relu(p.dense(x, 10, "hidden"))
    return p.done(p.dense(hidden, 3, "mean"), p.dense(hidden, 3, "log_std"))


def _recurrent(p: Program, kind: str = "lstm", order: str = "own") -> Program:
    x = p.stated("frames", 3, 2, 6, 5)
    x = p.step("td_conv", [x], p.value("frames", 3, 4, 4, 3), "conv", kernel=3)
    return p.done(p.dense(p.lstm(p.flatten(x, order), 6, "memory", kind), 2, "out"))


def _rows(p: Program) -> Program:
    """An image's places as a sequence: the same order of features everywhere."""
    x = p.patches(p.relu(p.conv(p.stated("image", 3, 6, 7), 4, "conv")))
    return p.done(p.dense(p.lstm(x, 6, "memory"), 2, "out"))


_put("branches", _branches)
_put("branches_last", lambda p: _branches(p, order="last"))
_put("flat_heads", _flat_heads)
for _kind in ("lstm", "gru"):
    _put(f"frames_{_kind}", lambda p, kind=_kind: _recurrent(p, kind))
_put("frames_last", lambda p: _recurrent(p, order="last"))
_put("rows_lstm", _rows)


# --- Decoders -------------------------------------------------------------------------------------------


def _decoder(
    p: Program, shape: Shape = (6, 3, 4), *, order: str = "own", norm: str = "", prelu: bool = False
) -> Program:
    z = p.stated("vector", 5)
    x = p.dense(z, math.prod(shape), "fc", bias=norm != "bn")
    if norm:
        x = p.same(norm, x, "norm")
    x = p.prelu(x, "slope") if prelu else p.relu(x)
    x = p.image(x, *shape, order=order)
    x = p.relu(p.convt(x, 4, "up1"))
    return p.done(p.convt(x, 2, "up2"))


for _name, _how in {
    "plain": {},
    "last": {"order": "last"},
    "first": {"order": "first"},
    "bn": {"norm": "bn"},
    "ln": {"norm": "ln"},
    "prelu": {"prelu": True},
    "1d": {"shape": (6, 4)},
    "3d": {"shape": (4, 2, 3, 2)},
    "square": {"shape": (4, 4, 4)},
}.items():
    _put(f"decoder_{_name}", lambda p, how=_how: _decoder(p, **how))


def _vae(p: Program, *, order: str = "own", split: bool = True) -> Program:
    x = p.relu(p.conv(p.stated("image", 3, 8, 10), 4, "conv1", stride=2))
    shape = x.shape
    x = p.flatten(x, order)
    z = p.dense(x, 5, "mean")
    if split:
        spread = p.dense(x, 5, "log_var")
        z = p.add(z, spread)
    x = p.relu(p.dense(z, math.prod(shape), "expand"))
    return p.done(p.convt(p.image(x, *shape, order=order), 3, "up", kernel=4))


_put("vae", _vae)
_put("vae_last", lambda p: _vae(p, order="last"))
_put("autoencoder", lambda p: _vae(p, split=False))


def _conditional(p: Program) -> Program:
    """A generator whose label and noise become an image's channels."""
    z, label = p.stated("vector", 5), p.stated("vector", 3)
    one = p.image(p.relu(p.dense(z, 4 * 3 * 4, "noise")), 4, 3, 4)
    two = p.image(p.relu(p.dense(label, 2 * 3 * 4, "label")), 2, 3, 4)
    return p.done(p.convt(p.concat(one, two), 3, "up"))


def _dcgan(p: Program) -> Program:
    z = p.stated("vector", 6)
    x = p.bn(p.dense(z, 8 * 2 * 3, "project", bias=False), "bn0")
    x = p.relu(p.image(x, 8, 2, 3))
    x = p.relu(p.bn(p.convt(x, 6, "up1"), "bn1"))
    return p.done(p.convt(x, 3, "up2"))


def _discriminator(p: Program) -> Program:
    x = p.relu(p.conv(p.stated("image", 3, 9, 8), 4, "conv1", stride=2))
    x = p.relu(p.bn(p.conv(x, 6, "conv2", kernel=2), "bn1"))
    return p.done(p.dense(p.flatten(x), 1, "judge"))


def _residual_decoder(p: Program) -> Program:
    """Two dense layers are added and become an image."""
    z = p.stated("vector", 5)
    one, two = p.dense(z, 4 * 3 * 2, "one"), p.dense(z, 4 * 3 * 2, "two")
    return p.done(p.convt(p.image(p.add(one, two), 4, 3, 2), 2, "up"))


def _gated(p: Program) -> Program:
    """What a vector makes scales a flattened image."""
    x = p.flatten(p.relu(p.conv(p.stated("image", 2, 6, 5), 3, "conv")))
    gate = p.dense(p.stated("vector", 4), x.shape[0], "gate")
    return p.done(p.dense(p.multiply(x, gate), 2, "out"))


def _hidden_square(p: Program) -> Program:
    """A dense layer from a flattened image to a flattened image."""
    x = p.relu(p.conv(p.stated("image", 2, 6, 5), 3, "conv"))
    shape = x.shape
    x = p.relu(p.dense(p.flatten(x), math.prod(shape), "mix"))
    return p.done(p.conv(p.image(x, *shape), 2, "last", kernel=2))


for _outputs in (
    _conditional,
    _dcgan,
    _discriminator,
    _residual_decoder,
    _gated,
    _hidden_square,
):
    _put(_outputs.__name__.lstrip("_"), _outputs)


# --- No image is flattened ------------------------------------------------------------------------------


def _mlp(p: Program, widths: Sequence[int] = (7, 5, 3), norm: str = "") -> Program:
    x = p.stated("vector", 6)
    for number, width in enumerate(widths[:-1]):
        x = p.dense(x, width, f"fc{number + 1}")
        if norm:
            x = p.same(norm, x, f"norm{number + 1}")
        x = p.relu(x)
    return p.done(p.dense(x, widths[-1], "out"))


_put("mlp", _mlp)
_put("mlp_square", lambda p: _mlp(p, (6, 6, 6)))
_put("mlp_bn", lambda p: _mlp(p, norm="bn"))
_put("mlp_ln", lambda p: _mlp(p, norm="ln"))


def _dueling(p: Program) -> Program:
    x = p.relu(p.dense(p.stated("vector", 6), 8, "trunk"))
    return p.done(
        p.dense(p.relu(p.dense(x, 8, "value1")), 1, "value2"),
        p.dense(p.relu(p.dense(x, 8, "advantage1")), 4, "advantage2"),
    )


def _two_inputs(p: Program) -> Program:
    x = p.concat(p.stated("vector", 5), p.stated("vector", 3))
    return p.done(p.dense(p.relu(p.dense(x, 8, "fc1")), 1, "fc2"))


def _siamese(p: Program) -> Program:
    one, two = p.stated("vector", 5), p.stated("vector", 5)
    a, b = p.relu(p.dense(one, 6, "shared")), p.relu(p.dense(two, 6, "shared"))
    return p.done(p.dense(p.concat(a, b), 1, "out"))


def _siamese_images(p: Program) -> Program:
    one, two = p.stated("image", 2, 6, 5), p.stated("image", 2, 6, 5)
    a, b = (p.flatten(p.relu(p.conv(image, 3, "shared"))) for image in (one, two))
    return p.done(p.dense(p.concat(a, b), 2, "out"))


def _resnet(p: Program) -> Program:
    x = p.relu(p.bn(p.conv(p.stated("image", 3, 9, 8), 4, "stem"), "bn0"))
    y = p.relu(p.bn(p.conv(x, 4, "conv1", kernel=1), "bn1"))
    x = p.relu(p.add(x, p.bn(p.conv(y, 4, "conv2", kernel=1), "bn2")))
    return p.done(p.dense(p.gap(x), 3, "out"))


def _resnet_flat(p: Program) -> Program:
    x = p.relu(p.conv(p.stated("image", 3, 7, 6), 4, "stem"))
    x = p.relu(p.add(x, p.conv(x, 4, "conv1", kernel=1)))
    return p.done(p.dense(p.flatten(x), 3, "out"))


def _u_net(p: Program) -> Program:
    x = p.stated("image", 3, 8, 12)
    one = p.relu(p.conv(x, 4, "enc1", kernel=1))
    two = p.relu(p.conv(p.pool(one), 6, "enc2", kernel=1))
    up = p.convt(two, 4, "up")
    return p.done(p.conv(p.relu(p.conv(p.concat(up, one), 5, "dec", kernel=1)), 2, "out", kernel=1))


def _separable(p: Program) -> Program:
    x = p.relu(p.depthwise(p.stated("image", 3, 8, 7), "depthwise"))
    x = p.relu(p.conv(x, 5, "pointwise", kernel=1))
    return p.done(p.dense(p.flatten(x), 3, "out"))


def _squeeze(p: Program) -> Program:
    """Squeeze and excitation: a vector of channels, and no flattened image."""
    x = p.relu(p.conv(p.stated("image", 3, 7, 6), 8, "conv"))
    gate = p.dense(p.relu(p.dense(p.gap(x), 4, "squeeze")), 8, "excite")
    return p.done(p.dense(p.multiply(p.gap(x), gate), 3, "out"))


def _squeeze_flat(p: Program) -> Program:
    """A squeeze-excite block, whose image is flattened."""
    x = p.relu(p.conv(p.stated("image", 3, 7, 6), 8, "conv"))
    gate = p.dense(p.relu(p.dense(p.gap(x), 4, "squeeze")), 8, "excite")
    return p.done(p.dense(p.flatten(p.scale(x, gate)), 3, "out"))


def _super_resolution(p: Program) -> Program:
    """Convolutions whose channels become places: one before a convolution, one at the end."""
    x = p.relu(p.conv(p.stated("image", 2, 6, 5), 12, "wide"))
    x = p.relu(p.conv(p.shuffle(x), 8, "next", kernel=2))
    return p.done(p.shuffle(x))


def _focus(p: Program) -> Program:
    """An image whose places become channels first, and again between convolutions."""
    x = p.relu(p.conv(p.unshuffle(p.stated("image", 3, 12, 8)), 4, "stem", kernel=1))
    x = p.bn(p.conv(p.unshuffle(x), 6, "next", kernel=2), "norm")
    return p.done(p.dense(p.flatten(p.relu(x)), 3, "out"))


def _transposed_flat(p: Program) -> Program:
    """What a transposed convolution gives, flattened."""
    x = p.relu(p.convt(p.stated("image", 3, 3, 4), 5, "up"))
    return p.done(p.dense(p.relu(p.dense(p.flatten(x), 6, "hidden")), 2, "out"))


def _both_sides(p: Program, *, order: str = "own") -> Program:
    """A flattened image between two vectors, one of them a layer's."""
    x = p.flatten(p.relu(p.conv(p.stated("image", 3, 6, 5), 4, "conv")), order)
    one, two = p.stated("vector", 3), p.relu(p.dense(p.stated("vector", 4), 5, "encode"))
    return p.done(p.dense(p.relu(p.dense(p.concat(one, x, two), 7, "hidden")), 2, "out"))


def _flat_recurrent(p: Program, order: str = "own") -> Program:
    """A flattened image as a sequence of one step."""
    x = p.flatten(p.relu(p.conv(p.stated("image", 3, 6, 5), 4, "conv")), order)
    x = p.step("step", [x], p.value("sequence", 1, x.shape[0]))
    return p.done(p.dense(p.lstm(x, 6, "memory", "gru"), 2, "out"))


def _deep(p: Program) -> Program:
    """Blocks of convolutions with norms and pools, then two dense layers."""
    x = p.stated("image", 3, 14, 12)
    for number, width in enumerate((4, 6, 6)):
        x = p.relu(p.bn(p.conv(x, width, f"conv{number + 1}", kernel=2), f"norm{number + 1}"))
        x = p.pool(x) if number else x
    return p.done(p.dense(p.relu(p.dense(p.flatten(x), 8, "fc1")), 4, "fc2"))


def _encoder(p: Program) -> Program:
    x = p.stated("sequence", 5, 8)
    x = p.ln(p.add(x, p.attention(x, 2, "attention")), "norm1")
    y = p.dense(p.relu(p.dense(x, 16, "ff1")), 8, "ff2")
    return p.done(p.dense(p.mean(p.ln(p.add(x, y), "norm2")), 3, "out"))


def _transformer(p: Program) -> Program:
    p.words = 11
    x = p.embed(p.stated("tokens", 5), 8, "words")
    x = p.same("positions", x, "places")
    q, k, v = (p.dense(x, 8, part) for part in ("query", "key", "value"))
    x = p.ln(p.add(x, p.dense(p.step("attend", [q, k, v], p.value("sequence", 5, 8)), 8, "project")), "norm1")
    return p.done(p.dense(p.ln(x, "norm2"), 11, "head"))


def _vit(p: Program) -> Program:
    x = p.patches(p.conv(p.stated("image", 3, 8, 6), 8, "patch", kernel=2, stride=2))
    x = p.add(x, p.attention(p.ln(x, "norm1"), 2, "attention"))
    return p.done(p.dense(p.mean(x), 3, "out"))


def _recommender(p: Program) -> Program:
    p.words = 9
    user, item = p.stated("tokens", 1), p.stated("tokens", 1)
    x = p.concat(p.mean(p.embed(user, 4, "user")), p.mean(p.embed(item, 4, "item")))
    return p.done(p.dense(p.relu(p.dense(x, 8, "hidden")), 1, "score"))


def _sequence_flat(p: Program, kind: str = "lstm") -> Program:
    """A flattened sequence, whose features stand last in both frameworks."""
    x = p.lstm(p.stated("sequence", 5, 4), 6, "memory", kind, sequences=True)
    return p.done(p.dense(p.step("rows", [x], p.value("vector", 30)), 3, "out"))


def _embedding_flat(p: Program) -> Program:
    p.words = 9
    x = p.embed(p.stated("tokens", 5), 4, "words")
    return p.done(p.dense(p.step("rows", [x], p.value("vector", 20)), 3, "out"))


def _conv_lstm(p: Program) -> Program:
    x = p.patches(p.relu(p.conv(p.stated("image", 4, 9), 6, "conv")))
    return p.done(p.dense(p.lstm(x, 5, "memory"), 2, "out"))


def _mixture(p: Program) -> Program:
    x = p.relu(p.dense(p.stated("vector", 5), 9, "body"))
    return p.done(p.dense(x, 4, "logits"), p.dense(x, 12, "means"), p.dense(x, 12, "spreads"))


def _autoencoder_square(p: Program) -> Program:
    x = p.stated("vector", 6)
    for name in ("down1", "down2", "up1"):
        x = p.relu(p.dense(x, 6, name))
    return p.done(p.dense(x, 6, "up2"))


def _stacked(p: Program) -> Program:
    x = p.lstm(p.stated("sequence", 5, 4), 6, "first", sequences=True)
    return p.done(p.dense(p.lstm(x, 5, "second", "gru"), 2, "out"))


def _flat_input(p: Program) -> Program:
    """An image that no convolution sees, flattened."""
    return p.done(p.dense(p.relu(p.dense(p.flatten(p.stated("image", 1, 6, 5)), 7, "fc1")), 3, "fc2"))


def _flat_colors(p: Program) -> Program:
    p.natural = False
    return p.done(p.dense(p.relu(p.dense(p.flatten(p.stated("image", 3, 6, 5)), 7, "fc1")), 3, "fc2"))


for _outputs in (
    _dueling,
    _two_inputs,
    _siamese,
    _siamese_images,
    _resnet,
    _resnet_flat,
    _u_net,
    _separable,
    _squeeze,
    _squeeze_flat,
    _super_resolution,
    _focus,
    _transposed_flat,
    _both_sides,
    _flat_recurrent,
    _deep,
    _encoder,
    _transformer,
    _vit,
    _recommender,
    _sequence_flat,
    _embedding_flat,
    _conv_lstm,
    _mixture,
    _autoencoder_square,
    _stacked,
    _flat_input,
    _flat_colors,
):
    _put(_outputs.__name__.lstrip("_"), _outputs)


def parts(program: Program, title: str, texts: Sequence[str], *, makes: bool) -> str | None:
    """Return what `--flatten` or `--unflatten` says of a layer: `30,5+4`, or `no`.

    A layer that takes an image in an order of its own takes none that would have to be reordered. One whose
    name the file lacks is known by the length that the options `texts` give; None if that is not enough.
    """
    names = {line.name: line for line in program.lines if line.name}
    names |= {program.torch_names.get(name, name): line for name, line in names.items()}
    line = next((names[part] for part in reversed(title.split("/")) if part in names), None)
    if line is None:
        lengths = {_length(text) for text in texts if not text.endswith("=no")}
        able = {
            parts(program, name, (), makes=makes)
            for name, line in names.items()
            if len(line.out.shape) == 1 and math.prod((line.out if makes else line.ins[0]).shape) in lengths
        }
        return able.pop() if len(able) == 1 else None
    if line.op in ("conv", "convt"):
        ways = {"shuffle": (line.out, 0), "unshuffle": (line.ins[0], 1)}
        value, at = ways["shuffle" if makes else "unshuffle"]
        for other in program.lines:
            if other.op == ("shuffle" if makes else "unshuffle") and _is_one(program, value, other, at):
                small = other.out.shape[0] if makes else other.ins[0].shape[0]
                return f"{other.args['factor'] ** 2},{small}"
        return "no"
    if makes or line.op in ("bn", "ln", "prelu"):
        behind = _behind(program, line.out)
        if behind or makes:
            return behind or "no"
    return _before(program, line.ins[0]) or "no"


def _is_one(program: Program, value: Value, line: Line, at: int) -> bool:
    """Say whether a step takes (0) or makes (1) a value, but for functions of each number."""
    while True:
        if value in (line.ins if at == 0 else (line.out,)):
            return True
        step = next((e for e in program.lines if (value in e.ins if at == 0 else e.out == value)), None)
        if step is None or step.op not in ("relu", "bn"):
            return False
        value = step.out if at == 0 else step.ins[0]


def _length(option: str) -> int:
    """Return how many numbers an option's value stands for."""
    return sum(math.prod(map(int, part.split(","))) for part in option.rpartition("=")[2].split("+"))


def _before(program: Program, value: Value) -> str:
    line = next((line for line in program.lines if line.out == value), None)
    if line is None:
        return ""
    if line.op == "flatten" and line.args["order"] == "own":
        extents = line.ins[0].shape[1:] if line.ins[0].kind == "frames" else line.ins[0].shape
        return f"{math.prod(extents[1:])},{extents[0]}" if math.prod(extents[1:]) > 1 else ""
    if line.op == "concat":
        inner = [_before(program, input_) for input_ in line.ins]
        sizes = [input_.shape[-1] for input_ in line.ins]
        return "+".join(x or str(n) for x, n in zip(inner, sizes, strict=True)) if any(inner) else ""
    if line.op in ("relu", "bn", "ln", "multiply", "add", "prelu", "step"):
        return _before(program, line.ins[0])
    return ""


def _behind(program: Program, value: Value) -> str:
    for line in program.lines:
        if value not in line.ins:
            continue
        if line.op == "image" and line.args["order"] == "own":
            return f"{math.prod(line.out.shape[1:])},{line.out.shape[0]}"
        if line.op == "multiply" and line.ins[1] == value:
            return _before(program, line.ins[0])
        if line.op in ("relu", "bn", "ln", "prelu", "add") and (part := _behind(program, line.out)):
            return part
    return ""


_put("both_sides_last", lambda p: _both_sides(p, order="last"))
_put("both_sides_first", lambda p: _both_sides(p, order="first"))
_put("flat_recurrent_last", lambda p: _flat_recurrent(p, "last"))
_put("flat_recurrent_first", lambda p: _flat_recurrent(p, "first"))


# The same models under other names in PyTorch, which number layers of a kind.
def _renamed(name: str) -> Callable[[], Program]:
    make = PROGRAMS[name]

    def output() -> Program:
        renamed = make()
        counts: dict[str, int] = {}
        stems = {"dense": "fc", "conv": "conv", "td_conv": "conv", "convt": "deconv", "bn": "bn", "ln": "ln"}
        for line in renamed.lines:
            if line.name and line.name not in renamed.torch_names:
                stem = stems.get(line.op, line.op)
                counts[stem] = counts.get(stem, 0) + 1
                renamed.torch_names[line.name] = f"{stem}_{counts[stem]}"
        return renamed

    return output


for _name in tuple(PROGRAMS):
    if not _name.startswith(("cnn1d", "cnn3d")):
        PROGRAMS[f"{_name}__renamed"] = _renamed(_name)
