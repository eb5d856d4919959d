"""Figures of returns: in the terminal, and as image files for one checkpoint, a run or algorithms."""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckpttool.cli.common import terminal_width
from ckpttool.commands.inspect import ANY_UNIT
from ckpttool.core import search_paths
from ckpttool.core.atomic_write import require_new, write_file
from ckpttool.core.errors import CkpttoolError, MissingExtraError, UsageError
from ckpttool.core.text import clean, format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

    from ckpttool.commands.algorithms import (
        Algorithm,
        AlgorithmComparison,
        AlgorithmCurvePoint,
        TrainingCurve,
    )
    from ckpttool.commands.evaluate import Evaluation
    from ckpttool.commands.sweep import LearningCurvePoint


# Small plots in the terminal: the distribution of one checkpoint's returns, or a learning curve.

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
    if importlib.util.find_spec("plotext") is None:
        raise MissingExtraError(
            "plotting in the terminal requires plotext, which is not installed", hint=HINT
        )


def render_chart(
    found: Sequence[Evaluation], curve: Sequence[LearningCurvePoint], unit: str = ANY_UNIT
) -> list[str]:
    """Return the lines of the plot that suits the evaluations; empty if there is nothing to plot."""
    if not all(np.isfinite(one.rollout.returns).all() for one in found):
        return []
    width = min(terminal_width(), _WIDEST)
    if len(found) == 1:
        bars = render_histogram(found[0].rollout.returns, width)
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

    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, _CURVE_HEIGHT)
    figure.label(unit)
    ends = sorted({curve[0].step, curve[-1].step})
    figure.ruler("x").ticks(ends, [f"{step:,}" for step in ends])
    lines = _can_encode("⣿│")
    runs = [[p for p in curve if p.run == run] for run in dict.fromkeys(point.run for point in curve)]
    for run in runs:
        strokes = [([point.step for point in run], [point.mean for point in run])]
        if len(runs) == 1:
            strokes += [([point.step] * 2, list(point.ci95)) for point in run if point.ci95 is not None]
        for steps, values in strokes:
            figure.draw(figure.signal(steps, values, marker="braille" if lines else "*").lines())
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


# Panels of a plot, each on separate axes, with colors and markers that color-blind readers can distinguish.

# Okabe and Ito's palette (jfly.uni-koeln.de/color), without yellow and black.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY)
MARKS = "osD^vP"
INK = "#222222"
_ENDS = (("terminated", ORANGE), ("truncated", SKY))
_MOST_BINS = 40
_LONGEST = 42
# Within one training run, updates start after the first steps and happen at every step or every second one.
_ALIKE = 2.5


def draw_returns(axes: Axes, one: Evaluation) -> None:
    """Plot the distribution of the returns, each return, and the mean with its interval."""
    values, result = one.rollout.returns, one.statistics
    if len(values) >= FEWEST and result.min < result.max:
        over = one.rollout.terminated
        parts = [(values[here], *kind) for here, kind in zip((over, ~over), _ENDS, strict=True) if here.any()]
        held, labels, tones = zip(*parts, strict=True)
        edges = _bin_edges(values)
        axes.hist(held, edges, stacked=True, color=tones, label=labels, edgecolor="white", linewidth=0.5)
        height = axes.get_ylim()[1]
        axes.plot(values, np.full(len(values), -0.04 * height), "|", color=INK, markersize=7)
        axes.set_ylim(-0.08 * height, 1.05 * height)
        axes.set_ylabel("episodes")
    else:
        axes.plot(values, np.linspace(0.8, 0.2, len(values)), "o", color=BLUE, zorder=3, label="episodes")
        axes.set_ylim(0, 1)
        axes.set_yticks([])
    if result.ci95 is not None:
        axes.axvspan(
            *result.ci95, color=RED, alpha=0.18, linewidth=0, zorder=0.6, label="95 % CI of the mean"
        )
    axes.axvline(result.mean, color=RED, linewidth=1.8, label=f"mean {_format_return(result.mean)}")
    axes.axvline(
        result.iqm, color=INK, linewidth=1.4, linestyle="--", label=f"IQM {_format_return(result.iqm)}"
    )
    axes.set_xlabel("return")
    axes.set_title(f"{title_name(one.checkpoint)} in {clean(one.env)}, {format_count(result.n, 'episode')}")
    axes.legend(loc="best")


def draw_lengths(axes: Axes, one: Evaluation) -> None:
    """Plot the episode lengths."""
    from matplotlib.ticker import MaxNLocator

    values = one.rollout.lengths
    axes.hist(values, _bin_edges(values), color=BLUE, edgecolor="white", linewidth=0.5)
    axes.set_xlabel("episode length (steps)")
    if values.min() < values.max():
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    else:
        axes.set_xticks([int(values[0])])
    axes.yaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True))


def draw_learning_curve(
    axes: Axes, found: Sequence[Evaluation], curve: Sequence[LearningCurvePoint], unit: str = ANY_UNIT
) -> Axes:
    """Plot means over steps with their intervals, one line per run, and every return."""
    by_path = {each.checkpoint: each.rollout.returns for each in found}
    runs = list(dict.fromkeys(point.run for point in curve))
    names = _distinct_names(runs)
    for number, run in enumerate(runs):
        points = [point for point in curve if point.run == run]
        colour, mark = COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]
        steps, means = [point.step for point in points], [point.mean for point in points]
        for point in points:
            values = by_path.get(point.checkpoint, np.empty(0))
            axes.plot(np.full(len(values), point.step), values, ".", color=colour, alpha=0.25, markersize=3)
        low, high = zip(*(point.ci95 or (point.mean, point.mean) for point in points), strict=True)
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        label = names[number] if len(runs) > 1 else "mean, 95 % CI of the mean, episodes"
        axes.plot(steps, means, marker=mark, markersize=4, color=colour, linewidth=1.5, label=label)
    best = max(curve, key=lambda point: point.mean)
    sentence = f"best mean {_format_return(best.mean)} at {best.step:,}"
    axes.plot([best.step], [best.mean], "*", color=INK, markersize=11, label=sentence, linestyle="none")
    axes.set_ylabel("return")
    axes.set_title(f"{clean(found[0].env)}, {format_count(found[0].statistics.n, 'episode')} each")
    _label_steps(axes, unit)
    axes.legend(loc="best")
    return axes


def draw_algorithms(
    figure: Figure,
    place: SubplotSpec,
    found: Sequence[Algorithm],
    compared: AlgorithmComparison | None,
    unit: str = ANY_UNIT,
) -> None:
    """Plot algorithms side by side: mean and interquartile mean with intervals, every run, their curves.

    Intervals come from the bootstrap over training runs (evaluation/statistics.py), as in rliable.
    """
    from ckpttool.commands.algorithms import curve_over_steps

    curves = [curve_over_steps(each) for each in found]
    inner = place.subgridspec(1, 3, width_ratios=[1, 1, 1.5])
    names = algorithm_names(found)
    first = figure.add_subplot(inner[0, 0])
    for axes, title in ((first, "mean"), (figure.add_subplot(inner[0, 1], sharey=first), "IQM")):
        _draw_intervals(axes, found, title)
        if axes is first:
            axes.set_yticks(range(len(found)), names)
            axes.set_ylim(len(found) - 0.5, -0.5)
        else:
            axes.tick_params(labelleft=False)
    last = figure.add_subplot(inner[0, 2])
    if all(len(points) > 1 for points in curves):
        _draw_run_curves(last, curves, names, unit)
    else:
        _draw_run_scores(last, found, names)
    env = clean(found[0].runs[0].scored[0].evaluation.env)
    sentence = "" if compared is None else f": {_format_difference(compared)}"
    figure.suptitle(f"{env}{sentence}", x=0.01, ha="left", fontsize=10)


def algorithm_names(found: Sequence[Algorithm]) -> list[str]:
    """Return a name for each algorithm: its runs' common folder or common name prefix."""
    paths = [[os.path.abspath(run.path) for run in each.runs] for each in found]
    names = [title_name(os.path.commonpath(each)) for each in paths]
    if len(set(names)) < len(names):
        names = [
            _common_prefix([os.path.basename(path) for path in each]) or title_name(each[0]) for each in paths
        ]
    if len(set(names)) < len(names):
        names = [f"{letter}: {name}" for letter, name in zip("AB", names, strict=False)]
    return [
        f"{name}\n({format_count(len(each.runs), 'run')})" for name, each in zip(names, found, strict=True)
    ]


def _common_prefix(names: Sequence[str]) -> str:
    """Return the common prefix of the names without a run number: `td3` of `td3_seed0`, `td3_seed1`."""
    first, last = min(names), max(names)
    same = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return clean(first[:same].rstrip("0123456789_-. "))


def _draw_intervals(axes: Axes, found: Sequence[Algorithm], title: str) -> None:
    for row, each in enumerate(found):
        estimate = each.mean if title == "mean" else each.iqm
        colour = COLOURS[row % len(COLOURS)]
        if estimate.ci95 is not None:
            low, high = estimate.ci95
            axes.barh(row, high - low, left=low, height=0.5, color=colour, alpha=0.45)
        axes.plot([estimate.value] * 2, [row - 0.25, row + 0.25], color=INK, linewidth=1.8)
    axes.set_title(f"{title}, 95 % CI")
    axes.set_xlabel("return")
    axes.use_sticky_edges = False
    axes.margins(x=0.12)
    _limit_ticks(axes)


def _draw_run_scores(axes: Axes, found: Sequence[Algorithm], names: Sequence[str]) -> None:
    """Plot the score of every run."""
    for row, each in enumerate(found):
        scores = sorted(run.score for run in each.runs)
        places = np.linspace(-0.2, 0.2, len(scores)) if len(scores) > 1 else np.zeros(1)
        mark = MARKS[row % len(MARKS)]
        axes.plot(scores, row + places, mark, color=COLOURS[row % len(COLOURS)], label=names[row])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_title("score of each run")
    axes.set_xlabel("return")
    axes.margins(x=0.12)
    _limit_ticks(axes)


def _draw_run_curves(
    axes: Axes, found: Sequence[Sequence[AlgorithmCurvePoint]], names: Sequence[str], unit: str
) -> None:
    """Plot each algorithm's mean over its runs, step by step, with the interval over runs."""
    for row, points in enumerate(found):
        colour, mark = COLOURS[row % len(COLOURS)], MARKS[row % len(MARKS)]
        steps, means = [point.step for point in points], [point.score.value for point in points]
        low, high = zip(*(point.score.ci95 or (point.score.value,) * 2 for point in points), strict=True)
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(steps, means, marker=mark, markersize=4, color=colour, label=names[row].replace("\n", " "))
    axes.set_title("mean over runs at equal steps, 95 % CI")
    axes.set_ylabel("return")
    _label_steps(axes, unit)
    axes.legend(loc="best")


def _format_difference(found: AlgorithmComparison) -> str:
    estimate, chance = found.difference, found.probability
    spread = (
        ""
        if estimate.ci95 is None
        else f" [{_format_return(estimate.ci95[0])}, {_format_return(estimate.ci95[1])}]"
    )
    return f"difference of means {_format_return(estimate.value)}{spread}, P(improvement) {chance.value:.2f}"


def _limit_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=4))


def draw_checkpoints(axes: Axes, found: Sequence[Evaluation]) -> None:
    """Plot several checkpoints side by side: every return, the mean and its interval."""
    for number, one in enumerate(found):
        result, values = one.statistics, one.rollout.returns
        # Spread evenly so that equal returns stay visible; random positions would differ in every file.
        across = number + np.linspace(-0.18, 0.18, len(values)) if len(values) > 1 else [number]
        axes.plot(across, values, ".", color=BLUE, alpha=0.4, markersize=4)
        low, high = result.ci95 or (result.mean, result.mean)
        axes.plot([number, number], [low, high], color=RED, linewidth=5, alpha=0.5, solid_capstyle="butt")
        axes.plot([number], [result.mean], "D", color=RED, markersize=6)
    crowded = len(found) > 4
    axes.set_xticks(
        range(len(found)),
        _distinct_names([one.checkpoint for one in found]),
        rotation=30 if crowded else 0,
        ha="right" if crowded else "center",
    )
    axes.set_ylabel("return")
    axes.set_title(f"{clean(found[0].env)}: episodes, mean and 95 % CI of the mean")


def have_similar_range(curve: Sequence[LearningCurvePoint], training: Sequence[TrainingCurve]) -> bool:
    """Return whether both seem to use the same step unit: updates, steps and iterations differ widely."""
    ends = [max(point.step for point in curve), *(int(each.steps[-1]) for each in training)]
    return max(ends) <= _ALIKE * min(ends)


def draw_logged_curves(axes: Axes, training: Sequence[TrainingCurve]) -> None:
    """Plot the returns logged by the training programs, each curve with its moving mean."""
    folders = _distinct_names([os.path.dirname(curve.files[0]) for curve in training])
    for number, curve in enumerate(training):
        colour = COLOURS[number % len(COLOURS)]
        label = clean(curve.tag) if len(training) == 1 else f"{folders[number]}: {clean(curve.tag)}"
        smooth = _moving_mean(curve.values)
        if smooth is not None:
            axes.plot(curve.steps, curve.values, color=colour, alpha=0.3, linewidth=0.8)
        axes.plot(curve.steps, curve.values if smooth is None else smooth, color=colour, label=label)
    axes.set_ylabel("return")
    axes.set_title("logged during training")
    _label_steps(axes)
    axes.legend(loc="best")


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
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _format_return(value: float) -> str:
    return f"{value:,.1f}"


# Plot files of evaluations: the returns of one checkpoint, the learning curve of several.

HINT = "pip install 'ckpttool[eval]'"
# Metadata with author and date is removed, so that equal numbers give equal files.
_SILENT: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}
# matplotlib's type for it lists all names of one version.
_STYLE: Any = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    # Names come from files, so a dollar sign is no math markup.
    "text.parse_math": False,
    "svg.hashsalt": "ckpttool",
    "svg.fonttype": "none",
    "path.simplify": True,
}
_WIDTH, _HEIGHT, _BELOW = 8.0, 4.0, 2.6  # inches
_DPI = 120
_RC = "MATPLOTLIBRC"


def require_plot(target: str) -> None:
    """Raise if no plot can be written to `target`: unknown suffix, existing file, matplotlib missing."""
    if _suffix(target) not in _SILENT:
        raise UsageError(
            "cannot infer the plot format from the file name",
            file=target,
            hint=f"use a file name that ends in {', '.join(_SILENT)}",
        )
    require_new(target, hint="choose another name")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("plotting requires matplotlib, which is not installed", hint=HINT)


class PlotData(NamedTuple):
    """What a plot shows: evaluations, their curve, curves logged in training, algorithms compared."""

    found: Sequence[Evaluation]
    curve: Sequence[LearningCurvePoint] = ()
    training: Sequence[TrainingCurve] = ()
    algorithms: Sequence[Algorithm] = ()
    comparison: AlgorithmComparison | None = None
    unit: str = ANY_UNIT


def write_plot(target: str, data: PlotData) -> None:
    """Plot evaluations into a new file, and below them the curves logged during training.

    One checkpoint shows the distribution of its returns and lengths; several show their means over
    training steps, or side by side if no steps are known; training runs show the mean and the
    interquartile mean of each algorithm with intervals over its runs. The same values give the same
    bytes. Raise CkpttoolError for a non-finite return.
    """
    for one in data.found:
        if not np.isfinite(one.rollout.returns).all():
            raise CkpttoolError("cannot plot a non-finite return", file=one.checkpoint)
    mpl = _import_matplotlib()
    # Avoid pyplot: it would look for a display and keep every figure.
    with mpl.rc_context(), warnings.catch_warnings():
        # Ignore ./matplotlibrc and the user's own file, so that plots do not depend on them.
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        # Warning about a character that the typeface lacks.
        warnings.filterwarnings("ignore", message="Glyph")
        figure = _draw_figure(data)
        suffix = _suffix(target)
        drawn = io.BytesIO()
        figure.savefig(drawn, format=suffix[1:], metadata=_SILENT[suffix])
    write_file(target, drawn.getvalue())


def _draw_figure(data: PlotData) -> Figure:
    """Return the figure: the evaluations above, the logged curves below."""
    from matplotlib.figure import Figure

    rows = 2 if data.training else 1
    height = _HEIGHT + (_BELOW if data.training else 0)
    figure = Figure((_WIDTH, height), dpi=_DPI, layout="constrained")
    grid = figure.add_gridspec(rows, 4, height_ratios=[_HEIGHT, _BELOW][:rows])
    above = None
    if len(data.algorithms) > 1 or any(len(each.runs) > 1 for each in data.algorithms):
        draw_algorithms(figure, grid[0, :], data.algorithms, data.comparison, data.unit)
    elif len(data.found) == 1:
        draw_returns(figure.add_subplot(grid[0, :3]), data.found[0])
        draw_lengths(figure.add_subplot(grid[0, 3]), data.found[0])
    elif data.curve:
        above = draw_learning_curve(figure.add_subplot(grid[0, :]), data.found, data.curve, data.unit)
    else:
        draw_checkpoints(figure.add_subplot(grid[0, :]), data.found)
    if data.training:
        shared = above if data.curve and have_similar_range(data.curve, data.training) else None
        draw_logged_curves(figure.add_subplot(grid[1, :], sharex=shared), data.training)
    return figure


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
