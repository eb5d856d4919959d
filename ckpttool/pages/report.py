"""`report`: a self-contained HTML page about one checkpoint, two side by side, or a training run."""

# ruff: noqa: ARG001, D417  # `takes_options` passes the keywords in `options`, and describes them

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.conversion.option_keywords import takes_options
from ckpttool.core import urls
from ckpttool.core.atomic_write import Progress, ignore_progress, require_new, write_file
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import CkpttoolError, UsageError
from ckpttool.core.source import keep_open
from ckpttool.core.text import describe_error, describe_record, replace_nonfinite
from ckpttool.core.tree_views import render_file
from ckpttool.pages.checkpoint_page import ReportContents, ReportInputs, gather_contents, render_page
from ckpttool.pages.options import ReportOptions

if TYPE_CHECKING:
    from ckpttool.evaluation.protocol import EvaluationFailure
    from ckpttool.pages.run_page import RunContents
    from ckpttool.verification.run_members import RunFiles


# Pages are read beside text: a film of this width has about a megabyte.
_FILM_WIDTH = 320


@dataclass(frozen=True, slots=True)
class HtmlReport:
    """Result of writing a report."""

    __repr__ = describe_record
    _repr_html_ = render_file

    file: str
    nbytes: int
    contents: ReportContents
    failed: tuple[EvaluationFailure, ...] = ()
    """checkpoints that did not play"""
    unfilmed: str | None = None
    """why there is no film of the best checkpoint"""

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        contents = self.contents
        comparison, summary = contents.comparison, contents.summary
        return {
            "path": urls.display_url(summary.checkpoint.path),
            "other": None if comparison is None else comparison.diff.right,
            "format": summary.checkpoint.format,
            "layout": summary.layout,
            "sha256": contents.sha256,
            "file": self.file,
            "nbytes": self.nbytes,
            "tensors": len(summary.tensors),
            "values": len(summary.values),
            "findings": len(contents.diagnosis.findings),
            "changes": None if comparison is None else len(comparison.changes),
            "evaluations": len(contents.results.results),
            "conversion": contents.conversion is not None,
            "run": None,
            "notes": [*summary.notes, *contents.diagnosis.notes],
        }


@dataclass(frozen=True, slots=True)
class RunReport:
    """Result of writing the report of a run."""

    __repr__ = describe_record
    _repr_html_ = render_file

    file: str
    nbytes: int
    contents: RunContents
    failed: tuple[EvaluationFailure, ...] = ()
    """checkpoints that did not play"""
    unfilmed: str | None = None
    """why there is no film of the best checkpoint"""

    def document(self) -> dict[str, Any]:
        """Return the JSON document: the keys of a checkpoint's report for the last one, and `run`."""
        from ckpttool.pages.run_page import run_document

        contents = self.contents
        history = contents.history
        summary = history.latest
        return {
            "path": urls.display_url(history.path),
            "other": None,
            "format": summary.checkpoint.format,
            "layout": summary.layout,
            "sha256": history.sha256,
            "file": self.file,
            "nbytes": self.nbytes,
            "tensors": len(summary.tensors),
            "values": len(summary.values),
            "findings": next(row.findings for row in reversed(history.checkpoints) if row.error is None),
            "changes": None,
            "evaluations": len(contents.results.results),
            "conversion": False,
            "run": run_document(contents),
            "notes": list(contents.notes),
        }


def default_report_name(path: str, other: str | None = None) -> str:
    """Return the default file name: the checkpoint's name, in the current folder."""
    meant = [location for location in (path, other) if location is not None]
    names = [
        (urls.base_name(path) if urls.is_elsewhere(path) else os.path.basename(os.path.abspath(path)))
        or "checkpoint"
        for path in meant
    ]
    return f"{'-'.join(names)}.report.html"


@takes_options(ReportOptions)
def report(
    path: str,
    other: str | None = None,
    options: ReportOptions | None = None,
    *,
    out: str | None = None,
    force: bool = False,
    evaluations: Sequence[str] = (),
    video: str | None = None,
    conversion: str | None = None,
    verification: str | None = None,
    glob: str | None = None,
    layout: str | None = None,
    env: str | None = None,
    episodes: int | None = None,
    jobs: int | None = None,
    ray: str | None = None,
    progress: Progress = ignore_progress,
) -> HtmlReport | RunReport:
    """Write a page about the checkpoint at `path`, two checkpoints, or the training run in a folder.

    In a notebook the result is shown as the page itself. Raise TargetExistsError if the file exists, unless
    `force`, UsageError for options that exclude each other, NotACheckpointError for a folder from whose
    checkpoints the caller must choose, and any error of opening, reading and playing.

    Args:
        path: a file, a prefix, or a folder of one or several checkpoints.
        other: a second checkpoint to compare with.
        options: what to show, and the file to write; keywords replace its fields.
        progress: called with the finished and the total amount of work.

    >>> import ckpttool, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = ckpttool.report("sample_ckpts/td3_pendulum_torch", out=os.path.join(folder, "run.html"))
    >>> len(page.contents.history.checkpoints), page.nbytes < 2_000_000
    (6, True)
    """
    options = options or ReportOptions()
    run = find_reported_run(path, other, options, progress)
    shown = [_choose(location) for location in (path, other) if location is not None] if run is None else []
    return write_page(run, shown, options, progress)


def find_reported_run(
    path: str, other: str | None, options: ReportOptions, progress: Progress
) -> RunFiles | None:
    """Return the training run that a report shows, None if it shows one checkpoint or two."""
    from ckpttool.commands.run_history import find_run
    from ckpttool.verification.run_members import RunReading

    if options.out is not None:
        require_new(options.out, force=options.force)  # before minutes of reading
    reading = RunReading(options.glob, options.layout, options.jobs, options.ray, progress)
    run = None if other is not None else find_run(path, options.layout, reading)
    if run is not None:
        _require_run_options(run, options)
    elif options.video is not None:
        what = "--video requires a folder with several checkpoints of one run"
        raise UsageError(what, file=path, hint="omit --video")
    return run


@keep_open()
def write_page(
    run: RunFiles | None, paths: Sequence[str], options: ReportOptions, progress: Progress
) -> HtmlReport | RunReport:
    """Write the page of a run, or of the one or two checkpoints at the paths, and play them for it."""
    with tempfile.TemporaryDirectory() as folder:
        failed: Sequence[EvaluationFailure] = ()
        unfilmed = None
        if options.env is not None:
            name = default_report_name(*paths) if run is None else default_report_name(run.path)
            require_new(options.out or name, force=options.force)  # before hours of playing
            played = paths if run is None else [member.path for member in run.members]
            file, failed, unfilmed = _play(played, options, folder, progress)
            options = replace(options, evaluations=[*options.evaluations, file])
        page = _write(paths, options, progress) if run is None else _write_run(run, options, progress)
    return replace(page, failed=tuple(failed), unfilmed=unfilmed)


def _choose(path: str) -> str:
    """Return the checkpoint that a path stands for; raise NotACheckpointError if there are several."""
    from ckpttool.listing.paths import choose_checkpoint

    choice = choose_checkpoint(path)
    if choice.candidates:
        raise choice.error(f"ckpttool.report({choice.candidates[-1].path!r})")
    return choice.path


def _require_run_options(run: RunFiles, options: ReportOptions) -> None:
    """Raise UsageError for an option that needs one checkpoint."""
    for option, file in (("--conversion", options.conversion), ("--verification", options.verification)):
        if file is not None:
            hint = urls.format_command("report", run.members[-1].path, option, file)
            raise UsageError(f"{option} requires one checkpoint, not a run", file=run.path, hint=hint)


def _play(
    paths: Sequence[str], options: ReportOptions, folder: str, progress: Progress
) -> tuple[str, Sequence[EvaluationFailure], str | None]:
    """Play checkpoints and film the best one; raise the first error if nothing was played.

    Return the file of results in the folder, what did not play, and why there is no film.
    """
    from ckpttool.commands.sweep import sweep
    from ckpttool.evaluation import episode_videos
    from ckpttool.evaluation.playing import EvaluationOptions
    from ckpttool.evaluation.protocol import Protocol

    how = EvaluationOptions(options.env, Protocol(options.episodes or 10), options.layout)
    played = sweep(paths, how.env, how.protocol, layout=how.layout, progress=progress)
    if not played.scored and played.failed:
        raise played.failed[0].error
    content = played.document()["evaluations"][0] if played.alone else played.document()
    unfilmed, film = None, os.path.join(folder, "best.gif")
    try:
        episode_videos.require_video_support([played.highest.checkpoint], how, film)
        video = episode_videos.record_video(
            played.highest, film, options=how, width=_FILM_WIDTH, progress=progress
        )
        content["video"] = video.document()
    except CkpttoolError as error:
        unfilmed = describe_error(error)
    file = os.path.join(folder, "results.json")
    write_file(file, json.dumps(replace_nonfinite(content)).encode())
    return file, played.failed, unfilmed


def _write_run(run: RunFiles, options: ReportOptions, progress: Progress) -> RunReport:
    from ckpttool.pages.run_page import RunInputs, gather_run, render_run

    target = options.out if options.out is not None else default_report_name(run.path)
    require_new(target, force=options.force)
    inputs = RunInputs(tuple(options.evaluations), options.video)
    contents = gather_run(run, inputs=inputs, glob=options.glob, layout=options.layout, progress=progress)
    require_new(target, contents.files, force=options.force)
    content = render_run(contents)
    write_file(target, content, force=options.force, sources=contents.files)
    return RunReport(target, len(content), contents)


def _write(paths: Sequence[str], options: ReportOptions, progress: Progress) -> HtmlReport:
    """Write the page of a checkpoint, whose tensors `glob` selects, or of two, into a new file."""
    target = options.out if options.out is not None else default_report_name(*paths)
    require_new(target, force=options.force)
    inputs = ReportInputs(tuple(options.evaluations), options.conversion, options.verification)
    contents = gather_contents(
        *paths, inputs=inputs, glob=options.glob, layout=options.layout, progress=progress
    )
    require_new(target, contents.files, force=options.force)
    content = render_page(contents)
    write_file(target, content, force=options.force, sources=contents.files)
    return HtmlReport(target, len(content), contents)
