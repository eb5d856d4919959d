"""Use of weights in a graph: their calls, their roles in products, and the settings of their nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpttool.core.activations import CallPlace
from ckpttool.core.tree import Path
from ckpttool.graphs.graph import Graph, OperatorNode, Value
from ckpttool.graphs.operators import operator_kind
from ckpttool.mapping.rules import KEEP, Permute

# Their results depend on the extents of their input, not on its values.
_OF_EXTENTS = frozenset(("Shape", "Size"))


def number_calls(graph: Graph) -> dict[Path, CallPlace]:
    """Return per weight the first node that uses it among the nodes that use weights, in their order.

    A weight may reach its node through nodes that compute with constants only.
    """
    calls: dict[Path, CallPlace] = {}
    known = {value.name: 0 for value in graph.inputs}
    weights = {
        name: frozenset((leaf.path,)) for name, leaf in graph.constants.items() if leaf.path is not None
    }
    _follow_calls(graph, graph.nodes, known, weights, calls)
    outputs = [known.get(value.name, 0) for value in graph.outputs]
    return {
        path: call._replace(leads=sum((bits >> call.number & 1) << n for n, bits in enumerate(outputs)))
        for path, call in calls.items()
    }


def _follow_calls(
    graph: Graph,
    nodes: Sequence[OperatorNode],
    known: dict[str, int],
    weights: dict[str, frozenset[Path]],
    calls: dict[Path, CallPlace],
) -> None:
    """Add the calls of some nodes; `known` are the calls that values depend on, `weights` constants."""
    for node in nodes:
        branches = [attribute for attribute in node.attributes.values() if isinstance(attribute, Graph)]
        names = [name for name in node.inputs if name]
        used = frozenset[Path]().union(*(weights.get(name, frozenset()) for name in names))
        if not (branches or any(name in known for name in names) or _looks_up(graph, node, weights)):
            weights.update((name, used) for name in node.outputs)
            continue
        before = 0
        for name in names if node.op not in _OF_EXTENTS else ():
            before |= known.get(name, 0)
        # Numbers rise in the order in which weights are added.
        number = next(reversed(calls.values())).number + 1 if calls else 0
        for path in used:
            calls.setdefault(path, CallPlace(number, before))
        for path in used:
            before |= 1 << calls[path].number
        for branch in branches:
            inner = {**known, **dict.fromkeys((value.name for value in branch.inputs), before)}
            _follow_calls(graph, branch.nodes, inner, dict(weights), calls)
            for value in branch.outputs:
                before |= inner.get(value.name, 0)
        known.update(dict.fromkeys(node.outputs, before))


def _looks_up(graph: Graph, node: OperatorNode, weights: Mapping[str, frozenset[Path]]) -> bool:
    """Return whether a node takes rows of a weight at positions that the program computes."""
    if node.op != "Gather" or not weights.get(node.inputs[0]):
        return False
    positions = graph.constants.get(node.inputs[1])
    return positions is None or positions.shape != ()


# Attributes that distinguish layers of one kind and shape, by the setting's name, and kinds of these layers.
_SETTINGS = {"dilation": "dilations", "strides": "strides", "epsilon": "epsilon", "groups": "num_groups"}
_LAYERS = ("window", "norm", "channelwise")


def find_roles(graph: Graph) -> dict[Path, tuple[str, Mapping[str, Any]]]:
    """Return the role of weights in products with activations, and the settings of the nodes that use them.

    A matrix is "in_out" if the product is x @ W, "out_in" if it is x @ W.T; a vector that is added to such a
    product is "added". Several roles, and settings that differ between nodes, are left out.
    """
    uses = _WeightRoles(graph)
    uses.add_all(graph.nodes)
    roles = {path: next(iter(role)) for path, role in uses.roles.items() if len(role) == 1}
    settings = {
        path: setting[0]
        for path, setting in uses.settings.items()
        if setting.count(setting[0]) == len(setting)
    }
    return {path: (roles.get(path, ""), settings.get(path, {})) for path in {**roles, **settings}}


_TURN = Permute((1, 0))


class _WeightRoles:
    """Roles of weights by path; matrices of the graph's constants, each with whether it is transposed."""

    def __init__(self, graph: Graph) -> None:
        self.roles: dict[Path, set[str]] = {}
        self.settings: dict[Path, list[dict[str, Any]]] = {}
        self._paths = {name: constant.path for name, constant in graph.constants.items()}
        self._products: set[str] = set()
        self._vectors: dict[str, Path] = {}
        self._matrices: dict[str, tuple[Path, bool]] = {}
        for name, constant in graph.constants.items():
            if constant.path is None:
                continue
            if len(constant.shape or ()) == 1 and constant.rule == KEEP:
                self._vectors[name] = constant.path
            elif len(constant.shape or ()) == 2 and constant.rule in (KEEP, _TURN):
                self._matrices[name] = constant.path, constant.rule == _TURN

    def add_all(self, nodes: Sequence[OperatorNode]) -> None:
        """Add nodes, with those of branches and loops."""
        for node in nodes:
            first, second, third = (*node.inputs, "", "", "")[:3]
            if node.op in ("Transpose", "Identity") and first in self._matrices:
                path, turned = self._matrices[first]
                swaps = node.op == "Transpose" and tuple(node.attributes.get("perm") or (1, 0)) == (1, 0)
                self._matrices[node.outputs[0]] = path, turned != swaps
            elif node.op in ("MatMul", "Gemm") and second in self._matrices:
                self._multiply(node, second, third)
            elif operator_kind(node.op) in _LAYERS and (scale := self._paths.get(second)) is not None:
                named = {name: node.attributes.get(word) for name, word in _SETTINGS.items()}
                known = {name: value for name, value in named.items() if value is not None}
                self.settings.setdefault(scale, []).append(known)
            elif node.op == "Add" and not self._products.isdisjoint((first, second)):
                self._add_bias(second if first in self._products else first)
            for branch in node.attributes.values():
                self.add_all(branch.nodes if isinstance(branch, Graph) else ())

    def _multiply(self, node: OperatorNode, matrix: str, bias: str) -> None:
        path, turned = self._matrices[matrix]
        turned = turned != bool(node.attributes.get("transB", 0))
        self.roles.setdefault(path, set()).add("out_in" if turned else "in_out")
        self._products.add(node.outputs[0])
        self._add_bias(bias)

    def _add_bias(self, name: str) -> None:
        if name in self._vectors:
            self.roles.setdefault(self._vectors[name], set()).add("added")


def extract_module(graph: Graph, scope: tuple[str, ...]) -> Graph | None:
    """Return the part of a graph that belongs to a module with one input and one output, else None."""
    dynamic = {value.name for value in graph.inputs}
    constant: dict[str, OperatorNode] = {}
    inside: list[OperatorNode] = []
    for node in graph.nodes:
        if dynamic.isdisjoint(node.inputs):
            constant.update((name, node) for name in node.outputs)
            continue
        dynamic.update(node.outputs)
        if node.scope[: len(scope)] == scope:
            inside.append(node)
    outputs = {name for node in inside for name in node.outputs}
    entering = {name for node in inside for name in node.inputs if name in dynamic} - outputs
    outside = [node for node in graph.nodes if node.scope[: len(scope)] != scope]
    used = {name for node in outside for name in node.inputs} | {value.name for value in graph.outputs}
    leaving = outputs & used
    if len(entering) != 1 or len(leaving) != 1:
        return None
    needed: dict[str, OperatorNode] = {}
    waiting = [name for node in inside for name in node.inputs if name in constant]
    while waiting:
        node = constant[waiting.pop()]
        if node.outputs[0] not in needed:
            needed[node.outputs[0]] = node
            waiting += [name for name in node.inputs if name in constant]
    before = tuple(node for node in graph.nodes if node.outputs and node.outputs[0] in needed)
    return Graph(
        (*before, *inside),
        tuple(map(Value, entering)),
        tuple(map(Value, leaving)),
        graph.constants,
    )
