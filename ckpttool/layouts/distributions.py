"""Says of critics that do not give one value but many numbers: quantiles, or the logits of atoms."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool.layouts.canonical import Binding, weight
from ckpttool.leaf import Leaf
from ckpttool.tree import Tree


def distributions(binding: Binding, tree: Tree) -> tuple[str, ...]:
    """Return a note for each Q-function of the binding that gives more than one number."""
    return tuple(
        f"{title} gives {width} numbers of a distribution, not a value"
        for title, width in _wide(binding, tree)
    )


def _wide(binding: Binding, tree: Tree) -> Iterator[tuple[str, int]]:
    moves = {move.target: move for move in binding.moves.moves}
    for part in binding.parts:
        if part.component not in ("critic", "critic_target"):
            continue
        move = moves.get(weight(part, len(part.layers) - 1, "kernel"))
        leaf = move.rule.leaf(tree[move.source]) if move is not None and move.source in tree else None
        if isinstance(leaf, Leaf) and leaf.shape[1] != 1:
            yield part.title, leaf.shape[1]
