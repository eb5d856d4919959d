"""Training runs: the last checkpoints of each path."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from ckpttool.core import filesystem
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import CkpttoolError, UsageError
from ckpttool.libraries.recognize import recognize_checkpoint
from ckpttool.listing.paths import BESIDE, CheckpointEntry, expand_paths


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One training run to evaluate: its path as given, and its last checkpoints in training order."""

    path: str
    checkpoints: tuple[str, ...]
    earlier: tuple[str, ...] = ()
    """checkpoints before those, which only the learning curve needs"""

    @property
    def played(self) -> tuple[str, ...]:
        """All checkpoints to play."""
        return (*self.earlier, *self.checkpoints)


def find_runs(
    paths: Sequence[str], last: int, layout: str | None = None, *, curve: bool = False
) -> tuple[TrainingRun, ...]:
    """Return the last checkpoints of each path; a folder, a pattern or a checkpoint is one training run.

    With `curve`, the earlier ones are listed too. The files of one checkpoint count as one run. In a
    folder, entries without an agent (statistics, replay buffers) are skipped. Raise UsageError for a run
    with fewer than `last` checkpoints.
    """
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
