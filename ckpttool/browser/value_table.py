"""Table of a tensor's values: its last two axes, for one index into all others, and values on demand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ckpttool.core.deferred import dataclass
from ckpttool.core.dtypes import np
from ckpttool.core.slices import slice_leaf
from ckpttool.core.source import LARGE, Inline, Span, StridedView
from ckpttool.core.text import clean, shorten
from ckpttool.core.tree import Leaf

if TYPE_CHECKING:
    from ckpttool.core.source import Shape
    from ckpttool.verification.moments import Moments


# Maximum widths by kind of value, and the minimum width; numbers are as wide as the largest needs.
_COMPLEX, _TEXT, _BOOL, _LEAST = 22, 24, 5, 4
# Significant digits, and the powers of ten between which numbers have no exponent.
_DIGITS, _SMALL, _LARGE = 5, -4, 5


@dataclass(frozen=True, slots=True)
class ValueGrid:
    """Table layout of an array of `shape`; an array with one axis has `wrap` elements per row."""

    shape: Shape
    wrap: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        if len(self.shape) < 2:
            return -(-self.shape[0] // self.wrap) if self.shape else 1
        return self.shape[-2]

    @property
    def columns(self) -> int:
        """Number of columns."""
        if len(self.shape) < 2:
            return min(self.wrap, self.shape[0]) if self.shape else 1
        return self.shape[-1]

    @property
    def slices(self) -> int:
        """Number of tables: the product of all axes before the last two."""
        return math.prod(self.shape[:-2])

    def leading(self, number: int) -> Shape:
        """Return the leading indices of table `number`, counted in C order."""
        indices = []
        for extent in reversed(self.shape[:-2]):
            number, at = divmod(number, extent)
            indices.append(at)
        return tuple(reversed(indices))

    def index(self, table: int, row: int, column: int) -> Shape | None:
        """Return the index of a cell; None past the end of the last row."""
        if not self.shape:
            return ()
        if len(self.shape) == 1:
            at = row * self.wrap + column
            return (at,) if at < self.shape[0] else None
        return (*self.leading(table), row, column)

    def cell(self, index: Sequence[int]) -> tuple[int, int, int]:
        """Return the table, row and column of an index; raise ValueError if it is out of range."""
        if len(index) != len(self.shape) or any(
            not 0 <= at < extent for at, extent in zip(index, self.shape, strict=True)
        ):
            raise ValueError("index out of range")
        if len(self.shape) < 2:
            return (0, *divmod(index[0], self.wrap)) if index else (0, 0, 0)
        table = 0
        for at, extent in zip(index[:-2], self.shape[:-2], strict=True):
            table = table * extent + at
        return table, index[-2], index[-1]

    def title(self, table: int) -> str:
        """Return the table's position as an index expression: `[3, 0, :, :]`."""
        indices = [*map(str, self.leading(table)), *[":"] * min(2, len(self.shape))]
        return f"[{', '.join(indices)}]"


@dataclass(frozen=True, slots=True)
class CellFormat:
    """Cell format of `width` cells; floats have `decimals`, or an exponent if it is None."""

    kind: str
    width: int
    decimals: int | None = None

    def __call__(self, value: Any) -> str:
        """Return the value's text; a small nonzero number is never shown as zero."""
        if self.kind == "f":
            number = float(value)
            if number == 0 or not math.isfinite(number):
                return "0" if number == 0 else str(number)
            if self.decimals is not None:
                text = f"{number:.{self.decimals}f}"
                if text.strip("-0."):
                    return text
            return f"{number:.{_DIGITS - 1 if self.decimals is None else 1}e}"
        if self.kind == "c":
            return f"{value.real:.4g}{value.imag:+.4g}j"
        if self.kind == "b":
            return str(bool(value)).lower()
        return str(value) if self.kind in "iu" else shorten(to_printable(value), self.width)


def choose_cell_format(dtype: np.dtype, moments: Moments | None) -> CellFormat:
    """Return the cell format of a type, given the range of the values in `moments`."""
    kind = "f" if dtype.kind == "V" else dtype.kind
    low, high = (moments.low, moments.high) if moments is not None and moments.finite else (0.0, 1.0)
    if kind == "f":
        largest = max(abs(low), abs(high))
        power = math.floor(math.log10(largest)) if largest else 0
        decimals = _DIGITS - 1 - power if _SMALL < power < _LARGE else None
        text = [
            f"{end:.{decimals}f}" if decimals is not None else f"{-1:.{_DIGITS - 1}e}" for end in (low, high)
        ]
        return CellFormat(kind, max(len(f"{-1:.1e}"), *map(len, text)), decimals)
    if kind in "iu":
        most = max(len(str(int(low))), len(str(int(high)))) if moments is not None else 20
        return CellFormat(kind, max(_LEAST, most))
    return CellFormat(kind, {"c": _COMPLEX, "b": _BOOL}.get(kind, _TEXT))


def format_exactly(value: Any) -> str:
    """Return a value in full: as many digits as distinguish it from every other value of its type."""
    kind = getattr(getattr(value, "dtype", None), "kind", "O")
    if kind in "fiubc":
        return str(value.item()) if kind in "iub" else str(value)
    return to_printable(value) if kind == "O" else str(float(value))


def to_printable(value: Any) -> str:
    """Return a string's bytes as text with unprintable characters escaped."""
    return clean(value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value))


class CellSource(Protocol):
    """Source of a table's cells."""

    def read(self, grid: ValueGrid, table: int, rows: range, columns: range) -> np.ndarray:
        """Return the cells [rows, columns] of a table; raise any error of reading."""
        ...


class TensorCells:
    """Values of one tensor. Small ones, and those that do not allow partial reads, are cached."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._whole: np.ndarray | None = None

    def read(self, grid: ValueGrid, table: int, rows: range, columns: range) -> np.ndarray:
        """Return the cells [rows, columns] of a table; zeros fill the last row past the end of an axis."""
        if len(grid.shape) < 2:
            return self._wrapped(grid, rows, columns)
        indices = grid.leading(table)
        if self._whole is None and self._is_partial():
            # Row by row, because a wide table has many invisible values between two rows.
            return np.stack([self._part((*indices, row, _to_slice(columns))) for row in rows])
        index: Any = (*indices, _to_slice(rows), _to_slice(columns))
        block: np.ndarray = self._array()[index]
        return block

    def _wrapped(self, grid: ValueGrid, rows: range, columns: range) -> np.ndarray:
        start, stop = rows.start * grid.wrap, min(rows.stop * grid.wrap, self._leaf.size)
        if not grid.shape:
            return self._array().reshape(1, 1)
        inside = slice(start, stop)
        flat = self._part((inside,)) if self._whole is None and self._is_partial() else self._array()[inside]
        room = np.zeros(len(rows) * grid.wrap, flat.dtype)
        room[: flat.size] = flat
        return room.reshape(len(rows), grid.wrap)[:, _to_slice(columns)]

    def _is_partial(self) -> bool:
        if self._leaf.dtype == "string" or self._leaf.nbytes <= LARGE:
            return False
        source = slice_leaf(self._leaf, ...).source
        return isinstance(source, StridedView) and isinstance(source.storage, Span | Inline)

    def _part(self, index: Any) -> np.ndarray:
        return slice_leaf(self._leaf, index).array()

    def _array(self) -> np.ndarray:
        if self._whole is None:
            if self._leaf.dtype == "string":
                self._whole = np.empty(self._leaf.size, object)
                self._whole[:] = self._leaf.strings()
                self._whole = self._whole.reshape(self._leaf.shape)
            else:
                self._whole = self._leaf.array()
        return self._whole


class CellDifference:
    """Difference of two tensors, cell by cell."""

    def __init__(self, left: TensorCells, right: TensorCells) -> None:
        self._sides = left, right

    def read(self, grid: ValueGrid, table: int, rows: range, columns: range) -> np.ndarray:
        """Return left - right of the cells, in float64 (complex128)."""
        a, b = (side.read(grid, table, rows, columns) for side in self._sides)
        wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
        with np.errstate(invalid="ignore"):
            difference: np.ndarray = a.astype(wide) - b.astype(wide)
        return difference


def _to_slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)
