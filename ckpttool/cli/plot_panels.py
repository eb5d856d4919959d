"""The panels of a plot, each on axes of its own; colours and marks that also the colour-blind tell apart."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.cli.terminal_plots import FEWEST, bins
from ckpttool.ops.algorithms import over_steps
from ckpttool.ops.evaluation import Evaluation
from ckpttool.ops.ranking import Point
from ckpttool.ops.training_curve import TrainingCurve
from ckpttool.ops.training_step import ANY_UNIT
from ckpttool.shown import clean, count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

    from ckpttool.ops.algorithms import Algorithm, Comparison, CurvePoint

# Okabe and Ito's palette (jfly.uni-koeln.de/color), without its yellow and its black.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY)
MARKS = "osD^vP"
INK = "#222222"
_ENDS = (("terminated", ORANGE), ("truncated", SKY))
_MOST_BINS = 40
_LONGEST = 42
# Of one training's counts, updates begin after the first steps and are made at every one, or every second.
_ALIKE = 2.5


def returns(axes: Axes, one: Evaluation) -> None:
    """Draw the distribution of the returns, every one of them, and what the mean is known to."""
    values, result = one.rollout.returns, one.statistics
    if len(values) >= FEWEST and result.min < result.max:
        over = one.rollout.terminated
        parts = [(values[here], *kind) for here, kind in zip((over, ~over), _ENDS, strict=True) if here.any()]
        held, labels, tones = zip(*parts, strict=True)
        edges = _edges(values)
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
        axes.axvspan(*result.ci95, color=RED, alpha=0.18, linewidth=0, zorder=0.6, label="95 % of the mean")
    axes.axvline(result.mean, color=RED, linewidth=1.8, label=f"mean {_number(result.mean)}")
    axes.axvline(result.iqm, color=INK, linewidth=1.4, linestyle="--", label=f"IQM {_number(result.iqm)}")
    axes.set_xlabel("return")
    axes.set_title(f"{name_of(one.checkpoint)} in {clean(one.env)}, {count(result.n, 'episode')}")
    axes.legend(loc="best")


def lengths(axes: Axes, one: Evaluation) -> None:
    """Draw how long the episodes were."""
    from matplotlib.ticker import MaxNLocator

    values = one.rollout.lengths
    axes.hist(values, _edges(values), color=BLUE, edgecolor="white", linewidth=0.5)
    axes.set_xlabel("steps of an episode")
    if values.min() < values.max():
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    else:
        axes.set_xticks([int(values[0])])
    axes.yaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True))


def learning(axes: Axes, found: Sequence[Evaluation], curve: Sequence[Point], unit: str = ANY_UNIT) -> Axes:
    """Draw means over steps with their intervals, a line for each run, and every return behind."""
    by_path = {each.checkpoint: each.rollout.returns for each in found}
    runs = list(dict.fromkeys(point.run for point in curve))
    names = _told_apart(runs)
    for number, run in enumerate(runs):
        points = [point for point in curve if point.run == run]
        colour, mark = COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]
        steps, means = [point.step for point in points], [point.mean for point in points]
        for point in points:
            values = by_path.get(point.checkpoint, np.empty(0))
            axes.plot(np.full(len(values), point.step), values, ".", color=colour, alpha=0.25, markersize=3)
        low, high = zip(*(point.ci95 or (point.mean, point.mean) for point in points), strict=True)
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        label = names[number] if len(runs) > 1 else "mean, 95 % of the mean, episodes"
        axes.plot(steps, means, marker=mark, markersize=4, color=colour, linewidth=1.5, label=label)
    best = max(curve, key=lambda point: point.mean)
    said = f"best mean {_number(best.mean)} at {best.step:,}"
    axes.plot([best.step], [best.mean], "*", color=INK, markersize=11, label=said, linestyle="none")
    axes.set_ylabel("return")
    axes.set_title(f"{clean(found[0].env)}, {count(found[0].statistics.n, 'episode')} each")
    _count_steps(axes, unit)
    axes.legend(loc="best")
    return axes


def algorithms(
    figure: Figure,
    place: SubplotSpec,
    found: Sequence[Algorithm],
    compared: Comparison | None,
    unit: str = ANY_UNIT,
) -> None:
    """Draw algorithms beside each other: mean and interquartile mean with intervals, every run, their curves.

    Intervals are those of the bootstrap over training runs (agents/comparison.py), as rliable draws them.
    """
    curves = [over_steps(each) for each in found]
    inner = place.subgridspec(1, 3, width_ratios=[1, 1, 1.5])
    names = algorithm_names(found)
    first = figure.add_subplot(inner[0, 0])
    for axes, title in ((first, "mean"), (figure.add_subplot(inner[0, 1], sharey=first), "IQM")):
        _intervals(axes, found, title)
        if axes is first:
            axes.set_yticks(range(len(found)), names)
            axes.set_ylim(len(found) - 0.5, -0.5)
        else:
            axes.tick_params(labelleft=False)
    last = figure.add_subplot(inner[0, 2])
    if all(len(points) > 1 for points in curves):
        _run_curves(last, curves, names, unit)
    else:
        _run_scores(last, found, names)
    env = clean(found[0].runs[0].scored[0].evaluation.env)
    said = "" if compared is None else f": {_difference(compared)}"
    figure.suptitle(f"{env}{said}", x=0.01, ha="left", fontsize=10)


def algorithm_names(found: Sequence[Algorithm]) -> list[str]:
    """Return a name for each algorithm: its runs' common folder, or what the names of the runs begin with."""
    paths = [[os.path.abspath(run.path) for run in each.runs] for each in found]
    names = [name_of(os.path.commonpath(each)) for each in paths]
    if len(set(names)) < len(names):
        names = [_beginning([os.path.basename(path) for path in each]) or name_of(each[0]) for each in paths]
    if len(set(names)) < len(names):
        names = [f"{letter}: {name}" for letter, name in zip("AB", names, strict=False)]
    return [f"{name}\n({count(len(each.runs), 'run')})" for name, each in zip(names, found, strict=True)]


def _beginning(names: Sequence[str]) -> str:
    """Return what all names begin with, without the number of a run: `td3` of `td3_seed0`, `td3_seed1`."""
    first, last = min(names), max(names)
    same = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return clean(first[:same].rstrip("0123456789_-. "))


def _intervals(axes: Axes, found: Sequence[Algorithm], title: str) -> None:
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
    _few_ticks(axes)


def _run_scores(axes: Axes, found: Sequence[Algorithm], names: Sequence[str]) -> None:
    """Draw the score of every run."""
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
    _few_ticks(axes)


def _run_curves(axes: Axes, found: Sequence[Sequence[CurvePoint]], names: Sequence[str], unit: str) -> None:
    """Draw each algorithm's mean over its runs, step by step, with the interval over runs."""
    for row, points in enumerate(found):
        colour, mark = COLOURS[row % len(COLOURS)], MARKS[row % len(MARKS)]
        steps, means = [point.step for point in points], [point.score.value for point in points]
        low, high = zip(*(point.score.ci95 or (point.score.value,) * 2 for point in points), strict=True)
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(steps, means, marker=mark, markersize=4, color=colour, label=names[row].replace("\n", " "))
    axes.set_title("mean over runs at equal steps, 95 % CI")
    axes.set_ylabel("return")
    _count_steps(axes, unit)
    axes.legend(loc="best")


def _difference(found: Comparison) -> str:
    estimate, chance = found.difference, found.probability
    spread = "" if estimate.ci95 is None else f" [{_number(estimate.ci95[0])}, {_number(estimate.ci95[1])}]"
    return f"difference of means {_number(estimate.value)}{spread}, P(improvement) {chance.value:.2f}"


def _few_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=4))


def beside(axes: Axes, found: Sequence[Evaluation]) -> None:
    """Draw several checkpoints beside each other: every return, the mean and its interval."""
    for number, one in enumerate(found):
        result, values = one.statistics, one.rollout.returns
        # Spread evenly, so that equal returns are seen; random places would differ in every file.
        across = number + np.linspace(-0.18, 0.18, len(values)) if len(values) > 1 else [number]
        axes.plot(across, values, ".", color=BLUE, alpha=0.4, markersize=4)
        low, high = result.ci95 or (result.mean, result.mean)
        axes.plot([number, number], [low, high], color=RED, linewidth=5, alpha=0.5, solid_capstyle="butt")
        axes.plot([number], [result.mean], "D", color=RED, markersize=6)
    crowded = len(found) > 4
    axes.set_xticks(
        range(len(found)),
        _told_apart([one.checkpoint for one in found]),
        rotation=30 if crowded else 0,
        ha="right" if crowded else "center",
    )
    axes.set_ylabel("return")
    axes.set_title(f"{clean(found[0].env)}: episodes, mean and 95 % of the mean")


def alike(curve: Sequence[Point], training: Sequence[TrainingCurve]) -> bool:
    """Return whether both seem to count the same: updates, steps and iterations can be far apart."""
    ends = [max(point.step for point in curve), *(int(each.steps[-1]) for each in training)]
    return max(ends) <= _ALIKE * min(ends)


def logged(axes: Axes, training: Sequence[TrainingCurve]) -> None:
    """Draw what the training programs logged, each curve with its moving mean."""
    folders = _told_apart([os.path.dirname(curve.files[0]) for curve in training])
    for number, curve in enumerate(training):
        colour = COLOURS[number % len(COLOURS)]
        label = clean(curve.tag) if len(training) == 1 else f"{folders[number]}: {clean(curve.tag)}"
        smooth = _moving_mean(curve.values)
        if smooth is not None:
            axes.plot(curve.steps, curve.values, color=colour, alpha=0.3, linewidth=0.8)
        axes.plot(curve.steps, curve.values if smooth is None else smooth, color=colour, label=label)
    axes.set_ylabel("return")
    axes.set_title("logged while training")
    _count_steps(axes)
    axes.legend(loc="best")


def name_of(path: str) -> str:
    """Return a checkpoint's name for a title: the end of its path, without what does not print."""
    text = clean(os.path.basename(os.path.normpath(path)))
    return text if len(text) <= _LONGEST else f"...{text[3 - _LONGEST :]}"


def _told_apart(paths: Sequence[str]) -> list[str]:
    """Return short names that differ: the ends of the paths, as few folders long as it takes."""
    parts = [os.path.normpath(path).split(os.sep) for path in paths]
    deepest = max(map(len, parts))
    for depth in range(1, deepest + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(set(paths)):
            break
    return [clean(name) if len(name) <= _LONGEST else f"...{clean(name)[3 - _LONGEST :]}" for name in names]


def _edges(values: np.ndarray) -> list[float]:
    """Return the edges of a histogram's bars; equal values get one bar."""
    low, high = float(values.min()), float(values.max())
    if low == high:
        return [low - 0.5, high + 0.5]
    edges: list[float] = np.linspace(low, high, min(_MOST_BINS, bins(len(values))) + 1).tolist()
    return edges


def _moving_mean(values: np.ndarray) -> np.ndarray | None:
    """Return the mean over a twentieth of the curve around each point; None for a short one."""
    window = len(values) // 20 | 1
    if window < 3:
        return None
    ones = np.ones(window)
    counts = np.convolve(np.ones(len(values)), ones, "same")
    smooth: np.ndarray = np.convolve(values, ones, "same") / counts
    return smooth


def _count_steps(axes: Axes, unit: str = ANY_UNIT) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel(unit)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _number(value: float) -> str:
    return f"{value:,.1f}"
