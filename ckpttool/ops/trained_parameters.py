"""Which parameters each optimizer of a PyTorch checkpoint trains, where no layout tells.

Names decide (`param_names`). Without names PyTorch's own rule does: param_groups list the parameters in the
order of the module, which the shapes of all slots must confirm, and only one network or one choice of
parameters may fit (torch/optim/optimizer.py, state_dict()).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpttool.errors import some
from ckpttool.layouts import canonical, optimizers
from ckpttool.layouts.optimizers.torch_groups import groups
from ckpttool.layouts.table import Optimizer, OptimizerMoves
from ckpttool.leaf import Leaf, Path, attr, display, key
from ckpttool.mapping.rules import KEEP
from ckpttool.tree import Tree

# Words of an entry's name that do not tell one network or optimizer from another.
_COMMON = frozenset(
    (
        "optimizer",
        "optimizers",
        "optim",
        "opt",
        "state",
        "states",
        "dict",
        "model",
        "net",
        "network",
        "module",
    )
) | {"weights", "params", "nets", "networks", "models"}
# Words of copies of a network, which follow it and which no optimizer trains.
_COPIES = frozenset(("ema", "swa", "average", "averaged", "target", "targ", "teacher", "old"))
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


class State(NamedTuple):
    """One optimizer of the source: its name, where it is, and its bound state."""

    name: str
    top: Path
    moves: OptimizerMoves
    weights: tuple[Path, ...]


def _words(name: str) -> frozenset[str]:
    words = (word.lower() for word in _WORD.findall(name))
    return frozenset(word for word in words if word not in _COMMON and word != "0")


def _by_title(title: str, candidates: Sequence[tuple[str, OptimizerMoves, tuple[Path, ...]]]) -> int | None:
    """Return which of several networks the optimizer's name speaks of, None where that is not one."""
    named = [n for n, (name, _, _) in enumerate(candidates) if _words(name) == _words(title)]
    trained = [n for n, (name, _, _) in enumerate(candidates) if not _words(name) & _COPIES]
    return next((found[0] for found in (named, trained) if len(found) == 1), None)


def torch_tops(tree: Tree) -> dict[Path, list[Path]]:
    """Return the leaves of every optimizer's state_dict, by its path."""
    groups_, states = key("param_groups"), key("state")
    tops = dict.fromkeys(
        path[: path.index(groups_)] for path in tree if groups_ in path and path[-2:-1] == (key("params"),)
    )
    depths = sorted({len(top) for top in tops})
    found: dict[Path, list[Path]] = {top: [] for top in tops}
    for path in tree:
        for depth in depths:
            if path[:depth] in found and path[depth : depth + 1] in ((groups_,), (states,)):
                found[path[:depth]].append(path)
                break
    return found


def torch_states(
    tree: Tree,
    tops: Mapping[Path, object],
    networks: Mapping[str, tuple[Path, ...]],
    names: Mapping[Path, Path],
) -> tuple[list[State], list[str], list[str]]:
    """Join each optimizer to the network that it trains; return the states, notes, and what was assumed.

    `networks` are the parameters of each in their order, `names` the weights' canonical paths.
    """
    states: list[State] = []
    notes: list[str] = []
    assumed: list[str] = []
    for top in tops:
        title = display(top)
        fits = [
            (name, bound, own)
            for name, own in networks.items()
            if (bound := _bound_torch(tree, top, title, own, names)) is not None
        ]
        fits = fits or list(_together(tree, top, networks, names)) or list(_among(tree, top, networks, names))
        chosen = 0 if len(fits) == 1 else _by_title(title, fits)
        if chosen is None:
            fitting = some([name for name, _, _ in fits], 3)
            why = f"fit several of the networks ({fitting})" if fits else "match the parameters of no network"
            notes.append(f"{title}: its param_groups {why}; its state is not mapped")
            continue
        name, bound, own = fits[chosen]
        if bound.note:
            notes.append(bound.note)
            continue
        named = any(move.target[1] == attr(canonical.NAMES) for move in bound.moves)
        how = "by param_names" if named else "by the order of param_groups and the shapes of all slots"
        notes.append(f"{title} trains {name or 'the network'}, {how}")
        if len(own) < len(networks.get(name, own)):
            assumed.append(
                f"{title} trains {len(own)} of {len(networks[name])} parameters of {name or 'the network'}: "
                "the only ones whose shapes fit its slots in this order"
            )
        states.append(State(title, top, bound, own))
    return states, notes, assumed


_Fit = tuple[str, OptimizerMoves, tuple[Path, ...]]
_MOST_TOGETHER = 4  # networks that one optimizer may train, in any order


def _together(
    tree: Tree, top: Path, networks: Mapping[str, tuple[Path, ...]], names: Mapping[Path, Path]
) -> Iterator[_Fit]:
    """Go through the orders of networks in which one optimizer may train them together."""
    if not 1 < len(networks) <= _MOST_TOGETHER:
        return
    for count in range(2, len(networks) + 1):
        for order in itertools.permutations(networks, count):
            own = tuple(path for name in order for path in networks[name])
            bound = _bound_torch(tree, top, display(top), own, names)
            if bound is not None:
                yield " and ".join(order), bound, own


def _among(
    tree: Tree, top: Path, networks: Mapping[str, tuple[Path, ...]], names: Mapping[Path, Path]
) -> Iterator[_Fit]:
    """Go through the networks of which one optimizer trains a part that only one choice of parameters fits.

    Every parameter of the optimizer must have a slot, whose shape is the parameter's.
    """
    title = display(top)
    mine = Optimizer(title, tuple(title.split("/")) if top else (), tree, ()).own
    found = groups(mine, tree)
    if found is None or len(found) != 1:
        return
    shapes = []
    for member in found[0].members:
        slots = [
            leaf.shape
            for name, path in mine.items()
            if name[:2] == ("state", member.number)
            and name[2:] != ("step",)
            and isinstance(leaf := tree[path], Leaf)
        ]
        if not slots or len(set(slots)) != 1:
            return
        shapes.append(slots[0])
    for name, own in networks.items():
        chosen = _only_choice(
            shapes, [(path, leaf.shape) for path in own if isinstance(leaf := tree[path], Leaf)]
        )
        bound = _bound_torch(tree, top, title, chosen, names) if chosen else None
        if bound is not None and chosen is not None:
            yield name, bound, chosen


def _only_choice(
    wanted: Sequence[tuple[int, ...]], own: Sequence[tuple[Path, tuple[int, ...]]]
) -> tuple[Path, ...] | None:
    """Return the parameters with these shapes in this order, None unless there is one choice of them."""
    if not wanted or len(wanted) > len(own):
        return None
    first = _chosen(wanted, own)
    last = _chosen(wanted[::-1], own[::-1])
    # The earliest and the latest choice are the same only where there is no other.
    return first if first is not None and last is not None and first == last[::-1] else None


def _chosen(
    wanted: Sequence[tuple[int, ...]], own: Sequence[tuple[Path, tuple[int, ...]]]
) -> tuple[Path, ...] | None:
    left = iter(own)
    found = []
    for shape in wanted:
        path = next((path for path, other in left if other == shape), None)
        if path is None:
            return None
        found.append(path)
    return tuple(found)


def _bound_torch(
    tree: Tree, top: Path, title: str, own: Sequence[Path], names: Mapping[Path, Path]
) -> OptimizerMoves | None:
    """Return the optimizer's state bound to these parameters, None where it does not fit them."""
    prefix = tuple(display(top).split("/")) if top else ()
    weights = tuple((path, names[path], KEEP) for path in own)
    optimizer = Optimizer(title, prefix, tree, weights)
    mine = optimizer.own
    found = groups(mine, tree)
    if found is None or sum(len(group.members) for group in found) != len(own):
        return None
    bound = optimizers.from_torch(optimizer)
    if not bound.moves and "do not match" in bound.note:
        return None
    return bound
