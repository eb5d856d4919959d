"""The values of a tensor as they are looked at: no more of a large one is read than is seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ckpttool.face.slicing import taken
from ckpttool.leaf import Leaf
from ckpttool.source import LARGE, Inline, Span, Strided

if TYPE_CHECKING:
    import numpy as np

    from ckpttool.browser.grid import Grid


class Block(Protocol):
    """Where the cells of a table come from."""

    def read(self, grid: Grid, table: int, rows: range, columns: range) -> np.ndarray:
        """Return the cells [rows, columns] of a table; raise what reading raises."""
        ...


class Values:
    """One tensor's values. Small ones, and those that cannot be read in part, are kept once they are read."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._whole: np.ndarray | None = None

    def read(self, grid: Grid, table: int, rows: range, columns: range) -> np.ndarray:
        """Return the cells [rows, columns] of a table, those after an axis's end left out of the last row."""
        if len(grid.shape) < 2:
            return self._wrapped(grid, rows, columns)
        place = grid.leading(table)
        if self._whole is None and self._is_partial():
            import numpy as np

            # Row by row: between two rows of a wide table lies much that nobody sees.
            return np.stack([self._part((*place, row, _slice(columns))) for row in rows])
        index: Any = (*place, _slice(rows), _slice(columns))
        block: np.ndarray = self._array()[index]
        return block

    def _wrapped(self, grid: Grid, rows: range, columns: range) -> np.ndarray:
        import numpy as np

        start, stop = rows.start * grid.wrap, min(rows.stop * grid.wrap, self._leaf.size)
        if not grid.shape:
            return self._array().reshape(1, 1)
        inside = slice(start, stop)
        flat = self._part((inside,)) if self._whole is None and self._is_partial() else self._array()[inside]
        room = np.zeros(len(rows) * grid.wrap, flat.dtype)
        room[: flat.size] = flat
        return room.reshape(len(rows), grid.wrap)[:, _slice(columns)]

    def _is_partial(self) -> bool:
        if self._leaf.dtype == "string" or self._leaf.nbytes <= LARGE:
            return False
        source = taken(self._leaf, ...).source
        return isinstance(source, Strided) and isinstance(source.storage, Span | Inline)

    def _part(self, index: Any) -> np.ndarray:
        return taken(self._leaf, index).array()

    def _array(self) -> np.ndarray:
        if self._whole is None:
            if self._leaf.dtype == "string":
                import numpy as np

                self._whole = np.empty(self._leaf.size, object)
                self._whole[:] = self._leaf.strings()
                self._whole = self._whole.reshape(self._leaf.shape)
            else:
                self._whole = self._leaf.array()
        return self._whole


class Difference:
    """What one tensor's values have more than another's, cell by cell."""

    def __init__(self, left: Values, right: Values) -> None:
        self._sides = left, right

    def read(self, grid: Grid, table: int, rows: range, columns: range) -> np.ndarray:
        """Return left - right of the cells, in float64 (complex128)."""
        import numpy as np

        a, b = (side.read(grid, table, rows, columns) for side in self._sides)
        wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
        with np.errstate(invalid="ignore"):
            found: np.ndarray = a.astype(wide) - b.astype(wide)
        return found


def _slice(taken: range) -> slice:
    return slice(taken.start, taken.stop)
