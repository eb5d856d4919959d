"""How far two arrays of one shape lie apart: counts, the largest distances, and where."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool import documents
from ckpttool.leaf import Leaf
from ckpttool.source import Shape, as_array

if TYPE_CHECKING:
    import numpy as np

# Elements that are looked at together: their float64 copies fit a cache.
_PIECE = 1 << 18
_INTEGERS = "iu"


@dataclass(frozen=True, slots=True)
class ArrayDifference:
    """What differs between two arrays of `size` elements.

    `different` elements are not the same: other values, other bits of one type (the sign of a zero), or NaN
    in one alone; `nans` counts the latter. `max_abs` is the largest |a - b|, found at index `at`, where they
    have `left` and `right`; `max_rel` the largest |a - b| / max(|a|, |b|); infinite where only one is.
    `cosine` is that of the angle between the finite parts, None where one is zero throughout or none is a
    number.
    """

    size: int
    different: int
    nans: int
    max_abs: float
    max_rel: float
    cosine: float | None
    at: Shape
    left: Any
    right: Any

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        found: dict[str, Any] = documents.plain(
            {
                "elements": self.size,
                "different": self.different,
                "nans": self.nans,
                "max_abs": self.max_abs,
                "max_rel": self.max_rel,
                "cosine": self.cosine,
                "at": list(self.at),
                "left": self.left,
                "right": self.right,
            }
        )
        return found


def compared(left: Leaf, right: Leaf) -> ArrayDifference | None:
    """Read two leaves of one shape; return None if all elements are the same, NaN and NaN included."""
    if "string" in (left.dtype, right.dtype):
        return _strings(left, right)
    first, second = left.read(), right.read()
    if left.dtype == right.dtype and memoryview(first) == memoryview(second):
        return None
    return arrays(as_array(first, left.dtype, left.shape), as_array(second, right.dtype, right.shape))


def arrays(left: np.ndarray, right: np.ndarray) -> ArrayDifference | None:
    """Compare two arrays of one shape, whatever their types; return None if all elements are the same."""
    import numpy as np

    a, b = left.reshape(-1), right.reshape(-1)
    found = _Running()
    for start in range(0, a.size, _PIECE):
        found.take(a[start : start + _PIECE], b[start : start + _PIECE], start)
    if not found.different:
        return None
    at = tuple(int(step) for step in np.unravel_index(found.place, left.shape))
    return ArrayDifference(
        a.size,
        found.different,
        found.nans,
        found.max_abs,
        found.max_rel,
        found.cosine(),
        at,
        _number(left[at]),
        _number(right[at]),
    )


class _Running:
    """The sums and maxima of the pieces seen so far."""

    def __init__(self) -> None:
        self.different = self.nans = self.place = 0
        self.max_abs = self.max_rel = 0.0
        self._seen = False
        self._dot = self._left = self._right = 0.0

    def take(self, a: np.ndarray, b: np.ndarray, start: int) -> None:
        """Add a piece that begins at element `start`."""
        import numpy as np

        x, y = _wide(a), _wide(b)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            other = _unlike(a, b, x, y)
            finite = np.isfinite(x) & np.isfinite(y)
            self._angle(np.where(finite, x, 0), np.where(finite, y, 0))
            if not other.any():
                return
            self.different += int(other.sum())
            lost = np.isnan(x) != np.isnan(y)
            self.nans += int(lost.sum())
            distance = np.where(lost, math.inf, np.where(other, _distance(a, b, x, y), 0.0))
            scale = np.maximum(np.abs(x), np.abs(y))
            relative = np.where(
                distance > 0, np.where(np.isfinite(distance), distance / scale, math.inf), 0.0
            )
        here = int(distance.argmax()) if distance.max() > 0 else int(other.argmax())
        if not self._seen or distance[here] > self.max_abs:
            self.max_abs, self.place, self._seen = float(distance[here]), start + here, True
        self.max_rel = max(self.max_rel, float(relative.max()))

    def _angle(self, x: np.ndarray, y: np.ndarray) -> None:
        import numpy as np

        self._dot += float(np.vdot(x, y).real)
        self._left += float(np.vdot(x, x).real)
        self._right += float(np.vdot(y, y).real)

    def cosine(self) -> float | None:
        """Return the cosine of the angle between what is finite of both."""
        length = math.sqrt(self._left) * math.sqrt(self._right)
        return min(1.0, max(-1.0, self._dot / length)) if math.isfinite(length) and length > 0 else None


def _wide(array: np.ndarray) -> np.ndarray:
    import numpy as np

    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _unlike(a: np.ndarray, b: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return where the elements are not the same; of one type their bits count, NaN apart."""
    import numpy as np

    if a.dtype == b.dtype and a.dtype.itemsize in (1, 2, 4, 8):
        bits = np.dtype(f"u{a.dtype.itemsize}")
        other = a.view(bits) != b.view(bits)
    else:
        other = x != y
    unlike: np.ndarray = np.logical_and(other, ~(np.isnan(x) & np.isnan(y)))
    return unlike


def _distance(a: np.ndarray, b: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return |a - b|; of integers of one type without the rounding that 64 bits would meet."""
    import numpy as np

    # Equal infinities differ by nothing.
    apart: np.ndarray = np.where(x == y, 0.0, np.abs(x - y))
    if a.dtype == b.dtype and a.dtype.kind in _INTEGERS and a.dtype.itemsize == 8:
        large, small = np.maximum(a, b), np.minimum(a, b)
        apart = np.subtract(large.view(np.uint64), small.view(np.uint64)).astype(np.float64)
    return apart


def _strings(left: Leaf, right: Leaf) -> ArrayDifference | None:
    if left.dtype != right.dtype:
        return None
    import numpy as np

    first, second = left.strings(), right.strings()
    unlike = [at for at, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if not unlike:
        return None
    at = tuple(int(step) for step in np.unravel_index(unlike[0], left.shape))
    shown = [each[unlike[0]].decode("utf-8", "backslashreplace") for each in (first, second)]
    return ArrayDifference(len(first), len(unlike), 0, math.inf, math.inf, None, at, *shown)


def _number(value: Any) -> Any:
    """Return an element as JSON can hold it; what is no real number as text."""
    kind = value.dtype.kind
    if kind == "b":
        return bool(value)
    if kind in "iu":
        return int(value)
    return str(complex(value)) if kind == "c" else float(value)
