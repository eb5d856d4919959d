"""Gathers what a network needs and its checkpoint lacks, and says where each fact came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckpttool.agents.components import Wiring
from ckpttool.ops.restore import Agent
from ckpttool.sidecar import Sidecar


@dataclass(frozen=True, slots=True)
class Bounds:
    """Action bounds per dimension, and who says so ("Pendulum-v1's action space")."""

    low: Sequence[float]
    high: Sequence[float]
    origin: str


def wire(agent: Agent, bounds: Bounds, known: Sidecar | None) -> tuple[Wiring, tuple[str, ...]]:
    """Return the wiring and a sentence for whatever was assumed.

    The sidecar decides; where it is silent the layout's habit does, and `bounds` for the actions.
    """
    facts, layout = agent.binding.facts, agent.binding.layout
    whose = "the sidecar" if known is agent.sidecar else "the other one's sidecar"
    assumed = list(agent.binding.moves.assumed)

    def take(name: str, habit: Any, sentence: str) -> Any:
        value = getattr(known, name) if known is not None else None
        if value is None:
            assumed.append(sentence)
            return habit
        if known is not None and str(known.provenance.get(name, "")).startswith("assumed"):
            assumed.append(f"{sentence} (so says {whose})")
        return value

    habit = f"habit of layout {layout}"
    hidden = take("activations", [facts.hidden], f"hidden activations {facts.hidden}: {habit}")
    head = take("head", facts.head, f"action map {facts.head}: {habit}")
    normed = any(layer.kind == "layer_norm" for part in agent.binding.parts for layer in part.layers)
    epsilon = facts.epsilon
    if normed:
        told = known.epsilon or {} if known is not None else {}
        if "layer_norm" not in told:
            assumed.append(f"layer norm epsilon {facts.epsilon:g}: {habit}")
        epsilon = told.get("layer_norm", facts.epsilon)
    low, high = (getattr(known, name) if known else None for name in ("action_low", "action_high"))
    if low is None or high is None:
        low, high = bounds.low, bounds.high
        assumed.append(f"action bounds {_shown(low)} to {_shown(high)}: {bounds.origin}")
    wiring = Wiring(
        tuple(hidden),
        str(head),
        float(epsilon),
        tuple(map(float, low)),
        tuple(map(float, high)),
        known.obs_norm if known is not None else None,
    )
    return wiring, tuple(assumed)


def _shown(values: Sequence[float]) -> str:
    distinct = sorted(set(values))
    return f"{distinct[0]:g}" if len(distinct) == 1 else f"[{', '.join(f'{v:g}' for v in values)}]"
