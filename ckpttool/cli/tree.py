"""The module tree that `inspect` prints: plain lines, because a table of 8,000 rows would take seconds."""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ckpttool.cli.output import clean
from ckpttool.ops.modules import Module
from ckpttool.ops.summary import Summary, TensorRow, ValueRow, shown_value

Sort = Literal["file", "size", "name"]

_UNITS = ("B", "kB", "MB", "GB", "TB")
_NARROWEST = 60
# What a column is cut down to when the terminal is narrow, and what it never exceeds.
_NAME, _WHAT, _NOTE = (18, 60), (13, 40), (20, 80)
# A path shortened to less than this says nothing.
_SHORTEST = 8
_NUMBER = re.compile(r"([0-9]+)")
_BOLD, _DIM, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class View:
    """How the tree is shown.

    `keys` and `aliases` add lines below a tensor: its native key, all its other paths. Modules at `depth` are
    one line each. `quiet` leaves out everything but the tree.
    """

    keys: bool = False
    aliases: bool = False
    depth: int | None = None
    sort: Sort = "file"
    quiet: bool = False


class _Line(NamedTuple):
    """One line before it is fitted: what stands in each column; `below` are further lines, never cut.

    `lead` stands before the note and is not shortened with it: "m of ", "also ".
    """

    level: int
    name: str
    what: str
    elements: str
    nbytes: str
    note: str
    lead: str = ""
    module: bool = False
    below: tuple[str, ...] = ()


def size(nbytes: int) -> str:
    """Return a number of bytes as people read it, in powers of a thousand."""
    value, unit = float(nbytes), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def count(number: int, word: str) -> str:
    """Return `1 tensor`, `2 tensors`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def columns() -> int:
    """Return the width to print in: the terminal's, or what COLUMNS says; 80 in a pipe."""
    return max(_NARROWEST, shutil.get_terminal_size((80, 24)).columns)


def shortened(text: str, width: int) -> str:
    """Return the text in at most `width` characters: the middle is left out, because both ends tell most."""
    if len(text) <= width:
        return text
    if width < 3:
        return text[: max(0, width)]
    # The end of a path tells more than its beginning.
    tail = (width - 1) * 3 // 5
    return f"{text[: width - 1 - tail]}…{text[-tail:]}"


def render(found: Summary, view: View) -> str:
    """Return the tree with a header, what the format adds, and notes."""
    lines = list(_lines(found.modules[0], view)) if found.modules else []
    body = _drawn(lines, columns())
    if view.quiet:
        return "\n".join(body)
    from ckpttool.cli.signatures import signatures

    said = signatures(found.checkpoint.details, columns())
    parts = [_header(found), body, said, [f"note: {clean(note)}" for note in found.notes]]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _header(found: Summary) -> list[str]:
    checkpoint, totals = found.checkpoint, found.totals
    layout = found.layout or "none recognised"
    checks = "no checksums" if checkpoint.integrity == "none" else f"{checkpoint.integrity} checksums"
    written = f", {clean(checkpoint.writer)}" if checkpoint.writer else ""
    lines = [
        f"{_BOLD}{clean(checkpoint.path)}{_PLAIN}" if _styled() else clean(checkpoint.path),
        f"format {checkpoint.format} ({checks}){written}",
        f"layout {layout}" + (f": {clean(found.evidence)}" if found.evidence else ""),
        f"{count(totals.tensors, 'tensor')}, {count(totals.parameters, 'parameter')}, "
        f"{size(totals.nbytes)} ({size(totals.stored_nbytes)} on disk)",
    ]
    if sum(1 for sums in totals.roles.values() if sums.nbytes) > 1:
        # Trained weights, and beside them what training needs: experience may outweigh everything else.
        rows = [(role, *sums) for role, sums in totals.roles.items()]
        lines += [
            f"  {role:<9}  {count(n, 'tensor'):>13}  {elements:>15,}  {size(nbytes):>7}"
            for role, n, elements, nbytes in rows
        ]
    return lines


def _styled() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _lines(root: Module, view: View) -> Iterator[_Line]:
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
        entries.sort(key=lambda entry: _natural(entry[1]))
    elif sort == "size":
        entries.sort(key=lambda entry: -_nbytes(entry[2]))
    return entries


def _nbytes(entry: TensorRow | ValueRow | Module) -> int:
    if isinstance(entry, Module):
        return entry.nbytes
    return entry.leaf.nbytes if isinstance(entry, TensorRow) else 0


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sorting key in which l10 comes after l2."""
    return [(int(p), p) if n % 2 else (0, p) for n, p in enumerate(_NUMBER.split(name))]


def _module(level: int, name: str, module: Module, *, folded: bool) -> _Line:
    what = kind(module) if module.built else ""
    if folded:
        what = f"{what} ({count(module.tensors, 'tensor')})".strip()
    return _Line(
        level,
        clean(name),
        what,
        f"{module.parameters:,}" if module.parameters else "",
        size(module.nbytes) if module.tensors else "",
        "" if module.built else f"object of {clean(str(module.kind))}, not built",
        module=True,
    )


def kind(module: Module) -> str:
    """Return a module's class and activation, `Dense relu`, as far as the file names them."""
    said = [module.kind or "", activation(module.facts)]
    return " ".join(clean(word) for word in said if word)


def activation(facts: Mapping[str, Any]) -> str:
    """Return the activation that a module's facts name, "linear" left out because it is none."""
    named = facts.get("activation")
    return named if isinstance(named, str) and named != "linear" else ""


def _row(level: int, name: str, row: TensorRow | ValueRow, view: View) -> _Line:
    if isinstance(row, ValueRow):
        shown = shown_value(row.leaf)
        text = clean(str(shown["value"]))
        plain = shown["type"] in ("int", "float", "bool", "NoneType")
        return _Line(level, clean(name), f"= {text}" if plain else f"{shown['type']} {text}", "", "", "")
    leaf = row.leaf
    below: tuple[str, ...] = (f"key {clean(leaf.key)}",) if view.keys else ()
    if view.aliases:
        below += tuple(f"also {clean(alias)}" for alias in row.aliases)
    lead, note = _note(row, told=not view.aliases)
    return _Line(
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
        return f"{leaf.slot} of ", row.of
    note = leaf.role if leaf.role != "parameter" else "frozen" if leaf.trainable is False else ""
    # Every Keras weight is an alias of the optimizer's private list: only names that people gave count.
    if told and row.aliases and "/_" not in row.aliases[0]:
        public = sum("/_" not in alias for alias in row.aliases)
        more = f" (+{public - 1})" if public > 1 else ""
        return f"{note}  also ".lstrip(), f"{row.aliases[0]}{more}"
    return "", note


def _drawn(lines: list[_Line], width: int) -> list[str]:
    """Return the lines in columns that fit the width."""
    if not lines:
        return []
    elements = max(10, *(len(line.elements) for line in lines))
    nbytes = max(7, *(len(line.nbytes) for line in lines))
    names = max(2 * line.level + len(line.name) for line in lines)
    # A value has the room of the empty columns after it, and asks for no width of its own.
    whats = max((len(line.what) for line in lines if line.nbytes), default=0)
    notes = max(len(line.lead) + len(line.note) for line in lines)
    spare = width - elements - nbytes - (8 if notes else 6)
    name, what, note = _fitted([(names, _NAME), (whats, _WHAT), (notes, _NOTE)], spare)
    styled = _styled()
    title = f"{'':<{name}}  {'':<{what}}  {'parameters':>{elements}}  {'size':>{nbytes}}"
    drawn = [f"{_DIM}{title}{_PLAIN}" if styled else title] if any(line.nbytes for line in lines) else []
    for line in lines:
        # However deep a module is, its name keeps half of the column.
        indent = " " * min(2 * line.level, name // 2)
        left = f"{indent + shortened(line.name, name - len(indent)):<{name}}"
        if line.nbytes:
            middle = (
                f"{shortened(line.what, what):<{what}}  {line.elements:>{elements}}  {line.nbytes:>{nbytes}}"
            )
        else:
            middle = shortened(line.what, width - name - 2)
        right = _noted(line, note if line.nbytes else width - name - 2)
        if styled:
            left = f"{_BOLD}{left}{_PLAIN}" if line.module else left
            right = f"{_DIM}{right}{_PLAIN}" if right else ""
        drawn.append(f"{left}  {middle}  {right}".rstrip())
        drawn += [f"{indent}    {below}" for below in line.below]
    return drawn


def _noted(line: _Line, width: int) -> str:
    room = width - len(line.lead)
    if not line.lead or room < min(len(line.note), _SHORTEST):
        return shortened(line.lead.split(" ")[0] if line.lead else line.note, width)
    return line.lead + shortened(line.note, room)


def _fitted(asked: Iterable[tuple[int, tuple[int, int]]], spare: int) -> list[int]:
    """Return a width for each column: what it asks for, less where the room ends, the last column first."""
    wanted = [(min(natural, most), least) for natural, (least, most) in asked]
    given = [width for width, _ in wanted]
    # Where even the least is too much, the notes go first.
    for at, least in ((2, wanted[2][1]), (0, wanted[0][1]), (1, wanted[1][1]), (2, 0), (0, 8), (1, 8)):
        over = sum(given) - spare
        if over > 0:
            given[at] = max(min(given[at], least), given[at] - over)
    return given
