"""What a side computes between two layers is recognised from the numbers, and told from its faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.layer_operations import KnownArray, Operation, describe_difference, find_operation

Array = np.ndarray
BOUND = 1e-6
RNG = np.random.default_rng(0)
X, Y, Z = (RNG.normal(size=(8, 6, 12)) for _ in range(3))
IMAGE, OTHER = (RNG.normal(size=(8, 6, 4, 12)) for _ in range(2))
WIDE, GATE = RNG.normal(size=(8, 24)), RNG.normal(size=(8, 3))
VECTOR, SECOND = RNG.normal(size=(8, 12)), RNG.normal(size=(8, 12))
MASK = np.array(RNG.integers(0, 2, (8, 6)))
MASK[:, 0] = 1


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def sigmoid(x: Array) -> Array:
    found: Array = 1 / (1 + np.exp(-x))
    return found


def softmax(x: Array, axis: int = -1) -> Array:
    shifted = np.exp(x - x.max(axis, keepdims=True))
    found: Array = shifted / shifted.sum(axis, keepdims=True)
    return found


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    heads: int = 3,
    scale: float | None = None,
    keep: Any = True,
    axis: int = -1,
) -> Array:
    split = [np.swapaxes(each.reshape(8, 6, heads, -1), 1, 2) for each in (q, k, v)]
    width = split[0].shape[-1]
    scores = split[0] @ np.swapaxes(split[1], -1, -2) * (1 / math.sqrt(width) if scale is None else scale)
    weights = softmax(np.where(keep, scores, -1e9), axis)
    return np.swapaxes(weights @ split[2], 1, 2).reshape(8, 6, -1)


CAUSAL = np.tril(np.ones((6, 6), bool))
# A right operation, and faults of it: each is a function of the arrays above.
PAIRS: dict[str, tuple[list[str], Array, Array]] = {
    "residual": (["x", "y"], relu(X + Y), relu(X)),
    "factor of a residual": (["x", "y"], X + Y, X + 0.9 * Y),
    "activation before the sum": (["x", "y"], relu(X + Y), relu(X) + Y),
    "gated unit": (["x", "y"], np.tanh(X) * sigmoid(Y), sigmoid(X) * np.tanh(Y)),
    "swapped gate": (["x", "y"], X * sigmoid(X) * Y, Y * sigmoid(Y) * X),
    "steep gate": (["x", "y"], relu(X) * sigmoid(Y), relu(X) * np.clip(Y / 6 + 0.5, 0, 1)),
    "one position": (["x"], X[:, 0], X.mean(1)),
    "the last position": (["x"], X[:, -1], X[:, 0]),
    "maximum": (["image"], IMAGE.mean((1, 2)), IMAGE.max((1, 2))),
    "order of parts": (
        ["image", "other"],
        np.concatenate([IMAGE, OTHER], -1),
        np.concatenate([OTHER, IMAGE], -1),
    ),
    "constant position": (
        ["x"],
        np.concatenate([np.ones((8, 1, 12)), X], 1),
        np.concatenate([X, np.ones((8, 1, 12))], 1),
    ),
    "modulation": (
        ["image", "wide"],
        relu((1 + WIDE[:, None, None, :12]) * IMAGE + WIDE[:, None, None, 12:]),
        relu((1 + WIDE[:, None, None, 12:]) * IMAGE + WIDE[:, None, None, :12]),
    ),
    "experts": (
        ["gate", "vector", "second"],
        softmax(GATE)[:, :1] * VECTOR + softmax(GATE)[:, 1:2] * SECOND,
        softmax(GATE)[:, :1] * SECOND + softmax(GATE)[:, 1:2] * VECTOR,
    ),
    "dueling mean": (["vector", "gate"], VECTOR - VECTOR.mean(1, keepdims=True), VECTOR),
    "distance": (["vector", "second"], np.abs(VECTOR - SECOND), VECTOR - SECOND),
    "length": (["vector"], VECTOR / np.linalg.norm(VECTOR, axis=-1, keepdims=True), VECTOR),
    "axis of a softmax": (["x"], softmax(X), softmax(X, 1)),
    "reversed": (["x"], X, X[:, ::-1]),
    "enlarged": (
        ["image"],
        IMAGE.repeat(2, 1).repeat(2, 2),
        IMAGE.repeat(2, 1).repeat(2, 2)[:, ::-1],
    ),
    "windows": (
        ["image"],
        IMAGE.reshape(8, 3, 2, 2, 2, 12).mean((2, 4)),
        IMAGE.reshape(8, 3, 2, 2, 2, 12).max((2, 4)),
    ),
    "limit": (["x"], np.clip(X, -1, 1), X),
    "scale of attention": (["x", "y", "z"], attend(X, Y, Z), attend(X, Y, Z, scale=0.25)),
    "causal mask": (["x", "y", "z"], attend(X, Y, Z, keep=CAUSAL), attend(X, Y, Z)),
    "mask off by one": (
        ["x", "y", "z"],
        attend(X, Y, Z, keep=CAUSAL),
        attend(X, Y, Z, keep=np.tril(np.ones((6, 6), bool), 1)),
    ),
    "sign of a mask": (
        ["x", "y", "z", "mask"],
        attend(X, Y, Z, keep=MASK[:, None, None, :] == 1),
        attend(X, Y, Z, keep=MASK[:, None, None, :] == 0) * 1.0,
    ),
    "heads": (["x", "y", "z"], attend(X, Y, Z), attend(X, Y, Z, heads=4)),
    "axis of attention": (["x", "y", "z"], attend(X, Y, Z), attend(X, Y, Z, axis=-2)),
    "queries and keys": (["x", "y", "z"], attend(X, Y, Z), attend(Y, X, Z)),
}
ARRAYS = {
    "x": X,
    "y": Y,
    "z": Z,
    "image": IMAGE,
    "other": OTHER,
    "wide": WIDE,
    "gate": GATE,
    "vector": VECTOR,
    "second": SECOND,
}


def known(names: list[str], turned: Callable[[Array], Array] = np.asarray) -> list[KnownArray]:
    found = [KnownArray(name, turned(ARRAYS[name])) for name in names if name != "mask"]
    return [KnownArray("mask", MASK, model_input=True), *found] if "mask" in names else found


def find(names: list[str], made: Array) -> Operation | None:
    return find_operation(known(names), made, BOUND)


# Functions that no expression names: the right side is named, the other one is not.
UNNAMED = ("enlarged",)


@pytest.mark.parametrize("name", PAIRS)
def test_two_operations_are_told_apart(name: str) -> None:
    names, right, wrong = PAIRS[name]
    a, b = find(names, right), find(names, wrong)
    assert a is not None
    assert describe_difference(a, find(names, right)) is None
    if name in UNNAMED:
        assert b is None
    else:
        assert b is not None
        assert describe_difference(a, b)


@pytest.mark.parametrize("name", ["residual", "factor of a residual", "one position", "causal mask"])
def test_rounding_in_single_precision_hides_no_operation(name: str) -> None:
    names, right, _ = PAIRS[name]
    arrays = known(names, lambda x: x.astype(np.float32))
    assert find_operation(arrays, right.astype(np.float32), 3e-5) is not None


def test_numbers_of_another_source_are_no_operation() -> None:
    assert find(["x", "y", "z"], RNG.normal(size=(8, 6, 12))) is None
    assert find(["vector", "second", "gate"], RNG.normal(size=(8, 12))) is None
    assert find_operation([], X, BOUND) is None


def test_an_image_with_channels_first_is_the_same_operation() -> None:
    first = [KnownArray(name, np.moveaxis(ARRAYS[name], -1, 1)) for name in ("image", "other")]
    made = find_operation(first, np.moveaxis(relu(IMAGE + OTHER), -1, 1), BOUND)
    assert made == find(["image", "other"], relu(IMAGE + OTHER))


def test_the_side_of_the_padding_is_told_apart() -> None:
    left, right = np.pad(X, ((0, 0), (2, 0), (0, 0))), np.pad(X, ((0, 0), (0, 2), (0, 0)))
    found = [find(["x"], each) for each in (left, right)]
    assert describe_difference(*found)
    assert describe_difference(found[0], find(["x"], X)) is None
