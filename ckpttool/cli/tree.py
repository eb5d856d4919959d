"""The module tree that `inspect` prints: plain lines, because a table of 8,000 rows would take seconds."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from ckpttool import urls
from ckpttool.cli.columns import BOLD, PLAIN, Line, columns, drawn, styled, wrapped
from ckpttool.ops import asking
from ckpttool.ops.modules import Module, Sort, entries, given, kind, through
from ckpttool.ops.rows import TensorRow, ValueRow, shown_value
from ckpttool.ops.summary import Summary
from ckpttool.shown import clean, count, size


@dataclass(frozen=True, slots=True)
class View:
    """How the tree is shown.

    `keys` and `aliases` add lines below a tensor: its native key, all its other paths. Modules at `depth` are
    one line each. `names` adds what loading the file would import and call. `quiet` leaves out everything but
    the tree. `whole` shows all values and tensors, however many.
    """

    keys: bool = False
    aliases: bool = False
    depth: int | None = None
    sort: Sort = "file"
    quiet: bool = False
    names: bool = False
    whole: bool = False


# More plain values in one module than _MANY are not listed but the first ones; nor more than so many in all.
_MANY, _FIRST, _MOST_VALUES, _MOST_TENSORS = 100, 20, 1000, 10_000


def render(found: Summary, view: View) -> str:
    """Return the tree with a header, what the format adds, and notes."""
    lines = list(_lines(found.modules[0], view)) if found.modules else []
    body = drawn(lines, columns())
    if view.quiet:
        return "\n".join(body)
    from ckpttool.ops.signatures import signatures

    said = signatures(found.checkpoint.details, columns())
    table = asking.table(found.checkpoint.asks) if view.names else []
    parts = [_header(found), body, said, table, [wrapped(f"note: {clean(note)}") for note in found.notes]]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _header(found: Summary) -> list[str]:
    checkpoint, totals = found.checkpoint, found.totals
    layout = found.layout or "none recognised"
    checks = "no checksums" if checkpoint.integrity == "none" else f"{checkpoint.integrity} checksums"
    written = f", {clean(checkpoint.writer)}" if checkpoint.writer else ""
    where = clean(urls.spelled(checkpoint.path))
    lines = [
        f"{BOLD}{where}{PLAIN}" if styled() else where,
        f"format {checkpoint.format} ({checks}){written}",
        f"layout {layout}" + (f": {clean(found.evidence)}" if found.evidence else ""),
        f"{count(totals.tensors, 'tensor')}, {count(totals.parameters, 'parameter')}{_frozen(found)}, "
        f"{size(totals.nbytes)} ({size(totals.stored_nbytes)} on disk)",
    ]
    if sum(1 for sums in totals.roles.values() if sums.nbytes) > 1:
        # Trained weights, and beside them what training needs: experience may outweigh everything else.
        rows = [(role, *sums) for role, sums in totals.roles.items()]
        lines += [
            f"  {role:<9}  {count(n, 'tensor'):>13}  {elements:>15,}  {size(nbytes):>7}"
            for role, n, elements, nbytes in rows
        ]
    said = asking.sentence(checkpoint.asks)
    return [*lines, wrapped(said)] if said else lines


def _frozen(found: Summary) -> str:
    frozen = sum(
        row.leaf.size for row in found.tensors if row.leaf.role == "parameter" and row.leaf.trainable is False
    )
    return f" ({frozen:,} frozen)" if frozen else ""


def _lines(root: Module, view: View) -> Iterator[Line]:
    waiting = [(0, name, entry) for name, entry in reversed(_shown(root, view))]
    left = {TensorRow: _MOST_TENSORS, ValueRow: _MOST_VALUES}
    over = dict.fromkeys(left, 0)
    while waiting:
        level, name, entry = waiting.pop()
        if isinstance(entry, _More):
            yield Line(level, f"and {entry.values:,} more", "values: --all shows them", "", "", "")
            continue
        if not isinstance(entry, Module):
            left[type(entry)] -= 1
            if view.whole or left[type(entry)] >= 0:
                yield _row(level, name, entry, view)
            else:
                over[type(entry)] += 1
            continue
        name, module = through(name, entry)
        folded = view.depth is not None and level + 1 >= view.depth
        yield _module(level, name, module, folded=folded)
        if not folded:
            waiting += [(level + 1, name, each) for name, each in reversed(_shown(module, view))]
    hidden = [count(over[kind], word) for kind, word in _ROWS if over[kind]]
    if hidden:
        yield Line(
            0, f"not shown: {' and '.join(hidden)}", "--all shows them, --depth N folds modules", "", "", ""
        )


_ROWS: tuple[tuple[type[TensorRow | ValueRow], str], ...] = ((TensorRow, "tensor"), (ValueRow, "value"))


@dataclass(frozen=True, slots=True)
class _More:
    """Values of a module that are counted, not listed."""

    values: int


def _shown(module: Module, view: View) -> list[tuple[str, Module | TensorRow | ValueRow | _More]]:
    """Return what stands in a module; of very many plain values the first, and how many more there are."""
    found: list[tuple[str, Module | TensorRow | ValueRow | _More]] = list(entries(module, view.sort))
    values = sum(isinstance(entry, ValueRow) for _, entry in found)
    if view.whole or values <= _MANY:
        return found
    kept = []
    seen = 0
    for name, entry in found:
        seen += isinstance(entry, ValueRow)
        if seen <= _FIRST or not isinstance(entry, ValueRow):
            kept.append((name, entry))
    return [*kept, ("", _More(values - _FIRST))]


def _module(level: int, name: str, module: Module, *, folded: bool) -> Line:
    note = "" if module.built else f"object of {clean(str(module.kind))}, not built"
    what = kind(module) if module.built else ""
    if note and module.tensors:
        # Its numbers leave less room than a line of its own.
        what, note = kind(module).rpartition(".")[2], "not built"
    if folded:
        what = f"{what} ({count(module.tensors, 'tensor')})".strip()
    return Line(
        level,
        clean(name),
        what,
        f"{module.parameters:,}" if module.parameters else "",
        size(module.nbytes) if module.tensors else "",
        note,
        module=True,
    )


def _row(level: int, name: str, row: TensorRow | ValueRow, view: View) -> Line:
    if isinstance(row, ValueRow):
        shown = shown_value(row.leaf)
        text = clean(str(shown["value"]))
        plain = shown["type"] in ("int", "float", "bool", "NoneType")
        return Line(level, clean(name), f"= {text}" if plain else f"{shown['type']} {text}", "", "", "")
    leaf = row.leaf
    below: tuple[str, ...] = (f"key {clean(leaf.key)}",) if view.keys else ()
    if view.aliases:
        below += tuple(f"also {clean(alias)}" for alias in row.aliases)
    lead, note = _note(row, told=not view.aliases)
    return Line(
        level,
        clean(name),
        _what(leaf.dtype, leaf.shape),
        f"{leaf.size:,}" if leaf.role == "parameter" else "",
        size(leaf.nbytes),
        clean(note),
        clean(lead),
        below=below,
    )


@functools.lru_cache(1024)
def _what(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"


def _note(row: TensorRow, *, told: bool) -> tuple[str, str]:
    """Return what a tensor is besides a trained one: a lead, and what may be shortened after it."""
    leaf = row.leaf
    if leaf.slot is not None and row.of is not None:
        return ("", f"slot {leaf.slot}") if _told_by_path(row.path, row.of) else (f"{leaf.slot} of ", row.of)
    note = leaf.role if leaf.role != "parameter" else "frozen" if leaf.trainable is False else ""
    names = given(row.aliases) if told else []
    if names:
        more = f" (+{len(names) - 1})" if len(names) > 1 else ""
        return f"{note}  also ".lstrip(), f"{names[0]}{more}"
    return "", note


def _told_by_path(path: str, of: str) -> bool:
    """Return whether a slot's own path names its parameter: `slots/m/l1/kernel`, `l1/kernel/Adam`."""
    return f"/{path}".endswith(f"/{of}") or f"/{path.rpartition('/')[0]}".endswith(f"/{of}")
