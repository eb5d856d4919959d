"""Follow a training run over its checkpoints: counters, layer norms and updates, findings, logged returns."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise, repeat
from typing import Any

import numpy as np

from ckpttool.commands.doctor import examine_agent
from ckpttool.commands.stats import compute_stats
from ckpttool.core import deferred, filesystem, urls
from ckpttool.core.atomic_write import Progress, WorkerThread, ignore_progress, report_part
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.digests import DigestRecorder
from ckpttool.core.errors import ChangedError, CkpttoolError, is_system_error, suppress_refusals
from ckpttool.core.filesystem import list_names
from ckpttool.core.source import File, Shape
from ckpttool.core.text import describe_error, describe_record, natural_sort_key, replace_nonfinite
from ckpttool.core.tree import Leaf, Path
from ckpttool.evaluation.logged_returns import find_logs
from ckpttool.evaluation.training_logs import TrainingLogs
from ckpttool.libraries.recognize import recognize_checkpoint
from ckpttool.libraries.schema import RecognizedAgent
from ckpttool.listing import training_counters
from ckpttool.listing.contents import CheckpointSummary, summarize_recognized
from ckpttool.listing.findings import Finding
from ckpttool.listing.paths import CheckpointEntry, expand_paths
from ckpttool.listing.processes import count_jobs, one_checkpoint, run_tasks
from ckpttool.listing.training_counters import step_columns, step_in_name
from ckpttool.verification.array_differences import Values, iter_values
from ckpttool.verification.moments import euclidean_norm

# Folders that hold one checkpoint each, by training step: `checkpoint-500/`, `global_step1000/`. Other
# numbers may count seeds or runs.
_STEP_FOLDER = deferred.compile(
    r"(?:.*[-_.])?(?:checkpoint|ckpt|(?:global_?)?step|iter|epoch)s?[-_=]?[0-9]+\Z", re.I
)
_MODELS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors")


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


def find_run(path: str, layout: str | None = None, reading: RunReading | None = None) -> RunFiles | None:
    """Return the run in a folder: two or more checkpoints of one format and layout at different steps.

    None for a file, a folder that is one checkpoint, several runs, and checkpoints without an order. With a
    `reading`, checkpoints that are named by different steps, most likely a run, are read in the same pass
    that opens them. Raise the errors of the operating system.
    """
    if urls.is_url(path) or not filesystem.isdir(path):
        return None
    entries, notes = _folder_entries(path)
    if len(entries) < 2:
        return None
    how = reading or RunReading(layout=layout)
    named = {_named_step(entry.path): entry for entry in entries}
    ordered = reading is not None and None not in named and len(named) == len(entries)
    if ordered:
        entries = [entry for _, entry in sorted(named.items(), key=lambda pair: pair[0] or 0)]
    members = list(_read_members(entries, None, how, values=ordered))
    kind = _common_kind(members)
    if kind is None:
        return None
    run = [member for member in members if _is_of(member, kind)]
    notes += [_left_out(member, kind) for member in members if not _is_of(member, kind)]
    source = training_counters.most_common_source([member.counts for member in run if member.error is None])
    steps = [member.counts.get(source) for member in run if member.error is None] if source else []
    if len({step for step in steps if step is not None}) < 2:
        return None
    return RunFiles(path, tuple(_training_order(run, source)), source, tuple(notes), how)


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


def _folder_entries(path: str) -> tuple[list[CheckpointEntry], list[str]]:
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


_Previous = tuple[str, Checkpoint, Mapping[Path, np.ndarray]]
"""the checkpoint before another one: its path, what it contains, and parameters that were read, by path"""
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
        before: _Previous | None = None
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
    named = None if entry.found is None else entry.found.format.NAME
    return RunMember(entry, named, None, _named_counts(entry.path), 0, error)


def _named_counts(path: str) -> dict[str, int]:
    return {} if (step := _named_step(path)) is None else {training_counters.NAME: step}


def _named_step(path: str) -> int | None:
    """Return the step in the name of a checkpoint, else in that of its folder (`checkpoint-500/model.pt`)."""
    step = step_in_name(os.path.basename(path))
    folder = os.path.basename(os.path.dirname(path))
    return step_in_name(folder) if step is None and _STEP_FOLDER.fullmatch(folder) else step


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


# Bytes that wait to be hashed.
_BACKLOG = 4 << 20
# Bytes of small parameters that stay in memory for the next checkpoint; others are read again.
_KEPT = 1 << 20
# Checkpoints named in a note.
_NAMED = 5


@dataclass(frozen=True, slots=True)
class LayerHistory:
    """Parameters of one module over the checkpoints of a run.

    `norms` are Euclidean norms |W[t]| of all its parameters together, None for an unreadable checkpoint.
    `changes` are |W[t] - W[t-1]|: None also for the first checkpoint and where the parameters of the two
    differ in names or shapes.
    """

    path: str
    tensors: int
    parameters: int
    norms: tuple[float | None, ...]
    changes: tuple[float | None, ...]

    @property
    def updates(self) -> tuple[float | None, ...]:
        """Changes divided by the norms before them: infinite after a norm of zero, 0 without any change."""
        return tuple(map(_relative_change, (None, *self.norms[:-1]), self.changes))

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        document: dict[str, Any] = replace_nonfinite(
            {
                "path": self.path,
                "tensors": self.tensors,
                "parameters": self.parameters,
                "norms": list(self.norms),
                "updates": list(self.updates),
            }
        )
        return document


@dataclass(slots=True)
class LayerSums:
    """Norms of all parameters of one layer in one checkpoint, and of their change.

    `apart` is None if the change of some tensor is unknown.
    """

    shapes: dict[str, Shape] = field(default_factory=dict)
    norm: float = 0.0
    apart: float | None = 0.0


class _DriftRecorder:
    """Sums of each layer of one checkpoint; each array is compared with the one `before` while in memory."""

    def __init__(self, checkpoint: Checkpoint, before: _Previous | None) -> None:
        self.layers: dict[str, LayerSums] = {}
        self.before = before
        self.values: dict[Path, np.ndarray] = {}
        """parameters for the comparison with the next checkpoint, together at most `_KEPT` bytes"""
        self._room = _KEPT
        self._names = checkpoint.tree.names

    def add(self, at: Path, leaf: Leaf, array: Values) -> None:
        """Add one array."""
        if leaf.role != "parameter" or array.dtype.kind == "b":
            return
        layer, _, name = self._names[at].rpartition("/")
        sums = self.layers.setdefault(layer, LayerSums())
        sums.shapes[name] = leaf.shape
        sums.norm = math.hypot(sums.norm, _norm(array))
        if isinstance(array, np.ndarray) and array.nbytes <= self._room:
            self.values[at] = array
            self._room -= array.nbytes
        old = None if self.before is None else self.before[1].tree.get(at)
        if not isinstance(old, Leaf) or old.shape != leaf.shape or old.dtype != leaf.dtype:
            sums.apart = None
        elif sums.apart is not None and self.before is not None:
            values = self.before[2].get(at)
            with suppress_refusals(self._forget):
                sums.apart = math.hypot(sums.apart, _norm(array, old.values() if values is None else values))

    def _forget(self) -> None:
        """Drop the checkpoint before, whose values are unreadable: all changes are unknown."""
        self.before = None

    def finish(self) -> dict[str, LayerSums]:
        """Return the sums of all layers."""
        for sums in self.layers.values() if self.before is None else ():
            sums.apart = None
        return self.layers


def _find_reshaped(columns: Sequence[Mapping[str, LayerSums] | None]) -> list[int]:
    """Return the columns whose parameters differ in names or shapes from those before."""
    return [
        at
        for at, (before, now) in enumerate(pairwise(columns), 1)
        if before is not None and now is not None and _shapes(before) != _shapes(now)
    ]


def _trace_layers(columns: Sequence[Mapping[str, LayerSums] | None]) -> tuple[LayerHistory, ...]:
    """Return the history of each layer, in the order of the checkpoints' tensors."""
    order = dict.fromkeys(layer for column in reversed(columns) for layer in column or ())
    return tuple(_layer_history(layer, columns) for layer in order)


def _shapes(column: Mapping[str, LayerSums]) -> dict[str, dict[str, Shape]]:
    return {layer: sums.shapes for layer, sums in column.items()}


def _layer_history(layer: str, columns: Sequence[Mapping[str, LayerSums] | None]) -> LayerHistory:
    layers_by_step = [None if column is None else column.get(layer) for column in columns]
    last = next(sums for sums in reversed(layers_by_step) if sums is not None)
    norms = tuple(None if sums is None else sums.norm for sums in layers_by_step)
    changes = tuple(map(_change, (None, *layers_by_step[:-1]), layers_by_step))
    sizes = sum(math.prod(shape) for shape in last.shapes.values())
    return LayerHistory(layer, len(last.shapes), sizes, norms, changes)


def _change(before: LayerSums | None, now: LayerSums | None) -> float | None:
    known = before is not None and now is not None and before.shapes == now.shapes
    return now.apart if known and now is not None else None


def _relative_change(before: float | None, change: float | None) -> float | None:
    if before is None or change is None:
        return None
    if before == 0:
        return math.inf if change else 0.0
    return change / before


def _norm(array: Values, other: Values | None = None) -> float:
    """Return the Euclidean norm of an array, or of its difference from another one of its shape."""
    total = 0.0
    pairs = zip(iter_values(array), repeat(None) if other is None else iter_values(other), strict=False)
    for values, before in pairs:
        piece = _to_real(values)
        if before is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                piece = piece - _to_real(before)
        total = math.hypot(total, euclidean_norm(piece))
    return total


def _to_real(array: np.ndarray) -> np.ndarray:
    """Return real float64 numbers; of complex ones, real and imaginary parts."""
    if array.dtype.kind == "c":
        return array.astype(np.complex128).view(np.float64)
    return array.astype(np.float64)


def fold_layers(layers: Sequence[LayerHistory], most: int) -> tuple[tuple[LayerHistory, ...], int]:
    """Join layers into the modules above them until at most `most` rows remain; return these and the depth.

    The depth is 0 if no layer was joined. Norms and updates of a module are those of all its parameters.
    """
    if len(layers) <= most:
        return tuple(layers), 0
    deepest = max(layer.path.count("/") for layer in layers) + 1
    for depth in range(deepest, 0, -1):
        groups: dict[str, list[LayerHistory]] = {}
        for layer in layers:
            groups.setdefault("/".join(layer.path.split("/")[:depth]), []).append(layer)
        if len(groups) <= most or depth == 1:
            return tuple(_join_layers(path, group) for path, group in groups.items())[:most], depth
    return tuple(layers[:most]), 1


def _join_layers(path: str, layers: Sequence[LayerHistory]) -> LayerHistory:
    totals = (sum(layer.tensors for layer in layers), sum(layer.parameters for layer in layers))
    norms, changes = [], []
    for at in range(len(layers[0].norms)):
        sizes = [layer.norms[at] for layer in layers if layer.norms[at] is not None]
        norms.append(_root_of_squares(sizes) if sizes else None)
        changes.append(_root_of_squares([layer.changes[at] for layer in layers]))
    return LayerHistory(path, *totals, tuple(norms), tuple(changes))


def _root_of_squares(values: Sequence[float | None]) -> float | None:
    """Return the norm of all parts from the norms of each; None if one is unknown."""
    known = [value for value in values if value is not None]
    return math.hypot(*known) if len(known) == len(values) else None


# What differs between sentences about different counts: numbers, and words in singular or plural.
_NUMBER = deferred.compile(r"-?[0-9][0-9,.]*(?:e[-+]?[0-9]+)?|\b(?:is|are|its|their|was|were|has|have)\b|s\b")


@dataclass(frozen=True, slots=True)
class FindingHistory:
    """One finding of doctor; `texts` has its sentences at each checkpoint, none where it does not occur.

    Findings that differ only in numbers are one: those of several tensors, and of several checkpoints.
    """

    topic: str
    texts: tuple[tuple[str, ...], ...]
    fix: str | None

    @property
    def sentences(self) -> tuple[str | None, ...]:
        """The text at each checkpoint, None where there is none."""
        return tuple("; ".join(text) if text else None for text in self.texts)

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"topic": self.topic, "sentences": list(self.sentences), "fix": self.fix}


def _trace_findings(columns: Sequence[Sequence[Finding] | None]) -> tuple[FindingHistory, ...]:
    """Return each finding with its text at each checkpoint; None columns are unreadable checkpoints."""
    histories: dict[tuple[str, str], list[tuple[str, ...]]] = {}
    fixes: dict[tuple[str, str], str | None] = {}
    for at, column in enumerate(columns):
        for finding in column or ():
            key = finding.topic, _NUMBER.sub("#", finding.sentence)
            texts = histories.setdefault(key, [()] * len(columns))
            texts[at] = (*texts[at], finding.sentence)
            fixes[key] = finding.fix
    return tuple(FindingHistory(key[0], tuple(texts), fixes[key]) for key, texts in histories.items())


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
        _trace_layers(sums),
        _trace_findings([None if column is None else column.findings for column in columns]),
        logs,
        run.step_from,
        summary,
        column.sha256,
        tuple(file for _, column in readable for file in column.files),
        (
            *run.notes,
            *_reshaped_notes(members, _find_reshaped(sums)),
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
    before: _Previous | None,
    glob: str | None,
    progress: Progress,
) -> tuple[MemberColumn, Mapping[Path, np.ndarray]]:
    """Read a checkpoint for its digest, its findings and its changes since the one `before`.

    Return parameters for the next one, too.
    """
    drift = _DriftRecorder(checkpoint, before)
    try:
        with WorkerThread(_BACKLOG) as lane:
            recorder = DigestRecorder(checkpoint, lane)
            values = compute_stats(
                recorder.checkpoint, binding, glob, progress, observe=drift.add, histograms=False
            )
            sha256 = recorder.digest().sha256
        found = examine_agent(checkpoint, binding, values, sha256)
    except CkpttoolError as error:
        if is_system_error(error):
            raise
        return MemberColumn(None, {}, error=error), {}
    compared = None if drift.before is None else drift.before[0]
    layers = drift.finish()
    column = MemberColumn(compared, layers, sha256, found.findings, checkpoint.files, found.notes)
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
