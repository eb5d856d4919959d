"""How far training was: environment steps, gradient updates and saves, and the number in a checkpoint's name.

`inspect`, `eval`, learning curves and reports all use this definition. A count of saves orders checkpoints of
one run, and is never a step.
"""

from __future__ import annotations

import os
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, is_of_system
from ckpttool.layouts.canonical import ALL_OPTIMIZED, JOINT, Binding, setting
from ckpttool.leaf import Leaf, ValueLeaf

if TYPE_CHECKING:
    from ckpttool.ops.restore import Agent

NAME, SAVES, OPTIMIZER = "name", "save_counter", "optimizer"
# What a curve is drawn over: steps of the environment come before updates, both before other counts.
SOURCES = ("num_timesteps", "global_step", "total_it", NAME, "iter")
COUNTERS = (*SOURCES, SAVES)
# The columns of tables and documents, each with the counters that mean it: the first one that is there.
COLUMNS = {
    "environment_steps": ("num_timesteps", "global_step"),
    "updates": ("total_it", OPTIMIZER),
    "saves": (SAVES,),
    "in_name": (NAME,),
}
# What a curve's axis is called, by the source of its steps.
UNITS = {
    "num_timesteps": "environment steps",
    "global_step": "environment steps",
    "total_it": "updates",
    NAME: "numbers in the files' names",
    "iter": "iterations",
}
ANY_UNIT = "training steps"
TITLES = {"in_name": "name", "environment_steps": "env steps", "updates": "updates", "saves": "save"}

_LARGEST = 2**63
_FORMS = {"int32": "<i", "int64": "<q", "uint32": "<I", "uint64": "<Q", "float32": "<f", "float64": "<d"}
_WORD = r"(?:step|iter|itr|ckpt|checkpoint|epoch|model|agent|policy)s?"
_NUMBERS = (
    re.compile(r"([0-9]+)[-_]?(?:time)?steps?(?![a-z])", re.IGNORECASE),
    re.compile(rf"(?<![a-z]){_WORD}[-_=]?([0-9]+)(?![0-9])", re.IGNORECASE),
    re.compile(r"-([0-9]+)(?:\.[A-Za-z]\w*)*\Z"),
)


def steps_of(agent: Agent) -> dict[str, int]:
    """Return what each source says; only those that say something."""
    return counted(agent.checkpoint, agent.binding)


def counted(checkpoint: Checkpoint, binding: Binding | None) -> dict[str, int]:
    """Return what a checkpoint counts, by source, and the number in its name.

    Without an agent, the plain counters at the top of the checkpoint count. The updates of an optimizer stand
    in where the agent itself counts none.
    """
    found: dict[str, int] = {}
    if binding is not None:
        places = {move.target: move for move in reversed(binding.moves.moves)}
        for target, move in places.items():
            if len(target) == 1 and (name := str(target[0].value)) in COUNTERS:
                _add(found, name, move.rule.leaf(checkpoint.tree[move.source]))
        for optimizer in (JOINT, *ALL_OPTIMIZED):
            if (own := places.get(setting(optimizer, "step"))) is not None:
                _add(found, OPTIMIZER, own.rule.leaf(checkpoint.tree[own.source]))
    else:
        for path, name in checkpoint.tree.names.items():
            if name in COUNTERS and name != NAME:
                _add(found, name, checkpoint.tree[path])
    if (number := in_name(os.path.basename(checkpoint.path))) is not None:
        found[NAME] = number
    return found


def _add(found: dict[str, int], name: str, leaf: Leaf | ValueLeaf) -> None:
    plain = _number(leaf) if isinstance(leaf, Leaf) else leaf.value
    if isinstance(plain, int | float) and not isinstance(plain, bool) and 0 <= plain < _LARGEST:
        found[name] = max(found.get(name, 0), int(plain))


def _number(leaf: Leaf) -> int | float | None:
    """Return a tensor of one number, read without NumPy; None for any other, and for one that is damaged."""
    form = _FORMS.get(leaf.dtype)
    if form is None or leaf.size != 1:
        return None
    try:
        number: int | float = struct.unpack(form, leaf.read())[0]
    except struct.error:
        return None
    except CkpttoolError as error:
        if is_of_system(error):
            raise
        return None  # where it is needed, reading it says what is wrong
    return number


def columns(told: Mapping[str, int]) -> dict[str, int | None]:
    """Return environment steps, updates, saves and the number in the name; None where nothing counts them."""
    return {
        title: next((told[source] for source in sources if source in told), None)
        for title, sources in COLUMNS.items()
    }


def in_name(name: str) -> int | None:
    """Return the step that a file's name holds (`ckpt-2500`, `rl_model_10000_steps.zip`), if it does."""
    for pattern in _NUMBERS:
        if found := pattern.search(name):
            return int(found[1])
    return None


def common(told: Sequence[Mapping[str, int]]) -> str | None:
    """Return the source that most checkpoints have, so that all steps count the same; None without any.

    Of several, one that does not say the same of all checkpoints is taken first. A count of saves is no step.
    """
    having = Counter(source for each in told for source in each if source in SOURCES)
    there = [source for source in SOURCES if having[source]]
    telling = [source for source in there if len({each.get(source) for each in told}) > 1]
    return max(telling or there, key=lambda source: having[source], default=None)
