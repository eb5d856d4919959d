"""Policies of Keras and TensorFlow in every form, for test_policy_alone.py; run in child processes only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def observations(n: int = 64) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 3, (n, 3)).astype(np.float32)


def modules(tf: Any) -> dict[str, Any]:
    """Return modules of TensorFlow alone: a chain, two that are none, and one that is not followed."""

    class Module(tf.Module):  # type: ignore[misc]
        def __init__(self, kind: str) -> None:
            super().__init__()
            random = tf.random.Generator.from_seed(4)
            self.kind = kind
            self.w = [tf.Variable(random.normal(shape)) for shape in ((3, 8), (8, 8), (8, 1))]
            self.b = [tf.Variable(random.normal(shape)) for shape in ((8,), (8,), (1,))]

        def __call__(self, x: Any) -> Any:
            first = tf.nn.elu(tf.matmul(x, self.w[0]) + self.b[0])
            x = tf.nn.silu(tf.matmul(first, self.w[1]) + self.b[1])
            if self.kind == "summed":
                x = x + first
            if self.kind == "hidden_scale":
                x = 3.0 * x
            if self.kind == "sine":
                x = tf.sin(x)
            return {"action": 0.5 + 1.5 * tf.tanh(tf.matmul(x, self.w[2]) + self.b[2])}["action"]

    return {kind: Module(kind) for kind in ("module", "summed", "hidden_scale", "sine")}


def keras_files(folder: Path) -> dict[str, Any]:
    """Save policies of Keras in every form; return what each gives for the observations."""
    import keras
    import tensorflow as tf

    layers = keras.layers
    keras.utils.set_random_seed(3)

    def dense(*, scaled: bool) -> Any:
        after = [layers.Rescaling(2.0)] if scaled else []
        parts = [layers.Dense(8, activation="relu"), layers.Dense(8, activation="silu")]
        return keras.Sequential([keras.Input((3,)), *parts, layers.Dense(1, activation="tanh"), *after])

    inputs = keras.Input((3,))
    x = layers.LayerNormalization(epsilon=0.01)(layers.Dense(8)(inputs))
    x = layers.Dropout(0.5)(layers.ReLU()(x))
    functional = keras.Model(inputs, layers.Dense(1)(layers.Dense(6, activation="softplus")(x)))
    skip = layers.Dense(3, activation="relu")(inputs)
    skipping = keras.Model(inputs, layers.Dense(1)(layers.Add()([skip, inputs])))
    leaky = keras.Sequential([keras.Input((3,)), layers.Dense(4, activation="leaky_relu"), layers.Dense(1)])
    files = {}
    for name, model in (("scaled", dense(scaled=True)), ("functional", functional)):
        model.save(f"{name}.keras")
        model.save(f"{name}.h5")
        files[f"{name}.keras"] = files[f"{name}.h5"] = model(observations()).numpy().tolist()
    bare = dense(scaled=False)
    bare.save_weights("bare.weights.h5")
    bare.save("bare.keras")
    tf.train.Checkpoint(model=bare).write("bare")
    tf.saved_model.save(bare, "bare_saved")
    bare.export("bare_exported", verbose=False)
    files["bare"] = bare(observations()).numpy().tolist()
    for name, module in modules(tf).items():
        call = tf.function(module, input_signature=[tf.TensorSpec((None, 3))])
        tf.saved_model.save(module, name, signatures={"serving_default": call})
        files[name] = module(observations()).numpy().tolist()
    summed = keras.Model(inputs, layers.Dense(1)(layers.Softmax()(layers.Dense(4)(inputs))))
    tf.saved_model.save(leaky, "leaky_saved")
    files["leaky_saved"] = leaky(observations()).numpy().tolist()
    for name, model in (("skipping", skipping), ("leaky", leaky), ("softmax", summed)):
        model.save(f"{name}.keras")
        files[f"{name}.keras"] = model(observations()).numpy().tolist()
    return files
