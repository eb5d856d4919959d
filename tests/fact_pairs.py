"""Models of one set of weights that differ in one stated fact, and those that state it in two ways.

`KERAS`, `KERAS_2`, `TORCH` and `ONNX` list families of models; the variants of a family have the same
tensors. `write_keras` runs in a process of TensorFlow, `write_keras_2` in one with tf_keras.
`python -m tests.fact_pairs` prints what `verify` finds of every pair.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from ckpttool.core import CkpttoolError
from ckpttool.networks import Network, Policy, numpy_backend
from ckpttool.verification import two_models
from tests import warm
from tests.conftest import KERAS_2, ROOT
from tests.shared_runners import shared_runners

verify_module = importlib.import_module("ckpttool.commands.verify")

Build = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Family:
    """Models with the same tensors: the shape of one input, and the layers of each variant.

    `equal` are groups of variants that compute the same; all others compute something else.
    """

    shape: tuple[int, ...]
    variants: Mapping[str, Build]
    equal: tuple[tuple[str, ...], ...] = ()


def _mlp(make: Callable[[Any], Any], *, last: Any = None) -> Build:
    """Return the layers of a policy; `make` returns the value of a layer's setting `activation`."""
    return lambda k: [
        k.layers.Dense(8, activation=make(k)),
        k.layers.Dense(8, activation=make(k)),
        k.layers.Dense(3, activation=last),
    ]


def _with_layer(make: Callable[[Any], Any]) -> Build:
    """Return the layers of a policy whose activations are layers of their own."""
    return lambda k: [
        k.layers.Dense(8),
        make(k),
        k.layers.Dense(8),
        make(k),
        k.layers.Dense(3),
    ]


def _between(make: Callable[[Any], Any], act: str = "tanh") -> Build:
    """Return two dense layers with another one between them."""
    return lambda k: [k.layers.Dense(8), make(k), k.layers.Activation(act), k.layers.Dense(3)]


def _names(*names: str) -> dict[str, Build]:
    return {name: _mlp(lambda _, name=name: name) for name in names}


_ACTIVATIONS: dict[str, Build] = {
    **_names("relu", "tanh", "sigmoid", "elu", "gelu", "silu", "softplus", "selu", "softsign", "mish"),
    **_names("leaky_relu", "relu6", "hard_sigmoid", "exponential", "linear"),
    "swish": _mlp(lambda _: "swish"),
    "relu function": _mlp(lambda k: k.activations.relu),
    "tanh function": _mlp(lambda k: k.activations.tanh),
    "relu object": _mlp(lambda k: k.layers.ReLU()),
    "relu layer": _with_layer(lambda k: k.layers.ReLU()),
    "relu activation layer": _with_layer(lambda k: k.layers.Activation("relu")),
    "leaky 0.5 object": _mlp(lambda k: k.layers.LeakyReLU(0.5)),
    "leaky 0.5 named relu": _mlp(lambda k: k.layers.LeakyReLU(0.5, name="relu")),
    "leaky 0.5 layer": _with_layer(lambda k: k.layers.LeakyReLU(0.5)),
    "leaky 0.2 layer": _with_layer(lambda k: k.layers.LeakyReLU(0.2)),
    "leaky 0.3 layer": _with_layer(lambda k: k.layers.LeakyReLU(0.3)),
    "relu slope 0.5": _with_layer(lambda k: k.layers.ReLU(negative_slope=0.5)),
    "relu most 1": _with_layer(lambda k: k.layers.ReLU(max_value=1.0)),
    "relu most 1 object": _mlp(lambda k: k.layers.ReLU(max_value=1.0)),
    "relu threshold": _with_layer(lambda k: k.layers.ReLU(threshold=0.3)),
    "elu 0.3 layer": _with_layer(lambda k: k.layers.ELU(alpha=0.3)),
    "elu 0.3 object": _mlp(lambda k: k.layers.ELU(alpha=0.3)),
    "elu 1 layer": _with_layer(lambda k: k.layers.ELU(alpha=1.0)),
    "softmax": _mlp(lambda _: "softmax"),
    "softmax layer": _with_layer(lambda k: k.layers.Softmax(axis=-1)),
    "softmax axis 0": _with_layer(lambda k: k.layers.Softmax(axis=0)),
    "dropout": _with_layer(lambda k: k.layers.Dropout(0.5)),
    "relu and dropout": lambda k: [
        k.layers.Dense(8, activation="relu"),
        k.layers.Dropout(0.5),
        k.layers.Dense(8, activation="relu"),
        k.layers.Dropout(0.1),
        k.layers.Dense(3),
    ],
    "relu and noise": lambda k: [
        k.layers.Dense(8, activation="relu"),
        k.layers.GaussianNoise(0.5),
        k.layers.Dense(8, activation="relu"),
        k.layers.Dense(3),
    ],
    "relu, unit norm": _with_layer(lambda k: k.layers.UnitNormalization()),
    "relu, tanh": _mlp(lambda _: "relu", last="tanh"),
    "relu, sigmoid": _mlp(lambda _: "relu", last="sigmoid"),
    "relu, softmax": _mlp(lambda _: "relu", last="softmax"),
    "relu, tanh times 2": lambda k: [
        *_mlp(lambda _: "relu", last="tanh")(k),
        k.layers.Rescaling(2.0),
    ],
    "relu, tanh times 3": lambda k: [
        *_mlp(lambda _: "relu", last="tanh")(k),
        k.layers.Rescaling(3.0),
    ],
    "relu, tanh times 2 plus 1": lambda k: [
        *_mlp(lambda _: "relu", last="tanh")(k),
        k.layers.Rescaling(2.0, offset=1.0),
    ],
}
_EQUAL_ACTIVATIONS = (
    (
        *("relu", "relu function", "relu object", "relu layer", "relu activation layer"),
        *("relu and dropout", "relu and noise"),
    ),
    ("tanh", "tanh function"),
    ("silu", "swish"),
    ("leaky 0.5 object", "leaky 0.5 layer", "relu slope 0.5", "leaky 0.5 named relu"),
    ("leaky_relu", "leaky 0.2 layer"),
    ("relu most 1", "relu most 1 object"),
    ("elu 0.3 layer", "elu 0.3 object"),
    ("elu", "elu 1 layer"),
    ("softmax", "softmax layer"),
    ("linear", "dropout"),
)

_ONLY_KERAS_3: dict[str, Build] = {
    "sin function": _mlp(lambda k: k.ops.sin),
    "square function": _mlp(lambda k: k.ops.square),
    "celu": _mlp(lambda _: "celu"),
    "squareplus": _mlp(lambda _: "squareplus"),
    "hard_tanh": _mlp(lambda _: "hard_tanh"),
    "log_sigmoid": _mlp(lambda _: "log_sigmoid"),
    "soft_shrink": _mlp(lambda _: "soft_shrink"),
    "relu by rewriting": _mlp(lambda _: "relu"),
    "leaky_relu by rewriting": _mlp(lambda _: "relu"),
}
# Settings `activation` as other versions and programs write them.
_REWRITTEN = {
    f"{name} by rewriting": (
        "relu",
        {"module": "builtins", "class_name": "function", "config": name, "registered_name": "function"},
    )
    for name in ("relu", "leaky_relu")
}


def _conv(**settings: Any) -> Build:
    """Return a convolution and what makes its output's size independent of its settings."""
    return lambda k: [
        k.layers.Conv2D(4, 3, **{"activation": "relu", **settings}),
        k.layers.GlobalAveragePooling2D(),
        k.layers.Dense(2),
    ]


def _pooled(make: Callable[[Any], Any]) -> Build:
    return lambda k: [
        k.layers.Conv2D(4, 3, activation="relu"),
        make(k),
        k.layers.GlobalMaxPooling2D(),
        k.layers.Dense(2),
    ]


def _lstm(**settings: Any) -> Build:
    return lambda k: [k.layers.LSTM(5, **settings), k.layers.Dense(2)]


def _normalization(**settings: Any) -> Build:
    return lambda k: [
        k.layers.Normalization(mean=[0.5] * 6, variance=[2.0] * 6, **settings),
        k.layers.Dense(3),
    ]


_LAYERS: dict[str, Family] = {
    "layer norm": Family(
        (6,),
        {
            "1e-3": _between(lambda k: k.layers.LayerNormalization(epsilon=1e-3)),
            "default": _between(lambda k: k.layers.LayerNormalization()),
            "1e-6": _between(lambda k: k.layers.LayerNormalization(epsilon=1e-6)),
            "1e-1": _between(lambda k: k.layers.LayerNormalization(epsilon=1e-1)),
            "axis 1": _between(lambda k: k.layers.LayerNormalization(axis=1)),
            "relu": _between(lambda k: k.layers.LayerNormalization(), "relu"),
            "leaky": lambda k: [
                k.layers.Dense(8),
                k.layers.LayerNormalization(),
                k.layers.LeakyReLU(0.5),
                k.layers.Dense(3),
            ],
        },
        (("1e-3", "default", "axis 1"),),
    ),
    "layer norm of rows": Family(
        (4, 6),
        {
            "axis -1": lambda k: [
                k.layers.LayerNormalization(axis=-1, scale=False, center=False),
                k.layers.Flatten(),
                k.layers.Dense(3),
            ],
            "axis 2": lambda k: [
                k.layers.LayerNormalization(axis=2, scale=False, center=False),
                k.layers.Flatten(),
                k.layers.Dense(3),
            ],
            "axis 1": lambda k: [
                k.layers.LayerNormalization(axis=1, scale=False, center=False),
                k.layers.Flatten(),
                k.layers.Dense(3),
            ],
            "both axes": lambda k: [
                k.layers.LayerNormalization(axis=[1, 2], scale=False, center=False),
                k.layers.Flatten(),
                k.layers.Dense(3),
            ],
        },
        (("axis -1", "axis 2"),),
    ),
    "batch norm": Family(
        (6,),
        {
            "1e-3": _between(lambda k: k.layers.BatchNormalization(epsilon=1e-3)),
            "momentum": _between(lambda k: k.layers.BatchNormalization(momentum=0.5)),
            "1e-5": _between(lambda k: k.layers.BatchNormalization(epsilon=1e-5)),
            "1e-1": _between(lambda k: k.layers.BatchNormalization(epsilon=1e-1)),
        },
        (("1e-3", "momentum"),),
    ),
    "batch norm of images": Family(
        (8, 8, 4),
        {
            name: lambda k, axis=axis: [
                k.layers.BatchNormalization(axis=axis, scale=False, center=False),
                k.layers.Reshape((64, 4)),
                k.layers.GlobalAveragePooling1D(),
                k.layers.Dense(3),
            ]
            for name, axis in (("-1", -1), ("3", 3))
        },
        (("-1", "3"),),
    ),
    "convolution": Family(
        (9, 9, 3),
        {
            "valid": _conv(),
            "explicit": _conv(padding="valid", strides=(1, 1), dilation_rate=1),
            "same": _conv(padding="same"),
            "strides": _conv(strides=2),
            "dilation": _conv(dilation_rate=2),
            "leaky": _conv(activation="leaky_relu"),
            "tanh": _conv(activation="tanh"),
            "object": lambda k: _conv(activation=k.layers.LeakyReLU(0.5))(k),
        },
        (("valid", "explicit"),),
    ),
    "flatten": Family(
        (4, 5, 3),
        {
            "default": lambda k: [k.layers.Flatten(), k.layers.Dense(3, activation="tanh")],
            "channels_last": lambda k: [
                k.layers.Flatten("channels_last"),
                k.layers.Dense(3, activation="tanh"),
            ],
            "channels_first": lambda k: [
                k.layers.Flatten("channels_first"),
                k.layers.Dense(3, activation="tanh"),
            ],
            "reshape": lambda k: [k.layers.Reshape((60,)), k.layers.Dense(3, activation="tanh")],
            "permute": lambda k: [
                k.layers.Permute((2, 1, 3)),
                k.layers.Flatten(),
                k.layers.Dense(3, activation="tanh"),
            ],
        },
        (("default", "channels_last", "reshape"),),
    ),
    "pooling": Family(
        (9, 9, 3),
        {
            "max 2": _pooled(lambda k: k.layers.MaxPooling2D(2)),
            "max 2, 2": _pooled(lambda k: k.layers.MaxPooling2D((2, 2), strides=2, padding="valid")),
            "average 2": _pooled(lambda k: k.layers.AveragePooling2D(2)),
            "average 3": _pooled(lambda k: k.layers.AveragePooling2D(3)),
            "average strides": _pooled(lambda k: k.layers.AveragePooling2D(2, strides=1)),
            "average same": _pooled(lambda k: k.layers.AveragePooling2D(2, padding="same")),
        },
        (("max 2", "max 2, 2"),),
    ),
    "rescaling": Family(
        (6,),
        {
            "2": lambda k: [k.layers.Rescaling(2.0), k.layers.Dense(3)],
            "2 integer": lambda k: [k.layers.Rescaling(2, offset=0), k.layers.Dense(3)],
            "3": lambda k: [k.layers.Rescaling(3.0), k.layers.Dense(3)],
            "offset": lambda k: [k.layers.Rescaling(2.0, offset=0.5), k.layers.Dense(3)],
            "none": lambda k: [k.layers.Dense(3)],
            "rows": lambda k: [k.layers.Rescaling([2.0] * 6), k.layers.Dense(3)],
        },
        (("2", "2 integer", "rows"),),
    ),
    "normalization": Family(
        (6,),
        {
            "plain": _normalization(),
            "axis": _normalization(axis=-1),
            "inverted": _normalization(invert=True),
            "other": lambda k: [
                k.layers.Normalization(mean=[0.5] * 6, variance=[3.0] * 6),
                k.layers.Dense(3),
            ],
        },
        (("plain", "axis"),),
    ),
    "unit norm": Family(
        (4, 6),
        {
            "-1": lambda k: [k.layers.UnitNormalization(-1), k.layers.Flatten(), k.layers.Dense(3)],
            "2": lambda k: [k.layers.UnitNormalization(2), k.layers.Flatten(), k.layers.Dense(3)],
            "1": lambda k: [k.layers.UnitNormalization(1), k.layers.Flatten(), k.layers.Dense(3)],
        },
        (("-1", "2"),),
    ),
    "recurrent": Family(
        (4, 3),
        {
            "lstm": _lstm(),
            "explicit": _lstm(activation="tanh", recurrent_activation="sigmoid", dropout=0.3),
            "relu": _lstm(activation="relu"),
            "hard": _lstm(recurrent_activation="hard_sigmoid"),
            "backwards": _lstm(go_backwards=True),
            "leaky": lambda k: _lstm(activation=k.layers.LeakyReLU(0.5))(k),
        },
        (("lstm", "explicit"),),
    ),
    "up": Family(
        (4, 4, 3),
        {
            name: lambda k, kind=kind: [
                k.layers.UpSampling2D(2, interpolation=kind),
                k.layers.Conv2D(2, 3),
                k.layers.Flatten(),
                k.layers.Dense(2),
            ]
            for name, kind in (("nearest", "nearest"), ("bilinear", "bilinear"))
        },
    ),
}

KERAS = {
    "mlp": Family(
        (6,),
        {**_ACTIVATIONS, **_ONLY_KERAS_3},
        (
            (*_EQUAL_ACTIVATIONS[0], "relu by rewriting"),
            *_EQUAL_ACTIVATIONS[1:4],
            (*_EQUAL_ACTIVATIONS[4], "leaky_relu by rewriting"),
            *_EQUAL_ACTIVATIONS[5:],
        ),
    ),
    **_LAYERS,
}
KERAS_LEGACY = {
    "mlp": Family(
        (6,),
        {
            name: _ACTIVATIONS[name]
            for name in (
                *("relu", "tanh", "relu layer", "relu function", "relu activation layer", "selu", "elu"),
                *("elu 0.3 layer", "leaky 0.5 layer", "leaky 0.3 layer", "leaky 0.5 object"),
                *("leaky 0.5 named relu",),
                *("relu most 1", "relu threshold", "softmax layer", "softmax axis 0", "relu and dropout"),
                *("exponential", "hard_sigmoid", "relu, tanh", "relu, sigmoid"),
            )
        },
        (
            ("relu", "relu layer", "relu function", "relu activation layer", "relu and dropout"),
            ("leaky 0.5 layer", "leaky 0.5 object", "leaky 0.5 named relu"),
        ),
    ),
    "layer norm": Family(
        (6,),
        {
            "1e-3": _between(lambda k: k.layers.LayerNormalization()),
            "explicit": _between(lambda k: k.layers.LayerNormalization(epsilon=1e-3)),
            "1e-6": _between(lambda k: k.layers.LayerNormalization(epsilon=1e-6)),
        },
        (("1e-3", "explicit"),),
    ),
    "batch norm": _LAYERS["batch norm"],
    "rescaling": _LAYERS["rescaling"],
}


def _tensorflow() -> Any:
    import tensorflow as tf

    return tf


def _torch_mlp(make: Callable[[Any], Any], *last: Callable[[Any], Any]) -> Build:
    return lambda nn: [
        nn.Linear(6, 8),
        make(nn),
        nn.Linear(8, 8),
        make(nn),
        nn.Linear(8, 3),
        *(make_layer(nn) for make_layer in last),
    ]


def _torch_norm(**settings: Any) -> Build:
    return lambda nn: [nn.Linear(6, 8), nn.LayerNorm(8, **settings), nn.Tanh(), nn.Linear(8, 3)]


def _torch_conv(**settings: Any) -> Build:
    return lambda nn: [
        nn.Conv2d(3, 4, 3, **settings),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    ]


# Sequentials of PyTorch, as TorchScript and as pickled modules.
TORCH = {
    "mlp": Family(
        (6,),
        {
            "relu": _torch_mlp(lambda nn: nn.ReLU()),
            "relu in place": _torch_mlp(lambda nn: nn.ReLU(inplace=True)),
            "dropout": lambda nn: [
                *(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5)),
                *(nn.Linear(8, 8), nn.ReLU(), nn.Identity(), nn.Linear(8, 3)),
            ],
            "tanh": _torch_mlp(lambda nn: nn.Tanh()),
            "leaky 0.5": _torch_mlp(lambda nn: nn.LeakyReLU(0.5)),
            "leaky": _torch_mlp(lambda nn: nn.LeakyReLU()),
            "leaky 0.01": _torch_mlp(lambda nn: nn.LeakyReLU(negative_slope=0.01, inplace=True)),
            "elu": _torch_mlp(lambda nn: nn.ELU()),
            "elu 0.3": _torch_mlp(lambda nn: nn.ELU(alpha=0.3)),
            "elu 1": _torch_mlp(lambda nn: nn.ELU(alpha=1.0, inplace=True)),
            "gelu": _torch_mlp(lambda nn: nn.GELU()),
            "gelu none": _torch_mlp(lambda nn: nn.GELU(approximate="none")),
            "gelu tanh": _torch_mlp(lambda nn: nn.GELU(approximate="tanh")),
            "softplus": _torch_mlp(lambda nn: nn.Softplus()),
            "softplus 3": _torch_mlp(lambda nn: nn.Softplus(beta=3)),
            "softplus threshold": _torch_mlp(lambda nn: nn.Softplus(threshold=0.1)),
            "relu6": _torch_mlp(lambda nn: nn.ReLU6()),
            "hardtanh": _torch_mlp(lambda nn: nn.Hardtanh()),
            "hardtanh 0.5": _torch_mlp(lambda nn: nn.Hardtanh(-0.5, 0.5)),
            "selu": _torch_mlp(lambda nn: nn.SELU()),
            "celu 0.5": _torch_mlp(lambda nn: nn.CELU(0.5)),
            "silu": _torch_mlp(lambda nn: nn.SiLU()),
            "mish": _torch_mlp(lambda nn: nn.Mish()),
            "softmax": _torch_mlp(lambda nn: nn.Softmax(dim=-1)),
            "softmax 0": _torch_mlp(lambda nn: nn.Softmax(dim=0)),
            "threshold": _torch_mlp(lambda nn: nn.Threshold(0.2, 0.0)),
            "relu, tanh": _torch_mlp(lambda nn: nn.ReLU(), lambda nn: nn.Tanh()),
            "relu, sigmoid": _torch_mlp(lambda nn: nn.ReLU(), lambda nn: nn.Sigmoid()),
        },
        (
            ("relu", "relu in place", "dropout"),
            ("leaky", "leaky 0.01"),
            ("elu", "elu 1"),
            ("gelu", "gelu none"),
        ),
    ),
    "layer norm": Family(
        (6,),
        {
            "1e-5": _torch_norm(),
            "explicit": _torch_norm(eps=1e-5),
            "1e-3": _torch_norm(eps=1e-3),
            "1e-1": _torch_norm(eps=1e-1),
        },
        (("1e-5", "explicit"),),
    ),
    "convolution": Family(
        (3, 9, 9),
        {
            "plain": _torch_conv(),
            "explicit": _torch_conv(padding=0, stride=1, dilation=1),
            "padding": _torch_conv(padding=1),
            "circular": _torch_conv(padding=1, padding_mode="circular"),
            "stride": _torch_conv(stride=2),
            "dilation": _torch_conv(dilation=2),
        },
        (("plain", "explicit"),),
    ),
}


def draw_weights(shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Return the tensors of a model of a family: the same for each variant."""
    draw = np.random.default_rng(0)
    weights = []
    for shape in shapes:
        fan = int(np.prod(shape[:-1])) or 1
        scale = 1.5 / np.sqrt(fan) if len(shape) > 1 else 0.3
        weights.append((draw.standard_normal(shape) * scale + (len(shape) == 1) * 0.6).astype(np.float32))
    return weights


def inputs(shape: tuple[int, ...]) -> np.ndarray:
    """Return the inputs that show whether two models differ: [16, ...]."""
    return np.random.default_rng(1).standard_normal((16, *shape)).astype(np.float32)


def file_name(family: str, variant: str, suffix: str) -> str:
    """Return the name of a variant's file."""
    return f"{family} {variant}".replace(" ", "_").replace(",", "") + suffix


def locate(folder: Path, name: str) -> Path:
    """Return the path of a file, in a folder of its own: neighbors are searched for facts."""
    home = folder / name.replace(".", "_")
    home.mkdir(exist_ok=True)
    return home / name


def _write_keras(folder: Path, keras: Any, families: Mapping[str, Family], suffix: str) -> None:
    outputs = {}
    for title, family in families.items():
        for name, build in family.variants.items():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.layers.Input(family.shape), *build(keras)])
            drawn = iter(draw_weights([tuple(weight.shape) for weight in model.trainable_weights]))
            for weight in model.weights:
                trained = any(weight is one for one in model.trainable_weights)
                weight.assign(next(drawn) if trained else np.full(tuple(weight.shape), 0.7, np.float32))
            path = locate(folder, file_name(title, name, suffix))
            model.save(str(path))
            if name in _REWRITTEN:
                _rewrite(path, _REWRITTEN[name])
                model = keras.models.load_model(str(path))
            outputs[path.name] = np.asarray(model(inputs(family.shape), training=False))
    np.savez(folder / f"outputs{suffix}.npz", **outputs)


def _rewrite(path: Path, change: tuple[Any, Any]) -> None:
    """Replace a setting `activation` in the configuration of a `.keras` file."""
    with zipfile.ZipFile(path) as archive:
        members = {member: archive.read(member) for member in archive.namelist()}

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: change[1] if key == "activation" and item == change[0] else changed(item)
                for key, item in value.items()
            }
        return [changed(item) for item in value] if isinstance(value, list) else value

    members["config.json"] = json.dumps(changed(json.loads(members["config.json"]))).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def write_keras(folder: str) -> None:
    """Write the models of Keras 3 as `.keras`, and the policies as `.h5`."""
    import keras

    _write_keras(Path(folder), keras, KERAS, ".keras")


def write_keras_2(folder: str) -> None:
    """Write the models of Keras 2 as `.h5`."""
    import tf_keras

    _write_keras(Path(folder), tf_keras, KERAS_LEGACY, ".h5")


def write_torch(folder: str) -> None:
    """Write the Sequentials as TorchScript (`.ts`) and as pickled modules (`.pt`)."""
    import torch
    from torch import nn

    outputs = {}
    for title, family in TORCH.items():
        for name, build in family.variants.items():
            model = nn.Sequential(*build(nn)).eval()
            batch = torch.from_numpy(inputs(family.shape))
            with torch.no_grad():
                for parameter, value in zip(
                    model.parameters(),
                    draw_weights([tuple(parameter.shape) for parameter in model.parameters()]),
                    strict=True,
                ):
                    parameter.copy_(torch.from_numpy(value))
                output = model(batch.clone()).numpy()
            names = [file_name(title, name, suffix) for suffix in (".pt", ".ts", ".traced.ts")]
            whole, scripted, traced = (locate(Path(folder), name) for name in names)
            torch.save(model, whole)
            torch.jit.script(model).save(str(scripted))
            torch.jit.trace(model, batch[:1].clone()).save(str(traced))
            outputs |= dict.fromkeys(names, output)
    np.savez(Path(folder, "outputs.pt.npz"), **outputs)


# ONNX graphs: (operator, attributes) between the layers.
def _onnx_mlp(op: str | None, last: str | None = None, **attributes: Any) -> Callable[[Any], list[Any]]:
    def build(helper: Any) -> list[Any]:
        nodes = []
        flow = "obs"
        for n in range(3):
            nodes.append(helper.make_node("Gemm", [flow, f"w{n}", f"b{n}"], [f"g{n}"]))
            flow = f"g{n}"
            act = op if n < 2 else last
            if act is not None:
                own = attributes if n < 2 else {}
                nodes.append(helper.make_node(act, [flow], [f"a{n}"], **own))
                flow = f"a{n}"
        nodes[-1].output[0] = "action"
        return nodes

    return build


def _onnx_gemm(**attributes: Any) -> Callable[[Any], list[Any]]:
    return lambda helper: [
        helper.make_node("Gemm", ["obs", "w0", "b0"], ["g0"], **attributes),
        helper.make_node("Tanh", ["g0"], ["a0"]),
        helper.make_node("Gemm", ["a0", "w1", "b1"], ["action"]),
    ]


def _onnx_norm(**attributes: Any) -> Callable[[Any], list[Any]]:
    return lambda helper: [
        helper.make_node("Gemm", ["obs", "w0", "b0"], ["g0"]),
        helper.make_node("LayerNormalization", ["g0", "scale", "offset"], ["n0"], **attributes),
        helper.make_node("Tanh", ["n0"], ["a0"]),
        helper.make_node("Gemm", ["a0", "w1", "b1"], ["action"]),
    ]


_TENSORS = {
    "w0": (6, 8),
    "b0": (8,),
    "w1": (8, 8),
    "b1": (8,),
    "w2": (8, 3),
    "b2": (3,),
    "scale": (8,),
    "offset": (8,),
}
_SQUARE = {**_TENSORS, "w0": (8, 8)}

ONNX = {
    "mlp": Family(
        (6,),
        {
            "relu": _onnx_mlp("Relu"),
            "relu, identity": _onnx_mlp("Relu", "Identity"),
            "tanh": _onnx_mlp("Tanh"),
            "leaky": _onnx_mlp("LeakyRelu"),
            "leaky 0.01": _onnx_mlp("LeakyRelu", alpha=0.01),
            "leaky 0.5": _onnx_mlp("LeakyRelu", alpha=0.5),
            "elu": _onnx_mlp("Elu"),
            "elu 1": _onnx_mlp("Elu", alpha=1.0),
            "elu 0.3": _onnx_mlp("Elu", alpha=0.3),
            "gelu": _onnx_mlp("Gelu"),
            "gelu none": _onnx_mlp("Gelu", approximate="none"),
            "gelu tanh": _onnx_mlp("Gelu", approximate="tanh"),
            "sin": _onnx_mlp("Sin"),
            "selu": _onnx_mlp("Selu"),
            "selu 2": _onnx_mlp("Selu", alpha=2.0),
            "hard sigmoid": _onnx_mlp("HardSigmoid"),
            "hard sigmoid 0.5": _onnx_mlp("HardSigmoid", alpha=0.5),
            "thresholded": _onnx_mlp("ThresholdedRelu"),
            "thresholded 0.5": _onnx_mlp("ThresholdedRelu", alpha=0.5),
            "celu": _onnx_mlp("Celu"),
            "celu 0.5": _onnx_mlp("Celu", alpha=0.5),
            "softmax": _onnx_mlp("Softmax"),
            "softmax axis 1": _onnx_mlp("Softmax", axis=1),
            "softmax axis 0": _onnx_mlp("Softmax", axis=0),
            "relu, tanh": _onnx_mlp("Relu", "Tanh"),
            "relu, sigmoid": _onnx_mlp("Relu", "Sigmoid"),
            "relu, softmax": _onnx_mlp("Relu", "Softmax"),
        },
        (
            ("relu", "relu, identity"),
            ("leaky", "leaky 0.01"),
            ("elu", "elu 1"),
            ("gelu", "gelu none"),
            ("softmax", "softmax axis 1"),
        ),
    ),
    "gemm": Family(
        (8,),
        {
            "plain": _onnx_gemm(),
            "explicit": _onnx_gemm(alpha=1.0, beta=1.0, transA=0, transB=0),
            "alpha": _onnx_gemm(alpha=0.5),
            "beta": _onnx_gemm(beta=2.0),
            "transB": _onnx_gemm(transB=1),
        },
        (("plain", "explicit"),),
    ),
    "layer norm": Family(
        (6,),
        {
            "1e-5": _onnx_norm(),
            "explicit": _onnx_norm(epsilon=1e-5, axis=-1),
            "axis 1": _onnx_norm(axis=1),
            "1e-3": _onnx_norm(epsilon=1e-3),
            "1e-1": _onnx_norm(epsilon=1e-1),
        },
        (("1e-5", "explicit", "axis 1"),),
    ),
}


def write_onnx(folder: str) -> None:
    """Write the ONNX graphs."""
    import onnx
    import onnxruntime
    from onnx import helper, numpy_helper

    outputs = {}
    for title, family in ONNX.items():
        shapes = _SQUARE if title == "gemm" else _TENSORS
        drawn = dict(zip(shapes, draw_weights([*shapes.values()]), strict=True))
        for name, build in family.variants.items():
            nodes = build(helper)
            used = [name for name in shapes if any(name in node.input for node in nodes)]
            wide = 8 if title != "mlp" else 3
            graph = helper.make_graph(
                nodes,
                "policy",
                [helper.make_tensor_value_info("obs", 1, ["batch", *family.shape])],
                [helper.make_tensor_value_info("action", 1, ["batch", wide])],
                [numpy_helper.from_array(drawn[name], name) for name in used],
            )
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
            path = locate(Path(folder), file_name(title, name, ".onnx"))
            onnx.save(model, path)
            session = onnxruntime.InferenceSession(str(path))
            outputs[path.name] = session.run(None, {"obs": inputs(family.shape)})[0]
    np.savez(Path(folder, "outputs.onnx.npz"), **outputs)


_PROGRAMS = re.compile(
    r"convolution.*\.ts|layer_norm.*\.traced\.ts|mlp_(leaky_0\.5|gelu_tanh|softplus_3)\.(traced\.)?ts"
)


@dataclass(frozen=True)
class FactPair:
    """Two files, and whether they compute the same."""

    a: str
    b: str
    equal: bool

    @property
    def options(self) -> dict[str, Any]:
        """The options of `verify` for programs that are no policy, and for functions that Keras imports."""
        if not self.equal:
            return {}
        options: dict[str, Any] = {}
        if any(_PROGRAMS.match(file) for file in (self.a, self.b)):
            options = {"run_code": True}
        if options and self.a.endswith(".ts"):
            options["input_shapes"] = ("3,9,9" if self.a.startswith("convolution") else "6",)
        return options

    @property
    def title(self) -> str:
        """A short name."""
        return f"{self.a} {'=' if self.equal else '!'} {self.b}"


def _family_pairs(title: str, family: Family, suffix: str) -> Iterator[FactPair]:
    """Yield neighbors of every group of equal variants, and the first variant with all others that differ."""
    groups = {variant: group for group in family.equal for variant in group}
    for group in family.equal:
        for one, two in pairwise(group):
            yield FactPair(file_name(title, one, suffix), file_name(title, two, suffix), equal=True)
    names = [*family.variants]
    for other in names[1:]:
        if other not in groups.get(names[0], ()):
            yield FactPair(file_name(title, names[0], suffix), file_name(title, other, suffix), equal=False)
    for group in family.equal[1:]:
        for other in names:
            near = other.split()[0] == group[0].split()[0]
            if near and other not in group and other != names[0]:
                yield FactPair(
                    file_name(title, group[0], suffix), file_name(title, other, suffix), equal=False
                )


def _cross_pairs() -> Iterator[FactPair]:
    """Yield pairs of files of different frameworks: the same activation, and others."""
    sides = (".keras", ".h5", ".onnx")
    for a in sides:
        for b in sides:
            if a == b:
                continue
            yield FactPair(file_name("mlp", "relu", a), file_name("mlp", "relu", b), equal=True)
            yield FactPair(file_name("mlp", "tanh", a), file_name("mlp", "tanh", b), equal=True)
            yield FactPair(file_name("mlp", "relu", a), file_name("mlp", "tanh", b), equal=False)
            for name in _CROSS[a]:
                yield FactPair(file_name("mlp", name, a), file_name("mlp", "relu", b), equal=False)
                yield FactPair(file_name("mlp", "relu", b), file_name("mlp", name, a), equal=False)
    yield FactPair("mlp_leaky_0.5_object.keras", "mlp_leaky_0.5.onnx", equal=True)
    yield FactPair("mlp_leaky_0.5_layer.h5", "mlp_leaky_0.5.onnx", equal=True)
    yield FactPair("mlp_leaky_0.5_layer.h5", "mlp_leaky_0.5_object.keras", equal=True)
    yield FactPair("mlp_elu_0.3_layer.keras", "mlp_elu_0.3.onnx", equal=True)
    for name in ("relu", "tanh", "leaky", "elu", "gelu", "relu tanh", "leaky 0.5", "gelu tanh", "softplus 3"):
        # The code of a whole module that is no supported policy must be named.
        if name not in ("leaky 0.5", "gelu tanh", "softplus 3"):
            yield FactPair(file_name("mlp", name, ".ts"), file_name("mlp", name, ".pt"), equal=True)
        yield FactPair(file_name("mlp", name, ".traced.ts"), file_name("mlp", name, ".ts"), equal=True)
        if name != "relu":
            yield FactPair(file_name("mlp", name, ".ts"), file_name("mlp", "relu", ".pt"), equal=False)
            yield FactPair(file_name("mlp", "relu", ".ts"), file_name("mlp", name, ".pt"), equal=False)


_CROSS = {
    ".keras": (
        "leaky 0.5 named relu",
        "sin function",
        "elu 0.3 layer",
        "leaky_relu by rewriting",
        "relu most 1",
    ),
    ".h5": ("leaky 0.5 named relu", "elu 0.3 layer", "relu most 1", "selu"),
    ".onnx": ("leaky 0.5", "sin", "elu 0.3", "gelu tanh"),
}
WRITERS = {"keras": (KERAS, (".keras",)), "keras_2": (KERAS_LEGACY, (".h5",)),
    "torch": (TORCH, (".ts", ".traced.ts", ".pt")), "onnx": (ONNX, (".onnx",))}  # fmt: skip


def pairs() -> Iterator[FactPair]:
    """Yield every pair."""
    for families, suffixes in WRITERS.values():
        for suffix in suffixes:
            for title, family in families.items():
                if (title, suffix) == ("convolution", ".pt"):
                    continue  # the code of a whole module that is no policy must be named
                yield from _family_pairs(title, family, suffix)
    yield from _cross_pairs()


def write(folder: Path) -> None:
    """Write all files, each framework's in a process of its own."""
    for name in WRITERS:
        program = f"from tests import fact_pairs; fact_pairs.write_{name}({str(folder)!r})"
        path = os.pathsep.join((str(ROOT), str(KERAS_2), os.environ.get("PYTHONPATH", "")))
        framework = "torch" if name == "torch" else "tensorflow"
        status, output = warm.run(framework, program, ROOT, {**os.environ, "PYTHONPATH": path})
        if status:
            raise RuntimeError(output[-4000:])


def outputs(folder: Path) -> dict[str, np.ndarray]:
    """Return the output of every file's model, computed by its framework."""
    outputs = {}
    for file in folder.glob("outputs*.npz"):
        with np.load(file) as arrays:
            outputs.update({name: arrays[name] for name in arrays.files})
    return outputs


def is_same(one: np.ndarray, two: np.ndarray) -> bool:
    """Return whether two outputs are equal within float32 rounding."""
    return one.shape == two.shape and bool(np.allclose(one, two, rtol=1e-4, atol=1e-5))


@dataclass(frozen=True)
class Outcome:
    """The exit status of `verify` of a pair, and what it reported."""

    pair: FactPair
    status: int
    engines: tuple[str, ...]
    text: str

    @property
    def right(self) -> bool:
        """Whether equal models pass, and different ones do not."""
        return (self.status == 0) is self.pair.equal


class NumpyWorker:
    """What Worker does, by NumPy in this process: the start of a framework takes most of the time."""

    def __init__(self, *_: object, **__: object) -> None:
        self.NAME = "numpy"

    def __enter__(self) -> NumpyWorker:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def build(self, network: Network) -> Policy:
        """Return the network's policy."""
        return numpy_backend.build(network)

    def versions(self) -> dict[str, str]:
        """Return the version."""
        return numpy_backend.versions()


@contextlib.contextmanager
def shared_processes() -> Iterator[None]:
    """Serve models by one process of each framework, and agents by this one."""
    with (
        shared_runners(lambda _: "torch"),
        mock.patch.object(verify_module, "Worker", NumpyWorker),
        mock.patch.object(two_models, "Worker", NumpyWorker),
    ):
        yield


def compare(folder: Path, pair: FactPair) -> Outcome:
    """Return what `verify` finds, with the exit status of the command."""
    files = [str(locate(folder, file)) for file in (pair.a, pair.b)]
    try:
        result = verify_module.verify(*files, **pair.options)
    except CkpttoolError as error:
        return Outcome(pair, 2, (), " ".join(str(error).split()))
    return Outcome(pair, 0 if result.within else 1, result.backends, "; ".join(result.assumed))


def main() -> None:
    """Print a row for each pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="a folder with the files, written if missing")
    parser.add_argument("--only", default="", help="a part of the pairs' names")
    parser.add_argument("--wrong", action="store_true", help="print wrong outcomes only")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(KERAS_2), os.environ.get("PYTHONPATH", "")))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        if not list(folder.glob("outputs*.npz")):
            folder.mkdir(exist_ok=True)
            write(folder)
        computed = outputs(folder)
        counts: dict[tuple[bool, int], int] = {}
        with shared_processes():
            for pair in pairs():
                if options.only not in pair.title:
                    continue
                truth = is_same(computed[pair.a], computed[pair.b])
                outcome = compare(folder, pair)
                counts[pair.equal, outcome.status] = counts.get((pair.equal, outcome.status), 0) + 1
                mark = "?" if truth is not pair.equal else "-+"[outcome.right]
                if mark != "+" or not options.wrong:
                    row = (mark, outcome.status, pair.title, "|", *outcome.engines, "|", outcome.text[:230])
                    print(*row, flush=True)  # noqa: T201
        for (equal, status), count in sorted(counts.items()):
            print(f"{'equal' if equal else 'different'} exit {status}: {count}")  # noqa: T201


if __name__ == "__main__":
    main()
