"""Statements about algorithms: rliable's definitions written out slowly, and laws for any scores."""

from __future__ import annotations

import math
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core import UsageError
from ckpttool.evaluation import statistics


def estimate_over_runs(scores: Any, statistic: Any, **options: Any) -> statistics.Estimate:
    return statistics.aggregate_runs([scores], statistic, **options)


def difference_of_means(a: Any, b: Any, **options: Any) -> statistics.Estimate:
    return statistics.stratified_difference([a], [b], **options)


def probability_of_improvement(a: Any, b: Any, **options: Any) -> statistics.Estimate:
    return statistics.stratified_improvement([a], [b], **options)


SCORES = st.lists(st.integers(-50, 50).map(float), min_size=1, max_size=9)
RUNS = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9)


def slow_interval(scores: list[float], statistic: str, resamples: int, seed: int) -> tuple[float, float]:
    """Draw one score at a time, as StratifiedBootstrap of rliable/library.py does for one task."""
    rows = sorted(scores)
    random = np.random.default_rng(seed)
    means = []
    for _ in range(resamples):
        drawn = [rows[random.integers(len(rows))] for _ in rows]
        means.append(np.mean(drawn) if statistic == "mean" else statistics.iqm(drawn))
    return float(np.percentile(means, 2.5)), float(np.percentile(means, 97.5))


@pytest.mark.parametrize("statistic", ["mean", "iqm"])
@given(scores=RUNS)
def test_runs_are_resampled_with_replacement(scores: list[float], statistic: str) -> None:
    estimate = estimate_over_runs(scores, statistic, resamples=20, seed=5)
    assert estimate.value == pytest.approx(np.mean(scores) if statistic == "mean" else statistics.iqm(scores))
    assert estimate.ci95 == pytest.approx(slow_interval(scores, statistic, 20, 5), abs=1e-9)


REFEREES = {
    "mean": lambda stats: lambda a, axis: a.mean(axis),
    "iqm": lambda stats: lambda a, axis: stats.trim_mean(a, 0.25, axis=axis),
    "difference": lambda stats: lambda a, b, axis: a.mean(axis) - b.mean(axis),
    "improvement": lambda stats: (
        lambda a, b, axis: stats.mannwhitneyu(a, b, axis=axis).statistic / (a.shape[axis] * b.shape[axis])
    ),
}
OURS = {
    "mean": lambda a: estimate_over_runs(a, "mean", seed=11),
    "iqm": lambda a: estimate_over_runs(a, "iqm", seed=11),
    "difference": lambda a, b: difference_of_means(a, b, seed=11),
    "improvement": lambda a, b: probability_of_improvement(a, b, seed=11),
}


@pytest.mark.parametrize("statistic", REFEREES)
@pytest.mark.parametrize("runs", [2, 5, 8, 23])
def test_scipy_computes_the_same_intervals(statistic: str, runs: int) -> None:
    """rliable's IQM is SciPy's trimmed mean, its probability of improvement SciPy's Mann-Whitney U."""
    stats = pytest.importorskip("scipy.stats", exc_type=ImportError)
    random = np.random.default_rng(runs)
    samples = [random.normal(0, 50, runs).round(), random.normal(10, 50, runs + 1).round()]
    args = [np.sort(sample) for sample in samples[: 2 if statistic in ("difference", "improvement") else 1]]
    referee = REFEREES[statistic](stats)
    expected = stats.bootstrap(
        args, referee, n_resamples=10_000, method="percentile", rng=np.random.default_rng(11)
    ).confidence_interval
    estimate = OURS[statistic](*args)
    assert estimate.value == pytest.approx(float(referee(*args, axis=-1)))
    assert estimate.ci95 == pytest.approx((expected.low, expected.high), abs=1e-9)


@given(SCORES, SCORES)
def test_improvement_is_the_share_of_pairs_won(a: list[float], b: list[float]) -> None:
    won = [1.0 if x > y else 0.5 if x == y else 0.0 for x, y in product(a, b)]
    estimate = probability_of_improvement(a, b, resamples=50)
    assert estimate.value == pytest.approx(np.mean(won))
    assert probability_of_improvement(b, a, resamples=50).value == pytest.approx(1 - estimate.value)
    if estimate.ci95 is not None:
        assert 0 <= estimate.ci95[0] <= estimate.ci95[1] <= 1


def test_improvement_by_hand() -> None:
    # rliable divides Mann-Whitney's U by the pairs: U of (3, 4, 7) over (1, 4) is 1 + 1.5 + 2.
    assert probability_of_improvement([3, 4, 7], [1, 4]).value == pytest.approx(4.5 / 6)


def test_every_resample_is_a_share_of_pairs() -> None:
    random = np.random.default_rng(3)
    a, b = random.integers(0, 6, (20, 4)).astype(float), random.integers(0, 6, (20, 5)).astype(float)
    pairs = a[:, :, None], b[:, None, :]
    expected = ((pairs[0] > pairs[1]) + 0.5 * (pairs[0] == pairs[1])).mean(axis=(1, 2))
    np.testing.assert_allclose(statistics._win_share(a, b), expected)


@pytest.mark.parametrize("of", [probability_of_improvement, difference_of_means])
def test_both_sides_are_drawn_on_their_own(of: object) -> None:
    a, b = [1.0, 4.0, 6.0], [2.0, 3.0, 9.0, 9.5]
    random, differences = np.random.default_rng(7), []
    for _ in range(300):
        x, y = np.array(a)[random.integers(3, size=3)], np.array(b)[random.integers(4, size=4)]
        pairs = (x[:, None] > y).mean()
        differences.append(pairs if of is probability_of_improvement else x.mean() - y.mean())
    slow = np.percentile(differences, [2.5, 97.5])
    fast = of(a, b, resamples=20_000).ci95
    assert fast == pytest.approx(tuple(slow), abs=0.8 if of is difference_of_means else 0.12)


def test_separate_algorithms_are_told_apart() -> None:
    random = np.random.default_rng(0)
    a, b = random.normal(100, 5, 8), random.normal(50, 5, 8)
    assert probability_of_improvement(a, b) == statistics.Estimate(1.0, (1.0, 1.0))
    difference = difference_of_means(a, b)
    assert difference.ci95 is not None
    assert 40 < difference.ci95[0] < difference.value < difference.ci95[1] < 60


@given(SCORES, st.randoms(use_true_random=False))
def test_the_order_of_runs_does_not_matter(scores: list[float], random: object) -> None:
    mixed = list(scores)
    random.shuffle(mixed)
    assert estimate_over_runs(mixed, "iqm", resamples=50) == estimate_over_runs(scores, "iqm", resamples=50)


def test_portions_do_not_change_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = np.random.default_rng(2).normal(size=12)
    whole = estimate_over_runs(scores, "iqm")
    monkeypatch.setattr(statistics, "CHUNK", 1000)
    assert estimate_over_runs(scores, "iqm") == whole


def test_one_run_has_no_interval() -> None:
    assert estimate_over_runs([3.0], "mean") == statistics.Estimate(3.0, None)
    assert probability_of_improvement([3.0], [1.0, 2.0]).ci95 is None


# --- several environments ----------------------------------------------------------------------------

# The definitions of rliable/metrics.py, of scores [runs, environments].
AGGREGATES = {
    "mean": lambda stats, scores: np.mean(np.mean(scores, axis=0)),
    "median": lambda stats, scores: np.median(np.mean(scores, axis=0)),
    "iqm": lambda stats, scores: stats.trim_mean(scores, proportiontocut=0.25, axis=None),
    "optimality_gap": lambda stats, scores: 1 - np.mean(np.minimum(scores, 1)),
}


def strata(scores: np.ndarray) -> list[np.ndarray]:
    """Return the runs of each environment, from scores [runs, environments]."""
    return list(scores.T)


@pytest.mark.parametrize("statistic", AGGREGATES)
@pytest.mark.parametrize(("runs", "environments"), [(2, 1), (5, 3), (10, 6)])
def test_aggregates_are_those_of_rliable(statistic: str, runs: int, environments: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(runs)
    scores = random.normal(0.7, 0.4, (runs, environments))
    estimate = statistics.aggregate_runs(strata(scores), statistic, seed=3)
    of = AGGREGATES[statistic]
    assert estimate.value == pytest.approx(of(stats, scores))
    # StratifiedBootstrap draws the indices of the runs for each environment separately.
    columns = np.arange(environments)
    drawn = [of(stats, scores[random.integers(runs, size=(runs, environments)), columns]) for _ in range(500)]
    assert estimate.ci95 == pytest.approx(tuple(np.percentile(drawn, [2.5, 97.5])), abs=0.15 * np.ptp(drawn))


def test_strata_are_not_mixed() -> None:
    # A plain bootstrap over all eight runs would give an interval; within an environment nothing varies.
    constant = [np.full(4, 0.0), np.full(4, 1.0)]
    for statistic in statistics.AGGREGATES:
        estimate = statistics.aggregate_runs(constant, statistic)
        assert estimate.ci95 == (estimate.value, estimate.value) == (0.5, 0.5)


def test_environments_count_equally_and_by_hand() -> None:
    # Means of the environments 0.2, 0.5, 2; pooled 0, 0.2, 0.4, 0.5, 1, 3 without floor(6 / 4) at each end.
    constants = [[0.0, 0.2, 0.4], [0.5], [3.0, 1.0]]
    values = {item: statistics.aggregate_runs(constants, item).value for item in statistics.AGGREGATES}
    assert values == pytest.approx(
        {"mean": 0.9, "median": 0.5, "iqm": 2.1 / 4, "optimality_gap": 1 - (0.6 + 0.5 + 2) / 6}
    )
    assert statistics.aggregate_runs(constants, "mean").ci95 is None, "one environment has a single run"


def test_improvement_is_averaged_over_environments() -> None:
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(6)
    a, b = random.integers(0, 6, (5, 3)).astype(float), random.integers(0, 6, (4, 3)).astype(float)
    wins = [stats.mannwhitneyu(x, y).statistic / 20 for x, y in zip(a.T, b.T, strict=True)]
    estimate = statistics.stratified_improvement(strata(a), strata(b))
    assert estimate.value == pytest.approx(np.mean(wins))
    assert estimate.ci95 is not None
    assert estimate.ci95[0] < estimate.value < estimate.ci95[1]
    same = statistics.stratified_improvement(strata(a), strata(a))
    assert same.value == 0.5


def test_a_profile_is_the_share_of_runs_above() -> None:
    random = np.random.default_rng(8)
    scores = random.normal(0.5, 0.3, (6, 4))
    taus = np.linspace(-0.2, 1.2, 15)
    profile = statistics.performance_profile(strata(scores), taus, seed=2)
    np.testing.assert_allclose(profile.share, [np.mean(scores > tau) for tau in taus])
    drawn = []
    for _ in range(3000):
        sample = scores[random.integers(6, size=(6, 4)), np.arange(4)]
        drawn.append([np.mean(sample > tau) for tau in taus])
    assert profile.low is not None
    assert profile.high is not None
    np.testing.assert_allclose(
        [profile.low, profile.high], np.percentile(drawn, [2.5, 97.5], axis=0), atol=1.01 / 24
    )
    assert statistics.performance_profile([[1.0]], [1.0, 0.0]).document() == {
        "share": [0.0, 1.0],
        "low": None,
        "high": None,
    }


# --- the formulas of Agarwal et al. 2021, written out without numpy ------------------------------------

Runs = list[list[float]]


def slow_mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def slow_aggregates(runs: Runs) -> dict[str, float]:
    """Return the aggregates of section 4.3 for lists of scores, one list per environment."""
    means = sorted(map(slow_mean, runs))
    pooled = sorted(score for run in runs for score in run)
    middle = len(means) // 2
    cut = int(0.25 * len(pooled))
    return {
        "mean": slow_mean(means),
        "median": means[middle] if len(means) % 2 else (means[middle - 1] + means[middle]) / 2,
        "iqm": slow_mean(pooled[cut : len(pooled) - cut]),
        "optimality_gap": 1 - slow_mean([min(score, 1.0) for score in pooled]),
    }


def slow_improvement(a: Runs, b: Runs) -> float:
    """Return the mean over environments of the share of pairs won, ties counting half."""
    shares = []
    for first, second in zip(a, b, strict=True):
        won = [1.0 if x > y else 0.5 if x == y else 0.0 for x, y in product(first, second)]
        shares.append(slow_mean(won))
    return slow_mean(shares)


def random_runs(random: Random, *, environments: int, few: bool, ties: bool) -> Runs:
    """Return scores of unequal numbers of runs, negative ones and ones above 1 too."""
    counts = [1 if few else random.randint(2, 9) for _ in range(environments)]
    scores = [[random.gauss(0.6, 0.5) for _ in range(count)] for count in counts]
    return [[round(score, 1) for score in environment] for environment in scores] if ties else scores


@pytest.mark.parametrize("number", range(20))
def test_the_formulas_of_the_paper(number: int) -> None:
    """Data sets with unequal numbers of runs, ties, single runs and a single environment."""
    random = Random(number)
    shape = {"environments": 1 if number % 5 == 0 else random.randint(2, 6), "few": number % 4 == 3}
    a, b = (random_runs(random, ties=number % 2 == 0, **shape) for _ in range(2))
    for statistic, expected in slow_aggregates(a).items():
        estimate = statistics.aggregate_runs(a, statistic, resamples=400, seed=number)
        assert estimate.value == pytest.approx(expected, abs=1e-12)
        assert (estimate.ci95 is None) == (min(map(len, a)) < 2)
        if estimate.ci95 is not None:
            drawn = [
                slow_aggregates([random.choices(scores, k=len(scores)) for scores in a])[statistic]
                for _ in range(400)
            ]
            ends = tuple(np.percentile(drawn, [2.5, 97.5]))
            assert estimate.ci95 == pytest.approx(ends, abs=0.3 * np.ptp(drawn) + 1e-12)
    assert statistics.stratified_improvement(a, b, resamples=50).value == pytest.approx(
        slow_improvement(a, b), abs=1e-12
    )
    difference = slow_aggregates(a)["mean"] - slow_aggregates(b)["mean"]
    assert statistics.stratified_difference(a, b, resamples=50).value == pytest.approx(difference, abs=1e-12)
    taus = [-0.5, 0.0, 0.3, 0.6, 1.2]
    pooled = [score for scores in a for score in scores]
    shares = [sum(score > tau for score in pooled) / len(pooled) for tau in taus]
    assert statistics.performance_profile(a, taus, resamples=50).share.tolist() == pytest.approx(shares)


def test_a_nan_is_neither_cut_off_nor_a_win() -> None:
    """NaN is sorted to the end: the IQM would drop it, and ranks would count it as the highest score."""
    broken = [0.1, 0.2, 0.3, math.nan]
    assert math.isnan(statistics.iqm(broken))
    summary = statistics.summarize(broken)
    assert all(math.isnan(getattr(summary, name)) for name in ("mean", "median", "iqm", "min", "max", "std"))
    for statistic in statistics.AGGREGATES:
        assert math.isnan(statistics.aggregate_runs([broken, [0.5, 0.6]], statistic).value)
    for sides in ((broken, [0.0, 0.1]), ([0.0, 0.1], broken)):
        assert math.isnan(probability_of_improvement(*sides).value)
        assert math.isnan(difference_of_means(*sides).value)
    profile = statistics.performance_profile([broken], [0.0, 0.5])
    assert np.isnan(profile.share).all()
    assert profile.low is profile.high is None


def test_an_infinite_score_is_cut_off_by_the_iqm_alone() -> None:
    assert statistics.iqm([1.0, 2.0, 3.0, math.inf]) == 2.5
    assert statistics.aggregate_runs([[1.0, 2.0, 3.0, -math.inf]], "mean").value == -math.inf
    assert probability_of_improvement([math.inf, 0.0], [-math.inf, 0.0]).value == pytest.approx(3.5 / 4)
    both = statistics.summarize([math.inf, -math.inf, 1.0])
    assert math.isnan(both.mean)
    assert (both.min, both.max, both.median) == (-math.inf, math.inf, 1.0)


@pytest.mark.parametrize("scores", [[], np.zeros((2, 2))])
def test_no_runs_are_refused(scores: list[float]) -> None:
    with pytest.raises(UsageError):
        estimate_over_runs(scores, "mean")
