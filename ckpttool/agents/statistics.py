"""What the returns of independent episodes say: location, spread, and how sure the mean is."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ckpttool.errors import UsageError

Values = Sequence[float] | np.ndarray

RESAMPLES = 10_000
# Resampled values held at a time: 16 MiB of indices and values.
CHUNK = 1 << 20
# Of so few values the draws are kept, at most 20 MiB: every checkpoint of a run is resampled alike.
KEPT = 256


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of n values; what a single value cannot have is None."""

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
    """A number and its 95 % bootstrap interval; None where there is too little to resample."""

    value: float
    ci95: tuple[float, float] | None

    def document(self) -> dict[str, object]:
        """Return the JSON object."""
        return {"value": self.value, "ci95": None if self.ci95 is None else list(self.ci95)}


def summarise(values: Values, *, seed: int = 0) -> Summary:
    """Return every statistic of the values; `seed` is that of the bootstrap."""
    return Summary(
        n=len(values),
        mean=mean(values),
        std=std(values),
        median=median(values),
        iqm=iqm(values),
        min=float(_sorted(values)[0]),
        max=float(_sorted(values)[-1]),
        ci95=mean_interval(values, seed=seed),
    )


def mean(values: Values) -> float:
    """Return the arithmetic mean."""
    return float(_sorted(values).mean())


def std(values: Values) -> float | None:
    """Return the sample's standard deviation (n - 1 in the denominator); None for one value."""
    return float(_sorted(values).std(ddof=1)) if len(values) > 1 else None


def median(values: Values) -> float:
    """Return the middle value, or the mean of the two middle ones."""
    return float(np.median(_sorted(values)))


def iqm(values: Values) -> float:
    """Return the interquartile mean: drop floor(n / 4) values at each end, average the rest.

    This is scipy.stats.trim_mean(values, 0.25), which rliable uses: whole values, no fractional weights.
    """
    ordered = _sorted(values)
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def mean_interval(
    values: Values, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float] | None:
    """Return the percentile bootstrap interval of the mean; None for one value.

    The same values in any order, with the same seed, give the same interval.
    """
    ordered = _sorted(values)
    if len(ordered) < 2:
        return None
    return percentiles(resampled_means(ordered, resamples, seed), level)


def resampled_means(values: np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """Return the means of resamples of float64 [n]: float64 [resamples]."""
    n = len(values)
    if n <= KEPT and np.isfinite(values).all():
        means: np.ndarray = _times_drawn(n, resamples, seed) @ values / n
        return means
    return np.concatenate([values[drawn].mean(axis=1) for drawn in _draws(n, resamples, seed)])


@functools.lru_cache(maxsize=2)
def _times_drawn(n: int, resamples: int, seed: int) -> np.ndarray:
    """Return how often each resample has each of n values: float64 [resamples, n]."""
    found = [
        np.bincount((drawn + n * np.arange(len(drawn))[:, None]).ravel(), minlength=drawn.size)
        for drawn in _draws(n, resamples, seed)
    ]
    return np.concatenate(found).reshape(resamples, n).astype(np.float64)


def _draws(n: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the places that each resample takes its values from: int64 [some, n]."""
    random = np.random.default_rng(seed)
    for size in portions(n, resamples):
        yield random.integers(n, size=(size, n))


def paired_interval(
    a: Values, b: Values, seed: int = 0, *, level: float = 0.95, resamples: int = RESAMPLES
) -> Estimate:
    """Return how much larger the mean of `a` is, a[i] and b[i] being episodes of one seed.

    Pairs are resampled, so that what both sides owe to the seed leaves the interval. Raise UsageError
    unless both have the same number of values.
    """
    if len(a) != len(b):
        raise UsageError(
            "a paired difference needs the same episodes on both sides",
            expected=str(len(a)),
            found=str(len(b)),
        )
    differences = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    interval = mean_interval(differences, level=level, resamples=resamples, seed=seed)
    return Estimate(mean(differences), interval)


def portions(values: int, resamples: int) -> list[int]:
    """Return how many resamples of that many values to hold at a time."""
    rows = max(1, CHUNK // values)
    return [min(rows, resamples - done) for done in range(0, resamples, rows)]


def percentiles(resampled: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Return the percentile interval of a statistic's values over resamples."""
    tail = 50.0 * (1.0 - level)
    low, high = np.percentile(resampled, [tail, 100.0 - tail])
    return float(low), float(high)


def _sorted(values: Values) -> np.ndarray:
    """Return the values as ordered float64: a sum in one order does not depend on that of the episodes."""
    array = np.sort(np.asarray(values, np.float64))
    if array.ndim != 1 or not array.size:
        raise UsageError("statistics need at least one value")
    return array
