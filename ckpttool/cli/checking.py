"""The commands that git and its hooks call: `check` of many checkpoints, `textconv` of one file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ckpttool.cli import output
from ckpttool.cli.columns import wrapped
from ckpttool.cli.options import AsJson, Quiet
from ckpttool.cli.progress import progress
from ckpttool.errors import CkpttoolError
from ckpttool.shown import clean, count

if TYPE_CHECKING:
    from ckpttool.ops.check import Check, Checked


def check(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help="Checkpoints, folders (all below them counts), or patterns in quotes: 'runs/*.pt'.",
            show_default=False,
        ),
    ],
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 if loading one asks for more than plain data.")
    ] = False,
    no_numbers: Annotated[
        bool, typer.Option("--no-numbers", help="Do not read the tensors: faster, but no NaN is found.")
    ] = False,
    shapes: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Exit 1 if layout, names, types or shapes are not those that inspect --json saved in FILE.",
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Exit 1 if one is not of this layout (see ckpttool layouts)."),
    ] = None,
    sarif: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also write the findings to FILE as SARIF, for code hosts."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Look for what must not be committed: code in pickles, damage, NaN, tensors of other shapes.

    Made for hooks and continuous integration. Exits with 1 on a finding, with 2 if a file cannot be read.
    Below a folder every file counts that is a checkpoint by its suffix or by its content.
    """
    from ckpttool.ops import check as op
    from ckpttool.ops import sarif as log
    from ckpttool.ops.recorded_shapes import recorded as saved

    try:
        recorded = None if shapes is None else saved(shapes)
        wanted = op.Wanted(strict, not no_numbers, layout, recorded)
        with progress("check", quiet=quiet or as_json, unit="checkpoints") as moving:
            found = op.check(paths, wanted, moving)
    except CkpttoolError as error:
        if sarif is not None:
            log.write(None, 2, sarif, error)
        raise
    status = 2 if found.failed else 0 if found.clean else 1
    if sarif is not None:
        log.write(found, status, sarif)
    only = found.checkpoints[0] if len(found.checkpoints) == 1 else None
    if only is not None and only.error is not None and not only.findings:
        raise only.error
    if as_json:
        output.write(output.document(found.document()))
    else:
        output.write("\n".join(_report(found, quiet=quiet)))
    for each in found.failed:
        if each.error is not None and not as_json:
            output.fail(each.error, as_json=False)
    return status


def _report(found: Check, *, quiet: bool) -> Iterator[str]:
    """Give a line for each finding as other checkers do, a line for what is clean, and the sum."""
    for each in found.checkpoints:
        yield from _lines(each, quiet=quiet)
    if quiet:
        return
    bad = sum(1 for each in found.checkpoints if each.findings)
    sums = [f"{bad:,} with findings"] * bool(bad) + [f"{len(found.failed):,} not readable"] * bool(
        found.failed
    )
    others = f"; {count(len(found.skipped), 'other file')} skipped" if found.skipped else ""
    yield f"{count(len(found.checkpoints), 'checkpoint')}: {', '.join(sums) or 'nothing found'}{others}"


def _lines(each: Checked, *, quiet: bool) -> Iterator[str]:
    for finding in each.findings:
        yield wrapped(f"{clean(each.path)}: {finding.topic}: {clean(finding.sentence)}")
        if finding.fix:
            yield wrapped(f"    fix: {clean(finding.fix)}")
    if not (quiet or each.findings or each.error):
        what = f"{each.format}, layout {each.layout or 'none recognised'}, {count(each.tensors, 'tensor')}"
        yield f"{clean(each.path)}: {what}: nothing found"


def textconv(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="One file, as git names it.", show_default=False)
    ],
    as_json: AsJson = False,
    quiet: Quiet = False,  # noqa: ARG001  # there is no progress to leave out
) -> int:
    """Print a file as text for git diff: one line for each tensor and value, always in the same order.

    Set up with: git config diff.ckpttool.textconv 'ckpttool textconv', and '*.pt diff=ckpttool' in
    .gitattributes. A file that is no checkpoint is told in a sentence, with status 0: git would stop.
    """
    from ckpttool.ops import textconv as op

    lines = op.textconv(file)
    output.write(output.document({"lines": lines}) if as_json else "\n".join(map(clean, lines)))
    return 0
