"""The table of a tensor's values: its last two axes, for one place in all axes before them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.shown import clean, shortened

if TYPE_CHECKING:
    import numpy as np

    from ckpttool.ops.moments import Moments
    from ckpttool.source import Shape

# Cells that a value of each kind takes at most, and at least; numbers take what the largest needs.
_COMPLEX, _TEXT, _BOOL, _LEAST = 22, 24, 5, 4
# Digits that count, and the powers of ten between which numbers are written without an exponent.
_DIGITS, _SMALL, _LARGE = 5, -4, 5


@dataclass(frozen=True, slots=True)
class Grid:
    """The table of an array of `shape`; of one with a single axis, `wrap` elements stand in a row."""

    shape: Shape
    wrap: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        if len(self.shape) < 2:
            return -(-self.shape[0] // self.wrap) if self.shape else 1
        return self.shape[-2]

    @property
    def columns(self) -> int:
        """The number of columns."""
        if len(self.shape) < 2:
            return min(self.wrap, self.shape[0]) if self.shape else 1
        return self.shape[-1]

    @property
    def slices(self) -> int:
        """The number of tables: the places in the axes before the last two."""
        return math.prod(self.shape[:-2])

    def leading(self, number: int) -> Shape:
        """Return the place in the leading axes of table `number`, counted in C order."""
        place = []
        for extent in reversed(self.shape[:-2]):
            number, at = divmod(number, extent)
            place.append(at)
        return tuple(reversed(place))

    def index(self, table: int, row: int, column: int) -> Shape | None:
        """Return the index of a cell; None where the last row has ended."""
        if not self.shape:
            return ()
        if len(self.shape) == 1:
            at = row * self.wrap + column
            return (at,) if at < self.shape[0] else None
        return (*self.leading(table), row, column)

    def cell(self, index: Sequence[int]) -> tuple[int, int, int]:
        """Return the table, row and column of an index; raise ValueError for one that is outside."""
        if len(index) != len(self.shape) or any(
            not 0 <= at < extent for at, extent in zip(index, self.shape, strict=True)
        ):
            raise ValueError("no such index")
        if len(self.shape) < 2:
            return (0, *divmod(index[0], self.wrap)) if index else (0, 0, 0)
        table = 0
        for at, extent in zip(index[:-2], self.shape[:-2], strict=True):
            table = table * extent + at
        return table, index[-2], index[-1]

    def title(self, table: int) -> str:
        """Return which part of the array the table is, as it is indexed: `[3, 0, :, :]`."""
        places = [*map(str, self.leading(table)), *[":"] * min(2, len(self.shape))]
        return f"[{', '.join(places)}]"


@dataclass(frozen=True, slots=True)
class Written:
    """How values are written in cells of `width`: floats with `decimals`; None: an exponent."""

    kind: str
    width: int
    decimals: int | None = None

    def __call__(self, value: Any) -> str:
        """Return the value for its cell; a small number is never written as a zero."""
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
        return str(value) if self.kind in "iu" else shortened(spelled(value), self.width)


def written(dtype: np.dtype, known: Moments | None) -> Written:
    """Return how numbers of a type are written that lie between the lowest and the highest `known`."""
    kind = "f" if dtype.kind == "V" else dtype.kind
    low, high = (known.low, known.high) if known is not None and known.finite else (0.0, 1.0)
    if kind == "f":
        largest = max(abs(low), abs(high))
        power = math.floor(math.log10(largest)) if largest else 0
        decimals = _DIGITS - 1 - power if _SMALL < power < _LARGE else None
        told = [
            f"{end:.{decimals}f}" if decimals is not None else f"{-1:.{_DIGITS - 1}e}" for end in (low, high)
        ]
        return Written(kind, max(len(f"{-1:.1e}"), *map(len, told)), decimals)
    if kind in "iu":
        most = max(len(str(int(low))), len(str(int(high)))) if known is not None else 20
        return Written(kind, max(_LEAST, most))
    return Written(kind, {"c": _COMPLEX, "b": _BOOL}.get(kind, _TEXT))


def exactly(value: Any) -> str:
    """Return all of a value: as many digits as tell it from every other of its type."""
    kind = getattr(getattr(value, "dtype", None), "kind", "O")
    if kind in "fiubc":
        return str(value.item()) if kind in "iub" else str(value)
    return spelled(value) if kind == "O" else str(float(value))


def spelled(value: Any) -> str:
    """Return a string's bytes as text without what would not print."""
    return clean(value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value))
