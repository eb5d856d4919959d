"""Column layout that fits the terminal: names, kinds, numbers and a note."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from ckpttool.cli.styles import BOLD, DIM, PLAIN, has_colors, strip_line_end, terminal_width
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.text import clean, shorten

# Minimum (on a narrow terminal) and maximum width of each column.
_NAME, _WHAT, _NOTE = (18, 60), (13, 40), (20, 80)
_CLASS = 20
# A note shortened below the first width is useless, and a path below the second.
_SHORTEST, SHORTEST_PATH = 8, 16


class ColumnLine(NamedTuple):
    """One row before fitting: the text of each column; `below` are further lines, never shortened.

    `lead` precedes the note and is not shortened with it, e.g. "m of " or "also ".
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


def fit_path(path: str, used: int) -> str:
    """Return a path shortened for a line with `used` other characters; in a pipe, the full path."""
    return shorten(path, max(SHORTEST_PATH, terminal_width() - used)) if sys.stdout.isatty() else path


def align_columns(lines: list[ColumnLine], width: int, *, cut: bool = True) -> list[str]:
    """Return the lines in columns that fit the width.

    Without `cut`, longer names, types and notes are complete and make their line longer.
    """
    if not lines:
        return []
    fit = shorten if cut else keep_whole
    lines = [_escape_line(line) for line in lines]
    elements = max(10, *(len(line.elements) for line in lines))
    nbytes = max(7, *(len(line.nbytes) for line in lines))
    names = max(2 * line.level + len(line.name) for line in lines)
    # A value may extend into the empty columns after it, so it needs no width: a plain value, and that of
    # a counter (`int64[] = 14000`).
    whats = max((len(line.what.partition(" = ")[0]) for line in lines if line.nbytes), default=0)
    # A class name may extend into the next column if its module has no parameters, so it shrinks first.
    typed = (line.what.partition(" = ")[0] for line in lines if line.nbytes and not line.module)
    types = max([_CLASS, *map(len, typed)])
    notes = max((len(line.lead) + len(line.note) for line in lines if line.nbytes), default=0)
    spare = width - elements - nbytes - (8 if notes else 6)
    # Deep names start far to the right, so the column grows with the depth as far as the terminal allows.
    least, most = _NAME
    deepest = max(2 * line.level for line in lines)
    least = max(least, min(deepest + least // 2, width // 2 - 4))
    name, what, note = _fit_widths([(names, (least, most)), (whats, _WHAT), (notes, _NOTE)], types, spare)
    colours = has_colors()
    title = f"{'':<{name}}  {'':<{what}}  {'parameters':>{elements}}  {'size':>{nbytes}}"
    text = [f"{DIM}{title}{PLAIN}" if colours else title] if any(line.nbytes for line in lines) else []
    for line in lines:
        # A name keeps up to half of the column at any depth.
        indent = " " * min(2 * line.level, max(name // 2, name - len(line.name)))
        # Rows without numbers may use the number columns.
        room = name if line.nbytes else max(name, width // 2)
        left = f"{indent + fit(line.name, room - len(indent)):<{name}}"
        if line.nbytes:
            room = what if line.elements else what + elements
            label = fit(line.what, room)
            numbers = max(what + 2 + elements - len(label), len(line.elements) + 2)
            middle = f"{label}{line.elements:>{numbers}}  {line.nbytes:>{nbytes}}"
        else:
            middle = shorten(line.what, width - len(left) - 2)
        room = note if line.nbytes else width - len(left) - 4 - len(middle)
        right = _fit_note(line, room) if cut else line.lead + line.note
        if colours:
            left = f"{BOLD}{left}{PLAIN}" if line.module else left
            right = f"{DIM}{right}{PLAIN}" if right else ""
        text.append(strip_line_end(f"{left}  {middle}  {right}"))
        text += [f"{indent}    {below}" for below in line.below]
    return text


def keep_whole(text: str, width: int) -> str:  # noqa: ARG001  # it stands for `shorten`
    """Return the text as it is."""
    return text


def _escape_line(line: ColumnLine) -> ColumnLine:
    """Return the line without characters that would break it or control a terminal."""
    if all(map(str.isprintable, (*line[1:7], *line.below))):
        return line
    name, what, elements, nbytes, note, lead = map(clean, line[1:7])
    return ColumnLine(
        line.level, name, what, elements, nbytes, note, lead, line.module, tuple(map(clean, line.below))
    )


def _fit_note(line: ColumnLine, width: int) -> str:
    room = width - len(line.lead)
    if not line.lead or room < min(len(line.note), _SHORTEST):
        return shorten(line.lead.split(" ")[0] if line.lead else line.note, width)
    return line.lead + shorten(line.note, room)


def _fit_widths(requested: Iterable[tuple[int, tuple[int, int]]], types: int, spare: int) -> list[int]:
    """Return a width for each column, shrinking the last column first if space runs out.

    The middle column is cut down to `types` before any other column shrinks.
    """
    bounds = [(min(natural, most), least) for natural, (least, most) in requested]
    widths = [width for width, _ in bounds]
    # If even the minimum widths do not fit, drop the notes first.
    steps = ((1, types), (2, bounds[2][1]), (0, bounds[0][1]), (1, bounds[1][1]), (2, 0), (0, 8), (1, 8))
    for at, least in steps:
        over = sum(widths) - spare
        if over > 0:
            widths[at] = min(widths[at], max(least, widths[at] - over))
    return widths
