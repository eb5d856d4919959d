"""What the numbers of one tensor are like: read when it is looked at, large ones in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool import dtypes
from ckpttool.browser.look import Row
from ckpttool.errors import CkpttoolError
from ckpttool.ops import moments, stats
from ckpttool.ops.moments import Moments
from ckpttool.ops.rows import TensorRow
from ckpttool.shown import sentence
from ckpttool.source import LARGE, pieces

if TYPE_CHECKING:
    import numpy as np

    from ckpttool.leaf import Leaf


@dataclass(frozen=True, slots=True)
class Numbers:
    """A tensor's moments, a histogram of them and what is no good sign; or the sentence that says why not."""

    moments: Moments | None = None
    histogram: tuple[int, ...] = ()
    signs: tuple[str, ...] = ()
    error: str | None = None


def steps(row: Row | None, done: Callable[[Numbers | None], None]) -> Iterator[None]:
    """Read a tensor, a piece in each step; tell what was found at the end, None where nothing can be counted.

    Large tensors are read twice, and their units are not looked at; see stats.signs.
    """
    if not isinstance(row, TensorRow) or row.leaf.dtype == "string" or not row.leaf.size:
        done(None)
        return
    try:
        if row.leaf.nbytes > LARGE:
            yield from _streamed(row, done)
            return
        found = stats.tensor_stats(row.path, row.keys, row.leaf, row.leaf.array())
        done(Numbers(found.moments, found.histogram, found.signs))
    except CkpttoolError as error:
        done(Numbers(error=sentence(error)))


def _streamed(row: TensorRow, done: Callable[[Numbers | None], None]) -> Iterator[None]:
    known = Moments()
    for piece in _arrays(row.leaf):
        known += moments.of(piece)
        yield
    counts: list[int] = []
    for piece in _arrays(row.leaf):
        here = moments.histogram(piece, known)
        counts = [a + b for a, b in zip(counts, here, strict=True)] if counts else list(here)
        yield
    done(Numbers(known, tuple(counts), tuple(stats.signs(row.keys, row.leaf, known))))


def _arrays(leaf: Leaf) -> Iterator[np.ndarray]:
    import numpy as np

    dtype = dtypes.numpy_dtype(leaf.dtype)
    for data in pieces(leaf.source):
        yield np.frombuffer(data, dtype)
