"""`report`: one self-contained page of a checkpoint, or of two beside each other."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import IO, Any

from ckpttool import urls
from ckpttool.ops.progress import Progress, silent
from ckpttool.report.contents import Beside, Contents, gather
from ckpttool.report.page import page
from ckpttool.writing import Output, require_new, write_atomically

__all__ = ["Beside", "Report", "name_of", "report"]


@dataclass(frozen=True, slots=True)
class Report:
    """What was written where."""

    file: str
    nbytes: int
    contents: Contents

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        found = self.contents
        told, summary = found.comparison, found.summary
        return {
            "path": urls.spelled(summary.checkpoint.path),
            "other": None if told is None else told.diff.right,
            "format": summary.checkpoint.format,
            "layout": summary.layout,
            "sha256": found.sha256,
            "file": self.file,
            "nbytes": self.nbytes,
            "tensors": len(summary.tensors),
            "values": len(summary.values),
            "findings": len(found.diagnosis.findings),
            "changes": None if told is None else len(told.changes),
            "evaluations": len(found.results.results),
            "conversion": found.conversion is not None,
            "notes": [*summary.notes, *found.diagnosis.notes],
        }


def name_of(path: str, other: str | None = None) -> str:
    """Return the file's name where none is given: that of the checkpoint, in the current folder."""
    meant = [each for each in (path, other) if each is not None]
    names = [
        (urls.name(each) if urls.is_elsewhere(each) else os.path.basename(os.path.abspath(each)))
        or "checkpoint"
        for each in meant
    ]
    return f"{'-'.join(names)}.report.html"


def report(
    path: str,
    other: str | None = None,
    *,
    out: str | None = None,
    beside: Beside | None = None,
    glob: str | None = None,
    layout: str | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Report:
    """Write a page about what is at the path, compared with `other` if there is one, into a new file.

    `glob` keeps the tensors whose path matches, `layout` names that of the first checkpoint. Raise
    TargetExistsError when the file is there and `force` is not given, and what opening and reading raise.
    """
    target = out if out is not None else name_of(path, other)
    require_new(target, force=force)
    found = gather(path, other, beside=beside or Beside(), glob=glob, layout=layout, progress=progress)
    require_new(target, found.files, force=force)
    content = page(found)
    write_atomically([Output(target, lambda stream: _put(stream, content))], force=force, sources=found.files)
    return Report(target, len(content), found)


def _put(stream: IO[bytes], content: bytes) -> None:
    stream.write(content)
