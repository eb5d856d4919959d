"""Pages that are not about one entry, and the title: overview, key help, name and size of the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ckpttool.browser.comparison import ComparisonState
from ckpttool.browser.keys import TREE, VALUES
from ckpttool.browser.lines import BLANK, Line, TextPiece, fact_lines, fit_text, pad_text, wrap_paragraph
from ckpttool.browser.listing import BrowserListing
from ckpttool.core import urls
from ckpttool.core.text import clean, format_count, format_size
from ckpttool.listing import audit
from ckpttool.listing.contents import CheckpointSummary
from ckpttool.listing.signatures import signature_lines

_KEY = 11
_LINES = 200


def about_lines(listing: BrowserListing, cells: int) -> list[Line]:
    """Return an overview of the checkpoint, or of both."""
    lines: list[Line] = []
    for summary in listing.summaries:
        lines += [*_summary_lines(summary, cells), BLANK]
    for note in listing.alignment.notes if listing.alignment is not None else ():
        lines += wrap_paragraph(f"note: {note}", cells)
    return lines


def _summary_lines(summary: CheckpointSummary, cells: int) -> Iterator[Line]:
    checkpoint, totals = summary.checkpoint, summary.totals
    yield from wrap_paragraph(urls.display_url(checkpoint.path), cells, "head")
    checks = "no checksums" if checkpoint.integrity == "none" else f"{checkpoint.integrity} checksums"
    yield from fact_lines("format", f"{checkpoint.format} ({checks})", cells)
    if checkpoint.writer:
        yield from fact_lines("writer", checkpoint.writer, cells)
    evidence = f": {summary.evidence}" if summary.evidence else ""
    yield from fact_lines("layout", f"{summary.layout or 'none recognised'}{evidence}", cells)
    files = f"{format_count(len(checkpoint.files), 'file')}, {format_size(totals.stored_nbytes)}"
    yield from fact_lines("on disk", files, cells)
    for file in checkpoint.files[:_LINES]:
        yield from fact_lines("", urls.display_url(file.path), cells, "dim")
    yield BLANK
    yield (TextPiece(f"{'':10}{'tensors':>9} {'elements':>15} {'size':>8}", "dim"),)
    rows = [(role, *sums) for role, sums in totals.roles.items()]
    whole = ("all", totals.tensors, sum(row[2] for row in rows), totals.nbytes)
    for name, tensors, elements, nbytes in (*rows, whole):
        yield (
            TextPiece(f"{name:10}", "dim"),
            TextPiece(f"{tensors:>9,} {elements:>15,} {format_size(nbytes):>8}"),
        )
    yield from _load_safety_lines(summary, cells)
    for note in summary.notes:
        yield BLANK
        yield from wrap_paragraph(f"note: {note}", cells)
    signatures = signature_lines(checkpoint.details, cells)
    yield from ([BLANK] if signatures else [])
    yield from ((TextPiece(line),) for line in signatures[:_LINES])


def _load_safety_lines(summary: CheckpointSummary, cells: int) -> Iterator[Line]:
    verdict = summary.verdict
    yield BLANK
    yield from wrap_paragraph(verdict.sentence, cells, "good" if verdict.label == audit.SAFE else "warn")
    for line in audit.format_audit(summary.checkpoint.code_references)[:_LINES]:
        yield from wrap_paragraph(line, cells, "dim")


def key_help(cells: int, *, two: bool) -> list[Line]:
    """Return the key help."""
    lines: list[Line] = []
    for title, table in (("In the tree", TREE), ("In the table of values", VALUES)):
        lines.append((TextPiece(title, "head"),))
        for key in table:
            if key.shown and (two or not key.two):
                first, *more = wrap_paragraph(key.does, cells - _KEY)
                lines.append((TextPiece(f"{key.shown:<{_KEY}}", "mark"), *first))
                lines += [(TextPiece(" " * _KEY), *line) for line in more]
        lines.append(BLANK)
    marks = [("~", "different"), ("-", "only left"), ("+", "only right"), ("!", "unread")]
    if two:
        lines.append((TextPiece("Marks", "head"),))
        lines += [(TextPiece(f"{mark:<{_KEY}}", "mark"), TextPiece(clean(does))) for mark, does in marks]
    return lines


_SHORTEST = 12


def title_line(listing: BrowserListing, comparison: ComparisonState | None, cells: int) -> Line:
    """Return the title line: the checkpoint's name and a few facts."""
    if comparison is not None:
        state = f"  {comparison.state()} "
        room = max(_SHORTEST, (cells - len(state) - 5) // 2)
        left, right = (fit_text(os.path.basename(side.checkpoint.path), room) for side in listing.summaries)
        names = pad_text(f" {left} ↔ {right}", max(0, cells - len(state)))
        return TextPiece(names, "head"), TextPiece(state, "mark")
    summary = listing.summaries[0]
    verdict = summary.verdict
    warning = "" if verdict.label == audit.SAFE else f" {verdict.label} "
    name = os.path.basename(os.path.normpath(summary.checkpoint.path))
    details = _title_facts(summary, cells - len(warning) - min(len(name), 2 * _SHORTEST) - 3)
    room = max(_SHORTEST, cells - len(details) - len(warning) - 3)
    head = f" {fit_text(name, room)}"
    gap = " " * max(1, cells - len(head) - len(details) - len(warning) - 1)
    return TextPiece(head, "head"), TextPiece(f"{gap}{details} ", "dim"), TextPiece(warning, "warn")


def _title_facts(summary: CheckpointSummary, cells: int) -> str:
    """Return as many facts as fit, the most informative first."""
    totals = summary.totals
    words = [
        format_count(totals.tensors, "tensor"),
        format_size(totals.nbytes),
        summary.checkpoint.format,
        summary.layout or "no layout",
        format_count(totals.parameters, "parameter"),
    ]
    lines: list[str] = []
    for word in words:
        if len(" · ".join([*lines, word])) <= cells:
            lines.append(word)
    return " · ".join(lines)


def format_hits(hits: tuple[int, int] | None) -> str:
    """Return the number of the current hit and the number of hits."""
    if hits is None:
        return ""
    at, number = hits
    return f"{at:,} of {number:,}" if number else "not found"
