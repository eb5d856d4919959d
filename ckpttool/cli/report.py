"""The `report` command."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from ckpttool.cli import console
from ckpttool.cli.parameters import AsJson, PathArgument, Quiet, argument, make_importable, use_checkpoint
from ckpttool.cli.progress import show_progress
from ckpttool.core.text import clean, format_count
from ckpttool.pages.options import ReportOptions

if TYPE_CHECKING:
    from ckpttool.pages.checkpoint_page import ReportContents
    from ckpttool.pages.report import HtmlReport, RunReport
    from ckpttool.pages.run_page import RunContents


def report(
    path: PathArgument,
    options: ReportOptions,
    other: Annotated[str | None, argument("PATH2", "A second checkpoint to compare with.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Write a self-contained HTML report on a checkpoint, the differences of two, or a training run.

    It opens in any browser, needs no other file and makes no network requests: tree, search, histograms
    and heat maps of every tensor, provenance, findings of doctor, the conversion, returns and learning
    curves. A folder with several checkpoints of one run gives a page of the run: norms and updates of
    layers, findings and counters over training.
    """
    from ckpttool.cli.evaluate import print_failures
    from ckpttool.pages import report

    if not os.path.isdir(path):
        # Rows are many objects but no garbage: see `inspect`.
        gc.disable()
    quiet = quiet or as_json
    options = replace(options, env=make_importable(options.env))
    with show_progress("report", quiet=quiet) as moving:
        run = report.find_reported_run(path, other, options, moving)
    paths = []
    if run is None:
        paths = [use_checkpoint(side, quiet=quiet) for side in (path, other) if side is not None]
    elif not quiet:
        console.print_note(f"using {format_count(len(run.members), 'checkpoint')} of {run.path}")
    with show_progress("report", quiet=quiet) as moving:
        page = report.write_page(run, paths, options, moving)
    if page.unfilmed is not None:
        console.print_note(f"note: no film: {page.unfilmed}")
    if as_json:
        console.print_document(page.document())
    else:
        console.print_text(render_page_text(page, quiet=quiet))
    if page.failed:
        print_failures(page.failed)
    return 2 if page.failed else 0


def render_page_text(page: HtmlReport | RunReport, *, quiet: bool) -> str:
    """Return what the command prints about a page."""
    from ckpttool.pages.report import RunReport

    wrote = f"wrote {clean(page.file)}"
    if quiet:
        return wrote
    lines = _run_lines(page.contents) if isinstance(page, RunReport) else [_checkpoint_line(page.contents)]
    return "\n".join([*lines, wrote])


def _run_lines(contents: RunContents) -> list[str]:
    history = contents.history
    text = [
        format_count(len(history.checkpoints), "checkpoint"),
        format_count(len(history.layers), "layer"),
        format_count(len(history.findings), "finding"),
    ]
    if broken := sum(checkpoint.error is not None for checkpoint in history.checkpoints):
        text.insert(1, f"{broken:,} unreadable")
    if contents.results.results:
        text.append(format_count(len(contents.results.results), "evaluation"))
    return [", ".join(text), *_best_lines(contents)]


def _best_lines(contents: RunContents) -> list[str]:
    """Return lines with the best checkpoint of a run and the verdict of `eval`; empty without results."""
    if (best := contents.best) is None:
        return []
    result, name = best.result, os.path.basename(contents.history.checkpoints[best.number].path)
    interval = "" if result.ci95 is None else f"95 % CI {result.ci95[0]:.2f} to {result.ci95[1]:.2f}; "
    certain = {
        True: ", significantly better than all others",
        False: ", not significantly better than all others",
        None: "",
    }[best.certain]
    lines = [
        f"best     {clean(name)}: mean return {result.mean:.2f} in {clean(result.env)} "
        f"({interval}{format_count(len(result.returns), 'episode')}){certain}"
    ]
    return [*lines, *([f"verdict  {result.verdict}"] if result.verdict else [])]


def _checkpoint_line(contents: ReportContents) -> str:
    text = [
        format_count(len(contents.summary.tensors), "tensor"),
        format_count(len(contents.diagnosis.findings), "finding"),
    ]
    if contents.comparison is not None:
        text.append(format_count(len(contents.comparison.changes), "difference"))
    if contents.results.results:
        text.append(format_count(len(contents.results.results), "evaluation"))
    return ", ".join(text)
