"""The networks of a restored agent as modules of PyTorch and Keras: equal outputs, exact weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool.core import MissingExtraError, UnsupportedError, UsageError, plugins
from tests import agent_models, tensorflow_child
from tests.conftest import TF_SAMPLE
from tests.test_load_agent import made, needs_library  # noqa: F401  # a fixture

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.environment]

SAMPLE = str(TF_SAMPLE)


def wanted(agent: ckpttool.LoadedAgent, name: str, obs: np.ndarray, actions: np.ndarray) -> Any:
    """Return what the agent itself computes."""
    if name == "actor":
        return agent.scores(obs) if agent.choices is not None else agent.act(obs)
    if name == "value":
        return agent.value(obs)[:, None]
    if name == "q":
        return agent.q_values(obs)
    return agent.q_values(obs, actions)[:, [int(name[-1]) - 1]]


@needs_library
@pytest.mark.parametrize(
    ("name", "online"),
    [
        ("dqn", ["q"]),
        ("ppo", ["actor", "value"]),
        ("ppo_box", ["actor", "value"]),
        ("sac", ["actor", "critic_1", "critic_2"]),
        ("td3", ["actor", "critic_1", "critic_2"]),
    ],
)
def test_modules_compute_what_the_agent_does(made: Any, name: str, online: list[str]) -> None:  # noqa: F811
    folder, answer = made
    obs = np.array(answer["obs"], np.float32)
    actions = np.random.default_rng(3).uniform(-1, 1, (len(obs), 2)).astype(np.float32)
    agent = ckpttool.load_agent(str(folder / f"{name}.zip"))
    modules = agent.networks("torch")
    assert [each for each in modules if "target" not in each] == online
    # A library's own file: every parameter of these networks, bit for bit.
    tree = ckpttool.open(str(folder / f"{name}.zip")).tree
    stored = {each.array().tobytes() for _, each in tree.tensors()}
    for title in online:
        module, inputs = modules[title], [torch.from_numpy(obs)]
        if title.startswith("critic"):
            inputs.append(torch.from_numpy(actions))
        output = module(*inputs)
        expected = wanted(agent, title, obs, actions)
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(output.detach().numpy(), expected, rtol=0, atol=1e-6 * scale)
        parameters = dict(module.named_parameters())
        assert parameters
        assert all(each.requires_grad for each in parameters.values())
        assert all(each.detach().numpy().tobytes() in stored for each in parameters.values())
        output.sum().backward()
        assert all(each.grad is not None for n, each in parameters.items() if not n.endswith("row"))


@needs_library
def test_the_deviation_of_a_policy_is_trained_with_it(made: Any) -> None:  # noqa: F811
    folder, answer = made
    obs = np.array(answer["obs"], np.float32)
    for name in ("ppo_box", "sac"):
        agent = ckpttool.load_agent(str(folder / f"{name}.zip"))
        actor = agent.networks("torch", "actor")["actor"]
        mean, std = actor.distribution(torch.from_numpy(obs))
        for found, known in zip((mean, std), agent.distribution(obs), strict=True):
            np.testing.assert_allclose(found.detach().numpy(), known, rtol=1e-5, atol=1e-6)
        (mean.sum() + std.log().sum()).backward()
        assert all(each.grad is not None for each in actor.parameters())
    with pytest.raises(UnsupportedError):
        ckpttool.load_agent(SAMPLE).networks("torch", "actor")["actor"].distribution(torch.zeros(1, 3))


def test_modules_are_independent_copies() -> None:
    agent = ckpttool.load_agent(SAMPLE)
    obs = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    before, first = agent.act(obs), agent.networks("torch")["actor"]
    twin, double = copy.deepcopy(first), copy.deepcopy(first).double()
    with torch.no_grad():
        for each in first.parameters():
            each.zero_()
    np.testing.assert_array_equal(agent.act(obs), before)
    for other in (twin, agent.networks("torch", "actor")["actor"], double):
        np.testing.assert_allclose(
            other(torch.from_numpy(obs)).detach().numpy(), before, rtol=1e-5, atol=1e-6
        )
    assert not first(torch.from_numpy(obs)).any()
    first.load_state_dict(twin.state_dict(), strict=True)
    np.testing.assert_allclose(first(torch.from_numpy(obs)).detach().numpy(), before, rtol=1e-5, atol=1e-6)


def test_a_module_learns() -> None:
    actor = ckpttool.load_agent(SAMPLE).networks("torch", "actor")["actor"]
    obs = torch.randn(64, 3)
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = (actor(obs) - 0.7).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2


def test_what_cannot_be_given_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = ckpttool.load_agent(SAMPLE)
    for wrong in (("numpy",), ("torch", "critic_9")):
        with pytest.raises(UsageError):
            agent.networks(*wrong)
    monkeypatch.setattr(plugins.Plugin, "available", lambda _self: False)
    monkeypatch.setattr(plugins.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtraError):
        agent.networks("tensorflow")


@needs_library
@pytest.mark.tensorflow
def test_keras_models_compute_what_the_agent_does(made: Any, tmp_path: Path) -> None:  # noqa: F811
    tensorflow_child.require("tensorflow", "keras")
    paths = [SAMPLE, *(str(made[0] / f"{name}.zip") for name in ("ppo", "ppo_box", "sac"))]
    (tmp_path / "paths.json").write_text(json.dumps(paths))
    answer = tensorflow_child.run(agent_models.__file__, "compare", tmp_path)
    assert list(answer) == paths
    for path, found in answer.items():
        assert found["apart"] < 1e-5, path
        assert found["critic"] < 1e-5, path
        assert all(found["holds"].values()), (path, found)


@pytest.mark.tensorflow
def test_keras_models_with_memory_and_images_compute_what_the_agent_does(tmp_path: Path) -> None:
    tensorflow_child.require("tensorflow", "keras")
    nn = torch.nn
    torch.manual_seed(0)
    bounds = {"action_scale": torch.ones(2), "action_bias": torch.zeros(2)}
    for kind in ("LSTM", "GRU"):
        actor = nn.ModuleDict(
            {"memory": getattr(nn, kind)(3, 6), "l1": nn.Linear(6, 5), "l2": nn.Linear(5, 2)}
        )
        torch.save({"actor": {**actor.state_dict(), **bounds}, "total_it": 5}, tmp_path / f"{kind}_agent.pt")
    sizes = ((4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1))
    layers = [each for size in sizes for each in (nn.Conv2d(*size), nn.ReLU())]
    images = nn.Sequential(*layers, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 3))
    state = {f"network.{name}": each for name, each in images.state_dict().items()}
    torch.save(state, tmp_path / "images_agent.cleanrl_model")
    answer = tensorflow_child.run(agent_models.__file__, "compare_steps", tmp_path)
    # Outputs of two steps, and the states between them.
    assert {name: each["compared"] for name, each in answer.items()} == {
        "GRU_agent": 3, "LSTM_agent": 4, "images_agent": 1
    }  # fmt: skip
    for name, found in answer.items():
        assert found["apart"] < 1e-5, name
        assert found["gradients"], name
