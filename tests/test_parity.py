"""The proof from outside: TensorFlow restores the original, plain PyTorch code the converted file.

Neither side uses ckpttool to run anything; the PyTorch classes are those of the TD3 paper's structure,
written out here as a user would write them.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import TF_SAMPLE, in_process

OBSERVATIONS = 1000
MAX_ACTION = 2.0


def observations() -> np.ndarray:
    """float32 [1000, 3]: ordinary, large and zero ones."""
    drawn = np.random.default_rng(7).standard_normal((OBSERVATIONS, 3)).astype(np.float32)
    drawn[500:800] *= 8
    drawn[999] = 0
    return drawn


def tensorflow_restores(folder: Path) -> dict[str, Any]:
    """In a child process: build the agent from scratch, restore it, act, and list what was restored."""
    import keras
    import tensorflow as tf

    class Mlp(keras.Model):
        def __init__(self, out: int, n_in: int) -> None:
            super().__init__()
            self.l1, self.l2 = (keras.layers.Dense(64, "relu") for _ in range(2))
            self.l3 = keras.layers.Dense(out)
            self(tf.zeros([1, n_in]))

        def call(self, x: Any) -> Any:
            return self.l3(self.l2(self.l1(x)))

    class Twin(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.q1, self.q2 = Mlp(1, 4), Mlp(1, 4)

    agent = tf.Module()
    agent.actor, agent.actor_target = Mlp(1, 3), Mlp(1, 3)
    agent.critic, agent.critic_target = Twin(), Twin()
    source = json.loads((folder / "source.json").read_text())
    status = tf.train.Checkpoint(policy=agent).restore(source)
    status.assert_existing_objects_matched()
    obs = observations()
    both = np.concatenate([obs, np.clip(obs[:, :1], -2, 2)], axis=1)
    arrays = {
        "actor": MAX_ACTION * tf.tanh(agent.actor(obs)).numpy(),
        "actor_target": MAX_ACTION * tf.tanh(agent.actor_target(obs)).numpy(),
        "q1": agent.critic.q1(both).numpy(),
        "q2": agent.critic.q2(both).numpy(),
    }
    np.savez(folder / "outputs.npz", **arrays)
    weights = {}
    for network in ("actor", "actor_target"):
        for layer in ("l1", "l2", "l3"):
            dense = getattr(getattr(agent, network), layer)
            weights[f"{network}/{layer}.weight"] = dense.kernel.numpy()
            weights[f"{network}/{layer}.bias"] = dense.bias.numpy()
    for network in ("critic", "critic_target"):
        for q in ("q1", "q2"):
            for layer in ("l1", "l2", "l3"):
                dense = getattr(getattr(getattr(agent, network), q), layer)
                weights[f"{network}/{q}.{layer}.weight"] = dense.kernel.numpy()
                weights[f"{network}/{q}.{layer}.bias"] = dense.bias.numpy()
    np.savez(folder / "weights.npz", **{name.replace("/", "|"): array for name, array in weights.items()})
    return {"restored": len(weights)}


@pytest.fixture(scope="module")
def both_sides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    pytest.importorskip("torch")
    from tests import tensorflow_child

    folder = tmp_path_factory.mktemp("parity")
    (folder / "source.json").write_text(json.dumps(str(TF_SAMPLE)))
    assert tensorflow_child.run(__file__, "tensorflow_restores", folder)["restored"] == 36
    ran = in_process("convert", TF_SAMPLE, folder / "agent.pt", "--to", "torch")
    assert ran.status == 0, ran.err
    return folder


@pytest.mark.torch
@pytest.mark.tensorflow
def test_tensors_are_bit_identical_after_the_transposes(both_sides: Path) -> None:
    import torch

    converted = torch.load(both_sides / "agent.pt", weights_only=True)
    restored = np.load(both_sides / "weights.npz")
    assert len(restored.files) == 36
    for name in restored.files:
        network, entry = name.split("|")
        there = converted[network][entry].numpy()
        expected = restored[name].T if entry.endswith("weight") else restored[name]
        assert there.dtype == expected.dtype
        np.testing.assert_array_equal(there, expected, err_msg=name, strict=True)


@pytest.mark.torch
@pytest.mark.tensorflow
def test_actions_and_values_are_the_same(both_sides: Path) -> None:
    import torch
    from torch import nn
    from torch.nn.functional import relu

    class Actor(nn.Module):
        def __init__(self, state_dim: int, action_dim: int, max_action: float) -> None:
            super().__init__()
            self.l1 = nn.Linear(state_dim, 64)
            self.l2 = nn.Linear(64, 64)
            self.l3 = nn.Linear(64, action_dim)
            self.max_action = max_action

        def forward(self, state: torch.Tensor) -> torch.Tensor:
            a = relu(self.l1(state))
            a = relu(self.l2(a))
            return self.max_action * torch.tanh(self.l3(a))

    class Q(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l1, self.l2, self.l3 = nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.l3(relu(self.l2(relu(self.l1(x)))))

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q1, self.q2 = Q(), Q()

    contents = torch.load(both_sides / "agent.pt", weights_only=True)
    outputs = np.load(both_sides / "outputs.npz")
    obs = observations()
    with torch.no_grad():
        for name in ("actor", "actor_target"):
            actor = Actor(3, 1, MAX_ACTION)
            actor.load_state_dict(contents[name], strict=True)
            outputs_of_torch = actor(torch.from_numpy(obs)).numpy()
            assert outputs_of_torch.shape == outputs[name].shape == (OBSERVATIONS, 1)
            assert np.abs(outputs_of_torch - outputs[name]).max() <= 1e-5
            assert np.abs(outputs_of_torch).max() > 1, "the observations do not exercise the actor"
        critic = Critic()
        critic.load_state_dict(contents["critic"], strict=True)
        both = torch.from_numpy(np.concatenate([obs, np.clip(obs[:, :1], -2, 2)], axis=1))
        for q in ("q1", "q2"):
            expected = outputs[q]
            outputs_of_torch = getattr(critic, q)(both).numpy()
            assert np.abs(outputs_of_torch - expected).max() <= 1e-5 * np.abs(expected).max()
