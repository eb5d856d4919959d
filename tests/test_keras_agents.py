"""Agents in `.weights.h5` files: several networks with an optimizer each, and attributes in any order."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import Container, Leaf, Tree, attr, display
from ckpttool.core import Path as TreePath
from ckpttool.core.digests import digest_checkpoint
from ckpttool.formats import keras_h5, layer_variables, open_checkpoint
from tests import tensorflow_child
from tests.conftest import in_process
from tests.keras_referee import assert_slots, sha256
from tests.test_format_keras_h5 import legacy
from tests.trees import attributes, leaf

h5py = pytest.importorskip("h5py")
SAMPLE = Path(__file__).parent.parent / "sample_ckpts" / "td3_pendulum_torch" / "ckpt-15000.pt"


def test_an_agent_comes_back_from_keras_with_moments_and_steps(tmp_path: Path) -> None:
    written, back = tmp_path / "agent.weights.h5", tmp_path / "agent.pt"
    assert in_process("convert", SAMPLE, written, "--to", "keras").status == 0
    checkpoint = open_checkpoint(str(written))
    slots = [one for _, one in checkpoint.tree.tensors() if one.role == "slot"]
    assert len(slots) == 36
    assert all(one.of is not None for one in slots)
    assert checkpoint.tree.containers[attributes("actor_optimizer")].name == "Adam"
    assert next(p for p, one in checkpoint.tree.tensors() if one.role == "counter") == attributes("total_it")
    assert in_process("convert", written, back).status == 0
    assert (
        digest_checkpoint(open_checkpoint(str(back))).sha256
        == digest_checkpoint(open_checkpoint(str(SAMPLE))).sha256
    )
    # What was read is written again without loss.
    (piece,) = keras_h5.pieces(checkpoint.tree)
    with (tmp_path / "again.weights.h5").open("wb") as stream:
        piece.write(stream)
    again = open_checkpoint(str(tmp_path / "again.weights.h5"))
    assert list(again.tree) == list(checkpoint.tree)
    assert digest_checkpoint(again).sha256 == digest_checkpoint(checkpoint).sha256


def agent_file(path: Path, widths: dict[str, tuple[int, ...]], trained: list[str], listed: Any = None) -> str:
    """Write `actor` with a Dense for each width, and an Adam whose slots are in the order `trained`."""
    with h5py.File(path, "w") as file:

        def put(name: str, user: str, arrays: list[np.ndarray]) -> Any:
            group = file.create_group(f"{name}/vars")
            group.attrs["name"] = user
            for number, array in enumerate(arrays):
                group[str(number)] = array
            return group

        arrays = {
            name: [np.zeros(shape, np.float32), np.zeros(shape[-1:], np.float32)]
            for name, shape in widths.items()
        }
        put("actor", "net", [])
        put("critic/l", "dense_9", [np.zeros((2, 3), np.float32), np.zeros(3, np.float32)])
        for name, two in arrays.items():
            put(f"actor/{name}", f"layer_{name}", two)
        slots = [one for name in trained for one in arrays[name] for _ in "mv"]
        group = put("actor_optimizer", "adam", [np.int64(7), np.float32(1e-3), *slots])
        if listed is not None:
            group.attrs["weight_names"] = [name.encode() for name in listed]
    return str(path)


def owners(path: str) -> list[str | None]:
    tree = open_checkpoint(path).tree
    slots = [one for _, one in tree.tensors() if one.role == "slot"]
    slots.sort(key=lambda one: int(one.key.rpartition("/")[2]))
    return [None if one.of is None else display(one.of) for one in slots if one.slot != "v"]


def test_shapes_decide_where_names_do_not(tmp_path: Path) -> None:
    widths = {"a": (4, 8), "b": (3, 4), "z": (8, 2)}
    names = owners(agent_file(tmp_path / "m.weights.h5", widths, ["b", "a", "z"]))
    assert names == [f"actor/{layer}/{name}" for layer in "baz" for name in ("kernel", "bias")]


def test_two_answers_are_none(tmp_path: Path) -> None:
    widths = {"a": (4, 4), "b": (3, 4), "z": (4, 4)}
    names = owners(agent_file(tmp_path / "m.weights.h5", widths, ["b", "z", "a"]))
    assert names == [None] * 12


@pytest.mark.parametrize(
    "listed",
    [
        ["", "", "m/critic/l/vars/0"],
        ["", "", *["m/actor/a/vars/0"] * 4],
        ["", "", "m/actor/a/vars/1", "v/actor/a/vars/0", "m/actor/a/vars/0", "v/actor/a/vars/1"],
        ["", "", "", "", "", ""],
        ["x"] * 6,
    ],
)
def test_a_list_that_disagrees_is_worthless(tmp_path: Path, listed: list[str]) -> None:
    path = agent_file(tmp_path / "m.weights.h5", {"a": (4, 8)}, ["a"], listed)
    assert owners(path) == ["actor/a/kernel", "actor/a/bias"]


def test_a_list_in_pieces(tmp_path: Path) -> None:
    tree: dict[TreePath, Leaf] = {}
    at = attributes("net_optimizer")
    weights = [attributes(f"net/{'x' * 200}{n:04}/kernel") for n in range(400)]
    for path in weights:
        tree[path] = leaf(np.full((1, 1), len(tree), np.float32))
    for name, role in (("iterations", "counter"), ("learning_rate", "other")):
        one = leaf(np.array(1, np.int64 if role == "counter" else np.float32))
        tree[*at, attr(name)] = Leaf(one.dtype, (), one.source, "adam/x", role)  # type: ignore[arg-type]
    for path in weights:
        for kind in "mv":
            one = leaf(np.full((1, 1), len(tree), np.float32))
            slot_path = (*at, attr("slots"), attr(kind), *path)
            tree[slot_path] = Leaf(one.dtype, one.shape, one.source, "", "slot", path, kind)
    (piece,) = keras_h5.pieces(Tree(tree))
    with (tmp_path / "m.weights.h5").open("wb") as stream:
        piece.write(stream)
    with h5py.File(tmp_path / "m.weights.h5") as file:
        assert "weight_names1" in file["net_optimizer/vars"].attrs
    read_back = open_checkpoint(str(tmp_path / "m.weights.h5")).tree
    slots = [(path, one) for path, one in read_back.tensors() if one.role == "slot"]
    assert len(slots) == 800
    for path, one in slots:
        assert one.of is not None
        assert path[-len(one.of) :] == one.of
        expected = tree[*at, attr("slots"), attr(str(one.slot)), *one.of[:2], attr("kernel")]
        assert bytes(one.read()) == bytes(expected.read())


def test_a_batch_normalisation_with_three_variables() -> None:
    variables = layer_variables("BatchNormalization", {}, [(4,)] * 3)
    assert variables is not None
    assert [(one.name, one.role) for one in variables] == [
        ("", "parameter"),
        ("moving_mean", "buffer"),
        ("moving_variance", "buffer"),
    ]


@pytest.mark.parametrize(
    ("cls", "config", "shapes", "names"),
    [
        ("Dense", {"use_bias": True}, [(3, 4), (4,), (4,)], "kernel bias kernel_scale"),
        ("Dense", {}, [(3, 4), (4,), (4,)], "kernel bias kernel_scale"),
        ("Dense", {"use_bias": False}, [(3, 4), (4,)], "kernel kernel_scale"),
        ("Dense", {"use_bias": True}, [(3, 4), (4,)], "kernel bias"),
        ("Embedding", {}, [(3, 4), (3,)], "embeddings embeddings_scale"),
        ("Dense", {"use_bias": True}, [(3, 4), (4,), (4,), (4,)], None),
    ],
)
def test_quantized_layers(cls: str, config: Any, shapes: Any, names: str | None) -> None:
    variables = layer_variables(cls, config, shapes)
    assert (variables and " ".join(one.name for one in variables)) == names


def test_an_optimizer_inside_one_that_scales_losses(tmp_path: Path) -> None:
    kernel, bias = np.zeros((2, 3), np.float32), np.zeros(3, np.float32)
    inner = [np.int64(7), np.float32(1e-3), kernel, kernel, bias, bias]
    scaled = [np.int64(7), np.float32(0), np.int64(5), np.float32(32768), *inner]
    with h5py.File(tmp_path / "m.weights.h5", "w") as file:
        for prefix, user, arrays in (
            ("", "sequential", []),
            ("layers/dense/", "dense", [kernel, bias]),
            ("optimizer/", "loss_scale_optimizer", scaled),
            ("optimizer/inner_optimizer/", "adam", inner),
        ):
            group = file.create_group(f"{prefix}vars")
            group.attrs["name"] = user
            for number, array in enumerate(arrays):
                group[str(number)] = array
    checkpoint = open_checkpoint(str(tmp_path / "m.weights.h5"))
    names = {display(path): one for path, one in checkpoint.tree.tensors()}
    assert len(names) == 18
    assert not checkpoint.notes
    assert {"optimizer/step_counter", "optimizer/dynamic_scale"} <= names.keys()
    assert names["optimizer/inner_optimizer/slots/v/dense/bias"].of == attributes("dense/bias")
    assert names["optimizer/inner_optimizer/iterations"].role == "counter"


def test_keras_1_names_without_a_number(tmp_path: Path) -> None:
    path = legacy(tmp_path / "old.h5", {"dense_1": {"dense_1_W": np.ones((2, 3)), "dense_1_b": np.ones(3)}})
    assert [display(one) for one in open_checkpoint(path).tree] == ["dense_1/kernel", "dense_1/bias"]


# -- Keras as the referee


def agents(keras: Any) -> dict[str, Any]:
    """Return models whose attributes sort behind `layers`, of classes that no file names."""
    layers = keras.layers

    class Head(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.l1, self.mu = layers.Dense(3), layers.Dense(3)

        def call(self, x: Any) -> Any:
            return self.mu(self.l1(x))

    class Mlp(keras.Model):
        def __init__(self, outputs: int) -> None:
            super().__init__()
            self.l1, self.mu = layers.Dense(3), layers.Dense(outputs)

        def call(self, x: Any) -> Any:
            return self.mu(self.l1(x))

    class Critic(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.q1, self.q2 = Mlp(3), Mlp(3)

        def call(self, x: Any) -> Any:
            return self.q1(x) + self.q2(x)

    class Agent(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.z, self.y = layers.Dense(3), layers.Dense(3)
            self.actor, self.critic, self.net = Mlp(3), Critic(), Head()
            self.policy = [layers.Dense(3), layers.Dense(3)]
            self.seq = keras.Sequential([layers.Dense(3), layers.Dense(3)])
            self.actor_optimizer = keras.optimizers.Adam()
            self.critic_optimizer = keras.optimizers.RMSprop()

        def call(self, x: Any) -> Any:
            x = self.y(self.z(self.net(self.critic(self.actor(x)))))
            return self.seq(self.policy[1](self.policy[0](x)))

    return {"head": Head(), "mlp": Mlp(2), "critic": Critic(), "agent": Agent()}


NAMES = {
    "head": ["l1", "mu"],
    "mlp": ["l1", "mu"],
    "critic": ["q1/l1", "q1/mu", "q2/l1", "q2/mu"],
    "agent": [
        *("z", "y", "actor/l1", "actor/mu", "critic/q1/l1", "critic/q1/mu", "critic/q2/l1", "critic/q2/mu"),
        *("net/l1", "net/mu", "policy/0", "policy/1", "seq/0", "seq/1"),
    ],
}


def filled(folder: Path) -> dict[str, Any]:
    """Give every variable a value of its own; save the agent, and the values in Keras's order."""
    import keras

    generator = np.random.default_rng(3)
    facts: dict[str, Any] = {}
    for name, model in agents(keras).items():
        model(np.zeros((1, 3), np.float32))
        for variable in model.variables:
            variable.assign(generator.random(variable.shape))
        np.savez(folder / f"{name}.npz", *[np.asarray(v) for v in model.variables])
        facts[name] = [v.path for v in model.variables]
        if name == "agent":
            state = []
            for part in ("actor", "critic"):
                optimizer = getattr(model, f"{part}_optimizer")
                optimizer.build(getattr(model, part).trainable_variables)
                for variable in optimizer.variables[2:]:
                    variable.assign(generator.random(variable.shape))
                state += optimizer.variables
            model.save_weights(folder / "saved.weights.h5")
            from tests.keras_models import digest

            facts["facts"] = {
                "variables": [{"path": v.path, "sha256": digest(v)} for v in model.variables],
                "optimizer": [{"path": v.path, "sha256": digest(v)} for v in state],
            }
    return facts


def loaded(folder: Path) -> dict[str, Any]:
    """Load our files into models of the same classes and say which variables differ."""
    import keras

    differences = {}
    for name, model in agents(keras).items():
        model(np.zeros((1, 3), np.float32))
        if name == "head":
            inside = keras.Sequential([keras.Input((3,)), model])
            inside.load_weights(folder / "ours_head.weights.h5")
        else:
            model.load_weights(folder / f"ours_{name}.weights.h5")
        expected = np.load(folder / f"{name}.npz").values()
        pairs = zip(model.variables, expected, strict=True)
        differences[name] = [v.path for v, array in pairs if not np.array_equal(v, array)]
    return differences


@pytest.mark.tensorflow
def test_keras_finds_every_attribute_of_a_tree_in_any_order(tmp_path: Path) -> None:
    tensorflow_child.require("keras", "tensorflow")
    answer = tensorflow_child.run(__file__, "filled", tmp_path)
    saved = open_checkpoint(str(tmp_path / "saved.weights.h5"))
    # The critic's two heads look alike, and Keras keeps no order of attributes: mlp_1, mlp_2 tell it.
    assert assert_slots(saved, answer["facts"]) == 2 * 4 + 8
    for name, layers in NAMES.items():
        arrays = list(np.load(tmp_path / f"{name}.npz").values())
        below = "layers/head/" if name == "head" else ""
        weights = [(f"{below}{one}/{part}") for one in layers for part in ("kernel", "bias")]
        items = [(attributes(path), leaf(array)) for path, array in zip(weights, arrays, strict=True)]
        groups = [items[at : at + 2] for at in range(0, len(items), 2)]
        if name == "agent":
            random.Random(1).shuffle(groups)
            # A sequence's layers have an order of their own.
            groups.sort(key=lambda two: str(two[0][0][1].value).isdecimal())
            groups[-4:] = sorted(groups[-4:], key=lambda two: display(two[0][0]))
        containers = {attributes("policy"): Container("list")}
        tree = Tree(dict(item for group in groups for item in group), {}, containers)
        (piece,) = keras_h5.pieces(tree)
        with (tmp_path / f"ours_{name}.weights.h5").open("wb") as stream:
            piece.write(stream)
    assert tensorflow_child.run(__file__, "loaded", tmp_path) == {name: [] for name in NAMES}
    assert json.loads((tmp_path / "loaded.json").read_text()).keys() == NAMES.keys()
    assert all(sha256(one) for _, one in saved.tree.tensors())
