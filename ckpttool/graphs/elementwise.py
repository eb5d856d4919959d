"""Operators that combine the entries of broadcast inputs: arithmetic, logic, activations, casts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ckpttool.core import dtypes
from ckpttool.core.dtypes import np
from ckpttool.core.errors import UnsupportedError
from ckpttool.graphs.operators import (
    Combination,
    Expansion,
    OperatorNames,
    broadcast_shape,
    operator,
    same_shape,
)


def error_function(x: np.ndarray) -> np.ndarray:
    """Return erf of every entry, in the input's type."""
    # Exact to the last bit; numpy has none.
    erf = np.frompyfunc(math.erf, 1, 1)
    return np.asarray(erf(x.astype(np.float64)), np.float64).astype(x.dtype)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return the logistic function, which does not overflow."""
    half = np.asarray(0.5, x.dtype)
    return half * (np.tanh(half * x) + np.asarray(1, x.dtype))


def _elementwise(
    name: str, since: int = 1, result: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    spelling, kind = _SPELLINGS.get(name, OperatorNames(0)), _KINDS.get(name, "elementwise")
    return operator(
        name,
        shapes=broadcast_shape,
        kind=kind,
        since=since,
        result=result,
        spelling=spelling,
        expand=_EXPANSIONS.get(name),
    )


def _define(name: str, function: Callable[..., Any] | str, *, result: str = "", since: int = 1) -> None:
    """Add a row for a function whose result has the type of its first input, or this one."""

    def compute(*arrays: np.ndarray) -> np.ndarray:
        apply = getattr(np, function) if isinstance(function, str) else function
        return np.asarray(apply(*arrays)).astype(result or arrays[0].dtype)

    _elementwise(name, since, result)(compute)


def _expand_sum(add: Callable[..., str], _number: Callable[..., str], first: str, *others: str) -> str:
    for name in others:
        first = add("Add", first, name)
    return first


def _expand_gelu(add: Callable[..., str], number: Callable[..., str], x: str, *, approximate: str) -> str:
    if approximate != "tanh":
        raise UnsupportedError("an unknown approximation of GELU", found=approximate)
    cube = add("Mul", add("Mul", add("Mul", x, x), x), number(0.044715))
    inner = add("Tanh", add("Mul", add("Add", x, cube), number(math.sqrt(2 / math.pi))))
    return add("Mul", add("Mul", x, number(0.5)), add("Add", inner, number(1)))


def _expand_hard_swish(add: Callable[..., str], number: Callable[..., str], x: str) -> str:
    limited = add("Min", add("Max", add("Add", x, number(3)), number(0)), number(6))
    return add("Div", add("Mul", x, limited), number(6))


_EXPANSIONS: dict[str, Expansion] = {
    "Neg": lambda add, number, x: add("Mul", x, number(-1)),
    "Abs": lambda add, _number, x: add("Add", add("Relu", x), add("Relu", add("Neg", x))),
    "Sum": _expand_sum,
    "Mean": lambda add, number, *names: add("Div", add("Sum", *names), number(len(names))),
    "Gelu": _expand_gelu,
    "Selu": lambda add, number, x, *, alpha, gamma: add("Mul", add("Elu", x, alpha=alpha), number(gamma)),
    "Celu": lambda add, number, x, *, alpha: add(
        "Mul", add("Elu", add("Div", x, number(alpha))), number(alpha)
    ),
    "HardSigmoid": lambda add, number, x, *, alpha, beta: add(
        "Clip", add("Add", add("Mul", x, number(alpha)), number(beta)), number(0), number(1)
    ),
    "Swish": lambda add, number, x, *, alpha: add(
        "Mul", x, add("Sigmoid", x if alpha == 1 else add("Mul", x, number(alpha)))
    ),
    "Mish": lambda add, _number, x: add("Mul", x, add("Tanh", add("Softplus", x))),
    "HardSwish": _expand_hard_swish,
    "SwiGLU": lambda add, _number, gate, x, *, alpha: add("Mul", add("Swish", gate, alpha=alpha), x),
}
_KINDS: dict[str, Combination] = {"Mul": "scaling", "PRelu": "scaling", "Clip": "first"}
_SPELLINGS = {
    **{
        name: OperatorNames(1, name.lower(), name, name)
        for name in ("Exp", "Log", "Sqrt", "Sin", "Cos", "Tan", "Sinh", "Cosh", "Erf", "Floor", "Ceil")
    },
    **{
        f"A{name}": OperatorNames(1, f"a{name} arc{name}", f"Arc{name}", f"A{name}")
        for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")
    },
    **{
        name: OperatorNames(1, tensorflow=name) for name in ("Sigmoid", "Elu", "Selu", "Softplus", "Softsign")
    },
    "Identity": OperatorNames(1, keras="Identity"),
    "Tanh": OperatorNames(1, "tanh", "Tanh", "Tanh"),
    "Relu": OperatorNames(1, "relu", tensorflow="Relu"),
    "Abs": OperatorNames(1, "abs", "Abs Absolute", "Abs"),
    "Neg": OperatorNames(1, "neg negative", "Negative", "Neg"),
    "Sign": OperatorNames(1, "sign sgn", "Sign", "Sign"),
    "Round": OperatorNames(1, "round", "Round", "Round Rint"),
    "Reciprocal": OperatorNames(1, "reciprocal", "Reciprocal", "Reciprocal Inv"),
    "Not": OperatorNames(1, "", "LogicalNot", "LogicalNot"),
    "IsNaN": OperatorNames(1, "isnan", "", "IsNan"),
    "IsInf": OperatorNames(1, "isinf", "", "IsInf"),
    "Add": OperatorNames(2, "add", "Add", "Add AddV2"),
    "Sub": OperatorNames(2, "sub", "Subtract", "Sub"),
    "Mul": OperatorNames(2, "mul", "Multiply", "Mul"),
    "Div": OperatorNames(2, "div", "Divide TrueDivide", "RealDiv TruncateDiv"),
    "Pow": OperatorNames(2, "pow", "Power", "Pow"),
    "Max": OperatorNames(2, "maximum max", "Maximum", "Maximum"),
    "Min": OperatorNames(2, "minimum min", "Minimum", "Minimum"),
    "Equal": OperatorNames(2, "eq", "Equal", "Equal"),
    "Less": OperatorNames(2, "lt less", "Less", "Less"),
    "LessOrEqual": OperatorNames(2, "le less_equal", "LessEqual", "LessEqual"),
    "Greater": OperatorNames(2, "gt greater", "Greater", "Greater"),
    "GreaterOrEqual": OperatorNames(2, "ge greater_equal", "GreaterEqual", "GreaterEqual"),
    "And": OperatorNames(2, "", "LogicalAnd", "LogicalAnd"),
    "Or": OperatorNames(2, "", "LogicalOr", "LogicalOr"),
    "Where": OperatorNames(3, tensorflow="SelectV2"),
    "Sum": OperatorNames(0, tensorflow="AddN"),
}


_SAME_NAMES = ("Abs", "Ceil", "Exp", "Floor", "Log", "Sign", "Sqrt")
_ANGLES = ("sin", "cos", "tan", "sinh", "cosh", "tanh")
# By ONNX's names: NumPy's function of that name, or one of our own.
_FUNCTIONS: dict[str, Callable[..., Any] | str] = {
    **{name: name.lower() for name in (*_SAME_NAMES, *map(str.capitalize, _ANGLES))},
    **{f"A{name}": f"arc{name}" for name in _ANGLES},
    "Neg": "negative",
    "Round": "rint",
    "Add": "add",
    "Sub": "subtract",
    "Mul": "multiply",
    "BitwiseAnd": "bitwise_and",
    "BitwiseOr": "bitwise_or",
    "BitwiseXor": "bitwise_xor",
    "BitwiseNot": "bitwise_not",
    "Erf": error_function,
    "Sigmoid": sigmoid,
    "Identity": lambda x: x,
    "Reciprocal": lambda x: 1 / x,
    "Relu": lambda x: np.maximum(x, 0),
    "Softplus": lambda x: np.logaddexp(x, np.asarray(0, x.dtype)),
    "Softsign": lambda x: x / (1 + np.abs(x)),
    "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "Mish": lambda x: x * np.tanh(np.logaddexp(x, np.asarray(0, x.dtype))),
}
_PREDICATES: dict[str, str] = {
    "And": "logical_and",
    "Or": "logical_or",
    "Xor": "logical_xor",
    "Not": "logical_not",
    "Equal": "equal",
    "Greater": "greater",
    "Less": "less",
    "IsNaN": "isnan",
    "GreaterOrEqual": "greater_equal",
    "LessOrEqual": "less_equal",
}
for _name, _function in _FUNCTIONS.items():
    _define(_name, _function)
# In older versions a slope belongs to a channel, wherever that axis is.
_define("PRelu", lambda x, slope: np.where(x < 0, x * slope, x), since=7)
for _name, _function in _PREDICATES.items():
    _define(_name, _function, result="bool")


@_elementwise("Div")
def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind not in "iu":
        return a / b
    # Integers are truncated towards zero. Division by zero is undefined.
    quotient = a // b
    return quotient + ((quotient < 0) & (quotient * b != a)).astype(a.dtype)


@_elementwise("Pow")
def _power(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind in "iu" and b.dtype.kind in "iu" and (b >= 0).all():
        return np.power(a, b.astype(a.dtype))
    if a.dtype.kind in "iu" or b.dtype.kind in "iu":
        return np.power(a.astype(np.float64), b.astype(np.float64)).astype(a.dtype)
    return np.power(a, b.astype(a.dtype))


@_elementwise("Mod")
def _modulo(a: np.ndarray, b: np.ndarray, *, fmod: int = 0) -> np.ndarray:
    return (np.fmod if fmod else np.mod)(a, b).astype(a.dtype)


@_elementwise("BitShift")
def _shift_bits(a: np.ndarray, b: np.ndarray, *, direction: str = "") -> np.ndarray:
    return {"LEFT": np.left_shift, "RIGHT": np.right_shift}[direction](a, b)


@_elementwise("Max")
def _maximum(*arrays: np.ndarray) -> np.ndarray:
    return np.asarray(_fold(np.maximum, arrays))


@_elementwise("Min")
def _minimum(*arrays: np.ndarray) -> np.ndarray:
    return np.asarray(_fold(np.minimum, arrays))


@_elementwise("Sum")
def _total(*arrays: np.ndarray) -> np.ndarray:
    return np.asarray(_fold(np.add, arrays))


@_elementwise("Mean")
def _mean(*arrays: np.ndarray) -> np.ndarray:
    return (np.asarray(_fold(np.add, arrays)) / len(arrays)).astype(arrays[0].dtype)


def _fold(function: np.ufunc, arrays: tuple[np.ndarray, ...]) -> Any:
    result = arrays[0]
    for array in arrays[1:]:
        result = function(result, array)
    return result


@_elementwise("Where")
def _where(condition: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(condition, a, b)


@_elementwise("Clip")
def _clip(x: np.ndarray, low: np.ndarray | None = None, high: np.ndarray | None = None) -> np.ndarray:
    # If the bounds are reversed, the upper one wins, as in numpy.
    above = x if low is None else np.maximum(x, low)
    return above if high is None else np.minimum(above, high)


@_elementwise("IsInf", result="bool")
def _is_infinite(x: np.ndarray, *, detect_negative: int = 1, detect_positive: int = 1) -> np.ndarray:
    wide = x.astype(np.float64)
    return (np.isposinf(wide) & bool(detect_positive)) | (np.isneginf(wide) & bool(detect_negative))


@_elementwise("LeakyRelu")
def _leaky_relu(x: np.ndarray, *, alpha: float = 0.01) -> np.ndarray:
    return np.where(x < 0, (x * alpha).astype(x.dtype), x)


@_elementwise("Elu")
def _elu(x: np.ndarray, *, alpha: float = 1.0) -> np.ndarray:
    return np.where(x < 0, (alpha * np.expm1(np.minimum(x, 0))).astype(x.dtype), x)


@_elementwise("Selu", since=6)
def _selu(
    x: np.ndarray, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875
) -> np.ndarray:
    return (gamma * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))).astype(x.dtype)


@_elementwise("Celu")
def _celu(x: np.ndarray, *, alpha: float = 1.0) -> np.ndarray:
    return (np.maximum(x, 0) + np.minimum(0, alpha * np.expm1(np.minimum(x, 0) / alpha))).astype(x.dtype)


@_elementwise("HardSigmoid")
def _hard_sigmoid(x: np.ndarray, *, alpha: float = 0.2, beta: float = 0.5) -> np.ndarray:
    return np.clip(x * alpha + beta, 0, 1).astype(x.dtype)


@_elementwise("ThresholdedRelu")
def _thresholded_relu(x: np.ndarray, *, alpha: float = 1.0) -> np.ndarray:
    return np.where(x > np.asarray(alpha, x.dtype), x, np.zeros_like(x))


@_elementwise("Shrink")
def _shrink(x: np.ndarray, *, bias: float = 0.0, lambd: float = 0.5) -> np.ndarray:
    return np.where(x < -lambd, x + bias, np.where(x > lambd, x - bias, 0)).astype(x.dtype)


@_elementwise("Swish")
def _swish(x: np.ndarray, *, alpha: float = 1.0) -> np.ndarray:
    return (x * sigmoid((x * alpha).astype(x.dtype))).astype(x.dtype)


@_elementwise("SwiGLU")
def _gated_swish(gate: np.ndarray, x: np.ndarray, *, alpha: float = 1.0) -> np.ndarray:
    return _swish(gate, alpha=alpha) * x


@_elementwise("Gelu")
def _gelu(x: np.ndarray, *, approximate: str = "none") -> np.ndarray:
    if approximate == "tanh":
        inner = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    elif approximate == "none":
        inner = error_function(x * np.asarray(math.sqrt(0.5), x.dtype))
    else:
        raise UnsupportedError("an unknown approximation of GELU", found=approximate)
    return (0.5 * x * (1 + inner)).astype(x.dtype)


@operator("Dropout", shapes=lambda call: [call.shape(0)] * 2, kind="first", since=7)
def _dropout(
    x: np.ndarray,
    ratio: np.ndarray | None = None,  # noqa: ARG001  # for training only
    training: np.ndarray | None = None,
    *,
    seed: int = 0,  # noqa: ARG001  # for training only
) -> tuple[np.ndarray, np.ndarray]:
    if training is not None and bool(training):
        raise UnsupportedError("dropout in training is random", found="Dropout")
    return x, np.ones(x.shape, bool)


@_elementwise("Cast", since=6)
def cast(x: np.ndarray, *, to: str = "", saturate: int = 1, round_mode: str = "up") -> np.ndarray:
    """Return the entries in another type, named as in core/dtypes."""
    if to == "string":
        raise UnsupportedError("a cast to strings is not supported", found="Cast")
    target = dtypes.numpy_dtype(to)
    if to == "float8_e8m0fnu" and round_mode != "nearest":
        return _cast_to_powers(x, target, round_mode)
    if to.startswith("float8") and saturate:
        return _cast_saturated(x, target)
    if to.startswith(("int4", "uint4", "int2", "uint2")):
        # The low bits, of a truncated number.
        bits = int(to[-1])
        whole = x.astype(np.int64) & ((1 << bits) - 1)
        signed = whole - ((whole >> (bits - 1)) << bits) if to.startswith("int") else whole
        return signed.astype(np.int8).astype(target)
    if target.kind in "iu" and x.dtype.kind not in "iufbc":
        return x.astype(np.float32).astype(target)
    return x.astype(target)


def _cast_saturated(x: np.ndarray, target: np.dtype) -> np.ndarray:
    import ml_dtypes

    most = float(ml_dtypes.finfo(target).max)  # type: ignore[no-untyped-call]
    wide = x.astype(np.float32)
    return np.where(np.isnan(wide), wide, np.clip(wide, -most, most)).astype(target)


def _cast_to_powers(x: np.ndarray, target: np.dtype, round_mode: str) -> np.ndarray:
    """Return powers of two (exponents without sign or fraction), rounded up or down."""
    bits = np.abs(x.astype(np.float32)).view(np.uint32)
    exponent = (bits >> 23).astype(np.int64)
    if round_mode == "up":
        exponent = np.where(((bits & 0x7FFFFF) != 0) & (exponent < 254), exponent + 1, exponent)
    return exponent.astype(np.uint8).view(target)


@operator("CastLike", shapes=same_shape, kind="first")
def _cast_like(x: np.ndarray, like: np.ndarray, *, saturate: int = 1, round_mode: str = "up") -> np.ndarray:
    return np.asarray(cast(x, to=like.dtype.name, saturate=saturate, round_mode=round_mode))


@operator("BitCast", shapes=same_shape, kind="elementwise")
def _bit_cast(x: np.ndarray, *, to: str = "") -> np.ndarray:
    return np.ascontiguousarray(x).view(dtypes.numpy_dtype(to)).reshape(x.shape)
