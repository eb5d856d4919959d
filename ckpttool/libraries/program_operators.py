"""Operators of graphs as steps of programs, and the patterns of small operators that stand for layers.

Sources: onnx/docs/Operators.md; the patterns that exporters write for layer norms, GELU, ELU and softplus
(torch/onnx/symbolic_opset9.py, keras/src/backend/tensorflow, tensorflow/python/ops/nn_impl.py). A rule
returns None for inputs or attributes that are not supported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.kinds import ACTIVATION_KINDS, ACTIVATIONS, gate_order
from ckpttool.core.source import Shape
from ckpttool.core.tree import Path
from ckpttool.graphs.graph import FUNCTION, Constant, Graph, OperatorNode
from ckpttool.graphs.operators import Kind, Operator, compute_node, find_operator, is_known
from ckpttool.libraries.model_steps import LayerTensors
from ckpttool.libraries.schema import ProgramOperation
from ckpttool.mapping.rules import KEEP, TRANSPOSE

if TYPE_CHECKING:
    import numpy as np

# The number of observations while a graph is lowered: a prime, which is no other extent.
BATCH = (1 << 31) - 1
_MOST = 3.4028234663852886e38
# Element types of constants, and of values that may be computed in float32 instead.
_TYPES = frozenset(("float32", "float64", "float16", "bfloat16", "int64", "int32", "bool", "uint8", "int8"))
_FLOATS, _HALVES, _INTEGERS = ("float32", "float64"), ("float16", "bfloat16"), ("int32", "int64")
# onnxruntime multiplies such weights with observations that it quantizes, too: errors of 1e-3 and more.
_QUANTIZED = frozenset(("DequantizeLinear", "QuantizeLinear", "DynamicQuantizeLinear"))
# Operators on shapes that contain the number of observations: those that move extents, and arithmetic.
_MOVES = frozenset(("Cast", "Concat", "Gather", "Reshape", "Shape", "Size", "Slice", "Squeeze", "Unsqueeze"))
_COUNTS = frozenset(("Add", "Sub", "Mul", "Div", "ReduceProd"))
# Operations that only stand for a part of a supported result.
PARTIAL = frozenset(("arg_max", "cell", "function", "softmax"))


class UnsupportedNodeError(Exception):
    """A node is not a step of a program; `reason` is its operator, or what else is not supported."""

    def __init__(self, node: OperatorNode, reason: str = "") -> None:
        super().__init__(node.op)
        self.node, self.reason = node, reason or node.op.rpartition(".")[2]


class ProgramConstant(NamedTuple):
    """A value that does not depend on the observation; `paths` are those of its tensors.

    `path` is that of the tensor itself, None for a computed one; `turned` is whether its two axes are
    exchanged. `counts` is whether the number of observations is among the values.
    """

    array: np.ndarray
    paths: tuple[Path, ...] = ()
    path: Path | None = None
    turned: bool = False
    counts: bool = False

    @property
    def shape(self) -> Shape:
        """The shape of the array."""
        return self.array.shape

    @property
    def number(self) -> float:
        """The only entry, NaN if there are several."""
        return float(self.array.reshape(())) if self.array.size == 1 else math.nan


class ProgramValue(NamedTuple):
    """A value that depends on the observation: its number in the program, and its shape without the batch.

    `ones` are the positions of axes of extent 1 that the graph inserted.
    """

    number: int
    shape: Shape
    ones: tuple[int, ...] = ()

    @property
    def extents(self) -> list[int]:
        """The shape in the graph, with the batch and the axes that it inserted."""
        rest = iter((BATCH, *self.shape))
        rank = 1 + len(self.shape) + len(self.ones)
        return [1 if axis in self.ones else next(rest) for axis in range(rank)]

    @property
    def has_features(self) -> bool:
        """Whether the last axis belongs to the observation."""
        return bool(self.shape) and len(self.shape) + len(self.ones) not in self.ones

    def is_last(self, axis: int) -> bool:
        """Return whether an axis is the last one, and belongs to the observation."""
        return self.has_features and axis in (-1, len(self.shape) + len(self.ones))

    def is_vector(self) -> bool:
        """Return whether the observation's part is one row of numbers, along the last axis."""
        return len(self.shape) == 1 and self.has_features


class PartialLayer(NamedTuple):
    """A sum of products that is part of a layer norm or GELU of the value `of`.

    `terms` are the coefficients of products of x (the value), m (its mean), f (the reciprocal of its
    deviation) and e (erf(x / sqrt(2))), and of 1; or of one of sq, v, w, s: the squared difference from the
    mean, its mean, that with epsilon, and the root of that. `node` is the first one that computes a part.
    """

    node: OperatorNode
    of: ProgramValue
    terms: Mapping[str, ProgramConstant]
    epsilon: float = 0.0


class GroupedValues(NamedTuple):
    """A vector as rows and columns, which a mean or expected value of each action needs."""

    node: OperatorNode
    of: ProgramValue
    sizes: tuple[int, int]
    stage: str = "grouped"
    support: ProgramConstant | None = None
    limit: float = 0.0


class Comparison(NamedTuple):
    """Whether a value is greater than a number, for functions in two parts."""

    node: OperatorNode
    of: ProgramValue
    threshold: float


_Fragment = PartialLayer | GroupedValues | Comparison
Operand = ProgramConstant | ProgramValue | PartialLayer | GroupedValues | Comparison


@dataclass
class ProgramBuilder:
    """A program under construction: its inputs, states and operations, and the graph's values by name.

    `batch` is the number of observations if the graph fixes it. With `half`, values may be computed in
    float32 instead of a type of 16 bits.
    """

    graph: Graph
    inputs: list[tuple[str, Shape]] = field(default_factory=list)
    states: dict[str, int] = field(default_factory=dict)
    operations: list[ProgramOperation] = field(default_factory=list)
    values: dict[str, Operand] = field(default_factory=dict)
    failed: dict[str, UnsupportedNodeError] = field(default_factory=dict)
    constants: Mapping[str, Constant] = field(init=False)
    batch: int = 1
    half: bool = False

    def __post_init__(self) -> None:
        """Start with the graph's constants."""
        self.constants = self.graph.constants

    @property
    def first(self) -> int:
        """The number of the first operation's value."""
        return len(self.inputs) + len(self.states)

    def operation(self, number: int) -> ProgramOperation | None:
        """Return the operation that computes a value, None for an input."""
        return self.operations[number - self.first] if number >= self.first else None

    def operand(self, name: str, node: OperatorNode) -> Operand:
        """Return a value by name; constants are read when they are first used."""
        if name in self.failed:
            raise self.failed[name]
        if name not in self.values:
            constant = self.constants.get(name)
            if constant is None:
                raise UnsupportedNodeError(node)
            dtype = getattr(constant.leaf, "dtype", "string")
            if dtype not in _TYPES:
                raise UnsupportedNodeError(node, f"{dtype} arithmetic")
            path = constant.path
            direct = path if constant.rule in (KEEP, TRANSPOSE) else None
            turned = direct is not None and constant.rule == TRANSPOSE
            paths = () if path is None else (path,)
            array = constant.read(name)
            if self.half and dtype in _HALVES:
                array = array.astype("float32")
            self.values[name] = ProgramConstant(array, paths, direct, turned)
        return self.values[name]

    def lower(self, node: OperatorNode) -> None:
        """Add the values of a node; raise UnsupportedNodeError if it is not a step of programs."""
        import numpy as np

        operands = [self.operand(name, node) if name else None for name in node.inputs]
        present = [one for one in operands if one is not None]
        try:
            with np.errstate(all="ignore"):
                if node.op == "If":
                    results: Any = self._branch(node, operands[0])
                elif present and all(isinstance(one, ProgramConstant) for one in present):
                    results = self._folded(node, operands)  # type: ignore[arg-type]
                elif not is_known(node.op):
                    results = self._opaque(node, *operands)
                else:
                    results = self._step(node, operands)
        except (ValueError, IndexError, TypeError, ArithmeticError, AttributeError, CkpttoolError) as error:
            raise UnsupportedNodeError(node) from error
        if results is None:
            parts = [one for one in present if isinstance(one, _Fragment)]
            raise UnsupportedNodeError(parts[0].node if parts else node)
        listed = results if isinstance(results, list) else [results]
        for name, value in zip(node.outputs, listed, strict=False):
            if name and value is not None:
                self.values[name] = value

    def _branch(self, node: OperatorNode, condition: Any) -> Any:
        """Return the results of the branch that a constant condition chooses."""
        if not isinstance(condition, ProgramConstant) or condition.counts:
            return None
        branch: Graph = node.attributes["then_branch" if condition.number else "else_branch"]
        self.constants = {**self.constants, **branch.constants}
        for inner in branch.nodes:
            self.lower(inner)
        return [self.operand(output.name, node) for output in branch.outputs]

    def _opaque(self, node: OperatorNode, flow: Any, *more: Any) -> Any:
        """Return the result of a function that the file only names, or of a softmax without an axis."""
        if more or not isinstance(flow, ProgramValue):
            return None
        if node.op in ("torch.Softmax", "torch.LogSoftmax") and "dim" not in node.attributes:
            return _softmax(self, node, flow)
        named = FUNCTION in node.attributes
        return self.add("function", flow.shape, flow, node=node) if named else None

    def _step(self, node: OperatorNode, operands: list[Any]) -> Any:
        rule, row = _PATTERNS.get(node.op), find_operator(node.op)
        if rule is None and node.op not in _RULES and row.expand is not None:
            return self._expanded(node, row)
        if rule is not None and any(map(is_fragment, operands)):
            result = rule(self, node, *operands)
            if result is not None:
                return result
        for index, name in enumerate(node.inputs):
            if is_fragment(operands[index]):
                self.values[name] = operands[index] = self.whole_layer(operands[index])
        # The number of observations is only used in shapes.
        if node.op not in ("Reshape", "Expand") and any(getattr(one, "counts", False) for one in operands):
            return None
        rule = _RULES.get(node.op) or _BY_KIND.get(row.kind)
        result = None if rule is None else rule(self, node, *operands)
        return self._expanded(node, row) if result is None and row.expand is not None else result

    def _expanded(self, node: OperatorNode, row: Operator) -> Operand | None:
        """Return the value of a node as that of other operators; None if one of them is not a step."""
        import numpy as np

        names = (f"{node.outputs[0]}/{number}" for number in count())

        def add(op: str, *inputs: str, **attributes: Any) -> str:
            part = replace(node, op=op, inputs=inputs, outputs=(next(names),), attributes=attributes)
            self.lower(part)
            return part.outputs[0]

        def number(value: float) -> str:
            self.values[name := next(names)] = ProgramConstant(np.asarray(value, np.float64))
            return name

        with suppress(UnsupportedNodeError):
            return self.values[row.expanded(node, add, number)]
        return None

    def _folded(self, node: OperatorNode, operands: list[ProgramConstant | None]) -> Any:
        """Return the results of an operator on constants; a transposed tensor keeps its path."""
        first, counts = operands[0], any(one is not None and one.counts for one in operands)
        if node.op == "Identity" or (node.op == "Cast" and self.half and node.attributes["to"] in _HALVES):
            return first
        if node.op in _QUANTIZED or (counts and node.op not in _MOVES | _COUNTS):
            return None
        outputs = compute_node(node, [None if one is None else one.array for one in operands])
        if any(array.dtype.name not in _TYPES for array in outputs):
            return None
        paths = tuple(dict.fromkeys(path for one in operands if one is not None for path in one.paths))
        if node.op == "Transpose" and first is not None and first.array.ndim == 2:
            turned = outputs[0].shape != first.array.shape or tuple(node.attributes.get("perm", (1, 0))) == (
                1,
                0,
            )
            return ProgramConstant(outputs[0], paths, first.path, first.turned != turned)
        counts = counts and (node.op in _COUNTS or any((array == BATCH).any() for array in outputs))
        return [ProgramConstant(array, paths, counts=counts) for array in outputs]

    # Steps.

    def add(self, kind: str, shape: Shape, *flows: ProgramValue, **value: Any) -> ProgramValue:
        """Add an operation and return its value, with the axes of its first operand."""
        self.operations.append(ProgramOperation(kind, tuple(flow.number for flow in flows), value))
        return ProgramValue(self.first + len(self.operations) - 1, shape, flows[0].ones)

    def affine(self, flow: ProgramValue, scale: Any, shift: Any, paths: Iterable[Path] = ()) -> ProgramValue:
        """Add `flow * scale + shift`, with one number or one for each entry of the last axis."""
        import numpy as np

        wide = [np.asarray(one, np.float64).reshape(-1) for one in (scale, shift)]
        rows = np.broadcast_arrays(*wide)
        return self.add("affine", flow.shape, flow, scale=rows[0], shift=rows[1], paths=tuple(paths))

    def activation(self, flow: ProgramValue, name: str, slope: float = 0.01) -> ProgramValue:
        """Add an elementary activation."""
        return self.add("activation", flow.shape, flow, name=name, slope=slope)

    def clip(self, flow: ProgramValue, low: Any, high: Any) -> ProgramValue:
        """Add limits, with one number or one for each entry of the last axis."""
        import numpy as np

        rows = (np.clip(np.atleast_1d(np.asarray(one, np.float64)), -_MOST, _MOST) for one in (low, high))
        low, high = np.broadcast_arrays(*rows)
        return self.add("clip", flow.shape, flow, low=low, high=high)

    def merge(self, kind: str, one: ProgramValue, two: ProgramValue) -> ProgramValue | None:
        """Add the sum or product (`add`, `multiply`) of two values, None if their shapes differ."""
        same = one.shape == two.shape and one.ones == two.ones
        return self.add(kind, one.shape, one, two) if same else None

    def elu(self, flow: ProgramValue, alpha: float, scale: float = 1.0) -> ProgramValue | None:
        """Add ELU with a coefficient and a scale."""
        below = self.activation(flow, "elu")
        if alpha == scale == 1.0:
            return below
        above = self.affine(self.activation(flow, "relu"), scale * (1 - alpha), 0)
        return self.merge("add", self.affine(below, scale * alpha, 0), above)

    def dense(
        self, flow: ProgramValue, kernel: ProgramConstant, bias: ProgramConstant | None = None
    ) -> ProgramValue | None:
        """Add a dense layer, None if the shapes do not fit."""
        import numpy as np

        array = kernel.array
        if not flow.is_vector() or array.ndim != 2 or array.shape[0] != flow.shape[0]:
            return None
        width, row = array.shape[1], None
        if bias is not None:
            if (
                bias.array.ndim > 2
                or bias.array.size not in (1, width)
                or bias.array.ndim == 2 < bias.array.shape[0]
            ):
                return None
            row = np.broadcast_to(bias.array.reshape(-1), (width,)).astype(np.float32)
        whole = bias is None or (bias.path is not None and bias.array.shape == (width,))
        weights = None
        if kernel.path is not None and whole:
            owner = "torch" if kernel.turned else "tensorflow"
            weights = LayerTensors(kernel.path, None if bias is None else bias.path, None, owner)
        return self.add(
            "dense",
            (width,),
            flow,
            kernel=array.astype(np.float32),
            bias=row,
            weights=weights,
            paths=(*kernel.paths, *(() if bias is None else bias.paths)),
            stored=kernel,
        )

    def layer_norm(
        self, flow: ProgramValue, scale: ProgramConstant, offset: ProgramConstant | None, epsilon: float
    ) -> ProgramValue | None:
        """Add a layer norm over the last axis, None if the shapes do not fit."""
        import numpy as np

        rows = [one for one in (scale, offset) if one is not None]
        if not flow.is_vector() or any(one.array.size not in (1, flow.shape[0]) for one in rows):
            return None
        whole = len(rows) == 2 and all(one.path is not None and one.array.shape == flow.shape for one in rows)
        arrays = [np.broadcast_to(one.array.reshape(-1), flow.shape).astype(np.float32) for one in rows]
        return self.add(
            "layer_norm",
            flow.shape,
            flow,
            scale=arrays[0],
            offset=arrays[1] if offset is not None else np.zeros(flow.shape, np.float32),
            epsilon=epsilon,
            weights=LayerTensors(scale.path, rows[1].path, epsilon) if whole and scale.path else None,
            paths=tuple(path for one in rows for path in one.paths),
        )

    def multiples(self, flow: ProgramValue) -> Iterator[tuple[int, float]]:
        """Yield the numbers of the values that this is a multiple of, itself first, with the factors."""
        number, factor = flow.number, 1.0
        yield number, factor
        while (operation := self.operation(number)) is not None and operation.kind == "affine":
            scale, shift = operation.value["scale"], operation.value["shift"]
            if (scale != scale[0]).any() or shift.any():
                return
            number, factor = operation.inputs[0], factor * float(scale[0])
            yield number, factor

    def whole_layer(self, value: Any) -> ProgramValue:
        """Return the layer that a pattern stands for; raise UnsupportedNodeError for a part of one."""
        layer = None
        if isinstance(value, PartialLayer):
            terms = value.terms
            if _is_norm(terms):
                layer = self.layer_norm(value.of, terms["xf"], terms.get("1"), value.epsilon)
            elif _is_gelu(terms):
                negative = terms["x"].number < 0
                layer = self.activation(self.affine(value.of, -1.0, 0) if negative else value.of, "gelu")
            elif "m" in terms and terms.keys() <= {"x", "m"}:
                layer = self.dense(value.of, _centring(value.of.shape[0], **terms))
        if layer is None:
            raise UnsupportedNodeError(value.node)
        return layer


def is_fragment(value: Any) -> bool:
    """Return whether a value is only a part of a layer."""
    return isinstance(value, _Fragment)


_Rule = Callable[..., Any]


# Products of symbols; any symbol times 1 is itself.
_PRODUCTS = {("x", "f"): "xf", ("m", "f"): "mf", ("x", "e"): "xe"}


def _constant(value: float) -> ProgramConstant:
    import numpy as np

    return ProgramConstant(np.full(1, value))


def _centring(width: int, m: ProgramConstant, x: ProgramConstant | None = None) -> ProgramConstant:
    """Return the matrix [n, n or 1] that multiplies a row's mean by `m`, and adds the row times `x`.

    Both factors are numbers, or rows [n].
    """
    import numpy as np

    mean = np.ones((width, 1)) @ m.array.reshape(1, -1).astype("float64") / width
    return ProgramConstant(mean if x is None else mean + np.eye(width) * x.array.reshape(1, -1))


def _is_norm(terms: Mapping[str, ProgramConstant]) -> bool:
    """Return whether the terms are (x - m) * f, times one row, plus another."""
    import numpy as np

    if not {"xf", "mf"} <= terms.keys() <= {"xf", "mf", "1"}:
        return False
    scale, mean = terms["xf"].array.reshape(-1), terms["mf"].array.reshape(-1)
    return bool(np.array_equal(scale, -mean))


def _is_gelu(terms: Mapping[str, ProgramConstant]) -> bool:
    """Return whether the terms are x * (1 + e) / 2, for x or for -x."""
    halves = terms.keys() == {"x", "xe"} and (abs(terms["x"].number), terms["xe"].number)
    return halves == (0.5, 0.5)


def _is_whole(terms: Mapping[str, ProgramConstant], op: str) -> bool:
    """Return whether an operation follows a layer: GELU, or a norm that is scaled and shifted."""
    late = "1" in terms or (op in ("Mul", "Div") and _is_norm(terms) and terms["xf"].number != 1)
    return _is_gelu(terms) or (_is_norm(terms) and late)


def _scaled(coefficient: ProgramConstant, factor: ProgramConstant) -> ProgramConstant:
    """Return a product; that with 1 is the other factor, a stored tensor."""
    if coefficient.number == 1:
        return factor
    if factor.number == 1:
        return coefficient
    array = coefficient.array.astype("float64") * factor.array
    return ProgramConstant(array, (*coefficient.paths, *factor.paths))


def _as_terms(b: ProgramBuilder, value: Any, of: ProgramValue) -> Mapping[str, ProgramConstant] | None:
    """Return an operand as terms of patterns of the value `of`, None if it is not one."""
    if isinstance(value, PartialLayer):
        return value.terms if value.of == of else None
    if isinstance(value, ProgramConstant):
        row = value.array.size == 1 or (value.array.size == of.shape[-1] == value.array.shape[-1])
        return {"1": value} if row and not value.counts else None
    multiples = b.multiples(value) if isinstance(value, ProgramValue) and value.ones == of.ones else ()
    return next(({"x": _constant(factor)} for number, factor in multiples if number == of.number), None)


def _combine(b: ProgramBuilder, node: OperatorNode, one: Any, two: Any) -> Any:
    """Return the sum, difference, product or quotient of terms, None if it is part of no pattern."""
    if isinstance(one, GroupedValues) or isinstance(two, GroupedValues):
        return _weigh(node, one, two)
    part = one if isinstance(one, PartialLayer) else two
    if not isinstance(part, PartialLayer):
        return None
    left, right = _as_terms(b, one, part.of), _as_terms(b, two, part.of)
    if left is None or right is None:
        return None
    epsilon = max(term.epsilon for term in (one, two) if isinstance(term, PartialLayer))
    terms = None if _is_whole(part.terms, node.op) else _TERMS[node.op](left, right)
    if terms is None:
        return None
    if terms.keys() == {"v", "1"}:
        epsilon, terms = terms["1"].number, {"w": terms["v"]}
        if not epsilon > 0 or terms["w"].number != 1:
            return None
    return PartialLayer(part.node, part.of, terms, epsilon)


_Terms = Mapping[str, ProgramConstant]


def _add_terms(left: _Terms, right: _Terms) -> _Terms | None:
    if left.keys() & right.keys():
        return None
    return {**left, **right}


def _subtract_terms(left: _Terms, right: _Terms) -> _Terms | None:
    return _add_terms(left, {name: _scaled(one, _constant(-1)) for name, one in right.items()})


def _multiply_terms(left: _Terms, right: _Terms) -> _Terms | None:
    if _is_centred(left) and _is_centred(right):
        return {"sq": _constant(1)}
    terms: dict[str, ProgramConstant] = {}
    for a, one in left.items():
        for b, two in right.items():
            name = a if b == "1" else b if a == "1" else _PRODUCTS.get((a, b)) or _PRODUCTS.get((b, a))
            if name is None or name in terms:
                return None
            terms[name] = _scaled(one, two)
    return terms


def _divide_terms(left: _Terms, right: _Terms) -> _Terms | None:
    if right.keys() == {"s"} and right["s"].number == 1:
        return _multiply_terms(left, {"f": _constant(1)})
    if right.keys() != {"1"} or not right["1"].array.all():
        return None
    return _multiply_terms(left, {"1": ProgramConstant(1 / right["1"].array.astype("float64"))})


def _power_terms(left: _Terms, right: _Terms) -> _Terms | None:
    squared = _is_centred(left) and right.keys() == {"1"} and right["1"].number == 2
    return {"sq": _constant(1)} if squared else None


def _is_centred(terms: _Terms) -> bool:
    return terms.keys() == {"x", "m"} and terms["x"].number == 1 and terms["m"].number == -1


_TERMS = {
    "Add": _add_terms,
    "Sub": _subtract_terms,
    "Mul": _multiply_terms,
    "Div": _divide_terms,
    "Pow": _power_terms,
}


def _replaced(before: str, after: str) -> _Rule:
    """Return the rule of a function of one term."""

    def rule(_b: ProgramBuilder, _node: OperatorNode, part: Any, *_axes: Any) -> Any:
        fits = (
            isinstance(part, PartialLayer)
            and part.terms.keys() == {before}
            and part.terms[before].number == 1
        )
        return part._replace(terms={after: part.terms[before]}) if fits else None

    return rule


def _mean_of_part(b: ProgramBuilder, node: OperatorNode, part: Any, axes: Any = None) -> Any:
    positions = _axes(node, axes)
    if isinstance(part, GroupedValues):
        ends = {-1: True, 2: True, -2: False, 1: False}
        last = ends.get(positions[0]) if len(positions) == 1 else None
        if last is None or node.attributes.get("keepdims", 1) or part.stage != "grouped":
            return None
        rows, columns = part.sizes
        number, width = (columns, rows) if last else (rows, columns)
        return b.add("quantile_mean", (width,), part.of, quantiles=number, last=last)
    whole = isinstance(part, PartialLayer) and len(positions) == 1 and part.of.is_last(positions[0])
    return _replaced("sq", "v")(b, node, part) if whole and node.attributes.get("keepdims", 1) else None


def _weigh(node: OperatorNode, one: Any, two: Any) -> Any:
    """Return the probabilities of each action's atoms, weighted with their values."""
    group, support = (one, two) if isinstance(one, GroupedValues) else (two, one)
    fits = node.op == "Mul" and isinstance(support, ProgramConstant) and group.stage == "probabilities"
    if not fits or support.counts or not support.array.size == support.array.shape[-1] == group.sizes[-1]:
        return None
    return group._replace(stage="weighted", support=support)


def _probabilities(_b: ProgramBuilder, node: OperatorNode, group: Any) -> Any:
    fits = isinstance(group, GroupedValues) and group.stage == "grouped"
    return (
        group._replace(stage="probabilities") if fits and node.attributes.get("axis", -1) in (-1, 2) else None
    )


def _limit_probabilities(_b: ProgramBuilder, _node: OperatorNode, one: Any, two: Any) -> Any:
    group, limit = (one, two) if isinstance(one, GroupedValues) else (two, one)
    fits = isinstance(group, GroupedValues) and group.stage == "probabilities" and not group.limit
    positive = isinstance(limit, ProgramConstant) and limit.number > 0
    return group._replace(limit=limit.number) if fits and positive else None


def _expected_value(b: ProgramBuilder, node: OperatorNode, group: Any, axes: Any = None) -> Any:
    fits = (
        isinstance(group, GroupedValues) and group.stage == "weighted" and _axes(node, axes) in ((-1,), (2,))
    )
    if not fits or node.attributes.get("keepdims", 1):
        return None
    support = group.support.array.reshape(-1).astype("float32")
    return b.add(
        "atom_mean", group.sizes[:1], group.of, support=support, limit=group.limit, paths=group.support.paths
    )


def _choose(b: ProgramBuilder, _node: OperatorNode, condition: Any, above: Any, below: Any) -> Any:
    """Return ELU with a coefficient, or softplus: functions that are computed apart for large inputs."""
    flows = isinstance(above, ProgramValue) and isinstance(below, ProgramValue)
    if (
        not isinstance(condition, Comparison)
        or not flows
        or not condition.of.ones == above.ones == below.ones
    ):
        return None
    of = condition.of
    for number, alpha in b.multiples(below):
        function = b.operation(number)
        if function is None or function.kind != "activation" or function.inputs != (of.number,):
            continue
        name = function.value["name"]
        if name == "softplus" and above.number == of.number and condition.threshold >= 20 and alpha == 1:
            return below
        if name == "elu" and above.number == number and condition.threshold == 0:
            return b.elu(of, alpha)
    return None


# Rules for inputs of which some may be parts of layers.
_PATTERNS: Mapping[str, _Rule] = {
    **dict.fromkeys(_TERMS, _combine),
    "ReduceMean": _mean_of_part,
    "ReduceSum": _expected_value,
    "Softmax": _probabilities,
    "Max": _limit_probabilities,
    "Sqrt": _replaced("w", "s"),
    "Reciprocal": _replaced("s", "f"),
    "Where": _choose,
    "Identity": lambda _b, _node, part: part,
    "Cast": lambda _b, node, part: part if node.attributes.get("to") in _FLOATS else None,
}


def _axes(node: OperatorNode, operand: Any) -> tuple[int, ...]:
    """Return the axes of a node, () if it does not state them."""
    if isinstance(operand, ProgramConstant):
        return tuple(int(axis) for axis in operand.array.reshape(-1))
    return tuple(node.attributes.get("axes", ()))


def _broadcast_row(constant: ProgramConstant, flow: ProgramValue) -> Any:
    """Return a constant that is combined with each entry of a value, [n] or [1]; None for other shapes."""
    array = constant.array
    if array.dtype.kind not in "fiub" or array.ndim > len(flow.extents):
        return None
    if array.size == 1:
        return array.reshape(1)
    fits = flow.has_features and array.size == array.shape[-1] == flow.shape[-1]
    return array.reshape(-1) if fits else None


def _same(b: ProgramBuilder, node: OperatorNode, flow: Any, *more: Any) -> Any:
    if node.op == "Cast":
        operation = b.operation(flow.number)
        # The number of a discrete action is whole in every type.
        whole = operation is not None and operation.kind == "arg_max"
        allowed = _FLOATS + (_HALVES if b.half else ()) + (_INTEGERS if whole else ())
        return flow if node.attributes.get("to") in allowed else None
    trains = len(more) > 1 and more[1] is not None and bool(more[1].array)
    return None if trains else flow


def _arithmetic(b: ProgramBuilder, node: OperatorNode, one: Any, two: Any) -> Any:
    if isinstance(one, ProgramValue) and isinstance(two, ProgramValue):
        return _merge(b, node, one, two)
    turned = isinstance(two, ProgramValue)
    flow, constant = (two, one) if turned else (one, two)
    row = _broadcast_row(constant, flow)
    before = b.operation(flow.number)
    # A number of the type of integers is not computed in float32, but that of a discrete action is whole.
    whole = constant.array.dtype.kind == "f" or (before is not None and before.kind == "arg_max")
    if row is None or not whole:
        return None
    if node.op == "Add":
        bare = before is not None and before.kind == "dense" and before.value["bias"] is None
        if before is not None and bare and constant.array.size == flow.shape[-1]:
            kernel = before.value["stored"]
            inner = ProgramValue(before.inputs[0], kernel.array.shape[:1], flow.ones)
            biased = b.dense(inner, kernel, constant)
            if biased is not None:
                return biased
        return b.affine(flow, 1.0, row, constant.paths)
    wide = row.astype("float64")
    if (node.op == "Mul" or (node.op == "Div" and not turned)) and (wide == 1).all():
        return flow
    if node.op == "Sub":
        return b.affine(flow, -1.0 if turned else 1.0, wide if turned else -wide, constant.paths)
    if node.op == "Mul":
        return b.affine(flow, wide, 0.0, constant.paths)
    return None if turned or not row.all() else b.affine(flow, 1 / wide, 0.0, constant.paths)


def _merge(b: ProgramBuilder, node: OperatorNode, one: ProgramValue, two: ProgramValue) -> Any:
    """Combine two values, also one with its own sigmoid, and a number with each entry of a row."""
    one, two = _widened(b, one, two), _widened(b, two, one)
    if one.shape != two.shape or one.ones != two.ones or node.op == "Div":
        return None
    for x, y in ((one, two), (two, one)) if node.op == "Mul" else ():
        gate = b.operation(y.number)
        if gate is not None and gate.inputs == (x.number,) and gate.value.get("name") == "sigmoid":
            return b.activation(x, "silu")
    two = b.affine(two, -1.0, 0) if node.op == "Sub" else two
    return b.merge("multiply" if node.op == "Mul" else "add", one, two)


def _widened(b: ProgramBuilder, flow: ProgramValue, other: ProgramValue) -> ProgramValue:
    """Return a number repeated as often as another value has entries; other values as they are."""
    import numpy as np

    if flow.shape != (1,) or len(other.shape) != 1 or other.shape == (1,) or flow.ones != other.ones:
        return flow
    return b.dense(flow, ProgramConstant(np.ones((1, *other.shape)))) or flow


def _einsum(b: ProgramBuilder, node: OperatorNode, flow: Any, kernel: Any) -> Any:
    left, _, result = str(node.attributes.get("equation")).replace(" ", "").partition("->")
    one, _, two = left.partition(",")
    shared = len(one) == len(two) == len(result) == 2 and one[0] == result[0] and len({*one, *two}) == 3
    if not shared or two not in (one[1] + result[1], result[1] + one[1]):
        return None
    if two[0] == result[1]:
        kernel = kernel._replace(array=kernel.array.T, turned=not kernel.turned)
    return b.dense(flow, kernel)


def _leaky_slope(b: ProgramBuilder, _node: OperatorNode, flow: Any, slopes: Any) -> Any:
    row = _broadcast_row(slopes, flow)
    if row is None:
        return None
    if (row == row[0]).all():
        return b.activation(flow, "leaky_relu", float(row[0])) if math.isfinite(row[0]) else None
    below = b.activation(b.affine(flow, -1.0, 0), "relu")
    return b.merge("add", b.activation(flow, "relu"), b.affine(below, -row, 0, slopes.paths))


def _plain(name: str) -> _Rule:
    """Return the rule of an activation whose attributes must have their defaults."""

    def rule(b: ProgramBuilder, node: OperatorNode, flow: Any) -> Any:
        defaults = find_operator(node.op).defaults
        for key, value in node.attributes.items():
            usual = defaults[key.lower()]
            if value != usual and (isinstance(value, str) or not math.isclose(value, usual, rel_tol=1e-6)):
                return None
        return b.activation(flow, name)

    return rule


def _erf(b: ProgramBuilder, node: OperatorNode, flow: Any) -> Any:
    part = None
    for number, factor in b.multiples(flow):
        if math.isclose(abs(factor), math.sqrt(0.5), rel_tol=1e-6):
            sign = _constant(math.copysign(1, factor))
            part = PartialLayer(node, flow._replace(number=number), {"e": sign})
    return part


def _limit(b: ProgramBuilder, node: OperatorNode, *operands: Any) -> Any:
    """Return a value with limits: Clip, or Min or Max with a constant."""
    if node.op == "Clip":
        low, high = (*operands[1:], None, None)[:2]
        numbers = [end if one is None else one.number for one, end in ((low, -_MOST), (high, _MOST))]
        return None if any(map(math.isnan, numbers)) else b.clip(operands[0], *numbers)
    flow, constant = operands if isinstance(operands[0], ProgramValue) else operands[::-1]
    row = _broadcast_row(constant, flow) if isinstance(constant, ProgramConstant) else None
    if row is None or (row != row).any():
        return None
    return b.clip(flow, *((-_MOST, row) if node.op == "Min" else (row, _MOST)))


def _compare(_b: ProgramBuilder, node: OperatorNode, flow: Any, number: Any) -> Any:
    fits = isinstance(flow, ProgramValue) and isinstance(number, ProgramConstant)
    return Comparison(node, flow, number.number) if fits else None


def _mean(_b: ProgramBuilder, node: OperatorNode, flow: Any, axes: Any = None) -> Any:
    positions = _axes(node, axes)
    whole = len(positions) == 1 and flow.is_last(positions[0]) and flow.is_vector()
    return (
        PartialLayer(node, flow, {"m": _constant(1)})
        if whole and node.attributes.get("keepdims", 1)
        else None
    )


def _layer_norm(b: ProgramBuilder, node: OperatorNode, flow: Any, scale: Any, offset: Any = None) -> Any:
    whole = flow.is_last(node.attributes.get("axis", -1))
    return b.layer_norm(flow, scale, offset, float(node.attributes.get("epsilon", 1e-5))) if whole else None


def _batch_norm(b: ProgramBuilder, node: OperatorNode, flow: Any, *tensors: Any) -> Any:
    import numpy as np

    scale, shift, mean, variance = (one.array.astype(np.float64) for one in tensors)
    rows = all(one.shape == flow.shape[:1] for one in (scale, shift, mean, variance))
    if flow.ones or node.attributes.get("training_mode", 0) or len(flow.shape) not in (1, 3) or not rows:
        return None
    if image := len(flow.shape) == 3:
        flow = _moved(b, flow, (1, 2, 0))
    factor = scale / np.sqrt(variance + float(node.attributes.get("epsilon", 1e-5)))
    paths = [path for one in tensors for path in one.paths]
    flow = b.affine(b.affine(flow, 1.0, -mean), factor, shift, paths)
    return _moved(b, flow, (2, 0, 1)) if image else flow


def _arg_max(b: ProgramBuilder, node: OperatorNode, flow: Any) -> Any:
    """Return the number of the largest value; of equal ones the first."""
    setting = node.attributes.get
    if (
        flow.ones
        or len(flow.shape) != 1
        or setting("axis", 0) not in (-1, 1)
        or setting("select_last_index", 0)
    ):
        return None
    return b.add("arg_max", (1,) if setting("keepdims", 1) else (), flow, count=flow.shape[0], node=node)


def _softmax(b: ProgramBuilder, node: OperatorNode, flow: Any) -> Any:
    """Return probabilities: as a model's output, the largest score chooses among them."""
    whole = not flow.ones and len(flow.shape) == 1 and node.attributes.get("axis", -1) in (-1, 1)
    return b.add("softmax", flow.shape, flow, node=node) if whole else None


def _moved(b: ProgramBuilder, flow: ProgramValue, axes: tuple[int, ...]) -> ProgramValue:
    """Return an image with its axes in another order."""
    return b.add("transpose", tuple(flow.shape[axis] for axis in axes), flow, axes=axes)


# The number of observations whose numbered entries an operator moves here.
_ROWS = 31


def _take(b: ProgramBuilder, node: OperatorNode, flow: Any, *settings: Any) -> Any:
    """Return what an operator leaves of a value, as it moves the numbers of the entries."""
    import numpy as np

    constant = all(one is None or isinstance(one, ProgramConstant) for one in settings)
    if not constant or not isinstance(flow, ProgramValue):
        return None
    extents = [_ROWS if extent == BATCH else extent for extent in flow.extents]
    # Padding is 0, the number of no entry.
    entries = np.arange(1, math.prod(extents) + 1).reshape(extents)
    arrays = [None if one is None else one.array for one in settings]
    if any(one.counts for one in settings if one is not None):
        arrays = [None if one is None else np.where(one == BATCH, _ROWS, one) for one in arrays]
    parts = [_columns(b, flow, entries, moved) for moved in compute_node(node, [entries, *arrays])]
    return None if None in parts else parts


def _columns(b: ProgramBuilder, flow: ProgramValue, entries: Any, moved: Any) -> ProgramValue | None:
    """Return the consecutive columns, or the value without an axis of extent 1, that moved entries are."""
    import numpy as np

    for axis in flow.ones:
        if np.array_equal(moved, entries.squeeze(axis)):
            return _without_axes(flow, (axis,))
    start = int(moved.flat[0]) - 1 if moved.size else -1
    stop = start + moved.shape[-1] if moved.ndim else -1
    if start < 0 or not np.array_equal(moved, entries[..., start:stop]):
        return None
    if (start, stop) == (0, entries.shape[-1]):
        return flow
    shape = (*flow.shape[:-1], stop - start)
    return b.add("slice", shape, flow, start=start, stop=stop) if flow.has_features else None


def _without_axes(flow: ProgramValue, axes: Sequence[int]) -> ProgramValue | None:
    """Return a value without some of its axes of extent 1."""
    if not set(axes) <= set(flow.ones):
        return None
    kept = [axis for axis in flow.ones if axis not in axes]
    return flow._replace(ones=tuple(axis - sum(other < axis for other in axes) for axis in kept))


def _squeeze(_b: ProgramBuilder, node: OperatorNode, flow: Any, axes: Any = None) -> Any:
    rank, listed = len(flow.extents), _axes(node, axes)
    return _without_axes(flow, [axis % rank for axis in listed] if listed else flow.ones)


def _unsqueeze(_b: ProgramBuilder, node: OperatorNode, flow: Any, axes: Any = None) -> Any:
    listed = _axes(node, axes)
    for axis in sorted(axis % (len(flow.extents) + len(listed)) for axis in listed):
        moved = (other + (other >= axis) for other in flow.ones)
        flow = flow._replace(ones=tuple(sorted((*moved, axis))))
    return flow if listed else None


def _transpose(b: ProgramBuilder, node: OperatorNode, flow: Any) -> Any:
    rank = len(flow.extents)
    perm = tuple(node.attributes.get("perm", range(rank)[::-1]))
    if sorted(perm) != list(range(rank)):
        return None
    own = [axis for axis in perm if axis not in flow.ones]
    if own == sorted(own):
        return flow._replace(ones=tuple(n for n, axis in enumerate(perm) if axis in flow.ones))
    return None if flow.ones or perm[0] != 0 else _moved(b, flow, tuple(axis - 1 for axis in perm[1:]))


def _shape(_b: ProgramBuilder, node: OperatorNode, flow: Any) -> Any:
    import numpy as np

    part = flow.extents[node.attributes.get("start", 0) : node.attributes.get("end")]
    if node.op == "Size":
        return ProgramConstant(np.asarray(math.prod(flow.extents), np.int64), counts=True)
    return ProgramConstant(np.asarray(part, np.int64), counts=BATCH in part)


def _concat(b: ProgramBuilder, node: OperatorNode, *flows: Any) -> Any:
    if not all(
        isinstance(flow, ProgramValue) and flow.is_last(node.attributes.get("axis", 0)) for flow in flows
    ):
        return None
    first = flows[0]
    if len(flows) == 1:
        return first
    if any(flow.ones != first.ones or flow.shape[:-1] != first.shape[:-1] for flow in flows):
        return None
    return b.add("concat", (*first.shape[:-1], sum(flow.shape[-1] for flow in flows)), *flows)


def _flatten(b: ProgramBuilder, node: OperatorNode, flow: Any) -> Any:
    whole = 0 not in flow.ones and node.attributes.get("axis", 1) in (1, 1 - len(flow.extents))
    return _reshaped(b, node, flow, [BATCH, math.prod(flow.shape)]) if whole else None


def _reshape(b: ProgramBuilder, node: OperatorNode, flow: Any, target: Any) -> Any:
    sizes, extents = [int(size) for size in target.array.reshape(-1)], flow.extents
    if not node.attributes.get("allowzero", 0):
        sizes = [extents[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    width = math.prod(flow.shape)
    if -1 in sizes:
        unknown, known = sizes.index(-1), math.prod(size for size in sizes if size not in (-1, BATCH))
        if BATCH not in sizes and known == width and unknown < len(sizes) - 1:
            sizes[unknown] = BATCH
        else:
            if BATCH not in sizes and sizes[0] in (1, b.batch):
                known, sizes[0] = known // sizes[0], BATCH
            sizes[unknown] = width // known
    if BATCH not in sizes:
        # A graph for one observation, or for a fixed number of them, may state that number.
        places = [
            axis
            for axis, size in enumerate(sizes[:-1])
            if size in (1, b.batch) and math.prod(sizes[:axis]) == 1 and math.prod(sizes[axis + 1 :]) == width
        ]
        whole = [axis for axis in places if tuple(sizes[axis + 1 :]) == flow.shape]
        if not places:
            return None
        sizes[(whole or places)[-1]] = BATCH
    return _reshaped(b, node, flow, sizes)


def _reshaped(b: ProgramBuilder, node: OperatorNode, flow: ProgramValue, sizes: list[int]) -> Any:
    """Return a value with other extents, of which one is the number of observations."""
    width = math.prod(flow.shape)
    before = sizes.index(BATCH) if BATCH in sizes else -1
    rest, ones = tuple(sizes[before + 1 :]), tuple(range(before))
    if before < 0 or math.prod(rest) != width or any(size != 1 for size in sizes[:before]):
        return None
    if rest == flow.shape:
        return flow._replace(ones=ones)
    if len(rest) == 1:
        return b.add("flatten", rest, flow._replace(ones=()), image=flow.shape)._replace(ones=ones)
    if len(flow.shape) != 1:
        return None
    if width in rest:
        feature = len(rest) - 1 - rest[::-1].index(width)
        return flow._replace(ones=(*ones, *(before + 1 + n for n in range(len(rest)) if n != feature)))
    return (
        GroupedValues(node, flow, (rest[0], rest[1]))
        if len(rest) == 2 and not ones and not flow.ones
        else None
    )


def _convolution(b: ProgramBuilder, node: OperatorNode, flow: Any, weight: Any, bias: Any = None) -> Any:
    setting = node.attributes.get
    if flow.ones or not isinstance(weight, ProgramConstant) or weight.array.ndim != 4 or len(flow.shape) != 3:
        return None
    plain = setting("group", 1) == 1 and all(one == 1 for one in setting("dilations", ()))
    outputs, channels, *kernel = weight.array.shape
    if not plain or channels != flow.shape[0] or setting("auto_pad", "NOTSET") not in ("NOTSET", "VALID", ""):
        return None
    strides, (above, left, below, right) = tuple(setting("strides", (1, 1))), setting("pads", (0, 0, 0, 0))
    pads = ((above, below), (left, right))
    windows = zip(flow.shape[1:], pads, kernel, strides, strict=True)
    size = [(extent + sum(pad) - window) // stride + 1 for extent, pad, window, stride in windows]
    if min(size) < 1 or min(above, left, below, right) < 0:
        return None
    image = b.add(
        "convolution",
        (*size, outputs),
        _moved(b, flow, (1, 2, 0)),
        kernel=weight.array.transpose(2, 3, 1, 0).astype("float32"),
        bias=None if bias is None else bias.array.reshape(-1).astype("float32"),
        strides=strides,
        padding=pads,
        paths=tuple(path for one in (weight, bias) if one is not None for path in one.paths),
    )
    return _moved(b, image, (2, 0, 1))


def _cell(b: ProgramBuilder, node: OperatorNode, *operands: Any) -> Any:
    """Return one step of an LSTM or GRU whose state is a model input and output."""
    import numpy as np

    flow, weight, recurrent, biases, lengths, hidden, cell, peephole = (*operands, *[None] * 8)[:8]
    lstm, setting = node.op == "LSTM", node.attributes.get
    settings = ("direction", "layout", "clip", "activations", "input_forget")
    plain = all(setting(name) in (None, 0, "forward") for name in settings)
    starts = (hidden, cell) if lstm else (hidden,)
    if not plain or lengths is not None or peephole is not None or flow.ones != (0,) or len(flow.shape) != 1:
        return None
    names = {len(b.inputs) + index: name for index, name in enumerate(b.states)}
    states = [names.get(one.number) if isinstance(one, ProgramValue) else None for one in starts]
    gates, units = 4 if lstm else 3, recurrent.array.shape[2]
    shapes = ((1, gates * units, flow.shape[0]), (1, gates * units, units))
    if None in states or (weight.array.shape, recurrent.array.shape) != shapes:
        return None
    both = np.zeros((2, gates * units)) if biases is None else biases.array.reshape(2, gates * units)
    order = gate_order("lstm" if lstm else "gru", "onnx")
    turn = np.concatenate([np.arange(gate * units, (gate + 1) * units) for gate in order])
    step = b.add(
        "lstm" if lstm else "gru",
        (units,),
        flow,
        states=tuple(states),
        kernel=weight.array[0][turn].T.astype("float32"),
        recurrent=recurrent.array[0][turn].T.astype("float32"),
        biases=tuple(row[turn].astype("float32") for row in both),
        after=bool(setting("linear_before_reset", 0)),
        carried=dict(zip(states, (*node.outputs[1:], "", ""), strict=False)),
        paths=tuple(path for one in (weight, recurrent, biases) if one is not None for path in one.paths),
        node=node,
    )
    # Y is [steps, directions, batch, units], where the first two are 1; Y_h and Y_c have no steps axis.
    return [step._replace(ones=(0, 1)), step, b.add("cell", (units,), step, node=node)]


_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("Identity", "Dropout", "Cast"), _same),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div"), _arithmetic),
    **dict.fromkeys(("Clip", "Min", "Max"), _limit),
    **dict.fromkeys(("LSTM", "GRU"), _cell),
    **dict.fromkeys(("Shape", "Size"), _shape),
    "MatMul": lambda b, _node, flow, kernel: (
        b.dense(flow, kernel) if isinstance(flow, ProgramValue) else None
    ),
    "Einsum": _einsum,
    **{op: _plain(name) for name in ACTIVATIONS if (op := ACTIVATION_KINDS[name].onnx) and name != "linear"},
    "LeakyRelu": lambda b, node, flow: b.activation(
        flow, "leaky_relu", float(node.attributes.get("alpha", 0.01))
    ),
    "Elu": lambda b, node, flow: b.elu(flow, node.attributes.get("alpha", 1.0)),
    "PRelu": _leaky_slope,
    "Erf": _erf,
    "Greater": _compare,
    "ReduceMean": _mean,
    "LayerNormalization": _layer_norm,
    "BatchNormalization": _batch_norm,
    "ArgMax": _arg_max,
    **dict.fromkeys(("Softmax", "LogSoftmax"), _softmax),
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Concat": _concat,
    "Flatten": _flatten,
    "Reshape": _reshape,
    "Conv": _convolution,
}
# Rules by the kind in the operator's row, for operators that the rules above do not name.
_BY_KIND: Mapping[Kind, _Rule] = dict.fromkeys(("movement", "extent", "lookup"), _take)
