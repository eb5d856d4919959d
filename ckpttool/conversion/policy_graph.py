"""The graph of an agent's policy, whose constants are tensors of the agent's checkpoint.

The network that plays, built a second time from tensors that contain their own numbers instead of weights,
shows which tensor each constant of its graph is, or from which it is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ckpttool.conversion.export import activation_place
from ckpttool.conversion.graph_code import PolicyCalls
from ckpttool.conversion.model_code import NumberedTree, derive_code_settings, number_tensors
from ckpttool.core.errors import UnsupportedError
from ckpttool.core.tree import Leaf, Path, attr
from ckpttool.evaluation.restore import Agent
from ckpttool.graphs.graph import Constant, Graph, OperatorNode, inline_constant
from ckpttool.libraries.schema import batch_norm_path, canonical_weight_path
from ckpttool.mapping.rules import AxisSlice, Cast, Move, Permute, Rule, chain_rules
from ckpttool.networks.build import policy_network
from ckpttool.networks.network import Dense, LayerNorm, Network
from ckpttool.networks.network_graph import network_graph


def read_policy_graph(agent: Agent) -> tuple[Graph, PolicyCalls]:
    """Return what the agent's policy computes, and how it is called.

    The graph computes an action and the next states from observations and states.
    Raise UnsupportedError for an agent without a policy that can be played, and for a constant that is
    computed from weights in an unknown way.
    """
    title = agent.title("actor")
    part = agent.playable(title)
    if part is None:
        raise UnsupportedError("--code needs a policy that can be played", file=agent.checkpoint.path)
    settings, _ = derive_code_settings(agent)
    numbered = number_tensors(agent)
    front = agent.front(title)
    networks = [policy_network(tree, part, settings, front) for tree in (agent.tree, numbered.tree)]
    graph, twin = graphs = [*map(_graph, networks)]
    if [node.op for node in graph.nodes] != [node.op for node in twin.nodes]:
        raise UnsupportedError("--code cannot write a network whose layers depend on its weights")
    act = "" if settings.choices is None else '.astype("int64")' + "[:, 0]" * settings.choices.single
    discrete = agent.binding.facts.one_hot
    encodings = tuple(discrete.get(value.name) for value in graph.inputs)
    for value, choices in zip(graph.inputs, encodings, strict=True):
        if choices is not None and (value.shape or ())[1:] != (sum(choices.counts),):
            # Several observations behind each other.
            raise UnsupportedError(
                "--code cannot write this encoding of discrete observations", found=value.name
            )
    states = networks[0].states
    if states and [slot.name for slot in states] != [value.name for value in graph.inputs[-len(states) :]]:
        raise UnsupportedError("--code cannot write a policy whose states are not its last inputs")
    return _Binder(agent, numbered).bind(*graphs), PolicyCalls(
        act, encodings, tuple(slot.shape for slot in states)
    )


def _graph(network: Network) -> Graph:
    """Return a network as a graph; constants outside its layers are named after the end where they are."""
    layers = [n for n, node in enumerate(network.nodes) if isinstance(node.layer, Dense | LayerNorm)]
    return network_graph(network, [activation_place(n, layers) for n in range(len(network.nodes))])


class _Binder:
    """Replaces constants that are weights by tensors of the checkpoint, and by nodes that compute them."""

    def __init__(self, agent: Agent, numbered: NumberedTree) -> None:
        self.agent, self.numbered = agent, numbered
        self.firsts = sorted(numbered.moves)
        self.constants: dict[str, Constant] = {}
        self.nodes: list[OperatorNode] = []

    def bind(self, graph: Graph, twin: Graph) -> Graph:
        """Return the graph; `twin` has the numbers of the tensors."""
        for name, constant in graph.constants.items():
            array, numbers = constant.read(name), twin.constants[name].read(name)
            if array.dtype == np.float32 and not np.array_equal(array, numbers):
                self._add(name, array, numbers)
            else:
                self.constants[name] = constant
        return replace(graph, nodes=(*self.nodes, *graph.nodes), constants=self.constants)

    def _add(self, name: str, array: np.ndarray, numbers: np.ndarray) -> None:
        """Add a constant under this name, or the nodes that compute it."""
        if (leaf := self._leaf(numbers.view(np.int32))) is not None:
            self.constants[name] = leaf
            return
        for op, parts in self._parts(array, numbers):
            inputs = tuple(f"{name}/{number}" for number in range(len(parts)))
            leaves = [self._leaf(array.view(np.int32)) for array in parts]
            if all(leaf is not None for leaf in leaves):
                self.constants |= {key: leaf for key, leaf in zip(inputs, leaves, strict=True) if leaf}
                self.nodes.append(OperatorNode(op, inputs, (name,), {"axis": 0} if op == "Concat" else {}))
                return
        for norm, epsilon in self._norms():
            scale, variance = (norm[name] for name in ("scale", "var"))
            values = [leaf.read(name) for leaf in (scale, variance)]
            factor = (values[0] / np.sqrt(values[1].astype(np.float64) + epsilon)).astype(np.float32)
            if np.array_equal(factor, array):
                self._add_factor(name, scale, variance, epsilon)
                return
        raise UnsupportedError("--code cannot write a constant that is computed from weights", found=name)

    def _parts(self, array: np.ndarray, numbers: np.ndarray) -> Iterator[tuple[str, list[np.ndarray]]]:
        """Yield how a constant may be computed from tensors: joined rows, a sum of two."""
        column = np.ascontiguousarray(numbers.reshape(numbers.shape[0] if numbers.ndim else 1, -1)[:, 0])
        owners = np.searchsorted(self.firsts, column.view(np.int32), "right")
        for row in np.flatnonzero(np.diff(owners)) + 1:
            yield "Concat", [np.ascontiguousarray(rows) for rows in (numbers[:row], numbers[row:])]
        if array.ndim == 1:
            sums = numbers.view(np.int32)
            for first, second in itertools.combinations(self.numbered.moves.items(), 2):
                # Sums of numbers alone are ambiguous; both biases of a cell lie beside each other.
                leaves = [self.numbered.leaf(move) for _, move in (first, second)]
                together = first[1].target[:-1] == second[1].target[:-1]
                if together and all(leaf.shape == array.shape for leaf in leaves):
                    rows = [np.arange(n, n + array.size, dtype=np.int32) for n, _ in (first, second)]
                    if np.array_equal(rows[0] + rows[1], sums):
                        yield "Add", [row.view(np.float32) for row in rows]

    def _leaf(self, numbers: np.ndarray) -> Constant | None:
        """Return the part of a tensor that an array of numbers is, None if it is not of one tensor."""
        if not numbers.size or numbers.min() <= 0:
            return None
        first = self.firsts[int(np.searchsorted(self.firsts, numbers.min(), "right")) - 1]
        move = self.numbered.moves[first]
        shape = self.numbered.leaf(move).shape
        whole = np.arange(first, first + int(np.prod(shape)), dtype=np.int32).reshape(shape)
        for axes in itertools.permutations(range(whole.ndim)):
            turned = whole.transpose(axes)
            begin = np.argwhere(turned == numbers.flat[0])
            if turned.ndim != numbers.ndim or not len(begin):
                continue
            ends = [
                (start, start + extent)
                for start, extent in zip(begin[0].tolist(), numbers.shape, strict=True)
            ]
            if np.array_equal(turned[tuple(slice(*end) for end in ends)], numbers):
                return self._constant(move, axes, turned.shape, ends)
        return None

    def _constant(
        self, move: Move, axes: Sequence[int], shape: Sequence[int], ends: Sequence[tuple[int, int]]
    ) -> Constant:
        steps: list[Rule] = [Permute(tuple(axes))] if list(axes) != sorted(axes) else []
        steps += [
            AxisSlice(axis, *end, whole)
            for axis, (end, whole) in enumerate(zip(ends, shape, strict=True))
            if end != (0, whole)
        ]
        leaf = self.agent.checkpoint.tree[move.source]
        assert isinstance(leaf, Leaf)  # noqa: S101 - a move of a tensor
        if leaf.dtype != "float32":
            # Policies compute in float32, whatever the type of their weights.
            steps.append(Cast("float32"))
        return Constant(leaf, move.source, chain_rules(move.rule, *steps) if steps else move.rule)

    def _norms(self) -> Iterator[tuple[dict[str, Constant], float]]:
        """Yield the tensors of the batch norms before or among the layers, and their epsilon."""
        moves = {move.target: move for move in self.numbered.moves.values()}
        binding = self.agent.binding
        own = self.agent.known.norm_epsilon(binding.norm_kind, binding.facts.epsilon)
        places: list[tuple[Path, str, float]] = [
            (batch_norm_path(component, number), "var", epsilon)
            for component, front in binding.fronts.items()
            for number, epsilon in front.norms
        ]
        places += [
            (canonical_weight_path(part, position, "scale")[:-1], "variance", own)
            for part in binding.parts
            for position, layer in enumerate(part.layers)
            if layer.kind == "batch_norm"
        ]
        for path, variance, epsilon in places:
            stats = {"scale": moves.get((*path, attr("scale"))), "var": moves.get((*path, attr(variance)))}
            leaves = {
                name: Constant(leaf, move.source, move.rule)
                for name, move in stats.items()
                if move is not None and isinstance(leaf := self.agent.checkpoint.tree[move.source], Leaf)
            }
            if len(leaves) == 2:
                yield leaves, epsilon

    def _add_factor(self, name: str, scale: Constant, variance: Constant, epsilon: float) -> None:
        """Add the nodes that compute scale / sqrt(variance + epsilon) in float64."""
        self.constants |= {f"{name}/scale": scale, f"{name}/var": variance}
        self.constants[f"{name}/epsilon"] = inline_constant(np.asarray(epsilon, np.float64))
        names = [f"{name}/{step}" for step in ("wide", "sum", "root", "quotient")]
        wide = {"to": "float64"}
        self.nodes += [
            OperatorNode("Cast", (f"{name}/var",), (names[0],), wide),
            OperatorNode("Add", (names[0], f"{name}/epsilon"), (names[1],), {}),
            OperatorNode("Sqrt", (names[1],), (names[2],), {}),
            OperatorNode("Div", (f"{name}/scale", names[2]), (names[3],), {}),
            OperatorNode("Cast", (names[3],), (name,), {"to": "float32"}),
        ]
