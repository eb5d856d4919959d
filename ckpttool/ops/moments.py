"""Count, extremes, mean and spread of numbers, found in pieces and added up."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool import documents

if TYPE_CHECKING:
    import numpy as np

_PIECE = 1 << 18
BINS = 16


@dataclass(frozen=True, slots=True)
class Moments:
    """What is known of `size` numbers; complex ones count by their magnitudes.

    `low`, `high`, `mean`, `std` (of the population) and `norm` (Euclidean) are those of the finite ones, NaN
    where there is none. `zeros`, `nans` and `infs` are counts.
    """

    size: int = 0
    low: float = math.inf
    high: float = -math.inf
    mean: float = 0.0
    spread: float = 0.0
    zeros: int = 0
    nans: int = 0
    infs: int = 0

    @property
    def finite(self) -> int:
        """How many are numbers."""
        return self.size - self.nans - self.infs

    @property
    def std(self) -> float:
        """The standard deviation of the population."""
        return math.sqrt(self.spread / self.finite) if self.finite else math.nan

    @property
    def norm(self) -> float:
        """The Euclidean norm."""
        return math.sqrt(self.spread + self.finite * self.mean**2)

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of both together (Chan, Golub and LeVeque 1979, for mean and spread)."""
        finite = self.finite + other.finite
        delta = other.mean - self.mean
        share = other.finite / finite if finite else 0.0
        return Moments(
            self.size + other.size,
            min(self.low, other.low),
            max(self.high, other.high),
            self.mean + delta * share,
            self.spread + other.spread + delta * delta * self.finite * share,
            self.zeros + other.zeros,
            self.nans + other.nans,
            self.infs + other.infs,
        )

    def document(self) -> dict[str, Any]:
        """Return the JSON values; null where no number is finite."""
        known = self.finite > 0
        values = (self.low, self.high, self.mean, self.std, self.norm)
        names = ("min", "max", "mean", "std", "norm")
        found: dict[str, Any] = documents.plain(
            {
                "elements": self.size,
                **{name: value if known else None for name, value in zip(names, values, strict=True)},
                "zeros": self.zeros,
                "nans": self.nans,
                "infs": self.infs,
            }
        )
        return found


def of(array: np.ndarray) -> Moments:
    """Return the moments of an array of numbers or truth values, in float64."""
    return sum(map(_piece, _pieces(array)), Moments())


def histogram(array: np.ndarray, found: Moments) -> tuple[int, ...]:
    """Return how many finite numbers lie in each of BINS equal parts from the lowest to the highest."""
    import numpy as np

    if not found.finite or found.low == found.high or not math.isfinite(found.high - found.low):
        return ()
    counts = np.zeros(BINS, np.int64)
    for piece in _pieces(array):
        counts += np.histogram(piece[np.isfinite(piece)], BINS, (found.low, found.high))[0]
    return tuple(int(count) for count in counts)


def _pieces(array: np.ndarray) -> Iterable[np.ndarray]:
    import numpy as np

    flat = array.reshape(-1)
    for start in range(0, flat.size, _PIECE):
        piece = flat[start : start + _PIECE]
        yield np.abs(piece) if piece.dtype.kind == "c" else piece.astype(np.float64)


def _piece(piece: np.ndarray) -> Moments:
    import numpy as np

    numbers = piece[np.isfinite(piece)]
    nans = int(np.isnan(piece).sum())
    infs = piece.size - numbers.size - nans
    if not numbers.size:
        return Moments(piece.size, nans=nans, infs=infs)
    with np.errstate(over="ignore"):
        mean = float(numbers.mean())
        spread = float(np.square(numbers - mean).sum())
    zeros = piece.size - int(np.count_nonzero(piece))
    return Moments(piece.size, float(numbers.min()), float(numbers.max()), mean, spread, zeros, nans, infs)
