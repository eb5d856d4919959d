"""Attention, and the rotary positions of its inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ckpttool.core import dtypes
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.dtypes import np
from ckpttool.core.source import Shape
from ckpttool.graphs.operators import OperatorCall, operator, same_shape
from ckpttool.graphs.reductions import softmax


def _split_heads(x: np.ndarray, heads: int | None) -> np.ndarray:
    """Return [batch, heads, steps, width] for [batch, steps, heads * width]."""
    if x.ndim == 4:
        return x
    if not heads:
        raise ValueError(heads)
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


class _Visibility(NamedTuple):
    """Which keys a query sees: those before it, and those within a window; -1 is an open side."""

    causal: int
    left: int
    right: int

    def mask(self, queries: int, keys: int, offsets: np.ndarray) -> np.ndarray:
        """Return the pairs that see each other, bool [batch, 1, queries, keys], from positions `offsets`."""
        distance = np.arange(keys) - (np.arange(queries)[:, None] + offsets.reshape(-1, 1, 1, 1))
        visible = np.ones(distance.shape, bool)
        if self.causal:
            visible &= distance <= 0
        if self.left >= 0:
            visible &= distance >= -self.left
        if self.right >= 0:
            visible &= distance <= self.right
        return visible


def _widen_mask(mask: np.ndarray | None, scores: np.ndarray) -> Any:
    """Return what a mask adds to the scores: 0 or minus infinity for a boolean one."""
    if mask is None:
        return 0
    bias = np.where(mask, 0, -np.inf).astype(scores.dtype) if mask.dtype == bool else mask
    # A mask that is too short hides the other keys.
    short = scores.shape[-1] - bias.shape[-1]
    if short <= 0:
        return bias
    return np.pad(bias, [*[(0, 0)] * (bias.ndim - 1), (0, short)], constant_values=-np.inf)


def _attention_shape(call: OperatorCall) -> Sequence[Shape]:
    flat = len(call.shape(0)) == 3
    queries, keys, values = (
        (*shape[:1], heads, shape[1], shape[2] // heads) if flat and heads else shape
        for shape, heads in (
            (call.shape(0), call.get("q_num_heads")),
            (call.shape(1), call.get("kv_num_heads")),
            (call.shape(2), call.get("kv_num_heads")),
        )
    )
    batch, heads, steps = queries[:3]
    total = keys[2] + (call.shape(4)[2] if call.has(4) else 0)
    result = (batch, steps, heads * values[3]) if flat else (batch, heads, steps, values[3])
    present = [(*array[:2], total, array[3]) for array in (keys, values)]
    return [result, *present, (batch, heads, steps, total)][: max(len(call.node.outputs), 1)]


def _attention_macs(call: OperatorCall, outputs: Sequence[Shape]) -> int:
    """Return the products of queries and keys, and of weights and values."""
    queries, keys = call.shape(0), call.shape(1)
    steps = keys[-2] + (call.shape(4)[2] if call.has(4) else 0)
    return steps * (math.prod(queries) + math.prod(outputs[0]))


@operator("Attention", shapes=_attention_shape, macs=_attention_macs, since=23)
def _attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray | None = None,
    past_k: np.ndarray | None = None,
    past_v: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: str | None = None,
) -> tuple[np.ndarray, ...]:
    flat = q.ndim == 3
    queries = _split_heads(q, q_num_heads)
    keys, values = _split_heads(k, kv_num_heads), _split_heads(v, kv_num_heads)
    past = 0 if past_k is None else past_k.shape[2]
    if past_k is not None and past_v is not None:
        keys, values = np.concatenate([past_k, keys], 2), np.concatenate([past_v, values], 2)
    present = (keys, values)
    groups = queries.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, groups, 1), np.repeat(values, groups, 1)
    # Both factors have the root of the scale, as the operator defines it.
    root = np.asarray(math.sqrt(1 / math.sqrt(queries.shape[-1]) if scale is None else scale), q.dtype)
    products = (queries * root) @ np.swapaxes(keys * root, -1, -2)
    limit = np.asarray(softcap, q.dtype)
    capped = limit * np.tanh(products / limit) if softcap else products
    offsets = np.full(1, past) if lengths is None or past_k is not None else lengths - queries.shape[2]
    visible = _Visibility(is_causal, left_window_size, right_window_size).mask(
        products.shape[2], products.shape[3], offsets
    )
    if lengths is not None:
        visible = visible & (np.arange(keys.shape[2]) < lengths.reshape(-1, 1, 1, 1))
    masked = np.where(visible, capped + _widen_mask(mask, products), -np.inf).astype(q.dtype)
    precise = masked if softmax_precision is None else masked.astype(dtypes.numpy_dtype(softmax_precision))
    weights = softmax(precise).astype(q.dtype)
    # A query that sees no key has no weights.
    weights = np.where(np.isneginf(masked.astype(np.float32)).all(-1, keepdims=True), 0, weights).astype(
        q.dtype
    )
    result = weights @ values
    if flat:
        result = result.transpose(0, 2, 1, 3).reshape(*q.shape[:2], -1)
    stages = (products, capped, masked, weights)
    return (np.asarray(result).astype(q.dtype), *present, stages[qk_matmul_output_mode].astype(q.dtype))


@operator("RotaryEmbedding", shapes=same_shape)
def _rotary_embedding(
    x: np.ndarray,
    cosines: np.ndarray,
    sines: np.ndarray,
    positions: np.ndarray | None = None,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> np.ndarray:
    # [batch, steps, heads, width]
    heads = x.transpose(0, 2, 1, 3) if x.ndim == 4 else x.reshape(*x.shape[:2], num_heads, -1)
    width = rotary_embedding_dim or heads.shape[-1]
    turned, rest = heads[..., :width], heads[..., width:]
    cosine, sine = (
        (table if positions is None else table[positions])[..., None, : width // 2]
        for table in (cosines, sines)
    )
    pairs: Any = (turned[..., ::2], turned[..., 1::2]) if interleaved else np.split(turned, 2, -1)
    real, imaginary = cosine * pairs[0] - sine * pairs[1], sine * pairs[0] + cosine * pairs[1]
    joined = (
        np.stack([real, imaginary], -1).reshape(turned.shape)
        if interleaved
        else np.concatenate([real, imaginary], -1)
    )
    result = np.concatenate([joined, rest], -1)
    return (result.transpose(0, 2, 1, 3) if x.ndim == 4 else result.reshape(x.shape)).astype(x.dtype)
