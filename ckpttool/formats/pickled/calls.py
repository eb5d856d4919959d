"""What is said of the calls that unpickling would make: the names, never the calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_LINES = 20


def notes(names: Iterable[str]) -> tuple[str, ...]:
    """Return one line for each name; what a file names beyond twenty is counted."""
    told = list(names)
    lines = [
        f"unpickling this file would call {name}; nothing was run, and it is listed as a record"
        for name in told[:_LINES]
    ]
    if len(told) > _LINES:
        lines.append(f"unpickling this file would call {len(told) - _LINES:,} more; --json names them")
    return tuple(lines)


def details(names: Iterable[str]) -> dict[str, Any]:
    """Return `calls`, the list of all names, for a checkpoint's details; nothing for none."""
    told = list(names)
    return {"calls": told} if told else {}
