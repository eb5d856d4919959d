"""stats: the numbers of tensors and modules beside NumPy's, and the signs of a training that went wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ckpttool.commands.stats import Stats, find_warning_signs, stats
from ckpttool.core import attr
from ckpttool.verification import moments
from ckpttool.verification.moments import Moments
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, in_process, refused
from tests.golden_texts import Golden
from tests.test_diff import saved
from tests.trees import leaf

FLOATS = st.floats(-1e6, 1e6, width=32) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0])


@given(arrays.arrays(np.float32, st.integers(1, 40), elements=FLOATS), st.integers(0, 40))
def test_moments_are_numpys_however_they_are_cut(array: np.ndarray, cut: int) -> None:
    sums = moments.compute_moments(array[:cut]) + moments.compute_moments(array[cut:])
    numbers = array[np.isfinite(array)].astype(np.float64)
    assert (sums.size, sums.finite) == (array.size, numbers.size)
    assert (sums.nans, sums.infs) == (np.isnan(array).sum(), np.isinf(array).sum())
    assert sums.zeros == (array == 0).sum()
    if numbers.size:
        assert (sums.low, sums.high) == (numbers.min(), numbers.max())
        assert sums.mean == pytest.approx(numbers.mean(), rel=1e-9, abs=1e-9)
        assert sums.std == pytest.approx(numbers.std(), rel=1e-6, abs=1e-6)
        assert sums.norm == pytest.approx(np.linalg.norm(numbers), rel=1e-6, abs=1e-6)
        assert sum(moments.histogram(array, sums)) in (0, numbers.size)
    else:
        assert sums.document()["mean"] is None


@given(
    arrays.arrays(np.float64, st.integers(1, 40), elements=st.floats(-8, 8, width=16)),
    st.integers(0, 40),
    st.sampled_from([-900, -600, 550, 1010]),
)
def test_moments_of_numbers_whose_squares_are_none(array: np.ndarray, cut: int, power: int) -> None:
    """Numbers times a power of two have as many times the moments."""
    known = moments.compute_moments(array)
    large = np.ldexp(array, power)
    sums = moments.compute_moments(large[:cut]) + moments.compute_moments(large[cut:])
    for name in ("low", "high", "mean", "std", "norm"):
        expected = np.ldexp(getattr(known, name), power)
        assert getattr(sums, name) == pytest.approx(expected, rel=1e-6, abs=math.ldexp(1e-6, power)), name


def test_pieces_add_up() -> None:
    array = np.random.default_rng(0).normal(3, 2, 700_000)
    measured = moments.compute_moments(array)
    assert measured.mean == pytest.approx(array.mean(), rel=1e-12)
    assert measured.std == pytest.approx(array.std(), rel=1e-12)
    counts, _ = np.histogram(array, moments.BINS)
    assert moments.histogram(array, measured) == tuple(counts)


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        pytest.param(np.array([1.0, math.nan]), {}, id="nan"),
        pytest.param(np.array([[math.inf, -math.inf]]), {}, id="infinite"),
        pytest.param(np.zeros((2, 2)), {}, id="all-zeros"),
        pytest.param(np.array([[1.0, 0.0], [2.0, 0.0]]), {}, id="dead-unit"),
        pytest.param(np.array([1.0, -1.0]), {"role": "slot", "slot": "v"}, id="negative-square"),
        pytest.param(np.zeros(3), {"role": "slot", "slot": "v"}, id="never-updated"),
        pytest.param(np.full(3, 1e-30), {"role": "slot", "slot": "v"}, id="vanished"),
        pytest.param(np.full(3, 1e20), {"role": "slot", "slot": "v"}, id="exploded"),
    ],
)
def test_signs(array: np.ndarray, kind: dict[str, Any], golden: Golden) -> None:
    from dataclasses import replace

    there = replace(leaf(array.astype(np.float32), "x"), **kind)
    signs = list(find_warning_signs((attr("kernel"),), there, moments.compute_moments(array), array))
    golden("\n".join(signs))


@pytest.mark.parametrize("array", [np.zeros(4), np.ones((3, 3)), np.eye(3)])
def test_what_is_well_has_no_sign(array: np.ndarray) -> None:
    assert not list(
        find_warning_signs((attr("bias"),), leaf(array, "x"), moments.compute_moments(array), array)
    )


def test_open_sides_of_a_space_are_no_sign() -> None:
    from dataclasses import replace

    array = np.full(3, math.inf, np.float32)
    low = replace(leaf(array, "low"), role="other")
    space = (attr("data"), attr("observation_space"), attr("low"))
    assert not list(find_warning_signs(space, low, moments.compute_moments(array), array))
    assert list(find_warning_signs(space[::2], low, moments.compute_moments(array), array))
    assert list(find_warning_signs(space, low, moments.compute_moments(array * math.nan), array * math.nan))


def look(path: object) -> Stats:
    return stats(str(path))


@pytest.mark.parametrize("sample", [TF_SAMPLE, TORCH_SAMPLE])
def test_a_module_is_the_sum_of_what_is_below_it(sample: Path) -> None:
    result = look(sample)
    assert result.finite
    assert result.modules[0].path == ""
    assert result.modules[0].tensors == len(result.tensors)
    for module in result.modules[1:4]:
        below = [tensor.moments for tensor in result.tensors if tensor.path.startswith(module.path + "/")]
        whole = sum(below, Moments())
        assert (module.moments.size, module.moments.zeros) == (whole.size, whole.zeros)
        assert module.moments.norm == pytest.approx(math.hypot(*(moment.norm for moment in below)))


def test_the_command_shows_a_line_per_tensor_or_module(golden: Golden) -> None:
    ran = in_process("stats", TORCH_SAMPLE)
    assert ran.status == 0
    lines = ran.out.splitlines()
    assert lines[1].split()[0] == "actor/l1/weight"
    golden(lines[-1])
    assert "..." not in ran.out  # names are complete in a pipe
    assert not any(line.endswith(" ") for line in lines)
    modules = in_process("stats", TORCH_SAMPLE, "--depth", "1").out
    assert [line.split()[0] for line in modules.splitlines()[1:5]] == [
        "actor",
        "actor_target",
        "critic",
        "critic_target",
    ]
    by_size = in_process("stats", TORCH_SAMPLE, "--sort", "size").out.splitlines()
    assert "l2" in by_size[1]
    refused(in_process("stats", TORCH_SAMPLE, "--sort", "taste"))


def test_nan_is_a_finding(tmp_path: Path, golden: Golden) -> None:
    bad = saved(tmp_path / "a.pt", actor__w=np.array([[1.0, math.nan]], np.float32), word="x")
    ran = in_process("stats", bad)
    assert ran.status == 1
    golden(ran.out.splitlines()[-1])
    process = in_process("stats", bad, "--json")
    assert process.status == 1
    document = process.json()
    assert document["finite"] is False
    assert document["tensors"][0]["nans"] == 1


def test_a_part_is_looked_at_by_its_path() -> None:
    document = in_process("stats", TORCH_SAMPLE, "--glob", "actor/**", "--json").json()
    assert len(document["tensors"]) == 6
