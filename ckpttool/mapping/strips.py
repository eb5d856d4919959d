"""Permuting axes at the speed of memory: by tiles that stay in the processor's cache."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

# A tile is as many rows as fill four cache lines of the result's, of so many columns: 256 KiB.
_RUN = 256
_COLUMNS = 1024
_LINE = 64
# What NumPy copies sooner than a second pass pays off.
_SMALL = 256 << 10
_NARROW = 128


def permuted(array: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Return a new contiguous array whose axis i is axis `axes[i]` of the given one."""
    import numpy as np

    shape = tuple(array.shape[axis] for axis in axes)
    if array.nbytes < _SMALL:
        return np.ascontiguousarray(array.transpose(axes)).reshape(shape)
    extents, order = _merged(array.shape, axes)
    # Unsigned numbers of one size are copied alike, and faster than the types of ml_dtypes.
    words = np.ascontiguousarray(array).reshape(extents).view(_word(array.dtype))
    if len(order) > 1 and order[0] == len(order) - 1:
        # The last axis comes first: a transpose, once the others are in order (copied in runs of it).
        rest = np.ascontiguousarray(words.transpose(*order[1:], order[0]))
        made = _transposed(rest.reshape(-1, rest.shape[-1]))
    else:
        made = np.ascontiguousarray(words.transpose(order))
    return made.reshape(shape).view(array.dtype)


def _word(dtype: np.dtype) -> str:
    return {1: "u1", 2: "u2", 4: "u4", 8: "u8"}.get(dtype.itemsize, f"V{dtype.itemsize}")


def _merged(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and order of the same permutation with fewest axes: neighbours that stay so are one."""
    order = [axis for axis in axes if shape[axis] != 1] or [0]
    kept = sorted(order)
    order = [kept.index(axis) for axis in order]
    runs = [[axis for _, axis in run] for _, run in groupby(enumerate(order), lambda at: at[1] - at[0])]
    ranked = sorted(runs)
    extents = []
    for run in ranked:
        extent = 1
        for axis in run:
            extent *= shape[kept[axis]]
        extents.append(extent)
    return tuple(extents), tuple(ranked.index(run) for run in runs)


def _transposed(matrix: np.ndarray) -> np.ndarray:
    """Return the transposed matrix, contiguous.

    A tile goes through a small buffer whose rows are a cache line longer, so that the elements of a column
    do not fall into one set of the cache, as those of a matrix of 1024 columns do.
    """
    import numpy as np

    rows, columns = matrix.shape
    if min(rows, columns) < _NARROW:
        return np.ascontiguousarray(matrix.T)
    made = np.empty((columns, rows), matrix.dtype)
    height = max(1, _RUN // matrix.itemsize)
    width = min(columns, _COLUMNS)
    tile = np.empty((height, width + max(1, _LINE // matrix.itemsize)), matrix.dtype)
    for left in range(0, columns, width):
        for top in range(0, rows, height):
            block = matrix[top : top + height, left : left + width]
            held = tile[: block.shape[0], : block.shape[1]]
            held[...] = block
            made[left : left + width, top : top + height] = held.T
    return made
