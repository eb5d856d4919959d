"""What several training runs say of an algorithm, and whether one algorithm beats another.

A score is one number for one run on one task: the mean return of its checkpoint. Definitions are rliable's
(rliable/metrics.py, rliable/library.py; Agarwal et al. 2021, https://arxiv.org/abs/2108.13264): runs are
resampled with replacement within each task, percentiles of the statistic are the interval. Episodes are not
resampled within the runs, because a run's score already carries the chance of its episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from ckpttool.agents.statistics import RESAMPLES, Estimate, percentiles, portions
from ckpttool.errors import UsageError

Scores = Sequence[float] | Sequence[Sequence[float]] | np.ndarray
"""[runs], or [runs, tasks]."""

FEW = 5
"""With fewer runs than this the percentile interval is too narrow to trust (rliable asks for several)."""


def over_runs(
    scores: Scores, statistic: Literal["mean", "iqm"], *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """Return the mean or IQM over all runs and tasks, with the stratified bootstrap interval over runs."""
    table = _table(scores)
    of = _means if statistic == "mean" else _iqms
    value = float(of(table[None])[0])
    if len(table) < 2:
        return Estimate(value, None)
    random = np.random.default_rng(seed)
    found = [of(_drawn(table, random, size)) for size in portions(table.size, resamples)]
    return Estimate(value, percentiles(np.concatenate(found)))


def difference_of_means(a: Scores, b: Scores, *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """Return how much larger the mean of `a` is; the runs of both sides are resampled independently."""
    return _between(_table(a), _table(b), lambda x, y: _means(x) - _means(y), resamples=resamples, seed=seed)


def probability_of_improvement(
    a: Scores, b: Scores, *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """Return the chance that a run of `a` scores more than one of `b`, ties counting half; mean over tasks.

    This is the Mann-Whitney statistic divided by the number of pairs, as
    rliable/metrics.py `probability_of_improvement` has it.
    """
    return _between(_table(a), _table(b), _superior, resamples=resamples, seed=seed)


def _between(
    a: np.ndarray,
    b: np.ndarray,
    of: Callable[[np.ndarray, np.ndarray], np.ndarray],
    *,
    resamples: int,
    seed: int,
) -> Estimate:
    if a.shape[1] != b.shape[1]:
        raise UsageError(
            "two algorithms are compared on the same tasks", expected=str(a.shape[1]), found=str(b.shape[1])
        )
    value = float(of(a[None], b[None])[0])
    if min(len(a), len(b)) < 2:
        return Estimate(value, None)
    random = np.random.default_rng(seed)
    sizes = portions(a.size + b.size, resamples)
    found = [of(_drawn(a, random, size), _drawn(b, random, size)) for size in sizes]
    return Estimate(value, percentiles(np.concatenate(found)))


def _table(scores: Scores) -> np.ndarray:
    """Return float64 [runs, tasks], runs in ascending order: which came first decides nothing."""
    array = np.asarray(scores, np.float64)
    array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2 or not array.size:
        raise UsageError("a statement about an algorithm needs the score of at least one run")
    return array[np.lexsort(array.T[::-1])]


def _drawn(table: np.ndarray, random: np.random.Generator, size: int) -> np.ndarray:
    """Return resamples [size, runs, tasks]: of every task as many runs as there are, drawn on their own."""
    runs, tasks = table.shape
    return np.asarray(table[random.integers(runs, size=(size, runs, tasks)), np.arange(tasks)])


def _means(tables: np.ndarray) -> np.ndarray:
    return np.asarray(tables.mean(axis=(1, 2)))


def _iqms(tables: np.ndarray) -> np.ndarray:
    """Return the interquartile mean of each [runs, tasks] as a whole: statistics.iqm, row by row."""
    ordered = np.sort(tables.reshape(len(tables), -1), axis=1)
    cut = ordered.shape[1] // 4
    return np.asarray(ordered[:, cut : ordered.shape[1] - cut].mean(axis=1))


def _superior(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the share of pairs that `a` wins, mean over tasks, of each [runs, tasks]: found by ranks."""
    ours, theirs = _rows(a), _rows(b)
    _, rank = np.unique(np.concatenate((ours.ravel(), theirs.ravel())), return_inverse=True)
    # Every row gets numbers of its own, so that one search does for all.
    row = np.arange(len(ours))[:, None]
    mine = (rank[: ours.size].reshape(ours.shape) + row * (rank.size + 1)).ravel()
    other = np.sort((rank[ours.size :].reshape(theirs.shape) + row * (rank.size + 1)).ravel())
    lower, upper = (np.searchsorted(other, mine, side) for side in ("left", "right"))
    won = ((lower + upper) / 2).reshape(ours.shape) - row * theirs.shape[1]
    return np.asarray(won.mean(axis=1).reshape(len(a), -1).mean(axis=1) / theirs.shape[1])


def _rows(tables: np.ndarray) -> np.ndarray:
    """Return [size, runs, tasks] as one row of runs for each task of each table."""
    return np.asarray(np.moveaxis(tables, 1, 2).reshape(-1, tables.shape[1]))
