"""Maps a tree without a known layout by its layers' kinds: TensorFlow variables and a torch state_dict."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool import dtypes
from ckpttool.leaf import Path, key
from ckpttool.mapping.kinds import SPELLING, recognise
from ckpttool.mapping.plan import Label, edges
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP, Rule, chain
from ckpttool.tree import Tree

Name = tuple[str, ...]


def to_torch(tree: Tree) -> tuple[Move, ...]:
    """Return a move for every tensor of a layer whose kind is sure: `a/l1/kernel` to `a.l1.weight`.

    Replayed experience is no layer's: its tensors go as they are. What no kind names (other ranks, other
    siblings) has no move and is reported as unused.
    """
    found = [*_spelled(tree, "tensorflow", "torch"), *_experience(tree)]
    return tuple(Move(source, (key(".".join(name)),), rule) for source, name, rule in found)


def _experience(tree: Tree) -> Iterator[tuple[Path, Name, Rule]]:
    for path, leaf in tree.tensors():
        if leaf.role == "replay" and dtypes.BY_NAME[leaf.dtype].torch is not None:
            yield path, tuple(tree.names[path].split("/")), KEEP


def to_tensorflow(tree: Tree) -> tuple[tuple[Move, ...], dict[Path, Label]]:
    """Return the inverse of `to_torch`, `a.l1.weight` to `a/l1/kernel`, and each target's label.

    A number in a name is an item of a list, as in a Sequential, and goes on being one.
    """
    found = list(_spelled(tree, "torch", "tensorflow"))
    paths = edges(name for _, name, _ in found)
    moves = tuple(Move(source, paths[name], rule) for source, name, rule in found)
    return moves, {paths[name]: Label("parameter", "/".join(name)) for _, name, _ in found}


def _spelled(tree: Tree, theirs: str, ours: str) -> list[tuple[Path, Name, Rule]]:
    groups: dict[Name, dict[str, Path]] = {}
    for path, leaf in tree.tensors():
        if leaf.role in ("parameter", "buffer"):
            *module, name = tree.names[path].split("/")
            groups.setdefault(tuple(module), {})[name] = path
    found = []
    leaves = dict(tree.tensors())
    for owner, paths in groups.items():
        kind = recognise({name: leaves[at] for name, at in paths.items()}, theirs)
        if kind is None:
            continue
        spelling = {weight.canonical: weight for weight in SPELLING[ours, kind.name].weights}
        for weight in kind.weights:
            if weight.name in paths:
                there = spelling[weight.canonical]
                source = paths[weight.name]
                rule = chain(weight.to_canonical, there.to_canonical.inverse(leaves[source]))
                found.append((source, (*owner, there.name), rule))
    return found
