"""Count, extremes, mean and spread of numbers, computed in pieces and combined."""

from __future__ import annotations

import math
from typing import Any

from ckpttool.core import text
from ckpttool.core.deferred import dataclass
from ckpttool.core.dtypes import np
from ckpttool.verification.array_differences import Values, iter_values

BINS = 16
# Magnitudes from which sums of numbers may overflow; squares below its inverse lose digits.
_LARGE = 1e280


@dataclass(frozen=True, slots=True)
class Moments:
    """Statistics of `size` numbers; complex ones count by magnitude.

    `low`, `high`, `mean`, `std` (of the population) and `norm` (Euclidean) cover the finite numbers,
    NaN without any. `deviation` is the norm of the differences from the mean, `zeros`, `nans` and `infs` are
    counts.
    """

    size: int = 0
    low: float = math.inf
    high: float = -math.inf
    mean: float = 0.0
    deviation: float = 0.0
    zeros: int = 0
    nans: int = 0
    infs: int = 0

    @property
    def finite(self) -> int:
        """The number of values that are neither NaN nor infinite."""
        return self.size - self.nans - self.infs

    @property
    def std(self) -> float:
        """The standard deviation of the population."""
        return self.deviation / math.sqrt(self.finite) if self.finite else math.nan

    @property
    def norm(self) -> float:
        """The Euclidean norm."""
        return math.hypot(self.deviation, math.sqrt(self.finite) * self.mean)

    def __add__(self, other: Moments) -> Moments:
        """Return the combined moments (Chan, Golub and LeVeque 1979, for mean and deviation)."""
        finite = self.finite + other.finite
        delta = other.mean - self.mean
        share = other.finite / finite if finite else 0.0
        return Moments(
            self.size + other.size,
            min(self.low, other.low),
            max(self.high, other.high),
            self.mean + delta * share,
            math.hypot(self.deviation, other.deviation, delta * math.sqrt(self.finite * share)),
            self.zeros + other.zeros,
            self.nans + other.nans,
            self.infs + other.infs,
        )

    def document(self) -> dict[str, Any]:
        """Return the JSON values; null where there are no finite numbers."""
        known = self.finite > 0
        values = (self.low, self.high, self.mean, self.std, self.norm)
        names = ("min", "max", "mean", "std", "norm")
        document: dict[str, Any] = text.replace_nonfinite(
            {
                "elements": self.size,
                **{name: value if known else None for name, value in zip(names, values, strict=True)},
                "zeros": self.zeros,
                "nans": self.nans,
                "infs": self.infs,
            }
        )
        return document


def compute_moments(array: Values) -> Moments:
    """Return the float64 moments of an array of numbers or booleans."""
    pieces = map(_piece_moments, iter_values(array))
    return sum(pieces, next(pieces, Moments()))


def histogram(array: Values, moments: Moments) -> tuple[int, ...]:
    """Return the count of finite numbers in each of BINS equal intervals between the extremes.

    An interval contains its lower end, the last one both (numpy/lib/_histograms_impl.py).
    """
    if not moments.finite or moments.low == moments.high or not math.isfinite(moments.high - moments.low):
        return ()
    edges = np.linspace(moments.low, moments.high, BINS + 1)
    above = np.zeros(BINS + 1, np.int64)  # numbers from each edge up, none above the last
    for piece in iter_values(array):
        numbers = piece if piece.dtype.char in "fd" else _to_real(piece)
        if moments.finite < moments.size:
            numbers = numbers[np.isfinite(numbers)]
        above[0] += numbers.size
        for at in range(1, BINS):
            above[at] += np.count_nonzero(numbers >= _round_up(edges[at], numbers.dtype))
    return tuple(int(count) for count in above[:-1] - above[1:])


def is_finite(piece: np.ndarray) -> bool:
    """Return whether all elements are numbers, neither NaN nor infinite."""
    return piece.dtype.kind in "iub" or bool(np.isfinite(piece).all())


def _round_up(edge: np.float64, dtype: np.dtype) -> Any:
    """Return the smallest number of the type that is not below the edge."""
    rounded = dtype.type(edge)
    return rounded if rounded >= edge else np.nextafter(rounded, dtype.type(np.inf))


def _to_real(piece: np.ndarray) -> np.ndarray:
    """Return a float64 copy, of complex numbers their magnitudes."""
    return np.abs(piece) if piece.dtype.kind == "c" else piece.astype(np.float64)


def _piece_moments(piece: np.ndarray) -> Moments:
    # The methods of arrays call these functions through Python, which takes longer than a layer of an agent.
    numbers = whole = _to_real(piece)
    nans = 0
    low, high = float(np.minimum.reduce(whole)), float(np.maximum.reduce(whole))
    if not (math.isfinite(low) and math.isfinite(high)):
        numbers, nans = whole[np.isfinite(whole)], int(np.isnan(whole).sum())
        if not numbers.size:
            return Moments(whole.size, nans=nans, infs=whole.size - nans)
        low, high = float(numbers.min()), float(numbers.max())
    infs = whole.size - numbers.size - nans
    zeros = piece.size - int(np.count_nonzero(piece != 0))
    # The sum of numbers near the largest float64 is infinite, that of their parts is not.
    large = max(-low, high) > _LARGE
    mean = np.add.reduce(numbers / numbers.size) if large else np.add.reduce(numbers) / numbers.size
    mean = float(mean) + 0.0  # which is not negative zero
    return Moments(piece.size, low, high, mean, euclidean_norm(numbers - mean), zeros, nans, infs)


def euclidean_norm(numbers: np.ndarray) -> float:
    """Return the norm of float64 numbers, also if their squares are above or below what float64 holds."""
    with np.errstate(over="ignore", invalid="ignore"):
        # np.dot would start the threads of BLAS, whose number decides how it rounds.
        total = float(np.add.reduce(np.square(numbers)))
    if 1 / _LARGE < total < math.inf:
        return math.sqrt(total)
    largest = float(np.abs(numbers).max(initial=0.0))
    if not 0 < largest < math.inf:
        return largest
    scaled = numbers / largest
    return largest * math.sqrt(float(np.square(scaled).sum()))
