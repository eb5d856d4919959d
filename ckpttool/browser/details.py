"""What is said of one entry: its facts, what its numbers are like, how it differs from the other side's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpttool.browser import histogram
from ckpttool.browser.comparison import Comparison
from ckpttool.browser.lines import BLANK, Line, Piece, Tone, fact, fitted, paragraph, wrapped
from ckpttool.browser.look import Link, Look, Row
from ckpttool.browser.numbers import Numbers
from ckpttool.leaf import Leaf
from ckpttool.ops.array_difference import ArrayDifference
from ckpttool.ops.difference import Changed, Entry
from ckpttool.ops.modules import Module, kind
from ckpttool.ops.moments import Moments
from ckpttool.ops.rows import TensorRow, shown_value
from ckpttool.shown import count, size

# The numbers of both sides, or None where they are still being read.
Read = Sequence[Numbers | None] | None
_NAMES = 12
_FACTS = 12
# Lines of a long text that is a value, and of numbers that are still to come.
_LONG, _COMING = 200, 9


def details(
    look: Look, comparison: Comparison | None, entry: Row | Module, read: Read, cells: int
) -> list[Line]:
    """Return the lines about an entry for a page of a width in cells."""
    lines = paragraph(entry.path or '""', cells, "head")
    if isinstance(entry, Module):
        return [*lines, *_module(comparison, entry, cells)]
    if isinstance(entry, Link):
        lines += paragraph("another name of", cells, "dim")
        lines += paragraph(entry.target, cells)
        return lines
    lines += _kind(entry, cells)
    if comparison is not None:
        lines += _compared(comparison, entry.path, cells)
    lines += _numbers(entry, read, cells)
    return [*lines, *_belonging(look, entry, cells)]


def shape(leaf: Leaf) -> str:
    """Return type and shape as they are written everywhere: `float32[17, 256]`."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def _module(comparison: Comparison | None, module: Module, cells: int) -> Iterator[Line]:
    if what := kind(module):
        yield from paragraph(what if module.built else f"object of {what}, not built", cells)
    yield BLANK
    yield from fact("tensors", f"{module.tensors:,}", cells)
    yield from fact("trained", count(module.parameters, "parameter"), cells)
    yield from fact("size", size(module.nbytes), cells)
    for name, value in list(module.facts.items())[:_FACTS]:
        if isinstance(value, str | int | float | bool):
            yield from fact(fitted(name, 8), str(value), cells)
    if comparison is not None and (found := comparison.below.get(module.path, 0)):
        yield BLANK
        yield from paragraph(f"{count(found, 'differs', 'differ')} in it", cells, "mark")


def _kind(row: Row, cells: int) -> Iterator[Line]:
    if not isinstance(row, TensorRow):
        shown = shown_value(row.leaf)
        yield from paragraph(str(shown["type"]), cells, "dim")
        yield BLANK
        yield from ((Piece(line),) for line in wrapped(str(shown["value"]), cells, _LONG))
        return
    leaf = row.leaf
    said = [shape(leaf), count(leaf.size, "element")]
    said += [size(leaf.nbytes)] if leaf.nbytes else []
    yield from paragraph("  ".join(said), cells)
    yield from paragraph(_role(leaf), cells, "dim")


def _belonging(look: Look, row: Row, cells: int) -> Iterator[Line]:
    """Give the names of a tensor and what belongs to it."""
    if not isinstance(row, TensorRow):
        return
    leaf = row.leaf
    yield BLANK
    yield from fact("key", leaf.key, cells)
    if leaf.name and leaf.name != leaf.key:
        yield from fact("variable", leaf.name, cells)
    if row.of is not None:
        yield from fact(f"{leaf.slot or 'slot'} of"[:8], row.of, cells)
    for name in look.slots.get(row.path, ())[:_NAMES]:
        slot = look.rows[name]
        word = (slot.leaf.slot if isinstance(slot, TensorRow) else None) or "slot"
        yield from fact(f"slot {word}"[:8], name, cells)
    for at, name in enumerate(row.aliases[:_NAMES]):
        yield from fact("also" if at == 0 else "", name, cells)
    if len(row.aliases) > _NAMES:
        yield from fact("", f"and {count(len(row.aliases) - _NAMES, 'more name')}", cells)


def _role(leaf: Leaf) -> str:
    if leaf.trainable is None or leaf.role != "parameter":
        return leaf.role
    return f"{leaf.role}, {'trained' if leaf.trainable else 'frozen'}"


def _compared(comparison: Comparison, name: str, cells: int) -> Iterator[Line]:
    mark = comparison.marks.get(name)
    yield BLANK
    if mark in ("left", "right"):
        yield from paragraph(f"only {mark}", cells, "mark")
    elif mark == "error":
        yield from paragraph(comparison.errors[name], cells, "bad")
    elif (change := comparison.changes.get(name)) is not None:
        yield from _change(change, cells)
    else:
        yield from paragraph(
            "the same on both sides" if name in comparison.known else "not compared yet", cells, "dim"
        )


def _change(change: Changed, cells: int) -> Iterator[Line]:
    values = change.values
    if values is None:
        yield from paragraph(f"another {change.what}", cells, "mark")
        yield from fact("left", _told(change.left), cells)
        yield from fact("right", _told(change.right), cells)
        return
    yield from paragraph(f"{values.different:,} of {values.size:,} differ", cells, "mark")
    yield from _apart(values, cells)


def _apart(values: ArrayDifference, cells: int) -> Iterator[Line]:
    where = f" at {list(values.at)}" if values.at else ""
    yield from fact("largest", f"{values.max_abs:.4g}{where}", cells)
    yield from fact("relative", f"{values.max_rel:.4g}", cells)
    yield from fact("left", _number(values.left), cells)
    yield from fact("right", _number(values.right), cells)
    if values.cosine is not None:
        yield from fact("cosine", f"{values.cosine:.9g}", cells)
    if values.nans:
        yield from fact("NaN", f"{values.nans:,} in one alone", cells, "bad")


def _number(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _told(entry: Entry) -> str:
    if isinstance(entry, Leaf):
        return shape(entry)
    shown = shown_value(entry)
    return f"{shown['value']} ({shown['type']})"


def _numbers(row: Row, read: Read, cells: int) -> Iterator[Line]:
    if not isinstance(row, TensorRow) or row.leaf.dtype == "string":
        return
    yield BLANK
    if not row.leaf.size:
        yield from paragraph("no elements", cells, "dim")
        return
    if read is None:
        # As many lines as there will be, so that what is below stays where it is.
        yield from paragraph("reading ...", cells, "dim")
        yield from [BLANK] * (_COMING - 1)
        return
    for found in read:
        if found is not None and found.error is not None:
            yield from paragraph(found.error, cells, "bad")
    known = [found.moments if found is not None else None for found in read]
    yield from _table(known, cells)
    for found in read:
        if found is None:
            continue
        for sign in found.signs:
            yield from paragraph(sign, cells, "warn")
    first = next((found for found in read if found is not None and found.histogram), None)
    if first is not None:
        yield BLANK
        yield from histogram.columns(first, cells)


def _table(known: Sequence[Moments | None], cells: int) -> Iterator[Line]:
    """Give the numbers: two to a line, or a line for each with a column for each side."""
    rows = [_row(each) if each is not None else {} for each in known]
    labels = list(dict.fromkeys(name for row in rows for name in row))
    if len(known) == 1:
        wide = min(12, max(8, (cells - 15) // 2))
        for at in range(0, len(labels), 2):
            pair = labels[at : at + 2]
            yield tuple(piece for label in pair for piece in _cell(label, [rows[0]], wide))
        return
    wide = min(14, max(8, (cells - 7) // 2 - 1))
    heads = "".join(f" {word:>{wide}}" for word in ("left", "right"))
    if labels:
        yield (Piece(f"{'':6}{heads}", "dim"),)
    for label in labels:
        yield _cell(label, rows, wide)


def _cell(label: str, rows: Sequence[Mapping[str, str]], wide: int) -> Line:
    tone: Tone = "bad" if label in ("NaN", "inf") else ""
    text = "".join(f" {row.get(label, '-'):>{wide}}" for row in rows)
    return Piece(f"{label:<6}", "dim"), Piece(text, tone), Piece("  ")


def _row(known: Moments) -> Mapping[str, str]:
    found = {}
    if known.finite:
        named = (("min", known.low), ("mean", known.mean), ("max", known.high), ("std", known.std))
        found = {label: f"{value:.5g}" for label, value in (*named, ("norm", known.norm))}
    found["zeros"] = f"{known.zeros:,}"
    found |= {label: f"{n:,}" for label, n in (("NaN", known.nans), ("inf", known.infs)) if n}
    return found
