"""Small plots in the terminal: how the returns of one checkpoint lie, or the learning curve of several."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ckpttool.cli.columns import columns
from ckpttool.ops.evaluation import Evaluation
from ckpttool.ops.ranking import Point
from ckpttool.ops.training_step import ANY_UNIT

# Fewer returns than this have no shape, and fewer points no curve.
FEWEST = 8
_FEWEST_POINTS = 3
_BARS = 8
_ROWS = 9
_WIDEST = 100
_EIGHTHS = " ▏▎▍▌▋▊▉█"
# Unicode's braille cells are 2 x 4 dots; the bit of each, by row and column (Unicode 1.1, block 2800).
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def chart(found: Sequence[Evaluation], curve: Sequence[Point], unit: str = ANY_UNIT) -> list[str]:
    """Return the lines of the plot that suits the evaluations; none where there is nothing to see."""
    if not all(np.isfinite(one.rollout.returns).all() for one in found):
        return []
    width = min(columns(), _WIDEST)
    if len(found) == 1:
        bars = histogram(found[0].rollout.returns, width, blocks=_shows(_EIGHTHS))
        return ["returns, and how many episodes", *bars] if bars else []
    if len({point.step for point in curve}) < _FEWEST_POINTS:
        return []
    return ["mean return", *learning(curve, width, unit, braille=_shows(chr(_BRAILLE)))]


def histogram(values: np.ndarray, width: int, *, blocks: bool) -> list[str]:
    """Return a bar for each range of values, no line longer than `width`."""
    low, high = float(values.min()), float(values.max())
    if len(values) < FEWEST or low == high:
        return []
    counts, edges = np.histogram(values, min(_BARS, bins(len(values))))
    names = [_number(edge) for edge in edges]
    wide, digits = max(map(len, names)), len(str(counts.max()))
    room = max(1, width - 2 * wide - digits - 8)
    lines = []
    for number, amount in enumerate(counts.tolist()):
        bar = _bar(amount / counts.max() * room, blocks=blocks)
        lines.append(f"{names[number]:>{wide}} to {names[number + 1]:>{wide}}  {amount:>{digits}}  {bar}")
    return [line.rstrip() for line in lines]


def bins(n: int) -> int:
    """Return how many bars suit n values: Rice's rule, which an outlier does not blow up."""
    return math.ceil(2 * math.cbrt(n))


def learning(curve: Sequence[Point], width: int, unit: str = ANY_UNIT, *, braille: bool) -> list[str]:
    """Return the means over steps of a unit, each run a line, with the intervals of a single run."""
    runs = [[p for p in curve if p.run == run] for run in dict.fromkeys(point.run for point in curve)]
    spans = [point.ci95 for point in curve if point.ci95 is not None] if len(runs) == 1 else []
    ends = [point.mean for point in curve] + [end for span in spans for end in span]
    low, high = min(ends), max(ends)
    names = (_number(high), _number((low + high) / 2), _number(low))
    wide = max(map(len, names))
    canvas = _Canvas(max(8, width - wide - 2), _ROWS, braille=braille)
    first, last = curve[0].step, curve[-1].step
    canvas.scale(first, last, low, high)
    for run in runs:
        if spans:
            for point in run:
                canvas.span(point.step, *(point.ci95 or (point.mean, point.mean)))
        for one, other in pairwise(run):
            canvas.line((one.step, one.mean), (other.step, other.mean))
        for point in run:
            canvas.point(point.step, point.mean)
    labels = {0: names[0], _ROWS // 2: names[1], _ROWS - 1: names[2]}
    edge = "┤" if braille else "|"
    lines = [f"{labels.get(row, ''):>{wide}} {edge}{text}" for row, text in enumerate(canvas.rows())]
    start, end = f"{first:,}", f"{last:,} {unit}"
    gap = width - wide - 2 - len(start) - len(end)
    return [*lines, f"{'':{wide}}  {start}{'':{max(1, gap)}}{end}"]


class _Canvas:
    """Dots on a grid of characters: 2 x 4 to each in braille, else one."""

    def __init__(self, width: int, height: int, *, braille: bool) -> None:
        self.braille = braille
        across, down = (2, 4) if braille else (1, 1)
        self.ink = np.zeros((height * down, width * across), np.int8)

    def scale(self, left: float, right: float, bottom: float, top: float) -> None:
        """Say which values the edges stand for."""
        self.left, self.bottom = left, bottom
        self.wide, self.tall = (right - left) or 1.0, (top - bottom) or 1.0

    def point(self, x: float, y: float) -> None:
        self.ink[self._at(x, y)] = 2

    def span(self, x: float, low: float, high: float) -> None:
        """Draw an interval as every other dot of a vertical line."""
        (top, column), (bottom, _) = self._at(x, high), self._at(x, low)
        self.ink[top : bottom + 1 : 2 if self.braille else 1, column] = 1

    def line(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Draw the line between two points."""
        (row, column), (last_row, last_column) = self._at(*start), self._at(*end)
        dots = max(abs(last_row - row), abs(last_column - column)) + 1
        down = np.linspace(row, last_row, dots).round().astype(int)
        across = np.linspace(column, last_column, dots).round().astype(int)
        self.ink[down, across] = np.maximum(self.ink[down, across], 2 if self.braille else 1)

    def rows(self) -> list[str]:
        """Return the characters, line by line from the top."""
        if not self.braille:
            return ["".join(" .*"[dot] for dot in row).rstrip() for row in self.ink.tolist()]
        height, width = self.ink.shape[0] // 4, self.ink.shape[1] // 2
        cells = (self.ink > 0).reshape(height, 4, width, 2).transpose(0, 2, 1, 3)
        codes = (cells * np.array(_DOTS)).sum(axis=(2, 3)) + _BRAILLE
        return ["".join(map(chr, row)).rstrip(chr(_BRAILLE)) for row in codes.tolist()]

    def _at(self, x: float, y: float) -> tuple[int, int]:
        rows, across = self.ink.shape
        row = (rows - 1) * (1 - (y - self.bottom) / self.tall)
        return round(row), round((across - 1) * (x - self.left) / self.wide)


def _bar(length: float, *, blocks: bool) -> str:
    if not blocks:
        return "#" * max(round(length), int(length > 0))
    whole, eighth = divmod(round(8 * length), 8)
    return _EIGHTHS[8] * whole + (_EIGHTHS[eighth] if eighth else "")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _shows(characters: str) -> bool:
    """Return whether the output's encoding has the characters."""
    try:
        characters.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
