"""Graphs of TorchScript archives: `forward` in inference, with named values in the place of tensors.

Numbers, lists and modules are evaluated; tensors become values of the graph. A branch whose condition
depends on a tensor becomes `If`. A module or function whose code cannot be translated is one opaque node.
Buffers that `forward` overwrites are further outputs, `NAME/next`. Inputs have the types that a traced
archive records, otherwise the type of the parameters, or int64 if they are positions of an embedding.

Sources: aten/src/ATen/native/native_functions.yaml (names, order and defaults of arguments), the
documentation of torch.* (what operations compute), torch/csrc/jit/serialization/export_module.cpp
(`traced_inputs.pkl`). A combination of arguments that is not translated leaves the operation opaque.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import CkpttoolError, UnsupportedError
from ckpttool.core.kinds import ACTIVATION_KINDS, gate_order
from ckpttool.core.source import Shape
from ckpttool.core.tree import Leaf, Tree
from ckpttool.graphs.builder import FUNCTION_NODES, ActivationNodes, GraphBuilder
from ckpttool.graphs.graph import Graph, OpaqueError, inline_constant, require
from ckpttool.graphs.operators import Operator, find_operator, spelled_operators
from ckpttool.graphs.torchscript_code import ScriptTensor, read_code, traced_inputs
from ckpttool.graphs.torchscript_numbers import (
    CONTAINERS,
    LAST,
    NUMBERS,
    SILENT,
    apply_numbers,
    change_list,
    has_kind,
    is_number_operation,
)
from ckpttool.graphs.torchscript_translator import ScriptTranslator
from ckpttool.graphs.torchscript_values import (
    IndexInputError,
    InputShapeError,
    NumberValue,
    PartsValue,
    RaisedError,
    ShapeRange,
    SizesValue,
    TensorValue,
    UnknownValue,
)
from ckpttool.mapping.rules import TRANSPOSE, BlockOrder, Permute, Reshape, chain_rules

_Handler = Callable[[ScriptTranslator, Any], Any]
_TENSORS = (TensorValue, ScriptTensor)
_OPERATIONS: dict[str, tuple[str, _Handler]] = {}
# What code of an unexpected form raises.
UNEXPECTED = (
    *(ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, SyntaxError, TypeError),
    ValueError,
)
# Nodes of all inputs together that code is tried with.
_MOST_TRIED = 10_000
# New tensors whose values differ from call to call.
_RANDOM = frozenset(("rand", "randn", "randint", "randperm", "normal", "empty", "empty_strided"))


# c10/core/ScalarType.h
TORCH_TYPES = {
    0: "uint8",
    1: "int8",
    2: "int16",
    3: "int32",
    4: "int64",
    5: "float16",
    6: "float32",
    7: "float64",
    11: "bool",
    15: "bfloat16",
}


def read(checkpoint: Checkpoint) -> Graph | None:
    """Return the graph of an archive's `forward`, None for other files of PyTorch.

    Raise UnsupportedError if `forward` cannot be translated.
    """
    texts = read_code(checkpoint)
    if texts is None:
        return None
    archive = _Archive(checkpoint.tree, texts, traced_inputs(checkpoint))
    try:
        return archive.translate(None, GraphBuilder())
    except (OpaqueError, InputShapeError, RaisedError, *UNEXPECTED) as error:
        raise UnsupportedError(
            "the TorchScript code cannot be translated to a graph",
            file=checkpoint.path,
            found=str(error) or None,
        ) from None


def read_for_shapes(checkpoint: Checkpoint, candidates: Iterable[Sequence[Shape]]) -> Graph | None:
    """Return the graph of `forward` for the first of these shapes of its inputs that it can be applied to.

    Shapes include the batch, unless they are those of inputs with which the archive was traced. Conditions
    that depend on shapes are evaluated for these. Return None if it fits none of them.
    """
    texts, count = read_code(checkpoint), 0
    if texts is None:
        return None
    archive = _Archive(checkpoint.tree, texts, traced_inputs(checkpoint))
    for shapes in candidates:
        build = GraphBuilder()
        try:
            return archive.translate(shapes, build)
        except (InputShapeError, OpaqueError, RaisedError, CkpttoolError, *UNEXPECTED):
            count += build.count
        if count > _MOST_TRIED:
            break
    return None


@dataclass
class _Archive:
    """The code of an archive, and the inputs with which it was traced."""

    tree: Tree
    texts: Mapping[str, str]
    recorded: Sequence[Leaf]
    parsed: dict[str, ast.Module] = field(default_factory=dict)
    integers: set[str] = field(default_factory=set)

    def translate(self, shapes: Sequence[Shape] | None, build: GraphBuilder) -> Graph:
        """Return the graph of `forward`, for inputs of these shapes if they are given."""
        while True:
            translator = ScriptTranslator(
                self.tree,
                self.texts,
                parsed=self.parsed,
                operation=apply_operation,
                integers=self.integers,
                build=build,
                shapes=shapes,
            )
            try:
                return translator.graph(self.recorded)
            except IndexInputError as error:
                self.integers.add(str(error))
                build = GraphBuilder()


def _operation(schema: str) -> Callable[[_Handler], _Handler]:
    """Add operations by their names, with the arguments of their schema and defaults: `elu(x, alpha=1.0)`."""

    def add(handler: _Handler) -> _Handler:
        names, _, arguments = schema.removesuffix(")").partition("(")
        for name in names.split():
            _OPERATIONS[name] = (arguments, handler)
        return handler

    return add


@cache
def list_operations() -> Mapping[str, tuple[str, _Handler]]:
    """Return the arguments and handlers of all operations; each function of the table has one or two."""
    arguments = {1: "x", 2: "x, other"}
    plain = {
        name: (arguments[row.spelling.inputs], partial(_function, row))
        for name, row in spelled_operators("torch").items()
    }
    return {**plain, **_OPERATIONS}


@cache
def _parse_schema(listed: str) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Return the names of a schema's arguments, and the defaults of those that have one."""
    pairs = [part.partition("=") for part in listed.split(", ") if part]
    defaults = {name: ast.literal_eval(default) for name, equals, default in pairs if equals}
    return tuple(name for name, _, _ in pairs), defaults


def _bind(arguments: str, positional: Sequence[Any], named: Mapping[str, Any]) -> SimpleNamespace:
    """Return the arguments by name; raise OpaqueError if they do not fit the schema."""
    names, defaults = _parse_schema(arguments)
    if len(positional) > len(names) or not named.keys() <= set(names):
        raise OpaqueError("arguments of another version of the operation")
    values = {**defaults, **dict(zip(names, positional, strict=False)), **named}
    if values.keys() != set(names):
        raise OpaqueError("arguments of another version of the operation")
    return SimpleNamespace(**values)


def compute(t: ScriptTranslator, name: str, /, *positional: Any, **named: Any) -> Any:
    """Return the result of an operation; raise OpaqueError if it is not translated."""
    if name not in list_operations():
        raise OpaqueError(name)
    arguments, handler = list_operations()[name]
    return handler(t, _bind(arguments, positional, named))


def apply_operation(t: ScriptTranslator, called: str, args: list[Any], named: Mapping[str, Any]) -> Any:
    """Return the result of an operation by its name in the code; one with tensors may be opaque."""
    name = called.removeprefix("torch.").removeprefix("ops.prim.").removeprefix("ops.aten.")
    if name not in CONTAINERS and has_kind(args, (UnknownValue,)):
        raise OpaqueError("a variable that depends on a condition")
    if name in SILENT:
        return "" if name in ("format", "str") else None
    tensors = has_kind(args, _TENSORS) or has_kind([*named.values()], _TENSORS)
    if not tensors and is_number_operation(name):
        return apply_numbers(t, name, args, named)
    overwrites = name not in list_operations() and name.endswith("_") and not name.endswith("__")
    count = len(t.build.nodes)
    own = name[:-1] if overwrites else name
    try:
        require(own in list_operations(), called)
        result = compute(t, own, *args, **named)
    except (OpaqueError, *UNEXPECTED) as error:
        if not isinstance(error, OpaqueError):
            error = OpaqueError(f"arguments of {called}")
        if overwrites or not (tensors or name in _RANDOM):
            raise error from None
        del t.build.nodes[count:]
        return t.opaque(f"aten::{name}", [*args, *named.values()], _settings([*args, *named.values()]))
    if overwrites:
        target = t.tensor(args[0])
        return t.overwrite(args[0], _cast(t, t.tensor(result), target.dtype))
    return result


def _settings(values: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments that are no tensors, by their position, as attributes of an opaque node."""
    plain: dict[str, Any] = {}
    for n, value in enumerate(values):
        if isinstance(value, list) and value and all(isinstance(item, int | float) for item in value):
            plain[f"argument_{n}"] = tuple(value)
        elif isinstance(value, bool | int | float | str):
            plain[f"argument_{n}"] = value
    return plain


_CATEGORY: dict[str, int] = {"bool": 0, **dict.fromkeys(("uint8", "int8", "int16", "int32", "int64"), 1)}


def _category(dtype: str) -> int:
    return _CATEGORY.get(dtype, 2)


def _promoted(t: ScriptTranslator, *values: Any) -> str | None:
    """Return the type in which an operation computes, as torch.result_type; None if it is unknown."""
    listed = [t.tensor(value) if isinstance(value, _TENSORS) else value for value in values]
    tensors = [tensor for tensor in listed if isinstance(tensor, TensorValue) and not tensor.wrapped]
    if any(tensor.dtype is None for tensor in tensors):
        return None
    dtype: str | None = None
    highest = max((_category(tensor.dtype or "") for tensor in tensors), default=-1)
    candidates = [tensor for tensor in tensors if _category(tensor.dtype or "") == highest]
    kinds = {candidate.dtype for candidate in candidates}
    if len(kinds) > 1:
        if any(candidate.rank is None for candidate in candidates):
            raise OpaqueError("tensors of different types")
        kinds = {candidate.dtype for candidate in candidates if candidate.rank} or kinds
    if len(kinds) > 1:
        dtype = _wider({kind or "" for kind in kinds})
    elif kinds:
        (dtype,) = kinds
    for operand in listed:
        if isinstance(operand, NUMBERS) or (isinstance(operand, TensorValue) and operand.wrapped):
            kind = operand.dtype if isinstance(operand, NumberValue | TensorValue) else type(operand).__name__
            level = {"bool": 0, "int": 1, "int64": 1}.get(kind or "", 2)
            if dtype is None or level > _category(dtype):
                dtype = ("bool", "int64", "float32")[level]
    return dtype


def _wider(kinds: set[str]) -> str:
    import numpy as np

    if kinds <= {"float16", "bfloat16"}:
        return "float32"
    if any(kind == "bfloat16" for kind in kinds):
        kinds = kinds - {"bfloat16"}
    return str(np.result_type(*(np.dtype(kind) for kind in kinds)).name)


def _name(t: ScriptTranslator, value: Any, dtype: str | None) -> str:
    """Return the name of a tensor or number in a type; of unknown type if that is unknown."""
    if isinstance(value, _TENSORS):
        return _cast(t, t.tensor(value), dtype).name
    if not isinstance(value, NUMBERS):
        raise OpaqueError(f"a tensor or number is expected, found {type(value).__name__}")
    return t.number(value, dtype or "float32")


def _cast(t: ScriptTranslator, value: TensorValue, dtype: str | None) -> TensorValue:
    if dtype is None or value.dtype in (None, dtype):
        return value
    return t.new(t.build.one("Cast", value.name, to=dtype), dtype, value.rank)


def _rank(t: ScriptTranslator, *values: Any) -> int | None:
    """Return the rank of broadcast values, None if it is unknown."""
    ranks = [t.tensor(value).rank for value in values if isinstance(value, _TENSORS)]
    known = [rank for rank in ranks if rank is not None]
    return max(known, default=0) if len(known) == len(ranks) else None


def _elementwise(
    t: ScriptTranslator, op: str, *values: Any, dtype: str | None = None, **more: Any
) -> TensorValue:
    """Return the result of an operator on broadcast values in their common type."""
    common = dtype or _promoted(t, *values)
    result = find_operator(op).result or common
    return t.new(
        t.build.one(op, *(_name(t, value, common) for value in values), **more), result, _rank(t, *values)
    )


def _applied(t: ScriptTranslator, op: str, value: Any, *inputs: str, **attributes: Any) -> TensorValue:
    """Return the result of an operator, which has the type and the number of axes of its first input."""
    x = t.tensor(value)
    return t.new(t.build.one(op, x.name, *inputs, **attributes), x.dtype, x.rank)


def _floating(t: ScriptTranslator, value: Any) -> TensorValue:
    """Return a tensor in a type with fractions."""
    tensor = t.tensor(value)
    if tensor.dtype is None or _category(tensor.dtype) == 2:
        return tensor
    return _cast(t, tensor, "float32")


def _integer(t: ScriptTranslator, value: Any) -> TensorValue:
    """Return positions; an input that is used as positions has the type int64."""
    tensor = t.tensor(value)
    if tensor.dtype is not None and _category(tensor.dtype) == 2 and tensor.entry is not None:
        raise IndexInputError(tensor.entry)
    if tensor.dtype not in ("int64", "int32", "uint8", "int16", "int8"):
        raise OpaqueError("positions of another type")
    return _cast(t, tensor, "int64")


def _ints(value: Any, count: int | None = None) -> list[int]:
    """Return a list of plain numbers, one number repeated."""
    values = [value] if type(value) is int else value
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise OpaqueError("a list of numbers that depends on a tensor")
    if count is not None and len(values) == 1:
        return values * count
    if count is not None and len(values) != count:
        raise OpaqueError("a list of another length")
    return values


# Functions that keep whole numbers; others compute with fractions.
_WHOLE = frozenset(("Relu", "Abs", "Neg", "Sign", "Floor", "Ceil", "IsNaN", "IsInf"))


def _function(row: Operator, t: ScriptTranslator, a: Any) -> TensorValue:
    """Return the result of a function that is one operator of the table."""
    values = [*vars(a).values()]
    if len(values) == 1 and row.name not in _WHOLE:
        values = [_floating(t, a.x)]
    return _elementwise(t, row.name, *values)


for _torch, _onnx in {
    row.name: row.onnx
    for row in ACTIVATION_KINDS.values()
    if row.is_plain and row.torch and row.onnx and row.name not in ("relu", "linear")
}.items():
    _operation(f"{_torch}(x)")(lambda t, a, op=_onnx: _elementwise(t, op, _floating(t, a.x)))  # type: ignore[misc]


def compose(t: ScriptTranslator, x: TensorValue, nodes: ActivationNodes) -> TensorValue:
    """Return the result of a function of one value that the builder's tables write as nodes."""
    name = nodes(t.build.one, lambda value: t.build.number(value, x.dtype or "float32"), x.name)
    return t.new(name, x.dtype, x.rank)


def _composed(nodes: ActivationNodes) -> _Handler:
    def handler(t: ScriptTranslator, a: Any) -> TensorValue:
        x = _floating(t, a.x)
        return compose(t, _cast(t, x, _promoted(t, x)), nodes)

    return handler


for _torch, _nodes in FUNCTION_NODES.items():
    _operation(f"{_torch}(x)")(_composed(_nodes))


@_operation("elu(x, alpha=1.0, scale=1.0, input_scale=1.0)")
def _elu(t: ScriptTranslator, a: Any) -> TensorValue:
    require(a.scale == 1 and a.input_scale == 1, "a scaled elu")
    return _elementwise(t, "Elu", a.x, alpha=float(a.alpha))


@_operation("leaky_relu(x, slope=0.01)")
def _leaky_relu(t: ScriptTranslator, a: Any) -> TensorValue:
    require(isinstance(a.slope, int | float), "a slope that depends on a tensor")
    return _elementwise(t, "LeakyRelu", a.x, alpha=float(a.slope))


@_operation("rrelu(x, lower=0.125, upper=0.3333333333333333, training=False, generator=None)")
def _random_relu(t: ScriptTranslator, a: Any) -> TensorValue:
    require(a.training is False, "a random slope")
    return _elementwise(t, "LeakyRelu", a.x, alpha=(a.lower + a.upper) / 2)


@_operation("softplus(x, beta=1, threshold=20)")
def _softplus(t: ScriptTranslator, a: Any) -> TensorValue:
    scaled = _elementwise(t, "Mul", a.x, a.beta) if a.beta != 1 else t.tensor(a.x)
    soft = _elementwise(t, "Softplus", scaled)
    soft = _elementwise(t, "Div", soft, a.beta) if a.beta != 1 else soft
    return _where(t, _elementwise(t, "Greater", scaled, a.threshold), a.x, soft)


@_operation("prelu(x, weight)")
def _prelu(t: ScriptTranslator, a: Any) -> TensorValue:
    x, leaf = t.tensor(a.x), t.stored_leaf(a.weight)
    slope = t.tensor(a.weight).name
    if leaf is None or leaf.size != 1:
        # A slope for each channel, which is axis 1.
        channels = t.build.number([-1], "int64")
        if x.rank is not None:
            shape = t.build.number([-1, *[1] * (x.rank - 2)], "int64")
        else:
            rest = t.build.one("Sub", _rank_name(t, x), t.build.number(2, "int64"))
            rest = t.build.one("Reshape", rest, t.build.number([1], "int64"))
            ones = t.build.one("ConstantOfShape", rest, value=_filled(1, "int64"))
            shape = t.build.one("Concat", channels, ones, axis=0)
        slope = t.build.one("Reshape", slope, shape)
    return _applied(t, "PRelu", x, slope)


def _rank_name(t: ScriptTranslator, x: TensorValue) -> str:
    return t.build.one("Size", t.build.one("Shape", x.name))


def _extent_name(t: ScriptTranslator, x: TensorValue, axis: int) -> str:
    """Return the name of a list of one extent."""
    return t.build.one("Shape", x.name, start=axis, **({"end": axis + 1} if axis != -1 else {}))


def _filled(value: Any, dtype: str) -> Leaf:
    """Return a tensor of one entry, for an attribute."""
    import numpy as np

    from ckpttool.core import dtypes

    leaf = inline_constant(np.full([1], value).astype(dtypes.numpy_dtype(dtype))).leaf
    if not isinstance(leaf, Leaf):
        raise OpaqueError("a tensor of strings")
    return leaf


@_operation("glu(x, dim=-1)")
def _glu(t: ScriptTranslator, a: Any) -> TensorValue:
    x = t.tensor(a.x)
    one, two = t.build.add("Split", (x.name,), 2, axis=a.dim, num_outputs=2)
    return t.new(t.build.one("Mul", one, t.build.one("Sigmoid", two)), x.dtype, x.rank)


@_operation("trunc fix(x)")
def _trunc(t: ScriptTranslator, a: Any) -> TensorValue:
    whole = _elementwise(t, "Floor", _elementwise(t, "Abs", a.x))
    return _elementwise(t, "Mul", _elementwise(t, "Sign", a.x), whole)


@_operation("isfinite(x)")
def _isfinite(t: ScriptTranslator, a: Any) -> TensorValue:
    strange = _elementwise(t, "Or", _elementwise(t, "IsNaN", a.x), _elementwise(t, "IsInf", a.x))
    return _elementwise(t, "Not", strange)


@_operation("nan_to_num(x, nan=None, posinf=None, neginf=None)")
def _without_nan(t: ScriptTranslator, a: Any) -> TensorValue:
    import numpy as np

    x = t.tensor(a.x)
    require(x.dtype in ("float32", "float64"), "a type without infinity")
    most = float(np.finfo(np.dtype(x.dtype)).max)
    result = _where(t, _elementwise(t, "IsNaN", x), 0.0 if a.nan is None else a.nan, x)
    for sign, value in ((1, a.posinf), (-1, a.neginf)):
        infinite = _elementwise(t, "IsInf", x, detect_negative=int(sign < 0), detect_positive=int(sign > 0))
        result = _where(t, infinite, sign * most if value is None else value, result)
    return result


@_operation(
    "dropout feature_dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d(x, p=0.5, "
    "train=True)",
)
def _dropout(_t: ScriptTranslator, a: Any) -> Any:
    require(a.train is False or a.p == 0, "dropout in training")
    return a.x


@_operation("contiguous(x, memory_format=None)")
def _contiguous(t: ScriptTranslator, a: Any) -> TensorValue:
    # It is the tensor itself or a copy, which depends on the tensor's strides.
    x = t.tensor(a.x)
    return t.view(x, x.name, x.rank)


@_operation("clone(x, memory_format=None)")
def _clone(t: ScriptTranslator, a: Any) -> TensorValue:
    x = t.tensor(a.x)
    return t.new(x.name, x.dtype, x.rank)


def _scaled(t: ScriptTranslator, value: Any, factor: Any) -> Any:
    return value if factor == 1 else _elementwise(t, "Mul", value, factor)


@_operation("mul multiply(x, other)")
def _mul(t: ScriptTranslator, a: Any) -> TensorValue:
    if _promoted(t, a.x, a.other) == "bool":
        return _elementwise(t, "And", a.x, a.other)
    return _elementwise(t, "Mul", a.x, a.other)


@_operation("div divide true_divide(x, other, rounding_mode=None)")
def _div(t: ScriptTranslator, a: Any) -> TensorValue:
    dtype = _promoted(t, a.x, a.other)
    if a.rounding_mode is None:
        whole = dtype is not None and _category(dtype) < 2
        return _elementwise(t, "Div", a.x, a.other, dtype="float32" if whole else dtype)
    require(a.rounding_mode in ("floor", "trunc"), "an unknown rounding")
    if dtype is not None and _category(dtype) < 2:
        if a.rounding_mode == "trunc":
            return _elementwise(t, "Div", a.x, a.other)
        rest = _elementwise(t, "Mod", a.x, a.other)
        return _elementwise(t, "Div", _elementwise(t, "Sub", a.x, rest), a.other)
    quotient = _elementwise(t, "Div", a.x, a.other)
    if a.rounding_mode == "floor":
        return _elementwise(t, "Floor", quotient)
    return compute(t, "trunc", quotient)


@_operation("remainder(x, other)")
def _remainder(t: ScriptTranslator, a: Any) -> TensorValue:
    dtype = _promoted(t, a.x, a.other)
    if dtype is not None and _category(dtype) < 2:
        return _elementwise(t, "Mod", a.x, a.other)
    rest = _elementwise(t, "Mod", a.x, a.other, fmod=1)
    other = a.other if isinstance(a.other, _TENSORS) else t.tensor(a.other)
    signs = _elementwise(t, "Xor", _elementwise(t, "Less", rest, 0.0), _elementwise(t, "Less", other, 0.0))
    wrong = _elementwise(t, "And", signs, _elementwise(t, "Not", _elementwise(t, "Equal", rest, 0.0)))
    return _where(t, wrong, _elementwise(t, "Add", rest, other), rest)


@_operation("lerp(x, end, weight)")
def _lerp(t: ScriptTranslator, a: Any) -> TensorValue:
    step = _elementwise(t, "Mul", _elementwise(t, "Sub", a.end, a.x), a.weight)
    return _elementwise(t, "Add", a.x, step)


def _clamped(t: ScriptTranslator, x: Any, low: Any, high: Any) -> TensorValue:
    dtype = _promoted(t, x, *(bound for bound in (low, high) if bound is not None))
    result = _cast(t, t.tensor(x), dtype)
    if all(bound is None or isinstance(bound, NUMBERS) for bound in (low, high)):
        bounds = ["" if bound is None else t.number(bound, dtype or "float32") for bound in (low, high)]
        return t.new(t.build.one("Clip", result.name, *bounds), dtype, result.rank)
    for op, bound in (("Max", low), ("Min", high)):
        if bound is not None:
            result = _elementwise(t, op, result, bound)
    return result


def _where(t: ScriptTranslator, condition: Any, one: Any, two: Any) -> TensorValue:
    dtype = _promoted(t, one, two)
    names = [_name(t, condition, "bool"), _name(t, one, dtype), _name(t, two, dtype)]
    return t.new(t.build.one("Where", *names), dtype, _rank(t, condition, one, two))


@_operation("masked_fill(x, mask, value)")
def _masked_fill(t: ScriptTranslator, a: Any) -> TensorValue:
    x = t.tensor(a.x)
    value = a.value if isinstance(a.value, NUMBERS) else _cast(t, t.tensor(a.value), x.dtype)
    names = [_name(t, a.mask, "bool"), _name(t, value, x.dtype), x.name]
    return t.new(t.build.one("Where", *names), x.dtype, _rank(t, a.mask, x))


def _dense(t: ScriptTranslator, value: Any, weight: Any, bias: Any = None) -> TensorValue:
    x = t.tensor(value)
    result = t.new(t.build.one("MatMul", x.name, _transposed(t, weight)), t.tensor(weight).dtype, x.rank)
    return result if bias is None else _elementwise(t, "Add", result, bias)


def _transposed(t: ScriptTranslator, weight: Any) -> str:
    """Return the name of a transposed matrix; of a stored one as a constant."""
    if t.stored_leaf(weight) is not None and t.tensor(weight).rank == 2:
        return t.changed(weight, TRANSPOSE)
    return t.build.one("Transpose", t.tensor(weight).name, perm=(1, 0))


@_operation("matmul mm bmm mv dot vdot __matmul__(x, other)")
def _matmul(t: ScriptTranslator, a: Any) -> TensorValue:
    x, other = t.tensor(a.x), t.tensor(a.other)
    require(x.dtype == other.dtype or None in (x.dtype, other.dtype), "a product of different types")
    rank = None
    if x.rank is not None and other.rank is not None:
        rank = max(x.rank, other.rank, 2) - (x.rank == 1) - (other.rank == 1)
    return t.new(t.build.one("MatMul", x.name, other.name), x.dtype, rank)


@_operation("outer ger(x, other)")
def _outer(t: ScriptTranslator, a: Any) -> TensorValue:
    column = t.new(
        t.build.one("Unsqueeze", t.tensor(a.x).name, t.build.number([1], "int64")), t.tensor(a.x).dtype, 2
    )
    return _elementwise(t, "Mul", column, a.other)


@_operation("addmm baddbmm addmv(x, one, two, beta=1, alpha=1)")
def _addmm(t: ScriptTranslator, a: Any) -> TensorValue:
    product = _scaled(t, _matmul(t, SimpleNamespace(x=a.one, other=a.two)), a.alpha)
    return _elementwise(t, "Add", _scaled(t, a.x, a.beta), product)


@_operation("bilinear(x, other, weight, bias=None)")
def _bilinear(t: ScriptTranslator, a: Any) -> TensorValue:
    x, other, weight = (t.tensor(operand) for operand in (a.x, a.other, a.weight))
    name = t.build.one("Einsum", x.name, weight.name, other.name, equation="...i,oij,...j->...o")
    result = t.new(name, weight.dtype, x.rank)
    return result if a.bias is None else _elementwise(t, "Add", result, a.bias)


@_operation("einsum(equation, tensors, path=None)")
def _einsum(t: ScriptTranslator, a: Any) -> TensorValue:
    tensors = [t.tensor(tensor) for tensor in a.tensors]
    require(isinstance(a.equation, str) and len({tensor.dtype for tensor in tensors}) == 1, "an einsum")
    result = a.equation.replace(" ", "").partition("->")
    rank = len(result[2]) if result[1] and "." not in a.equation else None
    name = t.build.one("Einsum", *(tensor.name for tensor in tensors), equation=a.equation)
    return t.new(name, tensors[0].dtype, rank)


@_operation(
    "scaled_dot_product_attention(q, k, v, mask=None, dropout_p=0.0, is_causal=False, scale=None, "
    "enable_gqa=False)",
)
def _attention(t: ScriptTranslator, a: Any) -> TensorValue:
    require(a.dropout_p == 0 and a.enable_gqa is False, "dropout or groups in attention")
    q, k, v = (t.tensor(operand) for operand in (a.q, a.k, a.v))
    if a.scale is None:
        extent = t.build.one("Shape", q.name, start=-1)
        width = t.build.one("Cast", extent, to=q.dtype or "float32")
        scaled = t.build.one("Div", q.name, t.build.one("Sqrt", width))
    else:
        scaled = t.build.one("Mul", q.name, t.number(a.scale, q.dtype or "float32"))
    rank = k.rank or q.rank or v.rank
    require(rank is not None, "attention on a tensor with an unknown number of axes")
    axes = [*range(rank or 0)]
    axes[-2:] = axes[-1], axes[-2]
    scores = t.new(
        t.build.one("MatMul", scaled, t.build.one("Transpose", k.name, perm=tuple(axes))), q.dtype, rank
    )
    mask = a.mask
    if a.is_causal:
        require(mask is None, "two masks")
        shape = t.build.one("Shape", scores.name, start=-2)
        ones = t.build.one("ConstantOfShape", shape, value=_filled(1, "int64"))
        lower = t.build.one("Trilu", ones, upper=0)
        mask = t.new(t.build.one("Cast", lower, to="bool"), "bool", 2)
    if mask is not None and t.tensor(mask).dtype == "bool":
        scores = _where(t, mask, scores, -math.inf)
    elif mask is not None:
        scores = _elementwise(t, "Add", scores, mask)
    weights = t.build.one("Softmax", scores.name, axis=-1)
    return t.new(t.build.one("MatMul", weights, v.name), v.dtype, rank)


@_operation(
    "_native_multi_head_attention(q, k, v, width, heads, weight, bias, out_weight, out_bias, mask=None, "
    "need_weights=True, average=True, mask_type=None)",
)
def _fused_attention(t: ScriptTranslator, a: Any) -> list[Any]:
    require(a.mask is None and _is_same(t, a.q, a.k) and _is_same(t, a.k, a.v), "attention to another tensor")
    require(a.need_weights is False, "weights of attention")
    x = _dense(t, a.q, a.weight, a.bias)
    heads = t.build.number([0, 0, a.heads, -1], "int64")
    q, k, v = (
        t.new(
            t.build.one("Transpose", t.build.one("Reshape", gate.name, heads), perm=(0, 2, 1, 3)), x.dtype, 4
        )
        for gate in _gates(t, x, 3)
    )
    mixed = compute(t, "scaled_dot_product_attention", q, k, v)
    rows = t.build.one("Transpose", mixed.name, perm=(0, 2, 1, 3))
    joined = t.new(t.build.one("Reshape", rows, t.build.number([0, 0, -1], "int64")), x.dtype, 3)
    return [_dense(t, joined, a.out_weight, a.out_bias), UnknownValue("weights of attention")]


@_operation(
    "_transformer_encoder_layer_fwd(x, width, heads, weight, bias, out_weight, out_bias, gelu, norm_first, "
    "eps, norm1_weight, norm1_bias, norm2_weight, norm2_bias, ffn1_weight, ffn1_bias, ffn2_weight, "
    "ffn2_bias, mask=None, mask_type=None)",
)
def _encoder_layer(t: ScriptTranslator, a: Any) -> TensorValue:
    def norm(x: TensorValue, weight: Any, bias: Any) -> TensorValue:
        inputs = (t.tensor(weight).name, t.tensor(bias).name)
        return _applied(t, "LayerNormalization", x, *inputs, axis=-1, epsilon=float(a.eps))

    def attend(x: TensorValue) -> TensorValue:
        settings = (a.width, a.heads, a.weight, a.bias, a.out_weight, a.out_bias, a.mask, False)
        result: TensorValue = compute(t, "_native_multi_head_attention", x, x, x, *settings)[0]
        return result

    def expand(x: TensorValue) -> TensorValue:
        inner = _dense(t, x, a.ffn1_weight, a.ffn1_bias)
        return _dense(t, _elementwise(t, "Gelu" if a.gelu else "Relu", inner), a.ffn2_weight, a.ffn2_bias)

    x = t.tensor(a.x)
    for part, weight, bias in (
        (attend, a.norm1_weight, a.norm1_bias),
        (expand, a.norm2_weight, a.norm2_bias),
    ):
        if a.norm_first:
            x = _elementwise(t, "Add", x, part(norm(x, weight, bias)))
        else:
            x = norm(_elementwise(t, "Add", x, part(x)), weight, bias)
    return x


@_operation("size(x, dim=None)")
def _size(t: ScriptTranslator, a: Any) -> Any:
    x = t.tensor(a.x)
    if a.dim is not None:
        return t.extent(x, a.dim)
    if x.rank is not None:
        return [t.extent(x, n) for n in range(x.rank)]
    return SizesValue((ShapeRange(x),))


@_operation("dim ndimension(x)")
def _dim(t: ScriptTranslator, a: Any) -> Any:
    x = t.tensor(a.x)
    return x.rank if x.rank is not None else NumberValue(_rank_name(t, x), "int64")


@_operation("is_floating_point(x)")
def _is_floating(t: ScriptTranslator, a: Any) -> bool:
    dtype = t.tensor(a.x).dtype
    require(dtype is not None, "an unknown type")
    return _category(dtype or "") == 2


@_operation("dtype(x)")
def _dtype(t: ScriptTranslator, a: Any) -> int | None:
    dtype = t.tensor(a.x).dtype
    return next((code for code, name in TORCH_TYPES.items() if name == dtype), None)


@_operation("append(values, value)")
def _append(t: ScriptTranslator, a: Any) -> Any:
    return change_list(t, [a.values, a.value])


@_operation("_set_item(values, at, value)")
def _set_item(t: ScriptTranslator, a: Any) -> Any:
    return change_list(t, [a.values, a.at, a.value])


@_operation("list(values)")
def _list(_t: ScriptTranslator, a: Any) -> Any:
    require(isinstance(a.values, list), "a list of a tensor")
    return [*a.values]


@_operation("reshape view _unsafe_view _reshape_alias(x, shape)")
def _reshape(t: ScriptTranslator, a: Any) -> TensorValue:
    x = t.tensor(a.x)
    require(isinstance(a.shape, list | SizesValue), "a view as another type")
    rank = len(a.shape) if isinstance(a.shape, list) else None
    return t.view(x, t.build.one("Reshape", x.name, t.sizes(a.shape), allowzero=1), rank)


@_operation("flatten(x, start=0, end=-1)")
def _flatten(t: ScriptTranslator, a: Any) -> TensorValue:
    x = t.tensor(a.x)
    if (a.start, a.end) == (1, -1):
        return t.view(x, t.build.one("Flatten", x.name, axis=1), 2)
    if (a.start, a.end) == (0, -1):
        return t.view(x, t.build.one("Reshape", x.name, t.build.number([-1], "int64")), 1)
    parts: list[Any] = [ShapeRange(x, 0, a.start), -1]
    if a.end != -1:
        parts.append(ShapeRange(x, a.end + 1))
    rank = None
    if x.rank is not None:
        rank = x.rank - (a.end % x.rank - a.start % x.rank)
    shape = t.sizes(SizesValue(tuple(parts)))
    return t.view(x, t.build.one("Reshape", x.name, shape, allowzero=1), rank)


@_operation("unflatten(x, dim, sizes)")
def _unflatten(t: ScriptTranslator, a: Any) -> TensorValue:
    x = t.tensor(a.x)
    parts: list[Any] = [ShapeRange(x, 0, a.dim), *a.sizes]
    if a.dim != -1:
        parts.append(ShapeRange(x, a.dim + 1))
    rank = None if x.rank is None else x.rank + len(a.sizes) - 1
    return t.view(x, t.build.one("Reshape", x.name, t.sizes(SizesValue(tuple(parts))), allowzero=1), rank)


@_operation("squeeze(x, dim=None)")
def _squeeze(t: ScriptTranslator, a: Any) -> TensorValue:
    """Axes of another extent than 1 are left; that is decided by the shape."""
    x = t.tensor(a.x)
    if a.dim is None:
        return t.view(x, t.build.one("Squeeze", x.name), None)
    result = x
    axes = _ints(a.dim)
    require(len(axes) == 1, "several axes to squeeze")
    (axis,) = axes
    one = t.build.number([1], "int64")
    extent = _extent_name(t, x, axis)
    # Before, the axis itself unless its extent is 1, and after.
    kept = t.build.one("Compress", extent, t.build.one("Not", t.build.one("Equal", extent, one)), axis=0)
    parts = [t.build.one("Shape", x.name, end=axis), kept]
    if axis != -1:
        parts.append(t.build.one("Shape", x.name, start=axis + 1))
    shape = t.build.one("Concat", *parts, axis=0)
    return t.view(result, t.build.one("Reshape", x.name, shape, allowzero=1), None)


@_operation("unsqueeze(x, dim)")
def _unsqueeze(t: ScriptTranslator, a: Any) -> TensorValue:
    x = t.tensor(a.x)
    rank = None if x.rank is None else x.rank + 1
    return t.view(x, t.build.one("Unsqueeze", x.name, t.build.number(_ints(a.dim), "int64")), rank)


@_operation("permute(x, dims)")
def _permute(t: ScriptTranslator, a: Any) -> TensorValue:
    x, axes = t.tensor(a.x), _ints(a.dims)
    perm = tuple(axis % len(axes) for axis in axes)
    return t.view(x, t.build.one("Transpose", x.name, perm=perm), len(axes))


def _exchanged(t: ScriptTranslator, x: TensorValue, one: int, two: int) -> TensorValue:
    if x.rank is None:
        raise OpaqueError("a transposition with an unknown number of axes")
    axes = [*range(x.rank)]
    axes[one], axes[two] = axes[two], axes[one]
    return t.view(x, t.build.one("Transpose", x.name, perm=tuple(axes)), x.rank)


@_operation("t numpy_T(x)")
def _matrix_transpose(t: ScriptTranslator, a: Any) -> TensorValue:
    x = t.tensor(a.x)
    require(x.rank in (1, 2), "a transposition with an unknown number of axes")
    if x.rank == 2 and t.stored_leaf(a.x) is not None:
        return t.view(x, t.changed(a.x, Permute((1, 0))), 2)
    return _exchanged(t, x, 0, -1)


@_operation("movedim moveaxis(x, source, destination)")
def _movedim(t: ScriptTranslator, a: Any) -> TensorValue:
    x = t.tensor(a.x)
    if x.rank is None:
        raise OpaqueError("a transposition with an unknown number of axes")
    order = [axis for axis in range(x.rank) if axis not in {axis % (x.rank or 1) for axis in _ints(a.source)}]
    pairs = zip((axis % x.rank for axis in _ints(a.destination)), _ints(a.source), strict=True)
    for destination, source in sorted(pairs):
        order.insert(destination, source % x.rank)
    return t.view(x, t.build.one("Transpose", x.name, perm=tuple(order)), x.rank)


@_operation("cat concat concatenate(tensors, dim=0)")
def _cat(t: ScriptTranslator, a: Any) -> TensorValue:
    values = a.tensors.take(None) if isinstance(a.tensors, PartsValue) else a.tensors
    dtype = _promoted(t, *values)
    names = [_name(t, value, dtype) for value in values]
    return t.new(t.build.one("Concat", *names, axis=a.dim), dtype, _rank(t, *values))


@_operation("stack(tensors, dim=0)")
def _stack(t: ScriptTranslator, a: Any) -> TensorValue:
    values = a.tensors.take(None) if isinstance(a.tensors, PartsValue) else a.tensors
    dtype, rank = _promoted(t, *values), _rank(t, *values)
    axes = t.build.number([a.dim], "int64")
    names = [t.build.one("Unsqueeze", _name(t, value, dtype), axes) for value in values]
    return t.new(t.build.one("Concat", *names, axis=a.dim), dtype, None if rank is None else rank + 1)


def _sliced(
    t: ScriptTranslator, x: TensorValue, bounds: tuple[Any, Any], axis: int, step: int = 1
) -> TensorValue:
    starts, ends = (t.sizes([bound]) for bound in bounds)
    listed = [starts, ends, t.build.number([axis], "int64"), t.build.number([step], "int64")]
    return t.view(x, t.build.one("Slice", x.name, *listed), x.rank)


@_operation("slice(x, dim=0, start=None, end=None, step=1)")
def _slice(t: ScriptTranslator, a: Any) -> Any:
    if isinstance(a.x, list):
        return a.x[a.dim : a.start : a.end or 1]
    start = 0 if a.start is None else a.start
    end = LAST if a.end is None else a.end
    if (start, end, a.step) == (0, LAST, 1):
        # The whole tensor: what is assigned to it overwrites that.
        return a.x
    return _sliced(t, t.tensor(a.x), (start, end), a.dim, a.step)


@_operation("narrow(x, dim, start, length)")
def _narrow(t: ScriptTranslator, a: Any) -> TensorValue:
    end = apply_numbers(t, "add", [a.start, a.length], {})
    return _sliced(t, t.tensor(a.x), (a.start, end), a.dim)


@_operation("select(x, dim, index)")
def _select(t: ScriptTranslator, a: Any) -> TensorValue:
    x = t.tensor(a.x)
    rank = None if x.rank is None else x.rank - 1
    return t.view(x, t.build.one("Gather", x.name, t.number(a.index, "int64"), axis=a.dim), rank)


def _parts(t: ScriptTranslator, x: TensorValue, sizes: Sequence[int], axis: int) -> list[TensorValue]:
    names = t.build.add("Split", (x.name, t.build.number([*sizes], "int64")), len(sizes), axis=axis)
    return [t.part(x, name, x.rank) for name in names]


def _equal_parts(t: ScriptTranslator, x: TensorValue, size: str, axis: int, count: int) -> list[TensorValue]:
    """Return parts of a size [1] along an axis; the last part may be smaller."""
    if count == 1:
        return [x]
    extent = _extent_name(t, x, axis)
    rest = t.build.one("Sub", extent, t.build.one("Mul", size, t.build.number([count - 1], "int64")))
    listed = t.build.one("Concat", *[size] * (count - 1), rest, axis=0)
    names = t.build.add("Split", (x.name, listed), count, axis=axis)
    return [t.part(x, name, x.rank) for name in names]


def _known_extent(t: ScriptTranslator, x: TensorValue, axis: int) -> int:
    extent = t.extent(x, axis)
    if not isinstance(extent, int):
        raise OpaqueError("parts of unknown number")
    return extent


@_operation("split unsafe_split(x, size, dim=0)")
def _split(t: ScriptTranslator, a: Any) -> Any:
    x = t.tensor(a.x)
    if isinstance(a.size, list):
        return _parts(t, x, _ints(a.size), a.dim)
    (entries,) = _ints(a.size)
    size = t.build.number([entries], "int64")

    def take(count: int | None) -> list[TensorValue]:
        number = -(-_known_extent(t, x, a.dim) // entries) if count is None else count
        return _equal_parts(t, x, size, a.dim, number)

    return PartsValue(take)


@_operation("chunk unsafe_chunk(x, chunks, dim=0)")
def _chunk(t: ScriptTranslator, a: Any) -> PartsValue:
    x, (most,) = t.tensor(a.x), _ints(a.chunks)

    def take(count: int | None) -> list[TensorValue]:
        # There may be fewer parts: their size is the extent divided by the number, rounded up.
        extent = _extent_name(t, x, a.dim)
        whole = t.build.one("Add", extent, t.build.number([most - 1], "int64"))
        size = t.build.one("Div", whole, t.build.number([most], "int64"))
        known = t.extent(x, a.dim) if count is None else None
        if isinstance(known, int):
            count = -(-known // -(-known // most))
        return _equal_parts(t, x, size, a.dim, most if count is None else count)

    return PartsValue(take)


@_operation("unbind(x, dim=0)")
def _unbind(t: ScriptTranslator, a: Any) -> PartsValue:
    x = t.tensor(a.x)
    rank = None if x.rank is None else x.rank - 1

    def take(count: int | None) -> list[TensorValue]:
        count = _known_extent(t, x, a.dim) if count is None else count
        axes = t.build.number([a.dim], "int64")
        return [
            t.view(x, t.build.one("Squeeze", part.name, axes), rank)
            for part in _parts(t, x, [1] * count, a.dim)
        ]

    return PartsValue(take)


@_operation("expand(x, size, implicit=False)")
def _expand(t: ScriptTranslator, a: Any) -> TensorValue:
    x = t.tensor(a.x)
    require(isinstance(a.size, list), "a shape of unknown length")
    # -1 leaves an extent as it is, and so does 1 in ONNX's operator.
    sizes = [1 if isinstance(extent, int) and extent == -1 else extent for extent in a.size]
    return t.view(x, t.build.one("Expand", x.name, t.sizes(sizes)), len(sizes))


def _shaped_as(t: ScriptTranslator, op: str, a: Any, **attributes: Any) -> TensorValue:
    x, other = t.tensor(a.x), t.tensor(a.other)
    return t.view(x, t.build.one(op, x.name, t.build.one("Shape", other.name), **attributes), other.rank)


@_operation("repeat tile(x, repeats)")
def _repeat(t: ScriptTranslator, a: Any) -> TensorValue:
    x = t.tensor(a.x)
    require(isinstance(a.repeats, list) and x.rank is not None, "repetitions of an unknown number of axes")
    more = len(a.repeats) - (x.rank or 0)
    name = x.name
    if more > 0:
        name = t.build.one("Unsqueeze", name, t.build.number([*range(more)], "int64"))
    repeats = [*[1] * -more, *a.repeats]
    return t.new(t.build.one("Tile", name, t.sizes(repeats)), x.dtype, len(repeats))


@_operation("flip(x, dims)")
def _flip(t: ScriptTranslator, a: Any) -> TensorValue:
    axes = _ints(a.dims)
    listed = [[-1] * len(axes), [-LAST] * len(axes), axes, [-1] * len(axes)]
    return _applied(t, "Slice", a.x, *(t.build.number(axis, "int64") for axis in listed))


@_operation("roll(x, shifts, dims=[])")
def _roll(t: ScriptTranslator, a: Any) -> TensorValue:
    x = t.tensor(a.x)
    require(len(_ints(a.dims)) == len(_ints(a.shifts)), "a roll of all entries")
    for shift, axis in zip(_ints(a.shifts), _ints(a.dims), strict=True):
        if shift:
            head, tail = _sliced(t, x, (-shift, LAST), axis), _sliced(t, x, (0, -shift), axis)
            x = t.new(t.build.one("Concat", head.name, tail.name, axis=axis), x.dtype, x.rank)
    return x


_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def _padded(t: ScriptTranslator, x: TensorValue, pads: Any, mode: str, value: Any = None) -> TensorValue:
    """Pairs of numbers from the last axis on."""
    listed = _ints(pads)
    count = len(listed) // 2
    axes = [-1 - n for n in range(count)]
    widths = t.build.number([*listed[::2], *listed[1::2]], "int64")
    fill = "" if not value else t.number(value, x.dtype or "float32")
    return _applied(t, "Pad", x, widths, fill, t.build.number(axes, "int64"), mode=mode)


@_operation("pad(x, pad, mode='constant', value=None)")
def _pad(t: ScriptTranslator, a: Any) -> TensorValue:
    require(a.mode in _MODES, "an unknown mode of padding")
    return _padded(t, t.tensor(a.x), a.pad, _MODES[a.mode], a.value)


@_operation("embedding(weight, indices, padding_idx=-1, scale_grad=False, sparse=False)")
def _embedding(t: ScriptTranslator, a: Any) -> TensorValue:
    weight, indices = t.tensor(a.weight), _integer(t, a.indices)
    rank = None if indices.rank is None else indices.rank + 1
    return t.new(t.build.one("Gather", weight.name, indices.name, axis=0), weight.dtype, rank)


@_operation("index(x, indices)")
def _index(t: ScriptTranslator, a: Any) -> TensorValue:
    x, chosen = t.tensor(a.x), [n for n, index in enumerate(a.indices) if index is not None]
    require(len(chosen) == 1, "positions on several axes")
    (axis,) = chosen
    positions = _integer(t, a.indices[axis])
    rank = None if x.rank is None or positions.rank is None else x.rank + positions.rank - 1
    return t.new(t.build.one("Gather", x.name, positions.name, axis=axis), x.dtype, rank)


@_operation("one_hot(x, num_classes=-1)")
def _one_hot(t: ScriptTranslator, a: Any) -> TensorValue:
    require(a.num_classes > 0, "a number of classes that depends on a tensor")
    x = _integer(t, a.x)
    values = t.build.number([0, 1], "int64")
    name = t.build.one("OneHot", x.name, t.build.number(a.num_classes, "int64"), values, axis=-1)
    return t.new(name, "int64", None if x.rank is None else x.rank + 1)


def _requested_type(a: Any, default: str) -> str:
    if a.dtype is None:
        return default
    require(a.dtype in TORCH_TYPES, "an unknown type")
    return TORCH_TYPES[a.dtype]


_NEW = "dtype=None, layout=None, device=None, pin_memory=None, memory_format=None, requires_grad=None"


def _new_tensor(t: ScriptTranslator, shape: str, value: Any, dtype: str, rank: int | None) -> TensorValue:
    if isinstance(value, NUMBERS) and not isinstance(value, NumberValue):
        return t.new(t.build.one("ConstantOfShape", shape, value=_filled(value, dtype)), dtype, rank)
    return t.new(t.build.one("Expand", _name(t, value, dtype), shape), dtype, rank)


def _length_of(size: Any) -> int | None:
    return len(size) if isinstance(size, list) else None


@_operation(f"full(size, value, {_NEW})")
def _full(t: ScriptTranslator, a: Any) -> TensorValue:
    dtype = _requested_type(a, _promoted(t, a.value) or "float32")
    return _new_tensor(t, t.sizes(a.size), a.value, dtype, _length_of(a.size))


def _of_type(t: ScriptTranslator, a: Any, value: Any) -> TensorValue:
    dtype = _requested_type(a, t.tensor(a.x).dtype or "float32")
    return _new_tensor(t, t.sizes(a.size), value, dtype, _length_of(a.size))


def _like(t: ScriptTranslator, a: Any, value: Any) -> TensorValue:
    x = t.tensor(a.x)
    require(x.dtype is not None, "an unknown type")
    return _new_tensor(t, t.build.one("Shape", x.name), value, _requested_type(a, x.dtype or ""), x.rank)


@_operation("copy(x, source, non_blocking=False)")
def _copy(t: ScriptTranslator, a: Any) -> TensorValue:
    x, source = t.tensor(a.x), t.tensor(a.source)
    name = t.build.one("Expand", source.name, t.build.one("Shape", x.name))
    return t.new(name, source.dtype, x.rank)


@_operation(f"tensor scalar_tensor(data, {_NEW})")
def _tensor(t: ScriptTranslator, a: Any) -> TensorValue:
    import numpy as np

    if isinstance(a.data, NumberValue):
        number = t.as_number(a.data)
        dtype = _requested_type(a, "float32" if number.dtype == "float64" else number.dtype)
        return t.new(t.number(number, dtype), dtype, 0)
    array = np.asarray(a.data)
    require(array.dtype.kind in "bif", "a tensor of numbers that depend on tensors")
    dtype = _requested_type(a, {"b": "bool", "i": "int64", "f": "float32"}[array.dtype.kind])
    return t.new(t.build.number(a.data, dtype), dtype, array.ndim)


@_operation(f"arange(start, end=None, step=1, {_NEW})")
def _arange(t: ScriptTranslator, a: Any) -> TensorValue:
    start, end = (0, a.start) if a.end is None else (a.start, a.end)
    default = _promoted(t, start, end, a.step) or "int64"
    dtype = _requested_type(a, default)
    names = [t.number(bound, dtype) for bound in (start, end, a.step)]
    return t.new(t.build.one("Range", *names), dtype, 1)


@_operation(f"eye(n, m=None, {_NEW})")
def _eye(t: ScriptTranslator, a: Any) -> TensorValue:
    shape = t.sizes([a.n, a.n if a.m is None else a.m])
    dtype = _requested_type(a, "float32")
    zeros = t.build.one("ConstantOfShape", shape, value=_filled(0, dtype))
    return t.new(t.build.one("EyeLike", zeros), dtype, 2)


@_operation(
    "to(x, one=None, two=None, three=None, four=None, five=None, dtype=None, device=None, layout=None, "
    "pin_memory=None, non_blocking=None, copy=None, memory_format=None)",
)
def _to(t: ScriptTranslator, a: Any) -> TensorValue:
    x = t.tensor(a.x)
    if isinstance(a.one, _TENSORS):
        return _cast(t, x, t.tensor(a.one).dtype)
    codes = [code for code in (a.dtype, a.one, a.two) if type(code) is int]
    if not codes:
        return x
    require(codes[0] in TORCH_TYPES, "an unknown type")
    return _cast(t, x, TORCH_TYPES[codes[0]])


@_operation("int Int item Float float bool Bool IntImplicit FloatImplicit ScalarImplicit(x)")
def _number_of_tensor(t: ScriptTranslator, a: Any) -> NumberValue:
    return t.as_number(a.x)


def _define_conversions() -> None:
    kinds = {"int": "int64", "Int": "int64", "IntImplicit": "int64", "float": "float64", "Float": "float64"}
    kinds |= {"FloatImplicit": "float64", "bool": "bool", "Bool": "bool"}
    for name, kind in kinds.items():

        def convert(t: ScriptTranslator, a: Any, kind: str = kind) -> NumberValue:
            return NumberValue(t.number(t.as_number(a.x), kind), kind)

        _operation(f"{name}(x)")(convert)
    for name, kind in {
        "double": "float64",
        "half": "float16",
        "long": "int64",
        "bfloat16": "bfloat16",
    }.items():
        _operation(f"{name}(x)")(lambda t, a, kind=kind: _cast(t, t.tensor(a.x), kind))  # type: ignore[misc]


_define_conversions()


def _axes(dim: Any) -> list[int] | None:
    """Return the axes of a reduction, None for all."""
    if dim is None or dim == []:
        return None
    return _ints(dim)


def _reduced(t: ScriptTranslator, op: str, x: TensorValue, dim: Any, keepdim: Any) -> TensorValue:
    require(isinstance(keepdim, bool), "arguments of another version of the operation")
    axes = _axes(dim)
    listed = "" if axes is None else t.build.number(axes, "int64")
    rank = x.rank if keepdim else 0 if axes is None else None if x.rank is None else x.rank - len(axes)
    return t.new(t.build.one(op, x.name, listed, keepdims=int(keepdim)), x.dtype, rank)


def _reduced_truth(t: ScriptTranslator, op: str, a: Any) -> TensorValue:
    numbers = _cast(t, _cast(t, t.tensor(a.x), "bool"), "int64")
    return _cast(t, _reduced(t, op, numbers, a.dim, a.keepdim), "bool")


def _define_reductions() -> None:
    for name, op, whole in (
        ("mean", "ReduceMean", False),
        ("sum", "ReduceSum", True),
        ("prod", "ReduceProd", True),
        ("logsumexp", "ReduceLogSumExp", False),
        ("amax", "ReduceMax", False),
        ("amin", "ReduceMin", False),
    ):

        def reduce(t: ScriptTranslator, a: Any, op: str = op, whole: bool = whole) -> TensorValue:
            x = t.tensor(a.x)
            if a.dtype is not None:
                x = _cast(t, x, _requested_type(a, ""))
            elif whole and x.dtype is not None and _category(x.dtype) < 2:
                x = _cast(t, x, "int64")
            return _reduced(t, op, x, a.dim, a.keepdim)

        _operation(f"{name}(x, dim=None, keepdim=False, dtype=None)")(reduce)


_define_reductions()


def _define_extremes() -> None:
    for name, op, pair, position in (
        ("max", "ReduceMax", "Max", "ArgMax"),
        ("min", "ReduceMin", "Min", "ArgMin"),
    ):

        def extreme(t: ScriptTranslator, a: Any, ops: tuple[str, str, str] = (op, pair, position)) -> Any:
            x = t.tensor(a.x)
            if isinstance(a.dim, _TENSORS):
                return _elementwise(t, ops[1], x, a.dim)
            if a.dim is None:
                return _reduced(t, ops[0], x, None, keepdim=False)
            values = _reduced(t, ops[0], x, a.dim, a.keepdim)
            where = t.build.one(ops[2], x.name, axis=a.dim, keepdims=int(a.keepdim))
            return [values, t.new(where, "int64", values.rank)]

        def location(t: ScriptTranslator, a: Any, op: str = position) -> TensorValue:
            x = t.tensor(a.x)
            name, rank = x.name, x.rank
            if a.dim is None:
                require(a.keepdim is False, "all axes of a position kept")
                name, rank = t.build.one("Reshape", name, t.build.number([-1], "int64")), 1
            rank = rank if a.keepdim or rank is None else rank - 1
            positions = t.build.one(op, name, axis=0 if a.dim is None else a.dim, keepdims=int(a.keepdim))
            return t.new(positions, "int64", rank)

        _operation(f"{name}(x, dim=None, keepdim=False)")(extreme)
        _operation(f"arg{name}(x, dim=None, keepdim=False)")(location)


_define_extremes()


def _variance(t: ScriptTranslator, a: Any) -> TensorValue:
    x, dim = t.tensor(a.x), a.dim
    correction: int = 1 if a.correction is None else a.correction
    if isinstance(dim, bool):
        correction, dim = int(dim), None
    elif a.unbiased is not None:
        require(isinstance(a.unbiased, bool), "arguments of another version of the operation")
        correction = int(a.unbiased)
    mean = _reduced(t, "ReduceMean", x, dim, keepdim=True)
    centered = _elementwise(t, "Sub", x, mean)
    total = _reduced(t, "ReduceSum", _elementwise(t, "Mul", centered, centered), dim, a.keepdim)
    count = t.build.one("Div", t.build.one("Size", x.name), t.build.one("Size", mean.name))
    count = t.build.one("Sub", count, t.build.number(correction, "int64"))
    count = t.build.one("Max", count, t.build.number(0, "int64"))
    return _elementwise(
        t, "Div", total, t.new(t.build.one("Cast", count, to=x.dtype or "float32"), x.dtype, 0)
    )


@_operation("norm linalg_vector_norm linalg_norm(x, p=2, dim=None, keepdim=False, dtype=None)")
def _norm(t: ScriptTranslator, a: Any) -> TensorValue:
    require(a.dtype is None and isinstance(a.keepdim, bool), "a norm in another type")
    op = {2: "ReduceL2", 1: "ReduceL1", math.inf: "ReduceMax"}.get(2 if a.p is None else a.p)
    if op is None:
        raise OpaqueError("an unusual norm")
    x = t.tensor(a.x)
    return _reduced(t, op, _elementwise(t, "Abs", x) if op == "ReduceMax" else x, a.dim, a.keepdim)


@_operation("cosine_similarity(x, other, dim=1, eps=1e-08)")
def _cosine(t: ScriptTranslator, a: Any) -> TensorValue:
    # Each length is bounded below on its own.
    units = []
    for value in (a.x, a.other):
        length = _reduced(t, "ReduceL2", t.tensor(value), a.dim, keepdim=True)
        units.append(_elementwise(t, "Div", value, _clamped(t, length, a.eps, None)))
    return _reduced(t, "ReduceSum", _elementwise(t, "Mul", *units), a.dim, keepdim=False)


@_operation("cumsum(x, dim, dtype=None)")
def _cumsum(t: ScriptTranslator, a: Any) -> TensorValue:
    x = t.tensor(a.x)
    whole = x.dtype is not None and _category(x.dtype) < 2
    x = _cast(t, x, _requested_type(a, "int64" if whole else x.dtype or "") or None)
    return _applied(t, "CumSum", x, t.build.number(a.dim, "int64"))


@_operation("cumprod(x, dim, dtype=None)")
def _cumprod(t: ScriptTranslator, a: Any) -> TensorValue:
    require(a.dtype is None, "a product in another type")
    return _applied(t, "CumProd", _floating(t, a.x), t.build.number(a.dim, "int64"))


def _soft(op: str) -> _Handler:
    def handler(t: ScriptTranslator, a: Any) -> TensorValue:
        x = _cast(t, _floating(t, a.x), None if a.dtype is None else _requested_type(a, ""))
        require(type(a.dim) is int, "an axis that depends on the shape")
        return _applied(t, op, x, axis=a.dim)

    return handler


_operation("softmax _softmax(x, dim, dtype=None)")(_soft("Softmax"))
_operation("log_softmax _log_softmax(x, dim, dtype=None)")(_soft("LogSoftmax"))


@_operation("topk(x, k, dim=-1, largest=True, sorted=True)")
def _topk(t: ScriptTranslator, a: Any) -> list[TensorValue]:
    x = t.tensor(a.x)
    names = t.build.add("TopK", (x.name, t.sizes([a.k])), 2, axis=a.dim, largest=int(a.largest))
    return [t.new(names[0], x.dtype, x.rank), t.new(names[1], "int64", x.rank)]


@_operation("var_mean(x, dim=None, unbiased=None, keepdim=False, correction=None)")
def _var_mean(t: ScriptTranslator, a: Any) -> list[TensorValue]:
    dim = None if isinstance(a.dim, bool) else a.dim
    return [_variance(t, a), _reduced(t, "ReduceMean", t.tensor(a.x), dim, a.keepdim)]


@_operation("sort(x, dim=-1, descending=False)")
def _sort(t: ScriptTranslator, a: Any) -> list[TensorValue]:
    x = t.tensor(a.x)
    extent = _extent_name(t, x, a.dim)
    names = t.build.add("TopK", (x.name, extent), 2, axis=a.dim, largest=int(a.descending))
    return [t.new(names[0], x.dtype, x.rank), t.new(names[1], "int64", x.rank)]


def _channel_values(t: ScriptTranslator, value: Any, x: TensorValue, fill: float) -> str:
    """Return the name of a number for each channel, which is the same one if none are stored."""
    if value is not None:
        return t.tensor(value).name
    extent = t.build.one("Shape", x.name, start=1, end=2)
    return t.build.one("ConstantOfShape", extent, value=_filled(fill, x.dtype or "float32"))


@_operation("batch_norm(x, weight, bias, mean, variance, training, momentum, eps, cudnn=True)")
def _batch_norm(t: ScriptTranslator, a: Any) -> TensorValue:
    x = t.tensor(a.x)
    stored = a.mean is not None and a.variance is not None
    require(stored or a.training is True, "a norm without statistics")
    require(not stored or a.training is False, "a norm in training")
    inputs = [_channel_values(t, a.weight, x, 1), _channel_values(t, a.bias, x, 0)]
    inputs += [_channel_values(t, a.mean, x, 0), _channel_values(t, a.variance, x, 1)]
    more = {} if stored else {"training_mode": 1}
    return _applied(t, "BatchNormalization", x, *inputs, epsilon=float(a.eps), **more)


@_operation("instance_norm(x, weight, bias, mean, variance, use_input_stats, momentum, eps, cudnn=True)")
def _instance_norm(t: ScriptTranslator, a: Any) -> TensorValue:
    x = t.tensor(a.x)
    inputs = [_channel_values(t, a.weight, x, 1), _channel_values(t, a.bias, x, 0)]
    if a.use_input_stats:
        require(a.mean is None, "a norm in training")
        return _applied(t, "InstanceNormalization", x, *inputs, epsilon=float(a.eps))
    inputs += [t.tensor(a.mean).name, t.tensor(a.variance).name]
    return _applied(t, "BatchNormalization", x, *inputs, epsilon=float(a.eps))


@_operation("layer_norm native_layer_norm(x, shape, weight=None, bias=None, eps=1e-05, cudnn=True)")
def _layer_norm(t: ScriptTranslator, a: Any) -> TensorValue:
    x, shape = t.tensor(a.x), _ints(a.shape)
    inputs = [_scale(t, x, shape, a.weight), *([] if a.bias is None else [t.tensor(a.bias).name])]
    return _applied(t, "LayerNormalization", x, *inputs, axis=-len(shape), epsilon=float(a.eps))


def _scale(t: ScriptTranslator, x: TensorValue, shape: Sequence[int], weight: Any) -> str:
    """Return the name of a norm's scale, ones if it has none."""
    import numpy as np

    if weight is not None:
        return t.tensor(weight).name
    require(math.prod(shape) <= 1 << 24, "a norm over too many entries")
    return t.build.number(np.ones(shape), x.dtype or "float32")


@_operation("rms_norm(x, shape, weight=None, eps=None)")
def _rms_norm(t: ScriptTranslator, a: Any) -> TensorValue:
    x, shape = t.tensor(a.x), _ints(a.shape)
    # The smallest number that changes 1, of the input's type.
    epsilons = {"float32": 2.0**-23, "float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7}
    require(a.eps is not None or x.dtype in epsilons, "an unknown type")
    epsilon = epsilons[x.dtype or ""] if a.eps is None else float(a.eps)
    scale = _scale(t, x, shape, a.weight)
    return _applied(t, "RMSNormalization", x, scale, axis=-len(shape), epsilon=epsilon)


@_operation("group_norm(x, groups, weight=None, bias=None, eps=1e-05, cudnn=True)")
def _group_norm(t: ScriptTranslator, a: Any) -> TensorValue:
    x = t.tensor(a.x)
    inputs = [_channel_values(t, a.weight, x, 1), _channel_values(t, a.bias, x, 0)]
    return _applied(t, "GroupNormalization", x, *inputs, num_groups=a.groups, epsilon=float(a.eps))


def _batched(
    t: ScriptTranslator, x: TensorValue, axes: int, run: Callable[[str], tuple[str, ...]]
) -> list[TensorValue]:
    """Return the outputs of an operator on images with a batch axis, for images with or without one."""
    single = x.rank == axes + 1
    if (single and t.is_batched) or (x.rank or axes + 2) not in (axes + 1, axes + 2):
        raise InputShapeError("another number of axes of an image")
    first = t.build.number([0], "int64")
    names = run(t.build.one("Unsqueeze", x.name, first) if single else x.name)
    names = tuple(t.build.one("Squeeze", name, first) for name in names) if single else names
    rank = axes + 1 if single else axes + 2
    return [t.new(name, x.dtype, rank) for name in names]


def _convolution(t: ScriptTranslator, a: Any, *, transposed: bool = False) -> TensorValue:
    x, weight = t.tensor(a.x), t.tensor(a.weight)
    axes = (weight.rank or 2) - 2
    require(axes > 0, "a convolution of unknown rank")
    settings: dict[str, Any] = {
        "strides": tuple(_ints(a.stride, axes)),
        "dilations": tuple(_ints(a.dilation, axes)),
        "group": a.groups,
    }
    if isinstance(a.padding, str):
        require(not transposed and a.padding in ("same", "valid"), "an unknown padding")
        # Of an odd number of entries, the larger part is added after the image.
        settings["auto_pad"] = "SAME_UPPER" if a.padding == "same" else "VALID"
        require(a.padding == "valid" or set(settings["strides"]) == {1}, "a padding with strides")
    else:
        settings["pads"] = tuple(_ints(a.padding, axes)) * 2
    if transposed:
        settings["output_padding"] = tuple(_ints(a.output_padding, axes))
    bias = [] if a.bias is None else [t.tensor(a.bias).name]
    op = "ConvTranspose" if transposed else "Conv"
    return _batched(t, x, axes, lambda name: t.build.add(op, (name, weight.name, *bias), **settings))[0]


def _window_settings(a: Any, axes: int) -> dict[str, Any]:
    kernel = _ints(a.kernel, axes)
    return {
        "kernel_shape": tuple(kernel),
        "strides": tuple(_ints(a.stride, axes) if a.stride not in (None, []) else kernel),
        "pads": tuple(_ints(a.padding, axes)) * 2,
        "ceil_mode": int(a.ceil_mode),
    }


def _define_pools() -> None:
    for axes in (1, 2, 3):

        def largest(t: ScriptTranslator, a: Any, axes: int = axes, count: int = 1) -> Any:
            settings = {**_window_settings(a, axes), "dilations": tuple(_ints(a.dilation, axes))}
            outputs = _batched(
                t, t.tensor(a.x), axes, lambda name: t.build.add("MaxPool", (name,), count, **settings)
            )
            return outputs[0]

        def average(t: ScriptTranslator, a: Any, axes: int = axes) -> Any:
            settings = {**_window_settings(a, axes), "count_include_pad": int(a.count_include_pad)}
            if a.divisor_override is not None:
                require(type(a.divisor_override) is int and a.divisor_override > 0, "a divisor")
                require(not settings["ceil_mode"], "a divisor of windows of several sizes")
                settings["count_include_pad"] = 1
            (mean,) = _batched(
                t, t.tensor(a.x), axes, lambda name: t.build.add("AveragePool", (name,), **settings)
            )
            size, divisor = math.prod(settings["kernel_shape"]), a.divisor_override
            return mean if divisor is None else _scaled(t, mean, size / divisor)

        def whole(t: ScriptTranslator, a: Any, axes: int = axes) -> Any:
            x = t.tensor(a.x)
            if all(size == 1 for size in (a.size if isinstance(a.size, list) else [a.size])):
                return _reduced(t, "ReduceMean", x, [*range(-axes, 0)], keepdim=True)
            return _adaptive(t, x, a.size if isinstance(a.size, list) else [a.size] * axes)

        def whole_max(t: ScriptTranslator, a: Any, axes: int = axes) -> Any:
            x, sizes = t.tensor(a.x), a.size if isinstance(a.size, list) else [a.size] * axes
            if all(size == 1 for size in sizes):
                largest = _reduced(t, "ReduceMax", x, [*range(-axes, 0)], keepdim=True)
            else:
                extents = _part_extents(t, x, sizes)
                require(extents is not None, "an adaptive maximum of an image of unknown size")
                largest = _pooled_parts(t, x, extents or [], "MaxPool")
            return [largest, UnknownValue("positions of an adaptive maximum")]

        _operation(f"max_pool{axes}d(x, kernel, stride=[], padding=0, dilation=1, ceil_mode=False)")(largest)
        _operation(
            f"avg_pool{axes}d(x, kernel, stride=[], padding=0, ceil_mode=False, count_include_pad=True, "
            "divisor_override=None)",
        )(average)
        _operation(f"adaptive_avg_pool{axes}d(x, size)")(whole)
        _operation(f"adaptive_max_pool{axes}d(x, size)")(whole_max)


_define_pools()


def _adaptive(t: ScriptTranslator, x: TensorValue, sizes: Sequence[Any]) -> TensorValue:
    """Return means over parts of an image: a product with a matrix for each axis.

    Part i of n begins at floor(i * extent / n) and ends before ceil((i + 1) * extent / n).
    """
    require(x.rank is not None, "parts of an image with an unknown number of axes")
    if (extents := _part_extents(t, x, sizes)) is not None:
        return _pooled_parts(t, x, extents, "AveragePool")
    rank, dtype = x.rank or 0, x.dtype or "float32"
    for n, size in enumerate(sizes):
        axis = rank - len(sizes) + n
        if size is None:
            continue
        require(type(size) is int, "a size that depends on a tensor")
        extent = t.as_number(t.extent(x, axis))
        starts, ends = _part_bounds(t, extent, size)
        column = t.build.number([1], "int64")
        entries = t.build.one("Range", t.number(0, "int64"), extent.name, t.number(1, "int64"))
        after = t.build.one("GreaterOrEqual", entries, t.build.one("Unsqueeze", starts, column))
        before = t.build.one("Less", entries, t.build.one("Unsqueeze", ends, column))
        inside = t.build.one("Cast", t.build.one("And", after, before), to=dtype)
        matrix = t.build.one("Div", inside, t.build.one("ReduceSum", inside, column, keepdims=1))
        letters = "abcdefgh"[:rank]
        equation = f"{letters},z{letters[axis]}->{letters.replace(letters[axis], 'z')}"
        x = t.new(t.build.one("Einsum", x.name, matrix, equation=equation), x.dtype, rank)
    return x


def _part_extents(t: ScriptTranslator, x: TensorValue, sizes: Sequence[Any]) -> list[tuple[int, int]] | None:
    """Return the extent and the number of parts of each axis, None if an extent is not known."""
    pairs = []
    for axis, size in zip(range(-len(sizes), 0), sizes, strict=True):
        extent = t.extent(x, axis)
        if not isinstance(extent, int):
            return None
        require(size is None or type(size) is int, "a size that depends on a tensor")
        pairs.append((extent, extent if size is None else size))
    return pairs


def _pooled_parts(
    t: ScriptTranslator, x: TensorValue, extents: Sequence[tuple[int, int]], op: str
) -> TensorValue:
    """Return means or maxima over parts of an image, as windows of equal size.

    A part that is smaller than the others repeats its last entry for a maximum, and ends in zeros for a mean.
    """
    import numpy as np

    name, dtype = x.name, x.dtype or "float32"
    kernel, factors = [], []
    for axis, (extent, size) in zip(range(-len(extents), 0), extents, strict=True):
        starts = np.arange(size) * extent // size
        counts = -(-(np.arange(size) + 1) * extent // size) - starts
        kernel.append(int(counts.max(initial=1)))
        if extent == size * kernel[-1]:
            continue
        offsets = np.arange(kernel[-1])
        last = counts[:, None] - 1
        entries = starts[:, None] + np.minimum(offsets, last)
        if op == "AveragePool":
            entries = np.where(offsets > last, extent, entries)
            widths, at = t.build.number([0, 1], "int64"), t.build.number([axis], "int64")
            name = t.build.one("Pad", name, widths, "", at)
            shape = [-1, *[1] * (-1 - axis)]
            factors.append(t.build.number((kernel[-1] / counts).reshape(shape), dtype))
        name = t.build.one("Gather", name, t.build.number(entries.reshape(-1), "int64"), axis=axis)
    windows: dict[str, Any] = {"kernel_shape": tuple(kernel), "strides": tuple(kernel)}
    whole = t.new(name, x.dtype, x.rank)
    (pooled,) = _batched(t, whole, len(kernel), lambda part: t.build.add(op, (part,), **windows))
    for factor in factors:
        pooled = _applied(t, "Mul", pooled, factor)
    return pooled


def _part_bounds(t: ScriptTranslator, extent: NumberValue, size: int) -> tuple[str, str]:
    count = t.number(size, "int64")
    first = t.build.one(
        "Div", t.build.one("Mul", t.build.number([*range(size)], "int64"), extent.name), count
    )
    last = t.build.one("Mul", t.build.number([n + 1 for n in range(size)], "int64"), extent.name)
    last = t.build.one("Div", t.build.one("Add", last, t.number(size - 1, "int64")), count)
    return first, last


def _define_resizes() -> None:
    for name, axes, mode in (
        *((f"upsample_nearest{n}d", n, "nearest") for n in (1, 2, 3)),
        *((f"_upsample_nearest_exact{n}d", n, "exact") for n in (1, 2, 3)),
        ("upsample_linear1d", 1, "linear"),
        ("upsample_bilinear2d", 2, "linear"),
        ("upsample_trilinear3d", 3, "linear"),
        ("upsample_bicubic2d", 2, "cubic"),
    ):
        aligned = "" if mode in ("nearest", "exact") else "align_corners, "

        def resize(t: ScriptTranslator, a: Any, axes: int = axes, mode: str = mode) -> TensorValue:
            x = t.tensor(a.x)
            corners = bool(getattr(a, "align_corners", False))
            settings: dict[str, Any] = {"axes": tuple(range(2, 2 + axes))}
            if mode in ("nearest", "exact"):
                exact = mode == "exact"
                settings["coordinate_transformation_mode"] = "half_pixel" if exact else "asymmetric"
                settings["nearest_mode"] = "round_prefer_ceil" if exact else "floor"
            else:
                settings |= {"mode": mode, "cubic_coeff_a": -0.75} if mode == "cubic" else {"mode": mode}
                settings["coordinate_transformation_mode"] = "align_corners" if corners else "half_pixel"
            factors = a.scales if isinstance(a.scales, list) else [a.scales, a.second, a.third][:axes]
            has_factors = all(isinstance(factor, int | float) for factor in factors)
            if a.size is not None and not (has_factors and not isinstance(a.scales, list)):
                inputs = ["", "", t.sizes(a.size)]
            else:
                require(has_factors, "a resize without size")
                inputs = ["", t.build.number([float(factor) for factor in factors], "float32"), ""]
            return _applied(t, "Resize", x, *inputs, **settings)

        _operation(f"{name}(x, size, {aligned}scales=None, second=None, third=None)")(resize)


_define_resizes()


def _gate_rows(t: ScriptTranslator, kind: str, value: Any) -> str:
    """Return the name of one direction's weights, [1, gates * units, ...], in ONNX's order of gates."""
    leaf = t.stored_leaf(value)
    if leaf is None:
        raise OpaqueError("a recurrent layer with computed weights")
    order = BlockOrder(0, gate_order({"RNN": "simple_rnn"}.get(kind, kind.lower()), "torch", "onnx"))
    return t.changed(value, chain_rules(order, Reshape((1, *leaf.shape))))


def _recurrent(
    t: ScriptTranslator, kind: str, a: Any, states: list[Any], activation: str = ""
) -> list[TensorValue]:
    """Return the outputs and last states of layers above each other.

    `states` are the first states, [layers * directions, batch, units].
    """
    require(isinstance(states, list) and isinstance(a.weights, list), "packed sequences")
    require(not (a.train and a.dropout), "dropout in training")
    directions = 2 if a.bidirectional else 1
    per = 4 if a.has_biases else 2
    weights = t.item(a.weights, 0) and a.weights
    if len(weights) != per * directions * a.layers:
        require(kind == "LSTM" and len(weights) == (per + 1) * directions * a.layers, "unknown weights")
        return _projected(t, a, states, directions)
    x = _floating(t, a.x)
    name = t.build.one("Transpose", x.name, perm=(1, 0, 2)) if a.batch_first else x.name
    settings: dict[str, Any] = {"direction": "bidirectional" if a.bidirectional else "forward"}
    if kind == "GRU":
        settings["linear_before_reset"] = 1
    if kind == "RNN":
        settings["activations"] = (activation,) * directions
    lasts: list[list[str]] = [[] for _ in states]
    for layer in range(a.layers):
        groups = [weights[(layer * directions + d) * per :][:per] for d in range(directions)]
        rows = [[_gate_rows(t, kind, tensor) for tensor in group] for group in groups]

        def whole(n: int, rows: list[list[str]] = rows) -> str:
            listed = [row[n] for row in rows]
            return t.build.one("Concat", *listed, axis=0) if len(listed) > 1 else listed[0]

        bias = t.build.one("Concat", whole(2), whole(3), axis=1) if a.has_biases else ""
        starts = [
            _sliced(t, t.tensor(state), (layer * directions, (layer + 1) * directions), 0).name
            for state in states
        ]
        values = t.build.add(kind, (name, whole(0), whole(1), bias, "", *starts), 1 + len(states), **settings)
        for listed, last in zip(lasts, values[1:], strict=True):
            listed.append(last)
        if a.bidirectional:
            merged = t.build.one("Transpose", values[0], perm=(0, 2, 1, 3))
            name = t.build.one("Reshape", merged, t.build.number([0, 0, -1], "int64"))
        else:
            name = t.build.one("Squeeze", values[0], t.build.number([1], "int64"))
    name = t.build.one("Transpose", name, perm=(1, 0, 2)) if a.batch_first else name
    ends = [t.build.one("Concat", *last, axis=0) if len(last) > 1 else last[0] for last in lasts]
    return [t.new(output, x.dtype, 3) for output in (name, *ends)]


def _projected(t: ScriptTranslator, a: Any, states: list[Any], directions: int) -> list[TensorValue]:
    """Return the outputs and last states of LSTM layers whose outputs are projected, step by step."""
    x = _floating(t, a.x)
    x = t.new(t.build.one("Transpose", x.name, perm=(1, 0, 2)), x.dtype, 3) if a.batch_first else x
    length, per = _known_extent(t, x, 0), 5 if a.has_biases else 3
    lasts: tuple[list[TensorValue], list[TensorValue]] = ([], [])
    for layer in range(a.layers):
        sides = []
        for row in range(layer * directions, (layer + 1) * directions):
            w_ih, w_hh, *biases, projection = a.weights[row * per : (row + 1) * per]
            h, c = (compute(t, "select", state, 0, row) for state in states)
            outputs = []
            for n in range(length)[:: -1 if row % directions else 1]:
                step = compute(t, "select", x, 0, n)
                h, c = compute(t, "lstm_cell", step, (h, c), w_ih, w_hh, *biases)
                h = _dense(t, h, projection)
                outputs.append(h)
            lasts[0].append(h)
            lasts[1].append(c)
            outputs = outputs[:: -1 if row % directions else 1]
            sides.append(compute(t, "stack", outputs))
        x = compute(t, "cat", sides, -1)
    x = t.new(t.build.one("Transpose", x.name, perm=(1, 0, 2)), x.dtype, 3) if a.batch_first else x
    return [x, *(compute(t, "stack", last) for last in lasts)]


_RECURRENT = "x, states, weights, has_biases, layers, dropout, train, bidirectional, batch_first"


def _sums(t: ScriptTranslator, a: Any, h: Any) -> tuple[TensorValue, TensorValue]:
    """Return the weighted sums of a cell's input and state."""
    return _dense(t, a.x, a.w_ih, a.b_ih), _dense(t, h, a.w_hh, a.b_hh)


def _gates(t: ScriptTranslator, x: TensorValue, count: int) -> list[TensorValue]:
    names = t.build.add("Split", (x.name,), count, axis=-1, num_outputs=count)
    return [t.new(name, x.dtype, x.rank) for name in names]


_CELL = "x, h, w_ih, w_hh, b_ih=None, b_hh=None"


@_operation(f"lstm_cell({_CELL})")
def _lstm_cell(t: ScriptTranslator, a: Any) -> list[TensorValue]:
    h, c = a.h
    i, f, g, o = _gates(t, _elementwise(t, "Add", *_sums(t, a, h)), 4)
    kept = _elementwise(t, "Mul", _elementwise(t, "Sigmoid", f), c)
    added = _elementwise(t, "Mul", _elementwise(t, "Sigmoid", i), _elementwise(t, "Tanh", g))
    cell = _elementwise(t, "Add", kept, added)
    return [_elementwise(t, "Mul", _elementwise(t, "Sigmoid", o), _elementwise(t, "Tanh", cell)), cell]


@_operation(f"gru_cell({_CELL})")
def _gru_cell(t: ScriptTranslator, a: Any) -> TensorValue:
    one, two = (_gates(t, gates, 3) for gates in _sums(t, a, a.h))
    r, z = (_elementwise(t, "Sigmoid", _elementwise(t, "Add", one[n], two[n])) for n in (0, 1))
    new = _elementwise(t, "Tanh", _elementwise(t, "Add", one[2], _elementwise(t, "Mul", r, two[2])))
    change = _elementwise(t, "Mul", z, _elementwise(t, "Sub", a.h, new))
    return _elementwise(t, "Add", new, change)


def _bitwise(t: ScriptTranslator, op: str, *values: Any) -> TensorValue:
    return _elementwise(t, op if _promoted(t, *values) == "bool" else f"Bitwise{op}", *values)


def _is_same(t: ScriptTranslator, one: Any, two: Any) -> bool:
    both = isinstance(one, _TENSORS) and isinstance(two, _TENSORS)
    return t.tensor(one) is t.tensor(two) if both else one is two


# Operations that are one expression, by their schema.
_EXPRESSIONS: dict[str, _Handler] = {
    "threshold(x, threshold, value)": lambda t, a: _where(
        t, _elementwise(t, "Greater", a.x, a.threshold), a.x, a.value
    ),
    "pixel_shuffle(x, factor)": lambda t, a: _applied(t, "DepthToSpace", a.x, blocksize=a.factor, mode="CRD"),
    "pixel_unshuffle(x, factor)": lambda t, a: _applied(
        t, "SpaceToDepth", a.x, blocksize=a.factor, mode="CRD"
    ),
    "tril(x, diagonal=0)": lambda t, a: _applied(t, "Trilu", a.x, t.number(a.diagonal, "int64"), upper=0),
    "triu(x, diagonal=0)": lambda t, a: _applied(t, "Trilu", a.x, t.number(a.diagonal, "int64"), upper=1),
    "index_select(x, dim, index)": lambda t, a: _applied(
        t, "Gather", a.x, _integer(t, a.index).name, axis=a.dim
    ),
    "gather(x, dim, index, sparse_grad=False)": lambda t, a: _applied(
        t, "GatherElements", a.x, _integer(t, a.index).name, axis=a.dim
    ),
    f"new_zeros(x, size, {_NEW})": lambda t, a: _of_type(t, a, 0),
    f"new_ones(x, size, {_NEW})": lambda t, a: _of_type(t, a, 1),
    f"new_full(x, size, value, {_NEW})": lambda t, a: _of_type(t, a, a.value),
    "linear(x, weight, bias=None)": lambda t, a: _dense(t, a.x, a.weight, a.bias),
    f"lstm({_RECURRENT})": lambda t, a: _recurrent(t, "LSTM", a, a.states),
    f"gru({_RECURRENT})": lambda t, a: _recurrent(t, "GRU", a, [a.states]),
    f"rnn_tanh({_RECURRENT})": lambda t, a: _recurrent(t, "RNN", a, [a.states], "Tanh"),
    f"rnn_relu({_RECURRENT})": lambda t, a: _recurrent(t, "RNN", a, [a.states], "Relu"),
    "view_as reshape_as(x, other)": lambda t, a: _shaped_as(t, "Reshape", a, allowzero=1),
    "expand_as(x, other)": lambda t, a: _shaped_as(t, "Expand", a),
    "celu(x, alpha=1.0)": lambda t, a: _elementwise(t, "Celu", a.x, alpha=float(a.alpha)),
    "gelu(x, approximate='none')": lambda t, a: _elementwise(t, "Gelu", a.x, approximate=a.approximate),
    "relu6(x)": lambda t, a: _clamped(t, a.x, 0, 6),
    "hardtanh(x, low=-1.0, high=1.0)": lambda t, a: _clamped(t, a.x, a.low, a.high),
    "hardshrink(x, lambd=0.5)": lambda t, a: _elementwise(t, "Shrink", a.x, lambd=float(a.lambd), bias=0.0),
    "softshrink(x, lambd=0.5)": lambda t, a: _elementwise(
        t, "Shrink", a.x, lambd=float(a.lambd), bias=float(a.lambd)
    ),
    "square(x)": lambda t, a: _elementwise(t, "Mul", a.x, a.x),
    "detach alias requires_grad_ lift_fresh detach_ positive resolve_conj(x, format=None)": lambda t, a: (
        t.tensor(a.x)
    ),
    "add(x, other, alpha=1)": lambda t, a: _elementwise(t, "Add", a.x, _scaled(t, a.other, a.alpha)),
    "sub subtract(x, other, alpha=1)": lambda t, a: _elementwise(t, "Sub", a.x, _scaled(t, a.other, a.alpha)),
    "rsub(x, other, alpha=1)": lambda t, a: _elementwise(t, "Sub", a.other, _scaled(t, a.x, a.alpha)),
    "floor_divide floordiv(x, other)": lambda t, a: compute(t, "div", a.x, a.other, "floor"),
    "fmod(x, other)": lambda t, a: _elementwise(t, "Mod", a.x, a.other, fmod=1),
    "addcmul(x, one, two, value=1)": lambda t, a: _elementwise(
        t, "Add", a.x, _scaled(t, _elementwise(t, "Mul", a.one, a.two), a.value)
    ),
    "addcdiv(x, one, two, value=1)": lambda t, a: _elementwise(
        t, "Add", a.x, _scaled(t, _elementwise(t, "Div", a.one, a.two), a.value)
    ),
    "clamp clip(x, min=None, max=None)": lambda t, a: _clamped(t, a.x, a.min, a.max),
    "clamp_min(x, min)": lambda t, a: _clamped(t, a.x, a.min, None),
    "clamp_max(x, max)": lambda t, a: _clamped(t, a.x, None, a.max),
    "ne not_equal(x, other)": lambda t, a: _elementwise(t, "Not", _elementwise(t, "Equal", a.x, a.other)),
    "logical_not(x)": lambda t, a: _elementwise(t, "Not", a.x, dtype="bool"),
    "logical_and(x, other)": lambda t, a: _elementwise(t, "And", a.x, a.other, dtype="bool"),
    "logical_or(x, other)": lambda t, a: _elementwise(t, "Or", a.x, a.other, dtype="bool"),
    "logical_xor(x, other)": lambda t, a: _elementwise(t, "Xor", a.x, a.other, dtype="bool"),
    "bitwise_not(x)": lambda t, a: _bitwise(t, "Not", t.tensor(a.x)),
    "bitwise_and __and__(x, other)": lambda t, a: _bitwise(t, "And", a.x, a.other),
    "bitwise_or __or__(x, other)": lambda t, a: _bitwise(t, "Or", a.x, a.other),
    "where(condition, x, other)": lambda t, a: _where(t, a.condition, a.x, a.other),
    "len(x)": lambda t, a: t.extent(t.tensor(a.x), 0) if isinstance(a.x, _TENSORS) else len(a.x),
    "numel(x)": lambda t, a: NumberValue(t.build.one("Size", t.tensor(a.x).name), "int64"),
    "layout(x)": lambda _t, _a: None,
    **dict.fromkeys(
        (
            "is_cuda is_quantized is_sparse is_complex(x=None)",
            "is_nested is_mkldnn requires_grad is_grad_enabled(x=None)",
        ),
        lambda _t, _a: False,
    ),
    "__is__(one, two)": lambda t, a: _is_same(t, a.one, a.two),
    "__isnot__(one, two)": lambda t, a: not _is_same(t, a.one, a.two),
    "__getitem__(values, at)": lambda t, a: t.item(a.values, a.at),
    "transpose swapaxes swapdims(x, one, two)": lambda t, a: _exchanged(
        t, t.tensor(a.x), *_ints([a.one, a.two])
    ),
    "mT(x)": lambda t, a: _exchanged(t, t.tensor(a.x), -1, -2),
    "split_with_sizes unsafe_split_with_sizes(x, sizes, dim=0)": lambda t, a: _parts(
        t, t.tensor(a.x), _ints(a.sizes), a.dim
    ),
    "broadcast_to(x, size)": lambda t, a: _expand(t, a),
    "constant_pad_nd(x, pad, value=0)": lambda t, a: _padded(t, t.tensor(a.x), a.pad, "constant", a.value),
    "reflection_pad1d reflection_pad2d reflection_pad3d(x, pad)": lambda t, a: _padded(
        t, t.tensor(a.x), a.pad, "reflect"
    ),
    "replication_pad1d replication_pad2d replication_pad3d(x, pad)": lambda t, a: _padded(
        t, t.tensor(a.x), a.pad, "edge"
    ),
    f"zeros(size, {_NEW})": lambda t, a: _new_tensor(
        t, t.sizes(a.size), 0, _requested_type(a, "float32"), _length_of(a.size)
    ),
    f"ones(size, {_NEW})": lambda t, a: _new_tensor(
        t, t.sizes(a.size), 1, _requested_type(a, "float32"), _length_of(a.size)
    ),
    f"zeros_like(x, {_NEW})": lambda t, a: _like(t, a, 0),
    f"ones_like(x, {_NEW})": lambda t, a: _like(t, a, 1),
    f"full_like(x, value, {_NEW})": lambda t, a: _like(t, a, a.value),
    "zero(x)": lambda t, a: _like(t, SimpleNamespace(x=a.x, dtype=None), 0),
    "fill(x, value)": lambda t, a: _like(t, SimpleNamespace(x=a.x, dtype=None), a.value),
    "type_as(x, other)": lambda t, a: _cast(t, t.tensor(a.x), t.tensor(a.other).dtype),
    "_autocast_to_full_precision _autocast_to_reduced_precision(x, one=None, two=None, three=None, "
    "four=None)": lambda t, a: t.tensor(a.x),
    "all(x, dim=None, keepdim=False)": lambda t, a: _reduced_truth(t, "ReduceMin", a),
    "any(x, dim=None, keepdim=False)": lambda t, a: _reduced_truth(t, "ReduceMax", a),
    "var(x, dim=None, unbiased=None, keepdim=False, correction=None)": lambda t, a: _variance(t, a),
    "std(x, dim=None, unbiased=None, keepdim=False, correction=None)": lambda t, a: _elementwise(
        t, "Sqrt", _variance(t, a)
    ),
    "argsort(x, dim=-1, descending=False)": lambda t, a: _sort(t, a)[1],
    "conv1d conv2d conv3d(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1)": lambda t, a: (
        _convolution(t, a)
    ),
    "_convolution_mode(x, weight, bias, stride, padding, dilation, groups)": lambda t, a: _convolution(t, a),
    "conv_transpose1d conv_transpose2d conv_transpose3d(x, weight, bias=None, stride=1, padding=0, "
    "output_padding=0, groups=1, dilation=1)": lambda t, a: _convolution(t, a, transposed=True),
    "_convolution convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, "
    "groups, benchmark=None, deterministic=None, cudnn=None, tf32=None)": lambda t, a: _convolution(
        t, a, transposed=a.transposed
    ),
    f"rnn_tanh_cell({_CELL})": lambda t, a: _elementwise(
        t, "Tanh", _elementwise(t, "Add", *_sums(t, a, a.h))
    ),
    f"rnn_relu_cell({_CELL})": lambda t, a: _elementwise(
        t, "Relu", _elementwise(t, "Add", *_sums(t, a, a.h))
    ),
}
for _schema, _handler in _EXPRESSIONS.items():
    _operation(_schema)(_handler)
