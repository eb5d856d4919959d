"""Follow a training run over its checkpoints: counters, layer norms and updates, findings, logged returns."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from ckpttool.commands.doctor import examine_agent
from ckpttool.commands.stats import compute_stats
from ckpttool.core import filesystem, urls
from ckpttool.core.atomic_write import Progress, WorkerThread, ignore_progress, report_part
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.digests import DigestRecorder
from ckpttool.core.errors import ChangedError, CkpttoolError, is_system_error, suppress_refusals
from ckpttool.core.source import File
from ckpttool.core.text import describe_error, describe_record
from ckpttool.core.tree import Path
from ckpttool.evaluation.logged_returns import find_logs
from ckpttool.evaluation.training_logs import TrainingLogs
from ckpttool.libraries.recognize import recognize_checkpoint
from ckpttool.libraries.schema import RecognizedAgent
from ckpttool.listing import training_counters
from ckpttool.listing.contents import CheckpointSummary, summarize_recognized
from ckpttool.listing.paths import CheckpointEntry
from ckpttool.listing.processes import count_jobs, one_checkpoint, run_tasks
from ckpttool.listing.training_counters import step_columns
from ckpttool.listing.training_runs import folder_entries, named_step
from ckpttool.verification.run_histories import (
    DriftRecorder,
    FindingHistory,
    LayerHistory,
    PreviousCheckpoint,
    find_reshaped,
    trace_findings,
    trace_layers,
)
from ckpttool.verification.run_members import MemberColumn, RunFiles, RunMember, RunReading, order_members


def find_run(path: str, layout: str | None = None, reading: RunReading | None = None) -> RunFiles | None:
    """Return the run in a folder: two or more checkpoints of one format and layout at different steps.

    None for a file, a folder that is one checkpoint, several runs, and checkpoints without an order. With a
    `reading`, checkpoints that are named by different steps, most likely a run, are read in the same pass
    that opens them. Raise the errors of the operating system.
    """
    if urls.is_url(path) or not filesystem.isdir(path):
        return None
    entries, notes = folder_entries(path)
    if len(entries) < 2:
        return None
    how = reading or RunReading(layout=layout)
    named = {named_step(entry.path): entry for entry in entries}
    ordered = reading is not None and None not in named and len(named) == len(entries)
    if ordered:
        entries = [entry for _, entry in sorted(named.items(), key=lambda pair: pair[0] or 0)]
    members = list(_read_members(entries, None, how, values=ordered))
    return order_members(path, members, notes, how)


# Checkpoints of one task of a process: the one before the first is opened for each task, too.
_TOGETHER = 16


def _read_members(
    entries: Sequence[CheckpointEntry], before: CheckpointEntry | None, how: RunReading, *, values: bool
) -> Iterator[RunMember]:
    """Yield the checkpoints, opened once each, in this process or in several.

    With `values` they are also read, and each is compared with the one before it.
    """
    # Of a remote run, other processes would fetch the same files again.
    remote = any(filesystem.find_store(entry.path) is not None for entry in entries)
    alone = remote or (how.ray is None and count_jobs(len(entries), how.jobs) < 2)
    size = len(entries) if alone else _TOGETHER
    tasks = []
    for at in range(0, len(entries), size):
        last = entries[at - 1] if at else before
        tasks.append(_ReadTask(tuple(entries[at : at + size]), last, how, values))
    if alone:
        for task in tasks:
            yield from task.read(how.progress)
        return
    done = 0
    tasks = [task._replace(how=replace(how, progress=ignore_progress)) for task in tasks]
    paths = [entry.path for entry in entries]
    jobs = how.jobs if how.ray is not None else count_jobs(len(entries), how.jobs)
    for members in run_tasks(tasks, paths, jobs, how.ray):
        yield from members
        done += len(members)
        how.progress(done, len(entries))


class _ReadTask(NamedTuple):
    """Neighboring checkpoints that one process opens, and reads with `values`."""

    entries: tuple[CheckpointEntry, ...]
    before: CheckpointEntry | None
    how: RunReading
    values: bool

    def run(self) -> list[RunMember]:
        """Return the checkpoints."""
        return list(self.read(ignore_progress))

    def read(self, progress: Progress) -> Iterator[RunMember]:
        """Yield the checkpoints; `progress` counts what is read of all."""
        before: PreviousCheckpoint | None = None
        if self.values and self.before is not None:
            with suppress_refusals():
                before = self.before.path, self.before.open(), {}
        for number, entry in enumerate(self.entries):
            with one_checkpoint():
                member, opened = _open_member(entry, self.how.layout)
                if opened is not None and self.values:
                    moving = report_part(progress, number, len(self.entries))
                    column, values = _read_column(*opened, before, self.how.glob, moving)
                    member = replace(member, column=column)
                    before = None if column.error is not None else (entry.path, opened[0], values)
                elif self.values:
                    before = None
            yield member

    def single(self) -> list[_ReadTask]:
        """Return a task for each checkpoint."""
        pairs = pairwise((self.before, *self.entries))
        return [self._replace(entries=(entry,), before=last) for last, entry in pairs if entry is not None]

    def failed(self, error: CkpttoolError) -> list[RunMember]:
        """Return the only checkpoint, which ended its process."""
        (entry,) = self.entries
        return [_unreadable_member(entry, error.located(file=entry.path))]


def _open_member(
    entry: CheckpointEntry, layout: str | None
) -> tuple[RunMember, tuple[Checkpoint, RecognizedAgent | None] | None]:
    try:
        checkpoint = entry.open()
        binding = recognize_checkpoint(checkpoint, layout)
        counts = _named_counts(entry.path) | training_counters.count_training(checkpoint, binding)
    except CkpttoolError as error:
        if is_system_error(error):
            raise
        return _unreadable_member(entry, error), None
    named = None if binding is None else binding.layout
    member = RunMember(entry, checkpoint.format, named, counts, checkpoint.stored_nbytes)
    return member, (checkpoint, binding)


def _unreadable_member(entry: CheckpointEntry, error: CkpttoolError) -> RunMember:
    named = None if entry.location is None else entry.location.format.NAME
    return RunMember(entry, named, None, _named_counts(entry.path), 0, error)


def _named_counts(path: str) -> dict[str, int]:
    return {} if (step := named_step(path)) is None else {training_counters.NAME: step}


# Bytes that wait to be hashed.
_BACKLOG = 4 << 20
# Checkpoints named in a note.
_NAMED = 5


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """One checkpoint of the run; `error` is the reason why it is unreadable."""

    path: str
    step: int | None
    counts: Mapping[str, int]
    nbytes: int
    sha256: str | None
    findings: int
    error: str | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        document = {"path": urls.display_url(self.path), "step": self.step, **step_columns(self.counts)}
        return document | {name: getattr(self, name) for name in ("nbytes", "sha256", "findings", "error")}


@dataclass(frozen=True, slots=True)
class RunHistory:
    """Everything that is known of a run from its checkpoints and the logs beside them.

    All columns are in the order of `checkpoints`. `latest` is the last readable checkpoint, `sha256` its
    digest; `files` are all files that were read.
    """

    __repr__ = describe_record

    path: str
    checkpoints: tuple[RunCheckpoint, ...]
    layers: tuple[LayerHistory, ...]
    findings: tuple[FindingHistory, ...]
    logs: TrainingLogs
    step_from: str | None
    latest: CheckpointSummary
    sha256: str
    files: tuple[File, ...]
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "step_from": self.step_from,
            "checkpoints": [checkpoint.document() for checkpoint in self.checkpoints],
            "layers": [layer.document() for layer in self.layers],
            "findings": [finding.document() for finding in self.findings],
            **self.logs.document(),
        }


def follow_run(
    run: RunFiles,
    *,
    glob: str | None = None,
    layout: str | None = None,
    progress: Progress = ignore_progress,
) -> RunHistory:
    """Read the checkpoints of a run in training order, each tensor once for itself and once for its update.

    Few tensors are in memory: those of two neighboring checkpoints that are compared, and those whose digest
    is not finished. `glob` keeps the tensors whose path matches. A damaged checkpoint is a column without
    values; raise its error if there is no other.
    """
    members = _read_rest(run, RunReading(glob, layout, run.reading.jobs, run.reading.ray, progress))
    columns = [_readable_column(member) for member in members]
    readable = [(name, column) for name, column in zip(members, columns, strict=True) if column is not None]
    if not readable:
        raise next(error for error in map(_reason, members) if error is not None)
    latest, column = readable[-1]
    summary = _summarize_latest(latest.entry, column, layout, glob)
    logs = find_logs(summary.checkpoint.path)
    sums = [None if column is None else column.layers for column in columns]
    return RunHistory(
        run.path,
        tuple(map(_checkpoint_row, members, map(run.step, members))),
        trace_layers(sums),
        trace_findings([None if column is None else column.findings for column in columns]),
        logs,
        run.step_from,
        summary,
        column.sha256,
        tuple(file for _, column in readable for file in column.files),
        (
            *run.notes,
            *_reshaped_notes(members, find_reshaped(sums)),
            *logs.notes,
            *summary.notes,
            *column.notes,
        ),
    )


def _read_rest(run: RunFiles, how: RunReading) -> list[RunMember]:
    """Return the members of a run with the values of all, each compared with the one before it.

    Those that were read when they were opened, and compared with another one, are read again.
    """
    members = list(run.members)
    if run.reading != how:
        members = [replace(member, column=None) for member in members]
    pairs = pairwise((None, *members))
    done = [name is not None and (name.error is not None or name.follows(last)) for last, name in pairs]
    for known, group in groupby(range(len(members)), done.__getitem__):
        numbers = [] if known else list(group)
        if numbers:
            before = members[numbers[0] - 1].entry if numbers[0] else None
            entries = [members[at].entry for at in numbers]
            for at, read in zip(numbers, _read_members(entries, before, how, values=True), strict=True):
                members[at] = replace(members[at], error=read.error, column=read.column)
    return members


def _readable_column(member: RunMember) -> MemberColumn | None:
    """Return what is known of the values of a checkpoint; None if they are unreadable."""
    return member.column if member.column is not None and member.column.error is None else None


def _reason(member: RunMember) -> CkpttoolError | None:
    """Return the error that made a checkpoint unreadable."""
    return member.error or (None if member.column is None else member.column.error)


def _summarize_latest(
    entry: CheckpointEntry, column: MemberColumn, layout: str | None, glob: str | None
) -> CheckpointSummary:
    """Return the listing of the last checkpoint; raise ChangedError if its files have changed."""
    checkpoint = entry.open()
    for file, read in zip(checkpoint.files, column.files, strict=False):
        if file != read:
            raise ChangedError("the file changed while the run was read", file=file.path)
    return summarize_recognized(checkpoint, recognize_checkpoint(checkpoint, layout), glob)


def _reshaped_notes(members: Sequence[RunMember], columns: Sequence[int]) -> Iterator[str]:
    """Yield a note on checkpoints of another architecture: their updates are unknown."""
    if columns:
        names = ", ".join(os.path.basename(members[at].path) for at in columns[:_NAMED])
        more = f" and {len(columns) - _NAMED:,} more" if len(columns) > _NAMED else ""
        yield (
            f"the parameters of {names}{more} differ in names or shapes from those of the checkpoint before: "
            "their updates are unknown"
        )


def _read_column(
    checkpoint: Checkpoint,
    binding: RecognizedAgent | None,
    before: PreviousCheckpoint | None,
    glob: str | None,
    progress: Progress,
) -> tuple[MemberColumn, Mapping[Path, np.ndarray]]:
    """Read a checkpoint for its digest, its findings and its changes since the one `before`.

    Return parameters for the next one, too.
    """
    drift = DriftRecorder(checkpoint, before)
    try:
        with WorkerThread(_BACKLOG) as lane:
            recorder = DigestRecorder(checkpoint, lane)
            values = compute_stats(
                recorder.checkpoint, binding, glob, progress, observe=drift.add, histograms=False
            )
            sha256 = recorder.digest().sha256
        examined = examine_agent(checkpoint, binding, values, sha256)
    except CkpttoolError as error:
        if is_system_error(error):
            raise
        return MemberColumn(None, {}, error=error), {}
    compared = None if drift.before is None else drift.before[0]
    layers = drift.finish()
    column = MemberColumn(compared, layers, sha256, examined.findings, checkpoint.files, examined.notes)
    return column, drift.values


def _checkpoint_row(member: RunMember, step: int | None) -> RunCheckpoint:
    column, error = _readable_column(member), _reason(member)
    return RunCheckpoint(
        member.path,
        step,
        member.counts,
        member.nbytes,
        None if column is None else column.sha256,
        0 if column is None else len(column.findings),
        None if error is None else describe_error(error),
    )
