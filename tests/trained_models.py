"""Twin models with every optimizer, trained by their own framework; used in child processes and by `--like`.

This file imports no framework: a function imports its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RATE = 0.03125
STEPS = (1, 100)
TRAINED = 5
IMAGE = (6, 5, 2)  # height, width, channels: not square, so that a wrong flattening shows

_ADAM, _ADAM_TORCH = (
    {"beta_1": 0.875, "beta_2": 0.9921875, "epsilon": 1e-14},
    {"betas": (0.875, 0.9921875), "eps": 1e-14},
)
# TensorFlow adds RMSprop's epsilon inside the root: only a tiny one means the same in PyTorch.
_RMS, _RMS_TORCH = {"rho": 0.75, "epsilon": 1e-22}, {"alpha": 0.75, "eps": 1e-22}
_ALL = {"momentum": 0.5, "centered": True}
_GRADIENTS = {"initial_accumulator_value": 0.125}
_NESTEROV = {"momentum": 0.875, "nesterov": True}
_DECAY = {"weight_decay": 0.125}


class OptimizerCase(NamedTuple):
    """One optimizer: its class and arguments in Keras and in PyTorch.

    `masked` exempts biases from weight decay; `limit` is that of the relative error of updates.
    """

    keras: str
    settings: dict[str, Any]
    torch: str
    arguments: dict[str, Any]
    rate: float = RATE
    masked: bool = False
    dtype: str = "float64"
    limit: float = 1e-10


def _in_float32(case: OptimizerCase, limit: float = 1e-4) -> OptimizerCase:
    return case._replace(dtype="float32", limit=limit)


# Numbers that float32 holds: Keras rounds settings to it even for weights of float64.
_WITH_ADAM = OptimizerCase("Adam", _ADAM, "Adam", _ADAM_TORCH, RATE / 8)
_WITH_ADAMW = OptimizerCase("AdamW", {**_ADAM, **_DECAY}, "AdamW", {**_ADAM_TORCH, **_DECAY}, RATE / 8)
_WITH_RMSPROP = OptimizerCase("RMSprop", _RMS, "RMSprop", _RMS_TORCH, RATE / 64)
_WITH_NESTEROV = OptimizerCase("SGD", _NESTEROV, "SGD", _NESTEROV)
CASES = {
    "adam": _WITH_ADAM,
    "adam32": _in_float32(_WITH_ADAM),
    # Both defaults of epsilon, which is added before the bias correction in Keras and after it in PyTorch.
    "default_epsilon": _in_float32(OptimizerCase("Adam", {}, "Adam", {}, 0.001), 1e-3),
    "amsgrad": _WITH_ADAM._replace(
        settings={**_ADAM, "amsgrad": True}, arguments={**_ADAM_TORCH, "amsgrad": True}
    ),
    "adamw": _WITH_ADAMW,
    "adamw32": _in_float32(_WITH_ADAMW),
    "masked": _WITH_ADAMW._replace(masked=True),
    "rmsprop": _WITH_RMSPROP,
    "rmsprop32": _in_float32(_WITH_RMSPROP),
    "centered": OptimizerCase("RMSprop", {**_RMS, **_ALL}, "RMSprop", {**_RMS_TORCH, **_ALL}, RATE / 256),
    "sgd": OptimizerCase("SGD", {}, "SGD", {}),
    "momentum": OptimizerCase("SGD", {"momentum": 0.875}, "SGD", {"momentum": 0.875}),
    "nesterov": _WITH_NESTEROV,
    "nesterov32": _in_float32(_WITH_NESTEROV),
    "adagrad": OptimizerCase(
        "Adagrad", {**_GRADIENTS, "epsilon": 1e-14}, "Adagrad", {**_GRADIENTS, "eps": 1e-14}
    ),
    "adamax": OptimizerCase("Adamax", _ADAM, "Adamax", _ADAM_TORCH, RATE / 8),
}
FORMS = {name: "tf" if number % 2 else "keras" for number, name in enumerate(CASES)}


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs, channels last, and the targets of the quadratic loss."""
    generator = np.random.default_rng(11)
    return generator.standard_normal((16, *IMAGE)), generator.standard_normal((16, 2))


def masked_names(names: Iterator[str]) -> list[str]:
    """Return the names of biases."""
    return [name for name in names if name.endswith("bias")]


# In PyTorch.


def torch_model(dtype: str = "float64") -> Any:
    """Return the model: a convolution, a flattened image, two dense layers, one of them square."""
    import torch
    from torch import nn

    net = nn.Module()
    net.conv = nn.Conv2d(IMAGE[2], 3, 3)
    net.hidden = nn.Linear(36, 8)
    net.square = nn.Linear(8, 8)
    net.head = nn.Linear(8, 2)

    class Twin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.hidden, self.square, self.head = net.conv, net.hidden, net.square, net.head

        def forward(self, x: Any) -> Any:
            x = torch.tanh(self.conv(x)).flatten(1)
            return self.head(torch.tanh(self.square(torch.tanh(self.hidden(x)))))

    return Twin().to(getattr(torch, dtype))


def torch_model32() -> Any:
    """Return the model in float32, by the name that `factory` states."""
    return torch_model("float32")


def torch_optimizer(case: OptimizerCase, model: Any) -> Any:
    """Return the case's optimizer; masked parameters are the second group."""
    import torch

    named = dict(model.named_parameters())
    groups: Any = list(named.values())
    if case.masked:
        plain = masked_names(iter(named))
        groups = [
            {"params": [named[name] for name in named if name not in plain]},
            {"params": [named[name] for name in plain], "weight_decay": 0.0},
        ]
    return getattr(torch.optim, case.torch)(groups, lr=case.rate, **case.arguments)


def torch_steps(model: Any, optimizer: Any, count: int) -> None:
    """Make that many updates on the quadratic loss."""
    import torch

    dtype = next(model.parameters()).dtype
    inputs, target = (torch.tensor(array, dtype=dtype) for array in batch())
    for _ in range(count):
        optimizer.zero_grad()
        loss = ((model(inputs.permute(0, 3, 1, 2)) - target) ** 2).mean()
        loss.backward()
        optimizer.step()


def torch_outputs(model: Any) -> list[np.ndarray]:
    """Return the weights in Keras's orientation."""
    outputs = []
    for name, value in model.state_dict().items():
        array = value.detach().double().numpy().copy()
        if array.ndim == 4:
            array = array.transpose(2, 3, 1, 0)
        elif name == "hidden.weight":
            array = array.reshape(8, 3, 4, 3).transpose(2, 3, 1, 0).reshape(36, 8)
        outputs.append(array.T if array.ndim == 2 and name != "hidden.weight" else array)
    return outputs


# In Keras.


def keras_model(dtype: str = "float64") -> Any:
    """Return the twin."""
    import keras

    dense = keras.layers.Dense
    return keras.Sequential(
        [
            keras.Input(IMAGE, dtype=dtype),
            keras.layers.Conv2D(3, 3, activation="tanh", name="conv", dtype=dtype),
            keras.layers.Flatten(dtype=dtype),
            dense(8, "tanh", name="hidden", dtype=dtype),
            dense(8, "tanh", name="square", dtype=dtype),
            dense(2, name="head", dtype=dtype),
        ]
    )


def keras_model32() -> Any:
    """Return the twin in float32."""
    return keras_model("float32")


def keras_optimizer(case: OptimizerCase, model: Any) -> Any:
    """Return the case's optimizer, built."""
    import keras

    optimizer = getattr(keras.optimizers, case.keras)(learning_rate=case.rate, **case.settings)
    if case.masked:
        optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.build(model.trainable_variables)
    return optimizer


def keras_steps(model: Any, optimizer: Any, count: int) -> None:
    """Make that many updates on the quadratic loss."""
    import tensorflow as tf

    dtype = model.trainable_variables[0].dtype
    inputs, target = (tf.constant(array, dtype) for array in batch())

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs) - target) ** 2)
        weights = [variable.value for variable in model.trainable_variables]
        optimizer.apply(tape.gradient(loss, weights), model.trainable_variables)

    run = tf.function(step)
    for _ in range(count):
        run()


def keras_outputs(model: Any) -> list[np.ndarray]:
    """Return the weights."""
    return [np.asarray(variable, np.float64) for variable in model.trainable_variables]


# On both sides.


def note_steps(folder: Path, stem: str, model: Any, optimizer: Any, framework: str) -> None:
    """Record the weights now, after one more update, and after a hundred."""
    steps, outputs = (torch_steps, torch_outputs) if framework == "torch" else (keras_steps, keras_outputs)
    arrays = {f"0/{n}": array for n, array in enumerate(outputs(model))}
    done = 0
    for count in STEPS:
        steps(model, optimizer, count - done)
        done = count
        arrays |= {f"{count}/{n}": array for n, array in enumerate(outputs(model))}
    np.savez(folder / f"{stem}.npz", **arrays)


def factory(case: OptimizerCase, framework: str) -> str:
    """Return the `--like` name of the case's model."""
    return f"trained_models:{framework}_model{'32' if case.dtype == 'float32' else ''}"


def update_error(folder: Path, source: str, target: str, count: int) -> float:
    """Return the largest difference of two runs' updates after `count` steps, relative to the update."""
    with np.load(folder / f"{source}.npz") as one, np.load(folder / f"{target}.npz") as other:
        largest = 0.0
        for name in one.files:
            when, _, number = name.partition("/")
            if when == str(count):
                before = one[f"0/{number}"]
                moved = one[name] - before
                differs = other[name] - other[f"0/{number}"] - moved
                largest = max(largest, float(np.linalg.norm(differs) / np.linalg.norm(moved)))
        return largest
