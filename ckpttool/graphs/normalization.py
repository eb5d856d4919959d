"""Operators that normalize: by batch statistics, layers, groups, instances, powers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ckpttool.core import dtypes
from ckpttool.core.dtypes import np
from ckpttool.core.source import Shape
from ckpttool.graphs.operators import OperatorCall, broadcast_shapes, operator, same_shape


def _per_channel(x: np.ndarray, rank: int) -> np.ndarray:
    """Return a number for each channel, on axis 1 of an image."""
    return x.reshape(-1, *[1] * (rank - 2))


def _channels_shape(call: OperatorCall) -> Sequence[Shape]:
    """Return the input's shape; raise ValueError unless the scale has a number for each channel."""
    shape, scale = call.shape(0), call.shape(1)
    if (shape[1],) != scale:
        raise ValueError(scale)
    return [shape]


def _batch_norm_shape(call: OperatorCall) -> Sequence[Shape]:
    return [*_channels_shape(call), *[call.shape(3)] * (len(call.node.outputs) - 1)]


@operator("BatchNormalization", shapes=_batch_norm_shape, kind="norm", since=7)
def _batch_norm(
    x: np.ndarray,
    scale: np.ndarray,
    bias: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> tuple[np.ndarray, ...]:
    running = (mean, variance)
    if training_mode:
        axes = (0, *range(2, x.ndim))
        batch = (x.mean(axes), x.var(axes))
        running = tuple(
            (old * momentum + new * (1 - momentum)).astype(old.dtype)
            for old, new in zip(running, batch, strict=True)
        )
        mean, variance = batch
    rank = max(x.ndim, 2)
    factor = _per_channel(scale / np.sqrt(variance + np.asarray(epsilon, variance.dtype)), rank)
    result = (x - _per_channel(mean, rank)) * factor + _per_channel(bias, rank)
    return (result.astype(x.dtype), *running)


def normalize(x: np.ndarray, axes: tuple[int, ...], epsilon: float) -> np.ndarray:
    """Return the entries minus their mean, divided by their standard deviation."""
    centered = x - x.mean(axes, keepdims=True)
    variance = np.square(centered).mean(axes, keepdims=True)
    return np.asarray(centered / np.sqrt(variance + np.asarray(epsilon, x.dtype)))


@operator("InstanceNormalization", shapes=_channels_shape, kind="channelwise")
def _instance_norm(
    x: np.ndarray, scale: np.ndarray, bias: np.ndarray, *, epsilon: float = 1e-5
) -> np.ndarray:
    normal = normalize(x, tuple(range(2, x.ndim)), epsilon)
    return (normal * _per_channel(scale, x.ndim) + _per_channel(bias, x.ndim)).astype(x.dtype)


@operator("GroupNormalization", shapes=_channels_shape, kind="channelwise", since=21)
def _group_norm(
    x: np.ndarray,
    scale: np.ndarray,
    bias: np.ndarray,
    *,
    epsilon: float = 1e-5,
    num_groups: int = 0,
    stash_type: str = "float32",
) -> np.ndarray:
    groups = x.astype(dtypes.numpy_dtype(stash_type)).reshape(x.shape[0], num_groups, -1)
    normal = normalize(groups, (2,), epsilon).reshape(x.shape).astype(x.dtype)
    return (normal * _per_channel(scale, x.ndim) + _per_channel(bias, x.ndim)).astype(x.dtype)


def _layer_norm_shape(call: OperatorCall) -> Sequence[Shape]:
    shape = call.shape(0)
    axis = call.get("axis") % len(shape)
    if broadcast_shapes(shape, call.shape(1)) != shape:
        raise ValueError(call.shape(1))
    return [shape, *[(*shape[:axis], *[1] * (len(shape) - axis))] * (len(call.node.outputs) - 1)]


@operator("LayerNormalization", shapes=_layer_norm_shape, kind="norm")
def _layer_norm(
    x: np.ndarray,
    scale: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: str = "float32",
) -> tuple[np.ndarray, ...]:
    wide = x.astype(np.float64 if x.dtype == np.float64 else dtypes.numpy_dtype(stash_type))
    axes = tuple(range(axis % x.ndim, x.ndim))
    mean = wide.mean(axes, keepdims=True)
    centered = wide - mean
    inverse = 1 / np.sqrt(np.square(centered).mean(axes, keepdims=True) + np.asarray(epsilon, wide.dtype))
    result = (centered * inverse).astype(x.dtype) * scale
    return (result if bias is None else result + bias).astype(x.dtype), mean, inverse


@operator("RMSNormalization", shapes=_layer_norm_shape, kind="norm")
def _root_mean_square_norm(
    x: np.ndarray, scale: np.ndarray, *, axis: int = -1, epsilon: float = 1e-5, stash_type: str = "float32"
) -> np.ndarray:
    wide = x.astype(np.float64 if x.dtype == np.float64 else dtypes.numpy_dtype(stash_type))
    axes = tuple(range(axis % x.ndim, x.ndim))
    root = np.sqrt(np.square(wide).mean(axes, keepdims=True) + np.asarray(epsilon, wide.dtype))
    return ((wide / root).astype(x.dtype) * scale).astype(x.dtype)


@operator("MeanVarianceNormalization", shapes=same_shape)
def _mean_variance_norm(x: np.ndarray, *, axes: Sequence[int] = (0, 2, 3)) -> np.ndarray:
    centered = x - x.mean(tuple(axes), keepdims=True)
    deviation = np.sqrt(np.square(centered).mean(tuple(axes), keepdims=True))
    return (centered / (deviation + np.asarray(1e-9, x.dtype))).astype(x.dtype)


@operator("LpNormalization", shapes=same_shape, kind="channelwise")
def _power_norm(x: np.ndarray, *, axis: int = -1, p: int = 2) -> np.ndarray:
    total = np.abs(x) if p == 1 else np.square(x)
    norm: Any = total.sum(axis, keepdims=True)
    norm = norm if p == 1 else np.sqrt(norm)
    return np.where(norm == 0, 0, x / np.where(norm == 0, 1, norm)).astype(x.dtype)


@operator("LRN", shapes=same_shape)
def _local_response_norm(
    x: np.ndarray, *, alpha: float = 0.0001, beta: float = 0.75, bias: float = 1.0, size: int = 1
) -> np.ndarray:
    squares, channels = np.square(x), x.shape[1]
    total = np.zeros_like(x)
    for channel in range(channels):
        first, last = max(0, channel - (size - 1) // 2), channel + math.ceil((size - 1) / 2)
        total[:, channel] = squares[:, first : last + 1].sum(1)
    return (x / (bias + alpha / size * total) ** beta).astype(x.dtype)
