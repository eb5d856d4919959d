"""Facts besides the weights, of a listing (nothing is read) or of a restored agent (sidecar, options)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.core import urls
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import CkpttoolError, is_system_error
from ckpttool.core.sidecar import Sidecar, load_sidecar
from ckpttool.core.tree import Tree
from ckpttool.libraries import schema
from ckpttool.libraries.schema import AgentMetadata, RecognizedAgent

if TYPE_CHECKING:
    from ckpttool.core.checkpoint import Checkpoint
    from ckpttool.evaluation.restore import Agent


@dataclass(frozen=True, slots=True)
class FlowFacts:
    """Activations, action map, action bounds and statistics; `assumed` has the origin of those by default.

    `normalizer` is the number of normalised observation values, 0 without statistics; `clip` limits them.
    `choices` are discrete actions; `network_hidden` are activations of other networks than the policy.
    """

    hidden: tuple[str, ...] = ()
    head: str = ""
    bounds: tuple[Sequence[float], Sequence[float]] | None = None
    normalizer: int = 0
    clip: float | None = None
    assumed: Mapping[str, str] = field(default_factory=dict)
    choices: schema.Choices | None = None
    network_hidden: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def of_network(self, component: str) -> FlowFacts:
        """Return the facts of one network."""
        hidden = self.network_hidden.get(component.removesuffix("_target"))
        if hidden is None:
            return self
        assumed = {name: why for name, why in self.assumed.items() if name != "hidden"}
        return replace(self, hidden=tuple(hidden), assumed=assumed)


def find_recorded_facts(checkpoint: Checkpoint) -> Sidecar | None:
    """Return the sidecar beside a local checkpoint, unverified; None without a readable one."""
    if urls.is_elsewhere(checkpoint.path):
        return None
    try:
        return load_sidecar(checkpoint.path)
    except CkpttoolError as error:
        if is_system_error(error):
            raise
        return None  # commands that use it report the error


def listed_facts(binding: RecognizedAgent, tree: Tree, recorded: Sidecar | None = None) -> FlowFacts:
    """Return the facts of a recognised agent without reading a tensor.

    A sidecar's facts replace those that the checkpoint itself does not contain.
    """
    facts, stored = binding.facts, recorded or Sidecar("")
    default = f"default of layout {binding.layout}"
    hidden = facts.activations or ((facts.hidden,) if facts.hidden else ())
    head, assumed = facts.head, {}
    if "activations" in facts.stated:
        hidden, assumed["hidden"] = _stated_activation(facts, stored)
    elif ("activations" if facts.activations else "hidden") not in facts.origins:
        hidden = tuple(stored.activations or hidden)
        assumed["hidden"] = _origin(stored, "activations", default)
    if "head" in facts.stated:
        head = str(stored.head) if stored.is_given("head") else ""
    elif "head" not in facts.origins:
        head = stored.head or head
        assumed["head"] = _origin(stored, "head", default)
    low, high = facts.action_low or stored.action_low, facts.action_high or stored.action_high
    statistics = binding.statistics(tree)
    mean = facts.norm.mean if facts.norm is not None else statistics.get("mean")
    complete = facts.norm is not None or bool(statistics.keys() & {"var", "std"})
    clip = facts.norm.clip if facts.norm is not None else None
    size = mean.size * facts.stacked if mean is not None and complete else 0
    if not size and stored.obs_norm:
        size, clip = len(stored.obs_norm.get("mean", ())), stored.obs_norm.get("clip")
    bounds = None if low is None or high is None else (low, high)
    unclear = {name: why for name, why in assumed.items() if why}
    choices = facts.choices or schema.known_choices(stored)
    networks = facts.network_activations or stored.network_activations or {}
    return FlowFacts(hidden, head, bounds, size, clip, unclear, choices, networks)


def _stated_activation(facts: AgentMetadata, stored: Sidecar) -> tuple[tuple[str, ...], str]:
    """Return the given activations, else the text of those that a file states, and why these are unknown."""
    if stored.activations and stored.is_given("activations"):
        return tuple(stored.activations), ""
    stated = facts.stated["activations"]
    return (stated.text,), f"not supported; stated in {stated.source}"


def _origin(recorded: Sidecar, fact: str, default: str) -> str:
    """Return the default that a fact comes from; empty for a fact that a sidecar states."""
    if getattr(recorded, fact) is None:
        return default
    return recorded.origin(fact) if recorded.is_assumed(fact) else ""


def agent_facts(agent: Agent) -> FlowFacts:
    """Return the facts of a restored agent, with those of its sidecar."""
    stored, facts = agent.known, agent.binding.facts
    names = {"head": "head", "hidden": "activations"}
    assumed = {name: stored.origin(fact) for name, fact in names.items() if stored.is_assumed(fact)}
    hidden = tuple(stored.activations or ((facts.hidden,) if facts.hidden else ()))
    if "activations" in facts.stated and stored.activations is None:
        hidden, assumed["hidden"] = _stated_activation(facts, stored)
    head = str(stored.head or ("" if "head" in facts.stated else facts.head))
    bounds = None
    if stored.action_low is not None and stored.action_high is not None:
        bounds = (stored.action_low, stored.action_high)
    norm = stored.obs_norm or {}
    return FlowFacts(
        hidden,
        head,
        bounds,
        len(norm.get("mean", ())),
        norm.get("clip"),
        assumed,
        schema.known_choices(stored),
        stored.network_activations or {},
    )
