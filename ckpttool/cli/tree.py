"""The module tree that `inspect` prints: plain lines, because a table of 8,000 rows would take seconds."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import typer

from ckpttool.cli.output import clean
from ckpttool.leaf import display
from ckpttool.ops.summary import Summary, TensorRow, ValueRow, shown_value

_UNITS = ("B", "kB", "MB", "GB", "TB")
_WIDEST_NAME = 44
_ESCAPE = re.compile("(\x1b\\[[0-9;]*m)")


def size(nbytes: int) -> str:
    """Return a number of bytes as people read it, in powers of a thousand."""
    value, unit = float(nbytes), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


@dataclass(slots=True)
class _Branch:
    """A module: its rows and the modules below it, by display name, in the order of the file."""

    below: dict[str, _Branch] = field(default_factory=dict)
    rows: dict[str, TensorRow | ValueRow] = field(default_factory=dict)
    record: str = ""

    def totals(self) -> tuple[int, int, int]:
        """Return tensors, trained parameters and bytes at and below the module."""
        mine = [row.leaf for row in self.rows.values() if isinstance(row, TensorRow)]
        sums = [branch.totals() for branch in self.below.values()]
        return (
            len(mine) + sum(s[0] for s in sums),
            sum(leaf.size for leaf in mine if leaf.role == "parameter") + sum(s[1] for s in sums),
            sum(leaf.nbytes for leaf in mine) + sum(s[2] for s in sums),
        )


def render(found: Summary, *, keys: bool = False, quiet: bool = False) -> str:
    """Return the tree with a header and notes; `keys` adds native keys, `quiet` drops header and notes."""
    root = _Branch()
    rows: tuple[TensorRow | ValueRow, ...] = (*found.tensors, *found.values)
    for row in rows:
        branch = root
        *modules, name = row.path.split("/")
        for module in modules:
            branch = branch.below.setdefault(module, _Branch())
        branch.rows[name] = row
    for path, container in found.checkpoint.tree.containers.items():
        if container.kind == "record" and container.name:
            _name_record(root, display(path).split("/") if path else [], container.name)
    lines = list(_lines(root, "", keys=keys))
    width = min(_WIDEST_NAME, max((len(left) for left, _ in lines), default=0))
    fit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    body = [_fitted(f"{left:<{width}}  {right}".rstrip(), fit) for left, right in lines]
    if quiet:
        return "\n".join(body)
    return "\n".join([*_header(found), "", *body, *_notes(found)])


def _name_record(branch: _Branch, segments: list[str], name: str) -> None:
    for segment in segments:
        if segment not in branch.below:
            return
        branch = branch.below[segment]
    branch.record = name


def _header(found: Summary) -> list[str]:
    checkpoint, totals = found.checkpoint, found.totals
    layout = found.layout or "none recognised"
    checks = "no checksums" if checkpoint.integrity == "none" else f"{checkpoint.integrity} checksums"
    written = f", {clean(checkpoint.writer)}" if checkpoint.writer else ""
    return [
        typer.style(clean(checkpoint.path), bold=True),
        f"format {checkpoint.format} ({checks}){written}",
        f"layout {layout}" + (f": {clean(found.evidence)}" if found.evidence else ""),
        f"{_count(totals.tensors, 'tensor')}, {_count(totals.parameters, 'parameter')}, "
        f"{size(totals.nbytes)} ({size(totals.stored_nbytes)} on disk)",
    ]


def _notes(found: Summary) -> list[str]:
    return ["", *(f"note: {clean(note)}" for note in found.notes)] if found.notes else []


def _lines(branch: _Branch, indent: str, *, keys: bool, top: bool = True) -> Iterator[tuple[str, str]]:
    entries: list[tuple[str, _Branch | TensorRow | ValueRow]] = [*branch.rows.items(), *branch.below.items()]
    for number, (name, entry) in enumerate(entries):
        last = number == len(entries) - 1
        tee, bar = ("└─ ", "   ") if last else ("├─ ", "│  ")
        if top and len(entries) == 1:
            tee, bar = "", ""
        while isinstance(entry, _Branch) and not entry.rows and not entry.record and len(entry.below) == 1:
            # A module that only holds one module is no step of its own.
            (inner, entry), *_ = entry.below.items()
            name = f"{name}/{inner}"
        left = indent + tee + clean(name)
        if isinstance(entry, _Branch):
            yield left, _module(entry)
            yield from _lines(entry, indent + bar, keys=keys, top=False)
        else:
            yield left, _row(entry, keys=keys)


def _module(branch: _Branch) -> str:
    tensors, parameters, nbytes = branch.totals()
    counted = _count(parameters, "parameter") if parameters else _count(tensors, "tensor")
    of = f"object of {clean(branch.record)}, not built; " if branch.record else ""
    return typer.style(f"{of}{counted}, {size(nbytes)}", dim=True)


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _row(row: TensorRow | ValueRow, *, keys: bool) -> str:
    if isinstance(row, ValueRow):
        shown = shown_value(row.leaf)
        text = clean(str(shown["value"]))[:40]
        return (
            f"= {text}"
            if shown["type"] in ("int", "float", "bool", "NoneType")
            else f"{shown['type']} {text}"
        )
    leaf = row.leaf
    parts = [f"{leaf.dtype}{list(leaf.shape)}"]
    if leaf.slot is not None and row.of is not None:
        parts.append(typer.style(f"{leaf.slot} of {clean(row.of)}", dim=True))
    elif leaf.role != "parameter":
        parts.append(typer.style(leaf.role, dim=True))
    parts += [typer.style(f"also {clean(row.aliases[0])}{_more(row)}", dim=True)] if _told(row) else []
    parts += [clean(leaf.key)] if keys else []
    return "  ".join(parts)


def _told(row: TensorRow) -> bool:
    # Every Keras weight is an alias of the optimizer's private list: only names that people gave count.
    row_public = [alias for alias in row.aliases if "/_" not in alias]
    return bool(row_public) and row_public[0] == row.aliases[0]


def _more(row: TensorRow) -> str:
    public = [alias for alias in row.aliases if "/_" not in alias]
    return f" (+{len(public) - 1})" if len(public) > 1 else ""


def _fitted(line: str, columns: int | None) -> str:
    if columns is None or len(_ESCAPE.sub("", line)) <= columns:
        return line
    # Colours take no room: count what is seen, and keep every escape so that none stays open.
    room, kept = columns - 1, []
    for piece in _ESCAPE.split(line):
        if not _ESCAPE.fullmatch(piece):
            shown = piece[: max(0, room)]
            room -= len(piece)
            piece = shown + "…" if shown and room < 0 else shown
        kept.append(piece)
    return "".join(kept)
