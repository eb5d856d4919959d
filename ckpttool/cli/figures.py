"""Figures of returns: in the terminal, and as image files for one checkpoint, a run or algorithms."""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.cli.styles import terminal_width
from ckpttool.core import deferred, search_paths
from ckpttool.core.atomic_write import require_new, write_file
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import CkpttoolError, UsageError
from ckpttool.core.installation import require_package
from ckpttool.core.text import clean, format_count, shorten
from ckpttool.core.tree_views import render_file
from ckpttool.evaluation.statistics import AGGREGATES, RESAMPLES
from ckpttool.listing.training_counters import ANY_UNIT, UNITS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

    from ckpttool.commands.sweep import Sweep
    from ckpttool.evaluation.algorithms import Algorithm, AlgorithmComparison, AlgorithmCurvePoint
    from ckpttool.evaluation.protocol import Evaluation
    from ckpttool.evaluation.ranking import LearningCurvePoint
    from ckpttool.evaluation.statistics import Estimate
    from ckpttool.evaluation.training_logs import TrainingCurve


# Minimum number of returns for a histogram, and of points for a curve.
FEWEST = 8
_FEWEST_POINTS = 3
_BARS = 8
_CURVE_HEIGHT = 13  # rows for the frame and the step axis
_WIDEST = 100
_BLOCK = "█"
# ASCII replacements of plotext's frame, for encodings without box characters.
_FRAME = str.maketrans("┌┐└┘├┤┬┴┼─│", "+++++++++-|")


def require_chart() -> None:
    """Raise if the library that plots in a terminal is not installed."""
    require_package("plotext", "plotting in the terminal requires plotext", "eval")


def render_chart(
    evaluations: Sequence[Evaluation], curve: Sequence[LearningCurvePoint], unit: str = ANY_UNIT
) -> list[str]:
    """Return the lines of the plot that suits the evaluations; empty if there is nothing to plot."""
    if not all(np.isfinite(one.rollout.returns).all() for one in evaluations):
        return []
    width = min(terminal_width(), _WIDEST)
    if len(evaluations) == 1:
        bars = render_histogram(evaluations[0].rollout.returns, width)
        return ["histogram of returns (episodes per range)", *bars] if bars else []
    enough = len({point.step for point in curve}) >= _FEWEST_POINTS
    if not enough or importlib.util.find_spec("plotext") is None:
        return []
    return ["mean return", *render_learning_curve(curve, width, unit)]


def render_histogram(values: np.ndarray, width: int) -> list[str]:
    """Return a row per range of values: its ends, its count and a bar; at most `width` characters."""
    low, high = float(values.min()), float(values.max())
    if len(values) < FEWEST or low == high:
        return []
    counts, edges = np.histogram(values, min(_BARS, count_bins(len(values))))
    names = [_format_axis_number(edge) for edge in edges]
    wide, digits = max(map(len, names)), len(str(counts.max()))
    room = max(1, width - 2 * wide - digits - 8)
    block = _BLOCK if _can_encode(_BLOCK) else "#"
    lines = []
    for number, amount in enumerate(counts.tolist()):
        bar = block * max(round(amount / counts.max() * room), int(amount > 0))
        lines.append(f"{names[number]:>{wide}} to {names[number + 1]:>{wide}}  {amount:>{digits}}  {bar}")
    return [line.rstrip() for line in lines]


def count_bins(n: int) -> int:
    """Return the number of bins for n values by Rice's rule, which is robust to outliers."""
    return math.ceil(2 * math.cbrt(n))


def render_learning_curve(curve: Sequence[LearningCurvePoint], width: int, unit: str = ANY_UNIT) -> list[str]:
    """Return a plot of the mean over steps, one line per run; a single run has intervals."""
    import plotext

    from ckpttool.pages.rendering import round_ticks

    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, _CURVE_HEIGHT)
    figure.label(unit)
    ends = sorted({curve[0].step, curve[-1].step})
    figure.ruler("x").ticks(ends, [f"{step:,}" for step in ends])
    lines = _can_encode("⣿│")
    runs = [[p for p in curve if p.run == run] for run in dict.fromkeys(point.run for point in curve)]
    ends_of_intervals = (value for p in curve if len(runs) == 1 and p.ci95 is not None for value in p.ci95)
    values = [*(point.mean for point in curve), *ends_of_intervals]
    ticks = round_ticks(min(values), max(values))
    figure.ruler("y").ticks(ticks, [f"{tick + 0.0:,.15g}" for tick in ticks])
    for axis, numbers in (("x", ends), ("y", values)):
        if min(numbers) < max(numbers):
            figure.ruler(axis).lim(min(numbers), max(numbers))
    for run in runs:
        strokes = [([point.step for point in run], [point.mean for point in run])]
        if len(runs) == 1:
            strokes += [([point.step] * 2, list(point.ci95)) for point in run if point.ci95 is not None]
        for steps, heights in strokes:
            figure.draw(figure.signal(steps, heights, marker="braille" if lines else "*").lines())
    text: str = figure.build().string(colorless=True)
    return [line.rstrip() for line in (text if lines else text.translate(_FRAME)).splitlines()]


def _format_axis_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _can_encode(characters: str) -> bool:
    """Return whether the output's encoding has the characters."""
    try:
        characters.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


class FigureTheme(NamedTuple):
    """Colors of a figure; `lines` distinguish runs and algorithms."""

    paper: str
    ink: str
    dim: str
    grid: str
    lines: tuple[str, ...]

    @property
    def accent(self) -> str:
        """The color of a mean and its interval."""
        return self.lines[1]

    @property
    def ends(self) -> tuple[tuple[str, str], ...]:
        """The colors of terminated and truncated episodes."""
        return (("terminated", self.lines[4]), ("truncated", self.lines[5]))


# Okabe and Ito's palette (jfly.uni-koeln.de/color), without yellow and black. On dark paper the two blues
# change places, because the dark one would be hard to read.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"
THEMES = {
    "light": FigureTheme("#ffffff", "#222222", "#59636e", "#d9d9d9", (BLUE, RED, GREEN, PURPLE, ORANGE, SKY)),
    "dark": FigureTheme("#0d1117", "#e6edf3", "#9198a1", "#30363d", (SKY, RED, GREEN, PURPLE, ORANGE, BLUE)),
}
LIGHT = THEMES["light"]
MARKS = "osD^vP"
_DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)))


def require_theme(name: str | None) -> None:
    """Raise UsageError for an unknown theme; None is the default."""
    if name is not None and name not in THEMES:
        raise UsageError(f"unknown theme {clean(name)!r}", hint=f"choose from {', '.join(THEMES)}")


_MOST_BINS = 40
# As the ticks have it.
_MINUS = "\u2212"
# Longest names in a title, and beside an axis.
_LONGEST, _LONGEST_LABEL = 42, 20
# Characters of all labels of an axis that fit beside each other.
_CROWDED = 90
# Within one training run, updates start after the first steps and happen at every step or every second one.
_ALIKE = 2.5


def draw_returns(axes: Axes, one: Evaluation, theme: FigureTheme = LIGHT, width: int = 82) -> None:
    """Plot the distribution of the returns, each return, and the mean with its interval.

    `width` is the room for the legend, in characters.
    """
    values, result = one.rollout.returns, one.statistics
    if len(values) >= FEWEST and result.min < result.max:
        over = one.rollout.terminated
        parts = [
            (values[here], *kind) for here, kind in zip((over, ~over), theme.ends, strict=True) if here.any()
        ]
        returns, labels, tones = zip(*parts, strict=True)
        axes.hist(
            returns,
            _bin_edges(values),
            stacked=True,
            color=tones,
            label=labels,
            edgecolor=theme.paper,
            linewidth=0.5,
        )
        height = axes.get_ylim()[1]
        axes.plot(values, np.full(len(values), -0.04 * height), "|", color=theme.ink, markersize=7)
        axes.set_ylim(-0.08 * height, 1.05 * height)
        axes.set_ylabel("episodes")
        _limit_ticks(axes.yaxis, integer=True)
    else:
        places = np.linspace(0.8, 0.2, len(values)) if len(values) > 1 else [0.5]
        axes.plot(values, places, "o", color=theme.lines[0], zorder=3, label="episodes")
        axes.set_ylim(0, 1)
        axes.set_yticks([])
    if result.ci95 is not None:
        axes.axvspan(
            *result.ci95, color=theme.accent, alpha=0.25, linewidth=0, zorder=0.6, label="95 % CI of the mean"
        )
    axes.axvline(result.mean, color=theme.accent, linewidth=1.8, label=f"mean {_format_return(result.mean)}")
    axes.axvline(
        result.iqm, color=theme.ink, linewidth=1.4, linestyle="--", label=f"IQM {_format_return(result.iqm)}"
    )
    axes.set_xlabel("return")
    _legend_above(axes, width=width)


def draw_lengths(axes: Axes, one: Evaluation, theme: FigureTheme = LIGHT) -> None:
    """Plot the episode lengths."""
    values = one.rollout.lengths
    axes.hist(values, _bin_edges(values), color=theme.lines[0], edgecolor=theme.paper, linewidth=0.5)
    axes.set_xlabel("episode length (steps)")
    axes.set_ylabel("episodes")
    if values.min() < values.max():
        _limit_ticks(axes.xaxis, 4, integer=True)
    else:
        axes.set_xticks([int(values[0])])
    _limit_ticks(axes.yaxis, integer=True)


def draw_learning_curve(
    axes: Axes,
    evaluations: Sequence[Evaluation],
    curve: Sequence[LearningCurvePoint],
    unit: str = ANY_UNIT,
    theme: FigureTheme = LIGHT,
) -> Axes:
    """Plot means over steps with their intervals, one line per run, and every return.

    Args:
        axes: Matplotlib's axes.
        evaluations: the evaluations, whose returns are drawn.
        curve: means and intervals by run and step.
        unit: what a step is, for the label of the axis.
        theme: colors and line styles.
    """
    by_path = {evaluation.checkpoint: evaluation.rollout.returns for evaluation in evaluations}
    runs = list(dict.fromkeys(point.run for point in curve))
    names = _distinct_names(runs)
    for number, run in enumerate(runs):
        points = [point for point in curve if point.run == run]
        style = _line_style(number, theme)
        steps, means = [point.step for point in points], [point.mean for point in points]
        for point in points:
            values = by_path.get(point.checkpoint, np.empty(0))
            places = np.full(len(values), point.step)
            axes.plot(places, values, ".", color=style["color"], alpha=0.25, markersize=4, markeredgewidth=0)
        low, high = zip(*(point.ci95 or (point.mean, point.mean) for point in points), strict=True)
        if len(points) > 1:
            axes.fill_between(steps, low, high, color=style["color"], alpha=0.2, linewidth=0)
        else:  # an area over one step would have no width
            axes.plot(steps * 2, [*low, *high], color=style["color"], linewidth=5, alpha=0.4)
        known = any(point.ci95 is not None for point in points)
        label = names[number] if len(runs) > 1 else f"{_name_mean(known)}; dots are episodes"
        axes.plot(steps, means, markersize=4, linewidth=1.5, label=label, **style)
    best = max(curve, key=lambda point: point.mean)
    sentence = f"best mean {_format_return(best.mean)} at {best.step:,}"
    axes.plot([best.step], [best.mean], "*", color=theme.ink, markersize=11, label=sentence, linestyle="none")
    axes.set_ylabel("return")
    _label_steps(axes, unit)
    _legend_above(axes)
    return axes


def _name_mean(known: bool) -> str:
    return "mean with 95 % CI" if known else "mean"


def draw_checkpoints(axes: Axes, evaluations: Sequence[Evaluation], theme: FigureTheme = LIGHT) -> None:
    """Plot several checkpoints side by side: every return, the mean and its interval."""
    known = any(one.statistics.ci95 is not None for one in evaluations)
    for number, one in enumerate(evaluations):
        result, values = one.statistics, one.rollout.returns
        # Spread evenly so that equal returns stay visible; random positions would differ in every file.
        across = number + np.linspace(-0.18, 0.18, len(values)) if len(values) > 1 else [number]
        labels = ("_episodes", "_mean") if number else ("episodes", _name_mean(known))  # named once
        axes.plot(
            across,
            values,
            ".",
            color=theme.lines[0],
            alpha=0.4,
            markersize=5,
            markeredgewidth=0,
            label=labels[0],
        )
        low, high = result.ci95 or (result.mean, result.mean)
        axes.plot(
            [number] * 2, [low, high], color=theme.accent, linewidth=5, alpha=0.5, solid_capstyle="butt"
        )
        axes.plot([number], [result.mean], "D", color=theme.accent, markersize=5, label=labels[1])
    _label_checkpoints(axes, _distinct_names([one.checkpoint for one in evaluations]))
    axes.set_ylabel("return")
    _legend_above(axes)


def _label_checkpoints(axes: Axes, names: Sequence[str]) -> None:
    """Label ticks with names; where these are too long, what all begin with is below the axis."""
    shown = list(names)
    if sum(map(len, names)) > _CROWDED:
        shown = _drop_common_words(names)
        common = names[0].removesuffix(shown[0])
        axes.set_xlabel(f"{common}..." if common and common != names[0] else "")
    shown = [shorten(name, 2 * _LONGEST_LABEL) for name in shown]
    # Of many names, every second, third ... has room.
    every = -(-len(shown) // 30)
    crowded = sum(map(len, shown[::every])) > _CROWDED
    lines = [name.replace("/", "/\n") for name in shown]
    if crowded and len(shown) * max(len(part) for name in lines for part in name.splitlines()) <= _CROWDED:
        shown, crowded = lines, False
    axes.set_xticks(
        range(0, len(shown), every),
        shown[::every],
        rotation=30 if crowded else 0,
        ha="right" if crowded else "center",
        rotation_mode="anchor",
    )


def draw_logged_curves(axes: Axes, training: Sequence[TrainingCurve], theme: FigureTheme = LIGHT) -> None:
    """Plot the returns logged by the training programs, each curve with its moving mean."""
    title = "logged during training"
    folders = _distinct_names([os.path.dirname(curve.files[0]) for curve in training])
    for number, curve in enumerate(training):
        style = _line_style(number, theme) | {"marker": ""}
        label = clean(curve.tag) if len(training) == 1 else f"{folders[number]}: {clean(curve.tag)}"
        smooth = _moving_mean(curve.values)
        if smooth is not None:
            axes.plot(curve.steps, curve.values, color=style["color"], alpha=0.3, linewidth=0.8)
            title = "logged during training, with moving mean"
        axes.plot(curve.steps, curve.values if smooth is None else smooth, label=label, **style)
    axes.set_ylabel("return")
    _label_steps(axes, "training steps, as logged")
    _legend_above(axes, title)


def draw_algorithms(figure: Figure, spec: SubplotSpec, data: PlotData, theme: FigureTheme = LIGHT) -> None:
    """Plot aggregates with intervals above, and below learning curves (or scores) and performance profiles.

    The panels are those of Agarwal et al. 2021 (https://arxiv.org/abs/2108.13264); the numbers come from
    evaluation/statistics.py.
    """
    from ckpttool.evaluation.algorithms import curve_over_steps

    algorithms = data.algorithms
    rows = spec.subgridspec(2, 1, height_ratios=[0.5 + 0.32 * len(algorithms), 2.6])
    _draw_aggregates(figure, rows[0], data, theme)
    below = rows[1].subgridspec(1, 2, width_ratios=[1.35, 1])
    left, right = (figure.add_subplot(below[0, column]) for column in (0, 1))
    curves = [curve_over_steps(algorithm) for algorithm in algorithms]
    if all(len(points) > 1 for points in curves):
        _draw_run_curves(left, algorithms, curves, data.unit, theme)
    else:
        _draw_run_scores(left, algorithms, theme)
    _draw_profiles(right, algorithms, theme)


def _draw_aggregates(figure: Figure, cell: SubplotSpec, data: PlotData, theme: FigureTheme) -> None:
    """Plot a panel per statistic, one row per algorithm, and the probability of improvement."""
    panels = _aggregate_panels(data.algorithms)
    count = len(panels) + (data.comparison is not None)
    inner = cell.subgridspec(1, count)
    for number, (title, label, estimates) in enumerate(panels):
        axes = figure.add_subplot(inner[0, number])
        _draw_intervals(axes, estimates, theme)
        axes.set_title(title)
        axes.set_xlabel(label)
        names = algorithm_names(data.algorithms) if not number else []
        axes.set_yticks(range(len(data.algorithms)), names or [""] * len(estimates))
    if data.comparison is not None:
        axes = figure.add_subplot(inner[0, count - 1])
        _draw_improvement(axes, data.algorithms, data.comparison, theme)


_TITLES = {"mean": "mean", "median": "median", "iqm": "IQM", "optimality_gap": "optimality gap"}
_SCALED = {"optimality_gap": "normalised score\n(lower is better)"}


def _aggregate_panels(algorithms: Sequence[Algorithm]) -> list[tuple[str, str, list[Estimate]]]:
    """Return title, axis label and estimates of each panel.

    The median over environments of a single environment is its mean, and has no panel.
    """
    normalized = [algorithm.normalized for algorithm in algorithms if algorithm.normalized is not None]
    several = all(algorithm.scale is not None for algorithm in algorithms)
    panels = [
        ("mean", "return", [algorithm.mean for algorithm in algorithms]),
        ("IQM", "return", [algorithm.iqm for algorithm in algorithms]),
    ]
    if len(normalized) < len(algorithms):
        return panels
    names = AGGREGATES if several else ("optimality_gap",)
    scaled = [
        (
            _TITLES[name],
            _SCALED.get(name, "normalised score"),
            [estimates.aggregates[name] for estimates in normalized],
        )
        for name in names
    ]
    return scaled if several else [*panels, *scaled]


def _draw_intervals(axes: Axes, estimates: Sequence[Estimate], theme: FigureTheme) -> None:
    """Plot estimates as bars of their intervals, one below the other."""
    for row, estimate in enumerate(estimates):
        colour = theme.lines[row % len(theme.lines)]
        if estimate.ci95 is not None:
            low, high = estimate.ci95
            axes.barh(row, high - low, left=low, height=0.55, color=colour, alpha=0.45)
        mark = colour if estimate.ci95 is None else theme.ink
        axes.plot([estimate.value] * 2, [row - 0.275, row + 0.275], color=mark, linewidth=2)
    axes.set_ylim(len(estimates) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    ends = [end for estimate in estimates for end in (estimate.value, *(estimate.ci95 or ()))]
    low, high = min(ends), max(ends)
    # Nearly equal estimates shall look so, and have ticks of few digits.
    span = max(high - low, 0.02 * max(abs(low), abs(high)), 1e-3)
    axes.set_xlim((low + high - 1.3 * span) / 2, (low + high + 1.3 * span) / 2)
    _limit_ticks(axes.xaxis, 3 if max(abs(low), abs(high)) < 10_000 else 2)


def _draw_improvement(
    axes: Axes, algorithms: Sequence[Algorithm], compared: AlgorithmComparison, theme: FigureTheme
) -> None:
    """Plot the probability that a run of the first algorithm scores more than one of the second."""
    axes.axvline(0.5, color=theme.dim, linewidth=1, linestyle="--")
    _draw_intervals(axes, [compared.probability], theme)
    first, second = (name.partition("\n")[0] for name in algorithm_names(algorithms))
    if max(len(first), len(second)) > _LONGEST_LABEL - 6:
        first, second = "upper", "lower"
    axes.set_title("P(improvement)")
    axes.set_xlabel(f"P({first} >\n{second}): {compared.probability.value:.2f}")
    axes.set_xlim(-0.04, 1.04)
    axes.set_xticks([0, 0.5, 1])
    axes.set_yticks([])


def _draw_run_curves(
    axes: Axes,
    algorithms: Sequence[Algorithm],
    curves: Sequence[Sequence[AlgorithmCurvePoint]],
    unit: str,
    theme: FigureTheme,
) -> None:
    """Plot each algorithm's IQM at equal steps with its interval."""
    names = algorithm_names(algorithms)
    for row, points in enumerate(curves):
        style = _line_style(row, theme)
        steps, values = [point.step for point in points], [point.iqm.value for point in points]
        low, high = zip(*(point.iqm.ci95 or (point.iqm.value,) * 2 for point in points), strict=True)
        axes.fill_between(steps, low, high, color=style["color"], alpha=0.2, linewidth=0)
        axes.plot(steps, values, markersize=4, label=names[row].replace("\n", " "), **style)
    axes.set_ylabel(_wrap_unit(algorithms[0].unit, 44))
    _label_steps(axes, unit)
    _legend_above(axes, "learning curve: IQM, 95 % CI", width=46)


def _draw_run_scores(axes: Axes, algorithms: Sequence[Algorithm], theme: FigureTheme) -> None:
    """Plot the score of every run."""
    names = algorithm_names(algorithms)
    for row, algorithm in enumerate(algorithms):
        scores = sorted(
            run.score
            if algorithm.scale is None
            else float(algorithm.scale.normalize(run.env, [run.score])[0])
            for run in algorithm.runs
        )
        places = np.linspace(-0.2, 0.2, len(scores)) if len(scores) > 1 else np.zeros(1)
        mark = MARKS[row % len(MARKS)]
        label = names[row].replace("\n", " ")
        colour = theme.lines[row % len(theme.lines)]
        axes.plot(scores, row + places, mark, color=colour, label=label, markersize=5, alpha=0.8)
    axes.set_ylim(len(algorithms) - 0.5, -0.5)
    axes.set_yticks(range(len(algorithms)), [""] * len(algorithms))
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(_wrap_unit(algorithms[0].unit, 44))
    axes.margins(x=0.12)
    _limit_ticks(axes.xaxis, 4)
    _legend_above(axes, "score of each run", width=46)


def _draw_profiles(axes: Axes, algorithms: Sequence[Algorithm], theme: FigureTheme) -> None:
    """Plot for each score the share of runs above it; the highest curve is the best."""
    from ckpttool.evaluation.algorithms import performance_profiles

    single = all(len(algorithm.runs) == 1 for algorithm in algorithms)
    profiles = performance_profiles(algorithms)
    banded = any(profile.low is not None for profile in profiles)
    for row, profile in enumerate(profiles):
        style = _line_style(row, theme) | {"marker": ""}
        if profile.low is not None and profile.high is not None:
            axes.fill_between(
                profile.thresholds,
                profile.low,
                profile.high,
                step="post",
                color=style["color"],
                alpha=0.2,
                linewidth=0,
            )
        axes.step(profile.thresholds, profile.share, where="post", **style)
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel(f"share of {'episodes' if single else 'runs'} above")
    axes.set_xlabel(_wrap_unit(algorithms[0].unit, 34))
    axes.margins(x=0)
    _limit_ticks(axes.xaxis, 4)
    axes.set_title("performance profile" + (", 95 % CI" if banded else ""))


def algorithm_names(algorithms: Sequence[Algorithm]) -> list[str]:
    """Return a name for each algorithm: its runs' common folder or common name prefix."""
    paths = [[os.path.abspath(run.path) for run in algorithm.runs] for algorithm in algorithms]
    folders = [os.path.commonpath(run_paths) for run_paths in paths]
    names = [_run_name(folder) for folder in folders]
    if len(set(names)) < len(names) and all(len(run_paths) > 1 for run_paths in paths):
        names = [
            _common_prefix([os.path.basename(path) for path in run_paths]) or title_name(run_paths[0])
            for run_paths in paths
        ]
    if len(set(names)) < len(names):
        names = _distinct_names(folders)
    names = _shorten_apart(names, _LONGEST_LABEL)
    if len(set(names)) < len(names):
        names = [f"{letter}: {name}" for letter, name in zip("AB", names, strict=False)]
    return [
        f"{name}\n({format_count(len(row.runs), 'run')})" for name, row in zip(names, algorithms, strict=True)
    ]


# Names of folders that do not identify what was trained.
_NUMBERED = deferred.compile(
    r"(?:seed|run|exp|trial|rep|version)?[-_.]?[0-9]+|ckpts?|checkpoints?|models?", re.I
)


def _run_name(folder: str) -> str:
    """Return the name of a run for titles: `td3/seed_0`, because `seed_0` exists for every algorithm."""
    name, above = title_name(folder), title_name(os.path.dirname(os.path.abspath(folder)))
    return f"{above}/{name}" if above and _NUMBERED.fullmatch(name) else name


def _shorten_apart(names: Sequence[str], width: int) -> list[str]:
    """Shorten names; if they are too long, without the folders and words that all begin or end with."""
    if len(names) > 1 and max(map(len, names)) > width:
        names = _drop_common_words(names)
    return [shorten(name, width) for name in names]


def _drop_common_words(names: Sequence[str]) -> list[str]:
    """Return names without the folders that all end with and the words that all begin with."""
    end = _common_length([name[::-1] for name in names])
    end = names[0].find("/", len(names[0]) - end) if end else -1
    names = [name[: end - len(names[0])] or name for name in names] if end >= 0 else names
    start = _common_length(names)
    start = max(names[0].rfind(mark, 0, start) + 1 for mark in "_-./ ")
    return [name[start:] or name for name in names]


def _common_prefix(names: Sequence[str]) -> str:
    """Return the common prefix of the names without a run number: `td3` of `td3_seed0`, `td3_seed1`."""
    return clean(names[0][: _common_length(names)].rstrip("0123456789_-. "))


def _common_length(names: Sequence[str]) -> int:
    """Return how many characters all names begin with."""
    first, last = min(names), max(names)
    return next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))


def _wrap_unit(unit: str, width: int) -> str:
    """Return the name of a unit in lines; the explanation in brackets starts a new one."""
    name, bracket, rest = unit.partition("(")
    return "\n".join([name.strip(), *textwrap.wrap(bracket + rest, width)])


def _format_difference(comparison: AlgorithmComparison) -> str:
    value, spread = _format_return(comparison.difference.value), ""
    if comparison.difference.ci95 is not None:
        spread = f" (95 % CI {' to '.join(map(_format_return, comparison.difference.ci95))})"
    return f"difference of means {value}{spread}"


def _line_style(number: int, theme: FigureTheme) -> dict[str, Any]:
    """Return color, marker and dashes of a line; those of the first few differ in more than the color."""
    return {
        "color": theme.lines[number % len(theme.lines)],
        "marker": MARKS[number % len(MARKS)],
        "linestyle": _DASHES[number % len(_DASHES)],
    }


def _legend_above(axes: Axes, title: str = "", width: int = 105) -> None:
    """Place the legend between a panel and its title, where it covers no data.

    `width` is the room for a row of entries, in characters.
    """
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(len(labels), width // (max(map(len, labels), default=0) + 6)))
    axes.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.1,
        borderpad=0.2,
        ncols=columns,
        handlelength=2.2,
        columnspacing=1.2,
    )
    if title:
        axes.set_title(title, pad=6 + 13 * math.ceil(len(labels) / columns))


def _limit_ticks(axis: Axis, most: int = 5, *, integer: bool = False) -> None:
    from matplotlib.ticker import MaxNLocator

    steps = [1, 2, 5, 10] if integer else [1, 2, 2.5, 5, 10]
    axis.set_major_locator(MaxNLocator(nbins=most, integer=integer, steps=steps))


def have_similar_range(curve: Sequence[LearningCurvePoint], training: Sequence[TrainingCurve]) -> bool:
    """Return whether both seem to use the same step unit: updates, steps and iterations differ widely."""
    ends = [max(point.step for point in curve), *(int(curve.steps[-1]) for curve in training)]
    return max(ends) <= _ALIKE * min(ends)


def title_name(path: str) -> str:
    """Return a checkpoint's name for a title: the end of its path, without unprintable characters."""
    text = clean(os.path.basename(os.path.normpath(path)))
    return text if len(text) <= _LONGEST else f"...{text[3 - _LONGEST :]}"


def _distinct_names(paths: Sequence[str]) -> list[str]:
    """Return short distinct names: the ends of the paths, with as few folders as possible."""
    parts = [os.path.normpath(path).split(os.sep) for path in paths]
    deepest = max(map(len, parts))
    for depth in range(1, deepest + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(set(paths)):
            break
    return [clean(name) if len(name) <= _LONGEST else f"...{clean(name)[3 - _LONGEST :]}" for name in names]


def _bin_edges(values: np.ndarray) -> list[float]:
    """Return the edges of a histogram's bins; equal values get one bin."""
    low, high = float(values.min()), float(values.max())
    if low == high:
        return [low - 0.5, high + 0.5]
    edges: list[float] = np.linspace(low, high, min(_MOST_BINS, count_bins(len(values))) + 1).tolist()
    return edges


def _moving_mean(values: np.ndarray) -> np.ndarray | None:
    """Return the mean over a window of a twentieth of the curve; None for a short curve."""
    window = len(values) // 20 | 1
    if window < 3:
        return None
    ones = np.ones(window)
    counts = np.convolve(np.ones(len(values)), ones, "same")
    smooth: np.ndarray = np.convolve(values, ones, "same") / counts
    return smooth


def _label_steps(axes: Axes, unit: str = ANY_UNIT) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel(unit)
    _limit_ticks(axes.xaxis, 7)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _plain_ticks(axis: Axis) -> None:
    """Write whole numbers at the ticks: a common offset or factor would be above, on the legend."""
    from matplotlib.ticker import AutoLocator, EngFormatter, FuncFormatter, ScalarFormatter

    form = axis.get_major_formatter()
    if not isinstance(form, ScalarFormatter) or isinstance(form, EngFormatter):
        return
    low, high = axis.get_view_interval()
    largest, span = max(abs(low), abs(high)), abs(high - low)
    form.set_useOffset(False)
    form.set_scientific(False)
    if span and not _SMALL < largest < _LARGE:
        digits = min(15, 4 + math.ceil(math.log10(largest / span)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.{digits}g}".replace("-", _MINUS)))
    texts = axis.get_major_formatter().format_ticks(list(axis.get_majorticklocs()))
    longest = max(map(len, texts), default=0) + 2
    unlimited = axis is axis.axes.xaxis and isinstance(axis.get_major_locator(), AutoLocator)
    if unlimited and longest * len(texts) > _ROOM:
        _limit_ticks(axis, max(1, _ROOM // longest))


def _format_return(value: float) -> str:
    """Return a number with one decimal, small ones with three digits, large ones with six."""
    shown = f"{value:,.1f}" if 10 <= abs(value) < _LARGE else f"{value:.{3 if abs(value) < 10 else 6}g}"
    return shown.replace("-", _MINUS)


# Metadata with author and date is removed, so that equal numbers give equal files.
_SILENT: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}
_WIDTH, _HEIGHT, _BELOW = 8.0, 4.0, 2.6  # inches
_DPI = 200  # 100 pixels per inch, at twice the density
_CAPTION_WIDTH = 140
_ROOM = 60  # characters along the x axis of a wide panel
_SMALL, _LARGE = 1e-4, 1e7  # magnitudes beyond which ticks and labels have an exponent
_RC = "MATPLOTLIBRC"


def _style(theme: FigureTheme) -> Any:  # matplotlib's type for it lists all names of one version
    return {
        "font.family": ["DejaVu Sans", "sans-serif"],
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "figure.facecolor": theme.paper,
        "savefig.facecolor": theme.paper,
        "axes.facecolor": theme.paper,
        "grid.color": theme.grid,
        "text.color": theme.ink,
        **{f"axes.{part}": theme.ink for part in ("labelcolor", "edgecolor", "titlecolor")},
        **{f"{axis}tick.color": theme.ink for axis in "xy"},
        # Names come from files, so a dollar sign is no math markup.
        "text.parse_math": False,
        "svg.hashsalt": "ckpttool",
        "svg.fonttype": "none",
        "path.simplify": True,
        "figure.constrained_layout.w_pad": 0.07,
    }


def require_plot(target: str, *, force: bool = False) -> None:
    """Raise if no plot can be written to `target`: unknown suffix, existing file, matplotlib missing."""
    if _suffix(target) not in _SILENT:
        raise UsageError(
            "cannot infer the plot format from the file name",
            file=target,
            hint=f"use a file name that ends in {', '.join(_SILENT)}",
        )
    require_new(target, force=force)
    require_package("matplotlib", "plotting requires matplotlib", "eval")


class PlotData(NamedTuple):
    """What a plot shows: evaluations, their curve, curves logged in training, algorithms compared."""

    evaluations: Sequence[Evaluation]
    curve: Sequence[LearningCurvePoint] = ()
    training: Sequence[TrainingCurve] = ()
    algorithms: Sequence[Algorithm] = ()
    comparison: AlgorithmComparison | None = None
    unit: str = ANY_UNIT


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot that was written; a notebook shows it."""

    _repr_html_ = render_file

    file: str
    nbytes: int

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"file": self.file, "nbytes": self.nbytes}


def plot(played: Evaluation | Sweep, file: str, *, theme: str | None = None, force: bool = False) -> Plot:
    """Plot what `evaluate` or `sweep` returned into a file, as `eval --plot` does; see `write_plot`.

    `file` ends in .svg, .png or .pdf. Raise UsageError for another name or theme, TargetExistsError if the
    file exists, unless `force`, MissingExtraError without matplotlib, and CkpttoolError for a return that is
    not finite.

    >>> import ckpttool, os, tempfile
    >>> played = ckpttool.evaluate("sample_ckpts/td3_pendulum_torch/ckpt-15000.pt", "Pendulum-v1")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ckpttool.plot(played, os.path.join(folder, "returns.svg")).nbytes > 10_000
    True
    """
    from ckpttool.commands.evaluate import require_played
    from ckpttool.evaluation.protocol import Evaluation
    from ckpttool.evaluation.training_logs import find_training_logs

    require_played(played)
    require_theme(theme)
    require_plot(file, force=force)
    if isinstance(played, Evaluation):
        data = PlotData((played,))
    else:
        data = PlotData(played.evaluations, played.curve, unit=UNITS.get(played.step_from or "", ANY_UNIT))
    logs = find_training_logs([evaluation.checkpoint for evaluation in data.evaluations])
    return Plot(file, write_plot(file, data._replace(training=logs.curves), theme, force=force))


def write_plot(target: str, data: PlotData, theme: str | None = None, *, force: bool = False) -> int:
    """Plot evaluations into a file, and below them the curves logged during training; return its size.

    One checkpoint shows the distribution of its returns and lengths; several show their means over
    training steps, or side by side if no steps are known; training runs show aggregates, learning curves
    and performance profiles of each algorithm with intervals over its runs. `theme` is `light` or `dark`;
    by default an SVG follows the page that it is on, and other files are light. The same values give the
    same bytes. Raise CkpttoolError for a non-finite return.
    """
    for one in data.evaluations:
        if not np.isfinite(one.rollout.returns).all():
            raise CkpttoolError("cannot plot a non-finite return", file=one.checkpoint)
    colours, suffix, drawn = THEMES[theme or "light"], _suffix(target), io.BytesIO()
    with _plot_style(colours):
        _draw_figure(data, colours).savefig(drawn, format=suffix[1:], metadata=_SILENT[suffix])
    content = drawn.getvalue()
    content = _follow_page(content) if suffix == ".svg" and theme is None else content
    write_file(target, content, force=force)
    return len(content)


@contextmanager
def _plot_style(theme: FigureTheme) -> Iterator[None]:
    """Apply the project's style to figures drawn and saved in the block."""
    mpl = _import_matplotlib()
    # Avoid pyplot: it would look for a display and keep every figure.
    with mpl.rc_context(), warnings.catch_warnings():
        # Ignore ./matplotlibrc and the user's own file, so that plots do not depend on them.
        mpl.rcdefaults()
        mpl.rcParams.update(_style(theme))
        # Warning about a character that the typeface lacks.
        warnings.filterwarnings("ignore", message="Glyph")
        yield


def _follow_page(svg: bytes) -> bytes:
    """Add the dark theme to an SVG in light colors: rules that replace each color on a dark page."""
    pairs = zip(_theme_colours(THEMES["light"]), _theme_colours(THEMES["dark"]), strict=True)
    rules = "".join(
        f'[style*="{name}: {light}"]{{{name}:{dark}!important}}'
        for light, dark in pairs
        if light != dark
        for name in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>\n"
    end = svg.index(b">", svg.index(b"<svg")) + 1
    return svg[:end] + b"\n" + style.encode() + svg[end:]


def _theme_colours(theme: FigureTheme) -> tuple[str, ...]:
    return (theme.paper, theme.ink, theme.dim, theme.grid, *theme.lines)


def _draw_figure(data: PlotData, theme: FigureTheme) -> Figure:
    """Return the figure: the evaluations above, the logged curves below."""
    from matplotlib.figure import Figure

    compared = len(data.algorithms) > 1 or any(len(algorithm.runs) > 1 for algorithm in data.algorithms)
    rows = 2 if data.training else 1
    above_in = _HEIGHT + (1.5 + 0.25 * len(data.algorithms) if compared else 0)
    figure = Figure((_WIDTH, above_in + (_BELOW if data.training else 0)), dpi=_DPI, layout="constrained")
    grid = figure.add_gridspec(rows, 4, height_ratios=[above_in, _BELOW][:rows])
    above = None
    if compared:
        draw_algorithms(figure, grid[0, :], data, theme)
    elif len(data.evaluations) == 1:
        equal = _equal_length(data) is not None
        if equal:
            draw_returns(figure.add_subplot(grid[0, :]), data.evaluations[0], theme, width=112)
        else:
            draw_returns(figure.add_subplot(grid[0, :3]), data.evaluations[0], theme)
            draw_lengths(figure.add_subplot(grid[0, 3]), data.evaluations[0], theme)
    elif _has_lines(data.curve):
        above = draw_learning_curve(
            figure.add_subplot(grid[0, :]), data.evaluations, data.curve, data.unit, theme
        )
    else:
        draw_checkpoints(figure.add_subplot(grid[0, :]), data.evaluations, theme)
    if data.training:
        shared = above if data.curve and have_similar_range(data.curve, data.training) else None
        draw_logged_curves(figure.add_subplot(grid[1, :], sharex=shared), data.training, theme)
    title = _figure_title(data, compared=compared)
    title = "\n".join(textwrap.fill(line, 100) for line in title.splitlines())
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5)
    for axes in figure.axes:
        _plain_ticks(axes.xaxis)
        _plain_ticks(axes.yaxis)
    caption = textwrap.fill(_figure_caption(data, compared=compared), _CAPTION_WIDTH)
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=7.5, color=theme.dim)
    return figure


def _equal_length(data: PlotData) -> int | None:
    """Return the length of all episodes of the only checkpoint, None if they differ."""
    lengths = {int(length) for one in data.evaluations for length in one.rollout.lengths}
    return lengths.pop() if len(data.evaluations) == len(lengths) == 1 else None


def _has_lines(curve: Sequence[LearningCurvePoint]) -> bool:
    """Return whether any run has several steps; single steps of different runs form no curve."""
    return len(curve) > len({point.run for point in curve})


def _figure_title(data: PlotData, *, compared: bool) -> str:
    env = ", ".join(dict.fromkeys(clean(one.env) for one in data.evaluations))
    if compared:
        places = ", ".join(dict.fromkeys(clean(env) for env in data.algorithms[0].environments))
        names = " and ".join(name.partition("\n")[0] for name in algorithm_names(data.algorithms))
        title = f"{names} in {places}"
        if data.comparison is None:
            return title
        difference = _format_difference(data.comparison)
        return f"{title}: {difference}" if len(title + difference) < 98 else f"{title}\n{difference}"
    if len(data.evaluations) == 1:
        return f"{title_name(data.evaluations[0].checkpoint)} in {env}"
    folders = {os.path.dirname(one.checkpoint) for one in data.evaluations}
    what = format_count(len(data.evaluations), "checkpoint")
    name = _run_name(folders.pop()) if len(folders) == 1 else ""
    return f"{name} in {env}: {what}" if name else f"{what} in {env}"


def _figure_caption(data: PlotData, *, compared: bool) -> str:
    """Return how many runs and episodes a figure shows, and how its intervals were computed."""
    counts = sorted({one.statistics.n for one in data.evaluations})
    episodes = (
        format_count(counts[0], "episode") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} episodes"
    )
    seeds = [one.rollout.seeds for one in data.evaluations if len(one.rollout.seeds)]
    ends = sorted({min(map(min, seeds)), max(map(max, seeds))}) if seeds else []
    spread = f" (seed{'s' * (len(ends) - 1)} {' to '.join(map(str, ends))})" if ends else ""
    bootstrap = f"{RESAMPLES:,} resamples, seed 0"
    if not compared:
        scope = " per checkpoint" if len(data.evaluations) > 1 else ""
        interval = f" 95 % CI: percentile bootstrap over episodes, {bootstrap}." if counts[-1] > 1 else ""
        length = _equal_length(data)
        steps = "" if length is None else f" of {format_count(length, 'step')}"
        return f"{episodes}{steps}{scope}{spread}.{interval}"
    runs = ", ".join(name.replace("\n(", ": ").rstrip(")") for name in algorithm_names(data.algorithms))
    places = data.algorithms[0].environments
    strata = f", stratified by {len(places)} environments" if len(places) > 1 else ""
    last = data.algorithms[0].last
    scored = f"the last {last} checkpoints" if last > 1 else "the last checkpoint"
    over = " or ".join(dict.fromkeys(algorithm.over for algorithm in data.algorithms))
    interval = f"95 % CI: percentile bootstrap over {over}{strata}, {bootstrap}."
    if all(algorithm.iqm.ci95 is None for algorithm in data.algorithms):
        interval = "No CI: single runs."
    known = [row.normalized.scale.label for row in data.algorithms if row.normalized is not None]
    label = f" {known[0][0].upper()}{known[0][1:]}." if known else ""
    return f"{runs}, each scored by {scored}; {episodes} per checkpoint{spread}. {interval}{label}"


def _import_matplotlib() -> Any:
    """Import matplotlib without the settings in ./matplotlibrc or in the user's own file."""
    if "matplotlib" in sys.modules:
        return sys.modules["matplotlib"]
    spec = importlib.util.find_spec("matplotlib")
    package = os.path.dirname(str(spec.origin if spec is not None else None))
    chosen = os.environ.get(_RC)
    try:
        os.environ[_RC] = os.path.join(package, "mpl-data", "matplotlibrc")
        with search_paths.change_directory(package):
            return importlib.import_module("matplotlib")
    finally:
        os.environ.pop(_RC)
        if chosen is not None:
            os.environ[_RC] = chosen


def _suffix(target: str) -> str:
    return os.path.splitext(target)[1].lower()
