"""Read a sidecar: a JSON document whose every value is checked before use."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, get_args

from ckpttool.core import deferred, text
from ckpttool.core.errors import FormatError
from ckpttool.core.sidecar import LARGEST, SCHEMA, Scores, Sidecar


def read_sidecar(file: str) -> Sidecar:
    """Return the sidecar in a file of any name; raise FormatError if it is damaged or not a sidecar."""
    return _parse_sidecar(text.load_json(file, "the sidecar", "sidecar_bytes"), file)


def _parse_sidecar(record: Mapping[str, Any], file: str) -> Sidecar:
    if record.get("schema") != SCHEMA:
        shown = str(record.get("schema"))[:40]
        raise FormatError("unsupported sidecar schema", file=file, expected=str(SCHEMA), found=shown)
    for name, allowed in _TYPES.items():
        if record.get(name) is not None and not allowed(record[name]):
            raise FormatError(f"the sidecar's {name} has an invalid value", file=file, path=name)
    low, high = record.get("action_low") or (), record.get("action_high") or ()
    if len(low) != len(high) or any(a > b for a, b in zip(low, high, strict=True)):
        raise FormatError("the sidecar's action bounds are inconsistent", file=file, path="action_low")
    if not isinstance(record.get("target_sha256"), str):
        raise FormatError("the sidecar has no target_sha256", file=file)
    known = {name: record[name] for name in Sidecar.__dataclass_fields__ if record.get(name) is not None}
    return Sidecar(**known)


def _is_numbers(value: object) -> bool:
    return isinstance(value, list) and all(_is_number(item) for item in value)


def _is_number(value: object) -> bool:
    # Networks compute in float32: a value outside its range is not a valid bound or statistic.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_settings(value: object) -> bool:
    if not isinstance(value, dict) or not all(isinstance(settings, dict) for settings in value.values()):
        return False
    return all(
        v is None or isinstance(v, bool | str) or _is_number(v)
        for settings in value.values()
        for v in settings.values()
    )


def _is_objects(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("graph"), str):
        return False
    keys = value.get("keys")
    texts = isinstance(keys, dict) and all(isinstance(key, str) for key in keys.values())
    return texts and isinstance(value.get("read"), bool)


def _is_env(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return all(
        are_arguments(part)
        if name == "arguments"
        else _is_wrappers(part)
        if name == "wrappers"
        else part is None or isinstance(part, str)
        for name, part in value.items()
    )


def _is_wrappers(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(wrapper, dict)
        and isinstance(wrapper.get("name"), str)
        and _is_plain_mapping(wrapper.get("arguments", {}))
        for wrapper in value
    )


# Environment arguments that a file may set: numbers, and lists of numbers.
_MOST_ARGUMENTS, _MOST_NUMBERS, _DEEPEST = 32, 1_000, 4
_LARGEST_INTEGER = 1_000_000
_ARGUMENT = deferred.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}", re.ASCII)


def is_argument(value: object) -> bool:
    """Return whether a file may set this environment argument: None, numbers, short nested lists.

    A string may name a file, and a large integer may be a count of steps or bytes.
    """
    numbers = _count_plain_values(value)
    return numbers is not None and numbers <= _MOST_NUMBERS


def are_arguments(value: object) -> bool:
    """Return whether a file may set these arguments of an environment."""
    return (
        isinstance(value, dict)
        and len(value) <= _MOST_ARGUMENTS
        and all(isinstance(name, str) and _ARGUMENT.fullmatch(name) for name in value)
        and all(map(is_argument, value.values()))
    )


def _count_plain_values(value: object, depth: int = 0) -> int | None:
    """Return the number of plain values, or None if any other value is among them."""
    if isinstance(value, list | tuple):
        if depth == _DEEPEST or len(value) > _MOST_NUMBERS:
            return None
        counts = [_count_plain_values(item, depth + 1) for item in value]
        return None if None in counts else 1 + sum(count for count in counts if count is not None)
    if value is None or isinstance(value, bool):
        return 1
    whole = isinstance(value, int) and abs(value) <= _LARGEST_INTEGER
    return 1 if whole or (isinstance(value, float) and math.isfinite(value)) else None


def _is_plain_mapping(value: object) -> bool:
    def plain(item: object) -> bool:
        return item is None or isinstance(item, bool | str) or _is_number(item) or _is_numbers(item)

    return isinstance(value, dict) and all(map(plain, value.values()))


def _is_choices(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {"counts", "starts", "scores", "support", "single"}:
        return False
    counts, starts = value["counts"], value["starts"]
    whole = all(
        isinstance(numbers, list) and all(type(n) is int and abs(n) <= _LARGEST_INTEGER for n in numbers)
        for numbers in (counts, starts)
    )
    return (
        whole
        and 0 < len(counts) == len(starts) <= _MOST_NUMBERS
        and min(counts) > 0
        and value["scores"] in get_args(Scores)
        and _is_numbers(value["support"])
        and value["scores"].endswith("atoms") == bool(value["support"])
        and (value["single"] is False or (value["single"] is True and len(counts) == 1))
    )


_DISTRIBUTION = {
    "kind": ("categorical", "gaussian", "gsde"),
    "limited": ("clip", "tanh", "sigmoid"),
    "place": ("mean", "action", "unit"),
}


def _is_distribution(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {*_DISTRIBUTION, "limits", "assumed"}:
        return False
    limits = value["limits"]
    ordered = limits is None or (_is_numbers(limits) and len(limits) == 2 and limits[0] < limits[1])
    known = all(value[name] in allowed for name, allowed in _DISTRIBUTION.items())
    return ordered and known and isinstance(value["assumed"], str)


def _is_space(value: object) -> bool:
    parts = value.get("parts") if isinstance(value, dict) and isinstance(value.get("library"), str) else None
    return isinstance(parts, dict) and all(
        isinstance(part, dict)
        and {*part} == {"low", "high"}
        and all(
            isinstance(row, list) and row and all(bound is None or _is_number(bound) for bound in row)
            for row in part.values()
        )
        for part in parts.values()
    )


def _is_norm(value: object) -> bool:
    if not isinstance(value, dict) or not _is_numbers(value.get("mean")) or not _is_numbers(value.get("var")):
        return False
    if any(variance < 0 for variance in value["var"]) or len(value["mean"]) != len(value["var"]):
        return False
    parts = value.get("parts", {})
    if not isinstance(parts, dict) or not all(type(size) is int and size > 0 for size in parts.values()):
        return False
    if parts and sum(parts.values()) != len(value["mean"]):
        return False
    if value.get("clip") is not None and not (_is_number(value["clip"]) and value["clip"] > 0):
        return False
    return value.get("epsilon") is None or (_is_number(value["epsilon"]) and value["epsilon"] >= 0)


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "source": lambda v: isinstance(v, dict),
    "rules": lambda v: isinstance(v, list),
    "assumed": _is_texts,
    "env": _is_env,
    "obs_dim": lambda v: isinstance(v, int) and not isinstance(v, bool) and v > 0,
    "action_low": _is_numbers,
    "action_high": _is_numbers,
    "choices": _is_choices,
    "distribution": _is_distribution,
    "observation_space": _is_space,
    "head": lambda v: isinstance(v, str),
    "activations": _is_texts,
    "network_activations": lambda v: isinstance(v, dict) and all(n and _is_texts(n) for n in v.values()),
    "obs_norm": _is_norm,
    "epsilon": lambda v: isinstance(v, dict) and all(map(_is_number, v.values())),
    "optimizers": _is_settings,
    "objects": _is_objects,
    "stripped": lambda v: isinstance(v, list) and all(isinstance(item, dict) for item in v),
    "computation": lambda v: isinstance(v, dict) and {*map(type, v.values())} <= {str} and "origin" in v,
    "parity": lambda v: isinstance(v, list) and all(isinstance(item, dict) for item in v),
    "verification": lambda v: isinstance(v, dict) and isinstance(v.get("verified"), bool),
    "provenance": lambda v: isinstance(v, dict),
    "residue": lambda v: isinstance(v, list) and all(isinstance(item, dict) for item in v),
    "undo": lambda v: isinstance(v, dict),
}
