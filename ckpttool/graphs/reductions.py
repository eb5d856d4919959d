"""Operators along axes: sums, extremes and their positions, running sums, softmax, losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ckpttool.core.dtypes import np
from ckpttool.core.source import Shape
from ckpttool.graphs.indexing import integers
from ckpttool.graphs.operators import OperatorCall, OperatorNames, operator, same_shape


def _reduced_axes(axes: Any, rank: int, noop: int) -> tuple[int, ...]:
    """Return the axes that a reduction removes: all, or none with `noop`, if the input lists none."""
    chosen = [] if axes is None else [axis % rank for axis in integers(axes)]
    return tuple(chosen) if chosen or noop else tuple(range(rank))


def _shape_without(shape: Shape, axes: Sequence[int], *, keep: bool) -> Shape:
    return tuple(1 if n in axes else extent for n, extent in enumerate(shape) if keep or n not in axes)


def _reduced_shape(call: OperatorCall) -> Sequence[Shape]:
    shape = call.shape(0)
    listed = call.value(1) if call.has(1) else None
    axes = _reduced_axes(listed, len(shape), call.get("noop_with_empty_axes"))
    return [_shape_without(shape, axes, keep=bool(call.get("keepdims")))]


def _log_sum_exp(x: np.ndarray, **axes: Any) -> Any:
    most = x.max(axis=axes["axis"], keepdims=True, initial=-np.inf)
    most = np.where(np.isfinite(most), most, 0)
    total = np.exp(x - most).sum(axis=axes["axis"], keepdims=True)
    return (np.log(total) + most).reshape(total.sum(**axes).shape)


def _extreme(name: str) -> Callable[..., Any]:
    def compute(x: np.ndarray, **axes: Any) -> Any:
        if math.prod(x.shape[axis] for axis in axes["axis"]):
            return getattr(np, name)(x, **axes)
        least = -np.inf if name == "max" else np.inf
        limits = np.iinfo(x.dtype) if x.dtype.kind in "iu" else None
        empty = least if limits is None else (limits.min if name == "max" else limits.max)
        return np.full(np.sum(x, **axes).shape, name == "min" if x.dtype == bool else empty)

    return compute


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "ReduceSum": lambda x, **axes: np.sum(x, **axes),
    "ReduceMean": lambda x, **axes: np.mean(x, **axes),
    "ReduceProd": lambda x, **axes: np.prod(x, **axes),
    "ReduceMax": _extreme("max"),
    "ReduceMin": _extreme("min"),
    "ReduceL1": lambda x, **axes: np.abs(x).sum(**axes),
    "ReduceL2": lambda x, **axes: np.sqrt(np.square(x).sum(**axes)),
    "ReduceSumSquare": lambda x, **axes: np.square(x).sum(**axes),
    "ReduceLogSum": lambda x, **axes: np.log(x.sum(**axes)),
    "ReduceLogSumExp": _log_sum_exp,
}


def _define_reduction(name: str, function: Callable[..., Any]) -> None:
    def compute(
        x: np.ndarray, axes: np.ndarray | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> np.ndarray:
        chosen = _reduced_axes(axes, x.ndim, noop_with_empty_axes)
        return np.asarray(function(x, axis=chosen, keepdims=bool(keepdims))).astype(x.dtype)

    operator(name, shapes=_reduced_shape, kind="reduction")(compute)


for _name, _function in _REDUCTIONS.items():
    _define_reduction(_name, _function)


def _position_shape(call: OperatorCall) -> Sequence[Shape]:
    shape = call.shape(0)
    return [_shape_without(shape, [call.get("axis") % len(shape)], keep=bool(call.get("keepdims")))]


def _define_position(name: str, function: str) -> None:
    def compute(x: np.ndarray, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> np.ndarray:
        # Of equal entries the first is taken, or the last.
        position = getattr(np, function)(np.flip(x, axis) if select_last_index else x, axis=axis)
        if select_last_index:
            position = x.shape[axis] - 1 - position
        return np.asarray(np.expand_dims(position, axis) if keepdims else position, np.int64)

    operator(name, shapes=_position_shape, result="int64")(compute)


_define_position("ArgMax", "argmax")
_define_position("ArgMin", "argmin")


def _top_shape(call: OperatorCall) -> Sequence[Shape]:
    shape = list(call.shape(0))
    shape[call.get("axis")] = int(np.asarray(call.value(1)).reshape(()))
    return [tuple(shape)] * 2


@operator("TopK", shapes=_top_shape)
def _top(
    x: np.ndarray,
    k: np.ndarray,
    *,
    axis: int = -1,
    largest: int = 1,
    sorted: int = 1,  # noqa: A002, ARG001  # sorted values are allowed in either case
) -> tuple[np.ndarray, np.ndarray]:
    count = int(np.asarray(k).reshape(()))
    # Of equal entries the one with the lower position comes first.
    if largest:
        last = x.shape[axis] - 1
        order = last - np.flip(np.argsort(np.flip(x, axis), axis, kind="stable"), axis)
    else:
        order = np.argsort(x, axis, kind="stable")
    positions = np.take(order, range(count), axis)
    return np.take_along_axis(x, positions, axis), positions.astype(np.int64)


def _accumulate(name: str) -> Callable[..., Any]:
    def compute(x: np.ndarray, axis: np.ndarray, *, exclusive: int = 0, reverse: int = 0) -> np.ndarray:
        along, function = int(np.asarray(axis).reshape(())), getattr(np, name)
        whole = np.flip(x, along) if reverse else x
        result = function.accumulate(whole, along, dtype=x.dtype)
        if exclusive:
            first = np.full_like(np.take(result, [0], along), function.identity)
            result = np.concatenate([first, np.take(result, range(x.shape[along] - 1), along)], along)
        return np.flip(result, along) if reverse else result

    return compute


operator("CumSum", shapes=same_shape)(_accumulate("add"))
operator("CumProd", shapes=same_shape)(_accumulate("multiply"))


@operator("Softmax", shapes=same_shape, kind="channelwise", spelling=OperatorNames(1, tensorflow="Softmax"))
def softmax(x: np.ndarray, *, axis: int = -1) -> np.ndarray:
    """Return exponentials divided by their sum along an axis."""
    wide = x.astype(np.float32) if x.dtype.itemsize < 4 else x
    powers = np.exp(wide - wide.max(axis, keepdims=True, initial=-np.inf))
    return (powers / powers.sum(axis, keepdims=True)).astype(x.dtype)


@operator(
    "LogSoftmax", shapes=same_shape, kind="channelwise", spelling=OperatorNames(1, tensorflow="LogSoftmax")
)
def log_softmax(x: np.ndarray, *, axis: int = -1) -> np.ndarray:
    """Return the logarithm of the softmax along an axis."""
    shifted = x - x.max(axis, keepdims=True, initial=-np.inf)
    return (shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))).astype(x.dtype)


@operator("Hardmax", shapes=same_shape)
def _hardmax(x: np.ndarray, *, axis: int = -1) -> np.ndarray:
    positions = np.arange(x.shape[axis]).reshape([-1 if n == axis % x.ndim else 1 for n in range(x.ndim)])
    return (positions == np.expand_dims(x.argmax(axis), axis)).astype(x.dtype)


def _loss(
    scores: np.ndarray, target: np.ndarray, weight: np.ndarray | None, reduction: str, ignored: int | None
) -> np.ndarray:
    """Return the negative scores of the target classes, [batch, ...] or reduced; classes are on axis 1."""
    classes = np.where(target == ignored, 0, target) if ignored is not None else target
    losses = -np.take_along_axis(scores, np.expand_dims(classes, 1), 1).squeeze(1)
    factors = np.ones(losses.shape, scores.dtype) if weight is None else weight[classes]
    if ignored is not None:
        factors = np.where(target == ignored, 0, factors).astype(scores.dtype)
    losses = losses * factors
    if reduction == "sum":
        return np.asarray(losses.sum()).astype(scores.dtype)
    if reduction == "mean":
        plain = weight is None and ignored is None
        return np.asarray(losses.mean() if plain else losses.sum() / factors.sum()).astype(scores.dtype)
    return {"none": losses}[reduction].astype(scores.dtype)


@operator("NegativeLogLikelihoodLoss")
def _likelihood_loss(
    scores: np.ndarray,
    target: np.ndarray,
    weight: np.ndarray | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int | None = None,
) -> np.ndarray:
    return _loss(scores, target, weight, reduction, ignore_index)


@operator("SoftmaxCrossEntropyLoss")
def _cross_entropy_loss(
    scores: np.ndarray,
    target: np.ndarray,
    weight: np.ndarray | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    logarithms = log_softmax(scores, axis=1)
    return _loss(logarithms, target, weight, reduction, ignore_index), logarithms
