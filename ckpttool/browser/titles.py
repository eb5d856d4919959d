"""The first line and short messages: which checkpoint it is, how much is in it, how far a comparison is."""

from __future__ import annotations

import os

from ckpttool.browser.comparison import Comparison
from ckpttool.browser.lines import Line, Piece, fitted, padded
from ckpttool.browser.look import Look
from ckpttool.ops.summary import Summary
from ckpttool.shown import count, size
from ckpttool.wire import asked

_SHORTEST = 12


def title(look: Look, comparison: Comparison | None, cells: int) -> Line:
    """Return the first line: what is shown, and in a few words of what kind it is."""
    if comparison is not None:
        state = f"  {comparison.state()} "
        room = max(_SHORTEST, (cells - len(state) - 5) // 2)
        left, right = (fitted(os.path.basename(each.checkpoint.path), room) for each in look.summaries)
        names = padded(f" {left} ↔ {right}", max(0, cells - len(state)))
        return Piece(names, "head"), Piece(state, "mark")
    found = look.summaries[0]
    verdict = asked.verdict(found.checkpoint.asks)
    warning = "" if verdict == asked.PLAIN else f" {verdict} "
    name = os.path.basename(os.path.normpath(found.checkpoint.path))
    said = _facts(found, cells - len(warning) - min(len(name), 2 * _SHORTEST) - 3)
    room = max(_SHORTEST, cells - len(said) - len(warning) - 3)
    head = f" {fitted(name, room)}"
    gap = " " * max(1, cells - len(head) - len(said) - len(warning) - 1)
    return Piece(head, "head"), Piece(f"{gap}{said} ", "dim"), Piece(warning, "warn")


def _facts(found: Summary, cells: int) -> str:
    """Return what of it fits, the most telling first."""
    totals = found.totals
    words = [
        count(totals.tensors, "tensor"),
        size(totals.nbytes),
        found.checkpoint.format,
        found.layout or "no layout",
        count(totals.parameters, "parameter"),
    ]
    said: list[str] = []
    for word in words:
        if len(" · ".join([*said, word])) <= cells:
            said.append(word)
    return " · ".join(said)


def hits(found: tuple[int, int] | None) -> str:
    """Return which hit of how many it is."""
    if found is None:
        return ""
    at, number = found
    return f"{at:,} of {number:,}" if number else "not found"
