"""What is written for libraries of TensorFlow: objects with their names restore it and act as before."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.convert import ConversionResult, convert
from ckpttool.core import Sidecar, UnsupportedError, sidecar_path
from ckpttool.core.digests import digest_checkpoint
from ckpttool.formats import open_checkpoint
from tests.golden_texts import Golden

OBS, ACT, LOW, HIGH = 3, 2, (-2.0, -2.0), (2.0, 2.0)
SIZES = (16, 8)


# --- In a process of its own: objects whose attributes are called as the libraries' ----------------------


def _observations() -> np.ndarray:
    generator = np.random.default_rng(5)
    ordinary, large = generator.normal(size=(100, OBS)), 10 * generator.normal(size=(19, OBS))
    return np.concatenate([ordinary, large, np.zeros((1, OBS))]).astype("f4")


def _restored(prefix: str, objects: Mapping[str, Any]) -> None:
    import tensorflow as tf

    status = tf.train.Checkpoint(**objects).restore(prefix)
    status.assert_existing_objects_matched()
    status.assert_consumed()


def _step(optimizer: Any, variables: Any) -> None:
    import tensorflow as tf

    optimizer.apply_gradients([(tf.ones_like(v), v) for v in variables])


def _moments(optimizer: Any, variable: Any) -> list[float]:
    return [float(optimizer.get_slot(variable, slot).numpy().ravel()[0]) for slot in ("m", "v")]


def _chain(names: list[str], sizes: tuple[int, ...]) -> Any:
    """Return a Keras 2 model whose layers are attributes of it, as tf2rl's are."""
    import tensorflow as tf
    import tf_keras

    class Chain(tf_keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            for name, width in zip(names, sizes[1:] * (len(names) // (len(sizes) - 1)), strict=True):
                setattr(self, name, tf_keras.layers.Dense(width))
            self(tf.zeros((1, sizes[0])))

        def call(self, x: Any) -> Any:
            outputs = []
            for start in range(0, len(names), len(sizes) - 1):
                y = x
                for position, name in enumerate(names[start : start + len(sizes) - 1]):
                    y = getattr(self, name)(tf.nn.relu(y) if position else y)
                outputs.append(y)
            return outputs if len(outputs) > 1 else outputs[0]

    return Chain()


def _tf2rl(folder: Path) -> dict[str, Any]:
    import tensorflow as tf
    import tf_keras

    policy, q = ["l1", "l2", "l3"], ["l1", "l2", "l3", "l4", "l5", "l6"]
    agent = tf.Module()
    for end in ("", "_target"):
        setattr(agent, f"actor{end}", _chain(policy, (OBS, *SIZES, ACT)))
        setattr(agent, f"critic{end}", _chain(q, (OBS + ACT, *SIZES, 1)))
    for name in ("actor", "critic"):
        optimizer = tf_keras.optimizers.legacy.Adam()
        setattr(agent, f"{name}_optimizer", optimizer)
        _step(optimizer, getattr(agent, name).trainable_variables)
    agent._it = tf.Variable(0, dtype=tf.int32)
    _restored(str(folder / "tf2rl-3"), {"policy": agent})
    both = agent.critic(np.concatenate([_observations(), np.zeros((120, ACT), "f4")], 1))
    return {
        "actions": (2 * tf.tanh(agent.actor(_observations()))).numpy().tolist(),
        "targets": (2 * tf.tanh(agent.actor_target(_observations()))).numpy().tolist(),
        "q2": both[1].numpy().ravel().tolist(),
        "steps": [int(agent.actor_optimizer.iterations), int(agent._it)],
        "moments": _moments(agent.critic_optimizer, agent.critic.l4.kernel),
        "rate": float(agent.actor_optimizer.learning_rate),
    }


def _tf_agents(folder: Path) -> dict[str, Any]:
    import tensorflow as tf
    import tf_keras

    def stack(sizes: tuple[int, ...]) -> list[Any]:
        layers = [tf_keras.layers.Flatten(), *(tf_keras.layers.Dense(width) for width in sizes[1:])]
        for layer, width in zip(layers[1:], sizes[:-1], strict=True):
            layer.build((None, width))
        return layers

    def network(**attributes: Any) -> Any:
        module = tf.Module()
        for name, value in attributes.items():
            setattr(module, name, value)
        return module

    agent = tf.Module()
    projection = tf_keras.layers.Dense(2 * ACT)
    projection.build((None, SIZES[-1]))
    encoder = network(_postprocessing_layers=stack((OBS, *SIZES)))
    agent._actor_network = network(
        _encoder=encoder, _projection_networks=network(_projection_layer=projection)
    )
    for name in ("_critic_network_1", "_critic_network_2"):
        setattr(agent, name, network(_joint_layers=stack((OBS + ACT, *SIZES, 1))))
        setattr(agent, f"_target{name}", network(_joint_layers=stack((OBS + ACT, *SIZES, 1))))
    agent._update_target = network(_counter=tf.Variable(0, dtype=tf.int64))
    agent._log_alpha = tf.Variable(0.0)
    agent._train_step_counter = tf.Variable(0, dtype=tf.int64)
    weights = [*encoder._postprocessing_layers[1].weights, *encoder._postprocessing_layers[2].weights]
    trained = {
        "_actor_optimizer": [*weights, *projection.weights],
        "_critic_optimizer": [
            w
            for name in ("_critic_network_1", "_critic_network_2")
            for layer in getattr(agent, name)._joint_layers
            for w in layer.weights
        ],
    }
    for name, variables in trained.items():
        setattr(agent, name, tf_keras.optimizers.legacy.Adam())
        _step(getattr(agent, name), variables)
    _restored(str(folder / "tf_agents-3"), {"agent": agent})
    x = _observations()
    for layer in encoder._postprocessing_layers[1:]:
        x = tf.nn.relu(layer(x))
    mean, deviation = tf.split(projection(x), 2, -1)
    return {
        "actions": (2 * tf.tanh(mean)).numpy().tolist(),
        "log_std": deviation.numpy().tolist(),
        "alpha": float(agent._log_alpha),
        "moments": agent._actor_optimizer.get_slot(projection.bias, "m").numpy().tolist(),
    }


def _acme(folder: Path) -> dict[str, Any]:
    import tensorflow as tf

    class Linear(tf.Module):  # type: ignore[misc]
        def __init__(self, n_in: int, n_out: int) -> None:
            super().__init__()
            self.b, self.w = tf.Variable(tf.zeros(n_out)), tf.Variable(tf.zeros((n_in, n_out)))

    class Adam(tf.Module):  # type: ignore[misc]
        """Sonnet's: a step and moments, in the order in which tf.Module goes through the variables."""

        def __init__(self, variables: Any) -> None:
            super().__init__()
            self.step = tf.Variable(0, dtype=tf.int64)
            self.m, self.v = ([tf.Variable(tf.zeros_like(v)) for v in variables] for _ in "mv")

    def mlp(*sizes: int) -> Any:
        module = tf.Module()
        module._layers = [Linear(*pair) for pair in pairwise(sizes)]
        return module

    objects: dict[str, Any] = {"num_steps": tf.Variable(0, dtype=tf.int32)}
    for name in ("policy", "target_policy"):
        objects[name] = tf.Module()
        objects[name]._layers = [mlp(OBS, *SIZES, ACT)]
    for name in ("critic", "target_critic"):
        objects[name] = tf.Module()
        objects[name]._critic_network = mlp(OBS + ACT, *SIZES, 1)
    for name in ("policy", "critic"):
        objects[f"{name}_optimizer"] = Adam(objects[name].trainable_variables)
    _restored(str(folder / "acme-3"), objects)
    x = _observations()
    for position, layer in enumerate(objects["policy"]._layers[0]._layers):
        x = tf.nn.relu(x) if position else x
        x = x @ layer.w + layer.b
    first = objects["policy"]._layers[0]._layers[0]
    order = [v is first.b or v is first.w for v in objects["policy"].trainable_variables]
    assert order[:2] == [True, True]
    adam = objects["policy_optimizer"]
    return {
        "actions": (2 * tf.tanh(x)).numpy().tolist(),
        "steps": [int(objects["num_steps"]), int(adam.step)],
        "moments": [float(moment.numpy().ravel()[0]) for moment in adam.m],
    }


def restore(folder: Path) -> dict[str, Any]:
    """Restore each checkpoint into such objects, and return what they compute then."""
    return {"tf2rl": _tf2rl(folder), "tf_agents": _tf_agents(folder), "acme": _acme(folder)}


# --- The tests -------------------------------------------------------------------------------------------


def bounded(path: str) -> str:
    """Put a sidecar with the action's bounds beside the checkpoint."""
    facts = Sidecar(digest_checkpoint(open_checkpoint(path)).sha256, action_low=LOW, action_high=HIGH)
    Path(sidecar_path(path)).write_bytes(facts.encode())
    return path


def agents(folder: Path) -> dict[str, Any]:
    """Return agents of torch by the library that they are written for, with what torch knows of them."""
    pytest.importorskip("torch")
    from tests.torch_agents import agent

    return {
        "tf2rl": agent(folder / "td3", OBS, ACT, targets=False),
        "tf_agents": agent(folder / "sac", OBS, ACT, gaussian=True),
        "acme": agent(folder / "ddpg", OBS, ACT, critics=1),
    }


Written = tuple[dict[str, Any], dict[str, ConversionResult], dict[str, Any]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The agents, our conversions of them, and what TensorFlow made of those."""
    if importlib.util.find_spec("tensorflow") is None or importlib.util.find_spec("tf_keras") is None:
        pytest.skip("TensorFlow with Keras 2 is not installed")
    from tests import tensorflow_child

    folder = tmp_path_factory.mktemp("written")
    sources = agents(folder)
    done = {
        name: convert(bounded(source[0]), str(folder / f"{name}-3"), to=name, allow_missing=True)
        for name, source in sources.items()
    }
    return sources, done, tensorflow_child.run(__file__, "restore", folder)


@pytest.mark.parametrize("name", ["tf2rl", "tf_agents", "acme"])
def test_it_restores_in_full_and_acts_the_same(written: Written, name: str) -> None:
    from tests.torch_agents import as_batch, close

    sources, done, restored = written
    policy = sources[name][1]
    close(np.array(restored[name]["actions"], "f4"), 2 * policy(as_batch(_observations())), 2.0)
    assert not done[name].report.missing


def test_tf2rl_has_both_critics_copies_for_targets_and_the_optimizer(written: Written) -> None:
    import torch

    sources, done, restored = written
    _, _, twins, file = sources["tf2rl"]
    answer = restored["tf2rl"]
    assert answer["targets"] == answer["actions"]
    assert any(line.startswith("actor_target and critic_target: ") for line in done["tf2rl"].report.assumed)
    obs = torch.from_numpy(np.concatenate([_observations(), np.zeros((120, ACT), "f4")], 1))
    np.testing.assert_allclose(answer["q2"], twins.q2(obs).detach().numpy().ravel(), rtol=1e-5, atol=1e-5)
    assert answer["steps"] == [7, file["total_it"]]
    assert answer["rate"] == float(np.float32(3e-4))
    # The second Q-function's first weight is the seventh parameter.
    assert answer["moments"] == [6.0, 6.5]


def test_tf_agents_has_mean_and_deviation_in_one_layer(written: Written) -> None:
    import torch

    sources, _, restored = written
    policy, answer = sources["tf_agents"][1], restored["tf_agents"]
    x = torch.relu(policy.l2(torch.relu(policy.l1(torch.from_numpy(_observations())))))
    np.testing.assert_allclose(answer["log_std"], policy.log_std(x).detach().numpy(), rtol=1e-5, atol=1e-5)
    assert answer["alpha"] == float(np.float32(-1.5))
    # The bias of the mean is the sixth parameter, that of the deviation the eighth.
    assert answer["moments"] == [5.0, 5.0, 7.0, 7.0]


def test_sonnet_has_a_bias_before_its_weight(written: Written) -> None:
    sources, _, restored = written
    answer = restored["acme"]
    assert answer["moments"] == [1.0, 0.0, 3.0, 2.0, 5.0, 4.0]
    assert answer["steps"] == [sources["acme"][3]["total_it"], 7]


def test_networks_that_the_classes_cannot_be_are_refused(tmp_path: Path, golden: Golden) -> None:
    torch = pytest.importorskip("torch")
    from tests.torch_agents import agent, mlp, saved

    twins = bounded(agent(tmp_path / "a", OBS, ACT)[0])
    with pytest.raises(UnsupportedError) as caught:
        convert(twins, str(tmp_path / "x-1"), to="acme", allow_missing=True)
    golden(caught.value)
    networks = {"actor": mlp(OBS, 8, ACT).state_dict(), "critic": mlp(OBS + ACT, 8, 1).state_dict()}
    flat = bounded(saved(tmp_path, "flat.pt", {**networks, "actor_target": networks["actor"]}))
    with pytest.raises(UnsupportedError) as caught:
        convert(flat, str(tmp_path / "x-1"), to="tf2rl", allow_missing=True)
    golden(caught.value)
    assert torch is not None


def test_acme_has_its_layer_norm_or_none(tmp_path: Path, golden: Golden) -> None:
    torch = pytest.importorskip("torch")
    from tests.torch_agents import saved

    def network(n_in: int, n_out: int) -> Any:
        layers = {
            "l1": torch.nn.Linear(n_in, 8),
            "n1": torch.nn.LayerNorm(8),
            "l2": torch.nn.Linear(8, n_out),
        }
        return torch.nn.ModuleDict(layers).state_dict()

    file = {"actor": network(OBS, ACT), "actor_target": network(OBS, ACT), "critic": network(OBS + ACT, 1)}
    source = saved(tmp_path, "normed.pt", file)
    facts = Sidecar(digest_checkpoint(open_checkpoint(source)).sha256, action_low=LOW, action_high=HIGH)
    Path(sidecar_path(source)).write_bytes(facts.encode())
    with pytest.raises(UnsupportedError) as caught:
        convert(source, str(tmp_path / "x-1"), to="acme", allow_missing=True)
    golden(caught.value)
    document = {**json.loads(facts.encode()), "activations": ["tanh"]}
    Path(sidecar_path(source)).write_text(json.dumps(document))
    convert(source, str(tmp_path / "x-1"), to="acme", allow_missing=True, sync=False)
    tree = open_checkpoint(str(tmp_path / "x-1")).tree
    assert {
        "policy/_layers/0/_network/_layers/1/scale",
        "policy/_layers/0/_network/_layers/3/_layers/0/w",
    } <= set(tree.names.values())
