"""A tensor's histogram in characters: a few lines of columns, or a line for each range."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttool.browser.lines import BLANK, Line, Piece
from ckpttool.browser.numbers import Numbers

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ACROSS = " ▏▎▍▌▋▊▉█"
_TALL = 4


def columns(found: Numbers, cells: int) -> list[Line]:
    """Return the histogram as columns, four lines tall, with its ends below; nothing where there is none."""
    counts, known = found.histogram, found.moments
    if not counts or known is None:
        return []
    each = max(1, min(3, cells // len(counts)))
    most = max(counts)
    # What there is at all is seen.
    heights = [max(1, round(count / most * _TALL * 8)) if count else 0 for count in counts]
    lines: list[Line] = []
    for row in range(_TALL - 1, -1, -1):
        text = "".join(_EIGHTHS[min(8, max(0, height - 8 * row))] * each for height in heights)
        lines.append((Piece(text.rstrip(), "bar"),))
    low, high = f"{known.low:.4g}", f"{known.high:.4g}"
    gap = max(1, each * len(counts) - len(low) - len(high))
    return [*lines, (Piece(f"{low}{' ' * gap}{high}", "dim"),)]


def bars(found: Numbers, cells: int) -> list[Line]:
    """Return a line for each range: its ends, a bar, how many numbers lie in it and their share."""
    counts, known = found.histogram, found.moments
    if not counts or known is None:
        return []
    step = (known.high - known.low) / len(counts)
    ends = [f"{known.low + step * at:.4g}" for at in range(len(counts))] + [f"{known.high:.4g}"]
    wide, digits = max(map(len, ends)), len(f"{max(counts):,}")
    room = max(4, cells - 2 * wide - digits - 15)
    lines: list[Line] = []
    for at, count in enumerate(counts):
        label = f"{ends[at]:>{wide}} to {ends[at + 1]:>{wide}}  "
        bar = _bar(count / max(counts) * room, count)
        share = f"{count / known.finite:.1%}"
        lines.append(
            (Piece(label, "dim"), Piece(f"{bar:<{room}}", "bar"), Piece(f"  {count:>{digits},} {share:>6}"))
        )
    return lines


def _bar(length: float, count: int) -> str:
    eighths = max(round(8 * length), int(count > 0))
    return _ACROSS[8] * (eighths // 8) + _ACROSS[eighths % 8].strip()


def pages(read: Sequence[Numbers | None], cells: int) -> list[Line]:
    """Return the bars of each side, one after the other."""
    lines: list[Line] = []
    for word, found in zip(("left", "right") if len(read) > 1 else ("",), read, strict=True):
        if found is not None:
            lines += [(Piece(word, "head"),)] if word else []
            lines += [*bars(found, cells), BLANK]
    return lines
