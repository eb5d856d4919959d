"""Train TD3 on a Gymnasium task in TensorFlow or PyTorch, and keep checkpoints with their scores.

Twin delayed DDPG as in Fujimoto et al. (2018), https://arxiv.org/abs/1802.09477. Everything but
the networks and their update is here; those are in `td3_tensorflow` and `td3_torch`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias, cast

import gymnasium
import numpy as np
from td3_contract import Agent, AgentSpec, Backend, Batch, Float32

from ckpttool.commands.digest import digest
from ckpttool.core import sidecar

# Only the chosen one is imported: the two frameworks do not live well in one process.
BACKENDS = {"tensorflow": "td3_tensorflow", "torch": "td3_torch"}
EVAL_SEED = 1000
BUFFER_CAPACITY = 1_000_000
CERTIFICATE = "CERTIFICATE.json"

Env: TypeAlias = "gymnasium.Env[Float32, Float32]"
Policy: TypeAlias = Callable[[Float32], Float32]


@dataclass(frozen=True)
class Settings:
    """The command line, parsed."""

    backend: str
    env: str
    hidden: tuple[int, int]
    steps: int
    seed: int
    out: Path
    save_every: int
    keep: int
    resume: Path | None
    learning_rate: float
    adam_epsilon: float | None
    batch_size: int
    warmup: int
    exploration_noise: float
    episodes: int


class ReplayBuffer:
    """The last `capacity` transitions, drawn uniformly."""

    def __init__(self, capacity: int, obs_dim: int, action_dim: int) -> None:
        self._arrays = Batch(
            obs=np.zeros((capacity, obs_dim), np.float32),
            action=np.zeros((capacity, action_dim), np.float32),
            next_obs=np.zeros((capacity, obs_dim), np.float32),
            reward=np.zeros((capacity, 1), np.float32),
            not_done=np.zeros((capacity, 1), np.float32),
        )
        self._capacity = capacity
        self._added = 0

    def __len__(self) -> int:
        return min(self._added, self._capacity)

    def add(self, obs: Float32, action: Float32, next_obs: Float32, reward: float, terminated: bool) -> None:
        """Store one transition, over the oldest when full."""
        row = (obs, action, next_obs, reward, 1.0 - terminated)
        for array, value in zip(self._arrays, row, strict=True):
            array[self._added % self._capacity] = np.asarray(value)
        self._added += 1

    def sample(self, batch_size: int, rng: np.random.Generator) -> Batch:
        """Draw `batch_size` transitions with replacement."""
        rows = rng.integers(len(self), size=batch_size)
        return Batch(*(array[rows] for array in self._arrays))


@dataclass(frozen=True)
class Evaluation:
    """Undiscounted returns of one checkpoint's policy, one per episode."""

    step: int
    path: Path
    returns: list[float]

    def summary(self) -> dict[str, Any]:
        """Return this checkpoint's row of the certificate; std is over episodes."""
        return {
            "name": self.path.name,
            "step": self.step,
            "mean": float(np.mean(self.returns)),
            "std": float(np.std(self.returns)),
            "min": min(self.returns),
            "max": max(self.returns),
        }


class Run:
    """One training run: the agent, its task, and what it has kept so far."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.backend = cast(Backend, importlib.import_module(BACKENDS[settings.backend]))
        self.backend.prepare(settings.seed)
        self.rng = np.random.default_rng(settings.seed)
        self.env: Env = gymnasium.make(settings.env)
        self.spec = agent_spec(self.env, settings, self.backend.ADAM_EPSILON)
        self.agent: Agent = self.backend.TD3(self.spec)
        self.start = 0
        self.evaluations: list[Evaluation] = []
        if settings.resume is not None:
            self.resume(settings.resume)

    def resume(self, path: Path) -> None:
        """Fill the agent from a checkpoint and continue its step count."""
        if not any(file.is_file() for file in self.backend.checkpoint_files(path)):
            raise SystemExit(f"{path}: no {self.settings.backend} checkpoint there")
        self.agent.restore(path)
        self.start = step_of(path, self.agent)

    def train(self) -> None:
        """Take `steps` environment steps; past the warm-up each is followed by one update."""
        settings, env, agent = self.settings, self.env, self.agent
        capacity = min(settings.steps, BUFFER_CAPACITY)
        buffer = ReplayBuffer(capacity, self.spec.obs_dim, self.spec.action_dim)
        last = self.start + settings.steps
        obs, _ = env.reset(seed=settings.seed)
        for step in range(self.start + 1, last + 1):
            action = self.explore(obs, len(buffer))
            next_obs, reward, terminated, truncated, _ = env.step(action)
            buffer.add(obs, action, next_obs, float(reward), terminated)
            obs = env.reset()[0] if terminated or truncated else next_obs
            if len(buffer) > settings.warmup:
                agent.update(buffer.sample(settings.batch_size, self.rng))
            if step % settings.save_every == 0 or step == last:
                self.keep(step)

    def explore(self, obs: Float32, collected: int) -> Float32:
        """Return an action [action_dim]: uniform while a new agent warms up, then policy + noise.

        A resumed agent fills its new buffer with its own policy.
        """
        settings, high = self.settings, self.spec.max_action
        size = self.spec.action_dim
        if settings.resume is None and collected < settings.warmup:
            return self.rng.uniform(-high, high, size).astype(np.float32)
        noise = self.rng.normal(0.0, high * settings.exploration_noise, size)
        action = self.agent.select_action(obs.astype(np.float32)) + noise
        return np.clip(action, -high, high).astype(np.float32)

    def keep(self, step: int) -> None:
        """Save a checkpoint, score it, and bring the certificate up to date."""
        settings = self.settings
        path = self.agent.save(settings.out, step, settings.keep)
        returns = evaluate(self.agent.select_action, settings.env, settings.episodes)
        write_sidecar(path, self)
        kept = [*self.evaluations, Evaluation(step, path, returns)]
        self.evaluations = kept[-settings.keep :]
        for dropped in kept[: -settings.keep]:
            Path(sidecar.sidecar_path(str(dropped.path))).unlink(missing_ok=True)
        text = json.dumps(certificate(self), indent=1)
        (settings.out / CERTIFICATE).write_text(text + "\n", encoding="utf-8")
        print(f"step {step}: mean return {np.mean(returns):.1f} over {len(returns)} episodes")


def agent_spec(env: Env, settings: Settings, default_epsilon: float) -> AgentSpec:
    """Read sizes and bounds from the environment; TD3's tanh head needs one symmetric bound."""
    obs_space, action_space = env.observation_space, env.action_space
    if not (isinstance(obs_space, gymnasium.spaces.Box) and len(obs_space.shape) == 1):
        raise SystemExit(f"{settings.env}: observations are {obs_space}, TD3 here needs a vector")
    if not isinstance(action_space, gymnasium.spaces.Box):
        raise SystemExit(f"{settings.env}: actions are {action_space}, TD3 needs a box")
    high = float(action_space.high.flat[0])
    if not (np.all(action_space.high == high) and np.all(action_space.low == -high)):
        raise SystemExit(f"{settings.env}: action bounds differ, TD3 here needs one +-max_action")
    return AgentSpec(
        obs_dim=obs_space.shape[0],
        action_dim=action_space.shape[0],
        max_action=high,
        hidden=settings.hidden,
        learning_rate=settings.learning_rate,
        adam_epsilon=default_epsilon if settings.adam_epsilon is None else settings.adam_epsilon,
    )


def describe(spec: AgentSpec, env_id: str) -> dict[str, Any]:
    """Return the facts that the weights lack: task, bounds, activations, head, Adam's epsilon."""
    return {
        "env": {"id": env_id, "gymnasium": gymnasium.__version__},
        "obs_dim": spec.obs_dim,
        "action_low": [-spec.max_action] * spec.action_dim,
        "action_high": [spec.max_action] * spec.action_dim,
        "activations": ["relu"] * len(spec.hidden),
        "head": "tanh",  # times the upper bound
        "epsilon": {"adam": spec.adam_epsilon},
    }


def write_sidecar(path: Path, run: Run) -> None:
    """Write the sidecar: facts that the weights lack, bound to them by their digest."""
    facts = describe(run.spec, run.settings.env)
    provenance = dict.fromkeys(facts, "given by examples/train_td3.py")
    weights = digest(str(path)).sha256
    facts_record = sidecar.Sidecar(target_sha256=weights, provenance=provenance, **facts)
    Path(sidecar.sidecar_path(str(path))).write_bytes(facts_record.encode())


def step_of(path: Path, agent: Agent) -> int:
    """Return the step in a checkpoint's name (`ckpt-<step>`), or its number of updates."""
    numbered = re.search(r"-(\d+)$", path.with_suffix("").name)
    return int(numbered[1]) if numbered else int(agent.total_it)


def evaluate(policy: Policy, env_id: str, episodes: int) -> list[float]:
    """Play one episode per seed 1000, 1001, ... without noise; return undiscounted returns."""
    env: Env = gymnasium.make(env_id)
    returns = [play(policy, env, EVAL_SEED + index) for index in range(episodes)]
    env.close()
    return returns


def play(policy: Policy, env: Env, seed: int) -> float:
    """Play one episode to its end and return the sum of its rewards."""
    obs, _ = env.reset(seed=seed)
    total, done = 0.0, False
    while not done:
        obs, reward, terminated, truncated, _ = env.step(policy(obs.astype(np.float32)))
        total += float(reward)
        done = terminated or truncated
    return total


def certificate(run: Run) -> dict[str, Any]:
    """Write the origin and the scores of the kept checkpoints."""
    newest = run.evaluations[-1]
    return {
        "script": "examples/train_td3.py",
        "arguments": [portable(argument) for argument in sys.argv[1:]],
        "date": datetime.now(UTC).date().isoformat(),
        "seed": run.settings.seed,
        "versions": {
            "python": platform.python_version(),
            **run.backend.versions(),
            "numpy": np.__version__,
            "gymnasium": gymnasium.__version__,
        },
        "hidden": list(run.spec.hidden),
        **describe(run.spec, run.settings.env),
        "protocol": {
            "episodes": run.settings.episodes,
            "seeds": [EVAL_SEED, EVAL_SEED + run.settings.episodes - 1],
            "deterministic": True,
            "return": "undiscounted",
        },
        "checkpoints": [
            {**kept.summary(), "files": fingerprints(run.backend.checkpoint_files(kept.path))}
            for kept in run.evaluations
        ],
        "final": {"name": newest.path.name, "returns": newest.returns},
    }


def fingerprints(files: list[Path]) -> dict[str, dict[str, Any]]:
    """Return size and sha256 of each file, by name."""
    contents = {file.name: file.read_bytes() for file in files}
    return {
        name: {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in contents.items()
    }


def portable(argument: str) -> str:
    """Shorten an absolute path to its last part: other machines have other folders."""
    path = Path(argument)
    return path.name if path.is_absolute() else argument


def parse(arguments: list[str]) -> Settings:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train TD3 and keep checkpoints.")
    parser.add_argument("--backend", choices=sorted(BACKENDS), required=True)
    parser.add_argument("--env", default="Pendulum-v1", help="Gymnasium environment id")
    parser.add_argument("--hidden", type=widths, default=(400, 300), metavar="W1,W2")
    parser.add_argument("--steps", type=int, default=15_000, help="environment steps to take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder")
    parser.add_argument("--save-every", type=int, default=2_500, metavar="STEPS")
    parser.add_argument("--keep", type=int, default=6, help="checkpoints to keep, the newest ones")
    parser.add_argument("--resume", type=Path, metavar="PATH", help="TensorFlow prefix or PyTorch file")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--adam-epsilon", type=float, help="default: the framework's own")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--warmup", type=int, default=1_000, help="steps before the first update")
    parser.add_argument("--exploration-noise", type=float, default=0.1, help="of max_action")
    parser.add_argument("--episodes", type=int, default=100, help="episodes per evaluation")
    settings = Settings(**vars(parser.parse_args(arguments)))
    if settings.out.exists() and any(settings.out.iterdir()):
        parser.error(f"{settings.out} is not empty; give --out a new folder")
    return settings


def widths(text: str) -> tuple[int, int]:
    """Read two layer widths, as in `400,300`."""
    first, second = (int(width) for width in text.split(","))
    return first, second


def main() -> None:
    """Train with the settings of the command line."""
    settings = parse(sys.argv[1:])
    settings.out.mkdir(parents=True, exist_ok=True)
    Run(settings).train()


if __name__ == "__main__":
    main()
