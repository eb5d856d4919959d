"""The networks of two checkpoints of one agent, side by side: each as its own checkpoint has it played."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttool.agents.components import Wiring
from ckpttool.agents.network import Network
from ckpttool.errors import MappingError, UnsupportedError, UsageError
from ckpttool.ledger import Entries, assumptions
from ckpttool.ops.restore import Agent
from ckpttool.ops.wiring import Bounds, network_of, sizes, wire


def shared(a: Agent, b: Agent) -> list[str]:
    """Return the titles of the networks that both have."""
    return [part.title for part in a.binding.parts if b.part(part.title) is not None]


def lost(a: Agent, b: Agent) -> list[str]:
    """Return the titles of the networks that only the first one has."""
    return [part.title for part in a.binding.parts if b.part(part.title) is None]


def pairs(
    a: Agent, b: Agent, titles: Sequence[str], assumed: list[str]
) -> tuple[dict[str, tuple[Network, Network]], list[str]]:
    """Return what is compared, and a note for each critic or value that cannot be run; a policy must be."""
    found, skipped = {}, []
    for title in titles:
        try:
            found[title] = network(a, b, title, assumed), network(b, a, title, assumed)
        except (MappingError, UnsupportedError) as error:
            part = a.part(title)
            if part is None or part.acts or len(titles) == 1:
                raise
            skipped.append(f"{title} is not compared: {error.message}")
    return found, skipped


def wired(agent: Agent, other: Agent) -> tuple[Wiring, Entries]:
    """Return how the agent's layers become networks, and an entry of the ledger for whatever was assumed."""
    _, act_dim = sizes(agent)
    unit = Bounds([-1.0] * act_dim, [1.0] * act_dim, "both sides alike, neither says more")
    return wire(agent, unit, other)


def network(agent: Agent, other: Agent, title: str, assumed: list[str]) -> Network:
    """Return one network of the agent, and add what was assumed for it."""
    part = agent.runnable(title)
    if part is None:
        raise UsageError(f"the checkpoint has no network {title}", file=agent.checkpoint.path)
    wiring, guesses = wired(agent, other)
    assumed.extend(assumptions(guesses))
    return network_of(agent, part, wiring)
