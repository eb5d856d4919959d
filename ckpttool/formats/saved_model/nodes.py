"""The GraphDef of a TensorFlow 1 SavedModel: which node holds which stored tensor, and what leads to what.

Field numbers are those of tensorflow/core/framework/graph.proto, node_def.proto, attr_value.proto and
tensor.proto. No operation is run: nodes are names, kinds of operation and inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool.formats.saved_model.messages import Meter, entry, node_name, of_number
from ckpttool.wire import protobuf

_VARIABLES = frozenset((b"Variable", b"VariableV2", b"VarHandleOp", b"AutoReloadVariable"))
# What stands between a variable and the operation that saves it, or between its first value and its source.
_READS = frozenset((b"Identity", b"ReadVariableOp"))
_ARITHMETIC = _READS | frozenset(
    (b"Add", b"AddV2", b"Sub", b"Mul", b"Cast", b"Reshape", b"Snapshot", b"StopGradient", b"Transpose")
)
# GraphDef: node, library. FunctionDefLibrary: function. NodeDef: name, op, input.
_GRAPH = {1: protobuf.DELIMITED, 2: protobuf.DELIMITED}
_LIBRARY = {1: protobuf.DELIMITED}
_NODE = dict.fromkeys((1, 2, 3), protobuf.DELIMITED)
_MAX_CONE = 64  # nodes looked at to find what a variable begins with


class Node(NamedTuple):
    """An operation: its kind, and the names of its inputs as stored."""

    op: bytes
    inputs: tuple[bytes, ...]


@dataclass(slots=True)
class Nodes:
    """A graph by name of node.

    `saved` are the variables (names of nodes) that each key of the checkpoint was saved from; `count` is how
    many nodes there are, `functions` how many functions the library has.
    """

    nodes: dict[bytes, Node] = field(default_factory=dict)
    saved: dict[bytes, list[bytes]] = field(default_factory=dict)
    count: int = 0
    functions: int = 0


def parse(data: memoryview, meter: Meter, *, count_only: bool = False) -> Nodes:
    """Decode a GraphDef; `count_only` keeps no node. The functions of the library are counted, not read."""
    found = Nodes()
    lists: dict[bytes, memoryview] = {}
    for number, value in meter.fields(data, _GRAPH):
        if number == 1:
            found.count += 1
            if not count_only:
                _node(found.nodes, lists, protobuf.message(value), meter)
        else:
            found.functions += sum(1 for _ in meter.fields(protobuf.message(value), _LIBRARY))
    _find_saved(found, lists, meter)
    return found


def _node(found: dict[bytes, Node], lists: dict[bytes, memoryview], data: memoryview, meter: Meter) -> None:
    name = op = b""
    inputs = []
    for number, value in meter.fields(data, _NODE):
        if number == 1:
            name = bytes(protobuf.message(value))
        elif number == 2:
            op = bytes(protobuf.message(value))
        else:
            meter.keep()
            inputs.append(bytes(protobuf.message(value)))
    meter.keep()
    found[name] = Node(op, tuple(inputs))
    if op == b"Const" and name.endswith(b"/tensor_names"):
        lists[name] = data


def _find_saved(graph: Nodes, lists: dict[bytes, memoryview], meter: Meter) -> None:
    """Fill `saved` from the operations that save.

    SaveV2 has a prefix, the keys, their slices, and then one tensor for each key
    (tensorflow/core/ops/io_ops.cc). A partitioned variable has several under one key.
    """
    for node in graph.nodes.values():
        if node.op != b"SaveV2" or len(node.inputs) < 3:
            continue
        names = lists.get(node_name(node.inputs[1]))
        for key, tensor in zip(_strings(names, meter) if names else (), node.inputs[3:], strict=False):
            variable = _variable(graph, node_name(tensor))
            if variable is not None:
                meter.keep()
                graph.saved.setdefault(key, []).append(variable)


def _variable(graph: Nodes, name: bytes) -> bytes | None:
    # A variable is saved by itself, or by what reads it.
    for _ in range(4):
        node = graph.nodes.get(name)
        if node is None:
            return None
        if node.op in _VARIABLES:
            return name
        if node.op not in _READS or not node.inputs:
            return None
        name = node_name(node.inputs[0])
    return None


def _strings(node: memoryview, meter: Meter) -> Iterator[bytes]:
    # NodeDef.attr (5) is a map; a Const's "value" is AttrValue.tensor (8), whose string_val is 8 as well.
    held = memoryview(b"")
    for _, attribute in meter.fields(node, {5: protobuf.DELIMITED}):
        name, value = entry(attribute, meter)
        held = value if name == "value" else held
    tensor = protobuf.joined(list(of_number(8, held, meter)), memoryview(b""))
    for text in of_number(8, tensor, meter):
        yield bytes(text)


def used(graph: Nodes, outputs: Iterable[bytes], inputs: Iterable[bytes]) -> dict[bytes, None]:
    """Return the variables that the outputs depend on, going back no further than the inputs that are fed."""
    fed = {node_name(name) for name in inputs}
    waiting = [node_name(name) for name in outputs]
    seen = set(waiting)
    found: dict[bytes, None] = {}
    while waiting:
        name = waiting.pop()
        node = graph.nodes.get(name)
        if node is None or name in fed:
            continue
        if node.op in _VARIABLES:
            found[name] = None
            continue
        for each in map(node_name, node.inputs):
            if each not in seen:
                seen.add(each)
                waiting.append(each)
    return found


def initializer(graph: Nodes, name: bytes, assign: bytes) -> str | None:
    """Return the operation that a variable's first value comes from, such as `TruncatedNormal` or `Const`.

    `assign` is the node that its VariableDef names (`NAME/Assign` without one). Sums, products and reshapes
    on the way are passed; an operation that is neither of these nor a constant wins over a constant.
    """
    node = graph.nodes.get(assign or name + b"/Assign")
    if node is None or len(node.inputs) < 2 or not node.op.startswith(b"Assign"):
        return None
    waiting, seen = [node_name(node.inputs[1])], 0
    constant: str | None = None
    while waiting and seen < _MAX_CONE:
        seen += 1
        value = graph.nodes.get(waiting.pop(0))
        if value is None:
            continue
        if value.op in _ARITHMETIC:
            waiting += map(node_name, value.inputs[:_MAX_CONE])
        elif value.op == b"Const":
            constant = "Const"
        else:
            return value.op.decode("utf-8", "surrogateescape")
    return constant
