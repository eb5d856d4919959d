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
_SAMPLED = 64  # numbers that are compared before all are
_MOST_COMBINED, _MOST_ATTENDED = 10, 5
# Activations of the parts of sums, products and concatenations.
_USUAL = frozenset(
    ("relu", "sigmoid", "tanh", "silu", "exact gelu", "tanh gelu", "elu", "hard sigmoid", "relu6", "softplus")
)
_SLOPES = (0.01, 0.1, 0.2, 0.3)


def iter_activations(x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the results of the known activations by name."""
    for name in ACTIVATIONS:
        for slope in _SLOPES if name == "leaky_relu" else (DEFAULT_SLOPE,):
            title = {"linear": "no activation", "gelu": "exact gelu"}.get(name)
            made = numpy_backend.ACTIVATIONS[name](Activation(name, slope))(x)
            yield title or format_activation(name, slope), np.asarray(made, np.float64)
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
    if any(len(x) != len(a) for x in (*b, *(x for _, x in operands))):
        return None
    cut = [Term(text, np.asarray(x[:rows], np.float64)) for text, x in operands]
    targets = _Targets([a[:rows], *(each[:rows] for each in b)], bound)
    with np.errstate(all="ignore"):
        for text, made in _iter_formulas(cut, targets.shapes):
            if targets.match(text, made):
                break
        else:
            for term in cut:
                targets.match_clipped(term)
    first, *others = targets.names
    second = next((each for each in others if each), None)
    return (first, second) if first and second and first != second else None


class _Targets:
    """The values whose formulas are searched: A's, and B's in several orders of axes."""

    def __init__(self, arrays: Sequence[np.ndarray], bound: float) -> None:
        self._arrays = [np.asarray(each, np.float64) for each in arrays]
        self._flat = [each.reshape(-1) for each in self._arrays]
        self._allowed = [bound * (float(np.abs(each).max(initial=0.0)) or 1.0) for each in self._arrays]
        self.names: list[str | None] = [None] * len(arrays)

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """The shapes of the values, with axes of length 1 removed."""
        return {_squeezed(each.shape) for each in self._arrays}

    def match(self, text: str, made: np.ndarray) -> bool:
        """Note the text for values that are these; return whether both sides have a formula."""
        for place, flat in enumerate(self._flat):
            if self.names[place] is None and self._fits(place, made, flat):
                self.names[place] = text
        return self.names[0] is not None and any(self.names[1:])

    def _fits(self, place: int, made: np.ndarray, flat: np.ndarray) -> bool:
        if _squeezed(made.shape) != _squeezed(self._arrays[place].shape):
            return False
        own, allowed = made.reshape(-1), self._allowed[place]
        sample = slice(None, None, max(1, flat.size // _SAMPLED))
        if not (np.abs(own[sample] - flat[sample]) <= allowed).all():
            return False
        return bool((np.abs(own - flat) <= allowed).all())

    def match_clipped(self, term: Term) -> None:
        """Note the term, clipped to the range of the values, for values without a formula."""
        for place, each in enumerate(self._arrays):
            low, high = float(each.min()), float(each.max())
            if self.names[place] is None and low < high:
                self.match(f"clip({term.text}, {low:g}, {high:g})", np.clip(term.array, low, high))
        self.match(term.text, term.array)


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[:1], *(extent for extent in shape[1:] if extent != 1))


def _iter_formulas(operands: Sequence[Term], shapes: set[tuple[int, ...]]) -> Iterator[Term]:
    """Yield formulas of the operands, the simplest first."""
    terms = [each for operand in operands for each in _activated(operand)]
    for term in terms:
        yield term
        yield from _of_one(term, shapes)
    near = [each for each in operands if each.array.size <= _MOST_COMBINED_ENTRIES][:_MOST_COMBINED]
    yield from _of_two(near, shapes)
    yield from _of_two([each for operand in near for each in _activated(operand, _USUAL)], shapes)
    yield from _gated(operands)
    yield from _mixed(operands[:_MOST_COMBINED])
    yield from _attended(operands)


def _activated(operand: Term, names: Collection[str] = ()) -> Iterator[Term]:
    """Yield the operand, and the results of activations, of all or of these names."""
    text, x = operand
    yield operand
    for name, made in iter_activations(x):
        if name != "no activation" and (not names or name in names):
            yield Term(f"{name}({text})", made)
    yield Term(f"exp({text})", np.exp(x))
    yield Term(f"exp({text} / 2)", np.exp(x / 2))
    yield Term(f"square({text})", x * x)


def _of_one(term: Term, shapes: set[tuple[int, ...]]) -> Iterator[Term]:
    """Yield what moves, selects or reduces the entries of one array."""
    text, x = term
    for axis in range(1, x.ndim):
        yield Term(f"softmax({text}, axis {axis})", _softmax(x, axis))
        yield Term(f"flip({text}, axis {axis})", np.flip(x, axis))
    for axis in range(x.ndim):
        yield Term(f"{text} - mean({text}, axis {axis})", x - x.mean(axis, keepdims=True))
        yield Term(f"{text} - max({text}, axis {axis})", x - x.max(axis, keepdims=True))
    if x.ndim < 3:
        return
    yield from _selected(term)
    yield from _resized(term, shapes)
    yield from _flattened(term, shapes)


def _selected(term: Term) -> Iterator[Term]:
    text, x = term
    for axis in {1, x.ndim - 1} if x.ndim == 3 else ():
        yield Term(f"last step of {text}", np.take(x, -1, axis))
        yield Term(f"first step of {text}", np.take(x, 0, axis))
    for channels in {1, x.ndim - 1}:
        axes = tuple(axis for axis in range(1, x.ndim) if axis != channels)
        yield Term(f"mean({text}) over all positions", x.mean(axes))
        yield Term(f"max({text}) over all positions", x.max(axes))


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
                made = x
                for axis in axes:
                    grown = np.tensordot(made, matrix(x.shape[axis], shape[axis]), (axis, 1))
                    made = np.moveaxis(grown, -1, axis)
                yield Term(f"interpolation of {text} ({name})", made)


def _flattened(term: Term, shapes: set[tuple[int, ...]]) -> Iterator[Term]:
    """Yield images pooled in windows of two positions and flattened, in both frameworks' orders."""
    text, x = term
    for channels in {1, x.ndim - 1}:
        axes = [axis for axis in range(1, x.ndim) if axis != channels]
        shape = [extent // 2 if axis in axes else extent for axis, extent in enumerate(x.shape)]
        if (len(x), int(np.prod(shape[1:]))) in shapes:
            windows = _windows(x, axes, shape)
            for name, made in (("maximum", windows.max(-1)), ("mean", windows.mean(-1))):
                for each in (made, np.moveaxis(made, 1, -1), np.moveaxis(made, -1, 1)):
                    yield Term(f"flattened {name} pooling of {text}", each.reshape(len(x), -1))


def _windows(x: np.ndarray, axes: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """Return the windows of an image that is divided into `shape`, each as the last axis."""
    for place, axis in enumerate(axes):
        width = x.shape[axis] // shape[axis]
        kept = np.take(x, range(width * shape[axis]), axis)
        parts = kept.reshape(*kept.shape[:axis], shape[axis], width, *kept.shape[axis + 1 :])
        joined = np.moveaxis(parts, axis + 1, -1)
        x = joined.reshape(*joined.shape[:-2], -1) if place else joined
    return x


def _nearest(size: int, to: int) -> np.ndarray:
    return np.eye(size)[np.arange(to) * size // to]


def _linear(size: int, to: int) -> np.ndarray:
    return _interpolation(size, np.clip((np.arange(to) + 0.5) * size / to - 0.5, 0, size - 1))


def _aligned(size: int, to: int) -> np.ndarray:
    return _interpolation(size, np.linspace(0, size - 1, to))


def _interpolation(size: int, at: np.ndarray) -> np.ndarray:
    return np.asarray(np.maximum(0.0, 1 - np.abs(at[:, None] - np.arange(size))))


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    made = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(made / made.sum(axis, keepdims=True))


def _of_two(terms: Sequence[Term], shapes: set[tuple[int, ...]]) -> Iterator[Term]:
    """Yield sums, products, extremes and concatenations of two arrays."""
    for (one, x), (other, y) in itertools.permutations(terms, 2):
        if x.ndim == y.ndim:
            for axis in {1, x.ndim - 1}:
                whole = [*x.shape]
                whole[axis] += y.shape[axis]
                rest = [[*each.shape[:axis], *each.shape[axis + 1 :]] for each in (x, y)]
                if rest[0] == rest[1] and _squeezed(whole) in shapes:
                    yield Term(f"concatenation of {one}, {other}", np.concatenate([x, y], axis))
        for wide in _broadcast(x, y):
            if _squeezed(np.broadcast_shapes(x.shape, wide.shape)) in shapes:
                yield from _combined(one, x, other, wide)


def _combined(one: str, x: np.ndarray, other: str, y: np.ndarray) -> Iterator[Term]:
    for name, made in (("+", x + y), ("*", x * y), ("-", x - y)):
        yield Term(f"{one} {name} {other}", made)
        yield Term(f"relu({one} {name} {other})", np.maximum(made, 0))
    yield Term(f"minimum({one}, {other})", np.minimum(x, y))
    yield Term(f"maximum({one}, {other})", np.maximum(x, y))
    yield Term(f"{one} + {other} - mean({other})", x + y - y.mean(-1, keepdims=True))
    yield Term(f"{one} + {other} - max({other})", x + y - y.max(-1, keepdims=True))
    yield Term(f"{one} + {other} - mean({other}) over the batch", x + y - y.mean(0, keepdims=True))


def _broadcast(x: np.ndarray, y: np.ndarray) -> Iterator[np.ndarray]:
    """Yield y in shapes that fit x: one number for each channel of an image."""
    if x.ndim == y.ndim:
        if all(m == n or 1 in (m, n) for m, n in zip(x.shape, y.shape, strict=True)):
            yield y
    elif y.ndim == 2 < x.ndim:
        for axis in {1, x.ndim - 1}:
            if x.shape[axis] == y.shape[1]:
                shape = [len(y), *(y.shape[1] if place == axis else 1 for place in range(1, x.ndim))]
                yield y.reshape(shape)


def _gated(operands: Sequence[Term]) -> Iterator[Term]:
    """Yield gated linear units of the halves of one array."""
    for text, x in operands[:_MOST_COMBINED]:
        for axis in {1, x.ndim - 1} if x.ndim > 1 else ():
            if x.shape[axis] % 2:
                continue
            first, second = np.split(x, 2, axis)
            for name, made in iter_activations(first):
                yield Term(f"{name}(first half of {text}) * second half", made * second)
            for name, made in iter_activations(second):
                yield Term(f"first half of {text} * {name}(second half)", first * made)


def _mixed(operands: Sequence[Term]) -> Iterator[Term]:
    """Yield sums of the outputs of experts, each times its share of a gate."""
    for gate, x in operands:
        others = {each.text: each for each in reversed(operands) if each.array.ndim == x.ndim == 2}
        experts = [each for each in reversed(others.values()) if each.text != gate]
        count = x.shape[-1]
        for shape in {each.array.shape for each in experts}:
            # The last one is first: they are called in the order of the gate's features.
            chosen = [each for each in experts if each.array.shape == shape][:count][::-1]
            if len(chosen) != count or count < 2:
                continue
            for name, shares in (("softmax", _softmax(x, -1)), ("sigmoid", 1 / (1 + np.exp(-x))), ("", x)):
                for how in zip(*(list(iter_activations(each.array)) for each in chosen), strict=True):
                    made = sum(y * shares[:, n, None] for n, (_, y) in enumerate(how))
                    names = ", ".join(each.text for each in chosen)
                    weights = f"{name}({gate})" if name else gate
                    yield Term(f"sum of {how[0][0]} of {names}, weighed by {weights}", np.asarray(made))


def _attended(operands: Sequence[Term]) -> Iterator[Term]:
    """Yield attention of queries, keys and values [batch, positions, features]."""
    sequences = [each for each in operands if each.array.ndim == 3][:_MOST_ATTENDED]
    for text, x in sequences:
        if x.shape[-1] % 3 == 0:
            yield from _fused(text, x)
    for chosen in itertools.permutations(sequences, 3):
        if len({each.array.shape for each in chosen}) == 1:
            parts = [each.array for each in chosen]
            for heads in _heads(parts[0].shape[-1]):
                split = [each.reshape(*each.shape[:2], heads, -1) for each in parts]
                for how, made in _attention(split):
                    yield Term(
                        f"attention of {', '.join(each.text for each in chosen)} ({heads} heads{how})", made
                    )


def _heads(features: int) -> list[int]:
    return [each for each in (1, 2, 3, 4, 6, 8, 12, 16) if features % each == 0]


def _fused(text: str, x: np.ndarray) -> Iterator[Term]:
    """Yield attention whose queries, keys and values are parts of one array."""
    for heads in _heads(x.shape[-1] // 3):
        for inner in (False, True):
            shape = (heads, 3, -1) if inner else (3, heads, -1)
            parts = np.moveaxis(x.reshape(*x.shape[:2], *shape), -2 if inner else -3, 0)
            for order in itertools.permutations(range(3)):
                names = " ".join(("queries", "keys", "values")[order.index(place)] for place in range(3))
                layout = f"{names} of {text}" + (", those of each head together" if inner else "")
                for how, made in _attention([parts[place] for place in order]):
                    yield Term(f"attention of {layout} ({heads} heads{how})", made)


def _attention(parts: Sequence[np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the forms of attention, each with its difference from the usual one."""
    q, k, v = (np.swapaxes(each, 1, 2) for each in parts)
    steps, width = q.shape[2], q.shape[-1]
    if q.shape[0] * q.shape[1] * steps * steps > _MOST_SCORES:
        return
    mask = np.triu(np.full((steps, steps), -np.inf), 1)
    products = q @ np.swapaxes(k, 2, 3)
    for scale, scaled in (
        (width**-0.5, ""),
        (1.0, ", scores not scaled"),
        ((width * q.shape[1]) ** -0.5, ", scores scaled by all features"),
    ):
        for causal, axis in itertools.product((False, True), (-1, -2)):
            weights = _softmax(products * scale + (mask if causal else 0.0), axis)
            how = ("", ", causal")[causal] + scaled + ("" if axis == -1 else ", softmax over queries")
            made = np.swapaxes(weights @ v, 1, 2)
            yield how, made.reshape(*made.shape[:2], -1)


def without_border(array: np.ndarray) -> np.ndarray:
    """Return an image without planes of zeros at its sides, e.g. one that is padded already."""
    for axis in range(1, array.ndim) if array.ndim > 2 else ():
        there: Any = np.flatnonzero(np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1).any(1))
        if there.size:
            array = np.take(array, range(there[0], there[-1] + 1), axis)
    return array
