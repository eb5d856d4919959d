"""Operators on images: resizing, sampling at positions, regions and boxes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ckpttool.core.deferred import NamedTuple
from ckpttool.core.dtypes import np
from ckpttool.core.errors import UnsupportedError
from ckpttool.core.source import Shape
from ckpttool.graphs.indexing import integers
from ckpttool.graphs.operators import OperatorCall, operator, require_size


class _ResizeAxis(NamedTuple):
    """Resizing of one axis: extents, scale, and the part of the input that is taken (start, end)."""

    size: int
    target_size: int
    scale: float
    region: tuple[float, float]


def _resize_axes(
    shape: Shape,
    scales: Any,
    sizes: Any,
    axes: Sequence[int] | None,
    policy: str,
    roi: Any = None,
) -> list[_ResizeAxis]:
    """Return how each axis is resized."""
    rank = len(shape)
    chosen = [axis % rank for axis in axes] if axes else list(range(rank))
    regions = [(0.0, 1.0)] * rank
    if roi is not None and np.asarray(roi).size:
        ends = [float(end) for end in np.asarray(roi).reshape(-1)]
        for n, axis in enumerate(chosen):
            regions[axis] = (ends[n], ends[n + len(chosen)])
    factors, target_shape = [1.0] * rank, list(shape)
    if sizes is not None and np.asarray(sizes).size:
        listed = integers(sizes)
        ratios = [size / shape[axis] for size, axis in zip(listed, chosen, strict=True)]
        if policy != "stretch":
            ratio = min(ratios) if policy == "not_larger" else max(ratios)
            listed = [math.floor(ratio * shape[axis] + 0.5) for axis in chosen]
            ratios = [ratio] * len(chosen)
        for axis, size, ratio in zip(chosen, listed, ratios, strict=True):
            target_shape[axis], factors[axis] = size, ratio
    else:
        values = np.asarray(scales).reshape(-1)
        for axis, value in zip(chosen, values, strict=True):
            start, end = regions[axis]
            factors[axis] = float(value)
            # The product has the precision of the factors: 10 times 0.7 is 7 in float32.
            extent = value.dtype.type(shape[axis] * (end - start))
            target_shape[axis] = math.floor(extent * value)
    return [
        _ResizeAxis(size, extent, factor, region)
        for size, extent, factor, region in zip(shape, target_shape, factors, regions, strict=True)
    ]


def _resize_shape(call: OperatorCall) -> Sequence[Shape]:
    listed = [call.value(n) if call.has(n) and call.shape(n) != (0,) else None for n in (1, 2, 3)]
    crop = call.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    axes = _resize_axes(
        call.shape(0),
        listed[1],
        listed[2],
        call.get("axes"),
        call.get("keep_aspect_ratio_policy"),
        listed[0] if crop else None,
    )
    return [tuple(axis.target_size for axis in axes)]


def _source_positions(axis: _ResizeAxis, mode: str) -> np.ndarray:
    """Return the position in the input for each entry of the output, float64 [wanted]."""
    x, scale = np.arange(axis.target_size, dtype=np.float64), axis.scale
    size, count, (start, end) = axis.size, axis.target_size, axis.region
    if mode == "half_pixel":
        return (x + 0.5) / scale - 0.5
    if mode == "half_pixel_symmetric":
        # The center of the input is the center of the output before its extent was rounded.
        adjustment = count / (scale * size)
        return size / 2 * (1 - adjustment) + (x + 0.5) / scale - 0.5
    if mode == "pytorch_half_pixel":
        return (x + 0.5) / scale - 0.5 if count > 1 else np.full(count, -0.5)
    if mode == "align_corners":
        if count != scale * size and abs(count - scale * size) > 1e-3:
            # The reference evaluator divides by the extent before it is rounded, onnxruntime after that.
            raise UnsupportedError("a resize with aligned corners to a fraction of an entry", found="Resize")
        return x * (size - 1) / (count - 1) if count > 1 else np.zeros(count)
    if mode == "asymmetric":
        return x / scale
    if mode == "tf_crop_and_resize":
        if count > 1:
            return start * (size - 1) + x * (end - start) * (size - 1) / (count - 1)
        return np.full(count, 0.5 * (start + end) * (size - 1))
    raise UnsupportedError("an unknown mode of a resize", found=mode)


_NEAREST: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": lambda x: np.floor(x),
    "ceil": lambda x: np.ceil(x),
}


def _linear(distance: np.ndarray) -> np.ndarray:
    return np.maximum(0, 1 - np.abs(distance))


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    x = np.abs(distance)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def _interpolation_matrix(
    axis: _ResizeAxis,
    positions: np.ndarray,
    kernel: Callable[[np.ndarray], np.ndarray],
    reach: int,
    settings: Any,
) -> np.ndarray:
    """Return the weights of the input's entries in each entry of the output, [wanted, size]."""
    antialias, exclude = settings
    stretch = min(axis.scale, 1.0) if antialias else 1.0
    window = math.ceil(reach / stretch)
    require_size([axis.target_size, axis.size])
    require_size([axis.target_size, 2 * window])
    matrix = np.zeros((axis.target_size, axis.size))
    rows = np.arange(axis.target_size)
    for offset in range(-window + 1, window + 1):
        indices = np.floor(positions).astype(np.int64) + offset
        weight = kernel((positions - indices) * stretch)
        if exclude:
            weight = np.where((indices < 0) | (indices >= axis.size), 0, weight)
        np.add.at(matrix, (rows, np.clip(indices, 0, axis.size - 1)), weight)
    if exclude or antialias:
        matrix /= matrix.sum(1, keepdims=True)
    return matrix


@operator("Resize", shapes=_resize_shape, kind="window")
def _resize(
    x: np.ndarray,
    roi: np.ndarray | None = None,
    scales: np.ndarray | None = None,
    sizes: np.ndarray | None = None,
    *,
    antialias: int = 0,
    axes: Sequence[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> np.ndarray:
    crop = coordinate_transformation_mode == "tf_crop_and_resize"
    resized = _resize_axes(x.shape, scales, sizes, axes, keep_aspect_ratio_policy, roi if crop else None)
    result, outside = x, np.zeros((), bool)
    for n, axis in enumerate(resized):
        if axis.target_size == axis.size and axis.scale == 1 and axis.region == (0.0, 1.0):
            continue
        positions = _source_positions(axis, coordinate_transformation_mode)
        if crop:
            beyond = (positions < 0) | (positions > axis.size - 1)
            outside = outside | beyond.reshape([-1 if m == n else 1 for m in range(x.ndim)])
        if mode == "nearest":
            nearest = _NEAREST[nearest_mode](positions).astype(np.int64)
            result = np.take(result, np.clip(nearest, 0, axis.size - 1), n)
            continue
        if mode == "linear":
            kernel, reach = _linear, 1
        elif mode == "cubic":
            kernel, reach = (lambda distance: _cubic(distance, cubic_coeff_a)), 2
        else:
            raise UnsupportedError("an unknown mode of a resize", found=mode)
        matrix = _interpolation_matrix(axis, positions, kernel, reach, (antialias, exclude_outside))
        result = np.moveaxis(np.tensordot(matrix, np.moveaxis(result, n, 0).astype(np.float64), 1), 0, n)
    if x.dtype.kind in "iu" and mode != "nearest":
        limits = np.iinfo(x.dtype)
        result = np.clip(np.rint(result), limits.min, limits.max)
    filled = np.where(outside, extrapolation_value, result) if outside.any() else result
    return filled.astype(x.dtype)


def _reflect(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return positions mirrored at both ends of a range."""
    span = high - low
    if span <= 0:
        return np.zeros_like(x)
    away = np.abs(x - low)
    turns, rest = np.floor(away / span), np.fmod(away, span)
    return np.where(turns % 2 == 0, low + rest, high - rest)


def _take_at(x: np.ndarray, positions: Sequence[np.ndarray], padding: str, align: int) -> np.ndarray:
    """Return the entries of an image [channels, ...] at whole positions, with padding outside."""
    inside, places = np.ones((), bool), []
    for size, position in zip(x.shape[1:], positions, strict=True):
        if padding == "border":
            position = np.clip(position, 0, size - 1)
        elif padding == "reflection":
            ends = (0.0, size - 1.0) if align else (-0.5, size - 0.5)
            position = np.clip(_reflect(position.astype(np.float64), *ends), 0, size - 1)
        elif padding != "zeros":
            raise UnsupportedError("an unknown padding of a grid", found=padding)
        inside = inside & (position >= 0) & (position < size)
        places.append(np.clip(position, 0, size - 1).astype(np.int64))
    return np.where(inside, x[:, *places], 0)


def _grid_shape(call: OperatorCall) -> Sequence[Shape]:
    return [(*call.shape(0)[:2], *call.shape(1)[1:-1])]


@operator("GridSample", shapes=_grid_shape)
def _grid_sample(
    x: np.ndarray,
    grid: np.ndarray,
    *,
    align_corners: int = 0,
    mode: str = "linear",
    padding_mode: str = "zeros",
) -> np.ndarray:
    results = []
    for image, points in zip(x, grid, strict=True):
        # The grid lists the last axis first; -1 and 1 are the ends of the image.
        positions = [
            (points[..., -1 - n] + 1) / 2 * (size - 1)
            if align_corners
            else ((points[..., -1 - n] + 1) * size - 1) / 2
            for n, size in enumerate(image.shape[1:])
        ]
        if padding_mode == "border" and mode != "cubic":
            positions = [np.clip(p, 0, size - 1) for p, size in zip(positions, image.shape[1:], strict=True)]
        elif padding_mode == "reflection" and mode != "cubic":
            ends = [(0.0, s - 1.0) if align_corners else (-0.5, s - 0.5) for s in image.shape[1:]]
            positions = [_reflect(p.astype(np.float64), *e) for p, e in zip(positions, ends, strict=True)]
        results.append(_interpolate(image, positions, mode, padding_mode, align_corners))
    return np.stack(results).astype(x.dtype)


def _interpolate(
    image: np.ndarray, positions: Sequence[np.ndarray], mode: str, padding: str, align: int
) -> np.ndarray:
    """Return an image [channels, ...] between its entries."""
    if mode == "nearest":
        return _take_at(image, [np.rint(p) for p in positions], padding, align)
    if mode == "linear":
        kernel, offsets = _linear, range(2)
    elif mode == "cubic":
        kernel, offsets = (lambda distance: _cubic(distance, -0.75)), range(-1, 3)
    else:
        raise UnsupportedError("an unknown mode of a grid", found=mode)
    total = np.zeros((image.shape[0], *positions[0].shape))
    for offset in np.ndindex(*[len(offsets)] * len(positions)):
        places = [np.floor(p) + offsets[o] for p, o in zip(positions, offset, strict=True)]
        weight = math.prod(kernel(p - position) for p, position in zip(positions, places, strict=True))
        total += weight * _take_at(image, places, padding, align)
    return total


@operator("AffineGrid", shapes=lambda call: [_affine_shape(integers(call.value(1)))])
def _affine_grid(theta: np.ndarray, size: np.ndarray, *, align_corners: int = 0) -> np.ndarray:
    extents = integers(size)[2:]
    axes = [
        np.linspace(-1, 1, n)
        if align_corners and n > 1
        else (2 * np.arange(n) + 1) / n - 1
        if n
        else np.zeros(n)
        for n in extents
    ]
    grids = np.meshgrid(*axes, indexing="ij")
    points = np.stack([*reversed(grids), np.ones(extents)], -1)
    return np.einsum("...k,nck->n...c", points, theta).astype(theta.dtype)


def _affine_shape(size: Sequence[int]) -> Shape:
    return (size[0], *size[2:], len(size) - 2)


def _region_shape(call: OperatorCall) -> Sequence[Shape]:
    return [(call.shape(1)[0], call.shape(0)[1], call.get("output_height"), call.get("output_width"))]


@operator("RoiAlign", shapes=_region_shape)
def _align_regions(
    x: np.ndarray,
    rois: np.ndarray,
    batches: np.ndarray,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> np.ndarray:
    half = coordinate_transformation_mode == "half_pixel"
    shift, extents = 0.5 if half else 0.0, (output_height, output_width)
    results = []
    for roi, batch in zip(rois, batches, strict=True):
        left, top, right, bottom = (float(end) * spatial_scale - shift for end in roi)
        positions, counts = [], []
        for start, end, bins in ((top, bottom, extents[0]), (left, right, extents[1])):
            length = end - start if half else max(end - start, 1.0)
            count = sampling_ratio if sampling_ratio > 0 else math.ceil(length / bins)
            require_size([bins, max(count, 1)])
            places = (np.arange(bins * count) + 0.5) * (length / (bins * count) if count else 0) + start
            positions.append(places)
            counts.append(count)
        samples = [
            _clamped(image_axis, size) for image_axis, size in zip(positions, x.shape[2:], strict=True)
        ]
        (rows, inside_rows, row_weights), (columns, inside_columns, column_weights) = samples
        require_size([x.shape[1], len(positions[0]), len(positions[1])])
        parts = [
            x[int(batch)][:, rows[a][:, None], columns[b]] * (row_weights[a][:, None] * column_weights[b])
            for a in range(2)
            for b in range(2)
        ]
        inside = inside_rows[:, None] & inside_columns
        blocks = [
            np.where(inside, part, 0).reshape(-1, extents[0], counts[0], extents[1], counts[1])
            for part in parts
        ]
        # The largest product of an entry and its weight, or the mean of the interpolated entries.
        if mode == "max":
            results.append(np.maximum.reduce(blocks).max((2, 4)))
        else:
            results.append(np.add.reduce(blocks).mean((2, 4)))
    return np.stack(results).astype(x.dtype) if results else np.zeros((0, x.shape[1], *extents), x.dtype)


def _clamped(positions: np.ndarray, size: int) -> tuple[list[np.ndarray], np.ndarray, list[np.ndarray]]:
    """Return the entries before and after positions, which of these are inside, and the weights."""
    inside = (positions >= -1) & (positions <= size)
    clamped = np.clip(positions, 0, size - 1)
    low = np.floor(clamped).astype(np.int64)
    high = np.minimum(low + 1, size - 1)
    return [low, high], inside, [1 - (clamped - low), clamped - low]


@operator("NonMaxSuppression")
def _suppress_boxes(
    boxes: np.ndarray,
    scores: np.ndarray,
    most: np.ndarray | None = None,
    overlap: np.ndarray | None = None,
    least: np.ndarray | None = None,
    *,
    center_point_box: int = 0,
) -> np.ndarray:
    count = 0 if most is None else int(np.asarray(most).reshape(()))
    threshold = 0.0 if overlap is None else float(np.asarray(overlap).reshape(()))
    selections = []
    for batch, class_ in np.ndindex(*scores.shape[:2]):
        corners = _box_corners(boxes[batch], center_point_box)
        values, selected = scores[batch, class_], list[int]()
        for box in np.argsort(-values, kind="stable"):
            if len(selected) >= count:
                break
            if least is not None and values[box] <= float(np.asarray(least).reshape(())):
                continue
            if all(_overlap(corners[box], corners[other]) <= threshold for other in selected):
                selected.append(int(box))
        selections += [(batch, class_, box) for box in selected]
    return np.asarray(selections, np.int64).reshape(-1, 3)


def _box_corners(boxes: np.ndarray, centered: int) -> np.ndarray:
    """Return boxes as (low, low, high, high)."""
    if centered:
        middle, half = boxes[:, :2], boxes[:, 2:] / 2
        return np.concatenate([middle - half, middle + half], 1)
    return np.concatenate([np.minimum(boxes[:, :2], boxes[:, 2:]), np.maximum(boxes[:, :2], boxes[:, 2:])], 1)


def _overlap(one: np.ndarray, two: np.ndarray) -> float:
    """Return the area that two boxes share, divided by the area that they cover."""
    sides = np.maximum(0, np.minimum(one[2:], two[2:]) - np.maximum(one[:2], two[:2]))
    shared = float(np.prod(sides))
    whole = float(np.prod(one[2:] - one[:2]) + np.prod(two[2:] - two[:2])) - shared
    return shared / whole if whole > 0 else 0.0
