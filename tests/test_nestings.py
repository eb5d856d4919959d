"""Agents of every nesting that TensorFlow users write: converted, they compute what TensorFlow computes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.core import Leaf, Tree
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import open_checkpoint
from ckpttool.networks import NetworkSettings, numpy_backend, policy_network, q_network

OBS, ACT = 5, 2
WIRING = NetworkSettings(("relu",), "tanh", 1e-3, (-1.0,) * ACT, (1.0,) * ACT)

# The state_dict keys that the obvious PyTorch module has, for each way of nesting a critic.
L123 = ["l1", "l2", "l3"]
EXPECTED = {
    "flat": [f"l{n}" for n in range(1, 7)],
    "twin": [f"{q}.{layer}" for q in ("q1", "q2") for layer in L123],
    "sequentials": [f"{q}.{n}" for q in ("q1", "q2") for n in (0, 2, 4)],
    "single": L123,
    "ddpg": L123,
    "normed": [f"{q}.{layer}" for q in ("q1", "q2") for layer in ("l1", "l2", "l3", "n1", "n2")],
}
CASES = [f"{critic}-{when}" for critic in EXPECTED for when in ("before", "after")]


def inputs() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    obs = generator.standard_normal((64, OBS)).astype(np.float32)
    return obs, generator.uniform(-1, 1, (64, ACT)).astype(np.float32)


def build_agents(folder: Path) -> dict[str, Any]:
    """In a child process: save one trained-for-a-step agent a case, and what its networks compute."""
    return {case: _save(folder, case) for case in CASES}


def _save(folder: Path, case: str) -> int:
    import keras
    import tensorflow as tf

    kind, when = case.split("-")
    relu, concat = tf.nn.relu, lambda *x: tf.concat(x, axis=1)

    class Mlp(keras.Model):
        def __init__(self, out: int, normed: bool = False) -> None:
            super().__init__()
            self.l1, self.l2, self.l3 = (keras.layers.Dense(n) for n in (8, 8, out))
            if normed:
                self.n1, self.n2 = (keras.layers.LayerNormalization() for _ in range(2))
            self.normed = normed

        def call(self, x: Any, action: Any = None) -> Any:
            x = self.l1(x)
            x = relu(self.n1(x) if self.normed else x)
            x = self.l2(x if action is None else concat(x, action))
            return self.l3(relu(self.n2(x) if self.normed else x))

    class Flat(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            for n in range(1, 7):
                setattr(self, f"l{n}", keras.layers.Dense(8 if n % 3 else 1))

        def call(self, obs: Any, action: Any) -> Any:
            x = concat(obs, action)
            first = self.l3(relu(self.l2(relu(self.l1(x)))))
            return first, self.l6(relu(self.l5(relu(self.l4(x)))))

    def sequential() -> Any:
        dense = keras.layers.Dense
        return keras.Sequential([dense(8, "relu"), dense(8, "relu"), dense(1)])

    class Twin(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            make = sequential if kind == "sequentials" else (lambda: Mlp(1, normed=kind == "normed"))
            self.q1, self.q2 = make(), make()

        def call(self, obs: Any, action: Any) -> Any:
            x = concat(obs, action)
            return self.q1(x), self.q2(x)

    class Single(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.l1, self.l2, self.l3 = (keras.layers.Dense(n) for n in (8, 8, 1))

        def call(self, obs: Any, action: Any) -> Any:
            if kind == "ddpg":
                x = self.l2(concat(relu(self.l1(obs)), action))
            else:
                x = self.l2(relu(self.l1(concat(obs, action))))
            return (self.l3(relu(x)),)

    def critic() -> Any:
        return {"flat": Flat, "single": Single, "ddpg": Single}.get(kind, Twin)()

    class Agent(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            if when == "before":
                self.optimizers()
            self.actor, self.actor_target = Mlp(ACT), Mlp(ACT)
            self.critic, self.critic_target = critic(), critic()
            if when == "after":
                self.optimizers()
            self.best = self.actor.l1
            self.total_it = tf.Variable(1, dtype=tf.int64, trainable=False)

        def optimizers(self) -> None:
            self.critic_optimizer = keras.optimizers.Adam(1e-3)
            self.actor_optimizer = keras.optimizers.Adam(1e-3)

    keras.utils.set_random_seed(CASES.index(case))
    agent, (obs, action) = Agent(), inputs()
    for network in (agent.actor, agent.actor_target):
        network(obs)
    for network in (agent.critic, agent.critic_target):
        network(obs, action)
    for network, optimizer in (
        (lambda: agent.actor(obs), agent.actor_optimizer),
        (lambda: agent.critic(obs, action), agent.critic_optimizer),
    ):
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_mean(out) for out in tf.nest.flatten(network()))
        owner = agent.actor if optimizer is agent.actor_optimizer else agent.critic
        optimizer.apply_gradients(
            zip(tape.gradient(loss, owner.trainable_variables), owner.trainable_variables, strict=True)
        )
    for n, variable in enumerate(agent.critic.trainable_variables):
        variable.assign_add(tf.cast(n / 100, variable.dtype))  # biases of zero would hide a swap
    outputs = {"actor": tf.tanh(agent.actor(obs)).numpy()}
    outputs |= {f"critic/q{n}": q.numpy() for n, q in enumerate(agent.critic(obs, action), start=1)}
    np.savez(folder / f"{case}.npz", **outputs)
    tf.train.Checkpoint(policy=agent).save(str(folder / case))
    return len(outputs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    from tests import tensorflow_child

    folder = tmp_path_factory.mktemp("nestings")
    tensorflow_child.run(__file__, "build_agents", folder, once=True)
    return folder


@pytest.mark.tensorflow
@pytest.mark.parametrize("case", CASES)
def test_converted_agents_compute_the_same(saved: Path, case: str, tmp_path: Path) -> None:
    target = str(tmp_path / "agent.pt")
    done = convert(str(saved / f"{case}-1"), target)
    assert done.written, done.report.unused
    obs, action = inputs()
    expected = np.load(saved / f"{case}.npz")
    for path in (str(saved / f"{case}-1"), target):
        agent = restore_agent(path)
        actor = agent.part("actor")
        assert actor is not None
        computed = {"actor": numpy_backend.build(policy_network(agent.tree, actor, WIRING)).step(obs)[0]}
        for part in agent.binding.parts:
            if part.component == "critic":
                network = q_network(agent.tree, part, WIRING, OBS, ACT)
                computed[part.title] = numpy_backend.build(network).step({"obs": obs, "action": action})[0]
        assert set(computed) == set(expected.files)
        for name, outputs in computed.items():
            np.testing.assert_allclose(
                outputs, expected[name], rtol=1e-4, atol=1e-5, err_msg=f"{path} {name}"
            )


@pytest.mark.torch
@pytest.mark.tensorflow
@pytest.mark.parametrize("case", CASES)
def test_keys_are_those_of_the_obvious_module(saved: Path, case: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    convert(str(saved / f"{case}-1"), str(tmp_path / "agent.pt"))
    contents = torch.load(tmp_path / "agent.pt", weights_only=True)
    layers = EXPECTED[case.split("-")[0]]
    keys = [f"{layer}.{name}" for layer in layers for name in ("weight", "bias")]
    assert list(contents["critic"]) == list(contents["critic_target"]) == keys
    assert list(contents["actor"]) == [f"{layer}.{name}" for layer in L123 for name in ("weight", "bias")]
    parameters = [torch.nn.Parameter(tensor) for tensor in contents["critic"].values()]
    optimizer = torch.optim.Adam(parameters)
    optimizer.load_state_dict(contents["critic_optimizer"])
    for parameter in parameters:
        state = optimizer.state[parameter]
        assert state["exp_avg"].shape == parameter.shape
        assert state["step"].item() == 1


@pytest.mark.tensorflow
@pytest.mark.parametrize("case", CASES)
def test_there_and_back_every_variable_lies_where_it_lay(saved: Path, case: str, tmp_path: Path) -> None:
    convert(str(saved / f"{case}-1"), str(tmp_path / "agent.pt"))
    done = convert(str(tmp_path / "agent.pt"), str(tmp_path / "again-1"), to="tf")
    assert done.written, done.report.unused
    before, after = (open_checkpoint(str(path)).tree for path in (saved / f"{case}-1", tmp_path / "again-1"))
    assert {before.names[path]: described(before, leaf) for path, leaf in before.tensors()} == {
        after.names[path]: described(after, leaf) for path, leaf in after.tensors()
    }


def described(tree: Tree, leaf: Leaf) -> tuple[object, ...]:
    owner = tree.names[leaf.of] if leaf.of is not None else None
    return leaf.dtype, leaf.shape, bytes(leaf.read()), leaf.role, leaf.slot, owner
