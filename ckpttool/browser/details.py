"""Details of one entry: its facts, its statistics, its differences from the other side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpttool.browser.comparison import ComparisonState
from ckpttool.browser.lines import (
    BLANK,
    Line,
    TextPiece,
    Tone,
    fact_lines,
    fit_text,
    wrap_paragraph,
    wrap_text,
)
from ckpttool.browser.listing import AliasRow, BrowserListing, Row
from ckpttool.browser.numbers import TensorNumbers, column_lines
from ckpttool.conversion.alignment import ChangedEntry, Entry
from ckpttool.core.text import format_count, format_size
from ckpttool.core.tree import Leaf, json_value
from ckpttool.listing.modules import ModuleSummary, describe_module_kind
from ckpttool.listing.rows import TensorRow
from ckpttool.verification.array_differences import ArrayDifference
from ckpttool.verification.moments import Moments

# Numbers of both sides, or None while they are being read.
Read = Sequence[TensorNumbers | None] | None
_NAMES = 12
_FACTS = 12
# Maximum lines of a long value, and lines reserved for numbers that are being read.
_LONG, _COMING = 200, 9


def detail_lines(
    listing: BrowserListing,
    comparison: ComparisonState | None,
    entry: Row | ModuleSummary,
    read: Read,
    cells: int,
) -> list[Line]:
    """Return the lines about an entry of a checkpoint, or of two.

    Args:
        listing: the checkpoint or checkpoints that are shown.
        comparison: the values compared so far, None for a single checkpoint.
        entry: a tensor, value, alias or module.
        read: what has been read of the entry's values, if anything.
        cells: the width of the page.
    """
    lines = wrap_paragraph(entry.path or '""', cells, "head")
    if isinstance(entry, ModuleSummary):
        return [*lines, *_module_lines(comparison, entry, cells)]
    if isinstance(entry, AliasRow):
        lines += wrap_paragraph("alias of", cells, "dim")
        lines += wrap_paragraph(entry.target, cells)
        return lines
    lines += _type_lines(entry, cells)
    if comparison is not None:
        lines += _comparison_lines(comparison, entry.path, cells)
    lines += _number_lines(entry, read, cells)
    return [*lines, *_related_lines(listing, entry, cells)]


def format_shape(leaf: Leaf) -> str:
    """Return type and shape in the usual form: `float32[17, 256]`."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def _module_lines(comparison: ComparisonState | None, module: ModuleSummary, cells: int) -> Iterator[Line]:
    if what := describe_module_kind(module):
        yield from wrap_paragraph(what if module.built else f"object of {what}, not built", cells)
    yield BLANK
    yield from fact_lines("tensors", f"{module.tensors:,}", cells)
    yield from fact_lines("trained", format_count(module.parameters, "parameter"), cells)
    yield from fact_lines("size", format_size(module.nbytes), cells)
    for name, value in list(module.facts.items())[:_FACTS]:
        if isinstance(value, str | int | float | bool):
            yield from fact_lines(fit_text(name, 8), str(value), cells)
    if comparison is not None and (changes := comparison.below.get(module.path, 0)):
        yield BLANK
        yield from wrap_paragraph(
            f"{format_count(changes, 'differs', 'differ')} in this module", cells, "mark"
        )


def _type_lines(row: Row, cells: int) -> Iterator[Line]:
    if not isinstance(row, TensorRow):
        shown = json_value(row.leaf)
        yield from wrap_paragraph(str(shown["type"]), cells, "dim")
        yield BLANK
        yield from ((TextPiece(line),) for line in wrap_text(str(shown["value"]), cells, _LONG))
        return
    leaf = row.leaf
    lines = [format_shape(leaf), format_count(leaf.size, "element")]
    lines += [format_size(leaf.nbytes)] if leaf.nbytes else []
    yield from wrap_paragraph("  ".join(lines), cells)
    yield from wrap_paragraph(_describe_role(leaf), cells, "dim")


def _related_lines(listing: BrowserListing, row: Row, cells: int) -> Iterator[Line]:
    """Yield the names of a tensor and its related entries."""
    if not isinstance(row, TensorRow):
        return
    leaf = row.leaf
    yield BLANK
    yield from fact_lines("key", leaf.key, cells)
    if leaf.name and leaf.name != leaf.key:
        yield from fact_lines("variable", leaf.name, cells)
    if row.of is not None:
        yield from fact_lines(f"{leaf.slot or 'slot'} of"[:8], row.of, cells)
    for name in listing.slots.get(row.path, ())[:_NAMES]:
        slot = listing.rows[name]
        word = (slot.leaf.slot if isinstance(slot, TensorRow) else None) or "slot"
        yield from fact_lines(f"slot {word}"[:8], name, cells)
    for at, name in enumerate(row.aliases[:_NAMES]):
        yield from fact_lines("also" if at == 0 else "", name, cells)
    if len(row.aliases) > _NAMES:
        yield from fact_lines("", f"and {format_count(len(row.aliases) - _NAMES, 'more name')}", cells)


def _describe_role(leaf: Leaf) -> str:
    if leaf.trainable is None or leaf.role != "parameter":
        return leaf.role
    return f"{leaf.role}, {'trained' if leaf.trainable else 'frozen'}"


def _comparison_lines(comparison: ComparisonState, name: str, cells: int) -> Iterator[Line]:
    mark = comparison.marks.get(name)
    yield BLANK
    if mark in ("left", "right"):
        yield from wrap_paragraph(f"only {mark}", cells, "mark")
    elif mark == "error":
        yield from wrap_paragraph(comparison.errors[name], cells, "bad")
    elif (change := comparison.changes.get(name)) is not None:
        yield from _change_lines(change, cells)
    else:
        yield from wrap_paragraph(
            "identical" if name in comparison.known else "not compared yet", cells, "dim"
        )


def _change_lines(change: ChangedEntry, cells: int) -> Iterator[Line]:
    values = change.values
    if values is None:
        yield from wrap_paragraph(f"different {change.what}", cells, "mark")
        yield from fact_lines("left", _describe_entry(change.left), cells)
        yield from fact_lines("right", _describe_entry(change.right), cells)
        return
    yield from wrap_paragraph(f"{values.different:,} of {values.size:,} differ", cells, "mark")
    yield from _difference_lines(values, cells)


def _difference_lines(values: ArrayDifference, cells: int) -> Iterator[Line]:
    where = f" at {list(values.at)}" if values.at else ""
    yield from fact_lines("largest", f"{values.max_abs:.4g}{where}", cells)
    yield from fact_lines("relative", f"{values.max_rel:.4g}", cells)
    yield from fact_lines("left", _format_number(values.left), cells)
    yield from fact_lines("right", _format_number(values.right), cells)
    if values.cosine is not None:
        yield from fact_lines("cosine", f"{values.cosine:.9g}", cells)
    if values.nans:
        yield from fact_lines("NaN", f"{values.nans:,} on one side only", cells, "bad")


def _format_number(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _describe_entry(entry: Entry) -> str:
    if isinstance(entry, Leaf):
        return format_shape(entry)
    shown = json_value(entry)
    return f"{shown['value']} ({shown['type']})"


def _number_lines(row: Row, read: Read, cells: int) -> Iterator[Line]:
    if not isinstance(row, TensorRow) or row.leaf.dtype == "string":
        return
    yield BLANK
    if not row.leaf.size:
        yield from wrap_paragraph("no elements", cells, "dim")
        return
    if read is None:
        # Reserve the final number of lines, so that the text below does not move.
        yield from wrap_paragraph("reading ...", cells, "dim")
        yield from [BLANK] * (_COMING - 1)
        return
    for numbers in read:
        if numbers is not None and numbers.error is not None:
            yield from wrap_paragraph(numbers.error, cells, "bad")
    moments = [numbers.moments if numbers is not None else None for numbers in read]
    yield from _number_table(moments, cells)
    for numbers in read:
        if numbers is None:
            continue
        for sign in numbers.signs:
            yield from wrap_paragraph(sign, cells, "warn")
    first = next((numbers for numbers in read if numbers is not None and numbers.histogram), None)
    if first is not None:
        yield BLANK
        yield from column_lines(first, cells)


def _number_table(moments: Sequence[Moments | None], cells: int) -> Iterator[Line]:
    """Yield the numbers: two per line, or one per line with a column for each side."""
    rows = [_format_moments(moment) if moment is not None else {} for moment in moments]
    labels = list(dict.fromkeys(name for row in rows for name in row))
    if len(moments) == 1:
        wide = min(12, max(8, (cells - 15) // 2))
        for at in range(0, len(labels), 2):
            pair = labels[at : at + 2]
            yield tuple(piece for label in pair for piece in _number_cell(label, [rows[0]], wide))
        return
    wide = min(14, max(8, (cells - 7) // 2 - 1))
    heads = "".join(f" {word:>{wide}}" for word in ("left", "right"))
    if labels:
        yield (TextPiece(f"{'':6}{heads}", "dim"),)
    for label in labels:
        yield _number_cell(label, rows, wide)


def _number_cell(label: str, rows: Sequence[Mapping[str, str]], wide: int) -> Line:
    tone: Tone = "bad" if label in ("NaN", "inf") else ""
    text = "".join(f" {row.get(label, '-'):>{wide}}" for row in rows)
    return TextPiece(f"{label:<6}", "dim"), TextPiece(text, tone), TextPiece("  ")


def _format_moments(moments: Moments) -> Mapping[str, str]:
    columns = {}
    if moments.finite:
        named = (("min", moments.low), ("mean", moments.mean), ("max", moments.high), ("std", moments.std))
        columns = {label: f"{value:.5g}" for label, value in (*named, ("norm", moments.norm))}
    columns["zeros"] = f"{moments.zeros:,}"
    columns |= {label: f"{n:,}" for label, n in (("NaN", moments.nans), ("inf", moments.infs)) if n}
    return columns
