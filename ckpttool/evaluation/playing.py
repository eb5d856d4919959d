"""How an agent is played: its environment, wrappers, bounds and network, prepared for a rollout."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np

from ckpttool.core import plugins, sidecar
from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import (
    CkpttoolError,
    EnvironmentMismatchError,
    UnsupportedError,
    UsageError,
    abbreviate_list,
    suggest_choice,
    suggest_networks,
)
from ckpttool.core.sidecar import LedgerEntries, LedgerEntry
from ckpttool.core.text import format_count
from ckpttool.core.tree import Tree
from ckpttool.core.urls import format_command
from ckpttool.evaluation import environments, restore, wrappers
from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts
from ckpttool.evaluation.agent_networks import (
    ActionBounds,
    derive_network_settings,
    missing_options,
    one_choice,
    require_even_bounds,
    require_facts,
)
from ckpttool.evaluation.environments import ADAPTERS, POSITIONS, ZERO_FORCES
from ckpttool.evaluation.gymnasium_engine import ATARI_SIDE, OBS, EnvSpec, VectorEnv
from ckpttool.evaluation.protocol import Evaluation, EvaluationEnvironment, PlayableAgent, Protocol
from ckpttool.evaluation.restore import Agent, restore_agent
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
from ckpttool.evaluation.simulators import DEVICE_ENGINE, HINT
from ckpttool.evaluation.space_comparison import SpaceComparison
from ckpttool.evaluation.statistics import summarize
from ckpttool.evaluation.surroundings import collect_surroundings
from ckpttool.evaluation.wrappers import WrapperSpec
from ckpttool.libraries import schema, single_networks
from ckpttool.libraries.schema import NO_LAYOUT, AgentNetwork, Choices, PolicyEncoder, layer_widths
from ckpttool.mapping.rules import AxisSlice
from ckpttool.networks.build import (
    FRACTIONS,
    NetworkSettings,
    Shapes,
    deviation_path,
    fits_observations,
    own_draws,
    policy_network,
)
from ckpttool.networks.network import Backend, stack_networks
from ckpttool.version import __version__


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


# Variance that running statistics report for a constant value, because of their initial count.
_CONSTANT = 1e-6


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
    obs_dim, acts = layer_widths(agent.tree, part)
    if front is not None:
        obs_dim = sum(s.size for s in front.streams)
    inner = wrappers.inner_obs_dim(obs_dim, acts, around)
    outfit: dict[str, Any] = {
        "adapter": how.adapter or _zero_forces_adapter(agent, requested or str(known.get("id")), inner),
        # The recorded id may come from a user, who may have named another version of the task in a
        # conversion.
        "trained": known.get("id") if agent.known.is_read("env") else None,
        "wrappers": wrappers.serialize_wrappers(around),
        "wrappers_origin": library,
        "arguments": json.dumps(known["arguments"], sort_keys=True) if known.get("arguments") else "",
    }
    name = requested or known.get("id")
    # gymnasium imports the module before a colon; an id from a file must not trigger that.
    environment = EvaluationEnvironment(
        str(name or ""), trusted=requested is not None, obs_dim=obs_dim, **outfit
    )
    shown = _with_choices_of(agent, environment) if asks_environment(agent, name) else agent
    require_facts(shown, needs_env=not name)
    if not name:
        raise UsageError(
            "the checkpoint does not record its training environment",
            file=agent.checkpoint.path,
            hint=environment_hint(agent, ("eval",), inner, acts),
        )
    return environment


def asks_environment(agent: Agent, env: str | None) -> bool:
    """Return whether an environment, given or recorded, may show what no file does: discrete actions."""
    recorded = (agent.known.env or {}).get("id")
    return bool((env or recorded) and may_choose(agent) and missing_options(agent, agent.known))


def with_recorded_choices(agent: Agent) -> Agent:
    """Return the agent with the discrete actions of the environment that its files name, if it needs them."""
    if not asks_environment(agent, None):
        return agent
    return _with_choices_of(agent, EvaluationEnvironment(str((agent.known.env or {})["id"]), False, 0))


def may_choose(agent: Agent) -> bool:
    """Return whether the policy may choose discrete actions that no file lists.

    These are policies of libraries that are certainly discrete, and networks without a layout whose action
    map no file has.
    """
    known = agent.known
    unstated = known.head in (None, "") or (known.head == "identity" and known.is_read("head"))
    alone = (agent.binding.layout == NO_LAYOUT or not agent.binding.facts.head) and unstated
    return known.choices is None and (alone or known.head == "argmax")


def _with_choices_of(agent: Agent, environment: EvaluationEnvironment) -> Agent:
    """Return the agent with the environment's discrete actions; other problems are found later.

    Raise UnsupportedError for unsupported actions of the environment, EnvironmentMismatchError for others
    than the policy's.
    """
    try:
        with environment.make(1) as vector:
            return assume_choices(agent, vector.spec)
    except (UnsupportedError, EnvironmentMismatchError):
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
            if spec.choices and not agent.known.head:
                # An action map would not help: no number of outputs per action fits.
                raise EnvironmentMismatchError(
                    f"the policy's outputs do not match the discrete actions of {spec.id}",
                    file=agent.checkpoint.path,
                    expected=choices.title,
                    found=format_count(width, "output"),
                )
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
    ledger = tuple(entry for entry in agent.ledger if entry not in open_)
    return dataclasses.replace(agent, binding=binding, ledger=_add_assumption(ledger, why)), choices


def _add_assumption(ledger: LedgerEntries, why: str) -> LedgerEntries:
    more = sidecar.assumption_entries("architecture", (why,)) if why else ()
    return sidecar.merge_entries(ledger, more)


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
        ledger=_add_assumption(agent.ledger, why),
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
    ledger = tuple(entry for entry in agent.ledger if entry != schema.HALVES)
    if len(bounds) == 1:
        low, high = (list(bounds or ()) * number for bounds in (known.action_low, known.action_high))
        known = dataclasses.replace(known, action_low=low, action_high=high)
    leaves = dict(agent.tree.items())
    for name, axis in (("kernel", 1), ("bias", 0)) if doubled else ():
        path = schema.canonical_weight_path(part, len(part.layers) - 1, name)
        if path in leaves:
            leaves[path] = AxisSlice(axis, 0, number, width).leaf(leaves[path])
    if doubled:
        why = f"the last layer's first {number} of {width} outputs are the means, the others the deviations"
        ledger = _add_assumption(ledger, why)
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
    items = environments.candidate_environments(words, obs_dim or 0, action_dim, bound, discrete=discrete)
    sizes = f"{format_count(obs_dim or 0, 'observation')} and {format_count(action_dim, 'action')}"
    if not items:
        return f"--env ID, where ID is an environment with {sizes}"
    if len(items) == 1 and (hint := environments.suggest_package(items[0])) is not None:
        return hint
    options = [format_command(command[0], path, *command[1:], "--env", candidate) for candidate in items]
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


def _choose_wrappers(agent: Agent, how: Protocol) -> tuple[WrapperSpec, ...]:
    """Return the environment wrappers: as given, else as recorded in the agent's own files.

    Raise UsageError for an unknown wrapper, because its effect on the agent would be missing.
    """
    around = _listed_wrappers(agent, how)
    # A given stack has the padding of the same recorded one, which follows from the statistics.
    for recorded in restore.training_wrappers(agent.known) if how.wrappers is not None else ():
        arguments = {name: value for name, value in recorded.arguments.items() if name != "padding"}
        if recorded.title == _STACK:
            same = [wrapper.title == _STACK and wrapper.arguments == arguments for wrapper in around]
            around = tuple(recorded if stack else row for row, stack in zip(around, same, strict=True))
    for wrapper in around:
        if not wrappers.is_known_wrapper(wrapper):
            raise UsageError(
                "unknown environment wrapper",
                file=agent.checkpoint.path,
                found=wrapper.name,
                hint="use --wrapper none to play without it, if it changes neither observations nor actions"
                if how.wrappers is None
                else suggest_choice(wrapper.title, wrappers.list_wrapper_names()),
            )
        if wrapper.title in wrappers.NORMALIZERS and agent.known.obs_norm is None:
            raise UsageError(
                "a training wrapper normalises observations, but no file contains its statistics",
                file=agent.checkpoint.path,
                found=wrapper.name,
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
        once = [wrappers.with_frame_skip(wrapper, 1) for wrapper in around]
        commands = [
            format_command(
                "eval",
                agent.checkpoint.path,
                "--env",
                env,
                *(word for wrapper in chosen for word in ("--wrapper", wrappers.format_wrapper(wrapper))),
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
    named = [wrapper.name for wrapper in recorded]
    if how.wrappers is None or not named or _choose_wrappers(agent, how) == recorded:
        return ()
    return (f"environment wrappers given: {', '.join(how.wrappers)}; the files list {', '.join(named)}",)


def prepare_agent(agent: Agent, env: EvaluationEnvironment, how: Protocol, spec: EnvSpec) -> PlayableAgent:
    """Prepare the agent for an environment; raise EnvironmentMismatchError if it does not fit."""
    agent = assume_choices(agent, spec)
    part = policy_part(agent, how.network)
    front = agent.front(part.title)
    settings, assumed = derive_network_settings(agent, _fit_bounds(agent, part, front, env, spec))
    differing = SpaceComparison(agent, env, how, spec)
    differing.require_same_actions()
    require_even_bounds(agent, settings)
    sampling: Sampler | None = None
    if how.samples:
        settings, sampling = read_sampling(agent, part, settings, how)
    network = policy_network(agent.tree, part, settings, front, spec.shapes)
    more = sidecar.assumption_entries("architecture", front.assumed) if front is not None else ()
    if env.adapter is not None and how.adapter is None:
        why = f"{ADAPTERS[env.adapter]}: the observation statistics show none in training"
        more = (*more, *sidecar.assumption_entries("environment", (why,)))
    more = (*more, *sidecar.assumption_entries("environment", spec.assumed), *sampling_entries(agent, how))
    more = (*more, *_encoding_entries(agent, spec))
    own = agent.ledger
    if how.wrappers is not None:
        own = tuple(entry for entry in own if entry.what != "wrapper")
        more = (*more, *restore.wrapper_entries(wrappers.deserialize_wrappers(env.wrappers), "given"))
    if env.wrappers_origin:
        around = wrappers.deserialize_wrappers(env.wrappers)
        origin = f"default of library {env.wrappers_origin}"
        for entry in restore.wrapper_entries(around, ""):
            use = "assumed" if entry.use == "used" else entry.use
            more = (*more, dataclasses.replace(entry, use=use, origin=origin))
    entries = sidecar.drop_known_bounds(
        sidecar.merge_entries(own, assumed, more, differing.observation_entries())
    )
    if how.dtype != "float32":
        network = network.cast(how.dtype)
    trained, notes = agent.known.env or {}, [*agent.notes, *_wrapper_override_note(agent, how)]
    if trained.get("id") and trained["id"] != spec.id:
        notes.append(f"trained in {trained['id']}, played in {spec.id}")
    recorded_version, own_version = trained.get("gymnasium"), spec.versions.get("gymnasium")
    if recorded_version and own_version and recorded_version != own_version:
        notes.append(f"trained with gymnasium {recorded_version}, played with {own_version}")
    return PlayableAgent(
        agent.checkpoint.path, env, network, settings, entries, (*notes, *differing.notes()), sampling
    )


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
    if (own := own_draws(agent.tree, part, choices)) is not None:
        return dataclasses.replace(settings, output="sample"), NormalSampler(*own)
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


def play_stacked(
    entrants: tuple[PlayableAgent, ...],
    how: Protocol,
    vector: VectorEnv,
    progress: Progress = ignore_progress,
    *,
    watch: Watch | None = None,
) -> tuple[Evaluation, ...]:
    """Play agents of equal structure in one environment as a stack; return their evaluations in order.

    After Ctrl-C, agents without a finished episode are omitted. Raise UsageError if structures differ (see
    network.stack_structure).

    Args:
        entrants: the agents.
        how: the protocol: seeds, episodes, backend and device.
        vector: environments, whose rows are divided among the agents, so that each plays its episodes on the
            same seeds.
        progress: called with the episodes finished so far, all, and the steps.
        watch: called for each playing row at every step (rollout.Watch).
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
            entrant.environment.env,
            how,
            policy.device,
            versions,
            result,
            summarize(result.returns),
            entrant.ledger,
            (*entrant.notes, *vector.notes, *_list_rollout_notes(result, how)),
            stacked=len(entrants),
            surroundings=collect_surroundings(vector.spec, result.engine),
        )
        for entrant, result in zip(entrants, played, strict=True)
        if len(result.returns)
    )


def collect_versions(backend: Backend, spec: EnvSpec) -> dict[str, str]:
    """Return the versions that determine a result: ckpttool, Python, the environment and the backend."""
    versions = {"ckpttool": __version__, "python": platform.python_version()}
    return {**versions, **spec.versions, **backend.versions()}


def policy_part(agent: Agent, network: str) -> AgentNetwork:
    """Return the policy of that name; raise UsageError or UnsupportedError if there is none to play."""
    part = agent.playable(agent.title(network))
    if part is None or not part.acts:
        file = agent.checkpoint.path
        if policies := [p.title for p in agent.binding.parts if p.acts]:
            raise UsageError(
                f"no policy named {network} in the checkpoint", file=file, hint=suggest_networks(policies)
            )
        raise UnsupportedError(
            "the checkpoint contains no policy that can be played",
            file=file,
            found=abbreviate_list([p.title for p in agent.binding.parts], 4),
            hint=single_networks.conversion_hint(file),
        )
    return part


def _fit_bounds(
    agent: Agent, part: AgentNetwork, front: PolicyEncoder | None, env: EvaluationEnvironment, spec: EnvSpec
) -> ActionBounds:
    """Return the environment's action bounds; raise EnvironmentMismatchError if the policy does not fit."""
    obs_dim, act_dim = layer_widths(agent.tree, part)
    if front is None and list(spec.shapes) == [OBS]:
        return read_action_bounds(agent, (obs_dim, act_dim), spec)
    if front is None or not fits_observations(front, spec.shapes):
        shapes = front.shapes if front is not None else {OBS: (obs_dim,)}
        raise EnvironmentMismatchError(
            f"the policy's inputs do not match the observations of {spec.id}",
            file=agent.checkpoint.path,
            expected=_format_shapes(spec.shapes),
            found=_format_shapes(shapes),
            hint=_joined_inputs_hint(agent, env.env, fits=obs_dim == spec.obs_dim)
            if front is None
            else _stack_hint(spec.shapes, shapes),
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


def _stack_hint(shapes: Shapes, expected_shapes: Shapes) -> str | None:
    """Return how to play a policy of images that have several times the environment's channels."""
    inner, expected = (math.prod(shapes.get(OBS, ())) for shapes in (shapes, expected_shapes))
    number = expected // inner if inner else 0
    for axis in (-1, 0) if number > 1 and len(shapes[OBS]) == len(expected_shapes[OBS]) == 3 else ():
        stacked = [*shapes[OBS]]
        stacked[axis] *= number
        if tuple(expected_shapes[OBS]) in (tuple(stacked), (stacked[-1], *stacked[:-1])):
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
    env_choices = spec_choices(spec)
    if known is None and env_choices is None and agent.known.head != "argmax":
        return False
    if known is not None and env_choices is not None and known[:2] == env_choices[:2]:
        with suppress(ValueError):
            known.values_per_action(width)
            return True
    raise EnvironmentMismatchError(
        f"the policy's actions do not match those of {spec.id}",
        file=agent.checkpoint.path,
        expected=format_count(spec.action_dim, "continuous action")
        if env_choices is None
        else env_choices.title,
        found=known.title
        if known is not None
        else "a choice among discrete actions"
        if agent.known.head == "argmax"
        else format_count(width, "continuous action"),
        hint=_actions_hint(agent, width, known, env_choices),
    )


def _actions_hint(agent: Agent, width: int, known: Choices | None, env_choices: Choices | None) -> str | None:
    """Return what makes the actions differ: other first numbers, or a layout that only names indicate."""
    if env_choices is None or (known is not None and known.counts != env_choices.counts):
        return None
    if known is not None:
        starts = abbreviate_list([*map(str, known.starts)], 3)
        return (
            f"the policy counts its actions from {starts}: play it in an environment that takes these numbers"
        )
    with suppress(ValueError, CkpttoolError):
        env_choices.values_per_action(width)
        layout = agent.binding.layout
        if agent.known.action_low is not None or not single_networks.recognize_single_policy(
            agent.checkpoint
        ):
            return None
        if layout != NO_LAYOUT:
            return f"add --layout none if its outputs are of discrete actions ({layout} has none)"
        if agent.known.origin("head") == "given":
            return "leave out --head, which maps outputs to continuous actions"
    return None


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
    if environments.observation_arguments(spec.id, spec.obs_dim, obs_dim, positions=True):
        options.append(f"--adapter {POSITIONS} if the position")
    more = format_count(obs_dim - spec.obs_dim, "more observation")
    listed = ", ".join((*options, "--wrapper NAME if it is another wrapper's"))
    own = f"no file records what training added ({more}): {listed}"
    return f"{other}; {own}" if other else own


def _list_rollout_notes(played: Rollout, how: Protocol) -> Iterator[str]:
    if played.agreement is not None:
        yield from played.agreement.note(played.engine)
    if played.clipped:
        yield f"{played.clipped} of {played.steps} actions were outside the bounds and were clipped"
    if not len(played.seeds):
        yield f"the simulator starts episodes itself after reset({how.seed}); they have no individual seeds"
