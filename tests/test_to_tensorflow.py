"""Conversions to TensorFlow and between its forms: TensorFlow restores them, computes the same, trains on."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.commands.digest import digest
from ckpttool.commands.verify import verify
from ckpttool.conversion.write import save
from ckpttool.core import Tree
from ckpttool.formats import open_checkpoint
from ckpttool.mapping.rules import canonical_tree
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE, in_process
from tests.golden_texts import Golden
from tests.test_layouts import torch_agent

SIZES = {"l1": (3, 8), "l2": (8, 8), "l3": (8, 1)}
RATE = 1e-2


def observations() -> np.ndarray:
    return np.random.default_rng(7).standard_normal((100, 3)).astype(np.float32)


def actions_wanted() -> np.ndarray:
    return np.sin(observations().sum(axis=1, keepdims=True)).astype(np.float32)


# --- In child processes ------------------------------------------------------------------------------


def _policy(tf: Any) -> Any:
    """A policy as a TF2 module: attributes named as the scopes of the TF1 program below."""

    class Layer(tf.Module):  # type: ignore[misc]
        def __init__(self, n_in: int, n_out: int) -> None:
            super().__init__()
            draw = np.random.default_rng(n_out).standard_normal((n_in, n_out)) / 2
            self.kernel = tf.Variable(draw.astype(np.float32))
            self.bias = tf.Variable(np.zeros(n_out, np.float32))

    class Policy(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.l1, self.l2, self.l3 = (Layer(*size) for size in SIZES.values())

        def __call__(self, x: Any) -> Any:
            for layer in (self.l1, self.l2):
                x = tf.nn.relu(x @ layer.kernel + layer.bias)
            return tf.tanh(x @ self.l3.kernel + self.l3.bias)

    return Policy()


def _weights(policy: Any) -> list[Any]:
    return [v for layer in (policy.l1, policy.l2, policy.l3) for v in (layer.kernel, layer.bias)]


def _graph_program(tf: Any) -> tuple[Any, Any, Any]:
    """The same policy as a TF1 program: its observations, its actions, its training step."""
    v1 = tf.compat.v1
    obs = v1.placeholder(tf.float32, [None, 3])
    x = obs
    for name, (n_in, n_out) in SIZES.items():
        with v1.variable_scope(f"actor/{name}"):
            kernel = v1.get_variable(
                "kernel", [n_in, n_out], initializer=v1.glorot_uniform_initializer(n_out)
            )
            bias = v1.get_variable("bias", [n_out], initializer=v1.zeros_initializer())
        x = x @ kernel + bias
        x = tf.tanh(x) if name == "l3" else tf.nn.relu(x)
    loss = tf.reduce_mean((x - actions_wanted()) ** 2)
    return obs, x, v1.train.AdamOptimizer(RATE).minimize(loss)


def train(folder: Path) -> list[str]:
    """Train policies in graph mode and by objects; save them, what they do, and what a next step makes."""
    import keras
    import tensorflow as tf

    v1, obs_values = tf.compat.v1, observations()
    with tf.Graph().as_default():
        obs, action, step = _graph_program(tf)
        saver = v1.train.Saver()
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for _ in range(5):
                session.run(step, {obs: obs_values})
            saver.save(session, str(folder / "named-5"))
            np.save(folder / "named.npy", session.run(action, {obs: obs_values}))
            session.run(step, {obs: obs_values})
            np.save(folder / "named-next.npy", session.run(action, {obs: obs_values}))

    policy = _policy(tf)
    optimizer = keras.optimizers.Adam(RATE, epsilon=1e-8)

    def update() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((policy(obs_values) - actions_wanted()) ** 2)
        optimizer.apply(tape.gradient(loss, _weights(policy)), _weights(policy))

    # Keras optimizers train Keras variables only; a v1 optimizer trains any.
    optimizer = v1.train.AdamOptimizer(RATE)
    optimizer.apply = lambda grads, variables: optimizer.apply_gradients(zip(grads, variables, strict=True))
    for _ in range(5):
        update()
    tf.train.Checkpoint(actor=policy, optimizer=optimizer).save(str(folder / "objects"))
    np.save(folder / "objects.npy", policy(obs_values).numpy())
    update()
    np.save(folder / "objects-next.npy", policy(obs_values).numpy())
    _train_keras(folder)
    return sorted(path.name for path in folder.iterdir())


def _keras_policy(width: int = 8) -> Any:
    import keras

    class Policy(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.l1, self.l2 = (keras.layers.Dense(width, "relu") for _ in range(2))
            self.l3 = keras.layers.Dense(1, "tanh")

        def call(self, x: Any) -> Any:
            return self.l3(self.l2(self.l1(x)))

    return Policy()


def _train_keras(folder: Path) -> None:
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    policy, optimizer = _keras_policy(), keras.optimizers.Adam(RATE, epsilon=1e-8)

    def update() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((policy(observations()) - actions_wanted()) ** 2)
        variables = policy.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    for _ in range(5):
        update()
    tf.train.Checkpoint(actor=policy, optimizer=optimizer).save(str(folder / "keras"))
    np.save(folder / "keras.npy", policy(observations()).numpy())
    update()
    np.save(folder / "keras-next.npy", policy(observations()).numpy())


def restore(folder: Path) -> dict[str, list[Any]]:
    """Restore what was converted and note its actions, now and after one more step."""
    import tensorflow as tf

    actions: dict[str, list[Any]] = {}
    actions["objects of named"] = _restore_objects(folder / "objects_of_named-5")
    for name in ("named_of_objects-1", "named_of_keras-1"):
        with tf.Graph().as_default():
            obs, action, step = _graph_program(tf)
            saver = tf.compat.v1.train.Saver()
            with tf.compat.v1.Session() as session:
                saver.restore(session, str(folder / name))
                now = session.run(action, {obs: observations()}).tolist()
                session.run(step, {obs: observations()})
                actions[name] = [now, session.run(action, {obs: observations()}).tolist()]
    policy = _keras_policy()
    policy(observations())
    tf.train.Checkpoint(policy).read(str(folder / "part-1")).assert_existing_objects_matched()
    actions["part"] = [policy(observations()).numpy().tolist()]
    actions["keras file"] = []
    for name in ("objects.weights.h5", "torch.weights.h5"):
        model = _keras_policy() if name.startswith("objects") else _keras_policy(64)
        model(observations())
        model.load_weights(str(folder / name))
        actions["keras file"].append(model(observations()).numpy().tolist())
    _restore_agent(folder)
    _restore_sequential(folder)
    return actions


def _restore_objects(prefix: Path) -> list[Any]:
    import tensorflow as tf

    policy, optimizer = _policy(tf), tf.compat.v1.train.AdamOptimizer(RATE)
    status = tf.train.Checkpoint(actor=policy, optimizer=optimizer).restore(str(prefix))
    now = policy(observations()).numpy().tolist()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((policy(observations()) - actions_wanted()) ** 2)
    grads = tape.gradient(loss, _weights(policy))
    optimizer.apply_gradients(zip(grads, _weights(policy), strict=True))
    status.assert_consumed()  # the optimizer makes its variables at its first step
    return [now, policy(observations()).numpy().tolist()]


def _gradients(shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Gradients in TensorFlow's orientation, the same in every process."""
    generator = np.random.default_rng(11)
    return [generator.standard_normal(shape).astype(np.float32) for shape in shapes]


def _restore_agent(folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    import tensorflow as tf
    from td3_contract import AgentSpec
    from td3_tensorflow import TD3

    agent = TD3(AgentSpec(3, 1, 2.0, (64, 64), 1e-3, adam_epsilon=1e-8))
    tf.train.Checkpoint(policy=agent).restore(str(folder / "agent-15000")).assert_consumed()
    arrays = {"total_it": agent.total_it.numpy()}
    obs = np.random.default_rng(5).standard_normal((100, 3)).astype(np.float32)
    arrays["actions"] = agent.actor(obs).numpy()
    for name in ("actor", "critic"):
        variables = getattr(agent, name).trainable_variables
        getattr(agent, f"{name}_optimizer").apply(_gradients([v.shape for v in variables]), variables)
        arrays |= {f"{name}/{n}": v.numpy() for n, v in enumerate(variables)}
        arrays[f"{name}/step"] = getattr(agent, f"{name}_optimizer").iterations.numpy()
    np.savez(folder / "agent.npz", **arrays)


def _restore_sequential(folder: Path) -> None:
    """An actor that is a Sequential in an attribute, and its optimizer with amsgrad: all of it is taken."""
    import keras
    import tensorflow as tf

    def network() -> Any:
        class Actor(keras.Model):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                dense = keras.layers.Dense
                self.net = keras.Sequential([dense(4, "relu"), dense(4, "relu"), dense(2, "tanh")])

            def call(self, x: Any) -> Any:
                return self.net(x)

        actor = Actor()
        actor(np.zeros((1, 3), np.float32))
        return actor

    agent = tf.Module()
    agent.actor, agent.actor_target = network(), network()
    agent.actor_optimizer = keras.optimizers.Adam(amsgrad=True)
    agent.actor_optimizer.build(agent.actor.trainable_variables)
    agent.total_it = tf.Variable(0, dtype=tf.int64)
    tf.train.Checkpoint(policy=agent).restore(str(folder / "sequential-1")).assert_consumed()
    hats = [hat.numpy().reshape(-1)[0] for hat in agent.actor_optimizer._velocity_hats]
    assert hats == [100, 101, 102, 103, 104, 105], hats
    assert agent.actor_optimizer.iterations.numpy() == 7
    np.save(folder / "sequential.npy", agent.actor(observations()).numpy())


# --- The tests ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What TensorFlow saved, our conversions of it, and in restore.json what TensorFlow made of those."""
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    from tests import tensorflow_child

    folder = tmp_path_factory.mktemp("forms")
    tensorflow_child.run(__file__, "train", folder)
    save(amsgrad_agent(), str(folder / "sequential.pt"))
    for source, target, *options in (
        ("named-5", "objects_of_named-5", "--to", "tf"),
        ("objects-1", "named_of_objects-1", "--to", "tf1"),
        ("keras-1", "named_of_keras-1", "--to", "tf1"),
        ("keras-1", "part-1", "--to", "tf", "--part", "actor"),
        ("keras-1", "objects.weights.h5", "--to", "keras", "--part", "actor"),
        (TORCH_SAMPLE, "torch.weights.h5", "--to", "keras", "--part", "actor"),
        (TORCH_SAMPLE, "agent-15000", "--to", "tf"),
        ("sequential.pt", "sequential-1", "--to", "tf"),
    ):
        ran = in_process("convert", source, target, *options, "--json", cwd=folder)
        assert ran.status == 0, (source, ran.out, ran.err)
        (folder / f"{target}.report.json").write_text(ran.out)
    tensorflow_child.run(__file__, "restore", folder)
    return folder


def amsgrad_agent() -> Tree:
    """A torch actor whose layers are a Sequential's, and the third moments of its optimizer."""
    shapes = [(4, 3), (4,), (4, 4), (4,), (2, 4), (2,)]
    hats = {f"state/{n}/max_exp_avg_sq": np.full(s, 100 + n, np.float32) for n, s in enumerate(shapes)}
    return torch_agent(["net.0", "net.2", "net.4"], {**hats, "param_groups/0/amsgrad": True})


def restored(folder: Path, name: str) -> list[np.ndarray]:
    return [
        np.array(actions, np.float32) for actions in json.loads((folder / "restore.json").read_text())[name]
    ]


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("objects of named", "named"),
        ("named_of_objects-1", "objects"),
        ("named_of_keras-1", "keras"),
    ],
)
def test_the_other_form_plays_the_same_and_trains_on(folder: Path, name: str, source: str) -> None:
    now, later = restored(folder, name)
    np.testing.assert_allclose(now, np.load(folder / f"{source}.npy"), rtol=0, atol=1e-6)
    before, expected = np.load(folder / f"{source}.npy"), np.load(folder / f"{source}-next.npy")
    assert np.abs(expected - before).max() > 1e-3  # a step that did nothing would prove nothing
    np.testing.assert_allclose(later, expected, rtol=0, atol=2e-6)


@pytest.mark.tensorflow
def test_a_part_is_a_checkpoint_of_its_own(folder: Path) -> None:
    (now,) = restored(folder, "part")
    np.testing.assert_allclose(now, np.load(folder / "keras.npy"), rtol=0, atol=1e-6)
    report = json.loads((folder / "part-1.report.json").read_text())
    assert report["mapped"][0]["source"].startswith("actor/l1/")
    assert report["mapped"][0]["target"].startswith("l1/")


@pytest.mark.tensorflow
def test_a_sequential_of_torch_is_one_of_keras(folder: Path) -> None:
    tree, x = amsgrad_agent(), observations()
    weights = {tree.names[path]: leaf.array() for path, leaf in tree.tensors()}
    for number in (0, 2, 4):
        x = x @ weights[f"actor/net/{number}/weight"].T + weights[f"actor/net/{number}/bias"]
        x = np.tanh(x) if number == 4 else np.maximum(x, 0)
    np.testing.assert_allclose(np.load(folder / "sequential.npy"), x, rtol=0, atol=1e-6)


@pytest.mark.tensorflow
def test_one_network_is_a_keras_weights_file(folder: Path) -> None:
    of_objects, of_torch = restored(folder, "keras file")
    np.testing.assert_allclose(of_objects, np.load(folder / "keras.npy"), rtol=0, atol=1e-6)
    tree = open_checkpoint(str(TORCH_SAMPLE)).tree
    weights = {tree.names[path]: leaf.array() for path, leaf in tree.tensors()}
    x = observations()
    for name in ("l1", "l2", "l3"):
        x = x @ weights[f"actor/{name}/weight"].T + weights[f"actor/{name}/bias"]
        x = np.tanh(x) if name == "l3" else np.maximum(x, 0)
    np.testing.assert_allclose(of_torch, x, rtol=0, atol=1e-5)


@pytest.mark.tensorflow
@pytest.mark.torch
def test_a_torch_agent_goes_on_training_in_tensorflow(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    after = np.load(folder / "agent.npz")
    contents = torch.load(TORCH_SAMPLE, weights_only=True)
    assert after["total_it"] == contents["total_it"]
    actor = {name: tensor.numpy() for name, tensor in contents["actor"].items()}
    x = np.random.default_rng(5).standard_normal((100, 3)).astype(np.float32)
    for name in ("l1", "l2"):
        x = np.maximum(x @ actor[f"{name}.weight"].T + actor[f"{name}.bias"], 0)
    expected = 2 * np.tanh(x @ actor["l3.weight"].T + actor["l3.bias"])
    np.testing.assert_allclose(after["actions"], expected, rtol=1e-5, atol=1e-5)
    for name in ("actor", "critic"):
        parameters = [torch.nn.Parameter(tensor) for tensor in contents[name].values()]
        optimizer = torch.optim.Adam(parameters)
        optimizer.load_state_dict(contents[f"{name}_optimizer"])
        gradients = _gradients([p.T.shape if p.ndim == 2 else p.shape for p in parameters])
        before = [parameter.detach().numpy().copy() for parameter in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.from_numpy(np.ascontiguousarray(gradient.T))
        optimizer.step()
        assert after[f"{name}/step"] == optimizer.state[parameters[0]]["step"].item()
        for number, (parameter, old) in enumerate(zip(parameters, before, strict=True)):
            stepped = parameter.detach().numpy()
            assert np.abs(stepped - old).max() > 1e-6
            np.testing.assert_allclose(after[f"{name}/{number}"].T, stepped, rtol=1e-6, atol=1e-8)


@pytest.mark.tensorflow
@pytest.mark.torch
@pytest.mark.corpus
def test_a_real_agent_of_wide_layers_verifies_as_the_same(
    corpus: Path, tmp_path: Path, shared_workers: None
) -> None:
    for framework in ("tensorflow", "torch"):
        if importlib.util.find_spec(framework) is None:
            pytest.skip(f"{framework} is not installed")
    source = corpus / "torch" / "fujimoto" / "bmcnns" / "models" / "TD3_HalfCheetah-v3_0"
    convert(str(source), str(tmp_path / "agent-1"), to="tf", allow_missing=True)
    assert canonical(source).items() <= canonical(tmp_path / "agent-1").items()
    verification = verify(str(source), str(tmp_path / "agent-1"))
    assert [network.name for network in verification.networks] == ["actor", "critic/q1", "critic/q2"]
    # TensorFlow adds 256 terms one after the other: it is further from float64, and no other agent.
    assert verification.within, verification.document()


# --- Without TensorFlow ------------------------------------------------------------------------------


def canonical(path: Path) -> dict[str, bytes]:
    """Return every tensor and number of an agent by its canonical path, counters of saves left out."""
    from ckpttool.core import Leaf
    from ckpttool.libraries import recognize_tree

    tree = open_checkpoint(str(path)).tree
    binding = recognize_tree(tree, path.name)
    assert binding is not None
    agent = canonical_tree(tree, binding.moves)
    return {
        agent.names[at]: bytes(leaf.read())
        for at, leaf in agent.items()
        if isinstance(leaf, Leaf) and agent.names[at] != "save_counter"
    }


def test_torch_to_tensorflow_to_torch_is_the_same_file(tmp_path: Path) -> None:
    for source, target in ((TORCH_SAMPLE, "ckpt-7"), ("ckpt-7", "back.pt")):
        ran = in_process(
            "convert", source, target, *(["--to", "tf"] if target == "ckpt-7" else []), cwd=tmp_path
        )
        assert ran.status == 0, ran.out + ran.err
    assert digest(str(tmp_path / "back.pt")).sha256 == digest(str(TORCH_SAMPLE)).sha256
    assert len(canonical(tmp_path / "ckpt-7")) == len(canonical(TF_SAMPLE))
    settings = json.loads((tmp_path / "ckpt-7.ckpttool.json").read_text())["optimizers"]
    assert settings["actor_optimizer"]["epsilon"] == 1e-8
    assert settings["actor_optimizer"]["learning_rate"] == 1e-3


def test_tensorflow_to_torch_to_tensorflow_is_bit_for_bit(tmp_path: Path) -> None:
    assert in_process("convert", TF_SAMPLE, "a.pt", cwd=tmp_path).status == 0
    assert in_process("convert", "a.pt", "ckpt-15000", "--to", "tf", cwd=tmp_path).status == 0
    first, again = canonical(TF_SAMPLE), canonical(tmp_path / "ckpt-15000")
    assert first == again
    assert len(first) == 36 + 36 + 2 + 2 + 1
    one, other = (open_checkpoint(str(p)).tree for p in (TF_SAMPLE, tmp_path / "ckpt-15000"))
    assert set(one.names.values()) == set(other.names.values())
    facts = {
        one.names[path]: (leaf.role, leaf.slot, leaf.of and one.names[leaf.of])
        for path, leaf in one.tensors()
    }
    assert facts == {
        other.names[path]: (leaf.role, leaf.slot, leaf.of and other.names[leaf.of])
        for path, leaf in other.tensors()
    }


def test_a_tensorflow_checkpoint_is_rewritten_as_it_is(tmp_path: Path) -> None:
    convert(str(TF_SAMPLE), str(tmp_path / "ckpt-3"), to="tf")
    assert digest(str(tmp_path / "ckpt-3")).sha256 == digest(str(TF_SAMPLE)).sha256


def test_without_a_sidecar_adams_settings_come_back_as_assumed(tmp_path: Path, golden: Golden) -> None:
    convert(str(TORCH_SAMPLE), str(tmp_path / "ckpt-7"), to="tf")
    (tmp_path / "ckpt-7.ckpttool.json").unlink()
    done = convert(str(tmp_path / "ckpt-7"), str(tmp_path / "back.pt"))
    golden("\n".join(line for line in done.report.assumed if "actor_optimizer" in line))
