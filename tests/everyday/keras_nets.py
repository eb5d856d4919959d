"""The networks of the matrix in Keras 3 or Keras 2, as a user would write them, and their optimizers.

`keras` is the module of the Keras that builds them; both compute with TensorFlow.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.everyday.cases import INPUTS, NAMES

# The Keras of this process: keras (3) or tf_keras (2).
keras: Any = importlib.import_module(os.environ.get("EVERYDAY_KERAS", "keras"))
STEPS = 2


def layers(kind: str, epsilon: float, dtype: str = "float32") -> list[Any]:
    """Return new layers of a network, which carry their activations."""
    k = keras.layers
    layers: list[Any] = {
        "mlp": lambda: [
            k.Dense(24, "relu", dtype=dtype),
            k.Dense(24, "relu", dtype=dtype),
            k.Dense(1, "tanh", dtype=dtype),
        ],
        "gaussian": lambda: [k.Dense(24, "tanh"), k.Dense(24, "tanh"), k.Dense(1)],
        "layernorm": lambda: [k.Dense(8), k.LayerNormalization(epsilon=epsilon), k.Dense(3)],
        "cnn": lambda: [
            k.Conv2D(4, 3),
            k.BatchNormalization(epsilon=epsilon),
            k.Conv2D(5, 3, activation="relu"),
            k.Dense(7, "relu"),
            k.Dense(3),
        ],
        "lstm": lambda: [k.LSTM(6), k.Dense(2)],
        "gru": lambda: [k.GRU(6), k.Dense(2)],
        "block": lambda: [
            k.LayerNormalization(epsilon=epsilon),
            *(k.Dense(8) for _ in range(4)),
            k.LayerNormalization(epsilon=epsilon),
            k.Dense(16, "relu"),
            k.Dense(8),
            k.Dense(3),
        ],
        "encoder": lambda: [
            k.MultiHeadAttention(2, 4),
            k.Dense(16, "relu"),
            k.Dense(8),
            k.LayerNormalization(epsilon=epsilon),
            k.LayerNormalization(epsilon=epsilon),
        ],
        "embedding": lambda: [k.Embedding(11, 6), k.Dense(4)],
        "tied": lambda: [k.Embedding(11, 6), k.Dense(6, "relu"), None],
    }[kind]()
    return layers


def forward(kind: str, at: Sequence[Any], x: Any) -> Any:
    """Return what the layers compute of inputs as TensorFlow takes them, without training."""
    if kind == "cnn":
        x = at[2](tf.nn.relu(at[1](at[0](x), training=False)))
        return at[4](at[3](tf.reshape(x, [-1, 60])))
    if kind == "block":
        h = at[0](x)
        scores = tf.matmul(at[1](h), at[2](h), transpose_b=True) / 8**0.5
        x = x + at[4](tf.matmul(tf.nn.softmax(scores, -1), at[3](h)))
        return at[8](x + at[7](at[6](at[5](x))))
    if kind == "encoder":
        x = at[3](x + at[0](x, x))
        return at[4](x + at[2](at[1](x)))
    if kind == "embedding":
        return at[1](tf.reduce_mean(at[0](x), 1))
    if kind == "tied":
        h = at[1](tf.reduce_mean(at[0](x), 1))
        return tf.matmul(h, at[0].weights[0], transpose_b=True)
    if kind == "layernorm":
        return at[2](tf.nn.relu(at[1](at[0](x))))
    for layer in at:
        x = layer(x)
    return x


class Net(keras.Model):  # type: ignore[misc]
    """A network whose layers carry the given names as attributes."""

    def __init__(self, kind: str, names: Sequence[str], epsilon: float, dtype: str = "float32") -> None:
        super().__init__()
        self.kind = kind
        self.order = tuple(names)
        for name, layer in zip(names, layers(kind, epsilon, dtype), strict=True):
            if layer is not None:
                setattr(self, name, layer)

    def call(self, x: Any, training: bool = False) -> Any:
        return forward(self.kind, [getattr(self, name, None) for name in self.order], x)


def build(kind: str, names: Sequence[str] = (), epsilon: float = 1e-3, dtype: str = "float32") -> Any:
    """Return a new subclassed model with its variables made; `epsilon` is that of its norms."""
    net = Net(kind, names or NAMES[kind], epsilon, dtype)
    net(tf.constant(inputs(kind, 0)))
    return net


def sequential(kind: str, epsilon: float = 1e-3) -> Any:
    """Return the same network as a `Sequential`."""
    shape, _ = INPUTS[kind]
    at = layers(kind, epsilon)
    if kind == "cnn":
        h = keras.Input((*shape[1:], shape[0]))
        at[1:2] = [at[1], keras.layers.ReLU()]
        at[4:] = [
            keras.layers.Flatten(),
            keras.layers.Dense(7, "relu", name="hidden"),
            keras.layers.Dense(3, name="out"),
        ]
        return keras.Sequential([h, *at])
    return keras.Sequential([keras.Input(shape), *at])


def optimizer(kind: str, epsilon: float = 1e-7) -> Any:
    """Return a new optimizer of the matrix; `epsilon` is Adam's."""
    optim = keras.optimizers
    return {
        "adam": lambda: optim.Adam(1e-2, epsilon=epsilon),
        "adam_v1": lambda: optim.Adam(1e-2, epsilon=epsilon),
        "amsgrad": lambda: optim.Adam(1e-2, epsilon=epsilon, amsgrad=True),
        "adamw": lambda: optim.AdamW(1e-2, weight_decay=0.02, epsilon=epsilon),
        "sgd": lambda: optim.SGD(1e-3, momentum=0.9),
        "sgd_plain": lambda: optim.SGD(1e-3),
        "rmsprop": lambda: optim.RMSprop(1e-2, rho=0.9, epsilon=epsilon),
        "adagrad": lambda: optim.Adagrad(1e-2, epsilon=epsilon),
    }[kind]()


def inputs(kind: str, seed: int, rows: int = 5) -> np.ndarray:
    """Return the matrix's inputs as TensorFlow takes them."""
    shape, classes = INPUTS[kind]
    draw = np.random.default_rng(seed)
    if classes:
        return draw.integers(0, classes, (rows, *shape))
    array = draw.standard_normal((rows, *shape)).astype(np.float32)
    return np.moveaxis(array, 1, -1) if kind == "cnn" else array


def outputs(net: Any, kind: str) -> np.ndarray:
    """Return what a network computes of the matrix's inputs."""
    return np.asarray(tf.cast(net(tf.constant(inputs(kind, 1))), tf.float32))


def step(net: Any, kind: str, tool: Any, seed: int = 2) -> None:
    """Make one update towards random targets, without training norms' statistics."""
    x = tf.constant(inputs(kind, seed, 8))
    with tf.GradientTape() as tape:
        y = net(x)
        targets = np.random.default_rng(seed + 100).standard_normal(tuple(y.shape)).astype(np.float32)
        loss = tf.reduce_sum((tf.cast(y, tf.float32) - 3 * targets) ** 2)
    variables = net.trainable_variables
    # Keras updates only the rows of an embedding that a batch has, if their gradient is sparse; PyTorch all.
    gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]
    tool.apply_gradients(zip(gradients, variables, strict=True))


def train(net: Any, kind: str, tool: Any) -> None:
    """Train a few steps, so that moments and running statistics are numbers of their own."""
    for index in range(3):
        step(net, kind, tool, 10 + index)
    draw = np.random.default_rng(5)
    for variable in net.non_trainable_variables:
        if "moving" in variable.name:
            variable.assign(draw.uniform(0.5, 1.5, variable.shape))
    if kind == "mlp":
        net.trainable_variables[-2].assign(3 * net.trainable_variables[-2])


def continued(net: Any, kind: str, tool: Any) -> np.ndarray:
    """Return what the network computes after two more updates."""
    for index in range(STEPS):
        step(net, kind, tool, 20 + index)
    return outputs(net, kind)


def returns(net: Any, kind: str) -> np.ndarray:
    """Return the returns of two episodes of Pendulum that a policy plays."""
    import gymnasium

    totals = []
    scale = 1 if kind == "gaussian" else 2
    play = tf.function(lambda x: net(x))
    for seed in (1000, 1001):
        env = gymnasium.make("Pendulum-v1")
        observation, _ = env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            action = scale * np.asarray(play(tf.constant(observation.astype(np.float32)[None])))[0]
            observation, reward, ended, cut, _ = env.step(action)
            total, over = total + float(reward), ended or cut
        totals.append(total)
    return np.array(totals)
