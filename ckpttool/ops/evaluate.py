"""`eval`: restore an agent, play it with fixed seeds, and report what was measured and what was assumed."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import IO, Any, cast

from ckpttool import plugins
from ckpttool.agents import envs
from ckpttool.agents.components import policy_network, widths
from ckpttool.agents.envs import EnvSpec, VectorEnv
from ckpttool.agents.policy import Backend, Policy
from ckpttool.agents.rollout import Rollout, rollout
from ckpttool.agents.statistics import Summary, summarise
from ckpttool.checkpoint import Output, require_new, write_atomically
from ckpttool.errors import EnvironmentMismatchError, UsageError
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.restore import Agent, restore
from ckpttool.ops.wiring import Bounds, wire
from ckpttool.version import __version__

_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Protocol:
    """How to play: episode i is reset with `seed + i`; the policy always sees `num_envs` observations.

    `num_envs` None means as many as there are episodes, up to 16.
    """

    episodes: int = 10
    seed: int = 1000
    num_envs: int | None = None
    device: str = "cpu"
    backend: str = "numpy"
    network: str = "actor"

    @property
    def at_once(self) -> int:
        """The number of environments that are played at once."""
        return self.num_envs or min(self.episodes, _AT_ONCE)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One checkpoint's result; `versions` and `device` are those that computed it."""

    checkpoint: str
    env: str
    protocol: Protocol
    device: str
    versions: dict[str, str]
    rollout: Rollout
    statistics: Summary
    assumed: tuple[str, ...]
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        played, result = self.rollout, self.statistics
        return {
            "checkpoint": self.checkpoint,
            "env": self.env,
            "versions": self.versions,
            "protocol": {
                "episodes": played.episodes,
                "seeds": played.seeds.tolist(),
                "num_envs": played.num_envs,
                "deterministic": True,
                "device": self.device,
                "backend": self.protocol.backend,
                "network": self.protocol.network,
                "dtype": "float32",
            },
            "returns": played.returns.tolist(),
            "lengths": played.lengths.tolist(),
            "terminated": played.terminated.tolist(),
            "truncated": played.truncated.tolist(),
            "mean": result.mean,
            "std": result.std,
            "median": result.median,
            "iqm": result.iqm,
            "min": result.min,
            "max": result.max,
            "ci95": list(result.ci95) if result.ci95 is not None else None,
            "steps": played.steps,
            "steps_per_s": played.steps_per_s,
            "clipped_actions": played.clipped,
            "interrupted": played.interrupted,
            "assumed": list(self.assumed),
            "notes": list(self.notes),
        }


def evaluate(
    path: str,
    env: str | None = None,
    protocol: Protocol | None = None,
    *,
    layout: str | None = None,
    progress: Progress = silent,
) -> Evaluation:
    """Restore the agent at `path` and play it in `env` (a Gymnasium id; None: the sidecar's).

    Raise UsageError when nobody names an environment, and EnvironmentMismatchError when the policy's
    sizes are not the environment's.
    """
    how = protocol or Protocol()
    agent = restore(path, layout)
    env_id, trusted = _environment(agent, env)
    plugin = plugins.find("backends", how.backend)
    backend = cast(Backend, plugin.load())
    vector = envs.make(env_id, how.at_once, trusted=trusted)
    try:
        policy, assumed = _policy(agent, how, backend, vector.spec)
        played = rollout(
            policy,
            vector,
            episodes=how.episodes,
            seed=how.seed,
            progress=lambda done, total, _: progress(done, total),
        )
        notes = (*agent.notes, *_drift(agent, vector), *vector.notes, *_clipped(played))
    finally:
        vector.close()
    versions = {"ckpttool": __version__, "python": platform.python_version()}
    versions |= {**vector.spec.versions, **backend.versions()}
    return Evaluation(
        agent.checkpoint.path,
        env_id,
        how,
        policy.device,
        versions,
        played,
        summarise(played.returns),
        assumed,
        notes,
    )


def _environment(agent: Agent, asked: str | None) -> tuple[str, bool]:
    if asked is not None:
        return asked, True
    known = agent.known.env
    if not known or not known.get("id"):
        raise UsageError(
            "the checkpoint does not say which environment it was trained in",
            file=agent.checkpoint.path,
            hint="; ".join(("--env ID, such as --env Pendulum-v1", *agent.notes)),
        )
    # gymnasium imports the module before a colon: a file may not ask for that.
    return str(known["id"]), False


def _policy(agent: Agent, how: Protocol, backend: Backend, spec: EnvSpec) -> tuple[Policy, tuple[str, ...]]:
    part = agent.runnable(how.network)
    if part is None or not part.acts:
        policies = [p.title for p in agent.binding.parts if p.acts]
        raise UsageError(
            f"the checkpoint has no policy called {how.network}",
            file=agent.checkpoint.path,
            hint=f"it has {', '.join(policies)}" if policies else "it holds no policy at all",
        )
    wiring, assumed = wire(agent, bounds_of(agent, widths(agent.tree, part), spec))
    return backend.build(policy_network(agent.tree, part, wiring), how.device), assumed


def bounds_of(agent: Agent, sizes: tuple[int, int], spec: EnvSpec) -> Bounds:
    """Return an environment's action bounds; raise EnvironmentMismatchError if it has other sizes.

    `sizes` are the policy's numbers of observations and of actions.
    """
    obs_dim, act_dim = sizes
    if sizes != (spec.obs_dim, spec.action_dim):
        raise EnvironmentMismatchError(
            f"the policy does not fit {spec.id}",
            file=agent.checkpoint.path,
            expected=f"{spec.obs_dim} observations and {spec.action_dim} actions",
            found=f"{obs_dim} and {act_dim}",
        )
    return Bounds(spec.action_low.tolist(), spec.action_high.tolist(), f"{spec.id}'s action space")


def _drift(agent: Agent, vector: VectorEnv) -> tuple[str, ...]:
    known = agent.known.env
    if not known:
        return ()
    found = []
    if known.get("id") and known["id"] != vector.spec.id:
        found.append(f"trained in {known['id']}, played in {vector.spec.id}")
    theirs, ours = known.get("gymnasium"), vector.spec.versions.get("gymnasium")
    if theirs and theirs != ours:
        found.append(f"trained with gymnasium {theirs}, played with {ours}")
    return tuple(found)


def _clipped(played: Rollout) -> tuple[str, ...]:
    if not played.clipped:
        return ()
    return (f"{played.clipped} of {played.steps} actions were outside the bounds and were limited",)


def save(path: str, text: str) -> None:
    """Write a result's document to a new file; raise TargetExistsError if it is there already."""

    def write(stream: IO[bytes]) -> None:
        stream.write(text.encode() + b"\n")

    require_new_result(path)
    write_atomically((Output(os.fspath(path), write),))


def require_new_result(path: str) -> None:
    """Raise unless a result may be written to `path`: for asking before hours of playing."""
    require_new(path, hint="take another name")
