"""`eval`: restore an agent, play it with fixed seeds, and report what was measured and what was assumed."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import IO, cast

from ckpttool import plugins
from ckpttool.agents import envs
from ckpttool.agents.actions import Noise
from ckpttool.agents.components import policy_network, widths
from ckpttool.agents.envs import EnvSpec, VectorEnv
from ckpttool.agents.network import Network
from ckpttool.agents.policy import Backend
from ckpttool.agents.rollout import Play, Rollout, rollouts
from ckpttool.agents.statistics import summarise
from ckpttool.checkpoint import Output, require_new, write_atomically
from ckpttool.errors import EnvironmentMismatchError, UsageError
from ckpttool.layouts.canonical import Part
from ckpttool.ops.evaluation import Evaluation, Protocol
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.restore import Agent, restore
from ckpttool.ops.wiring import Bounds, wire
from ckpttool.version import __version__


@dataclass(frozen=True, slots=True)
class Place:
    """Where an agent plays: an environment's id, whether a person typed it, and how much the policy sees."""

    env: str
    trusted: bool
    obs_dim: int

    def make(self, num_envs: int, engine: str = "auto", *, pictures: bool = False) -> VectorEnv:
        """Return that many environments; an id from a file may not import or name anything."""
        return envs.make(
            self.env,
            num_envs,
            trusted=self.trusted,
            obs_dim=self.obs_dim,
            engine=engine,
            pictures=pictures,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Entrant:
    """An agent that is ready to play: its policy as a network, and what had to be assumed for it."""

    agent: Agent
    place: Place
    network: Network
    assumed: tuple[str, ...]
    notes: tuple[str, ...]


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
    place = place_of(agent, env, how)
    with place.make(how.at_once, how.engine) as vector:
        entrant = enter(agent, place, how, vector.spec)
        return play((entrant,), how, vector, progress)[0]


def place_of(agent: Agent, asked: str | None, how: Protocol) -> Place:
    """Return where the agent plays: what was asked for, or what its own files name."""
    seen, _ = widths(agent.tree, _policy_part(agent, how.network))
    if asked is not None:
        return Place(asked, trusted=True, obs_dim=seen)
    known = agent.known.env
    if not known or not known.get("id"):
        raise UsageError(
            "the checkpoint does not say which environment it was trained in",
            file=agent.checkpoint.path,
            hint="; ".join(("--env ID, such as --env Pendulum-v1", *agent.notes)),
        )
    # gymnasium imports the module before a colon: a file may not ask for that.
    return Place(str(known["id"]), trusted=False, obs_dim=seen)


def enter(agent: Agent, place: Place, how: Protocol, spec: EnvSpec) -> Entrant:
    """Return the agent made ready for an environment; raise EnvironmentMismatchError if it does not fit."""
    part = _policy_part(agent, how.network)
    wiring, assumed = wire(agent, bounds_of(agent, widths(agent.tree, part), spec))
    network = policy_network(agent.tree, part, wiring)
    if how.dtype != "float32":
        network = network.cast(how.dtype)
    return Entrant(agent, place, network, assumed, (*agent.notes, *_drift(agent, spec)))


def play(
    entrants: tuple[Entrant, ...], how: Protocol, vector: VectorEnv, progress: Progress = silent
) -> tuple[Evaluation, ...]:
    """Play the one entrant in all rows of `vector`, and return its evaluation."""
    (entrant,) = entrants
    backend = cast(Backend, plugins.find("backends", how.backend).load())
    policy = backend.build(entrant.network, how.device)
    noise = None if how.noise is None else Noise(how.noise)
    played = rollouts(
        policy,
        vector,
        Play(how.episodes, how.seed, noise),
        progress=lambda done, total, _: progress(done, total),
    )
    versions = {"ckpttool": __version__, "python": platform.python_version()}
    versions |= {**vector.spec.versions, **backend.versions()}
    return tuple(
        Evaluation(
            entrant.agent.checkpoint.path,
            entrant.place.env,
            how,
            policy.device,
            versions,
            result,
            summarise(result.returns),
            entrant.assumed,
            (*entrant.notes, *vector.notes, *_clipped(result)),
        )
        for entrant, result in zip(entrants, played, strict=True)
    )


def _policy_part(agent: Agent, network: str) -> Part:
    part = agent.runnable(network)
    if part is None or not part.acts:
        policies = [p.title for p in agent.binding.parts if p.acts]
        raise UsageError(
            f"the checkpoint has no policy called {network}",
            file=agent.checkpoint.path,
            hint=f"it has {', '.join(policies)}" if policies else "it holds no policy at all",
        )
    return part


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


def _drift(agent: Agent, spec: EnvSpec) -> tuple[str, ...]:
    known = agent.known.env
    if not known:
        return ()
    found = []
    if known.get("id") and known["id"] != spec.id:
        found.append(f"trained in {known['id']}, played in {spec.id}")
    theirs, ours = known.get("gymnasium"), spec.versions.get("gymnasium")
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
