"""Laws of the rules on parts: what is cut comes together again, blocks find back, sums need every term."""

from __future__ import annotations

import itertools

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core import Leaf, MappingError, Path, Tree, ValueLeaf, key
from ckpttool.mapping import (
    AxisSlice,
    BlockOrder,
    Chain,
    ConcatPart,
    Move,
    Plan,
    Rule,
    SumTerm,
    apply_plan,
    compose_plans,
    constant_tensor,
    is_part,
    merge_parts,
    slice_rule,
)
from ckpttool.mapping.rules import KEEP, TRANSPOSE
from tests.golden_texts import Golden
from tests.trees import leaf

ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.int64, np.uint8]),
    hnp.array_shapes(min_dims=1, max_dims=3, max_side=7),
    elements=st.integers(0, 100),
)
A, B, W = (key("a"),), (key("b"),), (key("w"),)


def array_of(result: object) -> np.ndarray:
    assert isinstance(result, Leaf)
    return result.array()


@given(ARRAYS, st.data())
def test_a_tensor_is_cut_and_put_together_again(array: np.ndarray, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, array.ndim - 1))
    whole = array.shape[axis]
    cuts = sorted({0, whole, *data.draw(st.lists(st.integers(0, whole), max_size=4))})
    takes = [AxisSlice(axis, start, stop, whole) for start, stop in itertools.pairwise(cuts)]
    parts = {(key(n),): take.leaf(leaf(array)) for n, take in enumerate(takes)}
    for take, part in zip(takes, parts.values(), strict=True):
        np.testing.assert_array_equal(array_of(part), array.take(range(take.start, take.stop), axis))
    moves = [Move(path, W, take.inverse(leaf(array))) for path, take in zip(parts, takes, strict=True)]
    back = apply_plan(Tree(parts), Plan(tuple(data.draw(st.permutations(moves)))))[W]
    np.testing.assert_array_equal(array_of(back), array)
    assert moves[0].rule.inverse(parts[key(0),]) == takes[0]


@given(ARRAYS, st.data())
def test_blocks_find_their_way_back(array: np.ndarray, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, array.ndim - 1))
    count = data.draw(st.sampled_from([n for n in range(1, 8) if array.shape[axis] % n == 0]))
    rule = BlockOrder(axis, tuple(data.draw(st.permutations(range(count)))))
    moved = rule.leaf(leaf(array))
    split = np.split(array, count, axis)
    np.testing.assert_array_equal(array_of(moved), np.concatenate([split[n] for n in rule.order], axis))
    np.testing.assert_array_equal(array_of(rule.inverse(leaf(array)).leaf(moved)), array)


def test_a_sum_is_the_sum_of_its_terms(golden: Golden) -> None:
    one, two = np.float32([1, 2]), np.float32([0.5, -2])
    tree = Tree({A: leaf(one), B: leaf(two)})
    total = apply_plan(tree, Plan((Move(A, W, SumTerm(2)), Move(B, W, SumTerm(2)))))[W]
    np.testing.assert_array_equal(array_of(total), one + two)
    with pytest.raises(MappingError) as caught:
        SumTerm(2).inverse(leaf(one))
    golden(caught.value)


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param({A: ConcatPart(0, 0, 2, 4)}, id="no-source"),
        pytest.param({A: ConcatPart(0, 0, 2, 4), B: ConcatPart(0, 1, 3, 4)}, id="no-source-2"),
        pytest.param({A: ConcatPart(0, 0, 2, 4), B: ConcatPart(0, 2, 4, 5)}, id="do-not-fit-together"),
        pytest.param({A: ConcatPart(0, 0, 2, 4), B: KEEP}, id="one-place"),
        pytest.param({A: KEEP, B: ConcatPart(0, 2, 4, 4)}, id="do-not-fit-together-2"),
        pytest.param({A: SumTerm(2)}, id="no-source-3"),
        pytest.param({A: SumTerm(2), B: ConcatPart(0, 0, 2, 2)}, id="do-not-fit-together-3"),
    ],
)
def test_parts_that_make_no_whole_are_refused(rules: dict[Path, Rule], golden: Golden) -> None:
    tree = Tree({A: leaf(np.zeros(2, np.float32)), B: leaf(np.ones(2, np.float32))})
    with pytest.raises(MappingError) as caught:
        apply_plan(tree, Plan(tuple(Move(path, W, rule) for path, rule in rules.items())))
    golden(caught.value)


@pytest.mark.parametrize(
    "rule", [AxisSlice(0, 0, 1, 3), ConcatPart(0, 0, 3, 3), BlockOrder(0, (1, 0, 2)), BlockOrder(1, (1, 0))]
)
def test_rules_refuse_what_they_do_not_fit(rule: Rule, golden: Golden) -> None:
    with pytest.raises(MappingError) as caught:
        rule.leaf(leaf(np.zeros(2, np.float32)))
    golden(caught.value)
    with pytest.raises(MappingError) as caught:
        rule.leaf(ValueLeaf(1))
    golden(caught.value)


def test_a_part_may_be_one_that_no_source_gives() -> None:
    added = ConcatPart(0, 2, 3, 3).leaf(constant_tensor("float32", (1,), 7))
    whole = apply_plan(
        Tree({A: leaf(np.zeros(2, np.float32))}), Plan((Move(A, W, ConcatPart(0, 0, 2, 3)),), {W: added})
    )
    np.testing.assert_array_equal(array_of(whole[W]), [0, 0, 7])


def test_parts_go_on_together_through_a_second_plan() -> None:
    first = Plan((Move(A, W, Chain((TRANSPOSE, ConcatPart(0, 0, 2, 4)))), Move(B, W, ConcatPart(0, 2, 4, 4))))
    tree = Tree({A: leaf(np.arange(6, dtype=np.float32).reshape(3, 2)), B: leaf(np.ones((2, 3), np.float32))})
    target = (key("there"),)
    both = compose_plans(first, Plan((Move(W, target, KEEP),)))
    np.testing.assert_array_equal(
        array_of(apply_plan(tree, both)[target]), array_of(apply_plan(tree, first)[W])
    )


def test_only_unfinished_leaves_are_merged() -> None:
    assert merge_parts(leaf(np.zeros(2, np.float32)), leaf(np.zeros(2, np.float32))) is None
    assert (is_part(Chain((TRANSPOSE, SumTerm(2)))), is_part(TRANSPOSE), slice_rule(0, 3, 3)) == (
        True,
        False,
        KEEP,
    )


def test_the_place_of_a_part_comes_after_permutations() -> None:
    """So that the parts of a layer in one library become those in another one."""
    parts = {A: ConcatPart(1, 0, 2, 5), B: ConcatPart(1, 2, 5, 5)}
    first = Plan(tuple(Move(source, W, Chain((TRANSPOSE, part))) for source, part in parts.items()))
    tree = Tree({A: leaf(np.arange(6, dtype=np.float32).reshape(2, 3)), B: leaf(np.ones((3, 3), np.float32))})
    joined = compose_plans(first, Plan((Move(W, W, TRANSPOSE),)))
    assert [move.rule for move in joined.moves] == [part._replace(axis=0) for part in parts.values()]
    whole = np.concatenate([tree[A].array(), tree[B].array()])
    np.testing.assert_array_equal(apply_plan(tree, joined)[W].array(), whole)
    cut = compose_plans(first, Plan((Move(W, A, Chain((AxisSlice(1, 0, 2, 5), TRANSPOSE))),)))
    assert [(move.source, move.rule) for move in cut.moves] == [(A, KEEP)]
    alone = compose_plans(first, Plan((Move(W, W, BlockOrder(0, (2, 1, 0))),)))
    with pytest.raises(MappingError):
        apply_plan(tree, alone)[W].array()
