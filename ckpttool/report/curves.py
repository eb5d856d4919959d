"""Where the lines of a chart stand: the template draws them, so that they follow the page's colours."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ckpttool.report.numbers import shown
from ckpttool.report.results import Curve, Result

# Of the chart, in its own units; what stands left and below of the plot are the axes' numbers.
WIDTH, HEIGHT = 640, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 40
# Of the strip of a checkpoint's returns.
STRIP_WIDTH, STRIP_HEIGHT = 200, 22
_TICKS = 5


@dataclass(frozen=True, slots=True)
class Tick:
    """A number of an axis and where it stands."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: the path of its means, the area of its intervals, its points."""

    label: str
    path: str
    band: str
    points: tuple[tuple[float, float], ...]
    logged: bool


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over training steps."""

    lines: tuple[Line, ...]
    across: tuple[Tick, ...]
    up: tuple[Tick, ...]
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    top: int = _TOP
    bottom: int = HEIGHT - _BOTTOM


@dataclass(frozen=True, slots=True)
class Strip:
    """A checkpoint's returns on one scale with those of all others."""

    dots: tuple[float, ...]
    mean: float | None
    low: float | None
    high: float | None


class _Scale:
    """From values to places; what is all one value stands in the middle."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        self.low, self.high = min(values), max(values)
        self._begin, self._length = begin, end - begin

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        share = (value - self.low) / span if span else 0.5
        return round(self._begin + share * self._length, 1)

    def ticks(self) -> tuple[Tick, ...]:
        return tuple(Tick(self(value), shown(value)) for value in steps(self.low, self.high))


def chart(curves: Sequence[Curve]) -> Chart | None:
    """Return where everything stands, or None where there is no point."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        return None
    x = _Scale([each[0] for each in points], _LEFT + 8, WIDTH - _RIGHT - 8)
    y = _Scale(_rounded([value for each in points for value in each[1:]]), HEIGHT - _BOTTOM, _TOP)
    return Chart(tuple(_line(curve, x, y) for curve in curves if curve.points), x.ticks(), y.ticks())


def _rounded(values: Sequence[float]) -> list[float]:
    """Return the ends of an axis on which all values lie between two of its numbers."""
    low, high = min(values), max(values)
    known = steps(low, high)
    apart = known[1] - known[0] if len(known) > 1 else 0.0
    begin = known[0] - apart if known[0] > low else known[0]
    return [begin, known[-1] + apart if known[-1] < high else known[-1], low, high]


def _line(curve: Curve, x: _Scale, y: _Scale) -> Line:
    middle = tuple((x(step), y(mean)) for step, mean, _, _ in curve.points)
    upper = [(x(step), y(high)) for step, _, _, high in curve.points]
    lower = [(x(step), y(low)) for step, _, low, _ in curve.points]
    spread = any(low != high for _, _, low, high in curve.points)
    band = _path([*upper, *reversed(lower)]) + "Z" if spread else ""
    return Line(curve.label, _path(middle), band, () if curve.logged else middle, curve.logged)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x} {y}" for x, y in points)


def strips(results: Sequence[Result]) -> tuple[list[Strip], tuple[str, str]]:
    """Return a strip for each result, and the ends of the scale that they share as text."""
    values = [v for each in results for v in (*each.returns, *(each.ci95 or ())) if math.isfinite(v)]
    if not values:
        return [Strip((), None, None, None) for _ in results], ("", "")
    x = _Scale(values, 5, STRIP_WIDTH - 5)

    def place(value: float | None) -> float | None:
        return x(value) if value is not None and math.isfinite(value) else None

    made = [
        Strip(
            tuple(x(value) for value in each.returns if math.isfinite(value)),
            place(each.mean),
            *((place(each.ci95[0]), place(each.ci95[1])) if each.ci95 else (None, None)),
        )
        for each in results
    ]
    return made, (shown(x.low), shown(x.high))


def steps(low: float, high: float) -> list[float]:
    """Return round numbers between the two, some five of them: 1, 2 or 5 times a power of ten apart."""
    span = high - low
    if not span or not math.isfinite(span):
        return [low]
    raw = span / _TICKS
    if raw < sys.float_info.min:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= raw)
    first = math.ceil(low / step)
    # Close together, far from zero, the product is another number than the one between the two.
    return [min(max(each * step, low), high) for each in range(first, math.floor(high / step) + 1)] or [low]
