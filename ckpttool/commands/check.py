"""Check checkpoint files for code, damage and values that are not finite."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from ckpttool.commands import stats
from ckpttool.core import code_references, filesystem, plugins, urls
from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.code_references import CodeReference
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import CkpttoolError, UsageError, from_system_error
from ckpttool.core.text import describe_record, format_count, render_record
from ckpttool.core.tree import Leaf, Path
from ckpttool.formats import detect
from ckpttool.libraries.recognize import recognize_checkpoint
from ckpttool.listing import audit
from ckpttool.listing.candidates import (
    CheckCandidate,
    collect_candidates,
    describe_stray_file,
    file_identity,
    find_other_formats,
    find_unclaimed_code,
)
from ckpttool.listing.findings import Finding, data_only_command, unjudged_findings, weightless_findings
from ckpttool.listing.processes import count_jobs, one_checkpoint, run_tasks
from ckpttool.listing.shape_record import ShapeRecord, find_drift
from ckpttool.verification import array_differences, moments
from ckpttool.verification.array_differences import read_values

_SHOWN = 8
_NAMED = 100  # maximum number of skipped names in the document


@dataclass(frozen=True, slots=True)
class CheckpointVerdict:
    """Result for one checkpoint: its findings, and the error that kept it from being read completely.

    `file` is where findings are shown: the path, or the first file of a folder or prefix.
    """

    path: str
    format: str | None = None
    layout: str | None = None
    tensors: int = 0
    findings: tuple[Finding, ...] = ()
    error: CkpttoolError | None = None
    file: str = ""

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": self.path,
            "format": self.format,
            "layout": self.layout,
            "tensors": self.tensors,
            "findings": [finding.document() for finding in self.findings],
            "error": None if self.error is None else self.error.document(),
        }


class UncheckedFile(NamedTuple):
    """A model that no format reads, and the reason; a file, or a folder."""

    path: str
    error: CkpttoolError

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"path": urls.display_url(self.path), "message": self.error.message, "hint": self.error.hint}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """All checkpoints found under the paths, in order, each once.

    `unchecked` are models that no format reads; `skipped` lists the other files.
    """

    __repr__ = describe_record
    _repr_html_ = render_record

    checkpoints: tuple[CheckpointVerdict, ...]
    skipped: tuple[str, ...] = ()
    unchecked: tuple[UncheckedFile, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether everything was read and nothing was found."""
        return not self.unchecked and not any(saved.findings or saved.error for saved in self.checkpoints)

    @property
    def status(self) -> int:
        """The exit status: 2 if something could not be read or checked, 1 for a finding."""
        return 2 if self.failed or self.unchecked else 0 if self.clean else 1

    @property
    def failed(self) -> tuple[CheckpointVerdict, ...]:
        """The checkpoints that could not be read."""
        return tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.error is not None)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        names = [urls.display_url(name) for name in self.skipped[:_NAMED]]
        return {
            "clean": self.clean,
            "checkpoints": [checkpoint.document() for checkpoint in self.checkpoints],
            "skipped": {"count": len(self.skipped), "names": names},
            "not_checked": [file.document() for file in self.unchecked],
        }


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What each checkpoint is checked for.

    With `strict`, anything but plain data is a finding; with `numbers`, every tensor is read, its checksum
    verified and its values checked to be finite. `layout` is the layout that must match, `recorded` the
    expected tensors. `allowed` are dotted names of modules, classes and functions that pickles may use
    besides the built-in list.
    """

    strict: bool = False
    numbers: bool = True
    layout: str | None = None
    recorded: ShapeRecord | None = None
    allowed: frozenset[str] = frozenset()


def check(
    paths: str | Sequence[str],
    wanted: CheckOptions | None = None,
    progress: Progress = ignore_progress,
    *,
    jobs: int | None = None,
    ray: str | None = None,
) -> CheckResult:
    """Check every checkpoint found under the paths, or under one path (see `collect_candidates`).

    A checkpoint that cannot be read is reported with the others. A file of a multi-file checkpoint is
    checked with it, once. Raise UsageError for an unknown layout, and NotFoundError for a pattern without a
    match.

    Args:
        paths: One path, or several: files, folders and patterns.
        wanted: What counts as a finding; by default code in pickles, damage, NaNs and infinities.
        progress: Called with the number of checkpoints that were checked, and of all.
        jobs: Processes; by default one per core if there are at least MANY checkpoints, else none but this.
        ray: Address of a Ray cluster whose processes check the checkpoints.

    >>> import ckpttool
    >>> checked = ckpttool.check(["sample_ckpts/td3_pendulum_torch"])
    >>> checked.clean, len(checked.checkpoints)
    (True, 6)
    """
    wanted = wanted or CheckOptions()
    if wanted.layout is not None:
        plugins.find("layouts", wanted.layout)
    with code_references.allowing(wanted.allowed):
        return _check_all([paths] if isinstance(paths, str) else paths, wanted, progress, (jobs, ray))


def _check_all(
    paths: Sequence[str],
    check_options: CheckOptions,
    progress: Progress,
    spread: tuple[int | None, str | None],
) -> CheckResult:
    collected = collect_candidates(paths)
    ordered = collected.ordered()
    results: list[tuple[CheckCandidate, CheckpointVerdict]] = []
    judged_files = _JudgedFiles()
    with contextlib.closing(_judge_ahead(ordered, check_options, *spread)) as judged:
        for number, (item, known) in enumerate(zip(ordered, judged, strict=True)):
            if not judged_files.has(item.path):
                verdicts = [(item, known or _judge_candidate(item, check_options))]
                if verdicts == [(item, None)]:
                    verdicts = [(one, _judge_candidate(one, check_options)) for one in collected.settle(item)]
                for one, judgement in verdicts:
                    if judgement is not None:
                        results.append((one, judgement[0]))
                        judged_files.add(judgement[1])
            progress(number + 1, len(ordered))
    failed = {file_identity(candidate.path) for candidate, checked in results if checked.error is not None}
    for path, location in collected.parts.items():
        wrong = (
            None if judged_files.has(path) or file_identity(location) in failed else describe_stray_file(path)
        )
        if wrong is not None:
            results.append((collected.beside(path, location), _unused_file_verdict(path, *wrong)))
    results.sort(key=lambda pair: pair[0].order)
    skipped = (name for name in collected.skipped if not judged_files.has(name))
    unchecked = (
        UncheckedFile(*item) for item in collected.unchecked.items() if not judged_files.has(item[0])
    )
    return CheckResult(tuple(checked for _, checked in results), tuple(skipped), tuple(unchecked))


_TOGETHER = 8  # checkpoints of one task of a process
_Judged = tuple[CheckpointVerdict, tuple[str, ...]]
"""a verdict, and the identities of the files that were read for it"""


def _judge_ahead(
    ordered: Sequence[CheckCandidate], check_options: CheckOptions, jobs: int | None, ray: str | None
) -> Generator[_Judged | None, None, None]:
    """Yield what other processes found for each candidate; None for one that is judged in this one.

    These are the candidates on remote sites and in archives, pending ones that turn out to be of several or
    no formats, and all of them if there is one job.
    """
    if ray is None and (jobs := count_jobs(len(ordered), jobs)) < 2:
        yield from itertools.repeat(None, len(ordered))
        return
    local = [candidate for candidate in ordered if filesystem.find_store(candidate.path) is None]
    tasks = [_CheckTask(local[at : at + _TOGETHER], check_options) for at in range(0, len(local), _TOGETHER)]
    paths = [candidate.path for candidate in local]
    judged = itertools.chain.from_iterable(run_tasks(tasks, paths, jobs, ray))
    for candidate in ordered:
        yield next(judged) if filesystem.find_store(candidate.path) is None else None


class _CheckTask(NamedTuple):
    """Candidates for another process."""

    candidates: Sequence[CheckCandidate]
    options: CheckOptions

    def run(self) -> list[_Judged | None]:
        """Return the verdict on each."""
        with code_references.allowing(self.options.allowed):
            return [_judge_candidate(candidate, self.options) for candidate in self.candidates]

    def single(self) -> list[_CheckTask]:
        """Return a task for each candidate."""
        return [self._replace(candidates=[candidate]) for candidate in self.candidates]

    def failed(self, error: CkpttoolError) -> list[_Judged | None]:
        """Return the verdict on the only candidate: it ended its process."""
        (candidate,) = self.candidates
        reason = error.located(file=candidate.path)
        return [(CheckpointVerdict(urls.display_url(candidate.path), error=reason, file=candidate.path), ())]


class _JudgedFiles:
    """Files that were checked as part of a checkpoint, so that none is checked twice."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._folders: set[str] = set()

    def add(self, real: Sequence[str]) -> None:
        """Add the identities of a checkpoint's files."""
        self._files.update(real)
        self._folders.update(map(os.path.dirname, real))

    def has(self, path: str) -> bool:
        """Return whether a file, or files of a folder or prefix, were already checked."""
        real = file_identity(path)
        return real in self._files or real in self._folders or f"{real}.index" in self._files


def _unused_file_verdict(
    path: str, references: Sequence[CodeReference], error: CkpttoolError | None
) -> CheckpointVerdict:
    return CheckpointVerdict(
        urls.display_url(path), findings=_code_findings(references), error=error, file=path
    )


def _judge_candidate(candidate: CheckCandidate, check_options: CheckOptions) -> _Judged | None:
    """Return the verdict on a candidate, and the identities of its files if it could be read.

    None for a pending one that is no checkpoint by itself.
    """
    with one_checkpoint():
        located = candidate.locate()
        return None if located is None else _judge_located(located, check_options)


def _judge_located(candidate: CheckCandidate, options: CheckOptions) -> _Judged:
    name = urls.display_url(candidate.path)
    if candidate.error is not None or candidate.location is None:
        findings = _code_findings(candidate.code_references)
        return CheckpointVerdict(name, findings=findings, error=candidate.error, file=candidate.path), ()
    all_findings: list[Finding] = []
    try:
        checkpoint = detect.read_location(candidate.location)
        layout = _judge(checkpoint, options, all_findings)
    except CkpttoolError as error:
        reason = error.located(file=candidate.path)
    except Exception as error:  # noqa: BLE001  # the other files are to be judged whatever this one does
        fault = CkpttoolError(f"unexpected {type(error).__name__}: {error}")
        reason = (from_system_error(error) or fault).located(file=candidate.path)
    else:
        tensors = sum(1 for _ in checkpoint.tree.tensors())
        verdict = CheckpointVerdict(
            urls.display_url(checkpoint.path),
            checkpoint.format,
            layout,
            tensors,
            tuple(all_findings),
            file=_representative_file(checkpoint),
        )
        return verdict, tuple(file_identity(file.path) for file in checkpoint.files)
    kept = tuple(all_findings) or (
        *_code_findings(find_unclaimed_code(candidate.path)),
        *unjudged_findings(find_other_formats(candidate)),
    )
    return CheckpointVerdict(name, findings=kept, error=reason, file=candidate.path), ()


def _representative_file(checkpoint: Checkpoint) -> str:
    """Return one file to represent the checkpoint, because a folder or prefix is not a file."""
    if filesystem.isfile(checkpoint.path) or not checkpoint.files:
        return checkpoint.path
    return checkpoint.files[0].path


def _judge(checkpoint: Checkpoint, check_options: CheckOptions, findings: list[Finding]) -> str | None:
    """Append findings and return the layout; on an error, the findings so far stay in the list."""
    findings += _loading_findings(checkpoint, check_options)
    findings += weightless_findings(checkpoint, values=False)
    layout, misfit = _recognize_layout(checkpoint, check_options.layout)
    findings += misfit
    if check_options.recorded is not None:
        findings += find_drift(checkpoint, layout, check_options.recorded)
    if check_options.numbers:
        findings += _number_findings(checkpoint)
    return layout


def _code_findings(references: Sequence[CodeReference]) -> tuple[Finding, ...]:
    """Return the finding for code in a file that cannot be read as a checkpoint."""
    if not references:
        return ()
    return (
        Finding(
            "loading", audit.summarize_audit(code_references.merge_references(references)).sentence, None
        ),
    )


def _loading_findings(checkpoint: Checkpoint, check_options: CheckOptions) -> Iterator[Finding]:
    worst = code_references.worst_verdict(checkpoint.code_references)
    if worst in code_references.UNSAFE or (check_options.strict and worst != code_references.PLAIN):
        yield Finding(
            "loading",
            audit.summarize_audit(checkpoint.code_references).sentence,
            data_only_command(checkpoint.path),
        )
    yield from unjudged_findings(checkpoint.unjudged)


def _recognize_layout(checkpoint: Checkpoint, layout: str | None) -> tuple[str | None, list[Finding]]:
    """Return the recognised layout, and a finding if it is not the requested one."""
    try:
        binding = recognize_checkpoint(checkpoint, layout)
    except UsageError as error:
        if layout is None:
            raise
        return None, [Finding("layout", error.message)]
    return (None if binding is None else binding.layout), []


def _number_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Read every tensor, one at a time, and yield those with NaN or infinite values."""
    bad: list[tuple[str, str]] = []
    for path, leaf in checkpoint.tree.tensors():
        name = checkpoint.tree.names[path]
        try:
            problem = _describe_nonfinite(path, leaf)
        except CkpttoolError as error:
            raise error.located(path=name) from error
        if problem:
            bad.append((name, problem))
    for name, problem in bad[:_SHOWN]:
        yield Finding("numbers", f"{name}: {problem}")
    if len(bad) > _SHOWN:
        more = format_count(len(bad) - _SHOWN, "more tensor")
        yield Finding("numbers", f"and {more} with NaN or infinite values")


def _describe_nonfinite(path: Path, leaf: Leaf) -> str:
    values = read_values(leaf)
    # Every piece is read, because checksums are verified after the last one.
    if values is None or min(map(moments.is_finite, array_differences.iter_values(values)), default=True):
        return ""
    known = moments.compute_moments(values)
    counts = [
        f"{n:,} {word}" for n, word in stats.count_nonfinite([str(step.value) for step in path], leaf, known)
    ]
    return f"{' and '.join(counts)} of {format_count(known.size, 'number')}" if counts else ""
