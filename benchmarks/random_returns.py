"""Reference returns: measures a uniformly random policy in each environment, and copies published means.

`python -m benchmarks.random_returns [ID ...]` measures the environments named, all by default, and updates
`ckpttool/evaluation/reference_returns.json`, with which `eval` compares a mean. Episode i is reset with seed
`SEED + i`; the actions of all rows come from one generator with the same seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from ckpttool.evaluation import environments
from ckpttool.evaluation.gymnasium_engine import EnvSpec
from ckpttool.evaluation.rollout import RolloutSpec, rollouts
from ckpttool.evaluation.statistics import summarize

EPISODES, ROWS, SEED = 200, 10, 0
TABLE = Path(__file__).parent.parent / "ckpttool/evaluation/reference_returns.json"
CLAIMS = Path(__file__).parent / "claims.json"
_MUJOCO = (
    *("Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum"),
    *("InvertedPendulum", "Pusher", "Reacher", "Swimmer", "Walker2d"),
)
# Pusher-v4 cannot be made with current MuJoCo; classic control has two tasks with continuous actions.
ENVIRONMENTS = (
    *("Pendulum-v1", "MountainCarContinuous-v0", "LunarLanderContinuous-v3", "BipedalWalker-v3"),
    *(f"{name}-v{version}" for name in _MUJOCO for version in (4, 5) if (name, version) != ("Pusher", 4)),
)
ZOO, OLD_ZOO = "rl-baselines3-zoo benchmark.md", "rl-baselines-zoo benchmark.md"
# Means that authors publish and that `benchmarks.claims` does not contain (benchmarks/results/claims.md).
PUBLISHED = (
    ("Pendulum-v1", "DDPG", -169.8, 93.3, 750, "Pendulum-v0", OLD_ZOO),
    ("Pendulum-v1", "SAC", -159.7, 86.7, 750, "Pendulum-v0", OLD_ZOO),
    ("Pendulum-v1", "TD3", -149.0, 84.2, 750, "Pendulum-v0", OLD_ZOO),
    ("MountainCarContinuous-v0", "DDPG", 91.86, 1.35, 1818, "MountainCarContinuous-v0", OLD_ZOO),
    ("LunarLanderContinuous-v3", "TD3", 228.4, 74.2, 485, "LunarLanderContinuous-v2", OLD_ZOO),
    ("BipedalWalker-v3", "TD3", 308.8, 23.8, 228, "BipedalWalker-v2", OLD_ZOO),
)


class RandomPolicy:
    """Actions drawn uniformly between the bounds."""

    device = "cpu"

    def __init__(self, spec: EnvSpec, rows: int) -> None:
        """Draw for `rows` environments at once."""
        self._low, self._high, self._rows = spec.action_low, spec.action_high, rows
        self._draws = np.random.default_rng(SEED)

    def step(self, obs: Any, state: tuple[np.ndarray, ...] = ()) -> Any:  # noqa: ARG002
        """Return actions [rows, action_dim], whatever the observations are."""
        drawn = self._draws.uniform(self._low, self._high, (self._rows, len(self._low)))
        return drawn.astype(self._low.dtype), ()


def measure(env: str) -> dict[str, Any]:
    """Play a random policy in Gymnasium's environment; return its row of the table."""
    from ckpttool.version import __version__

    options = environments.VectorEnvOptions(engine="gymnasium")
    with environments.make_vector_env(env, ROWS, options) as vector:
        (played,) = rollouts(RandomPolicy(vector.spec, ROWS), vector, RolloutSpec(EPISODES, SEED))
        spec = vector.spec
    summary = summarize(played.returns)
    return {
        "mean": summary.mean,
        "std": summary.std,
        "ci95": list(summary.ci95 or ()),
        "episodes": EPISODES,
        "seeds": [SEED, SEED + EPISODES - 1],
        "rows": ROWS,
        "max_episode_steps": spec.max_episode_steps,
        "arguments": dict(spec.arguments),
        "versions": {"ckpttool": __version__, "numpy": np.__version__, **spec.versions},
    }


def published() -> list[dict[str, Any]]:
    """Return the means that authors state, with the environment of their measurement and the source."""
    rows = [dict(zip(_FIELDS, row, strict=True)) for row in PUBLISHED]
    for name, one in json.loads(CLAIMS.read_text())["played"].items():
        claim = one["claim"]
        if claim["mean"] is not None and "mean" in one:
            algorithm, _, trained = name.partition(" ")
            values = (claim["mean"], claim["std"], claim["episodes"])
            rows.append(dict(zip(_FIELDS, (claim["env"], algorithm, *values, trained, ZOO), strict=True)))
    return sorted(rows, key=lambda row: (row["env"], -row["mean"]))


_FIELDS = ("env", "algorithm", "mean", "std", "episodes", "measured_in", "source")


def main() -> int:
    """Measure, and update the table."""
    import gymnasium

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env", nargs="*", default=ENVIRONMENTS)
    table = json.loads(TABLE.read_text()) if TABLE.is_file() else {"random": {}}
    for env in parser.parse_args().env:
        row = table["random"][env] = measure(env)
        print(f"{env:28} {row['mean']:12.2f} +- {row['std']:.2f}", flush=True)
        table["random"] = {name: table["random"][name] for name in sorted(table["random"])}
        table["thresholds"] = {
            name: float(limit)
            for name in table["random"]
            if (limit := gymnasium.spec(name).reward_threshold) is not None
        }
        table["published"] = published()
        TABLE.write_text(json.dumps(table, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
