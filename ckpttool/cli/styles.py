"""Styles of text on a terminal: colors, width, and control characters of files, which are escaped."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import TextIO

from ckpttool.core import deferred
from ckpttool.core.text import clean

# Our own styles carry a random marker that no file can contain: `escape_controls` escapes all other escape
# characters.
_MARK = os.urandom(8).hex()
_STYLE = deferred.compile(f"\x1b{_MARK}(\\[[0-9;]*m)")
_REQUESTED = deferred.compile(r"\x1b(?=\[[0-9;]*m)")


def style_code(code: str) -> str:
    """Return the escape code of a style: "1" is bold, "2" dim, "0" resets."""
    return f"\x1b{_MARK}[{code}m"


def adopt_rich_styles(text: str) -> str:
    """Return text drawn by rich from clean cells, with its styles replaced by our own markers."""
    return _REQUESTED.sub(f"\x1b{_MARK}", text)


def escape_controls(text: str, *, styles: bool = False) -> str:
    """Return lines of printable characters that cannot control a terminal, with our styles if wanted."""
    if text.replace("\n", "").isprintable():
        return text
    pieces = _STYLE.split(text)
    for at, piece in enumerate(pieces):
        if at % 2:
            pieces[at] = f"\x1b{piece}" if styles else ""
        else:
            pieces[at] = "\n".join(map(clean, piece.split("\n")))
    return "".join(pieces)


_NARROWEST = 60
_HANGING = " " * 4
BOLD, DIM, PLAIN, RED, GREEN, YELLOW = map(style_code, ("1", "2", "0", "1;31", "1;32", "1;33"))


def terminal_width() -> int:
    """Return the output width: the terminal's or that of COLUMNS; 80 in a pipe."""
    return max(_NARROWEST, shutil.get_terminal_size((80, 24)).columns)


def wrap_sentence(sentence: str, stream: TextIO | None = None) -> str:
    """Return a labelled sentence, wrapped to the terminal's width; paths are never broken.

    `stream` is the output stream, stdout by default.
    """
    if not (stream or sys.stdout).isatty():
        return sentence
    return textwrap.fill(
        sentence, terminal_width(), subsequent_indent=_HANGING, break_long_words=False, break_on_hyphens=False
    )


def format_fix(fix: str, indent: str = "") -> str:
    """Return the labelled fix of a finding, with a command as this program was started."""
    from ckpttool.core.installation import name_program

    return wrap_sentence(f"{indent}fix: {name_program(clean(fix))}")


def wrap_command(label: str, words: Iterable[str]) -> str:
    """Return a labelled command whose lines fit the terminal and end with a backslash: it can be pasted.

    Lines end between words; within one only after a slash, if the word is longer than a line. The rest of
    such a word is not indented, because the shell would end the word there.
    """
    width = terminal_width() - 2
    lines = [label]
    for number, word in enumerate(map(clean, map(shlex.quote, words))):
        if number and len(lines[-1]) + 1 + len(word) > width:
            lines[-1] += " \\"
            lines.append(_HANGING)
        elif number:
            lines[-1] += " "
        steps = word.split("/") if len(lines[-1]) + len(word) > width else [word]
        for step, text in enumerate(steps):
            piece = f"{text}/" if step < len(steps) - 1 else text
            if step and len(lines[-1]) + len(piece) > width:
                lines[-1] += "\\"
                lines.append("")
            lines[-1] += piece
    return "\n".join(lines)


def has_colors() -> bool:
    """Return whether colors are shown: on a color terminal, or where a variable forces them.

    https://no-color.org, https://force-color.org and https://bixense.com/clicolors.
    """
    forced = any(os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE"))
    if os.environ.get("NO_COLOR"):
        return False
    return forced or (sys.stdout.isatty() and os.environ.get("TERM") != "dumb")


def dim(line: str) -> str:
    """Return the line in a weak color, if colors are shown."""
    return f"{DIM}{line}{PLAIN}" if has_colors() else line


def strip_line_end(line: str) -> str:
    """Return the line without trailing spaces, including those before a style's end."""
    line = line.rstrip()
    return line.removesuffix(PLAIN).rstrip() + PLAIN if line.endswith(PLAIN) else line
