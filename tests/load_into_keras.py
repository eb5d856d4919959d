"""What test_load_into.py has TensorFlow and Keras do, in a process that never sees PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import ckpttool
from ckpttool.core import MappingError
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE
from tests.test_like import scramble

TF, PT = str(TF_SAMPLE), str(TORCH_SAMPLE)


def products(tf: Any, folder: Path) -> dict[str, Any]:
    """Fill a tf.Module of square matrices from [out, in]; return by its product what it then computes."""
    matrix = np.arange(9, dtype=np.float32).reshape(3, 3)

    class Layer(tf.Module):  # type: ignore[misc]
        def __init__(self, turned: bool) -> None:
            super().__init__()
            self.turned, self.w, self.b = turned, tf.Variable(tf.eye(3)), tf.Variable(tf.zeros(3))

        def __call__(self, inputs: Any) -> Any:
            return tf.matmul(inputs, self.w, transpose_b=self.turned) + self.b

    class Silent(Layer):  # type: ignore[misc]
        def __call__(self, inputs: Any, other: Any) -> Any:
            return inputs + other

    np.savez(folder / "north.npz", **{"north.weight": matrix, "north.bias": np.zeros(3, np.float32)})
    assumptions = {}
    for name, layer in {"turned": Layer(True), "plain": Layer(False), "silent": Silent(False)}.items():
        model = tf.Module()
        model.north = layer
        done = ckpttool.load_into(model, folder / "north.npz", from_="torch")
        identity = np.eye(3, dtype=np.float32)
        right = name == "silent" or np.array_equal(layer(identity).numpy(), identity @ matrix.T)
        assumptions[name] = [right, sum("in the model" in assumption for assumption in done.report.assumed)]
    return assumptions


def vectors_of_root(keras: Any, folder: Path) -> list[list[str]]:
    """Fill a model that has a vector of its own beside its layers; return what fills it."""

    class Scaled(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first = keras.layers.Dense(3)
            self.scale = self.add_weight(shape=(3,), name="scale")

        def call(self, inputs: Any) -> Any:
            return self.first(inputs) * self.scale

    model = Scaled()
    model(np.zeros((1, 2), np.float32))
    arrays = {"first.weight": np.ones((3, 2)), "first.bias": np.ones(3), "scale": np.ones(3)}
    np.savez(folder / "root.npz", **{name: array.astype(np.float32) for name, array in arrays.items()})
    done = ckpttool.load_into(model, folder / "root.npz", from_="torch")
    return [[match.source, match.target] for match in done.matched]


def statistics(keras: Any, folder: Path) -> dict[str, Any]:
    """Fill models with a normalization from a program without one, and save them filled."""
    statistics = {}
    x = np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3)
    for name in ("identity", "adapted"):
        normalization = keras.layers.Normalization()
        layers = [keras.layers.Input((3,)), normalization, keras.layers.Dense(4)]
        model = keras.Sequential(layers)
        if name == "adapted":
            normalization.adapt(np.arange(9, dtype=np.float32).reshape(3, 3))
        try:
            done = ckpttool.load_into(model, folder / "linear.pt", verify=False)
            statistics[name] = [done.complete, any("adapt_mean" in item for item in done.report.assumed)]
        except MappingError:
            statistics[name] = [False, False]
        model.save(folder / f"{name}.keras")
        np.save(folder / f"{name}.npy", np.asarray(model(x)))
    return statistics


def filled(folder: Path) -> dict[str, Any]:
    """Fill models of both libraries; return what was said of each, and what came out of it."""
    import keras
    import tensorflow as tf

    def model(*names: str) -> Any:
        layers = [keras.layers.Dense(n, name=name) for n, name in zip((64, 64, 1), names, strict=True)]
        return keras.Sequential([keras.layers.Input((3,)), *layers])

    class Layer(tf.Module):  # type: ignore[misc]
        def __init__(self, i: int, o: int) -> None:
            super().__init__()
            self.w, self.b = tf.Variable(tf.zeros((i, o))), tf.Variable(tf.zeros(o))

    class Chain(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.l1, self.l2, self.l3 = Layer(3, 64), Layer(64, 64), Layer(64, 1)

    class Agent(tf.Module):  # type: ignore[misc]
        """What TensorFlow's own `variables` says nothing of: a layer of Keras 3."""

        def __init__(self, actor: Any, *more: Any) -> None:
            super().__init__()
            self.actor, self.more = actor, more

    class Unbuilt(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.l1, self.l2, self.l3 = (keras.layers.Dense(n) for n in (64, 64, 1))

        def call(self, inputs: Any) -> Any:
            return self.l3(self.l2(self.l1(inputs)))

    def refused(what: Any, *more: Any, **options: Any) -> str:
        before = [value.numpy() for value in what.variables]
        try:
            ckpttool.load_into(what, *more, **options)
        except MappingError as error:
            same = all(map(np.array_equal, before, (value.numpy() for value in what.variables)))
            return f"{error.message} {same}"
        return "was not refused"

    stored = ckpttool.open(PT)["actor"]
    kernel = stored["l1/weight"].numpy().T
    results: dict[str, Any] = {}
    models = {"keras": model("a", "b", "c"), "chain": Chain(), "unbuilt": Unbuilt()}
    for name, item in models.items():
        done = ckpttool.load_into(item, PT, part="actor")
        first = next(v for v in getattr(item, "weights", None) or item.variables if tuple(v.shape) == (3, 64))
        by = sorted({match.by for match in done.matched})
        results[name] = [done.filled, done.complete, by, bool(np.array_equal(first.numpy(), kernel))]
    agent = Agent(model("l1", "l2", "l3"))
    done = ckpttool.load_into(agent, TF, part="policy", strict=False)
    same = np.array_equal(
        agent.actor.layers[0].kernel.numpy(), ckpttool.open(TF)["policy/actor/l1/kernel"].numpy()
    )
    results["agent"] = [done.filled, bool(same)]
    results["more"] = refused(Agent(model("l1", "l2", "l3"), tf.Variable(1.0)), TF, part="policy")
    half = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(64, dtype="float16")])
    done = ckpttool.load_into(half, PT, part="actor/l1")
    results["products"] = products(tf, folder)
    results["root"] = vectors_of_root(keras, folder)
    results["half"] = [len(done.cast), half.weights[0].numpy().dtype.name]
    results["unlike"] = refused(model("l1", "l2", "l3"), PT, part="critic/q1")
    results["diff"] = [
        ckpttool.diff(PT, models["keras"], part="actor").identical,
        ckpttool.diff(models["chain"], models["chain"]).by,
    ]
    pictures = keras.Sequential(
        [
            keras.layers.Input((8, 10, 3)),
            keras.layers.Conv2D(6, 3, padding="same"),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Conv2D(5, 3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(4),
        ]
    )
    scramble(pictures)
    pictures.save_weights(folder / "conv.weights.h5")
    batch = np.linspace(-1, 1, 3 * 8 * 10 * 3, dtype=np.float32).reshape(3, 8, 10, 3)
    results["pictures"] = np.asarray(pictures(batch)).tolist()
    saved = tf.train.Checkpoint(models["chain"]).save(str(folder / "chain"))
    results["doctor"] = [
        [item.sentence for item in ckpttool.doctor(saved, model=what).findings if item.topic == "model"]
        for what in (models["chain"], Unbuilt())
    ]
    results["statistics"] = statistics(keras, folder)
    return results
