"""Checkpoints without a layout go to the other framework, which loads them, computes the same and trains on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.ops.convert import convert
from tests import tensorflow_child

# Numbers that float32 holds, and an epsilon that does not matter: the frameworks add it at different places.
RATE = 0.03125
ADAM = {"betas": (0.875, 0.9921875), "eps": 1e-14}
KERAS_ADAM = {"beta_1": 0.875, "beta_2": 0.9921875, "epsilon": 1e-14}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "adam": ("Adam", ADAM, "Adam", KERAS_ADAM),
    "adamw": ("AdamW", {**ADAM, "weight_decay": 0.03125}, "AdamW", {**KERAS_ADAM, "weight_decay": 0.03125}),
    "sgd": ("SGD", {"momentum": 0.875}, "SGD", {"momentum": 0.875}),
    "rmsprop": ("RMSprop", {"alpha": 0.75, "eps": 1e-14}, "RMSprop", {"rho": 0.75, "epsilon": 1e-14}),
}
SHAPES = {"mlp": (5, 4), "cnn": (5, 6, 6, 3)}
CASES = (*((name, "mlp") for name in OPTIMIZERS), ("adam", "cnn"))


def batch(kind: str) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(3)
    return draw.standard_normal(SHAPES[kind]), draw.standard_normal((5, 2))


def channels_first(x: np.ndarray) -> np.ndarray:
    return np.moveaxis(x, -1, 1) if x.ndim == 4 else x


# --- In PyTorch --------------------------------------------------------------------------------------------


def torch_net(kind: str) -> Any:
    import torch
    from torch import nn

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(4, 8)
            self.fc = nn.Linear(8, 2)

        def forward(self, x: Any) -> Any:
            return self.fc(torch.relu(self.fc1(x)))

    class Cnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.bn = nn.BatchNorm2d(4)
            self.fc = nn.Linear(4 * 4 * 4, 2)

        def forward(self, x: Any) -> Any:
            return self.fc(torch.relu(self.bn(self.conv(x))).flatten(1))

    torch.manual_seed(1)
    return {"mlp": Mlp, "cnn": Cnn}[kind]().double()


def torch_optimizer(name: str, net: Any) -> Any:
    import torch

    cls, settings, _, _ = OPTIMIZERS[name]
    return getattr(torch.optim, cls)(net.parameters(), RATE, **settings)


def torch_trained(net: Any, optimizer: Any, kind: str, steps: int) -> None:
    import torch

    x, y = (torch.from_numpy(each) for each in batch(kind))
    x = torch.from_numpy(np.ascontiguousarray(channels_first(x.numpy())))
    for _ in range(steps):
        optimizer.zero_grad()
        ((net(x) - y) ** 2).mean().backward()
        optimizer.step()


def torch_outputs(net: Any, kind: str, *, train: bool = False) -> np.ndarray:
    import torch

    x = torch.from_numpy(np.ascontiguousarray(channels_first(batch(kind)[0])))
    net.train(train)
    with torch.no_grad():
        found: np.ndarray = net(x).numpy()
    net.train()
    return found


# --- In TensorFlow -----------------------------------------------------------------------------------------


def keras_net(kind: str) -> Any:
    import keras

    class Mlp(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(dtype="float64")
            self.fc1 = keras.layers.Dense(8, activation="relu", dtype="float64")
            self.fc = keras.layers.Dense(2, dtype="float64")

        def call(self, x: Any) -> Any:
            return self.fc(self.fc1(x))

    class Cnn(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(dtype="float64")
            self.conv = keras.layers.Conv2D(4, 3, dtype="float64")
            self.bn = keras.layers.BatchNormalization(epsilon=1e-5, momentum=0.875, dtype="float64")
            self.flat = keras.layers.Flatten(dtype="float64")
            self.fc = keras.layers.Dense(2, dtype="float64")

        def call(self, x: Any, training: bool = False) -> Any:
            found = keras.ops.relu(self.bn(self.conv(x), training=training))
            return self.fc(self.flat(found))

    net = {"mlp": Mlp, "cnn": Cnn}[kind]()
    net(batch(kind)[0])
    return net


def keras_optimizer(name: str, net: Any) -> Any:
    import keras

    _, _, cls, settings = OPTIMIZERS[name]
    made = getattr(keras.optimizers, cls)(RATE, **settings)
    made.build(net.trainable_variables)
    return made


def keras_trained(net: Any, optimizer: Any, kind: str, steps: int) -> None:
    import tensorflow as tf

    x, y = batch(kind)
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(x, training=True) - y) ** 2)
        variables = net.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def _report(net: Any, optimizer: Any, kind: str) -> dict[str, Any]:
    before = np.asarray(net(batch(kind)[0])).tolist()
    keras_trained(net, optimizer, kind, 1)
    # With the batch's own statistics: only PyTorch corrects a running variance for its bias.
    return {"before": before, "after": np.asarray(net(batch(kind)[0], training=True)).tolist()}


def restored(folder: Path) -> dict[str, Any]:
    """Restore every converted checkpoint below the folder into new objects, strictly, and train on."""
    import tensorflow as tf

    found = {}
    for place in sorted(folder.glob("*.index")):
        name, kind = place.name.partition("-")[0].split("_")
        net = keras_net(kind)
        optimizer = keras_optimizer(name, net)
        epoch = tf.Variable(0, dtype=tf.int64)
        checkpoint = tf.train.Checkpoint(model_state_dict=net, optimizer_state_dict=optimizer, epoch=epoch)
        checkpoint.restore(str(place.with_suffix(""))).assert_consumed()
        found[f"{name}_{kind}"] = {**_report(net, optimizer, kind), "epoch": int(epoch)}
    for place in sorted(folder.glob("*.weights.h5")):
        name, kind = place.name.partition(".")[0].split("_")
        net = keras_net(kind)
        net.compile(keras_optimizer(name, net), "mse")
        net.load_weights(place)
        found[f"{name}_{kind}_h5"] = _report(net, net.optimizer, kind)
    return found


def written(folder: Path) -> dict[str, Any]:
    """Write checkpoints of TensorFlow in many forms, and return what each net gives now and a step later."""
    import keras
    import tensorflow as tf

    found = {}
    for name, kind in CASES:
        net = keras_net(kind)
        optimizer = keras_optimizer(name, net)
        keras_trained(net, optimizer, kind, 3)
        checkpoint = tf.train.Checkpoint(
            pi=net, opt=optimizer, step=tf.Variable(7, dtype=tf.int64), note=tf.Variable("run 1")
        )
        checkpoint.save(str(folder / f"{name}_{kind}"))
        if kind == "mlp":
            net.compile(optimizer, "mse")
            net.save_weights(folder / f"{name}_{kind}.weights.h5")
            tf.train.Checkpoint(net=net).write(str(folder / f"{name}_{kind}_compiled"))
        found[f"{name}_{kind}"] = _report(net, optimizer, kind)
    net = keras.Sequential(
        [
            keras.Input((4,), dtype="float64"),
            keras.layers.Dense(8, activation="relu", dtype="float64", name="fc1"),
            keras.layers.Dense(2, dtype="float64", name="fc"),
        ]
    )
    for name in OPTIMIZERS:
        optimizer = keras_optimizer(name, net)
        net.compile(optimizer, "mse")
        keras_trained(net, optimizer, "mlp", 3)
        net.save(folder / f"{name}_mlp.keras")
        net.save(folder / f"{name}_mlp.h5")
        found[f"{name}_sequential"] = _report(net, optimizer, "mlp")
    return found


# --- From PyTorch ------------------------------------------------------------------------------------------


def tutorial(folder: Path, name: str, kind: str) -> tuple[Path, Any, Any]:
    """Write the checkpoint of PyTorch's own tutorial; return it with the net and its optimizer."""
    import torch

    net = torch_net(kind)
    optimizer = torch_optimizer(name, net)
    torch_trained(net, optimizer, kind, 3)
    path = folder / f"{name}_{kind}.pt"
    content = {
        "epoch": 3,
        "model_state_dict": net.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "loss": 0.25,
    }
    torch.save(content, path)
    return path, net, optimizer


@pytest.fixture(scope="module")
def to_tensorflow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each net of the tutorial's form gives in PyTorch and, converted, in TensorFlow."""
    tensorflow_child.require("torch", "tensorflow", "keras")
    sources, folder = tmp_path_factory.mktemp("torch"), tmp_path_factory.mktemp("tensorflow")
    expected: dict[str, Any] = {}
    for name, kind in CASES:
        path, net, optimizer = tutorial(sources, name, kind)
        flatten = ["model_state_dict/fc=4,4,4"] if kind == "cnn" else []
        for target, to in ((f"{name}_{kind}-1", "tf"), (f"{name}_{kind}.weights.h5", "keras")):
            done = convert(str(path), str(folder / target), to=to, flatten=flatten, sync=False)
            assert done.written, done.report
        before = torch_outputs(net, kind)
        torch_trained(net, optimizer, kind, 1)
        expected[f"{name}_{kind}"] = {"before": before, "after": torch_outputs(net, kind, train=True)}
    return {"expected": expected, "found": tensorflow_child.run(__file__, "restored", folder)}


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize("form", ["", "_h5"])
def test_the_tutorials_checkpoint_trains_on_in_keras(
    to_tensorflow: Mapping[str, Any], name: str, kind: str, form: str
) -> None:
    expected, found = (
        to_tensorflow["expected"][f"{name}_{kind}"],
        to_tensorflow["found"][f"{name}_{kind}{form}"],
    )
    np.testing.assert_allclose(found["before"], expected["before"], rtol=0, atol=1e-12)
    assert not np.allclose(expected["after"], expected["before"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(found["after"], expected["after"], rtol=0, atol=1e-9)
    assert found.get("epoch", 3) == 3


# --- From TensorFlow ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def from_tensorflow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    tensorflow_child.require("torch", "tensorflow", "keras")
    folder = tmp_path_factory.mktemp("written")
    return folder, tensorflow_child.run(__file__, "written", folder)


# By file: what it was written with, the entries of its net and its optimizer in PyTorch, its optimizer's name.
FORMS = {
    "{}_mlp-1": ("{}_mlp", "pi", "opt", "opt"),
    "{}_cnn-1": ("{}_cnn", "pi", "opt", "opt"),
    "{}_mlp_compiled": ("{}_mlp", "net", "optimizer", "net/optimizer"),
    "{}_mlp.weights.h5": ("{}_mlp", "model", "optimizer", "optimizer"),
    "{}_mlp.keras": ("{}_sequential", "model", "optimizer", None),
    "{}_mlp.h5": ("{}_sequential", "model", "optimizer", None),
}


@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for form in FORMS for name, kind in CASES if kind in form]
)
def test_tensorflows_files_train_on_in_torch(
    from_tensorflow: tuple[Path, Mapping[str, Any]], tmp_path: Path, name: str, form: str
) -> None:
    import torch

    folder, wanted = from_tensorflow
    title, entry, state, said = FORMS[form]
    kind = "cnn" if "cnn" in form else "mlp"
    made = tmp_path / "made.pt"
    # What only a configuration in the file would say.
    given = [f"{said}/{setting}={value}" for setting, value in OPTIMIZERS[name][3].items()] if said else []
    flatten = ["pi/fc=4,4,4"] if kind == "cnn" else []
    done = convert(str(folder / form.format(name)), str(made), optimizer=given, flatten=flatten, sync=False)
    assert done.written, done.report
    content = torch.load(made)
    net = torch_net(kind)
    if kind == "cnn":
        net.bn.momentum = 0.125
    net.load_state_dict(content[entry])
    expected = wanted[title.format(name)]
    np.testing.assert_allclose(torch_outputs(net, kind), expected["before"], rtol=0, atol=1e-12)
    optimizer = torch_optimizer(name, net)
    optimizer.load_state_dict(content[state])
    net.train()
    torch_trained(net, optimizer, kind, 1)
    found = torch_outputs(net, kind, train=True)
    np.testing.assert_allclose(found, expected["after"], rtol=0, atol=1e-9)
    if form.endswith("-1"):
        assert (content["step"], content["note"]) == (7, "run 1")
