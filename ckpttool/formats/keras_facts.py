"""Plain facts of a Keras object's configuration: numbers, words, short lists of them. No class is looked up.

Every TensorFlow and Keras format that stores configurations stores them as JSON of one form,
`{"class_name": CLASS, "config": SETTINGS}` (keras/src/saving/serialization_lib.py,
keras/src/legacy/saving/serialization.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_TEXT = 200  # characters; a Lambda layer's code is longer, and no fact that a person reads
MAX_ITEMS = 64
_RATE = "learning_rate"
_REGULARIZER = "_regularizer"


def class_of(name: object) -> str | None:
    """Return a class's own name (a registered one is spelled `Package>Class`), None if it is no name."""
    if not isinstance(name, str) or len(name) > MAX_TEXT:
        return None
    return name.rpartition(">")[2]


def facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain facts among an object's settings; its name comes first and is called `layer`."""
    name = settings.get("name")
    found: dict[str, Any] = {"layer": name} if isinstance(name, str) and len(name) <= MAX_TEXT else {}
    for key, value in settings.items():
        fact = _fact(value)
        if fact is not None and key not in ("name", "layers") and len(key) <= MAX_TEXT:
            found[key] = fact
            if key.endswith(_REGULARIZER) and (factor := _l2(value)) is not None:
                found[f"{key}_l2"] = factor
            if key == _RATE and (first := _initial(value)) is not None:
                found[f"{key}_initial"] = first
    return found


def _l2(value: Any) -> float | None:
    """Return the factor of an L2 penalty, None for any other (keras/src/regularizers/regularizers.py)."""
    config = value.get("config") if isinstance(value, dict) else None
    factors = config if isinstance(config, dict) else {}
    factor = _plain(factors.get("l2"))
    return factor if isinstance(factor, float) and not factors.get("l1") else None


def _initial(value: Any) -> float | None:
    """Return the first rate of a schedule (keras/src/optimizers/schedules/learning_rate_schedule.py)."""
    config = value.get("config") if isinstance(value, dict) else None
    first = _plain(config.get("initial_learning_rate")) if isinstance(config, dict) else None
    return first if isinstance(first, float) else None


def _fact(value: Any) -> Any:
    if isinstance(value, dict):
        return _of_object(value)
    if isinstance(value, list):
        items = [_plain(item) for item in value[: MAX_ITEMS + 1]]
        known = all(item is not None or was is None for item, was in zip(items, value, strict=False))
        return items if known and len(items) <= MAX_ITEMS else None
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        # JSON has no infinities, and yet Python reads them from it.
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else None
    return value if isinstance(value, bool | int) else None


def _of_object(value: Mapping[str, Any]) -> Any:
    cls, inner = value.get("class_name"), value.get("config")
    if cls == "__tuple__":
        items = value.get("items")
        return _fact(items) if isinstance(items, list) else None
    # A dtype policy or an activation by its name, an initializer by its class.
    name = inner.get("name") if isinstance(inner, dict) else inner
    return _plain(name) if isinstance(name, str) else class_of(cls)
