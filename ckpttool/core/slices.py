"""Slices of unread tensors as unread tensors: only the range that the slice spans is read."""

from __future__ import annotations

import math
import operator
from dataclasses import replace

from ckpttool.core import dtypes
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.dtypes import np
from ckpttool.core.source import (
    DeflatedSpan,
    Inline,
    Shape,
    Source,
    Span,
    StoragePart,
    StridedView,
    TransformedSource,
)
from ckpttool.core.text import format_count
from ckpttool.core.tree import Leaf

_STORAGES = (Span, DeflatedSpan, StoragePart, Inline)


@dataclass(frozen=True, slots=True)
class AxisRange:
    """Selection along one axis: `count` elements from `start`, every `step`-th.

    `dropped` means that the index was a number.
    """

    start: int
    step: int
    count: int
    dropped: bool = False

    @property
    def slice(self) -> slice | int:
        """Return the equivalent Python index; a stop before the first element has no number in Python."""
        if self.dropped:
            return self.start
        stop = self.start + self.step * self.count
        return slice(self.start, stop if stop >= 0 else None, self.step) if self.count else slice(0)


class SliceOp(NamedTuple):
    """Slice an array that has been read (a source.Op)."""

    axes: tuple[AxisRange, ...]

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:
        """Return the dtype and shape of the slice."""
        del shape
        return dtype, sliced_shape(self.axes)

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the slice."""
        part: np.ndarray = np.asarray(array[tuple(axis.slice for axis in self.axes)])
        return part


class StringSlice(NamedTuple):
    """A selection of a tensor's strings; all are read, since each begins where the previous one ends."""

    base: Leaf
    axes: tuple[AxisRange, ...]

    def read(self) -> bytes:
        """Return the selected strings, each after its length."""
        whole = np.empty(self.base.size, object)
        whole[:] = self.base.strings()
        strings = SliceOp(self.axes).apply(whole.reshape(self.base.shape)).reshape(-1)
        return b"".join(len(string).to_bytes(8, "little") + string for string in strings)


def slice_leaf(leaf: Leaf, index: object) -> Leaf:
    """Return the leaf for `leaf[index]`, where the index consists of numbers, slices and `...`.

    Raise IndexError for a number out of bounds or more indices than axes, and TypeError for any
    other index.
    """
    axes = _parse_index(index, leaf.shape)
    return replace(leaf, shape=sliced_shape(axes), source=_slice_source(leaf, axes))


def sliced_shape(axes: tuple[AxisRange, ...]) -> Shape:
    """Return the resulting shape."""
    return tuple(axis.count for axis in axes if not axis.dropped)


def _slice_source(leaf: Leaf, axes: tuple[AxisRange, ...]) -> Source:
    if leaf.dtype == "string":
        return StringSlice(leaf, axes)
    whole = _view_source(leaf)
    if whole is None or any(axis.step < 0 for axis in axes):
        return TransformedSource(leaf.source, leaf.dtype, leaf.shape, SliceOp(axes))
    steps = list(zip(axes, whole.strides, strict=True))
    return whole._replace(
        shape=sliced_shape(axes),
        strides=tuple(axis.step * stride for axis, stride in steps if not axis.dropped),
        offset=whole.offset + sum(axis.start * stride for axis, stride in steps),
    )


def _view_source(leaf: Leaf) -> StridedView | None:
    """Return the leaf's source as a storage view that can be read in part, or None if impossible."""
    source: object = leaf.source
    if isinstance(source, StridedView):
        return source
    if not isinstance(source, _STORAGES) or not leaf.size:
        return None
    strides = tuple(math.prod(leaf.shape[axis + 1 :]) for axis in range(len(leaf.shape)))
    return StridedView(source, dtypes.BY_NAME[leaf.dtype].itemsize, leaf.shape, strides, 0)


def _parse_index(index: object, shape: Shape) -> tuple[AxisRange, ...]:
    indices = list(index) if isinstance(index, tuple) else [index]
    rest = [at for at, item in enumerate(indices) if item is Ellipsis]
    if len(rest) > 1:
        raise IndexError("an index can have only one ellipsis (...)")
    free = len(shape) - len(indices) + len(rest)
    if free < 0:
        many = format_count(len(indices) - len(rest), "index is", "indices are")
        raise IndexError(f"{many} too many for {format_count(len(shape), 'axis', 'axes')}")
    at = rest[0] if rest else len(indices)
    indices[at : at + 1] = [slice(None)] * free
    return tuple(
        _parse_axis_index(item, extent, n)
        for n, (item, extent) in enumerate(zip(indices, shape, strict=True))
    )


def _parse_axis_index(index: object, extent: int, number: int) -> AxisRange:
    if isinstance(index, slice):
        start, stop, step = index.indices(extent)
        return AxisRange(start, step, len(range(start, stop, step)))
    try:
        at = None if isinstance(index, bool) else operator.index(index)  # type: ignore[arg-type]  # it refuses what has none
    except TypeError:
        at = None
    if at is None:
        raise TypeError(
            "an unread tensor supports only integers, slices and ... as indices, not "
            f"{type(index).__name__}: call numpy() first to use other indices"
        )
    if not -extent <= at < extent:
        raise IndexError(f"index {at} is out of bounds for axis {number} with size {extent}")
    return AxisRange(at % extent, 1, 1, dropped=True)
