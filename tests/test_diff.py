"""diff: what differs between two checkpoints, by path and by meaning; NumPy is the referee of the numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ckpttool.commands.convert import convert
from ckpttool.commands.diff import diff
from ckpttool.conversion.write import save
from ckpttool.core import UsageError
from ckpttool.verification.array_differences import compare_arrays
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, in_process, refused
from tests.golden_texts import Golden
from tests.trees import torch_tree

FLOATS = st.floats(width=32)


@given(arrays.arrays(np.float32, (3, 4), elements=FLOATS), arrays.arrays(np.float32, (3, 4), elements=FLOATS))
def test_numbers_are_those_of_numpy(a: np.ndarray, b: np.ndarray) -> None:
    result = compare_arrays(a, b)
    both_nan = np.isnan(a) & np.isnan(b)
    other = (a.view(np.uint32) != b.view(np.uint32)) & ~both_nan
    if result is None:
        assert not other.any()
        return
    assert result.different == other.sum()
    assert result.nans == (np.isnan(a) != np.isnan(b)).sum()
    finite = np.isfinite(a) & np.isfinite(b)
    if finite.all():
        distance = np.abs(a.astype(np.float64) - b)
        assert result.max_abs == distance.max()
        assert distance[result.at] == result.max_abs
    assert (result.left, result.right) == pytest.approx((a[result.at], b[result.at]), nan_ok=True)
    assert result.cosine is None or -1 <= result.cosine <= 1


@given(arrays.arrays(np.float32, (5,), elements=FLOATS))
def test_nothing_differs_from_itself(a: np.ndarray) -> None:
    assert compare_arrays(a, a.copy()) is None


def test_the_sign_of_a_zero_is_a_difference_of_no_size() -> None:
    result = compare_arrays(np.array([0.0, 1.0]), np.array([-0.0, 1.0]))
    assert result is not None
    assert (result.different, result.max_abs, result.max_rel, result.at) == (1, 0.0, 0.0, (0,))


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_integers_of_64_bits_are_not_rounded(dtype: Any) -> None:
    difference = compare_arrays(np.array([2**62 + 1], dtype), np.array([2**62], dtype))
    assert difference is not None
    assert (difference.max_abs, difference.left, difference.right) == (1.0, 2**62 + 1, 2**62)


def test_a_place_far_into_a_large_array_is_found() -> None:
    a = np.zeros((700, 1000), np.float32)
    b = a.copy()
    b[650, 3], b[1, 1] = -2.0, 1.0
    difference = compare_arrays(a, b)
    assert difference is not None
    assert (difference.different, difference.at, difference.max_abs) == (2, (650, 3), 2.0)


def test_infinite_and_nan_places() -> None:
    result = compare_arrays(np.array([1.0, math.inf, math.nan]), np.array([math.nan, math.inf, math.nan]))
    assert result is not None
    assert (result.different, result.nans, result.max_abs, result.at) == (1, 1, math.inf, (0,))


def test_other_types_are_compared_by_value() -> None:
    a = np.array([1.0, 0.1], np.float32)
    assert compare_arrays(np.array([1, 2], np.int32), np.array([1.0, 2.0])) is None
    difference = compare_arrays(a, a.astype(ml_dtypes.bfloat16))
    assert difference is not None
    assert difference.different == 1


def saved(path: Path, **entries: Any) -> str:
    save(torch_tree({name.replace("__", "/"): value for name, value in entries.items()}), str(path))
    return str(path)


def test_every_kind_of_change_is_told(tmp_path: Path) -> None:
    ones = np.ones((2, 3), np.float32)
    a = saved(tmp_path / "a.pt", same=ones, shape=ones, kind=ones, gone=ones, lr=0.1, value=ones, word="x")
    other = ones.copy()
    other[1, 2] = 1.5
    b = saved(
        tmp_path / "b.pt",
        same=ones,
        shape=ones.T.copy(),
        kind=ones.astype(np.float64),
        new=ones,
        lr=0.2,
        value=other,
        word="y",
    )
    result = diff(a, b)
    assert {change.path: change.what for change in result.changed} == {
        "shape": "shape",
        "kind": "dtype",
        "value": "values",
        "lr": "values",
        "word": "values",
    }
    assert (result.equal, result.only_left, result.only_right) == (1, ("gone",), ("new",))
    values = next(change.values for change in result.changed if change.path == "value")
    assert values is not None
    assert (values.at, values.left, values.right, values.different) == ((1, 2), 1.0, 1.5, 1)
    assert diff(a, b, glob="same").identical
    assert diff(a, a).identical


def test_a_conversion_is_identical_after_mapping_and_one_changed_value_is_found(
    tmp_path: Path, golden: Golden
) -> None:
    target = tmp_path / "agent.pt"
    convert(str(TF_SAMPLE), str(target))
    same = in_process("diff", TF_SAMPLE, target)
    assert same.status == 0, same.out
    golden(same.out.splitlines()[-1])
    from ckpttool.core import Tree, display
    from ckpttool.formats import open_checkpoint
    from tests.trees import leaf

    tree = open_checkpoint(str(target)).tree
    path = next(path for path, _ in tree.tensors() if display(path) == "critic/q1/l2/weight")
    array = tree[path].array().copy()  # type: ignore[union-attr]
    array[7, 3] += 0.5
    changed = {**tree.leaves, path: leaf(array, "critic.q1.l2.weight")}
    save(Tree(changed, tree.aliases, tree.containers), str(tmp_path / "changed.pt"))
    other = in_process("diff", TF_SAMPLE, tmp_path / "changed.pt", "--json")
    assert other.status == 1
    document = other.json()
    # The canonical kernel is [in, out], torch's weight [out, in].
    assert [(change["path"], change["values"]["at"]) for change in document["changed"]] == [
        ("critic/q1/1/kernel", [3, 7])
    ]
    assert document["changed"][0]["values"]["different"] == 1
    assert (document["by"], document["identical"], document["equal"]) == ("agent", False, 77)


def test_measures_of_changes_are_explained_once(tmp_path: Path) -> None:
    """No line explains them where no change has them."""
    paths = [tmp_path / f"{name}.npz" for name in "abc"]
    for path, tensors in zip(
        paths, ({"x": [1, 2], "y": [3]}, {"x": [2, 1], "y": [4]}, {"x": [1, 2]}), strict=True
    ):
        np.savez(path, **{name: np.array(values, np.float32) for name, values in tensors.items()})
    legends = []
    for words in ((paths[1],), (paths[1], "--quiet"), (paths[0],), (paths[2],)):
        lines = in_process("diff", paths[0], *words).out.splitlines()
        legends.append(sum("relative:" in line and "cosine:" in line for line in lines))
    assert legends == [1, 0, 0, 0]


def test_two_checkpoints_of_one_run_differ_by_path(golden: Golden) -> None:
    ran = in_process("diff", TORCH_SAMPLE, TORCH_SAMPLE.with_name("ckpt-2500.pt"))
    assert ran.status == 1
    golden("\n".join(line for line in ran.out.splitlines() if "--all" in line))
    assert ran.out.splitlines()[2].startswith(("actor", "critic"))
    assert all(len(line) <= 80 for line in ran.out.splitlines())


def test_bad_input_is_one_sentence(tmp_path: Path, golden: Golden) -> None:
    refused(in_process("diff", TORCH_SAMPLE, tmp_path / "no.pt"))
    refused(in_process("diff", TORCH_SAMPLE, TORCH_SAMPLE, "--by", "magic"))
    refused(in_process("diff", TORCH_SAMPLE, TORCH_SAMPLE, "--sort", "magic"))
    plain = saved(tmp_path / "a.pt", x=np.ones(3, np.float32))
    with pytest.raises(UsageError) as caught:
        diff(str(TORCH_SAMPLE), plain, by="agent")
    golden(caught.value)
