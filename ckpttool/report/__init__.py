"""`report`: a self-contained HTML page about one checkpoint, two side by side, or a training run."""

from __future__ import annotations

import os
from ckpttool.core.deferred import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.core import urls
from ckpttool.core.atomic_write import Progress, ignore_progress, require_new, write_file
from ckpttool.report.pages import ReportContents, ReportInputs, gather_contents, render_page

if TYPE_CHECKING:
    from ckpttool.commands.run_history import RunFiles
    from ckpttool.report.run_page import RunContents, RunInputs


@dataclass(frozen=True, slots=True)
class HtmlReport:
    """Result of writing a report."""

    file: str
    nbytes: int
    contents: ReportContents

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        found = self.contents
        comparison, summary = found.comparison, found.summary
        return {
            "path": urls.display_url(summary.checkpoint.path),
            "other": None if comparison is None else comparison.diff.right,
            "format": summary.checkpoint.format,
            "layout": summary.layout,
            "sha256": found.sha256,
            "file": self.file,
            "nbytes": self.nbytes,
            "tensors": len(summary.tensors),
            "values": len(summary.values),
            "findings": len(found.diagnosis.findings),
            "changes": None if comparison is None else len(comparison.changes),
            "evaluations": len(found.results.results),
            "conversion": found.conversion is not None,
            "run": None,
            "notes": [*summary.notes, *found.diagnosis.notes],
        }


@dataclass(frozen=True, slots=True)
class RunReport:
    """Result of writing the report of a run."""

    file: str
    nbytes: int
    contents: RunContents

    def document(self) -> dict[str, Any]:
        """Return the JSON document: the keys of a checkpoint's report for the last one, and `run`."""
        from ckpttool.report.run_page import run_document

        found = self.contents
        history = found.history
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
            "findings": next(each.findings for each in reversed(history.checkpoints) if each.error is None),
            "changes": None,
            "evaluations": len(found.results.results),
            "conversion": False,
            "run": run_document(found),
            "notes": list(found.notes),
        }


def default_report_name(path: str, other: str | None = None) -> str:
    """Return the default file name: the checkpoint's name, in the current folder."""
    meant = [each for each in (path, other) if each is not None]
    names = [
        (urls.base_name(each) if urls.is_elsewhere(each) else os.path.basename(os.path.abspath(each)))
        or "checkpoint"
        for each in meant
    ]
    return f"{'-'.join(names)}.report.html"


def write_report(
    path: str,
    other: str | None = None,
    *,
    out: str | None = None,
    inputs: ReportInputs | None = None,
    glob: str | None = None,
    layout: str | None = None,
    force: bool = False,
    progress: Progress = ignore_progress,
) -> HtmlReport:
    """Write a page about the checkpoint at the path, compared with `other` if given, into a new file.

    `glob` keeps the tensors whose path matches, `layout` names the layout of the first checkpoint.
    Raise TargetExistsError if the file exists and `force` is not given, and any error of opening and
    reading.
    """
    target = out if out is not None else default_report_name(path, other)
    require_new(target, force=force)
    found = gather_contents(
        path, other, inputs=inputs or ReportInputs(), glob=glob, layout=layout, progress=progress
    )
    require_new(target, found.files, force=force)
    content = render_page(found)
    write_file(target, content, force=force, sources=found.files)
    return HtmlReport(target, len(content), found)


def write_run_report(
    run: RunFiles,
    *,
    out: str | None = None,
    inputs: RunInputs,
    glob: str | None = None,
    layout: str | None = None,
    force: bool = False,
    progress: Progress = ignore_progress,
) -> RunReport:
    """Write a page about a training run into a new file; see `write_report` for the other parameters.

    Raise TargetExistsError if the file exists and `force` is not given, and any error of reading.
    """
    from ckpttool.report.run_page import gather_run, render_run

    target = out if out is not None else default_report_name(run.path)
    require_new(target, force=force)
    found = gather_run(run, inputs=inputs, glob=glob, layout=layout, progress=progress)
    require_new(target, found.files, force=force)
    content = render_run(found)
    write_file(target, content, force=force, sources=found.files)
    return RunReport(target, len(content), found)
