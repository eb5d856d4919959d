"""Gathers what a network needs and its checkpoint lacks, says where each fact came from, and builds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckpttool.agents.components import Wiring, policy_network, q_network, value_network, widths
from ckpttool.agents.network import Network
from ckpttool.errors import UsageError
from ckpttool.layouts.canonical import NO_LAYOUT, VALUES, Part
from ckpttool.ledger import Entries, Entry
from ckpttool.ops import knowledge
from ckpttool.ops.findings import command
from ckpttool.ops.knowledge import FACTS, merged
from ckpttool.ops.restore import Agent, policy_sizes
from ckpttool.sidecar import Sidecar


@dataclass(frozen=True, slots=True)
class Bounds:
    """Action bounds per dimension, and who says so ("Pendulum-v1's action space").

    Without an origin they stand in for what the network does not depend on, and nothing is said of them.
    """

    low: Sequence[float]
    high: Sequence[float]
    origin: str | None
    env: str | None = None


def missing_options(agent: Agent, known: Sidecar) -> tuple[str, ...]:
    """Return the options, with an example value, for facts without which the policy cannot be computed."""
    facts = agent.binding.facts
    hidden, _ = policy_sizes(agent.binding, agent.tree)
    activations = known.activations or facts.activations or facts.hidden
    found = ("--activation relu",) if hidden and not activations else ()
    return found if known.head or facts.head else (*found, "--head tanh")


def require_facts(agent: Agent, *words: str, other: Agent | None = None) -> None:
    """Raise UsageError with the completing command if no file holds the activations or the action map.

    `words` are the command's, its verb first; without them the command is `eval`.
    """
    missing = missing_options(agent, agent.known if other is None else _with(agent, other))
    if not missing:
        return
    verb, *rest = words or ("eval", agent.checkpoint.path, "--env", "ID")
    options = [option.partition(" ")[0] for option in missing]
    wanted = ["--env"] * ("ID" in rest) + options
    named = " and ".join((", ".join(wanted[:-1]), wanted[-1]) if len(wanted) > 1 else wanted)
    raise UsageError(
        f"needs {named}: no file holds {_LACKED[tuple(options)]}",
        file=agent.checkpoint.path,
        hint=" ".join((command(verb, *rest), *missing)),
    )


_LACKED = {
    ("--activation", "--head"): "the activations and the action map",
    ("--activation",): "the activations",
    ("--head",): "the action map",
}


def _require_scaled(agent: Agent, known: Sidecar, bounds: Bounds) -> None:
    """Raise UsageError if a model ends in tanh, and the actions reach further than that."""
    read = known.is_read("head")
    low = bounds.low if known.action_low is None else known.action_low
    high = bounds.high if known.action_high is None else known.action_high
    if known.head == "unit_tanh" and read and not (np.all(np.equal(low, -1)) and np.all(np.equal(high, 1))):
        raise UsageError(
            "needs --head: the model ends in tanh, and no file holds whether its program scales the actions",
            file=agent.checkpoint.path,
            expected="bounds -1 to 1, --head affine (scaled to them) or --head unit_tanh (as it is)",
            found=f"bounds {_shown(low)} to {_shown(high)}",
            hint=command("eval", agent.checkpoint.path, "--env", bounds.env or "ID", "--head", "affine"),
        )


def require_even_bounds(agent: Agent, wiring: Wiring) -> None:
    """Raise UsageError for one number times tanh, by habit of a layout, between bounds of several sizes.

    No program has such bounds and this map: it would never reach some of them, and exceed others.
    """
    low, high = wiring.action_low, wiring.action_high
    assumed = agent.known.is_assumed("head")
    even = all(np.isclose(value, high[0]) for value in high) and all(np.isclose(v, -high[0]) for v in low)
    if wiring.head != "tanh" or even or not assumed:
        return
    raise UsageError(
        "needs --head: one number times tanh, the layout's habit, cannot give these action bounds",
        file=agent.checkpoint.path,
        expected="--head affine (tanh mapped to the bounds), or --head tanh (times the first upper bound)",
        found=f"bounds {_shown(low)} to {_shown(high)}",
    )


def wire(agent: Agent, bounds: Bounds, other: Agent | None = None) -> tuple[Wiring, Entries]:
    """Return the wiring and an entry of the ledger for whatever was assumed.

    What the agent's sidecar or files say decides; where they are silent, what `other` knows (the same agent
    in another form); then the layout's habit, and `bounds` for the actions.
    """
    require_facts(agent, other=other)
    known = agent.known if other is None else _with(agent, other)
    facts = agent.binding.facts
    sidecars = [each.sidecar for each in (agent, other) if each is not None]
    assumed = list(knowledge.assumed_entries(agent.binding, known, *sidecars))
    epsilon = facts.epsilon
    if any(layer.kind == "layer_norm" for part in agent.binding.parts for layer in part.layers):
        epsilon = (known.epsilon or {}).get("layer_norm", epsilon)
    low, high = known.action_low, known.action_high
    if low is None or high is None:
        low, high = bounds.low, bounds.high
        if bounds.origin is not None:
            value = f"action bounds {_shown(low)} to {_shown(high)}"
            assumed.append(Entry("assumed", "action bounds", value, origin=bounds.origin))
    if bounds.origin is not None or known.action_low is not None:
        _require_scaled(agent, known, bounds)
    read = known.is_read("head")
    if agent.binding.layout == NO_LAYOUT and known.head in ("identity", "unit_tanh") and read:
        said = "an action is what the model gives: no file holds what its program does with it"
        assumed.append(Entry("assumed", "action map", said))
    wiring = Wiring(
        tuple(known.activations or (facts.hidden,)),
        str(known.head or facts.head),
        float(epsilon),
        tuple(map(float, low)),
        tuple(map(float, high)),
        known.obs_norm,
    )
    return wiring, tuple(assumed)


def _with(agent: Agent, other: Agent) -> Sidecar:
    """Return what is known of the agent, and what the other one knows where it is silent.

    Its own sidecar is what it is played by, so nothing overrules that; and an agent that says nothing of
    normalised observations does not normalise.
    """
    both = merged(agent.known, other.known)
    own = {name: told for name in FACTS if (told := getattr(agent.sidecar, name, None)) is not None}
    provenance = {**both.provenance, **{name: agent.known.provenance.get(name, "") for name in own}}
    return replace(both, **{**own, "obs_norm": agent.known.obs_norm}, provenance=provenance)


def network_of(agent: Agent, part: Part, wiring: Wiring) -> Network:
    """Return a part as a network: a policy, a value of the state, or a Q-function."""
    if part.acts:
        return policy_network(agent.tree, part, wiring)
    if part.component in VALUES:
        return value_network(agent.tree, part, wiring)
    return q_network(agent.tree, part, wiring, *sizes(agent))


def sizes(agent: Agent) -> tuple[int, int]:
    """Return the numbers of observations and of actions."""
    actor = agent.part("actor") or agent.part("actor_target")
    if actor is not None:
        return widths(agent.tree, actor)
    # A critic alone: how its inputs divide does not change what it computes.
    total, _ = widths(agent.tree, agent.binding.parts[0])
    return total - 1, 1


def _shown(values: Sequence[float]) -> str:
    distinct = sorted(set(values))
    return f"{distinct[0]:g}" if len(distinct) == 1 else f"[{', '.join(f'{v:g}' for v in values)}]"
