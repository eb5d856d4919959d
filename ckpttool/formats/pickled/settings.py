"""Settings as JSON with a base64 pickle for whatever JSON lacks, as Stable-Baselines 2 and 3 keep them.

Sources: github.com/hill-a/stable-baselines, stable_baselines/common/save_util.py (`data_to_json`), and
github.com/DLR-RM/stable-baselines3, stable_baselines3/common/save_util.py (the same function).
"""

from __future__ import annotations

import binascii
from typing import Any

from ckpttool import documents
from ckpttool.errors import FormatError
from ckpttool.formats.pickled.load import load
from ckpttool.source import Storage
from ckpttool.wire.asked import Asked, standing

SERIALIZED = ":serialized:"


def parsed(source: Storage, name: str) -> Any:
    """Return what a member of JSON spells; raise FormatError when it is too large, ambiguous or no JSON."""
    what = f"member {name!r}"
    documents.require_small(source.length, what)
    return documents.value(bytes(source.read()), what, once=True)


def settings(source: Storage, name: str, file: str, told: list[Asked]) -> dict[str, Any]:
    """Return the settings in member `name` of `file`, serialized objects as their pickles' inert values.

    `told` gets what unpickling these would import and call.
    """
    data = parsed(source, name)
    if not isinstance(data, dict):
        raise FormatError(f"member {name!r} is no dict")
    return {setting: _setting(value, setting, name, file, told) for setting, value in data.items()}


def _setting(value: Any, setting: str, name: str, file: str, told: list[Asked]) -> Any:
    if not isinstance(value, dict) or not isinstance(value.get(SERIALIZED), str):
        return value
    try:
        pickled = binascii.a2b_base64(value[SERIALIZED], strict_mode=True)
    except ValueError as error:
        raise FormatError(f"{setting!r} in {name!r} is not base64: {error}") from error
    try:
        found = load(pickled, None, name=file)
    except FormatError as error:
        raise error.located(path=f"{name}/{setting}") from error.__cause__
    told += standing(found.asked, f"{name}/{setting}")
    return found.value
