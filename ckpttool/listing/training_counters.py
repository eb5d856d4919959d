"""Training progress: environment steps, gradient updates and saves, and the number in a checkpoint's name.

`inspect`, `eval`, learning curves and reports all use this definition. A count of saves orders checkpoints
of one run, and is never a step.
"""

from __future__ import annotations

import os
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ckpttool.core import deferred
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkpttoolError, is_system_error
from ckpttool.core.text import format_count
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf

if TYPE_CHECKING:
    from ckpttool.evaluation.restore import Agent
    from ckpttool.libraries.schema import RecognizedAgent


NAME, SAVES, OPTIMIZER = "name", "save_counter", "optimizer"
# The x axis of a curve: environment steps take precedence over updates, both over other counts.
SOURCES = ("num_timesteps", "global_step", "total_it", NAME, "iter")
COUNTERS = (*SOURCES, SAVES)
# Columns of tables and documents, each with its counters: the first one present is used.
COLUMNS = {
    "environment_steps": ("num_timesteps", "global_step"),
    "updates": ("total_it", OPTIMIZER),
    "saves": (SAVES,),
    "in_name": (NAME,),
}
# The label of a curve's x axis, by the source of its steps.
UNITS = {
    "num_timesteps": "environment steps",
    "global_step": "environment steps",
    "total_it": "updates",
    NAME: "numbers in file names",
    "iter": "iterations",
}
ANY_UNIT = "training steps"
TITLES = {"in_name": "step", "environment_steps": "env steps", "updates": "updates", "saves": "save"}

_LARGEST = 2**63
_FORMS = {"int32": "<i", "int64": "<q", "uint32": "<I", "uint64": "<Q", "float32": "<f", "float64": "<d"}
_WORD = r"(?:step|iter|itr|ckpt|checkpoint|epoch|model|agent|policy)s?"
_NUMBERS = (
    deferred.compile(r"([0-9]+)[-_]?(?:time)?steps?(?![a-z])", re.IGNORECASE),
    deferred.compile(rf"(?<![a-z]){_WORD}[-_=]?([0-9]+)(?![0-9])", re.IGNORECASE),
    deferred.compile(r"-([0-9]+)(?:\.[A-Za-z]\w*)*\Z"),
)


def steps_by_source(agent: Agent) -> dict[str, int]:
    """Return the count of each source that has one."""
    return count_training(agent.checkpoint, agent.binding)


def count_training(checkpoint: Checkpoint, binding: RecognizedAgent | None) -> dict[str, int]:
    """Return a checkpoint's counters by source, and the number in its name.

    Without an agent, the plain counters at the top of the checkpoint count. The updates of an optimizer
    are used where the agent itself has no count.
    """
    counts: dict[str, int] = {}
    if binding is not None:
        from ckpttool.libraries.schema import ALL_OPTIMIZED, JOINT, canonical_setting_path

        moves = {move.target: move for move in reversed(binding.moves.moves)}
        for target, move in moves.items():
            if len(target) == 1 and (name := str(target[0].value)) in COUNTERS:
                _add_count(counts, name, move.rule.leaf(checkpoint.tree[move.source]))
        for optimizer in (JOINT, *ALL_OPTIMIZED):
            if (counter := moves.get(canonical_setting_path(optimizer, "step"))) is not None:
                _add_count(counts, OPTIMIZER, counter.rule.leaf(checkpoint.tree[counter.source]))
    else:
        for path, name in checkpoint.tree.names.items():
            if name in COUNTERS and name != NAME:
                _add_count(counts, name, checkpoint.tree[path])
    if (number := step_in_name(os.path.basename(checkpoint.path))) is not None:
        counts[NAME] = number
    return counts


def _add_count(counts: dict[str, int], name: str, leaf: Leaf | ValueLeaf) -> None:
    plain = read_number(leaf) if isinstance(leaf, Leaf) else leaf.value
    if isinstance(plain, int | float) and not isinstance(plain, bool) and 0 <= plain < _LARGEST:
        counts[name] = max(counts.get(name, 0), int(plain))


def read_number(leaf: Leaf) -> int | float | None:
    """Return a one-element tensor as a number, read without NumPy; None if it is larger or damaged."""
    form = _FORMS.get(leaf.dtype)
    if form is None or leaf.size != 1:
        return None
    try:
        number: int | float = struct.unpack(form, leaf.read())[0]
    except struct.error:
        return None
    except CkpttoolError as error:
        if is_system_error(error):
            raise
        return None  # its own reader reports the error where the value is needed
    return number


def step_columns(steps: Mapping[str, int]) -> dict[str, int | None]:
    """Return environment steps, updates, saves and the number in the name; None for missing counts."""
    return {
        title: next((steps[source] for source in sources if source in steps), None)
        for title, sources in COLUMNS.items()
    }


def step_in_name(name: str) -> int | None:
    """Return the step in a file name (`ckpt-2500`, `rl_model_10000_steps.zip`), if there is one."""
    for pattern in _NUMBERS:
        if match := pattern.search(name):
            return int(match[1])
    return None


def most_common_source(steps_by_checkpoint: Sequence[Mapping[str, int]]) -> str | None:
    """Return the source that most checkpoints share, so that all steps are comparable; None without any.

    Of several, a source whose value differs between checkpoints comes first. A count of saves is not
    a step.
    """
    having = Counter(source for counts in steps_by_checkpoint for source in counts if source in SOURCES)
    there = [source for source in SOURCES if having[source]]
    telling = [source for source in there if len({counts.get(source) for counts in steps_by_checkpoint}) > 1]
    return max(telling or there, key=lambda source: having[source], default=None)


def update_count_notes(tree: Tree) -> tuple[str, ...]:
    """Yield a sentence for each Adam whose two beta powers imply a count under common betas.

    These scalars are read; an unreadable one is skipped here, because its own reader reports the error.
    """
    return tuple(_find_update_counts(tree))


def _find_update_counts(tree: Tree) -> Iterator[str]:
    from ckpttool.libraries.optimizer_entries import POWERS

    for path, leaf in tree.tensors():
        last = str(path[-1].value) if path else ""
        if not last.startswith(POWERS[0]) or leaf.role != "other" or leaf.shape:
            continue
        other: Path = (*path[:-1], path[-1]._replace(value=POWERS[1] + last.removeprefix(POWERS[0])))
        second = tree.get(other)
        if not isinstance(second, Leaf) or second.shape:
            continue
        from ckpttool.libraries.optimizers_read import infer_step_count

        if (inferred := infer_step_count(tree, (path, other))) is not None:
            steps, betas = inferred
            updates = format_count(steps, "update")
            yield f"{tree.names[path]}: Adam has made {updates} (assuming betas {betas[0]} and {betas[1]})"
