"""Operators that move a window over an image [batch, channels, ...]: convolution and pooling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckpttool.core.deferred import NamedTuple
from ckpttool.core.dtypes import np
from ckpttool.core.errors import UnsupportedError
from ckpttool.core.source import Shape
from ckpttool.graphs.operators import OperatorCall, operator, require_size

# Entries of a pooling window, which only a number in the file states; they are added one after the other.
_MOST_WINDOW = 1 << 20


class Window(NamedTuple):
    """Positions of a window over an image: one entry for each spatial axis.

    `pads` are (before, after). `extents` are the numbers of positions.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    extents: tuple[int, ...]

    def offsets(self) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Yield each entry of the window, and the entries of the padded image that meet it."""
        for offset in np.ndindex(*self.kernel):
            yield (
                offset,
                tuple(
                    slice(o * d, o * d + s * (e - 1) + 1, s)
                    for o, d, s, e in zip(offset, self.dilations, self.strides, self.extents, strict=True)
                ),
            )

    def padded(self, x: np.ndarray, fill: Any) -> Any:
        """Return the image with its padding, as large as the last window reaches."""
        widths = [(0, 0), (0, 0)]
        for size, (before, after), k, s, d, e in zip(
            x.shape[2:], self.pads, self.kernel, self.strides, self.dilations, self.extents, strict=True
        ):
            widths.append((before, max(after, (e - 1) * s + d * (k - 1) + 1 - size - before)))
        require_size([extent + sum(width) for extent, width in zip(x.shape, widths, strict=True)])
        return np.pad(x, widths, constant_values=fill)


def place_window(
    sizes: Sequence[int], kernel: Sequence[int], get: Callable[[str], Any], *, ceil: bool = False
) -> Window:
    """Return the positions of a window over an image with these spatial extents.

    `get` returns an operator's attribute: strides, dilations, pads, auto_pad. Raise ValueError if they do
    not fit the image.
    """
    rank = len(sizes)
    strides, dilations = get("strides") or (1,) * rank, get("dilations") or (1,) * rank
    listed, automatic = get("pads") or (0,) * (2 * rank), get("auto_pad") or "NOTSET"
    if len(kernel) != rank or min(strides) < 1 or min(dilations) < 1 or min(kernel) < 1:
        raise ValueError(kernel, strides, dilations)
    if automatic == "NOTSET" and len(listed) != 2 * rank:
        raise ValueError(listed)
    pads, extents = [], []
    for n, (size, k, s, d) in enumerate(zip(sizes, kernel, strides, dilations, strict=True)):
        reach = d * (k - 1) + 1
        before, after = listed[n], listed[n + rank]
        if automatic in ("SAME_UPPER", "SAME_LOWER"):
            both = max((-(-size // s) - 1) * s + reach - size, 0)
            before = both // 2 if automatic == "SAME_UPPER" else both - both // 2
            after = both - before
        elif automatic == "VALID":
            before = after = 0
        elif automatic != "NOTSET":
            raise ValueError(automatic)
        room = size + before + after - reach
        count = (-(-room // s) if ceil else room // s) + 1
        # A window that begins in the padding after the image is left out.
        count -= ceil and (count - 1) * s >= size + before
        if min(before, after) < 0 or count < 1:
            raise ValueError(size, before, after)
        pads.append((before, after))
        extents.append(count)
    return Window(tuple(kernel), tuple(strides), tuple(dilations), tuple(pads), tuple(extents))


def conv_shape(call: OperatorCall, weight: int = 1) -> Sequence[Shape]:
    """Return the shape of a convolution of the first input; `weight` is the number of the weight's input."""
    outputs, inputs, *extents = call.shape(weight)
    kernel = tuple(extents)
    if call.get("kernel_shape") not in (None, (), kernel):
        raise ValueError(kernel)
    if call.shape(0)[1] != inputs * (call.get("group") or 1):
        raise ValueError(call.shape(0), call.shape(weight))
    return [(call.shape(0)[0], outputs, *place_window(call.shape(0)[2:], kernel, call.get).extents)]


def conv_macs(call: OperatorCall, outputs: Sequence[Shape], weight: int = 1) -> int:
    """Return a convolution's multiply-accumulate operations; `weight` is as of `conv_shape`."""
    return math.prod(outputs[0]) * math.prod(call.shape(weight)[1:])


def _add_bias(x: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Return the image with a number added to each channel."""
    return x if bias is None else x + bias.reshape(-1, *[1] * (x.ndim - 2))


@operator("Conv", shapes=conv_shape, macs=conv_macs, kind="window")
def convolve(
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,  # noqa: ARG001  # that of w
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> np.ndarray:
    """Return a convolution of x [batch, channels, ...] with w [outputs, channels / group, ...], plus b."""
    batch, channels = x.shape[:2]
    if channels != w.shape[1] * group or w.shape[0] % group:
        raise ValueError(x.shape, w.shape, group)
    settings = {"auto_pad": auto_pad, "dilations": dilations, "pads": pads, "strides": strides}
    window = place_window(x.shape[2:], w.shape[2:], settings.get)
    weight: Any = w
    # One group of channels after the other, and the channels last: a product for each entry of the window.
    image: Any = np.moveaxis(window.padded(x, 0), 1, -1)
    result = np.zeros((batch, *window.extents, w.shape[0]), np.result_type(x, w))
    inner, outer = w.shape[1], w.shape[0] // group
    for offset, entries in window.offsets():
        part, factors = image[:, *entries], weight[..., *offset]
        for n in range(group):
            rows, columns = slice(n * inner, (n + 1) * inner), slice(n * outer, (n + 1) * outer)
            result[..., columns] += part[..., rows] @ factors[columns].T
    return _add_bias(np.moveaxis(result, -1, 1), b)


def _transposed_window(sizes: Sequence[int], kernel: Sequence[int], get: Callable[[str], Any]) -> Window:
    """Return the window of the convolution whose gradient is computed; `extents` are those of the result."""
    rank = len(sizes)
    strides, dilations = get("strides") or (1,) * rank, get("dilations") or (1,) * rank
    added, listed = get("output_padding") or (0,) * rank, get("pads") or (0,) * (2 * rank)
    shape, automatic = get("output_shape"), get("auto_pad") or "NOTSET"
    if len(kernel) != rank or min(strides) < 1 or min(dilations) < 1:
        raise ValueError(kernel, strides, dilations)
    pads, extents = [], []
    for n, (size, k, s, d, more) in enumerate(zip(sizes, kernel, strides, dilations, added, strict=True)):
        whole = s * (size - 1) + more + d * (k - 1) + 1
        before, after = listed[n], listed[n + rank]
        same = automatic in ("SAME_UPPER", "SAME_LOWER")
        if shape is not None or same:
            both = whole - (shape[n - rank] if shape is not None else size * s)
            smaller = both // 2
            before, after = (
                (both - smaller, smaller) if automatic == "SAME_LOWER" else (smaller, both - smaller)
            )
            if shape is not None and automatic != "SAME_UPPER":
                before, after = both - smaller, smaller
        elif automatic == "VALID":
            before = after = 0
        elif automatic != "NOTSET":
            raise ValueError(automatic)
        pads.append((before, after))
        if whole - before - after < 1:
            raise ValueError(size, before, after)
        extents.append(whole - before - after)
    return Window(tuple(kernel), tuple(strides), tuple(dilations), tuple(pads), tuple(extents))


def _transposed_shape(call: OperatorCall) -> Sequence[Shape]:
    sizes, kernel = call.shape(0)[2:], call.shape(1)[2:]
    if call.shape(0)[1] != call.shape(1)[0]:
        raise ValueError(call.shape(0), call.shape(1))
    window = _transposed_window(sizes, kernel, call.get)
    return [(call.shape(0)[0], call.shape(1)[1] * call.get("group"), *window.extents)]


def _transposed_macs(call: OperatorCall, outputs: Sequence[Shape]) -> int:  # noqa: ARG001  # as of any operator
    return math.prod(call.shape(0)) * math.prod(call.shape(1)[1:])


@operator("ConvTranspose", shapes=_transposed_shape, macs=_transposed_macs, kind="window")
def _transposed_conv(
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,  # noqa: ARG001  # that of w
    output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> np.ndarray:
    settings = {
        "auto_pad": auto_pad,
        "dilations": dilations,
        "pads": pads,
        "strides": strides,
        "output_padding": output_padding,
        "output_shape": output_shape,
    }
    window = _transposed_window(x.shape[2:], w.shape[2:], settings.get)
    if x.shape[1] != w.shape[0] or x.shape[1] % group:
        raise ValueError(x.shape, w.shape)
    whole = [
        extent + max(before, 0) + max(after, 0)
        for extent, (before, after) in zip(window.extents, window.pads, strict=True)
    ]
    outputs = w.shape[1] * group
    require_size([x.shape[0], outputs, *whole])
    result: Any = np.zeros((x.shape[0], *whole, outputs), x.dtype)
    kernel: Any = w
    image, inner = np.moveaxis(x, 1, -1), x.shape[1] // group
    scattered = window._replace(extents=x.shape[2:])
    for offset, entries in scattered.offsets():
        for n in range(group):
            rows, columns = slice(n * inner, (n + 1) * inner), slice(n * w.shape[1], (n + 1) * w.shape[1])
            result[:, *entries, columns] += image[..., rows] @ kernel[rows, :, *offset]
    kept = tuple(
        slice(max(b, 0), max(b, 0) + e) for (b, _), e in zip(window.pads, window.extents, strict=True)
    )
    return _add_bias(np.moveaxis(result[:, *kept], -1, 1), b)


def _pool_window(call: OperatorCall) -> Window:
    return place_window(
        call.shape(0)[2:], call.get("kernel_shape"), call.get, ceil=bool(call.get("ceil_mode"))
    )


def _pool_shape(call: OperatorCall) -> Sequence[Shape]:
    return [(*call.shape(0)[:2], *_pool_window(call).extents)]


def _pool_shapes(call: OperatorCall) -> Sequence[Shape]:
    return list(_pool_shape(call)) * len(call.node.outputs)


class _PoolSettings(NamedTuple):
    """The attributes that all pooling operators have."""

    kernel: Sequence[int]
    auto_pad: str
    ceil: int
    dilations: Sequence[int] | None
    pads: Sequence[int] | None
    strides: Sequence[int] | None

    def window(self, x: np.ndarray) -> Window:
        settings = {
            "auto_pad": self.auto_pad,
            "dilations": self.dilations,
            "pads": self.pads,
            "strides": self.strides,
        }
        window = place_window(x.shape[2:], self.kernel, settings.get, ceil=bool(self.ceil))
        if any(k > s + b + a for k, s, (b, a) in zip(window.kernel, x.shape[2:], window.pads, strict=True)):
            raise ValueError(self.kernel)
        if math.prod(window.kernel) > _MOST_WINDOW:
            raise UnsupportedError(
                "a pooling window has too many entries", found=str(math.prod(window.kernel))
            )
        return window


@operator("MaxPool", shapes=_pool_shapes, kind="window")
def _max_pool(
    x: np.ndarray,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int] = (),
    pads: Sequence[int] | None = None,
    storage_order: int = 0,
    strides: Sequence[int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    window = _PoolSettings(kernel_shape, auto_pad, ceil_mode, dilations, pads, strides).window(x)
    least = np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -np.inf
    image = window.padded(x, least)
    # Positions in the whole input, in row-major order, or column-major within each channel.
    order = "F" if storage_order else "C"
    places = np.arange(math.prod(x.shape[2:])).reshape(x.shape[2:], order=order)  # type: ignore[call-overload]
    starts = np.arange(math.prod(x.shape[:2])).reshape(*x.shape[:2], *[1] * (x.ndim - 2)) * places.size
    padded = window.padded(np.broadcast_to(places, (1, 1, *places.shape)), -1)
    best: np.ndarray | None = None
    position = np.zeros((), np.int64)
    for _, entries in window.offsets():
        values, numbers = image[..., *entries], padded[..., *entries]
        if best is None:
            best, position = values.copy(), np.broadcast_to(numbers, values.shape).copy()
        else:
            larger = (values > best) | ((position < 0) & (numbers >= 0))
            best = np.maximum(best, values)
            position = np.where(larger, numbers, position)
    return np.asarray(best), (position + starts).astype(np.int64)


@operator("AveragePool", shapes=_pool_shape, kind="window")
def _average_pool(
    x: np.ndarray,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int] = (),
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> np.ndarray:
    window = _PoolSettings(kernel_shape, auto_pad, ceil_mode, dilations, pads, strides).window(x)
    inside: Any = np.ones((1, 1, *x.shape[2:]), x.dtype)
    if count_include_pad:
        # Padding counts, but not what the last window covers beyond it.
        inside = np.pad(inside, [(0, 0), (0, 0), *window.pads], constant_values=1)
        counted = window._replace(pads=((0, 0),) * len(window.pads)).padded(inside, 0)
    else:
        counted = window.padded(inside, 0)
    image = window.padded(x, 0)
    total = sum(image[..., *entries] for _, entries in window.offsets())
    return np.asarray(total / sum(counted[..., *entries] for _, entries in window.offsets())).astype(x.dtype)


@operator("LpPool", shapes=_pool_shape, kind="window", since=2)
def _power_pool(
    x: np.ndarray,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int] = (),
    p: int = 2,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> np.ndarray:
    window = _PoolSettings(kernel_shape, auto_pad, ceil_mode, dilations, pads, strides).window(x)
    image: Any = np.abs(window.padded(x, 0)) ** p
    total = np.asarray(sum(image[..., *entries] for _, entries in window.offsets()))
    return (total ** (1 / p)).astype(x.dtype)


def _global_shape(call: OperatorCall) -> Sequence[Shape]:
    shape = call.shape(0)
    return [(*shape[:2], *[1] * (len(shape) - 2))]


@operator("GlobalAveragePool", shapes=_global_shape, kind="window")
def _global_average(x: np.ndarray) -> np.ndarray:
    return np.asarray(x.mean(tuple(range(2, x.ndim)), keepdims=True))


@operator("GlobalMaxPool", shapes=_global_shape, kind="window")
def _global_maximum(x: np.ndarray) -> np.ndarray:
    return np.asarray(x.max(tuple(range(2, x.ndim)), keepdims=True))


@operator("GlobalLpPool", shapes=_global_shape, kind="window", since=2)
def _global_power(x: np.ndarray, *, p: int = 2) -> np.ndarray:
    total = (np.abs(x) ** p).sum(tuple(range(2, x.ndim)), keepdims=True)
    return (total ** (1 / p)).astype(x.dtype)


@operator("MaxUnpool")
def _max_unpool(
    x: np.ndarray,
    positions: np.ndarray,
    shape: np.ndarray | None = None,
    *,
    kernel_shape: Sequence[int] = (),
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> np.ndarray:
    rank = x.ndim - 2
    steps, listed = strides or (1,) * rank, pads or (0,) * (2 * rank)
    inferred = [
        (extent - 1) * step - listed[n] - listed[n + rank] + kernel
        for n, (extent, step, kernel) in enumerate(zip(x.shape[2:], steps, kernel_shape, strict=True))
    ]
    whole = (*x.shape[:2], *inferred)
    require_size(whole)
    result = np.zeros(math.prod(whole), x.dtype)
    result[positions.reshape(-1)] = x.reshape(-1)
    if shape is None:
        return result.reshape(whole)
    # The positions are those of the inferred shape, whose image is the first part of the output's.
    extents = tuple(int(extent) for extent in shape)
    require_size(extents)
    return np.pad(
        result.reshape(whole), [(0, extent - size) for extent, size in zip(extents, whole, strict=True)]
    )
