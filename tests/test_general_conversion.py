"""Checkpoints without a layout: the other framework loads them, computes the same and trains on."""

from __future__ import annotations

import argparse
import copy
import json
import random
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.convert import ConversionResult, convert
from ckpttool.commands.digest import digest
from ckpttool.conversion.general import to_objects
from ckpttool.core import (
    AxisOrder,
    CkpttoolError,
    Inline,
    Leaf,
    MappingError,
    Tree,
    UsageError,
    WeightUse,
    attr,
    framework_order,
    plain_order,
)
from ckpttool.formats import open_checkpoint
from ckpttool.graphs.keras import read_document
from ckpttool.libraries import optimizers_read
from ckpttool.libraries.activation_orders import trace_graph_orders
from tests import tensorflow_child
from tests.golden_texts import Golden

# Numbers that float32 holds, and an epsilon that does not matter: the frameworks add it at different places.
RATE = 0.03125
ADAM = {"betas": (0.875, 0.9921875), "eps": 1e-14}
KERAS_ADAM = {"beta_1": 0.875, "beta_2": 0.9921875, "epsilon": 1e-14}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "adam": ("Adam", ADAM, "Adam", KERAS_ADAM),
    "adamw": ("AdamW", {**ADAM, "weight_decay": 0.03125}, "AdamW", {**KERAS_ADAM, "weight_decay": 0.03125}),
    "sgd": ("SGD", {"momentum": 0.875}, "SGD", {"momentum": 0.875}),
    "adagrad": (
        *("Adagrad", {"initial_accumulator_value": 0.125, "eps": 1e-14}),
        *("Adagrad", {"initial_accumulator_value": 0.125, "epsilon": 1e-14}),
    ),
    "adamax": ("Adamax", ADAM, "Adamax", KERAS_ADAM),
    # Its first steps are as small as the root of epsilon.
    "adadelta": ("Adadelta", {"rho": 0.75, "eps": 2**-10}, "Adadelta", {"rho": 0.75, "epsilon": 2**-10}),
    "rmsprop": ("RMSprop", {"alpha": 0.75, "eps": 1e-14}, "RMSprop", {"rho": 0.75, "epsilon": 1e-14}),
}
SHAPES = {"mlp": (5, 4), "cnn": (5, 6, 6, 3)}
EDGES = "_functional/_operations"
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
    return (Mlp if kind == "mlp" else Cnn)().double()


def torch_optimizer(name: str, net: Any) -> Any:
    import torch

    cls, settings, _, _ = OPTIMIZERS[name]
    return getattr(torch.optim, cls)(net.parameters(), RATE, **settings)


def torch_trained(net: Any, optimizer: Any, kind: str, steps: int) -> None:
    import torch

    x, y = (torch.from_numpy(array) for array in batch(kind))
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
        outputs: np.ndarray = net(x).numpy()
    net.train()
    return outputs


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
            features = keras.ops.relu(self.bn(self.conv(x), training=training))
            return self.fc(self.flat(features))

    net = (Mlp if kind == "mlp" else Cnn)()
    net(batch(kind)[0])
    return net


def keras_optimizer(name: str, net: Any) -> Any:
    import keras

    _, _, cls, settings = OPTIMIZERS[name]
    optimizer = getattr(keras.optimizers, cls)(RATE, **settings)
    optimizer.build(net.trainable_variables)
    return optimizer


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

    outcomes = {}
    for path in sorted(folder.glob("*.index")):
        name, kind = path.name.partition("-")[0].split("_")
        net = keras_net(kind)
        optimizer = keras_optimizer(name, net)
        epoch = tf.Variable(0, dtype=tf.int64)
        checkpoint = tf.train.Checkpoint(model_state_dict=net, optimizer_state_dict=optimizer, epoch=epoch)
        checkpoint.restore(str(path.with_suffix(""))).assert_consumed()
        outcomes[f"{name}_{kind}"] = {**_report(net, optimizer, kind), "epoch": int(epoch)}
    for path in sorted(folder.glob("*.weights.h5")):
        name, kind = path.name.partition(".")[0].split("_")
        net = keras_net(kind)
        net.compile(keras_optimizer(name, net), "mse")
        net.load_weights(path)
        outcomes[f"{name}_{kind}_h5"] = _report(net, net.optimizer, kind)
    return outcomes


def rebuilt(folder: Path) -> dict[str, Any]:
    """Load what conversions between TensorFlow's forms made, and train on."""
    import tensorflow as tf

    net = keras_net("mlp")
    net.compile(keras_optimizer("adam", net), "mse")
    net.load_weights(folder / "made.weights.h5")
    reports = {"weights": _report(net, net.optimizer, "mlp")}
    net = keras_net("mlp")
    optimizer = keras_optimizer("adam", net)
    checkpoint = tf.train.Checkpoint(fc1=net.fc1, fc=net.fc, optimizer=optimizer)
    checkpoint.restore(str(folder / "made-1")).assert_consumed()
    return {**reports, "objects": _report(net, optimizer, "mlp")}


def written(folder: Path) -> dict[str, Any]:
    """Write checkpoints of TensorFlow in many forms, and return what each net gives now and a step later."""
    import keras
    import tensorflow as tf

    files = {}
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
        files[f"{name}_{kind}"] = _report(net, optimizer, kind)
    image = keras.Input((6, 6, 3), dtype="float64")
    hidden = keras.layers.Conv2D(4, 3, dtype="float64", name="conv")(image)
    hidden = keras.layers.BatchNormalization(epsilon=1e-5, momentum=0.875, dtype="float64", name="bn")(hidden)
    hidden = keras.layers.Flatten(dtype="float64")(keras.layers.ReLU(dtype="float64")(hidden))
    net = keras.Model(image, keras.layers.Dense(2, dtype="float64", name="fc")(hidden))
    listed = keras.Sequential(net.layers)
    for title, model in (("functional", net), ("listed", listed)):
        optimizer = keras_optimizer("adam", model)
        model.compile(optimizer, "mse")
        keras_trained(model, optimizer, "cnn", 3)
        model.save(folder / f"adam_cnn_{title}.keras")
        model.save(folder / f"adam_cnn_{title}.h5")
        files[f"adam_{title}"] = _report(model, optimizer, "cnn")
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
        files[f"{name}_sequential"] = _report(net, optimizer, "mlp")
    return files


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
    expected, report = (
        to_tensorflow["expected"][f"{name}_{kind}"],
        to_tensorflow["found"][f"{name}_{kind}{form}"],
    )
    np.testing.assert_allclose(report["before"], expected["before"], rtol=0, atol=1e-12)
    assert not np.allclose(expected["after"], expected["before"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(report["after"], expected["after"], rtol=0, atol=1e-9)
    assert report.get("epoch", 3) == 3


# --- From TensorFlow ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def from_tensorflow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    tensorflow_child.require("torch", "tensorflow", "keras")
    folder = tmp_path_factory.mktemp("written")
    return folder, tensorflow_child.run(__file__, "written", folder, once=True)


# By file: what was saved, the entries of net and optimizer in PyTorch, the name of the optimizer.
FORMS = {
    "{}_mlp-1": ("{}_mlp", "pi", "opt", "opt"),
    "{}_cnn-1": ("{}_cnn", "pi", "opt", "opt"),
    "{}_mlp_compiled": ("{}_mlp", "net", "optimizer", "net/optimizer"),
    "{}_mlp.weights.h5": ("{}_mlp", "model", "optimizer", "optimizer"),
    "{}_mlp.keras": ("{}_sequential", "model", "optimizer", None),
    "{}_mlp.h5": ("{}_sequential", "model", "optimizer", None),
    **{
        f"{{}}_cnn_{title}{suffix}": (f"{{}}_{title}", "model", "optimizer", None)
        for title in ("functional", "listed")
        for suffix in (".keras", ".h5")
    },
}


@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for form in FORMS for name, kind in CASES if kind in form]
)
def test_tensorflows_files_train_on_in_torch(
    from_tensorflow: tuple[Path, Mapping[str, Any]], tmp_path: Path, name: str, form: str
) -> None:
    import torch

    folder, requested = from_tensorflow
    title, entry, state, text = FORMS[form]
    kind = "cnn" if "cnn" in form else "mlp"
    built = tmp_path / "made.pt"
    # What only a configuration in the file would say.
    inputs = [f"{text}/{setting}={value}" for setting, value in OPTIMIZERS[name][3].items()] if text else []
    # A configuration tells what is flattened.
    flatten = ["pi/fc=4,4,4"] if kind == "cnn" and text else []
    done = convert(str(folder / form.format(name)), str(built), optimizer=inputs, flatten=flatten, sync=False)
    assert done.written, done.report
    content = torch.load(built)
    net = torch_net(kind)
    if kind == "cnn":
        net.bn.momentum = 0.125
    net.load_state_dict(content[entry])
    expected = requested[title.format(name)]
    np.testing.assert_allclose(torch_outputs(net, kind), expected["before"], rtol=0, atol=1e-12)
    optimizer = torch_optimizer(name, net)
    optimizer.load_state_dict(content[state])
    net.train()
    torch_trained(net, optimizer, kind, 1)
    outputs = torch_outputs(net, kind, train=True)
    np.testing.assert_allclose(outputs, expected["after"], rtol=0, atol=1e-9)
    if form.endswith("-1"):
        assert (content["step"], content["note"]) == (7, "run 1")


def test_tensorflows_forms_become_each_other(
    from_tensorflow: tuple[Path, Mapping[str, Any]], tmp_path: Path
) -> None:
    folder, expected = from_tensorflow
    for form, to in (("adam_mlp-1", "keras"), ("adam_mlp.keras", "tf")):
        done = converted(folder / form, tmp_path, to)
        assert done.written, done.report
        assert done.report.complete
    reports = tensorflow_child.run(__file__, "rebuilt", tmp_path)
    for form, title in (("weights", "adam_mlp"), ("objects", "adam_sequential")):
        for when in ("before", "after"):
            np.testing.assert_allclose(reports[form][when], expected[title][when], rtol=0, atol=1e-9)


def test_a_schedules_learning_rate_is_not_made_up(
    from_tensorflow: tuple[Path, Mapping[str, Any]], tmp_path: Path
) -> None:
    folder, _ = from_tensorflow
    source = open_checkpoint(str(folder / "adam_mlp-1"))
    rates = [path for path in source.tree if str(path[-1].value) == "_learning_rate"]
    assert rates
    tree = Tree(
        {path: leaf for path, leaf in source.tree.items() if path not in rates},
        {path: others for path, others in source.tree.aliases.items() if path not in rates},
        source.tree.containers,
    )
    for settings, is_kept in (({}, False), ({"opt": {"learning_rate": 0.5}}, True)):
        plan = to_objects(tree, settings, file=True)
        assert plan is not None
        targets = {*(move.target for move in plan.moves), *plan.added}
        assert any(str(path[-1].value) == "_learning_rate" for path in targets) is is_kept


# --- Which parameters an optimizer trains ------------------------------------------------------------------


def saved(path: Path, content: Any) -> Path:
    import torch

    torch.save(content, path)
    return path


def square(seed: int = 0, names: tuple[str, str] = ("0", "1")) -> Any:
    """Two layers of one shape, which only order or names tell apart."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in names))


def stepped(parameters: Any, *nets: Any, steps: int = 2) -> Any:
    """An Adam after some steps on the nets' outputs, of different size for each parameter."""
    import torch

    optimizer = torch.optim.Adam(parameters, RATE)
    for step in range(steps):
        optimizer.zero_grad()
        for number, net in enumerate(nets, 1):
            ((net(torch.full((2, 3), number + step + 0.5)) - number) ** 2).mean().backward()
        optimizer.step()
    return optimizer


def moments(path: str, kind: str = "m") -> dict[str, np.ndarray]:
    """The slots in a TensorFlow checkpoint by the names of their variables."""
    tree = open_checkpoint(path).tree
    slots = [leaf for _, leaf in tree.tensors() if leaf.slot == kind and leaf.of is not None]
    return {tree.names[leaf.of]: leaf.array() for leaf in slots if leaf.of is not None}


def converted(source: Path, tmp_path: Path, to: str = "tf", **options: Any) -> ConversionResult:
    target = tmp_path / {"tf": "made-1", "keras": "made.weights.h5", "torch": "made.pt"}[to]
    return convert(str(source), str(target), to=to, sync=False, **options)


def require_left_out(done: ConversionResult, name: str) -> None:
    """Check that all but the optimizer is converted, that none of it is, and that a note says so."""
    assert done.report.complete, done.report
    assert any(note.startswith(f"{name} is left out: ") for note in done.report.notes), done.report.notes
    assert not any(name in entry.source.split("/")[:1] for entry in done.report.mapped)


@pytest.mark.parametrize("allow_missing", [False, True])
@pytest.mark.parametrize("names", [("actor", "critic"), ("one", "other")])
def test_two_adams_of_tensorflow_1_are_left_out_by_name(
    tmp_path: Path, names: tuple[str, str], *, allow_missing: bool
) -> None:
    """Which weights each count of updates belongs to is in no file; an Adam without one cannot step."""
    arrays: dict[str, Any] = {f"beta{n}_power{end}": np.float32(0.9) for n in (1, 2) for end in ("", "_1")}
    for net, sizes in zip(names, ([3, 5, 2], [3, 4, 1]), strict=True):
        for n in range(2):
            for weight, size in (("kernel", sizes[n : n + 2]), ("bias", sizes[n + 1 : n + 2])):
                for slot in ("", "/Adam", "/Adam_1"):
                    arrays[f"{net}/dense_{n}/{weight}{slot}"] = np.ones(size, np.float32)
    np.savez(tmp_path / "a.npz", **arrays)
    source = Path(convert(str(tmp_path / "a.npz"), str(tmp_path / "a-1"), to="tf1", sync=False).target)
    done = converted(source, tmp_path, to="torch", allow_missing=allow_missing)
    require_left_out(done, "optimizer")
    assert done.written
    roles = {leaf.role for _, leaf in open_checkpoint(done.target).tree.tensors()}
    assert roles == {"parameter"}


@pytest.mark.parametrize("named", [True, False])
def test_names_go_before_the_order(tmp_path: Path, named: bool) -> None:
    net = square()
    order = list(net.named_parameters())[::-1]
    optimizer = stepped(order if named else [parameter for _, parameter in order], net)
    done = converted(
        saved(tmp_path / "a.pt", {"model": net.state_dict(), "o": optimizer.state_dict()}), tmp_path
    )
    if not named:  # biases would have the moments of kernels
        require_left_out(done, "o")
        assert moments(done.target) == {}
        return
    slots = moments(done.target)
    for number, layer in enumerate(net):
        expected = optimizer.state[layer.weight]["exp_avg"].numpy().T
        np.testing.assert_array_equal(slots[f"model/{EDGES}/{number + 1}/kernel"], expected)


def test_equal_networks_are_told_apart_by_the_optimizers_names(tmp_path: Path) -> None:
    nets = {"G": square(1), "D": square(2)}
    states = {name: stepped(net.parameters(), net) for name, net in nets.items()}
    content = {f"net{name}": net.state_dict() for name, net in nets.items()}
    content |= {f"optimizer_{name}": states[name].state_dict() for name in ("D", "G")}
    done = converted(saved(tmp_path / "gan.pt", content), tmp_path)
    assert done.written, done.report
    slots = moments(done.target)
    for name, net in nets.items():
        expected = states[name].state[net[0].weight]["exp_avg"].numpy().T
        np.testing.assert_array_equal(slots[f"net{name}/{EDGES}/1/kernel"], expected)


@pytest.mark.parametrize("names", [("g", "d"), ("first", "second")])
def test_an_optimizer_of_one_of_equal_networks_is_left_out(tmp_path: Path, names: tuple[str, str]) -> None:
    nets = [square(n) for n in (1, 2)]
    content = {name: net.state_dict() for name, net in zip(names, nets, strict=True)}
    alone = stepped(nets[0].parameters(), nets[0])
    both = stepped([*nets[1].parameters(), *nets[0].parameters()], *nets)
    for optimizer in (alone, both):
        path = saved(tmp_path / "x.pt", {**content, "optim": optimizer.state_dict()})
        require_left_out(converted(path, tmp_path, dry_run=True), "optim")


@pytest.mark.parametrize("copy", ["model_ema", "target", "net_target", "swa_model"])
def test_no_optimizer_trains_a_copy(tmp_path: Path, copy: str) -> None:
    net, follows = square(1), square(2)
    optimizer = stepped(net.parameters(), net)
    content = {copy: follows.state_dict(), "model": net.state_dict(), "optimizer": optimizer.state_dict()}
    done = converted(saved(tmp_path / "x.pt", content), tmp_path)
    assert done.written, done.report
    names = {f"model/{EDGES}/{n}/{name}" for n in (1, 2) for name in ("kernel", "bias")}
    assert set(moments(done.target)) == names


def test_one_optimizer_of_two_networks_is_joined_where_one_order_fits(tmp_path: Path) -> None:
    from torch import nn

    pi, v = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = stepped([*v.parameters(), *pi.parameters()], pi, v)
    content = {"pi": pi.state_dict(), "v": v.state_dict(), "opt": optimizer.state_dict()}
    done = converted(saved(tmp_path / "x.pt", content), tmp_path)
    assert done.written, done.report
    slots = moments(done.target)
    for name, net in (("pi", pi), ("v", v)):
        expected = optimizer.state[net[1].weight]["exp_avg"].numpy().T
        np.testing.assert_array_equal(slots[f"{name}/{EDGES}/2/kernel"], expected)


def test_a_part_of_a_network_is_joined_where_one_choice_fits(tmp_path: Path) -> None:
    from torch import nn

    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    for part, fits in ((net[2], True), (net[1], True), (nn.ParameterList([net[0].bias]), False)):
        optimizer = stepped(part.parameters(), net)
        content = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        done = converted(saved(tmp_path / "x.pt", content), tmp_path, dry_run=True)
        assert any("is left out" in note for note in done.report.notes) is not fits
        assert any(sentence.startswith("optimizer ") for sentence in done.report.assumed) is fits


def test_parameters_without_state_are_left_out_of_keras_optimizer(tmp_path: Path) -> None:
    net = square()
    for parameter in net[0].parameters():
        parameter.requires_grad = False
    optimizer = stepped(net.parameters(), net)
    content = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    done = converted(saved(tmp_path / "x.pt", content), tmp_path)
    assert done.written, done.report
    assert set(moments(done.target)) == {f"model/{EDGES}/2/kernel", f"model/{EDGES}/2/bias"}
    assert any("model/0/weight" in note for note in done.report.notes)


@pytest.mark.parametrize("cls", ["NAdam", "RAdam", "ASGD", "Rprop"])
def test_other_optimizers_are_never_taken_for_one_of_ours(tmp_path: Path, cls: str) -> None:
    import torch

    net = square()
    optimizer = getattr(torch.optim, cls)(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    content = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    done = converted(saved(tmp_path / "x.pt", content), tmp_path, dry_run=True)
    require_left_out(done, "optimizer")
    assert any(cls in note for note in done.report.notes)


@pytest.mark.parametrize("cls", ["NAdam", "Adam"])
def test_optimizer_none_converts_the_networks_alone(tmp_path: Path, cls: str) -> None:
    import torch

    net = square()
    optimizer = getattr(torch.optim, cls)(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    content = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    done = converted(saved(tmp_path / "x.pt", content), tmp_path, optimizer=("none",))
    assert done.written, done.report
    tree = open_checkpoint(done.target).tree
    assert not [leaf for _, leaf in tree.tensors() if leaf.slot is not None]
    assert sum(leaf.role == "parameter" for _, leaf in tree.tensors()) == len(net.state_dict())
    assert any("optimizer" in note for note in done.report.notes)
    with pytest.raises(UsageError):
        converted(done.target, tmp_path / "again", to="torch", optimizer=("none",))
    with pytest.raises(UsageError):
        converted(tmp_path / "x.pt", tmp_path, optimizer=("none", "optimizer/momentum=0.9"))


def test_slots_of_no_optimizer_are_left_out_by_name() -> None:
    from ckpttool.conversion.parts import without_optimizers
    from ckpttool.core import Inline, Leaf, attr, display

    leaves = {
        (attr(name),): Leaf("float32", (1,), Inline(bytes(4)), name, role)
        for name, role in (("w", "parameter"), ("m_0", "slot"))
    }
    tree, notes = without_optimizers(Tree(leaves))
    assert [display(path) for path in tree] == ["w"]
    assert notes == ("left out: m_0 (--optimizer none)",)


def test_a_decay_beside_the_gradient_is_adams_alone() -> None:
    from ckpttool.core import Tree, ValueLeaf, attr, key
    from ckpttool.libraries import TorchOptimizerWriter, canonical_setting_path, canonical_slot_path
    from ckpttool.libraries.optimizers_read import CanonicalOptimizer
    from ckpttool.mapping import Move
    from ckpttool.mapping.rules import KEEP

    weight = (attr("networks"), attr("w"))
    settings = {"weight_decay": 0.5, "decoupled_weight_decay": True}
    named = {"m": "Adam", "u": "Adamax", "rms": "RMSprop", "squares": "Adagrad", "velocity": "SGD"}
    for kind, cls in named.items():
        leaves = {weight: ValueLeaf(1.0), canonical_slot_path("opt", kind, weight): ValueLeaf(1.0)}
        leaves[canonical_setting_path("opt", "momentum")] = ValueLeaf(0.5)
        known = CanonicalOptimizer("opt", Tree(leaves), settings, {})
        writer = TorchOptimizerWriter(known, [Move(weight, (key("w"),), KEEP)])
        lost = [name for name in writer.plan().missing if name.endswith("weight_decay")]
        assert writer.family.name == cls
        assert bool(lost) == (cls != "Adam"), cls


def test_an_adagrad_before_its_first_update_keeps_its_first_sums(tmp_path: Path) -> None:
    import torch

    net = square()
    optimizer = torch.optim.Adagrad(net.parameters(), initial_accumulator_value=0.25)
    content = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    done = converted(saved(tmp_path / "x.pt", content), tmp_path)
    assert done.written, done.report
    tree = open_checkpoint(done.target).tree
    slots = [leaf.array() for _, leaf in tree.tensors() if leaf.slot == "accumulator"]
    assert len(slots) == 4
    assert all((slot == 0.25).all() for slot in slots)


@pytest.mark.parametrize("fault", ["no sums", "lr_decay"])
def test_what_keras_adagrad_cannot_hold_is_left_out(tmp_path: Path, fault: str) -> None:
    import torch

    net = square()
    optimizer = torch.optim.Adagrad(net.parameters(), lr_decay=0.5 if fault == "lr_decay" else 0.0)
    state = optimizer.state_dict()
    if fault == "no sums":
        state["state"] = {}
    content = {"model": net.state_dict(), "optimizer": state}
    require_left_out(converted(saved(tmp_path / "x.pt", content), tmp_path, dry_run=True), "optimizer")


@pytest.mark.parametrize(("cls", "group"), [("LSTM", "lstm"), ("GRU", "gru"), ("PReLU", "p_re_lu")])
def test_layers_of_a_list_are_named_by_class_in_a_weights_file(tmp_path: Path, cls: str, group: str) -> None:
    import h5py
    from torch import nn

    layer = nn.PReLU(4) if cls == "PReLU" else getattr(nn, cls)(3, 4)
    net = nn.Sequential(layer, nn.Linear(4, 2))
    kinds = ("0=prelu",) if cls == "PReLU" else ()
    done = converted(saved(tmp_path / "x.pt", net.state_dict()), tmp_path, to="keras", kinds=kinds)
    assert done.written, done.report
    with h5py.File(done.target) as file:
        assert set(file["layers"]) == {group, "dense"}


def test_a_lone_number_is_the_slope_of_a_prelu(tmp_path: Path) -> None:
    import h5py
    from torch import nn

    # A norm of one number computes nothing.
    net = nn.Sequential(nn.Linear(3, 8), nn.PReLU(), nn.Linear(8, 2))
    done = converted(saved(tmp_path / "x.pt", net.state_dict()), tmp_path, to="keras")
    assert done.written, done.report
    with h5py.File(done.target) as file:
        assert set(file["layers"]) == {"dense", "dense_1", "p_re_lu"}
        np.testing.assert_array_equal(file["layers/p_re_lu/vars/0"], net[1].weight.detach().numpy())


def test_arrays_that_are_no_layers_keep_their_axes_with_a_note(tmp_path: Path, golden: Golden) -> None:
    import pickle

    data = [np.ones((9, 3), np.float32), np.ones((9, 2), np.float32)]
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(data))
    done = converted(tmp_path / "x.pkl", tmp_path, to="torch")
    shapes = [leaf.shape for _, leaf in open_checkpoint(done.target).tree.tensors()]
    assert shapes == [(9, 3), (9, 2)]
    golden("\n".join(done.report.notes))


# --- Everything else in a checkpoint -----------------------------------------------------------------------


def full() -> dict[str, Any]:
    """What training programs keep beside a network."""
    import torch

    net = square()
    optimizer = stepped(net.parameters(), net)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10, cycle_momentum=False)
    return {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": schedule.state_dict(),
        "epoch": 3,
        "best": 0.5,
        "name": "run",
        "done": True,
        "history": [1.0, 2.0],
        "none": None,
        "rng_state": torch.get_rng_state(),
        "numpy_rng": np.random.default_rng(0).bit_generator.state,
        "python_rng": random.Random(0).getstate(),
        "loss": torch.tensor(0.25),
        "args": argparse.Namespace(lr=0.1, layers=[1, 2]),
    }


@pytest.mark.parametrize("to", ["tf", "keras"])
def test_values_never_stop_a_conversion(tmp_path: Path, to: str) -> None:
    source = saved(tmp_path / "full.pt", full())
    done = converted(source, tmp_path, to)
    assert done.written, done.report
    assert done.report.complete
    tree = open_checkpoint(done.target).tree
    values = {tree.names[path] for path, _ in tree.tensors()}
    assert ({"epoch", "loss", "rng_state"} <= values) is (to == "tf")
    kept = {entry["path"]: entry for entry in sidecar_of(done.target)["residue"]}
    assert (kept["name"]["value"], kept["args/lr"]["value"], kept["history/1"]["value"]) == ("run", 0.1, 2.0)
    assert {"lr_scheduler/total_steps", "optimizer/param_groups/0/initial_lr"} <= kept.keys()
    # No way back is recorded for an object of a class; tensors without a place are kept nevertheless.
    beside = Path(f"{done.target}.ckpttool.residue.pt")
    assert beside.exists() is (to == "keras")
    if to == "keras":
        read_back = open_checkpoint(str(beside)).tree
        (state,) = (leaf.array() for path, leaf in read_back.tensors() if path[0].value == "rng_state")
        source_tree = open_checkpoint(str(source)).tree
        (expected,) = (leaf.array() for path, leaf in source_tree.tensors() if path[0].value == "rng_state")
        np.testing.assert_array_equal(state, expected)


def sidecar_of(path: str) -> dict[str, Any]:
    sidecar: dict[str, Any] = json.loads(Path(f"{path}.ckpttool.json").read_text())
    return sidecar


@pytest.mark.parametrize("to", ["tf", "keras"])
def test_the_way_back_gives_every_value_again(tmp_path: Path, to: str) -> None:
    content = full()
    del content["args"]  # an object of a class has no way back
    source = saved(tmp_path / "full.pt", content)
    done = converted(source, tmp_path, to)
    back = convert(done.target, str(tmp_path / "back.pt"), to="torch", sync=False)
    assert back.digest == digest(str(source)).sha256
    again = convert(str(source), str(tmp_path / f"again{Path(done.target).name[4:]}"), to=to, sync=False)
    assert again.digest == done.digest


def test_values_of_tensorflow_become_values_of_torch(tmp_path: Path) -> None:
    import torch

    net = square()
    optimizer = stepped(net.parameters(), net)
    content = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    done = converted(saved(tmp_path / "x.pt", content), tmp_path)
    Path(f"{done.target}.ckpttool.json").unlink()  # as after more training
    settings = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8}
    options = [f"optimizer/{name}={value}" for name, value in settings.items()]
    back = convert(done.target, str(tmp_path / "back.pt"), to="torch", optimizer=options, sync=False)
    assert back.written, back.report
    data = torch.load(back.target)
    assert data["epoch"] == 3
    # Keras's input layer is number 0.
    net.load_state_dict({f"{int(name[0]) - 1}{name[1:]}": tensor for name, tensor in data["model"].items()})
    torch.optim.Adam(net.parameters()).load_state_dict(data["optimizer"])
    for number, state in optimizer.state_dict()["state"].items():
        for name, tensor in state.items():
            assert torch.equal(data["optimizer"]["state"][number][name], tensor)


@pytest.mark.parametrize("text", ["optimizer/nothing=1", "other/beta_1=0.5", "optimizer/learning_rate=1"])
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, text: str) -> None:
    net = square()
    optimizer = stepped(net.parameters(), net)
    source = saved(tmp_path / "x.pt", {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    with pytest.raises(UsageError):
        converted(source, tmp_path, optimizer=[text])
    assert not list(tmp_path.glob("made*"))


def test_an_optimizer_alone_is_named_as_such(tmp_path: Path) -> None:
    net = square()
    with pytest.raises(MappingError) as raised:
        converted(saved(tmp_path / "x.pt", stepped(net.parameters(), net).state_dict()), tmp_path)
    assert raised.value.file == str(tmp_path / "x.pt")
    assert raised.value.hint


# --- Whole modules and wrappers ----------------------------------------------------------------------------


def forms() -> dict[str, Any]:
    """One network in the forms in which programs save it, by name; each gives the same variables."""
    import torch
    from torch import nn

    net = square()
    hooked = copy.deepcopy(net)
    hooked.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(copy.deepcopy(net))
        trace = torch.jit.trace(copy.deepcopy(net), torch.ones(1, 3))  # type: ignore[no-untyped-call]
    prefixed = {
        "compiled": "_orig_mod.",
        "fsdp": "_fsdp_wrapped_module.",
        "fabric": "_forward_module.",
        "both": "module._orig_mod.",
    }
    return {
        "state_dict": net.state_dict(),
        "module": net,
        "eval": hooked,
        "script": script,
        "trace": trace,
        "data parallel": nn.DataParallel(net).state_dict(),
        "module, parallel": nn.DataParallel(net),
        **{name: {f"{word}{k}": v for k, v in net.state_dict().items()} for name, word in prefixed.items()},
        "averaged": torch.optim.swa_utils.AveragedModel(net).state_dict(),
    }


@pytest.mark.parametrize("form", ["state_dict", "module", "eval", "script", "trace", "data parallel"])
@pytest.mark.parametrize("to", ["tf", "keras"])
def test_a_whole_module_goes_by_its_state_dict(tmp_path: Path, form: str, to: str) -> None:
    import torch

    value = forms()[form]
    path = tmp_path / "x.pt"
    if isinstance(value, torch.jit.ScriptModule):
        value.save(str(path))
    else:
        torch.save(value, path)
    done = converted(path, tmp_path, to)
    assert done.written, done.report
    require_square(done.target, to)


@pytest.mark.parametrize(
    "form", ["module", "data parallel", "module, parallel", "compiled", "fsdp", "fabric", "both", "averaged"]
)
def test_wrappers_leave_no_name(tmp_path: Path, form: str) -> None:
    done = converted(saved(tmp_path / "x.pt", {"net": forms()[form], "epoch": 2}), tmp_path)
    assert done.written, done.report
    require_square(done.target, "tf", "net/")


def require_square(target: str, to: str, below: str = "") -> None:
    tree = open_checkpoint(target).tree
    kernels = [leaf.array() for path, leaf in tree.tensors() if tree.names[path].endswith("kernel")]
    expected = [layer.weight.detach().numpy().T for layer in square()]
    np.testing.assert_array_equal(kernels, expected)
    if to == "tf":
        assert f"{below}{EDGES}/1/kernel" in tree.names.values()


def test_a_module_keeps_its_own_tensors(tmp_path: Path) -> None:
    """A vector has one form in both frameworks; a matrix of no known layer is refused."""
    import torch
    from torch import nn

    net = square()
    net.register_parameter("log_std", nn.Parameter(torch.arange(3.0)))
    net.register_buffer("index", torch.arange(6).reshape(2, 3))
    optimizer = stepped(net.parameters(), net)
    content = {"pi": net, "optimizer": optimizer.state_dict()}
    done = converted(saved(tmp_path / "x.pt", content), tmp_path, dry_run=True)
    assert not done.report.unused
    moved = {move.source.rpartition("/")[2]: move.rule for move in done.report.mapped}
    assert (moved["log_std"], moved["index"]) == ("keep", "keep")
    net.register_parameter("W", nn.Parameter(torch.ones(2, 3)))
    done = converted(saved(tmp_path / "x.pt", {"pi": net.state_dict()}), tmp_path, dry_run=True)
    assert done.report.unused == ("pi/W",)


@pytest.mark.parametrize("average", ["model_ema", "state_dict_ema", "ema"])
def test_averaged_weights_are_a_choice(tmp_path: Path, average: str) -> None:
    import torch

    net = square(1)
    optimizer = stepped(net.parameters(), net)
    follows: Any = torch.optim.swa_utils.AveragedModel(square(2))
    content = {"model": net.state_dict(), average: follows.state_dict(), "optimizer": optimizer.state_dict()}
    source = saved(tmp_path / "x.pt", content)
    for which, expected, moved in (("ema", follows.module, False), ("raw", net, True)):
        (tmp_path / which).mkdir()
        done = converted(source, tmp_path / which, "keras", weights=which)
        assert done.written, done.report
        tree = open_checkpoint(done.target).tree
        kernels = [
            leaf.array()
            for path, leaf in tree.tensors()
            if str(path[-1].value) == "kernel" and leaf.of is None
        ]
        np.testing.assert_array_equal(kernels, [layer.weight.detach().numpy().T for layer in expected])
        assert bool(moments(done.target)) is moved
        assert any(average in note for note in done.report.notes)


@pytest.mark.parametrize("which", ["other", "ema"])
def test_a_choice_without_averaged_weights_is_refused(tmp_path: Path, which: str) -> None:
    with pytest.raises(UsageError):
        converted(saved(tmp_path / "x.pt", {"model": square().state_dict()}), tmp_path, weights=which)


# --- Recurrent layers --------------------------------------------------------------------------------------


def recurrent(decay: float = 0.0) -> tuple[Any, Any, dict[str, Any]]:
    """Return an LSTM, its Adam after updates too small to move a weight, and the checkpoint of both."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    net: Any = nn.ModuleDict({"rnn": nn.LSTM(3, 4, batch_first=True), "out": nn.Linear(4, 2)})
    optimizer = torch.optim.Adam(net.parameters(), 1e-30, weight_decay=decay)
    for number in range(3):
        optimizer.zero_grad()
        x = torch.from_numpy(np.random.default_rng(number).standard_normal((2, 5, 3))).float()
        net["out"](net["rnn"](x)[0]).square().sum().backward()
        optimizer.step()
    return net, optimizer, {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


def sums(folder: Path) -> dict[str, Any]:
    """Return the moments that Keras's own Adam has after the same updates of the converted network."""
    import keras
    import tensorflow as tf

    net = tf.Module()
    net.rnn, net.out = keras.layers.LSTM(4, return_sequences=True), keras.layers.Dense(2)
    net.out(net.rnn(np.zeros((2, 5, 3), np.float32)))
    tf.train.Checkpoint(model=net).restore(str(folder / "made-1")).assert_existing_objects_matched()
    weights = [*net.rnn.trainable_variables, *net.out.trainable_variables]
    tool = keras.optimizers.Adam(1e-30)
    tool.build(weights)
    for number in range(3):
        x = tf.constant(np.random.default_rng(number).standard_normal((2, 5, 3)), tf.float32)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(net.out(net.rnn(x)) ** 2)
        tool.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
    at = next(n for n, w in enumerate(weights) if w.path.endswith("lstm_cell/bias"))
    return {
        "m": np.asarray(tool._momentums[at]).tolist(),  # Keras has no public name for them
        "v": np.asarray(tool._velocities[at]).tolist(),
    }


@pytest.mark.tensorflow
def test_a_sum_of_two_biases_has_the_moments_that_keras_would_have(tmp_path: Path) -> None:
    tensorflow_child.require("torch", "tensorflow", "keras")
    _, _, content = recurrent()
    done = converted(saved(tmp_path / "x.pt", content), tmp_path)
    assert done.written, done.report
    expected = tensorflow_child.run(__file__, "sums", tmp_path)
    for slot in "mv":
        moment = moments(done.target, slot)["model/rnn/cell/bias"]
        np.testing.assert_allclose(moment, expected[slot], rtol=1e-4, atol=1e-6)
    back = convert(done.target, str(tmp_path / "back.pt"), to="torch", sync=False).target
    assert digest(back).sha256 == digest(str(tmp_path / "x.pt")).sha256


def test_two_biases_with_moments_of_their_own_stop_an_optimizer_but_not_a_network(tmp_path: Path) -> None:
    net, optimizer, content = recurrent(decay=0.5)
    source = saved(tmp_path / "x.pt", content)
    done = converted(source, tmp_path)
    assert not done.written
    assert {name.rpartition("/")[2] for name in done.report.unused} == {"exp_avg", "exp_avg_sq"}
    done = converted(source, tmp_path, allow_missing=True)
    slots = moments(done.target)
    expected = optimizer.state[net["rnn"].bias_ih_l0]["exp_avg"].numpy()
    np.testing.assert_array_equal(slots["model/rnn/cell/bias"], expected)
    expected = optimizer.state[net["rnn"].weight_hh_l0]["exp_avg"].numpy().T
    np.testing.assert_array_equal(slots["model/rnn/cell/recurrent_kernel"], expected)
    (tmp_path / "part").mkdir()
    assert converted(source, tmp_path / "part", part="model").written


def test_learning_rates_of_groups_are_kept_beside_keras_optimizer(tmp_path: Path) -> None:
    import torch
    from torch import nn

    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [
        {"params": net[0].parameters(), "lr": 0.5},
        {"params": net[1].parameters(), "betas": (0.5, 0.75)},
    ]
    optimizer = torch.optim.Adam(groups, 0.25)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    source = saved(tmp_path / "x.pt", {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    done = converted(source, tmp_path)
    assert done.written, done.report
    assert any("learning_rate" in note and "0.25" in note for note in done.report.notes)
    (tmp_path / "x.pt").unlink()
    back = convert(done.target, str(tmp_path / "back.pt"), to="torch", sync=False).target
    result = torch.load(back)["optimizer"]["param_groups"]
    assert [group["lr"] for group in result] == [0.5, 0.25]
    assert [group["betas"] for group in result] == [(0.9, 0.999), (0.5, 0.75)]


def test_a_layer_of_two_names_has_one_moment(tmp_path: Path) -> None:
    import torch
    from torch import nn

    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    net: Any = nn.ModuleDict({"a": first, "last": last, "b": first})
    optimizer = stepped(net.parameters(), nn.Sequential(first, last, first))
    content = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    source = saved(tmp_path / "x.pt", content)
    done = converted(source, tmp_path)
    assert done.written, done.report
    tree = open_checkpoint(done.target).tree
    slots = [path for path, leaf in tree.tensors() if leaf.slot == "m"]
    assert len(slots) == len(optimizer.state_dict()["state"]) == 4
    back = convert(done.target, str(tmp_path / "back.pt"), to="torch", sync=False)
    states = torch.load(back.target)["optimizer"]["state"]
    for number, state in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(states[number]["exp_avg"], state["exp_avg"], rtol=0, atol=0)


def unusual(folder: Path) -> dict[str, Any]:
    """Write models whose optimizers their files describe by class or wrap; return Adam's first moment."""
    import keras

    optimizers, reports = keras.optimizers, {}
    for title, optimizer in {
        "plain_sgd": optimizers.SGD(RATE),
        "adamw": optimizers.AdamW(RATE),
        "clipped": optimizers.Adam(RATE, clipnorm=0.5),
        "scaled": optimizers.LossScaleOptimizer(optimizers.Adam(RATE)),
        "recurrent": optimizers.Adam(RATE),
        "scheduled": optimizers.Adam(optimizers.schedules.CosineDecay(RATE, 10)),
        "averaged": optimizers.Adam(RATE, use_ema=True),
    }.items():
        recurrent = title == "recurrent"
        first = keras.layers.SimpleRNN(3) if recurrent else keras.layers.Dense(3)
        net = keras.Sequential([keras.Input((4, 2) if recurrent else (2,)), first])
        net.compile(optimizer, "mse")
        net.fit(np.ones((4, 4, 2) if recurrent else (4, 2)), np.ones((4, 3)), epochs=2, verbose=0)
        net.save_weights(folder / f"{title}.weights.h5")
        net.save(folder / f"{title}.keras")
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        moments = [np.asarray(v).T.tolist() for v in inner.variables if "momentum" in v.path]
        reports[title] = moments[0] if moments else None
    return reports


@pytest.fixture(scope="module")
def unusual_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    tensorflow_child.require("torch", "tensorflow", "keras")
    folder = tmp_path_factory.mktemp("unusual")
    return folder, tensorflow_child.run(__file__, "unusual", folder, once=True)


@pytest.mark.parametrize("suffix", [".weights.h5", ".keras"])
def test_the_class_of_an_optimizer_is_that_of_the_file(
    suffix: str, unusual_files: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    import torch

    folder, expected = unusual_files
    group = torch.load(converted(folder / f"plain_sgd{suffix}", tmp_path, "torch").target)["optimizer"]
    assert group["param_groups"][0]["momentum"] == 0
    assert "betas" not in group["param_groups"][0]
    group = torch.load(converted(folder / f"adamw{suffix}", tmp_path, "torch", force=True).target)[
        "optimizer"
    ]
    assert group["param_groups"][0]["weight_decay"] == 0.004
    contents = torch.load(converted(folder / f"scaled{suffix}", tmp_path, "torch", force=True).target)
    assert [name for name in contents if name.startswith("opt")] == ["optimizer"]
    np.testing.assert_array_equal(
        contents["optimizer"]["state"][0]["exp_avg"].numpy(), np.float32(expected["scaled"])
    )


@pytest.mark.parametrize("suffix", [".weights.h5", ".keras"])
def test_both_biases_of_torch_get_the_moments_of_their_sum(
    suffix: str, unusual_files: tuple[Path, dict[str, Any]], tmp_path: Path, golden: Golden
) -> None:
    import torch

    done = converted(unusual_files[0] / f"recurrent{suffix}", tmp_path, "torch")
    assert done.written, done.report
    golden("\n".join(note for note in done.report.notes if "bias_hh" in note))
    saved_ = torch.load(done.target)
    names = [name.rpartition(".")[2] for name in saved_["model"]]
    states = saved_["optimizer"]["state"]
    first, second = (states[names.index(f"bias_{kind}_l0")] for kind in ("ih", "hh"))
    assert first["exp_avg"].any()
    for slot in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(first[slot], second[slot], rtol=0, atol=0)


def test_a_schedule_in_the_configuration_tells_the_first_rate(
    unusual_files: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    import torch

    done = converted(unusual_files[0] / "scheduled.keras", tmp_path, "torch")
    assert torch.load(done.target)["optimizer"]["param_groups"][0]["lr"] == RATE
    assert not any("learning_rate" in line for line in done.report.assumed)
    assert any("CosineDecay" in note for note in done.report.notes)


@pytest.mark.parametrize("suffix", [".weights.h5", ".keras"])
def test_averages_of_weights_are_kept_beside_torchs_optimizer(
    suffix: str, unusual_files: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    import torch

    folder, expected = unusual_files
    done = converted(folder / f"averaged{suffix}", tmp_path, "torch")
    assert done.written, done.report
    moment = torch.load(done.target)["optimizer"]["state"][0]["exp_avg"].numpy()
    np.testing.assert_array_equal(moment, np.float32(expected["averaged"]))
    receipt = json.loads(Path(f"{done.target}.ckpttool.json").read_text())
    assert sum("average" in row["path"] for row in receipt["residue"]) == 2


@pytest.mark.parametrize("to", ["tf", "keras"])
def test_an_empty_tensor_stops_nothing(tmp_path: Path, to: str) -> None:
    import torch
    from torch import nn

    content = {"model": nn.Sequential(nn.Linear(3, 4)).state_dict(), "empty": torch.zeros(0, 4)}
    assert converted(saved(tmp_path / "x.pt", content), tmp_path, to).written


def test_weight_norm_names_its_option(tmp_path: Path) -> None:
    from torch import nn

    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2))
    source = saved(tmp_path / "x.pt", net.state_dict())
    done = converted(source, tmp_path)
    assert not done.written
    assert any("--fold-weight-norm" in note for note in done.report.notes)
    assert converted(source, tmp_path, fold_weight_norm=True).written


def test_the_clipping_of_gradients_is_named(
    unusual_files: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    done = converted(unusual_files[0] / "clipped.keras", tmp_path, "torch")
    assert any("clipnorm = 0.5" in note for note in done.report.notes)


def test_a_gru_keeps_both_biases_and_its_optimizer(tmp_path: Path) -> None:
    import torch
    from torch import nn

    torch.manual_seed(0)
    net: Any = nn.ModuleDict({"rnn": nn.GRU(3, 4, 2, bidirectional=True), "out": nn.Linear(8, 2)})
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        net["out"](net["rnn"](torch.ones(2, 5, 3))[0]).sum().backward()
        optimizer.step()
    source = saved(tmp_path / "x.pt", {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    done = converted(source, tmp_path)
    assert done.written, done.report
    Path(f"{done.target}.ckpttool.json").unlink()
    back = convert(done.target, str(tmp_path / "back.pt"), to="torch", sync=False)
    assert back.written, back.report
    contents = torch.load(back.target)
    names = list(contents["model"])
    state = optimizer.state_dict()["state"]
    # Each of Keras's cells is a module of its own: the names are others, the parameters' order is the same.
    assert len(names) == len(state)
    for number, tensors in contents["optimizer"]["state"].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, state[number][name])


# --- What a dense layer takes flattened --------------------------------------------------------------------


def _layer(cls: str, name: str, **settings: Any) -> dict[str, Any]:
    return {"class_name": cls, "config": {"name": name, **settings}}


_IMAGE = _layer("InputLayer", "in", batch_shape=[None, 8, 8, 3])
_LAST = {"data_format": "channels_last"}
_CONV = _layer("Conv2D", "conv", filters=4, kernel_size=[3, 3], strides=[1, 1], padding="valid", **_LAST)
_FLAT, _DENSE = _layer("Flatten", "flat"), _layer("Dense", "fc", units=5)
_NORM = _layer("BatchNormalization", "bn", axis=-1, epsilon=1e-3, scale=False, center=False)


def _image(places: int, channels: int, framework: str = "tensorflow") -> AxisOrder:
    return framework_order(((places, channels),), framework)


# Layers between the image and the dense layer, and the order of what that takes.
FLATTENINGS: dict[str, tuple[list[dict[str, Any]], AxisOrder | None]] = {
    "convolution": ([_CONV, _FLAT], _image(36, 4)),
    "same and strides": (
        [_layer("Conv2D", "c", filters=2, kernel_size=3, strides=[2, 3], padding="same", **_LAST), _FLAT],
        _image(12, 2),
    ),
    "pooling and dropout": (
        [
            *(_CONV, _layer("MaxPooling2D", "p", pool_size=[2, 2], strides=None, padding="valid", **_LAST)),
            *(_NORM, _FLAT, _layer("Dropout", "d", rate=0.5)),
        ],
        _image(9, 4),
    ),
    "dilated": (
        [_layer("Conv2D", "c", filters=2, kernel_size=3, dilation_rate=[2, 2], **_LAST), _FLAT],
        _image(16, 2),
    ),
    "pooled over all": ([_CONV, _layer("GlobalAveragePooling2D", "g", **_LAST)], plain_order(4)),
    "no convolution": ([_FLAT], _image(64, 3)),
    "norm of what is flattened": ([_CONV, _FLAT, _NORM], _image(36, 4)),
    "channels first": (
        [_layer("Conv2D", "c", filters=2, kernel_size=3, data_format="channels_first"), _FLAT],
        _image(6, 2, "torch"),
    ),
    "permuted": ([_CONV, _layer("Permute", "p", dims=[3, 1, 2]), _FLAT], _image(36, 4, "torch")),
    "unknown": ([_CONV, _layer("Mine", "m"), _FLAT], None),
    "nonsense": ([_layer("Conv2D", "c", filters="4", kernel_size=[0, -1]), _FLAT], None),
}


def _weights(layers: list[dict[str, Any]], inputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the layers' tensors; the dense layer has this number of inputs."""
    for layer in layers:
        cls, settings = layer["class_name"], layer["config"]
        if cls == "Conv2D" and isinstance(settings["filters"], int):
            channels = 8 if settings.get("data_format") == "channels_first" else 3
            yield f"{settings['name']}/kernel", (3, 3, channels, settings["filters"])
            yield f"{settings['name']}/bias", (settings["filters"],)
        elif cls == "BatchNormalization":
            size = inputs if layers.index(layer) == len(layers) - 2 else 4
            yield from ((f"bn/{name}", (size,)) for name in ("moving_mean", "moving_variance"))
    yield from (("fc/kernel", (inputs, 5)), ("fc/bias", (5,)))


@pytest.mark.parametrize("name", FLATTENINGS)
def test_configurations_tell_what_is_flattened(name: str) -> None:
    between, expected = FLATTENINGS[name]
    layers = [_IMAGE, *between, _DENSE]
    inputs = 1 if expected is None else len(expected.positions)
    leaves = {
        tuple(map(attr, title.split("/"))): Leaf("float32", shape, Inline(b""), title)
        for title, shape in _weights(layers, inputs)
    }
    document = {"class_name": "Sequential", "config": {"name": "m", "layers": layers}}
    graph = read_document(document, Tree(leaves))
    orders = trace_graph_orders(graph, Tree(leaves), -1, opaque=None)
    assert orders.get((attr("fc"), attr("kernel")), WeightUse()).takes == expected


# --- Folders of several files, and files that sort tensors by name ------------------------------------------


def folder_of(path: Path, net: Any, optimizer: Any, end: str = "bin", number: str = "") -> Path:
    """Write a model and its optimizer as accelerate's `save_state` and transformers' `Trainer` do."""
    import torch
    from safetensors.torch import save_file

    path.mkdir(exist_ok=True)
    save_file(net.state_dict(), str(path / f"model{number}.safetensors"))
    torch.save(optimizer.state_dict(), path / f"optimizer{number}.{end}")
    return path


def layers(**modules: Any) -> Any:
    from torch import nn

    return nn.ModuleDict(modules)


def scrambled() -> dict[str, tuple[Any, bool]]:
    """Return modules whose sorted names are not in their order, and whether shapes tell that order."""
    from torch import nn

    return {
        "shapes": (layers(z=nn.Linear(3, 8), b=nn.Linear(8, 8), a=nn.Linear(8, 2)), True),
        "numbers": (nn.Sequential(*(nn.Linear(4, 4) for _ in range(12))), True),
        "norms": (layers(norm1=nn.LayerNorm(4), norm2=nn.LayerNorm(4)), True),
        "squares": (layers(z=nn.Linear(4, 4), a=nn.Linear(4, 4)), False),
        "nested": (layers(z=layers(b=nn.Linear(3, 4), a=nn.Linear(4, 2)), a=nn.Linear(2, 5)), True),
        "equal blocks": (layers(z=layers(b=nn.Linear(3, 4)), a=layers(b=nn.Linear(3, 4))), False),
    }


@pytest.mark.parametrize("end", ["bin", "pt"])
@pytest.mark.parametrize("name", ["shapes", "numbers", "norms", "squares", "nested", "equal blocks"])
def test_sorted_names_never_change_whose_moments_these_are(tmp_path: Path, name: str, end: str) -> None:
    import torch

    net, sure = scrambled()[name]
    optimizer = torch.optim.Adam(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    source = folder_of(tmp_path / "folder", net, optimizer, end)
    done = converted(source, tmp_path)
    assert done.written, done.report
    if not sure:
        require_left_out(done, "optimizer")
        return
    tree = open_checkpoint(done.target).tree
    expected = {path: optimizer.state[p]["exp_avg"].numpy() for path, p in net.named_parameters()}
    slots = [leaf for _, leaf in tree.tensors() if leaf.slot == "m"]
    assert len(slots) == len(expected)
    for leaf in slots:
        assert leaf.of is not None
        *module, last = tree.names[leaf.of].split("/")[1:]
        if module[:2] == ["_functional", "_operations"]:  # a Sequential of Keras counts from its input layer
            module = [str(int(module[2]) - 1), *module[3:]]
        their = {"kernel": "weight", "gamma": "weight", "bias": "bias", "beta": "bias"}[last]
        moment = expected[".".join((*module, their))]
        np.testing.assert_array_equal(leaf.array(), moment.T if last == "kernel" else moment)


def test_a_folder_keeps_every_model_with_its_optimizer(tmp_path: Path) -> None:
    import torch

    for number in ("", "_1"):
        net = square(len(number))
        folder_of(tmp_path / "folder", net, stepped(net.parameters(), net), number=number)
    tree = open_checkpoint(str(tmp_path / "folder")).tree
    tops = {str(path[0].value) for path in tree}
    assert tops == {"model", "model_1", "optimizer", "optimizer_1"}
    done = converted(tmp_path / "folder", tmp_path, "torch")
    assert done.written
    again = torch.load(done.target, weights_only=True)
    assert set(again) == tops


def test_what_of_a_folder_cannot_be_read_is_named_or_refused(tmp_path: Path) -> None:
    net = square()
    folder = folder_of(tmp_path / "folder", net, stepped(net.parameters(), net))
    (folder / "trainer_state.json").write_text('{"best_metric": NaN}')
    (folder / "scheduler.bin").write_bytes(b"no pickle")
    (folder / "training_args.bin").write_bytes(b"")
    notes = " ".join(open_checkpoint(str(folder)).notes)
    assert all(name in notes for name in ("trainer_state.json", "scheduler.bin", "training_args.bin"))
    (folder / "optimizer.pt").write_bytes((folder / "optimizer.bin").read_bytes())
    with pytest.raises(UsageError):
        open_checkpoint(str(folder))
    (folder / "optimizer.pt").unlink()
    (folder / "optimizer.bin").write_bytes((folder / "optimizer.bin").read_bytes()[:300])
    with pytest.raises(CkpttoolError):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("seed", range(20))
def test_an_order_is_found_only_where_it_is_the_modules_own(seed: int) -> None:
    draw = random.Random(seed)

    def output(depth: int) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
        if depth == 0 or draw.random() < 0.3:
            wide = draw.choice((1, 2, 3))
            return [(("weight",), (wide, draw.choice((1, 2)))), (("bias",), (wide,))]
        names = draw.sample("abcdefg", draw.randint(1, 4))
        return [((name, *inner), shape) for name in names for inner, shape in output(depth - 1)]

    count = 0
    for _ in range(50):
        parameters = output(3)
        stored = sorted(parameters)
        order = optimizers_read.find_only_order(stored, [shape for _, shape in parameters], numbered=False)
        if order is not None:
            assert [stored[number] for number in order] == parameters
            count += 1
    assert count
