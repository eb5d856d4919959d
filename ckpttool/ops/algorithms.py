"""What evaluations say of an algorithm: its training runs, each by its last checkpoints, and two compared."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import Any

import numpy as np

from ckpttool import places, urls
from ckpttool.agents import comparison
from ckpttool.agents.statistics import Estimate, iqm, mean, mean_interval, paired_interval
from ckpttool.errors import CkpttoolError, UsageError
from ckpttool.layouts.recognise import recognised
from ckpttool.ops.entries import BESIDE, Entry, entries
from ckpttool.ops.ranking import Scored

EPISODES, SEEDS = "episodes", "training seeds"


@dataclass(frozen=True, slots=True)
class Asked:
    """A training run to be scored: what was typed for it, and its last checkpoints in training's order."""

    path: str
    checkpoints: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A training run as it was played; its score is the mean over checkpoints and episodes."""

    path: str
    scored: tuple[Scored, ...]
    seeds: np.ndarray
    """int64 [n]: what all its checkpoints have finished; empty for episodes without seeds"""
    returns: np.ndarray
    """float64 [n]: for each seed, the mean over the checkpoints; without seeds, every episode's"""

    @property
    def score(self) -> float:
        """The run's one number."""
        return mean(self.returns)

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": urls.spelled(self.path),
            "checkpoints": [urls.spelled(each.evaluation.checkpoint) for each in self.scored],
            "steps": [each.step for each in self.scored],
            "mean": self.score,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Algorithm:
    """Training runs of one algorithm; `over` says what the intervals resample."""

    runs: tuple[Run, ...]
    last: int
    over: str
    mean: Estimate
    iqm: Estimate
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "runs": [run.document() for run in self.runs],
            "last": self.last,
            "interval_over": self.over,
            "mean": self.mean.document(),
            "iqm": self.iqm.document(),
            "curve": [point.document() for point in over_steps(self)],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """An algorithm at one training step: the mean over its runs, with the interval over them."""

    step: int
    score: Estimate

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"step": self.step, "score": self.score.document()}


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """One algorithm beside another: how much more it scores, and how often a run of it scores more."""

    over: str
    difference: Estimate
    probability: Estimate

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "interval_over": self.over,
            "difference": self.difference.document(),
            "probability_of_improvement": self.probability.document(),
        }


def asked(paths: Sequence[str], last: int, layout: str | None = None) -> tuple[Asked, ...]:
    """Return the last checkpoints of each path: a folder, a pattern or a checkpoint is one training run.

    The parts of one checkpoint are one run, not several. In a folder what holds no agent (statistics, replay
    buffers) is passed over. Raise UsageError for a run that has fewer.
    """
    found: dict[tuple[str, ...], Asked] = {}
    for path in paths:
        if len(paths) > 1 and path.endswith(BESIDE):
            continue  # a shell expands patterns to everything
        every = entries([path])
        agents = (entry.path for entry in reversed(every) if entry.named or _may_play(entry, layout))
        checkpoints = tuple(islice(agents, last))[::-1]
        if len(checkpoints) < last:
            raise UsageError(
                "the training run has too few checkpoints",
                file=path,
                expected=f"the last {last}",
                found=str(len(checkpoints)),
            )
        found.setdefault(tuple(map(places.realpath, checkpoints)), Asked(path, checkpoints))
    return tuple(found.values())


def _may_play(entry: Entry, layout: str | None) -> bool:
    """Say whether an entry holds an agent; a damaged one may have, and playing it will say what is wrong."""
    try:
        return recognised(entry.open(), layout) is not None
    except CkpttoolError:
        return True


def algorithm(runs: Sequence[Asked], scored: Sequence[Scored], last: int) -> Algorithm | None:
    """Return what the finished evaluations say of these runs; None if not one run is complete."""
    by_place = {places.realpath(each.evaluation.checkpoint): each for each in scored}
    complete, missing = [], []
    for each in runs:
        of = [by_place.get(places.realpath(path)) for path in each.checkpoints]
        found = _run(each.path, [one for one in of if one is not None]) if None not in of else None
        if found is None:
            missing.append(f"{each.path} is left out: not all of its checkpoints were played")
        else:
            complete.append(found)
    if not complete:
        return None
    scores = [run.score for run in complete]
    if len(complete) > 1:
        over, means, iqms = SEEDS, comparison.over_runs(scores, "mean"), comparison.over_runs(scores, "iqm")
    else:
        over, returns = EPISODES, complete[0].returns
        means, iqms = Estimate(mean(returns), mean_interval(returns)), Estimate(iqm(returns), None)
    few = [f"{len(complete)} training runs are few: the interval over them is too narrow"]
    notes = (*missing, *_suspicious(complete), *(few if 1 < len(complete) < comparison.FEW else ()))
    return Algorithm(tuple(complete), last, over, means, iqms, notes)


def over_steps(found: Algorithm) -> tuple[CurvePoint, ...]:
    """Return the algorithm's mean over its runs at each step that any of them has, as far as all runs reach.

    A run that has no checkpoint at a step counts with the straight line between its neighbours there. Empty
    where a run has no steps, or the runs have no steps in common.
    """
    curves: list[tuple[np.ndarray, np.ndarray]] = []
    for run in found.runs:
        scores: dict[int, list[float]] = {}
        for each in run.scored:
            if each.step is None:
                return ()
            scores.setdefault(each.step, []).append(each.evaluation.statistics.mean)
        steps = sorted(scores)
        curves.append((np.array(steps), np.array([np.mean(scores[step]) for step in steps])))
    first, last = max(int(steps[0]) for steps, _ in curves), min(int(steps[-1]) for steps, _ in curves)
    every = sorted({int(step) for steps, _ in curves for step in steps if first <= step <= last})
    rows = [[float(np.interp(step, steps, scores)) for steps, scores in curves] for step in every]
    return tuple(
        CurvePoint(step, comparison.over_runs(row, "mean")) for step, row in zip(every, rows, strict=True)
    )


def compare(a: Algorithm, b: Algorithm) -> Comparison:
    """Compare by training runs; if both have one run, by the episodes that both have finished.

    Raise UsageError for different environments.
    """
    places = {each.evaluation.env for side in (a, b) for run in side.runs for each in run.scored}
    if len(places) > 1:
        raise UsageError(
            "returns of different environments cannot be compared", found=" and ".join(sorted(places))
        )
    if len(a.runs) == len(b.runs) == 1:
        (one,), (two,) = a.runs, b.runs
        _, mine, theirs = np.intersect1d(one.seeds, two.seeds, return_indices=True)
        seeded = len(one.seeds) or len(two.seeds)
        return Comparison(
            EPISODES,
            paired_interval(one.returns[mine], two.returns[theirs])
            if seeded
            else comparison.difference_of_means(one.returns, two.returns),
            comparison.probability_of_improvement(one.returns, two.returns),
        )
    left, right = [run.score for run in a.runs], [run.score for run in b.runs]
    return Comparison(
        SEEDS,
        comparison.difference_of_means(left, right),
        comparison.probability_of_improvement(left, right),
    )


def _suspicious(runs: Sequence[Run]) -> Iterator[str]:
    """Say where single files of one folder at several steps pass for runs: a shell expands a pattern."""
    steps: dict[str, set[int]] = {}
    for run in runs:
        if len(run.scored) == 1 and run.scored[0].step is not None:
            steps.setdefault(os.path.dirname(run.path), set()).add(run.scored[0].step)
    for folder, found in steps.items():
        if len(found) > 1:
            where = folder or "."
            yield f"{where} has runs that are at different steps: if they are one run, name the folder"


def _run(path: str, scored: Sequence[Scored]) -> Run | None:
    """Return a run over the seeds that all its checkpoints have finished; None if there are none.

    Episodes without seeds, of a simulator that starts them by itself, all count.
    """
    played = [each.evaluation.rollout for each in scored]
    if not any(len(each.seeds) for each in played):
        every = np.concatenate([each.returns for each in played])
        return Run(path, tuple(scored), np.zeros(0, np.int64), every) if len(every) else None
    seeds = reduce(np.intersect1d, [each.seeds for each in played])
    if not len(seeds):
        return None
    returns = [each.returns[np.isin(each.seeds, seeds)] for each in played]
    return Run(path, tuple(scored), seeds, np.mean(returns, axis=0))
