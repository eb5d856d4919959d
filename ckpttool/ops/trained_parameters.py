"""Which parameters each optimizer of a PyTorch checkpoint trains, where no layout tells.

Names decide (`param_names`). Without names PyTorch's own rule does: param_groups list the parameters in the
order of the module, which the shapes of all slots must confirm, and only one network or one choice of
parameters may fit (torch/optim/optimizer.py, state_dict()). A file that sorts its tensors by name, as
safetensors does, has lost that order: there only one order of the modules may fit (ops/module_order).
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpttool.errors import some
from ckpttool.layouts import canonical, optimizers
from ckpttool.layouts.modules import Segments
from ckpttool.layouts.optimizers.torch_groups import Group, groups
from ckpttool.layouts.table import Optimizer, OptimizerMoves
from ckpttool.leaf import Leaf, Path, attr, display, key
from ckpttool.mapping.rules import KEEP
from ckpttool.ops import module_order
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
        orders = {name: _in_order(tree, top, own) for name, own in networks.items()}
        fits = [
            (name, bound, order)
            for name, order in orders.items()
            if order is not None and (bound := _bound_torch(tree, top, title, order, names)) is not None
        ]
        lost = [name for name, order in orders.items() if order is None]
        if lost:
            notes.append(
                f"{title}: the file sorts the tensors of {lost[0] or 'the network'} by name, and shapes "
                "leave the order of its modules open; the optimizer's state is not mapped: "
                f"--part {shlex.quote(lost[0] or '.')} converts the network alone"
            )
            continue
        sure = {name: own for name, own in networks.items() if not _is_sorted(tree, own)}
        fits = fits or list(_together(tree, top, sure, names)) or list(_among(tree, top, sure, names))
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
        if not named and own != networks.get(name, own) and len(own) == len(networks[name]):
            how = "by the order of its modules that fits the shapes of all slots"
            assumed.append(
                f"{title}: the file sorts tensors by name; PyTorch has a weight before its bias, and modules "
                "with numbers in the order of the numbers"
            )
        notes.append(f"{title} trains {name or 'the network'}, {how}")
        if len(own) < len(networks.get(name, own)):
            assumed.append(
                f"{title} trains {len(own)} of {len(networks[name])} parameters of {name or 'the network'}: "
                "the only ones whose shapes fit its slots in this order"
            )
        states.append(State(title, top, bound, own))
    return states, notes, assumed


def _in_order(tree: Tree, top: Path, own: tuple[Path, ...]) -> tuple[Path, ...] | None:
    """Return a network's parameters in PyTorch's order, None where the file does not tell it."""
    if not _is_sorted(tree, own):
        return own
    found = _groups(tree, top)
    members = [member for group in found or () for member in group.members]
    if found is None or len(members) != len(own) or all(member.named is not None for member in members):
        return own  # names decide, or nothing fits
    shapes = [shape for group in found for shape in _slot_shapes(tree, top, group)]
    leaves = [leaf for path in own if isinstance(leaf := tree[path], Leaf)]
    if not any(shapes) and len(found) == 1:
        return own
    if all(len(each) == 1 for each in shapes) and Counter(leaf.shape for leaf in leaves) != Counter(
        shape for each in shapes for shape in each
    ):
        return own  # nothing fits
    if len(found) > 1 or not all(len(each) == 1 for each in shapes):
        return None
    parameters = [
        (tuple(str(path[-1].value).split(".")), leaf.shape) for path, leaf in zip(own, leaves, strict=True)
    ]
    wanted = [next(iter(each)) for each in shapes]
    order = module_order.only(parameters, wanted, numbered=False)
    order = order or module_order.only(parameters, wanted, numbered=True)
    return None if order is None else tuple(own[number] for number in order)


def _is_sorted(tree: Tree, own: tuple[Path, ...]) -> bool:
    """Whether a plain dict has a network's parameters sorted by name, as safetensors writes them."""
    held = tree.containers.get(own[0][:-1]) if own else None
    if held is not None and held.kind != "dict":
        return False
    by_type: dict[str, list[str]] = {}
    for path in own:
        leaf = tree[path]
        if isinstance(leaf, Leaf):
            by_type.setdefault(leaf.dtype, []).append(str(path[-1].value))
    return len(own) > 1 and all(names == sorted(names) for names in by_type.values())


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
    found = _groups(tree, top)
    if found is None or len(found) != 1:
        return
    every = _slot_shapes(tree, top, found[0])
    if not all(len(each) == 1 for each in every):
        return
    shapes = [next(iter(each)) for each in every]
    for name, own in networks.items():
        chosen = _only_choice(
            shapes, [(path, leaf.shape) for path in own if isinstance(leaf := tree[path], Leaf)]
        )
        bound = _bound_torch(tree, top, title, chosen, names) if chosen else None
        if bound is not None and chosen is not None:
            yield name, bound, chosen


def _own(tree: Tree, top: Path) -> Mapping[Segments, Path]:
    title = display(top)
    return Optimizer(title, tuple(title.split("/")) if top else (), tree, ()).own


def _groups(tree: Tree, top: Path) -> tuple[Group, ...] | None:
    return groups(_own(tree, top), tree)


def _slot_shapes(tree: Tree, top: Path, group: Group) -> list[set[tuple[int, ...]]]:
    """Return the shapes of each parameter's slots in the order of a group."""
    mine = _own(tree, top)
    return [
        {
            leaf.shape
            for name, path in mine.items()
            if name[:2] == ("state", member.number)
            and name[2:] != ("step",)
            and isinstance(leaf := tree[path], Leaf)
        }
        for member in group.members
    ]


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
