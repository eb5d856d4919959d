"""Compare algorithms: results of their training runs, each scored by its last checkpoints."""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ckpttool.core import filesystem, urls
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import UsageError
from ckpttool.evaluation import statistics
from ckpttool.evaluation.protocol import TrainingRun
from ckpttool.evaluation.ranking import ScoredCheckpoint
from ckpttool.evaluation.statistics import (
    Aggregate,
    Estimate,
    Judgement,
    PerformanceProfile,
    ScoreScale,
    choose_scale,
    mean,
    mean_interval,
    paired_interval,
)

EPISODES, SEEDS = "episodes", "training seeds"
# Thresholds of a performance profile: with more scores, quantiles of them.
MOST_THRESHOLDS = 200


@dataclass(frozen=True, slots=True, eq=False)
class RunResult:
    """Result of one training run; its score is the mean over checkpoints and episodes."""

    path: str
    scored: tuple[ScoredCheckpoint, ...]
    seeds: np.ndarray
    """int64 [n]: seeds that all its checkpoints finished; empty for episodes without seeds"""
    returns: np.ndarray
    """float64 [n]: for each seed, the mean over the checkpoints; without seeds, each episode's return"""
    earlier: tuple[ScoredCheckpoint, ...] = ()
    """checkpoints that only the learning curve includes"""

    @property
    def env(self) -> str:
        """The environment of the run."""
        return self.scored[0].evaluation.env

    @property
    def score(self) -> float:
        """The score of the run, as one number."""
        return mean(self.returns)

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": urls.display_url(self.path),
            "checkpoints": [urls.display_url(checkpoint.evaluation.checkpoint) for checkpoint in self.scored],
            "steps": [checkpoint.step for checkpoint in self.scored],
            "mean": self.score,
        }


@dataclass(frozen=True, slots=True)
class NormalizedScores:
    """Aggregates of an algorithm's runs over environments, in normalised scores."""

    scale: ScoreScale
    aggregates: Mapping[Aggregate, Estimate]

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        estimates = {str(name): estimate.document() for name, estimate in self.aggregates.items()}
        return {**self.scale.document(), **estimates}


@dataclass(frozen=True, slots=True, eq=False)
class Algorithm:
    """Training runs of one algorithm; `over` names what the intervals resample.

    `mean` and `iqm` are returns; of runs in several environments they are normalised scores.
    """

    runs: tuple[RunResult, ...]
    last: int
    over: str
    mean: Estimate
    iqm: Estimate
    normalized: NormalizedScores | None
    notes: tuple[str, ...]

    @property
    def environments(self) -> tuple[str, ...]:
        """The environments of the runs, sorted: the strata of the bootstrap."""
        return tuple(sorted({run.env for run in self.runs}))

    @property
    def scale(self) -> ScoreScale | None:
        """The scale of `mean`, `iqm`, curves and profiles; None for returns."""
        several = len(self.environments) > 1 and self.normalized is not None
        return self.normalized.scale if several and self.normalized is not None else None

    @property
    def unit(self) -> str:
        """The name of the scores, for an axis."""
        return "return" if self.scale is None else self.scale.label

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "runs": [run.document() for run in self.runs],
            "last": self.last,
            "interval_over": self.over,
            "mean": self.mean.document(),
            "iqm": self.iqm.document(),
            "environments": list(self.environments),
            "unit": "return" if self.scale is None else "normalised score",
            "normalized": None if self.normalized is None else self.normalized.document(),
            "curve": [point.document() for point in curve_over_steps(self)],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class AlgorithmCurvePoint:
    """Mean and IQM of an algorithm's runs at one training step, with their intervals.

    The IQM of a single run is that of its episodes.
    """

    step: int
    score: Estimate
    iqm: Estimate

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"step": self.step, "score": self.score.document(), "iqm": self.iqm.document()}


@dataclass(frozen=True, slots=True, eq=False)
class AlgorithmComparison:
    """Comparison of two algorithms: score difference, and how often a run of one beats a run of the other."""

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


def summarize_runs(
    runs: Sequence[TrainingRun],
    scored: Sequence[ScoredCheckpoint],
    last: int,
    *,
    over_runs: bool = False,
) -> Algorithm | None:
    """Return the results of the runs whose evaluations are finished; None if no run is complete.

    The values of a single run are those of its episodes; with `over_runs`, its score, to be compared with
    several runs of another algorithm: the IQM of episodes is another quantity than that of runs.
    Raise UsageError for runs in several environments that have no common scale.
    """
    by_place = {filesystem.realpath(checkpoint.evaluation.checkpoint): checkpoint for checkpoint in scored}
    complete, missing = [], []
    for run in runs:
        of = [by_place.get(filesystem.realpath(path)) for path in run.checkpoints]
        earlier = [by_place.get(filesystem.realpath(path)) for path in run.earlier]
        before = tuple(one for one in earlier if one is not None)
        results = (
            _score_run(run.path, [one for one in of if one is not None], before) if None not in of else None
        )
        if results is None:
            missing.append(f"{run.path} is excluded: not all of its checkpoints were evaluated")
        else:
            complete.append(results)
    if not complete:
        return None
    notes = (
        *missing,
        *_single_file_warnings(complete),
        *_environment_notes(complete),
        *surroundings_notes(complete),
    )
    over = SEEDS if over_runs or len(complete) > 1 else EPISODES
    if over_runs and len(complete) == 1:
        notes = (*notes, "single training run: no confidence interval across runs")
    return _aggregate_runs(tuple(complete), last, over, notes)


def _aggregate_runs(runs: tuple[RunResult, ...], last: int, over: str, notes: tuple[str, ...]) -> Algorithm:
    """Return the algorithm of these runs, with its mean, IQM and normalised scores."""
    scale = choose_scale(_judge_environments(runs))
    normalized = None
    if scale is not None:
        strata = _stratify(runs, scale, episodes=over == EPISODES)
        normalized = NormalizedScores(
            scale, {name: statistics.aggregate_runs(strata, name) for name in statistics.AGGREGATES}
        )
    if len({run.env for run in runs}) > 1:
        if normalized is None:
            raise UsageError(
                "returns from different environments cannot be averaged without reference returns",
                found=" and ".join(sorted({run.env for run in runs})),
                hint="evaluate the runs of each environment by themselves",
            )
        means, iqms = normalized.aggregates["mean"], normalized.aggregates["iqm"]
    elif over == SEEDS:
        scores = [run.score for run in runs]
        means, iqms = (statistics.aggregate_runs([scores], name) for name in ("mean", "iqm"))
    else:
        returns = runs[0].returns
        means = Estimate(mean(returns), mean_interval(returns))
        iqms = statistics.aggregate_runs([returns], "iqm")
    return Algorithm(runs, last, over, means, iqms, normalized, notes)


def _judge_environments(runs: Sequence[RunResult]) -> dict[str, Judgement | None]:
    """Return a judgement of each environment, sorted; None if one of its evaluations has none."""
    judged: dict[str, Judgement | None] = {}
    for env in sorted({run.env for run in runs}):
        of = [checkpoint.evaluation.judgement for run in runs if run.env == env for checkpoint in run.scored]
        judged[env] = of[0] if all(of) else None
    return judged


def _stratify(
    runs: Sequence[RunResult], scale: ScoreScale | None, *, episodes: bool = False
) -> list[np.ndarray]:
    """Return the scores of the runs in each environment, sorted by its name, or those of the episodes."""
    strata = []
    for env in sorted({run.env for run in runs}):
        scores = [run.returns if episodes else np.array([run.score]) for run in runs if run.env == env]
        values = np.concatenate(scores)
        strata.append(values if scale is None else scale.normalize(env, values))
    return strata


def _environment_notes(runs: Sequence[RunResult]) -> Iterator[str]:
    """Warn about environments with few runs, or with other numbers of runs than the others."""
    counts = Counter(run.env for run in runs)
    fewest = min(counts.values())
    where = " per environment" if len(counts) > 1 else ""
    if 1 < fewest < statistics.FEW:
        yield f"only {fewest} training runs{where}: the confidence interval across them is too narrow"
    if len(counts) > 1 and fewest < 2:
        yield "an environment has a single run: no confidence interval"
    if len(set(counts.values())) > 1:
        yield "unequal numbers of runs per environment: IQM and optimality gap weight every run equally"


def surroundings_notes(runs: Sequence[RunResult]) -> Iterator[str]:
    """Yield a warning for each environment id whose runs had other arguments or another time limit."""
    for env in sorted({run.env for run in runs}):
        played = [saved.evaluation.surroundings for run in runs if run.env == env for saved in run.scored]
        for name, what in (("arguments", "arguments"), ("max_episode_steps", "time limits")):
            values = {
                json.dumps(surroundings.get(name) or None, sort_keys=True, default=str)
                for surroundings in played
            }
            if len(values) > 1:
                shown = ", ".join(sorted(values))
                yield f"{env} was played with different {what}; returns are not comparable: {shown}"


@functools.lru_cache(maxsize=4)
def curve_over_steps(row: Algorithm) -> tuple[AlgorithmCurvePoint, ...]:
    """Return mean and IQM over the runs at each step that any run has, within the range that all runs cover.

    A run without a checkpoint at a step contributes the linear interpolation between its neighbours.
    Empty if a run has no steps, or if the runs have no steps in common.
    """
    curves: list[tuple[np.ndarray, np.ndarray]] = []
    for run in row.runs:
        scores: dict[int, list[float]] = {}
        for checkpoint in (*run.earlier, *run.scored):
            if checkpoint.step is None:
                return ()
            scores.setdefault(checkpoint.step, []).append(checkpoint.evaluation.statistics.mean)
        steps = sorted(scores)
        values = np.array([np.mean(scores[step]) for step in steps])
        curves.append(
            (np.array(steps), values if row.scale is None else row.scale.normalize(run.env, values))
        )
    first, last = max(int(steps[0]) for steps, _ in curves), min(int(steps[-1]) for steps, _ in curves)
    every = sorted({int(step) for steps, _ in curves for step in steps if first <= step <= last})
    return tuple(_curve_point(row, curves, step) for step in every)


def _curve_point(
    algorithm: Algorithm, curves: Sequence[tuple[np.ndarray, np.ndarray]], step: int
) -> AlgorithmCurvePoint:
    scores = [float(np.interp(step, steps, values)) for steps, values in curves]
    if algorithm.over == EPISODES:
        run = algorithm.runs[0]
        episodes = [
            saved.evaluation.rollout.returns for saved in (*run.earlier, *run.scored) if saved.step == step
        ]
        middle = statistics.aggregate_runs([np.concatenate(episodes)], "iqm")
        return AlgorithmCurvePoint(step, Estimate(scores[0], None), middle)
    envs = [run.env for run in algorithm.runs]
    strata = [
        [score for score, at in zip(scores, envs, strict=True) if at == env] for env in algorithm.environments
    ]
    means, iqms = (statistics.aggregate_runs(strata, name) for name in ("mean", "iqm"))
    return AlgorithmCurvePoint(step, means, iqms)


def performance_profiles(algorithms: Sequence[Algorithm]) -> tuple[PerformanceProfile, ...]:
    """Return the profile of each algorithm at the same thresholds: every score of any of them.

    Between these thresholds a profile is constant. If each algorithm has a single run, the scores are those
    of its episodes.
    """
    single = all(len(algorithm.runs) == 1 for algorithm in algorithms)
    strata = [_stratify(algorithm.runs, algorithm.scale, episodes=single) for algorithm in algorithms]
    scores = np.unique(np.concatenate([side for sides in strata for side in sides]))
    scores = scores[np.isfinite(scores)] if np.isfinite(scores).any() else np.zeros(1)
    if len(scores) > MOST_THRESHOLDS:
        scores = np.quantile(scores, np.linspace(0, 1, MOST_THRESHOLDS))
    ends = max(np.ptp(scores), 1e-9 * max(1.0, abs(scores[0]))) * 0.05
    thresholds = np.concatenate(([scores[0] - ends], scores, [scores[-1] + ends]))
    return tuple(statistics.performance_profile(sides, thresholds) for sides in strata)


def compare_algorithms(a: Algorithm, b: Algorithm) -> AlgorithmComparison:
    """Compare two algorithms by their training runs; if each has one run, by the episodes that both finished.

    Raise UsageError for different environments.
    """
    if a.environments != b.environments:
        places = {*a.environments, *b.environments}
        raise UsageError(
            "returns from different environments cannot be compared", found=" and ".join(sorted(places))
        )
    if len(a.runs) == len(b.runs) == 1:
        (one,), (two,) = a.runs, b.runs
        _, mine, second_rows = np.intersect1d(one.seeds, two.seeds, return_indices=True)
        seeded = len(one.seeds) or len(two.seeds)
        return AlgorithmComparison(
            EPISODES,
            paired_interval(one.returns[mine], two.returns[second_rows])
            if seeded
            else statistics.stratified_difference([one.returns], [two.returns]),
            statistics.stratified_improvement([one.returns], [two.returns]),
        )
    left, right = (_stratify(algorithm.runs, algorithm.scale) for algorithm in (a, b))
    return AlgorithmComparison(
        SEEDS,
        statistics.stratified_difference(left, right),
        statistics.stratified_improvement(left, right),
    )


def _single_file_warnings(runs: Sequence[RunResult]) -> Iterator[str]:
    """Warn where single files of one folder at several steps count as runs: a shell expands patterns."""
    steps: dict[tuple[str, str], set[int]] = {}
    for run in runs:
        if len(run.scored) == 1 and run.scored[0].step is not None:
            steps.setdefault((os.path.dirname(run.path), run.env), set()).add(run.scored[0].step)
    for (folder, _), checkpoints in steps.items():
        if len(checkpoints) > 1:
            where = folder or "."
            yield (
                f"{where} contains runs at different training steps; if they are one run, pass the "
                "folder instead"
            )


def _score_run(
    path: str, scored: Sequence[ScoredCheckpoint], earlier: tuple[ScoredCheckpoint, ...] = ()
) -> RunResult | None:
    """Return a run over the seeds that all its checkpoints finished; None if there are none.

    Episodes without seeds, from a simulator that starts episodes itself, all count. Raise UsageError for
    checkpoints of several environments.
    """
    places = {checkpoint.evaluation.env for checkpoint in (*earlier, *scored)}
    if len(places) > 1:
        raise UsageError(
            "the checkpoints of a training run were trained in different environments",
            file=path,
            found=" and ".join(sorted(places)),
            hint="pass each of them as a run, or give the environment with --env",
        )
    played = [checkpoint.evaluation.rollout for checkpoint in scored]
    if not any(len(rollout.seeds) for rollout in played):
        every = np.concatenate([rollout.returns for rollout in played])
        return RunResult(path, tuple(scored), np.zeros(0, np.int64), every, earlier) if len(every) else None
    seeds = functools.reduce(np.intersect1d, [rollout.seeds for rollout in played])
    if not len(seeds):
        return None
    returns = [rollout.returns[np.isin(rollout.seeds, seeds)] for rollout in played]
    return RunResult(path, tuple(scored), seeds, np.mean(returns, axis=0), earlier)
