"""One player's steps per second: `python players.py PLAYER ENV WEIGHTS EPISODES ROWS`, a process of its own.

Starting and restoring are not counted for anyone: the clock runs from the first reset to the last step.
WEIGHTS is an npz of `kernel0`, `bias0`, ... of an actor with ReLU, and tanh times the bounds at its end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SEED = 1000


def _layers(weights: str) -> list[tuple[np.ndarray, np.ndarray]]:
    with np.load(weights) as file:
        return [(file[f"kernel{n}"], file[f"bias{n}"]) for n in range(len(file.files) // 2)]


def _torch_actor(weights: str) -> Callable[[np.ndarray], np.ndarray]:
    import torch

    torch.set_num_threads(1)
    modules: list[torch.nn.Module] = []
    for kernel, bias in _layers(weights):
        linear = torch.nn.Linear(*kernel.shape)
        linear.weight.data, linear.bias.data = torch.from_numpy(kernel.T.copy()), torch.from_numpy(bias)
        modules += [linear, torch.nn.ReLU()]
    actor = torch.nn.Sequential(*modules[:-1], torch.nn.Tanh())

    @torch.no_grad()
    def act(obs: np.ndarray) -> np.ndarray:
        return actor(torch.from_numpy(obs.astype(np.float32))).numpy()

    return act


def play_ours(env: str, weights: str, episodes: int, rows: int, backend: str = "numpy") -> tuple[int, float]:
    """Play as `ckpttool eval` does."""
    from ckpttool.commands.evaluate import evaluate
    from ckpttool.evaluation.protocol import Protocol

    agent = str(Path(weights).with_suffix("")) + "_actor"
    results = evaluate(agent, env, Protocol(episodes, SEED, rows, backend=backend)).rollout
    return results.steps, results.seconds


def ours_onnx(env: str, weights: str, episodes: int, rows: int) -> tuple[int, float]:
    """Play as `ckpttool eval --backend onnxruntime` does."""
    return play_ours(env, weights, episodes, rows, "onnxruntime")


def no_policy(env: str, weights: str, episodes: int, rows: int) -> tuple[int, float]:  # noqa: ARG001
    """Step our engine with actions that are there already."""
    from ckpttool.evaluation import environments
    from ckpttool.evaluation.rollout import RolloutSpec, rollouts

    class Given:
        """A table of random actions."""

        device = "cpu"

        def __init__(self, shape: tuple[int, int]) -> None:
            self.table = np.random.default_rng(0).uniform(-1, 1, (64, *shape)).astype(np.float32)
            self.turn = 0

        def step(self, obs: Any, state: tuple[np.ndarray, ...] = ()) -> Any:  # noqa: ARG002
            """Return the next row of the table."""
            self.turn += 1
            return self.table[self.turn % len(self.table)], ()

    with environments.make_vector_env(env, rows) as vector:
        (result,) = rollouts(Given((rows, vector.spec.action_dim)), vector, RolloutSpec(episodes, SEED))
    return result.steps, result.seconds


def loop(env: str, weights: str, episodes: int, rows: int) -> tuple[int, float]:  # noqa: ARG001
    """Play as the usual few lines do: one Gymnasium environment and torch."""
    import gymnasium

    act, environment = _torch_actor(weights), gymnasium.make(env)
    low, high = environment.action_space.low, environment.action_space.high
    steps, start = 0, time.perf_counter()
    for episode in range(episodes):
        obs, over = environment.reset(seed=SEED + episode)[0], False
        while not over:
            action = low + (act(obs[None])[0] + 1) / 2 * (high - low)
            obs, _, terminated, truncated, _ = environment.step(action)
            over = terminated or truncated
            steps += 1
    return steps, time.perf_counter() - start


def sb3(env: str, weights: str, episodes: int, rows: int) -> tuple[int, float]:
    """Play as Stable-Baselines3's evaluate_policy does, in `rows` Dummy environments."""
    import torch
    from stable_baselines3 import TD3
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    layers = _layers(weights)
    vector = make_vec_env(env, rows, seed=SEED)
    hidden = [kernel.shape[1] for kernel, _ in layers[:-1]]
    model = TD3("MlpPolicy", vector, policy_kwargs={"net_arch": hidden}, buffer_size=1, device="cpu")
    linears = [m for m in model.actor.mu if isinstance(m, torch.nn.Linear)]
    for linear, (kernel, bias) in zip(linears, layers, strict=True):
        linear.weight.data, linear.bias.data = torch.from_numpy(kernel.T.copy()), torch.from_numpy(bias)
    start = time.perf_counter()
    _, lengths = evaluate_policy(model, vector, episodes, return_episode_rewards=True)
    return sum(lengths), time.perf_counter() - start


def pool(env: str, weights: str, episodes: int, rows: int) -> tuple[int, float]:
    """Play as envpool and torch do: all rows in step, each for its share of the episodes."""
    import envpool

    act = _torch_actor(weights)
    environment = envpool.make(env, "gymnasium", num_envs=rows, seed=SEED)
    low, high = environment.action_space.low, environment.action_space.high
    obs, _ = environment.reset()
    done, steps, start = 0, 0, time.perf_counter()
    while done < episodes:
        obs, _, terminated, truncated, _ = environment.step(low + (act(obs) + 1) / 2 * (high - low))
        done += int((terminated | truncated).sum())
        steps += rows
    return steps, time.perf_counter() - start


PLAYERS: dict[str, Callable[[str, str, int, int], tuple[int, float]]] = {
    player.__name__: player for player in (play_ours, ours_onnx, no_policy, loop, sb3, pool)
}

if __name__ == "__main__":
    _player, _env, _weights, _episodes, _rows = sys.argv[1:]
    print(*PLAYERS[_player](_env, _weights, int(_episodes), int(_rows)))
