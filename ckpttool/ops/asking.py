"""What is told of a file that asks for more than plain data: its notes, its JSON object."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckpttool.wire import asked
from ckpttool.wire.asked import Asked

_LINES = 20


def notes(asks: Iterable[Asked]) -> tuple[str, ...]:
    """Return a line for each name that unpickling would call or could have called; beyond twenty a count."""
    acting = [each for each in asked.of(asks, asked.CODE) if each.by == "pickle"]
    lines = [_note(each) for each in acting[:_LINES]]
    if len(acting) > _LINES:
        lines.append(f"unpickling this file would call {len(acting) - _LINES:,} more; --json names them")
    return tuple(lines)


def _note(each: Asked) -> str:
    if each.calls:
        return f"unpickling this file would call {each.name}; nothing was run, and it is listed as a record"
    return f"unpickling this file would import {each.name}, which can act; nothing was run"


def document(asks: Iterable[Asked]) -> dict[str, Any]:
    """Return the JSON object: the worst verdict, and every name with its own."""
    found = list(asks)
    return {"verdict": asked.verdict(found), "names": [each.document() for each in found]}
