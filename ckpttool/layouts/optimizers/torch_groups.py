"""torch's parameter groups in a state_dict: which parameters each has, and which weights those are.

Source: torch/optim/optimizer.py, state_dict(): parameters are numbered through all groups, in the order of
the groups; `param_names` stand beside them if the optimizer was made of named parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpttool.layouts.modules import Segments
from ckpttool.layouts.table import Optimizer
from ckpttool.leaf import Leaf, Path, ValueLeaf
from ckpttool.mapping.rules import Rule
from ckpttool.tree import Tree

# States of the search for a fit; networks of hundreds of layers in two groups stay far below.
_MOST_STATES = 20_000


class Member(NamedTuple):
    """One parameter of a group: its number in `state`, where that is listed, and its name's place if any."""

    number: str
    listed: Path
    named: Path | None


@dataclass(frozen=True, slots=True)
class Group:
    """One group: its settings by torch's name (`betas/0`), and its parameters in order."""

    settings: Mapping[str, Path]
    members: tuple[Member, ...]


class Weight(NamedTuple):
    """One parameter of the network: its tensor, and its places in the canonical tree with their rules."""

    source: Path
    places: tuple[tuple[Path, Rule], ...]


def weights(optimizer: Optimizer) -> tuple[Weight, ...]:
    """Return the network's parameters in the order of the file; a layer that is two has two places."""
    found: dict[Path, list[tuple[Path, Rule]]] = {}
    for source, target, rule in optimizer.weights:
        found.setdefault(source, []).append((target, rule))
    return tuple(Weight(source, tuple(places)) for source, places in found.items())


def groups(mine: Mapping[Segments, Path], tree: Tree) -> tuple[Group, ...] | None:
    """Return the groups of a state_dict's leaves (by name below it); None if a parameter has no number."""
    settings: dict[str, dict[str, Path]] = {}
    listed: dict[str, list[Path]] = {}
    named: dict[str, list[Path]] = {}
    for name, path in mine.items():
        if name[0] != "param_groups" or len(name) < 3:
            continue
        own = settings.setdefault(name[1], {})
        if name[2] == "params":
            listed.setdefault(name[1], []).append(path)
        elif name[2] == "param_names":
            named.setdefault(name[1], []).append(path)
        else:
            own["/".join(name[2:])] = path
    found = []
    for number, own in settings.items():
        paths, names = listed.get(number, []), named.get(number, [])
        values = [leaf.value for path in paths if isinstance(leaf := tree[path], ValueLeaf)]
        if len(values) != len(paths) or not paths or len(names) not in (0, len(paths)):
            return None
        marks: Sequence[Path | None] = names or [None] * len(paths)
        members = (Member(str(v), p, n) for v, p, n in zip(values, paths, marks, strict=True))
        found.append(Group(own, tuple(members)))
    return tuple(found)


def owners(
    found: Sequence[Group], mine: Mapping[Segments, Path], optimizer: Optimizer
) -> dict[str, Weight] | None:
    """Return the weight of every number; None where counts, names or shapes do not say it for sure.

    Names decide where the groups have them. Without names one group has the network's parameters in their
    order. Of several each has its own in that order, and only one way to share them out may fit the moments'
    shapes.
    """
    theirs = weights(optimizer)
    members = [member for group in found for member in group.members]
    if len(members) != len(theirs):
        return None
    shapes = _shapes(mine, optimizer.tree)
    order: Sequence[Weight] | None
    if all(member.named for member in members):
        order = _by_name(members, theirs, optimizer.tree)
    elif len(found) == 1:
        order = theirs
    else:
        order = _by_shape(found, theirs, shapes, optimizer.tree)
    if order is None:
        return None
    pairs = {member.number: weight for member, weight in zip(members, order, strict=True)}
    fits = all(_fits(shapes.get(number), w, optimizer.tree) for number, w in pairs.items())
    return pairs if fits and len(pairs) == len(members) else None


def _shapes(mine: Mapping[Segments, Path], tree: Tree) -> dict[str, set[tuple[int, ...]]]:
    """Return the shapes of each number's moments; another order of parameters shows itself so."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for name, path in mine.items():
        leaf = tree[path]
        if name[0] == "state" and len(name) == 3 and name[2] != "step" and isinstance(leaf, Leaf):
            found.setdefault(name[1], set()).add(leaf.shape)
    return found


def _fits(shapes: set[tuple[int, ...]] | None, weight: Weight, tree: Tree) -> bool:
    leaf = tree[weight.source]
    return not shapes or (isinstance(leaf, Leaf) and shapes == {leaf.shape})


def _by_name(members: Sequence[Member], theirs: Sequence[Weight], tree: Tree) -> list[Weight] | None:
    places = {tree.names[weight.source]: weight for weight in theirs}
    found = []
    for member in members:
        leaf = tree[member.named] if member.named is not None else None
        name = str(leaf.value).replace(".", "/") if isinstance(leaf, ValueLeaf) else ""
        fits = [each for each in places if each == name or each.endswith(f"/{name}")]
        if len(fits) != 1:
            return None
        found.append(places.pop(fits[0]))
    return found


def _by_shape(
    found: Sequence[Group],
    theirs: Sequence[Weight],
    shapes: Mapping[str, set[tuple[int, ...]]],
    tree: Tree,
) -> list[Weight] | None:
    """Return the only order in which the groups can share the weights out among them, None if there is none.

    Going through the weights, each is the next parameter of one of the groups: ways that fit are followed at
    once, by how many parameters of each group are taken.
    """
    start = (0,) * len(found)
    ways: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {start: (1, ())}
    for weight in theirs:
        after: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
        for taken, (count, way) in ways.items():
            for n in _next(found, taken):
                if not _fits(shapes.get(found[n].members[taken[n]].number), weight, tree):
                    continue
                now = (*taken[:n], taken[n] + 1, *taken[n + 1 :])
                before = after.get(now, (0, ()))[0]
                after[now] = (before + count, (*way, n))
        if not after or len(after) > _MOST_STATES:
            return None
        ways = after
    ((count, way),) = ways.values()
    if count != 1:
        return None
    shared: list[list[Weight]] = [[] for _ in found]
    for n, weight in zip(way, theirs, strict=True):
        shared[n].append(weight)
    return [weight for each in shared for weight in each]


def _next(found: Sequence[Group], taken: Sequence[int]) -> Iterator[int]:
    return (n for n, group in enumerate(found) if taken[n] < len(group.members))
