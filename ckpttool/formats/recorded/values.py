"""Plain data as JSON and back, exactly: numbers that JSON lacks, bytes, tuples, keys of any plain type."""

from __future__ import annotations

import base64
import binascii
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.leaf import Key, Path, Record

# Longer integers are spelled in hexadecimal, which is read in linear time.
_LONG = 64
# No more digits than Python prints, and no deeper than a container's state can be (formats.torch_pickle).
_DIGITS, _DEPTH = 3500, 64
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_KINDS: tuple[str, ...] = ("attr", "key", "index")


def encoded(value: Any) -> Any:
    """Return what JSON can hold for a plain value, a Record, or lists, tuples and dicts of such.

    What JSON cannot say is an object of one entry that names the type: `{"float": "nan"}`. Raise
    UnsupportedError for an integer with more digits than Python prints.
    """
    if isinstance(value, list):
        return [encoded(item) for item in value]
    if isinstance(value, dict):
        word = "OrderedDict" if isinstance(value, OrderedDict) else "dict"
        return {word: [[encoded(name), encoded(item)] for name, item in value.items()]}
    if value is None or type(value) is bool:
        return value
    return _WRITERS[type(value)](value)


def _written_text(value: str) -> Any:
    return value if is_text(value) else {"text": _base64(value.encode("utf-8", "surrogatepass"))}


def _written_int(value: int) -> Any:
    if value.bit_length() <= _LONG:
        return value
    if value.bit_length() > 4 * (_DIGITS - len("-0x")):
        raise UnsupportedError(f"an integer of {value.bit_length():,} bits is not recorded")
    return {"int": hex(value)}


_WRITERS: dict[type, Callable[[Any], Any]] = {
    str: _written_text,
    int: _written_int,
    float: lambda value: value if math.isfinite(value) else {"float": str(value)},
    complex: lambda value: {"complex": [encoded(value.real), encoded(value.imag)]},
    bytes: lambda value: {"bytes": _base64(value)},
    Record: lambda value: {"record": [encoded(value.name), encoded(value.summary)]},
    tuple: lambda value: {"tuple": [encoded(item) for item in value]},
}


def is_text(value: str) -> bool:
    """Say whether the text can be written at all: half of a surrogate pair cannot."""
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def decoded(value: Any, depth: int = _DEPTH) -> Any:
    """Return the value that `encoded` gave this; raise FormatError for anything else."""
    if not isinstance(value, dict | list):
        return value
    if not depth:
        raise _wrong()
    if isinstance(value, list):
        return [decoded(item, depth - 1) for item in value]
    if len(value) != 1:
        raise _wrong()
    ((word, inner),) = value.items()
    return _text(word, inner) if isinstance(inner, str) else _listed(word, inner, depth - 1)


def _text(word: str, text: str) -> Any:
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
        raise _wrong() from error
    raise _wrong()


def _listed(word: str, inner: Any, depth: int) -> Any:
    if not isinstance(inner, list):
        raise _wrong()
    items = decoded(inner, depth)
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
            raise _wrong() from error
    raise _wrong()


def steps(path: Path) -> list[Any]:
    """Return a path for JSON: a text key as it is, a list's index as a number, others by their kind."""
    return [_step(step) for step in path]


def _step(step: Key) -> Any:
    if step.kind == "key" and type(step.value) is str and is_text(step.value):
        return step.value
    if step.kind == "index" and type(step.value) is int:
        return step.value
    return {step.kind: encoded(step.value)}


def path_of(steps: Any, known: dict[str, Key]) -> Path:
    """Return the path of `steps`; `known` keeps the steps that were met, which thousands of paths share."""
    if not isinstance(steps, list):
        raise _wrong()
    return tuple(
        [known.get(s) or known.setdefault(s, Key("key", s)) if type(s) is str else _key(s) for s in steps]
    )


def _key(step: Any) -> Key:
    if type(step) is int:
        return Key("index", step)
    if not isinstance(step, dict) or len(step) != 1:
        raise _wrong()
    ((kind, inner),) = step.items()
    value = decoded(inner)
    if kind not in _KINDS or not (value is None or type(value) in (str, int, float, bool)):
        raise _wrong()
    return Key(kind, value)


def _wrong() -> FormatError:
    return FormatError("the recorded tree is damaged")
