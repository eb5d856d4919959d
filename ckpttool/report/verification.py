"""Section of the report about a verification: outputs, layers, and where the models part."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpttool.core import text, urls
from ckpttool.core.errors import FormatError
from ckpttool.core.text import clean, shorten

_TEXT, _SENTENCE = 160, 600
_MOST_LAYERS, _MOST_OUTPUTS = 2000, 200
# Of a long table: layers before and after the first difference; the rest is folded.
_WHOLE, _BEFORE, _AFTER = 40, 12, 8
# Bars are logarithmic, from the smallest error of float64 to 1.
_DECADES = 16
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One output or network: the difference, relative too, and each side's error from float64."""

    name: str
    inputs: str
    difference: str
    relative: str
    errors: tuple[str, str]
    within: bool


@dataclass(frozen=True, slots=True)
class LayerRow:
    """A layer of both sides: errors relative to A's largest number; `bar` is the output's, from 0 to 1."""

    number: int
    a: str
    b: str
    classes: str
    inputs: str
    outputs: str
    bar: float
    within: bool
    first: bool


@dataclass(frozen=True, slots=True)
class DivergenceBox:
    """Where two models part, in sentences; `heading` is `cause` or `suspected cause`."""

    where: str
    heading: str
    cause: str
    fix: str


@dataclass(frozen=True, slots=True)
class VerificationSection:
    """Result of `verify --json`; `layers` are those next to the first difference, `every` is a long table.

    `belongs` is whether one side is this page's checkpoint; `covers` are sentences on what was compared.
    """

    sides: tuple[str, str]
    engines: tuple[str, str]
    within: bool
    belongs: bool
    tolerance: str
    outputs: tuple[OutputRow, ...]
    layers: tuple[LayerRow, ...]
    every: tuple[LayerRow, ...]
    more: int
    first: DivergenceBox | None
    covers: tuple[str, ...]
    assumed: tuple[str, ...]
    not_compared: tuple[str, ...]


def read_verification(file: str, path: str) -> VerificationSection:
    """Read the output of `verify --json` for this checkpoint; raise FormatError for other files."""
    found = text.load_json(file, "the verification", "sidecar_bytes")
    networks, sides = found.get("networks"), (found.get("a"), found.get("b"))
    if not isinstance(networks, list) or not all(isinstance(each, str) for each in sides):
        raise FormatError("not a verification", file=file, expected="the output of verify --json")
    models = _as_object(found.get("models"))
    first = _as_object(models.get("first_difference"))
    every = _layer_rows(models.get("layers"), first)
    layers = _near_first(every)
    engines = [_text(each) for each in _as_list(models.get("engines") or found.get("backends"))]
    return VerificationSection(
        (_text(sides[0]), _text(sides[1])),
        (engines[0], engines[1]) if len(engines) == 2 else ("", ""),
        found.get("within") is True,
        any(_is_same(str(each), path) for each in sides),
        _text(found.get("tolerance", ""), _SENTENCE),
        tuple(_output_row(_as_object(each)) for each in networks[:_MOST_OUTPUTS]),
        layers,
        every if len(layers) < len(every) else (),
        max(0, len(_as_list(models.get("layers"))) - len(every)),
        _divergence(first) if first else None,
        tuple(_covered(found, models)),
        _sentences(found.get("assumed")),
        _sentences(found.get("not_compared")),
    )


def _is_same(name: str, path: str) -> bool:
    if urls.is_url(name) or urls.is_url(path):
        return name == path
    return os.path.abspath(name) == os.path.abspath(path) or (
        os.path.basename(name) == os.path.basename(path) and not os.path.exists(name)
    )


def _layer_rows(found: object, first: Mapping[str, Any]) -> tuple[LayerRow, ...]:
    rows: list[LayerRow] = []
    marked = False
    for number, each in enumerate(map(_as_object, _as_list(found)[:_MOST_LAYERS])):
        here = (
            not marked and bool(first) and (each.get("a"), each.get("b")) == (first.get("a"), first.get("b"))
        )
        marked = marked or here
        error = _number(each.get("outputs"))
        classes = dict.fromkeys(_text(each.get(name, "")) for name in ("class_a", "class_b"))
        rows.append(
            LayerRow(
                number + 1,
                _text(each.get("a", "")),
                _text(each.get("b", "")),
                " / ".join(classes),
                _error(_number(each.get("inputs"))),
                _error(error),
                _bar(error),
                each.get("within") is True,
                here,
            )
        )
    return tuple(rows)


def _near_first(every: tuple[LayerRow, ...]) -> tuple[LayerRow, ...]:
    """Return all rows of a short table, else those next to the first difference or at the end."""
    if len(every) <= _WHOLE:
        return every
    at = next((place for place, row in enumerate(every) if row.first or not row.within), len(every))
    return every[max(0, at - _BEFORE) : at + _AFTER]


def _output_row(found: Mapping[str, Any]) -> OutputRow:
    names = ("max_abs", "max_rel", "error_a", "error_b")
    between, relative, *errors = (_error(_number(found.get(name))) for name in names)
    count = found.get("n")
    inputs = f"{count:,}" if isinstance(count, int) else ""
    return OutputRow(
        _text(found.get("name", "")),
        inputs,
        between,
        relative,
        (errors[0], errors[1]),
        found.get("within") is True,
    )


def _divergence(found: Mapping[str, Any]) -> DivergenceBox:
    a, b = _text(found.get("a", "")), _text(found.get("b", ""))
    pair = a if a == b else f"{a} of A and {b} of B"
    after = found.get("after")
    begin = _text(after) if isinstance(after, str) else "the inputs"
    where = f"between {begin} and {pair}" if found.get("where") == "between" else f"in {pair}"
    heading = "Cause" if found.get("confirmed") is True else "Suspected cause"
    return DivergenceBox(
        where, heading, *(_text(found.get(name) or "", _SENTENCE) for name in ("cause", "fix"))
    )


def _covered(found: Mapping[str, Any], models: Mapping[str, Any]) -> list[str]:
    """Return what else was compared."""
    sentences = []
    if models:
        both = "Both models also ran in float64." if models.get("float64") is True else ""
        sentences += [both or "Only float32 was compared: not both models run in float64."]
    updates = [_as_object(each) for each in _as_list(_as_object(found.get("training")).get("updates"))]
    if updates:
        right = sum(each.get("within") is True for each in updates)
        sentences.append(f"Training steps: {right} of {len(updates)} updates within their bounds.")
    contents = _as_object(found.get("contents"))
    if contents:
        wrong = len(_as_list(contents.get("discrepancies")))
        sentences.append(f"Contents: {_text(contents.get('equal', 0))} entries equal, {wrong} different.")
    return sentences


def _sentences(found: object) -> tuple[str, ...]:
    return tuple(_text(each, _SENTENCE) for each in _as_list(found)[:_MOST_OUTPUTS])


def _bar(error: float) -> float:
    if not error > 0:
        return 0.0 if error == 0 else 1.0
    return min(1.0, max(0.0, 1 + math.log10(error) / _DECADES)) if math.isfinite(error) else 1.0


def _error(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "0" if value == 0 else ("∞" if math.isinf(value) else f"{value:.1e}")


def _number(value: object) -> float:
    if isinstance(value, str):
        return _WORDS.get(value, math.nan)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _text(value: object, most: int = _TEXT) -> str:
    return shorten(clean(str(value)), most)


def _as_list(found: object) -> Sequence[Any]:
    return found if isinstance(found, list) else ()


def _as_object(found: object) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}
