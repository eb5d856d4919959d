"""Graphs of TensorFlow 1's Saver: what the program in the `.meta` file beside a checkpoint computes.

A Saver stores the graph of the whole program (MetaGraphDef): networks, losses, gradients and updates. It
names no inputs and results. The inputs of the graph are placeholders; its outputs are the ends of the
networks: values that follow from one placeholder and from stored layers, and that nothing else follows from.

Sources: tensorflow/python/training/saver.py (export_meta_graph), tensorflow/python/ops/gradients_util.py
(scope of gradients), tensorflow/python/ops/distributions/normal.py (samples: mean + scale * noise).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from ckpttool.core import deferred, filesystem, limits
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import CkpttoolError, UnsupportedError, UsageError, abbreviate_list
from ckpttool.core.source import File
from ckpttool.core.tree import Path
from ckpttool.formats import tf_common, tf_saved_model_messages
from ckpttool.formats.tf_functions import FunctionNode, get_attribute, output_shape
from ckpttool.formats.tf_saved_model_messages import FieldMeter, MetaGraph, Signature, TensorInfo, type_name
from ckpttool.graphs import tensorflow
from ckpttool.graphs.graph import Graph, OpaqueError

_READS = frozenset(("Identity", "ReadVariableOp"))
_LAYERS = frozenset(
    ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Conv2D", "Conv3D", "DepthwiseConv2dNative")
)
# What follows from a tensor's shape does not follow from its values.
_SHAPES = frozenset(("Shape", "ShapeN", "Size", "Rank"))
_NOISE = frozenset(("RandomStandardNormal", "StatelessRandomNormal", "StatelessRandomNormalV2"))
_COMBINED = frozenset(("Add", "AddV2", "Mul", "Identity", "BroadcastTo", "Reshape", "Squeeze", "ExpandDims"))
_PASSED = frozenset(("Add", "AddV2", "BiasAdd", "Identity", "Reshape", "Squeeze"))
_GRADIENTS = deferred.compile(r"(.*/)?(gradients(_\d+)?|[^/]*_grad)/.*", re.DOTALL)
_MOST_PLACEHOLDERS, _MOST_ENDS = 64, 64


# tf.cond and tf.while_loop of TensorFlow 1 (control_flow_ops.py), and of its version 2 of control flow.
_BRANCHES = frozenset(("Switch", "Merge", "Enter", "Exit", "If", "StatelessIf", "While", "StatelessWhile"))


class PolicyGraph(NamedTuple):
    """The graph of the values that may be a policy's actions, and why, if there is one only."""

    graph: Graph
    reason: str = ""


def read(checkpoint: Checkpoint) -> Graph | None:
    """Return what the program of a Saver computes from its placeholders; None without its graph.

    Raise FormatError for a damaged graph, UnsupportedError for one that is not of these variables.
    """
    program = _read_program(checkpoint)
    return None if program is None else program.graph(program.ends())


def read_policy(checkpoint: Checkpoint, network: str, target: re.Pattern[str]) -> PolicyGraph | None:
    """Return the graph of the values that may be the policy's actions, None without any.

    These are the value of the node `network`, otherwise the mean of the only distribution that the program
    samples with normal noise, otherwise the ends of the networks in the scope `network`, or of all.

    Args:
        checkpoint: a checkpoint of TensorFlow 1.
        network: the name of a node or a scope; "actor" need not exist.
        target: names of target networks, whose ends are left out beside those of others.
    """
    program = _read_program(checkpoint)
    if program is None:
        return None
    names, reason = _choose_results(program, network, target)
    graph = program.graph(names)
    if graph is None:
        raise UnsupportedError(f"no network in it ends with values of one input{program.describe_fed()}")
    defaults = program.list_defaults(names)
    if defaults:
        kept = f"values that the program may feed keep their defaults: {abbreviate_list(defaults, 4)}"
        reason = f"{reason}; {kept}" if reason else kept
    return PolicyGraph(graph, reason)


def _choose_results(program: _SavedProgram, network: str, target: re.Pattern[str]) -> tuple[list[str], str]:
    """Return the results that may be the actions, and why, if it is one only."""
    file = program.checkpoint.path
    node = network.removesuffix(":0")
    if node in program.nodes:
        if program.origins.get(node) is None:
            raise UnsupportedError(
                "the node's value does not follow from one placeholder and stored variables",
                file=file,
                path=node,
            )
        return [node], ""
    scope = "" if network == "actor" else f"{network}/"
    if not any(name.startswith(scope) for name in program.nodes):
        raise UsageError("the graph has no node or scope of this name", file=file, found=network)
    means = [name for name in program.sampled_means() if name.startswith(scope)]
    if len(means) == 1:
        return means, f"the action is {means[0]}, the mean of the only distribution that the graph samples"
    ends = [name for name in program.ends() if name.startswith(scope)]
    ends = [name for name in ends if not all(map(target.search, program.layer_names(name)))] or ends
    return ends, f"the action is {ends[0]}, the only end of a network in the graph" if len(ends) == 1 else ""


def read_activations(checkpoint: Checkpoint) -> dict[Path, frozenset[str]]:
    """Return the operations that are applied to what each layer computes, by the path of its kernel.

    These are the first ones that are no sum, copy or change of the shape; gradients do not count.
    """
    program = _read_program(checkpoint)
    return {} if program is None else program.activations()


def _read_program(checkpoint: Checkpoint) -> _SavedProgram | None:
    location = tf_common.saver_graph_file(checkpoint.path)
    if not filesystem.isfile(location):
        return None
    file = File.beside(location, checkpoint.files[0].path)
    if file.size > limits.current().graph_bytes:
        raise limits.limit_error("graph_bytes", "the graph is too large", file.size)
    meter = FieldMeter()
    try:
        graph = tf_saved_model_messages.parse_meta_graph(memoryview(file.read(0, file.size)), meter)
        return None if graph.nodes is None else _SavedProgram(checkpoint, graph, meter)
    except CkpttoolError as error:
        raise error.located(file=location) from error.__cause__


class _SavedProgram:
    """A Saver's graph: which placeholder each value follows from.

    `origins` are the placeholders by node: "" for constants and stored variables; None for values of several
    placeholders, noise, gradients and operations that have no translation.
    """

    def __init__(self, checkpoint: Checkpoint, graph: MetaGraph, meter: FieldMeter) -> None:
        """Read the nodes, and find their origins."""
        self.checkpoint, self.meter = checkpoint, meter
        self.stored = tensorflow.StoredNodes.parse(checkpoint, graph, meter)
        self.nodes, self.variables = self.stored.nodes, self.stored.variables
        self.placeholders = [name for name, node in self.nodes.items() if node.op == "Placeholder"]
        self.origins: dict[str, str | None] = {}
        self.layered: set[str] = set()
        if 0 < len(self.placeholders) <= _MOST_PLACEHOLDERS:
            for name in self.nodes:
                self._find_origin(name)
        self.users: dict[str, list[str]] = defaultdict(list)
        for name, node in self.nodes.items():
            for input_ in set(_data_inputs(node)):
                self.users[input_].append(name)

    def _find_origin(self, target: str) -> None:
        waiting, open_ = [target], set[str]()
        while waiting:
            name = waiting[-1]
            node = self.nodes.get(name)
            if name in self.origins or node is None:
                self.origins.setdefault(name, None)
                waiting.pop()
                continue
            inputs = [] if node.op in _SHAPES else [*_data_inputs(node)]
            missing = [input_ for input_ in inputs if input_ not in self.origins]
            if missing and name not in open_:
                open_.add(name)
                # One that is already open closes a loop, which has no origin.
                self.origins |= {input_: None for input_ in missing if input_ in open_}
                waiting += missing
                continue
            waiting.pop()
            self.origins[name] = self._origin(name, node, inputs)

    def _origin(self, name: str, node: FunctionNode, inputs: list[str]) -> str | None:
        if node.op == "Placeholder":
            return name
        if node.op in tensorflow.VARIABLES:
            return "" if name in self.variables else None
        if node.op in ("Const", *_SHAPES):
            return ""
        translated = node.op in tensorflow.list_operations() or node.op in tensorflow.CALLS
        origins = {self.origins[input_] for input_ in inputs}
        if not translated or None in origins or _GRADIENTS.fullmatch(name):
            return None
        origins.discard("")
        if any(input_ in self.layered for input_ in inputs) or self._is_layer(node):
            self.layered.add(name)
        return origins.pop() if len(origins) == 1 else None if origins else ""

    def _is_layer(self, node: FunctionNode) -> bool:
        return node.op in _LAYERS and any(self._is_variable(input_) for input_ in _data_inputs(node))

    def _is_variable(self, name: str) -> bool:
        node = self.nodes.get(self._source(name))
        return node is not None and node.op in tensorflow.VARIABLES

    def _source(self, name: str) -> str:
        """Return the node that a node, or a chain of them, only reads."""
        visited = {name}
        while (node := self.nodes.get(name)) is not None and node.op in _READS and node.inputs:
            name = _node_name(node.inputs[0])
            if name in visited:
                return ""
            visited.add(name)
        return name

    def _is_result(self, name: str) -> bool:
        """Return whether a value follows from one placeholder and a layer, one row for each of its rows."""
        origin = self.origins.get(name)
        if not origin or name not in self.layered:
            return False
        shape = output_shape(self.nodes[name], self.meter)
        batch = output_shape(self.nodes[origin], self.meter)
        return shape is None or not batch or (len(shape) > 0 and shape[0] == batch[0])

    def ends(self) -> list[str]:
        """Return the results that a program may request, in the order of the graph.

        These are the results that nothing follows from; those that lead to one of these without a further
        layer, and to another one as well (an action, to which noise is added, and which a critic takes); and
        those that join what other layers compute (an action beside observations).
        """
        inside = {name for name in self.nodes if self._is_result(name)}
        order = [name for name in self.origins if name in inside]  # each after those that it follows from
        after: dict[str, frozenset[str]] = {}  # all results behind a value that nothing follows from
        plain: set[str] = set()  # values with one behind them, and no layer between
        chosen: set[str] = set()
        for name in reversed(order):
            users = [user for user in self.users[name] if user in inside]
            after[name] = frozenset().union(*(after[user] for user in users)) if users else frozenset((name,))
            if users and not any(user in plain and not self._is_layer(self.nodes[user]) for user in users):
                continue
            plain.add(name)
            if (not users and not self._feeds_layer(name)) or (len(users) > 1 and len(after[name]) > 1):
                chosen.add(name)
        chosen |= self._joined(order)
        copies = {name for name in chosen if self.nodes[name].op == "Identity"}
        chosen -= {name for name in copies if next(_data_inputs(self.nodes[name])) in chosen}
        return [name for name in self.nodes if name in chosen][:_MOST_ENDS]

    def layer_names(self, name: str) -> set[str]:
        """Return the names of the variables of all layers that a value follows from, in lower case."""
        return {
            input_.lower()
            for node in map(self.nodes.get, _reach([name], self._inputs))
            if node is not None and node.op in _LAYERS
            for input_ in _data_inputs(node)
            if self._is_variable(input_)
        }

    def list_defaults(self, names: Sequence[str]) -> list[str]:
        """Return the placeholders with a default that values follow from: a flag, a rate, a scale."""
        return [
            name for name in _reach(names, self._inputs) if self.nodes[name].op == "PlaceholderWithDefault"
        ]

    def describe_fed(self) -> str:
        """Return why no value may follow from one placeholder: conditions, or several placeholders."""
        branches = sorted({node.op for node in self.nodes.values()} & _BRANCHES)
        if branches:
            return f" (it has conditions or loops: {', '.join(branches)})"
        several = len(self.placeholders) > 1
        return f" (placeholders: {abbreviate_list(self.placeholders, 4)})" if several else ""

    def _inputs(self, name: str) -> Iterator[str]:
        return _data_inputs(self.nodes[name]) if name in self.nodes else iter(())

    def activations(self) -> dict[Path, frozenset[str]]:
        """Return the first operations behind each layer, by the path of its kernel."""
        following: dict[Path, frozenset[str]] = {}
        for name, node in self.nodes.items():
            if node.op not in _LAYERS or _GRADIENTS.fullmatch(name):
                continue
            kernels = [self.variables.get(self._source(input_)) for input_ in _data_inputs(node)]
            for kernel in filter(None, kernels):
                following[kernel] = following.get(kernel, frozenset()) | self._operations_after(name)
        return following

    def _operations_after(self, name: str) -> frozenset[str]:
        """Return the first operations behind a value, beyond those that are passed."""

        def behind(other: str) -> list[str]:
            return self.users[other] if self.nodes[other].op in _PASSED else []

        names = [other for other in _reach(self.users[name], behind) if not _GRADIENTS.fullmatch(other)]
        return frozenset(self.nodes[other].op for other in names) - _PASSED - _SHAPES

    def _joined(self, order: Sequence[str]) -> set[str]:
        """Return the results that an operation joins with values of other layers or of none."""
        layers: dict[
            str, frozenset[str]
        ] = {}  # the layers that a result follows from, without others between
        joined = set[str]()
        for name in order:
            node = self.nodes[name]
            inputs = [input_ for input_ in dict.fromkeys(_data_inputs(node)) if self.origins[input_]]
            sources = [layers.get(input_, frozenset()) for input_ in inputs]
            layers[name] = frozenset((name,)) if self._is_layer(node) else frozenset().union(*sources)
            if len({*sources}) < 2 or self._is_layer(node):
                continue
            for input_ in inputs:
                # Of a sum of layers, what these take.
                summed = self._is_layer(self.nodes[input_])
                joined |= {*(_data_inputs(self.nodes[input_]) if summed else (input_,))} & layers.keys()
        return joined

    def _feeds_layer(self, name: str) -> bool:
        """Return whether a layer follows from a value, also one with other inputs as well."""

        def behind(other: str) -> list[str]:
            return [user for user in self.users[other] if not _GRADIENTS.fullmatch(user)]

        return any(self._is_layer(self.nodes[other]) for other in _reach(behind(name), behind))

    def sampled_means(self) -> list[str]:
        """Return the results to which the program adds normal noise times a result or a variable."""
        means: dict[str, None] = {}
        for node in self.nodes.values():
            if node.op not in ("Add", "AddV2") or len(inputs := [*_data_inputs(node)]) != 2:
                continue
            for mean, noise in (inputs, inputs[::-1]):
                if self._is_result(mean) and self._is_scaled_noise(noise):
                    means[mean] = None
        return list(means)

    def _is_scaled_noise(self, name: str) -> bool:
        def before(other: str) -> Iterator[str]:
            node = self.nodes.get(other)
            inner = node is not None and node.op in _COMBINED and self.origins.get(other) is None
            return self._inputs(other) if inner else iter(())

        return any(other in self.nodes and self.nodes[other].op in _NOISE for other in _reach([name], before))

    def graph(self, outputs: list[str]) -> Graph | None:
        """Return the graph of these values, None without any."""
        if not outputs:
            return None
        used = dict.fromkeys(self.origins[name] or "" for name in outputs)
        inputs = {name: self._tensor(name) for name in used if name}
        signature = Signature("", inputs, {name: self._tensor(name) for name in outputs})
        try:
            return self.stored.read(self.checkpoint, signature)
        except OpaqueError as error:
            raise UnsupportedError(
                "an output of the graph is not a tensor",
                file=tf_common.saver_graph_file(self.checkpoint.path),
                found=str(error),
            ) from None
        except CkpttoolError as error:
            raise error.located(file=tf_common.saver_graph_file(self.checkpoint.path)) from error.__cause__

    def _tensor(self, name: str) -> TensorInfo:
        node = self.nodes[name]
        dtype = get_attribute(node, "dtype")
        shape = output_shape(node, self.meter)
        key = f"{name}:0".encode("utf-8", "surrogateescape")
        return TensorInfo((key,), type_name(dtype) if isinstance(dtype, int) else "", shape)


def _reach(starts: Iterable[str], onward: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Yield the nodes that these lead to, and these, each once."""
    waiting, visited = [*starts], set[str]()
    while waiting:
        name = waiting.pop()
        if name not in visited:
            visited.add(name)
            yield name
            waiting += onward(name)


def _node_name(reference: str) -> str:
    return reference.partition(":")[0]


def _data_inputs(node: FunctionNode) -> Iterator[str]:
    """Yield the nodes that a node takes values of."""
    return (_node_name(input_) for input_ in node.inputs if not input_.startswith("^"))
