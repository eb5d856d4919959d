"""Operators on quantized numbers: integers with a scale and a zero point."""

from __future__ import annotations

from functools import partial
from typing import Any

from ckpttool.core import dtypes
from ckpttool.core.dtypes import np
from ckpttool.graphs.elementwise import cast
from ckpttool.graphs.operators import operator, same_shape
from ckpttool.graphs.products import matmul_macs, matmul_shape
from ckpttool.graphs.windows import conv_macs, conv_shape, convolve


def _along(parameter: np.ndarray, x: np.ndarray, axis: int, block_size: int) -> np.ndarray:
    """Return a scale or zero point in a shape that broadcasts to x: per tensor, per axis or per block."""
    if parameter.ndim == 0:
        return parameter
    if block_size:
        repeated = np.repeat(parameter, block_size, axis)
        return np.take(repeated, range(x.shape[axis]), axis)
    if parameter.size == 1 and parameter.ndim == 1:
        return parameter.reshape(())
    return parameter.reshape([-1 if n == axis % x.ndim else 1 for n in range(x.ndim)])


def quantize(
    x: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray,
    *,
    saturate: int = 1,
    precision: np.dtype | None = None,
) -> np.ndarray:
    """Return x / scale + zero in the type of `zero`, rounded to even and saturated.

    Args:
        x: the numbers.
        scale: the size of a step; broadcasts with `x`.
        zero: the integer of zero; its type is that of the result.
        saturate: for float8 types: 0 gives infinity or NaN beyond the largest number.
        precision: the type of the division; by default float32 at least.
    """
    wide = precision or (np.dtype(np.float32) if x.dtype.itemsize < 4 or x.dtype.kind in "iu" else x.dtype)
    ratio = x.astype(wide) / scale.astype(wide)
    if zero.dtype.name.startswith("float"):
        return np.asarray(cast(ratio, to=zero.dtype.name, saturate=saturate))
    import ml_dtypes

    limits = ml_dtypes.iinfo(zero.dtype)  # type: ignore[no-untyped-call]
    whole = np.rint(ratio).astype(np.float64) + zero.astype(np.int64)
    return np.clip(whole, limits.min, limits.max).astype(np.int64).astype(zero.dtype)


@operator("QuantizeLinear", shapes=same_shape)
def _quantize_linear(
    x: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: str | None = None,
    precision: str | None = None,
    saturate: int = 1,
) -> np.ndarray:
    if zero is None:
        zero = np.zeros((), dtypes.numpy_dtype(output_dtype or "uint8"))
    wide = None if precision is None else dtypes.numpy_dtype(precision)
    scales, zeros = (_along(setting, x, axis, block_size) for setting in (scale, zero))
    return quantize(x, scales, zeros, saturate=saturate, precision=wide)


@operator("DequantizeLinear", shapes=same_shape)
def _dequantize_linear(
    x: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: str | None = None,
) -> np.ndarray:
    return _dequantize(
        x, _along(scale, x, axis, block_size), None if zero is None else _along(zero, x, axis, block_size)
    ).astype(scale.dtype if output_dtype is None else dtypes.numpy_dtype(output_dtype))


def _dequantize(x: np.ndarray, scale: np.ndarray, zero: np.ndarray | None) -> np.ndarray:
    wide = scale.dtype if scale.dtype == np.float64 else np.dtype(np.float32)
    if x.dtype.name.startswith("float") or zero is None:
        return np.asarray(x.astype(wide) * scale.astype(wide))
    return (x.astype(np.int64) - zero.astype(np.int64)).astype(wide) * scale.astype(wide)


@operator("DynamicQuantizeLinear", shapes=lambda call: [call.shape(0), (), ()])
def _quantize_dynamically(x: np.ndarray) -> tuple[np.ndarray, ...]:
    low, high = np.minimum(x.min(), 0), np.maximum(x.max(), 0)
    scale = np.asarray((high - low) / np.asarray(255, x.dtype), np.float32)
    # An all-zero tensor has the scale 0, with which nothing can be divided.
    divisor = scale if scale else np.float32(1)
    zero = np.asarray(np.clip(np.rint(-low / divisor), 0, 255), np.uint8)
    return quantize(x, np.asarray(divisor), zero), scale, zero


def _centered(x: np.ndarray, zero: np.ndarray | None, axis: int) -> np.ndarray:
    """Return integers minus their zero point, which may be one for each row (axis -2) or column (-1)."""
    wide = x.astype(np.int32)
    if zero is None:
        return wide
    shift = zero.astype(np.int32)
    return wide - (shift[..., None] if axis == -2 and shift.ndim == 1 and shift.size > 1 else shift)


@operator("MatMulInteger", shapes=matmul_shape, macs=matmul_macs)
def _matmul_integers(
    a: np.ndarray, b: np.ndarray, a_zero: np.ndarray | None = None, b_zero: np.ndarray | None = None
) -> np.ndarray:
    return np.asarray(np.matmul(_centered(a, a_zero, -2), _centered(b, b_zero, -1)))


@operator("QLinearMatMul", shapes=partial(matmul_shape, right=3), macs=matmul_macs)
def _matmul_quantized(*inputs: np.ndarray) -> np.ndarray:
    a, a_scale, a_zero, b, b_scale, b_zero, scale, zero = inputs
    product = np.matmul(_centered(a, a_zero, -2), _centered(b, b_zero, -1))
    rows = a_scale[..., None] if a_scale.ndim == 1 and a_scale.size > 1 else a_scale
    factor = rows.astype(np.float32) * b_scale.astype(np.float32) / scale.astype(np.float32)
    return quantize(product * factor, np.ones((), np.float32), zero)


@operator("ConvInteger", shapes=conv_shape, macs=conv_macs)
def _conv_integers(
    x: np.ndarray,
    w: np.ndarray,
    x_zero: np.ndarray | None = None,
    w_zero: np.ndarray | None = None,
    **attributes: Any,
) -> np.ndarray:
    image = x.astype(np.int32) - (0 if x_zero is None else x_zero.astype(np.int32))
    zeros = 0 if w_zero is None else _along(w_zero, w, 0, 0).astype(np.int32)
    return np.asarray(convolve(image, w.astype(np.int32) - zeros, **attributes))


@operator("QLinearConv", shapes=partial(conv_shape, weight=3), macs=partial(conv_macs, weight=3))
def _conv_quantized(*inputs: np.ndarray, **attributes: Any) -> np.ndarray:
    x, x_scale, x_zero, w, w_scale, w_zero, scale, zero, *bias = inputs
    kernel = w.astype(np.int32) - _along(w_zero, w, 0, 0).astype(np.int32)
    total = convolve(x.astype(np.int32) - x_zero.astype(np.int32), kernel, *bias, **attributes)
    factor = x_scale * _along(w_scale, total, 1, 0) / scale
    return quantize(total * factor.astype(np.float32), np.ones((), np.float32), zero)


for _function in (_conv_integers, _conv_quantized):
    _function.__kwdefaults__ = convolve.__kwdefaults__
