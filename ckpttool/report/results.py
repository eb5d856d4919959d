"""Evaluations that `eval --json` or `--out` wrote, as the page shows them; other files are refused."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpttool import documents
from ckpttool.errors import FormatError
from ckpttool.ops import training_step
from ckpttool.ops.training_step import ANY_UNIT, UNITS
from ckpttool.shown import clean, shortened

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_TEXT, _NOTES = 200, 20


@dataclass(frozen=True, slots=True)
class Result:
    """One checkpoint's returns: NaN stands for what the document leaves open, `ci95` is None then.

    `counts` are the numbers that it counts, by the titles of training_step.TITLES.
    """

    checkpoint: str
    env: str
    counts: Mapping[str, int]
    returns: tuple[float, ...]
    mean: float
    std: float
    median: float
    iqm: float
    ci95: tuple[float, float] | None
    how: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """Returns over training steps: step, value, and the ends of its interval (equal where there is none)."""

    label: str
    points: tuple[tuple[float, float, float, float], ...]
    logged: bool = False


@dataclass(frozen=True, slots=True)
class Results:
    """What the given files hold together."""

    results: tuple[Result, ...]
    curves: tuple[Curve, ...]
    notes: tuple[str, ...]
    unit: str = ANY_UNIT
    """what the steps of the curves count"""

    @property
    def counted(self) -> tuple[str, ...]:
        """The titles of all that any checkpoint counts: a column each."""
        titles = ("step", *training_step.TITLES.values())
        return tuple(title for title in titles if any(title in each.counts for each in self.results))


def read(files: Sequence[str]) -> Results:
    """Return what the files hold; raise FormatError for one that is no document of `eval`."""
    results, curves, notes = [], [], []
    sources = set()
    for file in files:
        whole = documents.load(file, "the evaluation")
        played = whole.get("evaluations", [whole])
        if not isinstance(played, list) or not all(_is_evaluation(each) for each in played):
            raise FormatError(
                "this is no evaluation", file=file, expected="what ckpttool eval --json or --out writes"
            )
        results += [_result(each) for each in played]
        curves += [*_means(whole.get("curve")), *_logged(whole.get("training_curves"))]
        # No file says what the steps of a log are.
        sources |= {str(whole.get("step_from"))} if whole.get("curve") else set()
        sources |= {"logged"} if whole.get("training_curves") else set()
        notes += _sentences(whole.get("notes")) if "evaluations" in whole else []
    unit = UNITS.get(sources.pop(), ANY_UNIT) if len(sources) == 1 else ANY_UNIT
    return Results(tuple(results), tuple(curves), tuple(notes), unit)


def _is_evaluation(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("returns"), list) and "mean" in value


def _result(found: Mapping[str, Any]) -> Result:
    told = found.get("protocol")
    protocol: dict[str, Any] = told if isinstance(told, dict) else {}
    words = [f"{_text(protocol[key])}" for key in ("backend", "engine", "device", "dtype") if key in protocol]
    noise = protocol.get("noise")
    interval = found.get("ci95")
    pair = [_number(each) for each in interval] if isinstance(interval, list) else []
    return Result(
        _text(found.get("checkpoint", "")),
        _text(found.get("env", "")),
        _counts(found),
        tuple(_number(each) for each in found["returns"]),
        _number(found.get("mean")),
        _number(found.get("std")),
        _number(found.get("median")),
        _number(found.get("iqm")),
        (pair[0], pair[1]) if len(pair) == 2 and all(map(math.isfinite, pair)) else None,
        ", ".join([*words, *([f"noise {_text(noise)}"] if noise is not None else [])]),
        (
            *(f"assumed: {each}" for each in _sentences(found.get("assumed"))),
            *_sentences(found.get("notes")),
        ),
    )


def _counts(found: Mapping[str, Any]) -> dict[str, int]:
    """Return what an evaluation counts; documents of older versions name one step alone."""
    given = {title: _number(found.get(name)) for name, title in training_step.TITLES.items()}
    counts = {title: int(number) for title, number in given.items() if math.isfinite(number)}
    step = _number(found.get("step"))
    return counts if counts or not math.isfinite(step) else {"step": int(step)}


def _means(found: object) -> Iterator[Curve]:
    """Give a curve for each run among the points of `curve`."""
    runs: dict[str, list[tuple[float, float, float, float]]] = {}
    for each in found if isinstance(found, list) else ():
        if not isinstance(each, dict):
            continue
        interval = each.get("ci95")
        mean = _number(each.get("mean"))
        low, high = interval if isinstance(interval, list) and len(interval) == 2 else (mean, mean)
        point = (_number(each.get("step")), mean, _number(low), _number(high))
        if all(map(math.isfinite, point)):
            runs.setdefault(str(each.get("run") or ""), []).append(point)
    for run, points in runs.items():
        yield Curve(_text(os.path.basename(run)) or "evaluated", tuple(sorted(points)))


def _logged(found: object) -> Iterator[Curve]:
    for each in found if isinstance(found, list) else ():
        if not isinstance(each, dict):
            continue
        steps, values = each.get("steps"), each.get("values")
        if isinstance(steps, list) and isinstance(values, list):
            pairs = [(_number(a), _number(b)) for a, b in zip(steps, values, strict=False)]
            points = tuple((x, y, y, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y))
            yield Curve(f"logged: {_text(each.get('tag'))}", points, logged=True)


def _number(value: object) -> float:
    if isinstance(value, str):
        return _WORDS.get(value, math.nan)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # JSON has whole numbers of any size
        return math.nan


def _text(value: object) -> str:
    return shortened(clean(str(value)), _TEXT)


def _sentences(value: object) -> list[str]:
    return [_text(each) for each in value[:_NOTES]] if isinstance(value, list) else []
