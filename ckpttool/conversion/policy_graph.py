"""The graphs of an agent's networks, whose constants are tensors of the agent's checkpoint.

A network, built a second time from tensors that contain their own numbers instead of weights,
shows which tensor each constant of its graph is, or from which it is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckpttool.conversion.export import activation_place
from ckpttool.conversion.graph_code import Method, PolicyCalls
from ckpttool.core import sidecar
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import CkpttoolError, UnsupportedError, UsageError
from ckpttool.core.source import Inline
from ckpttool.core.tree import Leaf, Path, Tree, attr
from ckpttool.evaluation.agent_networks import (
    ActionBounds,
    build_part_network,
    derive_network_settings,
    require_even_bounds,
)
from ckpttool.evaluation.restore import Agent
from ckpttool.graphs.graph import Constant, Graph, OperatorNode, inline_constant
from ckpttool.libraries.schema import (
    NORMALIZER,
    VALUES,
    AgentNetwork,
    Choices,
    batch_norm_path,
    canonical_weight_path,
    layer_widths,
)
from ckpttool.mapping.rules import AxisSlice, Cast, Move, Permute, Rule, chain_rules
from ckpttool.networks.build import (
    UNBOUNDED,
    NetworkSettings,
    policy_network,
    q_network,
    value_network,
)
from ckpttool.networks.network import Activation, Dense, LayerNorm, Network
from ckpttool.networks.network_graph import network_graph


class NumberedTree(NamedTuple):
    """The canonical tree with numbers instead of weights, and the move of each tensor by its first number."""

    tree: Tree
    moves: Mapping[int, Move]

    def move(self, array: np.ndarray) -> Move | None:
        """Return the move of the tensor that an array is, None if it is no tensor as a whole."""
        if array.dtype != np.float32 or not array.size:
            return None
        numbers = np.ascontiguousarray(array).view(np.int32)
        first = int(numbers.flat[0])
        move = self.moves.get(first)
        expected = np.arange(first, first + array.size, dtype=np.int32).reshape(array.shape)
        if move is None or self.leaf(move).shape != array.shape:
            return None
        return move if np.array_equal(numbers, expected) else None

    def leaf(self, move: Move) -> Leaf:
        """Return the tensor that a move makes."""
        leaf = self.tree[move.target]
        assert isinstance(leaf, Leaf)  # noqa: S101 - only tensors have numbers
        return leaf


def number_tensors(agent: Agent) -> NumberedTree:
    """Return the agent's tree with numbers: bits of float32, which are moved but never rounded."""
    moves = [*agent.binding.moves.moves, *(m for front in agent.binding.fronts.values() for m in front.moves)]
    by_target = {move.target: move for move in reversed(moves)}
    leaves = dict(agent.tree.items())
    owners: dict[int, Move] = {}
    firsts: dict[tuple[Path, str], int] = {}
    free = 1
    for path, leaf in agent.tree.tensors():
        move = by_target.get(path)
        if move is None:
            continue
        # Two networks that share a tensor share its numbers.
        first = firsts.setdefault((move.source, move.rule.name), free)
        free = max(free, first + leaf.size)
        owners.setdefault(first, move)
        data = np.arange(first, first + leaf.size, dtype=np.int32).tobytes()
        leaves[path] = replace(leaf, dtype="float32", source=Inline(data), of=None)
    return NumberedTree(Tree(leaves), owners)


def derive_code_settings(agent: Agent) -> tuple[NetworkSettings, sidecar.LedgerEntries]:
    """Return the settings of the agent's networks; raise UsageError without a fact that an option gives."""
    try:
        settings, assumed = derive_network_settings(agent, ActionBounds((), (), None))
    except UnsupportedError as error:
        # The file states it in a form that is not understood.
        raise UsageError(error.message, file=error.file, found=error.found, hint=error.hint) from error
    if settings.choices is None and settings.action_low:
        require_even_bounds(agent, settings)
    elif settings.choices is None and settings.head not in UNBOUNDED:
        raise UsageError(
            "--code needs the action bounds, which no file contains",
            file=agent.checkpoint.path,
            hint="add --env ID, or --bounds LOW HIGH",
        )
    return settings, assumed


class AgentGraphs(NamedTuple):
    """What an agent's networks compute, the policy first; what is not computed, with the reason.

    `calls` are those of the policy, None without one.
    """

    methods: tuple[Method, ...]
    calls: PolicyCalls | None
    skipped: tuple[str, ...]


def read_agent_graphs(agent: Agent) -> AgentGraphs | None:
    """Return what the networks of an agent compute; None without a network.

    A policy of discrete actions computes their scores. With states, its graph also computes the next ones.
    Raise UnsupportedError for a policy that cannot be played, and for a constant that is computed from
    weights in an unknown way.
    """
    settings, _ = derive_code_settings(agent)
    numbered = number_tensors(agent)
    policy, methods, skipped = agent.binding.policy, [], []
    values = [part.state_value for part in agent.binding.parts]
    parts = [part for part in agent.binding.parts if part not in values]
    for part in sorted(parts, key=lambda part: part is not policy):
        try:
            methods.append(_read_part(agent, numbered, part, settings))
        except CkpttoolError as error:
            if part is policy:
                raise
            skipped.append(f"{part.title}: {error.message}")
    if not methods:
        if skipped:
            raise UnsupportedError("--code cannot write any network of the file", found="; ".join(skipped))
        return None
    calls = None if policy is None else _read_calls(agent, methods[0].graph, settings)
    return AgentGraphs(tuple(methods), calls, tuple(skipped))


def _read_part(agent: Agent, numbered: NumberedTree, part: AgentNetwork, settings: NetworkSettings) -> Method:
    network, twin = (
        _build(replace(agent, tree=tree), part, settings) for tree in (agent.tree, numbered.tree)
    )
    # Shared layers, which the builder finds by their values, are computed twice with numbers or not.
    if [type(n.layer) for n in network.nodes] != [type(n.layer) for n in twin.nodes]:
        network = _with_constants(network, twin)
    output = "action" if part.acts else "value"
    graph, numbers = _graph(network, output), _graph(twin, output)
    if [node.op for node in graph.nodes] != [node.op for node in numbers.nodes]:
        raise UnsupportedError("--code cannot write a network whose layers depend on its weights")
    graph = _Binder(agent, numbered).bind(graph, numbers, settings)
    states = network.states
    if states and [slot.name for slot in states] != [value.name for value in graph.inputs[-len(states) :]]:
        raise UnsupportedError("--code cannot write a policy whose states are not its last inputs")
    what = "score of every action" if settings.choices is not None else "action"
    shapes = [(value.name.strip("/"), ", ".join(map(str, value.shape or ()))) for value in graph.inputs]
    inputs = ", ".join(f"{name} [{shape}]" for name, shape in shapes)
    shape = ", ".join(map(str, graph.outputs[0].shape or ()))
    if agent.binding.facts.one_hot and not part.acts:
        inputs += ", obs one-hot"
    text = f"Return the {what if part.acts else output} [{shape}] of {inputs}."
    return Method(graph, f"{part.title}_output" if part is not agent.binding.policy else "", text)


def _build(agent: Agent, part: AgentNetwork, settings: NetworkSettings) -> Network:
    if part.acts:
        chosen, front = agent.playable(part.title) or part, agent.front(part.title)
        if front is not None and not agent.binding.facts.one_hot and front.joins_rows:
            # Its inputs behind each other are one row of numbers.
            front = None
        return policy_network(agent.tree, chosen, settings.scores, front)
    whole, policy = agent.runnable(part.title) or part, agent.binding.policy
    front = None if policy is None else agent.front(policy.title)
    if policy is None or front is None or front.joins_rows:
        # It receives discrete observations as one-hot rows, which `encoded` of the code makes.
        return build_part_network(agent, whole, settings)
    (features, actions), (inputs, _) = (layer_widths(agent.tree, one) for one in (policy, whole))
    rows = sum(stream.size for stream in front.streams)
    is_value = part.component in VALUES
    fits = inputs == rows + actions * (not is_value) and not any(stream.image for stream in front.streams)
    if not fits or (front.cells and features == rows):
        raise UnsupportedError("no name shows whether it receives observations or what the encoder computes")
    if is_value:
        return value_network(agent.tree, whole, settings)
    return q_network(agent.tree, whole, settings, rows, actions)


def _read_calls(agent: Agent, graph: Graph, settings: NetworkSettings) -> PolicyCalls:
    """Return how a policy is called whose graph this is."""
    discrete, states = agent.binding.facts.one_hot, len(graph.outputs) - 1
    encodings = tuple(discrete.get(value.name) for value in graph.inputs)
    for value, choices in zip(graph.inputs, encodings, strict=True):
        if choices is not None and (value.shape or ())[1:] != (sum(choices.counts),):
            # Several observations behind each other.
            raise UnsupportedError(
                "--code cannot write this encoding of discrete observations", found=value.name
            )
    shapes = tuple(
        tuple(int(extent) for extent in (value.shape or ())[1:])
        for value in graph.inputs[len(graph.inputs) - states :]
    )
    return PolicyCalls(_chosen(settings.choices), encodings, shapes)


def _chosen(choices: Choices | None) -> str:
    """Return the expression of the actions whose scores are `output`."""
    if choices is None:
        return "output"
    if choices.single:
        return "output.argmax(-1)" + f" + {choices.starts[0]}" * (choices.starts[0] != 0)
    ends = np.cumsum(choices.counts)[:-1].tolist()
    shift = f" + np.array({[*choices.starts]})" * any(choices.starts)
    return f"np.stack([each.argmax(-1) for each in np.split(output, {ends}, -1)], -1){shift}"


def _with_constants(network: Network, numbered: Network) -> Network:
    """Return the numbered network, whose layers without tensors have the values of the other.

    Raise UnsupportedError if it has other such layers.
    """
    kinds = (Dense, LayerNorm, Activation)
    free = iter([n.layer for n in network.nodes if not isinstance(n.layer, kinds)])
    nodes = []
    for node in numbered.nodes:
        if not isinstance(node.layer, kinds):
            twin = next(free, None)
            if type(twin) is not type(node.layer):
                raise UnsupportedError("--code cannot write a network whose layers depend on its weights")
            node = replace(node, layer=twin)
        nodes.append(node)
    return replace(numbered, nodes=tuple(nodes))


def _graph(network: Network, output: str) -> Graph:
    """Return a network as a graph; constants outside its layers are named after the end where they are."""
    layers = [n for n, node in enumerate(network.nodes) if isinstance(node.layer, Dense | LayerNorm)]
    places = [activation_place(n, layers) if layers else "obs" for n in range(len(network.nodes))]
    return network_graph(network, places, output, formulas=True)


class _Binder:
    """Replaces constants that are weights by tensors of the checkpoint, and by nodes that compute them."""

    def __init__(self, agent: Agent, numbered: NumberedTree) -> None:
        self.agent, self.numbered = agent, numbered
        self.firsts = sorted(numbered.moves)
        self.constants: dict[str, Constant] = {}
        self.nodes: list[OperatorNode] = []

    def bind(self, graph: Graph, twin: Graph, settings: NetworkSettings) -> Graph:
        """Return the graph; `twin` has the numbers of the tensors."""
        for name, constant in graph.constants.items():
            array, numbers = constant.read(name), twin.constants[name].read(name)
            if array.dtype == np.float32 and not np.array_equal(array, numbers):
                self._add(name, array, numbers)
            else:
                self.constants[name] = constant
        if settings.obs_norm is not None and {"obs/mean", "obs/scale"} <= self.constants.keys():
            self._add_statistics(settings.obs_norm)
        return replace(graph, nodes=(*self.nodes, *graph.nodes), constants=self.constants)

    def _add_statistics(self, norm: Mapping[str, Any]) -> None:
        """Compute with the observation statistics of the file instead of numbers, if it has them so."""
        moves = {move.target: move for move in self.agent.binding.moves.moves}
        spread = "var" if (attr(NORMALIZER), attr("var")) in moves else "std"
        used = [moves.get((attr(NORMALIZER), attr(name))) for name in ("mean", spread)]
        leaves = [None if move is None else self.agent.checkpoint.tree.get(move.source) for move in used]
        pairs = zip(leaves, used, strict=True)
        mean, width = (
            Constant(leaf, move.source, move.rule) if isinstance(leaf, Leaf) and move is not None else None
            for leaf, move in pairs
        )
        if mean is None or width is None or "parts" in norm:
            return
        arrays = [constant.read("") for constant in (mean, width)]
        epsilon = float(norm.get("epsilon", 1e-8))
        steps = _deviation_steps(
            spread, arrays[1].astype(np.float64), np.sqrt(np.asarray(norm["var"]) + epsilon), epsilon
        )
        if steps is None or not np.array_equal(arrays[0].astype(np.float64), np.asarray(norm["mean"])):
            return
        if arrays[0].dtype == np.float32:
            self.constants["obs/mean"] = mean
        else:
            # Rounded as in the policy; a rule would only cast without a change.
            del self.constants["obs/mean"]
            self.constants["obs/mean/wide"] = mean
            self._add_chain("obs/mean/wide", (), "obs/mean")
        del self.constants["obs/scale"]
        self.constants["obs/spread"] = width
        self._add_chain("obs/spread", (*steps, ("Reciprocal",)), "obs/scale")

    def _add_chain(self, value: str, steps: Sequence[tuple[Any, ...]], name: str) -> None:
        """Add the nodes of operators, with the numbers that they take, in float64; name the last float32."""
        for at, (op, *numbers) in enumerate((("Cast", "float64"), *steps, ("Cast", "float32"))):
            attributes = {"to": numbers[0]} if op == "Cast" else {}
            inputs = [value]
            if op == "Add":
                inputs.append(f"{name}/{at}/number")
                self.constants[inputs[1]] = inline_constant(np.asarray(numbers[0], np.float64))
            value = name if op == "Cast" and numbers == ["float32"] else f"{name}/{at}"
            self.nodes.append(OperatorNode(op, tuple(inputs), (value,), attributes))

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


def _deviation_steps(
    name: str, width: np.ndarray, deviation: np.ndarray, epsilon: float
) -> tuple[tuple[Any, ...], ...] | None:
    """Return the operators from a tensor to the standard deviation, None if it is another one."""
    root = width if name == "std" else np.sqrt(width)
    if width.shape != deviation.shape:
        return None
    if name == "var" and epsilon and np.allclose(np.sqrt(width + epsilon), deviation, rtol=1e-9, atol=0):
        return ("Add", epsilon), ("Sqrt",)
    outside = float(f"{np.median(deviation - root):.6g}")
    if np.allclose(root + outside, deviation, rtol=1e-7, atol=0):
        return (*[("Sqrt",)] * (name == "var"), *[("Add", outside)] * (outside != 0))
    return None
