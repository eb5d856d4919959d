"""The small models of pair_models.py in Keras, with the numbers of a PyTorch state_dict.

    python -m tests.pair_keras FOLDER

writes the models that FOLDER/keras.json lists: for each the file (`.keras`, or `.weights.h5` for a
model with layers of its own), the model, its options, and the `.npz` file with the state_dict.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers, ops

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


# The layers with their numbers, in the order of `set_weights`.

NAMES = {
    "mlp": {"first": "0", "second": "2", "third": "4"},
    "cnn": {"conv": "0", "norm": "1", "conv2": "4", "head": "7"},
    "lstm": {"rnn": "rnn", "head": "head"},
    "gru": {"rnn": "rnn", "head": "head"},
    "block": {name: name for name in ("norm", "attention", "norm2", "up", "down")},
    "words": {"embed": "0", "head": "2"},
    "vision": {name: name for name in ("conv", "conv2", "pool", "head")},
    "text": {name: name for name in ("embed", "query", "key", "mix", "up", "out")},
    "activated": {"first": "0", "second": "2", "norm": "3"},
}


def _gates(w: State) -> list[np.ndarray]:
    order = (1, 0, 2) if w["rnn.weight_hh_l0"].shape[0] == 15 else (0, 1, 2, 3)
    turned = {
        key: np.concatenate([np.split(w[f"rnn.{key}_l0"], len(order))[place] for place in order])
        for key in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    }
    biases = turned["bias_ih"], turned["bias_hh"]
    bias = np.stack(biases) if len(order) == 3 else sum(biases)
    return [turned["weight_ih"].T, turned["weight_hh"].T, np.asarray(bias)]


def _heads(w: State) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    kernels, biases = (np.split(w[f"attention.in_proj_{each}"], 3) for each in ("weight", "bias"))
    for kernel, bias in zip(kernels, biases, strict=True):
        found += [kernel.T.reshape(8, 2, 4), bias.reshape(2, 4)]
    return [*found, w["attention.out_proj.weight"].T.reshape(2, 4, 8), w["attention.out_proj.bias"]]


def _arrays(layer: Any, torch_name: str, w: State) -> list[np.ndarray]:
    """Return the numbers of one layer."""
    if isinstance(layer, layers.LSTM | layers.GRU):
        return _gates(w)
    if isinstance(layer, layers.MultiHeadAttention):
        return _heads(w)
    weight = w[f"{torch_name}.weight"]
    if isinstance(layer, layers.Embedding):
        return [weight]
    if weight.ndim == 4:
        kernel = weight.transpose(2, 3, 1, 0)
    elif weight.shape == (4, 30):  # a flattened image has channels last here
        kernel = weight.reshape(4, 5, 2, 3).transpose(2, 3, 1, 0).reshape(30, 4)
    else:
        kernel = weight.T
    rest = [w.get(f"{torch_name}.{each}") for each in ("bias", "running_mean", "running_var")]
    adapters = [w[f"mix.{each}"].T for each in ("lora_a", "lora_b") if isinstance(layer, LoraDense)]
    return [kernel, *(each for each in rest if each is not None), *adapters]


def fill(model: Any, name: str, w: State) -> None:
    """Give the Keras model the numbers of the PyTorch state_dict."""
    for layer in model.layers:
        if isinstance(layer, AddRows):
            layer.set_weights([w["position"]])
        elif isinstance(layer, Scale):
            layer.set_weights([w["scale"]])
        elif layer.weights and not isinstance(layer, TiedDense):
            layer.set_weights(_arrays(layer, NAMES[name][layer.name], w))


def write(folder: Path) -> None:
    """Write the listed models."""
    for row in json.loads((folder / "keras.json").read_text(encoding="utf-8")):
        model = globals()[row["model"]](**row["options"])
        with np.load(folder / row["state"]) as held:
            fill(model, row["model"], dict(held))
        if row["file"].endswith(".keras"):
            model.save(folder / row["file"])
        else:
            model.save_weights(folder / row["file"])


if __name__ == "__main__":
    write(Path(sys.argv[1]))
