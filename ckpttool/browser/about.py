"""The pages that are not about one entry: what the checkpoint is as a whole, and what the keys do."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool import urls
from ckpttool.browser.keys import TREE, VALUES
from ckpttool.browser.lines import BLANK, Line, Piece, fact, paragraph
from ckpttool.browser.look import Look
from ckpttool.ops import asking
from ckpttool.ops.signatures import signatures
from ckpttool.ops.summary import Summary
from ckpttool.shown import clean, count, size

_KEY = 11
_LINES = 200


def about(look: Look, cells: int) -> list[Line]:
    """Return what is known of the checkpoint, or of both."""
    lines: list[Line] = []
    for found in look.summaries:
        lines += [*_about(found, cells), BLANK]
    for note in look.laid.notes if look.laid is not None else ():
        lines += paragraph(f"note: {note}", cells)
    return lines


def _about(found: Summary, cells: int) -> Iterator[Line]:
    checkpoint, totals = found.checkpoint, found.totals
    yield from paragraph(urls.spelled(checkpoint.path), cells, "head")
    checks = "no checksums" if checkpoint.integrity == "none" else f"{checkpoint.integrity} checksums"
    yield from fact("format", f"{checkpoint.format} ({checks})", cells)
    if checkpoint.writer:
        yield from fact("writer", checkpoint.writer, cells)
    evidence = f": {found.evidence}" if found.evidence else ""
    yield from fact("layout", f"{found.layout or 'none recognised'}{evidence}", cells)
    files = f"{count(len(checkpoint.files), 'file')}, {size(totals.stored_nbytes)}"
    yield from fact("on disk", files, cells)
    for file in checkpoint.files[:_LINES]:
        yield from fact("", urls.spelled(file.path), cells, "dim")
    yield BLANK
    yield (Piece(f"{'':10}{'tensors':>9} {'elements':>15} {'size':>8}", "dim"),)
    rows = [(role, *sums) for role, sums in totals.roles.items()]
    whole = ("all", totals.tensors, sum(row[2] for row in rows), totals.nbytes)
    for name, tensors, elements, nbytes in (*rows, whole):
        yield (Piece(f"{name:10}", "dim"), Piece(f"{tensors:>9,} {elements:>15,} {size(nbytes):>8}"))
    yield from _asked(found, cells)
    for note in found.notes:
        yield BLANK
        yield from paragraph(f"note: {note}", cells)
    said = signatures(checkpoint.details, cells)
    yield from ([BLANK] if said else [])
    yield from ((Piece(line),) for line in said[:_LINES])


def _asked(found: Summary, cells: int) -> Iterator[Line]:
    asks = found.checkpoint.asks
    if said := asking.sentence(asks):
        yield BLANK
        yield from paragraph(said, cells, "good" if said == asking.PLAIN else "warn")
        for line in asking.table(asks)[:_LINES]:
            yield from paragraph(line, cells, "dim")


def keys(cells: int, *, two: bool) -> list[Line]:
    """Return what the keys do."""
    lines: list[Line] = []
    for title, table in (("In the tree", TREE), ("In the table of values", VALUES)):
        lines.append((Piece(title, "head"),))
        for key in table:
            if key.shown and (two or not key.two):
                first, *more = paragraph(key.does, cells - _KEY)
                lines.append((Piece(f"{key.shown:<{_KEY}}", "mark"), *first))
                lines += [(Piece(" " * _KEY), *line) for line in more]
        lines.append(BLANK)
    marks = [("~", "not the same on both sides"), ("-", "only left"), ("+", "only right"), ("!", "unread")]
    if two:
        lines.append((Piece("Marks", "head"),))
        lines += [(Piece(f"{mark:<{_KEY}}", "mark"), Piece(clean(does))) for mark, does in marks]
    return lines
