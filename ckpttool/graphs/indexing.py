"""Operators on shapes and positions: reshape, slice, gather, scatter, pad, and what makes constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ckpttool.core import dtypes
from ckpttool.core.dtypes import np
from ckpttool.core.source import Shape
from ckpttool.core.tree import Leaf
from ckpttool.graphs.operators import (
    Movement,
    OperatorCall,
    ShapeRule,
    broadcast_shapes,
    operator,
    require_size,
)


def integers(array: np.ndarray | Sequence[int]) -> list[int]:
    """Return the entries of an input that lists numbers: axes, sizes, positions."""
    entries = array if isinstance(array, tuple) else np.asarray(array).reshape(-1)
    return [int(entry) for entry in entries]


def _movement(
    name: str, kind: Movement = "movement", since: int = 1, shapes: ShapeRule | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return operator(name, kind=kind, since=since, shapes=shapes)


def _reshaped(shape: Shape, listed: np.ndarray | Sequence[int], allowzero: int) -> Shape:
    extents = integers(listed)
    if not allowzero:
        extents = [shape[n] if extent == 0 else extent for n, extent in enumerate(extents)]
    if -1 in extents:
        rest = -math.prod(extents)
        extents[extents.index(-1)] = math.prod(shape) // rest if rest else -1
    if math.prod(extents) != math.prod(shape) or min(extents, default=0) < 0:
        raise ValueError(extents)
    return tuple(extents)


@_movement(
    "Reshape",
    "reshape",
    since=5,
    shapes=lambda call: [_reshaped(call.shape(0), call.value(1), call.get("allowzero"))],
)
def _reshape(x: np.ndarray, shape: np.ndarray, *, allowzero: int = 0) -> np.ndarray:
    return x.reshape(_reshaped(x.shape, shape, allowzero))


@_movement("Flatten", "reshape")
def _flatten(x: np.ndarray, *, axis: int = 1) -> np.ndarray:
    if not -x.ndim <= axis <= x.ndim:
        raise ValueError(axis)
    first = math.prod(x.shape[: axis if axis >= 0 else axis + x.ndim])
    return x.reshape(first, x.size // first if first else math.prod(x.shape[axis:]))


@_movement("Squeeze", "reshape")
def _squeeze(x: np.ndarray, axes: np.ndarray | None = None) -> np.ndarray:
    return x.squeeze(None if axes is None else tuple(integers(axes)))


@_movement("Unsqueeze", "reshape")
def _unsqueeze(x: np.ndarray, axes: np.ndarray) -> np.ndarray:
    return np.expand_dims(x, tuple(integers(axes)))


def _transposed_shape(call: OperatorCall) -> Sequence[Shape]:
    shape, perm = call.shape(0), call.get("perm")
    axes = [*range(len(shape))][::-1] if perm is None else [range(len(shape))[axis] for axis in perm]
    if sorted(axes) != [*range(len(shape))]:
        raise ValueError(perm)
    return [tuple(shape[axis] for axis in axes)]


@_movement("Transpose", "transpose", shapes=_transposed_shape)
def _transpose(x: np.ndarray, *, perm: Sequence[int] | None = None) -> np.ndarray:
    return x.transpose(tuple(perm) if perm is not None else None)


def _concatenated_shape(call: OperatorCall) -> Sequence[Shape]:
    shapes, axis = [call.shape(n) for n in range(len(call.shapes))], call.get("axis")
    axis = range(len(shapes[0]))[axis]
    if len({(len(shape), shape[:axis], shape[axis + 1 :]) for shape in shapes}) > 1:
        raise ValueError(shapes)
    return [(*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :])]


@_movement("Concat", "join", since=4, shapes=_concatenated_shape)
def _concat(*arrays: np.ndarray, axis: int = 0) -> np.ndarray:
    require_size([sum(array.size for array in arrays)])
    return np.concatenate(arrays, axis)


@_movement("Split", "extent")
def _split(
    x: np.ndarray,
    split: np.ndarray | None = None,
    *,
    axis: int = 0,
    num_outputs: int = 0,
    outputs: int = 0,
) -> tuple[np.ndarray, ...]:
    extent, parts = x.shape[axis], num_outputs or outputs
    if split is None:
        # Equal chunks; the last one is smaller if the extent cannot be divided.
        size = -(-extent // parts)
        sizes = [min(size, extent - n * size) for n in range(parts)]
    else:
        sizes = integers(split)
    if sum(sizes) != extent or min(sizes) < 0 or len(sizes) != outputs:
        raise ValueError(sizes)
    return tuple(np.split(x, np.cumsum(sizes)[:-1], axis))


@_movement("Slice", "extent")
def _slice(
    x: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    axes: np.ndarray | None = None,
    steps: np.ndarray | None = None,
) -> np.ndarray:
    firsts, lasts = integers(starts), integers(ends)
    selected = integers(axes) if axes is not None else list(range(len(firsts)))
    strides = integers(steps) if steps is not None else [1] * len(firsts)
    position = [slice(None)] * x.ndim
    for start, end, axis, step in zip(firsts, lasts, selected, strides, strict=True):
        extent = x.shape[axis]
        # With a negative step the end may be one before the first entry.
        low, high = (0, extent) if step > 0 else (-1, extent - 1)
        first = min(max(start + (extent if start < 0 else 0), max(low, 0)), high)
        last = min(max(end + (extent if end < 0 else 0), low), high)
        position[axis] = slice(first, None if last < 0 else last, step)
        if high < 0:
            position[axis] = slice(0, 0)
    return x[tuple(position)]


@_movement("Gather", "lookup")
def _gather(x: np.ndarray, indices: np.ndarray, *, axis: int = 0) -> np.ndarray:
    axis = axis % x.ndim
    require_size([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])
    return np.take(x, indices, axis)


@_movement("GatherElements")
def _gather_elements(x: np.ndarray, indices: np.ndarray, *, axis: int = 0) -> np.ndarray:
    return x[_element_positions(x, indices, axis)]


@_movement("GatherND")
def _gather_slices(x: np.ndarray, indices: np.ndarray, *, batch_dims: int = 0) -> np.ndarray:
    batch = x.shape[:batch_dims]
    rest = x.shape[batch_dims + indices.shape[-1] :]
    require_size([*indices.shape[:-1], *rest])
    whole = x.reshape(math.prod(batch), *x.shape[batch_dims:])
    positions = indices.reshape(math.prod(batch), -1, indices.shape[-1])
    rows = [
        whole[n][tuple(positions[n].T)] if indices.shape[-1] else whole[n][None] for n in range(len(whole))
    ]
    return np.stack(rows).reshape(*indices.shape[:-1], *rest)


def _element_positions(x: np.ndarray, indices: np.ndarray, axis: int) -> tuple[np.ndarray, ...]:
    """Return the positions that indices along an axis select, each at its own place on the other axes."""
    if indices.ndim != x.ndim:
        raise ValueError(indices.shape)
    positions: list[np.ndarray] = list(np.indices(indices.shape, sparse=True))
    positions[axis % x.ndim] = indices
    return tuple(positions)


_COMBINED = {"add": "add", "mul": "multiply", "max": "maximum", "min": "minimum"}


def _put(target: np.ndarray, positions: Any, updates: np.ndarray, reduction: str) -> np.ndarray:
    """Write entries at positions, combined with those already there if there is a reduction."""
    if reduction == "none":
        target[positions] = updates
    else:
        getattr(np, _COMBINED[reduction]).at(target, positions, updates)
    return target


@operator("ScatterElements", shapes=lambda call: [call.shape(0)])
def _scatter_elements(
    x: np.ndarray, indices: np.ndarray, updates: np.ndarray, *, axis: int = 0, reduction: str = "none"
) -> np.ndarray:
    indices = np.where(indices < 0, indices + x.shape[axis], indices)
    return _put(x.copy(), _element_positions(x, indices, axis), updates, reduction)


@operator("ScatterND", shapes=lambda call: [call.shape(0)], kind="scatter")
def _scatter_slices(
    x: np.ndarray, indices: np.ndarray, updates: np.ndarray, *, reduction: str = "none"
) -> np.ndarray:
    return _put(x.copy(), tuple(np.moveaxis(indices, -1, 0)), updates, reduction)


@operator("TensorScatter", shapes=lambda call: [call.shape(0)])
def _scatter_along(
    past: np.ndarray,
    update: np.ndarray,
    starts: np.ndarray | None = None,
    *,
    axis: int = -2,
    mode: str = "linear",
) -> np.ndarray:
    """Write rows into a cache, from an own position for each batch entry."""
    result, length = np.moveaxis(past, axis, 1).copy(), past.shape[axis]
    for row, entries in enumerate(np.moveaxis(update, axis, 1)):
        positions = np.arange(len(entries)) + (0 if starts is None else int(starts[row]))
        if mode == "linear" and len(positions) and positions[-1] >= length:
            raise ValueError(mode)
        result[row, positions % length] = entries
    return np.moveaxis(result, 1, axis)


@_movement("Expand")
def _expand(x: np.ndarray, shape: np.ndarray) -> np.ndarray:
    extents = broadcast_shapes(x.shape, tuple(integers(shape)))
    require_size(extents)
    return np.broadcast_to(x, extents)


@_movement("Tile", "extent", since=6)
def _tile(x: np.ndarray, repeats: np.ndarray) -> np.ndarray:
    require_size([extent * count for extent, count in zip(x.shape, integers(repeats), strict=True)])
    return np.tile(x, integers(repeats))


@_movement("DepthToSpace", "shuffle")
def _depth_to_space(x: np.ndarray, *, blocksize: int = 0, mode: str = "DCR") -> np.ndarray:
    rows, depth, *extents = x.shape
    count = len(extents)
    blocks, rest = [blocksize] * count, depth // blocksize**count
    if mode == "DCR":
        split = x.reshape(rows, *blocks, rest, *extents)
        channel, first = 1 + count, 1
    else:
        split = x.reshape(rows, rest, *blocks, *extents)
        channel, first = 1, 2
    pairs = [axis for n in range(count) for axis in (2 + count + n, first + n)]
    moved = split.transpose(0, channel, *pairs)
    return moved.reshape(rows, rest, *(extent * blocksize for extent in extents))


@_movement("SpaceToDepth", "shuffle")
def _space_to_depth(x: np.ndarray, *, blocksize: int = 0, mode: str = "DCR") -> np.ndarray:
    rows, depth, *extents = x.shape
    count = len(extents)
    split = x.reshape(rows, depth, *(part for e in extents for part in (e // blocksize, blocksize)))
    places, blocks = range(2, 2 + 2 * count, 2), range(3, 3 + 2 * count, 2)
    order = (*blocks, 1) if mode == "DCR" else (1, *blocks)
    moved = split.transpose(0, *order, *places)
    return moved.reshape(rows, depth * blocksize**count, *(extent // blocksize for extent in extents))


@_movement("ReverseSequence")
def _reverse_sequence(
    x: np.ndarray, lengths: np.ndarray, *, batch_axis: int = 1, time_axis: int = 0
) -> np.ndarray:
    result = x.copy()
    view, source = (np.moveaxis(array, (batch_axis, time_axis), (0, 1)) for array in (result, x))
    for row, length in enumerate(integers(lengths)):
        view[row, :length] = source[row, :length][::-1]
    return result


@_movement("Compress")
def _compress(x: np.ndarray, condition: np.ndarray, *, axis: int | None = None) -> np.ndarray:
    return np.compress(condition, x, axis)


@_movement("Trilu")
def _triangle(x: np.ndarray, k: np.ndarray | None = None, *, upper: int = 1) -> np.ndarray:
    offset = 0 if k is None else min(max(int(np.asarray(k).reshape(())), -(1 << 40)), 1 << 40)
    rows, columns = np.arange(x.shape[-2])[:, None], np.arange(x.shape[-1])
    inside = columns - rows >= offset if upper else columns - rows <= offset
    return np.where(inside, x, np.zeros((), x.dtype))


_PADDINGS = {"constant": "constant", "reflect": "reflect", "edge": "edge", "wrap": "wrap"}


def pad_widths(pads: Sequence[int], axes: Sequence[int] | None, rank: int) -> list[tuple[int, int]]:
    """Return the entries added before and after each axis; negative ones are removed."""
    chosen = [axis % rank for axis in (axes if axes is not None else range(rank))]
    if len(pads) != 2 * len(chosen):
        raise ValueError(pads)
    widths = [(0, 0)] * rank
    for n, axis in enumerate(chosen):
        widths[axis] = (pads[n], pads[n + len(chosen)])
    return widths


@_movement("Pad", "extent")
def _pad(
    x: np.ndarray,
    pads: np.ndarray,
    value: np.ndarray | None = None,
    axes: np.ndarray | None = None,
    *,
    mode: str = "constant",
) -> np.ndarray:
    widths = pad_widths(integers(pads), None if axes is None else integers(axes), x.ndim)
    require_size([extent + sum(width) for extent, width in zip(x.shape, widths, strict=True)])
    cut = tuple(
        slice(max(-a, 0), extent - max(-b, 0)) for extent, (a, b) in zip(x.shape, widths, strict=True)
    )
    added = [(max(a, 0), max(b, 0)) for a, b in widths]
    if mode == "constant":
        fill = np.zeros((), x.dtype) if value is None else np.asarray(value).reshape(())
        return np.pad(x[cut], added, constant_values=fill)
    return np.pad(x[cut], added, mode=_PADDINGS[mode])  # type: ignore[call-overload]


@_movement("CenterCropPad")
def _center_crop_pad(x: np.ndarray, shape: np.ndarray, *, axes: Sequence[int] | None = None) -> np.ndarray:
    for axis, extent in zip(axes if axes is not None else range(x.ndim), integers(shape), strict=True):
        more = extent - x.shape[axis]
        require_size([*x.shape[:axis], extent, *x.shape[axis:][1:]])
        widths = [(0, 0)] * x.ndim
        if more >= 0:
            widths[axis] = (more // 2, more - more // 2)
            x = np.pad(x, widths)
        else:
            start = -more // 2
            x = np.take(x, range(start, start + extent), axis)
    return x


def _rank_of_shape(shape: Sequence[int], start: int, end: int | None) -> Sequence[int]:
    return shape[start : len(shape) if end is None else end]


@operator(
    "Shape",
    shapes=lambda call: [(len(_rank_of_shape(call.shape(0), call.get("start"), call.get("end"))),)],
    result="int64",
)
def _shape(x: np.ndarray, *, start: int = 0, end: int | None = None) -> np.ndarray:
    return np.asarray(_rank_of_shape(x.shape, start, end), np.int64)


@operator("Size", shapes=lambda _call: [()], result="int64")
def _size(x: np.ndarray) -> np.ndarray:
    return np.asarray(x.size, np.int64)


@operator("ConstantOfShape", shapes=lambda call: [tuple(integers(call.value(0)))])
def _constant_of_shape(shape: np.ndarray, *, value: Leaf | None = None) -> np.ndarray:
    fill = np.zeros((), np.float32) if value is None else value.array().reshape(())
    return np.broadcast_to(fill, integers(shape))


def _range_length(start: Any, limit: Any, delta: Any) -> int:
    first, last, step = (float(np.asarray(array).reshape(())) for array in (start, limit, delta))
    return max(0, math.ceil((last - first) / step))


@operator("Range", shapes=lambda call: [(_range_length(call.value(0), call.value(1), call.value(2)),)])
def _range(
    start: np.ndarray, limit: np.ndarray, delta: np.ndarray, *, stash_type: str = "float32"
) -> np.ndarray:
    length = _range_length(start, limit, delta)
    kind = start.dtype
    wide = kind if kind.kind in "iu" or kind == np.float64 else dtypes.numpy_dtype(stash_type)
    steps = np.arange(length).astype(wide)
    return (start.reshape(()).astype(wide) + steps * delta.reshape(()).astype(wide)).astype(kind)


@operator("EyeLike", shapes=lambda call: [call.shape(0)])
def _eye_like(x: np.ndarray, *, dtype: str | None = None, k: int = 0) -> np.ndarray:
    rows, columns = x.shape
    return np.eye(rows, columns, k, x.dtype if dtype is None else dtypes.numpy_dtype(dtype))


@operator("OneHot")
def _one_hot(indices: np.ndarray, depth: np.ndarray, values: np.ndarray, *, axis: int = -1) -> np.ndarray:
    count = int(np.asarray(depth).reshape(()))
    require_size([*indices.shape, count])
    whole = np.asarray(indices, np.int64)
    whole = np.where(whole < 0, whole + count, whole)
    hot = np.moveaxis(np.arange(count) == whole[..., None], -1, axis)
    return np.where(hot, values[1], values[0]).astype(values.dtype)


@operator("NonZero")
def _nonzero(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.nonzero(x), np.int64).reshape(x.ndim, -1)


@operator("Unique")
def _unique(x: np.ndarray, *, axis: int | None = None, sorted: int = 1) -> tuple[np.ndarray, ...]:  # noqa: A002
    unique, first, inverse, counts = np.unique(
        x, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    order = np.arange(len(first)) if sorted else np.argsort(first)
    ranks = np.argsort(order)
    values = unique[order] if axis is None else np.take(unique, order, axis)
    positions = (first[order], ranks[inverse.reshape(-1)], counts[order])
    return (values, *(np.asarray(array, np.int64) for array in positions))


@operator("Col2Im")
def _image_of_columns(
    columns: np.ndarray,
    image: np.ndarray,
    block: np.ndarray,
    *,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> np.ndarray:
    extents, kernel = integers(image), integers(block)
    count = len(extents)
    wide, steps = dilations or (1,) * count, strides or (1,) * count
    both = pads or (0,) * (2 * count)
    padded = [extents[n] + both[n] + both[n + count] for n in range(count)]
    places = [(padded[n] - wide[n] * (kernel[n] - 1) - 1) // steps[n] + 1 for n in range(count)]
    rows, channels = columns.shape[0], columns.shape[1] // math.prod(kernel)
    require_size([rows, channels, *padded])
    result: Any = np.zeros((rows, channels, *padded), columns.dtype)
    split: Any = columns.reshape(rows, channels, *kernel, *places)
    for offset in np.ndindex(*kernel):
        target = tuple(
            slice(o * w, o * w + s * (p - 1) + 1, s)
            for o, w, s, p in zip(offset, wide, steps, places, strict=True)
        )
        result[..., *target] += split[:, :, *offset]
    return result[..., *(slice(both[n], both[n] + extents[n]) for n in range(count))]
