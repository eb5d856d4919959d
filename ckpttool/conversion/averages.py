"""Averaged weights (EMA, SWA) beside a network in a PyTorch checkpoint: detection and selection."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import UsageError, suggest_choice
from ckpttool.core.tree import Leaf, Path, PathStep, Tree, ValueLeaf, display
from ckpttool.mapping import wrappers

EMA, RAW = "ema", "raw"
# Words in the names under which programs store averaged weights (timm, YOLO, k-diffusion,
# torch.optim.swa_utils).
_WORDS = frozenset(("ema", "swa", "average", "averaged", "shadow"))


class _AveragedNetwork(NamedTuple):
    """A network entry: its first step, its tensors' shapes by plain name, and whether it is an average."""

    top: PathStep
    shapes: dict[str, tuple[int, ...]]
    averaged: bool


def choose_weights(tree: Tree, which: str) -> tuple[Tree, tuple[str, ...]]:
    """Return the tree with averaged weights replacing the trained ones, or without them, and notes.

    With "ema" the optimizer state is left out, because it belongs to the trained weights. Raise
    UsageError unless the checkpoint has exactly one average of one network.
    """
    if which not in (EMA, RAW):
        raise UsageError(f"unknown --weights '{which}'", hint=suggest_choice(which, (EMA, RAW)))
    raw, average = _find_averaged_pair(tree)
    if which == RAW:
        kept = {path: leaf for path, leaf in tree.items() if path[0] != average.top}
        return select_entries(tree, kept), (f"left out: {display((average.top,))} (averaged weights)",)
    owners = {path for path, leaf in tree.tensors() if leaf.slot is not None}
    states = {path[0] for path in owners if path[0] != raw.top}
    entries: dict[Path, Leaf | ValueLeaf] = {
        path: leaf for path, leaf in tree.items() if path[0] not in (raw.top, *states)
    }
    gone = ", ".join(display((top,)) for top in (raw.top, *sorted(states, key=str)))
    return select_entries(tree, entries), (
        f"left out: {gone}; {display((average.top,))} contains the averaged weights",
    )


def select_entries(tree: Tree, leaves: dict[Path, Leaf | ValueLeaf]) -> Tree:
    """Return the tree with only these entries."""
    owned = {
        # Other leaves keep their identity, by which the orders of a computation are found.
        path: replace(leaf, of=None)
        if isinstance(leaf, Leaf) and leaf.of is not None and leaf.of not in leaves
        else leaf
        for path, leaf in leaves.items()
    }
    return tree.with_leaves(owned)


def _find_averaged_pair(tree: Tree) -> tuple[_AveragedNetwork, _AveragedNetwork]:
    """Return the only network that has an average with the same tensors, and that average."""
    networks = _find_networks(tree)
    pairs = [
        (raw, average)
        for raw in networks
        for average in networks
        # AveragedModel adds its own counter.
        if not raw.averaged and average.averaged and raw.shapes.items() <= average.shapes.items()
    ]
    if len(pairs) == 1:
        return pairs[0]
    names = sorted({display((network.top,)) for network in networks})
    if not pairs:
        raise UsageError(
            "no averaged weights found beside a network",
            found=", ".join(names[:6]) or "no network",
            hint="leave out --weights, or choose one entry with --part PATH",
        )
    raise UsageError("several networks have averaged weights", hint="choose one entry with --part PATH")


def _find_networks(tree: Tree) -> list[_AveragedNetwork]:
    bare = wrappers.strip_prefixes(tree)
    plain = tree if bare is None else bare.tree
    tops: dict[PathStep, dict[str, tuple[int, ...]]] = {}
    for path, leaf in plain.tensors():
        if leaf.role in ("parameter", "buffer") and len(path) > 1:
            tops.setdefault(path[0], {})[display(path[1:])] = leaf.shape
    return [_AveragedNetwork(top, shapes, _is_average(top)) for top, shapes in tops.items()]


def _is_average(top: PathStep) -> bool:
    return bool(_WORDS & set(str(top.value).lower().replace("-", "_").replace(".", "_").split("_")))
