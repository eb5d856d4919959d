"""Programs of policies from graphs: the operators of one observation as steps, with computed constants."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.errors import UnsupportedError, UsageError, abbreviate_list
from ckpttool.core.tree import Path, Tree
from ckpttool.graphs.builder import needed_nodes
from ckpttool.graphs.graph import Graph, OperatorNode
from ckpttool.graphs.operators import compute_node, is_known
from ckpttool.libraries.onnx_operators import ProgramRecorder, ProgramValue
from ckpttool.libraries.onnx_policies import choose_action_output
from ckpttool.libraries.schema import Program, ProgramOperation
from ckpttool.mapping.rules import KEEP

if TYPE_CHECKING:
    import numpy as np

_MOST = 3.4028234663852886e38
_FLOATS = ("float32", "float64", "float16", "bfloat16")


class GraphProgram(NamedTuple):
    """The program of one output of a graph, and the paths of the tensors that it uses."""

    program: Program
    used: tuple[Path, ...]


class _Constant(NamedTuple):
    """A value that does not depend on the observation; `paths` are those of its tensors.

    `path` is that of the tensor itself, None for a computed one.
    """

    array: np.ndarray
    paths: tuple[Path, ...] = ()
    path: Path | None = None


_Operand = ProgramValue | _Constant


class _UnsupportedNodeError(Exception):
    """A node is not a step of a program."""


def _require(condition: object) -> None:
    if not condition:
        raise _UnsupportedNodeError


def prune_program(recorder: ProgramRecorder, action: ProgramValue) -> GraphProgram:
    """Return the operations that a value depends on, and the paths of their tensors."""
    needed, waiting = set[int](), [action.number]
    while waiting:
        number = waiting.pop()
        if number >= recorder.first and number not in needed:
            needed.add(number)
            waiting += recorder.operations[number - recorder.first].inputs
    places = {number: number for number in range(recorder.first)}
    operations: list[ProgramOperation] = []
    for number in sorted(needed):
        operation = recorder.operations[number - recorder.first]
        places[number] = recorder.first + len(operations)
        operations.append(operation._replace(inputs=tuple(places[one] for one in operation.inputs)))
    program = Program(tuple(recorder.inputs), {}, tuple(operations), places[action.number], action.shape[0])
    paths = [path for operation in operations for path in operation.value.get("paths", ())]
    return GraphProgram(program, tuple(dict.fromkeys(paths)))


def lower_graph(graph: Graph, output: str, file: str) -> GraphProgram:
    """Return the program that computes one output of a graph for one observation, in float32.

    Raise UnsupportedError for several inputs, an input without a fixed shape, and a node that is not a
    step of programs, by its module and operator.
    """
    import numpy as np

    if len(graph.inputs) != 1:
        names = [value.name for value in graph.inputs]
        raise UnsupportedError("the model has several inputs", file=file, found=abbreviate_list(names, 6))
    (value,) = graph.inputs
    extents = (value.shape or ())[1:]
    shape = tuple(extent for extent in extents if isinstance(extent, int) and extent > 0)
    if not shape or len(shape) != len(extents):
        raise UnsupportedError(
            "the model's input shape is not fixed", file=file, found=str(list(extents) or "none")
        )
    builder = _ProgramBuilder(graph, inputs=[("obs", shape)])
    builder.values[value.name] = ProgramValue(0, shape)
    for node in needed_nodes(graph.nodes, {output}):
        try:
            with np.errstate(all="ignore"):
                builder.values[node.outputs[0]] = builder.lower(node)
        except (_UnsupportedNodeError, ValueError, IndexError, TypeError):
            raise UnsupportedError(
                "the model has an unsupported layer",
                file=file,
                path="/".join(node.scope) or None,
                found=", ".join(
                    filter(None, (node.op.rpartition(".")[2], node.attributes.get("not_understood")))
                ),
            ) from None
    action = builder.operand(output)
    if not isinstance(action, ProgramValue) or len(action.shape) != 1:
        found = "a constant" if isinstance(action, _Constant) else str(list(action.shape))
        raise UnsupportedError("the model's output is not a vector", file=file, path=output, found=found)
    return prune_program(builder, action)


@dataclass
class _ProgramBuilder(ProgramRecorder):
    """Records the steps of a graph's nodes."""

    graph: Graph = field(default_factory=lambda: Graph((), (), (), {}))
    values: dict[str, _Operand] = field(default_factory=dict)

    def __init__(self, graph: Graph, inputs: list[tuple[str, tuple[int, ...]]]) -> None:
        """Start with the graph's input."""
        super().__init__(inputs=inputs)
        self.graph, self.values = graph, {}

    def operand(self, name: str) -> _Operand:
        """Return a value by name; constants are read when they are first used."""
        if name not in self.values:
            constant = self.graph.constants[name]
            path = constant.path
            direct = path if constant.rule == KEEP else None
            paths = () if path is None else (path,)
            self.values[name] = _Constant(constant.read(name), paths, direct)
        return self.values[name]

    def lower(self, node: OperatorNode) -> _Operand:
        """Return the result of a node: computed if it is constant, otherwise a step."""
        _require(is_known(node.op))
        operands = [self.operand(name) if name else None for name in node.inputs]
        if node.op in _SAME:
            # Programs compute in float32, whatever the element type of a layer.
            _require(node.op != "Cast" or node.attributes.get("to") in _FLOATS)
            _require(operands[0] is not None)
            return operands[0]  # type: ignore[return-value]
        known = [one for one in operands if not isinstance(one, ProgramValue)]
        if len(known) == len(operands):
            arrays = [None if one is None else one.array for one in known]
            paths = tuple(dict.fromkeys(path for one in known if one is not None for path in one.paths))
            return _Constant(compute_node(node, arrays)[0], paths)
        rule = _RULES.get(node.op)
        _require(rule is not None and len(list(filter(None, node.outputs))) == 1)
        return rule(self, node, [one for one in operands if one is not None])  # type: ignore[misc]

    # Steps.

    def affine(self, flow: ProgramValue, scale: Any, shift: Any, paths: Iterable[Path] = ()) -> ProgramValue:
        """Add `flow * scale + shift`, with one number or one for each entry."""
        import numpy as np

        wide = [np.asarray(one, np.float64).reshape(-1) for one in (scale, shift)]
        rows = np.broadcast_arrays(*wide)
        _require(len(flow.shape) == 1 and rows[0].size in (1, flow.shape[0]))
        return self.add("affine", flow.shape, flow, scale=rows[0], shift=rows[1], paths=tuple(paths))

    def activation(self, flow: ProgramValue, name: str, slope: float = 0.01) -> ProgramValue:
        """Add an elementary activation."""
        return self.add("activation", flow.shape, flow, name=name, slope=slope)

    def clip(self, flow: ProgramValue, low: float, high: float) -> ProgramValue:
        """Add limits."""
        import numpy as np

        return self.add("clip", flow.shape, flow, low=np.full(1, low), high=np.full(1, high))

    def merge(self, kind: str, one: ProgramValue, two: ProgramValue) -> ProgramValue:
        """Add the sum or product (`add`, `multiply`) of two values of the same shape."""
        _require(one.shape == two.shape)
        return self.add(kind, one.shape, one, two)

    def elu(self, flow: ProgramValue, alpha: float, scale: float = 1.0) -> ProgramValue:
        """Add ELU with a coefficient and a scale."""
        below = self.activation(flow, "elu")
        if alpha == scale == 1.0:
            return below
        above = self.affine(self.activation(flow, "relu"), scale * (1 - alpha), 0)
        return self.merge("add", self.affine(below, scale * alpha, 0), above)

    def dense(self, flow: ProgramValue, kernel: _Constant, *, turned: bool) -> ProgramValue:
        """Add a dense layer without its bias."""
        import numpy as np

        array = kernel.array.T if turned else kernel.array
        _require(len(flow.shape) == 1 and array.ndim == 2 and array.shape[0] == flow.shape[0])
        return self.add(
            "dense",
            (array.shape[1],),
            flow,
            kernel=array.astype(np.float32),
            bias=None,
            weights=None,
            paths=kernel.paths,
            source=(kernel.path, turned),
        )

    def with_bias(self, flow: ProgramValue, row: _Constant) -> ProgramValue | None:
        """Return the dense layer with a bias that is added to it, None if it is not one."""
        operation = self.operation(flow)
        if operation is None or operation.kind != "dense" or operation.value["bias"] is not None:
            return None
        if row.array.shape != flow.shape:
            return None
        value = {name: one for name, one in operation.value.items() if name != "paths"}
        value |= {"bias": row.array.astype("float32"), "paths": (*operation.value["paths"], *row.paths)}
        self.operations.append(ProgramOperation("dense", operation.inputs, value))
        return ProgramValue(self.first + len(self.operations) - 1, flow.shape)


_SAME = frozenset(("Identity", "Dropout", "Cast"))
_Rule = Callable[[_ProgramBuilder, OperatorNode, list[Any]], ProgramValue]


def _is_row(constant: _Constant, flow: ProgramValue) -> bool:
    """Return whether a constant has one number, or one for each entry of a vector."""
    array = constant.array
    return len(flow.shape) == 1 and (array.size == 1 or array.size == flow.shape[0] == array.shape[-1])


def _matmul(builder: _ProgramBuilder, _node: OperatorNode, operands: list[Any]) -> ProgramValue:
    flow, kernel = operands
    _require(isinstance(flow, ProgramValue) and isinstance(kernel, _Constant))
    return builder.dense(flow, kernel, turned=False)


def _einsum(builder: _ProgramBuilder, node: OperatorNode, operands: list[Any]) -> ProgramValue:
    flow, kernel = operands
    _require(isinstance(flow, ProgramValue) and isinstance(kernel, _Constant))
    left, _, result = str(node.attributes.get("equation")).partition("->")
    one, _, two = left.partition(",")
    _require(len(one) == len(two) == len(result) == 2 and one[0] == result[0] and len({*one, *two}) == 3)
    _require(two in (one[1] + result[1], result[1] + one[1]))
    return builder.dense(flow, kernel, turned=two[0] == result[1])


def _arithmetic(builder: _ProgramBuilder, node: OperatorNode, operands: list[Any]) -> ProgramValue:
    one, two = operands
    if isinstance(one, ProgramValue) and isinstance(two, ProgramValue):
        _require(node.op != "Div")
        two = builder.affine(two, -1.0, 0) if node.op == "Sub" else two
        return builder.merge("multiply" if node.op == "Mul" else "add", one, two)
    turned = isinstance(two, ProgramValue)
    flow, constant = (two, one) if turned else (one, two)
    _require(_is_row(constant, flow))
    row, paths = constant.array.astype("float64"), constant.paths
    if node.op == "Add":
        return builder.with_bias(flow, constant) or builder.affine(flow, 1.0, row, paths)
    if node.op == "Sub":
        return builder.affine(flow, -1.0 if turned else 1.0, row if turned else -row, paths)
    if node.op == "Mul":
        return builder.affine(flow, row, 0.0, paths)
    _require(not turned and row.all())
    return builder.affine(flow, 1 / row, 0.0, paths)


def _mean(builder: _ProgramBuilder, _node: OperatorNode, operands: list[Any]) -> ProgramValue:
    total = operands[0]
    for other in operands[1:]:
        _require(isinstance(total, ProgramValue) and isinstance(other, ProgramValue))
        total = builder.merge("add", total, other)
    return builder.affine(total, 1 / len(operands), 0)


def _activation(name: str) -> _Rule:
    return lambda builder, _node, operands: builder.activation(operands[0], name)


def _gelu(builder: _ProgramBuilder, node: OperatorNode, operands: list[Any]) -> ProgramValue:
    _require(node.attributes.get("approximate", "none") == "none")
    return builder.activation(operands[0], "gelu")


def _silu(builder: _ProgramBuilder, node: OperatorNode, operands: list[Any]) -> ProgramValue:
    _require(node.attributes.get("alpha", 1.0) == 1.0)
    return builder.activation(operands[0], "silu")


def _selu(builder: _ProgramBuilder, _node: OperatorNode, operands: list[Any]) -> ProgramValue:
    return builder.elu(operands[0], 1.6732632423543772, 1.0507009873554805)


def _celu(builder: _ProgramBuilder, node: OperatorNode, operands: list[Any]) -> ProgramValue:
    _require(node.attributes.get("alpha", 1.0) == 1.0)
    return builder.elu(operands[0], 1.0)


def _prelu(builder: _ProgramBuilder, _node: OperatorNode, operands: list[Any]) -> ProgramValue:
    flow, slope = operands
    _require(isinstance(flow, ProgramValue) and isinstance(slope, _Constant) and _is_row(slope, flow))
    below = builder.activation(builder.affine(flow, -1.0, 0), "relu")
    return builder.merge(
        "add", builder.activation(flow, "relu"), builder.affine(below, -slope.array, 0, slope.paths)
    )


def _mish(builder: _ProgramBuilder, _node: OperatorNode, operands: list[Any]) -> ProgramValue:
    inner = builder.activation(builder.activation(operands[0], "softplus"), "tanh")
    return builder.merge("multiply", operands[0], inner)


def _hard_sigmoid(builder: _ProgramBuilder, node: OperatorNode, operands: list[Any]) -> ProgramValue:
    slope, offset = node.attributes.get("alpha", 0.2), node.attributes.get("beta", 0.5)
    return builder.clip(builder.affine(operands[0], slope, offset), 0, 1)


def _hard_swish(builder: _ProgramBuilder, _node: OperatorNode, operands: list[Any]) -> ProgramValue:
    gate = builder.clip(builder.affine(operands[0], 1 / 6, 0.5), 0, 1)
    return builder.merge("multiply", operands[0], gate)


def _clip(builder: _ProgramBuilder, node: OperatorNode, operands: list[Any]) -> ProgramValue:
    flow = operands[0]
    _require(isinstance(flow, ProgramValue) and all(isinstance(one, _Constant) for one in operands[1:]))
    limits = [-_MOST, _MOST]
    for number, name in enumerate(node.inputs[1:]):
        if name:
            constant = builder.operand(name)
            _require(isinstance(constant, _Constant) and constant.array.size == 1)
            limits[number] = float(constant.array.reshape(()))  # type: ignore[union-attr]
    return builder.clip(flow, *limits)


def _batch_norm(builder: _ProgramBuilder, node: OperatorNode, operands: list[Any]) -> ProgramValue:
    import numpy as np

    flow, *tensors = operands
    _require(isinstance(flow, ProgramValue) and all(isinstance(one, _Constant) for one in tensors))
    _require(len(tensors) == 4 and all(one.array.shape == flow.shape for one in tensors))
    scale, shift, mean, variance = (one.array.astype("float64") for one in tensors)
    factor = scale / np.sqrt(variance + node.attributes.get("epsilon", 1e-5))
    paths = [path for one in tensors for path in one.paths]
    return builder.affine(builder.affine(flow, 1.0, -mean), factor, shift, paths)


def _layer_norm(builder: _ProgramBuilder, node: OperatorNode, operands: list[Any]) -> ProgramValue:
    import numpy as np

    flow, *tensors = operands
    _require(isinstance(flow, ProgramValue) and all(isinstance(one, _Constant) for one in tensors))
    _require(len(flow.shape) == 1 and node.attributes.get("axis", -1) in (-1, 1))
    _require(all(one.array.shape == flow.shape for one in tensors))
    rows = [one.array.astype(np.float32) for one in tensors]
    return builder.add(
        "layer_norm",
        flow.shape,
        flow,
        scale=rows[0],
        offset=rows[1] if len(rows) > 1 else np.zeros(flow.shape, np.float32),
        epsilon=node.attributes.get("epsilon", 1e-5),
        weights=None,
        stage=2,
        paths=tuple(path for one in tensors for path in one.paths),
    )


def _reshape(builder: _ProgramBuilder, _node: OperatorNode, operands: list[Any]) -> ProgramValue:
    flow, target = operands
    _require(isinstance(flow, ProgramValue) and isinstance(target, _Constant))
    extents = [int(extent) for extent in target.array.reshape(-1)]
    size = math.prod(flow.shape)
    _require(len(extents) > 1 and extents[0] in (0, -1) and extents.count(-1) < 2)
    rest = tuple(size if extent == -1 and len(extents) == 2 else extent for extent in extents[1:])
    if rest == flow.shape:
        return ProgramValue(flow.number, rest)
    _require(rest == (size,))
    return builder.add("flatten", rest, flow, image=flow.shape)


def _concat(builder: _ProgramBuilder, node: OperatorNode, operands: list[Any]) -> ProgramValue:
    _require(all(isinstance(one, ProgramValue) and len(one.shape) == 1 for one in operands))
    _require(node.attributes.get("axis") in (-1, 1))
    return builder.add("concat", (sum(one.shape[0] for one in operands),), *operands)


_RULES: Mapping[str, _Rule] = {
    "MatMul": _matmul,
    "Einsum": _einsum,
    **dict.fromkeys(("Add", "Sub", "Mul", "Div"), _arithmetic),
    "Mean": _mean,
    "Neg": lambda builder, _node, operands: builder.affine(operands[0], -1.0, 0),
    **{name: _activation(name.lower()) for name in ("Relu", "Tanh", "Sigmoid", "Softplus")},
    "Gelu": _gelu,
    "Swish": _silu,
    "LeakyRelu": lambda builder, node, operands: builder.activation(
        operands[0], "leaky_relu", node.attributes.get("alpha", 0.01)
    ),
    "Elu": lambda builder, node, operands: builder.elu(operands[0], node.attributes.get("alpha", 1.0)),
    "Selu": _selu,
    "Celu": _celu,
    "PRelu": _prelu,
    "Mish": _mish,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "Clip": _clip,
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "Reshape": _reshape,
    "Concat": _concat,
}


# Programs of Keras models, from their graphs.


class KerasComputation(NamedTuple):
    """The program of a model's action, the paths of its tensors, and notes on omitted outputs."""

    program: Program
    used: tuple[Path, ...]
    notes: tuple[str, ...]


def read_keras_program(
    document: Mapping[str, Any],
    tree: Tree,
    file: str,
    network: str = "actor",
    version: int | None = None,
) -> KerasComputation:
    """Return the program of a model with Keras's own class (see keras_config.is_described).

    `network` names one of several outputs, `version` is the major version of Keras that wrote the file.
    Raise UnsupportedError for an unsupported layer, and UsageError if several outputs could be the action.
    """
    # Not a top-level import: shapes need NumPy, and most models are chains of layers.
    from ckpttool.graphs.keras import read_document

    graph = read_document(document, tree, file, version)
    name, left = _choose_output([value.name for value in graph.outputs], network, file)
    program, used = lower_graph(graph, name, file)
    notes = (f"{', '.join(left)} left out: {name} is the policy",) if left else ()
    return KerasComputation(program, used, notes)


def _choose_output(names: Sequence[str], network: str, file: str) -> tuple[str, list[str]]:
    """Return the name of the output that is the action, and the names of the others."""
    found: str | None = network if network in names else None
    if found is None and network != "actor":
        raise UsageError(
            f"the model has no output named {network}", file=file, found=abbreviate_list(names, 8)
        )
    found = found or (names[0] if len(names) == 1 else choose_action_output(names))
    if found is None:
        raise UsageError(
            "the model has several outputs, and it is unknown which one is the action",
            file=file,
            found=abbreviate_list(names, 8),
            hint=" or ".join(f"--network {shlex.quote(name)}" for name in names[:8]),
        )
    return found, [name for name in names if name != found]
