"""Write a graph as an ONNX model, with operators that old runtimes support.

Opset 13 and IR version 7 are those of ONNX 1.8 (onnx/docs/Versioning.md); layer norm, GELU, Mish, SiLU and
HardSwish have no operator there and are composed of smaller ones, in the patterns that runtimes fuse again
(onnxruntime/core/optimizer/layer_norm_fusion.cc, gelu_fusion.cc). Imported only for exports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from onnx import TensorProto, checker, defs, helper

from ckpttool.core.errors import UnsupportedError
from ckpttool.core.tree import Leaf
from ckpttool.graphs.builder import GraphBuilder
from ckpttool.graphs.graph import Graph, OperatorNode
from ckpttool.graphs.operators import find_operator
from ckpttool.networks.network import SELU_ALPHA, SELU_SCALE
from ckpttool.version import __version__

OPSET, IR_VERSION = 13, 7
_TYPES = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}


def encode_graph(graph: Graph, metadata: Mapping[str, str]) -> bytes:
    """Return the model's bytes, checked by the onnx library; equal graphs give equal bytes.

    Args:
        graph: what the model computes, in the float type of its inputs.
        metadata: texts by name, stored in the model.

    Raise UnsupportedError for an operator that the runtime does not implement in the graph's type.
    """
    graph = _compose_operators(graph)
    nodes = [_encode_node(graph, node) for node in graph.nodes]
    used = {name for node in nodes for name in node.input}
    constants = [
        # raw_data is little-endian on every machine (onnx/onnx.proto, TensorProto), as are leaves.
        helper.make_tensor(name, _TYPES[leaf.dtype], leaf.shape, bytes(leaf.read()), raw=True)
        for name, constant in graph.constants.items()
        if name in used and isinstance(leaf := constant.leaf, Leaf)
    ]
    inputs, outputs = (
        [helper.make_tensor_value_info(name, _TYPES[str(dtype)], shape) for name, dtype, shape in values]
        for values in (graph.inputs, graph.outputs)
    )
    model = helper.make_model(
        helper.make_graph(nodes, graph.name, inputs, outputs, constants),
        producer_name="ckpttool",
        producer_version=__version__,
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET)],
    )
    helper.set_model_props(model, dict(metadata))
    checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


def _encode_node(graph: Graph, node: OperatorNode) -> Any:
    """Return a node of the model; axes of means are an attribute before version 18 of the operators."""
    inputs, attributes = node.inputs, dict(node.attributes)
    if node.op == "ReduceMean":
        inputs, attributes["axes"] = inputs[:1], graph.constants[inputs[1]].integers
    if node.op == "Cast":
        attributes["to"] = _TYPES[attributes["to"]]
    return helper.make_node(node.op, inputs, node.outputs, name=node.outputs[0], **attributes)


class _Operands:
    """Adds operators in a graph's float type, and numbers of that type.

    Those that the runtime does not have in this type are composed, or expanded by their rows.
    """

    def __init__(self, graph: Graph) -> None:
        self.builder, self.dtype = GraphBuilder(), str(graph.inputs[0].dtype)
        for name in (*graph.constants, *(name for node in graph.nodes for name in node.outputs)):
            self.builder.unique_name(name)

    def find(self, op: str) -> _Composition | None:
        """Return how an operator is composed, None if the runtime has it."""
        wide = self.dtype == "float64"
        if wide and op in _FLOAT32_ONLY:
            raise UnsupportedError(
                f"the ONNX model does not support {_FLOAT32_ONLY[op]} in float64",
                hint="onnxruntime does not implement it in this type",
            )
        compose = _COMPOSED.get(op) or (_IN_FLOAT64.get(op) if wide else None)
        return compose or (None if defs.has(op, max_inclusive_version=OPSET) else _expanded)

    def add(self, op: str, /, *inputs: str, **attributes: Any) -> str:
        """Add an operator and return the name of its result."""
        compose = self.find(op)
        if compose is not None:
            return compose(self, OperatorNode(op, inputs, (), attributes))
        return self.builder.one(op, *inputs, **attributes)

    def number(self, value: float) -> str:
        """Return the name of a number."""
        return self.builder.number(value, self.dtype)


def _compose_operators(graph: Graph) -> Graph:
    """Return the graph with operators of old versions, and of the runtime's for its float type."""
    operands = _Operands(graph)
    for node in graph.nodes:
        if (compose := operands.find(node.op)) is None:
            operands.builder.nodes.append(node)
            continue
        operands.builder.scope = node.scope
        compose(operands, node)
        operands.builder.nodes[-1] = replace(operands.builder.nodes[-1], outputs=node.outputs)
    return replace(
        graph,
        nodes=tuple(operands.builder.nodes),
        constants={**graph.constants, **operands.builder.constants},
    )


def _layer_norm(to: _Operands, node: OperatorNode) -> str:
    if (axis := node.attributes.get("axis", -1)) != -1:
        raise UnsupportedError("the ONNX model normalizes the last axis only", found=str(axis))
    (x, scale, offset), axes = node.inputs, to.builder.integers([-1])
    centred = to.add("Sub", x, to.add("ReduceMean", x, axes, keepdims=1))
    # As one fused operator, its epsilon would be a 32-bit attribute.
    wide = to.dtype == "float64"
    squared = to.add("Mul", centred, centred) if wide else to.add("Pow", centred, to.number(2.0))
    variance = to.add("ReduceMean", squared, axes, keepdims=1)
    root = to.add("Sqrt", to.add("Add", variance, to.number(node.attributes["epsilon"])))
    return to.add("Add", to.add("Mul", to.add("Div", centred, root), scale), offset)


def _expanded(to: _Operands, node: OperatorNode) -> str:
    row = find_operator(node.op)
    if row.expand is None:
        raise UnsupportedError("an operator is not in the ONNX model's operator set", found=node.op)
    return row.expanded(node, to.add, to.number)


def _gelu(to: _Operands, node: OperatorNode) -> str:
    (x,) = node.inputs
    if node.attributes.get("approximate", "none") != "none":
        return _expanded(to, node)
    erf = to.add("Erf", to.add("Div", x, to.number(math.sqrt(2.0))))
    return to.add("Mul", to.add("Mul", x, to.add("Add", erf, to.number(1.0))), to.number(0.5))


def _above(to: _Operands, x: str) -> str:
    return to.add("Max", x, to.number(0.0))


def _below(to: _Operands, x: str) -> str:
    return to.add("Min", x, to.number(0.0))


def _elu(to: _Operands, node: OperatorNode) -> str:
    (x,), alpha = node.inputs, node.attributes.get("alpha", 1.0)
    below = to.add("Sub", to.add("Exp", _below(to, x)), to.number(1.0))
    return to.add("Add", _above(to, x), below if alpha == 1 else to.add("Mul", below, to.number(alpha)))


def _softplus(to: _Operands, node: OperatorNode) -> str:
    (x,) = node.inputs
    small = to.add("Exp", to.add("Neg", to.add("Abs", x)))
    return to.add("Add", _above(to, x), to.add("Log", to.add("Add", small, to.number(1.0))))


def _leaky_relu(to: _Operands, node: OperatorNode) -> str:
    (x,), alpha = node.inputs, node.attributes.get("alpha", 0.01)
    return to.add("Add", _above(to, x), to.add("Mul", _below(to, x), to.number(alpha)))


def _selu(to: _Operands, node: OperatorNode) -> str:
    settings = {"alpha": SELU_ALPHA, "gamma": SELU_SCALE, **node.attributes}
    return to.add("Mul", _elu(to, replace(node, attributes=settings)), to.number(settings["gamma"]))


_Composition = Callable[[_Operands, OperatorNode], str]
# Operators that the operator set lacks, or whose result for NaN differs between runtimes.
_COMPOSED: Mapping[str, _Composition] = {
    "LayerNormalization": _layer_norm,
    "Gelu": _gelu,
    "Selu": _selu,
    "Clip": lambda to, node: to.add("Min", to.add("Max", *node.inputs[:2]), node.inputs[2]),
}
# onnxruntime computes these operators in float32 alone (onnxruntime/docs/OperatorKernels.md).
_IN_FLOAT64: Mapping[str, _Composition] = {"Elu": _elu, "Softplus": _softplus, "LeakyRelu": _leaky_relu}
_FLOAT32_ONLY = {"Conv": "convolution", "Gelu": "gelu"}
