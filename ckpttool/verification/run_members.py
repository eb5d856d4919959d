"""The checkpoints of a training run: which of a folder belong to it, in training order."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence

from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.source import File
from ckpttool.core.text import describe_error, natural_sort_key
from ckpttool.listing import training_counters
from ckpttool.listing.findings import Finding
from ckpttool.listing.paths import CheckpointEntry
from ckpttool.verification.run_histories import LayerSums


class MemberColumn(NamedTuple):
    """What one pass over a checkpoint found in its values, without its tree.

    `layers` are sums over the parameters of each, with the changes since the checkpoint `before`, None if
    there is none or it is unreadable. `error` is the reason why the values are unreadable.
    """

    before: str | None
    layers: Mapping[str, LayerSums]
    sha256: str = ""
    findings: tuple[Finding, ...] = ()
    files: tuple[File, ...] = ()
    notes: tuple[str, ...] = ()
    error: CkpttoolError | None = None


@dataclass(frozen=True, slots=True)
class RunMember:
    """One checkpoint of a run; `error` is the reason why it cannot be opened."""

    entry: CheckpointEntry
    format: str | None
    layout: str | None
    counts: Mapping[str, int]
    nbytes: int
    error: CkpttoolError | None = None
    column: MemberColumn | None = None
    """what its values are, if they were read when it was opened"""

    @property
    def path(self) -> str:
        """The path to open."""
        return self.entry.path

    def follows(self, before: RunMember | None) -> bool:
        """Return whether its values were read and compared with those of the checkpoint `before`."""
        readable = before is not None and before.column is not None and before.column.error is None
        compared = before.path if before is not None and readable else None
        return self.column is not None and self.column.before == compared


@dataclass(frozen=True, slots=True)
class RunReading:
    """How the values of a run are read: tensors whose path matches `glob`, in `jobs` processes.

    `ray` is the address of a Ray cluster for them, `layout` names the layout of its agents. `progress` is
    called with the checkpoints read and their number.
    """

    glob: str | None = None
    layout: str | None = None
    jobs: int | None = None
    ray: str | None = None
    progress: Progress = field(default=ignore_progress, compare=False)


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The checkpoints of one run in training order; `step_from` is the source of all steps.

    `notes` name the checkpoints in the folder that are not part of the run. `reading` is how the values of
    members were read that have a column.
    """

    path: str
    members: tuple[RunMember, ...]
    step_from: str | None
    notes: tuple[str, ...]
    reading: RunReading = RunReading()

    def step(self, member: RunMember) -> int | None:
        """Return the training step of a checkpoint."""
        return None if self.step_from is None else member.counts.get(self.step_from)


def order_members(
    path: str, members: Sequence[RunMember], notes: Sequence[str], reading: RunReading
) -> RunFiles | None:
    """Return the run of these checkpoints; None if fewer than two of one kind have different steps."""
    kind = _common_kind(members)
    if kind is None:
        return None
    run = [member for member in members if _is_of(member, kind)]
    left_out = [_left_out(member, kind) for member in members if not _is_of(member, kind)]
    source = training_counters.most_common_source([member.counts for member in run if member.error is None])
    steps = [member.counts.get(source) for member in run if member.error is None] if source else []
    if len({step for step in steps if step is not None}) < 2:
        return None
    return RunFiles(path, tuple(_training_order(run, source)), source, (*notes, *left_out), reading)


def _training_order(run: Sequence[RunMember], source: str | None) -> list[RunMember]:
    """Return the checkpoints by step, then by name.

    One without a step (damaged) is where the number in its name puts it, else last.
    """
    named = sorted(run, key=lambda member: natural_sort_key(member.path))
    known = sorted(
        (row for row in named if (source or "") in row.counts), key=lambda member: member.counts[source or ""]
    )
    for member in (member for member in named if (source or "") not in member.counts):
        number = member.counts.get(training_counters.NAME)
        later = (
            at
            for at, member in enumerate(known)
            if number is not None and member.counts.get(training_counters.NAME, -1) > number
        )
        known.insert(next(later, len(known)), member)
    return known


_Kind = tuple[str | None, str | None]


def _common_kind(members: Sequence[RunMember]) -> _Kind | None:
    """Return format and layout of the run: those of most checkpoints, agents before other files."""
    kinds = Counter((member.format, member.layout) for member in members if member.error is None)
    return max(kinds, key=lambda kind: (kind[1] is not None, kinds[kind]), default=None)


def _is_of(member: RunMember, kind: _Kind) -> bool:
    """Return whether a checkpoint belongs to the run; a damaged one does if its name has a step."""
    if member.error is not None:
        return member.format in (None, kind[0]) and training_counters.NAME in member.counts
    return (member.format, member.layout) == kind


def _left_out(member: RunMember, kind: _Kind) -> str:
    name = os.path.basename(member.path)
    if member.error is not None:
        return f"{name} is left out: {describe_error(member.error)}"
    own, run_kind = (" ".join(filter(None, names)) for names in ((member.format, member.layout), kind))
    return f"{name} ({own}) is left out: the run has checkpoints of another kind ({run_kind})"
