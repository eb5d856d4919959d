"""Evaluate an agent in its environment."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import platform
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, cast, get_args

import numpy as np

from ckpttool.commands import restore
from ckpttool.commands.evidence import NO_FACTS, AgentFacts
from ckpttool.commands.folder import expand_paths
from ckpttool.commands.network_outputs import (
    ActionBounds,
    derive_network_settings,
    missing_options,
    one_choice,
    require_even_bounds,
    require_facts,
)
from ckpttool.commands.restore import Agent, restore_agent
from ckpttool.core import plugins, sidecar, urls
from ckpttool.core.atomic_write import (
    Output,
    Progress,
    ignore_progress,
    require_new,
    write_atomically,
    write_file,
)
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import (
    CkpttoolError,
    EnvironmentMismatchError,
    UnsupportedError,
    UsageError,
    abbreviate_list,
    suggest_choice,
)
from ckpttool.core.sidecar import LedgerEntries, LedgerEntry, Sidecar
from ckpttool.core.text import clean, describe_record, format_count, shorten
from ckpttool.core.tree import Tree
from ckpttool.core.tree_views import render_record
from ckpttool.core.urls import format_command
from ckpttool.evaluation import environments, video, wrappers
from ckpttool.evaluation.environments import ADAPTERS, POSITIONS, ZERO_FORCES
from ckpttool.evaluation.gymnasium_engine import ATARI_SIDE, OBS, EnvSpec, VectorEnv
from ckpttool.evaluation.rollout import (
    ActionSampler,
    ExplorationNoise,
    NormalSampler,
    Rollout,
    RolloutSpec,
    Sampler,
    Watch,
    rollouts,
)
from ckpttool.evaluation.simulators import DEVICE_ENGINE, HINT, is_factory
from ckpttool.evaluation.statistics import (
    SOURCE,
    Judgement,
    ReturnStatistics,
    find_reference_scores,
    judge_return,
    summarize,
)
from ckpttool.evaluation.video import Camera, CutError, StripCamera, StripFrame
from ckpttool.evaluation.wrappers import Bounds, WrapperSpec
from ckpttool.libraries import schema, single_networks
from ckpttool.libraries.schema import NO_LAYOUT, AgentNetwork, Choices, PolicyEncoder
from ckpttool.mapping.rules import AxisSlice
from ckpttool.networks.build import (
    FRACTIONS,
    NetworkSettings,
    Shapes,
    deviation_path,
    fits_observations,
    layer_widths,
    policy_network,
)
from ckpttool.networks.network import Backend, Dtype, Network, stack_networks
from ckpttool.version import __version__

# The environment of a result, and a hash by which two environments are compared.


def collect_surroundings(spec: EnvSpec, engine: str) -> dict[str, Any]:
    """Return the facts that decide the effect of an action: task, limits, simulator, versions and machine.

    Numbers are text, so that infinite bounds are the same in every document.
    """
    bounds = {"low": spec.action_low, "high": spec.action_high}
    return {
        "id": spec.id,
        "arguments": dict(spec.arguments),
        "max_episode_steps": spec.max_episode_steps,
        "observation": [[name, list(shape), dtype] for name, shape, dtype in spec.observation],
        "action": {name: [str(value) for value in bound.tolist()] for name, bound in bounds.items()},
        "engine": engine,
        "versions": {**spec.versions, "numpy": _numpy_version()},
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


@functools.cache
def _numpy_version() -> str:
    # Cached: the lookup among installed packages would be repeated for every evaluation of a sweep.
    return importlib.metadata.version("numpy")


def hash_surroundings(facts: Mapping[str, Any]) -> str:
    """Return the sha256 of these facts: equal for results measured in the same surroundings."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


# Definition of an evaluation: how agents are played, and the results.

_AT_ONCE = 16


def parse_float_type(name: str) -> Dtype:
    """Return the policy dtype with this name; raise UsageError for an unknown one."""
    if name not in get_args(Dtype):
        known = get_args(Dtype)
        expected, hint = " or ".join(known), suggest_choice(name, known)
        raise UsageError("unsupported policy dtype", expected=expected, found=name, hint=hint)
    return cast(Dtype, name)


@dataclass(frozen=True, slots=True)
class Protocol:
    """How to play: episode i is reset with `seed + i`; the policy always receives `num_envs` observations.

    `num_envs` None means one environment per episode, up to 16. `engine` selects the simulator engine.
    `noise` is the standard deviation of exploration noise, in units of half the action range; None for
    the deterministic policy. `stochastic` draws actions as training did, by the policy's probabilities or
    its standard deviation; with the probability `epsilon` those of a Q-network are uniform. `adapter` is
    one of environments.ADAPTERS; None chooses by the policy's size. `wrappers` are the environment wrappers
    of training, e.g. `TimeLimit:max_episode_steps=100`, innermost first; None for those listed in the
    agent's own files.
    """

    episodes: int = 10
    seed: int = 1000
    num_envs: int | None = None
    device: str = "cpu"
    backend: str = "numpy"
    network: str = "actor"
    dtype: Dtype = "float32"
    engine: str = "auto"
    noise: float | None = None
    adapter: str | None = None
    wrappers: tuple[str, ...] | None = None
    stochastic: bool = False
    epsilon: float | None = None

    def __post_init__(self) -> None:
        """Convert the wrappers to a tuple, because JSON documents contain a list.

        Raise UsageError for an invalid `epsilon`, and for two ways to draw actions.
        """
        if self.wrappers is not None:
            object.__setattr__(self, "wrappers", tuple(self.wrappers))
        if self.epsilon is not None and not 0 <= self.epsilon <= 1:
            raise UsageError(f"invalid epsilon: {self.epsilon:g}", hint="use a probability from 0 to 1")
        drawn = {
            "noise": self.noise is not None,
            "stochastic": self.stochastic,
            "epsilon": self.epsilon is not None,
        }
        if sum(drawn.values()) > 1:
            names = " and ".join(f"--{name}" for name, used in drawn.items() if used)
            raise UsageError(f"{names} exclude each other")

    @property
    def samples(self) -> bool:
        """Whether actions are drawn from the policy's own distribution, or uniformly."""
        return self.stochastic or self.epsilon is not None

    @property
    def at_once(self) -> int:
        """The number of environments that are stepped together."""
        return self.num_envs or min(self.episodes, _AT_ONCE)


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """Which agents to restore and how to play them; shared by `evaluate`, `sweep` and videos.

    `env` is a Gymnasium id, None for the one in the agent's own files. `layout` None means the
    recognised layout. `facts` are facts that no file contains, e.g. the activations of a state_dict.
    """

    env: str | None = None
    protocol: Protocol = Protocol()
    layout: str | None = None
    facts: AgentFacts = NO_FACTS

    def restore(self, path: str) -> Agent:
        """Restore the agent at `path`, with the network selected by the protocol."""
        agent = restore_agent(path, self.layout, self.facts, self.protocol.network)
        return repeat_statistics(agent, self.protocol)

    def environment(self, agent: Agent) -> EvaluationEnvironment:
        """Return the environment to play in; raise UsageError if none is given or recorded."""
        return choose_environment(agent, self.env, self.protocol)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of one checkpoint; `versions` and `device` are those used to compute it.

    `stacked` is the number of checkpoints whose actions were computed together, 1 for a single
    checkpoint.
    """

    __repr__ = describe_record
    _repr_html_ = render_record

    checkpoint: str
    env: str
    protocol: Protocol
    device: str
    versions: dict[str, str]
    rollout: Rollout
    statistics: ReturnStatistics
    ledger: LedgerEntries
    notes: tuple[str, ...]
    stacked: int = 1
    surroundings: Mapping[str, Any] = field(default_factory=dict)
    """description of the environment (see `collect_surroundings`)"""

    @property
    def assumed(self) -> tuple[str, ...]:
        """The assumptions, as sentences."""
        return sidecar.assumption_sentences(self.ledger)

    @property
    def normalized(self) -> float | None:
        """The mean as a normalised score, None without reference scores for the environment."""
        known = find_reference_scores(self.env)
        return None if known is None else known.normalized(self.statistics.mean)

    @property
    def judgement(self) -> Judgement | None:
        """The comparison with random and good policies, None without references for the environment."""
        threshold = environments.find_reward_threshold(self.env)
        return judge_return(self.env, self.statistics, self.surroundings, threshold)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        played, result = self.rollout, self.statistics
        judged = self.judgement
        return {
            "checkpoint": urls.display_url(self.checkpoint),
            "env": self.env,
            "versions": self.versions,
            "environment": dict(self.surroundings),
            "fingerprint": hash_surroundings(self.surroundings),
            "protocol": {
                "episodes": played.episodes,
                "seeds": played.seeds.tolist(),
                "num_envs": played.num_envs,
                "stacked": self.stacked,
                "deterministic": self.protocol.noise is None and not self.protocol.samples,
                "noise": self.protocol.noise,
                "stochastic": self.protocol.stochastic,
                "epsilon": self.protocol.epsilon,
                "device": self.device,
                "backend": self.protocol.backend,
                "engine": played.engine,
                "adapter": self.protocol.adapter,
                "wrappers": None if self.protocol.wrappers is None else list(self.protocol.wrappers),
                "network": self.protocol.network,
                "dtype": self.protocol.dtype,
            },
            "agreement": None if played.agreement is None else played.agreement.document(),
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
            "interval_over": "episodes",
            "normalized": self._normalized(),
            "judgement": None if judged is None else judged.document(),
            "steps": played.steps,
            "seconds": played.seconds,
            "steps_per_s": played.steps_per_s,
            "clipped_actions": played.clipped,
            "interrupted": played.interrupted,
            "assumed": list(self.assumed),
            "ledger": sidecar.entries_to_json(self.ledger),
            "notes": list(self.notes),
        }

    def _normalized(self) -> dict[str, Any] | None:
        known = find_reference_scores(self.env)
        if known is None:
            return None
        return {
            "mean": self.normalized,
            "random": known.random,
            "expert": known.expert,
            "measured_in": known.env,
            "source": SOURCE,
        }


# `eval`: restore an agent, play it with fixed seeds, and report results and assumptions.

# Variance that running statistics report for a constant value, because of their initial count.
_CONSTANT = 1e-6


@dataclass(frozen=True, slots=True)
class EvaluationEnvironment:
    """Environment of an agent: its id, whether a person typed it, and the policy's observation size."""

    env: str
    trusted: bool
    obs_dim: int
    adapter: str | None = None
    trained: str | None = None
    """the environment recorded in the agent's own files"""
    wrappers: str = ""
    """in the form of wrappers.serialize_wrappers"""
    wrappers_origin: str = ""
    """the library whose preprocessing of Atari games is assumed, because nothing states wrappers"""
    arguments: str = ""
    """arguments that create the environment, as JSON"""

    @property
    def identity(self) -> str:
        """The environment id with the arguments and wrappers: equal for equal environments."""
        more = [each for each in (self.arguments, self.wrappers) if each not in ("", "[]")]
        return " ".join((self.env, *more))

    def make(
        self, num_envs: int, engine: str = "auto", *, device: str = "cpu", pictures: bool = False
    ) -> VectorEnv:
        """Create `num_envs` environments; an id from a file must not import a module."""
        options = environments.VectorEnvOptions(
            trusted=self.trusted,
            kwargs=json.loads(self.arguments) if self.arguments else None,
            obs_dim=self.obs_dim,
            adapter=self.adapter,
            trained=self.trained,
            wrappers=wrappers.deserialize_wrappers(self.wrappers),
            engine=engine,
            device=device,
            pictures=pictures,
        )
        return environments.make_vector_env(self.env, num_envs, options)


@dataclass(frozen=True, slots=True, eq=False)
class PlayableAgent:
    """An agent ready to play: its policy network and settings, and the ledger of what was and was not used.

    It holds no open file and can be pickled, so that another process can play it.
    """

    checkpoint: str
    place: EvaluationEnvironment
    network: Network
    settings: NetworkSettings
    ledger: LedgerEntries
    notes: tuple[str, ...]
    sampling: Sampler | None = None
    """how the network's scores become actions, or its noise is drawn; None if it needs neither"""

    @property
    def assumed(self) -> tuple[str, ...]:
        """The assumptions, as sentences."""
        return sidecar.assumption_sentences(self.ledger)


def evaluate(
    path: str,
    env: str | None = None,
    protocol: Protocol | None = None,
    *,
    layout: str | None = None,
    facts: AgentFacts = NO_FACTS,
    progress: Progress = ignore_progress,
) -> Evaluation:
    """Restore the agent at `path` and play it in `env` (a Gymnasium id; None: the sidecar's).

    `facts` are facts that no file contains, e.g. the activations of a state_dict. Raise UsageError if
    no environment is given or recorded, and EnvironmentMismatchError if the policy's sizes do not match
    the environment's.
    """
    how = protocol or Protocol()
    options = EvaluationOptions(env, how, layout, facts)
    require_backend(how)
    agent = options.restore(path)
    place = options.environment(agent)
    with place.make(how.at_once, how.engine, device=how.device) as vector:
        entrant = prepare_agent(agent, place, how, vector.spec)
        return play_stacked((entrant,), how, vector, progress)[0]


def require_backend(how: Protocol) -> None:
    """Raise UsageError if the backend cannot play on a device, before a simulator is started."""
    if how.engine == DEVICE_ENGINE and not hasattr(plugins.find("backends", how.backend).load(), "device_of"):
        raise UsageError(
            f"the {DEVICE_ENGINE} engine requires a backend that works on device tensors",
            found=how.backend,
            hint=HINT,
        )


def choose_environment(agent: Agent, requested: str | None, how: Protocol) -> EvaluationEnvironment:
    """Return the environment to play in: the requested one, or the one in the agent's own files."""
    part = policy_part(agent, how.network)
    known = agent.known.env or {}
    around = _choose_wrappers(agent, how)
    front = agent.front(part.title)
    library = ""
    if how.wrappers is None and not around and front is not None:
        around = _assume_preprocessing(agent, front, str(requested or known.get("id") or ""))
        library = agent.binding.layout if around else ""
    seen, acts = layer_widths(agent.tree, part)
    if front is not None:
        seen = sum(s.size for s in front.streams)
    inner = wrappers.inner_obs_dim(seen, acts, around)
    outfit: dict[str, Any] = {
        "adapter": how.adapter or _zero_forces_adapter(agent, requested or str(known.get("id")), inner),
        # The recorded id may come from a user, who may have named another version of the task in a
        # conversion.
        "trained": known.get("id") if agent.known.is_read("env") else None,
        "wrappers": wrappers.serialize_wrappers(around),
        "wrappers_origin": library,
        "arguments": json.dumps(known["arguments"], sort_keys=True) if known.get("arguments") else "",
    }
    place = (
        None if requested is None else EvaluationEnvironment(requested, trusted=True, obs_dim=seen, **outfit)
    )
    if place is not None and may_choose(agent) and missing_options(agent, agent.known):
        agent = _with_choices_of(agent, place)
    require_facts(agent, needs_env=not (requested or known.get("id")))
    if place is not None:
        return place
    if not known.get("id"):
        raise UsageError(
            "the checkpoint does not record its training environment",
            file=agent.checkpoint.path,
            hint=environment_hint(agent, ("eval",), inner, acts),
        )
    # gymnasium imports the module before a colon; an id from a file must not trigger that.
    return EvaluationEnvironment(str(known["id"]), trusted=False, obs_dim=seen, **outfit)


def may_choose(agent: Agent) -> bool:
    """Return whether the policy may choose discrete actions that no file lists.

    These are policies of libraries that are certainly discrete, and networks without a layout whose action
    map no file has.
    """
    known = agent.known
    unstated = known.head in (None, "") or (known.head == "identity" and known.is_read("head"))
    alone = (agent.binding.layout == NO_LAYOUT or not agent.binding.facts.head) and unstated
    return known.choices is None and (alone or known.head == "argmax")


def _with_choices_of(agent: Agent, place: EvaluationEnvironment) -> Agent:
    """Return the agent with the environment's discrete actions; other problems are found later.

    Raise UnsupportedError for unsupported actions of the environment.
    """
    try:
        with place.make(1) as vector:
            return assume_choices(agent, vector.spec)
    except UnsupportedError:
        raise
    except CkpttoolError:
        return agent


def assume_choices(agent: Agent, spec: EnvSpec | None) -> Agent:
    """Return a policy that may choose as one that takes its largest output for the environment's action.

    That is assumed where the outputs are as many as the environment's discrete actions. Without an
    environment (None) it is assumed only of a policy that is certainly discrete. Of a last
    layer that may have the deviations too, the means are taken if it has twice as many outputs as actions.
    """
    agent = _settle_atoms(take_means(agent, *count_actions(agent, spec)), spec)
    if not may_choose(agent) or (spec is None and agent.known.head != "argmax"):
        return agent
    choices, origin = one_choice(agent)
    (width,) = choices.counts
    if spec is not None:
        choices = spec_choices(spec) or choices
        origin = f"{spec.id} has {choices.title} actions"
        settled = (
            _settle_scores(agent, choices, width, count_actions(agent, spec)[0]) if spec.choices else None
        )
        if settled is None:
            return agent
        agent, choices = settled
    origins = dict.fromkeys(("choices", "head"), f"assumed: {origin}")
    known = dataclasses.replace(
        agent.known,
        choices=choices.document(),
        head="argmax",
        provenance={**agent.known.provenance, **origins},
    )
    return dataclasses.replace(agent, known=known)


def _settle_scores(agent: Agent, choices: Choices, width: int, number: int) -> tuple[Agent, Choices] | None:
    """Return agent and choices with what a `number` of actions shows of the outputs; None if none fits."""
    lacks, why = agent.binding.facts.lacks, ""
    if width == number + 1 and schema.DUELING in lacks and choices.single:
        choices = choices._replace(scores="value_first")
        why = (
            "a dueling network of type avg: the outputs are a state's value, then advantages, less their mean"
        )
    elif width != number:
        if width % number or schema.QUANTILES not in lacks or not choices.single:
            return None
        choices = choices._replace(scores="quantiles_last")
        why = f"the outputs are {width // number} quantiles of each action's value, whose mean counts"
    open_ = (schema.DUELING, schema.QUANTILES)
    binding = dataclasses.replace(agent.binding, facts=agent.binding.facts.without_lack(*open_))
    ledger = tuple(each for each in agent.ledger if each not in open_)
    more = sidecar.assumption_entries("architecture", (why,)) if why else ()
    merged = sidecar.merge_entries(ledger, more)
    return dataclasses.replace(agent, binding=binding, ledger=merged), choices


def _settle_atoms(agent: Agent, spec: EnvSpec | None) -> Agent:
    """Return the agent with its atoms, if the environment or a file shows how many actions share its outputs.

    Raise EnvironmentMismatchError for an environment that does not fit.
    """
    ends, part = agent.binding.facts.atom_range, agent.binding.policy
    choices = schema.known_choices(agent.known) if spec is None else spec_choices(spec)
    if ends is None or part is None or choices is None or not choices.single or choices.support:
        return agent
    width, (actions,) = layer_widths(agent.tree, part)[1], choices.counts
    number, rest = divmod(width, actions)
    if rest or number < 2:  # one atom is no distribution
        raise EnvironmentMismatchError(
            "the network's outputs are not atoms of these actions",
            file=agent.checkpoint.path,
            expected=f"actions that share {width} outputs",
            found=choices.title,
        )
    support = tuple(np.linspace(*ends, number).tolist())
    why = (
        f"{number} atoms of each action with values from {ends[0]:g} to {ends[1]:g}, the library's defaults: "
        "no file contains them, and the best action does not depend on them"
    )
    facts = agent.binding.facts._replace(atom_range=None)
    known = dataclasses.replace(
        agent.known,
        choices=choices._replace(scores="atoms", support=support).document(),
        head="argmax",
        provenance={
            **agent.known.provenance,
            **({} if spec is None else {"choices": f"assumed: {spec.id} has {choices.title} actions"}),
        },
    )
    return dataclasses.replace(
        agent,
        binding=dataclasses.replace(agent.binding, facts=facts),
        known=known,
        ledger=sidecar.merge_entries(agent.ledger, sidecar.assumption_entries("architecture", (why,))),
    )


def count_actions(agent: Agent, spec: EnvSpec | None) -> tuple[int, bool]:
    """Return the number of actions that the environment, or else bounds, show (0: none), and if discrete."""
    if spec is None:
        bounds = agent.known.action_low or []
        return (len(bounds) if len(bounds) != 1 else 0), False
    if spec.choices:
        return (len(spec.choices) if spec.binary else sum(count for count, _ in spec.choices)), True
    return spec.action_dim, False


def take_means(agent: Agent, number: int, discrete: bool = False) -> Agent:
    """Return the agent with the outputs of an open last layer that are so many actions, or their means."""
    part, known = agent.binding.policy, agent.known
    if part is None or schema.HALVES not in agent.binding.facts.lacks:
        return agent
    width, bounds = layer_widths(agent.tree, part)[1], known.action_low or []
    doubled = width == 2 * number and not discrete
    if not doubled and width != number:
        return agent
    facts = agent.binding.facts.without_lack(schema.HALVES)
    ledger = tuple(each for each in agent.ledger if each != schema.HALVES)
    if len(bounds) == 1:
        low, high = (list(each or ()) * number for each in (known.action_low, known.action_high))
        known = dataclasses.replace(known, action_low=low, action_high=high)
    leaves = dict(agent.tree.items())
    for name, axis in (("kernel", 1), ("bias", 0)) if doubled else ():
        path = schema.canonical_weight_path(part, len(part.layers) - 1, name)
        if path in leaves:
            leaves[path] = AxisSlice(axis, 0, number, width).leaf(leaves[path])
    if doubled:
        why = f"the last layer's first {number} of {width} outputs are the means, the others the deviations"
        ledger = sidecar.merge_entries(ledger, sidecar.assumption_entries("architecture", (why,)))
    binding = dataclasses.replace(agent.binding, facts=facts)
    return dataclasses.replace(agent, binding=binding, known=known, tree=Tree(leaves), ledger=ledger)


def spec_choices(spec: EnvSpec) -> Choices | None:
    """Return the environment's discrete actions, None for continuous ones."""
    if not spec.choices:
        return None
    if spec.binary:
        return schema.make_binary_choices(len(spec.choices))
    counts, starts = zip(*spec.choices, strict=True)
    return Choices(counts, starts, single=len(counts) == 1)


def environment_hint(agent: Agent, command: Sequence[str], obs_dim: int | None, action_dim: int) -> str:
    """Return the command, of these words around the checkpoint, for each environment that fits."""
    path = agent.checkpoint.path
    words = "/".join(path.rstrip("/").split("/")[-3:])
    known = agent.known
    bound = max(known.action_high) if known.action_high and known.is_read("action_high") else None
    choices = schema.known_choices(known)
    discrete = known.head == "argmax" and (choices is None or choices.single)
    if choices is not None:  # an action may have several outputs: quantiles or atoms
        action_dim = sum(choices.counts)
    found = environments.candidate_environments(words, obs_dim or 0, action_dim, bound, discrete=discrete)
    sizes = f"{format_count(obs_dim or 0, 'observation')} and {format_count(action_dim, 'action')}"
    if not found:
        return f"--env ID, where ID is an environment with {sizes}"
    options = [format_command(command[0], path, *command[1:], "--env", each) for each in found]
    return options[0] if len(options) == 1 else f"{sizes} match: {', or '.join(options)}"


def _listed_wrappers(agent: Agent, how: Protocol) -> tuple[WrapperSpec, ...]:
    """Return the environment wrappers as given, else as recorded in the agent's own files."""
    if how.wrappers is None:
        return restore.training_wrappers(agent.known)
    return tuple(wrappers.parse_wrapper(text) for text in how.wrappers if text != wrappers.NONE)


# The stack of Stable-Baselines3, which may be around VecNormalize.
_STACK = "VecFrameStack"


def repeat_statistics(agent: Agent, how: Protocol) -> Agent:
    """Return the agent with given statistics of one observation repeated for those that it stacks.

    Their size shows that training normalised before it stacked.
    """
    norm, part = agent.known.obs_norm, agent.playable(agent.title(how.network))
    around = _listed_wrappers(agent, how)
    if norm is None or part is None or not around or around[-1].title != _STACK:
        return agent
    *inner, stack = around
    count, size = stack.arguments.get("n_stack"), len(norm["mean"])
    if type(count) is not int or count < 2 or size * count != layer_widths(agent.tree, part)[0]:
        return agent
    padded = WrapperSpec(stack.name, {"padding": list(norm["mean"]), **stack.arguments})
    listed = [{"name": spec.name, "arguments": dict(spec.arguments)} for spec in (*inner, padded)]
    repeated = {**norm, **{name: list(norm[name]) * count for name in ("mean", "var")}}
    env = {**(agent.known.env or {}), "wrappers": listed}
    return dataclasses.replace(agent, known=dataclasses.replace(agent.known, obs_norm=repeated, env=env))


def _with_padding(wrapper: WrapperSpec, known: Sidecar) -> WrapperSpec:
    """Return a given stack with the padding of the same recorded one, which follows from the statistics."""
    for recorded in restore.training_wrappers(known) if wrapper.title == _STACK else ():
        arguments = {name: value for name, value in recorded.arguments.items() if name != "padding"}
        if recorded.title == _STACK and arguments == wrapper.arguments:
            return recorded
    return wrapper


def _choose_wrappers(agent: Agent, how: Protocol) -> tuple[WrapperSpec, ...]:
    """Return the environment wrappers: as given, else as recorded in the agent's own files.

    Raise UsageError for an unknown wrapper, because its effect on the agent would be missing.
    """
    around = _listed_wrappers(agent, how)
    if how.wrappers is not None:
        around = tuple(_with_padding(wrapper, agent.known) for wrapper in around)
    for each in around:
        if not wrappers.is_known_wrapper(each):
            raise UsageError(
                "unknown environment wrapper",
                file=agent.checkpoint.path,
                found=each.name,
                hint="use --wrapper none to play without it, if it changes neither observations nor actions"
                if how.wrappers is None
                else suggest_choice(each.title, wrappers.list_wrapper_names()),
            )
        if each.title in wrappers.NORMALIZERS and agent.known.obs_norm is None:
            raise UsageError(
                "a training wrapper normalises observations, but no file contains its statistics",
                file=agent.checkpoint.path,
                found=each.name,
                hint=(
                    "use --obs-norm FILE to supply the statistics, or --wrapper none to play "
                    "without the wrapper"
                ),
            )
    return around


def _assume_preprocessing(agent: Agent, front: PolicyEncoder, env: str) -> tuple[WrapperSpec, ...]:
    """Return the library's preprocessing of an Atari game for a policy of stacked images; () for others.

    Raise UsageError for a game that skips frames itself: whether training skipped in both is in no file.
    """
    (stream, *others) = front.streams
    chain = wrappers.ATARI_PREPROCESSING.get(agent.binding.layout)
    images = stream.image and not others and stream.shape[1:] == (ATARI_SIDE, ATARI_SIDE)
    frames = environments.find_game_frame_skip(env) if chain is not None and images and env else None
    if chain is None or frames is None:
        return ()
    around = tuple(wrappers.parse_wrapper(text.format(frames=stream.shape[0])) for text in chain)
    if frames != 1:
        once = [wrappers.with_frame_skip(each, 1) for each in around]
        commands = [
            format_command(
                "eval",
                agent.checkpoint.path,
                "--env",
                env,
                *(word for each in chosen for word in ("--wrapper", wrappers.format_wrapper(each))),
            )
            for chosen in (once, around)
        ]
        raise UsageError(
            f"no file states how training preprocessed {env}, which repeats each action itself",
            file=agent.checkpoint.path,
            expected="a NoFrameskip game, or --wrapper",
            hint=f"{commands[0]}, or, if its wrappers repeated actions too: {commands[1]}",
        )
    return around


def _zero_forces_adapter(agent: Agent, env: str, size: int | None) -> str | None:
    """Return the zero-forces adapter if the observation statistics show constant contact forces."""
    at = environments.contact_force_slice(env, size or 0)
    variances = (agent.known.obs_norm or {}).get("var", ())
    if at is None or len(variances) < at.stop:
        return None
    return ZERO_FORCES if max(variances[at]) < _CONSTANT else None


def _wrapper_override_note(agent: Agent, how: Protocol) -> tuple[str, ...]:
    recorded = restore.training_wrappers(agent.known)
    named = [each.name for each in recorded]
    if how.wrappers is None or not named or _choose_wrappers(agent, how) == recorded:
        return ()
    return (f"environment wrappers given: {', '.join(how.wrappers)}; the files list {', '.join(named)}",)


def prepare_agent(agent: Agent, place: EvaluationEnvironment, how: Protocol, spec: EnvSpec) -> PlayableAgent:
    """Prepare the agent for an environment; raise EnvironmentMismatchError if it does not fit."""
    agent = assume_choices(agent, spec)
    part = policy_part(agent, how.network)
    front = agent.front(part.title)
    settings, assumed = derive_network_settings(agent, _fit_bounds(agent, part, front, place, spec))
    differing = SpaceComparison(agent, place, how, spec)
    differing.require_same_actions()
    require_even_bounds(agent, settings)
    sampling: Sampler | None = None
    if how.samples:
        settings, sampling = read_sampling(agent, part, settings, how)
    network = policy_network(agent.tree, part, settings, front, spec.shapes)
    more = sidecar.assumption_entries("architecture", front.assumed) if front is not None else ()
    if place.adapter is not None and how.adapter is None:
        why = f"{ADAPTERS[place.adapter]}: the observation statistics show none in training"
        more = (*more, *sidecar.assumption_entries("environment", (why,)))
    more = (*more, *sidecar.assumption_entries("environment", spec.assumed), *sampling_entries(agent, how))
    more = (*more, *_encoding_entries(agent, spec))
    own = agent.ledger
    if how.wrappers is not None:
        own = tuple(each for each in own if each.what != "wrapper")
        more = (*more, *restore.wrapper_entries(wrappers.deserialize_wrappers(place.wrappers), "given"))
    if place.wrappers_origin:
        around = wrappers.deserialize_wrappers(place.wrappers)
        origin = f"default of library {place.wrappers_origin}"
        for each in restore.wrapper_entries(around, ""):
            use = "assumed" if each.use == "used" else each.use
            more = (*more, dataclasses.replace(each, use=use, origin=origin))
    entries = sidecar.drop_known_bounds(
        sidecar.merge_entries(own, assumed, more, differing.observation_entries())
    )
    if how.dtype != "float32":
        network = network.cast(how.dtype)
    drift = _environment_drift_notes(agent, spec)
    notes = (*agent.notes, *_wrapper_override_note(agent, how), *drift, *differing.notes())
    return PlayableAgent(agent.checkpoint.path, place, network, settings, entries, notes, sampling)


def read_sampling(
    agent: Agent, part: AgentNetwork, settings: NetworkSettings, how: Protocol
) -> tuple[NetworkSettings, Sampler]:
    """Return the settings of the network whose actions are drawn, and how; raise UnsupportedError if none is.

    How a library draws actions is a fact of its table (`AgentMetadata.distribution`), which conversions keep.
    """
    file, choices = agent.checkpoint.path, settings.choices
    drawn = schema.known_distribution(agent.known, agent.binding.facts)
    if how.epsilon is not None:
        if choices is None:
            raise UnsupportedError(
                "epsilon is for discrete actions, and the policy's are continuous",
                file=file,
                hint="--noise STD adds Gaussian noise",
            )
        if not part.chooses:
            raise UnsupportedError(
                "epsilon is for Q-networks, and the policy is an actor",
                file=file,
                hint="--stochastic draws the actions of an actor by its probabilities",
            )
        return settings.scores, ActionSampler(choices.counts, choices.starts, how.epsilon)
    if choices is not None and choices.scores == "drawn_fractions":
        return dataclasses.replace(settings, output="sample"), NormalSampler(FRACTIONS, uniform=True)
    if part.chooses:
        raise UnsupportedError(
            "a Q-network has no probabilities of actions",
            file=file,
            hint="--epsilon E plays a uniform action with probability E",
        )
    if choices is None and deviation_path(agent.tree, part) is None and not part.branches:
        raise UnsupportedError(
            "the policy is deterministic: the file contains no standard deviation of its actions",
            file=file,
            hint="--noise STD adds Gaussian noise",
        )
    if drawn is not None and drawn.kind == "gsde":
        raise UnsupportedError("noise that depends on the state (gSDE) is not drawn", file=file)
    if drawn is None or (drawn.kind == "categorical") != (choices is not None):
        raise UnsupportedError(
            "no file states how training drew actions from the policy's outputs",
            file=file,
            found=f"layout {agent.binding.layout}",
        )
    if choices is not None:
        return settings.scores, ActionSampler(choices.counts, choices.starts)
    width = layer_widths(agent.tree, part)[1]
    return dataclasses.replace(settings, output="sample", distribution=drawn), NormalSampler(width)


def _encoding_entries(agent: Agent, spec: EnvSpec) -> Iterator[LedgerEntry]:
    """Yield an entry for each discrete observation whose encoding no file records."""
    known = agent.binding.facts.one_hot
    for name, space in spec.encoded.items():
        if name not in known or known[name] != spec.one_hot.get(name):
            value = f"{name} of {spec.id} as a row of numbers, with discrete values one-hot"
            yield LedgerEntry("assumed", "environment", value, origin=space)


def sampling_entries(agent: Agent, how: Protocol) -> Iterator[LedgerEntry]:
    """Yield an entry for what is assumed about drawn actions."""
    drawn = schema.known_distribution(agent.known, agent.binding.facts)
    if how.stochastic and drawn is not None and drawn.assumed:
        yield LedgerEntry("assumed", "action map", drawn.assumed)
    choices = schema.known_choices(agent.known)
    if how.stochastic and choices is not None and choices.scores == "drawn_fractions":
        value = f"{FRACTIONS} fractions are drawn for each action: sample_size, which no file contains"
        yield LedgerEntry("assumed", "action map", value)


# Two bounds are equal within float32 rounding.
_ROUNDED, _NEAR_ZERO = 1e-5, 1e-6


class SpaceComparison:
    """The stored action and observation bounds that contradict those of the environment.

    They mean that training used a wrapper which is not played, or another version of the task. That
    `--wrapper none` is given states that training used no wrapper.

    Sources: stable_baselines3/common/utils.py, check_for_correct_spaces (which refuses other spaces);
    gymnasium/wrappers/{transform_action,transform_observation,stateful_observation}.py.
    """

    def __init__(self, agent: Agent, place: EvaluationEnvironment, how: Protocol, spec: EnvSpec) -> None:
        self.agent, self.place, self.how, self.spec = agent, place, how, spec
        self._own = spec.action_low, spec.action_high
        self._stored = self._contradicting_actions()
        known = agent.known
        trained = known.env.get("id") if known.env and known.is_read("env") else None
        # Whether the user or the files explain other bounds: without wrappers, or in another version or
        # library of the task.
        self._no_wrapper = how.wrappers is not None and all(each == wrappers.NONE for each in how.wrappers)
        library = (known.observation_space or {}).get("library")
        self._explained = self._no_wrapper or library == "gym" or trained not in (None, spec.id)

    def _contradicting_actions(self) -> Bounds | None:
        """Return the stored action bounds if they contradict the environment's."""
        known = self.agent.known
        low, high = known.action_low, known.action_high
        origin = known.origin("action_low")
        if low is None or high is None or not known.is_read("action_low"):
            return None
        stored = (np.asarray(low), np.asarray(high))
        if _are_close(stored, self._own) or origin.endswith(sidecar.OUTPUT_RANGE):
            return None
        # Programs that scale by one number take the first upper bound (Spinning Up, TD3).
        one = "action_space" not in origin and np.all(stored[1] == high[0]) and np.all(stored[0] == -high[0])
        return None if one and np.isclose(high[0], self._own[1][0], _ROUNDED, _NEAR_ZERO) else stored

    def _observations(self) -> Iterator[tuple[str, Bounds, Bounds]]:
        """Yield each input whose stored bounds contradict the environment's: its name, stored, own."""
        known = self.agent.known
        if not known.is_read("observation_space"):
            return
        for name, ends in schema.observation_bounds(known.observation_space).items():
            own, sizes = self.spec.observation_bounds.get(name), {*map(len, ends)}
            # The axes of images may have another order: only one bound for all values can be compared.
            if own is None or not sizes <= {1, own[0].size if own[0].ndim == 1 else 1}:
                continue
            low, high = (_to_infinite(bound.reshape(-1)) for bound in own)
            stored = np.array(ends[0]), np.array(ends[1])
            # Statistics in use explain unbounded observations: NormalizeObservation's space has no bounds.
            explained = known.obs_norm is not None and bool(
                np.isinf(stored[0]).all() and np.isinf(stored[1]).all()
            )
            if not explained and not _are_close(stored, (low, high)):
                yield name, stored, (low, high)

    def require_same_actions(self) -> None:
        """Raise EnvironmentMismatchError if the stored action bounds contradict the environment's."""
        stored = self._stored
        if stored is None or self._no_wrapper:
            return
        wrapper = WrapperSpec(
            "RescaleAction", {"min_action": _short(stored[0]), "max_action": _short(stored[1])}
        )
        possible = np.isfinite(self._own).all() and self.how.engine != DEVICE_ENGINE
        raise EnvironmentMismatchError(
            f"the action bounds of {self.spec.id} are not those of training",
            file=self.agent.checkpoint.path,
            expected=_format_range(self._own),
            found=f"{_format_range(stored)} ({self.agent.known.origin('action_low')})",
            hint=self._hint(wrapper) if possible else _NO_WRAPPER,
        )

    def observation_entries(self) -> Iterator[LedgerEntry]:
        """Yield an entry for each input whose stored bounds no wrapper explains.

        Raise EnvironmentMismatchError if RescaleObservation explains them.
        """
        if self._explained:
            return
        origin = self.agent.known.origin("observation_space")
        for name, stored, own in self._observations():
            low, high = _short(stored[0]), _short(stored[1])
            rescaled = self._hint(WrapperSpec("RescaleObservation", {"min_obs": low, "max_obs": high}))
            finite = np.isfinite([*stored[0], *stored[1], *own[0], *own[1]]).all()
            if finite and len(stored[0]) == len(stored[1]) == 1 and list(self.spec.shapes) == [OBS]:
                raise EnvironmentMismatchError(
                    f"the observation bounds of {self.spec.id} are not those of training",
                    file=self.agent.checkpoint.path,
                    expected=_format_range(own),
                    found=f"{_format_range(stored)} ({origin})",
                    hint=rescaled,
                )
            cause = "RescaleObservation" if finite else "NormalizeObservation"
            value = (
                f"why {name} had bounds {_format_range(stored)} in training, and has {_format_range(own)} in "
                f"{self.spec.id}: a wrapper ({cause}), or another version of the task"
            )
            first = rescaled if finite else "--obs-norm FILE (the wrapper's statistics)"
            hint = f"{first}; {_NO_WRAPPER}"
            yield LedgerEntry("cannot be known", "wrapper", value, origin, decides=True, hint=hint)

    def notes(self) -> Iterator[str]:
        """Yield a sentence for each contradiction that the user or the files explain."""
        if self._stored is not None:
            own = _format_range(self._own)
            yield f"action bounds {_format_range(self._stored)} as stored; those of {self.spec.id} are {own}"
        if self._explained:
            for name, bounds, other in self._observations():
                ranges = f"{_format_range(bounds)} in training, {_format_range(other)} in {self.spec.id}"
                yield f"bounds of {name}: {ranges}"

    def _hint(self, wrapper: WrapperSpec) -> str:
        """Return the command that plays inside one more wrapper; its option alone beside given statistics."""
        around = (*wrappers.deserialize_wrappers(self.place.wrappers), wrapper)
        options = [word for outer in around for word in ("--wrapper", wrappers.format_wrapper(outer))]
        known = self.agent.known
        if known.is_given("obs_norm"):  # from a file whose name is not recorded
            return shlex.join(("add", *options))
        if known.is_given("activations"):
            options += ["--activation", ",".join(known.activations or ())]
        if known.is_given("head"):
            options += ["--head", str(known.head)]
        if known.is_given("action_low"):
            ends = (known.action_low or (), known.action_high or ())
            options += ["--bounds", *(",".join(f"{number:g}" for number in end) for end in ends)]
        if self.how.network != "actor":
            options += ["--network", self.how.network]
        if self.how.adapter is not None:
            options += ["--adapter", self.how.adapter]
        return format_command("eval", self.agent.checkpoint.path, "--env", self.place.env, *options)


_NO_WRAPPER = "--wrapper none if training used no wrapper"


def _to_infinite(bound: np.ndarray) -> np.ndarray:
    wide = np.asarray(bound, np.float64)
    return np.where(np.abs(wide) < schema.INFINITE, wide, np.copysign(np.inf, wide))


def _are_close(ones: Bounds, others: Bounds) -> bool:
    return all(np.allclose(a, b, _ROUNDED, _NEAR_ZERO) for a, b in zip(ones, others, strict=True))


def _short(bound: np.ndarray) -> float | list[float]:
    """Return one number if all are equal, as short as float32 permits."""
    row = [
        int(value) if value.is_integer() else value for value in (float(f"{n:.7g}") for n in bound.tolist())
    ]
    return row[0] if len(set(row)) == 1 else row


def _format_range(bounds: Bounds) -> str:
    ends = (each[:1] if len(set(each.tolist())) == 1 else each for each in bounds)
    return " to ".join(restore.format_numbers([f"{number:g}" for number in each]) for each in ends)


def play_stacked(
    entrants: tuple[PlayableAgent, ...],
    how: Protocol,
    vector: VectorEnv,
    progress: Progress = ignore_progress,
    *,
    watch: Watch | None = None,
) -> tuple[Evaluation, ...]:
    """Play agents of equal structure in one environment as a stack; return their evaluations in order.

    The rows of `vector` are divided among them, so that each plays its episodes on the same seeds.
    After Ctrl-C, agents without a finished episode are omitted. Raise UsageError if structures differ
    (see network.stack_structure).
    """
    backend = cast(Backend, plugins.find("backends", how.backend).load())
    policy = backend.build(stack_networks([entrant.network for entrant in entrants]), how.device)
    noise = None if how.noise is None else ExplorationNoise(how.noise)
    played = rollouts(
        policy,
        vector,
        RolloutSpec(how.episodes, how.seed, noise, entrants[0].sampling, watch=watch),
        members=len(entrants),
        progress=progress,
    )
    versions = collect_versions(backend, vector.spec)
    return tuple(
        Evaluation(
            entrant.checkpoint,
            entrant.place.env,
            how,
            policy.device,
            versions,
            result,
            summarize(result.returns),
            entrant.ledger,
            (
                *entrant.notes,
                *vector.notes,
                *_agreement_note(result),
                *_clipping_note(result),
                *_seeding_note(result, how),
            ),
            stacked=len(entrants),
            surroundings=collect_surroundings(vector.spec, result.engine),
        )
        for entrant, result in zip(entrants, played, strict=True)
        if len(result.returns)
    )


def collect_versions(backend: Backend, spec: EnvSpec) -> dict[str, str]:
    """Return the versions that determine a result: ckpttool, Python, the environment and the backend."""
    ours = {"ckpttool": __version__, "python": platform.python_version()}
    return {**ours, **spec.versions, **backend.versions()}


def policy_part(agent: Agent, network: str) -> AgentNetwork:
    """Return the policy of that name; raise UsageError or UnsupportedError if there is none to play."""
    part = agent.playable(agent.title(network))
    if part is None or not part.acts:
        file = agent.checkpoint.path
        if policies := [p.title for p in agent.binding.parts if p.acts]:
            hint = " or ".join(f"--network {each}" for each in policies)
            raise UsageError(f"no policy named {network} in the checkpoint", file=file, hint=hint)
        raise UnsupportedError(
            "the checkpoint contains no policy with continuous actions, which eval plays",
            file=file,
            found=abbreviate_list([p.title for p in agent.binding.parts], 4),
            hint=single_networks.conversion_hint(file),
        )
    return part


def _fit_bounds(
    agent: Agent, part: AgentNetwork, front: PolicyEncoder | None, place: EvaluationEnvironment, spec: EnvSpec
) -> ActionBounds:
    """Return the environment's action bounds; raise EnvironmentMismatchError if the policy does not fit."""
    obs_dim, act_dim = layer_widths(agent.tree, part)
    if front is None and list(spec.shapes) == [OBS]:
        return read_action_bounds(agent, (obs_dim, act_dim), spec)
    if front is None or not fits_observations(front, spec.shapes):
        wanted = front.shapes if front is not None else {OBS: (obs_dim,)}
        raise EnvironmentMismatchError(
            f"the policy's inputs do not match the observations of {spec.id}",
            file=agent.checkpoint.path,
            expected=_format_shapes(spec.shapes),
            found=_format_shapes(wanted),
            hint=_joined_inputs_hint(agent, place.env, fits=obs_dim == spec.obs_dim)
            if front is None
            else _stack_hint(spec.shapes, wanted),
        )
    return read_action_bounds(agent, (spec.obs_dim, act_dim), spec)


def _joined_inputs_hint(agent: Agent, env: str, *, fits: bool) -> str:
    """Return how to play a policy of several inputs: from the file that records how they are joined.

    `fits` is whether all inputs together have the size of the policy's row.
    """
    source = (agent.sidecar.source or {}).get("path") if agent.sidecar is not None else None
    beside = os.path.join(os.path.dirname(agent.checkpoint.path), str(source))
    if source and os.path.isfile(beside):
        return format_command("eval", beside, "--env", env)
    if fits:
        return f"add --wrapper {wrappers.FLATTENING} if training joined the inputs to one row in this order"
    joined = "this file does not record how several inputs are joined to one"
    return f"{joined}; play the checkpoint that it was converted from" if source else joined


def _stack_hint(seen: Shapes, wanted: Shapes) -> str | None:
    """Return how to play a policy of images that have several times the environment's channels."""
    ours, theirs = (math.prod(shapes.get(OBS, ())) for shapes in (seen, wanted))
    number = theirs // ours if ours else 0
    for axis in (-1, 0) if number > 1 and len(seen[OBS]) == len(wanted[OBS]) == 3 else ():
        stacked = [*seen[OBS]]
        stacked[axis] *= number
        if tuple(wanted[OBS]) in (tuple(stacked), (stacked[-1], *stacked[:-1])):
            return f"add --wrapper VecFrameStack:n_stack={number} if the images are stacks of {number}"
    return None


def _format_shapes(shapes: Shapes) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())


def read_action_bounds(agent: Agent, sizes: tuple[int, int], spec: EnvSpec) -> ActionBounds:
    """Return the environment's action bounds; raise EnvironmentMismatchError if its sizes differ.

    `sizes` are the policy's numbers of observations and actions.
    """
    obs_dim, act_dim = sizes
    discrete = _require_same_choices(agent, act_dim, spec)
    if discrete:
        act_dim = spec.action_dim
    actions = format_count(spec.action_dim, "action")
    if (obs_dim, act_dim) != (spec.obs_dim, spec.action_dim):
        raise EnvironmentMismatchError(
            f"the policy does not fit {spec.id}",
            file=agent.checkpoint.path,
            expected=f"{format_count(spec.obs_dim, 'observation')} and {actions}",
            found=f"{obs_dim} and {act_dim}",
            hint=None if discrete else _sizes_hint(agent, spec, obs_dim, act_dim),
        )
    return ActionBounds(spec.action_low.tolist(), spec.action_high.tolist(), f"{spec.id}'s action space")


def _require_same_choices(agent: Agent, width: int, spec: EnvSpec) -> bool:
    """Return whether the actions are discrete; raise EnvironmentMismatchError if only one side's are.

    The same error is raised for other numbers of values, other first values, or a policy whose last layer
    has a `width` that does not match them.
    """
    known = schema.known_choices(agent.known)
    theirs = spec_choices(spec)
    if known is None and theirs is None and agent.known.head != "argmax":
        return False
    if known is not None and theirs is not None and known[:2] == theirs[:2]:
        with suppress(ValueError):
            known.values_per_action(width)
            return True
    raise EnvironmentMismatchError(
        f"the policy's actions do not match those of {spec.id}",
        file=agent.checkpoint.path,
        expected=format_count(spec.action_dim, "continuous action") if theirs is None else theirs.title,
        found=known.title
        if known is not None
        else "a choice among discrete actions"
        if agent.known.head == "argmax"
        else format_count(width, "continuous action"),
        hint=_first_actions_hint(known, theirs),
    )


def _first_actions_hint(known: Choices | None, theirs: Choices | None) -> str | None:
    """Return what makes the actions of a policy and of its environment differ, if these count differently."""
    if known is None or theirs is None or known.counts != theirs.counts:
        return None
    return (
        f"the policy counts its actions from {abbreviate_list([*map(str, known.starts)], 3)}: play it in an "
        "environment that takes these numbers"
    )


def _sizes_hint(agent: Agent, spec: EnvSpec, obs_dim: int, act_dim: int) -> str | None:
    """Return possible reasons for the policy's size: another task, or values that training added."""
    other = environments.suggest_tasks(spec.id, obs_dim, act_dim)
    if act_dim != spec.action_dim or obs_dim <= spec.obs_dim or "wrappers" in spec.arguments:
        return other
    times = "--wrapper TimeFeatureWrapper or --wrapper TimeAwareObservation if it is the time"
    options = [times] if obs_dim == spec.obs_dim + 1 else []
    if (number := obs_dim // spec.obs_dim) * spec.obs_dim == obs_dim:
        stacks = [f"--wrapper VecFrameStack:n_stack={number}"]
        if len((agent.known.obs_norm or {}).get("mean", ())) != spec.obs_dim:  # else stacked outside of them
            stacks.append(f"--wrapper FrameStackObservation:stack_size={number}")
        options.append(f"{' or '.join(stacks)} if they are {number} observations")
    if environments.positions_explain_size(spec.id, spec.obs_dim, obs_dim):
        options.append(f"--adapter {POSITIONS} if the position")
    more = format_count(obs_dim - spec.obs_dim, "more observation")
    listed = ", ".join((*options, "--wrapper NAME if it is another wrapper's"))
    own = f"no file records what training added ({more}): {listed}"
    return f"{other}; {own}" if other else own


def _environment_drift_notes(agent: Agent, spec: EnvSpec) -> tuple[str, ...]:
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


def _agreement_note(played: Rollout) -> tuple[str, ...]:
    return () if played.agreement is None else played.agreement.note(played.engine)


def _seeding_note(played: Rollout, how: Protocol) -> tuple[str, ...]:
    if len(played.seeds):
        return ()
    return (f"the simulator starts episodes itself after reset({how.seed}); they have no individual seeds",)


def _clipping_note(played: Rollout) -> tuple[str, ...]:
    if not played.clipped:
        return ()
    return (f"{played.clipped} of {played.steps} actions were outside the bounds and were clipped",)


# Videos of scored episodes: the same episodes replayed and rendered, into an atomically written file.

WORDS = ("best", "worst", "median")
_FPS = 30.0  # if the environment specifies no frame rate


@dataclass(frozen=True, slots=True)
class VideoEpisode:
    """One recorded episode: the words that selected it, its return and steps, and the scored return.

    `equal` is true if return and steps equal the scored ones, bit for bit.
    """

    episode: int
    wanted: tuple[str, ...]
    paid: float
    steps: int
    scored: float
    equal: bool

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "episode": self.episode,
            "wanted": list(self.wanted),
            "return": self.paid,
            "length": self.steps,
            "scored": self.scored,
            "equal": self.equal,
        }


@dataclass(frozen=True, slots=True)
class EpisodeVideo:
    """A video of consecutive episodes, with one frame before the first step and one after each step."""

    file: str
    checkpoint: str
    fps: float
    width: int
    height: int
    takes: tuple[VideoEpisode, ...]

    @property
    def frames(self) -> int:
        """The number of rendered frames."""
        return sum(take.steps + 1 for take in self.takes)

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "file": self.file,
            "checkpoint": urls.display_url(self.checkpoint),
            "fps": self.fps,
            "width": self.width,
            "height": self.height,
            "frames": self.frames,
            "episodes": [take.document() for take in self.takes],
        }


@dataclass(frozen=True, slots=True)
class EpisodeStrip:
    """A film strip: a row of images per episode, evenly spread over it; `steps` are those of its images."""

    file: str
    checkpoint: str
    takes: tuple[VideoEpisode, ...]
    steps: tuple[tuple[int, ...], ...]

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "file": self.file,
            "checkpoint": urls.display_url(self.checkpoint),
            "episodes": [
                {**take.document(), "steps": list(steps)}
                for take, steps in zip(self.takes, self.steps, strict=True)
            ],
        }


def require_video_support(
    paths: Sequence[str], options: EvaluationOptions, target: str, wanted: Sequence[str] = ("0",)
) -> None:
    """Raise an error unless one of these checkpoints can be recorded; call it before hours of playing.

    `wanted` are episode numbers, or best, worst and median. Raise UsageError for any other word and for
    a file name without a video format, TargetExistsError for an existing file, MissingExtraError and
    UnsupportedError if frames cannot be rendered or encoded; one frame is rendered as a test.
    Checkpoints that cannot be played are not reported here.
    """
    if _suffix(target) not in video.ENCODINGS:
        raise UsageError(
            "cannot infer the video format from the file name",
            file=target,
            hint=f"use a file name that ends in {' or '.join(video.ENCODINGS)}",
        )
    _require_recording(paths, options, target, wanted, video.require_encoder)


def require_strip_support(
    paths: Sequence[str], options: EvaluationOptions, target: str, wanted: Sequence[str]
) -> None:
    """Raise an error unless one of these checkpoints can be drawn as a film strip.

    See `require_video_support`.
    """
    if _suffix(target) != ".png":
        raise UsageError("a film strip is a PNG image", file=target, hint="use a file name that ends in .png")
    _require_recording(paths, options, target, wanted, video.require_pillow)


def _require_recording(
    paths: Sequence[str],
    options: EvaluationOptions,
    target: str,
    wanted: Sequence[str],
    require_library: Callable[[], None],
) -> None:
    """Raise an error for an existing file, unknown episodes, or if frames cannot be rendered."""
    require_new(target, hint="take another name")
    require_library()
    for word in wanted:
        _require_episode(word, options.protocol.episodes)
    _require_gymnasium(options)
    for entry in expand_paths(paths):
        with suppress(CkpttoolError):
            place = options.environment(options.restore(entry.path))
            break
    else:
        return
    with place.make(1, "gymnasium", pictures=True) as trial:
        trial.reset(np.arange(1), np.array([options.protocol.seed]))
        trial.frame(0)


def record_video(
    scored: Evaluation,
    target: str,
    wanted: Sequence[str] = ("0",),
    *,
    options: EvaluationOptions,
    width: int | None = None,
    progress: Progress = ignore_progress,
) -> EpisodeVideo:
    """Replay a scored evaluation and write the `wanted` episodes, in their order, to a new file.

    `options` are those of the evaluation; `width` is that of the images, by default the environment's. The
    policy receives the same batches, so that every step is repeated bit for bit, which VideoEpisode.equal
    records. A score that was computed differently (several checkpoints stacked) may not be repeated
    exactly. Raise as `require_video_support` does, and KeyboardInterrupt on Ctrl-C; in that case no file is
    written.
    """
    chosen = _choose_episodes(wanted, scored.rollout)
    total = sum(int(scored.rollout.lengths[number]) + 1 for number in chosen)
    takes: list[VideoEpisode] = []
    with _Replay(scored, target, options) as replay:
        fps, done, size = replay.vector.spec.render_fps or _FPS, itertools.count(1), (0, 0)

        def write(stream: IO[bytes]) -> None:
            with video.write_video(stream.name, _suffix(target), fps, small=width is not None) as show:

                def counted(picture: np.ndarray) -> None:
                    nonlocal size
                    show(picture)
                    size = (picture.shape[1], picture.shape[0])
                    progress(next(done), total)

                for number, words in chosen.items():
                    title = ", ".join((f"episode {number}", *words))
                    camera = Camera(replay.vector, number, title, counted, width)
                    takes.append(replay.take(camera, number, words))

        write_atomically((Output(target, write),))
    return EpisodeVideo(target, scored.checkpoint, fps, *size, tuple(takes))


STRIP_WIDTH = 240
"""Width of one image of a film strip, in pixels."""


def record_strip(
    scored: Evaluation,
    target: str,
    wanted: Sequence[str] = ("best", "worst"),
    *,
    options: EvaluationOptions,
    frames: int = 8,
    theme: str = "light",
    progress: Progress = ignore_progress,
) -> EpisodeStrip:
    """Replay a scored evaluation and write a film strip of the `wanted` episodes to a new PNG file.

    Each row has `frames` images from the first to the last step. See `record_video` for the rest.
    """
    chosen = _choose_episodes(wanted, scored.rollout)
    takes: list[VideoEpisode] = []
    rows: list[tuple[str, list[StripFrame]]] = []
    with _Replay(scored, target, options) as replay:
        for number, words in chosen.items():
            steps = np.linspace(0, int(scored.rollout.lengths[number]), frames).round().astype(int)
            camera = StripCamera(replay.vector, number, steps.tolist(), STRIP_WIDTH)
            takes.append(replay.take(camera, number, words))
            rows.append((_strip_heading(takes[-1]), camera.taken))
            progress(len(rows), len(chosen))
        fps = replay.vector.spec.render_fps
    title = f"{shorten(clean(os.path.basename(scored.checkpoint)), 60)} in {clean(scored.env)}"
    write_file(target, video.render_strip(title, rows, fps, theme))
    pictured = tuple(tuple(frame.step for frame in taken) for _, taken in rows)
    return EpisodeStrip(target, scored.checkpoint, tuple(takes), pictured)


def _strip_heading(take: VideoEpisode) -> str:
    words = f"{' and '.join(take.wanted)}: " if take.wanted else ""
    return f"{words}episode {take.episode}, return {take.paid:,.1f} in {format_count(take.steps, 'step')}"


def _require_gymnasium(options: EvaluationOptions) -> None:
    if options.protocol.engine == DEVICE_ENGINE and options.env is not None and is_factory(options.env):
        raise UsageError(
            f"the simulator {options.env} cannot be recorded on video",
            hint="--video supports only Gymnasium environments",
        )


def _require_episode(word: str, episodes: int) -> None:
    if word in WORDS:
        return
    if not word.isascii() or not word.isdigit():
        raise UsageError(f"unknown episode {word!r}", hint=f"use a number from 0, or {', '.join(WORDS)}")
    if int(word) >= episodes:
        raise UsageError(
            f"episode {word} does not exist", hint=f"{episodes} episodes are played: 0 to {episodes - 1}"
        )


def _suffix(target: str) -> str:
    return os.path.splitext(target)[1].lower()


def _choose_episodes(wanted: Sequence[str], played: Rollout) -> dict[int, tuple[str, ...]]:
    """Return the episode numbers in the requested order, each once, with the words that selected it."""
    ranked = np.argsort(played.returns, kind="stable")
    named = {
        "best": int(np.argmax(played.returns)),
        "worst": int(ranked[0]),
        "median": int(ranked[(len(ranked) - 1) // 2]),
    }
    chosen: dict[int, tuple[str, ...]] = {}
    for word in wanted:
        number = named[word] if word in named else int(word)
        words = (word,) if word in named else ()
        chosen[number] = (*chosen.get(number, ()), *words)
    return chosen


class _Replay:
    """Rendering environments in which a scored evaluation is replayed; closed by `with`."""

    def __init__(self, scored: Evaluation, target: str, options: EvaluationOptions) -> None:
        require_new(target, hint="take another name")
        options = dataclasses.replace(options, protocol=scored.protocol)
        _require_gymnasium(options)
        agent = options.restore(scored.checkpoint)
        place = options.environment(agent)
        self._scored = scored
        self.vector = place.make(scored.protocol.at_once, "gymnasium", pictures=True)
        try:
            self._player = prepare_agent(agent, place, scored.protocol, self.vector.spec)
        except BaseException:
            self.vector.close()
            raise

    def __enter__(self) -> _Replay:
        return self

    def __exit__(self, *_: object) -> None:
        self.vector.close()

    def take(self, camera: Camera | StripCamera, number: int, words: tuple[str, ...]) -> VideoEpisode:
        """Replay one episode; each needs its own replay, because parallel episodes would be interleaved."""
        how, played = self._scored.protocol, self._scored.rollout
        try:
            play_stacked((self._player,), how, self.vector, watch=camera)
        except CutError:
            steps, score = camera.frames - 1, float(played.returns[number])
            equal = camera.paid == score and steps == played.lengths[number]
            return VideoEpisode(number, words, camera.paid, steps, score, bool(equal))
        # Only Ctrl-C ends a replay before its last episode ends.
        raise KeyboardInterrupt
