"""Graphs: what a checkpoint computes, one table of operators, and their evaluation."""

from typing import TYPE_CHECKING

from ckpttool.core import package_face

# Public names, imported from their modules on first use.

if TYPE_CHECKING:
    from ckpttool.graphs.graph import Constant, Graph, OperatorNode, Value, read_graph
    from ckpttool.graphs.interpreter import evaluate
    from ckpttool.graphs.operators import find_operator, list_operators
    from ckpttool.graphs.shapes import infer_shapes

__all__ = [
    "Constant",
    "Graph",
    "OperatorNode",
    "Value",
    "evaluate",
    "find_operator",
    "infer_shapes",
    "list_operators",
    "read_graph",
]

_HOMES = {
    "Constant": "graph",
    "Graph": "graph",
    "OperatorNode": "graph",
    "Value": "graph",
    "evaluate": "interpreter",
    "find_operator": "operators",
    "infer_shapes": "shapes",
    "list_operators": "operators",
    "read_graph": "graph",
}

__getattr__, __dir__ = package_face(__name__, _HOMES)
