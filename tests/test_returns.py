"""Agents that other people trained act as torch does with their weights, and score what they scored.

The actions of Stable-Baselines 2 and 3, computed by the libraries, are with their layouts' tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.evaluate import evaluate
from ckpttool.evaluation.protocol import Protocol
from tests.restored import actions, agree, observations

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.corpus, pytest.mark.torch]

AUTHORS = ("l1", "l2", "l3")
TIANSHOU = ("actor.preprocess.model.model.0", "actor.preprocess.model.model.2", "actor.last.model.0")


def by_torch(path: Path, layers: tuple[str, ...], width: int) -> tuple[np.ndarray, float]:
    """Return tanh of the last layer on the observations, and the largest sum on the way."""
    weights = torch.load(path, map_location="cpu", weights_only=True)
    x, largest = torch.from_numpy(observations(width)), 1.0
    for layer in layers:
        x = torch.nn.functional.linear(x, weights[f"{layer}.weight"], weights[f"{layer}.bias"])
        largest = max(largest, float(x.abs().max()))
        x = x.tanh() if layer == layers[-1] else x.relu()
    return x.numpy(), largest


def close(actual: np.ndarray, expected: np.ndarray, scale: float) -> None:
    # A float32 sum of thousands is rounded by more than tanh's whole slope: its size is the scale.
    assert actual.shape == expected.shape
    assert np.abs(expected).max() > 0.1
    assert np.abs(actual - expected).max() <= 1e-6 * scale


@pytest.mark.parametrize(
    ("name", "width", "high"),
    [
        ("bmcnns/models/TD3_HalfCheetah-v3_0_actor", 17, (1.0,) * 6),
        ("bmcnns/models/TD3_HalfCheetah-v3_1_actor", 17, (1.0,) * 6),
        ("nikhil/BipedalWalker-v2/ONE/TD3_BipedalWalker-v2_0_solved_actor.pth", 24, (1.0,) * 4),
        ("nikhil/LunarLanderContinuous-v2/TD3_LunarLanderContinuous-v2_0_solved_actor.pth", 8, (1.0,) * 2),
        # Their classes multiply by max_action, whatever it is.
        ("nikhil/LunarLanderContinuous-v2/TD3_LunarLanderContinuous-v2_0_solved_actor.pth", 8, (2.5,) * 2),
    ],
)
def test_the_td3_authors_actors_act_as_torch_does(
    corpus: Path, name: str, width: int, high: tuple[float, ...]
) -> None:
    path = corpus / "torch" / "fujimoto" / name
    expected, largest = by_torch(path, AUTHORS, width)
    low = tuple(-bound for bound in high)
    close(actions(path, low, high, width), high[0] * expected, high[0] * largest)


@pytest.mark.parametrize("pattern", ["td3/policy.pth", "td3_bc/*/policy.pth"])
def test_tianshous_actors_act_as_torch_does(corpus: Path, pattern: str) -> None:
    (path,) = (corpus / "torch" / "tianshou" / "Pendulum-v1").glob(pattern)
    squashed, largest = by_torch(path, TIANSHOU, 3)
    # tianshou/policy/base.py, map_action: limited to [-1, 1], then to the bounds; all of 2 * tanh before.
    expected = -2.0 + 0.5 * (np.clip(2.0 * squashed, -1.0, 1.0) + 1.0) * 4.0
    close(actions(path, (-2.0,), (2.0,)), expected, 2.0 * largest)


# How many episodes of an environment take about a second on two cores.
EPISODES = {
    "Pendulum-v1": 100,
    "MountainCarContinuous-v0": 100,
    "LunarLanderContinuous-v3": 32,
    "BipedalWalker-v3": 4,
    "HalfCheetah-v5": 32,
    "HalfCheetah-v4": 16,
}
NEEDS = {"LunarLanderContinuous-v3": "Box2D", "BipedalWalker-v3": "Box2D"}
AGENTS = [
    ("sb3_zoo/ddpg/Pendulum-v1_1/Pendulum-v1.zip", "Pendulum-v1"),
    ("sb3_zoo/ddpg/MountainCarContinuous-v0_1/MountainCarContinuous-v0.zip", "MountainCarContinuous-v0"),
    ("sb3_zoo/ddpg/LunarLanderContinuous-v2_1/LunarLanderContinuous-v2.zip", "LunarLanderContinuous-v3"),
    ("fujimoto/nikhil/BipedalWalker-v2/ONE/TD3_BipedalWalker-v2_0_solved_actor.pth", "BipedalWalker-v3"),
    (
        "fujimoto/nikhil/LunarLanderContinuous-v2/TD3_LunarLanderContinuous-v2_0_solved_actor.pth",
        "LunarLanderContinuous-v3",
    ),
    ("fujimoto/bmcnns/models/TD3_HalfCheetah-v3_0_actor", "HalfCheetah-v5"),
    ("fujimoto/bmcnns/models/TD3_HalfCheetah-v3_1_actor", "HalfCheetah-v5"),
    ("fujimoto/bmcnns/models/TD3_HalfCheetah-v3_1_actor", "HalfCheetah-v4"),
    ("tianshou/Pendulum-v1/td3/policy.pth", "Pendulum-v1"),
]


def rows(corpus: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((corpus / "RETURNS.json").read_text())["runs"]
    return runs


def known(corpus: Path, agent: str, env: str) -> dict[str, Any]:
    """Return the row of the agent in that environment with most episodes."""
    runs = [run for run in rows(corpus) if run["agent"] == agent and run["env"] == env]
    return max(runs, key=lambda run: int(run["episodes"]))


def test_no_agent_with_known_returns_is_left_out(corpus: Path) -> None:
    assert {(run["agent"], run["env"]) for run in rows(corpus)} == set(AGENTS)


@pytest.mark.environment
@pytest.mark.parametrize(
    ("agent", "env"), AGENTS, ids=[f"{agent.rpartition('/')[2]} in {env}" for agent, env in AGENTS]
)
def test_agents_score_what_they_scored(corpus: Path, agent: str, env: str) -> None:
    pytest.importorskip("mujoco" if env.startswith("HalfCheetah") else NEEDS.get(env, "gymnasium"))
    row, episodes = known(corpus, agent, env), EPISODES[env]
    played = evaluate(str(corpus / "torch" / agent), env, Protocol(episodes=episodes, seed=1000))
    statistics = played.statistics
    assert statistics.n == episodes
    assert (played.rollout.engine == "mujoco") == env.startswith("HalfCheetah")
    assert agree(statistics, row["mean"], row["std"], row["episodes"]), statistics


# Means and deviations that a person published: benchmark.md of araffin/rl-baselines-zoo (72b1528).
PUBLISHED = {
    "ddpg_Pendulum-v0.pkl": ("Pendulum-v1", -169.829, 93.303, 750),
    "sac_Pendulum-v0.pkl": ("Pendulum-v1", -159.669, 86.665, 750),
    "td3_Pendulum-v0.pkl": ("Pendulum-v1", -148.985, 84.155, 750),
    "ddpg_MountainCarContinuous-v0.pkl": ("MountainCarContinuous-v0", 91.858, 1.350, 1818),
    "td3_LunarLanderContinuous-v2.pkl": ("LunarLanderContinuous-v3", 228.425, 74.201, 485),
    "td3_BipedalWalker-v2.zip": ("BipedalWalker-v3", 308.793, 23.750, 228),
}


@pytest.mark.environment
@pytest.mark.parametrize("name", PUBLISHED)
def test_tensorflow_1_agents_score_what_their_author_published(corpus: Path, name: str) -> None:
    env, mean, std, n = PUBLISHED[name]
    pytest.importorskip(NEEDS.get(env, "gymnasium"))
    path = corpus / "tf" / "sb2" / "zoo" / name
    results = evaluate(str(path), env, Protocol(episodes=EPISODES[env], seed=1000)).statistics
    assert agree(results, mean, std, n), results
