"""Statistics of one tensor, read on demand and in pieces if it is large, and its text histogram."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ckpttool.browser.lines import BLANK, Line, TextPiece
from ckpttool.browser.listing import Row
from ckpttool.commands import stats
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.source import StreamedArray
from ckpttool.core.text import describe_error
from ckpttool.listing.rows import TensorRow
from ckpttool.verification.moments import Moments, compute_moments, histogram


@dataclass(frozen=True, slots=True)
class TensorNumbers:
    """A tensor's moments, histogram and warning signs, or the error that prevented reading them."""

    moments: Moments | None = None
    histogram: tuple[int, ...] = ()
    signs: tuple[str, ...] = ()
    error: str | None = None


def read_numbers(row: Row | None, done: Callable[[TensorNumbers | None], None]) -> Iterator[None]:
    """Read a tensor piece by piece; report the result at the end, None if it has no numbers.

    Large tensors are read twice, and their units are not examined; see stats.signs.
    """
    if not isinstance(row, TensorRow) or row.leaf.dtype == "string" or not row.leaf.size:
        done(None)
        return
    try:
        values = row.leaf.values()
        if isinstance(values, StreamedArray):
            yield from _read_streaming(row, values, done)
            return
        statistics = stats.tensor_stats(row.path, row.keys, row.leaf, values)
        done(TensorNumbers(statistics.moments, statistics.histogram, statistics.signs))
    except CkpttoolError as error:
        done(TensorNumbers(error=describe_error(error)))


def _read_streaming(
    row: TensorRow, values: StreamedArray, done: Callable[[TensorNumbers | None], None]
) -> Iterator[None]:
    moments = Moments()
    for piece in values:
        moments += compute_moments(piece)
        yield
    counts: list[int] = []
    for piece in values:
        here = histogram(piece, moments)
        counts = [a + b for a, b in zip(counts, here, strict=True)] if counts else list(here)
        yield
    done(TensorNumbers(moments, tuple(counts), tuple(stats.find_warning_signs(row.keys, row.leaf, moments))))


_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ACROSS = " ▏▎▍▌▋▊▉█"
_TALL = 4


def column_lines(numbers: TensorNumbers, cells: int) -> list[Line]:
    """Return the histogram as columns, four lines tall, with its range below; empty without a histogram."""
    counts, moments = numbers.histogram, numbers.moments
    if not counts or moments is None:
        return []
    width = max(1, min(3, cells // len(counts)))
    most = max(counts)
    # Nonzero counts stay visible.
    heights = [max(1, round(count / most * _TALL * 8)) if count else 0 for count in counts]
    lines: list[Line] = []
    for row in range(_TALL - 1, -1, -1):
        text = "".join(_EIGHTHS[min(8, max(0, height - 8 * row))] * width for height in heights)
        lines.append((TextPiece(text.rstrip(), "bar"),))
    low, high = f"{moments.low:.4g}", f"{moments.high:.4g}"
    gap = max(1, width * len(counts) - len(low) - len(high))
    return [*lines, (TextPiece(f"{low}{' ' * gap}{high}", "dim"),)]


def bar_lines(numbers: TensorNumbers, cells: int) -> list[Line]:
    """Return a line per histogram range: its ends, a bar, the count and the share."""
    counts, moments = numbers.histogram, numbers.moments
    if not counts or moments is None:
        return []
    step = (moments.high - moments.low) / len(counts)
    ends = [f"{moments.low + step * at:.4g}" for at in range(len(counts))] + [f"{moments.high:.4g}"]
    wide, digits = max(map(len, ends)), len(f"{max(counts):,}")
    room = max(4, cells - 2 * wide - digits - 15)
    lines: list[Line] = []
    for at, count in enumerate(counts):
        label = f"{ends[at]:>{wide}} to {ends[at + 1]:>{wide}}  "
        bar = _draw_bar(count / max(counts) * room, count)
        share = f"{count / moments.finite:.1%}"
        lines.append(
            (
                TextPiece(label, "dim"),
                TextPiece(f"{bar:<{room}}", "bar"),
                TextPiece(f"  {count:>{digits},} {share:>6}"),
            )
        )
    return lines


def _draw_bar(length: float, count: int) -> str:
    eighths = max(round(8 * length), int(count > 0))
    return _ACROSS[8] * (eighths // 8) + _ACROSS[eighths % 8].strip()


def histogram_lines(read: Sequence[TensorNumbers | None], cells: int) -> list[Line]:
    """Return the histogram bars of each side, one side after the other."""
    lines: list[Line] = []
    for word, numbers in zip(("left", "right") if len(read) > 1 else ("",), read, strict=True):
        if numbers is not None:
            lines += [(TextPiece(word, "head"),)] if word else []
            lines += [*bar_lines(numbers, cells), BLANK]
    return lines
