"""How far a checkpoint's training was: what its counters and its name say."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from ckpttool.leaf import ValueLeaf
from ckpttool.mapping.rules import ToValue
from ckpttool.ops.restore import Agent

NAME = "name"
# Steps of the environment come before updates, and both before what counts only the times of saving.
SOURCES = ("num_timesteps", "global_step", "total_it", NAME, "iter", "save_counter")

_WORD = r"(?:step|iter|itr|ckpt|checkpoint|epoch|model|agent|policy)s?"
_NUMBERS = (
    re.compile(r"([0-9]+)[-_]?(?:time)?steps?(?![a-z])", re.IGNORECASE),
    re.compile(rf"(?<![a-z]){_WORD}[-_=]?([0-9]+)(?![0-9])", re.IGNORECASE),
    re.compile(r"-([0-9]+)(?:\.[A-Za-z]\w*)*\Z"),
)


def steps_of(agent: Agent) -> dict[str, int]:
    """Return what each source says; only those that say something."""
    found = {}
    for move in agent.binding.moves.moves:
        name = str(move.target[0].value)
        if len(move.target) == 1 and name in SOURCES:
            leaf = ToValue().leaf(move.rule.leaf(agent.checkpoint.tree[move.source]))
            if isinstance(leaf, ValueLeaf) and isinstance(leaf.value, int | float) and leaf.value >= 0:
                found[name] = int(leaf.value)
    if (number := in_name(os.path.basename(agent.checkpoint.path))) is not None:
        found[NAME] = number
    return found


def in_name(name: str) -> int | None:
    """Return the step that a file's name holds (`ckpt-2500`, `rl_model_10000_steps.zip`), if it does."""
    for pattern in _NUMBERS:
        if found := pattern.search(name):
            return int(found[1])
    return None


def common(told: Sequence[Mapping[str, int]]) -> str | None:
    """Return the source that most checkpoints have, so that all steps count the same; None without any.

    A source that says the same of all of several checkpoints does not count their training.
    """
    having = Counter(source for each in told for source in each)
    telling = [
        source
        for source in SOURCES
        if having[source] and (len(told) == 1 or len({each.get(source) for each in told}) > 1)
    ]
    return max(telling, key=lambda source: having[source], default=None)
