"""Which maps of a policy's last layer to an action are the same, given the action's bounds."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttool.errors import UsageError
from ckpttool.layouts.canonical import Facts
from ckpttool.leaf import Leaf, attr
from ckpttool.tree import Tree

Bounds = tuple[list[float], list[float]]

# Maps that are one map for some bounds (agents.components.HEADS says what each is).
_FAMILIES = (frozenset(("tanh", "affine", "tanh_clip_affine")), frozenset(("clip", "clip_affine")))


def acts_as(facts: Facts, agent: Tree, head: str) -> bool | None:
    """Say whether the agent's action map is what `head` is for its bounds; None where those are not known.

    The two small tensors of the action's map are read.
    """
    if facts.head == head:
        return True
    if not any({facts.head, head} <= family for family in _FAMILIES):
        return False
    bounds = action_bounds(agent)
    return None if bounds is None else _simplest(facts.head, bounds) == _simplest(head, bounds)


def _simplest(head: str, bounds: Bounds) -> str:
    """Return the plainest map that is the same one for these bounds."""
    low, high = bounds
    even = all(value == high[0] for value in high) and all(value == -high[0] for value in low)
    # max_action * tanh is tanh mapped to bounds of one size; clipping 1 * tanh changes nothing.
    if (head == "tanh" and even) or (head == "tanh_clip_affine" and high[0] == 1):
        return "affine"
    return "clip" if head == "clip_affine" and even and high[0] == 1 else head


def action_bounds(agent: Tree) -> Bounds | None:
    """Return low and high of each action as the canonical agent's scale and bias give them, None without."""
    scale, bias = (agent.get((attr("actor"), attr(name))) for name in ("action_scale", "action_bias"))
    if not isinstance(scale, Leaf) or not isinstance(bias, Leaf):
        return None
    wide, middle = scale.array().reshape(-1), bias.array().reshape(-1)
    return (middle - wide).tolist(), (middle + wide).tolist()


def told_bounds(facts: Facts, agent: Tree, whose: str) -> tuple[Sequence[float], Sequence[float]]:
    """Return low and high of each action, which what `whose` writes must say.

    Raise UsageError when nobody says them.
    """
    if facts.action_low is not None and facts.action_high is not None:
        return facts.action_low, facts.action_high
    known = action_bounds(agent)
    if known is None:
        raise UsageError(
            f"unknown action bounds, which {whose} holds",
            hint="--bounds LOW HIGH",
        )
    return known
