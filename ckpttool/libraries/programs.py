"""Programs of actors: Keras models and recorded graphs as steps."""

from __future__ import annotations

import math
import shlex
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import UnsupportedError, UsageError, abbreviate_list
from ckpttool.core.tree import Leaf, Path, Tree
from ckpttool.encodings import protobuf
from ckpttool.formats import keras_config, tf_saved_model_messages
from ckpttool.formats.keras_config import config_of
from ckpttool.formats.tf_common import format_object
from ckpttool.formats.tf_saved_model_messages import FieldMeter
from ckpttool.libraries.onnx_operators import ProgramConstant, ProgramRecorder, ProgramValue
from ckpttool.libraries.onnx_policies import choose_action_output
from ckpttool.libraries.schema import Program, ProgramOperation
from ckpttool.libraries.tf_graphs import (
    ACTIVATION_OPERATIONS,
    FAILURES,
    FunctionNode,
    GraphEvaluator,
    UnsupportedGraphError,
    VariableReference,
    find_serving_function,
    is_true,
    make_graph_error,
    parse_node,
    read_constant_fields,
)
from ckpttool.mapping.layers import Name

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

    def program(self, action: Any) -> tuple[Program, tuple[Path, ...]]:
        """Return the program of a value, and the paths of its tensors."""
        if not isinstance(action, ProgramValue) or len(action.shape) != 1:
            raise UnsupportedGraphError
        recorder = self.recorder
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
            operations.append(operation._replace(inputs=tuple(places[each] for each in operation.inputs)))
        made = Program(tuple(recorder.inputs), {}, tuple(operations), places[action.number], action.shape[0])
        paths = [path for operation in operations for path in operation.value["paths"]]
        return made, tuple(dict.fromkeys(paths))

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


# Traces a Keras model's configuration to a program: branches, norms, shared layers.
#
# Sources: keras/src/models/functional.py and keras/src/ops/function.py (`inbound_nodes`: the calls of a
# layer), keras/src/layers/** and keras/src/activations/activations.py (the formulas). Both spellings are
# read, those of Keras 2 and 3. A layer of another class is refused: its code is not in the file.

_DEEP, _CALLS, _NUMBERS = 20, 10_000, 1 << 20
_PLAIN = frozenset(("relu", "tanh", "sigmoid", "elu", "gelu", "silu", "softplus"))


class KerasComputation(NamedTuple):
    """The program of a model's action, the paths of its tensors, and notes on omitted outputs."""

    program: Program
    used: tuple[Path, ...]
    notes: tuple[str, ...]


def read_keras_program(
    document: Mapping[str, Any], tree: Tree, file: str, network: str = "actor"
) -> KerasComputation:
    """Return the program of a model with Keras's own class (see keras_config.is_described).

    `network` names one of several outputs. Raise UnsupportedError for an unsupported layer, and
    UsageError if several outputs could be the action.
    """
    try:
        return _read_program(document, tree, file, network)
    except (TypeError, ValueError, LookupError, OverflowError, RecursionError) as error:
        raise UnsupportedError(
            "the model's configuration does not have the structure that Keras writes", file=file
        ) from error


def _read_program(document: Mapping[str, Any], tree: Tree, file: str, network: str) -> KerasComputation:
    tensors = {tree.names[path].removesuffix(":0"): path for path, _ in tree.tensors()}
    reader = _KerasProgramReader(tree=tree, file=file, tensors=tensors)
    shape = reader.observed(document)
    reader.inputs = [("obs", shape)]
    found = reader.model(document, (), [ProgramValue(0, shape)])
    name, left = _choose_output(list(found), network, file)
    action = found[name]
    if len(action.shape) != 1:
        raise reader.refused((name,), f"an output of shape {list(action.shape)}")
    program = reader.pruned(action)
    paths = [path for operation in program.operations for path in operation.value.get("paths", ())]
    notes = (f"{', '.join(left)} left out: {name} is the policy",) if left else ()
    return KerasComputation(program, tuple(dict.fromkeys(paths)), notes)


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


@dataclass
class _KerasProgramReader(ProgramRecorder):
    """Computes the result of each layer call."""

    tree: Tree = field(kw_only=True)
    file: str = field(kw_only=True)
    tensors: Mapping[str, Path] = field(kw_only=True)
    calls: int = 0

    def refused(self, name: Name, found: str) -> UnsupportedError:
        """Return the error for a layer."""
        return UnsupportedError(
            "the model has an unsupported layer",
            file=self.file,
            path="/".join(name) or None,
            found=found,
        )

    def observed(self, document: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the shape of the model's one input."""
        layers = _list_layers(document)
        inputs = [layer for layer in layers if layer.get("class_name") == "InputLayer"]
        if len(inputs) > 1:
            names = [str(config_of(layer).name) for layer in inputs]
            raise UnsupportedError(
                "the model has several inputs", file=self.file, found=abbreviate_list(names, 6)
            )
        settings = [config_of(each).settings for each in (*inputs, *layers[:1], document)]
        keys = ("batch_shape", "batch_input_shape", "build_input_shape")
        shapes = [one[key] for one in settings for key in keys if isinstance(one.get(key), list)]
        if not shapes and layers and not inputs:
            return self.observed(layers[0])
        shape = shapes[0][1:] if shapes else ()
        if not shape or not all(isinstance(extent, int) and extent > 0 for extent in shape):
            raise UnsupportedError(
                "the model's input shape is not fixed", file=self.file, found=str(shape or "none")
            )
        return tuple(shape)

    # Models.

    def model(
        self, document: Mapping[str, Any], above: Name, given: list[ProgramValue]
    ) -> dict[str, ProgramValue]:
        """Return the results of a model, by output name."""
        if len(above) > _DEEP:
            raise self.refused(above, "too many nested models")
        config, layers = config_of(dict(document)), _list_layers(document)
        if config.cls == "Sequential":
            if len(given) != 1:
                raise self.refused(above, "a Sequential with several inputs")
            flow = given[0]
            for layer in layers:
                flow = self.called(layer, above, [flow])[0]
            return {str(layers[-1].get("name") or config_of(layers[-1]).name): flow}
        by_name = {str(layer.get("name") or config_of(layer).name): layer for layer in layers}
        starts = [place for _, place in _list_places(config.settings.get("input_layers"))]
        ends = list(_list_places(config.settings.get("output_layers")))
        if len(by_name) != len(layers) or len(starts) != len(given) or not ends:
            raise self.refused(above, "a model whose inputs or outputs are not listed")
        known = {(place[0], 0, 0): flow for place, flow in zip(starts, given, strict=True)}
        for _, place in ends:
            self._until(place, by_name, above, known)
        # A dict of outputs has its own names.
        return {title or place[0]: known[place] for title, place in ends}

    def _until(
        self,
        wanted: _Place,
        layers: Mapping[str, dict[str, Any]],
        above: Name,
        known: dict[_Place, ProgramValue],
    ) -> None:
        """Compute the calls up to one, iteratively, because chains may be long."""
        waiting = [wanted]
        while waiting:
            place = waiting[-1]
            if place in known:
                waiting.pop()
                continue
            self.calls += 1
            layer = layers.get(place[0])
            nodes = layer.get("inbound_nodes") if layer is not None else None
            if layer is None or not isinstance(nodes, list) or self.calls > _CALLS:
                raise self.refused(
                    (*above, place[0]), "a call that is not listed in the configuration, or too many calls"
                )
            if len(waiting) > len(layers) * 8 or not 0 <= place[1] < len(nodes):
                raise self.refused((*above, place[0]), "a cycle of calls")
            taken = _list_operands(nodes[place[1]])
            missing = [each for each in taken if _is_place(each) and each not in known]
            if missing:
                waiting += missing
                continue
            operands = [known[each] if _is_place(each) else each for each in taken]
            for number, flow in enumerate(self.called(layer, above, operands)):
                known[place[0], place[1], number] = flow
            if place not in known:
                raise self.refused((*above, place[0]), "a layer output that does not exist")

    def called(self, layer: dict[str, Any], above: Name, given: list[Any]) -> list[ProgramValue]:
        """Return the results of a layer for values and numbers."""
        inner = config_of(layer)
        name = (*above, str(inner.name or layer.get("name") or "?"))
        cls, settings = str(inner.cls), inner.settings
        if keras_config.has_foreign_class(layer):
            raise self.refused(name, f"{cls}, a class from another package")
        flows = [each for each in given if isinstance(each, ProgramValue)]
        if cls in keras_config.MODELS:
            return list(self.model(layer, name, flows).values())
        if settings.get("quantization_config") is not None or settings.get("data_format") == "channels_first":
            raise self.refused(name, f"an unsupported variant of {cls}")
        if cls in _SKIPPED and len(flows) == 1:
            return flows
        call = _LayerCall(self, name, settings)
        if cls in _OF_MANY:
            return [_OF_MANY[cls](call, given)]
        if cls in _OF_ONE and len(flows) == 1 and len(given) == 1:
            return [_OF_ONE[cls](call, flows[0])]
        raise self.refused(name, "a Lambda, whose code is not executed" if cls == "Lambda" else cls)

    # Operations.

    def affine(self, flow: ProgramValue, scale: Any, shift: Any, paths: Sequence[Path] = ()) -> ProgramValue:
        """Return `flow * scale + shift`."""
        import numpy as np

        wide = [np.atleast_1d(np.asarray(each, np.float64)) for each in (scale, shift)]
        scale, shift = np.broadcast_arrays(*wide)
        return self.add("affine", flow.shape, flow, scale=scale, shift=shift, paths=tuple(paths))

    def activation(self, flow: ProgramValue, name: str, slope: float = 0.01) -> ProgramValue:
        """Return an elementary activation of a value."""
        return self.add("activation", flow.shape, flow, name=name, slope=slope)

    def clip(self, flow: ProgramValue, low: float, high: float) -> ProgramValue:
        """Return a clipped value."""
        import numpy as np

        return self.add("clip", flow.shape, flow, low=np.full(1, low), high=np.full(1, high))

    def both(self, kind: str, one: ProgramValue, two: ProgramValue) -> ProgramValue:
        """Return the sum or the product (`add`, `multiply`) of two values with the same shape."""
        return self.add(kind, one.shape, one, two)

    def pruned(self, action: ProgramValue) -> Program:
        """Return the operations that the action depends on."""
        needed, waiting = set[int](), [action.number]
        while waiting:
            number = waiting.pop()
            if number >= self.first and number not in needed:
                needed.add(number)
                waiting += self.operations[number - self.first].inputs
        places = {number: number for number in range(self.first)}
        operations: list[ProgramOperation] = []
        for number in sorted(needed):
            operation = self.operations[number - self.first]
            places[number] = self.first + len(operations)
            operations.append(operation._replace(inputs=tuple(places[each] for each in operation.inputs)))
        return Program(tuple(self.inputs), {}, tuple(operations), places[action.number], action.shape[0])


class _LayerCall(NamedTuple):
    """A layer call: its reader, its name and its settings."""

    reader: _KerasProgramReader
    name: Name
    settings: Mapping[str, Any]

    def refused(self, found: str) -> UnsupportedError:
        """Return the error for the layer."""
        return self.reader.refused(self.name, found)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> tuple[np.ndarray, Path] | None:
        """Return one of the layer's tensors and its path, None if it is missing."""
        path = self.reader.tensors.get("/".join((*self.name, name)))
        leaf = self.reader.tree.get(path) if path is not None else None
        if path is None or not isinstance(leaf, Leaf):
            return None
        if (shape is not None and leaf.shape != shape) or leaf.dtype not in _KERAS_PROGRAM_FLOATS:
            raise self.refused(f"{name} {leaf.dtype} {list(leaf.shape)}")
        return leaf.array(), path

    def needed(self, name: str, shape: tuple[int, ...] | None = None) -> tuple[np.ndarray, Path]:
        """Return one of the layer's tensors and its path; raise UnsupportedError if it is missing."""
        found = self.tensor(name, shape)
        if found is None:
            raise self.refused(f"missing layer tensor {name}")
        return found

    def number(self, name: str, default: float) -> float:
        """Return a number from the settings."""
        value = self.settings.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.refused(f"{name} {value}")
        return float(value)

    def row(self, name: str, flow: ProgramValue, default: float | None = None) -> np.ndarray | None:
        """Return numbers from the settings, one or one per entry; None if omitted."""
        import numpy as np

        value = self.settings.get(name, default)
        if isinstance(value, dict) and isinstance(value.get("config"), dict):
            value = value["config"].get("value")  # __numpy__ or __tensor__
        if value is None:
            return None
        found = np.asarray(_flatten_numbers(value), np.float64)
        if found.size not in (1, math.prod(flow.shape)) or not np.isfinite(found).all():
            raise self.refused(f"{name} with {found.size} numbers")
        return found

    def last_axis(self, flow: ProgramValue, default: int = -1) -> None:
        """Raise UnsupportedError unless the layer applies to the only axis of a vector."""
        axis = self.settings.get("axis", default)
        if len(flow.shape) != 1 or axis not in (-1, 1, [-1], [1]):
            raise self.refused(f"axis {axis} of {list(flow.shape)}")

    def activated(self, flow: ProgramValue) -> ProgramValue:
        """Return the layer's activation applied to a value."""
        given = self.settings.get("activation", "linear")
        if isinstance(given, dict):
            return self.applied(flow, given)
        name = (
            {"swish": "silu", "hard_swish": "hard_silu"}.get(given, given) if isinstance(given, str) else ""
        )
        return self.function(flow, "linear" if given is None else name)

    def applied(self, flow: ProgramValue, given: dict[str, Any]) -> ProgramValue:
        """Return the result of a serialized activation: a layer without weights, or a function of Keras."""
        inner = config_of(given)
        if inner.cls in _ACTIVATION_LAYERS and not keras_config.has_foreign_class(given):
            return _OF_ONE[inner.cls](_LayerCall(self.reader, self.name, inner.settings), flow)
        # keras/src/saving/serialization_lib.py: a name in `builtins` is first one of keras.activations.
        if given.get("module") == "builtins" and given.get("registered_name") == "function":
            return self.function(flow, str(given.get("config")))
        raise self.refused(f"the activation {format_object(given)}")

    def function(self, flow: ProgramValue, name: str) -> ProgramValue:
        """Return the result of a Keras function, by name."""
        reader = self.reader
        if name in ("linear", "identity"):
            return flow
        if name in _PLAIN:
            return reader.activation(flow, name)
        if name == "leaky_relu":
            return reader.activation(flow, "leaky_relu", 0.2)
        if name in ("selu", "celu"):
            scale, alpha = _SELU if name == "selu" else (1.0, 1.0)
            return self.elu(flow, alpha, scale)
        if name == "relu6":
            return reader.clip(flow, 0, 6)
        if name == "mish":
            inner = reader.activation(reader.activation(flow, "softplus"), "tanh")
            return reader.both("multiply", flow, inner)
        if name == "hard_silu":
            gate = reader.clip(reader.affine(flow, 1 / 6, 0.5), 0, 1)
            return reader.both("multiply", flow, gate)
        raise self.refused(f"the activation {name}" if name else "a custom activation")

    def elu(self, flow: ProgramValue, alpha: float, scale: float = 1.0) -> ProgramValue:
        """Return ELU with a coefficient and a scale."""
        reader = self.reader
        found = reader.activation(flow, "elu")
        if alpha == 1.0 and scale == 1.0:
            return found
        above = reader.affine(reader.activation(flow, "relu"), scale * (1 - alpha), 0)
        return reader.both("add", reader.affine(found, scale * alpha, 0), above)


_KERAS_PROGRAM_FLOATS = ("float32", "float64", "float16", "bfloat16")


def _dense(call: _LayerCall, flow: ProgramValue) -> ProgramValue:
    import numpy as np

    if len(flow.shape) != 1:
        raise call.refused(f"a Dense on {list(flow.shape)}")
    kernel, path = call.needed("kernel")
    turned = False
    if "equation" in call.settings:
        left, _, right = str(call.settings["equation"]).replace(" ", "").partition("->")
        one, _, two = left.partition(",")
        kinds = {f"{one[0]}{one[1:]}{right}": two} if len(one) == len(right) == len(two) == 2 else {}
        turned = bool(kinds) and two == right[1] + one[1]
        straight = bool(kinds) and two == one[1] + right[1]
        if one[:1] != right[:1] or not (turned or straight) or one[1:] == right[1:]:
            raise call.refused(f"the equation {call.settings['equation']}")
    kernel = kernel.T if turned else kernel
    if kernel.ndim != 2 or kernel.shape[0] != flow.shape[0]:
        raise call.refused(f"a kernel {list(kernel.shape)} on {flow.shape[0]} entries")
    added = call.tensor("bias", (kernel.shape[1],))
    if added is None and (call.settings.get("use_bias", "equation" not in call.settings)):
        raise call.refused("the layer's bias is missing")
    bias = None if added is None else added[0].astype(np.float32)
    paths = (path,) if added is None else (path, added[1])
    found = call.reader.add(
        "dense", (kernel.shape[1],), flow, kernel=kernel.astype(np.float32), bias=bias, weights=None,
        paths=paths, source=(path, turned),
    )  # fmt: skip
    return call.activated(found)


def _normalization(call: _LayerCall, flow: ProgramValue) -> ProgramValue:
    import numpy as np

    axis = call.settings.get("axis", -1)
    if len(flow.shape) != 1 or axis not in (-1, 1, [-1], [1], None, []):
        raise call.refused(f"axis {axis} of {list(flow.shape)}")
    mean, variance = call.row("mean", flow), call.row("variance", flow)
    paths: tuple[Path, ...] = ()
    if mean is None or variance is None:
        (mean, one), (variance, two) = call.needed("mean"), call.needed("variance")
        mean, variance, paths = mean.reshape(-1), variance.reshape(-1), (one, two)
    if any(each.size not in (1, flow.shape[0]) for each in (mean, variance)):
        raise call.refused(f"statistics of {mean.size} values")
    # keras/src/layers/preprocessing/normalization.py: epsilon is the minimum of the standard deviation.
    std = np.maximum(np.sqrt(variance.astype(np.float64)), 1e-7)
    if call.settings.get("invert"):
        return call.reader.affine(flow, std, mean, paths)
    return call.reader.affine(call.reader.affine(flow, 1.0, -mean.astype(np.float64)), 1 / std, 0, paths)


def _batch_norm(call: _LayerCall, flow: ProgramValue) -> ProgramValue:
    import numpy as np

    call.last_axis(flow)
    shape = (flow.shape[0],)
    mean, variance = (call.needed(f"moving_{name}", shape) for name in ("mean", "variance"))
    scale, offset = call.tensor("gamma", shape), call.tensor("beta", shape)
    held = [each for each in (mean, variance, scale, offset) if each is not None]
    for name, tensor in (("scale", scale), ("center", offset)):
        if bool(call.settings.get(name, True)) != (tensor is not None):
            raise call.refused(f"{name} without its tensor")
    factor = 1 / np.sqrt(variance[0].astype(np.float64) + call.number("epsilon", 1e-3))
    factor = factor if scale is None else factor * scale[0]
    shift = np.zeros(shape) if offset is None else offset[0]
    centred = call.reader.affine(flow, 1.0, -mean[0].astype(np.float64))
    return call.reader.affine(centred, factor, shift, [path for _, path in held])


def _layer_norm(call: _LayerCall, flow: ProgramValue) -> ProgramValue:
    import numpy as np

    call.last_axis(flow)
    if call.settings.get("rms_scaling"):
        raise call.refused("rms_scaling")
    shape = (flow.shape[0],)
    scale, offset = call.tensor("gamma", shape), call.tensor("beta", shape)
    for name, tensor in (("scale", scale), ("center", offset)):
        if bool(call.settings.get(name, True)) != (tensor is not None):
            raise call.refused(f"{name} without its tensor")
    return call.reader.add(
        "layer_norm", shape, flow,
        scale=np.ones(shape, np.float32) if scale is None else scale[0].astype(np.float32),
        offset=np.zeros(shape, np.float32) if offset is None else offset[0].astype(np.float32),
        epsilon=call.number("epsilon", 1e-3), weights=None, stage=2,
        paths=tuple(each[1] for each in (scale, offset) if each is not None),
    )  # fmt: skip


def _rescaling(call: _LayerCall, flow: ProgramValue) -> ProgramValue:
    scale, offset = call.row("scale", flow, 1.0), call.row("offset", flow, 0.0)
    if len(flow.shape) != 1 or scale is None or offset is None:
        raise call.refused(f"a Rescaling of {list(flow.shape)}")
    return call.reader.affine(flow, scale, offset)


def _relu(call: _LayerCall, flow: ProgramValue) -> ProgramValue:
    slope, most = call.number("negative_slope", 0.0), call.settings.get("max_value")
    if call.number("threshold", 0.0) != 0 or (slope and most is not None):
        raise call.refused("a ReLU with a threshold, or with both a slope and a limit")
    if slope:
        return call.reader.activation(flow, "leaky_relu", slope)
    if most is None:
        return call.reader.activation(flow, "relu")
    return call.reader.clip(flow, 0, call.number("max_value", 0.0))


def _leaky_relu(call: _LayerCall, flow: ProgramValue) -> ProgramValue:
    slope = call.number("negative_slope", call.number("alpha", 0.3))
    return call.reader.activation(flow, "leaky_relu", slope)


def _prelu(call: _LayerCall, flow: ProgramValue) -> ProgramValue:
    alpha, path = call.needed("alpha", flow.shape)
    if len(flow.shape) != 1:
        raise call.refused(f"a PReLU of {list(flow.shape)}")
    reader = call.reader
    below = reader.activation(reader.affine(flow, -1.0, 0), "relu")
    return reader.both("add", reader.activation(flow, "relu"), reader.affine(below, -alpha, 0, (path,)))


def _flat_shape(call: _LayerCall, flow: ProgramValue) -> ProgramValue:
    if len(flow.shape) == 1:
        return flow
    return call.reader.add("flatten", (math.prod(flow.shape),), flow, image=flow.shape)


def _add_reshape(call: _LayerCall, flow: ProgramValue) -> ProgramValue:
    shape = call.settings.get("target_shape")
    size = math.prod(flow.shape)
    if shape not in ([size], [-1], list(flow.shape)):
        raise call.refused(f"a Reshape to {shape}")
    return flow if shape == list(flow.shape) else _flat_shape(call, flow)


def _clip(call: _LayerCall, flow: ProgramValue) -> ProgramValue:
    return call.reader.clip(flow, call.number("x_min", -_MOST), call.number("x_max", _MOST))


def _activation_layer(name: str) -> Callable[[_LayerCall, ProgramValue], ProgramValue]:
    return lambda call, flow: call.function(flow, name)


_SKIPPED = frozenset(
    (
        "Identity",
        "InputLayer",
        "Dropout",
        "GaussianNoise",
        "GaussianDropout",
        "AlphaDropout",
        "ActivityRegularization",
    )
)
_OF_ONE: Mapping[str, Callable[[_LayerCall, ProgramValue], ProgramValue]] = {
    "Dense": _dense,
    "EinsumDense": _dense,
    "Activation": lambda call, flow: call.activated(flow),
    "Normalization": _normalization,
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "Rescaling": _rescaling,
    "ReLU": _relu,
    "LeakyReLU": _leaky_relu,
    "PReLU": _prelu,
    "ELU": lambda call, flow: call.elu(flow, call.number("alpha", 1.0)),
    "Flatten": _flat_shape,
    "Reshape": _add_reshape,
    # keras/src/ops: functions applied to a model's values.
    "Relu": _activation_layer("relu"),
    "Tanh": _activation_layer("tanh"),
    "Sigmoid": _activation_layer("sigmoid"),
    "Softplus": _activation_layer("softplus"),
    "Silu": _activation_layer("silu"),
    "Negative": lambda call, flow: call.reader.affine(flow, -1.0, 0),
    "Clip": _clip,
}


# Layers without weights that are the value of a setting `activation`.
_ACTIVATION_LAYERS = frozenset(("ReLU", "LeakyReLU", "ELU"))


def _arithmetic(op: str) -> Callable[[_LayerCall, list[Any]], ProgramValue]:
    """Return the result of a layer or an operator for values and numbers, e.g. a sum or a product."""

    def made(call: _LayerCall, given: list[Any]) -> ProgramValue:
        if not given or (op in ("Subtract", "TrueDivide", "Divide") and len(given) != 2):
            raise call.refused(f"{op} of {len(given)} inputs")
        total: Any = given[0]
        for each in given[1:]:
            total = _combine_values(call, op, total, each)
        if not isinstance(total, ProgramValue):
            raise call.refused(op)
        return call.reader.affine(total, 1 / len(given), 0) if op == "Average" else total

    return made


def _combine_values(call: _LayerCall, op: str, one: Any, two: Any) -> ProgramValue:
    """Return the result of an operator on two values, or on one value and numbers."""
    import numpy as np

    reader = call.reader
    if isinstance(one, ProgramValue) and isinstance(two, ProgramValue):
        if one.shape != two.shape or op in ("TrueDivide", "Divide"):
            raise call.refused(f"{op} of shapes {list(one.shape)} and {list(two.shape)}")
        other = reader.affine(two, -1.0, 0) if op == "Subtract" else two
        return reader.both("multiply" if op == "Multiply" else "add", one, other)
    turned = isinstance(two, ProgramValue)
    flow, row = (two, one) if turned else (one, two)
    row = np.asarray(_flatten_numbers(row), np.float64)
    if not isinstance(flow, ProgramValue) or len(flow.shape) != 1 or row.size not in (1, flow.shape[0]):
        raise call.refused(f"{op} with {row.size} numbers")
    if op in ("TrueDivide", "Divide"):
        if turned or not row.all():
            raise call.refused("a division by a computed value or by 0")
        return reader.affine(flow, 1 / row, 0)
    if op == "Subtract":
        return reader.affine(flow, -1.0, row) if turned else reader.affine(flow, 1.0, -row)
    return reader.affine(flow, row, 0) if op == "Multiply" else reader.affine(flow, 1.0, row)


def _concatenate(call: _LayerCall, given: list[Any]) -> ProgramValue:
    flows = [each for each in given if isinstance(each, ProgramValue)]
    if len(flows) != len(given) or any(len(flow.shape) != 1 for flow in flows):
        raise call.refused("a Concatenate of values other than vectors")
    if call.settings.get("axis", -1) not in (-1, 1):
        raise call.refused(f"axis {call.settings.get('axis')}")
    if len(flows) == 1:
        return flows[0]
    return call.reader.add("concat", (sum(flow.shape[0] for flow in flows),), *flows)


_OF_MANY: Mapping[str, Callable[[_LayerCall, list[Any]], ProgramValue]] = {
    **{
        name: _arithmetic(name) for name in ("Add", "Subtract", "Multiply", "Average", "TrueDivide", "Divide")
    },
    "Concatenate": _concatenate,
}

# A layer call: the layer's name, the index of the call, the index of the output.
_Place = tuple[str, int, int]


def _is_place(value: Any) -> bool:
    return isinstance(value, tuple)


def _list_layers(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    layers = config_of(dict(document)).settings.get("layers")
    return [each for each in layers if isinstance(each, dict)] if isinstance(layers, list) else []


def _list_places(value: Any) -> Iterator[tuple[str, _Place]]:
    """Yield a model's inputs or outputs: one place, or a list or dict of places, with the dict's keys."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ((str(key), place) for _, place in _list_places(inner))
    elif isinstance(value, list) and value:
        if isinstance(value[0], str) and len(value) > 2 and all(isinstance(n, int) for n in value[1:3]):
            yield "", (value[0], value[1], value[2])
        else:
            for inner in value:
                yield from _list_places(inner)


def _list_operands(node: Any) -> list[Any]:
    """Return the operands of a call: places and numbers, in order, without Keras's own settings."""
    if isinstance(node, dict) and "args" in node:
        found = [each for given in node["args"] for each in _operand(given)]
        kwargs = node.get("kwargs") or {}
        keep = [name for name, value in kwargs.items() if name not in _FLAGS and value is not None]
        return [*found, *(each for name in keep for each in _operand(kwargs[name]))]
    found = []
    for each in node if isinstance(node, list) else [node]:
        found += list(_operand(each))
        more = each[3] if isinstance(each, list) and len(each) > 3 and isinstance(each[3], dict) else {}
        keep = [name for name, value in more.items() if name not in _FLAGS and value is not None]
        found += [inner for name in keep for inner in _operand(more[name])]
    return found


_FLAGS = frozenset(("training", "mask", "name"))


def _operand(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        config = value.get("config")
        history = config.get("keras_history") if isinstance(config, dict) else None
        if isinstance(history, list) and len(history) == 3:
            yield (str(history[0]), int(history[1]), int(history[2]))
        elif value.get("class_name") in ("__numpy__", "__tensor__") and isinstance(config, dict):
            yield config.get("value")
        else:
            yield None
    elif isinstance(value, list) and len(value) >= 3 and isinstance(value[0], str):
        yield (value[0], value[1], value[2]) if all(isinstance(n, int) for n in value[1:3]) else None
    elif isinstance(value, list) and any(isinstance(each, list | dict) for each in value):
        for each in value:
            yield from _operand(each)
    else:
        yield value


def _flatten_numbers(value: Any) -> list[float]:
    """Return numbers as one row; an empty one for anything else."""
    found: list[float] = []
    waiting = [value]
    while waiting and len(found) <= _NUMBERS:
        each = waiting.pop()
        if isinstance(each, list | tuple):
            waiting += reversed(each)
        elif isinstance(each, int | float) and not isinstance(each, bool):
            found.append(float(each))
        else:
            return []
    return found
