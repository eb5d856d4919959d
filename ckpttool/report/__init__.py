"""`report`: a self-contained HTML page about one checkpoint, or about two side by side."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ckpttool.core import urls
from ckpttool.core.atomic_write import Progress, ignore_progress, require_new, write_file
from ckpttool.report.pages import ReportContents, ReportInputs, gather_contents, render_page


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
            "notes": [*summary.notes, *found.diagnosis.notes],
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
