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


def finite(value: float) -> float | str:
    """Return the number, or the word that stands for one that JSON lacks: NaN, Infinity, -Infinity."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
