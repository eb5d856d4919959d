"""Programs of actors: graphs of SavedModels as steps."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.tree import Leaf, Path
from ckpttool.encodings import protobuf
from ckpttool.formats import tf_saved_model_messages
from ckpttool.formats.tf_functions import FunctionNode, is_true, parse_node, read_constant_fields
from ckpttool.formats.tf_saved_model_messages import FieldMeter
from ckpttool.libraries.graph_programs import GraphProgram, prune_program
from ckpttool.libraries.onnx_operators import ProgramConstant, ProgramRecorder, ProgramValue
from ckpttool.libraries.schema import Program
from ckpttool.libraries.tf_graphs import (
    ACTIVATION_OPERATIONS,
    FAILURES,
    GraphEvaluator,
    UnsupportedGraphError,
    VariableReference,
    find_serving_function,
    make_graph_error,
)

if TYPE_CHECKING:
    import numpy as np


# Traces a SavedModel's serving function to a program, if it is not a chain of layers.
#
# Sources: tensorflow/core/ops/{math,nn,array}_ops.cc (the operations), keras/src/backend/tensorflow/ and
# tensorflow/python/ops/nn_impl.py (the patterns of layer norms, batch norms and GELU). Nothing is executed;
# constants are computed from the variables. Any other operation that the action depends on is refused.

_TYPES = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8"}
_FLOATS = ("float32", "float64")
_MOST = 3.4028234663852886e38
_ELEMENTS = 1 << 24
_SELU = (1.0507009873554805, 1.6732632423543772)


class _PatternFragment(NamedTuple):
    """Part of a layer norm, GELU or ELU of the value `of`; only meaningful within that pattern."""

    kind: str
    of: int
    epsilon: float = 0.0
    scale: Any = None
    shift: Any = None
    paths: tuple[Path, ...] = ()


class _GraphShape(NamedTuple):
    """A shape, or a part of one; None is the number of observations."""

    values: tuple[int | None, ...]


def read_captured(
    objects: memoryview, graph: memoryview, wanted: Sequence[int], meter: FieldMeter
) -> dict[int, memoryview]:
    """Return the constants captured by a function, by the numbers of their objects.

    SavedObjectGraph.nodes (1), SavedObject.constant (9), SavedConstant.operation (1); GraphDef.node
    (1).
    """
    names = {
        str(bytes(name), "utf-8", "replace"): number
        for number, each in enumerate(tf_saved_model_messages.iter_field(1, objects, meter))
        if number in wanted
        for constant in tf_saved_model_messages.iter_field(9, each, meter)
        for name in tf_saved_model_messages.iter_field(1, constant, meter)
    }
    found = {}
    for message in tf_saved_model_messages.iter_field(1, graph, meter) if names else ():
        name, node = parse_node(message, meter)
        if name in names and node.op == "Const" and "value" in node.attributes:
            found[names[name]] = node.attributes["value"]
    return found


def read_graph_program(checkpoint: Checkpoint) -> tuple[Program, tuple[Path, ...]]:
    """Return the program of a SavedModel's serving function and the paths of its tensors.

    Raise UnsupportedError if it cannot be traced.
    """
    meter = FieldMeter()
    try:
        served = find_serving_function(checkpoint, meter)
        if served is None or served.signature is None or len(served.signature.inputs) != 1:
            raise UnsupportedGraphError
        (given,) = served.signature.inputs.values()
        shape = (given.shape or ())[1:]
        if given.dtype not in _FLOATS or not shape or min(shape) < 1:
            raise UnsupportedGraphError(f"an input {given.dtype} {list(given.shape or ())}")
        reader = GraphProgramEvaluator(served.functions, tree=checkpoint.tree)
        graph = served.graph
        missing = [number for number in served.captures if number not in served.variables]
        constants = read_captured(graph.objects or _NONE, graph.nodes or _NONE, missing, meter)
        values = [
            VariableReference(served.variables[number])
            if number in served.variables
            else ProgramConstant(_parse_tensor(constants[number]))
            if number in constants
            else None
            for number in served.captures
        ]
        (result,) = reader.call(served.function, [reader.observe(shape), *values])
        return reader.program(result)
    except (*FAILURES, ValueError, IndexError, KeyError, OverflowError) as error:
        raise make_graph_error(checkpoint, error) from None


_NONE = memoryview(b"")


@dataclass
class GraphProgramEvaluator(GraphEvaluator):
    """Evaluates functions on one observation, and records the computation."""

    recorder: ProgramRecorder = field(default_factory=ProgramRecorder)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def observe(self, shape: tuple[int, ...]) -> ProgramValue:
        """Return the observation as a value."""
        self.recorder.inputs = [("obs", shape)]
        self.shapes[0] = shape
        return ProgramValue(0, shape)

    def program(self, action: Any) -> GraphProgram:
        """Return the program of a value, and the paths of its tensors."""
        if not isinstance(action, ProgramValue) or len(action.shape) != 1:
            raise UnsupportedGraphError
        return prune_program(self.recorder, action)

    # Values.

    def constant(self, value: memoryview) -> ProgramConstant:
        """Return the constant of a node's attribute."""
        return ProgramConstant(_parse_tensor(value))

    def value_of(self, value: Any) -> ProgramConstant | None:
        """Return a constant, or a variable's value."""
        if isinstance(value, ProgramConstant):
            return value
        leaf = self.tree.get(value.path) if isinstance(value, VariableReference) else None
        if not isinstance(leaf, Leaf) or leaf.dtype not in _FLOATS or leaf.size > _ELEMENTS:
            return None
        return ProgramConstant(leaf.array(), value.path)

    def add(
        self,
        kind: str,
        shape: tuple[int, ...],
        *given: ProgramValue,
        paths: Sequence[Path] = (),
        **value: Any,
    ) -> ProgramValue:
        """Record an operation and return its value."""
        found = self.recorder.add(kind, shape, *given, paths=tuple(paths), **value)
        self.shapes[found.number] = shape
        return found

    def affine(self, flow: ProgramValue, scale: Any, shift: Any, paths: Sequence[Path] = ()) -> ProgramValue:
        """Record `flow * scale + shift`, with one number or one per entry."""
        import numpy as np

        wide = [np.asarray(each, np.float64).reshape(-1) for each in (scale, shift)]
        rows = np.broadcast_arrays(*wide)
        if len(flow.shape) != 1 or rows[0].size not in (1, flow.shape[0]):
            raise UnsupportedGraphError
        return self.add("affine", flow.shape, flow, scale=rows[0], shift=rows[1], paths=paths)

    def activation(self, flow: ProgramValue, name: str, slope: float = 0.01) -> ProgramValue:
        """Record an elementary activation."""
        return self.add("activation", flow.shape, flow, name=name, slope=slope)

    # Operations.

    def _node(self, node: FunctionNode, given: list[Any]) -> Any:
        common = self.common(node, given)
        if common is not None:
            return common[0]
        if node.op in _FOLDED and given and all(self.value_of(each) is not None for each in given):
            return self._folded(node, given)
        rule = _RULES.get(node.op)
        found = rule(self, node, given) if rule is not None else None
        if found is None:
            raise UnsupportedGraphError(node.op)
        return found

    def _folded(self, node: FunctionNode, given: list[Any]) -> ProgramConstant:
        import numpy as np

        known = [constant for each in given if (constant := self.value_of(each)) is not None]
        arrays = [each.array for each in known]
        if math.prod(np.broadcast_shapes(*(a.shape for a in arrays[:2]))) > _ELEMENTS:
            raise UnsupportedGraphError
        with np.errstate(all="ignore"):
            found = _FOLDED[node.op](*arrays)
        paths = [path for each in known for path in (each.path, *self._beside.get(id(each.array), ()))]
        self._keep.append(found)
        self._beside[id(found)] = tuple(path for path in paths if path is not None)
        return ProgramConstant(np.asarray(found))

    _beside: dict[int, tuple[Path, ...]] = field(default_factory=dict)
    _keep: list[Any] = field(default_factory=list)

    def _paths(self, constant: ProgramConstant) -> tuple[Path, ...]:
        own = () if constant.path is None else (constant.path,)
        return (*own, *self._beside.get(id(constant.array), ()))

    def product(self, node: FunctionNode, given: list[Any]) -> Any:
        """Return a dense layer without its bias."""
        import numpy as np

        kernel = self.value_of(given[1]) if len(given) == 2 else None
        flow = given[0]
        if (
            kernel is None
            or not isinstance(flow, ProgramValue)
            or len(flow.shape) != 1
            or kernel.array.ndim != 2
        ):
            return None
        if any(is_true(node.attributes.get(name)) for name in ("transpose_a", "adj_x", "adj_y")):
            return None
        array = kernel.array.T if is_true(node.attributes.get("transpose_b")) else kernel.array
        if array.shape[0] != flow.shape[0]:
            return None
        return self.add(
            "dense", (array.shape[1],), flow, kernel=array.astype(np.float32), bias=None, weights=None,
            source=(kernel.path, False), paths=self._paths(kernel),
        )  # fmt: skip

    def arithmetic(self, node: FunctionNode, given: list[Any]) -> Any:
        """Return the sum, difference, product or quotient of two values."""
        one, two = given
        if isinstance(one, _PatternFragment) or isinstance(two, _PatternFragment):
            return self._pattern(node.op, one, two)
        if isinstance(one, ProgramValue) and isinstance(two, ProgramValue):
            if one.shape != two.shape or node.op == "RealDiv":
                return None
            two = self.affine(two, -1.0, 0) if node.op == "Sub" else two
            return self.add("multiply" if node.op == "Mul" else "add", one.shape, one, two)
        turned = isinstance(two, ProgramValue)
        flow, constant = (two, self.value_of(one)) if turned else (one, self.value_of(two))
        if not isinstance(flow, ProgramValue) or constant is None or len(flow.shape) != 1:
            return None
        row = constant.array
        if row.size not in (1, flow.shape[0]) or (row.ndim and row.size != row.shape[-1]):
            return None
        paths = self._paths(constant)
        if node.op in ("BiasAdd", "Add", "AddV2"):
            return self._biased(flow, row, paths) or self.affine(flow, 1.0, row, paths)
        if node.op == "Sub":
            return self.affine(flow, -1.0, row, paths) if turned else self.affine(flow, 1.0, -row, paths)
        if node.op == "Mul":
            return self.affine(flow, row, 0.0, paths)
        if turned or not row.all():
            return None
        return self.affine(flow, 1 / row.astype("float64"), 0.0, paths)

    def _biased(self, flow: ProgramValue, row: np.ndarray, paths: tuple[Path, ...]) -> ProgramValue | None:
        operation = self.recorder.operation(flow)
        if operation is None or operation.kind != "dense" or operation.value["bias"] is not None:
            return None
        if row.shape != flow.shape:
            return None
        value = {name: each for name, each in operation.value.items() if name != "paths"}
        value |= {"bias": row.astype("float32")}
        before = ProgramValue(operation.inputs[0], self.shapes[operation.inputs[0]])
        return self.add("dense", flow.shape, before, paths=(*operation.value["paths"], *paths), **value)

    def _pattern(self, op: str, one: Any, two: Any) -> Any:  # noqa: C901  # patterns, one by one
        """Return the value that two parts of a layer norm or of an activation combine to."""
        adds, times = op in ("Add", "AddV2"), op == "Mul"
        if not isinstance(one, _PatternFragment) or (
            isinstance(two, _PatternFragment) and (one.kind, two.kind) in _SWAPPED
        ):
            one, two = two, one
        if isinstance(two, _PatternFragment):
            if times and (one.kind, two.kind) == ("negative mean", "factor") and one.of == two.of:
                return two._replace(kind="offset", shift=0.0)
            if adds and (one.kind, two.kind) == ("product", "offset") and _is_same(one, two):
                return self._layer_norm(one, two)
            return None
        if isinstance(two, ProgramValue):
            if times and one.kind == "factor" and one.of == two.number:
                return one._replace(kind="product")
            if times and one.kind in ("erfc", "erf + 1"):
                number, scale, shift = self.multiple(two)
                whole = number == one.of and shift == 0 and math.isclose(scale, 0.5, rel_tol=1e-6)
                return self.activation(ProgramValue(one.of, two.shape), "gelu") if whole else None
            return None
        constant = self.value_of(two)
        if constant is None:
            return None
        row, paths = constant.array, (*one.paths, *self._paths(constant))
        if adds and one.kind == "variance" and row.size == 1:
            return one._replace(kind="shifted", epsilon=float(row.reshape(-1)[0]))
        if times and one.kind == "factor" and one.scale is None and row.size == self.shapes[one.of][-1]:
            return one._replace(scale=row.reshape(-1), paths=paths)
        if adds and one.kind == "offset" and row.size == self.shapes[one.of][-1]:
            return one._replace(shift=row.reshape(-1), paths=paths)
        if adds and one.kind == "erf" and row.size == 1 and float(row.reshape(-1)[0]) == 1.0:
            return one._replace(kind="erf + 1")
        return None

    def _layer_norm(self, product: _PatternFragment, offset: _PatternFragment) -> ProgramValue:
        import numpy as np

        shape = self.shapes[product.of]
        rows = (1.0 if product.scale is None else product.scale, offset.shift)
        scale, shift = (np.broadcast_to(np.asarray(row, np.float32), shape).copy() for row in rows)
        return self.add(
            "layer_norm", shape, ProgramValue(product.of, shape), scale=scale, offset=shift, epsilon=product.epsilon,  # noqa: E501
            weights=None, stage=2, paths=tuple(dict.fromkeys((*product.paths, *offset.paths))),
        )  # fmt: skip

    def multiple(self, flow: ProgramValue) -> tuple[int, float, float]:
        """Return the number of the value of which this is a linear function, with its factor and offset."""
        scale, shift, number = 1.0, 0.0, flow.number
        while (operation := self.recorder.operation(ProgramValue(number, ()))) is not None:
            if operation.kind != "affine" or operation.value["scale"].size != 1:
                break
            shift += scale * float(operation.value["shift"][0])
            scale *= float(operation.value["scale"][0])
            number = operation.inputs[0]
        return number, scale, shift


# Operators with commutative operands: Mul and Add.
_SWAPPED = {("factor", "negative mean"), ("offset", "product")}


def _is_same(one: _PatternFragment, two: _PatternFragment) -> bool:
    scales = [None if each.scale is None else each.scale.tolist() for each in (one, two)]
    return (one.of, one.epsilon) == (two.of, two.epsilon) and scales[0] == scales[1]


def _parse_tensor(value: memoryview) -> np.ndarray:
    """Return the tensor of an attribute: AttrValue.tensor (8)."""
    import numpy as np

    fields = read_constant_fields(value, _ELEMENTS)
    if (
        fields is None
        or fields.dtype not in _TYPES
        or fields.shape is None
        or min(fields.shape, default=0) < 0
    ):
        raise UnsupportedGraphError
    size, dtype = math.prod(fields.shape), _TYPES[fields.dtype]
    numbers = [protobuf.as_int32(each) if isinstance(each, int) else each for each in fields.numbers]
    found = np.frombuffer(fields.content, dtype) if fields.content else np.asarray(numbers, dtype)
    if size > _ELEMENTS or found.size not in (1, size) or not found.size:
        raise UnsupportedGraphError
    return np.broadcast_to(found.reshape(-1) if found.size == size else found, (size,)).reshape(fields.shape)


_Rule = Callable[[GraphProgramEvaluator, FunctionNode, list[Any]], Any]


def _unary_rule(rule: Callable[[GraphProgramEvaluator, FunctionNode, ProgramValue], Any]) -> _Rule:
    def made(reader: GraphProgramEvaluator, node: FunctionNode, given: list[Any]) -> Any:
        return (
            rule(reader, node, given[0]) if len(given) == 1 and isinstance(given[0], ProgramValue) else None
        )

    return made


def _add_activation(reader: GraphProgramEvaluator, node: FunctionNode, flow: ProgramValue) -> ProgramValue:
    return reader.activation(flow, ACTIVATION_OPERATIONS[node.op])


def _leaky(reader: GraphProgramEvaluator, node: FunctionNode, flow: ProgramValue) -> ProgramValue:
    given = node.attributes.get("alpha")
    # An attribute with its default value is omitted.
    slope = (
        0.2
        if given is None
        else next((_float(v) for _, v in protobuf.parse_fields(given, {4: protobuf.WORD})), 0.0)
    )
    return reader.activation(flow, "leaky_relu", slope)


def _float(value: int | memoryview) -> float:
    raw = value.to_bytes(4, "little") if isinstance(value, int) else bytes(value)
    return float(struct.unpack("<f", raw)[0])


def _match_positive(reader: GraphProgramEvaluator, _node: FunctionNode, given: list[Any]) -> Any:
    zero = reader.value_of(given[1])
    above = isinstance(given[0], ProgramValue) and zero is not None and not zero.array.any()
    return _PatternFragment("positive", given[0].number) if above else None


def _match_scaled_elu(reader: GraphProgramEvaluator, _node: FunctionNode, given: list[Any]) -> Any:
    """Return ELU with a coefficient: elu for positive inputs, a multiple of elu elsewhere."""
    where, one, two = given
    if not (
        isinstance(where, _PatternFragment)
        and isinstance(one, ProgramValue)
        and isinstance(two, ProgramValue)
    ):
        return None
    operation = reader.recorder.operation(one)
    elu = operation is not None and operation.kind == "activation" and operation.value["name"] == "elu"
    number, alpha, shift = reader.multiple(two)
    if where.kind != "positive" or not elu or operation is None or operation.inputs != (where.of,):
        return None
    if number != one.number or shift:
        return None
    relu = reader.activation(ProgramValue(where.of, one.shape), "relu")
    return reader.add("add", one.shape, two, reader.affine(relu, 1 - alpha, 0))


def _selu(reader: GraphProgramEvaluator, _node: FunctionNode, flow: ProgramValue) -> ProgramValue:
    scale, alpha = _SELU
    above = reader.affine(reader.activation(flow, "relu"), scale * (1 - alpha), 0)
    return reader.add(
        "add", flow.shape, reader.affine(reader.activation(flow, "elu"), scale * alpha, 0), above
    )


def _relu6(reader: GraphProgramEvaluator, _node: FunctionNode, flow: ProgramValue) -> ProgramValue:
    return _add_clip(reader, flow, 0.0, 6.0)


def _add_clip(reader: GraphProgramEvaluator, flow: ProgramValue, low: Any, high: Any) -> ProgramValue:
    import numpy as np

    rows = [np.atleast_1d(np.asarray(each, np.float64)).reshape(-1) for each in (low, high)]
    return reader.add("clip", flow.shape, flow, low=rows[0], high=rows[1])


def _read_limit(reader: GraphProgramEvaluator, node: FunctionNode, given: list[Any]) -> Any:
    flow, constant = given if isinstance(given[0], ProgramValue) else given[::-1]
    known = reader.value_of(constant)
    if not isinstance(flow, ProgramValue) or known is None or known.array.size != 1:
        return None
    number = float(known.array.reshape(-1)[0])
    return _add_clip(reader, flow, *((-_MOST, number) if node.op == "Minimum" else (number, _MOST)))


def _negative(reader: GraphProgramEvaluator, _node: FunctionNode, given: list[Any]) -> Any:
    if isinstance(given[0], _PatternFragment):
        return given[0]._replace(kind="negative mean") if given[0].kind == "mean" else None
    return reader.affine(given[0], -1.0, 0) if isinstance(given[0], ProgramValue) else None


def _mean(reader: GraphProgramEvaluator, node: FunctionNode, given: list[Any]) -> Any:
    axes = reader.value_of(given[1])
    value = given[0]
    whole = axes is not None and [int(each) for each in axes.array.reshape(-1)] in ([1], [-1])
    if not whole or not is_true(node.attributes.get("keep_dims")):
        return None
    if isinstance(value, ProgramValue) and len(value.shape) == 1:
        return _PatternFragment("mean", value.number)
    if isinstance(value, _PatternFragment) and value.kind == "squares":
        return value._replace(kind="variance")
    return None


def _match_square(_reader: GraphProgramEvaluator, _node: FunctionNode, given: list[Any]) -> Any:
    one, two = given if isinstance(given[0], ProgramValue) else given[::-1]
    if (
        isinstance(one, ProgramValue)
        and isinstance(two, _PatternFragment)
        and (two.kind, two.of) == ("mean", one.number)
    ):
        return two._replace(kind="squares")
    return None


def _root(_reader: GraphProgramEvaluator, _node: FunctionNode, given: list[Any]) -> Any:
    value = given[0]
    shifted = isinstance(value, _PatternFragment) and value.kind == "shifted"
    return value._replace(kind="factor") if shifted else None


def _match_erf(reader: GraphProgramEvaluator, node: FunctionNode, flow: ProgramValue) -> Any:
    number, scale, shift = reader.multiple(flow)
    wanted = -math.sqrt(0.5) if node.op == "Erfc" else math.sqrt(0.5)
    exact = shift == 0 and math.isclose(scale, wanted, rel_tol=1e-6)
    return _PatternFragment("erfc" if node.op == "Erfc" else "erf", number) if exact else None


def _concat(reader: GraphProgramEvaluator, _node: FunctionNode, given: list[Any]) -> Any:
    *flows, axis = given
    known = reader.value_of(axis)
    if known is None or known.array.size != 1 or int(known.array.reshape(-1)[0]) not in (1, -1):
        return None
    if not flows or not all(isinstance(each, ProgramValue) and len(each.shape) == 1 for each in flows):
        return None
    return reader.add("concat", (sum(each.shape[0] for each in flows),), *flows)


def _shape(_reader: GraphProgramEvaluator, _node: FunctionNode, given: list[Any]) -> Any:
    return _GraphShape((None, *given[0].shape)) if isinstance(given[0], ProgramValue) else None


def _slice(reader: GraphProgramEvaluator, _node: FunctionNode, given: list[Any]) -> Any:
    """Return one extent of a shape: the number of observations, or a fixed extent."""
    numbers = [reader.value_of(each) for each in given[1:]]
    if not isinstance(given[0], _GraphShape) or any(n is None or n.array.size != 1 for n in numbers):
        return None
    start, stop, step = (int(n.array.reshape(-1)[0]) for n in numbers if n is not None)
    return _GraphShape(given[0].values[start:stop]) if step == 1 and stop - start == 1 else None


def _pack(reader: GraphProgramEvaluator, _node: FunctionNode, given: list[Any]) -> Any:
    values: list[int | None] = []
    for each in given:
        known = reader.value_of(each)
        if isinstance(each, _GraphShape) and len(each.values) == 1:
            values.append(each.values[0])
        elif known is not None and known.array.size == 1:
            values.append(int(known.array.reshape(-1)[0]))
        else:
            return None
    return _GraphShape(tuple(values))


def _reshape(reader: GraphProgramEvaluator, _node: FunctionNode, given: list[Any]) -> Any:
    import numpy as np

    value, to = given
    known = reader.value_of(to)
    target = [int(n) for n in known.array.reshape(-1)] if known is not None else None
    constant = reader.value_of(value)
    if constant is not None and target is not None:
        found = np.reshape(constant.array, target)
        return ProgramConstant(found, constant.path if found.shape == constant.array.shape else None)
    if isinstance(to, _GraphShape) and to.values[:1] == (None,):
        target = [-1, *(n if n is not None else 0 for n in to.values[1:])]
    if not isinstance(value, ProgramValue) or not target or target[0] != -1:
        return None
    size, rest = math.prod(value.shape), tuple(target[1:])
    rest = (size,) if rest == (-1,) else rest
    if math.prod(rest) != size or min(rest, default=0) < 1:
        return None
    if len(rest) == 1 and len(reader.shapes[value.number]) > 1:
        return reader.add("flatten", rest, ProgramValue(value.number, reader.shapes[value.number]), image=())
    return ProgramValue(value.number, rest)


_FOLDED: Mapping[str, Callable[..., Any]] = {
    "Add": lambda a, b: a + b,
    "AddV2": lambda a, b: a + b,
    "BiasAdd": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "RealDiv": lambda a, b: a / b,
    "Maximum": lambda a, b: __import__("numpy").maximum(a, b),
    "Minimum": lambda a, b: __import__("numpy").minimum(a, b),
    "Sqrt": lambda a: a**0.5,
    "Rsqrt": lambda a: 1 / a**0.5,
    "Neg": lambda a: -a,
    "Square": lambda a: a * a,
    "Exp": lambda a: __import__("numpy").exp(a),
}
_RULES: Mapping[str, _Rule] = {
    "MatMul": GraphProgramEvaluator.product,
    **dict.fromkeys(("BiasAdd", "Add", "AddV2", "Sub", "Mul", "RealDiv"), GraphProgramEvaluator.arithmetic),
    **dict.fromkeys(ACTIVATION_OPERATIONS, _unary_rule(_add_activation)),
    "LeakyRelu": _unary_rule(_leaky),
    "Selu": _unary_rule(_selu),
    "Relu6": _unary_rule(_relu6),
    "Minimum": _read_limit,
    "Maximum": _read_limit,
    "Neg": _negative,
    "Greater": _match_positive,
    "SelectV2": _match_scaled_elu,
    "Square": _unary_rule(lambda reader, _node, flow: reader.add("multiply", flow.shape, flow, flow)),
    "Mean": _mean,
    "SquaredDifference": _match_square,
    "Rsqrt": _root,
    "Erfc": _unary_rule(_match_erf),
    "Erf": _unary_rule(_match_erf),
    "ConcatV2": _concat,
    "Shape": _shape,
    "StridedSlice": _slice,
    "Pack": _pack,
    "Reshape": _reshape,
}
