"""Small JSON documents: read with a limit and an error that says what they should be, numbers JSON lacks."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from ckpttool.errors import FormatError


def load(file: str, what: str, limit: int) -> dict[str, Any]:
    """Return the object in the file; raise FormatError if it is larger than `limit` bytes or no JSON object.

    `what` names the document in the error ("the sidecar").
    """
    if os.path.getsize(file) > limit:
        raise FormatError(f"the file is too large for {what}", file=file, expected=f"at most {limit:,} bytes")
    with open(file, "rb") as stream:
        data = stream.read()
    try:
        return parse(data, what, limit)
    except FormatError as error:
        raise error.located(file=file) from error.__cause__


def parse(data: bytes, what: str, limit: int) -> dict[str, Any]:
    """Return the object that `data` spells; raise FormatError as `load` does."""
    if len(data) > limit:
        raise FormatError(f"{what} is too large", expected=f"at most {limit:,} bytes", found=f"{len(data):,}")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not JSON") from error
    if not isinstance(found, dict):
        raise FormatError(f"{what} is not a JSON object", found=type(found).__name__)
    return found


def strict(data: bytes, what: str, limit: int) -> dict[str, Any]:
    """Return the object that `data` spells, in the sense that every reader agrees on.

    Raise FormatError, besides what `parse` refuses, for text that is not UTF-8, for a name that an object has
    twice (readers differ in which value they take), for NaN and Infinity, and for half of a surrogate pair.
    """
    if len(data) > limit:
        raise FormatError(f"{what} is too large", expected=f"at most {limit:,} bytes", found=f"{len(data):,}")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise FormatError(f"{what} has two entries {_twice(pairs)!r}")
        return made

    def constant(word: str) -> None:
        raise FormatError(f"{what} holds {word}, which JSON lacks")

    try:
        found = json.loads(data.decode(), object_pairs_hook=once, parse_constant=constant)
        if b"\\u" in data:
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not JSON") from error
    if not isinstance(found, dict):
        raise FormatError(f"{what} is not a JSON object", found=type(found).__name__)
    return found


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
