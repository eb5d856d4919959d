"""Maps a tree without a known layout by the kinds of its layers: TensorFlow variables to a state_dict."""

from __future__ import annotations

from ckpttool.leaf import Path, key
from ckpttool.mapping.kinds import SPELLING, recognise
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import chain
from ckpttool.tree import Tree


def to_torch(tree: Tree) -> tuple[Move, ...]:
    """Return a move for every tensor of a layer whose kind is sure: `a/l1/kernel` to `a.l1.weight`.

    What no kind names (other ranks, other siblings) has no move and is reported as unused.
    """
    groups: dict[tuple[str, ...], dict[str, Path]] = {}
    for path, leaf in tree.tensors():
        if leaf.role in ("parameter", "buffer"):
            *module, name = tree.names[path].split("/")
            groups.setdefault(tuple(module), {})[name] = path
    moves = []
    leaves = dict(tree.tensors())
    for owner, paths in groups.items():
        tensors = {name: leaves[at] for name, at in paths.items()}
        kind = recognise(tensors, "tensorflow")
        if kind is None:
            continue
        spelling = {weight.canonical: weight for weight in SPELLING["torch", kind.name].weights}
        for weight in kind.weights:
            if weight.name in paths:
                theirs = spelling[weight.canonical]
                source = paths[weight.name]
                rule = chain(weight.to_canonical, theirs.to_canonical.inverse(leaves[source]))
                moves.append(Move(source, (key(".".join((*owner, theirs.name))),), rule))
    return tuple(moves)
