"""Operations of TorchScript code on numbers, lists, dicts and shapes.

Plain values are computed; those that depend on tensors become nodes. Source:
torch/csrc/jit/runtime/register_prim_ops.cpp.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpttool.graphs.graph import OpaqueError
from ckpttool.graphs.operators import spelled_operators
from ckpttool.graphs.torchscript_values import NumberValue, PartsValue, ShapeRange, SizesValue

if TYPE_CHECKING:
    from ckpttool.graphs.torchscript_translator import ScriptTranslator

NUMBERS = (bool, int, float, NumberValue)
# The end of a slice that has none.
LAST = (1 << 63) - 1
_LONGEST = 1 << 20
# Messages of errors, and where a tensor is.
SILENT = frozenset(("format", "str", "warn", "print", "device"))
# Operations that do not look at the values of their arguments.
CONTAINERS = frozenset(("__getitem__", "list", "append", "len")) | SILENT

_PLAIN: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floordiv": operator.floordiv,
    "remainder": operator.mod,
    "pow": operator.pow,
    "neg": operator.neg,
    **{name: getattr(operator, name) for name in ("lt", "gt", "le", "ge", "eq", "ne")},
    "__is__": lambda a, b: a is b if a is None or b is None else a == b,
    "__isnot__": lambda a, b: a is not b if a is None or b is None else a != b,
    "__not__": operator.not_,
    "__and__": operator.and_,
    "__or__": operator.or_,
    "__contains__": lambda values, value: value in values,
    "__getitem__": operator.getitem,
    "len": len,
    "list": list,
    "copy": list,
    "range": range,
    **dict.fromkeys(("int", "Int"), int),
    **dict.fromkeys(("float", "Float"), float),
    **dict.fromkeys(("bool", "Bool"), bool),
    "floor": math.floor,
    "ceil": math.ceil,
    "sqrt": math.sqrt,
    "log": math.log,
    "abs": abs,
    "min": min,
    "max": max,
    "prod": math.prod,
    "slice": lambda values, start=0, end=None, step=1: values[start:end:step],
    "keys": lambda values: [*values],
    "values": lambda values: [*values.values()],
    "items": lambda values: [[name, value] for name, value in values.items()],
    "is_scripting": lambda: True,
    "is_tracing": lambda: False,
}
_TYPES = {
    "int": "int64",
    "Int": "int64",
    "float": "float64",
    "Float": "float64",
    "bool": "bool",
    "Bool": "bool",
}
_LOGIC = {"__and__": "And", "__or__": "Or", "__not__": "Not"}
# Functions with the same result for whole numbers; others have fractions.
_ARITHMETIC = frozenset(("Add", "Sub", "Mul", "Min", "Max", "Neg", "Abs"))


def has_kind(values: Sequence[Any], kinds: tuple[type, ...]) -> bool:
    """Return whether a value of these classes is among the values, or in a list or dict of them."""
    return any(
        isinstance(value, kinds)
        or (isinstance(value, list) and has_kind(value, kinds))
        or (isinstance(value, dict) and has_kind([*value.values()], kinds))
        for value in values
    )


def is_number_operation(name: str) -> bool:
    """Return whether an operation without tensors computes numbers or lists."""
    return name in _PLAIN or name in ("append", "_set_item", "NumToTensor")


def apply_numbers(t: ScriptTranslator, name: str, args: list[Any], named: Mapping[str, Any]) -> Any:
    """Return the result of an operation on numbers, lists and texts."""
    if t.shapes is not None and name in CONTAINERS:
        args = [argument.take(None) if isinstance(argument, PartsValue) else argument for argument in args]
    if named or any(isinstance(argument, PartsValue) for argument in args):
        raise OpaqueError(name)
    if name in ("append", "_set_item"):
        return change_list(t, args)
    if name == "NumToTensor":
        number = t.as_number(args[0])
        return t.new(number.name, number.dtype, 0)
    if has_kind(args, (SizesValue,)):
        return _apply_sizes(t, name, args)
    if name not in CONTAINERS and name != "slice" and has_kind(args, (NumberValue,)):
        return _apply_number_values(t, name, args)
    _require_small(name, args)
    try:
        result = _PLAIN[name](*args)
    except (TypeError, ValueError, ArithmeticError, LookupError):
        raise OpaqueError(name) from None
    if (type(result) is int and abs(result) > LAST) or (
        isinstance(result, list | str) and len(result) > _LONGEST
    ):
        raise OpaqueError("a number or list that is too large")
    return result


def _require_small(name: str, arguments: Sequence[Any]) -> None:
    """Refuse an operation whose result may need much memory: numbers have 64 bits in the language."""
    lengths = [len(argument) for argument in arguments if isinstance(argument, list | str | range)]
    numbers = [abs(argument) for argument in arguments if type(argument) is int]
    repeated = name == "mul" and lengths and numbers
    size = lengths[0] * numbers[0] if repeated else sum(lengths)
    large = name == "pow" and len(numbers) == 2 and numbers[1] > 64
    if (name != "len" and name != "__getitem__" and size > _LONGEST) or large:
        raise OpaqueError("a number or list that is too large")


def change_list(t: ScriptTranslator, arguments: Sequence[Any]) -> Any:
    """Append to a list, or set the entry of a list or dict."""
    t.require_outside_branch()
    values, *rest = arguments
    if len(rest) == 1:
        values.append(rest[0])
    else:
        values[rest[0]] = rest[1]
    return values


def _apply_sizes(t: ScriptTranslator, name: str, arguments: list[Any]) -> Any:
    """Return the result of an operation on lists of extents."""
    if name in ("list", "copy"):
        return arguments[0]
    if name == "add":
        parts = [word.parts if isinstance(word, SizesValue) else tuple(word) for word in arguments[:2]]
        return SizesValue((*parts[0], *parts[1]))
    if name == "__getitem__":
        return t.item(*arguments)
    if name == "prod" and len(arguments) == 1:
        axes = t.build.number([0], "int64")
        return NumberValue(t.build.one("ReduceProd", t.sizes(arguments[0]), axes, keepdims=0), "int64")
    if name == "len":
        return NumberValue(t.build.one("Size", t.sizes(arguments[0])), "int64")
    if name == "slice" and len(arguments[0].parts) == 1:
        (part,) = arguments[0].parts
        bounds: list[Any] = [*arguments[1:], *[0, None, 1][len(arguments) - 1 :]]
        start, end, step = bounds
        end = None if end in (None, LAST) else end
        whole = isinstance(part, ShapeRange) and part.start == 0 and part.end is None
        if whole and step == 1 and all(isinstance(bound or 0, int) for bound in (start, end)):
            return SizesValue((ShapeRange(part.tensor, start or 0, end),))
    raise OpaqueError("a shape of unknown length")


def _apply_number_values(t: ScriptTranslator, name: str, args: list[Any]) -> Any:
    """Return the result of an operation on numbers of which some are values of the graph."""
    if name in ("__is__", "__isnot__"):
        return (args[0] is args[1]) is (name == "__is__")
    if name == "__contains__" and isinstance(args[0], list):
        result: Any = False
        for argument in args[0]:
            result = apply_numbers(t, "__or__", [result, apply_numbers(t, "eq", [argument, args[1]], {})], {})
        return result
    if name == "prod" and isinstance(args[0], list):
        product: Any = 1
        for argument in args[0]:
            product = apply_numbers(t, "mul", [product, argument], {})
        return product
    if name == "range" or any(not isinstance(argument, NUMBERS) for argument in args):
        raise OpaqueError("a list whose length depends on a tensor")
    return _compute(t, name, [t.as_number(argument) for argument in args])


def _compute(t: ScriptTranslator, name: str, numbers: Sequence[NumberValue]) -> NumberValue:
    """Return the result of an operation on numbers of the graph."""
    if name in _TYPES:
        return NumberValue(t.number(numbers[0], _TYPES[name]), _TYPES[name])
    if name in _LOGIC:
        return NumberValue(
            t.build.one(_LOGIC[name], *(t.number(number, "bool") for number in numbers)), "bool"
        )
    whole = all(number.dtype in ("int64", "bool") for number in numbers)
    dtype = "int64" if whole else "float64"
    names = [t.number(number, dtype) for number in numbers]
    row = spelled_operators("torch").get(name)
    if row is not None and (row.result or row.name in _ARITHMETIC):
        return NumberValue(t.build.one(row.name, *names), row.result or dtype)
    if name == "ne":
        return NumberValue(t.build.one("Not", t.build.one("Equal", *names)), "bool")
    if name in ("floordiv", "remainder") and whole:
        rest = t.build.one("Mod", *names)
        if name == "remainder":
            return NumberValue(rest, dtype)
        return NumberValue(t.build.one("Div", t.build.one("Sub", names[0], rest), names[1]), dtype)
    wide = [t.number(number, "float64") for number in numbers]
    if row is not None and name in ("floor", "ceil"):
        rounded = t.build.one(row.name, *wide)
        return NumberValue(t.build.one("Cast", rounded, to="int64"), "int64")
    if row is not None and (name != "pow" or not whole):
        return NumberValue(t.build.one(row.name, *wide), "float64")
    raise OpaqueError(name)
