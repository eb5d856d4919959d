"""Statistics of returns: laws for any values, and numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core import UsageError
from ckpttool.evaluation import statistics
from tests.golden_texts import Golden

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


def test_numbers_by_hand() -> None:
    # 8 values: two dropped at each end, 4, 5, 6, 7 remain; squares about the mean of 12 sum to 844.
    s = statistics.summarize([2, 3, 4, 5, 6, 7, 29, 40])
    assert (s.n, s.mean, s.median, s.iqm, s.min, s.max) == (8, 12, 5.5, 5.5, 2, 40)
    assert s.std == pytest.approx(math.sqrt((100 + 81 + 64 + 49 + 36 + 25 + 289 + 784) / 7))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([5], 5),
        ([1, 9], 5),
        ([0, 3, 9], 4),
        ([0, 3, 5, 90], 4),
        ([0, 3, 5, 7, 90], 5),
        ([0] * 3 + [1] * 4, 0.6),
    ],
)
def test_iqm_drops_a_quarter_rounded_down(values: list[float], expected: float) -> None:
    assert statistics.iqm(values) == pytest.approx(expected)


def test_one_value_has_no_spread() -> None:
    assert statistics.summarize([3.5]) == statistics.ReturnStatistics(1, 3.5, None, 3.5, 3.5, 3.5, 3.5, None)


@pytest.mark.parametrize("values", [[], np.zeros((2, 2))])
def test_no_values_are_refused(values: list[float], golden: Golden) -> None:
    with pytest.raises(UsageError) as caught:
        statistics.summarize(values)
    golden(caught.value)


def test_the_interval_is_that_of_the_normal_law_for_many_values() -> None:
    values = np.random.default_rng(1).normal(10, 2, 2000)
    low, high = statistics.mean_interval(values) or (0, 0)
    half = 1.96 * values.std(ddof=1) / math.sqrt(2000)
    assert low == pytest.approx(values.mean() - half, abs=0.05 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.05 * half)


@pytest.mark.parametrize("n", [2, 3, 10, 50, 256, 300])
def test_scipy_computes_the_same_statistics(n: int) -> None:
    stats = pytest.importorskip("scipy.stats", exc_type=ImportError)
    values = np.sort(np.random.default_rng(n).normal(-150, 40, n))
    summary = statistics.summarize(values)
    assert summary.iqm == pytest.approx(stats.trim_mean(values, 0.25))
    assert summary.std == pytest.approx(stats.tstd(values))
    expected = stats.bootstrap(
        (values,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(0), batch=1000
    ).confidence_interval
    assert summary.ci95 == pytest.approx((expected.low, expected.high), rel=1e-12)


def test_two_values_give_the_quarters() -> None:
    # Means of resamples of {0, 1} are 0, 1/2, 1 with chances 1/4, 1/2, 1/4.
    assert statistics.mean_interval([0, 1]) == (0, 1)
    assert statistics.mean_interval([0, 1], level=0.4) == (0.5, 0.5)


def test_chunks_do_not_change_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(50.0) ** 2
    whole = statistics.mean_interval(values)
    monkeypatch.setattr(statistics, "CHUNK", 333)
    assert statistics.mean_interval(values) == whole


@given(VALUES, st.randoms(use_true_random=False))
def test_order_does_not_matter(values: list[float], random: object) -> None:
    mixed = list(values)
    random.shuffle(mixed)
    assert statistics.summarize(mixed) == statistics.summarize(values)


@given(VALUES)
def test_everything_lies_between_the_extremes(values: list[float]) -> None:
    s = statistics.summarize(values)
    slack = 1e-9 * max(1, abs(s.min), abs(s.max))
    for value in (s.mean, s.median, s.iqm, *(s.ci95 or ())):
        assert s.min - slack <= value <= s.max + slack
    if s.ci95:
        assert s.ci95[0] <= s.ci95[1]


@given(VALUES, st.floats(-100, 100), st.floats(0.1, 10))
def test_shift_and_scale(values: list[float], shift: float, scale: float) -> None:
    before = statistics.summarize(values)
    after = statistics.summarize([v * scale + shift for v in values])
    near = {"rel": 1e-6, "abs": 1e-6 * max(1, *map(abs, values))}
    for name in ("mean", "median", "iqm", "min", "max"):
        assert getattr(after, name) == pytest.approx(getattr(before, name) * scale + shift, **near)
    if before.std is not None and before.ci95 is not None:
        assert after.std == pytest.approx(before.std * scale, **near)
        assert after.ci95 == pytest.approx([v * scale + shift for v in before.ci95], **near)


@given(st.floats(-1e6, 1e6), st.integers(2, 30))
def test_equal_values_are_certain(value: float, n: int) -> None:
    s = statistics.summarize([value] * n)
    assert s.std == pytest.approx(0, abs=1e-9 * abs(value))
    assert s.ci95 == pytest.approx((value, value))


def slow_paired(a: list[float], b: list[float], seed: int, resamples: int) -> tuple[float, float]:
    """Resample pairs one at a time, as a textbook does."""
    random = np.random.default_rng(seed)
    differences = sorted(x - y for x, y in zip(a, b, strict=True))
    means = [
        np.mean([differences[i] for i in random.integers(len(a), size=len(a))]) for _ in range(resamples)
    ]
    return float(np.percentile(means, 2.5)), float(np.percentile(means, 97.5))


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=2, max_size=12))
def test_pairs_are_resampled_as_a_textbook_does(pairs: list[tuple[float, float]]) -> None:
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    interval = statistics.paired_interval(a, b, seed=3, resamples=40)
    assert interval.value == pytest.approx(np.mean(a) - np.mean(b), abs=1e-9)
    assert interval.ci95 == pytest.approx(slow_paired(a, b, 3, 40), abs=1e-9)


def test_pairing_removes_what_the_seed_does() -> None:
    # Both sides owe a deviation of 100 to the seed; the sides differ by 1 with a deviation of 0.1.
    random = np.random.default_rng(0)
    start = random.normal(0, 100, 50)
    interval = statistics.paired_interval(start + 1 + random.normal(0, 0.1, 50), start)
    assert interval.ci95 is not None
    assert interval.ci95[0] > 0.9
    assert interval.ci95[1] < 1.1


def test_swapped_sides_swap_the_sign() -> None:
    a, b = [1.0, 5.0, 2.0, 9.0], [0.5, 6.0, 2.0, 1.0]
    there, back = statistics.paired_interval(a, b), statistics.paired_interval(b, a)
    assert there.value == -back.value
    assert there.ci95 == pytest.approx((-back.ci95[1], -back.ci95[0]), abs=0.2)


def test_one_pair_has_no_interval() -> None:
    assert statistics.paired_interval([3], [1]) == statistics.Estimate(2, None)


def test_unequal_sides_are_refused(golden: Golden) -> None:
    with pytest.raises(UsageError) as caught:
        statistics.paired_interval([1, 2], [1])
    golden(caught.value)


@pytest.mark.parametrize(("level", "difference"), [(0.95, 0.5), (0.99, -0.3)])
def test_the_episodes_for_a_power_give_this_power(level: float, difference: float) -> None:
    """Repeat the experiment with the number of episodes that a long one names."""
    random = np.random.default_rng(5)
    pilot = random.normal(size=4000)
    pilot += difference - pilot.mean()
    means = statistics.resampled_means(pilot, 500)
    n = statistics.episodes_for_power(difference, means, len(pilot), level)
    assert n is not None
    intervals = [
        statistics.mean_interval(random.normal(difference, size=n), level=level, resamples=500)
        for _ in range(300)
    ]
    significant = [low > 0 or high < 0 for low, high in (item for item in intervals if item is not None)]
    assert np.mean(significant) == pytest.approx(0.8, abs=0.08)


@pytest.mark.parametrize(
    ("difference", "value", "expected"),
    [
        (0.0, 1.0, None),
        (math.nan, math.nan, None),
        (math.inf, math.inf, None),
        (1e-300, 1e9, None),
        (2.0, 2.0, 0),
    ],
)
def test_no_number_of_episodes_for_equal_or_undefined_means(
    difference: float, value: float, expected: int | None
) -> None:
    means = np.array([value, value if expected == 0 else value * 2])
    assert statistics.episodes_for_power(difference, means, 2, 0.95) == expected


@pytest.mark.parametrize("n", [2, 5, 12, 14, 40])
@pytest.mark.parametrize("shift", [0.0, -0.5, 0.5])
def test_sign_flips_agree_with_scipy(n: int, shift: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(n).normal(shift, size=n).round(1)
    exact = n <= statistics.EXACT_PAIRS
    expected = stats.permutation_test(
        (values,),
        np.mean,
        permutation_type="samples",
        alternative="less",
        n_resamples=np.inf if exact else 20_000,
        rng=np.random.default_rng(1),
        vectorized=True,
    ).pvalue
    # Hoeffding's bound lies above the probability, so that the smaller of the two is close to it.
    near = pytest.approx(expected, abs=1e-12 if exact else 0.015)
    assert statistics.sign_flip_probability(values) == near


@pytest.mark.parametrize("sizes", [(3, 4), (10, 10), (30, 12)])
@pytest.mark.parametrize("shift", [0.0, -1.0, 1.0])
def test_permutations_agree_with_scipy(sizes: tuple[int, int], shift: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(sizes)
    a, b = random.normal(shift, size=sizes[0]), random.normal(size=sizes[1])

    def difference(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
        return np.asarray(a.mean(axis=axis) - b.mean(axis=axis))

    expected = stats.permutation_test(
        (a, b), difference, alternative="less", n_resamples=20_000, rng=random, vectorized=True
    ).pvalue
    assert statistics.permutation_probability(a, b) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("pairs", [2, 5, 8, 20])
@pytest.mark.parametrize("tail", [0.025, 0.005])
def test_equal_checkpoints_are_seldom_different(pairs: int, tail: float) -> None:
    """The law that a percentile interval breaks: 7.7 % of five pairs at 2.5 %."""
    random = np.random.default_rng(3)
    probabilities = [statistics.sign_flip_probability(random.normal(size=pairs)) for _ in range(400)]
    share, error = np.mean(np.array(probabilities) <= tail), math.sqrt(tail * (1 - tail) / 400)
    assert share <= tail + 3 * error
    assert min(probabilities) >= 2.0**-pairs


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.0], 1.0),
        ([math.nan, -1.0], 1.0),
        ([-math.inf, -1.0, -1.0], 1 / 8),
        ([-math.inf, math.inf, -1.0], 4 / 8),
        ([1e308, -1e308], 3 / 4),
        ([-1e-320] * 4, 1 / 16),
        ([-0.1] * 9 + [0.0] * 4, 2.0**-9),
    ],
)
def test_extreme_differences_have_a_probability(values: list[float], expected: float) -> None:
    assert statistics.sign_flip_probability(values) == pytest.approx(expected)


def test_hundreds_of_comparisons_are_not_limited_by_the_number_of_resamples() -> None:
    assert statistics.sign_flip_probability([-1.0] * 60) < 1e-9
