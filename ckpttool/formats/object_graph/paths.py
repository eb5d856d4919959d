"""The canonical path of every object in an object graph.

The key of a variable is only the shortest path at the time it was saved, so an optimizer's list of
variables or `agent.best = agent.actor.l1` steals it. The canonical path is the first one that a
depth-first walk in the order of creation meets, when the walk takes an edge of a better tier wherever
there is one left:

    0  OWN        ordinary edges: attributes, list items, dict entries
    1  CONTAINER  the numbered lists in which Keras keeps layers (`_functional`, `_operations`, `layer-3`)
    2  ODD        an edge to a shared object from one whose own parts are all of another size:
                  `agent.best` is a layer where agent's own parts are networks; `actor.critic` is a network
                  where actor's own parts are layers
    3  PRIVATE    bookkeeping: `variables`, `keras_api`, `_`-edges to shared objects and to lists, and lists
                  that hold only variables of others (`agent.params = agent.actor.trainable_variables`)
    4  OPTIMIZER  edges out of an optimizer
    5  LIST       an optimizer's `_variables` and `_trainable_variables`, whose entries are named elsewhere

An object's size is the number of levels below it. Depth-first in the order of creation, because an alias is
made after the object that it points at, and so after the owner of that object.
"""

from __future__ import annotations

import re
from collections import deque
from typing import NamedTuple

from ckpttool import limits
from ckpttool.formats.object_graph import Graph, Node, step
from ckpttool.leaf import Path

OWN, CONTAINER, ODD, PRIVATE, OPTIMIZER, LIST = range(6)

_CONTAINER = re.compile(r"_functional|_operations|_layers|layer-\d+|layer_with_weights-\d+")
_BOOKKEEPING = frozenset(
    ("keras_api", "variables", "trainable_variables", "non_trainable_variables", "regularization_losses")
)
_OPTIMIZER_LISTS = frozenset(("_variables", "_trainable_variables", "_trainable_variables_indices"))


class Tree(NamedTuple):
    """The canonical tree of the objects that can be reached from the root.

    `parents` holds each one's parent and edge; `paths` its path, in the tree's preorder with children as
    stored; `deep` counts the objects just below the limit on depth, which have no path.
    """

    parents: dict[int, tuple[int, str]]
    paths: dict[int, Path]
    deep: int


def is_optimizer(node: Node) -> bool:
    """Say whether an object is an optimizer, by what it holds.

    Keras 3 and Keras 2.11 keep `_iterations` and `_learning_rate`, older ones `iter` and `decay` (an agent
    may well have an `iter` of its own); TF1's only have slots.
    """
    edges = node.children
    modern = "_iterations" in edges and ("_learning_rate" in edges or "_variables" in edges)
    return bool(node.slots) or modern or ("iter" in edges and "decay" in edges)


def canonical(graph: Graph) -> Tree:
    """Choose one path for every object."""
    if not graph:
        return Tree({}, {}, 0)
    parents = _choose(graph, _tiers(graph))
    return Tree(parents, *_spell(graph, parents))


# The tier of every edge.


def _tiers(graph: Graph) -> list[list[int]]:
    tiers = [_plain_tiers(node, graph) if node.children else [] for node in graph]
    owners = _owners(graph, tiers)
    sizes = _sizes(graph, tiers, owners)
    for number, node in enumerate(graph):
        if not node.children or tiers[number][0] >= OPTIMIZER:
            continue
        children = list(node.children.values())
        shared = [owners[child] == _SEVERAL for child in children]
        if not any(shared):
            continue
        if node.listlike and all(shared) and not any(graph[child].children for child in children):
            tiers[number] = [PRIVATE] * len(children)
        else:
            own = [sizes[child] for child in children if owners[child] == number and sizes[child]]
            tiers[number] = _judged(node, tiers[number], own, shared, sizes)
    return tiers


def _plain_tiers(node: Node, graph: Graph) -> list[int]:
    if is_optimizer(node):
        return [LIST if edge in _OPTIMIZER_LISTS else OPTIMIZER for edge in node.children]
    return [_plain_tier(edge, graph[child]) for edge, child in node.children.items()]


def _plain_tier(edge: str, child: Node) -> int:
    if edge.startswith(("_", "layer")) and _CONTAINER.fullmatch(edge):
        return CONTAINER
    # `self._net = ...` is as good a name as any; lists that Keras keeps for itself are not.
    if edge in _BOOKKEEPING or (edge.startswith("_") and child.listlike):
        return PRIVATE
    return OWN


def _judged(node: Node, tiers: list[int], own: list[int], shared: list[bool], sizes: list[int]) -> list[int]:
    least, most = min(own, default=0), max(own, default=0)
    judged = []
    for (edge, child), tier, several in zip(node.children.items(), tiers, shared, strict=True):
        if several and sizes[child] and tier == OWN:
            odd = own and not least <= sizes[child] <= most
            judged.append(PRIVATE if edge.startswith("_") else ODD if odd else OWN)
        else:
            judged.append(tier)
    return judged


_NOBODY, _SEVERAL = -1, -2


def _owners(graph: Graph, tiers: list[list[int]]) -> list[int]:
    # The one object that holds each object by an ordinary edge, or _SEVERAL.
    owners = [_NOBODY] * len(graph)
    for number, node in enumerate(graph):
        for child, tier in zip(node.children.values(), tiers[number], strict=True):
            if tier <= CONTAINER and child and child != number and owners[child] != number:
                owners[child] = number if owners[child] == _NOBODY else _SEVERAL
    return owners


def _sizes(graph: Graph, tiers: list[list[int]], owners: list[int]) -> list[int]:
    # Levels below each object, over the parts that it alone owns; over all its parts if it owns none.
    sizes = [-1 if node.children else 0 for node in graph]
    for start, size in enumerate(sizes):
        stack = [start] if size < 0 else []
        while stack:
            number = stack[-1]
            parts = _parts(graph[number], tiers[number], owners, number)
            if sizes[number] == -1:
                sizes[number] = 0  # so that a cycle ends here
                stack += [part for part in parts if sizes[part] == -1]
            else:
                sizes[number] = 1 + max((sizes[part] for part in parts), default=-1)
                stack.pop()
    return sizes


def _parts(node: Node, tiers: list[int], owners: list[int], number: int) -> list[int]:
    pairs = zip(node.children.values(), tiers, strict=True)
    ordinary = [part for part, tier in pairs if tier <= CONTAINER and part != number]
    return [part for part in ordinary if owners[part] == number] or ordinary


# The canonical tree.


def _choose(graph: Graph, tiers: list[list[int]]) -> dict[int, tuple[int, str]]:
    """Return each reached object's parent and edge in the canonical tree."""
    parents: dict[int, tuple[int, str]] = {0: (-1, "")}
    fresh: list[tuple[int, int, str]] = []  # tier 0, a stack: depth first
    later: tuple[deque[tuple[int, int, str]], ...] = tuple(deque() for _ in range(LIST + 1))
    number = 0
    while True:
        own = []
        for (edge, child), tier in zip(graph[number].children.items(), tiers[number], strict=True):
            if child in parents:
                continue
            if tier == OWN:
                own.append((child, number, edge))
            else:
                later[tier].append((child, number, edge))
        fresh += reversed(own)
        while True:
            found = _next(fresh, later, parents)
            if found is None:
                return parents
            number, parent, edge = found
            parents[number] = (parent, edge)
            if graph[number].children:
                break


def _next(
    fresh: list[tuple[int, int, str]],
    later: tuple[deque[tuple[int, int, str]], ...],
    parents: dict[int, tuple[int, str]],
) -> tuple[int, int, str] | None:
    while fresh:
        found = fresh.pop()
        if found[0] not in parents:
            return found
    for waiting in later:
        while waiting:
            found = waiting.popleft()
            if found[0] not in parents:
                return found
    return None


def _spell(graph: Graph, parents: dict[int, tuple[int, str]]) -> tuple[dict[int, Path], int]:
    """Return the canonical paths in the order of the canonical tree, children as stored."""
    waiting: list[tuple[int, Path]] = [(0, ())]
    paths: dict[int, Path] = {}
    deep, most = 0, limits.current().graph_depth
    while waiting:
        number, path = waiting.pop()
        paths[number] = path
        node = graph[number]
        chosen = [(edge, child) for edge, child in node.children.items() if parents[child] == (number, edge)]
        if len(path) < most:
            waiting += [(child, (*path, step(node, edge))) for edge, child in reversed(chosen)]
        else:
            deep += len(chosen)
    return paths, deep
