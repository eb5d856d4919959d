"""Networks of an agent: facts that they need, their settings, pairs of networks of two agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ckpttool.core import plugins
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import EnvironmentMismatchError, MappingError, UnsupportedError, UsageError
from ckpttool.core.kinds import ACTIVATIONS
from ckpttool.core.sidecar import LedgerEntries, LedgerEntry, Sidecar, assumption_sentences
from ckpttool.core.source import keep_open
from ckpttool.core.text import format_count
from ckpttool.core.urls import format_command
from ckpttool.evaluation import restore
from ckpttool.evaluation.restore import FACTS, Agent, merge_metadata, policy_sizes
from ckpttool.libraries import layer_connections, schema
from ckpttool.libraries.schema import (
    NO_LAYOUT,
    VALUES,
    AgentNetwork,
    Choices,
    PolicyEncoder,
    known_choices,
    layer_widths,
)
from ckpttool.networks.build import HEADS, NetworkSettings, policy_network, q_network, value_network
from ckpttool.networks.network import Network


@dataclass(frozen=True, slots=True)
class ActionBounds:
    """Action bounds per dimension and their origin ("Pendulum-v1's action space").

    Without an origin they are placeholders that do not affect the network, and are not reported.
    """

    low: Sequence[float]
    high: Sequence[float]
    origin: str | None


def missing_options(agent: Agent, known: Sidecar) -> tuple[str, ...]:
    """Return the options for missing facts that the policy requires."""
    facts = agent.binding.facts
    hidden, _ = policy_sizes(agent.binding, agent.tree)
    activations = known.activations or facts.activations or facts.hidden
    options = ("--activation",) if hidden and not activations else ()
    return options if known.head or facts.head else (*options, "--head")


def require_facts(agent: Agent, *, needs_env: bool = False, other: Agent | None = None) -> None:
    """Raise UsageError with the possible values if no file contains the activations or the action map.

    `needs_env` is whether the command lacks an environment as well. Raise UnsupportedError for a fact that
    a file states in a form that is not understood, unless a value is given for it.
    """
    known = agent.known if other is None else _complete_metadata(agent, other)
    restore.require_understood(agent.binding, known, agent.checkpoint.path)
    missing = missing_options(agent, known)
    if schema.HALVES in agent.binding.facts.lacks and not missing:
        raise UsageError(
            "needs --env: the last layer may output the actions, or their means and deviations",
            file=agent.checkpoint.path,
            hint="add --env ID, or --bounds with a number for each action",
        )
    if not missing:
        return
    options = ["--env"] * needs_env + [*missing]
    unknown = " and ".join(_LACKED[option] for option in missing)
    unused = layer_connections.unused_graph_sentences(agent.binding)
    raise UsageError(
        "; ".join((f"needs {_join_words(options)}: no file records {unknown}", *unused)),
        file=agent.checkpoint.path,
        hint=f"add {_join_words([_POSSIBLE[option] for option in options])}, as the training program has it",
    )


def _join_words(words: Sequence[str]) -> str:
    return " and ".join((", ".join(words[:-1]), words[-1]) if len(words) > 1 else words)


_LACKED = {"--activation": "the activations", "--head": "the action map"}
_POSSIBLE = {
    "--env": "--env ID",
    "--activation": f"--activation NAME ({', '.join(ACTIVATIONS)})",
    "--head": f"--head NAME ({', '.join(HEADS)})",
}


def _require_scaled(agent: Agent, known: Sidecar, bounds: ActionBounds) -> None:
    """Raise UsageError if a model ends in tanh, but actions exceed that range."""
    read = known.is_read("head")
    low = bounds.low if known.action_low is None else known.action_low
    high = bounds.high if known.action_high is None else known.action_high
    if known.head == "unit_tanh" and read and not (np.all(np.equal(low, -1)) and np.all(np.equal(high, 1))):
        raise UsageError(
            "needs --head: the model ends in tanh, and no file records whether its program scales the "
            "actions",
            file=agent.checkpoint.path,
            expected="bounds -1 to 1",
            found=f"bounds {_format_bounds(low)} to {_format_bounds(high)}",
            hint="add --head affine if the program scales the actions to the bounds, --head unit_tanh if not",
        )


def require_even_bounds(agent: Agent, settings: NetworkSettings) -> None:
    """Raise UsageError for tanh times one number, a layout's default, between bounds of several sizes.

    No program has such bounds and this map: some bounds would be unreachable, others exceeded.
    """
    low, high = settings.action_low, settings.action_high
    assumed = agent.known.is_assumed("head")
    even = all(np.isclose(value, high[0]) for value in high) and all(np.isclose(v, -high[0]) for v in low)
    if settings.head != "tanh" or even or not assumed:
        return
    raise UsageError(
        "needs --head: tanh times one number, the layout's default, cannot produce these action bounds",
        file=agent.checkpoint.path,
        found=f"bounds {_format_bounds(low)} to {_format_bounds(high)}",
        hint="add --head affine if the program maps tanh to the bounds, --head tanh if it multiplies tanh by "
        "the first upper bound",
    )


def one_choice(agent: Agent) -> tuple[Choices, str]:
    """Return one choice among as many actions as the policy has outputs, and why that is assumed."""
    width = layer_widths(agent.tree, agent.binding.policy or agent.binding.parts[0])[1]
    return Choices((width,), (0,)), f"a discrete policy with {format_count(width, 'output')}"


def derive_network_settings(
    agent: Agent, bounds: ActionBounds, other: Agent | None = None
) -> tuple[NetworkSettings, LedgerEntries]:
    """Return the settings and a ledger entry for each assumption.

    The agent's sidecar or files decide; where they record nothing, `other` decides (the same agent
    in another form); then the layout's default, and `bounds` for the actions.
    """
    require_facts(agent, other=other)
    known = agent.known if other is None else _complete_metadata(agent, other)
    facts = agent.binding.facts
    recorded = known_choices(known)
    if facts.atom_range is not None and (recorded is None or recorded.scores != "atoms"):
        width = layer_widths(agent.tree, agent.binding.policy or agent.binding.parts[0])[1]
        raise UnsupportedError(
            "a categorical DQN: no file contains how many atoms each action has",
            file=agent.checkpoint.path,
            found=f"{width} outputs",
            hint="--env ID, where ID is the environment: its number of actions shows it",
        )
    sidecars = [side.sidecar for side in (agent, other) if side is not None]
    assumed = list(restore.assumed_entries(agent.binding, known, *sidecars))
    epsilon = known.norm_epsilon(agent.binding.norm_kind, facts.epsilon)
    low, high = known.action_low, known.action_high
    choices = known_choices(known)
    if other is not None:
        _require_one_meaning(agent, other)
    if choices is None and known.head == "argmax":
        # The scores of one choice and those of several are the same outputs.
        choices, origin = one_choice(agent)
        assumed.append(LedgerEntry("assumed", "discrete actions", choices.title, origin=origin))
    if choices is not None:
        low, high = (), ()
    elif low is None or high is None:
        low, high = bounds.low, bounds.high
        if bounds.origin is not None:
            value = f"action bounds {_format_bounds(low)} to {_format_bounds(high)}"
            assumed.append(LedgerEntry("assumed", "action bounds", value, origin=bounds.origin))
    if bounds.origin is not None or known.action_low is not None:
        _require_scaled(agent, known, bounds)
    read = known.is_read("head")
    if agent.binding.layout == NO_LAYOUT and known.head in ("identity", "unit_tanh") and read:
        sentence = "actions are the model's outputs: no file records what its program does with them"
        assumed.append(LedgerEntry("assumed", "action map", sentence))
    settings = NetworkSettings(
        tuple(known.activations or (facts.hidden,)),
        str(known.head or facts.head),
        float(epsilon),
        tuple(map(float, low)),
        tuple(map(float, high)),
        known.obs_norm,
        choices,
        network_hidden={name: tuple(own) for name, own in (known.network_activations or {}).items()},
    )
    return settings, tuple(assumed)


def _require_one_meaning(agent: Agent, other: Agent) -> None:
    """Raise UsageError if two models' files show that only the first one's outputs are scores of actions.

    A library's layout, or an environment, states what the outputs of the other side are; two models do not.
    """
    known, its = agent.known, other.known
    alone = all(side.binding.layout == NO_LAYOUT and side.known.env is None for side in (agent, other))
    if (
        alone
        and known.head == "argmax"
        and its.is_read("head")
        and its.head != "argmax"
        and known_choices(its) is None
    ):
        raise UsageError(
            "the outputs of one model are scores of actions, those of the other its actions",
            file=agent.checkpoint.path,
            expected=f"action map {its.head} ({its.origin('head')})",
            found=f"action map argmax ({known.origin('head')})",
            hint="eval plays each of them with --env ID, whose action space shows what the outputs are",
        )


def _complete_metadata(agent: Agent, other: Agent) -> Sidecar:
    """Return the agent's facts, filled in from the other agent.

    The own sidecar always wins, because the agent is played with it; an agent without a record of
    normalised observations does not normalise.
    """
    both = merge_metadata(agent.known, other.known)
    own = {name: recorded for name in FACTS if (recorded := getattr(agent.sidecar, name, None)) is not None}
    # What the agent's own files state, understood or not, is not completed.
    own |= {name: getattr(agent.known, name) for name in agent.binding.facts.stated}
    provenance = {**both.provenance, **{name: agent.known.provenance.get(name, "") for name in own}}
    return replace(both, **{**own, "obs_norm": agent.known.obs_norm}, provenance=provenance)


def image_encoder(agent: Agent, title: str) -> PolicyEncoder | None:
    """Return the encoder of images, the only input and without memory, in front of a policy; else None."""
    front = agent.front(title)
    if front is None or front.cells or front.norms or list(front.shapes) != [schema.OBSERVATION]:
        return None
    return front


def build_part_network(
    agent: Agent, part: AgentNetwork, settings: NetworkSettings, front: PolicyEncoder | None = None
) -> Network:
    """Return a part as a network: a policy, behind its encoder `front`, a state value, or a Q-function.

    A policy of discrete actions ends with their scores: equal choices do not show that they are equal.
    """
    if settings.choices is not None and not any(part.acts for part in agent.binding.parts):
        joined = agent.binding.with_q_policies(settings.choices.scores).parts
        part = next((candidate for candidate in joined if candidate.title == part.title), part)
    if part.acts:
        return policy_network(agent.tree, part, settings.scores, front)
    # Networks of discrete actions receive observations only, also a dueling state value.
    if part.component in VALUES or (settings.choices is not None and not part.streams):
        return value_network(agent.tree, part, settings)
    return q_network(agent.tree, part, settings, *network_sizes(agent))


def network_sizes(agent: Agent) -> tuple[int, int]:
    """Return the numbers of observations and of actions."""
    actor = agent.part("actor") or agent.part("actor_target")
    if actor is not None:
        return layer_widths(agent.tree, actor)
    # For a critic alone, how its inputs divide does not affect its output.
    total, _ = layer_widths(agent.tree, agent.binding.parts[0])
    return total - 1, 1


def _format_bounds(values: Sequence[float]) -> str:
    distinct = sorted(set(values))
    return f"{distinct[0]:g}" if len(distinct) == 1 else f"[{', '.join(f'{v:g}' for v in values)}]"


def available_backend(agent: Agent) -> str:
    """Return the backend of the agent's own framework, or numpy if that framework is not installed."""
    return agent.framework if plugins.find("backends", agent.framework).available() else "numpy"


def counterpart_title(part: AgentNetwork, agent: Agent, other: Agent) -> str | None:
    """Return the title of the other agent's network that should equal a part of `agent`; None without one.

    The only policy of a file without a layout (ONNX, TorchScript, weights) may be a Q-network, which that
    does not show.
    """
    if other.part(part.title) is not None or not part.acts or part.component.endswith("_target"):
        return part.title if other.part(part.title) is not None else None
    policy = other.part(other.title("actor"))
    alone = [side.binding.layout == NO_LAYOUT for side in (agent, other)]
    if policy is None or not policy.acts or all(alone) or not any(alone):
        return None
    return policy.title if part.chooses or policy.chooses else None


def shared_networks(a: Agent, b: Agent) -> list[str]:
    """Return the first agent's titles of the networks that both have."""
    return [part.title for part in a.binding.parts if counterpart_title(part, a, b) is not None]


def missing_networks(a: Agent, b: Agent) -> list[str]:
    """Return the titles of the networks that only the first agent has."""
    return [part.title for part in a.binding.parts if counterpart_title(part, a, b) is None]


@keep_open()
def pair_networks(
    a: Agent, b: Agent, titles: Sequence[str], assumed: list[str]
) -> tuple[dict[str, tuple[Network, Network]], list[str]]:
    """Return network pairs, and a note for each critic or value that cannot run; a policy must run."""
    pairs, skipped = {}, []
    for title in titles:
        part = a.part(title)
        other = title if part is None else counterpart_title(part, a, b) or title
        try:
            pairs[title] = (
                build_agent_network(a, b, title, assumed),
                build_agent_network(b, a, other, assumed),
            )
        except (MappingError, UnsupportedError) as error:
            online = part is None or (part.acts and not part.component.endswith("_target"))
            if online or len(titles) == 1:
                raise
            skipped.append(f"{title} is not compared: {error.message}")
    return pairs, skipped


def agent_network_settings(agent: Agent, other: Agent) -> tuple[NetworkSettings, LedgerEntries]:
    """Return how the agent's layers become networks, and a ledger entry for each assumption."""
    obs_dim, act_dim = network_sizes(agent)
    _, actions = network_sizes(other)
    if actions != act_dim and len(agent.known.action_low or other.known.action_low or ()) == actions:
        paths = (other.checkpoint.path, agent.checkpoint.path)
        raise EnvironmentMismatchError(
            "the two policies have different sizes, and one records no action bounds",
            file=agent.checkpoint.path,
            expected=format_count(actions, "action"),
            found=f"{format_count(obs_dim, 'observation')}, {format_count(act_dim, 'action')}",
            hint=format_command("diff", *paths),
        )
    unit = ActionBounds(
        [-1.0] * act_dim, [1.0] * act_dim, "same default for both sides, because neither records bounds"
    )
    return derive_network_settings(agent, unit, other)


def build_agent_network(agent: Agent, other: Agent, title: str, assumed: list[str]) -> Network:
    """Return one network of the agent; append its assumptions."""
    front = image_encoder(agent, title) if _receives_images(agent, other, title) else None
    part = agent.runnable(title) if front is None else agent.playable(title)
    if part is None:
        raise UsageError(f"the checkpoint has no network {title}", file=agent.checkpoint.path)
    settings, guesses = agent_network_settings(agent, other)
    assumed.extend(assumption_sentences(guesses))
    return build_part_network(agent, part, settings, front)


def _receives_images(agent: Agent, other: Agent, title: str) -> bool:
    """Return whether the other agent's network has an encoder of images too, or is a program with its own.

    A file that holds only the layers of a policy (a conversion to torch) receives flattened rows.
    """
    part = agent.part(title)
    other_title = title if part is None else counterpart_title(part, agent, other) or title
    its_part = other.part(other_title)
    program = its_part is not None and its_part.program is not None
    return program or image_encoder(other, other_title) is not None
