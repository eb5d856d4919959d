"""Keras models of many kinds and their inputs; each has a twin of the same name in like_torch.py.

Runs where TensorFlow may be imported: in the children of test_like.py, and as what `--like` names.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers as L  # noqa: N812 - as everybody calls it

try:
    import tf_keras
except ImportError:
    tf_keras = None


def conv_net(library: Any = keras) -> Any:
    k = library.layers
    return library.Sequential(
        [
            library.Input((8, 10, 3)),
            k.Conv2D(6, 3, padding="same"),
            k.BatchNormalization(),
            k.ReLU(),
            k.Conv2D(5, 3, use_bias=False),
            k.BatchNormalization(),
            k.Flatten(),
            k.Dense(16, activation="tanh"),
            k.Dense(4),
        ]
    )


def old_conv_net() -> Any:
    return conv_net(tf_keras)


def stacked_lstm(library: Any = keras) -> Any:
    k = library.layers
    return library.Sequential(
        [
            library.Input((7, 5)),
            k.Bidirectional(k.LSTM(6, return_sequences=True)),
            k.Bidirectional(k.LSTM(6, return_sequences=True)),
            k.Dense(3),
        ]
    )


def old_stacked_lstm() -> Any:
    return stacked_lstm(tf_keras)


def grus() -> Any:
    return keras.Sequential(
        [
            keras.Input((7, 5)),
            L.GRU(6, return_sequences=True),
            L.SimpleRNN(4, return_sequences=True),
            L.Dense(2),
        ]
    )


def transformer() -> Any:
    words = keras.Input((9,), dtype="int32")
    x = L.Embedding(20, 16)(words)
    for _ in range(2):
        attended = L.MultiHeadAttention(4, 4)(x, x)
        x = L.LayerNormalization(epsilon=1e-5)(L.Add()([x, attended]))
        inner = L.Dense(16)(L.Dense(32, activation="relu")(x))
        x = L.LayerNormalization(epsilon=1e-5)(L.Add()([x, inner]))
    return keras.Model(words, L.Dense(20)(x))


class Subclassed(keras.Model):
    """Not built before it is called; `first` is made after `second`, as wide as that one."""

    def __init__(self) -> None:
        super().__init__()
        self.second = L.Dense(12, activation="tanh")
        self.first = L.Dense(12, activation="relu")
        self.body = keras.Sequential([L.Dense(12), L.LayerNormalization(epsilon=1e-5), L.Dense(12)])
        self.out = L.Dense(3)

    def call(self, x: Any) -> Any:
        return self.out(self.body(self.second(self.first(x))))


def _block(x: Any, channels: int) -> Any:
    for _ in range(2):
        x = L.Conv2D(channels, 3, padding="same", use_bias=False)(x)
        x = L.ReLU()(L.BatchNormalization(epsilon=1e-5)(x))
    return x


def u_net() -> Any:
    image = keras.Input((32, 32, 3))
    x, skips = image, []
    for _ in range(4):
        x = _block(x, 8)
        skips.append(x)
        x = L.MaxPooling2D(2)(x)
    x = _block(x, 8)
    for skip in reversed(skips):
        x = L.Conv2DTranspose(8, 2, strides=2)(x)
        x = _block(L.Concatenate()([skip, x]), 8)
    return keras.Model(image, L.Conv2D(2, 1)(x))


def square() -> Any:
    return keras.Sequential([keras.Input((256,)), *(L.Dense(256, activation="tanh") for _ in range(4))])


class TwinCritic(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.q2 = keras.Sequential(
            [L.Dense(24, activation="relu"), L.Dense(24, activation="relu"), L.Dense(1)]
        )
        self.q1 = keras.Sequential(
            [L.Dense(24, activation="relu"), L.Dense(24, activation="relu"), L.Dense(1)]
        )

    def call(self, x: Any) -> Any:
        return tf.concat([self.q1(x), self.q2(x)], axis=-1)


class Tied(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.words = L.Embedding(11, 8)
        self.mix = L.Dense(8, activation="tanh")

    def call(self, x: Any) -> Any:
        return tf.matmul(self.mix(self.words(x)), self.words.embeddings, transpose_b=True)


def kinds() -> Any:
    image = keras.Input((12, 12, 4))
    x = L.DepthwiseConv2D(3, depth_multiplier=2)(image)
    x = L.PReLU(shared_axes=(1, 2))(x)
    x = L.Conv2D(8, 3, groups=2)(x)
    x = L.GroupNormalization(4, epsilon=1e-5)(x)
    x = L.Conv2DTranspose(6, 4)(x)
    x = L.GlobalAveragePooling2D()(x)
    return keras.Model(image, L.Dense(6)(L.Dense(6, activation="tanh")(x)))


class _Linear(tf.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.w = tf.Variable(tf.random.normal((inputs, outputs)))
        self.b = tf.Variable(tf.random.normal((outputs,)))

    def __call__(self, x: Any) -> Any:
        return tf.matmul(x, self.w) + self.b


class Module(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [_Linear(5, 5), _Linear(5, 5)]
        self.log_std = tf.Variable(tf.random.normal((5,)))

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = tf.nn.tanh(layer(x))
        return x * tf.exp(self.log_std)


# The form that each is kept in: all are there.
FORMS = {
    "conv_net": "tf",
    "old_conv_net": "tf",
    "stacked_lstm": "tf",
    "old_stacked_lstm": "keras",
    "grus": "keras",
    "transformer": "tf",
    "Subclassed": "tf",
    "u_net": "keras",
    "square": "tf",
    "TwinCritic": "tf",
    "Tied": "tf",
    "kinds": "tf",
    "Module": "tf",
}


def gated() -> Any:
    """The twin of like_small's Gated: two layers of one shape that only outputs tell apart."""
    x = keras.Input((6,))
    y = L.LayerNormalization(epsilon=1e-5, name="n_j")(x)
    joined = L.Multiply()([L.Dense(6, "sigmoid", name="r")(y), L.Dense(6, name="s")(y)])
    return keras.Model(x, L.LayerNormalization(epsilon=1e-5, name="n_i")(joined))
