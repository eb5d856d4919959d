"""Computations between layers: formulas of the outputs of earlier layers, tested by their numbers.

Where two models part between layers whose inputs agree, each side's values are compared with the results of
known formulas. If one formula gives A's values and another one B's, the difference is that between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from ckpttool.core.deferred import NamedTuple
from ckpttool.core.kinds import ACTIVATIONS
from ckpttool.core.sidecar import DEFAULT_SLOPE, format_activation
from ckpttool.networks import numpy_backend
from ckpttool.networks.network import Activation


class Term(NamedTuple):
    """An array [batch, ...] with its formula."""

    text: str
    array: np.ndarray


_MOST_ENTRIES, _MOST_COMBINED_ENTRIES = 1 << 14, 1 << 18  # of an operand, at least one row
_MOST_SCORES = 1 << 21  # of one attention
_MOST_COMBINED, _MOST_ATTENDED = 10, 5
# Activations of the parts of sums, products and concatenations.
_USUAL = frozenset(
    ("relu", "sigmoid", "tanh", "silu", "exact gelu", "tanh gelu", "elu", "hard sigmoid", "relu6", "softplus")
)
_BASES = (1e4, 5e5, 1e6)  # of rotary positions
_SAME_FACTOR, _FEWEST_INSIDE = 1e-5, 4
_CARRIED = frozenset(("relu", "tanh"))
_SLOPES = (0.01, 0.1, 0.2, 0.3)


def iter_activations(x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the results of the known activations by name."""
    for name in ACTIVATIONS:
        for slope in _SLOPES if name == "leaky_relu" else (DEFAULT_SLOPE,):
            title = {"linear": "no activation", "gelu": "exact gelu"}.get(name)
            result = numpy_backend.ACTIVATIONS[name](Activation(name, slope))(x)
            yield title or format_activation(name, slope), np.asarray(result, np.float64)
    yield "tanh gelu", 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    yield "hard sigmoid", np.clip(x / 6 + 0.5, 0, 1)


def name_computations(
    operands: Sequence[Term], a: np.ndarray, b: Sequence[np.ndarray], bound: float
) -> tuple[str, str] | None:
    """Return the formulas of A's and of B's values, None unless both are known and differ.

    Args:
        operands: the outputs of earlier layers, which agree on both sides, the last one first.
        a: A's values.
        b: B's values, in each order of axes that gives A's shape.
        bound: the error that is allowed, relative to the largest number.
    """
    rows = max(1, min(len(a), *(_MOST_ENTRIES * len(x) // max(x.size, 1) for _, x in operands)))
    if not a.size or any(len(x) != len(a) for x in (*b, *(x for _, x in operands))):
        return None
    cut = [Term(text, np.asarray(x[:rows], np.float64)) for text, x in operands]
    targets = _Targets([a[:rows], *(array[:rows] for array in b)], bound)
    with np.errstate(all="ignore"):
        targets.match("0", np.zeros_like(targets.first))
        for text, array in _iter_formulas(cut, targets.shapes):
            if targets.match(text, array):
                break
        else:
            for term in cut:
                for each in _activated(term):
                    targets.match_clipped(each)
                targets.match_expectation(term)
            for one, other in itertools.permutations(cut[:_MOST_ATTENDED], 2):
                if one.array.shape == other.array.shape:
                    product = Term(f"{one.text} * {other.text}", one.array * other.array)
                    targets.match_sum(one, other)
                    targets.match_sum(product, one)
    first, *others = targets.names
    second = next((other for other in others if other), None)
    return (first, second) if first and second and first != second else None


class _Targets:
    """The values whose formulas are searched: A's, and B's in several orders of axes."""

    def __init__(self, arrays: Sequence[np.ndarray], bound: float) -> None:
        self._arrays = [np.asarray(array, np.float64) for array in arrays]
        self._flat = [array.reshape(-1) for array in self._arrays]
        self._allowed = [bound * (float(np.abs(array).max(initial=0.0)) or 1.0) for array in self._arrays]
        self.names: list[str | None] = [None] * len(arrays)
        # The places of the largest number of each, and of one that is about half of it.
        largest = [int(np.abs(each).argmax()) for each in self._flat]
        halves = (abs(each - each[n] / 2).argmin() for each, n in zip(self._flat, largest, strict=True))
        self._probes = list(zip(largest, map(int, halves), strict=True))

    @property
    def first(self) -> np.ndarray:
        """A's values."""
        return self._arrays[0]

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """The shapes of the values, with axes of length 1 removed."""
        return {_squeezed(array.shape) for array in self._arrays}

    def match(self, text: str, made: np.ndarray) -> bool:
        """Note the text for values that are a multiple of these; return whether both sides have one."""
        for index, flat in enumerate(self._flat):
            if self.names[index] is None and (factor := self._factor(index, made, flat)):
                self.names[index] = text if factor == 1 else f"{factor:.6g} * ({text})"
        return self.names[0] is not None and any(self.names[1:])

    def _factor(self, place: int, made: np.ndarray, flat: np.ndarray) -> float:
        """Return the number by which an array gives the values, 0 if there is none."""
        if _squeezed(made.shape) != _squeezed(self._arrays[place].shape):
            return 0.0
        own, allowed, (one, other) = made.reshape(-1), self._allowed[place], self._probes[place]
        if not flat[one]:
            return float((np.abs(own) <= allowed).all())
        # Two numbers decide nearly always.
        factor = float(flat[one] / own[one]) if own[one] else 0.0
        factor = 1.0 if abs(own[one] - flat[one]) <= allowed else factor
        if not factor or not abs(factor * own[other] - flat[other]) <= 2 * allowed:
            return 0.0
        factor = factor if factor == 1 else float(own @ flat) / float(own @ own)
        return factor if (np.abs(factor * own - flat) <= allowed).all() else 0.0

    def match_clipped(self, term: Term) -> None:
        """Note the term, clipped to the range of the values, for values without a formula."""
        for index, array in enumerate(self._arrays):
            low, high = float(array.min()), float(array.max())
            inside = (array > low) & (array < high)
            if self.names[index] is not None or array.shape != term.array.shape or not inside.any():
                continue
            factor = float(np.median(array[inside] / term.array[inside]))
            text = term.text if abs(factor - 1) < _SAME_FACTOR else f"{factor:.6g} * {term.text}"
            if np.isfinite(factor) and inside.sum() > _FEWEST_INSIDE:
                self.match(f"clip({text}, {low:g}, {high:g})", np.clip(factor * term.array, low, high))
        self.match(term.text, term.array)

    def match_sum(self, one: Term, other: Term) -> None:
        """Note a sum of multiples of two arrays."""
        for place, flat in enumerate(self._flat):
            if self.names[place] is None and self._arrays[place].shape == one.array.shape:
                columns = np.stack([one.array.reshape(-1), other.array.reshape(-1)], -1)
                factors = np.linalg.lstsq(columns, flat, rcond=None)[0]
                if np.abs(columns @ factors - flat).max() <= self._allowed[place]:
                    self.names[place] = f"{factors[0]:.4g} * {one.text} + {factors[1]:.4g} * {other.text}"

    def match_expectation(self, term: Term) -> None:
        """Note sums of fixed numbers weighed by the features of a row, e.g. of atoms of returns."""
        text, x = term
        for place, each in enumerate(self._arrays):
            count = each.shape[-1]
            if self.names[place] is not None or x.ndim != 2 or each.ndim != 2 or x.shape[1] % count:
                continue
            parts = x.shape[1] // count
            for layout, y in (
                (f"{count} rows", x.reshape(-1, count, parts)),
                (f"{count} columns", np.swapaxes(x.reshape(-1, parts, count), 1, 2)),
            ):
                for name, shares in (
                    ("softmax", _softmax(y, 2)),
                    (f"softmax over the {layout}", _softmax(y, 1)),
                    ("sigmoid", _sigmoid(y)),
                    ("", y),
                ):
                    matrix, values = shares.reshape(-1, parts), each.reshape(-1)
                    if 1 < parts < len(values):
                        support = np.linalg.lstsq(matrix, values, rcond=None)[0]
                        title = f"{name}({text})" if name else text
                        made = (matrix @ support).reshape(each.shape)
                        self.match(f"sum of fixed numbers weighed by {title} in {layout}", made)


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[:1], *(extent for extent in shape[1:] if extent != 1))


def _iter_formulas(operands: Sequence[Term], shapes: set[tuple[int, ...]]) -> Iterator[Term]:
    """Yield formulas of the operands, the simplest first."""
    terms = [term for operand in operands for term in _activated(operand)]
    for term in terms:
        yield term
        yield from _of_one(term, shapes)
    near = [operand for operand in operands if operand.array.size <= _MOST_COMBINED_ENTRIES][:_MOST_COMBINED]
    yield from _of_two(near, shapes, whole=False)
    yield from _of_two([term for operand in near for term in _activated(operand, _USUAL)], shapes)
    yield from _gated(operands)
    yield from _carried(near[:_MOST_ATTENDED])
    yield from _weighed(near)
    yield from _conditioned(near)
    yield from _mixed(operands[:_MOST_COMBINED])
    yield from _attended(operands)


def _activated(operand: Term, names: Collection[str] = ()) -> Iterator[Term]:
    """Yield the operand, and the results of activations, of all or of these names."""
    text, x = operand
    yield operand
    for name, result in iter_activations(x):
        if name != "no activation" and (not names or name in names):
            yield Term(f"{name}({text})", result)
    yield Term(f"exp({text})", np.exp(x))
    yield Term(f"exp({text} / 2)", np.exp(x / 2))
    yield Term(f"square({text})", x * x)
    if not names:
        yield Term(f"sin({text})", np.sin(x))
        yield Term(f"cos({text})", np.cos(x))


def _of_one(term: Term, shapes: set[tuple[int, ...]]) -> Iterator[Term]:
    """Yield what moves, selects or reduces the entries of one array."""
    text, x = term
    for axis in range(1, x.ndim):
        yield Term(f"softmax({text}, axis {axis})", _softmax(x, axis))
        yield Term(f"flip({text}, axis {axis})", np.flip(x, axis))
        for step in (-1, 1):
            yield Term(f"{text} moved by {step} along axis {axis}", np.roll(x, step, axis))
    for axis in range(x.ndim):
        yield Term(f"{text} - mean({text}, axis {axis})", x - x.mean(axis, keepdims=True))
        yield Term(f"{text} - max({text}, axis {axis})", x - x.max(axis, keepdims=True))
    if x.ndim < 3:
        yield from _pieces(term, shapes)
        return
    yield from gathered(term)
    yield from _pooled(term, shapes)
    yield from _resized(term, shapes)
    yield from _flattened(term, shapes)


def _pieces(term: Term, shapes: set[tuple[int, ...]]) -> Iterator[Term]:
    """Yield the largest and the mean of each group of a vector's features, in both orders."""
    text, x = term
    for count in {shape[-1] for shape in shapes if x.ndim == len(shape) == 2 and 0 < shape[-1] < x.shape[-1]}:
        if x.shape[-1] % count == 0:
            near, far = x.reshape(len(x), count, -1), x.reshape(len(x), -1, count).swapaxes(1, 2)
            for how, parts in (("neighbors", near), (f"every {count}th", far)):
                yield Term(f"max({text}) of {how}", parts.max(-1))
                yield Term(f"mean({text}) of {how}", parts.mean(-1))


def gathered(term: Term) -> Iterator[Term]:
    """Yield one vector of a sequence or an image: a step, or a mean or maximum over all positions."""
    text, x = term
    for axis in {1, x.ndim - 1} if x.ndim == 3 else ():
        yield Term(f"last step of {text}", np.take(x, -1, axis))
        yield Term(f"first step of {text}", np.take(x, 0, axis))
    for channels in {1, x.ndim - 1}:
        axes = tuple(axis for axis in range(1, x.ndim) if axis != channels)
        yield Term(f"mean({text}) over all positions", x.mean(axes))
        yield Term(f"max({text}) over all positions", x.max(axes))


def _pooled(term: Term, shapes: set[tuple[int, ...]]) -> Iterator[Term]:
    """Yield images pooled in windows of three positions that overlap, with a border that does not count."""
    text, x = term
    for channels, stride in itertools.product({1, x.ndim - 1}, (1, 2)):
        axes = tuple(axis for axis in range(1, x.ndim) if axis != channels)
        shape = [-(-extent // stride) if axis in axes else extent for axis, extent in enumerate(x.shape)]
        for low in (0, 1) if _squeezed(shape) in shapes else ():
            border = [(low, 2 - low + 1) if axis in axes else (0, 0) for axis in range(x.ndim)]
            wide = np.pad(x, border, constant_values=np.nan)
            windows = np.lib.stride_tricks.sliding_window_view(wide, [3] * len(axes), axes)
            steps = tuple(
                slice(0, n * stride, stride) if axis in axes else slice(None) for axis, n in enumerate(shape)
            )
            parts = windows[steps].reshape(*shape, -1)
            yield Term(f"maximum pooling of {text} (overlapping)", np.nanmax(parts, -1))
            yield Term(f"mean pooling of {text} (overlapping)", np.nanmean(parts, -1))
            whole = np.nansum(parts, -1) / parts.shape[-1]
            yield Term(f"mean pooling of {text} (overlapping, the border counts)", whole)


def _resized(term: Term, shapes: set[tuple[int, ...]]) -> Iterator[Term]:
    """Yield images of other sizes: pooled in windows that do not overlap, and interpolated."""
    text, x = term
    for shape, channels in itertools.product(shapes, {1, x.ndim - 1}):
        axes = [axis for axis in range(1, x.ndim) if axis != channels]
        if len(shape) != x.ndim or shape[channels] != x.shape[channels]:
            continue
        if all(shape[axis] < x.shape[axis] for axis in axes):
            windows = _windows(x, axes, shape)
            yield Term(f"maximum pooling of {text}", windows.max(-1))
            yield Term(f"mean pooling of {text}", windows.mean(-1))
        elif all(shape[axis] > x.shape[axis] for axis in axes):
            for name, matrix in (
                ("nearest", _nearest),
                ("linear", _linear),
                ("linear, corners aligned", _aligned),
            ):
                pooled = x
                for axis in axes:
                    grown = np.tensordot(pooled, matrix(x.shape[axis], shape[axis]), (axis, 1))
                    pooled = np.moveaxis(grown, -1, axis)
                yield Term(f"interpolation of {text} ({name})", pooled)


def _flattened(term: Term, shapes: set[tuple[int, ...]]) -> Iterator[Term]:
    """Yield images pooled in windows of two positions and flattened, in both frameworks' orders."""
    text, x = term
    for channels in {1, x.ndim - 1}:
        axes = [axis for axis in range(1, x.ndim) if axis != channels]
        shape = [extent // 2 if axis in axes else extent for axis, extent in enumerate(x.shape)]
        if (len(x), int(np.prod(shape[1:]))) in shapes:
            windows = _windows(x, axes, shape)
            for name, pooled in (("maximum", windows.max(-1)), ("mean", windows.mean(-1))):
                for images in (pooled, np.moveaxis(pooled, 1, -1), np.moveaxis(pooled, -1, 1)):
                    yield Term(f"flattened {name} pooling of {text}", images.reshape(len(x), -1))


def _windows(x: np.ndarray, axes: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """Return the windows of an image that is divided into `shape`, each as the last axis."""
    for index, axis in enumerate(axes):
        width = x.shape[axis] // shape[axis]
        kept = np.take(x, range(width * shape[axis]), axis)
        parts = kept.reshape(*kept.shape[:axis], shape[axis], width, *kept.shape[axis + 1 :])
        joined = np.moveaxis(parts, axis + 1, -1)
        x = joined.reshape(*joined.shape[:-2], -1) if index else joined
    return x


def _nearest(size: int, to: int) -> np.ndarray:
    return np.eye(size)[np.arange(to) * size // to]


def _linear(size: int, to: int) -> np.ndarray:
    return _interpolation(size, np.clip((np.arange(to) + 0.5) * size / to - 0.5, 0, size - 1))


def _aligned(size: int, to: int) -> np.ndarray:
    return _interpolation(size, np.linspace(0, size - 1, to))


def _interpolation(size: int, at: np.ndarray) -> np.ndarray:
    return np.asarray(np.maximum(0.0, 1 - np.abs(at[:, None] - np.arange(size))))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    powers = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(powers / powers.sum(axis, keepdims=True))


def _of_two(terms: Sequence[Term], shapes: set[tuple[int, ...]], *, whole: bool = True) -> Iterator[Term]:
    """Yield sums, products, extremes and concatenations of two arrays, or also vectors of these."""
    for one, other in itertools.permutations(terms, 2):
        yield from _concatenated(one, other, shapes)
        x, y = one.array, other.array
        for wide in _broadcast(x, y):
            shape = np.broadcast_shapes(x.shape, wide.shape)
            if _squeezed(shape) in shapes:
                yield from _combined(one.text, x, other.text, wide)
            elif (
                x.ndim > 2 and not whole and not shapes.isdisjoint({(len(x), shape[1]), (len(x), shape[-1])})
            ):
                for each in _combined(one.text, x, other.text, wide):
                    yield from gathered(each)
        if x.ndim == y.ndim == 3 and x.shape[1] == x.shape[2] == y.shape[1] and not whole:
            for each in _summed_edges(one, other):
                yield each
                yield from gathered(each)


def _concatenated(one: Term, other: Term, shapes: set[tuple[int, ...]]) -> Iterator[Term]:
    """Yield two arrays one after the other, and the same vectors of two sequences or images."""
    x, y = one.array, other.array
    if x.ndim != y.ndim:
        return
    if x.ndim > 2 and not shapes.isdisjoint({(len(x), x.shape[n] + y.shape[n]) for n in (1, -1)}):
        for pair in zip(gathered(one), gathered(other), strict=False):
            yield from _concatenated(*pair, shapes)
    for axis in {1, x.ndim - 1}:
        whole = [*x.shape]
        whole[axis] += y.shape[axis]
        rest = [[*each.shape[:axis], *each.shape[axis + 1 :]] for each in (x, y)]
        if rest[0] == rest[1] and _squeezed(whole) in shapes:
            yield Term(f"concatenation of {one.text}, {other.text}", np.concatenate([x, y], axis))


def _summed_edges(edges: Term, nodes: Term) -> Iterator[Term]:
    """Yield the sums of a graph's nodes [batch, nodes, features] along its edges [batch, nodes, nodes]."""
    x, y = edges.array, nodes.array
    for name, matrix in (
        (edges.text, x),
        (f"({edges.text} + 1)", x + np.eye(x.shape[1])),
        (f"transposed {edges.text}", np.swapaxes(x, 1, 2)),
    ):
        yield Term(f"{name} @ {nodes.text}", matrix @ y)
        yield Term(f"relu({name} @ {nodes.text})", np.maximum(matrix @ y, 0))


def _combined(one: str, x: np.ndarray, other: str, y: np.ndarray) -> Iterator[Term]:
    for name, combined in (("+", x + y), ("*", x * y), ("-", x - y)):
        yield Term(f"{one} {name} {other}", combined)
        yield Term(f"relu({one} {name} {other})", np.maximum(combined, 0))
    yield Term(f"minimum({one}, {other})", np.minimum(x, y))
    yield Term(f"maximum({one}, {other})", np.maximum(x, y))
    yield Term(f"{one} + {other} - mean({other})", x + y - y.mean(-1, keepdims=True))
    yield Term(f"{one} + {other} - max({other})", x + y - y.max(-1, keepdims=True))
    yield Term(f"{one} + {other} - mean({other}) over the batch", x + y - y.mean(0, keepdims=True))


def _broadcast(x: np.ndarray, y: np.ndarray) -> Iterator[np.ndarray]:
    """Yield y in shapes that fit x: one number for each channel of an image."""
    if x.ndim == y.ndim:
        moved = (y, np.moveaxis(y, 1, -1), np.moveaxis(y, -1, 1)) if x.ndim == 4 else (y,)
        for each in moved:
            if all(m == n or 1 in (m, n) for m, n in zip(x.shape, each.shape, strict=True)):
                yield each
                return
    elif y.ndim == 2 < x.ndim:
        for axis in {1, x.ndim - 1}:
            if x.shape[axis] == y.shape[1]:
                shape = [len(y), *(y.shape[1] if index == axis else 1 for index in range(1, x.ndim))]
                yield y.reshape(shape)


def _gated(operands: Sequence[Term]) -> Iterator[Term]:
    """Yield gated linear units of the halves of one array."""
    for text, x in operands[:_MOST_COMBINED]:
        for axis in {1, x.ndim - 1} if x.ndim > 1 else ():
            if x.shape[axis] % 2:
                continue
            first, second = np.split(x, 2, axis)
            for name, result in iter_activations(first):
                yield Term(f"{name}(first half of {text}) * second half", result * second)
            for name, result in iter_activations(second):
                yield Term(f"first half of {text} * {name}(second half)", first * result)


def _weighed(operands: Sequence[Term]) -> Iterator[Term]:
    """Yield sums over the steps of a sequence [batch, steps, features], each times its share."""
    for (scores, x), (text, y) in itertools.permutations(operands, 2):
        if x.ndim == y.ndim == 3 and x.shape[1:] == (y.shape[1], 1):
            shares = ("softmax", _softmax(x, 1)), ("sigmoid", _sigmoid(x))
            for name, each in shares:
                yield Term(f"sum of the steps of {text}, weighed by {name}({scores})", (y * each).sum(1))


def _carried(operands: Sequence[Term]) -> Iterator[Term]:
    """Yield mixtures of two arrays by a gate, as in a highway."""
    known = {each.text: list(_activated(each, _CARRIED)) for each in operands}
    for gate, one, other in itertools.permutations(operands, 3):
        if gate.array.shape != one.array.shape or one.array.shape != other.array.shape:
            continue
        z, x = gate.array, other.array
        for t, share in (("sigmoid", _sigmoid(z)), ("tanh", np.tanh(z))):
            name = f"{t}({gate.text})"
            for text, y in known[one.text]:
                yield Term(f"{name} * {text} + (1 - {name}) * {other.text}", share * y + (1 - share) * x)
                yield Term(f"(1 - {name}) * {text} + {name} * {other.text}", (1 - share) * y + share * x)
                yield Term(f"{name} * {text} + {other.text}", share * y + x)


def _conditioned(operands: Sequence[Term]) -> Iterator[Term]:
    """Yield images whose channels are scaled and shifted by the halves of a vector."""
    for (text, x), (vector, y) in itertools.permutations(operands, 2):
        for axis in {1, x.ndim - 1} if x.ndim > 2 == y.ndim else ():
            if y.shape[1] != 2 * x.shape[axis]:
                continue
            shape = [len(x), *(x.shape[axis] if n == axis else 1 for n in range(1, x.ndim))]
            halves = [
                Term(f"{name} half of {vector}", each.reshape(shape))
                for name, each in zip(("first", "second"), np.split(y, 2, 1), strict=True)
            ]
            inner = (Term(text, x), Term(f"relu({text})", np.maximum(x, 0)))
            for (one, g), (other, b) in (halves, halves[::-1]):
                scales = (Term(one, g), Term(f"(1 + {one})", 1 + g))
                for (name, value), (factor, scale), sign in itertools.product(inner, scales, (1, -1)):
                    made = value * scale + sign * b
                    title = f"{name} * {factor} {'+' if sign > 0 else '-'} {other}"
                    yield Term(title, made)
                    yield Term(f"relu({title})", np.maximum(made, 0))


def _mixed(operands: Sequence[Term]) -> Iterator[Term]:
    """Yield sums of the outputs of experts, each times its share of a gate."""
    for gate, x in operands:
        others = {
            operand.text: operand for operand in reversed(operands) if operand.array.ndim == x.ndim == 2
        }
        experts = [other for other in reversed(others.values()) if other.text != gate]
        count = x.shape[-1]
        for shape in {expert.array.shape for expert in experts}:
            # The last one is first: they are called in the order of the gate's features.
            chosen = [expert for expert in experts if expert.array.shape == shape][:count][::-1]
            if len(chosen) != count or count < 2:
                continue
            for name, shares in (("softmax", _softmax(x, -1)), ("sigmoid", _sigmoid(x)), ("", x)):
                for how in zip(*(list(iter_activations(operand.array)) for operand in chosen), strict=True):
                    mixed = sum(y * shares[:, n, None] for n, (_, y) in enumerate(how))
                    names = ", ".join(operand.text for operand in chosen)
                    weights = f"{name}({gate})" if name else gate
                    yield Term(f"sum of {how[0][0]} of {names}, weighed by {weights}", np.asarray(mixed))


def _attended(operands: Sequence[Term]) -> Iterator[Term]:
    """Yield attention of queries, keys and values [batch, positions, features]."""
    sequences = [operand for operand in operands if operand.array.ndim == 3][:_MOST_ATTENDED]
    for text, x in sequences:
        if x.shape[-1] % 3 == 0:
            yield from _fused(text, x)
    for turned, chosen in itertools.product((False, True), itertools.permutations(sequences, 3)):
        q, k, v = (operand.array for operand in chosen)
        names = ", ".join(operand.text for operand in chosen)
        for heads in _heads(q.shape[-1]) if k.shape == v.shape else ():
            width = q.shape[-1] // heads
            if k.shape[-1] % width == 0 and heads % (k.shape[-1] // width) == 0:
                split = [each.reshape(*each.shape[:2], -1, width) for each in (q, k, v)]
                for how, attended in _rotations(split) if turned else _shared(split):
                    yield Term(f"attention of {names} ({heads} heads{how})", attended)


def _shared(split: Sequence[np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield attention of queries of which several may share keys and values."""
    q, k, v = split
    times = q.shape[2] // k.shape[2]
    yield from _attention((q, *(np.repeat(each, times, 2) for each in (k, v))))
    if times > 1 < k.shape[2]:
        for how, made in _attention((q, *(np.tile(each, (1, 1, times, 1)) for each in (k, v)))):
            yield f", keys of all heads in turn{how}", made


def _rotations(split: Sequence[np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield attention of queries and keys that are turned by angles of their positions."""
    q, k, v = split
    if q.shape == k.shape and q.shape[-1] % 2 == 0:
        for base, near in itertools.product(_BASES, (False, True)):
            title = f", rotary angles of base {base:g}, pairs {('in halves', 'interleaved')[near]}"
            for how, made in _attention((_turn(q, base, near), _turn(k, base, near), v), plain=True):
                yield title + how, made


def _turn(x: np.ndarray, base: float, near: bool) -> np.ndarray:
    """Return vectors [batch, positions, heads, features] in rotary positions; `near`: pairs are neighbors."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None, None] / base ** (np.arange(half) / half)
    a, b = (x[..., ::2], x[..., 1::2]) if near else (x[..., :half], x[..., half:])
    made = [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)]
    return np.stack(made, -1).reshape(x.shape) if near else np.concatenate(made, -1)


def _heads(features: int) -> list[int]:
    return [heads for heads in (1, 2, 3, 4, 6, 8, 12, 16) if features % heads == 0]


def _fused(text: str, x: np.ndarray) -> Iterator[Term]:
    """Yield attention whose queries, keys and values are parts of one array."""
    for heads in _heads(x.shape[-1] // 3):
        for inner in (False, True):
            shape = (heads, 3, -1) if inner else (3, heads, -1)
            parts = np.moveaxis(x.reshape(*x.shape[:2], *shape), -2 if inner else -3, 0)
            for order in itertools.permutations(range(3)):
                names = " ".join(("queries", "keys", "values")[order.index(index)] for index in range(3))
                layout = f"{names} of {text}" + (", those of each head together" if inner else "")
                for how, attended in _attention([parts[position] for position in order]):
                    yield Term(f"attention of {layout} ({heads} heads{how})", attended)


def _attention(parts: Sequence[np.ndarray], *, plain: bool = False) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the forms of attention, each with its difference from the usual one; `plain`: few of them."""
    q, k, v = (np.swapaxes(part, 1, 2) for part in parts)
    width, size = q.shape[-1], (q.shape[2], k.shape[2])
    if q.shape[0] * q.shape[1] * size[0] * size[1] > _MOST_SCORES:
        return
    mask = np.triu(np.full(size, -np.inf), 1)
    products = q @ np.swapaxes(k, 2, 3)
    scales = {
        "": width**-0.5,
        ", scores not scaled": 1.0,
        ", scores scaled by all features": (width * q.shape[1]) ** -0.5,
    }
    for (scaled, scale), causal in itertools.product(scales.items(), (False, True)):
        scores = products * scale
        how = ("", ", causal")[causal] + scaled
        shares = {how: _softmax(scores + mask if causal else scores, -1)}
        if not plain:
            shares[f"{how}, softmax over queries"] = _softmax(scores + mask if causal else scores, -2)
            shares[f"{how}, sigmoid for softmax"] = (mask == 0 if causal else 1) * _sigmoid(scores)
        for name, weights in shares.items():
            attended = np.swapaxes(weights @ v, 1, 2)
            yield name, attended.reshape(*attended.shape[:2], -1)
        if plain and causal:
            return


def without_border(array: np.ndarray) -> np.ndarray:
    """Return an image without planes of zeros at its sides, e.g. one that is padded already."""
    for axis in range(1, array.ndim) if array.ndim > 2 else ():
        there: Any = np.flatnonzero(np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1).any(1))
        if there.size:
            array = np.take(array, range(there[0], there[-1] + 1), axis)
    return array
