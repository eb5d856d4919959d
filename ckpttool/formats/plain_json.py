"""Plain data as JSON and back without loss: numbers that JSON lacks, bytes, tuples, keys of any type."""

from __future__ import annotations

import base64
import binascii
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ckpttool.core.errors import FormatError, UnsupportedError
from ckpttool.core.tree import Path, PathStep, Record

# Longer integers are written in hexadecimal, which parses in linear time.
_LONG = 64
# No more digits than Python prints, and no deeper than the state of a container can be (torch_zip.pieces).
_DIGITS, _DEPTH = 3500, 64
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_KINDS: tuple[str, ...] = ("attr", "key", "index")


def encode_value(value: Any) -> Any:
    """Return the JSON form of a plain value, a Record, or lists, tuples and dicts of them.

    A value without a JSON form becomes an object with one entry that names the type:
    `{"float": "nan"}`. Raise UnsupportedError for an integer with more digits than Python prints.
    """
    if isinstance(value, list):
        return [encode_value(item) for item in value]
    if isinstance(value, dict):
        word = "OrderedDict" if isinstance(value, OrderedDict) else "dict"
        return {word: [[encode_value(name), encode_value(item)] for name, item in value.items()]}
    if value is None or type(value) is bool:
        return value
    return _WRITERS[type(value)](value)


def _encode_text(value: str) -> Any:
    return value if is_text(value) else {"text": _base64(value.encode("utf-8", "surrogatepass"))}


def _encode_int(value: int) -> Any:
    if value.bit_length() <= _LONG:
        return value
    if value.bit_length() > 4 * (_DIGITS - len("-0x")):
        raise UnsupportedError(f"cannot record an integer of {value.bit_length():,} bits")
    return {"int": hex(value)}


_WRITERS: dict[type, Callable[[Any], Any]] = {
    str: _encode_text,
    int: _encode_int,
    float: lambda value: value if math.isfinite(value) else {"float": str(value)},
    complex: lambda value: {"complex": [encode_value(value.real), encode_value(value.imag)]},
    bytes: lambda value: {"bytes": _base64(value)},
    Record: lambda value: {"record": [encode_value(value.name), encode_value(value.summary)]},
    tuple: lambda value: {"tuple": [encode_value(item) for item in value]},
}


def is_text(value: str) -> bool:
    """Return whether the text can be encoded; an unpaired surrogate cannot."""
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def decode_value(value: Any, depth: int = _DEPTH) -> Any:
    """Return the value that `encoded` converted to this; raise FormatError for anything else."""
    if not isinstance(value, dict | list):
        return value
    if not depth:
        raise _damage_error()
    if isinstance(value, list):
        return [decode_value(item, depth - 1) for item in value]
    if len(value) != 1:
        raise _damage_error()
    ((word, inner),) = value.items()
    return _decode_text(word, inner) if isinstance(inner, str) else _decode_list(word, inner, depth - 1)


def _decode_text(word: str, text: str) -> Any:
    try:
        if word == "int" and len(text) <= _DIGITS:
            return int(text, 16)
        if word == "float":
            return _WORDS[text]
        if word == "bytes":
            return base64.b64decode(text, validate=True)
        if word == "text":
            return base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass")
    except (ValueError, KeyError, binascii.Error) as error:
        raise _damage_error() from error
    raise _damage_error()


def _decode_list(word: str, inner: Any, depth: int) -> Any:
    if not isinstance(inner, list):
        raise _damage_error()
    items = decode_value(inner, depth)
    if word == "tuple":
        return tuple(items)
    if word == "complex" and len(items) == 2 and all(type(i) is float for i in items):
        return complex(*items)
    if word == "record" and len(items) == 2 and all(isinstance(i, str) for i in items):
        return Record(*items)
    if word in ("dict", "OrderedDict") and all(isinstance(i, list) and len(i) == 2 for i in items):
        try:
            return OrderedDict(items) if word == "OrderedDict" else dict(items)
        except TypeError as error:
            raise _damage_error() from error
    raise _damage_error()


def encode_path(path: Path) -> list[Any]:
    """Return a path as JSON: text keys as strings, list indices as numbers, other keys with their type."""
    return [_encode_step(step) for step in path]


def _encode_step(step: PathStep) -> Any:
    if step.kind == "key" and type(step.value) is str and is_text(step.value):
        return step.value
    if step.kind == "index" and type(step.value) is int:
        return step.value
    return {step.kind: encode_value(step.value)}


def decode_path(steps: Any, known: dict[str, PathStep]) -> Path:
    """Return the path of `steps`; `known` caches steps, because thousands of paths share them."""
    if not isinstance(steps, list):
        raise _damage_error()
    return tuple(
        [
            known.get(s) or known.setdefault(s, PathStep("key", s)) if type(s) is str else _decode_step(s)
            for s in steps
        ]
    )


def _decode_step(step: Any) -> PathStep:
    if type(step) is int:
        return PathStep("index", step)
    if not isinstance(step, dict) or len(step) != 1:
        raise _damage_error()
    ((kind, inner),) = step.items()
    value = decode_value(inner)
    if kind not in _KINDS or not (value is None or type(value) in (str, int, float, bool)):
        raise _damage_error()
    return PathStep(kind, value)


def _damage_error() -> FormatError:
    return FormatError("the embedded tree is damaged")
