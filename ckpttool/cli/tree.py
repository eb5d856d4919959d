"""The module tree that `inspect` prints: plain lines, because a table of 8,000 rows would take seconds."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ckpttool.cli import asking
from ckpttool.cli.columns import BOLD, PLAIN, Line, columns, drawn, styled, wrapped
from ckpttool.cli.output import clean
from ckpttool.leaf import Leaf
from ckpttool.ops.modules import Module, given
from ckpttool.ops.rows import TensorRow, ValueRow, natural, shown_value
from ckpttool.ops.summary import Summary

Sort = Literal["file", "size", "name"]

_UNITS = ("B", "kB", "MB", "GB", "TB")
_NUMBERED = re.compile(r"(?:layer(?:_with_weights)?-)?[0-9]+")


@dataclass(frozen=True, slots=True)
class View:
    """How the tree is shown.

    `keys` and `aliases` add lines below a tensor: its native key, all its other paths. Modules at `depth` are
    one line each. `names` adds what loading the file would import and call. `quiet` leaves out everything but
    the tree.
    """

    keys: bool = False
    aliases: bool = False
    depth: int | None = None
    sort: Sort = "file"
    quiet: bool = False
    names: bool = False


def size(nbytes: int) -> str:
    """Return a number of bytes as people read it, in powers of a thousand."""
    value, unit = float(nbytes), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def count(number: int, word: str) -> str:
    """Return `1 tensor`, `2 tensors`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def render(found: Summary, view: View) -> str:
    """Return the tree with a header, what the format adds, and notes."""
    lines = list(_lines(found.modules[0], view)) if found.modules else []
    body = drawn(lines, columns())
    if view.quiet:
        return "\n".join(body)
    from ckpttool.cli.signatures import signatures

    said = signatures(found.checkpoint.details, columns())
    table = asking.table(found.checkpoint.asks) if view.names else []
    parts = [_header(found), body, said, table, [wrapped(f"note: {clean(note)}") for note in found.notes]]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _header(found: Summary) -> list[str]:
    checkpoint, totals = found.checkpoint, found.totals
    layout = found.layout or "none recognised"
    checks = "no checksums" if checkpoint.integrity == "none" else f"{checkpoint.integrity} checksums"
    written = f", {clean(checkpoint.writer)}" if checkpoint.writer else ""
    lines = [
        f"{BOLD}{clean(checkpoint.path)}{PLAIN}" if styled() else clean(checkpoint.path),
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
    return [*lines, *asking.line(checkpoint.asks)]


def _frozen(found: Summary) -> str:
    frozen = sum(
        row.leaf.size for row in found.tensors if row.leaf.role == "parameter" and row.leaf.trainable is False
    )
    return f" ({frozen:,} frozen)" if frozen else ""


def _lines(root: Module, view: View) -> Iterator[Line]:
    waiting = _entries(root, 0, view.sort)[::-1]
    while waiting:
        level, name, entry = waiting.pop()
        if not isinstance(entry, Module):
            yield _row(level, name, entry, view)
            continue
        module = entry
        while module.step:
            # A module that only holds one module is no step of its own.
            (module,) = module.below.values()
            name = f"{name}/{module.name}"
        folded = view.depth is not None and level + 1 >= view.depth
        yield _module(level, name, module, folded=folded)
        if not folded:
            waiting += _entries(module, level + 1, view.sort)[::-1]


_Entry = tuple[int, str, TensorRow | ValueRow | Module]


def _entries(module: Module, level: int, sort: Sort) -> list[_Entry]:
    entries: list[_Entry] = [(level, name, row) for name, row in module.rows]
    entries += [(level, name, below) for name, below in module.below.items()]
    if sort == "name":
        entries.sort(key=lambda entry: natural(entry[1]))
    elif sort == "size":
        entries.sort(key=lambda entry: -_nbytes(entry[2]))
    return entries


def _nbytes(entry: TensorRow | ValueRow | Module) -> int:
    if isinstance(entry, Module):
        return entry.nbytes
    return entry.leaf.nbytes if isinstance(entry, TensorRow) else 0


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


def kind(module: Module) -> str:
    """Return a module's class and activation, `Dense relu`, as far as the file names them.

    Where Keras numbers its layers (`layer-3`, `_operations/3`), the layer's own name stands before them.
    """
    what = " ".join(clean(word) for word in (module.kind or "", activation(module.facts)) if word)
    return ": ".join(word for word in (clean(_layer(module)), what) if word)


def _layer(module: Module) -> str:
    """Return the name of a layer whose path has only its number: the file's, or that of its variables."""
    if not _NUMBERED.fullmatch(module.name):
        return ""
    named = module.facts.get("layer")
    if isinstance(named, str):
        return named
    stored = {
        row.leaf.name.rpartition("/")[0]
        for _, row in module.rows
        if isinstance(row.leaf, Leaf) and row.leaf.name
    }
    return stored.pop().rpartition("/")[2] if len(stored) == 1 else ""


def activation(facts: Mapping[str, Any]) -> str:
    """Return the activation that a module's facts name, "linear" left out because it is none."""
    named = facts.get("activation")
    return named if isinstance(named, str) and named != "linear" else ""


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
