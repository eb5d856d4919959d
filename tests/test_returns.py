"""Agents that other people trained act as torch does with their weights, and score what they scored.

Stable-Baselines3's actions, and the returns of the agents that are not here, are with their layouts' tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.ops.evaluate import evaluate
from ckpttool.ops.evaluation import Protocol
from tests.restored import actions, observations

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


def close(found: np.ndarray, wanted: np.ndarray, scale: float) -> None:
    # A float32 sum of thousands is rounded by more than tanh's whole slope: its size is the scale.
    assert found.shape == wanted.shape
    assert np.abs(wanted).max() > 0.1
    assert np.abs(found - wanted).max() <= 1e-6 * scale


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
    wanted, largest = by_torch(path, AUTHORS, width)
    low = tuple(-bound for bound in high)
    close(actions(path, low, high, width), high[0] * wanted, high[0] * largest)


@pytest.mark.parametrize("pattern", ["td3/policy.pth", "td3_bc/*/policy.pth"])
def test_tianshous_actors_act_as_torch_does(corpus: Path, pattern: str) -> None:
    (path,) = (corpus / "torch" / "tianshou" / "Pendulum-v1").glob(pattern)
    squashed, largest = by_torch(path, TIANSHOU, 3)
    # tianshou/policy/base.py, map_action: limited to [-1, 1], then to the bounds; all of 2 * tanh before.
    wanted = -2.0 + 0.5 * (np.clip(2.0 * squashed, -1.0, 1.0) + 1.0) * 4.0
    close(actions(path, (-2.0,), (2.0,)), wanted, 2.0 * largest)


def known(corpus: Path, agent: str, env: str) -> dict[str, Any]:
    """Return the row of the agent in that environment with most episodes."""
    runs = json.loads((corpus / "RETURNS.json").read_text())["runs"]
    rows = [run for run in runs if run["agent"] == agent and run["env"] == env]
    return max(rows, key=lambda run: int(run["episodes"]))


@pytest.mark.parametrize(
    ("agent", "env", "needs", "episodes"),
    [
        ("sb3_zoo/ddpg/Pendulum-v1_1/Pendulum-v1.zip", "Pendulum-v1", "gymnasium", 20),
        (
            "sb3_zoo/ddpg/MountainCarContinuous-v0_1/MountainCarContinuous-v0.zip",
            "MountainCarContinuous-v0",
            "gymnasium",
            20,
        ),
        (
            "sb3_zoo/ddpg/LunarLanderContinuous-v2_1/LunarLanderContinuous-v2.zip",
            "LunarLanderContinuous-v3",
            "Box2D",
            20,
        ),
        ("fujimoto/bmcnns/models/TD3_HalfCheetah-v3_1_actor", "HalfCheetah-v4", "mujoco", 8),
    ],
    ids=["pendulum", "mountain car", "lunar lander", "half cheetah v4"],
)
def test_agents_score_what_they_scored(corpus: Path, agent: str, env: str, needs: str, episodes: int) -> None:
    pytest.importorskip(needs)
    row = known(corpus, agent, env)
    path = str(corpus / "torch" / agent)
    found = evaluate(path, env, Protocol(episodes=episodes, seed=1000)).statistics
    spread = row["std"] ** 2 / row["episodes"] + found.std**2 / episodes
    assert abs(found.mean - row["mean"]) <= 3 * spread**0.5
