"""Small JSON documents: read with a limit and an error that says what they should be, numbers JSON lacks."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from ckpttool import limits, places
from ckpttool.errors import FormatError, NotFoundError

# A text without an end reaches to the end, so that nothing is looked at twice.
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def load(file: str, what: str, limit: str = "json_bytes") -> dict[str, Any]:
    """Return the object in the file; raise FormatError if it is too large or no JSON object.

    `what` names the document in the error ("the sidecar"), `limit` the limit on its bytes.
    """
    try:
        require_small(places.getsize(file), what, limit, file)
        data = places.content(file)
    except FileNotFoundError as error:
        raise NotFoundError(f"{what} is not there", file=file) from error
    try:
        return parse(data, what, limit)
    except FormatError as error:
        raise error.located(file=file) from error.__cause__


def parse(data: bytes, what: str, limit: str = "json_bytes") -> dict[str, Any]:
    """Return the object that `data` spells; raise FormatError as `load` does.

    No value is nested deeper than the limit on levels allows, so that it can be walked by recursion.
    """
    return _object(value(data, what, limit), what)


def value(data: bytes, what: str, limit: str = "json_bytes", *, once: bool = False) -> Any:
    """Return the value, of whatever kind, that `data` spells; raise FormatError as `parse` does.

    With `once` for a name that an object has twice too: readers differ in which value they take.
    """
    require_small(len(data), what, limit)
    most = limits.current()
    _require_few(data, what, most.json_values)
    with _told(what):
        found = json.loads(data, object_pairs_hook=functools.partial(_once, what) if once else None)
    _require_shallow(found, data, what, most.json_depth)
    return found


def strict(data: bytes, what: str, limit: str = "json_bytes") -> dict[str, Any]:
    """Return the object that `data` spells, in the sense that every reader agrees on.

    Raise FormatError, besides what `parse` refuses, for text that is not UTF-8, for a name that an object has
    twice (readers differ in which value they take), for NaN and Infinity, and for half of a surrogate pair.
    Levels are for the caller to check, who knows what it expects where.
    """
    require_small(len(data), what, limit)
    _require_few(data, what, limits.current().json_values)

    def constant(word: str) -> None:
        raise FormatError(f"{what} holds {word}, which JSON lacks")

    def whole(word: str) -> int:
        # An integer to Python, and a number with a fraction to others (serde_json, JavaScript).
        if word == "-0":
            raise FormatError(f"{what} holds -0, which readers take for different numbers")
        return int(word)

    with _told(what):
        hook = functools.partial(_once, what)
        integers = whole if b"-0" in data else None
        found = json.loads(data.decode(), object_pairs_hook=hook, parse_constant=constant, parse_int=integers)
        if b"\\u" in data:
            json.dumps(found, ensure_ascii=False).encode()
    return _object(found, what)


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise limits.exceeded("json_depth", f"{what} is nested too deeply", None) from error
    except ValueError as error:
        raise FormatError(f"{what} is not JSON") from error


def _object(found: Any, what: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise FormatError(f"{what} is not a JSON object", found=type(found).__name__)
    return found


def _once(what: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise FormatError(f"{what} has two entries {_twice(pairs)!r}")
    return made


def require_small(size: int, what: str, limit: str = "json_bytes", file: str | None = None) -> None:
    """Raise LimitError if a document has more bytes than `limit` allows: asked before it is read."""
    if size > getattr(limits.current(), limit):
        raise limits.exceeded(limit, f"{what} is too large", size, file=file)


def _require_few(data: bytes, what: str, most: int) -> None:
    """Raise LimitError for more values than the limit allows: each takes a hundred bytes of memory."""
    # A value takes two bytes of text at least. Texts are left out, since they may hold commas and brackets.
    if len(data) > 2 * most:
        bare = _TEXT.sub(b"", data)
        found = sum(map(bare.count, (b",", b"[", b"{")))
        if found > most:
            raise limits.exceeded("json_values", f"{what} holds too many values", found)


def _require_shallow(found: Any, data: bytes, what: str, most: int) -> None:
    if data.count(b"[") + data.count(b"{") <= most:
        return
    level: list[Any] = [found]
    for _ in range(most):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
        if not level:
            return
    raise limits.exceeded("json_depth", f"{what} is nested too deeply", most + 1)


def _twice(pairs: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            return name[:200]
        seen.add(name)
    return ""


def finite(value: float) -> float | str:
    """Return the number, or the word that stands for one that JSON lacks: NaN, Infinity, -Infinity."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def plain(value: Any) -> Any:
    """Return a document without numbers that JSON lacks; see `finite`."""
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
