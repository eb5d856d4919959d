"""Gathers what an exported network computes with besides its weights: an export carries it in the file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ckpttool.agents import envs
from ckpttool.agents.components import UNBOUNDED, Wiring, widths
from ckpttool.agents.envs import EnvSpec
from ckpttool.errors import EnvironmentMismatchError, UsageError
from ckpttool.layouts.canonical import Part
from ckpttool.ledger import Entries
from ckpttool.ops import knowledge
from ckpttool.ops.evaluate import bounds_of, environment_hint
from ckpttool.ops.restore import Agent
from ckpttool.ops.wiring import Bounds, require_even_bounds, sizes, wire
from ckpttool.sidecar import Sidecar


def told(agent: Agent, part: Part, env: str | None) -> tuple[Wiring, Sidecar, Entries]:
    """Return the wiring, all that is known of the agent, and an entry of the ledger for each assumption.

    An environment is made if it was asked for, or if only its action space can tell the bounds.
    """
    known = agent.known
    bounded = known.action_low is not None and known.action_high is not None
    needed = part.acts and known.head not in UNBOUNDED and not bounded
    spec = _spec(agent, env) if env is not None or needed else None
    bounds = Bounds([-1.0] * sizes(agent)[1], [1.0] * sizes(agent)[1], None)
    if spec is not None and part.acts:
        bounds = bounds_of(agent, widths(agent.tree, part), spec)
    wiring, assumed = wire(agent, bounds)
    if part.acts:
        require_even_bounds(agent, wiring)
    facts = Sidecar("", **{name: getattr(known, name) for name in (*knowledge.FACTS, "obs_dim")})
    facts = replace(facts, provenance=_of(known, facts))
    if needed and spec is not None:
        facts = _bounded(facts, wiring, bounds)
    if spec is not None and env is not None:
        said = {"id": env, "gymnasium": spec.versions.get("gymnasium")}
        facts = replace(facts, env=said, provenance={**facts.provenance, "env": "given"})
    return wiring, facts, assumed


def _of(known: Sidecar, facts: Sidecar) -> dict[str, str]:
    """Return what is known of where the facts are from."""
    return {name: said for name, said in known.provenance.items() if getattr(facts, name, None) is not None}


def _spec(agent: Agent, asked: str | None) -> EnvSpec:
    """Return what the environment is that somebody typed, or that the checkpoint's files name."""
    known = (agent.known.env or {}).get("id")
    if asked is None and not known:
        raise UsageError(
            "the checkpoint tells neither the action bounds nor the environment they are of",
            file=agent.checkpoint.path,
            hint=environment_hint(agent, None, *sizes(agent)),
        )
    # gymnasium imports the module before a colon: a file may not ask for that.
    with envs.make(asked or str(known), trusted=asked is not None) as made:
        return made.spec


def _bounded(facts: Sidecar, wiring: Wiring, bounds: Bounds) -> Sidecar:
    """Return the facts with an environment's bounds; raise EnvironmentMismatchError if they do not bound."""
    low, high = list(wiring.action_low), list(wiring.action_high)
    if not np.isfinite([*low, *high]).all():
        raise EnvironmentMismatchError(
            f"{bounds.origin} is not bounded", expected=f"bounds for the action map {wiring.head}"
        )
    said = dict.fromkeys(("action_low", "action_high"), f"assumed: {bounds.origin}")
    return replace(facts, action_low=low, action_high=high, provenance={**facts.provenance, **said})
