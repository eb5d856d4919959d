"""Heat maps of tensors, a byte for each cell: small enough that a page holds one for every tensor."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from ckpttool.leaf import Leaf

# Bytes of all pictures of a page; one has at most and at least so many cells, and no side is longer.
_ALL = 3 << 20
_MOST, _LEAST, _LONGEST = 4096, 64, 160
# Numbers that are looked at together.
_PIECE = 1 << 18
# The byte of a cell that holds no number; the others are `_ZERO` and up to 127 steps to either side of it.
_ZERO, _STEPS = 128, 127
# Where a layer's units are counted by the last axis; elsewhere by the first.
_UNITS_LAST = frozenset(("kernel", "embeddings"))


@dataclass(frozen=True, slots=True)
class Picture:
    """Where a picture's cells stand among all, and what they show.

    `rows` and `columns` count cells, `height` and `width` the numbers of the matrix that the tensor is shown
    as, `scale` is the value of the outermost step.
    """

    at: int
    rows: int
    columns: int
    height: int
    width: int
    scale: float

    def document(self) -> list[float]:
        """Return what the page's script takes."""
        return [self.at, self.rows, self.columns, self.height, self.width, float(f"{self.scale:.4g}")]


def budget(tensors: int) -> int:
    """Return how many cells a picture may have where there are so many tensors."""
    return max(_LEAST, min(_MOST, _ALL // max(1, tensors)))


class Pictures:
    """The cells of all pictures so far, `most` of them in each at most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._cells = bytearray()

    def add(self, path: str, array: np.ndarray) -> Picture | None:
        """Shrink the tensor at a display path to a picture; return None for one of fewer than two numbers."""
        if array.size < 2:
            return None
        cells, shape = shrunk(matrix(path, array), self._most)
        return self._kept(cells, shape, _largest(cells))

    def pair(self, path: str, left: Leaf, right: Leaf) -> list[Picture]:
        """Shrink two tensors of one shape to pictures of one scale, and their difference to a third."""
        import numpy as np

        if left.size < 2:
            return []
        one, shape = shrunk(matrix(path, left.array()), self._most)
        other, _ = shrunk(matrix(path, right.array()), self._most)
        with np.errstate(invalid="ignore", over="ignore"):
            # The mean of differences is the difference of means: the tensors need not be there together.
            more = other - one
        scale = max(_largest(one), _largest(other))
        return [
            *(self._kept(each, shape, scale) for each in (one, other)),
            self._kept(more, shape, _largest(more)),
        ]

    def _kept(self, cells: np.ndarray, shape: tuple[int, int], scale: float) -> Picture:
        at = len(self._cells)
        self._cells += _bytes(cells, scale)
        # Base64 writes three bytes as four letters: a picture begins where such a group does.
        self._cells += bytes(-len(self._cells) % 3)
        rows, columns = cells.shape
        return Picture(at, rows, columns, *shape, scale)

    def encoded(self) -> str:
        """Return all cells in base64."""
        return base64.b64encode(self._cells).decode()


def matrix(path: str, array: np.ndarray) -> np.ndarray:
    """Return the tensor as a matrix with a row, or for Keras's kernels a column, for each of its units.

    A convolution's other axes are laid end to end: one filter is one row (PyTorch) or column (Keras).
    """
    import numpy as np

    if array.dtype.kind == "c":
        array = np.abs(array)
    if array.ndim < 2:
        return array.reshape(1, -1)
    last = array.ndim > 2 and path.rpartition("/")[2] in _UNITS_LAST
    rows = math.prod(array.shape[:-1]) if last else array.shape[0]
    return array.reshape(rows, array.size // rows if rows else 0)


def shrunk(array: np.ndarray, most: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Return a matrix's cells, each the mean of a block of numbers, and its shape.

    A block in which something is no number has none. Beside the array little is held in memory.
    """
    import numpy as np

    height, width = array.shape
    columns = max(1, min(width, math.isqrt(most), _LONGEST))
    rows = max(1, min(height, most // columns, _LONGEST))
    columns = max(1, min(width, most // rows, _LONGEST))
    tall, wide = -(-height // rows), -(-width // columns)
    starts = np.arange(0, width, wide)
    counts = np.minimum(starts + wide, width) - starts
    cells = np.empty((-(-height // tall), len(starts)))
    with np.errstate(invalid="ignore", over="ignore"):
        for row in range(len(cells)):
            strip = array[row * tall : (row + 1) * tall]
            cells[row] = _sums(strip, starts, wide) / (counts * len(strip))
    return cells, (height, width)


def _sums(strip: np.ndarray, starts: np.ndarray, wide: int) -> np.ndarray:
    """Return the sums of a row of blocks, in float64, with a copy of _PIECE numbers at most."""
    import numpy as np

    width = strip.shape[1]
    if width > _PIECE:
        return np.array([strip[:, at : at + wide].sum(dtype=np.float64) for at in starts])
    found = np.zeros(len(starts))
    step = max(1, _PIECE // width)
    for row in range(0, len(strip), step):
        found += np.add.reduceat(strip[row : row + step].astype(np.float64), starts, axis=1).sum(axis=0)
    return found


def _largest(cells: np.ndarray) -> float:
    import numpy as np

    numbers = np.abs(cells[np.isfinite(cells)])
    return float(numbers.max()) if numbers.size else 0.0


def _bytes(cells: np.ndarray, scale: float) -> bytes:
    import numpy as np

    finite = np.isfinite(cells)
    steps = np.where(finite, cells, 0.0) / (scale or 1.0) * _STEPS
    return bytes(np.where(finite, np.rint(steps) + _ZERO, 0).astype(np.uint8).tobytes())
