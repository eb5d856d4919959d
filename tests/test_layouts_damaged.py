"""Layouts of RL libraries on files that are almost theirs: entries gone, of other shapes, no tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import CkpttoolError, Inline, Leaf, Tree, ValueLeaf
from ckpttool.evaluation import restore
from ckpttool.evaluation.restore import select_network_leaves
from ckpttool.formats import open_checkpoint
from ckpttool.libraries import d3rlpy, elegantrl, rsl_rl, skrl
from ckpttool.libraries.fasttd3 import FASTTD3
from tests import test_layout_d3rlpy as d3
from tests import test_layout_elegantrl as elegant
from tests import test_layout_fasttd3 as fast
from tests import test_layout_rsl_rl as rsl
from tests import test_layout_skrl as skr
from tests.torch_agents import saved

FILES: dict[str, tuple[Any, Callable[[Path], str]]] = {
    "d3rlpy": (d3rlpy, lambda folder: d3.d3(folder, d3.sac(), d3.config("sac"))),
    "d3rlpy of old": (d3rlpy, lambda folder: saved(folder, "x.pt", d3.td3(old=True)[0])),
    "skrl": (skrl, lambda folder: saved(folder, "x.pt", skr.td3()[0] | {"state_preprocessor": skr.scaler()})),
    "rsl_rl 3": (
        rsl_rl,
        lambda folder: saved(folder, "x.pt", rsl.file(3, *rsl.networks(), norm=True, log=False)),
    ),
    "rsl_rl 5": (
        rsl_rl,
        lambda folder: saved(folder, "x.pt", rsl.file(5, *rsl.networks(), norm=True, log=True)),
    ),
    "fasttd3": (FASTTD3, lambda folder: saved(folder, "x.pt", fast.agent()[0])),
    "elegantrl": (elegantrl, lambda folder: elegant.whole(folder, elegant.Critic(elegant.OBS), "cri.pth")),
}
SHAPES = ((), (0,), (3,), (2, 2), (2, 3, 4), (1 << 20, 0))


def damaged(tree: Tree, generator: np.random.Generator) -> Tree:
    """Return the tree with about one entry in eight gone, of another shape, or of another kind."""
    leaves: dict[Any, Leaf | ValueLeaf] = {}
    for path, leaf in tree.items():
        chance = generator.integers(24)
        shape = SHAPES[generator.integers(len(SHAPES))]
        if chance == 0:
            continue
        if chance == 1:
            leaves[path] = ValueLeaf((None, 3, "text", -1.5, 1 << 70)[generator.integers(5)])
        elif chance == 2 or isinstance(leaf, ValueLeaf):
            zeros = Inline(bytes(4 * int(np.prod(shape))))
            replacement = Leaf("float32", shape, zeros, str(path), "buffer")
            leaves[path] = replacement if chance == 2 else leaf
        else:
            leaves[path] = replace(leaf)
    return Tree(leaves, tree.aliases if generator.integers(2) else {}, tree.containers)


@pytest.mark.parametrize("name", FILES)
def test_what_is_almost_an_agent_ends_in_a_sentence_or_in_none(name: str, tmp_path: Path) -> None:
    layout, make = FILES[name]
    tree = open_checkpoint(make(tmp_path)).tree
    generator = np.random.default_rng(0)
    count = 0
    for _ in range(60):
        other = damaged(tree, generator)
        binding = layout.recognise(other, "x.pt")
        if binding is None:
            continue
        count += 1
        assert all(move.source in other for move in binding.moves.moves)
        try:
            restore.read_metadata(binding, select_network_leaves(other, binding))
        except CkpttoolError as error:
            assert str(error).isprintable()  # noqa: PT017  # both outcomes are right
    assert count
