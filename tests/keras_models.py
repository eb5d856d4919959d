"""Keras models for the tests of its files; `build` runs in a process of its own."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

OPTIMIZERS = {
    "adam": ("Adam", {}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "adamw": ("AdamW", {}),
    "adamax": ("Adamax", {}),
    "nadam": ("Nadam", {}),
    "sgd": ("SGD", {"momentum": 0.9}),
    "plain_sgd": ("SGD", {}),
    "rmsprop": ("RMSprop", {}),
    "rmsprop_all": ("RMSprop", {"momentum": 0.9, "centered": True}),
    "adagrad": ("Adagrad", {}),
    "adadelta": ("Adadelta", {}),
    "ftrl": ("Ftrl", {}),
    "lion": ("Lion", {}),
    "lamb": ("Lamb", {}),
    "ema": ("Adam", {"use_ema": True}),
}


def digest(value: Any) -> str:
    import numpy as np

    array = np.ascontiguousarray(np.asarray(value))
    return hashlib.sha256(array.tobytes()).hexdigest()


def models(keras: Any) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return models by name with the shape of one input."""
    layers = keras.layers

    class Actor(keras.Model):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.l1 = layers.Dense(8, activation="relu")
            self.blocks = [layers.Dense(8, name="first"), layers.Dense(8, name="second")]
            self.a_last = layers.Dense(2, activation="tanh")
            self.scale = self.add_weight(shape=(2,), name="scale")

        def call(self, x: Any) -> Any:
            x = self.l1(x)
            for block in self.blocks:
                x = block(x)
            return self.a_last(x) * self.scale

    class Agent(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.actor = Actor(name="actor")
            self.critic = keras.Sequential([layers.Dense(8), layers.LayerNormalization(), layers.Dense(2)])

        def call(self, x: Any) -> Any:
            return self.actor(x) + self.critic(x)

    class Plain(keras.Model):
        """Attributes whose alphabetical order is not that of their creation."""

        def __init__(self) -> None:
            super().__init__()
            self.z = layers.Dense(6)
            self.m = layers.Dense(6)
            self.a = layers.Dense(6)

        def call(self, x: Any) -> Any:
            return self.a(self.m(self.z(x)))

    image = keras.Input((6, 6, 2), name="image")
    x = layers.Conv2D(3, 2, name="pixels")(image)
    x = layers.BatchNormalization(center=False)(x)
    x = layers.SeparableConv2D(4, 2, use_bias=False)(x)
    x = layers.Flatten()(x)
    inner = keras.Sequential([layers.Dense(5, name="frozen"), layers.Dense(3)], name="inner")
    inner_model = keras.Model(image, layers.Dropout(0.1)(inner(x)), name="vision")
    inner.layers[0].trainable = False

    words = keras.Input((5,), dtype="int32")
    y = layers.Embedding(7, 8)(words)
    y = layers.MultiHeadAttention(2, 4)(y, y)
    y = layers.Bidirectional(layers.GRU(3, return_sequences=True))(y)
    y = layers.LSTM(4)(y)
    recurrent = keras.Model(words, layers.Dense(2)(y), name="words")

    half = keras.Sequential([keras.Input((4,)), layers.Dense(3, dtype="bfloat16"), layers.Dense(2)])
    return {
        "agent": (Agent(), (4,)),
        "plain": (Plain(), (4,)),
        "actor": (Actor(name="alone"), (4,)),
        "vision": (inner_model, (6, 6, 2)),
        "words": (recurrent, (5,)),
        "half": (half, (4,)),
    }


def facts(model: Any) -> dict[str, Any]:
    """Return what Keras says of a model's variables and its optimizer's."""
    import numpy as np

    def one(variable: Any) -> dict[str, Any]:
        value = np.asarray(variable.value) if hasattr(variable, "value") else np.asarray(variable)
        return {
            "path": variable.path,
            "shape": list(value.shape),
            "dtype": str(value.dtype),
            "sha256": digest(value),
            "trainable": bool(variable.trainable),
        }

    optimizer = getattr(model, "optimizer", None)
    return {
        "variables": [one(v) for v in model.variables if "seed_generator" not in v.path],
        "trainable": [v.path for v in model.trainable_variables],
        "optimizer": [one(v) for v in optimizer.variables] if optimizer is not None else [],
    }


def train(model: Any, shape: tuple[int, ...], optimizer: Any) -> None:
    """Take one step on random data, so that every slot has a value of its own."""
    import numpy as np

    generator = np.random.default_rng(0)
    x = generator.random((4, *shape)).astype("float32") * 5
    x = x.astype("int32") if len(shape) == 1 and shape[0] == 5 else x
    y = model(x)
    # One step is no reason to trace and compile a graph, which takes a hundred times as long.
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=True)
    model.train_on_batch(x, generator.random(y.shape))


def build(folder: Path) -> dict[str, Any]:
    """Write every model in every form and return what Keras says of it."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(1)
    result: dict[str, Any] = {}
    for name, (model, shape) in models(keras).items():
        train(model, shape, keras.optimizers.Adam())
        model.save_weights(folder / f"{name}.weights.h5")
        model.save_weights(folder / f"{name}_shards.weights.json", max_shard_size=2e-6)
        if name not in ("agent", "plain", "actor"):
            model.save(folder / f"{name}.keras")
            model.save(folder / f"{name}.h5") if name != "half" else None
        result[name] = facts(model)
    for name, (cls, options) in OPTIMIZERS.items():
        small = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])
        train(small, (3,), getattr(keras.optimizers, cls)(**options))
        for variable in small.optimizer.variables[2:]:
            variable.assign(np.random.default_rng(len(variable.path)).random(variable.shape))
        small.save(folder / f"opt_{name}.keras")
        small.save_weights(folder / f"opt_{name}.weights.h5")
        result[f"opt_{name}"] = facts(small)
    return result


def load(folder: Path) -> dict[str, Any]:
    """Load the files that were written by us into fresh models and return what Keras finds in them."""
    import keras

    result: dict[str, Any] = {}
    for name, (model, shape) in models(keras).items():
        train(model, shape, keras.optimizers.Adam())
        for file in (f"ours_{name}", f"mapped_{name}"):
            if (folder / f"{file}.weights.h5").exists():
                model.load_weights(folder / f"{file}.weights.h5")
                result[file] = facts(model)
    return result


def build_tf_keras(folder: Path) -> dict[str, Any]:
    """Write one model of tf_keras in its four forms."""
    import numpy as np
    import tf_keras as keras

    keras.utils.set_random_seed(1)
    layers = keras.layers
    obs = keras.Input((4,), name="obs")
    x = layers.Dense(8, name="first")(obs)
    x = layers.BatchNormalization(scale=False)(x)
    inner = keras.Sequential([layers.Dense(3, name="frozen"), layers.Dense(3, name="free")], name="inner")
    model = keras.Model(obs, inner(x))
    inner.layers[0].trainable = False
    facts: dict[str, Any] = {}
    for name, optimizer in {
        "tfk": keras.optimizers.Adam(),
        "tfk_amsgrad": keras.optimizers.Adam(amsgrad=True),
        "tfk_legacy": keras.optimizers.legacy.Adam(),
        "tfk_rmsprop": keras.optimizers.RMSprop(momentum=0.5, centered=True),
    }.items():
        model.compile(optimizer=optimizer, loss="mse", run_eagerly=True)
        model.train_on_batch(np.random.default_rng(0).random((4, 4)), np.ones((4, 3)))
        model.save(folder / f"{name}.h5")
        if name != "tfk_legacy":
            model.save(folder / f"{name}.keras")
            model.save_weights(folder / f"{name}.weights.h5")
        model.save_weights(folder / f"{name}_weights.h5")
        variables = [(v.name, digest(v.numpy())) for v in model.variables]
        state = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
        facts[name] = {
            "variables": variables,
            "optimizer": [(v.name, digest(v.numpy())) for v in state],
            "trainable": [v.name for v in model.trainable_variables],
        }
    return facts
