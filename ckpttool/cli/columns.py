"""Lines in columns that fit the terminal: names, what they are, their numbers, and a note."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import NamedTuple, TextIO

from ckpttool.cli import output
from ckpttool.shown import clean, shortened

_NARROWEST = 60
_HANGING = " " * 4
# What a column is cut down to when the terminal is narrow, and what it never exceeds.
_NAME, _WHAT, _NOTE = (18, 60), (13, 40), (20, 80)
_CLASS = 20
# A path shortened to less than this says nothing.
_SHORTEST = 8
BOLD, DIM, PLAIN = map(output.style, "120")


class Line(NamedTuple):
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


def columns() -> int:
    """Return the width to print in: the terminal's, or what COLUMNS says; 80 in a pipe."""
    return max(_NARROWEST, shutil.get_terminal_size((80, 24)).columns)


def wrapped(sentence: str, stream: TextIO | None = None) -> str:
    """Return a labelled sentence, on a terminal in lines of its width; a path in it is never broken.

    `stream` is where it goes, stdout by default.
    """
    if not (stream or sys.stdout).isatty():
        return sentence
    return textwrap.fill(
        sentence, columns(), subsequent_indent=_HANGING, break_long_words=False, break_on_hyphens=False
    )


def beside(path: str, used: int) -> str:
    """Return a path for a line with `used` other characters: whole in a pipe, to be copied from there."""
    return shortened(path, max(2 * _SHORTEST, columns() - used)) if sys.stdout.isatty() else path


def styled() -> bool:
    """Return whether colours are shown: on a terminal that knows them, unless NO_COLOR is set."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def ended(line: str) -> str:
    """Return the line without spaces at its end, in front of the end of a style too."""
    line = line.rstrip()
    return line.removesuffix(PLAIN).rstrip() + PLAIN if line.endswith(PLAIN) else line


def drawn(lines: list[Line], width: int) -> list[str]:
    """Return the lines in columns that fit the width."""
    if not lines:
        return []
    lines = [_inert(line) for line in lines]
    elements = max(10, *(len(line.elements) for line in lines))
    nbytes = max(7, *(len(line.nbytes) for line in lines))
    names = max(2 * line.level + len(line.name) for line in lines)
    # A value has the room of the empty columns after it, and asks for no width of its own.
    whats = max((len(line.what) for line in lines if line.nbytes), default=0)
    # A class may go on where a module has no parameters, so it gives way first.
    types = max([_CLASS, *(len(line.what) for line in lines if line.nbytes and not line.module)])
    notes = max((len(line.lead) + len(line.note) for line in lines if line.nbytes), default=0)
    spare = width - elements - nbytes - (8 if notes else 6)
    # Deep names begin far to the right: the column grows with that, as far as a terminal allows.
    least, most = _NAME
    deepest = max(2 * line.level for line in lines)
    least = max(least, min(deepest + least // 2, width // 2 - 4))
    name, what, note = _fitted([(names, (least, most)), (whats, _WHAT), (notes, _NOTE)], types, spare)
    colours = styled()
    title = f"{'':<{name}}  {'':<{what}}  {'parameters':>{elements}}  {'size':>{nbytes}}"
    text = [f"{DIM}{title}{PLAIN}" if colours else title] if any(line.nbytes for line in lines) else []
    for line in lines:
        # However deep a module is, its name keeps half of the column if it needs that.
        indent = " " * min(2 * line.level, max(name // 2, name - len(line.name)))
        # What has no numbers may go on where they would stand.
        room = name if line.nbytes else max(name, width // 2)
        left = f"{indent + shortened(line.name, room - len(indent)):<{name}}"
        if line.nbytes:
            room = what if line.elements else what + elements
            said = shortened(line.what, room)
            numbers = what + 2 + elements - len(said)
            middle = f"{said}{line.elements:>{numbers}}  {line.nbytes:>{nbytes}}"
        else:
            middle = shortened(line.what, width - len(left) - 2)
        right = _noted(line, note if line.nbytes else width - len(left) - 4 - len(middle))
        if colours:
            left = f"{BOLD}{left}{PLAIN}" if line.module else left
            right = f"{DIM}{right}{PLAIN}" if right else ""
        text.append(ended(f"{left}  {middle}  {right}"))
        text += [f"{indent}    {below}" for below in line.below]
    return text


def _inert(line: Line) -> Line:
    """Return the line without what would break it into several or steer a terminal."""
    if all(map(str.isprintable, (*line[1:7], *line.below))):
        return line
    name, what, elements, nbytes, note, lead = map(clean, line[1:7])
    return Line(
        line.level, name, what, elements, nbytes, note, lead, line.module, tuple(map(clean, line.below))
    )


def _noted(line: Line, width: int) -> str:
    room = width - len(line.lead)
    if not line.lead or room < min(len(line.note), _SHORTEST):
        return shortened(line.lead.split(" ")[0] if line.lead else line.note, width)
    return line.lead + shortened(line.note, room)


def _fitted(asked: Iterable[tuple[int, tuple[int, int]]], types: int, spare: int) -> list[int]:
    """Return a width for each column: what it asks for, less where the room ends, the last column first.

    The middle column gives up what is beyond `types` before all others.
    """
    wanted = [(min(natural, most), least) for natural, (least, most) in asked]
    given = [width for width, _ in wanted]
    # Where even the least is too much, the notes go first.
    steps = ((1, types), (2, wanted[2][1]), (0, wanted[0][1]), (1, wanted[1][1]), (2, 0), (0, 8), (1, 8))
    for at, least in steps:
        over = sum(given) - spare
        if over > 0:
            given[at] = min(given[at], max(least, given[at] - over))
    return given
