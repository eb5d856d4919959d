"""Averaged weights (EMA, SWA) beside a network in a checkpoint of PyTorch: which are which, and a choice."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ckpttool.errors import UsageError, choice
from ckpttool.leaf import Key, Leaf, Path, ValueLeaf, display
from ckpttool.mapping import decorations
from ckpttool.tree import Tree

EMA, RAW = "ema", "raw"
# Words in the names under which programs keep an average of a network's weights (timm, YOLO, k-diffusion,
# torch.optim.swa_utils).
_WORDS = frozenset(("ema", "swa", "average", "averaged", "shadow"))


class _Network(NamedTuple):
    """An entry that holds a network: its first step, its tensors' shapes by plain name, their paths."""

    top: Key
    shapes: dict[str, tuple[int, ...]]
    averaged: bool


def chosen(tree: Tree, which: str) -> tuple[Tree, tuple[str, ...]]:
    """Return the tree with the averaged weights for the trained ones, or without them, and notes.

    With "ema" the optimizer's state is left out: it belongs to the trained weights. Raise UsageError where
    the checkpoint has not one average of one network.
    """
    if which not in (EMA, RAW):
        raise UsageError(f"unknown --weights '{which}'", hint=choice(which, (EMA, RAW)))
    raw, average = _pair(tree)
    if which == RAW:
        kept = {path: leaf for path, leaf in tree.items() if path[0] != average.top}
        return only(tree, kept), (f"left out: {display((average.top,))}, averaged weights",)
    owners = {path for path, leaf in tree.tensors() if leaf.slot is not None}
    states = {path[0] for path in owners if path[0] != raw.top}
    found: dict[Path, Leaf | ValueLeaf] = {
        path: leaf for path, leaf in tree.items() if path[0] not in (raw.top, *states)
    }
    gone = ", ".join(display((top,)) for top in (raw.top, *sorted(states, key=str)))
    return only(tree, found), (f"left out: {gone}; {display((average.top,))} has the averaged weights",)


def only(tree: Tree, leaves: dict[Path, Leaf | ValueLeaf]) -> Tree:
    """Return the tree with these entries alone."""
    owned = {
        path: replace(leaf, of=None) if isinstance(leaf, Leaf) and leaf.of not in leaves else leaf
        for path, leaf in leaves.items()
    }
    aliases = {path: others for path, others in tree.aliases.items() if path in leaves}
    return Tree(owned, aliases, tree.containers)


def _pair(tree: Tree) -> tuple[_Network, _Network]:
    """Return the one network that has an average with the same tensors, and that average."""
    networks = _networks(tree)
    pairs = [
        (raw, average)
        for raw in networks
        for average in networks
        # AveragedModel adds a count of its own.
        if not raw.averaged and average.averaged and raw.shapes.items() <= average.shapes.items()
    ]
    if len(pairs) == 1:
        return pairs[0]
    names = sorted({display((each.top,)) for each in networks})
    if not pairs:
        raise UsageError(
            "the checkpoint has no averaged weights beside a network",
            found=", ".join(names[:6]) or "no network",
            hint="leave out --weights; --part PATH takes one entry",
        )
    raise UsageError("several networks have averaged weights", hint="--part PATH takes one entry")


def _networks(tree: Tree) -> list[_Network]:
    bare = decorations.stripped(tree)
    plain = tree if bare is None else bare.tree
    tops: dict[Key, dict[str, tuple[int, ...]]] = {}
    for path, leaf in plain.tensors():
        if leaf.role in ("parameter", "buffer") and len(path) > 1:
            tops.setdefault(path[0], {})[display(path[1:])] = leaf.shape
    return [_Network(top, shapes, _is_average(top)) for top, shapes in tops.items()]


def _is_average(top: Key) -> bool:
    return bool(_WORDS & set(str(top.value).lower().replace("-", "_").replace(".", "_").split("_")))
