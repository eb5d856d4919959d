"""`report`: writes the page, and says what it wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpttool.cli import output
from ckpttool.cli.options import AsJson, Glob, LayoutOption, PathArgument, Quiet
from ckpttool.cli.progress import progress
from ckpttool.shown import clean, count

if TYPE_CHECKING:
    from ckpttool.report import Report


def report(
    path: PathArgument,
    other: Annotated[
        str | None,
        typer.Argument(metavar="PATH2", help="A second checkpoint to compare with.", show_default=False),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The file to write. Default: PATH's name and .report.html, here."),
    ] = None,
    evaluation: Annotated[
        list[str] | None,
        typer.Option(
            "--eval", metavar="FILE", help="Returns to show: what eval --json or --out wrote; repeatable."
        ),
    ] = None,
    conversion: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The conversion to show: a sidecar, or what convert --json printed. Default: PATH's own.",
        ),
    ] = None,
    glob: Glob = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    layout: LayoutOption = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Write one HTML file that shows a checkpoint, or what differs in two: open it in any browser.

    It needs nothing else and fetches nothing: tree, search, histograms and heat maps of every tensor,
    provenance, what doctor finds, the conversion, returns and learning curves.
    """
    import gc

    from ckpttool import report as op

    # Rows are many objects and no rubbish: see `inspect`.
    gc.disable()
    with progress("report", quiet=quiet or as_json) as moving:
        made = op.report(
            path,
            other,
            out=out,
            beside=op.Beside(tuple(evaluation or ()), conversion),
            glob=glob,
            layout=layout,
            force=force,
            progress=moving,
        )
    output.write(output.document(made.document()) if as_json else _text(made, quiet=quiet))
    return 0


def _text(made: Report, *, quiet: bool) -> str:
    wrote = f"wrote {clean(made.file)}"
    if quiet:
        return wrote
    found = made.contents
    told = [count(len(found.summary.tensors), "tensor"), count(len(found.diagnosis.findings), "finding")]
    if found.comparison is not None:
        told.append(count(len(found.comparison.changes), "difference"))
    if found.results.results:
        told.append(count(len(found.results.results), "evaluation"))
    return f"{', '.join(told)}\n{wrote}"
