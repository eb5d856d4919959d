"""The other paths of the objects in an object graph: a bounded list of those that repeat no object."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from ckpttool import limits
from ckpttool.formats.object_graph import Graph, step
from ckpttool.formats.object_graph.paths import Tree
from ckpttool.leaf import Key, Path

# Limits on hostile graphs: real ones give an object a handful of paths.
MAX_ALIASES = 63
MAX_ROUTES = 200_000


class Aliases(NamedTuple):
    """Each object's further paths, shortest first.

    `capped` counts the objects with more than MAX_ALIASES of them; `complete` says that no walk was cut
    short.
    """

    paths: dict[int, tuple[Path, ...]]
    capped: int
    complete: bool


class _Route(NamedTuple):
    """A way to `node`: by `before` (another route, or an object's canonical path), then by `edge`.

    Routes compare by length, then in the order in which they were `found`.
    """

    length: int
    found: int
    node: int
    before: _Route | int
    edge: Key


def find(graph: Graph, tree: Tree, wanted: set[int]) -> Aliases:
    """Return the paths of the objects `wanted` that differ from their canonical ones.

    A route starts with an edge that is not in the canonical tree and goes on by any edge, so that the work
    is as much as there are routes, and those of the rest of the graph cost nothing.
    """
    walk = _Walk(graph, tree)
    walk.start()
    complete = walk.extend()
    paths, capped = {}, 0
    for number in wanted & walk.routes.keys():
        routes = sorted(walk.routes[number])
        capped += len(routes) > MAX_ALIASES
        paths[number] = tuple(_spelled(route, tree.paths) for route in routes[:MAX_ALIASES])
    return Aliases(paths, capped, complete)


def _spelled(route: _Route, canonical: dict[int, Path]) -> Path:
    steps = []
    at: _Route | int = route
    while isinstance(at, _Route):
        steps.append(at.edge)
        at = at.before
    return (*canonical[at], *reversed(steps))


class _Walk:
    """The routes found so far, and those that have still to be followed, the shortest first."""

    def __init__(self, graph: Graph, tree: Tree) -> None:
        self.routes: dict[int, list[_Route]] = {}
        self._graph = graph
        self._tree = tree
        self._heap: list[_Route] = []
        self._found = 0
        # The paths are in preorder, so an object's descendants follow it directly.
        self._position = {number: at for at, number in enumerate(tree.paths)}
        self._below = dict.fromkeys(tree.paths, 1)
        for number in reversed(tree.paths):
            if number:
                self._below[tree.parents[number][0]] += self._below[number]

    def start(self) -> None:
        """Find the routes that are a canonical path and one more edge."""
        parents = self._tree.parents
        for number, path in self._tree.paths.items():
            node = self._graph[number]
            for edge, child in node.children.items():
                if parents[child] != (number, edge) and not self._over(child, number):
                    self._keep(len(path) + 1, child, number, step(node, edge))

    def extend(self) -> bool:
        """Follow the routes, shortest first; say whether all were followed before the limit."""
        limit = self._found + MAX_ROUTES + 8 * len(self._graph)
        deepest = limits.current().graph_depth
        while self._heap and self._found < limit:
            route = heapq.heappop(self._heap)
            known = self.routes.setdefault(route.node, [])
            known.append(route)
            if len(known) > MAX_ALIASES or route.length >= deepest:
                continue
            node = self._graph[route.node]
            for edge, child in node.children.items():
                if not self._on(route, child):
                    self._keep(route.length + 1, child, route, step(node, edge))
        return not self._heap

    def _keep(self, length: int, node: int, before: _Route | int, edge: Key) -> None:
        self._found += 1
        route = _Route(length, self._found, node, before, edge)
        if self._graph[node].children:
            heapq.heappush(self._heap, route)
        else:
            self.routes.setdefault(node, []).append(route)

    def _on(self, route: _Route, node: int) -> bool:
        # Say whether the route passes the object already.
        if not self._graph[node].children:
            return False
        at: _Route | int = route
        while isinstance(at, _Route):
            if at.node == node:
                return True
            at = at.before
        return self._over(node, at)

    def _over(self, upper: int, lower: int) -> bool:
        # Say whether `upper` is `lower` or on its canonical path. One without a position is too deep to name.
        first = self._position.get(upper, -1)
        return first < 0 or first <= self._position[lower] < first + self._below[upper]
