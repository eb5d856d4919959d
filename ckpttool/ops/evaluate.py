"""`eval`: restore an agent, play it with fixed seeds, and report what was measured and what was assumed."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from typing import Any, cast

from ckpttool import ledger, plugins
from ckpttool.agents import envs
from ckpttool.agents.actions import Noise
from ckpttool.agents.components import policy_network, widths
from ckpttool.agents.encoders import Shapes, fits
from ckpttool.agents.envs import ADAPTERS, OBS, EnvSpec, Evidence, VectorEnv, WrapperSpec, drift, wrappers
from ckpttool.agents.envs.adapters import POSITIONS, ZERO_FORCES
from ckpttool.agents.envs.tensors import ENGINE as DEVICE
from ckpttool.agents.envs.tensors import HINT
from ckpttool.agents.network import Network
from ckpttool.agents.policy import Backend
from ckpttool.agents.rollout import Play, Rollout, Watch, rollouts
from ckpttool.agents.stacking import stack
from ckpttool.agents.statistics import summarise
from ckpttool.errors import CkpttoolError, EnvironmentMismatchError, UnsupportedError, UsageError, choice
from ckpttool.layouts.canonical import Part
from ckpttool.layouts.fronts import Front
from ckpttool.ledger import Entries
from ckpttool.ops import knowledge
from ckpttool.ops.agent_facts import NO_FACTS, AgentFacts
from ckpttool.ops.evaluation import Evaluation, Protocol
from ckpttool.ops.findings import command
from ckpttool.ops.fingerprint import surroundings
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.restore import Agent, restore
from ckpttool.ops.wiring import Bounds, missing_options, require_even_bounds, require_facts, wire
from ckpttool.shown import count
from ckpttool.version import __version__

# The variance of what never changed, after the first of the running statistics' counts.
_CONSTANT = 1e-6


@dataclass(frozen=True, slots=True)
class Place:
    """Where an agent plays: an environment's id, whether a person typed it, and how much the policy sees."""

    env: str
    trusted: bool
    obs_dim: int
    adapter: str | None = None
    trained: str | None = None
    """the environment that the agent's own files name"""
    wrappers: str = ""
    """as envs.wrappers.written gives them"""
    arguments: str = ""
    """what the environment is made with, as JSON"""

    @property
    def identity(self) -> str:
        """The environment with all that its files add to it: equal for equal places."""
        more = [each for each in (self.arguments, self.wrappers) if each not in ("", "[]")]
        return " ".join((self.env, *more))

    def make(
        self, num_envs: int, engine: str = "auto", *, device: str = "cpu", pictures: bool = False
    ) -> VectorEnv:
        """Return that many environments; an id from a file may not import or name anything."""
        return envs.make(
            self.env,
            num_envs,
            trusted=self.trusted,
            kwargs=json.loads(self.arguments) if self.arguments else None,
            obs_dim=self.obs_dim,
            adapter=self.adapter,
            evidence=Evidence(self.trained),
            wrappers=wrappers.read(self.wrappers),
            engine=engine,
            device=device,
            pictures=pictures,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Entrant:
    """An agent that is ready to play: its policy as a network, and what it was and was not made of.

    It holds no open file and can be pickled, so that another process may play it.
    """

    checkpoint: str
    place: Place
    network: Network
    ledger: Entries
    notes: tuple[str, ...]

    @property
    def assumed(self) -> tuple[str, ...]:
        """The sentences of what was assumed."""
        return ledger.assumptions(self.ledger)


def evaluate(
    path: str,
    env: str | None = None,
    protocol: Protocol | None = None,
    *,
    layout: str | None = None,
    facts: AgentFacts = NO_FACTS,
    progress: Progress = silent,
) -> Evaluation:
    """Restore the agent at `path` and play it in `env` (a Gymnasium id; None: the sidecar's).

    `facts` are what no file holds, such as the activations of a state_dict.
    Raise UsageError when nobody names an environment, and EnvironmentMismatchError when the policy's
    sizes are not the environment's.
    """
    how = protocol or Protocol()
    require_backend(how)
    agent = restore(path, layout, facts, how.network)
    place = place_of(agent, env, how)
    with place.make(how.at_once, how.engine, device=how.device) as vector:
        entrant = enter(agent, place, how, vector.spec)
        return play((entrant,), how, vector, progress)[0]


def require_backend(how: Protocol) -> None:
    """Raise UsageError where the backend cannot play on a device: before a simulator is started."""
    if how.engine == DEVICE and not hasattr(plugins.find("backends", how.backend).load(), "device_of"):
        raise UsageError(f"the {DEVICE} engine needs a policy on tensors", found=how.backend, hint=HINT)


def place_of(agent: Agent, asked: str | None, how: Protocol) -> Place:
    """Return where the agent plays: what was asked for, or what its own files name."""
    part = _policy_part(agent, how.network)
    known = agent.known.env or {}
    around = _wrappers(agent, how)
    front = agent.front(part.title)
    seen, acts = widths(agent.tree, part)
    if front is not None:
        seen = sum(s.size for s in front.streams)
    inner = wrappers.inner_size(seen, acts, around)
    outfit: dict[str, Any] = {
        "adapter": how.adapter or _no_forces(agent, asked or str(known.get("id")), inner),
        # A person may have named another version's task to a conversion.
        "trained": known.get("id") if agent.known.is_read("env") else None,
        "wrappers": wrappers.written(around),
        "arguments": json.dumps(known["arguments"], sort_keys=True) if known.get("arguments") else "",
    }
    place = None if asked is None else Place(asked, trusted=True, obs_dim=seen, **outfit)
    if place is not None and missing_options(agent, agent.known):
        _require_continuous(place)
    require_facts(agent, "eval", agent.checkpoint.path, "--env", asked or str(known.get("id") or "ID"))
    if place is not None:
        return place
    if not known.get("id"):
        raise UsageError(
            "the checkpoint does not say which environment it was trained in",
            file=agent.checkpoint.path,
            hint=environment_hint(agent, "eval", inner, acts),
        )
    # gymnasium imports the module before a colon: a file may not ask for that.
    return Place(str(known["id"]), trusted=False, obs_dim=seen, **outfit)


def _require_continuous(place: Place) -> None:
    """Raise UnsupportedError if no policy here has the environment's actions, whatever else is missing."""
    try:
        place.make(1).close()
    except UnsupportedError:
        raise
    except CkpttoolError:
        return


def environment_hint(agent: Agent, verb: str | None, obs_dim: int | None, action_dim: int) -> str:
    """Return the option that names the environment, as a whole command of a verb, or the candidates."""
    path = agent.checkpoint.path
    words = "/".join(path.rstrip("/").split("/")[-3:])
    found = drift.candidates(words, obs_dim or 0, action_dim)
    sizes = f"{count(obs_dim or 0, 'observation')} and {count(action_dim, 'action')}"
    if len(found) == 1:
        return f"--env {found[0]}" if verb is None else command(verb, path, "--env", found[0])
    if found:
        return f"--env ID: {sizes} are those of {' and '.join(found)}"
    return f"--env ID, an environment of {sizes}"


def _wrappers(agent: Agent, how: Protocol) -> tuple[WrapperSpec, ...]:
    """Return what wraps the environment: as given, else as the agent's own files name it.

    Raise UsageError for a wrapper that is not known: what it does to an agent would be left out.
    """
    found = knowledge.wrappers_of(agent.known)
    if how.wrappers is not None:
        found = tuple(wrappers.parsed(text) for text in how.wrappers if text != wrappers.NONE)
    for each in found:
        if not wrappers.known(each):
            raise UsageError(
                "unknown environment wrapper",
                file=agent.checkpoint.path,
                found=each.name,
                hint="--wrapper none plays without it, if it changes neither observations nor actions"
                if how.wrappers is None
                else choice(each.title, wrappers.names()),
            )
        if each.title in wrappers.NORMALIZERS and agent.known.obs_norm is None:
            raise UsageError(
                "a wrapper of training normalises observations, and no file holds its statistics",
                file=agent.checkpoint.path,
                found=each.name,
                hint="--obs-norm FILE gives the statistics, --wrapper none plays without",
            )
    return found


def _no_forces(agent: Agent, env: str, size: int | None) -> str | None:
    """Return the adapter of an agent whose statistics of observations show that contact forces were zeros."""
    at = drift.forces_at(env, size or 0)
    variances = (agent.known.obs_norm or {}).get("var", ())
    if at is None or len(variances) < at.stop:
        return None
    return ZERO_FORCES if max(variances[at]) < _CONSTANT else None


def _given_wrappers(agent: Agent, how: Protocol) -> tuple[str, ...]:
    named = [each.name for each in knowledge.wrappers_of(agent.known)]
    if how.wrappers is None or not named:
        return ()
    return (f"environment wrappers given: {', '.join(how.wrappers)}; the files name {', '.join(named)}",)


def enter(agent: Agent, place: Place, how: Protocol, spec: EnvSpec) -> Entrant:
    """Return the agent made ready for an environment; raise EnvironmentMismatchError if it does not fit."""
    part = _policy_part(agent, how.network)
    front = agent.front(part.title)
    wiring, assumed = wire(agent, _bounds(agent, part, front, spec))
    require_even_bounds(agent, wiring)
    network = policy_network(agent.tree, part, wiring, front, spec.shapes)
    more = ledger.assumed("architecture", front.assumed) if front is not None else ()
    if place.adapter is not None and how.adapter is None:
        why = f"{ADAPTERS[place.adapter]}: the observation statistics show none in training"
        more = (*more, *ledger.assumed("environment", (why,)))
    more = (*more, *ledger.assumed("environment", spec.assumed))
    own = agent.ledger
    if how.wrappers is not None:
        own = tuple(each for each in own if each.what != "wrapper")
        more = (*more, *knowledge.wrapper_entries(wrappers.read(place.wrappers), "given"))
    entries = ledger.settled(ledger.merged(own, assumed, more))
    if how.dtype != "float32":
        network = network.cast(how.dtype)
    notes = (*agent.notes, *_given_wrappers(agent, how), *_drift(agent, spec))
    return Entrant(agent.checkpoint.path, place, network, entries, notes)


def play(
    entrants: tuple[Entrant, ...],
    how: Protocol,
    vector: VectorEnv,
    progress: Progress = silent,
    *,
    watch: Watch | None = None,
) -> tuple[Evaluation, ...]:
    """Play entrants of one structure and one place, stacked, and return their evaluations in their order.

    The rows of `vector` are divided among them, so that each has its episodes on the same seeds. After
    Ctrl-C those that finished no episode are left out. Raise UsageError where structures differ (see
    agents.stacking.structure).
    """
    backend = cast(Backend, plugins.find("backends", how.backend).load())
    policy = backend.build(stack([entrant.network for entrant in entrants]), how.device)
    noise = None if how.noise is None else Noise(how.noise)
    played = rollouts(
        policy,
        vector,
        Play(how.episodes, how.seed, noise, watch=watch),
        members=len(entrants),
        progress=progress,
    )
    versions = versions_of(backend, vector.spec)
    return tuple(
        Evaluation(
            entrant.checkpoint,
            entrant.place.env,
            how,
            policy.device,
            versions,
            result,
            summarise(result.returns),
            entrant.ledger,
            (*entrant.notes, *vector.notes, *_rounded(result), *_clipped(result), *_unseeded(result, how)),
            stacked=len(entrants),
            surroundings=surroundings(vector.spec, result.engine),
        )
        for entrant, result in zip(entrants, played, strict=True)
        if len(result.returns)
    )


def versions_of(backend: Backend, spec: EnvSpec) -> dict[str, str]:
    """Return the versions of all that decides a result: ours, Python's, the environment's, the backend's."""
    ours = {"ckpttool": __version__, "python": platform.python_version()}
    return {**ours, **spec.versions, **backend.versions()}


def _policy_part(agent: Agent, network: str) -> Part:
    part = agent.playable(agent.title(network))
    if part is None or not part.acts:
        policies = [p.title for p in agent.binding.parts if p.acts]
        raise UsageError(
            f"the checkpoint has no policy called {network}",
            file=agent.checkpoint.path,
            hint=f"it has {', '.join(policies)}" if policies else "it holds no policy at all",
        )
    return part


def _bounds(agent: Agent, part: Part, front: Front | None, spec: EnvSpec) -> Bounds:
    """Return an environment's action bounds; raise EnvironmentMismatchError if the policy does not fit it."""
    obs_dim, act_dim = widths(agent.tree, part)
    if front is None and list(spec.shapes) == [OBS]:
        return bounds_of(agent, (obs_dim, act_dim), spec)
    if front is None or not fits(front, spec.shapes):
        wanted = front.shapes if front is not None else {OBS: (obs_dim,)}
        raise EnvironmentMismatchError(
            f"the policy does not take the observations of {spec.id}",
            file=agent.checkpoint.path,
            expected=_shown(spec.shapes),
            found=_shown(wanted),
        )
    return bounds_of(agent, (spec.obs_dim, act_dim), spec)


def _shown(shapes: Shapes) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())


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
            hint=_sizes_hint(spec, obs_dim, act_dim),
        )
    return Bounds(spec.action_low.tolist(), spec.action_high.tolist(), f"{spec.id}'s action space", spec.id)


def _sizes_hint(spec: EnvSpec, obs_dim: int, act_dim: int) -> str | None:
    """Return what may explain the policy's size: another task, a time feature, positions that were shown."""
    if act_dim == spec.action_dim and obs_dim > spec.obs_dim and "wrappers" not in spec.arguments:
        options = ["--wrapper TimeFeatureWrapper"] if obs_dim == spec.obs_dim + 1 else []
        if drift.with_positions(spec.id, spec.obs_dim, obs_dim):
            options.append(f"--adapter {POSITIONS}")
        if options:
            other = drift.suggestion(spec.id, obs_dim, act_dim)
            own = f"if training used it: {' or '.join(options)}"
            return f"{other}; {own}" if other else own
    return drift.suggestion(spec.id, obs_dim, act_dim)


def _drift(agent: Agent, spec: EnvSpec) -> tuple[str, ...]:
    known = agent.known.env
    if not known:
        return ()
    found = []
    if known.get("id") and known["id"] != spec.id:
        found.append(f"trained in {known['id']}, played in {spec.id}")
    theirs, ours = known.get("gymnasium"), spec.versions.get("gymnasium")
    if theirs and ours and theirs != ours:
        found.append(f"trained with gymnasium {theirs}, played with {ours}")
    return tuple(found)


def _rounded(played: Rollout) -> tuple[str, ...]:
    return () if played.agreement is None else played.agreement.note(played.engine)


def _unseeded(played: Rollout, how: Protocol) -> tuple[str, ...]:
    if len(played.seeds):
        return ()
    return (
        f"the simulator starts its episodes itself, after reset({how.seed}): they have no seeds of their own",
    )


def _clipped(played: Rollout) -> tuple[str, ...]:
    if not played.clipped:
        return ()
    return (f"{played.clipped} of {played.steps} actions were outside the bounds and were limited",)
