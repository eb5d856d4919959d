"""A slice of an unread tensor as another unread tensor: no more of a file is read than the slice spans."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ckpttool import dtypes
from ckpttool.leaf import Leaf
from ckpttool.shown import count
from ckpttool.source import Deflated, Inline, Part, Shape, Source, Span, Strided, Transformed

if TYPE_CHECKING:
    import numpy as np

_STORAGES = (Span, Deflated, Part, Inline)


@dataclass(frozen=True, slots=True)
class Axis:
    """What is taken of one axis: `count` elements from `start` on, every `step`-th; `dropped` by a number."""

    start: int
    step: int
    count: int
    dropped: bool = False

    @property
    def slice(self) -> slice | int:
        """The same as Python's own index, which has no number for what lies before the first element."""
        if self.dropped:
            return self.start
        stop = self.start + self.step * self.count
        return slice(self.start, stop if stop >= 0 else None, self.step) if self.count else slice(0)


class Take(NamedTuple):
    """The slicing of an array that has been read (a source.Op)."""

    axes: tuple[Axis, ...]

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:
        """Return the type and the shape of what is taken."""
        del shape
        return dtype, taken_shape(self.axes)

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return what is taken."""
        import numpy as np

        taken: np.ndarray = np.asarray(array[tuple(axis.slice for axis in self.axes)])
        return taken


class TakenStrings(NamedTuple):
    """Some of a tensor's strings; all of them are read, since each begins where the one before it ends."""

    base: Leaf
    axes: tuple[Axis, ...]

    def read(self) -> bytes:
        """Return the strings that were taken, each after its length."""
        import numpy as np

        whole = np.empty(self.base.size, object)
        whole[:] = self.base.strings()
        taken = Take(self.axes).apply(whole.reshape(self.base.shape)).reshape(-1)
        return b"".join(len(each).to_bytes(8, "little") + each for each in taken)


def taken(leaf: Leaf, index: object) -> Leaf:
    """Return the leaf of what `leaf[index]` would be of an array: numbers, slices and `...`.

    Raise IndexError for a number outside, or more indices than axes, and TypeError for any other index.
    """
    axes = _axes(index, leaf.shape)
    return replace(leaf, shape=taken_shape(axes), source=_source(leaf, axes))


def taken_shape(axes: tuple[Axis, ...]) -> Shape:
    """Return the shape that is left."""
    return tuple(axis.count for axis in axes if not axis.dropped)


def _source(leaf: Leaf, axes: tuple[Axis, ...]) -> Source:
    if leaf.dtype == "string":
        return TakenStrings(leaf, axes)
    whole = _strided(leaf)
    if whole is None or any(axis.step < 0 for axis in axes):
        return Transformed(leaf.source, leaf.dtype, leaf.shape, Take(axes))
    steps = list(zip(axes, whole.strides, strict=True))
    return whole._replace(
        shape=taken_shape(axes),
        strides=tuple(axis.step * stride for axis, stride in steps if not axis.dropped),
        offset=whole.offset + sum(axis.start * stride for axis, stride in steps),
    )


def _strided(leaf: Leaf) -> Strided | None:
    """Return the leaf's source as a view of a storage that can be read in part; None if it is none."""
    source: object = leaf.source
    if isinstance(source, Strided):
        return source
    if not isinstance(source, _STORAGES) or not leaf.size:
        return None
    strides = tuple(math.prod(leaf.shape[axis + 1 :]) for axis in range(len(leaf.shape)))
    return Strided(source, dtypes.BY_NAME[leaf.dtype].itemsize, leaf.shape, strides, 0)


def _axes(index: object, shape: Shape) -> tuple[Axis, ...]:
    given = list(index) if isinstance(index, tuple) else [index]
    rest = [at for at, each in enumerate(given) if each is Ellipsis]
    if len(rest) > 1:
        raise IndexError("an index has one ... at most")
    free = len(shape) - len(given) + len(rest)
    if free < 0:
        many = count(len(given) - len(rest), "index is", "indices are")
        raise IndexError(f"{many} too many for {count(len(shape), 'axis', 'axes')}")
    at = rest[0] if rest else len(given)
    given[at : at + 1] = [slice(None)] * free
    return tuple(_axis(each, extent, n) for n, (each, extent) in enumerate(zip(given, shape, strict=True)))


def _axis(given: object, extent: int, number: int) -> Axis:
    if isinstance(given, slice):
        start, stop, step = given.indices(extent)
        return Axis(start, step, len(range(start, stop, step)))
    try:
        at = None if isinstance(given, bool) else operator.index(given)  # type: ignore[arg-type]  # it refuses what has none
    except TypeError:
        at = None
    if at is None:
        raise TypeError(
            f"an unread tensor is indexed by numbers, slices and ..., not by {type(given).__name__}: "
            "numpy() reads it for other indices"
        )
    if not -extent <= at < extent:
        raise IndexError(f"{at} is outside of axis {number}, which has {extent}")
    return Axis(at % extent, 1, 1, dropped=True)
