"""Differences between two arrays of one shape: counts, the largest ones, and where."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any, TypeAlias

from ckpttool.core import text
from ckpttool.core.atomic_write import keep_freed_memory
from ckpttool.core.deferred import dataclass
from ckpttool.core.dtypes import np
from ckpttool.core.errors import UnsupportedError
from ckpttool.core.source import PIECE_ELEMENTS, Shape, StreamedArray
from ckpttool.core.tree import Leaf

_INTEGERS = "iu"
Values: TypeAlias = "np.ndarray | StreamedArray"


@dataclass(frozen=True, slots=True)
class ArrayDifference:
    """Differences between two arrays of `size` elements.

    `different` elements differ in value, in bits of one type (the sign of a zero), or are NaN in one
    array only; `nans` counts the latter. `max_abs` is the largest |a - b|, at index `at` with values
    `left` and `right`; `max_rel` the largest |a - b| / max(|a|, |b|); infinite if only one is.
    `cosine` is that of the angle between the finite parts, None if one is all zeros or has no number.
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
        document: dict[str, Any] = text.replace_nonfinite(
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
        return document


def compare_leaves(left: Leaf, right: Leaf) -> ArrayDifference | None:
    """Read two leaves of equal shape; return None if all elements are equal (NaN equals NaN)."""
    if "string" in (left.dtype, right.dtype):
        return _compare_strings(left, right)
    first, second = left.values(), right.values()
    if left.dtype == right.dtype and all(map(_same_bytes, iter_values(first), iter_values(second))):
        return None
    return compare_arrays(first, second)


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint8), b.view(np.uint8))


def compare_arrays(left: Values, right: Values) -> ArrayDifference | None:
    """Compare two arrays of equal shape and any type; return None if all elements are equal."""
    sums, start = _DifferenceSums(), 0
    for a, b in zip(iter_values(left), iter_values(right), strict=True):
        sums.take(a, b, start)
        start += a.size
    if not sums.different:
        return None
    at = tuple(int(step) for step in np.unravel_index(sums.index, left.shape))
    return ArrayDifference(
        left.size,
        sums.different,
        sums.nans,
        sums.max_abs,
        sums.max_rel,
        sums.cosine(),
        at,
        *sums.values,
    )


class _DifferenceSums:
    """Sums and maxima of the pieces processed so far."""

    def __init__(self) -> None:
        self.different = self.nans = self.index = 0
        self.max_abs = self.max_rel = 0.0
        self.values: tuple[Any, Any] = (None, None)
        self._count = False
        self._dot = self._left = self._right = 0.0

    def take(self, a: np.ndarray, b: np.ndarray, start: int) -> None:
        """Add a piece that starts at element `start`."""
        x, y = _to_float64(a), _to_float64(b)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            other = _unequal_elements(a, b, x, y)
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
        if not self._count or distance[here] > self.max_abs:
            self.max_abs, self.index, self._count = float(distance[here]), start + here, True
            self.values = _json_number(a[here]), _json_number(b[here])
        self.max_rel = max(self.max_rel, float(relative.max()))

    def _angle(self, x: np.ndarray, y: np.ndarray) -> None:
        self._dot += float(np.vdot(x, y).real)
        self._left += float(np.vdot(x, x).real)
        self._right += float(np.vdot(y, y).real)

    def cosine(self) -> float | None:
        """Return the cosine of the angle between the finite parts of both."""
        length = math.sqrt(self._left) * math.sqrt(self._right)
        return min(1.0, max(-1.0, self._dot / length)) if math.isfinite(length) and length > 0 else None


def _to_float64(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _unequal_elements(a: np.ndarray, b: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return where elements differ; within one type bits are compared, except for NaN."""
    if a.dtype == b.dtype and a.dtype.itemsize in (1, 2, 4, 8):
        bits = np.dtype(f"u{a.dtype.itemsize}")
        other = a.view(bits) != b.view(bits)
    else:
        other = x != y
    unlike: np.ndarray = np.logical_and(other, ~(np.isnan(x) & np.isnan(y)))
    return unlike


def _distance(a: np.ndarray, b: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return |a - b|; exact for integers of one type, even with 64 bits."""
    # Equal infinities have no difference.
    apart: np.ndarray = np.where(x == y, 0.0, np.abs(x - y))
    if a.dtype == b.dtype and a.dtype.kind in _INTEGERS and a.dtype.itemsize == 8:
        large, small = np.maximum(a, b), np.minimum(a, b)
        apart = np.subtract(large.view(np.uint64), small.view(np.uint64)).astype(np.float64)
    return apart


def _compare_strings(left: Leaf, right: Leaf) -> ArrayDifference | None:
    if left.dtype != right.dtype:
        return None
    first, second = left.strings(), right.strings()
    unlike = [at for at, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if not unlike:
        return None
    at = tuple(int(step) for step in np.unravel_index(unlike[0], left.shape))
    shown = [array[unlike[0]].decode("utf-8", "backslashreplace") for array in (first, second)]
    return ArrayDifference(len(first), len(unlike), 0, math.inf, math.inf, None, at, *shown)


def round_to_float32(value: float) -> float:
    """Return the number rounded to float32; unchanged if out of its range."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return float(value)


def _json_number(value: Any) -> Any:
    """Return an element as JSON; as text unless it is a real number."""
    kind = value.dtype.kind
    if kind == "b":
        return bool(value)
    if kind in "iu":
        return int(value)
    return str(complex(value)) if kind == "c" else float(value)


def iter_values(array: Values) -> Iterator[np.ndarray]:
    """Yield the elements in C order: flat arrays of PIECE_ELEMENTS elements, the last with the rest."""
    if isinstance(array, StreamedArray):
        keep_freed_memory()  # of temporary arrays, which every piece would fetch from the system again
        yield from array
        return
    flat = array.reshape(-1)
    for start in range(0, flat.size, PIECE_ELEMENTS):
        yield flat[start : start + PIECE_ELEMENTS]


def read_values(leaf: Leaf) -> Values | None:
    """Return the values of a tensor; None for elements that NumPy has no type for, which are read, too."""
    try:
        return leaf.values()
    except UnsupportedError:
        leaf.read()
        return None
