"""Compute statistics of returns and reference scores."""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np

from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import UsageError
from ckpttool.core.text import describe_record

Values = Sequence[float] | np.ndarray

RESAMPLES = 10_000
# Number of resampled values in memory: 16 MiB of indices and values.
CHUNK = 1 << 20
# For samples up to this size the draws are cached, at most 20 MiB: all checkpoints of a run use the same
# ones.
KEPT = 256
# Up to so many pairs, all 2 ** n signs are tried.
EXACT_PAIRS = 13
# Sums of values of at most 1 that differ by less than this times their number are equal but for rounding.
_ROUNDING = 1e-14
# Infinite returns have undefined differences: the result is NaN, without a warning on stderr.
_QUIET = np.errstate(invalid="ignore")


@dataclass(frozen=True, slots=True)
class ReturnStatistics:
    """Statistics of n values; None where a single value is not enough."""

    n: int
    mean: float
    std: float | None
    median: float
    iqm: float
    min: float
    max: float
    ci95: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Estimate:
    """Value and its 95 % bootstrap CI; None where there are too few values to resample."""

    value: float
    ci95: tuple[float, float] | None

    def document(self) -> dict[str, object]:
        """Return the JSON object."""
        return {"value": self.value, "ci95": None if self.ci95 is None else list(self.ci95)}


@_QUIET
def summarize(values: Values, *, seed: int = 0) -> ReturnStatistics:
    """Return all statistics of the values; `seed` is the bootstrap's."""
    return ReturnStatistics(
        n=len(values),
        mean=mean(values),
        std=std(values),
        median=median(values),
        iqm=iqm(values),
        min=float(_sort_values(values).min()),
        max=float(_sort_values(values).max()),
        ci95=mean_interval(values, seed=seed),
    )


@_QUIET
def mean(values: Values) -> float:
    """Return the arithmetic mean."""
    return float(_sort_values(values).mean())


@_QUIET
def std(values: Values) -> float | None:
    """Return the sample standard deviation (n - 1 in the denominator); None for one value."""
    return float(_sort_values(values).std(ddof=1)) if len(values) > 1 else None


def median(values: Values) -> float:
    """Return the median: the middle value, or the mean of the two middle ones."""
    return float(np.median(_sort_values(values)))


def iqm(values: Values) -> float:
    """Return the interquartile mean: drop floor(n / 4) values at each end, average the rest.

    This equals scipy.stats.trim_mean(values, 0.25), used by rliable: whole values, no fractional
    weights. Unlike there, a NaN is not dropped with the highest values: the result is NaN.
    """
    return float(_iqms(_sort_values(values)[None])[0])


@_QUIET
def mean_interval(
    values: Values, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float] | None:
    """Return the percentile bootstrap CI of the mean; None for one value.

    The CI does not depend on the order of the values. With the same seed it equals
    scipy.stats.bootstrap(method="percentile") with numpy.random.default_rng(seed), up to rounding.
    """
    ordered = _sort_values(values)
    if len(ordered) < 2:
        return None
    return percentile_interval(resampled_means(ordered, resamples, seed), level)


def resampled_means(values: np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """Return the means of resamples of float64 [n]: float64 [resamples]."""
    n = len(values)
    if n <= KEPT and np.isfinite(values).all():
        means: np.ndarray = _draw_counts(n, resamples, seed) @ values / n
        return means
    return np.concatenate([values[drawn].mean(axis=1) for drawn in _draw_indices(n, resamples, seed)])


@functools.lru_cache(maxsize=2)
def _draw_counts(n: int, resamples: int, seed: int) -> np.ndarray:
    """Return the count of each of n values in each resample: float64 [resamples, n]."""
    counts = [
        np.bincount((drawn + n * np.arange(len(drawn))[:, None]).ravel(), minlength=drawn.size)
        for drawn in _draw_indices(n, resamples, seed)
    ]
    return np.concatenate(counts).reshape(resamples, n).astype(np.float64)


def _draw_indices(n: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the indices of the values in each resample: int64 [some, n]."""
    random = np.random.default_rng(seed)
    for size in chunk_sizes(n, resamples):
        yield random.integers(n, size=(size, n))


def paired_interval(
    a: Values, b: Values, seed: int = 0, *, level: float = 0.95, resamples: int = RESAMPLES
) -> Estimate:
    """Return the mean difference a - b of episodes with the same seeds.

    Pairs are resampled, which removes the effect of the shared seeds from the CI. Raise UsageError unless
    both have the same number of values.

    Args:
        a: returns of one side.
        b: returns of the other side, b[i] with the seed of a[i].
        seed: seed of the resampling.
        level: the share of resamples inside the interval.
        resamples: their number.
    """
    if len(a) != len(b):
        raise UsageError(
            "a paired difference requires the same number of episodes on both sides",
            expected=str(len(a)),
            found=str(len(b)),
        )
    differences = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    interval = mean_interval(differences, level=level, resamples=resamples, seed=seed)
    return Estimate(mean(differences), interval)


def chunk_sizes(values: int, resamples: int) -> list[int]:
    """Return how many resamples of that many values fit in memory at a time."""
    rows = max(1, CHUNK // values)
    return [min(rows, resamples - done) for done in range(0, resamples, rows)]


@_QUIET
def percentile_interval(resampled: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Return the percentile CI from a statistic's values over resamples."""
    tail = 50.0 * (1.0 - level)
    low, high = np.percentile(resampled, [tail, 100.0 - tail])
    return float(low), float(high)


@_QUIET
def sign_flip_probability(differences: Values, seed: int = 0) -> float:
    """Return how probable a mean as low as this one is if no pair favors a side.

    Each difference [n] has either sign with probability 1/2 (the sign-flip test, R. A. Fisher, The Design of
    Experiments, 1935, section 21): exact up to EXACT_PAIRS pairs, so never below 2 ** -n; of more, one more
    than the lower means among RESAMPLES random ones, or Hoeffding's bound where that is smaller. An infinite
    difference outweighs all finite ones; NaN gives 1.
    """
    values = np.asarray(differences, np.float64)
    if not values.any() or np.isnan(values).any():
        return 1.0
    values = values / max(np.abs(values[np.isfinite(values)]).max(initial=0.0), np.finfo(float).tiny)
    outweighing = np.abs(values[np.isfinite(values)]).sum() + 1
    values = np.clip(values, -outweighing, outweighing) / outweighing
    total, n = values.sum(), len(values)
    if n <= EXACT_PAIRS:
        sums = np.zeros(1)
        for size in np.abs(values):
            sums = np.concatenate([sums - size, sums + size])
        return float(np.mean(sums <= total + _ROUNDING * n))
    random = np.random.default_rng(seed)
    lower = sum(
        int((random.choice((-1.0, 1.0), (size, n)) @ values <= total + _ROUNDING * n).sum())
        for size in chunk_sizes(n, RESAMPLES)
    )
    bound = math.exp(-(min(total, 0.0) ** 2) / (2 * float(values @ values)))
    return min((lower + 1) / (RESAMPLES + 1), bound)


@_QUIET
def permutation_probability(values: Values, others: Values, seed: int = 0) -> float:
    """Return how probable a difference of means as low as this one is if both samples have one distribution.

    All values are divided among the two samples at random (E. J. G. Pitman, 1937): one more than the lower
    differences among RESAMPLES random ones. NaN and infinite values give 1.
    """
    both = np.concatenate([np.asarray(values, np.float64), np.asarray(others, np.float64)])
    if not np.isfinite(both).all() or not np.ptp(both):
        return 1.0
    both = (both - both.mean()) / np.ptp(both)
    n, random = len(values), np.random.default_rng(seed)
    total = both[:n].sum() + _ROUNDING * len(both)
    lower = sum(
        int((random.permuted(np.tile(both, (size, 1)), axis=1)[:, :n].sum(axis=1) <= total).sum())
        for size in chunk_sizes(len(both), RESAMPLES)
    )
    return (lower + 1) / (RESAMPLES + 1)


@_QUIET
def episodes_for_power(
    difference: float, resampled: np.ndarray, episodes: int, level: float, power: float = 0.8
) -> int | None:
    """Return how many episodes make a difference as large as this one significant with that probability.

    By the normal approximation, z((1 + level) / 2) + z(power) standard errors must not exceed the difference.
    None for equal or undefined means.

    Args:
        difference: the difference of the means.
        resampled: differences of means over resamples of at least two episodes.
        episodes: the number of episodes of each resample.
        level: the interval's share.
        power: the probability.
    """
    from statistics import NormalDist

    quantile = NormalDist().inv_cdf
    # Resampling underestimates the variance by 1 / episodes.
    error = float(resampled.std()) * math.sqrt(episodes / (episodes - 1))
    ratio = error * (quantile((1 + level) / 2) + quantile(power)) / difference if difference else math.nan
    needed = episodes * ratio * ratio
    return math.ceil(needed) if math.isfinite(needed) else None


def _sort_values(values: Values) -> np.ndarray:
    """Return the values as sorted float64, so that sums do not depend on the order of the episodes."""
    array = np.sort(np.asarray(values, np.float64))
    if array.ndim != 1 or not array.size:
        raise UsageError("statistics require at least one value")
    return array


FEW = 5
"""With fewer runs the percentile CI is too narrow to trust (rliable recommends several)."""


Strata = Sequence[Values]
Aggregate = Literal["mean", "median", "iqm", "optimality_gap"]
AGGREGATES: tuple[Aggregate, ...] = ("mean", "median", "iqm", "optimality_gap")


@dataclass(frozen=True, slots=True, eq=False)
class PerformanceProfile:
    """Share of runs whose score is above each threshold, with pointwise 95 % CIs; all float64 [n].

    `low` and `high` are None where an environment has a single run.
    """

    thresholds: np.ndarray
    share: np.ndarray
    low: np.ndarray | None
    high: np.ndarray | None

    def document(self) -> dict[str, object]:
        """Return the JSON object."""
        ends = {"low": self.low, "high": self.high}
        return {
            "share": self.share.tolist(),
            **{name: None if values is None else values.tolist() for name, values in ends.items()},
        }


def aggregate_runs(
    strata: Strata, statistic: Aggregate, *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """Return an aggregate of the runs of all environments, with the stratified bootstrap CI.

    Definitions are those of rliable/metrics.py (Agarwal et al. 2021, section 4.3):

    - mean: mean over environments of the means over runs (`aggregate_mean`)
    - median: median over environments of the means over runs (`aggregate_median`); of one environment it
      is the mean
    - iqm: mean of the middle half of all runs, pooled over environments (`aggregate_iqm`)
    - optimality_gap: 1 - mean of min(score, 1) over all runs (`aggregate_optimality_gap`, gamma = 1), of
      scores that are 1 at the goal

    A score is one number per run: the mean return of its checkpoint. Runs are resampled with replacement
    within their environment (rliable's StratifiedBootstrap without `task_bootstrap`), so that the interval
    describes other training seeds in these environments, not other environments. Episodes are not resampled
    within the runs, because a run's score already includes their randomness. Scores of different environments
    must be normalised before.
    """
    return _bootstrap(lambda *sides: _AGGREGATES[statistic](sides), *strata, resamples=resamples, seed=seed)


def stratified_difference(a: Strata, b: Strata, *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """Return the difference of the `mean` aggregates, a - b, of the same environments.

    The runs of both sides are resampled independently.
    """

    def difference(*sides: np.ndarray) -> np.ndarray:
        first, second = (_AGGREGATES["mean"](side) for side in (sides[: len(a)], sides[len(a) :]))
        return np.asarray(first - second)

    return _bootstrap(difference, *a, *b, resamples=resamples, seed=seed)


def stratified_improvement(a: Strata, b: Strata, *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """Return the probability that a run of `a` scores more than one of `b`, averaged over environments.

    Ties count half: this is the Mann-Whitney statistic divided by the number of pairs, as in
    rliable/metrics.py `probability_of_improvement`. With a NaN on either side, it is NaN.
    """

    def share(*sides: np.ndarray) -> np.ndarray:
        pairs = zip(sides[: len(a)], sides[len(a) :], strict=True)
        return np.asarray(np.mean([_win_share(x, y) for x, y in pairs], axis=0))

    return _bootstrap(share, *a, *b, resamples=resamples, seed=seed)


def performance_profile(
    strata: Strata, thresholds: Values, *, resamples: int = RESAMPLES, seed: int = 0
) -> PerformanceProfile:
    """Return the share of runs, pooled over environments, that score more than each threshold.

    This is rliable/library.py `create_performance_profile` with `use_score_distribution`, the run-score
    distribution of Agarwal et al. 2021, section 4.2. With a NaN among the scores, all shares are NaN.
    """
    taus = np.asarray(thresholds, np.float64)
    if any(np.isnan(runs).any() for runs in strata):
        return PerformanceProfile(taus, np.full(taus.shape, np.nan), None, None)
    above = [(_sort_values(runs)[:, None] > taus).astype(np.float64) for runs in strata]
    total = sum(map(len, above))
    share = np.asarray(sum(runs.sum(axis=0) for runs in above) / total)
    if min(map(len, above)) < 2:
        return PerformanceProfile(taus, share, None, None)
    random = np.random.default_rng(seed)
    shares = [
        sum(random.multinomial(len(runs), np.full(len(runs), 1 / len(runs)), size) @ runs for runs in above)
        / total
        for size in chunk_sizes(total, resamples)
    ]
    low, high = np.percentile(np.concatenate(shares), [2.5, 97.5], axis=0)
    return PerformanceProfile(taus, share, low, high)


@_QUIET
def _bootstrap(statistic: Callable[..., np.ndarray], *samples: Values, resamples: int, seed: int) -> Estimate:
    """Return a statistic of separately resampled samples; it maps arrays float64 [size, n] to [size].

    For one sample the result equals scipy.stats.bootstrap(method="percentile") with the same seed.
    """
    ordered = [_sort_values(sample) for sample in samples]
    value = float(statistic(*(sample[None] for sample in ordered))[0])
    if min(map(len, ordered)) < 2:
        return Estimate(value, None)
    random = np.random.default_rng(seed)
    draws = [
        statistic(*(sample[random.integers(len(sample), size=(size, len(sample)))] for sample in ordered))
        for size in chunk_sizes(sum(map(len, ordered)), resamples)
    ]
    return Estimate(value, percentile_interval(np.concatenate(draws)))


def _task_means(sides: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean over the runs of each environment: float64 [environments, size]."""
    return np.stack([runs.mean(axis=1) for runs in sides])


def _iqms(samples: np.ndarray) -> np.ndarray:
    """Return `iqm` of each row."""
    ordered = np.sort(samples, axis=1)
    cut = ordered.shape[1] // 4
    middle = ordered[:, cut : ordered.shape[1] - cut].mean(axis=1)
    # NaN is sorted to the end, where it would be cut off.
    return np.where(np.isnan(ordered[:, -1]), np.nan, middle)


_AGGREGATES: Mapping[Aggregate, Callable[[Sequence[np.ndarray]], np.ndarray]] = {
    "mean": lambda sides: np.asarray(_task_means(sides).mean(axis=0)),
    "median": lambda sides: np.asarray(np.median(_task_means(sides), axis=0)),
    "iqm": lambda sides: _iqms(np.concatenate(sides, axis=1)),
    "optimality_gap": lambda sides: 1.0 - np.minimum(np.concatenate(sides, axis=1), 1.0).mean(axis=1),
}


def _win_share(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the share of pairs won by `a` in each row of [size, n] and [size, m], using ranks."""
    _, rank = np.unique(np.concatenate((a.ravel(), b.ravel())), return_inverse=True)
    # Each row uses a separate number range, so that one search serves all rows.
    row = np.arange(len(a))[:, None]
    mine = (rank[: a.size].reshape(a.shape) + row * (rank.size + 1)).ravel()
    other = np.sort((rank[a.size :].reshape(b.shape) + row * (rank.size + 1)).ravel())
    lower, upper = (np.searchsorted(other, mine, side) for side in ("left", "right"))
    won = ((lower + upper) / 2).reshape(a.shape) - row * b.shape[1]
    # A NaN has the highest rank, but is no win.
    unknown = np.isnan(a).any(axis=1) | np.isnan(b).any(axis=1)
    return np.where(unknown, np.nan, won.mean(axis=1) / b.shape[1])


SOURCE = "D4RL, d4rl/infos.py"


@dataclass(frozen=True, slots=True)
class ReferenceScores:
    """Returns of a random and of an expert policy, in the environment of their measurement.

    The numbers are D4RL's (d4rl/infos.py, REF_MIN_SCORE and REF_MAX_SCORE, one pair for all datasets of an
    environment; Fu et al. 2020, https://arxiv.org/abs/2004.07219). They were measured in Gym's `-v2`
    environments (d4rl/gym_mujoco/gym_envs.py); later versions of the same task have slightly different
    rewards, which is noted beside every score. No values are added: an environment without a D4RL pair has no
    normalised score.
    """

    env: str
    random: float
    expert: float

    def normalized(self, value: float) -> float:
        """Return 100 * (value - random) / (expert - random)."""
        return 100.0 * (value - self.random) / (self.expert - self.random)


_TABLE = {
    "HalfCheetah": ReferenceScores("HalfCheetah-v2", -280.178953, 12135.0),
    "Hopper": ReferenceScores("Hopper-v2", -20.272305, 3234.3),
    "Walker2d": ReferenceScores("Walker2d-v2", 1.629008, 4592.3),
    "Ant": ReferenceScores("Ant-v2", -325.6, 3879.7),
}


def find_reference_scores(env: str) -> ReferenceScores | None:
    """Return the pair for any version of an environment, e.g. `Hopper-v5`; None if there is none."""
    named = re.fullmatch(r"([A-Za-z0-9]+)-v\d+", env)
    return _TABLE.get(named[1]) if named else None


Verdict = Literal["solved", "published", "between", "better", "random", "worse", "below", "uncertain"]
"""`solved`: the mean reaches the reward threshold; `published`: without a threshold, the CI reaches the best
published mean; `between` random and that goal; `better` than random, without a goal; `random`: the CIs
overlap; `worse` than random; `below` the threshold, without a random return; `uncertain`: one episode."""

# Arguments that change the observations or the policy's interface, not the rewards.
_SAME_REWARDS = frozenset({"exclude_current_positions_from_observation", "wrappers"})


@dataclass(frozen=True, slots=True)
class RandomReturn:
    """Return of a uniformly random policy, and its measurement; `seeds` are the first and the last.

    `reference_returns.json` is written by benchmarks/random_returns.py. The return is measured in exactly
    this environment; published means may be those of another version of the task, which is recorded.
    """

    mean: float
    std: float
    ci95: tuple[float, float]
    episodes: int
    seeds: tuple[int, int]
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PublishedReturn:
    """Mean return that an agent's authors publish; `measured_in` is the environment they played in."""

    algorithm: str
    mean: float
    std: float
    episodes: int
    measured_in: str
    source: str


@dataclass(frozen=True, slots=True)
class ReturnGoal:
    """Return to reach: the environment's reward threshold, or else the best published mean."""

    value: float
    kind: Literal["threshold", "published"]
    source: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """Comparison of a mean return with the references of its environment.

    `fraction` is the position between random (0) and the goal (1); `certain` is whether the CI of the
    mean excludes the next lower verdict, None without a CI.
    """

    __repr__ = describe_record

    verdict: Verdict
    sentence: str
    fraction: float | None
    certain: bool | None
    random: RandomReturn | None
    goal: ReturnGoal | None
    published: tuple[PublishedReturn, ...]

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)


def judge_return(
    env: str, statistics: ReturnStatistics, surroundings: Mapping[str, Any], threshold: float | None = None
) -> Judgement | None:
    """Compare a mean with the references of `env`; None if there are none for this environment.

    `threshold` is the registered reward threshold; without it, the stored one counts. `surroundings` has
    the `arguments` and `max_episode_steps` of the environment: with other rewards or time limits than
    those of the references, no comparison is possible.
    """
    table = _read_references()
    row = table["random"].get(env)
    if not math.isfinite(statistics.mean) or not _is_comparable(row, surroundings):
        return None
    published = _find_published(env)
    goal = _find_goal(env, table["thresholds"].get(env) if threshold is None else threshold, published)
    chance = None
    if row is not None:
        (low, high), (first, last) = row["ci95"], row["seeds"]
        chance = RandomReturn(
            row["mean"], row["std"], (low, high), row["episodes"], (first, last), row["versions"]
        )
    if goal is not None and chance is not None and goal.value <= chance.mean:
        goal = None
    if goal is None and chance is None:
        return None
    verdict = _reach_verdict(statistics, chance, goal)
    fraction = None
    if goal is not None and chance is not None:
        fraction = (statistics.mean - chance.mean) / (goal.value - chance.mean)
    limit = goal.value if verdict in ("solved", "published") and goal is not None else None
    certain = None if statistics.ci95 is None else limit is None or statistics.ci95[0] >= limit
    sentence = _format_verdict(verdict, fraction, goal, certain=certain)
    return Judgement(verdict, sentence, fraction, certain, chance, goal, published)


ScaleKind = Literal["D4RL", "threshold", "published", "goal"]
_GOALS: Mapping[ScaleKind, str] = {
    "D4RL": "expert; D4RL",
    "threshold": "reward threshold",
    "published": "best published mean",
    "goal": "reward threshold or best published mean",
}


@dataclass(frozen=True, slots=True)
class ScoreScale:
    """Returns that are 0 and 1 in each environment; `goal` is a threshold here and a published mean there.

    Scores on one scale can be averaged over environments.
    """

    kind: ScaleKind
    ends: Mapping[str, tuple[float, float]]

    @property
    def label(self) -> str:
        """The name of the scores, for an axis."""
        return f"normalised score (0 random, 1 {_GOALS[self.kind]})"

    def normalize(self, env: str, values: Values) -> np.ndarray:
        """Return the returns of an environment as normalised scores, float64."""
        zero, one = self.ends[env]
        return (np.asarray(values, np.float64) - zero) / (one - zero)

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        ends = [{"env": env, "zero": zero, "one": one} for env, (zero, one) in self.ends.items()]
        return {"kind": self.kind, "label": self.label, "references": ends}


def choose_scale(judged: Mapping[str, Judgement | None]) -> ScoreScale | None:
    """Return D4RL's scale if it has all environments, else that of random and goal; None if one has neither.

    An environment without a judgement, e.g. with other rewards than those of the references, has no scale.
    """
    known = {env: find_reference_scores(env) for env, one in judged.items() if one is not None}
    if len(known) < len(judged):
        return None
    if all(known.values()):
        return ScoreScale("D4RL", {env: (pair.random, pair.expert) for env, pair in known.items() if pair})
    ends, kinds = {}, set[ScaleKind]()
    for env, one in judged.items():
        if one is None or one.random is None or one.goal is None:
            return None
        ends[env] = (one.random.mean, one.goal.value)
        kinds.add(one.goal.kind)
    return ScoreScale(kinds.pop() if len(kinds) == 1 else "goal", ends)


@functools.cache
def _read_references() -> dict[str, Any]:
    file = importlib.resources.files(__package__) / "reference_returns.json"
    references: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return references


def _is_comparable(row: Mapping[str, Any] | None, surroundings: Mapping[str, Any]) -> bool:
    def rewarding(arguments: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in arguments.items() if name not in _SAME_REWARDS}

    arguments = rewarding(surroundings.get("arguments") or {})
    if row is None:
        return not arguments
    limits = (row["max_episode_steps"], surroundings.get("max_episode_steps", row["max_episode_steps"]))
    return arguments == rewarding(row["arguments"]) and limits[0] == limits[1]


def _find_published(env: str) -> tuple[PublishedReturn, ...]:
    """Return the published means of this version of a task, else those of its other versions; best first."""
    rows = _read_references()["published"]
    task = env.rpartition("-v")[0]
    own = [row for row in rows if row["env"] == env]
    own = own or [row for row in rows if task and row["env"].rpartition("-v")[0] == task]
    published = [PublishedReturn(**{name: row[name] for name in row if name != "env"}) for row in own]
    return tuple(sorted(published, key=lambda row: -row.mean))


def _find_goal(env: str, threshold: float | None, published: Sequence[PublishedReturn]) -> ReturnGoal | None:
    if threshold is not None:
        return ReturnGoal(threshold, "threshold", f"Gymnasium's registry, {env}")
    if not published:
        return None
    best = published[0]
    return ReturnGoal(best.mean, "published", f"{best.algorithm} in {best.measured_in}, {best.source}")


def _reach_verdict(stats: ReturnStatistics, chance: RandomReturn | None, goal: ReturnGoal | None) -> Verdict:
    if stats.ci95 is None:
        return "uncertain"
    low, high = stats.ci95
    if goal is not None and goal.kind == "threshold" and stats.mean >= goal.value:
        return "solved"
    if chance is None:
        return "below"
    if high < chance.ci95[0]:
        return "worse"
    if low <= chance.ci95[1]:
        return "random"
    if goal is None:
        return "better"
    return "published" if goal.kind == "published" and high >= goal.value else "between"


def _format_verdict(
    verdict: Verdict, fraction: float | None, goal: ReturnGoal | None, *, certain: bool | None
) -> str:
    match verdict:
        case "solved":
            return "solved" if certain else "solved by the mean, but the 95 % CI reaches below the threshold"
        case "published":
            return "as good as the best published mean" + ("" if certain else " (not significantly worse)")
        case "between" if goal is not None and fraction is not None:
            end = "solved" if goal.kind == "threshold" else "the best published mean"
            return f"between random and {end}: {100 * fraction:.0f} %"
        case "random":
            return "not distinguishable from random: the 95 % CIs overlap"
        case "worse":
            return "no better than random: significantly worse"
        case "below":
            return "below the reward threshold"
        case "uncertain":
            return "one episode is too few to compare with random"
        case _:
            return "better than random"
