"""Laws of the rules: there and back is the identity, and names say what happens."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core import Inline, Leaf, MappingError, ValueLeaf, WeightUse
from ckpttool.mapping import Cast, Chain, Permute, Reshape, Rule, ToTensor, ToValue, compose_rules
from ckpttool.mapping.rules import KEEP, TRANSPOSE
from tests.golden_texts import Golden
from tests.trees import leaf

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, max_side=9)
ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.float64, np.int64, np.uint8]), SHAPES, elements=st.integers(0, 100)
)


def there_and_back(rule: Rule, source: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
    return rule.inverse(source).leaf(rule.leaf(source))


@given(ARRAYS, st.data())
def test_permutations_are_undone(array: np.ndarray, data: st.DataObject) -> None:
    rule = Permute(tuple(data.draw(st.permutations(range(array.ndim)))))
    moved = rule.leaf(leaf(array))
    assert isinstance(moved, Leaf)
    np.testing.assert_array_equal(moved.array(), array.transpose(rule.axes))
    back = there_and_back(rule, leaf(array))
    assert isinstance(back, Leaf)
    assert bytes(back.read()) == array.tobytes()
    assert back.shape == array.shape
    # Undoing gives the very source back: a round trip reads and copies nothing twice.
    assert back.source == leaf(array).source


@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=40)))
def test_transposing_by_strips_is_transposing(array: np.ndarray) -> None:
    np.testing.assert_array_equal(TRANSPOSE.apply(array), array.T)


@given(ARRAYS)
def test_reshapes_are_undone(array: np.ndarray) -> None:
    back = there_and_back(Reshape((array.size,)), leaf(array))
    assert isinstance(back, Leaf)
    assert (back.shape, bytes(back.read())) == (array.shape, array.tobytes())


@given(st.integers(-(2**24), 2**24))
def test_counters_survive_a_cast(number: int) -> None:
    source = leaf(np.array(number, np.int64))
    back = there_and_back(Cast("float32"), source)
    assert isinstance(back, Leaf)
    assert (back.dtype, back.array().item()) == ("int64", number)


def test_a_cast_that_would_change_a_number_is_refused(golden: Golden) -> None:
    with pytest.raises(MappingError) as caught:
        Cast("float32").leaf(leaf(np.array(2**24 + 1, np.int64))).read()  # type: ignore[union-attr]
    golden(caught.value)


@given(st.floats(width=32, allow_nan=False))
def test_a_scalar_becomes_a_number_and_comes_back(number: float) -> None:
    source = leaf(np.array(number, np.float32))
    assert ToValue().leaf(source) == ValueLeaf(number, "parameter")
    back = there_and_back(ToValue(), source)
    assert isinstance(back, Leaf)
    assert bytes(back.read()) == bytes(source.read())


def test_a_number_becomes_a_tensor_and_comes_back() -> None:
    assert there_and_back(ToTensor("int64"), ValueLeaf(7)) == ValueLeaf(7)


@pytest.mark.parametrize("value", [True, "7", None, 2**63])
def test_what_is_no_number_becomes_no_tensor(value: object) -> None:
    with pytest.raises(MappingError):
        ToTensor("int64").leaf(ValueLeaf(value))  # type: ignore[arg-type]


def test_only_one_element_is_a_number(golden: Golden) -> None:
    with pytest.raises(MappingError) as caught:
        ToValue().leaf(leaf(np.zeros(2, np.float32)))
    golden(caught.value)


def test_rules_refuse_what_they_do_not_fit(golden: Golden) -> None:
    with pytest.raises(MappingError) as caught:
        TRANSPOSE.leaf(leaf(np.zeros(3, np.float32)))
    golden(caught.value)
    with pytest.raises(MappingError):
        Reshape((5,)).leaf(leaf(np.zeros(3, np.float32)))
    with pytest.raises(MappingError):
        Cast("float32").leaf(ValueLeaf(3))


def test_chains_are_undone_in_the_opposite_order() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    rule = Chain((TRANSPOSE, Reshape((6,))))
    assert rule.name == "transpose, reshape [6]"
    back = there_and_back(rule, leaf(array))
    assert isinstance(back, Leaf)
    np.testing.assert_array_equal(back.array(), array)


def test_chaining_drops_what_does_nothing() -> None:
    assert compose_rules(TRANSPOSE, TRANSPOSE) == KEEP
    assert compose_rules(KEEP, KEEP) == KEEP
    assert compose_rules(KEEP, TRANSPOSE) == TRANSPOSE
    assert compose_rules(Cast("float32"), KEEP) == Cast("float32")


def test_a_recorded_role_follows_the_axes_of_its_weight() -> None:
    weight = Leaf("float32", (2, 3), Inline(bytes(24)), "w", "parameter", use=WeightUse(role="in_out"))
    turn = Permute((1, 0))
    roles = [rule.leaf(weight).use.role for rule in (KEEP, Cast("float16"), turn, Reshape((3, 2)))]
    assert roles == ["in_out", "in_out", "out_in", ""]
    # Undone, also where the source is used again.
    assert turn.leaf(turn.leaf(weight)) == weight
    assert turn.leaf(turn.leaf(weight)).use == weight.use
