"""Shared parts of the pages: number formats, templates, security policy, returns and their charts."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ckpttool.core import filesystem, text, urls
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import FormatError
from ckpttool.core.text import clean, format_count, format_size, shorten
from ckpttool.listing import training_counters
from ckpttool.listing.training_counters import ANY_UNIT, UNITS
from ckpttool.version import __version__

_PACKAGE = __name__.rpartition(".")[0]

_MINUS, _NONE = "\u2212", "\u2013"


def typeset_minus(text: str) -> str:
    """Return a number's text with a minus sign as wide as a digit."""
    return text.replace("-", _MINUS)


def format_number(value: float) -> str:
    """Format a number for charts and tables: 12,500, -650.30, 0.25, 1.5e+09, 2e-05; a dash for NaN."""
    if not math.isfinite(value):
        return _NONE
    if abs(value) >= 1e7 or 0 < abs(value) < 1e-3:
        return typeset_minus(f"{value:.4g}")
    digits = 0 if value == int(value) else 2 if abs(value) >= 10 else 4
    return typeset_minus(f"{value:,.{digits}f}")


def format_alike(values: Sequence[float]) -> list[str]:
    """Format numbers of one kind as format_number formats the largest: -87.06, -130.75, -1.76."""
    if max(map(abs, filter(math.isfinite, values)), default=0) < 10:
        return [*map(format_number, values)]
    return [_NONE if not math.isfinite(value) else typeset_minus(f"{value:,.2f}") for value in values]


def format_exactly(value: float, digits: int = 6) -> str:
    """Format a number with `digits` significant digits, or a whole number with all digits."""
    whole = value == round(value) if math.isfinite(value) else False
    return typeset_minus(f"{value:,.0f}" if whole and abs(value) < 1e9 else f"{value:.{digits}g}")


# Maximum characters of a name and of a whole path.
NAME_LENGTH, _PATH = 120, 400


def format_name(text: str) -> str:
    """Return one step of a path as the page shows it."""
    return shorten(clean(text), NAME_LENGTH) or '""'


def format_path(text: str) -> str:
    """Return a path or a native key as the page shows it."""
    return shorten(clean(text), _PATH)


# Maximum characters of a path in a heading and of a sentence; maximum rows of a list, and those of a table
# before "show all".
_TITLE, _SENTENCE, SHOWN, FIRST = 200, 600, 100, 10


def join_templates(names: Sequence[str]) -> str:
    """Return the content of templates that are no pages: style sheets or scripts."""
    folder = files(_PACKAGE) / "templates"
    return "".join(f"\n{(folder / name).read_text('utf-8')}" for name in names)


def content_security_policy(style: str, script: str, *, film: str | None = None) -> str:
    """Return the content security policy: no network requests, and only our own script runs.

    `film` is the media type of the film inside the page, if any.
    """
    media = "" if film is None else f"{'media' if film.startswith('video/') else 'img'}-src data:; "
    hashes = [
        base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in (style, script)
    ]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        f"{media}base-uri 'none'; form-action 'none'"
    )


def pack_objects(objects: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return objects as lists of values, each after the number of its keys in `keys`.

    Pages of many tensors consist of such objects, and their keys would be half of the page.
    """
    known: dict[tuple[str, ...], int] = {}
    items = [[known.setdefault(tuple(object_), len(known)), *object_.values()] for object_ in objects]
    return {"keys": [list(keys) for keys in known], "items": items}


def embed_json(value: object) -> Markup:
    """Return JSON that an HTML parser cannot mistake for markup."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704  # nothing of it is markup any more


def trusted_markup(text: str) -> Markup:
    """Return markup of our own, whose texts are escaped already, so that a template does not escape it."""
    return Markup(text)  # noqa: S704  # its contract


def render_template(
    name: str, styles: Sequence[str], scripts: Sequence[str], *, film: str | None = None, **values: Any
) -> bytes:
    """Return a page in UTF-8 with these style sheets and scripts inside; see `content_security_policy`."""
    style, script = join_templates(styles), join_templates(scripts)
    text = template_environment().get_template(name).render(
        **values,
        most=SHOWN,
        first=FIRST,
        style=trusted_markup(style),
        script=trusted_markup(script),
        policy=content_security_policy(style, script, film=film),
        version=__version__,
    )  # fmt: skip
    return text.encode("utf-8", "backslashreplace")


def template_environment() -> Environment:
    """Return the environment of all pages, with the filters that templates use."""
    environment = Environment(
        loader=PackageLoader(_PACKAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        size=format_size,
        count=format_count,
        number=lambda value: f"{value:,}",
        clean=clean,
        path=lambda text: shorten(clean(urls.display_url(text)), _TITLE),
        sentence=lambda text: shorten(clean(text), _SENTENCE),
        base=lambda text: shorten(clean(urls.base_name(text)), _TITLE),
        counter=lambda title: "In name" if title == "name" else title.capitalize(),
        decimal=format_number,
        alike=format_alike,
        breakable=lambda text: Markup("/<wbr>").join(text.split("/")),
        shades=_shade_paths,
        compact=lambda value: json.dumps(value, separators=(",", ":")),
        quoted=lambda path: clean(shlex.quote(urls.display_url(path))),
        when=lambda ns: f"{datetime.fromtimestamp(ns // 10**9, UTC):%Y-%m-%d %H:%M}",
    )
    return environment


def _shade_paths(cells: Sequence[Any]) -> list[tuple[str, str]]:
    """Return one path per shade, of all its cells in a strip: a page of long runs has few elements."""
    paths: dict[str, str] = {}
    start = 0
    for shade, run in groupby(cell.shade for cell in cells):
        width = len(list(run))
        paths[shade] = f"{paths.get(shade, '')}M{start} 0h{width}v1h-{width}z"
        start += width
    return [*paths.items()]


def rank_results(results: Sequence[EvaluationEntry], *, best_first: bool) -> list[int]:
    """Return the positions of the results: in their order, or by their mean, those without one last."""
    order = range(len(results))
    if not best_first:
        return [*order]
    return sorted(order, key=lambda at: -results[at].mean if math.isfinite(results[at].mean) else math.inf)


_NUMBER_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_RESULT_TEXT_LENGTH, _NOTES = 200, 20


@dataclass(frozen=True, slots=True)
class EvaluationEntry:
    """Returns of one checkpoint: NaN for a value missing from the document; `ci95` is then None.

    `counts` are its training counters, by the titles of training_step.TITLES.
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
    verdict: str = ""
    """comparison with the references of the environment, as a sentence"""
    references: str = ""


@dataclass(frozen=True, slots=True)
class ReturnCurve:
    """Returns over training steps: step, value, and the ends of its interval (equal if there is none)."""

    label: str
    points: tuple[tuple[float, float, float, float], ...]
    logged: bool = False


@dataclass(frozen=True, slots=True)
class EvaluationSection:
    """Combined contents of the evaluation files."""

    results: tuple[EvaluationEntry, ...]
    curves: tuple[ReturnCurve, ...]
    notes: tuple[str, ...]
    unit: str = ANY_UNIT
    """unit of the curves' steps"""

    @property
    def counted(self) -> tuple[str, ...]:
        """Titles of all counters that any checkpoint has, one column each."""
        titles = dict.fromkeys(("step", *training_counters.TITLES.values()))
        return tuple(title for title in titles if any(title in result.counts for result in self.results))


def read_evaluations(files: Sequence[str]) -> EvaluationSection:
    """Read evaluation files; raise FormatError for a file that is not output of `eval`."""
    results, curves, notes = [], [], []
    sources = set()
    for file in files:
        whole = text.load_json(file, "the evaluation")
        played = whole.get("evaluations", [whole])
        if not isinstance(played, list) or not all(_is_evaluation(result) for result in played):
            raise FormatError(
                "not an evaluation",
                file=file,
                expected="the output of ckpttool eval --json or --out",
                hint="write it by ckpttool eval PATH --out results.json",
            )
        results += [_read_evaluation(result) for result in played]
        curves += [*_mean_curves(whole.get("curve")), *_logged_curves(whole.get("training_curves"))]
        # The unit of a log's steps is not recorded.
        sources |= {str(whole.get("step_from"))} if whole.get("curve") else set()
        sources |= {"logged"} if whole.get("training_curves") else set()
        notes += _clean_notes(whole.get("notes")) if "evaluations" in whole else []
    unit = UNITS.get(sources.pop(), ANY_UNIT) if len(sources) == 1 else ANY_UNIT
    return EvaluationSection(tuple(results), tuple(curves), tuple(notes), unit)


def find_results(
    checkpoints: Sequence[str], results: Sequence[EvaluationEntry]
) -> tuple[dict[int, int], frozenset[int]]:
    """Return the number of the checkpoint of each result, by the result's number; and those matched by name.

    A path that exists must lead to the checkpoint; the same name elsewhere is another one's. A path that does
    not exist here is matched by name.
    """
    places = {filesystem.realpath(path): at for at, path in enumerate(checkpoints)}
    known = Counter(map(os.path.basename, checkpoints))
    names = {name: at for at, path in enumerate(checkpoints) if known[name := os.path.basename(path)] == 1}
    owners, by_name = {}, set()
    for number, result in enumerate(results):
        at = places.get(filesystem.realpath(result.checkpoint))
        if at is None and not _exists(result.checkpoint):
            at = names.get(os.path.basename(result.checkpoint))
            by_name |= {number} if at is not None else set()
        if at is not None:
            owners[number] = at
    return owners, frozenset(by_name)


def _exists(path: str) -> bool:
    """Return whether a checkpoint is at a path: a file, a folder, or a TensorFlow prefix."""
    return filesystem.lexists(path) or filesystem.lexists(f"{path}.index")


def _is_evaluation(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("returns"), list) and "mean" in value


def _read_evaluation(record: Mapping[str, Any]) -> EvaluationEntry:
    recorded_protocol = record.get("protocol")
    protocol: dict[str, Any] = recorded_protocol if isinstance(recorded_protocol, dict) else {}
    words = [
        f"{_clean_text(protocol[key])}" for key in ("backend", "engine", "device", "dtype") if key in protocol
    ]
    words += [
        f"{name} {_clean_text(protocol[name])}"
        for name in ("noise", "epsilon")
        if protocol.get(name) is not None
    ]
    words += ["stochastic"] if protocol.get("stochastic") is True else []
    interval = record.get("ci95")
    pair = [parse_number(bound) for bound in interval] if isinstance(interval, list) else []
    return EvaluationEntry(
        _clean_text(record.get("checkpoint", "")),
        _clean_text(record.get("env", "")),
        _training_counts(record),
        tuple(parse_number(number) for number in record["returns"]),
        parse_number(record.get("mean")),
        parse_number(record.get("std")),
        parse_number(record.get("median")),
        parse_number(record.get("iqm")),
        (pair[0], pair[1]) if len(pair) == 2 and all(map(math.isfinite, pair)) else None,
        ", ".join(words),
        (
            *(f"assumed: {note}" for note in _clean_notes(record.get("assumed"))),
            *_clean_notes(record.get("notes")),
        ),
        *_read_judgement(record.get("judgement")),
    )


def _read_judgement(record: object) -> tuple[str, str]:
    """Return the verdict of `eval`, and the references behind it."""
    if not isinstance(record, dict) or not isinstance(record.get("sentence"), str):
        return "", ""
    numbers = []
    for word, name, key in (("random policy", "random", "mean"), ("goal", "goal", "value")):
        known = record.get(name)
        value = parse_number(known.get(key)) if isinstance(known, dict) else math.nan
        if isinstance(known, dict) and math.isfinite(value):
            source = f" ({_clean_text(known['source'])})" if isinstance(known.get("source"), str) else ""
            numbers.append(f"{word} {format_number(value)}{source}")
    return _clean_text(record["sentence"]), ", ".join(numbers)


def _training_counts(record: Mapping[str, Any]) -> dict[str, int]:
    """Return the training counters of an evaluation; documents of older versions have only one step."""
    numbers = {title: parse_number(record.get(name)) for name, title in training_counters.TITLES.items()}
    counts = {title: int(number) for title, number in numbers.items() if math.isfinite(number)}
    step = parse_number(record.get("step"))
    return counts if counts or not math.isfinite(step) else {"step": int(step)}


def _mean_curves(records: object) -> Iterator[ReturnCurve]:
    """Yield a curve for each run among the points of `curve`."""
    runs: dict[str, list[tuple[float, float, float, float]]] = {}
    for record in records if isinstance(records, list) else ():
        if not isinstance(record, dict):
            continue
        interval = record.get("ci95")
        mean = parse_number(record.get("mean"))
        low, high = interval if isinstance(interval, list) and len(interval) == 2 else (mean, mean)
        point = (parse_number(record.get("step")), mean, parse_number(low), parse_number(high))
        if all(map(math.isfinite, point)):
            runs.setdefault(str(record.get("run") or ""), []).append(point)
    for run, points in runs.items():
        yield ReturnCurve(_clean_text(os.path.basename(run)) or "evaluated", tuple(sorted(points)))


def _logged_curves(rows: object) -> Iterator[ReturnCurve]:
    for row in rows if isinstance(rows, list) else ():
        if not isinstance(row, dict):
            continue
        steps, values = row.get("steps"), row.get("values")
        if isinstance(steps, list) and isinstance(values, list):
            pairs = [(parse_number(a), parse_number(b)) for a, b in zip(steps, values, strict=False)]
            points = tuple((x, y, y, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y))
            yield ReturnCurve(f"logged: {_clean_text(row.get('tag'))}", points, logged=True)


def parse_number(value: object) -> float:
    """Return a number of a document, which may be a word such as "Infinity"; NaN for anything else."""
    if isinstance(value, str):
        return _NUMBER_WORDS.get(value, math.nan)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # JSON integers have no size limit
        return math.nan


def _clean_text(value: object) -> str:
    return shorten(clean(str(value)), _RESULT_TEXT_LENGTH)


def _clean_notes(value: object) -> list[str]:
    return [_clean_text(note) for note in value[:_NOTES]] if isinstance(value, list) else []


# Curves have this extent in both directions and are stretched to the page; ticks are at shares of it.
EXTENT = 1000
# Size of the strip that shows a checkpoint's returns.
STRIP_WIDTH, STRIP_HEIGHT = 200, 22
# A curve with more points has no dots.
_TICKS, _DOTTED = 5, 60


@dataclass(frozen=True, slots=True)
class AxisTick:
    """Axis tick: its position as a percentage, and its number."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One curve: the path of its means, the area of its intervals, its points as a path of dots."""

    label: str
    path: str
    band: str
    dots: str
    logged: bool


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over training steps."""

    lines: tuple[ChartLine, ...]
    across: tuple[AxisTick, ...]
    up: tuple[AxisTick, ...]


@dataclass(frozen=True, slots=True)
class ReturnStrip:
    """Returns of one checkpoint, on a scale shared by all checkpoints; `dots` is a path."""

    dots: str
    mean: float | None
    low: float | None
    high: float | None


class _AxisScale:
    """Map values to positions; equal values all map to the middle."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        self.low, self.high = min(values), max(values)
        self._begin, self._length = begin, end - begin

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        share = (value - self.low) / span if span else 0.5
        return round(self._begin + share * self._length, 1)

    def ticks(self) -> tuple[AxisTick, ...]:
        return tuple(
            AxisTick(round(100 * self(value) / EXTENT, 2), typeset_minus(f"{value:,.10g}"))
            for value in round_ticks(self.low, self.high)
        )


def build_chart(curves: Sequence[ReturnCurve]) -> Chart | None:
    """Return the layout of the chart, or None without points."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        return None
    x = _AxisScale([point[0] for point in points], 8, EXTENT - 8)
    y = _AxisScale(_round_axis([value for point in points for value in point[1:]]), EXTENT, 0)
    return Chart(tuple(_chart_line(curve, x, y) for curve in curves if curve.points), x.ticks(), y.ticks())


def _round_axis(values: Sequence[float]) -> list[float]:
    """Return the ends of an axis, rounded outwards to ticks."""
    low, high = min(values), max(values)
    known = round_ticks(low, high)
    apart = known[1] - known[0] if len(known) > 1 else 0.0
    # Ticks are rounded: one at the end may be beside it by the last bit.
    slack = 1e-9 * apart
    begin = known[0] - apart if known[0] > low + slack else known[0]
    return [begin, known[-1] + apart if known[-1] < high - slack else known[-1], low, high]


def _chart_line(curve: ReturnCurve, x: _AxisScale, y: _AxisScale) -> ChartLine:
    middle = tuple((x(step), y(mean)) for step, mean, _, _ in curve.points)
    upper = [(x(step), y(high)) for step, _, _, high in curve.points]
    lower = [(x(step), y(low)) for step, _, low, _ in curve.points]
    spread = any(low != high for _, _, low, high in curve.points)
    band = _svg_path([*upper, *reversed(lower)]) + "Z" if spread else ""
    dots = "" if curve.logged or len(middle) > _DOTTED else _svg_dots(middle)
    return ChartLine(curve.label, _svg_path(middle), band, dots, curve.logged)


def _svg_path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x} {y}" for x, y in points)


def _svg_dots(points: Iterable[tuple[float, float]]) -> str:
    """Return lines without length, which round ends make dots: one element instead of one per point."""
    return "".join(f"M{x} {y}h0" for x, y in points)


def build_strips(results: Sequence[EvaluationEntry]) -> tuple[list[ReturnStrip], tuple[str, str]]:
    """Return a strip for each result, and the ends of their common scale as text."""
    values = [v for result in results for v in (*result.returns, *(result.ci95 or ())) if math.isfinite(v)]
    if not values:
        return [ReturnStrip("", None, None, None) for _ in results], ("", "")
    x = _AxisScale(values, 5, STRIP_WIDTH - 5)

    def position(value: float | None) -> float | None:
        return x(value) if value is not None and math.isfinite(value) else None

    strips = [
        ReturnStrip(
            _svg_dots((x(value), STRIP_HEIGHT // 2) for value in result.returns if math.isfinite(value)),
            position(result.mean),
            *((position(result.ci95[0]), position(result.ci95[1])) if result.ci95 else (None, None)),
        )
        for result in results
    ]
    return strips, (format_number(x.low), format_number(x.high))


def round_ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers in the range, spaced by 1, 2, 2.5 or 5 times a power of ten.

    All are whole numbers if the range has several.
    """
    span = high - low
    if not span or not math.isfinite(span):
        return [low]
    raw = span / _TICKS
    if raw < sys.float_info.min:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    widths = (1, 2, 2.5, 5, 10) if power >= 10 else (1, 2, 5, 10)
    step = next(power * width for width in widths if power * width >= raw)
    first = math.ceil(low / step)
    # For close numbers far from zero, rounding can move the product out of the range.
    return [min(max(index * step, low), high) for index in range(first, math.floor(high / step) + 1)] or [low]
