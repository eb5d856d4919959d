"""Trees with objects become trees of plain containers: tensors by their native names, the rest reported."""

from __future__ import annotations

import numpy as np

from ckpttool.core import Alias, Container, Record, Tree, ValueLeaf, attr, index, key
from ckpttool.mapping import apply_plan, plan_state_dicts
from tests.trees import leaf

NET, ONE = Container("record", "gone.Net"), np.ones(2, np.float32)


def test_plain_trees_stay_as_they_are():
    stored = {(): Container("dict"), (key("s"),): Container("record", "builtins.set")}
    tree = Tree({(key("a"),): leaf(ONE, "a"), (key("t"),): ValueLeaf(Record("torch.float32"))}, {}, stored)
    assert plan_state_dicts(tree) is None


def test_tensors_of_an_object_get_one_key():
    at = (key("net"), attr("_modules"), key("l1"), attr("_parameters"), key("weight"))
    tree = Tree(
        {
            at: leaf(ONE, "net.l1.weight"),
            (key("net"), attr("training")): ValueLeaf(True),
            (key("n"),): ValueLeaf(1),
            (key("r"),): ValueLeaf(Record("gone.Thing")),
        },
        {
            at: (
                Alias((key("net"), attr("tied"), key("w")), "net.tied.w"),
                Alias((key("net"), attr("flat"), index(0)), "x"),
            )
        },
        {(key("net"),): NET, at[:2]: Container("dict"), (): Container("OrderedDict")},
    )
    plan = plan_state_dicts(tree)
    converted = apply_plan(tree, plan)
    weight = (key("net"), key("l1.weight"))
    assert list(converted) == [weight, (key("n"),)]
    assert converted.aliases == {weight: (Alias((key("net"), key("tied.w"))),)}
    assert converted.containers == {(): Container("OrderedDict")}


def test_lists_that_lose_an_item_keep_their_numbers():
    items = {(key("l"), index(0)): ValueLeaf(Record("gone.Thing")), (key("l"), index(1)): ValueLeaf(2)}
    tree = Tree(
        {**items, (key("k"), index(0)): ValueLeaf(3)},
        {},
        {(key("l"),): Container("list"), (key("k"),): Container("tuple")},
    )
    plan = plan_state_dicts(tree)
    assert plan.containers == {(key("k"),): Container("tuple")}
    assert [move.target for move in plan.moves] == [(key("l"), index(1)), (key("k"), index(0))]


def test_tensors_in_parts_are_left_out_whole():
    parts = (key("s"), attr("values")), (key("s"), attr("indices"))
    leaves = {parts[0]: leaf(ONE, "s"), parts[1]: leaf(ONE, "s.indices"), (key("w"),): leaf(ONE, "w")}
    tree = Tree(leaves, {}, {(key("s"),): Container("record", "torch.sparse_coo")})
    plan = plan_state_dicts(tree)
    assert [move.source for move in plan.moves] == [(key("w"),)]
    assert plan.containers == {}
