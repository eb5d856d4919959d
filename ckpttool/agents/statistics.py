"""What the returns of independent episodes say: location, spread, and how sure the mean is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckpttool.errors import UsageError

Values = Sequence[float] | np.ndarray

RESAMPLES = 10_000
# Resampled values held at a time: 16 MiB of indices and values.
CHUNK = 1 << 20


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
    random = np.random.default_rng(seed)
    n, rows = len(ordered), max(1, CHUNK // len(ordered))
    sizes = [min(rows, resamples - done) for done in range(0, resamples, rows)]
    means = np.concatenate([ordered[random.integers(n, size=(size, n))].mean(axis=1) for size in sizes])
    tail = 50.0 * (1.0 - level)
    low, high = np.percentile(means, [tail, 100.0 - tail])
    return float(low), float(high)


def _sorted(values: Values) -> np.ndarray:
    """Return the values as ordered float64: a sum in one order does not depend on that of the episodes."""
    array = np.sort(np.asarray(values, np.float64))
    if array.ndim != 1 or not array.size:
        raise UsageError("statistics need at least one value")
    return array
