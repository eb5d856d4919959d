"""The promises of every layout, as a class that the tests of a layout inherit."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ckpttool.core import CkpttoolError, Leaf, Tree, ValueLeaf, display, plugins
from ckpttool.core.source import Inline
from ckpttool.formats import tf_bundle
from ckpttool.libraries import RecognizedAgent, recognize_tree, repeated_structures
from ckpttool.libraries.schema import ALL_OPTIMIZED
from ckpttool.libraries.td3 import TF, TORCH
from ckpttool.listing.processes import one_checkpoint
from ckpttool.mapping import apply_plan
from ckpttool.mapping.rules import canonical_tree
from ckpttool.testing.formats import check_registration


def canonical_names(tree: Tree, binding: RecognizedAgent) -> dict[str, Leaf | ValueLeaf]:
    """Return the leaves of the canonical agent by name."""
    return {display(path): leaf for path, leaf in canonical_tree(tree, binding.moves).items()}


# The layouts that can also hold an agent.
WRITING = (TORCH, TF)


def contents(leaf: Leaf | ValueLeaf) -> object:
    """Return a leaf's one number, or the first of many, for comparison across types."""
    return leaf.array().reshape(-1)[0].item() if isinstance(leaf, Leaf) else leaf.value


def same(one: Leaf | ValueLeaf, other: Leaf | ValueLeaf) -> bool:
    """Compare two leaves bit for bit; a single number may have been rounded to float32."""
    if isinstance(one, Leaf) and isinstance(other, Leaf) and one.shape:
        return (one.dtype, one.shape, bytes(one.read())) == (other.dtype, other.shape, bytes(other.read()))
    first, second = contents(one), contents(other)
    if isinstance(first, float) and isinstance(second, float):
        return bool(np.float32(first) == np.float32(second))
    return first == second


class LayoutContract:
    """Promises of every layout; a subclass provides a whole agent of that layout."""

    name: str

    @pytest.fixture
    def tree(self) -> Tree:
        raise NotImplementedError(f"{type(self).__name__} must define the fixture tree, a whole agent")

    def test_it_is_registered(self) -> None:
        check_registration("layouts", self.name)
        assert plugins.find("layouts", self.name).load().TABLE.name == self.name

    def test_it_is_recognised_as_itself_and_nothing_else(self, tree: Tree) -> None:
        binding = recognize_tree(tree, "agent")
        assert binding is not None
        assert binding.layout == self.name

    def test_a_checkpoint_before_it_changes_nothing(
        self, tree: Tree, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Agents of one structure are bound once, if the values that are used are equal."""
        monkeypatch.setattr(repeated_structures, "KNOWN", deque())
        alone = recognize_tree(tree, "agent")
        with one_checkpoint():
            for change in (_change_number, _change_tensor):
                other = Tree(
                    {path: change(leaf) for path, leaf in tree.items()}, tree.aliases, tree.containers
                )
                with contextlib.suppress(CkpttoolError):
                    recognize_tree(other, "agent")
            assert recognize_tree(tree, "agent") == alone

    def test_every_leaf_has_a_way(self, tree: Tree) -> None:
        binding = recognize_tree(tree, "agent")
        assert binding is not None
        moved = {move.source for move in binding.moves.moves}
        assert set(tree) == moved | binding.consumed
        assert all(path in tree for path in moved | binding.consumed)

    def test_canonical_kernels_are_in_by_out_and_connected(self, tree: Tree) -> None:
        binding = recognize_tree(tree, "agent")
        assert binding is not None
        agent = canonical_names(tree, binding)
        for part in binding.parts:
            kernels = [
                kernel
                for n in range(len(part.layers))
                if isinstance(kernel := agent.get(f"{part.title}/{n}/kernel"), Leaf)
            ]
            assert len(kernels) == len(part.layers)
            for one, next_one in pairwise(kernels):
                assert one.shape[1] == next_one.shape[0]
            if part.head is not None:
                assert kernels[-1].shape[1] == 1

    def test_moments_have_their_weights_shape(self, tree: Tree) -> None:
        binding = recognize_tree(tree, "agent")
        assert binding is not None
        agent = canonical_names(tree, binding)
        moments = [name for name in agent if "_optimizer/m/" in name or "_optimizer/v/" in name]
        trained = {
            network for name, network in ALL_OPTIMIZED.items() if any(m.startswith(name) for m in moments)
        }
        assert len(moments) == 2 * sum(name.split("/")[0] in trained for name in agent)
        for name in moments:
            optimizer, _, rest = name.split("/", 2)
            weight = agent[f"{optimizer.removesuffix('_optimizer')}/{rest}"]
            moment = agent[name]
            assert isinstance(weight, Leaf)
            assert isinstance(moment, Leaf)
            assert moment.shape == weight.shape

    @pytest.mark.parametrize("layout", WRITING, ids=lambda layout: str(layout.TABLE.name))
    def test_what_a_layout_writes_it_recognises(self, tree: Tree, layout: Any) -> None:
        binding = recognize_tree(tree, "agent")
        assert binding is not None
        agent = canonical_tree(tree, binding.moves)
        plan = layout.plan(binding, agent, {})
        written = apply_plan(agent, plan)
        if layout is TF:
            written = tf_bundle.stored(written, graph=True, counter=1)
        again = recognize_tree(written, "agent")
        assert again is not None
        assert set(written) == {move.source for move in again.moves.moves} | again.consumed
        back = canonical_tree(written, again.moves)
        for path, leaf in agent.items():
            if path in back or path not in plan.consumed:
                assert same(back[path], leaf), display(path)
        kinds = {part.title: [layer.kind for layer in part.layers] for part in binding.parts}
        assert {part.title: [layer.kind for layer in part.layers] for part in again.parts} == kinds

    def test_without_its_networks_it_is_not_recognised(self, tree: Tree) -> None:
        rest = {path: leaf for path, leaf in tree.items() if "optimizer" in tree.names[path]}
        assert recognize_tree(Tree(rest), "agent") is None


def _change_number(leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
    """Return the leaf with another number, if it is one."""
    if isinstance(leaf, Leaf) or not isinstance(leaf.value, int | float):
        return leaf
    return replace(leaf, value=not leaf.value if isinstance(leaf.value, bool) else leaf.value + 1)


def _change_tensor(leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
    """Return the leaf with other bytes, if it is a tensor of numbers."""
    if isinstance(leaf, ValueLeaf) or leaf.dtype == "string":
        return leaf
    return replace(leaf, source=Inline(bytes(leaf.nbytes)))
