"""Graphs: what a checkpoint computes, one table of operators, and their evaluation."""

from typing import TYPE_CHECKING

from ckpttool import package_face

if TYPE_CHECKING:
    from ckpttool.graphs.graph import (
        Constant as Constant,
        Graph as Graph,
        OperatorNode as OperatorNode,
        Value as Value,
        read_graph as read_graph,
    )
    from ckpttool.graphs.interpreter import evaluate as evaluate
    from ckpttool.graphs.operators import find_operator as find_operator, list_operators as list_operators
    from ckpttool.graphs.shapes import infer_shapes as infer_shapes

package_face()
