"""The table of operators: shapes, multiply-accumulate operations and values, by ONNX's names.

Source: onnx/docs/Operators.md and onnx/docs/Changelog.md (all versions of every operator), operator set 28.
A row is added by the decorator `operator` in the module of its subject.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, get_args

from ckpttool.core import limits
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.dtypes import np
from ckpttool.core.errors import FormatError, UnsupportedError
from ckpttool.core.source import Shape
from ckpttool.graphs.graph import OperatorNode

# Modules of this package whose import adds rows.
MODULES = (
    *("elementwise", "indexing", "reductions", "products", "windows", "normalization"),
    *("recurrent", "quantization", "images", "attention", "signals"),
)
# Operators that run graphs (graphs/interpreter.py).
CONTROL = frozenset(("If", "Loop", "Scan"))
Combination = Literal["elementwise", "scaling", "first"]
Movement = Literal["movement", "reshape", "transpose", "extent", "join", "lookup", "shuffle"]
_Single = Literal["channelwise", "norm", "window", "product", "equation", "recurrent", "reduction", "scatter"]
Kind = Combination | Movement | _Single | Literal["other"]
COMBINATIONS, MOVEMENTS = frozenset(get_args(Combination)), frozenset(get_args(Movement))


class UnknownValueError(LookupError):
    """A shape depends on a value that is not constant."""


class OperatorCall(NamedTuple):
    """A node with the shapes of its inputs (None if omitted or unknown) and the values that are known.

    `value` returns an input's value, an array or a tuple of integers; it raises UnknownValueError for a value
    that is not constant.
    """

    node: OperatorNode
    shapes: Sequence[Shape | None]
    value: Callable[[int], Any]

    def shape(self, number: int) -> Shape:
        """Return the shape of an input; raise UnknownValueError if it is unknown."""
        shape = self.shapes[number] if number < len(self.shapes) else None
        if shape is None:
            raise UnknownValueError
        return shape

    def has(self, number: int) -> bool:
        """Return whether an optional input is there."""
        return number < len(self.node.inputs) and bool(self.node.inputs[number])

    def get(self, name: str) -> Any:
        """Return an attribute, its default if the node does not set it."""
        defaults = find_operator(self.node.op).defaults
        return self.node.attributes.get(name, defaults.get(name.lower()))


ShapeRule = Callable[[OperatorCall], Sequence[Shape]]
# Adds nodes of other operators: called with `add(operator, *inputs, **attributes)` and `number(value)`, which
# return names of values, the names of the inputs, and all attributes of `compute`; returns the result's name.
Expansion = Callable[..., str]


class OperatorNames(NamedTuple):
    """The names of an operator in other languages, separated by spaces, where it needs no attribute there.

    `inputs` is the number of values that it takes, 0 for any number. `torch` are TorchScript's operations,
    `keras` the classes of keras.ops, `tensorflow` the operations of a graph.
    """

    inputs: int
    torch: str = ""
    keras: str = ""
    tensorflow: str = ""


_UNSPELLED = OperatorNames(0)


class Operator(NamedTuple):
    """One operator (see `operator`).

    `compute` takes the inputs (None if omitted) and, by keyword, the attributes, and returns an array, or
    a tuple of them for several outputs. `kind` is what it does with entries. Combining those of broadcast
    inputs: "elementwise"; "scaling" if a weight has a number for each feature; "first" if the others are
    settings. Moving those of the first input: "movement"; "reshape"; "transpose"; "extent" if every axis
    stays where it is; "join" of all inputs; "lookup" of rows; "shuffle" between channels and pixels.
    Computing: "channelwise"; a "norm" with a weight for each feature; a "window" over images; a "product"
    with a matrix; an "equation" of axes; "recurrent"; a "reduction" of axes; "scatter" to positions.
    """

    name: str
    compute: Callable[..., Any]
    shapes: ShapeRule | None
    macs: Callable[[OperatorCall, Sequence[Shape]], int] | None
    kind: Kind
    since: int
    result: str = ""
    spelling: OperatorNames = _UNSPELLED
    expand: Expansion | None = None

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The attributes by lowercase name, with their default values."""
        return getattr(self.compute, "__kwdefaults__", None) or {}

    def expanded(self, node: OperatorNode, add: Callable[..., str], number: Callable[[float], str]) -> str:
        """Return the result of a node by other operators, "" without an expansion (see Expansion)."""
        settings = {name.lower(): value for name, value in node.attributes.items()}
        return self.expand(add, number, *node.inputs, **{**self.defaults, **settings}) if self.expand else ""


_TABLE: dict[str, Operator] = {}


def operator(
    *names: str,
    shapes: ShapeRule | None = None,
    macs: Callable[[OperatorCall, Sequence[Shape]], int] | None = None,
    kind: Kind = "other",
    since: int = 1,
    result: str = "",
    spelling: OperatorNames = _UNSPELLED,
    expand: Expansion | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add rows for operators, computed by the decorated function.

    Args:
        *names: ONNX's names of the operators.
        shapes: returns the shapes of the outputs.
        macs: returns the number of multiply-accumulate operations; None if they are not counted.
        kind: what it does with entries (see Operator).
        since: the first version of the operator set with this meaning.
        result: the type of the outputs if it does not depend on the inputs and attributes, else "".
        spelling: its names in other languages.
        expand: computes the same by other operators, by which it plays if policies have no rule for it.
    """

    def add(compute: Callable[..., Any]) -> Callable[..., Any]:
        cost = macs or (no_products if shapes is not None or kind != "other" else None)
        for name in names:
            _TABLE[name] = Operator(name, compute, shapes, cost, kind, since, result, spelling, expand)
        return compute

    return add


def no_products(_call: OperatorCall, _outputs: Sequence[Shape]) -> int:
    """Return 0, the cost of operators without products."""
    return 0


@functools.cache
def list_operators() -> Mapping[str, Operator]:
    """Return the whole table by name."""
    for module in MODULES:
        import_module(f"{__package__}.{module}")
    return _TABLE


@functools.cache
def spelled_operators(language: Literal["torch", "keras", "tensorflow"]) -> Mapping[str, Operator]:
    """Return the operators that a language has as well, by their names in it."""
    rows = list_operators().values()
    return {word: row for row in rows for word in getattr(row.spelling, language).split()}


def look_up_operator(name: str) -> Operator | None:
    """Return an operator, None if the table does not have it; modules are imported until one has it."""
    for module in MODULES:
        if name in _TABLE:
            break
        import_module(f"{__package__}.{module}")
    return _TABLE.get(name)


def find_operator(name: str) -> Operator:
    """Return an operator; raise UnsupportedError with its name if the table does not have it."""
    row = look_up_operator(name)
    if row is None:
        raise UnsupportedError("an operator of the graph is not supported", found=name)
    return row


def operator_kind(name: str) -> Kind | None:
    """Return what an operator does with entries, None if the table does not have it."""
    row = list_operators().get(name)
    return None if row is None else row.kind


def is_known(name: str) -> bool:
    """Return whether an operator can be evaluated."""
    return name in CONTROL or name in list_operators()


def compute_node(node: OperatorNode, arrays: Sequence[np.ndarray | None]) -> tuple[Any, ...]:
    """Return the outputs of a node for its inputs (None if omitted).

    Raise UnsupportedError for an operator, type or attribute that is not supported, FormatError for inputs
    that do not fit the operator, and LimitError for a result that is too large.
    """
    row = find_operator(node.op)
    attributes = {name.lower(): value for name, value in node.attributes.items()}
    if strange := attributes.keys() - row.defaults.keys():
        raise UnsupportedError(
            f"an attribute of the operator {node.op} is not supported",
            path=node.title or None,
            found=", ".join(sorted(strange)),
        )
    shapes = [None if array is None else array.shape for array in arrays]
    try:
        # A movement has as many entries as its input, or requires their number to be small.
        if row.shapes is not None and row.kind not in MOVEMENTS:
            for shape in row.shapes(OperatorCall(node, shapes, lambda number: _input_value(arrays, number))):
                require_size(shape)
        if "outputs" in row.defaults:
            attributes["outputs"] = len(node.outputs)
        with np.errstate(all="ignore"):
            computed = row.compute(*arrays, **attributes)
    except (ValueError, TypeError, IndexError, AttributeError, KeyError, UnknownValueError) as error:
        raise FormatError(
            f"the inputs of a node do not fit its operator {node.op}",
            path=node.title or None,
            found=", ".join(
                "-" if array is None else f"{array.dtype}{list(array.shape)}" for array in arrays
            ),
        ) from error
    return tuple(computed) if isinstance(computed, tuple) else (np.asarray(computed),)


def _input_value(arrays: Sequence[np.ndarray | None], number: int) -> Any:
    array = arrays[number] if number < len(arrays) else None
    if array is None:
        raise UnknownValueError
    return array


def require_size(shape: Sequence[int], times: int = 1) -> None:
    """Raise LimitError for more entries than so many values may have, ValueError for a negative extent."""
    if min(shape, default=0) < 0:
        raise ValueError(shape)
    if math.prod(shape) > times * limits.current().value_entries:
        raise limits.limit_error("value_entries", "a value of the graph is too large", math.prod(shape))


def same_shape(call: OperatorCall) -> Sequence[Shape]:
    """Return the shape of the first input."""
    return [call.shape(0)]


def broadcast_shape(call: OperatorCall) -> Sequence[Shape]:
    """Return the shape to which all inputs are broadcast."""
    return [broadcast_shapes(*(call.shape(n) for n in range(len(call.node.inputs)) if call.has(n)))]


def broadcast_shapes(*shapes: Shape) -> Shape:
    """Return the shape to which these are broadcast; raise ValueError if they do not fit."""
    rank = max(map(len, shapes), default=0)
    aligned = [(*(1,) * (rank - len(shape)), *shape) for shape in shapes]
    extents = [{*axis} - {1} for axis in zip(*aligned, strict=True)]
    if any(len(axis) > 1 or min(axis, default=0) < 0 for axis in extents):
        raise ValueError(shapes)
    return tuple(axis.pop() if axis else 1 for axis in extents)
