"""What evaluations of one run say together: a curve over training steps, a ranking, and which one is best."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpttool import urls
from ckpttool.agents.statistics import Estimate, percentiles, resampled_means
from ckpttool.ops.evaluation import Evaluation

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Scored:
    """A finished evaluation and the training step of its checkpoint, None where nothing says it.

    `counts` is all that the checkpoint and its name say of its training (training_step.counted).
    """

    evaluation: Evaluation
    step: int | None
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a learning curve: a mean with its interval; `run` is the folder of the checkpoint."""

    step: int
    mean: float
    ci95: tuple[float, float] | None
    run: str
    checkpoint: str

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        interval = None if self.ci95 is None else list(self.ci95)
        return {
            "step": self.step,
            "mean": self.mean,
            "ci95": interval,
            "run": urls.spelled(self.run),
            "checkpoint": urls.spelled(self.checkpoint),
        }


@dataclass(frozen=True, slots=True)
class Ranked:
    """One place of a ranking; `behind` is this mean less the best one, over the episodes that both finished.

    `tied` says that the episodes do not tell it from the best, with 95 % confidence over all comparisons;
    the best one is tied with itself.
    """

    rank: int
    checkpoint: str
    step: int | None
    mean: float
    behind: Estimate | None
    tied: bool

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "rank": self.rank,
            "checkpoint": urls.spelled(self.checkpoint),
            "step": self.step,
            "mean": self.mean,
            "behind": None if self.behind is None else self.behind.document(),
            "tied": self.tied,
        }


@dataclass(frozen=True, slots=True)
class Best:
    """The checkpoint of the highest mean; `certain` if every other one is lower beyond chance."""

    checkpoint: str
    step: int | None
    mean: float
    certain: bool

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "checkpoint": urls.spelled(self.checkpoint),
            "step": self.step,
            "mean": self.mean,
            "certain": self.certain,
        }


def curve(scored: Sequence[Scored]) -> tuple[Point, ...]:
    """Return the means over the training steps that are known, from the first to the last."""
    points = [
        Point(
            each.step,
            each.evaluation.statistics.mean,
            each.evaluation.statistics.ci95,
            os.path.dirname(each.evaluation.checkpoint),
            each.evaluation.checkpoint,
        )
        for each in scored
        if each.step is not None
    ]
    return tuple(sorted(points, key=lambda point: point.step))


def ranking(scored: Sequence[Scored]) -> tuple[Ranked, ...]:
    """Return the checkpoints from the highest mean to the lowest; of equal means the earlier one is first.

    Means of different environments have no order: then nothing is ranked.
    """
    if len(scored) < 2 or len({each.evaluation.env for each in scored}) > 1:
        return ()
    first, *others = sorted(scored, key=lambda each: -each.evaluation.statistics.mean)
    best = first.evaluation
    places = [Ranked(1, best.checkpoint, first.step, best.statistics.mean, None, tied=True)]
    for number, each in enumerate(others, 2):
        result = each.evaluation
        behind, highest = _behind(result, best, len(others))
        places.append(
            Ranked(number, result.checkpoint, each.step, result.statistics.mean, behind, tied=highest >= 0)
        )
    return tuple(places)


def best(places: Sequence[Ranked]) -> Best | None:
    """Return who leads a ranking, and whether that is certain; None if there is no ranking."""
    if not places:
        return None
    first, *others = places
    return Best(first.checkpoint, first.step, first.mean, not any(other.tied for other in others))


def episodes_needed(others: int) -> int:
    """Return how many shared episodes it takes to tell the best from that many others at all.

    n fair coins fall on one side with 2 ** -n: a bootstrap of two episodes that agree would be sure.
    """
    return math.ceil(math.log2(others / (1 - LEVEL)))


def _behind(one: Evaluation, best: Evaluation, others: int) -> tuple[Estimate | None, float]:
    """Return the difference of means over the seeds that both finished, and how high it may be.

    None if they have no seed in common; the upper end is infinite where the episodes are too few. Episodes
    without seeds, of a simulator that starts them by itself, are two independent samples.
    """
    if not (len(one.rollout.seeds) or len(best.rollout.seeds)):
        ours, highest = np.sort(one.rollout.returns), np.sort(best.rollout.returns)
        difference, fewest = float(ours.mean() - highest.mean()), min(len(ours), len(highest))
        if fewest < 2:
            return Estimate(difference, None), np.inf
        return _judged(difference, resampled_means(ours) - resampled_means(highest, seed=1), fewest, others)
    _, mine, theirs = np.intersect1d(one.rollout.seeds, best.rollout.seeds, return_indices=True)
    if not len(mine):
        return None, np.inf
    differences = np.sort(one.rollout.returns[mine] - best.rollout.returns[theirs])
    if len(differences) < 2:
        return Estimate(float(differences.mean()), None), np.inf
    return _judged(float(differences.mean()), resampled_means(differences), len(differences), others)


def _judged(difference: float, means: np.ndarray, episodes: int, others: int) -> tuple[Estimate, float]:
    """Return a difference with its interval, from its resampled values, and how high it may be."""
    estimate = Estimate(difference, percentiles(means, LEVEL))
    # Each of the others may be told from the best by chance: they share the 5 % (Bonferroni).
    level = 1 - (1 - LEVEL) / others
    enough = episodes >= episodes_needed(others)
    return estimate, percentiles(means, level)[1] if enough else np.inf
