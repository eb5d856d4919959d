"""Graphs of ONNX models: older operator sets are translated to the table's, local functions are inlined.

Sources: onnx/onnx.proto (graphs, functions), onnx/docs/Changelog.md (every version of every operator),
onnx/version_converter (how versions differ).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.core import limits
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.dtypes import np
from ckpttool.core.errors import CkpttoolError, FormatError, UnsupportedError
from ckpttool.core.source import Shape
from ckpttool.core.tree import Path, Record, Tree, ValueLeaf, attr, key
from ckpttool.formats import onnx
from ckpttool.formats.onnx import (
    OnnxAttribute,
    OnnxFunction,
    OnnxGraph,
    OnnxNode,
    OnnxSparseTensor,
    OnnxTensor,
    OnnxValue,
    OperatorKey,
)
from ckpttool.graphs.graph import OPSET, Constant, Graph, OperatorNode, Value, inline_constant, trim_inputs
from ckpttool.graphs.operators import is_known, list_operators
from ckpttool.graphs.shapes import ShapeTracer
from ckpttool.mapping.rules import Reshape, chain_rules

_DOMAINS = ("", "ai.onnx")
_DEEPEST = 20  # functions that call each other
# Attributes whose value is the number of an element type.
_TYPES = frozenset(
    ("to", "dtype", "output_dtype", "output_datatype", "stash_type", "precision", "softmax_precision")
)


def read(checkpoint: Checkpoint) -> Graph:
    """Return the graph of an ONNX model, with the constants of the checkpoint's tree."""
    model = onnx.read_model(checkpoint.files[0])
    reader = _ModelReader(
        checkpoint.tree,
        {(part.domain, part.name, part.overload): part for part in model.functions},
    )
    try:
        return reader.graph(model.graph, _Frame((), dict(model.opsets)))
    except CkpttoolError as error:
        raise error.located(file=checkpoint.path) from error.__cause__


def module_of_node(name: str) -> tuple[str, ...]:
    """Return the module in a node's name: `/actor/actor.0/Gemm` is in actor.0; () if it names none."""
    scope, slash, _ = name.rpartition("/")
    return split_scope(scope) if slash and scope.strip("/") else ()


def split_scope(scope: str) -> tuple[str, ...]:
    """Return the modules of a scope as PyTorch's exporter writes it: `/actor/actor.0` is actor, 0."""
    steps: list[str] = []
    for step in re.split(r"/+", scope.strip("/")):
        # For parts of a Sequential the exporter writes the full name after the Sequential's own.
        if steps and step.startswith(f"{steps[-1]}."):
            step = step[len(steps[-1]) + 1 :]
        steps += [part for part in step.replace(":", "_").split(".") if part]
    return tuple(steps) or ("model",)


class _OldNode(NamedTuple):
    """A node of an older operator set under translation; attributes are decoded."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    opset: int
    add: Callable[[Any, str], str]

    def without(self, *names: str) -> _OldNode:
        rest = {name: value for name, value in self.attributes.items() if name not in names}
        return self._replace(attributes=rest)

    def as_input(self, name: str, position: int, dtype: str) -> _OldNode:
        """Return the node with an attribute as a constant input."""
        value = self.attributes.get(name)
        if value is None:
            return self
        inputs = [*self.inputs, *[""] * (position + 1 - len(self.inputs))]
        inputs[position] = self.add(value, dtype)
        return self.without(name)._replace(inputs=tuple(inputs))


def _to_inputs(*attributes: tuple[str, int, str]) -> Callable[[_OldNode], Iterable[_OldNode]]:
    def translate(node: _OldNode) -> Iterable[_OldNode]:
        for name, position, dtype in attributes:
            node = node.as_input(name, position, dtype)
        return (node,)

    return translate


def _flattened(node: _OldNode) -> Iterable[_OldNode]:
    """Translate a softmax that treats its input as a matrix, with all axes from `axis` on as columns."""
    axis = node.attributes.get("axis", 1)
    if axis == -1:
        return (node,)
    (x, *_), (y, *_) = node.inputs, node.outputs
    shape, matrix, rows = (f"{y}/{part}" for part in ("shape", "matrix", "rows"))
    return (
        node._replace(op="Shape", inputs=(x,), outputs=(shape,), attributes={}),
        node._replace(op="Flatten", inputs=(x,), outputs=(matrix,), attributes={"axis": axis}),
        node._replace(inputs=(matrix,), outputs=(rows,), attributes={"axis": -1}),
        node._replace(op="Reshape", inputs=(rows, shape), outputs=(y,), attributes={}),
    )


def _dropped(*names: str) -> Callable[[_OldNode], Iterable[_OldNode]]:
    """Translate by leaving out attributes that never changed a result."""
    return lambda node: (node.without(*names),)


def _inference_only(node: _OldNode) -> Iterable[_OldNode]:
    """Translate a norm that trains if it has more than one output, and else does not."""
    if len(node.outputs) > 1 or node.attributes.get("spatial", 1) != 1:
        raise UnsupportedError("batch norm in training", found=node.op)
    return (node.without("spatial"),)


def _upsample(node: _OldNode) -> Iterable[_OldNode]:
    """Translate Upsample to Resize as onnxruntime computes it."""
    mode = node.attributes.get("mode", "nearest")
    old = node.as_input("scales", 1, "float32")
    settings = {"mode": mode, "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return (old._replace(op="Resize", inputs=(old.inputs[0], "", old.inputs[1]), attributes=settings),)


def _grid_modes(node: _OldNode) -> Iterable[_OldNode]:
    mode = {"bilinear": "linear", "bicubic": "cubic"}
    old = node.attributes.get("mode", "bilinear")
    return (node._replace(attributes={**node.attributes, "mode": mode.get(old, old)}),)


def _default(name: str, value: Any) -> Callable[[_OldNode], Iterable[_OldNode]]:
    """Translate by stating a default that a later version changed."""
    return lambda node: (node._replace(attributes={name: value, **node.attributes}),)


def _pow_of_norm(node: _OldNode) -> Iterable[_OldNode]:
    p = node.attributes.get("p", 2)
    return (node._replace(attributes={**node.attributes, "p": int(p)}),)


def _transform_axis(node: _OldNode) -> Iterable[_OldNode]:
    return (node._replace(attributes={"axis": 1, **node.attributes}).as_input("axis", 2, "int64"),)


def _renamed(op: str) -> Callable[[_OldNode], Iterable[_OldNode]]:
    return lambda node: (node._replace(op=op),)


_REDUCTIONS = [
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean"),
    *("ReduceMin", "ReduceProd", "ReduceSumSquare"),
]
_AXES = _to_inputs(("axes", 1, "int64"))
# Translations from versions before the first number, by operator; the next older one is applied first.
_TRANSLATIONS: dict[str, tuple[int, Callable[[_OldNode], Iterable[_OldNode]]]] = {
    **dict.fromkeys(_REDUCTIONS, (18, _AXES)),
    **dict.fromkeys(("ReduceSum", "Squeeze", "Unsqueeze"), (13, _AXES)),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), (13, _flattened)),
    "BatchNormalization": (14, _inference_only),
    "Clip": (11, _to_inputs(("min", 1, "float32"), ("max", 2, "float32"))),
    "DFT": (20, _transform_axis),
    "Dropout": (12, _dropped("ratio")),
    "GridSample": (20, _grid_modes),
    "LpPool": (2, _pow_of_norm),
    "Pad": (11, _to_inputs(("pads", 1, "int64"), ("value", 2, "float32"))),
    "RoiAlign": (16, _default("coordinate_transformation_mode", "output_half_pixel")),
    "Scatter": (OPSET + 1, _renamed("ScatterElements")),
    "Slice": (10, _to_inputs(("starts", 1, "int64"), ("ends", 2, "int64"), ("axes", 3, "int64"))),
    "Split": (13, _to_inputs(("split", 1, "int64"))),
    "TopK": (10, _to_inputs(("k", 1, "int64"))),
    "Upsample": (OPSET + 1, _upsample),
}
# Versions from which translated or unchanged operators have the table's meaning, where that is not the first.
_OLDEST = {"Resize": 10, "Scan": 9, "Upsample": 7}


def _translate(node: _OldNode) -> Iterable[_OldNode]:
    """Return the nodes of the table that compute what a node of an older version computes."""
    before, translation = _TRANSLATIONS.get(node.op, (0, None))
    if node.op == "Resize" and node.opset == 10:
        scaled = node._replace(inputs=(node.inputs[0], "", *node.inputs[1:]))
        settings = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        return (scaled._replace(attributes={**settings, **node.attributes}),)
    if translation is not None and node.opset < before:
        return translation(node)
    return (node,)


def _join_group_norms(graph: Graph) -> Graph:
    """Return the graph with one node for each group norm that an exporter wrote as several.

    Before operator set 21 PyTorch's exporter reshapes the groups to channels, normalizes those with a scale
    of ones and an offset of zeros, reshapes back, and multiplies and adds a number for each channel
    (torch/onnx/symbolic_opset9.py, group_norm).
    """
    users: dict[str, list[OperatorNode]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            users.setdefault(name, []).append(node)
    # A result of the graph is used by its caller, too.
    results = {value.name for value in graph.outputs}
    single = {name: nodes[0] for name, nodes in users.items() if len(nodes) == 1 and name not in results}
    makers = {name: node for node in graph.nodes for name in node.outputs}
    norms = (node for node in graph.nodes if node.op == "InstanceNormalization")
    chains = [chain for norm in norms if (chain := _norm_of_groups(norm, makers, single)) is not None]
    if not chains:
        return graph
    shapes = ShapeTracer(graph, _smallest_shapes(graph))
    for node in graph.nodes:
        shapes.add(node)
    constants = dict(graph.constants)
    joined: dict[str, OperatorNode] = {}
    left: set[str] = set()
    for chain in chains:
        if (whole := _joined_group_norm(chain, shapes, constants)) is not None:
            joined[whole.outputs[0]] = whole
            left.update(node.outputs[0] for node in chain[:-1])
            shape = chain[2].inputs[1]
            left |= {shape} & single.keys()
            for name in chain[1].inputs[1:]:
                if name in single:
                    del constants[name]
    nodes = (joined.get(node.outputs[0], node) for node in graph.nodes if node.outputs[0] not in left)
    return replace(graph, nodes=tuple(nodes), constants=constants)


def _norm_of_groups(
    norm: OperatorNode, makers: Mapping[str, OperatorNode], single: Mapping[str, OperatorNode]
) -> list[OperatorNode] | None:
    """Return the five nodes of a group norm around the one that normalizes, None for another norm.

    `makers` are the nodes by their outputs, `single` the users of values that are used once.
    """
    before = makers.get(norm.inputs[0])
    if before is None or before.op != "Reshape" or single.get(norm.inputs[0]) is not norm:
        return None
    chain = [before, norm]
    for op in ("Reshape", "Mul", "Add"):
        after = single.get(chain[-1].outputs[0])
        if after is None or after.op != op:
            return None
        chain.append(after)
    back = makers.get(chain[2].inputs[1])
    same = back is not None and (back.op, back.inputs[0]) == ("Shape", before.inputs[0])
    return chain if same else None


def _joined_group_norm(
    chain: Sequence[OperatorNode], shapes: ShapeTracer, constants: dict[str, Constant]
) -> OperatorNode | None:
    """Return the group norm that these nodes are, its rows among the constants; None if they are none."""
    before, norm, *_ = chain
    x = before.inputs[0]
    shape, grouped = shapes.shape(x), shapes.shape(before.outputs[0])
    rows = [name for node in chain[3:] for name in node.inputs if name in constants]
    if shape is None or grouped is None or len(grouped) != 3 or len(shape) < 2 or len(rows) != 2:
        return None
    channels, (batch, groups, _) = shape[1], grouped
    extents = (channels, *[1] * (len(shape) - 2))
    if (batch, channels % groups) != (shape[0], 0) or any(constants[row].shape != extents for row in rows):
        return None
    for number, name in zip((1, 0), norm.inputs[1:], strict=True):
        if name not in constants or (constants[name].read(name) != number).any():
            return None
    names = [f"{row}/row" if len(extents) > 1 else row for row in rows]
    for name, row in zip(names, rows, strict=True):
        if name != row:
            rule = chain_rules(constants[row].rule, Reshape((channels,)))
            constants[name] = constants[row]._replace(rule=rule)
    settings = {"num_groups": groups, "epsilon": norm.attributes.get("epsilon", 1e-5)}
    inputs, outputs = (x, *names), chain[-1].outputs
    return replace(norm, op="GroupNormalization", inputs=inputs, outputs=outputs, attributes=settings)


def _smallest_shapes(graph: Graph) -> dict[str, Shape]:
    """Return the shapes of a graph's inputs, open extents as 1."""
    return {
        value.name: tuple(extent if isinstance(extent, int) else 1 for extent in value.shape)
        for value in graph.inputs
        if value.shape is not None
    }


class _Frame(NamedTuple):
    """Where a list of nodes is: its path in the tree, operator sets, and the names of its caller.

    `names` are the graph's names for those of a function's body, `prefix` goes before the others.
    `arguments` are the attributes of a function's call.
    """

    path: Path
    opsets: Mapping[str, int]
    names: Mapping[str, str] = {}
    prefix: str = ""
    arguments: Mapping[str, OnnxAttribute] = {}
    scope: tuple[str, ...] = ()
    depth: int = 0

    def name(self, name: str) -> str:
        """Return the graph's name for a name of this frame."""
        if not name:
            return ""
        return self.names.get(name, f"{self.prefix}{name}" if self.prefix else name)


@dataclass
class _ModelReader:
    """Translates graphs and functions to one graph with the table's operators."""

    tree: Tree
    functions: Mapping[OperatorKey, OnnxFunction]
    constants: dict[str, Constant] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    count: int = 0

    def graph(self, graph: OnnxGraph, frame: _Frame) -> Graph:
        """Return a graph; that of a branch or loop has its own constants."""
        (outer, self.constants), (names, self.names) = (self.constants, {}), (self.names, set())
        for tensor in graph.initializers:
            self.constants[frame.name(tensor.name)] = self._stored((*frame.path, key(tensor.name)))
        for sparse in graph.sparse:
            if sparse.values is not None:
                self.constants[frame.name(sparse.values.name)] = self._stored(
                    (*frame.path, key(sparse.values.name))
                )
        initializers = {tensor.name for tensor in graph.initializers}
        nodes = tuple(self.nodes(graph.nodes, frame))
        # Up to version 3 of the format, constants are listed among the inputs as well.
        inputs = tuple(_value(part, frame) for part in graph.inputs if part.name not in initializers)
        outputs = tuple(_value(part, frame) for part in graph.outputs)
        constants, self.constants, self.names = self.constants, outer, names
        return _join_group_norms(Graph(nodes, inputs, outputs, constants, graph.name))

    def nodes(self, nodes: Sequence[OnnxNode], frame: _Frame) -> Iterator[OperatorNode]:
        """Yield the nodes of the table for those of a graph or function."""
        for number, node in enumerate(nodes):
            self.count += 1
            if self.count > limits.current().graph_parts:
                raise limits.limit_error("graph_parts", "the graph has too many nodes", self.count)
            if frame.depth > _DEEPEST:
                raise UnsupportedError("the functions of the model are nested too deeply", found=node.title)
            function = self.functions.get((node.domain, node.op, node.overload))
            if function is not None:
                yield from self._inlined(function, node, frame)
            elif node.op == "Constant" and node.domain in _DOMAINS and len(node.outputs) == 1:
                self._add_constant(node, frame)
            else:
                yield from self._node(node, frame, number)

    def _stored(self, path: Path) -> Constant:
        leaf = self.tree.get(path)
        if leaf is None:
            raise FormatError("a constant of the graph is not listed", found=str(path[-1].value)[:200])
        return Constant(leaf, path)

    def _add_constant(self, node: OnnxNode, frame: _Frame) -> None:
        name = frame.name(node.outputs[0])
        if isinstance(node.get("value", node.get("sparse_value")), OnnxTensor | OnnxSparseTensor):
            self.constants[name] = self._stored((*frame.path, key(node.outputs[0])))
            return
        dtypes = {
            "value_float": "float32",
            "value_floats": "float32",
            "value_int": "int64",
            "value_ints": "int64",
        }
        for attribute, stored in node.attributes.items():
            value = self._argument(stored, frame)
            if attribute in dtypes and value is not None:
                self.constants[name] = _number_constant(value.value, dtypes[attribute])
                return
        # Strings, or a tensor that the call of a function passes as an attribute.
        self.constants[name] = Constant(ValueLeaf(Record("onnx.Constant")))

    def _argument(self, attribute: OnnxAttribute, frame: _Frame) -> OnnxAttribute | None:
        """Return an attribute, or the value that the call of a function gives it; None if it gives none."""
        return frame.arguments.get(attribute.ref) if attribute.ref else attribute

    def _inlined(self, function: OnnxFunction, node: OnnxNode, frame: _Frame) -> Iterator[OperatorNode]:
        """Yield the nodes of a function's body for one call."""
        inputs = [frame.name(name) for name in node.inputs]
        inputs += [""] * (len(function.inputs) - len(inputs))
        outputs = [frame.name(name) for name in node.outputs]
        names = dict(zip(function.inputs, inputs, strict=False)) | {
            inner: outer for inner, outer in zip(function.outputs, outputs, strict=False) if outer
        }
        passed = {
            name: value for name, part in node.attributes.items() if (value := self._argument(part, frame))
        }
        # Names of nodes may be repeated, those of results may not.
        title = next(filter(None, outputs), node.op)
        inner = _Frame(
            (key(f"{function.domain}.{function.name}"),),
            {**frame.opsets, **function.opsets},
            names,
            f"{title}/",
            {**function.defaults, **passed},
            frame.scope or module_of_node(node.name),
            frame.depth + 1,
        )
        yield from self.nodes(function.nodes, inner)

    def _node(self, node: OnnxNode, frame: _Frame, number: int) -> Iterator[OperatorNode]:
        attributes = {}
        for name, attribute in node.attributes.items():
            value = self._argument(attribute, frame)
            if value is not None:
                attributes[name] = self._attribute(node, name, value, frame)
        opset = max((frame.opsets.get(domain, 0) for domain in _DOMAINS), default=0)
        inputs = trim_inputs([frame.name(name) for name in node.inputs])
        outputs = tuple(frame.name(name) for name in node.outputs)

        def add(value: Any, dtype: str) -> str:
            name = f"{frame.prefix}{next(filter(None, node.outputs), node.op)}/constant_{len(self.constants)}"
            self.constants[name] = _number_constant(value, dtype)
            return name

        old = _OldNode(node.op, inputs, outputs, attributes, opset, add)
        for part in self._known(node, old):
            for name in filter(None, part.outputs):
                if name in self.names or name in self.constants:
                    raise FormatError("two values of the graph have the same name", found=repr(name[:200]))
                self.names.add(name)
            yield OperatorNode(
                part.op,
                part.inputs,
                part.outputs,
                part.attributes,
                node.name,
                frame.scope or module_of_node(node.name),
                f"node {number}" if frame.depth == 0 else f"{frame.prefix}node {number}",
            )

    def _known(self, node: OnnxNode, old: _OldNode) -> Iterable[_OldNode]:
        """Return the nodes of the table, or the node under a name that the table does not have."""
        if node.domain not in _DOMAINS:
            return (old._replace(op=node.title),)
        opaque = (old._replace(op=f"{old.op}-{old.opset}" if is_known(old.op) else old.op),)
        if not old.opset or old.opset > OPSET or old.opset < _OLDEST.get(old.op, 0):
            return opaque
        if any(isinstance(value, ValueLeaf) for value in old.attributes.values()):
            return opaque
        try:
            nodes = tuple(_translate(old.without("consumed_inputs") if old.opset < 6 else old))
        except UnsupportedError:
            return opaque
        for part in nodes:
            row = list_operators().get(part.op)
            accepted = None if row is None else row.defaults.keys()
            if row is not None and old.opset < row.since:
                return opaque
            if accepted is not None and not {name.lower() for name in part.attributes} <= accepted:
                return opaque
        return nodes

    def _attribute(self, node: OnnxNode, name: str, attribute: OnnxAttribute, frame: _Frame) -> Any:
        """Return an attribute's value as the graph has it."""
        value = attribute.value
        if isinstance(value, OnnxGraph):
            path = (*onnx.node_path(frame.path, node), attr(name))
            return self.graph(value, frame._replace(path=path))
        if isinstance(value, OnnxTensor | OnnxSparseTensor):
            return self._stored((*onnx.node_path(frame.path, node), key(name))).leaf
        if name in _TYPES and isinstance(value, int):
            row = onnx.TYPES.get(value)
            # An element type that cannot be read, or one of a later version, is refused where it is used.
            return row.name or row.title.lower() if row is not None else f"type {value}"
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        if isinstance(value, tuple):
            return tuple(
                part.decode("utf-8", "replace") if isinstance(part, bytes) else part for part in value
            )
        return value


def _value(value: OnnxValue, frame: _Frame) -> Value:
    row = onnx.TYPES.get(value.code)
    name = None if row is None else row.name or row.title.lower()
    shape = value.shape
    if shape is not None:
        shape = tuple(extent if isinstance(extent, str) or extent > 0 else "" for extent in shape)
    return Value(frame.name(value.name), name, shape)


def _number_constant(value: Any, dtype: str) -> Constant:
    return inline_constant(np.asarray(value, dtype))
