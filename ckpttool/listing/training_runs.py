"""Training runs: the last checkpoints of each path."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from ckpttool.core import deferred, filesystem
from ckpttool.core.errors import CkpttoolError, UsageError
from ckpttool.core.filesystem import list_names
from ckpttool.core.text import natural_sort_key
from ckpttool.libraries.recognize import recognize_checkpoint
from ckpttool.listing.paths import BESIDE, CheckpointEntry, expand_paths
from ckpttool.listing.training_counters import step_in_name

if TYPE_CHECKING:
    from ckpttool.evaluation.protocol import TrainingRun


def find_runs(
    paths: Sequence[str], last: int, layout: str | None = None, *, curve: bool = False
) -> tuple[TrainingRun, ...]:
    """Return the last checkpoints of each path; a folder, a pattern or a checkpoint is one training run.

    With `curve`, the earlier ones are listed too. The files of one checkpoint count as one run. In a
    folder, entries without an agent (statistics, replay buffers) are skipped. Raise UsageError for a run
    with fewer than `last` checkpoints.
    """
    from ckpttool.evaluation.protocol import TrainingRun  # with modules that play

    runs: dict[tuple[str, ...], TrainingRun] = {}
    for path in paths:
        if len(paths) > 1 and path.endswith(BESIDE):
            continue  # shells expand patterns to all files
        every = expand_paths([path])
        agents = (entry.path for entry in reversed(every) if entry.named or _may_play(entry, layout))
        every_agent = tuple(islice(agents, None if curve else last))[::-1]
        checkpoints = every_agent[-last:]
        if len(checkpoints) < last:
            raise UsageError(
                "the training run has too few checkpoints",
                file=path,
                expected=f"the last {last}",
                found=str(len(checkpoints)),
                hint="give the folder of the run, or leave out --last",
            )
        run = TrainingRun(path, checkpoints, every_agent[:-last])
        runs.setdefault(tuple(map(filesystem.realpath, checkpoints)), run)
    return tuple(runs.values())


def _may_play(entry: CheckpointEntry, layout: str | None) -> bool:
    """Return whether an entry may contain an agent.

    True for a damaged entry: playing it will report the error.
    """
    try:
        return recognize_checkpoint(entry.open(), layout) is not None
    except CkpttoolError:
        return True


# Folders that hold one checkpoint each, by training step: `checkpoint-500/`, `global_step1000/`. Other
# numbers may count seeds or runs.
_STEP_FOLDER = deferred.compile(
    r"(?:.*[-_.])?(?:checkpoint|ckpt|(?:global_?)?step|iter|epoch)s?[-_=]?[0-9]+\Z", re.I
)
_MODELS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors")


def folder_entries(path: str) -> tuple[list[CheckpointEntry], list[str]]:
    """Return the checkpoints that lie in one folder, or in one numbered folder each; and notes on others."""
    entries = [entry for entry in expand_paths([path]) if not entry.named]
    by_folder: dict[str, list[CheckpointEntry]] = {}
    for entry in entries:
        by_folder.setdefault(os.path.normpath(os.path.dirname(entry.path)), []).append(entry)
    if not entries:
        return _numbered_folders(path), []
    direct = by_folder.pop(os.path.normpath(path), [])
    if not direct and len(by_folder) == 1:
        # A subfolder is listed by its latest checkpoint.
        return [entry for entry in expand_paths([*by_folder]) if not entry.named], []
    if not direct:
        return _numbered_folders(path), []
    below = [entry for entries in by_folder.values() for entry in entries]
    return direct, [f"{os.path.relpath(row.path, path)} is in a subfolder and is left out" for row in below]


def _numbered_folders(path: str) -> list[CheckpointEntry]:
    """Return the checkpoints of folders that are named by training steps, if each has exactly one."""
    names = [name for name in list_names(path) if _STEP_FOLDER.fullmatch(name)]
    entries: list[CheckpointEntry] = []
    for name in sorted(names, key=natural_sort_key):
        inside = expand_paths([os.path.join(path, name)])
        # The model of a Hugging Face trainer is beside files of its optimizer and random states.
        models = [entry for entry in inside if os.path.basename(entry.path) in _MODELS]
        if len(inside) != 1 and len(models) != 1:
            return []
        entries += models or inside
    return entries


def named_step(path: str) -> int | None:
    """Return the step in the name of a checkpoint, else in that of its folder (`checkpoint-500/model.pt`)."""
    step = step_in_name(os.path.basename(path))
    folder = os.path.basename(os.path.dirname(path))
    return step_in_name(folder) if step is None and _STEP_FOLDER.fullmatch(folder) else step
