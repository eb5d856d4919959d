"""Recognise what a model computes between two layers, from the numbers alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, permutations, product
from typing import Any

import numpy as np

from ckpttool.core.sidecar import ActivationName
from ckpttool.networks import numpy_backend
from ckpttool.networks.network import Activation

# Activations.

# Names that differ from the backend's.
_TITLES = {"linear": "no activation", "gelu": "exact gelu"}
_PLAIN_ACTIVATIONS: tuple[ActivationName, ...] = (
    "linear",
    "relu",
    "tanh",
    "sigmoid",
    "silu",
    "gelu",
    "elu",
    "softplus",
)


def common_activations(x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the results of common activations by name."""
    plain = {name: numpy_backend.ACTIVATIONS[name](Activation(name)) for name in _PLAIN_ACTIVATIONS}
    yield from ((_TITLES.get(name, name), np.asarray(function(x))) for name, function in plain.items())
    yield "tanh gelu", 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    yield "quick gelu", x * numpy_backend.sigmoid(1.702 * x)
    yield "selu", 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0)))
    yield "relu6", np.clip(x, 0, 6)
    yield "hard sigmoid", np.clip(x / 6 + 0.5, 0, 1)
    yield "hard swish", x * np.clip(x / 6 + 0.5, 0, 1)
    yield "softsign", x / (1 + np.abs(x))
    yield "mish", x * np.tanh(np.logaddexp(0, x))
    for slope in (0.01, 0.1, 0.2, 0.3):
        leaky = numpy_backend.ACTIVATIONS["leaky_relu"](Activation("leaky_relu", slope))
        yield f"leaky relu of slope {slope:g}", np.asarray(leaky(x))


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    shifted = np.exp(x - x.max(axis, keepdims=True))
    found: np.ndarray = shifted / shifted.sum(axis, keepdims=True)
    return found


# The arrays of a side that are known, and the operation that makes another one of them.


@dataclass(frozen=True, slots=True)
class KnownArray:
    """An array of a side, named after the layer of A that it is an input or output of."""

    title: str
    array: np.ndarray
    model_input: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """What a side computes: `kind` with its features, or an expression."""

    text: str
    kind: str = ""
    features: Mapping[str, str] = field(default_factory=dict)
    padding: str = ""


_Make = Callable[[], np.ndarray]
_MOST_KNOWN = 16
_MOST_ENTRIES = 1 << 20
_SAMPLED = 600
_MOST_ACTIVATED = 6
_MOST_COLUMNS = 16


def find_operation(known: Sequence[KnownArray], made: np.ndarray, bound: float) -> Operation | None:
    """Return the operation on known arrays, in the order of their calls, that gives `made`."""
    target = np.asarray(made, np.float64)
    if target.ndim < 2 or not 4 <= target.size <= _MOST_ENTRIES or not np.isfinite(target).all():
        return None
    usable = [
        KnownArray(each.title, np.asarray(each.array, np.float64), each.model_input)
        for each in known
        if each.array.dtype.kind in "fiub"
        and (each.array.shape[:1] == target.shape[:1] or each.array.shape == target.shape[1:])
    ]
    usable = [each for each in usable if each.array.size <= _MOST_ENTRIES and np.isfinite(each.array).all()]
    latest = [each for each in usable if not each.model_input][-_MOST_KNOWN:]
    arrays = [*(each for each in usable if each.model_input), *latest]
    with np.errstate(all="ignore"):
        found = _search(arrays, target, bound)
        if found is None:
            inner, widths = _strip_zeros(target)
            found = _search(arrays, inner, bound) if any(map(any, widths)) else None
            if found is not None:
                found = replace(found, padding=str([list(each) for each in widths]))
    return found


def _search(known: Sequence[KnownArray], target: np.ndarray, bound: float) -> Operation | None:
    expressions = _Expressions(known, target, bound)
    return (
        expressions.find_single()
        or _find_attention(known, target, bound, rotated=False)
        or expressions.find_sum()
        or expressions.find_parts()
        or _find_attention(known, target, bound, rotated=True)
    )


def _strip_zeros(x: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Return an array without the zeros at both ends of its inner axes, and how many there are."""
    widths = []
    for axis in range(1, x.ndim):
        used = np.flatnonzero(np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1).any(1))
        low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, x.shape[axis])
        widths.append((low, x.shape[axis] - high) if x.ndim > 2 else (0, 0))
        x = np.take(x, np.arange(low, high), axis) if x.ndim > 2 else x
    return x, widths


def describe_difference(a: Operation | None, b: Operation | None) -> str | None:
    """Return how the operations of both sides differ, None if that is unknown or they do not."""
    if a is None or b is None:
        return None
    if a.text == b.text:
        differ = a.padding and b.padding and a.padding != b.padding
        return f"A pads {a.text} by {a.padding}, B by {b.padding}" if differ else None
    if a.kind and a.kind == b.kind:
        rows = [
            f"{name} of {a.kind} is {value} in A and {b.features[name]} in B"
            for name, value in a.features.items()
            if b.features.get(name, value) != value
            and (name != _ROLES or sorted(value.split(", ")) == sorted(b.features[name].split(", ")))
        ]
        if rows:
            return "; ".join(rows)
    return f"A computes {a.text}, B computes {b.text}"


def _agrees(one: np.ndarray, other: np.ndarray, bound: float) -> bool:
    if one.shape != other.shape or not np.isfinite(other).all():
        return False
    return float(np.abs(one - other).max()) <= bound * (float(np.abs(one).max()) or 1.0)


def _like(x: np.ndarray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yield an array in a shape: with channels moved, flattened, or repeated over rows or positions."""
    if x.shape == shape:
        yield x
    elif x.shape == shape[1:]:
        yield np.broadcast_to(x, shape)
        return
    turned = [np.moveaxis(x, 1, -1), np.moveaxis(x, -1, 1)] if x.ndim > 2 else []
    if x.size == math.prod(shape):
        yield from (each for each in turned if each.shape == shape and each.shape != x.shape)
        if x.ndim != len(shape):
            yield from (each.reshape(shape) for each in (x, *turned))
    elif x.ndim == 2 and len(shape) > 2 and x.shape[1] > 1:
        for axis in (len(shape) - 1, 1):
            if shape[axis] == x.shape[1]:
                place = [len(x), *[1] * (len(shape) - 1)]
                place[axis] = -1
                yield np.broadcast_to(x.reshape(place), shape)
    elif x.ndim == len(shape) and all(one in (1, other) for one, other in zip(x.shape, shape, strict=True)):
        yield np.broadcast_to(x, shape)


def _chunks(title: str, x: np.ndarray, shape: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the equal parts of vectors, if there are as many features as the shape has."""
    if x.ndim != 2 or x.shape[1] in shape[1:]:
        return
    for count, words in ((2, ("first half", "second half")), (3, ("first", "second", "last third"))):
        if x.shape[1] % count == 0 and x.shape[1] // count in (shape[1], shape[-1]):
            for word, part in zip(words, np.split(x, count, 1), strict=True):
                yield f"the {word} of {title}", part


def _reduced(title: str, x: np.ndarray, shape: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield sums, extremes and single positions of an array that have the shape, and pooled images."""
    if x.ndim > 2 and len(shape) < x.ndim:
        sets = [axes for size in (1, 2) for axes in combinations(range(1, x.ndim), size)]
        for axes in sets:
            left = tuple(extent for axis, extent in enumerate(x.shape) if axis not in axes)
            if left != shape:
                continue
            yield f"the mean of {title}", x.mean(axes)
            yield f"the maximum of {title}", x.max(axes)
            yield f"the sum of {title}", x.sum(axes)
            if len(axes) == 1:
                for place, word in ((0, "first"), (-1, "last"), (1, "second")):
                    if place < x.shape[axes[0]]:
                        yield f"the {word} position of {title}", np.take(x, place, axes[0])
    if x.ndim == len(shape) == 4:
        yield from _resized(title, x, shape)


def _resized(title: str, x: np.ndarray, shape: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    for axes in ((1, 2), (2, 3)):
        other = next(axis for axis in (1, 3) if axis not in axes)
        if x.shape[other] != shape[other]:
            continue
        sizes = [(x.shape[axis], shape[axis]) for axis in axes]
        if all(new == 2 * old for old, new in sizes):
            for word in ("nearest", "bilinear", "bilinear, with aligned corners"):
                yield f"{title} enlarged ({word})", _enlarged(x, axes, word)
        if all(old == 2 * new for old, new in sizes):
            split = x.reshape(
                [n for axis, e in enumerate(x.shape) for n in ((e // 2, 2) if axis in axes else (e,))]
            )
            inner = (axes[0] + 1, axes[1] + 2)
            yield f"the mean of {title} over windows of 2", split.mean(inner)
            yield f"the maximum of {title} over windows of 2", split.max(inner)


def _enlarged(x: np.ndarray, axes: tuple[int, int], how: str) -> np.ndarray:
    """Return an image of twice the size."""
    for axis in axes:
        old = x.shape[axis]
        new = np.arange(2 * old)
        if how == "nearest":
            x = np.take(x, new // 2, axis)
            continue
        at = (
            new * (old - 1) / max(2 * old - 1, 1)
            if "corners" in how
            else np.clip((new + 0.5) / 2 - 0.5, 0, old - 1)
        )
        low = np.clip(np.floor(at).astype(int), 0, old - 1)
        share = (at - low).reshape([-1 if place == axis else 1 for place in range(x.ndim)])
        x = np.take(x, low, axis) * (1 - share) + np.take(x, np.minimum(low + 1, old - 1), axis) * share
    return x


def _changed(title: str, x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield functions of one array in its own shape."""
    for name, made in common_activations(x):
        if name != _TITLES["linear"]:
            yield f"{name}({title})", made
    for axis in range(x.ndim - 1, 0, -1):
        where = "" if axis == x.ndim - 1 else f" over axis {axis}"
        yield f"softmax({title}){where}", _softmax(x, axis)
        yield f"log softmax({title}){where}", np.log(_softmax(x, axis))
        length = np.sqrt((x * x).sum(axis, keepdims=True))
        yield f"{title} of length 1{where}", np.divide(x, length, out=np.zeros_like(x), where=length > 0)
        yield f"{title} reversed along axis {axis}", np.flip(x, axis)
        if x.shape[axis] > 1:
            for step, word in ((1, "later"), (-1, "earlier")):
                moved = np.roll(x, step, axis)
                edge = [slice(None)] * x.ndim
                edge[axis] = slice(0, 1) if step > 0 else slice(-1, None)
                moved[tuple(edge)] = 0
                yield f"{title} one step {word} along axis {axis}", moved
            centred = x - x.mean(axis, keepdims=True)
            yield f"{title} without its mean over axis {axis}", centred
            yield f"{title} without its maximum over axis {axis}", x - x.max(axis, keepdims=True)
            for epsilon in (1e-6, 1e-5, 1e-3):
                spread = np.sqrt((centred**2).mean(axis, keepdims=True) + epsilon)
                yield f"{title} normalised over axis {axis} with epsilon {epsilon:g}", centred / spread
    for limit in (1.0, 5.0, 10.0):
        yield f"{title} limited to {limit:g}", np.clip(x, -limit, limit)


@dataclass(frozen=True, slots=True)
class _Term:
    text: str
    values: np.ndarray  # of the sampled entries
    make: _Make


class _Expressions:
    """Searches for an expression of known arrays: one function, a sum of up to three terms, or parts."""

    def __init__(self, known: Sequence[KnownArray], target: np.ndarray, bound: float) -> None:
        self._known, self._target, self._bound = known, target, bound
        generator = np.random.default_rng(0)
        self._at = generator.permutation(target.size)[:_SAMPLED]
        self._seen: set[tuple[str, bytes]] = set()

    def _plain(self) -> Iterator[tuple[str, np.ndarray]]:
        for each in reversed(self._known):
            for array in _like(each.array, self._target.shape):
                yield each.title, array
            for title, part in _chunks(each.title, each.array, self._target.shape):
                yield from ((title, array) for array in _like(part, self._target.shape))

    def find_single(self) -> Operation | None:
        """Return an array, or a function of one."""
        for title, array in self._plain():
            if _agrees(self._target, array, self._bound):
                return Operation(title)
        for title, array in self._activated():
            for text, made in _reduced(title, array, self._target.shape):
                if _agrees(self._target, made, self._bound):
                    return Operation(text)
        for each in reversed(self._known):
            if each.array.size != self._target.size:
                continue
            for title, array in _changed(each.title, each.array):
                if any(_agrees(self._target, x, self._bound) for x in _like(array, self._target.shape)):
                    return Operation(title)
        return None

    def _activated(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the arrays, the latest first, and then activations of the latest ones."""
        yield from ((each.title, each.array) for each in reversed(self._known))
        for each in [each for each in reversed(self._known) if not each.model_input][:_MOST_ACTIVATED]:
            yield from ((f"{name}({each.title})", made) for name, made in common_activations(each.array))

    # Sums of terms: the coefficients are those of least squares on some entries.

    def _terms(self) -> tuple[list[_Term], list[_Term]]:
        """Return the terms of sums of two, and the fewer ones of sums of three."""
        plain = list(self._plain())[:12]
        simple: list[_Term] = []
        for text, make in (*_column_terms(self._known, self._target.shape), *self._simple_terms(plain)):
            self._add(simple, text, make)
        terms = list(simple)
        for text, make in (*self._means(plain[:5]), *_gated_terms(plain[:5])):
            self._add(terms, text, make)
        return terms, simple[:40]

    def _simple_terms(self, plain: Sequence[tuple[str, np.ndarray]]) -> Iterator[tuple[str, _Make]]:
        """Yield one, the arrays, and products and distances of pairs of them."""
        yield "1", partial(np.ones, self._target.shape)
        for title, array in plain:
            yield title, partial(np.asarray, array)
        for (one, x), (other, y) in combinations(plain[:6], 2):
            yield f"{one} * {other}", partial(np.multiply, x, y)
            yield f"|{one} - {other}|", partial(_distance, x, y)
            yield f"({one} - {other}) squared", partial(np.square, x - y)

    def _means(self, latest: Sequence[tuple[str, np.ndarray]]) -> Iterator[tuple[str, _Make]]:
        """Yield squares, and means over one axis."""
        shape = self._target.shape
        for title, array in latest:
            yield f"{title} squared", partial(np.square, array)
            for axis in range(1, array.ndim):
                mean = array.mean(axis, keepdims=True)
                yield f"mean({title}) over axis {axis}", partial(np.broadcast_to, mean, shape)
        for each in list(reversed(self._known))[:5]:
            if each.array.ndim == len(shape) == 2 and each.array.shape != shape:
                for word, made in (("mean", each.array.mean(1)), ("maximum", each.array.max(1))):
                    yield f"the {word} of {each.title}", partial(np.broadcast_to, made[:, None], shape)

    def _add(self, terms: list[_Term], text: str, make: _Make) -> None:
        values = make().reshape(-1)[self._at]
        key = text, values.tobytes()
        if np.isfinite(values).all() and np.abs(values).max() > 0 and key not in self._seen:
            self._seen.add(key)
            terms.append(_Term(text, values, make))

    def find_sum(self) -> Operation | None:
        """Return a sum of terms, or an activation of one."""
        terms, few = self._terms()
        sampled = self._target.reshape(-1)[self._at]
        for name, inverse, inside, outside in _INVERSES:
            valid = inside(sampled)
            if valid.sum() < 24 or (name and valid.all() and name == "relu"):
                continue
            goal = inverse(sampled[valid])
            for count, rows in ((1, terms), (2, terms), (3, few)):
                found = self._fit(rows, valid, goal, count, name, outside)
                if found is not None:
                    return found
        return None

    def _fit(
        self,
        terms: list[_Term],
        valid: np.ndarray,
        goal: np.ndarray,
        count: int,
        name: str,
        outside: Callable[[np.ndarray], np.ndarray],
    ) -> Operation | None:
        if len(terms) < count:
            return None
        matrix = np.stack([each.values[valid] for each in terms])
        size = np.sqrt((matrix * matrix).sum(1))
        size[size == 0] = 1.0
        matrix = matrix / size[:, None]
        gram, right = matrix @ matrix.T, matrix @ goal
        whole = float(goal @ goal)
        allowed = max((100 * self._bound) ** 2, 1e-10) * whole
        if count == 2:
            chosen = _fitting_pairs(gram, right, whole - allowed)
        else:
            chosen = np.array([*combinations(range(len(terms)), count)])
        blocks = gram[chosen[:, :, None], chosen[:, None, :]]
        regular = np.abs(np.linalg.det(blocks)) > 1e-9
        chosen, blocks = chosen[regular], blocks[regular]
        if not len(chosen):
            return None
        factors = np.linalg.solve(blocks, right[chosen][:, :, None])[:, :, 0]
        fitting = np.flatnonzero((factors * right[chosen]).sum(1) >= whole - allowed)
        order = sorted(
            fitting[:400],
            key=lambda n: sum(abs(abs(factors[n, i] / size[t]) - 1) > 1e-5 for i, t in enumerate(chosen[n])),
        )
        for number in order[:20]:
            chosen_terms = [terms[t] for t in chosen[number]]
            rows = [
                (each.text, _rounded(factors[number, i] / size[t], self._bound))
                for i, (t, each) in enumerate(zip(chosen[number], chosen_terms, strict=True))
            ]
            if any(abs(factor) < 1e-4 for _, factor in rows):
                continue
            total = sum(factor * each.make() for (_, factor), each in zip(rows, chosen_terms, strict=True))
            if _agrees(self._target, outside(np.asarray(total)), self._bound):
                text = _as_sum(rows)
                return Operation(f"{name}({text})" if name else text)
        return None

    def find_parts(self) -> Operation | None:
        """Return the target's parts along its features, each one known or an expression."""
        for axis in range(self._target.ndim - 1, 0, -1):
            texts: list[str] = []
            start, extent = 0, self._target.shape[axis]
            while start < extent:
                found = self._part(axis, start)
                if found is None:
                    break
                texts.append(found[0])
                start += found[1]
            if start == extent and len(texts) > 1:
                return Operation(f"[{', '.join(texts)}]")
        return self._halves()

    def _part(self, axis: int, start: int) -> tuple[str, int] | None:
        extent = self._target.shape[axis]
        for name, known in self._activated():
            for title, array in _as_parts(name, known, self._target, axis):
                size = array.shape[axis]
                if start + size > extent or size == extent:
                    continue
                piece = np.take(self._target, np.arange(start, start + size), axis)
                if _agrees(piece, array, self._bound):
                    return title, size
                if axis < piece.ndim - 1 and _agrees(_varying(piece), _varying(array), self._bound):
                    return f"{title} and a constant", size
        piece = np.take(self._target, [start], axis)
        if axis < piece.ndim - 1 and piece.any() and float(np.abs(_varying(piece)).max()) <= self._bound:
            return "a constant", 1
        return None

    def _halves(self) -> Operation | None:
        extent = self._target.shape[-1]
        if self._target.ndim != 2 or extent % 2 or extent < 4:
            return None
        found = []
        for piece in np.split(self._target, 2, -1):
            search = _Expressions(self._known, piece, self._bound)
            one = search.find_single() or search.find_sum()
            if one is None:
                return None
            found.append(one.text)
        return Operation(f"[{', '.join(found)}]")


def _distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.abs(x - y)
    return found


def _gated_terms(latest: Sequence[tuple[str, np.ndarray]]) -> Iterator[tuple[str, _Make]]:
    """Yield activations of arrays, and their products with arrays and with each other."""
    changed = [
        [(f"{name}({title})", made) for name, made in common_activations(array) if name in _GATES]
        for title, array in latest
    ]
    for place, each in enumerate(changed):
        for title, made in each:
            yield title, partial(np.asarray, made)
        others = [row for number, row in enumerate(latest) if number != place]
        for (one, x), (other, y) in product(each, [latest[place], *others]):
            yield f"{one} * {other}", partial(np.multiply, x, y)
    for left, right in combinations(changed[:3], 2):
        for (one, x), (other, y) in product(left, right):
            yield f"{one} * {other}", partial(np.multiply, x, y)


def _column_terms(known: Sequence[KnownArray], shape: tuple[int, ...]) -> Iterator[tuple[str, _Make]]:
    """Yield products of single columns, e.g. the weights of experts, with arrays."""
    vectors = [each for each in reversed(known) if each.array.ndim == 2 and not each.model_input]
    factors = [
        each for each in vectors if 1 < each.array.shape[1] <= _MOST_COLUMNS and each.array.shape != shape
    ]
    values = [each for each in vectors if each.array.shape == shape][:6]
    for factor in factors[-1:]:
        for title, array in (
            (f"softmax({factor.title})", _softmax(factor.array, -1)),
            (factor.title, factor.array),
        ):
            for column, each in product(range(array.shape[1]), values):
                made = np.broadcast_to(array[:, column : column + 1], shape)
                yield f"{title}[{column}] * {each.title}", partial(np.multiply, made, each.array)


def _fitting_pairs(gram: np.ndarray, right: np.ndarray, explained: float) -> np.ndarray:
    """Return the pairs of terms of length 1 whose best sum explains that much of the squares."""
    mixed = 1 - gram**2
    squares = right[:, None] ** 2 + right[None, :] ** 2 - 2 * gram * right[:, None] * right[None, :]
    fits = np.triu(np.divide(squares, mixed, out=np.zeros_like(gram), where=mixed > 1e-9) >= explained, 1)
    found: np.ndarray = np.argwhere(fits)[:400]
    return found


def _varying(x: np.ndarray) -> np.ndarray:
    """Return what depends on the row."""
    found: np.ndarray = x - x.mean(0, keepdims=True)
    return found


def _as_parts(name: str, x: np.ndarray, target: np.ndarray, axis: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield an array in the shapes in which it can be a part of the target along an axis."""
    if x.ndim > 2 and target.ndim == 2:
        yield name, x.reshape(len(x), -1)
        yield f"{name} with channels moved", np.moveaxis(x, 1, -1).reshape(len(x), -1)
        yield f"{name} with channels moved", np.moveaxis(x, -1, 1).reshape(len(x), -1)
        return
    if x.ndim == 4 and target.ndim == 3:
        for turned in (x, np.moveaxis(x, 1, -1)):
            if turned.shape[-1] == target.shape[-1]:
                yield name, turned.reshape(len(x), -1, turned.shape[-1])
        return
    rest = [extent for place, extent in enumerate(target.shape) if place != axis]
    for move in ((), (1, -1), (-1, 1)) if x.ndim > 2 else ((),):
        array = np.moveaxis(x, *move) if move else x
        if array.ndim == target.ndim and [e for place, e in enumerate(array.shape) if place != axis] == rest:
            yield name, array
    if x.ndim == target.ndim == 4:
        shape = list(target.shape)
        for extent in {x.shape[1], x.shape[3]}:
            shape[axis] = extent
            yield from _resized(name, x, tuple(shape))


_GATES = (
    "relu",
    "relu6",
    "tanh",
    "sigmoid",
    "silu",
    "exact gelu",
    "tanh gelu",
    "hard sigmoid",
    "hard swish",
)


def _everywhere(x: np.ndarray) -> np.ndarray:
    return np.ones(x.shape, bool)


def _identity(x: np.ndarray) -> np.ndarray:
    return x


_INVERSES: tuple[tuple[str, Callable[..., Any], Callable[..., Any], Callable[..., Any]], ...] = (
    ("", _identity, _everywhere, _identity),
    ("relu", _identity, lambda y: y > 0, lambda x: np.maximum(x, 0)),
    (
        "sigmoid",
        lambda y: np.log(y / (1 - y)),
        lambda y: (y > 1e-3) & (y < 1 - 1e-3),
        lambda x: 1 / (1 + np.exp(-x)),
    ),
    ("tanh", np.arctanh, lambda y: np.abs(y) < 0.99, np.tanh),
)


def _rounded(factor: float, bound: float) -> float:
    """Return a factor without the rounding of least squares."""
    digits = 4 if bound > 1e-5 else 6
    near = float(f"{factor:.{digits}g}")
    return near if abs(near - factor) <= 10 * bound * abs(factor) else factor


def _as_sum(rows: Sequence[tuple[str, float]]) -> str:
    text = ""
    for title, factor in rows:
        if title == "1":
            part = f"{abs(factor):.6g}"
        else:
            part = title if abs(abs(factor) - 1) < 1e-9 else f"{abs(factor):.6g} * {title}"
        sign = "-" if factor < 0 else "+"
        text = f"{text} {sign} {part}" if text else (f"-{part}" if factor < 0 else part)
    return text


# Attention as a function of queries, keys and values.

_MOST_STEPS, _MOST_HEADS = 160, 64
_ROLES = "the order of queries, keys, values"
_BASES = (1e4, 5e5, 1e6, 1e3, 1e5, 100.0)


@dataclass(frozen=True, slots=True)
class _Projections:
    """Queries, keys and values [rows, steps, features]: the order of their columns, and their layers."""

    order: str
    roles: str
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray


def _find_attention(
    known: Sequence[KnownArray], target: np.ndarray, bound: float, *, rotated: bool
) -> Operation | None:
    """Return the settings of the attention that gives the target."""
    if target.ndim != 3 or target.shape[1] > _MOST_STEPS:
        return None
    rows = np.unique(np.linspace(0, len(target) - 1, 3).astype(int))
    masks = {
        each.title: each.array[rows]
        for each in known
        if each.model_input and each.array.ndim == 2 and np.isin(each.array, (0, 1)).all()
    }
    goal = target[rows]
    own = [replace(each, array=each.array[rows]) for each in known if len(each.array) == len(target)]
    for way in _projections([each for each in own if not each.model_input], goal.shape):
        for heads in [
            n for n in range(1, _MOST_HEADS + 1) if goal.shape[-1] % n == 0 and goal.shape[-1] // n > 1
        ]:
            found = _attention_settings(way, heads, goal, masks, bound, rotated=rotated)
            if found is not None:
                return found
    return None


def _projections(known: Sequence[KnownArray], shape: tuple[int, ...]) -> Iterator[_Projections]:
    width = shape[-1]
    sequences = [each for each in known if each.array.ndim == 3]
    fused = [x for x in sequences if x.array.shape[1] == shape[1] and x.array.shape[-1] == 3 * width]
    for each in fused[-2:]:
        x = each.array
        yield _Projections("by matrices", each.title, *np.split(x, 3, -1))
        for heads in (n for n in range(2, _MOST_HEADS + 1) if width % n == 0):
            split = x.reshape(*x.shape[:2], heads, 3, -1)
            parts = [split[..., place, :].reshape(*x.shape[:2], width) for place in range(3)]
            yield _Projections("by heads", each.title, *parts)
    latest = sequences[-3:]
    for order in permutations(range(len(latest))) if len(latest) == 3 else ():
        query, key, value = (latest[place].array for place in order)
        if query.shape == shape and key.shape == value.shape and width % key.shape[-1] == 0:
            roles = ", ".join(latest[place].title for place in order)
            yield _Projections("by matrices", roles, query, key, value)


def _by_heads(x: np.ndarray, heads: int) -> np.ndarray:
    return np.swapaxes(x.reshape(*x.shape[:2], heads, -1), 1, 2)


def _rotated(x: np.ndarray, base: float, *, interleaved: bool) -> np.ndarray:
    width = x.shape[-1]
    angles = np.arange(x.shape[-2])[:, None] / base ** (np.arange(0, width, 2) / width)
    if interleaved:
        angles = np.repeat(angles, 2, -1)
        other = np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    else:
        angles = np.concatenate([angles, angles], -1)
        other = np.concatenate([-x[..., width // 2 :], x[..., : width // 2]], -1)
    found: np.ndarray = x * np.cos(angles) + other * np.sin(angles)
    return found


def _attention_settings(
    way: _Projections,
    heads: int,
    goal: np.ndarray,
    masks: Mapping[str, np.ndarray],
    bound: float,
    *,
    rotated: bool,
) -> Operation | None:
    width = goal.shape[-1] // heads
    if way.key.shape[-1] % width or heads % (way.key.shape[-1] // width):
        return None
    groups = way.key.shape[-1] // width
    query = _by_heads(way.query, heads)
    rotations = [] if rotated else [("none", 0.0, False)]
    if rotated and width % 2 == 0:
        rotations += [
            (f"base {base:g}{', pairs of neighbours' if pairs else ''}", base, pairs)
            for base in _BASES
            for pairs in (False, True)
        ]
    for rotation, base, pairs in rotations:
        turned, keys = query, _by_heads(way.key, groups)
        if base:
            turned, keys = (_rotated(each, base, interleaved=pairs) for each in (turned, keys))
        values = _by_heads(way.value, groups)
        for repeat in ("neighbours", "alternating") if groups < heads else ("",):
            k, v = (
                np.repeat(each, heads // groups, 1)
                if repeat == "neighbours"
                else np.tile(each, (1, heads // groups, 1, 1))
                for each in (keys, values)
            )
            found = _masks_and_scales(
                turned @ np.swapaxes(k, -1, -2), v, goal, masks, bound, width, plain=not base
            )
            if found is not None:
                features = {"the number of heads": str(heads), **found, "the rotary embedding": rotation}
                features |= {"the order of columns": way.order, _ROLES: way.roles}
                if repeat:
                    features["the heads that share keys"] = repeat
                text = ", ".join(f"{name} {value}" for name, value in features.items())
                return Operation(f"attention ({text})", "attention", features)
    return None


def _masks_and_scales(
    scores: np.ndarray,
    values: np.ndarray,
    goal: np.ndarray,
    masks: Mapping[str, np.ndarray],
    bound: float,
    width: int,
    *,
    plain: bool,
) -> dict[str, str] | None:
    """Return scale, mask and axis of the softmax with which the scores give the goal."""
    scales = {
        1 / math.sqrt(width): "",
        1.0: "",
        1 / width: "",
        1 / math.sqrt(goal.shape[-1]): "",
        1 / math.sqrt(2 * width): "",
    }
    steps = scores.shape[-2:]
    above = np.tril(np.ones(steps, bool))
    shapes: dict[str, np.ndarray] = {
        "none": np.ones(steps, bool),
        "causal": above,
        "causal, with one later step": np.tril(np.ones(steps, bool), 1),
        "anticausal": np.triu(np.ones(steps, bool)),
    }
    for title, mask in masks.items():
        if mask.shape[-1] != steps[-1]:
            continue
        for word, keep in (("1", mask == 1), ("0", mask == 0)):
            shapes[f"{title} of {word}"] = keep[:, None, None, :]
            shapes[f"causal, {title} of {word}"] = keep[:, None, None, :] & above
    for mask_title, kept in shapes.items():
        penalty = np.where(kept, 0.0, -1e4)
        for scale in scales:
            for axis in (-1, -2) if plain else (-1,):
                weighted = _softmax(scores * scale + penalty, axis) @ values
                made: np.ndarray = np.swapaxes(weighted, 1, 2).reshape(goal.shape)
                if _agrees(goal, made, bound):
                    return {
                        "the scale": f"{scale:.4g}",
                        "the mask": mask_title,
                        "the axis of the softmax": "keys" if axis == -1 else "queries",
                    }
    return None
