"""Rank checkpoints by their returns, and their learning curve, with the uncertainty of few episodes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ckpttool.core import urls
from ckpttool.core.deferred import dataclass, field
from ckpttool.evaluation.protocol import Evaluation
from ckpttool.evaluation.statistics import (
    Estimate,
    episodes_for_power,
    percentile_interval,
    permutation_probability,
    resampled_means,
    sign_flip_probability,
)

LEVEL = 0.95
# Maximum number of episodes that is proposed to distinguish a checkpoint from the best one.
MOST_EPISODES = 1000


@dataclass(frozen=True, slots=True)
class ScoredCheckpoint:
    """A finished evaluation with the training step of its checkpoint, None if unknown.

    `counts` are the training counters of the checkpoint and its name (training_counters.count_training).
    """

    evaluation: Evaluation
    step: int | None
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LearningCurvePoint:
    """One point of a learning curve: a mean with its interval; `run` is the checkpoint's folder."""

    step: int
    mean: float
    ci95: tuple[float, float] | None
    run: str
    checkpoint: str

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        shown = {"run": urls.display_url(self.run), "checkpoint": urls.display_url(self.checkpoint)}
        return {**asdict(self), "ci95": None if self.ci95 is None else list(self.ci95), **shown}


@dataclass(frozen=True, slots=True)
class RankingRow:
    """One rank; `behind` is this mean minus the best one, over the episodes that both finished.

    `tied` means that it does not differ significantly from the best, at 95 % confidence over all
    comparisons; the best one is tied with itself. With `episodes_needed` episodes, a difference as large
    as this one is significant with a probability of 80 %, after one episode it may be; None if equal.
    """

    rank: int
    checkpoint: str
    step: int | None
    mean: float
    behind: Estimate | None
    tied: bool
    episodes_needed: int | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        behind = None if self.behind is None else self.behind.document()
        return {**asdict(self), "checkpoint": urls.display_url(self.checkpoint), "behind": behind}


@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """The checkpoint with the highest mean; `certain` if every other one is significantly lower."""

    checkpoint: str
    step: int | None
    mean: float
    certain: bool

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {**asdict(self), "checkpoint": urls.display_url(self.checkpoint)}


def build_learning_curve(scored: Sequence[ScoredCheckpoint]) -> tuple[LearningCurvePoint, ...]:
    """Return the means at the known training steps, first to last."""
    points = [
        LearningCurvePoint(
            checkpoint.step,
            checkpoint.evaluation.statistics.mean,
            checkpoint.evaluation.statistics.ci95,
            os.path.dirname(checkpoint.evaluation.checkpoint),
            checkpoint.evaluation.checkpoint,
        )
        for checkpoint in scored
        if checkpoint.step is not None
    ]
    return tuple(sorted(points, key=lambda point: point.step))


def rank_checkpoints(scored: Sequence[ScoredCheckpoint]) -> tuple[RankingRow, ...]:
    """Return the checkpoints from highest to lowest mean, NaN last; of equal means, the earlier first.

    Means of different environments are not comparable: then nothing is ranked.
    """
    if len(scored) < 2 or len({checkpoint.evaluation.env for checkpoint in scored}) > 1:
        return ()
    first, *others = sorted(scored, key=_descending_mean)
    best = first.evaluation
    places = [RankingRow(1, best.checkpoint, first.step, best.statistics.mean, None, tied=True)]
    for number, other in enumerate(others, 2):
        result = other.evaluation
        behind, lower, needed = _paired_difference(result, best, len(others))
        mean = result.statistics.mean
        places.append(RankingRow(number, result.checkpoint, other.step, mean, behind, not lower, needed))
    return tuple(places)


def _descending_mean(checkpoint: ScoredCheckpoint) -> tuple[bool, float]:
    mean = checkpoint.evaluation.statistics.mean
    return math.isnan(mean), -mean


def find_best(places: Sequence[RankingRow]) -> BestCheckpoint | None:
    """Return the leader of a ranking and whether it is certain; None without a ranking or only NaN means."""
    if not places or math.isnan(places[0].mean):
        return None
    first, *others = places
    return BestCheckpoint(first.checkpoint, first.step, first.mean, not any(other.tied for other in others))


def decisive_episodes(places: Sequence[RankingRow]) -> int | None:
    """Return how many episodes distinguish the best from all tied rows that MOST_EPISODES distinguish.

    None if there is no such row.
    """
    numbers = [row.episodes_needed for row in places if row.tied and row.episodes_needed is not None]
    return max((number for number in numbers if number <= MOST_EPISODES), default=None)


def fewest_episodes(others: int) -> int:
    """Return how many shared episodes can at least distinguish the best from that many others.

    Where the best is as good as another, n episodes agree on one of the two with probability
    2 * 2 ** -n.
    """
    return math.ceil(math.log2(1 / _lower_tail(others)))


def _lower_tail(others: int) -> float:
    """Return the probability below which a checkpoint is significantly lower than the best.

    Each of the others may differ by chance, in both directions: they share the 5 % (Bonferroni).
    """
    return (1 - LEVEL) / (2 * others)


def _paired_difference(
    one: Evaluation, best: Evaluation, others: int
) -> tuple[Estimate | None, bool, int | None]:
    """Return the difference of means over shared seeds, whether it is significant, and episodes_needed.

    None without shared seeds. Episodes without seeds, of a simulator that seeds them itself, are two
    independent samples.
    """
    fewest = fewest_episodes(others)
    if not (len(one.rollout.seeds) or len(best.rollout.seeds)):
        returns, highest = np.sort(one.rollout.returns), np.sort(best.rollout.returns)
        difference, episodes = float(returns.mean() - highest.mean()), min(len(returns), len(highest))
        if episodes < 2:
            return Estimate(difference, None), False, fewest
        means = resampled_means(returns) - resampled_means(highest, seed=1)
        probability = permutation_probability(returns, highest)
    else:
        _, mine, other_rows = np.intersect1d(one.rollout.seeds, best.rollout.seeds, return_indices=True)
        if not len(mine):
            return None, False, None
        differences = np.sort(one.rollout.returns[mine] - best.rollout.returns[other_rows])
        difference, episodes = float(differences.mean()), len(differences)
        if episodes < 2:
            return Estimate(difference, None), False, fewest
        means = resampled_means(differences)
        probability = sign_flip_probability(differences)
    tail = _lower_tail(others)
    needed = episodes_for_power(difference, means, episodes, 1 - 2 * tail)
    estimate = Estimate(difference, percentile_interval(means, LEVEL))
    return estimate, probability <= tail, None if needed is None else max(fewest, needed)
