"""Discrete observations as one-hot rows, and MultiBinary actions, as Stable-Baselines3 predicts and plays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool.core import EnvironmentMismatchError
from ckpttool.evaluation.agent_facts import AgentFacts
from tests import warm_sb3
from tests.conftest import in_process
from tests.test_load_agent import needs_library

torch = pytest.importorskip("torch")
gymnasium = pytest.importorskip("gymnasium")
pytestmark = [pytest.mark.torch, pytest.mark.environment]

# Agents of Stable-Baselines3, what they predict, and the returns of the first episodes.
PROGRAM = """
import json, sys
import gymnasium, numpy as np, stable_baselines3 as sb3, torch
from gymnasium import spaces

folder, names = sys.argv[1], json.loads(sys.argv[2])
net = lambda: dict(policy_kwargs=dict(net_arch=[9]), device="cpu", seed=3)

class Task(gymnasium.Env):
    def __init__(self, seen, acted):
        self.observation_space, self.action_space = seen, acted

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}

box, bits = spaces.Box(-1, 1, (2,)), spaces.MultiBinary(4)
made = {
    "ppo_lake": (sb3.PPO, "MlpPolicy", gymnasium.make(names["ppo_lake"])),
    "dqn_lake": (sb3.DQN, "MlpPolicy", gymnasium.make(names["dqn_lake"])),
    "a2c_taxi": (sb3.A2C, "MlpPolicy", gymnasium.make(names["a2c_taxi"])),
    "dqn_cliff": (sb3.DQN, "MlpPolicy", gymnasium.make(names["dqn_cliff"])),
    "several": (sb3.PPO, "MlpPolicy", Task(spaces.MultiDiscrete([3, 2, 5]), box)),
    "binary": (sb3.SAC, "MlpPolicy", Task(spaces.MultiBinary(6), box)),
    "dict": (sb3.PPO, "MultiInputPolicy", Task(
        spaces.Dict({"place": spaces.Discrete(5), "kind": spaces.MultiDiscrete([2, 3]), "speed": box}), box
    )),
    "bits": (sb3.PPO, "MlpPolicy", Task(box, bits)),
    "bits_a2c": (sb3.A2C, "MlpPolicy", Task(spaces.Discrete(4), bits)),
    "critics": (sb3.SAC, "MlpPolicy", Task(spaces.Discrete(6), box)),
}
answer = {}
for name, (kind, policy, env) in made.items():
    more = {"buffer_size": 8} if kind in (sb3.DQN, sb3.SAC) else {}
    model = kind(policy, env, **net(), **more)
    if hasattr(model.policy, "action_net"):
        torch.nn.init.normal_(model.policy.action_net.weight)
        torch.nn.init.normal_(model.policy.action_net.bias)
    model.save(f"{folder}/{name}.zip")
    space = model.observation_space
    space.seed(5)
    obs = [space.sample() for _ in range(60)]
    rows = {k: np.stack([each[k] for each in obs]) for k in obs[0]} if name == "dict" else np.stack(obs)
    answer[name] = {
        "obs": {k: v.tolist() for k, v in rows.items()} if name == "dict" else rows.tolist(),
        "actions": model.predict(rows, deterministic=True)[0].tolist(),
        "first": model.predict(obs[0], deterministic=True)[0].tolist(),
    }
    inputs, actions = model.policy.obs_to_tensor(rows)[0], torch.linspace(-1, 1, 120).reshape(60, 2)
    with torch.no_grad():
        if name == "critics":
            answer[name]["values"] = [output.tolist() for output in model.critic(inputs, actions)]
        elif kind is not sb3.DQN and kind is not sb3.SAC:
            answer[name]["values"] = model.policy.predict_values(inputs).tolist()
    if name.startswith("bits"):
        given = model.policy.obs_to_tensor(rows)[0]
        answer[name]["probs"] = model.policy.get_distribution(given).distribution.probs.tolist()
    if env.spec is not None:
        returns = []
        for seed in range(1000, 1004):
            plain = gymnasium.make(env.spec.id, max_episode_steps=60 if name == "dqn_cliff" else None)
            seen, _ = plain.reset(seed=seed)
            total, over = 0.0, False
            while not over:
                action = int(model.predict(seen, deterministic=True)[0])
                seen, reward, terminated, truncated, _ = plain.step(action)
                total, over = total + float(reward), terminated or truncated
            returns.append(total)
        answer[name]["returns"] = returns
json.dump(answer, open(f"{folder}/answer.json", "w"))
print("null")
"""
ENVIRONMENTS = {
    "ppo_lake": "FrozenLake-v1",
    "dqn_lake": "FrozenLake-v1",
    "a2c_taxi": max(name for name in gymnasium.registry if name.startswith("Taxi-v")),
    "dqn_cliff": max(name for name in gymnasium.registry if name.startswith("CliffWalking-v")),
}
NAMES = (*ENVIRONMENTS, "several", "binary", "dict", "bits", "bits_a2c", "critics")


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("discrete")
    warm_sb3.built(PROGRAM, folder, json.dumps(ENVIRONMENTS))
    return folder, json.loads((folder / "answer.json").read_text())


def rows_of(name: str, stored: Any) -> Any:
    if isinstance(stored, dict):
        return {key: rows_of(key, value) for key, value in stored.items()}
    kind = np.float32 if name in ("speed", "bits", "binary") else np.int64
    return np.array(stored, kind)


@needs_library
@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_an_agent_predicts_as_its_library_does(agents: Any, name: str, backend: str) -> None:
    folder, answer = agents
    obs = rows_of(name, answer[name]["obs"])
    agent = ckpttool.load_agent(str(folder / f"{name}.zip"), backend=backend)
    actions, _ = agent.predict(obs)
    np.testing.assert_allclose(actions, answer[name]["actions"], rtol=1e-5, atol=1e-5)
    first = {key: value[0] for key, value in obs.items()} if isinstance(obs, dict) else obs[0]
    np.testing.assert_allclose(agent.act(first), answer[name]["first"], rtol=1e-5, atol=1e-5)
    assert not any("one-hot" in assumption for assumption in agent.assumed)  # the file records the space
    space = agent.observation_space
    assert space.contains(first) or space.contains({k: np.asarray(v) for k, v in first.items()})


@needs_library
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_eval_returns_what_the_library_does(agents: Any, name: str) -> None:
    folder, answer = agents
    more = ("--wrapper", "TimeLimit:max_episode_steps=60") if name == "dqn_cliff" else ()
    words = ("--env", ENVIRONMENTS[name], "--episodes", "4", "--json", *more)
    done = in_process("eval", str(folder / f"{name}.zip"), *words).json()
    assert done["returns"] == answer[name]["returns"]
    assert not any("one-hot" in assumption for assumption in done["assumed"])


@needs_library
@pytest.mark.parametrize("name", ["bits", "bits_a2c"])
def test_binary_actions_have_the_librarys_probabilities(agents: Any, name: str) -> None:
    folder, answer = agents
    obs = rows_of(name, answer[name]["obs"])
    agent = ckpttool.load_agent(str(folder / f"{name}.zip"))
    assert agent.action_space == gymnasium.spaces.MultiBinary(4)
    pairs = agent.scores(obs).reshape(len(obs), 4, 2)
    probabilities = 1 / (1 + np.exp(pairs[..., 0] - pairs[..., 1]))
    np.testing.assert_allclose(probabilities, answer[name]["probs"], rtol=1e-4, atol=1e-6)
    actions = agent.act(obs)
    assert set(np.unique(actions)) == {0, 1}
    assert agent.action_space.contains(actions[0].astype(np.int8))
    drawn = np.mean([agent.act(obs, deterministic=False) for _ in range(400)], axis=0)
    np.testing.assert_allclose(drawn, answer[name]["probs"], atol=0.12)


@needs_library
def test_a_converted_agent_plays_the_same_and_names_the_encoding(agents: Any, tmp_path: Path) -> None:
    folder, answer = agents
    for name in ("dqn_lake", "bits_a2c"):
        target = str(tmp_path / f"{name}.pt")
        assert ckpttool.convert(str(folder / f"{name}.zip"), target, to="torch").written
        agent = ckpttool.load_agent(target)
        rows = np.eye(16 if name == "dqn_lake" else 4, dtype=np.float32)[rows_of(name, answer[name]["obs"])]
        np.testing.assert_array_equal(agent.act(rows), answer[name]["actions"])
        ckpttool.convert(str(folder / f"{name}.zip"), str(tmp_path / f"{name}.onnx"), to="onnx")
        onnxruntime = pytest.importorskip("onnxruntime")
        session = onnxruntime.InferenceSession(str(tmp_path / f"{name}.onnx"))
        _, actions = session.run(None, {"obs": rows})
        expected = np.array(answer[name]["actions"])
        np.testing.assert_array_equal(actions.reshape(expected.shape), expected)
        restored = ckpttool.load_agent(str(tmp_path / f"{name}.onnx"))
        np.testing.assert_array_equal(restored.act(rows), expected)
    played = ckpttool.evaluate(str(tmp_path / "dqn_lake.pt"), "FrozenLake-v1", ckpttool.Protocol(episodes=4))
    assert played.rollout.returns.tolist() == answer["dqn_lake"]["returns"]
    assert any("one-hot" in assumption for assumption in played.assumed)


@needs_library
@pytest.mark.parametrize("name", ["dqn_lake", "several", "dict"])
def test_code_takes_the_numbers_of_discrete_observations(agents: Any, name: str, tmp_path: Path) -> None:
    folder, answer = agents
    done = ckpttool.convert(str(folder / f"{name}.zip"), str(tmp_path / "a.pt"), to="torch", code="-")
    scope: dict[str, Any] = {}
    exec(str(done.code), scope)
    model, obs = scope["load"](done.target), rows_of(name, answer[name]["obs"])
    inputs = [obs[item] for item in sorted(obs)] if isinstance(obs, dict) else [obs]
    actions = scope["act"](model, *inputs)
    np.testing.assert_allclose(actions, np.array(answer[name]["actions"]), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="outside"):
        scope["act"](model, *(item + 100 for item in inputs))


@needs_library
@pytest.mark.parametrize("name", ["ppo_lake", "several", "dict", "critics"])
def test_code_computes_values_of_discrete_observations(agents: Any, name: str, tmp_path: Path) -> None:
    folder, answer = agents
    done = ckpttool.convert(str(folder / f"{name}.zip"), str(tmp_path / "a.pt"), to="torch", code="-")
    assert "not computed here" not in str(done.code)
    scope: dict[str, Any] = {}
    exec(str(done.code), scope)
    model, obs = scope["load"](done.target), rows_of(name, answer[name]["obs"])
    inputs = [obs[item] for item in sorted(obs)] if isinstance(obs, dict) else [obs]
    row = torch.from_numpy(np.concatenate(scope["encoded"](inputs), -1).astype(np.float32))
    with torch.no_grad():
        if name == "critics":
            actions = torch.linspace(-1, 1, 120).reshape(60, 2)
            values = np.stack(
                [critic(row, actions) for critic in (model.critic.q1_output, model.critic.q2_output)]
            )
        else:
            values = model.value(row).numpy()
    np.testing.assert_allclose(values, np.array(answer[name]["values"]), rtol=1e-5, atol=1e-5)


def test_an_observation_outside_its_space_is_refused(agents: Any) -> None:
    agent = ckpttool.load_agent(str(agents[0] / "dqn_lake.zip"))
    for wrong in (16, -1, np.array([3, 99])):
        with pytest.raises(EnvironmentMismatchError):
            agent.act(wrong)


def test_the_parts_of_a_tuple_are_joined(tmp_path: Path) -> None:
    """As Gymnasium's FlattenObservation does, with which such an agent is trained."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(45, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    torch.save(net.state_dict(), tmp_path / "q_net.pt")
    facts = AgentFacts(activations="relu")
    how = ckpttool.Protocol(episodes=6)
    evaluation = ckpttool.evaluate(str(tmp_path / "q_net.pt"), "Blackjack-v1", how, facts=facts)
    assert any("one-hot" in assumption for assumption in evaluation.assumed)
    returns = []
    for seed in range(1000, 1006):
        env = gymnasium.wrappers.FlattenObservation(gymnasium.make("Blackjack-v1"))
        obs, _ = env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            with torch.no_grad():
                action = int(net(torch.from_numpy(obs.astype(np.float32))).argmax())
            obs, reward, terminated, truncated, _ = env.step(action)
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    assert evaluation.rollout.returns.tolist() == returns
