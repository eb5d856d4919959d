"""Permutations by tiles: what NumPy makes, for every shape, order and type."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.mapping import permute_array, rules

TYPES = ("<f4", "<f8", "<c16", "|u1", "|b1", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)
EXTENTS = st.sampled_from([1, 2, 3, 7, 64, 129, 1025])


def same(array: np.ndarray, axes: tuple[int, ...]) -> None:
    permuted, expected = permute_array(array, axes), array.transpose(axes).copy("C")
    assert (permuted.shape, permuted.dtype) == (expected.shape, expected.dtype)
    assert permuted.flags.c_contiguous
    assert permuted.tobytes() == expected.tobytes()


@settings(max_examples=75, deadline=None)
@given(
    st.lists(EXTENTS, min_size=1, max_size=5)
    .filter(lambda shape: math.prod(shape) <= 300_000)
    .flatmap(lambda shape: st.tuples(st.just(tuple(shape)), st.permutations(range(len(shape))))),
    st.sampled_from(TYPES),
)
def test_every_permutation_is_numpys(case: tuple[tuple[int, ...], list[int]], dtype: object) -> None:
    shape, axes = case
    small = rules._SMALL
    array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)  # type: ignore[call-overload]
    try:
        rules._SMALL = 0
        same(array, tuple(axes))
    finally:
        rules._SMALL = small
    same(array, tuple(axes))


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (1024, 1024), (2049, 1500), (1, 300_000), (300_000, 3)])
def test_matrices_of_any_size(shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    same(array, tuple(reversed(range(len(shape)))))


@pytest.mark.parametrize("shape", [(3, 3, 64, 200), (1, 1, 512, 512), (5, 5, 130, 129)])
def test_kernels_of_convolutions_there_and_back(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).random(shape, dtype=np.float32)
    same(array, (3, 2, 0, 1))
    same(permute_array(array, (3, 2, 0, 1)), (2, 3, 1, 0))
